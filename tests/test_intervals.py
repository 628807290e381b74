"""Intervals of predictions: residuals of measured rows, joint draws of them, and what they decide."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from dse.cli import main
from dse.config.options import conf_dir
from dse.errors import ConfigError
from dse.plots import Axis, Frame, tables
from dse.results.answer import _advice_lines
from dse.results.decisions import NO_GAIN, SLOWER, Decision, _closest, gain_text, with_ranges, wrong_if_known
from dse.results.study_result import StudyResult
from dse.tracking.study import StudyFolder
from simulators.hardware.machine import tree_of
from simulators.hardware.residuals import (
    ANY,
    KINDS,
    OWN,
    OWN_GROUPS,
    Between,
    Draws,
    JointDraws,
    ResidualGroup,
    Residuals,
    read_groups,
    shipped_residuals,
    unmeasured_text,
)
from simulators.hardware.schedule_system import ScheduleSystem
from simulators.overlap.backend import OverlapBackend
from simulators.steps.backend import StepBackend
from simulators.steps.plan.drawn_errors import StepInterval
from simulators.steps.run.build import iteration
from simulators.workloads.model_zoo import model_tree, option_tree

NARROW = ResidualGroup("gemm", "h100", rows=99, low=-0.1, median=0.0, high=0.2, common=0.25, basis="own", source="t")


def test_what_nobody_measured_is_wide_and_called_a_guess() -> None:
    guess = shipped_residuals().of("host", "no such gpu")
    assert guess.is_guess and guess.high - guess.low > 1
    joint = JointDraws(64, 0)
    l40s, h100 = (joint.of(ScheduleSystem.of(tree_of(name)).gpu) for name in ("l40s_8", "h100_8"))
    assert l40s.factor("host", "x").std() > 0.1 and joint.basis == {"host": "a guess"}
    # another GPU is off by itself; all designs on one share its errors
    assert abs(np.corrcoef(l40s.factor("host", "x"), h100.factor("host", "x"))[0, 1]) < 0.5
    assert joint.of(ScheduleSystem.of(tree_of("h100_8")).gpu) is h100
    assert Residuals(()).of("attention", "h100").is_guess


def test_the_nearest_group_counts() -> None:
    parts = [replace(NARROW, key="bf16", where=where, high=high) for where, high in (("n<=64", 0.3), ("n>64", 0.1))]
    residuals = Residuals(
        (NARROW, replace(NARROW, key="bf16", high=0.25), *parts, replace(NARROW, gpu="any", high=0.9))
    )
    highs = [
        residuals.of("gemm", gpu, key, sizes).high
        for gpu, key, sizes in (
            ("h100", "bf16", {"n": 64.0}),
            ("h100", "bf16", {"n": 65.0}),
            ("h100", "bf16", {}),
            ("h100", "fp8", {"n": 4.0}),
            ("l4", "bf16", {}),
        )
    ]
    assert highs == [0.3, 0.1, 0.25, 0.2, 0.9]
    mine = residuals.with_own([replace(NARROW, gpu="mine", key=key, high=0.05) for key in ("", "bf16")])
    assert mine.of("gemm", "h100", "bf16").high == mine.of("gemm", "h100", "fp8").high == 0.05
    # rows of another precision tell less than other machines' rows of this one
    assert residuals.with_own([replace(NARROW, key="", high=0.05)]).of("gemm", "h100", "bf16").high == 0.25


def test_draws_have_the_quantiles_of_their_group_and_share_errors() -> None:
    draws = Draws(Residuals((NARROW,)), "h100", 2000)
    first, same, other = (draws.factor("gemm", name) for name in ("a", "a", "b"))
    assert np.quantile(np.log(first), (0.05, 0.95)) == pytest.approx((-0.1, 0.2), abs=0.02)
    assert (first == same).all()
    assert 0.1 < np.corrcoef(np.log(first), np.log(other))[0, 1] < 0.4  # common: a quarter
    assert replace(draws, exact=("gemm",)).factor("gemm", "a") == pytest.approx(1.0)


def test_shipped_groups_are_in_order_and_name_their_source(tmp_path: Path) -> None:
    groups = shipped_residuals().groups
    assert {group.kind for group in groups} == set(KINDS)
    assert {part.kind for part in shipped_residuals().between} <= set(KINDS)
    assert all(part.low >= 0 and part.high >= 0 and part.source for part in shipped_residuals().between)
    assert all(group.low <= group.median <= group.high and group.source for group in groups)
    for group in groups:
        assert len(group.ranges) == len(group.where.split(" and ")) * bool(group.where)
    text = (conf_dir() / "data" / "residuals" / "public.csv").read_text("utf-8")
    bad = tmp_path / "bad.csv"
    bad.write_text("\n".join([*text.splitlines()[:4], "gemm,any,,,3,0.5,0.1,0.2,0.3,own,t"]), "utf-8")
    with pytest.raises(ConfigError, match="low <= median <= high"):
        list(read_groups(bad))


def test_a_trait_that_no_row_has_widens_an_interval_and_is_told() -> None:
    part = Between("gemm", "", "model", frozenset({"llama"}), low=0.3, high=0.4)
    residuals = Residuals((NARROW, replace(NARROW, gpu=ANY)), between=(part,))
    plain, traited = residuals.of("gemm", "h100"), residuals.of("gemm", "h100", traits={"model": "llama"})
    other = residuals.of("gemm", "h100", traits={"model": "gpt"})
    assert plain == traited == NARROW
    assert (other.low, other.high) == pytest.approx((-0.3, 0.4))
    assert 0.25 < other.common < 1  # operators share what is added
    assert unmeasured_text(other) == ", none of this model" and unmeasured_text(plain) == ""
    # spreads hold those of other traits, and a group that is wider stays as it is
    narrower = replace(part, trait="release", low=0.2, high=0.1)
    both = replace(residuals, between=(part, narrower)).of("gemm", "h100", traits={"model": "gpt", "release": "2"})
    assert (both.low, both.high, both.unmeasured) == (other.low, other.high, ("model", "release"))
    alone = replace(residuals, between=(narrower,)).of("gemm", "h100", traits={"release": "2"})
    assert (alone.low, alone.high) == pytest.approx((-0.2, 0.2))
    # rows of the machine itself have all of its traits, and a guess is wide enough
    mine = residuals.with_own([replace(NARROW, gpu="mine")])
    assert not mine.of("gemm", "h100", traits={"model": "gpt"}).unmeasured
    assert residuals.of("host", "h100", traits={"model": "gpt"}).is_guess


def test_numbers_of_gpus_widen_those_of_measured_gpus_alone() -> None:
    part = Between("collective", "", "gpus", frozenset({"h100 8"}), low=0.5, high=0.5)
    measured = replace(NARROW, kind="collective")
    residuals = Residuals((measured, replace(measured, gpu=ANY, high=0.9)), between=(part,))
    assert residuals.of("collective", "h100", traits={"gpus": "h100 4"}).unmeasured == ("gpus",)
    assert residuals.of("collective", "b200", traits={"gpus": "b200 4"}).unmeasured == ()


def test_the_time_of_a_step_has_the_interval_of_measured_steps() -> None:
    design = step(
        run={"mode": "training", "batch": 1, "micro_batches": 8, "sequence_length": 4096, "precision": "bf16"}
    )
    drawn = np.array([0.99, 1.0, 1.01])
    taken = StepInterval.of(design, 1.0, drawn)
    assert taken.low < 1 < taken.high - taken.low + 0.8 and "release" in taken.basis
    assert "measured steps" in taken.basis
    decode = step(run={"mode": "decode", "batch": 8, "sequence_length": 4096, "precision": "bf16"})
    assert StepInterval.of(decode, 1.0, drawn).basis == "errors of its parts"  # no table has such steps


def step(sites: Any = None, run: Any = None, parallel: Any = None, **system: Any) -> Any:
    tree = {
        "system": {**tree_of("h100_8"), **system},
        "model": model_tree("llama3_8b"),
        "run": run or {"mode": "prefill", "batch": 1, "sequence_length": 4096, "precision": "bf16"},
        "parallel": parallel or {"tp": 8, "sequence_parallel": True},
        "optimizer": option_tree("optimizer", "adam"),
        "kernels": option_tree("kernels", "flash"),
    }
    return StepBackend().design({**tree, "sites": sites} if sites else tree)


@pytest.mark.slow
def test_errors_of_a_step_go_through_its_sites_and_cancel_in_ratios() -> None:
    serial, overlapped = step(), step({"ffn_in": "hetero_fused_1d num_chunks=2"})
    draw = StepBackend().draw
    times, basis = draw([serial, serial, overlapped], samples=300, seed=1)
    nominal = float(iteration(serial).seconds)
    low, middle, high = np.quantile(times[0], (0.05, 0.5, 0.95)) / nominal
    assert 0.7 < low < 0.99 < 1.01 < high < 1.5 and 0.8 < middle < 1.2
    assert (times[0] == times[1]).all()
    times, _ = draw([serial, overlapped], samples=300, seed=1, exact=("overlap",))
    spread = [np.log(values).std() for values in (times[0], times[1] / times[0])]
    assert spread[1] < 0.5 * spread[0]  # errors that both have are not in the ratio
    exact, _ = draw([serial, overlapped], samples=16, seed=1, exact=tuple(basis))
    assert np.ptp(exact, axis=1) == pytest.approx(0.0, abs=1e-9)
    assert basis["attention"] == basis["gemm"] == "rows of this GPU"


@pytest.mark.slow
def test_a_machine_of_ones_own_has_its_own_residuals() -> None:
    tree = tree_of("h100_8")
    narrow = {**vars(replace(NARROW, key="bf16", low=-0.01, high=0.01, source=f"{OWN}mine.csv"))}
    narrow.pop("ranges", None)
    machine = step(gpu={**tree["gpu"], "note": {OWN_GROUPS: [narrow]}}).system
    assert JointDraws(8, 0).of(machine.gpu).residuals.of("gemm", "h100", "bf16").high == 0.01


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "parallel"), [("decode", {"tp": 8}), ("training", {"tp": 2, "pp": 2, "dp": 2})])
def test_what_is_twice_as_long_in_all_kinds_makes_steps_of_twice_the_length(
    mode: str, parallel: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No part of a step is without an error, and none has two."""
    twice = replace(NARROW, gpu="any", low=math.log(2), median=math.log(2), high=math.log(2))
    groups = tuple(replace(twice, kind=kind) for kind in KINDS)
    monkeypatch.setattr("simulators.hardware.residuals.shipped_residuals", lambda: Residuals(groups))
    design = step(run={"mode": mode, "batch": 8, "sequence_length": 4096, "precision": "bf16"}, parallel=parallel)
    times, _ = StepBackend().draw([design], samples=4, seed=0)
    assert times[0] == pytest.approx(2 * float(iteration(design).seconds), rel=1e-3)


