"""Save on one mesh, go on with another: equal to a run that was never broken off."""

import copy
from dataclasses import replace

import pytest
import torch
from test_engine import Case, check_state
from torch.utils import _pytree as pytree
from workers import run_on

from autoshard.errors import RunError
from autoshard.runtime.checkpoint import load, save

MODELS = {
    "mlp": {2: [((2, 1, 1), 1), ((1, 2, 1), 1)], 1: [((1, 1, 1), 1)]},
    "tied": {2: [((1, 1, 2), 4), ((2, 1, 1), 1)], 1: [((1, 1, 1), 2)]},
}


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.02, betas=(0.8, 0.9))


def steps(module, optimizer, batches):
    for batch in batches:
        pytree.tree_leaves(module(**batch))[0].backward()
        optimizer.step()
        optimizer.zero_grad()


def save_all(rank, folder, world):
    """Two steps, then save, on every mesh of this many ranks."""
    for kind, meshes in MODELS.items():
        for mesh, m in meshes[world]:
            case = Case(kind, mesh, m)
            sharded = case.sharded()
            optimizer = adamw(sharded.parameters())
            optimizer.param_groups[0]["lr"] = 0.01  # as a schedule would
            steps(sharded, optimizer, case.batches[:2])
            save(sharded, optimizer, f"{folder}/{kind}-{mesh}")


def go_on(rank, folder, world):
    """Load every checkpoint on every mesh of this many ranks; one step more is the third of an unbroken run."""
    for kind, meshes in MODELS.items():
        for mesh, m in meshes[world]:
            case = Case(kind, mesh, m)
            model = copy.deepcopy(case.model)
            unbroken = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.8, 0.9))
            steps(model, unbroken, case.batches)
            for other in [*meshes[1], *meshes[2]]:
                path = f"{folder}/{kind}-{other[0]}"
                sharded = case.sharded()
                optimizer = torch.optim.AdamW(sharded.parameters(), lr=0.5)
                load(sharded, optimizer, path)
                assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)
                steps(sharded, optimizer, case.batches[2:])
                check_state(sharded, model)
                trained = [p for p in sharded.parameters() if p in optimizer.state]
                assert all(optimizer.state[p]["step"] == 3 and optimizer.state[p]["exp_avg"].shape == p.shape for p in trained)
                load(sharded, None, path)
    wrong = Case("mlp", meshes[world][0][0] if world == 1 else (2, 1, 1)).sharded()
    with pytest.raises(RunError, match="'up.weight' is missing from the checkpoint"):
        load(wrong, None, f"{folder}/tied-(1, 1, 1)")
    with pytest.raises(RunError, match="no checkpoint in"):
        load(wrong, None, f"{folder}/nothing")
    return True


def test_any_mesh_to_any_mesh(tmp_path):
    save_all(0, str(tmp_path), 1)
    run_on(2, save_all, str(tmp_path), 2, timeout=110)
    go_on(0, str(tmp_path), 1)
    assert run_on(2, go_on, str(tmp_path), 2, timeout=110) == [True] * 2


def test_other_shape_and_no_optimizer(tmp_path):
    case = Case("mlp", (1, 1, 1))
    sharded = case.sharded()
    save(sharded, None, tmp_path)
    save(sharded, None, tmp_path)  # over the one that is there
    with pytest.raises(RunError, match="holds no optimizer"):
        load(sharded, adamw(sharded.parameters()), tmp_path)
    sharded.catalogue["up.bias"] = replace(sharded.catalogue["up.bias"], shape=(9,))
    with pytest.raises(RunError, match=r"'up.bias' has shape \(10,\) in the checkpoint; the model's is \(9,\)"):
        load(sharded, None, tmp_path)
