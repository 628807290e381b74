"""Chrome traces of the PyTorch profiler (Kineto), read event by event, so that memory does not grow with the file.

Of an event's `args` these are read: `stream`, `correlation`, `grid`, `Collective name`, `In msg nelems`, `dtype`,
`Group size`, `Process Group Name` and `Process Group Ranks`; of the head `deviceProperties` and the rank of
`distributedInfo`. Of operators (`cpu_op`, recorded with
record_shapes) `Input Dims` and `Input type` are read, and a kernel is one of the operator with the same `External id`.
The launch of a kernel is the event of category `cuda_runtime`, `cuda_driver` or `hip_runtime` with
the same correlation. Iterations are annotations `ProfilerStep#`. The JSON of rocprof is read as well: what ran on a
queue, with its times. Nothing of a file is run.
"""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dse.errors import ConfigError, Problem
from dse.files import DAMAGED, loss, open_packed
from dse.progress import bar
from simulators.profiles.profile import DTYPE_BYTES, MOST_KERNELS, KernelRows, Profile, profile_of
from simulators.profiles.shapes import shape_text

MOST_EVENT = 1 << 24
"""Characters of one event."""
_CHUNK = 1 << 20
_MOST_GROUP = 200  # characters of the name of a group that tell it from others
_BEGIN = re.compile(r'"traceEvents"\s*:\s*\[')
_DEVICE = re.compile(r'"deviceProperties"\s*:\s*\[[^\]]*?"name"\s*:\s*"([^"]{1,80})"')
_RANK = re.compile(r'"distributedInfo"\s*:\s*\{[^{}\[]*?"rank"\s*:\s*(\d{1,9})\b')
_SPACE = re.compile(r"[\s,]*")
_RAN = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHED = ("cuda_runtime", "cuda_driver", "hip_runtime", "runtime")
_ITERATION = "ProfilerStep#"
_US, _NS = 1e-6, 1e-9
_UNREADABLE = "kernels and launches with fields that cannot be read"


def read_chrome(path: Path) -> Profile:
    """The profile that a Chrome trace holds. Raises ConfigError where the file is no such trace.

    A file that ends in the middle, or whose gzip is cut off, is used as far as it goes, which is told in `dropped`.
    """
    events = _Events()
    size = path.stat().st_size if path.is_file() else None
    with bar(f"reading {path.name}", size, "bytes") as advance, _text(path, advance) as (text, losses):
        for event in _objects(text, path, events, losses):
            events.take(event)
    return events.profile(path)


