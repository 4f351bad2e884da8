"""The plan: what was decided, and what it is predicted to cost. Plain data, JSON in and out."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from autoshard.errors import PlanError
from autoshard.mesh import Mesh

FORMAT = 1


@dataclass
class OpRow:
    """One op of the graph under the plan. Times are seconds of one micro-batch on one rank, estimates."""

    node: str
    op: str  # "aten.linear"
    module: str  # "transformer.h.0.attn.c_attn"
    source: str  # the user's line
    stage: int
    choices: list[str]  # what each axis (data, tensor) does: "shard b", "replicate", ...
    layout: str  # of the first result, "[S(0), S(2/3)]"
    operands: list[str]  # demanded layouts
    weights: dict[str, str]  # original parameter name -> its layout
    flops: float  # forward, whole op, one micro-batch
    split: float  # by how many ranks the op's work is divided
    forward: float
    backward: float


@dataclass
class CollectiveRow:
    """One planned collective. ``nbytes`` is what one rank sends in one run of it."""

    kind: str  # "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"
    axis: str  # "data", "tensor", "data+tensor", "pipeline"
    value: str  # node or parameter name
    module: str
    source: str
    why: str  # "[S(1), R] -> [S(1), R*], wanted by linear_3" or "gradient of lm_head.weight"
    direction: str  # "forward" | "backward" | "step"
    stage: int
    nbytes: float
    seconds: float
    runs: int  # per step on one rank


@dataclass
class StageRow:
    """One pipeline stage. ``memory`` is bytes on one rank by category; seconds are of one micro-batch, forward plus backward."""

    index: int
    first: str  # module path of its first op
    last: str
    ops: int
    parameters: int  # elements held by one rank
    seconds: float
    once: float  # seconds once a step, not overlapped
    in_flight: int
    memory: dict[str, float]  # parameters, gradients, optimizer, activations, transient
    rank: int = 0  # its place along the pipeline axis


@dataclass
class PinRow:
    """A placement that was forced. layers: values that lie so, of it and all that are like it; 1 unless all do."""

    name: str  # as it was pinned
    axes: dict[str, str]  # axis -> placement
    layers: int


@dataclass
class Plan:
    """Every decision, and the prediction. The names of nodes are those of the canonical graph, the same on every machine.

    strategies: node -> choice names on (data, tensor). stages: node -> stage. params: original name -> layout text.
    zero: original name of a parameter -> its ZeRO level. regions: node -> number of the region, computed again in backward, that it is in.
    offload: original names of parameters whose optimizer state, and what it updates, is in the host's memory.
    chunks: stages that a rank holds; ``stages`` counts to pipeline times chunks, and ``schedule`` says who holds which.
    kept: what is not computed again in regions: nodes, and conversions as "node->[R, S(1)]", the value and how it lies then.
    """

    mesh: Mesh
    cluster: str
    microbatches: int
    schedule: str  # a name of autoshard.schedule.SCHEDULES
    strategies: dict[str, list[str]]
    stages: dict[str, int]
    params: dict[str, str]
    fingerprint: str
    random: str = "invariant"  # random numbers: "invariant" to the mesh, or "native", torch's own
    precision: str = "fp32"  # of the copy that is computed with: "fp32" (as the model is), "bf16", "fp16"
    zero: dict[str, int] = field(default_factory=dict)
    regions: dict[str, int] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)
    chunks: int = 1
    pins: list[PinRow] = field(default_factory=list)
    offload: list[str] = field(default_factory=list)
    model: str = ""
    parameter_count: int = 0
    samples: int = 0  # global batch
    tokens: int = 0  # of the global batch; 0 if the inputs have no sequence
    ops: list[OpRow] = field(default_factory=list)
    collectives: list[CollectiveRow] = field(default_factory=list)
    stage_rows: list[StageRow] = field(default_factory=list)
    memory_limit: float = 0.0  # bytes a rank
    node_size: int = 0  # devices of a node; 0: not known
    step_seconds: float = 0.0
    breakdown: dict[str, float] = field(default_factory=dict)  # seconds of a step: compute, data, tensor, pipeline, bubble
    bubble: float = 0.0  # share of the step that a rank waits for the pipeline, (p-1)/(p-1+m) if stages are equal
    efficiency: float = 0.0  # T1 / (n Tn), T1 the predicted time on one such device
    one_device_seconds: float = 0.0
    solver: dict = field(default_factory=dict)  # name, seconds, objective, bound, gap, variables, trace_seconds, notes (list of text)

    @property
    def peak_bytes(self) -> float:
        """Predicted peak memory of the fullest rank."""
        return max(sum(memory.values()) for memory in self.rank_memory.values())

    @property
    def rank_memory(self) -> dict[int, dict[str, float]]:
        """Bytes by category on each place along the pipeline axis: of all its stages, of which one at a time needs what comes and goes."""
        found: dict[int, dict[str, float]] = {}
        for row in self.stage_rows:
            table = found.setdefault(row.rank, dict.fromkeys(row.memory, 0.0))
            for key, nbytes in row.memory.items():
                table[key] = max(table[key], nbytes) if key == "transient" else table[key] + nbytes
        return dict(sorted(found.items()))

    @property
    def depth(self) -> int:
        """Stages in all."""
        return self.mesh.pipeline * self.chunks

    @property
    def split_flops(self) -> dict[str, float]:
        """Share of the matmul FLOPs that each axis splits: {"data": 1.0, "tensor": 0.97}."""
        total = sum(op.flops for op in self.ops) or 1.0
        shares = {}
        for i, axis in enumerate(("data", "tensor")):
            shares[axis] = sum(op.flops for op in self.ops if op.choices[i].startswith("shard")) / total
        return shares

    def to_json(self) -> dict:
        data = asdict(self)
        data["mesh"] = list(self.mesh.shape)
        if self.mesh.order:
            data["order"] = list(self.mesh.order)
        return {"format": FORMAT, **data}

    @classmethod
    def from_json(cls, data: dict) -> Plan:
        data = dict(data)
        version = data.pop("format", None)
        if version != FORMAT:
            raise PlanError(f"the plan has format {version!r}, this autoshard reads format {FORMAT}", hint="make the plan again")
        try:
            data["mesh"] = Mesh(*data["mesh"], data.pop("order", None))
            data["ops"] = [OpRow(**row) for row in data["ops"]]
            data["collectives"] = [CollectiveRow(**row) for row in data["collectives"]]
            data["pins"] = [PinRow(**row) for row in data.get("pins", ())]
            data["stage_rows"] = [StageRow(**row) for row in data["stage_rows"]]
            return cls(**data)
        except (KeyError, TypeError) as error:
            raise PlanError(f"not a plan: {error}", hint="make it with `autoshard explain --format json` or plan.save()") from None

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        try:
            return cls.from_json(json.loads(Path(path).read_text()))
        except (OSError, json.JSONDecodeError) as error:
            raise PlanError(f"can't read the plan {str(path)!r}: {error}") from None
