"""Tables of `nsys stats --report cuda_gpu_trace --format csv`: a row for each kernel and copy.

Columns: Start and Duration, with their unit in brackets, Strm, Name; perhaps Device, GrdX, GrdY and GrdZ. Lines before
them are passed over. Summaries, such as cuda_gpu_kern_sum, say how long kernels took and not when: they are refused.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from dse.errors import ConfigError, Problem
from dse_traces.profile.kernels import MOST_GPUS, KernelRows, Profile, profile_of
from dse_traces.readers.csv_rows import Row, csv_rows

_UNITS = {
    "ns": 1e-9,
    "nsec": 1e-9,
    "us": 1e-6,
    "usec": 1e-6,
    "µs": 1e-6,
    "ms": 1e-3,
    "msec": 1e-3,
    "s": 1.0,
    "sec": 1.0,
}
# the unit stands in brackets: nsys writes the one that a user chose
_TIMED = re.compile(r"(start|duration)\s*\(([a-zµ]+)\)", re.IGNORECASE)
_SUMMED = re.compile(r"total ?(time|duration)|time ?\(?%|percentage|average|avg ?\(", re.IGNORECASE)
_COPY = re.compile(r"\[cuda (memcpy|memset)\s*([^\]]*)\]", re.IGNORECASE)
_ENDS = {"host": "H", "device": "D", "peer": "P"}
_DEVICE = re.compile(r"(.*?)\s*\((\d+)\)")
_DROPPED = "rows with fields that cannot be read"
_WAY = "nsys stats --report cuda_gpu_trace --format csv writes when each kernel ran (rocprofv3: --kernel-trace)"


def is_nsys_stats(columns: Sequence[str]) -> bool:
    """True for the columns of a table of all kernels, as nsys stats writes it."""
    return {"start", "duration"} <= _time_columns(columns).keys() and "Name" in columns


def _time_columns(columns: Sequence[str]) -> dict[str, tuple[str, float]]:
    """`start` and `duration` -> (column, its unit in seconds)."""
    matches = [(column, match) for column in columns if (match := _TIMED.fullmatch(column.strip()))]
    return {match[1].lower(): (column, _UNITS[match[2].lower()]) for column, match in matches if match[2] in _UNITS}


def refuse_summary(columns: Sequence[str], path: Path) -> None:
    """Raise ConfigError for the columns of a summary by kernel, which holds no times at which kernels began."""
    if any(map(_SUMMED.search, columns)):
        rule = "is a summary: it has how long kernels took, not when, so nothing of what runs concurrently"
        raise ConfigError([Problem("profile", rule, str(path), _WAY)])


def read_nsys_stats(path: Path) -> list[Profile]:
    """The profile of each GPU of a table. Raises ConfigError."""
    by_gpu, dropped = defaultdict[str, KernelRows](KernelRows), Counter[str]()
    with csv_rows(path, dropped) as (columns, rows):
        if "Strm" not in columns:
            raise ConfigError([Problem("profile", "lacks the column Strm, so no stream is known", str(path), _WAY)])
        timed = _time_columns(columns)
        for row in rows:
            device = row.get("Device", "")
            try:
                if device in by_gpu or len(by_gpu) < MOST_GPUS:
                    by_gpu[device].append(_kernel(row, timed))
                else:
                    dropped[f"kernels of GPUs past the first {MOST_GPUS}"] += 1
            except (ValueError, OverflowError):
                dropped[_DROPPED] += 1
    # rows that cannot be read may leave a GPU without any
    gpus = [gpu for gpu in sorted(by_gpu, key=_number) if len(by_gpu[gpu])]
    how: dict[str, Any] = {"dropped": dropped}
    return [profile_of(by_gpu[gpu], path.name, device=_name(gpu), **how) for gpu in gpus or [""]]


def _kernel(row: Row, timed: Mapping[str, tuple[str, float]]) -> dict[str, Any]:
    """The row of a profile. Raises ValueError."""
    # thousands are separated by commas in some locales
    times = {name: float(row[column].replace(",", "")) * unit for name, (column, unit) in timed.items()}
    sides = [row.get(side, "") for side in ("GrdX", "GrdY", "GrdZ")]
    return {
        "name": _kernel_name(row["Name"]),
        "stream": row["Strm"] or None,
        "start_s": times["start"],
        "seconds": times["duration"],
        "ctas": prod(map(int, sides)) if all(sides) else None,
    }


def _kernel_name(text: str) -> str:
    """The name of a kernel; of a copy as profilers of other formats write it.

    >>> _kernel_name("[CUDA memcpy Host-to-Device]"), _kernel_name("[CUDA memset]"), _kernel_name("gemm")
    ('Memcpy HtoD', 'Memset', 'gemm')
    """
    if not (match := _COPY.fullmatch(text.strip())):
        return text or "kernel without a name"
    ends = "to".join(_ENDS.get(end.lower(), end) for end in re.split(r"-to-", match[2], flags=re.IGNORECASE))
    return f"{match[1].capitalize()} {ends}".strip()


def _number(gpu: str) -> tuple[int, str]:
    match = _DEVICE.fullmatch(gpu)
    # the number of the GPU in brackets; without one all rows are of the same GPU
    return (int(match[2][:9]) if match else 0), gpu


def _name(gpu: str) -> str:
    match = _DEVICE.fullmatch(gpu)
    return match[1] if match else gpu
