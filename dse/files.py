"""Reading files that a user names, within limits, and replacing files atomically.

Only plain files of a bounded size are opened: a device has no end and a FIFO has no writer, so the kind of a file is
checked first.
"""

from __future__ import annotations

import csv
import glob
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from difflib import SequenceMatcher
from io import BufferedReader, StringIO
from itertools import islice
from pathlib import Path
from typing import IO

from dse.errors import ConfigError, Problem, Problems, assignment, known_here, nearest, repeated

MOST_BYTES = 1 << 26
"""Of a file that is read into memory."""
MOST_LINE = 1 << 20
"""Characters of one line of a file that is read line by line."""
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
}
_PLAIN = "name a plain file"
_READ_BYTES = 1 << 20
_HEAD_BYTES = 1 << 16
_MARKS = {";": "semicolons", "\t": "tabs"}
_CELL = re.compile(
    r"([-+]?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d{1,3})?)\s*(?:\([^()]*\)|\[[^\[\]]*\])?"
)
_ONE_WORD = 0.75  # likeness from which on two words are one that is misspelt


def files_below(folder: Path, pattern: str) -> list[Path]:
    """Paths below a folder that fit a pattern, sorted; what vanishes or cannot be read meanwhile is left out."""
    return sorted(map(folder.joinpath, glob.iglob(pattern, root_dir=folder)))  # noqa: PTH207 (Path.glob raises)


def irregular(path: Path, most: int = MOST_BYTES) -> str:
    """The rule that a file breaks before it is opened: absent, no plain file, larger than `most` bytes; or ""."""
    try:
        return _broken(path.stat(), most)
    except FileNotFoundError:
        return "is no plain file but a link to nothing" if path.is_symlink() else "is no file"
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        return f"cannot be read: {error}"


def _broken(status: os.stat_result, most: int) -> str:
    if not stat.S_ISREG(status.st_mode):
        return f"is no plain file but {_KINDS.get(stat.S_IFMT(status.st_mode), 'something else')}"
    return f"is larger than {most} bytes" if status.st_size > most else ""


def _nearest_file(path: Path, where: str) -> str:
    """The way out of a file that is not there: the nearest of its folder; "" where there is none."""
    if path.exists():
        return ""
    if "\\" in str(path):
        return "separate folders by /"
    with suppress(OSError, ValueError):
        # a folder may hold millions
        near = nearest(path.name, (file.name for file in islice(path.parent.iterdir(), _MOST_LOOKED_AT)), cutoff=0.75)
        return f"did you mean `{assignment(where, str(path.with_name(near)))}`?" if near else ""
    return ""


_MOST_LOOKED_AT = 1000  # files of a folder


@contextmanager
def open_plain_file(
    path: Path, where: str, *, most: int = MOST_BYTES, way_out: str = _PLAIN
) -> Iterator[BufferedReader]:
    """A plain file of at most `most` bytes. where: the dotted path that names it. Raises ConfigError."""
    rule = irregular(path, most)
    if rule:
        raise ConfigError([Problem(where, rule, str(path), _nearest_file(path, where) or way_out)])
    try:
        # opening a FIFO would wait for its writer; a terminal must not become ours
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError([Problem(where, f"cannot be read: {error}", str(path), way_out)]) from None
    with os.fdopen(handle, "rb") as file:
        if rule := _broken(os.fstat(handle), most):  # another file by now
            raise ConfigError([Problem(where, rule, str(path), way_out)])
        yield file


def read_bytes(path: Path, where: str, *, most: int = MOST_BYTES, way_out: str = _PLAIN) -> bytes:
    """The bytes of a plain file, at most `most` of them. Raises ConfigError."""
    parts, left = list[bytes](), most + 1  # a file of /proc says that it has no bytes
    with open_plain_file(path, where, most=most, way_out=way_out) as file:
        try:
            while left > 0 and (part := file.read(min(left, _READ_BYTES))):
                parts.append(part)
                left -= len(part)
        except OSError as error:
            raise ConfigError([Problem(where, f"cannot be read: {error}", str(path), way_out)]) from None
    if left <= 0:
        raise ConfigError([Problem(where, f"is larger than {most} bytes", str(path), way_out)])
    return b"".join(parts)


def read_text(path: Path, where: str, *, most: int = MOST_BYTES, way_out: str = _PLAIN) -> str:
    """A file's text in UTF-8, without the mark that some programs put before it. Raises ConfigError."""
    try:
        return read_bytes(path, where, most=most, way_out=way_out).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        rule = f"is no text in UTF-8: {error.reason}"
        raise ConfigError([Problem(where, rule, str(path), "save it as UTF-8")]) from None


def lines(file: IO[str], where: str) -> Iterator[str]:
    """The lines of an open text, none of them longer than MOST_LINE. Raises ConfigError."""
    number = 0
    while line := file.readline(MOST_LINE + 1):
        number += 1
        if len(line) > MOST_LINE:
            rule = f"is longer than {MOST_LINE} characters"
            raise ConfigError([Problem(f"{where}, line {number}", rule, way_out="write one request per line")])
        yield line


@dataclass(frozen=True)
class CsvTable:
    """A CSV with a header. columns: their names; header: its line; rows: (line, stripped cells by column) in order.

    A cell that a line does not have is "". Blank rows, and lines that begin with #, are left out.
    """

    columns: tuple[str, ...]
    header: int
    rows: tuple[tuple[int, dict[str, str]], ...]


