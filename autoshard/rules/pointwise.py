"""Rules of ops that work element by element, with broadcasting: every dim is a factor.

Partial sums pass through what is linear: a sum of tensors (all of them P at once), a product (one side P), a choice between two
tensors. Adding a *number* is not linear: every rank would add it. ``saved`` is what the derivative reads.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from autoshard.placement import P, R
from autoshard.program import operands, tensors
from autoshard.rules.call import argument, bind_node, each, needs_grad, operand_names
from autoshard.rules.notation import Choice, OpRule


def elementwise(node: fx.Node, saved: tuple[int, ...] = (), linear: tuple[frozenset[int], ...] = ()) -> OpRule:
    """``..., ... -> ...`` with as many operands and results as the op has."""
    n, m = len(operands(node)), len(tensors(node.meta["val"]))
    return bind_node(node, f"{', '.join(['...'] * n)} -> {', '.join(['...'] * m)}", saved=saved, linear=linear)


def sets(*groups) -> tuple[frozenset[int], ...]:
    return tuple(frozenset(g) for g in groups)


def saves_input(node: fx.Node) -> OpRule:
    return elementwise(node, saved=tuple(range(len(operands(node)))))


def saves_result(node: fx.Node) -> OpRule:
    return elementwise(node, saved=(-1,))


def saves_nothing(node: fx.Node) -> OpRule:
    return elementwise(node)


def linear_map(node: fx.Node) -> OpRule:
    """One tensor in, a multiple of it out."""
    return elementwise(node, linear=sets({0}))


def add(node: fx.Node) -> OpRule:
    """A sum of two tensors; a sum of a tensor and a number is not linear."""
    return elementwise(node, linear=sets({0, 1}) if len(operands(node)) == 2 else ())


def mul(node: fx.Node) -> OpRule:
    """A product: linear in each side, and each side is saved if the other one has a gradient."""
    sides = operands(node)
    if len(sides) == 1:
        return linear_map(node)
    saved = tuple(i for i in (0, 1) if needs_grad(sides[1 - i]))
    return elementwise(node, saved=saved, linear=sets({0}, {1}))


def div(node: fx.Node) -> OpRule:
    """A quotient: linear in the numerator; the denominator is saved, and the result too if the denominator has a gradient."""
    rounding = "rounding_mode" in {a.name for a in node.target._schema.arguments} and argument(node, "rounding_mode")
    if rounding:
        return saves_nothing(node)
    if len(operands(node)) == 1:
        return linear_map(node)
    saved = (1,) if not needs_grad(operands(node)[1]) else (0, 1)
    return elementwise(node, saved=saved, linear=sets({0}))


def where(node: fx.Node) -> OpRule:
    """A choice between two values: linear in them together; a number on one side must be 0 to be shared out among summands."""
    names = operand_names(node)
    values = frozenset(i for i, name in enumerate(names) if name != "condition")
    numbers = [argument(node, name) for name in ("self", "other") if name not in names]
    return elementwise(node, saved=(0,), linear=(values,) if values and not any(numbers) else ())


def masked_fill(node: fx.Node) -> OpRule:
    """Linear in the filled tensor, if it is filled with 0 or with a tensor that is a summand itself."""
    if len(operands(node)) == 3:
        return elementwise(node, saved=(1,), linear=sets({0, 2}))
    return elementwise(node, saved=(1,), linear=sets({0}) if not argument(node, "value") else ())


def lerp(node: fx.Node) -> OpRule:
    return elementwise(node, saved=tuple(range(len(operands(node)))), linear=sets({0, 1}))


def addcmul(node: fx.Node) -> OpRule:
    """self + value * a * b: linear in self together with either factor."""
    return elementwise(node, saved=(1, 2), linear=sets({0, 1}, {0, 2}))


def addcdiv(node: fx.Node) -> OpRule:
    return elementwise(node, saved=(1, 2), linear=sets({0, 1}))


def cast(node: fx.Node) -> OpRule:
    """A change of dtype is linear unless it truncates or makes truth values."""
    before, after = tensors(operands(node)[0].meta["val"])[0].dtype, tensors(node.meta["val"])[0].dtype
    inexact = after.is_floating_point or after.is_complex
    whole = not before.is_floating_point and not before.is_complex
    exact = after != before and (inexact or (whole and after.itemsize >= before.itemsize))
    linear = str(before) != "torch.bool" and str(after) != "torch.bool" and (exact or after == before)
    return elementwise(node, linear=sets({0}) if linear else ())


def overwrite(node: fx.Node) -> OpRule:
    """copy(self, src), fill(self, value): what is written, in self's shape and dtype."""
    return elementwise(node, linear=sets({1}))


