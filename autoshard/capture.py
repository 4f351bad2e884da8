"""Model and example inputs -> Program: torch.export on fake tensors, then one flat graph with facts on every node.

Nothing of the size of the model is allocated, and the user's module is left as it was.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autoshard import trace_errors
from autoshard.carried import Carried, refuse_state
from autoshard.errors import CaptureError
from autoshard.exported import build_graph
from autoshard.precision import dtype_of, lowered, master_dtype
from autoshard.program import Input, Param, Program
from autoshard.signature import Signature, leaf_name, read_call
from autoshard.torch_private import pytree
from autoshard.tracing import few_collections, refuse_gradient_hooks, tracing, tracing_mode, unchanged


@dataclass
class Captured:
    """A captured model.

    program: the graph as torch.export gives it, functional, with facts on every node; not canonical yet.
    in_spec: maps (args, kwargs) of a call to program.inputs.
    out_spec: pytree structure of what the model returns; with a loss_fn that is ``(loss, output)``.
    constants: python arguments that the graph was specialised to, by name.
    constants_values: tensors that are neither parameters nor buffers, by Param name.
    params: every parameter and buffer of the model, read by the graph or not.
    seconds: time that the capture took.
    loss_fn, batch_dims, precision: as they were given.
    random_keys: how many draws of random numbers a step makes.
    """

    program: Program
    in_spec: Signature
    out_spec: pytree.TreeSpec
    constants: dict[str, Any]
    constants_values: dict[str, torch.Tensor]
    params: tuple[Param, ...]
    seconds: float
    loss_fn: Callable | None = None
    batch_dims: Mapping[str, int | None] | None = None
    precision: str = "fp32"
    random_keys: int = 0


class Root(nn.Module):
    """What is traced: the model, then the loss function. Returns their result, and the tensors that forward left behind."""

    def __init__(self, model: nn.Module, loss_fn: Callable | None, as_tuple: bool):
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        self.as_tuple = as_tuple
        self.carried = Carried(model)
        self.returns_state = True

    def forward(self, args: tuple, kwargs: dict, loss_only: dict, state: tuple = ()):
        self.carried.begin(state)
        output = self.model(*args, **kwargs)
        left = self.carried.end()
        if self.loss_fn is not None:
            output = self.loss_fn(output, args if self.as_tuple else {**kwargs, **loss_only}), output
        return output, left if self.returns_state else []


@few_collections()
def capture(
    model: nn.Module,
    example_inputs: Any,
    loss_fn: Callable | None = None,
    batch_dims: Mapping[str, int | None] | None = None,
    precision: str = "fp32",
) -> Captured:
    """Trace a model into a Program.

    Args:
        model: on any device; on ``meta`` it is traced without ever being allocated.
        example_inputs: the global batch: a dict of keyword arguments, or a tuple. Only shapes and dtypes are used.
        loss_fn: ``loss_fn(output, batch)`` -> scalar; the captured model then returns ``(loss, output)``. Entries of the batch
            that ``forward`` does not name are only seen by loss_fn.
        batch_dims: the dim that holds the batch, by input name, where it is not 0; None for an input without one.
        precision: of PRECISIONS; a model of lower precision is traced as such, see ``autoshard.precision``.

    Raises:
        CaptureError: the model can't be traced; names the user's own line.
    """
    start = time.perf_counter()
    own, low = model, dtype_of(precision)
    model = lowered(own, precision)
    # a cache of keys and values is no result of a training step
    extra = {"use_cache": False} if hasattr(getattr(model, "config", None), "use_cache") else {}
    call = read_call(model.forward, example_inputs, loss_fn is not None, extra)
    mode, device = tracing_mode(model)
    with mode or nullcontext():
        args, kwargs, loss_only = pytree.tree_map_only(
            torch.Tensor, lambda t: _fresh(t, device, low), (call.args, call.kwargs, call.loss_only)
        )
    _refuse_input_gradients(call)
    refuse_gradient_hooks(own)

    root = Root(model, loss_fn, not isinstance(example_inputs, Mapping))
    root.training = model.training
    with trace_errors.explained(model), tracing(model, mode):
        exported = _export(root, (args, kwargs, loss_only))
        if left := root.carried.left:
            with mode or nullcontext():
                state = [_fresh(leaf, device, None) for leaf in pytree.tree_leaves(left) if isinstance(leaf, torch.Tensor)]
            refuse_state(exported, left, lambda: (_export(root, (args, kwargs, loss_only, tuple(state))), root.carried.left))
            root.carried.left, root.returns_state = {}, False
            exported = _export(root, (args, kwargs, loss_only))

    params = model_params(model, {name: p.dtype for name, p in own.named_parameters()} if low else {})
    names = _leaf_names(args, call.signature)
    (graph, read, inputs, updates), keys = build_graph(exported, params, names)
    sizes = _batch_dims({name: tuple(node.meta["val"].shape) for name, node in inputs.items()}, batch_dims or {})
    program = Program(
        graph=graph,
        params={node.name: param for param, node in read.items()},
        inputs={
            node.name: Input(name, tuple(node.meta["val"].shape), node.meta["val"].dtype, sizes[name]) for name, node in inputs.items()
        },
        loss=None,
        updates=updates,
    )
    out_spec = exported.call_spec.out_spec.child(0)
    program.loss = find_loss(program, out_spec, loss_fn is not None)
    constants = {p.name: exported.constants[_target(p.name, exported)] for p in read if p.kind == "constant"}
    given = (loss_fn, batch_dims, precision)
    seconds = time.perf_counter() - start
    return Captured(program, call.signature, out_spec, call.signature.constants, constants, params, seconds, *given, keys)


def _export(root: Root, arguments: tuple):
    with unchanged(root.model):
        return torch.export.export(root, arguments, strict=False)


def _fresh(tensor: torch.Tensor, device: torch.device, low: torch.dtype | None) -> torch.Tensor:
    # a new tensor each time: export merges inputs that are one object, such as input_ids passed as labels too
    return torch.empty(tensor.shape, dtype=low if low and tensor.is_floating_point() else tensor.dtype, device=device)


def _refuse_input_gradients(call) -> None:
    for path, leaf in pytree.tree_flatten_with_path((call.args, call.kwargs, call.loss_only))[0]:
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            raise CaptureError(
                f"input {leaf_name(path[1:])!r} requires grad; gradients are computed for parameters only",
                hint="detach the input, or make it a parameter",
            )


def _leaf_names(args: tuple, signature: Signature) -> Callable[[tuple], str]:
    """The name of a leaf of Root's arguments from its path, as in Signature.tensors."""

    def name(path: tuple) -> str:
        which, rest = path[0].idx, path[1:]
        if which:
            return leaf_name(rest)
        position, below = rest[0].idx, rest[1:]
        if position < len(signature.positional):
            head = signature.positional[position]
        else:
            head = f"{signature.varargs}.{position - len(signature.positional)}"
        return ".".join(filter(None, (head, leaf_name(below))))

    return name


