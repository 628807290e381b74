"""Profiles of rocprof: kernel traces of rocprofv3 with the files beside them, and tables of rocprof before it.

    <name>_kernel_trace.csv        Kernel_Name, Agent_Id, Stream_Id or Queue_Id, Correlation_Id, Start_Timestamp and
                                   End_Timestamp [ns], Grid_Size_X, Workgroup_Size_X and so on
    <name>_memory_copy_trace.csv   Direction, Source_Agent_Id, Destination_Agent_Id and the times of copies
    <name>_hip_api_trace.csv       the start of the launch with the same Correlation_Id
    <name>_marker_api_trace.csv    iterations: ranges that are called as iterations are (also _marker_trace)
    <name>_agent_info.csv          the name of the GPU
    results.csv                    KernelName, gpu-id, queue-id, grd, wgr, DispatchNs, BeginNs and EndNs

Grids count work-items. A file beside the kernel trace that is not there, or cannot be read, is left out.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import ceil, prod
from pathlib import Path
from typing import Any

from dse.errors import ConfigError
from dse_traces.profile.iterations import is_iteration
from dse_traces.profile.kernels import KernelRows, Profile, profile_of
from dse_traces.readers.csv_rows import Row, csv_rows

_NS = 1e-9
_V3 = {"Kernel_Name", "Start_Timestamp", "End_Timestamp"}
_V1 = {"KernelName", "BeginNs", "EndNs"}
_TRACE = "kernel_trace"
_DROPPED = "kernels, copies and launches with fields that cannot be read"


def is_rocprof(columns: Sequence[str]) -> bool:
    """True for the columns of a kernel trace of rocprofv3, or of a table of rocprof."""
    return set(columns) >= _V3 or set(columns) >= _V1


def read_rocprof(path: Path) -> list[Profile]:
    """The profile of each GPU of a kernel trace or table, most kernels first. Raises ConfigError."""
    dropped = Counter[str]()
    # read first: rows of kernels look them up as they are read
    launches = {int(key): start for key, start, _ in _spans(path, "hip_api_trace", dropped, "Correlation_Id")}
    by_gpu = defaultdict[str, KernelRows](KernelRows)
    with csv_rows(path, dropped) as (columns, rows):
        kernel = _kernel if set(columns) >= _V3 else _older_kernel
        for row in rows:
            _add(row, lambda row: kernel(row, launches), by_gpu, dropped)
    # after kernels: a copy belongs to an agent that ran any
    for row in _beside(path, "memory_copy_trace", dropped):
        _add(row, lambda row: _copy(row, by_gpu), by_gpu, dropped)
    if not by_gpu:
        return [profile_of([], path.name, dropped=dropped)]
    # the file was renamed between versions of rocprofv3
    marks = [name for name in ("marker_api_trace", "marker_trace") if _place(path, name).is_file()][:1]
    spans = [span for name in marks for span in _spans(path, name, dropped, "Function")]
    iterations = sorted({(start, end) for name, start, end in spans if is_iteration(name)})
    names = _devices(_beside(path, "agent_info", dropped))
    how: dict[str, Any] = {"dropped": dropped, "iterations": iterations}
    ordered = sorted(by_gpu, key=lambda gpu: (-len(by_gpu[gpu]), gpu))
    return [
        profile_of(by_gpu[gpu], path.name, device=names.get(gpu.removeprefix("Agent "), ""), **how) for gpu in ordered
    ]


def _add(
    row: Row,
    read: Callable[[Row], tuple[str, Mapping[str, Any]]],
    by_gpu: Mapping[str, KernelRows],
    dropped: Counter[str],
) -> None:
    try:
        gpu, kernel = read(row)
        by_gpu[gpu].append(kernel)
    except (KeyError, ValueError, OverflowError, ZeroDivisionError):
        dropped[_DROPPED] += 1


def _kernel(row: Row, launches: Mapping[int, float]) -> tuple[str, Mapping[str, Any]]:
    start, correlation = int(row["Start_Timestamp"]), row.get("Correlation_Id")
    sides = [(row.get(f"Grid_Size_{side}"), row.get(f"Workgroup_Size_{side}")) for side in "XYZ"]
    return row.get("Agent_Id", ""), {
        "name": row["Kernel_Name"],
        "stream": _stream(row),
        "start_s": start * _NS,
        "seconds": (int(row["End_Timestamp"]) - start) * _NS,
        "launch_s": launches.get(int(correlation)) if correlation else None,
        "ctas": prod(ceil(int(grid) / int(group)) for grid, group in sides if grid and group)
        if all(grid and group for grid, group in sides)
        else None,
    }


def _stream(row: Row) -> str | None:
    """The stream and the queue: without the HIP API all streams are 0."""
    streams = (row.get("Stream_Id"), row.get("Queue_Id"))
    return " ".join(part for part in streams if part) or None


def _older_kernel(row: Row, launches: Mapping[int, float]) -> tuple[str, Mapping[str, Any]]:
    start, grid, group = int(row["BeginNs"]), row.get("grd"), row.get("wgr")
    return row.get("gpu-id", ""), {
        "name": row["KernelName"].removesuffix(" [clone .kd]").removesuffix(".kd"),
        "stream": row.get("queue-id") or None,
        "start_s": start * _NS,
        "seconds": (int(row["EndNs"]) - start) * _NS,
        "launch_s": int(row["DispatchNs"]) * _NS if row.get("DispatchNs") else None,
        "ctas": ceil(int(grid) / int(group)) if grid and group else None,
    }


def _copy(row: Row, gpus: Mapping[str, KernelRows]) -> tuple[str, Mapping[str, Any]]:
    """A copy on the GPU that ran kernels, its destination first; between two GPUs, one from peer to peer.

    Raises KeyError where neither end ran any.
    """
    # the destination first: a copy is of the GPU that receives it
    ends = [row.get("Destination_Agent_Id", ""), row.get("Source_Agent_Id", "")]
    gpu = next((end for end in ends if end in gpus), None)
    if gpu is None:
        raise KeyError("agent")
    start, direction = int(row["Start_Timestamp"]), row.get("Direction", "").removeprefix("MEMORY_COPY_")
    # within one agent it is no communication
    if direction == "DEVICE_TO_DEVICE" and ends[0] != ends[1] and all(ends):
        direction = "PtoP"
    return gpu, {
        "name": f"Memcpy {direction}".strip(),
        # copies without a stream are in order of their kind alone
        "stream": row.get("Stream_Id") or f"copies {direction}",
        "start_s": start * _NS,
        "seconds": (int(row["End_Timestamp"]) - start) * _NS,
    }


def _place(path: Path, name: str) -> Path:
    """The file beside a kernel trace; the trace's own where its name is another one."""
    return path.with_name(path.name.replace(_TRACE, name))


