"""Kernels that PyTorch runs on a GPU, timed: GEMMs, copies, both at once, and collectives.

A kernel is warmed up, then timed in rounds; a sample is the mean of as many calls as last `SAMPLE_S`. On a GPU events
of its stream give the times, elsewhere the clock of the host does. Works with builds of torch for CUDA and for ROCm,
and on the CPU, where a stream is a thread.
"""

from __future__ import annotations

import math
import os
import platform
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dse.plugins import safe_imports

Floats = NDArray[np.float64]

PRECISIONS = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
"""Precision -> the name of its type in torch."""
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
SAMPLE_S = 1e-3  # a sample: long against the resolution of events, some 0.5 us
_MOST_CALLS = 1000
_FLUSHED_BYTES = 256 << 20  # of buffers that are used in turn, so that no cache holds the next one
_TIMEOUT_S = 300.0
_WARM_UPS = 3


class Absent(RuntimeError):
    """There is no torch, or no such device, with the way out."""


class OutOfMemory(RuntimeError):
    """The device has no room for what a kernel needs."""


def torch_module() -> Any:
    """The module. Raises Absent."""
    try:
        import torch
    except ImportError as error:
        raise Absent(f"torch cannot be imported ({error}): install overlap-dse-torch[torch]") from None
    return torch


@dataclass(frozen=True)
class Machine:
    """A device that torch runs on. kind: cuda (also of ROCm) or cpu; index: of several."""

    kind: str
    index: int = 0

    @classmethod
    def find(cls, device: str, index: int) -> Machine:
        """The device of a configuration, `gpu` or `cpu`. Raises Absent."""
        torch = torch_module()
        if device == "cpu":
            return cls("cpu")
        # builds for ROCm have their GPUs under `cuda` too
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if index >= count:
            there = f"sees {count} GPUs" if count else "sees no GPU"
            raise Absent(f"torch {torch.__version__} {there}: measure on a machine with one, or simulator.device=cpu")
        return cls("cuda", index)

    @property
    def name(self) -> str:
        """Name of the device."""
        return torch_module().cuda.get_device_name(self.index) if self.kind == "cuda" else _cpu_name()

    @property
    def software(self) -> str:
        """Versions of torch and of what it was built for."""
        version = torch_module().version
        built = f"CUDA {version.cuda}" if version.cuda else f"ROCm {version.hip}" if version.hip else "CPU"
        return f"torch {torch_module().__version__}, {built}{self._driver()}"

    def _driver(self) -> str:
        if self.kind != "cuda":
            return ""
        try:
            words = Path("/proc/driver/nvidia/version").read_text("utf-8").partition("\n")[0].split()
        except OSError:
            return ""
        return ", driver " + next((word for word in words if re.match("[0-9]", word)), "unknown")

    @property
    def count(self) -> int:
        """Number of GPUs; as many processes as a collective may have on a CPU."""
        return torch_module().cuda.device_count() if self.kind == "cuda" else (os.cpu_count() or 1)

    @property
    def device(self) -> str:
        """As torch names it."""
        return f"cuda:{self.index}" if self.kind == "cuda" else "cpu"

    def clock_hz(self) -> float:
        """Clock of the compute units [1/s]; 0 where it is not told."""
        if self.kind != "cuda":
            return 0.0
        try:
            return 1e6 * float(torch_module().cuda.clock_rate(self.index))
        except Exception:  # whatever a missing or foreign management library raises
            return 0.0

    def finish(self) -> None:
        """Wait for all that the device was given."""
        if self.kind == "cuda":
            torch_module().cuda.synchronize(self.index)


def _cpu_name() -> str:
    return f"CPU {platform.machine()}"


@dataclass(frozen=True)
class Gemm:
    """C[m, n] = A[m, k] B[n, k]^T, as a linear layer of m tokens has it. free_sms: SMs that the GEMM leaves free."""

    m: int
    n: int
    k: int
    precision: str
    free_sms: int = 0

    def prepare(self, machine: Machine) -> Callable[[], object]:
        """Allocate matrices, several in turn; return a call that computes one product."""
        torch = torch_module()
        kind = getattr(torch, PRECISIONS[self.precision])
        size = kind.itemsize * (self.m * self.k + self.n * self.k + self.m * self.n)
        sets = []
        for _ in range(_copies(size)):
            # random values: zeros would draw less power and run at a higher clock
            a, b = (torch.randn(rows, self.k, device=machine.device).to(kind) for rows in (self.m, self.n))
            sets.append((a, b, torch.empty(self.m, self.n, device=machine.device, dtype=kind)))
        return _in_turn([partial(torch.matmul, a, b.t(), out=out) for a, b, out in sets])

    @contextmanager
    def restrict_sms(self, machine: Machine) -> Iterator[None]:
        """Leave SMs free while GEMMs are launched. Raises ValueError where torch cannot."""
        # newer versions of torch alone have it
        restrict: Any = getattr(torch_module()._C, "_set_sm_carveout_experimental", None)
        if not self.free_sms:
            yield
            return
        if restrict is None or machine.kind != "cuda":
            raise ValueError(f"{machine.name} with {machine.software} cannot leave SMs free: set kernel.free_sms=0")
        restrict(self.free_sms)
        try:
            yield
        finally:
            restrict(None)


