"""A study's hold on the store: what is known, who is at work on what, and what is recorded.

Several processes may work on one study. Each leases the points it evaluates; a lease ends with the transaction that
records their results, or when its owner is provably gone.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import delete, func, insert, select, update

from dse.backend import Results
from dse.content_hash import Keys, grid_content_keys
from dse.results.pareto import Seen
from dse.store.database import StoreError
from dse.store.owner import Owner, me
from dse.store.result_store import Context, Found, Fresh, Store, chunks, key_bytes, leases, owners

if TYPE_CHECKING:
    from sqlalchemy import Connection

_BEAT_S = 10.0
_SILENCE_S = 60.0  # after which an owner on another host counts as gone
_LOOK_S = 0.2  # for which others are taken to be where they were
_SHARE = 20  # recording may take one part in so many of the time where evaluation waits for it
_IDLE_SHARE = 4  # and where it does not


class Session(Protocol):
    """What evaluation needs of a store. lost: points that were in flight when their process ended."""

    lost: int

    @property
    def is_shared(self) -> bool:
        """Whether another process is or was at work on the same since this one began."""

    def find(self, keys: Keys) -> Found | None:
        """What is known of keys [B, 2]; None where nothing can be."""

    def lease(self, parts: Sequence[Keys]) -> list[bool]:
        """Take parts (keys [B, 2] each) in hand: which are ours now."""

    def recall(self, studies: NDArray[np.int64]) -> None:
        """Note that known results are used, by the studies that had them evaluated."""

    def release(self, parts: Sequence[Keys]) -> None:
        """Give up parts that need nothing any more."""

    def record(self, fresh: Fresh, parts: Sequence[Keys], *, idle: bool = False) -> list[Results]:
        """Take in results, and the parts that are done with them; results that are recorded now, in order.

        idle: whether evaluation goes on meanwhile.
        """

    def flush(self) -> list[Results]:
        """Record what was taken in."""

    def withdraw(self, keys: Keys) -> None:
        """Take results [B, 2] back that are not to be believed."""


class Forgetful:
    """No store: nothing is known, everything is ours, nothing is kept."""

    lost = 0
    is_shared = False

    def find(self, keys: Keys) -> None:
        """Nothing."""

    def lease(self, parts: Sequence[Keys]) -> list[bool]:
        """All."""
        return [True] * len(parts)

    def recall(self, studies: NDArray[np.int64]) -> None:
        """Nothing is known."""

    def release(self, parts: Sequence[Keys]) -> None:
        """Nothing was taken."""

    def record(self, fresh: Fresh, parts: Sequence[Keys], *, idle: bool = False) -> list[Results]:
        """The results as they are."""
        return [fresh.results]

    def flush(self) -> list[Results]:
        """Nothing is held."""
        return []

    def withdraw(self, keys: Keys) -> None:
        """Nothing was kept."""


@dataclass(frozen=True)
class Hold:
    """What a session is on: the study's number, its context, and others whose results count as well."""

    study: int
    context: Context
    accepted: tuple[Context, ...] = ()


