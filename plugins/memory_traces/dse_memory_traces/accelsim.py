"""Accel-Sim's traces: what its NVBit tracer saw of a kernel, warp by warp, as lines of memory.

A file holds a kernel: a header of `-name = value`, then thread blocks, grouped by Accel-Sim's post-traces-processing:

    #BEGIN_TB
    thread block = 0,0,0
    warp = 0
    insts = 2
    0008 ffffffff 1 R1 MOV 0 0
    0670 ffffffff 0 STG.E 2 R2 R21 4 1 0x7f0e5f718000 4
    #END_TB

An instruction is its PC, the mask of active lanes, destinations, opcode, sources, a width, and where that is not 0 the
lanes' addresses: `0` and one of each active lane, `1`, the first and a stride, or `2`, the first and differences of
neighbours. What follows is not read. Before version 3 of the tracer a thread block and a warp stand before the PC, and
with `-enable lineinfo = 1` a line of the source; the comment `#traces format` is copied from before the grouping, and
does not tell. A width of bytes is that of the opcode (`.64`, `.U8`, else 4), as the column is not to be relied on.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import io
import lzma
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dse.errors import ConfigError, Problem, Problems
from dse.errors.parsing import whole_number
from dse.files import lines
from dse.files import open_plain_file as plain

Block = NDArray[np.int64]

MOST_TOLD = 20
"""Problems of one recording that are told; reading stops there."""
MOST_BYTES = 1 << 36
"""Of a file that holds a trace, which is read line by line."""
MOST_ADDRESS = 2**62
_STORES = {
    **{"LD": (0,), "LDG": (0,), "LDGSTS": (0,), "ST": (1,), "STG": (1,)},
    **dict.fromkeys(("ATOM", "ATOMG", "RED", "REDG"), (0, 1)),
}  # opcodes that reach global memory: whether they store; what is atomic does both
_GENERIC = ("LD", "ST", "ATOM")  # which may mean shared or local memory, too
_WINDOW = 1 << 24  # bytes of shared or local memory in the address space: assumed
_DEFAULT_WIDTH = 4
_GROUPED_FROM = 3  # version of the tracer
_UNGROUPED = "group the tracer's .trace by Accel-Sim's post-traces-processing; a .traceg comes out"
_DAMAGED = (EOFError, gzip.BadGzipFile, lzma.LZMAError, UnicodeDecodeError)


@contextlib.contextmanager
def open_text(path: Path) -> Iterator[Iterator[str]]:
    """Lines of a text, plain, .gz or .xz. Raises ConfigError where it is damaged."""
    kinds: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open}
    try:
        with plain(path, "data", most=MOST_BYTES, way_out="name a plain file that holds a trace") as file:
            packed = kinds[path.suffix](file) if path.suffix in kinds else file
            with io.TextIOWrapper(packed, encoding="utf-8-sig", newline="") as text:
                yield lines(text, path.name)
    except _DAMAGED as error:
        raise ConfigError([Problem(path.name, f"is damaged, or no text in UTF-8: {error}")]) from None


def files(path: Path) -> list[Path]:
    """The kernels of a `kernelslist.g` in their order, or the one kernel. Raises ConfigError."""
    if not path.name.startswith("kernelslist"):
        return [path]
    with open_text(path) as text:
        names = [(line, text_line.strip()) for line, text_line in enumerate(text, 1) if text_line.startswith("kernel")]
    check, paths = Problems(), [path.parent / name for _, name in names]
    for (line, name), kernel in list(zip(names, paths, strict=True)):
        if not kernel.is_file():
            check.add(f"{path.name}, line {line}", "names a kernel that is not there", value=name)
        elif ".traceg" not in kernel.name:
            check.add(f"{path.name}, line {line}", "names a trace by time", value=name, way_out=_UNGROUPED)
    if not names:
        check.add(path.name, "lists no kernels", way_out="a line names a file, such as kernel-1.traceg")
    check.found = check.found[:MOST_TOLD]
    check.done()
    return paths


class TracedKernel:
    """A kernel's file. name: as its header says, once it is read. skipped: accesses by opcode that are not counted."""

    def __init__(self, path: Path, line_bytes: int, check: Problems) -> None:
        self.name, self.skipped = path.name.partition(".")[0], Counter[str]()
        self._path, self._line_bytes, self._check = path, line_bytes, check
        self._header: dict[str, str] = {}
        self._rows: list[tuple[int, int, int, int, int]] = []
        self._line, self._open = 0, False
        self._warp, self._step, self._promised = 0, 0, -1

    def blocks(self) -> Iterator[Block]:
        """Address, PC and whether it stores [A, 3] of every line that a thread block asks for, in file order.

        Warps take turns by instruction. Raises ConfigError after many problems; others are noted.
        """
        with open_text(self._path) as text:
            for self._line, text_line in enumerate(text, 1):
                words = text_line.split()
                if words[:1] == ["#END_TB"]:
                    self._end_warp()
                    self._open = False
                    yield self._block()
                elif words:
                    self._take(words, text_line)
        if self._open:
            self._wrong("ends inside a thread block")

    def _take(self, words: Sequence[str], text_line: str) -> None:
        if text_line.startswith("-"):
            name, _, value = text_line[1:].partition("=")
            self._header[name.strip()] = value.strip()
            self.name = self._header.get("kernel name", self.name)
        elif words[0] == "#BEGIN_TB":
            self._open, self._rows, self._promised = True, [], -1
        elif words[0] in ("warp", "insts"):
            self._begin(words)
        elif words[0] in ("thread", "cluster") or words[0].startswith("#"):
            return
        elif not self._open:
            self._wrong("stands outside of a thread block", _UNGROUPED)
            self._check.done()  # so do all others
        else:
            self._instruction(words)

    def _begin(self, words: Sequence[str]) -> None:
        """A warp, or how many instructions it has."""
        number = whole_number(words[-1])
        if number is None:
            self._wrong(f"is no number of {words[0]}")
        elif words[0] == "warp":
            self._end_warp()
            self._warp, self._step = number, 0
        else:
            self._promised = number

    def _end_warp(self) -> None:
        if self._promised not in (-1, self._step):
            self._wrong(f"ends warp {self._warp} after {self._step} instructions; insts = {self._promised}")
        self._promised = -1

    def _instruction(self, words: Sequence[str]) -> None:
        self._step += 1
        try:
            at = self._leading_columns + 3 + int(words[self._leading_columns + 2])
            family, width = _opcode(words[at])
            at += 2 + int(words[at + 1])
            if words[at] == "0":
                return
            if family not in _STORES:
                self.skipped[family] += 1
                return
            pc, mask = (int(word, 16) for word in words[self._leading_columns : self._leading_columns + 2])
            places = _addresses(int(words[at + 1]), words[at + 2 :], mask)
            self._access(family, pc, (places, width))
        except IndexError:
            self._wrong("is cut short", "a line is PC, mask, destinations, opcode, sources, width, addresses")
        except ValueError as error:
            self._wrong(f"is no instruction: {error}")

    def _access(self, family: str, pc: int, touched: tuple[list[int], int]) -> None:
        """An instruction's lines, each once, in the order of lanes."""
        (places, width), size = touched, self._line_bytes
        if not places:
            return
        if family in _GENERIC and not self._is_global(places[0]):
            self.skipped[f"{family} (shared or local)"] += 1
            return
        lines = dict.fromkeys(
            line for place in places for line in range(place // size, (place + width - 1) // size + 1)
        )
        for store in _STORES[family]:
            self._rows += [(self._step, self._warp, line * size, pc, store) for line in lines]

    def _is_global(self, place: int) -> bool:
        """Tell whether a generic address is neither shared nor local; False without bases, as it cannot be told."""
        bases = [int(self._header.get(name, "0"), 16) for name in ("shmem base_addr", "local mem base_addr")]
        return 0 not in bases and not min(bases) <= place < max(bases) + _WINDOW

    def _block(self) -> Block:
        rows = np.array(self._rows, np.int64).reshape(-1, 5)
        return rows[np.lexsort((rows[:, 1], rows[:, 0]))][:, 2:]

    @functools.cached_property
    def _leading_columns(self) -> int:
        """Columns before the PC."""
        version = whole_number(self._header.get("accelsim tracer version", ""))
        grouped = version is None or version >= _GROUPED_FROM
        return 4 * (not grouped) + (self._header.get("enable lineinfo") == "1")

    def _wrong(self, rule: str, way_out: str = "") -> None:
        self._check.add(f"{self._path.name}, line {self._line}", rule, way_out=way_out)
        if len(self._check.found) >= MOST_TOLD:
            self._check.done()


@functools.cache
def _opcode(opcode: str) -> tuple[str, int]:
    """Family of an opcode, and bytes of a lane."""
    family, *suffixes = opcode.split(".")
    bits = [int(match[1]) for suffix in suffixes if (match := re.fullmatch(r"[US]?(\d+)", suffix))]
    return family, max(1, bits[0] // 8) if bits else _DEFAULT_WIDTH


def _addresses(mode: int, words: Sequence[str], mask: int) -> list[int]:
    """Addresses of the active lanes. Raises ValueError or IndexError."""
    lanes = mask.bit_count()
    if not 0 <= mode <= 2:
        raise ValueError(f"address mode {mode} is not 0 (list), 1 (stride) or 2 (differences)")
    if not lanes:
        return []
    if mode == 1:
        run = mask >> ((mask & -mask).bit_length() - 1)
        if run & (run + 1):
            raise ValueError("a stride needs neighbouring active lanes")
        base, stride = int(words[0], 16), int(words[1])
        addresses = [base + lane * stride for lane in range(lanes)]
    else:
        if len(words) < lanes:
            raise ValueError(f"{len(words)} addresses for {lanes} active lanes")
        if mode == 0:
            addresses = [int(word, 16) for word in words[:lanes]]
        else:
            addresses = list(accumulate((int(word) for word in words[1:lanes]), initial=int(words[0], 16)))
    if min(addresses) < 0 or max(addresses) >= MOST_ADDRESS:
        raise ValueError("an address is not from 0 to 2^62")
    return addresses
