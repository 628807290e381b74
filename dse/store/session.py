"""A study's session on the store: look-up of known results, leases of points, and recording.

Several processes may work on one study. Each leases the points it evaluates; a lease ends with the transaction that
records their results, or when its owner has provably ended.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import delete, func, insert, select, update

from dse.backend import Results
from dse.results.pareto import SeenHashes
from dse.space import Points
from dse.store.contract import Context, Evaluated, StoredResults, key_bytes
from dse.store.database import StoreError
from dse.store.owner import Owner, me
from dse.store.result_store import Store, chunks, leases, owners
from dse.values import Keys, grid_content_keys

if TYPE_CHECKING:
    from sqlalchemy import Connection

_BEAT_S = 10.0  # six beats in _SILENCE_S: a few may be lost
_SILENCE_S = 60.0  # after which an owner on another host counts as gone
_LOOK_S = 0.2  # for which the last look for other processes counts
_SHARE = 20  # recording may take 1 / _SHARE of the time where evaluation waits for it
_IDLE_SHARE = 4  # the same where evaluation does not wait


@dataclass(frozen=True)
class Hold:
    """Subject of a session: number of the study, its context, and other contexts whose results count as well."""

    study: int
    context: Context
    accepted: tuple[Context, ...] = ()


class StoreSession:
    """A session on a store. recalled: study -> number of its results that were used."""

    def __init__(self, store: Store, hold: Hold) -> None:
        self.store, self.hold = store, hold
        self._context = store.number(hold.context)
        contexts = (  # results without some of the metrics cannot stand in
            context for context in (hold.context, *hold.accepted) if set(hold.context.metrics) <= set(context.metrics)
        )
        self._shifts = [(store.number(context), _shift(hold.context, context)) for context in contexts]
        self.recalled: Counter[int] = Counter()
        self._pending: list[tuple[Evaluated, Sequence[Keys]]] = []
        self._recorded, self._took_s = time.monotonic(), (0.0, 0.0)  # the last two times: one may be an exception
        self._silent: dict[int, tuple[int, float]] = {}  # owner -> beat, and when it was seen first
        self._owner = self._enter()
        self.lost = self._sweep()  # after _enter: of two that begin at once, one sees the other
        self._looked_s, self._alone, self._shared = 0.0, True, self.lost > 0  # the dead had shared it
        self._made = SeenHashes()
        self._unknown = self.alone and not any(store.holds(number) for number, _ in self._shifts)  # spares look-ups
        self._ended, self._written = threading.Event(), threading.Event()
        self._beside = [threading.Thread(target=work, daemon=True) for work in (self._beat, self._tidy)]
        for thread in self._beside:
            thread.start()

    @property
    def alone(self) -> bool:
        """True if no other process was on this study a moment ago."""
        if time.monotonic() - self._looked_s > _LOOK_S:
            query = select(func.count()).where(owners.c.study == self.hold.study, owners.c.id != self._owner)
            count = self.store.database.read(lambda connection: connection.execute(query).scalar_one())
            self._looked_s, self._alone = time.monotonic(), count == 0
        return self._alone

    @property
    def is_shared(self) -> bool:
        """True if another process is or was at work on this study since this one began."""
        self._shared = self._shared or not self.alone
        return self._shared

    def find(self, keys: Keys) -> StoredResults | None:
        """Look up keys [B, 2]; None if none of them can be known, as no other process has worked on the study."""
        self._unknown = self._unknown and self.alone  # once others have joined, for good
        if self._unknown and not self._made.has(keys).any():  # points of this session itself may come again
            return None
        merged: StoredResults | None = None
        for number, shift in self._shifts:
            answer = self.store.find(keys + shift, number)
            merged = answer if merged is None else _merge(merged, answer)
            if merged.known.all():
                break  # other contexts need not be asked
        return merged

    def recall(self, studies: NDArray[np.int64]) -> None:
        """Count the use of known results, by the studies that evaluated them."""
        self.recalled.update(studies.tolist())

    def lease(self, parts: Sequence[Keys]) -> list[bool]:
        """Lease parts (keys [B, 2] each); reclaims leases of dead owners. Returns which were granted."""
        names = [_name(part) for part in parts]
        sizes = {name: len(part) for name, part in zip(names, parts, strict=True)}
        rows = [{"name": name, "owner": self._owner, "size": size} for name, size in sorted(sizes.items())]

        def work(connection: Connection) -> dict[bytes, int]:  # rows in one order: no deadlock
            return {row.name: row.owner for row in connection.execute(self.store.lease_statement, rows)}

        holders = self.store.database.write(work, apart=True) if rows else {}
        other_owners = {owner for owner in holders.values() if owner != self._owner}
        if other_owners and self._sweep():
            return self.lease(parts)  # again, as leases of the dead are free now
        return [holders.get(name) == self._owner for name in names]  # a lease of one's own is granted again

    def record(self, points: Points, results: Results, done: Sequence[Keys], *, idle: bool = False) -> list[Results]:
        """Buffer results, and keys of the parts that they complete. Returns what this call recorded, in order.

        Results are recorded at once while that takes a small share of the time, else several together. Where another
        process was faster, its results stand. idle: whether evaluation goes on meanwhile.
        """
        self._pending.append(((points, results), done))
        pause_s = (_IDLE_SHARE if idle else _SHARE) * min(self._took_s)
        return [] if time.monotonic() - self._recorded < pause_s else self.flush()

    def flush(self) -> list[Results]:
        """Record the buffered results, then release their leases. Raises StoreError if some are missing afterwards."""
        if not self._pending:
            return []
        began, names = time.monotonic(), [_name(part) for _, parts in self._pending for part in parts]
        parts = [part for part, _ in self._pending]
        keys = np.concatenate([points.keys for points, _ in parts])
        inserts = self.store.inserts(parts, context=self._context, study=self.hold.study)

        def work(connection: Connection) -> bool:
            added = self.store.add(connection, inserts)
            self._delete_leases(connection, names)
            return added == len(keys)

        all_new = self.store.database.write(work, apart=True)
        self._written.set()  # wakes the checkpoint
        recorded = [results for _, results in parts] if all_new else self._recorded_results(parts)
        self._pending = []
        if self._unknown:
            self._made.add(keys)
        self._recorded = time.monotonic()
        self._took_s = self._took_s[1], self._recorded - began
        return recorded

    def release(self, parts: Sequence[Keys]) -> None:
        """Release the leases of parts that need no evaluation."""
        names = [_name(part) for part in parts]
        if names:
            self.store.database.write(lambda connection: self._delete_leases(connection, names), apart=True)

    def _delete_leases(self, connection: Connection, names: Sequence[bytes]) -> None:
        for chunk in chunks(names):  # of its own alone: a lease may have passed on in a long pause
            connection.execute(delete(leases).where(leases.c.name.in_(chunk), leases.c.owner == self._owner))

    def _recorded_results(self, parts: Sequence[Evaluated]) -> list[Results]:
        """Read back results of which another process had recorded some before; differences are printed.

        Raises StoreError if results that were handed over are missing.
        """
        keys = np.concatenate([points.keys for points, _ in parts])
        stored = self.store.find(keys, self._context)
        if not stored.known.all():  # a damaged row was in the way, and is in quarantine now
            inserts = self.store.inserts(parts, context=self._context, study=self.hold.study)
            self.store.database.write(lambda connection: self.store.add(connection, inserts))
            stored = self.store.find(keys, self._context)
        if missing := int((~stored.known).sum()):
            rule = f"{missing} of {len(keys)} results were handed over and are not there"
            raise StoreError(f"{self.store.database}: {rule}; none is lost: look with python -m dse store check")
        ends = np.cumsum([results.size for _, results in parts]).tolist()
        return [
            self._stands(results, stored.results.take(slice(end - results.size, end)))
            for (_, results), end in zip(parts, ends, strict=True)
        ]

    def _stands(self, results: Results, recorded: Results) -> Results:
        change = _difference(results, recorded)
        if change:
            name = self.hold.context.backend
            print(f"{name} is not deterministic: {change}; what was recorded first stands", file=sys.stderr)
        return recorded

    def withdraw(self, keys: Keys) -> None:
        """Delete the results of keys [B, 2], because they are wrong."""
        self.flush()
        self.store.remove(key_bytes(keys))

    def leave(self) -> None:
        """Release all leases, and end the session."""
        self._ended.set()
        self._written.set()
        self.store.database.write(lambda connection: _drop(connection, [self._owner]))
        for thread in self._beside:
            thread.join()

    def _enter(self) -> int:
        values = {"study": self.hold.study, **vars(me()), "beat": 0}

        def work(connection: Connection) -> int:
            return int(connection.execute(insert(owners).values(values).returning(owners.c.id)).scalar_one())

        return self.store.database.write(work)

    def _beat(self) -> None:
        """Update the heartbeat, which shows processes on other hosts that this one is alive."""
        count = update(owners).where(owners.c.id == self._owner).values(beat=owners.c.beat + 1)
        while not self._ended.wait(_BEAT_S):  # beats are counted, as clocks of hosts may differ
            with suppress(StoreError):  # a beat may fail: evaluation notices what is wrong
                self.store.database.write(lambda connection: connection.execute(count))

    def _tidy(self) -> None:
        """Checkpoint the write-ahead log after every recording, so that recording does not wait for the disk."""
        while not self._ended.is_set():
            self._written.wait()
            self._written.clear()
            self.store.database.tidy()

    def _sweep(self) -> int:
        """Delete dead owners and their leases. Returns the number of points of this study that were in flight."""

        def work(connection: Connection) -> int:
            rows = connection.execute(select(owners).where(owners.c.id != self._owner)).all()
            gone = [row for row in rows if self._is_gone(row)]
            mine = [row.id for row in gone if row.study == self.hold.study]
            size = select(func.coalesce(func.sum(leases.c.size), 0)).where(leases.c.owner.in_(mine))
            count = int(connection.execute(size).scalar_one())  # 0 without leases, whose sum is NULL
            _drop(connection, [row.id for row in gone])
            return count

        return self.store.database.write(work)

    def _is_gone(self, row: Any) -> bool:
        owner = Owner(row.host, row.boot, row.space, row.pid, row.started)
        if owner.is_known:
            return owner.gone
        beat, since = self._silent.get(row.id, (None, 0.0))
        if beat != row.beat:
            self._silent[row.id] = (row.beat, time.monotonic())
            return False  # its silence begins with the first look
        return time.monotonic() - since > _SILENCE_S


def _drop(connection: Connection, gone: Sequence[int]) -> None:
    connection.execute(delete(leases).where(leases.c.owner.in_(gone)))
    connection.execute(delete(owners).where(owners.c.id.in_(gone)))


def _name(keys: Keys) -> bytes:
    """Name of a part: the sum of its keys, so a single point is named by its key."""
    return key_bytes(keys.sum(axis=0, dtype=np.uint64)[None])[0]  # wraps around at 64 bits, as the sum of hashes it is


def _shift(source: Context, target: Context) -> Keys:
    """Difference between the keys of a design in two contexts, target less source."""
    # without a design: what a context adds to the sum that a key is
    return grid_content_keys([], {}, target.words) - grid_content_keys([], {}, source.words)


def _merge(first: StoredResults, second: StoredResults) -> StoredResults:
    """Merge two look-ups of the same keys; the first takes precedence."""
    size = len(first.known)
    # rows of the second look-up follow those of the first
    where = np.where(first.known, np.arange(size), size + np.arange(size))
    both = Results.join([first.results, second.results]).take(where)
    return StoredResults(first.known | second.known, both, np.where(first.known, first.study, second.study))


def _difference(ours: Results, theirs: Results) -> str:
    """Describe the difference between two evaluations of the same designs; empty if there is none."""
    if (ours.status != theirs.status).any():
        return f"{int((ours.status != theirs.status).sum())} of {ours.size} results differ in status"
    with np.errstate(divide="ignore", invalid="ignore"):  # metrics may be 0
        gaps = [abs(ours.column(name) / theirs.column(name) - 1.0) for name in ours.metrics]
    worst = max((float(np.nanmax(gap, initial=0.0)) for gap in gaps), default=0.0)  # 0 / 0: equal
    return f"a metric differs by {100 * worst:.3g} %" if worst > 0.0 else ""
