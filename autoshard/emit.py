"""Write a rank's program as a Python module to be read: one line per op under a comment with its module's path."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from itertools import groupby
from keyword import iskeyword

import torch
from torch import fx

from autoshard import ops
from autoshard.draws import declarations
from autoshard.mesh import SHARDED_AXES, Mesh
from autoshard.passes.checkpoint_regions import saves
from autoshard.passes.cut_stages import Stage
from autoshard.passes.id_checks import IdChecks
from autoshard.passes.microbatch import Extra
from autoshard.placement import R, format_layout
from autoshard.printer import ON_NUMBERS, conversion_comment, expression, literal
from autoshard.program import Param, Program, ancestors, op_kind, result_of, stored_layout
from autoshard.runtime.stage import StageModule

aten = torch.ops.aten
WIDTH = 140
HEAVY = {
    *("linear", "addmm", "mm", "bmm", "matmul", "convolution", "conv2d"),
    *("scaled_dot_product_attention", "embedding", "cross_entropy_loss"),
}
"""Ops whose sharded factor is worth a word in the comment."""

OWN_NAMES = ("alike", "data", "device", "keys", "loss_scale", "recomputes", "shards", "streams", "tensor", "world")
"""What a StageModule calls its own attributes, beside those of its class."""


@dataclass
class RankProgram:
    """What one rank runs: its stages with local shapes, the prologue (or None), and facts about the whole.

    wholes: the stages' programs with global (micro-batch) shapes. last: the last stage's, likewise.
    holders: parameter placeholder -> the places along the pipeline that hold it. unused: parameters that no stage reads, kept on the first.
    offload: names of parameters that the optimizer updates on the host.
    random_keys: how many keys all stages take in a step.
    """

    title: str
    mesh: Mesh
    schedule: str
    rank: int
    stages: tuple[Stage, ...]
    wholes: tuple[Program, ...]
    last: Program
    prologue: Program | None
    extras: tuple[Extra, ...]
    checks: IdChecks
    offload: frozenset[str]
    holders: dict[str, tuple[int, ...]]
    unused: dict[str, Param]
    random_keys: int = 0

    @property
    def params(self) -> dict[str, Param]:
        """All that the rank holds, by placeholder."""
        found = {}
        for program in self.wholes:
            found.update({name: param for name, param in program.params.items() if name not in found})
        return {**found, **self.unused}

    @property
    def placeholders(self) -> dict[str, fx.Node]:
        """Of all its stages, with global shapes, by name."""
        return {n.name: n for program in reversed(self.wholes) for n in program.graph.nodes if n.op == "placeholder"}


def emit(rank: RankProgram) -> str:
    """The source of the rank's module."""
    mesh, several, m = rank.mesh, len(rank.stages) > 1, rank.last.microbatches
    data, tensor, pipeline = mesh.coords(rank.rank)
    batches = f"; {m} micro-batches" if m > 1 else ""
    place = f"rank {rank.rank} = data {data}, tensor {tensor}, pipeline stage {pipeline} of {mesh.pipeline}"
    if several:
        held = " and ".join(str(stage.index) for stage in rank.stages)
        place = f"rank {rank.rank} = data {data}, tensor {tensor}, pipeline stages {held} of {mesh.pipeline * len(rank.stages)}"
    lines = [
        f'"""{rank.title} on mesh {mesh}: {place}{batches}."""',
        "",
        "import torch",
        "import torch.nn.functional as F",
        "",
        "from autoshard import runtime as rt",
        "",
        "",
        "class Stage(rt.StageModule):",
        f"    mesh, rank, stage, microbatches = {mesh.shape}, {rank.rank}, {pipeline}, {m}",
    ]
    if mesh.order:
        lines.append(f"    order = {mesh.order}")
    if mesh.pipeline > 1 and rank.schedule != StageModule.schedule:
        lines.append(f'    schedule = "{rank.schedule}"')
    names = _attribute_names(rank.params)
    lines += _declare(rank, names)
    if rank.prologue is not None:
        lines += ["", *_prologue(rank, names)]
    regions: list[str] = []
    for stage in rank.stages:
        lines += ["", *_forward(rank, stage, f"forward_{stage.index}" if several else "forward", names, regions)]
    if rank.checks.checks:
        lines += ["", *_checks(rank.checks)]
    text = "\n".join(lines) + "\n"
    if "F." not in text:
        text = text.replace("import torch.nn.functional as F\n", "")
    return text


