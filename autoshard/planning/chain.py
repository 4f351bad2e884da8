"""A program as a chain of blocks: the layers that repeat, and what lies between them. The pipeline may be cut between any two."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from autoshard.planning.fold import Folding
from autoshard.planning.spans import Span, spans_of
from autoshard.planning.stages import alive_across
from autoshard.program import Program


class Irregular(ValueError):
    """The model's blocks can't be told apart in the way that the staged problem needs; why, in words."""


@dataclass
class Chain:
    """The ops of a program in blocks, in order. part: of each block; blocks of one part are the same layer, op by op. times: blocks of the
    whole program that each stands for, if the program is abridged. again: whether backward may compute a block again."""

    blocks: list[list[fx.Node]]
    part: list[int]
    times: list[int]
    again: list[bool]
    block_of: dict[fx.Node, int] = field(init=False)

    def __post_init__(self):
        self.block_of = {node: b for b, nodes in enumerate(self.blocks) for node in nodes}

    @property
    def parts(self) -> tuple[int, ...]:
        """The part of each block of the whole program."""
        return tuple(part for part, times in zip(self.part, self.times) for _ in range(times))

    @property
    def repeats(self) -> bool:
        return len(set(self.part)) < len(self.part)


def chain_of(program: Program, folding: Folding, pure: set[fx.Node]) -> Chain:
    """Blocks: the layers that repeat, and pieces of the runs of ops between them. Values that any stage can compute for itself, and that
    are of no layer, lie in the first, but for those that a piece alone reads.

    Raises Irregular if a cut between two blocks would be impossible.
    """
    ops = program.ops
    place = {node: i for i, node in enumerate(ops)}
    spans = spans_of(program, folding, pure)
    common = _common(ops, spans, pure)
    blocks = [[node for node in ops[span.start : span.end] if node not in common] for span in spans]
    spans, blocks = zip(*((span, block) for span, block in zip(spans, blocks) if block)) if any(blocks) else ((), ())
    blocks = list(blocks)
    if common:
        if not blocks or spans[0].layer is not None:
            raise Irregular("there is no op before the first layer")
        blocks[0] = sorted([*common, *blocks[0]], key=place.__getitem__)
    if any(all(node in pure for node in block) for block in blocks):
        raise Irregular("a block has no work of its own")
    numbers: dict[object, int] = {}
    kinds = [("piece", i) if span.layer is None else span.layer for i, span in enumerate(spans)]
    times = [max(node.meta.get("stands_for", 1) for node in block) for block in blocks]
    chain = Chain(blocks, [numbers.setdefault(kind, len(numbers)) for kind in kinds], times, [span.again for span in spans])
    tuples = {n for n in ops if isinstance(n.meta["val"], (tuple, list))}
    alive = dict(alive_across(program, pure))
    for block in blocks[:-1]:
        last = max((n for n in block if n not in common), key=place.__getitem__)
        if not alive[last] or any(value in tuples for value in alive[last]):
            raise Irregular(f"the model can't be cut behind {last.name}")
    return chain


def _common(ops: list[fx.Node], spans: list[Span], pure: set[fx.Node]) -> set[fx.Node]:
    """Values of no layer that any stage can compute for itself, but for those that one piece alone reads, which may be computed again."""
    span_of = {node: span for span in spans for node in ops[span.start : span.end]}
    common: set[fx.Node] = set()
    for node in reversed(ops):
        span = span_of[node]
        if node in pure and span.layer is None:
            if not span.again or any(user in common or span_of.get(user) is not span for user in node.users):
                common.add(node)
    return common
