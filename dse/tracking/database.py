"""MLflow's tracking store: an SQLite file, a PostgreSQL database or a server, opened safely.

A new SQLite database is built under a file lock, beside its final place, and moved there when complete, because MLflow
refuses for good a database that several processes build at the same time, or whose build is interrupted.
"""

from __future__ import annotations

import logging
import os
import re
import sqlite3
import time
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from dse.errors import hidden
from dse.store.owner import lock_file

if TYPE_CHECKING:
    from sqlalchemy import Engine

DEFAULT_URI: Final = "sqlite:///mlflow.db"
# Telemetry is a thread that phones home, two lines per run on stdout drown ours, and no artifact of ours is a pickle.
# With MLflow's 7 retries of 120 s an absent server would hold a finished study up for minutes. With these settings the
# wait ends after 15 s, and after a minute for a server that accepts connections and never answers.
ENVIRONMENT: Final = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "15",
}

# words of SQLite and alembic for a file that no retry mends
_DAMAGE: Final = ("not a database", "malformed", "_alembic_tmp_", "is damaged")
_POLL_S: Final = 0.2
_LOCK: Final = 0x647365  # number of PostgreSQL's advisory lock: "dse"


class TrackingError(RuntimeError):
    """MLflow could not show a study; the study and its results are not affected."""


class DamagedTrackingError(TrackingError):
    """The SQLite file of MLflow is no longer a database that MLflow can use."""


@dataclass(frozen=True)
class TrackingStore:
    """An open tracking store: its absolute URI, MLflow's client, and the engine of its database if it has one."""

    uri: str
    client: Any
    engine: Engine | None


def resolve(uri: str) -> str:
    """Return the tracking URI with the path of an SQLite file made absolute.

    MLflow reads `sqlite:///mlflow.db` against the directory of each process that opens it. Other URIs, and SQLite in
    memory, are returned unchanged.
    """
    match = re.fullmatch(r"(sqlite(?:\+\w+)?):///([^?]+)(\?.*)?", uri)
    if match is None or match[2] == ":memory:":
        return uri
    return f"{match[1]}:///{Path(match[2]).resolve()}{match[3] or ''}"


def open_store(uri: str) -> TrackingStore:
    """Open the tracking store, and build a database that is missing.

    Raises:
        DamagedTrackingError: the SQLite file is not a database that MLflow can use.
        TrackingError: the store cannot be reached, built or used by the installed MLflow.
    """
    where = resolve(uri)
    with explain_failures("open", where):
        engine = _open_engine(where)
        return TrackingStore(where, mlflow().MlflowClient(where), engine)


def repair(uri: str) -> Path | None:
    """Move a damaged SQLite database aside, so that a new one is built. Returns its new name, None if it is sound.

    Raises TrackingError for any other store, and OSError.
    """
    where = resolve(uri)
    file = sqlite_file(where)
    if file is None:
        raise TrackingError(f"{hidden(where)} is no SQLite file: mend it with the tools of its server")
    with lock_file(file.with_name(f"{file.name}.sync")):
        if not file.exists() or _is_sound(file, where):
            return None
        aside = file.with_name(f"{file.name}.damaged-{datetime.now():%Y-%m-%d_%H-%M-%S}")
        file.replace(aside)
        for suffix in ("-wal", "-shm", "-journal"):  # of the old file; the new one must not replay them
            with suppress(FileNotFoundError):
                file.with_name(file.name + suffix).replace(aside.with_name(aside.name + suffix))
    return aside


def _is_sound(file: Path, uri: str) -> bool:
    try:
        with closing(sqlite3.connect(file, timeout=60)) as connection:
            if connection.execute("PRAGMA quick_check(1)").fetchone() != ("ok",):  # (1): one fault is enough
                return False
        open_store(uri)
    except sqlite3.OperationalError as error:  # locked or not readable: no proof of damage
        raise TrackingError(f"MLflow's database {file} cannot be looked at ({error})") from error
    except (sqlite3.DatabaseError, DamagedTrackingError):
        return False
    return True


@contextmanager
def write_lock(store: TrackingStore) -> Iterator[None]:
    """Hold the lock of writers of studies to a database; others wait. A server has no such lock."""
    file = sqlite_file(store.uri)
    if file is not None:
        with lock_file(file.with_name(f"{file.name}.sync")):
            yield
    elif store.engine is not None and store.engine.dialect.name == "postgresql":
        with store.engine.connect() as connection, _advisory_lock(connection):
            yield
    else:
        yield


