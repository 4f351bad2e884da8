"""What other frameworks would run: restrictions of what ops may do, under which the same solver finds the best plan in the same prices.

    data parallel, ZeRO, FSDP     every op divides the batch over data, wherever it can, and nothing else
    Megatron                      that; and over tensor a matmul that reads a weight divides a dim of the weight, what passes from layer to
                                  layer is whole, and nothing divides the sequence
    Megatron, sequence parallel   that; but what passes from layer to layer is cut along the sequence, and so may be all between the matmuls

Which weights are cut by columns and which by rows is not said: with a whole stream between layers the solver pairs them itself
(Shoeybi et al., 2019; with the sequence, Korthikanti et al., 2022).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import fx

from autoshard.cluster import Cluster
from autoshard.errors import PlanError
from autoshard.mesh import Mesh
from autoshard.placement import Placement, R, S
from autoshard.planning.blocked import Key
from autoshard.planning.fold import Folding
from autoshard.planning.planner import Narrow
from autoshard.planning.saving import Saving
from autoshard.planning.strategies import Annotated
from autoshard.program import Program, operands, result_of, tensors
from autoshard.rules import matmul
from autoshard.rules.notation import Choice, Strategy
from autoshard.schedule import INTERLEAVED, Schedule

DATA, TENSOR = 0, 1


class Unsuited(PlanError):
    """A framework has no plan for this model on this mesh."""


@dataclass(frozen=True)
class Baseline:
    """A framework's way to train a model.

    meshes: for a number of devices, those that it would use. savings: what it does to save memory; a later group is tried if nothing of
    those before fits. schedules: of a pipeline, beside 1F1B.
    """

    name: str
    what: str
    meshes: Callable[[int, Cluster], list[Mesh]]
    savings: tuple[tuple[Saving, ...], ...]
    narrow: Narrow
    schedules: tuple[Schedule, ...] = ()


def _flat(devices: int, cluster: Cluster) -> list[Mesh]:
    return [Mesh(devices)]


def _inside_nodes(devices: int, cluster: Cluster) -> list[Mesh]:
    return [mesh for mesh in Mesh.all(devices, cluster.node_size) if cluster.node_size % mesh.tensor == 0]


def _wide_inside_nodes(devices: int, cluster: Cluster) -> list[Mesh]:
    return [mesh for mesh in _inside_nodes(devices, cluster) if mesh.tensor > 1]


# --- restrictions ------------------------------------------------------------------------------------------------------


def batch_over_data(program: Program, folding: Folding, annotated: dict[fx.Node, Annotated], mesh: Mesh) -> None:
    """Over data an op divides the batch if it can, and nothing else."""
    if mesh.data == 1:
        return
    divided = 0
    for item in annotated.values():
        if item.rule is None:
            continue
        cut = tuple(s for s in item.strategies if _divides_batch(item, s.choices[DATA]))
        whole = tuple(s for s in item.strategies if not any(p.is_shard for p in (*s.choices[DATA].operands, *s.choices[DATA].results)))
        _keep(item, cut or whole)
        divided += bool(cut and item.rule.flops)
    if not divided:
        raise Unsuited(f"its batch can't be divided over {mesh.data} ranks")


def megatron(program: Program, folding: Folding, annotated: dict[fx.Node, Annotated], mesh: Mesh) -> None:
    """Megatron without sequence parallelism."""
    batch_over_data(program, folding, annotated, mesh)
    if mesh.tensor > 1:
        _divide_weights(program, annotated, mesh)
        stream = _stream(program, folding, annotated)
        for item, choices in _along_sequence(annotated, stream):
            _keep(item, tuple(s for s in item.strategies if s.choices[TENSOR] not in choices))
        _lie(annotated, {key: R for key in stream})


def megatron_sequence(program: Program, folding: Folding, annotated: dict[fx.Node, Annotated], mesh: Mesh) -> None:
    """Megatron with sequence parallelism. On a tensor axis of one rank there is no sequence to divide."""
    batch_over_data(program, folding, annotated, mesh)
    if mesh.tensor == 1:
        return
    _divide_weights(program, annotated, mesh)
    stream = _stream(program, folding, annotated)
    if not stream:
        raise Unsuited("no layers of it repeat, so there is no stream between layers to cut along the sequence")
    if all(mark is None for mark in stream.values()):
        raise Unsuited("what passes from layer to layer has no sequence")
    for item, choices in _along_sequence(annotated, stream):
        if item.rule.flops:
            _keep(item, tuple(s for s in item.strategies if s.choices[TENSOR] not in choices))
    if not _lie(annotated, {key: mark for key, mark in stream.items() if mark is not None}):
        raise Unsuited(f"its sequence can't be divided over {mesh.tensor} ranks")


def _divides_batch(item: Annotated, choice: Choice) -> bool:
    marks = [*(node.meta.get("batch", R) for node, _ in item.inputs), *(item.node.meta.get("batch", R) for _ in choice.results)]
    return any(p.is_shard and p == mark for p, mark in zip(choice.operands + choice.results, marks))


def _keep(item: Annotated, kept: tuple[Strategy, ...]) -> None:
    """Of what can't be had, nothing is asked."""
    item.strategies = kept or item.strategies


