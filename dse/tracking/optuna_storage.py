"""Optuna's storage as a view of finished study runs, for optuna-dashboard and other readers.

One Optuna study per scenario of a study run, `<study>/<time>/<scenario>`: the points are its trials, COMPLETE with the
values of the objectives, or PRUNED with the reason where there are none. Constraints tell which are feasible, as in a
search (`dse.search.constraints`): samplers ignore trials that FAIL. Trials present already, by their key, are
not written again.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from dse.errors import hidden
from dse.results.output_files import plain
from dse.results.run_folder import Outputs
from dse.results.selection import NUMBER, SelectionRule, shown_rows
from dse.store.owner import lock_file
from dse.study.settings import constraints_of

_ABOUT = ("key", "status", "reason", "engine", "on_front")  # of a row, as attributes of its trial


class StorageError(RuntimeError):
    """Optuna's storage could not take a study; the study and its results are not affected."""


@dataclass(frozen=True)
class _TrialProperties:
    """Properties that all trials of a study run share: distributions by knob, goals by objective, the section `study`
    of its configuration, time of the end.
    """

    distributions: Mapping[str, Any]
    goals: Mapping[str, str]
    study: Mapping[str, Any]
    time: datetime


def show(folder: Path, storage: str, rule: SelectionRule, seen: Callable[[int], None] = lambda count: None) -> int:
    """Write the points of a finished study run that the storage lacks, as trials, and return their number.

    storage: an Optuna storage URL, or the path of a journal that ends in `.log`, by far the faster. seen: callback of
    progress, in points. Raises StorageError.
    """
    try:
        with _quiet_optuna(), _write_lock(storage):
            opened = _open(storage)
            try:
                return _write_trials(Outputs(folder), opened, rule=rule, seen=seen)
            finally:
                _close(opened)
    except Exception as error:  # whatever the storage's libraries raise, a view must not stop a study
        first = (str(error).strip().splitlines() or [""])[0]
        message = f"{type(error).__name__}: {first}"[:400]
        raise StorageError(f"Optuna could not show {folder.name} in {hidden(storage)} ({hidden(message)})") from error


def optuna_studies(outputs: Outputs) -> dict[str, Any]:
    """Studies of Optuna with all points of a finished run as trials, in memory, by scenario."""
    import optuna

    storage, summary = optuna.storages.InMemoryStorage(), outputs.read_json("summary")
    with _quiet_optuna():
        _write_trials(outputs, storage, rule=SelectionRule(points="all"), seen=lambda count: None)
        prefix = f"{summary['study']}/{outputs.folder.name}/"
        names = [study.study_name for study in storage.get_all_studies()]
        return {name.removeprefix(prefix): optuna.load_study(study_name=name, storage=storage) for name in names}


@contextmanager
def _quiet_optuna() -> Iterator[None]:
    """Optuna without what it writes about new studies and about experimental functions."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        yield


@contextmanager
def _write_lock(storage: str) -> Iterator[None]:
    """Hold the lock of writers of views to a file; others wait. A server has no such lock."""
    match = re.fullmatch(r"(?:sqlite(?:\+\w+)?:///)?([^?:]+)(?:\?.*)?", storage)
    if match is None:
        yield
        return
    path = Path(match[1]).resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    with lock_file(path.with_name(f"{path.name}.sync")):
        yield


def _open(storage: str) -> Any:
    from optuna.storages import JournalStorage, RDBStorage
    from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

    if storage.endswith(".log"):
        # Absolute and with this lock: a relative path, or a process that dies with the default lock, locks it for ever.
        path = Path(storage).resolve()
        _mend(path)
        return JournalStorage(JournalFileBackend(str(path), lock_obj=JournalFileOpenLock(str(path))))
    _check_is_not_mlflows(storage)
    opened = RDBStorage(storage)
    if opened.engine.dialect.name == "sqlite":
        from sqlalchemy import event

        event.listen(opened.engine, "connect", _set_pragmas)
        opened.engine.dispose()  # connections opened so far lack the settings
    return opened


def _check_is_not_mlflows(storage: str) -> None:
    """Refuse MLflow's database: both keep schema versions in a table of the same name, and would corrupt each other."""
    from sqlalchemy import Engine, create_engine, inspect

    if storage.startswith("postgresql"):
        from dse.store import postgres

        postgres.watch(Engine)  # because Optuna makes its own engine
    engine = create_engine(storage)
    try:
        if inspect(engine).has_table("latest_metrics"):  # a table that only MLflow has
            raise StorageError("it holds MLflow's runs, and Optuna needs a database of its own")
    finally:
        engine.dispose()


