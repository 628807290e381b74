"""Formats of profiles, and the reader of each: `read` picks it by the first bytes of a file, then by its name."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from dse.errors import ConfigError, Problem
from dse_chakra.packed import DAMAGED, open_packed, packer_of
from dse_traces.profile.kernels import Profile
from dse_traces.readers.chrome import read_chrome
from dse_traces.readers.databases import SQLITE
from dse_traces.readers.foreign import foreign_problem
from dse_traces.readers.imported_folders import is_imported, read_imported
from dse_traces.readers.kernel_table import read_tables
from dse_traces.readers.nsys import read_database
from dse_traces.readers.rocprof_json import ROCPROF, read_rocprof_json

MOST_FILES = 4096
"""Of the ranks of one run."""
_HEAD = 1 << 16  # bytes that tell a format
_PACKED = (".gz", ".zip", ".zst", ".xz", ".bz2", ".lz4")
_COMMANDS = {
    "gzip": "gunzip -k",
    "zip": "unzip",
    "zstd": "unzstd",
    "xz": "unxz -k",
    "bzip2": "bunzip2 -k",
    "lz4": "unlz4",
}
_NO_FILES: Mapping[bytes, tuple[str, str]] = {
    b"version https://git-lfs": ("is a pointer of Git LFS in place of the file", "fetch the file: git lfs pull"),
    b"/annex/objects": ("is a pointer of git-annex in place of the file", "fetch the file: git annex get"),
    b"<!doctype html": ("is a web page", "download the file itself"),
    b"<html": ("is a web page", "download the file itself"),
}
"""Begins of files, in small letters, that stand in place of one."""
_OTHERS: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(
        (".nsys-rep", ".qdrep", ".qdstrm"),
        ("is a report in Nsight Systems' own format", "export it: nsys export --type sqlite {name}"),
    ),
    ".pb": (
        "is a trace of XLA in protocol buffers",
        "read {name}'s neighbour, the .trace.json.gz that JAX writes next to it",
    ),
    ".ncu-rep": ("is a report of Nsight Compute, without a time line", "record it with nsys profile"),
    **dict.fromkeys(
        (".pftrace", ".perfetto-trace"),
        ("is a trace of Perfetto", "write another format: rocprofv3 --output-format json (or csv, or rocpd)"),
    ),
    **dict.fromkeys((".otf2", ".otf"), ("is a trace in OTF2", "write another format: rocprofv3 --output-format json")),
    **dict.fromkeys((".parquet", ".h5", ".hdf"), ("is no profile that is read", "nsys export --type sqlite is read")),
    **dict.fromkeys((".pickle", ".pkl"), ("is a pickle, which is not opened", "name the JSON of the profiler")),
}
"""Ends of names of files that are not read: what they are, and the way out."""


def _read_chakra(path: Path) -> list[Profile]:
    from dse_chakra.files import read_chakra
    from dse_traces.readers.chakra_graphs import profile_of_trace

    return [profile_of_trace(read_chakra(path))]


READERS: Mapping[str, Callable[[Path], Sequence[Profile]]] = {
    ".csv": read_tables,
    ".et": _read_chakra,
    ".json": read_chrome,
    ".sqlite": read_database,
    ".db": read_database,
    ".rpd": read_database,
}
"""Ends of the names of files, without those of packers, and what reads them: a profile for each GPU."""


_ON_ONE_CLOCK = (read_tables, read_database, read_rocprof_json)
"""Readers of files that one profiler of one machine wrote."""


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
    """The profile of each GPU that a file, or a folder that `profile import` wrote, holds. Raises ConfigError.

    A profiler of one machine has one clock; a trace in Chrome's format may be made of several machines' traces.
    """
    if is_imported(path):
        return read_imported(path)
    reader = _reader(path)
    try:
        profiles = reader(path)
    except ConfigError:
        if problem := foreign_problem(path):
            raise ConfigError([problem]) from None
        raise
    if reader not in _ON_ONE_CLOCK or not profiles[1:]:
        return profiles
    return [replace(profile, clock=str(path)) for profile in profiles]


def _reader(path: Path) -> Callable[[Path], Sequence[Profile]]:
    """The reader of a file, by its first bytes where they tell a format, else by its name. Raises ConfigError."""
    suffix = _suffix(path)
    head = _head(path)
    if head.startswith(SQLITE):
        if packer := packer_of(path):
            way = f"unpack it first: {_COMMANDS[packer]} {path.name}"
            raise ConfigError([Problem("profile", f"is a database that is packed by {packer}", str(path), way)])
        return read_database
    if suffix in _OTHERS:
        rule, way = _OTHERS[suffix]
        raise ConfigError([Problem("profile", rule, str(path), way.format(name=path.name))])
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    _check_begin(path, text)
    if text.startswith((b"{", b"[")) and suffix != ".et":
        return read_rocprof_json if ROCPROF in head else read_chrome
    if suffix in READERS:
        return READERS[suffix]
    first = text.partition(b"\n")[0]
    return read_tables if b"," in first and re.search(rb"start|begin", first, re.IGNORECASE) else read_chrome


def _check_begin(path: Path, text: bytes) -> None:
    """Raise ConfigError for a file that holds nothing, or what stands in place of another."""
    if not path.stat().st_size:
        raise ConfigError([Problem("profile", "is empty", str(path), "record or download it again")])
    for begin, (rule, way) in _NO_FILES.items():
        if text[: len(begin)].lower() == begin:
            raise ConfigError([Problem("profile", rule, str(path), way)])


def _head(path: Path) -> bytes:
    """The first unpacked bytes of a file."""
    with open_packed(path) as (file, _):
        try:
            return file.peek(_HEAD)[:_HEAD]
        except DAMAGED:
            return b""


def files_of(text: str) -> list[Path]:
    """The files that a folder, a pattern (`rank*.json.gz`) or a list (`a.json,b.json`, `[a.json,b.json]`) names, rank 2
    before rank 10.

    Of a folder, those that have a reader. Raises ConfigError where there is none, or too many.
    """
    if re.fullmatch(r"\[[^\[\]]*,[^\[\]]*\]", text) and not Path(text).exists():
        text = text[1:-1]
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
        raise ConfigError(
            [Problem("profile", rule, text, f"files end in {', '.join(READERS)}, or in these and {', '.join(_PACKED)}")]
        )
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
    name = path.name.lower()
    while name.endswith(_PACKED):
        name = name.rpartition(".")[0]
    return Path(name).suffix
