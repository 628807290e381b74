"""A GEMM overlapped with the reduce-scatter (or all-reduce, all-to-all) of its product: Y = scatter(sum of X W).

Ranks hold X [rows of all ranks, K] and W [K, N]; Y is [rows of the rank, N], after an all-reduce [rows of all, N], and
after an all-to-all, which sums nothing, [ranks * rows of the rank, N], a block from each rank.
`SCHEDULE` is the order of work of a rank; a step has parts of shards, from a cut to a later one, and of which shards:

    ("gemm", {(0, 1): (1, 2)})   one GEMM on this part of the shards of the ranks 1 and 2 places before; 0: the own
    ("copy", {(0, 1): (1, 2)})   send each its part, by copy engines, and receive the own shard's from the ranks so many
                                 places on
    ("send", ...)                the same by the library
    ("add", {(0, 1): (1, 2)})    add what came, or put it in its place

Shards are cut by rows, or (`CUT = "columns"`) by columns; `CUTS` counts in equal parts, of which the last is the end.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .check import compare, initialise
from .transport import Span, bounds, gather_rows, put_together, transports

# schedule
PATTERN = "reduce_scatter"
RANKS = 4
CUT = "rows"
CUTS = (0, 1, 2)
SCHEDULE: tuple[tuple[str, dict[Span, tuple[int, ...]]], ...] = (
    ("gemm", {(0, 1): (1, 2, 3)}),
    ("send", {(0, 1): (1, 2, 3)}),
    ("gemm", {(1, 2): (1, 2, 3)}),
    ("send", {(1, 2): (1, 2, 3)}),
    ("gemm", {(0, 2): (0,)}),
    ("add", {(0, 1): (1, 2, 3)}),
    ("add", {(1, 2): (1, 2, 3)}),
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
    # every copy has a place of its own for each rank
    largest = x.new_empty((max(rows), w.shape[1]), device="meta")
    most = RANKS * sum(part(largest, span).numel() for what, parts in SCHEDULE if what == "copy" for span in parts)
    moving = transports([what for what, _ in SCHEDULE], group, x, most)
    y = x.new_zeros((rows[rank] * (ranks if PATTERN == "all_to_all" else 1), w.shape[1]))
    blocks = y.split(rows[rank]) if PATTERN == "all_to_all" else [y] * ranks  # where what comes from a rank is added
    made: list[dict[Span, Tensor]] = [{} for _ in rows]  # by target: parts of its product
    sent_at: dict[tuple[Span, int], tuple[str, int]] = {}  # part and source -> how it comes, and by which step
    for order, (what, parts) in enumerate(SCHEDULE):
        cells = [(distance, span) for span, distances in parts.items() for distance in distances]
        if what == "gemm":
            targets = [((rank - distance) % ranks, span) for distance, span in cells]
            for (target, span), product in zip(targets, gemm(x, w, rows, targets), strict=True):
                made[target][span] = product
                if target == rank:
                    part(blocks[rank], span).add_(made[target].pop(span))
        elif what == "add":
            for distance, span in cells:
                source = (rank + distance) % ranks
                way, step = sent_at.pop((span, source))
                part(blocks[source], span).add_(moving[way].wait(step, source))
        else:
            outgoing, incoming = {}, {}
            for distance, span in cells:
                target, source = (rank - distance) % ranks, (rank + distance) % ranks
                edges = functools.partial(bounds, w.shape[1] if CUT == "columns" else rows[target], cuts=CUTS)
                outgoing[target] = put_together(made[target], span, int(CUT == "columns"), edges)
                incoming[source] = part(blocks[source], span).shape
                sent_at[span, source] = what, order
            moving[what].post(order, outgoing, incoming)
    for piece in moving.values():
        piece.finish()
    return gather_rows(y, rows, group) if PATTERN == "all_reduce" else y


def gemm(x: Tensor, w: Tensor, rows: Sequence[int], targets: Sequence[tuple[int, Span]]) -> list[Tensor]:
    """Products of parts of the shards of some ranks, by one GEMM."""
    starts, weights = [sum(rows[:target]) for target, _ in targets], w
    shards = [x[start : start + rows[target]] for start, (target, _) in zip(starts, targets, strict=True)]
    if CUT == "columns":
        weights = w[:, slice(*bounds(w.shape[1], targets[0][1], CUTS))]
    else:
        shards = [part(shard, span) for shard, (_, span) in zip(shards, targets, strict=True)]
    product = torch.mm(shards[0] if len(shards) == 1 else torch.cat(shards), weights)
    return list(product.split([len(shard) for shard in shards]))


def part(shard: Tensor, span: Span) -> Tensor:
    """A part of a shard [rows, columns], as a view."""
    low, high = bounds(shard.shape[CUT == "columns"], span, CUTS)
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
    sizes = initialise(parser, RANKS, copies=all(what != "send" for what, _ in SCHEDULE))
    group = dist.group.WORLD
    assert group is not None
    rows = [sizes.m // RANKS + (rank < sizes.m % RANKS) for rank in range(RANKS)]
    x, w = sizes.tensor(sizes.m, sizes.k), sizes.tensor(sizes.k, sizes.n)
    compare(sizes, gemm_reduce, serial, x, w, rows, group)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
