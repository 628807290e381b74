"""The command `store status`: studies of a store, who works on them, how fast, and what failed; from any machine."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import func, select
from sqlalchemy.exc import DBAPIError

from dse.backend import STATUSES
from dse.errors import ConfigError, Problem, Problems, hidden, pairs
from dse.results.report import console
from dse.store.contract import StoreAt
from dse.store.database import StoreError, reader
from dse.store.owner import Owner
from dse.store.result_store import leases, owners, results, studies
from dse.values import Frozen
from dse.values.units import WallSeconds

if TYPE_CHECKING:
    from rich.console import Group
    from sqlalchemy import Engine

_FIRST_LOOK_S = 1.0  # between the two looks that a rate takes
_BAD = ("failed", "invalid")  # not infeasible: rules that points break are no failures


class StatusRequest(Frozen):
    """Words of the command. every_s: between two looks; None: one look."""

    every_s: WallSeconds | None = None


@dataclass(frozen=True)
class Process:
    """A process that leases points. points: in hand. state: alive, ended, or how its heart beats elsewhere."""

    number: int
    study: int
    host: str
    pid: int
    beat: int
    points: int
    state: str


@dataclass(frozen=True)
class StoreSnapshot:
    """A store at a moment [s, of a monotonic clock]. counts: results by study and status."""

    moment: float
    studies: Sequence[tuple[int, str, str]]
    counts: Mapping[int, Counter[str]]
    processes: Sequence[Process]

    def rate(self, study: int, before: StoreSnapshot | None) -> float | None:
        """Results per second of a study since an earlier look; None without one."""
        if before is None or self.moment <= before.moment:
            return None
        fresh = self.counts.get(study, Counter()).total() - before.counts.get(study, Counter()).total()
        return fresh / (self.moment - before.moment)


def status(words: Sequence[str]) -> int:
    """`store status [store=<URL>] [output_dir=outputs] [every=2 s]`: print once, or again and again until Ctrl-C."""
    options = pairs(words, {"store": "auto", "output_dir": "outputs"}, optional=["every"])
    check = Problems()
    request = check.model(StatusRequest, {"every_s": options.get("every")}, path="")
    store_at = check.model(StoreAt, {"name": "status", "url": options["store"]}, path="store")
    check.done()
    assert request is not None
    assert store_at is not None
    url = store_at.database_url(Path(options["output_dir"]))
    engine = reader(url)
    if engine is None:
        raise ConfigError([Problem("output_dir", "holds no results.db", options["output_dir"], "run a study first")])
    try:
        _show(engine, request.every_s)
    except DBAPIError as error:
        raise StoreError(f"{hidden(url)} cannot be read ({error.orig})") from error
    finally:
        engine.dispose()
    return 0


def _show(engine: Engine, every_s: float | None) -> None:
    from rich.live import Live

    first = look(engine)
    if every_s is None:
        before = None
        if first.processes:  # a rate of nobody's work is 0: do not wait for it
            time.sleep(_FIRST_LOOK_S)
            before, first = first, look(engine)
        console().print(tables(first, before))
        return
    with Live(tables(first, None), console=console(), refresh_per_second=4) as live:
        while True:
            time.sleep(every_s)
            now = look(engine)
            live.update(tables(now, first))
            first = now


def look(engine: Engine) -> StoreSnapshot:
    """Look at a store; nothing is written."""
    with engine.connect() as connection:
        named = connection.execute(select(studies.c.id, studies.c.name, studies.c.state).order_by(studies.c.id)).all()
        query = select(results.c.study, results.c.status, func.count()).group_by(results.c.study, results.c.status)
        counts: dict[int, Counter[str]] = {}
        for study, place, count in connection.execute(query):
            counts.setdefault(study, Counter())[dict(enumerate(STATUSES)).get(place, "damaged")] += count
        leased = select(leases.c.owner, func.sum(leases.c.size)).group_by(leases.c.owner)
        points = {owner: int(size) for owner, size in connection.execute(leased)}
        rows = connection.execute(select(owners).order_by(owners.c.id)).all()
    processes = [
        # without the machine's id
        Process(row.id, row.study, row.host.partition("/")[0], row.pid, row.beat, points.get(row.id, 0), _state(row))
        for row in rows
    ]
    return StoreSnapshot(time.monotonic(), [(row.id, row.name, row.state) for row in named], counts, processes)


def _state(row: Any) -> str:
    owner = Owner(row.host, row.boot, row.space, row.pid, row.started)
    return ("ended" if owner.gone else "at work") if owner.is_known else "elsewhere"


def tables(now: StoreSnapshot, before: StoreSnapshot | None) -> Group:
    """Two tables for a terminal: studies, and processes at work."""
    from rich.console import Group
    from rich.table import Table

    shown = Table(box=None, pad_edge=False)
    shown.add_column("study")
    for name in ("results", "results/s", "failed", "in hand", "processes"):
        shown.add_column(name, justify="right")
    shown.add_column("state")
    for study, name, state in now.studies:
        mine = [process for process in now.processes if process.study == study]
        counts, rate = now.counts.get(study, Counter()), now.rate(study, before)
        numbers = f"{counts.total():,}", "" if rate is None or not mine else f"{rate:,.0f}"
        failed, leased = sum(counts[bad] for bad in _BAD), sum(process.points for process in mine)
        # nobody works on it, though it is not finished
        text = "interrupted" if state == "running" and not mine else state
        shown.add_row(f"{study} {name}", *numbers, f"{failed:,}", f"{leased:,}", str(len(mine)), text)
    if not now.processes:
        return Group(shown, "no process is at work")
    beats = {process.number: process.beat for process in before.processes} if before else {}
    listed = Table(box=None, pad_edge=False)
    for name in ("process", "host", "pid", "study"):
        listed.add_column(name)
    listed.add_column("points in hand", justify="right")
    listed.add_column("state")
    for process in now.processes:
        state = process.state
        # its beat has changed between the looks
        if state == "elsewhere" and beats.get(process.number, process.beat) != process.beat:
            state = "at work"
        names = str(process.number), process.host, str(process.pid), str(process.study)
        listed.add_row(*names, f"{process.points:,}", state)
    return Group(shown, "", listed)
