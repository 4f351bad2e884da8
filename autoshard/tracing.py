"""What holds while a model is traced: quiet logs, the module left as it was, no gradients lost on the way."""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import sys
import traceback
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.fx.proxy
from torch import nn
from torch.export import exported_program
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import checkpoint

from autoshard.autocast import autocast_marked
from autoshard.errors import CaptureError
from autoshard.torch_private import FakeTensorMode, graph_module, lazy_graph_modules
from autoshard.trace_errors import OURS, users_frame

NOISY = ("torch.fx.experimental.symbolic_shapes", "torch._subclasses.fake_tensor", "torch.export")
"""Loggers that print graphs and tracebacks for errors which become a CaptureError."""


@contextlib.contextmanager
def tracing(model: nn.Module, mode: FakeTensorMode | None) -> Iterator[None]:
    """All of the below, and the random state of the CPU restored. ``mode``: that of ``tracing_mode``."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(quiet())
        stack.enter_context(unchanged(model))
        stack.enter_context(custom_gradients())
        stack.enter_context(autograd_inside())
        stack.enter_context(autocast_marked())
        stack.enter_context(users_lines())
        stack.enter_context(no_code())
        if mode is not None:
            off_meta(model, mode)
        yield


def tracing_mode(model: nn.Module) -> tuple[FakeTensorMode | None, torch.device]:
    """Where a model is traced: on its own device; one on ``meta`` on fake tensors of the CPU, which need this mode.

    A forward that makes a tensor without saying where, ``torch.arange(n)``, makes it on the CPU, and devices must not mix.
    """
    device = next((t.device for t in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    if device.type != "meta":
        return None, device
    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True), torch.device("cpu")


def off_meta(model: nn.Module, mode: FakeTensorMode) -> None:
    """Replace parameters and buffers on ``meta`` by fake ones on the CPU; ``unchanged`` takes that back."""
    made: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, old in held.items():
                if old is not None and old.device.type == "meta":
                    if old not in made:
                        with mode:
                            new = torch.empty_strided(old.shape, old.stride(), dtype=old.dtype, device="cpu")
                        made[old] = nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
                    held[name] = made[old]


@contextlib.contextmanager
def replaced(*attributes: tuple[Any, str, Any]) -> Iterator[None]:
    """Give attributes of owners, each an (owner, name, new value), other values for a while."""
    originals = [vars(owner)[name] for owner, name, _ in attributes]  # getattr would bind a method
    for owner, name, new in attributes:
        setattr(owner, name, new)
    try:
        yield
    finally:
        for (owner, name, _), original in zip(attributes, originals):
            setattr(owner, name, original)


@contextlib.contextmanager
def few_collections() -> Iterator[None]:
    """Let Python look for cyclic garbage rarely: what a large graph is made of stays, and is looked through each time for nothing."""
    before = gc.get_threshold()
    gc.set_threshold(50_000, 50, before[2])
    try:
        yield
    finally:
        gc.set_threshold(*before)


class UsersLine:
    """In place of torch's CapturedTraceback, for nodes: the innermost frame of a forward of the user's, or of a library that is not torch.

    torch looks up the text of every frame, some eighty for every node, and keeps those of forwards (torch 2.13).
    """

    def __init__(self):
        frame = sys._getframe(1)
        while frame is not None and (frame.f_code.co_name != "forward" or frame.f_code.co_filename.startswith(OURS)):
            frame = frame.f_back
        self.frames = [] if frame is None else [traceback.FrameSummary(frame.f_code.co_filename, frame.f_lineno, "forward")]

    extract = classmethod(lambda cls: cls())

    def summary(self) -> traceback.StackSummary:
        return traceback.StackSummary.from_list(self.frames)


@contextlib.contextmanager
def users_lines() -> Iterator[None]:
    """The stack trace of a node is the user's line alone."""
    with replaced((torch.fx.proxy, "CapturedTraceback", UsersLine)):
        yield


