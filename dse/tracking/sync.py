"""Synchronization of a finished study run into MLflow: missing and incomplete runs are written, complete ones kept."""

from __future__ import annotations

import getpass
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Final

from dse.errors import hidden
from dse.results.decisions import metrics_of_winners
from dse.results.selection import SelectionRule, shown_rows
from dse.store.owner import Owner, me
from dse.tracking.database import (
    TrackingError,
    TrackingStore,
    artifact_root,
    explain_failures,
    is_sql,
    sqlite_file,
    write_lock,
)
from dse.tracking.points import mlflow_name, points, truncate
from dse.tracking.shared_views import BEST, FRONT, RUNS, PointColumns, points_view, runs_view, set_view
from dse.tracking.study import StudyFolder
from dse.tracking.writer import PointDestination, WriteOutcome, write

_AMOUNTS: Final = ("none", "selected", "all")  # of points, ascending; points are never removed


@dataclass(frozen=True)
class SyncOutcome:
    """Outcome of `sync` for a study run.

    Attributes:
        uri: the tracking store, absolute and without its password.
        run_id: the study run.
        num_points: point runs written now.
        how: `bulk` or `client`; empty if everything was present.
        reason: why not in bulk, where that was expected.
        amount: points that are shown: `all`, `selected` or `none`.
    """

    uri: str
    run_id: str
    num_points: int = 0
    how: str = ""
    reason: str = ""
    amount: str = ""


def sync(
    folder: Path,
    store: TrackingStore,
    rule: SelectionRule,
    *,
    seen: Callable[[int], None] = lambda count: None,
    wait_for_files: Callable[[], object] = lambda: None,
) -> SyncOutcome:
    """Write the study run of a folder into MLflow, as far as it is missing there.

    seen: callback of progress, in points. wait_for_files: called before the files are logged; it returns once the
    claims and figures are written.

    Meanwhile the study run is RUNNING; it ends FINISHED only when everything is written, otherwise FAILED, or KILLED
    when told to stop, and the next call completes it.

    Raises:
        TrackingError: MLflow or its database failed, or somebody deleted the experiment there.
    """
    study = StudyFolder(folder)
    with explain_failures(f"show {folder.name} in", store.uri), write_lock(store):
        amount = rule.amount(study.num_rows)
        experiment = _experiment(store, f"dse/{study.study}")
        run = _study_run(store, experiment, study.identity)
        if run is not None and _is_whole(run, amount):
            return SyncOutcome(hidden(store.uri), run.info.run_id)
        run_id = _start_run(store, experiment, study, run)
        with _end_run(store.client, run_id, study.times_ms[1]):
            written = _points(store, study, run_id, rule=rule, seen=seen)
            _describe(store, run_id, study)
            _set_views(store, run_id, study)
            wait_for_files()  # points are written while figures are drawn
            _keep(store, run_id, study)
            store.client.set_tag(run_id, "dse.points", amount)  # last: it shows that all of this is written
    return SyncOutcome(hidden(store.uri), run_id, written.count, written.how, written.reason, amount)


def reap(store: TrackingStore) -> int:
    """Mark study runs KILLED that a dead process left RUNNING, and return their number. Raises TrackingError."""
    killed = 0
    with explain_failures("look for study runs of dead processes in", store.uri):
        ours = [
            experiment.experiment_id
            for experiment in store.client.search_experiments(filter_string="name LIKE 'dse/%'")
        ]
        running = "attributes.status = 'RUNNING' and tags.`dse.owner` LIKE '{%'"
        for run in store.client.search_runs(ours, running) if ours else ():
            if (owner := Owner.of(run.data.tags["dse.owner"])) is not None and owner.gone:
                store.client.set_tag(run.info.run_id, "dse.killed", "the process that wrote it died; sync completes it")
                store.client.set_terminated(run.info.run_id, "KILLED")
                killed += 1
    return killed


