"""Two finished runs side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from dse.analysis.compare import (
    REFERENCE,
    ComparedPoints,
    Pair,
    compare_runs,
    differences,
    flat,
    made_otherwise,
)
from dse.cli import main
from dse.results.run_folder import FinishedRun
from tests.swept import grid, written

KNOBS = {"a.x": list(range(6)), "a.y": list(range(6))}


def table(shift: float = 0.0, scenarios: tuple[str, ...] = ("s1", "s2")) -> pd.DataFrame:
    """A front that falls, better by `shift`, and what lies behind it."""

    def formula(point: Any) -> Any:
        x, y = point["a.x"], point["a.y"]
        return {"time_s": 10.0 + x + y - shift, "held_bytes": 20.0 - x + y * 2 - shift}

    return grid({name: {} for name in scenarios}, KNOBS, formula)


def runs(root: Path, first: pd.DataFrame, second: pd.DataFrame, **about: Any) -> tuple[Path, Path]:
    """Two runs of one study; about: of the second."""
    return written(root, first, list(KNOBS), time="2026-01-01_00-00-00"), written(
        root, second, list(KNOBS), **{"time": "2026-01-02_00-00-00", **about}
    )


def points(values: Any) -> ComparedPoints:
    """Points evaluated one after the other."""
    return ComparedPoints(np.asarray(values, float), np.arange(1, len(values) + 1), len(values))


# Fronts

FRONTS = arrays.arrays(float, st.tuples(st.integers(1, 12), st.just(3)), elements=st.integers(0, 6).map(float))


@pytest.mark.slow
@given(FRONTS, FRONTS)
def test_what_is_told_of_two_fronts_is_mirrored_when_they_change_places(first: Any, other: Any) -> None:
    row, mirrored = (Pair("s", points(a), points(b)).row(factors=False) for a, b in ((first, other), (other, first)))
    for name in ("evaluated", "front", "dominated", "hypervolume", "epsilon"):
        assert row[name] == pytest.approx(mirrored[name][::-1]), name
    for name in ("equal", "ideal", "reference"):
        assert row[name] == mirrored[name]
    assert all(0 <= value <= 1 for value in row["hypervolume"])


@given(FRONTS, FRONTS)
def test_dominance_hypervolume_and_epsilon_tell_the_same_story(first: Any, other: Any) -> None:
    """More points are never worse: the union covers both parts, and nothing of it is dominated by a part."""
    both = np.concatenate([first, other])
    row = Pair("s", points(both), points(first)).row(factors=False)
    assert row["dominated"][0] == 0
    assert row["hypervolume"][0] >= row["hypervolume"][1] - 1e-12
    assert row["epsilon"][0] <= 1e-12
    covers = row["dominated"][1] == 0 and row["front"] == [row["equal"]] * 2
    assert covers == (row["hypervolume"][0] <= row["hypervolume"][1] + 1e-12)


def test_a_known_pair_of_fronts() -> None:
    """Two corners against the point between them: an L of the box up to 1.1."""
    row = Pair("s", points([[0, 1], [1, 0]]), points([[0.5, 0.5]])).row(factors=False)
    assert row["front"] == [2, 1]
    assert row["dominated"] == [0, 0]
    box = REFERENCE**2
    assert row["hypervolume"] == pytest.approx([(2 * 0.1 * 1.1 - 0.01) / box, 0.36 / box])
    assert row["epsilon"] == pytest.approx([0.5, 0.5])
    factors = Pair("s", points([[1, 2]]), points([[2, 4], [4, 2]])).row(factors=True)
    assert factors["epsilon"] == pytest.approx([1.0, 2.0])
    assert factors["dominated"] == [0, 2]


@given(FRONTS, FRONTS)
def test_hypervolume_over_evaluated_points_only_grows_and_ends_where_the_front_is(first: Any, other: Any) -> None:
    pair = Pair("s", points(first), points(other))
    steps, reached = pair.curve(pair.first)
    assert steps[0] == 1
    assert steps[-1] == len(first)
    assert (np.diff(reached) >= -1e-12).all()
    assert reached[-1] == pytest.approx(pair.row(factors=False)["hypervolume"][0])


# Configurations


trees = st.recursive(
    st.integers() | st.text(max_size=3) | st.none(),
    lambda inner: st.dictionaries(st.text("abc", min_size=1, max_size=2), inner, min_size=1, max_size=3),
    max_leaves=8,
).filter(lambda tree: isinstance(tree, dict))


@given(trees, trees)
def test_differences_are_mirrored_and_rebuild_one_configuration_from_the_other(old: Any, new: Any) -> None:
    changes = differences(old, new)
    assert {path: pair[::-1] for path, pair in changes.items()} == differences(new, old)
    rebuilt = {path: changes[path][1] if path in changes else value for path, value in flat(old).items()}
    assert {path: value for path, value in rebuilt.items() if path in flat(new)} == {
        path: value for path, value in flat(new).items() if path in flat(old)
    }


def test_what_made_the_runs_is_told_where_it_differs() -> None:
    old = {"backend": "toy 1", "seed": 0, "git": {"commit": "a" * 40}, "versions": {"numpy": "2.0"}}
    new = {"backend": "toy 2", "seed": 0, "git": {"commit": "b" * 40}, "versions": {"numpy": "2.1"}}
    changes = made_otherwise(old, new)
    assert changes == ["backend toy 1 -> toy 2", f"git {'a' * 12} -> {'b' * 12}", "numpy 2.0 -> 2.1"]
    assert made_otherwise(old, old) == []


# The command


@pytest.mark.slow
def test_a_better_run_is_told_to_be_better_with_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, _ = runs(tmp_path, table(), table(shift=1.0), config={"seed": 9}, made={"backend": "toy 2"})
    assert main(["results", "compare", str(first), "toy", f"output_dir={tmp_path}"]) == 0
    output = capsys.readouterr().out
    for part in ("seed", "backend toy 1 -> toy 2", "6 | 6", "6 | 0", "mean"):
        assert part in output, part
    assert output.splitlines()[0].split() == ["scenario", "A", "B", "change", "winner", "A", "winner", "B"]
    assert "shows no search" not in output
    (folder,) = (tmp_path / "compare").iterdir()
    assert folder.name == "toy_2026-01-01_00-00-00--toy_2026-01-02_00-00-00"
    names = {f"{name}.{kind}" for name in ("attainment", "hypervolume") for kind in ("png", "svg")}
    assert {path.name for path in folder.iterdir()} == {"compare.json", *names}
    stored = json.loads((folder / "compare.json").read_text("utf-8"))
    assert stored["config"] == {"seed": [None, 9]}
    assert [row["dominated"] for row in stored["fronts"]] == [[6, 0]] * 2
    assert all(row["hypervolume"][0] < row["hypervolume"][1] for row in stored["fronts"])
    assert stored["epsilon"] == "factor"
    assert all(row["epsilon"][1] <= 1 < row["epsilon"][0] for row in stored["fronts"])


def test_a_run_beside_its_copy_differs_in_nothing(tmp_path: Path) -> None:
    comparison = compare_runs(*map(FinishedRun, runs(tmp_path, table(), table())))
    assert (dict(comparison.config), list(comparison.made), dict(comparison.why_not)) == ({}, [], {})
    assert comparison.attainment is not None
    assert len(comparison.attainment) == 0
    for row in comparison.rows:
        assert row["front"] == [row["equal"]] * 2
        assert row["dominated"] == [0, 0]
        assert row["epsilon"] == [1.0, 1.0]


def test_other_objectives_are_refused_where_they_matter_and_the_rest_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = runs(tmp_path, table(), table(), goals={"time_s": "minimize"})
    assert main(["results", "compare", str(first), str(second), f"output_dir={tmp_path}"]) == 0
    output = capsys.readouterr().out
    assert "not compared: fronts, hypervolume and attainment: the objectives differ" in output
    assert "minimize held_bytes" in output
    assert "Points" in output
    (folder,) = (tmp_path / "compare").iterdir()
    assert [path.name for path in folder.iterdir()] == ["compare.json"]


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ([], "needs two runs"),
        (["toy"], "needs two runs"),
        (["toy", "toy"], "is the same run as A"),
        (["toy", "tooy"], "did you mean `toy`"),
        (["toy", "toy/1999"], "is the folder of no finished run"),
        (["toy", "toy/2026-01-01_00-00-00", "depth=3"], "is not understood"),
    ],
    ids=" ".join,
)
def test_what_cannot_be_compared_is_refused_with_the_way_out(
    words: list[str], part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs(tmp_path, table(), table())
    assert main(["results", "compare", *words, f"output_dir={tmp_path}"]) == 2
    assert part in capsys.readouterr().err
    assert not (tmp_path / "compare").exists()
