"""Torch's own random ops on numbers that are a function of a key and of their position, and a model on one device on the same."""

from __future__ import annotations

from collections.abc import Callable

import torch

from autoshard.errors import RunError
from autoshard.runtime.keys import TAKE, whole_numbers
from autoshard.runtime.numbers import Numbers, key_words
from autoshard.torch_private import TorchDispatchMode

aten = torch.ops.aten
Source = Callable[[tuple[int, ...]], Numbers]


class Drawing(TorchDispatchMode):
    """Within, ops that draw random numbers draw those of ``source(shape)``, in forward and in backward.

    An op that is not in ``DRAWN`` runs as it is, on a generator that starts from its key; that is the same on every rank only if each has
    the whole value.
    """

    def __init__(self, source: Source):
        super().__init__()
        self.source = source

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        if any(_argument(func, args, kwargs, name) is False for name in ("train", "training")):
            return func(*args, **kwargs)
        if func in DRAWN:
            return DRAWN[func](self.source, *args, **kwargs)
        if func in FUSED:
            if not _argument(func, args, kwargs, "dropout_p"):
                return func(*args, **kwargs)
            what = f"{func} draws its dropout mask inside a fused kernel, where its numbers can't be given"
            raise RunError(what, hint="run it within torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)")
        numbers = self.source(())
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(numbers.key[0, 0]) * 2**31 + int(numbers.key[0, 1]))
            return func(*args, **kwargs)


def invariant_random() -> Drawing:
    """A context in which a model on one device draws the random numbers that its compiled form draws on any mesh.

    >>> with autoshard.invariant_random():
    ...     model(**batch).loss.backward()

    Dropout masks and other random values are then functions of ``torch.manual_seed``, of the number of draws before, and of their position.
    Backward belongs inside too, if the model computes activations again there. An op takes one number from torch's default generator.
    """
    return Drawing(lambda shape: whole_numbers(shape, key_words(torch.randint(size=(1,), **TAKE))[0]))


def _argument(func, args: tuple, kwargs: dict, name: str):
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return args[position] if position < len(args) else kwargs.get(name, argument.default_value)


FUSED = {
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_fused_attention_overrideable.default,
    aten._cudnn_rnn.default,
}
"""Ops that draw inside a kernel."""


# --- what each op draws: (source, the op's arguments) -> its result ---------------------------------------------------------


def _native_dropout(source: Source, x, p, train):
    if p in (0, 1):
        return aten.native_dropout.default(x, p, train)
    keep = source(x.shape).keep(1 - p)
    return x * keep * (1 / (1 - p)), keep


def _keep_like(source: Source, x, p=0.5, generator=None):
    return source(x.shape).keep(p).to(x.dtype)


def _below(source: Source, p, generator=None):
    return (source(p.shape).uniform(p.dtype) < p).to(p.dtype)


def _below_of(source: Source, x, p, generator=None):
    p = p.expand(x.shape)
    return (source(x.shape).uniform(p.dtype) < p).to(x.dtype)


def _uniform(source: Source, x, low=0.0, high=1.0, generator=None):
    return source(x.shape).uniform(x.dtype) * (high - low) + low


def _normal(source: Source, x, mean=0.0, std=1.0, generator=None):
    return source(x.shape).normal(x.dtype) * std + mean


def _exponential(source: Source, x, rate=1.0, generator=None):
    return -torch.log1p(-source(x.shape).uniform(x.dtype)) / rate


def _normal_around(source: Source, mean, std=1.0, generator=None):
    like = mean if isinstance(mean, torch.Tensor) else std
    shape = torch.broadcast_shapes(*(t.shape for t in (mean, std) if isinstance(t, torch.Tensor)))
    return source(shape).normal(like.dtype) * std + mean


def _multinomial(source: Source, p, samples, replacement=False, generator=None):
    if replacement and samples > 1:
        total = p.cumsum(-1)
        u = source((*p.shape[:-1], samples)).uniform(p.dtype) * total[..., -1:]
        return torch.searchsorted(total, u, right=True).clamp(max=p.shape[-1] - 1)
    return (p / -torch.log1p(-source(p.shape).uniform(p.dtype))).topk(samples).indices


def _permutation(source: Source, n, dtype=torch.int64, **where):
    order = source((n,)).uniform(torch.float64).argsort(stable=True)
    return order.to(dtype=dtype or torch.int64, device=where.get("device"))


def _factory(draw: Callable[[Numbers, torch.dtype], torch.Tensor]):
    def make(source: Source, size, dtype=None, device=None, **_):
        return draw(source(tuple(size)), dtype or torch.get_default_dtype()).to(device)

    return make


def _like(draw: Callable[[Numbers, torch.dtype], torch.Tensor]):
    def make(source: Source, x, dtype=None, **_):
        return draw(source(x.shape), dtype or x.dtype)

    return make


def _integers(source: Source, low, high, size, dtype=torch.int64, device=None, **_):
    return source(tuple(size)).integers(low, high, dtype or torch.int64).to(device)


def _integers_like(source: Source, x, low, high, dtype=None, **_):
    return source(x.shape).integers(low, high, dtype or x.dtype)


def _into(make: Callable) -> Callable:
    """The in-place form of an op."""

    def fill(source: Source, x, *args, **kwargs):
        return x.copy_(make(source, x, *args, **kwargs))

    return fill


DRAWN: dict[torch._ops.OpOverload, Callable] = {
    aten.native_dropout.default: _native_dropout,
    aten.bernoulli.default: _below,
    aten.bernoulli.p: _keep_like,
    aten.bernoulli_.float: _into(_keep_like),
    aten.bernoulli_.Tensor: _into(_below_of),
    aten.bernoulli.Tensor: _below_of,
    aten.uniform.default: _uniform,
    aten.uniform_.default: _into(_uniform),
    aten.normal_.default: _into(_normal),
    aten.normal_functional.default: _normal,
    aten.normal.float_float: lambda source, mean, std, size, **kw: _factory(Numbers.normal)(source, size, **kw) * std + mean,
    aten.normal.Tensor_float: _normal_around,
    aten.normal.float_Tensor: _normal_around,
    aten.normal.Tensor_Tensor: _normal_around,
    aten.exponential.default: _exponential,
    aten.exponential_.default: _into(_exponential),
    aten.rand.default: _factory(Numbers.uniform),
    aten.randn.default: _factory(Numbers.normal),
    aten.rand_like.default: _like(Numbers.uniform),
    aten.randn_like.default: _like(Numbers.normal),
    aten.randint.default: lambda source, high, size, **kw: _integers(source, 0, high, size, **kw),
    aten.randint.low: _integers,
    aten.randint_like.default: lambda source, x, high, **kw: _integers_like(source, x, 0, high, **kw),
    aten.randint_like.low_dtype: _integers_like,
    aten.randperm.default: _permutation,
    aten.multinomial.default: _multinomial,
}
"""Op -> its result on given numbers. Those are what torch's composite ops (dropout, attention, recurrent layers) come down to."""
