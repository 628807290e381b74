"""The store as evaluation sees it: what results depend on, what is known of keys, a session of a study, its URL."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator

from dse.backend import Results, Status
from dse.errors.texts import ambiguous
from dse.results import output_files
from dse.space import Points
from dse.values import Frozen, Keys
from dse.values.units import WallSeconds, illegal


@dataclass(frozen=True)
class Context:
    """Everything besides the design that results depend on. metrics: names, in the order of the store's numbers."""

    backend: str
    version: str
    parameters: str
    metrics: tuple[str, ...]

    @property
    def words(self) -> tuple[str, str, str]:
        """Words that enter the keys."""
        return self.backend, self.version, self.parameters


@dataclass(frozen=True)
class StoredResults:
    """Results of B keys: known [B]; results [B] and study [B] that evaluated them are valid only where known."""

    known: NDArray[np.bool_]
    results: Results
    study: NDArray[np.int64]


Evaluated = tuple[Points, Results]
"""Points with keys, and the results of each."""


def key_bytes(keys: Keys) -> list[bytes]:
    """Convert content hashes [B, 2] to B byte strings of 16 bytes."""
    data = keys.astype(">u8").tobytes()  # big-endian, so that bytes sort like numbers
    return [data[start : start + 16] for start in range(0, len(data), 16)]


class Session(Protocol):
    """Interface of a store to evaluation. lost: points that were in flight when their process ended."""

    lost: int

    @property
    def is_shared(self) -> bool:
        """True if another process is or was at work on this study since this one began."""

    def find(self, keys: Keys) -> StoredResults | None:
        """Look up keys [B, 2]; None if none of them can be known."""

    def lease(self, parts: Sequence[Keys]) -> list[bool]:
        """Lease parts (keys [B, 2] each). Returns which were granted."""

    def recall(self, studies: NDArray[np.int64]) -> None:
        """Count the use of known results, by the studies that evaluated them."""

    def release(self, parts: Sequence[Keys]) -> None:
        """Release the leases of parts that need no evaluation."""

    def record(self, points: Points, results: Results, done: Sequence[Keys], *, idle: bool = False) -> list[Results]:
        """Buffer results, and keys of the parts that they complete. Returns what this call recorded, in order.

        idle: whether evaluation goes on meanwhile.
        """

    def flush(self) -> list[Results]:
        """Record the buffered results, and return them as recorded."""

    def withdraw(self, keys: Keys) -> None:
        """Delete the results of keys [B, 2], because they are wrong."""


class StorelessSession:
    """Session without a store: nothing is known, every lease is granted, nothing is recorded."""

    lost = 0
    is_shared = False

    def find(self, keys: Keys) -> None:
        """Return None: nothing is known."""

    def lease(self, parts: Sequence[Keys]) -> list[bool]:
        """Grant all parts."""
        return [True] * len(parts)

    def recall(self, studies: NDArray[np.int64]) -> None:
        """Do nothing: no results are known."""

    def release(self, parts: Sequence[Keys]) -> None:
        """Do nothing: there are no leases."""

    def record(self, points: Points, results: Results, done: Sequence[Keys], *, idle: bool = False) -> list[Results]:
        """Return the results unchanged."""
        return [results]

    def flush(self) -> list[Results]:
        """Return no results: nothing is buffered."""
        return []

    def withdraw(self, keys: Keys) -> None:
        """Do nothing: nothing is recorded."""


def _store_url(url: str) -> str:
    # no other database: SQLAlchemy would take some that nothing here is tested with
    if not re.fullmatch(r"auto|sqlite:///.+|postgresql(\+psycopg)?://.+", url):
        rule = "must be auto, null, sqlite:///<file> or postgresql://<user>@<host>/<database>"
        raise illegal(rule, f"sqlite:///{url}" if url.endswith(".db") else None)
    if rule := ambiguous(url):
        raise ValueError(rule)
    if re.search(r"[?&]plugin=", url):  # which would run its code
        raise ValueError("must not name a plug-in of SQLAlchemy")
    return url


class StoreAt(Frozen):
    """The `store` group. url: of the database; `auto` for results.db in the output folder, null for no store.

    retry: statuses of recorded results to evaluate again. patience_s: time to wait for a store that does not answer.
    """

    name: str
    description: str = ""
    url: Annotated[str, AfterValidator(_store_url)] | None = "auto"
    retry: tuple[Status, ...] = ()
    patience_s: WallSeconds = 60.0

    def database_url(self, folder: Path) -> str:
        """Return the URL of the database of an output folder. Raises ConfigError if it is not a plain file."""
        if self.url != "auto":
            assert self.url is not None
            return self.url
        file = folder / "results.db"
        for suffix in ("", "-wal", "-shm"):  # SQLite follows links of all three
            if output_files.exists(path := file.with_name(file.name + suffix)):
                with output_files.open_untrusted(path):
                    pass
        return f"sqlite:///{file}"
