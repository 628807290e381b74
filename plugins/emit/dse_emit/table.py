"""The order of work of a rank under a schedule, as emitted operators hold it at their top."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dse.errors import ConfigError, Problem

Span = tuple[int, int]
"""A part of a shard, from a cut to a later one."""
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
    "gathered_in_switch": "an all-gather through the switch, which no schedule of messages is",
    "persistent": "a GEMM kernel that withholds CUs; operators of PyTorch take all of them",
    "fused": "workgroups that store into peers' memory; operators of PyTorch do not",
    "triggered": "a tracker in the memory controller that starts copies; no GPU has one",
    "concurrent": "a collective during a GEMM that has nothing to do with it: call both in two streams",
    "streams": "several GEMMs at once, without a collective: call them in several streams",
}
"""Family -> what it needs that plain PyTorch cannot do."""


@dataclass(frozen=True)
class Step:
    """A step of a rank. what: `gemm`, `send` (by the library), `copy` (by copy engines), or `add`.

    parts: span of a shard -> of which shards, by distance. Gathers read shards of the ranks so many places before;
    reductions make and send these. 0: the own.
    """

    what: Literal["gemm", "send", "copy", "add"]
    parts: Mapping[Span, tuple[int, ...]]

    @property
    def moves(self) -> bool:
        """True if it sends."""
        return self.what in ("send", "copy")

    @property
    def cells(self) -> set[tuple[int, int]]:
        """Pairs of an interval between two cuts that follow each other, and the distance of a shard."""
        return {
            (at, distance) for span, distances in self.parts.items() for at in range(*span) for distance in distances
        }


@dataclass(frozen=True)
class Table:
    """A schedule of a collective and its GEMM on `ranks` ranks. by_rows: shards are cut by rows, else by columns.

    gathers: the collective comes before the GEMM. cuts: from 0 to the number of equal parts of a shard, where it is
    cut. title: of the schedule, in words.
    """

    title: str
    pattern: Pattern
    gathers: bool
    ranks: int
    by_rows: bool
    cuts: tuple[int, ...]
    steps: tuple[Step, ...]

    def sent(self, rows: Sequence[int], cols: int, rank: int) -> int:
        """Elements that a rank sends by its steps: of X, whose `cols` is K; or of Y, whose `cols` is N.

        rows: of each rank's shard.
        """
        total = 0
        for step in self.steps:
            for at, distance in step.cells if step.moves else ():
                # gathers send the own shard to each peer; reductions send each peer the part of its own shard
                moved = rows[rank] if self.gathers else rows[(rank - distance) % self.ranks]
                total += self._part(moved, at) * cols if self.by_rows else moved * self._part(cols, at)
        return total

    def _part(self, length: int, at: int) -> int:
        """Length of the interval after a cut; the first parts take the remainder."""
        size, larger = divmod(length, self.cuts[-1])
        # the same rule as `bounds` of the emitted transport, which cuts the tensors
        low, high = (cut * size + min(cut, larger) for cut in self.cuts[at : at + 2])
        return high - low


def table_of(schedule: Any, pattern: str, ranks: int, *, after: bool = False) -> Table:
    """The table of a schedule, by its knobs. Raises ConfigError with what plain PyTorch lacks for it.

    after: an all-to-all comes after the GEMM; other patterns have one side.
    """
    if ranks < 2:
        raise ConfigError([Problem("gpus", "is a rank that has no peers", ranks, "use two at least")])
    if pattern not in REVERSED:
        way = "use all_gather, all_to_all, reduce_scatter or all_reduce"
        raise ConfigError([Problem("pattern", "is no collective that is emitted", pattern, way)])
    # an all-to-all alone can be on either side of the GEMM
    gathers, family = pattern == "all_gather" or (pattern == "all_to_all" and not after), schedule.family
    if family not in _WRITERS:
        rule = f"cannot be emitted: it needs {_LACKING.get(family, 'what plain PyTorch does not have')}"
        way = f"emit a schedule of the families {', '.join(_WRITERS)}"
        raise ConfigError([Problem("schedule.family", rule, family, way)])
    if family == "synthesised" and not schedule.steps:
        way = "write its steps, as schedules.json of study=synthesis has them"
        raise ConfigError([Problem("schedule.steps", "is searched for by a study", None, way)])
    if getattr(schedule, "near_memory", False):
        rule = "needs memory that adds; no GPU has it"
        raise ConfigError([Problem("schedule.near_memory", rule, True, "emit it with near_memory=false")])
    peers, count = tuple(range(1, ranks)), getattr(schedule, "num_chunks", 1)
    # chunks are of equal size, so that cut i is at part i
    cuts = schedule.cuts if family == "synthesised" else tuple(range(count + 1))
    return Table(
        title=schedule.name,
        pattern=pattern,  # type: ignore[arg-type] # checked above
        gathers=gathers,
        ranks=ranks,
        # families without chunks have neither knob: their shards are whole
        by_rows=getattr(schedule, "cut_dim", getattr(schedule, "chunk_dim", "m")) == "m",
        cuts=cuts,
        steps=tuple(_WRITERS[family][gathers](schedule, peers)),
    )


def _move(schedule: Any, span: Span, peers: tuple[int, ...]) -> Step:
    """The send of a part, by the schedule's mover."""
    return Step("copy" if schedule.comm_engine == "dma" else "send", {span: peers})


def _serial_gather(schedule: Any, peers: tuple[int, ...]) -> Iterator[Step]:
    yield _move(schedule, (0, 1), peers)
    yield Step("gemm", {(0, 1): (0, *peers)})


