"""Figures of long runs: those of other code are refused, and those of the search are what the table says."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from benchmarks import recorded
from benchmarks.search import quality
from dse.analysis.search_benchmark import column


def test_a_record_is_read_back_on_the_code_it_was_made_on_and_refused_on_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recorded, "ROOT", tmp_path)
    monkeypatch.setattr(recorded, "path", lambda name: tmp_path / f"{name}.json")
    monkeypatch.setattr(recorded, "trees", lambda: {"dse": "1"})
    assert recorded.read("speed", "make speed") == {}  # there is none yet
    recorded.write("speed", {"fast": 2.5}, command="make speed", of={"dse": "1"})
    capsys.readouterr()
    assert recorded.read("speed", "make speed")["fast"] == 2.5
    assert capsys.readouterr().err == ""
    recorded.write("speed", {"fast": 2.5}, command="make speed", of={"dse": "2"})
    assert recorded.read("speed", "make speed") == {}
    assert "speed.json is of other code in dse, simulators, search_spaces, conf" in capsys.readouterr().err


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
