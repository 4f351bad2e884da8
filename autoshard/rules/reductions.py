"""Rules of reductions: sums and means over a sharded dim are summands; all other reductions need their dims whole.

A mean over a sharded dim runs the local kernel "mean": the sum, divided by the count of the whole dim.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from autoshard.program import operands, shape_of
from autoshard.rules.call import argument, bind_node, dims, each, positive, result_shapes
from autoshard.rules.notation import OpRule

THROUGH = (frozenset({0}),)


def _reduced(node: fx.Node) -> tuple[set[int], bool]:
    """The dims that are reduced, and whether they stay as dims of size 1."""
    rank = len(shape_of(operands(node)[0]))
    names = [a.name for a in node.target._schema.arguments]
    asked = argument(node, "dim") if "dim" in names else None
    if asked is None or asked == [] or asked == ():
        asked = range(rank)
    keep = bool("keepdim" in names and argument(node, "keepdim"))
    return {positive(d, rank) for d in ([asked] if isinstance(asked, int) else asked)}, keep


def reduction(node: fx.Node, fixed: bool, **extra) -> OpRule:
    """Reduced dims vanish or become ``_``; they are summed, or fixed."""
    rank = len(shape_of(operands(node)[0]))
    gone, keep = _reduced(node)
    names = dims(rank, gone if fixed else ())
    out = [("_" if keep else "") if d in gone else t for d, t in enumerate(names)]
    results = ", ".join([" ".join(t for t in out if t)] * len(result_shapes(node)))
    return bind_node(node, f"{' '.join(names)} -> {results}", **extra)


def total(node: fx.Node) -> OpRule:
    return reduction(node, fixed=False, linear=THROUGH)


def mean(node: fx.Node) -> OpRule:
    gone, _ = _reduced(node)
    return reduction(node, fixed=False, linear=THROUGH, local={f"d{d}": "mean" for d in sorted(gone)})


def saves(*saved: int):
    """A reduction that mixes its dims in some other way than adding, of which backward reads these values."""
    return lambda node: reduction(node, fixed=True, saved=saved)


def same_shape(saved: Iterable[int] = (), linear: bool = False):
    """An op along one dim that keeps it: softmax, cumsum, sort, ... Without a dim argument all of them are fixed."""

    def rule(node: fx.Node) -> OpRule:
        rank = len(shape_of(operands(node)[0]))
        names = [a.name for a in node.target._schema.arguments]
        dim = argument(node, "dim") if "dim" in names else None
        text = " ".join(dims(rank, range(rank) if dim is None else [positive(dim, rank)] if rank else ()))
        out = ", ".join([text] * len(result_shapes(node)))
        return bind_node(node, f"{text} -> {out}", saved=tuple(saved), linear=THROUGH if linear else ())

    return rule


def topk(node: fx.Node) -> OpRule:
    """The dim is fixed and gets shorter."""
    rank = len(shape_of(operands(node)[0]))
    dim = positive(argument(node, "dim"), rank)
    names = dims(rank, [dim])
    out = list(names)
    out[dim] = "k^"
    return bind_node(node, f"{' '.join(names)} -> {' '.join(out)}, {' '.join(out)}", saved=(-2,))


def histc(node: fx.Node) -> OpRule:
    """Counts add up, if the range is given; otherwise it depends on the whole."""
    given = argument(node, "min") != argument(node, "max")
    names = dims(len(shape_of(operands(node)[0])), () if given else range(8))
    return bind_node(node, f"{' '.join(names)} -> bins^")


TABLE = {
    **each("sum sum.dim_IntList", total),
    **each("nansum count_nonzero count_nonzero.dim_IntList", lambda node: reduction(node, fixed=False)),
    **each("mean mean.dim", mean),
    **each("amax amin max max.dim min min.dim logsumexp prod prod.dim_int median median.dim mode kthvalue "
           "norm.Scalar norm.ScalarOpt_dim linalg_vector_norm linalg_norm quantile.scalar special_logsumexp", saves(0, -1)),
    **each("var var.dim var.correction std std.dim std.correction var_mean var_mean.dim var_mean.correction "
           "std_mean std_mean.dim std_mean.correction aminmax", saves(0)),
    **each("argmax argmin any any.dim any.dims all all.dim all.dims", saves()),
    **each("softmax.int _softmax log_softmax.int _log_softmax special_softmax special_log_softmax", same_shape(saved=(-1,))),
    **each("cumsum", same_shape(linear=True)),
    **each("cumprod logcumsumexp", same_shape(saved=(0, -1))),
    **each("cummax cummin sort sort.stable", same_shape(saved=(-2,))),
    **each("argsort argsort.stable", same_shape()),
    **each("topk", topk),
    **each("histc", histc),
}  # fmt: skip
