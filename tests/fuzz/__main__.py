"""``python -m tests.fuzz --seeds 100 [--start 0] [--draws 1] [--no-shrink] [--seconds 600]``"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from random import Random

import torch

from .draws import Draw, draw
from .generate import generate
from .shrink import same_outcome, shrink
from .trial import Outcome, Subject, doubles


def subject(seed: int) -> tuple[Subject, Random]:
    """The model of a seed, and what its draws come from."""
    rng = Random(seed)
    torch.manual_seed(seed)
    return Subject(generate(rng), seed), rng


def outcomes(seed: int, draws: int):
    """(draw, outcome) of each draw of a seed."""
    one, rng = subject(seed)
    for _ in range(draws):
        chosen = draw(rng, one.batch, one.shapes)
        yield one, chosen, one.run(chosen)


def tell(one: Subject, chosen: Draw, outcome: Outcome, small: bool) -> str:
    """A failure as code that can be run."""
    spec, final = one.spec, chosen
    if small:
        spec, final = shrink(spec, chosen, lambda s, d: same_outcome(s, d, one.seed, outcome.key, outcome.kind))
        outcome = Subject(spec, one.seed).run(final)
    return f"{spec.source()}\n# {final}\n# {outcome.kind}:\n" + "".join(f"#   {line}\n" for line in outcome.text.splitlines()[-30:])


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.fuzz", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--draws", type=int, default=1, help="meshes and plans for each model")
    parser.add_argument("--no-shrink", action="store_true", help="print failing models as they are")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    options = parser.parse_args()
    began, counts, keys, done = time.monotonic(), Counter(), Counter(), 0
    with doubles():
        for seed in range(options.start, options.start + options.seeds):
            if time.monotonic() - began > options.seconds:
                break
            for i, (one, chosen, outcome) in enumerate(outcomes(seed, options.draws)):
                counts[outcome.kind] += 1
                if outcome.key:
                    keys[f"{outcome.kind}: {outcome.key}"] += 1
                if not outcome.good:
                    print(f"\n=== seed {seed}, draw {i}: {chosen}: {outcome.kind} {outcome.key}", flush=True)
                    if keys[f"{outcome.kind}: {outcome.key}"] <= 2:
                        print(tell(one, chosen, outcome, not options.no_shrink), flush=True)
            done += 1
            if done % 50 == 0:
                print(f"{done} seeds, {time.process_time():.0f} CPU seconds", file=sys.stderr, flush=True)
    print(f"{done} seeds in {time.monotonic() - began:.0f} s: " + ", ".join(f"{n} {kind}" for kind, n in counts.most_common()))
    for key, n in keys.most_common():
        print(f"  {n} {key}")
    return 0 if all(Outcome(kind).good for kind in counts) else 1


if __name__ == "__main__":
    sys.exit(main())
