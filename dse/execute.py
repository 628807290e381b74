"""Evaluating batches of designs, on one core or many, with the same results."""

from __future__ import annotations

import contextlib
import itertools
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Annotated, Any

import joblib
from numpy.typing import NDArray
from pydantic import AfterValidator, Field

from dse import discovery
from dse.backend import Backend, Batch, Result, Results, checked
from dse.problems import ConfigError, Problem, Problems
from dse.values import Frozen, Integer

_POOL_PAYS_S = 2.0  # work done here before worker processes are started: starting them costs about as much
_CALLS_PER_JOB = 16  # in one round: few are held, and waiting for the last of a round costs little


def _some(jobs: int) -> int:
    if jobs == 0:
        raise ValueError("must be at least 1, or -1 for one per core")
    return jobs


class Executor(Frozen):
    """The `executor` group. jobs: worker processes, -1 for one per core."""

    name: str
    description: str = ""
    jobs: Annotated[Integer, Field(ge=-1, le=1024), AfterValidator(_some)] = -1


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
        given = {key: value for key, value in simulator.items() if key not in ("name", "description", "backend")}
        return cls(str(simulator.get("backend")), tuple(sorted(given.items())))

    def make(self) -> Backend:
        """The backend, one per process. Raises ConfigError for unknown names or parameters."""
        return _make(self)

    def __hash__(self) -> int:
        return hash(str(self))  # parameters may be lists


@discovery.remembered
def _make(spec: BackendSpec) -> Backend:
    kind = discovery.load("simulators", spec.name, "BACKEND")
    try:
        made: Backend = kind(**dict(spec.parameters))
    except TypeError as error:
        rule = f"does not fit backend {spec.name}: {error}"
        raise ConfigError([Problem("simulator", rule, dict(spec.parameters))]) from error
    return made


def evaluate(
    spec: BackendSpec, batches: Iterable[Batch], *, jobs: int, seen: Callable[[int], None]
) -> Iterator[Results]:
    """Checked results of each batch as they come, in order, whatever the number of jobs; `seen(n)` is told of progress.

    Batches are taken as they are needed: neither they nor their results gather. What the backend gets in one call
    is small batches together, or a part of a large one. The first calls are made here; worker processes are started
    once they pay.
    """
    groups = _groups(batches, spec.make().batch)
    began: list[Results] = []
    for last, results in _calls(spec, groups, jobs):
        for ends, found in zip(last, results, strict=True):
            seen(found.size)
            began.append(found)
            if ends:
                yield Results.join(began)
                began = []


@dataclass(frozen=True)
class _Group:
    """What goes into one call: parts of batches, and whether each is the last of its batch."""

    parts: tuple[Batch, ...]
    last: tuple[bool, ...]


def _groups(batches: Iterable[Batch], most: int) -> Iterator[_Group]:
    """All batches in order, so that no call has more than `most` designs."""
    held: list[tuple[Batch, bool]] = []
    count = 0
    for batch in batches:
        parts = list(batch.split(most))
        for place, part in enumerate(parts, start=1):
            if held and count + part.size > most:
                yield _Group(*zip(*held, strict=True))
                held, count = [], 0
            held.append((part, place == len(parts)))
            count += part.size
    if held:
        yield _Group(*zip(*held, strict=True))


def _calls(spec: BackendSpec, groups: Iterator[_Group], jobs: int) -> Iterator[tuple[tuple[bool, ...], list[Results]]]:
    """Results of every group in order; worker processes are given a round of calls at a time."""
    spent = 0.0
    while jobs == 1 or spent < _POOL_PAYS_S:
        group = next(groups, None)
        if group is None:
            return
        began = time.perf_counter()
        results = call(spec, group.parts)
        spent += time.perf_counter() - began
        yield group.last, results
    size = _CALLS_PER_JOB * (joblib.cpu_count() if jobs < 0 else jobs)
    while ahead := list(itertools.islice(groups, size)):
        for group, found in zip(ahead, _pool(spec, ahead, jobs), strict=True):
            yield group.last, found


def _pool(spec: BackendSpec, groups: Sequence[_Group], jobs: int) -> Iterator[list[Results]]:
    """Results of some groups, in order, from worker processes."""
    tasks = [joblib.delayed(call)(spec, group.parts) for group in groups]
    with _lost_workers_told():
        with _interrupts_ignored():  # workers inherit it: Ctrl-C is for this process, which then ends them
            results = joblib.Parallel(n_jobs=jobs, return_as="generator")(tasks)
        yield from results


@contextlib.contextmanager
def _lost_workers_told() -> Iterator[None]:
    try:
        yield
    except BrokenProcessPool as error:
        raise OSError("a worker process died (killed, or out of memory); try executor.jobs=1") from error


@contextlib.contextmanager
def _interrupts_ignored() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def call(spec: BackendSpec, batches: Sequence[Batch]) -> list[Results]:
    """Checked results of each batch from one call of the backend.

    If it fails, each half alone, and so on: a design on which it fails is one `failed` result, the others have theirs.
    """
    try:
        return _checked_call(spec.make(), batches)
    except Exception as error:
        if len(batches) > 1:
            half = len(batches) // 2
            return [*call(spec, batches[:half]), *call(spec, batches[half:])]
        (batch,) = batches
        if batch.size == 1:
            return [Results.of([Result("failed", reason=f"{type(error).__name__}: {error}")])]
        return [Results.join([call(spec, [part])[0] for part in batch.split((batch.size + 1) // 2)])]


def _checked_call(backend: Backend, batches: Sequence[Batch]) -> list[Results]:
    found = backend.evaluate(batches)
    if len(found) != len(batches):
        raise RuntimeError(f"the backend gave {len(found)} results for {len(batches)} batches")
    for batch, results in zip(batches, found, strict=True):
        columns: list[NDArray[Any]] = [results.status, results.reason, results.engine, *results.metrics.values()]
        if wrong := [len(column) for column in columns if len(column) != batch.size]:
            raise RuntimeError(f"the backend gave {wrong[0]} results for {batch.size} designs")
    return [checked(results, backend.metrics) for results in found]


def validate(backend: Backend, trees: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse base designs that are invalid or infeasible, all problems at once."""
    check = Problems()
    for tree in trees.values():
        try:
            check.found.extend(backend.problems(backend.design(tree)))
        except ConfigError as error:
            check.found.extend(error.problems)
    check.done()
