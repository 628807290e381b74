"""The task graph of one iteration, which engines run: a task for each operator on the busiest GPU.

Tasks run on lanes, one at a time in their order: the compute stream, the links of each group of GPUs, and the units in
memory. Of a pipeline and of several micro-batches the last one is written out, with what comes before it as one task.
Where copies of weights are made in memory, operators take as long as they do beside that, and copies are tasks of a
lane of their own, from when the first word of one is read to when its last is written.

Reductions of gradients run beside the backward pass, and both slow each other down
(`simulators.steps.overlap.gradient_contention`). Layers whose exchanges of experts run beside other work are two
streams (`simulators.steps.overlap.expert_exchanges`), a pair of micro-batches in place of the last one's forward pass;
of exchanges that the shared expert hides, backward passes show what is left. The closed forms of
`simulators.steps.run.iteration` give the same times.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dse import plugins
from dse.backend import Interval
from dse.values import Memo
from simulators.steps.operators.quantised_weights import kernels, timeline
from simulators.steps.operators.work import Axis, ModelBlock, OperatorCost, StageOperator
from simulators.steps.overlap.expert_exchanges import LayersBeside
from simulators.steps.overlap.gradient_contention import ENGINE, GRADIENTS, group
from simulators.steps.overlap.sites import places
from simulators.steps.overlap.two_streams import TwoStreams, laws, tasks
from simulators.steps.run.iteration import Iteration
from simulators.taskgraph.graph import GraphBuilder, TaskGraph
from simulators.taskgraph.timeline import Timeline

Floats = NDArray[np.float64]
_MEMORY = "memory"
_DELAY = "delay"
WAITING = ", waiting"
"""How tasks are called that wait for the copy of an operator."""
_LANES: dict[Axis | None, str] = {
    None: "compute",
    "tp": "tensor-parallel links",
    "pp": "pipeline links",
    "dp": "data-parallel links",
    "ep": "expert-parallel links",
    "cp": "context-parallel links",
}
_KINDS: dict[Axis | None, str] = {axis: "gemm" if axis is None else "transfer" for axis in _LANES}


@dataclass(frozen=True)
class Task:
    """One operator of one block: its lane, its time alone [s], its work, and the tasks that it waits for.

    earliest: after the tasks it waits for have ended [s]. group: of the contention laws. alone_s, wide_s: what
    `seconds` would be with nothing beside it, and without a schedule that cuts it; None: the same.
    """

    name: str
    lane: str
    kind: str
    seconds: float
    after: tuple[str, ...]
    flop: float = 0.0
    bytes: float = 0.0
    earliest: float = 0.0
    group: str = ""
    alone_s: float | None = None
    wide_s: float | None = None


def lower(iteration: Iteration) -> TaskGraph:
    """Lower an iteration whose numbers are single ones to its task graph."""
    graph, places, last = GraphBuilder(), dict[str, int](), dict[str, int]()
    lanes = {lane: graph.resource(lane, 1.0) for lane in (*_LANES.values(), _MEMORY)}
    for task in _Writer(iteration).write():
        before = [places[name] for name in task.after]
        if task.earliest > 0:
            name = f"{task.name}, not yet"  # a delay on the same lane, without using it
            before = [graph.task(name, _DELAY, after=before, delay=task.earliest, lane=task.lane)]
        alone_s = task.seconds if task.alone_s is None else task.alone_s
        before += [last[task.lane]] if task.lane in last else []  # a lane runs one task at a time, in order
        places[task.name] = last[task.lane] = graph.task(
            task.name,
            task.kind,
            after=before,
            uses={lanes[task.lane]: 1.0},
            lane=task.lane,
            limiter=task.lane,
            group=task.group,
            flop=task.flop,
            work=task.seconds,
            cap=1.0,
            moved_bytes=task.bytes,
            alone_s=alone_s,
            wide_s=alone_s if task.wide_s is None else task.wide_s,
        )
    beside = {pair: factor for both in _streams(iteration) for pair, factor in laws(both)}
    for (slowed, active), factor in (*iteration.gradients.slowdowns.laws(), *beside.items()):
        graph.slows(slowed, while_active=active, factor=float(np.asarray(factor)))
    return graph.build()


def _streams(iteration: Iteration) -> Iterator[TwoStreams]:
    for layers in iteration.passes.layers_beside:
        yield from layers.streams


def run(iteration: Iteration) -> Timeline:
    """Run the task graph of an iteration."""
    timeline: Timeline = plugins.load("engine", ENGINE).run(lower(iteration))
    return timeline


def intervals(iteration: Iteration) -> list[Interval]:
    """When each task of an iteration runs, as an engine says; those of the schedules of sites in their places."""
    tasks = [interval for interval in run(iteration).intervals(0) if interval.kind != _DELAY]
    sites = dict(_tasks_of_sites(iteration))
    return [shown for task in tasks for shown in _in_place(task, sites)] if sites else tasks


def _tasks_of_sites(iteration: Iteration) -> Iterator[tuple[tuple[str, str], list[Interval]]]:
    """Yield ((block, operator), tasks in its place, after its start) of the operators that schedules replace."""
    passes = iteration.passes
    if passes.scheduled is None:
        return
    for block in passes.blocks:
        parts = [part for part in passes.parts if part.block is block]
        ops, costs = [part.op for part in parts], [part.spent for part in parts]
        for at in places(ops):
            if (scheduled := passes.scheduled.intervals(ops, costs, at)) is not None:
                gemm, tasks = scheduled
                yield (block.name, ops[gemm].name), tasks
                yield (block.name, ops[at.collective].name), []


def _in_place(task: Interval, sites: Mapping[tuple[str, str], list[Interval]]) -> Iterator[Interval]:
    """The task itself, or the tasks of the schedule in its place."""
    block, _, op = task.name.partition(": ")
    # operators that schedules run with another become no task
    for inner in sites.get((block.rpartition(" ")[0], op), [task]):
        if inner is task:
            yield task
        else:
            start_s, finish_s = task.start_s + inner.start_s, task.start_s + inner.finish_s
            yield replace(inner, name=f"{task.name}, {inner.name}", start_s=start_s, finish_s=finish_s)


class _Writer:
    """Writes the tasks down; `last` is the one that the chain of compute has come to."""

    def __init__(self, iteration: Iteration) -> None:
        self._iteration, self._last = iteration, ""
        self._halves: dict[str, str] = {}  # half of the tokens -> its last task, while two take turns
        self._buckets: list[str] = []
        self._turns, self._kernels = _beside(iteration), _before(iteration)
        self._undivided = _undivided(iteration)
        self._anchors: list[tuple[str, float]] = []  # tasks after which the clock of `_turns` showed so much

    def write(self) -> Iterator[Task]:
        iteration = self._iteration
        yield from self._earlier()
        if np.any(np.asarray(iteration.host_s) > 0):
            yield self._append(Task("host", _LANES[None], "launch", float(np.asarray(iteration.host_s)), ()))
        written = iteration.passes.parallel.messages == "waited" and bool(iteration.message_s > 0)
        if written:  # messages that overlap compute are no task of their own
            yield self._message("activations in")
        for block in iteration.passes.blocks:
            yield from self._forward(block)
        yield from self._waits(iteration, written=written)
        if not iteration.passes.is_training:
            return
        if written:
            yield self._message("gradients in")
        yield from self._backward(iteration)
        yield from self._update_weights(iteration)

    def _earlier(self) -> Iterator[Task]:
        """The micro-batches before the last one: what they compute, what they exchange that this does not hide, and the
        bubble of the pipeline.
        """
        iteration = self._iteration
        count, bubble = float(iteration.passes.micro_batches - 1), float(iteration.bubble_s)
        left = count * float(iteration.slot_s) + bubble - self._written_more()  # of the micro-batches before the last
        parts = {lane: [part for part in iteration.passes.parts if part.over == over] for over, lane in _LANES.items()}
        spent = {lane: count * float(iteration.passes.sum(of_lane)) for lane, of_lane in parts.items()}
        computed = min(spent[_LANES[None]], max(left - bubble, 0.0))  # all that fits into the time before the bubble
        moved = sum(spent.values()) - spent[_LANES[None]]
        exposed = min(max(left - bubble - computed, 0.0), moved)
        for over, lane in _LANES.items():
            seconds = computed if over is None else exposed * spent[lane] / moved if moved else 0.0
            if seconds > 0:
                flop, moved_bytes = (count * float(sum(amount)) for amount in _amounts(parts[lane]))
                task = Task(f"earlier micro-batches, {lane}", lane, _KINDS[over], seconds, (), flop, moved_bytes)
                yield self._append(replace(task, wide_s=self._wide_s(parts[lane], count, seconds)))
        if (waits := left - computed - exposed) > 1e-9 * float(iteration.slot_s):  # rounding
            yield self._append(Task("bubble, and waiting", _LANES[None], "waiting", waits, ()))

    def _written_more(self) -> float:
        """Time by which what is written of layers with two streams is longer than a turn's share of them."""
        iteration = self._iteration
        parts = [
            part
            for part in iteration.passes.parts
            for layers in iteration.passes.layers_beside
            if part.block.name == layers.block and (part.forward or len(layers.streams) > 1)
        ]
        waited = sum((layers.waited_s for layers in iteration.passes.layers_beside), np.zeros(()))
        return float(waited - iteration.passes.sum(parts) - iteration.passes.pair_saved_s + iteration.passes.saved_s)

    def _forward(self, block: ModelBlock) -> Iterator[Task]:
        """The forward pass of all layers of a block: operator by operator, or as two streams."""
        layers = round(float(self._iteration.passes.counts[block.name]))
        if (beside := self._beside(block)) is not None:
            yield from self._side_by_side(beside.streams[0], block, layers)
            return
        for index in range(layers):
            yield from self._pass(block, index, forward=True)

    def _beside(self, block: ModelBlock) -> LayersBeside | None:
        return next((layers for layers in self._iteration.passes.layers_beside if layers.block == block.name), None)

    def _exposed_share(self, block: ModelBlock) -> float:
        """Share of the exchanges of a backward pass that the shared expert does not hide."""
        beside = self._beside(block)
        if beside is None or len(beside.streams) == 1:  # a pair of micro-batches writes both passes out
            return 1.0
        moved = float(beside.streams[1].sum("exchange", beside.count))
        return 1.0 - float(beside.streams[1].saved_s(beside.count)) / moved if moved else 1.0

    def _side_by_side(self, streams: TwoStreams, block: ModelBlock, layers: int) -> Iterator[Task]:
        begun = (self._last,) if self._last else ()
        lanes, last = {"gemm": _LANES[None], "transfer": _LANES["ep"]}, dict[str, str]()
        for task in tasks(streams, layers, block.name):
            after = task.after or begun
            last[task.kind] = task.name
            seconds = float(np.asarray(task.seconds))
            yield Task(task.name, lanes[task.kind], task.kind, seconds, after, group=task.group)
        self._halves, self._last = last, last.get("gemm", self._last)  # what follows waits for both

    def _waits(self, iteration: Iteration, *, written: bool) -> Iterator[Task]:
        """Launches, split weights and further messages of a micro-batch that its operators wait for, as one task."""
        messages = (2 if iteration.passes.is_training else 1) * iteration.message_s if written else 0.0
        waits = float(iteration.launch_wait_s + iteration.gradients.split_s + iteration.messages_s - messages)
        if waits > 1e-9 * float(iteration.slot_s):
            yield self._append(Task("launches, weights and messages, waited for", _LANES[None], "waiting", waits, ()))

    def _backward(self, iteration: Iteration) -> Iterator[Task]:
        backwards = list(reversed(list(self._instances(iteration.passes.blocks))))
        beside = iteration.passes.parallel.reductions == "beside"
        for block, index in backwards:
            yield from self._pass(block, index, forward=False)
            yield from self._bucket(block, index) if beside else ()
        for block, index in () if beside else backwards:  # or all after the backward pass
            yield from self._bucket(block, index)

    def _update_weights(self, iteration: Iteration) -> Iterator[Task]:
        gradients = iteration.gradients
        update, copies = iteration.update, iteration.passes.copies
        waits = tuple(self._buckets[-1:])
        if gradients.tied_s > 0:  # both ends of a pipeline hold the embedding
            tied = Task("gradients of the shared embedding", _LANES["pp"], "transfer", float(gradients.tied_s), waits)
            yield self._append(tied)
        yield self._append(
            Task("update", _LANES[None], "gemm", float(update.seconds), waits, float(update.flop), float(update.bytes))
        )
        if copies.update_s > 0:
            moved = float(copies.hbm_bytes[1])
            yield self._append(Task("copies of weights", _LANES[None], "gemm", float(copies.update_s), (), bytes=moved))
        if gradients.gathered_s > 0:
            yield self._append(Task("all-gather weights", _LANES["dp"], "transfer", float(gradients.gathered_s), ()))

    def _instances(self, blocks: Sequence[ModelBlock]) -> Iterator[tuple[ModelBlock, int]]:
        for block in blocks:
            for index in range(round(float(self._iteration.passes.counts[block.name]))):
                yield block, index

    def _pass(self, block: ModelBlock, index: int, *, forward: bool) -> Iterator[Task]:
        for part in self._iteration.passes.parts:
            if part.block is not block or part.forward != forward:
                continue
            task, turn = self._task(part, f"{block.name} {index}"), next(self._turns, None)
            kernel = self._kernels.get((block.name, part.op.name))
            if kernel is not None and index >= self._stored_blocks(block):  # the first blocks have their copies stored
                spent = float(kernel.seconds), (), 0.0, float(kernel.bytes)
                yield self._append(Task(f"{task.name}, its copy", _LANES[None], "copy", *spent))
            if turn is not None:
                yield from self._aside(task.name, turn, forward=forward)
                task = replace(task, seconds=turn.ended - turn.began, alone_s=task.seconds)
            if part.over is None or float(part.spent.seconds) > 0:  # exchanges of nothing are left out
                yield self._append(task, part.op.half)

    def _stored_blocks(self, block: ModelBlock) -> float:
        """Number of equal blocks whose copies are stored: the first ones."""
        quantising = self._iteration.passes.weight_copies
        if quantising is None:
            return 0.0
        return float(quantising.stored_blocks(np.rint(self._iteration.passes.counts[block.name])))

    def _aside(self, name: str, turn: Turn, *, forward: bool) -> Iterator[Task]:
        """The copy that an operator reads, in memory, and how long the GPU waits for it."""
        if len(self._anchors) < (1 if forward else 2):  # clocks of both passes begin at their first operator
            self._anchors.append((self._last, turn.reached))
        if turn.done > turn.copied:
            before, clock = next(anchor for anchor in reversed(self._anchors) if anchor[1] <= turn.copied)
            lasts, after = turn.done - turn.copied, (before,) if before else ()
            yield Task(f"{name}, its copy", _MEMORY, "copy", lasts, after, earliest=turn.copied - clock)
        if turn.began > turn.reached:
            yield self._append(Task(f"{name}{WAITING}", _LANES[None], "waiting", turn.began - turn.reached, ()))

    def _task(self, part: StageOperator, where: str) -> Task:
        seconds, count = float(part.spent.seconds), float(part.op.count)  # type: ignore[arg-type]
        amounts = (count * float(part.spent.flop), count * float(part.spent.bytes))
        name = f"{where}: {part.op.name}"
        law = "" if part.forward else group(part.block.name)
        seconds *= 1.0 if part.forward or part.over != "ep" else self._exposed_share(part.block)
        wide_s = self._wide_s([part], count / float(part.times), count * seconds) if count else None
        return Task(name, _LANES[part.over], _KINDS[part.over], count * seconds, (), *amounts, group=law, wide_s=wide_s)

    def _wide_s(self, parts: Sequence[StageOperator], passes: float, seconds: float) -> float | None:
        """How long operators would take in so many passes, of the time that they do, without the schedules of sites."""
        if self._undivided is None:
            return None
        return min(passes * sum(float(part.times) * (self._undivided.find(part) or 0.0) for part in parts), seconds)

    def _bucket(self, block: ModelBlock, index: int) -> Iterator[Task]:
        """The reduction of a block's gradients; nothing of the backward pass waits for it."""
        (bucket,) = (reduction for reduction in self._iteration.gradients.buckets if reduction.block is block)
        if bucket.seconds > 0:
            name, moved = f"{block.name} {index}: gradients", float(self._iteration.passes.weight_bytes(block))
            self._buckets.append(name)
            after = (self._last,)
            yield Task(name, _LANES["dp"], "transfer", float(bucket.seconds), after, bytes=moved, group=GRADIENTS)

    def _message(self, name: str) -> Task:
        return self._append(Task(name, _LANES["pp"], "transfer", float(self._iteration.message_s), ()))

    def _append(self, task: Task, half: str = "") -> Task:
        """The same, after what the chain (of a half of the tokens) has come to; it goes on from there."""
        last = self._halves.get(half, self._last)
        before = (last,) if half else tuple(self._halves.values()) or (last,)  # what follows both halves waits for both
        if half:
            self._halves[half] = task.name
        else:
            self._halves, self._last = {}, task.name
        return replace(task, after=(*task.after, *(name for name in before if name)))


