"""Profiles of rocprofv3 and of rocprof before it, with the files beside them, damaged and whole."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dse.errors import ConfigError
from dse_chakra import packed
from dse_traces.commands.one_rank import answer
from dse_traces.profile import kernels as profile_module
from dse_traces.profile.replay import replay
from dse_traces.readers.formats import files_of, read, read_ranks

US = 1e-6
KERNELS = (
    "Kind,Agent_Id,Queue_Id,Stream_Id,Thread_Id,Dispatch_Id,Kernel_Id,Kernel_Name,Correlation_Id,Start_Timestamp,"
    "End_Timestamp,LDS_Block_Size,Scratch_Size,VGPR_Count,Accum_VGPR_Count,SGPR_Count,Workgroup_Size_X,"
    "Workgroup_Size_Y,Workgroup_Size_Z,Grid_Size_X,Grid_Size_Y,Grid_Size_Z"
)
COPIES = "Kind,Direction,Stream_Id,Source_Agent_Id,Destination_Agent_Id,Correlation_Id,Start_Timestamp,End_Timestamp"
CALLS = "Domain,Function,Process_Id,Thread_Id,Correlation_Id,Start_Timestamp,End_Timestamp"
AGENTS = "Node_Id,Agent_Type,Cu_Count,Name,Product_Name"


def table(folder: Path, name: str, columns: str, rows: Sequence[Sequence[Any]]) -> Path:
    """A CSV as rocprofv3 writes it: texts in quotes."""
    lines = [columns, *(",".join(f'"{v}"' if isinstance(v, str) else str(v) for v in row) for row in rows)]
    (folder / name).write_text("\n".join(lines) + "\n")
    return folder / name


def kernel(n: int, *, agent: str = "Agent 2") -> tuple[Any, ...]:
    name = "ncclDevKernel_Generic(a, b)" if n % 2 else "Cijk_Ailk_Bljk, MT128"
    start = 1_000_000 + 20_000 * n
    shape = (256, 1, 1, 1000, 2, 1)
    return ("KERNEL_DISPATCH", agent, 1, n % 2, 9, n, 5, name, 100 + n, start, start + 10_000, 0, 0, 8, 0, 16, *shape)


def traced(folder: Path, count: int = 10) -> Path:
    """A kernel trace with all files beside it."""
    calls = [("HIP_RUNTIME_API", "hipLaunchKernel", 9, 9, 100 + n, 992_000 + 20_000 * n, 993_000) for n in range(count)]
    marks = [
        ("MARKER_CORE_RANGE_API", f"step {n}", 9, 9, n, 1_000_000 + 100_000 * n, 1_090_000 + 100_000 * n)
        for n in range(2)
    ]
    copies = [
        ("MEMORY_COPY", "MEMORY_COPY_HOST_TO_DEVICE", 3, "Agent 0", "Agent 2", 900, 1_300_000, 1_304_000),
        ("MEMORY_COPY", "MEMORY_COPY_DEVICE_TO_HOST", 3, "Agent 7", "Agent 0", 901, 1_300_000, 1_304_000),
    ]
    table(folder, "12_hip_api_trace.csv", CALLS, calls)
    table(folder, "12_marker_api_trace.csv", CALLS, [*marks, ("MARKER_CORE_RANGE_API", "forward", 9, 9, 7, 1, 2)])
    table(folder, "12_memory_copy_trace.csv", COPIES, copies)
    table(folder, "12_agent_info.csv", AGENTS, [(0, "CPU", 0, "cpu", "EPYC"), (2, "GPU", 304, "gfx942", "MI300X")])
    return table(folder, "12_kernel_trace.csv", KERNELS, [kernel(n) for n in range(count)])


def test_kernels_are_read_with_what_is_in_the_files_beside_them(tmp_path: Path) -> None:
    profile = read(traced(tmp_path))
    assert (len(profile), profile.device, len(profile.iterations)) == (11, "MI300X", 2)
    assert profile.kernels["kind"].value_counts().to_dict() == {"GEMM": 5, "collective": 5, "copy": 1}
    np.testing.assert_allclose(profile.start_s[:10] - profile.kernels["launch_s"][:10], 8 * US)
    np.testing.assert_allclose(profile.seconds[:10], 10 * US)
    assert set(profile.kernels["ctas"].dropna()) == {8}  # 1,000 work-items in groups of 256, twice
    assert profile.kernels["stream"].nunique() == 3
    assert profile.kernels["name"].iloc[10] == "Memcpy HOST_TO_DEVICE"
    assert sum(profile.dropped.values()) == 1  # a copy of another GPU
    assert np.isfinite(replay(profile).end_s).all()


def test_a_kernel_trace_alone_is_enough(tmp_path: Path) -> None:
    path = table(tmp_path, "run_kernel_trace.csv", KERNELS, [kernel(n) for n in range(4)])
    profile = read(path)
    assert (len(profile), profile.device) == (4, "")
    assert profile.kernels["launch_s"].isna().all()


def test_each_agent_is_a_rank(tmp_path: Path) -> None:
    rows = [kernel(n, agent="GPU 1" if n > 5 else "GPU 0") for n in range(10)]
    path = table(tmp_path, "kernel_trace.csv", KERNELS, rows)
    table(tmp_path, "agent_info.csv", AGENTS, [(4, "GPU", 1, "a", "MI250X"), (5, "GPU", 1, "b", "MI210")])
    assert [(len(profile), profile.device) for profile in read_ranks(path)] == [(6, "MI250X"), (4, "MI210")]
    assert read(path).dropped == {"kernels of other GPUs": 4}


def test_files_beside_kernel_traces_are_no_ranks(tmp_path: Path) -> None:
    path = traced(tmp_path)
    assert files_of(str(tmp_path)) == [path]


def test_tables_of_the_older_rocprof_are_read(tmp_path: Path) -> None:
    columns = "Index,KernelName,gpu-id,queue-id,queue-index,pid,tid,grd,wgr,DispatchNs,BeginNs,EndNs,CompleteNs"
    rows = [(n, "Cijk(a, b) [clone .kd]", 1, n % 2, n, 7, 7, 1024, 256, 10**6 * n, *_times(n)) for n in range(3)]
    profile = read(table(tmp_path, "results.csv", columns, rows))
    assert profile.kernels["name"].tolist() == ["Cijk(a, b)"] * 3
    assert profile.kernels["ctas"].tolist() == [4] * 3
    np.testing.assert_allclose(profile.start_s - profile.kernels["launch_s"], 5 * US)


def _times(n: int) -> tuple[int, int, int]:
    return 10**6 * n + 5000, 10**6 * n + 9000, 10**6 * n + 9500


def test_the_json_of_the_older_rocprof_is_read(tmp_path: Path) -> None:
    """All its numbers are text, and its events have no category."""
    events: list[Any] = [{}, {"ph": "M", "pid": 6, "name": "process_name", "args": {"name": "GPU0"}}]
    for n in range(3):
        args = {"BeginNs": str(10**6 * n), "EndNs": str(10**6 * n + 4000), "dev-id": "0", "Name": "axpy.kd"}
        both = [{"queue-id": "0", "stream-id": str(n % 2)}, {"args": "( ptr(0x7) )"}]
        events += [
            {"ph": "X", "name": "axpy", "ts": "0", "dur": "4", "pid": "6", "args": args | fields} for fields in both
        ]
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"traceEvents": events}))
    profile = read(path)
    np.testing.assert_allclose(profile.seconds, [4 * US] * 3)
    assert profile.kernels["name"].tolist() == ["axpy"] * 3
    assert profile.kernels["stream"].nunique() == 2


def cut_off(path: Path) -> None:
    path.write_text(path.read_text()[:-150])


def odd_fields(path: Path) -> None:
    path.write_text(path.read_text().replace("1020000", "late").replace("1040000,1050000", "1040000,1000000"))


def long_line(path: Path) -> None:
    head, *rows = path.read_text().splitlines(keepends=True)
    path.write_text("".join([head, "x" * (3 << 20) + "\n", *rows]))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut_off, "end before their last column"),
        (odd_fields, "cannot be read"),
        (odd_fields, "end before they begin"),
        (long_line, "lines of more than"),
    ],
)
def test_what_can_be_used_of_a_damaged_table_is_used(tmp_path: Path, damage: Any, message: str) -> None:
    path = table(tmp_path, "kernel_trace.csv", KERNELS, [kernel(n) for n in range(10)])
    damage(path)
    profile = read(path)
    assert 8 <= len(profile) <= 10
    assert any(message in reason for reason in profile.dropped)


def test_a_file_beside_the_trace_that_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    path = traced(tmp_path)
    (tmp_path / "12_hip_api_trace.csv").write_bytes(b"")
    profile = read(path)
    assert profile.kernels["launch_s"].isna().all()
    assert any("12_hip_api_trace.csv" in reason for reason in profile.dropped)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("run.csv.gz", b"start_us,dur_us,stream,name\n0,1,7,gemm\n"),
        ("run.json.gz", b'{"traceEvents": [{"cat": "kernel", "name": "gemm", "ts": 0, "dur": 1, "tid": 7},\n'),
    ],
)
def test_memory_is_bounded_where_a_gzip_unpacks_to_too_much(tmp_path: Path, name: str, head: bytes) -> None:
    path = tmp_path / name
    with gzip.open(path, "wb", compresslevel=6) as file:
        file.write(head)
        for _ in range(packed.FREELY_UNPACKED // (1 << 20) + 9):
            file.write(b" " * ((1 << 20) - 1) + b"\n")
    profile = read(path)
    assert len(profile) == 1
    assert "the rest of a gzip that unpacks to more than a profile holds" in profile.dropped


def test_kernels_past_the_most_that_a_profile_holds_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile_module, "MOST_KERNELS", 4)
    profile = read(table(tmp_path, "kernel_trace.csv", KERNELS, [kernel(n) for n in range(10)]))
    assert len(profile) == 4
    assert profile.dropped == {"kernels past the first 4": 6}


def test_iterations_of_different_lengths_are_told(tmp_path: Path) -> None:
    rows = [
        {"cat": "user_annotation", "name": f"ProfilerStep#{n}", "ts": 100 * n, "dur": 50 + 20 * n, "ph": "X"}
        for n in range(2)
    ]
    events = [*rows, {"cat": "kernel", "name": "gemm", "ts": 5, "dur": 9, "args": {"stream": 7}}]
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"traceEvents": events}))
    first = next(line for line in answer(replay(read(path))) if isinstance(line, str))
    assert "2 iterations of 60.00 µs in the median (50.00 µs to 70.00 µs)" in first


@pytest.mark.slow
def test_a_gzip_of_one_long_word_is_no_profile(tmp_path: Path) -> None:
    path = tmp_path / "run.csv.gz"
    path.write_bytes(gzip.compress(b"a" * (packed.FREELY_UNPACKED + (8 << 20)), 1))
    with pytest.raises(ConfigError, match="no CSV of kernels"):
        read(path)
