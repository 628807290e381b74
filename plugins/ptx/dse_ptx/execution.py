"""Kernels launched on the memory of a device: what they compute, count, and leave as a trace."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from dse.errors import Broken, ConfigError, Problem, Problems
from dse.files import read_text
from dse_ptx import vm
from dse_ptx.arguments import Argument, Pointer, parameter_bytes
from dse_ptx.decoder import Decoded, decode
from dse_ptx.failures import Failure
from dse_ptx.inlining import inline
from dse_ptx.interpreter import run
from dse_ptx.parser import parse
from dse_ptx.program import Function, PtxProgram, Variable
from dse_ptx.warp_trace import WarpTrace
from dse_ptx.wmma import expand

MOST_INSTRUCTIONS = 10**9
"""Warp instructions after which a launch is taken for one that never ends."""
MOST_THREADS, _MOST_SHARED = 1024, 232448
"""Of a block, of any GPU: threads, and bytes of shared memory (compute capability 9.0)."""
# limits of each axis; x and y of a block are bounded by MOST_THREADS
_MOST = {"grid": (2**31 - 1, 65535, 65535), "block": (2**31 - 1, 65535, 64)}
_PTX = "name a text of PTX, as clang -S, nvcc -ptx or Triton write it"
_ALIGN, _GAP = 256, 256  # allocations lie apart, so that what runs beyond one meets none
# rows of the recording at first: a block of a small kernel fits
_FIRST_ROWS = 1 << 14


class LaunchError(Broken):
    """A kernel that failed while it ran, with thread, line and address; exit code 3."""


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
        # a transposed array is copied in the order of its indices
        content = np.zeros(values, np.uint8) if isinstance(values, int) else np.ascontiguousarray(values)
        start, size = self._used, content.nbytes
        self._grow(start + size + _ALIGN + _GAP)
        self._bytes[start : start + size] = content.reshape(-1).view(np.uint8)
        self._bytes[start + size : start + size + _ALIGN] = 0
        self._used = -(-(start + size + _GAP) // _ALIGN) * _ALIGN
        # addresses as kernels see them: the arena begins at 2^32, above the windows of shared and local memory
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
            # doubling keeps the cost of many allocations linear
            grown = np.zeros(max(size, 2 * len(self._bytes)), np.uint8)
            grown[: self._used] = self._bytes[: self._used]
            self._bytes = grown

    @property
    def allocations(self) -> NDArray[np.int64]:
        """First and end address of each allocation, ascending."""
        # without allocations: one range of no bytes, in which no address lies
        return np.array(self._allocations or [(0, 0)], np.int64)

    def content(self) -> NDArray[np.uint8]:
        """Copy of all bytes from the first address on."""
        return self._bytes[: self._used].copy()

    def arena(self, extra: int) -> tuple[NDArray[np.uint8], int]:
        """The bytes of the device and, behind what is allocated, room for a launch, with where it begins."""
        start = -(-self._used // _ALIGN) * _ALIGN
        self._grow(start + extra + _ALIGN)
        # a whole number of words of 8 bytes, since it is also viewed as words of 64 bits
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
            # `extern .shared` without a size: all such arrays begin at the same address
            if not variable.size:
                self._dynamic.append(variable)
                return
            self._static = -(-self._static // variable.align) * variable.align
            self._addresses[variable.name] = self._static
            self._static += variable.size
        else:
            # a variable without bytes still needs an address of its own
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
        # calls first: a device function may hold a `wmma`
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
        options = options or LaunchOptions()
        cluster = _check_cluster(kernel.function, size[0], options.cluster)
        return _Execution(self, kernel, (*size, cluster), arguments, options).finish()


@dataclass(frozen=True)
class LaunchOptions:
    """shared: bytes of dynamic shared memory. sample: blocks that are recorded, in the order of clusters. most: warp
    instructions, at most. cluster: blocks of one (x, y, z), where the kernel does not fix it.
    late: bulk copies to shared memory come once nobody else can go on, instead of at once, unless blocks are recorded.
    """

    shared: int = 0
    sample: tuple[int, ...] = ()
    most: int = MOST_INSTRUCTIONS
    watch: Watch | None = None
    cluster: tuple[int, ...] = ()
    late: bool = False


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
        # .reqntid is exact: a compiler may have put the sizes into addresses
        check.add("block", "differs from the kernel's (.reqntid)", value=block, way_out=f"block={words}")
    if kernel.most_threads and threads > kernel.most_threads:
        check.add("block", f"holds more threads than the kernel's {kernel.most_threads} (.maxntid)", value=block)
    check.done()


def _check_cluster(kernel: Function, grid: tuple[int, int, int], asked: tuple[int, ...]) -> tuple[int, int, int]:
    """Blocks of a cluster along each axis. Raises ConfigError for those that do not fill the grid, or are too many."""
    if asked and kernel.cluster and (*asked, 1, 1)[:3] != (*kernel.cluster, 1, 1)[:3]:
        way = f"cluster={','.join(map(str, kernel.cluster))}"
        raise ConfigError([Problem("cluster", "differs from the kernel's (.reqnctapercluster)", asked, way)])
    x, y, z = (*(asked or kernel.cluster), 1, 1, 1)[:3]
    check = Problems()
    if min(x, y, z) < 1 or x * y * z > vm.MOST_RANKS:
        check.add("cluster", f"holds more than {vm.MOST_RANKS} blocks, or none", value=(x, y, z))
        check.done()
    if any(blocks % of_cluster for blocks, of_cluster in zip(grid, (x, y, z), strict=True)):
        check.add("grid", f"is no multiple of the blocks of a cluster, {(x, y, z)}", value=grid)
    check.done()
    return x, y, z


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
    # room for the addresses of all lanes in each row
    addresses = np.zeros(rows * vm.LANES, np.uint64)
    return vm.Trace(sample, np.zeros(rows, np.int32), np.zeros(rows, np.uint32), access, owner, addresses, sizes)


class _Execution:
    """Arrays of one launch."""

    def __init__(
        self,
        module: Module,
        kernel: Decoded,
        size: tuple[tuple[int, int, int], tuple[int, int, int], tuple[int, int, int]],
        arguments: Sequence[Argument],
        options: LaunchOptions,
    ) -> None:
        self.module, self.kernel, self.options = module, kernel, options
        self.grid, self.block, self.cluster = size
        self.threads, self.num_blocks = math.prod(self.block), math.prod(self.grid)
        # warps of a block, and blocks of a cluster
        self.warps, self.ranks = -(-self.threads // vm.LANES), math.prod(self.cluster)
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
        parameters, shared, local = (-(-entry // 16) * 16 for entry in sizes)
        arena, start = self.module.device.arena(parameters + self.ranks * (shared + local) + 16)
        arena[start : start + sizes[0]] = self.parameters
        state["ntid"], state["nctaid"], state["cluster_dim"] = self.block, self.grid, self.cluster
        # numbers of operands count the file of registers, in which constants come first
        count, registers = len(kernel.constants), len(kernel.registers)
        # each branch may split a warp, and lanes may loop apart: room for both
        depth = 2 * (int((kernel.rows[:, vm.KIND] == vm.BRANCH).sum()) + vm.LANES)
        warps = self.warps * self.ranks
        values = {"num_threads": self.threads, "num_warps": warps, "num_clusters": self.num_blocks // self.ranks}
        values |= {"block_warps": self.warps, "cluster_size": self.ranks}
        values |= {"num_constants": count, "num_registers": registers, "depth": depth, "limit": self.options.most}
        values |= {"param_at": start, "param_size": sizes[0], "shared_size": sizes[1], "local_size": kernel.local_bytes}
        values |= {"shared_first": start + parameters, "shared_stride": shared, "local_stride": local}
        values |= {"local_first": start + parameters + self.ranks * shared, "watch_pc": -1}
        values |= {"local_trace": _local_trace(start), "is_late": int(self.options.late and not len(self.sample))}
        for name, value in values.items():
            state[name] = value
        self._watch(state)
        file = np.zeros(vm.LANES * (count + registers * warps), np.uint64)
        # constants are registers that no lane changes
        file[: vm.LANES * count] = np.repeat(kernel.constants, vm.LANES)
        # the recording grows while it runs: how many rows there will be is not known
        rows = _FIRST_ROWS if len(self.sample) else 0
        counts = np.zeros((2, len(kernel.rows)), np.int64)
        copies = np.zeros((vm.COPIES, vm.COPY_WORDS), np.int64)
        of_warps, arrivals = (
            np.zeros((warps, vm.WARP_FIELDS), np.int64),
            np.zeros(self.ranks * vm.NAMED_BARRIERS, np.int64),
        )
        return _Arrays(
            state,
            vm.EncodedProgram(kernel.rows, kernel.operands, file),
            vm.Memory(arena, *_wider(arena), self.module.device.allocations),
            vm.Queue(np.zeros((warps, depth, 3), np.int64), of_warps, arrivals, counts[0], counts[1], copies),
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
            # axis x runs fastest, as threads and blocks are numbered on hardware
            numbers.append(x + size[0] * (y + size[1] * z))
        state["watch_pc"], state["watch_skip"] = self.kernel.lines.index(watch.line), watch.visit
        state["watch_block"], state["watch_thread"] = numbers

    def number(self, name: str) -> int:
        """A number of the state."""
        return int(self.launch.state[name][0])

    def finish(self) -> LaunchRun:
        """Run to the end, or to what is watched. Raises LaunchError."""
        # matrices A and B, and behind A four accumulators of each lane of `mma`, or a row's of `wgmma`
        a, b = np.zeros(vm.TILE + 256), np.zeros(vm.TILE)
        # the recording is full: it is enlarged, and the run goes on where it stopped
        while (status := int(run(*self.launch, vm.LANES, a, b))) == vm.FULL:
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
        warp += self.number("rank") * self.warps
        # the file is [constants, then registers of warp 0, 1, ...][lanes]
        rows = self.launch.program.file.reshape(-1, vm.LANES)[count + warp * len(self.kernel.registers) :, lane]
        return {name: int(rows[number]) for name, number in self.kernel.registers.items()}

    def _failure(self, status: int) -> str:
        """A sentence with line, block, thread and address."""
        row = max(self.number("pc"), 0)
        block = _coordinates(self.number("block"), self.grid)
        thread = _coordinates(self.number("fault_thread"), self.block)
        address, arrivals, size = (self.number(f"fault_{name}") for name in ("address", "arrivals", "bytes"))
        failure = Failure(status, thread, block, address, arrivals, size, self.options.most, self.ranks)
        opcode = self.kernel.code.opcodes[row]
        where = f"{self.module.path}, line {self.kernel.lines[row]}, {opcode} of {self.kernel.function.name}"
        return f"{where}: {failure.sentence}"

    def _trace(self) -> WarpTrace:
        """The recording, warp after warp."""
        launch, rows, accesses = self.launch.trace, self.number("rows"), self.number("accesses")
        owner = launch.owner[:rows]
        # warps take turns in the recording; within one the order is that of execution
        order = np.argsort(owner, kind="stable")
        count = len(self.sample) * self.warps
        # an owner is sampled block x warps + warp, so that sorting by it leaves warps of a block together
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
            self.ranks,
        )


def _wider(arena: NDArray[np.uint8]) -> tuple[NDArray[np.uint16], NDArray[np.uint32], NDArray[np.uint64]]:
    """The same bytes as words of 16, 32 and 64 bits."""
    return arena.view(np.uint16), arena.view(np.uint32), arena.view(np.uint64)


def _local_trace(start: int) -> int:
    """Address at which local memory of all threads would lie in global memory."""
    # a whole MiB above what is allocated: no sector of local memory is also one of an array
    return vm.GLOBAL_BASE + (-(-start // (1 << 20)) + 1) * (1 << 20)


def _coordinates(number: int, size: tuple[int, int, int]) -> tuple[int, int, int]:
    # x fastest
    return number % size[0], number // size[0] % size[1], number // (size[0] * size[1])
