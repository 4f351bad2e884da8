"""Let forward return its loss, and nothing else for its caller: what else it returned is kept for every micro-batch, and may be the most.

before::

    return (loss, logits, running_mean)    # two results, and a buffer's new value

after::

    return (loss, running_mean)
"""

from __future__ import annotations

from autoshard.program import Program


def loss_alone(program: Program) -> Program:
    """A copy without the results that are not the loss; it has one. What made them is left, for ``canonicalize`` to remove."""
    out = program.copy()
    leaves, results = out.leaves, out.results
    out.output.args = ([results[out.loss], *leaves[len(results) :]],)
    out.loss = 0
    return out
