"""A profile: the kernels that one GPU ran, as a profiler recorded them."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dse.errors import ConfigError, Problem
from dse_traces.profile.kernel_classes import (
    COLLECTIVE,
    COMMUNICATES,
    FUSED,
    MOVED,
    OTHER,
    PEER_COPY,
    Patterns,
    kernel_class,
)
from dse_traces.profile.texts import legal_text

Floats = NDArray[np.float64]
Marks = NDArray[np.bool_]
_NAN = float("nan")
MOST_KERNELS = 1 << 25
"""Of a profile, about 3 GB; what comes after them is dropped."""
MOST_GPUS = 256
"""Of one file; what comes after them is dropped."""
MOST_ITERATIONS = 1 << 16
"""Of one file."""
GRAPH = "whole graph"
"""Class of what a profiler recorded as one: a CUDA graph whose kernels it left out. What it does is unknown."""
GRAPH_NAME = "whole CUDA graph"
"""Begin of the names of these."""
_EXACT = 2.0**53  # below which a float64 holds every whole number
_EPOCH_S = 3600.0
"""Between kernels that are of different epochs: no profile goes on for so long without a kernel."""
_LONGEST_S = 86400.0
"""A kernel may take: longer ones are faults of the clock."""
_SHORTEST_KERNEL_S = 1e-12
"""A kernel takes, if it takes any time: no clock tells less."""

COLUMNS: Mapping[str, str] = {
    "name": "string",
    "stream": "string",
    "start_s": "float64",
    "seconds": "float64",
    "launch_s": "float64",
    "ctas": "Int64",
    "collective": "string",
    "payload_bytes": "float64",
    "group_size": "Int64",
    "group": "string",
    "sequence": "Int64",
    "source_rank": "Int64",
    "destination_rank": "Int64",
    "waited_for_ranks_s": "float64",
    "shape": "string",
}
"""What is known of a kernel, and its type; launch_s, ctas and what is of collectives may be absent. group: which ranks
take part; sequence: the number of the collective in its group, as the profiler tells it; source_rank, destination_rank:
of a message. waited_for_ranks_s: part of a collective's seconds in which another rank had not begun it; NaN where
profiles of other ranks were not read. shape: operator, sizes of its inputs and their type
(`dse_traces.profile.shapes`). payload_bytes: of the largest tensor of a GPU (`dse_traces.profile.payloads`)."""


@dataclass(frozen=True)
class Profile:
    """The kernels of one GPU in order of their starts, and where they come from.

    kernels: a row for each, with `COLUMNS` and `kind` (`dse_traces.profile.kernel_classes`); start_s and launch_s are
    seconds from the first start. dropped: how many events could not be used, by reason. iterations: (start, end) [s] of
    those that were marked. device: name of the GPU, or "". rank: number of the process, as far as the file tells it.
    lost: share of the file that is damaged, in words, or "". assumed: what its rank, and those of others, are taken for
    where files do not tell, in words, or "". begin_s: time of the first start on the clock of its file; clock: name of
    that clock, if other profiles share it, or "".
    """

    kernels: pd.DataFrame
    source: str
    device: str = ""
    dropped: Mapping[str, int] = field(default_factory=dict)
    iterations: Sequence[tuple[float, float]] = ()
    rank: int | None = None
    lost: str = ""
    assumed: str = ""
    begin_s: float = 0.0
    clock: str = ""

    def __len__(self) -> int:
        return len(self.kernels)

    @cached_property
    def start_s(self) -> Floats:
        """Start of each kernel [s; N]."""
        return self.kernels["start_s"].to_numpy(float)

    @cached_property
    def seconds(self) -> Floats:
        """Duration of each kernel [s; N]."""
        return self.kernels["seconds"].to_numpy(float)

    @cached_property
    def end_s(self) -> Floats:
        """End of each kernel [s; N]."""
        return self.start_s + self.seconds

    @property
    def span_s(self) -> float:
        """From the first start to the last end."""
        return float(self.end_s.max() - self.start_s.min())

    @cached_property
    def streams(self) -> NDArray[np.intp]:
        """Stream of each kernel, numbered from 0 in the order in which they are met [N]."""
        return np.asarray(pd.factorize(self.kernels["stream"])[0])

    @cached_property
    def is_collective(self) -> Marks:
        """Kernels that communicate, and copies between GPUs [N]."""
        return np.asarray(self.kernels["kind"].isin(COMMUNICATES))

    @property
    def is_fused(self) -> Marks:
        """Kernels that multiply and communicate in one [N]."""
        return np.asarray(self.kernels["kind"] == FUSED)

    @property
    def has_communication(self) -> Marks:
        """Kernels during which data moves between GPUs: those that communicate, and those that multiply as well [N]."""
        return self.is_collective | self.is_fused

    @cached_property
    def is_peer_copy(self) -> Marks:
        """Copies between GPUs by copy engines, which hold no SM [N]."""
        return np.asarray(self.kernels["kind"] == PEER_COPY)

    @property
    def is_unknown(self) -> Marks:
        """Kernels whose names do not tell what they do; they are taken to compute [N]."""
        return np.asarray(self.kernels["kind"] == OTHER)

    @cached_property
    def is_compute(self) -> Marks:
        """Kernels that compute: they neither communicate nor copy, and are no graphs of unknown kernels [N]."""
        # what is unknown (`OTHER`) counts as computation: most kernels compute
        return np.asarray(~self.kernels["kind"].isin((*COMMUNICATES, GRAPH, *MOVED)))

    @property
    def is_graph(self) -> Marks:
        """CUDA graphs that were recorded as one each, without their kernels [N]."""
        return np.asarray(self.kernels["kind"] == GRAPH)


class KernelRows:
    """Rows of kernels by column, in a tenth of the memory that a dict a row takes; `COLUMNS` may be absent.

    `operator` of a row is the number of the operator that launched it. left_out: how many there were past the first
    `MOST_KERNELS`.
    """

    def __init__(self) -> None:
        # one float64 for each number, and no Python object; whole numbers are exact up to 2**53
        self._numbers = {name: array("d") for name, kind in COLUMNS.items() if kind != "string"}
        self._texts: dict[str, list[str | None]] = {name: [] for name, kind in COLUMNS.items() if kind == "string"}
        self._same: dict[str, str] = {}  # one object for equal texts
        self._operators = array("d")
        self.left_out = 0

    def __len__(self) -> int:
        return len(self._texts["name"])

    def append(self, row: Mapping[str, Any]) -> None:
        """Add a kernel. Raises TypeError, ValueError or OverflowError, and adds nothing, for what is no number."""
        if len(self) >= MOST_KERNELS:
            self.left_out += 1
            return
        # all numbers are read before any column grows, so that columns stay equally long
        numbers = {name: _NAN if (value := row.get(name)) is None else float(value) for name in self._numbers}
        operator = _NAN if (value := row.get("operator")) is None else float(value)
        for name, value in numbers.items():
            self._numbers[name].append(value)
        for name, column in self._texts.items():
            text = row.get(name)
            column.append(None if text is None else self._legal(text))
        self._operators.append(operator)

    def _legal(self, text: str) -> str:
        legal = self._same.get(text)
        if legal is None:
            legal = legal_text(str(text))
            # the shorter text is the key, so that a very long one is not kept alive
            self._same[text if len(text) <= len(legal) else legal] = legal
        return legal

    def name_shapes(self, shapes: Mapping[int, str]) -> None:
        """Give each kernel the shape of the operator that launched it, where it is known."""
        # key == key is false for NaN, which stands for no operator
        self._texts["shape"] = [shapes.get(int(key)) if key == key else None for key in self._operators]

    def replace(self, name: str, values: Mapping[int, float]) -> None:
        """Put in place of each whole number of a column the value that it stands for; NaN where there is none."""
        column = self._numbers[name]
        self._numbers[name] = array("d", (values.get(int(key), _NAN) if key == key else _NAN for key in column))

    def frame(self) -> pd.DataFrame:
        """The table [N, columns]."""
        kinds: Mapping[str, Any] = COLUMNS
        columns = {name: pd.Series(column, dtype=kinds[name]) for name, column in self._texts.items()}
        for name, column in self._numbers.items():
            values = np.array(column)
            # larger values are not whole numbers any more: they are unknown
            if kinds[name] == "Int64":
                values = np.where(np.abs(values) < _EXACT, np.trunc(values), np.nan)
            columns[name] = pd.Series(values).astype(kinds[name])
        return pd.DataFrame({name: columns[name] for name in COLUMNS})


def profile_of(
    rows: Iterable[Mapping[str, Any]] | KernelRows,
    source: str,
    *,
    device: str = "",
    dropped: Mapping[str, int] | None = None,
    iterations: Sequence[tuple[float, float]] = (),
) -> Profile:
    """The profile of kernels in any order, with the columns that are known of each. Raises ConfigError without any.

    Kernels that end before they begin, that have no stream, or that lie hours away from all others, are dropped and
    counted.
    """
    collected = rows if isinstance(rows, KernelRows) else _collect(rows)
    kernels, counts = collected.frame(), Counter(dropped or {})
    counts[f"kernels past the first {MOST_KERNELS:,}"] += collected.left_out
    kernels = _usable(_with_plain_payloads(kernels, counts), counts)
    if kernels.empty:
        losses = "; ".join(f"{count} {reason}" for reason, count in counts.items() if count)
        way = "record it with torch.profiler and ProfilerActivity.CUDA"
        raise ConfigError([Problem("profile", "holds no kernel of a GPU", losses or legal_text(source), way)])
    # all durations 0: a description of a graph, and not a run
    if not float(kernels["seconds"].sum()):
        way = "record it while it runs; what a simulator takes as its input holds no times"
        raise ConfigError([Problem("profile", "holds no kernel that takes any time", legal_text(source), way)])
    # stable: kernels that begin together keep the order of the file, in which they were recorded
    kernels = kernels.sort_values("start_s", kind="stable", ignore_index=True)
    first = float(kernels["start_s"].iloc[0])
    kernels = kernels.assign(start_s=kernels["start_s"] - first, launch_s=kernels["launch_s"] - first)
    marked = tuple((start - first, end - first) for start, end in iterations if _is_span(start, end))
    counts["iterations that end before they begin"] += len(iterations) - len(marked)
    reasons = {reason: count for reason, count in counts.items() if count}
    kernels = kernels.assign(kind=_kinds(kernels, {}))
    return Profile(kernels, legal_text(source), legal_text(device), reasons, marked, begin_s=first)


def classify(profile: Profile, patterns: Patterns) -> Profile:
    """The profile with classes by patterns of a user, which come first."""
    kernels = profile.kernels
    return replace(profile, kernels=kernels.assign(kind=_kinds(kernels, patterns))) if patterns else profile


def _kinds(kernels: pd.DataFrame, patterns: Patterns) -> pd.Series[str]:
    """The class of each kernel [N]; what was recorded as a collective is one, unless it multiplies as well."""
    names = kernels["name"].unique()
    kinds = {name: GRAPH if name.startswith(GRAPH_NAME) else kernel_class(name, patterns) for name in names}
    # classes by distinct names: rules are expressions, and slow
    named = kernels["name"].map(kinds)
    # a profiler that records a collective knows better than a name
    return named.mask(kernels["collective"].notna() & (named != FUSED), COLLECTIVE).astype("string")


def _is_span(start: float, end: float) -> bool:
    return start <= end < float("inf") and start > -float("inf")


def _with_plain_payloads(kernels: pd.DataFrame, counts: Counter[str]) -> pd.DataFrame:
    """The table with unknown sizes in place of those that are not possible, which are counted."""
    # a size of 0 is legal for a payload, and for nothing else
    for name, least in (("payload_bytes", 0), ("group_size", 1), ("ctas", 1)):
        wrong = (kernels[name] < least).fillna(value=False).to_numpy(bool)
        if name == "payload_bytes":
            wrong = wrong | np.isinf(kernels[name].to_numpy(float))
            counts["payloads that are negative or without end"] += int(wrong.sum())
        kernels[name] = kernels[name].mask(wrong)
    return kernels


def _usable(kernels: pd.DataFrame, counts: Counter[str]) -> pd.DataFrame:
    """The kernels that have a stream, and times near those of most others. What is dropped is counted."""
    start, seconds, launch = (kernels[name].to_numpy(float) for name in ("start_s", "seconds", "launch_s"))
    timed = np.isfinite(start) & np.isfinite(seconds) & (seconds >= 0)
    streamless, endless = kernels["stream"].isna().to_numpy(bool), timed & (seconds > _LONGEST_S)
    usable = timed & ~streamless & ~endless
    away = usable.copy()
    # times that are not usable must not shift the epochs of others
    away[usable] = _away(start[usable], start[usable] + seconds[usable])
    # a launch hours before its kernel is of another run with the same number
    late = np.isinf(launch) | (launch > start) | (start - launch > _EPOCH_S)
    for reason, marks in {
        "kernels without a stream": streamless,
        "kernels without a time, or that end before they begin": ~timed,
        "kernels that take more than a day": endless,
        "kernels hours away from all others, as those with a time of 0": away,
        "launches that are later than their kernel": late & ~(away | endless),
    }.items():
        counts[reason] += int(marks.sum())
    seconds = np.where(seconds < _SHORTEST_KERNEL_S, 0.0, seconds)
    kept: pd.DataFrame = kernels.assign(launch_s=np.where(late, np.nan, launch), seconds=seconds)[usable & ~away]
    return kept


def _away(start: Floats, end: Floats) -> Marks:
    """The kernels that begin, or end, more than an hour away from most others [N]."""
    order = np.argsort(start, kind="stable")
    # a new epoch begins after an hour without any begin; the one with most kernels is the run
    epochs = np.cumsum(np.diff(start[order], prepend=start[order[:1]]) > _EPOCH_S)
    if not len(epochs):
        return np.zeros(0, bool)
    away = np.zeros(len(start), bool)
    away[order] = epochs != np.argmax(np.bincount(epochs))
    # a kernel may also end far after all begins of the run: its duration is wrong
    return np.asarray(away | (end > start[~away].max() + _EPOCH_S) & (end - start > _EPOCH_S))


def _collect(rows: Iterable[Mapping[str, Any]]) -> KernelRows:
    kernels = KernelRows()
    for row in rows:
        kernels.append(row)
    return kernels
