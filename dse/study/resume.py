"""Study that a command means: a new one, or one that was begun before and goes on.

A study is defined by its question: base designs, space, search, objectives and backend. The same question goes on
where it was left; a changed one is a study of its own, which one line says, or goes on with the earlier one if told to.
"""

from __future__ import annotations

import itertools
import json
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import func, insert, select, update

from dse.errors import ConfigError, Problem, redact
from dse.errors.parsing import parse_json
from dse.results.provenance import changes
from dse.store.contract import Context, Session
from dse.store.database import StoreError
from dse.store.owner import Owner
from dse.store.result_store import Store, owners, studies
from dse.store.session import Hold, StoreSession
from dse.study.plan import Plan
from dse.values import LABELS, leaves

if TYPE_CHECKING:
    from sqlalchemy import Connection, Row, Select

_BYTES_PER_POINT = 1000  # of disk: some 250 in the store and its log, about 100 in the table, the rest to spare
_SHOWN = 3  # differences that are reported one by one


@dataclass(frozen=True)
class Begun:
    """A study in the store. done: results it had when it began. before: results of an earlier question; those that fit
    count as well. resumed: whether it existed before.

    earlier: provenance of the runs that made those results.
    """

    store: Store
    study: int
    session: StoreSession
    done: int
    before: int
    resumed: bool
    earlier: tuple[Mapping[str, Any], ...] = ()

    def __str__(self) -> str:
        flight = f", {self.session.lost} were in flight" if self.session.lost else ""
        joined = "" if self.session.alone else "; another process is at work on it, too"
        versions = ", ".join(dict.fromkeys(context.version for context in self.session.hold.accepted))
        of_code = f", kept though made by other code (simulator.version {versions})" if versions else ""
        fitting = f" and what fits of {self.before} from before the study was changed{of_code}" if self.before else ""
        return f"{self.done} done{fitting}{flight}{joined}"

    @contextmanager
    def at_level(self, plan: Plan, context: Context) -> Iterator[Session]:
        """Open a session of the same study for another level."""
        _forget(self.store, plan, [self.store.number(context)])
        session = StoreSession(self.store, Hold(self.study, context))
        try:
            yield session
        finally:
            self.session.recalled.update(session.recalled)
            session.leave()

    def recalled_results(self, provenance: Mapping[str, Any]) -> dict[str, Any]:
        """The number of the study, of which others results were taken, and how the runs differ that made them.

        provenance: of this run.
        """
        others = {study: count for study, count in self.session.recalled.items() if study != self.study}
        query = select(studies).where(studies.c.id.in_(others)).order_by(studies.c.id)
        rows = [row for row in _read(self.store, query) if _is_whole(self.store, row)] if others else []
        runs = _distinct([*self.earlier, *(_parsed_record(row.provenance) for row in rows)])
        mixed = [{"time": run.get("time", ""), "changed": new} for run in runs if (new := changes(run, provenance))]
        return {"study": self.study, "recalled": {str(study): count for study, count in others.items()}, "mixed": mixed}

    def finish(self) -> None:
        """Note that the study has all its results, and which studies it took results from."""
        recalled = {str(study): count for study, count in sorted(self.session.recalled.items()) if study != self.study}
        values = {"state": "finished", "recalled": json.dumps(recalled)}
        self.store.change(update(studies).where(studies.c.id == self.study).values(**values))


@contextmanager
def open_study(plan: Plan, provenance: Mapping[str, Any]) -> Iterator[Begun]:
    """The study in its store, begun or taken up again. Raises StoreError where the disk cannot hold it."""
    folder, settings = Path(plan.settings.output_dir), plan.settings.store
    begun = begin(Store(settings.database_url(folder), patience_s=settings.patience_s), plan, provenance)
    try:
        left = max(0, plan.num_points - begun.done)
        # the folder itself may not exist yet
        existing = next(parent for parent in (folder.resolve(), *folder.resolve().parents) if parent.exists())
        needed, free = _BYTES_PER_POINT * left, shutil.disk_usage(existing).free
        if needed > free:
            raise StoreError(f"{folder} has room for {free >> 20} MiB, the study needs about {needed >> 20} MiB")
        if begun.resumed:
            bound = "at most " if begun.before or plan.may_repeat else ""  # some points may turn out to be known
            print(f"resuming: {begun}, {bound}{left} left", file=sys.stderr)
        yield begun
    finally:
        begun.session.leave()
        begun.store.database.close()


