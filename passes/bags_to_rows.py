"""Embedding bags become rows that are looked up, and added up."""

from __future__ import annotations

import torch
from torch import fx

from autoshard.passes.edit import arguments, new_op, only_first_result, replace
from autoshard.program import Program, shape_of

aten = torch.ops.aten
SUM, MEAN, MAX = range(3)  # torch's numbers of the modes


def bags_to_rows(program: Program) -> Program:
    """Rewrite sums and means over bags, so that one rule of embeddings (rows of the table may be sharded) is enough.

    before:  bag = aten.embedding_bag(table, ids, offsets, mode=sum); y = getitem(bag, 0)
    after:   rows = aten.embedding(table, ids)                          # offsets 0, 4, 8, ...: bags of one length
             y = aten.sum(aten.reshape(rows, [8, 4, 16]), [1])
             # otherwise rows are added up where their bag is
             bag = aten.sub(aten.searchsorted(offsets, aten.arange(32), right=True), 1)
             y = aten.index_add(aten.full([8, 16], 0), 0, bag, rows)
    """
    for node in program.ops:
        if node.target in (aten.embedding_bag.default, aten.embedding_bag.padding_idx) and only_first_result(node):
            values = arguments(node)
            if values["mode"] == MAX:
                continue
            with program.graph.inserting_before(node):
                new = Bags(program.graph, node, values).result()
            for user in list(node.users):
                replace(user, new)
            program.graph.erase_node(node)
    return program


class Bags:
    """The ops that replace one embedding bag."""

    def __init__(self, graph: fx.Graph, node: fx.Node, values: dict):
        self.graph, self.node, self.values = graph, node, values
        self.bags, self.width = node.meta["val"][0].shape
        self.count = shape_of(values["indices"])[0]

    def op(self, target, *args, **kwargs) -> fx.Node:
        return new_op(self.graph, target, args, kwargs, like=self.node)

    def result(self) -> fx.Node:
        a = self.values
        padding = a.get("padding_idx")
        if padding is not None and padding < 0:
            padding += shape_of(a["weight"])[0]
        length = self._length()
        rows = self.op(aten.embedding.default, a["weight"], a["indices"], -1 if padding is None else padding, a["scale_grad_by_freq"])
        dtype = rows.meta["val"].dtype
        if a["per_sample_weights"] is not None:
            rows = self.op(aten.mul.Tensor, rows, self.op(aten.unsqueeze.default, a["per_sample_weights"], 1))
        counted = None
        if padding is not None:
            counted = self.op(aten.to.dtype, self.op(aten.ne.Scalar, a["indices"], padding), dtype)
            rows = self.op(aten.mul.Tensor, rows, self.op(aten.unsqueeze.default, counted, 1))
        total = self._added(rows, length)
        if a["mode"] == SUM:
            return total
        if length and counted is None:
            return self.op(aten.div.Tensor, total, length)
        if counted is None:
            counted = self.op(aten.full.default, [self.count], 1, dtype=dtype)
        members = self.op(aten.clamp_min.default, self._added(counted, length), 1)
        return self.op(aten.div.Tensor, total, self.op(aten.unsqueeze.default, members, 1))

    def _length(self) -> int | None:
        """Ids in each bag, if the graph says that all bags have as many."""
        offsets = self.values["offsets"]
        if offsets.target is not aten.arange.start_step or self.values["include_last_offset"] or not self.bags:
            return None
        start, end, step = (*offsets.args, 1)[:3]
        return step if start == 0 and step * self.bags == self.count else None

    def _added(self, rows: fx.Node, length: int | None) -> fx.Node:
        """One value for each id -> one for each bag."""
        shape = shape_of(rows)
        if length:
            return self.op(aten.sum.dim_IntList, self.op(aten.reshape.default, rows, [self.bags, length, *shape[1:]]), [1])
        places = self.op(aten.arange.default, self.count, dtype=torch.int64)
        bag = self.op(aten.sub.Tensor, self.op(aten.searchsorted.Tensor, self.values["offsets"], places, right=True), 1)
        zeros = self.op(aten.full.default, [self.bags, *shape[1:]], 0, dtype=rows.meta["val"].dtype)
        return self.op(aten.index_add.default, zeros, 0, bag, rows)
