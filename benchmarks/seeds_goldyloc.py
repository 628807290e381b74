"""GOLDYLOC and fused operators by their workgroups: gap to the oracle with arrivals, and claims within.

`benchmarks.seeds` prints them; `study=goldyloc_arrivals` and `study=fused_workgroups` take some four minutes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.gallery import run
from dse.results.claims import judge
from dse.results.run_folder import FinishedRun
from dse_papers.goldyloc import STUDY as GOLDYLOC
from dse_workgroups.arrival_study import gains, seconds_by_policy
from dse_workgroups.fused_study import fused_within
from dse_workgroups.queue_claims import findings, run_queues
from simulators.hardware.machine import tree_of
from simulators.hardware.schedule_system import ScheduleSystem


def goldyloc_oracle_gap() -> Mapping[str, float]:
    """Median and largest gap of the run-time logic to the oracle over streams, and its gains over other policies."""
    with tempfile.TemporaryDirectory() as folder:
        done = FinishedRun(run("goldyloc_arrivals", Path(folder)))
        return gains(seconds_by_policy(done.outputs.read_table("results")))


def goldyloc_within() -> Mapping[str, Any]:
    """Claims of GOLDYLOC within, by the slots of CUs, and values of all."""
    gpu = ScheduleSystem.model_validate(tree_of("mi100")).gpu
    rows = judge(GOLDYLOC.claims(), findings(gpu, run_queues(gpu)))
    values = {row["id"].partition(".")[2]: row["ours"] for row in rows}
    return {"goldyloc_within": sum(bool(row["within"]) for row in rows), "goldyloc_claims": len(rows), **values}


def fused_claims_within() -> Mapping[str, Any]:
    """Claims of fused operators within in the declared configurations."""
    with tempfile.TemporaryDirectory() as folder:
        return fused_within(FinishedRun(run("fused_workgroups", Path(folder))))
