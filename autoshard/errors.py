"""Every error that autoshard raises on purpose: what went wrong, where, and what to do next."""

from typing import Any


class AutoshardError(Exception):
    """Base of all errors. ``str(error)`` reads: what [at where] [hint].

    Args:
        what: one sentence, what is wrong, with the offending names and numbers.
        where: the graph node and the user's own source line, if there is one.
        hint: what the user can do next.
    """

    def __init__(self, what: str, *, where: str | None = None, hint: str | None = None):
        self.what, self.where, self.hint = what, where, hint
        lines = [what]
        if where:
            lines.append(f"  at {where}")
        if hint:
            lines.append(f"  hint: {hint}")
        super().__init__("\n".join(lines))


class MeshError(AutoshardError):
    """The mesh is malformed, or is not the size of the world."""


class PlacementError(AutoshardError):
    """A placement can't be parsed, or is not possible for the value it is asked for."""


class CaptureError(AutoshardError):
    """torch.export can't trace the model."""


class RuleError(AutoshardError):
    """A sharding rule is malformed or wrong."""


class PlanError(AutoshardError):
    """No plan: infeasible, out of memory, or it does not belong to this model."""


MORE_ROOM = "use more devices along tensor or pipeline, a smaller batch, or more micro-batches"
"""What may help where nothing fits."""


class InfeasibleError(PlanError):
    """No plan fits. Of a rank, in bytes, and None where it is not known:

    limit: what a rank has. least: what the fullest rank of the smallest plan that was found needs; of stage ``stage``.
    memory: that by category, if the plan was priced. proven: what any plan needs at least.
    suggestions: changes with which a plan fits, ``autoshard.planning.advice.Suggestion``, nearest first.
    always: whatever the number of micro-batches.
    """

    def __init__(self, what: str, *, hint: str | None = None, **facts: Any):
        super().__init__(what, hint=hint)
        self.limit: float | None = None
        self.least: float | None = None
        self.proven: float | None = None
        self.stage: int | None = None
        self.memory: dict[str, float] | None = None
        self.suggestions: tuple = ()
        self.always = False
        self.__dict__.update(facts)


class SlowerError(PlanError):
    """No plan that fits is as fast as one that is known. least: seconds that a step takes at least."""

    def __init__(self, what: str, *, least: float = 0.0):
        super().__init__(what, hint="the plan that is known is faster")
        self.least = least


class RunError(AutoshardError):
    """The sharded module was called with something that it was not compiled for."""


class IdError(RunError, IndexError):
    """An id, or a label, points past what it is looked up in."""
