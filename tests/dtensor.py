"""A second oracle: our rules against the sharding propagation of torch's DTensor, for every op that both know.

``python -m tests.dtensor`` prints the differences; ``tests/goldens/dtensor_differences.txt`` keeps them. Nothing communicates: two ranks of
the backend "fake", of which the propagator is asked what it would do. It is private: checked with torch 2.13.

Both sides are asked about one axis of two ranks. R stands for our R and R*, which DTensor does not tell apart. What only DTensor allows is
run in pieces, forward and backward, to see who is right.
"""

from __future__ import annotations

import itertools
import sys
import warnings
from collections import defaultdict
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, init_device_mesh
from torch.utils._pytree import tree_map_only

sys.path.insert(0, str(Path(__file__).parent))

from rule_samples import ARBITRARY, NO_BACKWARD, SAMPLES
from test_rules import resize

from autoshard.placement import R_STAR, P, Placement, R, S, local_shape
from autoshard.program import tensors
from autoshard.rules import choices, rule_for
from autoshard.rules.check import call, compare, node_of, tolerance

GOLDEN = Path(__file__).parent / "goldens" / "dtensor_differences.txt"
MOST = 200
"""Combinations of input placements that are asked for one call."""

HEADINGS = {
    "ours": "Ours alone: DTensor would redistribute these inputs, or fails. Ours is right: tests/test_rules.py runs all choices in pieces.",
    "result": "The same inputs, another result. Ours is right, see above; DTensor is where nothing else is said.",
    "theirs": "DTensor's alone: inputs that it takes as they are, and no choice of ours takes. Behind it, what came of it in pieces.",
}

ALL = "DTensor is wrong: no dims at all are all of them"
CANCEL = "DTensor is wrong: summands may cancel"
TRUTHS = "right; left out: backends do not add up truth values"
ONES = "right as long as no piece is of size 1; canonicalize turns squeeze into reshape, which has the choice"
GENERATOR = "random numbers: a state of the generator, not of the value"
NOTES = {
    **{(op, f"S({d}) -> P", f"DTensor: S({d})"): ALL for op in ("sum.dim_IntList", "mean.dim") for d in (0, 1)},
    ("logsumexp", "S(1) -> S(1)", "DTensor: S(0)"): "DTensor is wrong: the other dim is reduced, and kept",
    **{(op, "P -> P", None): CANCEL for op in ("any", "any.dim", "any.dims")},
    **{(op, f"S({d}) -> P", None): TRUTHS for op in ("any", "any.dim", "any.dims") for d in (0, 1)},
    ("nansum", "P -> P", None): "DTensor is wrong: a summand that is not a number would be left out alone",
    ("special_xlog1py", "P, R -> P", None): "DTensor is wrong at 0: summands of 0 times an infinite logarithm",
    ("embedding", "R, S(0) -> S(0)", None): "DTensor is wrong: gradients scaled by frequency need the ids of the whole batch",
    ("addmm", "P, R, P -> P", None): "right; left out: the right side is a weight, and weights are no summands",
    **{(op, line, None): ONES for op in ("squeeze", "squeeze.dim", "squeeze.dims") for line in ("S(0) -> S(0)", "S(2) -> S(1)")},
    **{(op, "P -> R", None): GENERATOR for op in ("randint_like", "randint_like.low_dtype")},
}
"""(op, placements, what DTensor says if it is another result) -> who is right, where the samples do not tell."""


class Oracle:
    """DTensor on one axis of two ranks, of which this process is the first."""

    def __enter__(self) -> Oracle:
        dist.init_process_group("fake", rank=0, world_size=2)
        self.mesh = init_device_mesh("cpu", (2,))
        self.dispatcher = DTensor._op_dispatcher
        self.propagator = self.dispatcher.sharding_propagator
        return self

    def __exit__(self, *_) -> None:
        dist.destroy_process_group()

    def knows(self, op) -> bool:
        return op in self.propagator.op_strategy_funcs or op in self.propagator.op_single_dim_strategy_funcs

    def _value(self, value: torch.Tensor, place: str) -> DTensor:
        placement = Replicate() if place == "R" else Partial() if place == "P" else Shard(int(place[2:-1]))
        local = value.chunk(2, placement.dim)[0] if isinstance(placement, Shard) else value
        return DTensor.from_local(local, self.mesh, [placement], run_check=False, shape=value.shape, stride=value.stride())

    def results(self, op, sample, places: tuple[str, ...]) -> tuple[str, ...] | None:
        """The placements of the results, if DTensor takes inputs so placed as they are; None if it redistributes, or fails."""
        args, kwargs = split(sample)
        left = iter(places)
        args, kwargs = tree_map_only(torch.Tensor, lambda t: self._value(t, next(left)), (tuple(args), kwargs))
        try:
            schema = self.dispatcher.unwrap_to_op_info(op, args, kwargs).schema
            found = self.propagator.propagate_op_sharding_non_cached(schema)
        except Exception:
            return None
        if found.needs_redistribute and placements(found.redistribute_schema) != placements(schema):
            return None
        specs = found.output_spec if isinstance(found.output_spec, (tuple, list)) else (found.output_spec,)
        return tuple(text(spec.placements[0]) for spec in specs if spec is not None)


def split(sample: tuple) -> tuple[tuple, dict]:
    return (sample[:-1], sample[-1]) if isinstance(sample[-1], dict) else (sample, {})


