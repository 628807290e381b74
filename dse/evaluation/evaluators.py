"""Evaluators of points by name (`executor.evaluator`), with their settings: this machine, and what others offer.

`Evaluator` looks points up in the store, leases what is missing, evaluates it on one core or many, with the same
results, and records it.
"""

from __future__ import annotations

import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field
from typing import Annotated, Protocol

import numpy as np
from pydantic import AfterValidator, Field

from dse import plugins
from dse.backend import STATUSES, Batch, Result, Results
from dse.errors import Broken
from dse.evaluation.calls import (
    BackendSpec,
    Part,
    Patience,
    batched_parts,
    broken_error,
    call,
    call_groups,
    difference,
    first_and_repeated,
    halve,
    look_up,
    parts_of,
    serve,
)
from dse.evaluation.workers import SIGNALS, Lost, Pool, SignalInterrupt, num_cpus
from dse.space import Points
from dse.store.contract import Session, StorelessSession
from dse.values import Frozen, Keys
from dse.values.units import Bytes, Fraction, Integer, Seconds

POOL_PAYS_S = 2.0  # work done here before worker processes are started: starting them costs about as much
_CALLS_PER_JOB = 16  # in one round: few are held, and waiting for the last of a round costs little
_LOOKED_UP = 512  # designs that are looked up together at least
_FEW = 256  # designs that take so long together that looking them up once more costs little
_POLL_S = 0.05  # between looks at what another process has in hand
_SIGNAL_S = 0.5  # within which a signal reaches all processes of a job
SIGNALLED = re.compile(
    "|".join((*(f"CRASH {of.name}|EXIT {128 + of}\\b" for of in SIGNALS), r"EXIT \d+\n[\s\S]*\bKeyboardInterrupt\b"))
)
"""Reasons of programs that a signal ended, also by way of a shell, or of Python before it can say so."""
_FAILED = ("CRASH ", "EXIT ")
_MOST_ELSEWHERE = 1000  # parts that others have in hand which are passed by before they are waited for


def _some(jobs: int) -> int:
    if jobs == 0:
        raise ValueError("must be at least 1, or -1 for one per core")
    return jobs


class ExecutorSettings(Frozen):
    """The `executor` group. evaluator: plug-in that evaluates, which may have keys of its own. jobs: worker processes,
    -1 for one per core.

    timeout_s: that evaluating one design may take; memory_bytes: address space of a worker; null for no limit.
    max_retries: how often a design is tried again whose worker was lost. broken_after: failures in a row, all alike,
    after which a study stops; 0 for never. max_failed_fraction: of the points, beyond which the exit code is 3.
    recheck: share of the points that are evaluated twice, the second time in a process of their own, and compared.
    """

    name: str
    description: str = ""
    evaluator: str = "local"
    jobs: Annotated[Integer, Field(ge=-1, le=1024), AfterValidator(_some)] = -1
    timeout_s: Annotated[Seconds, Field(gt=0)] | None = None
    memory_bytes: Annotated[Bytes, Field(ge=1e8)] | None = None  # an interpreter with its libraries takes that much
    max_retries: Annotated[Integer, Field(ge=0, le=100)] = 1
    broken_after: Annotated[Integer, Field(ge=0)] = 5
    max_failed_fraction: Fraction = 0.0
    recheck: Fraction = 0.0

    @property
    def num_jobs(self) -> int:
        """Worker processes."""
        return num_cpus() if self.jobs < 0 else self.jobs


@dataclass(frozen=True)
class Evaluator:
    """Evaluates points on one core or many, with the same results, and records each before it is told.

    session: the store. advance(n) is told of progress. stopping: whether to end once what is in flight is recorded.
    apart: whether designs are evaluated in worker processes from the start, so that one that ends its process does not
    end this one. looked_up: whether somebody has just looked all points up, and found none recorded.
    """

    spec: BackendSpec
    executor: ExecutorSettings
    session: Session = field(default_factory=StorelessSession)
    advance: Callable[[int], None] = lambda count: None
    stopping: Callable[[], bool] = lambda: False
    apart: bool = False
    looked_up: bool = False

    def results(self, points: Iterable[Points]) -> Iterator[Results]:
        """Checked results of the designs of each point, in order. A point must have designs.

        Points are taken as they are needed: neither they nor their results gather. What is recorded is not evaluated
        again; what another process has in hand is waited for. Raises Broken, and SignalInterrupt where it is to stop.
        """
        return OpenEvaluator(self).results(points, last=True)


