"""Triton kernels that compute slices of a result and store each where it is needed.

Units of work are pairs of a rank and one of its slices; workgroups take them in turn. A kernel is given the addresses
of the ranks' inboxes, in which the part of sender s begins at s * (elements of a part).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _wide(value):
    """A whole number in 64 bits, whether or not it is known when the kernel is compiled."""
    return value + tl.full((), 0, tl.int64)


@triton.jit
def _destination(unit, slices, rank, ranks, remote_first: tl.constexpr):
    """Rank that a unit is for: the next ones first and the own last, or the own first."""
    first = 1 if remote_first else 0
    # each rank begins with another one, so that they do not all store into the same memory at once
    return (rank + first + unit // slices) % ranks


@triton.jit
def _slice_rows(unit, slices, rows):
    """First and last row, exclusive, of the slice of a unit, of `rows` for each rank."""
    size = (rows + slices - 1) // slices
    low = (unit % slices) * size
    return low, tl.minimum(low + size, rows)


@triton.jit
def _signal(masks, flag_addresses, target, unit, slices, rank, ranks, call, phase: tl.constexpr):
    """Note that a slice is stored; the workgroup that stores a rank's last one raises this rank's flag there."""
    tl.debug_barrier()  # all threads of the workgroup have stored
    one = tl.full((), 1, tl.int64)
    bit = one << _wide(unit % slices)
    # a bit for each slice
    full = (one << (slices - 1)) * 2 - 1
    # acquire and release: whoever sets the last bit sees what the workgroups of the other bits stored
    before = tl.atomic_or(masks + target, bit, sem="acq_rel", scope="gpu")
    if (before | bit) == full:
        # cleared for the next phase of the call, which uses the same masks
        tl.atomic_xchg(masks + target, full * 0, sem="relaxed", scope="gpu")
        flags = tl.load(flag_addresses + target).to(tl.pointer_type(tl.int32))
        # release at the scope of the system: the peer that reads the flag sees the whole part
        tl.atomic_xchg(flags + phase * ranks + rank, call, sem="release", scope="sys")


@triton.jit
def _await(flags, sender, ranks, call, phase: tl.constexpr):
    """Wait until a sender's flag has reached this call."""
    # an atomic read: a plain load could be served by a cache, or be moved out of the loop
    while tl.atomic_add(flags + phase * ranks + sender, 0, sem="acquire", scope="sys") < call:
        pass


@triton.jit
def embedding_put(
    tables, indices, addresses, flag_addresses, masks, rank, ranks, call, slices,
    samples, num_tables, num_rows, dim, pooling,
    remote_first: tl.constexpr, dtype: tl.constexpr, rows_block: tl.constexpr, dim_block: tl.constexpr,
):  # fmt: skip
    """Sums of pooled embeddings of all samples, [samples of a rank, tables, dim] for each rank.

    tables [num_tables, num_rows, dim]; indices [ranks * samples, num_tables, pooling].
    """
    # a row is a sample and one of its tables, in the order of the inbox
    rows = samples * num_tables
    for unit in range(tl.program_id(0), ranks * slices, tl.num_programs(0)):
        target = _destination(unit, slices, rank, ranks, remote_first)
        low, high = _slice_rows(unit, slices, rows)
        inbox = tl.load(addresses + target).to(tl.pointer_type(dtype)) + _wide(rank) * rows * dim
        cols = tl.arange(0, dim_block)
        for start in range(low, high, rows_block):
            row = start + tl.arange(0, rows_block)
            valid = row < high
            total = tl.zeros((rows_block, dim_block), tl.float32)
            for place in range(pooling):
                index = tl.load(indices + (target * rows + row) * pooling + place, mask=valid, other=0)
                source = ((row % num_tables) * num_rows + index) * dim
                inside = valid[:, None] & (cols < dim)[None, :]
                total += tl.load(tables + source[:, None] + cols[None, :], mask=inside, other=0.0).to(tl.float32)
            inside = valid[:, None] & (cols < dim)[None, :]
            tl.store(inbox + row[:, None] * dim + cols[None, :], total.to(dtype), mask=inside)
        _signal(masks, flag_addresses, target, unit, slices, rank, ranks, call, 0)


