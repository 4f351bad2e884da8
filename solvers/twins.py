"""Strategies that an op's neighbours can't tell apart: they leave and demand the same placements, and differ in what they cost.

What blocks a column stands for fit, together, less exactly than single ops could: where an answer leaves room, ops may take the faster of
their twins, each on its own.
"""

from __future__ import annotations

from collections import defaultdict

from .staged import RESIDENT, SLACK, Amount, StagedAnswer, StagedEvaluation, StagedProblem, evaluate_staged


def twins(problem: StagedProblem) -> dict[int, list[list[int]]]:
    """Of each op that has twins: for every strategy, all that are alike."""
    seen: list[list[list[int]]] = [[[] for _ in op.costs] for op in problem.ops]
    for value in problem.values:
        for k, placement in enumerate(value.placements):
            seen[value.op][k].append(placement)
    for use in problem.uses:
        for k, demand in enumerate(use.demands):
            seen[use.op][k].append(demand)
    found = {}
    for op, keys in enumerate(seen):
        alike: dict[tuple, list[int]] = defaultdict(list)
        for k, key in enumerate(keys):
            alike[tuple(key)].append(k)
        if len(alike) < len(keys):
            found[op] = [alike[tuple(key)] for key in keys]
    return found


def refined(problem: StagedProblem, answer: StagedAnswer, evaluation: StagedEvaluation) -> tuple[StagedAnswer, StagedEvaluation]:
    """The answer with twins that are faster wherever there is room for them, those that gain the most first."""
    room = [problem.limit * (1 + SLACK) - held for held in evaluation.memory]
    ends = [*answer.first[1:], len(problem.chain)]
    stage = [s for s, (start, end) in enumerate(zip(answer.first, ends)) for _ in range(start, end)]
    readers = _readers(problem, stage)
    gains = []
    for op, alike in twins(problem).items():
        costs = problem.ops[op].costs
        for block in problem.homes(op):
            have = answer.choices[op, block]
            for k in alike[have]:
                more = Amount(*(a - b for a, b in zip(costs[k], costs[have])))
                if max(more.seconds, more.once, more.peak) <= 0 and min(more.seconds, more.once) < 0:
                    gains.append((more.seconds, more.once, op, block, k, more))
    choices = dict(answer.choices)
    for *_, op, block, k, more in sorted(gains):
        stages = readers.get(op, []) if block == RESIDENT else [stage[block]]
        needed = {s: more.state + problem.in_flight[s] * more.saved for s in stages}
        if choices[op, block] == answer.choices[op, block] and all(nbytes <= room[s] for s, nbytes in needed.items()):
            choices[op, block] = k
            for s, nbytes in needed.items():
                room[s] -= nbytes
    other = StagedAnswer(answer.first, choices)
    found = evaluate_staged(problem, other)
    return (answer, evaluation) if found.violations or found.objective > evaluation.objective else (other, found)


def _readers(problem: StagedProblem, stage: list[int]) -> dict[int, list[int]]:
    """The stages that read each resident op."""
    found: dict[int, set[int]] = defaultdict(set)
    for use in problem.uses:
        found[problem.values[use.value].op].update(stage[user] for _, user in problem.links(use))
    return {op: sorted(stages) for op, stages in found.items()}
