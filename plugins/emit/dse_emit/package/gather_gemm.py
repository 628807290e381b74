"""An all-gather (or all-to-all) overlapped with the GEMM that consumes it: Y = gather(X) W.

Ranks hold X [rows of the rank, K] and W [K, N]; Y is [sum of rows, N]. `SCHEDULE` is the order of work of a rank. A
step has parts of shards, from a cut to a later one, and the ranks whose shards they are, by distance (0: the own):

    ("copy", {(0, 1): (1, 2)})                  send this part to the ranks 1 and 2 places on, by copy engines, and
                                                receive those of the ranks 1 and 2 places before
    ("send", ...)                               the same by the library
    ("gemm", {(0, 1): (1, 2), (0, 2): (0,)})    one GEMM on parts of the shards of the ranks so many places before

Shards are cut by rows, or (`CUT = "depth"`) by columns, so that GEMMs add up. `CUTS` counts in equal parts, the last of
which is the end. A GEMM waits for the parts that it reads, and for nothing else.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .check import compare, initialise
from .transport import Span, bounds, gather_rows, put_together, transports

# schedule
PATTERN = "all_gather"
RANKS = 4
CUT = "rows"
CUTS = (0, 1, 2)
SCHEDULE: tuple[tuple[str, dict[Span, tuple[int, ...]]], ...] = (
    ("send", {(0, 1): (1, 2, 3)}),
    ("send", {(1, 2): (1, 2, 3)}),
    ("gemm", {(0, 2): (0,)}),
    ("gemm", {(0, 1): (1, 2, 3)}),
    ("gemm", {(1, 2): (1, 2, 3)}),
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
    # every copy has a place of its own for each rank
    copied = [shape(max(rows), x.shape[1], span) for what, parts in SCHEDULE if what == "copy" for span in parts]
    most = RANKS * sum(height * depth for height, depth in copied)
    moving = transports([what for what, _ in SCHEDULE], group, x, most)
    starts = [sum(rows[:source]) for source in range(ranks)]
    blocks = x.split(rows[rank]) if PATTERN == "all_to_all" else [x] * ranks
    y = x.new_empty((sum(rows), w.shape[1]))
    sent: list[dict[Span, tuple[str, int]]] = [{} for _ in rows]  # by source: how each part comes, and by which step
    here: list[dict[Span, Tensor]] = [{} for _ in rows]  # by source: what has come
    begun = set[int]()  # sources of whose rows a part of Y has been made
    for order, (what, parts) in enumerate(SCHEDULE):
        if what in moving:
            ((span, distances),) = parts.items()
            peers, sources = ([(rank + sign * distance) % ranks for distance in distances] for sign in (1, -1))
            incoming = {source: torch.Size(shape(rows[source], x.shape[1], span)) for source in sources}
            moving[what].post(order, {peer: part(blocks[peer], span) for peer in peers}, incoming)
            for source in sources:
                sent[source][span] = what, order
            continue
        cells = [((rank - distance) % ranks, span) for span, distances in parts.items() for distance in distances]
        for source, span in cells:
            for coming in [coming for coming in sent[source] if coming[0] < span[1] and coming[1] > span[0]]:
                way, step = sent[source].pop(coming)
                here[source][coming] = moving[way].wait(step, source)
        operands = [
            part(blocks[rank], span) if source == rank else operand(here[source], span, (rows[source], x.shape[1]))
            for source, span in cells
        ]
        weights = w[slice(*bounds(w.shape[0], cells[0][1], CUTS))] if CUT == "depth" else w
        product = torch.mm(operands[0] if len(operands) == 1 else torch.cat(operands), weights)
        for (source, span), block in zip(cells, product.split([len(operand) for operand in operands]), strict=True):
            low, high = bounds(rows[source], span, CUTS) if CUT == "rows" else (0, rows[source])
            target = y[starts[source] + low : starts[source] + high]
            target.add_(block) if CUT == "depth" and source in begun else target.copy_(block)
            begun.add(source)
    for piece in moving.values():
        piece.finish()
    return y


def part(shard: Tensor, span: Span) -> Tensor:
    """A part of a shard [rows, K]."""
    low, high = bounds(shard.shape[CUT == "depth"], span, CUTS)
    return shard[:, low:high] if CUT == "depth" else shard[low:high]


def operand(pieces: Mapping[Span, Tensor], span: Span, size: tuple[int, int]) -> Tensor:
    """A part of a shard of a size, from the pieces of it that have come."""
    edges = functools.partial(bounds, size[CUT == "depth"], cuts=CUTS)
    return put_together(pieces, span, int(CUT == "depth"), edges)


def shape(rows: int, depth: int, span: Span) -> tuple[int, int]:
    """Rows and columns of a part of a shard."""
    low, high = bounds(depth if CUT == "depth" else rows, span, CUTS)
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
    sizes = initialise(parser, RANKS, copies=all(what != "send" for what, _ in SCHEDULE))
    group = dist.group.WORLD
    assert group is not None
    rows = [sizes.m // RANKS + (rank < sizes.m % RANKS) for rank in range(RANKS)]
    height = rows[dist.get_rank()] * (RANKS if PATTERN == "all_to_all" else 1)
    x, w = sizes.tensor(height, sizes.k), sizes.tensor(sizes.k, sizes.n)
    compare(sizes, gather_gemm, serial, x, w, rows, group)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
