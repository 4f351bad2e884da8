"""From annotated nodes to the staged problem: blocks that the chain may be cut between, and everything that can be decided about an op.

    a weight             how it lies over tensor, its ZeRO level, and whether the optimizer updates it on the host
    any other op         its sharding; whether its block is computed again in backward, and if so, whether its own result is kept

A block is one layer of those that repeat, or what lies between them. In a block that is not computed again, what an op saves for backward
is paid for once a (storage, placement); in one that is, the block's inputs are saved, and what is kept.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import fx

from autoshard.cluster import Cluster
from autoshard.cost.communication import kernel_steps, send, weight_sync
from autoshard.cost.compute import Pricing, Storage, local_elements, offloaded_seconds, optimizer_seconds, storage_node
from autoshard.cost.memory import state_bytes
from autoshard.cost.pipeline import in_flight
from autoshard.mesh import SHARDED_AXES, Mesh
from autoshard.placement import R_STAR, Layout, R
from autoshard.planning.chain import Chain, Irregular
from autoshard.planning.problem import BUCKET, EPSILON, move_seconds
from autoshard.planning.saving import AGAIN, ANY, KEPT, ONCE, PLAIN, level_of, piece_of
from autoshard.planning.strategies import Annotated, Key, reads_of
from autoshard.program import Program, operands, tensors
from autoshard.rules.notation import Strategy
from autoshard.schedule import Schedule
from autoshard.solvers.staged import (
    EVERY,
    FIRST,
    HERE,
    NEXT,
    NOTHING,
    RESIDENT,
    Amount,
    StagedAnswer,
    StagedOp,
    StagedProblem,
    StagedUse,
    StagedValue,
)


@dataclass(frozen=True)
class Way:
    """What one strategy of the problem stands for."""

    strategy: Strategy
    level: int = 0  # ZeRO
    mode: str = ANY
    host: bool = False  # whether the optimizer updates it there


@dataclass
class Staged:
    """The problem, and what is needed to read an answer: for every op of it, its key, as in ``grouped``, and its ways.

    chain: of the program that the problem was made from, which may be abridged.
    """

    problem: StagedProblem
    chain: Chain
    keys: list[tuple]  # switches, which are no nodes, come last and have none
    ways: list[tuple[Way, ...]]

    def read(self, answer: StagedAnswer, program: Program, chain: Chain) -> dict[fx.Node, Way]:
        """What is decided for each node of the whole program. Raises Irregular if that repeats in other layers."""
        if chain.parts != self.problem.chain:
            raise Irregular("the whole model repeats in other layers than the abridged one")
        members = grouped(program, chain, reads_of(program))
        if set(members) != set(self.keys):
            raise Irregular("the layers of the whole model are others than those of the abridged one")
        nodes = [members[key] for key in self.keys]
        return {nodes[op][block]: self.ways[op][choice] for (op, block), choice in answer.choices.items() if op < len(nodes)}


def grouped(program: Program, chain: Chain, inputs: Mapping[fx.Node, tuple[Key, ...]]) -> dict[tuple, dict[int, fx.Node]]:
    """The nodes that are one op of the problem, by block: of each part, those in one place. ``inputs``: what every node reads.

    Keys start with the part. A weight that one block alone reads is known by where it is read; what several do is RESIDENT, by name.
    """
    home = _homes(program, chain, inputs)
    groups: dict[tuple, dict[int, fx.Node]] = defaultdict(dict)
    places = {node: (block, place) for block, nodes in enumerate(chain.blocks) for place, node in enumerate(nodes)}
    for node in inputs:
        if node.op == "placeholder":
            part, block, *at = home[node]
            groups[(part, *at)][block] = node
            continue
        block, place = (len(chain.blocks) - 1, "output") if node.op == "output" else places[node]
        groups[chain.part[block], place][block] = node
    expected = defaultdict(list, {RESIDENT: [RESIDENT]})
    for block, part in enumerate(chain.part):
        expected[part].append(block)
    for (part, *_), nodes in groups.items():
        if sorted(nodes) != expected[part]:
            raise Irregular(f"{next(iter(nodes.values())).name} is not in every layer of its kind")
    return dict(groups)


def _homes(program: Program, chain: Chain, inputs: Mapping[fx.Node, tuple[Key, ...]]) -> dict[fx.Node, tuple]:
    """(part, block, place and operand that read it) of a placeholder; (RESIDENT, RESIDENT, name) unless it is a weight of one block."""
    readers: dict[fx.Node, list[tuple[int, tuple]]] = defaultdict(list)
    places = {node: (block, place) for block, nodes in enumerate(chain.blocks) for place, node in enumerate(nodes)}
    for node, keys in inputs.items():
        if node.op == "placeholder":
            continue
        block, place = (len(chain.blocks) - 1, "output") if node.op == "output" else places[node]
        for position, (producer, _) in enumerate(keys):
            if producer.op == "placeholder":
                readers[producer].append((block, (place, position)))
    home: dict[fx.Node, tuple] = {}
    for node in inputs:
        if node.op == "placeholder":
            blocks = {block for block, _ in readers[node]}
            if len(blocks) == 1 and node.name in program.params:
                block = next(iter(blocks))
                home[node] = (chain.part[block], block, *min(readers[node], key=repr)[1])
            else:
                home[node] = (RESIDENT, RESIDENT, node.name)
    return home


@dataclass(frozen=True)
class Allowed:
    """levels: ZeRO levels that weights may have. modes: PLAIN, or blocks computed again, or both. hosts: whether weights that are trained
    may be updated on the host."""

    levels: tuple[int, ...]
    modes: tuple[str, ...]
    hosts: tuple[bool, ...] = (False,)


def stage_problem(
    program: Program,
    annotated: dict[fx.Node, Annotated],
    chain: Chain,
    pure: set[fx.Node],
    mesh: Mesh,
    cluster: Cluster,
    schedule: Schedule,
    limit: float,
    allowed: Allowed,
) -> Staged:
    """The staged problem of ``program`` (of one micro-batch).

    ``schedule``: one with a stage a rank. ``limit``: bytes a rank. Raises Irregular.
    """
    builder = _Builder(program, annotated, chain, pure, mesh, cluster, allowed)
    builder.collect()
    builder.price()
    builder.connect()
    m = program.microbatches
    problem = StagedProblem(
        tuple(builder.ops),
        tuple(builder.values),
        tuple(builder.uses),
        chain.parts,
        (True,) * (len(chain.parts) - 1),
        tuple(in_flight(schedule.run_as(m, mesh.pipeline), mesh.pipeline, 1, m, s) for s in range(mesh.pipeline)),
        m,
        limit,
    )
    return Staged(problem, chain, builder.keys, builder.ways)


class _Builder:
    def __init__(self, program, annotated, chain: Chain, pure, mesh: Mesh, cluster: Cluster, allowed: Allowed):
        self.program, self.annotated, self.chain, self.pure = program, annotated, chain, pure
        self.mesh, self.cluster, self.allowed = mesh, cluster, allowed
        self.pricing = Pricing(mesh.sizes, cluster)
        self.ops: list[StagedOp] = []
        self.values: list[StagedValue] = []
        self.uses: list[StagedUse] = []
        self.ways: list[tuple[Way, ...]] = []
        self.members: list[dict[int, fx.Node]] = []
        self.keys: list[tuple] = []
        self.index: dict[fx.Node, int] = {}  # op of the problem, of every node
        self.saved: list[list[dict[Storage, float]]] = []  # of each op and way
        self.by_value: dict[tuple, tuple[int, dict]] = {}  # index of a value, and the ids of its placements
        self.moved: dict[tuple, tuple[float, float, float] | None] = {}  # of each result, from one layout to another: what that takes
        self.owners: dict[tuple, fx.Node] = {}  # of each storage, the first op of a block that saves it

    def collect(self) -> None:
        for key, nodes in grouped(self.program, self.chain, {node: item.inputs for node, item in self.annotated.items()}).items():
            for node in nodes.values():
                self.index[node] = len(self.members)
            self.members.append(nodes)
            self.keys.append(key)
            self.ops.append(StagedOp(next(iter(nodes.values())).name, (), key[0]))

    # --- what every way of an op costs ----------------------------------------------------------------------------------------

    def price(self) -> None:
        for i, nodes in enumerate(self.members):
            node = self._representative(nodes)
            shared = self.annotated[node].strategies
            for other in nodes.values():
                have = {(s.operands, s.results) for s in self.annotated[other].strategies}
                shared = tuple(s for s in shared if (s.operands, s.results) in have)
            if not shared:
                raise Irregular(f"{node.name} has no strategy that all layers of its kind have")
            if node.op == "placeholder":
                ways, costs = self._weight(node, shared)
                saved: list[dict[Storage, float]] = [{} for _ in ways]
            elif node.op == "output":
                ways, costs, saved = [Way(s) for s in shared], [NOTHING] * len(shared), [{} for _ in shared]
            else:
                ways, costs, saved = self._op(node, shared)
            self.ways.append(tuple(ways))
            self.saved.append(saved)
            self.ops[i] = StagedOp(self.ops[i].name, tuple(costs), self.ops[i].part)

    def _representative(self, nodes: dict[int, fx.Node]) -> fx.Node:
        """The node of the second block where there are several: it has a block before it."""
        blocks = sorted(nodes)
        return nodes[blocks[min(1, len(blocks) - 1)]]

    def _weight(self, node: fx.Node, strategies) -> tuple[list[Way], list[Amount]]:
        param = self.program.params.get(node.name)
        if param is None or param.kind != "parameter":
            return [Way(s) for s in strategies], [NOTHING] * len(strategies)
        sizes, device, itemsize = self.mesh.sizes, self.cluster.device, node.meta["val"].element_size()
        mixed, resident = param.master is not None, self.ops[self.index[node]].part == RESIDENT
        ways, costs = [], []
        for s in strategies:
            layout = s.results[0]
            piece, held = piece_of(self.program, node, layout), local_elements(param.shape, layout, sizes)
            levels = dict.fromkeys(level_of(param, piece, level) for level in self.allowed.levels)
            if resident and len(levels) > 1:
                levels.pop(3, None)  # what many blocks gather comes and goes too often
            for level, host in self._kept(levels, param.requires_grad):
                own = local_elements(param.shape, piece, sizes) if level else held
                state = state_bytes(held, itemsize, mixed, level, held / own, param.requires_grad, self.program.microbatches > 1)
                if host:
                    state["optimizer"], once = 0.0, offloaded_seconds(own, itemsize, self.cluster, mixed)
                else:
                    once = optimizer_seconds(own, device, mixed=own * mixed) - device.launch if param.requires_grad else 0.0
                peak = held * itemsize if level == 3 and not resident else 0.0  # the weights of a layer are gathered together
                ways.append(Way(s, level, host=host))
                costs.append(Amount(once=once, state=sum(state.values()), peak=peak))
        return ways, costs

    def _kept(self, levels: Collection[int], trained: bool) -> list[tuple[int, bool]]:
        """ZeRO levels, and whether the optimizer updates on the host. There, level 2 does at least as well as 0 in everything."""
        hosted = [level for level in levels if level or 2 not in levels]
        return [(level, host) for host in (self.allowed.hosts if trained else (False,)) for level in (hosted if host else levels)]

    def _op(self, node: fx.Node, strategies) -> tuple[list[Way], list[Amount], list[dict[Storage, float]]]:
        rule = self.annotated[node].rule
        itemsize = max((v.element_size() for v in tensors(node.meta["val"])), default=4)
        costs = self.pricing.costs(node, rule, strategies)
        block = self.chain.block_of[node]
        modes = [mode for mode in self.allowed.modes if mode == PLAIN or self.chain.again[block]]
        ways, amounts, saved = [], [], []
        for s, cost in zip(strategies, costs):
            inside = sum(step.seconds for step in kernel_steps(s, itemsize, self.mesh, self.cluster))
            seconds = cost.forward + cost.backward + inside
            for mode in modes or [PLAIN]:
                if mode == KEPT and not (cost.result_bytes and node.meta.get("grad")):
                    continue  # a view costs nothing to make again
                if mode == ONCE and any(i < 0 for i in rule.saved):
                    continue
                ways.append(Way(s, 0, mode))
                again = cost.forward + inside if mode == AGAIN else 0.0
                held = cost.result_bytes if mode == KEPT else 0.0
                peak = 0.0 if mode == PLAIN else sum(n for at, n in cost.saved if self.owners.setdefault((block, at[:2]), node) is node)
                amounts.append(Amount(seconds + again, 0.0, 0.0, held, peak))
                saved.append(dict(cost.saved) if mode == PLAIN else {})
        return ways, amounts, saved

    # --- values and who reads them ----------------------------------------------------------------------------------------------

    def connect(self) -> None:
        for i, nodes in enumerate(self.members):
            node = self._representative(nodes)
            for position, (producer, index) in enumerate(self.annotated[node].inputs):
                self._use(i, nodes, node, position, producer, index)
            if node.op == "call_function":
                self._saves(i, nodes, node)
        for part in dict.fromkeys(self.chain.part):
            if len(self.allowed.modes) > 1 or PLAIN not in self.allowed.modes:
                self._mode(part)

    def _link(self, nodes: dict[int, fx.Node], source: dict[int, fx.Node], producer: fx.Node, node: fx.Node) -> str:
        """How the representative ``node`` reads ``producer``."""
        if RESIDENT in source:
            return EVERY
        home = self.chain.block_of.get(producer)
        if home is None:
            home = next(b for b, n in source.items() if n is producer)  # a weight
        here = next(b for b, n in nodes.items() if n is node)
        if home == here:
            return HERE
        return NEXT if self.chain.part[home] == self.chain.part[here] else EVERY

    def _use(self, i: int, nodes: dict[int, fx.Node], node: fx.Node, position: int, producer: fx.Node, index: int) -> None:
        link = self._link(nodes, self.members[self.index[producer]], producer, node)
        self._read(i, position, self.index[producer], index, link)
        blocks = sorted(nodes)
        if link == NEXT:
            if any(b - a != 1 for a, b in zip(blocks, blocks[1:])):
                raise Irregular(f"layers like that of {node.name} do not follow each other")
            first, at = self.annotated[nodes[blocks[0]]].inputs[position]
            self._read(i, position, self.index[first], at, FIRST)
        elif len(blocks) > 1 and link == EVERY:
            for other in nodes.values():
                if self.annotated[other].inputs[position] != (producer, index):
                    raise Irregular(f"{other.name} reads another value than {node.name} does")

    def _read(self, i: int, position: int, source: int, index: int, link: str) -> None:
        value, layouts = self._value(source, index)
        rule = self.annotated[self._representative(self.members[i])].rule
        saved = rule is None or rule.fallback or position in rule.saved
        demands = []
        for way in self.ways[i]:
            need = ""
            if way.mode not in (ANY, PLAIN) and self.ops[source].part != RESIDENT:
                need = "twice" if saved or way.mode == AGAIN else "once"
            demands.append(layouts.setdefault((way.strategy.operands[position], need), len(layouts)))
        self.uses.append(StagedUse(value, i, tuple(demands), link))
        self._moves(value, source, index, layouts)

    def _value(self, source: int, index: int) -> tuple[int, dict]:
        """The problem's value of a result, and the ids of its placements: (layout, for a block computed again), or (layout, level)."""
        if (source, index) not in self.by_value:
            layouts: dict = {}
            node = self._representative(self.members[source])
            placements, sends, buffers = [], {}, {}
            for way in self.ways[source]:
                layout = way.strategy.results[index]
                key = (layout, ("level", way.level)) if node.op == "placeholder" else (layout, "once only" if way.mode == ONCE else "made")
                placements.append(layouts.setdefault(key, len(layouts)))
                if node.op == "call_function" and node not in self.pure and self.mesh.pipeline > 1:
                    nbytes = self._bytes(node, index, layout)
                    sends[placements[-1]] = send(nbytes, self.mesh, self.cluster).seconds
                    if node.meta.get("grad"):
                        buffers[placements[-1]] = nbytes  # of the gradient that comes back
            self.by_value[source, index] = len(self.values), layouts
            self.values.append(StagedValue(f"{node.name}.{index}", source, tuple(placements), {}, sends, buffers))
        return self.by_value[source, index]

    def _bytes(self, node: fx.Node, index: int, layout: Layout) -> float:
        """Of a result, on the fullest rank."""
        val = tensors(node.meta["val"])[index]
        return local_elements(tuple(val.shape), layout, self.mesh.sizes) * val.element_size()

    def _moves(self, value: int, source: int, index: int, layouts: dict) -> None:
        found = self.values[value]
        node = self._representative(self.members[source])
        produced = set(found.placements)
        for (have, kind), a in list(layouts.items()):
            if a not in produced:
                continue
            for (want, need), b in layouts.items():
                if b in produced or (a, b) in found.moves or (kind == "once only" and need == "twice"):
                    continue
                if isinstance(kind, tuple):
                    amount = self._weight_move(node, have, kind[1], want)
                else:
                    amount = self._move(node, index, have, want, need == "twice")
                if amount is not None:
                    found.moves[a, b] = amount

    def _move(self, node: fx.Node, index: int, have: Layout, want: Layout, again: bool) -> Amount | None:
        if have == want:
            return NOTHING
        key = node, index, have, want
        if key not in self.moved:  # many uses ask for the same
            self.moved[key] = move_seconds(self.program, (node, index), have, want, self.mesh, self.cluster)
        if self.moved[key] is None:
            return None
        forward, backward, once = self.moved[key]
        return Amount(forward * (2 if again else 1) + backward + EPSILON, once)

    def _weight_move(self, node: fx.Node, have: Layout, level: int, want: Layout) -> Amount | None:
        """A weight's way from how it is held to how an op reads it, its gradient's way back, and what ZeRO sends once a step."""
        param = self.program.params.get(node.name)
        grad = bool(node.meta.get("grad"))
        held = piece_of(self.program, node, have) if level == 3 else have
        once = 0.0
        if grad and param is not None:
            axes = tuple(a for a, p, q in zip(SHARDED_AXES, held, want) if p == R and q == R_STAR)
            nbytes = self._bytes(node, 0, held)
            steps = weight_sync(BUCKET, axes, level, self.mesh, self.cluster)
            once = sum(step.seconds for step in steps) * nbytes / BUCKET
        found = move_seconds(self.program, (node, 0), held, want, self.mesh, self.cluster)
        if found is None:
            return None
        forward, backward, _ = found
        seconds = forward * (2 if level == 3 else 1) + backward
        return Amount(seconds + (EPSILON if held != want else 0.0), once)

    # --- what is saved for backward --------------------------------------------------------------------------------------------

    def _saves(self, i: int, nodes: dict[int, fx.Node], node: fx.Node) -> None:
        """One value for each storage that the op saves: reading it in a placement costs the bytes of that placement."""
        for storage in dict.fromkeys(s[:2] for ways in self.saved[i] for s in ways):
            sources = [self._storage(other, storage, node) for other in nodes.values()]
            producer = sources[list(nodes.values()).index(node)]
            if producer is None:
                raise Irregular(f"{node.name} saves {storage[0]}, which it does not read")
            kinds = self._cover(self.index[producer], storage[1])
            demands, moves = [], self.values[kinds[0]].moves
            for saved in self.saved[i]:
                wanted = [(key[2], nbytes) for key, nbytes in saved.items() if key[:2] == storage]
                if not wanted:
                    demands.append(0)
                    continue
                at = kinds[1].setdefault(wanted[0][0], len(kinds[1]) + 1)
                moves[0, at] = Amount(saved=wanted[0][1])
                demands.append(at)
            self._link_saved(i, nodes, node, kinds[0], producer, sources, tuple(demands))

    def _link_saved(self, i, nodes, node, value: int, producer, sources, demands) -> None:
        if producer is node:  # its own result
            self.uses.append(StagedUse(value, i, demands, HERE))
            return
        link = self._link(nodes, self.members[self.index[producer]], producer, node)
        self.uses.append(StagedUse(value, i, demands, link))
        if link == NEXT and sources[0] is not None:
            other = self._same_cover(value, self.index[sources[0]])
            self.uses.append(StagedUse(other, i, demands, FIRST))

    def _storage(self, node: fx.Node, storage, representative: fx.Node) -> fx.Node | None:
        """What ``node`` saves, where ``representative`` saves ``storage``: the same operand's storage."""
        name, index = storage
        if name == representative.name:
            return node
        for x, y in zip(operands(representative), operands(node)):
            found, at = storage_node(x)
            if found.name == name and at == index:
                return storage_node(y)[0]
        return None

    def _cover(self, source: int, index: int) -> tuple[int, dict]:
        key = (source, index, "saved")
        if key not in self.by_value:
            node = self._representative(self.members[source])
            self.by_value[key] = len(self.values), {}
            self.values.append(StagedValue(f"{node.name}.{index} saved", source, (0,) * len(self.ways[source]), {}, {}))
        return self.by_value[key]

    def _same_cover(self, value: int, source: int) -> int:
        """For the first layer: what it reads of another part, with the same ids."""
        key = (source, value, "first saved")
        if key not in self.by_value:
            self.by_value[key] = len(self.values), {}
            model = self.values[value]
            self.values.append(StagedValue(f"{model.name} by the first", source, (0,) * len(self.ways[source]), model.moves, {}))
        return self.by_value[key][0]

    def _mode(self, part: int) -> None:
        """All ops of a block are computed again, or none: an op of the problem that says which, and that saves what the block reads."""
        blocks = [b for b, p in enumerate(self.chain.part) if p == part]
        if not self.chain.again[blocks[0]]:
            return
        modes = tuple(dict.fromkeys(mode == PLAIN for mode in self.allowed.modes))
        mode = len(self.ops)
        self.ops.append(StagedOp(f"mode of layer {part}", (NOTHING,) * len(modes), part, switch=True))
        self.ways.append(modes)
        self.members.append({})
        value = len(self.values)
        either = len(modes)
        moves = {(i, either): NOTHING for i in range(either)}
        self.values.append(StagedValue(f"mode of layer {part}", mode, tuple(range(either)), moves, {}))
        for i, op in enumerate(self.ops[:mode]):
            if op.part == part and any(way.mode not in (ANY, PLAIN) for way in self.ways[i]):
                demands = (either if way.mode == ANY else modes.index(way.mode == PLAIN) for way in self.ways[i])
                self.uses.append(StagedUse(value, i, tuple(demands)))
        block = blocks[min(1, len(blocks) - 1)]  # of a representative
        for producer, index in self._inputs(self.chain.blocks[block]):
            self._saved_input(mode, modes, block, producer, index)

    def _inputs(self, region: list[fx.Node]) -> list[tuple[fx.Node, int]]:
        """(op, result) of other blocks whose memory a region reads."""
        inside = set(region)
        found = dict.fromkeys(storage_node(x) for node in region for x in node.all_input_nodes if x not in inside)
        return [(producer, index) for producer, index in found if producer not in inside and producer.op == "call_function"]

    def _saved_input(self, mode: int, modes, block: int, producer: fx.Node, index: int) -> None:
        source = self.index[producer]
        home = self.chain.block_of[producer]
        link = NEXT if self.chain.part[home] == self.chain.part[block] else EVERY
        ids: dict[Layout, int] = {}
        placements = tuple(ids.setdefault(way.strategy.results[index], len(ids)) for way in self.ways[source])
        free, held = len(ids), len(ids) + 1
        moves = {}
        for layout, a in ids.items():
            moves[a, free] = NOTHING
            moves[a, held] = Amount(saved=self._bytes(producer, index, layout))
        self.uses.append(StagedUse(len(self.values), mode, tuple(free if plain else held for plain in modes), link))
        self.values.append(StagedValue(f"{producer.name}.{index} input", source, placements, moves, {}))
