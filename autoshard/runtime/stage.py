"""The base class of emitted modules, and the plain data in which they describe themselves.

Shapes are global unless called local; "of one micro-batch" where the batch is cut. Layouts are text, over (data, tensor): "[S(0), R]".
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import nn

from autoshard.errors import RunError
from autoshard.mesh import Mesh
from autoshard.placement import local_shape, parse_layout
from autoshard.runtime.axis import Axis
from autoshard.runtime.drawing import Drawing
from autoshard.runtime.keys import Draw, Keys
from autoshard.runtime.numbers import Numbers
from autoshard.runtime.pieces import take
from autoshard.runtime.random import Streams
from autoshard.runtime.regather import Regather, Weight
from autoshard.runtime.world import World
from autoshard.runtime.zero import Rounded, Shard
from autoshard.schedule import schedule_of


@dataclass(frozen=True)
class Param:
    """A parameter, buffer or constant that this rank holds a piece of.

    names: all its names in the user's model, canonical first.
    sync: axes over which its gradient is summed once a step; its gradient is a summand along them before, whole after.
    stages: the places along the pipeline axis that hold it; its gradient is summed over them too.
    chunk: which of the rank's stages reads it first.
    zero: its ZeRO level. From 1 on ``layout`` cuts it along data: so lies the piece that the optimizer updates. At levels 1 and 2 forward
        reads it whole along data; at level 3 it reads the piece, and gathers it itself.
    master: the dtype in which the optimizer updates it, if that is not ``dtype``, in which forward reads it.
    offload: what the optimizer updates, and keeps of it, is in the host's memory.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    layout: str
    dtype: torch.dtype
    requires_grad: bool = False
    kind: str = "parameter"  # "parameter" | "buffer" | "constant"
    persistent: bool = True
    sync: tuple[str, ...] = ()
    stages: tuple[int, ...] = (0,)
    chunk: int = 0
    zero: int = 0
    master: torch.dtype | None = None
    offload: bool = False

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def kept(self) -> torch.dtype:
        """The dtype of what is saved."""
        return self.master or self.dtype

    @property
    def saved(self) -> bool:
        """Whether it belongs in a state_dict."""
        return self.kind != "constant" and self.persistent


@dataclass(frozen=True)
class Input:
    """A tensor input. ``shape`` is that of one micro-batch; ``name`` is the user's name for it, if the keyword is another."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: str
    batch_dim: int | None = 0
    name: str = ""


@dataclass(frozen=True)
class Value:
    """A tensor that crosses from one stage to the next, with its *local* shape. requires_grad: whether a gradient comes back."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True)
class Part:
    """One of several stages that a rank runs: the method that is its ``forward``, what it receives, and what it sends."""

    stage: int
    method: str
    receives: tuple[Value, ...] = ()
    sends: tuple[Value, ...] = ()


@dataclass(frozen=True)
class Extra:
    """A value of the prologue, its conversion over the micro-batches, "P -> R", and the shape that one forward sees.

    The conversion is local: a dim that it cuts or joins must not be cut by the data or tensor axis.
    """

    conversion: str
    shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class Output:
    """A tensor that the model returns: its index among the leaves of the result, and the shape that one micro-batch gives it.

    time: placement over the micro-batches: "P" they are added, "S(0)" they are joined, "R" they are all the same.
    """

    leaf: int
    shape: tuple[int, ...]
    layout: str
    time: str
    dtype: torch.dtype
    requires_grad: bool = True


