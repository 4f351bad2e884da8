"""What a sharded layout means, by brute force: the oracle of the tests of placements and conversions."""

from autoshard.placement import S


def held(size, dim, layout, sizes, coords):
    """The indices of a dim that a rank holds, by the words of the docstring.

    A dim of B blocks: each block is cut in k pieces; axes with equal blocks cut one after another, outer first; axes with different
    blocks cut different factors, so a rank holds what all of them leave it.
    """
    keep = set(range(size))
    for blocks in {p.blocks for p in layout if p.is_shard and p.dim == dim}:
        within = list(range(size // blocks))
        for p, k, c in zip(layout, sizes, coords):
            if p == S(dim, blocks):
                step = -(-len(within) // k)
                within = within[c * step : (c + 1) * step]
        keep &= {b * (size // blocks) + i for b in range(blocks) for i in within}
    return sorted(keep)