def test_a_graph_of_drawn_work_takes_as_much_longer() -> None:
    tree = {"system": tree_of("mi300x_8"), "workload": option_tree("workload", "ficco")}
    backend = OverlapBackend("fluid")
    (name, first), *_ = backend.scenarios({**tree, "schedule": option_tree("schedule", "serial")}).items()
    design = backend.design(first)
    graph = backend._simulation.lower(design)
    twice = graph.draw({kind: np.array([1.0, 2.0]) for kind in set(graph.kinds)})
    times = backend._simulation.results(graph, _grid(design)).metrics["makespan_s"]
    drawn, _ = backend.draw([design], samples=32, seed=0, exact=KINDS)
    assert twice.num_designs == 2 and name
    assert drawn == pytest.approx(float(times[0]), rel=0.3) and np.ptp(drawn) == pytest.approx(0)
    with pytest.raises(ValueError, match="draws are of one design"):
        twice.draw({})


def _grid(design: Any) -> Any:
    from dse.space.blocks import Grid

    return Grid(design, (1,))


def decision(times: Sequence[Sequence[float]], before: Sequence[float] | None = None, least: float = 0.8) -> Decision:
    return Decision.of(np.array(times), None if before is None else np.array(before), least=least, rivals=["b", "c"])


def test_a_winner_is_decided_where_nothing_else_is_likely() -> None:
    sure = decision([[1.0, 1.1]] * 1 + [[1.5, 1.6]], [1.4, 1.5])
    assert sure.is_decided and sure.fastest == 1 and not sure.advice
    assert sure.holding(2.0).high == 2.0 and sure.holding(0.5).spans_one  # a prediction that no draw reaches
    assert decision([[1.0, 1.0], [2.0, 2.0]], [0.9, 1.2]).advice == NO_GAIN
    assert replace(sure.holding(1.0), never_slower=True).is_decided
    slower = decision([[1.0, 1.0], [1.1, 0.9]], [0.5, 0.9])  # whichever wins, what there was is faster
    assert not slower.is_decided and slower.advice == SLOWER and not slower.measurement("h100_8", 8)
    torn = decision([[1.0, 1.0, 1.0, 1.0], [0.9, 1.1, 0.9, 1.1]], [2.0] * 4)
    assert torn.fastest == 0.5 and torn.advice == "too close to call: b is as good"
    assert decision([[1.0, 1.0, 1.0, 1.0], [0.9, 1.1, 1.1, 1.1]], [2.0] * 4, least=0.7).is_decided
    assert Decision.read(sure.json()) == sure
    lines = list(_advice_lines(["x", "y", "z"], [decision([[1.0], [0.9]], [1.0]), torn, sure]))
    assert lines == ["nothing is surely faster than the baseline for x", "another option may be as fast for y: b"]


