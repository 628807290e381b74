"""Show the results of a study in MLflow: one run per study invocation, one run per evaluated point.

Tracking is a *view*.  The results live in the result store and in ``results.parquet``; everything
here can be deleted and written again, and every failure is a :class:`TrackingError` that the
caller may print and pass over.

Layout: experiment ``dse/<study>`` holds the study runs (tens of them: what people compare),
experiment ``dse/<study>/points`` holds all points flat.  Nesting thousands of points under their
study in one experiment floods MLflow's list, which loads 100 runs at a time.

Two ways to write the points: *bulk*, through MLflow's own SQLAlchemy table classes (sqlite and
postgresql, well below 1 ms a run), and *client*, through ``MlflowClient`` (any URI, 10 to 100 ms a
run).  Both give the same runs; the bulk way proves it on the first point before it goes on.

Importing this module imports neither MLflow nor pandas: together they take seconds.
"""

from __future__ import annotations

import getpass
import itertools
import logging
import math
import os
import posixpath
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, TypeVar

if TYPE_CHECKING:
    import pandas as pd
    from sqlalchemy import Engine

T = TypeVar("T")

# Telemetry is a thread that phones home, two lines per run on stdout drown ours, and no artifact
# of ours is a pickle.  With MLflow's 7 retries an absent server holds a finished study up for
# minutes; with three it is given up after 15 s.
_ENVIRONMENT: Final = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",
}

# MLflow's own limits, in characters (mlflow/utils/validation.py).
_MAX_NAME: Final = 250
_MAX_PARAM: Final = 6000
_MAX_TAG: Final = 8000

# Quiet, and no waiting for a browser tab that keeps its connection open (seconds).
_UVICORN: Final = "--timeout-graceful-shutdown 3 --log-level warning --no-access-log"

_MAX_POINT_NAME: Final = 100  # ours: a run name is read in one column of the runs table
_RUNS_PER_TRANSACTION: Final = 1000
_ROW_COLUMNS: Final = ("scenario", "key", "status", "reason", "on_front", "engine")

# The columns the bulk writer fills, per table class.  Anything else in the database means an
# MLflow this writer was not written for.
_METRIC_COLUMNS: Final = frozenset({"key", "value", "timestamp", "step", "is_nan", "run_uuid"})
_RUN_COLUMNS: Final = (
    *("run_uuid", "name", "experiment_id", "artifact_uri", "user_id", "status", "lifecycle_stage"),
    *("start_time", "end_time", "deleted_time"),
    *("source_type", "source_name", "source_version", "entry_point_name"),
)
_LAYOUT: Final = {
    "SqlRun": frozenset(_RUN_COLUMNS),
    "SqlParam": frozenset({"key", "value", "run_uuid"}),
    "SqlMetric": _METRIC_COLUMNS,
    "SqlLatestMetric": _METRIC_COLUMNS,
    "SqlTag": frozenset({"key", "value", "run_uuid"}),
}


class TrackingError(RuntimeError):
    """MLflow could not show a study; the study and its results are not affected."""


@dataclass(frozen=True)
class StudyRecord:
    """What is shown of one study invocation.

    Attributes:
        study: name of the study; its experiment is ``dse/<study>``.
        name: run name of this invocation, e.g. ``ficco_sweep 2026-11-21 07:40:12``.
        table: one row per evaluated point.  Besides the knobs and metrics it has the columns
            ``scenario``, ``key`` (content hash of the point), ``status`` (ok, infeasible,
            unsupported, failed or invalid), ``reason`` (may be empty), ``on_front`` (bool) and
            ``engine``.
        knobs: dotted paths of the searched knobs, columns of the table.  A missing value is an
            inactive knob and is not logged.  Values are shown as their column holds them: an
            integer knob with inactive rows wants an ``Int64`` or object column, not float.
        metrics: numeric columns with the unit in the name (``makespan_s``).  NaN and infinity
            are not logged.
        folder: files of the invocation (``results.parquet``, figures, ...), logged as artifacts
            of the study run.  Symbolic links (``latest``) are left out.
        parent_metrics: numbers of the whole study (``front_size``).
        parent_tags: tags of the study run.
        note: Markdown shown as the description of the study run.
    """

    study: str
    name: str
    table: pd.DataFrame
    knobs: tuple[str, ...]
    metrics: tuple[str, ...]
    folder: Path
    parent_metrics: Mapping[str, float]
    parent_tags: Mapping[str, str]
    note: str


