"""Benchmarks of profiles: the witness is skipped where it is not installed, and memory is measured."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.trace_memory import import_peak_gb_per_million
from benchmarks.traces import made_events, profiles
from dse_traces.profile.overlap import overlapped
from dse_traces.profile.replay import replay
from dse_traces.readers.formats import read
from validation.hta import hidden_points_hta, write_chrome


def test_a_witness_that_is_not_there_is_told(tmp_path: Path) -> None:
    (path,) = profiles(None)
    assert "no interpreter" in str(hidden_points_hta([], tmp_path, str(tmp_path / "python")))
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'hta'\" >&2\nexit 1\n")
    script.chmod(0o700)
    assert "No module named 'hta'" in str(hidden_points_hta([read(path)], tmp_path, str(script)))


@pytest.mark.slow
def test_a_witness_that_says_otherwise_is_seen(tmp_path: Path) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho 50.0\n")
    script.chmod(0o700)
    (path,) = profiles(None)
    hidden = 100 * replay(read(path)).recorded.hidden
    assert hidden_points_hta([read(path)], tmp_path, str(script)) == pytest.approx(abs(hidden - 50))


def test_the_trace_for_the_witness_holds_the_same_kernels(tmp_path: Path) -> None:
    (path,) = profiles(None)
    profile, again = read(path), read(write_chrome(read(path), tmp_path / "written.json"))
    np.testing.assert_allclose(again.start_s, profile.start_s, atol=1e-9)
    shares = [
        overlapped(trace.start_s, trace.end_s, computes=trace.is_compute, communicates=trace.is_collective).hidden
        for trace in (profile, again)
    ]
    assert shares[1] == pytest.approx(shares[0], abs=1e-6)
    assert len(json.loads((tmp_path / "written.json").read_text())["traceEvents"]) == len(profile) + 1


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells peak memory")
def test_peak_memory_grows_with_the_kernels() -> None:
    few, large = (import_peak_gb_per_million(made_events(3 * count)) * count / 1e6 for count in (1_000, 60_000))
    assert 0.01 < few < large < 1