def placements(schema) -> list[str]:
    return [text(spec.placements[0]) for spec in schema.args_spec]


def text(placement) -> str:
    if isinstance(placement, Shard):
        return f"S({placement.dim})"
    if type(placement) is Partial:
        return "P" if placement.reduce_op == "sum" else f"P({placement.reduce_op})"
    if placement.is_partial():  # of a norm, of an embedding's mask
        return f"P({type(placement).__name__.strip('_')})"
    if placement.is_replicate():
        return "R"
    return f"S({placement.dim}/{placement.split_factor})"  # a blocked shard is DTensor's strided one


def plain(placement: Placement) -> str:
    return "R" if placement == R_STAR else str(placement)


def combinations(values: list[torch.Tensor]) -> list[tuple[str, ...]]:
    """Input placements to ask about: all of them; for many operands those of one kind only."""
    options = [
        ["R", *(f"S({d})" for d, n in enumerate(v.shape) if n > 1), *["P"] * (v.is_floating_point() or v.is_complex())] for v in values
    ]
    found = list(itertools.islice(itertools.product(*options), MOST + 1))
    if len(found) > MOST:
        alike = {o for option in options for o in option}
        found = [tuple(o if o in option else "R" for option in options) for o in sorted(alike)]
    return found


def differences(oracle: Oracle, op, sample) -> list[tuple[str, str, str]]:
    """(heading, inputs -> results, remark) of one call."""
    node, values = node_of(op, *split(sample))
    ours: dict[tuple[str, ...], set[tuple[str, ...]]] = defaultdict(set)
    for choice in choices(rule_for(node), 2):
        if all(p.blocks == 1 for p in choice.operands):
            ours[tuple(map(plain, choice.operands))].add(tuple(map(plain, choice.results)))
    found = []
    for places in dict.fromkeys([*ours, *combinations(values)]):
        theirs = oracle.results(op, sample, places)
        line = ", ".join(places) or "()"
        if places in ours and theirs is None:
            found += [("ours", f"{line} -> {', '.join(mine)}", "") for mine in sorted(ours[places])]
        elif places in ours and theirs not in ours[places]:
            mine = " or ".join(", ".join(m) for m in sorted(ours[places]))
            found.append(("result", f"{line} -> {mine}", f"DTensor: {', '.join(theirs)}"))
        elif places not in ours and theirs is not None:
            found.append(("theirs", f"{line} -> {', '.join(theirs)}", verdict(node, values, places, theirs)))
    return found


def verdict(node, values, places: tuple[str, ...], results: tuple[str, ...]) -> str:
    """Who is right about a choice that only DTensor has."""
    if any(r.startswith("P(") for r in results):
        return "no state of ours: P is a sum"
    if node.target in ARBITRARY:
        return GENERATOR
    wholes = [tuple(t.shape) for t in tensors(node.meta["val"])]
    limit = tolerance([*values, *tensors(node.meta["val"])])
    frozen = frozenset(range(len(values))) if node.target in NO_BACKWARD else frozenset()
    least = float("inf")
    options = [[R, R_STAR] if p == "R" else [P if p == "P" else S(*map(int, p[2:-1].split('/')))] for p in (*places, *results)]
    for states in itertools.product(*options):
        ins, outs = [(s,) for s in states[: len(places)]], [(s,) for s in states[len(places) :]]

        def run(coords, local, peers, outs=outs):
            if not coords:
                return call(node, local)
            target, args = resize(node, local, [local_shape(s, layout, (2,), coords) for s, layout in zip(wholes, outs)])
            return call(node, local, target, args)

        try:
            errors = compare(values, tuple(ins), tuple(outs), (2,), run, frozen)
        except Exception:
            continue
        if max(errors.values()) <= limit:
            return f"right: {', '.join(str(i[0]) for i in ins)} -> {', '.join(str(o[0]) for o in outs)}"
        least = min(least, max(e for what, e in errors.items() if what.startswith("result")))
    if least <= limit:
        return "right forward; no state of the gradient fits"
    return "wrong in pieces" if least < float("inf") else "does not run on pieces"


def report(samples: dict = SAMPLES) -> list[str]:
    """Lines of text: every difference, and the ops that have it."""
    torch.manual_seed(0)
    ops: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    with Oracle() as oracle, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        known = [op for op in samples if oracle.knows(op)]
        for op in known:
            name = str(op).removeprefix("aten.").removesuffix(".default")
            for sample in samples[op]:
                for heading, line, remark in differences(oracle, op, sample):
                    note = NOTES.get((name, line, remark if heading == "result" else None))
                    row = heading, line, f"{remark}; {note}" if heading == "result" and note else note or remark
                    if name not in ops[row]:
                        ops[row].append(name)
    lines = [f"Rules of autoshard and of DTensor (torch {torch.__version__.partition('+')[0]}), one axis of two ranks."]
    for heading, title in HEADINGS.items():
        lines += ["", title]
        merged: dict[tuple[str, ...], list[tuple[str, str]]] = defaultdict(list)
        for (kind, line, remark), names in ops.items():
            if kind == heading:
                merged[tuple(names)].append((line, remark))
        for names, rows in merged.items():
            lines += ["", f"  {', '.join(names)}"]
            lines += [f"    {line:32} {remark}".rstrip() for line, remark in rows]
    return lines


if __name__ == "__main__":
    print("\n".join(report()))
