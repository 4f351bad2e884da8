"""The steps that a random model is grown from, by family; each takes a ``Maker``."""

from __future__ import annotations

from math import prod

from .maker import Maker, SkipStep

STEPS: list[tuple[float, object]] = []
"""(how often, step)."""


def step(often: float = 1.0):
    def add(fn):
        STEPS.append((often, fn))
        return fn

    return add


# --- element by element -------------------------------------------------------------------------------------------------

UNARY = (
    "torch.relu({0})", "F.gelu({0})", "F.silu({0})", "torch.tanh({0})", "torch.sigmoid({0})", "F.softplus({0})", "torch.exp(-{0}.abs())",
    "{0}.square()", "-{0}", "{0} * 0.5", "{0} + 1.0", "1.0 - {0}", "{0} / 2", "{0}.clamp(-1.0, 1.0)", "torch.sin({0})", "F.elu({0})",
    "F.leaky_relu({0}, 0.2)", "torch.sqrt({0}.square() + 1.0)", "{0}.pow(3)", "{0}.abs()", "torch.log1p({0}.square())", "{0}.detach()",
    "{0}.clone()", "{0}.contiguous()", "{0} * {0}", "{0} + {0}", "torch.zeros_like({0}) + {0}", "F.dropout({0}, 0.5, False)",
    "{0}.to(torch.float64)", "torch.where({0} > 0, {0}, 0.1 * {0})", "{0}.masked_fill({0} > 1.0, 0.0)", "F.hardtanh({0})",
    "{0}.nan_to_num()", "torch.rsqrt({0}.square() + 1.0)", "F.mish({0})", "{0} - {0}.mean()", "torch.ones_like({0}) * {0}",
)  # fmt: skip
BINARY = (
    "{0} + {1}", "{0} - {1}", "{0} * {1}", "{0} / ({1}.square() + 1.0)", "torch.maximum({0}, {1})", "torch.minimum({0}, {1})",
    "torch.where({0} > {1}, {0}, {1})", "torch.lerp({0}, {1}, 0.3)", "torch.addcmul({0}, {0}, {1})", "torch.add({0}, {1}, alpha=2)",
    "torch.atan2({0}, {1}.square() + 1.0)", "torch.where(({1} > 0).any(), {0}, {1})",
)  # fmt: skip


@step(5)
def unary(m: Maker):
    m.call(m.rng.choice(UNARY), m.real(least=0))


@step(5)
def binary(m: Maker):
    x = m.real(least=0)
    y = m.pick(lambda v: v.floating and v is not x and _broadcast(x.shape, v.shape))
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
    write = m.rng.choice((f"OUT[{at}] = 0.0", f"OUT[{at}] = OUT[{at}] * 2.0", "OUT += 1.0", "OUT.relu_()", "OUT.mul_(0.5)", "OUT.clamp_(max=1.0)"))
    m.call("OUT = {0}.clone()\n" + write, x)


@step(1.5)
def integers(m: Maker):
    x = m.pick(lambda v: not v.floating)
    m.call(m.rng.choice(("{0} + 1", "{0} * 2", "({0} > 1)", "({0} % 3)", "{0}.to(torch.float64) * 0.1", "{0}.eq(0)", "(-{0}).clamp(min=-2)")), x)


@step(1.5)
def masks(m: Maker):
    x = m.real()
    mask = m.pick(lambda v: not v.floating and _broadcast(x.shape, v.shape) and len(v.shape) <= len(x.shape))
    m.call(m.rng.choice(("{0}.masked_fill({1} > 0, 0.0)", "{0} * ({1} > 0)", "torch.where({1} > 0, {0}, 0.5)", "{0}.masked_fill({1} > 0, -1.0)")), x, mask)


@step(0.7)
def truth(m: Maker):
    m.call(m.rng.choice(("{0} > 0", "({0} > 0) & ({0} < 1)", "~({0} > 0.3)", "torch.logical_or({0} > 1, {0} < -1)", "({0} > 0).sum(-1)")), m.real())


