"""The module that the user trains: one rank's part of a compiled model, with the face of the whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from autoshard.errors import RunError
from autoshard.placement import parse_layout
from autoshard.runtime import state
from autoshard.runtime.feed import Feed, feeds
from autoshard.runtime.gradients import Entry, GradientSync, sum_over_stages
from autoshard.runtime.interface import Interface
from autoshard.runtime.masters import Masters
from autoshard.runtime.norm import clip_grad_norm
from autoshard.runtime.outputs import Lazy, deliver
from autoshard.runtime.pipeline import Loop, Pipeline
from autoshard.runtime.programs import Compiled, Programs
from autoshard.runtime.stage import Param, StageModule
from autoshard.runtime.whole import is_whole
from autoshard.runtime.world import agree
from autoshard.runtime.zero import gather

WHOLE_TENSOR_OPTIMIZERS = ("Adafactor", "LBFGS", "Muon")
"""Optimizers whose step looks at a whole parameter, so that a step on its pieces would be another one."""


class Sharded(nn.Module):
    """A compiled model on this rank.

    Call it like the model, with the *global* batch, the same on every rank. It returns what the model returns: the loss is a plain tensor,
    equal on all ranks; results that lie in pieces are ``Lazy``. ``loss.backward()`` leaves each parameter's gradient in ``.grad``, as on
    one device. Parameters are this rank's pieces, under their original names: those that the optimizer is to update, also under ZeRO and in
    mixed precision, where a call of the model begins by gathering and rounding the weights that an optimizer changed. In mixed precision
    ``.grad`` has the lower precision, in fp16 times ``loss_scale``; optimizers are given true gradients in fp32, see ``runtime.masters``.

    Args:
        stage: this rank's module, weights loaded.
        interface: arguments and result of the model.

    catalogue: every parameter and buffer of the model, on all stages, by canonical name.
    programs: the program it was made from, and those for other modes and sizes.
    """

    def __init__(self, stage: StageModule, interface: Interface):
        super().__init__()
        self._agreed = False
        self.stage = stage  # named_parameters and state_dict look through it: names are the user's
        self.interface = interface
        self.world = stage.world
        self.catalogue = state.catalogue(stage)
        self._nothing = (nn.Parameter(torch.empty(0, device=self.world.device), requires_grad=False),)
        self.scheduled = self.world.mesh.pipeline > 1 or stage.microbatches > 1
        trainable = [(spec, p) for spec, p in stage.held() if p.requires_grad]
        entries = [self._entry(attribute, spec) for attribute, spec in stage.params.items() if spec.requires_grad]
        reduced = [entry for entry in entries if entry.group is not None or entry.shard is not None]
        self._sync = GradientSync(reduced, every_backward=not self.scheduled)
        several = sorted(((s.stages, s.name, p, s.dtype) for s, p in trainable if len(s.stages) > 1), key=lambda e: e[:2])
        self._tied = [(p, dtype, self.world.holders(stages)) for stages, _, p, dtype in several]
        self._masters = self._keep_masters()
        runner = (self.world.scheduler or Pipeline) if self.world.mesh.pipeline > 1 else Loop
        first = Compiled(stage, interface, runner(stage, self._sync.arm))
        self.programs = Programs(first, lambda other: runner(other, self._sync.arm))
        if interface.training is not None:
            self.train(interface.training)

    def _keep_masters(self) -> Masters | None:
        lower = {spec.dtype for spec in self.catalogue.values() if spec.master is not None}
        params = [p for spec, p in self.stage.held() if spec.kind == "parameter"]
        # of the others bf16 has the range of fp32; frozen ones count too: what ranks agree on, all of them must be asked
        return Masters([*params, *self._nothing], self.world, torch.float16 in lower) if lower else None

    def _entry(self, attribute: str, spec: Param) -> Entry:
        """What happens to a parameter's gradient after backward."""
        shard = self.stage.shards.get(attribute)
        if shard is None:
            return Entry(getattr(self.stage, attribute), self.world.group(spec.sync))
        if spec.zero in (0, 1) or "data" not in spec.sync:
            return Entry(shard.whole, self.world.group(spec.sync), shard, cut=spec.zero == 2)
        rest = tuple(axis for axis in spec.sync if axis != "data")
        return Entry(shard.whole, self.world.group(rest), shard, scatter=True)

    # --- calls -------------------------------------------------------------------------------------------------------

    def forward(self, *args, **kwargs) -> Any:
        """The model's result. On a mesh with a pipeline, or with micro-batches, backward runs in this call as well, unless under no_grad.

        Raises:
            RunError: naming the argument that is not what the model was compiled for.
        """
        program, outputs = self._call(args, kwargs)
        return _result(program, outputs)

    def train_step(self, *args, **kwargs) -> Any:
        """Forward and backward: ``.grad`` holds, or is increased by, the gradients. Returns the model's result, with a detached loss."""
        if self.stage.loss is None:
            raise RunError("the model returns no scalar loss, so there is nothing to train", hint="give compile a loss_fn")
        with torch.enable_grad():
            program, outputs = self._call(args, kwargs)
        outputs[program.stage.loss].backward()
        outputs[program.stage.loss] = outputs[program.stage.loss].detach()
        return _result(program, outputs)

    def _call(self, args: tuple, kwargs: Mapping[str, Any]) -> tuple[Compiled, list[torch.Tensor | Lazy]]:
        """The program that ran, and what stands for each entry of its stage's ``outputs``."""
        program = self.programs.pick(self.training, args, kwargs)
        batch = program.interface.bind(args, kwargs)
        if not self._agreed:  # once: a script that gives every rank its own batch does so from the first step
            agree(self.world, batch, "the arguments", "give every rank the whole global batch, the same on all")
            self._agreed = True
        program.stage.check(batch)
        program.stage.keys.next_step()
        fed = feeds(program.stage, batch)
        self._sync.reset()
        gather(self.stage.shards.values())
        scale = program.stage.loss_scale = self.loss_scale
        if self.scheduled:
            return program, self._run_scheduled(program, fed)
        results = [program.stage(**fed[0])]
        if scale != 1.0:
            results = [tuple(_Scale.apply(x, scale) if x.requires_grad else x for x in results[0])]
        state.update(self.stage, program.stage, self.catalogue, results)
        return program, deliver(program.stage, results, ran_backward=False)

    def _run_scheduled(self, program: Compiled, fed: list[Feed]) -> list[torch.Tensor | Lazy]:
        stage = program.stage
        training = torch.is_grad_enabled() and stage.loss is not None
        if not training:
            results = program.runner.run(fed, False)
            state.update(self.stage, stage, self.catalogue, results)
            return deliver(stage, results, ran_backward=torch.is_grad_enabled())
        params = [p for p in self.parameters() if p.requires_grad]
        before = [p.grad for p in params]
        try:
            for p in params:
                p.grad = None
            results = program.runner.run(fed, True)
            self._sync.finish()
            sum_over_stages(self._tied)
            grads = [p.grad for p in params]
        finally:
            for p, grad in zip(params, before):
                p.grad = grad
        state.update(self.stage, stage, self.catalogue, results)
        outputs = deliver(stage, results, ran_backward=True)
        outputs[stage.loss] = _HandOver.apply(outputs[stage.loss], torch.zeros((), requires_grad=True), grads, *params)
        return outputs

    # --- training ----------------------------------------------------------------------------------------------------

    def optimizer(self, cls: type[torch.optim.Optimizer] = torch.optim.AdamW, **kwargs) -> torch.optim.Optimizer:
        """An optimizer over this rank's pieces: ``sharded.optimizer(torch.optim.AdamW, lr=1e-3)``.

        Raises:
            RunError: its step looks at whole parameters, and some are cut.
        """
        cut = [s.name for s in self.catalogue.values() if s.kind == "parameter" and not is_whole(parse_layout(s.layout), self.world)]
        if cls.__name__ in WHOLE_TENSOR_OPTIMIZERS and cut:
            raise RunError(
                f"{cls.__name__} needs whole parameters, but {cut[0]!r} is cut over the ranks",
                hint="use an optimizer that works on each element, such as AdamW, or pin the parameters to R",
            )
        return cls(self.parameters(), **kwargs)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients so that their joint norm is at most ``max_norm``; returns the norm they had. A collective.

        The norm is that of ``torch.nn.utils.clip_grad_norm_`` on one device, every element of the model counted once; it is at least fp32.
        """
        return clip_grad_norm(self.stage, self.catalogue, max_norm, norm_type, self.loss_scale)

    @property
    def scaling(self) -> Masters | None:
        """What scales the loss, if anything does."""
        return self._masters if self._masters and self._masters.scaled else None

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied with before the next backward, so that gradients in fp16 don't vanish: 1 in all other precisions.

        It starts at 2^16, and changes as that of ``torch.amp.GradScaler``, see ``runtime.masters.Masters``. The same on every rank.
        """
        return self.scaling.scale if self.scaling else 1.0

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        """Set it, on every rank. RunError if the model is not compiled with ``precision="fp16"``."""
        if not self.scaling:
            raise RunError("only a model in fp16 has a loss scale", hint='compile it with precision="fp16"')
        self.scaling.scale = value

    # --- names and state ---------------------------------------------------------------------------------------------

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """This rank's pieces; an empty tensor that never has a gradient, if its stage has none, as an optimizer must have something."""
        held = [p for _, p in self.named_parameters()]
        return iter(held or [self._nothing[0]])

    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self._named("parameter", prefix, remove_duplicate)

    def named_buffers(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._named("buffer", prefix, remove_duplicate)

    def _named(self, kind: str, prefix: str, remove_duplicate: bool):
        for spec, tensor in self.stage.held():
            for name in spec.names[:1] if remove_duplicate else spec.names:
                if spec.kind == kind:
                    yield (f"{prefix}.{name}" if prefix else name), tensor

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Whole parameters and buffers on the CPU, under their original names; tied names share one tensor. A collective."""
        return state.gather(self.stage, self.catalogue)

    def grad_dict(self) -> dict[str, torch.Tensor | None]:
        """Whole gradients on the CPU, by the parameters' original names; None for a parameter without one. A collective."""
        found = state.gather_gradients(self.stage, self.catalogue)
        if not self.scaling:
            return found
        return {name: g if g is None else self.scaling.true(g, self.catalogue[name].kept) for name, g in found.items()}

    def piece_of(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's piece of a whole tensor that lies like the parameter or buffer ``name``."""
        return state.piece_of(self.stage, self.catalogue[name], tensor)

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor], strict: bool = True) -> None:
        """Take this rank's pieces of whole tensors.

        Raises:
            RunError: naming a missing, unexpected or wrongly shaped entry; nothing has been loaded then.
        """
        state.scatter(self.stage, self.catalogue, state_dict, strict)


def _result(program: Compiled, outputs: list) -> Any:
    return program.interface.result({spec.leaf: x for spec, x in zip(program.stage.outputs, outputs)})


class _Scale(torch.autograd.Function):
    """The value as it is, its gradient times a number."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.scale, None


class _HandOver(torch.autograd.Function):
    """Gradients that exist already go to their parameters when backward reaches the loss, times the gradient that it brings."""

    @staticmethod
    def forward(ctx, loss, anchor, grads, *params):
        # anchor: the loss requires grad even where this rank's parameters are all frozen
        ctx.grads = grads
        return loss.clone()

    @staticmethod
    def backward(ctx, scale):
        if ctx.grads is None:
            raise RunError("backward ran through this loss already", hint="call the model again for new gradients")
        grads, ctx.grads = ctx.grads, None
        for grad in grads:
            if grad is not None:
                grad.mul_(scale.to(grad.device))
        return (None, None, None, *grads)
