"""Databases (SQLite) of profilers, read table by table and row by row.

The file is opened read-only, and only plain columns of plain tables are read: no views, no computed columns, no joins,
no extensions. What is damaged of a table is passed over, and counted.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from dse.errors import ConfigError, Problem
from dse.files import open_plain_file
from dse_chakra.packed import MOST_STREAMED

SQLITE = b"SQLite format 3\0"
"""First bytes of a database."""
WAY_OUT = "name a file that `nsys export --type sqlite`, or rocprofv3, wrote"
_DAMAGED = (sqlite3.Error, UnicodeDecodeError)  # the second by damaged text in a message of the first
_MOST_CELL = 1 << 20  # bytes
_MOST_ATTEMPTS = 1000  # to go on behind damage
_MOST_CHARACTERS = 1 << 28  # of all texts of a table
_FIRST, _LAST = -(1 << 63), (1 << 63) - 1


@contextmanager
def open_database(path: Path) -> Iterator[Database]:
    """The database in a file. Raises ConfigError, also where what is read turns out to be none."""
    # opened once to be checked: pipes, devices and huge files are refused before SQLite sees them
    with open_plain_file(path, "profile", most=MOST_STREAMED, way_out=WAY_OUT):
        pass  # a plain file, and not too large
    # immutable: no journal is looked for, and no lock is taken on a file of somebody else
    place = f"file:{quote(str(path.absolute()))}?mode=ro&immutable=1"
    try:
        with closing(sqlite3.connect(place, uri=True)) as connection:
            yield Database(connection, path)
    except _DAMAGED as error:
        raise ConfigError([Problem("profile", f"is no SQLite database: {error}", str(path), WAY_OUT)]) from None


class Database:
    """An open database, and what was dropped of it: by reason; rows that were read, and that damage cost."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self.path, self.dropped = path, Counter[str]()
        self.rows = self.lost_rows = 0
        self._connection = connection
        # a damaged length must not allocate gigabytes
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MOST_CELL)
        # names of kernels are not always UTF-8
        connection.text_factory = lambda text: text.decode("utf-8", errors="replace")
        # a hostile schema must not run functions, and damaged cells are found early
        for pragma in ("trusted_schema = off", "cell_size_check = on", "query_only = on", "temp_store = file"):
            connection.execute(f"PRAGMA {pragma}")
        # virtual tables have no root page: their modules would run code
        plain = "SELECT name FROM sqlite_master WHERE type = 'table' AND rootpage > 0"
        self.tables = {str(name) for (name,) in connection.execute(plain)}

    @property
    def lost(self) -> str:
        """The share of rows that damage cost, in words; "" for none."""
        if not self.lost_rows:
            return ""
        share = 100 * self.lost_rows / (self.rows + self.lost_rows)
        return f"{share:.2g} % of the file, {self.lost_rows:,} rows in damaged parts"

    def columns(self, table: str) -> set[str]:
        """Columns of a table that are stored; none where there is no such table."""
        if table not in self.tables:
            return set()
        return {str(row[1]) for row in self._connection.execute(f"PRAGMA table_info({_quote(table)})")}

    def select(self, table: str, names: Sequence[str]) -> Iterator[Mapping[str, Any]]:
        """Yield the rows of a table in their order; None for columns that it lacks. Damaged rows are passed over."""
        columns = self.columns(table)
        there = [name for name in names if name in columns]
        absent = dict.fromkeys(names)
        for values in self._rows(table, ", ".join(map(_quote, there)) or "NULL"):
            yield absent | dict(zip(there, values, strict=False))

    def _rows(self, table: str, chosen: str) -> Iterator[tuple[Any, ...]]:
        """Yield rows of a table. Behind damage reading goes on a row later, then two, four and so on."""
        try:
            self._connection.execute(f"SELECT rowid FROM {_quote(table)} LIMIT 0")
        except _DAMAGED:  # WITHOUT ROWID
            yield from self._plain_rows(table, f"SELECT {chosen} FROM {_quote(table)}")
            return
        # by rowid, so that reading can go on behind a damaged page
        text = f"SELECT rowid, {chosen} FROM {_quote(table)} WHERE rowid > ? ORDER BY rowid"
        last, step, attempts, since = _FIRST, 1, 0, 0
        while attempts < _MOST_ATTEMPTS and last < _LAST:
            try:
                for number, *values in self._connection.execute(text, (last,)):
                    # a damaged index may lead in a circle
                    if number <= last:
                        raise sqlite3.DatabaseError
                    # rows between the last good one and this one are lost; rowids of most tables are in a row
                    self._note_damage(table, min(number - since - 1, 1 << 40) if attempts and step > 1 else 0)
                    last, since, step, self.rows = number, number, 1, self.rows + 1
                    yield tuple(values)
            except _DAMAGED:
                # the step doubles: a damaged page is left after few attempts
                last, step, attempts = min(max(last, -1) + step, _LAST), 2 * step, attempts + 1
                continue
            break
        # reading ended in damage: what is behind the last good row is lost
        if step > 1:
            self._note_damage(table, max(self._count(table) - since, 1))

    def _plain_rows(self, table: str, text: str) -> Iterator[tuple[Any, ...]]:
        try:
            for row in self._connection.execute(text):
                self.rows += 1
                yield row
        except _DAMAGED:
            self._note_damage(table, 1)

    def _count(self, table: str) -> int:
        with suppress(*_DAMAGED):
            return int(self._connection.execute(f"SELECT max(rowid) FROM {_quote(table)}").fetchone()[0] or 0)
        return 0

    def _note_damage(self, table: str, rows: int) -> None:
        if rows > 0:
            self.lost_rows += rows
            self.dropped[f"rows of the table {table}, which is damaged"] += rows

    def texts(self, table: str, number: str, *names: str) -> dict[int, str]:
        """The texts of a table by their numbers: of some columns the first that holds one."""
        texts, left = dict[int, str](), _MOST_CHARACTERS
        if number not in self.columns(table):
            return texts
        for row in self.select(table, (number, *names)):
            text = next((value for name in names if isinstance(value := row[name], str) and value), None)
            if text is not None and isinstance(row[number], int) and left > 0:
                left -= len(text)
                texts.setdefault(row[number], text)
        if left <= 0:
            self.dropped[f"the rest of the table {table}, whose texts are too long"] += 1
        return texts


def _quote(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def whole(value: Any) -> int | None:
    """A whole number of 8 bytes, or None. Raises ValueError, TypeError or OverflowError for what is none.

    >>> whole(3), whole("4"), whole(None)
    (3, 4, None)
    """
    if value is None:
        return None
    number = int(value)
    # integers of SQLite have 8 bytes: others were never stored
    if not _FIRST <= number <= _LAST:
        raise OverflowError
    return number