@dataclass(frozen=True)
class Tracked:
    """Where a study invocation can be seen.

    Attributes:
        uri: the tracking store, absolute and without its password.
        experiment_id: experiment of the study run.
        run_id: the study run.
        num_points: point runs written.
        how: ``bulk`` or ``client``.
    """

    uri: str
    experiment_id: str
    run_id: str
    num_points: int
    how: str


@dataclass(frozen=True)
class _Point:
    """One point run in MLflow's words, the same for both ways of writing it."""

    name: str
    status: str  # FINISHED or FAILED
    params: dict[str, str]
    metrics: dict[str, float]
    tags: dict[str, str]


@dataclass(frozen=True)
class _Target:
    """Where point runs go: an MLflow experiment, with the database engine if there is one."""

    client: Any
    experiment: Any
    engine: Engine | None


def resolve(uri: str) -> str:
    """Return the tracking URI with the path of an SQLite file made absolute.

    MLflow reads ``sqlite:///mlflow.db`` against the directory of each process that opens it.
    Other URIs, and SQLite in memory, are returned unchanged.
    """
    match = re.fullmatch(r"(sqlite(?:\+\w+)?):///([^?]+)(\?.*)?", uri)
    if match is None or match[2] == ":memory:":
        return uri
    return f"{match[1]}:///{Path(match[2]).resolve()}{match[3] or ''}"


def prepare(uri: str) -> None:
    """Make the tracking store ready; call it once, before other processes use the store.

    A new SQLite database is built under a file lock, beside its final place, and moved there
    when complete: processes that build one at the same time, or a build cut short, leave a
    database that MLflow refuses ever after.

    Raises:
        TrackingError: the store cannot be reached, built or used by the installed MLflow.
    """
    where = resolve(uri)
    with _explained("open", where):
        _open(where)


def track(record: StudyRecord, *, uri: str, seen: Callable[[int], None] = lambda count: None) -> Tracked:
    """Write one study run and one run per point; a second call adds a second study run. seen: told of progress.

    The study run ends FINISHED only when everything is written (tag ``dse.points_logged=all``);
    otherwise it ends FAILED, or KILLED on Ctrl-C, and keeps the points written so far.

    Raises:
        TrackingError: the table lacks a column or holds a metric that is no number, the folder
            does not exist, or MLflow or its database failed.
    """
    where = resolve(uri)
    with _explained("write the study to", where):
        _check(record)
        _open(where)
        client = _mlflow().MlflowClient(where)
        study = _experiment(client, f"dse/{record.study}", where)
        points = _experiment(client, f"dse/{record.study}/points", where)
        target = _Target(client, points, _engine(where) if _is_sql(where) else None)
        run_id = _start_study_run(client, study.experiment_id, record)
        with _ended(client, run_id):
            _describe_study_run(client, run_id, record)
            for file in _files(record.folder, _sqlite_file(where)):
                inside = file.parent.relative_to(record.folder).as_posix()
                client.log_artifact(run_id, str(file), None if inside == "." else inside)
            how = _write_points(target, _points(record, run_id), seen)
            _analyze(target.engine)
            client.set_tag(run_id, "dse.points_logged", "all")
    return Tracked(_hidden(where), study.experiment_id, run_id, len(record.table), how)


