"""Evaluating batches of designs, on one core or many, with the same results."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Annotated, Any

import joblib
from pydantic import AfterValidator, BaseModel, Field

from dse import discovery
from dse.backend import Backend, Result, checked
from dse.problems import ConfigError, Problem, Problems
from dse.values import Frozen, Integer

_POOL_PAYS_S = 4.0  # starting worker processes costs about two seconds


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
    spec: BackendSpec, designs: Sequence[BaseModel], *, jobs: int, seen: Callable[[int], None]
) -> list[Result]:
    """One checked result per design, in order, whatever the number of jobs; `seen(n)` is told of progress.

    The first batch runs here and is timed; worker processes are started only where that pays.
    """
    backend = spec.make()
    batches = [designs[first : first + backend.batch] for first in range(0, len(designs), backend.batch)]
    results: list[Result] = []
    began = time.perf_counter()
    while batches and (jobs == 1 or len(batches) * _mean(began, results, backend.batch) < _POOL_PAYS_S):
        results += _batch(spec, batches[0])
        seen(len(batches.pop(0)))
    for found in _pool(spec, batches, jobs):
        results += found
        seen(len(found))
    return results


def _mean(began: float, results: Sequence[Result], batch: int) -> float:
    """Seconds per batch so far."""
    return (time.perf_counter() - began) / (len(results) / batch) if results else 0.0


def _pool(spec: BackendSpec, batches: Sequence[Sequence[BaseModel]], jobs: int) -> Iterator[list[Result]]:
    if batches:
        tasks = (joblib.delayed(_batch)(spec, batch) for batch in batches)
        try:
            with _interrupts_ignored():  # workers inherit it: Ctrl-C is for this process, which then ends them
                results = joblib.Parallel(n_jobs=jobs, return_as="generator")(tasks)
            yield from results
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


def _batch(spec: BackendSpec, designs: Sequence[BaseModel]) -> list[Result]:
    """Results of a batch; if the backend fails on it, each design alone, so that one failure is one result."""
    backend = spec.make()
    try:
        found = backend.evaluate(designs)
        if len(found) != len(designs):
            raise RuntimeError(f"the backend gave {len(found)} results for {len(designs)} designs")
        return [checked(result, backend.metrics) for result in found]
    except Exception as error:
        if len(designs) == 1:
            return [Result("failed", reason=f"{type(error).__name__}: {error}")]
        return [result for design in designs for result in _batch(spec, [design])]


def validate(backend: Backend, trees: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse base designs that are invalid or infeasible, all problems at once."""
    check = Problems()
    for tree in trees.values():
        try:
            check.found.extend(backend.problems(backend.design(tree)))
        except ConfigError as error:
            check.found.extend(error.problems)
    check.done()
