"""Other constants: shares and regrets against brute force, flips against a closed form."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dse import plugins
from dse.analysis import robustness
from dse.analysis.perturbation import Constant
from dse.analysis.robustness import uncertain_constants
from dse.analysis.standings import draw_factors, on_front
from dse.cli import main
from dse.errors import ConfigError
from tests.race import Formula, times
from tests.toy import distribution

LINK = {"bytes_per_s": 4e9, "setup_s": 0.1, "cu_bytes_per_s": 2e9, "share": 0.5, "lanes": 1}
STUDY = f"""\
# @package _global_
defaults:
  - override /system: null
  - override /workload: null
  - override /schedule: null
  - override /simulator: race

study:
  name: race
  question: Which way is fastest?
  module: plain
  objectives: [time_s, held_bytes]
  baseline: {{}}
  summary: [way.kind]
  uncertainty: {{link.bytes_per_s: 0.3, link.cu_bytes_per_s: 0.3, link.lasers: 0.2}}

way: {{kind: dma, chunks: 2}}
link: {json.dumps(LINK)}
load: {{moved_bytes: 1}}

space:
  way:
    kind: choice(dma,cu,detour)
    chunks: choice(1,2,4)
"""
SIZES = {"small": 2e9, "large": 8e9}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder in which the race was run once."""
    folder = tmp_path_factory.mktemp("race")
    distribution(folder / "site", "racebox", simulators="race = tests.race")
    for group, text in (("study", STUDY), ("simulator", "name: race\ndescription: a formula\nbackend: race\n")):
        (folder / "conf" / group).mkdir(parents=True)
        (folder / "conf" / group / "race.yaml").write_text(text, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder / "site"))
        patch.chdir(folder)
        plugins.refresh()
        assert main(["study=race", "tracking=none", "store=none", "timeline=false", "--config-dir=conf"]) == 0
        yield folder
        patch.undo()
        plugins.refresh()


def asked(folder: Path, *words: str) -> dict[str, Any]:
    """What the command writes."""
    assert main(["results", "robustness", "study=race", *words]) == 0
    report: dict[str, Any] = json.loads((folder / "outputs/race/latest/robustness.json").read_text("utf-8"))
    return report


def flips(report: dict[str, Any], scenario: str, constant: str) -> list[tuple[float, str]]:
    """(where each stretch ends, who wins in it)."""
    (entry,) = [row for row in report["break_even"] if (row["scenario"], row["constant"]) == (scenario, constant)]
    return [(part["high"], part["option"][0]) for part in entry["stretches"]]


@pytest.mark.more
def test_winners_flip_where_the_formula_says(run: Path) -> None:
    """dma meets cu where setup + w / b = w / c, and the detour meets whoever is faster where b 1e-9 is that time."""
    report = asked(run, "vary=link.bytes_per_s=0.3,link.setup_s=0.5,link.cu_bytes_per_s=0.3", "samples=4")
    small = flips(report, "small", "link.bytes_per_s")
    assert [winner for _, winner in small] == ["detour", "cu", "dma"]
    assert small[0][0] == pytest.approx(1e9, rel=1e-8)  # b 1e-9 = w / c = 1 s
    assert small[1][0] == pytest.approx(2e9 / 0.9, rel=1e-8)  # 0.1 + w / b = 1 s
    (first, _), *_ = flips(report, "small", "link.setup_s")
    assert first == pytest.approx(0.5, rel=1e-8)  # setup + 0.5 = 1 s
    large = flips(report, "large", "link.bytes_per_s")
    meeting = (0.1 + math.sqrt(0.01 + 4 * 8)) / 2  # b 1e-9 = 0.1 + 8 / (b 1e-9)
    ((threshold, winner), *_) = large
    assert threshold == pytest.approx(meeting * 1e9, rel=1e-8)
    assert winner == "detour"
    sentences = [row["sentence"] for row in report["break_even"]]
    assert "small: way.kind = dma wins below link.setup_s = 500 ms (now 100 ms), cu above" in sentences


@pytest.mark.slow
def test_every_stretch_is_won_by_who_is_fastest_in_its_middle(run: Path) -> None:
    report = asked(run, "vary=link.bytes_per_s=0.3,link.setup_s=0.5,link.cu_bytes_per_s=0.3", "samples=4", "range=30")
    for row in report["break_even"]:
        for part in row["stretches"]:
            link = {**LINK, row["constant"].partition(".")[2]: math.sqrt(part["low"] * part["high"])}
            fastest = min(("dma", "cu", "detour"), key=lambda kind: times(kind, 2, link, SIZES[row["scenario"]]))
            assert part["option"] == [fastest]
        assert [a["high"] for a in row["stretches"][:-1]] == [b["low"] for b in row["stretches"][1:]]


