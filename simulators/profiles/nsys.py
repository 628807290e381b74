"""Profiles of Nsight Systems, as `nsys export --type sqlite` writes them.

Of the tables CUPTI_ACTIVITY_KIND_KERNEL, _MEMCPY and _MEMSET these are read: start, end [ns], deviceId, streamId,
correlationId, globalPid, the grid, and names by StringIds; of CUPTI_ACTIVITY_KIND_RUNTIME the start of the launch with
the same correlationId in the same process; of TARGET_INFO_GPU the name of the GPU; of NVTX_EVENTS iterations
(`ProfilerStep#`, `iteration`, `step`). Columns differ between versions: those that are absent are unknown. Payloads of
collectives are not recorded.

The file is opened read-only, and only rows of plain tables are read: no views, no computed columns, no extensions.
"""

from __future__ import annotations

import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from dse.errors import ConfigError, Problem
from dse.files import MOST_STREAMED, open_plain_file
from simulators.profiles.iterations import is_iteration
from simulators.profiles.profile import KernelRows, Profile, profile_of

_NS = 1e-9
_DAMAGED = (sqlite3.Error, UnicodeDecodeError)  # the second by damaged text in a message of the first
_WAY = "name a file that `nsys export --type sqlite` wrote"
_KERNELS, _RUNTIME = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME"
_RAN = (_KERNELS, "CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET")
_NAMES = ("demangledName", "shortName", "name")
_COPIES = {1: "HtoD", 2: "DtoH", 8: "DtoD", 9: "HtoH", 10: "PtoP"}
"""`copyKind`, as CUPTI numbers it (CUpti_ActivityMemcpyKind)."""
_BETWEEN_GPUS = ("Memcpy PtoP",)
_PROCESS = 24  # bits of a thread in `globalTid`
_MOST_TEXT = 1 << 20  # bytes of a cell
_DROPPED = "rows with fields that cannot be read"


def read_nsys(path: Path) -> list[Profile]:
    """The profile of each GPU of each process, most kernels first. Raises ConfigError where the file is no such export.

    A damaged database is used as far as it goes.
    """
    with open_plain_file(path, "profile", most=MOST_STREAMED, way_out=_WAY):
        pass  # a plain file, and not too large
    place = f"file:{quote(str(path.absolute()))}?mode=ro&immutable=1"
    try:
        with closing(sqlite3.connect(place, uri=True)) as connection:
            return _Export(connection, path, Counter()).profiles()
    except _DAMAGED as error:
        raise ConfigError([Problem("profile", f"is no SQLite database: {error}", str(path), _WAY)]) from None


