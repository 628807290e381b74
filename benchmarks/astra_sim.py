"""ASTRA-sim as a peer: its analytical network simulator, found on the path, on one collective among GPUs at a switch.

A run gets a Chakra trace for each GPU with one collective, the network and the system as files, and says in cycles of
1 ns when each GPU has finished. How to build it: docs/how-to/peers.md.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from simulators.hardware.network import CollectiveKind
from simulators.profiles.chakra import ExecutionTrace, TraceNode, write_chakra

PROGRAM = "AstraSim_Analytical_Congestion_Aware"
_NAMES = {
    "all_reduce": "ALL_REDUCE",
    "all_gather": "ALL_GATHER",
    "reduce_scatter": "REDUCE_SCATTER",
    "all_to_all": "ALL_TO_ALL",
}
_FINISHED = re.compile(r"sys\[(\d+)\] finished, (\d+) cycles")
_VERSION = "0.0.4"  # of the schema that it reads
_TIMEOUT_S = 120.0
_SYSTEM = {
    "scheduling-policy": "LIFO",
    "endpoint-delay": 10,
    "active-chunks-per-dimension": 2,
    "preferred-dataset-splits": 4,
    **{f"{name}-implementation": ["ring"] for name in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")},
    "collective-optimization": "localBWAware",
    "local-mem-bw": 3350,
    "boost-mode": 0,
}
"""System of its validated configuration of HGX H100 (examples/system/native_collectives/HGX-H100-validated.json)."""


@dataclass(frozen=True)
class SwitchNetwork:
    """GPUs at one switch: rate of a GPU [GB/s] and latency of a link [ns]."""

    bandwidth: float
    latency: float

    def text(self, num_gpus: int) -> str:
        """The network as its YAML."""
        return (
            f"topology: [ Switch ]\nnpus_count: [ {num_gpus} ]\n"
            f"bandwidth: [ {self.bandwidth} ]\nlatency: [ {self.latency} ]\n"
        )


VALIDATED = SwitchNetwork(400.0, 936.25)
"""HGX H100 (examples/network/analytical/HGX-H100-validated.yml of astra-sim/astra-sim, MIT)."""


def program() -> str | None:
    """Path of ASTRA-sim's analytical simulator, from the path or `ASTRA_SIM`; None where there is none."""
    return os.environ.get("ASTRA_SIM") or shutil.which(PROGRAM)


def seconds(kind: CollectiveKind, num_bytes: int, num_gpus: int, network: SwitchNetwork = VALIDATED) -> float:
    """Time of a collective [s] until the last GPU has finished. num_bytes: of the larger buffer.

    Raises RuntimeError where there is no program, it fails, or it does not say that every GPU has finished.
    """
    path = program()
    if path is None:
        raise RuntimeError(f"{PROGRAM} is not on the path; docs/how-to/peers.md says how to build it")
    size = num_bytes // num_gpus if kind == "all_gather" else num_bytes  # it counts what a GPU starts with
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        node = TraceNode(0, kind, "COMM_COLL_NODE", 0.0, collective=_NAMES[kind], payload_bytes=size)
        for gpu in range(num_gpus):
            write_chakra(folder / f"trace.{gpu}.et", ExecutionTrace((node,), version=_VERSION))
        (folder / "system.json").write_text(json.dumps(_SYSTEM))
        (folder / "network.yml").write_text(network.text(num_gpus))
        (folder / "memory.json").write_text(json.dumps({"memory-type": "NO_MEMORY_EXPANSION"}))
        command = [
            path,
            f"--workload-configuration={folder / 'trace'}",
            f"--system-configuration={folder / 'system.json'}",
            f"--network-configuration={folder / 'network.yml'}",
            f"--remote-memory-configuration={folder / 'memory.json'}",
        ]
        run = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    finished = {int(gpu): int(cycles) for gpu, cycles in _FINISHED.findall(run.stdout)}
    if run.returncode or len(finished) != num_gpus:
        last = (run.stderr or run.stdout).strip().splitlines()[-1:]
        raise RuntimeError(f"ASTRA-sim finished on {len(finished)} of {num_gpus} GPUs: {' '.join(last)[:200]}")
    return max(finished.values()) * 1e-9
