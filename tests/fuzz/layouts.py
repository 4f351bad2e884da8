"""Steps of random models that move, cut and join dims."""

from __future__ import annotations

from math import prod

from .maker import Maker, SkipStep
from .registry import step

# --- views --------------------------------------------------------------------------------------------------------------


@step(3)
def merge(m: Maker):
    x = m.real(least=2)
    a = m.rng.randrange(len(x.shape) - 1)
    m.call(
        m.rng.choice((f"{{0}}.flatten({a}, {a + 1})", f"{{0}}.reshape({_sizes((*x.shape[:a], -1, *x.shape[a + 2 :]))})")),
        x,
        lead=x.lead and a > 0,
    )


@step(3)
def split(m: Maker):
    x = m.real()
    d = m.dim(x, 4)
    n = x.shape[d]
    factors = [a for a in range(2, n) if n % a == 0]
    if not factors:
        raise SkipStep
    a = m.rng.choice(factors)
    sizes = (a, n // a)
    m.call(
        m.rng.choice(
            (
                f"{{0}}.unflatten({d}, {sizes})",
                f"{{0}}.view({_sizes((*x.shape[:d], a, -1, *x.shape[d + 1 :]))})" if d else f"{{0}}.unflatten({d}, {sizes})",
            )
        ),
        x,
        lead=x.lead and d > 0,
    )


def _sizes(sizes) -> str:
    return ", ".join(map(str, sizes))


@step(1.5)
def regroup(m: Maker):
    """Other groups of the dims behind the first."""
    x = m.real(least=2)
    at = 1 if x.lead and m.rng.random() < 0.8 else 0
    rest, sizes = prod(x.shape[at:]), []
    while rest > 1 and len(sizes) < 3 and m.rng.random() < 0.8:
        factor = m.rng.choice([a for a in range(1, rest + 1) if rest % a == 0])
        sizes.append(factor)
        rest //= factor
    m.call(f"{{0}}.reshape({_sizes((*x.shape[:at], *sizes, rest))})", x, lead=x.lead and at > 0)


@step(3)
def permute(m: Maker):
    x = m.real(least=2)
    rank = len(x.shape)
    keep = x.lead and m.rng.random() < 0.75
    a, b = (m.rng.sample(range(1, rank), 2) if rank > 2 else (1, 1)) if keep else m.rng.sample(range(rank), 2)
    order = list(range(1, rank)) if keep else list(range(rank))
    m.rng.shuffle(order)
    order = [0, *order] if keep else order
    text = m.rng.choice(
        (f"{{0}}.transpose({m.spell(a, x)}, {m.spell(b, x)})", f"{{0}}.permute({_sizes(order)})", f"{{0}}.movedim({a}, {b})")
    )
    m.call(text, x, lead=keep)


@step(1.5)
def unit_dims(m: Maker):
    x = m.real()
    rank, d = len(x.shape), m.rng.randint(1, len(x.shape))
    options = [f"{{0}}.unsqueeze({d})", "{0}[..., None]", f"{{0}}.unsqueeze({d}).expand({_sizes((*x.shape[:d], 2, *x.shape[d:]))})"]
    if d < rank and x.shape[d] == 1:
        options += [f"{{0}}.squeeze({d})", f"{{0}}.expand({_sizes((*x.shape[:d], 3, *x.shape[d + 1 :]))})", "{0}.squeeze()"] * 2
    m.call(m.rng.choice(options), x)


@step(0.7)
def repeat(m: Maker):
    x = m.real()
    d = m.dim(x)
    times = ", ".join("2" if i == d else "1" for i in range(len(x.shape)))
    m.call(
        m.rng.choice((f"{{0}}.repeat({times})", f"{{0}}.repeat_interleave(2, {d})", f"torch.tile({{0}}, ({times},))")),
        x,
        lead=x.lead and d > 0,
    )


# --- slices and joins ---------------------------------------------------------------------------------------------------


@step(3)
def slices(m: Maker):
    x = m.real()
    d = m.dim(x, 2)
    n = x.shape[d]
    colons = ":, " * d
    a = m.rng.randrange(n)
    b = m.rng.randint(a + 1, n)
    texts = [
        f"{{0}}[{colons}{a}:{b}]",
        f"{{0}}[{colons}1:]",
        f"{{0}}[{colons}:-1]",
        f"{{0}}[{colons}{a}]",
        f"{{0}}[{colons}::2]",
        f"{{0}}.narrow({d}, {a}, {b - a})",
        f"{{0}}.select({d}, {a})",
        "{0}[..., -1:]",
    ]
    m.call(m.rng.choice(texts), x, lead=x.lead and d > 0)


@step(2.5)
def chunks(m: Maker):
    x = m.real()
    d = m.dim(x, 2)
    n = x.shape[d]
    k = m.rng.choice([k for k in (2, 3, 4) if k <= n])
    if n % k == 0:
        text = m.rng.choice(
            (
                f"{{0}}.chunk({k}, {m.spell(d, x)})",
                f"{{0}}.split({n // k}, {d})",
                f"{{0}}.unflatten({d}, ({k}, {n // k})).unbind({d})",
                f"{{0}}.unflatten({d}, ({n // k}, {k})).unbind({d + 1})",
            )
        )
        m.call(text, x, outs=k, lead=x.lead and d > 0)
    else:
        a = m.rng.randrange(1, n)
        m.call(f"{{0}}.split(({a}, {n - a}), {d})", x, outs=2, lead=x.lead and d > 0)


@step(2)
def join(m: Maker):
    x = m.real()
    d = m.dim(x)
    y = m.pick(
        lambda v: v.floating and len(v.shape) == len(x.shape) and all(a == b for i, (a, b) in enumerate(zip(x.shape, v.shape)) if i != d)
    )
    options = [f"torch.cat(({{0}}, {{1}}), {m.spell(d, x)})"] * 2
    if x.shape == y.shape:
        options += [f"torch.stack(({{0}}, {{1}}), {d})", f"torch.cat(({{0}}, {{1}}, {{0}}), {d})"]
    m.call(m.rng.choice(options), x, y, lead=x.lead and d > 0)


@step(1)
def pad(m: Maker):
    x = m.real(least=2)
    m.call(
        m.rng.choice(
            (
                "F.pad({0}, (1, 0))",
                "F.pad({0}, (0, 2), value=0.5)",
                "F.pad({0}, (1, -1))",
                "{0}.tril()",
                "{0}.triu(1)",
                "{0}.diff(dim=-1)",
                "F.glu({0} + 1.0, -1)",
            )
        ),
        x,
    )
