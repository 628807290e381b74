"""How many requests a second go through L1, L2 and DRAM: `python -m benchmarks.memory [--json]`, on one core.

Beside them the same caches and open rows as a plain loop over lists and dictionaries, and how long the whole table of
`study=cache_policies` takes with its start-up, on two cores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from typing import Any

from benchmarks.timing import best
from dse_memory.backend import MemoryBackend
from dse_memory.design import MemoryDesign
from dse_memory.measures import simulate
from simulators.workloads.model_zoo import option_tree

_APPLICATIONS = ("fw_act", "fw_pool", "sgemm", "fw_lstm")
_POLICIES = ("uncached", "cache_r", "cache_rw", "combined")
_PLAIN = 200_000


def design(application: str, policy: str) -> MemoryDesign:
    """A shipped application under a shipped policy."""
    trees: dict[str, Any] = {"application": application, "policy": policy, "system": "gem5_gcn3"}
    run = {"requests": 2_000_000, "repeats": 25}
    return MemoryBackend().design({**{group: option_tree(group, name) for group, name in trees.items()}, "run": run})


def rates() -> Mapping[str, float]:
    """Requests that are simulated in a second, by application and policy."""
    found = {}
    for application in _APPLICATIONS:
        for policy in _POLICIES:
            point = design(application, policy)
            simulated = simulate(point)
            requests = sum(cost.totals[0] * cost.share for cost, _ in simulated.costs)
            found[f"{application}_{policy}"] = float(requests) / best(partial(simulate, point))
    return found


def plain(requests: int = _PLAIN) -> None:
    """A stream of loads and stores through LRU caches of the same sizes, and rows of DRAM, in plain Python."""
    first: list[OrderedDict[int, bool]] = [OrderedDict() for _ in range(16)]
    second: list[OrderedDict[int, bool]] = [OrderedDict() for _ in range(4096)]
    rows: dict[int, int] = {}
    now, hits = 0.0, 0
    for request in range(requests):
        line = request // 2 + (request & 1 << 24)
        store = bool(request & 1)
        own = first[line & 15]
        if not store and line in own:
            own.move_to_end(line)
            continue
        held = second[line & 4095]
        if line in held:
            held.move_to_end(line)
            held[line] |= store
            continue
        for place, ways in ((held, 16), (own, 16)):
            if len(place) == ways:
                place.popitem(last=False)
            place[line] = store
        bank, row = line // 512 & 255, line >> 17
        hits += rows.get(bank) == row
        now += 2.0 if rows.get(bank) == row else 47.0
        rows[bank] = row


def table_seconds() -> float:
    """Wall time of the whole study, from an empty folder."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["study=cache_policies", f"output_dir={folder}", "tracking=none", "executor.jobs=2"]
        began = time.perf_counter()
        subprocess.run([sys.executable, "-m", "dse", *words], check=True, capture_output=True)
        return time.perf_counter() - began


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object with the figures")
    as_json = parser.parse_args().json
    found = {f"{name}_requests_per_s": rate for name, rate in rates().items()}
    slowest = min(found.values())
    reference = _PLAIN / best(plain)
    found |= {"slowest_requests_per_s": slowest, "plain_python_requests_per_s": reference}
    found |= {"slowest_over_plain_python": slowest / reference, "cache_policies_table_s": table_seconds()}
    rows = [f"| {name} | {value:,.1f} |" for name, value in found.items()]
    print(json.dumps(found, indent=2) if as_json else "\n".join(["| figure | value |", "|---|--:|", *rows]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
