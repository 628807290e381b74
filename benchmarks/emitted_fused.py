"""Fused operators run by Triton's interpreter, a process for each rank, against references and whole computations."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_RANKS = (2, 4, 8)
_OPERATORS = ("embedding_all_to_all", "gemm_all_to_all", "gemm_reduce_scatter", "gemv_all_reduce")
_TOLERANCE = {"float32": 1e-5, "bfloat16": 2.0**-7}  # bf16 rounds products, parts and sums by 2^-9 each


@dataclass(frozen=True)
class FusedCase:
    """An operator and its sizes: rows of a rank (samples, GEMV: of all), columns (dim) and depth (table rows)."""

    operator: str
    dtype: str
    ranks: int
    rows: int
    cols: int
    depth: int
    num_chunks: int
    remote_first: bool
    workgroups: int


def draw(count: int, seed: int, ranks: Sequence[int] = _RANKS) -> list[FusedCase]:
    """Random cases, the same for the same seed."""
    of = random.Random(seed)
    return [
        FusedCase(
            of.choice(_OPERATORS), of.choice(["float32", "float32", "bfloat16"]), of.choice(ranks), of.randint(1, 9),
            of.randint(1, 20), of.randint(1, 20), of.randint(1, 5), of.random() < 0.5, of.randint(1, 6),
        )
        for _ in range(count)
    ]  # fmt: skip


def errors(rank: int, groups: Mapping[int, Any], cases: Sequence[FusedCase]) -> dict[int, bool]:
    """By place of the cases that a rank takes part in: whether results and gradients are within their tolerance."""
    os.environ["TRITON_INTERPRET"] = "1"
    return {
        place: _is_equal(case, place, rank, groups[case.ranks]) for place, case in enumerate(cases) if rank < case.ranks
    }


def _is_equal(case: FusedCase, place: int, rank: int, group: Any) -> bool:
    import torch

    operands = _operands(case, torch.Generator().manual_seed(place))
    weights = torch.randint(-8, 9, _shape(case), generator=torch.Generator().manual_seed(place + 1)) / 4.0
    wanted = _wanted(case, operands, weights, rank)
    # the same with all signs positive bounds what is rounded on the way
    scales = _wanted(case, [[tensor.abs() for tensor in pair] for pair in operands], weights.abs(), rank)
    values = _fused(case, operands[rank], weights, group)
    return all(
        ours.shape == theirs.shape and bool(((ours.float() - theirs).abs() <= _TOLERANCE[case.dtype] * scale).all())
        for ours, theirs, scale in zip(values, [*wanted, wanted[0]], [*scales, scales[0]], strict=True)
    )


def _fused(case: FusedCase, operands: Sequence[Any], weights: Any, group: Any) -> list[Any]:
    """Result and gradients of the fused operator, and the result of the reference."""
    import torch

    import dse_fused
    from dse_fused import references

    dtype = getattr(torch, case.dtype)
    own = [tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in operands]
    inputs = [tensor.requires_grad_() for tensor in own if tensor.is_floating_point()]
    slices = dse_fused.Slices(case.num_chunks, case.remote_first, case.workgroups)
    result = getattr(dse_fused, case.operator)(*own, group.group_name, slices)
    gradients = torch.autograd.grad((result * weights.to(dtype)).sum(), inputs)
    with torch.no_grad():
        in_bulk = getattr(references, case.operator)(*own, group)
    return [result.detach(), *gradients, in_bulk]


def _wanted(case: FusedCase, operands: Sequence[Sequence[Any]], weights: Any, rank: int) -> list[Any]:
    """Result and gradients of a rank, by one process for all ranks."""
    import torch

    inputs = [[tensor.clone().requires_grad_(tensor.is_floating_point()) for tensor in pair] for pair in operands]
    results = _whole(case, inputs)
    # an all-reduce has one result, which all ranks hold
    counted = results[:1] if case.operator == "gemv_all_reduce" else results
    loss = sum((each * weights).sum() for each in counted)
    gradients = torch.autograd.grad(loss, [tensor for tensor in inputs[rank] if tensor.requires_grad])
    return [results[rank].detach(), *gradients]


def _shape(case: FusedCase) -> tuple[int, ...]:
    """Shape of a rank's result."""
    return {
        "embedding_all_to_all": (case.ranks, case.rows, 2, case.cols),
        "gemm_all_to_all": (case.ranks, case.rows, case.cols),
        "gemm_reduce_scatter": (case.rows, case.cols),
        "gemv_all_reduce": (case.rows,),
    }[case.operator]


def _operands(case: FusedCase, generator: Any) -> list[list[Any]]:
    """Two operands of each rank, as multiples of 1/4, which bf16 holds."""
    import torch

    def values(*shape: int) -> Any:
        return torch.randint(-8, 9, shape, generator=generator) / 4.0

    if case.operator == "embedding_all_to_all":
        shape = (case.ranks * case.rows, 2, 3)
        return [
            [values(2, case.depth, case.cols), torch.randint(0, case.depth, shape, generator=generator)]
            for _ in range(case.ranks)
        ]
    if case.operator == "gemv_all_reduce":
        return [[values(case.rows, case.depth), values(case.depth)] for _ in range(case.ranks)]
    rows = case.ranks * case.rows
    return [[values(rows, case.depth), values(case.depth, case.cols)] for _ in range(case.ranks)]


def _whole(case: FusedCase, operands: Sequence[Sequence[Any]]) -> list[Any]:
    """Results of all ranks, by one process."""
    import torch

    if case.operator == "embedding_all_to_all":
        products = [
            torch.stack([table[indices[:, at]].sum(1) for at, table in enumerate(tables)], dim=1)
            for tables, indices in operands
        ]
    else:
        products = [left @ right for left, right in operands]
    if case.operator == "gemv_all_reduce":
        return [sum(products)] * case.ranks
    by_rank = [torch.stack(parts) for parts in zip(*(product.split(case.rows) for product in products), strict=True)]
    return [parts.sum(0) for parts in by_rank] if case.operator == "gemm_reduce_scatter" else by_rank
