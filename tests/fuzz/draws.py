"""What a model is run on: a mesh, a number of micro-batches, pins, and a plan that need not be the cheapest."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random

from autoshard.planning.planner import CHEAPEST, Solvers
from autoshard.solvers import cuts, sharding
from autoshard.solvers.problem import ShardingProblem, ShardingSolution, evaluate

LARGEST = 8  # ranks


@dataclass(frozen=True)
class Draw:
    """solver: seed of the random choice of strategies, cuts and, for each weight, of a level up to ``zero``; None: the cheapest."""

    mesh: tuple[int, int, int]
    microbatches: int = 1
    pins: dict[str, dict[str, str]] = field(default_factory=dict)
    solver: int | None = None
    zero: int = 0
    recompute: bool = False

    def __str__(self) -> str:
        how = "cheapest plan" if self.solver is None else f"random plan {self.solver}"
        how += f", ZeRO {self.zero}" * (self.zero > 0) + ", recomputed" * self.recompute
        pins = f", pin={self.pins}" if self.pins else ""
        return f"mesh {','.join(map(str, self.mesh))}, {self.microbatches} micro-batches, {how}{pins}"

    def smaller(self) -> list[Draw]:
        """Draws with less in them, the simplest first."""
        found = []
        for axis, k in enumerate(self.mesh):
            found += [replace(self, mesh=(*self.mesh[:axis], n, *self.mesh[axis + 1 :])) for n in range(1, k)]
        found += [replace(self, microbatches=m) for m in range(1, self.microbatches) if self.microbatches % m == 0]
        found += [replace(self, pins={k: v for k, v in self.pins.items() if k != name}) for name in self.pins]
        found += [replace(self, zero=level) for level in range(self.zero)]
        if self.recompute:
            found.append(replace(self, recompute=False))
        if self.solver is not None:
            found.append(replace(self, solver=None))
        return found


def draw(rng: Random, batch: int, shapes: dict[str, tuple[int, ...]]) -> Draw:
    """``shapes``: of parameters and inputs, by name."""
    mesh = (1, 1, 1)
    while mesh == (1, 1, 1) or mesh[0] * mesh[1] * mesh[2] > LARGEST:
        mesh = (rng.choice((1, 1, 2, 2, 3)), rng.choice((1, 2, 2, 3, 4)), rng.choice((1, 1, 1, 2, 2, 3)))
    divisors = [m for m in range(1, batch + 1) if batch % m == 0]
    m = rng.choice(divisors) if mesh[2] > 1 or rng.random() < 0.3 else 1
    if rng.random() < 0.02:
        m += 1
    pins: dict[str, dict[str, str]] = {}
    for name, shape in shapes.items():
        if rng.random() < 0.08:
            dims = [d for d, n in enumerate(shape) if n > 1]
            axis = "data" if name.startswith("x") and rng.random() < 0.3 else "tensor"
            pins[name] = {axis: f"S({rng.choice(dims)})" if dims and rng.random() < 0.8 else "R"}
    zero = rng.randint(1, 3) if mesh[0] > 1 and rng.random() < 0.4 else 0
    return Draw(mesh, m, pins, None if rng.random() < 0.2 else rng.randrange(10**6), zero, rng.random() < 0.25)


def lowered(seed: int | None, zero: dict[str, int]) -> dict[str, int]:
    """ZeRO levels by parameter, some of them lower: each weight has its own."""
    rng = Random(seed)
    mixed = seed is not None and rng.random() < 0.5
    return {name: rng.randrange(level + 1) if mixed and 0 < level < 3 else level for name, level in zero.items()}


def solvers(seed: int | None) -> Solvers:
    """The cheapest answers, or random legal ones."""
    if seed is None:
        return CHEAPEST
    return Solvers(
        lambda problem, time_limit: _random_shardings(problem, Random(seed)), lambda problem: _random_cuts(problem, Random(seed))
    )


def _random_shardings(problem: ShardingProblem, rng: Random) -> ShardingSolution:
    """Strategy by strategy in order, each one that can take what was chosen before.

    Lazy draws take strategies that need few conversions, so that values stay sharded over many ops; others take any.
    """
    lazy = rng.choice((0.0, 0.5, 0.9, 1.0))
    for _ in range(30):
        choices = _walk(problem, rng, lazy)
        if not evaluate(problem, choices).violations:
            return ShardingSolution(tuple(choices), 0.0, 0.0, 0.0, 0.0, "random", "random", 0)
    return sharding.solve(problem)


def _walk(problem: ShardingProblem, rng: Random, lazy: float) -> list[int]:
    uses: dict[int, list] = {}
    for use in problem.uses:
        uses.setdefault(use.op, []).append(use)
    choices: list[int] = []
    for index, op in enumerate(problem.ops):
        moved: dict[int, int] = {}
        for s in range(len(op.costs)):
            moves = 0
            for use in uses.get(index, []):
                value = problem.values[use.value]
                if value.op < index:
                    have, want = value.placements[choices[value.op]], use.demands[s]
                    moves += 0 if have == want else 1 if (have, want) in value.moves else 1000
            moved[s] = moves
        fewest = min(moved.values())
        possible = [s for s, n in moved.items() if n < 1000] or list(moved)
        choices.append(rng.choice([s for s, n in moved.items() if n == fewest] if rng.random() < lazy else possible))
    return choices


def _random_cuts(problem: cuts.CutProblem, rng: Random) -> cuts.CutSolution:
    legal = [i + 1 for i, boundary in enumerate(problem.boundaries) if boundary.legal]
    first = (0, *sorted(rng.sample(legal, problem.stages - 1)))
    return replace(cuts.solve_cuts(problem), first=first)
