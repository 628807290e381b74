"""The CSV of the example tuner plug-in of NCCL and RCCL: its rows, how the plug-in reads them, and which it applies.

The plug-in (names and versions in `conf/data/library_files.yaml`) skips lines that begin with `#`, empty ones, and
those with fewer than eight columns, without a word. It trims blanks, takes -1 for "any", and reads a name that it does
not know as all-reduce, ring or Simple. It applies the first row that matches a collective and whose algorithm and
protocol the library can use there, and passes over rows whose pair it cannot use. Here a name that is not known is
refused, and what the plug-in skips is told.
"""

from __future__ import annotations

import itertools
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from dse.config.options import load_yaml
from dse.errors import Problems, did_you_mean
from dse.values import Frozen

ANY = -1
"""A number that matches every other one, or leaves the library's own."""
MOST_BYTES = 2**64 - 1
"""The largest size of a message that a `size_t` holds."""
_SIZES, _MATCHED = ("min_bytes", "max_bytes"), ("nNodes", "nRanks", "numPipeOps", "regBuff")
_NUMBER = re.compile(r"[+-]?[0-9]+")


class Reach(Frozen):
    """Protocols and collectives that an algorithm has, and the least number of nodes that it is for."""

    protocols: tuple[str, ...]
    collectives: tuple[str, ...]
    nodes: int = 1


class TunerLibrary(Frozen):
    """A library that reads the file. gpus: vendor of the GPUs that it is for.

    unset_channels: that the plug-in leaves where no row sets them; 0: its own.
    """

    gpus: Literal["nvidia", "amd"]
    most_channels: int
    unset_channels: int
    provenance: str
    source: str


class TunerFormat(Frozen):
    """The published format; see `conf/data/library_files.yaml`."""

    provenance: str
    source: str
    columns: tuple[str, ...]
    required: int
    amd: tuple[str, ...]
    line_bytes: int
    first_bytes: int
    last_bytes: int
    collectives: Mapping[str, str | None]
    unmodelled: tuple[str, ...]
    protocols: tuple[str, ...]
    by: Mapping[str, Reach]
    libraries: Mapping[str, TunerLibrary]

    def library_of(self, gpu: str) -> str:
        """The library of a GPU by its name."""
        vendor = "amd" if gpu.startswith(self.amd) else "nvidia"
        return next(name for name, library in self.libraries.items() if library.gpus == vendor)

    @property
    def names(self) -> Mapping[str, Sequence[str]]:
        """Column -> the names that it may have."""
        types = [name for name in self.collectives.values() if name is not None]
        return {"collective_type": [*types, *self.unmodelled], "algorithm": list(self.by), "protocol": self.protocols}


@cache
def library_files() -> Mapping[str, Any]:
    """The table of formats."""
    table: Mapping[str, Any] = load_yaml(Path(__file__).with_name("conf") / "data" / "library_files.yaml")
    return table


@cache
def tuner_format() -> TunerFormat:
    """The format of the tuner's file. Raises ConfigError."""
    check = Problems()
    form = check.model(TunerFormat, library_files()["tuner"], path="library_files.tuner")
    check.done()
    assert form is not None
    return form


@dataclass(frozen=True)
class TunerCall:
    """A collective as NCCL asks its tuner. size: the larger of the bytes that a GPU sends and receives."""

    collective: str
    size: int
    nodes: int
    ranks: int
    pipe_ops: int = 1
    registered: int = 0


@dataclass(frozen=True)
class TunerRow:
    """A row of the file: an algorithm, a protocol and channels for messages of low to high bytes, both included.

    nodes, ranks, pipe_ops and registered match any number where they are -1; channels of -1 leave the library's own.
    line: of the file, from 1; 0 for a row that was not read.
    """

    collective: str
    low: int
    high: int
    algorithm: str
    protocol: str
    channels: int = ANY
    nodes: int = ANY
    ranks: int = ANY
    pipe_ops: int = ANY
    registered: int = ANY
    line: int = 0

    @property
    def values(self) -> tuple[str | int, ...]:
        """The columns in their order."""
        name = (self.collective, self.low, self.high, self.algorithm, self.protocol, self.channels)
        return (*name, *self.numbers)

    @property
    def numbers(self) -> tuple[int, int, int, int]:
        """Numbers of nodes, ranks, pipelined operations and registered buffers that it matches."""
        return self.nodes, self.ranks, self.pipe_ops, self.registered

    @property
    def tree(self) -> dict[str, str | int]:
        """What the row sets, by name."""
        return {"algorithm": self.algorithm, "protocol": self.protocol, "channels": self.channels}

    def matches(self, call: TunerCall) -> bool:
        """Tell whether the plug-in finds the row for a collective."""
        numbers = (call.nodes, call.ranks, call.pipe_ops, call.registered)
        alike = all(own in (ANY, number) for own, number in zip(self.numbers, numbers, strict=True))
        return alike and call.collective == self.collective and self.low <= call.size <= self.high

    def is_usable(self, call: TunerCall) -> bool:
        """Tell whether the library has the row's algorithm and protocol for a collective."""
        reach = tuner_format().by[self.algorithm]
        return self.protocol in reach.protocols and call.collective in reach.collectives and call.nodes >= reach.nodes


