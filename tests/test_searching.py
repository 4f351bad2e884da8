"""The search over numbers of micro-batches: it plans in full only what can still be the best, and misses nothing by that."""

from types import SimpleNamespace

import numpy as np
from small import case

from autoshard.errors import InfeasibleError
from autoshard.mesh import Mesh
from autoshard.planning.choices import larger_microbatches, microbatch_candidates
from autoshard.planning.stages import narrowest
from autoshard.searching import wanted_of

MESH = Mesh(1, 1, 2)  # a batch of 8: 8, 4 and then 1
LIMIT = 100.0


def searched(seconds: dict[int, float], nbytes: dict[int, float], fitted: dict[int, float], mesh: Mesh = MESH):
    """The plan found (None: nothing fits), and which numbers were made to fit. fitted: seconds then; what is not listed can't be."""
    one, asked = case("gpt2"), []

    def draft(m):
        return SimpleNamespace(microbatches=m, step_seconds=seconds[m], peak_bytes=nbytes[m], solver={})

    def finish(plan, cutoff):
        asked.append(plan.microbatches)
        if plan.peak_bytes <= LIMIT:
            return plan
        if plan.microbatches not in fitted:
            raise InfeasibleError("too large")
        return SimpleNamespace(microbatches=plan.microbatches, step_seconds=fitted[plan.microbatches], peak_bytes=LIMIT, solver={})

    wanted = wanted_of(one.captured, "model", memory=LIMIT)
    try:
        return wanted.over_microbatches(mesh, draft, finish), asked
    except InfeasibleError:
        return None, asked


def numbers() -> list[int]:
    return [m for m in microbatch_candidates(case("gpt2").program, MESH, None) if m > 1]


def test_the_fastest_that_fits_is_found_first():
    few, many = sorted(numbers())[0], sorted(numbers())[-1]
    found, asked = searched({1: 9.0, **{m: 1 + 1 / m for m in numbers()}}, dict.fromkeys([1, *numbers()], 50.0), {})
    assert found.microbatches == many and asked == [many] and few != many


def test_what_need_not_fit_and_is_slower_anyhow_is_not_made_to_fit():
    first, second = numbers()[:2]
    seconds = {m: 5.0 for m in numbers()} | {first: 1.0}
    found, asked = searched(seconds, dict.fromkeys(numbers(), 200.0), {m: 2.0 for m in numbers()})
    assert found.microbatches == first and asked == [first]


def test_what_could_still_be_the_best_is_made_to_fit():
    """Without a pipeline 1 comes first, and as it does not fit, larger numbers; of these the largest, which needs the least memory."""
    seconds = {1: 5.0, 2: 1.0, 4: 5.0, 8: 1.5}
    found, asked = searched(seconds, dict.fromkeys(seconds, 200.0), {2: 2.0, 8: 1.6}, Mesh(1, 1, 1))
    assert found.microbatches == 8 and asked == [8, 2]
    found, asked = searched(seconds, dict.fromkeys(seconds, 200.0), {2: 1.2, 8: 1.6}, Mesh(1, 1, 1))
    assert found.microbatches == 2 and asked == [8, 2]


def test_where_the_smallest_pieces_do_not_fit_nothing_does_but_perhaps_the_whole():
    seconds = {1: 5.0, 2: 1.0, 4: 5.0, 8: 1.5}
    found, asked = searched(seconds, dict.fromkeys(seconds, 200.0), {2: 2.0}, Mesh(1, 1, 1))
    assert found is None and asked == [8, 1]
    found, asked = searched(seconds, dict.fromkeys(seconds, 200.0), {1: 6.0, 2: 2.0}, Mesh(1, 1, 1))
    assert found.microbatches == 1 and asked == [8, 1], "whose gradients are not added up"
    found, asked = searched({**seconds, 4: 0.9}, dict.fromkeys(seconds, 200.0), {2: 1.2, 8: 1.6}, Mesh(1, 1, 1))
    assert found.microbatches == 8 and asked == [8, 4], "4 do not fit, and neither would fewer"


def test_fewer_micro_batches_are_not_drafted_where_more_do_not_fit():
    most = max(numbers())
    assert larger_microbatches(case("gpt2").program, MESH, most) == []
    found, asked = searched({1: 9.0, **{m: 1 + 1 / m for m in numbers()}}, dict.fromkeys([1, *numbers()], 200.0), {})
    assert found is None and asked == [most, 1]
    found, asked = searched({m: 1 + 1 / m for m in numbers()}, dict.fromkeys(numbers(), 200.0), {most: 3.0})
    assert found.microbatches == most and asked == [most]


def test_the_narrowest_place_nearby():
    rng = np.random.default_rng(0)
    for _ in range(50):
        n, window = int(rng.integers(0, 12)), int(rng.integers(1, 5))
        possible = [bool(x) for x in rng.integers(0, 2, n)]
        sizes = [float(x) for x in rng.integers(0, 4, n)]
        spans = [slice(max(0, i - window), i + window + 1) for i in range(n)]
        near = [[s for s, ok in zip(sizes[span], possible[span]) if ok and s] for span in spans]
        assert narrowest(possible, sizes, window) == [min(found, default=float("inf")) for found in near]
