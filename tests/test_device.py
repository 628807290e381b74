"""Compiled parts that simulators of a device share, each against lists and sorts that share no code with it."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulators.device import dram, events, histograms, lru, rings, servers
from simulators.device.records import layout, record, table


def plain(part: Callable[..., Any]) -> Callable[..., Any]:
    """A part as it is written: a kernel that was compiled before has put its machine code into the part's place."""
    return getattr(part, "py_func", part)


@given(lines=st.lists(st.integers(0, 12), max_size=80), ways=st.integers(1, 6), sets=st.sampled_from((1, 2, 4)))
def test_a_set_holds_the_lines_that_were_used_last(lines: list[int], ways: int, sets: int) -> None:
    tags, used = np.full(sets * ways, -1, np.int32), np.zeros(sets * ways, np.int64)
    last_used: list[list[int]] = [[] for _ in range(sets)]
    for stamp, line in enumerate(lines, 1):
        first, expected = line % sets * ways, last_used[line % sets]
        way = plain(lru.find_way)(tags, first, ways, line)
        assert (way >= 0) == (line in expected)
        if way < 0:
            way = plain(lru.oldest_way)(used, first, ways)
        else:
            expected.remove(line)
        tags[first + way], used[first + way] = line, stamp
        expected.append(line)
        del expected[:-ways]
        assert sorted(tags[first : first + ways][tags[first : first + ways] >= 0]) == sorted(expected)


@given(stamps=st.lists(st.integers(0, 1000), min_size=1, max_size=32, unique=True), data=st.data())
def test_of_lines_that_have_arrived_the_one_used_longest_ago_leaves(stamps: list[int], data: Any) -> None:
    ways, tick = len(stamps), 50
    arrivals = data.draw(st.lists(st.integers(0, 100), min_size=ways, max_size=ways))
    orders = [plain(lru.order_of_use)(stamp, way) for way, stamp in enumerate(stamps)]
    both = np.array([*orders, *arrivals], np.int32)
    arrived = [way for way in range(ways) if arrivals[way] <= tick]
    oldest = min(arrived, key=stamps.__getitem__, default=-1)
    assert plain(lru.oldest_arrived_way)(both, 0, ways, ways, tick) == oldest
    assert plain(lru.soonest_arrival)(both, ways, ways) == min(arrivals)


@given(size=st.sampled_from((1, 2, 8, 32)), count=st.integers(0, 100))
def test_both_rings_go_round_in_order(size: int, count: int) -> None:
    place = 0
    for turn in range(count):
        assert place == plain(rings.place_of)(turn, size) == turn % size
        place = plain(rings.next_place)(place, size)


@given(times=st.lists(st.sampled_from((0.0, 1.0, 2.5, np.inf)), min_size=1, max_size=9), first=st.integers(0, 3))
def test_the_earliest_lane_acts_next_and_the_lower_one_of_equal_times(times: list[float], first: int) -> None:
    lanes = np.array([-1.0] * first + times + [-1.0])
    assert plain(events.earliest)(lanes, first, first + len(times)) == first + times.index(min(times))


@given(waits=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=1, max_size=9))
def test_a_heap_gives_lanes_in_the_order_of_time_and_of_number(waits: list[list[int]]) -> None:
    """Lane n begins at time 0 and goes on after each of its waits, as with a heap of pairs."""
    keys, lanes = np.zeros(len(waits) + 2), np.arange(len(waits))
    keys[len(waits) :] = np.inf
    pairs, turns = [(0.0, lane) for lane in range(len(waits))], [iter(wait) for wait in waits]
    while pairs[0][0] < np.inf:
        time, lane = pairs[0]
        assert (keys[0], lanes[0]) == (time, lane)
        later = time + next(turns[lane], np.inf)
        heapq.heapreplace(pairs, (later, lane))
        keys[0] = later
        plain(events.sink_root)(keys, 0, lanes, 0, len(waits))
    assert keys[0] == np.inf


@given(gaps=st.lists(st.integers(0, 9), max_size=30), takes=st.integers(1, 5))
def test_a_server_is_busy_as_long_as_its_requests_take(gaps: list[int], takes: int) -> None:
    free, arrivals = np.zeros(2), np.cumsum(gaps)
    begins = [plain(servers.serve)(free, 1, now, takes) for now in arrivals]
    assert all(begin >= now for begin, now in zip(begins, arrivals, strict=True))
    assert all(later - begin >= takes for begin, later in pairwise(begins))
    assert free.tolist() == [0.0, begins[-1] + takes if gaps else 0.0]


def test_a_bank_waits_for_its_precharge_its_row_cycle_and_its_channel() -> None:
    activation_at = plain(dram.activation_at)
    assert [activation_at(*times) for times in ((9, 1, 1, 1), (1, 9, 1, 1), (1, 1, 9, 1), (1, 1, 1, 9))] == [9] * 4
    assert plain(dram.column_at)(10.0, 14.0, 3.0) == 24.0
    assert plain(dram.column_at)(10.0, 14.0, 30.0) == 30.0
    assert [plain(dram.refreshes_before)(late, 100.0) for late in (0.0, 99.0, 100.0, 350.0)] == [0, 0, 1, 3]


@given(counts=st.lists(st.integers(0, 9), min_size=8 * 3, max_size=8 * 3))
def test_bins_that_join_keep_what_each_lane_has_counted(counts: list[int]) -> None:
    flat = np.array([7, *counts, 7])
    before = flat[1:-1].reshape(8, 3).copy()
    plain(histograms.join_bins)(flat, 1, 3, 8)
    after = flat[1:-1].reshape(8, 3)
    assert (after[:4] == before[0::2] + before[1::2]).all()
    assert not after[4:].any()
    assert flat[0] == flat[-1] == 7


def test_fields_of_records_are_written_in_place_by_name() -> None:
    lane = layout(int64="length kind", float64="free")
    lanes, alone = table((2, 3), lane, kind=-1), record(lane, free=2.5)
    lanes[1, 2].length += 4
    alone.free += 1.0
    assert lanes.length.tolist() == [[0, 0, 0], [0, 0, 4]]
    assert (lanes.kind == -1).all()
    assert (alone.length, alone.free) == (0, 3.5)
    with pytest.raises(AttributeError):
        alone.width = 1.0
