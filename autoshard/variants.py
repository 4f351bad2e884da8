"""More than one program for one set of weights: what a model needs to be traced, planned and cut again as it was the first time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from autoshard.capture import Captured
from autoshard.errors import PlanError
from autoshard.mesh import SHARDED_AXES
from autoshard.passes.cut_stages import Stage
from autoshard.planning.plan import Plan
from autoshard.program import Param, Program
from autoshard.signature import Signature


@contextmanager
def in_mode(model: nn.Module, training: bool, was: Mapping[str, bool]) -> Iterator[None]:
    """Within, the model is in eval mode, or in train mode: then, if it was captured so, its modules are in the modes they were in."""
    now = {module: module.training for module in model.modules()}
    model.train(training)
    if training and was[""]:
        for name, module in model.named_modules():
            module.training = was[name]
    try:
        yield
    finally:
        for module, mode in now.items():
            module.training = mode


def as_example(signature: Signature, first: Any, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    """The arguments of a call in the form of the ``first`` example inputs: a dict, or a tuple."""
    if isinstance(first, Mapping):
        return {**dict(zip(signature.positional, args)), **kwargs}
    rest = [kwargs[name] for name in signature.positional[len(args) :] if name in kwargs]
    return (*args, *rest)


def same_weights(captured: Captured, program: Program, plan: Plan, new: Program) -> dict[str, dict[str, str]]:
    """Pins that keep every parameter and buffer of a ``new`` program where the first one (captured, ``program``, ``plan``) has it."""
    held = {param.name: plan.strategies.get(node) for node, param in program.params.items()}
    saved = {param.name for param in captured.params}
    pins = {}
    for param in new.params.values():
        if param.name in saved:
            layout = held.get(param.name) or ["R"] * len(SHARDED_AXES)  # one that the first does not read lies whole
            pins[param.name] = dict(zip(SHARDED_AXES, layout))
    return pins


def same_stages(first: Plan, stages: list[Stage], unread: tuple[Param, ...], new: Program) -> dict[str, int]:
    """The stage of every op of a ``new`` program, by name, such that each parameter is read on a stage that holds it.

    Args:
        stages: of the first program. unread: parameters that it does not read.

    Raises:
        PlanError: there is no such cut.
    """
    holders: dict[str, list[int]] = {param.name: [0] for param in unread}
    for stage in stages:
        for param in stage.program.params.values():
            holders.setdefault(param.name, []).append(stage.index)
    found: dict[str, int] = {}
    for hints in ({}, first.stages):  # ops of the same name help where a stage has no parameters
        found = _stages_by_holders(new, holders, hints)
        if len(set(found.values())) == len(stages):
            return found
    raise PlanError(f"only {len(set(found.values()))} of {len(stages)} stages would have anything to do")


def _stages_by_holders(program: Program, holders: Mapping[str, list[int]], hints: Mapping[str, int]) -> dict[str, int]:
    """As early a stage for each op as its parameters, and the ``hints`` by name, allow."""
    found, now = {}, 0
    for node in program.ops:
        now = max(now, hints.get(node.name, 0))
        for operand in node.all_input_nodes:
            param = program.params.get(operand.name) if operand.op == "placeholder" else None
            if param is not None and param.kind == "parameter":
                later = [stage for stage in holders[param.name] if stage >= now]
                if not later:
                    raise PlanError(f"{param.name!r} is held by stage {holders[param.name][-1]}, but {node.name!r} reads it on stage {now}")
                now = min(later)
        found[node.name] = now
    return found
