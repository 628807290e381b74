"""Sets of a cache whose line used longest ago leaves first (compiled parts).

A cache is flat arrays over its lines: the ways of set s are places s * ways to (s + 1) * ways, and `first` is s * ways.
`used` holds the order of use, ever larger numbers. Where lines may be under way, `pending` holds the tick from which a
line has arrived, and an order of use carries its way in the low `WAY_BITS` bits, so that one minimum finds both.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from simulators.compiled import inline_always

WAY_BITS = 5
"""Bits of a way in an order of use: up to 32 ways."""
NEVER = 2**31 - 1
"""The largest number of 32 bits: after every tick and every order of use."""


@inline_always
def find_way(tags: Any, first: int, ways: int, tag: int) -> int:
    """Find the way of a set that holds a tag; -1 if none does. tags [sets * ways]."""
    match, begin = 0, np.uint64(first)  # unsigned, as it does not count from the end
    for way in range(ways):  # without branches, so that it is done by vectors: at most one way holds a tag
        match |= way + 1 if tags[begin + np.uint64(way)] == tag else 0
    return match - 1


@inline_always
def oldest_way(used: Any, first: int, ways: int) -> int:
    """Find the way of a set that was used longest ago, the first of several. used [sets * ways]."""
    oldest = 0
    for way in range(1, ways):
        if used[first + way] < used[first + oldest]:
            oldest = way
    return oldest


@inline_always
def order_of_use(stamp: int, way: int) -> int:
    """Order of use of a way at a stamp, with the way in its low bits."""
    return (stamp << WAY_BITS) + way


@inline_always
def oldest_arrived_way(orders: Any, first_order: int, first_pending: int, ways: int, tick: int) -> int:
    """Find the way used longest ago of those that have arrived by a tick; -1 if all are under way.

    orders: one array with orders of use from `first_order` and arrivals from `first_pending`.
    """
    best, first_used, first_arrival = NEVER, np.uint64(first_order), np.uint64(first_pending)
    for way in range(ways):
        key = orders[first_used + np.uint64(way)] if orders[first_arrival + np.uint64(way)] <= tick else NEVER
        best = min(best, key)  # the oldest order of use, with its way in the low bits
    return best & ((1 << WAY_BITS) - 1) if best < NEVER else -1


@inline_always
def soonest_arrival(pending: Any, first: int, ways: int) -> int:
    """Tick at which the first line of a set that is full of lines under way arrives."""
    least, begin = NEVER, np.uint64(first)
    for way in range(ways):
        least = min(least, pending[begin + np.uint64(way)])
    return least
