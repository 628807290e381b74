"""Kernels in PTX on arrays of one's own: run, or stopped at a line to look at the registers of a thread.

    python -m dse ptx run file=<ptx> grid=<x,y,z> block=<x,y,z> arguments=<a,b,...> [kernel=<name>] [data=<npz>]
                          [shared=<bytes>] [most=<warp instructions>] [out=<npz>]
    python -m dse ptx show line=<n> [thread=<x,y,z>] [of=<x,y,z>] [visit=<n>] ...

Arguments are names of arrays in `data`, which is copied to the device, or numbers; a number with a point is a
floating-point number. `a@64x128/128` is a tensor map of the matrix `a`, by boxes of 64 rows and 128 columns, whose
rows are swizzled by 128 bytes. `out` holds the arrays as the kernel left them. `of`: the block of the thread.
"""

from __future__ import annotations

import math
import re
import struct
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from lzma import LZMAError
from pathlib import Path
from typing import IO, Any
from zipfile import BadZipFile, ZipFile

import numpy as np
from numpy.typing import NDArray

from dse.errors import ConfigError, Problem, pairs
from dse.errors.parsing import whole_number
from dse.files import atomic_replacement, open_plain_file
from dse.results.run_folder import CommandAnswer
from dse_ptx.arguments import Argument, Pointer
from dse_ptx.execution import MOST_INSTRUCTIONS, LaunchOptions, LaunchRun, Module, PtxDevice, Watch
from dse_ptx.tensor_map import matrix_map

_MOST_BYTES = 1 << 31
"""Of a file of arrays, packed and unpacked."""
_DAMAGED = (
    *(OSError, ValueError, AttributeError, TypeError, EOFError, LookupError, MemoryError, RuntimeError),
    *(BadZipFile, LZMAError, struct.error, zlib.error),  # RuntimeError: an encrypted file, or a method not known
)
"""What NumPy and zipfile raise of files that are no .npz, or damaged."""
_SHOWN = 12  # rows of the instruction mix
_OPTIONAL = ("arguments", "kernel", "data", "shared", "most", "out", "cluster", "copies")
_MAP = re.compile(r"(\w+)@(\d+)x(\d+)(?:/(\d+))?")


def run(words: Sequence[str]) -> CommandAnswer:
    """`ptx run`: run a kernel, and count what it executed."""
    launch = TypedLaunch.of(words, ())
    done = launch.start(None)
    launch.write()
    total = max(done.thread_instructions, 1)
    lines = [f"{launch.kernel}: {done.thread_instructions} thread instructions, {int(done.issued.sum())} of warps, "]
    lines[0] += f"{done.kernel.registers_per_thread} registers live at most"
    shown = list(done.mix.items())
    lines += [f"  {100 * count / total:5.1f} %  {opcode}" for opcode, count in shown[:_SHOWN]]
    if len(shown) > _SHOWN:
        lines.append(
            f"  {100 * sum(count for _, count in shown[_SHOWN:]) / total:5.1f} %  {len(shown) - _SHOWN} others"
        )
    if launch.out:
        lines.append(f"written to {launch.out}: {', '.join(sorted(launch.pointers))}")
    return CommandAnswer(Path(), tuple(lines))


def show(words: Sequence[str]) -> CommandAnswer:
    """`ptx show`: registers of a thread before a line."""
    launch = TypedLaunch.of(words, ("line", "thread", "of", "visit"))
    typed = launch.typed
    if "line" not in typed:
        raise ConfigError([Problem("line", "is missing", way_out="write line=<number of a line of the text>")])
    block, thread = (numbers(typed.get(name, "0"), name) for name in ("of", "thread"))
    visit = number(typed.get("visit", "0"), "visit")
    done = launch.start(Watch(number(typed["line"], "line"), block, thread, visit))
    kinds = done.kernel.function.registers
    lines = [f"{launch.kernel}, before line {typed['line']}"]
    lines += [f"  {name:12} .{kinds[name]:5} {_text_of(bits, kinds[name])}" for name, bits in done.registers.items()]
    return CommandAnswer(Path(), tuple(lines))


def _text_of(bits: int, kind: str) -> str:
    """Bits of a register, and the numbers that they may stand for."""
    if kind == "pred":
        return "true" if bits else "false"
    # `.b32`, `.f16x2`: letters around the number of bits
    width = int(kind.strip("bfusx")[:2])
    text = f"0x{bits:0{width // 4}x}  {bits}"
    # the declared type does not bind the content: a word of bits may be a floating-point number
    if width in (32, 64):
        text += f"  {np.array([bits], f'u{width // 8}').view(f'f{width // 8}')[0]:.9g}"
    return text


