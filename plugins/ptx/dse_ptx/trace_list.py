"""Lists of Accel-Sim (`kernelslist.g`): kernels of an application in their order, and what the host does between them.

A line names a kernel's file beside the list, or is a command of the host: `MemcpyHtoD,0x00007f45fe000000,32768`, whose
last two words are an address and bytes, or one that is only counted (`ncclAllReduce`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from dse.errors import Problems
from dse.errors.parsing import whole_number
from dse.files import read_text

# directions are the end of the word: MemcpyHtoD, MemcpyDtoH
_COPY = "Memcpy"
# a trace as it is recorded (.trace) interleaves the warps of all blocks
_GROUPED = "group it by Accel-Sim's post-traces-processing; a .traceg comes out"


@dataclass(frozen=True)
class TraceList:
    """An application. copies: by command, how often it copies, and bytes. commands: all others of the host, counted."""

    kernels: tuple[Path, ...]
    copies: dict[str, tuple[int, int]]
    commands: dict[str, int]

    @property
    def host_work(self) -> tuple[str, ...]:
        """Work of the host between the kernels, in words; none of it is timed."""
        copies = [f"{count} {name} of {size} bytes" for name, (count, size) in self.copies.items()]
        return (*copies, *(f"{count} {name}" for name, count in self.commands.items()))


def is_list(path: Path) -> bool:
    """Return whether a file is a list of traces, by its name."""
    return path.name.startswith("kernelslist")


def read_list(path: Path) -> TraceList:
    """Read a list. Raises ConfigError with every line that is wrong."""
    # counters keep the order of the file's first occurrence of each command
    check, kernels, times, sizes, others = Problems(), list[Path](), Counter[str](), Counter[str](), Counter[str]()
    text = read_text(path, "file", way_out="name the kernelslist.g of an application")
    for number, line in enumerate(text.splitlines(), 1):
        where, word = f"{path.name}, line {number}", line.strip()
        name, *rest = word.split(",")
        if word.startswith("kernel"):
            kernels.append(path.parent / word)
            _check_kernel(kernels[-1], where, check)
        elif name.startswith(_COPY):
            size = whole_number(rest[1].strip()) if len(rest) == 2 else None
            if size is None:
                # all faults are collected: the size counts as 0 until `done` raises
                check.add(where, "is no copy", value=word, way_out=f"{name},<address>,<bytes>")
            times[name], sizes[name] = times[name] + 1, sizes[name] + (size or 0)
        elif word and not word.startswith("#"):
            others[name] += 1
    if not kernels:
        check.add(path.name, "lists no kernels", way_out="a line names a file, such as kernel-1.traceg")
    check.done()
    return TraceList(tuple(kernels), {name: (times[name], sizes[name]) for name in times}, dict(others))


def _check_kernel(path: Path, where: str, check: Problems) -> None:
    if not path.is_file():
        check.add(where, "names a kernel that is not there", value=path.name)
    # .gz and .xz may follow the suffix, so that it is looked for anywhere in the name
    elif ".traceg" not in path.name:
        check.add(where, "names a trace by time", value=path.name, way_out=_GROUPED)
