"""Validity commands judge the folder that they are given: made rows, of which the figures are known beforehand."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import expert_exchanges, plan, traces, validity
from dse.config.options import conf_dir
from dse.files import read_csv
from dse_calibration.contention import TABLE, TIMES, Overlaps, predict_overlaps
from dse_calibration.overlap_measured.gemm_collective import NEEDED
from dse_calibration.overlap_measured.prefills import BASELINE, NO_SUMS, OVERLAPPED, predict_prefill
from simulators.hardware.machine import tree_of
from simulators.hardware.schedule_system import ScheduleSystem
from simulators.steps.overlap.implementations import implementation
from validation import amd_tables
from validation.contention_laws import tables
from validation.expert_rows import constants_of, node_of, predict, read_rows
from validation.measured_step import settings
from validation.published_tables import read_throughput
from validation.unseen_overlaps import fitted_again

LIBRARIES = {"static": "torch", "dynamic": "ws"}
SWEPT = {"gemm": "gemm_overlap", "comm": "comm_overlap", "wall": "wall"}
DEEPEP = {"device": "h100_sxm", "node_num": 4, "hidden_size": 7168, "num_token": 4096, "num_topk": 8}
DEEPEP |= {"num_experts": 256, "dispatch_sms": 20, "dispatch_transmit_us": 900, "dispatch_notify_us": 0}
DEEPEP |= {"combine_sms": 20, "combine_transmit_us": 1500, "combine_notify_us": 0}


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write rows as a CSV, in folders that may not exist yet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(rows)
    return path


def write_sweep(path: Path, *, slower: float) -> Path:
    """Write a sweep of channels in the columns of ROCm/tritonBLAS; overlaps take `slower` times what is predicted."""
    lines: list[dict[str, Any]] = []
    for channels in (10, 20):
        lines.append({"channels": channels, "size": 8192, "comm_alone_ms": 90 / channels})
        for library in LIBRARIES.values():
            lines[-1] |= {f"{library}_alone_ms": 1.7, **{f"{library}_{name}_ms": 1.0 for name in SWEPT.values()}}
    rows = Overlaps.read(write(path, lines))
    times = predict_overlaps(ScheduleSystem.of(tree_of("mi300x_8")), rows)
    for place, assignment in enumerate(rows.assignment):
        measured = {f"{LIBRARIES[assignment]}_{SWEPT[name]}_ms": 1e3 * slower * times[name][place] for name in TIMES}
        lines[place // 2] |= measured
    return write(path, lines)


def judge(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], str]:
    """Figures of `benchmarks.validity`, and what it left out."""
    assert validity.main(["--data", str(folder), "--json"]) == 0
    output = capsys.readouterr()
    return json.loads(output.out), output.err


def test_gemms_beside_collectives_are_those_of_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_sweep(tmp_path / "sweep.csv", slower=2.0)
    write(tmp_path / "serving" / "other.csv", [{"users": 3}])
    figures, left_out = judge(tmp_path, capsys)
    assert {name: figures[f"overlap_{name}_median"] for name in TIMES} == pytest.approx(dict.fromkeys(TIMES, 0.5))
    assert [(row["kind"], row["rows"]) for row in figures["tables"]] == [
        ("GEMM beside a collective", 4),
        ("collective beside a GEMM", 4),
        ("GEMM and collective", 4),
    ]
    assert "left out: gemm_median_worst: no table of the folder gives it" in left_out
    assert "left out: serving/other.csv: not of a layout that this command reads" in left_out


def test_a_folder_without_overlaps_has_no_figure_of_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gemm = {"device": "h100_sxm", "gemm_dtype": "bf16", "m": 4096, "n": 4096, "k": 1000, "latency": 1.0}
    write(tmp_path / "gemm.csv", [gemm, {**gemm, "device": "nobodys"}])
    figures, left_out = judge(tmp_path, capsys)
    assert not [name for name in figures if name.startswith("overlap_")]
    assert "left out: overlap_wall_median: no table of the folder gives it" in left_out
    assert "1 row of gemm of nobodys at bf16 in gemm.csv: no such machine in conf/system" in left_out


def test_times_tell_the_measurement_that_was_fitted_on(tmp_path: Path) -> None:
    """Rows of the shipped table in the columns of their source, of 4 channels (fitted on) and of 8 (not)."""
    shipped = Overlaps.read(TABLE)
    line: dict[str, Any] = {}
    for factor, channels, fitted in ((1.0, 4, True), (1.0, 8, False), (1.1, 4, False)):
        for place in np.flatnonzero((shipped.channels == channels) & (shipped.size == 8192)).tolist():
            library = LIBRARIES[shipped.assignment[place]]
            line |= {"channels": channels, "size": 8192, "comm_alone_ms": 1e3 * shipped.comm_alone[place]}
            line |= {f"{library}_{column}_ms": 1e3 * getattr(shipped, name)[place] for name, column in SWEPT.items()}
            line |= {f"{library}_alone_ms": 1e3 * factor * shipped.gemm_alone[place]}
        line = {name: round(value, 6) for name, value in line.items()}
        assert Overlaps.read(write(tmp_path / "sweep.csv", [line])).fitted.tolist() == [fitted, fitted]


def test_exchanges_are_told_by_their_number_of_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{**DEEPEP, "node_num": nodes, "num_token": 8192} for nodes in (2, 4, 8)]
    write(tmp_path / "ep_collectives" / "made.csv", [*rows, {**DEEPEP, "device": "nobodys"}])
    groups = expert_exchanges.medians_of(expert_exchanges.judged_rows(tmp_path))
    assert set(groups) == {
        f"made h100_sxm {nodes} nodes {way}" for nodes in (2, 4, 8) for way in ("dispatch", "combine")
    }
    assert "2 rows of made.csv: no machine of conf/node for nobodys" in capsys.readouterr().err


@pytest.mark.more
@pytest.mark.slow
def test_errors_of_steps_and_exchanges_follow_a_partial_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An exchange that took twice as long as is predicted, and prefills that took four times as long."""
    table = write(tmp_path / "ep_collectives" / "made.csv", [DEEPEP])
    node, slow = node_of("h100_sxm"), dict[str, Any]()
    for row in read_rows(table):
        constants = constants_of(row, node)
        assert constants is not None
        slow[f"{row.direction}_transmit_us"] = 2e6 * predict(constants, row, node)
    write(table, [{**DEEPEP, **slow}])
    times = predict_prefill("llama3_70b", 3000, 8)
    columns = {BASELINE: "baseline_multimem", OVERLAPPED: "overlap_fused", NO_SUMS: "no_ar"}
    prefill = {columns[kind]: 4e3 * seconds for kind, seconds in times.items()}
    sizes = {"model": "Llama-3.3-70B-Instruct", "prompt_len": 3000, "tp": 8}
    write(tmp_path / "tokenweave" / "prefill_llama_70b.csv", [{**sizes, **prefill}])
    figures = plan.accuracy(tmp_path)
    assert [figures["ep_median"], figures["ep_median_worst_table"]] == pytest.approx([0.5, 0.5])
    assert figures["prefill_median"] == pytest.approx(0.75)
    assert not {"ep_published_median_worst", "steps_vtrain_median", "dualpipe_pair"} & set(figures)
    left_out = capsys.readouterr().err
    for name in ("steps_vtrain_...", "steps_async_tp_...", "dualpipe_..."):
        assert f"left out: {name}: no table below {tmp_path} gives it" in left_out
    assert set(traces.measured_figures(tmp_path)) == {
        "micro_batches_time", "micro_batches_gain_points", "micro_batches_in_interval",
    }  # fmt: skip
    left_out = capsys.readouterr().err
    assert "left out: sm_law_...:" in left_out
    assert "left out: dualpipe_...:" in left_out
    assert plan.accuracy(tmp_path / "tokenweave")["prefill_median"] == pytest.approx(0.75)