@dataclass(frozen=True)
class TunerFile:
    """Rows of a file in its order. skipped: what the plug-in skips or reads as something else, in words."""

    rows: tuple[TunerRow, ...]
    skipped: tuple[str, ...] = ()

    def row_for(self, call: TunerCall) -> TunerRow | None:
        """The row that the plug-in applies to a collective; None where it has none."""
        return next((row for row in self.rows if row.matches(call) and row.is_usable(call)), None)


def tuner_text(rows: Sequence[TunerRow], notes: Sequence[str] = ()) -> str:
    """Text of the file. notes: lines of comment above the rows, cut where a line of the plug-in ends."""
    form = tuner_format()
    most = form.line_bytes - 4  # the mark, a blank, the newline and the terminator of C
    comments = [part for note in (*notes, ",".join(form.columns)) for part in _wrapped(note, most)]
    lines = [*(f"# {comment}" for comment in comments), *(",".join(map(str, row.values)) for row in rows)]
    return "".join(f"{line}\n" for line in lines)


def _wrapped(note: str, most: int) -> Iterator[str]:
    """Yield the lines of a note; a word of more bytes than a line has is cut between characters."""
    line = ""
    for word in itertools.chain.from_iterable(_pieces(text, most) for text in note.split()):
        if line and len(f"{line} {word}".encode()) > most:
            yield line
            line = word
        else:
            line = f"{line} {word}" if line else word
    yield line


def _pieces(word: str, most: int) -> Iterator[str]:
    piece = ""
    for letter in word:
        if len(f"{piece}{letter}".encode()) > most:
            yield piece
            piece = ""
        piece += letter
    yield piece


def read_tuner(text: str, name: str, library: str) -> TunerFile:
    """Rows of a text as the plug-in reads them. name: of the file, in messages. library: nccl or rccl.

    Raises ConfigError with the file, the line and the rule for each name, number or range that the plug-in would read
    as something else than what is written, and for rows that no collective would reach.
    """
    check, rows, skipped = Problems(), list[TunerRow](), list[str]()
    reader = _LineReader(name, tuner_format(), tuner_format().libraries[library], check)
    for place, line in enumerate(text.split("\n"), 1):
        if not reader.fits(place, line) or not line or line.startswith("#"):
            continue
        note = reader.skipped(place, line)
        if note:
            skipped.append(note)
        if not note or reader.is_read(line):
            rows.extend(row for row in [reader.row(place, line)] if row is not None)
        skipped.extend(_unused(name, row) for row in rows[-1:] if row.line == place and not _is_ever_usable(row))
    for row, rule in _unreachable(rows):
        check.add(f"{name}:{row.line}", rule, value=",".join(map(str, row.values)), way_out="remove one of the rows")
    check.done(name)
    return TunerFile(tuple(rows), tuple(skipped))


