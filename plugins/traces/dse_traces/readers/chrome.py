"""Chrome traces of the PyTorch profiler (Kineto), read event by event, so that memory does not grow with the file.

Of an event's `args` these are read: `device`, `stream`, `correlation`, `grid`, `Collective name`, `In msg nelems`,
`Out msg nelems`, `dtype`, `Group size`, `Process Group Name`, `Process Group Ranks`, `Seq`, `Src Rank` and `Dst Rank`;
before or after the events `deviceProperties` and the rank of `distributedInfo`. Of operators (`cpu_op`, recorded with
record_shapes) `Input Dims` and `Input type` are read, and a kernel is one of the operator with the same `External id`.
The launch of a kernel is the event of a category such as `cuda_runtime`, `cuda_driver` or `hip_runtime` with the same
correlation. Iterations are annotations (`dse_traces.profile.iterations`). Categories of older versions (`Kernel`,
`Runtime`) are read as today's. Events of rocprof and of XLA (`dse_traces.readers.rocprof_events`, `.xla_events`) have
none. Nothing of a file is run.

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
from dse_traces.profile.iterations import is_iteration
from dse_traces.profile.kernels import (
    MOST_GPUS,
    MOST_ITERATIONS,
    MOST_KERNELS,
    KernelRows,
    Profile,
    profile_of,
)
from dse_traces.profile.payloads import pattern_of, payload_bytes
from dse_traces.profile.shapes import shape_text
from dse_traces.readers.json_records import JsonRecords, damage, lost_share, text_parts
from dse_traces.readers.rocprof_events import is_rocprof_event, rocprof_row
from dse_traces.readers.xla_events import XlaStreams

_MOST_GROUP = 200  # characters of the name of a group that tell it from others
_MOST_CATEGORIES = 4096
# an element without a phase and a time is no event, but a part of a damaged one
_KEYS: Mapping[str, tuple[str, ...]] = {"traceEvents": ("ph", "ts"), "deviceProperties": (), "distributedInfo": ()}
# damaged events are mended only if they may be kernels, copies or launches
_WORTH = r'"cat"\s*:\s*"[^"]*(?:kernel|mem|runtime|driver)'
_RAN, _LAUNCHED, _OPERATOR, _MARKED, _OTHER = "ran", "launched", "operator", "marked", ""
_ROLES = (
    (re.compile(r"(concurrent_)?kernel|(gpu_)?mem(cpy|set)"), _RAN),
    (re.compile(r"(\w+_)?(runtime|driver)"), _LAUNCHED),
    (re.compile(r"cpu_op|operator"), _OPERATOR),
    (re.compile(r"user_annotation"), _MARKED),
)
"""Categories of events, in small letters, and what such an event is."""
# "[TP00] 0": what is left without the number
_LABEL = re.compile(r"(.*?)\s*-?\d*")
_END_OF_TRACE = "Record Window End"
_STEP = "ProfilerStep#"  # what PyTorch itself marks
_US = 1e-6
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
    # any JSON is valid so far: the key makes it a trace
    if "traceEvents" not in records.met:
        rule = f"has no traceEvents before {losses[0]}" if losses else "is no Chrome trace: it has no traceEvents"
        way = "record or download it again" if losses else _WAY
        raise ConfigError([Problem("profile", rule, str(path), way)])
    damage(events.dropped, records, losses, "events")
    return [replace(profile, lost=lost_share(records, losses)) for profile in events.profiles(path)]


@dataclass
class _Events:
    """The content of a trace so far: kernels by GPU; by process launches by correlation [us], correlations that
    several processes use, shapes of operators by number, iterations, and ranges that a user calls so; and what was
    dropped.
    """

    kernels: dict[tuple[_Process, str, str], KernelRows] = field(default_factory=dict)
    launches: dict[_Process, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))
    launchers: dict[_Process, dict[int, Any]] = field(default_factory=lambda: defaultdict(dict))
    ambiguous: dict[_Process, set[int]] = field(default_factory=lambda: defaultdict(set))
    shapes: dict[_Process, dict[int, str]] = field(default_factory=lambda: defaultdict(dict))
    texts: dict[str, str] = field(default_factory=dict)  # one object for equal shapes
    iterations: dict[_Process, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    ranges: dict[_Process, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    dropped: Counter[str] = field(default_factory=Counter)
    devices: list[tuple[str, str]] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    roles: dict[str, str] = field(default_factory=dict)
    labels: dict[Any, str] = field(default_factory=dict)
    xla: XlaStreams = field(default_factory=XlaStreams)
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
        if role == _OTHER:
            self._without_role(event, args)
        elif role == _RAN:
            self._kernel(event, args)
        elif role == _LAUNCHED:
            self._launch(event, args)
        elif role == _OPERATOR and isinstance(args, dict) and args.get("Input Dims"):
            self._operator(event, args)
        elif is_iteration(name := str(event.get("name", ""))[:_MOST_GROUP]):
            self._iteration(event, self.iterations if name.startswith(_STEP) else self.ranges)

    def _without_role(self, event: Mapping[str, Any], args: Any) -> None:
        """Keep what a profile needs of other profilers' events, which have no category, and the end of a trace."""
        uncategorised = event.get("cat") is None and isinstance(args, dict)
        if uncategorised and is_rocprof_event(args):
            if (row := rocprof_row(event, args)) is not None:
                self._keep(((0, ""), "", ""), row)
        elif event.get("name") == _END_OF_TRACE:
            self.trace += 1
        elif uncategorised and (device := self.xla.gpu_of(event, args)) is not None:
            self._kernel(event, {"device": device})

    def _role(self, category: str) -> str:
        """What events of a category are, whatever its capitals, and also one of several (`gpu,kernel`)."""
        role = self.roles.get(category)
        if role is None:
            # older versions write "Kernel", "gpu memcpy" and lists of categories
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

    def _iteration(self, event: Mapping[str, Any], of: dict[_Process, list[tuple[float, float]]]) -> None:
        marked = of[self._process(event)]
        start, length = self._seconds(event.get("ts") or 0.0), float(event.get("dur") or 0.0) * _US
        if len(marked) < MOST_ITERATIONS:
            marked.append((start, start + length))
        else:
            self.dropped[f"iterations past the first {MOST_ITERATIONS:,}"] += 1

    def _launch(self, event: Mapping[str, Any], args: Mapping[str, Any]) -> None:
        # a call that launches nothing
        if (correlation := args.get("correlation")) is None:
            return
        process, number, pid = self._process(event), int(correlation), event.get("pid")
        start, launchers = self._seconds(event["ts"]), self.launchers[process]
        if launchers.setdefault(number, pid) != pid:  # of several processes: which it is, nobody knows
            self.dropped["launches of several processes by the same number"] += 1
            self.ambiguous[process].add(number)
        # NaN: the launch is there, and its time is not known, whichever process launches by the number again
        self.launches[process][number] = float("nan") if number in self.ambiguous[process] else start

    def _operator(self, event: Mapping[str, Any], args: Mapping[str, Any]) -> None:
        """Keep the shape of an operator; one that cannot be read is none."""
        number = args.get("External id", args.get("external id"))
        text = shape_text(event.get("name"), args["Input Dims"], args.get("Input type"))
        shapes = self.shapes[self._process(event)]
        if text and isinstance(number, int) and len(shapes) < MOST_KERNELS:
            shapes[number] = self.texts.setdefault(text, text)

    def _kernel(self, event: Mapping[str, Any], args: Mapping[str, Any]) -> None:
        if not event["ts"] and not event["dur"]:
            self.dropped["kernels with a time of 0 that take none"] += 1
            return
        row = self._row(event, args)
        gpu = self._process(event), str(event.get("pid"))[:_MOST_GROUP], str(args.get("device"))[:_MOST_GROUP]
        self._keep(gpu, row)

    def _row(self, event: Mapping[str, Any], args: Mapping[str, Any]) -> dict[str, Any]:
        """The row of a kernel. Raises an error of `_WRONG` for fields that cannot be read."""
        grid, elements = args.get("grid"), (args.get("In msg nelems"), args.get("Out msg nelems"))
        # traces of XLA have no stream among their arguments: the thread is one
        stream = args.get("stream", event.get("tid"))
        collective = None if args.get("Collective name") is None else str(args["Collective name"])
        ranks = None if args.get("Group size") is None else int(args["Group size"])
        name, copied = _copy_between_gpus(str(event["name"]), args) or (str(event["name"]), None)
        payload = payload_bytes(pattern_of(collective, name), elements, args.get("dtype"), ranks)
        return {
            "name": name,
            "stream": None if stream is None else str(stream),
            "start_s": self._seconds(event["ts"]),
            "seconds": float(event["dur"]) * _US,
            # the number for now: launches may come after their kernels in the file
            "launch_s": args.get("correlation"),
            "ctas": int(grid[0]) * int(grid[1]) * int(grid[2]) if isinstance(grid, list) and len(grid) == 3 else None,
            "collective": collective,
            "payload_bytes": copied if payload is None else payload,
            "group_size": ranks,
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
        # a file with several GPUs holds several ranks, and one number of a rank does not fit them
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
        # launches of a merged trace may stand without the label of their kernels
        process = (trace, label) if (trace, label) in self.launches else (trace, "")
        rows = self.kernels[gpu]
        rows.replace("launch_s", self.launches.get(process, {}))
        rows.name_shapes(self.shapes.get(process, {}))
        # a user's range often lies in the profiler's, and would count twice
        found = (of.get(at) for of in (self.iterations, self.ranges) for at in ((trace, label), (trace, "")))
        marked: list[tuple[float, float]] = next(filter(None, found), [])
        names = [name for number, name in self.devices if number == device] or [name for _, name in self.devices]
        of_run: dict[str, Any] = {"device": names[0] if names else "", "iterations": sorted(set(marked))}
        return profile_of(rows, path.name, dropped=self.dropped, **of_run)


def _whole(args: Mapping[str, Any], *names: str) -> int | None:
    """A whole number that stands under the first of some names, also as a text; None for what is none."""
    value = next((args[name] for name in names if args.get(name) is not None), None)
    try:
        # below 2**53, as columns hold floats
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
    # the name alone is not unique: several groups may be called "default"
    parts = [args[name] for name in ("Process Group Name", "Process Group Ranks") if args.get(name) not in (None, "")]
    return " ".join(str(part)[:_MOST_GROUP] for part in parts) or None
