"""Calls of a backend: checked results, retries, halving of batches on which it fails, and when it counts as broken.

A backend is given by name and parameters (`BackendSpec`), so that a worker process can make it. Points come in parts
(`Part`): designs that are looked up, leased and evaluated together.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from dse import plugins
from dse.backend import Backend, Batch, Lawful, Result, Results, check_laws, check_results, complete
from dse.errors import Broken, ConfigError, Problem, Problems, disk_is_full, fault_text
from dse.evaluation.workers import Lost
from dse.space import Points
from dse.store.contract import Context, Session, key_bytes
from dse.values import Keys

_SAME = 1e-9  # relative difference of a metric, of a design alone and in a batch, that is rounding


def difference(first: Result, second: Result) -> str:
    """The difference of two results of one design, in words; empty if there is none beyond rounding."""
    if first.status != second.status:
        return f"evaluated twice, it was {first.status} and {second.status} ({second.reason})"
    for name, value in first.metrics.items():
        other = second.metrics.get(name, math.nan)
        # NaN and NaN are equal here
        if not (math.isclose(value, other, rel_tol=_SAME) or value == other or (value != value and other != other)):
            return f"evaluated twice, {name} was {value!r} and {other!r}"
    return ""


def broken_error(count: int, reason: str) -> Broken:
    """The error of a backend that failed so many times in a row for one reason."""
    return Broken(
        f"the simulator looks broken: {count} points in a row failed alike ({reason}). They were not recorded, what"
        " came before them was: mend it and type the same command, or set executor.broken_after=0 to go on regardless"
    )


@dataclass
class Patience:
    """Limits to how often a backend may fail. Calls of several threads may share one.

    retries: how often a design is tried again for which a process was lost. most: designs in a row that fail by
    themselves, and alike, before it counts as broken; 0 for any number.
    """

    retries: int = 1
    most: int = 0
    _last: str = ""
    _count: int = 0

    @property
    def fresh(self) -> Patience:
        """The same, of which nothing has failed yet."""
        return Patience(self.retries, self.most)

    def record_success(self) -> None:
        """Some call had results."""
        self._last, self._count = "", 0

    def record_failure(self, reason: str) -> None:
        """One design has failed. Raises Broken."""
        # failures for different reasons are those of designs, not of the backend
        self._last, self._count = reason, self._count + 1 if reason == self._last else 1
        if self._count == self.most:  # 0 is never reached
            raise broken_error(self._count, reason)


def serve(request: tuple[BackendSpec, Sequence[Batch], Patience]) -> list[Results]:
    """Results of batches, in a worker process; without batches the backend is made ready."""
    spec, batches, patience = request
    spec.make()  # imports and compiles before the first call, which may have a time limit
    return call(spec, batches, patience) if batches else []


def call(
    spec: BackendSpec, batches: Sequence[Batch], patience: Patience | None = None, *, retries: int | None = None
) -> list[Results]:
    """Checked results of each batch from one call of the backend.

    If it fails, each half alone, and so on: a design on which it fails is one `failed` result, the others have theirs.
    retries: of a point whose process is lost; None: as many as there is patience for. Raises Broken where failing goes
    on for longer than there is patience, and OSError for a full disk.
    """
    patience = Patience() if patience is None else patience
    retries = patience.retries if retries is None else retries
    single = sum(batch.size for batch in batches) == 1
    try:
        backend = spec.make()
        results = _check_answers(backend, batches, backend.evaluate(batches))
    except Lost as error:
        if single and retries > 0:  # the loss may be no fault of the point
            print(f"a process of the backend was lost ({error}): its point is evaluated again", file=sys.stderr)
            return call(spec, batches, patience, retries=retries - 1)
        reason = f"LOST: {error}"
    except MemoryError:  # halves need less
        reason = "OUT OF MEMORY"
    except Exception as error:  # whatever a plug-in raises
        if disk_is_full(error):  # no fault of the design, and the next would fail likewise
            raise
        reason = str(error) if isinstance(error, Broken) else fault_text(error)
    else:
        patience.record_success()
        return results
    if single:  # of several, some may work
        patience.record_failure(reason)
    return halve(batches, reason, lambda half: call(spec, half, patience, retries=retries))


def halve(batches: Sequence[Batch], reason: str, again: Callable[[Sequence[Batch]], list[Results]]) -> list[Results]:
    """Each half by itself; a single design has failed for the reason given."""
    if len(batches) > 1:
        half = len(batches) // 2
        return [*again(batches[:half]), *again(batches[half:])]
    (batch,) = batches
    if batch.size == 1:
        return [Results.of([Result("failed", reason=reason)])]
    return [Results.join([again([part])[0] for part in batch.split((batch.size + 1) // 2)])]  # rounded up: two parts


def _check_answers(backend: Backend, batches: Sequence[Batch], answers: Sequence[Results]) -> list[Results]:
    """Return a backend's results of each batch, as far as they keep the rules."""
    if len(answers) != len(batches):
        raise RuntimeError(f"the backend gave {len(answers)} results for {len(batches)} batches")
    for batch, results in zip(batches, answers, strict=True):
        columns: list[NDArray[Any]] = [results.status, results.reason, results.engine, *results.metrics.values()]
        if wrong := [len(column) for column in columns if len(column) != batch.size]:
            raise RuntimeError(f"the backend gave {wrong[0]} results for {batch.size} designs")
    laws = backend.laws if isinstance(backend, Lawful) else ()
    return [check_laws(check_results(results, backend.metrics), laws) for results in answers]


