"""From a seed to a model."""

from __future__ import annotations

import warnings
from random import Random

from . import layers, layouts, lookups, pointwise, table  # noqa: F401  (they fill STEPS)
from .maker import Maker, SkipStep
from .registry import STEPS
from .spec import Spec, Value, Weight

CLASSES = 7


def generate(rng: Random) -> Spec:
    """A random model; torch's generator must be seeded for its numbers, and the default dtype be float64."""
    while True:
        m = Maker(rng)
        _inputs(m)
        often = [weight * rng.choice((0.2, 1, 1, 1, 3)) for weight, _ in STEPS]  # every model has its own taste
        for _ in range(rng.choice((3, 5, 8, 8, 12, 16))):
            _try(m, rng.choices([step for _, step in STEPS], often)[0])
        spec = _finish(m)
        if spec is not None:
            return spec


def _inputs(m: Maker) -> None:
    b, rng = m.batch, m.rng
    t, c, *_ = m.sizes
    kind = rng.choice(("features", "sequence", "tokens", "tokens", "both", "image"))
    if kind in ("features", "both"):
        m.input(f"torch.randn({b}, {rng.choice(m.sizes)})")
    if kind == "sequence":
        m.input(f"torch.randn({b}, {t}, {rng.choice(m.sizes)})")
    if kind == "image":
        m.input(f"torch.randn({b}, {rng.choice((1, 2, 4))}, {t}, {c})")
    if kind in ("tokens", "both"):
        m.input(f"torch.randint(0, {CLASSES}, ({b}, {t}))")
        m.call("F.embedding({0}, {1})", m.values[-1], m.weight(CLASSES, m.rng.choice(m.sizes), tie=False))
    if rng.random() < 0.15:
        m.part("nn.Linear(2, 2)")  # never used


def _try(m: Maker, step) -> bool:
    before = m.snapshot()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            step(m)
        return True
    except (SkipStep, RuntimeError, IndexError, ValueError, TypeError):
        m.back_to(before)
        return False


def _finish(m: Maker) -> Spec | None:
    """A loss that most values reach, and some outputs beside it."""
    rng = m.rng
    read = {text for step in m.steps for text in step.inputs}
    trained = [v for v in m.values if v.floating and v.tensor.requires_grad]
    loose = [v for v in trained if v.text not in read]
    if not trained:
        return None
    ends = loose[-3:] or trained[-1:]
    before = m.snapshot()
    try:
        terms = [_term(m, v) for v in ends]
    except (SkipStep, RuntimeError, IndexError, ValueError):
        m.back_to(before)
        terms = [f"{v.text}.square().mean()" for v in ends]
    loss = terms[0] if len(terms) == 1 else " + ".join(f"{rng.choice((1.0, 0.5, 0.1))} * {t}" for t in terms)
    value = eval(loss, m.scope)
    if not value.isfinite() or not 1e-4 < abs(float(value)) < 1e4:
        return None
    first = [v for v in m.values if any(v.text in step.outs for step in m.steps)]
    outputs = rng.sample(first, min(len(first), rng.choice((0, 0, 1, 1, 2))))
    return m.spec(loss, [v.text for v in outputs])


def _term(m: Maker, v: Value) -> str:
    """A scalar made of a value, as an expression."""
    rng, x = m.rng, v.text
    kinds = ["mean", "sum", "mse", "weighted", "l1", "logits", "none"]
    if v.lead and len(v.shape) >= 2:
        kinds += ["classes"] * 4
    kind = rng.choice(kinds)
    if kind == "sum":
        return f"{x}.square().sum()"
    if kind == "weighted":
        return f"({x} * {m.weight(*v.shape[1:] if v.lead else v.shape)}).sum()"
    if kind in ("mse", "l1") and v.lead:
        target = m.input(f"torch.randn({', '.join(map(str, v.shape))})").text
        how = rng.choice(("F.mse_loss", "F.l1_loss", "F.smooth_l1_loss", "F.huber_loss"))
        extra = rng.choice(("", "", ', reduction="sum"'))
        return f"{how}({x}, {target}{extra})"
    if kind == "logits" and v.lead:
        target = m.input(f"torch.rand({', '.join(map(str, v.shape))})").text
        return rng.choice((f"F.binary_cross_entropy_with_logits({x}, {target})", f"F.kl_div(F.log_softmax({x}, -1), {target}.softmax(-1))"))
    if kind == "none" and v.lead:
        target = m.input(f"torch.randn({', '.join(map(str, v.shape))})").text
        return f"F.mse_loss({x}, {target}, reduction='none').{rng.choice(('mean', 'sum', 'amax'))}()"
    if kind == "classes":
        return _classes(m, v)
    return f"{x}.square().mean()"


def _classes(m: Maker, v: Value) -> str:
    rng, x = m.rng, v.text
    if v.shape[-1] < 3 or rng.random() < 0.5:
        x = m.call("F.linear({0}, {1})", v, m.weight(CLASSES, v.shape[-1]))[0].text
    logits = m.scope[x]
    n, shape = logits.shape[-1], tuple(logits.shape[:-1])
    ignored = rng.random() < 0.4
    size = ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "")
    labels = f"torch.randint({-1 if ignored else 0}, {n}, ({size}))"
    y = m.input(labels).text
    extra = ", ignore_index=-1" if ignored else ""
    if rng.random() < 0.2:
        extra += ", label_smoothing=0.1"
    if rng.random() < 0.2:
        extra += f", weight={m.hold(Weight(f'w{len(m.weights)}', f'0.5 + torch.rand({n})', buffer=True))}"
    if rng.random() < 0.25:
        extra += ', reduction="sum"'
    if len(shape) > 1:
        if rng.random() < 0.7:
            return f"F.cross_entropy({x}.flatten(0, {len(shape) - 1}), {y}.flatten(){extra})"
        return f"F.cross_entropy({x}.movedim(-1, 1), {y}{extra})"
    if rng.random() < 0.2 and not extra:
        return f"F.nll_loss(F.log_softmax({x}, -1), {y})"
    return f"F.cross_entropy({x}, {y}{extra})"