def _attribute_names(params: dict[str, Param]) -> dict[str, str]:
    """Placeholder -> attribute: the parameter's original name with underscores."""
    names: dict[str, str] = {}
    for placeholder, param in params.items():
        name = param.name.replace(".", "_")
        ours = re.match(r"(layer|forward)_\d", name)
        name = f"p_{name}" if ours or iskeyword(name) or not name.isidentifier() else name
        while name in names.values() or name in OWN_NAMES or hasattr(StageModule, name):
            name += "_"
        names[placeholder] = name
    return names


def _declare(rank: RankProgram, names: dict[str, str]) -> list[str]:
    nodes = rank.placeholders
    lines = ["    params = {"]
    for placeholder, param in rank.params.items():
        node = nodes.get(placeholder)
        layout = stored_layout(node) if node is not None else (R, R)
        sync = node.meta.get("sync", ()) if node is not None else ()
        parts = [literal(param.names), literal(param.shape), f'"{format_layout(layout)}"', literal(param.dtype), str(param.requires_grad)]
        if sync:
            parts.append(f"sync={literal(sync)}")
        parts.append(f"stages={literal(rank.holders.get(placeholder, (0,)))}")
        chunk = next((i for i, program in enumerate(rank.wholes) if placeholder in program.params), 0)
        if chunk:
            parts.append(f"chunk={chunk}")
        if param.kind != "parameter":
            parts.append(f'kind="{param.kind}"')
        if not param.persistent:
            parts.append("persistent=False")
        if node is not None and node.meta.get("zero"):
            parts.append(f"zero={node.meta['zero']}")
        if param.master is not None:
            parts.append(f"master={literal(param.master)}")
        if param.name in rank.offload:
            parts.append("offload=True")
        lines.append(f'        "{names[placeholder]}": rt.Param({", ".join(parts)}),')
    lines.append("    }")
    lines += _declare_inputs(rank, nodes)
    lines += _declare_values(rank, nodes)
    if rank.random_keys:
        lines.append(f"    random_keys = {rank.random_keys}")
        programs = [stage.program for stage in rank.stages] + [rank.prologue] * (rank.prologue is not None)
        draws = declarations(node for program in programs for node in program.ops)
        lines += ["    draws = {", *(f"        {draw}," for draw in draws), "    }"] if draws else []
    return lines


def _declare_inputs(rank: RankProgram, nodes: dict[str, fx.Node]) -> list[str]:
    lines, inputs = ["    inputs = {"], {}
    for program in reversed(rank.wholes):
        inputs.update(program.inputs)
    for placeholder, spec in inputs.items():
        lines.append(f'        "{placeholder}": {_input(placeholder, spec, format_layout(nodes[placeholder].meta["layouts"][0]))},')
    if rank.prologue is not None:
        for placeholder, spec in rank.prologue.inputs.items():
            lines.append(f'        "whole_{placeholder}": {_input("", spec, "[R, R]")},')
    return [*lines, "    }"]


def _input(placeholder: str, spec, layout: str) -> str:
    parts = [literal(tuple(spec.shape)), literal(spec.dtype), f'"{layout}"']
    if spec.batch_dim != 0:
        parts.append(f"batch_dim={spec.batch_dim}")
    if spec.name != placeholder:
        parts.append(f'name="{spec.name}"')
    return f"rt.Input({', '.join(parts)})"


def _declare_values(rank: RankProgram, nodes: dict[str, fx.Node]) -> list[str]:
    """Values that cross the cuts, extras of the prologue, and the model's outputs."""
    lines = []
    if len(rank.stages) > 1:
        lines.append("    parts = (")
        for stage in rank.stages:
            given = "".join(f", {label}={values}" for label, values in _crossing(stage))
            lines.append(f'        rt.Part({stage.index}, "forward_{stage.index}"{given}),')
        lines.append("    )")
    else:
        lines += [f"    {label} = {values}" for label, values in _crossing(rank.stages[0])]
    used = [e for e in rank.extras if e.name in nodes]
    if used:
        lines.append("    extras = {")
        lines += [f'        "{e.name}": rt.Extra("{e.src} -> {e.dst}", {literal(tuple(nodes[e.name].meta["val"].shape))}),' for e in used]
        lines.append("    }")
    lines.append("    outputs = (")
    leaves = [(i, leaf) for i, leaf in enumerate(rank.last.results) if isinstance(leaf, fx.Node)]
    for i, leaf in leaves:
        producer, index = result_of(leaf)
        meta = leaf.meta
        layout, time = format_layout(producer.meta["layouts"][index]), meta.get("time", R)
        parts = [str(i), literal(tuple(meta["val"].shape)), f'"{layout}"', f'"{time}"', literal(meta["val"].dtype)]
        if not meta.get("grad"):
            parts.append("requires_grad=False")
        lines.append(f"        rt.Output({', '.join(parts)}),")
    lines.append("    )")
    if rank.last.updates:
        lines.append(f"    updates = {literal(rank.last.updates)}")
    if rank.last.loss is not None:
        lines.append(f"    loss = {[i for i, _ in leaves].index(rank.last.loss)}")
    return lines


