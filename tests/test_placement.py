"""The algebra of placements against a brute-force definition: the global indices that each rank holds."""

import itertools

import pytest
from definition import held
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from autoshard.errors import PlacementError
from autoshard.placement import (
    CONVERSIONS,
    R_STAR,
    P,
    R,
    S,
    blocks_now,
    bytes_sent,
    format_layout,
    largest,
    legal,
    local_shape,
    parse_layout,
    parse_placement,
    pieces,
    route,
    step_arguments,
    step_factor,
)

SIZES = [(1, 2), (2, 1), (2, 2), (2, 3), (3, 2), (4, 2), (2, 4), (1, 1)]
SHAPES = st.tuples(*[st.one_of(st.sampled_from([12, 24, 48]), st.integers(1, 26))] * 2)
SHARD = st.builds(S, st.integers(0, 1), st.sampled_from([1, 1, 1, 2, 3, 4, 6]))
LAYOUTS = st.tuples(*[st.one_of(SHARD, st.sampled_from([R, P, R_STAR]))] * 2)

MANY = settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])


def everyone(sizes):
    return itertools.product(*map(range, sizes))


def fair(layout, shape, sizes):
    """What ``legal`` promises, by brute force: every index is held once along the axes that cut, and the cuts are independent."""
    for dim, size in enumerate(shape):
        cutters = [a for a, p in enumerate(layout) if p.is_shard and p.dim == dim]
        if any(size % layout[a].blocks for a in cutters):
            return False
        holders = {}
        for coords in everyone(sizes):
            mine = held(size, dim, layout, sizes, coords)
            if not mine:
                return False
            for i in mine:
                holders.setdefault(i, set()).add(tuple(coords[a] for a in cutters))
        if any(len(where) != 1 for where in holders.values()) or len(holders) != size:
            return False
    return True