def test_knowing_an_error_that_decides_helps_and_another_does_not() -> None:
    rng = np.random.default_rng(0)
    first, second = rng.normal(0, 0.2, (2, 512))
    times = np.exp(np.stack([first + second, np.zeros(512)]))
    now = 1 - np.bincount(times.argmin(axis=0)).max() / 512
    of_first = wrong_if_known(times, np.exp(np.stack([first, np.zeros(512)])))
    of_none = wrong_if_known(times, np.ones((2, 512)))
    assert of_first < now - 0.1 and abs(of_none - now) < 0.1
    measured = replace(
        decision([[1.0, 2.0], [2.0, 1.0]], [1.0, 2.0]),
        measure={"kind": "collective", "wrong": now, "wrong_if_known": of_first},
    )
    assert "all_gather_perf -b 64K -e 1G -f 2 -g 8" in measured.measurement("h100_8", 8)
    overlap = replace(measured, measure={**measured.measure, "kind": "overlap"})
    assert "nsys" in overlap.measurement("h100_8", 8) and "rocprofv3" in overlap.measurement("mi300x_8", 8)
    assert "nsys" not in overlap.measurement("mi300x_8", 8)
    assert gain_text(1.18, 1.06, 1.29) == "1.18x (1.06–1.29) faster"


