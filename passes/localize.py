"""From global shapes to the rank's own: literal sizes are recomputed, and sharded ops that need it get a local kernel.

before (on a tensor axis of 2)::

    reshape = aten.reshape(linear, [4, 16, 4, 8])        # [S(0), S(2)]
    embedding = aten.embedding(wte_weight, ids)          # shard v over tensor

after::

    reshape = aten.reshape(linear, [4, 16, 2, 8])
    embedding = vocab_embedding(wte_weight, ids, axis="tensor", size=99)
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import fx
from torch.fx.node import map_arg

from autoshard import ops
from autoshard.errors import PlanError
from autoshard.mesh import SHARDED_AXES
from autoshard.passes.edit import arguments, run_on_facts, written
from autoshard.placement import Layout, R, local_shape, step_arguments
from autoshard.program import Program, draws, is_getitem, operands, shape_of, tensors, where
from autoshard.rules import rule_for
from autoshard.rules.notation import Choice

aten = torch.ops.aten
Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class LocalCall:
    """What a rank runs in place of an op; tensor arguments are still the op's own operand nodes."""

    target: object
    args: tuple
    kwargs: dict


def _sizes_from_result(node: fx.Node, inputs: Shapes, results: Shapes, cut) -> LocalCall:
    return LocalCall(node.target, (node.args[0], list(results[0]), *node.args[2:]), dict(node.kwargs))


def _factory(node: fx.Node, inputs: Shapes, results: Shapes, cut) -> LocalCall:
    return LocalCall(node.target, (list(results[0]), *node.args[1:]), dict(node.kwargs))


def _slice(node: fx.Node, inputs: Shapes, results: Shapes, cut) -> LocalCall:
    x, dim, start, end, *step = node.args
    whole, local = shape_of(x)[dim], inputs[0][dim]
    if whole != local:
        if step and step[0] != 1:
            start, end = 0, local  # a strided slice may only be cut along other dims; sizes agree
        elif end - start == whole:
            start, end = 0, local
        else:
            start, end = start * local // whole, end * local // whole
    return LocalCall(node.target, (x, dim, start, end, *step), dict(node.kwargs))


def _mean(node: fx.Node, inputs: Shapes, results: Shapes, cut) -> LocalCall:
    x = node.args[0]
    shape = shape_of(x)
    dims = list(node.args[1]) if len(node.args) > 1 and node.args[1] else list(range(len(shape)))
    dims = [d % len(shape) for d in dims]
    keepdim = bool(node.args[2]) if len(node.args) > 2 else bool(node.kwargs.get("keepdim", False))
    if all(shape[d] == inputs[0][d] for d in dims):
        return LocalCall(node.target, node.args, dict(node.kwargs))
    count = 1
    for d in dims:
        count *= shape[d]
    return LocalCall(ops.scaled_sum, (x, dims, keepdim, count), {})


def _embedding(node: fx.Node, inputs: Shapes, results: Shapes, cut) -> LocalCall:
    axis = cut("vocab_embedding")
    if axis is None:
        return LocalCall(node.target, node.args, dict(node.kwargs))
    weight, ids = node.args[:2]
    padding = node.args[2] if len(node.args) > 2 else node.kwargs.get("padding_idx", -1)
    return LocalCall(ops.vocab_embedding, (weight, ids), {"axis": axis, "size": shape_of(weight)[0], "padding_idx": padding})


def _cross_entropy(node: fx.Node, inputs: Shapes, results: Shapes, cut) -> LocalCall:
    axis = cut("vocab_cross_entropy")
    if axis is None:
        return LocalCall(node.target, node.args, dict(node.kwargs))
    names = ("logits", "labels", "weight", "reduction", "ignore_index", "label_smoothing")
    given = {"weight": None, "reduction": 1, "ignore_index": -100, "label_smoothing": 0.0}
    given.update(dict(zip(names, node.args)))
    given.update(node.kwargs)
    reduction = {0: "none", 2: "sum"}[given["reduction"]]
    return LocalCall(
        ops.vocab_cross_entropy,
        (given["logits"], given["labels"]),
        {
            "axis": axis,
            "size": shape_of(given["logits"])[1],
            "weight": given["weight"],
            "reduction": reduction,
            "ignore_index": given["ignore_index"],
            "label_smoothing": given["label_smoothing"],
        },
    )


