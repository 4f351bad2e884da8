"""Rules of losses: ``none`` keeps the batch as factors, ``sum`` sums over them (the loss is P), ``mean`` fixes them.

Cross entropy may also be sharded over the classes, which no factor expresses: local kernel "vocab_cross_entropy" reduces the maximum,
the sum of exponentials and the picked logit, one number for each row, and every rank has the whole loss.
"""

from __future__ import annotations

from math import prod

from torch import fx

from autoshard.placement import R, S
from autoshard.program import operands, shape_of, tensors
from autoshard.rules.call import argument, aten, bind_named, bind_node, dims, each, shape, unsharded
from autoshard.rules.notation import Choice, Comm, OpRule

NONE, MEAN, SUM = 0, 1, 2  # torch's numbers of the reductions


def shard_classes(rule: OpRule, k: int) -> tuple[Choice, ...]:
    """Logits cut over their classes, everything else whole, the loss whole."""
    if rule.sizes["v"] < k:
        return ()
    dim = rule.operands[0].index(("v",))
    rows = tuple(f for group in rule.operands[0] for f in group if f != "v")
    payload = Comm("all_reduce", prod(rule.sizes[f] for f in rows), rows)
    return (Choice("shard v", (S(dim),) + (R,) * (len(rule.operands) - 1), (R,), "v", comms=(payload,) * 3),)


def classes(node: fx.Node) -> OpRule:
    """cross_entropy_loss, nll_loss: logits ``n v ...``, labels ``n ...``, or ``n v ...`` for label probabilities; ``v`` for weights."""
    logits, reduction = shape(node, "self"), argument(node, "reduction")
    at = 1 if len(logits) > 1 else 0
    batch = dims(len(logits) - 1, range(8) if reduction == MEAN else ())
    tokens = batch[:at] + ["v^"] + batch[at:]
    indexed = not tensors(argument(node, "target").meta["val"])[0].dtype.is_floating_point
    specs = {"self": " ".join(tokens), "target": " ".join(batch if indexed else tokens), "weight": "v^"}
    vocabulary = indexed and reduction != MEAN and len(logits) > 1 and node.target is aten("cross_entropy_loss")
    return bind_named(
        node,
        specs,
        " ".join(batch) if reduction == NONE else "",
        # of logits their log_softmax is kept, no operand; of log-probabilities, themselves
        saved=("target", "weight") if node.target is aten("cross_entropy_loss") else ("self", "target", "weight"),
        local={"v": "vocab_cross_entropy"} if vocabulary else {},
        special=(shard_classes,) if vocabulary else (),
    )


def elementwise_loss(node: fx.Node) -> OpRule:
    """mse_loss, binary_cross_entropy, ...: operands are broadcast together."""
    reduction = argument(node, "reduction")
    n, rank = len(operands(node)), max(len(shape_of(o)) for o in operands(node))
    text = ", ".join(["..."] * n) + (" -> ..." if reduction == NONE else " -> ")
    fixed = [f"d{i}" for i in range(rank)] if reduction == MEAN else []
    return bind_node(node, text, saved=tuple(range(n)), fixed=fixed)


def along_last(node: fx.Node) -> OpRule:
    """cosine_embedding_loss, triplet_margin_loss: the last dim of the vectors is compared as a whole."""
    rank = len(shape_of(operands(node)[0]))
    names = dims(rank, range(8) if argument(node, "reduction") == MEAN else [rank - 1])
    texts = [" ".join(names[: len(shape_of(o))]) for o in operands(node)]
    result = " ".join(names[:-1]) if argument(node, "reduction") == NONE else ""
    return bind_node(node, f"{', '.join(texts)} -> {result}", saved=tuple(range(len(texts))))


def by_sample(node: fx.Node) -> OpRule:
    """multi_margin_loss, multilabel_margin_loss: the classes of a sample are compared as a whole."""
    scores = shape(node, "self")
    batch = dims(len(scores) - 1, range(8) if argument(node, "reduction") == MEAN else ())
    text = " ".join([*batch, "c^"])
    target = text if len(shape(node, "target")) == len(scores) and scores == shape(node, "target") else " ".join(batch)
    specs = {"self": text, "target": target, "weight": "c^"}
    return bind_named(node, specs, " ".join(batch) if argument(node, "reduction") == NONE else "", saved=("self", "target"))


def ctc(node: fx.Node) -> OpRule:
    """Samples are independent if each has a row of ``targets``, and its lengths are tensors."""
    if len(shape(node, "log_probs")) != 3 or len(shape(node, "targets")) != 2:
        return unsharded(node)
    n = "n^" if argument(node, "reduction") == MEAN else "n"
    specs = {"log_probs": f"t^ {n} c^", "targets": f"{n} s^", "input_lengths": n, "target_lengths": n}
    return bind_named(node, specs, n if argument(node, "reduction") == NONE else "", saved=("log_probs", "targets", -1))


def cosine_similarity(node: fx.Node) -> OpRule:
    rank = max(len(shape_of(o)) for o in operands(node))
    dim = argument(node, "dim") % rank
    names = dims(rank, [dim])
    texts = [" ".join(names[rank - len(shape_of(o)) :]) for o in operands(node)]
    return bind_node(node, f"{', '.join(texts)} -> {' '.join(names[:dim] + names[dim + 1 :])}", saved=(0, 1))


def cdist(node: fx.Node) -> OpRule:
    return bind_node(node, "... p d^, ... r d^ -> ... p r", saved=(0, 1, -1))


def pairwise_distance(node: fx.Node) -> OpRule:
    """The last dim is compared as a whole."""
    return bind_node(node, f"... d^, ... d^ -> {'... _' if argument(node, 'keepdim') else '...'}", saved=(0, 1, -1))


TABLE = {
    **each("cross_entropy_loss nll_loss nll_loss_nd nll_loss2d", classes),
    **each("mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div "
           "soft_margin_loss poisson_nll_loss margin_ranking_loss hinge_embedding_loss", elementwise_loss),
    **each("cosine_embedding_loss triplet_margin_loss", along_last),
    **each("multi_margin_loss multilabel_margin_loss", by_sample),
    **each("ctc_loss.Tensor", ctc),
    **each("ctc_loss.IntList", unsharded),
    **each("cosine_similarity", cosine_similarity),
    **each("cdist", cdist),
    **each("pairwise_distance", pairwise_distance),
}  # fmt: skip
