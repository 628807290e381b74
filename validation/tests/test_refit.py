"""Calibrated numbers of `conf`: each says what it was fitted to, and a fit today gives it again."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from benchmarks.refit import Row, compare_copies, groups, main, recompute, recompute_all
from dse import plugins
from dse.values import Source
from tests.support import CONF, REPOSITORY
from validation import contention_page
from validation.calibrated_numbers import (
    calibrated_numbers,
    copies,
    table_path,
    value_of,
    without_calibration,
    write_number,
)
from validation.refits import REFITTERS

SHARED = REPOSITORY.parent / "shared" / "data"
LOOSEST = 0.02


@pytest.mark.slow
def test_what_is_labelled_calibrated_names_its_target_its_tolerance_and_its_function() -> None:
    assert without_calibration() == []
    numbers = calibrated_numbers()
    names = {number.calibration.recomputed_by for number in numbers}
    assert names <= set(REFITTERS)
    assert set(REFITTERS) - names <= {"technology", "serving", "serving_sets"}  # where their plug-ins are not installed
    assert max(number.calibration.tolerance for number in numbers) <= LOOSEST
    targets = {number.calibration.target for number in numbers}
    assert all(target.endswith((".csv", ".yaml")) for target in targets if isinstance(target, str))


@pytest.mark.slow
def test_no_label_in_a_file_is_overlooked() -> None:
    """What is read of the files is counted against their text."""
    folders = [CONF, *plugins.configurations()]
    texts = [file.read_text("utf-8") for folder in folders for file in folder.rglob("*.yaml")]
    labels = sum(text.count("provenance: calibrated") for text in texts)
    assert labels == sum(text.count("calibration: {target") for text in texts) > 50
    assert len(copies()) > sum(text.count("copy_of: ") for text in texts) > 50


@pytest.mark.more
@pytest.mark.one_in(10)
@pytest.mark.parametrize("part", range(10))
def test_calibrated_numbers_are_what_a_fit_gives_today(part: int) -> None:
    for group in groups()[part::10]:
        rows = recompute(group, SHARED)
        if rows is None:
            pytest.skip(f"{group.target} is absent: the tables that numbers are fitted to are not shipped")
        assert [str(row) for row in rows if row.off] == []
        assert len(rows) == len(group.numbers)


def test_copies_of_calibrated_numbers_are_those_of_the_original() -> None:
    assert [str(row) for row in compare_copies() if row.off or math.isnan(row.new)] == []


def test_the_rate_of_a_gpu_of_deepbench_is_its_peak_at_the_efficiency_that_was_fitted() -> None:
    derived = [file for file in (CONF / "gpu").glob("*.yaml") if "of this file (calibrated)" in file.read_text("utf-8")]
    assert len(derived) == 4
    for file in derived:
        option = f"gpu/{file.stem}"
        rate, peak, share = (
            value_of(option, path) for path in ("flop_per_s.fp32", "peak_flop_per_s.fp32", "efficiency.fp32.compute")
        )
        assert rate is not None
        assert peak is not None
        assert share is not None
        assert rate == pytest.approx(peak * share, rel=1e-3)


def test_a_number_that_no_fit_gives_is_off() -> None:
    """A coefficient of contention that somebody changed by hand."""
    fitted = [group for group in groups() if group.by == "contention"]
    assert len(fitted) == 2  # MI300X and A100
    for group in fitted:
        changed = replace(group, numbers=tuple(replace(number, value=1.05 * number.value) for number in group.numbers))
        rows = recompute(changed, None)
        assert rows is not None
        assert all(row.off for row in rows)
        assert {row.constant: row.new for row in rows} == {str(number): number.value for number in group.numbers}


def test_a_quantity_off_its_target_is_off_whatever_the_numbers_are() -> None:
    row = Row("x", 1.0, 1.0, 72.0, 72.3, 0.005)
    assert not row.off
    assert replace(row, achieved=92.2).off
    assert replace(row, achieved=None, new=1.01).off
    assert not replace(row, achieved=None).off


@pytest.mark.slow
def test_a_table_that_is_absent_is_counted_and_not_passed(tmp_path: Path) -> None:
    report = recompute_all(tmp_path, only=["host"])
    assert report.absent == {"host, steps/vtrain_a100_single_node.csv": 2}
    assert not any("kernels/megatron_deepspeed" in row.constant for row in report.rows)
    assert table_path("overlap/mi300x_gemm_allreduce.csv", tmp_path) is not None
    assert table_path("steps/vtrain_a100_single_node.csv", tmp_path) is None


@pytest.mark.slow
def test_the_command_prints_every_number_and_how_many_are_off(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "links", "--check"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].endswith("calibrated_off 0")
    assert any(line.strip().startswith("gpu/l20: cu_copy.link_efficiency: 0.302, by a fit today") for line in lines)


def test_a_number_is_written_in_its_unit_and_all_else_stays(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    text = "a: {b: 7.08 ms, c: 2} # a comment\nd:\n  e: 1.23 # another\n  f: 1.0e-07\n"
    file.write_text(text)
    write_number(file, "a.b", 8.5e-3)
    write_number(file, "d.e", 1.384)
    write_number(file, "d.f", 2.5e-7)
    changed = text.replace("7.08 ms", "8.5 ms").replace("1.23", "1.384").replace("1.0e-07", "2.5e-07")
    assert file.read_text() == changed


def test_only_what_is_calibrated_names_a_calibration() -> None:
    calibration = {"target": 72, "tolerance": 0.01, "recomputed_by": "conccl"}
    assert Source.model_validate({"provenance": "calibrated", "source": "xyz", "calibration": calibration})
    for wrong in ({"provenance": "assumed"}, {"calibration": {**calibration, "tolerance": 0}}):
        with pytest.raises(ValidationError):
            Source.model_validate({"provenance": "calibrated", "source": "xyz", "calibration": calibration, **wrong})


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "block",
    [pytest.param(name, marks=pytest.mark.slow if name == "overlaps" else ()) for name in contention_page.BLOCKS],
)
def test_numbers_of_the_page_on_contention_are_those_of_the_model(block: str) -> None:
    page = contention_page.PAGE.read_text("utf-8")
    assert contention_page.with_block(page, block) == page
    with pytest.raises(ValueError, match="no lines"):
        contention_page.with_block("a page", block)
