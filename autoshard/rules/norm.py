"""Rules of normalisation layers: the dims whose statistics are taken are fixed; scale and shift lack the batch, so theirs is R*."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from autoshard.placement import R_STAR, R, S
from autoshard.program import operands, shape_of
from autoshard.rules.call import argument, bind_named, bind_node, dims, each, result_shapes
from autoshard.rules.notation import Choice, Comm, OpRule


def layer_norm(node: fx.Node) -> OpRule:
    """The last dims are fixed. native_layer_norm also returns mean and reciprocal deviation, with dims of size 1."""
    rank, n = len(shape_of(operands(node)[0])), len(argument(node, "normalized_shape"))
    names = dims(rank, range(rank - n, rank))
    text, own = " ".join(names), " ".join(names[rank - n :])
    statistics = " ".join(names[: rank - n] + ["_"] * n)
    result = ", ".join([text, statistics, statistics][: len(result_shapes(node))])
    return bind_named(node, {"input": text, "weight": own, "bias": own}, result, saved=("input", "weight"))


def group_norm(node: fx.Node) -> OpRule:
    """``n (g c^) x^``: statistics are those of a sample's group. A rank with fewer groups is told so by the argument."""
    x = shape_of(operands(node)[0])
    groups, names = argument(node, "num_groups"), dims(len(x), range(1, len(x)))
    size = x[1] // groups
    channels = "d1^" if groups == 1 else "(g c^)" if size > 1 else "g"
    specs = {"input": " ".join([names[0], channels, *names[2:]]), "weight": channels, "bias": channels}
    return bind_named(node, specs, specs["input"], saved=("input", "weight"), known={"g": groups, "c": size})


def batch_norm(node: fx.Node) -> OpRule:
    """Channels are independent. The batch is a factor only where running statistics are used; statistics of the batch mix it."""
    rank = len(shape_of(operands(node)[0]))
    arguments = [a.name for a in node.target._schema.arguments]
    training = "training" not in arguments or argument(node, "training")
    names = dims(rank, {0, *range(2, rank)} if training else range(2, rank))
    specs = dict.fromkeys(("weight", "bias", "running_mean", "running_var"), names[1])
    saved = ("input", "weight") if training else ("input", "weight", "running_mean", "running_var")
    results = []
    for s in result_shapes(node):  # statistics are vectors of the channels; empty if they were not computed
        results.append(" ".join(names) if len(s) == rank else "_" if s == (0,) else names[1])
    return bind_named(node, {"input": " ".join(names), **specs}, ", ".join(results), saved=saved)


def batch_statistics(node: fx.Node) -> OpRule:
    """Batch norm in training, with the statistics as results. The samples may be cut: local kernel "batch_norm" joins their statistics."""
    return replace(batch_norm(node), local={"d0": "batch_norm"}, special=(shard_samples,))


def shard_samples(rule: OpRule, k: int) -> tuple[Choice, ...]:
    """Samples cut, scale and shift whole, and so are the statistics: one gather of them forward, one sum of as many backward."""
    if rule.sizes.get("d0", 1) < k:
        return ()
    channels = rule.sizes["d1"]
    comms = (Comm("all_gather", 2.0 * channels * k, ("d1",)), Comm("all_reduce", 2.0 * channels, ("d1",)))
    operands = (S(0), *(R_STAR for _ in rule.operands[1:]))
    return (Choice("shard d0", operands, (S(0), R, R), "d0", comms=comms),)


def instance_norm(node: fx.Node) -> OpRule:
    """Samples and channels are independent, but running statistics average over the batch."""
    rank = len(shape_of(operands(node)[0]))
    running = isinstance(argument(node, "running_mean"), fx.Node)
    names = dims(rank, {*range(2, rank), *([0] if running else [])})
    specs = dict.fromkeys(("weight", "bias", "running_mean", "running_var"), names[1])
    return bind_named(node, {"input": " ".join(names), **specs}, " ".join(names), saved=("input", "weight"))


def weight_norm(node: fx.Node) -> OpRule:
    """Rows along ``dim`` are scaled each to its own length, ``g``; -1: all as one."""
    v, dim = shape_of(operands(node)[0]), argument(node, "dim")
    names = dims(len(v), [d for d in range(len(v)) if d != dim])
    lengths = " ".join(names[d] if d == dim else "_" for d in range(len(shape_of(operands(node)[1]))))
    result = ", ".join([" ".join(names), lengths][: len(result_shapes(node))])
    return bind_node(node, f"{' '.join(names)}, {lengths} -> {result}", saved=(0, 1))


TABLE = {
    **each("layer_norm native_layer_norm rms_norm _fused_rms_norm", layer_norm),
    **each("_weight_norm _weight_norm_interface", weight_norm),
    **each("group_norm", group_norm),
    **each("batch_norm _native_batch_norm_legit_functional _native_batch_norm_legit_no_training", batch_norm),
    **each("native_batch_norm", batch_statistics),
    **each("instance_norm", instance_norm),
}
