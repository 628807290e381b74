"""A machine as single operators and whole iterations see it: peaks, fitted constants, and the library of collectives.

`python -m dse calibrate` writes a machine that also holds the fitted constants. Field names carry SI units.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import model_validator

from dse.errors import Problems
from dse.values import knob
from simulators.hardware.machine import CollectiveModel, CostModels, GemmModel, View
from simulators.hardware.network import Node
from simulators.hardware.system import System

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


class Device(View):
    """One GPU and its node, of single operators and whole iterations. `fp16_storage` computes in fp32."""

    needs: ClassVar[tuple[str, ...]] = ("gpu.peak_hbm_bytes_per_s", "gpu.peak_flop_per_s")
    presumes: ClassVar[Mapping[str, Any]] = {
        "gpu.clock": 1.0,
        "gpu.flop_vs_bw": 1.0,
        "gpu.measured_as": "",
        "gpu.efficiency": {},
        "gpu.fitted_on": {},
    }
    reads: ClassVar[tuple[str, ...]] = (
        *(*needs, *presumes, *_OF_WAVES, *_OF_LINKS, "gpu.num_cus", "gpu.active_cus", "gpu.disabled_cache"),
        *("gpu.without_cache", "gpu.hbm_bytes", "gpu.staged_bytes", "gpu.pim", "gpu.loaded", "gpu.contention"),
        *("gpu.cu_copy", "node.num_gpus", "node.library", "node.in_switch", "node.experts", "costs"),
    )
    only_for: ClassVar[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
        "gemm": {"waves": _OF_WAVES},
        "collective": {"links": _OF_LINKS},
    }
    costs: OperatorCosts = OperatorCosts()

    @model_validator(mode="before")
    @classmethod
    def _keep_factors_that_count(cls, tree: Any) -> Any:
        """Factors without a cache mean something where it is switched off."""
        gpu = tree.get("gpu") if isinstance(tree, Mapping) else None
        if not isinstance(gpu, Mapping) or not isinstance(gpu.get("without_cache"), Mapping):
            return tree
        factors = {cache: of for cache, of in gpu["without_cache"].items() if cache == gpu.get("disabled_cache")}
        return {**tree, "gpu": {**gpu, "without_cache": factors or None}}

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


class ScheduledDevice(Device):
    """A machine of iterations whose collectives have schedules: both cost models' constants are read."""

    needs: ClassVar[tuple[str, ...]] = tuple(dict.fromkeys((*Device.needs, *System.needs)))
    reads: ClassVar[tuple[str, ...]] = (
        *(*Device.reads, *needs, "gpu.persistent", "gpu.power", "gpu.llc", "gpu.tracker", "node.hop_latency_s"),
    )
    only_for: ClassVar[Mapping[str, Mapping[str, tuple[str, ...]]]] = {}
    node: Node


def scheduled_device_of(tree: object, path: str = "system") -> ScheduledDevice:
    """Validate the tree of a machine whose collectives have schedules. Raises ConfigError with every problem."""
    check = Problems()
    device = check.model(ScheduledDevice, tree, path=path)
    check.done()
    assert device is not None
    return device
