"""What the begin of a file tells of its format, and files that stand in place of a profile, or that no reader takes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from dse.errors import ConfigError, Problem
from dse_chakra.packed import DAMAGED, open_packed, packer_of
from dse_traces.readers.csv_rows import csv_rows
from dse_traces.readers.databases import SQLITE, open_database

PACKED = (".gz", ".zip", ".zst", ".xz", ".bz2", ".lz4")
"""Ends of the names of packed files."""
SUFFIXES = (".csv", ".et", ".json", ".sqlite", ".db", ".rpd")
"""Ends of the names of files that are read, without those of packers."""
_DATABASES = (".sqlite", ".db", ".rpd")
_HEAD = 1 << 16  # bytes that tell a format
_TIMES = re.compile(rb"start|begin", re.IGNORECASE)
_COMMANDS = {
    "gzip": "gunzip -k",
    "zip": "unzip",
    "zstd": "unzstd",
    "xz": "unxz -k",
    "bzip2": "bunzip2 -k",
    "lz4": "unlz4",
}
_NO_FILES: Mapping[bytes, tuple[str, str]] = {
    b"version https://git-lfs": ("is a pointer of Git LFS in place of the file", "fetch the file: git lfs pull"),
    b"/annex/objects": ("is a pointer of git-annex in place of the file", "fetch the file: git annex get"),
    b"<!doctype html": ("is a web page", "download the file itself"),
    b"<html": ("is a web page", "download the file itself"),
}
"""Begins of files, in small letters, that stand in place of one."""
_OTHERS: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(
        (".nsys-rep", ".qdrep", ".qdstrm"),
        ("is a report in Nsight Systems' own format", "export it: nsys export --type sqlite {name}"),
    ),
    ".pb": (
        "is a trace of XLA in protocol buffers",
        "read {name}'s neighbour, the .trace.json.gz that JAX writes next to it",
    ),
    ".ncu-rep": ("is a report of Nsight Compute, without a time line", "record it with nsys profile"),
    **dict.fromkeys(
        (".pftrace", ".perfetto-trace"),
        ("is a trace of Perfetto", "write another format: rocprofv3 --output-format json (or csv, or rocpd)"),
    ),
    **dict.fromkeys((".otf2", ".otf"), ("is a trace in OTF2", "write another format: rocprofv3 --output-format json")),
    **dict.fromkeys((".parquet", ".h5", ".hdf"), ("is no profile that is read", "nsys export --type sqlite is read")),
    **dict.fromkeys((".pickle", ".pkl"), ("is a pickle, which is not opened", "name the JSON of the profiler")),
}
"""Ends of names of files that are not read: what they are, and the way out."""


@dataclass(frozen=True)
class Beginning:
    """What is looked at of a file to tell its format; content counts before the name, as many traces are called .txt or
    have no end at all.
    """

    path: Path

    @cached_property
    def suffix(self) -> str:
        """End of the name, without those of packers."""
        return suffix_of(self.path)

    @cached_property
    def head(self) -> bytes:
        """First unpacked bytes. Raises ConfigError."""
        with open_packed(self.path) as (file, _):
            try:
                return file.peek(_HEAD)[:_HEAD]
            # the reader repeats the error, with a message
            except DAMAGED:
                return b""

    @cached_property
    def text(self) -> bytes:
        """The head without what may come before JSON: a byte-order mark, and blanks."""
        return self.head.removeprefix(b"\xef\xbb\xbf").lstrip()

    @property
    def is_sqlite(self) -> bool:
        """True where the first bytes are those of a database."""
        return self.head.startswith(SQLITE)

    @property
    def is_json(self) -> bool:
        """True for an object or a list, but not in a file of Chakra."""
        return not self.is_sqlite and self.text.startswith((b"{", b"[")) and self.suffix != ".et"

    @property
    def is_database(self) -> bool:
        """True for a database by its first bytes, or by its name."""
        return self.is_sqlite or (not self.is_json and self.suffix in _DATABASES)

    @property
    def is_table(self) -> bool:
        """True for a CSV by its name, or for one without a known name that names times in its first line."""
        if self.is_sqlite or self.is_json:
            return False
        first = self.text.partition(b"\n")[0]
        return self.suffix == ".csv" or (
            self.suffix not in SUFFIXES and b"," in first and _TIMES.search(first) is not None
        )

    @cached_property
    def columns(self) -> Sequence[str]:
        """Columns of a table; none of what is no table that can be read."""
        if not self.is_table:
            return ()
        try:
            with csv_rows(self.path, Counter()) as (columns, _):
                return tuple(columns)
        # the reader of tables repeats the error
        except ConfigError:
            return ()

    @cached_property
    def tables(self) -> Collection[str]:
        """Tables of a database; none of what is no database that can be read."""
        if not self.is_database:
            return ()
        try:
            with open_database(self.path) as database:
                return database.tables
        # the reader of databases repeats the error
        except ConfigError:
            return ()


def suffix_of(path: Path) -> str:
    """End of the name of a file in small letters, without those of packers.

    >>> suffix_of(Path("rank0.JSON.gz"))
    '.json'
    """
    name = path.name.lower()
    while name.endswith(PACKED):
        name = name.rpartition(".")[0]
    return Path(name).suffix


def refuse_unreadable(begin: Beginning) -> None:
    """Raise ConfigError for a file that no reader takes, or that stands in place of another one."""
    path = begin.path
    if begin.is_sqlite:
        # SQLite reads at random places, which a packed stream does not allow
        if packer := packer_of(path):
            way = f"unpack it first: {_COMMANDS[packer]} {path.name}"
            raise ConfigError([Problem("profile", f"is a database that is packed by {packer}", str(path), way)])
        return
    if begin.suffix in _OTHERS:
        rule, way = _OTHERS[begin.suffix]
        raise ConfigError([Problem("profile", rule, str(path), way.format(name=path.name))])
    if not path.stat().st_size:
        raise ConfigError([Problem("profile", "is empty", str(path), "record or download it again")])
    for placeholder, (rule, way) in _NO_FILES.items():
        if begin.text[: len(placeholder)].lower() == placeholder:
            raise ConfigError([Problem("profile", rule, str(path), way)])
