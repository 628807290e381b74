"""Plans for recorded runs: a study, fused kernels, two micro-batches, other GPUs by the costs of operators."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from pydantic import ValidationError

from benchmarks.traces import made_training
from dse.backend import Batch
from dse.cli import main
from dse.config.options import load_yaml
from dse.errors import ConfigError
from dse.values import leaves, put
from dse_calibration.measurements import MeasuredRows
from dse_calibration.predictions import predicted_by
from dse_traces import DATA, PHRASES
from dse_traces.backend import ProfileBackend
from dse_traces.change.advice import advise
from dse_traces.change.dependencies import ORDERS
from dse_traces.change.micro_batches import penalties
from dse_traces.change.what_if import Plan, WhatIfs
from dse_traces.commands.advise import what_ifs as rows_of
from dse_traces.design import PlanKnobs, ProfileDesign
from dse_traces.laws.contention import assumed_laws
from dse_traces.laws.machine import machine_named
from dse_traces.laws.own_residuals import with_residuals
from dse_traces.laws.task_graph import EXPECTED, contention_model
from dse_traces.profile.kernels import Profile, profile_of
from dse_traces.profile.shapes import parse_shape, shape_text
from dse_traces.readers.formats import files_of, read, read_ranks
from dse_traces.study import gains
from simulators.hardware.device import Device
from simulators.hardware.machine import tree_of
from simulators.hardware.residuals import OWN, JointDraws
from simulators.hardware.schedule_system import ScheduleSystem
from tests.test_advice import GATHER, GEMM, SUM, US, kernel, serial, table, what_ifs
from validation.micro_batches import made_prefill

STUDY = load_yaml(DATA.parent / "study" / "trace.yaml")
PLAN = STUDY["plan"]
RUN = ["tracking=none", "store=none", "fidelity=none", "timeline=false", "executor.jobs=1"]


def design(folder: Path, profile: Profile, **plan: Any) -> tuple[ProfileBackend, ProfileDesign]:
    """The backend, and a design of a profile on H100."""
    backend = ProfileBackend()
    tree = {"system": tree_of("h100_8"), "workload": {"path": str(table(folder, profile))}, "plan": {**PLAN, **plan}}
    (base,) = backend.scenarios(tree).values()
    return backend, backend.design(base)


def two_groups() -> Profile:
    """All-reduces and all-gathers in turn, each after a GEMM."""
    rows = list[dict[str, Any]]()
    for place in range(6):
        name, lasts = ((SUM, 800), (GATHER, 400))[place % 2]
        rows.append(kernel(GEMM, "7", 1900.0 * place, 1000, ctas=13200))
        rows.append(kernel(name, "20", 1900.0 * place + 1000, lasts, ctas=16))
    return profile_of(rows, "made")


@pytest.mark.slow
def test_a_plan_as_recorded_is_the_recorded_run(tmp_path: Path) -> None:
    backend, recorded = design(tmp_path, serial())
    (result,) = backend.evaluate([Batch(recorded)])
    metrics = result[0].metrics
    assert metrics["makespan_s"] == pytest.approx(6.4e-3, rel=0.01)
    assert metrics["gain_s"] == metrics["gain_low_s"] == metrics["gain_high_s"] == 0
    assert metrics["exposed_s"] == pytest.approx(2.4e-3, rel=0.01) and metrics["hidden"] == pytest.approx(0, abs=0.01)
    assert metrics["comm_sm_s"] == pytest.approx(16 * 2.4e-3, rel=0.01)


def test_what_a_group_is_told_counts_before_what_all_are_told(tmp_path: Path) -> None:
    backend, base = design(tmp_path, two_groups(), order="earlier", sms=4)
    changed = put(put(base, "plan.groups.c1.order", "in_2_parts"), "plan.groups.c2.mover", "switch")
    assert isinstance(changed, ProfileDesign)
    first, second = changed.plan.setting(0), changed.plan.setting(1)
    assert (first.order, first.sms, first.mover) == ("in 2 parts", 4.0, "SMs")
    assert (second.order, second.sms, second.mover) == ("earlier", None, "switch")
    alone = [backend.evaluate([Batch(trace_design)])[0][0] for trace_design in (base, changed)]
    together = [results[0] for results in backend.evaluate([Batch(base), Batch(changed)])]
    assert together == alone and alone[0] != alone[1]


def test_knobs_are_those_of_the_plan_of_groups_that_there_are_and_of_the_machine(tmp_path: Path) -> None:
    backend, base = design(tmp_path, two_groups())
    tree = {"system": tree_of("h100_8"), "plan": base.plan.model_dump()}
    conditions = {path: backend.condition(path, tree) for path in ("plan.order", "plan.groups.c2.sms", "plan.sms")}
    assert conditions == {"plan.order": {}, "plan.groups.c2.sms": {}, "plan.sms": {"plan.mover": "sms"}}
    assert backend.condition("system.node.link_bytes_per_s", tree) == {}
    for path in ("plan.groups.c3.sms", "plan.speed", "system.gpu.pim", "system.name", "workload.content"):
        assert backend.condition(path, tree) is None


@pytest.mark.parametrize(
    ("plan", "problems"),
    [
        ({"groups": {"c2": {"sms": 132}}}, [("plan.groups.c2.sms", 132)]),
        ({"sms": 132, "groups": {"c2": {"sms": 4}}}, [("plan.sms", 132)]),
        ({"groups": {"c1": {"mover": "copy_engines"}}}, [("plan.groups.c1.mover", "copy_engines")]),
        ({"mover": "copy_engines", "groups": {"c2": {"mover": "sms"}}}, [("plan.mover", "copy_engines")]),
        ({"mover": "copy_engines"}, []),
        ({"groups": {"c2": {"mover": "copy_engines"}}}, []),
    ],
)
def test_problems_name_the_group_whose_plan_cannot_be(
    tmp_path: Path, plan: Mapping[str, Any], problems: list[tuple[str, Any]]
) -> None:
    backend, base = design(tmp_path, summed_and_gathered(), **plan)
    assert [(problem.path, problem.value) for problem in backend.problems(base)] == problems


def summed_and_gathered() -> Profile:
    """All-reduces (c1), which copy engines cannot add, and shorter gathers (c2), which they can carry."""
    rows = [kernel(GEMM, "7", 0, 100, ctas=132), kernel(SUM, "20", 101, 400, ctas=16)]
    return profile_of([*rows, kernel(GATHER, "20", 502, 100, ctas=16), kernel(GEMM, "7", 603, 100)], "made")


def test_plans_that_cannot_be_are_infeasible_with_the_reason(tmp_path: Path) -> None:
    backend, base = design(tmp_path, serial())
    for path, value, message in (
        ("plan.mover", "copy_engines", "can move no collective"),
        ("plan.sms", 132, "leaves no SM"),
    ):
        (result,) = backend.evaluate([Batch(put(base, path, value))])
        assert result[0].status == "infeasible" and message in result[0].reason
    with pytest.raises(ConfigError, match="neither a shipped system"):
        design(tmp_path, serial(), gpu="no_such")
    with pytest.raises(ConfigError, match="c1 to c1"):
        design(tmp_path, serial(), groups={"c9": {"sms": 4}})


def test_ran_again_a_plan_has_all_of_its_kernels_and_its_limits_add_up(tmp_path: Path) -> None:
    backend, base = design(tmp_path, serial(), micro_batches=2)
    replay = backend.replay(base)
    assert len(replay.intervals) == 2 * len(serial())
    assert sum(replay.limits.values()) == pytest.approx(1, abs=0.01)


# Two micro-batches


def test_two_micro_batches_hide_collectives_beside_the_other_half() -> None:
    runs = what_ifs(serial(count=8))
    halves = runs.halves
    assert halves.divided == 8 and len(halves.profile) == 2 * len(runs.model.profile)
    work = halves.alone_s[:, halves.group < 0].sum(axis=1) / runs.model.alone_s[:, runs.model.group < 0].sum(axis=1)
    assert (work >= 1 - 1e-9).all() and work[0] <= work[1] <= work[2] < 1.02
    seconds = runs.seconds([Plan(micro_batches=2)])[0, EXPECTED]
    least = 9e-3 + 0.4e-3  # all GEMMs, and a half of the last collective, which nothing is beside
    assert least * 0.99 < seconds < runs.recorded_s[EXPECTED] - 0.7 * 8 * 0.8e-3 + 1e-3


def test_collectives_on_the_stream_of_the_kernels_are_hidden_likewise() -> None:
    rows = [{**row, "stream": "7"} for row in serial(count=8).kernels.to_dict("records")]
    columns = ("name", "stream", "start_s", "seconds", "ctas")
    runs = what_ifs(profile_of([{name: row[name] for name in columns} for row in rows], "made"))
    other = what_ifs(serial(count=8))
    plan = Plan(micro_batches=2)
    assert runs.seconds([plan])[0, EXPECTED] == pytest.approx(other.seconds([plan])[0, EXPECTED], rel=0.02)


def test_gradients_and_the_optimizer_run_once() -> None:
    rows = [kernel(GEMM, "7", 101 * place, 100, ctas=132) for place in range(4)]
    rows += [kernel(SUM, "20", 404, 300, ctas=16), kernel("multi_tensor_adam", "7", 705, 100, ctas=400)]
    runs = what_ifs(profile_of(rows, "made"))
    halves = runs.halves
    assert halves.divided == 0
    assert (halves.half == 0).sum() == 4 and len(halves.profile) == 4 + 4 + 2
    assert halves.profile.kernels["kind"].iloc[-1] == "optimizer"


def test_half_a_wave_takes_as_long_as_a_whole_one_at_worst() -> None:
    rows = [kernel(GEMM, "7", 0, 100, ctas=132), kernel(GEMM, "7", 101, 100, ctas=26400), kernel(GEMM, "7", 202, 100)]
    factors = penalties(what_ifs(profile_of([*rows, kernel(SUM, "20", 303, 50)], "made")).model)
    assert factors[:, 0].tolist() == pytest.approx([1, 1.5, 2])
    assert factors[:, 1] == pytest.approx([1, 1.01, 1.02])
    assert factors[:, 2] == pytest.approx([1, 1.1, 1.25])


# Fused kernels


def test_a_kernel_bound_by_memory_vanishes_into_the_one_before() -> None:
    rows = [kernel(GEMM, "7", 0, 100), kernel("vectorized_elementwise", "7", 102, 60), kernel(GATHER, "20", 163, 50)]
    runs = what_ifs(profile_of(rows, "made"))
    low, expected, high = sorted(((runs.recorded_s - runs.seconds([Plan(fused=True)])[0]) / US).tolist())
    gap = runs.model.waits.gap_s / US
    assert low == pytest.approx(20 + gap, abs=2.1) and expected == pytest.approx(40 + gap, abs=2.1)
    assert high == pytest.approx(60 + gap, abs=2.1)


def test_what_waits_for_another_stream_or_follows_late_is_not_fused() -> None:
    rows = [kernel(GEMM, "7", 0, 100), kernel(SUM, "20", 101, 50), kernel("rms_norm", "7", 152, 30)]
    runs = what_ifs(profile_of(rows, "made"))
    assert runs.structure(Plan(fused=True)).fused == {}


@pytest.mark.slow
def test_advice_has_both_and_writes_them() -> None:
    advice = advise(made_training(120, groups=2), "h100_8")
    names = [what_if.name for what_if in advice.kernels]
    assert names[0].startswith("kernels bound by memory fused") and names[1] == "two micro-batches"
    for what_if in advice.kernels:
        assert what_if.gain.low <= what_if.gain.value <= what_if.gain.high
    rows = rows_of(advice)
    assert rows["fused"].any() and (rows["micro_batches"] == 2).sum() == 3
    assert advice.kernels[0].gain.low > 0


# Another GPU


@pytest.mark.parametrize(
    ("words", "product"),
    [
        ("mm 64x32 32x16 bf16", (64, 16, 32, 1)),
        ("addmm 16 64x32 32x16 bf16", (64, 16, 32, 1)),
        ("addmm 64x16 64x32 32x16 bf16", (64, 16, 32, 1)),
        ("addmm 32x32 32x32 32x32 bf16", (32, 32, 32, 1)),
        ("addmm 64x32 64x32 32x32 bf16", (64, 32, 32, 1)),
        ("addmm 16x64 16x32 32x64 bf16", (16, 64, 32, 1)),
        ("addmm 1x16 64x32 32x16 bf16", (64, 16, 32, 1)),
        ("linear 2x64x32 16x32 16 bf16", (128, 16, 32, 1)),
        ("bmm 8x64x32 8x32x16 fp16", (64, 16, 32, 8)),
        ("baddbmm 8x64x16 8x64x32 8x32x16 bf16", (64, 16, 32, 8)),
        ("mm 64x32 31x16 bf16", None),
        ("add 64x32 64x32 bf16", None),
    ],
)
def test_products_are_read_off_the_sizes_of_their_tensors(words: str, product: tuple[int, ...] | None) -> None:
    shape = parse_shape(words)
    assert shape is not None
    assert (None if shape.product is None else tuple(vars(shape.product).values())) == product


@pytest.mark.parametrize("sizes", [[[1, -2]], [["a"]], "x", [[]], [[1.5, 2]], [[True]], [[1] * 200], None])
def test_sizes_that_are_none_are_no_shape(sizes: Any) -> None:
    assert shape_text("aten::mm", sizes, ["c10::BFloat16"]) is None
    assert shape_text(3, [[1]], ["c10::BFloat16"]) is None and shape_text("aten::mm", [[1]], ["int"]) is None


def recorded_shapes(folder: Path) -> Path:
    """A Chrome trace of a GEMM and an addition with shapes, and of a GEMM without."""
    host = {"ph": "X", "pid": 1, "tid": 1, "cat": "cpu_op", "dur": 1.0}
    types = ["c10::BFloat16", "c10::BFloat16"]
    sizes = {1: ("aten::mm", [[8192, 8192], [8192, 4096]]), 2: ("aten::add", [[8192, 4096], [8192, 4096]])}
    events: list[dict[str, Any]] = [
        {**host, "name": name, "ts": number, "args": {"External id": number, "Input Dims": dims, "Input type": types}}
        for number, (name, dims) in sizes.items()
    ]
    names = (GEMM, "vectorized_elementwise_kernel", GEMM, SUM)
    for number, name in enumerate(names, 1):
        args = {"stream": 7, "External id": number, "grid": [256, 1, 1]}
        events.append({"ph": "X", "cat": "kernel", "name": name, "ts": 1000.0 * number, "dur": 900.0, "args": args})
    path = folder / "run.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def test_times_on_another_gpu_are_those_of_operators_where_shapes_are_recorded(tmp_path: Path) -> None:
    profile = read(recorded_shapes(tmp_path))
    shapes = profile.kernels["shape"].fillna("").tolist()
    assert shapes == ["mm 8192x8192 8192x4096 bf16", "add 8192x4096 8192x4096 bf16", "", ""]
    pace = what_ifs(profile, "a100_8").pace("h100_8")
    assert pace.shares == pytest.approx({"operator costs": 2 / 3, "waves of CTAs": 1 / 3, "peak rates": 0})
    gemm, added, by_waves, collective = pace.factors[EXPECTED].tolist()
    assert 0.25 < gemm < 0.7 and 0.4 < added < 0.8 and collective == 1
    assert by_waves == pytest.approx(312 / 989.4 * (2 * 132) / (3 * 108))


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("flash_fwd_kernel", None, "SMs"),
        ("flash_fwd_splitkv_kernel", None, "HBM"),
        ("paged_attention_v2_kernel", None, "HBM"),
        (GEMM, None, "SMs"),
        ("flash_fwd_kernel", "_flash_attention_forward 1x8192x32x128 1x8192x32x128 bf16", "SMs"),
    ],
)
def test_what_bounds_a_kernel_without_costs_is_an_interval(name: str, shape: str | None, expected: str) -> None:
    """H200 has the SMs of an H100, and 1.43 times its HBM."""
    rows = [kernel(name, "7", 0, 100) | {"shape": shape}, kernel("rms_norm", "7", 101, 30), kernel(SUM, "20", 131, 9)]
    runs = what_ifs(profile_of(rows, "made"))
    rates = [float(machine_named(of).gpu.hbm_bytes_per_s or 0) for of in ("h100_8", "h200_8")]
    by_hbm = rates[0] / rates[1]
    heavy, norm, collective = runs.pace("h200_8").factors.T.tolist()
    assert heavy == pytest.approx([by_hbm, by_hbm if expected == "HBM" else 1.0, 1.0], rel=0.01)
    assert norm == pytest.approx([by_hbm] * 3) and collective == [1, 1, 1]
    low, value, high = runs.seconds([Plan(gpu="h200_8")])[0] / US
    assert low == pytest.approx(high - 100 * (1 - by_hbm), abs=0.5)
    assert value == pytest.approx(low if expected == "HBM" else high, abs=0.5)


def test_a_recorded_precision_has_its_own_peaks(tmp_path: Path) -> None:
    name = "flash_fwd_kernel"
    rows = [
        kernel(name, "7", 101 * place, 100) | {"shape": f"attention 1x8192x32x128 1x8192x32x128 {precision}"}
        for place, precision in enumerate(("fp16", "fp8", "fp32"))
    ]
    machines = [machine_named(of).gpu for of in ("h100_8", "mi300x_8")]
    peaks = [[float(gpu.peak(precision) or 0) for gpu in machines] for precision in ("fp16", "fp8")]
    factors = what_ifs(profile_of([*rows, kernel(SUM, "20", 400, 9)], "made")).pace("mi300x_8").factors[EXPECTED]
    assert factors[:2] == pytest.approx([of[0] / of[1] for of in peaks])


@pytest.mark.parametrize("tp", [4, 8])
def test_a_prefill_made_of_its_times_takes_them_and_gains_by_halves(tp: int) -> None:
    runs = WhatIfs(contention_model(made_prefill(0.36, 0.29, 8192, tp), assumed_laws("h100_8")))
    low, middle, high = runs.seconds([Plan(micro_batches=2)])[0]
    assert runs.recorded_s[EXPECTED] == pytest.approx(0.36, rel=1e-3)
    assert low * 1.001 >= 0.29 and low < middle < high < 0.36


# Folders of profile import, and the study


def test_what_trace_import_wrote_is_read_again(tmp_path: Path) -> None:
    path, out = recorded_shapes(tmp_path), tmp_path / "imported"
    assert main(["profile", "import", str(path), f"out={out}"]) == 0
    again, first = read(out), read(path)
    pd.testing.assert_frame_equal(again.kernels, first.kernels)
    assert files_of(str(out)) == [out] and again.source == "run.json"
    (out / "kernels.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(ConfigError):
        read_ranks(out)


@pytest.mark.more
def test_the_study_searches_plans_and_says_what_the_best_gains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = table(tmp_path, made_training(60, groups=2))
    few = ["space.plan.sms=choice(0,32)", "space.plan.order=choice(as_recorded,in_2_parts)"]
    few += ["+space.plan.groups.c1.sms=choice(0,8)"]
    words = ["study=trace", "system=h100_8", f"workload.path={path}", f"output_dir={tmp_path}", *RUN, *few]
    assert main(words) == 0
    assert "in short: run: " in capsys.readouterr().out
    folder = tmp_path / "trace" / "latest"
    results = pd.read_parquet(folder / "results.parquet")
    ok = results[results["status"] == "ok"]
    rows = gains(results)
    assert rows["with_s"].iloc[0] == ok["makespan_s"].min()
    assert (rows["low"] <= rows["gain"]).all() and (rows["gain"] <= rows["high"]).all()
    assert {"kernels fused with neighbours", "two micro-batches", "32 SMs for a collective"} <= set(rows["change"])
    assert (folder / "figures" / "gains.png").is_file() and (folder / "figures" / "front.png").is_file()
    first, last = ok.sort_values("makespan_s")["key"].iloc[[0, -1]]
    names = [f"trace:{key[:12]}" for key in (first, last)]
    assert main(["profile", "explain", *names, f"output_dir={tmp_path}", f"out={tmp_path / 'why'}"]) == 0
    assert "dependency" in capsys.readouterr().out
    assert np.isfinite(ok["exposed_s"]).all() and ok["plan.groups.c1.sms"].nunique() == 2


def test_the_recorded_and_shown_paths_of_the_study_are_paths_of_its_designs() -> None:
    study, paths = STUDY["study"], {path for path, _, _ in leaves(PlanKnobs(), "plan")}
    paths_there = {*paths, *ProfileBackend.metrics, *ProfileBackend.relations}
    assert {*study.get("recorded", ()), *study["baseline"]} <= paths
    assert {*study["summary"], *study["objectives"]} <= paths_there


def test_phrases_and_the_searched_orders_are_of_orders_that_there_are() -> None:
    orders = {name.replace(" ", "_") for name in ORDERS}
    searched = STUDY["space"]["plan"]["order"]
    assert set(PHRASES["plan.order"]) <= orders
    assert set(searched.removeprefix("choice(").removesuffix(")").split(",")) <= orders
    with pytest.raises(ValidationError, match="in_16_parts"):
        PlanKnobs(order="in_16_parts")


@pytest.mark.slow
def test_gemms_of_a_profile_give_its_machine_intervals_of_its_own(tmp_path: Path) -> None:
    """Every GEMM takes 1.3 times as long as predicted; those beside a collective, ten times, do not count."""
    sizes = [(256 * i, 4096 + 512 * (i % 5), 4096) for i in range(1, 31)]
    predicted = {size: operator_seconds("h100_8", size) for size in sizes}
    out = tmp_path / "out"
    words = [f"profile={gemms_in_turn(tmp_path, predicted)}", "system=h100_8", f"out={out}"]
    assert main(["profile", "import", *words]) == 0
    gpu = ScheduleSystem.of(tree_of(str(out / "h100_8.yaml"))).gpu
    group = JointDraws(1, 0).of(gpu).residuals.of("gemm", "h100", "bf16")
    assert group.source == f"{OWN}gemms.json" and group.rows == len(sizes)
    assert group.low == pytest.approx(math.log(1.3), abs=2e-3) == group.high
    again = with_residuals(tree_of(str(out / "h100_8.yaml")), [replace(group, rows=1)])
    assert [entry["rows"] for entry in again["gpu"]["note"]["residuals"]] == [1]  # of the same kind: replaced


def operator_seconds(system: str, size: tuple[int, int, int]) -> float:
    """Time [s] of X[m, k] W[k, n] by the fitted constants of a machine."""
    tokens, out, inner = size
    shape = {name: np.array([float(value)]) for name, value in zip("mnk", (out, tokens, inner), strict=True)}
    zero = {"ta": np.zeros(1), "tb": np.zeros(1)}
    rows = MeasuredRows("", "bf16", "gemm", {**shape, **zero}, np.ones((1, 1)), ("one",), (1,), ("",))
    times = predicted_by("fitted", Device.of(tree_of(system)), rows)
    assert times is not None
    return float(times.seconds[0, 0])


def gemms_in_turn(folder: Path, predicted: Mapping[tuple[int, int, int], float]) -> Path:
    """A Chrome trace of GEMMs of 1.3 times these times, each again beside a sum, where it takes ten times as long."""
    events, at = list[dict[str, Any]](), 0.0
    for number, ((m, n, k), seconds) in enumerate(predicted.items(), 1):
        args = {"External id": number, "Input Dims": [[m, k], [k, n]], "Input type": ["c10::BFloat16"] * 2}
        host = {"ph": "X", "pid": 1, "tid": 1, "cat": "cpu_op", "dur": 1.0, "ts": at, "name": "aten::mm"}
        events.append({**host, "args": args})
        for factor, name, stream in ((1.3, GEMM, 7), (10.0, GEMM, 7), (10.0, SUM, 8)):
            args = {"stream": stream, "External id": number if name == GEMM else -1, "grid": [256, 1, 1]}
            start = at + (0.0 if factor < 2 else 1.4e6 * seconds)
            kernel = {"ph": "X", "cat": "kernel", "name": name, "ts": start, "dur": 1e6 * factor * seconds}
            events.append({**kernel, "args": args})
        at += 12e6 * seconds
    path = folder / "gemms.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return path
