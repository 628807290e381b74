"""What operators lose beside one another: losses, the laws and their coefficients, measured overlaps, reductions."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dse.backend import Batch
from dse.cli import main
from dse.config.compose import request
from dse.values import put
from dse_calibration.contention import (
    TIMES,
    Overlaps,
    fit_contention,
    predict_overlaps,
    put_all,
    together,
    without_one,
)
from simulators.costs.gemm import GemmCost, GemmShape, WaveGemms, gemm_cost
from simulators.costs.gemm.waves import fewest_free_cus
from simulators.costs.sharing import HeldCus, Sharing
from simulators.costs.transfer import fork_s, late_start_s, launched_first
from simulators.hardware.machine import Gpu
from simulators.hardware.parts import Contention, ShaderEngines
from simulators.overlap.backend import OverlapBackend
from simulators.taskgraph.graph import TaskGraph
from simulators.taskgraph.timeline import LOSSES
from studies.conccl.runtime import SlowdownTables
from tests.support import (
    CONF,
    ENGINES,
    FAMILIES,
    FREE,
    QUIET,
    SCHEDULES,
    backend,
    design,
    drawn,
    lower,
    results,
    shipped,
)
from tests.test_conformance import DISTINCT, magnitudes, points, run

BESIDE = [name for name, tree in shipped("schedule").items() if FAMILIES[tree["family"]].orders == ("beside",)]
REDUCING = [name for name in DISTINCT if name not in BESIDE]
AT_ONCE = {"system.gpu.kernel_launch_s": 0.0, "system.gpu.cu_copy.setup_s": 0.0, "system.gpu.hbm_bytes_per_s": 1e16}


# Losses


def reducing(point: dict[str, Any], schedule: str, reduces: bool) -> dict[str, Any]:
    """The same, but for the collective of schedules that may run one after the GEMM."""
    return {**point, "pattern": "reduce_scatter"} if reduces and schedule in REDUCING else point


@pytest.mark.slow
@drawn(100)
@given(schedule=st.sampled_from(DISTINCT), data=st.data(), reduces=st.booleans())
def test_losses_add_up_to_the_makespan_less_the_ideal(schedule: str, data: st.DataObject, reduces: bool) -> None:
    """And neither other operators nor launches make anything faster."""
    point = design(schedule, **reducing(data.draw(points(schedule)), schedule, reduces))
    assume(not backend("fluid").problems(point))
    metrics = results(backend("fluid"), [point])[0].metrics
    lost = {name: metrics[name] for name in LOSSES}
    assert metrics["ideal_s"] + sum(lost.values()) == pytest.approx(metrics["makespan_s"], rel=1e-9)
    assert all(loss == 0 or abs(loss) > 1e-12 * metrics["makespan_s"] for loss in lost.values())  # no rounding errors
    least = -1e-9 * metrics["makespan_s"]
    assert lost["contention_s"] >= least
    assert lost["launch_s"] >= least


@pytest.mark.slow
@drawn(100)
@given(schedule=st.sampled_from(DISTINCT), data=st.data(), reduces=st.booleans())
def test_an_even_collective_is_never_faster_on_some_of_its_links(
    schedule: str, data: st.DataObject, reduces: bool
) -> None:
    """Where each peer's part is the same, and so each transfer takes its share of the collective's time or longer.

    Around an even ring half of what is for the farthest peer goes either way: transfers are of two sizes there, and
    engines that are too few for all of them serve these unevenly.
    """
    point = {**reducing(data.draw(points(schedule)), schedule, reduces), "shape": (4096, 4096, 4096)}
    point["overrides"] |= {"schedule.num_chunks": 4} if "num_chunks" in shipped("schedule")[schedule] else {}
    even = design(schedule, **point)
    assume(not backend("fluid").problems(even))
    assume(even.system.node.topology != "ring" or even.system.node.num_gpus % 2)
    metrics = results(backend("fluid"), [even])[0].metrics
    assert metrics["starvation_s"] >= -1e-9 * metrics["makespan_s"]


@pytest.mark.slow
@drawn(60)
@given(schedule=st.sampled_from(DISTINCT), data=st.data(), reduces=st.booleans())
def test_nothing_is_lost_to_others_where_dma_engines_move_beside_plenty_of_memory(
    schedule: str, data: st.DataObject, reduces: bool
) -> None:
    """With all coefficients 1, on every topology: no copy begins on a link that another one still uses.

    But around an even ring, where the farthest peer's part goes both ways beside those of others. To 1e-4, as 1e16
    bytes/s, the most that a system may have, are not infinitely many.
    """
    fixed = {**FREE, "system.gpu.hbm_bytes_per_s": 1e16, "schedule.comm_engine": "dma"}
    fixed |= {"schedule.withheld_cus": 0} if schedule in BESIDE else {}
    point = design(schedule, **reducing(data.draw(points(schedule, **fixed)), schedule, reduces))
    assume(not backend("fluid").problems(point))
    assume(point.system.node.topology != "ring" or point.system.node.num_gpus % 2)
    metrics = results(backend("fluid"), [point])[0].metrics
    assert metrics["contention_s"] == pytest.approx(0.0, abs=1e-4 * metrics["makespan_s"])


# The coefficients

CONCURRENT = {"late_start_first", "fork_s", "wave_slack"}
"""Of one collective that is launched before the GEMM."""


@pytest.mark.parametrize("name", sorted(Contention.model_fields.keys() - CONCURRENT))
def test_each_coefficient_of_contention_changes_some_makespan(name: str) -> None:
    def makespans(overrides: dict[str, Any]) -> list[float]:
        movers = [{"schedule.comm_engine": mover, **overrides} for mover in ("cu", "dma")]
        assigned = [{**mover, "system.gpu.gemm.assignment": way} for mover in movers for way in ("static", "dynamic")]
        return [float(run("fluid", design("hetero_fused_1d", settings)).makespan[0]) for settings in assigned]

    assert makespans({f"system.gpu.contention.{name}": 4.0}) != makespans({})


@pytest.mark.parametrize(("schedule", "matters"), [("c3_sp", True), ("c3_base", False)])
def test_a_collective_that_is_launched_first_starts_late_by_a_coefficient_of_its_own(
    schedule: str, matters: bool
) -> None:
    overlap = OverlapBackend("fluid")
    tree = request(["study=conccl", "system=h100_8", f"schedule={schedule}"]).tree
    point = overlap.design(next(iter(overlap.scenarios(tree).values())))
    points = [put(point, "system.gpu.contention.late_start_first", late) for late in (0.0, 0.5)]
    first, later = (
        result[0].metrics["makespan_s"] for result in overlap.evaluate([Batch(design) for design in points])
    )
    assert (first < later) == matters


WORKGROUPS = st.integers(1, 5000)


@drawn(300)
@given(workgroups=WORKGROUPS, taken=st.integers(1, 107), until=st.floats(0, 60), slack=st.floats(0, 0.1))
def test_whole_waves_end_at_the_first_time_at_which_all_are_done(
    workgroups: int, taken: int, until: float, slack: float
) -> None:
    """By trying every time at which some wave ends, of 108 CUs of which some are freed."""
    cus, alone = 108, -(-workgroups // 108)
    work = max(min(workgroups * (1 + slack), alone * cus), workgroups)
    tried = [float(wave) for wave in range(alone, workgroups + 2)]
    tried += [until + wave for wave in range(workgroups + 2)]
    done = [
        time for time in sorted(tried) if _workgroups(time, cus - taken, 0.0) + _workgroups(time, taken, until) >= work
    ]
    seconds = float(HeldCus(workgroups, cus, taken, until).waves(alone, slack))
    assert seconds == pytest.approx(min(done), rel=1e-9)
    longer = float(HeldCus(workgroups, cus, taken, until + 0.5).waves(alone, slack))
    assert longer >= seconds * (1 - 1e-12)


def _workgroups(time: float, cus: int, begin: float) -> int:
    """Workgroups of one unit of time that CUs end until a time, if they begin at another one."""
    return cus * max(math.floor(time - begin + 1e-9), 0)


def test_streams_that_part_late_delay_the_collective_and_the_gemm_after_it() -> None:
    point = put(design("c3_sp"), "system.gpu.contention.fork_s", 1e-3)
    graph = lower(point)
    timeline = ENGINES["event"].run(graph)
    assert timeline.issued[0, graph.of_kind("transfer")].min() >= 1e-3
    assert graph["delay"][0, graph.of_kind("gemm")] == pytest.approx([2e-3 + point.system.gpu.kernel_launch_s])


@pytest.mark.parametrize("topology", ["switch", "ring"])
@pytest.mark.parametrize("rows", [8192, 32768, 131072])
def test_a_schedule_on_a100_ends_when_the_formula_says(topology: str, rows: int) -> None:
    """With streams that part late, and waves that end whole: shares, h and T of the schedule and of the formula."""
    words = ["study=conccl", "system=a100_8", "schedule=c3_sp", f"system.node.topology={topology}"]
    words += ["system.gpu.kernel_launch_s=0", "system.gpu.cu_copy.setup_s=0", "system.gpu.hbm_bytes_per_s=1e16"]
    words += ["system.costs.collective=links", "schedule.comm_cus=8"]
    overlap = OverlapBackend("event")
    base = overlap.design(next(iter(overlap.scenarios(request(words).tree).values())))
    (name,) = (name for name, op in base.workload.operators.items() if not hasattr(op, "m"))
    point = put(base, f"workload.operators.{name}.rows", rows)
    gpu, op = launched_first(point.system).gpu, point.workload.overlap().gemm
    graph = lower(point)
    timeline, moved = ENGINES["event"].run(graph), graph.of_kind("transfer")
    times = graph["work"][0] / graph["cap"][0]
    comm_s = times[moved].max()
    if topology == "ring":  # steps of two transfers, and the last one of the farthest peer
        comm_s = sum(sorted(times[moved])[::2])
    (gemm,) = graph.of_kind("gemm")
    full, granted = (cost_beside(gpu, (op.m, op.local_n, op.local_k), cus) for cus in (0, 8))
    # the schedule's GEMM has the waves of this one, and constants of its own
    alone_s, left_s = times[gemm], times[gemm] * granted.seconds / full.seconds
    beside = HeldCus(full.kernel.workgroups, gpu.num_cus, 8, 0.0)
    ends = together(
        (alone_s, np.asarray(comm_s)),
        np.asarray(factors(graph)["communication"]),
        late_s=late_start_s(gpu, alone_s, by="cu"),
        parted_s=fork_s(gpu),
        gemm_beside=lambda held_s: Sharing.of(gpu).gemm_until(left_s, alone_s, replace(beside, seconds=held_s)),
    )
    ends_found = timeline.finished[0, gemm], timeline.finished[0, moved].max()
    assert ends_found == pytest.approx(tuple(float(end + fork_s(gpu)) for end in ends), rel=5e-3)


def test_slack_of_waves_counts_where_a_collective_ends_before_the_gemm() -> None:
    """512 workgroups on 108 CUs: with 4 of these taken for a while, 5 waves have room for 520, and not for 525."""
    beside = HeldCus(512, 108, 4, 4.5)
    few, more = (Sharing(1.0, True, slack).gemm_until(5.0, 5.0, beside) for slack in (0.0, 0.024))
    assert (float(few), float(more)) == (5.0, 6.0)


# Waves beside other kernels

EIGHT_DIES = ShaderEngines(num_dies=8, engines_per_die=4)


@pytest.mark.parametrize(
    ("channels", "free"), [(0, 9), (2, 9), (8, 9), (16, 8), (32, 8), (40, 8), (48, 7), (56, 7), (64, 7), (280, 0)]
)
def test_the_engine_with_the_fewest_free_cus_by_hand(channels: int, free: int) -> None:
    """Engines of a die have 10, 9, 10 and 9 CUs; 16 channels are the first to take one of an engine of 9."""
    assert fewest_free_cus(EIGHT_DIES, 304, channels) == free


@pytest.mark.parametrize(
    ("size", "tile", "channels", "waves", "beside"),
    [
        (8192, (256, 224), 56, 4, 6),
        (8192, (256, 224), 32, 4, 5),
        (8192, (256, 224), 2, 4, 5),
        (12288, (512, 128), 56, 8, 11),
        (12288, (512, 128), 32, 8, 9),
        (16384, (512, 160), 56, 11, 15),
        (4096, (256, 224), 56, 1, 2),
    ],
)
def test_waves_of_each_engine_by_hand(size: int, tile: tuple[int, int], channels: int, waves: int, beside: int) -> None:
    """8192: 37 tiles an engine, on 8 free CUs 5 waves, on 7 free CUs 6; alone ceil(1184 / 304) = 4."""
    gpu, shape = library_of(*tile), (size, size, size)
    assert cost_beside(gpu, shape, 0).kernel.waves == waves
    assert cost_beside(gpu, shape, channels).kernel.waves == beside


def cost_beside(gpu: Gpu, shape: tuple[float, float, float], taken: int) -> GemmCost:
    """Cost of a GEMM by waves while other kernels hold CUs."""
    return gemm_cost(WaveGemms.of(gpu, "bf16"), GemmShape(*shape), taken=taken)


def library_of(rows: int, cols: int) -> Gpu:
    """MI300X with a library of one macro-tile."""
    tiles = [{"rows": rows, "cols": cols, "efficiency": 1.0}]
    return design("serial", {"system.gpu.gemm.tiles": tiles}).system.gpu


EXTENT, TAKEN = st.integers(1, 20000), st.integers(0, 302)


@given(shape=st.tuples(EXTENT, EXTENT, EXTENT), taken=TAKEN, more=st.integers(0, 302))
def test_a_static_gemm_is_never_faster_beside_more_cus_of_others(
    shape: tuple[int, int, int], taken: int, more: int
) -> None:
    gpu = design("serial").system.gpu
    few, beside_more = (cost_beside(gpu, shape, cus) for cus in (taken, min(taken + more, gpu.num_cus - 1)))
    assert beside_more.seconds >= few.seconds * (1 - 1e-12)
    assert (beside_more.kernel.rows, beside_more.kernel.cols) == (few.kernel.rows, few.kernel.cols)


@pytest.mark.parametrize("channels", [2, 8, 32, 56])
def test_a_dynamic_gemm_loses_what_it_lacks_and_the_same_interference(channels: int) -> None:
    system = design("serial", {"system.gpu.gemm.assignment": "dynamic"}).system
    full, granted = (cost_beside(system.gpu, (8192, 8192, 8192), taken).seconds for taken in (0, channels))
    slower = Sharing.of(system.gpu).gemm(granted, full) / full
    assert slower == pytest.approx(system.gpu.contention.gemm_beside_cus * 304 / (304 - channels), rel=0.01)


# GEMM and collective at once


SECONDS, SHARES = magnitudes(1e-5, 1e-1), st.floats(0.05, 1)


def at_share(gemm_s: float, share: float) -> Callable[[Any], Any]:
    """T(h) of a GEMM that has a share of its rate alone for h seconds."""
    return lambda held_s: np.where(share * held_s < gemm_s, held_s + gemm_s - share * held_s, gemm_s / share)


@given(gemm_s=SECONDS, comm_s=SECONDS, gemm=SHARES, comm=SHARES)
def test_two_operators_at_once_take_the_longer_ones_time_at_least_and_both_ones_at_most(
    gemm_s: float, comm_s: float, gemm: float, comm: float
) -> None:
    """At most where their shares add up to 1: otherwise one after the other would be faster."""
    alone, starts = (np.asarray(gemm_s), np.asarray(comm_s)), dict.fromkeys(("late_s", "parted_s"), np.zeros(()))
    wall = max(map(float, together(alone, np.asarray(comm), **starts, gemm_beside=at_share(gemm_s, gemm))))
    assert wall >= max(gemm_s, comm_s) * (1 - 1e-12)
    if gemm + comm >= 1:
        assert wall <= (gemm_s + comm_s) * (1 + 1e-12)
    if gemm + comm <= 1:
        assert wall >= (gemm_s + comm_s) * (1 - 1e-12)


@given(gemm_s=SECONDS, gemm=SHARES, comm_s=SECONDS, more=magnitudes(1, 100), share=st.floats(0, 2))
def test_a_late_start_does_not_depend_on_the_payload_and_ends_with_the_gemm(
    gemm_s: float, gemm: float, comm_s: float, more: float, share: float
) -> None:
    """Beside a GEMM that does not slow what moves, a collective ends as much later whatever it moves."""
    starts, beside = {"late_s": np.asarray(share * gemm_s), "parted_s": np.zeros(())}, at_share(gemm_s, gemm)
    later = [
        float(together((np.asarray(gemm_s), np.asarray(moved_s)), np.ones(()), **starts, gemm_beside=beside)[1])
        - moved_s
        for moved_s in (comm_s, comm_s * more)
    ]
    assert later == pytest.approx([min(share * gemm_s, gemm_s / gemm)] * 2, rel=1e-6, abs=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["event", "fluid"])
@pytest.mark.parametrize("assignment", ["static", "dynamic"])
@drawn(25)
@given(size=st.sampled_from([2048, 4096, 8192]), mib=st.integers(1, 1024), channels=st.integers(1, 56))
def test_a_schedule_overlaps_as_the_formula_that_was_held_against_measurements(
    engine: str, assignment: str, size: int, mib: int, channels: int
) -> None:
    """The shares are those of the graph's laws; that they are those of the fit is the next test's.

    Equal where the CUs suffice for both at these shares, else slower: a GEMM of less than a wave counts all CUs.
    """
    knobs = {**AT_ONCE, "schedule.comm_cus": channels, "system.gpu.gemm.assignment": assignment}
    knobs |= {"system.costs.collective": "links"}  # which that formula is of
    knobs |= {"workload.operators.gather.rows": 1024 * mib, "workload.operators.gemm.shards": 1}
    point = design("c3_sp", knobs, shape=(size, size, size), pattern="all_reduce")
    graph = lower(point)
    timeline = ENGINES[engine].run(graph)
    (gemm,), moved = graph.of_kind("gemm"), graph.of_kind("transfer")
    factor = factors(graph)
    times = graph["work"][0] / graph["cap"][0]
    alone, late_s = (times[gemm], times[moved].max()), late_start_s(point.system.gpu, times[gemm], by="cu")
    beside = at_share(float(times[gemm]), factor["gemm"])
    ends = together(alone, np.asarray(factor["communication"]), late_s=late_s, parted_s=0.0, gemm_beside=beside)
    ends_found = timeline.finished[0, gemm], timeline.finished[0, moved].max()
    if factor["gemm"] * 304 + factor["communication"] * channels <= 304:
        assert ends_found == pytest.approx(tuple(map(float, ends)), rel=1e-6)
    else:
        assert max(ends_found) >= float(max(ends)) * (1 - 1e-9)


def factors(graph: TaskGraph) -> dict[str, float]:
    """Factors of the laws of a graph, by the first word of the group that is slowed; 1 without a law."""
    laws = zip(graph.slowed[:, 0], graph["factor"][0], strict=True)
    return {"gemm": 1.0, "communication": 1.0} | {graph.groups[group].split()[0]: value for group, value in laws}


def row(size: int, channels: int, assignment: str) -> Overlaps:
    """An overlap with an all-reduce whose times are not known."""
    s = np.array([1.0])
    sizes = np.full((1, 3), size), np.array([channels])
    return Overlaps(*sizes, s, (assignment,), ("all_reduce",), s, s, s, s, s, np.array([True]))


@drawn(25)
@given(data=st.data(), assignment=st.sampled_from(["static", "dynamic"]))
def test_a_gemm_that_is_not_masked_is_no_faster_than_on_the_cus_that_are_left(
    data: st.DataObject, assignment: str
) -> None:
    fixed = {"schedule.comm_engine": "cu", "system.gpu.gemm.assignment": assignment}
    point = design("c3_sp", **data.draw(points("c3_sp", **fixed)))
    graph, (gpu, op) = lower(point), (point.system.gpu, point.workload.overlap().gemm)
    turns = point.system.node.num_gpus // 2 if point.system.node.topology == "ring" else 1
    cus = float(graph["cus"][0, graph.of_kind("transfer")].sum()) / turns
    shape = op.m, op.local_n, op.local_k
    left = cost_beside(gpu, shape, round(cus))
    (gemm,) = graph.of_kind("gemm")
    moving = {graph.group[transfer] for transfer in graph.of_kind("transfer")}
    laws = zip(graph.slowed, graph["factor"][0], strict=True)
    factor = math.prod(value for (group, by), value in laws if group == graph.group[gemm] and by in moving)
    assert graph["cap"][0, gemm] * factor <= 1 / float(left.seconds) * (1 + 1e-9)


@pytest.mark.parametrize("shape", [(8192, 8192, 8192), (4096, 28672, 4096)])
def test_a_collective_launched_second_waits_until_workgroups_are_dealt_out(shape: tuple[int, int, int]) -> None:
    point = design("c3_base", {"workload.operators.gemm.shards": 1}, shape=shape)
    graph, op, gpu = lower(point), point.workload.overlap().gemm, point.system.gpu
    timeline = ENGINES["event"].run(graph)
    alone = cost_beside(gpu, (op.m, op.local_n, op.local_k), 0)
    dealt = float(alone.kernel.workgroups / gpu.num_cus)
    assert dealt > 1
    retired = gpu.kernel_launch_s + float(alone.seconds * (1 - 1 / dealt))
    assert timeline.issued[0, graph.of_kind("launch")[:1]] == pytest.approx([retired], rel=1e-9)
    late = gpu.kernel_launch_s + float(late_start_s(gpu, alone.seconds, by="cu"))
    (waited,) = timeline.finished[0, graph.of_kind("launch")[1:]]
    setup_s = gpu.cu_copy.setup_s / 2
    assert max(late, retired) <= waited <= max(late, retired) + setup_s * (1 + 1e-6)


FIRST, RESERVED, BY_DMA = (
    "launch the smaller grid first",
    "reserve CUs by a table of class and collective",
    "DMA engines for all",
)


# Measured overlaps


@pytest.fixture(scope="module")
def measured() -> Overlaps:
    rows = Overlaps.read()
    return rows.where(rows.fitted)


def test_the_shipped_coefficients_are_those_that_the_fit_finds(measured: Overlaps) -> None:
    system = design("serial").system
    for name, value in fit_contention(system, measured).items():
        assert getattr(system.gpu.contention, name) == pytest.approx(value, abs=2e-3)


def test_the_fit_recovers_the_coefficients_of_synthetic_rows() -> None:
    system, rows = design("serial").system, Overlaps.read()
    truth = {"gemm_beside_cus": 1.06, "late_start": 0.3, "cu_copy_beside_gemm": 1.8}
    times = predict_overlaps(put_all(system, truth), rows)
    synthetic = replace(rows, gemm=times["gemm"], comm=times["comm"])
    assert fit_contention(system, synthetic.where(rows.fitted)) == pytest.approx(truth, abs=2e-3)


@pytest.mark.slow
def test_no_channel_count_is_off_by_more_than_a_tenth_when_it_is_left_out(measured: Overlaps) -> None:
    """Over the sweep of channels. Without the rows of 56 channels late start and rate cannot be told apart."""
    left_out = without_one(design("serial").system, measured)
    assert all(np.abs(left_out[name][measured.size == 8192]).max() <= 0.1 for name in TIMES)


def test_the_rows_of_the_sweep_are_the_published_ones(shared: Callable[[str], Path]) -> None:
    def table(path: Path) -> list[dict[str, str]]:
        return list(csv.DictReader(line for line in path.read_text("utf-8").splitlines() if line[0] != "#"))

    published = table(shared("data/mi300x_gemm_allreduce_overlap.csv"))
    kinds = {"static": "torch", "dynamic": "ws"}
    expected = [
        (
            *(float(row[name]) for name in ("size", "channels", "comm_alone_ms")),
            *(float(row[f"{kind}_{name}_ms"]) for name in ("alone", "gemm_overlap", "comm_overlap", "wall")),
            assignment,
        )
        for row in published
        for assignment, kind in kinds.items()
    ]
    most = max(int(row["channels"]) for row in published)
    shipped_rows = table(CONF / "data/overlap/mi300x_gemm_allreduce.csv")
    swept = [row for row in shipped_rows if (row["size"], row["payload_mib"]) == ("8192", "512")]
    rows = [row for row in swept if int(row["channels"]) <= most]
    columns = ("size", "channels", "comm_alone_ms", "gemm_alone_ms", "gemm_ms", "comm_ms", "wall_ms")
    rows_read = [(*(float(row[name]) for name in columns), row["assignment"]) for row in rows]
    assert len(rows_read) == 2 * len(published) > 0
    assert sorted(rows_read) == sorted(expected)


# Reductions


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("mover", ["dma", "cu"])
@pytest.mark.parametrize("schedule", [name for name in REDUCING if name in SCHEDULES])
def test_what_dma_engines_bring_is_added_by_a_kernel_and_what_kernels_bring_is_not(schedule: str, mover: str) -> None:
    graph = lower(design(schedule, {"schedule.comm_engine": mover}, pattern="reduce_scatter"))
    assert bool(len(graph.of_kind("reduce"))) == (mover == "dma")


@pytest.mark.parametrize("mover", ["dma", "cu"])
@pytest.mark.parametrize("local_shard_first", [False, True])
@pytest.mark.parametrize("compute", ["fused", "unfused"])
@pytest.mark.parametrize("chunk_dim", ["m", "k"])
def test_every_way_to_reduce_moves_and_computes_the_same(
    chunk_dim: str, compute: str, local_shard_first: bool, mover: str
) -> None:
    (m, n, k), pieces = (4099, 1003, 2048), 3
    order = {"local_shard_first": local_shard_first, "compute": compute}
    chosen = {"chunk_dim": chunk_dim, **order, "comm_engine": mover, "num_chunks": pieces}
    knobs = {f"schedule.{name}": value for name, value in chosen.items()}
    point = design("chunked", knobs, shape=(m, n, k), pattern="reduce_scatter")
    event, fluid = (results(backend(engine), [point])[0] for engine in ("event", "fluid"))
    assert event.metrics["moved_bytes"] == 2 * n * (m - math.ceil(m / 8))
    assert event.metrics["flop"] == 2 * m * n * k / 8
    assert event.metrics == pytest.approx(fluid.metrics, rel=1e-9, abs=1e-15)


@pytest.mark.more
@pytest.mark.one_in(2)
@pytest.mark.parametrize("mover", ["dma", "cu"])
def test_the_whole_space_of_ficco_is_told_with_one_mover(
    mover: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fixed = ["study=ficco", "workload.only=[g1]", "tracking=none", "store=none", "fidelity=none", "timeline=false"]
    narrowed = ["space.schedule.num_chunks=choice(2,4)", "space.schedule.comm_cus=choice(16,32)"]
    assert main([*fixed, *narrowed, f"schedule.comm_engine={mover}"]) == 0
    (folder,) = Path("outputs/ficco").glob("2*")
    drawn = {path.stem for path in (folder / "figures").glob("*.png")}
    assert drawn == {"pareto", "speedup", "cil"} | ({"dil", "signatures"} if mover == "dma" else {"cu_sweep"})


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("words", "untested"),
    [
        ("schedule.name=chunked", {"ficco.switch_removes_link_starvation", "ficco.heuristic_accuracy"}),
        ("schedule.chunk_dim=k", {"ficco.dil_axis", "ficco.heuristic_accuracy"}),
    ],
)
def test_claims_that_compare_kinds_of_schedules_need_all_of_them(
    words: str, untested: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fixed = ["study=ficco", "workload.only=[g1]", "store=none", *QUIET]
    narrowed = ["space.schedule.num_chunks=choice(2,4)", "space.schedule.comm_cus=choice(16)"]
    assert main([*fixed, *narrowed, words]) == 0
    (folder,) = Path("outputs/ficco").glob("2*")
    claims = {row["id"]: row["within"] for row in json.loads((folder / "claims.json").read_text("utf-8"))}
    assert {claims[name] for name in untested} == {None}


# A runtime's choice


@given(rate=st.floats(0.1, 10), slow=st.lists(st.floats(1, 4), min_size=3, max_size=3), late=st.integers(0, 1))
def test_a_runtime_takes_the_cus_that_its_tables_price_least_and_launches_the_smaller_grid_first(
    rate: float, slow: list[float], late: int
) -> None:
    kinds = {"bound": "bound by arithmetic", "pattern": "all_gather"}
    pair = {**kinds, "amount": 6.0, "payload": 8.0 * rate, "gemm_s": 2.0, "comm_s": 8.0, "grid_gemm": 40}
    pairs = pd.DataFrame([{**pair, "grid_collective": 80 * late}], index=["x"])
    moves = [1.0, 5.0, 2.0]
    slowed = pd.DataFrame({"scenario": "x", "cus": [0, 8, 64], "gemm": slow, "collective": moves})
    profile = SlowdownTables.of(pairs, slowed, {"all_gather": 100.0})
    (row,) = pairs.to_dict("records")
    totals = [8 * move + max(0, 1 - 8 * move / (2 * by)) * 2 for by, move in zip(slow, moves, strict=True)]
    strategy, cus = profile.choice(row, engines=False)
    assert totals[[0, 8, 64].index(cus)] == pytest.approx(min(totals))
    assert strategy == ("base" if late else "schedule priority")
    assert profile.choice({**row, "payload": 100.0}, engines=True)[0] == "DMA"
    assert not profile.knows({**row, "pattern": "all_to_all"})
