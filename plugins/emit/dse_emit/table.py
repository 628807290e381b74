"""The order of work of a rank under a schedule, as emitted operators hold it at their top."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dse.errors import ConfigError, Problem

WHOLE = -1
"""Piece that is a whole shard; `ALL` in what is written."""
Pattern = Literal["all_gather", "all_to_all", "reduce_scatter", "all_reduce"]
REVERSED: Mapping[str, Pattern] = {
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
    "all_reduce": "all_gather",
    "all_to_all": "all_to_all",
}
"""Pattern -> that of the gradients' collective, on the other side of the GEMM, under the same schedule."""
_LACKING = {
    "signalled": "one GEMM kernel whose tiles wait for signals or send them; operators of PyTorch do neither",
    "in_switch": "a GEMM kernel that adds in the switch; operators of PyTorch do not",
    "persistent": "a GEMM kernel that withholds CUs; operators of PyTorch take all of them",
    "fused": "workgroups that store into peers' memory; operators of PyTorch do not",
    "triggered": "a tracker in the memory controller that starts copies; no GPU has one",
    "concurrent": "a collective during a GEMM that has nothing to do with it: call both in two streams",
    "streams": "several GEMMs at once, without a collective: call them in several streams",
}
"""Family -> what it needs that plain PyTorch cannot do."""


@dataclass(frozen=True)
class Step:
    """A step of a rank. what: `gemm`, `send` or `add`. piece: of shards, or `WHOLE`.

    distances: gathers read shards of the ranks so many places before; reductions make and send these. 0: the own.
    """

    what: Literal["gemm", "send", "add"]
    piece: int
    distances: tuple[int, ...]


@dataclass(frozen=True)
class Table:
    """A schedule of a collective and its GEMM on `ranks` ranks. by_rows: pieces are of rows, else of columns.

    gathers: the collective comes before the GEMM. copies: copy engines move data, else messages of the library.
    title: of the schedule, in words.
    """

    title: str
    pattern: Pattern
    gathers: bool
    ranks: int
    by_rows: bool
    pieces: int
    copies: bool
    steps: tuple[Step, ...]

    def sent(self, rows: Sequence[int], cols: int, rank: int) -> int:
        """Elements that a rank sends by its steps: of X, whose `cols` is K; or of Y, whose `cols` is N.

        rows: of each rank's shard.
        """
        total = 0
        for step in self.steps:
            for distance in step.distances if step.what == "send" else ():
                moved = rows[rank] if self.gathers else rows[(rank - distance) % self.ranks]
                total += self._part(moved, step.piece) * cols if self.by_rows else moved * self._part(cols, step.piece)
        return total

    def _part(self, length: int, piece: int) -> int:
        return length if piece == WHOLE else length // self.pieces + (piece < length % self.pieces)


def table_of(schedule: Any, pattern: str, ranks: int, *, after: bool = False) -> Table:
    """The table of a schedule, by its knobs. Raises ConfigError with what plain PyTorch lacks for it.

    after: an all-to-all comes after the GEMM; other patterns have one side.
    """
    if ranks < 2:
        raise ConfigError([Problem("gpus", "is a rank that has no peers", ranks, "use two at least")])
    if pattern not in REVERSED:
        way = "use all_gather, all_to_all, reduce_scatter or all_reduce"
        raise ConfigError([Problem("pattern", "is no collective that is emitted", pattern, way)])
    gathers, family = pattern == "all_gather" or (pattern == "all_to_all" and not after), schedule.family
    if family not in _WRITERS:
        rule = f"cannot be emitted: it needs {_LACKING.get(family, 'what plain PyTorch does not have')}"
        way = f"emit a schedule of the families {', '.join(_WRITERS)}"
        raise ConfigError([Problem("schedule.family", rule, family, way)])
    if getattr(schedule, "near_memory", False):
        rule = "needs memory that adds; no GPU has it"
        raise ConfigError([Problem("schedule.near_memory", rule, True, "emit it with near_memory=false")])
    peers = tuple(range(1, ranks))
    return Table(
        title=schedule.name,
        pattern=pattern,  # type: ignore[arg-type] # checked above
        gathers=gathers,
        ranks=ranks,
        by_rows=getattr(schedule, "chunk_dim", "m") == "m",
        pieces=getattr(schedule, "num_chunks", 1),
        copies=schedule.comm_engine == "dma",
        steps=tuple(_WRITERS[family][gathers](schedule, peers)),
    )