class OpenEvaluator:
    """An evaluator whose worker processes stay from one call of `results` to the next; close it when done."""

    def __init__(self, evaluator: Evaluator) -> None:
        self._evaluator, self._calls = evaluator, _Calls(evaluator)

    def results(self, points: Iterable[Points], *, last: bool = False) -> Iterator[Results]:
        """As `Evaluator.results`. last: close it at the end."""
        flow = _Flow(self._evaluator, self._calls)
        with closing(self) if last else nullcontext():  # also where the caller stops before the end
            for parts in flow.rounds(points):
                for missing in flow.missing(parts):
                    flow.evaluate(missing)
                yield from flow.ready()
            while flow.elsewhere:  # all that is left is in others' hands
                flow.wait()
                yield from flow.ready()

    def close(self) -> None:
        """End the worker processes."""
        self._calls.close()


class _Flow:
    """Points on their way: what is known is looked up, the rest leased, evaluated and recorded, a round at a time.

    elsewhere: parts that other processes have in hand; they are come back to.
    """

    def __init__(self, evaluator: Evaluator, calls: _Calls) -> None:
        self._evaluator, self._session = evaluator, evaluator.session
        backend = evaluator.spec.make()
        self._most, self._takes_long = backend.batch, backend.takes_long
        self.calls = calls
        self.elsewhere: list[Part] = []
        self._points: deque[list[Part]] = deque()  # in order: results are given in this order
        self._recording: deque[Part] = deque()  # handed to the session, in the order in which it reports them
        self._round = 0

    def rounds(self, points: Iterable[Points]) -> Iterator[list[Part]]:
        """Parts of the points in order, as many together as are looked up at a time."""

        def parts() -> Iterator[Part]:
            for point in points:
                point_parts = list(parts_of(point, self._most))
                self._points.append(point_parts)
                yield from point_parts

        for together in batched_parts(parts(), self._enough):
            yield together
            self._round += 1

    def _enough(self) -> int:
        """Designs of this round: few at first, so that there is progress to tell."""
        # doubles with each round, up to all that is evaluated together
        return min(_LOOKED_UP << self._round, max(_LOOKED_UP, self._most * self.calls.width))

    def ready(self) -> Iterator[Results]:
        """Results of the points that have all of theirs, as long as they come in order."""
        while self._points and not any(part.left for part in self._points[0]):
            yield Results.join([part.results for part in self._points.popleft()])

    def missing(self, parts: list[Part]) -> Iterator[list[Part]]:
        """Yield the parts to evaluate: those not recorded; then those that repeated them, and still are not."""
        self.calls.check()
        if not self._evaluator.looked_up:
            look_up(parts, self._session, self._evaluator.advance)
        first, later = first_and_repeated([part for part in parts if part.left], self._most)
        yield first
        look_up(later, self._session, self._evaluator.advance)
        yield [part for part in later if part.left]
        if len(self.elsewhere) > _MOST_ELSEWHERE:  # so that points on their way do not gather
            self.wait()

    def wait(self) -> None:
        """Look for what others have recorded meanwhile, and take over what they left."""
        self.calls.check()
        parts, self.elsewhere = self.elsewhere, []
        look_up(parts, self._session, self._evaluator.advance)
        left = [part for part in parts if part.left]
        self.evaluate(left)
        if left and len(self.elsewhere) == len(left):  # nothing was freed: do not ask the store all the time
            time.sleep(_POLL_S)

    def evaluate(self, parts: Sequence[Part]) -> None:
        """Evaluate what is not another's, as many together as are made ready for calls at a time."""
        for together in batched_parts(parts, lambda: self._most * self.calls.width):
            pieces = self._lease(together)
            try:
                for group, group_results in self.calls.results(list(call_groups(pieces, self._most, self._takes_long))):
                    for piece, results in zip(group, group_results, strict=True):
                        self._record(piece, results)
                    self.calls.judge(group, group_results)
            finally:
                self._settle(self._session.flush())  # also where it stops: what was evaluated is kept

    def _lease(self, parts: Sequence[Part]) -> list[Part]:
        """The pieces of the parts that no other process has in hand, and nobody has recorded."""
        mine = self._session.lease([part.keys for part in parts])
        leased = [part for part, ours in zip(parts, mine, strict=True) if ours]
        self.elsewhere += [part for part, ours in zip(parts, mine, strict=True) if not ours]
        if self._session.is_shared and not (self._evaluator.looked_up and sum(part.size for part in leased) > _FEW):
            look_up(
                leased, self._session, self._evaluator.advance
            )  # it may have been recorded just before the lease was ours
        pieces = [piece for part in leased for piece in part.pieces()]
        # somebody recorded them before the lease
        self._session.release([part.keys for part in leased if not part.left])
        return pieces

    def _record(self, piece: Part, results: Results) -> None:
        part = piece.whole
        part.left -= results.size  # before recording, which asks whether the part is complete
        self._recording.append(piece)
        # a lease ends when all of its part is recorded
        done = [] if part.left else [part.keys]
        self._settle(self._session.record(piece.points, results, done, idle=self.calls.away))

    def _settle(self, recorded: Sequence[Results]) -> None:
        """Results that are recorded count."""
        for results in recorded:
            piece = self._recording.popleft()
            piece.whole.found[piece.start] = results  # only now: what could not be recorded does not count
            self._evaluator.advance(results.size)


