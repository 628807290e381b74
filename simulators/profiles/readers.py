"""Formats of profiles, and the reader of each: `read` picks it by what a file is called, and how it begins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from simulators.profiles.chrome import read_chrome
from simulators.profiles.kernel_table import read_table
from simulators.profiles.profile import Profile


def _read_chakra(path: Path) -> Profile:
    from simulators.profiles.chakra import read_chakra
    from simulators.profiles.chakra_graphs import profile_of_trace

    return profile_of_trace(read_chakra(path))


READERS: Mapping[str, Callable[[Path], Profile]] = {
    ".csv": read_table,
    ".et": _read_chakra,
    ".json": read_chrome,
}
"""Ends of the names of files, without .gz, and what reads them; anything else is read as JSON."""


def read(path: Path) -> Profile:
    """The profile that a file holds. Raises ConfigError for a file that cannot be read, or is no profile."""
    return READERS.get(Path(path.name.removesuffix(".gz")).suffix.lower(), read_chrome)(path)