def read_csv(
    path: Path, where: str = "data", *, needed: Sequence[str] = (), most: int = MOST_BYTES, way_out: str = _PLAIN
) -> CsvTable:
    """Read a CSV that has the columns `needed`. Raises ConfigError that names the file and lines."""
    # the reader of CSV sees line ends inside quotes
    text = StringIO(read_text(path, where, most=most, way_out=way_out), newline="")
    numbered = [(number, line) for number, line in enumerate(text, 1) if not line.startswith("#")]
    reader, check = csv.reader([line for _, line in numbered], strict=True), Problems()
    numbers = [1, *[number for number, _ in numbered]]  # of the lines that the reader counts
    try:
        columns = [name.strip() for name in next(reader, [])]
        header = numbers[reader.line_num]
        check_columns(check, columns, needed, f"{path.name}, line {header}")
        check.done()
        rows = list[tuple[int, dict[str, str]]]()
        for cells in reader:
            line, stripped = numbers[reader.line_num], list(map(str.strip, cells))
            if len(cells) > len(columns):
                check.add(f"{path.name}, line {line}", f"has {len(cells)} cells for {len(columns)} columns")
            elif any(stripped):
                padded = [*stripped, *[""] * (len(columns) - len(cells))]
                rows.append((line, dict(zip(columns, padded, strict=True))))
    except csv.Error as error:
        raise ConfigError([Problem(f"{path.name}, line {numbers[reader.line_num]}", f"is no CSV: {error}")]) from None
    check.done(path.name)
    return CsvTable(tuple(columns), header, tuple(rows))


def cell_number(cells: Mapping[str, str], column: str, where: str = "data") -> float:
    """Number of a cell of a measured table: of `31357 (29925)`, `1,088` and `742[^2]` that before the brackets.

    Raises ConfigError that names the column for a cell without a number, or with more text.

    >>> cell_number({"tokens": "31,357 (29925)"}, "tokens")
    31357.0
    """
    text = cells.get(column, "")
    match = _CELL.fullmatch(text.strip())
    number = float(match[1].replace(",", "")) if match is not None and match[1] else math.inf
    if not math.isfinite(number):
        rule = "is no number, with nothing but a note in brackets behind it"
        raise ConfigError([Problem(f"{where}: {column}", rule, text[:40], "mend the cell, or leave out the row")])
    return number


def csv_columns(path: Path, where: str) -> tuple[str, ...]:
    """Columns of a file that may be a CSV, from its first bytes. Raises ConfigError for a file that cannot be read."""
    with open_plain_file(path, where) as file:
        head = file.read(_HEAD_BYTES).decode("utf-8-sig", errors="replace").splitlines()
    try:
        return tuple(name.strip() for name in next(csv.reader(line for line in head if not line.startswith("#")), []))
    except csv.Error:
        return ()


def check_columns(check: Problems, columns: Sequence[str], needed: Sequence[str], where: str) -> None:
    """Note columns that a table needs and does not have, and those that it names twice."""
    missing = [name for name in needed if name not in columns]
    if missing:
        others = [column for column in columns if column not in needed]
        near = [(nearest(name, [other for other in others if _is_misspelt(other, name)]), name) for name in missing]
        way = "; ".join(f"rename `{old}`: {name}" for old, name in near if old)
        if not any(columns) or all(re.fullmatch(r"[\d.]*", name) for name in columns):
            way = f"its first line names the columns: {','.join(needed)}"
        elif len(columns) == 1 and (mark := re.search(r"[;\t]| \w", columns[0])):
            way = f"separate columns by commas, not {_MARKS.get(mark[0], 'blanks')}"
        check.add(where, f"has no column {', '.join(missing)}", way_out=way or known_here(columns))
    for name in repeated(columns):
        check.add(where, "names a column twice", value=name, way_out="remove one of them")


def _is_misspelt(column: str, name: str) -> bool:
    """Tell whether a column is one of this name, written differently: another word is another meaning.

    >>> _is_misspelt("Input Token", "input_tokens"), _is_misspelt("Total tokens", "output_tokens")
    (True, False)
    """
    apart = (re.sub(r"(?<=[a-z])(?=[A-Z])", " ", text) for text in (column, name))
    words, wanted = (re.findall(r"[a-z]+|\d+", text.lower()) for text in apart)
    return len(words) == len(wanted) and all(map(_is_one_word, words, wanted))


def _is_one_word(one: str, other: str) -> bool:
    return one == other or SequenceMatcher(None, one, other).ratio() >= _ONE_WORD


@contextmanager
def atomic_replacement(path: Path) -> Iterator[Path]:
    """A file to write in place of `path`, which it becomes when it is whole: until then the old one stays."""
    for left in path.parent.glob(f".{path.name}.*"):
        if not Path("/proc", left.name.rpartition(".")[2]).exists():  # its writer was killed
            left.unlink(missing_ok=True)
    # next to it, as only a file of the same file system can replace it
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)  # what somebody put there may be a link
    try:
        yield fresh
        fresh.replace(path)
    except OSError as error:
        if error.errno is not None and error.filename is None:  # a write names no file
            error.filename = str(path)
        raise
    finally:
        fresh.unlink(missing_ok=True)


def path_inside(folder: Path, name: str) -> Path:
    """The path of a file of this name in a folder. Raises ConfigError for a name that leads elsewhere."""
    if "/" in name or "\0" in name or name in ("", ".", ".."):
        raise ConfigError([Problem(str(folder), "cannot hold a file of this name", name, "give it a plain name")])
    return folder / name
