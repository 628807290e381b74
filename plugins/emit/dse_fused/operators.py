"""Fused operators as custom operators of `torch.library`, with fake tensors, gradients, and references in PyTorch.

`group` is the name of a process group (`group.group_name`); every rank calls an operator in the same order.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # before a group is made: imported later, by Dynamo, its defaults keep the group alive
from torch import Tensor

from dse_fused.peers import Inbox, Peers, peers_of

_MOST_SLICES = 62  # bits of a mask
# `tl.dot` takes no smaller tiles
_BLOCK = 16


@dataclass(frozen=True)
class Slices:
    """Parameters of a fused kernel, as those of the simulated one (`conf/schedule/fused_kernels.yaml`).

    num_chunks: slices of a rank's part. remote_first: those for other ranks come first. workgroups: that persist.
    """

    num_chunks: int = 4
    remote_first: bool = True
    workgroups: int = 8

    def __post_init__(self) -> None:
        if not 1 <= self.num_chunks <= _MOST_SLICES:
            raise ValueError(f"num_chunks = {self.num_chunks}: must be 1 to {_MOST_SLICES}, a bit of a mask each")
        if self.workgroups < 1:
            raise ValueError(f"workgroups = {self.workgroups}: must be at least 1")

    @property
    def words(self) -> tuple[int, bool, int]:
        """As the operators of `torch.library` take them."""
        return self.num_chunks, self.remote_first, self.workgroups


def embedding_all_to_all(tables: Tensor, indices: Tensor, group: str, slices: Slices | None = None) -> Tensor:
    """Pooled embeddings of this rank's samples from the tables of all ranks [ranks, samples, tables, dim].

    tables [tables of the rank, rows, dim]; indices, of all ranks' samples, [ranks * samples, tables, pooling].
    """
    out: Tensor = torch.ops.dse.embedding_all_to_all(tables, indices, group, *(slices or Slices()).words)
    return out


def gemm_all_to_all(a: Tensor, b: Tensor, group: str, slices: Slices | None = None) -> Tensor:
    """Rows of A B for this rank, by sender [ranks, rows, n]. a [ranks * rows, k]; b [k, n]."""
    out: Tensor = torch.ops.dse.gemm_all_to_all(a, b, group, *(slices or Slices()).words)
    return out


def gemm_reduce_scatter(a: Tensor, b: Tensor, group: str, slices: Slices | None = None) -> Tensor:
    """This rank's rows of the sum of A B over ranks [rows, n]. a [ranks * rows, k]; b [k, n]."""
    out: Tensor = torch.ops.dse.gemm_reduce_scatter(a, b, group, *(slices or Slices()).words)
    return out


def gemv_all_reduce(w: Tensor, x: Tensor, group: str, slices: Slices | None = None) -> Tensor:
    """Sum of W x over ranks [m], on every rank. w [m, k of the rank]; x [k of the rank]."""
    out: Tensor = torch.ops.dse.gemv_all_reduce(w, x, group, *(slices or Slices()).words)
    return out


@torch.library.custom_op("dse::embedding_all_to_all", mutates_args=())
def _embedding(
    tables: Tensor, indices: Tensor, group: str, num_chunks: int, remote_first: bool, workgroups: int
) -> Tensor:
    call = _Call(group, tables, workgroups)
    (count, rows, dim), samples = tables.shape, _even(indices.shape[0], call.ranks, "indices")
    inbox, masks = call.begin("embedding", call.ranks * samples * count * dim)
    call.launch(
        "embedding_put", tables, indices, inbox.addresses, inbox.flag_addresses, masks, *call.place, num_chunks,
        samples, count, rows, dim, indices.shape[2], remote_first=remote_first, dtype=call.dtype,
        rows_block=_BLOCK, dim_block=_power_of_two(dim),
    )  # fmt: skip
    return call.received(inbox).view(call.ranks, samples, count, dim)


@torch.library.custom_op("dse::gemm_all_to_all", mutates_args=())
def _gemm_all_to_all(a: Tensor, b: Tensor, group: str, num_chunks: int, remote_first: bool, workgroups: int) -> Tensor:
    call = _Call(group, a, workgroups)
    inbox = _put_gemm(call, "gemm", (a, b), num_chunks, remote_first=remote_first)
    return call.received(inbox).view(call.ranks, -1, b.shape[1])


