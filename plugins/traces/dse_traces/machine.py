"""A machine as profiles see it: rates for the laws of contention, links, copy engines, and costs of GEMMs."""

from __future__ import annotations

from typing import ClassVar

from simulators.hardware.machine import View, tree_of


class ProfiledMachine(View):
    """A GPU that ran what a profile records, or that could have, and its node."""

    reads: ClassVar[tuple[str, ...]] = (
        *("gpu.num_cus", "gpu.num_links", "gpu.peak_flop_per_s", "gpu.peak_hbm_bytes_per_s"),
        *("gpu.matrix_flop_per_s_per_cu", "gpu.hbm_bytes_per_s", "gpu.kernel_launch_s", "gpu.efficiency", "gpu.gemm"),
        *("gpu.shader_engines", "gpu.cu_copy", "gpu.dma", "gpu.contention", "node.num_gpus", "node.library"),
        *("node.topology", "node.link_bytes_per_s", "node.in_switch", "node.experts"),
    )


def machine_named(name: str) -> ProfiledMachine:
    """A machine by the name of a shipped system, or by the path of a YAML file. Raises ConfigError."""
    return ProfiledMachine.of(tree_of(name))