def _beside(path: Path, name: str, dropped: Counter[str]) -> Iterator[Row]:
    """Yield the rows of a file beside a kernel trace, as far as it can be read."""
    place = _place(path, name)
    # a trace with an unusual name has no neighbours that could be found
    if place == path or not place.is_file():
        return
    try:
        with csv_rows(place, dropped) as (_, rows):
            yield from rows
    except ConfigError:
        dropped[f"a file next to the kernel trace: {place.name}"] += 1


def _spans(path: Path, name: str, dropped: Counter[str], column: str) -> Iterator[tuple[str, float, float]]:
    """Yield (value of a column, start, end) [s] of the rows of a file beside a kernel trace."""
    for row in _beside(path, name, dropped):
        try:
            start, end = (int(row[f"{side}_Timestamp"]) * _NS for side in ("Start", "End"))
            yield str(int(row[column])) if column == "Correlation_Id" else row[column], start, end
        except (KeyError, ValueError, OverflowError):
            dropped[_DROPPED] += 1


def _devices(agents: Iterable[Row]) -> dict[str, str]:
    """Names of agents by number, and of GPUs also by `GPU <number among GPUs>`."""
    names, gpus = dict[str, str](), 0
    for row in agents:
        name = row.get("Product_Name") or row.get("Name") or ""
        names[row.get("Node_Id", "")] = name
        if row.get("Agent_Type") == "GPU":
            names[f"GPU {gpus}"], gpus = name, gpus + 1
    return names
