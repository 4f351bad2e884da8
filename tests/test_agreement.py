"""Ranks that do not hold the same model, or are not given the same batch, are told so, all of them."""

import pytest
import torch

import autoshard
from autoshard.errors import MeshError, RunError
from examples import mlp
from tests.workers import run_on


def differ(rank):
    texts = []
    model, batch = mlp.tiny()
    torch.manual_seed(rank)
    try:
        autoshard.compile(mlp.MLP(), (2,), batch)
    except RunError as error:
        texts.append(str(error))
    sharded = autoshard.compile(model, (2,), batch)
    try:
        sharded(x=torch.randn(8, 16), labels=batch["labels"])
    except RunError as error:
        texts.append(str(error))
    assert torch.isfinite(sharded(**batch)[0])
    return texts


def test_weights_and_batch_must_be_the_same_everywhere():
    first, second = run_on(2, differ)
    assert first == second and len(first) == 2
    assert "the model's weights are not the same on all ranks: 'up.weight' of rank 1" in first[0] and "manual_seed" in first[0]
    assert "the arguments are not the same on all ranks: 'x' of rank 1" in first[1]


def test_a_rank_that_the_mesh_does_not_have():
    sharded = autoshard.compile(*_tiny())
    with pytest.raises(MeshError, match="rank 5"):
        sharded.source(5)


def _tiny():
    model, batch = mlp.tiny()
    return model, (1, 1, 1), batch