def serve(uri: str, *, port: int = 5000) -> int:
    """Serve the MLflow UI on 127.0.0.1 until Ctrl-C, and return the exit code.

    One worker and no job runner: 2 processes and about 0.5 GB instead of 15 and 2.8 GB.

    Returns:
        0 after Ctrl-C (or SIGTERM, SIGHUP), 2 if there is nothing to serve or the port cannot be
        used, otherwise the exit code of a server that ended by itself.
    """
    where = resolve(uri)
    if where.startswith(("http:", "https:")):
        print(f"{_hidden(where)} is a server already: open it in the browser.")
        return 0
    obstacle = _obstacle(where, port)
    if obstacle:
        print(obstacle, file=sys.stderr)
        return 2
    print(f"MLflow UI: http://127.0.0.1:{port} (up in about ten seconds). Ctrl-C stops it.")
    sys.stdout.flush()
    return _run_server(where, port)


# ---------------------------------------------------------------- opening the store


def _mlflow() -> Any:
    """Import MLflow on first use, with the environment it reads while it is imported."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    with warnings.catch_warnings():
        # MLflow 3.17's table classes use a loader that SQLAlchemy 2.1 deprecates.
        warnings.filterwarnings("ignore", message="The ``noload`` loader strategy")
        import mlflow
        import mlflow.store.tracking.sqlalchemy_store
    return mlflow


@contextmanager
def _explained(task: str, uri: str) -> Iterator[None]:
    """Turn any failure inside into one :class:`TrackingError` that names the task and the store.

    Every exception, because a view must not stop a study: MLflow, alembic, SQLAlchemy, database
    drivers and HTTP libraries raise types without a common base.  MLflow's own log is muted
    meanwhile: it prints migrations and tracebacks of what the error says in one sentence.
    """
    loggers = [logging.getLogger("mlflow"), logging.getLogger("alembic")]
    try:
        _mlflow()  # sets the levels of its loggers, so before they are read
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
        cause = _shortened(f"{type(error).__name__}: {first}", 400)
        raise TrackingError(f"MLflow could not {task} {_hidden(uri)} ({cause})") from error


def _open(uri: str) -> None:
    """Reach the store, building an SQLite database that does not exist yet."""
    file = _sqlite_file(uri)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        with _locked(file.with_name(f"{file.name}.lock")):
            if not file.exists() or file.stat().st_size == 0:
                _build(file)
            _check_sqlite(file)
            _engine(uri)
    elif _is_sql(uri):
        _check_connection(uri)
        _engine(uri)
    else:
        _mlflow().MlflowClient(uri).search_experiments(max_results=1)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file; the system drops it when the process dies."""
    import fcntl  # Unix only, as MLflow's own lock is

    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _build(file: Path) -> None:
    """Build an MLflow database beside ``file`` and move it there in one step."""
    unfinished = file.with_name(f"{file.name}.new")
    for suffix in ("", "-journal", "-wal", "-shm"):
        Path(f"{unfinished}{suffix}").unlink(missing_ok=True)
    engine = _store(f"sqlite:///{unfinished}").engine
    engine.dispose()  # closes the file: SQLite must not have it open while it moves
    unfinished.replace(file)


def _check_sqlite(file: Path) -> None:
    """Fail at once on a file that is no database, and let readers work while a writer writes.

    MLflow itself would try ten times over 100 s.  Write-ahead logging stays with the file; where
    the file system or another process refuses it, writing is slower and nothing else changes.

    Raises:
        sqlite3.Error: the file cannot be opened or is not an SQLite database.
    """
    with closing(sqlite3.connect(file, timeout=60)) as connection:
        connection.execute("PRAGMA schema_version").fetchone()
        with suppress(sqlite3.OperationalError):
            connection.execute("PRAGMA journal_mode=WAL").fetchone()


def _check_connection(uri: str) -> None:
    """Fail at once on a database server that does not answer; MLflow would try for 100 s."""
    from sqlalchemy import create_engine

    engine = create_engine(uri)
    try:
        engine.connect().close()
    finally:
        engine.dispose()