@dataclass(frozen=True)
class Copy:
    """A copy of some bytes. mover: `kernel`, inside the device's memory, or `engine`, by DMA from the host's memory."""

    num_bytes: int
    mover: str = "kernel"

    def prepare(self, machine: Machine) -> Callable[[], object]:
        """Allocate buffers, several in turn; return a call that copies one."""
        torch = torch_module()
        at_host = self.mover == "engine" and machine.kind == "cuda"
        pairs = []
        for _ in range(_copies(2 * self.num_bytes)):
            source = torch.empty(self.num_bytes, dtype=torch.uint8, device="cpu" if at_host else machine.device)
            # pinned: a copy engine cannot read pageable memory by itself
            source = source.pin_memory() if at_host else source.zero_()
            pairs.append((torch.empty(self.num_bytes, dtype=torch.uint8, device=machine.device), source))
        if self.mover == "kernel":  # a kernel of its own: a copy might be given to an engine
            return _in_turn([partial(torch.add, source, 1, out=to) for to, source in pairs])
        return _in_turn([partial(to.copy_, source, non_blocking=True) for to, source in pairs])


def _copies(num_bytes: int) -> int:
    """Number of sets of buffers that are used in turn."""
    # large buffers flush the caches by themselves
    return max(1, min(8, math.ceil(_FLUSHED_BYTES / max(1, num_bytes))))


