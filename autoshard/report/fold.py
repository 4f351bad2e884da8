"""Identical layers shown once: ``transformer.h.0`` to ``transformer.h.11`` become ``transformer.h.0-11``."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Folded:
    """Rows that read the same but for the number of their layer.

    path: components of the module path, numbers merged: ("transformer", "h", "0-7,12", "ln_1").
    key: what is shown of the rows, equal for all of them.
    rows: the rows themselves, in program order.
    """

    path: tuple[str, ...]
    key: Hashable
    rows: tuple

    @property
    def block(self) -> str:
        """The path up to its first layer number ("transformer.h.0-11"); "" outside layers."""
        return ".".join(self.path[: _depth(self.path)])

    @property
    def inside(self) -> str:
        """The path below ``block`` ("ln_1")."""
        return ".".join(self.path[_depth(self.path) :])


def _depth(path: tuple[str, ...]) -> int:
    """How many components lead to the outermost numbered module; 0 if none is numbered."""
    return next((i + 1 for i, part in enumerate(path) if part[:1].isdigit()), 0)


def layer_of(module: str) -> str:
    """The outermost numbered module that holds this one: "transformer.h.3" of "transformer.h.3.attn.c_attn"; "" if there is none."""
    path = tuple(module.split("."))
    return ".".join(path[: _depth(path)])


def fold(rows: Iterable[T], module: Callable[[T], str], key: Callable[[T], Hashable]) -> list[Folded]:
    """Merge layers, neighbours or not, whose rows have the same keys in the same order; innermost layers first.

    A layer differs if any row does, so folding never hides a decision. Order is that of the first layer's rows.
    """
    folded = [Folded(tuple(module(row).split(".")), key(row), (row,)) for row in rows]
    for depth in reversed(range(max((len(f.path) for f in folded), default=0))):
        folded = _fold_at(folded, depth)
    return folded


def _fold_at(rows: list[Folded], depth: int) -> list[Folded]:
    families: dict[tuple[str, ...], dict[int, list[int]]] = {}  # path above the number -> number -> positions of its rows
    for position, row in enumerate(rows):
        if len(row.path) > depth and row.path[depth].isdigit():
            families.setdefault(row.path[:depth], {}).setdefault(int(row.path[depth]), []).append(position)
    out: list[Folded | None] = list(rows)
    for prefix, blocks in families.items():
        alike: dict[tuple, list[int]] = {}  # numbers, by what their rows show
        for number in sorted(blocks):
            alike.setdefault(tuple((rows[i].path[depth + 1 :], rows[i].key) for i in blocks[number]), []).append(number)
        for run in alike.values():
            if len(run) == 1:
                continue
            for nth, position in enumerate(blocks[run[0]]):
                first = rows[position]
                members = tuple(row for number in run for row in rows[blocks[number][nth]].rows)
                out[position] = replace(first, path=(*prefix, ranges(run), *first.path[depth + 1 :]), rows=members)
            for number in run[1:]:
                for position in blocks[number]:
                    out[position] = None
    return [row for row in out if row is not None]


def ranges(numbers: list[int]) -> str:
    """
    >>> ranges([0, 1, 2, 5, 7, 8])
    '0-2,5,7-8'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