def _engine(uri: str) -> Engine:
    """Return the engine of MLflow's own SQL store, which MLflow's client shares."""
    from sqlalchemy import event

    engine: Engine = _store(uri).engine
    if _sqlite_file(uri) is not None and not event.contains(engine, "connect", _set_pragmas):
        event.listen(engine, "connect", _set_pragmas)
        engine.dispose()  # connections opened so far lack the settings
    return engine


def _store(uri: str) -> Any:
    """Open MLflow's SQL store; opening it builds missing tables and checks their version."""
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    return SqlAlchemyStore(uri, _artifact_root(uri))  # type: ignore[no-untyped-call]


def _set_pragmas(connection: Any, _record: Any) -> None:
    """Wait for other writers up to 60 s, and sync at checkpoints only.

    With write-ahead logging a power cut then loses the last runs, never the database.
    """
    connection.execute("PRAGMA busy_timeout=60000")
    connection.execute("PRAGMA synchronous=NORMAL")
    connection.execute("PRAGMA foreign_keys=ON")


def _sqlite_file(uri: str) -> Path | None:
    match = re.fullmatch(r"sqlite(?:\+\w+)?:///([^?]+)(?:\?.*)?", uri)
    return None if match is None or match[1] == ":memory:" else Path(match[1])


def _is_sql(uri: str) -> bool:
    return re.match(r"(sqlite|postgresql)(\+\w+)?:", uri) is not None


def _artifact_root(uri: str) -> str:
    """Return the folder for artifacts, absolute: beside the SQLite file, else in this directory."""
    file = _sqlite_file(uri)
    return (Path.cwd() if file is None else file.parent).joinpath("mlartifacts").as_uri()


def _hidden(uri: str) -> str:
    """Return the URI without its password, for messages."""
    return re.sub(r"(://[^/@:]*):[^/@]*@", r"\1:***@", uri)


# ---------------------------------------------------------------- the study run


def _check(record: StudyRecord) -> None:
    """Refuse a record that cannot be written whole, before anything is written."""
    missing = [name for name in _ROW_COLUMNS if name not in record.table.columns]
    if missing:
        raise TrackingError(f"the table of points lacks the columns {', '.join(missing)}")
    if not record.table.columns.is_unique:
        raise TrackingError("two columns of the table of points have the same name")
    for kind, names in (("knobs", record.knobs), ("metrics", record.metrics)):
        if len({_name(name) for name in names}) < len(names):
            raise TrackingError(f"two {kind} have the same name in MLflow: {', '.join(names)}")
    if not record.folder.is_dir():
        raise TrackingError(f"the folder of the study does not exist: {record.folder}")


def _experiment(client: Any, name: str, uri: str) -> Any:
    """Return the MLflow experiment of this name, creating it with an absolute artifact folder.

    Raises:
        TrackingError: the experiment was deleted in MLflow, which keeps its name.
    """
    from mlflow.exceptions import MlflowException

    if client.get_experiment_by_name(name) is None:
        try:
            # A server knows its own folder; a database would take the directory of whoever opens
            # it next.  The kind makes the UI open on the list of runs.
            client.create_experiment(
                name,
                artifact_location=_artifact_root(uri) if _is_sql(uri) else None,
                tags={"mlflow.experimentKind": "custom_model_development"},
            )
        except MlflowException:
            if client.get_experiment_by_name(name) is None:
                raise  # otherwise another study created it just now
    experiment = client.get_experiment_by_name(name)
    if experiment.lifecycle_stage != "active":
        raise TrackingError(
            f"the MLflow experiment {name} was deleted: restore it in the UI, or remove it for good with `mlflow gc`"
        )
    return experiment


def _start_study_run(client: Any, experiment_id: str, record: StudyRecord) -> str:
    name = _shortened(record.name, _MAX_NAME)
    run = client.create_run(experiment_id, run_name=name, tags=_origin())
    return str(run.info.run_id)


