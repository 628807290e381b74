"""Databases of rocprofv3: iterations of several processes, and more of them than are kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from dse_traces.readers import rocpd as reader
from dse_traces.readers.formats import read_ranks
from tests.test_strangers import Tables, rocpd, write_tables

REGION = "rocpd_region_u"


def marked(steps: list[tuple[int, int, int | None]]) -> Tables:
    """Kernels of processes 1 and 2, and iterations (start, end, process)."""
    tables = rocpd()
    rows = tables["rocpd_kernel_dispatch_u"][1]
    rows += [[*row[:2], 2, *row[3:]] for row in rows]
    spans = [[start, end, 2, None, process] for start, end, process in steps]
    return {**tables, REGION: (["start", "end", "name_id", "event_id", "pid"], spans)}


def test_iterations_are_of_the_gpus_of_their_process(tmp_path: Path) -> None:
    steps: list[tuple[int, int, int | None]] = [(0, 4000, 1), (1000, 3000, 2), (4000, 8000, None)]
    profiles = read_ranks(write_tables(tmp_path / "run.db", marked(steps)))
    lengths = [[round((end - start) * 1e9) for start, end in profile.iterations] for profile in profiles]
    assert lengths == [[4000, 4000], [2000, 4000]]


def test_iterations_past_those_that_are_kept_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MOST_ITERATIONS", 3)
    steps: list[tuple[int, int, int | None]] = [(1000 * step, 1000 * step + 900, 1 + step % 2) for step in range(5)]
    first, second = read_ranks(write_tables(tmp_path / "run.db", marked(steps)))
    assert (len(first.iterations), len(second.iterations)) == (2, 1)
    assert first.dropped["iterations past the first 3"] == 2
