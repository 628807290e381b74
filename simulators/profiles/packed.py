"""Files of profiles, plain or gzip."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import IO

from dse.files import open_plain_file

MOST_BYTES = 1 << 36
"""Of a file, which is read part by part."""
MOST_UNPACKED = 1 << 38
"""Bytes that a packed file may hold: what unpacks to more is no profile."""
MOST_RATIO = 300
"""Bytes for each packed one, past the first `SMALL`: profiles have 10 to 50, a file made to fill memory has 1,000."""
SMALL = 1 << 26


class TooLargeError(EOFError):
    """A packed file unpacks to more than any profile does."""


DAMAGED = (EOFError, zlib.error, gzip.BadGzipFile)
"""Raised by reading a gzip that is cut off or damaged, or that unpacks to too much (`TooLargeError`)."""


def loss(error: Exception) -> str:
    """What is dropped of a file for an error of `DAMAGED`."""
    if isinstance(error, TooLargeError):
        return "the rest of a gzip that unpacks to more than a profile holds"
    return "the rest of a gzip that is cut off or damaged"


@contextmanager
def opened(path: Path) -> Iterator[tuple[IO[bytes], BufferedReader]]:
    """What a file holds, unpacked, and the file itself, whose place tells progress. Raises ConfigError."""
    with open_plain_file(path, "profile", most=MOST_BYTES, way_out="name the file of a profile") as file:
        if path.suffix != ".gz":
            yield file, file
            return
        with _Unpacked(file) as unpacked:
            yield unpacked, file  # type: ignore[misc]


class _Unpacked(gzip.GzipFile):
    """A gzip that raises `TooLargeError` past what it may unpack to."""

    def __init__(self, packed: BufferedReader) -> None:
        super().__init__(fileobj=packed, mode="rb")
        self._packed, self._bytes = packed, 0

    def read(self, size: int | None = -1) -> bytes:
        """See gzip.GzipFile.read."""
        return self._count(super().read(size))

    def read1(self, size: int = -1) -> bytes:
        """See gzip.GzipFile.read1."""
        return self._count(super().read1(size))

    def _count(self, data: bytes) -> bytes:
        self._bytes += len(data)
        if self._bytes > min(MOST_UNPACKED, max(SMALL, MOST_RATIO * self._packed.tell())):
            raise TooLargeError
        return data
