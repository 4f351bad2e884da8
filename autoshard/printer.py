"""How each op is written in emitted code: the PyTorch that a person would have written."""

from __future__ import annotations

import math
import operator

import torch
from torch import fx

from autoshard import ops
from autoshard.placement import CONVERSIONS, parse_placement

aten = torch.ops.aten


def literal(arg) -> str:
    """Python text of an argument: nodes by their names, dtypes and devices as torch spells them."""
    if isinstance(arg, fx.Node):
        return arg.meta.get("expr", arg.name)
    if isinstance(arg, (list, tuple)):
        inner = ", ".join(map(literal, arg))
        if isinstance(arg, tuple):
            return f"({inner},)" if len(arg) == 1 else f"({inner})"
        return f"[{inner}]"
    if isinstance(arg, float) and not math.isfinite(arg):
        return f'float("{arg}")'
    if isinstance(arg, torch.device):
        return "self.device"
    if isinstance(arg, str):
        return f'"{arg}"'
    return repr(arg)  # dtypes, layouts and memory formats print as torch.float32 and so on


def _side(arg) -> str:
    """An operand of an infix operator, in parentheses where a minus sign would bind otherwise."""
    text = literal(arg)
    return f"({text})" if text.startswith("-") else text


def _infix(symbol: str):
    def write(a, b, **kwargs):
        if kwargs or not (isinstance(a, fx.Node) or isinstance(b, fx.Node)):
            return None
        return f"{_side(a)} {symbol} {literal(b)}"

    return write


def _call(name: str):
    def write(*args, **kwargs):
        parts = [literal(a) for a in args]
        parts += [f"{k}={literal(v)}" for k, v in kwargs.items()]
        return f"{name}({', '.join(parts)})"

    return write


def _method(name: str):
    def write(x, *args, **kwargs):
        parts = [literal(a) for a in args] + [f"{k}={literal(v)}" for k, v in kwargs.items()]
        return f"{literal(x)}.{name}({', '.join(parts)})"

    return write


def _sizes_method(name: str):
    def write(x, sizes, **kwargs):
        return None if kwargs.get("implicit") else f"{literal(x)}.{name}({', '.join(map(literal, sizes))})"

    return write


def _slice(x, dim, start, end, step=1):
    part = f"{start or ''}:{end if end < x.meta['val'].shape[dim] else ''}" + (f":{step}" if step != 1 else "")
    return f"{literal(x)}[{', '.join([':'] * dim + [part])}]"


def _select(x, dim, index):
    return f"{literal(x)}[{', '.join([':'] * dim + [str(index)])}]"


def _embedding(weight, ids, padding_idx=-1, scale=False, sparse=False):
    if scale or sparse:
        return None
    padding = "" if padding_idx < 0 else f", padding_idx={padding_idx}"
    return f"F.embedding({literal(ids)}, {literal(weight)}{padding})"


def _layer_norm(x, shape, weight=None, bias=None, eps=1e-5, cudnn_enable=True):
    return f"F.layer_norm({', '.join(map(literal, (x, list(shape), weight, bias, eps)))})"


def _attention(q, k, v, mask=None, dropout_p=0.0, is_causal=False, **kwargs):
    parts = [literal(q), literal(k), literal(v)]
    if mask is not None:
        parts.append(f"attn_mask={literal(mask)}")
    if dropout_p:
        parts.append(f"dropout_p={dropout_p}")
    if is_causal:
        parts.append("is_causal=True")
    parts += [f"{key}={literal(value)}" for key, value in kwargs.items() if value not in (None, False)]
    return f"F.scaled_dot_product_attention({', '.join(parts)})"


def _attention_on_numbers(numbers, q, k, v, mask=None, dropout_p=0.0, is_causal=False, **kwargs):
    parts = [literal(q), literal(k), literal(v), str(dropout_p), numbers]
    if mask is not None:
        parts.append(f"attn_mask={literal(mask)}")
    if is_causal:
        parts.append("is_causal=True")
    parts += [f"{key}={literal(value)}" for key, value in kwargs.items() if value not in (None, False)]
    return f"rt.attention({', '.join(parts)})"


def _cross_entropy(logits, labels, weight=None, reduction=1, ignore_index=-100, label_smoothing=0.0):
    parts = [literal(logits), literal(labels)]
    if weight is not None:
        parts.append(f"weight={literal(weight)}")
    parts.append(f'reduction="{("none", "mean", "sum")[reduction]}"')
    if ignore_index != -100:
        parts.append(f"ignore_index={ignore_index}")
    if label_smoothing:
        parts.append(f"label_smoothing={label_smoothing}")
    return f"F.cross_entropy({', '.join(parts)})"