class StoreSession:
    """A session on a store. recalled: study -> how many of its results were used. others: processes on this study."""

    def __init__(self, store: Store, hold: Hold) -> None:
        self._store, self._hold = store, hold
        self._context = store.number(hold.context)
        contexts = (one for one in (hold.context, *hold.accepted) if set(hold.context.metrics) <= set(one.metrics))
        self._shifts = [(store.number(one), _shift(hold.context, one)) for one in contexts]
        self.recalled: Counter[int] = Counter()
        self._held: list[tuple[Fresh, Sequence[Keys]]] = []
        self._recorded, self._took_s = time.monotonic(), (0.0, 0.0)  # the last two times: one may be an exception
        self._silent: dict[int, tuple[int, float]] = {}
        self._owner = self._enter()
        self.lost = self._sweep()
        self._asked, self._alone, self._shared = 0.0, True, self.lost > 0
        self._made = Seen()
        self._unknown = self.alone and not any(store.holds(number) for number, _ in self._shifts)
        self._ended, self._written = threading.Event(), threading.Event()
        self._beside = [threading.Thread(target=work, daemon=True) for work in (self._beat, self._tidy)]
        for thread in self._beside:
            thread.start()

    @property
    def alone(self) -> bool:
        """Whether no other process is on this study, as far as was seen a moment ago."""
        if time.monotonic() - self._asked > _LOOK_S:
            query = select(func.count()).where(owners.c.study == self._hold.study, owners.c.id != self._owner)
            count = self._store.database.read(lambda connection: connection.execute(query).scalar_one())
            self._asked, self._alone = time.monotonic(), count == 0
        return self._alone

    @property
    def is_shared(self) -> bool:
        """Whether another process is or was at work on the same since this one began."""
        self._shared = self._shared or not self.alone
        return self._shared

    def find(self, keys: Keys) -> Found | None:
        """What is known of keys [B, 2]; None where nothing can be, as nobody was here before."""
        self._unknown = self._unknown and self.alone
        if self._unknown and not self._made.has(keys).any():
            return None
        found: Found | None = None
        for number, shift in self._shifts:
            one = self._store.find(keys + shift, number)
            found = one if found is None else _either(found, one)
            if found.known.all():
                break
        return found

    def recall(self, studies: NDArray[np.int64]) -> None:
        """Note that known results are used, by the studies that had them evaluated."""
        self.recalled.update(studies.tolist())

    def lease(self, parts: Sequence[Keys]) -> list[bool]:
        """Take parts (keys [B, 2] each) in hand: which are ours now. What owners had that are gone becomes ours."""
        names = [_name(part) for part in parts]
        sizes = {name: len(part) for name, part in zip(names, parts, strict=True)}
        rows = [{"name": name, "owner": self._owner, "size": size} for name, size in sorted(sizes.items())]

        def work(connection: Connection) -> dict[bytes, int]:
            return {row.name: row.owner for row in connection.execute(self._store.lease_statement, rows)}

        holders = self._store.database.write(work, apart=True) if rows else {}
        others = {owner for owner in holders.values() if owner != self._owner}
        if others and self._sweep():
            return self.lease(parts)
        return [holders.get(name) == self._owner for name in names]

    def record(self, fresh: Fresh, parts: Sequence[Keys], *, idle: bool = False) -> list[Results]:
        """Take in results, and the parts that are done with them; results that are recorded now, in order.

        They are recorded at once where that takes little of the time, else a few together. Where another process was
        faster, its results are those recorded. idle: whether evaluation goes on meanwhile.
        """
        self._held.append((fresh, parts))
        pause_s = (_IDLE_SHARE if idle else _SHARE) * min(self._took_s)
        return [] if time.monotonic() - self._recorded < pause_s else self.flush()

    def flush(self) -> list[Results]:
        """Record what was taken in, then give up its leases. Raises StoreError where some of it is not there then."""
        if not self._held:
            return []
        began, names = time.monotonic(), [_name(part) for _, parts in self._held for part in parts]

        fresh = Fresh.join([one for one, _ in self._held])

        def work(connection: Connection) -> bool:
            added = self._store.add(connection, fresh, context=self._context, study=self._hold.study)
            self._given_up(connection, names)
            return added == len(fresh.keys)

        all_new = self._store.database.write(work, apart=True)
        self._written.set()
        parts = [one for one, _ in self._held]
        found = [one.results for one in parts] if all_new else self._settled(parts)
        self._held = []
        if self._unknown:
            self._made.add(fresh.keys)
        self._recorded = time.monotonic()
        self._took_s = self._took_s[1], self._recorded - began
        return found

    def release(self, parts: Sequence[Keys]) -> None:
        """Give up parts that need nothing any more."""
        names = [_name(part) for part in parts]
        if names:
            self._store.database.write(lambda connection: self._given_up(connection, names), apart=True)

    def _given_up(self, connection: Connection, names: Sequence[bytes]) -> None:
        for chunk in chunks(names):
            connection.execute(delete(leases).where(leases.c.name.in_(chunk), leases.c.owner == self._owner))

    def _settled(self, held: Sequence[Fresh]) -> list[Results]:
        """The recorded results of designs that some process had recorded before; a difference is told.

        Raises StoreError where the store took some and has them not.
        """
        keys = np.concatenate([one.keys for one in held])
        found = self._store.find(keys, self._context)
        if not found.known.all():  # a damaged row was in the way, and is in quarantine now
            again, context, study = Fresh.join(held), self._context, self._hold.study
            add = self._store.add
            self._store.database.write(lambda connection: add(connection, again, context=context, study=study))
            found = self._store.find(keys, self._context)
        if missing := int((~found.known).sum()):
            rule = f"{missing} of {len(keys)} results were handed over and are not there"
            raise StoreError(f"{self._store.database}: {rule}; nothing recorded is lost: look with python -m dse check")
        ends = np.cumsum([len(one.keys) for one in held]).tolist()
        places = [slice(end - len(one.keys), end) for one, end in zip(held, ends, strict=True)]
        return [self._stands(one, found.results.take(at)) for one, at in zip(held, places, strict=True)]

    def _stands(self, fresh: Fresh, recorded: Results) -> Results:
        change = _difference(fresh.results, recorded)
        if change:
            name = self._hold.context.backend
            print(f"{name} is not deterministic: {change}; what was recorded first stands", file=sys.stderr)
        return recorded

    def withdraw(self, keys: Keys) -> None:
        """Take results [B, 2] back that are not to be believed."""
        self.flush()
        self._store.remove(key_bytes(keys))

    def leave(self) -> None:
        """Give up all leases."""
        self._ended.set()
        self._written.set()
        self._store.database.write(lambda connection: _drop(connection, [self._owner]))
        for thread in self._beside:
            thread.join()

    def _enter(self) -> int:
        values = {"study": self._hold.study, **vars(me()), "beat": 0}

        def work(connection: Connection) -> int:
            return int(connection.execute(insert(owners).values(values).returning(owners.c.id)).scalar_one())

        return self._store.database.write(work)

    def _beat(self) -> None:
        """Show owners on other hosts that this one lives."""
        count = update(owners).where(owners.c.id == self._owner).values(beat=owners.c.beat + 1)
        while not self._ended.wait(_BEAT_S):
            with suppress(StoreError):
                self._store.database.write(lambda connection: connection.execute(count))

    def _tidy(self) -> None:
        """Have recording wait for no disk."""
        while not self._ended.is_set():
            self._written.wait()
            self._written.clear()
            self._store.database.tidy()

    def _sweep(self) -> int:
        """Take the leases of owners that are gone; how many points of this study they had in flight."""

        def work(connection: Connection) -> int:
            rows = connection.execute(select(owners).where(owners.c.id != self._owner)).all()
            gone = [row for row in rows if self._is_gone(row)]
            mine = [row.id for row in gone if row.study == self._hold.study]
            size = select(func.coalesce(func.sum(leases.c.size), 0)).where(leases.c.owner.in_(mine))
            count = int(connection.execute(size).scalar_one())
            _drop(connection, [row.id for row in gone])
            return count

        return self._store.database.write(work)

    def _is_gone(self, row: Any) -> bool:
        owner = Owner(row.host, row.boot, row.space, row.pid, row.started)
        if owner.is_known:
            return owner.gone
        beat, since = self._silent.get(row.id, (None, 0.0))
        if beat != row.beat:
            self._silent[row.id] = (row.beat, time.monotonic())
            return False
        return time.monotonic() - since > _SILENCE_S


