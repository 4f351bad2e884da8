"""Steps of random models: element by element, and reductions."""

from __future__ import annotations

from .maker import Maker, SkipStep
from .registry import step

# --- element by element -------------------------------------------------------------------------------------------------

UNARY = (
    "torch.relu({0})",
    "F.gelu({0})",
    "F.silu({0})",
    "torch.tanh({0})",
    "torch.sigmoid({0})",
    "F.softplus({0})",
    "torch.exp(-{0}.abs())",
    "{0}.square()",
    "-{0}",
    "{0} * 0.5",
    "{0} + 1.0",
    "1.0 - {0}",
    "{0} / 2",
    "{0}.clamp(-1.0, 1.0)",
    "torch.sin({0})",
    "F.elu({0})",
    "F.leaky_relu({0}, 0.2)",
    "torch.sqrt({0}.square() + 1.0)",
    "{0}.pow(3)",
    "{0}.abs()",
    "torch.log1p({0}.square())",
    "{0}.detach()",
    "{0}.clone()",
    "{0}.contiguous()",
    "{0} * {0}",
    "{0} + {0}",
    "torch.zeros_like({0}) + {0}",
    "F.dropout({0}, 0.5, False)",
    "{0}.to(torch.float64)",
    "torch.where({0} > 0, {0}, 0.1 * {0})",
    "{0}.masked_fill({0} > 1.0, 0.0)",
    "F.hardtanh({0})",
    "{0}.nan_to_num()",
    "torch.rsqrt({0}.square() + 1.0)",
    "F.mish({0})",
    "{0} - {0}.mean()",
    "torch.ones_like({0}) * {0}",
)
BINARY = (
    "{0} + {1}",
    "{0} - {1}",
    "{0} * {1}",
    "{0} / ({1}.square() + 1.0)",
    "torch.maximum({0}, {1})",
    "torch.minimum({0}, {1})",
    "torch.where({0} > {1}, {0}, {1})",
    "torch.lerp({0}, {1}, 0.3)",
    "torch.addcmul({0}, {0}, {1})",
    "torch.add({0}, {1}, alpha=2)",
    "torch.atan2({0}, {1}.square() + 1.0)",
    "torch.where(({1} > 0).any(), {0}, {1})",
)


@step(5)
def unary(m: Maker):
    m.call(m.rng.choice(UNARY), m.real(least=0))


@step(5)
def binary(m: Maker):
    x = m.real(least=0)
    y = m.pick(lambda v: v.floating and v is not x and _broadcast(x.shape, v.shape))
    if bool((x.tensor == y.tensor).any()):  # which of two equal numbers is larger, rounding decides
        raise SkipStep
    m.call(m.rng.choice(BINARY), *((x, y) if m.rng.random() < 0.5 else (y, x)))


def _broadcast(a, b) -> bool:
    return all(n == k or 1 in (n, k) for n, k in zip(reversed(a), reversed(b)))


@step(3)
def with_weight(m: Maker):
    """A scale or shift, broadcast."""
    x = m.real()
    rank = m.rng.randint(0, len(x.shape) - (1 if x.lead else 0))
    shape = [1 if m.rng.random() < 0.2 else n for n in x.shape[len(x.shape) - rank :]]
    m.call(m.rng.choice(("{0} + {1}", "{0} * {1}", "{0} * (1.0 + {1})", "torch.maximum({0}, {1})")), x, m.weight(*shape))


@step(1)
def in_place(m: Maker):
    x = m.real(least=2)
    d = m.dim(x, 2)
    at = ", ".join([":"] * d + [m.rng.choice(("0", "1:", ":1", "-1"))])
    write = m.rng.choice(
        (f"OUT[{at}] = 0.0", f"OUT[{at}] = OUT[{at}] * 2.0", "OUT += 1.0", "OUT.relu_()", "OUT.mul_(0.5)", "OUT.clamp_(max=1.0)")
    )
    m.call("OUT = {0}.clone()\n" + write, x)


@step(1.5)
def integers(m: Maker):
    x = m.pick(lambda v: not v.floating)
    m.call(
        m.rng.choice(("{0} + 1", "{0} * 2", "({0} > 1)", "({0} % 3)", "{0}.to(torch.float64) * 0.1", "{0}.eq(0)", "(-{0}).clamp(min=-2)")),
        x,
    )