@step(0.7)
def factories(m: Maker):
    x = m.real(least=2)
    t = x.shape[-1]
    m.call(m.rng.choice((
        f"{{0}} + torch.arange({t})", f"{{0}} * torch.linspace(0.5, 1.0, {t})", f"{{0}} + torch.zeros({t})", f"{{0}} * torch.full(({t},), 0.5)",
        f"{{0}} * torch.ones({x.shape[-2]}, {t}).tril()", f"{{0}} + torch.eye({x.shape[-2]}, {t})", "{0} * {0}.new_ones({0}.shape[-1])",
    )), x)  # fmt: skip


# --- reductions ---------------------------------------------------------------------------------------------------------

REDUCTIONS = ("{0}.sum(D)", "{0}.mean(D)", "{0}.sum(D, keepdim=True)", "{0}.mean(D, keepdim=True)", "{0}.amax(D)", "{0}.amin(D, keepdim=True)",
              "torch.logsumexp({0}, D)", "{0}.max(D).values", "{0}.var(D, unbiased=False)", "(1.0 + {0}.square()).prod(D)",
              "{0}.norm(dim=D)", "{0}.std(D, correction=0, keepdim=True)", "{0}.argmax(D)", "F.normalize({0} + 2.0, dim=D)")  # fmt: skip
ALONG = ("torch.softmax({0}, D)", "torch.log_softmax({0}, D)", "torch.cumsum({0}, D)", "{0}.flip(D)", "torch.roll({0}, 1, D)", "torch.sort({0}, D).values",
         "{0} - {0}.mean(D, keepdim=True)", "{0} / (1.0 + {0}.abs().sum(D, keepdim=True))", "{0} - {0}.amax(D, keepdim=True)")  # fmt: skip


@step(4)
def reduce(m: Maker):
    x = m.real()
    d = m.dim(x)
    m.call(m.rng.choice(REDUCTIONS).replace("D", str(m.spell(d, x))), x, lead=x.lead and d > 0)


@step(3)
def along(m: Maker):
    x = m.real()
    m.call(m.rng.choice(ALONG).replace("D", str(m.spell(m.dim(x), x))), x)


@step(1)
def reduce_two(m: Maker):
    x = m.real(least=3)
    a, b = sorted(m.rng.sample(range(1 if m.rng.random() < 0.8 else 0, len(x.shape)), 2))
    m.call(f"{{0}}.{m.rng.choice(('sum', 'mean', 'amax'))}(({a}, {b}){m.rng.choice(('', ', keepdim=True'))})", x, lead=x.lead and a > 0)


@step(0.4)
def reduce_all(m: Maker):
    m.call(m.rng.choice(("{0}.sum()", "{0}.mean()", "{0}.square().mean()", "{0}.max()")), m.real(), lead=False)


# --- views --------------------------------------------------------------------------------------------------------------


@step(3)
def merge(m: Maker):
    x = m.real(least=2)
    a = m.rng.randrange(len(x.shape) - 1)
    m.call(m.rng.choice((f"{{0}}.flatten({a}, {a + 1})", f"{{0}}.reshape({_sizes((*x.shape[:a], -1, *x.shape[a + 2 :]))})")), x, lead=x.lead and a > 0)


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
    m.call(m.rng.choice((f"{{0}}.unflatten({d}, {sizes})", f"{{0}}.view({_sizes((*x.shape[:d], a, -1, *x.shape[d + 1 :]))})" if d else f"{{0}}.unflatten({d}, {sizes})")), x, lead=x.lead and d > 0)


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
    text = m.rng.choice((f"{{0}}.transpose({m.spell(a, x)}, {m.spell(b, x)})", f"{{0}}.permute({_sizes(order)})", f"{{0}}.movedim({a}, {b})"))
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
    m.call(m.rng.choice((f"{{0}}.repeat({times})", f"{{0}}.repeat_interleave(2, {d})", f"torch.tile({{0}}, ({times},))")), x, lead=x.lead and d > 0)


# --- slices and joins ---------------------------------------------------------------------------------------------------


