"""One model on one draw: equal, refused in words, or a finding."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from autoshard import compiler, passes
from autoshard.capture import capture
from autoshard.checking.compare import Row, relative_error, tolerance_of
from autoshard.checking.local import Local
from autoshard.checking.trial import Trial
from autoshard.cluster import Cluster
from autoshard.errors import AutoshardError, PlacementError, PlanError
from autoshard.mesh import Mesh
from autoshard.runtime.world import open_world

from .draws import Draw, solvers
from .spec import Spec

STEPS = 2
TIMEOUT = 60.0
ROUNDING = 20.0  # how much worse the rounding of a sharded run may be than a run on one device makes believe


@dataclass(frozen=True)
class Outcome:
    """kind: "equal", "refused" (an error that is right to be raised here), "wrong" (numbers) or "broken" (any other error).

    key: what two outcomes of the same cause have in common.
    """

    kind: str
    text: str = ""
    key: str = ""

    @property
    def good(self) -> bool:
        return self.kind in ("equal", "refused")


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
        self.shapes = {name: tuple(t.shape) for name, t in [*self.model.named_parameters(), *first.items()]}
        self.local = Local(Trial(self.model, tuple(self.batches), None, seed, tolerance_of(torch.float64)), TIMEOUT)

    @cached_property
    def captured(self):
        return capture(self.model, self.batches[0])

    @cached_property
    def unsteady(self) -> dict[tuple[str, str], float]:
        """By (kind, name): how much of a gradient or an output may be rounding, relative to its size.

        Judged by the difference that float32 makes. What cancels out, or is divided by next to nothing, can't be told any better.
        """
        exact, rough = self._numbers(torch.float64), self._numbers(torch.float32)
        coarser = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
        return {key: ROUNDING * coarser * relative_error(rough[key], t) for key, t in exact.items() if key in rough}

    def _numbers(self, dtype: torch.dtype) -> dict[tuple[str, str], torch.Tensor]:
        model, _ = self.spec.load(dtype)
        model.load_state_dict(self.model.state_dict())
        torch.set_default_dtype(dtype)
        try:
            found = model(**{name: t.to(dtype) if t.is_floating_point() else t for name, t in self.batches[0].items()})
            found["loss"].backward()
        finally:
            torch.set_default_dtype(torch.float64)
        numbers = {("gradient", name): p.grad for name, p in model.named_parameters() if p.grad is not None}
        numbers |= {("output", name): t.detach() for name, t in found.items()}
        return {key: t.to(torch.float64) if t.is_floating_point() else t for key, t in numbers.items()}

    def run(self, draw: Draw) -> Outcome:
        try:
            program = passes.run("canonicalize", self.captured.program)
            mesh = Mesh(*draw.mesh)
            program.mesh = mesh
            plan, _ = compiler.plan_for(
                self.captured, program, "Model", mesh, Cluster.of(None), None, draw.microbatches, draw.pins, solvers(draw.solver)
            )
            prepared = compiler.Prepared.of(self.captured, plan, mesh, self.batches[0])
            found = self.local.compare(mesh, lambda model, batch: prepared.sharded(model, open_world(mesh)))
        except AutoshardError as error:
            text = str(error)
            if _right(error, text, draw, self.batch):
                return Outcome("refused", text, _reason(text))
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
        return Outcome("wrong", "\n".join(map(_say, wrong[:12])), wrong[0].kind)


def _say(row: Row) -> str:
    return f"{row.kind} {row.where()}: {row.error:.1e}"


def _right(error: AutoshardError, text: str, draw: Draw, batch: int) -> bool:
    """Whether an error is the right answer to a draw."""
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
    for words in ("legal cut points", "do not divide", "mixes the samples", "is needed before the first", "can't be", "no combination", "no parameter"):
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


def same_outcome(spec: Spec, draw: Draw, seed: int, key: str, kind: str) -> bool:
    """Whether a smaller model on a smaller draw still fails in the same way."""
    try:
        outcome = Subject(spec, seed).run(draw)
    except Exception:  # a model that does not even run
        return False
    return outcome.kind == kind and outcome.key == key


Fails = Callable[[Spec, Draw], bool]


def shrink(spec: Spec, draw: Draw, fails: Fails, tries: int = 150) -> tuple[Spec, Draw]:
    """The smallest model and draw that greedy steps lead to and that still fail."""
    left = tries
    changed = True
    while changed and left > 0:
        changed = False
        for candidate in draw.smaller():
            left -= 1
            if fails(spec, candidate):
                draw, changed = candidate, True
                break
        for candidate in _smaller(spec):
            left -= 1
            if left <= 0:
                break
            if fails(candidate, draw):
                spec, changed = candidate, True
                break
    return spec, draw


def _smaller(spec: Spec):
    """Models with a part less: outputs, terms of the loss, then each step, the last ones first."""
    pruned = spec.pruned()
    if pruned != spec:
        yield pruned
    for i in range(len(spec.outputs)):
        yield replace(spec, outputs=spec.outputs[:i] + spec.outputs[i + 1 :]).pruned()
    terms = spec.loss.split(" + ")
    if len(terms) > 1:
        for i in range(len(terms)):
            yield replace(spec, loss=" + ".join(terms[:i] + terms[i + 1 :])).pruned()
    yield from _without_steps(spec)
    for i, weight in enumerate(spec.weights):
        if weight.frozen:
            yield replace(spec, weights=spec.weights[:i] + (replace(weight, frozen=False),) + spec.weights[i + 1 :])


def _without_steps(spec: Spec):
    from .spec import HEADER, Step

    scope: dict = {}
    exec(HEADER, scope)
    model, batch = spec.load()
    scope |= {"self": model, **batch}
    shapes: dict[str, torch.Tensor] = dict(batch)
    for step in spec.steps:
        exec("\n".join(step.lines()), scope)
        shapes |= {name: scope[name] for name in step.outs}
    for i in reversed(range(len(spec.steps))):
        step = spec.steps[i]
        earlier = [*batch, *(name for s in spec.steps[:i] for name in s.outs)]
        replaced = []
        for out in step.outs:
            want = shapes[out]
            like = [n for n in earlier if shapes[n].shape == want.shape and shapes[n].dtype == want.dtype]
            size = ", ".join(map(str, want.shape)) + ("," if want.dim() == 1 else "")
            made = f"torch.randn({size})" if want.is_floating_point() else f"torch.randint(0, 2, ({size}))"
            made += ".bool()" if want.dtype == torch.bool else ""
            lead = want.dim() and want.shape[0] == max((t.shape[0] for t in batch.values() if t.dim()), default=1)
            replaced.append((out, [f"{out} = {n}" for n in like[-1:]], made if lead else None, size if want.is_floating_point() else None))
        for mode in ("like", "input", "weight"):
            lines, inputs, weights = [], [], []
            for out, like, made, size in replaced:
                if mode == "like" and like:
                    lines.append(Step((out,), like[0].replace(like[0].split(" = ")[1], "{0}"), (like[0].split(" = ")[1],)))
                elif mode == "input" and made:
                    inputs.append((f"x_{out}", made))
                    lines.append(Step((out,), f"{out} = {{0}}", (f"x_{out}",)))
                elif mode == "weight" and size is not None:
                    from .spec import Weight

                    weights.append(Weight(f"p_{out}", f"nn.Parameter(torch.randn({size}))" if size else "nn.Parameter(torch.randn(()))"))
                    lines.append(Step((out,), f"{out} = {{0}}", (f"self.p_{out}",)))
            trivial = len(step.inputs) == 1 and step.template.endswith("= {0}")
            if len(lines) == len(step.outs) and not trivial:
                steps = spec.steps[:i] + tuple(lines) + spec.steps[i + 1 :]
                yield replace(spec, steps=steps, inputs=spec.inputs + tuple(inputs), weights=spec.weights + tuple(weights)).pruned()
