"""What physics demands of results: real ones obey it, and one that does not is invalid, with the law that it breaks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conftest import backend
from hypothesis import given
from hypothesis import strategies as st
from test_config import planned
from test_conformance import DISTINCT
from test_grids import batches

from dse.backend import STATUSES, Law, Lawful, Result, Results, check_laws
from dse.evaluation.calls import call

STUDIES = ["study=bert", "study=seqpoint", "study=cache_policies"]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", DISTINCT)
@given(data=st.data())
def test_every_overlap_obeys_its_laws(schedule: str, data: st.DataObject) -> None:
    simulator = backend(data.draw(st.sampled_from(["fluid", "event"])))
    (results,) = simulator.evaluate([data.draw(batches(schedule))])
    assert check_laws(results, simulator.laws) is results


@pytest.mark.slow
@pytest.mark.parametrize("study", STUDIES)
def test_what_other_backends_find_obeys_their_laws(study: str) -> None:
    found = planned(study, *(["applications=[fw_act]"] if "cache" in study else []))
    assert isinstance(found.backend, Lawful) and found.backend.laws
    block = next(next(iter(found.spaces.values())).blocks(64))
    assert block.batch is not None
    (results,) = call(found.spec, [block.batch])
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
    found = check_laws(changed, simulator.laws)
    assert found[place].status == "invalid" and "cannot be true: " in found[place].reason
    others = np.arange(results.size) != place
    np.testing.assert_array_equal(found.status[others], results.status[others])


def _results(*columns: dict[str, Any]) -> Results:
    return Results.of([Result("ok", column) for column in columns])


def test_rounding_breaks_no_law_and_equality_has_two_sides() -> None:
    above = Law("a <= b", lambda c: c["a"], lambda c: c["b"])
    same = Law("a = b", lambda c: c["a"], lambda c: c["b"], equal=True)
    rows = _results({"a": 1.0, "b": 1.0 - 1e-12}, {"a": 1.0, "b": 2.0}, {"a": 2.0, "b": 1.0})
    assert [STATUSES[code] for code in check_laws(rows, [above]).status] == ["ok", "ok", "invalid"]
    assert [STATUSES[code] for code in check_laws(rows, [same]).status] == ["ok", "invalid", "invalid"]
