"""Formats of profiles, and the reader of each: `read` picks it by what a file is called."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from dse.errors import ConfigError, Problem
from simulators.profiles.chrome import read_chrome
from simulators.profiles.imported import is_imported, read_imported
from simulators.profiles.kernel_table import read_tables
from simulators.profiles.nsys import read_nsys
from simulators.profiles.profile import Profile

MOST_FILES = 4096
"""Of the ranks of one run."""


def _read_chakra(path: Path) -> Profile:
    from simulators.profiles.chakra_graphs import profile_of_trace
    from simulators.taskgraph.chakra import read_chakra

    return profile_of_trace(read_chakra(path))


READERS: Mapping[str, Callable[[Path], Sequence[Profile]]] = {
    ".csv": read_tables,
    ".et": lambda path: [_read_chakra(path)],
    ".json": lambda path: [read_chrome(path)],
    ".sqlite": read_nsys,
}
"""Ends of the names of files, without .gz, and what reads them: a profile for each GPU. Others are read as JSON."""


def read(path: Path) -> Profile:
    """The profile of the GPU of which a file holds most kernels; those of others are counted as dropped.

    Raises ConfigError for a file that cannot be read, or is no profile.
    """
    first, *further = read_ranks(path)
    if not further:
        return first
    return replace(first, dropped={**first.dropped, "kernels of other GPUs": sum(map(len, further))})


def read_ranks(path: Path) -> Sequence[Profile]:
    """The profile of each GPU that a file, or a folder that `trace-import` wrote, holds. Raises ConfigError."""
    if is_imported(path):
        return read_imported(path)
    return READERS.get(_suffix(path), READERS[".json"])(path)


def files_of(text: str) -> list[Path]:
    """The files that a folder, a pattern (`rank*.json.gz`) or a list (`a.json,b.json`) names, rank 2 before rank 10.

    Of a folder, those that have a reader. Raises ConfigError where there is none, or too many.
    """
    if is_imported(Path(text)):
        return [Path(text)]
    if Path(text).is_dir():
        paths: Sequence[Path] = _profiles_of(Path(text))
    elif Path(text).exists():
        return [Path(text)]
    elif re.search(r"[*?\[]", text):
        paths = list(Path(Path(text).anchor).glob(text.removeprefix(Path(text).anchor)))
    else:
        return [Path(name.strip()) for name in text.split(",") if name.strip()]
    if not paths or len(paths) > MOST_FILES:
        rule = f"names more than {MOST_FILES} files" if paths else "names no file that can be read"
        raise ConfigError([Problem("profile", rule, text, f"files end in {', '.join(READERS)}, or in these and .gz")])
    return sorted(paths, key=_natural)


def _profiles_of(folder: Path) -> list[Path]:
    """The files of a folder that have a reader; beside kernel traces of rocprofv3 no other tables."""
    paths = [path for path in folder.iterdir() if path.is_file() and _suffix(path) in READERS]
    traces = [path for path in paths if "kernel_trace" in path.name]
    return [path for path in paths if path in traces or not traces or _suffix(path) != ".csv"]


def _natural(path: Path) -> list[str | int]:
    parts = re.split(r"(\d+)", str(path))
    return [int(part) if place % 2 else part for place, part in enumerate(parts)]


def _suffix(path: Path) -> str:
    return Path(path.name.removesuffix(".gz")).suffix.lower()
