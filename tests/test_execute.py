"""Evaluating: a wrong metric is said to be wrong, one bad design spoils no other, and jobs change nothing."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dse.backend import STATUSES, Batch, Metric, Result, Results, Status, check_results
from dse.errors import Broken, ConfigError
from dse.evaluation import evaluators
from dse.evaluation.calls import BackendSpec, validate
from dse.space import Points
from dse.store.contract import StorelessSession
from dse.values import Keys
from tests import toy

NUMBERS = st.one_of(st.floats(), st.integers(-(10**30), 10**30))


@pytest.fixture(autouse=True)
def installed(tmp_path: Path) -> Iterator[None]:
    with toy.installed(tmp_path):
        yield


def results(spec: BackendSpec, values: Sequence[int], jobs: int = 1) -> list[Result]:
    """Results of things of these x, one batch each."""
    batches = [Batch(thing) for thing in toy.things(values)]
    return [result[0] for result in toy.evaluate(spec, batches, jobs=jobs)]


def judged(result: Result, metrics: Mapping[str, Metric] = toy.METRICS) -> Result:
    """One result as it is after the check."""
    return check_results(Results.of([result]), metrics)[0]


# One result


@given(st.dictionaries(st.sampled_from(["time_s", "gain", "speed"]), NUMBERS))
def test_a_result_is_valid_exactly_when_it_has_all_metrics_and_no_other_each_finite_and_in_range(
    metrics: dict[str, float],
) -> None:
    legal = set(metrics) == set(toy.METRICS) and all(
        math.isfinite(value) and toy.METRICS[name].low <= value <= toy.METRICS[name].high
        for name, value in metrics.items()
    )
    result = judged(Result("ok", metrics, engine="toy"))
    assert result.status == ("ok" if legal else "invalid")
    assert result.engine == "toy"
    if not legal:
        assert not result.metrics
        assert any(name in result.reason for name in (*toy.METRICS, "speed"))


@pytest.mark.parametrize(
    ("fault", "name", "value", "why"),
    [
        ("nan", "time_s", "nan", "not a finite number"),
        ("inf", "time_s", "inf", "not a finite number"),
        ("-inf", "gain", "-inf", "not a finite number"),
        ("negative", "time_s", "-1e-300", "outside 0...inf"),
        ("too large", "gain", "2000000000.0", "outside"),
        ("bool", "time_s", "True", "not a finite number"),
        ("text", "time_s", "'1.0'", "not a finite number"),
        ("list", "gain", "[1.0]", "not a finite number"),
        ("none", "time_s", "None", "missing"),
        ("no time_s", "time_s", "None", "missing"),
        ("no gain", "gain", "None", "missing"),
        ("extra", "speed", "1.0", "not a metric"),
    ],
)
def test_a_wrong_metric_makes_the_result_invalid_and_is_named_with_its_value(
    fault: str, name: str, value: str, why: str
) -> None:
    before, wrong, after = results(toy.spec((2, fault)), [1, 2, 3])
    assert wrong.status == "invalid"
    assert f"{name} = {value}: " in wrong.reason
    assert why in wrong.reason
    assert before.status == after.status == "ok"


@given(st.lists(st.tuples(st.sampled_from(STATUSES), NUMBERS, NUMBERS), min_size=1, max_size=12))
def test_columns_are_judged_as_their_rows_are(rows: list[tuple[Status, float, float]]) -> None:
    """Of a row that is not ok nothing is asked, and a row that is wrong spoils no other."""
    rows_judged = [Result(status, {"time_s": time, "gain": gain}, "", "toy") for status, time, gain in rows]
    together = check_results(Results.of(rows_judged), toy.METRICS)
    assert [together[place] for place in range(len(rows))] == [judged(result) for result in rows_judged]


# A batch


@pytest.mark.slow
@given(st.lists(st.integers(-3, 6), min_size=1, max_size=12, unique=True), st.lists(st.floats(-2, 2), max_size=3))
def test_a_grid_holds_its_designs_in_order_however_it_is_split(xs: list[int], ys: list[float]) -> None:
    axes = {"thing.x": np.array(xs), **({"thing.y": np.array(ys)} if ys else {})}
    batch = Batch(Batch(toy.things([0])[0], axes).at(0), axes)
    expected = [(x, y) for x in xs for y in (ys or [0.0])]
    assert [(point.thing.x, point.thing.y) for point in batch.designs()] == expected  # type: ignore[attr-defined]
    assert batch.column("thing.x").tolist() == [x for x, _ in expected]
    assert [batch.at(place) for place in range(batch.size)] == list(batch.designs())
    for most in range(1, batch.size + 1):
        parts = list(batch.split(most))
        assert max(part.size for part in parts) <= most
        assert [point for part in parts for point in part.designs()] == list(batch.designs())
        assert [part.design for part in parts] == [next(part.designs()) for part in parts]


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 3, 100])
@given(values=st.lists(st.integers(-5, 5), max_size=20))
def test_a_design_that_fails_costs_one_result_and_no_other(batch: int, values: list[int]) -> None:
    outcomes = results(toy.spec((0, "raises"), (1, "unsupported"), batch=batch), values)
    alone = [results(toy.spec(), [value])[0] for value in values]
    assert len(outcomes) == len(values)
    for value, result, expected in zip(values, outcomes, alone, strict=True):
        if value == 0:
            assert result.status == "failed"
            assert result.reason.startswith("ZeroDivisionError: asked to fail (tests.toy, line ")
        elif value == 1:
            assert (result.status, result.reason) == ("unsupported", "asked to refuse")
        else:
            assert result == expected


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 3, 100])
@given(values=st.lists(st.integers(-5, 5), min_size=1, max_size=20, unique=True))
def test_a_grid_gives_what_its_designs_give_alone(batch: int, values: list[int]) -> None:
    """Whatever is cut or put together on the way, and whatever fails."""
    spec = toy.spec((0, "raises"), (1, "unsupported"), (2, "nan"), batch=batch)
    (together, single) = toy.evaluate(spec, [toy.grid(values), toy.grid(values[:1])])
    alone = results(spec, values)
    assert [together[place] for place in range(len(values))] == alone
    assert single[0] == alone[0]


@pytest.mark.slow
def test_batches_are_taken_and_results_given_as_they_are_needed() -> None:
    taken = 0

    def endless() -> Iterator[Batch]:
        nonlocal taken
        for x in itertools.count():
            taken += 1
            yield toy.grid([x % 100])

    stream = toy.evaluate(toy.spec(batch=5), endless())
    assert len(list(itertools.islice(stream, 5000))) == 5000
    assert taken <= 5000 + 600  # as many as are looked up together


@pytest.mark.slow
@given(st.integers(0, 30), st.integers(1, 8))
def test_progress_adds_up_to_the_number_of_designs(count: int, batch: int) -> None:
    seen: list[int] = []
    batches = [Batch(thing) for thing in toy.things(range(count))]
    assert len(list(toy.evaluate(toy.spec((3, "raises"), batch=batch), batches, seen=seen.append))) == count
    assert sum(seen) == count
    assert all(0 < done <= batch for done in seen)


def test_a_backend_that_loses_a_result_is_told_of_and_shifts_no_other() -> None:
    outcomes = results(toy.spec(batch=4, loses=True), range(6))
    assert len(outcomes) == 6
    good = results(toy.spec(batch=4), range(6))
    assert all(result == expected or result.status == "failed" for result, expected in zip(outcomes, good, strict=True))
    assert any(result.status == "failed" for result in outcomes)


def test_a_backend_is_made_once_and_refuses_parameters_it_does_not_have() -> None:
    assert toy.spec().make() is toy.spec().make()
    with pytest.raises(ConfigError, match=r"simulator.*colour"):
        BackendSpec("toy", (("colour", "red"),)).make()
    with pytest.raises(ConfigError, match="did you mean `toy`"):
        BackendSpec("toi", ()).make()


@pytest.mark.parametrize("value", [{"a": 1}, [1, 2]], ids=["mapping", "list"])
def test_a_parameter_of_any_kind_is_refused_by_name_where_the_backend_has_none(value: object) -> None:
    with pytest.raises(ConfigError, match=r"simulator.*colour"):
        BackendSpec.of({"name": "toy", "backend": "toy", "colour": value}).make()


def test_base_designs_are_refused_with_all_their_problems_at_once() -> None:
    thing = {**toy.PLAIN, "x": 5000, "mode": "round"}
    trees = {
        "a": {**toy.BASE, "thing": thing},
        "b": {**toy.BASE, "thing": {**toy.PLAIN, "x": 950}},
        "c": {**toy.BASE, "tool": {"size": 1, "wight": 1}},
    }
    with pytest.raises(ConfigError) as caught:
        validate(toy.Fixed(), trees)
    message = toy.refused(caught.value)
    for part in ("thing.x = 5000", "thing.mode = 'round'", "thing.x = 950: does not fit", "did you mean `tool.weight`"):
        assert part in message


# Several jobs


@pytest.mark.slow
def test_two_jobs_are_other_processes_and_give_the_same_results_in_the_same_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(evaluators, "POOL_PAYS_S", 0.0)  # start the workers for however little work
    values = [*range(40)]
    faults = [(5, "raises"), (7, "nan"), (9, "unsupported")]
    alone = results(toy.spec(*faults, batch=3), values)
    shared = results(toy.spec(*faults, batch=3), values, jobs=2)
    assert shared == alone
    processes = {
        result.metrics["gain"] for result in results(toy.spec(*((x, "worker") for x in values)), values, jobs=2)
    }
    assert processes - {float(os.getpid())}, "no worker process was started"


@pytest.mark.slow
def test_a_grid_goes_to_worker_processes_as_soon_as_they_pay_and_not_with_the_next_grid(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(evaluators, "POOL_PAYS_S", 1e-6)
    values = range(40)
    spec = toy.spec(*((value, "worker") for value in values), batch=1)
    (outcomes,) = toy.evaluate(spec, [toy.grid(values)], jobs=2)
    assert os.getpid() not in outcomes.column("gain")[1:]


# A backend that is broken


@pytest.mark.slow
@pytest.mark.parametrize("executor", [{}, {"memory_bytes": 1e12}], ids=["here", "in workers"])
def test_a_broken_backend_is_given_up_after_so_many_points_however_large_its_batches(
    executor: dict[str, Any],
) -> None:
    """Those of the batch, its half, and so on to a single one, and five of these."""
    broken = toy.spec(*((x, "raises") for x in range(512)), batch=512)
    session = Counted()
    with pytest.raises(Broken, match=r"5 points in a row failed alike .ZeroDivisionError"):
        list(toy.evaluate(broken, [toy.grid(range(512))], session=session, broken_after=5, **executor))
    assert session.recorded == 0
    if not executor:
        assert len(broken.make().evaluated) <= 10 + 8  # type: ignore[attr-defined]


class Counted(StorelessSession):
    """A session that counts what is recorded."""

    recorded = 0

    def record(self, points: Points, results: Results, done: Sequence[Keys], *, idle: bool = False) -> list[Results]:
        self.recorded += results.size
        return super().record(points, results, done, idle=idle)


# Twice


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 2])
def test_what_is_evaluated_twice_is_invalid_where_the_second_process_finds_otherwise(
    jobs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = toy.grid(range(40))
    (alike,) = toy.evaluate(toy.spec(), [batch], jobs=jobs, recheck=1.0)
    assert alike.ok.all()
    formula = toy.formula
    monkeypatch.setattr(toy, "formula", lambda point: {**formula(point), "time_s": formula(point)["time_s"] * 1.001})
    (checked_twice,) = toy.evaluate(toy.spec(), [batch], recheck=1.0)  # here; a worker knows nothing of the change
    assert {row.status for row in map(checked_twice.__getitem__, range(40))} == {"invalid"}
    assert "evaluated twice, time_s was" in checked_twice[0].reason
    (sample,) = toy.evaluate(toy.spec(), [batch], recheck=0.3)
    assert 0 < (~sample.ok).sum() < 40
    (none,) = toy.evaluate(toy.spec(), [batch])
    assert none.ok.all()
