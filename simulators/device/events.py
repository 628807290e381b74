"""What acts next: the earliest of a few lanes, or the root of a binary heap (compiled parts).

Ties go to the lower number, so that runs are deterministic to the bit.
"""

from __future__ import annotations

from typing import Any

from simulators.compiled import inline_always


@inline_always
def earliest(times: Any, first: int, last: int) -> int:
    """Find the lane with the least time among `first` to `last`, without the latter; ties go to the lower one."""
    lane = first
    for place in range(first + 1, last):
        if times[place] < times[lane]:
            lane = place
    return lane


@inline_always
def sink_root(keys: Any, first_key: int, lanes: Any, first_lane: int, size: int) -> None:
    """Restore the order of a heap whose root has a new key: it sinks to its place; ties go to the lower lane.

    keys, lanes: of the heap's places, from `first_key` and `first_lane` on; place p is above 2 p + 1 and 2 p + 2. A
    heap of one lane reads no further entry.
    """
    key, who, place = keys[first_key], lanes[first_lane], 0
    while True:
        child = 2 * place + 1
        if child >= size:
            break
        if child + 1 < size:
            left_key, right_key = keys[first_key + child], keys[first_key + child + 1]
            left, right = lanes[first_lane + child], lanes[first_lane + child + 1]
            child += right_key < left_key or (right_key == left_key and right < left)
        child_key, lane = keys[first_key + child], lanes[first_lane + child]
        if not (child_key < key or (child_key == key and lane < who)):
            break
        keys[first_key + place], lanes[first_lane + place] = child_key, lane
        place = child
    keys[first_key + place], lanes[first_lane + place] = key, who