def _serial_gather(schedule: Any, peers: tuple[int, ...]) -> Iterator[Step]:
    yield Step("send", WHOLE, peers)
    yield Step("gemm", WHOLE, (0, *peers))


def _serial_reduction(schedule: Any, peers: tuple[int, ...]) -> Iterator[Step]:
    yield Step("gemm", WHOLE, (0, *peers))
    yield Step("send", WHOLE, peers)
    yield Step("add", WHOLE, peers)


def _shards_gather(schedule: Any, peers: tuple[int, ...]) -> Iterator[Step]:
    # all sends first: they wait for nothing, and a stream of sends begins after what was launched before
    yield from (Step("send", WHOLE, (peer,)) for peer in peers)
    yield from (Step("gemm", WHOLE, (peer,)) for peer in (0, *peers))


def _shards_reduction(schedule: Any, peers: tuple[int, ...]) -> Iterator[Step]:
    for peer in peers:
        yield Step("gemm", WHOLE, (peer,))
        yield from _adds(schedule, [(WHOLE, (before,)) for before in peers[: peer - 1]], last_only=True)
        yield Step("send", WHOLE, (peer,))
    yield Step("gemm", WHOLE, (0,))
    yield from _adds(schedule, [(WHOLE, (peer,)) for peer in peers])


def _adds(schedule: Any, sent: Sequence[tuple[int, tuple[int, ...]]], *, last_only: bool = False) -> Iterator[Step]:
    """Yield the sums of pieces that were sent, as kernels make them.

    last_only: while more are made: what copy engines move is added once the next is on its way, one piece behind, as
    the task graph has it; kernels that move add by themselves, which messages cannot, so that their sums come at the
    end.
    """
    late = schedule.comm_engine == "dma"
    first = -2 if late else 0
    pieces = sent[first : -1 if late else 0] if last_only else sent[first:]
    yield from (Step("add", piece, distances) for piece, distances in pieces)


def _chunked_gather(schedule: Any, peers: tuple[int, ...]) -> Iterator[Step]:
    local = () if schedule.local_shard_first else (0,)
    yield from (Step("send", index, peers) for index in range(schedule.num_chunks))
    if schedule.local_shard_first:
        yield Step("gemm", WHOLE, (0,))
    for index in range(schedule.num_chunks):
        groups = [(*local, *peers)] if schedule.compute == "fused" else [(peer,) for peer in (*local, *peers)]
        yield from (Step("gemm", index, group) for group in groups)


def _chunked_reduction(schedule: Any, peers: tuple[int, ...]) -> Iterator[Step]:
    local = () if schedule.local_shard_first else (0,)
    for index in range(schedule.num_chunks):
        groups = [(*peers, *local)] if schedule.compute == "fused" else [(peer,) for peer in (*peers, *local)]
        yield from (Step("gemm", index, group) for group in groups)
        yield from _adds(schedule, [(before, peers) for before in range(index)], last_only=True)
        yield Step("send", index, peers)
    if schedule.local_shard_first:
        yield Step("gemm", WHOLE, (0,))
    yield from _adds(schedule, [(index, peers) for index in range(schedule.num_chunks)])


_WRITERS: Mapping[str, Mapping[bool, Callable[[Any, tuple[int, ...]], Iterator[Step]]]] = {
    "serial": {True: _serial_gather, False: _serial_reduction},
    "shard_p2p": {True: _shards_gather, False: _shards_reduction},
    "chunked": {True: _chunked_gather, False: _chunked_reduction},
}
"""Family -> writers of the steps of gathers (True) and reductions."""
