"""What is done to save memory, beside cutting the model: ZeRO levels, optimizer state on the host, layers that backward computes again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass

from torch import fx

from autoshard.errors import PlanError
from autoshard.placement import Layout, R, cut_over_data
from autoshard.planning.fold import fold
from autoshard.planning.spans import spans_of
from autoshard.program import Param, Program

ANY, PLAIN, KEPT, AGAIN, ONCE = "any", "plain", "kept", "again", "once"
"""An op as autograd runs it; and in a block that is computed again: one whose result is kept, one that is computed again, and one whose
result backward does not need, nor anything that is computed again. ANY: a weight, to which it is all one."""


@dataclass(frozen=True)
class Saving:
    """What is asked for: one ZeRO level for all weights, whether layers are computed again, and whether the optimizer updates all weights
    that are trained on the host. None: whatever is best."""

    zero: int | None = 0
    recompute: bool | None = False
    offload: bool | None = False

    @classmethod
    def of(cls, zero: int | str, recompute: str, offload: str = "off") -> Saving:
        """From the user's ``zero=``, ``recompute=`` and ``offload=``. Raises PlanError."""
        if isinstance(zero, bool) or zero not in (0, 1, 2, 3, "auto"):
            raise PlanError(f"zero={zero!r} is no ZeRO level", hint='use 0, 1, 2, 3 or "auto"')
        if recompute not in ("on", "off", "auto"):
            raise PlanError(f"recompute={recompute!r} can't be", hint='use "on", "off" or "auto"')
        if offload not in ("optimizer", "off", "auto"):
            raise PlanError(f"offload={offload!r} can't be", hint='use "optimizer", "off" or "auto"')
        again, host = (None if asked == "auto" else asked != "off" for asked in (recompute, offload))
        return cls(None if zero == "auto" else zero, again, host)

    @property
    def open(self) -> bool:
        """Whether there is anything to decide."""
        return None in (self.zero, self.recompute, self.offload)

    def settled(self, by: Saving) -> Saving:
        """With what is open decided as ``by`` says."""
        return Saving(*(theirs if mine is None else mine for mine, theirs in zip(astuple(self), astuple(by))))

    @property
    def levels(self) -> tuple[int, ...]:
        """The ZeRO levels that weights may have. Not 1, which needs more memory than 2 and sends more."""
        return (0, 2, 3) if self.zero is None else (self.zero,)

    @property
    def modes(self) -> tuple[str, ...]:
        """What may become of ops in backward."""
        return {None: (PLAIN, KEPT, AGAIN, ONCE), True: (AGAIN, ONCE), False: (PLAIN,)}[self.recompute]

    @property
    def hosts(self) -> tuple[bool, ...]:
        """Whether weights may be updated on the host, and must be."""
        return (False, True) if self.offload is None else (self.offload,)


NOTHING = Saving()


def piece_of(program: Program, node: fx.Node, layout: Layout) -> Layout | None:
    """How the part of a weight that a rank updates under ZeRO lies, given how it lies without; None if it can't be cut over data."""
    if program.mesh.data == 1 or not node.users or node.meta.get("prologue") or layout[0] != R:
        return None
    return cut_over_data(layout, program.params[node.name].shape, program.mesh.sizes)


def level_of(param: Param, piece: Layout | None, wanted: int) -> int:
    """The ZeRO level of a parameter of which ``wanted`` is asked.

    Lower are those of frozen weights, which have no gradient and no state (so 3, or 0), and of weights of which no dim can be cut in as
    many pieces as there are data ranks (0): scalars, and small vectors.
    """
    return wanted if piece is not None and (param.requires_grad or wanted == 3) else 0


def zero_levels(program: Program, layouts: Mapping[fx.Node, Layout], wanted: int) -> dict[str, int]:
    """The level of every parameter by name, given that ``wanted`` is asked for all. ``layouts``: how placeholders lie without ZeRO."""
    levels = {}
    for node in program.graph.nodes:
        param = program.params.get(node.name) if node.op == "placeholder" else None
        if param is not None and param.kind == "parameter":
            levels[param.name] = level_of(param, piece_of(program, node, layouts[node]), wanted)
    return levels


def layer_regions(program: Program, pure: set[fx.Node]) -> dict[str, int]:
    """Number of its region by op name: the layers of the model, and pieces of long runs between them, as ``spans_of`` finds them.

    Ops of short runs (embeddings, head, loss) are in none. ``pure``: values that depend on inputs and constants alone.
    """
    ops = program.ops
    spans = [ops[span.start : span.end] for span in spans_of(program, fold(program), pure) if span.again]
    spans = [span for span in spans if any(node not in pure for node in span)]
    return {node.name: number for number, span in enumerate(spans) for node in span}
