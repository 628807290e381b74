"""What is told of a study before it runs: counts against brute force, costs against what was timed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dse import plugins
from dse.cli import main
from dse.config.compose import request
from dse.config.options import conf_dirs, override_key
from dse.errors import ConfigError
from dse.space import Knob
from dse.study.census import Tally, general
from dse.study.dry_run import Outlook, outlook
from dse.study.plan import Plan
from dse.study.timing import CallTimes, spread
from dse.values import content_key
from dse.values.units import duration_text, quantity_text
from tests import toy


@pytest.fixture(autouse=True, scope="module")
def _toybox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with toy.installed(tmp_path_factory.mktemp("toybox")):
        yield


def looked(*knobs: Knob, search: str = "random", trials: int = 10_000, **about: Any) -> Outlook:
    """What is known of a study of the toy."""
    tree = {**toy.settings(search, trials), **about}
    return outlook(toy.planned(knobs, {**tree, "store": {"name": "none", "url": None}, **about}))


FINITE: dict[str, st.SearchStrategy[list[Any]]] = {
    "thing.name": st.lists(st.sampled_from(["plain", "fancy"]), min_size=1, unique=True),
    "thing.x": st.lists(st.sampled_from([0, 1, 2, 2.0, 899, 900, 950]), min_size=1, max_size=5, unique_by=repr),
    "thing.y": st.lists(st.sampled_from([0.0, 1, 1.0, 2.5]), min_size=1, max_size=3, unique_by=repr),
    "thing.mode": st.lists(st.sampled_from(["flat", "bent"]), min_size=1, unique=True),
    "thing.bend": st.lists(st.sampled_from(["firm", "loose"]), min_size=1, unique=True),
    "thing.grip": st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True),
    "thing.trim": st.lists(st.integers(0, 3), min_size=1, max_size=2, unique=True),
}


@st.composite
def spaces(draw: st.DrawFn) -> list[Knob]:
    """Some knobs; several values of one may be the same number."""
    paths = draw(st.lists(st.sampled_from(sorted(FINITE)), min_size=1, max_size=4, unique=True))
    return [Knob(path, tuple(draw(FINITE[path]))) for path in paths if path != "thing.trim" or "thing.name" in paths]


def by_hand(knobs: Sequence[Knob], scenario: str) -> Tally:
    """The same counts from one design after the other."""
    plan = toy.planned(knobs, toy.settings("random", 10_000))
    space, backend = plan.spaces[scenario], plan.backend
    met, drawn, refused, broken = set[str](), 0, 0, 0
    for point in space.points():
        drawn += 1
        try:
            design = backend.design(space.tree(point))
        except ConfigError:
            name, bad = repr(space.tree(point)), True
            refused += name not in met
        else:
            name, bad = content_key(design), bool(backend.problems(design))
            broken += bad and name not in met
        met.add(name)
    return Tally(drawn, drawn, len(met), refused, broken)


@pytest.mark.slow
@settings(max_examples=25)
@given(knobs=spaces())
def test_counts_are_those_of_looking_at_every_design(knobs: list[Knob]) -> None:
    try:
        forecast = looked(*knobs)
    except ConfigError:
        return  # a knob that counts nowhere is refused by every command
    for scenario, tally in forecast.census.tallies.items():
        assert tally == by_hand(knobs, scenario)


def test_what_the_model_refuses_is_told_from_what_breaks_a_rule_and_from_what_comes_twice() -> None:
    forecast = looked(Knob("thing.x", (1, 1.0, 5, 900, 950)), Knob("tool.size", (1, 2)))
    tally = forecast.census.tallies["light"]
    assert (tally.asked, tally.duplicates, tally.refused, tally.broken, tally.legal) == (10, 2, 0, 4, 4)
    assert forecast.census.rules == {"thing.x = …: does not fit the tool": 8}
    assert (
        forecast.census.num_evaluated == forecast.census.num_legal + 4
    )  # baselines: x = 0 for two sizes in two scenarios


def test_nothing_is_simulated_to_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is timed is thrown away: only a rule is broken here, so there is nothing to time."""
    monkeypatch.setattr(toy.Fixed, "evaluate", lambda *_: pytest.fail("evaluated"))
    forecast = looked(Knob("thing.x", (900, 950)), study={**toy.settings("random", 1)["study"], "baseline": {}})
    assert forecast.total.legal == 0
    assert forecast.notes == ("no point can be evaluated, so nothing was timed",)


@pytest.mark.slow
def test_a_design_of_two_scenarios_is_evaluated_once() -> None:
    forecast = looked(Knob("tool.weight", (0.5, 4.0)), Knob("thing.x", (0, 1)))
    assert forecast.total.legal == 8
    assert forecast.census.num_legal == 4


@pytest.mark.nightly
def test_an_endless_space_is_told_from_draws_and_says_so() -> None:
    forecast = looked(Knob("thing.y", low=0.0, high=1.0), Knob("thing.x", tuple(range(880, 920))), trials=50)
    assert not forecast.counts
    tally = forecast.census.tallies["light"]
    share = tally.share(tally.broken)
    assert share.interval is not None
    assert share.interval[0] < 0.5 < share.interval[1] < share.interval[0] + 0.1
    assert forecast.verdict.startswith("search=random evaluates 50 of endlessly many points per scenario in ")
    assert forecast.rows == 100