def begin(store: Store, plan: Plan, provenance: Mapping[str, Any]) -> Begun:
    """Begin a study or go on with it; with `resume=accept`, go on with one whose question has changed."""
    definition = question(plan)
    # read before looking: a study that is added later is noticed
    newest = store.database.read(lambda connection: connection.execute(select(func.max(studies.c.id))).scalar())
    same, other = _earlier(store, plan, definition)
    mode = plan.settings.resume
    if same is None and other is not None and mode == "auto" and _is_repeated(other, plan):
        print(_changed_question(other, definition), file=sys.stderr)
    values = {
        "state": "running",
        "context": store.number(plan.context),
        "command": json.dumps(redact(plan.request.overrides)),
        "asked": json.dumps(definition),
        "request": json.dumps(redact(plan.request.tree), default=str),  # URLs may hold passwords
        "provenance": json.dumps(provenance),
    }
    going_on = same if same is not None else other if mode == "accept" else None  # the same question always goes on
    if going_on is not None:
        return _continue_study(store, plan, going_on, values)
    first = {
        "name": plan.settings.study.name,
        "parent": other.id if other else None,
        "accepted": "[]",
        "recalled": "{}",
        "before": 0,
    }
    _forget(store, plan, [store.number(plan.context)])
    study, is_new = _add_study(store, {**values, **first}, since=newest or 0)
    if not is_new:  # the same command, typed at the same time
        return begin(store, plan, provenance)  # it is found now, as the same study
    return Begun(store, study, StoreSession(store, Hold(study, plan.context)), 0, 0, resumed=False)


def _continue_study(store: Store, plan: Plan, old: Row[Any], values: Mapping[str, Any]) -> Begun:
    """Continue an earlier study under the present question; results of its earlier contexts still count."""
    numbers = {*_parsed_record(old.accepted), old.context} - {values["context"]}
    accepted = [context for number in sorted(numbers) if (context := store.context(number)) is not None]
    _forget(store, plan, [store.number(plan.context), *numbers])
    present, before = _parsed_record(values["provenance"]), _parsed_record(old.provenance)
    done = store.count(old.id, {*numbers, values["context"]})
    # a run that left no results is of no interest
    earlier = _distinct([*before.pop("earlier", []), *([before] if done else [])])
    other = _parsed_record(old.asked) != _parsed_record(values["asked"])
    row = {
        **values,
        "provenance": json.dumps({**present, "earlier": earlier}),
        "accepted": json.dumps(sorted(numbers)),
        "before": done if other else min(old.before, done),
    }
    changed = update(studies).where(studies.c.id == old.id).values(**row)
    store.change(changed)
    session = StoreSession(store, Hold(old.id, plan.context, tuple(accepted)))
    return Begun(store, old.id, session, done - row["before"], row["before"], resumed=True, earlier=tuple(earlier))


def running(store: Store, name: str | None = None) -> list[Row[Any]]:
    """Studies that have not all results yet, the oldest first. name: of which name; None: any."""
    query = select(studies).where(studies.c.state == "running").order_by(studies.c.id)
    if name is not None:
        query = query.where(studies.c.name == name)
    return [row for row in _read(store, query) if _is_whole(store, row)]


def join(store: Store, row: Row[Any], plan: Plan) -> StoreSession:
    """Open a session of a study that others began, and change nothing of its record.

    Raises ConfigError where this plan asks another question.
    """
    ours, theirs = question(plan), _parsed_record(row.asked)
    if paths := sorted(path for path in {**ours, **theirs} if ours.get(path) != theirs.get(path)):
        shown = ", ".join(paths[:_SHOWN])
        rule = f"is another question here: {shown}{' and others' * (len(paths) > _SHOWN)} differ"
        raise ConfigError([Problem(f"study {row.id}", rule, row.name, "use its code and configuration (config_dir=)")])
    contexts = [store.context(number) for number in _parsed_record(row.accepted)]
    return StoreSession(store, Hold(row.id, plan.context, tuple(one for one in contexts if one is not None)))