@step(1.5)
def masks(m: Maker):
    x = m.real()
    mask = m.pick(lambda v: not v.floating and _broadcast(x.shape, v.shape) and len(v.shape) <= len(x.shape))
    m.call(
        m.rng.choice(
            ("{0}.masked_fill({1} > 0, 0.0)", "{0} * ({1} > 0)", "torch.where({1} > 0, {0}, 0.5)", "{0}.masked_fill({1} > 0, -1.0)")
        ),
        x,
        mask,
    )


@step(0.7)
def truth(m: Maker):
    m.call(
        m.rng.choice(("{0} > 0", "({0} > 0) & ({0} < 1)", "~({0} > 0.3)", "torch.logical_or({0} > 1, {0} < -1)", "({0} > 0).sum(-1)")),
        m.real(),
    )


@step(0.7)
def factories(m: Maker):
    x = m.real(least=2)
    t = x.shape[-1]
    m.call(
        m.rng.choice(
            (
                f"{{0}} + torch.arange({t})",
                f"{{0}} * torch.linspace(0.5, 1.0, {t})",
                f"{{0}} + torch.zeros({t})",
                f"{{0}} * torch.full(({t},), 0.5)",
                f"{{0}} * torch.ones({x.shape[-2]}, {t}).tril()",
                f"{{0}} + torch.eye({x.shape[-2]}, {t})",
                "{0} * {0}.new_ones({0}.shape[-1])",
            )
        ),
        x,
    )


# --- reductions ---------------------------------------------------------------------------------------------------------

REDUCTIONS = (
    "{0}.sum(D)",
    "{0}.mean(D)",
    "{0}.sum(D, keepdim=True)",
    "{0}.mean(D, keepdim=True)",
    "{0}.amax(D)",
    "{0}.amin(D, keepdim=True)",
    "torch.logsumexp({0}, D)",
    "{0}.max(D).values",
    "{0}.var(D, unbiased=False)",
    "(1.0 + {0}.square()).prod(D)",
    "{0}.norm(dim=D)",
    "{0}.std(D, correction=0, keepdim=True)",
    "{0}.argmax(D)",
    "F.normalize({0} + 2.0, dim=D)",
)
ALONG = (
    "torch.softmax({0}, D)",
    "torch.log_softmax({0}, D)",
    "torch.cumsum({0}, D)",
    "{0}.flip(D)",
    "torch.roll({0}, 1, D)",
    "torch.sort({0}, D).values",
    "{0} - {0}.mean(D, keepdim=True)",
    "{0} / (1.0 + {0}.abs().sum(D, keepdim=True))",
    "{0} - {0}.amax(D, keepdim=True)",
)


ORDERED = ("max", "amin", "sort", "argmax")  # equal numbers would be told apart by rounding


@step(4)
def reduce(m: Maker):
    x = m.real()
    d = m.dim(x)
    text = m.rng.choice(REDUCTIONS)
    if any(word in text for word in ORDERED):
        m.need_distinct(x, d)
    m.call(text.replace("D", str(m.spell(d, x))), x, lead=x.lead and d > 0)


@step(3)
def along(m: Maker):
    x = m.real()
    d, text = m.dim(x), m.rng.choice(ALONG)
    if any(word in text for word in ORDERED):
        m.need_distinct(x, d)
    m.call(text.replace("D", str(m.spell(d, x))), x)


@step(1)
def reduce_two(m: Maker):
    x = m.real(least=3)
    a, b = sorted(m.rng.sample(range(1 if m.rng.random() < 0.8 else 0, len(x.shape)), 2))
    m.call(f"{{0}}.{m.rng.choice(('sum', 'mean', 'amax'))}(({a}, {b}){m.rng.choice(('', ', keepdim=True'))})", x, lead=x.lead and a > 0)


@step(0.4)
def reduce_all(m: Maker):
    m.call(m.rng.choice(("{0}.sum()", "{0}.mean()", "{0}.square().mean()", "{0}.max()")), m.real(), lead=False)
