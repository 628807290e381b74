"""Task graphs and profiles as execution traces of Chakra, and back.

A lowered design is written as it ran: each task with the time that the engine gave it, contention and all, so that who
runs the trace need not know what slowed it down. A task that takes a slot after another one waits for it (`ctrl_deps`,
and `data_deps` as well, which is what feeders wait for). Then the longest path through the trace is the makespan.

The bytes of a collective in a trace (`comm_size`) are those that go into it, as ASTRA-sim takes them: it multiplies
those of an all-gather by the ranks of the group (`Ring.cc`, commit 7c775188).
"""

from __future__ import annotations

import heapq
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dse import plugins
from dse_chakra.files import ExecutionTrace, TraceNode
from dse_traces.profile.kernel_classes import COMMUNICATES
from dse_traces.profile.kernels import Profile, profile_of
from dse_traces.profile.payloads import pattern_of, payload_bytes
from dse_traces.profile.replay import ENGINE, Replayed, lower_kernels
from simulators.taskgraph.graph import GraphBuilder, TaskGraph
from simulators.taskgraph.timeline import Timeline

# kinds of tasks that Chakra writes as collectives
_MOVES = ("transfer", *COMMUNICATES)
# kinds that no stream of a GPU runs
_HOST = ("launch", "host", "delay", "waiting")
_KINDS = {"MEM_LOAD_NODE": "copy", "MEM_STORE_NODE": "copy", "COMP_NODE": "compute"}
_NAMES = {  # what names of tasks and kernels hold, without _ and -, the most particular first
    "ALL_REDUCE": r"allreduce|crossdevicereduce",
    "REDUCE_SCATTER": r"reducescatter",
    "ALL_GATHER": r"allgather",
    "ALL_TO_ALL": r"alltoall|sendrecv|dispatch|combine",
    "BROADCAST": r"broadcast",
    "REDUCE": r"nccl\w*reduce",
}


def collective_of(name: str) -> str:
    """The collective that the name of a task or kernel tells of, or "".

    >>> collective_of("layer 3: all-reduce ffn"), collective_of("ncclDevKernel_SendRecv"), collective_of("piece 0")
    ('ALL_REDUCE', 'ALL_TO_ALL', '')
    """
    plain = re.sub(r"[-_ ]", "", name).lower()
    return next((collective for collective, pattern in _NAMES.items() if re.search(pattern, plain)), "")


def trace_of_run(timeline: Timeline, *, gpu: int = 0, collective: str = "", group_size: int = 0) -> ExecutionTrace:
    """The execution trace of the first design of a run, as far as it is accounted on one GPU.

    collective: of transfers whose names tell of none; without it they are written as computation, and counted. So are
    dependencies on tasks of other GPUs, which are not written. Nodes are in the order in which they began.
    """
    graph, slots, nodes, lost = timeline.graph, _slot_order(timeline), list[TraceNode](), 0
    # in the order of begins, which feeders take as the order of issue
    for task in (place for place in _order(timeline) if graph.gpu[place] == gpu):
        before = [int(place) for place in graph.predecessors(task)]
        # a slot frees up when its task ends: whoever takes it next depends on that end
        control = [place for place in slots.get(task, ()) if place not in before]
        data, control = ([place for place in ids if graph.gpu[place] == gpu] for ids in (before, control))
        # a trace is of one rank: it cannot name nodes of another trace
        lost += len(before) - len(data)
        node = _node_of(timeline, task, collective)
        size = group_size if node.collective else 0
        nodes.append(replace(node, data_deps=(*data, *control), ctrl_deps=tuple(control), group_size=size))
    # a transfer without a pattern would not be a legal collective
    plain = sum(node.kind in _MOVES and not node.communicates for node in nodes)
    dropped = {"dependencies on tasks of other GPUs": lost, "collectives' types, so that they are computation": plain}
    return ExecutionTrace(tuple(nodes), dropped={reason: count for reason, count in dropped.items() if count})


def _node_of(timeline: Timeline, task: int, collective: str) -> TraceNode:
    """A task of the first design of a run as a node, without its dependencies."""
    graph, moves = timeline.graph, timeline.graph.kinds[task] in _MOVES
    moved, flop = (round(float(graph.values[graph.at[name][task]].flat[0])) for name in ("moved_bytes", "flop"))
    issued, finished = float(timeline.issued[0, task]), float(timeline.finished[0, task])
    pattern = (collective_of(graph.tasks[task]) or collective) if moves else ""
    return TraceNode(
        id=task,
        name=graph.tasks[task],
        type="COMM_COLL_NODE" if pattern else "COMP_NODE",
        # from issue to end: delay and contention are part of the recorded time
        seconds=finished - issued,
        start_s=issued,
        collective=pattern,
        payload_bytes=moved if moves else 0,
        flop=flop,
        moved_bytes=0 if moves else moved,
        lane=graph.lanes[task],
        kind=graph.kinds[task],
        on_host=graph.kinds[task] in _HOST,
    )


def _order(timeline: Timeline) -> list[int]:
    """Tasks in the order in which they began; what began and ended at once, in theirs. Predecessors come first."""
    return np.lexsort((timeline.finished[0], timeline.issued[0])).tolist()  # type: ignore[no-any-return]


