"""``autoshard profile``: what this machine's processors and its communication between processes attain, as a cluster to plan for.

Everything is measured as emitted code meets it: ops through autograd, one thread a process, collectives through the runtime's own
functions over gloo. What comes of it are

    an op            launch + max(flops / peak, bytes / bandwidth), times a factor of its own for some
    a collective     latency + bytes / bandwidth, by kind and number of processes, by the clock and in processor time
    cores            how many processes the machine runs at once as fast as one alone

Lines through small and large sizes are fitted to relative errors, so that small ones count as much. Operands are cold: a step goes over
all activations and weights of a model before it meets one again, so measurements take turns over as many as no cache holds. What is
measured in processor time other work on the machine does not count in; by the clock the best of many runs is taken: noise only adds.
"""

from __future__ import annotations

import os
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist
from torch import fx
from torch.nn import functional as F

from autoshard.checking.processes import Process, Status, wait_for
from autoshard.cluster import Cluster, Device, Fit, Host, Link
from autoshard.cost.compute import accumulation_seconds, op_cost, optimizer_seconds
from autoshard.placement import R
from autoshard.program import op_kind
from autoshard.rules import rule_for
from autoshard.rules.notation import Choice, Strategy
from autoshard.runtime import collectives
from autoshard.runtime.axis import Axis

aten = torch.ops.aten

SPAN = 0.25  # seconds that a measurement lasts
MOST = 200  # runs of it, at most
DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16}
ROWS, SIZES = 512, (64, 256, 768)  # of the matrices: rows of activations, and both sides of a weight
VALUES = 2**20  # elements of what bandwidth is measured on: no cache of one processor holds three of them
MESSAGES = (2**10, 2**18, 2**22)  # bytes of what collectives are measured on
COLD = 2**26  # bytes of operands, of all processes, that measurements take turns over
TURNS = 32  # at most
BATCHES = 10  # of runs of a collective


