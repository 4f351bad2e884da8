"""Rules of ops that make a tensor out of numbers: there is nothing to shard, every rank makes the whole value (cutting it is free)."""

from __future__ import annotations

from torch import fx

from autoshard.placement import R, S
from autoshard.rules.call import bind_node, dims, each, result_shapes, unsharded
from autoshard.rules.notation import Choice, OpRule
from autoshard.rules.pointwise import shape_only


def new(node: fx.Node) -> OpRule:
    """Of the operand nothing is read but its dtype: it may be a summand, or any piece."""
    before, after = (len(shape) for shape in (node.args[0].meta["val"].shape, result_shapes(node)[0]))
    text = f"{' '.join(dims(before, range(before), 'x'))} -> {' '.join(dims(after, range(after)))}"
    return bind_node(node, text, special=(shape_only, any_piece))


def any_piece(rule: OpRule, k: int) -> tuple[Choice, ...]:
    large = [d for d, factors in enumerate(rule.operands[0]) if factors and rule.sizes[factors[0]] >= k]
    return tuple(Choice(f"any piece of dim {d}", (S(d),), (R,)) for d in large)


TABLE = {
    **each("arange arange.start arange.start_step full zeros ones empty.memory_format eye eye.m linspace scalar_tensor "
           "tril_indices triu_indices", unsharded),
    **each("new_full new_zeros new_ones new_empty", new),
}  # fmt: skip
