"""What emitted code runs on: torch, and nothing of the planner. ``from autoshard import runtime as rt``."""

from autoshard.runtime.attention import attention
from autoshard.runtime.axis import Axis
from autoshard.runtime.batch_norm import batch_norm
from autoshard.runtime.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from autoshard.runtime.convert import convert
from autoshard.runtime.drawing import invariant_random
from autoshard.runtime.interface import Argument, Interface
from autoshard.runtime.kernels import check_ids, vocab_cross_entropy, vocab_embedding
from autoshard.runtime.keys import Draw
from autoshard.runtime.outputs import Lazy
from autoshard.runtime.random import Streams, dropout
from autoshard.runtime.recompute import kept, once, recompute
from autoshard.runtime.sharded import Sharded
from autoshard.runtime.stage import Extra, Input, Output, Param, Part, StageModule, Value
from autoshard.runtime.world import World, open_world

__all__ = [
    "Argument",
    "Axis",
    "Draw",
    "Extra",
    "Input",
    "Interface",
    "Lazy",
    "Output",
    "Param",
    "Part",
    "Sharded",
    "StageModule",
    "Streams",
    "Value",
    "World",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "attention",
    "batch_norm",
    "check_ids",
    "convert",
    "dropout",
    "invariant_random",
    "kept",
    "once",
    "open_world",
    "recompute",
    "reduce_scatter",
    "vocab_cross_entropy",
    "vocab_embedding",
]
