"""Many workers on one store: how fast PostgreSQL takes their results, and whether anybody waits for a lock.

Each worker is a session with a connection of its own, as in a worker of a cluster. It leases a chunk of points, looks
them up, records their results at once and goes on: evaluating would take no time. So the rate is what the database and
the sessions, which share this machine, can bear. Before it is taken, each session records a chunk.
"""

from __future__ import annotations

import itertools
import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from typing import Any

import numpy as np

from dse.backend import Results
from dse.space import Points
from dse.store.contract import Context, Evaluated
from dse.store.result_store import Store
from dse.store.session import Hold, StoreSession
from tests.campaigns.postgres import Server

LOCK_WAIT = ("-c", "log_lock_waits=on", "-c", "deadlock_timeout=1s")
"""Options of a server that tells in its log who waits for a lock for more than a second."""
_WAITED = "still waiting for"
METRICS = tuple(f"metric_{number}" for number in range(12))
_PROCESSES = 4
_PATIENCE_S = 300.0


@dataclass(frozen=True)
class Load:
    """Sessions in all, and chunks of so many results that each of them records."""

    url: str
    sessions: int
    chunks: int
    chunk: int


def crowd(server: Server, *, sessions: int, chunks: int, chunk: int) -> dict[str, Any]:
    """Results that sessions record in a second, all at work at the same time, and waits for a lock of over 1 s."""
    load = Load(server.database("crowd"), sessions, chunks, chunk)
    spawned = multiprocessing.get_context("spawn")
    starts, ends = spawned.Barrier(_PROCESSES + 1), spawned.Barrier(_PROCESSES + 1)
    taken: Any = spawned.SimpleQueue()
    processes = [
        spawned.Process(target=_work, args=(load, place, (starts, ends), taken)) for place in range(_PROCESSES)
    ]
    for process in processes:
        process.start()
    starts.wait(_PATIENCE_S)
    began = time.monotonic()
    ends.wait(_PATIENCE_S)
    spent = time.monotonic() - began
    slowest = np.array([seconds for _ in processes for seconds in taken.get()])
    for process in processes:
        process.join()
    store = Store(load.url)
    recorded, damaged = store.check()
    store.database.close()
    return {
        "sessions": sessions,
        "results_per_chunk": chunk,
        "results_per_s_1000_workers": round(sessions * chunks * chunk / spent),
        "chunk_median_s": round(float(np.median(slowest)), 2),
        "chunk_slowest_s": round(float(slowest.max()), 2),
        "lock_waits_over_1_s": server.log.count(_WAITED),
        "crowd_missing": sessions * (1 + chunks) * chunk - recorded,
        "crowd_wrong": damaged,
    }


def _work(load: Load, place: int, gates: Sequence[Barrier], taken: Any) -> None:
    """Sessions of one process: a thread each. Puts the seconds that each chunk took."""
    count = load.sessions // _PROCESSES + (place < load.sessions % _PROCESSES)
    store = Store(load.url)
    pool = store.database._engine.pool
    pool._max_overflow, pool._pool.maxsize = -1, count  # type: ignore[attr-defined]  # a connection for each thread
    hold, random = Hold(1, Context("crowd", "1", "()", METRICS)), np.random.default_rng(place)
    sessions = [StoreSession(store, hold) for _ in range(count)]
    parts = [[batch(random, load.chunk) for _ in range(1 + load.chunks)] for _ in sessions]
    starts, ends = gates
    with ThreadPoolExecutor(count) as threads:
        list(threads.map(_recorded_s, sessions, [part[:1] for part in parts]))
        starts.wait(_PATIENCE_S)
        taken_s = list(threads.map(_recorded_s, sessions, [part[1:] for part in parts]))
    ends.wait(_PATIENCE_S)
    taken.put(list(itertools.chain(*taken_s)))
    for session in sessions:
        session.leave()


def _recorded_s(session: StoreSession, parts: Sequence[Evaluated]) -> list[float]:
    """What a worker does with its chunks, but for evaluating, and the seconds that each takes."""
    seconds = []
    for points, results in parts:
        began = time.monotonic()
        session.lease([points.keys])
        session.find(points.keys)
        session.record(points, results, [points.keys])
        session.flush()
        seconds.append(time.monotonic() - began)
    return seconds


def batch(random: np.random.Generator, size: int) -> Evaluated:
    """Results of designs that nobody has evaluated before, with twelve metrics."""
    keys, number = random.integers(0, 2**64, (size, 2), np.uint64), random.integers(1 << 20)
    zeros = np.zeros(size, np.int32)
    columns = {name: random.random(size) for name in METRICS}
    points = Points({"system.gpu.num_cus": number}, {"place": np.arange(size)}, None, scenario="own", keys=keys)
    return points, Results(zeros.astype(np.uint8), columns, zeros, zeros + 1, ("", "analytic"))
