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
DAMAGED = (EOFError, zlib.error, gzip.BadGzipFile)
"""Raised by reading a gzip that is cut off or damaged."""


@contextmanager
def opened(path: Path) -> Iterator[tuple[IO[bytes], BufferedReader]]:
    """What a file holds, unpacked, and the file itself, whose place tells progress. Raises ConfigError."""
    with open_plain_file(path, "profile", most=MOST_BYTES, way_out="name the file of a profile") as file:
        if path.suffix != ".gz":
            yield file, file
            return
        with gzip.open(file) as unpacked:
            yield unpacked, file  # type: ignore[misc]