def _drop(connection: Connection, gone: Sequence[int]) -> None:
    connection.execute(delete(leases).where(leases.c.owner.in_(gone)))
    connection.execute(delete(owners).where(owners.c.id.in_(gone)))


def _name(keys: Keys) -> bytes:
    """The name of a part: the sum of its keys, which of a single point is its key."""
    return key_bytes(keys.sum(axis=0, dtype=np.uint64)[None])[0]


def _shift(own: Context, other: Context) -> Keys:
    """What turns keys made in one context into those of another."""
    return grid_content_keys([], {}, other.words) - grid_content_keys([], {}, own.words)


def _either(found: Found, other: Found) -> Found:
    """What one or the other knows."""
    size = len(found.known)
    where = np.where(found.known, np.arange(size), size + np.arange(size))
    both = Results.join([found.results, other.results]).take(where)
    return Found(found.known | other.known, both, np.where(found.known, found.study, other.study))


def _difference(ours: Results, theirs: Results) -> str:
    """In what two evaluations of the same designs differ; nothing where they do not."""
    if (ours.status != theirs.status).any():
        return f"{int((ours.status != theirs.status).sum())} of {ours.size} results differ in status"
    with np.errstate(divide="ignore", invalid="ignore"):
        gaps = [abs(ours.column(name) / theirs.column(name) - 1.0) for name in ours.metrics]
    worst = max((float(np.nanmax(gap, initial=0.0)) for gap in gaps), default=0.0)
    return f"a metric differs by {100 * worst:.3g} %" if worst > 0.0 else ""
