"""Evaluating points by workers of Dask, with the same results as here.

Points go out in chunks that take a worker about `executor.chunk_s`, as measured; slow designs one by one. Workers
record by themselves (`dse_cluster.remote`) and answer with the results; a future is let go once it is read, so that
the loss of a worker repeats what it had in hand, and nothing else. Who counts what:

- a design that ends its process is a failure of its worker's count (`executor.max_retries`), which survives it;
- a chunk whose workers were lost several times (Dask's `allowed-failures`) is halved, and fails when it is one design;
- a worker that runs other code is told by name, and sent away.
"""

from __future__ import annotations

import queue
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dse.backend import Result, Results
from dse.errors import Broken, ConfigError, Problem
from dse.evaluation.calls import BackendSpec, Part, batched_parts, look_up, parts_of
from dse.evaluation.evaluators import EvaluatorKind, ExecutorSettings, MakeEvaluator, Services
from dse.evaluation.workers import SignalInterrupt
from dse.results.provenance import code_version
from dse.space import Points
from dse.store.contract import Session, key_bytes
from dse.store.database import StoreError
from dse.store.owner import me
from dse.store.session import StoreSession
from dse_cluster.connection import ClusterError, connected
from dse_cluster.remote import Answer, Order, evaluate
from dse_cluster.settings import ClusterExecutor

if TYPE_CHECKING:
    from distributed import Client, Future

_AHEAD = 2  # chunks for each thread of the cluster: one in work, one that waits there
_LOOKED_UP = 4096  # designs that are looked up together
_MOST_OPEN = 1 << 18  # designs that wait for results, or for those of earlier ones
_GROWTH = 8  # a chunk is not larger than so many times the largest one before it
_PER_CHUNK = 512  # designs up to which a chunk costs the store the same
_LOOK_S = 2.0  # between looks at who works
_LONELY_S = 10.0  # without workers, after which it is told
_RETURN_S = 60.0  # within which a lost worker may be started again
_POLL_S = 0.2
_ANSWER_S = 10.0  # for an answer that is ready


@contextmanager
def opened() -> Iterator[MakeEvaluator]:
    """Evaluators of a study's points by a cluster, which all share. It is connected to as soon as one is made.

    Making one raises ConfigError and ClusterError.
    """
    with ExitStack() as stack:
        clients: list[Client] = []

        def make(spec: BackendSpec, executor: ExecutorSettings, services: Services) -> ClusterEvaluator:
            assert isinstance(executor, ClusterExecutor)
            order = _order(spec, executor, services.session)
            if not clients:
                try:
                    clients.append(stack.enter_context(connected(executor)))
                except ClusterError:
                    if services.stopping():  # the signal that stops the study ended processes of the cluster
                        raise SignalInterrupt from None
                    raise
            return ClusterEvaluator(clients[0], order, services)

        yield make


EVALUATOR = EvaluatorKind(ClusterExecutor, opened, "a cluster needs a store: a lease in it decides who evaluates")


def _order(spec: BackendSpec, executor: ClusterExecutor, session: Session) -> Order:
    """What all chunks of a study share. Raises ConfigError for a store that workers cannot use."""
    assert isinstance(session, StoreSession)  # as `EVALUATOR` demands
    store = session.store
    if executor.leaves_machine and store.url.startswith("sqlite"):
        rule = "is a file of this machine, and the workers are on others"
        raise ConfigError([Problem("store.url", rule, None, "use store.url=postgresql://<user>@<host>/<database>")])
    return Order(
        code=code_version(),
        host=me().host,
        folder=str(Path.cwd()),
        spec=spec,
        version=spec.version,
        executor=executor,
        url=store.url,
        patience_s=store.patience_s,
        hold=session.hold,
    )


