"""`profile seqpoint`: the iterations of an epoch's log of one's own that are worth profiling."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from dse.cli import main
from dse_papers.seqpoint.epoch_log import read


def log(path: Path, *rows: str, columns: str = "sequence_length,seconds,seconds_slow") -> Path:
    path.write_text("\n".join([columns, *rows]) + "\n", encoding="utf-8")
    return path


def test_a_log_is_sampled_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = np.random.default_rng(0).integers(1, 100, 500)
    data = log(tmp_path / "log.csv", *(f"{size},{size * 1e-3:g},{size * 2e-3:g}" for size in sizes))
    out = tmp_path / "points.csv"
    assert main(["profile", "seqpoint", f"data={data}", "k0=6", "error=0.005", f"out={out}"]) == 0
    output = capsys.readouterr().out
    assert "seconds_slow" in output
    assert "of 500 iterations" in output
    assert "all at once" in output
    with out.open(encoding="utf-8") as text:
        rows = list(csv.DictReader(text))
    assert sum(float(row["weight"]) for row in rows) == 500
    for row in rows:
        assert sizes[int(row["iteration"])] == int(row["sequence_length"])
    table = read(data)
    assert list(table) == ["sequence_length", "seconds", "seconds_slow"]
    assert np.array_equal(table["sequence_length"], sizes)


@pytest.mark.parametrize(
    ("columns", "rows", "parts"),
    [
        ("sequence_length,second", ["1,1"], ["line 1", "no column seconds", "rename `second`: seconds"]),
        ("sequence_length;seconds", ["1;1"], ["line 1", "separate columns by commas"]),
        ("sequence_length,seconds,seconds_a,seconds_a", ["1,1,1,1"], ["line 1", "twice", "seconds_a"]),
        ("sequence_length,seconds", ["1,1", "2.5,1"], ["line 3, sequence_length = '2.5'", "whole number"]),
        ("sequence_length,seconds", ["0,1"], ["line 2, sequence_length = '0'", "whole number"]),
        ("sequence_length,seconds", ["1,1", "", "2,-1"], ["line 4, seconds = '-1'", "positive time"]),
        ("sequence_length,seconds", ["1,3 ms"], ["line 2, seconds = '3 ms'", "is no number"]),
        ("sequence_length,seconds", ["1,nan"], ["line 2, seconds = 'nan'", "is no number"]),
        ("sequence_length,seconds", ["1"], ["line 2, seconds", "is missing"]),
        ("sequence_length,seconds", [], ["holds no iterations"]),
        ("sequence_length,seconds", ["1,x"] * 30, ["has 10 more problems"]),
        ("sequence_length,seconds", ['1,"2'], ["is no CSV"]),
    ],
)
def test_a_bad_log_is_told_by_line_and_column(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], columns: str, rows: list[str], parts: list[str]
) -> None:
    data, out = log(tmp_path / "log.csv", *rows, columns=columns), tmp_path / "points.csv"
    assert main(["profile", "seqpoint", f"data={data}", f"out={out}"]) == 2
    message = capsys.readouterr().err
    assert "Traceback" not in message
    assert all(part in message for part in parts), message
    assert not out.exists()


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["k0=0"], "k0 = 0"),
        (["k0=2.5"], "k0 = 2.5"),
        (["k0=many"], "k0 = 'many'"),
        (["error=0"], "error = 0"),
        (["error=-1"], "error = -1"),
        (["bins=3"], "is not understood here"),
        (["data=absent.csv"], "data = 'absent.csv': is no file"),
        (["data=/dev/zero"], "a device"),
    ],
)
def test_a_bad_word_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], part: str) -> None:
    data = log(tmp_path / "log.csv", "1,1,2")
    source = [] if words[0].startswith("data=") else [f"data={data}"]
    assert main(["profile", "seqpoint", *source, *words]) == 2
    assert part in capsys.readouterr().err


def test_a_log_is_not_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = log(tmp_path / "log.csv", "1,1,2")
    before = data.read_bytes()
    assert main(["profile", "seqpoint", f"data={data}", f"out={data}"]) == 2
    assert main(["profile", "seqpoint", f"data={data}", f"out={tmp_path / 'absent' / 'points.csv'}"]) == 2
    message = capsys.readouterr().err
    assert "would write over the log" in message
    assert "cannot be written" in message
    assert data.read_bytes() == before
