"""Machines fitted to profiles: hidden constants come back, what is not recorded stays, and the folder is read."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.twin import Case, draw_case, figures, fitted_case, rows_of_case, write_case
from dse.cli import main
from dse_traces.laws.twin import BESIDE, HOST, STREAMS, Twin, collective_seconds, fit_twin, scaled
from dse_traces.laws.twin_fit import TimedRows, fit_logarithm, twin_rules
from dse_traces.profile.kernels import profile_of
from simulators.hardware.device import Device
from simulators.hardware.machine import tree_of
from tests.support import drawn

US = 1e-6
GEMM = "gpu.efficiency.bf16.compute"
EIGHT = np.array([8.0])
REDUCE = "node.library.protocols.all_reduce.bytes_per_s"


def case_of(gemm: float = 0.8, reduce: float = 1.3, *, ranks: int = 2) -> Case:
    """A step of a model 8,192 wide on H100, with hidden factors."""
    hidden = {GEMM: gemm, REDUCE: reduce, STREAMS: 0.9, HOST: 9e-6}
    return Case("h100_8", "bf16", hidden, 8192, 8192, 2, 8, ("all_reduce",), ranks)


def fit(case: Case, folder: Path, *, noise: float = 0.0) -> Twin:
    return fitted_case(case, folder, np.random.default_rng(0), noise=noise)


def typed(folder: Path, *words: str) -> list[str]:
    return ["profile", "twin", f"profile={folder}", "system=h100_8", f"out={folder.parent / 'mine'}", *words]


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "ranks"
    folder.mkdir()
    write_case(case_of(), folder, np.random.default_rng(0))
    return folder


@drawn(6)
@given(gemm=st.floats(0.7, 1.4), reduce=st.floats(0.7, 1.4))
def test_hidden_factors_come_back_without_noise(
    gemm: float, reduce: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    case = case_of(gemm, reduce)
    rows = list(rows_of_case(case, fit(case, tmp_path_factory.mktemp("case"))))
    assert all(row["fitted"] and row["inside"] for row in rows)
    # the prior pulls one row by at most a few hundredths
    assert max(abs(row["error"]) for row in rows) < 0.03


def test_intervals_hold_hidden_constants_of_drawn_cases_with_noise(tmp_path: Path) -> None:
    rng, rows = np.random.default_rng(5), list[dict[str, Any]]()
    for number in range(4):
        (folder := tmp_path / str(number)).mkdir()
        case = draw_case(rng, "h100_8")
        rows += rows_of_case(case, fitted_case(case, folder, rng))
    assert figures(rows)["recovered"] >= 0.9
    assert figures(rows)["coverage"] >= 0.8


@pytest.mark.parametrize("ranks", [1, 2])
def test_waiting_for_late_ranks_is_no_slow_link(ranks: int, tmp_path: Path) -> None:
    twin = fit(case_of(ranks=ranks), tmp_path)
    of = next(of for of in twin.fitted if of.path == REDUCE)
    assert of.shipped is not None
    assert of.low <= 1.3 * of.shipped <= of.high
    assert of.value == pytest.approx(1.3 * of.shipped, rel=0.08)


def test_one_rank_that_always_waits_tells_nothing_of_links() -> None:
    name = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"
    row = {"name": name, "stream": "20", "seconds": 0.1, "collective": "allreduce", "payload_bytes": 1e8}
    profile = profile_of([{**row, "start_s": 0.2 * place} for place in range(9)], "made")
    reasons = {of.name: of.reason for of in fit_twin(tree_of("h100_8"), [profile], None).kept}
    assert "waiting for late ranks" in reasons["rate of all_reduce"]


def test_collectives_that_all_ran_beside_gemms_count_less_their_slowdown() -> None:
    device = Device.of(tree_of("h100_8"))
    factor, payload, slowed = 0.8, np.array([4e8]), device.gpu.contention.cu_copy_beside_gemm
    seconds = float(
        collective_seconds(scaled(device, [REDUCE], float(np.log(factor))), "all_reduce", payload, EIGHT)[0]
    )
    rows = list[dict[str, Any]]()
    for place in range(6):
        times = {"start_s": 0.02 * place, "seconds": slowed * seconds}
        rows.append({"name": "sm90_xmma_gemm_bf16", "stream": "7", **times, "ctas": 100})
        name = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"
        rows.append({"name": name, "stream": "20", **times, "payload_bytes": 4e8, "group_size": 8})
    twin = fit_twin(tree_of("h100_8"), [profile_of(rows, "made")], None)
    of = next(of for of in twin.fitted if of.path == REDUCE)
    assert of.shipped is not None
    assert of.value == pytest.approx(factor * of.shipped, rel=0.02)
    # what the collective would have without any slowdown is inside
    assert of.low < factor * of.shipped / slowed
    assert any("less what" in line for line in twin.recognised)


def test_ranks_that_are_not_here_widen_the_interval(tmp_path: Path) -> None:
    widths = list[float]()
    for gpus in (2, 8):
        (folder := tmp_path / str(gpus)).mkdir()
        case = replace(case_of(), gpus=gpus)
        of = next(of for of in fit(case, folder, noise=0.03).fitted if of.path == REDUCE)
        widths.append((of.high - of.low) / of.value)
    assert widths[1] > widths[0]


def test_gemms_beside_collectives_tell_their_slowdown() -> None:
    rows, start, slowdown = list[dict[str, Any]](), 0.0, 1.3
    for place in range(24):
        beside = place % 2 == 0
        seconds = 1e-3 * (slowdown if beside else 1.0)
        for step in range(5):
            # as many workgroups as leave SMs for the collective
            gemm = {"name": "sm90_xmma_gemm_bf16", "stream": "7", "seconds": seconds, "ctas": 100}
            rows.append({**gemm, "start_s": start + step * seconds})
        if beside:
            name = "ncclDevKernel_AllGather_RING_LL"
            rows.append({"name": name, "stream": "20", "start_s": start, "seconds": 5 * seconds, "ctas": 16})
        start += 5 * seconds + 1e-4
    twin = fit_twin(tree_of("h100_8"), [profile_of(rows, "made")], None)
    of = next(of for of in twin.fitted if of.path == BESIDE)
    assert of.low <= slowdown <= of.high


def test_the_prior_counts_where_rows_are_few_and_intervals_narrow_with_rows() -> None:
    rules = twin_rules()

    def fitted(count: int) -> Any:
        ones = np.ones(count)
        rows = TimedRows.exact(1.2 * ones, np.ones(count, np.int64))
        return fit_logarithm(rows, lambda at: np.exp(at) * ones, (-2.0, 2.0), rules.prior_spread)

    single, plenty = fitted(1), fitted(40)
    assert 0 < single.value < plenty.value <= np.log(1.2) + 1e-6
    assert single.high - single.low > 4 * (plenty.high - plenty.low)


def test_a_single_outlier_does_not_move_a_constant() -> None:
    seconds, ones = np.append(np.ones(20), 9.0), np.ones(21)
    rows = TimedRows.exact(seconds, np.ones(21, np.int64))
    fit = fit_logarithm(rows, lambda at: np.exp(at) * ones, (-2.0, 2.0), None)
    assert abs(fit.value) < 0.02


def test_the_folder_is_a_machine_in_which_all_else_is_as_shipped(
    traces: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(typed(traces, "stack=megatron_2026", "model=llama3_8b")) == 0
    text, folder = capsys.readouterr().out, traces.parent / "mine"
    assert "2 ranks, 3 iterations" in text
    assert f"plan model=llama3_8b system=twin stack=twin --config-dir {folder}" in text.replace("\n", "")
    shipped, twin = tree_of("h100_8"), tree_of(str(folder / "system" / "twin.yaml"))
    changed = yaml.safe_load((folder / "system" / "twin.yaml").read_text())
    assert changed["defaults"] == ["h100_8", "_self_"]
    assert {source["provenance"] for source in changed["sources"].values()} == {"measured"}
    assert set(changed["sources"]) == {
        *(f"gpu.efficiency.bf16.{name}" for name in ("compute", "feed", "sustained")),
        *(REDUCE, STREAMS),
    }
    before, after = shipped["gpu"]["efficiency"]["bf16"], twin["gpu"]["efficiency"]["bf16"]
    assert after["compute"] == pytest.approx(0.8 * before["compute"], rel=0.06)
    assert after["launch_s"] == before["launch_s"]
    assert twin["gpu"]["contention"] == shipped["gpu"]["contention"]


def test_a_plan_runs_on_the_folder(traces: Path, tmp_path: Path) -> None:
    out = tmp_path / "twin"
    assert main(["profile", "twin", f"profile={traces}", "system=h100_8", "stack=torchtitan", f"out={out}"]) == 0
    words = ["plan", "model=llama3_8b", "system=twin", "stack=twin", "run.mode=training", f"output_dir={tmp_path}"]
    assert main([*words, "tracking=none", "--config-dir", str(out)]) == 0
    config = yaml.safe_load((tmp_path / "plan" / "latest" / "config.yaml").read_text())
    assert config["system"]["name"] == "twin"
    assert config["kernels"]["host_launch_s"] == pytest.approx(9e-6, rel=0.05)


def test_a_profile_without_shapes_or_launches_fits_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.csv"
    path.write_text("start_us,dur_us,stream,name\n0,10,7,sm90_xmma_gemm_bf16\n")
    assert main(["profile", "twin", f"profile={path}", "system=h100_8", f"out={tmp_path / 'mine'}"]) == 3
    text = capsys.readouterr().out
    assert "nothing is written" in text
    assert "record_shapes=True" in text
    assert not (tmp_path / "mine").exists()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["system=h1o0_8"], "h100_8"),
        (["system=h100_8", "stack=megatron_2027"], "megatron_2026"),
        (["system=h100_8", "model=llama3_8c"], "llama3_8b"),
        (["system=h100_8", "profil=x"], "profil"),
        ([], "system"),
    ],
)
def test_wrong_words_are_refused(
    words: list[str], named: str, traces: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", "twin", f"profile={traces}", *words]) == 2
    assert named in capsys.readouterr().err


def test_another_gpu_than_the_machine_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path,) = write_case(replace(case_of(), ranks=1), tmp_path, np.random.default_rng(0))
    trace = json.loads(gzip.decompress(path.read_bytes()))
    trace["deviceProperties"] = [{"id": 0, "name": "NVIDIA A100-SXM4-80GB"}]
    path.write_bytes(gzip.compress(json.dumps(trace).encode()))
    assert main(["profile", "twin", f"profile={path}", "system=h100_8", f"out={tmp_path / 'mine'}"]) == 0
    text = capsys.readouterr().out
    assert "names NVIDIA A100" in text
    assert "add stack=<nearest stack>" in text
    assert not (tmp_path / "mine" / "stack").exists()
