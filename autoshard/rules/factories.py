"""Rules of ops that make a tensor out of numbers: there is nothing to shard, every rank makes the whole value (cutting it is free)."""

from __future__ import annotations

from autoshard.rules.call import each, unsharded

TABLE = {
    **each("arange arange.start arange.start_step full zeros ones empty.memory_format eye eye.m linspace scalar_tensor "
           "tril_indices triu_indices", unsharded),
    **each("new_full new_zeros new_ones new_empty", unsharded),
}  # fmt: skip
