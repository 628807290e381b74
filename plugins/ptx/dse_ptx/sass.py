"""SASS traces of Accel-Sim (what its NVBit tracer saw of a kernel, grouped by blocks) as warp instructions to be timed.

A line of a warp is its PC, the mask of active lanes, the number of destinations and these, the opcode, the number of
sources and these, a width, and where that is not 0 the lanes' addresses: `0` and one of each active lane, `1`, the
first and a stride, or `2`, the first and differences of neighbours. Before version 3 of the tracer a block and a warp
stand before the PC, and with `-enable lineinfo = 1` a line of the source. Registers of an instruction are those of its
PC; predicates are not recorded. The trace tells the first register of a wide value alone: of what is loaded, the
opcode's width tells how many there are.
"""

from __future__ import annotations

import gzip
import io
import lzma
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dse.errors import ConfigError, Problem
from dse.errors.parsing import whole_number
from dse.files import lines
from dse.files import open_plain_file as plain
from dse_ptx.warp_trace import Code, Unit, WarpTrace

_MOST_BYTES = 1 << 36  # of a file: 64 GiB
_COLUMNS = "a line is PC, mask, destinations, opcode, sources, width, addresses"
_UNITS: tuple[tuple[str, Unit], ...] = (
    # the order decides: LDGSTS before LDG, LDSM before LDS, FLO before F
    ("LDGSTS", Unit.GLOBAL_LOAD), ("LDG", Unit.GLOBAL_LOAD), ("LDL", Unit.GLOBAL_LOAD), ("LDSM", Unit.SHARED_LOAD),
    ("LDS", Unit.SHARED_LOAD), ("LDC", Unit.CONSTANT), ("LD", Unit.GLOBAL_LOAD), ("STG", Unit.GLOBAL_STORE),
    ("STL", Unit.GLOBAL_STORE), ("STS", Unit.SHARED_STORE), ("ST", Unit.GLOBAL_STORE), ("ATOMS", Unit.SHARED_ATOMIC),
    ("ATOM", Unit.GLOBAL_ATOMIC), ("RED", Unit.GLOBAL_ATOMIC), ("SHFL", Unit.SHARED_LOAD), ("BAR", Unit.BARRIER),
    ("EXIT", Unit.EXIT), ("MUFU", Unit.SPECIAL), ("F2", Unit.SPECIAL), ("I2F", Unit.SPECIAL), ("FRND", Unit.SPECIAL),
    *((f"{kind}{size}MMA", Unit.TENSOR) for size in ("", "G") for kind in "HIQDB"),
    ("H", Unit.FP16), ("DEPBAR", Unit.INTEGER),
    ("D", Unit.FP64), ("FLO", Unit.INTEGER), ("F", Unit.FP32), ("BR", Unit.BRANCH), ("JMP", Unit.BRANCH),
    ("CALL", Unit.BRANCH), ("RET", Unit.BRANCH),
)  # fmt: skip
"""Beginning of an opcode -> its pipeline, the first that fits; all others are integer."""
_OPERATIONS = {"FFMA": 2.0, "FADD": 1.0, "FMUL": 1.0, "DFMA": 2.0, "DADD": 1.0, "DMUL": 1.0, "HFMA2": 4.0,
               "HADD2": 2.0, "HMUL2": 2.0}  # fmt: skip
_SHAPES = {"16816": 128.0, "1688": 64.0, "884": 16.0, "16832": 256.0, "16864": 512.0, "8816": 64.0, "8832": 128.0,
           "88128": 512.0, "168128": 1024.0, "168256": 2048.0}  # fmt: skip
"""Shape of a matrix product -> operations of a lane: 2 m n k over 32 lanes."""
_GROUP = 128  # lanes of the four warps that share a GMMA, whose shape is written 64x128x16
_MATRIX_ROW = 16  # bytes of a row of LDSM, to whose first element each lane points
# SHFL moves values through the pipeline of shared memory, without an address
_TOUCHING = ("LDG", "LDL", "LDS", "LD", "STG", "STL", "STS", "ST", "ATOM", "RED")


