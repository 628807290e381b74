"""Schedules of collectives that are made for a topology and a size, and how far any schedule is from the best possible.

Shares of the least-loaded routing (`packing`) are rounded to units, cut into pieces, and sent in a pipeline: a piece
leaves a GPU when it has arrived there, after the pieces before it. A reduce-scatter is an all-gather backwards; an
all-reduce is both, over the same trees. Numbers of pieces are tried; where a library's algorithm is faster, as it may
be for small tensors, it is taken.

Bounds, of this model of links: a port is busy for the bytes that it carries, and the last of them arrive a latency
later, so that a collective takes the least load of the busiest port and the least latency; and as long as the quickest
path between any two GPUs. Of an all-reduce: for each byte, k parts of which each must know the sum of all send each
other 2 k - 2 messages at least (one-way gossip), whatever is added on the way, and links between the parts carry
no more than `crossing_rate`; parts are GPUs, or nodes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from dse.errors import ConfigError, Problem
from dse_collectives.algorithms import library_schedules, quickest_paths, quickest_schedule
from dse_collectives.explicit import (
    Collective,
    CollectiveSchedule,
    DataChunk,
    Message,
    check_schedule,
    reduce_and_gather,
    reverse_gather,
)
from dse_collectives.packing import Block, Hops, Routing, crossing_rate, least_loaded
from dse_collectives.replay import seconds
from dse_collectives.topology import LinkTopology

# of a block, to which shares of the routing are rounded
_MOST_UNITS = 64
_PIECES = (2, 4, 8, 16, 32, 64)
_ENOUGH = 0.002  # relative: more pieces gain at least this
_MOST_MESSAGES = 20_000  # of a schedule with several pieces
SYNTHESISED = "synthesised"


@dataclass(frozen=True)
class CollectiveBound:
    """Times [s] that no schedule is below."""

    bandwidth_s: float
    latency_s: float

    @property
    def seconds(self) -> float:
        """The larger one."""
        return max(self.bandwidth_s, self.latency_s)


@dataclass(frozen=True)
class TimedSchedule:
    """A schedule and its time [s] for a tensor of some bytes."""

    schedule: CollectiveSchedule
    seconds: float


class Synthesiser:
    """Schedules and bounds of one collective on one topology, for tensors of any size.

    relay_share: room of a GPU for what it only passes on, over the tensor's bytes.
    """

    def __init__(self, collective: Collective, topology: LinkTopology, *, relay_share: float = math.inf) -> None:
        self.collective, self.topology, self.relay_share = collective, topology, relay_share
        self._pipelines: dict[int, CollectiveSchedule] = {}

    @cached_property
    def library(self) -> Mapping[str, CollectiveSchedule]:
        """Schedules of the algorithms of libraries, by name, proven."""
        algorithms = library_schedules(self.collective, self.topology)
        return {name: check_schedule(schedule) for name, schedule in algorithms.items()}

    @cached_property
    def routing(self) -> Routing:
        """The least-loaded routing: of an all-to-all its paths, else trees; of a reduction backwards in time."""
        if self.collective == "all_to_all":
            return least_loaded("all_to_all", self.topology)
        # backwards in time each link carries the other way round
        turned = self.collective == "reduce_scatter"
        return least_loaded("all_gather", self.topology.turn_links() if turned else self.topology)

    def bound(self, num_bytes: float) -> CollectiveBound:
        """Bounds for a tensor of `num_bytes`."""
        # any collective has data for every pair of GPUs: the longest of the quickest paths bounds it
        late = {ends: link.latency_s for ends, link in self.topology.by_ends.items()}
        paths = quickest_paths(self.topology).values()
        latency = max(sum(late[hop] for hop in pairwise(path)) for path in paths)
        if self.collective == "all_reduce":
            busy = num_bytes * self._gossip_per_byte
        else:
            busy = self.routing.bound_per_byte * num_bytes / self.topology.num_gpus
        # the last byte of the busiest port still has a link's latency before it
        return CollectiveBound(busy + min(late.values()), latency)

    @cached_property
    def _gossip_per_byte(self) -> float:
        """Seconds that an all-reduce of a byte takes at least."""
        n, g = self.topology.num_gpus, self.topology.gpus_per_node
        # GPUs as parts, and nodes: whichever bounds more
        parts = [list(range(n))] + ([[gpu // g for gpu in range(n)]] if n // g > 1 and g > 1 else [])
        # k parts exchange at least 2 k - 2 copies of a byte between them
        return max((2 * (max(part_of) + 1) - 2) / crossing_rate(self.topology, part_of) for part_of in parts)

    def timed_library(self, num_bytes: float) -> dict[str, TimedSchedule]:
        """Schedules of libraries with their times."""
        return {
            name: TimedSchedule(schedule, float(seconds(schedule, self.topology, num_bytes)[0]))
            for name, schedule in self.library.items()
        }

    def synthesise(self, num_bytes: float) -> TimedSchedule:
        """The fastest schedule of pipelines over the routing, quickest paths and libraries.

        Raises ConfigError where each of them relays more than there is room for.
        """
        return self.synthesise_sizes([num_bytes])[0]

    def synthesise_sizes(self, sizes: Sequence[float]) -> list[TimedSchedule]:
        """The fastest schedule for each size; of pipelines that are as fast, the one of the fewest pieces."""
        # [candidates, sizes]
        times = np.array([seconds(schedule, self.topology, sizes) for schedule in self.candidates])
        piped = np.array([schedule in self._pipelines.values() for schedule in self.candidates])
        # fewer pieces may lose a little to more pieces, but never to a library
        limits = np.minimum(times.min(axis=0) * (1 + _ENOUGH), np.where(piped[:, None], np.inf, times).min(axis=0))
        # the first candidate within the limit: pipelines come first, by their pieces
        places = np.argmax(times <= limits, axis=0)
        return [self._with_name(self.candidates[place], times[place, size]) for size, place in enumerate(places)]

    def _with_name(self, schedule: CollectiveSchedule, time_s: float) -> TimedSchedule:
        if schedule.name.startswith(SYNTHESISED):
            return TimedSchedule(schedule, float(time_s))
        return TimedSchedule(replace(schedule, name=f"{SYNTHESISED}: {schedule.name}"), float(time_s))

    @cached_property
    def candidates(self) -> tuple[CollectiveSchedule, ...]:
        """Schedules that may be the fastest, and relay no more than there is room for. Raises ConfigError."""
        schedules = [self.pipeline(1)]
        for pieces in _PIECES:
            # proof and replay take time by the message
            if pieces * len(schedules[0].messages) <= _MOST_MESSAGES:
                schedules.append(self.pipeline(pieces))
        # for small tensors latency decides, not the load of links
        schedules += [check_schedule(quickest_schedule(self.collective, self.topology)), *self.library.values()]
        fitting = tuple(schedule for schedule in schedules if self._has_room(schedule))
        if not fitting:
            rule = f"is {self.relay_share:.4g} of the tensor, less than any schedule relays"
            raise ConfigError([Problem("relay_bytes", rule, way_out="give more, or other links")])
        return fitting

    def _has_room(self, schedule: CollectiveSchedule) -> bool:
        """Return whether GPUs have room for what a schedule makes them relay."""
        if math.isinf(self.relay_share):
            return True
        most = max(map(schedule.relayed_share, range(schedule.num_gpus)))
        return most <= self.relay_share * (1 + 1e-12)

    def pipeline(self, pieces: int) -> CollectiveSchedule:
        """The schedule of the routing with so many pieces of the chunk of each route, proven."""
        if pieces not in self._pipelines:
            self._pipelines[pieces] = check_schedule(self._make_pipeline(pieces))
        return self._pipelines[pieces]

    def _make_pipeline(self, pieces: int) -> CollectiveSchedule:
        name = f"{SYNTHESISED}, {pieces} piece{'s' if pieces > 1 else ''}"
        # reductions are made as gathers first, and turned round in time
        shape: Collective = "all_to_all" if self.collective == "all_to_all" else "all_gather"
        empty = CollectiveSchedule(name, shape, self.topology.num_gpus, 1, (), ())
        copies = _pipeline_messages(self.routing, pieces, empty)
        if self.collective in ("all_gather", "all_to_all"):
            return copies
        scatter = reverse_gather(copies, name)
        return scatter if self.collective == "reduce_scatter" else reduce_and_gather(scatter, copies, name)


def _pipeline_messages(routing: Routing, pieces: int, empty: CollectiveSchedule) -> CollectiveSchedule:
    """Messages of all pieces, in the order of a pipeline that is full."""
    units, counts = round_shares(routing)
    chunks: list[DataChunk] = []
    sends: list[tuple[tuple[int, ...], Message]] = []
    for block, routes in counts.items():
        start = 0
        for hops, count in routes:
            depth, height = _depths(hops), _heights(hops)
            for piece in range(pieces):
                for place, (a, b) in enumerate(hops):
                    # by step of the pipeline, then what has the longest way to go; the rest makes it deterministic
                    key = (piece + depth[place], -height[place], (b - a) % empty.num_gpus, a, place)
                    sends.append((key, Message(a, b, (len(chunks),))))
                chunks.append(DataChunk(block[0], start, count, block[1]))
                start += count
    ordered = tuple(message for _, message in sorted(sends, key=lambda send: send[0]))
    return replace(empty, units=units * pieces, chunks=tuple(chunks), messages=ordered)


def _depths(hops: Hops) -> list[int]:
    """Hops before each one."""
    depth = {hops[0][0]: 0}
    for a, b in hops:
        depth[b] = depth[a] + 1
    return [depth[a] for a, _ in hops]


def _heights(hops: Hops) -> list[int]:
    """Most hops after each one."""
    height: dict[int, int] = {}
    # hops are in the order of a tree: reversed, children come before their parents
    for a, b in reversed(hops):
        height[a] = max(height.get(a, 0), height.get(b, 0) + 1)
    return [height.get(b, 0) for _, b in hops]


def round_shares(routing: Routing) -> tuple[int, Mapping[Block, Sequence[tuple[Hops, int]]]]:
    """Units of a block, and whole units of each route: the fewest that give all shares, else the best of a limit."""
    shares = {block: np.array([share for _, share in routes]) for block, routes in routing.routes.items()}
    errors = []
    for units in range(1, _MOST_UNITS + 1):
        # error of rounding, as a share of a block
        off = max(float(np.abs(units * share - np.round(units * share)).max()) / units for share in shares.values())
        errors.append((off, units))
        # the linear program is no more exact than that
        if off < 1e-5:
            break
    # the smallest error, and of equal ones the fewest units
    units = min(errors)[1]
    # shares of the program sum to 1 only within its tolerance
    counts = {block: _apportion(share / share.sum(), units) for block, share in shares.items()}
    return units, {
        block: [(hops, count) for (hops, _), count in zip(routes, counts[block], strict=True) if count]
        for block, routes in routing.routes.items()
    }


def _apportion(shares: np.ndarray, units: int) -> list[int]:
    """Whole numbers that sum to `units`, by largest remainders."""
    units_of_routes = np.floor(shares * units + 1e-9).astype(int)
    # routes that lost most by rounding down get what is left
    for place in np.argsort(units_of_routes - shares * units, kind="stable")[: units - units_of_routes.sum()]:
        units_of_routes[place] += 1
    return [int(count) for count in units_of_routes]


def bus_rate(collective: Collective, num_gpus: int, num_bytes: float, time_s: float) -> float:
    """Bus bandwidth [bytes/s], as NCCL's tests count it."""
    # NCCL-tests: bus bandwidth does not depend on the number of GPUs
    factor = (2 if collective == "all_reduce" else 1) * (num_gpus - 1) / num_gpus
    return factor * num_bytes / time_s if time_s > 0 else math.inf
