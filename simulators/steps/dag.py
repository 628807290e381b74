"""The operators of one iteration one by one: a DAG, and when each runs on the busiest GPU.

Of a pipeline and of several micro-batches the last one is written out, with what comes before it as one task.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dse.backend import Interval
from simulators.steps.iteration import Iteration, Part
from simulators.steps.operators import Block

_LANES = {None: "compute", "tp": "tensor-parallel links", "pp": "pipeline links", "dp": "data-parallel links"}
_KINDS = {None: "gemm", "tp": "transfer", "pp": "transfer", "dp": "transfer"}


@dataclass(frozen=True)
class Task:
    """One operator of one block: where it runs, how long [s], its work, and the tasks it waits for."""

    name: str
    lane: str
    kind: str
    seconds: float
    after: tuple[str, ...]
    flop: float = 0.0
    bytes: float = 0.0


def tasks(found: Iteration) -> tuple[Task, ...]:
    """All tasks of an iteration whose numbers are single ones, in an order that respects `after`."""
    return tuple(_Writer(found).write())


def schedule(every: Sequence[Task]) -> list[Interval]:
    """When each task runs: once those before it have ended and its lane is free, lanes in the order of the tasks."""
    finish: dict[str, float] = {}
    free: dict[str, float] = {}
    intervals = []
    for task in every:
        start = max([free.get(task.lane, 0.0), *(finish[name] for name in task.after)])
        finish[task.name] = free[task.lane] = start + task.seconds
        interval = Interval(task.lane, task.name, task.kind, start, finish[task.name], task.bytes, task.flop)
        intervals.append(interval)
    return intervals


class _Writer:
    """Writes the tasks down; `last` is the one that the chain of compute has come to."""

    def __init__(self, found: Iteration) -> None:
        self._found, self._last = found, ""
        self._buckets: list[str] = []

    def write(self) -> Iterator[Task]:
        found = self._found
        before = float((found.micro_batches - 1) * found.slot_s + found.bubble_s)
        if before > 0:
            yield self._chained(Task("earlier micro-batches, and waiting", _LANES[None], "launch", before, ()))
        if found.message_s > 0:
            yield self._message("activations in")
        for block, index in self._instances(found.blocks):
            yield from self._pass(block, index, forward=True)
        if not found.training:
            return
        if found.message_s > 0:
            yield self._message("gradients in")
        for block, index in reversed(list(self._instances(found.blocks))):
            yield from self._pass(block, index, forward=False)
            yield from self._bucket(block, index)
        update = found.update
        waits = tuple(self._buckets[-1:])
        yield self._chained(
            Task("update", _LANES[None], "gemm", float(update.seconds), waits, float(update.flop), float(update.bytes))
        )
        if found.gathered_s > 0:
            yield self._chained(Task("all-gather weights", _LANES["dp"], "transfer", float(found.gathered_s), ()))

    def _instances(self, blocks: Sequence[Block]) -> Iterator[tuple[Block, int]]:
        for block in blocks:
            for index in range(round(float(self._found.counts[block.name]))):
                yield block, index

    def _pass(self, block: Block, index: int, *, forward: bool) -> Iterator[Task]:
        for part in self._found.parts:
            alone = part.over is not None and float(part.spent.seconds) == 0
            if part.block is block and part.forward == forward and not alone:
                yield self._chained(self._task(part, f"{block.name} {index}"))

    def _task(self, part: Part, where: str) -> Task:
        seconds, count = float(part.spent.seconds), float(part.op.count)  # type: ignore[arg-type]
        amounts = (count * float(part.spent.flop), count * float(part.spent.bytes))
        name = f"{where}: {part.op.name}"
        return Task(name, _LANES[part.over], _KINDS[part.over], count * seconds, (), *amounts)

    def _bucket(self, block: Block, index: int) -> Iterator[Task]:
        """The reduction of a block's gradients; nothing of the backward pass waits for it."""
        (bucket,) = (one for one in self._found.buckets if one.block is block)
        if bucket.seconds > 0:
            name, moved = f"{block.name} {index}: gradients", float(self._found.weight_bytes(block))
            self._buckets.append(name)
            yield Task(name, _LANES["dp"], "transfer", float(bucket.seconds), (self._last,), bytes=moved)

    def _message(self, name: str) -> Task:
        return self._chained(Task(name, _LANES["pp"], "transfer", float(self._found.message_s), ()))

    def _chained(self, task: Task) -> Task:
        """The same, after what the chain has come to; it goes on from there."""
        after = (*task.after, *((self._last,) if self._last else ()))
        self._last = task.name
        return Task(task.name, task.lane, task.kind, task.seconds, after, task.flop, task.bytes)
