"""Rules of ops that look up or write by index. Indices hold no gradient; the dims they point into are fixed; their own dims are factors.

Exception: an embedding table may be sharded over its rows (local kernel "vocab_embedding": rows of other ranks give 0, the result is P).
Ops that *add* at an index are sums over the index dims, so those may be sharded: the result is P.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from autoshard.program import operands, shape_of, tensors
from autoshard.rules.call import argument, bind_named, bind_node, dims, each, operand_names, positive, shape, unsharded
from autoshard.rules.notation import OpRule

THROUGH = (frozenset({0}),)


def embedding(node: fx.Node) -> OpRule:
    """``v e, ... -> ... e``. Scaling gradients by frequency counts ids over the whole batch: then only e is a factor."""
    names = dims(len(shape(node, "indices")), prefix="i")
    fixed = [*names, "v"] if argument(node, "scale_grad_by_freq") else []
    specs = {"weight": "v e", "indices": " ".join(names)}
    return bind_named(node, specs, " ".join([*names, "e"]), saved=("indices",), fixed=fixed, local={"v": "vocab_embedding"})


def _index_layout(node: fx.Node) -> tuple[list[str], list[str], list[str]] | None:
    """Tokens of self, of the indices broadcast together, and of what they pick; None for boolean masks."""
    indices = list(argument(node, "indices"))
    if any(tensors(i.meta["val"])[0].dtype in (torch.bool, torch.uint8) for i in indices if i is not None):
        return None
    rank = len(shape_of(operands(node)[0]))
    indices += [None] * (rank - len(indices))
    at = [d for d, i in enumerate(indices) if i is not None]
    own = dims(rank, at)
    rank_of_index = max((len(shape_of(i)) for i in indices if i is not None), default=0)
    index = dims(rank_of_index, prefix="i")
    together = at == list(range(at[0], at[-1] + 1)) if at else True
    before = [own[d] for d in range(rank) if d not in at and at and together and d < at[0]]
    after = [own[d] for d in range(rank) if d not in at and own[d] not in before]
    return own, index, before + index + after


def index(node: fx.Node) -> OpRule:
    """``x[i, :, j]``: indexed dims adjacent to each other are replaced in place, otherwise the index dims come first."""
    layout = _index_layout(node)
    if layout is None:
        return unsharded(node)
    own, broadcast, picked = layout
    index_specs = [" ".join(broadcast[len(broadcast) - len(shape_of(n)) :]) for n in operands(node)[1:]]
    specs = {"self": " ".join(own), "indices": index_specs}
    return bind_named(node, specs, " ".join(picked), saved=("indices",), linear=[("self",)])


def index_put(node: fx.Node) -> OpRule:
    """Without accumulate, the entries overwrite each other in order: index dims are fixed. With it they are summed."""
    layout = _index_layout(node)
    if layout is None:
        return replace(unsharded(node), linear=(frozenset({0, len(operands(node)) - 1}),))
    own, broadcast, picked = layout
    accumulate = argument(node, "accumulate")
    if not accumulate:
        picked = [f"{t}^" if t in broadcast else t for t in picked]
        broadcast = [f"{t}^" for t in broadcast]
    index_nodes = [i for i in argument(node, "indices") if i is not None]
    values = picked[len(picked) - len(shape(node, "values")) :]
    specs = {
        "self": ("+" if accumulate else "") + " ".join(own),
        "indices": [" ".join(broadcast[len(broadcast) - len(shape_of(n)) :]) for n in index_nodes],
        "values": " ".join(values),
    }
    return bind_named(node, specs, " ".join(own), saved=("indices",), linear=[("self", "values")])


def _along(node: fx.Node) -> tuple[list[str], int]:
    """Tokens of self with the dim of the op fixed, and that dim."""
    rank = len(shape(node, "self"))
    dim = positive(argument(node, "dim"), rank)
    return dims(rank, [dim]), dim


def _index_tokens(node: fx.Node, own: list[str], dim: int, name: str, fixed: bool) -> tuple[list[str], list[str]]:
    """Tokens of self and of an index of self's rank: it may be smaller, and then holds the first part of a (fixed) dim."""
    own, index = list(own), list(own)
    for d, (n, m) in enumerate(zip(shape(node, "self"), shape(node, name))):
        if d == dim:
            index[d] = f"i{d}^" if fixed else f"i{d}"
        elif n != m:
            own[d], index[d] = f"d{d}^", f"part{d}^"
    return own, index


def gather(node: fx.Node) -> OpRule:
    own, dim = _along(node)
    own, index = _index_tokens(node, own, dim, "index", fixed=False)
    specs = {"self": " ".join(own), "index": " ".join(index)}
    return bind_named(node, specs, " ".join(index), saved=("index",), linear=[("self",)])