def _slot_order(timeline: Timeline) -> dict[int, tuple[int, ...]]:
    """The task that had the slot before it, of each task that takes a slot after another one."""
    graph, finished = timeline.graph, timeline.finished[0].tolist()
    free: dict[int, list[tuple[float, int, int]]] = defaultdict(list)
    before: dict[int, tuple[int, ...]] = {}
    for place, task in enumerate(_order(timeline)):
        if (pool := int(graph.pool[task])) < 0:
            continue
        # all slots are taken: the task takes the one that becomes free first
        if len(free[pool]) == graph.slots[pool]:
            before[task] = (heapq.heappop(free[pool])[2],)
        heapq.heappush(free[pool], (finished[task], place, task))
    return before


def trace_of_profile(done: Replayed) -> ExecutionTrace:
    """The execution trace of a replayed profile: launches as one thread of the host, and kernels after them.

    A kernel that others begin beside is written in parts, each with its share of the payload.
    """
    graph, first, last = lower_kernels(done.profile, done.waits)
    trace = trace_of_run(plugins.load("engine", ENGINE).run(graph))
    kernels = done.profile.kernels
    payload, group = (kernels[name].fillna(0).to_numpy(float) for name in ("payload_bytes", "group_size"))
    # tasks of a kernel are numbered in a row, launches lie outside of all rows
    kernel_of = np.full(graph.num_tasks, -1)
    for kernel, (begin, end) in enumerate(zip(first, last, strict=True)):
        kernel_of[begin : end + 1] = kernel
    seconds, nodes = done.profile.seconds, []
    for node in trace.nodes:
        if node.communicates and (kernel := int(kernel_of[node.id])) >= 0:
            # a part's payload is in proportion to its time, at most the whole
            share = min(node.seconds / seconds[kernel], 1.0) if seconds[kernel] else 1.0
            size, ranks = share * payload[kernel], round(group[kernel])
            # feeders take what goes in: of an all-gather that is a shard of the payload
            size /= max(ranks, 1) if node.collective == "ALL_GATHER" else 1
            nodes.append(replace(node, payload_bytes=round(size), group_size=ranks))
        else:
            nodes.append(node)
    return replace(trace, nodes=tuple(_host_thread(nodes)), source=done.profile.source)


def _host_thread(nodes: Sequence[TraceNode]) -> Iterator[TraceNode]:
    """Yield the same nodes, those of the host that wait for nothing one after another: each since the last one ended.

    Simulators run operators of the host one at a time, so launches must not all begin at the start.
    """
    # what the host starts by itself: other nodes of the host wait for their own predecessors
    thread = sorted((node for node in nodes if node.on_host and not node.data_deps), key=lambda node: node.seconds)
    chain: dict[int, TraceNode] = {}
    for before, node in zip([None, *thread], thread, strict=False):
        if before is None:
            chain[node.id] = node
        else:
            begin, after = before.start_s + before.seconds, (before.id,)
            # absolute delays become differences, so that each launch still comes at its time
            seconds = node.start_s + node.seconds - begin
            chain[node.id] = replace(node, start_s=begin, seconds=seconds, data_deps=after)
    yield from sorted((chain.get(node.id, node) for node in nodes), key=lambda node: (node.start_s, node.seconds))


def task_graph_of(trace: ExecutionTrace) -> TaskGraph:
    """The task graph of an execution trace: tasks in an order of their dependencies, each as long as it took."""
    graph, places = GraphBuilder(), dict[int, int]()
    for node, before in _in_order(trace)[0]:
        moved = float(node.payload_bytes if _moves(node) else node.moved_bytes)
        # a rate of 1 and work in seconds: each task lasts as long as recorded
        numbers: dict[str, Any] = {"work": node.seconds, "cap": 1.0, "flop": float(node.flop), "moved_bytes": moved}
        after = [places[place] for place in before]
        places[node.id] = graph.task(node.name, _kind(node), after=after, lane=_stream(node), **numbers)
    return graph.build()


def profile_of_trace(trace: ExecutionTrace) -> Profile:
    """The profile of what an execution trace ran on a GPU. Raises ConfigError without any.

    Without recorded times, nodes begin when those that they wait for have ended, also those of the host, and one after
    another on each stream. A kernel was launched when the last node of the host that it waits for had ended.
    """
    nodes, cut = _in_order(trace)
    # NaN is not equal to itself: one node without a time makes all times useless
    recorded = all(node.start_s == node.start_s for node in trace.nodes)
    starts = {node.id: node.start_s for node in trace.nodes} if recorded else _starts(nodes)
    ends, rows = {node.id: starts[node.id] + node.seconds for node in trace.nodes}, []
    hosts = {node.id for node in trace.nodes if node.on_host}
    for node, before in nodes:
        if not node.on_host and node.type not in ("METADATA_NODE", "INVALID_NODE"):
            launch = max((ends[place] for place in before if place in hosts), default=None)
            rows.append(_row(node) | {"start_s": starts[node.id], "seconds": node.seconds, "launch_s": launch})
    dropped = dict(trace.dropped) | ({"dependencies that go round in a circle": cut} if cut else {})
    return profile_of(rows, trace.source, dropped=dropped)


