"""Rules of ops that only rename or regroup dims: reshape, permute, expand and their kin. Nothing is saved; partial sums pass.

Sizes in the arguments of these ops (reshape, expand, ...) are those of the whole value; a rank puts its own sizes there.
"""

from __future__ import annotations

from math import gcd, prod

from torch import fx

from autoshard.program import operands, shape_of
from autoshard.rules.call import argument, bind_node, dims, each, positive, result_shapes
from autoshard.rules.notation import OpRule, Spec

THROUGH = (frozenset({0}),)  # partial sums pass through the one operand


def regroup(before: tuple[int, ...], after: tuple[int, ...]) -> tuple[Spec, Spec, frozenset[str], dict[str, int]]:
    """Specs of a reshape, the factors that are not in both, all sizes: (12, 8) -> (16, 6) is "(f0 f2^) (f3^ f1)" -> "(f0 f4^) (f5^ f1)".

    Dims are cut into segments of equal product. In a segment common factors are split off from the left as long as one side's size
    divides the other's, then from the right; what is left between does not line up, and is fixed.
    """
    groups = ([[] for _ in before], [[] for _ in after])
    fixed: set[str] = set()
    names = (f"f{i}" for i in range(2 * (len(before) + len(after)) + 2))
    for ours, theirs in _segments(before, after):
        rest = [[[d, before[d]] for d in ours], [[d, after[d]] for d in theirs]]
        tails = ([], [])
        for end, sink in ((0, groups), (-1, tails)):
            while rest[0] and rest[1]:
                a, b = rest[0][end], rest[1][end]
                common = gcd(a[1], b[1])
                aligned = common == min(a[1], b[1])
                if common > 1:
                    name = next(names)
                    for side, x in zip((0, 1), (a, b)):
                        if sink is groups:
                            groups[side][x[0]].append((name, common))
                        else:
                            tails[side].append((x[0], name, common))
                        x[1] //= common
                        if x[1] == 1:
                            rest[side].remove(x)
                if not aligned:
                    break
        for side in (0, 1):
            for d, size in rest[side]:
                name = next(names)
                fixed.add(name)
                groups[side][d].append((name, size))
            for d, name, size in reversed(tails[side]):
                groups[side][d].append((name, size))
    sizes = {name: size for side in groups for group in side for name, size in group}
    specs = [tuple(tuple(name for name, _ in group) for group in side) for side in groups]
    return specs[0], specs[1], frozenset(fixed), sizes


def _segments(before, after):
    """Cut two shapes of equal product, dims of size 1 left out, into runs of dims of equal (smallest) product."""
    left = [d for d, n in enumerate(before) if n != 1]
    right = [d for d, n in enumerate(after) if n != 1]
    while left:
        i = j = 1
        while (p := prod(before[d] for d in left[:i])) != (q := prod(after[d] for d in right[:j])):
            if p < q:
                i += 1
            else:
                j += 1
        yield left[:i], right[:j]
        left, right = left[i:], right[j:]


def reshape(node: fx.Node) -> OpRule:
    """``reshape(b (s h) -> b s h)``: any op whose result has the operand's elements in the same order."""
    before, after = shape_of(operands(node)[0]), result_shapes(node)[0]
    if 0 in before:
        return OpRule((((),) * len(before),), (((),) * len(after),), {}, linear=THROUGH)
    first, result, fixed, sizes = regroup(before, after)
    specs = (first,) + (result,) * (len(operands(node)) - 1)  # view_as takes its sizes from a second tensor
    linear = THROUGH if len(specs) == 1 else ()
    return OpRule(specs, (result,), sizes, fixed=fixed, linear=linear)


def permuted(node: fx.Node, order: list[int]) -> OpRule:
    names = dims(len(order))
    return bind_node(node, f"{' '.join(names)} -> {' '.join(names[d] for d in order)}", linear=THROUGH)


def permute(node: fx.Node) -> OpRule:
    rank = len(shape_of(operands(node)[0]))
    return permuted(node, [positive(d, rank) for d in argument(node, "dims")])


def transpose(node: fx.Node) -> OpRule:
    """Two dims change places: transpose, t, mT, swapaxes."""
    rank = len(shape_of(operands(node)[0]))
    names = [a.name for a in node.target._schema.arguments]
    if "dim0" in names:
        pair = (argument(node, "dim0"), argument(node, "dim1"))
    elif "axis0" in names:
        pair = (argument(node, "axis0"), argument(node, "axis1"))
    else:
        pair = (-2, -1) if rank > 1 else (0, 0)
    order = list(range(rank))
    if rank:
        a, b = (positive(d, rank) for d in pair)
        order[a], order[b] = b, a
    return permuted(node, order)


def reverse_dims(node: fx.Node) -> OpRule:
    return permuted(node, list(reversed(range(len(shape_of(operands(node)[0]))))))


def movedim(node: fx.Node) -> OpRule:
    source, destination = argument(node, "source"), argument(node, "destination")
    source = [source] if isinstance(source, int) else source
    destination = [destination] if isinstance(destination, int) else destination
    rank = len(shape_of(operands(node)[0]))
    moved = {positive(t, rank): positive(s, rank) for s, t in zip(source, destination)}
    rest = iter([d for d in range(rank) if d not in moved.values()])
    return permuted(node, [moved[d] if d in moved else next(rest) for d in range(rank)])


