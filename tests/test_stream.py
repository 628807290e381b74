"""Streaming: however a study is cut up on its way to the table, the table is that of its points taken one by one."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from dse.backend import Batch, Result
from dse.errors import ConfigError
from dse.evaluation import evaluators
from dse.evaluation.calls import call
from dse.evaluation.evaluators import Services
from dse.evaluation.workers import SignalInterrupt
from dse.results.pareto import Answer, Contest, SeenHashes
from dse.results.selection import select
from dse.space import Assignment, Knob, Space
from dse.study import run
from dse.study.plan import Plan
from dse.study.run import run as run_study
from dse.values import Memo, content_key
from tests import toy
from tests.support import REPOSITORY

KNOBS = (
    Knob("thing.name", ("plain", "fancy")),
    Knob("thing.x", (*range(12), 950)),
    Knob("thing.mode", ("flat", "bent")),
    Knob("thing.bend", ("firm", "loose")),
    Knob("tool.size", (1, 2, 3)),
)
FAULTS = ((4, "raises"), (5, "nan"), (6, "no gain"), (7, "unsupported"))
COLUMNS = ["key", "status", "reason", "baseline", "time_s", "gain", "ratio"]


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with toy.installed(tmp_path_factory.mktemp("toy")):
        yield


def planned(knobs: Sequence[Knob] = KNOBS, **settings: Any) -> Plan:
    """An exhaustive study of the toy; given: parameters of the backend, or `jobs`."""
    tree = toy.settings("exhaustive", 10_000_000, jobs=settings.pop("jobs", 1))
    return toy.planned(knobs, {**tree, "simulator": {**tree["simulator"], **settings}}, settings.pop("faults", ()))


def table_of(plan: Plan, folder: Path) -> pd.DataFrame:
    """The table that a study writes."""
    run_study(plan, folder / "results.parquet")
    return pd.read_parquet(folder / "results.parquet")


def chunked(patch: pytest.MonkeyPatch, rows: int) -> None:
    """Hold so few rows at once that a small study takes many turns."""
    patch.setattr(run, "ROWS_PER_GROUP", rows)


def one_by_one(plan: Plan) -> pd.DataFrame:
    """The rows of a study without blocks, batches or columns."""
    rows: dict[tuple[str, str], list[Any]] = {}
    for scenario, space in plan.spaces.items():
        for point in space.points():
            baseline = space.active({**point, **plan.settings.study.baseline})
            name, result = alone(plan, space, point)
            theirs, other = alone(plan, space, baseline)
            ratio = other.metrics["time_s"] / result.metrics["time_s"] if result.metrics and other.metrics else np.nan
            rows[scenario, name] = [result.status, result.reason, theirs, *metrics(result), ratio]
            rows.setdefault((scenario, theirs), [other.status, other.reason, theirs, *metrics(other), 1.0])
    values = [[scenario, name, *row] for (scenario, name), row in rows.items()]
    return pd.DataFrame(values, columns=["scenario", *COLUMNS])


def alone(plan: Plan, space: Space, point: Assignment) -> tuple[str, Result]:
    """Key and result of one point."""
    try:
        design = plan.backend.design(space.tree(point))
    except ConfigError as error:
        return f"refused {error}", Result("infeasible", reason=str(error).replace("\n", "; "))
    name = content_key(design, *plan.context.words)
    (outcomes,) = call(plan.spec, [Batch(design)])
    return name, outcomes[0]


def metrics(result: Result) -> list[float]:
    """Its metrics, NaN where it has none."""
    return [result.metrics.get(name, float("nan")) for name in toy.METRICS]


def ordered(table: pd.DataFrame) -> pd.DataFrame:
    """Without regard to the order of rows, and the same types whoever made it."""
    rows = table[["scenario", *COLUMNS]].sort_values(["scenario", "key"]).reset_index(drop=True)
    return rows.astype(dict.fromkeys(("scenario", *COLUMNS[:4]), object))


@pytest.mark.more
@pytest.mark.slow
@pytest.mark.one_in(9)
@pytest.mark.parametrize("rows", [4, 50, 10_000])
@pytest.mark.parametrize("batch", [1, 7, 10_000])
def test_a_table_is_that_of_its_points_evaluated_one_by_one(
    rows: int, batch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunked(monkeypatch, rows)
    plan = planned(faults=FAULTS, batch=batch)
    table = table_of(plan, tmp_path)
    pd.testing.assert_frame_equal(ordered(table), ordered(one_by_one(plan)))
    assert set(table["status"]) == {"ok", "failed", "invalid", "unsupported", "infeasible"}
    complete = table_of(planned(faults=FAULTS), tmp_path)
    merged = table.merge(complete, on=["scenario", "key"], suffixes=("", "_whole"))
    assert (merged["on_front"] == merged["on_front_whole"]).all()


def test_the_table_holds_what_the_designs_hold_and_the_same_types_as_ever(tmp_path: Path) -> None:
    table = table_of(planned(), tmp_path)
    first = ["scenario", "key", "status", "reason", "engine", "baseline", "on_front"]
    assert list(table) == [*first, *(knob.path for knob in KNOBS), *toy.METRICS, *toy.RELATIONS]
    types = {"thing.name": "string", "thing.x": "Int64", "thing.mode": "string", "tool.size": "Int64"}
    assert {name: str(table[name].dtype) for name in types} == types
    assert table["on_front"].dtype == bool
    assert (table["thing.bend"].isna() == (table["thing.mode"] == "flat")).all()
    ok = table[table["status"] == "ok"].fillna({"thing.bend": "loose"})
    trim = {"plain": None, "fancy": 0}
    for row in ok.to_dict("records"):
        thing = {
            **toy.PLAIN,
            "trim": trim[row["thing.name"]],
            **{path[6:]: row[path] for path in map(str, row) if path[:6] == "thing."},
        }
        tool = {"size": row["tool.size"], "weight": {"light": 0.5, "heavy": 4.0}[row["scenario"]]}
        assert toy.formula(toy.Fixed().design({"thing": thing, "tool": tool}))["time_s"] == row["time_s"]


def test_values_that_the_model_refuses_are_infeasible_rows_with_its_reason(tmp_path: Path) -> None:
    plan = planned((Knob("thing.x", (1, 2)), Knob("tool.size", (1, 2))))
    knobs = (Knob("thing.x", (5000, 1, 2, "many")), Knob("tool.size", (1, 2)))
    spaces = {name: replace(space, knobs=knobs, known=Memo()) for name, space in plan.spaces.items()}
    table = table_of(replace(plan, spaces=spaces), tmp_path)
    refused = table[table["status"] == "infeasible"]
    assert len(refused) == 2 * 2 * 2
    assert refused["key"].is_unique
    for value in ("5000", "'many'"):
        assert refused["reason"].str.contains(f"thing.x = {value}", regex=False).sum() == 2 * 2
    assert sorted(refused["thing.x"].fillna(0)) == [0] * 4 + [5000] * 4
    assert (table["status"] == "ok").sum() == 2 * 2 * 3  # with the baselines, x = 0
    assert set(refused["baseline"]) <= set(table.loc[table["thing.x"] == 0, "key"])


@pytest.mark.slow
def test_any_number_of_jobs_gives_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chunked(monkeypatch, 50)
    monkeypatch.setattr(evaluators, "POOL_PAYS_S", 0.0)
    monkeypatch.setattr(evaluators, "_CALLS_PER_JOB", 2)
    bytes_of = []
    for jobs in (1, 2):
        run_study(planned(faults=FAULTS, batch=7, jobs=jobs), tmp_path / "results.parquet")
        bytes_of.append((tmp_path / "results.parquet").read_bytes())
    same = bytes_of[0] == bytes_of[1]
    assert same
    assert [path.name for path in tmp_path.iterdir()] == ["results.parquet"]


@pytest.mark.slow
def test_a_design_that_fails_inside_a_large_batch_is_one_failed_row_for_each_scenario(tmp_path: Path) -> None:
    ys = tuple(value / 8 for value in range(200))
    knobs = (Knob("thing.x", tuple(range(-100, 100))), Knob("thing.y", ys))
    plan = planned(knobs, fast=True)
    broken = replace(plan, spec=toy.spec((7, "raises"), fast=True))
    table = table_of(broken, tmp_path)
    failed = table[table["status"] == "failed"]
    assert len(failed) == 2 * len(ys)
    assert set(failed["thing.x"]) == {7}
    (reason,) = set(failed["reason"])
    assert reason.startswith("ZeroDivisionError: asked to fail (tests.toy, line ")
    assert len(table) == 2 * 200 * len(ys)
    assert table.loc[table["status"] == "ok", "ratio"].notna().all()


def test_no_half_table_is_left_of_a_study_that_is_interrupted(tmp_path: Path) -> None:
    looks = itertools.count()
    with pytest.raises(SignalInterrupt):
        run_study(planned(), tmp_path / "results.parquet", Services(stopping=lambda: next(looks) >= 2))
    assert next(looks) >= 3
    assert not list(tmp_path.iterdir())


MEASURE = """
import resource, sys
from pathlib import Path
from tests import toy
from dse.space import Knob
from dse.study.run import run
folder = Path(sys.argv[1])
with toy.installed(folder / "toy"):
    tree = toy.settings("exhaustive", 10_000_000)
    knobs = (Knob("thing.mode", ("flat", "bent")), Knob("thing.x", tuple(range(-250, 250))))
    knobs += (Knob("thing.y", tuple(value / 7 for value in range(int(sys.argv[2]) // 2000))),)
    plan = toy.planned(knobs, {**tree, "simulator": {"name": "toy", "backend": "toy", "fast": True}})
    found = run(plan, folder / "results.parquet")
print(found.num_rows, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


@pytest.mark.nightly
def test_a_million_points_take_hardly_more_memory_than_a_hundred_thousand(tmp_path: Path) -> None:
    counts = []
    for count in (100_000, 1_000_000):
        (folder := tmp_path / str(count)).mkdir()
        done = subprocess.run(
            [sys.executable, "-c", MEASURE, str(folder), str(count)],
            env={"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY}/tests", "PATH": ""},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        counts.append([int(word) for word in done.stdout.split()])
    (few, small), (more, large) = counts
    assert (few, more) == (100_000, 1_000_000)
    assert large - small < 150  # MiB; the table itself has over 200


# What is held of many rows


@given(st.lists(st.lists(st.integers(0, 15), max_size=12), max_size=12))
def test_hashes_are_new_once(chunks: list[list[int]]) -> None:
    seen, hashes = SeenHashes(), set[int]()
    for chunk in chunks:
        expected = []
        for number in chunk:
            expected.append(number not in hashes)
            hashes.add(number)
        assert (
            seen.add(np.array([(value, 7 * value) for value in chunk], np.uint64).reshape(-1, 2)).tolist() == expected
        )


@pytest.mark.more
@given(st.integers(1, 400))
@hypothesis_settings(max_examples=20)
def test_a_selection_keeps_the_winners_and_what_it_can_of_the_rest(large: Path, most: int) -> None:
    table, goals = pd.read_parquet(large), toy.goals()
    selection = select(large, goals, most)
    assert len(selection.table) == min(most, len(table))
    assert selection.complete == (most >= len(table))
    names = selection.table["key"] + selection.table["scenario"]
    assert list(names) == [name for name in table["key"] + table["scenario"] if name in set(names)]
    pd.testing.assert_frame_equal(selection.table, select(large, goals, most).table)
    if most >= 20:
        pd.testing.assert_frame_equal(
            Contest(Answer(baseline_may_win=True)).winners(selection.table, goals),
            Contest(Answer(baseline_may_win=True)).winners(table, goals),
        )
    if most >= 150:
        assert selection.table["on_front"].sum() == table["on_front"].sum()


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table of several row groups."""
    path = tmp_path_factory.mktemp("large") / "results.parquet"
    with pytest.MonkeyPatch.context() as patch:
        chunked(patch, 64)
        run_study(planned((*KNOBS[:3], Knob("thing.y", (0.0, 0.5, 1.0)))), path)
    return path
