"""Runs a schedule's own list of actions, that of torch.distributed.pipelining, on made-up times: when it ends, and what is held at most."""

from collections import Counter, defaultdict
from types import SimpleNamespace

from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import PipelineScheduleMulti

from autoshard.schedule import schedule_of

FORWARD, BACKWARD, INPUT, WEIGHT = "FORWARD", "FULL_BACKWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT"


def actions(name, ranks, chunks, microbatches):
    """(kind, stage, micro-batch) in order, by rank."""
    if name in ("GPipe", "1F1B"):
        return {rank: list(_plain(name, rank, ranks, microbatches)) for rank in range(ranks)}
    cls = getattr(pipelining, f"Schedule{name}")
    assert issubclass(cls, PipelineScheduleMulti)
    stages = [
        SimpleNamespace(
            group_size=ranks, group_rank=0, num_stages=ranks * chunks, has_backward=True, is_first=s == 0, is_last=s == ranks * chunks - 1,
            stage_index=s, submod=None,
        )
        for s in schedule_of(name).stages_of(0, ranks, chunks)
    ]  # fmt: skip
    found = cls(stages, microbatches, loss_fn=lambda *_: None).pipeline_order
    return {r: [(a.computation_type.name, a.stage_index, a.microbatch_index) for a in order if a is not None] for r, order in found.items()}


def _plain(name, rank, ranks, m):
    """Those two are loops in torch, not lists."""
    ahead = m if name == "GPipe" else min(m, ranks - rank)
    yield from ((FORWARD, rank, i) for i in range(ahead))
    for i in range(m):
        yield BACKWARD, rank, i
        if ahead + i < m:
            yield FORWARD, rank, ahead + i


def run(name, ranks, chunks, microbatches, forward, inputs, weights):
    """(seconds of the step, most micro-batches held by each stage's rank at the rank's fullest moment, by stage).

    forward, inputs, weights: seconds of each stage, of forward and of the two parts of backward.
    """
    last, cost = ranks * chunks - 1, {FORWARD: forward, INPUT: inputs, WEIGHT: weights}
    done, free, held, most = {}, defaultdict(float), defaultdict(Counter), {}
    queues = actions(name, ranks, chunks, microbatches)
    while any(queues.values()):
        moved = False
        for rank, queue in queues.items():
            if not queue:
                continue
            kind, s, i = queue[0]
            needs = {
                FORWARD: [(FORWARD, s - 1, i)] if s else [],
                WEIGHT: [(INPUT, s, i)],
            }.get(kind, [(FORWARD, s, i)] + ([(INPUT, s + 1, i)] if s < last else []))
            if not all(need in done for need in needs):
                continue
            start = max([free[rank], *(done[need] for need in needs)])
            free[rank] = start + (inputs[s] + weights[s] if kind == BACKWARD else cost[kind][s])
            for kind_done in (INPUT, WEIGHT) if kind == BACKWARD else (kind,):
                done[kind_done, s, i] = free[rank]
            held[rank][s] += {FORWARD: 1, INPUT: 0}.get(kind, -1)
            if sum(held[rank].values()) > sum(most.get(rank, {}).values()):
                most[rank] = dict(held[rank])
            queue.pop(0)
            moved = True
        assert moved, "the schedule waits for itself"
    return max(free.values()), {s: n for at in most.values() for s, n in at.items()}


def put_off(name, ranks, chunks, microbatches):
    """By stage, the most micro-batches between the two parts of their backward when the first part of another is run."""
    most = {}
    for order in actions(name, ranks, chunks, microbatches).values():
        between = Counter()
        for kind, s, _ in order:
            if kind == INPUT:
                most[s] = max(most.get(s, 0), between[s])
            between[s] += {INPUT: 1, WEIGHT: -1}.get(kind, 0)
    return most
