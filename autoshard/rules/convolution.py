"""Rules of convolutions, pooling and resizing: samples, channels and groups are factors.

Spatial dims are fixed: their edges would need halos.
"""

from __future__ import annotations

from math import prod

from torch import fx

from autoshard.program import operands, shape_of
from autoshard.rules.call import argument, bind_named, bind_node, dims, each, needs_grad, result_shapes, unsharded
from autoshard.rules.notation import OpRule


def convolution(node: fx.Node) -> OpRule:
    """``n c x^, o c k^, +o -> n o y^``: input channels are summed. With groups channels are ``(g c)`` and ``(g o)``.

    A rank that holds whole groups has fewer of them: the number of groups is an argument like a size.
    """
    x, w, y = shape_of(operands(node)[0]), shape_of(operands(node)[1]), result_shapes(node)[0]
    arguments = [a.name for a in node.target._schema.arguments]
    transposed = "conv_transpose" in str(node.target) or ("transposed" in arguments and argument(node, "transposed"))
    space, groups = len(w) - 2, argument(node, "groups")
    batch = ["n"] if len(x) == space + 2 else []
    sizes = {"c": x[len(batch)] // groups, "o": y[len(batch)] // groups}
    inside, outside = (_grouped(name, size, groups) for name, size in sizes.items())
    weight = [inside, "o" if sizes["o"] > 1 else "_"] if transposed else [outside, "c" if sizes["c"] > 1 else "_"]
    specs = {
        "input": " ".join([*batch, inside, *dims(space, range(space), "x")]),
        "weight": " ".join([*weight, *dims(space, range(space), "k")]),
        "bias": f"+{outside}",
    }
    result = " ".join([*batch, outside, *dims(space, range(space), "y")])
    saved = [name for name, other in (("input", 1), ("weight", 0)) if needs_grad(operands(node)[other])]
    outputs, macs = (x, prod(w[1:])) if transposed else (y, prod(w[1:]))
    known = {**sizes, "g": groups}
    return bind_named(node, specs, result, saved=saved, linear=[("input", "bias")], known=known, flops=2.0 * prod(outputs) * macs)


def _grouped(name: str, size: int, groups: int) -> str:
    """The token of channels: ``size`` of them in each of ``groups`` groups."""
    if groups == 1:
        return name if size > 1 else "_"
    return f"(g {name})" if size > 1 else "g"


def spatial(rank: int, saved: tuple[int, ...] = (), linear: bool = False):
    """An op on the last ``rank`` dims: pooling, resizing."""

    def rule(node: fx.Node) -> OpRule:
        lead = len(shape_of(operands(node)[0])) - rank
        names = dims(lead)
        before, after = dims(rank, range(rank), "x"), dims(rank, range(rank), "y")
        result = " ".join(names + after)
        text = f"{' '.join(names + before)} -> {', '.join([result] * len(result_shapes(node)))}"
        return bind_node(node, text, saved=saved, linear=(frozenset({0}),) if linear else ())

    return rule


def grid_sampler(node: fx.Node) -> OpRule:
    """Samples of ``input`` at the places of ``grid``."""
    space = len(shape_of(operands(node)[0])) - 2
    image, places = " ".join(dims(space, range(space), "x")), " ".join(dims(space, range(space), "y"))
    return bind_node(node, f"n c {image}, n {places} at^ -> n c {places}", saved=(0, 1), linear=(frozenset({0}),))


def windows(node: fx.Node) -> OpRule:
    """im2col: the pixels of every window become channels, ``c x^ y^ -> (c k^) l^``."""
    x = shape_of(operands(node)[0])
    batch = ["n"] if len(x) == 4 else []
    known = {"c": x[-3], "k": result_shapes(node)[0][-2] // x[-3]}
    result = " ".join([*batch, "(c k^)" if known["k"] > 1 else "c", "l^"])
    return bind_node(node, f"{' '.join([*batch, 'c', 'x^', 'y^'])} -> {result}", known=known, linear=(frozenset({0}),))


def from_windows(node: fx.Node) -> OpRule:
    """col2im: back again, what falls on one pixel added up."""
    x, y = shape_of(operands(node)[0]), result_shapes(node)[0]
    batch = ["n"] if len(x) == 3 else []
    known = {"c": y[-3], "k": x[-2] // y[-3]}
    first = " ".join([*batch, "(c k^)" if known["k"] > 1 else "c", "l^"])
    return bind_node(node, f"{first} -> {' '.join([*batch, 'c', 'x^', 'y^'])}", known=known, linear=(frozenset({0}),))


def channel_shuffle(node: fx.Node) -> OpRule:
    names = dims(len(shape_of(operands(node)[0])), [1])
    return bind_node(node, f"{' '.join(names)} -> {' '.join(names)}", linear=(frozenset({0}),))


def pixel_unshuffle(node: fx.Node) -> OpRule:
    return _shuffled(shape_of(node), argument(node, "downscale_factor"), back=True)


def pixel_shuffle(node: fx.Node) -> OpRule:
    return _shuffled(shape_of(operands(node)[0]), argument(node, "upscale_factor"))


def _shuffled(shape: tuple[int, ...], r: int, back: bool = False) -> OpRule:
    """``(c r^ q^) h w -> c (h r^) (w q^)``, of this shape on the left, or back."""
    lead = dims(len(shape) - 3)
    before, after = [*lead, "(c r^ q^)", "h", "w"], [*lead, "c", "(h r^)", "(w q^)"]
    if r == 1:
        before = after = [*lead, "c", "h", "w"]
    sizes = {f"d{i}": n for i, n in enumerate(shape[:-3])} | {"c": shape[-3] // r**2, "h": shape[-2], "w": shape[-1], "r": r, "q": r}

    def spec(tokens):
        return tuple(tuple(t.strip("()^") for t in token.split()) for token in tokens)

    if back:
        before, after = after, before
    return OpRule((spec(before),), (spec(after),), sizes, fixed=frozenset("rq"), linear=(frozenset({0}),))


_POOLS = {d: f"max_pool{d}d adaptive_max_pool{d}d" for d in (1, 2, 3)}
_AVERAGES = {d: f"avg_pool{d}d adaptive_avg_pool{d}d" for d in (1, 2, 3)}

TABLE = {
    **each("conv1d conv2d conv3d conv1d.padding conv2d.padding conv3d.padding convolution conv_transpose1d conv_transpose2d.input "
           "conv_transpose3d.input", convolution),
    **each(f"{_POOLS[1]} max_pool1d_with_indices", spatial(1, saved=(0, -1))),
    **each(f"{_POOLS[2]} max_pool2d_with_indices", spatial(2, saved=(0, -1))),
    **each(f"{_POOLS[3]} max_pool3d_with_indices", spatial(3, saved=(0, -1))),
    **each(_AVERAGES[1], spatial(1, linear=True)),
    **each(_AVERAGES[2], spatial(2, linear=True)),
    **each(_AVERAGES[3], spatial(3, linear=True)),
    **each("upsample_nearest1d upsample_nearest1d.vec upsample_linear1d upsample_linear1d.vec", spatial(1, linear=True)),
    **each("upsample_nearest2d upsample_nearest2d.vec upsample_bilinear2d upsample_bilinear2d.vec upsample_bicubic2d "
           "upsample_bicubic2d.vec _upsample_bilinear2d_aa.vec _upsample_bicubic2d_aa.vec", spatial(2, linear=True)),
    **each("upsample_nearest3d upsample_nearest3d.vec upsample_trilinear3d upsample_trilinear3d.vec", spatial(3, linear=True)),
    **each("pixel_shuffle", pixel_shuffle),
    **each("pixel_unshuffle", pixel_unshuffle),
    **each("channel_shuffle", channel_shuffle),
    **each("grid_sampler", grid_sampler),
    **each("im2col", windows),
    **each("col2im", from_windows),
    **each("affine_grid_generator", unsharded),
}  # fmt: skip
