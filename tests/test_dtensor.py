"""torch's DTensor, asked about the same ops as our rules: every difference is known."""

from __future__ import annotations

import pytest
from dtensor import GOLDEN, report
from rule_samples import SAMPLES

from autoshard.rules.call import aten

AGREED = ("mm", "bmm", "add.Tensor", "relu", "_softmax", "native_layer_norm", "native_dropout", "permute", "sum", "index_select")


def test_ops_on_which_both_agree():
    ops = [aten(*name.split(".")) for name in AGREED]
    lines = report({op: SAMPLES[op] for op in ops})
    assert lines[0].endswith(f"{len(ops)} ops, one axis of two ranks.")
    assert not [line for line in lines if line.startswith("  ")], "\n".join(lines)


@pytest.mark.slow  # about 25 s
def test_all_differences_are_written_down():
    """If not: read the difference, say in NOTES who is right, and write what ``python -m tests.dtensor`` prints to GOLDEN."""
    assert report() == GOLDEN.read_text().splitlines()