def shape_only(rule: OpRule, k: int) -> tuple[Choice, ...]:
    """For ops that read an operand's shape and not its value: it may be a summand, and the result is whole all the same."""
    return (Choice("shape only", (P,), (R,)),)


def prelu(node: fx.Node) -> OpRule:
    """The slope belongs to dim 1, or to all of them."""
    rank = len(operands(node)[0].meta["val"].shape)
    names = [f"d{i}" for i in range(rank)]
    slope = "_" if operands(node)[1].meta["val"].numel() == 1 else names[1]
    if operands(node)[1].meta["val"].dim() == 0:
        slope = ""
    return bind_node(node, f"{' '.join(names)}, {slope} -> {' '.join(names)}", saved=(0, 1))


TABLE = {
    **each("neg negative positive real imag conj conj_physical resolve_conj resolve_neg mul.Scalar multiply.Scalar div.Scalar "
           "divide.Scalar true_divide.Scalar deg2rad rad2deg", linear_map),
    **each("clone contiguous alias detach lift_fresh_copy lift_fresh", linear_map),
    **each("to.dtype to.device to.dtype_layout _to_copy", cast),
    **each("add.Tensor add.Scalar sub.Tensor sub.Scalar subtract.Tensor subtract.Scalar rsub.Tensor rsub.Scalar", add),
    **each("mul.Tensor multiply.Tensor", mul),
    **each("div.Tensor divide.Tensor true_divide.Tensor div.Tensor_mode div.Scalar_mode divide.Tensor_mode", div),
    **each("where.self where.ScalarOther where.ScalarSelf where.Scalar", where),
    **each("masked_fill.Scalar masked_fill.Tensor", masked_fill),
    **each("lerp.Scalar lerp.Tensor", lerp),
    **each("addcmul", addcmul),
    **each("addcdiv", addcdiv),
    **each("copy fill.Tensor", overwrite),
    **each("prelu", prelu),
    **each("abs absolute acos arccos acosh arccosh asin arcsin asinh arcsinh atan arctan atanh arctanh cos cosh sin sinh log log10 "
           "log1p log2 square digamma lgamma polygamma erf erfc erfinv sinc logit special_expit special_erf special_erfc special_erfinv "
           "special_logit special_log1p special_digamma special_gammaln special_sinc i0 special_i0e special_i1 special_i1e "
           "xlogy.Tensor xlogy.Scalar_Other xlogy.Scalar_Self special_xlog1py special_entr special_log_ndtr special_ndtr special_ndtri "
           "log_sigmoid logaddexp logaddexp2 pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar float_power.Tensor_Scalar "
           "float_power.Tensor_Tensor atan2 arctan2 hypot copysign.Tensor copysign.Scalar angle sgn frac _prelu_kernel", saves_input),
    **each("gelu silu mish hardswish hardsigmoid softplus softshrink hardshrink elu celu leaky_relu hardtanh relu6 selu "
           "threshold clamp clamp.Tensor clip clip.Tensor clamp_min clamp_min.Tensor clamp_max clamp_max.Tensor maximum minimum "
           "max.other min.other fmax fmin fmod.Tensor fmod.Scalar remainder.Tensor remainder.Scalar nan_to_num heaviside", saves_input),
    **each("exp exp2 expm1 special_exp2 special_expm1 sqrt rsqrt reciprocal tanh sigmoid relu tan", saves_result),
    **each("sign ceil floor round round.decimals trunc fix isnan isinf isfinite isposinf isneginf isreal signbit "
           "floor_divide floor_divide.Scalar fill.Scalar "
           "logical_not logical_and logical_or logical_xor bitwise_not bitwise_and.Tensor bitwise_and.Scalar bitwise_or.Tensor "
           "bitwise_or.Scalar bitwise_xor.Tensor bitwise_xor.Scalar __and__.Tensor __and__.Scalar __or__.Tensor __or__.Scalar "
           "__xor__.Tensor __xor__.Scalar __lshift__.Scalar __rshift__.Scalar bitwise_left_shift.Tensor bitwise_left_shift.Tensor_Scalar "
           "bitwise_right_shift.Tensor bitwise_right_shift.Tensor_Scalar eq.Tensor eq.Scalar ne.Tensor ne.Scalar lt.Tensor lt.Scalar "
           "le.Tensor le.Scalar gt.Tensor gt.Scalar ge.Tensor ge.Scalar greater.Scalar greater.Tensor less.Tensor less.Scalar "
           "greater_equal.Tensor greater_equal.Scalar less_equal.Tensor less_equal.Scalar not_equal.Tensor not_equal.Scalar isclose "
           "gcd lcm nextafter isin.Tensor_Scalar", saves_nothing),
    **each("zeros_like ones_like full_like empty_like", lambda node: replace(elementwise(node), special=(shape_only,))),
    **each("complex polar", saves_input),
}  # fmt: skip
