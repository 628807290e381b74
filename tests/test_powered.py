"""Schedules under a limit of power: the clock that it allows, joules, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dse
from dse.backend import Batch
from dse.cli import main
from dse.config.compose import request
from dse.errors import ConfigError
from dse.space import Space
from dse.study.plan import plan
from dse.values import put
from simulators.costs.governor import governed
from simulators.costs.power import Activity, PowerInterval, board_w, seen_w, voltage
from simulators.hardware.machine import tree_of
from simulators.hardware.parts import Power
from simulators.hardware.schedule_system import ScheduleSystem
from simulators.overlap.backend import OverlapBackend
from simulators.overlap.powered import PoweredBackend, draw_of
from simulators.steps.backend import StepBackend
from simulators.steps.powered import PoweredStepBackend
from tests import iterations
from tests.support import shipped

SYSTEMS = ("a100_8", "h100_8", "h200_8")
POWERED = sorted(name for name, tree in shipped("system").items() if tree["gpu"].get("power"))


def power_of(system: str) -> Power:
    return Power.model_validate(tree_of(system)["gpu"]["power"])


def design_of(*words: str) -> Any:
    """A design of `study=power`."""
    planned = plan(request(["study=power", "tracking=none", "store=none", *words], None))
    space: Space = next(iter(planned.spaces.values()))
    return planned.backend.design(space.base)


@pytest.mark.parametrize("system", POWERED)
def test_power_is_the_sum_of_its_parts_and_rises_with_each_and_with_the_clock(system: str) -> None:
    power = power_of(system)
    idle = Activity(0.0, 0.0, 0.0, 0.0)
    parts = [Activity(1e14, 0.0, 0.0, 0.0), Activity(0.0, 1e12, 0.0, 0.0), Activity(0.0, 0.0, 1e11, 0.0)]
    every = Activity(1e14, 1e12, 1e11, 0.0)
    for clock in (0.3, 0.8, 1.0):
        still = board_w(power, clock, idle, "bf16")
        added = sum(board_w(power, clock, part, "bf16") - still for part in parts)
        assert board_w(power, clock, every, "bf16") == pytest.approx(still + added)
        assert min(board_w(power, clock, part, "bf16") - still for part in parts) > 0
    clocks = np.linspace(0.2, 1.0, 50)
    assert (np.diff(board_w(power, clocks, every, "bf16")) >= 0).all()
    assert (voltage(power, clocks[clocks <= power.knee]) == 1).all()
    assert voltage(power, 1.0) == pytest.approx(power.voltage if power.knee < 1 else 1.0)


@pytest.mark.parametrize("system", SYSTEMS)
@given(st.floats(0.4, 1.0), st.floats(0.4, 1.0), st.sampled_from(["serial", "c3_base", "c3_sp", "conccl"]))
def test_a_lower_limit_is_never_faster_and_none_is_exceeded(system: str, low: float, high: float, name: str) -> None:
    low, high = sorted((low, high))
    design, board = design_of(f"system={system}", f"schedule={name}", "~space.schedule.name"), power_of(system).board_w
    limits = np.array([low * board, high * board])
    backend = PoweredBackend("fluid")
    (results,) = backend.evaluate([Batch(design, {"system.gpu.power.cap_w": limits})])
    seconds, watts = results.column("makespan_s"), results.column("mean_w")
    assert results.ok.all(), results.texts
    assert seconds[0] >= seconds[1] * (1 - 1e-12)
    assert (watts <= limits * (1 + 1e-9)).all()
    assert results.column("energy_j") == pytest.approx(watts * seconds)


def test_a_limit_that_does_not_bind_leaves_all_metrics_as_they_are() -> None:
    design = put(design_of("system=a100_8"), "system.gpu.clock", 0.5)
    (plain,), (limited,) = (
        backend.evaluate([Batch(design)]) for backend in (OverlapBackend("fluid"), PoweredBackend("fluid"))
    )
    assert {name: limited.column(name).tolist() for name in plain.metrics} == {
        name: column.tolist() for name, column in plain.metrics.items()
    }
    assert limited.column("held_clock")[0] == 0.5


def test_where_the_limit_binds_it_is_drawn_in_the_mean_of_a_long_window_and_a_lower_clock_was_held() -> None:
    design = design_of("system.gpu.power.cap_w=250 W")
    long_window = put(design, "system.gpu.power.window_s", None)
    short, long = (PoweredBackend("fluid").evaluate([Batch(point)])[0] for point in (design, long_window))
    assert long.column("mean_w")[0] == pytest.approx(250)
    assert short.column("mean_w")[0] < 250
    assert 0.3 < short.column("held_clock")[0] < long.column("held_clock")[0] < 0.9
    for results in (short, long):
        assert results.column("lowest_clock")[0] == pytest.approx(
            results.column("held_clock")[0] * (1 - 0.0456), rel=1e-3
        )


@given(st.floats(0.01, 1), st.floats(0.1, 10), st.floats(0, 200), st.floats(0, 300))
def test_what_a_governor_sees_is_the_highest_output_of_its_filter(
    busy: float, window: float, rest_w: float, more_w: float
) -> None:
    """By going through the phases of many periods of 1 s, one after the other."""
    seen, mean, highest = 0.0, rest_w + more_w * busy, 0.0
    for period in range(400):
        for seconds, watts in ((busy, rest_w + more_w), (1 - busy, rest_w)):
            seen = watts + (seen - watts) * np.exp(-seconds / window)
            highest = max(highest, seen) if period > 350 else 0.0
    power = power_of("a100_8").model_copy(update={"window_s": window})
    assert float(seen_w(power, mean, rest_w, busy_s=busy, period_s=1.0)) == pytest.approx(highest, rel=1e-6, abs=1e-6)
    endless = power.model_copy(update={"window_s": None})
    assert float(seen_w(endless, mean, rest_w, busy_s=busy, period_s=1.0)) == mean


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (["system.gpu.power.cap_w=60 W"], "W that the board draws when nothing runs"),
        (["system.gpu.power.cap_w=80 W"], "is below what the board draws at 0.2 of the clock"),
        (["system.gpu.power.cap_w=500 W"], "is above the board's own limit of 400 W"),
        (["system=mi308x_8"], "is needed to tell power, and is not known of this GPU"),
        (["workload.precision=fp32"], "has no energy of an operation at fp32"),
    ],
)
def test_a_limit_or_a_gpu_without_a_clock_that_keeps_it_is_refused_in_a_sentence(words: list[str], rule: str) -> None:
    try:
        design = design_of(*words, "~space.system.gpu.power.cap_w")
    except ConfigError as error:
        assert rule in str(error)
        return
    backend = PoweredBackend("fluid")
    (results,) = backend.evaluate([Batch(design)])
    assert not results.ok.any()
    assert rule in "; ".join([*results.texts, *map(str, backend.problems(design))])


def test_rules_of_schedules_hold_under_a_limit_as_well() -> None:
    design = put(design_of("schedule=c3_sp"), "schedule.comm_cus", 4096)
    (plain,), (limited,) = (
        backend.evaluate([Batch(design)]) for backend in (OverlapBackend("fluid"), PoweredBackend("fluid"))
    )
    assert not plain.ok.any()
    assert (limited[0].status, limited[0].reason) == (plain[0].status, plain[0].reason)


def test_a_gemm_alone_holds_about_the_rate_that_was_recorded_under_the_limit_of_h100() -> None:
    words = ["system=h100_8", "schedule=serial", "workload.only=[70b_qkv-glong-ag]", "~space.schedule.name"]
    (results,) = PoweredBackend("fluid").evaluate([Batch(design_of(*words))])
    rate = results.column("flop")[0] / results.column("gemm_s")[0]
    assert rate == pytest.approx(696e12, rel=0.1)  # clocks.csv of conf/data/measured/h100_2026-11-26


def test_a_collectives_precision_is_not_that_of_the_operations() -> None:
    design = design_of("system=h100_8")
    (name,) = [name for name, op in design.workload.operators.items() if not hasattr(op, "m")]
    design = put(design, "system.gpu.power.window_s", None)  # which sees a shorter collective as another power
    designs = design, put(design, f"workload.operators.{name}.precision", "fp8")
    watts = [PoweredBackend("fluid").evaluate([Batch(point)])[0].column("mean_w")[0] for point in designs]
    assert watts[0] == pytest.approx(watts[1], rel=0.02)


def test_a_timeline_is_that_of_the_clock_that_is_held() -> None:
    design, backend = design_of("system.gpu.power.cap_w=200 W"), PoweredBackend("fluid")
    (results,) = backend.evaluate([Batch(design)])
    assert backend.timeline(design).makespan[0] == pytest.approx(results.column("makespan_s")[0], rel=0.03)


def test_a_limit_of_power_is_no_part_of_designs_whose_power_nobody_asks() -> None:
    design = plan(request(["study=conccl", "system=a100_8", "tracking=none", "store=none"], None))
    tree = next(iter(design.spaces.values())).base
    assert design.backend.condition("system.gpu.power.cap_w", tree) is None
    assert PoweredBackend("fluid").condition("system.gpu.power.cap_w", tree) == {}


@pytest.mark.slow
def test_power_over_time_has_the_mean_of_the_whole(tmp_path: Path) -> None:
    words: dict[str, Any] = {"tracking": "none", "store": "none", "decide__samples": 0, "output_dir": str(tmp_path)}
    words |= {"workload__only": ["70b_qkv-equal-ag", "70b_gate_up_decode-equal-ag"]}
    run = dse.run("power", space__system__gpu__power__cap_w=[300.0, 400.0], **words)
    rows = pd.read_parquet(Path(run.folder) / "power_over_time.parquet")
    for _, curves in rows.groupby("pair"):
        drawn, mean = (curves[curves["curve"] == name] for name in ("drawn", "mean"))
        seconds, watts = (drawn[name].to_numpy().reshape(-1, 2) for name in ("time_s", "watts"))
        total = (np.diff(seconds)[:, 0] * watts[:, 0]).sum() / seconds.max()
        assert total == pytest.approx(mean["watts"].iloc[0], rel=0.01)


# Whole steps

STEPS = [
    ("h100_8", {"run.mode": "prefill", "run.batch": 1}),
    ("h100_8", {"run.mode": "decode", "run.batch": 64}),
    ("a100_8", {"run.mode": "training"}),
    ("mi300x_8", {"run.mode": "prefill", "run.batch": 4}),
]


def step_tree(system: str, overrides: dict[str, Any]) -> dict[str, Any]:
    return iterations.tree({"run.precision": "bf16", **overrides}, system=system, kernels="flash")


def powered_step(system: str, overrides: dict[str, Any]) -> Any:
    """A design of a step with the power of its board."""
    return PoweredStepBackend().design(step_tree(system, overrides))


@pytest.mark.parametrize(("system", "overrides"), STEPS)
def test_a_step_at_the_boards_own_limit_is_a_plain_step_where_its_clock_is_known(
    system: str, overrides: dict[str, Any]
) -> None:
    """Others may be above the limit at the clock of their rates: then they are slower, never faster."""
    tree = step_tree(system, overrides)
    (plain,) = StepBackend().evaluate([Batch(StepBackend().design(tree))])
    (limited,) = PoweredStepBackend().evaluate([Batch(PoweredStepBackend().design(tree))])
    assert plain.ok.all(), plain.texts
    assert limited.ok.all(), limited.texts
    slower = limited.column("iteration_s")[0] / plain.column("iteration_s")[0]
    assert slower == pytest.approx(1) if tree["system"]["gpu"].get("loaded") else slower >= 1
    assert limited.column("mean_w")[0] <= power_of(system).board_w * (1 + 1e-9)
    energy, tokens = limited.column("energy_j")[0], limited.column("tokens_per_j")[0]
    assert energy == pytest.approx(limited.column("mean_w")[0] * limited.column("iteration_s")[0])
    gpus, rate = tree["parallel"].get("tp", 1), limited.column("tokens_per_s")[0]
    assert tokens * energy * gpus == pytest.approx(rate * limited.column("iteration_s")[0])


@pytest.mark.parametrize("cap_w", [700.0, 450.0])
def test_an_epoch_of_many_lengths_has_a_clock(cap_w: float) -> None:
    epoch = {"lengths": shipped("lengths")["iwslt15"], "iterations": shipped("iterations")["seqpoint"]}
    tree = step_tree("h100_8", {"run.batch": 8}) | epoch
    tree["system"]["gpu"]["power"]["cap_w"] = cap_w
    (results,) = PoweredStepBackend().evaluate([Batch(PoweredStepBackend().design(tree))])
    assert results.ok.all(), results.texts
    assert 0 < results.column("mean_w")[0] <= cap_w * (1 + 1e-9)


@pytest.mark.parametrize(("system", "overrides"), STEPS)
def test_a_lower_limit_never_makes_a_step_faster(system: str, overrides: dict[str, Any]) -> None:
    limits = np.linspace(0.5, 1.0, 11) * power_of(system).board_w
    batch = Batch(powered_step(system, overrides), {"system.gpu.power.cap_w": limits})
    (results,) = PoweredStepBackend().evaluate([Batch(batch.at(0), batch.axes)])
    ok = results.ok
    assert ok.sum() >= 6, results.texts
    assert (np.diff(results.column("iteration_s")[ok]) <= 1e-12).all()
    assert (results.column("mean_w")[ok] <= limits[ok] * (1 + 1e-9)).all()
    assert (np.diff(results.column("held_clock")[ok]) >= -1e-12).all()


def test_a_limit_gives_one_clock_whatever_higher_clock_is_asked_for() -> None:
    """The governor's steps are 4 % apart, between which metrics are mixed: so far the answers may differ."""
    clocks = list[float]()
    for clock in (1.0, 0.95, 0.9):
        words = {"run.mode": "prefill", "run.batch": 4, "system.gpu.clock": clock, "system.gpu.power.cap_w": 300.0}
        (results,) = PoweredStepBackend().evaluate([Batch(powered_step("h100_8", words))])
        clocks.append(float(results.column("held_clock")[0]))
    assert clocks == pytest.approx([clocks[0]] * 3, rel=0.02)