def model_params(model: nn.Module, own: Mapping[str, torch.dtype]) -> tuple[Param, ...]:
    """Every parameter and buffer once, with all its names; the first name is the one that ``named_parameters`` gives.

    ``own``: the dtypes of the user's parameters, by name, where the model is a copy of lower precision.
    """
    names: dict[int, list[str]] = {}
    found: dict[int, tuple[torch.Tensor, str]] = {}
    for kind, named in (("parameter", model.named_parameters), ("buffer", model.named_buffers)):
        for name, tensor in named(remove_duplicate=False):
            names.setdefault(id(tensor), []).append(name)
            found.setdefault(id(tensor), (tensor, kind))
    temporary = {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    }
    params = []
    for key, (t, kind) in found.items():
        name = names[key][0]
        master = master_dtype(own[name], t.dtype) if name in own and t.requires_grad else None
        persistent = any(n not in temporary for n in names[key])
        params.append(Param(tuple(names[key]), tuple(t.shape), t.dtype, t.requires_grad, kind, persistent, master))
    return tuple(params)


def _batch_dims(shapes: dict[str, tuple[int, ...]], given: Mapping[str, int | None]) -> dict[str, int | None]:
    """The batch dim of every input. Scalars, and inputs of size 1 beside others, have none."""
    for name, dim in given.items():
        if name not in shapes:
            raise CaptureError(f"batch_dims names {name!r}, which is no input", hint=f"the inputs are {', '.join(shapes)}")
        if dim is not None and not -len(shapes[name]) <= dim < len(shapes[name]):
            raise CaptureError(f"batch_dims[{name!r}] is {dim}, but the input has shape {shapes[name]}")
    guessed = {name: shape[0] for name, shape in shapes.items() if name not in given and shape}
    stated = [shapes[name][dim] for name, dim in given.items() if dim is not None]
    batch = stated[0] if stated else max(guessed.values(), default=1)
    dims: dict[str, int | None] = {}
    for name, shape in shapes.items():
        if name in given:
            dims[name] = None if given[name] is None else given[name] % len(shape)
        elif not shape or (shape[0] == 1 and batch != 1):
            dims[name] = None
        elif shape[0] == batch:
            dims[name] = 0
        else:
            other = next((n for n, size in guessed.items() if size == batch), next(iter(given), name))
            raise CaptureError(
                f"inputs {other!r} and {name!r} have {batch} and {shape[0]} samples in dim 0",
                hint=f"say where the batch is: batch_dims={{{name!r}: None}} if {name!r} holds no batch",
            )
    return dims


def find_loss(program: Program, out_spec: pytree.TreeSpec, has_loss_fn: bool) -> int | None:
    """Index of the output leaf to be minimised.

    The first leaf if there is a loss_fn; else the entry called ``loss``; else the whole output, or the first of a tuple, if it is a
    scalar with a gradient.
    """
    leaves = program.results

    def is_loss(index: Any) -> bool:
        node = leaves[index] if isinstance(index, int) else None
        return isinstance(node, torch.fx.Node) and node.meta["grad"] and node.meta["val"].dim() == 0

    output = pytree.tree_unflatten(list(range(len(leaves))), out_spec)
    if has_loss_fn:
        if not isinstance(output[0], int) or not isinstance(leaves[output[0]], torch.fx.Node) or leaves[output[0]].meta["val"].dim():
            raise CaptureError("loss_fn does not return a scalar tensor", hint="reduce the loss, for example with .mean()")
        return output[0] if is_loss(output[0]) else None
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if is_loss(named):
        return named
    first = output[0] if isinstance(output, (tuple, list)) and output else output
    scalars = [i for i in range(len(leaves)) if is_loss(i)]
    return first if scalars == [first] else None


def _target(name: str, exported) -> str:
    return name if name in exported.constants else f"model.{name}"