def _crossing(stage: Stage) -> list[tuple[str, str]]:
    """What a stage receives and sends, if anything."""
    where, found = {n.name: n for n in stage.program.graph.nodes}, []
    for label, values in (("receives", stage.receives), ("sends", stage.sends)):
        if values:
            items = (where[v].meta for v in values)
            texts = [f"rt.Value({literal(tuple(m['val'].shape))}, {literal(m['val'].dtype)}, {m['trained']})" for m in items]
            found.append((label, f"({', '.join(texts)},)"))
    return found


def _prologue(rank: RankProgram, names: dict[str, str]) -> list[str]:
    program = rank.prologue
    nodes = rank.placeholders
    wanted = [(i, e) for i, e in enumerate(rank.extras) if e.name in nodes]
    if not wanted:
        return []
    leaves = {e.name: program.leaves[i] for i, e in wanted}
    needed = ancestors(leaves.values())
    read = [n.name for n in program.graph.nodes if n.op == "placeholder" and n.name in program.inputs and n in needed]
    arguments = ["self", *(f"whole_{name}" for name in read)]
    lines = [
        f"    def prologue({', '.join(arguments)}):",
        "        # what all micro-batches need to know of each other, before the first one runs",
    ]
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name in names:
            node.meta["expr"] = f"self.{names[node.name]}"
        elif node.name in read:
            node.meta["expr"] = f"whole_{node.name}"
    lines += _body([_item(node, comments=False) for node in program.ops if node in needed], set(), comments=False)
    items = ", ".join(f'"{name}": {literal(leaf)}' for name, leaf in leaves.items())
    return [*lines, f"        return {{{items}}}"]


def _checks(found: IdChecks) -> list[str]:
    """A method that looks at all ids of the batch, before the first forward."""
    lines = ["    def check(self, batch):", "        # every rank has the whole batch: an id out of range is the same error on all of them"]
    lines += _body([_item(node, comments=False) for node in found.ops], set(), comments=False)
    for check in found.checks:
        what = f"{check.op} in {check.module}" if check.module else check.op
        ignored = "" if check.ignored is None else f", ignored={check.ignored}"
        lines.append(f'        rt.check_ids({literal(check.ids)}, {check.low}, {check.high}, "{what}"{ignored})')
    return lines


def _forward(rank: RankProgram, stage: Stage, name: str, names: dict[str, str], taken: list[str]) -> list[str]:
    """The method of one stage, and those of its regions. ``taken``: names of methods of regions so far."""
    program = stage.program
    inputs = [n for n in program.inputs]
    extras = [e.name for e in rank.extras if any(n.op == "placeholder" and n.name == e.name for n in program.graph.nodes)]
    lines = [f"    def {name}({', '.join(['self', *stage.receives, *inputs, *extras])}):"]
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name in program.params:
            node.meta["expr"] = f"self.{names[node.name]}"
    results = [x for x in program.leaves if isinstance(x, fx.Node)]
    regions, items = [], []
    for number, run in groupby(program.ops, lambda node: node.meta.get("region")):
        run = list(run)
        if number is None or not any(node.meta.get("grad") for node in run):
            items += _items(run, [""] * len(run))
        else:
            method, call = _region(program, run, taken)
            regions += ["", *method]
            items.append(call)
    lines += _body(items, set(program.output.all_input_nodes), comments=True)
    inner = ", ".join(literal(x) for x in results)
    return [*lines, f"        return ({inner},)", *regions]


@dataclass
class _Item:
    """One statement: its text, the module it belongs to, and the values that it makes and reads."""

    text: str
    module: str
    makes: list[fx.Node]
    reads: set[fx.Node]
    under: str = ""  # the ``with`` that it stands under


def _item(node: fx.Node, comments: bool) -> _Item:
    return _Item(_line(node, comments), node.meta.get("module", ""), [node], set(node.all_input_nodes))


def _items(run: list[fx.Node], under: list[str]) -> list[_Item]:
    """Statements of some ops that follow each other: one for each op, or bucket of gathers. ``under``: see ``_Item``."""
    items = []
    for _, part in groupby(zip(run, under), lambda pair: pair[0].meta.get("bucket", pair[0])):
        nodes, whose = zip(*part)
        item = _item(nodes[0], comments=True) if len(nodes) == 1 else _gathers(nodes)
        item.under = whose[0]
        items.append(item)
    return items