@step(3)
def slices(m: Maker):
    x = m.real()
    d = m.dim(x, 2)
    n = x.shape[d]
    colons = ":, " * d
    a = m.rng.randrange(n)
    b = m.rng.randint(a + 1, n)
    texts = [f"{{0}}[{colons}{a}:{b}]", f"{{0}}[{colons}1:]", f"{{0}}[{colons}:-1]", f"{{0}}[{colons}{a}]", f"{{0}}[{colons}::2]",
             f"{{0}}.narrow({d}, {a}, {b - a})", f"{{0}}.select({d}, {a})", f"{{0}}[..., -1:]"]  # fmt: skip
    m.call(m.rng.choice(texts), x, lead=x.lead and d > 0)


@step(2.5)
def chunks(m: Maker):
    x = m.real()
    d = m.dim(x, 2)
    n = x.shape[d]
    k = m.rng.choice([k for k in (2, 3, 4) if k <= n])
    if n % k == 0:
        text = m.rng.choice((f"{{0}}.chunk({k}, {m.spell(d, x)})", f"{{0}}.split({n // k}, {d})", f"{{0}}.unflatten({d}, ({k}, {n // k})).unbind({d})",
                             f"{{0}}.unflatten({d}, ({n // k}, {k})).unbind({d + 1})"))  # fmt: skip
        m.call(text, x, outs=k, lead=x.lead and d > 0)
    else:
        a = m.rng.randrange(1, n)
        m.call(f"{{0}}.split(({a}, {n - a}), {d})", x, outs=2, lead=x.lead and d > 0)


@step(2)
def join(m: Maker):
    x = m.real()
    d = m.dim(x)
    y = m.pick(lambda v: v.floating and len(v.shape) == len(x.shape) and all(a == b for i, (a, b) in enumerate(zip(x.shape, v.shape)) if i != d))
    options = [f"torch.cat(({{0}}, {{1}}), {m.spell(d, x)})"] * 2
    if x.shape == y.shape:
        options += [f"torch.stack(({{0}}, {{1}}), {d})", f"torch.cat(({{0}}, {{1}}, {{0}}), {d})"]
    m.call(m.rng.choice(options), x, y, lead=x.lead and d > 0)


@step(1)
def pad(m: Maker):
    x = m.real(least=2)
    m.call(m.rng.choice(("F.pad({0}, (1, 0))", "F.pad({0}, (0, 2), value=0.5)", "F.pad({0}, (1, -1))", "{0}.tril()", "{0}.triu(1)", "{0}.diff(dim=-1)", "F.glu({0} + 1.0, -1)")), x)


# --- products -----------------------------------------------------------------------------------------------------------


@step(6)
def linear(m: Maker):
    x = m.real()
    k, n = x.shape[-1], m.rng.choice(m.sizes)
    if len(x.shape) == 1 and x.lead:
        raise SkipStep
    kind = m.rng.randrange(4)
    if kind == 0:
        m.call(f"{m.part(f'nn.Linear({k}, {n}, bias={m.rng.random() < 0.7})')}({{0}})", x)
    elif kind == 1:
        m.call("F.linear({0}, {1})", x, m.weight(n, k))
    elif kind == 2:
        m.call("F.linear({0}, {1}, {2})", x, m.weight(n, k), m.weight(n))
    else:
        m.call("{0} @ {1}", x, m.weight(k, n))


@step(2)
def addmm(m: Maker):
    x = m.real(2)
    n = m.rng.choice(m.sizes)
    m.call("torch.addmm({0}, {1}, {2})", m.weight(n), x, m.weight(x.shape[1], n))


@step(2.5)
def mlp(m: Maker):
    x = m.real(least=2)
    k, n = x.shape[-1], m.rng.choice((4, 6, 8, 12))
    up, down = m.part(f"nn.Linear({k}, {n})"), m.part(f"nn.Linear({n}, {k}, bias={m.rng.random() < 0.7})")
    act = m.rng.choice(("F.gelu", "torch.relu", "torch.tanh"))
    y = m.call(f"{down}({act}({up}({{0}})))", x)[0]
    if m.rng.random() < 0.5:
        m.call("{0} + {1}", x, y)