def _describe_study_run(client: Any, run_id: str, record: StudyRecord) -> None:
    """Log the numbers, tags and description of the study run."""
    from mlflow.entities import Metric, RunTag

    now = _now_ms()
    metrics = [
        Metric(_name(key), float(value), now, 0) for key, value in record.parent_metrics.items() if math.isfinite(value)
    ]
    tags = {_name(key): _shortened(str(value), _MAX_TAG) for key, value in record.parent_tags.items()}
    tags["dse.study"] = _shortened(record.study, _MAX_TAG)
    tags["mlflow.note.content"] = _shortened(record.note, _MAX_TAG)
    tag_list = [RunTag(key, value) for key, value in tags.items()]
    client.log_batch(run_id, metrics=metrics, tags=tag_list)


def _files(folder: Path, database: Path | None) -> list[Path]:
    """List the files of a folder.

    Symbolic links are left out: ``latest`` points back at the folder itself.  So are MLflow's
    own files, if its database lives in the folder: the artifacts would hold the artifacts.
    """
    found = []
    for parent, _, names in os.walk(folder):  # does not enter linked folders
        for file in (Path(parent, name) for name in names):
            own = database is not None and (
                file.is_relative_to(database.parent / "mlartifacts")
                or (file.parent == database.parent and file.name.startswith(database.name))
            )
            if file.is_file() and not file.is_symlink() and not own:
                found.append(file)
    return sorted(found)


@contextmanager
def _ended(client: Any, run_id: str) -> Iterator[None]:
    """End the study run whatever happens: FINISHED, FAILED, or KILLED when told to stop."""
    try:
        yield
        client.set_terminated(run_id, "FINISHED")
    except BaseException as error:
        stopped = isinstance(error, KeyboardInterrupt | SystemExit)
        with suppress(Exception):  # the first error is the one to report
            client.set_terminated(run_id, "KILLED" if stopped else "FAILED")
        raise


# ---------------------------------------------------------------- the point runs


def _points(record: StudyRecord, study_run: str) -> Iterator[_Point]:
    """Yield the rows of the table as runs of MLflow, in order."""
    table = record.table
    params = {_name(knob): _texts(table[knob]) for knob in record.knobs if knob in table}
    metrics = {_name(name): _numbers(table[name]) for name in record.metrics if name in table}
    row_tags = {f"dse.{name}": _texts(table[name]) for name in _ROW_COLUMNS}
    row_tags["dse.on_front"] = ["true" if text == "True" else "false" for text in row_tags["dse.on_front"]]
    # mlflow.parentRunId: the parent is in another experiment.  MlflowClient.get_parent_run finds
    # it there; the runs table of 3.17 fetches it by its id and then drops it as a stranger to the
    # experiment, so the points stay flat.
    common = _origin() | {
        "dse.study": _shortened(record.study, _MAX_TAG),
        "dse.study_run": study_run,
        "mlflow.parentRunId": study_run,
    }
    rows = zip(_by_row(params, len(table)), _by_row(metrics, len(table)), _by_row(row_tags, len(table)), strict=True)
    for chosen, measured, described in rows:
        tags = common | {key: _shortened(text, _MAX_TAG) for key, text in described.items() if text}
        tags["mlflow.runName"] = name = _point_name(described, chosen)
        status = "FINISHED" if described.get("dse.status") == "ok" else "FAILED"
        limited = {key: _shortened(text, _MAX_PARAM) for key, text in chosen.items()}
        yield _Point(name, status, limited, measured, tags)


def _point_name(described: Mapping[str, str], chosen: Mapping[str, str]) -> str:
    """Name a point by its scenario, the start of its hash and its active knobs."""
    words = [described.get("dse.scenario", ""), described.get("dse.key", "")[:6]]
    for knob, value in chosen.items():
        is_fraction = re.fullmatch(r"-?\d+\.\d{4,}", value)  # the name wants no 16 digits
        words.append(f"{knob}={float(value):.4g}" if is_fraction else f"{knob}={value}")
    return _shortened(" ".join(word for word in words if word), _MAX_POINT_NAME) or "point"


