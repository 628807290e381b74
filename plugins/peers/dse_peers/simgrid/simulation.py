"""Runs task graphs in SimGrid: `python3 simulation.py < graphs.json`, by an interpreter that has SimGrid's module.

Input: a list of graphs {"model": "flows" or "tasks", "capacity": [per resource], "slots": [per pool], "tasks":
[{"after": [tasks], "delay", "amounts": {resource: amount}, "pool": number or -1}, ...]}.

flows: resources are links, and a task is a flow of that many whole bytes through its links, all of one amount (network
model CM02, plain: no latency, no corrections for TCP). tasks: resources are hosts, and a task is a parallel task, whose
amounts progress together (model ptask_L07; where a resource is short, the solver "fairbottleneck" decides).

Output: {"times": for each graph [[issued...], [finished...]], "seconds": CPU time of all runs}. A process can hold one
engine, so that each graph is run by a child of its own.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from typing import Any

from simgrid import Actor, Comm, Engine, LinkInRoute, NetZone, Semaphore, this_actor

# tighter than SimGrid's defaults: tasks may take microseconds
_PRECISE = ("surf/precision:1e-12", "maxmin/precision:1e-12")
_FLOWS = (
    *("network/model:CM02", "network/crosstraffic:0", "network/latency-factor:1", "network/bandwidth-factor:1"),
    *("network/weight-S:0", "network/loopback-lat:0"),
)
_TASKS = ("host/model:ptask_L07", "host/solver:fairbottleneck")


def main() -> int:
    """Run each graph in a child; return 1 where one of them failed, which has said why."""
    times = []
    for graph in json.load(sys.stdin):
        here, there = os.pipe()
        if (child := os.fork()) == 0:
            os.close(here)
            with os.fdopen(there, "w") as answer:
                json.dump(_run(graph), answer)
            # without the clean-up of an interpreter that holds an engine
            os._exit(0)
        os.close(there)
        with os.fdopen(here) as answer:
            text = answer.read()
        # read before waiting: a full pipe would block the child
        if os.waitpid(child, 0)[1] or not text:
            return 1
        times.append(json.loads(text))
    used = os.times()
    # CPU time of the children, not of reading and writing
    print(json.dumps({"times": times, "seconds": used.children_user + used.children_system}))
    return 0


def _run(graph: Any) -> list[list[float]]:
    engine = Engine(["tasks", "--log=root.thresh:critical"])
    for setting in (*_PRECISE, *(_FLOWS if graph["model"] == "flows" else _TASKS)):
        Engine.set_config(setting)
    times = [[0.0] * len(graph["tasks"]), [0.0] * len(graph["tasks"])]
    zone = NetZone.create_full_zone("zone")
    if graph["model"] == "flows":
        ends = _linked_hosts(zone, graph)
        Actor.create("driver", ends[0][0], _drive, graph, ends, times)
    else:
        _create_actors(zone, graph, times)
    engine.run()
    return times


def _linked_hosts(zone: Any, graph: Any) -> list[tuple[Any, Any]]:
    """A pair of hosts for each set of links, joined by them; the pair of each task."""
    links = [
        zone.create_link(f"link{i}", [capacity]).set_latency(0).seal() for i, capacity in enumerate(graph["capacity"])
    ]
    pairs: dict[tuple[str, ...], tuple[Any, Any]] = {}
    for task in graph["tasks"]:
        # tasks with the same links share a pair of hosts
        key = tuple(task["amounts"])
        if key not in pairs:
            pairs[key] = tuple(zone.create_host(f"{end}{len(pairs)}", 1e9).seal() for end in ("from", "to"))
            # one direction only: links of the graph are one-way already
            route = [LinkInRoute(links[int(link)]) for link in key]
            zone.add_route(pairs[key][0].netpoint, pairs[key][1].netpoint, None, None, route, False)
    zone.seal()
    return [pairs[tuple(task["amounts"])] for task in graph["tasks"]]


def _drive(graph: Any, ends: list[tuple[Any, Any]], times: list[list[float]]) -> None:
    """The actor that starts all flows, each when those before it have ended."""
    tasks = graph["tasks"]
    left = [len(task["after"]) for task in tasks]
    followers: list[list[int]] = [[] for _ in tasks]
    for index, task in enumerate(tasks):
        for before in task["after"]:
            followers[before].append(index)
    ready = [index for index, count in enumerate(left) if count == 0]
    running: list[Any] = []
    number: list[int] = []
    while ready or running:
        for index in ready:
            times[0][index] = Engine.clock
            comm = Comm.sendto_init(*ends[index])
            running.append(comm.set_payload_size(next(iter(tasks[index]["amounts"].values()))).start())
            number.append(index)
        # flows that end at one time are returned one by one, without the clock moving
        place = Comm.wait_any(running)
        ended = number.pop(place)
        running.pop(place)
        times[1][ended] = Engine.clock
        ready = []
        for index in followers[ended]:
            left[index] -= 1
            if left[index] == 0:
                ready.append(index)


def _create_actors(zone: Any, graph: Any, times: list[list[float]]) -> None:
    """An actor for each task."""
    hosts = [zone.create_host(f"resource{i}", [speed]).seal() for i, speed in enumerate(graph["capacity"])]
    home = zone.create_host("home", [1.0]).seal()
    zone.seal()
    # opened once for each task that waits
    ended = [Semaphore(0) for _ in graph["tasks"]]
    pools = [Semaphore(slots) for slots in graph["slots"]]
    followers = Counter(before for task in graph["tasks"] for before in task["after"])

    def play(index: int) -> None:
        """Wait for those before it and for a slot, work, and let the others know."""
        task = graph["tasks"][index]
        slot = [pools[task["pool"]]] if task["pool"] >= 0 else []
        # the slot last: a task that waits for others must not hold one
        for awaited in [*(ended[before] for before in task["after"]), *slot]:
            awaited.acquire()
        times[0][index] = Engine.clock
        _work(task, hosts)
        times[1][index] = Engine.clock
        for free in [*slot, *[ended[index]] * followers[index]]:
            free.release()

    for index in range(len(ended)):
        Actor.create(f"task{index}", home, play, index)


def _work(task: Any, hosts: list[Any]) -> None:
    """Wait for the delay and the amounts of a task."""
    if task["delay"] > 0:
        this_actor.sleep_for(task["delay"])
    if task["amounts"]:
        used = [hosts[int(resource)] for resource in task["amounts"]]
        # no bytes between the hosts: the matrix of messages is zero
        this_actor.parallel_execute(used, list(task["amounts"].values()), [0.0] * len(used) ** 2)


if __name__ == "__main__":
    sys.exit(main())
