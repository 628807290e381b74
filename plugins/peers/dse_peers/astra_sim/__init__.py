"""ASTRA-sim as an engine: a simulator of others, on the tasks of all GPUs.

What is given to it is said in `traces`. It runs one kernel of a GPU at a time, one collective or message that a GPU
sends, and has no memory bandwidth, compute units, contention laws or priorities to share: GEMMs and copies do not slow
one another down. A message crosses a switch as a whole. Graphs that its traces cannot say are refused with the reason.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from dse.config.options import load_yaml
from dse_chakra.files import TraceNode
from dse_peers.astra_sim.program import GIB, Setup, absence, simulate
from dse_peers.astra_sim.traces import Unfit, setup_of, spread, steps_of, traces_of
from simulators.taskgraph.graph import Floats, TaskGraph
from simulators.taskgraph.timeline import Refusals, Timeline, Totals

VALIDATED: dict[str, Any] = load_yaml(Path(__file__).with_name("validated.yaml"))
"""Its validated configurations, by the name of the GPU in tables of measured times."""


class AstraSimEngine:
    """Runs graphs of all GPUs in ASTRA-sim, a process for each. Raises RuntimeError where it fails or is not there."""

    version = "1"
    batch = 1
    exact = False

    def absence(self) -> str:
        """Why it cannot run on this machine, with the way out, or ""."""
        return absence()

    def run(self, graph: TaskGraph) -> Timeline:
        """Issue and finish times of every task of every design that its traces can say."""
        # text 0: no reason
        times, texts = np.zeros((graph.num_designs, 2, graph.num_tasks)), [""]
        code = np.zeros(graph.num_designs, np.int32)
        for design in range(graph.num_designs):
            try:
                times[design] = _run(graph, design)
            except Unfit as why:
                # each reason once, in the order in which it is first met
                texts = list(dict.fromkeys([*texts, str(why)]))
                code[design] = texts.index(str(why))
        refused = Refusals(code, tuple(texts)) if code.any() else None
        return Timeline(graph, times[:, 0], times[:, 1], refused)

    def totals(self, graph: TaskGraph) -> Totals:
        """Totals of the timelines."""
        return self.run(graph).totals()

    def collective_s(self, kind: str, num_bytes: Floats, gpus: Floats, bytes_per_s: float, device: str = "") -> Floats:
        """Times [s] of N collectives among GPUs at a switch, by its validated configuration of the device.

        Devices without one have that of h100 with the rate of their ports. num_bytes, gpus [N]: of the larger buffer.
        bytes_per_s: of the port of a GPU, each way. device: name of the GPU in tables of measured times.
        """
        entry = VALIDATED.get(device, VALIDATED["h100"])
        network = entry["network"]
        # its files count 2^30 bytes as a GB
        rate = network["bandwidth"] if device in VALIDATED else bytes_per_s / GIB
        setup = Setup(network["topology"], rate, network["latency"], entry["system"])
        times = []
        for size, count in zip(num_bytes.astype(int).tolist(), gpus.astype(int).tolist(), strict=True):
            payload = size // count if kind == "all_gather" else size  # it counts what a GPU starts with
            # the same single collective on every GPU
            node = TraceNode(0, kind, "COMM_COLL_NODE", 0.0, collective=kind.upper(), payload_bytes=payload)
            times.append(simulate([[node]] * count, setup).finished)
        return np.array(times)


def _run(graph: TaskGraph, design: int) -> Floats:
    """Issue and finish times [2, T] of one design. Raises Unfit or RuntimeError."""
    steps = steps_of(graph, design)
    run = simulate(traces_of(steps), setup_of(graph, design, steps))
    num_gpus = len(steps[0].tasks)
    times = np.zeros((2, len(steps), num_gpus))
    for number in range(len(steps)):
        for gpu in range(num_gpus):
            # even ids: what a step computes or receives (`traces`)
            if (gpu, 2 * number) not in run.nodes:
                raise RuntimeError("ASTRA-sim's log does not have when every task was issued and ended")
            times[:, number, gpu] = run.nodes[gpu, 2 * number]
    return spread(times, steps, graph.num_tasks)


ENGINE = AstraSimEngine()