@triton.jit
def gemm_put(
    a, b, addresses, flag_addresses, masks, rank, ranks, call, slices, rows, n, k,
    remote_first: tl.constexpr, dtype: tl.constexpr, factor: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """A B, [rows, n] for each rank, summed in fp32. a [ranks * rows, k]; b [k, n]. factor: type of the factors."""
    for unit in range(tl.program_id(0), ranks * slices, tl.num_programs(0)):
        target = _destination(unit, slices, rank, ranks, remote_first)
        low, high = _slice_rows(unit, slices, rows)
        inbox = tl.load(addresses + target).to(tl.pointer_type(dtype)) + _wide(rank) * rows * n
        for row_start in range(low, high, block):
            row = row_start + tl.arange(0, block)
            for col_start in range(0, n, block):
                col = col_start + tl.arange(0, block)
                total = tl.zeros((block, block), tl.float32)
                for depth_start in range(0, k, block):
                    depth = depth_start + tl.arange(0, block)
                    left = (row < high)[:, None] & (depth < k)[None, :]
                    right = (depth < k)[:, None] & (col < n)[None, :]
                    x = tl.load(a + (target * rows + row)[:, None] * k + depth[None, :], mask=left, other=0.0)
                    y = tl.load(b + depth[:, None] * n + col[None, :], mask=right, other=0.0)
                    total = tl.dot(x.to(factor), y.to(factor), total, input_precision="ieee")
                inside = (row < high)[:, None] & (col < n)[None, :]
                tl.store(inbox + row[:, None] * n + col[None, :], total.to(dtype), mask=inside)
        _signal(masks, flag_addresses, target, unit, slices, rank, ranks, call, 0)


@triton.jit
def gemv_put(
    w, x, addresses, flag_addresses, masks, rank, ranks, call, slices, rows, m, k,
    remote_first: tl.constexpr, dtype: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """W x, `rows` of it for each rank, the last ranks' beyond m left out. w [m, k]; x [k]."""
    for unit in range(tl.program_id(0), ranks * slices, tl.num_programs(0)):
        target = _destination(unit, slices, rank, ranks, remote_first)
        low, high = _slice_rows(unit, slices, rows)
        inbox = tl.load(addresses + target).to(tl.pointer_type(dtype)) + _wide(rank) * rows
        for start in range(low, high, block):
            row = start + tl.arange(0, block)
            # m need not be a multiple of the ranks
            valid = (row < high) & (target * rows + row < m)
            total = tl.zeros((block,), tl.float32)
            for depth_start in range(0, k, block):
                depth = depth_start + tl.arange(0, block)
                inside = valid[:, None] & (depth < k)[None, :]
                weights = tl.load(w + (target * rows + row)[:, None] * k + depth[None, :], mask=inside, other=0.0)
                values = tl.load(x + depth, mask=depth < k, other=0.0)
                total += tl.sum(weights.to(tl.float32) * values.to(tl.float32)[None, :], axis=1)
            tl.store(inbox + row, total.to(dtype), mask=valid)
        _signal(masks, flag_addresses, target, unit, slices, rank, ranks, call, 0)


@triton.jit
def await_all(flags, ranks, call, phase: tl.constexpr):
    """Wait for all senders."""
    for sender in range(ranks):
        _await(flags, sender, ranks, call, phase)


@triton.jit
def sum_ready(inbox, out, flags, ranks, call, elements, block: tl.constexpr):
    """Sum of the parts [ranks, elements] of all senders in fp32, each added when it is there, in the order of ranks."""
    for start in range(tl.program_id(0) * block, elements, tl.num_programs(0) * block):
        place = start + tl.arange(0, block)
        total = tl.zeros((block,), tl.float32)
        for sender in range(ranks):
            _await(flags, sender, ranks, call, 0)
            part = inbox + _wide(sender) * elements + place
            total += tl.load(part, mask=place < elements, other=0.0).to(tl.float32)
        tl.store(out + place, total.to(out.dtype.element_ty), mask=place < elements)


@triton.jit
def sum_ready_put(
    inbox, addresses, flags, flag_addresses, masks, rank, ranks, call, elements, offset,
    dtype: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """The same, stored in every rank's inbox at `offset` plus this rank's place, by one workgroup for each rank."""
    for unit in range(tl.program_id(0), ranks, tl.num_programs(0)):
        target = (rank + 1 + unit) % ranks
        result = tl.load(addresses + target).to(tl.pointer_type(dtype)) + offset + _wide(rank) * elements
        for start in range(0, elements, block):
            place = start + tl.arange(0, block)
            total = tl.zeros((block,), tl.float32)
            # in the order of ranks: the sum does not depend on which part arrives first
            for sender in range(ranks):
                _await(flags, sender, ranks, call, 0)
                part = inbox + _wide(sender) * elements + place
                total += tl.load(part, mask=place < elements, other=0.0).to(tl.float32)
            tl.store(result + place, total.to(dtype), mask=place < elements)
        # a sum is one slice; phase 1 has flags of its own, as a peer may still be in phase 0
        _signal(masks, flag_addresses, target, 0, 1, rank, ranks, call, 1)
