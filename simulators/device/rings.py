"""First-in-first-out queues in rings of fixed size (compiled parts).

A ring of a power of two is read by ever larger counts of what came and what left; another one by a place that returns
to 0. Both leave out the division of a remainder, which is slow.
"""

from __future__ import annotations

from simulators.compiled import inline_always


@inline_always
def place_of(count: int, size: int) -> int:
    """Place of an entry in a ring of a power of two, by how many came before it."""
    return count & (size - 1)


@inline_always
def next_place(place: int, size: int) -> int:
    """Place after another one in a ring of any size."""
    return place + 1 if place + 1 < size else 0
