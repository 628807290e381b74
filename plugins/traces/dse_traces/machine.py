"""A machine as profiles see it: rates for the laws of contention, links, copy engines, and costs of GEMMs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from dse.errors import Problems
from dse.units import FlopPerSecond, Integer
from dse.values import knob
from simulators.hardware.device import LibraryNode
from simulators.hardware.machine import Gpu, Hardware, View, tree_of
from simulators.hardware.parts import (
    Bandwidth,
    Contention,
    CuCopy,
    Dma,
    Efficiency,
    GemmLibrary,
    LaunchTime,
    PeakFormat,
    Precision,
    ShaderEngines,
)


class ProfiledGpu(View, Gpu):
    """A GPU that ran what a profile records, or that could have."""

    num_cus: Annotated[Integer, Field(ge=1, le=4096)]
    num_links: Annotated[Integer | None, knob(structural=True, ge=0, le=64)] = None
    peak_flop_per_s: Mapping[PeakFormat, Annotated[FlopPerSecond, Field(ge=1e9)]] | None = None
    peak_hbm_bytes_per_s: Bandwidth | None = None
    matrix_flop_per_s_per_cu: FlopPerSecond | None = None
    hbm_bytes_per_s: Bandwidth | None = None
    kernel_launch_s: LaunchTime | None = None
    efficiency: Mapping[Precision, Efficiency] | None = None
    gemm: GemmLibrary | None = None
    shader_engines: ShaderEngines | None = None
    cu_copy: CuCopy | None = None
    dma: Dma | None = None
    contention: Contention | None = None


class ProfiledMachine(View, Hardware):
    """A GPU and its node."""

    gpu: ProfiledGpu
    node: LibraryNode | None = None


def machine_named(name: str) -> ProfiledMachine:
    """A machine by the name of a shipped system, or by the path of a YAML file. Raises ConfigError."""
    check = Problems()
    machine = check.model(ProfiledMachine, tree_of(name), path="system")
    check.done()
    assert machine is not None
    return machine
