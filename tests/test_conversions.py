"""Every conversion, forward and backward, against the definition of the states."""

import itertools
import random

import pytest
import torch
import torch.distributed as dist
from definition import held
from workers import WorkerError, run_on

from autoshard.errors import PlacementError
from autoshard.placement import CONVERSIONS, R_STAR, P, R, S, format_layout, legal, parse_placement, route, step_arguments
from autoshard.runtime.axis import Axis
from autoshard.runtime.convert import convert

STATES = ["S(0)", "S(1)", "S(1/3)", "S(2)", "R", "R*", "P"]


def shapes(k):
    yield (2 * k, 3 * k, k)  # even
    yield (2 * k - 1, 3 * (k + 1), k + 1)  # uneven
    yield (k + 1, 3, 1)  # uneven, and ranks without any piece
    yield (0, 6, 2)  # nothing at all


def piece(x, state, k, index):
    """The definition of a shard, by torch.chunk."""
    blocks = x.chunk(state.blocks, state.dim) if state.blocks > 1 else [x]
    empty = [block.narrow(state.dim, 0, 0) for block in blocks]
    cut = [[*block.chunk(k, state.dim), *[none] * k][index] for block, none in zip(blocks, empty)]
    return torch.cat(cut, state.dim)


def part(x, state, k, index, summands):
    """What rank ``index`` holds of the value x; ``summands`` says which state holds summands."""
    if state.is_shard:
        return piece(x, state, k, index)
    return summand(x, k, index) if state.kind == summands else x.clone()


