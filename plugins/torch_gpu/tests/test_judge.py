"""Tables of a GPU: what measures them, as far as it runs without one, what was measured, and what is said of it."""

from __future__ import annotations

import csv
import functools
import importlib
import math
import time
from pathlib import Path
from typing import Any

import pytest

from dse import plots
from dse.config.options import load_yaml
from dse.errors import ConfigError
from dse_emit.command import emit
from dse_torch import tables, verdict
from dse_torch.command import judge
from validation import gpu_page

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def gpu(torch: Any) -> Any:
    """The benchmark of a GPU, which imports PyTorch."""
    return importlib.import_module("dse_judge.__main__")


@pytest.mark.parametrize(("axis", "joined"), [("m", 0), ("n", 1), ("k", None)])
@pytest.mark.parametrize("chunks", [2, 4])
def test_chunks_of_a_gemm_make_the_whole_product(torch: Any, axis: str, joined: int | None, chunks: int) -> None:
    a, b = torch.randn(24, 16), torch.randn(32, 16)
    parts = [call() for call in importlib.import_module("dse_judge.gemms").cut(a, b, axis, chunks)]
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


def test_a_table_goes_on_where_it_ended(gpu: Any, tmp_path: Path) -> None:
    path, calls = tmp_path / "t.csv", []

    def row(number: int) -> dict[str, Any]:
        calls.append(number)
        if number == 2 and calls.count(2) == 1:
            raise KeyboardInterrupt
        return {"seconds": 0.5 + number}

    measures = [functools.partial(row, number) for number in range(4)]
    with pytest.raises(KeyboardInterrupt):
        gpu.write_table(path, measures, until=math.inf)
    with (tmp_path / "t.jsonl").open("a") as journal:
        journal.write('[{"seconds": 9')  # a line that was cut short
    for _ in range(2):  # and a table that is whole stays
        assert gpu.write_table(path, measures, until=math.inf) == 4
        assert [line["seconds"] for line in csv.DictReader(path.read_text().splitlines())] == [
            "0.5",
            "1.5",
            "2.5",
            "3.5",
        ]
    assert calls == [0, 1, 2, 2, 3]


def test_a_folder_of_another_gpu_is_refused(gpu: Any, tmp_path: Path) -> None:
    gpu._keep_facts(tmp_path / "device.yaml", {"device": "A", "num_sms": 8})
    gpu._keep_facts(tmp_path / "device.yaml", {"device": "A", "num_sms": 8})
    with pytest.raises(SystemExit, match="name another folder"):
        gpu._keep_facts(tmp_path / "device.yaml", {"device": "B", "num_sms": 8})


def test_the_tables_that_are_judged_are_those_that_are_measured(gpu: Any, tmp_path: Path) -> None:
    assert [name for name, *_ in gpu.TABLES] == list(tables.TABLES)
    (tmp_path / "device.yaml").write_text("system: h100_8\n")
    with pytest.raises(ConfigError, match="lacks the tables launches, beside"):
        judge([f"data={tmp_path}"])


def test_judge_writes_a_system_of_what_was_measured(tmp_path: Path) -> None:
    answer = judge([f"data={tables.FOLDER}", f"out={tmp_path}"])
    assert "constants stand" in answer.text
    for measured in tables.measured_gpus():
        tree = load_yaml(tmp_path / "system" / f"{measured.folder.name}_measured.yaml")
        assert tree["sources"].keys() == {path for path, _ in verdict.measured_constants(measured)}
        rate = tree["gpu"]["hbm_bytes_per_s"]
        assert 0.8 * measured.hardware.gpu.hbm_bytes_per_s < rate < measured.hardware.gpu.hbm_bytes_per_s


@pytest.mark.more
def test_judge_runs_emitted_operators_and_says_which_differ(torch: Any, tmp_path: Path) -> None:
    emit(["schedule=serial", "gpus=2", f"out={tmp_path / 'own'}"])
    assert all(row["equal"] for row in judge([f"operators={tmp_path / 'own'}", f"out={tmp_path}"]).data["operators"])
    reduce = tmp_path / "own" / "gemm_reduce.py"
    reduce.write_text(reduce.read_text().replace("    return gather_rows(y", "    y += 1\n    return gather_rows(y", 1))
    answer = judge([f"operators={tmp_path / 'own'}", f"out={tmp_path}"])
    assert [row["equal"] for row in answer.data["operators"]] == [True, False]
    assert answer.code == 3


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (["system=h100_8"], "needs a GPU that PyTorch sees"),
        (["data=nowhere"], "holds no folder with device.yaml"),
        (["operators=nowhere"], "is no package that `emit` wrote"),
        (["data=nowhere", "minutes=3"], "is not understood here"),
    ],
)
def test_judge_refuses_what_it_cannot_do(monkeypatch: pytest.MonkeyPatch, words: list[str], rule: str) -> None:
    monkeypatch.setattr("dse_torch.command._num_gpus", lambda: 0)
    with pytest.raises(ConfigError, match=rule):
        judge(words)


def test_tables_of_measured_gpus_say_where_they_are_from_and_hold_times(gpu: Any) -> None:
    gpus = tables.measured_gpus()
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
        tables.measured_gpus(tmp_path)
    with pytest.raises(ValueError, match="no lines"):
        gpu_page.with_table("a page", [])


def test_the_page_on_gpus_shows_what_is_judged_today(tmp_path: Path) -> None:
    judged = verdict.judge_tables()
    page = gpu_page.PAGE.read_text("utf-8")
    assert page == gpu_page.with_table(page, list(gpu_page.lines(judged)))
    (picture,) = plots.save(lambda: verdict.slowdowns(judged), tmp_path, "slowdown", formats=["png"])
    assert picture.stat().st_size > 10_000
    for name, sections in judged.items():
        assert all(sections.values()), name
