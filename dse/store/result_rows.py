"""Rows of results in the store: their bytes, checksums and columns, and the bulk insert of rows that are alike."""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dse.backend import STATUSES, Results
from dse.store.contract import Evaluated, key_bytes


def fits(row: Sequence[Any]) -> bool:
    """Return whether a row of `results`, as read, fits its checksum."""
    try:
        return row[3] in range(len(STATUSES)) and bool(checksum(row[:-1]) == row[-1])
    except (AttributeError, TypeError, UnicodeError):  # a value of another kind
        return False


def is_intact(row: Sequence[Any], context: int | None) -> bool:
    """Return whether a row fits its checksum and belongs to a context, if one is given."""
    return fits(row) and context in (None, row[1])  # None: any context


def with_key(row: Sequence[Any], key: bytes) -> tuple[Any, ...]:
    """The same row under another key."""
    values = (key, *row[1:-1])
    return *values, checksum(values)


def checksum(row: Sequence[Any]) -> bytes:
    """Checksum of 64 bits (BLAKE2b) over all other columns of a row. Raises TypeError for a value of another kind."""
    key, context, study, status, engine, reason, point, metrics = row
    return _sum(key + _head(context, study, status, engine, reason) + point.encode() + b"\x1f" + metrics)


def _head(context: int, study: int, status: int, engine: str, reason: str) -> bytes:
    return (f"{context}|{study}|{status}\x1f" + engine + "\x1f" + reason + "\x1f").encode()


def _sum(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=8).digest()  # damage is to be found, not forgery


@dataclass(frozen=True)
class AlikeRows:
    """Rows that differ in key, point, metrics and checksum only. shared: context, study, status, engine, reason."""

    shared: tuple[int, int, int, str, str]
    keys: Sequence[bytes]
    points: Sequence[str]
    metrics: bytes

    @property
    def size(self) -> int:
        """Number of rows."""
        return len(self.keys)

    @functools.cached_property
    def width(self) -> int:
        """Bytes of the metrics of a row."""
        return len(self.metrics) // self.size

    def rows(self) -> Iterator[tuple[Any, ...]]:
        """Yield rows of the table."""
        # failed points have no metrics
        places = range(0, self.width * self.size, self.width) if self.width else itertools.repeat(0)
        for key, point, start in zip(self.keys, self.points, places, strict=False):
            metrics = self.metrics[start : start + self.width]
            yield key, *self.shared, point, metrics, checksum((key, *self.shared, point, metrics))

    def bulk_insert(self) -> dict[str, Any]:
        """Build the parameters of `BULK_INSERT`: columns, which the database splits into rows."""
        context, study, status, engine, reason = self.shared
        head, texts, width = _head(*self.shared), [point.encode() for point in self.points], self.width
        ends = range(width, width * self.size + 1, width) if width else itertools.repeat(0)
        parts = zip(self.keys, texts, ends, strict=False)
        checksums = [_sum(key + head + text + b"\x1f" + self.metrics[end - width : end]) for key, text, end in parts]
        # texts in one column of fixed width; padding is cut off again, as JSON ends in no blank
        longest = max(map(len, texts))
        return {
            **{"size": self.size, "context": context, "study": study, "status": status, "engine": engine},
            **{"reason": reason, "keys": b"".join(self.keys), "metrics": self.metrics, "width": self.width},
            "points": b"".join([text.ljust(longest) for text in texts]),
            "longest": longest,
            "checksums": b"".join(checksums),
        }


