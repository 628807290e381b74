"""Tables that GPUs measured of themselves (`dse_judge`), and the systems that they are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from dse.config.options import conf_dir, load_yaml
from search_spaces.chunk_costs import ChunkCosts
from simulators.hardware.machine import System, tree_of
from simulators.hardware.residuals import name_in_tables, shipped_residuals
from simulators.hardware.schedule_system import ScheduleSystem
from simulators.workloads.operators import Gemm

FOLDER = conf_dir() / "data" / "measured"
"""Tables that are shipped."""
TABLES = ("launches", "beside", "starts", "pipelines", "kernels", "clocks", "targets", "gemms")
"""Names of all tables of a GPU."""


@dataclass(frozen=True)
class MeasuredGpu:
    """Tables of one GPU, and the system whose constants are judged by them."""

    folder: Path

    @cached_property
    def tree(self) -> dict[str, Any]:
        """Tree of the system."""
        system = load_yaml(self.folder / "device.yaml").get("system")
        if system is None:
            raise ValueError(f"{self.folder}/device.yaml has no system to compare with: add `system: <name>` to it")
        return tree_of(str(system))

    @cached_property
    def hardware(self) -> System:
        """The system with all its constants."""
        return System.model_validate(self.tree)

    def table(self, name: str) -> pd.DataFrame:
        """A table of the folder."""
        return pd.read_csv(self.folder / f"{name}.csv", comment="#")

    def whole(self, precision: str = "bf16") -> pd.DataFrame:
        """GEMMs alone at a precision."""
        return self.table("gemms").query(f"way == 'whole' and precision == '{precision}'")

    def plan(self, precision: Any = "bf16", mover: Any = "cu") -> ChunkCosts:
        """Costs of GEMMs of any size as overlap plans take them."""
        # sizes are given with each cost: only the precision counts here
        return ChunkCosts(ScheduleSystem.of(self.tree), Gemm(m=1, n=1, k=1, precision=precision), mover, None)

    def lost(self, rows: pd.DataFrame) -> Any:
        """Slowdown of GEMMs on the SMs that are left, as overlap plans predict it."""
        size, plan = sizes_of(rows), self.plan()
        # second argument: SMs that others take
        return plan.cost(size, rows["sms"].to_numpy(float)).seconds / plan.cost(size, 0).seconds

    def inside(self, rows: pd.DataFrame, precision: str, predicted: Any) -> Any:
        """Tell which measured times [s] of GEMMs lie in the 90 % interval of the predicted ones (`Residuals`)."""
        residuals, name = shipped_residuals(), name_in_tables(self.hardware.gpu)
        shares = []
        for row, seconds in zip(rows.to_dict("records"), predicted, strict=True):
            sizes = {"seconds": float(seconds), **{size: float(row[size]) for size in "mnk"}}
            low, high = residuals.of("gemm", name, precision, sizes).interval(seconds)
            shares.append(bool(low <= row["seconds"] <= high))
        return np.array(shares)

    @cached_property
    def beside(self) -> pd.DataFrame:
        """GEMMs beside backgrounds, with the slowdown of both."""
        rows = self.table("beside")
        slowdown = rows["gemm_beside_s"] / rows["gemm_alone_s"]
        return rows.assign(slowdown=slowdown, other_slowdown=rows["other_beside_s"] / rows["other_alone_s"])


def sizes_of(rows: pd.DataFrame) -> tuple[Any, Any, Any]:
    """Sizes m, n and k of GEMMs [rows]."""
    return rows["m"].to_numpy(float), rows["n"].to_numpy(float), rows["k"].to_numpy(float)


def measured_gpus(folder: Path = FOLDER) -> Sequence[MeasuredGpu]:
    """Tables of each GPU of a folder, by name. Raises ValueError where there are none."""
    places = sorted(path.parent for path in folder.rglob("device.yaml"))
    if not places:
        raise ValueError(f"{folder} holds no folder with device.yaml: measure a GPU by `python -m dse judge`")
    return [MeasuredGpu(place) for place in places]