def take_along_dim(node: fx.Node) -> OpRule:
    """Like gather, but self and indices are broadcast. Without a dim both are flat."""
    if argument(node, "dim") is None:
        return unsharded(node)
    own, dim = _along(node)
    index = list(own)
    index[dim] = f"i{dim}"
    return bind_named(node, {"self": " ".join(own), "indices": " ".join(index)}, " ".join(index), saved=("indices",), linear=[("self",)])


def scatter(adds: bool):
    """scatter of a tensor or a number along a dim; scatter_add sums over the index's dim."""

    def rule(node: fx.Node) -> OpRule:
        own, dim = _along(node)
        own, index = _index_tokens(node, own, dim, "index", fixed=not adds)
        names = operand_names(node)
        if "src" in names and shape(node, "src") != shape(node, "index"):  # only the first part of src is read
            return unsharded(node)
        specs = {"self": ("+" if adds else "") + " ".join(own), "index": " ".join(index), "src": " ".join(index)}
        linear = [("self", "src")] if "src" in names else [("self",)] if not argument(node, "value") else []
        return bind_named(node, specs, " ".join(own), saved=("index",), linear=linear)

    return rule


def scatter_reduce(node: fx.Node) -> OpRule:
    """Sums are those of scatter_add; a product, mean or extreme needs all entries that go to one place."""
    own, dim = _along(node)
    sums = argument(node, "reduce") == "sum" and argument(node, "include_self")
    own, index = _index_tokens(node, own, dim, "index", fixed=not sums)
    if shape(node, "src") != shape(node, "index"):
        return unsharded(node)
    specs = {"self": "+" * sums + " ".join(own), "index": " ".join(index), "src": " ".join(index)}
    linear, saved = [("self", "src")] if sums else [], ("index",) if sums else ("self", "index", "src", -1)
    return bind_named(node, specs, " ".join(own), saved=saved, linear=linear)


def index_reduce(node: fx.Node) -> OpRule:
    own, dim = _along(node)
    source = [*own[:dim], "i^", *own[dim + 1 :]]
    specs = {"self": " ".join(own), "index": "i^", "source": " ".join(source)}
    return bind_named(node, specs, " ".join(own), saved=("self", "index", "source", -1))


def isin(node: fx.Node) -> OpRule:
    among = dims(len(shape(node, "test_elements")), range(8), "t")
    return bind_named(node, {"elements": "...", "test_elements": " ".join(among)}, "...")


def index_along(adds: bool):
    """index_select (no source), index_copy and index_add: a vector of indices into one dim."""

    def rule(node: fx.Node) -> OpRule:
        own, dim = _along(node)
        source = "source" in operand_names(node)
        token = "i" if adds or not source else "i^"
        other = list(own)
        if len(shape(node, "index")):
            other[dim] = token
        else:
            other[dim], token = "_", ""
        specs = {"self": ("+" if adds else "") + " ".join(own), "index": token, "source": " ".join(other)}
        result = " ".join(own if source else other)
        return bind_named(node, specs, result, saved=("index",), linear=[("self", "source") if source else ("self",)])

    return rule


def index_fill(node: fx.Node) -> OpRule:
    own, _ = _along(node)
    text = " ".join(own)
    linear = [("self", "value")] if "value" in operand_names(node) or not argument(node, "value") else []
    return bind_named(node, {"self": text, "index": "i^", "value": ""}, text, saved=("index",), linear=linear)


def one_hot(node: fx.Node) -> OpRule:
    return bind_node(node, "... -> ... classes^")


def searchsorted(node: fx.Node) -> OpRule:
    """Sorted boundaries are whole; with several rows of them, rows go with rows."""
    rows = len(shape(node, "sorted_sequence"))
    values = dims(len(shape(node, "self")))
    text = " ".join(values)
    sequence = "bounds^" if rows == 1 else " ".join([*values[:-1], "bounds^"])
    return bind_named(node, {"sorted_sequence": sequence, "self": text, "sorter": sequence}, text)


TABLE = {
    **each("embedding", embedding),
    **each("index.Tensor", index),
    **each("index_put", index_put),
    **each("gather", gather),
    **each("take_along_dim", take_along_dim),
    **each("scatter.src scatter.value", scatter(adds=False)),
    **each("scatter_add", scatter(adds=True)),
    **each("index_select index_copy", index_along(adds=False)),
    **each("index_add", index_along(adds=True)),
    **each("index_fill.int_Scalar index_fill.int_Tensor", index_fill),
    **each("one_hot", one_hot),
    **each("bucketize.Tensor", lambda node: bind_node(node, "..., bounds -> ...")),  # counts of bounds below add up
    **each("searchsorted.Tensor", searchsorted),
    **each("scatter_reduce.two", scatter_reduce),
    **each("index_reduce", index_reduce),
    **each("isin.Tensor_Tensor", isin),
    **each("bincount masked_scatter take put segment_reduce", unsharded),
}
