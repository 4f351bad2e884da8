"""Which ranks share a node: the order of the mesh's axes over the ranks, chosen before anything else is.

Where a mesh spans nodes, an order decides whether gradients are summed within nodes and activations sent between them, or the other way,
or whether tensor leaves the node. Planning once for each would take several times as long, so orders are compared by an estimate of what
a step sends, if all weights and what passes between stages are cut over tensor: over data the gradients of the stage that has most; over
pipeline, forward and backward, what is alive at the narrowest places where stages of as many ops each may begin; over tensor an all-reduce
for each matmul with a weight, of the smaller of what it reads and gives. It knows nothing of what the solver will do instead, of
collectives that backward hides, nor of memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from math import prod

from torch import fx

from autoshard.cluster import Cluster
from autoshard.cost.communication import gradient_sync_seconds, group_seconds, send
from autoshard.mesh import ORDER, Mesh
from autoshard.planning.baselines import weights_read
from autoshard.planning.stages import alive_across
from autoshard.program import Program, operands, tensors


def placements_on(mesh: Mesh, cluster: Cluster) -> list[Mesh]:
    """The mesh in every order of ranks that joins them by other links, the usual one first; as it is, if it has an order."""
    if mesh.order or mesh.size <= cluster.node_size:
        return [mesh]
    wide = tuple(axis for axis in ORDER if getattr(mesh, axis) > 1)
    found: dict[tuple, Mesh] = {}
    for order in permutations(wide):
        placed = mesh if order == wide else replace(mesh, order=order)
        found.setdefault(tuple(cluster.link(axis, placed) for axis in (*wide, "data+tensor")), placed)
    return list(found.values())


@dataclass(frozen=True)
class Traffic:
    """Bytes of a step of the whole batch on one device that a mesh may have to send.

    gradients: of each trained weight, with the places of the ops that read it. alive: behind each op, what a cut there would send; None
    where none may be. sums: of each matmul with a weight.
    """

    gradients: tuple[tuple[float, tuple[int, ...]], ...]
    alive: tuple[float | None, ...]
    sums: tuple[float, ...]

    @classmethod
    def of(cls, program: Program, pure: set[fx.Node]) -> Traffic:
        """pure: values that any stage can compute for itself."""
        trained = [n for n in program.graph.nodes if n.name in program.params and program.params[n.name].requires_grad]
        alive = [
            sum(map(_bytes, values)) if values and node not in pure else None for node, values in alive_across(program, pure)
        ]
        sums = []
        for node in program.ops:
            weights = weights_read(program, node)
            if weights:
                read = [_bytes(x) for i, x in enumerate(operands(node)) if i not in weights]
                sums.append(min(_bytes(node), max(read, default=0.0)))
        place = {node: i for i, node in enumerate(program.ops)}
        gradients = tuple((_bytes(n), tuple(place[user] for user in n.users if user in place)) for n in trained)
        return cls(gradients, tuple(alive), tuple(sums))

    def best(self, placements: Sequence[Mesh], cluster: Cluster, microbatches: int) -> Mesh:
        """The placement that takes the least time; the first of several."""
        return min(placements, key=lambda mesh: self.seconds(mesh, cluster, microbatches))

    def seconds(self, mesh: Mesh, cluster: Cluster, microbatches: int) -> float:
        """Of a step, on a rank."""
        (data, tensor, stages), m = mesh.shape, microbatches
        total = gradient_sync_seconds(self._most(stages) / tensor, ("data",), mesh, cluster)
        for cut in self._cuts(stages):
            total += 2 * m / (stages - 1) * send(cut / (data * tensor * m), mesh, cluster).seconds
        for nbytes in self.sums if tensor > 1 else ():
            total += m / stages * group_seconds("all_reduce", nbytes / (data * m), "tensor", tensor, mesh, cluster)
        return total

    def _most(self, stages: int) -> float:
        """Bytes of the gradients of the stage that has most."""
        found = [0.0] * stages
        for nbytes, places in self.gradients:
            for s in {place * stages // len(self.alive) for place in places}:
                found[s] += nbytes
        return max(found)

    def _cuts(self, stages: int) -> list[float]:
        """What is sent at the narrowest place near each border of stages with as many ops each."""
        n, window = len(self.alive), max(1, len(self.alive) // (4 * stages))
        near = [self.alive[max(0, n * s // stages - window) : n * s // stages + window + 1] for s in range(1, stages)]
        return [min((size for size in sizes if size), default=0.0) for sizes in near]


def _bytes(node: fx.Node) -> float:
    return float(sum(prod(val.shape) * val.element_size() for val in tensors(node.meta["val"])))
