"""The mesh of devices: three named axes, and which rank stands where."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from math import gcd, prod
from typing import Any

from autoshard.errors import MeshError

AXES = ("data", "tensor", "pipeline")
SHARDED_AXES = ("data", "tensor")
"""The axes along which values are placed; the pipeline axis divides the graph instead."""
ORDER = ("pipeline", "data", "tensor")
"""How ranks are counted where a mesh does not say: the last axis first."""


@dataclass(frozen=True)
class Mesh:
    """``data x tensor x pipeline`` ranks; tensor is fastest in rank order, then data, then pipeline.

    order: another order of the axes, from the slowest to the fastest; axes of size 1 may be left out. None: ``ORDER``, or whatever a
        search finds better.

    >>> Mesh(4, 2, 2).coords(5)
    (2, 1, 0)
    >>> Mesh(4, 2, 2, ("data", "pipeline", "tensor")).coords(5)
    (1, 1, 0)
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    order: tuple[str, ...] | None = None

    def __post_init__(self):
        for axis, size in zip(AXES, self.shape):
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise MeshError(
                    f"mesh axis {axis!r} has size {size!r}; it must be a positive integer",
                    hint="write the mesh as (data, tensor, pipeline), for example (4, 2, 2)",
                )
        if self.order is not None:
            order = tuple(self.order)
            if len(set(order)) < len(order) or not {axis for axis in AXES if getattr(self, axis) > 1} <= set(order) <= set(AXES):
                raise MeshError(
                    f"the mesh {','.join(map(str, self.shape))} can't be in the order {','.join(map(str, order))}",
                    hint="name its axes, the slowest in rank order first, for example data,pipeline,tensor",
                )
            object.__setattr__(self, "order", (*(axis for axis in ORDER if axis not in order), *order))

    @classmethod
    def of(cls, mesh: Mesh | tuple | list | dict | str) -> Mesh:
        """Read a mesh from a tuple, a dict of axis names, or text such as ``"4,2,2"``; missing axes are 1.

        Behind a colon, text may tell the order of ranks: ``"4,2,2:data,pipeline,tensor"``.
        """
        order = None
        if isinstance(mesh, Mesh):
            return mesh
        if isinstance(mesh, str):
            sizes, colon, axes = mesh.partition(":")
            order = tuple(axes.split(",")) if colon else None
            try:
                mesh = tuple(int(part) for part in sizes.replace("x", ",").split(","))
            except ValueError:
                raise MeshError(
                    f"can't read the mesh {mesh!r}", hint="write data,tensor,pipeline, for example 4,2,2"
                ) from None
        if isinstance(mesh, dict):
            unknown = sorted(set(mesh) - set(AXES))
            if unknown:
                raise MeshError(f"unknown mesh axes {', '.join(map(repr, unknown))}", hint=f"the axes are {', '.join(AXES)}")
            return cls(**mesh)
        if not isinstance(mesh, (tuple, list)) or not 1 <= len(mesh) <= 3:
            raise MeshError(f"can't read the mesh {mesh!r}", hint="write (data, tensor, pipeline), for example (4, 2, 2)")
        return cls(*mesh, order=order)

    @classmethod
    def wanted(cls, mesh: Any) -> Mesh | int:
        """A mesh, or a number of devices, of which every mesh may be made: a number, also as text, or "auto" under torchrun.

        "auto" is the number of processes that torchrun started. Raises MeshError.
        """
        if mesh == "auto":
            world = os.environ.get("WORLD_SIZE", "")
            if not world.isdecimal():
                raise MeshError('mesh "auto" is the number of processes, and torchrun has started none', hint="write a number of devices")
            return int(world)
        if isinstance(mesh, str) and mesh.isdecimal():
            mesh = int(mesh)
        if isinstance(mesh, bool) or not isinstance(mesh, int):
            return cls.of(mesh)
        if mesh < 1:
            raise MeshError(f"no mesh has {mesh} devices", hint="write a positive number")
        return mesh

    @classmethod
    def all(cls, devices: int, node_size: int) -> list[Mesh]:
        """Every mesh of so many devices whose tensor axis stays within a node, shorter pipelines first."""
        found = []
        for pipeline in (p for p in range(1, devices + 1) if devices % p == 0):
            rest = devices // pipeline
            found += [cls(rest // tensor, tensor, pipeline) for tensor in range(1, min(rest, node_size) + 1) if rest % tensor == 0]
        return found

    @property
    def shape(self) -> tuple[int, int, int]:
        return (self.data, self.tensor, self.pipeline)

    @property
    def sizes(self) -> tuple[int, int]:
        """Sizes of the axes along which values are placed: (data, tensor)."""
        return (self.data, self.tensor)

    @property
    def size(self) -> int:
        return prod(self.shape)

    def answers(self, wanted: Mesh | int) -> bool:
        """Whether this is one of the meshes that were asked for: of so many devices, or of these sizes, in an order if there is one."""
        if isinstance(wanted, int):
            return self.size == wanted
        return self.shape == wanted.shape and wanted.order in (None, self.order)

    @cached_property
    def strides(self) -> tuple[int, int, int]:
        """By how much ranks differ that are neighbours along data, tensor and pipeline."""
        found, stride = {}, 1
        for axis in reversed(self.order or ORDER):
            found[axis] = stride
            stride *= getattr(self, axis)
        return tuple(found[axis] for axis in AXES)

    def coords(self, rank: int) -> tuple[int, int, int]:
        """(data, tensor, pipeline) coordinates of a rank."""
        (d, t, p), (data, tensor, pipeline) = self.strides, self.shape
        return (rank // d % data, rank // t % tensor, rank // p % pipeline)

    def rank(self, data: int, tensor: int, pipeline: int) -> int:
        d, t, p = self.strides
        return data * d + tensor * t + pipeline * p

    def group(self, axis: str, rank: int) -> tuple[int, ...]:
        """The ranks that differ from ``rank`` only along ``axis``, in order."""
        at = dict(zip(AXES, self.coords(rank)))
        return tuple(self.rank(**{**at, axis: i}) for i in range(getattr(self, axis)))

    def within(self, node_size: int) -> dict[str, int]:
        """How many of a node's ranks differ along each axis alone, fastest axis first; empty if one node holds all, or nodes differ."""
        found: dict[str, int] = {}
        left = node_size if self.size > node_size else 1
        for axis in reversed(self.order or ORDER):
            here = gcd(left, getattr(self, axis))
            if here < min(left, getattr(self, axis)):
                return {}
            if here > 1:
                found[axis] = here
            left //= here
        return found

    def __str__(self) -> str:
        """As ``of`` reads it."""
        return ",".join(map(str, self.shape)) + (f":{','.join(self.order)}" if self.order else "")
