"""Steps of random models: attention, and whatever goes by index."""

from __future__ import annotations

from .maker import Maker, SkipStep
from .registry import step
from .spec import Weight

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
        mask = m.rng.choice(
            (
                f"torch.ones({s}, {s}, dtype=torch.bool).tril()",
                f"torch.zeros({b}, 1, {s}, {s})",
                m.weight(1, heads, s, s),
                m.weight(heads, s, s),
            )
        )
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
    m.call(
        m.rng.choice((f"{{0}} + {{1}}[:{t}]", f"{{0}} + {{1}}[torch.arange({t})]", f"{{0}} + F.embedding(torch.arange({t}), {{1}})")),
        x,
        m.weight(t + 2, c),
    )


@step(1.5)
def gathers(m: Maker):
    x = m.real(least=2)
    d = m.dim(x, 2)
    if d == 0:
        raise SkipStep
    m.need_distinct(x, d)
    n = x.shape[d]
    index = f"torch.tensor([{', '.join(str(m.rng.randrange(n)) for _ in range(3))}])"
    colons = ":, " * d
    m.call(
        m.rng.choice(
            (
                f"{{0}}.index_select({d}, {index})",
                f"{{0}}[{colons}{index}]",
                f"{{0}}.gather({d}, {{0}}.argsort({d}))",
                f"{{0}}.index_fill({d}, {index}, 0.0)",
                f"torch.take_along_dim({{0}}, {{0}}.argmax({d}, keepdim=True), {d})",
                f"{{0}}.index_add({d}, {index}, {{0}}.narrow({d}, 0, 1).repeat_interleave(3, {d}))",
                f"torch.zeros_like({{0}}).scatter_add({d}, {{0}}.argsort({d}), {{0}})",
                f"{{0}}.topk(2, {d}).values",
                f"torch.zeros_like({{0}}).scatter({d}, {{0}}.argsort({d}), {{0}})",
            )
        ),
        x,
    )


@step(0.7)
def last_token(m: Maker):
    """Each sample at its own position."""
    x = m.real(3)
    if not x.lead:
        raise SkipStep
    at = m.input(f"torch.randint(0, {x.shape[1]}, ({x.shape[0]},))")
    m.call(
        m.rng.choice(
            (f"{{0}}[torch.arange({x.shape[0]}), {{1}}]", "{0}.gather(1, {1}[:, None, None].expand(-1, 1, {0}.shape[-1])).squeeze(1)")
        ),
        x,
        at,
    )


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
    m.call(
        m.rng.choice(("{0} @ {0}.t()", "torch.softmax({0}, -1)", "{0} * 2.0", "{0}.t()", "{0}.square().sum(0)")),
        m.weight(n, m.rng.choice(m.sizes)),
        lead=False,
    )


@step(0.3)
def counter(m: Maker):
    """A buffer that forward changes."""
    buffer = m.hold(Weight(f"w{len(m.weights)}", "torch.zeros(())", buffer=True))
    m.call(f"{buffer} += 1.0\nOUT = {{0}} * 1.0", m.real())


@step(0.5)
def writes(m: Maker):
    """Rows written by index."""
    x = m.real(3)
    t = x.shape[1]
    if not x.lead or t < 3:
        raise SkipStep
    at = ", ".join(map(str, m.rng.sample(range(t), 2)))
    write = m.rng.choice(
        (f"OUT[:, [{at}]] = 0.5", f"OUT[:, torch.tensor([{at}])] = {{0}}[:, :2]", f"OUT.index_add_(1, torch.tensor([{at}]), {{0}}[:, :2])")
    )
    m.call("OUT = {0}.clone()\n" + write, x)


@step(0.5)
def another_input(m: Maker):
    size = ", ".join(map(str, [m.batch, *m.rng.choices(m.sizes, k=m.rng.randint(0, 2))]))
    size += "," if "," not in size else ""
    m.input(m.rng.choice((f"torch.randn({size})", f"torch.randint(0, 7, ({size}))", f"torch.randn({size}) > 0")))