@dataclass(frozen=True)
class BackendSpec:
    """A backend by name and parameters: what a worker process needs to make its own."""

    name: str
    parameters: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, simulator: object) -> BackendSpec:
        """From the `simulator` group: `backend` names it, the rest (but labels) are its parameters."""
        if not isinstance(simulator, Mapping):
            raise ConfigError([Problem("simulator", "is no section of keys", simulator, "choose one: simulator=event")])
        # labels change no result
        parameters = {key: value for key, value in simulator.items() if key not in ("name", "description", "backend")}
        # the order in a file means nothing
        return cls(str(simulator.get("backend")), tuple(sorted(parameters.items())))

    def make(self) -> Backend:
        """The backend, one per process. Raises ConfigError for unknown names or parameters."""
        return _make(self)

    @property
    def context(self) -> Context:
        """The part of this that results depend on: name, version with its code, parameters and metrics."""
        backend = self.make()
        return Context(self.name, self.version, repr(self.parameters), tuple(backend.metrics))

    @property
    def version(self) -> str:
        """Version of the backend, and the fingerprint of the code and the data that it runs on."""
        from dse.results.provenance import fingerprint  # commands that evaluate nothing need none

        module = plugins.target("backend", self.name).partition(":")[0]
        return f"{self.make().version}+code.{fingerprint(module)}"

    def __hash__(self) -> int:
        return hash(str(self))  # parameters may be lists


@plugins.cached_until_refresh
def _make(spec: BackendSpec) -> Backend:
    kind = complete(plugins.load("backend", spec.name))
    try:
        backend = kind(**dict(spec.parameters))
    except TypeError as error:  # a missing or an unknown keyword
        rule = f"does not fit backend {spec.name}: {error}"
        raise ConfigError([Problem("simulator", rule, dict(spec.parameters))]) from error
    return backend


