"""Importance of knobs, on tables whose truth is known."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from dse.cli import main
from dse.errors import ConfigError
from dse_learning.importance import FEWEST, METHODS, Assessment, assess
from tests.swept import Row, grid, written

SCENARIOS: dict[str, Row] = {"small": {}, "large": {}}
KNOBS: dict[str, Sequence[Any]] = {
    "a.x": [1, 2, 4, 8],
    "a.noise": [1, 2, 3, 4],
    "a.kind": ["left", "right", "both"],
    "a.on": [False, True],
}
ONE = {"time_s": "minimize"}


def judged(formula: Any, method: str, knobs: Any = KNOBS, goals: Any = ONE) -> Assessment:
    """Importance of a formula over the grid of some knobs, in two scenarios."""
    table = grid(SCENARIOS, knobs, formula)
    return assess(table, goals, list(knobs), METHODS[method], seed=1)


def shares(assessment: Assessment, objective: str = "time_s") -> dict[str, float]:
    """Knob -> mean share."""
    return {share.knob: share.mean for share in assessment.found if share.objective == objective}


@pytest.mark.parametrize("method", METHODS)
def test_the_knob_that_matters_is_told_from_those_that_do_not(method: str) -> None:
    assessment = judged(lambda point: {"time_s": 10 - point["a.x"]}, method)
    means = shares(assessment)
    assert means["a.x"] > 0.9
    assert max(means["a.noise"], means["a.kind"], means["a.on"]) < 0.05
    assert assessment.knobs[0] == "a.x"


@pytest.mark.slow
def test_ped_anova_says_that_a_knob_is_noise() -> None:
    scenarios: dict[str, Row] = {f"s{number}": {} for number in range(8)}
    table = grid(scenarios, KNOBS, lambda _: {"time_s": 1.0})
    table["time_s"] = np.random.default_rng(1).random(len(table))
    assessment = assess(table, ONE, list(KNOBS), METHODS["ped_anova"], seed=1)
    assert all(share.above_noise is not None and share.above_noise <= 4 for share in assessment.found)
    real = judged(lambda point: {"time_s": 10 - point["a.x"]}, "ped_anova").of("time_s", "a.x")
    assert real is not None
    assert real.above_noise == len(SCENARIOS)


def test_the_shares_of_ped_anova_add_up_and_those_of_fanova_leave_room_for_interactions() -> None:
    def both(point: Row) -> Row:
        return {"time_s": point["a.x"] * (2.0 if point["a.on"] else 1.0)}

    assert sum(shares(judged(both, "ped_anova")).values()) == pytest.approx(1)
    assessment = judged(both, "fanova")
    assert sum(shares(assessment).values()) + assessment.interactions["time_s"] == pytest.approx(1, abs=1e-6)
    assert 0 < assessment.interactions["time_s"] < 0.5


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_larger_is_better_where_the_objective_says_so(method: str) -> None:
    """The best tenth holds the largest values, so the knob that lifts the top alone matters to PED-ANOVA."""

    def top(point: Row) -> Row:
        return {"gain": 100.0 if point["a.x"] == 8 else 1.0, "time_s": -100.0 if point["a.x"] == 8 else -1.0}

    more, less = (judged(top, method, goals=goals) for goals in ({"gain": "maximize"}, ONE))
    assert shares(more, "gain") == pytest.approx(shares(less))


def conditional(point: Row) -> Row:
    """`a.x` counts for `left` only, where it decides everything."""
    left = point["a.kind"] == "left"
    return {"time_s": 1.0 + point["a.x"] if left else 20.0, "a.x": point["a.x"] if left else None}


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_knob_that_some_points_lack_is_judged_by_those_that_have_it(method: str) -> None:
    assessment = judged(conditional, method)
    share = assessment.of("time_s", "a.x")
    assert share is not None
    assert share.active == pytest.approx(1 / 3)
    assert share.mean > (0.9 if method == "fanova" else 0.3)
    assert shares(assessment)["a.noise"] < 0.05


def test_scenarios_are_judged_by_themselves_whatever_their_scale() -> None:
    """A thousand times the values in one of them change nothing; mean and range are over scenarios."""

    def formula(scale: float) -> Any:
        return lambda point: {"time_s": scale * point["size"] * (point["a.x"] + 0.1 * point["a.noise"])}

    def told(scale: float) -> Assessment:
        table = grid({"a": {"size": 1.0}, "b": {"size": scale}}, KNOBS, formula(1.0))
        return assess(table, ONE, list(KNOBS), METHODS["ped_anova"])

    near, far = told(1.0), told(1000.0)
    assert shares(far) == pytest.approx(shares(near))
    assert all(share.low <= share.mean <= share.high for share in far.found)
    assert all(set(share.shares) == {"a", "b"} for share in far.found)


def test_what_cannot_be_judged_is_left_out_with_the_reason() -> None:
    knobs: dict[str, Sequence[Any]] = {**KNOBS, "a.fixed": [7]}
    table = grid(SCENARIOS, knobs, lambda point: {"time_s": point["a.x"], "held_bytes": 1.0})
    tiny = grid(
        {"tiny": {}}, {"a.x": [1, 2], "a.noise": [1], "a.kind": ["left"], "a.on": [True]}, lambda _: {"time_s": 1.0}
    )
    goals = {"time_s": "minimize", "held_bytes": "minimize"}
    assessment = assess(pd.concat([table, tiny.assign(held_bytes=1.0)]), goals, list(knobs), METHODS["ped_anova"])
    assert assessment.objectives == ("time_s",)
    assert "one value" in assessment.left_out["a.fixed"]
    assert "one value" in assessment.left_out["held_bytes of scenario small"]
    assert str(FEWEST) in assessment.left_out["scenario tiny"]


@pytest.mark.more
def test_of_a_long_table_the_same_sample_is_taken_every_time_and_it_is_said() -> None:
    knobs: dict[str, Sequence[Any]] = {**KNOBS, "a.y": list(range(12))}
    table = grid(SCENARIOS, knobs, lambda point: {"time_s": 10 - point["a.x"] + 0.01 * point["a.y"]})
    assessment, again = (assess(rows, ONE, list(knobs), METHODS["fanova"]) for rows in (table, table.iloc[::-1]))
    assert (assessment.looked_at, assessment.num_ok) == (2 * METHODS["fanova"].most, len(table))
    assert shares(assessment)["a.x"] > 0.9
    assert shares(again)["a.x"] > 0.9


@pytest.mark.more
@pytest.mark.parametrize("method", METHODS)
def test_the_command_writes_table_and_figures_and_names_its_method(
    method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def formula(point: Row) -> Row | None:
        return (
            None if point["a.x"] == 8 and point["a.on"] else {**conditional(point), "held_bytes": 2.0 + point["a.on"]}
        )

    folder = written(tmp_path, grid(SCENARIOS, KNOBS, formula), list(KNOBS))
    assert main(["results", "importance", "study=toy", f"method={method}", f"output_dir={tmp_path}"]) == 0
    output = capsys.readouterr().out
    assert METHODS[method].title in output
    assert "24 infeasible" in output
    assert "33 %" in output
    for kind in ("png", "svg"):
        assert (folder / "figures" / f"importance_{method}.{kind}").stat().st_size > 1000
    stored = json.loads((folder / "importance.json").read_text("utf-8"))
    assert set(stored) == {method}
    flat = pd.read_csv(folder / "importance.csv")
    assert set(flat["method"]) == {method}
    assert {"objective", "knob", "mean", "low", "high", "active"} <= set(flat)


def test_a_table_that_says_nothing_is_refused_with_the_way_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = grid(SCENARIOS, {"a.x": [1, 2]}, lambda point: {"time_s": point["a.x"], "held_bytes": 1.0})
    with pytest.raises(ConfigError, match="larger budget"):
        assess(few, ONE, ["a.x"], METHODS["fanova"])
    still = grid(SCENARIOS, {"a.x": [1], "a.y": list(range(60))}, lambda _: {"time_s": 1.0})
    with pytest.raises(ConfigError, match="no knob with two values"):
        assess(still, ONE, ["a.x"], METHODS["fanova"])
    folder = written(tmp_path, few, ["a.x"])
    words = ["results", "importance", "study=toy", f"output_dir={tmp_path}"]
    assert main(words) == 2
    assert main([*words, "method=shap"]) == 2
    (folder / "summary.json").unlink()
    assert main(words) == 2
    assert main(["results", "importance", "study=tyo", f"output_dir={tmp_path}"]) == 2
    assert main(["results", "importance", "study=toy/1999", f"output_dir={tmp_path}"]) == 2
    message = capsys.readouterr().err
    for part in (
        "rows with a result",
        "ped_anova",
        "summary.json",
        "type the study's command again",
        "did you mean `toy`",
    ):
        assert part in message