def _experiment(store: TrackingStore, name: str) -> Any:
    """Return the MLflow experiment of this name, created with an absolute artifact folder if absent.

    Raises TrackingError if the experiment was deleted in MLflow, which keeps its name.
    """
    from mlflow.exceptions import MlflowException

    client = store.client
    if client.get_experiment_by_name(name) is None:
        try:
            # A server knows its own folder; a database would take the working directory of the process
            # that opens it next. The kind makes the UI open on the list of runs.
            client.create_experiment(
                name,
                artifact_location=artifact_root(store.uri) if is_sql(store.uri) else None,
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


def _study_run(store: TrackingStore, experiment: Any, identity: str) -> Any:
    """Find the study run of a folder, deleted or not; None if there is none."""
    from mlflow.entities import ViewType

    chosen = f"tags.`dse.run` = '{identity}'"
    # deleted ones, too: what a person deleted is not written again
    runs = store.client.search_runs([experiment.experiment_id], chosen, run_view_type=ViewType.ALL, max_results=1)
    return runs[0] if runs else None


def _is_whole(run: Any, amount: str) -> bool:
    """Return whether a study run shows as many points as requested. A deleted run counts, so that it stays deleted."""
    shown = run.data.tags.get("dse.points", "")
    is_finished = run.info.status == "FINISHED" and shown in _AMOUNTS
    return run.info.lifecycle_stage == "deleted" or (is_finished and _AMOUNTS.index(shown) >= _AMOUNTS.index(amount))


def _start_run(store: TrackingStore, experiment: Any, study: StudyFolder, run: Any) -> str:
    """Create or reopen the study run, RUNNING and owned by this process. Returns its id."""
    client = store.client
    mine = {"dse.owner": me().text}
    if run is None:
        tags = {"dse.run": study.identity, "mlflow.user": _user(), **mine}
        created = client.create_run(
            experiment.experiment_id, start_time=study.times_ms[0], run_name=study.run_name(), tags=tags
        )
        return str(created.info.run_id)
    run_id = str(run.info.run_id)
    for key, value in mine.items():
        client.set_tag(run_id, key, value)
    if "dse.killed" in run.data.tags:
        client.delete_tag(run_id, "dse.killed")
    client.update_run(run_id, status="RUNNING")
    return run_id


def _describe(store: TrackingStore, run_id: str, study: StudyFolder) -> None:
    """Log numbers, curves, params, tags and description of the study run. Idempotent."""
    from mlflow.entities import Metric, Param, RunTag

    time_ms = study.times_ms[1]
    store.client.log_batch(
        run_id,
        metrics=[
            Metric(curve.name, value, time_ms, step)
            for curve in study.curves()
            for step, value in zip(curve.steps, curve.values, strict=True)
        ],
        params=[Param(mlflow_name(key), value) for key, value in study.params().items()],
        tags=[RunTag(key, value) for key, value in study.tags().items()],
    )


def _set_views(store: TrackingStore, run_id: str, study: StudyFolder) -> None:
    """Save the views of this study run's points, and of the study runs."""
    summary = study.summary
    metrics = [name for name in summary["shown"] if name in summary["units"]]
    gain = summary.get("gain") if len(summary.get("searched", ())) > 1 else None  # it is comparable between scenarios
    experiment = _experiment(store, f"dse/{study.study}/points").experiment_id
    columns = PointColumns(study.knobs, summary["goals"], metrics, None if gain is None else (gain, "maximize"))
    for key in (BEST, FRONT):
        set_view(store.client, experiment, key, points_view(run_id, columns, front=key == FRONT))
    runs = runs_view([curve.name for curve in study.curves()])
    set_view(store.client, _experiment(store, f"dse/{study.study}").experiment_id, RUNS, runs)


def _keep(store: TrackingStore, run_id: str, study: StudyFolder) -> None:
    """Log the files of the study run."""
    for file in _files(study.folder, sqlite_file(store.uri)):
        inside = file.parent.relative_to(study.folder).as_posix()
        store.client.log_artifact(run_id, str(file), None if inside == "." else inside)


def _points(
    store: TrackingStore, study: StudyFolder, run_id: str, *, rule: SelectionRule, seen: Callable[[int], None]
) -> WriteOutcome:
    """Write the points below their study run."""
    place = PointDestination(store, _experiment(store, f"dse/{study.study}/points"), run_id, study.times_ms[1])
    # mlflow.parentRunId: the parent is in another experiment. MlflowClient.get_parent_run finds it there; the runs
    # table of 3.17 fetches it by its id and then drops it as it is in another experiment, so the points stay flat.
    shared = {"mlflow.user": _user(), "mlflow.parentRunId": run_id}
    knobs = {path: path in study.knobs for path in study.summary["knobs"]}
    metrics = list(study.summary["units"])
    batches = (
        points(table, knobs, metrics, shared=shared, may_win=study.contest.may_win(table).tolist())
        for table in shown_rows(study.results, rule)
    )
    winners = metrics_of_winners(study.summary)
    with_intervals = (
        replace(point, metrics={**point.metrics, **winners[point.key]}) if point.key in winners else point
        for point in chain.from_iterable(batches)
    )
    return write(place, with_intervals, seen)


@contextmanager
def _end_run(client: Any, run_id: str, time_ms: int) -> Iterator[None]:
    """End the study run in any case: FINISHED, FAILED, or KILLED when told to stop."""
    try:
        yield
        client.set_terminated(run_id, "FINISHED", end_time=time_ms)
    except BaseException as error:
        stopped = isinstance(error, KeyboardInterrupt | SystemExit)
        with suppress(Exception):  # the first error is the one to report
            client.set_terminated(run_id, "KILLED" if stopped else "FAILED", end_time=time_ms)
        raise


def _files(folder: Path, database: Path | None) -> list[Path]:
    """List the files of a folder.

    Symbolic links are left out, as `latest` points back at the folder itself. So are MLflow's own files if its database
    is in the folder, as the artifacts would contain themselves.
    """
    files = []
    for parent, _, names in os.walk(folder):  # does not enter linked folders
        for file in (Path(parent, name) for name in names):
            is_mlflows = database is not None and (
                file.is_relative_to(database.parent / "mlartifacts")
                or (file.parent == database.parent and file.name.startswith(database.name))
            )
            if file.is_file() and not file.is_symlink() and not is_mlflows:
                files.append(file)
    return sorted(files)


def _user() -> str:
    try:
        return truncate(getpass.getuser(), 250)
    except (KeyError, OSError):  # a container whose user id has no name
        return "unknown"