@pytest.mark.slow
def test_shares_and_regrets_are_those_of_every_sample_by_hand(run: Path) -> None:
    report = asked(run, "samples=50", "seed=7")
    assert report["notes"][-1] == "declared, but without effect on time_s here: link.lasers"
    assert list(report["uncertainty"]) == ["link.bytes_per_s", "link.cu_bytes_per_s"]
    changing = [Constant("link.bytes_per_s", 0.3, False), Constant("link.cu_bytes_per_s", 0.3, False)]
    factors = draw_factors(changing, 50, 7)
    points = list(itertools.product(("dma", "cu", "detour"), (1, 2, 4)))
    for row in report["scenarios"]:
        moved = SIZES[row["scenario"]]
        links = [{**LINK, "bytes_per_s": 4e9 * factor, "cu_bytes_per_s": 2e9 * other} for factor, other in factors]
        table = np.array([[times(kind, chunks, link, moved) for link in links] for kind, chunks in points])
        nominal = [times(kind, chunks, LINK, moved) for kind, chunks in points]
        winner = int(np.argmin(nominal))
        lost = table[winner] / table.min(axis=0) - 1
        assert row["winner"] == points[winner][0]
        assert row["winner_stays"] == pytest.approx((lost < 1e-9).mean())
        assert row["regret_mean"] == pytest.approx(lost.mean(), abs=1e-9)
        assert row["regret_worst"] == pytest.approx(lost.max(), abs=1e-9)
        bytes_held = np.array([moved / chunks for _, chunks in points])
        stays = np.mean([on_front(np.stack([column, bytes_held], axis=1)) for column in table.T], axis=0)
        front = np.flatnonzero(on_front(np.stack([nominal, bytes_held], axis=1)))
        assert sorted(member["stays"] for member in row["members"]) == pytest.approx(sorted(stays[front]))
        for option in row["options"]:
            places = [place for place, (kind, _) in enumerate(points) if kind == option["option"][0]]
            fared = table[places].min(axis=0) / table.min(axis=0) - 1
            assert (option["mean"], option["worst"]) == pytest.approx((fared.mean(), fared.max()), abs=1e-9)
        assert row["least_mean_regret"] == pytest.approx(min(entry["mean"] for entry in row["options"]))


@pytest.mark.more
def test_of_more_points_than_can_be_evaluated_the_best_and_the_front_are_taken(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete = asked(run, "samples=4")
    monkeypatch.setattr(robustness, "_MOST_EVALUATED", 4 * 6)
    part = asked(run, "samples=4")
    assert part["notes"][1].startswith("8 of 18 points: the best and the front, evaluated again")
    for scenario, other in zip(complete["scenarios"], part["scenarios"], strict=True):
        assert scenario["options"] == other["options"]
        assert {member["key"] for member in scenario["members"]} == {member["key"] for member in other["members"]}
    assert complete["break_even"] == part["break_even"]


def test_samples_fill_every_constants_width_evenly() -> None:
    """A Latin hypercube: each of n slices of a constant's width holds one of n samples."""
    factors = draw_factors([Constant("a", 0.2, False), Constant("b", 0.05, False)], 40, 0)
    for half, column in zip((0.2, 0.05), factors.T, strict=True):
        slices = np.floor((column - (1 - half)) / (2 * half) * 40).astype(int)
        assert sorted(slices.tolist()) == list(range(40))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["vary=link.bytes_per_z=0.1"], "did you mean `link.bytes_per_s`?"),
        (["vary=link.medium=0.1"], "is no axis: it is no number"),
        (["vary=way.chunks=0.1"], "was searched"),
        (["vary=link.share=0.9", "study=race", "choose=way.kind"], ""),
        (["vary=link.bytes_per_s=x"], "is no path with a share"),
        (["vary=link.bytes_per_s=1.5"], "must be a share above 0 and below 1"),
        (["vary=load.moved_bytes=0.1", "samples=1"], "must be a whole number from 2"),
        (["choose=way.kindd"], "did you mean `way.kind`?"),
        (["objective=time"], "did you mean `time_s`?"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_cannot_vary_is_refused_with_the_reason(
    run: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = [] if words[-1].startswith("samples=") else ["samples=2"]
    code = main(["results", "robustness", "study=race", *samples, *words])
    assert code == (2 if message else 0)
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_simulator_without_axes_cannot_vary_its_constants(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Formula, "is_axis", lambda *_: False)
    assert main(["results", "robustness", "study=race"]) == 2
    assert "takes no number as an axis (search it instead" in capsys.readouterr().err


@pytest.mark.slow
def test_a_share_that_makes_a_value_illegal_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """link.share is 0.5 and at most 1: a scan of it ends there."""
    (high,) = {part["high"] for row in asked(run, "vary=link.share=0.5")["break_even"] for part in row["stretches"]}
    assert 0.8 < high <= 1.0
    capsys.readouterr()
    assert main(["results", "robustness", "study=race", "vary=link.medium=0.5,link.lanes=2"]) == 2
    assert "2 problems" in capsys.readouterr().err


def test_without_a_declaration_one_is_asked_for() -> None:
    with pytest.raises(ConfigError, match="declares no uncertain constants"):
        uncertain_constants("", {})
    assert uncertain_constants("a.b=0.1,c=0.2", {"d": 0.3}) == {"a.b": 0.1, "c": 0.2}


@pytest.mark.more
def test_anomalies_are_told_by_constant_and_counted_in_what_is_written(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    report = asked(run)
    assert {(row["anomalies"], row["largest_anomaly"]) for row in report["break_even"]} == {(0, 0.0)}
    assert "anomalies:" not in capsys.readouterr().out
    monkeypatch.setattr("dse.analysis.break_even.reversal_share", lambda values: np.full(len(values), 0.25))
    report = asked(run)
    assert all(row["anomalies"] > 0 and row["largest_anomaly"] == 0.25 for row in report["break_even"])
    assert "both rises and falls over link." in (out := capsys.readouterr().out)
    assert "by up to 25 %" in out
