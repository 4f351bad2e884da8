"""The processes of a mesh: which one this is, on which device, and the groups in which it communicates."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autoshard.errors import MeshError, RunError
from autoshard.mesh import Mesh
from autoshard.runtime.axis import Axis


@dataclass(eq=False)
class World:
    """One rank's view of the mesh.

    data / tensor: the axes along which values are placed.
    everyone: group of all ranks; None on a mesh of one device.
    pipeline: group of the ranks that hold the other stages of this rank's model replica, in their order; None without a pipeline.
    joint: group of all data x tensor ranks of this stage; None if there is one only.
    device_mesh: dims ("pipeline", "data", "tensor"); None on a mesh of one device, which needs no process group.
    scheduler: what runs micro-batches over the stages, if not ``pipeline.Pipeline``.
    """

    mesh: Mesh
    rank: int
    device: torch.device
    data: Axis
    tensor: Axis
    everyone: dist.ProcessGroup | None = None
    pipeline: dist.ProcessGroup | None = None
    joint: dist.ProcessGroup | None = None
    device_mesh: DeviceMesh | None = None
    scheduler: Callable | None = None
    _tied: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)

    @property
    def axes(self) -> tuple[Axis, Axis]:
        return (self.data, self.tensor)

    @property
    def coords(self) -> tuple[int, int]:
        """Coordinates along (data, tensor)."""
        return self.mesh.coords(self.rank)[:2]

    @property
    def stage(self) -> int:
        return self.mesh.coords(self.rank)[2]

    def group(self, axes: tuple[str, ...]) -> dist.ProcessGroup | None:
        """The group over some of the axes ("data", "tensor"); None if it holds this rank only."""
        wide = [axis for axis in self.axes if axis.name in axes and axis.size > 1]
        return self.joint if len(wide) == 2 else wide[0].group if wide else None

    def holders(self, stages: tuple[int, ...]) -> dist.ProcessGroup:
        """The group of this rank and its peers on ``stages``. Each of them must call this, in the same order of ``stages``."""
        if len(stages) == self.mesh.pipeline:
            return self.pipeline
        if stages not in self._tied:
            data, tensor = self.coords
            ranks = [self.mesh.rank(data, tensor, stage) for stage in stages]
            self._tied[stages] = dist.new_group(ranks, use_local_synchronization=True)
        return self._tied[stages]

    def common_seed(self) -> int:
        """Rank 0's ``torch.initial_seed()``, on all ranks. A collective."""
        seed = torch.tensor(torch.initial_seed() % 2**63, dtype=torch.int64, device=self.device)
        if self.mesh.size > 1:
            dist.broadcast(seed, group_src=0, group=self.everyone)
        return int(seed)


def rank_and_count() -> tuple[int, int]:
    """This process's rank and the number of processes: those of torch.distributed, else of torchrun's environment."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


current_world: ContextVar[World | None] = ContextVar("current_world", default=None)
"""Set where ranks are not processes of their own: the World that ``open_world`` gives then."""

_worlds: dict[tuple[Mesh, torch.device], tuple[dist.ProcessGroup | None, World]] = {}


def open_world(mesh: Mesh | tuple, device: torch.device | str | None = None) -> World:
    """This process's World; starts torch.distributed from torchrun's environment if that has not been done.

    Args:
        device: where this rank keeps its tensors; by default its own GPU under nccl, else the CPU.

    Raises:
        MeshError: the number of processes is not the size of the mesh. The same on every rank, before any communication.
    """
    mesh = Mesh.of(mesh)
    current = current_world.get()
    if current is not None and current.mesh == mesh:
        return current
    running = dist.is_initialized()
    _, count = rank_and_count()
    if count != mesh.size:
        raise MeshError(
            f"mesh {mesh} is for {mesh.size} process{'es' if mesh.size > 1 else ''}, but WORLD_SIZE is {count}",
            hint=f"start it with torchrun --nproc-per-node {mesh.size}, or choose a mesh of {count}",
        )
    device = _device(device, running)
    if mesh.size == 1:
        return World(mesh, 0, device, Axis("data", 1, 0, None), Axis("tensor", 1, 0, None))
    if not running:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    everyone, world = _worlds.get((mesh, device), (None, None))
    if world is None or everyone is not dist.group.WORLD:  # groups of an earlier, destroyed process group are of no use
        world = _connect(mesh, device)
        _worlds[mesh, device] = (dist.group.WORLD, world)
    return world


def _device(device: torch.device | str | None, running: bool) -> torch.device:
    if device is None:
        on_gpu = torch.cuda.is_available() and (not running or "nccl" in dist.get_backend())
        device = f"cuda:{os.environ.get('LOCAL_RANK', torch.cuda.current_device())}" if on_gpu else "cpu"
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def _connect(mesh: Mesh, device: torch.device) -> World:
    rank = dist.get_rank()
    every_d, every_t, every_p = range(mesh.data), range(mesh.tensor), range(mesh.pipeline)
    ranks = [[[mesh.rank(d, t, p) for t in every_t] for d in every_d] for p in every_p]
    device_mesh = DeviceMesh(device.type, ranks, mesh_dim_names=("pipeline", "data", "tensor"))
    data, tensor, _ = mesh.coords(rank)

    def group(axis: str) -> dist.ProcessGroup | None:
        return device_mesh.get_group(axis) if getattr(mesh, axis) > 1 else None

    joint = group("tensor") if mesh.data == 1 else group("data") if mesh.tensor == 1 else None
    if mesh.data > 1 and mesh.tensor > 1:
        stages = [sorted(sum(stage, [])) for stage in ranks]
        joint = dist.group.WORLD if mesh.pipeline == 1 else dist.new_subgroups_by_enumeration(stages)[0]
    return World(
        mesh,
        rank,
        device,
        Axis("data", mesh.data, data, group("data")),
        Axis("tensor", mesh.tensor, tensor, group("tensor")),
        dist.group.WORLD,
        group("pipeline"),
        joint,
        device_mesh,
    )


def agree(world: World, tensors: Mapping[str, torch.Tensor], what: str, hint: str) -> None:
    """Raise RunError, the same on every rank, if the ranks hold different tensors. A collective; samples of each tensor are compared.

    What must be the same everywhere, weights and global batch, differs silently where a script forgets its seed.
    """
    if world.mesh.size == 1:
        return
    mine = {name: _digest(tensor) for name, tensor in tensors.items()}
    everyone: list[dict[str, str]] = [{}] * world.mesh.size
    dist.all_gather_object(everyone, mine, group=world.everyone)
    for rank, theirs in enumerate(everyone):
        for name, digest in everyone[0].items():
            if theirs.get(name) != digest:
                raise RunError(f"{what} are not the same on all ranks: {name!r} of rank {rank} is not that of rank 0", hint=hint)


@torch.no_grad()
def _digest(tensor: torch.Tensor) -> str:
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).detach().flatten()
    sample = flat[:: max(1, flat.numel() // 512)][:1024].cpu().contiguous()
    return hashlib.sha256(sample.view(torch.uint8).numpy().tobytes() if sample.numel() else b"").hexdigest()[:16]
