"""What a block may cost: ways to run it (columns), and what no way costs less than (floors). For ``folded``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import floor as below
from math import log10

import numpy as np

from . import sharding
from .elimination import cheapest
from .linear import LinearProgram
from .network import INF, Network
from .problem import Evaluation, Infeasible, Op, ShardingProblem, Use, Value
from .reduce import reduce, thin
from .staged import FIRST, HERE, NEXT, NOTHING, RESIDENT, Amount, StagedProblem


@dataclass(frozen=True)
class Column:
    """One way to run a block: its choices by op, what it costs, and the placements of what it hands to the next block.

    amount: but for resident ops. whole: with its share of those, as floors are.
    """

    choices: tuple[tuple[int, int], ...]
    amount: Amount
    whole: Amount
    stream: tuple[int, ...]


@dataclass(frozen=True)
class Floor:
    """A cut: no way to run the block costs less than ``bound`` at these prices; or less than ``first``, if it is the first of its kind (0:
    not asked)."""

    prices: Amount
    bound: float
    first: float


class PricedNetwork:
    """A network whose prices are yet to be given: costs by op, and the tables of its values, as amounts."""

    def __init__(self, names: list[str], costs: list[np.ndarray], values: list[tuple]):
        self.names, self.costs = names, costs
        self.wide = False  # whether ``thin`` was once not enough
        self.values = [value for value in values if value[3].any()]

    def at(self, prices: Amount) -> Network:
        weights = np.array(prices)
        net = Network(self.names, [costs @ weights for costs in self.costs])
        for op, rows, ends, table, name in self.values:
            possible = np.isfinite(table[..., 0])
            priced = np.where(possible, np.where(possible[..., None], table, 0.0) @ weights, INF)
            net.join(op, rows, ends, priced, name)
        return net

    def price(self, choices: Sequence[int], prices: Amount) -> float:
        """What choices cost, read from the amounts again."""
        total = sum(costs[k] for costs, k in zip(self.costs, choices))
        for op, rows, ends, table, _ in self.values:
            row = rows[choices[op]]
            for col in {int(cols[choices[user]]) for user, cols in ends}:
                total = total + table[row, col]
        return float(total @ np.array(prices))


@dataclass
class Part:
    """What is known of one kind of block, and how to ask for more."""

    problem: StagedProblem
    index: int
    columns: list[Column] = field(default_factory=list)
    floors: list[Floor] = field(default_factory=list)
    asked: set[tuple] = field(default_factory=set)
    opened: set[Amount] = field(default_factory=set)
    networks: dict[tuple, PricedNetwork] = field(default_factory=dict)  # by case, and choices beside

    def __post_init__(self) -> None:
        problem = self.problem
        self.own = [i for i, op in enumerate(problem.ops) if op.part == self.index]
        self.outside: list[int] = []
        self.inner: list[tuple[int, list, float]] = []  # (value, its uses by this part, share of its price that falls to one block)
        self.opening: list[tuple[int, list, float]] = []  # the same of the first block of several, that has none of its kind before it
        self.streams: list[int] = []  # values that the next block reads
        alone = len(problem.blocks[self.index]) == 1
        readers: dict[int, set[int]] = defaultdict(set)
        for use in problem.uses:
            readers[use.value].update(user for _, user in problem.links(use))
        by_value = defaultdict(list)
        for use in problem.uses:
            if problem.ops[use.op].part != self.index:
                continue
            source = problem.values[use.value].op
            by_value[use.value].append(use)
            if source in self.own and use.link == NEXT and not alone and use.value not in self.streams:
                self.streams.append(use.value)
        self.shares: dict[int, float] = {}
        for value, uses in by_value.items():
            source = problem.values[value].op
            if source in self.own:
                share = 1.0
            else:
                share = 1.0 / problem.together(readers[value])
                if source not in self.outside:
                    self.outside.append(source)
                    reading = set().union(*(readers[v] for v, other in enumerate(problem.values) if other.op == source))
                    self.shares[source] = 1.0 / problem.together(reading) if problem.ops[source].part == RESIDENT else 0.0
            opening = [use for use in uses if source not in self.own or use.link == HERE]
            inner = opening if alone else [use for use in uses if source in self.own or use.link != FIRST]
            self.inner += [(value, inner, share)] if inner else []
            self.opening += [(value, opening, share)] if opening else []
        self.alone = alone
        self.after = defaultdict(list)  # of a block on its own: value -> its uses by other parts
        for use in problem.uses if alone else ():
            if problem.values[use.value].op in self.own and problem.ops[use.op].part != self.index:
                self.after[use.value].append(use)
        self.at = {op: i for i, op in enumerate(self.own + self.outside)}
        self.cases = self._cases()

    def unpriced(self, kept: list[list[int]], beside: Mapping[int, int], first: bool) -> ShardingProblem:
        """The sharding problem of one block, of which nothing costs anything.

        kept: the strategies that are left, of own and outside ops. beside: strategies of ops of other parts, which may read its values.
        first: of the first block.
        """
        problem = self.problem
        ops = [Op(problem.ops[i].name, (0.0,) * len(left)) for i, left in zip(self.own + self.outside, kept)]
        values, uses = [], []
        inner = {index: readers for index, readers, _ in (self.opening if first else self.inner)}
        for index in dict.fromkeys([*inner, *(self.after if beside else ())]):
            value, left = problem.values[index], kept[self.at[problem.values[index].op]]
            for use in inner.get(index, ()):
                uses.append(Use(len(values), self.at[use.op], tuple(use.demands[k] for k in kept[self.at[use.op]])))
            for use in self.after[index] if index in self.after else ():
                if use.op in beside:
                    uses.append(Use(len(values), len(ops), (use.demands[beside[use.op]],)))
                    ops.append(Op(problem.ops[use.op].name, (0.0,)))
            values.append(Value(value.name, self.at[value.op], tuple(value.placements[k] for k in left), {}))
        return ShardingProblem(tuple(ops), tuple(values), tuple(uses))

    def network(self, kept: list[list[int]], beside: Mapping[int, int], first: bool) -> PricedNetwork:
        """The sharding problem of one block, to be priced; arguments as for ``unpriced``."""
        zero = self.unpriced(kept, beside, first)
        shares = [self.shares.get(i, 1.0) for i in self.own + self.outside]
        costs = [
            share * np.array([self.problem.ops[i].costs[k] for k in left]) for i, left, share in zip(self.own + self.outside, kept, shares)
        ]
        costs += [np.zeros((1, len(NOTHING)))] * (len(zero.ops) - len(costs))
        inner = {index: share for index, _, share in (self.opening if first else self.inner)}
        of_value = list(dict.fromkeys([*inner, *(self.after if beside else ())]))
        tables = []
        for at, (index, value) in enumerate(zip(of_value, zero.values)):
            users = list(dict.fromkeys((use.op, use.demands) for use in zero.uses if use.value == at))
            if not users:
                continue
            row_of = {p: i for i, p in enumerate(dict.fromkeys(value.placements))}
            col_of = {q: i for i, q in enumerate(dict.fromkeys(q for _, demands in users for q in demands))}
            table = np.full((len(row_of), len(col_of), len(NOTHING)), INF)
            for (p, q), amount in self.problem.values[index].moves.items():
                if p in row_of and q in col_of:
                    table[row_of[p], col_of[q]] = inner.get(index, 1.0) * np.array(amount)
            for p, row in row_of.items():
                if p in col_of:
                    table[row, col_of[p]] = 0.0
            rows = np.array([row_of[p] for p in value.placements])
            ends = [(op, np.array([col_of[q] for q in demands])) for op, demands in users]
            tables.append((value.op, rows, ends, table, value.name))
        return PricedNetwork([op.name for op in zero.ops], costs, tables)

    def _cases(self) -> list[list[list[int]]]:
        """The strategies of every op, once for each strategy of the switch, if there is one: those that go with it."""
        problem = self.problem
        everything = [list(range(len(problem.ops[i].costs))) for i in self.own + self.outside]
        switch = next((i for i in self.own if problem.ops[i].switch), None)
        if switch is None:
            return [everything]
        found = []
        for strategy in everything[self.at[switch]]:
            kept = [list(left) for left in everything]
            kept[self.at[switch]] = [strategy]
            for index, readers, _ in self.inner:
                value = problem.values[index]
                if value.op == switch:
                    have = value.placements[strategy]
                    for use in readers:
                        at = self.at[use.op]
                        kept[at] = [k for k in kept[at] if use.demands[k] == have or (have, use.demands[k]) in value.moves]
            found.append(kept)
        return found

    def ask(self, prices: Amount, time_limit: float, tolerance: float = 0.0, beside: Mapping[int, int] | None = None) -> bool:
        """Solve at these prices, as shares of the largest and rounded; whether that told anything new.

        tolerance: relative, by which the cheapest column known may be dearer than the floors prove: that is good enough.
        beside: for a column that goes well with these choices of other parts. Without, the answer is a floor too.
        """
        prices, beside = _shares(prices), beside or {}
        if (prices, *beside.items()) in self.asked:
            return False
        if tolerance and self.columns:
            known = min(column.whole.priced(prices) for column in self.columns)
            if known - self.least(prices) <= tolerance * known:
                return False
        self.asked.add((prices, *beside.items()))
        bound = float("inf")
        for case in range(len(self.cases)):
            try:
                chosen, least = self.cheapest(case, prices, beside, time_limit)
            except Infeasible:
                if not beside:
                    raise
                continue
            bound = min(bound, least * (1 - 1e-9))
            column = self.column(chosen)
            if all(column.choices != other.choices for other in self.columns):
                self.columns.append(column)
        if not beside:
            self.floors.append(Floor(prices, bound, bound if self.alone else 0.0))
        return True

    def open(self, prices: Amount, time_limit: float) -> bool:
        """Find what the first block, which reads another part's values, costs at least; whether that told anything new."""
        prices = _shares(prices)
        if self.alone or prices in self.opened:
            return False
        self.opened.add(prices)
        known = next((floor for floor in self.floors if floor.prices == prices), None) or Floor(prices, self.least(prices), 0.0)
        found = []
        for case in range(len(self.cases)):
            try:
                found.append(self.cheapest(case, prices, {}, time_limit, True)[1] * (1 - 1e-9))
            except Infeasible:
                continue
        self.floors = [*(floor for floor in self.floors if floor is not known), replace(known, first=min(found, default=0.0))]
        return True

    def least(self, prices: Amount) -> float:
        """What floors prove at these prices: the best sum of multiples of them that are no dearer."""
        lp = LinearProgram()
        rows: dict[int, dict[int, float]] = defaultdict(dict)
        for floor in self.floors:
            if any(cut and not price for cut, price in zip(floor.prices, prices)):
                continue
            shares = [cut / price if price else 0.0 for cut, price in zip(floor.prices, prices)]
            most = max(shares)  # as large as the multiple of it that is no dearer is small: HiGHS takes no numbers of all sizes
            column = lp.column(cost=-floor.bound / most)
            for i, share in enumerate(shares):
                rows[i][column] = share / most
        for terms in rows.values():
            lp.row(terms, upper=1.0)
        found = lp.solve()
        return -found.objective if found is not None else 0.0

    def cheapest(self, case: int, prices: Amount, beside: Mapping[int, int], time_limit: float, first: bool = False):
        """The cheapest choices of own and outside ops in a case, and what they cost at least. Raises Infeasible."""
        kept = [[beside[op]] if op in beside else left for op, left in zip(self.own + self.outside, self.cases[case])]
        key = case, first, *sorted(beside.items())
        if key not in self.networks:
            self.networks[key] = self.network(kept, beside, first)
        network = self.networks[key]
        net, found = network.at(prices), None
        if not network.wide:
            thin(net)
            found = cheapest(net)
            network.wide = found is None
        if found is None:
            reduce(net)
            found = cheapest(net)
        if found is None:
            solved = sharding.solve_network(net, lambda choices: Evaluation(network.price(choices, prices), []), time_limit)
            if solved is None:
                raise Infeasible("the block has no consistent choice")
            choices, price, answer, _ = solved
            bound = sharding.bound_of(net, answer, price)
        else:
            choices = net.recover(found)
            bound = network.price(choices, prices)
        return {op: kept[i][choices[i]] for op, i in self.at.items()}, bound

    def column(self, chosen: Mapping[int, int]) -> Column:
        problem = self.problem
        stream = tuple(problem.values[v].placements[chosen[problem.values[v].op]] for v in self.streams)
        whole = amount = self.amount(chosen, {})
        for op, share in self.shares.items():
            whole = whole.plus(Amount(*(share * x for x in problem.ops[op].costs[chosen[op]])))
        return Column(tuple(sorted(chosen.items())), amount, whole, stream)

    def amount(self, chosen: Mapping[int, int], beside: Mapping[int, int]) -> Amount | None:
        """What a block costs but for resident ops, with what it pays beside other parts' choices; None if they don't go together."""
        problem, total = self.problem, NOTHING
        chosen = {op: beside.get(op, strategy) for op, strategy in chosen.items()}
        for op in self.own:
            total = total.plus(problem.ops[op].costs[chosen[op]])
        wanted: dict[int, set[int]] = defaultdict(set)
        for index, readers, _ in self.inner:
            wanted[index] |= {use.demands[chosen[use.op]] for use in readers}
        for index, readers in self.after.items():
            wanted[index] |= {use.demands[beside[use.op]] for use in readers if use.op in beside}
        share = {index: share for index, _, share in self.inner}
        for index, demands in wanted.items():
            value = problem.values[index]
            have = value.placements[chosen[value.op]]
            for want in demands - {have}:
                if (have, want) not in value.moves:
                    return None
                total = total.plus(Amount(*(share.get(index, 1.0) * x for x in value.moves[have, want])))
        return total

    def crossing(self, stream: tuple[int, ...]) -> tuple[float, float]:
        """Seconds and bytes that each of two stages spends on a cut between two blocks, for what one hands to the next."""
        of = [(self.problem.values[v], placement) for v, placement in zip(self.streams, stream)]
        return sum(v.sends.get(p, 0.0) for v, p in of), sum(v.buffers.get(p, 0.0) for v, p in of)


def _shares(prices: Amount) -> Amount:
    """As shares of the largest, rounded."""
    lead = prices.seconds or max(prices)
    return Amount(*(_rounded(price / lead) for price in prices))


def _rounded(x: float, digits: int = 4) -> float:
    return round(x, digits - 1 - below(log10(x))) if x else 0.0
