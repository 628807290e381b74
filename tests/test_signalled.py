"""One GEMM kernel whose tiles wait for shards, and what hosts, barriers and measured libraries add to schedules."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulators.costs.transfer import TransferMode, alone, protocol_seconds
from simulators.hardware.machine import merged
from simulators.hardware.schedule_system import ScheduleSystem
from tests.support import backend, design, results, shipped

H100 = {f"system.{key}": value for key, value in shipped("system")["h100_8"].items() if key not in ("sources", "name")}
H100["system.costs"] = {"gemm": "waves", "collective": "links"}
FREE = {"system.node.link_bytes_per_s": 1e15, "system.gpu.dma.bytes_per_s": 1e15, "system.gpu.dma.setup_s": 0.0}
NARROW = {"system.gpu.dma.setup_s": 0.0, "system.gpu.kernel_launch_s": 0.0}


def makespan(schedule: str, changes: dict[str, Any] | None = None, **workload: Any) -> float:
    """Makespan of a schedule on 8 x H100."""
    point = design(schedule, {**H100, "schedule.comm_engine": "dma", **(changes or {})}, **workload)
    (result,) = results(backend("fluid"), [point])
    assert result.status == "ok", result.reason
    return float(result.metrics["makespan_s"])


SIZES = {"workload.operators.gemm.m": 8192, "workload.operators.gemm.n": 57344, "workload.operators.gemm.k": 8192}
GATHER = {"workload.operators.gather.rows": 8192, "workload.operators.gather.cols": 8192}


@pytest.mark.parametrize("pattern", ["all_gather", "reduce_scatter"])
def test_one_kernel_beats_a_kernel_for_each_shard_and_no_ideal(pattern: str) -> None:
    sizes = {**SIZES, **GATHER}
    if pattern == "reduce_scatter":
        sizes |= {"workload.operators.gemm.n": 8192, "workload.operators.gemm.k": 57344}
    signalled, several, serial = (
        makespan(name, sizes, pattern=pattern) for name in ("signalled", "shard_p2p", "serial")
    )
    assert signalled < several < serial


@pytest.mark.slow
@given(factor=st.floats(0.2, 1.0))
def test_a_slower_kernel_takes_longer_by_no_more_than_its_rate(factor: float) -> None:
    full_rate, slower = (makespan("signalled", {"schedule.kernel_rate": rate}) for rate in (1.0, factor))
    assert full_rate * (1 - 1e-9) <= slower <= full_rate / factor * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["signalled", "shard_p2p"])
@given(rows=st.floats(0, 4096))
def test_lost_rows_cost_what_they_would_take_and_no_more_than_twice_the_time(schedule: str, rows: float) -> None:
    full, lossy = (makespan(schedule, {**SIZES, **GATHER, "schedule.lost_rows": lost}) for lost in (0.0, rows))
    assert full * (1 - 1e-9) <= lossy <= full * min(1 + 8 * rows / 8192, 2) * (1 + 1e-9)


@pytest.mark.slow
@given(signal_s=st.floats(0, 1e-4))
def test_a_signal_after_each_copy_delays_no_more_than_all_of_them(signal_s: float) -> None:
    """Seven copies on one stream, each followed by a signal; a short kernel waits for all, a long one for the first."""
    short = {**SIZES, **GATHER, "workload.operators.gemm.n": 64, "workload.operators.gemm.k": 64}
    for sizes, most in ((short, 7), ({**SIZES, **GATHER}, 7)):
        before, after = (makespan("signalled", {**sizes, "schedule.signal_s": time_s}) for time_s in (0.0, signal_s))
        assert before * (1 - 1e-9) <= after <= before + most * signal_s * (1 + 1e-9) + 1e-12
    before, after = (makespan("signalled", {**short, "schedule.signal_s": time_s}) for time_s in (0.0, signal_s))
    assert after == pytest.approx(before + 7 * signal_s, rel=0.02)


@given(rows=st.integers(1, 128))
def test_tiles_of_a_kernel_are_of_one_shard_each(rows: int) -> None:
    fewer, full = (
        makespan(
            "signalled",
            {**SIZES, **GATHER, **FREE, "schedule.kernel_tile": [128, 256]}
            | {"workload.operators.gemm.m": m, "workload.operators.gather.rows": m},
        )
        for m in (8 * rows, 8 * 128)
    )
    assert fewer == pytest.approx(full, rel=0.01)


@given(sync_s=st.floats(0, 1e-4))
def test_staged_sums_take_two_barriers_and_copies_of_a_shard(sync_s: float) -> None:
    changes = {**SIZES, **GATHER, "schedule.sync_s": sync_s}
    in_place, staged = (
        makespan("signalled", {**changes, "schedule.staged_sums": flag}, pattern="reduce_scatter")
        for flag in (False, True)
    )
    shard_bytes, hbm = 2 * 8192 * 8192 / 8, 3.35e12
    assert staged - in_place >= 2 * sync_s + 4 * shard_bytes / hbm
    assert staged - in_place <= 2 * sync_s + 4 * shard_bytes / (0.6 * hbm) + 1e-5


@pytest.mark.slow
@given(host=st.floats(0, 1e-3))
def test_a_host_bounds_the_makespan_from_below_and_does_nothing_else(host: float) -> None:
    ahead, bound = (makespan("shard_p2p", {"schedule.host_s": seconds}) for seconds in (0.0, host))
    submitted = 8 + 7  # GEMMs and copies
    assert bound == pytest.approx(max(ahead, submitted * host), rel=1e-9)


def test_barriers_come_before_each_transfer_of_a_reduction_and_once_before_a_gather() -> None:
    for pattern, most in (("all_gather", 1), ("reduce_scatter", 7)):
        sync = {"schedule.sync_s": 1e-3}
        late = makespan("shard_p2p", sync, pattern=pattern) - makespan("shard_p2p", pattern=pattern)
        assert 0.5e-3 < late <= most * 1.001e-3


@given(rate=st.floats(1e8, 3e9))
def test_cus_store_tiles_at_their_rate_together(rate: float) -> None:
    small = {"workload.operators.gemm.m": 8192, "workload.operators.gemm.n": 8192, "workload.operators.gemm.k": 64}
    stores: dict[str, Any] = {"schedule.comm_engine": "cu", "schedule.sender": "tiles"}
    stores |= {"system.gpu.cu_copy.store_bytes_per_s_per_cu": rate}
    seconds = makespan("signalled", {**GATHER, **small, **NARROW, **stores}, pattern="reduce_scatter")
    sent = 2 * 8192 * 8192 * 7 / 8
    assert seconds >= sent / min(132 * rate, 7 * 64.3e9)
    assert seconds <= 1e-4 + sent / min(132 * rate, 0.86 * 7 * 64.3e9)


@given(mib=st.floats(0.1, 512))
def test_a_serial_collective_takes_what_its_library_was_measured_to_take(mib: float) -> None:
    system = ScheduleSystem.of(merged(shipped("system")["h100_8"], {"costs": {"collective": "library"}}))
    by, payload = TransferMode("cu", 24, "all_gather"), mib * 2**20
    assert system.node.library is not None
    constants = (system.node.library.protocols or {})["all_gather"]
    expected = float(protocol_seconds(constants, "all_gather", 8, payload))
    assert float(alone(system, payload, by=by)) == pytest.approx(expected, rel=1e-9)
