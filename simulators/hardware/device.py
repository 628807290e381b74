"""A machine as single operators and whole iterations see it: peaks, fitted constants, and the library of collectives.

`python -m dse machine calibrate` writes a machine that also holds the fitted constants. Field names carry SI units.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import model_validator

from simulators.hardware.machine import View
from simulators.hardware.schedule_system import SCHEDULE_NEEDS

_OF_WAVES = (
    *("gpu.matrix_flop_per_s_per_cu", "gpu.kernel_launch_s"),
    "gpu.gemm",
)
_OF_LINKS = ("gpu.num_links", "gpu.dma", "node.topology", "node.link_bytes_per_s")


class Device(View):
    """One GPU and its node, of single operators and whole iterations. `fp16_storage` computes in fp32."""

    needs: ClassVar[tuple[str, ...]] = ("gpu.peak_hbm_bytes_per_s", "gpu.peak_flop_per_s")
    presumes: ClassVar[Mapping[str, Any]] = {
        "costs": {},
        "costs.gemm": "fitted",
        "costs.collective": "library",
        "costs.sites": "fluid",
        "gpu.clock": 1.0,
        "gpu.flop_vs_bw": 1.0,
        "gpu.measured_as": "",
        "gpu.efficiency": {},
        "gpu.fitted_on": {},
    }
    reads: ClassVar[tuple[str, ...]] = (
        *("gpu.hbm_bytes_per_s", "gpu.stream_efficiency", "gpu.peak_cus"),
        *(*_OF_WAVES, *_OF_LINKS, "gpu.num_cus", "gpu.active_cus", "gpu.disabled_cache"),
        *("gpu.without_cache", "gpu.hbm_bytes", "gpu.staged_bytes", "gpu.pim", "gpu.loaded", "gpu.contention"),
        *("gpu.cu_copy", "gpu.shader_engines", "node.num_gpus", "node.library", "node.in_switch", "node.experts"),
        "node.host_link_bytes_per_s",
    )
    only_for: ClassVar[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
        "gemm": dict.fromkeys(("waves", "own"), _OF_WAVES),
        "collective": {"links": ("gpu.num_links", "gpu.dma")},
    }

    @model_validator(mode="before")
    @classmethod
    def _keep_factors_that_count(cls, tree: Any) -> Any:
        """Factors without a cache mean something where it is switched off."""
        gpu = tree.get("gpu") if isinstance(tree, Mapping) else None
        if not isinstance(gpu, Mapping) or not isinstance(gpu.get("without_cache"), Mapping):
            return tree
        factors = {cache: of for cache, of in gpu["without_cache"].items() if cache == gpu.get("disabled_cache")}
        return {**tree, "gpu": {**gpu, "without_cache": factors or None}}

    def facts(self) -> list[tuple[str, Any, str, str]]:
        """(dotted path, value, provenance, source) of every constant."""
        return self.facts_below(self.name)


class ScheduledDevice(Device):
    """A machine of iterations whose collectives have schedules: both cost models' constants are read."""

    needs: ClassVar[tuple[str, ...]] = (*Device.needs, *SCHEDULE_NEEDS)
    reads: ClassVar[tuple[str, ...]] = (
        *(*Device.reads, "gpu.persistent", "gpu.llc", "gpu.tracker", "node.hop_latency_s"),
    )
    only_for: ClassVar[Mapping[str, Mapping[str, tuple[str, ...]]]] = {}


class PoweredDevice(Device):
    """The same with the board's power."""

    reads: ClassVar[tuple[str, ...]] = (*Device.reads, "gpu.power")


class PoweredScheduledDevice(ScheduledDevice):
    """A machine of iterations whose collectives have schedules, with the board's power."""

    reads: ClassVar[tuple[str, ...]] = (*ScheduledDevice.reads, "gpu.power")
