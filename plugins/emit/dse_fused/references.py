"""The fused operators as PyTorch runs them in bulk: all of the result, then all of the collective."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def embedding_all_to_all(tables: Tensor, indices: Tensor, group: dist.ProcessGroup) -> Tensor:
    """As `dse_fused.embedding_all_to_all`."""
    bags = torch.nn.functional.embedding_bag
    pooled = [bags(indices[:, place], table, mode="sum") for place, table in enumerate(tables)]
    return _exchange(torch.stack(pooled, dim=1), group)


def gemm_all_to_all(a: Tensor, b: Tensor, group: dist.ProcessGroup) -> Tensor:
    """As `dse_fused.gemm_all_to_all`."""
    return _exchange(a @ b, group)


def gemm_reduce_scatter(a: Tensor, b: Tensor, group: dist.ProcessGroup) -> Tensor:
    """As `dse_fused.gemm_reduce_scatter`; gloo has no reduce-scatter, so parts are exchanged and added."""
    return _exchange(a @ b, group).sum(dim=0)


def gemv_all_reduce(w: Tensor, x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """As `dse_fused.gemv_all_reduce`."""
    out: Tensor = w @ x
    dist.all_reduce(out, group=group)
    return out


def _exchange(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Rows [ranks * rows, ...] to their ranks; those of this one by sender [ranks, rows, ...]."""
    out = torch.empty_like(whole := whole.contiguous())
    dist.all_to_all_single(out, whole, group=group)
    return out.unflatten(0, (dist.get_world_size(group), -1))
