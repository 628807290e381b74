"""A robust database connection: creates the tables, retries while the database is silent, repairs a damaged file.

SQLite in one file (write-ahead log, one writer at a time) or PostgreSQL by URL. Every failure is raised as a
`StoreError`, an OSError, with what to do about it.
"""

from __future__ import annotations

import errno
import itertools
import re
import sqlite3
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from sqlalchemy import (
    Connection,
    Engine,
    LargeBinary,
    MetaData,
    Table,
    create_engine,
    event,
    insert,
    inspect,
    select,
    text,
)
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, OperationalError, SQLAlchemyError
from sqlalchemy.pool import NullPool

from dse.errors import hidden
from dse.store.owner import lock_file

T = TypeVar("T")

PATIENCE_S = 60.0
"""Default time to wait for a lost connection, a silent server or a locked file."""
# while it is opened: a wrong name will not mend itself, a restart may
_WRONG_S = 5.0  # the same while it is opened, for answers that mean a wrong name rather than a restart
_WRONG = re.compile("does not exist|authentication failed|no password|pg_hba|resolve|translate host")
_FIRST, _LAST = 1 / 4, 1 / 12  # of that time: for the first answer, and for one after it is over
# Errors that changed bytes may cause, assertions of libraries among them.
_GARBLED = (SQLAlchemyError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError, AssertionError)
# "dse" in ASCII: any number, the same in all processes
_LOCK = 0x647365  # PostgreSQL's advisory lock while tables are made
_BY_ITSELF = {"isolation_level": "AUTOCOMMIT"}  # no BEGIN and COMMIT: fewer round trips to a server
_MENDED = ".mended"  # suffix of a copy with every readable row, which takes the place of a damaged file
_RANGES = 4096  # parts in which a damaged table is read, by the first 12 bits of its key


class StoreError(OSError):
    """The database cannot be used; its content is kept. The text says what to do."""


class _DamagedFile(Exception):
    """The SQLite file is not a database, or is damaged."""


class Blob(LargeBinary):
    """Bytes as the driver returns them, because a damaged row may hold any type."""

    def result_processor(self, dialect: Any, coltype: object) -> None:
        """None: values read are not converted."""

    def bind_processor(self, dialect: Any) -> None:
        """None: drivers accept bytes."""


