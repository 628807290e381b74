"""Requests beside the fluid model of the same designs, and a memory system in which the fluid model's assumptions hold.

These are: banks and turns of the bus take no time, an update takes its channel twice as long as a write, links pace DMA
commands, CUs end their tiles together, kernels sum the last chunk once all of it is there, and reads overtake the
GEMM's own updates, without a bound. They hold for all schedules where a GEMM's own updates are a small part of a wave
(`LARGE`: 15 % at most).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from dse.backend import Batch, Tree
from dse.space import set_path
from dse_near_memory.address_map import LINE_BYTES
from dse_near_memory.backend import RequestBackend, RequestDesign
from simulators.overlap.backend import OverlapBackend
from simulators.workloads.model_zoo import option_tree

# layers whose own updates are a small part of a wave, as the module's assumption needs it
LARGE = ("megagpt2-tp8-fc2", "tnlg-tp8-fc2", "gpt3-tp32-fc2", "palm-tp32-fc2", "mtnlg-tp32-fc2")
SCHEDULES = ("t3_sequential", "t3_sequential_nmc", "t3_ideal", "t3_ideal_nmc", "t3", "t3_fair", "t3_mca")
_NO_TIME = ("hop", "trcd", "trp", "tras", "tcl", "trrd", "twr", "to_write", "to_read", "trfc")


def assumptions(design: RequestDesign) -> dict[str, Any]:
    """Values of a design's controller by dotted path with which its fluid model's assumptions hold."""
    rate = float(design.system.gpu.hbm_bytes_per_s)
    # a line takes its channel this long when all channels together have the system's rate
    burst_s = LINE_BYTES * design.controller.dram.channels / rate
    values = {
        "dram.bytes_per_s": rate,
        "bank_groups": 1,
        "tccdl_s": burst_s * design.controller.column_bytes / LINE_BYTES,  # an update takes the group for two bursts
        # reads overtake every store, as in the fluid model
        "store_buffer": 10**9,
        "lockstep": True,
        "sums_last": True,
        "cache_hit_s": 0.0,
        "window_bytes": 256e3,
    }
    return {f"controller.{path}": value for path, value in (values | {f"dram.{n}_s": 0.0 for n in _NO_TIME}).items()}


def gaps(tree: Tree, case: str) -> Mapping[str, float]:
    """Schedule -> makespan of requests over the fluid model's, less 1, of a scenario under the assumptions."""
    requests, fluid = RequestBackend(), OverlapBackend("fluid")
    # copied: values of the controller are set in place below
    base = copy.deepcopy(dict(requests.scenarios(tree)[case]))
    for path, value in assumptions(requests.design(base)).items():
        set_path(base, path, value)
    by_schedule = {}
    for name in SCHEDULES:
        base["schedule"] = option_tree("schedule", name)
        sides = ((requests, base), (fluid, {key: part for key, part in base.items() if key != "controller"}))
        requests_s, fluid_s = (
            side.evaluate([Batch(side.design(part))])[0][0].metrics["makespan_s"] for side, part in sides
        )
        by_schedule[name] = requests_s / fluid_s - 1
    return by_schedule