def test_a_budget_below_the_space_is_told_with_what_all_of_it_would_take() -> None:
    forecast = looked(Knob("thing.x", tuple(range(100))), trials=10)
    assert forecast.verdict.startswith("search=random evaluates 10 of 100 points per scenario in ")
    assert "; budget.trials=100 enumerates all in " in forecast.verdict
    assert forecast.searching is not None
    assert forecast.searching.value < forecast.enumerating.value * 20  # type: ignore[union-attr]


def test_the_cost_of_a_search_that_ends_by_itself_is_a_bound() -> None:
    knobs = [Knob(f"thing.{name}", tuple(range(20))) for name in ("x", "y")]
    forecast = looked(*knobs, search="coordinate", trials=300)
    assert forecast.ends_by_itself
    start = "search=coordinate ends by itself: at most 300 of 400 points per scenario, in at most "
    assert forecast.verdict.startswith(start)
    assert "; budget.trials=400 enumerates all in " in forecast.verdict


@pytest.mark.more
@pytest.mark.slow
def test_points_that_a_search_asks_for_together_are_one_call_where_the_backend_takes_as_many() -> None:
    """So more jobs than calls do not make it faster."""
    executor = {"name": "local", "jobs": 8}
    fast = {**toy.settings("random", 1)["simulator"], "fast": True}
    forecast = looked(Knob("thing.x", tuple(range(100))), trials=10, executor=executor, simulator=fast)
    assert "evenly on 8 jobs" in forecast.notes[0]
    assert "jobs" not in forecast.notes[1]
    forecast = looked(Knob("thing.x", tuple(range(100))), trials=10, executor=executor)
    assert "evenly on 8 jobs" in forecast.notes[1]


def test_seconds_are_shared_by_jobs_once_workers_pay() -> None:
    pace = CallTimes(np.array([10.0, 10.0, 20.0]), np.array([1.0, 1.0, 2.0]), 0.5)
    assert pace.per_design == 0.1
    estimate = pace.total(1000, 4, extra_s=0.01)
    assert estimate.value == pytest.approx(0.5 + (2.0 + 98.0 / 4) + 10.0)
    assert estimate.interval == pytest.approx((estimate.value, estimate.value))
    assert spread(100.0, 1) == 100.0
    assert pace.total(0, 4).value == 0.0


def test_an_interval_of_resampled_calls_holds_the_true_pace_of_noisy_ones() -> None:
    """Of 95 % intervals, about so many: calls whose time per design is drawn around a known mean."""
    hits = 0
    for seed in range(100):
        noise = np.random.default_rng(seed).lognormal(-0.045, 0.3, 40)
        interval = CallTimes(np.full(40, 8.0), 8.0 * noise, 0.0).total(1, 1, seed=seed).interval
        hits += interval is not None and interval[0] <= 1.0 <= interval[1]
    assert hits >= 85


def test_wilsons_interval_is_never_outside_what_a_share_can_be() -> None:
    nothing, all_ = Tally(None, drawn=10).share(0), Tally(None, drawn=10).share(10)
    assert nothing.interval is not None
    assert all_.interval is not None
    assert (nothing.interval[0], all_.interval[1]) == (0.0, 1.0)
    assert nothing.interval[1] == pytest.approx(1 - all_.interval[0]) == pytest.approx(0.2775, abs=1e-3)


def test_a_rule_is_one_whatever_numbers_it_was_broken_with() -> None:
    texts = {general(f"a.x2 = {value}: is more than {limit} (of 4e+09)") for value, limit in ((1, 2.5), (-30, 4))}
    assert texts == {"a.x2 = …: is more than … (of …)"}


def test_quantities_are_told_in_the_unit_of_their_field() -> None:
    assert quantity_text(2.329e12, "gpu.matrix_flop_per_s_per_cu") == "2.33 TFLOP/s per cu"
    assert quantity_text(192e9, "gpu.hbm_bytes") == "192 GB"
    assert quantity_text(0.5, "gemm.cache_miss") == "0.5"
    assert [duration_text(seconds) for seconds in (1e-6, 59.0, 200.0)] == ["1 µs", "59 s", "3.3 min"]
    assert math.isinf(float(quantity_text(math.inf, "x_s").partition(" ")[0]))


FEW = ["study=ficco_sweep", "workload.only=[g1,g4]", "space.schedule.num_chunks=choice(2)"]


