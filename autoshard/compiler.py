"""``autoshard.plan`` and ``autoshard.compile``: capture, plan, rewrite, emit, run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from autoshard import passes
from autoshard.advising import planned
from autoshard.capture import Captured, capture
from autoshard.cluster import Cluster
from autoshard.draws import without_keys
from autoshard.emit import RankProgram, emit
from autoshard.errors import MeshError, PlanError
from autoshard.launching import Deferred, interface, load_source, one_plan_for_all, sharded_module, start, write_folder
from autoshard.mesh import Mesh
from autoshard.passes.cut_stages import Stage
from autoshard.passes.id_checks import IdChecks, id_checks
from autoshard.passes.localize import piece_sizes
from autoshard.passes.microbatch import Microbatched
from autoshard.planning.choices import microbatch_candidates
from autoshard.planning.plan import Plan
from autoshard.planning.planner import Decision, Saving, restore
from autoshard.precision import skeleton
from autoshard.predict import fingerprint
from autoshard.program import Program
from autoshard.runtime.interface import Interface
from autoshard.runtime.sharded import Sharded
from autoshard.runtime.stage import StageModule
from autoshard.runtime.world import World
from autoshard.schedule import schedule_of
from autoshard.tasks import convert, plan_for
from autoshard.variants import as_example, in_mode, same_stages, same_weights


def plan(
    model: nn.Module,
    mesh: Any,
    example_inputs: Any,
    *,
    cluster: Cluster | str | None = None,
    memory: str | float | None = None,
    microbatches: int | None = None,
    pin: Mapping[str, Mapping[str, str]] | None = None,
    zero: int | str = "auto",
    recompute: str = "auto",
    schedule: str = "auto",
    offload: str = "auto",
    precision: str = "fp32",
    random: str = "invariant",
    loss_fn: Callable | None = None,
    batch_dims: Mapping[str, int | None] | None = None,
) -> Plan:
    """The fastest plan found for training ``model`` on ``mesh``.

    Needs no process group and no device; nothing of the model's size is allocated.

    Args:
        model: on any device, ``meta`` included; not modified.
        mesh: (data, tensor, pipeline), a dict of these names, or a Mesh; or a number of devices, or "auto" for as many as torchrun started:
            then the fastest of their meshes whose tensor axis stays within a node. Unless a Mesh has an order, the order of its axes over
            the ranks is what a quick estimate finds best, tensor fastest, then data, on one node.
        example_inputs: the *global* batch: a dict of keyword arguments or a tuple.
        cluster: a preset's name, a TOML file, or a Cluster.
        memory: limit of a rank, bytes or text such as "40GiB"; by default what the cluster's device has.
        microbatches: how many; by default the number with the shortest predicted step.
        pin: placements that are forced: ``{"lm_head.weight": {"tensor": "S(0)"}}``; parameters, inputs, or outputs of modules, by name.
        zero: ZeRO level of every weight that can be cut over data: 0 nothing is cut, 1 what the optimizer keeps of it, 2 its gradient too,
            3 the weight too. "auto": for each weight what is best where memory is short, else 2 if that makes steps
            at least 1 % shorter (in models of 16 like layers or more: at all), else 0.
        recompute: "on": backward computes the activations of each layer again instead of keeping them; "off". "auto": for each layer, and
            each value in it, what is best.
        schedule: of the pipeline: "GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble" or "ZBVZeroBubble", the last three with two
            stages a rank. "auto" is what is predicted to be fastest of those that fit; "1F1B" where no other is faster by 1 %.
        offload: "optimizer": all trained parameters are updated on the host, and what the optimizer keeps of them is in its memory; "off".
            "auto": for each parameter what is best where memory is short, else "off"; "off" on a CPU, whose memory is the host's.
        precision: what forward and backward compute in: "fp32", as the model is; "bf16" or "fp16", in a copy of the model of that dtype, of
            whose trained parameters the optimizer has an fp32 master each.
        random: dropout masks and other random numbers: "invariant" to the mesh, those that one device draws in ``invariant_random``; or
            "native", torch's own, which differ from mesh to mesh but keep its fused kernels for attention with dropout.
        loss_fn: ``loss_fn(output, batch)`` -> scalar, if the model does not return its loss.
        batch_dims: the dim that holds the batch, by input name, where it is not 0.

    Raises:
        AutoshardError: no plan; it says what is in the way.
    """
    captured = capture(model, example_inputs, loss_fn, batch_dims, precision)
    given = (cluster, memory, microbatches, pin, zero, recompute, schedule, offload, random)
    traced = partial(capture, model, example_inputs, loss_fn, batch_dims)
    return planned(captured, _title(model), Mesh.wanted(mesh), traced, *given)


def compile(
    model: nn.Module,
    mesh: Any,
    example_inputs: Any = None,
    *,
    plan: Plan | None = None,
    loss_fn: Callable | None = None,
    batch_dims: Mapping[str, int | None] | None = None,
    **options: Any,
) -> nn.Module:
    """This rank's part of ``model``, ready to train: a ``runtime.Sharded``. Call it on every rank of the mesh.

    Without ``example_inputs`` the model is traced and planned at the first call. Rank 0 plans, all ranks run that plan. ``options`` are
    those of ``plan``. The user's model is not modified, its weights are copied.

    Raises:
        AutoshardError: the same on every rank, before any communication of the training itself.
    """
    if example_inputs is None:
        given = {"plan": plan, "loss_fn": loss_fn, "batch_dims": batch_dims, **options}
        return Deferred(model.training, lambda batch: compile(model, mesh, batch, **given))
    wanted = mesh = Mesh.wanted(mesh)
    if plan is not None and plan.mesh.answers(wanted):
        mesh = plan.mesh
    world = start(Mesh(mesh) if isinstance(mesh, int) else mesh)
    precision = options.pop("precision", None)
    if plan is not None and precision not in (None, plan.precision):
        raise PlanError(f"the plan is for precision {plan.precision}, not {precision}", hint="make a plan for this precision")
    if plan is not None and options.get("random") not in (None, plan.random):
        raise PlanError(f"the plan is for random={plan.random!r}, not {options['random']!r}", hint="make a plan for these random numbers")
    captured = capture(model, example_inputs, loss_fn, batch_dims, plan.precision if plan else precision or "fp32")
    if plan is None:
        traced = partial(capture, model, example_inputs, loss_fn, batch_dims)
        plan = one_plan_for_all(world, lambda: planned(captured, _title(model), mesh, traced, **_defaults(options)))
    if plan.mesh != mesh and plan.mesh.answers(wanted):
        mesh = plan.mesh
        world = start(mesh)
    return Prepared.of(captured, plan, mesh, example_inputs, options.get("cluster")).sharded(model, world)


def _defaults(options: dict) -> dict:
    known = {"cluster": None, "memory": None, "microbatches": None, "pin": None, "random": "invariant"}
    known.update(dict.fromkeys(("zero", "recompute", "schedule", "offload"), "auto"))
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise TypeError(f"compile() got unexpected arguments {', '.join(unknown)}")
    return {**known, **options}


def _title(model: nn.Module) -> str:
    return type(model).__name__


@dataclass
class Rewritten:
    """A planned model, one program per stage."""

    mesh: Mesh
    cut: Microbatched
    stages: list[Stage]
    checks: IdChecks
    _local: dict[tuple, Program] = field(default_factory=dict)

    def local(self, index: int, coords: tuple[int, int]) -> Program:
        """The program of the rank of a stage at (data, tensor); ranks whose pieces have the same sizes share it."""
        program = self.stages[index].program
        key = index, piece_sizes(program, coords)
        if key not in self._local:
            self._local[key] = passes.run("localize", program, coords)
        return self._local[key]


@dataclass
class Prepared:
    """A captured model, rewritten for a plan: what the module of any rank is made from."""

    captured: Captured
    program: Program
    plan: Plan
    rewritten: Rewritten
    example_inputs: Any
    cluster: Any = None

    @classmethod
    def of(cls, captured: Captured, plan: Plan, mesh: Mesh, example_inputs: Any, cluster: Any = None) -> Prepared:
        program = passes.run("canonicalize", captured.program)
        return cls(captured, program, plan, rewrite(program, plan, mesh), example_inputs, cluster)

    def sharded(self, model: nn.Module, world: World) -> Sharded:
        """The module of the world's rank, with the weights of ``model``."""
        captured, program, plan = self.captured, self.program, self.plan
        sharded = sharded_module(model, captured, program, plan, world, lambda rank: source(captured, self.rewritten, plan, rank))
        sharded.emit = lambda folder: write_folder(folder, model, captured, program, plan, self.example_inputs, sharded.source)
        bare, modes = skeleton(model), {name: module.training for name, module in model.named_modules()}
        sharded.programs.again = lambda training, args, kwargs: self._again(bare, modes, sharded, training, args, kwargs)
        return sharded

    def _again(
        self, bare: nn.Module, modes: dict[str, bool], sharded: Sharded, training: bool, args: tuple, kwargs: Mapping[str, Any]
    ) -> tuple[StageModule, Interface]:
        """This rank's stage of another program on the weights of ``sharded``: for another mode, or a batch of another size."""
        old, world = self.captured, sharded.world
        batch = as_example(old.in_spec, self.example_inputs, args, kwargs)
        with in_mode(bare, training, modes):
            captured = capture(bare, batch, old.loss_fn, old.batch_dims, old.precision)
        program = passes.run("canonicalize", captured.program)
        face = interface(captured, program, training)
        if fingerprint(program) == self.plan.fingerprint:
            return sharded.stage, face
        program.mesh = world.mesh
        plan = one_plan_for_all(world, lambda: self._plan_again(captured, program))
        text = source(captured, rewrite(program, plan, world.mesh), plan, world.rank, with_unused=False)
        stage = load_source(text, f"rank{world.rank}").Stage(world, like=sharded.stage)
        stage.load(captured.constants_values.get)
        return stage, face

    def _plan_again(self, captured: Captured, program: Program) -> Plan:
        """A plan that leaves parameters, and what the optimizer keeps of them, where they are."""
        first, mesh, cluster = self.plan, program.mesh, Cluster.of(self.cluster)
        without_keys(program, first.random)
        pins = same_weights(self.captured, self.program, first, program)
        saving, placed = Saving(0, bool(first.regions)), schedule_of(first.schedule)
        read = {name for param in self.program.params.values() for name in param.names}
        unread = tuple(param for param in self.captured.params if param.name not in read)
        refused: PlanError | None = None
        for m in dict.fromkeys([first.microbatches, *microbatch_candidates(program, mesh, None)]):
            try:
                placed.check(m, mesh.pipeline, first.chunks)
                plan = plan_for(captured, program, first.model, mesh, cluster, first.memory_limit, m, pins, saving=saving)
                plan.schedule, plan.chunks = first.schedule, first.chunks
                if mesh.pipeline > 1:
                    plan.stages = same_stages(first, self.rewritten.stages, unread, passes.run("microbatch", program, m).program)
            except PlanError as error:
                refused = refused or error
                continue
            plan.random = first.random
            names = {param.name for param in program.params.values()}
            plan.zero = {name: level for name, level in first.zero.items() if name in names}
            return plan
        raise refused


