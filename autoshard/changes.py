"""Changes to what was asked for with which a plan may fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import log2
from typing import Any

from autoshard.mesh import AXES, Mesh
from autoshard.planning.choices import batch_of, larger_microbatches
from autoshard.searching import Wanted

FACTORS = (2, 4, 8)
"""How many times as many devices are looked at."""

MESHES = 3
"""Of as many devices, enough of those that help."""

LOSS_ALONE = "forward returns its loss alone"


@dataclass(frozen=True)
class Change:
    """text: in words. options: of ``autoshard.plan``, those that are others than were asked for. Of changes of one kind no more than
    ``enough`` are wanted. loss_alone: also, forward returns its loss and nothing else."""

    text: str
    options: dict[str, Any]
    kind: str
    enough: int = 1
    loss_alone: bool = False


def changes(wanted: Wanted, mesh: Mesh, other_meshes: bool) -> Iterator[Change]:
    """Nearest first: what costs nothing, other meshes of as many devices, what costs something, more devices.

    other_meshes: whether ``mesh`` was asked for, and not only its number of devices.
    """
    saving = wanted.saving
    if wanted.pins:
        yield Change("no pins", {"pin": {}}, "pin")
    if wanted.microbatches is not None:
        for m in larger_microbatches(wanted.program, mesh, wanted.microbatches):
            yield Change(f"microbatches={m}", {"microbatches": m}, "microbatches")
    if saving.zero is not None and mesh.data > 1:
        yield Change("zero=auto", {"zero": "auto"}, "zero")
    if saving.recompute is False:
        yield Change("recompute=auto", {"recompute": "auto"}, "recompute")
        if saving.zero is not None and mesh.data > 1:
            yield Change("zero=auto and recompute=auto", {"zero": "auto", "recompute": "auto"}, "both")
    if wanted.schedule not in ("auto", "1F1B") and mesh.pipeline > 1:
        yield Change("schedule=1F1B", {"schedule": "1F1B"}, "schedule")
    if other_meshes:
        same = [other for other in Mesh.all(mesh.size, wanted.cluster.node_size) if _possible(wanted, other)]
        cut_more = [other for other in same if other.tensor > mesh.tensor or other.pipeline > mesh.pipeline]
        for other in sorted(cut_more, key=lambda other: distance(mesh, other)):
            yield Change(f"mesh {other}", {"mesh": other}, "mesh", MESHES)
    offload = saving.offload is False and wanted.cluster.device.kind != "cpu"  # whose memory is the host's
    if offload:
        yield Change("offload=auto", {"offload": "auto"}, "offload")
    if wanted.captured.precision == "fp32" and any(p.dtype.itemsize == 4 and p.requires_grad for p in wanted.captured.params):
        yield Change("precision=bf16", {"precision": "bf16"}, "precision")
        if offload:
            yield Change("offload=auto and precision=bf16", {"offload": "auto", "precision": "bf16"}, "offload and precision")
    for factor in FACTORS:
        for axis in AXES:
            other = replace(mesh, **{axis: getattr(mesh, axis) * factor})
            if _possible(wanted, other):
                yield Change(f"mesh {other}", {"mesh": other}, axis)


def _possible(wanted: Wanted, mesh: Mesh) -> bool:
    batch = batch_of(wanted.program)
    return (batch is None or batch % mesh.data == 0) and mesh.tensor <= wanted.cluster.node_size


def distance(mesh: Mesh, other: Mesh) -> tuple[float, int]:
    """How far apart two meshes are; of two as far the one with fewer stages is nearer."""
    return sum(abs(log2(a / b)) for a, b in zip(mesh.shape, other.shape)), other.pipeline
