"""Databases of AMD's profilers: rocpd, which rocprofv3 writes by default since ROCm 7, and rpd before it.

    rocpd_kernel_dispatch_<id>     start, end [ns], agent, stream, queue, grid over work-group, kernel, process
    rocpd_memory_copy_<id>         the same of copies, with their names
    rocpd_info_kernel_symbol_<id>, rocpd_info_agent_<id>, rocpd_string_<id>   names of kernels, of GPUs, and of copies
    rocpd_region_<id>              launches, by the event's correlation (rocpd_event_<id>), and iterations
    rocpd_op, rocpd_string         of rpd: start, end, gpuId, queueId, and names

Each process of a file has tables of its own, which its id tells. Views, such as `kernels`, are not read.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil, prod
from pathlib import Path
from typing import Any

from dse.errors import ConfigError
from dse_traces.profile.iterations import is_iteration
from dse_traces.profile.kernels import MOST_GPUS, MOST_ITERATIONS, KernelRows, Profile, profile_of
from dse_traces.readers.databases import Database, open_database, whole

_NS = 1e-9
_DISPATCH = re.compile(r"_?rocpd_kernel_dispatch(\w*)")
_OPERATIONS = "rocpd_op"
_DROPPED = "rows with fields that cannot be read"
_WRONG = (TypeError, ValueError, OverflowError, ZeroDivisionError)
# "MEMORY_COPY_HOST_TO_DEVICE" and "CopyHostToDevice"
_COPY = re.compile(r"(?:MEMORY_COPY_|Copy)?(.*)", re.IGNORECASE)

_Gpu = tuple[str, int, int]
"""Id of the tables, process and agent."""
_Process = tuple[str, int]
"""Id of the tables, and process; 0 where it is not recorded."""
_Span = tuple[float, float]


def is_rocpd(tables: Collection[str]) -> bool:
    """True for the tables of a database of rocprofv3 or rpd."""
    return _OPERATIONS in tables or any(map(_DISPATCH.fullmatch, tables))


def read_rocpd(path: Path) -> list[Profile]:
    """The profile of each GPU of each process. Raises ConfigError. A damaged database is used as far as it goes."""
    with open_database(path) as database:
        return [replace(profile, lost=database.lost) for profile in _profiles(database)]


def _profiles(database: Database) -> list[Profile]:
    """The profiles of all GPUs. Raises ConfigError."""
    by_gpu, devices, marked = (
        defaultdict[_Gpu, KernelRows](KernelRows),
        dict[_Gpu, str](),
        defaultdict[_Process, list[_Span]](list),
    )
    # each process writes tables that end in its GUID
    suffixes = sorted(match[1] for table in database.tables if (match := _DISPATCH.fullmatch(table)))
    for suffix in suffixes[:MOST_GPUS]:
        launches, spans = _regions(database, suffix)
        for process, span in spans:
            _mark(database, marked, (suffix, process), span)
        names = database.texts(_table(database, "info_agent", suffix), "id", "product_name", "model_name", "name")
        for gpu, row in _rows(database, suffix, launches):
            _keep(database, by_gpu, gpu, row)
            devices[gpu] = names.get(gpu[2], "")
    if _OPERATIONS in database.tables:
        for gpu, row in _operations(database):
            _keep(database, by_gpu, gpu, row)
    return _of_each(database, by_gpu, devices, marked)


def _keep(database: Database, by_gpu: dict[_Gpu, KernelRows], gpu: _Gpu, row: Mapping[str, Any]) -> None:
    if gpu in by_gpu or len(by_gpu) < MOST_GPUS:
        by_gpu[gpu].append(row)
    else:
        database.dropped[f"kernels of GPUs past the first {MOST_GPUS}"] += 1


def _mark(database: Database, marked: dict[_Process, list[_Span]], process: _Process, span: _Span) -> None:
    if sum(map(len, marked.values())) < MOST_ITERATIONS:
        marked[process].append(span)
    else:
        database.dropped[f"iterations past the first {MOST_ITERATIONS:,}"] += 1


def _of_each(
    database: Database,
    by_gpu: Mapping[_Gpu, KernelRows],
    devices: Mapping[_Gpu, str],
    marked: Mapping[_Process, Sequence[_Span]],
) -> list[Profile]:
    profiles, problems = list[Profile](), list[ConfigError]()
    # without any row the profile of nothing raises the error with all reasons
    for gpu in sorted(by_gpu) or [("", 0, 0)]:
        rows = by_gpu.get(gpu, KernelRows())
        spans = sorted({span for process, spans in marked.items() if _is_of(process, gpu) for span in spans})
        how: dict[str, Any] = {"dropped": database.dropped, "iterations": spans}
        try:
            profiles.append(profile_of(rows, database.path.name, device=devices.get(gpu, ""), **how))
        except ConfigError as error:
            problems.append(error)
    if not profiles:
        raise problems[0]
    return profiles


def _is_of(process: _Process, gpu: _Gpu) -> bool:
    """Whether a GPU is of a process, as far as both are recorded."""
    return process[0] == gpu[0] and (process[1] == gpu[1] or not (process[1] and gpu[1]))


def _table(database: Database, name: str, suffix: str) -> str:
    """The table of a name and an id; the one without an id where there is none."""
    full = f"rocpd_{name}{suffix}"
    # a database of one process may have no suffix
    return full if full in database.tables else f"rocpd_{name}"


def _rows(database: Database, suffix: str, launches: Mapping[int, float]) -> Iterator[tuple[_Gpu, Mapping[str, Any]]]:
    """Yield the GPU and the row of a profile of each kernel and copy."""
    symbols = _table(database, "info_kernel_symbol", suffix)
    kernels = database.texts(symbols, "id", "display_name", "kernel_name")
    strings = database.texts(_table(database, "string", suffix), "id", "string")
    sides = [f"{name}_{side}" for side in "xyz" for name in ("grid_size", "workgroup_size")]
    fields = ("start", "end", "pid", "queue_id", "stream_id", "event_id")
    types = database.texts(_table(database, "info_agent", suffix), "id", "type")
    # filled by kernels, and read by copies: dispatches must come first
    gpus = set[_Gpu]()

    def kernel(row: Mapping[str, Any]) -> tuple[_Gpu, Mapping[str, Any]]:
        gpu = suffix, whole(row["pid"]) or 0, whole(row["agent_id"]) or 0
        name = kernels.get(row["kernel_id"]) or strings.get(row["region_name_id"]) or "kernel without a name"
        gpus.add(gpu)
        streams = [str(row[side]) for side in ("stream_id", "queue_id") if row[side] is not None]
        launch = launches.get(row["event_id"])
        about = {"name": name.removesuffix(".kd"), "stream": " ".join(streams) or None, "launch_s": launch}
        return gpu, _times(row) | about | {"ctas": _blocks(row)}

    def copy(row: Mapping[str, Any]) -> tuple[_Gpu, Mapping[str, Any]]:
        process = whole(row["pid"]) or 0
        # the destination first, as a copy is of the GPU that receives it
        ends = [(suffix, process, whole(row[f"{end}_agent_id"]) or 0) for end in ("dst", "src")]
        # an agent that ran kernels is a GPU; of host to device the source is a CPU
        gpu = next((end for end in ends if end in gpus), ends[0])
        match = _COPY.fullmatch(strings.get(row["name_id"], ""))
        between = ends[0] != ends[1] and all(types.get(end[2]) == "GPU" or end in gpus for end in ends)
        direction = "PtoP" if between else match[1] if match else ""
        queue = row["stream_id"] if row["stream_id"] is not None else f"copies {direction}"
        about = {"name": f"Memcpy {direction}".strip(), "payload_bytes": row["size"] if between else None}
        return gpu, _times(row) | about | {"stream": str(queue)}

    dispatches = ("agent_id", "kernel_id", "region_name_id", *sides)
    yield from _read(database, _table(database, "kernel_dispatch", suffix), (*fields, *dispatches), kernel)
    copies = ("dst_agent_id", "src_agent_id", "name_id", "size")
    yield from _read(database, _table(database, "memory_copy", suffix), (*fields, *copies), copy)


def _read(
    database: Database,
    table: str,
    names: Sequence[str],
    read: Callable[[Mapping[str, Any]], tuple[_Gpu, Mapping[str, Any]]],
) -> Iterator[tuple[_Gpu, Mapping[str, Any]]]:
    """Yield what is read of each row of a table, if there is one."""
    for row in database.select(table, names) if table in database.tables else ():
        try:
            yield read(row)
        except _WRONG:
            database.dropped[_DROPPED] += 1


def _times(row: Mapping[str, Any]) -> dict[str, Any]:
    start, end = whole(row["start"]), whole(row["end"])
    if start is None or end is None:
        raise ValueError
    return {"start_s": start * _NS, "seconds": (end - start) * _NS}


def _blocks(row: Mapping[str, Any]) -> int | None:
    """Work-groups of a kernel: its grid counts work-items."""
    sides = [(whole(row[f"grid_size_{side}"]), whole(row[f"workgroup_size_{side}"])) for side in "xyz"]
    return prod(ceil((grid or 0) / (group or 1)) for grid, group in sides) if all(a and b for a, b in sides) else None


def _regions(database: Database, suffix: str) -> tuple[dict[int, float], list[tuple[int, _Span]]]:
    """When the call that caused each event of a GPU began [s], by event; and iterations with their processes."""
    strings = database.texts(_table(database, "string", suffix), "id", "string")
    stacks = dict[int, int]()
    for row in database.select(_table(database, "event", suffix), ("id", "stack_id", "correlation_id")):
        cause = row["stack_id"] or row["correlation_id"]
        if isinstance(row["id"], int) and isinstance(cause, int) and cause:
            stacks[row["id"]] = cause
    begins, spans = dict[int, float](), list[tuple[int, _Span]]()
    for row in database.select(_table(database, "region", suffix), ("start", "end", "name_id", "event_id", "pid")):
        try:
            times, process = _times(row), whole(row["pid"]) or 0
        except _WRONG:
            database.dropped[_DROPPED] += 1
            continue
        if (cause := stacks.get(row["event_id"])) is not None:
            # the first region of a cause is the call itself, later ones are nested
            begins.setdefault(cause, times["start_s"])
        if is_iteration(strings.get(row["name_id"], "")[:200]):
            spans.append((process, (times["start_s"], times["start_s"] + times["seconds"])))
    return {event: begins[cause] for event, cause in stacks.items() if cause in begins}, spans


def _operations(database: Database) -> Iterator[tuple[_Gpu, Mapping[str, Any]]]:
    """Yield the GPU and the row of a profile of each operation of rpd that ran on a GPU."""
    strings = database.texts("rocpd_string", "id", "string")

    def operation(row: Mapping[str, Any]) -> tuple[_Gpu, Mapping[str, Any]]:
        kind, name = strings.get(row["opType_id"], ""), strings.get(row["description_id"], "")
        # rpd names copies by their type, and kernels by their description
        if kind.lower().startswith("copy") or not name:
            name = f"Memcpy {kind.removeprefix('Copy')}" if kind.startswith("Copy") else name or kind
        about = {"name": name.removesuffix(".kd") or "kernel without a name", "stream": str(row["queueId"])}
        return ("", 0, whole(row["gpuId"]) or 0), _times(row) | about

    names = ("start", "end", "gpuId", "queueId", "description_id", "opType_id")
    for gpu, row in _read(database, _OPERATIONS, names, operation):
        if gpu[2] >= 0:  # markers of the host have -1
            yield gpu, row
