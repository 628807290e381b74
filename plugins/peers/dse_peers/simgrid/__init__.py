"""SimGrid as an engine: a simulator of others, with its own way of sharing, on the same tasks.

Tasks that use one amount of each resource, without more, are flows through links, which SimGrid shares as our exact
engines do. All others are parallel tasks on hosts (its model ptask_L07): a resource is a host, the amounts of a task
progress together, and a task's own largest rate is a host of its own. What SimGrid does not know is left out:
contention laws, weights and priorities. Where nothing is contended, its times are those of every engine.

Needs an interpreter that can import `simgrid` (Debian's `python3-simgrid`).
"""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from dse.errors.parsing import parse_json
from simulators.taskgraph.graph import Floats, GraphBuilder, TaskGraph
from simulators.taskgraph.timeline import Timeline, Totals

_SCRIPT = Path(__file__).with_name("simulation.py")
_TIMEOUT_S = 600.0  # for all graphs of a call
_WHOLE = 1e9  # a flow has whole bytes: one unit of work is so many


class SimGridEngine:
    """Runs task graphs in SimGrid, several in one process. Raises RuntimeError where it fails or is not there."""

    version = "1"
    batch = 16
    exact = False

    def absence(self) -> str:
        """Why it cannot run on this machine, with the way out, or ""."""
        return "" if interpreter() else "no Python interpreter here can import simgrid: install python3-simgrid"

    def run(self, graph: TaskGraph) -> Timeline:
        """Issue and finish times of every task of every design."""
        answer = simulate([_describe(graph, design) for design in range(graph.num_designs)])
        times = np.array(answer["times"])
        return Timeline(graph, times[:, 0], times[:, 1])

    def totals(self, graph: TaskGraph) -> Totals:
        """Totals of the timelines."""
        return self.run(graph).totals()

    def cpu_s(self, graph: TaskGraph) -> float:
        """CPU time [s] that SimGrid takes for the first design."""
        return float(simulate([_describe(graph, 0)])["seconds"])

    def collective_s(self, kind: str, num_bytes: Floats, gpus: Floats, bytes_per_s: float, device: str = "") -> Floats:
        """Times [s] of N collectives among GPUs at a switch, as messages without latency.

        A ring, step by step, each message of which waits for what its GPU has received before; of an all-to-all, all
        messages at once. num_bytes, gpus [N]: of the larger buffer. bytes_per_s: of the port of a GPU, each way.
        device: not used.
        """
        graphs = [
            _describe(messages(kind, size, count, bytes_per_s), 0)
            for size, count in zip(num_bytes.tolist(), gpus.astype(int).tolist(), strict=True)
        ]
        return np.array([max(finished) for _, finished in simulate(graphs)["times"]])


def messages(kind: str, num_bytes: float, num_gpus: int, bytes_per_s: float) -> TaskGraph:
    """The messages of a collective among GPUs at a switch. See `SimGridEngine.collective_s`."""
    build = GraphBuilder()
    ports = [[build.resource(f"{way} {gpu}", bytes_per_s) for gpu in range(num_gpus)] for way in ("out", "in")]
    # a ring all-reduce scatters in n - 1 steps, and gathers in as many
    steps = 2 * (num_gpus - 1) if kind == "all_reduce" else num_gpus - 1
    at_once, received = kind == "all_to_all", list[int]()
    for step in range(steps):
        # all-to-all: to each other GPU in turn; ring: to the next one
        distance = step + 1 if at_once else 1
        received = [
            build.task(
                f"{step}.{gpu}",
                "transfer",
                after=[received[(gpu - 1) % num_gpus]] if received and not at_once else [],
                uses={ports[0][gpu]: 1.0, ports[1][(gpu + distance) % num_gpus]: 1.0},
                work=num_bytes / num_gpus,
            )
            for gpu in range(num_gpus)
        ]
    return build.build()


@functools.cache
def interpreter() -> str | None:
    """An interpreter that can import SimGrid, or None."""
    # SimGrid's module is a package of the distribution, for its own interpreter
    for python in dict.fromkeys([sys.executable, "/usr/bin/python3", shutil.which("python3") or ""]):
        if python and Path(python).exists():
            # in a folder of ours: an older interpreter has no flag that leaves the current one off its path
            words = [python, "-c", "import simgrid"]
            probe = subprocess.run(words, cwd=_SCRIPT.parent, capture_output=True, check=False)
            if probe.returncode == 0:
                return python
    return None


def simulate(graphs: list[dict[str, Any]]) -> dict[str, Any]:
    """Times of graphs, and the CPU time of their runs, as `simulation.py` writes them.

    Raises RuntimeError where SimGrid fails or is not there.
    """
    try:
        run = subprocess.run(
            [interpreter() or "python3", str(_SCRIPT)],
            input=json.dumps(graphs),
            capture_output=True,
            text=True,
            check=False,
            timeout=_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(f"SimGrid cannot be run: {error}") from error
    if run.returncode:
        raise RuntimeError(ENGINE.absence() or f"SimGrid failed: {run.stderr.strip()[-500:]}")
    answer: dict[str, Any] = parse_json(run.stdout, "SimGrid")
    return answer


def _describe(graph: TaskGraph, design: int) -> dict[str, Any]:
    """One design of a graph as `simulation.py` reads it."""
    numbers = {name: graph[name][design] for name in ("work", "delay", "cap", "capacity", "use")}
    uses: list[dict[int, float]] = [{} for _ in range(graph.num_tasks)]
    for task, resource, use in zip(graph.use_task.tolist(), graph.use_resource.tolist(), numbers["use"], strict=True):
        uses[task][resource] = float(use)
    flows = _holds_flows(graph, numbers, uses)
    capacity, tasks = numbers["capacity"].tolist(), list[dict[str, Any]]()
    for task, (work, cap) in enumerate(zip(numbers["work"].tolist(), numbers["cap"].tolist(), strict=True)):
        # what a task needs of each resource in all
        amounts = {resource: use * work for resource, use in uses[task].items() if work > 0}
        if flows:
            # the same whole bytes on all links of a flow
            amounts = {resource: round(work * _WHOLE) for resource in uses[task]}
        elif work > 0 and np.isfinite(cap):
            # a host of its own limits the task to its cap
            amounts[len(capacity)] = work
            capacity.append(cap)
        described = {"after": graph.predecessors(task).tolist(), "delay": float(numbers["delay"][task])}
        tasks.append({**described, "amounts": amounts, "pool": int(graph.pool[task])})
    if flows:
        capacity = [_WHOLE * rate for rate in capacity]
    return {"model": "flows" if flows else "tasks", "capacity": capacity, "tasks": tasks, "slots": graph.slots.tolist()}


def _holds_flows(graph: TaskGraph, numbers: dict[str, Floats], uses: list[dict[int, float]]) -> bool:
    """True if all tasks use one unit of some resources, and are limited by nothing else."""
    # a flow has no delay, cap or slot, and at least one byte
    free = (numbers["delay"] == 0) & np.isinf(numbers["cap"]) & (graph.pool < 0) & (numbers["work"] > 0)
    return bool(free.all()) and all(used and set(used.values()) == {1.0} for used in uses)


ENGINE = SimGridEngine()
