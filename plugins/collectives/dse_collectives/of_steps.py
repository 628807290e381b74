"""The collective of an overlap schedule: the moves of `schedule=synthesised` as messages between GPUs.

A move of an interval "of peer p" is, on every GPU g at once, a message from GPU g - p with the interval's units of its
block. On a ring it goes from neighbour to neighbour, and half of it each way where both are as long. Moves after a GEMM
are those of an all-gather backwards in time. GEMMs, pauses, and what moves the data (engines or kernels) are not in it:
schedules of collectives have no words for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import gcd
from typing import NamedTuple

from dse.errors import ConfigError, Problem
from dse_collectives.explicit import (
    Collective,
    CollectiveSchedule,
    DataChunk,
    Message,
    check_schedule,
    reverse_gather,
)
from simulators.hardware.network import Topology

_NAME = "moves of the steps"


class StepMove(NamedTuple):
    """Intervals first to last - 1 of the shards of peers, by distance; None: of all."""

    interval: tuple[int, int]
    peers: tuple[int, ...] | None


def collective_of_steps(
    collective: Collective, num_gpus: int, topology: Topology, cuts: Sequence[int], moves: Sequence[StepMove]
) -> CollectiveSchedule:
    """The moves of a schedule, of blocks cut at `cuts`, as a proven schedule.

    Raises ConfigError for an all-reduce, whose steps move each part both ways, and where a ring forwards what is not
    there yet.
    """
    if collective == "all_reduce":
        rule = "has moves of an all-reduce, which go both ways at once"
        raise ConfigError([Problem("schedule", rule, None, "use pattern=reduce_scatter or all_gather")])
    # the GPU across an even ring is as far both ways: half of its data goes either way
    halves = 2 if topology == "ring" and num_gpus % 2 == 0 else 1
    # units of the schedule: the largest that all cuts, and halves, are multiples of
    edges = [cut * halves // gcd(*cuts) for cut in cuts]
    pieces = [
        (start + half * (end - start) // halves, (end - start) // halves)
        for start, end in pairwise(edges)
        for half in range(halves)
    ]
    everyone = range(num_gpus)
    blocks = [(block, -1) for block in everyone]
    if collective == "all_to_all":
        blocks = [(block, part) for block in everyone for part in everyone if part != block]
    chunks = tuple(DataChunk(block, start, count, part) for block, part in blocks for start, count in pieces)
    first = {block: place * len(pieces) for place, block in enumerate(blocks)}
    scatters, messages = collective == "reduce_scatter", list[Message]()
    # a reduce-scatter is written as its all-gather backwards, and turned round below
    for move in reversed(moves) if scatters else moves:
        sends = list[tuple[int, int, Message]]()
        for peer, way, which in _ways(move, num_gpus, topology):
            start, end = move.interval
            wanted = [place for place in range(halves * start, halves * end) if place % halves in which]
            for gpu in everyone:
                origin = (gpu - peer) % num_gpus
                hops = list(enumerate(_hops(origin, gpu, way, num_gpus)))
                block = first[origin, gpu if collective == "all_to_all" else -1]
                moved = tuple(block + place for place in wanted)
                if collective != "all_to_all":  # the GPUs before it on the way keep what they pass on
                    hops = hops[-1:]
                # hops in the order of their distance; the longest ways first
                sends += [(depth, -len(hops), Message(*hop, moved)) for depth, hop in hops]
        messages += [message for *_, message in sorted(sends, key=lambda send: send[:2])]
    gathered: Collective = "all_gather" if scatters else collective
    schedule = CollectiveSchedule(_NAME, gathered, num_gpus, edges[-1], chunks, tuple(messages))
    return check_schedule(reverse_gather(schedule, _NAME) if scatters else schedule)


def _ways(move: StepMove, num_gpus: int, topology: Topology) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Yield (peer, direction on a ring or 0 for a link of its own, halves of an interval that take it)."""
    for peer in move.peers or range(1, num_gpus):
        if topology != "ring":
            yield peer, 0, (0,)
        elif 2 * peer == num_gpus:
            yield peer, 1, (0,)
            yield peer, -1, (1,)
        else:
            # the shorter way round
            yield peer, 1 if 2 * peer < num_gpus else -1, (0, 1)


def _hops(origin: int, gpu: int, way: int, num_gpus: int) -> Iterator[tuple[int, int]]:
    """Yield (source, target) on the way from a GPU to another."""
    if way == 0:
        yield origin, gpu
        return
    here = origin
    while here != gpu:
        yield here, (here + way) % num_gpus
        here = (here + way) % num_gpus
