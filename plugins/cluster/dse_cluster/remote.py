"""Work of a worker: it leases, evaluates and records designs by itself, and answers with their results.

A lease in the store decides who computes, not the scheduler: a chunk that is sent twice (its worker was lost, or only
its connection was) is looked up, waited for or taken over by the second worker, and recorded once. Designs are
evaluated in a process of their own, so that one that ends its process does not end the worker.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path

from dse.backend import Results
from dse.errors import ConfigError, disk_is_full
from dse.evaluation.calls import BackendSpec
from dse.evaluation.evaluators import Evaluator, OpenEvaluator
from dse.plugins import refresh
from dse.results.provenance import code_version, differences
from dse.space import Points
from dse.store.database import StoreError
from dse.store.owner import me
from dse.store.result_store import Store
from dse.store.session import Hold, StoreSession
from dse_cluster.settings import ClusterExecutor

_IDLE_S = 20.0  # after the last chunk
_AGAIN_S = 2.0  # between attempts to end a session

_mine = threading.local()
_desks: list[_Desk] = []


@dataclass(frozen=True)
class Order:
    """Parts that all chunks of a study share.

    code, host: of the client. folder: that it runs in, from which a program of the user is found; version: of the
    backend there. url: of the store.
    """

    code: Mapping[str, str]
    host: str
    folder: str
    spec: BackendSpec
    version: str
    executor: ClusterExecutor
    url: str
    patience_s: float
    hold: Hold

    def take_up(self) -> str:
        """Go to the client's folder; why this process may not evaluate for it, in words, or "" if it may."""
        if wrong := differences(code_version(), self.code):
            return f"runs other code: {wrong}"
        if self.url.startswith("sqlite") and me().host != self.host:
            return (
                "is on another host than the store, an SQLite file: use store.url=postgresql://<user>@<host>/<database>"
            )
        return self._go_there()

    def _go_there(self) -> str:
        """Go to the client's folder, if there is one here, and see that the backend is the same."""
        with suppress(OSError):
            os.chdir(self.folder)
        refresh()  # a backend may have been made elsewhere
        try:
            version = self.spec.version
        except ConfigError as error:
            return "cannot run the simulator: " + "; ".join(map(str, error.problems))
        same = version == self.version
        return "" if same else f"has another version of the simulator ({version}, not {self.version}) in {Path.cwd()}"


@dataclass(frozen=True)
class Answer:
    """Results of some points, in order, or why a worker refuses to make any.

    seconds: that it took; None where the worker had to start processes, and maybe compile, as well. store_s: of these,
    for the store.
    """

    worker: str
    results: Sequence[Results] = ()
    seconds: float | None = None
    store_s: float = 0.0
    refusal: str = ""


def evaluate(order: Order, points: Sequence[Points]) -> Answer:
    """Evaluate points in a worker of Dask, as `Evaluator.results` does. Raises Broken and StoreError."""
    from distributed import get_worker

    address = str(get_worker().address)
    if not hasattr(_mine, "desk"):
        _mine.desk = _Desk()
        _desks.append(_mine.desk)
    desk: _Desk = _mine.desk
    if not desk.serves(order) and (refusal := order.take_up()):
        return Answer(address, refusal=refusal)
    try:
        results, taken, store_s = desk.evaluate(order, points)
    except OSError as error:
        if disk_is_full(error):
            return Answer(address, refusal=f"has a full disk: {error}")
        raise
    return Answer(address, results, taken, store_s)


def leave() -> None:
    """End all sessions and processes of a worker, once what it has in hand is done."""
    for desk in _desks:
        desk.leave()


def _end(session: StoreSession) -> None:
    """End a session; later, if its store does not answer now, as its leases would last as long as this process."""
    try:
        session.leave()
    except StoreError:
        threading.Thread(target=_end_later, args=(session,), daemon=True).start()


def _end_later(session: StoreSession) -> None:
    left = False
    while not left:
        time.sleep(_AGAIN_S)
        with suppress(StoreError):
            session.leave()
            left = True


class _Desk:
    """Session of a worker's thread on the store, and its processes: they stay from chunk to chunk.

    Both end once there was no chunk for a while, so that nobody takes the worker for one that is at work.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._order: Order | None = None
        self._open = ExitStack()
        self._timer = threading.Timer(0.0, self.leave)
        atexit.register(self.leave)

    def serves(self, order: Order) -> bool:
        """Tell whether the last chunk was of the same order."""
        return self._order == order

    def evaluate(self, order: Order, points: Sequence[Points]) -> tuple[list[Results], float | None, float]:
        """Results of some points, the time [s] that they took (None with what had to be started), and the store's."""
        self._timer.cancel()
        with self._lock:
            if is_first := self._order != order:
                self._close()
                self._standing, self._order = self._opened(order), order
            began, before = time.perf_counter(), self._database.busy_s
            try:
                results = list(self._standing.results(points))
            except BaseException:
                self._close()
                raise
            taken, store_s = time.perf_counter() - began, self._database.busy_s - before
        self._timer = threading.Timer(_IDLE_S, self.leave)
        self._timer.daemon = True
        self._timer.start()
        return results, None if is_first else taken, store_s

    def _opened(self, order: Order) -> OpenEvaluator:
        # A nanny of Dask starts workers as daemons, which multiprocessing lets start none. Ours end with the worker.
        multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
        store = Store(order.url, patience_s=order.patience_s)
        self._database = store.database
        self._open.callback(store.database.close)
        session = StoreSession(store, order.hold)
        self._open.callback(_end, session)
        executor = order.executor.model_copy(update={"jobs": 1})
        evaluator = Evaluator(order.spec, executor, session, apart=True, looked_up=True)
        return self._open.enter_context(closing(OpenEvaluator(evaluator)))

    def leave(self) -> None:
        """End the session and the processes."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        self._order = None
        self._open.close()