def validate(backend: Backend, trees: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse base designs that are invalid or infeasible, all problems at once."""
    check = Problems()
    for tree in trees.values():
        try:
            check.found.extend(backend.problems(backend.design(tree)))
        except ConfigError as error:
            check.found.extend(error.problems)
    check.done()


_MOST_COMPARED = 4096  # designs in a call up to which equal ones are looked for


class Part:
    """Points on their way, which are leased and given up as a whole, in the same place whoever evaluates them.

    found: place of the first design -> results. left: number of designs without any. submitted: whether somebody
    evaluates them. whole, start: the part that this is a piece of, and where it begins there.
    """

    def __init__(self, points: Points, whole: Part | None = None, start: int = 0) -> None:
        self.points, self.start = points, start
        self.whole = self if whole is None else whole
        self.found: dict[int, Results] = {}
        self.left = points.size
        self.submitted = False

    @property
    def size(self) -> int:
        """Number of designs."""
        return self.points.size

    @property
    def batch(self) -> Batch:
        """Its designs, which there must be."""
        assert self.points.batch is not None
        return self.points.batch

    @property
    def keys(self) -> Keys:
        """Keys of its designs [size, 2]."""
        return self.points.keys

    def take(self, start: int, results: Results) -> None:
        """Add the results of its designs from `start` on."""
        self.found[start] = results
        self.left -= results.size

    def know(self, is_known: NDArray[np.bool_], results: Results) -> NDArray[np.bool_]:
        """Take in what is recorded; which of it was not known here."""
        gaps = is_known.copy()
        for start, have in self.found.items():
            gaps[start : start + have.size] = False  # known results stay
        for start, stop in _runs(gaps):
            self.take(start, results.take(slice(start, stop)))
        return gaps

    def pieces(self) -> Iterator[Part]:
        """Designs without results yet, as grids."""
        gaps = np.ones(self.size, bool)
        for start, have in self.found.items():
            gaps[start : start + have.size] = False
        for start, points in _grids(self.points, gaps):
            yield Part(points, self, start)

    def cut(self, most: int) -> Iterator[Part]:
        """The same piece of its whole in smaller ones, of at most `most` designs each."""
        start = self.start
        for points in self.points.split(most):
            yield Part(points, self.whole, start)
            start += points.size

    @property
    def results(self) -> Results:
        """All its results, in the order of its designs; each must have some."""
        assert not self.left
        return Results.join([self.found[start] for start in sorted(self.found)])


def _runs(marks: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """Runs of marks without a gap, as start...stop."""
    # +1 where a run begins, -1 where it ends
    edges = np.flatnonzero(np.diff(np.concatenate([[False], marks, [False]]).astype(np.int8)))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def _grids(points: Points, wanted: NDArray[np.bool_], start: int = 0) -> Iterator[tuple[int, Points]]:
    """The wanted ones of some points as smaller grids, with their places."""
    if wanted.all():
        yield start, points
    elif wanted.any():
        for half in points.split((points.size + 1) // 2):  # halves of a grid are grids: a gap costs a few calls
            yield from _grids(half, wanted[: half.size], start)
            wanted, start = wanted[half.size :], start + half.size


def batched_parts(parts: Iterable[Part], enough: Callable[[], int]) -> Iterator[list[Part]]:
    """Parts in order, so many together that they have `enough` designs."""
    together: list[Part] = []
    count = 0
    for part in parts:
        together.append(part)
        count += part.size
        if count >= enough():  # asked each time, as it grows
            yield together
            together, count = [], 0
    if together:
        yield together


def look_up(parts: Sequence[Part], session: Session, advance: Callable[[int], None]) -> None:
    """Give parts their results that are recorded; advance(n) is told how many."""
    # None: none of these can be known
    lookup = session.find(np.concatenate([part.keys for part in parts])) if parts else None
    if lookup is None:
        return
    ends = np.cumsum([len(part.keys) for part in parts])
    for part, stop in zip(parts, ends.tolist(), strict=True):
        places, before = slice(stop - len(part.keys), stop), part.left
        fresh = part.know(lookup.known[places], lookup.results.take(places))
        session.recall(lookup.study[places][fresh])  # counted once, though a point is looked up again and again
        advance(before - part.left)


def first_and_repeated(parts: list[Part], most: int) -> tuple[list[Part], list[Part]]:
    """Parts in two goes: those with designs that are in an earlier part are looked up once that has results.

    Where many designs go into a call, looking for these would cost more than evaluating them again.
    """
    if most > _MOST_COMPARED or len(parts) < 2:
        return parts, []
    met: set[bytes] = set()
    first: list[Part] = []
    later: list[Part] = []
    for part in parts:
        names = key_bytes(part.keys)
        (first if met.isdisjoint(names) else later).append(part)
        met.update(names)
    return first, later


def parts_of(points: Points, most: int) -> Iterator[Part]:
    """Some points in parts of at most `most` designs."""
    yield from map(Part, points.split(most))  # the same parts in every process, whose leases must match


def call_groups(pieces: Iterable[Part], most: int, takes_long: Callable[[BaseModel], bool]) -> Iterator[list[Part]]:
    """All pieces in order, so that no call has more than `most` designs, or than one that takes long."""
    group: list[Part] = []
    count = 0
    for piece in pieces:
        # the last one, and this: a slow one is a call by itself
        slow = any(takes_long(other.batch.design) for other in (*group[-1:], piece))
        if group and (slow or count + piece.size > most):
            yield group
            group, count = [], 0
        group.append(piece)
        count += piece.size
    if group:
        yield group
