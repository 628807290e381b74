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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from simulators.hardware.network import CollectiveKind
from simulators.profiles.chakra import ExecutionTrace, TraceNode, write_chakra

PROGRAM = "AstraSim_Analytical_Congestion_Aware"
_FINISHED = re.compile(r"sys\[(\d+)\] finished, (\d+) cycles")
_VERSION = "0.0.4"  # of the schema that it reads
_TIMEOUT_S = 120.0
VALIDATED: Mapping[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
"""Its validated configuration of HGX H100: the network, GPUs at one switch, and the system."""


def program() -> str | None:
    """Path of ASTRA-sim's analytical simulator, from the path or `ASTRA_SIM`; None where there is none."""
    return os.environ.get("ASTRA_SIM") or shutil.which(PROGRAM)


def seconds(kind: CollectiveKind, num_bytes: int, num_gpus: int) -> float:
    """Time of a collective [s] until the last GPU has finished. num_bytes: of the larger buffer.

    Raises RuntimeError where there is no program, it cannot be run, takes too long, or does not say that every GPU has
    finished.
    """
    path = program()
    if path is None:
        raise RuntimeError(f"{PROGRAM} is not on the path; docs/how-to/peers.md says how to build it")
    size = num_bytes // num_gpus if kind == "all_gather" else num_bytes  # it counts what a GPU starts with
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        node = TraceNode(0, kind, "COMM_COLL_NODE", 0.0, collective=kind.upper(), payload_bytes=size)
        for gpu in range(num_gpus):
            write_chakra(folder / f"trace.{gpu}.et", ExecutionTrace((node,), version=_VERSION))
        (folder / "system.json").write_text(json.dumps(VALIDATED["system"]))
        (folder / "network.yml").write_text(_network(num_gpus))
        (folder / "memory.json").write_text(json.dumps({"memory-type": "NO_MEMORY_EXPANSION"}))
        command = [
            path,
            f"--workload-configuration={folder / 'trace'}",
            f"--system-configuration={folder / 'system.json'}",
            f"--network-configuration={folder / 'network.yml'}",
            f"--remote-memory-configuration={folder / 'memory.json'}",
        ]
        try:
            run = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise RuntimeError(f"ASTRA-sim cannot be run: {error}") from error
    finished = {int(gpu): int(cycles) for gpu, cycles in _FINISHED.findall(run.stdout)}
    if run.returncode or len(finished) != num_gpus:
        last = (run.stderr or run.stdout).strip().splitlines()[-1:]
        raise RuntimeError(f"ASTRA-sim finished on {len(finished)} of {num_gpus} GPUs: {' '.join(last)[:200]}")
    return max(finished.values()) * 1e-9


def _network(num_gpus: int) -> str:
    """The network as YAML; its reader takes lists, one value for each dimension."""
    tree = {"topology": ["Switch"], "npus_count": [num_gpus]}
    tree |= {name: [value] for name, value in VALIDATED["network"].items()}
    return str(yaml.safe_dump(tree, sort_keys=False, default_flow_style=None))