def test_of_too_many_winners_those_that_gain_least_are_decided() -> None:
    winners = pd.DataFrame({"speedup": [1.5, 0.9, 3.0, 1.02]}, index=list("abcd"))
    assert list(_closest(winners, 2).index) == ["b", "d"]
    assert list(_closest(winners, 4).index) == list("abcd") and len(_closest(winners[[]], 3)) == 3


@pytest.mark.slow
def test_intervals_are_in_the_table_in_python_and_in_tracking(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["study=ficco_sweep", "workload.only=[g1]", "fidelity=none", "tracking=none", "store=none", "figures=none"]
    assert main([*words, "timeline=false", f"output_dir={tmp_path}"]) == 0
    output, result = capsys.readouterr().out, StudyResult(next((tmp_path / "ficco_sweep").glob("2*")))
    (row,), (decision,) = result.winners.to_dict("records"), result.decisions.values()
    assert row["speedup_low"] < row["speedup"] < row["speedup_high"] and row["fastest"] == decision.fastest
    assert f"{row['speedup']:.2f}x ({row['speedup_low']:.2f}–{row['speedup_high']:.2f})" in output
    assert decision.is_decided or decision.advice in " ".join(output.split())
    folder = StudyFolder(result.folder)
    curves = {curve.name: curve.values[-1] for curve in folder.curves()}
    assert curves["speedup_low"] == row["speedup_low"] and curves["speedup_high"] == row["speedup_high"]


def test_figures_have_the_intervals_of_winners_alone() -> None:
    table = pd.DataFrame({"key": ["a", "b", "c"], "case": ["x", "x", "y"], "speedup": [1.2, 1.1, 1.5]})
    axis, frame = Axis("speedup", "speed-up [x]", centre=1.0), Frame("title")
    plain = with_ranges(table, table, ["case", "speedup"])
    assert plain is table
    table.attrs["decisions"] = {"a": {"low": 1.0, "high": 1.3}, "c": {"low": None, "high": None}}
    ranged = with_ranges(table, table, ["case", "speedup"])
    np.testing.assert_array_equal(ranged["range_low"], [1.0, np.nan, np.nan])
    drawn = [tables.dots(rows, axis, row="case", by="key", frame=frame) for rows in (plain, ranged)]
    assert len(drawn[1].panels[0].collections) > len(drawn[0].panels[0].collections)