@given(st.integers(0, 60), st.integers(1, 9))
def test_pieces_are_those_of_chunk(size, k):
    step = -(-size // k)
    assert list(pieces(size, k)) == [len(range(size)[i * step : (i + 1) * step]) for i in range(k)]
    assert sum(pieces(size, k)) == size


@given(SHAPES, LAYOUTS, st.sampled_from(SIZES))
@MANY
def test_legal_layouts_hold_every_index_once_and_local_shape_counts_them(shape, layout, sizes):
    assume(legal(layout, shape, sizes))
    assert fair(layout, shape, sizes)
    for coords in everyone(sizes):
        assert local_shape(shape, layout, sizes, coords) == tuple(len(held(n, d, layout, sizes, coords)) for d, n in enumerate(shape))


@given(SHAPES, st.sampled_from(SIZES), SHARD, st.integers(0, 1))
def test_a_shard_along_one_axis_is_legal_whenever_it_is_fair(shape, sizes, shard, axis):
    layout = (shard, R) if axis == 0 else (R, shard)
    assert legal(layout, shape, sizes) == fair(layout, shape, sizes)


@given(SHAPES, LAYOUTS, st.sampled_from(SIZES), st.integers(0, 1))
@MANY
def test_blocks_now_are_the_blocks_of_what_the_rank_sees(shape, layout, sizes, axis):
    """Undo one axis; its pieces are then the shard S(dim/blocks_now) of what is left."""
    assume(layout[axis].is_shard and legal(layout, shape, sizes))
    dim = layout[axis].dim
    assume(not any(layout[a] == layout[axis] and sizes[a] > 1 for a in range(axis + 1, 2)))  # an inner cut would have to be undone first
    undone = layout[:axis] + (R,) + layout[axis + 1 :]
    blocks = blocks_now(layout, axis, sizes)
    for coords in everyone(sizes):
        seen = held(shape[dim], dim, undone, sizes, coords)
        local = held(len(seen), 0, (S(0, blocks),), (sizes[axis],), (coords[axis],))
        assert [seen[i] for i in local] == held(shape[dim], dim, layout, sizes, coords)


def plain(layout, sizes, grad):
    return tuple(R if k == 1 or (p == R_STAR and not grad) else p for p, k in zip(layout, sizes))


@given(SHAPES, LAYOUTS, LAYOUTS, st.sampled_from(SIZES), st.booleans())
@MANY
def test_routes_lead_there_by_legal_steps(shape, src, dst, sizes, grad):
    assume(legal(src, shape, sizes) and legal(dst, shape, sizes))
    src, dst = plain(src, sizes, grad), plain(dst, sizes, grad)
    steps = route(src, dst, shape, sizes, grad)
    assert steps is not None
    at = src
    for step in steps:
        assert step.before == at and legal(step.after, shape, sizes)
        assert [a for a in range(2) if step.before[a] != step.after[a]] == [step.axis] and sizes[step.axis] > 1
        assert step.conversion is CONVERSIONS[step.src.kind, step.dst.kind]
        for coords in everyone(sizes):
            check_step(step, shape, sizes, coords)
        at = step.after
    assert at == dst
    assert len(steps) <= 2 or any(p.is_shard for p in src + dst)


def check_step(step, shape, sizes, coords):
    """By the arguments that the runtime gets: what a shard is cut from, or gathered to, is the same as seen by every peer."""
    text, size = step_arguments(step, shape, sizes, coords)
    seen = [parse_placement(end) for end in text.split("->")]
    assert (size is not None) == step.src.is_shard
    undone = step.before[: step.axis] + (R,) + step.before[step.axis + 1 :]
    for state, layout in zip(seen, (step.before, step.after)):
        assert state.kind == layout[step.axis].kind and state.dim == layout[step.axis].dim
        if state.is_shard:
            whole = held(shape[state.dim], state.dim, undone, sizes, coords)
            local = held(len(whole), 0, (S(0, state.blocks),), (sizes[step.axis],), (coords[step.axis],))
            assert [whole[i] for i in local] == held(shape[state.dim], state.dim, layout, sizes, coords)
            if layout is step.before:
                assert size == len(whole)


@given(LAYOUTS)
def test_layouts_are_printed_and_read(layout):
    assert parse_layout(format_layout(layout)) == layout


@pytest.mark.parametrize("text", ["", "S", "S()", "S(-1)", "S(0/0)", "S(1/3", "r", "R**", "P(0)", "S(1,2)"])
def test_nonsense_is_refused(text):
    with pytest.raises(PlacementError, match="can't read the placement"):
        parse_placement(text)


def test_bytes_are_those_of_a_ring():
    assert bytes_sent("1", 100, 4) == 75
    assert bytes_sent("2", 100, 4) == 150
    assert bytes_sent("1/k", 100, 4) == 18.75
    assert bytes_sent("0", 100, 4) == 0
    (step,) = route((S(0), S(1)), (R, S(1)), (8, 6), (2, 3))
    whole = largest((8, 6), step.others, (2, 3))
    assert whole * step_factor(step, (2, 3), grad=True) == pytest.approx(8)  # half of the 16 elements that are whole along the axis
    (step,) = route((S(0), S(1)), (R_STAR, S(1)), (8, 6), (2, 3))
    assert whole * step_factor(step, (2, 3), grad=True) == pytest.approx(16)
    assert whole * step_factor(step, (2, 3), grad=False) == pytest.approx(8)


def test_a_value_without_gradient_does_not_tell_r_from_r_star():
    assert route((R, R), (R_STAR, R_STAR), (8, 6), (2, 3), grad=False) == ()
    assert len(route((R, R), (R_STAR, R_STAR), (8, 6), (2, 3))) == 2
    assert route((S(0), R), (R, R), (8, 6), (1, 3)) == ()


def test_an_inner_shard_in_the_way_is_gathered_first():
    steps = route((S(0), S(0)), (R, S(0)), (8,), (2, 2))
    assert [(s.axis, str(s.src), str(s.dst)) for s in steps] == [(1, "S(0)", "R"), (0, "S(0)", "R"), (1, "R", "S(0)")]
    (step,) = route((S(0, 3), S(0)), (R, S(0)), (24,), (2, 3))  # other factors of the dim are not in the way
    assert step_arguments(step, (24,), (2, 3), (0, 1)) == ("S(0) -> R", 8)