def profile(processes: int, progress: TextIO | None = None) -> Cluster:
    """Measure this machine, with up to ``processes`` processes at once; takes half a minute.

    Warns if the machine has other work to do.
    """
    load = os.getloadavg()[0]
    if load > 0.5 * processors():
        warnings.warn(f"the machine is busy (load {load:.1f} on {processors():g} processors): collectives will seem slower", stacklevel=2)

    def say(text: str) -> None:
        if progress is not None:
            print(text, file=progress, flush=True)

    counts = sorted({n for n in (2, 4, 8, 16, 32) if n < processes} | ({processes} - {1}))
    with tempfile.TemporaryDirectory() as folder:
        say("one process alone: matmuls, memory, small ops, ops with factors of their own")
        alone = _on(1, _alone, folder)
        several = max(1, min(processes, int(processors())))
        say(f"{several} processes side by side")
        cores = processors() / max(1.0, _on(several, _side_by_side, folder))
        fits = []
        for n in counts:
            say(f"collectives of {n} processes")
            for kind, points in _on(n, _collectives, folder).items():
                work = [(size, seconds) for size, _, seconds in points]
                # where processes wait for processors, the clock says most of all what else the machine does
                clock = [(size, seconds) for size, seconds, _ in points] if n <= processors() else [(x, y * n / cores) for x, y in work]
                fits.append(Fit(kind, n, *line(clock), *line(work)))
    slope = {(fit.kind, fit.ranks): fit for fit in fits}.get(("all_reduce", 2))
    # of two ranks the ring's formula is 2 latencies and bytes / bandwidth
    link = Link(slope.bandwidth, slope.latency / 2, 1.0, "measured, gloo all-reduce of two processes") if slope else Link(1e9, 1e-4)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // processes
    source = f"measured with torch {torch.__version__}; memory: the machine's, shared by {processes} processes"
    device = replace(alone, name=f"one thread of {_processor()}", memory=float(memory), source=source)
    host = Host(Link(device.bandwidth / 2, device.launch), device.bandwidth, "the same memory: a copy reads and writes it")
    title = f"profile of {platform.node() or 'this machine'}"
    return Cluster(title, device, processes, link, link, 1, host=host, cores=cores, fits=tuple(fits))


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(latency, bytes a second) of the line through (bytes, seconds) with the least relative error; both are positive.

    Least squares of (a + b x - y) / y.
    """
    sums = [sum((x**i) / y**2 for x, y in points) for i in range(3)]
    right = [sum((x**i) / y for x, y in points) for i in range(2)]
    determinant = sums[0] * sums[2] - sums[1] ** 2
    a = (right[0] * sums[2] - right[1] * sums[1]) / determinant
    b = (sums[0] * right[1] - sums[1] * right[0]) / determinant
    if a <= 0:  # all bandwidth
        a, b = min(y for _, y in points) * 1e-3, right[1] / sums[2]
    if b <= 0:  # all latency
        b = min(y for _, y in points) * 1e-3 / max(x for x, _ in points)
    return a, 1 / b


def _on(n: int, work: Callable[[Status], object], folder: str):
    """What ``work`` returns on the first of n processes that run it at once."""
    place = Path(tempfile.mkdtemp(dir=folder))

    def body(rank: int, status: Status):
        store = dist.FileStore(str(place / "store"), n)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=n)
        result = work(status)
        if store.add("done", 1) == n:  # whoever leaves early takes connections away that others still read
            store.set("all", "done")
        store.wait(["all"])
        return result

    ranks = [Process(f"rank {rank}", partial(body, rank), place) for rank in range(n)]
    wait_for(ranks, timeout=120)
    return ranks[0].result


def work_seconds(*runs: Callable[[], object]) -> float:
    """Processor time of one run, in the median of as many as fit. Several take turns, each with operands of its own."""
    for run in runs:
        run()
    found: list[float] = []
    turns = cycle(runs)
    while len(found) < 3 or (sum(found) < SPAN and len(found) < MOST):
        run = next(turns)
        start = time.thread_time()
        run()
        found.append(time.thread_time() - start)
    return statistics.median(found)


def group_seconds(*runs: Callable[[], object]) -> tuple[float, float]:
    """(seconds by the clock, processor time of a process, mean of all) of one of the runs, which all processes do one after another.

    Of several batches the fastest, and the median.
    """
    for run in runs:
        run()
    start = time.perf_counter()
    runs[0]()
    count = torch.tensor([int(max(2, min(MOST, SPAN / max(time.perf_counter() - start, 1e-6))) / BATCHES) + 1])
    dist.broadcast(count, 0)
    clocks, works, turns = [], [], cycle(runs)
    for _ in range(BATCHES):
        dist.barrier()
        start, busy = time.perf_counter(), time.process_time()
        for run in islice(turns, int(count)):
            run()
        spent = torch.tensor([time.perf_counter() - start, time.process_time() - busy], dtype=torch.float64)
        dist.all_reduce(spent)
        clock, work = (spent / dist.get_world_size() / count).tolist()
        clocks.append(clock)
        works.append(work)
    return min(clocks), statistics.median(works)


def _alone(status: Status) -> Device:
    status("measuring alone")
    a, b = torch.randn(VALUES), torch.randn(VALUES)
    sums = [lambda a=a, b=b: a + b for a, b in _copies(a, b)]
    device = Device(
        name="alone",
        peak={name: _peak(dtype) for name, dtype in DTYPES.items()},
        memory=1.0,
        bandwidth=3 * a.nbytes / work_seconds(*sums),
        launch=_launch(),
        compute_efficiency=1.0,
        memory_efficiency=1.0,
        kind="cpu",
    )
    factors = {op_kind(node): _factors(node, device) for node in _samples()}
    added = [lambda a=a, b=b: a.add_(b) for a, b in _copies(a, b)]
    factors["accumulate"] = work_seconds(*added) / accumulation_seconds(a.nbytes, 1, replace(device, factors={"accumulate": (1, 0)})), 0.0
    factors["view"] = _views(device)
    factors["optimizer"] = _optimizer(device)
    return replace(device, factors=factors)


def _samples() -> list[fx.Node]:
    """Ops that no roofline fits: what they compute, or how often they go over memory, decides."""
    graph, nodes = fx.Graph(), []

    def call(target: Callable, *args: object, **kwargs: object) -> None:
        holders = [graph.placeholder(f"x{len(nodes)}_{i}") for i in range(len(args))]
        for holder, x in zip(holders, args):
            holder.meta.update(val=x, grad=isinstance(x, torch.Tensor) and x.requires_grad)
        node = graph.call_function(target, tuple(h if isinstance(x, torch.Tensor) else x for h, x in zip(holders, args)), kwargs)
        node.meta.update(val=target(*args, **kwargs), grad=True)
        nodes.append(node)

    def wide(*shape: int) -> torch.Tensor:
        return torch.randn(shape, requires_grad=True)

    x = wide(2 * ROWS, ROWS // 2)
    call(aten.linear.default, x, wide(2 * ROWS, ROWS // 2))
    call(aten.addmm.default, wide(2 * ROWS), x, wide(ROWS // 2, 2 * ROWS))
    x = wide(ROWS, VALUES // ROWS)
    for target in (aten.tanh, aten.gelu, aten.silu, aten.relu, aten.exp, aten.sigmoid):
        call(target.default, x)
    call(aten.pow.Tensor_Scalar, x, 2.0)
    call(aten.mul.Tensor, x, wide(ROWS, VALUES // ROWS))
    call(aten.layer_norm.default, x, [x.shape[1]], wide(x.shape[1]), wide(x.shape[1]))
    call(aten.softmax.int, x, -1)
    call(aten.cross_entropy_loss.default, x, torch.randint(0, x.shape[1], (ROWS,)), None, 2)
    call(aten.embedding.default, wide(2048, 512), torch.randint(0, 2048, (ROWS,)))
    call(aten.scaled_dot_product_attention.default, *(wide(8, 4, 128, 64) for _ in range(3)), None, 0.0, True)
    return nodes


def _factors(node: fx.Node, device: Device) -> tuple[float, float]:
    """How many times as long as the cost model says an op takes, forward and backward."""
    nothing = (R, R)
    rule = rule_for(node)
    whole = Choice("replicate", (R,) * len(rule.operands), (R,) * len(rule.results))
    strategy = Strategy((whole, whole), (nothing,) * len(rule.operands), (nothing,) * len(rule.results))
    cost = op_cost(node, rule, strategy, (1, 1), Cluster("alone", device, 1, Link(1.0, 1.0), Link(1.0, 1.0), 1))
    args = [x.meta["val"] if isinstance(x, fx.Node) else x for x in node.args]
    copies = _copies(*args)

    @torch.no_grad()
    def forward(given: tuple) -> None:
        node.target(*given)

    results = [node.target(*given) for given in copies]
    gradient = torch.ones_like(results[0])

    def backward(result: torch.Tensor, given: tuple) -> None:
        leaves = [x for x in given if isinstance(x, torch.Tensor) and x.requires_grad]
        torch.autograd.grad(result, leaves, gradient, retain_graph=True)

    return (
        work_seconds(*(partial(forward, given) for given in copies)) / cost.forward,
        work_seconds(*(partial(backward, *pair) for pair in zip(results, copies))) / cost.backward,
    )


def _copies(*args: object) -> list[tuple]:
    """The arguments, with tensors of their own each: ``COLD`` bytes in all, if they are not too small."""

    def copy(x: object) -> object:
        return x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x

    nbytes = sum(x.nbytes for x in args if isinstance(x, torch.Tensor))
    return [tuple(copy(x) for x in args) for _ in range(1 + min(TURNS, COLD // (nbytes * dist.get_world_size())))]


def _optimizer(device: Device) -> tuple[float, float]:
    """The same of Adam's step, beside what each parameter takes, in launches."""

    def step_seconds(elements: int) -> float:
        weights = [torch.nn.Parameter(x) for (x,) in _copies(torch.randn(elements))]
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        return work_seconds(torch.optim.AdamW(weights).step) / len(weights)

    start = step_seconds(4)
    return max(0.0, step_seconds(VALUES // 4) - start) / optimizer_seconds(VALUES // 4, device), start / device.launch


def _views(device: Device) -> tuple[float, float]:
    """Launches that a view costs, which runs no kernel."""
    x = torch.ones(4, requires_grad=True)
    length = 50

    def forward() -> torch.Tensor:
        y = x
        for _ in range(length):
            y = y.unsqueeze(0).squeeze(0)
        return y

    y = forward()
    gradient = torch.ones_like(y)
    backward = work_seconds(lambda: torch.autograd.grad(y, x, gradient, retain_graph=True))
    return tuple(seconds / (2 * length * device.launch) for seconds in (work_seconds(forward), backward))


def _peak(dtype: torch.dtype) -> float:
    """FLOP a second that matmuls attain, beside what starting them costs."""
    points = []
    for size in SIZES:
        x, w = torch.randn(ROWS, size, dtype=dtype), torch.randn(4 * size, size, dtype=dtype)
        points.append((2.0 * ROWS * size * 4 * size, work_seconds(*(partial(F.linear, *pair) for pair in _copies(x, w)))))
    return line(points)[1]


def _launch() -> float:
    """Seconds that one op costs that has nothing to do, forward or backward."""
    x = torch.ones(4, requires_grad=True)
    length = 50

    def run() -> None:
        y = x
        for _ in range(length):
            y = y * 1.5
        y.sum().backward()

    return work_seconds(run) / (2 * length)


def _side_by_side(status: Status) -> float:
    """How many times as much processor time some work, arithmetic and memory, takes while other processes do the same as alone.

    Both are measured in turns, so that what else the machine does falls on both.
    """
    status("measuring side by side")
    first, found = dist.get_rank() == 0, []

    def run(x: torch.Tensor, w: torch.Tensor, a: torch.Tensor) -> None:
        F.linear(x, w)
        for _ in range(4):
            a + a

    runs = [partial(run, *given) for given in _copies(torch.randn(ROWS, 512), torch.randn(2048, 512), torch.randn(VALUES))]
    for _ in range(5):
        alone = work_seconds(*runs) if first else 0.0
        dist.barrier()
        found.append((work_seconds(*runs), alone))
        dist.barrier()
    return statistics.median(together / alone for together, alone in found) if first else 0.0


def _collectives(status: Status) -> dict[str, list[tuple[float, float, float]]]:
    """Kind -> (bytes, seconds by the clock, processor time of a process). Bytes of the whole value along the axis, of a send the message.

    Values are cut in dim 1, so that what arrives is put in its place, as of activations and of weights that are gathered together.
    """
    n, rank = dist.get_world_size(), dist.get_rank()
    axis = Axis("data", n, rank, dist.group.WORLD)
    found: dict[str, list[tuple[float, float, float]]] = {}

    def measure(kind: str, run: Callable[[torch.Tensor], object], x: torch.Tensor, size: int, times: int = 1) -> None:
        status(f"measuring {kind}")
        found.setdefault(kind, []).append((size, *(t / times for t in group_seconds(*(partial(run, *given) for given in _copies(x))))))

    for nbytes in MESSAGES:
        whole = torch.randn(32, max(1, nbytes // (128 * n)) * n)
        width, size = whole.shape[1], whole.nbytes
        piece = whole[:, : width // n].clone()
        measure("all_reduce", lambda x: collectives.all_reduce(x, axis), whole, size)
        measure("all_gather", lambda x, width=width: collectives.all_gather(x, axis, 1, width), piece, size)
        measure("reduce_scatter", lambda x: collectives.reduce_scatter(x, axis, 1), whole, size)
        measure("all_to_all", lambda x, width=width: collectives.all_to_all(x, axis, (1, 1), (0, 1), width), piece, size)
        measure("send", lambda x: _there_and_back(x, rank, n), whole, size, 2)
    return found


def _there_and_back(x: torch.Tensor, rank: int, n: int) -> None:
    """Two messages, one after the other, between each rank and its neighbour."""
    partner = rank + 1 if rank % 2 == 0 else rank - 1
    if partner < n:
        received = torch.empty_like(x)
        calls = [lambda: dist.send(x, partner), lambda: dist.recv(received, partner)]
        for call in calls if rank % 2 == 0 else calls[::-1]:
            call()


def processors() -> float:
    """How many processors this process may use: those of its affinity, less what a control group allows."""
    count = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return count if quota == "max" else min(count, int(quota) / int(period))
    except (OSError, ValueError):
        return count


def _processor() -> str:
    try:
        for text in Path("/proc/cpuinfo").read_text().splitlines():
            if text.startswith("model name"):
                return text.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
