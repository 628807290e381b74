"""A machine as profiles see it: rates for the laws of contention, links, copy engines, and costs of GEMMs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from simulators.hardware.machine import View, tree_of
from simulators.hardware.schedule_system import ScheduleSystem


class ProfiledMachine(View):
    """A GPU that ran what a profile records, or that could have, and its node."""

    presumes: ClassVar[Mapping[str, Any]] = ScheduleSystem.presumes
    reads: ClassVar[tuple[str, ...]] = (
        *("gpu.num_cus", "gpu.num_links", "gpu.peak_flop_per_s", "gpu.peak_hbm_bytes_per_s"),
        *("gpu.matrix_flop_per_s_per_cu", "gpu.hbm_bytes_per_s", "gpu.kernel_launch_s", "gpu.efficiency", "gpu.gemm"),
        *("gpu.shader_engines", "gpu.cu_copy", "gpu.dma", "gpu.contention", "node.num_gpus", "node.library"),
        *("gpu.loaded", "gpu.fitted_on", "gpu.peak_cus", "gpu.stream_efficiency"),
        *("node.topology", "node.link_bytes_per_s", "node.in_switch", "node.experts"),
    )


def machine_named(name: str) -> ProfiledMachine:
    """A machine by the name of a shipped system, or by the path of a YAML file. Raises ConfigError."""
    return ProfiledMachine.of(tree_of(name))
