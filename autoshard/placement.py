"""How a value lies across the axes of a mesh: the algebra that everything else is written in.

Along one axis of k ranks a value is in one of four states. A state fixes where the value is *and* where its gradient is:

    state     value on each rank                         its gradient on each rank
    S(d)      the rank's piece of dim d                  the rank's piece of dim d
    R         whole                                      whole
    P         a summand; the value is the sum            whole
    R*        whole                                      a summand; the gradient is the sum

``S(d/B)`` is a *blocked* shard: dim d is viewed as B equal blocks, each cut into k pieces, and a rank holds its piece of each block
(a fused query-key-value dim cut by heads is ``S(d/3)``). Pieces have ``torch.chunk`` sizes.

A *layout* is one placement per axis, outer axis first. Several axes may cut one dim: with equal blocks the inner axis cuts the outer
axis's piece, with different blocks they cut different factors of the dim.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache, cached_property
from math import prod

from autoshard.errors import PlacementError


@dataclass(frozen=True, order=True)
class Placement:
    """The state of a value along one axis. ``kind`` is S, R, P or R*; ``dim`` and ``blocks`` belong to S."""

    kind: str
    dim: int = -1
    blocks: int = 1

    def __post_init__(self):
        # placements are keys of every table: hashed once, and by numbers, so that a pickled one is the same key in another process
        object.__setattr__(self, "_hash", hash((len(self.kind), ord(self.kind[0]), self.dim, self.blocks)))

    def __hash__(self) -> int:
        return self._hash

    @property
    def is_shard(self) -> bool:
        return self.kind == "S"

    def __str__(self) -> str:
        if self.kind != "S":
            return self.kind
        return f"S({self.dim})" if self.blocks == 1 else f"S({self.dim}/{self.blocks})"

    __repr__ = __str__


R = Placement("R")
R_STAR = Placement("R*")
P = Placement("P")


@cache
def S(dim: int, blocks: int = 1) -> Placement:
    return Placement("S", dim, blocks)


Layout = tuple[Placement, ...]


@cache
def parse_placement(text: str) -> Placement:
    """Read ``R``, ``R*``, ``P``, ``S(0)`` or ``S(1/3)``."""
    text = text.strip()
    if text in ("R", "R*", "P"):
        return Placement(text)
    match = re.fullmatch(r"S\((\d+)(?:/(\d+))?\)", text)
    if not match or match[2] == "0":
        raise PlacementError(
            f"can't read the placement {text!r}", hint="write R, R*, P, S(dim) or S(dim/blocks), for example S(0) or S(1/3)"
        )
    return S(int(match[1]), int(match[2] or 1))


def parse_layout(text: str) -> Layout:
    """Read ``"[S(0), R*]"``, the form that ``format_layout`` writes."""
    return tuple(parse_placement(part) for part in text.strip().strip("[]").split(","))


def format_layout(layout: Layout) -> str:
    return f"[{', '.join(map(str, layout))}]"


@cache
def pieces(size: int, k: int) -> tuple[int, ...]:
    """Sizes of the k pieces of a dim of ``size``, as torch.chunk cuts it, with empty pieces at the end."""
    step = -(-size // k)
    return tuple(max(0, min(step, size - i * step)) for i in range(k))


def blocks_now(layout: Layout, axis: int, sizes: tuple[int, ...]) -> int:
    """How many blocks axis ``axis``'s shard sees on a rank, once all the other axes have cut the dim.

    Only axes with *fewer* blocks cut inside ours... the other way round: an axis whose blocks are fewer than ours cuts a factor that
    lies outside ours, and leaves 1/k of our blocks on each rank.
    """
    mine = layout[axis]
    blocks = mine.blocks
    for other, k in zip(layout, sizes):
        if other.is_shard and other.dim == mine.dim and other.blocks < mine.blocks:
            blocks //= k
    return blocks


@cache
def legal(layout: Layout, shape: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
    """Whether a value of this (global) shape can lie so: dims exist, blocks divide, and no piece is empty."""
    for dim in {p.dim for p in layout if p.is_shard}:
        if not 0 <= dim < len(shape):
            return False
        cuts = [(p.blocks, k) for p, k in zip(layout, sizes) if p.is_shard and p.dim == dim]
        split: dict[int, int] = {}
        for blocks, k in cuts:
            split[blocks] = split.get(blocks, 1) * k
        levels = sorted(split)
        size = shape[dim]
        for i, blocks in enumerate(levels):
            if size % blocks:
                return False
            if i + 1 < len(levels):  # an outer factor must be cut evenly, or the inner blocks would be torn
                inner = levels[i + 1]
                if inner % blocks or (inner // blocks) % split[blocks]:
                    return False
            else:
                pieces_left = [size // blocks]
                for b, k in cuts:
                    if b == blocks:
                        pieces_left = [q for n in pieces_left for q in pieces(n, k)]
                if min(pieces_left) == 0:
                    return False
    return True


@cache
def local_shape(shape: tuple[int, ...], layout: Layout, sizes: tuple[int, ...], coords: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the piece at ``coords`` of a value of global ``shape``."""
    out = list(shape)
    order = sorted(range(len(layout)), key=lambda a: (layout[a].blocks, a))  # coarse factors first, then outer axes first
    done: list[Placement] = [R] * len(layout)
    for axis in order:
        placement = layout[axis]
        if placement.is_shard and sizes[axis] > 1:
            done[axis] = placement
            blocks = blocks_now(tuple(done), axis, sizes)
            out[placement.dim] = blocks * pieces(out[placement.dim] // blocks, sizes[axis])[coords[axis]]
    return tuple(out)


@dataclass(frozen=True)
class Conversion:
    """One cell of the conversion table: what runs forward and backward, and bytes sent per rank.

    ``forward_bytes`` and ``backward_bytes`` are factors of g*n, where g = (k-1)/k and n is the full size in bytes *along this axis*
    by a ring algorithm; ``"1/k"`` means g*n/k.
    """

    forward: str
    backward: str
    forward_bytes: str
    backward_bytes: str


CONVERSIONS: dict[tuple[str, str], Conversion] = {
    ("S", "S"): Conversion("all_to_all", "all_to_all", "1/k", "1/k"),
    ("S", "R"): Conversion("all_gather", "slice", "1", "0"),
    ("S", "R*"): Conversion("all_gather", "reduce_scatter", "1", "1"),
    ("S", "P"): Conversion("pad", "slice", "0", "0"),
    ("R", "S"): Conversion("slice", "all_gather", "0", "1"),
    ("R", "R*"): Conversion("none", "all_reduce", "0", "2"),
    ("R", "P"): Conversion("divide", "none", "0", "0"),
    ("R*", "S"): Conversion("slice", "pad", "0", "0"),
    ("R*", "R"): Conversion("none", "divide", "0", "0"),
    ("R*", "P"): Conversion("divide", "divide", "0", "0"),
    ("P", "S"): Conversion("reduce_scatter", "all_gather", "1", "1"),
    ("P", "R"): Conversion("all_reduce", "none", "2", "0"),
    ("P", "R*"): Conversion("all_reduce", "all_reduce", "2", "2"),
}
"""(from, to) -> what it takes. Read off it: R -> R* on weights is data-parallel gradient sync; S -> R* on weights is ZeRO-3;
R -> R* and P -> R on activations are Megatron's f and g; S -> R* and P -> S are its sequence parallelism."""

_FACTORS = {"0": lambda k: 0.0, "1": lambda k: (k - 1) / k, "2": lambda k: 2 * (k - 1) / k, "1/k": lambda k: (k - 1) / k / k}


def bytes_sent(factor: str, nbytes: float, k: int) -> float:
    """Bytes that one rank sends for a collective with this ``factor`` (see ``Conversion``) on ``nbytes`` over k ranks."""
    return _FACTORS[factor](k) * nbytes


@dataclass(frozen=True)
class Step:
    """One single-axis conversion on the way from one layout to another. ``before`` is the whole layout as it starts."""

    axis: int
    before: Layout
    after: Layout

    @property
    def src(self) -> Placement:
        return self.before[self.axis]

    @property
    def dst(self) -> Placement:
        return self.after[self.axis]

    @cached_property
    def conversion(self) -> Conversion:
        return CONVERSIONS[self.src.kind, self.dst.kind]

    @cached_property
    def others(self) -> Layout:
        """``before`` of the whole along this axis: the placements of the others, R along it."""
        return self.before[: self.axis] + (R,) + self.before[self.axis + 1 :]


def _safe(layout: Layout, axis: int) -> bool:
    """Whether ``axis`` can be gathered or cut on its own: no inner axis cuts the same factor inside its piece."""
    mine = layout[axis]
    return not mine.is_shard or not any(p.is_shard and p.dim == mine.dim and p.blocks == mine.blocks for p in layout[axis + 1 :])


def step_factor(step: Step, sizes: tuple[int, ...], grad: bool) -> float:
    """Elements that one rank sends for a step, forward and backward (ring algorithm), in units of ``largest`` of ``step.others``."""
    return _factor(step.src.kind, step.dst.kind, sizes[step.axis], grad)


@cache
def _factor(src: str, dst: str, k: int, grad: bool) -> float:
    conversion = CONVERSIONS[src, dst]
    return bytes_sent(conversion.forward_bytes, 1.0, k) + (bytes_sent(conversion.backward_bytes, 1.0, k) if grad else 0.0)


@cache
def largest(shape: tuple[int, ...], layout: Layout, sizes: tuple[int, ...]) -> int:
    """Elements on the rank that holds most of a value of global ``shape``: the first."""
    return prod(local_shape(shape, layout, sizes, (0,) * len(sizes)))


@cache
def route(src: Layout, dst: Layout, shape: tuple[int, ...], sizes: tuple[int, ...], grad: bool = True) -> tuple[Step, ...] | None:
    """The single-axis conversions that lead from ``src`` to ``dst``, fewest bytes first; None if there is no way.

    A value without a gradient (``grad=False``) does not tell R from R*. Axes of size 1 need no conversion.
    """
    best: tuple[float, int, tuple[Step, ...]] | None = None
    for way in _ways(src, dst, tuple([k > 1 for k in sizes]), grad):
        if all([legal(step.after, shape, sizes) for step in way]):
            cost = sum([step_factor(step, sizes, grad) * largest(shape, step.others, sizes) for step in way])
            if best is None or (cost, len(way)) < best[:2]:
                best = (cost, len(way), way)
    return best[2] if best is not None else None


@cache
def _ways(src: Layout, dst: Layout, several: tuple[bool, ...], grad: bool) -> tuple[tuple[Step, ...], ...]:
    """All sequences of steps that lead from ``src`` to ``dst``, for values of any shape. several: whether an axis has several ranks."""

    def plain(p: Placement, many: bool) -> Placement:
        return p if many and (grad or p != R_STAR) else R

    src = tuple(plain(p, many) for p, many in zip(src, several))
    dst = tuple(plain(p, many) for p, many in zip(dst, several))
    found: list[tuple[Step, ...]] = []

    def search(layout: Layout, path: tuple[Step, ...], undone: frozenset[int]):
        if layout == dst:
            found.append(path)
            return
        for axis in range(len(layout)):
            targets = [dst[axis]] if layout[axis] != dst[axis] else []
            if axis not in undone and layout[axis].is_shard and any(layout[a] != dst[a] for a in range(axis)):
                targets.append(R)  # an inner shard in the way of an outer one is gathered first
            for target in dict.fromkeys(targets):
                if layout[axis] == target or (layout[axis].kind, target.kind) not in CONVERSIONS:
                    continue
                after = layout[:axis] + (target,) + layout[axis + 1 :]
                if _safe(layout, axis) and _safe(after, axis):
                    search(after, (*path, Step(axis, layout, after)), undone | {axis})

    search(src, (), frozenset())
    return tuple(found)


def step_arguments(step: Step, shape: tuple[int, ...], sizes: tuple[int, ...], coords: tuple[int, ...]) -> tuple[str, int | None]:
    """What the rank at ``coords`` tells the runtime of a step of a value of global ``shape``: ``("S(1/3) -> R", 96)``.

    The text names the blocks that the rank sees, once the other axes have cut the dim; the size is that of the source's dim when it is
    whole along the step's axis but still cut along the others (None if the source is no shard).
    """

    def seen(layout: Layout) -> Placement:
        placement = layout[step.axis]
        return S(placement.dim, blocks_now(layout, step.axis, sizes)) if placement.is_shard else placement

    size = None
    if step.src.is_shard:
        size = local_shape(shape, step.others, sizes, coords)[step.src.dim]
    return f"{seen(step.before)} -> {seen(step.after)}", size


def cut_over_data(layout: Layout, shape: tuple[int, ...], sizes: tuple[int, ...]) -> Layout | None:
    """The layout (data, tensor) of a weight, whole along data in ``layout``, once it is cut along data too; None if no dim can be.

    The dim whose pieces are the most even is taken, the first among equals. Of a dim that the tensor axis cuts already, each of its pieces
    is cut: ``[R, S(0)]`` on sizes (2, 4) becomes ``[S(0/4), S(0)]``.
    """
    best: tuple[int, Layout] | None = None
    for dim in range(len(shape)):
        inner = layout[1]
        cut = S(dim, inner.blocks * sizes[1]) if inner.is_shard and inner.dim == dim else S(dim)
        after = (cut, inner)
        if sizes[0] == 1 or not legal(after, shape, sizes) or len(route(after, layout, shape, sizes, False) or ()) != 1:
            continue
        fullest = prod(local_shape(shape, after, sizes, (0,) * len(sizes)))
        if best is None or fullest < best[0]:
            best = (fullest, after)
    return best[1] if best is not None else None