def test_kernels_on_other_numbers_of_nodes_are_other_kernels(tmp_path: Path) -> None:
    write(tmp_path / "made.csv", [{**DEEPEP, "node_num": nodes, "num_token": 8192} for nodes in (4, 8)])
    ((_, kernels),) = tables(tmp_path)
    assert sorted(kernel.name.partition(",")[0] for kernel in kernels) == [
        f"network {way} of {nodes} nodes" for way in ("combine", "dispatch") for nodes in (4, 8)
    ]


STRANGE = {"container": "x", "sequence_length": 4096, "fsdp": 0, "tp": 1, "pp": 1, "cp": 1, "vp": "n/a", "ep": 8}
STRANGE |= {"model": "Qwen3_30B_a3B", "system": "DGX-H100", "precision": "FP8", "gpus": 8, "global_batch": 512}
STRANGE |= {"micro_batch": 1, "tokens_per_s_per_gpu": "31357 (29925)", "tflop_per_s_per_gpu": "", "step_ms": ""}


def test_a_number_with_a_note_is_read_and_rows_that_cannot_be_read_are_told_with_why(tmp_path: Path) -> None:
    changes: list[dict[str, Any]] = [{}, {"system": "DGX-Z9"}, {"tokens_per_s_per_gpu": "fast"}, {"gpus": 0}]
    changes += [{"global_batch": "1,024"}, {"micro_batch": "2 or 4"}, {"model": "Nobody_7B"}]
    write(tmp_path / "steps" / "megatron_bridge_strangers.csv", [{**STRANGE, **change} for change in changes])
    read = read_throughput(tmp_path)
    noted, larger = read.steps
    assert noted.seconds == pytest.approx(512 * 4096 / 8 / 31357)
    assert larger.seconds == pytest.approx(2 * noted.seconds)
    reasons = " ".join(read.left_out)
    assert sum(read.left_out.values()) == 5
    assert all(part in reasons for part in ("DGX-Z9: none of the systems", "Nobody_7B: none of the models"))
    assert all(part in reasons for part in ("tokens_per_s_per_gpu = 'fast'", "gpus = '0'", "micro_batch = '2 or 4'"))


