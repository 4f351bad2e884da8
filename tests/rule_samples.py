"""Sample calls of every op that has a sharding rule: op -> list of argument tuples (a dict at the end holds keyword arguments).

Sizes are small; 5 is cut unevenly, 4 and 6 evenly. Floats lie in (0.1, 0.9), inside every function's domain.
"""

from __future__ import annotations

import torch

from autoshard.rules import RULES, pointwise
from autoshard.rules.call import aten


def f(*shape: int) -> torch.Tensor:
    return torch.rand(shape, dtype=torch.float64) * 0.8 + 0.1


def i(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(high, shape)


def b(*shape: int) -> torch.Tensor:
    return torch.rand(shape) < 0.5


def z(*shape: int) -> torch.Tensor:
    return torch.complex(f(*shape), f(*shape))


def square(*shape: int) -> torch.Tensor:
    """Matrices that are easy to invert."""
    return f(*shape, shape[-1]) / 4 + torch.diag(torch.arange(1.0, shape[-1] + 1)).double()


def symmetric(*shape: int) -> torch.Tensor:
    return square(*shape) + square(*shape).mT


def permutation(*shape: int) -> torch.Tensor:
    """Distinct indices along dim 0."""
    return torch.stack([torch.randperm(shape[0]) for _ in range(max(1, torch.Size(shape[1:]).numel()))], 1).reshape(shape)


WHOLE = ("bitwise", "__", "gcd", "lcm")
"""Beginnings of the names of ops on whole numbers."""


def automatic(op) -> list[tuple]:
    """Arguments of an elementwise op: tensors that are broadcast together, and tensors of one shape."""
    whole = op._schema.name.split("::")[1].startswith(WHOLE)

    def arguments(shapes):
        shapes = iter(shapes)
        for arg in op._schema.arguments:
            if "Tensor" in str(arg.type) and "Optional" not in str(arg.type):
                yield i(5, *next(shapes)) + 1 if whole else f(*next(shapes))
            elif not arg.kwarg_only and not arg.has_default_value():
                yield 2 if whole or "int" in str(arg.type) else 0.7

    return [tuple(arguments([(5, 6), (6,), (5, 1)])), tuple(arguments([(5, 6), (5, 6), (5, 6)]))]


def table(rows: dict[str, list[tuple]]) -> dict:
    return {aten(*name.split(".")): calls for names, calls in rows.items() for name in names.split()}


POINTWISE = table({
    "acosh arccosh": [(f(5, 6) + 1,)],
    "polygamma": [(1, f(5, 6))],
    "pow.Scalar": [(0.7, f(5, 6))],
    "xlogy.Scalar_Self": [(0.7, f(5, 6))],
    "where.self": [(b(5, 6), f(5, 6), f(6)), (b(5, 1), f(6), f(5, 6))],
    "where.ScalarOther": [(b(5, 6), f(5, 6), 0.7), (b(5, 6), f(5, 6), 0.0)],
    "where.ScalarSelf": [(b(5, 6), 0.7, f(5, 6)), (b(5, 6), 0, f(6))],
    "where.Scalar": [(b(5, 6), 0.5, 0.2)],
    "masked_fill.Scalar": [(f(5, 6), b(5, 6), -1e4), (f(5, 6), b(6), 0)],
    "masked_fill.Tensor": [(f(5, 6), b(5, 6), f())],
    "to.dtype": [(f(5, 6), torch.float32), (f(5, 6), torch.int64),
                 (i(5, 5, 6), torch.float64), (b(5, 6), torch.float64), (i(5, 6), torch.bool)],
    "_to_copy": [(f(5, 6), {"dtype": torch.float32})],
    "to.device": [(f(5, 6), torch.device("cpu"), torch.float32)],
    "to.dtype_layout": [(f(5, 6), {"dtype": torch.float32})],
    "imag": [(z(5, 6),)],
    "resolve_conj conj conj_physical angle sgn": [(z(5, 6),)],
    "mul.Tensor multiply.Tensor div.Tensor divide.Tensor true_divide.Tensor": [
        (f(5, 6), f(6)), (f(5, 6), f(5, 6)), (f(5, 6), 0.7), (f(5, 1), f(6)),
    ],
    "div.Tensor_mode divide.Tensor_mode": [(f(5, 6), f(6), {"rounding_mode": "floor"}), (f(5, 6), f(6), {"rounding_mode": None})],
    "div.Scalar_mode": [(f(5, 6), 0.3, {"rounding_mode": "floor"}), (f(5, 6), 0.3, {"rounding_mode": None})],
    "add.Tensor sub.Tensor subtract.Tensor rsub.Tensor": [(f(5, 6), f(6)), (f(6), f(5, 6)), (f(5, 6), f(1), {"alpha": 2})],
    "add.Scalar sub.Scalar": [(f(5, 6), 0.7)],
    "clamp clip": [(f(5, 6), 0.3, 0.6)],
    "clamp.Tensor clip.Tensor": [(f(5, 6), f(6), None)],
    "round.decimals": [(f(5, 6), {"decimals": 1})],
    "lerp.Tensor": [(f(5, 6), f(6), f(5, 1))],
    "prelu": [(f(5, 6, 4) - 0.5, f(6)), (f(5, 6) - 0.5, f(1))],
    "_prelu_kernel": [(f(5, 6, 4) - 0.5, f(1, 6, 1))],
    "fill.Tensor": [(f(5, 6), f())],
    "gelu": [(f(5, 6), {"approximate": "tanh"}), (f(5, 6),)],
    "nextafter copysign.Tensor heaviside": [(f(5, 6) - 0.5, f(6))],
    "isin.Tensor_Scalar": [(i(3, 5, 6), 1)],
    "bitwise_left_shift.Tensor_Scalar bitwise_right_shift.Tensor_Scalar __lshift__.Scalar __rshift__.Scalar": [(i(9, 5, 6), 1)],
    "full_like": [(f(5, 6), 3.0)],
})  # fmt: skip

SAMPLES = {
    **{op: automatic(op) for op in pointwise.TABLE if op not in POINTWISE},
    **POINTWISE,
    # views
    **table({
        "reshape view _unsafe_view": [
            (f(4, 6, 8), [24, 8]), (f(4, 6), [2, 2, 3, 2]), (f(12, 8), [16, 6]), (f(6, 4), [4, 6]), (f(4, 1, 6), [4, 6, 1, 1]),
            (f(2, 3, 5, 3, 2), [3, 2, 5, 2, 3]), (f(6, 8), [48]), (f(5, 6), [5, 6]), (f(3, 4, 6), [3, 24]), (f(1), []),
        ],
        "flatten.using_ints": [(f(4, 6, 8), 1, 2)],
        "unflatten.int": [(f(4, 24), 1, [4, 6])],
        "view_as reshape_as": [(f(4, 24), f(4, 4, 6))],
        "atleast_1d atleast_2d atleast_3d": [(f(5, 6),), (f(6),)],
        "ravel": [(f(4, 6),)],
        "transpose.int swapaxes swapdims": [(f(4, 5, 6), 1, -1), (f(4, 5), 0, 1)],
        "t": [(f(5, 6),), (f(6),)],
        "mT": [(f(4, 5, 6),)],
        "numpy_T": [(f(4, 5, 6),)],
        "permute": [(f(4, 5, 6), [2, 0, -2])],
        "movedim.int moveaxis.int": [(f(4, 5, 6), 0, -1)],
        "movedim.intlist moveaxis.intlist": [(f(4, 5, 6), [0, 1], [2, 0])],
        "unsqueeze": [(f(5, 6), 1), (f(5, 6), -1), (f(), 0)],
        "squeeze": [(f(5, 1, 6),)],
        "squeeze.dim": [(f(5, 1, 6), 1), (f(5, 6), 0)],
        "squeeze.dims": [(f(5, 1, 6, 1), [1, 3]), (f(5, 1, 6), [0, 1])],
        "expand broadcast_to": [(f(5, 1, 6), [5, 4, 6]), (f(6), [4, 6]), (f(4, 2, 1, 3), [4, 2, 3, 3])],
        "expand_as": [(f(5, 1, 6), f(5, 4, 6))],
        "repeat tile": [(f(4, 6), [2, 1]), (f(4, 6), [3, 1, 2]), (f(1, 6), [4, 1]), (f(6), [1, 2])],
        "repeat_interleave.self_int": [
            (f(4, 6), 2, 0), (f(4, 6), 2), (f(4, 6), 2, 1, {"output_size": 12}), (f(4, 1), 3, 1), (f(4, 6), 1, 0),
        ],
        "unfold": [(f(5, 6, 4), 1, 3, 2), (f(5, 6), -1, 2, 1)],
        "diagonal": [(f(4, 5, 6), 0, 1, 2)],
        "diag_embed": [(f(4, 6),)],
        "view_as_real": [(z(5, 6),)],
        "view_as_complex": [(f(5, 6, 2),)],
    }),
    # slicing
    **table({
        "slice.Tensor": [
            (f(5, 12), 1, 0, 4), (f(5, 12), 1, 4, 12), (f(12, 5), 0, 8, 12), (f(5, 32), 1, 16, 24), (f(5, 12), 1, 0, 9223372036854775807),
            (f(5, 12), 1, 1, 12), (f(5, 12), -1, -4, 9223372036854775807), (f(5, 12), 1, 0, 12, 2), (f(5, 6), 0, 0, 1),
        ],
        "narrow": [(f(5, 12), 1, 4, 8)],
        "select.int": [(f(4, 5, 6), 1, 2), (f(4, 5), 0, -1)],
        "cat concat concatenate": [
            ([f(5, 4), f(5, 4)], -1), ([f(8, 5), f(4, 5), f(4, 5)],), ([f(5, 1), f(5, 6)], 1), ([f(6, 5), f(0)],), ([f(5, 6), f(5, 6)], 0),
        ],
        "stack": [([f(5, 6), f(5, 6)], 1), ([f(6), f(6), f(6)], -1)],
        "pad": [(f(5, 6), [0, 1], "constant", 7.0), (f(5, 6), [1, 1], "reflect"), (f(4, 5, 6), [0, 0, 1, 0])],
        "constant_pad_nd": [(f(5, 6), [2, -1]), (f(5, 6), [0, 1], 1.0)],
        "hstack": [([f(5, 4), f(5, 4)],), ([f(4), f(4)],)],
        "linalg_cross": [(f(5, 3), f(5, 3)), (f(3, 6), f(3, 6), {"dim": 0})],
        "meshgrid.indexing": [([f(5), f(6)], {"indexing": "ij"}), ([f(5), f(6), f(4)], {"indexing": "xy"})],
        "trace diag": [(f(6, 6),)],
        "reflection_pad1d replication_pad1d": [(f(4, 5, 6), [1, 2])],
        "reflection_pad2d replication_pad2d": [(f(4, 5, 6, 6), [1, 2, 1, 1])],
        "flip": [(f(5, 6), [-1])],
        "roll": [(f(5, 6), [1], [1]), (f(5, 6), [2])],
        "rot90": [(f(4, 5, 6), 1, [1, 2])],
        "tril triu": [(f(4, 5, 6), 1)],
        "slice_scatter": [(f(5, 6), f(5, 2), 1, 2, 4)],
        "select_scatter": [(f(5, 6), f(5), 1, 2)],
        "diagonal_scatter": [(f(4, 5, 6), f(4, 5), 0, 1, 2)],
        "glu": [(f(5, 8),), (f(12, 5), 0)],
        "diff": [(f(5, 6),), (f(6, 5), 1, 0), (f(5, 6), 1, -1, f(5, 1)), (f(5, 6), 1, -1, None, f(5, 2))],
    }),
    # reductions
    **table({
        "sum mean amax amin max min var std prod norm.Scalar median any all argmax argmin linalg_vector_norm linalg_norm": [(f(5, 6),)],
        "nansum": [(f(5, 6),), (f(4, 5, 6), [0, 2])],
        "count_nonzero": [(f(5, 6),), (f(4, 5, 6), 2)],
        "count_nonzero.dim_IntList": [(f(4, 5, 6), [0, 2])],
        "sum.dim_IntList mean.dim": [(f(5, 6), [1], True), (f(4, 5, 6), [0, -1]), (f(5, 6), [])],
        "norm.ScalarOpt_dim": [(f(5, 6), 2, [1], True)],
        "quantile.scalar": [(f(5, 6), 0.3, 1), (f(5, 6), 0.3)],
        "logsumexp special_logsumexp": [(f(5, 6), [1]), (f(5, 6), [0], True)],
        "prod.dim_int any.dim all.dim": [(f(5, 6), 1), (f(5, 6), 0, True)],
        "any.dims all.dims": [(f(4, 5, 6), [0, 1])],
        "max.dim min.dim median.dim mode": [(f(5, 6), 1), (f(5, 6), 0, True)],
        "kthvalue": [(f(5, 6), 2)],
        "var.dim std.dim var_mean.dim std_mean.dim": [(f(5, 6), [1]), (f(5, 6), [0], True, True)],
        "var.correction std.correction var_mean.correction std_mean.correction": [(f(5, 6), [1], {"correction": 0, "keepdim": True})],
        "var_mean std_mean": [(f(5, 6),)],
        "aminmax": [(f(5, 6), {"dim": 1})],
        "softmax.int log_softmax.int special_softmax special_log_softmax": [(f(5, 6), -1), (f(5, 6), 0)],
        "_softmax _log_softmax": [(f(5, 6), 1, False)],
        "cumsum cumprod logcumsumexp cummax cummin": [(f(5, 6), 1)],
        "sort argsort": [(f(5, 6), 1)],
        "sort.stable argsort.stable": [(f(5, 6), {"stable": True, "dim": 0})],
        "topk": [(f(5, 6), 2)],
        "histc": [(f(5, 6), 4, 0, 1), (f(6), 4)],
    }),
    # products
    **table({
        "linear": [(f(4, 5, 6), f(8, 6), f(8)), (f(5, 6), f(4, 6)), (f(6), f(4, 6), f(4)), (f(5, 6), f(6))],
        "addmm": [(f(8), f(5, 6), f(6, 8)), (f(5, 8), f(5, 6), f(6, 8), {"alpha": 2, "beta": 3}), (f(1, 8), f(5, 6), f(6, 8))],
        "addmv": [(f(5), f(5, 6), f(6))],
        "baddbmm": [(f(4, 5, 8), f(4, 5, 6), f(4, 6, 8)), (f(1, 5, 1), f(4, 5, 6), f(4, 6, 8))],
        "addbmm": [(f(5, 8), f(4, 5, 6), f(4, 6, 8))],
        "addr": [(f(5, 6), f(5), f(6))],
        "matmul": [
            (f(6), f(6)), (f(5, 6), f(6)), (f(6), f(6, 4)), (f(5, 6), f(6, 4)), (f(3, 5, 6), f(6, 4)), (f(5, 6), f(3, 6, 4)),
            (f(3, 5, 6), f(3, 6, 4)), (f(2, 1, 5, 6), f(4, 6, 3)), (f(3, 5, 6), f(6)), (f(6), f(3, 6, 4)),
        ],
        "mm": [(f(5, 6), f(6, 4))],
        "bmm": [(f(4, 5, 6), f(4, 6, 3))],
        "mv": [(f(5, 6), f(6))],
        "dot vdot": [(f(6), f(6))],
        "outer ger": [(f(5), f(6))],
        "einsum": [
            ("bsh,hn->bsn", [f(4, 5, 6), f(6, 3)]), ("i,i", [f(6), f(6)]), ("...ij,...jk->...ik", [f(4, 5, 6), f(4, 6, 3)]),
            ("ii->i", [f(6, 6)]), ("bec,be->c", [f(4, 3, 6), f(4, 3)]), ("ba", [f(5, 6)]), ("ab,bc,cd->ad", [f(3, 4), f(4, 5), f(5, 6)]),
        ],
        "tensordot": [(f(4, 5, 6), f(6, 5, 3), [1, 2], [1, 0]), (f(4, 6), f(6, 5), [-1], [0])],
        "bilinear": [(f(4, 5, 6), f(4, 5, 3), f(8, 6, 3), f(8)), (f(5, 6), f(5, 4), f(3, 6, 4), None)],
        "scaled_dot_product_attention": [
            (f(2, 4, 5, 3), f(2, 4, 6, 3), f(2, 4, 6, 2)),
            (f(2, 4, 5, 3), f(2, 4, 5, 3), f(2, 4, 5, 3), None, 0.0, True),
            (f(2, 4, 6, 3), f(2, 4, 5, 3), f(2, 4, 5, 3), f(1, 4, 6, 5)),
            (f(2, 4, 6, 3), f(2, 4, 5, 3), f(2, 4, 5, 3), b(2, 1, 6, 5) | (torch.arange(5) == 2)),
            (f(2, 4, 6, 3), f(2, 4, 5, 3), f(2, 4, 5, 3), f(6, 5), 0.0, False, {"scale": 0.5}),
            (f(2, 6, 4, 3), f(2, 2, 5, 3), f(2, 2, 5, 3), None, 0.0, False, {"enable_gqa": True}),
            (f(2, 8, 4, 3), f(2, 2, 5, 3), f(2, 2, 5, 3), f(2, 8, 4, 5), 0.0, False, {"enable_gqa": True}),
            (f(2, 4, 4, 3), f(2, 1, 5, 3), f(2, 1, 5, 3), f(2, 1, 4, 5), 0.0, False, {"enable_gqa": True}),
            (f(4, 5, 3), f(4, 6, 3), f(4, 6, 3)),
        ],
    }),
    # normalisation
    **table({
        "layer_norm": [(f(4, 5, 6), [6], f(6), f(6)), (f(4, 5, 6), [5, 6], None, f(5, 6)), (f(5, 6), [6])],
        "native_layer_norm": [(f(4, 5, 6), [6], f(6), f(6), 1e-5)],
        "rms_norm": [(f(4, 5, 6), [6], f(6)), (f(5, 6), [6])],
        "_fused_rms_norm": [(f(4, 5, 6), [6], f(6), 1e-5)],
        "_weight_norm _weight_norm_interface": [(f(6, 5), f(6, 1)), (f(6, 4, 3), f(6, 1, 1), 0)],
        "group_norm": [(f(5, 6, 4), 3, f(6), f(6)), (f(4, 6), 2), (f(4, 6, 3), 6, f(6), f(6)), (f(4, 6, 3), 1, f(6))],
        "batch_norm": [
            (f(6, 4, 3), f(4), f(4), f(4), f(4), False, 0.1, 1e-5, False), (f(6, 4), f(4), f(4), None, None, True, 0.1, 1e-5, False),
            (f(6, 4), None, None, f(4), f(4), False, 0.1, 1e-5, False),
        ],
        "native_batch_norm": [(f(6, 4, 3), f(4), f(4), None, None, True, 0.1, 1e-5), (f(6, 4), None, None, None, None, True, 0.1, 1e-5)],
        "_native_batch_norm_legit_functional": [(f(6, 4, 3), f(4), f(4), f(4), f(4), True, 0.1, 1e-5)],
        "_native_batch_norm_legit_no_training": [(f(6, 4, 3), f(4), f(4), f(4), f(4), 0.1, 1e-5)],
        "instance_norm": [
            (f(4, 6, 5), f(6), f(6), None, None, True, 0.1, 1e-5, False), (f(4, 6, 5), None, None, f(6), f(6), False, 0.1, 1e-5, False),
        ],
    }),
    # look-ups
    **table({
        "embedding": [(f(8, 6), i(8, 4, 5)), (f(8, 6), i(8, 5), 3), (f(7, 4), i(7, 6), -1, True)],
        "index.Tensor": [
            (f(4, 6), [i(4, 5)]), (f(4, 5, 6), [None, i(5, 6)]), (f(4, 5, 6), [i(4, 6, 1), i(5, 4)]),
            (f(4, 5, 6), [i(4, 6), None, i(6, 6)]),
            (f(4, 6), [b(4)]), (f(4, 6, 3), [i(4), i(6, 5)]),
        ],
        "index_put": [
            (f(4, 6), [torch.tensor([0, 2])], f(2, 6)), (f(4, 6), [i(4, 5)], f(5, 6), True), (f(4, 5, 6), [None, i(5, 6)], f(6), True),
            (f(4, 6), [b(4, 6)], f()), (f(4, 5, 6), [i(4, 4), i(5, 4)], f(4, 6), True), (f(6, 4), [i(6, 5)], f(), True),
        ],
        "gather": [(f(4, 6), 1, i(6, 4, 5)), (f(5, 6), 0, i(5, 3, 6)), (f(5, 6), 0, i(5, 6, 4))],
        "take_along_dim": [(f(4, 6), i(6, 4, 5), 1), (f(1, 6), i(6, 4, 5), 1), (f(5, 6), i(5, 1, 6), 0), (f(5, 6), i(5, 4))],
        "scatter.src": [(f(6, 5), 0, permutation(6, 5), f(6, 5)), (i(9, 6, 5), 0, permutation(6, 5)[:3, :4], i(9, 6, 5))],
        "scatter.value": [(f(6, 5), 0, i(6, 3, 5), 0.7), (f(6, 5), 0, i(6, 3, 5), 0)],
        "scatter_add": [(f(6, 5), 0, i(6, 4, 5), f(4, 5)), (f(5, 6), 1, i(6, 3, 4), f(3, 4))],
        "index_select": [(f(5, 6), 1, i(6, 4)), (f(5, 6), 1, i(6))],
        "index_copy": [(f(5, 6), 1, torch.tensor([4, 1]), f(5, 2))],
        "index_add": [(f(5, 6), 1, i(6, 4), f(5, 4)), (f(5, 6), 0, i(5, 8), f(8, 6), {"alpha": 2})],
        "index_fill.int_Scalar": [(f(5, 6), 1, torch.tensor([4, 1]), 0.7), (f(5, 6), 1, torch.tensor([4, 1]), 0)],
        "index_fill.int_Tensor": [(f(5, 6), 1, torch.tensor([4, 1]), f())],
        "one_hot": [(i(4, 5, 6), 4)],
        "bucketize.Tensor": [(f(5, 6), f(4).sort()[0])],
        "searchsorted.Tensor": [(f(5, 4).sort()[0], f(5, 6)), (f(4).sort()[0], f(5, 6))],
        "scatter_reduce.two": [
            (f(6, 5), 0, i(6, 4, 5), f(4, 5), "sum"), (f(6, 5), 0, i(6, 4, 5), f(4, 5), "sum", {"include_self": False}),
            (f(6, 5), 1, i(5, 6, 4), f(6, 4), "amax"), (f(6, 5), 0, i(6, 4, 5), f(4, 5), "mean"),
            (i(9, 6, 5), 0, i(6, 3, 5), i(9, 4, 5), "prod"),
        ],
        "index_reduce": [(f(5, 6), 0, i(5, 4), f(4, 6), r) for r in ("mean", "amin", "prod")],
        "isin.Tensor_Tensor": [(i(9, 5, 6), i(9, 4))],
        "masked_scatter": [(f(5, 6), b(5, 6), f(30))],
        "take": [(f(5, 6), i(30, 4))],
        "put": [(f(5, 6), torch.randperm(30)[:4], f(4))],
        "segment_reduce": [(f(6), "sum", {"lengths": torch.tensor([2, 4])})],
        "bincount": [(i(4, 6), None, 4)],
    }),
    # losses
    **table({
        "cross_entropy_loss": [
            (f(6, 5), torch.tensor([1, -100, 4, 0, 2, 3]), None, 2), (f(6, 5), i(5, 6), f(5), 2, -100, 0.1),
            (f(6, 5), i(5, 6), f(5), 0, 3, 0.1),
            (f(6, 5), i(5, 6), None, 1), (f(4, 5, 6), i(5, 4, 6), None, 2), (f(4, 5, 6), i(5, 4, 6), None, 0), (f(6, 5), f(6, 5), f(5), 2),
            (f(5), i(5), None, 2), (f(4, 5, 3), f(4, 5, 3), None, 0),
        ],
        "nll_loss": [(f(6, 5), i(5, 6), f(5), 2), (f(6, 5), i(5, 6), None, 0), (f(6, 5), i(5, 6), None, 1)],
        "nll_loss_nd": [(f(4, 5, 6), i(5, 4, 6), None, 2), (f(5), i(5), None, 0)],
        "nll_loss2d": [(f(4, 5, 6, 3), i(5, 4, 6, 3), None, 2)],
        "poisson_nll_loss": [(f(5, 6), f(5, 6), True, False, 1e-8, r) for r in range(3)],
        "margin_ranking_loss": [(f(5, 6), f(5, 6), f(5, 6), 0.1, r) for r in range(3)],
        "hinge_embedding_loss": [(f(5, 6), torch.ones(5, 6), 1.0, r) for r in range(3)],
        "cosine_embedding_loss": [(f(5, 6), f(5, 6), torch.ones(5), 0.1, r) for r in range(3)],
        "triplet_margin_loss": [(f(5, 6), f(5, 6), f(5, 6), 1.0, 2.0, 1e-6, False, r) for r in range(3)],
        "multi_margin_loss": [(f(5, 6), i(6, 5), 1, 1, f(6), r) for r in range(3)],
        "multilabel_margin_loss": [(f(5, 6), i(6, 5, 6), r) for r in range(3)],
        "ctc_loss.Tensor": [
            (f(7, 5, 6).log_softmax(-1), i(5, 5, 3) + 1, torch.full((5,), 7), torch.tensor([3, 2, 3, 1, 2]), 0, r) for r in range(3)
        ],
        "ctc_loss.IntList": [(f(7, 2, 6).log_softmax(-1), i(5, 2, 3) + 1, [7, 7], [3, 2])],
        "cdist": [(f(3, 5, 4), f(3, 6, 4)), (f(5, 4), f(6, 4))],
        "pairwise_distance": [(f(5, 6), f(5, 6)), (f(4, 5, 6), f(6), 2.0, 1e-6, True)],
        "cosine_similarity": [(f(5, 6), f(5, 6)), (f(4, 5, 6), f(5, 1), 1)],
    }),
    **table({
        "mse_loss l1_loss smooth_l1_loss huber_loss kl_div soft_margin_loss": [(f(5, 6), f(5, 6), r) for r in range(3)],
    }),
    aten("binary_cross_entropy"): [(f(5, 6), f(5, 6), f(6), r) for r in range(3)],
    aten("binary_cross_entropy_with_logits"): [(f(5, 6), f(5, 6), f(5, 1), f(6), r) for r in range(3)],
    # linear algebra and Fourier transforms
    **table({
        "inverse linalg_inv matrix_exp linalg_matrix_exp linalg_det det logdet linalg_slogdet slogdet linalg_svdvals linalg_svd linalg_qr "
        "linalg_lu linalg_pinv.atol_rtol_float": [(square(5, 4),), (square(2, 3, 4),)],
        "linalg_matrix_power matrix_power": [(square(5, 4), 2)],
        "linalg_pinv": [(square(5, 4), 1e-9)],
        "linalg_cholesky cholesky linalg_eigh linalg_eigvalsh": [(symmetric(5, 4),)],
        "linalg_solve": [(square(5, 4), f(5, 4, 6)), (square(5, 4), f(5, 4)), (square(5, 4), f(5, 6, 4), {"left": False})],
        "linalg_solve_triangular": [
            (square(5, 4).triu(), f(5, 4, 6), {"upper": True}), (square(4).triu(), f(5, 6, 4), {"upper": True, "left": False}),
        ],
        "cholesky_solve": [(f(5, 4, 6), square(5, 4).tril())],
        "triangular_solve": [(f(5, 4, 6), square(5, 4).triu())],
        "fft_fft fft_ifft": [(z(5, 6),), (z(5, 6), 4, 0)],
        "fft_rfft fft_ihfft": [(f(5, 6),), (f(5, 6), 4, 0)],
        "fft_irfft fft_hfft": [(z(5, 6),), (z(5, 6), 4, 0)],
        "fft_fft2 fft_ifft2": [(z(4, 5, 6),)],
        "fft_rfft2": [(f(4, 5, 6),)],
        "fft_irfft2": [(z(4, 5, 6),)],
        "fft_fftn fft_ifftn": [(z(4, 5, 6),), (z(4, 5, 6), [3]), (z(4, 5, 6), None, [0, 2])],
        "fft_rfftn": [(f(4, 5, 6), None, [1])],
        "fft_irfftn": [(z(4, 5, 6), None, [1])],
        "fft_fftshift fft_ifftshift": [(f(5, 6), [1]), (f(5, 6),)],
        "kron": [(f(4, 5), f(6, 4)), (f(6), f(4, 6))],
    }),
    # recurrent layers
    **table({
        "lstm.input": [
            (f(4, 5, 3), [f(2, 5, 6), f(2, 5, 6)], [f(24, 3), f(24, 6), f(24), f(24), f(24, 6), f(24, 6), f(24), f(24)],
             True, 2, 0.0, True, False, False),
            (f(5, 4, 3), [f(2, 5, 6), f(2, 5, 6)], [f(24, 3), f(24, 6), f(24, 3), f(24, 6)], False, 1, 0.0, True, True, True),
            (f(5, 4, 3), [f(1, 5, 2), f(1, 5, 6)], [f(24, 3), f(24, 2), f(2, 6)], False, 1, 0.0, True, False, True),
        ],
        "gru.input": [
            (f(4, 5, 3), f(2, 5, 6), [f(18, 3), f(18, 6), f(18), f(18), f(18, 3), f(18, 6), f(18), f(18)], True, 1, 0.0, True, True, False),
            (f(5, 4, 3), f(1, 5, 6), [f(18, 3), f(18, 6)], False, 1, 0.0, False, False, True),
            (f(5, 4, 3), f(2, 5, 6), [f(18, 3), f(18, 6), f(18, 6), f(18, 6)], False, 2, 0.5, False, False, True),
        ],
        "rnn_tanh.input rnn_relu.input": [(f(4, 5, 3), f(1, 5, 6), [f(6, 3), f(6, 6), f(6), f(6)], True, 1, 0.0, True, False, False)],
        "lstm.data": [
            (f(9, 3), torch.tensor([5, 4]), [f(1, 5, 6), f(1, 5, 6)], [f(24, 3), f(24, 6)], False, 1, 0.0, True, False),
        ],
        "gru.data": [(f(9, 3), torch.tensor([5, 4]), f(1, 5, 6), [f(18, 3), f(18, 6)], False, 1, 0.0, True, False)],
        "rnn_tanh.data rnn_relu.data": [(f(9, 3), torch.tensor([5, 4]), f(1, 5, 6), [f(6, 3), f(6, 6)], False, 1, 0.0, True, False)],
        "lstm_cell": [(f(5, 3), [f(5, 6), f(5, 6)], f(24, 3), f(24, 6), f(24), f(24)), (f(5, 3), [f(5, 6), f(5, 6)], f(24, 3), f(24, 6))],
        "gru_cell": [(f(5, 3), f(5, 6), f(18, 3), f(18, 6), f(18), f(18)), (f(5, 3), f(5, 6), f(18, 3), f(18, 6))],
        "rnn_tanh_cell rnn_relu_cell": [(f(5, 3), f(5, 6), f(6, 3), f(6, 6), f(6), f(6))],
    }),
    # convolutions
    **table({
        "conv1d": [(f(5, 4, 7), f(6, 4, 3), f(6)), (f(4, 7), f(6, 4, 3)), (f(5, 4, 7), f(6, 2, 3), f(6), [1], [0], [1], 2),
                   (f(2, 12, 7), f(6, 2, 3), f(6), [1], [0], [1], 6), (f(5, 1, 7), f(6, 1, 3), f(6))],
        "conv2d": [(f(5, 4, 6, 6), f(6, 4, 2, 2), f(6), [2, 2]), (f(5, 6, 6, 6), f(6, 1, 3, 3), f(6), [1, 1], [1, 1], [1, 1], 6)],
        "conv3d": [(f(5, 4, 3, 3, 3), f(6, 4, 2, 2, 2))],
        "conv1d.padding": [(f(5, 4, 7), f(6, 4, 3), f(6), [1], "same")],
        "conv2d.padding": [(f(5, 4, 5, 5), f(6, 4, 3, 3), f(6), [1, 1], "same")],
        "conv3d.padding": [(f(2, 4, 3, 3, 3), f(6, 4, 3, 3, 3), None, [1, 1, 1], "valid")],
        "convolution": [
            (f(5, 4, 7), f(6, 4, 3), f(6), [1], [1], [1], False, [0], 1), (f(5, 4, 7), f(4, 6, 3), f(6), [2], [1], [1], True, [0], 1),
        ],
        "conv_transpose1d": [(f(5, 4, 7), f(4, 6, 3), f(6)), (f(5, 4, 7), f(4, 3, 3), f(6), [1], [0], [0], 2),
                             (f(2, 12, 7), f(12, 2, 3), f(12), [1], [0], [0], 6)],
        "conv_transpose2d.input": [(f(5, 4, 4, 4), f(4, 6, 2, 2), f(6))],
        "conv_transpose3d.input": [(f(2, 4, 3, 3, 3), f(4, 6, 2, 2, 2))],
        "max_pool1d avg_pool1d max_pool1d_with_indices": [(f(5, 4, 6), [2])],
        "max_pool2d avg_pool2d max_pool2d_with_indices": [(f(5, 4, 6, 6), [2, 2])],
        "max_pool3d avg_pool3d max_pool3d_with_indices": [(f(5, 4, 4, 4, 4), [2, 2, 2])],
        "adaptive_max_pool1d adaptive_avg_pool1d": [(f(5, 4, 6), [2])],
        "adaptive_max_pool2d adaptive_avg_pool2d": [(f(5, 4, 6, 6), [2, 1])],
        "adaptive_max_pool3d adaptive_avg_pool3d": [(f(5, 4, 4, 4, 4), [2, 1, 2])],
        "pixel_unshuffle": [(f(3, 4, 6, 4), 2), (f(4, 3, 3), 1)],
        "channel_shuffle": [(f(5, 6, 2, 2), 3)],
        "grid_sampler": [(f(5, 4, 6, 6), f(5, 3, 2, 2), 0, 0, False), (f(2, 4, 3, 3, 3), f(2, 2, 2, 2, 3), 0, 0, True)],
        "im2col": [(f(5, 4, 6, 6), [2, 2], [1, 1], [0, 0], [2, 2]), (f(4, 6, 6), [3, 2], [1, 1], [1, 0], [1, 1])],
        "col2im": [(f(5, 16, 9), [6, 6], [2, 2], [1, 1], [0, 0], [2, 2]), (f(16, 9), [6, 6], [2, 2], [1, 1], [0, 0], [2, 2])],
        "affine_grid_generator": [(f(5, 2, 3), [5, 4, 3, 3], False)],
        "upsample_nearest1d": [(f(5, 4, 6), [9])],
        "upsample_nearest1d.vec": [(f(5, 4, 6), [9], None)],
        "upsample_linear1d": [(f(5, 4, 6), [9], False)],
        "upsample_linear1d.vec": [(f(5, 4, 6), None, False, [2.0])],
        "upsample_nearest2d": [(f(5, 4, 3, 3), [6, 6])],
        "upsample_nearest2d.vec": [(f(5, 4, 3, 3), None, [2.0, 2.0])],
        "upsample_bilinear2d upsample_bicubic2d": [(f(5, 4, 3, 3), [6, 6], False)],
        "upsample_bilinear2d.vec upsample_bicubic2d.vec _upsample_bilinear2d_aa.vec _upsample_bicubic2d_aa.vec": [
            (f(5, 4, 3, 3), [6, 6], False, None)
        ],
        "upsample_nearest3d": [(f(5, 4, 3, 3, 3), [6, 6, 6])],
        "upsample_nearest3d.vec": [(f(5, 4, 3, 3, 3), [6, 6, 6], None)],
        "upsample_trilinear3d": [(f(5, 4, 3, 3, 3), [6, 6, 6], False)],
        "upsample_trilinear3d.vec": [(f(5, 4, 3, 3, 3), [6, 6, 6], False, None)],
        "pixel_shuffle": [(f(5, 8, 3, 4), 2), (f(5, 4, 3, 3), 1)],
    }),
    # random: probabilities that leave nothing to chance
    **table({
        "dropout native_dropout alpha_dropout": [(f(5, 6), 0.0, True)],
        "feature_dropout feature_alpha_dropout": [(f(5, 6, 4), 0.0, True)],
        "bernoulli": [(b(5, 6).double(),)],
        "bernoulli.p": [(f(5, 6), 1.0)],
        "bernoulli.Tensor": [(f(5, 6), b(5, 6).double())],
        "rand_like randn_like empty_like exponential uniform normal_functional": [(f(5, 6),)],
        "randint_like": [(f(5, 6), 1)],
        "randint_like.low_dtype": [(f(5, 6), 2, 3)],
        "multinomial": [(torch.eye(5, 6, dtype=torch.float64), 3, True)],
        "rand randn": [([5, 6],)],
        "randint": [(9, [5, 6])],
        "randint.low": [(0, 9, [5, 6])],
        "randperm": [(6,)],
        "normal.float_float": [(0.0, 1.0, [5, 6])],
    }),
    # factories
    **table({
        "arange": [(6,)],
        "arange.start": [(1, 6)],
        "arange.start_step": [(1, 6, 2)],
        "full": [([5, 6], 1.0)],
        "zeros ones empty.memory_format": [([5, 6],)],
        "eye": [(5,)],
        "eye.m": [(5, 6)],
        "linspace": [(0, 1, 6)],
        "scalar_tensor": [(1.0,)],
        "tril_indices triu_indices": [(5, 6)],
        "new_full": [(f(3), [5, 6], 1.0)],
        "new_zeros new_ones new_empty": [(f(3), [5, 6])],
    }),
}  # fmt: skip

ARBITRARY = {aten(*name.split(".")) for name in (
    "rand_like randn_like empty_like exponential uniform normal_functional rand randn randint randint.low randperm "
    "normal.float_float empty.memory_format new_empty").split()}  # fmt: skip
"""Ops whose values are anything: only shapes are compared."""

NO_BACKWARD = {aten(*name.split(".")) for name in (
    "heaviside nextafter special_log_ndtr floor_divide floor_divide.Scalar randint_like randint_like.low_dtype "
    "copy fill.Tensor bernoulli.p bernoulli.Tensor").split()}  # fmt: skip
"""Ops without a derivative in torch."""

FROZEN = {
    "running_mean", "running_var", "pos_weight", "soft_margin_loss.target", "nll_loss.weight", "nll_loss_nd.weight", "nll_loss2d.weight",
    "cross_entropy_loss.weight", "multi_margin_loss.weight", "binary_cross_entropy.weight", "binary_cross_entropy_with_logits.weight",
}  # fmt: skip
"""Arguments without a derivative in torch: by name, or "op.name"."""

assert set(RULES) >= set(SAMPLES), set(SAMPLES) - set(RULES)
