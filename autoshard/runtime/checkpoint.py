"""Saving a training run on one mesh and going on with it on any other, in the format of torch.distributed.checkpoint.

A checkpoint holds whole tensors under the user's names: ``model/NAME``, and ``optimizer/NAME/exp_avg`` for what the optimizer keeps of each
parameter. It knows nothing of meshes, layouts or stages, nor of padding.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from autoshard.errors import RunError
from autoshard.runtime import state
from autoshard.runtime.sharded import Sharded
from autoshard.runtime.stage import Param

GROUPS = "optimizer groups"
SCALE = "loss scale"
TEXTS = (GROUPS, SCALE)
"""Entries that are JSON."""


def save(sharded: Sharded, optimizer: torch.optim.Optimizer | None, path: str | Path) -> None:
    """Write the model, and the optimizer if there is one, into the folder ``path``, over a checkpoint that is there. A collective.

    Raises:
        RunError: the optimizer keeps something that is no number and not of its parameter's shape.
    """
    entries: dict[str, object] = {
        f"model/{name}": tensor
        for name, tensor in sharded.state_dict().items()
        if name in sharded.catalogue  # aliases are one entry
    }
    if optimizer is not None:
        entries |= _optimizer_entries(sharded, optimizer)
        if sharded.scaling:
            entries[SCALE] = json.dumps(sharded.scaling.state())
    _quietly(dcp.save, entries, storage_writer=dcp.FileSystemWriter(path, overwrite=True))


def load(sharded: Sharded, optimizer: torch.optim.Optimizer | None, path: str | Path) -> None:
    """Take up what ``save`` wrote, from whatever mesh. A collective.

    Raises:
        RunError: the checkpoint is of another model, naming the entry and the shapes; nothing has been loaded then.
    """
    if not Path(path, ".metadata").exists():
        raise RunError(f"there is no checkpoint in {str(path)!r}")
    stored = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    wanted = {name: param for name, param in sharded.catalogue.items() if param.saved}
    state.check_names([key[6:] for key in stored if key.startswith("model/")], [(name,) for name in wanted], "checkpoint")
    for name, param in wanted.items():
        if tuple(stored[f"model/{name}"].size) != param.shape:
            raise RunError(f"{name!r} has shape {tuple(stored[f'model/{name}'].size)} in the checkpoint; the model's is {param.shape}")
    if optimizer is not None and GROUPS not in stored:
        raise RunError(f"the checkpoint in {str(path)!r} holds no optimizer", hint="load it with optimizer=None")
    entries: dict[str, object] = {}
    for key, entry in stored.items():
        if key.startswith("model/") or optimizer is not None:
            entries[key] = "" if key in TEXTS else torch.empty(entry.size, dtype=entry.properties.dtype)
    _quietly(dcp.load, entries, checkpoint_id=path)
    state.put(sharded.stage, lambda param: entries[f"model/{param.name}"])
    if optimizer is not None:
        _restore(sharded, optimizer, entries)
        if sharded.scaling and SCALE in entries:
            sharded.scaling.load(json.loads(entries[SCALE]))


def _quietly(run: Callable, entries: dict[str, object], **where) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # a mesh of one device needs none
        warnings.filterwarnings("ignore", message="Detected an existing checkpoint")  # as asked for
        run(entries, **where, no_dist=not dist.is_initialized())


def _optimizer_entries(sharded: Sharded, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    stage = sharded.stage
    held = {param.name: tensor for param, tensor in stage.held()}
    kept = {name: optimizer.state[p] for name, p in held.items() if p in optimizer.state and optimizer.state[p]}
    # what each stage keeps: numbers themselves, of the others only the dtype
    mine = {name: {key: _announce(name, key, value, held[name]) for key, value in values.items()} for name, values in kept.items()}
    everyone = [mine]
    if stage.world.mesh.pipeline > 1:
        everyone = [None] * stage.world.mesh.pipeline
        dist.all_gather_object(everyone, mine, group=stage.world.pipeline)
    known = {name: values for one in everyone for name, values in one.items()}
    entries: dict[str, object] = {GROUPS: json.dumps([_plain(group) for group in optimizer.param_groups])}
    for name in sorted(known):
        for key, value in known[name].items():
            if isinstance(value, torch.dtype):
                value = state.gather_one(stage, sharded.catalogue[name], kept.get(name, {}).get(key), value)
            entries[f"optimizer/{name}/{key}"] = value
    return entries


def _announce(name: str, key: str, value, param: torch.Tensor) -> torch.Tensor | torch.dtype:
    if not isinstance(value, torch.Tensor):
        return torch.tensor(value)
    if value.dim() == 0:
        return value.detach().cpu()
    if value.shape != param.shape:
        raise RunError(
            f"can't save the optimizer: {key!r} of {name!r} has shape {tuple(value.shape)}, its parameter {tuple(param.shape)}",
            hint="use an optimizer that works on each element, such as AdamW",
        )
    return value.dtype


def _plain(group: dict) -> dict:
    """A parameter group's settings."""
    return {k: v.item() if isinstance(v, torch.Tensor) else v for k, v in group.items() if k != "params"}


def _restore(sharded: Sharded, optimizer: torch.optim.Optimizer, entries: dict[str, object]) -> None:
    specs: dict[torch.Tensor, Param] = {tensor: param for param, tensor in sharded.stage.held()}
    values: dict[str, dict[str, torch.Tensor]] = {}
    for key, value in entries.items():
        if key.startswith("optimizer/"):
            _, name, what = key.split("/")
            values.setdefault(name, {})[what] = value
    groups = json.loads(entries[GROUPS])
    if len(groups) != len(optimizer.param_groups):
        raise RunError(f"the checkpoint's optimizer has {len(groups)} parameter groups, this one {len(optimizer.param_groups)}")
    packed: dict = {"state": {}, "param_groups": []}
    index = 0
    for saved, group in zip(groups, optimizer.param_groups):
        settings = {k: tuple(v) if isinstance(v, list) else v for k, v in saved.items()}
        packed["param_groups"].append({**settings, "params": list(range(index, index + len(group["params"])))})
        for tensor in group["params"]:
            param = specs.get(tensor)  # none: the empty tensor of a stage without parameters
            if param is not None and param.name in values:
                packed["state"][index] = {
                    what: value if value.dim() == 0 else state.piece_of(sharded.stage, param, value)
                    for what, value in values[param.name].items()
                }
            index += 1
    optimizer.load_state_dict(packed)