def _index(x, indices):
    parts = [":" if i is None else literal(i) for i in indices]
    if len(parts) == 1 and parts[0] != ":":
        return f"{literal(x)}[{parts[0]}]"
    return f"{literal(x)}[{', '.join(parts)}]"


def _convert(x, text, axis, size):
    rest = "" if size is None else f", size={size}"
    if x.meta.get("zero") == 3 and axis == "data":
        return f'self.gather({literal(x)}, "{text}", self.data{rest})'
    return f'rt.convert({literal(x)}, "{text}", self.{axis}{rest})'


def _local_op(name: str):
    def write(*args, axis=None, **kwargs):
        parts = [literal(a) for a in args] + ([f"self.{axis}"] if axis else [])
        parts += [f"{k}={literal(v)}" for k, v in kwargs.items() if not (v is None or (k == "padding_idx" and v < 0))]
        return f"rt.{name}({', '.join(parts)})"

    return write


def _scaled_sum(x, dims, keepdim, count):
    total = f"{literal(x)}.sum({literal(list(dims))}, keepdim=True)" if keepdim else f"{literal(x)}.sum({literal(list(dims))})"
    return f"{total} / {count}"


PRINT = {
    aten.reshape.default: _sizes_method("reshape"),
    aten.expand.default: _sizes_method("expand"),
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.transpose.int: _method("transpose"),
    aten.permute.default: _method("permute"),
    aten.unsqueeze.default: _method("unsqueeze"),
    aten.squeeze.dim: _method("squeeze"),
    aten.t.default: _method("t"),
    aten.mean.dim: _method("mean"),
    aten.sum.default: _method("sum"),
    aten.sum.dim_IntList: _method("sum"),
    aten.detach.default: _method("detach"),
    aten.masked_fill.Scalar: _method("masked_fill"),
    aten.to.dtype: _method("to"),
    aten.add.Tensor: _infix("+"),
    aten.add.Scalar: _infix("+"),
    aten.sub.Tensor: _infix("-"),
    aten.sub.Scalar: _infix("-"),
    aten.mul.Tensor: _infix("*"),
    aten.mul.Scalar: _infix("*"),
    aten.div.Tensor: _infix("/"),
    aten.div.Scalar: _infix("/"),
    aten.pow.Tensor_Scalar: _infix("**"),
    aten.eq.Tensor: _infix("=="),
    aten.eq.Scalar: _infix("=="),
    aten.ne.Tensor: _infix("!="),
    aten.ne.Scalar: _infix("!="),
    aten.lt.Tensor: _infix("<"),
    aten.lt.Scalar: _infix("<"),
    aten.le.Tensor: _infix("<="),
    aten.le.Scalar: _infix("<="),
    aten.gt.Tensor: _infix(">"),
    aten.gt.Scalar: _infix(">"),
    aten.ge.Tensor: _infix(">="),
    aten.ge.Scalar: _infix(">="),
    aten.__and__.Tensor: _infix("&"),
    aten.__or__.Tensor: _infix("|"),
    aten.bitwise_and.Tensor: _infix("&"),
    aten.bitwise_or.Tensor: _infix("|"),
    aten.linear.default: _call("F.linear"),
    aten.conv2d.default: _call("F.conv2d"),
    aten.native_batch_norm.default: _call("torch.native_batch_norm"),
    aten.embedding.default: _embedding,
    aten.layer_norm.default: _layer_norm,
    aten.gelu.default: _call("F.gelu"),
    aten.silu.default: _call("F.silu"),
    aten.relu.default: _call("F.relu"),
    aten.softmax.int: _call("torch.softmax"),
    aten.log_softmax.int: _call("torch.log_softmax"),
    aten.scaled_dot_product_attention.default: _attention,
    aten.cross_entropy_loss.default: _cross_entropy,
    aten.index.Tensor: _index,
    aten.addmm.default: _call("torch.addmm"),
    aten.mm.default: _call("torch.mm"),
    aten.bmm.default: _call("torch.bmm"),
    aten.matmul.default: _call("torch.matmul"),
    aten.cat.default: _call("torch.cat"),
    aten.stack.default: _call("torch.stack"),
    aten.where.self: _call("torch.where"),
    aten.rsqrt.default: _call("torch.rsqrt"),
    aten.sqrt.default: _call("torch.sqrt"),
    aten.exp.default: _call("torch.exp"),
    aten.log.default: _call("torch.log"),
    aten.sin.default: _call("torch.sin"),
    aten.cos.default: _call("torch.cos"),
    aten.tanh.default: _call("torch.tanh"),
    aten.sigmoid.default: _call("torch.sigmoid"),
    aten.neg.default: lambda x: f"-{literal(x)}",
    aten.abs.default: _call("torch.abs"),
    aten.cumsum.default: _call("torch.cumsum"),
    aten.clamp.default: _call("torch.clamp"),
    aten.minimum.default: _call("torch.minimum"),
    aten.maximum.default: _call("torch.maximum"),
    aten.arange.default: _call("torch.arange"),
    aten.arange.start: _call("torch.arange"),
    aten.full.default: _call("torch.full"),
    aten.zeros.default: _call("torch.zeros"),
    aten.ones.default: _call("torch.ones"),
    aten.rand.default: _call("torch.rand"),
    aten.randn.default: _call("torch.randn"),
    aten.randint.default: _call("torch.randint"),
    aten.randint.low: _call("torch.randint"),
    aten.randperm.default: _call("torch.randperm"),
    aten.normal.float_float: _call("torch.normal"),
    aten.rand_like.default: _call("torch.rand_like"),
    aten.randn_like.default: _call("torch.randn_like"),
    aten.randint_like.default: _call("torch.randint_like"),
    aten.randint_like.low_dtype: _call("torch.randint_like"),
    aten.bernoulli.default: _call("torch.bernoulli"),
    aten.bernoulli.p: _call("torch.bernoulli"),
    aten.multinomial.default: _call("torch.multinomial"),
    ops.convert: _convert,
    ops.vocab_embedding: _local_op("vocab_embedding"),
    ops.vocab_cross_entropy: _local_op("vocab_cross_entropy"),
    ops.batch_norm: _local_op("batch_norm"),
    ops.scaled_sum: _scaled_sum,
}
"""Op -> a function of its arguments that returns Python text, or None where the plain ATen call is clearer."""

