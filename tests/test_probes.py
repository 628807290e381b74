"""Probe points: evaluated, recorded and resumed by the loop of the study, into tables of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from dse import plugins
from dse.backend import Batch
from dse.errors import ConfigError
from dse.evaluation.evaluators import Services
from dse.results.run_folder import FinishedRun, Outputs
from dse.space import Case, Knob
from dse.store.result_store import Store
from dse.study.plan import Plan
from dse.study.record import evaluate_probes
from dse.study.resume import begin
from dse.study.run import run as search
from studies.plain import Plain
from tests import toy

KNOBS = (Knob("thing.x", tuple(range(4))),)


@pytest.fixture(autouse=True)
def installed(tmp_path: Path) -> Iterator[None]:
    with toy.installed(tmp_path / "toybox"):
        yield


def planned(probes: dict[str, Any], **study: Any) -> Plan:
    tree = toy.settings("exhaustive", 100)
    tree["study"] |= {"probes": probes, **study}
    return toy.planned(KNOBS, tree)


def run(plan: Plan, folder: Path, store: Store | None = None) -> Outputs:
    folder.mkdir()
    outputs = Outputs(folder)
    if store is None:
        search(plan, outputs.results)
        evaluate_probes(plan, outputs, Services())
        return outputs
    begun = begin(store, plan, {})
    try:
        search(plan, outputs.results, Services(begun.session))
        evaluate_probes(plan, outputs, Services(begun.session))
    finally:
        begun.session.leave()
    begun.finish()
    return outputs


def test_a_probe_is_a_grid_around_the_base_design(tmp_path: Path) -> None:
    plan = planned({"far": {"points": {"thing.x": [100, 200], "tool.size": [1.0, 2.0], "thing.y": 0.25}}})
    outputs = run(plan, tmp_path / "out")
    table = pd.read_parquet(outputs.probe("far"))
    explored = table[table["thing.x"] > 0]  # the baseline has x = 0
    assert len(explored) == 2 * 2 * 2
    assert set(explored["scenario"]) == {"light", "heavy"}
    assert explored["thing.y"].eq(0.25).all()
    for _, row in explored.iterrows():
        tree = {**toy.BASE, "thing": {**toy.BASE["thing"], "x": row["thing.x"], "y": 0.25}}
        tree["tool"] = {
            **toy.BASE["tool"],
            "size": row["tool.size"],
            "weight": {"light": 0.5, "heavy": 4.0}[row["scenario"]],
        }
        (results,) = toy.Fixed().evaluate([Batch(toy.Fixed().design(tree))])
        assert results[0].metrics["time_s"] == row["time_s"]


def test_the_table_of_the_study_does_not_know_its_probes(tmp_path: Path) -> None:
    plain = run(planned({}), tmp_path / "plain")
    probed = run(planned({"far": {"points": {"thing.x": 100}}}), tmp_path / "probed")
    assert plain.results.read_bytes() == probed.results.read_bytes()


def test_a_probe_may_be_of_some_scenarios(tmp_path: Path) -> None:
    outputs = run(planned({"far": {"points": {"thing.x": 100}, "scenarios": ["heav*"]}}), tmp_path / "out")
    assert set(pd.read_parquet(outputs.probe("far"))["scenario"]) == {"heavy"}


def test_what_is_known_of_probes_is_not_evaluated_again(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path / 'results.db'}")
    plan = planned({"far": {"points": {"thing.x": [100, 200]}}})
    first = run(plan, tmp_path / "first", store)
    backend = plan.backend
    assert isinstance(backend, toy.Fixed)
    backend.evaluated.clear()
    again = run(plan, tmp_path / "again", store)
    assert backend.evaluated == []
    assert first.probe("far").read_bytes() == again.probe("far").read_bytes()


def test_a_point_that_breaks_a_rule_is_a_row_without_result(tmp_path: Path) -> None:
    outputs = run(planned({"far": {"points": {"thing.x": [100, 950]}}}), tmp_path / "out")
    table = pd.read_parquet(outputs.probe("far"))
    assert set(table[table["thing.x"] == 950]["status"]) == {"infeasible"}
    assert len(FinishedRun(outputs.folder).probe("far")) == len(table) - 2
    assert FinishedRun(outputs.folder).probe("other").empty


@pytest.mark.parametrize(
    ("probe", "message"),
    [
        ({"points": {"thing.z": 1}}, "study.probes.far.points.thing.z: is no knob of any design here"),
        ({"points": {"thing.x": "much"}}, "study.probes.far.points.thing.x = 'much'"),
        ({"points": {}}, "study.probes.far.points"),
        ({"point": {"thing.x": 1}}, "study.probes.far.point: is not a known key"),
    ],
)
def test_a_probe_that_is_no_point_is_refused(probe: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        planned({"far": probe})
    assert message in str(error.value)


def test_probes_are_counted_among_the_points() -> None:
    grid = {"points": {"thing.x": [100, 200, 300]}}
    assert planned({"far": grid}).num_points == planned({}).num_points + 2 * 3


def test_points_of_a_probe_may_be_replayed(tmp_path: Path) -> None:
    outputs = run(planned({"far": {"points": {"thing.x": [100, 200]}, "timelines": True}}), tmp_path / "out")
    finished = FinishedRun(outputs.folder)
    tasks, rows = finished.probe_timelines("far"), finished.probe("far")
    assert set(tasks["key"]) == set(rows[rows["thing.x"] > 0]["key"])
    assert tasks.groupby("key")["finish_s"].max().gt(0).all()
    assert finished.probe_timelines("near").empty


class WithCases(Plain):
    """A study whose module makes designs beside the space; one of them is none."""

    def cases(self, config: Mapping[str, Any]) -> Mapping[str, Mapping[str, Case]]:
        """The configured thing at two places, and a thing without a tool."""
        tree = {name: config[name] for name in toy.BASE}
        return {"made": {"far": Case(tree, {"thing.x": (100, 200)}), "broken": Case({"thing": tree["thing"]})}}


@pytest.fixture
def with_cases(tmp_path: Path) -> Iterator[Plan]:
    """The plan of a study with cases, from another distribution."""
    toy.distribution(tmp_path / "cases", "casebox", studies="with_cases = tests.test_probes:WITH_CASES")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path / "cases"))
        plugins.refresh()
        yield planned({}, module="with_cases")
    plugins.refresh()


def test_cases_of_a_study_are_rows_of_a_probe(with_cases: Plan, tmp_path: Path) -> None:
    table = FinishedRun(run(with_cases, tmp_path / "out").folder).probe("made")
    assert list(table["scenario"].astype(str)) == ["far", "far"]
    assert list(table["thing.x"]) == [100, 200]
    assert (table["key"] == table["baseline"]).all()
    for _, row in table.iterrows():
        tree = {**toy.BASE, "thing": {**toy.BASE["thing"], "x": row["thing.x"]}}
        (results,) = toy.Fixed().evaluate([Batch(toy.Fixed().design(tree))])
        assert results[0].metrics["time_s"] == row["time_s"]


def test_cases_are_counted_and_evaluated_once(with_cases: Plan, tmp_path: Path) -> None:
    assert with_cases.num_points == planned({}).num_points + 2
    store = Store(f"sqlite:///{tmp_path / 'results.db'}")
    run(with_cases, tmp_path / "first", store)
    backend = with_cases.backend
    assert isinstance(backend, toy.Fixed)
    assert backend.evaluated
    backend.evaluated.clear()
    run(with_cases, tmp_path / "again", store)
    assert backend.evaluated == []


WITH_CASES = WithCases()
