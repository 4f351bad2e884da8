"""Backward in two parts, for zero-bubble schedules: first the gradients of what a stage received, later those of its weights.

As torch.distributed.pipelining does it, but in an order that is the same on all ranks, since backward runs collectives; and for any
leaves, not only those that are parameters of a module.

An op that sends a gradient both to a received value and, over ops that lead to weights alone, to weights, is a *fork*. In the first part
the gradients that arrive at forks are set aside; the second starts from them. Saved activations that only gradients of weights need live
until then. Regions would have to be computed again for every part, so a stage that has some is not split.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge


@dataclass
class _Group:
    """Weights that share forks: their leaves, and what arrived at each fork."""

    leaves: list[torch.Tensor]
    forks: dict[Node, tuple | None] = field(default_factory=dict)


Later = list[_Group]


def first_inputs(
    outputs: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor | None] | None,
    inputs: Sequence[torch.Tensor],
    leaves: Iterable[torch.Tensor],
) -> tuple[tuple[torch.Tensor | None, ...], Later]:
    """The gradients of ``inputs``, and what ``then_weights`` needs.

    Args:
        outputs: of the stage; the loss alone, if it is the last.
        gradients: of the outputs; None for the loss.
        inputs: what the stage received; those that require no gradient get None.
        leaves: all weights that the stage may read.
    """
    pairs = [(x, torch.ones_like(x) if gradients is None else gradients[i]) for i, x in enumerate(outputs) if x.requires_grad]
    wanted = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
    heads = {get_gradient_edge(x): gradient for x, gradient in pairs}
    later = _groups(heads, [get_gradient_edge(x).node for x in wanted], list(leaves))
    handles = [fork.register_prehook(_set_aside(group, fork)) for group in later for fork in group.forks]
    try:
        found = iter(_gradients(pairs, wanted) if pairs and wanted else ())
    finally:
        for handle in handles:
            handle.remove()
    got = (next(found) if isinstance(x, torch.Tensor) and x.requires_grad else None for x in inputs)
    return tuple(x if x is None else x.contiguous() for x in got), later  # as they have to be to be sent


def then_weights(later: Later) -> tuple[()]:
    """Add the gradients of weights to ``.grad``. Once for each result of ``first_inputs``."""
    for group in later:
        arrived = {fork: gradients for fork, gradients in group.forks.items() if gradients is not None}
        edges = [(GradientEdge(fork, i), g) for fork, gradients in arrived.items() for i, g in enumerate(gradients) if g is not None]
        if not edges:
            continue
        handles = []
        if len(arrived) > 1:  # where one fork is reached from another, what arrived there before stands: it is the sum already
            handles = [fork.register_prehook(lambda _, gradients=gradients: gradients) for fork, gradients in arrived.items()]
        try:
            found = _gradients(edges, group.leaves)
        finally:
            for handle in handles:
                handle.remove()
        for leaf, gradient in zip(group.leaves, found):
            if gradient is not None:
                leaf.grad = gradient if leaf.grad is None else leaf.grad.add_(gradient)
    later.clear()
    return ()


def _gradients(pairs: Sequence[tuple], wanted: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | None]:
    """Of what is wanted, given pairs of a tensor, or an edge of backward, and the gradient there. The graph stays."""
    heads, arriving = zip(*pairs)
    return torch.autograd.grad(heads, wanted, arriving, retain_graph=True, allow_unused=True)


def _set_aside(group: _Group, fork: Node):
    def hook(arriving):
        group.forks[fork] = arriving

    return hook


def _groups(heads: dict[GradientEdge, torch.Tensor], ends: list[Node], leaves: list[torch.Tensor]) -> list[_Group]:
    order = _order([edge.node for edge in heads])
    leads = set(ends)  # to a received value
    below: dict[Node, set[Node]] = {}  # leaf nodes that an op leads to without leading to a received value
    leaf_nodes = {get_gradient_edge(leaf).node: leaf for leaf in leaves}
    forks: dict[Node, set[Node]] = {}
    for node in reversed(order):
        following = [n for n, _ in node.next_functions if n is not None]
        found = {node} if node in leaf_nodes else set().union(*(below.get(n, ()) for n in following))
        if node in leads or any(n in leads for n in following):
            leads.add(node)
            if found:
                forks[node] = found
        else:
            below[node] = found
    # what leads to no received value at all starts where backward does
    loose = {edge.node: below[edge.node] for edge in heads if below.get(edge.node)}
    groups: list[tuple[set[Node], list[Node]]] = []
    for node in order:
        found = forks.get(node) or loose.get(node)
        if found:
            shared = [group for group in groups if group[0] & found]
            merged = (set(found).union(*(g[0] for g in shared)), [n for g in shared for n in g[1]] + [node])
            groups = [group for group in groups if group not in shared] + [merged]
    return [
        _Group([leaf for n, leaf in leaf_nodes.items() if n in nodes], {n: _at(n, heads) if n in loose else None for n in at})
        for nodes, at in groups
    ]


def _at(node: Node, heads: dict[GradientEdge, torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
    """What arrives at the outputs of a node where backward starts."""
    mine = {edge.output_nr: gradient for edge, gradient in heads.items() if edge.node is node}
    return tuple(mine.get(i) for i in range(max(mine) + 1))


def _order(heads: list[Node]) -> list[Node]:
    """All nodes of backward, each before those that it sends gradients to."""
    seen: set[Node] = set()
    order: list[Node] = []
    stack = [(node, False) for node in reversed(heads)]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(n, False) for n, _ in reversed(node.next_functions) if n is not None and n not in seen]
    return order[::-1]