def _in_turn(calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
    # a counter without an end
    turn = iter(range(1 << 62))

    def call() -> object:
        return calls[next(turn) % len(calls)]()

    return call


class Sampler:
    """Samples of a kernel, taken one by one so that those of several kernels can be interleaved."""

    def __init__(self, machine: Machine, gemm: Gemm | None, copy: Copy | None) -> None:
        """Allocate what the kernel needs. Raises OutOfMemory or ValueError."""
        self._machine, self._gemm = machine, gemm
        with _memory_errors():
            self._calls = [part.prepare(machine) for part in (gemm, copy) if part is not None]
        self._numbers = [1] * len(self._calls)

    def warm_up(self) -> None:
        """Run each part until its number of calls for a sample is known. Raises OutOfMemory or ValueError."""
        with _memory_errors(), self._restriction():
            for place, call in enumerate(self._calls):
                for _ in range(_WARM_UPS):
                    call()
                # after warm-ups, which load kernels and choose algorithms
                spent = self._time([(call, 1)])[0]
                self._numbers[place] = min(_MOST_CALLS, max(1, math.ceil(SAMPLE_S / max(spent, 1e-7))))

    def sample(self) -> tuple[float, ...]:
        """Times [s] of a call: of one part; or of each part alone, of each beside the other, and of one call of both.

        Beside one another both run for as long, so that each has as many calls as fit.
        """
        with _memory_errors(), self._restriction():
            alone = [
                self._time([(call, number)])[0] / number
                for call, number in zip(self._calls, self._numbers, strict=True)
            ]
            if len(alone) == 1:
                return (alone[0],)
            longest = max(seconds * number for seconds, number in zip(alone, self._numbers, strict=True))
            numbers = [max(1, round(longest / seconds)) for seconds in alone]
            together = self._time(list(zip(self._calls, numbers, strict=True)))
            beside = [seconds / number for seconds, number in zip(together, numbers, strict=True)]
            # last: one call of each, from a common start to the end of both
            return (*alone, *beside, max(self._time([(call, 1) for call in self._calls])))

    def _restriction(self) -> Any:
        # copies alone restrict nothing
        return (self._gemm or Gemm(1, 1, 1, "fp32")).restrict_sms(self._machine)

    def _time(self, parts: Sequence[tuple[Callable[[], object], int]]) -> list[float]:
        """Seconds from a common start until each part has ended, each part on a stream of its own."""
        return _time_on_gpu(self._machine, parts) if self._machine.kind == "cuda" else _time_on_cpu(parts)


def _time_on_gpu(machine: Machine, parts: Sequence[tuple[Callable[[], object], int]]) -> list[float]:
    torch = torch_module()
    with torch.cuda.device(machine.index):
        streams = [torch.cuda.Stream() for _ in parts]
        began, ends = torch.cuda.Event(enable_timing=True), [torch.cuda.Event(enable_timing=True) for _ in parts]
        machine.finish()
        main = torch.cuda.current_stream()
        torch.cuda._sleep(100_000)  # cycles, so that all is queued when it begins
        began.record(main)
        for stream in streams:
            stream.wait_event(began)
        most = max(number for _, number in parts)
        for turn in range(most):
            for stream, (call, number) in zip(streams, parts, strict=True):
                # exactly `number` of the turns, spread evenly
                if turn * number // most < (turn + 1) * number // most:
                    with torch.cuda.stream(stream):
                        call()
        for stream, end in zip(streams, ends, strict=True):
            end.record(stream)
        machine.finish()
        # elapsed_time is in ms
        return [1e-3 * began.elapsed_time(end) for end in ends]


def _time_on_cpu(parts: Sequence[tuple[Callable[[], object], int]]) -> list[float]:
    began = time.perf_counter()

    def run(part: tuple[Callable[[], object], int]) -> float:
        call, number = part
        for _ in range(number):
            call()
        # each thread from the common start
        return time.perf_counter() - began

    if len(parts) == 1:
        return [run(parts[0])]
    with ThreadPoolExecutor(len(parts)) as threads:
        return list(threads.map(run, parts))


@contextmanager
def _memory_errors() -> Iterator[None]:
    """Turn torch's errors of memory into OutOfMemory, and give back what it keeps."""
    torch = torch_module()
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        text = str(error).lower()
        # the allocator of CPUs raises a plain RuntimeError
        if not isinstance(error, torch.OutOfMemoryError | MemoryError) and "can't allocate memory" not in text:
            raise
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        first = str(error).partition("\n")[0][:200]
        raise OutOfMemory(f"out of memory on the device: {first or type(error).__name__}") from None


def collective_samples(machine: Machine, kind: str, num_bytes: int, gpus: int, *, samples: int) -> Floats:
    """Times [s] of a collective among processes, a GPU each: of each sample that of the slowest.

    num_bytes: of the larger buffer. Raises ValueError for more GPUs than there are, RuntimeError where a process fails.
    """
    if gpus > machine.count:
        raise ValueError(f"has {gpus} GPUs, and this machine {machine.count}")
    import torch.multiprocessing as processes

    with tempfile.TemporaryDirectory() as folder, safe_imports():
        # CUDA cannot be used in processes that were forked
        queue = processes.get_context("spawn").SimpleQueue()
        collective = _Collective(kind, num_bytes, gpus, machine.kind, samples, f"file://{folder}/meet")
        started = processes.spawn(_rank, (collective, queue), nprocs=gpus, join=False)
        ended, until, times = False, time.monotonic() + _TIMEOUT_S, list[Floats]()
        try:
            while not ended and time.monotonic() < until:
                # raises what a process raised
                ended = started.join(timeout=1.0)
                # a process ends only when its times have left the pipe, which holds 64 KiB
                while not queue.empty():
                    times.append(queue.get())
        except Exception as error:
            raise RuntimeError(f"a process of the collective failed: {str(error).strip().splitlines()[-1]}") from None
        if not ended:
            for process in started.processes:
                # a rank may wait for another one for ever
                process.kill()
            raise RuntimeError(f"the collective did not end within {_TIMEOUT_S:g} s")
        # a collective has ended when its slowest process has
        return np.asarray(np.max(times, axis=0), float)


@dataclass(frozen=True)
class _Collective:
    """A collective, and where its processes find one another: an address of torch.distributed."""

    kind: str
    num_bytes: int
    gpus: int
    device: str
    samples: int
    meet: str

    def calls(self, machine: Machine) -> Mapping[str, Callable[[], object]]:
        """What each process calls, by kind, on buffers of its own."""
        torch = torch_module()
        from torch import distributed

        # numbers of 4 bytes, in as many parts as there are GPUs
        size = max(1, self.num_bytes // 4 // self.gpus)
        buffer = torch.zeros(size * self.gpus, dtype=torch.float32, device=machine.device)
        part, other = buffer[:size].clone(), torch.empty_like(buffer)
        gather = _newest(distributed, "all_gather_single", "all_gather_into_tensor")
        scatter = _newest(distributed, "reduce_scatter_single", "reduce_scatter_tensor")
        return {
            "all_reduce": lambda: distributed.all_reduce(buffer),
            "all_gather": lambda: gather(buffer, part),
            "reduce_scatter": lambda: scatter(part, buffer),
            "all_to_all": lambda: distributed.all_to_all_single(other, buffer),
        }


def _rank(rank: int, collective: _Collective, queue: Any) -> None:
    """One process of a collective: puts its times of each sample into a queue."""
    from torch import distributed

    machine = Machine(collective.device, rank)
    if machine.kind == "cuda":
        torch_module().cuda.set_device(rank)
    group = {"init_method": collective.meet, "rank": rank, "world_size": collective.gpus}
    distributed.init_process_group("nccl" if machine.kind == "cuda" else "gloo", **group)
    parts = [(collective.calls(machine)[collective.kind], 1)]
    times = []
    for _ in range(_WARM_UPS + collective.samples):
        # processes begin each sample together
        distributed.barrier()
        machine.finish()
        times += _time_on_gpu(machine, parts) if machine.kind == "cuda" else _time_on_cpu(parts)
    queue.put(times[_WARM_UPS:])
    distributed.destroy_process_group()


def _newest(module: Any, name: str, former: str) -> Callable[..., object]:
    """A function of a module by its name, or by the one that it had."""
    function: Callable[..., object] = getattr(module, name, None) or getattr(module, former)
    return function
