"""The passes: plain functions on a Program, one job a file. PIPELINE is the order in which the compiler runs them.

Each row: name, pass, level that its output satisfies. Levels, each including what the one above it demands:

    CAPTURED    what torch.export gives
    CANONICAL   one spelling of every op, literal sizes, nothing dead (see canonicalize)
    PLANNED     every op has a strategy, every value a layout, every op a stage
    CONVERTED   every operand lies as its op demands; changes of placement are convert nodes
    STAGED      one program per pipeline stage
    LOCAL       shapes and arguments are the rank's own

insert_conversions writes on the program that it is given; the others leave it as it is.
"""

from __future__ import annotations

import logging
import time

from autoshard.logs import logger
from autoshard.passes.bucket_gathers import bucket_gathers
from autoshard.passes.canonicalize import canonicalize
from autoshard.passes.checkpoint_regions import checkpoint_regions
from autoshard.passes.cut_stages import cut_stages
from autoshard.passes.insert_conversions import insert_conversions
from autoshard.passes.levels import check, dump, programs, show
from autoshard.passes.localize import localize
from autoshard.passes.microbatch import microbatch
from autoshard.passes.zero import zero

PIPELINE = (
    ("canonicalize", canonicalize, "CANONICAL"),
    ("microbatch", microbatch, "CANONICAL"),
    # here the planner decides: PLANNED
    ("zero", zero, "PLANNED"),
    ("insert_conversions", insert_conversions, "CONVERTED"),
    ("checkpoint_regions", checkpoint_regions, "CONVERTED"),
    ("bucket_gathers", bucket_gathers, "CONVERTED"),
    ("cut_stages", cut_stages, "STAGED"),
    ("localize", localize, "LOCAL"),
)


def run(name: str, *args):
    """Run one pass of PIPELINE by name, check the level that it promises, dump and log it; returns what the pass returns."""
    number, (_, function, level) = next((i, row) for i, row in enumerate(PIPELINE) if row[0] == name)
    start = time.perf_counter()
    result = function(*args)
    log, seconds = logger("passes"), time.perf_counter() - start
    for suffix, program in programs(result):
        check(program, level)
        dump(program, f"{number}_{name}{suffix}")
        log.info("%s%s: %d ops, %.3f s", name, suffix, len(program.ops), seconds)
        if log.isEnabledFor(logging.DEBUG):
            log.debug("%s", show(program))
    return result