def _serial_reduction(schedule: Any, peers: tuple[int, ...]) -> Iterator[Step]:
    yield Step("gemm", {(0, 1): (0, *peers)})
    yield _move(schedule, (0, 1), peers)
    yield Step("add", {(0, 1): peers})


def _shards_gather(schedule: Any, peers: tuple[int, ...]) -> Iterator[Step]:
    # all sends first: they wait for nothing, and a stream of sends begins after what was launched before
    yield from (_move(schedule, (0, 1), (peer,)) for peer in peers)
    yield from (Step("gemm", {(0, 1): (peer,)}) for peer in (0, *peers))


def _shards_reduction(schedule: Any, peers: tuple[int, ...]) -> Iterator[Step]:
    for peer in peers:
        yield Step("gemm", {(0, 1): (peer,)})
        yield from _adds(schedule, [((0, 1), (before,)) for before in peers[: peer - 1]], last_only=True)
        yield _move(schedule, (0, 1), (peer,))
    # the own shard is sent to nobody: it is made last, while the others are on their way
    yield Step("gemm", {(0, 1): (0,)})
    yield from _adds(schedule, [((0, 1), (peer,)) for peer in peers])


def _adds(schedule: Any, sent: Sequence[tuple[Span, tuple[int, ...]]], *, last_only: bool = False) -> Iterator[Step]:
    """Yield the sums of parts that were sent, as kernels make them.

    last_only: while more are made: what copy engines move is added once the next is on its way, one part behind, as
    the task graph has it; kernels that move add by themselves, which messages cannot, so that their sums come at the
    end.
    """
    late = schedule.comm_engine == "dma"
    # engines: all but the last two were added on the way, since sums run one part behind
    first = -2 if late else 0
    parts = sent[first : -1 if late else 0] if last_only else sent[first:]
    yield from (Step("add", {span: distances}) for span, distances in parts)


def _chunked_gather(schedule: Any, peers: tuple[int, ...]) -> Iterator[Step]:
    # the local shard needs no message: computed first, it hides the arrival of the first chunk
    local = () if schedule.local_shard_first else (0,)
    yield from (_move(schedule, (at, at + 1), peers) for at in range(schedule.num_chunks))
    if schedule.local_shard_first:
        yield Step("gemm", {(0, schedule.num_chunks): (0,)})
    for at in range(schedule.num_chunks):
        groups = [(*local, *peers)] if schedule.compute == "fused" else [(peer,) for peer in (*local, *peers)]
        yield from (Step("gemm", {(at, at + 1): group}) for group in groups)


def _chunked_reduction(schedule: Any, peers: tuple[int, ...]) -> Iterator[Step]:
    local = () if schedule.local_shard_first else (0,)
    for at in range(schedule.num_chunks):
        groups = [(*peers, *local)] if schedule.compute == "fused" else [(peer,) for peer in (*peers, *local)]
        yield from (Step("gemm", {(at, at + 1): group}) for group in groups)
        yield from _adds(schedule, [((before, before + 1), peers) for before in range(at)], last_only=True)
        yield _move(schedule, (at, at + 1), peers)
    # the reverse of the gather: what no peer waits for is made at the end
    if schedule.local_shard_first:
        yield Step("gemm", {(0, schedule.num_chunks): (0,)})
    yield from _adds(schedule, [((at, at + 1), peers) for at in range(schedule.num_chunks)])


def _listed_gather(schedule: Any, peers: tuple[int, ...]) -> Iterator[Step]:
    """Yield the steps of a schedule that lists them; moves that wait for nothing are launched first."""
    free = [step for step in schedule.steps if step.move and step.after is None]
    later = [step for step in schedule.steps if not step.move or step.after is not None]
    yield from (_step_of_table(step, peers) for step in (*free, *later))


def _listed_reduction(schedule: Any, peers: tuple[int, ...]) -> Iterator[Step]:
    """Yield the steps of a schedule that lists them; what engines moved is added before the next GEMM but one."""
    waiting = list[Step]()
    for step in schedule.steps:
        if not step.move:
            # the newest copy is still under way: it waits for the next GEMM
            yield from (Step("add", waiting.pop(0).parts) for _ in range(len(waiting) - 1))
        yield (listed := _step_of_table(step, peers))
        if listed.what == "copy":
            waiting.append(listed)
    # sums of messages come at the end, since no kernel here adds what it receives
    messages = [listed for listed in (_step_of_table(step, peers) for step in schedule.steps) if listed.what == "send"]
    yield from (Step("add", moved.parts) for moved in (*waiting, *messages))


def _step_of_table(step: Any, peers: tuple[int, ...]) -> Step:
    if step.move:
        return Step("copy" if step.kernel is None else "send", {tuple(step.move): step.peers or peers})
    parts: dict[Span, tuple[int, ...]] = {}
    if step.compute:
        parts[tuple(step.compute)] = step.peers or peers
    if step.local:
        # equal ranges of the peers' shards and of the own one are one entry
        parts[tuple(step.local)] = (*parts.get(tuple(step.local), ()), 0)
    return Step("gemm", parts)


_WRITERS: Mapping[str, Mapping[bool, Callable[[Any, tuple[int, ...]], Iterator[Step]]]] = {
    "serial": {True: _serial_gather, False: _serial_reduction},
    "shard_p2p": {True: _shards_gather, False: _shards_reduction},
    "chunked": {True: _chunked_gather, False: _chunked_reduction},
    "synthesised": {True: _listed_gather, False: _listed_reduction},
}
"""Family -> writers of the steps of gathers (True) and reductions."""