def _groups(node: fx.Node, inputs: Shapes, results: Shapes, cut) -> LocalCall:
    """A convolution on whole groups has fewer of them: channels a side, by channels of one group as the weight has them."""
    x, w = inputs[:2]
    values = arguments(node)
    channels = results[0] if "conv_transpose" in str(node.target) or values.get("transposed") else x
    values["groups"] = channels[len(x) - len(w) + 1] // w[1]
    return LocalCall(node.target, *written(node, values))


def _norm_groups(node: fx.Node, inputs: Shapes, results: Shapes, cut) -> LocalCall:
    values = arguments(node)
    values["num_groups"] = values["num_groups"] * inputs[0][1] // shape_of(node)[1]
    return LocalCall(node.target, *written(node, values))


CONVOLUTIONS = (
    aten.conv1d.default, aten.conv2d.default, aten.conv3d.default, aten.conv1d.padding, aten.conv2d.padding, aten.conv3d.padding,
    aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input, aten.convolution.default,
)  # fmt: skip

def _batch_norm(node: fx.Node, inputs: Shapes, results: Shapes, cut) -> LocalCall:
    axis = cut("batch_norm")
    if axis is None:
        return LocalCall(node.target, node.args, dict(node.kwargs))
    a = arguments(node)
    kwargs = {"axis": axis, "size": shape_of(a["input"])[0], "eps": a["eps"]}
    return LocalCall(ops.batch_norm, (a["input"], a["weight"], a["bias"]), kwargs)


HANDLERS = {
    aten.reshape.default: _sizes_from_result,
    aten.expand.default: _sizes_from_result,
    aten.new_ones.default: _sizes_from_result,
    aten.new_zeros.default: _sizes_from_result,
    aten.new_full.default: _sizes_from_result,
    aten.new_empty.default: _sizes_from_result,
    aten.full.default: _factory,
    aten.zeros.default: _factory,
    aten.ones.default: _factory,
    aten.slice.Tensor: _slice,
    aten.mean.default: _mean,
    aten.mean.dim: _mean,
    aten.embedding.default: _embedding,
    aten.cross_entropy_loss.default: _cross_entropy,
    aten.group_norm.default: _norm_groups,
    aten.native_batch_norm.default: _batch_norm,
    **dict.fromkeys(CONVOLUTIONS, _groups),
}


def local_call(node: fx.Node, inputs: Shapes, results: Shapes, choices: dict[str, Choice], local_kernels: dict[str, str]) -> LocalCall:
    """What a rank runs for ``node``.

    Args:
        inputs / results: local shapes of the tensor operands (``operands(node)`` order) and results.
        choices: the op's choice along each axis, by axis name.
        local_kernels: factor -> kernel name, from the op's rule (``OpRule.local``).
    """

    def cut(kernel: str) -> str | None:
        """The axis along which the op needs this kernel, if any."""
        for axis, choice in choices.items():
            if choice.comms and kernel == "vocab_cross_entropy":
                return axis
            if choice.factor in local_kernels and local_kernels[choice.factor] == kernel:
                return axis
        return None

    handler = HANDLERS.get(node.target)
    if handler is not None and not any(c.comms for c in choices.values()):
        unchanged = tuple(map(shape_of, operands(node))) == tuple(inputs) and _shapes(node) == tuple(results)
        handler = None if unchanged else handler
    if handler is None:
        return LocalCall(node.target, node.args, dict(node.kwargs))
    return handler(node, inputs, results, cut)


