"""Save on one mesh, go on with another: equal to a run that was never broken off."""

import copy
from dataclasses import replace

import pytest
import torch
from test_engine import Case, check_state
from torch.utils import _pytree as pytree
from workers import run_on

from autoshard.errors import PlanError, RunError
from autoshard.mesh import ORDER, Mesh
from autoshard.runtime.checkpoint import load, save
from autoshard.runtime.launch import open_folder

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


# --- between meshes whose ranks are counted in another order ----------------------------------------------------------------------------

ORDERS = (("tensor", "pipeline", "data"), None, ("data", "pipeline", "tensor"))


class Deep(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8, dtype=torch.float64) for _ in range(4))

    def forward(self, x, target):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return ((x - target) ** 2).mean()


def deep():
    g = torch.Generator().manual_seed(1)
    return Deep(), {name: torch.randn(8, 8, dtype=torch.float64, generator=g) for name in ("x", "target")}


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def a_step_in_each_order(rank, folder):
    """A step in each order: equal to as many on one device."""
    model, batch = deep()
    steps(model, sgd(model.parameters()), [batch] * len(ORDERS))
    for i, order in enumerate(ORDERS):
        sharded, _ = open_folder(f"{folder}/emitted {i}")
        world, (data, tensor, pipeline) = sharded.world, Mesh(2, 2, 2, order).coords(rank)
        assert [*world.device_mesh.get_coordinate()] == [pipeline, data, tensor]
        assert (world.data.group.rank(), world.tensor.group.rank(), world.pipeline.rank()) == (data, tensor, pipeline)
        optimizer = sharded.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
        if i:
            load(sharded, optimizer, f"{folder}/checkpoint {i - 1}")
        steps(sharded, optimizer, [batch])
        save(sharded, optimizer, f"{folder}/checkpoint {i}")
    for name, tensor in sharded.state_dict().items():
        torch.testing.assert_close(tensor, model.state_dict()[name], rtol=1e-10, atol=1e-14)
    return True


def test_any_order_to_any_order(tmp_path):
    from autoshard.compiler import emit_folder, plan

    model, batch = deep()
    pin = {f"layers.{i}.weight": {"tensor": f"S({i % 2})"} for i in range(4)}
    for i, order in enumerate(ORDERS):
        made = plan(model, Mesh(2, 2, 2, order), batch, microbatches=2, pin=pin, zero=2)
        emit_folder(model, (2, 2, 2), batch, made, tmp_path / f"emitted {i}")
    with pytest.raises(PlanError, match="for mesh 2,2,2:data,pipeline,tensor, not 2,2,2:pipeline,data,tensor"):
        emit_folder(model, Mesh(2, 2, 2, ORDER), batch, made, tmp_path / "another")
    assert run_on(8, a_step_in_each_order, str(tmp_path), timeout=110) == [True] * 8
