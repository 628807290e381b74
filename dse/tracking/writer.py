"""Writer of points as runs of MLflow, identical to those that MLflow itself would write.

*Bulk*: through MLflow's own table classes (SQLite and PostgreSQL), well below 1 ms a run. *Client*: through
`MlflowClient` (any URI), 10 to 100 ms a run, three calls each. Both give the same runs; the bulk writer verifies it
on the first point before it goes on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, islice
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

from dse.tracking.database import TrackingStore
from dse.tracking.points import Point

if TYPE_CHECKING:
    from sqlalchemy import Engine

_RUNS_PER_TRANSACTION: Final = 2000  # a transaction that others need not wait for long
_THREADS: Final = 4  # concurrent calls to a server

# The columns that the bulk writer fills, per table class. Other columns in the database mean a version of MLflow that
# this writer does not support.
_METRIC: Final = ("key", "value", "timestamp", "step", "is_nan", "run_uuid")
_LAYOUT: Final = {
    "SqlRun": (
        *("run_uuid", "name", "experiment_id", "artifact_uri", "user_id", "status", "lifecycle_stage"),
        *("start_time", "end_time", "deleted_time"),
        *("source_type", "source_name", "source_version", "entry_point_name"),
    ),
    "SqlParam": ("key", "value", "run_uuid"),
    "SqlMetric": _METRIC,
    "SqlLatestMetric": _METRIC,
    "SqlTag": ("key", "value", "run_uuid"),
}


@dataclass(frozen=True)
class PointDestination:
    """Destination of points: an experiment of a store, below a study run. time_ms: start and end of their runs."""

    store: TrackingStore
    experiment: Any
    study_run: str
    time_ms: int


@dataclass(frozen=True)
class WriteOutcome:
    """Number of points written now, and the way: `bulk`, or `client` for a reason."""

    count: int
    how: str
    reason: str = ""


def write(place: PointDestination, points: Iterable[Point], seen: Callable[[int], None]) -> WriteOutcome:
    """Write the points that the store lacks. seen: called for every point, present before or written now."""
    there = _there(place)
    counted = _skip_written(points, there, seen)
    first = list(islice(counted, 1))  # alone, to see whether the bulk writer can be trusted
    engine = place.store.engine
    if engine is None:
        return _by_client(place, chain(first, counted), there=there, seen=seen)
    refusal = _layout_refusal(engine) or _probe_refusal(place, engine, first)
    if refusal:
        return _by_client(place, chain(first, counted), there=there, seen=seen, reason=refusal)
    seen(len(first))
    count = len(first)
    while chunk := list(islice(counted, _RUNS_PER_TRANSACTION)):
        _in_bulk(place, engine, chunk)
        seen(len(chunk))
        count += len(chunk)
    _analyze(engine)
    return WriteOutcome(count, "bulk")


Identity = tuple[str, str]


def _skip_written(points: Iterable[Point], there: dict[Identity, str], seen: Callable[[int], None]) -> Iterator[Point]:
    for point in points:
        if there.get((point.scenario, point.key)) == "":  # complete
            seen(1)
        else:
            yield point


def _there(place: PointDestination) -> dict[Identity, str]:
    """Look up the points of the study run in MLflow, by scenario and key: '' if complete, else the run to complete.

    Points deleted in MLflow count, so that they stay deleted.
    """
    if place.store.engine is not None:
        return _there_by_sql(place, place.store.engine)
    from mlflow.entities import ViewType

    runs: dict[Identity, str] = {}
    token = None
    while token is not None or not runs:  # the first page has no token
        page = place.store.client.search_runs(
            [place.experiment.experiment_id],
            f"tags.`mlflow.parentRunId` = '{place.study_run}'",
            run_view_type=ViewType.ALL,
            max_results=1000,
            page_token=token,
        )
        for run in page:
            is_complete = run.info.status != "RUNNING"  # left half written
            runs[run.data.tags["dse.scenario"], run.data.tags["dse.point_key"]] = "" if is_complete else run.info.run_id
        token = page.token
        if not token:
            break
    return runs


def _there_by_sql(place: PointDestination, engine: Engine) -> dict[Identity, str]:
    """Look up the same in the tables, because the client takes a second for a thousand runs."""
    from sqlalchemy import select

    run, tag = _table("SqlRun"), _table("SqlTag")
    run_ids = select(tag.run_uuid).where(tag.key == "mlflow.parentRunId", tag.value == place.study_run)
    with engine.connect() as connection:
        status: dict[str, str] = _pairs(connection, select(run.run_uuid, run.status).where(run.run_uuid.in_(run_ids)))
        tags = select(tag.run_uuid, tag.value).where(tag.run_uuid.in_(run_ids))
        scenarios = _pairs(connection, tags.where(tag.key == "dse.scenario"))
        keys = _pairs(connection, tags.where(tag.key == "dse.point_key"))
    return {(scenarios[run_id], keys[run_id]): run_id if status[run_id] == "RUNNING" else "" for run_id in status}


def _pairs(connection: Any, query: Any) -> dict[str, str]:
    return {row[0]: row[1] for row in connection.execute(query)}


# ---------------------------------------------------------------- the public way


def _by_client(
    place: PointDestination,
    points: Iterable[Point],
    *,
    there: dict[Identity, str],
    seen: Callable[[int], None],
    reason: str = "",
) -> WriteOutcome:
    """Write points through the public API, several at a time to a server."""

    def write_point(point: Point) -> None:
        _write_one(place, point, there.get((point.scenario, point.key)))

    count = 0
    with ThreadPoolExecutor(_THREADS if place.store.engine is None else 1) as pool:  # a file has one writer
        waiting: deque[Future[None]] = deque()
        try:
            for point in points:
                waiting.append(pool.submit(write_point, point))
                if len(waiting) >= 2 * _THREADS:  # results are taken in order, and few are held
                    waiting.popleft().result()
                    seen(1)
                count += 1
            while waiting:
                waiting.popleft().result()
                seen(1)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return WriteOutcome(count, "client", reason)


def _write_one(place: PointDestination, point: Point, begun: str | None) -> None:
    """Write a point. begun: its run if it was left half written."""
    from mlflow.entities import Metric, Param

    client, time_ms = place.store.client, place.time_ms
    run_id = begun or client.create_run(place.experiment.experiment_id, start_time=time_ms, tags=point.tags).info.run_id
    client.log_batch(
        run_id,
        metrics=[Metric(key, value, time_ms, 0) for key, value in point.metrics.items()],
        params=[Param(key, value) for key, value in point.params.items()],
    )
    client.set_terminated(run_id, point.status, end_time=time_ms)


# ---------------------------------------------------------------- the fast way


def _in_bulk(place: PointDestination, engine: Engine, points: list[Point]) -> list[str]:
    """Insert points into MLflow's tables in one transaction. Returns their run ids.

    They are inserted in the order of the ids, so that the indexes grow in few places.
    """
    named = sorted(((point.run_id(place.study_run), point) for point in points), key=itemgetter(0))
    with engine.begin() as connection:
        for name, values in _rows(place, named).items():
            if values:
                _insert(connection, name, values)
    return [run_id for run_id, _ in named]


def _insert(connection: Any, name: str, values: list[tuple[Any, ...]]) -> None:
    """Insert rows of a table class directly by the driver, because SQLAlchemy's mapping per row costs more."""
    columns, table = ", ".join(_LAYOUT[name]), _table(name).__tablename__
    if connection.dialect.driver == "psycopg":  # COPY: a stream of rows in one statement
        with connection.connection.cursor() as cursor, cursor.copy(f"COPY {table} ({columns}) FROM STDIN") as copy:
            for row in values:
                copy.write_row(row)
        return
    mark = {"qmark": "?", "format": "%s", "pyformat": "%s"}[connection.dialect.paramstyle]
    marks = ", ".join([mark] * len(_LAYOUT[name]))
    connection.exec_driver_sql(f"INSERT INTO {table} ({columns}) VALUES ({marks})", values)


