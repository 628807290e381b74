"""Measured prefills of whole models held against predictions that nothing was fitted to."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import validity
from benchmarks.prefill import model_named, predict_prefill


def test_longer_prompts_take_longer_and_more_gpus_less_time() -> None:
    points = [(length, tp) for length in (1024, 4096) for tp in (2, 4)]
    times = {point: predict_prefill("llama3_8b", *point)["prefill"] for point in points}
    assert times[1024, 2] < times[4096, 2]
    assert times[4096, 4] < times[4096, 2]
    assert times[4096, 2] > 3 * times[1024, 2]


def test_models_are_known_by_the_names_of_tables() -> None:
    assert model_named("Llama-3.1-8B") == "llama3_8b"
    assert model_named("Qwen2.5-72B-Instruct") == "qwen2.5_72b"
    assert model_named("Nobodys-7B") is None


def test_rows_of_unknown_models_are_told_and_a_table_of_them_alone_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head = "model,prompt_len,baseline_multimem,no_ar,overlap_fused,tp\n"
    (tmp_path / "prefill.csv").write_text(head + "Nobodys-7B,1024,10,9,9,8\n")
    assert validity.main(["--data", str(tmp_path), "--json"]) == 2
    assert "rows of Nobodys-7B are skipped" in capsys.readouterr().err


def test_prefills_of_llama_70b_take_about_as_long_as_was_measured(
    shared: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Llama 3.3 70B on 4 and 8 x H100 (microsoft/tokenweave): median 11 %, compute alone 16 % too fast."""
    (tmp_path / "prefill.csv").write_text(shared("data/tokenweave/prefill_llama_70b.csv").read_text("utf-8"))
    assert validity.main(["--data", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = {row["kind"]: row for row in found["tables"]}
    assert found["prefill_median"] == rows["prefill"]["median"] < 0.12
    assert rows["prefill"]["rows"] == 14
    assert 0.10 < rows["prefill without all-reduces"]["median"] < 0.20
