"""From what torch.export gives to the one form that rules, planner and passes read."""

from __future__ import annotations

from autoshard.passes.bags_to_rows import bags_to_rows
from autoshard.passes.batch_statistics import batch_statistics
from autoshard.passes.constant_masks import drop_constant_masks
from autoshard.passes.dead_code import drop_dead_code
from autoshard.passes.drop_noops import drop_noops
from autoshard.passes.index_to_gather import index_to_gather
from autoshard.passes.literal_sizes import literal_sizes
from autoshard.passes.mean_loss import mean_loss_to_sum
from autoshard.passes.split_to_slices import split_to_slices
from autoshard.passes.tidy_names import tidy_names
from autoshard.passes.whole_ops import whole_ops
from autoshard.passes.writes_to_cat import writes_to_cat
from autoshard.program import Program

STEPS = (
    whole_ops,
    batch_statistics,
    bags_to_rows,
    split_to_slices,
    drop_noops,
    writes_to_cat,
    mean_loss_to_sum,
    literal_sizes,
    index_to_gather,
    drop_noops,  # those that the new spelling uncovers
    drop_constant_masks,
    drop_dead_code,
    tidy_names,
)


def canonicalize(program: Program) -> Program:
    """The same function in canonical form; the program given is not changed.

    before:  split = aten.split.Tensor(x, 32, -1); a = getitem(split, 0); v = aten.view(a, [-1, 32]); d = aten.dropout(v, 0.0, True)
    after:   slice_1 = aten.slice.Tensor(x, 2, 0, 32); reshape = aten.reshape(slice_1, [128, 32])

    Canonical: ATen ops, functional; views are reshape, expand, slice, select, transpose or permute with literal sizes; dims count from the
    front; no copies, asserts or dropout that is off; mean losses are sum / count; nothing dead.
    """
    program = program.copy()
    for step in STEPS:
        program = step(program)
    program.graph.lint()
    return program