@dataclass
class Chunk:
    """Pieces that a worker evaluates together.

    losses: times that it was given up, its workers being lost. only: workers that may evaluate it, None for all.
    """

    pieces: Sequence[Part]
    losses: int = 0
    only: Sequence[str] | None = None

    @property
    def size(self) -> int:
        """Number of designs."""
        return sum(piece.size for piece in self.pieces)

    @property
    def points(self) -> list[Points]:
        """As a worker takes them."""
        return [piece.points for piece in self.pieces]

    def halves(self) -> Iterator[Chunk]:
        """Yield it in two; one design cannot be halved."""
        pieces = list(self.pieces)
        if len(pieces) == 1:
            (piece,) = pieces
            pieces = list(piece.cut((piece.size + 1) // 2))
        middle = (len(pieces) + 1) // 2
        yield from (Chunk(half, self.losses) for half in (pieces[:middle], pieces[middle:]) if half)


def take(queued: deque[Part], size: int, is_slow: Callable[[Part], bool]) -> list[Part]:
    """Take pieces of at most `size` designs in all from a queue, or a slow design alone.

    Whole ones where they are smaller, else a part of one: evaluating many small grids takes longer than few large ones.
    """
    pieces = list[Part]()
    while queued and size > 0:
        slow = is_slow(queued[0])
        most = 1 if slow else size
        if pieces and (slow or queued[0].size > most):
            break
        piece = queued.popleft()
        while piece.size > most:
            piece, *rest = piece.cut((piece.size + 1) // 2)
            queued.extendleft(reversed(rest))
        pieces.append(piece)
        size = 0 if slow else size - piece.size
    return pieces


class ClusterEvaluator:
    """As `Evaluator`, by a cluster. One `results` at a time."""

    def __init__(self, client: Client, order: Order, services: Services) -> None:
        self.client, self.order, self.services, self.advance = client, order, services, services.advance
        self.pace = Pace(order.executor.chunk_s)
        self.crew = Crew(client, order.executor.num_jobs)

    def results(self, points: Iterable[Points]) -> Iterator[Results]:
        """Checked results of the designs of each point, in order. A point must have designs.

        Raises Broken, StoreError and ClusterError, and SignalInterrupt where it is to stop.
        """
        flow = _Flow(self)
        try:
            yield from flow.run(points)
        finally:
            flow.cancel()


@dataclass
class Pace:
    """Size of chunks, by the time that the last ones took. chunk_s: time that one is to take, with its recording.

    Where the store is slow, as many record at once, smaller chunks would make it slower: what it costs is per chunk
    up to some hundred designs. So a chunk may evaluate for as long as the store takes for it, up to so many designs.
    """

    chunk_s: float
    most: int = 1
    design_s: float | None = None
    evaluation_s: float = 0.0  # of this, evaluating
    store_s: float = 0.0  # of a chunk

    @property
    def size(self) -> int:
        """Designs of the next chunk."""
        if self.design_s is None:
            return 1
        worthwhile = min(_PER_CHUNK, max(self.chunk_s, self.store_s) / self.evaluation_s)
        return max(1, min(self.most, round(max(self.chunk_s / self.design_s, worthwhile))))

    def learn(self, size: int, seconds: float | None, store_s: float = 0.0) -> None:
        """Take in the time of a chunk, where it is known, and how much of it the store took."""
        if seconds is None:
            return
        measured = np.array([seconds / size, (seconds - store_s) / size, store_s])
        if self.design_s is not None:
            measured = (measured + np.array([self.design_s, self.evaluation_s, self.store_s])) / 2
        self.design_s, self.evaluation_s, self.store_s = np.maximum(measured, [1e-9, 1e-9, 0.0]).tolist()
        self.most = max(self.most, _GROWTH * size)


@dataclass
class Crew:
    """Threads of a cluster's workers, looked at now and then, and the workers that were sent away.

    jobs: workers that a cluster is started with. present: addresses of workers that may evaluate.
    """

    client: Client
    jobs: int
    threads: int = 0
    present: frozenset[str] = frozenset()
    refused: dict[str, str] = field(default_factory=dict)
    _looked: float = -_LOOK_S
    _lost: float = -_RETURN_S  # when one that may evaluate was last lost
    _short_since: float | None = None

    def count(self) -> int:
        """Number of threads; tells where there are none for long.

        Raises ClusterError where all were refused, and no other one was lost that may yet come back.
        """
        now = time.monotonic()
        if now - self._looked < _LOOK_S:
            return self.threads
        self._looked = now
        workers = {name: count for name, count in self.client.nthreads().items() if name not in self.refused}
        if self.present - workers.keys() - self.refused.keys():
            self._lost = now
        self.threads, self.present = sum(workers.values()), frozenset(workers)
        if not self.threads and self.refused and now - self._lost >= _RETURN_S:
            name, why = next(iter(self.refused.items()))
            raise ClusterError(f"no worker may evaluate: {name} {why}")
        if len(workers) >= self.jobs or (self.client.cluster is None and self.threads):
            self._short_since = None
        elif self._short_since is None:
            self._short_since = now
        elif now - self._short_since > _LONELY_S:
            self._short_since = now + 5 * _LONELY_S
            if not self.threads:
                print("waiting for a worker: the scheduler has none", file=sys.stderr)
            if self.client.cluster is not None:  # Dask does not start those again that were lost while they began
                self.client.cluster.scale(self.jobs)
        return self.threads

    def refuse(self, worker: str, why: str) -> None:
        """Send a worker away."""
        if worker not in self.refused:
            self.refused[worker] = why
            print(f"worker {worker} is refused: it {why}", file=sys.stderr)
            self._looked = -_LOOK_S


class _Flow:
    """Points on their way: what is recorded is looked up, the rest sent in chunks, as much as the cluster takes."""

    def __init__(self, owner: ClusterEvaluator) -> None:
        self._evaluator, self._session = owner, owner.services.session
        backend = owner.order.spec.make()
        self._most, self._takes_long = backend.batch, backend.takes_long
        self._points: deque[list[Part]] = deque()
        self._open = 0  # designs of these points
        self._queued: deque[Part] = deque()
        self._sent: dict[Future, Chunk] = {}
        self._names: set[bytes] = set()  # keys that are sent, or wait to be
        self._later: list[Part] = []  # parts with such designs: looked up again once nothing is sent
        self._done: queue.SimpleQueue[Future] = queue.SimpleQueue()

    def run(self, points: Iterable[Points]) -> Iterator[Results]:
        """Results of each point, in order."""
        source = batched_parts(self._parts(points), lambda: _LOOKED_UP)
        more = True
        while more or self._points:
            self._check()
            while more and len(self._queued) < self._evaluator.crew.threads + 1 and self._open < _MOST_OPEN:
                parts = next(source, None)
                more = parts is not None
                self._begin(parts or [])
            self._send()
            if not (self._queued or self._sent) and self._later:
                parts, self._later, self._names = self._later, [], set()
                self._begin(parts)
            elif self._sent or self._queued:
                self._collect()
            yield from self._ready()

    def _parts(self, points: Iterable[Points]) -> Iterator[Part]:
        for point in points:
            parts = list(parts_of(point, self._most))
            self._points.append(parts)
            self._open += point.size
            yield from parts

    def _ready(self) -> Iterator[Results]:
        while self._points and not any(part.left for part in self._points[0]):
            parts = self._points.popleft()
            self._open -= sum(part.size for part in parts)
            yield Results.join([part.results for part in parts])

    def _begin(self, parts: list[Part]) -> None:
        """Look parts up, and put what is not recorded into the queue."""
        look_up(parts, self._session, self._evaluator.advance)
        for part in parts:
            if not part.left:
                continue
            pieces = list(part.pieces())
            names = [name for piece in pieces for name in key_bytes(piece.keys)]
            if self._names.isdisjoint(names):
                self._names.update(names)
                self._queued.extend(pieces)
            else:
                self._later.append(part)

    # ---------------------------------------------------------------- chunks

    def _send(self) -> None:
        """Send as many chunks as the cluster is to have in hand."""
        while self._queued and len(self._sent) < max(1, _AHEAD * self._evaluator.crew.count()):
            self._submit(Chunk(take(self._queued, self._evaluator.pace.size, self._is_slow)))

    def _is_slow(self, piece: Part) -> bool:
        return self._takes_long(piece.batch.design)

    def _submit(self, chunk: Chunk) -> None:
        crew = self._evaluator.crew
        able = [name for name in self._evaluator.client.nthreads() if name not in crew.refused]
        chunk.only = able if crew.refused else None
        future = self._evaluator.client.submit(
            evaluate, self._evaluator.order, chunk.points, pure=False, workers=chunk.only
        )
        self._sent[future] = chunk
        future.add_done_callback(self._done.put)

    def _collect(self) -> None:
        """Take in what has come, or wait for a moment."""
        try:
            ended = [self._done.get(timeout=_POLL_S)]
        except queue.Empty:
            self._check_scheduler()
            return
        while not self._done.empty():
            ended.append(self._done.get())
        for future in (future for future in ended if future in self._sent):
            chunk = self._sent.pop(future)
            if future.status != "finished":
                self._fail(chunk, future)
                continue
            try:
                answer = future.result(_ANSWER_S)
            except TimeoutError:  # its worker was lost with the answer, and no other one may make it again
                future.cancel()
                self._submit(chunk)
            except Exception:
                self._fail(chunk, future)
            else:
                self._take(chunk, answer)

    def _take(self, chunk: Chunk, answer: Answer) -> None:
        if answer.refusal:
            self._evaluator.crew.refuse(answer.worker, answer.refusal)
            self._submit(chunk)
            return
        self._evaluator.pace.learn(chunk.size, answer.seconds, answer.store_s)
        for piece, results in zip(chunk.pieces, answer.results, strict=True):
            piece.whole.take(piece.start, results)
            self._names.difference_update(key_bytes(piece.keys))
        self._evaluator.advance(chunk.size)

    def _fail(self, chunk: Chunk, future: Future) -> None:
        """Send a chunk again whose workers were lost; a design that is alone in it fails after some of that."""
        from distributed import KilledWorker

        error: Any = future.exception() if future.status == "error" else None
        if isinstance(error, Broken | StoreError):
            raise error
        if future.status == "error" and not isinstance(error, KilledWorker):
            raise ClusterError(f"a worker failed: {type(error).__name__}: {error}") from error
        self._check_scheduler()
        chunk.losses += 1
        if chunk.size > 1:
            for half in chunk.halves():
                self._submit(half)
        elif chunk.losses <= 1 + self._evaluator.order.executor.max_retries:
            self._submit(chunk)
        else:
            self._give_up(chunk)

    def _give_up(self, chunk: Chunk) -> None:
        """Record the failure of a design with which worker after worker was lost."""
        (piece,) = chunk.pieces
        failed = Results.of([Result("failed", reason="LOST: worker after worker of the cluster ended with it in hand")])
        self._session.record(piece.points, failed, [])
        self._session.flush()
        piece.whole.take(piece.start, failed)
        self._names.difference_update(key_bytes(piece.keys))
        self._evaluator.advance(1)

    # ---------------------------------------------------------------- ends

    def _check(self) -> None:
        if self._evaluator.services.stopping():
            raise SignalInterrupt
        self._evaluator.crew.count()
        present = self._evaluator.crew.present
        gone = [future for future, chunk in self._sent.items() if chunk.only and present.isdisjoint(chunk.only)]
        for future in gone if present else []:
            chunk = self._sent.pop(future)
            future.cancel()
            self._submit(chunk)  # to workers that are there

    def _check_scheduler(self) -> None:
        """Raise ClusterError where there is no scheduler any more."""
        if self._evaluator.client.status != "running":
            rule = "the scheduler is gone; nothing recorded is lost"
            raise ClusterError(f"{rule}: start one, and type the same command again")

    def cancel(self) -> None:
        """Let go of what is sent: what workers have in hand is recorded by them."""
        if self._sent and self._evaluator.client.status == "running":
            self._evaluator.client.cancel(list(self._sent))
        self._sent = {}
