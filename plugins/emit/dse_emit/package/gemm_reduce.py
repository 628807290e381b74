"""A GEMM overlapped with the reduce-scatter (or all-reduce, all-to-all) of its product: Y = scatter(sum of X W).

Ranks hold X [rows of all ranks, K] and W [K, N]; Y is [rows of the rank, N], after an all-reduce [rows of all, N], and
after an all-to-all, which sums nothing, [ranks * rows of the rank, N], a block from each rank.
`SCHEDULE` is the order of work of a rank:

    ("gemm", piece, distances)   one GEMM on this piece of the shards of the ranks so many places before; 0: the own
    ("send", piece, distances)   send each its piece, and receive the own shard's from the ranks so many places on
    ("add", piece, distances)    add what came, or put it in its place

A piece is a part of a shard's rows, or (`CUT = "columns"`) of its columns; `ALL` is the whole shard.
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
PATTERN = "reduce_scatter"
RANKS = 4
CUT = "rows"
PIECES = 2
TRANSPORT = "messages"
SCHEDULE: tuple[tuple[str, int, tuple[int, ...]], ...] = (
    ("gemm", 0, (1, 2, 3)),
    ("send", 0, (1, 2, 3)),
    ("gemm", 1, (1, 2, 3)),
    ("send", 1, (1, 2, 3)),
    ("gemm", ALL, (0,)),
    ("add", 0, (1, 2, 3)),
    ("add", 1, (1, 2, 3)),
)
# end of schedule


def gemm_reduce(x: Tensor, w: Tensor, rows: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Y = scatter(sum X W) [rows[rank], N], all rows of an all-reduce, or the blocks of an all-to-all, overlapped.

    x: [sum(rows), K]. rows: of the shard of each rank. Sums are of the numbers of X and in its type. Raises ValueError
    for another number of ranks than the schedule is for.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    if ranks != RANKS or len(rows) != RANKS:
        raise ValueError(f"the schedule is for {RANKS} ranks, the group has {ranks}, and rows {len(rows)}")
    moving = transport(TRANSPORT, group, x, RANKS * max(rows) * w.shape[1] * (PIECES + 1))
    y = x.new_zeros((rows[rank] * (ranks if PATTERN == "all_to_all" else 1), w.shape[1]))
    blocks = y.split(rows[rank]) if PATTERN == "all_to_all" else [y] * ranks  # where what comes from a rank is added
    products_of: dict[tuple[int, int], Tensor] = {}  # piece and rank -> its product
    sent_at: dict[tuple[int, int], int] = {}  # piece and source -> step
    for order, (what, piece, distances) in enumerate(SCHEDULE):
        targets = [(rank - distance) % ranks for distance in distances]
        sources = [(rank + distance) % ranks for distance in distances]
        if what == "gemm":
            products = gemm(x, w, rows, piece, targets)
            products_of.update({(piece, target): block for target, block in zip(targets, products, strict=True)})
            if rank in targets:
                part(blocks[rank], piece).add_(products_of.pop((piece, rank)))
        elif what == "send":
            outgoing = {target: products_of.pop((piece, target)) for target in targets}
            incoming = {source: part(blocks[source], piece).shape for source in sources}
            moving.post(order, outgoing, incoming)
            sent_at.update({(piece, source): order for source in sources})
        else:
            for source in sources:
                part(blocks[source], piece).add_(moving.wait(sent_at[piece, source], source))
    moving.finish()
    return gather_rows(y, rows, group) if PATTERN == "all_reduce" else y


def gemm(x: Tensor, w: Tensor, rows: Sequence[int], piece: int, targets: Sequence[int]) -> list[Tensor]:
    """Products of a piece of the shards of some ranks, by one GEMM."""
    starts, weights = [sum(rows[:target]) for target in targets], w
    parts = [x[start : start + rows[target]] for start, target in zip(starts, targets, strict=True)]
    if CUT == "columns":
        weights = w[:, slice(*bounds(w.shape[1], piece, PIECES))]
    else:
        parts = [part(shard, piece) for shard in parts]
    product = torch.mm(parts[0] if len(parts) == 1 else torch.cat(parts), weights)
    return list(product.split([len(shard) for shard in parts]))


def part(shard: Tensor, piece: int) -> Tensor:
    """A piece of a shard [rows, columns], as a view."""
    low, high = bounds(shard.shape[CUT == "columns"], piece, PIECES)
    return shard[:, low:high] if CUT == "columns" else shard[low:high]


def serial(x: Tensor, w: Tensor, rows: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """The same, one after the other, by the library's all-reduce, which does more than a reduce-scatter."""
    product, rank = x @ w, dist.get_rank(group)
    if PATTERN == "all_to_all":
        received = x.new_empty((len(rows) * rows[rank], w.shape[1]))
        dist.all_to_all_single(received, product, [rows[rank]] * len(rows), list(rows), group=group)
        return received
    dist.all_reduce(product, group=group)
    return product if PATTERN == "all_reduce" else product.split(list(rows))[rank]


def main() -> None:
    """Check the operator against serial execution, and time both."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    sizes = initialise(parser, RANKS, TRANSPORT)
    group = dist.group.WORLD
    assert group is not None
    rows = [sizes.m // RANKS + (rank < sizes.m % RANKS) for rank in range(RANKS)]
    x, w = sizes.tensor(sizes.m, sizes.k), sizes.tensor(sizes.k, sizes.n)
    compare(sizes, gemm_reduce, serial, x, w, rows, group)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
