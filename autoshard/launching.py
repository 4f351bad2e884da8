"""From a rank's source to the module that the user trains, and what has to be agreed between ranks before."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn

from autoshard.capture import Captured
from autoshard.errors import AutoshardError, PlanError, RunError
from autoshard.mesh import Mesh
from autoshard.planning.plan import Plan
from autoshard.program import Program
from autoshard.runtime import launch
from autoshard.runtime.interface import Argument, Interface
from autoshard.runtime.sharded import Sharded
from autoshard.runtime.world import World, agree, open_world


def start(mesh: Mesh) -> World:
    """This rank's World. Raises MeshError where the number of processes is not the mesh's."""
    return open_world(mesh)


def one_plan_for_all(world: World, make: Callable[[], Plan]) -> Plan:
    """Rank 0 plans; every rank gets its plan, or raises its error."""
    if world.mesh.size == 1:
        return make()
    answer: list[Any] = [None]
    if world.rank == 0:
        try:
            answer = [make().to_json()]
        except AutoshardError as error:
            answer = [error]
        except Exception as error:  # any failure of rank 0 must reach the others, or they would wait for ever
            answer = [PlanError(f"planning failed on rank 0: {type(error).__name__}: {error}")]
            answer[0].__cause__ = error
    sent = [_portable(answer[0])]
    dist.broadcast_object_list(sent, group_src=0, group=world.everyone)
    if world.rank == 0 and isinstance(answer[0], Exception):
        raise answer[0]
    if isinstance(sent[0], Exception):
        raise sent[0]
    return Plan.from_json(sent[0])


def _portable(answer: Any) -> Any:
    """An error without its cause, which may not be pickled: its text and its numbers are all that the other ranks need."""
    if not isinstance(answer, AutoshardError):
        return answer
    copy = AutoshardError.__new__(type(answer))
    Exception.__init__(copy, *answer.args)
    copy.__dict__.update(answer.__dict__)
    return copy


def load_source(text: str, name: str) -> ModuleType:
    """Import emitted source; tracebacks show its lines."""
    filename = f"<autoshard {name}>"
    module = ModuleType(name)
    module.__file__ = filename
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    exec(compile(text, filename, "exec"), module.__dict__)
    return module


def interface(captured: Captured, program: Program, training: bool | None) -> Interface:
    """What the user sees: arguments and result."""
    arguments = {}
    for i in program.inputs.values():
        cast = captured.precision != "fp32" and i.dtype.is_floating_point
        arguments[i.name] = Argument(i.name, tuple(i.shape), i.dtype, i.batch_dim, cast)
    leaves = {i: leaf for i, leaf in enumerate(program.results) if not isinstance(leaf, fx.Node)}
    ordered = tuple(arguments[name] for name in captured.in_spec.tensors)
    return Interface(captured.in_spec, ordered, captured.out_spec, leaves, training)


def sharded_module(
    model: nn.Module, captured: Captured, program: Program, plan: Plan, world: World, source: Callable[[int], str]
) -> Sharded:
    """This rank's module with the user's weights in it."""
    weights = _weights(model, captured)
    agree(world, weights, "the model's weights", "build the same model on every rank: call torch.manual_seed, or load one checkpoint")
    stage = load_source(source(world.rank), f"rank{world.rank}").Stage(world)
    stage.load(lambda name: weights[name])
    sharded = Sharded(stage, interface(captured, program, model.training))
    sharded.plan, sharded.source = plan, source
    return sharded


def write_folder(folder: str | Path, model: nn.Module, captured: Captured, program: Program, plan: Plan, batch: Any, source) -> list[Path]:
    """See ``compiler.emit_folder``."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("rank*.py"):
        old.unlink()  # of a larger mesh, it would stay beside the new ones
    for rank in range(plan.mesh.size):
        (folder / f"rank{rank}.py").write_text(source(rank))
    plan.save(folder / "plan.json")
    face = interface(captured, program, model.training)
    weights = _tensors(model, captured)
    if any(t.device.type == "meta" for t in weights.values()):
        weights = None
    values = captured.in_spec.bind(*((), batch) if isinstance(batch, Mapping) else (batch, {}))
    if any(t.device.type == "meta" for t in values.values()):
        values = None
    launch.write(folder, face, weights, values)
    return sorted(path for path in folder.iterdir() if path.is_file())


def _tensors(model: nn.Module, captured: Captured) -> dict[str, torch.Tensor]:
    """All tensors of the model by all their names."""
    found = dict(model.named_parameters(remove_duplicate=False))
    found.update(model.named_buffers(remove_duplicate=False))
    found.update(captured.constants_values)
    return found


def _weights(model: nn.Module, captured: Captured) -> dict[str, torch.Tensor]:
    found = _tensors(model, captured)
    on_meta = sorted(name for name, tensor in found.items() if tensor.device.type == "meta")
    if on_meta:
        raise RunError(
            f"{on_meta[0]!r} and {len(on_meta) - 1} more tensors of the model are on the meta device and have no values to train",
            hint="plan() works on meta models; to compile, give it values first: model.to_empty(device='cpu') and initialise",
        )
    return found


class Deferred(nn.Module):
    """A model that is traced and planned at its first call, on that call's batch."""

    def __init__(self, training: bool, build: Callable[[Any], Sharded]):
        super().__init__()
        self.training = training
        self._build = build
        self.sharded: Sharded | None = None

    def forward(self, *args, **kwargs):
        if self.sharded is None:
            if args and kwargs:
                raise RunError("the first call of a compiled model takes either positional or keyword arguments, not both")
            self.sharded = self._build(kwargs or args).train(self.training)
        return self.sharded(*args, **kwargs)

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            sharded = self.__dict__.get("_modules", {}).get("sharded")
            if sharded is None:
                raise RunError(
                    f"the model is not compiled yet, so it has no {name!r}", hint="call it once, or give compile example_inputs"
                ) from None
            return getattr(sharded, name)

    def parameters(self, recurse: bool = True):
        if self.sharded is None:
            raise RunError("the model is not compiled yet, so it has no parameters", hint="call it once, or give compile example_inputs")
        return self.sharded.parameters(recurse)
