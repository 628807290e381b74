"""Tables of a GPU: what measures them, as far as it runs without one, what was measured, and what is said of it."""

from __future__ import annotations

import csv
import math
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install -e '.[torch]'")

from benchmarks.gpu.__main__ import TABLES, write_table  # noqa: E402
from benchmarks.gpu.gemms import cut  # noqa: E402


@pytest.mark.parametrize(("axis", "joined"), [("m", 0), ("n", 1), ("k", None)])
@pytest.mark.parametrize("chunks", [2, 4])
def test_chunks_of_a_gemm_make_the_whole_product(axis: str, joined: int | None, chunks: int) -> None:
    a, b = torch.randn(24, 16), torch.randn(32, 16)
    parts = [call() for call in cut(a, b, axis, chunks)]
    assert len(parts) == chunks
    whole = parts[-1] if joined is None else torch.cat(parts, joined)
    torch.testing.assert_close(whole, a @ b.t())


def test_every_table_has_rows_and_no_row_is_listed_twice() -> None:
    for name, rows, _ in TABLES:
        words = [repr(row) for row in rows()]
        assert len(words) > 4, name
        assert len(set(words)) == len(words), name


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures where there is a GPU")
def test_what_cannot_be_measured_is_a_row_with_its_size_and_the_reason(tmp_path: Path) -> None:
    for name, rows, _ in TABLES:
        path = tmp_path / f"{name}.csv"
        first, *_ = rows()
        assert write_table(path, [first, lambda: {"seconds": 0.125}], until=math.inf) == 2
        reason, number = csv.DictReader(path.read_text("utf-8").splitlines())
        assert reason["reason"]
        assert not reason["seconds"]
        assert number["seconds"] == "0.125"
        assert ("m" in reason) == ("size" in getattr(first, "keywords", {}))


def test_no_row_is_begun_after_the_time(tmp_path: Path) -> None:
    assert write_table(tmp_path / "empty.csv", [lambda: {"seconds": 1.0}], until=time.monotonic() - 1) == 0
