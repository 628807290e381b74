"""Fused operators against their references on the ranks that torchrun starts.

    torchrun --nproc-per-node=4 -m dse_fused.check [--one-gpu]

Ranks have a GPU each, share one (`--one-gpu`; then references are computed on the CPU), or are processes of the CPU,
where Triton interprets the kernels (`TRITON_INTERPRET=1`). Prints a line of JSON for each operator; exits with 1 where
one differs.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import dse_fused
from dse_fused import references

_ROWS, _COLS, _DEPTH = 8, 16, 12  # of a rank
_TOLERANCE = 1e-5


def main() -> None:
    """Check all operators."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--one-gpu", action="store_true", help="let all ranks share one GPU")
    shared = parser.parse_args().one_gpu
    device = _join(shared)
    equal = [_is_equal(name, operands, device, shared) for name, operands in _cases(dist.get_world_size()).items()]
    dist.destroy_process_group()
    if not all(equal):
        raise SystemExit(1)


def _join(shared: bool) -> torch.device:
    """Join the group; the device of this rank. Exits where a GPU is asked for that is not there."""
    ranks, rank = int(os.environ.get("WORLD_SIZE", "0")), int(os.environ.get("LOCAL_RANK", "0"))
    if ranks < 2:
        raise SystemExit("start two ranks at least: torchrun --nproc-per-node=4 -m dse_fused.check")
    if shared and not torch.cuda.is_available():
        raise SystemExit("--one-gpu needs a GPU")
    # NCCL refuses two ranks on one GPU
    on_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= ranks and not shared
    device = torch.device("cuda", 0 if shared else rank) if on_gpus or shared else torch.device("cpu")
    if device.type == "cuda":
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = str(int(shared))
        torch.cuda.set_device(device)
    elif os.environ.get("TRITON_INTERPRET") != "1":
        raise SystemExit("on a CPU Triton interprets kernels: set TRITON_INTERPRET=1")
    dist.init_process_group("nccl" if on_gpus else "gloo")
    return device


def _cases(ranks: int) -> dict[str, list[Tensor]]:
    """Operands of this rank by operator, multiples of 1/4."""
    rows = ranks * _ROWS
    # another draw on each rank: a part that goes to the wrong rank is noticed
    torch.manual_seed(dist.get_rank())
    indices = torch.randint(0, _DEPTH, (rows, 2, 3))
    return {
        "embedding_all_to_all": [_values(2, _DEPTH, _COLS), indices],
        "gemv_all_reduce": [_values(_ROWS, _DEPTH), _values(_DEPTH)],
        "gemm_all_to_all": [_values(rows, _DEPTH), _values(_DEPTH, _COLS)],
        "gemm_reduce_scatter": [_values(rows, _DEPTH), _values(_DEPTH, _COLS)],
    }


def _values(*shape: int) -> Tensor:
    # small multiples of 1/4 are exact in fp32, and so are their sums in any order
    return torch.randint(-8, 9, shape) / 4.0


def _is_equal(name: str, operands: list[Tensor], device: torch.device, shared: bool) -> bool:
    """Print the largest difference of an operator from its reference on any rank; whether it is small."""
    group: Any = dist.group.WORLD
    operator, reference = getattr(dse_fused, name), getattr(references, name)
    ours = operator(*(part.to(device) for part in operands), group.group_name, dse_fused.Slices())
    theirs = reference(*(part if shared else part.to(device) for part in operands), group).to(device)
    # relative to the largest value: results near zero would inflate an element-wise ratio
    worst = ((ours - theirs).abs().max() / theirs.abs().max()).reshape(1)
    # gloo reduces tensors of the CPU
    worst = worst.cpu() if dist.get_backend() == "gloo" else worst
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    equal = bool(worst.item() <= _TOLERANCE)
    if dist.get_rank() == 0:
        print(json.dumps({"operator": name, "on": str(device.type), "error": worst.item(), "equal": equal}), flush=True)
    return equal


if __name__ == "__main__":
    main()
