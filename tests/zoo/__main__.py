"""``python -m tests.zoo``: every model on every mesh, compared with one device.

Exit status 1 if a cell is neither equal nor an error of autoshard's own.
"""

from __future__ import annotations

import argparse
import sys

import torch

from . import ZOO
from .cells import MESHES, Cell, run, support
from .coverage import coverage, programs
from .refused import table as refused


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=__doc__.splitlines()[0])
    parser.add_argument("--models", metavar="A,B", help="default: all of them")
    parser.add_argument("--meshes", metavar="D,T,P/D,T,P", default="/".join(MESHES), help="default: %(default)s")
    parser.add_argument("--backend", choices=("local", "processes"), default="local")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument("--coverage", action="store_true", help="instead: every op of the models, and its sharding rule")
    parser.add_argument("--support", action="store_true", help="instead: Markdown for the README, what runs and what is refused")
    arguments = parser.parse_args()
    models = arguments.models.split(",") if arguments.models else list(ZOO)
    if unknown := sorted(set(models) - set(ZOO)):
        parser.error(f"no model called {', '.join(unknown)}; there are {', '.join(ZOO)}")
    meshes = arguments.meshes.split("/")
    torch.set_num_threads(1)
    if arguments.coverage:
        for line in coverage(programs(models)):
            print(line, flush=True)
        return 0
    dtype = getattr(torch, arguments.dtype)
    if arguments.support:
        rows = {model: list(run(model, meshes, arguments.backend, dtype)) for model in models}
        print("\n".join([*support(rows), "", *refused()]))
        return int(any(cell.kind == "BUG" for cells in rows.values() for cell in cells))
    print(f"{'':16}" + "".join(f"{mesh:24}" for mesh in meshes))
    bad = False
    for model in models:
        cells = list(run(model, meshes, arguments.backend, dtype))
        bad |= any(cell.kind == "BUG" for cell in cells)
        print(f"{model:16}" + "".join(f"{short(cell):24}" for cell in cells).rstrip(), flush=True)
        for cell in cells:
            if cell.kind != "EQ":
                print(f"  {cell.mesh}: " + cell.text.rstrip().replace("\n", "\n    "), flush=True)
    return int(bad)


def short(cell: Cell) -> str:
    return str(cell) if cell.kind == "EQ" else cell.kind


if __name__ == "__main__":
    sys.exit(main())