def test_rows_of_unknown_gpus_are_left_out_of_tables_of_amd(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"collective": "all_reduce", "bytes": "268,435,456", "gpus": 8, "gpu": "MI300X", "time_us": "1500 (1)"}
    file = tmp_path / str(settings()["amd_collectives"]["file"])
    write(file, [row | {"placement": "out"}, row | {"gpu": "MI999", "placement": "out"}])
    assert len(amd_tables.collectives(tmp_path)) == 1
    assert "left out: 1 row of collectives of MI999" in capsys.readouterr().err


def test_folders_stand_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [tmp_path / "seen", tmp_path / "other"]
    for folder, slower in zip(folders, (1.1, 1.3), strict=True):
        write_sweep(folder / "sweep.csv", slower=slower)
    assert validity.main(["--data", *map(str, folders)]) == 0
    lines = capsys.readouterr().out.splitlines()
    wall = next(line for line in lines if "GEMM and collective" in line and line.count("%") == 2)
    assert wall.split()[-4:] == ["9.1", "%", "23.1", "%"]
    assert validity.main(["--data", *map(str, folders), "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == {str(folder) for folder in folders}


def test_an_interrupt_gives_the_figures_until_then(capsys: pytest.CaptureFixture[str]) -> None:
    def rows() -> Iterator[dict[str, Any]]:
        yield {"file": "first.csv"}
        raise KeyboardInterrupt

    assert validity.judged_until_interrupt(rows(), "folder") == [{"file": "first.csv"}]
    assert "stopped: the figures are of the 1 tables until then" in capsys.readouterr().err


@pytest.mark.parametrize("command", [expert_exchanges, plan, traces, validity])
def test_a_folder_that_is_not_there_is_refused(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--data", "nowhere"])
    assert "nowhere is no folder: name that of the measured tables" in capsys.readouterr().err


def test_a_folder_without_profiles_has_no_replays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert traces.profiles(tmp_path) == []
    assert traces.replay_figures([]) == {}
    assert "the folder has no profile" in capsys.readouterr().err


@pytest.mark.more
@pytest.mark.slow
def test_a_knob_of_software_that_nobody_saw_is_that_of_other_software() -> None:
    rows = [cells for _, cells in read_csv(conf_dir() / "data" / "overlap" / "gemm_collective.csv", needed=NEEDED).rows]
    software = implementation("torch_async_tp")
    assert software is not None
    expected = {"torch symm_mem async TP": pytest.approx(software.schedules["before"]["lost_rows"], rel=0.02), "": None}
    for method, lost_rows in expected.items():
        assert fitted_again("lost_rows", [cells for cells in rows if cells["method"] == method]) == lost_rows