@step(1.5)
def gated(m: Maker):
    """SwiGLU with one fused weight."""
    x = m.real(least=2)
    k, n = x.shape[-1], m.rng.choice((2, 3, 4, 6))
    if m.rng.random() < 0.5:
        gate, up = m.call(f"F.linear({{0}}, {{1}}).chunk(2, -1)", x, m.weight(2 * n, k), outs=2)
    else:
        gate, up = m.call(f"F.linear({{0}}, {{1}}).view(*{{0}}.shape[:-1], {n}, 2).unbind(-1)", x, m.weight(2 * n, k), outs=2)
    m.call("F.linear(F.silu({0}) * {1}, {2})", gate, up, m.weight(k, n))


@step(2)
def product(m: Maker):
    """Two activations."""
    x = m.real(least=2)
    y = m.pick(lambda v: v.floating and len(v.shape) == len(x.shape) and v.shape[:-2] == x.shape[:-2] and v.shape[-1] == x.shape[-1])
    if len(x.shape) == 2 and x.lead and m.rng.random() < 0.8:
        m.call("({0} * {1}).sum(-1)", x, y)
    else:
        m.call(m.rng.choice(("{0} @ {1}.transpose(-1, -2) * 0.3", "torch.matmul({0}, {1}.mT) * 0.3", "torch.einsum('...id,...jd->...ij', {0}, {1}) * 0.3")), x, y, lead=x.lead)


@step(1.5)
def batched(m: Maker):
    x = m.real(3)
    b, s, k = x.shape
    n = m.rng.choice(m.sizes)
    w = m.weight(s, k, n)
    m.call(m.rng.choice(("torch.einsum('bsk,skn->bsn', {0}, {1})", "torch.bmm({0}.transpose(0, 1), {1}).transpose(0, 1)", "torch.einsum('bsk,skn->bn', {0}, {1}) * 0.5",
                         "torch.einsum('bsk,skn->bkn', {0}, {1})")), x, w)  # fmt: skip


@step(0.7)
def convolve(m: Maker):
    x = m.real(3)
    c, n = x.shape[1], m.rng.choice((2, 4, 6))
    m.call(f"{m.part(f'nn.Conv1d({c}, {n}, {m.rng.choice((1, 3))}, padding=1, bias={m.rng.random() < 0.5})')}({{0}})", x)


@step(0.4)
def convolve_groups(m: Maker):
    x = m.real(3)
    c = x.shape[1]
    m.call(f"{m.part(f'nn.Conv1d({c}, {2 * c}, 1, groups={c})')}({{0}})", x)


@step(0.3)
def recurrent(m: Maker):
    x = m.real(3)
    kind = m.rng.choice(("LSTM", "GRU"))
    m.call(f"{m.part(f'nn.{kind}({x.shape[2]}, 4, batch_first=True)')}({{0}})[0]", x)


# --- attention ----------------------------------------------------------------------------------------------------------