@dataclass
class _Export:
    """An open export, and what was dropped of it."""

    connection: sqlite3.Connection
    path: Path
    dropped: Counter[str]

    def __post_init__(self) -> None:
        self.connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MOST_TEXT)
        self.connection.text_factory = lambda text: text.decode("utf-8", errors="replace")
        for pragma in ("trusted_schema = off", "cell_size_check = on", "query_only = on", "temp_store = file"):
            self.connection.execute(f"PRAGMA {pragma}")

    def profiles(self) -> list[Profile]:
        """The profiles of all GPUs. Raises ConfigError, and sqlite3.Error for a file that is no database."""
        plain = "SELECT name FROM sqlite_master WHERE type = 'table' AND rootpage > 0"
        tables = {str(name) for (name,) in self.connection.execute(plain)}
        if _KERNELS not in tables:
            rule = f"is no export of nsys with kernels of a GPU: it has no table {_KERNELS}"
            raise ConfigError([Problem("profile", rule, str(self.path), _WAY)])
        launches = self._launches() if _RUNTIME in tables else {}
        by_gpu = defaultdict[tuple[int, int], KernelRows](KernelRows)
        for table in (name for name in _RAN if name in tables):
            for gpu, row in self._rows(table, launches, texts="StringIds" in tables):
                by_gpu[gpu].append(row)
        names = self._devices(tables)
        iterations = self._iterations(tables)
        return self._of_each(by_gpu, names, iterations)

    def _of_each(
        self,
        by_gpu: Mapping[tuple[int, int], KernelRows],
        names: Sequence[str],
        iterations: Sequence[tuple[int, float, float]],
    ) -> list[Profile]:
        """The profile of each GPU, most kernels first; the last one without any tells why. Raises ConfigError."""
        if not by_gpu:
            return [profile_of([], self.path.name, dropped=self.dropped)]
        profiles = []
        for process, device in sorted(by_gpu, key=lambda gpu: (-len(by_gpu[gpu]), gpu)):
            marked = [(start, end) for at, start, end in iterations if at == process or process < 0 or at < 0]
            name = names[device] if 0 <= device < len(names) else ""
            how: dict[str, Any] = {"device": name, "dropped": self.dropped, "iterations": sorted(set(marked))}
            profiles.append(profile_of(by_gpu[process, device], self.path.name, **how))
        return profiles

    def _columns(self, table: str) -> set[str]:
        return {str(row[1]) for row in self.connection.execute(f"PRAGMA table_info({table})")}

    def _select(self, table: str, wanted: Mapping[str, str], rest: str = "") -> Iterator[Mapping[str, Any]]:
        """Yield rows of a table. wanted: name in the row -> expression, or "" where the table lacks it."""
        chosen = {name: expression for name, expression in wanted.items() if expression}
        text = f"SELECT {', '.join(chosen.values())} FROM {table} AS t {rest}"
        absent = dict.fromkeys(wanted)
        try:
            for row in self.connection.execute(text):
                yield absent | dict(zip(chosen, row, strict=True))
        except _DAMAGED:
            self.dropped[f"the rest of the table {table}, which is damaged"] += 1

    def _launches(self) -> dict[tuple[int, int], float]:
        """When each launch began [s], by process and correlation."""
        launches = {}
        for row in self._select(_RUNTIME, self._plain(_RUNTIME, ("start", "correlationId", "globalTid"))):
            try:
                launches[_process(row["globalTid"]), int(row["correlationId"])] = int(row["start"]) * _NS
            except (TypeError, ValueError):
                self.dropped[_DROPPED] += 1
        return launches

    def _plain(self, table: str, names: Sequence[str]) -> dict[str, str]:
        columns = self._columns(table)
        return {name: f't."{name}"' if name in columns else "" for name in names}

    def _rows(
        self, table: str, launches: Mapping[tuple[int, int], float], *, texts: bool
    ) -> Iterator[tuple[tuple[int, int], Mapping[str, Any]]]:
        """Yield (process, device) and the row of a profile, for each row of a table."""
        fields = ("start", "end", "deviceId", "streamId", "correlationId", "globalPid", "gridX", "gridY", "gridZ")
        wanted = self._plain(table, (*fields, "copyKind", "bytes", "srcDeviceId", "dstDeviceId"))
        named = next((name for name in _NAMES if name in self._columns(table)), "")
        joined = f'LEFT JOIN StringIds AS s ON s.id = t."{named}"' if named and texts else ""
        wanted["text"] = f'COALESCE(s.value, t."{named}")' if joined else self._plain(table, [named])[named]
        for row in self._select(table, wanted, joined):
            try:
                yield self._row(table, row, launches)
            except (TypeError, ValueError, OverflowError):
                self.dropped[_DROPPED] += 1

    def _row(
        self, table: str, row: Mapping[str, Any], launches: Mapping[tuple[int, int], float]
    ) -> tuple[tuple[int, int], Mapping[str, Any]]:
        """A row of a profile. Raises TypeError, ValueError or OverflowError for fields that cannot be read."""
        process, start = _process(row["globalPid"]), int(row["start"])
        grid, launch = [row[f"grid{side}"] for side in "XYZ"], None
        if row["correlationId"] is not None:
            correlation = int(row["correlationId"])
            launch = launches.get((process, correlation), launches.get((-1, correlation)))
        copy = "Memset" if table.endswith("MEMSET") else _copy_name(row)
        return (process, int(row["deviceId"] or 0)), {
            "name": str(row["text"] or "kernel without a name") if table == _KERNELS else copy,
            "stream": None if row["streamId"] is None else str(row["streamId"]),
            "start_s": start * _NS,
            "seconds": (int(row["end"]) - start) * _NS,
            "launch_s": launch,
            "ctas": None if None in grid else int(grid[0]) * int(grid[1]) * int(grid[2]),
            "payload_bytes": None if table == _KERNELS or copy not in _BETWEEN_GPUS else row["bytes"],
        }

    def _devices(self, tables: set[str]) -> list[str]:
        """Names of GPUs, by number."""
        if "TARGET_INFO_GPU" not in tables or "name" not in self._columns("TARGET_INFO_GPU"):
            return []
        return [str(row["name"]) for row in self._select("TARGET_INFO_GPU", {"name": "t.name"}, "LIMIT 1024")]

    def _iterations(self, tables: set[str]) -> list[tuple[int, float, float]]:
        """(process, start, end) [s] of ranges that are called as iterations are."""
        if "NVTX_EVENTS" not in tables:
            return []
        wanted = self._plain("NVTX_EVENTS", ("start", "end", "text", "textId", "globalTid"))
        joined = ""
        if wanted["textId"] and "StringIds" in tables:
            joined = "LEFT JOIN StringIds AS s ON s.id = t.textId"
            wanted["text"] = f"COALESCE({wanted['text'] or 'NULL'}, s.value)"
        marked = []
        for row in self._select("NVTX_EVENTS", wanted, joined):
            if row["end"] is None or not is_iteration(str(row["text"])):
                continue
            try:
                marked.append((_process(row["globalTid"]), int(row["start"]) * _NS, int(row["end"]) * _NS))
            except (TypeError, ValueError):
                self.dropped[_DROPPED] += 1
        return marked


def _copy_name(row: Mapping[str, Any]) -> str:
    """The name of a copy; one whose ends are different GPUs is one between GPUs, whatever its kind says."""
    ends = row["srcDeviceId"], row["dstDeviceId"]
    between = row["copyKind"] == 8 and None not in ends and ends[0] != ends[1]
    return f"Memcpy {'PtoP' if between else _COPIES.get(row['copyKind'], '')}".strip()


def _process(number: Any) -> int:
    """The process of a `globalPid` or `globalTid`; -1 where it is not recorded."""
    return -1 if number is None else int(number) >> _PROCESS
