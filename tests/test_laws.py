"""What physics demands of results: real ones obey it, and one that does not is invalid, with the law that it breaks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dse.backend import STATUSES, Backend, Batch, Columns, Law, Lawful, Result, Results, check_laws
from dse.config.options import list_options
from dse.errors import ConfigError
from dse.evaluation.calls import call
from simulators.overlap.metrics import RELATIONS
from tests.support import SYSTEMS, backend, design_tree, drawn, shipped
from tests.test_config import planned
from tests.test_conformance import DISTINCT
from tests.test_grids import batches

STUDIES = [f"study={name}" for name in ("whole_models", "bert", "seqpoint") if name in list_options("study")]


@pytest.mark.slow
@drawn(100)
@given(schedule=st.sampled_from(DISTINCT), data=st.data())
def test_every_overlap_obeys_its_laws(schedule: str, data: st.DataObject) -> None:
    simulator = backend(data.draw(st.sampled_from(["fluid", "event"])))
    (results,) = simulator.evaluate([data.draw(batches(schedule))])
    assert check_laws(results, simulator.laws) is results


def assert_no_gain_is_impossible(simulator: Backend, point: Columns, baseline: Columns) -> None:
    """All relations lie in their legal ranges; where nothing moves, nothing is a share of an ideal."""
    for name, column in simulator.relate(point, baseline).items():
        numbers = column[np.isfinite(column)]
        assert ((RELATIONS[name].low <= numbers) & (numbers <= RELATIONS[name].high)).all(), name
        assert (np.isfinite(column) | (point["comm_s"] == 0)).all(), name


@pytest.mark.slow
@drawn(100)
@given(schedule=st.sampled_from(DISTINCT), data=st.data(), factor=st.floats(0.1, 10))
def test_no_point_passes_its_ideal_whatever_it_is_compared_with(
    schedule: str, data: st.DataObject, factor: float
) -> None:
    simulator = backend("fluid")
    (results,) = simulator.evaluate([data.draw(batches(schedule))])
    if not results.ok.any():
        return
    point = {name: column[results.ok] for name, column in results.metrics.items()}
    assert_no_gain_is_impossible(simulator, point, {**point, "makespan_s": factor * point["makespan_s"]})


@pytest.mark.one_in(5, 1)
@pytest.mark.slow
@pytest.mark.parametrize("system", SYSTEMS)
def test_no_schedule_passes_its_ideal_on_a_shipped_machine(system: str) -> None:
    simulator, points = backend("fluid"), []
    for schedule in ("serial", *DISTINCT):
        tree = design_tree(schedule, pattern="all_gather", shape=(8192, 8192, 4096))
        try:
            design = simulator.design({**tree, "system": shipped("system")[system]})
        except ConfigError:
            continue
        (result,) = simulator.evaluate([Batch(design)])
        points += [result.metrics] if result.ok.all() else []
    for point in points:
        assert_no_gain_is_impossible(simulator, point, points[0])


@pytest.mark.slow
@pytest.mark.parametrize("study", STUDIES)
def test_what_other_backends_find_obeys_their_laws(study: str) -> None:
    planned_study = planned(study)
    assert isinstance(planned_study.backend, Lawful) and planned_study.backend.laws
    block = next(next(iter(planned_study.spaces.values())).blocks(64))
    assert block.batch is not None
    (results,) = call(planned_study.spec, [block.batch])
    assert results.ok.all()


@pytest.mark.slow
@given(st.data())
def test_a_result_that_breaks_a_law_is_invalid_and_says_which(data: st.DataObject) -> None:
    simulator = backend("fluid")
    (results,) = simulator.evaluate([data.draw(batches("hetero_fused_1d"))])
    place = data.draw(st.integers(0, results.size - 1))
    if not results.ok[place]:
        return
    metrics = {name: column.copy() for name, column in results.metrics.items()}
    metrics["makespan_s"][place] *= data.draw(st.sampled_from([0.5, 1.001, 3.0]))
    changed = Results(results.status, metrics, results.reason, results.engine, results.texts)
    outcomes = check_laws(changed, simulator.laws)
    assert outcomes[place].status == "invalid" and "cannot be true: " in outcomes[place].reason
    elsewhere = np.arange(results.size) != place
    np.testing.assert_array_equal(outcomes.status[elsewhere], results.status[elsewhere])


def _results(*columns: dict[str, Any]) -> Results:
    return Results.of([Result("ok", column) for column in columns])


def test_rounding_breaks_no_law_and_equality_has_two_sides() -> None:
    above = Law("a <= b", lambda c: c["a"], lambda c: c["b"])
    same = Law("a = b", lambda c: c["a"], lambda c: c["b"], equal=True)
    rows = _results({"a": 1.0, "b": 1.0 - 1e-12}, {"a": 1.0, "b": 2.0}, {"a": 2.0, "b": 1.0})
    assert [STATUSES[code] for code in check_laws(rows, [above]).status] == ["ok", "ok", "invalid"]
    assert [STATUSES[code] for code in check_laws(rows, [same]).status] == ["ok", "invalid", "invalid"]