@pytest.mark.nightly
@pytest.mark.slow
def test_a_dry_run_writes_nothing_and_its_counts_are_those_of_the_study(
    elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--dry-run", *FEW, "json=true"]) == 0
    counts = json.loads(capsys.readouterr().out)
    assert list(elsewhere.iterdir()) == []
    assert counts["in_store"] == 0
    assert main([*FEW, "tracking=none", "timeline=false", "figures=none"]) == 0
    files = {path: path.stat().st_mtime_ns for path in elsewhere.rglob("*")}
    capsys.readouterr()
    assert main(["--dry-run", *FEW]) == 0
    assert {path: path.stat().st_mtime_ns for path in elsewhere.rglob("*")} == files
    shown = capsys.readouterr().out
    assert f"the store holds results of {counts['to_evaluate']} of them" in shown
    assert "this space can be enumerated in 0 s" in shown
    table = next(elsewhere.glob("outputs/*/latest/results.parquet"))
    import pandas as pd

    rows = pd.read_parquet(table, columns=["key", "status"])
    assert (rows["status"] == "ok").sum() == counts["total"]["legal"] == counts["to_evaluate"]


@pytest.mark.nightly
def test_a_space_beyond_the_budget_of_an_exhaustive_search_is_counted_all_the_same(
    elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--dry-run", *FEW, "budget.trials=20", "search=exhaustive"]) == 0
    shown = capsys.readouterr().out
    assert "as typed it would be refused: cannot enumerate g1" in shown
    assert "enumerates all in" in shown


@pytest.mark.slow
def test_what_a_dry_run_cannot_take_is_refused_with_the_way_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--dry-run", "study=ficco_sweep", "--config-dri=x"]) == 2
    assert "did you mean `--config-dir`?" in capsys.readouterr().err
    assert main(["--dry-run", "study=ficco_sweep", "system.gpu.num_cuz=3"]) == 2
    assert "did you mean `system.gpu.num_cus=3`?" in capsys.readouterr().err


def test_a_program_that_takes_its_time_is_timed_a_few_times_only(elsewhere: Path) -> None:
    forecast = looked(
        Knob("thing.x", tuple(range(50))), simulator={**toy.settings("random", 1)["simulator"], "batch": 1}
    )
    assert forecast.enumerating is not None
    assert forecast.enumerating.interval is not None
    assert forecast.row is not None
    assert forecast.row.store_bytes == 0.0
    assert forecast.row.table_bytes > 0.0


COMMANDS = {
    "codesign": ("budget.area_mm2=900", "technology=silicon_2026", "~workloads.training", "~workloads.prefill"),
    "plan": ("parallel=auto", "layouts.gpus=8", "model=llama3_8b", "system=h100_8"),
    "serve-plan": ("slo.ttft_s=2", "traffic.requests=20", "+space.engines.replicas=choice(1)", "~space.parallel"),
}
"""Command that runs a study -> words that only the command understands, and some by which it has few points."""


def test_every_command_that_runs_a_study_is_tried_with_words_of_its_own() -> None:
    declared = plugins.declarations("COMMANDS")
    assert set(COMMANDS) == {name for name, command in declared.items() if command.study}


@pytest.mark.more
@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_a_dry_run_takes_the_words_of_a_command_as_a_run_does(
    command: str, elsewhere: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = list[Plan]()

    def stop(plan_: Plan, _: object = None) -> None:
        planned.append(plan_)
        raise _Stopped

    monkeypatch.setattr("dse.study.dry_run.outlook", stop)
    with pytest.raises(_Stopped):
        main([command, *COMMANDS[command], "--dry-run"])
    monkeypatch.setattr("dse.run_study._evaluate", stop)
    with pytest.raises(_Stopped):
        main([command, *COMMANDS[command], "tracking=none"])
    dry, real = planned
    assert dry.settings.study == real.settings.study
    assert dry.knobs == real.knobs
    assert dry.request.tree["study"] == real.request.tree["study"]


class _Stopped(Exception):
    pass


@pytest.mark.more
def test_a_dry_run_of_several_values_tells_each_of_them(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FEW, "system=[h100_8,mi300x_8]", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {"system=h100_8", "system=mi300x_8"} <= set(lines)
    assert sum(line.startswith("the store holds") for line in lines) == 2


def test_no_group_is_looked_for_inside_its_own_section() -> None:
    groups = {path.parent.name for folder in conf_dirs() for path in folder.glob("*/*.yaml")}
    for group in groups:
        section = override_key(group, conf_dirs()).partition("@")[2]
        assert section.partition(".")[0] != group


@pytest.mark.slow
@pytest.mark.parametrize(
    ("study", "words"),
    [
        ("codesign", "technology=silicon_2026"),
        ("goldyloc_arrivals", "logic=dynamic"),
        ("goldyloc_arrivals", "arrivals=streams"),
        ("t3_requests", "controller=t3"),
    ],
)
def test_an_option_of_a_plug_in_is_typed_by_its_name_and_so_is_a_file_of_ones_own(
    study: str, words: str, tmp_path: Path
) -> None:
    assert not request([f"study={study}", words]).problems
    group, _, option = words.partition("=")
    file = next(path for folder in conf_dirs() if (path := folder / group / f"{option}.yaml").is_file())
    (tmp_path / group).mkdir()
    text = file.read_text("utf-8").replace(f"name: {option}", "name: mine")
    (tmp_path / group / "mine.yaml").write_text(text, encoding="utf-8")
    composed = request([f"study={study}", f"{group}=mine"], tmp_path)
    assert not composed.problems
    assert composed.tree[group] == request([f"study={study}"]).tree[group] | (
        {"name": "mine"} if "name: mine" in text else {}
    )