def _by_row(columns: Mapping[str, list[T | None]], count: int) -> Iterator[dict[str, T]]:
    """Yield one mapping per row, without the missing values."""
    for row in range(count):
        yield {name: value for name, values in columns.items() if (value := values[row]) is not None}


def _texts(column: pd.Series[Any]) -> list[str | None]:
    """Return the values as text, floats with every digit they need, missing ones as None."""
    return [
        None if missing else _text(value)
        for value, missing in zip(column.tolist(), column.isna().tolist(), strict=True)
    ]


def _text(value: Any) -> str:
    if getattr(value, "shape", None) == ():
        value = value.item()  # a numpy scalar in an object column: repr would name its type
    return repr(value) if isinstance(value, float) else str(value)


def _numbers(column: pd.Series[Any]) -> list[float | None]:
    """Return the values as floats, with None for NaN, infinity and missing ones.

    MLflow stores infinity as 1.8e308 and draws NaN as a value: both would spoil every chart.

    Raises:
        TrackingError: a value is no number.
    """
    import pandas as pd

    try:
        values = pd.to_numeric(column).to_numpy(dtype=float, na_value=math.nan).tolist()
    except (TypeError, ValueError) as error:
        raise TrackingError(f"the metric {column.name} holds something that is no number") from error
    return [value if math.isfinite(value) else None for value in values]


def _name(text: str) -> str:
    """Return a name that MLflow takes: letters, digits, ``_-./ :`` and at most 250 characters."""
    allowed = re.sub(r"[^/\w.\- :]", "_", text) or "_"
    if posixpath.normpath(allowed) != allowed or allowed.startswith(("/", ".")):
        allowed = allowed.replace("/", "_").lstrip(".") or "_"  # MLflow refuses paths like a/../b
    return allowed if len(allowed) <= _MAX_NAME else allowed[: _MAX_NAME - 3] + "..."


def _shortened(text: str, limit: int) -> str:
    """Cut a text to ``limit`` characters that a database takes, and show that it was cut."""
    if not text.isascii() or "\0" in text:
        # PostgreSQL stores no NUL, and no database stores half a surrogate pair.
        text = text.replace("\0", "\ufffd").encode("utf-8", "replace").decode()
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _origin() -> dict[str, str]:
    """Return the tags from which the UI fills its columns User and Source."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container whose user id has no name
        user = "unknown"
    return {
        "mlflow.user": user,
        "mlflow.source.name": _shortened(sys.argv[0] or "dse", _MAX_TAG),
        "mlflow.source.type": "LOCAL",
    }


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


# ---------------------------------------------------------------- writing points


def _write_points(target: _Target, points: Iterator[_Point], seen: Callable[[int], None]) -> str:
    """Write the points the fastest way that gives the runs MLflow itself would write.

    Returns:
        ``bulk`` or ``client``.  Without a point there is nothing to prove: ``bulk`` if possible.
    """
    first = list(itertools.islice(points, 1))
    seen(len(first))
    engine, refusal = target.engine, None
    if engine is not None:
        refusal = _layout_refusal(engine) or _probe_refusal(target, engine, first=first)
    if engine is None or refusal:
        if refusal:
            _warn_slow(refusal)
        _write_by_client(target, itertools.chain(first, _counted(points, seen)))
        return "client"
    while chunk := list(itertools.islice(points, _RUNS_PER_TRANSACTION)):
        _write_in_bulk(engine, target.experiment, points=chunk)
        seen(len(chunk))
    return "bulk"


def _counted(points: Iterator[_Point], seen: Callable[[int], None]) -> Iterator[_Point]:
    for point in points:
        yield point
        seen(1)


def _warn_slow(refusal: str) -> None:
    warnings.warn(
        f"MLflow {_mlflow().__version__} is not one the bulk writer knows ({refusal}): points are"
        " logged one by one, about 15 ms each",
        RuntimeWarning,
        stacklevel=4,  # the caller of track
    )


def _write_by_client(target: _Target, points: Iterable[_Point]) -> None:
    """Write points through the public API, three calls each."""
    from mlflow.entities import Metric, Param

    client, experiment_id = target.client, target.experiment.experiment_id
    for point in points:
        run_id = client.create_run(experiment_id, tags=point.tags).info.run_id
        now = _now_ms()
        client.log_batch(
            run_id,
            metrics=[Metric(key, value, now, 0) for key, value in point.metrics.items()],
            params=[Param(key, value) for key, value in point.params.items()],
        )
        client.set_terminated(run_id, point.status)


def _write_in_bulk(engine: Engine, experiment: Any, *, points: list[_Point]) -> list[str]:
    """Insert points into MLflow's tables in one transaction, and return their run ids."""
    from sqlalchemy import insert

    ids = [uuid.uuid4().hex for _ in points]
    rows = _rows(experiment, dict(zip(ids, points, strict=True)))
    with engine.begin() as connection:
        for table, values in rows.items():
            if values:
                connection.execute(insert(_table(table)), values)
    return ids


