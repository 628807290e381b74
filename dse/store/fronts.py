"""Pareto fronts of the results of a study, found where they are recorded.

The database concatenates the rows, so that a million of them need no Python object each.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import moocore
import numpy as np
from numpy.typing import NDArray
from sqlalchemy import cast, func, select

from dse.store.database import Blob, Database
from dse.store.result_store import Store, results

if TYPE_CHECKING:
    from sqlalchemy import Connection

_CHUNK = 4096  # rows of which a front is found at once


def front(store: Store, study: int, goals: Mapping[str, str]) -> tuple[list[str], NDArray[np.float64]]:
    """Keys [F] (hex) and objectives [F, objectives] of the Pareto front of the points that a study evaluated.

    goals: minimize or maximize, by metric. Raises ValueError for an unknown metric.
    """
    query = select(results.c.context).where(results.c.study == study, results.c.metrics != b"").limit(1)
    number = _scalar(store.database, query)
    context = None if number is None else store.context(number)
    if context is None:
        return [], np.empty((0, len(goals)))
    places = [context.metrics.index(name) for name in goals]
    signs = np.array([1.0 if goal == "minimize" else -1.0 for goal in goals.values()])
    row = np.dtype([("key", "V16"), ("metrics", "<f8", len(context.metrics))])
    parts = (np.frombuffer(part, row) for part in _result_bytes(store.database, study, store.number(context)))
    best = _nondominated(parts, np.empty(0, row), places, signs)
    return [bytes(key).hex() for key in best["key"]], best["metrics"][:, places]


def _nondominated(parts: Iterable[Any], best: Any, places: Sequence[int], signs: Any) -> Any:
    """Rows of parts whose metrics at `places`, times signs, no other row's dominate."""
    for part in parts:
        rows = np.concatenate([best, part])
        for start in range(0, len(rows), _CHUNK):  # the front of fronts: cheaper than one of all rows
            chunk = rows[start : start + _CHUNK]
            best = np.concatenate([best, chunk]) if start else chunk
            best = best[moocore.is_nondominated(best["metrics"][:, places] * signs, keep_weakly=True)]
    return best


def _result_bytes(database: Database, study: int, context: int) -> Iterator[bytes]:
    """Keys and metrics of all results with metrics of a study, as bytes, in sixteen parts by key."""
    row_bytes = results.c.key.concat(results.c.metrics)
    lite = database.dialect.name == "sqlite"  # its group_concat takes bytes as a text of the same bytes
    joined = cast(func.group_concat(row_bytes, ""), Blob) if lite else func.string_agg(row_bytes, b"")
    ends = [bytes([16 * part]) for part in range(16)]
    for low, high in itertools.pairwise([*ends, b"\xff" * 17]):
        mine = (results.c.study == study, results.c.context == context, results.c.metrics != b"")
        yield _scalar(database, select(joined).where(*mine, results.c.key >= low, results.c.key < high)) or b""


def _scalar(database: Database, query: Any) -> Any:
    def work(connection: Connection) -> Any:
        return connection.execute(query).scalar()

    return database.read(work)