def read_sass(path: Path, most_blocks: int = 1 << 20) -> WarpTrace:
    """Read the first blocks of a kernel's trace (`kernel-1.traceg`, plain, .gz or .xz). Raises ConfigError."""
    reader = _Reader(path.name, most_blocks)
    kinds: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open}
    try:
        with plain(path, "trace", most=_MOST_BYTES, way_out="name a plain file that holds a trace") as file:
            packed = kinds[path.suffix](file) if path.suffix in kinds else file
            with io.TextIOWrapper(packed, encoding="utf-8-sig", newline="") as text:
                reader.read(lines(text, path.name))
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, UnicodeDecodeError) as error:
        raise ConfigError([Problem(path.name, f"is damaged, or no text in UTF-8: {error}")]) from None
    return reader.trace()


@dataclass
class _Reader:
    """What was read of a kernel's file so far."""

    name: str
    most: int
    line: int = 0
    header: dict[str, str] = field(default_factory=dict)
    rows: dict[tuple[str, ...], int] = field(default_factory=dict)
    starts: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    stream: list[tuple[int, int, int]] = field(default_factory=list)
    addresses: list[np.ndarray] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    block: int = -1

    def read(self, text: Iterator[str]) -> None:
        """Read lines until so many blocks are there."""
        for self.line, text_line in enumerate(text, 1):
            words = text_line.split()
            if text_line.startswith("-"):
                key, _, value = text_line[1:].partition("=")
                self.header[key.strip()] = value.strip()
            elif words[:1] == ["#BEGIN_TB"]:
                self.block += 1
                # the rest of the file is not read: traces may be larger than memory
                if self.block == self.most:
                    return
            elif words[:1] == ["warp"]:
                self.starts.append(len(self.stream))
                self.blocks.append(self.block)
            elif words and words[0] not in ("thread", "cluster", "insts") and not words[0].startswith("#"):
                self._instruction(words)

    def _instruction(self, words: Sequence[str]) -> None:
        if not self.starts:
            raise self._wrong("stands outside of a warp", "group the trace by Accel-Sim's post-traces-processing")
        version = whole_number(self.header.get("accelsim tracer version", ""))
        # x, y, z of the block and the warp; a missing version is taken for a new one
        first = 4 * (version is not None and version < 3) + (self.header.get("enable lineinfo") == "1")
        try:
            written = int(words[first + 2])
            at = first + 3 + written
            read = int(words[at + 1])
            end = at + 2 + read
            static = (words[first], words[at], *words[first + 3 : at], "", *words[at + 2 : end])
            mask, access = int(words[first + 1], 16), -1
            touches = words[at].startswith(_TOUCHING) and mask
            if words[end] != "0" and touches:
                access = len(self.sizes)
                self.addresses.append(_addresses(int(words[end + 1]), words[end + 2 :], mask))
                self.sizes.append(_bytes(words[at]))
        except IndexError:
            raise self._wrong("is cut short", _COLUMNS) from None
        except (ValueError, OverflowError) as error:
            raise self._wrong(f"is no instruction: {error}", _COLUMNS) from None
        # rows number the static instructions in the order of their first execution
        self.stream.append((self.rows.setdefault(static, len(self.rows)), mask, access))

    def _wrong(self, rule: str, way_out: str) -> ConfigError:
        return ConfigError([Problem(f"{self.name}, line {self.line}", rule, None, way_out)])

    def trace(self) -> WarpTrace:
        """The trace. Raises ConfigError where the header does not tell the launch, or no warp was read."""
        sizes = {name: re.findall(r"\d+", self.header.get(name, "")) for name in ("grid dim", "block dim", "nregs")}
        if not self.stream or not all(sizes.values()):
            rule = "holds no warp, or no `-grid dim`, `-block dim` and `-nregs`"
            raise ConfigError([Problem(self.name, rule, None, "name a kernel's trace, kernel-1.traceg")])
        stream = np.array(self.stream, np.int64)
        blocks, threads = (int(np.prod([int(size) for size in sizes[name]])) for name in ("grid dim", "block dim"))
        addresses = np.stack(self.addresses) if self.addresses else np.zeros((0, 32), np.uint64)
        return WarpTrace(
            code=_code(list(self.rows)), blocks=np.array(self.blocks, np.int32),
            starts=np.array([*self.starts, len(stream)], np.int64), pcs=stream[:, 0].astype(np.int32),
            active=stream[:, 1].astype(np.uint32), access=stream[:, 2].copy(), addresses=addresses,
            bytes_per_lane=np.array(self.sizes, np.int16), num_blocks=blocks, threads_per_block=threads,
            registers_per_thread=int(sizes["nregs"][0]), shared_bytes_per_block=int(self.header.get("shmem", "0")),
        )  # fmt: skip


