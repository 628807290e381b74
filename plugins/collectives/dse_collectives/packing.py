"""Routes that load the links least: a linear program over trees or paths, by columns; and bounds that it proves.

Each block of an all-gather is spread over trees from its GPU to all, each block of an all-to-all over paths. With x_cj
the share of block c on route j, the program is

    least T: sum over j of x_cj = 1 for all c; sum over c, j of x_cj load_jp <= T for all ports p

and its columns are made as they are needed (HiGHS): where y_p are the prices of ports, which sum to 1, the cheapest
routes under y join. For any such prices T >= sum over c of the cheapest route's price, as each unit of a block must
take some route: the best of these sums is a bound of any schedule, also where the columns end early. A tree that spans
all GPUs is cheapest by Edmonds' algorithm (Chu-Liu), a path by Floyd's. All blocks of an all-gather go to all GPUs, so
that trees reach what any routing reaches (Edmonds' disjoint branchings). A second program takes, among the best shares,
those whose data arrives earliest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dse_collectives.algorithms import library_schedules, quickest_paths
from dse_collectives.explicit import Collective, CollectiveSchedule
from dse_collectives.topology import LinkTopology

Floats = NDArray[np.float64]
Hops = tuple[tuple[int, int], ...]
Block = tuple[int, int]
_TIGHT = 1e-7  # relative: bound and program agree
_SLACK = 1e-6  # relative: what the second program may lose
_ROUNDS = 200
_WORK = 2e7  # routes priced x links, after which columns end early


@dataclass(frozen=True)
class Routing:
    """Shares of blocks on routes. routes: block (and part) -> (hops in order, share) of each route.

    seconds_per_byte: time of the busiest port for a byte of each block; bound_per_byte: no routing has less.
    """

    routes: Mapping[Block, tuple[tuple[Hops, float], ...]]
    seconds_per_byte: float
    bound_per_byte: float


def least_loaded(collective: Collective, topology: LinkTopology) -> Routing:
    """The routing of an all-gather or an all-to-all that loads the busiest port least."""
    return _RoutingProgram(collective, topology).solve()


class _RoutingProgram:
    """The linear program, its columns so far, and the best bound."""

    def __init__(self, collective: Collective, topology: LinkTopology) -> None:
        self.topology, self.spans = topology, collective == "all_gather"
        n = range(topology.num_gpus)
        # -1: the block goes to all
        self.blocks: list[Block] = [(s, -1) for s in n] if self.spans else [(s, d) for s in n for d in n if s != d]
        self.place = {ends: place for place, ends in enumerate(topology.by_ends)}
        # loads near one keep the tolerances of the solver meaningful
        self.scale = float(topology.load_matrix.max())
        self.columns: dict[tuple[Block, Hops], Floats] = {}
        # the first columns: the program never ends worse than a library
        for schedule in library_schedules(collective, topology).values():
            for block, hops in _routes_of(schedule):
                self.add(block, hops)
        self.bound = 0.0

    @cached_property
    def loads(self) -> Floats:
        """Seconds of ports for a byte on links, over the largest [ports, links]."""
        return self.topology.load_matrix / self.scale

    def add(self, block: Block, hops: Hops) -> bool:
        """Add a column; return whether it is a new one."""
        if (block, hops) in self.columns:
            return False
        # load of every port for a whole block on this route
        self.columns[block, hops] = self.loads[:, [self.place[hop] for hop in hops]].sum(axis=1)
        return True

    def solve(self) -> Routing:
        """Add columns until none is cheaper, and read the shares."""
        n = len(self.topology.links)
        # large topologies end early: their bound is looser, but holds
        rounds = max(3, min(_ROUNDS, int(_WORK / (n * len(self.blocks)))))
        for _ in range(rounds):
            time, prices = self._solve()
            # no cheaper route, or the bound meets the program: the routing is the best
            if self._price(prices) <= 0 or self.bound >= time * (1 - _TIGHT):
                break
        time, _ = self._solve()
        # of all routings that load as little, the one whose data arrives first
        shares = self._earliest(time * (1 + _SLACK))
        routes: dict[Block, list[tuple[Hops, float]]] = {block: [] for block in self.blocks}
        for (block, hops), share in zip(self.columns, shares, strict=True):
            if share > _SLACK:
                routes[block].append((hops, float(share)))
        fixed = {block: tuple(pairs) for block, pairs in routes.items()}
        # rounding may put the bound above the program
        return Routing(fixed, time * self.scale, min(self.bound, time) * self.scale)

    def _price(self, prices: Floats) -> int:
        """Add the cheapest routes under prices of ports, and improve the bound; the number of new columns."""
        # price of a link: loads of its ports at their prices
        link_prices = prices @ self.loads
        total, added = 0.0, 0
        for block, hops, is_cheapest in self._cheap_routes(link_prices):
            added += self.add(block, hops)
            # only cheapest routes prove a bound; others are columns that arrive early
            if is_cheapest:
                total += float(link_prices[[self.place[hop] for hop in hops]].sum())
        self.bound = max(self.bound, total)
        return added

    def _cheap_routes(self, link_prices: Floats) -> Iterator[tuple[Block, Hops, bool]]:
        """Yield cheap routes of every block, and whether none is cheaper."""
        late = np.array([link.latency_s for link in self.topology.links])
        if not self.spans:
            # among paths of equal price the quickest: links that are not busy have a price of 0
            tie = 1e-9 * link_prices.max() / late.max() if late.max() > 0 else 0.0
            paths = quickest_paths(self.topology, lambda link: float(link_prices[link] + tie * late[link]))
            for block in self.blocks:
                path = paths[block]
                yield block, tuple(pairwise(path)), True
            return
        cost, delay = (self._matrix(values) for values in (link_prices, late))
        for block in self.blocks:
            # a tree to all GPUs, by Edmonds' algorithm
            yield block, _hops(block[0], cheapest_tree(cost, block[0])), True
            yield block, _hops(block[0], _early_tree(cost, delay, block[0])), False

    def _matrix(self, values: Floats) -> Floats:
        matrix = np.full((self.topology.num_gpus,) * 2, np.inf)
        matrix[tuple(zip(*self.topology.by_ends, strict=True))] = values
        return matrix

    def _rules(self) -> tuple[Any, Any]:
        """Matrices of shares that sum to 1 [blocks, columns], and of loads [ports, columns]."""
        from scipy.sparse import csr_matrix

        places = {block: place for place, block in enumerate(self.blocks)}
        rows = [places[block] for block, _ in self.columns]
        shape = len(self.blocks), len(rows)
        sums = csr_matrix((np.ones(len(rows)), (rows, range(len(rows)))), shape=shape)
        return sums, csr_matrix(np.array(list(self.columns.values())).T)

    def _solve(self) -> tuple[float, Floats]:
        """Least time with the columns so far, and the prices of ports."""
        from scipy.optimize import linprog
        from scipy.sparse import csr_matrix, hstack

        sums, loads = self._rules()
        num_ports, num_blocks = loads.shape[0], sums.shape[0]
        result = linprog(
            # variables: shares of the columns, and T last, which is minimised
            np.r_[np.zeros(sums.shape[1]), 1.0],
            # load of each port - T <= 0
            A_ub=hstack([loads, csr_matrix(-np.ones((num_ports, 1)))]),
            b_ub=np.zeros(num_ports),
            A_eq=hstack([sums, csr_matrix((num_blocks, 1))]),
            b_eq=np.ones(num_blocks),
            method="highs",
        )
        # duals of a minimum with <= are not positive; rounding may give them the other sign
        prices = np.maximum(-result.ineqlin.marginals, 0.0)
        return float(result.fun), prices / prices.sum()

    def _earliest(self, time: float) -> Floats:
        """Shares [columns] with the earliest mean arrival whose ports take no longer than `time`."""
        from scipy.optimize import linprog

        sums, loads = self._rules()
        late = {ends: link.latency_s for ends, link in self.topology.by_ends.items()}
        cost = np.array([_mean_arrival(hops, late) for _, hops in self.columns])
        limits = {"A_ub": loads, "b_ub": np.full(loads.shape[0], time), "A_eq": sums, "b_eq": np.ones(sums.shape[0])}
        result = linprog(cost / max(cost.max(), 1e-30), **limits, method="highs-ds")
        return np.asarray(result.x)


def _routes_of(schedule: CollectiveSchedule) -> Iterator[tuple[Block, Hops]]:
    """Yield the route of every chunk of a schedule of copies."""
    hops: dict[int, list[tuple[int, int]]] = {}
    for message in schedule.messages:
        for chunk in message.chunks:
            hops.setdefault(chunk, []).append((message.source, message.target))
    for place, route in hops.items():
        data = schedule.chunks[place]
        yield (data.block, data.part), tuple(route)


def _mean_arrival(hops: Hops, late: Mapping[tuple[int, int], float]) -> float:
    """Mean time [s] after which a first byte arrives at the ends of the hops."""
    times: dict[int, float] = {hops[0][0]: 0.0}
    for source, target in hops:
        times[target] = times[source] + late[source, target]
    return sum(times.values()) / (len(times) - 1)


def _hops(root: int, parents: Mapping[int, int]) -> Hops:
    """Hops of a tree, by depth."""
    depth = {root: 0}

    def depth_of(gpu: int) -> int:
        if gpu not in depth:
            depth[gpu] = 1 + depth_of(parents[gpu])
        return depth[gpu]

    ordered = sorted(parents, key=lambda gpu: (depth_of(gpu), gpu))
    return tuple((parents[gpu], gpu) for gpu in ordered)


def cheapest_tree(cost: Floats, root: int) -> dict[int, int]:
    """Parent of every vertex but the root in the cheapest tree from it (Chu-Liu, Edmonds).

    cost: [from, to], inf where there is no link.

    >>> cheapest_tree(np.array([[np.inf, 5, 2], [9, np.inf, 1], [9, 1, np.inf]]), 0)
    {1: 2, 2: 0}
    """
    n = len(cost)
    # the cheapest link into each vertex, which is a tree unless some close a circle
    parents = {v: int(np.argmin(np.where(np.arange(n) == v, np.inf, cost[:, v]))) for v in range(n) if v != root}
    cycle = _cycle(parents, root)
    if not cycle:
        return parents
    outside = [v for v in range(n) if v not in cycle]
    # the circle becomes one vertex: entering it at v saves the link of the circle into v
    inner = np.array([cost[parents[v], v] for v in cycle])
    into = cost[np.ix_(outside, cycle)] - inner
    out = cost[np.ix_(cycle, outside)]
    size = len(outside)
    smaller = np.full((size + 1, size + 1), np.inf)
    smaller[:size, :size] = cost[np.ix_(outside, outside)]
    # its best entry and its best exit for each vertex outside
    smaller[:size, size], smaller[size, :size] = into.min(axis=1), out.min(axis=0)
    tree = cheapest_tree(smaller, outside.index(root))
    # the circle is opened where the tree enters it
    entered = cycle[int(np.argmin(into[tree[size]]))]
    result = {v: parents[v] for v in cycle if v != entered} | {entered: outside[tree[size]]}
    for v, parent in tree.items():
        if v < size:
            result[outside[v]] = outside[parent] if parent < size else cycle[int(np.argmin(out[:, v]))]
    return dict(sorted(result.items()))


def _cycle(parents: Mapping[int, int], root: int) -> list[int]:
    """Vertices of a circle of parents, or none."""
    done = {root}
    for start in parents:
        path, vertex = list[int](), start
        while vertex not in done and vertex not in path:
            path.append(vertex)
            vertex = parents[vertex]
        if vertex in path:
            return path[path.index(vertex) :]
        done.update(path)
    return []


def _early_tree(cost: Floats, delay: Floats, root: int) -> dict[int, int]:
    """A cheap tree grown link by link, the cheapest first, and of these the one whose data arrives earliest (Prim)."""
    n, parents, arrival = len(cost), {}, np.full(len(cost), np.inf)
    arrival[root] = 0.0
    unit = max(float(np.max(cost[np.isfinite(cost)])), 1e-30)
    # prices that differ by rounding alone are equal, so that delay decides
    near = np.round(cost / unit, 9)
    for _ in range(n - 1):
        reached = np.isfinite(arrival)
        # links from the tree to the vertices that it lacks
        price = np.where(reached[:, None] & ~reached[None, :], near, np.inf)
        ready = np.where(price == price.min(), arrival[:, None] + delay, np.inf)
        source, target = np.unravel_index(int(np.argmin(ready)), ready.shape)
        parents[int(target)] = int(source)
        arrival[target] = ready[source, target]
    return parents


def crossing_rate(topology: LinkTopology, part_of: Sequence[int]) -> float:
    """Most bytes/s that GPUs of different parts send each other in all. part_of: GPU -> its part."""
    from scipy.optimize import linprog

    crossing = [place for place, link in enumerate(topology.links) if part_of[link.source] != part_of[link.target]]
    loads = topology.load_matrix[:, crossing]
    # ports that carry nothing between parts bound nothing
    used = loads[loads.sum(axis=1) > 0]
    unit = float(used.max())
    result = linprog(-np.ones(len(crossing)), A_ub=used / unit, b_ub=np.ones(len(used)), method="highs")
    return float(-result.fun) / unit
