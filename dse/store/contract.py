"""The store as evaluation sees it: what results depend on, what is known of keys, and a session of one study."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dse.backend import Results
from dse.store.result_rows import Fresh
from dse.values import Keys


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

    def record(self, fresh: Fresh, parts: Sequence[Keys], *, idle: bool = False) -> list[Results]:
        """Buffer results and the parts that they complete. Returns the results recorded by this call, in order.

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

    def record(self, fresh: Fresh, parts: Sequence[Keys], *, idle: bool = False) -> list[Results]:
        """Return the results unchanged."""
        return [fresh.results]

    def flush(self) -> list[Results]:
        """Return no results: nothing is buffered."""
        return []

    def withdraw(self, keys: Keys) -> None:
        """Do nothing: nothing is recorded."""
