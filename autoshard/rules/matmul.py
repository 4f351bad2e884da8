"""Rules of products: the contracted factor is summed, a bias is additive, flops are counted on the whole shapes.

Partial sums pass through either operand (with the bias, if there is one): a low-rank adapter may carry its summands through.
"""

from __future__ import annotations

from math import prod

from torch import fx

from autoshard.errors import RuleError
from autoshard.program import operands, shape_of, where
from autoshard.rules.call import argument, aten, bind_named, bind_node, dims, each, needs_grad, operand_names, positive, result_shapes
from autoshard.rules.notation import OpRule

OF_WEIGHTS = (aten("linear"), aten("addmm"))
"""Products whose right side is a weight, which is never a summand."""


def product(node: fx.Node, specs: dict[str, str], result: str, left: str, right: str, bias: str = "", inner: int = 0) -> OpRule:
    """A product of the operands ``left`` and ``right``; ``inner`` is the size that is summed over."""
    saved = [name for name, other in ((left, right), (right, left)) if needs_grad(argument(node, other))]
    sides = [left] if bias and node.target in OF_WEIGHTS else [left, right]
    linear = [(side, bias) if bias else (side,) for side in sides]
    return bind_named(node, specs, result, saved=saved, linear=linear, flops=2.0 * prod(result_shapes(node)[0]) * inner)


def linear(node: fx.Node) -> OpRule:
    """x @ weight.T + bias."""
    weight = shape_of(operands(node)[1])
    if len(weight) == 1:
        return product(node, {"input": "... k", "weight": "k", "bias": "+"}, "...", "input", "weight", "bias", weight[-1])
    specs = {"input": "... k", "weight": "n k", "bias": "+n"}
    return product(node, specs, "... n", "input", "weight", "bias", weight[-1])


def addmm(node: fx.Node) -> OpRule:
    """bias + a @ b; the bias is broadcast."""
    return _plus(node, {"self": "m n", "mat1": "m k", "mat2": "k n"}, "m n", "mat1", "mat2")


def addmv(node: fx.Node) -> OpRule:
    return _plus(node, {"self": "m", "mat": "m k", "vec": "k"}, "m", "mat", "vec")


def baddbmm(node: fx.Node) -> OpRule:
    return _plus(node, {"self": "b m n", "batch1": "b m k", "batch2": "b k n"}, "b m n", "batch1", "batch2")


def addbmm(node: fx.Node) -> OpRule:
    """The batch is summed as well."""
    return _plus(node, {"self": "m n", "batch1": "b m k", "batch2": "b k n"}, "m n", "batch1", "batch2")


def addr(node: fx.Node) -> OpRule:
    return _plus(node, {"self": "m n", "vec1": "m", "vec2": "n"}, "m n", "vec1", "vec2")


def _plus(node, specs, result, left, right) -> OpRule:
    rank = len(shape_of(operands(node)[0]))
    own = specs["self"].split()
    specs = {**specs, "self": "+" + " ".join(own[len(own) - rank :])}  # a bias of lower rank is broadcast from the left
    size = shape_of(argument(node, left))
    inner = size[-1] * (size[0] if left == "batch1" and len(own) == 2 else 1) if left != "vec1" else 1
    return product(node, specs, result, left, right, "self", inner)


def matmul(node: fx.Node) -> OpRule:
    """Every rank: vectors, matrices, broadcast batches."""
    a, b = (len(shape_of(n)) for n in operands(node))
    left, right = operand_names(node)
    first = "k" if a == 1 else "m k" if b == 1 and a == 2 else "... m k"
    second = "k" if b == 1 else "... k n"
    result = ("..." if max(a, b) > 2 else "") + (" m" if a > 1 else "") + (" n" if b > 1 else "")
    return product(node, {left: first, right: second}, result, left, right, inner=shape_of(operands(node)[0])[-1])


def contraction(first: str, second: str, result: str):
    """A rule of fixed ranks."""

    def rule(node: fx.Node) -> OpRule:
        left, right = operand_names(node)
        inner = shape_of(operands(node)[0])[-1] if "k" in first else 1
        return product(node, {left: first, right: second}, result, left, right, inner=inner)

    return rule


