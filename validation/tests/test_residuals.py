"""Intervals against measured tables: how often they hold, how wide they are, and that those shipped are of the code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.intervals import figures, main
from dse_calibration.residual_groups import FOLDS, common_shares, components
from simulators.hardware.residuals import Residuals, shipped_residuals
from validation.residual_rows import residual_rows
from validation.residuals import groups_of, judged_in_turn


@pytest.mark.nightly
def test_intervals_hold_as_often_as_they_promise(shared: Callable[[str], Path]) -> None:
    rows = residual_rows(shared("data"))
    assert {row.fold for row in rows} == set(range(FOLDS)) and len(rows) > 30_000
    # tables spell GPUs in several ways, but own constants are no sibling's, and presumed GPUs are none of their own
    assert not [row for row in rows if row.gpu == row.giver or "(" in row.gpu]
    measured = figures(rows)
    assert len(measured["groups"]) >= 16
    # by one standard error of a share, groups of few rows may hold more
    most = {group["rows"]: 0.95 + (0.95 * 0.05 / group["rows"]) ** 0.5 for group in measured["groups"]}
    outside = [group for group in measured["groups"] if not 0.85 <= group["share"] <= most[group["rows"]]]
    assert outside == []
    by_kind = measured["coverage_by_left_out_kind"]
    # collectives: of three GPUs at a switch, two that differ little say nothing of how far the third one is off
    assert min(share for kind, share in by_kind.items() if kind != "collective") >= 0.85
    assert by_kind["collective"] >= 0.7 and max(by_kind.values()) <= 0.97
    assert min(share for kind, share in measured["names_held_by_left_out_kind"].items() if kind != "collective") >= 0.9
    traits = {(entry["kind"], entry["trait"]) for entry in measured["left_out"] if not entry["name"]}
    assert traits >= {
        ("gemm", "gpu"),
        ("collective", "gpus"),
        ("step", "release"),
        ("tpot", "model"),
        ("ttft", "software"),
    }
    assert measured["width_over_error"] <= 2.6  # 2.44 for errors of a normal distribution
    assert measured["overlap_coverage"] >= 0.85 and 0.8 <= measured["steps_coverage"] <= 0.95
    assert measured["decided_right"] >= 0.95 and measured["decided_share"] >= 0.5
    shipped, anew = shipped_residuals(), Residuals(tuple(groups_of(rows)))
    for kind, gpu in {(row.kind, row.gpu) for row in rows}:  # within what another version of the models changes
        here, there = (residuals.of(kind, gpu) for residuals in (shipped, anew))
        assert abs(here.low - there.low) < 0.1 and abs(here.high - there.high) < 0.1, (kind, gpu, "--write is due")
    assert set(common_shares(rows)) == {row.kind for row in rows}
    parts = {(part.kind, part.key, part.trait): part for part in components(rows)}
    for name, part in {(part.kind, part.key, part.trait): part for part in shipped.between}.items():
        assert abs(part.low - parts[name].low) < 0.1 and abs(part.high - parts[name].high) < 0.1, (
            name,
            "--write is due",
        )


@pytest.mark.more
def test_a_folder_of_overlaps_is_judged_alone(
    tmp_path: Path, shared: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    table = shared("data/fused_overlap/gemm_collective.csv")
    (tmp_path / table.name).write_text(table.read_text("utf-8"), "utf-8")
    assert main(["--data", str(tmp_path)]) == 0
    assert "overlap_coverage" in capsys.readouterr().out
    rows = [row for row in residual_rows(tmp_path) if row.kind == "overlap"]
    judged = [line for line in judged_in_turn(rows) if line.row.kind == "overlap"]
    assert len(judged) == len(rows) > 30
    assert main(["--json"]) == 0 and "shipped_groups" in capsys.readouterr().out
