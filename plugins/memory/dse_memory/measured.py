"""Convolutions that were measured on GPUs, as designs of the memory backend, a scenario each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dse.backend import Tree
from dse.config.options import conf_dir
from dse.errors import Problems
from dse_calibration.backend import tables
from dse_calibration.measurements import MeasuredRows
from dse_memory.convolutions import ConvolutionPass
from dse_memory.kernels import ELEMENT_BYTES
from simulators.hardware.device import Device
from simulators.hardware.machine import tree_of
from simulators.hardware.memory_system import MemorySystem

PASSES: Mapping[str, str] = {"forward": "fwd", "backward_data": "bwd_data", "backward_filter": "bwd_filter"}
"""Direction -> the pass as `dse_calibration.measurements.MeasuredRows` calls it."""


@dataclass(frozen=True)
class MeasuredConvolutions:
    """Measured convolutions of one precision on the device of a memory system. tree: the system's.

    fitted: names of the rows that constants of the device were fitted on.
    """

    system: str
    tree: Tree
    rows: MeasuredRows
    fitted: frozenset[str]

    def scenario(self, row: int) -> str:
        """Name of a row."""
        return f"{self.system} {self.rows.precision} {self.rows.names[row]}"

    def application(self, row: int) -> Tree:
        """The layer of a row, as a section of a design."""
        fields = {name: int(values[row]) for name, values in self.rows.shape.items()}
        # what cuDNN and MIOpen tables time here
        fixed = {"direction": "forward", "algorithm": "implicit_gemm", "precision": self.rows.precision}
        sizes = {name: value for name, value in fields.items() if name in ConvolutionPass.model_fields}
        return {"name": self.rows.names[row], **fixed, **sizes}


def load_measured_systems(systems: Sequence[str], folder: str | None) -> Iterator[MeasuredConvolutions]:
    """Measured convolutions of memory systems (names, paths) in a folder (None: ours). Raises ConfigError."""
    measured_tables, check, seen = tables(folder or str(conf_dir() / "data")), Problems(), set[str]()
    for name in systems:
        tree = tree_of(name)
        system = check.model(MemorySystem, tree, path=f"measured: {name}")
        if system is None:
            continue
        if system.name in seen:  # scenarios are named by system, and would fall together
            check.add("measured", "names a system twice", value=name, way_out="list it once")
        seen.add(system.name)
        device = check.model(Device, tree, path=f"measured: {name}")
        if device is None:
            continue
        precisions = sorted(set(dict(system.gpu.flop_per_s)) & set(ELEMENT_BYTES))
        # rows of other precisions too, to say what there is instead
        every = [rows for rows in measured_tables if (rows.device, rows.kind) == (device.gpu.measured_as, "conv")]
        usable = [rows for rows in every if rows.precision in precisions]
        if not usable:
            there = f", but in {', '.join(rows.precision for rows in every)}" if every else ""
            rule = f"is measured as {device.gpu.measured_as}, without convolutions in {', '.join(precisions)}{there}"
            check.add("measured", rule, value=name, way_out="study.data_dir=<folder of a table that has some>")
        for rows in usable:
            # rows that helped to fit are no test of the model
            fitted = frozenset(device.gpu.fitted_on.get(rows.precision, {}).get("conv", ()))
            measured = MeasuredConvolutions(system.name, tree, rows, fitted)
            for row, line in enumerate(rows.lines):
                check.model(
                    ConvolutionPass, measured.application(row), path=f"{rows.device} {rows.precision}, line {line}"
                )
            yield measured
    check.done()


def scenarios(systems: Sequence[str], folder: str | None) -> dict[str, dict[str, Any]]:
    """Scenario -> its sections `system` and `application`. Raises ConfigError."""
    sections = dict[str, dict[str, Any]]()
    for measured in load_measured_systems(systems, folder):
        for row in range(measured.rows.size):
            sections[measured.scenario(row)] = {"system": measured.tree, "application": measured.application(row)}
    return sections