def summand(x, k, index):
    terms = [torch.full_like(x, i) + x // 3 for i in range(k - 1)]
    return (terms + [x - sum(terms)])[index]


def same(local, x, state, k, index, summands, group, message):
    """Checks that ``local`` is what a rank holds of x."""
    if state.kind == summands:
        local = local.contiguous().clone()
        dist.all_reduce(local, group=group)
        want = x
    else:
        want = part(x, state, k, index, summands)
    torch.testing.assert_close(local, want, rtol=0, atol=1e-12, msg=lambda text: f"{message}: {text}")


def check(shape, text, axis, strided):
    src, dst = map(parse_placement, text.split("->"))
    k, index, group = axis.size, axis.index, axis.group
    size = shape[src.dim] if src.is_shard else None
    where = f"{text} of {shape} over {k}"

    def local(x, state, summands):
        x = part(x, state, k, index, summands)
        return x.transpose(0, -1).contiguous().transpose(0, -1) if strided and x.dim() else x

    values, grads, again = (torch.randn(shape, dtype=torch.float64) for _ in range(3))
    x = local(values, src, "P").requires_grad_()
    g = local(grads, dst, "R*").requires_grad_()
    y = convert(x, text, axis, size)
    same(y.detach(), values, dst, k, index, "P", group, f"value of {where}")
    (grad,) = torch.autograd.grad(y, x, g, create_graph=True)
    same(grad.detach(), grads, src, k, index, "R*", group, f"gradient of {where}")
    if not strided:
        (second,) = torch.autograd.grad(grad, g, local(again, src, "P"))
        same(second, again, dst, k, index, "P", group, f"double backward of {where}")

    values = torch.randint(-9, 9, shape)
    y = convert(local(values, src, "P"), text, axis, size)
    assert y.dtype == values.dtype
    same(y, values, dst, k, index, "P", group, f"whole numbers of {where}")
    if "P" not in (src.kind, dst.kind):
        values = torch.rand(shape) < 0.5
        y = convert(local(values, src, "P"), text, axis, size)
        assert torch.equal(y, part(values, dst, k, index, "P"))


def check_all(rank, k):
    axis = Axis("tensor", k, rank, dist.group.WORLD)
    torch.manual_seed(0)
    for number, shape in enumerate(shapes(k)):
        for src, dst in itertools.permutations(STATES, 2):
            check(shape, f"{src} -> {dst}", axis, strided=number == 1)
    for src, dst in itertools.permutations(["R", "R*", "P"], 2):
        check((), f"{src} -> {dst}", axis, strided=False)


@pytest.mark.parametrize("k", [2, 3, 4])
def test_every_cell_forward_and_backward(k):
    run_on(k, check_all, k)


def check_compiled(rank, k):
    axis = Axis("tensor", k, rank, dist.group.WORLD)
    torch.manual_seed(0)
    shape = (2 * k - 1, 3 * (k + 1), k + 1)
    cells = [(f"{src.replace('S', 'S(1/3)')} -> {dst.replace('S', 'S(0)')}", shape[1] if src == "S" else None) for src, dst in CONVERSIONS]
    values = [part(torch.randn(shape), parse_placement(text.split("->")[0]), k, rank, "P") for text, _ in cells]

    def every_cell(*xs):
        return [convert(x * 2, text, axis, size) * 3 for x, (text, size) in zip(xs, cells)]

    results = []
    for run in (torch.compile(every_cell, fullgraph=True, backend="aot_eager"), every_cell):
        xs = [x.clone().requires_grad_() for x in values]
        ys = run(*xs)
        results.append([*(y.detach() for y in ys), *torch.autograd.grad(sum(y.square().sum() for y in ys), xs)])
    torch.testing.assert_close(*results)


def test_compiled_without_graph_break():
    run_on(2, check_compiled, 2, timeout=110)


SHARDS = [S(0), S(0, 2), S(0, 3), S(0, 6), S(1)]


def layouts(shape, sizes):
    both = [(a, b) for a in SHARDS for b in SHARDS]
    one = [pair for other in (R, P, R_STAR) for shard in SHARDS for pair in ((shard, other), (other, shard))]
    none = [(a, b) for a in (R, P, R_STAR) for b in (R, P, R_STAR)]
    return [layout for layout in both + one + none if legal(layout, shape, sizes)]


def check_routes(rank, sizes):
    """Routes over two axes, many of them with both axes on one dim: every rank ends with the pieces of the destination."""
    coords = (rank // sizes[1], rank % sizes[1])
    groups = [{}, {}]
    for a, b in itertools.product(range(sizes[0]), range(sizes[1])):  # every rank makes every group
        for axis, other in ((0, b), (1, a)):
            if other not in groups[axis]:
                ranks = [i * sizes[1] + other for i in range(sizes[0])] if axis == 0 else [other * sizes[1] + i for i in range(sizes[1])]
                groups[axis][other] = dist.new_group(ranks)
    axes = [Axis(name, sizes[i], coords[i], groups[i][coords[1 - i]]) for i, name in enumerate(("data", "tensor"))]

    def local(x, layout, summands):
        for state, axis in zip(layout, axes):
            if state.kind == summands:
                x = summand(x, axis.size, axis.index)
        for dim, size in enumerate(x.shape):
            x = x.index_select(dim, torch.tensor(held(size, dim, layout, sizes, coords)))
        return x.clone()

    def same(mine, x, layout, summands, message):
        for state, axis in zip(layout, axes):
            if state.kind == summands:
                dist.all_reduce(mine, group=axis.group)
        torch.testing.assert_close(mine, local(x, layout, None), rtol=0, atol=1e-12, msg=lambda text: f"{message}: {text}")

    torch.manual_seed(0)
    pick = random.Random(0)
    for shape in ((24, 4), (12, 5), (7, 3)):
        pairs = list(itertools.permutations(layouts(shape, sizes), 2))
        for src, dst in pick.sample(pairs, 60):
            values, grads = (torch.randn(shape, dtype=torch.float64) for _ in range(2))
            x = local(values, src, "P").requires_grad_()
            y = x
            for step in route(src, dst, shape, sizes):
                text, size = step_arguments(step, shape, sizes, coords)
                y = convert(y, text, axes[step.axis], size)
            where = f"{format_layout(src)} -> {format_layout(dst)} of {shape} over {sizes}"
            (grad,) = torch.autograd.grad(y, x, local(grads, dst, "R*"))
            same(y.detach(), values, dst, "P", f"value of {where}")
            same(grad.clone(), grads, src, "R*", f"gradient of {where}")


def test_routes_over_two_axes():
    run_on(4, check_routes, (2, 2))


def test_nonsense_is_refused():
    axis, x = Axis("data", 2, 0), torch.zeros(3, 4)
    for text, size, message in (
        ("S(0)", 6, "can't read the conversion"),
        ("S(0) -> Q", 6, "can't read the placement 'Q'"),
        ("S(0) -> R", None, "needs the whole size of dim 0"),
        ("S(0) -> R", 8, r"shape \(3, 4\) is not piece 0 of 2 of a dim 0 of size 8"),
        ("S(0/2) -> R", 6, "is not piece 0 of 2"),
    ):
        with pytest.raises(PlacementError, match=message):
            convert(x, text, axis, size)


def test_an_axis_of_one_rank_converts_nothing():
    x = torch.zeros(3, 4)
    for src, dst in CONVERSIONS:
        assert convert(x, f"{src} -> {dst}".replace("S", "S(0)"), Axis("data"), 3) is x


def fail_on_one(rank):
    if rank == 1:
        raise ValueError("the first to fail")
    dist.barrier()


def test_the_first_failure_is_reported():
    with pytest.raises(WorkerError, match="(?s)rank 1: .*ValueError: the first to fail"):
        run_on(2, fail_on_one)


def hang(rank):
    if rank == 0:
        dist.barrier()


def test_a_hang_is_an_error():
    with pytest.raises(WorkerError, match="(?s)rank 0: .*(barrier|still running)"):
        run_on(2, hang, timeout=4)