class Database:
    """Tables in a database. keyed: the table whose primary key is random bytes, mended range by range.

    patience_s: time to wait while it does not answer. mended: whether it was damaged and has been repaired. busy_s:
    time that all reads and writes took so far.

    Raises StoreError if it cannot be used, whatever the reason.
    """

    def __init__(self, url: str, tables: MetaData, *, keyed: Table, patience_s: float = PATIENCE_S) -> None:
        self._url, self._tables, self._keyed = url, tables, keyed
        self.file = _sqlite_file(url)  # None: a server
        self.mended, self.busy_s = False, 0.0
        self._patience, self._opening = patience_s, True
        # shared by threads, so that each does not wait the whole time after another
        self._silent: float | None = None  # time since which no thread has had an answer
        self._open()
        self._opening = False
        weakref.finalize(self, self._engine.dispose)  # a database that is dropped must not keep connections

    def __str__(self) -> str:
        return str(self.file) if self.file else hidden(self._url)

    @property
    def dialect(self) -> Any:
        """SQLAlchemy's dialect."""
        return self._engine.dialect

    def read(self, work: Callable[[Connection], T]) -> T:
        """Run `work`, which only reads; repeated until the database answers. On a server, statements autocommit."""
        return self._transact(work, self._engine if self.file else self._engine.execution_options(**_BY_ITSELF))

    def write(self, work: Callable[[Connection], T], *, apart: bool = False) -> T:
        """Run `work` in one transaction; repeated until it succeeds, so it must be idempotent.

        apart: its statements may be committed one by one, which takes a server fewer round trips.
        """
        self._check_place()  # writes to a deleted file would succeed, and be lost
        options: dict[str, Any] = {"write": True, **(_BY_ITSELF if apart and self.file is None else {})}
        return self._transact(work, self._engine.execution_options(**options))

    def exclude(self, connection: Connection) -> None:
        """Hold an exclusive lock until the transaction ends; SQLite has a single writer anyhow."""
        if self._engine.dialect.name == "postgresql":
            # released with the transaction, also when the process dies
            connection.execute(text("SELECT pg_advisory_xact_lock(:number)"), {"number": _LOCK})

    def tidy(self) -> None:
        """Checkpoint SQLite's write-ahead log, alongside other readers and writers."""
        if self.file is not None:
            with suppress(sqlite3.Error, DBAPIError):  # the next write reports what is wrong
                connection = self._engine.raw_connection()
                try:
                    connection.cursor().execute("PRAGMA wal_checkpoint(PASSIVE)")  # waits for nobody
                finally:
                    connection.close()

    def close(self) -> None:
        """Close all connections; they open again when they are needed."""
        self._engine.dispose()

    def _open(self) -> None:
        engine = self._engine = _engine(self._url)
        if self.file is None:
            self._retry(lambda: _make(engine, self._tables))
            return
        _make_folder(self.file)
        # one process repairs, the others find it repaired
        with lock_file(self.file.with_name(f"{self.file.name}.lock")):
            self._take_mended()
            try:
                self._retry(lambda: _make(engine, self._tables))
            except _DamagedFile as error:
                engine.dispose()
                self._mend(error)
                self._retry(lambda: _make(engine, self._tables))  # in the new file
        self._inode = self.file.stat().st_ino  # shows later whether another file has taken its place

    def _transact(self, work: Callable[[Connection], T], engine: Engine) -> T:
        def once() -> T:
            with engine.begin() as connection:
                return work(connection)

        began = time.monotonic()
        try:
            return self._retry(once)
        except _DamagedFile as error:
            if self.file is None:
                raise StoreError(f"{self} is damaged: {error}") from error  # a server's files are not ours to repair
            self.close()
            with lock_file(self.file.with_name(f"{self.file.name}.lock")):
                self._mend(error)
            self._inode = self.file.stat().st_ino
            return self._retry(once)  # a second time: the damage is gone, or it is an error
        finally:
            self.busy_s += time.monotonic() - began

    def _retry(self, once: Callable[[], T]) -> T:
        """Return the result of `once`, retried for a while if the database does not answer. Raises _DamagedFile."""
        began, pause, tries = time.monotonic(), 0.05, 0
        while True:
            try:
                with self._deadline(began, first=not tries):
                    done = once()
            except DBAPIError as error:
                verdict = _verdict(error)
                if verdict == "damaged":
                    raise _DamagedFile(_first_line(error)) from error
                left = self._patience_left_s(began, error)
                if verdict != "wait" or left <= 0.0:
                    raise StoreError(f"{self}: {_way_out(verdict, error)}") from error
                if pause > 1.0:  # short waits are normal, and not worth a line
                    print(f"waiting for {self}: {_first_line(error)}", file=sys.stderr)
                time.sleep(min(pause, left))
                pause, tries = min(5.0, 2 * pause), tries + 1  # doubled up to 5 s
            except _GARBLED as error:
                if self.file is not None or tries:  # a server's connection may be out of step: try a new one, once
                    raise StoreError(f"{self}: {_way_out('garbled', error)}") from error
                self.close()
                tries += 1
            else:
                self._silent = None  # an answer ends the wait of all threads
                return done

    def _deadline(self, began: float, *, first: bool) -> AbstractContextManager[None]:
        """Deadline for a server's answer: early on the first try, as another connection may be better."""
        if self.file is not None:
            return nullcontext()  # SQLite has a timeout of its own
        from dse.store import postgres

        now = time.monotonic()
        left = self._patience - (now - min(began, self._silent or began))
        limit = min(left, _FIRST * self._patience) if first else left
        # never less than a part of the time, or a late try could not succeed at all
        return postgres.until(now + max(limit, _LAST * self._patience))

    def _patience_left_s(self, began: float, error: DBAPIError) -> float:
        """Remaining time to wait, in s; the time that other threads waited counts, too."""
        self._silent = min(began, self._silent or began)
        wrong = self._opening and _WRONG.search(str(error.orig))  # only at first: names that worked once are right
        return self._silent + (min(self._patience, _WRONG_S) if wrong else self._patience) - time.monotonic()

    def _check_place(self) -> None:
        """Refuse to write to a file that was removed or replaced, as the data would be lost. Raises StoreError."""
        if self.file is not None and (not self.file.exists() or self.file.stat().st_ino != self._inode):
            raise StoreError(f"{self.file} was moved, deleted or replaced while in use; type the same command again")

    def _mend(self, why: Exception) -> None:
        """Copy every readable row to a new file, and rename the damaged one."""
        assert self.file is not None
        fresh = self.file.with_name(f"{self.file.name}.new")
        for suffix in ("", "-wal", "-shm"):  # what an interrupted repair left
            Path(f"{fresh}{suffix}").unlink(missing_ok=True)
        new, old = _engine(f"sqlite:///{fresh}"), _engine(self._url)
        _make(new, self._tables)
        count = sum(_copy_rows(old, new, table, by_range=table is self._keyed) for table in self._tables.sorted_tables)
        _copy_number(old, new)
        new.dispose()  # closes the file: SQLite must not have it open while it moves
        old.dispose()
        fresh.replace(self.file.with_name(f"{self.file.name}{_MENDED}"))  # complete from here on
        aside = self._take_mended()
        print(
            f"{self.file} was damaged ({why}): {count} rows were saved, what is missing is computed again; the damaged"
            f" file is kept as {aside}",
            file=sys.stderr,
        )

    def _take_mended(self) -> str:
        """Put a complete copy, also of an interrupted repair, in place of the file; returns the latter's new name."""
        assert self.file is not None
        copy = self.file.with_name(f"{self.file.name}{_MENDED}")
        if not copy.exists():
            return ""
        aside = f"{self.file.name}.damaged-{datetime.now(UTC):%Y%m%dT%H%M%S%f}"
        # the log first: a file that is made anew must not meet an old log
        for suffix in ("-wal", "-shm", ""):
            with suppress(FileNotFoundError):
                Path(f"{self.file}{suffix}").replace(self.file.with_name(f"{aside}{suffix}"))
        copy.replace(self.file)
        self.mended = True
        return aside


