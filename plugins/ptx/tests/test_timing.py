"""Timing of warp instructions: costs of pipelines, memory and dispatch, bounds that no launch beats, sampled blocks."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from dse.errors import ConfigError
from dse_memory import engine
from dse_memory.simulation import Simulation
from dse_ptx import sm_state
from dse_ptx.checking.scripts import LANES, Script, chain, shared_loads, stream
from dse_ptx.coalescing import ATOMIC, GLOBAL, SHARED, coalesce
from dse_ptx.sm_arrays import Grid
from dse_ptx.sms import SmArray, names, sm_array
from dse_ptx.timing import WRITE_BACK, occupancy, time_launch
from dse_ptx.warp_trace import Unit

pytestmark = pytest.mark.more  # the model is compiled once, in half a minute


def machine(name: str = "gtx_1080_ti", **gpu: Any) -> SmArray:
    """A shipped GPU whose memory has other values."""
    return sm_array(name, {"memory": gpu} if gpu else None)


def small(**sm: Any) -> SmArray:
    """Two SMs, with other values of an SM."""
    return sm_array("gtx_1080_ti", {"memory": {"num_cus": 2}, "sm": sm})


@pytest.mark.parametrize("name", names())
def test_dependent_arithmetic_takes_its_latency_and_independent_arithmetic_a_slot(name: str) -> None:
    gpu = machine(name)
    pipe, count = gpu.sm.pipes["fp32"], 400
    alone = time_launch(chain(count).trace(1, 1), gpu)
    assert alone.cycles == pytest.approx(count * pipe.latency, abs=pipe.latency)
    interval = 32 / pipe.lanes
    full = time_launch(chain(count, independent=16).trace(gpu.num_sms, 4 * gpu.sm.schedulers), gpu)
    assert full.cycles == pytest.approx(4 * count * interval, rel=0.05)
    assert full.flop / (full.cycles * gpu.cycle_s) <= gpu.peak_flop_per_s * (1 + 1e-9)


@pytest.mark.parametrize("policy", ["gto", "lrr"])
def test_every_slot_of_a_scheduler_goes_to_something(policy: str) -> None:
    gpu = small(policy=policy)
    for script in (chain(50), stream(4), shared_loads(20, [1, 2])):
        done = time_launch(script.trace(11, 4), gpu)
        assert done.slots.sum() == done.cycles * gpu.num_sms * gpu.sm.schedulers
        assert done.issued.sum() == done.instructions == done.units.sum() == 11 * 4 * len(script.rows)
        assert done.slots[:, sm_state.UNSELECTED].sum() == 0


def test_bank_conflicts_take_turns_and_shared_words_do_not() -> None:
    gpu, cycles = small(), {}
    for stride in (0, 1, 2, 4, 8, 16, 32):
        cycles[stride] = time_launch(shared_loads(64, [stride]).trace(2, 8), gpu).cycles
    assert cycles[0] == cycles[1]  # all lanes of one word are served at once
    for stride in (2, 4, 8, 16, 32):
        assert cycles[stride] == pytest.approx(64 * 8 * stride, rel=0.1)


def test_coalescing_counts_sectors_and_passes() -> None:
    rng = np.random.default_rng(3)
    addresses = rng.integers(0, 2048, (200, 32)).astype(np.uint64) * np.uint64(4)
    active = rng.integers(0, 2**32, 200, dtype=np.uint64).astype(np.uint32)
    size = rng.choice(np.array([1, 2, 4, 8, 16], np.int16), 200)
    kinds = rng.choice(np.array([GLOBAL, SHARED, ATOMIC], np.int8), 200)
    addresses = addresses // size[:, None].astype(np.uint64) * size[:, None].astype(np.uint64)
    coalesced = coalesce(addresses, active, size, kinds)
    for access in range(200):
        lanes = addresses[access][(active[access] >> np.arange(32, dtype=np.uint32)) & 1 == 1].astype(int)
        touched = [set(range(first, first + int(size[access]))) for first in lanes]
        sectors = {byte // 32 for span in touched for byte in span}
        got = coalesced.sectors[coalesced.begins[access] : coalesced.begins[access + 1]].tolist()
        assert sorted(got) == (sorted(sectors) if kinds[access] != SHARED else [])
        if kinds[access] == SHARED:
            words = {byte // 4 for span in touched for byte in span}
            assert coalesced.passes[access] == max([1, *np.bincount([word % 32 for word in words])])
        if kinds[access] == ATOMIC:
            assert coalesced.passes[access] == max([1, *np.unique(lanes, return_counts=True)[1]])


def test_a_barrier_waits_for_the_last_warp() -> None:
    gpu = small()
    slow, barriers = chain(100).rows, [("bar.sync", Unit.BARRIER, (), (), None, 0)] * 10
    alone = time_launch(Script(slow).trace(1, 4), gpu).cycles
    with_barriers = time_launch(Script([*slow, *barriers]).trace(1, 4), gpu)
    assert with_barriers.cycles >= alone + 9 * gpu.sm.barrier
    assert with_barriers.slots[:, sm_state.BARRIER].sum() > 0


def test_the_same_launch_takes_the_same_time_and_leaves_the_same_tables() -> None:
    trace, gpu = stream(8, bytes_per_lane=16).trace(60, 8), machine()
    first, second = (time_launch(trace, gpu) for _ in range(2))
    assert first.seconds == second.seconds
    assert all(
        np.array_equal(getattr(first, name), getattr(second, name)) for name in ("slots", "states", "dram", "l2")
    )


def test_streams_reach_the_bandwidth_of_dram_and_never_beat_it() -> None:
    gpu = machine()
    for script in (stream(16), stream(8, bytes_per_lane=16), stream(8, stride=8), stream(8, store=True)):
        done = time_launch(script.trace(28 * 24, 8), gpu)
        rate = done.dram_bytes / (done.cycles * gpu.cycle_s)
        assert rate <= gpu.memory.gpu.dram.bytes_per_s
        if script.rows[0][1] == Unit.GLOBAL_LOAD and len(script.rows) > 2:
            assert rate > 0.6 * gpu.memory.gpu.dram.bytes_per_s


def _mixed() -> Any:
    return Script([*stream(6).rows, *chain(200, independent=4).rows]).trace(28 * 12, 8)


def test_time_falls_with_clock_sms_and_bandwidth_and_rises_with_latency() -> None:
    trace, base = _mixed(), machine().memory.gpu

    def seconds(**gpu: Any) -> float:
        return time_launch(trace, machine(**gpu)).seconds

    slack = 1.02  # other orders of issue may cost a little
    clock = [seconds(cycle_s=base.cycle_s * times) for times in (2.0, 1.0, 0.5)]
    sms = [seconds(num_cus=count) for count in (7, 14, 28, 56)]
    dram = [seconds(dram={"bytes_per_s": rate}) for rate in (60e9, 120e9, 484e9, 968e9)]
    latency = [seconds(l2={"hop_s": hop}, l1={"hit_s": hop}) for hop in (3e-7, 5e-8, 1e-8)]
    for times in (clock, sms, dram, latency):
        assert all(later <= earlier * slack for earlier, later in pairwise(times)), times
        assert times[-1] < times[0]


def test_caches_serve_what_was_loaded_before() -> None:
    rows = list(stream(8).rows[:8])
    fresh, again = (time_launch(Script(rows * times).trace(8, 4), small(l1_loads=True)) for times in (1, 4))
    assert fresh.l1_hit_rate == 0
    assert again.l1_hit_rate == pytest.approx(0.75, abs=0.01)
    assert again.dram_bytes == fresh.dram_bytes


def test_l2_and_dram_do_what_the_memory_engine_does_with_the_same_requests() -> None:
    """The engine replays the sectors of one SM as a list: as many hits in L2, and the same lines of DRAM."""
    gpu = sm_array("gtx_1080_ti", {"memory": {"num_cus": 1}, "sm": {"policy": "lrr"}})
    rng = np.random.default_rng(5)
    places = [LANES * np.uint64(4) + np.uint64(128 * int(line)) for line in rng.integers(0, 60_000, 3000)]
    rows = [("ld.global", Unit.GLOBAL_LOAD, (0,), (0,), lambda _, __, at=at: at, 4) for at in places]
    done = time_launch(Script(rows).trace(1, 1), gpu)
    listed = np.array([[int(at[0]) + part * 64, 64, 0, 0, 0] for at in places for part in range(2)], np.int64)
    machine_ = Simulation(gpu.memory, WRITE_BACK, held=1)
    cost = machine_.replay("same", listed, np.array([0, len(listed)]))
    misses = done.slices[:, :, 0].sum() - done.slices[:, :, 1].sum()
    assert misses == done.l2[engine.L2_MISSES]
    assert misses == pytest.approx(cost.totals[engine.L2_MISSES], rel=0.01)


def test_occupancy_is_bound_by_what_is_scarce() -> None:
    gpu, trace = machine(), chain(4).trace(1, 8)
    assert occupancy(trace, gpu) == 8
    assert occupancy(replace(trace, registers_per_thread=128), gpu) == 2
    assert occupancy(replace(trace, shared_bytes_per_block=40_000), gpu) == 2
    assert occupancy(replace(trace, threads_per_block=32, registers_per_thread=16), gpu) == 32
    with pytest.raises(ConfigError, match="shared_of_block"):
        occupancy(replace(trace, shared_bytes_per_block=50_000), gpu)
    with pytest.raises(ConfigError, match=r"sm\.registers"):
        occupancy(replace(trace, threads_per_block=1024, registers_per_thread=80), gpu)


def _many(blocks: int) -> tuple[Any, Grid]:
    trace = Script([*stream(4).rows, *chain(100, independent=2).rows]).trace(1, 8)
    places = np.stack([np.arange(blocks), np.zeros(blocks, np.int64), np.zeros(blocks, np.int64)], axis=1)
    shift = np.zeros((len(trace.addresses), 3), np.int64)
    shift[:, 0] = 64 * 4 * 128
    return replace(trace, registers_per_thread=64), Grid(places, shift)


@pytest.mark.parametrize("blocks", [28 * 4 * 5 + 3, 28 * 4 * 12, 28 * 4 * 9 + 60])
def test_sampled_blocks_tell_the_time_of_all(blocks: int) -> None:
    trace, grid = _many(blocks)
    full = time_launch(trace, machine(), grid=grid)
    part = time_launch(trace, machine(), grid=grid, most_blocks=28 * 4 * 3)
    assert part.simulated < 0.75
    assert full.simulated == 1
    assert full.sampling_error == 0
    off = abs(part.seconds / full.seconds - 1)
    assert off < 0.1
    assert off <= part.sampling_error + 0.05


def test_a_grid_that_repeats_a_block_is_the_trace_of_all_blocks() -> None:
    trace, grid = _many(40)
    every = Script([*stream(4).rows, *chain(100, independent=2).rows]).trace(40, 8)
    # the generator places blocks as the shift does
    alone, all_ = (
        time_launch(trace, machine(), grid=grid),
        time_launch(replace(every, registers_per_thread=64), machine()),
    )
    assert alone.cycles == all_.cycles
    assert alone.dram_bytes == all_.dram_bytes
    with pytest.raises(ConfigError, match="32 bytes"):
        time_launch(trace, machine(), grid=replace(grid, shift=grid.shift + 4))


def test_a_sample_shorter_than_two_waves_is_refused() -> None:
    trace = replace(chain(4).trace(10, 8), num_blocks=10_000)
    with pytest.raises(ConfigError, match="two waves"):
        time_launch(trace, machine())


def test_constants_have_sources_and_recollection_is_called_so() -> None:
    for name in names():
        facts = list(sm_array(name).facts_below("system"))
        assert all(source for *_, source in facts)
        recalled = [source for _, _, provenance, source in facts if "recollection" in source]
        assert all(
            provenance in ("memory", "assumed", "derived") for _, _, provenance, source in facts if source in recalled
        )
    with pytest.raises(ConfigError, match="did you mean"):
        sm_array("gtx_1080")
