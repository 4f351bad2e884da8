"""Rules of linear algebra and of Fourier transforms: batches of matrices, or of rows, that are whole on each rank."""

from __future__ import annotations

from torch import fx

from autoshard.program import operands, shape_of
from autoshard.rules.call import argument, bind_node, dims, each, positive, result_shapes
from autoshard.rules.notation import OpRule


def matrices(*results: int, saved: tuple[int, ...] = (0, -1)):
    """Ops on a batch of matrices. ``results``: of each result, how many dims are not the batch's (empty results have none)."""

    def rule(node: fx.Node) -> OpRule:
        out = ["_" if s == (0,) else f"... {_whole(n, f'r{i}')}" for i, (n, s) in enumerate(zip(results, result_shapes(node)))]
        return bind_node(node, f"... {_whole(2, 'a')} -> {', '.join(out)}", saved=saved)

    return rule


def _whole(n: int, prefix: str) -> str:
    return " ".join(dims(n, range(n), prefix))


def solve(node: fx.Node) -> OpRule:
    """a @ x = b, or x @ a = b: one side of b is independent. A batch of vectors b has none. Linear in b."""
    a, b = (len(shape_of(x)) for x in operands(node))
    vectors = b == a - 1 or b == 1
    text = "n^" if vectors else "n^ k" if argument(node, "left") else "k n^"
    return bind_node(node, f"... n^ n^, ... {text} -> ... {text}", saved=(0, -1), linear=(frozenset({1}),))


def solve_for_first(node: fx.Node) -> OpRule:
    """cholesky_solve and triangular_solve take b first, in which they are linear; the latter also returns its matrix."""
    if len(result_shapes(node)) == 2:
        return bind_node(node, "... n^ k, ... n^ n^ -> ... n^ k, ... n^ n^", saved=(1, -1), fixed=["k"])
    return bind_node(node, "... n^ k, ... n^ n^ -> ... n^ k", saved=(1, -1), linear=(frozenset({0}),))


def fourier(node: fx.Node) -> OpRule:
    """Transformed dims are whole, and may get longer or shorter."""
    rank = len(shape_of(operands(node)[0]))
    names = [a.name for a in node.target._schema.arguments]
    asked = argument(node, "dim")
    if asked is None:
        sizes = argument(node, "s") if "s" in names else None
        asked = range(rank - len(sizes), rank) if sizes else range(rank)
    whole = {positive(d, rank) for d in ([asked] if isinstance(asked, int) else asked)}
    before = [f"before{d}^" if d in whole else f"d{d}" for d in range(rank)]
    after = [f"after{d}^" if d in whole else f"d{d}" for d in range(rank)]
    return bind_node(node, f"{' '.join(before)} -> {' '.join(after)}", linear=(frozenset({0}),))


def kron(node: fx.Node) -> OpRule:
    """Each dim of the result is ``(a b)``: one of the first matrix, one of the second inside it."""
    ranks = [len(shape_of(x)) for x in operands(node)]
    rank = max(ranks)
    first, second = (["_"] * (rank - n) + dims(n, prefix=p) for n, p in zip(ranks, "ab"))
    pairs = [f"({a} {b})" if "_" not in (a, b) else b if a == "_" else a for a, b in zip(first, second)]
    texts = [" ".join(t for t in tokens if t != "_") for tokens in (first, second)]
    return bind_node(node, f"{', '.join(texts)} -> {' '.join(pairs)}", saved=(0, 1), linear=(frozenset({0}), frozenset({1})))


TABLE = {
    **each("inverse linalg_inv matrix_exp linalg_matrix_exp linalg_matrix_power matrix_power linalg_cholesky cholesky "
           "linalg_pinv linalg_pinv.atol_rtol_float", matrices(2)),
    **each("linalg_det det logdet", matrices(0)),
    **each("linalg_slogdet slogdet", matrices(0, 0)),
    **each("linalg_eigh", matrices(1, 2, saved=(-1, -2))),
    **each("linalg_eigvalsh linalg_svdvals", matrices(1)),
    **each("linalg_svd", matrices(2, 1, 2, saved=(-1, -2, -3))),
    **each("linalg_qr", matrices(2, 2, saved=(-1, -2))),
    **each("linalg_lu", matrices(2, 2, 2, saved=(-1, -2, -3))),
    **each("linalg_solve linalg_solve_triangular", solve),
    **each("cholesky_solve triangular_solve", solve_for_first),
    **each("fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2 fft_fftn fft_ifftn fft_rfftn "
           "fft_irfftn fft_fftshift fft_ifftshift", fourier),
    **each("kron", kron),
}  # fmt: skip
