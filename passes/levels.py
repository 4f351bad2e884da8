"""What a program must satisfy at each level, checked after every pass; and AUTOSHARD_DUMP=dir, which writes each level to a file."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import fx

from autoshard import ops
from autoshard.errors import PlanError
from autoshard.placement import CONVERSIONS, R_STAR, Layout, R, format_layout, parse_placement
from autoshard.program import Program, is_getitem, operands, result_of, tensors, where

ATEN_OP = type(torch.ops.aten.add.Tensor)


def check(program: Program, level: str) -> None:
    """Raise PlanError where a program breaks its level."""
    program.graph.lint()
    CHECKS[level](program)


def dump(program: Program, title: str) -> None:
    """Write the program to ``title.py`` in the folder that AUTOSHARD_DUMP names, if it does."""
    folder = os.environ.get("AUTOSHARD_DUMP")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / f"{title}.py").write_text(show(program))


def programs(result):
    """(file suffix, program) of whatever a pass returns."""
    if isinstance(result, Program):
        yield "", result
    elif isinstance(result, list):
        for stage in result:
            yield f"_stage{stage.index}", stage.program
    else:
        yield "", result.program
        if result.prologue is not None:
            yield "_prologue", result.prologue


def _canonical(program: Program) -> None:
    for node in program.ops:
        if not is_getitem(node) and not isinstance(node.target, ATEN_OP):
            raise PlanError(f"{node.target} is not an ATen op", where=where(node))
        if "val" not in node.meta:
            raise PlanError("a node has no shape", where=where(node))


def _planned(program: Program) -> None:
    for node in program.ops:
        if not is_getitem(node) and not ("strategy" in node.meta and "layouts" in node.meta and "stage" in node.meta):
            raise PlanError("an op has no strategy", where=where(node))


def _converted(program: Program) -> None:
    """Every operand lies as its op demands."""
    for node in program.ops:
        strategy = node.meta.get("strategy")
        if strategy is None or is_getitem(node):
            continue
        for i, (x, demand) in enumerate(zip(operands(node), strategy.operands)):
            producer, index = result_of(x)
            have = producer.meta["layouts"][index]
            if have != demand and not _same(have, demand, bool(x.meta.get("grad"))):
                raise PlanError(
                    f"operand {i} of {node.target} lies as {format_layout(have)}, but {format_layout(demand)} is demanded",
                    where=where(node),
                )


def _same(have: Layout, demand: Layout, grad: bool) -> bool:
    return all(a == b or (not grad and {a, b} <= {R, R_STAR}) for a, b in zip(have, demand))


def _local(program: Program) -> None:
    for node in program.ops:
        if node.target is ops.convert:
            src, dst = map(parse_placement, node.args[1].split(" -> "))
            if (src.kind, dst.kind) not in CONVERSIONS:
                raise PlanError(f"no conversion leads from {src} to {dst}", where=where(node), hint="this is a bug; please report it")


CHECKS = {"CANONICAL": _canonical, "PLANNED": _planned, "CONVERTED": _converted, "STAGED": _converted, "LOCAL": _local}


def show(program: Program) -> str:
    """The program as readable Python: one line per node, shape and placements in a comment."""
    lines = []
    for node in program.graph.nodes:
        vals = tensors(node.meta.get("val"))
        shape = ", ".join(f"{str(v.dtype).removeprefix('torch.')}{list(v.shape)}" for v in vals)
        notes = [shape] if shape and node.op != "output" else []
        if node.meta.get("layouts"):
            notes.append(" ".join(map(format_layout, node.meta["layouts"])))
        if "strategy" in node.meta and node.op == "call_function":
            notes.append(node.meta["strategy"].name)
        if "stage" in node.meta and node.op != "output" and program.mesh.pipeline > 1:
            notes.append(f"stage {node.meta['stage']}")
        if "region" in node.meta:
            notes.append(f"region {node.meta['region']}")
        if node.op == "placeholder":
            text = f"{node.name} = placeholder"
        elif node.op == "output":
            text = f"return {_text(list(node.args[0]))}"
        else:
            args = [_text(a) for a in node.args] + [f"{k}={_text(v)}" for k, v in node.kwargs.items()]
            target = str(node.target) if isinstance(node.target, ATEN_OP) else node.target.__name__
            text = f"{node.name} = {target}({', '.join(args)})"
        lines.append(f"{text}  # {'; '.join(notes)}" if notes else text)
    return "\n".join(lines) + "\n"


def _text(arg) -> str:
    if isinstance(arg, fx.Node):
        return arg.name
    if isinstance(arg, (list, tuple)):
        return f"[{', '.join(map(_text, arg))}]"
    return repr(arg)
