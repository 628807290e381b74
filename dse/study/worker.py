"""The command `store worker`: a process that helps with studies of a shared store, without Dask and without a client.

It takes the question of a study from the store, plans it again with its own code and configuration, and evaluates what
nobody else has in hand. Its results are recorded as those of the study; tables and figures are for the client, who
typed the study's command. Points that a search asks for one after the other are known to its client alone, so such
scenarios are passed by.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dse.errors import ConfigError, Problem, Problems, pairs
from dse.errors.parsing import parse_json
from dse.errors.terminal import bar
from dse.evaluation.evaluators import Evaluator, ExecutorSettings
from dse.evaluation.workers import SignalInterrupt, Stop, stoppable
from dse.results.provenance import code_version, differences
from dse.store.contract import StoreAt
from dse.store.database import is_missing
from dse.store.result_store import Store
from dse.study import resume
from dse.study.plan_again import Present, plan_stored
from dse.study.run import finite_points
from dse.values import Frozen
from dse.values.units import WallSeconds, typed_integer

if TYPE_CHECKING:
    from sqlalchemy import Row

_LOOK_S = 2.0  # between looks for studies


class WorkerRequest(Frozen):
    """Words of the command. wait_s: that it waits for a study to help with; then it ends."""

    wait_s: WallSeconds = 60.0


def worker(words: Sequence[str]) -> int:
    """`store worker store=<URL> [study=] [jobs=1] [wait=60 s] [config_dir=] [command=]`: help until nothing is left."""
    defaults = {"store": "", "jobs": "1", "wait": "60 s"}
    options = pairs(words, defaults, optional=["study", "config_dir", "command"])
    store_at, executor, request = _request(options)
    present = Present.of(options)
    url = store_at.database_url(Path("outputs"))
    done: set[tuple[int, int]] = set()  # (study, results before its last change): a changed study is helped with again
    with stoppable() as stop:
        until = time.monotonic() + request.wait_s
        _wait_for_file(url, until, stop)
        store = Store(url, patience_s=store_at.patience_s)
        notice = f"{store.database}: helping with its studies; ends {request.wait_s:g} s after the last one"
        print(notice, file=sys.stderr)
        while not stop():
            for row in resume.running(store, options.get("study")):
                if (row.id, row.before) not in done and not stop():
                    _help(store, row, executor, present, stop)
                    done.add((row.id, row.before))
                    until = time.monotonic() + request.wait_s  # waiting begins after the last study
            if time.monotonic() >= until:
                break
            time.sleep(min(_LOOK_S, max(0.0, until - time.monotonic())))
        store.database.close()
        if stop():
            raise SignalInterrupt(stop.number, "interrupted; what was evaluated is kept")
    return 0


def _wait_for_file(url: str, until: float, stop: Stop) -> None:
    """Wait for an SQLite file, which the client makes. Raises ConfigError if it does not come, and SignalInterrupt."""
    while is_missing(url):
        if stop():
            raise SignalInterrupt(stop.number, "interrupted; no study was found")
        if time.monotonic() >= until:
            way_out = "start the study first, or wait longer for it (wait=)"
            raise ConfigError([Problem("store", "is a file that is not there", url, way_out)])
        time.sleep(min(_LOOK_S, max(0.0, until - time.monotonic())))


def _request(options: Mapping[str, str]) -> tuple[StoreAt, ExecutorSettings, WorkerRequest]:
    check = Problems()
    store_at = check.model(StoreAt, {"name": "worker", "url": options["store"]}, path="store")
    executor = check.model(ExecutorSettings, {"name": "worker", "jobs": typed_integer(options["jobs"])}, path="")
    request = check.model(WorkerRequest, {"wait_s": options["wait"]}, path="")
    check.done()
    assert store_at is not None
    assert executor is not None
    assert request is not None
    return store_at, executor, request


def _help(store: Store, row: Row[Any], executor: ExecutorSettings, present: Present, stop: Stop) -> None:
    """Evaluate what is left of a study; one that cannot be helped with is told and passed by."""
    label = f"study {row.id} ({row.name})"
    # other code would record other results under the same keys
    if wrong := differences(code_version(), code_version(parse_json(row.provenance, "provenance"))):
        print(f"{label} is passed by: here {wrong}", file=sys.stderr)
        return
    try:
        planned = plan_stored(row, present)
        session = resume.join(store, row, planned)
    except ConfigError as error:
        print(f"{label} is passed by: {'; '.join(map(str, error.problems))}", file=sys.stderr)
        return
    parts = [planned, *planned.probes.values()]
    sizes = [space.size(part.settings.budget.trials) for part in parts for space in part.spaces.values()]
    if None in sizes:
        print(f"{label} has scenarios whose points only its client knows, as a search asks for them", file=sys.stderr)
    settings = planned.settings.executor.model_copy(update={"jobs": executor.jobs})  # those of this machine
    try:
        with bar(label, sum(size or 0 for size in sizes)) as advance:
            evaluator = Evaluator(planned.spec, settings, session, advance, stop)
            for part in parts:
                for _ in evaluator.results(finite_points(part, evaluator)):
                    pass  # results are recorded on the way
    except SignalInterrupt:  # the caller sees it by `stop`
        return
    finally:
        session.leave()
