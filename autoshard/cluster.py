"""The hardware that a plan is made for: what a device can do, and what joins the devices.

All figures are nominal, per device and per direction, each with its source; the ``efficiency`` beside them is the share that well written
kernels and collectives attain. Times computed from them are estimates: what counts is that they order plans as the machine would.

A cluster is a preset's name (``PRESETS``), a TOML file, or a ``Cluster``; ``Cluster.of`` reads them all. ``autoshard profile`` measures a
machine and writes such a file.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, field, fields, replace
from functools import cache
from math import ceil
from pathlib import Path

from autoshard.errors import MeshError, PlanError
from autoshard.mesh import AXES, Mesh

DTYPES = ("fp64", "fp32", "tf32", "bf16", "fp16")
"""The kinds of arithmetic that ``Device.peak`` knows."""


@dataclass(frozen=True)
class Link:
    """What joins two devices, as one device sees it: alpha-beta, ``seconds = latency + bytes / rate``.

    bandwidth: bytes a second in one direction. latency: seconds a message. efficiency: the share of the bandwidth that collectives attain.
    """

    bandwidth: float
    latency: float
    efficiency: float = 1.0
    source: str = ""

    @property
    def rate(self) -> float:
        """Attained bytes a second."""
        return self.bandwidth * self.efficiency


@dataclass(frozen=True)
class Device:
    """One device.

    peak: dtype ("fp32", "tf32", "bf16", "fp16", "fp64") -> dense FLOP a second. memory: bytes. bandwidth: of its memory, bytes a second.
    launch: seconds that starting one kernel costs. compute_efficiency / memory_efficiency: shares of peak and bandwidth that are attained.
    kind: "gpu", or "cpu", where gloo communicates and Adam updates one parameter after the other.
    factors: op -> (forward, backward): how many times as long as the roofline says it was measured to take. "optimizer" is Adam's step,
        and what it takes for each parameter beside, in launches; "accumulate" the sum of gradients of micro-batches, backward nothing;
        "view" any op that runs no kernel, in launches. The last two cost nothing if they are not given.
    """

    name: str
    peak: dict[str, float] = field(hash=False)
    memory: float
    bandwidth: float
    launch: float = 5e-6
    compute_efficiency: float = 0.75
    memory_efficiency: float = 0.85
    source: str = ""
    kind: str = "gpu"
    factors: dict[str, tuple[float, float]] = field(default_factory=dict, hash=False)

    def flops(self, dtype: str) -> float:
        """Attained FLOP a second in ``dtype``. A dtype that is not listed runs as fp32 does, fp64 at half of that."""
        peak = self.peak.get(dtype)
        if peak is None:
            peak = self.peak["fp32"] / (2 if dtype == "fp64" else 1)
        return peak * self.compute_efficiency

    @property
    def view_seconds(self) -> tuple[float, float]:
        """What an op that runs no kernel costs, forward and backward."""
        forward, backward = self.factors.get("view", (0.0, 0.0))
        return forward * self.launch, backward * self.launch

    @property
    def memory_rate(self) -> float:
        """Attained bytes a second of its memory."""
        return self.bandwidth * self.memory_efficiency


@dataclass(frozen=True)
class Host:
    """What one device has of its node's host: a link to its memory, and a share of that memory's bandwidth (bytes a second)."""

    link: Link
    bandwidth: float
    source: str = ""


_PCIE4 = Link(31.5e9, 10e-6, 0.8, "PCI Express 4.0 x16, per direction; latency and efficiency usual for pinned copies")
_PCIE5 = Link(63e9, 10e-6, 0.8, "PCI Express 5.0 x16, per direction; latency and efficiency usual for pinned copies")
_ROME = Host(_PCIE4, 51e9, "an eighth of 2 EPYC 7742 with 8 channels of DDR4-3200 each, 204.8 GB/s a socket, AMD datasheet; DGX A100")
_SAPPHIRE = Host(_PCIE5, 77e9, "an eighth of 2 Xeon 8480C with 8 channels of DDR5-4800 each, 307 GB/s a socket, Intel datasheet; DGX H100")


@dataclass(frozen=True)
class Fit:
    """What a collective was measured to take over ``ranks`` processes of one node: ``latency + bytes / bandwidth`` seconds.

    kind: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send". bytes: the value's full size along the axis; of a send, what
    is sent. work_latency, work_bandwidth: the same of the processor time of one of the processes, which counts where more processes than
    cores are at work; None: all the time that it takes.
    """

    kind: str
    ranks: int
    latency: float
    bandwidth: float
    work_latency: float | None = None
    work_bandwidth: float | None = None


@dataclass(frozen=True)
class Cluster:
    """Nodes of ``node_size`` devices joined by ``intra``; each node has ``nics`` network cards, every one of them an ``inter`` link.

    Ranks fill nodes in order: rank r is on node r // node_size.

    cores: if the "devices" are processes that share a node's processors, how many of them it runs at full speed at once; None: they share
        nothing. fits: of collectives within a node, in place of what ``intra`` says of them.
    """

    name: str
    device: Device
    node_size: int
    intra: Link
    inter: Link
    nics: int
    host: Host = _ROME
    cores: float | None = None
    fits: tuple[Fit, ...] = ()

    def __hash__(self) -> int:  # equal clusters have equal names; hashing every figure at each cached cost would be slow
        return hash(self.name)

    @classmethod
    def of(cls, cluster: Cluster | str | Path | None = None) -> Cluster:
        """A preset by name, a TOML file by path, or a ``Cluster`` as it is; None is ``DEFAULT``."""
        if cluster is None:
            return PRESETS[DEFAULT]
        if isinstance(cluster, Cluster):
            return cluster
        if isinstance(cluster, str) and cluster in PRESETS:
            return PRESETS[cluster]
        if isinstance(cluster, Path) or (isinstance(cluster, str) and (cluster.endswith(".toml") or "/" in cluster)):
            return _read_toml(Path(cluster))
        raise PlanError(f"unknown cluster {cluster!r}", hint=f"the presets are {', '.join(PRESETS)}; any other is described in a TOML file")

    def link(self, axis: str, mesh: Mesh) -> Link:
        """The link that a rank sees when every group along ``axis`` runs the same collective at once.

        ``axis``: "data", "tensor", "pipeline", or a joint group such as "data+tensor". A group inside one node uses ``intra``. The
        ring of a group that spans nodes leaves each node once, so it shares the node's network cards with the other groups that do;
        with several ranks in a node it may use as many cards as it has ranks there (several rings, as NCCL builds them), but a
        pipeline's point-to-point send uses one. The ring is as fast as its slowest link. The slowest group of the mesh counts.
        """
        return _link(self, axis, mesh)

    def crowding(self, ranks: int) -> float:
        """How much longer everything takes where ``ranks`` processes are at work on one node, as against one alone."""
        return max(1.0, min(ranks, self.node_size) / self.cores) if self.cores else 1.0

    def fit(self, kind: str, ranks: int, mesh: Mesh) -> tuple[float, float] | None:
        """(seconds, seconds a byte) of a measured collective, not counting that processes share processors; None: not measured.

        Of other numbers of ranks the nearest above is taken, or the largest, which grows in proportion. In a crowd a process that waits
        leaves its share to the others, so that what counts is the work.
        """
        found = sorted((fit for fit in self.fits if fit.kind == kind), key=lambda fit: fit.ranks)
        if not found or mesh.size > self.node_size:
            return None
        fit = next((fit for fit in found if fit.ranks >= ranks), found[-1])
        more = max(1.0, ranks / fit.ranks)
        if fit.work_latency and fit.work_bandwidth and self.cores and mesh.size > ceil(self.cores):
            return fit.work_latency * more, more / fit.work_bandwidth
        more /= self.crowding(fit.ranks)
        return fit.latency * more, more / fit.bandwidth

    def to_toml(self) -> str:
        """The cluster as a TOML file that ``Cluster.of`` reads back."""

        def table(name: str, value, skip: tuple[str, ...] = ()) -> list[str]:
            rows = [(f.name, getattr(value, f.name)) for f in fields(value) if f.name not in skip]
            return ["", f"[{name}]", *(f"{key} = {json.dumps(item)}" for key, item in rows)]

        lines = [f"name = {json.dumps(self.name)}", f"node_size = {self.node_size}", f"nics = {self.nics}"]
        if self.cores is not None:
            lines.append(f"cores = {self.cores!r}")
        lines += table("device", self.device, skip=("peak", "factors"))
        lines += ["", "[device.peak]", *(f"{dtype} = {peak!r}" for dtype, peak in self.device.peak.items())]
        if self.device.factors:
            lines += ["", "[device.factors]", *(f"{op} = {list(pair)!r}" for op, pair in self.device.factors.items())]
        lines += table("intra", self.intra) + table("inter", self.inter)
        lines += table("host", self.host, skip=("link",)) + table("host.link", self.host.link)
        for fit in self.fits:
            rows = [(f.name, getattr(fit, f.name)) for f in fields(fit)]
            lines += ["", "[[collectives]]", *(f"{key} = {json.dumps(value)}" for key, value in rows if value is not None)]
        return "\n".join(lines) + "\n"


@cache
def _link(cluster: Cluster, axis: str, mesh: Mesh) -> Link:
    names = axis.split("+")
    for name in names:
        if name not in AXES:
            raise MeshError(f"unknown mesh axis {name!r}", hint=f"the axes are {', '.join(AXES)}, or several joined by '+'")
    free = [i for i, name in enumerate(AXES) if name in names]
    groups: dict[tuple, Counter] = {}  # the coordinates that a group's ranks share -> how many of its ranks are on each node
    for rank in range(mesh.size):
        shared = tuple(c for i, c in enumerate(mesh.coords(rank)) if i not in free)
        groups.setdefault(shared, Counter())[rank // cluster.node_size] += 1
    spanning = [nodes for nodes in groups.values() if len(nodes) > 1]
    if not spanning:
        return cluster.intra
    rings = Counter(node for nodes in spanning for node in nodes)  # groups whose ring leaves the node
    cards = min(
        min(1 if names == ["pipeline"] else ranks, cluster.nics / rings[node]) for nodes in spanning for node, ranks in nodes.items()
    )
    inter = cluster.inter
    if cards * inter.rate >= cluster.intra.rate:
        return Link(cluster.intra.bandwidth, inter.latency, cluster.intra.efficiency, cluster.intra.source)
    return Link(cards * inter.bandwidth, inter.latency, inter.efficiency, inter.source)


# --- presets -------------------------------------------------------------------------------------------------------------

_A100 = Device(
    name="A100-SXM4-80GB",
    peak={"fp64": 19.5e12, "fp32": 19.5e12, "tf32": 156e12, "bf16": 312e12, "fp16": 312e12},
    memory=80e9,
    bandwidth=2039e9,
    source="NVIDIA A100 80GB SXM datasheet, dense; fp64 on tensor cores. Launch and efficiencies: usual values, not measured",
)
_A100_PCIE = replace(
    _A100,
    name="A100-PCIE-80GB",
    bandwidth=1935e9,
    source="NVIDIA A100 80GB PCIe datasheet, dense; its 300 W may hold it below these peaks. Launch and efficiencies: usual, not measured",
)
_H100 = Device(
    name="H100-SXM5-80GB",
    peak={"fp64": 67e12, "fp32": 67e12, "tf32": 494.7e12, "bf16": 989.4e12, "fp16": 989.4e12},
    memory=80e9,
    bandwidth=3350e9,
    compute_efficiency=0.65,
    source="NVIDIA H100 SXM datasheet, half of the figures with sparsity; fp64 on tensor cores. Launch, efficiencies: usual, not measured",
)
_CPU = Device(
    name="one CPU thread",
    peak={"fp64": 70e9, "fp32": 100e9, "bf16": 330e9, "fp16": 75e9},
    memory=2e9,
    bandwidth=11.5e9,
    launch=5e-6,
    compute_efficiency=1.0,
    memory_efficiency=1.0,
    source="indicative: measured on one thread of a 2.6 GHz Xeon with AVX-512 and AMX, 1024 x 1024 matmuls and a 128 MB copy; "
    "so the efficiencies are 1. Memory: a share that lets eight ranks run on a common machine",
    kind="cpu",
)
_LOOPBACK = Link(0.85e9, 150e-6, 1.0, "indicative: measured, gloo all-reduce of 4 B and of 16 MB between two processes on two cores")
_NVLINK3 = Link(300e9, 1.9e-6, 0.78, "600 GB/s both ways, A100 datasheet; NCCL's bound is 235 GB/s; latency: NCCL tuning table, ring LL128")
_NVLINK4 = Link(450e9, 1.9e-6, 0.78, "900 GB/s both ways, H100 datasheet; efficiency as on A100; latency: NCCL tuning table, ring LL128")
_THROUGH_HOST = Link(31.5e9, 2.5e-6, 0.6, "PCI Express 4.0 x16, per direction, shared: efficiency assumed; latency: NCCL, ring LL128")
_ETHERNET = Link(3.125e9, 30e-6, 0.9, "25 Gb/s Ethernet, one card a node; latency usual for TCP; efficiency assumed")
_NETWORK_LATENCY = 4.0e-6  # NCCL tuning table (src/graph/tuning.cc), network, ring LL128

PRESETS: dict[str, Cluster] = {
    cluster.name: cluster
    for cluster in (
        Cluster(
            "a100-dgx", _A100, 8, _NVLINK3,
            Link(25e9, _NETWORK_LATENCY, 0.9, "200 Gb/s HDR InfiniBand, one card a GPU, DGX A100 datasheet; efficiency assumed"),
            nics=8,
        ),
        Cluster(
            "h100-dgx", _H100, 8, _NVLINK4,
            Link(50e9, _NETWORK_LATENCY, 0.9, "400 Gb/s NDR InfiniBand, one card a GPU, DGX H100 datasheet; efficiency assumed"),
            nics=8, host=_SAPPHIRE,
        ),
        Cluster("a100-ethernet", _A100, 8, _NVLINK3, _ETHERNET, nics=1),
        Cluster("a100-pcie-ethernet", _A100_PCIE, 8, _THROUGH_HOST, _ETHERNET, nics=1),
        Cluster(
            "cpu", _CPU, 64, _LOOPBACK, Link(1.25e9, 150e-6, 0.9, "10 Gb/s Ethernet, nominal; latency as on loopback"),
            nics=1, host=Host(Link(11.5e9, 1e-6, 1.0, "the device's own memory"), 11.5e9, "the device's own memory"),
        ),
    )
}  # fmt: skip
"""By name. "cpu" is one node of up to 64 processes on one machine over gloo; its figures are indicative."""

DEFAULT = "a100-dgx"
"""The cluster that is meant when none is named."""


# --- TOML ----------------------------------------------------------------------------------------------------------------

_UNITS = {"": 1, "B": 1, **{f"{p}B": 1000**i for i, p in enumerate("KMGT", 1)}, **{f"{p}iB": 1024**i for i, p in enumerate("KMGT", 1)}}


def parse_bytes(text: str | float, what: str = "memory") -> float:
    """A number of bytes: ``40e9``, ``"40 GB"`` (powers of 1000) or ``"40GiB"`` (powers of 1024). ``what`` names it in the error."""
    units = {unit.lower(): factor for unit, factor in _UNITS.items()}
    if isinstance(text, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d*)?(?:e\d+)?)\s*([a-zA-Z]*)\s*", text)
        value = float(match[1]) * units[match[2].lower()] if match and match[2].lower() in units else 0
    else:
        value = 0 if isinstance(text, bool) or not isinstance(text, (int, float)) else float(text)
    if not 0 < value < float("inf"):
        raise PlanError(f"can't read {what} = {text!r}", hint='write a number of bytes, or for example "40 GB" or "40GiB"')
    return value


class _Table:
    """One table of a cluster file, whose keys are all among ``keys``. Every error names the file and the key."""

    def __init__(self, path: Path, prefix: str, data: object, keys: str):
        self.path, self.prefix, self.data = path, prefix, data
        if not isinstance(data, dict):
            raise self.error(f"{prefix.rstrip('.')!r} must be a table", f"write [{prefix.rstrip('.')}] above its keys")
        for key in data:
            if key not in keys.split():
                raise self.error(f"unknown key {prefix + key!r}", f"the keys here are {', '.join(keys.split())}")

    def error(self, what: str, hint: str | None = None) -> PlanError:
        return PlanError(f"cluster file {str(self.path)!r}: {what}", hint=hint)

    def take(self, key: str, default=None):
        value = self.data.get(key, default)
        if value is None:
            raise self.error(f"the key {self.prefix + key!r} is missing", "Cluster.to_toml() of a preset shows a whole file")
        return value

    def number(self, key: str, default: float | None = None, most: float = float("inf"), whole: bool = False) -> float:
        value = self.take(key, default)
        wanted = int if whole else (int, float)
        if isinstance(value, bool) or not isinstance(value, wanted) or not 0 < value <= most or value == float("inf"):
            limit = f" of at most {most:g}" if most < float("inf") else ""
            raise self.error(f"{self.prefix + key!r} is {value!r}; it must be a positive {'integer' if whole else 'number'}{limit}")
        return int(value) if whole else float(value)

    def memory(self, key: str) -> float:
        value = self.take(key)
        try:
            return parse_bytes(value, repr(self.prefix + key))
        except PlanError as error:
            raise self.error(error.what, error.hint) from None

    def choice(self, key: str, default: str, among: tuple[str, ...]) -> str:
        value = self.text(key, default)
        if value not in among:
            raise self.error(f"{self.prefix + key!r} is {value!r}; it must be {' or '.join(map(repr, among))}")
        return value

    def pair(self, key: str, name: str) -> tuple[float, float]:
        """Two numbers of a table within this one."""
        found = self.data[key][name] if isinstance(self.data[key], dict) else None
        if not isinstance(found, list) or len(found) != 2 or not all(isinstance(x, (int, float)) and 0 <= x < float("inf") for x in found):
            raise self.error(f"'{self.prefix}{key}.{name}' is {found!r}; it must be two numbers, forward and backward")
        return float(found[0]), float(found[1])

    def text(self, key: str, default: str) -> str:
        value = self.take(key, default)
        if not isinstance(value, str):
            raise self.error(f"{self.prefix + key!r} is {value!r}; it must be text")
        return value


def _read_toml(path: Path) -> Cluster:
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10
        import tomli as tomllib
    try:
        data = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise PlanError(f"can't read the cluster file {str(path)!r}: {error}") from None

    def link(name: str, data=None) -> Link:
        table = _Table(path, f"{name}.", top.take(name) if data is None else data, "bandwidth latency efficiency source")
        return Link(table.number("bandwidth"), table.number("latency"), table.number("efficiency", 1.0, most=1), table.text("source", ""))

    top = _Table(path, "", data, "name node_size nics cores device intra inter host collectives")
    name, node_size = top.text("name", path.stem), top.number("node_size", whole=True)
    table = _Table(path, "device.", top.take("device"), " ".join(f.name for f in fields(Device)))
    peaks = _Table(path, "device.peak.", table.take("peak"), " ".join(DTYPES))
    device = Device(
        name=table.text("name", name),
        peak={dtype: peaks.number(dtype) for dtype in DTYPES if dtype in peaks.data or dtype == "fp32"},
        memory=table.memory("memory"),
        bandwidth=table.number("bandwidth"),
        launch=table.number("launch", Device.launch),
        compute_efficiency=table.number("compute_efficiency", Device.compute_efficiency, most=1),
        memory_efficiency=table.number("memory_efficiency", Device.memory_efficiency, most=1),
        source=table.text("source", ""),
        kind=table.choice("kind", "gpu", ("gpu", "cpu")),
        factors={op: table.pair("factors", op) for op in table.data.get("factors", ())},
    )
    host = Cluster.host
    if "host" in top.data:
        table = _Table(path, "host.", top.take("host"), "link bandwidth source")
        host = Host(link("host.link", table.take("link")), table.number("bandwidth"), table.text("source", ""))
    cores = top.number("cores") if "cores" in data else None
    fits = tuple(_fit(_Table(path, "collectives.", row, " ".join(f.name for f in fields(Fit)))) for row in data.get("collectives", ()))
    return Cluster(name, device, node_size, link("intra"), link("inter"), top.number("nics", node_size, whole=True), host, cores, fits)


def _fit(table: _Table) -> Fit:
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
    kind, ranks = table.choice("kind", "", kinds), table.number("ranks", whole=True)
    work = [table.number(key) if key in table.data else None for key in ("work_latency", "work_bandwidth")]
    return Fit(kind, ranks, table.number("latency"), table.number("bandwidth"), *work)
