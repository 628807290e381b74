"""Sizes, group, check and times of operators that are run by themselves."""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

# sizes
M, N, K = 256, 128, 64
# end of sizes


@dataclass(frozen=True)
class Sizes:
    """Rows m of all ranks, and columns n and depth k of a rank's GEMM; where tensors are, and their type."""

    m: int
    n: int
    k: int
    device: torch.device
    dtype: torch.dtype

    def tensor(self, rows: int, cols: int) -> Tensor:
        """Small whole numbers, another draw on each rank, so that sums are exact in any order."""
        return torch.randint(-3, 4, (rows, cols)).to(self.device, self.dtype)


def initialise(parser: argparse.ArgumentParser, ranks: int) -> Sizes:
    """Read the sizes, and join the group: NCCL with a GPU for each rank, else gloo. Exits unless there are `ranks`."""
    for name, value in (("m", M), ("n", N), ("k", K)):
        parser.add_argument(f"--{name}", type=int, default=value)
    words = parser.parse_args()
    if int(os.environ.get("WORLD_SIZE", "0")) != ranks:
        raise SystemExit(f"the schedule is for {ranks} ranks: start it by torchrun --nproc-per-node={ranks}")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    on_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= ranks
    device = torch.device("cuda", local) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpus else "gloo")
    torch.manual_seed(dist.get_rank())
    return Sizes(words.m, words.n, words.k, device, torch.bfloat16 if on_gpus else torch.float32)


def compare(overlapped: Callable[[], Tensor], serial: Callable[[], Tensor], repeats: int = 20) -> None:
    """Print whether both agree, and the median time of each on the slowest rank. Exits with 1 where they differ."""
    equal = torch.equal(overlapped(), serial())
    times = torch.tensor([_median_s(serial, repeats), _median_s(overlapped, repeats), float(not equal)])
    times = times.cuda() if torch.cuda.is_available() and dist.get_backend() == "nccl" else times
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    before, after, differs = times.tolist()
    if dist.get_rank() == 0:
        verdict = "differs from serial execution" if differs else "equal to serial execution"
        print(f"{verdict}; serial {before * 1e6:.1f} us, overlapped {after * 1e6:.1f} us, {before / after:.2f}x")
    if differs:
        raise SystemExit(1)


def _median_s(function: Callable[[], Tensor], repeats: int) -> float:
    """Median time [s] of a call, with all ranks starting together."""
    seconds = []
    for _ in range(repeats):
        dist.barrier()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[repeats // 4 :])
