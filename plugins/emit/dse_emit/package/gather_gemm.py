"""An all-gather (or all-to-all) overlapped with the GEMM that consumes it: Y = gather(X) W.

Ranks hold X [rows of the rank, K] and W [K, N]; Y is [sum of rows, N]. `SCHEDULE` is the order of work of a rank:

    ("send", piece, distances)   send this piece of the own shard to the ranks so many places on, and receive theirs
    ("gemm", piece, distances)   one GEMM on this piece of the shards of the ranks so many places before; 0: the own

A piece is a part of a shard's rows, or (`CUT = "depth"`) of its columns, so that GEMMs add up; `ALL` is the whole
shard. A GEMM waits for the pieces that it reads, and for nothing else.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .check import compare, initialise
from .transport import bounds, gather_rows, transport

ALL = -1
# schedule
PATTERN = "all_gather"
RANKS = 4
CUT = "rows"
PIECES = 2
TRANSPORT = "messages"
SCHEDULE: tuple[tuple[str, int, tuple[int, ...]], ...] = (
    ("gemm", ALL, (0,)),
    ("send", 0, (1, 2, 3)),
    ("gemm", 0, (1, 2, 3)),
    ("send", 1, (1, 2, 3)),
    ("gemm", 1, (1, 2, 3)),
)
# end of schedule


def gather_gemm(x: Tensor, w: Tensor, rows: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Y = gather(X) W [sum(rows), N], overlapped.

    x: [rows[rank], K]; of an all-to-all [ranks * rows[rank], K], a block for each rank. rows: of the shard, or block,
    of each rank. Raises ValueError for another number of ranks than the schedule is for.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    if ranks != RANKS or len(rows) != RANKS:
        raise ValueError(f"the schedule is for {RANKS} ranks, the group has {ranks}, and rows {len(rows)}")
    moving = transport(TRANSPORT, group, x, RANKS * max(rows) * x.shape[1] * (PIECES + 1))
    starts = [sum(rows[:source]) for source in range(ranks)]
    blocks = x.split(rows[rank]) if PATTERN == "all_to_all" else [x] * ranks
    y = x.new_empty((sum(rows), w.shape[1]))
    sent_at: dict[tuple[int, int], int] = {}  # piece and source -> step
    for order, (what, piece, distances) in enumerate(SCHEDULE):
        sources = [(rank - distance) % ranks for distance in distances]
        if what == "send":
            outgoing = {
                (rank + distance) % ranks: part(blocks[(rank + distance) % ranks], piece) for distance in distances
            }
            incoming = {source: torch.Size(shape(rows[source], x.shape[1], piece)) for source in sources}
            moving.post(order, outgoing, incoming)
            sent_at.update({(piece, source): order for source in sources})
            continue
        operands = [
            part(blocks[rank], piece) if source == rank else moving.wait(sent_at[piece, source], source)
            for source in sources
        ]
        weights = w[slice(*bounds(w.shape[0], piece, PIECES))] if CUT == "depth" else w
        product = torch.mm(operands[0] if len(operands) == 1 else torch.cat(operands), weights)
        for source, block in zip(sources, product.split([len(operand) for operand in operands]), strict=True):
            low, high = bounds(rows[source], piece, PIECES) if CUT == "rows" else (0, rows[source])
            target = y[starts[source] + low : starts[source] + high]
            target.copy_(block) if CUT == "rows" or piece <= 0 else target.add_(block)
    moving.finish()
    return y


def part(shard: Tensor, piece: int) -> Tensor:
    """A piece of a shard [rows, K]."""
    low, high = bounds(shard.shape[CUT == "depth"], piece, PIECES)
    return shard[:, low:high] if CUT == "depth" else shard[low:high]


def shape(rows: int, depth: int, piece: int) -> tuple[int, int]:
    """Rows and columns of a piece of a shard."""
    low, high = bounds(depth if CUT == "depth" else rows, piece, PIECES)
    return (rows, high - low) if CUT == "depth" else (high - low, depth)


def serial(x: Tensor, w: Tensor, rows: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """The same, one after the other."""
    return collect(x, rows, group) @ w


def collect(x: Tensor, rows: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """What the GEMM reads [sum(rows), K], by the library's collective."""
    if PATTERN == "all_gather":
        return gather_rows(x, rows, group)
    received = x.new_empty((sum(rows), x.shape[1]))
    height = rows[dist.get_rank(group)]
    dist.all_to_all_single(received, x.contiguous(), list(rows), [height] * len(rows), group=group)
    return received


def main() -> None:
    """Check the operator against serial execution, and time both: torchrun --nproc-per-node=<ranks> -m <package>.…"""
    parser = argparse.ArgumentParser(description=main.__doc__)
    sizes = initialise(parser, RANKS, TRANSPORT)
    group = dist.group.WORLD
    assert group is not None
    rows = [sizes.m // RANKS + (rank < sizes.m % RANKS) for rank in range(RANKS)]
    height = rows[dist.get_rank()] * (RANKS if PATTERN == "all_to_all" else 1)
    x, w = sizes.tensor(height, sizes.k), sizes.tensor(sizes.k, sizes.n)
    compare(sizes, gather_gemm, serial, x, w, rows, group)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