@dataclass
class _Events:
    """What was read so far: kernels, launches by correlation [us], shapes of operators by number, iterations, and what
    was dropped.
    """

    kernels: KernelRows = field(default_factory=KernelRows)
    launches: dict[int, float] = field(default_factory=dict)
    shapes: dict[int, str] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)  # one object for equal shapes
    iterations: list[tuple[float, float]] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    device: str = ""
    rank: int | None = None

    def take(self, event: Any) -> None:
        """Keep what a profile needs of an event."""
        if not isinstance(event, dict):
            self.dropped["events that are no objects"] += 1
            return
        category, args = event.get("cat"), event.get("args") or {}
        if category is None and isinstance(args, dict) and "BeginNs" in args:
            self._rocprof(event, args)
        elif category in _RAN or category in _LAUNCHED:
            try:
                self._kernel(event, args) if category in _RAN else self._launch(event, args)
            except (TypeError, ValueError, AttributeError, KeyError, OverflowError):
                self.dropped[_UNREADABLE] += 1
        elif category == "cpu_op" and isinstance(args, dict) and args.get("Input Dims"):
            self._operator(event, args)
        elif category in ("user_annotation", "cpu_op") and str(event.get("name", "")).startswith(_ITERATION):
            start = float(event.get("ts") or 0.0) * _US
            self.iterations.append((start, start + float(event.get("dur") or 0.0) * _US))

    def _launch(self, event: Mapping[str, Any], args: Mapping[str, Any]) -> None:
        if (correlation := args.get("correlation")) is not None:
            self.launches[int(correlation)] = float(event["ts"]) * _US

    def _rocprof(self, event: Mapping[str, Any], args: Mapping[str, Any]) -> None:
        """Keep what ran on a queue, of a trace of rocprof, which puts times [ns] into `args` and numbers into text."""
        queue = [str(args[name]) for name in ("stream-id", "queue-id") if args.get(name) not in (None, "")]
        if not queue:
            return  # a call of the host
        try:
            start, end = int(args["BeginNs"]), int(args["EndNs"])
            name = str(args.get("Name") or args.get("KernelName") or event["name"]).removesuffix(" [clone .kd]")
            times = {"start_s": start * _NS, "seconds": (end - start) * _NS}
            self.kernels.append({"name": name.removesuffix(".kd"), "stream": " ".join(queue), **times})
        except (TypeError, ValueError, KeyError, OverflowError):
            self.dropped[_UNREADABLE] += 1

    def _operator(self, event: Mapping[str, Any], args: Mapping[str, Any]) -> None:
        """Keep the shape of an operator; one that cannot be read is none."""
        number = args.get("External id")
        text = shape_text(event.get("name"), args["Input Dims"], args.get("Input type"))
        if text and isinstance(number, int) and len(self.shapes) < MOST_KERNELS:
            self.shapes[number] = self.texts.setdefault(text, text)

    def _kernel(self, event: Mapping[str, Any], args: Mapping[str, Any]) -> None:
        grid, elements = args.get("grid"), args.get("In msg nelems")
        stream = args.get("stream", event.get("tid"))
        size, collective = DTYPE_BYTES.get(str(args.get("dtype"))), args.get("Collective name")
        name, payload = _copy_between_gpus(str(event["name"]), args) or (str(event["name"]), None)
        self.kernels.append(
            {
                "name": name,
                "stream": None if stream is None else str(stream),
                "start_s": float(event["ts"]) * _US,
                "seconds": float(event["dur"]) * _US,
                "launch_s": args.get("correlation"),
                "ctas": int(grid[0]) * int(grid[1]) * int(grid[2])
                if isinstance(grid, list) and len(grid) == 3
                else None,
                "collective": None if collective is None else str(collective),
                "payload_bytes": payload if elements is None or size is None else float(elements) * size,
                "group_size": None if args.get("Group size") is None else int(args["Group size"]),
                "group": _group(args),
                "operator": args.get("External id"),
            }
        )

    def profile(self, path: Path) -> Profile:
        """The profile of what was read. Raises ConfigError."""
        self.kernels.replace("launch_s", self.launches)
        self.kernels.name_shapes(self.shapes)
        of_run = {"device": self.device, "dropped": self.dropped, "iterations": sorted(set(self.iterations))}
        return replace(profile_of(self.kernels, path.name, **of_run), rank=self.rank)  # type: ignore[arg-type]


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


@contextmanager
def _text(path: Path, advance: Callable[[int], None]) -> Iterator[tuple[Iterator[str], list[str]]]:
    """Parts of the text of a file, plain or gzip, and what went wrong at its end. Raises ConfigError."""
    losses: list[str] = []
    with open_packed(path) as (unpacked, file):
        reader = io.TextIOWrapper(unpacked, encoding="utf-8-sig", errors="replace", newline="")

        def parts() -> Iterator[str]:
            taken = 0
            try:
                while part := reader.read(_CHUNK):
                    advance(file.tell() - taken)
                    taken = file.tell()
                    yield part
            except DAMAGED as error:
                losses.append(loss(error))

        yield parts(), losses


def _objects(text: Iterator[str], path: Path, events: _Events, losses: list[str]) -> Iterator[Any]:
    """Events of the array `traceEvents`, or of a file that is an array. Raises ConfigError where neither is there."""
    scan: Any = json.JSONDecoder().raw_decode
    buffer, place = _begun(text, path, events)
    ended = False
    while not ended:
        place = _SPACE.match(buffer, place).end()  # type: ignore[union-attr]
        try:
            if buffer[place] == "]":
                return
            event, place = scan(buffer, place)
            yield event
        except (StopIteration, IndexError, ValueError):
            more = next(text, "")
            ended = not more or len(buffer) - place > MOST_EVENT
            buffer, place = buffer[place:] + more, 0
    events.dropped[losses[0] if losses else "the rest of a JSON that stops, or is damaged"] += 1


def _begun(text: Iterator[str], path: Path, events: _Events) -> tuple[str, int]:
    """The text that holds the first event, and its place. Raises ConfigError."""
    buffer = ""
    for part in text:
        buffer += part
        if opening := _BEGIN.search(buffer):
            if device := _DEVICE.search(buffer, 0, opening.start()):
                events.device = device.group(1)
            if number := _RANK.search(buffer, 0, opening.start()):
                events.rank = int(number.group(1))
            return buffer, opening.end()
        if buffer.lstrip()[:1] == "[":
            return buffer, buffer.index("[") + 1
        if len(buffer) > MOST_EVENT:
            break
    way = "name the JSON that torch.profiler's export_chrome_trace wrote"
    raise ConfigError([Problem("profile", "is no Chrome trace: it has no traceEvents", str(path), way)])
