"""Where a node of an exported graph comes from: the user's module, and their line."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import fx

OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
FRAME = re.compile(r'File "([^"]+)", line (\d+), in [^\n]*\n\s*([^\n]*)')


def module_path(node: fx.Node) -> str:
    """The user's module that runs the op: ``transformer.h.0.attn``; empty for the model itself."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = list(stack.values())[-1][0].split("@")[0]
    return path.removeprefix("model").removeprefix(".")


_SOURCES: dict[str, str] = {}


def source_line(node: fx.Node) -> str:
    """``modeling_gpt2.py:187: code``: the innermost frame of the user's, or of a library that is not torch."""
    trace = node.meta.get("stack_trace")
    if not trace:
        return ""
    if trace not in _SOURCES:
        frames = [f for f in FRAME.findall(trace) if not f[0].startswith(OURS) and not f[0].startswith("<")]
        _SOURCES[trace] = f"{Path(frames[-1][0]).name}:{frames[-1][1]}: {frames[-1][2].strip()}" if frames else ""
    return _SOURCES[trace]


def inner_place(module: fx.GraphModule, node: fx.Node) -> str | None:
    """Where the first op inside a region is."""
    bodies = (getattr(module, a.target) for a in node.args if isinstance(a, fx.Node) and a.op == "get_attr")
    return next((place(n) for body in bodies for n in body.graph.nodes if n.op == "call_function" and place(n)), None)


def place(node: fx.Node) -> str:
    """Where a node of the exported graph is in the user's code, for errors."""
    module, source = module_path(node), source_line(node)
    return f"{module} ({source})" if module and source else module or source