def _sqlite_file(url: str) -> Path | None:
    match = re.fullmatch(r"sqlite:///([^?]+)", url)
    # relative paths may change their meaning
    return None if match is None or match[1] == ":memory:" else Path(match[1]).resolve()


def _make_folder(file: Path) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(
            f"{file.parent} cannot be made ({error.strerror}); choose another output_dir or store.url"
        ) from error


def _engine(url: str) -> Engine:
    """Create an engine with our settings. Raises StoreError for a URL that names no database."""
    file = _sqlite_file(url)
    try:
        if file is None:
            from dse.store import postgres  # its driver takes 0.2 s to import

            # positional, as rows are tuples; looking for hstore costs a query for each connection
            engine = create_engine(url, paramstyle="format", use_native_hstore=False)
            postgres.watch(engine)
            return engine
        # s that SQLite itself waits for a lock
        engine = create_engine(f"sqlite:///{file}", connect_args={"timeout": 60})
    except (ArgumentError, NoSuchModuleError, ImportError, TypeError) as error:
        raise StoreError(f"store.url names no database that can be used: {_first_line(error)}") from error
    event.listen(engine, "connect", _set_up)
    event.listen(engine, "begin", _begin)
    return engine


def is_missing(url: str) -> bool:
    """Return whether a URL names an SQLite file that is not there (yet). Raises StoreError if it names no database."""
    file = _sqlite_file(url)
    return file is not None and not file.is_file()


def reader(url: str) -> Engine | None:
    """Create a read-only engine, which makes no file beside the database; None if there is no database yet.

    Raises StoreError for a URL that names no database.
    """
    file = _sqlite_file(url)
    if file is None:
        return _engine(url).execution_options(postgresql_readonly=True)
    if is_missing(url):
        return None
    log = file.with_name(f"{file.name}-wal")
    alone = "" if log.is_file() and log.stat().st_size else "&immutable=1"  # no writer, and the file is complete
    place = f"file:{quote(str(file))}?mode=ro{alone}"
    # closes each connection, and so the file
    return create_engine("sqlite://", creator=lambda: sqlite3.connect(place, uri=True), poolclass=NullPool)


def _set_up(connection: Any, _record: Any) -> None:
    """Set up a write-ahead log that is synced at checkpoints: a power cut loses the last commits, never the database.

    A commit waits for a checkpoint only if `tidy` is far behind.
    """
    connection.isolation_level = None  # transactions begin explicitly, by `_begin`
    # a damaged text must be readable, or its row could not be moved
    connection.text_factory = lambda data: data.decode("utf-8", "surrogateescape")
    for setting in ("journal_mode=WAL", "synchronous=NORMAL", "cache_size=-65536", "wal_autocheckpoint=65536"):
        connection.execute(f"PRAGMA {setting}")


def _begin(connection: Connection) -> None:
    write = connection.get_execution_options().get("write")
    # a read that turns into a write may fail: lock at once
    connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")


def _make(engine: Engine, tables: MetaData) -> None:
    """Create the tables that are missing, one process at a time; where all are there, nobody waits for another."""
    with engine.execution_options(write=True).begin() as connection:
        file = engine.dialect.name == "sqlite"
        check_plain(connection, tables, str(engine.url.database if file else engine.url))
        if tables.tables.keys() <= set(inspect(connection).get_table_names()):
            return
        if engine.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:number)"), {"number": _LOCK})
        tables.create_all(connection)