def _undivided(iteration: Iteration) -> Memo[float] | None:
    """Time [s] of each operator without the schedules of sites; None where there are none."""
    if iteration.passes.scheduled is None:
        return None
    plain = replace(iteration.passes, scheduled=None).parts
    seconds = Memo[float]()
    for part, alike in zip(iteration.passes.parts, plain, strict=True):
        seconds.keep(float(alike.spent.seconds), part)
    return seconds


def _amounts(parts: Sequence[StageOperator]) -> tuple[list[Floats], list[Floats]]:
    """Work [FLOP] and traffic [bytes] of some parts, in a pass over one micro-batch."""
    return [part.times * part.spent.flop for part in parts], [part.times * part.spent.bytes for part in parts]


class Turn(NamedTuple):
    """Times at which an operator was reached, began and ended, and its copy was begun and done (else NaN) [s]."""

    reached: float
    began: float
    ended: float
    copied: float
    done: float


def _beside(iteration: Iteration) -> Iterator[Turn]:
    """Times of each operator of a micro-batch in its order, where copies are made in memory."""
    if iteration.passes.weight_copies is None or iteration.passes.weight_copies.quantised.made_by != "pim":
        return
    events = timeline(iteration.passes)
    for row in zip(*(getattr(events, name) for name in Turn._fields), strict=True):
        yield Turn(*map(float, row))


def _before(iteration: Iteration) -> dict[tuple[str, str], OperatorCost]:
    """The kernel before each product that reads a copy, by block and name, where the GPU makes them."""
    if iteration.passes.weight_copies is None or iteration.passes.weight_copies.quantised.made_by != "gpu":
        return {}
    return {(part.block.name, part.op.name): cost for part, cost in kernels(iteration.passes)}
