"""Schedules of collectives as task graphs, run by any engine.

A message is a task that takes its link for its bytes (and the time of a message), after the message before it on the
link; it arrives the link's latency later, which is a task of its own, so that a link is free while data is on its way.
One that stays on a GPU is no task: what waits for it waits for what it waits for.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dse import plugins
from dse.errors import ConfigError, Problem
from dse_collectives.explicit import CollectiveSchedule, waits
from dse_collectives.topology import LinkTopology
from simulators.taskgraph.graph import GraphBuilder, TaskGraph
from simulators.taskgraph.timeline import Timeline


def lower_schedule(schedule: CollectiveSchedule, topology: LinkTopology, num_bytes: ArrayLike) -> TaskGraph:
    """The task graph of a schedule of tensors of `num_bytes`: one, or a design for each of several sizes.

    Raises ConfigError for a message without a link.
    """
    if schedule.num_gpus != topology.num_gpus:
        rule = f"is for {schedule.num_gpus} GPUs, where {topology.name} has {topology.num_gpus}"
        raise ConfigError([Problem("schedule", rule)])
    builder = GraphBuilder()
    ports = {port: builder.resource(port, rate) for port, rate in topology.ports.items()}
    shares, tensor = [schedule.share(chunk) for chunk in schedule.chunks], np.asarray(num_bytes, float)
    works: dict[float, NDArray[np.float64]] = {}  # equal ones share a column of the graph
    last: dict[tuple[int, int], int] = {}
    arrivals: list[tuple[int, ...]] = []  # tasks that end when a message is there
    for place, (message, before) in enumerate(zip(schedule.messages, waits(schedule), strict=True)):
        needed = sorted({task for earlier in before for task in arrivals[earlier]})
        if message.is_local:
            arrivals.append(tuple(needed))
            continue
        ends = message.source, message.target
        link = topology.by_ends.get(ends)
        if link is None:
            raise ConfigError([Problem("schedule", f"message {place} ({message}) has no link on {topology.name}")])
        # a link carries one message at a time, in the order of the schedule
        after = needed + ([last[ends]] if ends in last else [])
        share = sum(shares[chunk] for chunk in message.chunks)
        work = works.setdefault(share, share * tensor)
        last[ends] = builder.task(
            f"{place}: {', '.join(str(schedule.chunks[chunk]) for chunk in message.chunks[:3])}",
            f"message {place}",  # a kind for each, or the closed form would need the union of all intervals
            after=after,
            # ports shared by several links are shared by the engine
            uses={ports[port]: load for port, load in link.loads.items()},
            work=work,
            delay=link.message_s,
            moved_bytes=work,
            lane=f"GPU {ends[0]} to {ends[1]}",
            limiter="links",
        )
        arrival = builder.task(
            f"{place} arrives",
            f"latency {place}",
            after=[last[ends]],
            delay=link.latency_s,
            lane=f"GPU {ends[0]} to {ends[1]}: on its way",
            limiter="latency",
        )
        arrivals.append((arrival,))
    return builder.build()


def replay_schedule(
    schedule: CollectiveSchedule, topology: LinkTopology, num_bytes: ArrayLike, engine: str = "fluid"
) -> Timeline:
    """The run of a schedule by an engine, by the engine's name. Raises ConfigError."""
    timeline: Timeline = plugins.load("engine", engine).run(lower_schedule(schedule, topology, num_bytes))
    return timeline


def seconds(schedule: CollectiveSchedule, topology: LinkTopology, num_bytes: ArrayLike) -> NDArray[np.float64]:
    """Time [s] of a schedule for each size, by the compiled engine."""
    return replay_schedule(schedule, topology, num_bytes).makespan