def _rows(place: PointDestination, points: list[tuple[str, Point]]) -> dict[str, list[tuple[Any, ...]]]:
    """Build the rows of the runs per table class, runs first as the others refer to them."""
    now = place.time_ms
    metrics = [(key, value, now, 0, False, run) for run, point in points for key, value in point.metrics.items()]
    return {
        "SqlRun": [_run_row(place, run, point) for run, point in points],
        "SqlParam": [(key, value, run) for run, point in points for key, value in point.params.items()],
        "SqlMetric": metrics,
        "SqlLatestMetric": metrics,  # one value each: the history and the latest are the same
        "SqlTag": [(key, value, run) for run, point in points for key, value in point.tags.items()],
    }


def _run_row(place: PointDestination, run_id: str, point: Point) -> tuple[Any, ...]:
    """Build the row that MlflowClient.create_run and set_terminated would leave for such a run."""
    from mlflow.utils.uri import append_to_uri_path

    experiment = place.experiment
    artifacts = append_to_uri_path(experiment.artifact_location, run_id, "artifacts")  # type: ignore[no-untyped-call]
    return (
        *(run_id, point.name, int(experiment.experiment_id), artifacts, point.tags["mlflow.user"]),
        *(point.status, "active", place.time_ms, place.time_ms, None, "UNKNOWN", "", "", ""),
    )


def _table(name: str) -> Any:
    from mlflow.store.tracking.dbmodels import models

    return getattr(models, name)


def _layout_refusal(engine: Engine) -> str:
    """Describe the first difference of the database's tables from `_LAYOUT`; empty if there is none."""
    from sqlalchemy import inspect

    inspector = inspect(engine)
    for name, expected in _LAYOUT.items():
        table = _table(name).__tablename__
        actual = {column["name"] for column in inspector.get_columns(table)}
        if actual != set(expected):
            return f"table {table} differs in {', '.join(sorted(actual ^ set(expected)))}"
    return ""


def _probe_refusal(place: PointDestination, engine: Engine, first: list[Point]) -> str:
    """Write the first point in bulk; if it does not read back as intended, remove it and return the reason."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy import delete
    from sqlalchemy.exc import SQLAlchemyError

    try:
        ids = _in_bulk(place, engine, first)
    except (SQLAlchemyError, engine.dialect.loaded_dbapi.Error) as error:
        return f"the first point was refused: {type(error).__name__}"
    try:
        if all(_reads_back(place.store.client, run, point) for run, point in zip(ids, first, strict=True)):
            return ""
    except MlflowException:
        pass  # a run that MLflow cannot read is not as intended either
    with engine.begin() as connection:
        for name in reversed(_LAYOUT):  # rows that refer to a run before the run
            table = _table(name)
            connection.execute(delete(table).where(table.run_uuid.in_(ids)))
    return "the first point did not read back as written"


def _reads_back(client: Any, run_id: str, point: Point) -> bool:
    """Return whether MlflowClient reads exactly the intended run."""
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


def _analyze(engine: Engine) -> None:
    """Refresh the statistics, without which SQLite takes a hundred seconds to sort 50,000 runs by a metric."""
    if engine.dialect.name == "sqlite":
        with engine.begin() as connection:
            connection.exec_driver_sql("ANALYZE")
