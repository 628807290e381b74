"""The JSON of rocprofv3 (`--output-format json`): `rocprofiler-sdk-tool`, a list of processes.

Of each `kernel_dispatch` and `memory_copy` of its `buffer_records` the times [ns], agent, stream, queue, grid and
correlation are read, of `hip_api` the begin of the launch with the same correlation, of `agents` and `kernel_symbols`
names. It is read piece by piece, as Chrome traces are.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace
from math import ceil, prod
from pathlib import Path
from typing import Any

from dse.errors import ConfigError
from dse_chakra.packed import open_packed
from dse_traces.profile.kernels import MOST_GPUS, KernelRows, Profile, profile_of
from dse_traces.readers.json_records import JsonRecords, damage, lost_share, text_parts

ROCPROF = b'"rocprofiler-sdk-tool"'
"""A text near the begin of such a file."""
_KEYS: Mapping[str, tuple[str, ...]] = {
    "metadata": (),
    "agents": ("id", "node_id"),
    "kernel_symbols": ("kernel_id",),
    "kernel_dispatch": ("dispatch_info",),
    "memory_copy": ("start_timestamp", "operations"),
    "hip_api": ("start_timestamp", "operations"),
}
_COPIES = {1: "HtoH", 2: "HtoD", 3: "DtoH", 4: "DtoD"}
"""`operation` of a copy, as rocprofiler-sdk numbers it (rocprofiler_memory_copy_operation_t)."""
_NS = 1e-9
_MOST_NAMES, _MOST_AGENTS = 1 << 20, 1 << 12
_WRONG = (TypeError, ValueError, AttributeError, KeyError, OverflowError, ZeroDivisionError)
_DROPPED = "kernels, copies and launches with fields that cannot be read"

_Gpu = tuple[int, int]
"""Process, by its place in the file, and agent."""


def read_rocprof_json(path: Path) -> list[Profile]:
    """The profile of each GPU of each process. Raises ConfigError."""
    events, losses = _Records(), list[str]()
    with open_packed(path) as (file, _):
        records = JsonRecords(text_parts(file, losses), _KEYS)
        for key, value in records:
            try:
                events.take(key, value)
            except _WRONG:
                events.dropped[_DROPPED] += 1
    damage(events.dropped, records, losses, "records")
    lost = lost_share(records, losses).replace(" event", " record")
    return [replace(profile, lost=lost) for profile in events.profiles(path)]


class _Records:
    """The content of a trace so far."""

    def __init__(self) -> None:
        self.dropped = Counter[str]()
        self._process = 0
        self._rows = defaultdict[_Gpu, KernelRows](KernelRows)
        self._devices = dict[_Gpu, str]()
        self._gpus = set[_Gpu]()
        self._names = dict[tuple[int, int], str]()
        self._launches = defaultdict[int, dict[int, float]](dict)
        self._readers = {
            **{"agents": self._agent, "kernel_symbols": self._symbol, "hip_api": self._call},
            **{"kernel_dispatch": self._kernel, "memory_copy": self._copy},
        }

    def take(self, key: str, value: Any) -> None:
        """Keep what a profile needs of a record. Raises an error of `_WRONG` for one that cannot be read."""
        # each process begins with its metadata
        if key == "metadata":
            self._process += 1
        elif not isinstance(value, dict):
            self.dropped["records that are no objects"] += 1
        else:
            self._readers[key](value)

    def _agent(self, value: Mapping[str, Any]) -> None:
        # ids of agents repeat in each process of a file
        gpu = self._process, _handle(value.get("id", value.get("node_id")))
        if len(self._devices) < _MOST_AGENTS:
            self._devices[gpu] = str(value.get("product_name") or value.get("model_name") or value.get("name") or "")
            # 2 is ROCPROFILER_AGENT_TYPE_GPU
            if value.get("type") in (2, "GPU"):
                self._gpus.add(gpu)

    def _symbol(self, value: Mapping[str, Any]) -> None:
        names = ("formatted_kernel_name", "demangled_kernel_name", "kernel_name")
        name = next((str(value[name]) for name in names if value.get(name)), "")
        if len(self._names) < _MOST_NAMES:
            self._names[self._process, int(value["kernel_id"])] = name.removesuffix(".kd")

    def _call(self, value: Mapping[str, Any]) -> None:
        if "start_timestamp" in value:  # else it says what numbers of operations mean
            number = int(value["correlation_id"]["internal"])
            # the first call with a number is the launch, further ones are nested in it
            self._launches[self._process].setdefault(number, int(value["start_timestamp"]) * _NS)

    def _kernel(self, value: Mapping[str, Any]) -> None:
        about = value["dispatch_info"]
        grid, group = about.get("grid_size"), about.get("workgroup_size")
        sides = [(int(grid[side]), int(group[side])) for side in "xyz"] if grid and group else []
        kernel = int(about["kernel_id"])
        queues = [value.get("stream_id", about.get("stream_id")), about.get("queue_id")]
        row = {
            "name": self._names.get((self._process, kernel), f"kernel {kernel}"),
            "stream": " ".join(str(_handle(queue)) for queue in queues if queue is not None) or None,
            "launch_s": self._launches[self._process].get(int((value.get("correlation_id") or {}).get("internal", 0))),
            # grids of AMD count work-items, and not workgroups
            "ctas": prod(ceil(grid / group) for grid, group in sides) if sides else None,
        }
        self._keep((self._process, _handle(about["agent_id"])), row | _times(value))

    def _copy(self, value: Mapping[str, Any]) -> None:
        if "start_timestamp" not in value:
            # records without times list the names of operations
            return
        ends = [(self._process, _handle(value[name])) for name in ("dst_agent_id", "src_agent_id") if name in value]
        # of a copy to the host the GPU is the source: the target is a CPU agent
        gpu = next((end for end in ends if end in self._gpus or end in self._rows), ends[0])
        kind = value.get("operation")
        between = len(ends) == 2 and ends[0] != ends[1] and all(end in self._gpus for end in ends)
        name = f"Memcpy {'PtoP' if between else _COPIES.get(kind, '') if isinstance(kind, int) else kind or ''}".strip()
        stream = value.get("stream_id")
        # copies without a stream are in order of their kind alone
        about = {"name": name, "stream": name if stream is None else str(_handle(stream))}
        self._keep(gpu, about | {"payload_bytes": value.get("bytes") if between else None} | _times(value))

    def _keep(self, gpu: _Gpu, row: Mapping[str, Any]) -> None:
        if gpu in self._rows or len(self._rows) < MOST_GPUS:
            self._rows[gpu].append(row)
        else:
            self.dropped[f"kernels of GPUs past the first {MOST_GPUS}"] += 1

    def profiles(self, path: Path) -> list[Profile]:
        """The profile of each GPU, in the order of processes and agents. Raises ConfigError."""
        profiles, problems = list[Profile](), list[ConfigError]()
        # without rows `profile_of` tells what the file lacks
        for gpu in sorted(self._rows) or [(0, 0)]:
            # a GPU without a usable kernel must not hide the others
            try:
                rows, device = self._rows[gpu], self._devices.get(gpu, "")
                profiles.append(profile_of(rows, path.name, device=device, dropped=self.dropped))
            except ConfigError as error:
                problems.append(error)
        if not profiles:
            raise problems[0]
        return profiles


def _times(value: Mapping[str, Any]) -> dict[str, Any]:
    start, end = int(value["start_timestamp"]), int(value["end_timestamp"])
    return {"start_s": start * _NS, "seconds": (end - start) * _NS}


def _handle(value: Any) -> int:
    """The number of an agent, a queue or a stream."""
    return int(value["handle"] if isinstance(value, Mapping) else value)
