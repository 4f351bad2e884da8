"""Cut a program into one program per pipeline stage.

before (two stages)::

    h = aten.linear(x, w)                 # stage 0
    mask = aten.ne(ids, 0)                # no gradient, from inputs alone
    y = f(h, mask)                        # stage 1

after, stage 1::

    h = placeholder                       # received from stage 0
    mask = aten.ne(ids, 0)                # computed again rather than sent
    y = f(h, mask)

A value that is needed several stages on is relayed by the stages between. Values that depend on inputs, buffers and constants alone and
carry no gradient are computed in every stage that needs them.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

from torch import fx

from autoshard.program import Program, copied_node, draws, is_getitem


@dataclass
class Stage:
    """One stage: its program, and the values (placeholder and output names) that it receives and sends, in order.

    ``program.output`` holds the sent values in all stages but the last, there the model's own leaves.
    """

    index: int
    program: Program
    receives: tuple[str, ...]
    sends: tuple[str, ...]


def pure_nodes(program: Program) -> set[fx.Node]:
    """Values without a gradient that depend on inputs, buffers and constants alone, and are not random: any stage can compute them."""
    pure: set[fx.Node] = set()
    for node in program.graph.nodes:
        if node.meta.get("grad") or node.op == "output":
            continue
        if node.op == "placeholder":
            param = program.params.get(node.name)
            if param is None or not param.requires_grad and param.kind != "parameter":
                pure.add(node)
        elif all(x in pure for x in node.all_input_nodes) and not draws(node):
            pure.add(node)
    return pure


def crossing(program: Program, stage_of: dict[fx.Node, int], stages: int) -> list[list[fx.Node]]:
    """For each of the ``stages - 1`` cuts, the values sent over it, in the order in which they are produced."""
    pure = pure_nodes(program)
    last_use: dict[fx.Node, int] = {}
    for node in program.graph.nodes:
        at = stages - 1 if node.op == "output" else stage_of.get(node)
        if node.op == "placeholder" or at is None:
            continue
        for x in node.all_input_nodes:
            last_use[x] = max(last_use.get(x, 0), at)
    cuts: list[list[fx.Node]] = [[] for _ in range(stages - 1)]
    for node in program.graph.nodes:
        if node.op == "call_function" and node not in pure and node in last_use:
            for s in range(stage_of[node], last_use[node]):
                cuts[s].append(node)
    return cuts


def cut_stages(program: Program, stages: int) -> list[Stage]:
    """One program per stage, of so many, by ``meta["stage"]``."""
    if stages == 1:
        return [Stage(0, program, (), ())]
    stage_of = {n: n.meta["stage"] for n in program.ops}
    for node in program.ops:  # a getitem lives where its op lives
        if is_getitem(node):
            stage_of[node] = stage_of[node.args[0]]
    cuts = crossing(program, stage_of, stages)
    pure, trained = pure_nodes(program), _trained(program)
    return [_stage(program, s, stages, stage_of, cuts, pure, trained) for s in range(stages)]


def _trained(program: Program) -> set[fx.Node]:
    """Values that the loss sends a gradient to. Others may require one (an output beside the loss), but none ever comes: their
    parameters must be left without a gradient, not be given zeros."""
    found: set[fx.Node] = set()
    todo = [] if program.loss is None else [program.leaves[program.loss]]
    while todo:
        node = todo.pop()
        if node not in found and node.meta.get("grad"):
            found.add(node)
            todo.extend(node.all_input_nodes)
    return found


def _stage(program: Program, index: int, stages: int, stage_of, cuts, pure, trained) -> Stage:
    graph = fx.Graph()
    received = cuts[index - 1] if index else []
    sent = cuts[index] if index < stages - 1 else []
    results = sent if index < stages - 1 else [x for x in program.leaves if isinstance(x, fx.Node)]

    needed: set[fx.Node] = set()
    todo = list(results)
    while todo:
        node = todo.pop()
        if node in needed:
            continue
        needed.add(node)
        if node not in received:
            todo.extend(node.all_input_nodes)

    known = {*program.params, *program.inputs}
    if any(n.op == "placeholder" and n.name not in known for n in needed):
        # the stage wants values of the prologue, so it runs the prologue and holds what that reads
        needed.update(n for n in program.graph.nodes if n.meta.get("prologue"))

    built: dict[fx.Node, fx.Node] = {}
    for node in received:
        built[node] = graph.placeholder(node.name)
        built[node].meta = {**node.meta, "trained": node in trained}
    for node in program.graph.nodes:
        if node not in needed or node in built or node.op == "output":
            continue
        assert node.op == "placeholder" or node in pure or stage_of[node] == index, f"{node} of stage {stage_of[node]} is needed in {index}"
        copied_node(graph, node, built).meta["trained"] = node in trained
    if index < stages - 1:
        output = graph.output([built[n] for n in sent])
    else:
        output = graph.output([built[x] if isinstance(x, fx.Node) else x for x in program.leaves])
    output.meta = copy.copy(program.output.meta)

    names = {node.name for node in built.values() if node.op == "placeholder"}
    params = {n: p for n, p in program.params.items() if n in names}
    inputs = {n: i for n, i in program.inputs.items() if n in names}
    loss, updates = (program.loss, program.updates) if index == stages - 1 else (None, ())
    part = Program(graph, params, inputs, loss, program.mesh, program.microbatches, updates)
    return Stage(index, part, tuple(built[n].name for n in received), tuple(built[n].name for n in sent))
