"""What torch.export raises, said in the user's own terms: their file, line and expression, and what to do."""

from __future__ import annotations

import contextlib
import linecache
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import nn

from autoshard.errors import AutoshardError, CaptureError

OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parent), "<")
DATA_DEPENDENT = (
    "data-dependent",
    "data dependent",
    "dynamic control flow",
    "GuardOnDataDependent",
    "DataDependentOutputException",
    "_local_scalar_dense",
    ".numpy() is not supported",
)


@contextlib.contextmanager
def explained(model: nn.Module) -> Iterator[None]:
    """Turn any exception of a trace into a CaptureError, chained to the original."""
    try:
        yield
    except Exception as error:
        ours = next((e for e in causes(error) if isinstance(e, AutoshardError)), None)
        if ours is not None:
            raise ours from ours.__cause__
        raise explain(model, error) from error


def explain(model: nn.Module, error: Exception) -> CaptureError:
    chain = list(causes(error))
    frames = (users_frame(traceback.extract_tb(e.__traceback__)) for e in reversed(chain))
    where, expression = next(filter(None, frames), (None, ""))
    name = type(model).__name__
    text = " ".join(f"{type(e).__name__}: {e}" for e in chain)
    if any(mark.lower() in text.lower() for mark in DATA_DEPENDENT):
        return CaptureError(
            f"{name} decides something in Python by the data of a tensor: {expression or first_line(error)}",
            where=where,
            hint="the graph must be the same for all data: use torch.where or a mask, not if, int(), .item() or a loop over data",
        )
    sized = next((e for e in chain if type(e).__name__ == "DynamicOutputShapeException"), None)
    if sized is not None:
        return CaptureError(
            f"{name} calls {first_line(sized)}, which gives a size that depends on the data: {expression}",
            where=where,
            hint="every shape must be known before the step; F.ctc_loss, for one, can be traced with lengths that are tuples of ints",
        )
    if "fake tensor in the exported program constant" in text:
        return CaptureError(
            f"{name} takes .data of a tensor in forward, or the gradient of a value that can't be traced",
            where=where,
            hint="write x.detach() for x.data; what a step changes in a parameter belongs behind optimizer.step()",
        )
    if "functorch" in text:
        hint = "torch.autograd.grad(..., create_graph=True) can be traced for products and powers"
        what = f"{name} uses a gradient transform of torch.func inside forward, which is not supported"
        return CaptureError(what, where=where, hint=hint)
    return CaptureError(
        f"{name} can't be traced with these inputs: {first_line(chain[-1])}",
        where=where,
        hint="check that model(**example_inputs) runs; torch.export must be able to trace it (strict=False)",
    )


def causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)


def users_frame(frames: Iterable[traceback.FrameSummary]) -> tuple[str, str] | None:
    """("file.py:12: code", expression) of the innermost frame that is neither torch's nor ours."""
    found = None
    for frame in frames:
        if not frame.filename.startswith(OURS):
            found = frame
    if found is None:
        return None
    line = linecache.getline(found.filename, found.lineno or 0)
    code = line.strip()
    start, end = getattr(found, "colno", None), getattr(found, "end_colno", None)
    if start is None or end is None or found.end_lineno != found.lineno:  # Python 3.10 knows no columns
        return f"{Path(found.filename).name}:{found.lineno}: {code}", code
    return f"{Path(found.filename).name}:{found.lineno}: {code}", line.encode()[start:end].decode()


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:300]
