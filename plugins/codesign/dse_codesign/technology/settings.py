"""Technology files: coefficients of area, power and cost, each with its interval and its source.

`conf/technology/<name>.yaml` is composed of the files that its `defaults` name. A coefficient without an interval or a
source is refused. Values are as named in the files; intervals are drawn as PERT distributions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import BaseModel, Field, model_validator

from dse.config.options import load_yaml, unreadable
from dse.errors import ConfigError, Problem, did_you_mean, validate_as
from dse.values import Frozen, Source
from dse.values.units import Number
from dse_codesign import DATA
from simulators.hardware.machine import merged
from simulators.hardware.parts import PeakFormat

Array = NDArray[np.float64]
_PERT_WEIGHT = 4.0  # of the mode, over that of either end: the PERT distribution by definition
FORMATS = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "fp4")
"""Formats of matrix units whose energy is given."""


class Coefficient(Source):
    """A number of a technology with its interval and its origin. low, high: the range that it is believed to be in."""

    value: Number
    low: Number
    high: Number

    @model_validator(mode="before")
    @classmethod
    def _is_whole(cls, tree: Any) -> Any:
        # a number without an interval and a source is refused
        if not isinstance(tree, (Mapping, BaseModel)):
            raise ValueError("is a bare number: write {value, low, high, provenance, source}")
        return tree

    @model_validator(mode="after")
    def _is_inside_its_interval(self) -> Self:
        if not 0 <= self.low <= self.value <= self.high:
            raise ValueError(
                f"must have 0 <= low <= value <= high, not low {self.low:g}, value {self.value:g}, high {self.high:g}"
            )
        return self

    def draw(self, uniform: Array) -> Array:
        """PERT distribution (beta of mode `value` on [low, high]) at quantiles in (0, 1), of any shape."""
        if self.high <= self.low:
            # a number without an interval: beta of width 0 is not defined
            return np.full(np.shape(uniform), self.value)
        from scipy.stats import beta

        width = self.high - self.low
        # shape parameters of the PERT distribution: mean (low + 4 value + high) / 6
        left = 1 + _PERT_WEIGHT * (self.value - self.low) / width
        right = 1 + _PERT_WEIGHT * (self.high - self.value) / width
        return np.asarray(self.low + width * beta.ppf(uniform, left, right))


class ProcessNode(Frozen):
    """A process of a foundry.

    mtr_per_mm2: density of logic [million transistors/mm2]. bit_um2: area of an SRAM bit cell. energy_scale: energy of
    a switched gate over that in 45 nm. wafer_usd: price of a processed wafer.
    """

    mtr_per_mm2: Coefficient
    bit_um2: Coefficient
    energy_scale: Coefficient
    leakage_w_per_mm2: Coefficient
    wafer_usd: Coefficient
    defects_per_cm2: Coefficient


class AreaRules(Frozen):
    """Coefficients of `dse_codesign.technology.area`, explained in `conf/technology/parts/area.yaml`."""

    reference_mtr_per_mm2: Coefficient
    fp16_fma_um2: Coefficient
    fp32_fma_um2: Coefficient
    fp64_fma_um2: Coefficient
    datapath_overhead: Coefficient
    cu_control_mtr: Coefficient
    register_array_share: Coefficient
    cache_array_share: Coefficient
    uncore_share: Coefficient
    stacked_uncore_share: Coefficient
    stacking_fill: Coefficient
    copy_engine_mtr: Coefficient
    tracker_mtr_per_kib: Coefficient
    pim_unit_mm2: Coefficient
    reticle_mm2: Coefficient
    hbm_phy_mm2: Coefficient
    lane_mm2: Coefficient
    lane_mm2_per_gbit_s: Coefficient
    die_to_die_mm2_per_tb_s: Coefficient
    phy_scaling: Coefficient
    phy_reference_mtr_per_mm2: Coefficient


class PowerRules(Frozen):
    """Coefficients of `dse_codesign.technology.power`, explained in `conf/technology/parts/power.yaml`."""

    matrix_fp16_pj_per_flop: Coefficient
    movement_overhead: Coefficient
    vector_instruction_pj: Coefficient
    vector_fp32_pj_per_flop: Coefficient
    relative_energy_of_format: Mapping[PeakFormat | Annotated[str, Field(pattern="^fp64$")], Coefficient]
    module_w: Coefficient
    idle_module_share: Coefficient
    l1_pj_per_byte: Coefficient
    l2_pj_per_byte: Coefficient
    llc_pj_per_byte: Coefficient
    link_pj_per_bit: Coefficient
    die_to_die_pj_per_bit: Coefficient
    pim_unit_mw: Coefficient
    regulator_efficiency: Coefficient
    reference_clock_hz: Coefficient
    voltage_slope: Coefficient
    voltage_floor: Coefficient

    @model_validator(mode="after")
    def _has_every_format(self) -> Self:
        absent = sorted(set(FORMATS) - set(map(str, self.relative_energy_of_format)))
        if absent:
            raise ValueError(f"has no relative_energy_of_format.{', '.join(absent)}")
        return self


class HbmGeneration(Frozen):
    """A generation of HBM: energy of a bit, price of capacity, and rate of a stack."""

    pj_per_bit: Coefficient
    usd_per_gb: Coefficient
    stack_bytes_per_s: Coefficient


class MemoryRules(Frozen):
    """HBM: footprint of a stack, its dies of DRAM, and its generations."""

    stack_mm2: Coefficient
    stack_dies: Coefficient
    generations: Mapping[str, HbmGeneration] = Field(min_length=1)


class CostRules(Frozen):
    """Coefficients of `dse_codesign.technology.cost`, explained in `conf/technology/parts/cost.yaml`."""

    wafer_mm: Coefficient
    edge_mm: Coefficient
    scribe_mm: Coefficient
    defect_clustering: Coefficient
    die_test_usd: Coefficient
    bond_yield: Coefficient
    package_usd_per_mm2: Coefficient
    stacking_usd_per_mm2: Coefficient
    package_spacing: Coefficient
    module_usd: Coefficient
    node_usd: Coefficient
    nic_usd_per_gbit_s: Coefficient
    switch_usd_per_gbit_s: Coefficient
    cable_usd_per_gbit_s: Coefficient
    node_switch_usd_per_gbit_s: Coefficient
    switch_sums_share: Coefficient
    link_cable_usd_per_gbit_s: Coefficient
    pcie_switch_usd: Coefficient
    electricity_usd_per_kwh: Coefficient
    facility_overhead: Coefficient
    life_years: Coefficient
    load_share: Coefficient
    nic_w_per_gbit_s: Coefficient
    switch_w_per_gbit_s: Coefficient
    node_w: Coefficient


@dataclass(frozen=True)
class Coefficients:
    """Values of a technology: dotted path -> number, or array [S, 1] over drawn technologies.

    processes, generations: names in the order of the indices by which `of_process` and `of_hbm` look up.
    """

    values: Mapping[str, Any]
    processes: tuple[str, ...]
    generations: tuple[str, ...]

    def __getitem__(self, path: str) -> Any:
        return self.values[path]

    def with_values(self, changed: Mapping[str, Any]) -> Coefficients:
        """Return a copy in which the coefficients at some dotted paths have other values."""
        return Coefficients({**self.values, **changed}, self.processes, self.generations)

    def of_process(self, name: str, index: ArrayLike) -> Array:
        """Coefficient of the processes at indices [B]; [B], or [S, B] over drawn technologies."""
        return _look_up([self.values[f"processes.{process}.{name}"] for process in self.processes], index)

    def of_hbm(self, name: str, index: ArrayLike) -> Array:
        """Coefficient of the generations of HBM at indices [B]; [B], or [S, B] over drawn technologies."""
        return _look_up(
            [self.values[f"memory.generations.{generation}.{name}"] for generation in self.generations], index
        )


def _look_up(columns: list[Any], index: ArrayLike) -> Array:
    # [names], or [samples, names]: coefficients are [S, 1] over drawn technologies
    table = np.concatenate(np.broadcast_arrays(*map(np.atleast_1d, columns)), axis=-1)
    places = np.asarray(index, int) if table.ndim == 1 else np.atleast_1d(np.asarray(index, int))
    return np.asarray(table[..., places], float)


class Technology(Frozen):
    """What silicon, memory and packages of a time take in area, power and money."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,60}$")]
    description: str = ""
    processes: Mapping[str, ProcessNode] = Field(min_length=1)
    area: AreaRules
    power: PowerRules
    memory: MemoryRules
    cost: CostRules

    def coefficients(self) -> Iterator[tuple[str, Coefficient]]:
        """Yield (dotted path, coefficient) of every number."""
        yield from _coefficients(self, "")

    @property
    def nominal(self) -> Coefficients:
        """The values themselves."""
        return self._packed({path: coefficient.value for path, coefficient in self.coefficients()})

    def sample(self, num_samples: int, *, seed: int) -> Coefficients:
        """Technologies drawn from all intervals at once, independently, by a Latin hypercube; values [S, 1]."""
        from scipy.stats import qmc

        pairs = list(self.coefficients())
        quantiles = qmc.LatinHypercube(len(pairs), rng=np.random.default_rng(seed)).random(num_samples)
        # `draw` takes quantiles inside (0, 1)
        quantiles = np.clip(quantiles, 1e-9, 1 - 1e-9)
        columns = zip(pairs, quantiles.T, strict=True)
        return self._packed({path: coefficient.draw(column)[:, None] for (path, coefficient), column in columns})

    def _packed(self, values: Mapping[str, Any]) -> Coefficients:
        return Coefficients(values, tuple(self.processes), tuple(self.memory.generations))


