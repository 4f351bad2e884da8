"""What can't be captured: every failure names the user's own line and says what to do."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from test_capture import Wrapped, check_equal, targets, traced
from torch import nn

from autoshard.capture import capture
from autoshard.errors import CaptureError


def message(function, **modules) -> str:
    with pytest.raises(CaptureError) as caught:
        traced(function, **modules)
    return str(caught.value)


def branch(model, x):
    if x.sum() > 0:
        return model.linear(x)
    return x


def cut(model, x):
    kept = int((x > 0).sum())
    return model.linear(x)[:kept]


def loop(model, x):
    total = 0
    for index in x.nonzero():
        total = total + model.linear(x)[index[0]]
    return total


@pytest.mark.parametrize("function, expression", [(branch, "x.sum() > 0"), (cut, "int((x > 0).sum())"), (loop, "x.nonzero()")])
def test_control_flow_by_data_names_line_and_expression(function, expression, capfd):
    text = message(function)
    assert "test_capture_errors.py:" in text and expression in text and "torch.where" in text
    assert "u0" not in text and "Traceback" not in text
    assert capfd.readouterr() == ("", "")


def test_sizes_and_numbers_by_data():
    assert "aten.index.Tensor gives a size that depends on the data" in message(lambda model, x: model.linear(x)[x > 0].sum())
    assert "gives a number that depends on the data" in message(lambda model, x: model.linear(x) * x.max().item())
    text = message(lambda model, x: F.ctc_loss(model.linear(x)[:, None], torch.ones(1, 1).long(), torch.tensor([3]), torch.tensor([1])))
    assert "aten._ctc_loss.Tensor, which gives a size that depends on the data: F.ctc_loss(" in text and "test_capture_errors.py:" in text


def test_branches_on_shapes_are_taken():
    assert targets(traced(lambda model, x: model.linear(x) if x.shape[0] == 3 else x)) == ["linear.default"]


def test_failures_of_the_model_itself():
    text = message(lambda model, x: model.linear(x) @ torch.zeros(5, 5))
    assert "[3, 4] X [5, 5]" in text and "torch.zeros(5, 5)" in text
    assert "forward takes no argument 'y'" in str(pytest.raises(CaptureError, capture, nn.Linear(4, 4), {"y": torch.zeros(3, 4)}).value)
    assert "missing a required argument: 'input'" in str(pytest.raises(CaptureError, capture, nn.Linear(4, 4), {}).value)
    assert "example_inputs is a int" in str(pytest.raises(CaptureError, capture, nn.Linear(4, 4), 3).value)


def test_running_statistics():
    model = Wrapped(lambda model, x: model.norm(model.linear(x)), norm=nn.BatchNorm1d(4))
    program = capture(model, {"x": torch.randn(3, 4)}).program
    assert program.updates == ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked")
    assert len(program.leaves) == 4 and len(program.results) == 1
    assert "batch_norm.default" in targets(capture(model.eval(), {"x": torch.randn(3, 4)}))
    model = Wrapped(lambda model, x: model.norm(model.linear(x).T[None]), norm=nn.InstanceNorm1d(4, track_running_stats=True))
    with pytest.raises(CaptureError, match="forward changes the buffer 'norm.running_mean' of module 'norm'"):
        capture(model, {"x": torch.randn(3, 4)})


def test_state_that_forward_changes():
    def clamp(model, x):
        with torch.no_grad():
            model.linear.weight.clamp_(-1, 1)
        return model.linear(x)

    assert "forward changes the parameter 'linear.weight'" in message(clamp)
    assert "forward changes the input 'x'" in message(lambda model, x: model.linear(x.add_(1)))


class Flip(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        return -grad


def test_gradients_that_a_trace_would_lose():
    text = message(lambda model, x: Flip.apply(model.linear(x)))
    assert "Flip, an autograd.Function with a backward of its own" in text and "Flip.apply(model.linear(x))" in text
    with pytest.raises(CaptureError, match="input 'input' requires grad"):
        capture(nn.Linear(4, 4), {"input": torch.randn(3, 4, requires_grad=True)})


def test_a_failed_capture_leaves_no_trace():
    apply = torch.autograd.Function.__dict__["apply"]
    with contextlib.suppress(CaptureError):
        traced(branch)
    assert torch.autograd.Function.__dict__["apply"] is apply
    check_equal(lambda model, x: model.linear(x))
