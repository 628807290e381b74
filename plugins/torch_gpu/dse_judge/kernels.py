"""Work that a GEMM is measured beside: our kernels in CUDA C, copy engines, copies of the driver, kernels of torch.

Buffers are used in turn, so that no call finds its operands in the L2 cache.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from dse_judge.timing import DEVICE, Call, in_turn

Buffers = tuple[torch.Tensor, torch.Tensor]

FLUSHED_BYTES = 256 << 20  # of buffers used in turn: several times the L2 cache
BUFFER_BYTES = 512 << 20  # that a background copies again and again
THREADS = 512
HELD_US = 500  # for which SMs are taken by one call
WHOLE_SM_BYTES = 120 << 10  # of shared memory: two blocks that hold as much do not fit on one SM, as NCCL's do not
_MAX_SHARED_MEMORY = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES

SOURCE = """
#define UNITS 4
extern "C" __global__ void __launch_bounds__(512) copy_by_sms(const uint4* a, uint4* c, int n, int rounds) {
  int step = gridDim.x * blockDim.x, first = blockIdx.x * blockDim.x + threadIdx.x;
  for (int r = 0; r < rounds; ++r)
    for (int i = first; i < n; i += UNITS * step) {
      uint4 held[UNITS];
      #pragma unroll
      for (int u = 0; u < UNITS; ++u) if (i + u * step < n) held[u] = a[i + u * step];
      #pragma unroll
      for (int u = 0; u < UNITS; ++u) if (i + u * step < n) c[i + u * step] = held[u];
    }
}
extern "C" __global__ void __launch_bounds__(512) add_by_sms(const uint4* a, uint4* c, int n, int rounds) {
  int step = gridDim.x * blockDim.x, first = blockIdx.x * blockDim.x + threadIdx.x;
  for (int r = 0; r < rounds; ++r)
    for (int i = first; i < n; i += UNITS * step) {
      uint4 x[UNITS], y[UNITS];
      #pragma unroll
      for (int u = 0; u < UNITS; ++u) if (i + u * step < n) { x[u] = a[i + u * step]; y[u] = c[i + u * step]; }
      #pragma unroll
      for (int u = 0; u < UNITS; ++u) if (i + u * step < n)
        c[i + u * step] = make_uint4(x[u].x + y[u].x, x[u].y + y[u].y, x[u].z + y[u].z, x[u].w + y[u].w);
    }
}
extern "C" __global__ void __launch_bounds__(512) hold_sms(const uint4* a, uint4* c, int microseconds, int rounds) {
  unsigned long long until, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(until));
  until += 1000ull * microseconds * rounds;
  do { __nanosleep(200); asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); } while (now < until);
}
"""


@dataclass(frozen=True)
class Kernel:
    """A kernel of `SOURCE`, compiled once by NVRTC. whole: a block has an SM of its own, wherever it lands."""

    name: str
    whole: bool = True

    def launch(self, sms: int, size: int, rounds: int, buffers: Buffers) -> None:
        """Queue the kernel on the current stream, one block for each SM."""
        stream, shared = torch.cuda.current_stream(), WHOLE_SM_BYTES if self.whole else 0
        _compile(self.name, self.whole)((sms, 1, 1), (THREADS, 1, 1), [*buffers, size, rounds], shared, stream)


@cache
def _compile(name: str, whole: bool) -> Any:
    kernel = torch.cuda._compile_kernel(SOURCE, name)
    # above 48 KiB a kernel needs permission
    if whole and hasattr(kernel, "set_shared_memory_config"):
        kernel.set_shared_memory_config(WHOLE_SM_BYTES)
    elif whole:
        _allow_shared_memory(kernel)
    return kernel


def _allow_shared_memory(kernel: Any) -> None:
    """Do what `set_shared_memory_config` does, for versions of torch that lack it. Raises RuntimeError."""
    status = ctypes.CDLL("libcuda.so.1").cuFuncSetAttribute(kernel.func, _MAX_SHARED_MEMORY, WHOLE_SM_BYTES)
    if status:
        raise RuntimeError(f"CUDA error {status}: no {WHOLE_SM_BYTES} bytes of shared memory for a block")


@dataclass(frozen=True)
class Background:
    """Work that takes from a GEMM what the GEMM needs. bytes_read, bytes_written: of HBM, of one call.

    lasting: a single launch that lasts for as many calls, where kernels are ours.
    """

    name: str
    sms: int
    call: Call
    bytes_read: int = 0
    bytes_written: int = 0
    lasting: Callable[[float], Call] | None = None


def by_sms(name: str, sms: int, num_bytes: int = 64 << 20, *, whole: bool = True) -> Background:
    """Copies or sums of some bytes by blocks of a number of SMs, over buffers far larger than the L2 cache."""
    kernel = Kernel(name, whole)
    source, target = (torch.zeros(BUFFER_BYTES, dtype=torch.uint8, device=DEVICE) for _ in range(2))
    places = [slice(start, start + num_bytes) for start in range(0, BUFFER_BYTES - num_bytes + 1, num_bytes)]
    pairs = [(source[place], target[place]) for place in places]
    calls = [partial(kernel.launch, sms, num_bytes // 16, 1, pair) for pair in pairs]

    def lasting(number: float) -> Call:
        # whole buffers as often as needed, so that one launch lasts as long as `number` calls
        rounds = math.ceil(number * num_bytes / BUFFER_BYTES)
        # whole pages of 4 KiB, in units of 16 bytes
        size = int(number * num_bytes / rounds) // 4096 * 256
        return partial(kernel.launch, sms, size, rounds, (source, target))

    # a sum reads its target too
    reads = num_bytes * (2 if name == "add_by_sms" else 1)
    return Background(name if whole else f"{name}_shared", sms, in_turn(calls), reads, num_bytes, lasting)


def holding(sms: int, microseconds: int = HELD_US) -> Background:
    """SMs that are taken for a time and move nothing."""
    empty = torch.zeros(16, dtype=torch.uint8, device=DEVICE)

    def lasting(number: float) -> Call:
        return partial(Kernel("hold_sms").launch, sms, int(number * microseconds), 1, (empty, empty))

    return Background("hold_sms", sms, lasting(1.0), lasting=lasting)


def by_engine(way: str, num_bytes: int = 32 << 20) -> Background:
    """Copies by copy engines between this GPU and the host's pinned memory: `to_gpu` or `to_host`."""
    pairs = []
    for _ in range(copies_of(num_bytes)):
        host = torch.empty(num_bytes, dtype=torch.uint8).pin_memory()
        device = torch.zeros(num_bytes, dtype=torch.uint8, device=DEVICE)
        pairs.append((device, host) if way == "to_gpu" else (host, device))
    calls = [partial(target.copy_, source, non_blocking=True) for target, source in pairs]
    # of HBM: the other end is host memory
    read, write = (0, num_bytes) if way == "to_gpu" else (num_bytes, 0)
    return Background(f"engine_{way}", 0, in_turn(calls), read, write)