def _coefficients(value: Any, path: str) -> Iterator[tuple[str, Coefficient]]:
    if isinstance(value, Coefficient):
        yield path, value
    elif isinstance(value, (BaseModel, Mapping)):
        for name, inner in value if isinstance(value, BaseModel) else value.items():
            yield from _coefficients(inner, f"{path}.{name}".lstrip("."))


def technology_of(tree: object, path: str = "technology") -> Technology:
    """Validate the tree of a technology. Raises ConfigError with every problem, by dotted path."""
    return validate_as(Technology, tree, path=path)


def load_technology(name: str) -> Technology:
    """Read a technology, by the name of a shipped one or by path. Raises ConfigError."""
    return technology_of(technology_tree(name))


def technology_tree(name: str) -> dict[str, Any]:
    """Composed tree of a technology: the files that its `defaults` name, below its own values. Raises ConfigError."""
    folder = DATA.parent / "technology"
    shipped = folder / f"{name}.yaml"
    path = shipped if shipped.is_file() else Path(name)
    if not path.is_file():
        options = [file.stem for file in folder.glob("*.yaml")]
        rule = "is neither a shipped technology nor a YAML file"
        raise ConfigError([Problem("technology", rule, name, did_you_mean(name, options))])
    if problems := unreadable(path):
        raise ConfigError(problems)
    tree: Any = load_yaml(path)
    if not isinstance(tree, dict):
        raise ConfigError([Problem("technology", "holds no keys", str(path))])
    composed: dict[str, Any] = {}
    # files are composed in their order, the file's own values over all
    for entry in tree.pop("defaults", []):
        if entry != "_self_":
            composed = merged(composed, technology_tree(str(entry)))
    return merged(composed, tree)
