"""Formats of profiles, each with the test that tells it and its reader: `read` takes the first one that fits a file."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dse.errors import ConfigError, Problem
from dse_traces.profile.kernels import Profile
from dse_traces.readers.beginnings import PACKED, SUFFIXES, Beginning, refuse_unreadable, suffix_of
from dse_traces.readers.chrome import read_chrome
from dse_traces.readers.foreign import foreign_problem
from dse_traces.readers.imported_folders import is_imported, read_imported
from dse_traces.readers.kernel_table import read_kernel_table
from dse_traces.readers.nsys import read_nsys
from dse_traces.readers.nsys_stats import is_nsys_stats, read_nsys_stats
from dse_traces.readers.rocpd import is_rocpd, read_rocpd
from dse_traces.readers.rocprof import is_rocprof, read_rocprof
from dse_traces.readers.rocprof_json import ROCPROF, read_rocprof_json

MOST_FILES = 4096
"""Of the ranks of one run."""


@dataclass(frozen=True)
class ProfileFormat:
    """A format of profiles. fits: whether a file that no format before this one fits has it. read: a profile for each
    GPU. one_clock: whether one profiler of one machine writes a file, so that times of its GPUs can be compared.
    """

    name: str
    fits: Callable[[Beginning], bool]
    read: Callable[[Path], Sequence[Profile]]
    one_clock: bool = True


def _read_chakra(path: Path) -> list[Profile]:
    from dse_chakra.files import read_chakra
    from dse_traces.readers.chakra_graphs import profile_of_trace

    return [profile_of_trace(read_chakra(path))]


FORMATS = (
    ProfileFormat("rocpd, rpd", lambda begin: is_rocpd(begin.tables), read_rocpd),
    ProfileFormat("Nsight Systems", lambda begin: begin.is_database, read_nsys),
    ProfileFormat("JSON of rocprofv3", lambda begin: begin.is_json and ROCPROF in begin.head, read_rocprof_json),
    ProfileFormat("table of rocprof", lambda begin: is_rocprof(begin.columns), read_rocprof),
    ProfileFormat("table of nsys stats", lambda begin: is_nsys_stats(begin.columns), read_nsys_stats),
    ProfileFormat("table of kernels", lambda begin: begin.is_table, read_kernel_table),
    ProfileFormat("Chakra", lambda begin: begin.suffix == ".et", _read_chakra, one_clock=False),
    # may be made of several machines' traces; what nothing else fits is taken for one, and refused by its reader
    ProfileFormat("Chrome trace", lambda begin: True, read_chrome, one_clock=False),
)
"""Every format, in the order in which they are asked."""


def read(path: Path) -> Profile:
    """The profile of the GPU of which a file holds most kernels; those of others are counted as dropped.

    Raises ConfigError for a file that cannot be read, or is no profile.
    """
    return most_kernels(read_ranks(path))


def most_kernels(profiles: Sequence[Profile]) -> Profile:
    """The profile of the GPU with most kernels; those of others are counted as dropped."""
    first = max(profiles, key=len)
    further = sum(map(len, profiles)) - len(first)
    return replace(first, dropped={**first.dropped, "kernels of other GPUs": further}) if further else first


def read_ranks(path: Path) -> Sequence[Profile]:
    """The profile of each GPU that a file, or a folder that `profile import` wrote, holds. Raises ConfigError."""
    if is_imported(path):
        return read_imported(path)
    begin = Beginning(path)
    refuse_unreadable(begin)
    of_file = next(candidate for candidate in FORMATS if candidate.fits(begin))
    try:
        profiles = of_file.read(path)
    # the reader's own message names a format that the file never had: what the file is helps more
    except ConfigError:
        if problem := foreign_problem(path):
            raise ConfigError([problem]) from None
        raise
    # times of ranks can be compared directly only if one clock stamped them
    if not of_file.one_clock or not profiles[1:]:
        return profiles
    return [replace(profile, clock=str(path)) for profile in profiles]


def files_of(text: str) -> list[Path]:
    """The files that a folder, a pattern (`rank*.json.gz`) or a list (`a.json,b.json`, `[a.json,b.json]`) names, rank 2
    before rank 10.

    Of a folder, those that have a reader. Raises ConfigError where there is none, or too many.
    """
    # brackets around a list are a habit of Hydra; in patterns they are sets of characters
    if re.fullmatch(r"\[[^\[\]]*,[^\[\]]*\]", text) and not Path(text).exists():
        text = text[1:-1]
    if is_imported(Path(text)):
        return [Path(text)]
    if Path(text).is_dir():
        paths: Sequence[Path] = _profiles_of(Path(text))
    elif Path(text).exists():
        return [Path(text)]
    elif re.search(r"[*?\[]", text):
        # glob() takes relative patterns only: an absolute one is split at its anchor
        paths = list(Path(Path(text).anchor).glob(text.removeprefix(Path(text).anchor)))
    else:
        return [Path(name.strip()) for name in text.split(",") if name.strip()]
    if not paths or len(paths) > MOST_FILES:
        rule = f"names more than {MOST_FILES} files" if paths else "names no file that can be read"
        raise ConfigError(
            [Problem("profile", rule, text, f"files end in {', '.join(SUFFIXES)}, or in these and {', '.join(PACKED)}")]
        )
    return sorted(paths, key=_natural)


def _profiles_of(folder: Path) -> list[Path]:
    """The files of a folder that have a reader; beside kernel traces of rocprofv3 no other tables."""
    paths = [path for path in folder.iterdir() if path.is_file() and suffix_of(path) in SUFFIXES]
    # tables next to a kernel trace are parts of it, and its reader opens them
    traces = [path for path in paths if "kernel_trace" in path.name]
    return [path for path in paths if path in traces or not traces or suffix_of(path) != ".csv"]


def _natural(path: Path) -> list[str | int]:
    parts = re.split(r"(\d+)", str(path))
    # digits as numbers: rank10 follows rank9
    return [int(part) if place % 2 else part for place, part in enumerate(parts)]
