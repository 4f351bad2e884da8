"""Trains from a folder of emitted modules alone: ``torchrun --nproc-per-node 8 -m autoshard.runtime.launch FOLDER --steps 10``.

The folder holds ``rank0.py``, ``rank1.py``, ...; ``interface.json``, which describes the tensor arguments; and, if there are,
``weights.pt``, whole tensors by name, and ``batch.pt``, one global batch. What is missing is made up at random, the same on any mesh.
Nothing of the planner is imported.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from autoshard.errors import AutoshardError, RunError
from autoshard.mesh import Mesh
from autoshard.runtime.interface import Argument, Interface
from autoshard.runtime.sharded import Sharded
from autoshard.runtime.stage import Param, StageModule
from autoshard.runtime.world import open_world, rank_and_count
from autoshard.signature import Signature


def write(
    folder: str | Path,
    interface: Interface,
    weights: Mapping[str, torch.Tensor] | None = None,
    batch: Mapping[str, torch.Tensor] | None = None,
    high: Mapping[str, int] | None = None,
) -> None:
    """Write what ``FOLDER`` needs beside the modules.

    Args:
        weights: whole tensors by name: parameters, buffers (non-persistent ones too) and constants.
        high: for integer arguments, what random values must stay under (default 2).
    """
    folder, high = Path(folder), high or {}
    arguments = {
        a.name: {"shape": list(a.shape), "dtype": str(a.dtype), "batch_dim": a.batch_dim, "cast": a.cast, "high": high.get(a.name, 2)}
        for a in interface.arguments
    }
    (folder / "interface.json").write_text(json.dumps(arguments, indent=2) + "\n")
    for name, tensors in (("weights.pt", weights), ("batch.pt", batch)):
        if tensors is not None:
            torch.save({k: v.detach().cpu() for k, v in tensors.items()}, folder / name)


def open_folder(folder: str | Path) -> tuple[Sharded, dict[str, dict]]:
    """This rank's module from an emitted folder, weights loaded, and the description of the arguments. A collective."""
    folder = Path(folder)
    if not (folder / "rank0.py").exists() or not (folder / "interface.json").exists():
        raise RunError(f"{str(folder)!r} holds no emitted modules", hint="write them with autoshard emit, or sharded.emit(folder)")
    described = json.loads((folder / "interface.json").read_text())
    arguments = tuple(Argument(name, tuple(d["shape"]), _dtype(d["dtype"]), d["batch_dim"], d["cast"]) for name, d in described.items())
    rank, _ = rank_and_count()
    # the mesh is the same in all files, so a wrong number of processes is seen before one looks for its own
    first = _load(folder / "rank0.py")
    world = open_world(Mesh(*first.mesh, first.order))
    stage = _load(folder / f"rank{rank}.py")(world)
    weights = torch.load(folder / "weights.pt", mmap=True) if (folder / "weights.pt").exists() else None
    by_name = {param.name: param for param, _ in stage.held()}
    stage.load(lambda name: random_weight(by_name[name]) if weights is None else weights[name])
    names = tuple(described)
    return Sharded(stage, Interface(Signature(names, names), arguments)), described


def _load(path: Path) -> type[StageModule]:
    spec = importlib.util.spec_from_file_location(f"emitted_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Stage


def _dtype(text: str) -> torch.dtype:
    return getattr(torch, text.removeprefix("torch."))


def _generator(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(name.encode()))


def random_weight(param: Param) -> torch.Tensor:
    """A whole tensor that depends on the name alone: small numbers around 0 for matrices, around 1 for vectors; integers are 0."""
    if not param.dtype.is_floating_point:
        return torch.zeros(param.shape, dtype=param.dtype)
    center = 1.0 if len(param.shape) < 2 and param.name.endswith("weight") else 0.0
    return (center + 0.02 * torch.randn(param.shape, generator=_generator(param.name))).to(param.kept)


def random_batch(described: Mapping[str, dict], step: int) -> dict[str, torch.Tensor]:
    """A global batch that depends on the step alone."""
    batch = {}
    for name, d in described.items():
        dtype, generator = _dtype(d["dtype"]), _generator(f"{name} {step}")
        if dtype.is_floating_point:
            batch[name] = torch.randn(d["shape"], generator=generator).to(dtype)
        else:
            batch[name] = torch.randint(0, d["high"], d["shape"], generator=generator).to(dtype)
    return batch


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="autoshard.runtime.launch", description="Train from a folder of emitted modules.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate of AdamW (default 1e-3)")
    options = parser.parse_args(argv)
    ours = not dist.is_initialized()
    try:
        sharded, described = open_folder(options.folder)
        fixed = torch.load(options.folder / "batch.pt") if (options.folder / "batch.pt").exists() else None
        optimizer = sharded.optimizer(torch.optim.AdamW, lr=options.lr)
        for step in range(options.steps):
            result = sharded.train_step(**(fixed or random_batch(described, step)))
            optimizer.step()
            optimizer.zero_grad()
            if sharded.world.rank == 0:
                print(f"step {step + 1} loss {result[sharded.stage.loss].item():.10g}", flush=True)
    except AutoshardError as error:
        print(f"autoshard: error: {error}", file=sys.stderr)
        return 2
    finally:
        if ours and dist.is_initialized():
            dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