class _Calls:
    """Calls of the backend: here, until worker processes pay; there from the start where calls have limits.

    Points that were in flight when their process ended may have ended it, so they are not evaluated here either.
    """

    def __init__(self, evaluator: Evaluator) -> None:
        self._evaluator, executor = evaluator, evaluator.executor
        self._spent = 0.0
        self._pool: Pool | None = None
        self._jobs = executor.num_jobs
        # limits need a process that can be ended
        limited = executor.timeout_s is not None or executor.memory_bytes is not None
        # points in flight may have ended their process: keep this one out of it
        isolated = evaluator.apart or evaluator.spec.make().is_isolated
        self._apart = limited or isolated or evaluator.session.lost > 0
        self._streak: list[Keys] = []  # keys of the last failures that were alike
        self._last = ""
        self._patience = Patience(executor.max_retries, executor.broken_after)
        self._second: Pool | None = None

    @property
    def width(self) -> int:
        """Number of calls that are made ready together."""
        return _CALLS_PER_JOB * self._jobs if self.away else 1  # one at a time here, so that results are recorded soon

    @property
    def away(self) -> bool:
        """True if calls are made in worker processes."""
        return self._apart or (self._jobs > 1 and self._spent >= POOL_PAYS_S)

    def results(self, groups: Sequence[list[Part]]) -> Iterator[tuple[list[Part], list[Results]]]:
        """Results of each group, as they come. Raises Broken; what is recorded of the failures it tells is not kept."""
        try:
            if self.away:
                for group, results in self._results_from_workers(groups):
                    if self._ended_with_the_study(results):
                        continue
                    yield group, self._recheck(group, results)
            else:
                for group in groups:
                    self.check()
                    began = time.perf_counter()
                    results = call(self._evaluator.spec, [piece.batch for piece in group], self._patience)
                    self._spent += time.perf_counter() - began
                    if self._ended_with_the_study(results):
                        self.check()
                    yield group, self._recheck(group, results)
        except Broken:
            if self._streak:
                # results of a broken backend say nothing of the designs
                self._evaluator.session.withdraw(np.concatenate(self._streak))
            raise

    def _ended_with_the_study(self, group_results: Sequence[Results]) -> bool:
        """Tell whether a signal to all processes of a job, which stops the study, ended a program: that is no result.

        The signal may reach the program sooner than this process, and a program may end by it with any code.
        """
        texts = [text for results in group_results for text in results.texts]
        if self._evaluator.stopping():
            return any(text.startswith(_FAILED) for text in texts)
        if not any(SIGNALLED.match(text) for text in texts):
            return False
        until = time.monotonic() + _SIGNAL_S
        while not self._evaluator.stopping() and time.monotonic() < until:
            time.sleep(_POLL_S)
        return self._evaluator.stopping()

    def _results_from_workers(self, groups: Sequence[list[Part]]) -> Iterator[tuple[list[Part], list[Results]]]:
        if self._pool is None:
            memory = self._evaluator.executor.memory_bytes
            self._pool = Pool(serve, (self._evaluator.spec, (), Patience()), size=self._jobs, memory_bytes=memory)
        import joblib

        jobs = joblib.Parallel(n_jobs=self._jobs, backend="threading", return_as="generator_unordered")
        try:
            for group, results in jobs(joblib.delayed(self._results_of_group)(group) for group in groups):
                if results is not None:
                    yield group, results
        except BaseException:  # the threads must not wait for workers
            self._pool.close()
            raise
        self.check()

    def _results_of_group(self, group: list[Part]) -> tuple[list[Part], list[Results] | None]:
        """Results of one group from a worker; None where it is to stop."""
        if self._evaluator.stopping():
            return group, None
        return group, self._call_worker([piece.batch for piece in group], retries=self._evaluator.executor.max_retries)

    def _call_worker(self, batches: Sequence[Batch], retries: int) -> list[Results]:
        """As `call`, from a worker: a call that is lost is made again, then in halves."""
        size, limit = sum(batch.size for batch in batches), self._evaluator.executor.timeout_s
        assert self._pool is not None
        try:
            request = (self._evaluator.spec, batches, self._patience.fresh)  # each worker counts by itself
            # a limit is of one design
            results: list[Results] = self._pool.call(request, None if limit is None else limit * size)
            self._patience.record_success()
            return results
        except (Lost, RuntimeError) as error:
            if self._pool.closed:  # this process ends them: not a failure of the design
                raise
            again = size == 1 and retries > 0 and not str(error).startswith("TIMEOUT")  # it would take as long again
            if isinstance(error, Lost):
                outcome = "is evaluated again" if size > 1 or again else "has failed"
                brief = str(error).partition(": ")[0]  # without what the process wrote
                print(f"a worker was lost ({brief}); what it had in hand ({size}) {outcome}", file=sys.stderr)
            if again:
                return self._call_worker(batches, retries - 1)
            if size == 1:
                self._patience.record_failure(str(error))
            return halve(batches, str(error), lambda half: self._call_worker(half, retries))

    def _recheck(self, group: Sequence[Part], group_results: Sequence[Results]) -> list[Results]:
        """The results, of which some are obtained twice; invalid where the two differ."""
        # share of the 64-bit range that a key's first half may lie in
        most = self._evaluator.executor.recheck * 2.0**64  # keys are hashes: some of them are a random sample
        if not most:
            return list(group_results)
        if self._second is None:
            memory = self._evaluator.executor.memory_bytes
            # few designs: one process is enough
            self._second = Pool(serve, (self._evaluator.spec, (), Patience()), size=1, memory_bytes=memory)
        return [self._compare(piece, results, most) for piece, results in zip(group, group_results, strict=True)]

    def _compare(self, piece: Part, results: Results, most: float) -> Results:
        """The results of a piece, of which those whose key is below `most` are obtained again."""
        keys = piece.keys[:, 0].astype(float)
        compared = results
        for place in np.flatnonzero((keys <= most) & results.ok).tolist():  # failed points may fail otherwise
            if differing := difference(results[place], self._again(Batch(piece.batch.at(place)))):
                odd = Results.of([Result("invalid", reason=differing, engine=results[place].engine)])
                compared = Results.join([compared.take(slice(place)), odd, compared.take(slice(place + 1, None))])
        return compared

    def _again(self, batch: Batch) -> Result:
        """The result of one design from a process of its own."""
        assert self._second is not None
        try:
            request = (self._evaluator.spec, [batch], Patience())
            results: list[Results] = self._second.call(request, self._evaluator.executor.timeout_s)
            return results[0][0]
        except (Lost, RuntimeError) as error:
            return Result("failed", reason=str(error))

    def check(self) -> None:
        """Raise SignalInterrupt where it is to stop."""
        if self._evaluator.stopping():
            raise SignalInterrupt

    def judge(self, group: Sequence[Part], group_results: Sequence[Results]) -> None:
        """Look for a backend that fails every time, and alike. Raises Broken; what it said is not kept."""
        most = self._evaluator.executor.broken_after
        for piece, results in zip(group, group_results, strict=True):
            failed = results.status == STATUSES.index("failed")
            if not failed.any() or not most:  # some success between failures: not broken
                self._streak = []
                continue
            for place in range(results.size):
                reason = results[place].reason if failed[place] else ""
                keys = piece.keys[place : place + 1]
                # goes on where the reason is the same, or begins anew
                self._streak = [*self._streak, keys] if reason and reason == self._last else [keys] if reason else []
                self._last = reason
                if len(self._streak) == most:
                    self._give_up(group, group_results)

    def _give_up(self, group: Sequence[Part], group_results: Sequence[Results]) -> None:
        failed = [results.status == STATUSES.index("failed") for results in group_results]
        keys = [piece.keys[bad] for piece, bad in zip(group, failed, strict=True)]  # those of this call, too
        self._evaluator.session.withdraw(np.concatenate([*self._streak, *keys]))
        raise broken_error(len(self._streak), self._last)

    def close(self) -> None:
        """End the workers."""
        for pool in (self._pool, self._second):
            if pool is not None:
                pool.close()