@torch.library.custom_op("dse::gemm_reduce_scatter", mutates_args=())
def _gemm_reduce_scatter(
    a: Tensor, b: Tensor, group: str, num_chunks: int, remote_first: bool, workgroups: int
) -> Tensor:
    call = _Call(group, a, workgroups)
    # an inbox of its own: the calls of each operator are counted apart
    inbox = _put_gemm(call, "gemm_sum", (a, b), num_chunks, remote_first=remote_first)
    out = a.new_empty((a.shape[0] // call.ranks, b.shape[1]))
    # it waits for flags itself, and adds parts in the order of ranks while later ones arrive
    call.launch("sum_ready", inbox.local, out, inbox.flags, call.ranks, call.number, out.numel(), block=256)
    return out


@torch.library.custom_op("dse::gemv_all_reduce", mutates_args=())
def _gemv(w: Tensor, x: Tensor, group: str, num_chunks: int, remote_first: bool, workgroups: int) -> Tensor:
    call = _Call(group, w, workgroups)
    (m, k), part = w.shape, -(-w.shape[0] // call.ranks)
    # first half: partial products by sender; second half: sums by the rank that made them
    inbox, masks = call.begin("gemv", 2 * call.ranks * part)
    call.launch(
        "gemv_put", w, x, inbox.addresses, inbox.flag_addresses, masks, *call.place, num_chunks, part, m, k,
        remote_first=remote_first, dtype=call.dtype, block=_BLOCK,
    )  # fmt: skip
    call.launch(
        "sum_ready_put", inbox.local, inbox.addresses, inbox.flags, inbox.flag_addresses, masks, *call.place,
        part, call.ranks * part, dtype=call.dtype, block=256,
    )  # fmt: skip
    return call.received(inbox, phase=1)[call.ranks * part :][:m].clone()


def _put_gemm(call: _Call, name: str, factors: tuple[Tensor, Tensor], num_chunks: int, *, remote_first: bool) -> Inbox:
    """Start a GEMM whose rows go to their ranks."""
    a, b = factors
    rows, (k, n) = _even(a.shape[0], call.ranks, "a"), b.shape
    inbox, masks = call.begin(name, call.ranks * rows * n)
    call.launch(
        "gemm_put", a, b, inbox.addresses, inbox.flag_addresses, masks, *call.place, num_chunks, rows, n, k,
        remote_first=remote_first, dtype=call.dtype, factor=call.factor, block=_BLOCK,
    )  # fmt: skip
    return inbox


class _Call:
    """A call of an operator: its peers, its number, and how kernels are launched."""

    def __init__(self, group: str, like: Tensor, workgroups: int) -> None:
        if not like.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
            raise ValueError("on a CPU Triton interprets kernels: set TRITON_INTERPRET=1 before dse_fused is imported")
        self._peers: Peers = peers_of(group, like.device)
        self._like, self._workgroups, self.number = like, workgroups, 0
        self.rank, self.ranks = self._peers.rank, self._peers.ranks

    def begin(self, name: str, elements: int) -> tuple[Inbox, Tensor]:
        """The inbox of the call, and masks of finished slices by rank, all clear."""
        inbox, self.number = self._peers.begin(name, elements, self._like.dtype)
        return inbox, torch.zeros(self.ranks, dtype=torch.int64, device=self._like.device)

    @property
    def place(self) -> tuple[Tensor | int, int, int]:
        """Rank, number of ranks and number of the call, as kernels take them."""
        return self.rank, self.ranks, self.number

    @property
    def dtype(self) -> Any:
        """Element type in Triton's words."""
        import triton.language as tl

        return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[self._like.dtype]

    @property
    def factor(self) -> Any:
        """Type of factors: Triton's interpreter takes bits of bf16 for whole numbers when it multiplies matrices."""
        import triton.language as tl

        return self.dtype if self._like.is_cuda else tl.float32

    def launch(self, kernel: str, *words: Any, **constants: Any) -> None:
        """Launch a kernel with the workgroups that persist."""
        from dse_fused import kernels

        # kernels compute addresses of rows from shapes alone
        inputs = [word.contiguous() if isinstance(word, Tensor) else word for word in words]
        getattr(kernels, kernel)[(self._workgroups,)](*inputs, **constants)

    def received(self, inbox: Inbox, phase: int = 0) -> Tensor:
        """A copy of the inbox once all ranks have sent."""
        from dse_fused import kernels

        kernels.await_all[(1,)](inbox.flags, self.ranks, self.number, phase=phase)
        # copied, since the call after the next one stores into the same inbox
        return inbox.local.clone()


def _even(rows: int, ranks: int, name: str) -> int:
    """Rows of a rank. Raises ValueError where ranks do not divide them."""
    if rows % ranks:
        raise ValueError(f"{name} has {rows} rows, which {ranks} ranks do not divide")
    return rows // ranks


def _power_of_two(least: int) -> int:
    # `tl.arange` takes powers of two
    return 1 << max(0, least - 1).bit_length()


def _exchange(grad: Tensor, group: str) -> Tensor:
    """Send part r of [ranks, ...] to rank r; parts received, by sender."""
    out = torch.empty_like(grad := grad.contiguous())
    dist.all_to_all_single(out, grad, group=_group(group))
    return out


def _gather(part: Tensor, group: str) -> Tensor:
    """Parts of all ranks in one tensor, by rank along the first axis."""
    whole = [torch.empty_like(part) for _ in range(dist.get_world_size(_group(group)))]
    dist.all_gather(whole, part.contiguous(), group=_group(group))
    return torch.cat(whole)


def _group(name: str) -> dist.ProcessGroup:
    process_group: dist.ProcessGroup = dist.distributed_c10d._resolve_process_group(name)
    return process_group


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    # the two operands; then the name of the group
    ctx.save_for_backward(*inputs[:2])
    ctx.group = inputs[2]


_NO_GRADIENTS = (None, None, None, None)  # of the group and the slices


@_embedding.register_fake
def _(tables: Tensor, indices: Tensor, group: str, *words: Any) -> Tensor:
    # a fake tensor has the shape that the real one would have, so that `torch.compile` can trace the operator
    ranks = dist.get_world_size(_group(group))
    return tables.new_empty((ranks, indices.shape[0] // ranks, tables.shape[0], tables.shape[2]))


@_gemm_all_to_all.register_fake
def _(a: Tensor, b: Tensor, group: str, *words: Any) -> Tensor:
    ranks = dist.get_world_size(_group(group))
    return a.new_empty((ranks, a.shape[0] // ranks, b.shape[1]))


@_gemm_reduce_scatter.register_fake
def _(a: Tensor, b: Tensor, group: str, *words: Any) -> Tensor:
    return a.new_empty((a.shape[0] // dist.get_world_size(_group(group)), b.shape[1]))


@_gemv.register_fake
def _(w: Tensor, x: Tensor, group: str, *words: Any) -> Tensor:
    return w.new_empty((w.shape[0],))


def _embedding_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    tables, indices = ctx.saved_tensors
    # an all-to-all is undone by one the other way
    of_samples = _exchange(grad, ctx.group).flatten(0, 1)  # [all samples, tables, dim]
    d_tables = torch.zeros_like(tables)
    for place in range(tables.shape[0]):
        # the gradient of a sum is that of each of its rows; a row that several samples read adds them up
        repeated = of_samples[:, place].repeat_interleave(indices.shape[2], dim=0)
        d_tables[place].index_add_(0, indices[:, place].flatten(), repeated)
    return d_tables, None, *_NO_GRADIENTS


def _gemm_backward(ctx: Any, of_rows: Tensor) -> tuple[Any, ...]:
    a, b = ctx.saved_tensors
    return of_rows @ b.t(), a.t() @ of_rows, *_NO_GRADIENTS


def _gemm_all_to_all_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return _gemm_backward(ctx, _exchange(grad, ctx.group).flatten(0, 1))


def _gemm_reduce_scatter_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    # each rank's product is a term of every part: it needs the gradients of all parts
    return _gemm_backward(ctx, _gather(grad, ctx.group))


def _gemv_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """All ranks have the same sum, and the same gradient of it."""
    w, x = ctx.saved_tensors
    return torch.outer(grad, x), w.t() @ grad, *_NO_GRADIENTS


_embedding.register_autograd(_embedding_backward, setup_context=_save)
_gemm_all_to_all.register_autograd(_gemm_all_to_all_backward, setup_context=_save)
_gemm_reduce_scatter.register_autograd(_gemm_reduce_scatter_backward, setup_context=_save)
_gemv.register_autograd(_gemv_backward, setup_context=_save)