class StageModule(nn.Module):
    """What one rank runs: emitted code is a subclass, and fills in the class attributes and ``forward``.

    Parameters and buffers have the rank's local shapes, and are uninitialised until ``load``.
    ``forward`` takes the received values in order, then inputs and extras by keyword, and returns a tuple of tensors: the values to send,
    or, on the last stage, one per entry of ``outputs``. ``outputs``, and ``loss``, the index of the one to be minimised, are the same on
    every stage. ``updates`` names the buffers that forward changes; the last stage returns their new values, whole, behind the outputs.
    ``random_keys``: how many keys the random ops of all stages take in a step; 0 if they draw from ``streams``.

    ``order`` is that of the mesh, ``stage`` the place along the pipeline axis. Where ``schedule`` gives a rank several stages, ``parts``
    says which, and stands for ``receives``, ``sends`` and ``forward``.
    """

    mesh: tuple[int, int, int] = (1, 1, 1)
    order: tuple[str, str, str] | None = None
    rank: int = 0
    stage: int = 0
    microbatches: int = 1
    schedule: str = "1F1B"
    parts: tuple[Part, ...] = ()
    params: dict[str, Param] = {}
    inputs: dict[str, Input] = {}
    receives: tuple[Value, ...] = ()
    sends: tuple[Value, ...] = ()
    extras: dict[str, Extra] = {}
    outputs: tuple[Output, ...] = ()
    updates: tuple[str, ...] = ()
    loss: int | None = None
    random_keys: int = 0
    draws: dict[str, Draw] = {}

    def __init__(self, world: World, like: StageModule | None = None):
        """RunError if this is not the module of the world's rank.

        Args:
            like: the module of another program of the same model, which holds the parameters and buffers of this one too. RunError if it
                has not all of them, or they lie otherwise there.
        """
        super().__init__()
        mesh = Mesh(*self.mesh, self.order)
        if world.mesh != mesh or world.rank != self.rank:
            raise RunError(f"this module is for rank {self.rank} of mesh {mesh}, but runs on rank {world.rank} of mesh {world.mesh}")
        self.world, self.device = world, world.device
        self.data, self.tensor = world.axes
        self.streams = Streams(world.axes, world.stage, world.device, world.common_seed()) if like is None else like.streams
        self.keys = Keys(self.random_keys, self.draws, world, self.microbatches)
        self.shards: dict[str, Rounded] = {}
        self.recomputes = False  # whether it has regions; known once it has run
        self.loss_scale = 1.0  # of what backward starts from
        self.alike = True  # whether gradients are summed over the same ranks as those of ``like``
        self._buffers_of: dict[str, str] = {}  # attribute: that of ``like``
        self._regather = Regather()
        for attribute, param in self.params.items():
            if like is not None and param.kind != "constant":
                continue
            shape = local_shape(param.shape, parse_layout(param.layout), world.mesh.sizes, world.coords)
            if param.zero in (1, 2):
                self.shards[attribute] = Shard(param.shape, param.layout, param.dtype, param.master, world, param.offload)
            elif param.master is not None or param.offload:
                self.shards[attribute] = Rounded(shape, param.dtype, param.kept, world, param.offload)
            if attribute in self.shards:
                setattr(self, attribute, self.shards[attribute].whole)
                continue
            tensor = torch.empty(shape, dtype=param.dtype, device=world.device)
            if param.kind == "parameter":
                self.register_parameter(attribute, nn.Parameter(tensor, requires_grad=param.requires_grad))
            else:
                self.register_buffer(attribute, tensor, persistent=param.persistent)
        if like is not None:
            self._share(like)

    def _share(self, other: StageModule) -> None:
        theirs = {param.name: (attribute, param) for attribute, param in other.params.items()}
        for attribute, param in self.params.items():
            if param.kind == "constant":
                continue
            where, there = theirs.get(param.name, (None, None))
            if there is None or (there.layout, there.zero) != (param.layout, param.zero):
                raise RunError(f"{param.name!r} lies as {param.layout} here, and {there.layout if there else 'on another stage'} there")
            self.alike &= not param.requires_grad or (there.sync, there.stages) == (param.sync, param.stages)
            if where in other.shards:
                self.shards[attribute] = other.shards[where]
            if param.kind == "buffer":
                self._buffers_of[attribute] = where
            setattr(self, attribute, getattr(other, where))

    def share_buffers(self, other: StageModule) -> None:
        """Hold the buffers that ``other`` has now: a step may have replaced them."""
        for attribute, where in self._buffers_of.items():
            setattr(self, attribute, getattr(other, where))

    def generator(self, cut_along: tuple[str, ...]) -> torch.Generator:
        """Random numbers for a value that is cut along these axes: the same where it is replicated, others where it is cut."""
        return self.streams(*cut_along)

    def random(self, cut_along: tuple[str, ...]) -> AbstractContextManager:
        """The same for ops that can only draw from torch's default generator: within, it is that stream."""
        return self.streams.fork(*cut_along)

    def numbers(self, name: str) -> Numbers:
        """Random numbers for the value of this name, by ``draws``: on any mesh, those that one device has at these positions."""
        return self.keys.numbers(name)

    def drawing(self, name: str) -> AbstractContextManager:
        """The same for torch's own ops: within, they draw those numbers."""
        return Drawing(self.keys.source(name))

    def gather(self, piece: torch.Tensor, text: str, axis: Axis, size: int) -> torch.Tensor:
        """``rt.convert`` of a weight of ZeRO level 3 to a whole one, which is not kept for backward: there it is gathered again."""
        return self._regather.gather([(piece, text, size)], axis)[0]

    def gather_all(self, *weights: Weight) -> tuple[torch.Tensor, ...]:
        """``gather`` of several weights of one dtype over the data axis, in one collective: each (piece, "S(0) -> R*", size)."""
        return self._regather.gather(weights, self.data)

    @property
    def chunks(self) -> tuple[Part, ...]:
        """What this rank runs of the model, in order."""
        return self.parts or (Part(self.stage, "forward", self.receives, self.sends),)

    @property
    def depth(self) -> int:
        """Stages in all."""
        return len(self.chunks) * self.world.mesh.pipeline

    @property
    def last_place(self) -> int:
        """The place along the pipeline axis that holds the last stage."""
        return schedule_of(self.schedule).rank_of(self.depth - 1, self.world.mesh.pipeline)

    def __call__(self, *args, method: str = "forward", **kwargs) -> tuple[torch.Tensor, ...]:
        """``forward``, or that of a part, with the weights of ZeRO level 3 kept in pieces between forward and backward."""
        if not any(param.zero == 3 for param in self.params.values()):
            return getattr(self, method)(*args, **kwargs)
        with self._regather.hooks():
            return getattr(self, method)(*args, **kwargs)

    def prologue(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """The extras of one micro-batch, computed before the first forward."""
        return {}

    def check(self, batch: Mapping[str, torch.Tensor]) -> None:
        """Raise IdError for ids of the whole batch, by the user's names, that the model can't look up, on whichever rank it would."""

    @classmethod
    def reads(cls, method: str) -> tuple[str, ...]:
        """Names of the arguments of ``forward``, that of a part, or ``prologue``."""
        return tuple(inspect.signature(getattr(cls, method)).parameters)[1:]

    def held(self) -> Iterator[tuple[Param, torch.Tensor]]:
        """What this rank holds: (description, local tensor), in the order of ``params``; of a weight that forward reads otherwise, under
        ZeRO or in mixed precision, what the optimizer updates."""
        for attribute, param in self.params.items():
            yield param, self.shards[attribute].piece if attribute in self.shards else getattr(self, attribute)

    def leaves(self) -> Iterator[torch.Tensor]:
        """The trained weights as forward reads them."""
        for attribute, param in self.params.items():
            if param.requires_grad:
                yield getattr(self, attribute)

    def load(self, get: Callable[[str], torch.Tensor | None]) -> None:
        """Fill in this rank's pieces; ``get`` gives the whole tensor of a name, None to leave it. RunError if one has another shape."""
        with torch.no_grad():
            for param, tensor in self.held():
                whole = get(param.name)
                if whole is None:
                    continue
                if tuple(whole.shape) != param.shape:
                    raise RunError(f"{param.name!r} has shape {tuple(whole.shape)}; the model was compiled with {param.shape}")
                tensor.copy_(take(whole, parse_layout(param.layout), self.world.mesh.sizes, self.world.coords))