def _code(rows: Sequence[tuple[str, ...]]) -> Code:
    """Static instructions: opcode, registers written, "", registers read."""
    opcodes = tuple(row[1] for row in rows)
    written, read = list[list[int]](), list[list[int]]()
    for row in rows:
        gap = row.index("", 2)
        written.append(_registers(row[2:gap], _wide(row[1])))
        read.append(_registers(row[gap + 1 :], 1))
    units = np.array([unit_of(opcode) for opcode in opcodes], np.int8)
    operations = np.array([_operations(opcode) for opcode in opcodes])
    return Code(opcodes, units, _pad(written), _pad(read), operations)


def _wide(opcode: str) -> int:
    """Registers that an opcode writes from the first on: of LDSM as many as matrices, its last suffix."""
    if opcode.startswith("LDSM"):
        return int(opcode[-1]) if opcode[-2:] in (".2", ".4") else 1
    return max(1, _bytes(opcode) // 4) if opcode.startswith(_TOUCHING) else 1


def _registers(names: Sequence[str], wide: int) -> list[int]:
    """Numbers of registers; R255 is zero."""
    written = (whole_number(name[1:]) for name in names if name[:1] == "R")
    numbers = [number for number in written if number is not None]
    # a register of 64 or 128 bits is named by its first one
    return [number + part for number in numbers if number != 255 for part in range(wide)]


def _pad(rows: Sequence[Sequence[int]]) -> np.ndarray:
    widest = max(map(len, rows), default=0)
    return np.array([[*row, *[-1] * (widest - len(row))] for row in rows], np.int32).reshape(len(rows), widest)


def unit_of(opcode: str) -> Unit:
    """Pipeline of an opcode of SASS."""
    return next((unit for begin, unit in _UNITS if opcode.startswith(begin)), Unit.INTEGER)


def _operations(opcode: str) -> float:
    family, *suffixes = opcode.split(".")
    shape = re.search(r"\b(\d+)x(\d+)x(\d+)\b", opcode)
    if unit_of(opcode) == Unit.TENSOR and shape:
        # a GMMA is issued by four warps: an operation's share of one of 128 lanes
        return 2.0 * int(shape[1]) * int(shape[2]) * int(shape[3]) / _GROUP
    if unit_of(opcode) == Unit.TENSOR:
        # a shape that is not known counts as the smallest
        return next((_SHAPES[suffix] for suffix in suffixes if suffix in _SHAPES), _SHAPES["884"])
    return _OPERATIONS.get(family, 0.0)


def _bytes(opcode: str) -> int:
    """Bytes of a lane, by the first suffix that is a width."""
    if opcode.startswith("LDSM"):
        return _MATRIX_ROW
    bits = [int(match[1]) for suffix in opcode.split(".")[1:] if (match := re.fullmatch(r"[US]?(\d+)", suffix))]
    # without a width an access moves words of 32 bits
    return max(1, bits[0] // 8) if bits else 4


def _addresses(mode: int, words: Sequence[str], mask: int) -> np.ndarray:
    """Addresses of 32 lanes, 0 of those that are not active. Raises ValueError or IndexError."""
    lanes = np.flatnonzero(mask >> np.arange(32) & 1)
    row = np.zeros(32, np.uint64)
    if mode == 1:
        # the stride counts lanes, also those that are not active
        places = int(words[0], 16) + int(words[1]) * (lanes - lanes[0])
    elif mode in (0, 2):
        if len(words) < len(lanes):
            raise ValueError(f"{len(words)} addresses for {len(lanes)} active lanes")
        numbers = [int(word, 16 if mode == 0 or not place else 10) for place, word in enumerate(words[: len(lanes)])]
        # mode 2: each active lane's distance from the active lane before it
        places = np.array(numbers, np.int64) if mode == 0 else np.cumsum(np.array(numbers, np.int64))
    else:
        raise ValueError(f"address mode {mode} is not 0 (list), 1 (stride) or 2 (differences)")
    if (places < 0).any():
        raise ValueError("an address is negative")
    row[lanes] = places.astype(np.uint64)
    return row
