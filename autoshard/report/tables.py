"""Text for a terminal or a pipe: titles, sentences and tables that wrap and are never cut, in plain ASCII."""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Title:
    text: str

    def lines(self, width: int, bold) -> list[str]:
        return ["", bold(self.text)]


@dataclass(frozen=True)
class Line:
    """A sentence; it wraps under itself."""

    text: str
    indent: int = 2

    def lines(self, width: int, bold) -> list[str]:
        lines = textwrap.wrap(self.text, width - self.indent, break_long_words=False, break_on_hyphens=False)
        return [" " * self.indent + line for line in lines]


@dataclass(frozen=True)
class Table:
    """Columns two blanks apart. A header that starts with ``>`` is right-aligned, and its cells never wrap.

    A row with a single cell spans the table. A cell may hold several lines. When the columns don't fit, the widest cells wrap,
    after a blank, dot or underscore where they have one; if they can't wrap enough, lines get longer than asked.
    """

    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    indent: int = 2
    gap = "  "
    narrowest = 14

    def lines(self, width: int, bold) -> list[str]:
        right = [header.startswith(">") for header in self.headers]
        names = [header.lstrip(">") for header in self.headers]
        widths = self._widths(width - self.indent, right, names)
        out = [bold(line) for line in self._row(names, widths, right)] if any(names) else []
        for row in self.rows:
            out += [(" " * self.indent + row[0]).rstrip()] if len(row) == 1 < len(names) else self._row(row, widths, right)
        return out

    def _widths(self, width: int, right: list[bool], names: list[str]) -> list[int]:
        cells = [[name, *(row[i] for row in self.rows if len(row) > 1)] for i, name in enumerate(names)]
        widths = [max(len(part) for cell in column for part in cell.split("\n")) for column in cells]
        words = [max(len(piece.rstrip()) for cell in column for piece in _pieces(cell)) for column in cells]
        least = [max(len(name), min(word, self.narrowest)) for name, word in zip(names, words)]
        while sum(widths) + len(self.gap) * (len(widths) - 1) > width:
            loose = [i for i in range(len(widths)) if not right[i] and widths[i] > least[i]]
            if not loose:
                break
            widths[max(loose, key=lambda i: widths[i])] -= 1
        return widths

    def _row(self, cells, widths: list[int], right: list[bool]) -> list[str]:
        columns = [[cell] if right[i] else wrap(cell, widths[i]) for i, cell in enumerate(cells)]
        out = []
        for nth in range(max(map(len, columns))):
            parts = [column[nth] if nth < len(column) else "" for column in columns]
            text = self.gap.join(part.rjust(w) if r else part.ljust(w) for part, w, r in zip(parts, widths, right))
            out.append((" " * self.indent + text).rstrip())
        return out


Part = Title | Line | Table


def _pieces(text: str) -> list[str]:
    return re.findall(r"[^\s._]*[\s._]?", text)


def wrap(cell: str, width: int) -> list[str]:
    """Break a cell into lines of at most ``width``; what follows the first line is indented as it is."""
    out = []
    for text in cell.split("\n"):
        blank = " " * (len(text) - len(text.lstrip()))
        line = blank
        for piece in _pieces(text.lstrip()):
            if len(line) + len(piece.rstrip()) > width and line.strip():
                out.append(line.rstrip())
                line = blank
            line += piece
            while len(line.rstrip()) > width > len(blank):
                out.append(line[:width])
                line = blank + line[width:]
        out.append(line.rstrip())
    return out


def render(parts: Iterable[Part], *, width: int = 100, colour: bool = False) -> str:
    """The parts as text. ``colour`` sets titles and headers in bold."""

    def bold(text: str) -> str:
        return f"\x1b[1m{text}\x1b[0m" if colour else text

    return "".join(f"{line}\n" for part in parts for line in part.lines(width, bold))


def terminal_width(stream) -> int:
    """Columns to fill: COLUMNS, the terminal's own, or 100 in a pipe; at least 72."""
    if stream.isatty() or os.environ.get("COLUMNS"):
        return max(72, shutil.get_terminal_size((100, 24)).columns)
    return 100


def show(parts: Iterable[Part], stream=None) -> None:
    """Print to a stream (stdout): as wide as it is, with colour only on a terminal and without NO_COLOR."""
    stream = stream or sys.stdout
    colour = stream.isatty() and not os.environ.get("NO_COLOR")
    stream.write(render(parts, width=terminal_width(stream), colour=colour))
