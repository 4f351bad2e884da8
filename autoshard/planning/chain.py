"""A program as a chain of blocks: the layers that repeat, and what lies between them. The pipeline may be cut between any two."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from autoshard.planning.fold import Folding
from autoshard.planning.stages import alive_across
from autoshard.program import Program


class Irregular(ValueError):
    """The model's blocks can't be told apart in the way that the staged problem needs; why, in words."""


@dataclass
class Chain:
    """The ops of a program in blocks, in order. part: of each block; blocks of one part are the same layer, op by op. times: blocks of the
    whole program that each stands for, if the program is abridged."""

    blocks: list[list[fx.Node]]
    part: list[int]
    times: list[int]
    block_of: dict[fx.Node, int] = field(init=False)

    def __post_init__(self):
        self.block_of = {node: b for b, nodes in enumerate(self.blocks) for node in nodes}

    @property
    def parts(self) -> tuple[int, ...]:
        """The part of each block of the whole program."""
        return tuple(part for part, times in zip(self.part, self.times) for _ in range(times))


def chain_of(program: Program, folding: Folding, pure: set[fx.Node]) -> Chain:
    """Blocks: the layers that repeat, and the runs of ops between them. Values that any stage can compute for itself lie in the first.

    Raises Irregular if a cut between two blocks would be impossible.
    """
    ops = program.ops
    place = {node: i for i, node in enumerate(ops)}
    starts = {start: (kind, layers.period) for kind, layers in enumerate(folding.layers) for start in layers.starts}
    blocks: list[list[fx.Node]] = []
    kinds: list[object] = []
    common: list[fx.Node] = []
    at, between = 0, []
    while at <= len(ops):
        if between and (at == len(ops) or at in starts):
            blocks.append(between)
            kinds.append(("between", len(blocks)))
            between = []
        if at == len(ops):
            break
        if at in starts:
            kind, period = starts[at]
            blocks.append(ops[at : at + period])
            kinds.append(kind)
            at += period
        else:
            (common if ops[at] in pure else between).append(ops[at])
            at += 1
    if common:
        if not blocks or kinds[0] in range(len(folding.layers)):
            raise Irregular("there is no op before the first layer")
        blocks[0] = sorted(common + blocks[0], key=place.__getitem__)
    if any(all(node in pure for node in block) for block in blocks):
        raise Irregular("a block has no work of its own")
    numbers: dict[object, int] = {}
    times = [max(node.meta.get("stands_for", 1) for node in block) for block in blocks]
    chain = Chain(blocks, [numbers.setdefault(kind, len(numbers)) for kind in kinds], times)
    apart = set(common)
    tuples = {n for n in ops if isinstance(n.meta["val"], (tuple, list))}
    alive = dict(alive_across(program, pure))
    for block in blocks[:-1]:
        last = max((n for n in block if n not in apart), key=place.__getitem__)
        if not alive[last] or any(value in tuples for value in alive[last]):
            raise Irregular(f"the model can't be cut behind {last.name}")
    return chain