@dataclass(frozen=True)
class Services:
    """Services of a running study to its evaluation. session: the store. stopping: whether to end once calls in flight
    are recorded. evaluator: makes what evaluates its points; None: `evaluate_here`. advance: as in `Evaluator`.
    """

    session: Session = field(default_factory=StorelessSession)
    stopping: Callable[[], bool] = lambda: False
    evaluator: MakeEvaluator | None = None
    advance: Callable[[int], None] = lambda count: None

    def evaluator_of(self, spec: BackendSpec, executor: ExecutorSettings) -> AnyEvaluator:
        """What evaluates the points of a backend."""
        return (self.evaluator or evaluate_here)(spec, executor, self)


class AnyEvaluator(Protocol):
    """Evaluator of points, here or elsewhere. advance(n) is told of progress."""

    @property
    def advance(self) -> Callable[[int], None]:
        """As in `Evaluator`."""

    def results(self, points: Iterable[Points]) -> Iterator[Results]:
        """As `Evaluator.results`."""


MakeEvaluator = Callable[[BackendSpec, ExecutorSettings, Services], AnyEvaluator]


@dataclass(frozen=True)
class EvaluatorKind:
    """A kind of evaluator, as a plug-in offers it.

    settings: model of its `executor` group. opened: context in which evaluators can be made; the parts of a study share
    what it opens, such as a connection. Making one raises ConfigError where settings and services do not suit.
    store_for: why it needs a store; "" where it needs none.
    """

    settings: type[ExecutorSettings]
    opened: Callable[[], AbstractContextManager[MakeEvaluator]]
    store_for: str = ""


def evaluate_here(spec: BackendSpec, executor: ExecutorSettings, services: Services) -> Evaluator:
    """Evaluator in this process and in worker processes of this machine."""
    return Evaluator(spec, executor, services.session, services.advance, services.stopping)


LOCAL = EvaluatorKind(ExecutorSettings, lambda: nullcontext(evaluate_here))


def evaluator_kind(name: str) -> EvaluatorKind:
    """The kind of evaluator of a name. Raises ConfigError where there is none."""
    kind: EvaluatorKind = plugins.load("evaluator", name)
    return kind
