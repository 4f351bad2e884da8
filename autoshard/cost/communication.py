"""Seconds of every collective, and of the conversions between layouts that are made of them.

The alpha-beta model: a message of n bytes takes alpha + n / beta. Ring algorithms over k ranks, n the full size in bytes along the axis,
g = (k - 1) / k (Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", IJHPCA 2005;
Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 2009):

    all-reduce                     2 (k - 1) alpha + 2 g n / beta
    all-gather, reduce-scatter       (k - 1) alpha +   g n / beta
    all-to-all                       (k - 1) alpha +   g (n / k) / beta
    send                                     alpha +     n / beta
    slice, pad, divide             a copy in the rank's own memory: bytes read and written / memory bandwidth + launch
    none                           0

Where a cluster has measurements (``Cluster.fits``), a collective takes what they say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod

from autoshard.cluster import Cluster, Device, Link
from autoshard.mesh import SHARDED_AXES, Mesh
from autoshard.placement import CONVERSIONS, Layout, bytes_sent, largest, route
from autoshard.rules.notation import Strategy

_RING = {  # collective -> (messages in units of k - 1, factor of Conversion.forward_bytes)
    "all_reduce": (2, "2"),
    "all_gather": (1, "1"),
    "reduce_scatter": (1, "1"),
    "all_to_all": (1, "1/k"),
}
_COPIES = {  # local conversion -> (bytes read and written, as a multiple of the full size and of the piece)
    "slice": (0, 2),
    "pad": (1, 1),
    "divide": (2, 0),
}


@dataclass(frozen=True)
class Collective:
    """One single-axis step of a conversion, forward or backward. ``nbytes`` is what one rank sends; ``seconds`` of one run."""

    axis: str
    kind: str  # "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send", "slice", "pad", "divide"
    nbytes: float
    seconds: float
    direction: str  # "forward" | "backward"

    @property
    def local(self) -> bool:
        """Whether nothing leaves the rank."""
        return self.kind in _COPIES


def collective_seconds(kind: str, nbytes: float, k: int, link: Link) -> float:
    """Seconds of one collective over k ranks. ``nbytes``: the full size along the axis (for a send: the message)."""
    if kind == "send":
        return link.latency + nbytes / link.rate
    if k == 1:
        return 0.0
    messages, factor = _RING[kind]
    return messages * (k - 1) * link.latency + bytes_sent(factor, nbytes, k) / link.rate


def group_seconds(kind: str, nbytes: float, axis: str, k: int, mesh: Mesh, cluster: Cluster) -> float:
    """``collective_seconds`` over the ``k`` ranks along ``axis``, as measured if it was."""
    if k == 1:
        return 0.0
    fit = cluster.fit(kind, k, mesh)
    return collective_seconds(kind, nbytes, k, cluster.link(axis, mesh)) if fit is None else fit[0] + nbytes * fit[1]


def copy_seconds(kind: str, nbytes: float, k: int, device: Device) -> float:
    """Seconds of a conversion that stays on the rank; ``nbytes``: the full size along the axis."""
    if kind == "none" or k == 1:
        return 0.0
    whole, piece = _COPIES[kind]
    return (whole + piece / k) * nbytes / device.memory_rate + device.launch


def _run(kind: str, axis: str, nbytes: float, mesh: Mesh, cluster: Cluster, direction: str) -> Collective:
    k = getattr(mesh, axis)
    if kind in _COPIES:
        return Collective(axis, kind, 0.0, copy_seconds(kind, nbytes, k, cluster.device), direction)
    seconds = group_seconds(kind, nbytes, axis, k, mesh, cluster)
    return Collective(axis, kind, bytes_sent(_RING[kind][1], nbytes, k), seconds, direction)


@cache
def conversion_steps(
    src: Layout, dst: Layout, shape: tuple[int, ...], itemsize: int, mesh: Mesh, cluster: Cluster, grad: bool, batch_share: float = 1.0
) -> tuple[Collective, ...] | None:
    """All that runs to bring a value from ``src`` to ``dst``, forward in order and then backward in reverse; None if there is no way.

    shape: global. grad: whether a gradient flows back. batch_share: 1 / micro-batches if the value grows with the batch, else 1.
    """
    way = route(src, dst, shape, mesh.sizes, grad)
    if way is None:
        return None
    forward, backward = [], []
    for step in way:
        nbytes = largest(shape, step.others, mesh.sizes) * itemsize * batch_share
        axis, conversion = SHARDED_AXES[step.axis], step.conversion
        if conversion.forward != "none":
            forward.append(_run(conversion.forward, axis, nbytes, mesh, cluster, "forward"))
        if grad and conversion.backward != "none":
            backward.append(_run(conversion.backward, axis, nbytes, mesh, cluster, "backward"))
    return tuple(forward + backward[::-1])


@cache
def conversion_seconds(
    src: Layout, dst: Layout, shape: tuple[int, ...], itemsize: int, mesh: Mesh, cluster: Cluster, grad: bool, batch_share: float = 1.0
) -> tuple[float, float] | None:
    """(forward, backward) seconds of a conversion, one run; None if there is no way. Arguments as for ``conversion_steps``."""
    way = route(src, dst, shape, mesh.sizes, grad)
    if way is None:
        return None
    forward = backward = 0.0
    for step in way:
        nbytes = largest(shape, step.others, mesh.sizes) * itemsize * batch_share
        (start, rate), (start_back, rate_back) = _linear(step.src.kind, step.dst.kind, SHARDED_AXES[step.axis], mesh, cluster)
        forward += start + rate * nbytes
        backward += start_back + rate_back * nbytes
    return forward, backward if grad else 0.0


@cache
def _linear(src: str, dst: str, axis: str, mesh: Mesh, cluster: Cluster) -> tuple[tuple[float, float], tuple[float, float]]:
    """Forward and backward, (seconds, seconds a byte) of a step between placements of two kinds: what ``_run`` comes to."""
    conversion = CONVERSIONS[src, dst]
    found = []
    for kind in (conversion.forward, conversion.backward):
        start, byte = (_run(kind, axis, n, mesh, cluster, "").seconds if kind != "none" else 0.0 for n in (0.0, 1e9))
        found.append((start, (byte - start) / 1e9))
    return found[0], found[1]


def together(steps: Sequence[Collective], mesh: Mesh, cluster: Cluster) -> list[Collective]:
    """Collectives of which those of one kind, axis and direction are run as one: they wait for the network once."""
    found: dict[tuple[str, str, str], Collective] = {}
    for step in steps:
        key = step.kind, step.axis, step.direction
        if key in found:
            spared = 0.0 if step.local else group_seconds(step.kind, 0.0, step.axis, getattr(mesh, step.axis), mesh, cluster)
            before = found[key]
            step = replace(before, nbytes=before.nbytes + step.nbytes, seconds=before.seconds + step.seconds - spared)
        found[key] = step
    return list(found.values())


def gradient_sync(nbytes: float, axes: tuple[str, ...], mesh: Mesh, cluster: Cluster) -> Collective:
    """The sum of ``nbytes`` of gradients, once a step, as *one* all-reduce over the joint group of ``axes`` (of size 1: left out).

    One ring over both axes sends 2 (kl - 1)/(kl) n; one after the other would send 2 (k - 1)/k n + 2 (l - 1)/l n, nearly twice as much.
    """
    axes = tuple(axis for axis in axes if getattr(mesh, axis) > 1)
    name, k = "+".join(axes), prod(getattr(mesh, axis) for axis in axes)
    if k == 1:
        return Collective(name, "all_reduce", 0.0, 0.0, "backward")
    seconds = group_seconds("all_reduce", nbytes, name, k, mesh, cluster)
    return Collective(name, "all_reduce", bytes_sent("2", nbytes, k), seconds, "backward")


def gradient_sync_seconds(nbytes: float, axes: tuple[str, ...], mesh: Mesh, cluster: Cluster) -> float:
    """Seconds of ``gradient_sync``."""
    return gradient_sync(nbytes, axes, mesh, cluster).seconds


def weight_sync(nbytes: float, axes: tuple[str, ...], zero: int, mesh: Mesh, cluster: Cluster) -> tuple[Collective, ...]:
    """What runs once a step for weights whose gradients are summed over ``axes``: nothing over axes of size 1.

    nbytes: of the weights that a rank holds. zero: their ZeRO level. From 1 on ranks update pieces over data and gather the weights; from 2
    on a rank is given the gradient of its piece alone. At level 3 nothing is left over data: the graph itself gathers and sums there.
    """
    cut = zero in (1, 2) and mesh.data > 1
    if not (zero == 2 and cut and "data" in axes):
        steps = [gradient_sync(nbytes, axes, mesh, cluster)]
    else:
        rest = tuple(axis for axis in axes if axis != "data")
        steps = [_run("reduce_scatter", "data", nbytes, mesh, cluster, "backward"), gradient_sync(nbytes / mesh.data, rest, mesh, cluster)]
    if cut:
        steps.append(_run("all_gather", "data", nbytes, mesh, cluster, "forward"))
    return tuple(step for step in steps if step.axis)


def kernel_steps(strategy: Strategy, itemsize: int, mesh: Mesh, cluster: Cluster, batch_share: float = 1.0) -> tuple[Collective, ...]:
    """The collectives inside an op's own local kernel (``Choice.comms``), which no conversion shows."""
    steps = []
    for choice, axis in zip(strategy.choices, SHARDED_AXES):
        if getattr(mesh, axis) == 1:
            continue
        for comm in choice.comms:
            cut = prod(k for other, k in zip(strategy.choices, mesh.sizes) if other is not choice and other.factor in comm.factors)
            steps.append(_run(comm.collective, axis, comm.elements / cut * itemsize * batch_share, mesh, cluster, "forward"))
    return tuple(steps)


def send(nbytes: float, mesh: Mesh, cluster: Cluster, direction: str = "forward") -> Collective:
    """A rank's message of ``nbytes`` to its counterpart in the next stage (backward: in the one before)."""
    return Collective("pipeline", "send", nbytes, group_seconds("send", nbytes, "pipeline", 2, mesh, cluster), direction)