def check_plain(connection: Connection, tables: MetaData, place: str) -> None:
    """Refuse triggers, rules and views, which may change results or stand in for a table. Raises StoreError."""
    if connection.dialect.name == "postgresql":
        from dse.store import postgres

        names = postgres.foreign(connection, list(tables.tables))
    else:
        listed = "SELECT type || ' ' || name FROM sqlite_master"
        # a virtual table runs code of an extension
        strange = f"{listed} WHERE type NOT IN ('table', 'index') OR sql LIKE 'CREATE VIRTUAL%'"
        names = [name for (name,) in connection.exec_driver_sql(strange)]
    if names:
        what = f"{place} holds what dse never makes and what may change results: {', '.join(sorted(names))}"
        raise StoreError(f"{what}; drop it, or choose another output_dir or store.url")


def numbered(connection: Connection) -> int:
    """The version in the head of an SQLite file, besides that in its table; 0 where there is none, or on a server."""
    if connection.dialect.name != "sqlite":
        return 0
    return int(connection.exec_driver_sql("PRAGMA user_version").scalar_one())


def number_file(connection: Connection, version: int) -> None:
    """Write a version into the head of an SQLite file; a server's database has its table alone."""
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql(f"PRAGMA user_version = {version:d}")


def _copy_number(old: Engine, new: Engine) -> None:
    with suppress(DBAPIError), old.connect() as connection:
        version = numbered(connection)
        with new.begin() as fresh:
            number_file(fresh, version)


def _copy_rows(old: Engine, new: Engine, table: Table, *, by_range: bool) -> int:
    """Copy the readable rows of a table, and return their number."""
    # 2 bytes are enough for 12 bits
    keys = [number.to_bytes(2, "big") for number in range(0, 1 << 16, (1 << 16) // _RANGES)]
    ends = [None, *keys[1:], None] if by_range else [None, None]  # open at both ends
    (key,) = table.primary_key.columns
    count = 0
    for low, high in itertools.pairwise(ends):
        limits = [key >= low] if low is not None else []
        limits += [key < high] if high is not None else []
        rows: list[Any] = []
        with suppress(DBAPIError), old.connect() as connection:  # an unreadable range loses its own rows only
            # one by one: the rows before a damaged page are kept
            rows.extend(dict(row) for row in connection.execute(select(table).where(*limits)).mappings())
        if rows:
            with new.begin() as connection:
                connection.execute(insert(table).prefix_with("OR IGNORE"), rows)  # damage may show a key twice
            count += len(rows)
    return count


def _verdict(error: DBAPIError) -> str:
    """Classify an error: `wait`, `damaged`, `full`, or empty for any other."""
    name = getattr(error.orig, "sqlite_errorname", None)
    if name is not None:
        # by prefix: SQLite has extended codes such as SQLITE_BUSY_SNAPSHOT
        verdicts = {"SQLITE_BUSY": "wait", "SQLITE_LOCKED": "wait", "SQLITE_FULL": "full"}
        damaged = name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_FORMAT"))
        verdict = next((verdict for start, verdict in verdicts.items() if name.startswith(start)), "")
        return "damaged" if damaged else verdict
    state = getattr(error.orig, "sqlstate", None) or ""
    if state == "53100":  # disk_full
        return "full"
    # invalid authorization, no such database, syntax or access rule
    refused = state.startswith(("28", "3D", "42")) or "authentication failed" in str(error.orig)
    # connection exceptions, and shutdowns by an operator
    lost = error.connection_invalidated or isinstance(error, OperationalError) or state.startswith(("08", "57P"))
    return "wait" if lost and not refused else ""


def _way_out(verdict: str, error: Exception) -> str:
    if verdict == "garbled":
        detail = f"{type(error).__name__}: {_first_line(error)}"
        return f"answers what makes no sense ({detail}); nothing recorded is lost: type the same command again"
    if verdict == "full" or getattr(getattr(error, "orig", None), "errno", None) == errno.ENOSPC:
        return "the disk is full; nothing recorded is lost: make room and type the same command again"
    if verdict == "wait":
        return f"does not answer ({_first_line(error)}); nothing recorded is lost: type the same command again later"
    return f"cannot be used ({_first_line(error)})"


def _first_line(error: BaseException) -> str:
    return str(getattr(error, "orig", None) or error).strip().partition("\n")[0]