def mlflow() -> Any:
    """Import MLflow on first use, with the environment that it reads at import."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)  # the user's own settings stay
    with warnings.catch_warnings():
        # MLflow 3.17's table classes use a loader that SQLAlchemy 2.1 deprecates.
        warnings.filterwarnings("ignore", message="The ``noload`` loader strategy")
        import mlflow
        import mlflow.store.tracking.sqlalchemy_store
    return mlflow


@contextmanager
def explain_failures(task: str, uri: str) -> Iterator[None]:
    """Turn any failure inside into one TrackingError that names the task and the store.

    It catches every exception, because a view must not stop a study: MLflow, alembic, SQLAlchemy, database drivers and
    HTTP libraries raise types without a common base. It mutes MLflow's log, which prints migrations and tracebacks.
    """
    loggers = [logging.getLogger("mlflow"), logging.getLogger("alembic")]
    try:
        mlflow()  # before the levels of its loggers are read, because the import sets them
        levels = [logger.level for logger in loggers]
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
    except TrackingError:
        raise
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        message = f"MLflow could not {task} {hidden(uri)} ({type(error).__name__}: {hidden(first)[:400]})"
        damaged = sqlite_file(uri) is not None and any(sign in str(error) for sign in _DAMAGE)
        raise (DamagedTrackingError if damaged else TrackingError)(message) from error


def sqlite_file(uri: str) -> Path | None:
    """Return the file of an SQLite URI, None for any other URI."""
    match = re.fullmatch(r"sqlite(?:\+\w+)?:///([^?]+)(?:\?.*)?", uri)
    return None if match is None or match[1] == ":memory:" else Path(match[1])


def is_sql(uri: str) -> bool:
    """Return whether a URI names a database whose tables can be written in bulk."""
    return re.match(r"(sqlite|postgresql)(\+\w+)?:", uri) is not None


def artifact_root(uri: str) -> str:
    """Return the absolute folder for artifacts: beside the SQLite file, else in this directory."""
    file = sqlite_file(uri)
    return (Path.cwd() if file is None else file.parent).joinpath("mlartifacts").as_uri()


def _open_engine(uri: str) -> Engine | None:
    file = sqlite_file(uri)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        with lock_file(file.with_name(f"{file.name}.lock")):
            if not file.exists() or file.stat().st_size == 0:  # an interrupted first start leaves an empty file
                _build(file)
            _check_sqlite(file)
            return _engine(uri)
    if is_sql(uri):
        return _connect(uri)
    mlflow().MlflowClient(uri).search_experiments(max_results=1)  # asks for the least: does the server answer?
    return None


@contextmanager
def _advisory_lock(connection: Any) -> Iterator[None]:
    """Hold an advisory lock of PostgreSQL; the server drops it with the connection.

    It polls, because a statement that waits for the lock would look like a server that does not answer.
    """
    while not connection.exec_driver_sql(f"SELECT pg_try_advisory_lock({_LOCK})").scalar():
        connection.commit()  # a transaction that stays open would keep the server from tidying up
        time.sleep(_POLL_S)
    connection.commit()  # the lock belongs to the session, not to the transaction
    try:
        yield
    finally:
        connection.exec_driver_sql(f"SELECT pg_advisory_unlock({_LOCK})")
        connection.commit()


def _build(file: Path) -> None:
    """Build an MLflow database beside `file` and move it there in one step."""
    unfinished = file.with_name(f"{file.name}.new")
    for suffix in ("", "-journal", "-wal", "-shm"):  # left by a build that was interrupted
        Path(f"{unfinished}{suffix}").unlink(missing_ok=True)
    engine = _sql_store(f"sqlite:///{unfinished}").engine
    engine.dispose()  # closes the file: SQLite must not have it open while it moves
    unfinished.replace(file)


def _check_sqlite(file: Path) -> None:
    """Fail at once on a file that is not a database, and set write-ahead logging, so that readers do not wait.

    MLflow itself would try ten times over 100 s. Write-ahead logging stays with the file. Without it, if the file
    system or another process refuses it, writing is slower and nothing else changes. Raises sqlite3.Error.
    """
    with closing(sqlite3.connect(file, timeout=60)) as connection:
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master").fetchall()}
        if any(name.startswith("_alembic_tmp_") for name in tables):
            raise sqlite3.DatabaseError("the database is damaged: building or changing it was cut short")
        with suppress(sqlite3.OperationalError):
            connection.execute("PRAGMA journal_mode=WAL").fetchone()


def _connect(uri: str) -> Engine:
    """Connect to a database server, and build its tables under a lock.

    It fails at once if the server does not answer, where MLflow would try for 100 s.
    """
    from sqlalchemy import Engine, create_engine

    from dse.store import postgres

    postgres.watch(Engine)  # because MLflow makes its own engine
    engine = create_engine(uri)
    try:
        with engine.connect() as connection, _advisory_lock(connection):
            return _engine(uri)
    finally:
        engine.dispose()


def _engine(uri: str) -> Engine:
    """Return the engine of MLflow's SQL store, which MLflow's client shares."""
    from sqlalchemy import event

    engine: Engine = _sql_store(uri).engine
    if sqlite_file(uri) is not None and not event.contains(engine, "connect", _set_pragmas):
        event.listen(engine, "connect", _set_pragmas)
        engine.dispose()  # connections opened so far lack the settings
    return engine


def _sql_store(uri: str) -> Any:
    """Open MLflow's SQL store; opening it builds missing tables and checks their version."""
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    return SqlAlchemyStore(uri, artifact_root(uri))  # type: ignore[no-untyped-call]


def _set_pragmas(connection: Any, _record: Any) -> None:
    """Wait for other writers up to 60 s, sync at checkpoints only, and keep the ends of the indexes in memory.

    With write-ahead logging a power cut then loses the last runs, never the database.
    """
    connection.execute("PRAGMA busy_timeout=60000")
    connection.execute("PRAGMA synchronous=NORMAL")
    connection.execute("PRAGMA foreign_keys=ON")
    connection.execute("PRAGMA cache_size=-131072")  # KiB
