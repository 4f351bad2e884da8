"""How long the solvers take as problems grow: ``python tests/benchmarks/solver_scale.py`` (about a minute on one core)."""

import random
from itertools import product

from autoshard.solvers.cuts import Boundary, CutProblem, Item, solve_cuts
from autoshard.solvers.sharding import Op, ShardingProblem, Use, Value, solve

# What one axis may do with an op: (placements demanded of the operands, placement of the result, whether the work is divided).
# R whole; C whole, its gradient summed later; P summands; S0, S1, S2 shards of a dim.
AXIS_CHOICES = {
    "weight": [((), "R", False), ((), "S0", True), ((), "S1", True)],
    "norm": [(("R", "R"), "R", False), (("C", "C"), "C", False), (("S0", "C"), "S0", True), (("S1", "C"), "S1", True)],
    "unary": [(("R",), "R", False), (("C",), "C", False), *(((s,), s, True) for s in ("S0", "S1", "S2"))],
    "mix": [(("R",) * 3, "R", False), (("C",) * 3, "C", False), (("S0",) * 3, "S0", True), (("S2",) * 3, "S2", True)],
    "add": [*(((s,) * 2, s, s[0] == "S") for s in ("R", "C", "P", "S0", "S1", "S2"))],
}
AXIS_CHOICES["matmul"] = AXIS_CHOICES["norm"] + [(("C", "S0"), "S2", True), (("S2", "S1"), "P", True)]
AXIS_CHOICES["input"] = [((), p, p != "R") for p in ("R", "S0")]
# bytes sent, forward and backward, as a share of the value's bytes
AXIS_MOVES = {("S", "R"): 1, ("S", "C"): 2, ("S", "P"): 0, ("R", "S"): 1, ("R", "C"): 2, ("R", "P"): 0, ("S", "S"): 0.25}
AXIS_MOVES |= {("C", "S"): 0, ("C", "R"): 0, ("C", "P"): 0, ("P", "S"): 2, ("P", "R"): 2, ("P", "C"): 4}
STATES = ("R", "C", "P", "S0", "S1", "S2")
LAYOUTS = tuple(product(STATES, STATES))  # over (data, tensor)


def layered(layers: int, seed: int, count: float = 1.0) -> ShardingProblem:
    """A transformer-like chain on two axes, sizes and speeds at random: two residual branches a layer, weights, three-way sharing."""
    rng = random.Random(seed)
    ops: list[Op] = []
    values: list[Value] = []
    uses: list[Use] = []

    def add(name: str, kind: str, *operands: int) -> int:
        seconds, size = rng.uniform(1e-5, 1e-3), rng.uniform(1e-5, 3e-4)
        chosen = list(product(AXIS_CHOICES[kind], AXIS_CHOICES[kind]))
        costs = tuple(seconds * rng.uniform(0.9, 1.1) / (4 if d[2] else 1) / (8 if t[2] else 1) for d, t in chosen)
        ops.append(Op(name, costs, count))
        moves = {}
        for p, q in product(LAYOUTS, LAYOUTS):
            steps = [(a[0], b[0]) for a, b in zip(p, q) if a != b]
            if p != q and all(step in AXIS_MOVES for step in steps):
                moves[LAYOUTS.index(p), LAYOUTS.index(q)] = sum(5e-6 * (AXIS_MOVES[s] > 0) + size * AXIS_MOVES[s] for s in steps)
        values.append(Value(name, len(ops) - 1, tuple(LAYOUTS.index((d[1], t[1])) for d, t in chosen), moves, count))
        for i, operand in enumerate(operands):
            uses.append(Use(operand, len(ops) - 1, tuple(LAYOUTS.index((d[0][i], t[0][i])) for d, t in chosen)))
        return len(values) - 1

    def matmul(name: str, x: int) -> int:
        return add(name, "matmul", x, add(f"{name}.weight", "weight"))

    x = add("input", "input")
    for layer in range(layers):
        for branch in ("attention", "mlp"):
            here = f"{layer}.{branch}"
            norm = add(f"{here}.norm", "norm", x, add(f"{here}.norm.weight", "weight"))
            paths = [matmul(f"{here}.in{i}", norm) for i in range(3)]
            paths = [add(f"{here}.unary{i}", "unary", add(f"{here}.view{i}", "unary", path)) for i, path in enumerate(paths)]
            x = add(f"{here}.add", "add", x, matmul(f"{here}.out", add(f"{here}.mix", "mix", *paths)))
    return ShardingProblem(tuple(ops), tuple(values), tuple(uses))


def random_cuts(items: int, stages: int, microbatches: int, seed: int, limit: float | None = None) -> CutProblem:
    """Items that all differ, and every boundary legal."""
    rng = random.Random(seed)
    chain = tuple(Item(*(rng.uniform(0.5, 2.0) for _ in range(4))) for _ in range(items))
    boundaries = tuple(Boundary(rng.uniform(0.01, 0.3)) for _ in range(items - 1))
    return CutProblem(chain, boundaries, stages, microbatches, limit)


if __name__ == "__main__":
    print("layers    ops  strategies  pairs of uses  variables  build s  total s  gap")
    for layers in (1, 2, 4, 8):
        problem = layered(layers, seed=0)
        pairs = sum(
            sum(p == q or (p, q) in value.moves for p in set(value.placements) for q in set(use.demands))
            for use in problem.uses
            for value in (problem.values[use.value],)
        )
        solution = solve(problem)
        print(
            f"{layers:6} {len(problem.ops):6} {sum(len(op.costs) for op in problem.ops):11} {pairs:14} {solution.variables:10}"
            f" {solution.build_seconds:8.2f} {solution.seconds:8.2f}  {solution.gap:.1e} {solution.status}",
            flush=True,
        )
    print("items  stages  micro-batches  total s  passes  gap")
    for items, stages, microbatches in ((48, 4, 32), (100, 8, 64), (400, 16, 4), (400, 16, 64)):
        cut = solve_cuts(random_cuts(items, stages, microbatches, seed=0))
        gap = (cut.objective - cut.bound) / cut.objective
        print(f"{items:5} {stages:7} {microbatches:14} {cut.seconds:8.2f} {cut.passes:7}  {gap:.1e} {cut.status}")
