"""A program run as it is, in one process: what it must give is what the model gives."""

import torch
from torch import fx, nn

from autoshard.capture import Captured
from autoshard.program import Program


def run(captured: Captured, program: Program, model: nn.Module, batch: dict) -> list:
    """The output leaves of ``program`` on the model's own parameters; ``batch`` by the names of the program's inputs."""
    values = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    values |= captured.constants_values
    arguments = [values[param.name] for param in program.params.values()] + [batch[i.name] for i in program.inputs.values()]
    return fx.Interpreter(fx.GraphModule({}, program.graph)).run(*arguments)


def gradients(loss: torch.Tensor, model: nn.Module) -> dict[str, torch.Tensor | None]:
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {name: param.grad for name, param in model.named_parameters()}


def assert_same_gradients(actual: dict, expected: dict, tolerance: float = 1e-10) -> None:
    assert actual.keys() == expected.keys()
    for name, want in expected.items():
        got = actual[name]
        assert (got is None) == (want is None), name
        if want is not None:
            assert (got - want).abs().max() <= tolerance * max(want.abs().max(), 1e-3), name
