"""Pins: placements that the user forces, of parameters, inputs, or what modules give."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from torch import fx

from autoshard.errors import PlacementError
from autoshard.mesh import SHARDED_AXES
from autoshard.placement import parse_placement
from autoshard.planning.chain import Irregular
from autoshard.planning.strategies import Annotated
from autoshard.program import Program, is_getitem, shape_of, tensors, where

Asked = Mapping[str, Mapping[str, str]]
"""As the user writes them: name -> axis -> placement."""


@dataclass(frozen=True)
class Pin:
    """name: as the user wrote it. axes: axis -> placement. where: what it names, for errors."""

    name: str
    axes: Mapping[str, str]
    where: str


def pins_of(program: Program, asked: Asked) -> dict[str, Pin]:
    """Pins by the name of the node that each is of. Raises PlacementError where a name means nothing, or two mean one value."""
    found: dict[str, Pin] = {}
    for name, axes in asked.items():
        node = pinned_node(program, name)
        if found.setdefault(node.name, Pin(name, axes, where(node))).name != name:
            other = found[node.name].name
            raise PlacementError(
                f"{name!r} and {other!r} are one value and are both pinned", where=where(node), hint="leave one of the pins out"
            )
    return found


def in_all_layers(pins: Mapping[str, Pin], alike: Mapping[fx.Node, int]) -> dict[str, Pin]:
    """The pins of all values that are like those that are pinned. ``alike``: a class for each.

    Raises Irregular where like values are pinned, but not alike.
    """
    pinned: dict[int, Pin] = {}
    found = dict(pins)
    for node, kind in alike.items():
        if node.name in pins and pinned.setdefault(kind, pins[node.name]).axes != pins[node.name].axes:
            raise Irregular(f"{pinned[kind].name} and {pins[node.name].name} are alike, and are not pinned alike")
    for node, kind in alike.items():
        if kind in pinned:
            found.setdefault(node.name, pinned[kind])
    return found


def apart(pins: Mapping[str, Pin], alike: Mapping[fx.Node, int]) -> Iterable[fx.Node]:
    """Pinned nodes with others like them that are not pinned so."""
    kinds: dict[int, list[fx.Node]] = defaultdict(list)
    for node, kind in alike.items():
        kinds[kind].append(node)
    for nodes in kinds.values():
        here = [pins[node.name].axes if node.name in pins else None for node in nodes]
        if any(axes != here[0] for axes in here):
            yield from (node for node, axes in zip(nodes, here) if axes is not None)


def keep_pinned(annotated: dict[fx.Node, Annotated], pins: Mapping[str, Pin], sizes: tuple[int, ...]) -> None:
    """Keep only the strategies that leave what is pinned in its placement. ``sizes``: of the axes. Raises PlacementError."""
    for node, item in annotated.items():
        pin = pins.get(node.name)
        for axis, text in pin.axes.items() if pin else ():
            if axis not in SHARDED_AXES:
                raise PlacementError(f"pin of {pin.name!r}: no axis {axis!r}", hint=f"values are placed along {' and '.join(SHARDED_AXES)}")
            wanted, index = parse_placement(text), SHARDED_AXES.index(axis)
            if sizes[index] == 1:
                continue  # whole and cut in one piece are the same
            kept = tuple(s for s in item.strategies if s.results[0][index] == wanted)
            if not kept:
                possible = sorted({str(s.results[0][index]) for s in item.strategies})
                raise PlacementError(
                    f"{pin.name!r} of shape {list(shape_of(node))} can't be {wanted} along {axis} (of size {sizes[index]}); "
                    f"possible: {', '.join(possible)}",
                    where=pin.where,
                    hint="pin one of the possible placements, or choose another mesh",
                )
            item.strategies = kept


def pinned_node(program: Program, name: str) -> fx.Node:
    """The node that a pin names: a parameter, buffer or input by any of its names, or the last op of a module."""
    for node in program.graph.nodes:
        if node.op == "placeholder":
            param = program.params.get(node.name)
            if (param and name in param.names) or (node.name in program.inputs and program.inputs[node.name].name == name):
                return node
    inside = [n for n in program.ops if n.meta.get("module") == name or n.meta.get("module", "").startswith(name + ".")]
    inside = [n for n in inside if not is_getitem(n) and len(tensors(n.meta["val"])) == 1]
    if inside:
        return inside[-1]
    known = [n for p in program.params.values() for n in p.names] + [i.name for i in program.inputs.values()]
    known += sorted({n.meta["module"] for n in program.ops if n.meta.get("module")})
    close = get_close_matches(name, known, 3)
    raise PlacementError(
        f"pin of {name!r}: no parameter, buffer, input or module that the model's forward uses has that name",
        hint=f"did you mean {', '.join(close)}?" if close else "names are those of model.named_parameters() and model.named_modules()",
    )
