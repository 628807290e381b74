"""Linear layers of tensor parallelism whose collectives overlap with their GEMMs, forward and backward.

`ColumnParallelLinear` gathers the tokens before its GEMM, and scatters the sum of their gradients after its backward
one; `RowParallelLinear` does the reverse. Tokens are split among ranks between layers (sequence parallelism). With an
all-to-all, a rank has a block of tokens for each rank before the first layer, and from each after the second (experts).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import gather_gemm as gathering
from . import gemm_reduce as reducing


class _GatherGemm(torch.autograd.Function):
    """Y = gather(X) W, with the gradient of X by the overlapped reduce-scatter, and that of W by another gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, rows: Sequence[int], group: dist.ProcessGroup) -> Tensor:
        """[rows of the rank, K], [K, N] -> [sum of rows, N]."""
        ctx.save_for_backward(x, w)
        ctx.rows, ctx.group = rows, group
        return gathering.gather_gemm(x, w, rows, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Gradients of X and W."""
        (dy,), (x, w) = gradients, ctx.saved_tensors
        dx = reducing.gemm_reduce(dy, w.t().contiguous(), ctx.rows, ctx.group)
        return dx, gathering.collect(x, ctx.rows, ctx.group).t() @ dy, None, None


class _GemmReduce(torch.autograd.Function):
    """Y = scatter(sum X W), with the gradient of X by the overlapped gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, rows: Sequence[int], group: dist.ProcessGroup) -> Tensor:
        """[sum of rows, K], [K, N] -> [rows of the rank, N]."""
        ctx.save_for_backward(x, w)
        ctx.rows, ctx.group = rows, group
        return reducing.gemm_reduce(x, w, rows, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Gradients of X and W."""
        (dy,), (x, w) = gradients, ctx.saved_tensors
        dy = dy.contiguous()
        dx = gathering.gather_gemm(dy, w.t().contiguous(), ctx.rows, ctx.group)
        return dx, x.t() @ gathering.collect(dy, ctx.rows, ctx.group), None, None


class _ParallelLinear(nn.Module):
    """A rank's part of the weights [in, out] of a linear layer, without bias."""

    def __init__(self, in_features: int, out_features: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.weight = nn.Parameter(torch.empty(in_features, out_features))
        nn.init.normal_(self.weight, std=in_features**-0.5)

    def _rows(self, tokens: int) -> list[int]:
        """Tokens of each rank, as a split into parts as even as whole numbers allow."""
        ranks = dist.get_world_size(self.group)
        return [tokens // ranks + (rank < tokens % ranks) for rank in range(ranks)]


class ColumnParallelLinear(_ParallelLinear):
    """[tokens of the rank, in] -> [all tokens, out / ranks]. out_features: of this rank. tokens: of all ranks."""

    def forward(self, x: Tensor, tokens: int) -> Tensor:
        """Gather the tokens and multiply, overlapped."""
        y: Tensor = _GatherGemm.apply(x, self.weight, self._rows(tokens), self.group)
        return y


class RowParallelLinear(_ParallelLinear):
    """[all tokens, in / ranks] -> [tokens of the rank, out]. in_features: of this rank."""

    def forward(self, x: Tensor) -> Tensor:
        """Multiply and scatter the sum, overlapped."""
        y: Tensor = _GemmReduce.apply(x, self.weight, self._rows(len(x)), self.group)
        return y