BULK_SIZE: Mapping[str, int] = {"sqlite": 512, "postgresql": 4}
"""Rows from which on `BULK_INSERT` is faster than one statement for each, by dialect."""
BULK_INSERT: Mapping[str, str] = {
    "sqlite": """
INSERT OR IGNORE INTO results (key, context, study, status, engine, reason, point, metrics, checksum)
WITH RECURSIVE place(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM place WHERE i + 1 < :size)
SELECT substr(:keys, 1 + 16 * i, 16), :context, :study, :status, :engine, :reason,
       rtrim(CAST(substr(:points, 1 + :longest * i, :longest) AS TEXT)),
       coalesce(substr(:metrics, 1 + :width * i, :width), x''), substr(:checksums, 1 + 8 * i, 8)
FROM place
""",
    "postgresql": """
INSERT INTO results (key, context, study, status, engine, reason, point, metrics, checksum)
SELECT substr(%(keys)s, 1 + 16 * i, 16), %(context)s, %(study)s, %(status)s, %(engine)s, %(reason)s,
       rtrim(convert_from(substr(%(points)s, 1 + %(longest)s * i, %(longest)s), 'UTF8')),
       substr(%(metrics)s, 1 + %(width)s * i, %(width)s), substr(%(checksums)s, 1 + 8 * i, 8)
FROM generate_series(0, %(size)s - 1) AS place(i)
ON CONFLICT DO NOTHING
""",
}
"""Statement that inserts alike rows from columns, except those whose key is present, by dialect."""
BULK_SELECT = """
WITH RECURSIVE place(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM place WHERE i + 1 < :size)
SELECT results.* FROM results WHERE key IN (SELECT substr(:keys, 1 + 16 * i, 16) FROM place)
"""
"""Statement of SQLite that looks up rows by their keys, one after the other in one parameter."""


def group_alike(parts: Sequence[Evaluated], names: Sequence[str], context: int, study: int) -> Iterator[AlikeRows]:
    """Group rows, each group in the order of the keys, because neighbours lie on the same page."""
    keys, evaluated = np.concatenate([points.keys for points, _ in parts]), Results.join([part for _, part in parts])
    texts = list(itertools.chain.from_iterable(points.texts for points, _ in parts))
    size, ok = len(evaluated.texts), STATUSES.index("ok")  # more than any index of a text: three numbers in one
    kinds = (evaluated.status.astype(np.int64) * size + evaluated.engine) * size + evaluated.reason
    order = np.argsort(keys[:, 0])  # random keys: sorted inserts touch each page of the index once
    for kind in np.unique(kinds).tolist():
        places = order[kinds[order] == kind]
        status, engine, reason = kind // size**2, kind // size % size, kind % size
        # NaN of failed points need no bytes
        columns = [evaluated.column(name)[places] for name in names] if status == ok else []
        metrics = np.stack(columns, axis=1).astype("<f8").tobytes() if columns else b""
        # reasons may come from other programs
        shared = (context, study, status, _sanitize(evaluated.texts[engine]), _sanitize(evaluated.texts[reason]))
        points = [texts[place] for place in places.tolist()]
        yield AlikeRows(shared, key_bytes(keys[places]), points, metrics)


def _sanitize(text: str) -> str:
    """Replace characters of a text that some database refuses."""
    # PostgreSQL refuses NUL, UTF-8 lone surrogates
    return text.replace("\0", "\ufffd").encode("utf-8", "replace").decode()


def results_of_rows(rows: Sequence[Any], names: Sequence[str]) -> Results:
    """Convert rows of the table, all of one context, to results."""
    texts = {"": 0}  # place of each text, in the order of their first use
    status = np.array([row[3] for row in rows], np.uint8)
    engine = np.array([texts.setdefault(row[4], len(texts)) for row in rows], np.int32)
    reason = np.array([texts.setdefault(row[5], len(texts)) for row in rows], np.int32)
    numbers = np.full((len(rows), len(names)), np.nan)  # no metrics unless ok
    if names:
        data = b"".join(row[7] for row in rows)
        # rows of other statuses add no bytes to `data`
        numbers[status == STATUSES.index("ok")] = np.frombuffer(data, "<f8").reshape(-1, len(names))
    return Results(status, {name: numbers[:, place] for place, name in enumerate(names)}, reason, engine, tuple(texts))


def as_bytes(value: Any) -> bytes:
    """A key as bytes, whatever a damaged table holds."""
    return value if isinstance(value, bytes) else str(value).encode("utf-8", "replace")