@dataclass(frozen=True)
class _LineReader:
    """Reading of lines. name: of the file. check: takes the problems."""

    name: str
    form: TunerFormat
    library: TunerLibrary
    check: Problems

    def fits(self, place: int, line: str) -> bool:
        """Tell whether the C plug-in reads a line at once; note one of which it would take the end for another."""
        size, most = len(line.encode()), self.form.line_bytes
        if size >= most:
            rule = f"has {size} bytes, of which the plug-in reads {most - 1} as one line"
            self.check.add(f"{self.name}:{place}", rule, way_out="shorten it")
        return size < most

    def columns(self, line: str) -> list[str]:
        """Columns of a line without blanks around them; a last one that is empty is none."""
        parts = [part.strip(" \t\r") for part in line.split(",")]
        return parts[:-1] if not parts[-1] else parts

    def skipped(self, place: int, line: str) -> str:
        """What the plug-in does with a line that is no row, in words; "" for a row."""
        columns, at = self.columns(line), f"{self.name}:{place}"
        if line.lstrip(" \t\r").startswith("#"):
            return f"{at} is no comment to the plug-in, as it does not begin with #; it has too few columns for a row"
        if columns and columns[0] == self.form.columns[0]:
            return f"{at} is a header, which the plug-in reads as a row of an all-reduce on 0 nodes, which none is"
        if len(columns) < self.form.required:
            return f"{at} has {len(columns)} columns, and the plug-in skips rows of fewer than {self.form.required}"
        if len(columns) > len(self.form.columns):
            most = len(self.form.columns)
            return f"{at} has {len(columns)} columns: plug-ins in C read the first {most}, those in C++ skip the row"
        return ""

    def is_read(self, line: str) -> bool:
        """Tell whether a line that has a note is a row all the same: one with too many columns."""
        return len(self.columns(line)) > len(self.form.columns)

    def row(self, place: int, line: str) -> TunerRow | None:
        """The row of a line; None, with the problems noted, where it has none."""
        columns = self.columns(line)[: len(self.form.columns)]
        texts = dict(zip(self.form.columns, columns, strict=False))
        before = len(self.check.found)
        for column, names in self.form.names.items():
            if texts[column] not in names:
                self._add(place, column, texts[column], _UNKNOWN[column], did_you_mean(texts[column], names))
        numbers = {name: self._number(place, name, text) for name, text in texts.items() if name not in self.form.names}
        if len(self.check.found) == before:
            self._check_numbers(place, numbers)
        if len(self.check.found) > before:
            return None
        low, high = (numbers[name] for name in _SIZES)
        nodes, ranks, pipe_ops, registered = (numbers.get(name, ANY) for name in _MATCHED)
        collective, algorithm, protocol = (texts[name] for name in self.form.names)
        way = algorithm, protocol, numbers["channels"]
        return TunerRow(collective, low, high, *way, nodes, ranks, pipe_ops, registered, line=place)

    def _number(self, place: int, column: str, text: str) -> int:
        if _NUMBER.fullmatch(text):
            return int(text)
        self._add(place, column, text, "is no whole number: it is read up to its first other character", "write digits")
        return ANY

    def _check_numbers(self, place: int, numbers: Mapping[str, int]) -> None:
        low, high = (numbers[name] for name in _SIZES)
        for name in _SIZES:
            if not 0 <= numbers[name] <= MOST_BYTES:
                self._add(place, name, numbers[name], f"is no size from 0 to {MOST_BYTES} bytes", "0 is the least")
        if low > high:
            self._add(place, "max_bytes", high, f"is less than min_bytes = {low}: no message matches", "exchange them")
        most = self.library.most_channels
        if numbers["channels"] != ANY and not 1 <= numbers["channels"] <= most:
            self._add(place, "channels", numbers["channels"], f"is neither -1 nor from 1 to {most}", "-1: its own")
        for name in ("nNodes", "nRanks", "numPipeOps"):
            if numbers.get(name, ANY) != ANY and numbers[name] < 1:
                self._add(place, name, numbers[name], "is neither -1 nor at least 1", "-1 matches any")
        if numbers.get("regBuff", ANY) not in (ANY, 0, 1):
            self._add(place, "regBuff", numbers["regBuff"], "is not -1, 0 or 1", "-1 matches any")
        nodes, ranks = numbers["nNodes"], numbers["nRanks"]
        if ANY not in (nodes, ranks) and 1 <= ranks < nodes:
            self._add(place, "nRanks", ranks, f"is less than nNodes = {nodes}", "each node has a rank at least")

    def _add(self, place: int, column: str, value: object, rule: str, way: str) -> None:
        self.check.add(f"{self.name}:{place}.{column}", rule, value=value, way_out=way)


_UNKNOWN = {
    "collective_type": "is no collective of the plug-in, which reads it as allreduce",
    "algorithm": "is no algorithm of the plug-in, which reads it as ring",
    "protocol": "is no protocol of the plug-in, which reads it as simple",
}


def _unreachable(rows: Sequence[TunerRow]) -> Iterator[tuple[TunerRow, str]]:
    """Yield rows that overlap an earlier one of the same numbers, or that an earlier one covers, with the rule."""
    groups: dict[tuple[str, tuple[int, ...]], list[TunerRow]] = {}
    for row in sorted(rows, key=lambda row: row.low):
        groups.setdefault((row.collective, row.numbers), []).append(row)
    for alike in groups.values():
        widest = alike[0]
        for row in alike[1:]:
            if row.low <= widest.high:
                first, second = sorted((row, widest), key=lambda row: row.line)
                span = f"{first.low} to {first.high} bytes"
                yield second, f"overlaps line {first.line}, {span}, which is applied first"
            widest = max(row, widest, key=lambda row: row.high)
    lows = {key: [row.low for row in alike] for key, alike in groups.items()}
    for row in rows:
        for key in _wider(row):
            place = bisect_right(lows.get(key, ()), row.low) - 1
            cover = groups[key][place] if place >= 0 else None
            if cover is not None and cover.line < row.line and row.high <= cover.high and _is_usable_for(cover, row):
                yield row, f"is never applied, as line {cover.line} matches all that it does"
                break


def _wider(row: TunerRow) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the kinds of rows that match all that a row does, and more."""
    for numbers in itertools.product(*({ANY, number} for number in row.numbers)):
        if numbers != row.numbers:
            yield row.collective, numbers


def _is_usable_for(earlier: TunerRow, row: TunerRow) -> bool:
    # the plug-in passes over a pair that the library cannot use, and comes to the later row
    return earlier.is_usable(TunerCall(row.collective, row.low, max(row.nodes, 1), max(row.ranks, 1)))


def _is_ever_usable(row: TunerRow) -> bool:
    reach = tuner_format().by[row.algorithm]
    return row.is_usable(TunerCall(row.collective, row.low, reach.nodes if row.nodes == ANY else row.nodes, row.ranks))


def _unused(name: str, row: TunerRow) -> str:
    pair = f"{row.algorithm} and {row.protocol}"
    return (
        f"{name}:{row.line} has no effect: the library has no {row.collective} by {pair} there, and passes over the row"
    )