def _divide_weights(program: Program, annotated: dict[fx.Node, Annotated], mesh: Mesh) -> None:
    """Over tensor every matmul that reads a weight divides one of its dims, if one can be divided."""
    found = divided = 0
    for node, item in annotated.items():
        reads = weights_read(program, node)
        if not reads:
            continue
        cut = tuple(s for s in item.strategies if any(s.choices[TENSOR].operands[i].is_shard for i in reads))
        whole = tuple(s for s in item.strategies if not s.choices[TENSOR].name.startswith("shard"))
        _keep(item, cut or whole)
        found, divided = found + 1, divided + bool(cut)
    if not found:
        raise Unsuited("it has no matmul that reads a weight")
    if not divided:
        raise Unsuited(f"no weight of its matmuls can be divided over {mesh.tensor} ranks")


def weights_read(program: Program, node: fx.Node) -> list[int]:
    """Positions of the operands of a matmul that are weights, or views of one; none of any other op."""
    if node.op != "call_function" or not (node.target in matmul.TABLE or str(node.target).removesuffix(".default") in _NAMED):
        return []
    return [i for i, x in enumerate(operands(node)) if _is_weight(program, x) and len(tensors(x.meta["val"])[0].shape) > 1]


_NAMED = {name.replace("::", ".") for name in matmul.NAMED}


def _is_weight(program: Program, x: fx.Node) -> bool:
    while x.op == "call_function" and len(x.all_input_nodes) == 1:
        x = x.all_input_nodes[0]
    return x.name in program.params and program.params[x.name].kind == "parameter"


def _stream(program: Program, folding: Folding, annotated: dict[fx.Node, Annotated]) -> dict[Key, Placement | None]:
    """The values with a gradient that pass into or out of layers with weights, each with its placement when cut along its sequence.

    The sequence is the first dim that is not the batch; values of less than three dims have none.
    """
    ops = program.ops
    found: dict[Key, Placement | None] = {}
    for layers in folding.layers:
        spans = [ops[start : start + layers.period] for start in layers.starts]
        if not any(weights_read(program, node) for node in spans[0]):
            continue
        for span in spans:
            for key in _crossing(set(span), annotated):
                found[key] = _sequence(key)
    return found


def _crossing(inside: set[fx.Node], annotated: dict[fx.Node, Annotated]) -> Iterator[Key]:
    for node in inside:
        for x in operands(node):
            made = result_of(x)
            if made[0] not in inside and made[0] in annotated and made[0].op == "call_function" and x.meta.get("grad"):
                yield made
        leaves = any(user not in inside and user.op == "call_function" for user in node.users)
        if leaves and node.meta.get("grad") and isinstance(node.meta["val"], torch.Tensor):
            yield result_of(node)


def _sequence(key: Key) -> Placement | None:
    node, index = key
    batch, shape = node.meta.get("batch", R), tensors(node.meta["val"])[index].shape
    dims = [d for d in range(len(shape)) if not (batch.is_shard and batch.dim == d)]
    return S(dims[0]) if len(shape) > 2 else None


def _along_sequence(annotated: dict[fx.Node, Annotated], stream: dict[Key, Placement | None]) -> Iterator[tuple[Annotated, set[Choice]]]:
    """Ops with the choices along tensor that divide the sequence, followed from the stream through what each op makes of it."""
    marks: dict[Key, set[Placement]] = {key: {mark} for key, mark in stream.items() if mark is not None}
    for node, item in annotated.items():
        if item.rule is None:
            continue
        found = set()
        for strategy in item.strategies:
            choice = strategy.choices[TENSOR]
            if any(p in marks.get(key, ()) for key, p in zip(item.inputs, choice.operands)):
                found.add(choice)
        for index in range(len(item.rule.results)):
            marks.setdefault((node, index), set()).update(c.results[index] for c in found if c.results[index].is_shard)
        for strategy in item.strategies:
            choice = strategy.choices[TENSOR]
            if any(p in marks[node, index] for index, p in enumerate(choice.results)):
                found.add(choice)
        if found:
            yield item, found


def _lie(annotated: dict[fx.Node, Annotated], wanted: dict[Key, Placement]) -> int:
    """Along tensor values lie as is wanted of them, if they can; how many do."""
    done = 0
    for (node, index), placement in wanted.items():
        item = annotated[node]
        kept = tuple(s for s in item.strategies if s.results[index][TENSOR] == placement)
        _keep(item, kept)
        done += bool(kept)
    return done


BASELINES = (
    Baseline("DP", "plain data parallel", _flat, ((Saving(0, False),),), batch_over_data),
    Baseline("ZeRO-1", "data parallel, optimizer states cut", _flat, ((Saving(1, False),),), batch_over_data),
    Baseline("ZeRO-2", "gradients cut too", _flat, ((Saving(2, False),),), batch_over_data),
    Baseline("ZeRO-3", "weights cut too", _flat, ((Saving(3, False),),), batch_over_data),
    Baseline("FSDP", "ZeRO-3, and each layer computed again in backward", _flat, ((Saving(3, True),),), batch_over_data),
    Baseline(
        "Megatron",
        "the best data x tensor x pipeline with tensor inside a node, 1F1B interleaved or not, ZeRO-0 or 1, recomputation if nothing fits "
        "without",
        _inside_nodes, ((Saving(0, False), Saving(1, False)), (Saving(1, True),)), megatron, INTERLEAVED,
    ),
    Baseline(
        "Megatron-SP", "the same, with the stream between layers cut along the sequence over tensor",
        _wide_inside_nodes, ((Saving(0, False), Saving(1, False)), (Saving(1, True),)), megatron_sequence, INTERLEAVED,
    ),
)  # fmt: skip
