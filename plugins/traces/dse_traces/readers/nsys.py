"""Profiles of Nsight Systems, as `nsys export --type sqlite` writes them.

Of the tables CUPTI_ACTIVITY_KIND_KERNEL, _MEMCPY and _MEMSET these are read: start, end [ns], deviceId, streamId,
correlationId, globalPid, the grid, and names by StringIds; of CUPTI_ACTIVITY_KIND_RUNTIME the start of the launch with
the same correlationId in the same process; of TARGET_INFO_GPU the name of the GPU; of NVTX_EVENTS iterations
(`ProfilerStep#`, `iteration`, `step`). Columns differ between versions: those that are absent are unknown. Payloads of
collectives are not recorded.

By default nsys records a CUDA graph as one, in CUPTI_ACTIVITY_KIND_GRAPH_TRACE: the GPU is busy, with what nobody
knows. `nsys profile --cuda-graph-trace=node` records the kernels of graphs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from dse.errors import ConfigError, Problem
from dse_traces.profile.iterations import is_iteration
from dse_traces.profile.kernels import GRAPH_NAME, MOST_GPUS, MOST_ITERATIONS, KernelRows, Profile, profile_of
from dse_traces.readers.databases import WAY_OUT, Database, open_database, whole

_NS = 1e-9
_KERNELS, _RUNTIME = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME"
_GRAPHS = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
_RAN = (_KERNELS, _GRAPHS, "CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET")
# the longest first: a short name has lost templates and namespaces
_NAMES = ("demangledName", "shortName", "name")
_COPIES = {1: "HtoD", 2: "DtoH", 8: "DtoD", 9: "HtoH", 10: "PtoP"}
"""`copyKind`, as CUPTI numbers it (CUpti_ActivityMemcpyKind)."""
_BETWEEN_GPUS = ("Memcpy PtoP",)
# globalTid and globalPid share their upper bits
_PROCESS = 24  # bits of a thread in `globalTid`
_DROPPED = "rows with fields that cannot be read"
_MOST_NAMES = 1024  # of GPUs
_WRONG = (TypeError, ValueError, OverflowError)

_Gpu = tuple[int, int]
"""Process and device."""
_Launches = Mapping[tuple[int, int], float]


def read_nsys(path: Path) -> list[Profile]:
    """The profile of each GPU of each process. Raises ConfigError where the file is no export of nsys.

    A damaged database is used as far as it goes.
    """
    with open_database(path) as database:
        return [replace(profile, lost=database.lost) for profile in _profiles(database)]


def _profiles(database: Database) -> list[Profile]:
    """The profiles of all GPUs. Raises ConfigError."""
    # exports without any activity of a GPU lack these tables
    if not {_KERNELS, _GRAPHS} & database.tables:
        rule = f"is no export of nsys with kernels of a GPU: it has no table {_KERNELS}"
        raise ConfigError([Problem("profile", rule, str(database.path), WAY_OUT)])
    texts, launches = database.texts("StringIds", "id", "value"), _launches(database)
    by_gpu = defaultdict[_Gpu, KernelRows](KernelRows)
    for table in (name for name in _RAN if name in database.tables):
        for gpu, row in _rows(database, table, texts, launches):
            if gpu in by_gpu or len(by_gpu) < MOST_GPUS:
                by_gpu[gpu].append(row)
            else:
                database.dropped[f"kernels of GPUs past the first {MOST_GPUS}"] += 1
    return _of_each(database, by_gpu, _iterations(database, texts))


def _of_each(
    database: Database, by_gpu: Mapping[_Gpu, KernelRows], iterations: Mapping[int, Sequence[tuple[float, float]]]
) -> list[Profile]:
    """The profile of each GPU that has any; the first one tells why where none has. Raises ConfigError."""
    name, dropped = database.path.name, database.dropped
    names = _names(database)
    if not by_gpu:
        return [profile_of([], name, dropped=dropped)]
    profiles, problems = list[Profile](), list[ConfigError]()
    for process, device in sorted(by_gpu):
        # ranges of a process count for its GPUs; -1 on either side matches all
        marked = [span for at, spans in iterations.items() if at == process or process < 0 or at < 0 for span in spans]
        how: dict[str, Any] = {"device": names.get(device, ""), "dropped": dropped}
        try:
            profiles.append(profile_of(by_gpu[process, device], name, iterations=sorted(set(marked)), **how))
        except ConfigError as error:
            problems.append(error)
    if not profiles:
        raise problems[0]
    return profiles


def _names(database: Database) -> Mapping[int, str]:
    """The name of each GPU by its number: by the order of rows where numbers are not recorded."""
    if "name" not in database.columns("TARGET_INFO_GPU"):
        return {}
    names = dict[int, str]()
    for place, row in enumerate(islice(database.select("TARGET_INFO_GPU", ["id", "name"]), _MOST_NAMES)):
        try:
            number = whole(row["id"])
        except _WRONG:
            number = None
        names[place if number is None else number] = str(row["name"])
    return names


def _launches(database: Database) -> dict[tuple[int, int], float]:
    """Start of each launch [s], by process and correlation."""
    launches = dict[tuple[int, int], float]()
    if _RUNTIME not in database.tables:
        return launches
    for row in database.select(_RUNTIME, ("start", "correlationId", "globalTid")):
        try:
            start, number = whole(row["start"]), whole(row["correlationId"])
            if start is not None and number is not None:
                launches[_process(row["globalTid"]), number] = start * _NS
        except _WRONG:
            database.dropped[_DROPPED] += 1
    return launches


def _rows(
    database: Database, table: str, texts: Mapping[int, str], launches: _Launches
) -> Iterator[tuple[_Gpu, Mapping[str, Any]]]:
    """Yield (process, device) and the row of a profile, for each row of a table."""
    # memory copies have no name column: None is looked up then, and the name comes from the kind
    named = next((name for name in _NAMES if name in database.columns(table)), "name")
    fields = ("start", "end", "deviceId", "streamId", "correlationId", "globalPid", "gridX", "gridY", "gridZ")
    for row in database.select(table, (*fields, "copyKind", "bytes", "srcDeviceId", "dstDeviceId", "graphId", named)):
        try:
            gpu, kernel = _row(row, launches)
            name = _name(table, row, texts.get(row[named], row[named]))
            # bytes count for copies between GPUs alone, which are communication
            payload = row["bytes"] if table.endswith("MEMCPY") and name in _BETWEEN_GPUS else None
            yield gpu, kernel | {"name": name, "payload_bytes": payload}
        except _WRONG:
            database.dropped[_DROPPED] += 1


def _name(table: str, row: Mapping[str, Any], text: Any) -> str:
    if table == _KERNELS:
        return str(text or "kernel without a name")
    if table == _GRAPHS:
        return GRAPH_NAME if row["graphId"] is None else f"{GRAPH_NAME} {row['graphId']}"
    return "Memset" if table.endswith("MEMSET") else _copy_name(row)


def _row(row: Mapping[str, Any], launches: _Launches) -> tuple[_Gpu, dict[str, Any]]:
    """A row of a profile, without its name. Raises an error of `_WRONG` for fields that cannot be read."""
    process, start, end = _process(row["globalPid"]), whole(row["start"]), whole(row["end"])
    if start is None or end is None:
        raise ValueError
    grid, launch = [whole(row[f"grid{side}"]) for side in "XYZ"], None
    if (correlation := whole(row["correlationId"])) is not None:
        launch = launches.get((process, correlation), launches.get((-1, correlation)))
    x, y, z = grid
    return (process, whole(row["deviceId"]) or 0), {
        "stream": None if row["streamId"] is None else str(row["streamId"]),
        "start_s": start * _NS,
        "seconds": (end - start) * _NS,
        "launch_s": launch,
        "ctas": None if x is None or y is None or z is None else x * y * z,
    }


def _iterations(database: Database, texts: Mapping[int, str]) -> dict[int, list[tuple[float, float]]]:
    """(start, end) [s] of ranges that are called as iterations are, by process."""
    marked, count = defaultdict[int, list[tuple[float, float]]](list), 0
    if "NVTX_EVENTS" not in database.tables:
        return marked
    for row in database.select("NVTX_EVENTS", ("start", "end", "text", "textId", "globalTid")):
        # short texts are stored in the event, repeated ones by number
        text = row["text"] if row["text"] is not None else texts.get(row["textId"])
        # a mark without an end is no range
        if row["end"] is None or not isinstance(text, str) or not is_iteration(text[:200]):
            continue
        try:
            span = ((whole(row["start"]) or 0) * _NS, (whole(row["end"]) or 0) * _NS)
            count += 1
            if count <= MOST_ITERATIONS:
                marked[_process(row["globalTid"])].append(span)
        except _WRONG:
            database.dropped[_DROPPED] += 1
    database.dropped[f"iterations past the first {MOST_ITERATIONS:,}"] += max(count - MOST_ITERATIONS, 0)
    return marked


def _copy_name(row: Mapping[str, Any]) -> str:
    """The name of a copy; one whose ends are different GPUs is one between GPUs, whatever its kind says."""
    ends = row["srcDeviceId"], row["dstDeviceId"]
    # 8 is DtoD: it also covers copies between two devices of one process
    between = row["copyKind"] == 8 and None not in ends and ends[0] != ends[1]
    return f"Memcpy {'PtoP' if between else _COPIES.get(row['copyKind'], '')}".strip()


def _process(number: Any) -> int:
    """The process of a `globalPid` or `globalTid`; -1 where it is not recorded. Raises as `whole` does."""
    value = whole(number)
    return -1 if value is None else value >> _PROCESS
