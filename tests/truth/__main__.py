"""``python -m tests.truth memory``, ``time`` and ``equal``; exit status 1 if predictions are not good enough, or training is not equal."""

from __future__ import annotations

import argparse
import sys

import torch

from autoshard.cluster import Cluster
from autoshard.profiling import profile
from autoshard.verifier import BACKENDS

from . import equal, memory, speed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.truth", description="Predictions against measurements on this machine.")
    commands = parser.add_subparsers(dest="command", required=True)
    peaks = commands.add_parser("memory", help="bytes of each rank against the measured peak of live tensors")
    peaks.add_argument("cases", nargs="*", type=int, metavar="N", help="numbers of cases (default: all)")
    cells = commands.add_parser("equal", help="training at every ZeRO level, recomputing or not, against one device")
    cells.add_argument("cells", nargs="*", type=int, metavar="N", help="numbers of cells (default: all)")
    cells.add_argument("--backend", choices=BACKENDS, default="processes", help="default: %(default)s")
    steps = commands.add_parser("time", help="seconds of a step against measured ones, of plans that differ")
    steps.add_argument("--cluster", metavar="FILE", help="what `autoshard profile` wrote (default: measured now)")
    steps.add_argument("--rounds", type=int, default=speed.ROUNDS, metavar="N", help="default: %(default)s")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.command == "equal":
        return 0 if equal.table([equal.CELLS[i] for i in arguments.cells] or equal.CELLS, arguments.backend) else 1
    if arguments.command == "time":
        cluster = Cluster.of(arguments.cluster) if arguments.cluster else profile(8, sys.stderr)
        return 0 if speed.table(cluster, arguments.rounds) else 1
    cases = [memory.CASES[i] for i in arguments.cases] or memory.CASES
    return 0 if memory.table(cases) else 1


if __name__ == "__main__":
    sys.exit(main())