def _forget(store: Store, plan: Plan, numbers: Iterable[int]) -> None:
    """Forget the results of some contexts that are to be evaluated again."""
    for status in plan.settings.store.retry:
        for number in numbers:
            store.forget(status, number)


def _distinct(runs: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the last of the runs made with the same code, versions and machine."""
    distinct: list[Mapping[str, Any]] = []
    for run in runs:
        # a later run replaces those it does not differ from
        distinct = [*(earlier for earlier in distinct if changes(earlier, run)), run]
    return distinct


def _add_study(store: Store, values: Mapping[str, Any], *, since: int) -> tuple[int, bool]:
    """Return (number of the study of these values, whether it is new): equal studies begun at once are one.

    since: the newest study when an earlier one was looked for; studies up to it are not looked at again.
    """

    def work(connection: Connection) -> tuple[int, bool]:
        store.database.exclude(connection)
        alike = (studies.c.name == values["name"]) & (studies.c.asked == values["asked"]) & (studies.c.id > since)
        if (other := connection.execute(select(studies.c.id).where(alike)).scalar()) is not None:
            return int(other), False
        return int(connection.execute(insert(studies).values(values).returning(studies.c.id)).scalar_one()), True

    return store.database.write(work)


def _earlier(store: Store, plan: Plan, definition: Mapping[str, str]) -> tuple[Row[Any] | None, Row[Any] | None]:
    """Return (the newest study of this name with the same question, the study that this command may mean).

    A command may mean a study of the same words, else an unfinished one that no process is at work on.
    """
    query = select(studies).where(studies.c.name == plan.settings.study.name).order_by(studies.c.id.desc())
    rows = [row for row in _read(store, query) if _is_whole(store, row)]
    here = store.database.read(lambda connection: connection.execute(select(owners)).all())
    # unknown owners count as alive
    busy = {row.study for row in here if not Owner(row.host, row.boot, row.space, row.pid, row.started).gone}
    same = next((row for row in rows if _parsed_record(row.asked) == definition), None)  # rows come newest first
    repeated = (row for row in rows if _is_repeated(row, plan))
    # somebody else's study is not meant
    unfinished = (row for row in rows if row.state == "running" and row.id not in busy)
    return same, next(itertools.chain(repeated, unfinished), None)


def _is_repeated(old: Row[Any], plan: Plan) -> bool:
    """Tell whether a study is asked for in the words of an earlier one; how to resume is no part of them."""
    typed = _parsed_record(old.command)
    return _without_resume(typed) == _without_resume(redact(plan.request.overrides))


_TEXTS = {"asked": dict, "command": list, "accepted": list, "provenance": dict}  # column -> type of its JSON
# a stranger's file must not fill memory
_MOST_TEXT = 1 << 24  # characters in one of them


def _read(store: Store, query: Select[Any]) -> Sequence[Row[Any]]:
    """Return the studies of a query; those with an excessively long text are left in the database."""
    short = query.where(*(func.length(studies.c[name]) <= _MOST_TEXT for name in _TEXTS))
    return store.database.read(lambda connection: connection.execute(short).all())


def _parsed_record(text: str) -> Any:
    """The tree of a text of the store, which may be a stranger's. Raises ConfigError."""
    return parse_json(text, "studies")


def _is_whole(store: Store, row: Row[Any]) -> bool:
    """Tell whether the record of a study can be read; a damaged one is reported and passed over, its results count."""
    try:
        record = {name: _parsed_record(getattr(row, name)) for name in _TEXTS}
        wrong = next((name for name, kind in _TEXTS.items() if not isinstance(record[name], kind)), "")
        inner = [*record["command"], *record["asked"], *record["asked"].values()]
        wrong = wrong or ("" if all(isinstance(text, str) for text in inner) else "asked")
        wrong = wrong or ("" if all(isinstance(number, int) for number in record["accepted"]) else "accepted")
    except (ConfigError, ValueError, TypeError, AttributeError) as error:
        wrong = type(error).__name__
    if wrong:
        print(f"{store.database}: study {row.id} is passed over, as its record is damaged ({wrong})", file=sys.stderr)
    return not wrong


def _changed_question(old: Row[Any], after: Mapping[str, str]) -> str:
    """Say that an earlier study of the same words stays as it is, and what differs."""
    before = _parsed_record(old.asked)
    state = "did not finish" if old.state == "running" else "has other results"
    paths = [path for path in {**before, **after} if before.get(path) != after.get(path)]
    if paths == [_VERSION]:  # nothing that was typed differs: the user may wonder why
        return _changed_code(old, before[_VERSION])
    shown = [f"{path} was {before.get(path, 'absent')[:40]}" for path in paths[:_SHOWN]]  # one line each
    request = "; ".join([*shown, *([f"and {len(paths) - _SHOWN} more"] if len(paths) > _SHOWN else [])])
    return f"new study: {old.name} {old.id} {state} ({request}) and stays as it is; resume=accept goes on with that one"


def _changed_code(old: Row[Any], version: str) -> str:
    """Say that the results of an earlier study are of other code."""
    cause = f"the code or the data of its simulator has changed (simulator.version was {version})"
    return (
        f"new study: {cause}, so its points are evaluated again; resume=accept keeps the results of {old.name} {old.id}"
    )


_VERSION = "simulator.version"


def _without_resume(words: Sequence[str]) -> list[str]:
    """The words of a command but those on how to resume."""
    return [text for text in words if not text.startswith("resume=")]


def question(plan: Plan) -> dict[str, str]:
    """Return all that determines the results of a study, as path -> value, without labels, units and order."""
    settings, context = plan.settings, plan.context
    definition = {f"simulator.{name}": repr(value) for name, value in plan.spec.parameters}
    definition |= {"simulator": context.backend, _VERSION: context.version}
    definition |= {
        f"study.{name}": str(getattr(settings.study, name)) for name in ("module", "objectives", "hardware_objectives")
    }
    definition |= {f"study.baseline.{path}": repr(value) for path, value in settings.study.baseline.items()}
    # without a sampler, neither seed nor search changes results
    if any(space.size(settings.budget.trials) is None for space in plan.spaces.values()):
        definition |= {
            "seed": repr(settings.seed),
            "search": settings.search.name,
            "search.batch": repr(settings.search.batch),
            "search.warm_start": repr(settings.search.warm_start),
        }
        definition |= {f"study.limits.{name}": str(limit) for name, limit in settings.study.limits.items()}
        definition |= {f"search.options.{name}": repr(value) for name, value in settings.search.options.items()}
    for knob in plan.request.knobs:
        values = [repr(value) for value in knob.values]
        # a logarithmic interval is sampled differently
        definition[f"space.{knob.path}"] = ", ".join(values) or f"{knob.low!r} to {knob.high!r}{' (log)' * knob.log}"
    space = next(iter(plan.spaces.values()))  # options are the same in all scenarios
    for section, named in space.options.items():
        definition |= {f"{section}={name}.{path}": value for name, tree in named.items() for path, value in _flat(tree)}
    return definition | _designs(plan)


def _designs(plan: Plan) -> dict[str, str]:
    """Return the leaves of the base designs; a value that differs between scenarios is named with its scenario."""
    bases = {
        name: {path: repr(value) for path, value, _ in leaves(plan.backend.design(space.base))}
        for name, space in plan.spaces.items()
    }
    parameters: dict[str, str] = {}
    for path in dict.fromkeys(path for base in bases.values() for path in base):
        values = {name: base.get(path, "absent") for name, base in bases.items()}
        alike = len(set(values.values())) == 1
        parameters |= (
            {path: next(iter(values.values()))}
            if alike
            else {f"{path} ({name})": text for name, text in values.items()}
        )
    return parameters


def _flat(tree: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(tree, Mapping):
        for name, value in tree.items():
            if name not in LABELS:
                yield from _flat(value, f"{path}.{name}".lstrip("."))
    elif isinstance(tree, Sequence) and not isinstance(tree, str):
        for place, value in enumerate(tree):
            yield from _flat(value, f"{path}.{place}")
    else:
        yield path, repr(tree)
