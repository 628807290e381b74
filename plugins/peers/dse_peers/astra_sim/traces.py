"""A task graph of all GPUs as ASTRA-sim's traces: one program for every GPU, as it is written for many.

The tasks of a GPU at one place of its order are a *step*, the same for every GPU. Transfers of all peers that wait for
the same, and are of one size, become one collective (a direct all-to-all, whose messages are those of the transfers);
a transfer of one peer becomes a message that is sent and received. Launches run on the host, in whole microseconds;
everything else runs on the GPU, for as long as it takes alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dse_chakra.files import TraceNode
from dse_peers.astra_sim.program import GIB, Setup
from simulators.taskgraph.graph import Floats, TaskGraph

_SAME = 1e-6  # relative: rates and delays that count as one
_FLOP_PER_S = 1e12  # peak of its roofline: a kernel's time becomes work, as times of kernels are whole microseconds
# no splits, first come first served, direct messages: the order is that of the graph
_SYSTEM = {
    "scheduling-policy": "FIFO",
    "endpoint-delay": 1,
    "active-chunks-per-dimension": 1,
    "preferred-dataset-splits": 1,
    **{f"{kind}-implementation": ["direct"] for kind in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")},
    "collective-optimization": "baseline",
    "local-mem-bw": 1e9,
    "boost-mode": 0,
    "roofline-enabled": 1,
    "peak-perf": _FLOP_PER_S * 1e-12,
}
_NAMED = re.compile(r"hbm\.(\d+)")
_RING = ("link.cw", "link.ccw")
_TOPOLOGIES = {"port": "Switch", "link": "FullyConnected"}  # by the first part of the name of what messages share


class Unfit(Exception):
    """A graph that ASTRA-sim's traces cannot say, with the reason."""


@dataclass(frozen=True)
class ProgramStep:
    """Tasks of every GPU at one place, or at several if they are one collective.

    tasks [G, places]. after: numbers of the steps that come before. sources [G, places]: GPUs that a transfer comes
    from; empty for other tasks. seconds: alone, with its delay; of transfers without it.
    """

    tasks: tuple[tuple[int, ...], ...]
    after: tuple[int, ...]
    kind: str
    seconds: float
    num_bytes: float = 0.0
    sources: tuple[tuple[int, ...], ...] = ()


def steps_of(graph: TaskGraph, design: int) -> list[ProgramStep]:
    """The steps of one design. Raises Unfit."""
    rows = _rows(graph)
    # seconds without contention, which the network of ASTRA-sim adds
    alone = graph["work"][design] / graph.isolated_rate()[design]
    times = alone + graph["delay"][design]
    # place of a task in the order of its GPU: the number of its step
    place = {task: number for row in rows for number, task in enumerate(row)}
    steps, step_of = list[ProgramStep](), list[int]()
    for number, tasks in enumerate(zip(*rows, strict=True)):
        kinds = {graph.kinds[task] for task in tasks}
        before = {frozenset(place[earlier] for earlier in graph.predecessors(task).tolist()) for task in tasks}
        if len(kinds) > 1 or len(before) > 1 or np.ptp(times[list(tasks)]) > _SAME * times[list(tasks)].max():
            raise Unfit("its GPUs do not all do the same: ASTRA-sim is given one program for all of them")
        # one of each, by the check above
        (kind,), (deps,) = kinds, before
        if any(earlier >= number for earlier in deps):
            raise Unfit("a GPU waits for what another one does later in its own order")
        # transfers that were joined are one step
        after = tuple(sorted({step_of[earlier] for earlier in deps}))
        if kind != "transfer":
            steps.append(ProgramStep(tuple((task,) for task in tasks), after, kind, float(times[list(tasks)].max())))
        else:
            size, seconds = float(graph["work"][design, tasks[0]]), float(alone[tasks[0]])
            sources = tuple((_source(graph, task),) for task in tasks)
            step = ProgramStep(tuple((task,) for task in tasks), after, kind, seconds, size, sources)
            if steps and _joins(steps[-1], step):
                steps[-1] = _joined(steps[-1], step)
            else:
                steps.append(step)
        step_of.append(len(steps) - 1)
    return steps


def _rows(graph: TaskGraph) -> list[list[int]]:
    """Tasks of each GPU, in their order. Raises Unfit."""
    if any(name.startswith(_RING) for name in graph.resources):
        raise Unfit("on a ring ASTRA-sim would send one way at a time, as it has one message of a GPU in flight")
    if (graph.pool >= 0).any():
        raise Unfit("its tasks wait for slots, which ASTRA-sim does not have")
    rows = [np.flatnonzero(graph.gpu == gpu).tolist() for gpu in np.unique(graph.gpu).tolist()]
    if len(rows) < 2 or len({len(row) for row in rows}) > 1:
        raise Unfit("it has one GPU, or GPUs with unlike numbers of tasks")
    return rows


def _source(graph: TaskGraph, task: int) -> int:
    """The GPU whose memory a transfer reads, beside that of its own. Raises Unfit."""
    names = [graph.resources[resource] for resource in graph.use_resource[graph.use_task == task].tolist()]
    named = [int(match[1]) for name in names if (match := _NAMED.fullmatch(name))]
    # a transfer reads the memory of its source and writes its own
    remote = [gpu for gpu in named if gpu != graph.gpu[task]]
    if len(remote) != 1:
        raise Unfit("a transfer does not come from one other GPU")
    return remote[0]


