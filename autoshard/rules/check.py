"""Running an op in pieces, in one process, and comparing with the whole: what a rule claims, as numbers.

    scatter(x, layout, sizes)        a value -> what each rank holds, by coordinates
    gather(parts, layout, sizes)     back; also says how far the ranks disagree
    compare(...)                     an op under a strategy, forward and backward, against one device

Gradients lie as the states say: of S a piece, of R and P whole on each rank, of R* a summand (``dual``).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import torch
from torch import fx

from autoshard.errors import RuleError
from autoshard.placement import Layout, P, R, blocks_now, pieces
from autoshard.program import tensors
from autoshard.rules.call import bind_node
from autoshard.rules.notation import OpRule, choices, factor_choice
from autoshard.torch_private import pytree

Coords = tuple[int, ...]
Parts = dict[Coords, torch.Tensor]


def dual(layout: Layout) -> Layout:
    """The layout of the gradient of a value."""
    return tuple({"R": R, "P": R, "R*": P}.get(p.kind, p) for p in layout)


def cut(x: torch.Tensor, dim: int, blocks: int, k: int) -> list[torch.Tensor]:
    """The k pieces of a dim made of ``blocks`` blocks, each rank with its piece of every block."""
    size = x.shape[dim] // blocks
    split = [torch.split(block, list(pieces(size, k)), dim) for block in torch.split(x, size, dim)]
    return [torch.cat([block[r] for block in split], dim) for r in range(k)]


def join(parts: list[torch.Tensor], dim: int, blocks: int) -> torch.Tensor:
    """The inverse of ``cut``."""
    split = [torch.split(part, part.shape[dim] // blocks, dim) if part.shape[dim] else [part] * blocks for part in parts]
    return torch.cat([split[r][b] for b in range(blocks) for r in range(len(parts))], dim)


def summands(x: torch.Tensor, k: int) -> list[torch.Tensor]:
    """Random summands of a tensor; whole numbers are all on one rank."""
    if x.is_floating_point() or x.is_complex():
        first = [torch.randn_like(x) for _ in range(k - 1)]
        return [*first, x - sum(first)] if first else [x]
    return [x, *(torch.zeros_like(x) for _ in range(k - 1))]


def _order(layout: Layout) -> list[int]:
    """Axes in the order in which they cut: coarse factors first, then outer axes."""
    return sorted(range(len(layout)), key=lambda a: (layout[a].blocks, a))


def _blocks(layout: Layout, axis: int, sizes: Coords) -> int:
    order = _order(layout)
    done = tuple(p if order.index(a) <= order.index(axis) else R for a, p in enumerate(layout))
    return blocks_now(done, axis, sizes)


def scatter(x: torch.Tensor, layout: Layout, sizes: Coords) -> Parts:
    """What the rank at each coordinates holds of ``x``."""
    parts: Parts = {(0,) * len(sizes): x}
    for axis in _order(layout):
        k, place = sizes[axis], layout[axis]
        new: Parts = {}
        for coords, part in parts.items():
            if place.is_shard:
                split = cut(part, place.dim, _blocks(layout, axis, sizes), k)
            else:
                split = summands(part, k) if place.kind == "P" else [part] * k
            for r in range(k):
                new[coords[:axis] + (r,) + coords[axis + 1 :]] = split[r]
        parts = new
    return parts


def gather(parts: Parts, layout: Layout, sizes: Coords) -> tuple[torch.Tensor, float]:
    """The value that the ranks hold together, and the largest difference between copies that must be equal."""
    apart = 0.0
    for axis in reversed(_order(layout)):
        k, place = sizes[axis], layout[axis]
        new: Parts = {}
        for coords in parts:
            if coords[axis]:
                continue
            group = [parts[coords[:axis] + (r,) + coords[axis + 1 :]] for r in range(k)]
            if place.is_shard:
                new[coords] = join(group, place.dim, _blocks(layout, axis, sizes))
            elif place.kind == "P":
                new[coords] = sum(group[1:], group[0])
            else:
                apart = max([apart, *(difference(g, group[0]) for g in group[1:])])
                new[coords] = group[0]
        parts = new
    return parts[(0,) * len(sizes)], apart


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest absolute difference; infinite if shapes differ. Equal infinities and NaNs are equal."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    if not a.numel():
        return 0.0
    wide = torch.complex128 if a.is_complex() else torch.float64
    a, b = a.detach().to(wide), b.detach().to(wide)
    same = (a == b) | (a.isnan() & b.isnan())
    return float(torch.where(same, 0.0, (a - b).abs()).nan_to_num(nan=float("inf")).max())


def differentiable(x) -> bool:
    return isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex())


def backward(results, inputs: list[torch.Tensor], grads: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Gradients of ``inputs`` (None for whole numbers; zeros where nothing flows), given those of ``results``."""
    pairs = [(y, g) for y, g in zip(results, grads) if y.requires_grad and g is not None]
    wanted = [x for x in inputs if x.requires_grad]
    if not pairs or not wanted:
        return [None] * len(inputs)
    found = iter(torch.autograd.grad([y for y, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True))
    out = []
    for x in inputs:
        g = next(found) if x.requires_grad else None
        out.append(torch.zeros_like(x) if g is None and x.requires_grad else g)
    return out


def leaf(x: torch.Tensor, grad: bool) -> torch.Tensor:
    x = x.detach().clone()
    return x.requires_grad_() if grad and differentiable(x) else x


Run = Callable[[Coords, list[torch.Tensor], dict[Coords, list[torch.Tensor]]], list[torch.Tensor]]
"""An op on one rank's operands, given what all ranks hold (for kernels that communicate); coordinates () means the whole op."""


def compare(
    operands: list[torch.Tensor],
    layouts: tuple[Layout, ...],
    result_layouts: tuple[Layout, ...],
    sizes: Coords,
    run: Run,
    frozen: frozenset[int] = frozenset(),
) -> dict[str, float]:
    """Run an op on every rank's pieces, forward and backward. Largest differences from the whole op, by what is compared.

    ``frozen`` are operands without a gradient (whole numbers never have one).
    """
    learns = [i not in frozen for i in range(len(operands))]
    whole_in = [leaf(x, grad) for x, grad in zip(operands, learns)]
    whole_out = run((), whole_in, {})
    grads = [torch.randn_like(y) if differentiable(y) and y.requires_grad else None for y in whole_out]
    whole_grads = backward(whole_out, whole_in, grads)

    everyone = list(product(*map(range, sizes)))
    parts = [scatter(x.detach(), layout, sizes) for x, layout in zip(operands, layouts)]
    local_in = {c: [leaf(p[c], grad) for p, grad in zip(parts, learns)] for c in everyone}
    local_out = {c: run(c, local_in[c], local_in) for c in everyone}
    errors: dict[str, float] = {}
    for i, (y, layout) in enumerate(zip(whole_out, result_layouts)):
        value, apart = gather({c: local_out[c][i].detach() for c in everyone}, layout, sizes)
        errors[f"result {i}"] = max(apart, difference(value, y))

    local_grads_out = [None if g is None else scatter(g, dual(layout), sizes) for g, layout in zip(grads, result_layouts)]
    local_grads = {c: backward(local_out[c], local_in[c], [g and g[c] for g in local_grads_out]) for c in everyone}
    for i, (g, layout) in enumerate(zip(whole_grads, layouts)):
        if g is not None:
            parts = {c: torch.zeros_like(local_in[c][i]) if local_grads[c][i] is None else local_grads[c][i] for c in everyone}
            value, apart = gather(parts, dual(layout), sizes)
            errors[f"gradient of operand {i}"] = max(apart, difference(value, g))
    return errors


def node_of(target, args: tuple, kwargs: dict | None = None) -> tuple[fx.Node, list[torch.Tensor]]:
    """An fx node that calls ``target`` on these arguments, and its tensor operands in order. ``meta["val"]`` are real tensors."""
    graph = fx.Graph()
    values: list[torch.Tensor] = []

    def placeholder(x: torch.Tensor) -> fx.Node:
        node = graph.placeholder(f"x{len(values)}")
        node.meta["val"] = x
        values.append(x)
        return node

    args, kwargs = pytree.tree_map_only(torch.Tensor, placeholder, (tuple(args), kwargs or {}))
    node = graph.call_function(target, args, kwargs)
    with torch.no_grad():
        node.meta["val"] = target(*fx.map_arg(args, lambda n: n.meta["val"]), **fx.map_arg(kwargs, lambda n: n.meta["val"]))
    return node, values


def call(node: fx.Node, values: list[torch.Tensor], target=None, args=None) -> list[torch.Tensor]:
    """Call the op of ``node`` (or another one) with its tensor operands, in order, replaced by ``values``."""
    rest = iter(values)
    args, kwargs = fx.map_arg((args if args is not None else node.args, node.kwargs), lambda n: next(rest))
    return list(tensors((target or node.target)(*args, **kwargs)))


def tolerance(values) -> float:
    """Of sums in the values' own precision."""
    coarse = max((torch.finfo(v.dtype).eps for v in values if differentiable(v)), default=0.0)
    scale = max((float(v.abs().max()) for v in values if differentiable(v) and v.numel()), default=1.0)
    return 1e4 * coarse * max(scale, 1.0)


def check_rule(target, text: str, samples: tuple) -> None:
    """Check a user's rule on sample arguments: every factor cut in two. RuleError names the factor that is wrong."""
    try:
        node, values = node_of(target, samples)
    except RuleError:
        raise
    except Exception as error:
        raise RuleError(f"{target.name()} fails on the samples: {error}") from error
    rule: OpRule = bind_node(node, text)
    for factor, size in rule.sizes.items():
        if factor in rule.fixed:
            continue
        if not any(c.factor == factor for c in choices(rule, 2)):
            raise RuleError(
                f"rule {text!r} of {target.name()}: factor {factor!r} is {size} in the samples and can't be cut in two",
                hint="give larger samples, or mark the factor ^ (never sharded)",
            )
        choice = factor_choice(rule, factor)
        operand_layouts, result_layouts = (tuple((p,) for p in side) for side in (choice.operands, choice.results))
        shown = f"{', '.join(map(str, choice.operands))} -> {', '.join(map(str, choice.results))}"
        try:
            with torch.random.fork_rng(devices=[]):  # summands and gradients are random; the user's own stream stays as it is
                torch.manual_seed(0)
                errors = compare(values, operand_layouts, result_layouts, (2,), lambda coords, local, peers: call(node, local))
        except Exception as error:
            raise RuleError(
                f"rule {text!r} of {target.name()}: cut in two along factor {factor!r} ({shown}), the op fails: {error}",
                hint=f"if the op needs {factor!r} whole, write {factor}^",
            ) from error
        limit = tolerance([*values, *tensors(node.meta["val"])])
        wrong = next((item for item in errors.items() if item[1] > limit), None)
        if wrong:
            raise RuleError(
                f"rule {text!r} of {target.name()}: cut in two along factor {factor!r} ({shown}), {wrong[0]} is off by {wrong[1]:.3g}",
                hint=f"if the op needs {factor!r} whole, write {factor}^",
            )
