"""Runs flows in SimGrid: `python3 simgrid_flows.py < flows.json`, by an interpreter that has SimGrid's module.

Input: {"links": [capacity, ...], "tasks": [{"work", "links": [...], "after": [...]}, ...]}, works whole numbers. A
task is one flow that uses one unit of each of its links per unit of work; it starts when those before it have ended.
(A flow's rate cannot be capped from Python in SimGrid 3.32; a link of its own does the same.)
Output: {"finished": [...], "seconds": CPU time of the run}. SimGrid's own time unit is the second, its precision is
raised, and its network model is the plain fluid one (no latency, no TCP corrections).
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from simgrid import Actor, Comm, Engine, LinkInRoute, NetZone

_CONFIG = {
    "network/model": "CM02",
    "network/crosstraffic": "0",
    "network/latency-factor": "1",
    "network/bandwidth-factor": "1",
    "network/weight-S": "0",
    "network/loopback-lat": "0",
    "surf/precision": "1e-12",
    "maxmin/precision": "1e-12",
}


def main() -> None:
    """One simulation: a process can hold one engine."""
    graph = json.load(sys.stdin)
    engine = Engine(["flows", "--log=root.thresh:critical"])
    for key, value in _CONFIG.items():
        Engine.set_config(f"{key}:{value}")
    ends = _platform(graph)
    finished = [0.0] * len(graph["tasks"])
    Actor.create("driver", ends[0][0], _drive, graph, ends, finished)
    began = time.process_time()
    engine.run()
    print(json.dumps({"finished": finished, "seconds": time.process_time() - began}))


def _platform(graph: Any) -> list[tuple[Any, Any]]:
    """A pair of hosts for each set of links, joined by them; the pair of each task."""
    zone = NetZone.create_full_zone("zone")
    links = [
        zone.create_link(f"link{i}", [capacity]).set_latency(0).seal() for i, capacity in enumerate(graph["links"])
    ]
    pairs: dict[tuple[int, ...], tuple[Any, Any]] = {}
    for task in graph["tasks"]:
        key = tuple(task["links"])
        if key not in pairs:
            pairs[key] = tuple(zone.create_host(f"{end}{len(pairs)}", 1e9).seal() for end in ("from", "to"))
            route = [LinkInRoute(links[link]) for link in key]
            zone.add_route(pairs[key][0].netpoint, pairs[key][1].netpoint, None, None, route, False)
    zone.seal()
    return [pairs[tuple(task["links"])] for task in graph["tasks"]]


def _drive(graph: Any, ends: list[tuple[Any, Any]], finished: list[float]) -> None:
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
            comm = Comm.sendto_init(*ends[index])
            running.append(comm.set_payload_size(tasks[index]["work"]).start())
            number.append(index)
        place = Comm.wait_any(running)
        done = number.pop(place)
        running.pop(place)
        finished[done] = Engine.clock
        ready = []
        for index in followers[done]:
            left[index] -= 1
            if left[index] == 0:
                ready.append(index)


if __name__ == "__main__":
    main()
