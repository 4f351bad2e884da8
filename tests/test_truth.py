"""Predictions against runs on processes of this machine."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch

from autoshard import profiling
from autoshard.cluster import Cluster
from tests.truth.memory import CASES, Case, run
from tests.truth.meter import measure
from tests.truth.speed import spearman

SMALL = {"layers": 2, "width": 128, "batch": 8, "length": 64, "vocabulary": 500}


def test_the_meter_on_a_known_case():
    """Backward allocates as well, and what is not saved goes; 1000 x 1000 floats each."""
    x, w = torch.randn(1000, 1000), torch.randn(1000, 1000, requires_grad=True)

    def work():
        (x @ w).relu().sum().backward()

    # relu's result is saved. Beside it: the product until relu has run, then the product's gradient; at last that and the gradient of w
    assert measure(work).peak == pytest.approx(2 * 4e6, rel=0.01)
    assert w.grad is not None
    w.grad = None
    assert measure(lambda: torch.empty(250_000)).peak == 1_000_000


RUN = (
    Case("gpt2", "2,1,1", 2, "off", 2),
    Case("llama", "1,1,2", 0, "on", 2),
    Case("gpt2", "1,1,2", microbatches=4, schedule="InterleavedZeroBubble"),
)


@pytest.mark.parametrize("case", RUN, ids=str)
def test_predicted_bytes_are_those_of_a_run(case):
    """Each takes some seconds: it starts processes that train."""
    assert run(case, **SMALL).ratios() == pytest.approx([1.0] * 2, rel=0.1)


def test_a_limit_forces_something():
    """What needs no more than the limit as it is, is not forced by it."""
    case = Case("llama", "1,1,1", "auto", "auto", memory="16MiB")
    outcome = run(case, **SMALL)
    assert outcome.good and outcome.free.peak_bytes > outcome.plan.memory_limit and outcome.plan.regions and not outcome.free.regions
    assert not replace(outcome, plan=outcome.free).forced


def test_a_line_through_measurements():
    assert profiling.line([(0, 2.0), (10, 7.0), (1000, 502.0)]) == pytest.approx((2, 2))
    latency, rate = profiling.line([(1, 5.0), (1000, 4.9)])  # larger is not slower: all latency
    assert latency > 0 and rate > 1e5


def test_profile_measures_every_figure(monkeypatch, tmp_path):
    """With next to no repeats: that all of it is there and sensible, not that it is right. Starts processes, so it takes seconds."""
    monkeypatch.setattr(profiling, "SPAN", 0.001)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the machine may be busy
        cluster = profiling.profile(2)
    assert {(fit.kind, fit.ranks) for fit in cluster.fits} == {
        (kind, 2) for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
    }
    device = cluster.device
    assert device.kind == "cpu" and 0 < cluster.cores <= profiling.processors()
    assert 1e8 < device.peak["fp32"] < 1e13 and 1e8 < device.bandwidth < 1e12 and 1e-7 < device.launch < 1e-3
    assert {"linear", "tanh", "cross_entropy_loss", "scaled_dot_product_attention"} <= set(device.factors)
    assert {"optimizer", "accumulate", "view"} <= set(device.factors)
    assert all(factor > 0 for op, pair in device.factors.items() for factor in pair[: 1 if op == "accumulate" else 2])
    assert all(fit.work_latency > 0 and fit.work_bandwidth > 0 for fit in cluster.fits)
    path = tmp_path / "here.toml"
    path.write_text(cluster.to_toml())
    assert Cluster.of(path) == cluster


def test_rank_correlation():
    assert spearman([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert spearman([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(0.8)  # 1 - 6 * 2 / (4 * 15)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_predicted_bytes_of_larger_models(case):
    outcome = run(case)
    assert outcome.ratios() == pytest.approx([1.0] * len(outcome.readings), rel=0.1)
    assert outcome.within_limit and outcome.forced
