"""A machine as single operators and whole iterations see it: peaks, fitted constants, and the library of collectives.

`python -m dse calibrate` writes a machine that also holds the fitted constants. Field names carry SI units.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from dse.errors import Problems
from dse.units import Bytes, FlopPerSecond, Integer, Number, Seconds
from dse.values import knob
from simulators.hardware.machine import CollectiveModel, CostModels, GemmModel, Gpu, Hardware, View, peak_format
from simulators.hardware.network import CollectiveLibrary, ExpertLibrary, InSwitch, Node, Topology
from simulators.hardware.parts import (
    Bandwidth,
    Cache,
    Capacity,
    Contention,
    CuCopy,
    Dma,
    Efficiency,
    GemmLibrary,
    LaunchTime,
    LoadedClock,
    PeakFormat,
    Persistent,
    Power,
    Precision,
    ShaderEngines,
    SwitchableCache,
    Tracker,
    WithoutCache,
)
from simulators.hardware.pim import Pim

Cus = Annotated[Integer, Field(ge=1, le=4096)]


class DeviceGpu(View, Gpu):
    """One GPU as its data sheet and fitted constants describe it. `fp16_storage` computes in fp32.

    Fields from `matrix_flop_per_s_per_cu` on are read by the cost models `waves` and `links` only.
    """

    num_cus: Cus
    peak_hbm_bytes_per_s: Bandwidth
    hbm_bytes: Capacity | None = None
    active_cus: Cus | None = None
    clock: Annotated[Number, Field(gt=0, le=4)] = 1.0
    disabled_cache: Annotated[SwitchableCache | None, knob(structural=True)] = None
    without_cache: Mapping[SwitchableCache, WithoutCache] | None = None
    flop_vs_bw: Annotated[Number, Field(gt=0, le=1e3)] = 1.0
    staged_bytes: Bytes | None = None
    pim: Pim | None = None
    peak_flop_per_s: Mapping[PeakFormat, Annotated[FlopPerSecond, Field(ge=1e9)]] = Field(min_length=1)
    measured_as: str = ""
    efficiency: Mapping[Precision, Efficiency] = Field(default_factory=dict)
    fitted_on: Mapping[str, Mapping[str, tuple[str, ...]]] = Field(default_factory=dict)
    num_links: Annotated[Integer | None, knob(structural=True, ge=0, le=64)] = None
    loaded: LoadedClock | None = None
    contention: Contention | None = None
    matrix_flop_per_s_per_cu: FlopPerSecond | None = None
    hbm_bytes_per_s: Bandwidth | None = None
    kernel_launch_s: LaunchTime | None = None
    gemm: GemmLibrary | None = None
    shader_engines: ShaderEngines | None = None
    cu_copy: CuCopy | None = None
    dma: Dma | None = None

    @model_validator(mode="before")
    @classmethod
    def _keep_factors_that_count(cls, tree: Any) -> Any:
        """Factors without a cache mean something where it is switched off."""
        if not isinstance(tree, Mapping) or not isinstance(tree.get("without_cache"), Mapping):
            return tree
        kept = {
            cache: factors for cache, factors in tree["without_cache"].items() if cache == tree.get("disabled_cache")
        }
        return {**tree, "without_cache": kept or None}

    @property
    def as_described(self) -> DeviceGpu:
        """The GPU as its data sheet says, with all CUs and caches at the nominal clock."""
        changed = {"active_cus": None, "clock": 1.0, "disabled_cache": None, "without_cache": None, "flop_vs_bw": 1.0}
        return self.model_copy(update=changed)

    @field_validator("efficiency")
    @classmethod
    def _has_the_peaks(cls, efficiency: Mapping[str, Efficiency], info: ValidationInfo) -> Mapping[str, Efficiency]:
        peaks = info.data.get("peak_flop_per_s")
        absent = [name for name in efficiency if peaks is not None and peak_format(name) not in peaks]
        if absent:
            raise ValueError(f"has constants for {', '.join(absent)}, whose rate peak_flop_per_s does not give")
        return efficiency


class LibraryNode(View, Node):
    """GPUs, their library of collectives, and what their switch computes; the cost model `links` reads the links."""

    num_gpus: Annotated[Integer, knob(structural=True, ge=1, le=1024)]
    library: CollectiveLibrary | None = None
    topology: Annotated[Topology | None, knob(structural=True)] = None
    link_bytes_per_s: Bandwidth | None = None
    in_switch: InSwitch | None = None
    experts: ExpertLibrary | None = None


_OF_WAVES = (
    *("gpu.matrix_flop_per_s_per_cu", "gpu.hbm_bytes_per_s", "gpu.kernel_launch_s"),
    *("gpu.gemm", "gpu.shader_engines"),
)
_OF_LINKS = ("gpu.num_links", "gpu.dma", "node.topology", "node.link_bytes_per_s")


SiteModel = Literal["uncontended", "fluid", "node"]
"""Models of a schedule at a site, from the coarsest to the finest."""


class OperatorCosts(CostModels):
    """Models of the costs of single operators and iterations.

    sites: of a schedule at a site (`simulators.steps.sites`): the longest path without contention, one GPU that stands
    for all, or every GPU of a tp group, with unevenly sharded rows.
    """

    gemm: Annotated[GemmModel, knob(structural=True)] = "fitted"
    collective: Annotated[CollectiveModel, knob(structural=True)] = "library"
    sites: Annotated[SiteModel, knob(structural=True)] = "fluid"


class Device(View, Hardware):
    """One GPU and its node, of single operators and whole iterations."""

    only_for: ClassVar[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
        "gemm": {"waves": _OF_WAVES},
        "collective": {"links": _OF_LINKS},
    }
    gpu: DeviceGpu
    node: LibraryNode | None = None
    costs: OperatorCosts = OperatorCosts()

    def facts(self) -> Iterator[tuple[str, Any, str, str]]:
        """Yield (dotted path, value, provenance, source) of every constant."""
        return self.facts_below(self.name)


def device_of(tree: object, path: str = "system") -> Device:
    """Validate the tree of a machine for single operators. Raises ConfigError with every problem."""
    check = Problems()
    device = check.model(Device, tree, path=path)
    check.done()
    assert device is not None
    return device


class ScheduledGpu(DeviceGpu):
    """One GPU of an iteration whose collectives have schedules, with what these read of it beside."""

    kernel_launch_s: LaunchTime
    hbm_bytes_per_s: Bandwidth
    matrix_flop_per_s_per_cu: FlopPerSecond
    hbm_bytes: Capacity
    gemm: GemmLibrary
    cu_copy: CuCopy
    dma: Dma
    contention: Contention
    persistent: Persistent | None = None
    power: Power | None = None
    llc: Cache | None = None
    tracker: Tracker | None = None


class ScheduledNode(LibraryNode):
    """GPUs of an iteration whose collectives have schedules, and their links."""

    topology: Annotated[Topology, knob(structural=True)]
    link_bytes_per_s: Bandwidth
    hop_latency_s: Seconds | None = None


class ScheduledDevice(Device):
    """A machine of iterations whose collectives have schedules: both cost models' constants are read."""

    only_for: ClassVar[Mapping[str, Mapping[str, tuple[str, ...]]]] = {}
    gpu: ScheduledGpu
    node: ScheduledNode


def scheduled_device_of(tree: object, path: str = "system") -> ScheduledDevice:
    """Validate the tree of a machine whose collectives have schedules. Raises ConfigError with every problem."""
    check = Problems()
    device = check.model(ScheduledDevice, tree, path=path)
    check.done()
    assert device is not None
    return device