def _joins(step: ProgramStep, other: ProgramStep) -> bool:
    """True for transfers of unlike peers that wait for the same and are of one size."""
    alike = step.kind == "transfer" and step.after == other.after and step.num_bytes == other.num_bytes
    pairs = zip(step.sources, other.sources, strict=True) if alike else ()
    # a second transfer from the same GPU is no part of the same collective
    return alike and not any(set(mine) & set(theirs) for mine, theirs in pairs)


def _joined(step: ProgramStep, other: ProgramStep) -> ProgramStep:
    tasks = tuple((*mine, *theirs) for mine, theirs in zip(step.tasks, other.tasks, strict=True))
    sources = tuple((*mine, *theirs) for mine, theirs in zip(step.sources, other.sources, strict=True))
    return replace(step, tasks=tasks, sources=sources, seconds=max(step.seconds, other.seconds))


def setup_of(graph: TaskGraph, design: int, steps: Sequence[ProgramStep]) -> Setup:
    """The network that steps need: its links have the rate that transfers have alone. Raises Unfit."""
    moving = [step for step in steps if step.kind == "transfer"]
    num_gpus = len(steps[0].tasks)
    if not moving:
        # any network will do
        return Setup("FullyConnected", 1.0, 0.0, _SYSTEM)
    if any(len(step.sources[0]) not in (1, num_gpus - 1) for step in moving):
        raise Unfit("a GPU receives from some of its peers at once: ASTRA-sim sends one message, or one to each peer")
    first = {graph.resources[resource].partition(".")[0] for resource in graph.use_resource.tolist()}
    shared = [name for name in _TOPOLOGIES if name in first]
    if len(shared) != 1:
        raise Unfit("its links are neither to a switch nor between all pairs")
    delays = graph["delay"][design][graph.of_kind("transfer")]
    rates = np.array([step.num_bytes / step.seconds for step in moving])
    if shared == ["port"]:
        port = min(
            capacity
            for name, capacity in zip(graph.resources, graph["capacity"][design].tolist(), strict=True)
            if name.startswith("port.")
        )
        # transfers from all peers share a port: together they run at its rate
        rates = np.minimum(port, rates * np.array([len(step.sources[0]) for step in moving]))
    if np.ptp(rates) > _SAME * rates.max() or np.ptp(delays) > _SAME * max(delays.max(), 1e-12):
        raise Unfit("its transfers have unlike rates or set-ups, and links of ASTRA-sim's network have one")
    # a message crosses two links at a switch, each with the latency of the network
    hops = 2 if shared == ["port"] else 1
    return Setup(_TOPOLOGIES[shared[0]], float(rates[0]) / GIB, float(delays[0]) * 1e9 / hops, _SYSTEM)


def traces_of(steps: Sequence[ProgramStep]) -> list[list[TraceNode]]:
    """Nodes of each GPU: those of step `n` have the ids 2 n, and 2 n + 1 for what is sent. Raises Unfit."""
    num_gpus = len(steps[0].tasks)
    return [
        [node for number, step in enumerate(steps) for node in _nodes(number, step, gpu, num_gpus)]
        for gpu in range(num_gpus)
    ]


def _nodes(number: int, step: ProgramStep, gpu: int, num_gpus: int) -> list[TraceNode]:
    deps, name = tuple(2 * earlier for earlier in step.after), f"{step.kind} {number}"
    if step.kind == "launch":
        return [TraceNode(2 * number, name, "COMP_NODE", step.seconds, data_deps=deps, on_host=True)]
    if step.kind != "transfer":
        # 1 TFLOP/s: a FLOP is a picosecond
        work = max(1, round(step.seconds * _FLOP_PER_S))
        return [TraceNode(2 * number, name, "COMP_NODE", 0.0, data_deps=deps, flop=work, moved_bytes=1)]
    size = max(1, round(step.num_bytes))
    if len(step.sources[gpu]) > 1:
        node = TraceNode(2 * number, name, "COMM_COLL_NODE", 0.0, data_deps=deps, payload_bytes=size * num_gpus)
        return [replace(node, collective="ALL_TO_ALL")]  # each peer gets its part of the payload
    # who reads from this GPU: it has to send to them
    receivers = [other for other in range(num_gpus) if step.sources[other] == (gpu,)]
    if len(receivers) != 1:
        raise Unfit("a GPU sends to several others, or to none, while each of them receives from one")
    received = TraceNode(2 * number, name, "COMM_RECV_NODE", 0.0, data_deps=deps, payload_bytes=size, tag=number)
    received = replace(received, source=step.sources[gpu][0], destination=gpu)
    # the same tag joins both ends
    sent = replace(received, id=2 * number + 1, name=f"{name} sent", type="COMM_SEND_NODE")
    return [received, replace(sent, source=gpu, destination=receivers[0])]


def spread(times: Floats, steps: Sequence[ProgramStep], num_tasks: int) -> Floats:
    """Times [2, T] of tasks from those of steps [2, steps, G]."""
    spread_times = np.zeros((2, num_tasks))
    for number, step in enumerate(steps):
        for gpu, tasks in enumerate(step.tasks):
            spread_times[:, list(tasks)] = times[:, number, gpu, None]
    return spread_times
