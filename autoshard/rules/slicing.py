"""Rules of ops that take pieces of dims or put them together: slice, select, cat, stack, pad, flip, roll, scatter variants.

A slice or a concatenation along a dim sees it as blocks of equal size, "(c^ x)": the pieces are whole blocks, so sharding x cuts
every block (placement S(d/c)) and each rank slices its own blocks. That is how a fused query-key-value dim is sharded by heads.
"""

from __future__ import annotations

from math import gcd

from torch import fx

from autoshard.program import operands, shape_of
from autoshard.rules.call import argument, bind_node, dims, each, positive, result_shapes, unsharded
from autoshard.rules.notation import OpRule

THROUGH = (frozenset({0}),)
BOTH = (frozenset({0, 1}),)


def blocks(size: int, block: int, name: str, x: str = "x") -> str:
    """The token of a dim of ``size`` made of blocks of size ``block``."""
    return x if size == block else f"({name}^ {x})"


def take(node: fx.Node, dim: int, start: int, length: int, step: int = 1) -> OpRule:
    """A range of one dim. Whole: the dim is an ordinary factor. Whole blocks: see the module. Otherwise the dim is fixed."""
    before = shape_of(operands(node)[0])
    names = dims(len(before))
    out = list(names)
    size = before[dim]
    block = gcd(start, length, size)
    if step == 1 and block > 1 and length < size:
        names[dim], out[dim] = blocks(size, block, "blocks"), blocks(length, block, "taken")
    elif step != 1 or length != size:
        names[dim], out[dim] = "whole^", "part^"
    return bind_node(node, f"{' '.join(names)} -> {' '.join(out)}", known={"x": block}, linear=THROUGH)


def slice_(node: fx.Node) -> OpRule:
    before = shape_of(operands(node)[0])
    dim = positive(argument(node, "dim"), len(before))
    size = before[dim]
    start = argument(node, "start") or 0
    start = min(max(start + size if start < 0 else start, 0), size)
    return take(node, dim, start, result_shapes(node)[0][dim], argument(node, "step"))


def narrow(node: fx.Node) -> OpRule:
    before = shape_of(operands(node)[0])
    dim = positive(argument(node, "dim"), len(before))
    return take(node, dim, positive(argument(node, "start"), before[dim]), argument(node, "length"))


def select(node: fx.Node) -> OpRule:
    """One index of a dim, which is fixed and vanishes."""
    rank = len(shape_of(operands(node)[0]))
    dim = positive(argument(node, "dim"), rank)
    names = dims(rank, [dim])
    return bind_node(node, f"{' '.join(names)} -> {' '.join(names[:dim] + names[dim + 1 :])}", linear=THROUGH)


def cat(node: fx.Node) -> OpRule:
    return joined(node, argument(node, "dim"))


def hstack(node: fx.Node) -> OpRule:
    return joined(node, 1 if len(result_shapes(node)[0]) > 1 else 0)


def joined(node: fx.Node, dim: int) -> OpRule:
    """Pieces are whole blocks of the greatest common size; without one the dim is fixed. Old-style empty operands hold nothing."""
    shapes = [shape_of(n) for n in operands(node)]
    after = result_shapes(node)[0]
    rank = len(after)
    dim = positive(dim, rank)
    real = [len(s) == rank and s != (0,) for s in shapes]
    block = gcd(*(s[dim] for s, r in zip(shapes, real) if r))
    names = dims(rank)
    texts = []
    for i, (s, r) in enumerate(zip(shapes, real)):
        token = blocks(s[dim], block, f"c{i}") if block > 1 and r else f"c{i}^"
        texts.append(" ".join(names[:dim] + [token] + names[dim + 1 :]) if r else "_")
    token = blocks(after[dim], block, "blocks") if block > 1 else "whole^"
    result = " ".join(names[:dim] + [token] + names[dim + 1 :])
    return bind_node(node, f"{', '.join(texts)} -> {result}", known={"x": block}, linear=(frozenset(range(len(shapes))),))


def stack(node: fx.Node) -> OpRule:
    n = len(operands(node))
    rank = len(result_shapes(node)[0]) - 1
    names = dims(rank)
    out = list(names)
    out.insert(positive(argument(node, "dim"), rank + 1), "new^")
    return bind_node(node, f"{', '.join([' '.join(names)] * n)} -> {' '.join(out)}", linear=(frozenset(range(n)),))


