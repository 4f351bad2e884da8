"""The rule of scaled dot-product attention: batch and heads are factors; keys are never cut, queries only without a causal mask."""

from __future__ import annotations

from math import prod

from torch import fx

from autoshard.program import shape_of
from autoshard.rules.call import argument, bind_named, each, needs_grad, shape
from autoshard.rules.notation import OpRule


def attention(node: fx.Node) -> OpRule:
    """``b h s d^, b h t^ d^, b h t^ e^ [, mask] -> b h s e^``; grouped-query heads are ``(kv rep)``, so rep can be cut where kv can't."""
    query, key, value = (shape(node, name) for name in ("query", "key", "value"))
    rank = len(query)
    lead = [f"d{i}" for i in range(rank - 2)]
    q_lead, kv_lead = list(lead), list(lead)
    if argument(node, "enable_gqa") and query[-3] != key[-3]:
        q_lead[-1], kv_lead[-1] = ("rep", "_") if key[-3] == 1 else ("(kv rep)", "kv")
    s = "s^" if argument(node, "is_causal") else "s"
    specs = {
        "query": " ".join([*q_lead, s, "d^"]),
        "key": " ".join([*kv_lead, "t^", "d^"]),
        "value": " ".join([*kv_lead, "t^", "e^"]),
    }
    mask = argument(node, "attn_mask")
    if isinstance(mask, fx.Node):
        tokens = [*q_lead, s, "t^"]
        sizes = shape_of(mask)
        tokens = tokens[rank - len(sizes) :]
        specs["attn_mask"] = " ".join("_" if n == 1 and t.startswith("(") else t for n, t in zip(sizes, tokens))
    flops = 2.0 * prod(query[:-1]) * key[-2] * (query[-1] + value[-1])
    saved = ("query", "key", "value", "attn_mask", -1) if needs_grad(node) else ()
    return bind_named(node, specs, " ".join([*q_lead, s, "e^"]), saved=saved, flops=flops)


TABLE = each("scaled_dot_product_attention", attention)
