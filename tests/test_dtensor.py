"""torch's DTensor, asked about the same ops as our rules: every difference is known."""

from __future__ import annotations

import pytest
from dtensor import GOLDEN, Oracle, report
from rule_samples import SAMPLES

from autoshard.rules.call import aten

AGREED = ("mm", "bmm", "add.Tensor", "relu", "_softmax", "native_layer_norm", "native_dropout", "permute", "sum", "index_select")


def test_ops_on_which_both_agree():
    ops = [aten(*name.split(".")) for name in AGREED]
    with Oracle() as oracle:
        assert all(map(oracle.knows, ops))
    lines = report({op: SAMPLES[op] for op in ops})
    assert not [line for line in lines if line.startswith("  ")], "\n".join(lines)


@pytest.mark.timeout(600)
@pytest.mark.slow  # about 25 s
def test_all_differences_are_written_down():
    """If not: read the difference, say in NOTES who is right, and write what ``python -m tests.dtensor`` prints to GOLDEN."""
    assert report() == GOLDEN.read_text().splitlines()
