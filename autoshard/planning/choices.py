"""Which numbers of micro-batches are worth planning for."""

from __future__ import annotations

from autoshard.errors import PlanError
from autoshard.mesh import Mesh
from autoshard.program import Program


def batch_of(program: Program) -> int | None:
    """Samples in the (whole) batch of a program; None if no input has a batch dim."""
    return next((i.shape[i.batch_dim] for i in program.inputs.values() if i.batch_dim is not None), None)


def microbatch_candidates(program: Program, mesh: Mesh, asked: int | None) -> list[int]:
    """The user's number, or 1 without a pipeline, or divisors of the batch near 2, 4 and 8 times the stages, most promising first.

    With a pipeline every micro-batch should still give each data rank a sample; where no divisor does, fewer samples will do. Last comes
    1, for models whose batch can't be cut.
    """
    if asked is not None:
        if isinstance(asked, bool) or not isinstance(asked, int) or asked < 1:
            raise PlanError(f"microbatches={asked!r} is not a positive number")
        return [asked]
    batch = batch_of(program)
    if mesh.pipeline == 1 or batch is None:
        return [1]
    divisors = [m for m in range(1, batch + 1) if batch % m == 0]
    roomy = [m for m in divisors if batch // m >= mesh.data and (batch // m) % mesh.data == 0] or divisors
    found = []
    for want in (4 * mesh.pipeline, 2 * mesh.pipeline, 8 * mesh.pipeline):
        nearest = min(roomy, key=lambda m: (abs(m - want), -m))
        if nearest not in found:
            found.append(nearest)
    return [m for m in found if m > 1] + [1]


def larger_microbatches(program: Program, mesh: Mesh, tried: int) -> list[int]:
    """Numbers above ``tried``, each about twice the one before, for batches that need to be cut smaller to fit.

    A micro-batch should give each data rank a sample, if one larger than that does not already fit.
    """
    batch = batch_of(program)
    if batch is None:
        return []
    roomy = [m for m in range(tried + 1, batch + 1) if batch % m == 0 and batch // m % mesh.data == 0]
    found: list[int] = []
    for m in roomy:
        if m >= 2 * (found[-1] if found else tried) or m == roomy[-1]:
            found.append(m)
    return found