def _close(storage: Any) -> None:
    """Close the connections of a database."""
    if hasattr(storage, "engine"):
        storage.remove_session()
        storage.engine.dispose()


def _mend(path: Path) -> None:
    """Remove an incomplete last line: the next one would be joined to it, and the journal would be unreadable."""
    if path.exists() and (text := path.read_bytes()) and not text.endswith(b"\n"):
        path.write_bytes(text[: text.rfind(b"\n") + 1])


def _set_pragmas(connection: Any, _record: Any) -> None:
    """Wait for other writers up to 60 s, and do not sync every trial to disk, as this is only a view."""
    connection.execute("PRAGMA busy_timeout=60000")
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=NORMAL")


def _write_trials(outputs: Outputs, storage: Any, *, rule: SelectionRule, seen: Callable[[int], None]) -> int:
    summary = outputs.read_json("summary")
    parts = [part.to_pandas() for part in shown_rows(outputs.results, rule)]
    if not parts:
        return 0
    import pandas as pd

    table = pd.concat(parts).sort_values(NUMBER)  # in the order of the table: what matters most came first
    knobs = [path for path in summary["knobs"] if path in table]
    # Optuna keeps local times without a zone
    time = datetime.fromisoformat(outputs.read_json("provenance")["time"]).astimezone().replace(tzinfo=None)
    distributions = {path: _distribution(table[path]) for path in knobs}
    shared = _TrialProperties(distributions, summary["goals"], outputs.read_config()["study"], time)
    count = 0
    for scenario, rows in table.groupby("scenario", sort=False):
        study = _study(storage, f"{summary['study']}/{outputs.folder.name}/{scenario}", shared)
        there = {trial.user_attrs.get("key") for trial in study.get_trials(deepcopy=False)}  # read only
        fresh = [row for row in rows.to_dict("records") if row["key"] not in there]
        seen(len(rows) - len(fresh))
        for row in fresh:
            study.add_trial(_trial(row, shared))
            seen(1)
        count += len(fresh)
    return count


def _study(storage: Any, name: str, shared: _TrialProperties) -> Any:
    import optuna

    directions: list[Any] = list(shared.goals.values())
    study = optuna.create_study(storage=storage, study_name=name, directions=directions, load_if_exists=True)
    if study.metric_names is None:
        study.set_metric_names(list(shared.goals))
    return study


def _trial(row: Mapping[str, Any], shared: _TrialProperties) -> Any:
    """Convert a row of the table to a finished trial, without parameters for inactive knobs."""
    from optuna.trial import FrozenTrial, TrialState

    params = {path: plain(row[path]) for path in shared.distributions if not _is_missing(row[path])}
    constraints = constraints_of(shared.study, row, shared.goals)
    has_result = constraints["result"] <= 0
    trial = FrozenTrial(
        number=-1,  # the storage counts
        trial_id=-1,
        state=TrialState.COMPLETE if has_result else TrialState.PRUNED,
        value=None,
        values=[float(row[name]) for name in shared.goals] if has_result else None,
        datetime_start=shared.time,
        datetime_complete=shared.time,
        params=params,
        distributions={path: shared.distributions[path] for path in params},
        user_attrs={name: plain(row[name]) for name in _ABOUT if not _is_missing(row[name])},
        system_attrs={},
        intermediate_values={},
    )
    for name, beyond in constraints.items():
        trial.set_constraint(name, beyond)
    return trial


def _distribution(column: Any) -> Any:
    """Build Optuna's distribution of the evaluated values of a knob."""
    from optuna import distributions

    values = [plain(value) for value in column.dropna().unique()]
    if not values or any(isinstance(value, str | bool) for value in values):
        # None: the knob counts in no row
        return distributions.CategoricalDistribution(sorted(values, key=str) or [None])
    kind = distributions.IntDistribution if isinstance(values[0], int) else distributions.FloatDistribution
    return kind(min(values), max(values))


def _is_missing(value: Any) -> bool:
    import pandas as pd

    return value is pd.NA or value is None or (isinstance(value, float) and math.isnan(value))
