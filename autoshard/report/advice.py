"""What an error says where nothing fits: what is in the way, what would be enough, and what would help."""

from __future__ import annotations

from autoshard.planning.advice import Advice
from autoshard.report.explain import pinned
from autoshard.report.tables import Line, Part, Table
from autoshard.report.units import duration, size


def headline(advice: Advice) -> str:
    """One sentence."""
    rank = "a rank" if advice.stage is None else f"a rank of stage {advice.stage}"
    needs = f"needs {size(advice.least)}" + (" at least" if advice.stage is None else " in the smallest plan found")
    text = f"nothing fits on mesh {advice.asked}: {rank} {needs}"
    if advice.asked != advice.mesh:
        text = f"nothing fits on any mesh of {advice.asked} devices: on mesh {advice.mesh} {rank} {needs}"
    text += f", the limit is {size(advice.limit)}"
    if advice.memory:
        category, most = max(advice.memory.items(), key=lambda item: item[1])
        text += f"; the largest part is {category}, {size(most)}"
    return text


def details(advice: Advice) -> list[Part]:
    """What follows the sentence."""
    fewest, most = min(advice.numbers), max(advice.numbers)
    tried = f"{fewest} to {_batches(most)}" if most > fewest else _batches(most)
    parts: list[Part] = [Line(f"asked for: mesh {advice.asked} of {advice.cluster}, {size(advice.limit)} a rank, {tried}")]
    parts += map(Line, pinned(advice.pins))
    if advice.memory and advice.microbatches:
        held = ", ".join(f"{name} {size(nbytes)}" for name, nbytes in advice.memory.items())
        parts.append(Line(f"that rank, in {_batches(advice.microbatches)}: {held}"))
    parts.append(Line(_enough(advice)))
    if advice.suggestions:
        parts.append(Line("what helps, nearest first, each planned with all else as it was asked for:"))
        found = [(s.text, s.found) for s in advice.suggestions]
        rows = tuple((text, size(f.peak_bytes), duration(f.step_seconds), str(f.microbatches)) for text, f in found)
        parts.append(Table(("", ">fullest rank", ">step", ">micro-batches"), rows, indent=4))
    if advice.refused:
        parts.append(Line(f"no plan was found that fits with {_listed(advice.refused)}"))
    if advice.untried:
        parts.append(Line(f"there was no time, after {duration(advice.seconds)}, for {_listed(advice.untried)}"))
    return parts


def _batches(number: int) -> str:
    return f"{number} micro-batch{'es' * (number != 1)}"


def _listed(texts: list[str]) -> str:
    """Those that are the same but for an ending (``; and ...``) share it."""
    alone = [text for text in texts if "; and " not in text]
    both = [text.split("; and ") for text in texts if "; and " in text]
    out = [", ".join(alone)] if alone else []
    for ending in dict.fromkeys(ending for _, ending in both):
        out.append(f"both {ending} and one of {', '.join(text for text, last in both if last == ending)}")
    return "; ".join(out)


def _enough(advice: Advice) -> str:
    if advice.enough:
        limit, found = advice.enough
        text = f"least limit for which a plan was found on mesh {advice.mesh}: {size(limit)}, {duration(found.step_seconds)} a step in "
        text += _batches(found.microbatches) + (f" (none for {size(advice.little)})" if advice.little else "")
    else:
        text = "there was no time to find a limit that is enough"
        text += f"; none was found for {size(advice.little)}" if advice.little else ""
    return f"{text}; any plan needs {size(advice.proven)}, proven" if advice.proven else text