def _starts(nodes: Sequence[tuple[TraceNode, tuple[int, ...]]]) -> dict[int, float]:
    """When each node begins [s], by id: of those of a stream whose dependencies have ended, the first to be ready."""
    after, left = defaultdict[int, list[int]](list), [len(before) for _, before in nodes]
    for place, (_, before) in enumerate(nodes):
        for other in before:
            after[other].append(place)
    queues, starts, earliest = _Streams(), dict[int, float](), [0.0] * len(nodes)
    for place, count in enumerate(left):
        if not count:
            queues.add(_stream(nodes[place][0]), 0.0, place)
    while (following := queues.next()) is not None:
        begin, place = following
        node = nodes[place][0]
        starts[node.id], end = begin, begin + node.seconds
        queues.run(_stream(node), end)
        for later in after[node.id]:
            left[later], earliest[later] = left[later] - 1, max(earliest[later], end)
            if not left[later]:
                queues.add(_stream(nodes[later][0]), earliest[later], later)
    return starts


class _Streams:
    """Queues of tasks by stream, each with the time at which it is ready; the next one is that which begins first."""

    def __init__(self) -> None:
        self._ready = defaultdict[str, list[tuple[float, int]]](list)
        self._free, self._begin = defaultdict[str, float](float), defaultdict[str, float](lambda: np.inf)
        self._heads: list[tuple[float, str]] = []

    def add(self, stream: str, ready: float, task: int) -> None:
        """Queue a task of a stream."""
        heapq.heappush(self._ready[stream], (ready, task))
        self._show(stream)

    def next(self) -> tuple[float, int] | None:
        """Start of the next task, and the task; None where none is left. `run` must follow."""
        while self._heads:
            begin, stream = heapq.heappop(self._heads)
            # heads that were overtaken by an earlier task of their stream are out of date
            if begin == self._begin[stream]:
                return begin, heapq.heappop(self._ready[stream])[1]
        return None

    def run(self, stream: str, end: float) -> None:
        """Let a stream be busy until a time."""
        self._free[stream], self._begin[stream] = end, np.inf
        self._show(stream)

    def _show(self, stream: str) -> None:
        if self._ready[stream]:
            begin = max(self._free[stream], self._ready[stream][0][0])
            # a heap cannot change an entry: the earlier one is added, and the old one is passed over
            if begin < self._begin[stream]:
                self._begin[stream] = begin
                heapq.heappush(self._heads, (begin, stream))


def _row(node: TraceNode) -> dict[str, Any]:
    row: dict[str, Any] = {"name": node.name or node.type, "stream": _stream(node)}
    if not _moves(node):
        return row
    collective, ranks = node.collective.lower() or "unknown", node.group_size or None
    # bytes stand for elements of one byte, that go in
    moved = node.payload_bytes or None, None
    return row | {
        "collective": collective,
        "payload_bytes": payload_bytes(pattern_of(collective), moved, "Byte", ranks),
        "group_size": ranks,
    }


def _moves(node: TraceNode) -> bool:
    return node.communicates or node.kind in _MOVES


def _stream(node: TraceNode) -> str:
    return node.lane or ("host" if node.on_host else "communication" if node.communicates else "computation")


def _kind(node: TraceNode) -> str:
    return node.kind or ("collective" if node.communicates else _KINDS.get(node.type, "other"))


def _in_order(trace: ExecutionTrace) -> tuple[list[tuple[TraceNode, tuple[int, ...]]], int]:
    """(Node, ids of those that it waits for) after those, in an order near that of the file; and how many were cut.

    Feeders of simulators wait for `data_deps`; `ctrl_deps` count where a trace has nothing else. Of nodes that wait for
    one another in a circle, the first one in the file does not wait.
    """
    by_data = any(node.data_deps for node in trace.nodes)
    waits = {node.id: set(node.data_deps if by_data else node.ctrl_deps) for node in trace.nodes}
    places = {node.id: place for place, node in enumerate(trace.nodes)}
    after, left = defaultdict[int, list[int]](list), {place: len(waits[node]) for node, place in places.items()}
    for waiting, before in waits.items():
        for other in before:
            after[other].append(places[waiting])
    ready, order, cut = (
        [place for place, count in left.items() if not count],
        list[tuple[TraceNode, tuple[int, ...]]](),
        0,
    )
    in_file = iter(range(len(trace.nodes)))
    while left:
        if not ready:
            # everything left waits in a circle: the first one in the file breaks it
            ready.append(next(place for place in in_file if place in left))
        # a heap by places keeps the order near that of the file
        place = heapq.heappop(ready)
        node, missing = trace.nodes[place], left.pop(place)
        cut += missing
        order.append((node, tuple(other for other in waits[node.id] if places[other] not in left and other != node.id)))
        for later in after[node.id]:
            if later in left:
                left[later] -= 1
                if not left[later]:
                    heapq.heappush(ready, later)
    return order, cut