def einsum(node: fx.Node) -> OpRule:
    """The equation is the rule: letters are factors, absent from the result they are summed, twice in one operand they are fixed."""
    equation = argument(node, "equation").replace(" ", "")
    inputs, arrow, output = equation.partition("->")
    terms = inputs.split(",")
    if not arrow:
        letters = sorted({c for c in inputs if c.isalpha()})
        output = ("..." if "..." in inputs else "") + "".join(c for c in letters if inputs.count(c) == 1)
    if any(not c.isalpha() and c not in ".," for c in inputs):
        raise RuleError(f"can't read the einsum equation {equation!r}", where=where(node))
    double = {c for term in terms for c in term if c != "." and term.count(c) > 1}

    def tokens(term: str) -> str:
        term = term.replace("...", "~")
        return " ".join("..." if c == "~" else f"{c}^" if c in double else c for c in term)

    text = f"{', '.join(map(tokens, terms))} -> {tokens(output)}"
    n = len(terms)
    saved = tuple(i for i in range(n) if n > 1 and any(needs_grad(o) for j, o in enumerate(operands(node)) if j != i))
    rule = bind_node(node, text, saved=saved, linear=tuple(frozenset({i}) for i in range(n)))
    volume = prod(rule.sizes.values()) if n > 1 else 0
    return bind_node(node, text, saved=rule.saved, linear=rule.linear, flops=2.0 * volume * max(n - 1, 0))


def tensordot(node: fx.Node) -> OpRule:
    """Contracts dims_self of one with dims_other of the other, pair by pair."""
    a, b = (len(shape_of(n)) for n in operands(node))
    pairs = [(positive(x, a), positive(y, b)) for x, y in zip(argument(node, "dims_self"), argument(node, "dims_other"))]
    first, second = dims(a, prefix="m"), dims(b, prefix="n")
    for i, (x, y) in enumerate(pairs):
        first[x] = second[y] = f"k{i}"
    kept = [t for t in first + second if not t.startswith("k")]
    left, right = operand_names(node)
    inner = prod(shape_of(operands(node)[0])[x] for x, _ in pairs)
    return product(node, {left: " ".join(first), right: " ".join(second)}, " ".join(kept), left, right, inner=inner)


def bilinear(node: fx.Node) -> OpRule:
    """x1 and x2 meet in ``weight``: both inner dims are summed."""
    a, b, out = shape_of(operands(node)[0]), shape_of(operands(node)[1]), result_shapes(node)[0]
    specs = {"input1": "... i", "input2": "... j", "weight": "o i j", "bias": "+o"}
    return bind_named(node, specs, "... o", saved=("input1", "input2", "weight"), flops=2.0 * prod(out) * a[-1] * (b[-1] + 1))


def grouped_mm(node: fx.Node) -> OpRule:
    """Rows of ``input``, sorted by expert, each times its expert's matrix; ``offs`` says where each expert's rows end."""
    rows, k = shape_of(operands(node)[0])
    names = operand_names(node)
    specs = dict(zip(names, ("rows^ k", "experts^ k n", "experts^")))
    flops = 2.0 * rows * k * result_shapes(node)[0][-1]
    return bind_named(node, specs, "rows^ n", saved=names, linear=[names[:1], names[1:2]], flops=flops)


TABLE = {
    **each("linear", linear),
    **each("addmm", addmm),
    **each("addmv", addmv),
    **each("baddbmm", baddbmm),
    **each("addbmm", addbmm),
    **each("addr", addr),
    **each("matmul", matmul),
    **each("mm", contraction("m k", "k n", "m n")),
    **each("bmm", contraction("b m k", "b k n", "b m n")),
    **each("mv", contraction("m k", "k", "m")),
    **each("dot vdot", contraction("k", "k", "")),
    **each("outer ger", contraction("m", "n", "m n")),
    **each("einsum", einsum),
    **each("tensordot", tensordot),
    **each("bilinear", bilinear),
}

NAMED = {"transformers::grouped_mm_fallback": grouped_mm}
"""Ops outside ATen, known by name: their libraries may not be installed."""
