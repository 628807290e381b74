"""Nothing is lost by a kill: a small part of `python -m benchmarks.kills`, with every promise of the long run."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.kills import Quotas, broken, ordeal, total

pytestmark = pytest.mark.slow


@pytest.mark.nightly
def test_a_study_whose_processes_are_killed_ends_as_one_that_was_left_alone(tmp_path: Path) -> None:
    quotas = Quotas(worker=4, main=1, joined=1, write=3, first=41, step=20, last=2)
    report = total([ordeal(quotas, tmp_path, number=1, points=1000)])
    assert broken(report) == []
    assert report["kills"] >= 11
    assert report["points"] == 1000
    assert report["repeated"] < 0.2 * report["points"]  # what was in flight, never what was recorded
