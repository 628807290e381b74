"""SimGrid as a peer: found where some Python interpreter of the machine has its module, and run as a process."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from simulators.taskgraph.graph import Floats, TaskGraph

_SCRIPT = Path(__file__).with_name("simgrid_flows.py")
_SCALE = 1e9  # SimGrid's work is in whole bytes: one unit of work is so many


@functools.cache
def simgrid_python() -> str | None:
    """An interpreter that can import SimGrid (Debian's `python3-simgrid` serves `/usr/bin/python3`), or None."""
    for python in dict.fromkeys([sys.executable, "/usr/bin/python3", shutil.which("python3") or ""]):
        if python and Path(python).exists():
            found = subprocess.run([python, "-c", "import simgrid"], capture_output=True, check=False)
            if found.returncode == 0:
                return python
    return None


def run_flows(graph: TaskGraph) -> tuple[Floats, float]:
    """(finish times [T] of the first design, CPU seconds) by SimGrid, of a graph it can express.

    Such a graph has uses of one unit, no delays, caps, weights, priorities or pools that matter; works are rounded to
    whole billionths. Raises RuntimeError where SimGrid fails.
    """
    uses: list[list[int]] = [[] for _ in range(graph.num_tasks)]
    for task, resource in zip(graph.use_task.tolist(), graph.use_resource.tolist(), strict=True):
        uses[task].append(resource)
    tasks = [
        {"work": round(work * _SCALE), "links": uses[task], "after": graph.predecessors(task).tolist()}
        for task, work in enumerate(graph["work"][0].tolist())
    ]
    links = [capacity * _SCALE for capacity in graph["capacity"][0].tolist()]
    found = subprocess.run(
        [str(simgrid_python()), str(_SCRIPT)],
        input=json.dumps({"links": links, "tasks": tasks}),
        capture_output=True,
        text=True,
        check=False,
    )
    if found.returncode:
        raise RuntimeError(f"SimGrid failed: {found.stderr[-500:]}")
    answer: dict[str, Any] = json.loads(found.stdout)
    return np.array(answer["finished"]), float(answer["seconds"])