def _rows(experiment: Any, points: Mapping[str, _Point]) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of the runs per table class, runs first as the others refer to them."""
    now = _now_ms()
    params = [
        {"run_uuid": run, "key": key, "value": value}
        for run, point in points.items()
        for key, value in point.params.items()
    ]
    metrics = [
        {"run_uuid": run, "key": key, "value": value, "timestamp": now, "step": 0, "is_nan": False}
        for run, point in points.items()
        for key, value in point.metrics.items()
    ]
    tags = [
        {"run_uuid": run, "key": key, "value": value}
        for run, point in points.items()
        for key, value in point.tags.items()
    ]
    runs = [_run_row(experiment, run, point) for run, point in points.items()]
    return {
        "SqlRun": runs,
        "SqlParam": params,
        "SqlMetric": metrics,
        "SqlLatestMetric": metrics,  # one value each: the history and the latest are the same
        "SqlTag": tags,
    }


def _run_row(experiment: Any, run_id: str, point: _Point) -> dict[str, Any]:
    """Return the row that MlflowClient.create_run and set_terminated leave for such a run."""
    from mlflow.utils.uri import append_to_uri_path

    now = _now_ms()
    return {
        "run_uuid": run_id,
        "name": point.name,
        "source_type": "UNKNOWN",
        "source_name": "",
        "entry_point_name": "",
        "user_id": point.tags["mlflow.user"],
        "status": point.status,
        "start_time": now,
        "end_time": now,
        "deleted_time": None,
        "source_version": "",
        "lifecycle_stage": "active",
        "artifact_uri": append_to_uri_path(  # type: ignore[no-untyped-call]
            experiment.artifact_location, run_id, "artifacts"
        ),
        "experiment_id": int(experiment.experiment_id),
    }


def _table(name: str) -> Any:
    from mlflow.store.tracking.dbmodels import models

    return getattr(models, name)


def _layout_refusal(engine: Engine) -> str | None:
    """Say in what the tables of this database differ from those the bulk writer fills."""
    from sqlalchemy import inspect

    inspector = inspect(engine)
    for name, known in _LAYOUT.items():
        table = _table(name).__tablename__
        found = {column["name"] for column in inspector.get_columns(table)}
        if found != known:
            return f"table {table} differs in {', '.join(sorted(found ^ known))}"
    return None


def _probe_refusal(target: _Target, engine: Engine, *, first: list[_Point]) -> str | None:
    """Write the first point in bulk; if it does not read back as meant, remove it and say so."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy import delete
    from sqlalchemy.exc import SQLAlchemyError

    try:
        ids = _write_in_bulk(engine, target.experiment, points=first)
    except SQLAlchemyError as error:
        return f"the first point was refused: {type(error).__name__}"
    try:
        if all(_reads_back(target.client, run, point) for run, point in zip(ids, first, strict=True)):
            return None
    except MlflowException:
        pass  # a run that MLflow cannot read is not what was meant either
    with engine.begin() as connection:
        for name in reversed(_LAYOUT):
            table = _table(name)
            connection.execute(delete(table).where(table.run_uuid.in_(ids)))
    return "the first point did not read back as written"