@dataclass(frozen=True)
class TypedLaunch:
    """A launch as it was typed, on a device that holds its arrays."""

    typed: Mapping[str, str]
    module: Module
    kernel: str
    pointers: Mapping[str, Pointer]
    arrays: Mapping[str, NDArray[Any]]

    @classmethod
    def of(cls, words: Sequence[str], more: Sequence[str]) -> TypedLaunch:
        """Read the words. Raises ConfigError."""
        typed = pairs(words, {"file": "", "grid": "", "block": ""}, optional=[*_OPTIONAL, *more])
        device = PtxDevice()
        module = Module(Path(typed["file"]), device)
        kernels = module.program.kernels
        kernel = typed.get("kernel", kernels[0] if len(kernels) == 1 else "")
        if kernel not in kernels:
            way = f"kernel={kernels[0]}" if kernels else ""
            raise ConfigError([Problem("kernel", f"must be one of {', '.join(kernels)}", kernel, way)])
        arrays = _arrays(typed.get("data", ""))
        return cls(typed, module, kernel, {name: device.allocate(entry) for name, entry in arrays.items()}, arrays)

    @property
    def out(self) -> str:
        """File to write to, or ""."""
        return self.typed.get("out", "")

    def start(self, watch: Watch | None, sample: tuple[int, ...] = ()) -> LaunchRun:
        """Run the kernel. Raises ConfigError and LaunchError."""
        typed = self.typed
        most = number(typed.get("most", str(MOST_INSTRUCTIONS)), "most")
        cluster = numbers(typed["cluster"], "cluster") if "cluster" in typed else ()
        copies = typed.get("copies", "at_once")
        if copies not in ("at_once", "late"):
            raise ConfigError([Problem("copies", "is neither at_once nor late", copies, "copies=late")])
        shared = number(typed.get("shared", "0"), "shared")
        options = LaunchOptions(shared, sample, most, watch, cluster, copies == "late")
        grid, block = (numbers(typed[name], name) for name in ("grid", "block"))
        arguments = [self._argument(entry) for entry in typed.get("arguments", "").split(",") if entry]
        return self.module.launch(self.kernel, grid, block, arguments, options)

    def _argument(self, text: str) -> Argument:
        if text in self.pointers:
            return self.pointers[text]
        if (match := _MAP.fullmatch(text)) and match[1] in self.arrays:
            return self._map(match)
        # an integer first, so that `2` stays one; base 0 reads `0x10` too
        for kind in (partial(int, base=0), float):
            with suppress(ValueError):
                return kind(text)
        names = ", ".join(self.pointers) or "none: data=<npz> brings some"
        raise ConfigError([Problem("arguments", "is neither a number nor an array", text, f"arrays: {names}")])

    def _map(self, match: re.Match[str]) -> Argument:
        """The tensor map of a matrix. Raises ConfigError."""
        name, values = match[1], self.arrays[match[1]]
        if values.ndim != 2:
            rule = f"asks for a map of an array of {values.ndim} dimensions"
            raise ConfigError([Problem("arguments", rule, match[0], "name a matrix")])
        box = int(match[2]), int(match[3])
        return matrix_map(self.pointers[name], values, box, int(match[4] or 0)).encode()

    def write(self) -> None:
        """Write the arrays as the device holds them. Raises ConfigError."""
        if not self.out:
            return
        # all arrays, since a kernel may write any of its arguments
        device, arrays = self.module.device, self.arrays
        values = {name: device.read(self.pointers[name], entry.dtype, entry.shape) for name, entry in arrays.items()}
        try:
            with atomic_replacement(Path(self.out)) as fresh, fresh.open("wb") as file:
                np.savez(file, **values)  # type: ignore[arg-type]
        except OSError as error:
            raise ConfigError([Problem("out", f"cannot be written ({error.strerror})", self.out)]) from None


def _arrays(path: str) -> dict[str, NDArray[Any]]:
    """Arrays of a file by name. Raises ConfigError."""
    if not path:
        return {}
    try:
        with open_plain_file(Path(path), "data", most=_MOST_BYTES) as packed:
            # a small file may unpack to any size, so that its headers are read before any array
            if (declared := _declared_bytes(packed)) > _MOST_BYTES:
                rule = f"holds arrays of {declared:,} bytes, more than {_MOST_BYTES:,}"
                raise ConfigError([Problem("data", rule, path, "name a file with smaller arrays")])
            packed.seek(0)
            with np.load(packed) as file:
                return {name: file[name] for name in file.files}
    except _DAMAGED:
        raise ConfigError([Problem("data", "cannot be read as .npz", path, "write it by np.savez")]) from None


def _declared_bytes(packed: IO[bytes]) -> int:
    """Bytes that the arrays of a file have by their headers, before any is unpacked. Raises one of _DAMAGED."""
    total = 0
    with ZipFile(packed) as archive:
        for name in archive.namelist():
            with archive.open(name) as member:
                version = np.lib.format.read_magic(member)
                read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
                shape, _, kind = read(member)
                total += math.prod(shape) * kind.itemsize
    return total


def number(text: str, name: str) -> int:
    """A whole number that was typed. Raises ConfigError."""
    if (typed := whole_number(text)) is None:
        raise ConfigError([Problem(name, "must be a whole number", text, f"{name}=0")])
    return typed


def numbers(text: str, name: str) -> tuple[int, ...]:
    """Up to three whole numbers that were typed. Raises ConfigError."""
    typed = tuple(number(entry, name) for entry in text.split(","))
    if len(typed) > 3:
        raise ConfigError([Problem(name, "has at most three numbers", text, f"{name}=8,4,1")])
    return typed
