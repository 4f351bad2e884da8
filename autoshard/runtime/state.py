"""Whole tensors under the user's names from the ranks' pieces, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist

from autoshard.errors import RunError
from autoshard.placement import parse_layout
from autoshard.runtime.outputs import from_last_stage
from autoshard.runtime.pieces import take
from autoshard.runtime.stage import Param, StageModule
from autoshard.runtime.whole import whole


def catalogue(stage: StageModule) -> dict[str, Param]:
    """All parameters and buffers of the model, by canonical name, in the order of stages. A collective on a mesh with a pipeline."""
    mine = [(stage.chunks[param.chunk].stage, param) for param in stage.params.values()]
    everyone: list = [mine]
    if stage.world.mesh.pipeline > 1:
        everyone = [None] * stage.world.mesh.pipeline
        dist.all_gather_object(everyone, mine, group=stage.world.pipeline)
    found = sorted((each for params in everyone for each in params), key=lambda each: each[0])
    return {param.name: param for _, param in found}


@torch.no_grad()
def gather_one(stage: StageModule, param: Param, piece: torch.Tensor | None, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The whole of a tensor that lies like ``param``, on the CPU of every rank. A collective.

    Args:
        piece: this rank's piece; None on stages that don't hold the parameter.
        dtype: of the tensor, if not the parameter's own.
    """
    world = stage.world
    if stage.stage in param.stages:
        out = whole(piece.detach().to(world.device), parse_layout(param.layout), param.shape, world)
    else:
        out = torch.empty(param.shape, dtype=dtype or param.dtype, device=world.device)
    if world.mesh.pipeline > len(param.stages):
        out = out.contiguous()
        dist.broadcast(out, group_src=min(param.stages), group=world.pipeline)
    return out.cpu().clone(memory_format=torch.contiguous_format)


def gather(stage: StageModule, params: Mapping[str, Param]) -> dict[str, torch.Tensor]:
    """See ``Sharded.state_dict``; ``params`` is its catalogue."""
    held = {param.name: tensor for param, tensor in stage.held()}
    out: dict[str, torch.Tensor] = {}
    for name, param in params.items():
        if param.saved:
            tensor = gather_one(stage, param, held.get(name), param.kept)
            out.update({alias: tensor for alias in param.names})
    return out


def gather_gradients(stage: StageModule, params: Mapping[str, Param]) -> dict[str, torch.Tensor | None]:
    """See ``Sharded.grad_dict``; ``params`` is its catalogue."""
    held = {param.name: tensor.grad for param, tensor in stage.held() if tensor.grad is not None}
    present = set(held)
    if stage.world.mesh.pipeline > 1:  # a stage does not know which parameters of another have a gradient
        everyone = [None] * stage.world.mesh.pipeline
        dist.all_gather_object(everyone, sorted(held), group=stage.world.pipeline)
        present = set().union(*everyone)
    return {
        name: gather_one(stage, param, held.get(name)) if name in present else None
        for name, param in params.items()
        if param.kind == "parameter"
    }


def scatter(stage: StageModule, params: Mapping[str, Param], state: Mapping[str, torch.Tensor], strict: bool = True) -> None:
    """See ``Sharded.load_state_dict``; ``params`` is its catalogue."""
    known = {name: param for name, param in params.items() if param.saved}
    if strict:
        check_names(state, [param.names for param in known.values()], "state_dict")
    for param in known.values():
        for name in param.names:
            if name in state and tuple(state[name].shape) != param.shape:
                raise RunError(f"{name!r} has shape {tuple(state[name].shape)} in the state_dict; the model's is {param.shape}")
    put(stage, lambda param: next((state[name] for name in param.names if name in state), None))


@torch.no_grad()
def update(
    stage: StageModule, program: StageModule, params: Mapping[str, Param], results: Sequence[Sequence[torch.Tensor]] | None
) -> None:
    """Give the buffers that forward changes their new values. A collective on a mesh with a pipeline, if there are any.

    Buffers are replaced, not written to: a backward that is still to come may need the old values.

    Args:
        stage: holds the buffers.
        program: what ran.
        params: the catalogue.
        results: what each micro-batch's forward returned; None on all stages but the last.
    """
    values = results[-1][len(program.outputs) :] if results is not None else [None] * len(program.updates)
    attributes = {param.name: attribute for attribute, param in stage.params.items()}
    for name, value in zip(program.updates, values):
        param = params[name]
        value = torch.empty(param.shape, dtype=param.dtype, device=stage.device) if value is None else value.to(param.dtype, copy=True)
        if stage.world.mesh.pipeline > 1:
            value = from_last_stage(value, stage.world, program.last_place)
        if name in attributes:
            setattr(stage, attributes[name], value)


def check_names(given: Iterable[str], expected: Iterable[tuple[str, ...]], what: str) -> None:
    """RunError if an expected entry is missing under all its names, or one is given that is not expected."""
    given, known = set(given), set()
    for names in expected:
        known.update(names)
        if not given.intersection(names):
            raise RunError(f"{names[0]!r} is missing from the {what}", hint="is it of another model?")
    unexpected = sorted(given - known)
    if unexpected:
        raise RunError(f"{unexpected[0]!r} in the {what} is not part of the model", hint="is it of another model?")


@torch.no_grad()
def put(stage: StageModule, get: Callable[[Param], torch.Tensor | None]) -> None:
    """Copy this rank's pieces of the whole tensors that ``get`` knows into its saved parameters and buffers."""
    for param, tensor in stage.held():
        whole_tensor = get(param) if param.saved else None
        if whole_tensor is not None:
            tensor.copy_(piece_of(stage, param, whole_tensor))


def piece_of(stage: StageModule, param: Param, tensor: torch.Tensor) -> torch.Tensor:
    """This rank's piece of a whole tensor that lies like ``param``."""
    return take(tensor, parse_layout(param.layout), stage.world.mesh.sizes, stage.world.coords)