@step(3)
def attention(m: Maker):
    """Projections, heads, attention, and back: fused or apart, grouped, masked, causal."""
    x = m.real(3)
    if not x.lead or x.shape[1] < 2:
        raise SkipStep
    b, s, c = x.shape
    heads, d = m.rng.choice((1, 2, 3, 4, 4, 6)), m.rng.choice((2, 3, 4))
    groups = m.rng.choice([g for g in (1, 2, 3, heads) if heads % g == 0]) if m.rng.random() < 0.4 else heads
    if groups == heads and m.rng.random() < 0.6:
        q, k, v = _fused(m, x, heads, d)
    else:
        sides = ((heads, m.weight(heads * d, c)), (groups, m.weight(groups * d, c)), (groups, m.weight(groups * d, c)))
        q, k, v = (m.call(f"F.linear({{0}}, {{1}}).view({b}, {s}, {h}, {d}).transpose(1, 2)", x, w)[0] for h, w in sides)
    if groups < heads and m.rng.random() < 0.6:
        k, v = (m.call(f"{{0}}.repeat_interleave({heads // groups}, dim=1)", t)[0] for t in (k, v))
        groups = heads
    kind = m.rng.randrange(5) if groups == heads else m.rng.choice((0, 1))
    gqa = ", enable_gqa=True" if groups < heads else ""
    if kind == 0:
        out = m.call(f"F.scaled_dot_product_attention({{0}}, {{1}}, {{2}}{gqa})", q, k, v)
    elif kind == 1:
        out = m.call(f"F.scaled_dot_product_attention({{0}}, {{1}}, {{2}}, is_causal=True{gqa})", q, k, v)
    elif kind == 2:
        mask = m.rng.choice((f"torch.ones({s}, {s}, dtype=torch.bool).tril()", f"torch.zeros({b}, 1, {s}, {s})", m.weight(1, heads, s, s), m.weight(heads, s, s)))
        out = m.call("F.scaled_dot_product_attention({0}, {1}, {2}, attn_mask={3})", q, k, v, mask)
    elif kind == 3:
        scores = m.call("{0} @ {1}.transpose(-2, -1) / 2.0", q, k)[0]
        masked = m.call(f"{{0}}.masked_fill(torch.triu(torch.ones({s}, {s}, dtype=torch.bool), 1), float('-inf')).softmax(-1)", scores)[0]
        out = m.call("{0} @ {1}", masked, v)
    else:
        length = m.input(f"torch.randint(1, {s + 1}, ({b},))")
        keep = m.call(f"(torch.arange({s})[None, :] < {{0}}[:, None])[:, None, None, :]", length)[0]
        out = m.call("F.scaled_dot_product_attention({0}, {1}, {2}, attn_mask={3})", q, k, v, keep)
    y = m.call(m.rng.choice((f"{{0}}.transpose(1, 2).reshape({b}, {s}, {heads * d})", "{0}.transpose(1, 2).flatten(2)")), out[0])[0]
    m.call(m.rng.choice(("F.linear({0}, {1})", "F.linear({0}, {1}) + {2}")), y, m.weight(c, heads * d), x)


def _fused(m: Maker, x, heads: int, d: int):
    b, s, c = x.shape
    n = heads * d
    fused = m.call("F.linear({0}, {1})", x, m.weight(3 * n, c))[0]
    kind = m.rng.randrange(4)
    if kind == 0:
        return m.call(f"(t.view({b}, {s}, {heads}, {d}).transpose(1, 2) for t in {{0}}.chunk(3, -1))", fused, outs=3)
    if kind == 1:
        return m.call(f"{{0}}.view({b}, {s}, 3, {heads}, {d}).permute(2, 0, 3, 1, 4).unbind(0)", fused, outs=3)
    if kind == 2:
        return m.call(f"{{0}}.view({b}, {s}, {heads}, 3, {d}).transpose(1, 2).unbind(3)", fused, outs=3)
    return m.call(f"(t.unflatten(-1, ({heads}, {d})).transpose(1, 2) for t in {{0}}.split({n}, dim=2))", fused, outs=3)


# --- norms --------------------------------------------------------------------------------------------------------------


@step(3)
def norm(m: Maker):
    x = m.real(least=2)
    c = x.shape[-1]
    if c == 1:
        raise SkipStep
    options = [f"nn.LayerNorm({c})", f"nn.LayerNorm({c}, elementwise_affine=False)", f"nn.RMSNorm({c}, eps=1e-6)", f"nn.LayerNorm({c}, bias=False)"]
    if len(x.shape) > 2:
        options.append(f"nn.LayerNorm(({x.shape[-2]}, {c}))")
    m.call(f"{m.part(m.rng.choice(options))}({{0}})", x)


@step(0.8)
def channel_norm(m: Maker):
    x = m.real(3)
    c = x.shape[1]
    if x.shape[2] == 1:
        raise SkipStep
    options = [f"nn.GroupNorm(1, {c})", f"nn.GroupNorm({c}, {c})", f"nn.InstanceNorm1d({c}, affine=True)"]
    if m.rng.random() < 0.4 and x.shape[0] > 1:
        options.append(f"nn.BatchNorm1d({c})")
    m.call(f"{m.part(m.rng.choice(options))}({{0}})", x)


@step(0.8)
def hand_made_norm(m: Maker):
    x = m.real(least=2)
    m.call("{0} * torch.rsqrt({0}.square().mean(-1, keepdim=True) + 1e-3) * {1}", x, m.weight(x.shape[-1], offset=1.0))