def pad(node: fx.Node) -> OpRule:
    """Padded dims are fixed. Padding with 0, or with the tensor's own values, is linear."""
    rank = len(shape_of(operands(node)[0]))
    arguments = {a.name for a in node.target._schema.arguments}
    widths = argument(node, "pad" if "pad" in arguments else "padding")
    padded = {rank - 1 - i // 2 for i, width in enumerate(widths) if width}
    names = [f"before{d}^" if d in padded else f"d{d}" for d in range(rank)]
    out = [f"after{d}^" if d in padded else f"d{d}" for d in range(rank)]
    adds_number = "value" in arguments and argument(node, "value")
    return bind_node(node, f"{' '.join(names)} -> {' '.join(out)}", linear=() if adds_number else THROUGH)


def fixed_dims(node: fx.Node, wanted) -> OpRule:
    """Same shape out, these dims fixed, the rest ordinary, linear."""
    rank = len(shape_of(operands(node)[0]))
    text = " ".join(dims(rank, [positive(d, rank) for d in wanted]))
    return bind_node(node, f"{text} -> {text}", linear=THROUGH)


def flip(node: fx.Node) -> OpRule:
    return fixed_dims(node, argument(node, "dims"))


def roll(node: fx.Node) -> OpRule:
    """Without dims the tensor is rolled as one flat row: all of them are fixed."""
    return fixed_dims(node, argument(node, "dims") or range(len(shape_of(operands(node)[0]))))


def last_two(node: fx.Node) -> OpRule:
    return fixed_dims(node, (-2, -1))


def rot90(node: fx.Node) -> OpRule:
    rank = len(shape_of(operands(node)[0]))
    turned = [positive(d, rank) for d in argument(node, "dims")]
    names = dims(rank)
    before, after = list(names), list(names)
    for d in turned:
        before[d], after[d] = f"before{d}^", f"after{d}^"
    return bind_node(node, f"{' '.join(before)} -> {' '.join(after)}", linear=THROUGH)


def put_slice(node: fx.Node) -> OpRule:
    """slice_scatter, select_scatter: src replaces a range (or one index) of a dim, which is fixed; linear in both together."""
    before = shape_of(operands(node)[0])
    dim = positive(argument(node, "dim"), len(before))
    names = dims(len(before), [dim])
    src = list(names)
    if len(shape_of(operands(node)[1])) == len(before):
        src[dim] = "part^"
    else:
        del src[dim]
    whole = " ".join(names)
    return bind_node(node, f"{whole}, {' '.join(src)} -> {whole}", linear=BOTH)


def put_diagonal(node: fx.Node) -> OpRule:
    rank = len(shape_of(operands(node)[0]))
    pair = {positive(argument(node, "dim1"), rank), positive(argument(node, "dim2"), rank)}
    names = dims(rank, pair)
    src = [t for d, t in enumerate(names) if d not in pair] + ["diagonal^"]
    return bind_node(node, f"{' '.join(names)}, {' '.join(src)} -> {' '.join(names)}", linear=BOTH)


def glu(node: fx.Node) -> OpRule:
    """The two halves of a dim: ``(half x) -> x``."""
    rank = len(shape_of(operands(node)[0]))
    dim = positive(argument(node, "dim"), rank)
    names = dims(rank)
    before = names[:dim] + [f"(half^ {names[dim]})"] + names[dim + 1 :]
    return bind_node(node, f"{' '.join(before)} -> {' '.join(names)}", saved=(0,))


def diff(node: fx.Node) -> OpRule:
    """The dim is fixed and one shorter. Also with tensors to prepend or append."""
    rank = len(shape_of(operands(node)[0]))
    dim = positive(argument(node, "dim"), rank)
    names = dims(rank)
    texts = [" ".join(names[:dim] + [f"c{i}^"] + names[dim + 1 :]) for i in range(len(operands(node)))]
    result = " ".join(names[:dim] + ["out^"] + names[dim + 1 :])
    return bind_node(node, f"{', '.join(texts)} -> {result}", linear=(frozenset(range(len(texts))),))


def cross(node: fx.Node) -> OpRule:
    """The three components are fixed; linear in each side."""
    rank = len(shape_of(operands(node)[0]))
    text = " ".join(dims(rank, [positive(argument(node, "dim"), rank)]))
    return bind_node(node, f"{text}, {text} -> {text}", saved=(0, 1), linear=(frozenset({0}), frozenset({1})))


def meshgrid(node: fx.Node) -> OpRule:
    """Each vector is repeated over the dims of the others."""
    names = dims(len(operands(node)))
    grid = [names[1], names[0], *names[2:]] if len(names) > 1 and argument(node, "indexing") == "xy" else names
    return bind_node(node, f"{', '.join(names)} -> {', '.join([' '.join(grid)] * len(names))}")


TABLE = {
    **each("slice.Tensor", slice_),
    **each("narrow", narrow),
    **each("select.int", select),
    **each("cat concat concatenate", cat),
    **each("hstack", hstack),
    **each("stack", stack),
    **each("pad constant_pad_nd reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d", pad),
    **each("flip", flip),
    **each("roll", roll),
    **each("rot90", rot90),
    **each("tril triu", last_two),
    **each("slice_scatter select_scatter", put_slice),
    **each("diagonal_scatter", put_diagonal),
    **each("glu", glu),
    **each("diff", diff),
    **each("linalg_cross", cross),
    **each("meshgrid.indexing", meshgrid),
    **each("trace diag", unsharded),
}
