"""Every error that autoshard raises on purpose: what went wrong, where, and what to do next."""


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


class InfeasibleError(PlanError):
    """No plan fits: memory, or placements that exclude each other. always: whatever the number of micro-batches."""

    always = False


class SlowerError(PlanError):
    """No plan that fits is as fast as one that is known. least: seconds that a step takes at least."""

    least = 0.0


class RunError(AutoshardError):
    """The sharded module was called with something that it was not compiled for."""


class IdError(RunError, IndexError):
    """An id, or a label, points past what it is looked up in."""
