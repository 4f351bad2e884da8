"""Steps of random models: products, convolutions, norms."""

from __future__ import annotations

from .maker import Maker, SkipStep
from .registry import step

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
        gate, up = m.call("F.linear({0}, {1}).chunk(2, -1)", x, m.weight(2 * n, k), outs=2)
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
        m.call(
            m.rng.choice(
                (
                    "{0} @ {1}.transpose(-1, -2) * 0.3",
                    "torch.matmul({0}, {1}.mT) * 0.3",
                    "torch.einsum('...id,...jd->...ij', {0}, {1}) * 0.3",
                )
            ),
            x,
            y,
            lead=x.lead,
        )


@step(1.5)
def batched(m: Maker):
    x = m.real(3)
    b, s, k = x.shape
    n = m.rng.choice(m.sizes)
    w = m.weight(s, k, n)
    m.call(
        m.rng.choice(
            (
                "torch.einsum('bsk,skn->bsn', {0}, {1})",
                "torch.bmm({0}.transpose(0, 1), {1}).transpose(0, 1)",
                "torch.einsum('bsk,skn->bn', {0}, {1}) * 0.5",
                "torch.einsum('bsk,skn->bkn', {0}, {1})",
            )
        ),
        x,
        w,
    )


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


@step(1)
def contractions(m: Maker):
    """Other products and distances."""
    x = m.real(least=2)
    c = x.shape[-1]
    if len(x.shape) == 2 and x.lead:
        texts = (
            "F.cosine_similarity({0} + 2.0, {1} + 2.0)",
            "F.bilinear({0}, {0}, {2})",
            "torch.cdist({0} * 2.0, {1} + 3.0)",
            "torch.tensordot({0}, {1}, ([1], [1]))",
        )
    else:
        texts = (
            "torch.einsum('...c,kc->...k', {0}, {1})",
            "torch.einsum('...c,kc->...kc', {0}, {1})",
            "F.cosine_similarity({0} + 2.0, {1}[0] + 2.0, dim=-1)",
            "({0}.unsqueeze(-2) * {1}).sum(-1)",
        )
    m.call(m.rng.choice(texts), x, m.weight(3, c), m.weight(2, c, c))


@step(0.7)
def rotary(m: Maker):
    """Halves of the last dim turned by an angle that depends on the position."""
    x = m.real(least=3)
    t, c = x.shape[-2:]
    if c % 2:
        raise SkipStep
    angle = f"(torch.arange({t})[:, None] * torch.arange(1, {c // 2 + 1}))"
    lo, hi = m.call("{0}.chunk(2, -1)", x, outs=2)
    m.call(f"torch.cat(({{0}} * {angle}.cos() - {{1}} * {angle}.sin(), {{1}} * {angle}.cos() + {{0}} * {angle}.sin()), -1)", lo, hi)


@step(0.4)
def transformer(m: Maker):
    x = m.real(3)
    c = x.shape[-1]
    if not x.lead or c % 2:
        raise SkipStep
    first = m.rng.choice((True, False))
    m.call(f"{m.part(f'nn.TransformerEncoderLayer({c}, 2, 8, dropout=0.0, batch_first=True, norm_first={first})')}({{0}})", x)


@step(0.4)
def multihead(m: Maker):
    x = m.real(3)
    c = x.shape[-1]
    if not x.lead or c % 2:
        raise SkipStep
    m.call(f"{m.part(f'nn.MultiheadAttention({c}, 2, batch_first=True)')}({{0}}, {{0}}, {{0}}, need_weights={m.rng.random() < 0.3})[0]", x)


# --- images -------------------------------------------------------------------------------------------------------------


@step(2)
def picture(m: Maker):
    """Convolutions, pooling and resizing; only models that read images have values for them."""
    x = m.real(4)
    n, c, h, w = x.shape
    if not x.lead:
        raise SkipStep
    k = m.rng.choice((2, 3, 4))
    options = [f"{m.part(f'nn.Conv2d({c}, {k}, 3, padding=1)')}({{0}})", f"{m.part(f'nn.Conv2d({c}, {k}, 1, bias=False)')}({{0}})"]
    if min(h, w) > 1:
        options += [
            "F.max_pool2d({0}, 2)",
            "F.avg_pool2d({0}, 2)",
            "F.adaptive_avg_pool2d({0}, 1)",
            "F.interpolate({0}, scale_factor=2, mode='nearest')",
        ]
        options += [
            f"{m.part(f'nn.BatchNorm2d({c})')}({{0}})",
            f"{m.part(f'nn.GroupNorm(1, {c})')}({{0}})",
            f"{m.part(f'nn.ConvTranspose2d({c}, {k}, 2)')}({{0}})",
        ]
    if c % 4 == 0:
        options.append("F.pixel_shuffle({0}, 2)")
    before = len(m.weights)
    text = m.rng.choice(options)
    m.call(text, x)
    for weight in [w for w in m.weights[before:] if f"self.{w.name}(" not in text]:
        m.weights.remove(weight)


# --- norms --------------------------------------------------------------------------------------------------------------


@step(3)
def norm(m: Maker):
    x = m.real(least=2)
    c = x.shape[-1]
    if c == 1:
        raise SkipStep
    options = [
        f"nn.LayerNorm({c})",
        f"nn.LayerNorm({c}, elementwise_affine=False)",
        f"nn.RMSNorm({c}, eps=1e-6)",
        f"nn.LayerNorm({c}, bias=False)",
    ]
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