def _gathers(nodes: tuple[fx.Node, ...]) -> _Item:
    """Weights of ZeRO level 3 that are gathered together."""
    lines = [f"({', '.join(node.name for node in nodes)}) = self.gather_all("]
    if len(lines[0]) + 8 > WIDTH:
        lines = ["(", *(f"    {node.name}," for node in nodes), ") = self.gather_all("]
    lines += [f'    ({literal(node.args[0])}, "{node.args[1]}", {node.args[3]}),' for node in nodes]
    lines.append(f")  # one {conversion_comment(nodes[0].args[1], ', and again in backward')}")
    paths = [node.meta.get("module", "").split(".") for node in nodes]
    module = ".".join(os.path.commonprefix(paths))
    return _Item("\n".join(f"        {line}" for line in lines), module, list(nodes), {x for n in nodes for x in n.all_input_nodes})


def _region(program: Program, run: list[fx.Node], taken: list[str]) -> tuple[list[str], _Item]:
    """A method of its own for some ops that follow each other, and the call that computes it again in backward."""
    inside = set(run)
    reads = dict.fromkeys(x for node in run for x in node.all_input_nodes if x not in inside and x.name not in program.params)
    makes = [node for node in run if any(user not in inside for user in node.users)]
    paths = [node.meta["module"].split(".") for node in run if node.meta.get("module")]
    module = ".".join(os.path.commonprefix(paths))
    name = f"layer_{run[0].meta['region']}"
    while name in taken:  # a stage holds the beginning of a region, another one of the rank its end
        name += "_"
    taken.append(name)
    results = ", ".join(node.name for node in makes)
    arguments = [x.name for x in reads]
    items = _items(run, _under(run))
    method = [
        f"    def {name}({', '.join(['self', *arguments])}):",
        *_body(items, set(makes), comments=True),
        f"        return {results}",
    ]
    call = f"        {results} = rt.recompute({', '.join([f'self.{name}', *arguments])})  # computed again in backward"
    return method, _Item(call, module, makes, set(reads))


def _under(run: list[fx.Node]) -> list[str]:
    """Under which ``with`` each op of a region stands, if any.

    What is computed once needs none if backward stops before it: when it has what it reads.
    """
    last = max((i for i, node in enumerate(run) if saves(node)), default=-1)
    words = {"kept": "rt.kept()", "once": "rt.once()"}
    return [words.get(node.meta["again"], "") if i < last or node.meta["again"] == "kept" else "" for i, node in enumerate(run)]


def _body(items: list[_Item], keep: set[fx.Node], comments: bool) -> list[str]:
    """Statements under the paths of their modules. What nothing reads any more is deleted where a module ends."""
    last_use = {x: i for i, item in enumerate(items) for x in item.reads}
    lines: list[str] = []
    module, alive, under = None, [], ""
    for i, item in enumerate(items):
        here = item.module
        if comments and here != module:
            lines.append(f"        # {here or 'the model itself'}")
            module, under = here, ""
        if item.under and item.under != under:
            lines.append(f"        with {item.under}:")
        under = item.under
        lines += [f"    {line}" for line in item.text.splitlines()] if under else [item.text]
        alive += item.makes
        if comments and i + 1 < len(items) and items[i + 1].module != here:
            dead = [n for n in alive if n not in keep and last_use.get(n, i + 1) <= i and not isinstance(n.meta["val"], (tuple, list))]
            if dead:
                lines.append(f"        del {', '.join(n.name for n in dead)}")
                gone = set(dead)
                alive = [n for n in alive if n not in gone]
    return lines


def _line(node: fx.Node, comments: bool) -> str:
    text = f"        {node.name} = {expression(node)}"
    if "draw" in node.meta and node.target not in ON_NUMBERS:
        text = f"        with self.drawing({literal(node.meta['draw_name'])}):\n    {text}"
    elif "cut_along" in node.meta and node.target is not aten.dropout.default:
        text = f"        with self.random({literal(node.meta['cut_along'])}):\n    {text}"
    if not comments:
        return text
    if node.target is ops.convert:
        again = ", and again in backward" if node.args[0].meta.get("zero") == 3 and node.args[2] == "data" else ""
        note = f"{conversion_comment(node.args[1], again)}; for {node.meta['wanted_by']}"
    else:
        layouts = node.meta.get("layouts")
        if not layouts or all(p == R for layout in layouts for p in layout):
            return text
        note = format_layout(layouts[0])
        strategy = node.meta.get("strategy")
        if strategy is not None and op_kind(node) in HEAVY:
            cuts = [f"{c.name[6:]} over {axis}" for axis, c in zip(SHARDED_AXES, strategy.choices) if c.name.startswith("shard")]
            if cuts:
                note += f" {', '.join(cuts)}"
    return f"{text}  # {note}"
