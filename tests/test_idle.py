"""Knobs that change nothing: one point each, whatever was asked for, and none among what the shipped studies search."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dse.backend import Batch, Canonical, Results
from dse.config.compose import request
from dse.results.idle_axes import idle_axes
from dse.results.pareto import outcome_keys
from dse.space import Points, Space
from dse.study.plan import Plan, plan
from dse.study.run import run
from dse.values import put
from tests.support import backend, design, drawn
from tests.test_config import planned
from tests.test_conformance import DISTINCT
from tests.test_grids import batches, evaluated

STUDIES = sorted(path.stem for path in Path("conf/study").glob("*.yaml"))
NARROWED = {
    "ficco_unseen": ["workload=ficco"],
}
PRIORITIES = ["equal", "communication", "compute"]


@pytest.mark.slow
@drawn(60)
@given(schedule=st.sampled_from(DISTINCT), data=st.data())
def test_a_knob_that_is_called_idle_changes_a_result_by_rounding_at_most(schedule: str, data: st.DataObject) -> None:
    simulator = backend(data.draw(st.sampled_from(["fluid", "event"])))
    batch = data.draw(batches(schedule))
    assert isinstance(simulator, Canonical)
    for path, value in simulator.neutral(batch.design).items():
        if path in batch.axes:
            continue
        other = Batch(put(batch.design, path, value), batch.axes)
        (idle,) = simulator.idle([batch], path, value)
        for same_result, neutral, same in zip(
            evaluated(simulator, batch), evaluated(simulator, other), idle, strict=True
        ):
            if same:
                assert (same_result.status, same_result.reason, same_result.engine) == (
                    neutral.status,
                    neutral.reason,
                    neutral.engine,
                )
                assert same_result.metrics == pytest.approx(neutral.metrics, rel=1e-9, abs=1e-15)


def _priorities(**fixed: Any) -> dict[str, tuple[bool, float]]:
    """Whether each priority is called idle, and its makespan [s]."""
    simulator = backend("fluid")
    makespans = {}
    for priority in PRIORITIES:
        batch = Batch(
            design("uniform_fused_1d", {"schedule.priority": priority, "schedule.comm_engine": "dma", **fixed})
        )
        ((idle,),) = simulator.idle([batch], "schedule.priority", "equal")
        makespans[priority] = (bool(idle), evaluated(simulator, batch)[0].metrics["makespan_s"])
    return makespans


@pytest.mark.slow
def test_a_priority_counts_where_the_memory_can_be_over_subscribed() -> None:
    wide = _priorities()
    assert all(idle for idle, _ in wide.values())
    assert len({makespan for _, makespan in wide.values()}) == 1
    narrow = _priorities(**{"system.gpu.hbm_bytes_per_s": 4e11})
    assert [idle for idle, _ in narrow.values()] == [True, False, False]
    assert len({makespan for _, makespan in narrow.values()}) == 3


@pytest.mark.slow
def test_the_shape_of_one_piece_is_one_point() -> None:
    space = next(iter(planned("study=ficco", "workload=ficco", "schedule.comm_engine=dma").spaces.values()))
    for pieces, points in ((1, 1), (2, 2)):
        chosen = {"schedule.num_chunks": pieces, "schedule.local_shard_first": False, "schedule.compute": "fused"}
        blocks = [block for dim in ("m", "k") for block in space.resolve({**chosen, "schedule.chunk_dim": dim})]
        assert len({block.content_keys().tobytes() for block in blocks}) == points


@pytest.mark.slow
def test_a_point_holds_the_value_that_stands_for_all_and_none_is_lost() -> None:
    space = next(iter(planned("study=ficco_sweep", "workload.only=[g4]").spaces.values()))
    blocks = list(space.blocks(1 << 16))
    assert {point["schedule.priority"] for block in blocks for point in block.assignments()} == {"equal"}
    assert sum(block.size for block in blocks) == space.size()
    for block in blocks:
        assert block.values_at("schedule.priority") == "equal"


@given(st.data())
def test_blocks_of_like_marks_hold_every_point_once(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    axes = {f"system.gpu.{name}": np.arange(size) for name, size in zip("abc", sizes, strict=False)}
    marks = np.array(data.draw(st.lists(st.booleans(), min_size=int(np.prod(sizes)), max_size=int(np.prod(sizes)))))
    block = Points({}, axes, None)
    expected = Counter((*point.values(), bool(mark)) for point, mark in zip(block.assignments(), marks, strict=True))
    parts = [(part, mark) for part, mark in block.runs(marks)]
    assert Counter((*point.values(), mark) for part, mark in parts for point in part.assignments()) == expected


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.sampled_from([0.0, -0.0, 1.5])), min_size=1))
def test_outcomes_are_told_apart_by_scenario_and_every_metric(rows: list[tuple[int, int, float]]) -> None:
    scenarios, *metrics = (np.array(column) for column in zip(*rows, strict=True))
    keys = outcome_keys([column.astype(float) for column in metrics], scenarios)
    assert len({tuple(key) for key in keys.tolist()}) == len({(a, b, c + 0.0) for a, b, c in rows})


def test_the_axes_over_which_a_knob_changes_nothing_are_counted() -> None:
    rows = [(a, b, c, float(a * b)) for a in (0, 1) for b in (1, 2, 3) for c in "xy"]
    table = pd.DataFrame(rows, columns=["a", "b", "c", "time_s"]).assign(scenario="one", status="ok")
    by_path = {axes.path: axes for axes in idle_axes(table, ["a", "b", "c"], ["time_s"])}
    assert (by_path["b"].idle, by_path["b"].count) == (2, 4)
    assert by_path["c"].changes_nothing and str(by_path["c"]) == "c"
    assert "a" not in by_path


@pytest.mark.more
def test_a_table_has_each_outcome_of_the_flagship_once_and_so_do_its_fronts(tmp_path: Path) -> None:
    planned_study = plan(request(["study=ficco_sweep", "workload.only=[g4,g14]", "simulator=fluid", "executor.jobs=1"]))
    summary = run(planned_study, tmp_path / "results.parquet")
    table = pd.read_parquet(tmp_path / "results.parquet")
    metrics = list(planned_study.backend.metrics)
    assert summary.num_rows == summary.num_outcomes == len(table.drop_duplicates(["scenario", *metrics]))
    front = table[table["on_front"]]
    assert len(front) == summary.front_size == len(front.drop_duplicates(["scenario", *metrics]))


def _axes_at(space: Space, planned_study: Plan, path: str, chance: random.Random) -> list[tuple[int, int]]:
    """(points, outcomes) on some axes of a knob: lines through random points along which it alone changes."""
    knob = next(knob for knob in space.knobs if knob.path == path)
    axes = []
    for _ in range(2):
        point = space.walk(lambda axis: chance.choice(axis.values))
        if path not in point:
            continue
        values = [
            space.active({**point, path: value}) for value in chance.sample(knob.values, min(4, len(knob.values)))
        ]
        blocks = {block.content_keys().tobytes(): block for value in values for block in space.resolve(value)}
        legal = [block for block in blocks.values() if block.batch is not None]
        results = (
            Results.join(planned_study.backend.evaluate([block.batch for block in legal if block.batch]))
            if legal
            else None
        )
        if results is not None and results.ok.sum() > 1:
            columns = [results.column(name)[results.ok] for name in planned_study.backend.metrics]
            keys = outcome_keys([np.nan_to_num(column, nan=-1.0) for column in columns], np.zeros(len(columns[0]), int))
            axes.append((len(keys), len({tuple(key) for key in keys.tolist()})))
    return axes


@pytest.mark.more
@pytest.mark.one_in(11)
@pytest.mark.parametrize("study", STUDIES)
def test_no_knob_of_a_shipped_study_changes_nothing_wherever_it_is_varied(study: str) -> None:
    planned_study, chance = planned(f"study={study}", *NARROWED.get(study, [])), random.Random(0)
    varied: dict[str, list[tuple[int, int]]] = defaultdict(list)
    names = list(planned_study.spaces)
    for name in chance.sample(names, min(8, len(names))):
        space = planned_study.spaces[name]
        for knob in space.knobs:
            if knob.values:
                varied[knob.path] += _axes_at(space, planned_study, knob.path, chance)
    idle = [path for path, axes in varied.items() if len(axes) > 1 and all(outcomes == 1 for _, outcomes in axes)]
    assert not idle