def _reads_back(client: Any, run_id: str, point: _Point) -> bool:
    """Say whether MlflowClient sees exactly the run that was meant."""
    run = client.get_run(run_id)
    history = [len(client.get_metric_history(run_id, key)) for key in point.metrics]
    return bool(
        run.info.status == point.status
        and run.info.run_name == point.name
        and run.info.lifecycle_stage == "active"
        and run.data.params == point.params
        and run.data.metrics == point.metrics
        and run.data.tags == point.tags
        and all(count == 1 for count in history)
    )


def _analyze(engine: Engine | None) -> None:
    """Refresh SQLite's statistics: sorting 10,000 runs by metric takes 3.5 s without, 0.08 s with."""
    if engine is not None and engine.dialect.name == "sqlite":
        with engine.begin() as connection:
            connection.exec_driver_sql("ANALYZE")


# ---------------------------------------------------------------- the server


def _obstacle(uri: str, port: int) -> str | None:
    """Say in one sentence why the UI cannot be served, if so."""
    file = _sqlite_file(uri)
    if file is not None and not file.is_file():
        return f"There is no tracking database at {file}: run a study with tracking first."
    if not _is_sql(uri):
        return f"The MLflow UI needs a database (sqlite:/// or postgresql://), not {_hidden(uri)}."
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError) as error:
            return f"Port {port} of 127.0.0.1 cannot be used ({error}): choose another port."
    return None


def _run_server(uri: str, port: int) -> int:
    """Run MLflow's server until it ends or this process is told to stop; leave none behind.

    The server gets a process group of its own, so that only this process tells it to stop: from
    a terminal its two processes would each get Ctrl-C, and then once more from each other.
    """
    command = [
        *(sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)),
        *("--workers", "1", "--uvicorn-opts", _UVICORN),
    ]
    # By environment, not by argument: a PostgreSQL URI may hold a password, and anyone can list
    # arguments.
    environment = (
        _ENVIRONMENT
        | os.environ
        | {
            "MLFLOW_BACKEND_STORE_URI": uri,
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        }
    )
    command += ["--artifacts-destination", _artifact_root(uri)]
    with _interruptible() as ignore:
        server = subprocess.Popen(command, env=environment, start_new_session=True)
        try:
            code = server.wait()
            print(f"The MLflow server ended by itself (exit code {code}).", file=sys.stderr)
            return code or 1
        except KeyboardInterrupt:
            return 0
        finally:
            ignore()  # a second Ctrl-C must not leave a server behind
            _stop_group(server)


@contextmanager
def _interruptible() -> Iterator[Any]:
    """Let SIGTERM and SIGHUP interrupt like Ctrl-C; yield what makes all three ignored."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    def ignore() -> None:
        for number in before:
            signal.signal(number, signal.SIG_IGN)

    main = threading.current_thread() is threading.main_thread()  # only it may set handlers
    before = {number: signal.signal(number, interrupt) for number in numbers if main}
    try:
        yield ignore
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop_group(server: subprocess.Popen[bytes]) -> None:
    """End the server and what it started: ask, wait up to 10 s, then kill."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(server.pid, number)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            server.poll()  # collects the leader, which otherwise stays in the group for ever
            try:
                os.killpg(server.pid, 0)
            except ProcessLookupError:
                return
            time.sleep(0.05)
