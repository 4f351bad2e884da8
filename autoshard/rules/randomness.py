"""Rules of ops that draw random numbers. Element by element, but no partial sums: ranks that shard a value draw different numbers,
ranks that all have it must draw the same ones (the random state is the business of whoever runs the op)."""

from __future__ import annotations

from autoshard.rules.call import bind_node, each, unsharded
from autoshard.rules.pointwise import saves_nothing, saves_result

TABLE = {
    **each("dropout native_dropout alpha_dropout", saves_result),
    **each("bernoulli bernoulli.p bernoulli.Tensor rand_like randn_like randint_like randint_like.low_dtype", saves_nothing),
    **each("exponential uniform normal_functional", saves_nothing),
    **each("rand randn randint randint.low randperm normal.float_float", unsharded),
    **each("feature_dropout feature_alpha_dropout", lambda node: bind_node(node, "n c ... -> n c ...", saved=(-1,))),
    **each("multinomial", lambda node: bind_node(node, "... classes^ -> ... samples^")),
}
