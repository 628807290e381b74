"""A run of ASTRA-sim's analytical simulator: a Chakra trace for each GPU, a network and a system in, times out.

The program is found on the path, or named by `ASTRA_SIM`. plugins/peers/README.md says how to build it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dse_chakra.files import ExecutionTrace, TraceNode, write_chakra

PROGRAM = "AstraSim_Analytical_Congestion_Aware"
_FINISHED = re.compile(r"sys\[(\d+)\] finished, (\d+) cycles")
_EVENT = re.compile(r"(issue|callback),\s*sys->id=(\d+), tick=(\d+), node->id=(\d+),")
_VERSION = "0.0.4"  # of the schema that it reads
_TIMEOUT_S = 120.0
_CYCLE_S = 1e-9  # its analytical backend counts ns
GIB = 2.0**30
"""Bytes of what its files call a GB."""


@dataclass(frozen=True)
class Setup:
    """What a run is configured by. topology: Switch, FullyConnected or Ring; rate and latency of a link.

    rate: in what its files call GB/s, which are 2^30 bytes. latency_ns: in whole or broken ns. system: keys of its
    system file.
    """

    topology: str
    rate: float
    latency_ns: float
    system: Mapping[str, Any]

    def network(self, num_gpus: int) -> str:
        """The network as YAML; its reader takes lists, one value for each dimension."""
        tree = {"topology": [self.topology], "npus_count": [num_gpus]}
        tree |= {"bandwidth": [self.rate], "latency": [self.latency_ns]}
        return str(yaml.safe_dump(tree, sort_keys=False, default_flow_style=None))


@dataclass(frozen=True)
class Simulated:
    """Times [s] of a run. finished: of the last GPU. nodes: (GPU, id of a node) -> when it is issued and ends."""

    finished: float
    nodes: Mapping[tuple[int, int], tuple[float, float]]


def program() -> str | None:
    """Path of ASTRA-sim's analytical simulator, from the path or `ASTRA_SIM`; None where there is none."""
    return os.environ.get("ASTRA_SIM") or shutil.which(PROGRAM)


def absence() -> str:
    """Why there is no program, with the way out, or ""."""
    return "" if program() else f"{PROGRAM} is not on the path; see plugins/peers/README.md to build it"


def simulate(traces: Sequence[Sequence[TraceNode]], setup: Setup) -> Simulated:
    """Run a trace for each GPU.

    Raises RuntimeError where there is no program, it cannot be run, takes too long, or does not say that every GPU has
    finished.
    """
    if absence():
        raise RuntimeError(absence())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for gpu, nodes in enumerate(traces):
            write_chakra(folder / f"trace.{gpu}.et", ExecutionTrace(tuple(nodes), version=_VERSION))
        # trace-enabled: it logs when nodes are issued and end
        (folder / "system.json").write_text(json.dumps(dict(setup.system) | {"trace-enabled": 1}))
        (folder / "network.yml").write_text(setup.network(len(traces)))
        # no trace here uses remote memory
        (folder / "memory.json").write_text(json.dumps({"memory-type": "NO_MEMORY_EXPANSION"}))
        command = [
            str(program()),
            f"--workload-configuration={folder / 'trace'}",
            f"--system-configuration={folder / 'system.json'}",
            f"--network-configuration={folder / 'network.yml'}",
            f"--remote-memory-configuration={folder / 'memory.json'}",
        ]
        try:
            run = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise RuntimeError(f"ASTRA-sim cannot be run: {error}") from error
        events = "".join(log.read_text("utf-8", "replace") for log in _logs(folder))
    finished = {int(gpu): int(cycles) for gpu, cycles in _FINISHED.findall(run.stdout)}
    # the exit code alone does not prove that every GPU has finished
    if run.returncode or len(finished) != len(traces):
        last = (run.stderr or run.stdout).strip().splitlines()[-1:]
        raise RuntimeError(f"ASTRA-sim finished on {len(finished)} of {len(traces)} GPUs: {' '.join(last)[:200]}")
    return Simulated(max(finished.values()) * _CYCLE_S, _times(events))


def _logs(folder: Path) -> list[Path]:
    """The log that it writes below the folder it runs in, and the parts that it was divided into, the oldest first."""
    return sorted((folder / "log").glob("log*.log"), key=lambda path: path.name, reverse=True)


def _times(events: str) -> dict[tuple[int, int], tuple[float, float]]:
    """Times of every node that its log says."""
    issued, ended = dict[tuple[int, int], float](), dict[tuple[int, int], float]()
    for what, gpu, tick, node in _EVENT.findall(events):
        (issued if what == "issue" else ended)[int(gpu), int(node)] = int(tick) * _CYCLE_S
    # nodes that lack one of both times are left out, which the caller notices
    return {key: (issued[key], ended[key]) for key in issued.keys() & ended.keys()}
