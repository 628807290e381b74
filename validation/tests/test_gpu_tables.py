"""Tables of a GPU: what measures them, as far as it runs without one, what was measured, and what is said of it."""

from __future__ import annotations

import csv
import importlib
import math
import time
from pathlib import Path
from typing import Any

import pytest

from dse import plots
from validation import gpu_judge, gpu_page, measured_gpus

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def gpu(torch: Any) -> Any:
    """The benchmark of a GPU, which imports PyTorch."""
    return importlib.import_module("benchmarks.gpu.__main__")


@pytest.mark.parametrize(("axis", "joined"), [("m", 0), ("n", 1), ("k", None)])
@pytest.mark.parametrize("chunks", [2, 4])
def test_chunks_of_a_gemm_make_the_whole_product(torch: Any, axis: str, joined: int | None, chunks: int) -> None:
    a, b = torch.randn(24, 16), torch.randn(32, 16)
    parts = [call() for call in importlib.import_module("benchmarks.gpu.gemms").cut(a, b, axis, chunks)]
    assert len(parts) == chunks
    product = parts[-1] if joined is None else torch.cat(parts, joined)
    torch.testing.assert_close(product, a @ b.t())


def test_every_table_has_rows_and_no_row_is_listed_twice(gpu: Any) -> None:
    for name, rows, _ in gpu.TABLES:
        words = [repr(row) for row in rows()]
        assert len(words) > 4, name
        assert len(set(words)) == len(words), name


def test_what_cannot_be_measured_is_a_row_with_its_size_and_the_reason(torch: Any, gpu: Any, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("measures where there is a GPU")
    for name, rows, _ in gpu.TABLES:
        path = tmp_path / f"{name}.csv"
        first, *_ = rows()
        assert gpu.write_table(path, [first, lambda: {"seconds": 0.125}], until=math.inf) == 2
        reason, number = csv.DictReader(path.read_text("utf-8").splitlines())
        assert reason["reason"]
        assert not reason["seconds"]
        assert number["seconds"] == "0.125"
        assert ("m" in reason) == ("size" in getattr(first, "keywords", {}))


def test_no_row_is_begun_after_the_time(gpu: Any, tmp_path: Path) -> None:
    assert gpu.write_table(tmp_path / "empty.csv", [lambda: {"seconds": 1.0}], until=time.monotonic() - 1) == 0


def test_tables_of_measured_gpus_say_where_they_are_from_and_hold_times(gpu: Any) -> None:
    gpus = measured_gpus.measured_gpus()
    assert len(gpus) >= 2
    for measured in gpus:
        for name, _, _ in gpu.TABLES:
            head, *_ = (measured.folder / f"{name}.csv").read_text("utf-8").splitlines()
            assert head.startswith("#")
            assert "provenance: measured" in head
            times = [column for column in measured.table(name) if str(column).endswith("_s") or column == "seconds"]
            assert times
            assert (measured.table(name)[times] > 0).all(axis=None), name


def test_a_folder_without_tables_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no folder with"):
        measured_gpus.measured_gpus(tmp_path)
    with pytest.raises(ValueError, match="no lines"):
        gpu_page.with_table("a page", [])


def test_the_page_on_gpus_shows_what_is_judged_today(tmp_path: Path) -> None:
    judged = gpu_judge.judge()
    page = gpu_page.PAGE.read_text("utf-8")
    assert page == gpu_page.with_table(page, list(gpu_page.lines(judged)))
    (picture,) = plots.save(lambda: gpu_page.slowdowns(judged), tmp_path, "slowdown", formats=["png"])
    assert picture.stat().st_size > 10_000
    for name, sections in judged.items():
        assert all(sections.values()), name
