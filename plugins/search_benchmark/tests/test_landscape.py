"""Searches on spaces that are known point by point: what is told of them is what brute force finds."""

from __future__ import annotations

import moocore
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dse.backend import Batch, Result
from dse.search import Search, explore
from dse_search_benchmark.backend import (
    LandscapeBackend,
    LandscapePoints,
    column,
    evaluated_points,
)

COMMAND = ("study=ficco_sweep", "workload.only=[g4]", "study.objectives=[makespan_s,peak_staging_bytes]")
SHARES = [0.05, 0.2, 1.0]


@pytest.fixture(scope="module")
def truth() -> LandscapePoints:
    return evaluated_points(COMMAND)


def run(method: str, seed: int = 0) -> Result:
    """A search on the landscape."""
    simulator = LandscapeBackend(shares=SHARES)
    tree = {"landscape": {"command": list(COMMAND)}, "run": {"method": method, "seed": seed, "batch": 8}}
    return simulator.evaluate([Batch(simulator.design(tree))])[0][0]


@pytest.mark.slow
def test_every_point_of_the_space_is_known_with_the_metrics_that_a_study_finds(truth: LandscapePoints) -> None:
    space = truth.question.space
    assert space.size() == 261
    assert set(truth.rows(list(space.points()))) == set(range(truth.size))
    assert truth.size == 87  # schedule.priority changes nothing in any of them
    for point in list(space.points())[::37]:
        (results,) = space.backend.evaluate([Batch(space.backend.design(space.tree(point)))])
        (row,) = truth.rows([point])
        outcome = truth.outcomes[row]
        assert outcome is not None
        assert outcome == pytest.approx({name: results[0].metrics[name] for name in truth.question.goals}, rel=1e-12)


@pytest.mark.slow
@given(st.lists(st.integers(0, 86), min_size=1, max_size=40), st.integers(0, 86))
@settings(max_examples=40, deadline=None)
def test_another_point_never_lowers_the_hypervolume_nor_adds_to_the_distance(
    truth: LandscapePoints, rows: list[int], more: int
) -> None:
    assert truth.hypervolume([*rows, more]) >= truth.hypervolume(rows) - 1e-12
    assert truth.distance([*rows, more]) <= truth.distance(rows) + 1e-12
    inside = truth.values[rows][(truth.values[rows] < 1.1).all(axis=1)]
    share = moocore.hypervolume(inside, ref=[1.1, 1.1]) / moocore.hypervolume(truth.front, ref=[1.1, 1.1])
    assert truth.hypervolume(rows) == pytest.approx(share)


@pytest.mark.nightly
@pytest.mark.parametrize("method", ["auto", "archive", "random"])
def test_progress_is_what_a_search_of_the_same_seed_found(truth: LandscapePoints, method: str) -> None:
    figures = run(method, seed=5).metrics
    again = [run(method, seed=5).metrics[column("hypervolume", share)] for share in SHARES]
    volumes = [figures[column("hypervolume", share)] for share in SHARES]
    assert volumes == again
    assert volumes[0] <= volumes[-1]
    assert volumes[-1] == pytest.approx(1.0 - figures["missed_hypervolume"])
    assert figures["missed_hypervolume"] < 0.05
    assert figures["repeats"] == 0.0
    assert 1 <= int(figures["points_to_95"]) <= truth.size


@pytest.mark.slow
def test_a_search_is_credited_from_the_first_point_at_which_it_has_enough(truth: LandscapePoints) -> None:
    rows: list[int] = []

    def evaluate(points):  # type: ignore[no-untyped-def]
        rows.extend(truth.rows(points))
        return [truth.outcomes[row] for row in truth.rows(points)]

    how = {"seed": 3, "trials": truth.size, "evaluate": evaluate, "identify": truth.name, "legal": truth.legal}
    how["trials"] = truth.num_distinct - 1  # of the largest budget
    explore(truth.question.__class__(**{**vars(truth.question), **how}), Search(name="random", batch=8))
    until = int(run("random", seed=3).metrics["points_to_95"])
    assert truth.hypervolume(rows[:until]) >= 0.95
    assert truth.hypervolume(rows[: until - 1]) < 0.95