def localize(program: Program, coords: tuple[int, ...]) -> Program:
    """The program of the rank at ``coords`` on (data, tensor): every ``val`` has the rank's own shape, convert nodes their arguments.

    Raises PlanError if an op, run on the local shapes, does not give the local shape that its layout promises.
    """
    sizes = program.mesh.sizes
    graph = fx.Graph()
    built: dict[fx.Node, fx.Node] = {}
    for node in program.graph.nodes:
        if node.op == "output":
            new = graph.output(map_arg(node.args[0], built.__getitem__))
        elif node.op == "placeholder":
            new = graph.placeholder(node.name)
        elif is_getitem(node):
            new = graph.call_function(node.target, (built[node.args[0]], node.args[1]))
        elif node.target is ops.convert:
            text, size = step_arguments(node.meta["step"], shape_of(node), sizes, coords)
            args = (built[node.args[0]], text, node.args[2], size)
            new = graph.create_node("call_function", ops.convert, args, name=node.name)
        else:
            new = _local_node(graph, node, built, sizes, coords)
        new.meta = copy.copy(node.meta)
        new.meta.pop("rule", None)
        if draws(node):
            new.meta["cut_along"] = tuple(axis for axis, p in zip(SHARDED_AXES, node.meta["layouts"][0]) if p.is_shard)
        if "val" in node.meta and not is_getitem(node):
            layouts = node.meta.get("layouts") or ((R, R),)
            vals = [_local_val(v, layout, sizes, coords) for v, layout in zip(tensors(node.meta["val"]), layouts)]
            new.meta["val"] = vals[0] if isinstance(node.meta["val"], torch.Tensor) else type(node.meta["val"])(vals)
            new.meta["whole"] = node.meta["val"]
        elif is_getitem(node):
            new.meta["val"] = built[node.args[0]].meta["val"][node.args[1]]
        built[node] = new
    return Program(graph, dict(program.params), dict(program.inputs), program.loss, program.mesh, program.microbatches, program.updates)


def piece_sizes(program: Program, coords: tuple[int, ...]) -> Shapes:
    """All that ``localize`` reads of ``coords``: ranks for which it is equal have the same program."""
    sizes, found = program.mesh.sizes, []
    for node in program.graph.nodes:
        if node.op != "output" and not is_getitem(node):
            layouts = node.meta.get("layouts") or ((R, R),)
            found += [local_shape(tuple(v.shape), layout, sizes, coords) for v, layout in zip(tensors(node.meta["val"]), layouts)]
            if node.target is ops.convert:
                found.append(local_shape(shape_of(node), node.meta["step"].others, sizes, coords))
    return tuple(found)


def _local_val(val, layout: Layout, sizes, coords):
    shape = local_shape(tuple(val.shape), layout, sizes, coords)
    return val if shape == tuple(val.shape) else val.new_empty(shape)


def _local_node(graph: fx.Graph, node: fx.Node, built, sizes, coords) -> fx.Node:
    inputs = tuple(tuple(built[x].meta["val"].shape) for x in operands(node))
    results = tuple(
        local_shape(tuple(v.shape), layout, sizes, coords) for v, layout in zip(tensors(node.meta["val"]), node.meta["layouts"])
    )
    strategy, rule = node.meta["strategy"], rule_for(node)
    choices = {axis: c for axis, c, k in zip(SHARDED_AXES, strategy.choices, sizes) if k > 1}
    call = local_call(node, inputs, results, choices, rule.local)
    args = map_arg(call.args, built.__getitem__)
    kwargs = map_arg(call.kwargs, built.__getitem__)
    if call.target not in ops.LOCAL_OPS and (inputs != tuple(map(shape_of, operands(node))) or results != _shapes(node)):
        _check(node, call, built, results)
    return graph.create_node("call_function", call.target, args, kwargs, name=node.name)


def _shapes(node: fx.Node) -> Shapes:
    return tuple(tuple(v.shape) for v in tensors(node.meta["val"]))


def _check(node: fx.Node, call: LocalCall, built, promised: Shapes) -> None:
    """Run the op on local operands without values: its rule promised these result shapes."""
    local = map_arg((call.args, call.kwargs), built.__getitem__)
    try:
        out = run_on_facts(call.target, *local)
    except NotImplementedError:  # an op that runs on values only
        return
    except Exception as error:
        raise PlanError(
            f"{node.target} can't run on its pieces under strategy {node.meta['strategy'].name!r}: {str(error).splitlines()[0]}",
            where=where(node),
            hint="the sharding rule of this op is wrong for these arguments; please report it, and pin the value to R meanwhile",
        ) from error
    got = tuple(tuple(v.shape) for v in tensors(out))
    if got != promised:
        raise PlanError(
            f"{node.target} under strategy {node.meta['strategy'].name!r} gives pieces of shape {got}, its rule says {promised}",
            where=where(node),
            hint="the sharding rule of this op is wrong for these arguments; please report it, and pin the value to R meanwhile",
        )