def unsqueeze(node: fx.Node) -> OpRule:
    rank = len(shape_of(operands(node)[0]))
    names = dims(rank)
    out = list(names)
    out.insert(positive(argument(node, "dim"), rank + 1), "_")
    return bind_node(node, f"{' '.join(names)} -> {' '.join(out)}", linear=THROUGH)


def squeeze(node: fx.Node) -> OpRule:
    """Dims of size 1 vanish. A dim that could shrink to 1 on a rank, and would vanish there too, is fixed."""
    before = shape_of(operands(node)[0])
    rank = len(before)
    named = [a.name for a in node.target._schema.arguments]
    asked = argument(node, "dim") if "dim" in named else range(rank)
    asked = {positive(d, rank) for d in ([asked] if isinstance(asked, int) else asked)}
    gone = {d for d in asked if before[d] == 1}
    names = dims(rank, fixed=asked)
    return bind_node(
        node, f"{' '.join(names)} -> {' '.join(t for d, t in enumerate(names) if d not in gone)}", linear=THROUGH if rank else ()
    )


def expand(node: fx.Node) -> OpRule:
    """A dim that is repeated belongs to the result only: it can be sharded, and the operand's gradient is then a summand."""
    n = len(operands(node))
    return bind_node(node, f"{', '.join(['...'] * n)} -> ...", linear=THROUGH if n == 1 else ())


def repeat(node: fx.Node) -> OpRule:
    """Copies lie outside what they copy: ``x -> (copies x)``."""
    before, after = shape_of(operands(node)[0]), result_shapes(node)[0]
    names, lead = dims(len(before)), len(after) - len(before)
    out = []
    for d, n in enumerate(after):
        size = before[d - lead] if d >= lead else 1
        copies = f"r{d}^" if n != size else ""
        inner = names[d - lead] if d >= lead and (size > 1 or not copies) else ""
        out.append(f"({copies} {inner})" if copies and inner else copies or inner or "_")
    return bind_node(node, f"{' '.join(names)} -> {' '.join(out)}", linear=THROUGH)


def repeat_interleave(node: fx.Node) -> OpRule:
    """Each element is repeated in place: ``x -> (x copies)``. Without a dim, or with the output's size as an argument, x is fixed."""
    before = shape_of(operands(node)[0])
    dim, repeats = argument(node, "dim"), argument(node, "repeats")
    if dim is None:
        return bind_node(node, f"{' '.join(dims(len(before), range(len(before))))} -> all^", linear=THROUGH)
    dim = positive(dim, len(before))
    names = dims(len(before), [dim] if argument(node, "output_size") is not None else ())
    out = [f"({t} copies^)" if d == dim and repeats > 1 else t for d, t in enumerate(names)]
    if before[dim] == 1:
        out[dim] = "copies^"
    return bind_node(node, f"{' '.join(names)} -> {' '.join(out)}", linear=THROUGH)


def unfold(node: fx.Node) -> OpRule:
    """Windows along a dim: it is whole, and each window's elements are a new dim at the end."""
    rank = len(shape_of(operands(node)[0]))
    before, after = dims(rank), dims(rank)
    dim = positive(argument(node, "dimension"), rank)
    before[dim], after[dim] = "whole^", "windows^"
    return bind_node(node, f"{' '.join(before)} -> {' '.join([*after, 'inside^'])}", linear=THROUGH)


def diagonal(node: fx.Node) -> OpRule:
    rank = len(shape_of(operands(node)[0]))
    pair = {positive(argument(node, "dim1"), rank), positive(argument(node, "dim2"), rank)}
    names = dims(rank, pair)
    return bind_node(
        node, f"{' '.join(names)} -> {' '.join([t for d, t in enumerate(names) if d not in pair] + ['diagonal^'])}", linear=THROUGH
    )


def diag_embed(node: fx.Node) -> OpRule:
    rank = len(result_shapes(node)[0])
    pair = {positive(argument(node, "dim1"), rank), positive(argument(node, "dim2"), rank)}
    names = dims(rank, pair)
    kept = [t for d, t in enumerate(names) if d not in pair]
    return bind_node(node, f"{' '.join(kept + ['diagonal^'])} -> {' '.join(names)}", linear=THROUGH)


TABLE = {
    **each("reshape view _unsafe_view flatten.using_ints unflatten.int view_as reshape_as ravel atleast_1d atleast_2d atleast_3d", reshape),
    **each("transpose.int t mT swapaxes swapdims", transpose),
    **each("numpy_T", reverse_dims),
    **each("permute", permute),
    **each("movedim.int movedim.intlist moveaxis.int moveaxis.intlist", movedim),
    **each("unsqueeze", unsqueeze),
    **each("squeeze squeeze.dim squeeze.dims", squeeze),
    **each("expand expand_as broadcast_to", expand),
    **each("repeat tile", repeat),
    **each("repeat_interleave.self_int", repeat_interleave),
    **each("unfold", unfold),
    **each("diagonal", diagonal),
    **each("diag_embed", diag_embed),
    **each("view_as_real", lambda node: bind_node(node, "... -> ... pair^", linear=THROUGH)),
    **each("view_as_complex", lambda node: bind_node(node, "... pair^ -> ...", linear=THROUGH)),
}
