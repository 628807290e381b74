"""Measured prefills of whole models, and what overlap by halves of their tokens saves, held against predictions."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import validity
from dse.config.options import conf_dir
from dse_calibration.overlap_measured.prefills import BASELINE, NO_SUMS, OVERLAPPED, predict_prefill
from simulators.costs.power import sustained_clock
from simulators.costs.sharing import Sharing
from simulators.hardware.machine import tree_of
from simulators.hardware.parts import CuCopy, LoadedClock
from simulators.steps.backend import StepBackend, metrics_of
from simulators.steps.design import StepDesign
from simulators.steps.operators.fused_sums import HALVES
from simulators.steps.operators.work import OperatorCost
from simulators.steps.overlap.token_splits import LibrarySums, beside_sums, hidden_s
from simulators.workloads.model_zoo import model_tree, option_tree

SECONDS = st.floats(1e-6, 1e-2)
BACKEND = StepBackend()


def prefill(prompt_len: int = 4096, system: str = "h100_8", **parallel: Any) -> StepDesign:
    """A prefill of Llama 3 8B on GPUs of a node, 8 x H100 if no other."""
    sections = {"optimizer": "adam", "kernels": "flash"}
    run = {"mode": "prefill", "batch": 1, "sequence_length": prompt_len, "precision": "bf16"}
    return BACKEND.design(
        {
            **{group: option_tree(group, option) for group, option in sections.items()},
            "system": tree_of(system),
            "model": model_tree("llama3_8b"),
            "run": run,
            "parallel": {"tp": 4, "pp": 1, "dp": 1, "collectives": "in_switch", **parallel},
        }
    )


def test_longer_prompts_take_longer_and_more_gpus_less_time() -> None:
    points = [(length, tp) for length in (1024, 4096) for tp in (2, 4)]
    times = {point: predict_prefill("llama3_8b", *point)[BASELINE] for point in points}
    assert times[1024, 2] < times[4096, 2]
    assert times[4096, 4] < times[4096, 2]
    assert times[4096, 2] > 2 * times[1024, 2]


def test_overlap_saves_time_and_no_more_than_sums_and_norms_take() -> None:
    times = predict_prefill("llama3_8b", 8192, 4)
    assert times[OVERLAPPED] < times[BASELINE]
    assert times[NO_SUMS] < times[BASELINE]
    assert times[OVERLAPPED] > 0.85 * times[NO_SUMS]


# Halves of tokens


@given(computing=st.tuples(SECONDS, SECONDS), adding=SECONDS, layers=st.integers(1, 100))
def test_halves_hide_sums_behind_computing_and_never_computing_itself(
    computing: tuple[float, float], adding: float, layers: int
) -> None:
    pairs = [(half, seconds) for seconds in computing for half in HALVES]
    turns = [turn for half, seconds in pairs for turn in ((half, False, seconds), (half, True, adding))]
    computed, added = layers * 2 * sum(computing), layers * 4 * adding
    hidden = float(hidden_s(turns, layers))
    assert -1e-12 <= hidden <= min(computed, added) * (1 + 1e-9)
    if adding < min(computing):
        assert hidden == pytest.approx(added - adding, rel=1e-9)  # all but the last sum


def test_halves_do_the_work_of_the_whole_prompt() -> None:
    full, halves = (metrics_of(prefill(split_ctas=ctas)) for ctas in (0, 8))
    assert halves["flop"] == pytest.approx(full["flop"], rel=1e-3)  # pairs on the diagonal
    shares = [name for name in halves if name.startswith("share_")]
    assert sum(float(halves[name]) for name in shares) == pytest.approx(1.0)


@given(alone=SECONDS, slower=st.floats(1, 2), added=SECONDS, interference=st.floats(1, 1.5))
def test_kernels_beside_sums_are_slowed_for_as_long_as_sums_take(
    alone: float, slower: float, added: float, interference: float
) -> None:
    (seconds,) = beside_sums([alone], [slower * alone], [added], sharing=Sharing(interference))
    assert alone <= float(seconds) * (1 + 1e-12)
    assert float(seconds) <= max(slower, interference) * alone * (1 + 1e-12)


@pytest.mark.parametrize("changes", [{"tp": 1}, {"sequence_parallel": True}], ids=["one GPU", "split"])
def test_halves_are_refused_where_no_partial_sums_are_added(changes: dict[str, Any]) -> None:
    paths = {problem.path for problem in BACKEND.problems(prefill(split_ctas=8, **changes))}
    assert "parallel.split_ctas" in paths


def on_node_without_sums(**parallel: Any) -> StepDesign:
    """A long prefill on A100s, whose switch does not add."""
    return prefill(16384, "a100_8", **parallel)


def test_halves_have_the_librarys_sums_where_no_switch_adds() -> None:
    undivided, halves = (on_node_without_sums(collectives="library", split_ctas=ctas) for ctas in (0, 8))
    assert BACKEND.problems(undivided) == BACKEND.problems(halves) == []
    serial, split = metrics_of(undivided), metrics_of(halves)
    assert split["flop"] == pytest.approx(serial["flop"], rel=1e-3)
    assert split["iteration_s"] < serial["iteration_s"]  # long prompts gain
    assert split["iteration_s"] > serial["iteration_s"] * (1 - serial["share_communication"])  # no more than all sums
    (problem,) = BACKEND.problems(on_node_without_sums(collectives="in_switch", split_ctas=8))[:1]
    assert "switch that adds" in str(problem)
    assert undivided.system.gpu.cu_copy is not None
    most = int(undivided.system.gpu.cu_copy.num_cus)
    (problem,) = BACKEND.problems(on_node_without_sums(collectives="library", split_ctas=most + 1))
    assert problem.path == "parallel.split_ctas"
    assert f"take {most} at most" in problem.way_out


@given(few=st.integers(1, 24), more=st.integers(1, 24), sent=SECONDS, slowdown=st.floats(1, 2))
def test_sums_of_the_library_take_no_less_on_fewer_ctas_or_beside_gemms(
    few: int, more: int, sent: float, slowdown: float
) -> None:
    copy = CuCopy(num_cus=24, bytes_per_s_per_cu=18e9, all_to_all_factor=1.0, link_efficiency=0.9, setup_s=1e-5)
    alone = OperatorCost(*(np.asarray(value) for value in (0.0, 0.0, 1e9 * sent, sent)))
    times = [float(LibrarySums(ctas, copy, slowdown).cost(alone).seconds) for ctas in sorted((few, more))]
    assert times[0] >= times[1] * (1 - 1e-12)
    assert times[1] >= sent * (1 - 1e-12)
    few_ctas = LibrarySums(few, copy, slowdown).cost(alone)
    assert few_ctas.comm_cu_s == pytest.approx(few * few_ctas.seconds)


# Clock under load


@given(x=st.floats(0.01, 1), y=st.floats(0, 1), clock=st.floats(0.3, 1))
def test_the_clock_under_load_is_that_of_gemms_alone_and_falls_with_what_runs(x: float, y: float, clock: float) -> None:
    loaded = LoadedClock(gemm_clock=clock, idle_share=0.1, exchange_share=0.4)
    assert float(sustained_clock(loaded, 1.0, 0.0)) == pytest.approx(clock)
    of_shares = [float(sustained_clock(loaded, *shares)) for shares in ((x, y), (x / 2, y), (x, y / 2))]
    assert of_shares[0] <= min(of_shares[1:]) + 1e-12
    assert max(of_shares) <= 1.0
    if of_shares[0] < 1:
        drawn = 0.1 + x * 0.9 * (of_shares[0] / clock) ** 3 + y * 0.3
        assert drawn == pytest.approx(1.0)


# Tables


def test_rows_of_unknown_models_are_told_and_a_table_of_them_alone_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head = "model,prompt_len,baseline_multimem,no_ar,overlap_fused,tp\n"
    (tmp_path / "prefill.csv").write_text(head + "Nobodys-7B,1024,10,9,9,8\n")
    assert validity.main(["--data", str(tmp_path), "--json"]) == 2
    assert "prefill.csv of Nobodys-7B: no such model" in capsys.readouterr().err


@pytest.mark.nightly
def test_prefills_of_llama_70b_take_about_as_long_as_was_measured(
    shared: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Llama 3.3 70B on 4 and 8 x H100 (microsoft/tokenweave): medians; three rows without all-reduces were fitted."""
    (tmp_path / "prefill.csv").write_text(shared("data/tokenweave/prefill_llama_70b.csv").read_text("utf-8"))
    assert validity.main(["--data", str(tmp_path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    rows = {row["kind"]: row for row in report["tables"]}
    assert report["prefill_median"] == rows[BASELINE]["median"] < 0.03
    assert rows[BASELINE]["rows"] == 14
    assert rows[NO_SUMS]["rows"] == 11
    assert rows[NO_SUMS]["median"] < 0.02
    assert rows[OVERLAPPED]["median"] < 0.05
    assert report["prefill_gain_points"] < 0.03


@pytest.mark.nightly
def test_overlaps_of_a_gemm_and_its_collective_gain_or_lose_as_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The shipped table of other projects and GPUs: each row is judged, or left out with the reason."""
    shipped = conf_dir() / "data" / "overlap" / "gemm_collective.csv"
    (tmp_path / "overlaps.csv").write_text(shipped.read_text("utf-8"))
    assert validity.main(["--data", str(tmp_path), "--json"]) == 0
    output = capsys.readouterr()
    report = json.loads(output.out)
    judged = sum(row["rows"] for row in report["tables"])
    left_out = sum(map(int, re.findall(r"left out: (\d+) rows? of overlaps", output.err)))
    assert judged > 50
    assert judged + left_out == len(pd.read_csv(shipped, comment="#"))
    assert "rows of overlaps.csv: constants were fitted on them" in output.err
    assert report["fused_sign"] > 0.9
    assert report["fused_median"] < 0.12