def by_driver(num_bytes: int = 64 << 20) -> Background:
    """Copies inside the GPU's memory as the driver makes them."""
    pairs = [_two(num_bytes) for _ in range(copies_of(2 * num_bytes))]
    calls = [partial(target.copy_, source) for target, source in pairs]
    return Background("driver_copy", 0, in_turn(calls), num_bytes, num_bytes)


def _two(num_bytes: int) -> list[torch.Tensor]:
    return [torch.zeros(num_bytes, dtype=torch.uint8, device=DEVICE) for _ in range(2)]


def streaming(num_bytes: int = 64 << 20) -> Background:
    """An element-wise kernel over all SMs: one read and one write."""
    pairs = [[matrix(1, num_bytes // 2) for _ in range(2)] for _ in range(copies_of(2 * num_bytes))]
    calls = [partial(torch.mul, source, 1.5, out=target) for target, source in pairs]
    return Background("elementwise", 0, in_turn(calls), num_bytes, num_bytes)


def backgrounds() -> list[Callable[[], Background]]:
    """Everything that a GEMM is measured beside."""
    copies = [partial(by_sms, "copy_by_sms", sms) for sms in (1, 2, 4, 8, 16, 24, 32, 64)]
    sums = [partial(by_sms, "add_by_sms", sms) for sms in (4, 8, 16, 32)]
    holds = [partial(holding, sms) for sms in (4, 8, 16, 32, 64)]
    engines = [partial(by_engine, way) for way in ("to_gpu", "to_host")]
    shared = [partial(by_sms, "copy_by_sms", sms, whole=False) for sms in (8, 16, 32)]
    return [*copies, *sums, *holds, *engines, by_driver, streaming, *shared]


def copies_of(num_bytes: float) -> int:
    """Count the sets of buffers that are used in turn."""
    return max(2, min(12, math.ceil(FLUSHED_BYTES / max(1.0, num_bytes))))


def matrix(rows: int, cols: int, kind: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Random values: zeros would draw less power and run faster."""
    return torch.randn(rows, cols, device=DEVICE).to(kind)