def test_operations_in_a_narrow_format_take_less_energy() -> None:
    wide, narrow = (
        PoweredStepBackend().evaluate([Batch(powered_step("h100_8", {"run.mode": "prefill", **products}))])[0]
        for products in ({}, {"run.products": "fp8"})
    )
    assert narrow.column("linear_flop")[0] > 0 == wide.column("linear_flop")[0]
    assert narrow.column("energy_j")[0] < wide.column("energy_j")[0]


@pytest.mark.slow
def test_a_plan_tells_what_it_draws(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["plan", "model=llama3_8b", "parallel.tp=1", "run.mode=prefill", "run.sequence_length=2048", "run.batch=1"]
    words += [f"output_dir={tmp_path}", "tracking=none", "store=none", "figures=none"]
    texts = list[str]()
    for more in ([], ["simulator=powered_step", "system.gpu.power.cap_w=350 W"]):
        assert main([*words, "system=h100_8", *more]) == 0
        lines = capsys.readouterr().out.splitlines()
        (place,) = [number for number, line in enumerate(lines) if line.startswith("power: ")]
        texts.append(" ".join(line.strip() for line in lines[place : place + 2]))  # lines are folded
    assert re.match(r"power: [56]\d\d W a GPU, of 700 W \(\d+ to \d+ W\), at 0\.8\d of its clock; ", texts[0])
    assert re.match(r"power: 350 W a GPU, its limit \(\d+ to 350 W\), at 0\.", texts[1])
    assert all(re.search(r"J a token \(.* to .*J; 90 %, by \d+ rows of other GPUs\)", text) for text in texts)
    assert all("J a token" in text for text in texts)


# The search for the clock


class Counted(OverlapBackend):
    """The overlap backend, which counts the designs that it evaluates."""

    machines = PoweredBackend.machines

    def __init__(self) -> None:
        super().__init__("fluid")
        self.sizes = list[int]()

    def evaluate(self, batches: Any) -> list[Any]:
        self.sizes.append(sum(batch.size for batch in batches))
        return super().evaluate(batches)


def searched(batch: Batch, together: int) -> tuple[Any, list[int]]:
    """Results under the limit by so many designs at once, and the sizes of the evaluations."""
    backend = Counted()
    (results,) = governed([batch], backend.evaluate, draw_of, together=together)
    return results, backend.sizes


@pytest.mark.parametrize("name", ["serial", "c3_sp"])
@given(st.floats(0.2, 1.0), st.floats(0.2, 1.0), st.floats(0.4, 1.0))
def test_the_clock_is_the_same_however_it_is_searched_for(name: str, low: float, high: float, clock: float) -> None:
    design = design_of("system=a100_8", f"schedule={name}", "~space.schedule.name")
    limits = np.array([low, high]) * power_of("a100_8").board_w
    axes = {"system.gpu.power.cap_w": limits, "system.gpu.clock": np.array([clock, 1.0])}
    every, sizes = searched(Batch(design, axes), 10_000)
    assert len(sizes) == 1  # at all clocks at once
    for together in (1, 30):
        few, _ = searched(Batch(design, axes), together)
        assert few.status.tolist() == every.status.tolist()
        for metric in ("makespan_s", "energy_j", "mean_w", "held_clock", "lowest_clock"):
            assert few.column(metric) == pytest.approx(every.column(metric), rel=1e-9, nan_ok=True), metric


@pytest.mark.parametrize("cap", ["150 W", "200 W", "250 W", "300 W", "390 W"])
def test_a_design_alone_is_evaluated_at_few_clocks(cap: str) -> None:
    results, sizes = searched(Batch(design_of(f"system.gpu.power.cap_w={cap}")), 1)
    assert results.ok[0]
    assert sum(sizes) <= 8


def test_a_limit_that_does_not_bind_takes_one_evaluation() -> None:
    _, sizes = searched(Batch(put(design_of("system=a100_8"), "system.gpu.clock", 0.5)), 1)
    assert sizes == [1]


# Intervals


def test_an_interval_of_power_is_no_higher_than_the_limit_and_says_what_it_rests_on() -> None:
    gpus = {name: ScheduleSystem.of(tree_of(name)).gpu for name in ("a100_8", "h100_8", "b200_8")}
    measured, unmeasured, served = (
        PowerInterval.of(gpus["a100_8"], 300.0, "kernels", cap_w=power_of("a100_8").cap_w),
        PowerInterval.of(gpus["h100_8"], 300.0, "kernels", cap_w=power_of("h100_8").cap_w),
        PowerInterval.of(gpus["b200_8"], 600.0, "served", cap_w=power_of("b200_8").cap_w),
    )
    assert unmeasured.low < measured.low < 300 < measured.high
    assert measured.basis.endswith("rows")
    assert unmeasured.basis.endswith("rows of other GPUs")
    assert served.low < 600 < served.high
    assert served.basis == "9 rows and those of other GPUs"
    # of A100 kernels alone were measured, whose watts are far surer than those of engines that serve
    of_engines = PowerInterval.of(gpus["a100_8"], 300.0, "served", cap_w=power_of("a100_8").cap_w)
    assert of_engines.low < measured.low and of_engines.high > measured.high
    assert of_engines.basis.endswith("rows of kernels and other GPUs")
    assert PowerInterval.of(gpus["a100_8"], 395.0, "kernels", cap_w=power_of("a100_8").cap_w).high == 400.0


def test_an_energy_is_less_sure_than_its_power_and_its_time() -> None:
    interval = PowerInterval(90.0, 110.0, (0.9, 1.1), "rows")
    assert interval.with_time((1.0, 1.0)) == pytest.approx((0.9, 1.1))
    low, high = interval.with_time((0.8, 1.2))
    assert low < 0.8 < 1.2 < high
    assert np.log(high) ** 2 == pytest.approx(np.log(1.1) ** 2 + np.log(1.2) ** 2)


def test_nine_in_ten_powers_of_kernels_are_within_their_interval() -> None:
    folder = Path(__file__).parents[2] / "shared" / "data" / "power"
    if not folder.is_dir():
        pytest.skip(f"{folder} is missing")
    from benchmarks.power import boards, by_clock, unseen

    rows = unseen(by_clock(folder))
    gpu = ScheduleSystem.of(tree_of("a100_8")).gpu
    ratio = rows["w"].to_numpy(float) / boards(rows).predicted(power_of("a100_8"))
    low, high = PowerInterval.of(gpu, 100.0, "kernels", cap_w=400.0).ratio
    assert 0.88 < ((ratio >= low) & (ratio <= high)).mean() < 0.95