ON_NUMBERS = {
    aten.dropout.default: lambda numbers, x, p, train: f"rt.dropout({literal(x)}, {literal(p)}, {numbers})",
    aten.scaled_dot_product_attention.default: _attention_on_numbers,
}
"""Ops that draw with a key -> a function of the expression of their numbers, and their arguments, that returns Python text."""

_FACTORIES = {aten.arange.default, aten.arange.start, aten.full.default, aten.zeros.default, aten.ones.default}


def expression(node: fx.Node) -> str:
    """Python text of one op."""
    kwargs = {k: v for k, v in node.kwargs.items() if k not in ("device", "pin_memory", "layout")}
    if node.target in _FACTORIES or "device" in node.kwargs or (not node.all_input_nodes and _takes_device(node.target)):
        kwargs["device"] = torch.device("cpu")
        if torch.Tag.nondeterministic_seeded in node.target.tags:
            kwargs.setdefault("dtype", node.meta["val"].dtype)  # numbers differ by dtype, and its default may be another by now
    if "draw" in node.meta and node.target in ON_NUMBERS:
        return ON_NUMBERS[node.target](f"self.numbers({literal(node.meta['draw_name'])})", *node.args, **kwargs)
    if node.target is aten.dropout.default:
        return f"rt.dropout({literal(node.args[0])}, {literal(node.args[1])}, self.generator({literal(node.meta['cut_along'])}))"
    write = PRINT.get(node.target)
    text = write(*node.args, **kwargs) if write else None
    if text is None:
        if node.target is operator.getitem:
            return f"{literal(node.args[0])}[{node.args[1]}]"
        text = _call(f"torch.ops.{str(node.target)}")(*node.args, **kwargs)
    return text


def _takes_device(target) -> bool:
    schema = getattr(target, "_schema", None)
    return schema is not None and any(a.name == "device" for a in schema.arguments)


def conversion_comment(text: str, note: str = "") -> str:
    """``P -> R`` as ``all-reduce; backward: nothing``; ``note`` goes behind what runs forward."""
    src, dst = map(parse_placement, text.split(" -> "))
    cell = CONVERSIONS[src.kind, dst.kind]
    words = [w.replace("_", "-").replace("none", "nothing") for w in (cell.forward, cell.backward)]
    return f"{words[0]}{note}; backward: {words[1]}"