# --- indexing -----------------------------------------------------------------------------------------------------------


@step(2)
def embed(m: Maker):
    ids = m.pick(lambda v: v.text.startswith("x") and not v.floating)
    top = 7
    n = m.rng.choice(m.sizes)
    kind = m.rng.randrange(4)
    if kind == 0:
        m.call(f"{m.part(f'nn.Embedding({top}, {n}, padding_idx={m.rng.choice((0, 3, -1))})')}({{0}})", ids)
    elif kind == 1:
        m.call("F.embedding({0}, {1})", ids, m.weight(top, n))
    elif kind == 2:
        m.call("{1}[{0}]", ids, m.weight(top, n))
    else:
        m.call(f"F.one_hot({{0}}, {top}).to(torch.float64) @ {{1}}", ids, m.weight(top, n))


@step(1)
def positions(m: Maker):
    x = m.real(3)
    t, c = x.shape[1:]
    m.call(m.rng.choice((f"{{0}} + {{1}}[:{t}]", f"{{0}} + {{1}}[torch.arange({t})]", f"{{0}} + F.embedding(torch.arange({t}), {{1}})")), x, m.weight(t + 2, c))


@step(1.5)
def gathers(m: Maker):
    x = m.real(least=2)
    d = m.dim(x, 2)
    if d == 0:
        raise SkipStep
    n = x.shape[d]
    index = f"torch.tensor([{', '.join(str(m.rng.randrange(n)) for _ in range(3))}])"
    colons = ":, " * d
    m.call(m.rng.choice((
        f"{{0}}.index_select({d}, {index})", f"{{0}}[{colons}{index}]", f"{{0}}.gather({d}, {{0}}.argsort({d}))", f"{{0}}.index_fill({d}, {index}, 0.0)",
        f"torch.take_along_dim({{0}}, {{0}}.argmax({d}, keepdim=True), {d})", f"{{0}}.index_add({d}, {index}, {{0}}.narrow({d}, 0, 1).repeat_interleave(3, {d}))",
        f"torch.zeros_like({{0}}).scatter_add({d}, {{0}}.argsort({d}), {{0}})", f"{{0}}.topk(2, {d}).values", f"torch.zeros_like({{0}}).scatter({d}, {{0}}.argsort({d}), {{0}})",
    )), x)  # fmt: skip


@step(0.7)
def last_token(m: Maker):
    """Each sample at its own position."""
    x = m.real(3)
    if not x.lead:
        raise SkipStep
    at = m.input(f"torch.randint(0, {x.shape[1]}, ({x.shape[0]},))")
    m.call(m.rng.choice((f"{{0}}[torch.arange({x.shape[0]}), {{1}}]", "{0}.gather(1, {1}[:, None, None].expand(-1, 1, {0}.shape[-1])).squeeze(1)")), x, at)


@step(0.5)
def experts(m: Maker):
    """A dense mixture of two experts."""
    x = m.real(least=2)
    c = x.shape[-1]
    gate = m.call("torch.softmax({0} @ {1}, -1)", x, m.weight(c, 2))[0]
    m.call("{0}[..., :1] * ({1} @ {2}) + {0}[..., 1:] * torch.tanh({1} @ {3})", gate, x, m.weight(c, c), m.weight(c, c))


@step(0.5)
def weights_alone(m: Maker):
    """A value that no sample touches."""
    n = m.rng.choice(m.sizes)
    m.call(m.rng.choice(("{0} @ {0}.t()", "torch.softmax({0}, -1)", "{0} * 2.0", "{0}.t()", "{0}.square().sum(0)")), m.weight(n, m.rng.choice(m.sizes)), lead=False)


@step(0.5)
def another_input(m: Maker):
    size = ", ".join(map(str, [m.batch, *m.rng.choices(m.sizes, k=m.rng.randint(0, 2))]))
    size += "," if "," not in size else ""
    m.input(m.rng.choice((f"torch.randn({size})", f"torch.randint(0, 7, ({size}))", f"torch.randn({size}) > 0")))