def rewrite(program: Program, plan: Plan, mesh: Mesh) -> Rewritten:
    """Canonical program and plan -> one program per stage, conversions explicit."""
    if not plan.mesh.answers(mesh):
        raise PlanError(f"the plan is for mesh {plan.mesh}, not {mesh}", hint="make a plan for this mesh")
    mesh = plan.mesh
    here = fingerprint(program)
    if plan.fingerprint != here:
        raise PlanError(
            f"the plan was made for another model, batch or version of autoshard (fingerprint {plan.fingerprint}, here {here})",
            hint="make a plan for this model and this batch",
        )
    without_keys(program, plan.random).mesh = mesh
    cut = passes.run("microbatch", program, plan.microbatches)
    decision: Decision = restore(cut.program, mesh, plan.strategies, plan.stages)
    decision.zero, decision.regions, decision.kept = plan.zero, plan.regions, plan.kept
    converted = convert(cut.program, decision)
    stages = passes.run("cut_stages", converted, plan.depth)
    return Rewritten(mesh, cut, stages, id_checks(program) if mesh.size > 1 else IdChecks())


def source(captured: Captured, rewritten: Rewritten, plan: Plan, rank: int, with_unused: bool = True) -> str:
    """The Python module of one rank. ``with_unused``: parameters that no op reads are held by the first stage, buffers by all."""
    mesh = rewritten.mesh
    if not 0 <= rank < mesh.size:
        raise MeshError(f"mesh {mesh} has no rank {rank}", hint=f"its ranks are 0 to {mesh.size - 1}")
    data, tensor, index = mesh.coords(rank)
    placed = schedule_of(plan.schedule)
    stages = [rewritten.stages[s] for s in placed.stages_of(index, mesh.pipeline, plan.chunks)]
    local = [rewritten.local(stage.index, (data, tensor)) for stage in stages]
    holders: dict[str, tuple[int, ...]] = {}
    for other in rewritten.stages:
        for name in other.program.params:
            holders[name] = tuple(sorted({*holders.get(name, ()), placed.rank_of(other.index, mesh.pipeline)}))
    used = {n for p in rewritten.stages for q in p.program.params.values() for n in q.names}
    unused = {p.name: p for p in captured.params if not set(p.names) & used} if with_unused else {}
    everywhere = {name: tuple(range(mesh.pipeline)) for name, p in unused.items() if p.kind == "buffer"}
    return emit(
        RankProgram(
            title=plan.model,
            mesh=mesh,
            schedule=plan.schedule,
            rank=rank,
            stages=tuple(replace(stage, program=program) for stage, program in zip(stages, local)),
            wholes=tuple(stage.program for stage in stages),
            last=rewritten.stages[-1].program,
            prologue=rewritten.cut.prologue,
            extras=rewritten.cut.extras,
            checks=rewritten.checks,
            offload=frozenset(plan.offload),
            holders=holders | everywhere,
            unused={name: p for name, p in unused.items() if index == 0 or name in everywhere},
            random_keys=captured.random_keys if plan.random == "invariant" else 0,
        )
    )


def sources(model: nn.Module, mesh: Any, example_inputs: Any, plan: Plan, loss_fn=None, batch_dims=None) -> dict[int, str]:
    """The Python modules of all ranks, made without any process group."""
    mesh = Mesh.of(mesh)
    captured = capture(model, example_inputs, loss_fn, batch_dims, plan.precision)
    rewritten = rewrite(passes.run("canonicalize", captured.program), plan, mesh)
    return {rank: source(captured, rewritten, plan, rank) for rank in range(mesh.size)}


def emit_folder(
    model: nn.Module, mesh: Any, example_inputs: Any, plan: Plan, folder: str | Path, loss_fn=None, batch_dims=None
) -> list[Path]:
    """Write what trains without the planner: the module of every rank, the plan, and weights and batch where they have values.

    Returns the files.

    ``torchrun --nproc-per-node N -m autoshard.runtime.launch FOLDER`` runs it.
    """
    mesh = Mesh.of(mesh)
    captured = capture(model, example_inputs, loss_fn, batch_dims, plan.precision)
    program = passes.run("canonicalize", captured.program)
    rewritten = rewrite(program, plan, mesh)
    return write_folder(folder, model, captured, program, plan, example_inputs, lambda rank: source(captured, rewritten, plan, rank))