@contextlib.contextmanager
def no_code() -> Iterator[None]:
    """The exporter rewrites one graph several times: no code is generated for a graph that nobody runs (torch 2.13)."""
    with replaced((exported_program, "_create_graph_module_for_export", graph_module)), lazy_graph_modules(True):
        yield


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No warnings or logs of the tracer's own; what the model prints to stderr comes after a trace that succeeds."""
    loggers = {name: logging.getLogger(name) for name in NOISY}
    levels = {name: logger.level for name, logger in loggers.items()}
    for logger in loggers.values():
        logger.setLevel(logging.CRITICAL)
    printed = io.StringIO()  # a failing export prints the graph so far
    try:
        with contextlib.redirect_stderr(printed), warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning)
            warnings.filterwarnings("ignore", module=r"torch\.")
            warnings.filterwarnings("ignore", message="The tensor attribute")
            yield
        sys.stderr.write(printed.getvalue())
    finally:
        for name, logger in loggers.items():
            logger.setLevel(levels[name])


@contextlib.contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Take back what forward writes to attributes of modules (``self.last = y``), lists and dicts among them."""
    before = [(module, {name: (value, _content(value)) for name, value in vars(module).items()}) for module in model.modules()]
    try:
        yield
    finally:
        for module, attributes in before:
            vars(module).clear()
            for name, (value, content) in attributes.items():
                if isinstance(value, list):
                    value[:] = content
                elif isinstance(value, (dict, set)):
                    value.clear()
                    value.update(content)
                vars(module)[name] = value


def _content(value: Any) -> Any:
    return value.copy() if isinstance(value, (list, dict, set)) else None


@contextlib.contextmanager
def custom_gradients() -> Iterator[None]:
    """torch.export sees the forward of an autograd.Function only: its own backward would be lost without a word.

    Checkpoints are the exception: they compute what they wrap, so that is traced in their place.
    """
    original = torch.autograd.Function.__dict__["apply"]

    def apply(cls, *args, **kwargs):
        if cls is checkpoint.CheckpointFunction:
            function, _, *operands = args
            learns = torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in operands)
            with torch.set_grad_enabled(learns):  # a reentrant checkpoint trains nothing if none of its inputs has a gradient
                return function(*operands)
        if cls.__module__.startswith("torch."):
            return original.__func__(cls, *args, **kwargs)
        where, _ = users_frame(traceback.extract_stack()) or (None, "")
        raise CaptureError(
            f"the model uses {cls.__name__}, an autograd.Function with a backward of its own",
            where=where,
            hint="write it with differentiable operations, or as a torch.library custom op with register_autograd",
        )

    with replaced((torch.autograd.Function, "apply", classmethod(apply))):
        yield


@contextlib.contextmanager
def autograd_inside() -> Iterator[None]:
    """``inference_mode`` is taken for ``no_grad``; hooks and ``backward()`` inside forward would be lost, and are refused."""

    def refuse(what: str, hint: str):
        def refused(*args, **kwargs):
            where, _ = users_frame(traceback.extract_stack()) or (None, "")
            raise CaptureError(f"the model uses {what} inside forward, which is not supported", where=where, hint=hint)

        return refused

    def enter(self) -> None:
        self.instead = torch.no_grad()
        self.instead.__enter__()

    with replaced(
        (torch.Tensor, "register_hook", refuse("Tensor.register_hook", "scale gradients in the graph: x * s + (x * (1 - s)).detach()")),
        (torch.autograd, "backward", refuse("backward()", "return the loss; gradients that the loss needs are torch.autograd.grad's")),
        (torch.inference_mode, "__enter__", enter),
        (torch.inference_mode, "__exit__", lambda self, *args: self.instead.__exit__(*args)),
    ):
        yield


def refuse_gradient_hooks(model: nn.Module) -> None:
    """Hooks that change gradients are no part of a graph."""
    found = [f"the module {path!r}" for path, m in model.named_modules() if m._backward_hooks or m._backward_pre_hooks]
    found += [f"the parameter {name!r}" for name, p in model.named_parameters() if p._backward_hooks or p._post_accumulate_grad_hooks]
    if found:
        raise CaptureError(
            f"{found[0]} has a hook on its gradient, which would not run",
            hint="remove it; work on gradients between backward() and the optimizer's step",
        )
