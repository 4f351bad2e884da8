"""One model on one draw: equal, refused in words, or a finding."""

from __future__ import annotations

import copy
import traceback
import warnings
from collections import defaultdict
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autoshard import compiler, passes
from autoshard.capture import capture
from autoshard.checking.compare import Row, relative_error, tolerance_of
from autoshard.checking.local import Local
from autoshard.checking.trial import Trial
from autoshard.cluster import Cluster
from autoshard.errors import AutoshardError, CaptureError, PlacementError, PlanError
from autoshard.mesh import Mesh
from autoshard.planning.saving import Saving
from autoshard.runtime.world import open_world

from .draws import Draw, lowered, solvers
from .spec import Spec

STEPS = 2
TIMEOUT = 60.0
NUDGE = 50.0  # times rounding
UNFIT = 1e-6  # a model that moves so far when it is nudged hangs on ties, and says nothing


@dataclass(frozen=True)
class Outcome:
    """kind: "equal", "refused" (an error that is right to be raised here), "unfit" (one device fails too, or the numbers hang on
    rounding), "wrong" (numbers) or "broken" (any other error).

    key: what two outcomes of the same cause have in common.
    """

    kind: str
    text: str = ""
    key: str = ""

    @property
    def good(self) -> bool:
        return self.kind in ("equal", "refused", "unfit")


@contextmanager
def doubles():
    """Float64 by default, one thread, no warnings."""
    before, threads = torch.get_default_dtype(), torch.get_num_threads()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_default_dtype(before)
        torch.set_num_threads(threads)


class Subject:
    """A model that is tried on meshes. Traced once."""

    def __init__(self, spec: Spec, seed: int):
        self.spec, self.seed = spec, seed
        torch.manual_seed(seed)
        self.model, first = spec.load()
        self.batches = [first, *(spec.load()[1] for _ in range(STEPS - 1))]
        self.batch = max((t.shape[0] for t in first.values() if t.dim()), default=1)
        self.local = Local(Trial(self.model, tuple(self.batches), None, seed, tolerance_of(torch.float64)), TIMEOUT)

    @cached_property
    def captured(self):
        return capture(self.model, self.batches[0])

    @cached_property
    def program(self):
        return passes.run("canonicalize", self.captured.program)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all parameters and inputs that the model reads, by name; empty if it can't be traced."""
        try:
            program = self.program
        except AutoshardError:
            return {}
        return {known.name: known.shape for known in (*program.params.values(), *program.inputs.values())}

    @cached_property
    def unsteady(self) -> dict[tuple[str, str], float]:
        """By (kind, name): how far a gradient, output or loss moves, relative to its size, if every op's result is nudged.

        What cancels out, is divided by next to nothing, or hangs on which of two equal numbers is larger, can't be told any better.
        """
        moved: dict[tuple[str, str], float] = defaultdict(float)
        for batch in self.batches:
            calm = self._numbers(batch, nullcontext())
            for seed in range(3):
                torch.manual_seed(seed)
                for key, t in self._numbers(batch, _Nudged()).items():
                    moved[key] = max(moved[key], relative_error(t, calm[key]))
        return moved

    def _numbers(self, batch: dict, mode) -> dict[tuple[str, str], torch.Tensor]:
        model = copy.deepcopy(self.model)
        with mode:
            found = model(**copy.deepcopy(batch))
        found["loss"].backward()
        numbers = {("gradient", name): p.grad for name, p in model.named_parameters() if p.grad is not None}
        return numbers | {("output", name): t.detach() for name, t in found.items()} | {("loss", ""): found["loss"].detach()}

    def run(self, draw: Draw) -> Outcome:
        try:
            program, mesh = self.program, Mesh(*draw.mesh)
            program.mesh = mesh
            cluster, saving = Cluster.of(None), Saving(draw.zero, draw.recompute)
            plan = compiler.plan_for(
                self.captured, program, "Model", mesh, cluster, None, draw.microbatches, draw.pins, solvers(draw.solver), saving
            )
            plan.zero = lowered(draw.solver, plan.zero)
            prepared = compiler.Prepared(self.captured, program, plan, compiler.rewrite(program, plan, mesh), self.batches[0])
            found = self.local.compare(mesh, lambda model, batch: prepared.sharded(model, open_world(mesh)))
        except AutoshardError as error:
            text = str(error)
            if _right(error, text, draw, self.batch):
                return Outcome("refused", text, _reason(text))
            if "the one-device run failed" in text:
                return Outcome("unfit", text, "fails on one device")
            cause = error.__cause__ or error
            head = text.split("Traceback (most recent call last)")[0].strip()
            return Outcome("broken", f"{type(error).__name__}: {head}\n{_frames(error)}", f"{type(cause).__name__} {_place(error)}")
        except Exception as error:
            return Outcome("broken", traceback.format_exc(), f"{type(error).__name__} {_place(error)}")
        if found.mismatch:
            return Outcome("broken", found.mismatch, "mismatch")
        wrong = [row for row in found.rows if not row.ok and row.error > self.unsteady.get((row.kind, row.name), 0.0)]
        if not wrong:
            return Outcome("equal")
        if max(self.unsteady.values()) > UNFIT:
            return Outcome("unfit")
        return Outcome("wrong", "\n".join(map(_say, wrong[:12])), wrong[0].kind)


class _Nudged(TorchFunctionMode):
    """Every floating point result is changed by about ``NUDGE`` times the rounding of its dtype."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return pytree.tree_map_only(torch.Tensor, _nudged, out)


def _nudged(t: torch.Tensor) -> torch.Tensor:
    return t * (1.0 + NUDGE * torch.finfo(t.dtype).eps * torch.randn_like(t)) if t.is_floating_point() else t


def _say(row: Row) -> str:
    return f"{row.kind} {row.where()}: {row.error:.1e}"


def _right(error: AutoshardError, text: str, draw: Draw, batch: int) -> bool:
    """Whether an error is the right answer to a draw."""
    if isinstance(error, CaptureError):
        return "depends on the data" in text
    if isinstance(error, PlacementError):
        return bool(draw.pins) and ("can't be" in text or "no parameter, buffer, input or module" in text)
    if not isinstance(error, PlanError):
        return False
    if "legal cut points" in text:
        return draw.mesh[2] > 1
    if "micro-batches do not divide" in text:
        return batch % draw.microbatches != 0
    if "no combination of strategies" in text:
        return bool(draw.pins)
    return "can't be cut into" in text and draw.microbatches > 1


def _reason(text: str) -> str:
    for words in (
        "depends on the data",
        "legal cut points",
        "do not divide",
        "mixes the samples",
        "is needed before the first",
        "can't be",
        "no combination",
        "no parameter",
    ):
        if words in text:
            return words
    return text.split("\n")[0]


def _place(error: BaseException) -> str:
    error = error.__cause__ or error
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename.rsplit('/', 1)[-1]}:{frame.name}"


def _frames(error: BaseException) -> str:
    """Where it was raised, without torch's own frames."""
    frames = traceback.extract_tb((error.__cause__ or error).__traceback__)
    return "".join(traceback.format_list([f for f in frames if "/torch/" not in f.filename][-4:]))
