"""Profiles of real runs: read as far as they go, what waits for what, and the same run replayed."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from benchmarks.traces import made_events, profiles, replayed
from dse.cli import main
from dse.errors import ConfigError
from dse_traces.commands.one_rank import kernels
from dse_traces.profile.kernel_classes import kernel_class
from dse_traces.profile.kernels import Profile, profile_of
from dse_traces.profile.replay import replay
from dse_traces.profile.waits import CAUSES, OTHER_STREAM, SMS, UNKNOWN, waits
from dse_traces.readers.formats import read

GEMM, SUM = "sm90_xmma_gemm_bf16", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"
US = 1e-6


def kernel(name: str, stream: str, start: float, duration: float, launch: float | None = None) -> dict[str, Any]:
    """A kernel; times in microseconds."""
    launch_s = None if launch is None else launch * US
    return {"name": name, "stream": stream, "start_s": start * US, "seconds": duration * US, "launch_s": launch_s}


def chrome(folder: Path, events: Iterable[Any], name: str = "run.json", **fields: Any) -> Path:
    """A Chrome trace of some events."""
    path, text = folder / name, json.dumps({"schemaVersion": 1, **fields, "traceEvents": list(events)}, indent=2)
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "collective"),
        ("void flash_fwd_splitkv_combine_kernel<...>", "attention"),
        ("Memcpy HtoD (Pinned -> Device)", "copy"),
        ("void moe_gemm_kernel<...>", "grouped GEMM"),
        ("Cijk_Ailk_Bljk_BBS_BH_MT256x256x64", "GEMM"),
        ("cudnn::winograd_nonfused::winogradForwardData4x4", "convolution"),
        ("vllm::rms_norm_kernel", "norm"),
        ("void at::native::vectorized_elementwise_kernel", "element-wise"),
        ("mystery", "other"),
    ],
)
def test_kernels_are_classed_by_their_names(name: str, kind: str) -> None:
    assert kernel_class(name) == kind


def test_a_kernel_waits_for_the_kernel_of_another_stream_that_ended_last() -> None:
    rows = [kernel(GEMM, "7", 0, 100, -5), kernel(SUM, "20", 102, 50, -4), kernel(GEMM, "7", 155, 10, -3)]
    waiting = waits(profile_of(rows, "made"))
    assert [CAUSES[cause] for cause in waiting.cause[1:]] == [OTHER_STREAM, OTHER_STREAM]
    assert waiting.blocker.tolist() == [-1, 0, 1]


def test_a_kernel_that_begins_while_another_computes_waited_for_its_sms() -> None:
    rows = [kernel(GEMM, "7", 0, 10, -5), kernel(GEMM, "23", 5, 300, -4), kernel(GEMM, "7", 200, 50, -3)]
    done = replay(profile_of(rows, "made"))
    assert CAUSES[done.waits.cause[2]] == SMS
    assert done.start_s[2] == pytest.approx(200 * US, abs=6 * US)


def test_what_waited_for_an_unknown_reason_does_not_wait_in_the_replay() -> None:
    rows = [kernel(GEMM, "7", 0, 100, -10), kernel(GEMM, "7", 500, 100, -9)]
    done = replay(profile_of(rows, "made"))
    assert CAUSES[done.waits.cause[1]] == UNKNOWN
    assert done.span_error < -0.6


def test_a_launch_that_came_late_holds_its_kernel_up() -> None:
    rows = [kernel(GEMM, "7", 10 * place * 10, 20, 10 * place * 10 - 8) for place in range(9)]
    done = replay(profile_of(rows, "made"))
    assert done.waits.launch_delay_s == pytest.approx(8 * US)
    np.testing.assert_allclose(done.start_s, done.profile.start_s, atol=1e-9)


def test_shares_of_hidden_collectives_are_of_unions_of_time() -> None:
    rows = [kernel(SUM, "20", 0, 100), kernel(SUM, "21", 50, 100), kernel(GEMM, "7", 120, 60)]
    recorded = replay(profile_of(rows, "made")).recorded
    assert recorded.collective_s == pytest.approx(150 * US)
    assert recorded.hidden == pytest.approx(30 / 150)
    assert recorded.exposed_s == pytest.approx(120 * US)


def test_the_shipped_profile_is_replayed_within_three_per_cent() -> None:
    (row,) = replayed(profiles(None))
    assert abs(row["span"]) < 0.03
    assert row["hidden"][1] == pytest.approx(row["hidden"][0], abs=3)


@pytest.mark.more
def test_recorded_profiles_are_replayed_within_three_per_cent(shared: Callable[[str], Path]) -> None:
    shares = {"a100_ws8": 47, "mi300x": 23, "b200": 0, "a100_ws2": 16, "ws128": 15}  # as the table of data says
    for row in replayed(profiles(shared("data"))):
        assert abs(row["span"]) < 0.03, row
        assert row["hidden"][1] == pytest.approx(row["hidden"][0], abs=3)
        published = next((share for name, share in shares.items() if row["profile"].startswith(name)), row["hidden"][0])
        assert row["hidden"][0] == pytest.approx(published, abs=1.1)


@pytest.mark.parametrize("name", ["run.json", "run.json.gz"])
def test_a_chrome_trace_is_read_with_launches_iterations_and_the_device(tmp_path: Path, name: str) -> None:
    steps = [
        {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{step}", "ts": 500 * step, "dur": 490}
        for step in range(2)
    ]
    device = [{"id": 0, "name": "NVIDIA H100"}]
    profile = read(chrome(tmp_path, [*made_events(300), *steps], name, deviceProperties=device))
    assert (len(profile), profile.device, len(profile.iterations)) == (100, "NVIDIA H100", 2)
    np.testing.assert_allclose(profile.kernels["launch_s"], profile.start_s - 6 * US)
    assert set(profile.kernels["ctas"]) == {1024}
    assert not profile.dropped


@pytest.mark.parametrize("processes", [(1, 2), (1, 2, 1), (1, 2, 1, 1)])
def test_a_number_by_which_several_processes_launch_tells_no_time(tmp_path: Path, processes: tuple[int, ...]) -> None:
    ran = [
        {"ph": "X", "cat": "kernel", "name": GEMM, "pid": 0, "ts": 100.0 + number, "dur": 1}
        | {"args": {"device": 0, "stream": 7, "correlation": number}}
        for number in (5, 6)
    ]
    calls = [
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": process, "ts": 10.0 + at, "dur": 1}
        | {"args": {"correlation": 5}}
        for at, process in enumerate(processes)
    ]
    single = calls[0] | {"args": {"correlation": 6}}
    profile = read(chrome(tmp_path, [*ran, *calls, single], "run.json"))
    assert np.isnan(profile.kernels["launch_s"]).tolist() == [True, False]


@pytest.mark.parametrize(
    ("names", "lengths"),
    [
        (("iteration 3", "train_step", "optimizer step"), [40, 40]),
        (("ProfilerStep#3", "iteration 3", "ProfilerStep#4"), [40, 40]),  # a user's range in the profiler's
        (("epoch", "forward"), []),
    ],
)
def test_iterations_of_a_chrome_trace_are_ranges_that_are_called_so(
    tmp_path: Path, names: tuple[str, ...], lengths: list[int]
) -> None:
    marks = [
        {"ph": "X", "cat": "user_annotation", "name": name, "ts": 50 * place, "dur": 40}
        for place, name in enumerate(names)
    ]
    profile = read(chrome(tmp_path, [*made_events(300), *marks]))
    assert [(end - start) / US for start, end in profile.iterations] == pytest.approx(lengths)


def test_the_same_kernels_come_from_a_trace_and_from_a_table(tmp_path: Path) -> None:
    trace = read(chrome(tmp_path, made_events(300)))
    path = tmp_path / "run.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["start_us", "dur_us", "launch_us", "stream", "name", "grid"])
        for row in trace.kernels.to_dict("records"):
            times = [row[name] / US for name in ("start_s", "seconds", "launch_s")]
            table.writerow([*times, row["stream"], row["name"], "1024x1x1"])
    read_back = read(path)
    for column in ("start_s", "seconds", "launch_s", "ctas"):
        np.testing.assert_allclose(read_back.kernels[column].to_numpy(float), trace.kernels[column].to_numpy(float))
    assert read_back.kernels["kind"].tolist() == trace.kernels["kind"].tolist()


def test_rocprofs_kernel_traces_are_read(tmp_path: Path) -> None:
    path = tmp_path / "kernel_trace.csv"
    path.write_text(
        "Kind,Queue_Id,Kernel_Name,Start_Timestamp,End_Timestamp\n"
        "KERNEL_DISPATCH,1,Cijk_Ailk,1000000,1050000\nKERNEL_DISPATCH,2,ncclDevKernel_Generic,1060000,1100000\n"
    )
    profile = read(path)
    np.testing.assert_allclose(profile.seconds, [50 * US, 40 * US])
    assert profile.kernels["kind"].tolist() == ["GEMM", "collective"]


def cut_off(folder: Path) -> Path:
    path = chrome(folder, made_events(30_000), "run.json.gz")
    path.write_bytes(path.read_bytes()[:-2000])
    return path


def stopped(folder: Path) -> Path:
    path = chrome(folder, made_events(3_000))
    path.write_text(path.read_text()[:-5000])
    return path


def without_streams(folder: Path) -> Path:
    events = list(made_events(300))
    for event in events[2::30]:
        del event["args"]["stream"], event["tid"]
    return chrome(folder, events)


def backwards(folder: Path) -> Path:
    events = list(made_events(300))
    for event in events[2::30]:
        event["dur"] = -3
    return chrome(folder, events)


def launched_late(folder: Path) -> Path:
    events = list(made_events(300))
    events[1]["ts"] = 100.0
    return chrome(folder, events)


def hostile(folder: Path) -> Path:
    odd: list[Any] = [1, None, "x", {"cat": "kernel"}, {"cat": "kernel", "name": [], "ts": "x", "dur": {}, "args": 3}]
    return chrome(folder, [*odd, *made_events(300)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "reason_part", "most"),
    [
        (cut_off, "gzip that is cut off", 9_999),
        (stopped, "JSON that stops", 999),
        (without_streams, "without a stream", 90),
        (backwards, "end before they begin", 90),
        (launched_late, "later than their kernel", 100),
        (hostile, "that are no objects", 100),
    ],
)
def test_what_can_be_used_of_a_damaged_trace_is_used_and_the_rest_is_told(
    tmp_path: Path, make: Any, reason_part: str, most: int
) -> None:
    profile: Profile = read(make(tmp_path))
    assert 0 < len(profile) <= most
    assert any(reason_part in reason for reason in profile.dropped)
    assert np.isfinite(replay(profile).end_s).all()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("run.json", "{}", "no traceEvents"),
        ("run.json", '{"traceEvents": []}', "no kernel of a GPU"),
        ("run.json.gz", "no gzip", "no traceEvents"),
        ("run.csv", "a,b\n1,2\n", "lacks the columns start_us"),
        ("run.csv.gz", "no gzip", "lacks the columns start_us"),
    ],
)
def test_what_is_no_profile_is_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read(path)


def test_the_command_writes_kernels_summary_and_a_timeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [kernel(GEMM, "7", 0, 100, -5), kernel(SUM, "20", 102, 50, -4), kernel(GEMM, "7", 155, 10, -3)]
    events = [
        {**{"ph": "X", "cat": "kernel", "name": row["name"], "args": {"stream": row["stream"]}}, **times}
        for row in rows
        for times in [{"ts": row["start_s"] / US, "dur": row["seconds"] / US}]
    ]
    assert main(["profile", "import", str(chrome(tmp_path, events)), "out=here"]) == 0
    assert "50.00 µs are exposed" in capsys.readouterr().out.replace("\n", " ")
    written = {path.name for path in (tmp_path / "here").rglob("*") if path.is_file()}
    assert {"kernels.parquet", "profile.yaml", "timeline.png", "timeline.json"} <= written
    summary = yaml.safe_load((tmp_path / "here" / "profile.yaml").read_text())
    assert summary["recorded"]["hidden"] == 0
    assert len(json.loads((tmp_path / "here" / "figures" / "timeline.json").read_text())["traceEvents"]) > 2 * len(rows)
    assert kernels(replay(profile_of(rows, "made")))["waited_for_kernel"].tolist() == [-1, 0, 1]


@pytest.mark.parametrize("name", ["run.json", "run.et", "run.csv", "run.sqlite"])
@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (b"", "is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12\n", "a pointer of Git LFS"),
        (b"<!DOCTYPE html><html>404</html>", "is a web page"),
    ],
)
def test_what_stands_in_place_of_a_profile_is_named(tmp_path: Path, name: str, content: bytes, rule: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=rule):
        read(tmp_path / name)


def test_a_gzip_that_is_damaged_before_any_event_is_not_said_to_be_no_trace(tmp_path: Path) -> None:
    packed = gzip.compress(json.dumps({"traceEvents": [{"name": "x"}]}).encode())
    (tmp_path / "run.json.gz").write_bytes(packed[:12] + b"\xff" * 8 + packed[20:])
    with pytest.raises(ConfigError, match="gzip that is cut off or damaged"):
        read(tmp_path / "run.json.gz")
