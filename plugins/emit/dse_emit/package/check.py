"""Sizes, group, check and times of operators that are run by themselves."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # before a group is made: imported later, by Dynamo, its defaults keep the group alive
from torch import Tensor

# sizes
M, N, K = 256, 128, 64
# end of sizes
Operator = Callable[..., Tensor]


@dataclass(frozen=True)
class Sizes:
    """Rows m of all ranks, and columns n and depth k of a rank's GEMM; where tensors are, and their type.

    shared: all ranks are on one GPU. as_json: the outcome is printed as JSON.
    """

    m: int
    n: int
    k: int
    device: torch.device
    dtype: torch.dtype
    shared: bool
    as_json: bool

    def tensor(self, rows: int, cols: int) -> Tensor:
        """Small whole numbers, another draw on each rank, so that sums are exact in any order."""
        return torch.randint(-3, 4, (rows, cols)).to(self.device, self.dtype)


def initialise(parser: argparse.ArgumentParser, ranks: int, *, copies: bool) -> Sizes:
    """Read the sizes, and join the group: NCCL with a GPU for each rank, else gloo. Exits unless there are `ranks`.

    With `--one-gpu` all ranks share a GPU, which NCCL refuses. copies: copy engines move everything.
    """
    for name, value in (("m", M), ("n", N), ("k", K)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--one-gpu", action="store_true", help="let all ranks share one GPU")
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON")
    words = parser.parse_args()
    if int(os.environ.get("WORLD_SIZE", "0")) != ranks:
        raise SystemExit(f"the schedule is for {ranks} ranks: start it by torchrun --nproc-per-node={ranks}")
    if words.one_gpu and not (torch.cuda.is_available() and copies):
        raise SystemExit("--one-gpu needs a GPU, and a schedule without the step send (comm_engine=dma)")
    on_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= ranks and not words.one_gpu
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    if words.one_gpu:
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        device = torch.device("cuda", 0)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpus else "gloo")
    torch.manual_seed(dist.get_rank())
    dtype = torch.bfloat16 if on_gpus else torch.float32
    return Sizes(words.m, words.n, words.k, device, dtype, words.one_gpu, words.json)


def compare(sizes: Sizes, overlapped: Operator, serial: Operator, *arguments: Any, repeats: int = 20) -> None:
    """Print whether both agree, and the median time of each on the slowest rank. Exits with 1 where they differ.

    Ranks that share a GPU have no library for it: what is expected is then computed on the CPU, and not timed.
    """
    staged = [part.cpu() if sizes.shared and isinstance(part, Tensor) else part for part in arguments]
    equal = torch.equal(overlapped(*arguments).to(staged[0].device), serial(*staged))
    before_s = 0.0 if sizes.shared else _median_s(lambda: serial(*arguments), repeats)
    times = torch.tensor([before_s, _median_s(lambda: overlapped(*arguments), repeats), float(not equal)])
    times = times.to(sizes.device) if dist.get_backend() == "nccl" else times
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    before_s, after_s, differs = times.tolist()
    if dist.get_rank() == 0:
        where = "one GPU" if sizes.shared else "GPUs" if sizes.device.type == "cuda" else "CPU"
        outcome = {"equal": not differs, "on": where, "serial_s": before_s, "overlapped_s": after_s}
        print(json.dumps(outcome) if sizes.as_json else _sentence(before_s, after_s, bool(differs)), flush=True)
    if differs:
        raise SystemExit(1)


def _sentence(before_s: float, after_s: float, differs: bool) -> str:
    verdict = "differs from serial execution" if differs else "equal to serial execution"
    before, gain = (f"serial {before_s * 1e6:.1f} us, ", f", {before_s / after_s:.2f}x") if before_s else ("", "")
    return f"{verdict}; {before}overlapped {after_s * 1e6:.1f} us{gain}"


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
