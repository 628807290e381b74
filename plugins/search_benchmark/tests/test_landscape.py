"""Searches on spaces that are known point by point: what is told of them is what brute force finds."""

from __future__ import annotations

import moocore
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.search import quality
from dse.backend import Batch, Result
from dse.errors import ConfigError
from dse.search import Search, explore
from dse_search_benchmark.backend import (
    LandscapeBackend,
    LandscapePoints,
    Progress,
    SearchRun,
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


def test_the_true_front_is_what_no_point_dominates(truth: LandscapePoints) -> None:
    values = np.array([list(outcome.values()) for outcome in truth.outcomes if outcome is not None])
    undominated = [row for row in values if not ((values <= row).all(axis=1) & (values < row).any(axis=1)).any()]
    assert 1 < len(truth.front) == len(np.unique(undominated, axis=0))
    assert truth.hypervolume(range(truth.size)) == pytest.approx(1.0)
    assert truth.distance(range(truth.size)) == pytest.approx(0.0, abs=1e-12)


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


@pytest.mark.slow
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


def test_a_budget_is_a_share_of_the_distinct_outcomes_with_the_baseline_counted(truth: LandscapePoints) -> None:
    assert (
        truth.num_distinct
        == len({tuple(outcome.values()) for outcome in truth.outcomes if outcome is not None})
        <= truth.size
    )
    progress = Progress.of(truth, SearchRun(method="random"), 9)
    assert len(progress.rows) == 9
    assert LandscapeBackend(shares=[10 / truth.num_distinct])._budgets(truth) == [9]


@pytest.mark.slow
def test_a_point_beyond_a_limit_is_on_no_front_and_adds_nothing(truth: LandscapePoints) -> None:
    metric, most = (
        "peak_staging_bytes",
        np.median([outcome["peak_staging_bytes"] for outcome in truth.outcomes if outcome]),
    )
    limited = evaluated_points((*COMMAND, f"+study.limits.{metric}.high={most:.0f}"))
    beyond = [row for row, outcome in enumerate(limited.outcomes) if outcome is not None and outcome[metric] > most]
    assert beyond
    assert limited.size == truth.size
    assert limited.hypervolume(beyond) == 0.0
    assert limited.hypervolume([row for row in range(limited.size) if row not in beyond]) == pytest.approx(1.0)


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


@pytest.mark.slow
def test_a_study_of_several_scenarios_is_no_landscape() -> None:
    with pytest.raises(ConfigError, match="choose one, such as"):
        evaluated_points(("study=ficco_sweep", "workload.only=[g4,g5]"))


@pytest.mark.parametrize("shares", [[], [0.5, 0.1], [0.0, 0.5], [0.5, 1.5]])
def test_shares_must_ascend_within_the_space(shares: list[float]) -> None:
    with pytest.raises(ConfigError, match=r"simulator\.shares"):
        LandscapeBackend(shares=shares)


def row(scenario: str, method: str, seed: int, share: float) -> dict[str, object]:
    """A search that ends at a share of the hypervolume."""
    reached = {column("hypervolume", at): share for at in (0.005, 0.01, 0.02)}
    return {
        **{"scenario": scenario, "run.method": method, "run.seed": seed, "status": "ok"},
        **reached,
        **{"points_to_95": 100.0 * seed, "missed_hypervolume": 1 - share, "repeats": 0.0},
    }


def test_the_figures_of_the_search_are_its_worst_median_and_its_worst_gap() -> None:
    rows = [
        *(row("one", "auto", seed, share) for seed, share in enumerate((0.90, 0.98, 0.99))),
        *(row("two", "auto", seed, share) for seed, share in enumerate((0.95, 0.96, 0.97))),
        *(row("one", "tpe", seed, share) for seed, share in enumerate((0.97, 0.97, 0.97))),
        *(row("two", "random", seed, share) for seed, share in enumerate((0.10, 0.99, 1.00))),
    ]
    figures = quality(pd.DataFrame(rows))
    assert figures["spaces"] == 2
    assert figures["auto_worst_hypervolume_at_2pct"] == pytest.approx(0.96)
    assert figures["auto_worst_gap_to_best"] == pytest.approx(0.99 - 0.96)
    assert figures["duplicates"] == 0
    assert figures["auto_behind"] == []  # three seeds each are not enough to tell
    assert figures["seeds"] == 3
    ahead = [*rows[:6], *(row("one", "tpe", seed, 0.995) for seed in range(8))]
    (behind, *_) = quality(pd.DataFrame(ahead))["auto_behind"]
    assert (behind["space"], behind["method"]) == ("one", "tpe")
    assert behind["gap"] == pytest.approx(0.995 - 0.98)
    assert figures["points_to_95"]["one"] == {"auto": 2.0 * 100, "tpe": 100.0, "random": None}
