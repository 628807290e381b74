"""A machine as profiles see it: rates for the laws of contention, links, copy engines, and costs of GEMMs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from dse.config.options import conf_dir
from dse.errors import ConfigError, Problem
from dse_traces.profile.kernels import Profile
from simulators.hardware.machine import View, tree_of
from simulators.hardware.schedule_system import ScheduleSystem


class ProfiledMachine(View):
    """A GPU that ran what a profile records, or that could have, and its node."""

    # cost models of schedules, where a machine names no others
    presumes: ClassVar[Mapping[str, Any]] = ScheduleSystem.presumes
    # a number that is not in this list can neither be a knob nor change a key
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


def machine_of(profile: Profile, system: str = "") -> str:
    """The machine of a profile: as named, else a shipped one whose name its GPU has. Raises ConfigError without one."""
    if system:
        return system
    # "NVIDIA H100 80GB HBM3" holds h100, and "AMD Instinct MI300X" mi300x
    device = "".join(filter(str.isalnum, profile.device.lower()))
    stems = [path.stem for path in (conf_dir() / "system").glob("*_8.yaml")]
    named = [stem for stem in stems if stem.removesuffix("_8").replace("_", "") in device]
    if not named:
        rule = f"is needed: the profile names {profile.device or 'no GPU'}"
        raise ConfigError([Problem("system", rule, "", "add system=h100_8 or system=mi300x_8, or another machine")])
    # the longest name: `mi300x` is meant where `mi300` matches as well
    return max(named, key=len)
