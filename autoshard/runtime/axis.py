"""A rank's view of one axis of the mesh."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class Axis:
    """One mesh axis as a rank sees it: how many ranks lie along it, which one this is, and how to reach the others.

    ``group`` holds the ranks along the axis in the order of their ``index``. An axis of size 1 has no group, and every conversion
    and collective along it is the identity.
    """

    name: str
    size: int = 1
    index: int = 0
    group: dist.ProcessGroup | None = None
