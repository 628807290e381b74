"""Chrome traces of the PyTorch profiler (Kineto), read event by event, so that memory does not grow with the file.

Of an event's `args` these are read: `device`, `stream`, `correlation`, `grid`, `Collective name`, `In msg nelems`,
`dtype`, `Group size`, `Process Group Name`, `Process Group Ranks`, `Seq`, `Src Rank` and `Dst Rank`; before or after
the events `deviceProperties` and the rank of `distributedInfo`. Of operators (`cpu_op`, recorded with
record_shapes) `Input Dims` and `Input type` are read, and a kernel is one of the operator with the same `External id`.
The launch of a kernel is the event of a category such as `cuda_runtime`, `cuda_driver` or `hip_runtime` with
the same correlation. Iterations are annotations `ProfilerStep#`. Categories of older versions (`Kernel`, `Runtime`) are
read as today's. The JSON of rocprof is read as well: what ran on a queue, with its times; and that of XLA (JAX,
TensorFlow): what ran on the streams of a process `/device:GPU:0`. Nothing of a file is run.

A GPU is a (pid, device). Traces that were merged come apart: by labels before the pid (`[TP00] 0`), and by the event
`Record Window End`, with which each of several traces in one file ends.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dse.errors import ConfigError, Problem
from dse.errors.parsing import natural_key
from dse.errors.terminal import bar
from dse_chakra.packed import open_packed
from dse_traces.profile.kernels import (
    DTYPE_BYTES,
    MOST_GPUS,
    MOST_ITERATIONS,
    MOST_KERNELS,
    KernelRows,
    Profile,
    profile_of,
)
from dse_traces.profile.shapes import shape_text
from dse_traces.readers.json_records import JsonRecords, text_parts

_MOST_GROUP = 200  # characters of the name of a group that tell it from others
_MOST_CATEGORIES = 4096
_KEYS: Mapping[str, tuple[str, ...]] = {"traceEvents": ("ph", "ts"), "deviceProperties": (), "distributedInfo": ()}
_WORTH = r'"cat"\s*:\s*"[^"]*(?:kernel|mem|runtime|driver)'
_RAN, _LAUNCHED, _OPERATOR, _MARKED, _OTHER = "ran", "launched", "operator", "marked", ""
_ROLES = (
    (re.compile(r"(concurrent_)?kernel|(gpu_)?mem(cpy|set)"), _RAN),
    (re.compile(r"(\w+_)?(runtime|driver)"), _LAUNCHED),
    (re.compile(r"cpu_op|operator"), _OPERATOR),
    (re.compile(r"user_annotation"), _MARKED),
)
"""Categories of events, in small letters, and what such an event is."""
_XLA_GPU = re.compile(r"/device:GPU:\d+")
_XLA_STREAM = "Stream #"
_LABEL = re.compile(r"(.*?)\s*-?\d*")
_END_OF_TRACE = "Record Window End"
_ITERATION = "ProfilerStep#"
_US, _NS = 1e-6, 1e-9
_WAY = "name the JSON that torch.profiler's export_chrome_trace wrote"
_UNREADABLE = "kernels and launches with fields that cannot be read"
_WRONG = (TypeError, ValueError, AttributeError, KeyError, OverflowError, RecursionError)

_Process = tuple[int, str]
"""Which of several traces in a file, and the label before its pids."""


def read_chrome(path: Path) -> list[Profile]:
    """The profile of each GPU of a Chrome trace. Raises ConfigError where the file is no such trace.

    A file that is damaged, that ends in the middle, or whose gzip is cut off, is used as far as it goes, which is told
    in `lost` and in `dropped`.
    """
    events, losses = _Events(), list[str]()
    size = path.stat().st_size if path.is_file() else None
    with bar(f"reading {path.name}", size, "bytes") as advance, open_packed(path) as (unpacked, file):
        records = JsonRecords(text_parts(unpacked, losses), _KEYS, bare="traceEvents", worth=_WORTH)
        for place, (key, value) in enumerate(records):
            events.take(key, value)
            # progress by what was unpacked: the size of a packed file says nothing of its content
            if not place % 4096:
                advance(max(file.tell() - events.at, 0))
                events.at = file.tell()
    if "traceEvents" not in records.met:
        rule = f"has no traceEvents before {losses[0]}" if losses else "is no Chrome trace: it has no traceEvents"
        way = "record or download it again" if losses else _WAY
        raise ConfigError([Problem("profile", rule, str(path), way)])
    damage(events.dropped, records, losses, "events")
    return [replace(profile, lost=lost_share(records, losses)) for profile in events.profiles(path)]


def damage(dropped: Counter[str], records: JsonRecords, losses: list[str], name: str) -> None:
    """Count what damage cost of a JSON. name: of its elements."""
    dropped[f"{name} that are damaged"] += records.damaged
    dropped[f"{name} that are damaged in part, and used"] += records.mended
    for reason in losses:
        dropped[reason] += 1
    if records.cut and not losses:
        dropped["the rest of a JSON that stops, or is damaged"] += 1


def lost_share(records: JsonRecords, losses: list[str]) -> str:
    """The share of a JSON that was lost, in words; "" for none."""
    stops = "what came after the file stops" if records.cut or losses else ""
    if not records.lost:
        return stops
    share = 100 * records.share
    # a share that is not zero is never shown as 0.0 %
    text = f"{share:.1f} %" if share >= 0.1 else f"{share:.1g} %"
    return f"{text} of the file, {records.damaged:,} damaged event{'s' * (records.damaged != 1)}" + (
        f", and {stops}" if stops else ""
    )


@dataclass(frozen=True)
class _XlaStreams:
    """GPUs by pid, and their streams (pid, tid), of a trace of XLA: its other lines (`XLA Ops`, `Steps`) repeat what
    ran on these.
    """

    gpus: dict[Any, str]
    streams: set[tuple[Any, Any]]

    def gpu_of(self, event: Mapping[str, Any], args: Mapping[str, Any]) -> str | None:
        """Read an event that names a GPU or a stream; return the GPU of one that ran on a stream, None of others."""
        pid, stream, text = event["pid"], (event["pid"], event.get("tid")), str(args.get("name", ""))
        if event.get("name") == "process_name" and _XLA_GPU.fullmatch(text) and len(self.gpus) < MOST_GPUS:
            self.gpus[pid] = text
        elif event.get("name") == "thread_name" and text.startswith(_XLA_STREAM):
            if pid in self.gpus and len(self.streams) < _MOST_CATEGORIES:
                self.streams.add(stream)
        elif stream in self.streams and event.get("ph") == "X":
            return self.gpus[pid]
        return None


@dataclass
class _Events:
    """The content of a trace so far: kernels by GPU; by process launches by correlation [us], shapes of operators by
    number, and iterations; and what was dropped.
    """

    kernels: dict[tuple[_Process, str, str], KernelRows] = field(default_factory=dict)
    launches: dict[_Process, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))
    launchers: dict[_Process, dict[int, Any]] = field(default_factory=lambda: defaultdict(dict))
    shapes: dict[_Process, dict[int, str]] = field(default_factory=lambda: defaultdict(dict))
    texts: dict[str, str] = field(default_factory=dict)  # one object for equal shapes
    iterations: dict[_Process, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    dropped: Counter[str] = field(default_factory=Counter)
    devices: list[tuple[str, str]] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    roles: dict[str, str] = field(default_factory=dict)
    labels: dict[Any, str] = field(default_factory=dict)
    xla: _XlaStreams = field(default_factory=lambda: _XlaStreams({}, set()))
    trace: int = 0
    zero: float | int | None = None
    at: int = 0

    def take(self, key: str, value: Any) -> None:
        """Keep what a profile needs of an event, or of what stands beside the events."""
        if key != "traceEvents":
            self._head(key, value)
            return
        if not isinstance(value, dict):
            self.dropped["events that are no objects"] += 1
            return
        try:
            self._event(value)
        except _WRONG:
            self.dropped[_UNREADABLE] += 1

    def _head(self, key: str, value: Any) -> None:
        if not isinstance(value, dict):
            return
        name, rank = value.get("name"), value.get("rank")
        if key == "deviceProperties" and isinstance(name, str) and len(self.devices) < MOST_GPUS:
            self.devices.append((str(value.get("id")), name))
        elif key == "distributedInfo" and isinstance(rank, int) and 0 <= rank < 1 << 31:
            self.ranks.append(rank)

    def _event(self, event: Mapping[str, Any]) -> None:
        category, args = event.get("cat"), event.get("args") or {}
        role = self._role(category) if isinstance(category, str) else _OTHER
        if role == _RAN:
            self._kernel(event, args)
        elif role == _LAUNCHED:
            self._launch(event, args)
        elif category is None and isinstance(args, dict) and "BeginNs" in args:
            self._rocprof(event, args)
        elif role == _OPERATOR and isinstance(args, dict) and args.get("Input Dims"):
            self._operator(event, args)
        elif role and str(event.get("name", "")).startswith(_ITERATION):
            self._iteration(event)
        elif role == _OTHER and event.get("name") == _END_OF_TRACE:
            self.trace += 1
        elif (
            category is None
            and isinstance(args, dict)
            and isinstance(event.get("pid"), str | int)
            and (device := self.xla.gpu_of(event, args)) is not None
        ):
            self._kernel(event, {"device": device})

    def _role(self, category: str) -> str:
        """What events of a category are, whatever its capitals, and also one of several (`gpu,kernel`)."""
        role = self.roles.get(category)
        if role is None:
            parts = [part.strip().replace(" ", "_") for part in category[:200].lower().split(",")]
            role = next((role for pattern, role in _ROLES if any(map(pattern.fullmatch, parts))), _OTHER)
            # a hostile file must not fill the memory with names
            if len(self.roles) < _MOST_CATEGORIES:
                self.roles[category] = role
        return role

    def _process(self, event: Mapping[str, Any]) -> _Process:
        """Which trace of the file an event is of, and the label of its process: what stands before a pid."""
        pid = event.get("pid")
        if not isinstance(pid, str):
            return self.trace, ""
        label = self.labels.get(pid)
        if label is None:
            match = _LABEL.fullmatch(pid[:_MOST_GROUP])
            label = match[1] if match else pid[:_MOST_GROUP]
            if len(self.labels) < _MOST_CATEGORIES:
                self.labels[pid] = label
        return self.trace, label

    def _seconds(self, value: Any) -> float:
        """A time [us] after the first that was met, in seconds. Raises ValueError, TypeError or OverflowError."""
        if isinstance(value, bool):
            raise TypeError
        # times since 1970 lose digits as floats: whole numbers are subtracted first
        number = value if isinstance(value, int) else float(value)
        if self.zero is None and abs(number) < 1 << 62:
            self.zero = number
        return float(number - (self.zero or 0)) * _US

    def _iteration(self, event: Mapping[str, Any]) -> None:
        marked = self.iterations[self._process(event)]
        start, length = self._seconds(event.get("ts") or 0.0), float(event.get("dur") or 0.0) * _US
        if len(marked) < MOST_ITERATIONS:
            marked.append((start, start + length))
        else:
            self.dropped[f"iterations past the first {MOST_ITERATIONS:,}"] += 1

    def _launch(self, event: Mapping[str, Any], args: Mapping[str, Any]) -> None:
        if (correlation := args.get("correlation")) is None:
            return
        process, number, pid = self._process(event), int(correlation), event.get("pid")
        start, launchers = self._seconds(event["ts"]), self.launchers[process]
        if launchers.setdefault(number, pid) != pid:  # of several processes: which it is, nobody knows
            self.dropped["launches of several processes by the same number"] += 1
            start = float("nan")
        self.launches[process][number] = start

    def _rocprof(self, event: Mapping[str, Any], args: Mapping[str, Any]) -> None:
        """Keep what ran on a queue, of a trace of rocprof, which puts times [ns] into `args` and numbers into text."""
        queue = [str(args[name]) for name in ("stream-id", "queue-id") if args.get(name) not in (None, "")]
        if not queue:
            return  # a call of the host
        start, end = int(args["BeginNs"]), int(args["EndNs"])
        name = str(args.get("Name") or args.get("KernelName") or event["name"]).removesuffix(" [clone .kd]")
        times = {"start_s": start * _NS, "seconds": (end - start) * _NS}
        self._keep(((0, ""), "", ""), {"name": name.removesuffix(".kd"), "stream": " ".join(queue), **times})

    def _operator(self, event: Mapping[str, Any], args: Mapping[str, Any]) -> None:
        """Keep the shape of an operator; one that cannot be read is none."""
        number = args.get("External id", args.get("external id"))
        text, shapes = shape_text(event.get("name"), args["Input Dims"], args.get("Input type")), self._process(event)
        if text and isinstance(number, int) and len(self.shapes[shapes]) < MOST_KERNELS:
            self.shapes[shapes][number] = self.texts.setdefault(text, text)

    def _kernel(self, event: Mapping[str, Any], args: Mapping[str, Any]) -> None:
        if not event["ts"] and not event["dur"]:
            self.dropped["kernels with a time of 0 that take none"] += 1
            return
        row = self._row(event, args)
        gpu = self._process(event), str(event.get("pid"))[:_MOST_GROUP], str(args.get("device"))[:_MOST_GROUP]
        self._keep(gpu, row)

    def _row(self, event: Mapping[str, Any], args: Mapping[str, Any]) -> dict[str, Any]:
        """The row of a kernel. Raises an error of `_WRONG` for fields that cannot be read."""
        grid, elements = args.get("grid"), args.get("In msg nelems")
        stream = args.get("stream", event.get("tid"))
        size, collective = DTYPE_BYTES.get(str(args.get("dtype"))), args.get("Collective name")
        name, payload = _copy_between_gpus(str(event["name"]), args) or (str(event["name"]), None)
        return {
            "name": name,
            "stream": None if stream is None else str(stream),
            "start_s": self._seconds(event["ts"]),
            "seconds": float(event["dur"]) * _US,
            "launch_s": args.get("correlation"),
            "ctas": int(grid[0]) * int(grid[1]) * int(grid[2]) if isinstance(grid, list) and len(grid) == 3 else None,
            "collective": None if collective is None else str(collective),
            "payload_bytes": payload if elements is None or size is None else float(elements) * size,
            "group_size": None if args.get("Group size") is None else int(args["Group size"]),
            "group": _group(args),
            "sequence": _whole(args, "Seq", "seq"),
            "source_rank": _whole(args, "Src Rank", "src rank"),
            "destination_rank": _whole(args, "Dst Rank", "dst rank"),
            "operator": args.get("External id", args.get("external id")),
        }

    def _keep(self, gpu: tuple[_Process, str, str], row: Mapping[str, Any]) -> None:
        rows = self.kernels.get(gpu)
        if rows is None:
            if len(self.kernels) >= MOST_GPUS:
                self.dropped[f"kernels of GPUs past the first {MOST_GPUS}"] += 1
                return
            rows = self.kernels[gpu] = KernelRows()
        rows.append(row)

    def profiles(self, path: Path) -> list[Profile]:
        """The profile of each GPU, in the order of processes and devices. Raises ConfigError."""
        if not self.kernels:
            return [profile_of(KernelRows(), path.name, dropped=self.dropped)]
        gpus = sorted(self.kernels, key=lambda gpu: [natural_key(str(part)) for part in (*gpu[0], gpu[1], gpu[2])])
        rank = self.ranks[0] if len(gpus) == 1 and self.ranks else None
        profiles, problems = list[Profile](), list[ConfigError]()
        for gpu in gpus:
            try:
                profiles.append(replace(self._profile(gpu, path), rank=rank))
            except ConfigError as error:  # one without a kernel that can be used
                problems.append(error)
        if not profiles:
            raise problems[0]
        return profiles

    def _profile(self, gpu: tuple[_Process, str, str], path: Path) -> Profile:
        (trace, label), _, device = gpu
        process = (trace, label) if (trace, label) in self.launches else (trace, "")
        rows = self.kernels[gpu]
        rows.replace("launch_s", self.launches.get(process, {}))
        rows.name_shapes(self.shapes.get(process, {}))
        marked = self.iterations.get((trace, label)) or self.iterations.get((trace, ""), [])
        names = [name for number, name in self.devices if number == device] or [name for _, name in self.devices]
        of_run: dict[str, Any] = {"device": names[0] if names else "", "iterations": sorted(set(marked))}
        return profile_of(rows, path.name, dropped=self.dropped, **of_run)


def _whole(args: Mapping[str, Any], *names: str) -> int | None:
    """A whole number that stands under the first of some names, also as a text; None for what is none."""
    value = next((args[name] for name in names if args.get(name) is not None), None)
    try:
        return int(value) if value is not None and abs(int(value)) < 1 << 53 else None
    except _WRONG:
        return None


def _copy_between_gpus(name: str, args: Mapping[str, Any]) -> tuple[str, Any] | None:
    """The name and the bytes of a copy between two GPUs, also of one that is called as those within one; else None."""
    ends = args.get("fromDevice"), args.get("toDevice")
    if "DtoD" in name and None not in ends and ends[0] != ends[1]:
        name = name.replace("DtoD", "PtoP")
    return (name, args.get("bytes")) if "PtoP" in name else None


def _group(args: Mapping[str, Any]) -> str | None:
    """The name and the ranks of the process group of a collective, as far as they are recorded."""
    parts = [args[name] for name in ("Process Group Name", "Process Group Ranks") if args.get(name) not in (None, "")]
    return " ".join(str(part)[:_MOST_GROUP] for part in parts) or None
