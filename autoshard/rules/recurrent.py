"""Rules of recurrent layers: samples are independent; time, features and hidden units are not.

With dropout between layers they draw random numbers, and are left whole.
"""

from __future__ import annotations

from math import prod

from torch import fx

from autoshard.program import operands, shape_of
from autoshard.rules.call import argument, bind_named, bind_node, each, shape, unsharded
from autoshard.rules.notation import OpRule


def layers(node: fx.Node) -> OpRule:
    """lstm, gru, rnn: ``s^ b i^, l^ b h^, (weights) -> s^ b o^, l^ b h^``; without a batch dim nothing is a factor."""
    x = shape(node, "input")
    draws = argument(node, "train") and argument(node, "dropout") and argument(node, "num_layers") > 1
    if draws or len(x) != 3:
        return unsharded(node)
    states = argument(node, "hx")
    states = [f"l^ b h{i}^" for i in range(len(states))] if isinstance(states, (list, tuple)) else ["l^ b h0^"]
    weights = [shape_of(w) for w in argument(node, "params")]
    first = ("b", "s^") if argument(node, "batch_first") else ("s^", "b")
    specs = {
        "input": " ".join([*first, "i^"]),
        "hx": states,
        "params": [" ".join(f"w{i}x{d}^" for d in range(len(w))) for i, w in enumerate(weights)],
    }
    result = ", ".join([" ".join([*first, "o^"]), *states])
    flops = 2.0 * x[0] * x[1] * sum(prod(w) for w in weights if len(w) == 2)
    return bind_named(node, specs, result, saved=("input", "params", -1), flops=flops)


def cell(node: fx.Node) -> OpRule:
    """lstm_cell, gru_cell, rnn cells: ``b i^, b h^, (weights) -> b h^``."""
    states = argument(node, "hx")
    states = [f"b h{i}^" for i in range(len(states))] if isinstance(states, (list, tuple)) else ["b h0^"]
    weights = [shape_of(w) for w in operands(node)[1 + len(states) :]]
    texts = ["b i^", *states, *(" ".join(f"w{i}x{d}^" for d in range(len(w))) for i, w in enumerate(weights))]
    flops = 2.0 * shape(node, "input")[0] * sum(prod(w) for w in weights if len(w) == 2)
    saved = tuple(range(len(texts)))
    return bind_node(node, f"{', '.join(texts)} -> {', '.join(states)}", saved=saved, flops=flops)


TABLE = {
    **each("lstm.input gru.input rnn_tanh.input rnn_relu.input", layers),
    **each("lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell", cell),
    **each("lstm.data gru.data rnn_tanh.data rnn_relu.data", unsharded),
}
