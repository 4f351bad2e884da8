"""Values of ops that depend on no input and no parameter, without the memory that they would take."""

from __future__ import annotations

import torch
from torch import fx

from autoshard.passes.edit import arguments
from autoshard.program import Program, shape_of, tensors
from autoshard.torch_private import pytree

aten = torch.ops.aten

LARGEST = 1 << 26
"""Elements of the largest value that is computed."""
QUICK = 1 << 20
"""Elements of the largest value that is searched for dims along which it is the same."""
POINTWISE = {
    aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.rsub.Scalar, aten.neg.default, aten.abs.default,
    aten.to.dtype, aten.le.Tensor, aten.lt.Tensor, aten.ge.Tensor, aten.gt.Tensor, aten.eq.Tensor, aten.ne.Tensor, aten.le.Scalar,
    aten.lt.Scalar, aten.ge.Scalar, aten.gt.Scalar, aten.eq.Scalar, aten.ne.Scalar, aten.bitwise_and.Tensor, aten.bitwise_or.Tensor,
    aten.bitwise_xor.Tensor, aten.bitwise_not.default, aten.logical_and.default, aten.logical_or.default, aten.logical_not.default,
    aten.where.self, aten.where.Scalar, aten.where.ScalarOther, aten.where.ScalarSelf, aten.masked_fill.Scalar, aten.minimum.default,
    aten.maximum.default,
}  # fmt: skip
ALONG = {aten.cumsum.default, aten.flip.default, aten.slice.Tensor, aten.select.int, aten.diff.default, aten.cat.default}
"""Ops that mix elements along their ``dim`` only."""
MOVES = {aten.transpose.int, aten.permute.default, aten.unsqueeze.default}


class Constants:
    """Real values of the constant ops of a canonical program.

    Compact: a dim along which a value is the same everywhere has size 1, so a mask for a batch of 64 is computed once. Each op that
    is not known to keep such dims apart is run on whole operands, if those are small enough.
    """

    def __init__(self, program: Program):
        self._constant: set[fx.Node] = set()
        self._values: dict[fx.Node, torch.Tensor | None] = {}
        for node in program.ops:
            random = not isinstance(node.target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded in node.target.tags
            if not random and isinstance(node.meta["val"], torch.Tensor) and all(x in self._constant for x in node.all_input_nodes):
                self._constant.add(node)

    def value(self, node: fx.Node) -> torch.Tensor | None:
        """The value, broadcastable to the node's shape; None if it depends on data or is too large."""
        if node not in self._constant:
            return None
        if node not in self._values:
            inputs = {x: self.value(x) for x in node.all_input_nodes}
            value = None if any(v is None for v in inputs.values()) else run(node, inputs)
            self._values[node] = value if value is None else compact(value)
        return self._values[node]


def compact(value: torch.Tensor) -> torch.Tensor:
    """The value with size 1 along every dim where it turns out to be the same everywhere, if that is quick to see."""
    for dim in range(value.dim()):
        first = value.narrow(dim, 0, min(1, value.shape[dim]))
        if 1 < value.shape[dim] and value.numel() <= QUICK and (value == first).all():
            value = first
    return value


def run(node: fx.Node, inputs: dict[fx.Node, torch.Tensor]) -> torch.Tensor | None:
    values = arguments(node)
    if node.target is aten.full.default:
        return node.target([1] * len(shape_of(node)), *node.args[1:], **node.kwargs)
    if node.target is aten.expand.default:
        value = inputs[node.args[0]]
        return value.reshape([1] * (len(shape_of(node)) - value.dim()) + list(value.shape))
    if node.target in POINTWISE or node.target in MOVES:
        return call(node, inputs)
    if node.target in ALONG:
        return along(node, inputs, values["dim"] if "dim" in values else values["dims"])
    if node.target is aten.index.Tensor and all(isinstance(i, fx.Node) for i in node.args[1]):
        source, indices = inputs[node.args[0]], [inputs[i] for i in node.args[1]]
        if len(indices) == source.dim():
            # along a dim where the source is the same everywhere, any index gives the same
            indices = [i if size > 1 else i.new_zeros([1] * i.dim()) for i, size in zip(indices, source.shape)]
            return source[tuple(indices)] if torch.broadcast_shapes(*(i.shape for i in indices)).numel() <= LARGEST else None
    whole = {x: value.expand(shape_of(x)) for x, value in inputs.items()}
    if any(t.numel() > LARGEST for t in (*whole.values(), *tensors(node.meta["val"]))):
        return None
    return call(node, whole)


def along(node: fx.Node, inputs: dict[fx.Node, torch.Tensor], dim) -> torch.Tensor | None:
    """An op that mixes along ``dim``: operands are whole there, and alike elsewhere."""
    dims = [dim] if isinstance(dim, int) else list(dim)
    rank = max(value.dim() for value in inputs.values())
    common = [max(value.shape[d] for value in inputs.values()) for d in range(rank)]
    whole = {x: value.expand([shape_of(x)[d] if d in dims else common[d] for d in range(rank)]) for x, value in inputs.items()}
    if sum(value.numel() for value in whole.values()) > LARGEST:
        return None
    return call(node, whole)


def call(node: fx.Node, inputs: dict[fx.Node, torch.Tensor]) -> torch.Tensor | None:
    sizes = [value.shape for value in inputs.values()]
    if node.target in POINTWISE and torch.broadcast_shapes(*sizes).numel() > LARGEST:
        return None
    args, kwargs = pytree.tree_map_only(fx.Node, lambda n: inputs[n], (node.args, dict(node.kwargs)))
    with torch.no_grad():
        return node.target(*args, **kwargs)
