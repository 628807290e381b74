"""Kernels launched on the memory of a device: what they compute, count, and leave as a trace."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

from dse.errors import Broken, ConfigError, Problem, Problems
from dse.files import read_text
from dse_ptx import interpreter as vm
from dse_ptx.decoder import Decoded, decode
from dse_ptx.inlining import inline
from dse_ptx.parser import parse
from dse_ptx.program import Function, Parameter, PtxProgram, Variable
from dse_ptx.warp_trace import WarpTrace
from dse_ptx.wmma import expand

MOST_INSTRUCTIONS = 10**9
"""Warp instructions after which a launch is taken for one that never ends."""
MOST_THREADS, _MOST_SHARED = 1024, 232448
"""Of a block, of any GPU: threads, and bytes of shared memory (compute capability 9.0)."""
_MOST = {"grid": (2**31 - 1, 65535, 65535), "block": (2**31 - 1, 65535, 64)}
_PTX = "name a text of PTX, as clang -S, nvcc -ptx or Triton write it"
_ALIGN, _GAP = 256, 256  # allocations lie apart, so that what runs beyond one meets none
_FIRST_ROWS = 1 << 14


class LaunchError(Broken):
    """A kernel that failed while it ran, with thread, line and address; exit code 3."""


@dataclass(frozen=True)
class Pointer:
    """The address of an allocation of a device."""

    address: int


Argument: TypeAlias = int | float | np.generic | NDArray[Any] | Pointer


@dataclass(frozen=True)
class Watch:
    """A place at which a launch stops: a thread (x, y, z) of a block (x, y, z), before `line`, after `visit` visits."""

    line: int
    block: tuple[int, ...] = (0,)
    thread: tuple[int, ...] = (0,)
    visit: int = 0


@dataclass(frozen=True)
class LaunchRun:
    """The work of a launch. issued: warp instructions by instruction, lanes: thread instructions.

    registers: name -> bits, of the thread that was watched. trace: of the sampled blocks.
    """

    kernel: Decoded
    issued: NDArray[np.int64]
    lanes: NDArray[np.int64]
    trace: WarpTrace | None = None
    registers: Mapping[str, int] = field(default_factory=dict)

    @property
    def thread_instructions(self) -> int:
        """Instructions that lanes executed."""
        return int(self.lanes.sum())

    @property
    def mix(self) -> dict[str, int]:
        """Thread instructions by opcode, the most frequent first."""
        counts = dict[str, int]()
        for opcode, lanes in zip(self.kernel.code.opcodes, self.lanes.tolist(), strict=True):
            counts[opcode] = counts.get(opcode, 0) + lanes
        return {
            name: counts[name] for name in sorted(counts, key=lambda entry: (-counts[entry], entry)) if counts[name]
        }


class PtxDevice:
    """Global memory that allocations fill from below, and launches of kernels on it."""

    def __init__(self, size: int = 1 << 20) -> None:
        self._bytes = np.zeros(size, np.uint8)
        self._used = 0
        self._allocations = list[tuple[int, int]]()

    def allocate(self, values: NDArray[Any] | int) -> Pointer:
        """Allocate bytes (zeros), or an array that is copied. Raises ValueError for negative sizes."""
        content = np.zeros(values, np.uint8) if isinstance(values, int) else np.ascontiguousarray(values)
        start, size = self._used, content.nbytes
        self._grow(start + size + _ALIGN + _GAP)
        self._bytes[start : start + size] = content.reshape(-1).view(np.uint8)
        self._bytes[start + size : start + size + _ALIGN] = 0
        self._used = -(-(start + size + _GAP) // _ALIGN) * _ALIGN
        self._allocations.append((vm.GLOBAL_BASE + start, vm.GLOBAL_BASE + start + size))
        return Pointer(vm.GLOBAL_BASE + start)

    def read(self, pointer: Pointer, dtype: DTypeLike, shape: int | tuple[int, ...]) -> NDArray[Any]:
        """Copy of an array in the device's memory."""
        start = pointer.address - vm.GLOBAL_BASE
        count = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self._bytes[start : start + count].copy().view(dtype).reshape(shape)

    def write(self, pointer: Pointer, values: NDArray[Any]) -> None:
        """Copy an array into an allocation."""
        start = pointer.address - vm.GLOBAL_BASE
        content = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        self._bytes[start : start + content.size] = content

    def release(self, mark: int) -> None:
        """Forget all allocations after the first `mark` ones, whose number is `len(self)`."""
        self._allocations = self._allocations[:mark]
        last = self._allocations[-1][1] - vm.GLOBAL_BASE if self._allocations else 0
        self._used = -(-(last + _GAP) // _ALIGN) * _ALIGN if self._allocations else 0

    def __len__(self) -> int:
        return len(self._allocations)

    def _grow(self, size: int) -> None:
        if size > len(self._bytes):
            grown = np.zeros(max(size, 2 * len(self._bytes)), np.uint8)
            grown[: self._used] = self._bytes[: self._used]
            self._bytes = grown

    @property
    def allocations(self) -> NDArray[np.int64]:
        """First and end address of each allocation, ascending."""
        return np.array(self._allocations or [(0, 0)], np.int64)

    def content(self) -> NDArray[np.uint8]:
        """Copy of all bytes from the first address on."""
        return self._bytes[: self._used].copy()

    def arena(self, extra: int) -> tuple[NDArray[np.uint8], int]:
        """The bytes of the device and, behind what is allocated, room for a launch, with where it begins."""
        start = -(-self._used // _ALIGN) * _ALIGN
        self._grow(start + extra + _ALIGN)
        return self._bytes[: len(self._bytes) // 8 * 8], start


class Module:
    """A program on a device: its variables lie in the device's memory, its kernels are decoded on first use."""

    def __init__(self, program: PtxProgram | str | Path, device: PtxDevice, path: str = "ptx") -> None:
        if isinstance(program, Path):
            path, program = program.name, read_text(program, "file", way_out=_PTX)
        self.program = parse(program, path) if isinstance(program, str) else program
        self.device, self.path = device, path
        self._decoded = dict[str, Decoded]()
        self._dynamic, self._static, self._addresses = list[Variable](), 0, dict[str, int]()
        for entry in self.program.variables:
            self._place(entry)

    def _place(self, variable: Variable) -> None:
        if variable.space == "shared":
            if not variable.size:
                self._dynamic.append(variable)
                return
            self._static = -(-self._static // variable.align) * variable.align
            self._addresses[variable.name] = self._static
            self._static += variable.size
        else:
            content = np.zeros(max(variable.size, 1), np.uint8)
            content[: len(variable.content)] = np.frombuffer(variable.content, np.uint8)
            self._addresses[variable.name] = self.device.allocate(content).address

    def kernel(self, name: str) -> Decoded:
        """A kernel, decoded. Raises ConfigError where it is absent, or has what is not executed."""
        if name not in self._decoded:
            self._decoded[name] = decode(self.function(name), self.addresses(name), self.path, self._static)
        return self._decoded[name]

    def function(self, name: str) -> Function:
        """A kernel without calls. Raises ConfigError where it is absent."""
        if name not in self.program.kernels:
            raise ConfigError([Problem("kernel", "is not in the text", name, f"one of {self.program.kernels}")])
        return expand(inline(self.program, name, self.path), self.path)

    def addresses(self, name: str) -> dict[str, int]:
        """Addresses of the module's variables in a kernel; dynamic shared memory follows all that is static."""
        static = self._static
        for entry in self.function(name).variables:
            static = -(-static // entry.align) * entry.align + entry.size if entry.space == "shared" else static
        return self._addresses | {entry.name: -(-static // 16) * 16 for entry in self._dynamic}

    def launch(
        self,
        name: str,
        grid: Sequence[int],
        block: Sequence[int],
        arguments: Sequence[Argument],
        options: LaunchOptions | None = None,
    ) -> LaunchRun:
        """Run a kernel to its end. Arguments: numbers and pointers, in the order of its parameters.

        Raises ConfigError for arguments that do not fit, LaunchError for what goes wrong while it runs.
        """
        kernel = self.kernel(name)
        size = _three_sizes("grid", grid), _three_sizes("block", block)
        _check_block(kernel.function, size[1])
        return _Execution(self, kernel, size, arguments, options or LaunchOptions()).finish()


@dataclass(frozen=True)
class LaunchOptions:
    """shared: bytes of dynamic shared memory. sample: blocks that are recorded. most: warp instructions, at most."""

    shared: int = 0
    sample: tuple[int, ...] = ()
    most: int = MOST_INSTRUCTIONS
    watch: Watch | None = None


def _three_sizes(name: str, size: Sequence[int]) -> tuple[int, int, int]:
    x, y, z = (*size, 1, 1, 1)[:3]
    if min(x, y, z) < 1 or any(one > most for one, most in zip((x, y, z), _MOST[name], strict=True)):
        rule = f"must hold positive numbers, at most {_MOST[name]}"
        raise ConfigError([Problem(name, rule, tuple(size), "grid=8,1,1 block=128,1,1")])
    return int(x), int(y), int(z)


def _check_block(kernel: Function, block: tuple[int, int, int]) -> None:
    """Raise ConfigError for blocks that no GPU takes, or for which the kernel was not compiled."""
    check, threads = Problems(), math.prod(block)
    if threads > MOST_THREADS:
        check.add("block", f"holds more than {MOST_THREADS} threads", value=block)
    if kernel.block and (*kernel.block, 1, 1)[:3] != block:
        words = ",".join(map(str, kernel.block))
        check.add("block", "differs from the kernel's (.reqntid)", value=block, way_out=f"block={words}")
    if kernel.most_threads and threads > kernel.most_threads:
        check.add("block", f"holds more threads than the kernel's {kernel.most_threads} (.maxntid)", value=block)
    check.done()


class _Arrays(NamedTuple):
    """Arguments of the interpreter."""

    state: NDArray[np.void]
    program: vm.EncodedProgram
    memory: vm.Memory
    queue: vm.Queue
    trace: vm.Trace


def _room(sample: NDArray[np.int64], rows: int) -> vm.Trace:
    """Room for a recording of so many rows."""
    access, owner, sizes = np.zeros(rows, np.int64), np.zeros(rows, np.int32), np.zeros(rows, np.int16)
    addresses = np.zeros(rows * vm.LANES, np.uint64)
    return vm.Trace(sample, np.zeros(rows, np.int32), np.zeros(rows, np.uint32), access, owner, addresses, sizes)


class _Execution:
    """Arrays of one launch."""

    def __init__(
        self,
        module: Module,
        kernel: Decoded,
        size: tuple[tuple[int, int, int], tuple[int, int, int]],
        arguments: Sequence[Argument],
        options: LaunchOptions,
    ) -> None:
        self.module, self.kernel, self.options = module, kernel, options
        self.grid, self.block = grid, block = size
        self.threads, self.num_blocks = int(np.prod(block)), int(np.prod(grid))
        self.warps = -(-self.threads // vm.LANES)
        if self.shared_bytes > _MOST_SHARED:
            rule = f"is more than the {_MOST_SHARED} bytes of any GPU"
            raise ConfigError([Problem("shared", rule, self.shared_bytes, "take smaller blocks")])
        self.parameters = parameter_bytes(kernel.function.parameters, arguments)
        self.sample = np.array(sorted({entry for entry in options.sample if 0 <= entry < self.num_blocks}), np.int64)
        self.launch = self._prepare()

    @cached_property
    def shared_bytes(self) -> int:
        """Shared memory of a block, static and dynamic."""
        static = self.kernel.shared_bytes
        # dynamic shared memory begins at a multiple of 16 bytes, after all that is static
        return -(-static // 16) * 16 + self.options.shared if self.options.shared else static

    def _prepare(self) -> _Arrays:
        kernel, state = self.kernel, np.zeros(1, vm.STATE)
        sizes = (len(self.parameters), self.shared_bytes, kernel.local_bytes * self.warps * vm.LANES)
        rounded = [-(-entry // 16) * 16 for entry in sizes]
        arena, start = self.module.device.arena(sum(rounded) + 16)
        arena[start : start + sizes[0]] = self.parameters
        state["ntid"], state["nctaid"] = self.block, self.grid
        count, registers = len(kernel.constants), len(kernel.registers)
        # each branch may split a warp, and lanes may loop apart: room for both
        depth = 2 * (int((kernel.rows[:, vm.KIND] == vm.BRANCH).sum()) + vm.LANES)
        values = {"num_threads": self.threads, "num_warps": self.warps, "num_blocks": self.num_blocks}
        values |= {"num_constants": count, "num_registers": registers, "depth": depth, "limit": self.options.most}
        values |= {"param_at": start, "param_size": sizes[0], "shared_at": start + rounded[0], "shared_size": sizes[1]}
        values |= {"local_at": start + rounded[0] + rounded[1], "local_size": kernel.local_bytes, "watch_pc": -1}
        values["local_trace"] = _local_trace(start)
        for name, value in values.items():
            state[name] = value
        self._watch(state)
        file = np.zeros(vm.LANES * (count + registers * self.warps), np.uint64)
        # constants are registers that no lane changes
        file[: vm.LANES * count] = np.repeat(kernel.constants, vm.LANES)
        # the recording grows while it runs: how many rows there will be is not known
        rows = _FIRST_ROWS if len(self.sample) else 0
        counts = np.zeros((2, len(kernel.rows)), np.int64)
        warps = np.zeros((self.warps, vm.WARP_FIELDS), np.int64)
        return _Arrays(
            state,
            vm.EncodedProgram(kernel.rows, kernel.operands, file),
            vm.Memory(arena, *_wider(arena), self.module.device.allocations),
            vm.Queue(np.zeros((self.warps, depth, 3), np.int64), warps, np.zeros(16, np.int64), *counts),
            _room(self.sample, rows),
        )

    def _watch(self, state: NDArray[np.void]) -> None:
        watch = self.options.watch
        if watch is None:
            return
        if watch.line not in self.kernel.lines:
            lines = sorted(set(self.kernel.lines))
            raise ConfigError(
                [Problem("line", "holds no instruction", watch.line, f"one of {lines[0]} to {lines[-1]}")]
            )
        numbers = []
        for name, place, size in (("block", watch.block, self.grid), ("thread", watch.thread, self.block)):
            x, y, z = (*place, 0, 0, 0)[:3]
            if not (0 <= x < size[0] and 0 <= y < size[1] and 0 <= z < size[2]):
                raise ConfigError([Problem(name, f"is not in {size}", tuple(place))])
            numbers.append(x + size[0] * (y + size[1] * z))
        state["watch_pc"], state["watch_skip"] = self.kernel.lines.index(watch.line), watch.visit
        state["watch_block"], state["watch_thread"] = numbers

    def number(self, name: str) -> int:
        """A number of the state."""
        return int(self.launch.state[name][0])

    def finish(self) -> LaunchRun:
        """Run to the end, or to what is watched. Raises LaunchError."""
        a, b = np.zeros(vm.TILE + 4 * vm.LANES), np.zeros(vm.TILE // 2)
        # the recording is full: it is enlarged, and the run goes on where it stopped
        while (status := int(vm.run(*self.launch, vm.LANES, a, b))) == vm.FULL:
            self._extend()
        if status not in (vm.DONE, vm.WATCHED):
            raise LaunchError(self._failure(status))
        if self.options.watch is not None and status == vm.DONE:
            raise LaunchError(f"line {self.options.watch.line}: the thread does not come there so often")
        registers = self._registers() if status == vm.WATCHED else {}
        trace = self._trace() if len(self.sample) else None
        return LaunchRun(self.kernel, self.launch.queue.issued, self.launch.queue.lanes, trace, registers)

    def _extend(self) -> None:
        """Double the room of the recording."""
        old = self.launch.trace
        new = _room(old.sample, 2 * len(old.pcs))
        for name in vm.Trace._fields[1:]:
            before = getattr(old, name)
            getattr(new, name)[: len(before)] = before
        self.launch = self.launch._replace(trace=new)

    def _registers(self) -> dict[str, int]:
        count = len(self.kernel.constants)
        warp, lane = divmod(self.number("watch_thread"), vm.LANES)
        rows = self.launch.program.file.reshape(-1, vm.LANES)[count + warp * len(self.kernel.registers) :, lane]
        return {name: int(rows[number]) for name, number in self.kernel.registers.items()}

    def _failure(self, status: int) -> str:
        """A sentence with line, block, thread and address."""
        row = max(self.number("pc"), 0)
        block = _coordinates(self.number("block"), self.grid)
        thread = _coordinates(self.number("fault_thread"), self.block)
        who, address = f"thread {thread} of block {block}", f"0x{self.number('fault_address'):x}"
        opcode = self.kernel.code.opcodes[row]
        sentences = {
            vm.OUT_OF_BOUNDS: f"{who} accesses {address}, which is out of bounds",
            vm.MISALIGNED: f"{who} accesses {address}, which is not a multiple of the access's size",
            vm.DEADLOCK: f"{who} waits at a barrier to which other warps never come (deadlock)",
            vm.DIVERGENT: f"a barrier is reached without {who}, which has not ended (deadlock)",
            vm.ENDLESS: f"{self.options.most} warp instructions were executed, and the kernel has not ended",
            vm.TRAPPED: f"{who} executes a trap",
            vm.DEEP: f"{who} diverges more deeply than the kernel has branches",
        }
        where = f"{self.module.path}, line {self.kernel.lines[row]}, {opcode} of {self.kernel.function.name}"
        return f"{where}: {sentences[status]}"

    def _trace(self) -> WarpTrace:
        """The recording, warp after warp."""
        launch, rows, accesses = self.launch.trace, self.number("rows"), self.number("accesses")
        owner = launch.owner[:rows]
        # warps take turns in the recording; within one the order is that of execution
        order = np.argsort(owner, kind="stable")
        count = len(self.sample) * self.warps
        starts = np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=count))])
        return WarpTrace(
            self.kernel.code,
            np.repeat(self.sample, self.warps).astype(np.int32),
            starts.astype(np.int64),
            launch.pcs[:rows][order],
            launch.active[:rows][order],
            launch.access[:rows][order],
            launch.addresses[: accesses * vm.LANES].reshape(-1, vm.LANES).copy(),
            launch.sizes[:accesses].copy(),
            self.num_blocks,
            self.threads,
            self.kernel.registers_per_thread,
            self.shared_bytes,
        )


def _wider(arena: NDArray[np.uint8]) -> tuple[NDArray[np.uint16], NDArray[np.uint32], NDArray[np.uint64]]:
    """The same bytes as words of 16, 32 and 64 bits."""
    return arena.view(np.uint16), arena.view(np.uint32), arena.view(np.uint64)


def _local_trace(start: int) -> int:
    """Address at which local memory of all threads would lie in global memory."""
    return vm.GLOBAL_BASE + (-(-start // (1 << 20)) + 1) * (1 << 20)


def _coordinates(number: int, size: tuple[int, int, int]) -> tuple[int, int, int]:
    return number % size[0], number // size[0] % size[1], number // (size[0] * size[1])


def parameter_bytes(parameters: Sequence[Parameter], arguments: Sequence[Argument]) -> NDArray[np.uint8]:
    """Bytes of the parameter space. Raises ConfigError for arguments that do not fit."""
    if len(arguments) != len(parameters):
        rule = f"holds {len(arguments)} values where the kernel has {len(parameters)} parameters"
        raise ConfigError(
            [Problem("arguments", rule, way_out=", ".join(f".{p.type_name} {p.name}" for p in parameters))]
        )
    content = np.zeros(max((entry.offset + entry.size for entry in parameters), default=0), np.uint8)
    for parameter, argument in zip(parameters, arguments, strict=True):
        value = _argument_bytes(parameter, argument)
        content[parameter.offset : parameter.offset + parameter.size] = np.frombuffer(value, np.uint8)
    return content


def _argument_bytes(parameter: Parameter, argument: Argument) -> bytes:
    """Bytes of one argument: numbers in the type of the parameter. Raises ConfigError where they do not fit."""
    kind, bits = parameter.type_name, 8 * parameter.size
    # `2` may be typed for a float
    if isinstance(argument, int) and kind in ("f32", "f64"):
        argument = float(argument)
    if isinstance(argument, Pointer):
        value = argument.address.to_bytes(8, "little")
    elif isinstance(argument, np.ndarray | np.generic):
        value = argument.tobytes()
    elif isinstance(argument, float) and kind[0] in "us":
        rule, way = f"is no whole number, as .{kind} is", "write it without a point"
        raise ConfigError([Problem(f"arguments.{parameter.name}", rule, str(argument), way)])
    elif isinstance(argument, float):
        value = np.array(argument, {4: np.float32, 8: np.float64}.get(parameter.size, np.float16)).tobytes()
    # signed and unsigned values of as many bits
    elif not -(1 << bits - 1) <= argument < 1 << bits:
        raise ConfigError([Problem(f"arguments.{parameter.name}", f"is no number of {bits} bits", str(argument))])
    else:
        value = (argument % (1 << bits)).to_bytes(parameter.size, "little")
    if len(value) != parameter.size:
        rule = f"has {parameter.size} bytes, and is given {len(value)}"
        raise ConfigError([Problem(f"arguments.{parameter.name}", rule, str(argument))])
    return value
