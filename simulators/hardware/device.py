"""A machine as single operators and whole iterations see it: peaks, fitted constants, and the library of collectives.

`python -m dse calibrate` writes a machine that also holds the fitted constants. Field names carry SI units.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import Field, ValidationInfo, field_validator

from dse.errors import Problems
from dse.units import Bytes, FlopPerSecond, Integer, Number
from dse.values import knob
from simulators.hardware.machine import Gpu, Hardware, View
from simulators.hardware.network import CollectiveLibrary, Node
from simulators.hardware.parts import Bandwidth, Efficiency, PeakFormat, Precision
from simulators.hardware.pim import Pim
from simulators.hardware.sourced import Sourced

_FORMAT: Mapping[str, PeakFormat] = {"fp16_storage": "fp32", "mixed": "fp16"}
"""Precision -> format whose peak rate counts, where the names differ: 16-bit data may be computed in 32 bits."""


def peak_format(precision: str) -> str:
    """Format of inputs whose peak rate counts at a precision."""
    return _FORMAT.get(precision, precision)


class DeviceGpu(View, Gpu):
    """One GPU as its data sheet and fitted constants describe it. `fp16_storage` computes in fp32."""

    num_cus: Annotated[Integer, Field(ge=1, le=4096)]
    peak_hbm_bytes_per_s: Bandwidth
    hbm_bytes: Bytes | None = None
    staged_bytes: Bytes | None = None
    pim: Pim | None = None
    peak_flop_per_s: Mapping[PeakFormat, Annotated[FlopPerSecond, Field(ge=1e9)]] = Field(min_length=1)
    measured_as: str = ""
    efficiency: Mapping[Precision, Efficiency] = Field(default_factory=dict)
    fitted_on: Mapping[str, Mapping[str, tuple[str, ...]]] = Field(default_factory=dict)

    @field_validator("efficiency")
    @classmethod
    def _has_the_peaks(cls, efficiency: Mapping[str, Efficiency], info: ValidationInfo) -> Mapping[str, Efficiency]:
        peaks = info.data.get("peak_flop_per_s")
        absent = [name for name in efficiency if peaks is not None and peak_format(name) not in peaks]
        if absent:
            raise ValueError(f"has constants for {', '.join(absent)}, whose rate peak_flop_per_s does not give")
        return efficiency

    def peak(self, precision: str) -> float | None:
        """Peak rate [FLOP/s] at a precision; None if the data sheet does not give it."""
        return {str(key): rate for key, rate in self.peak_flop_per_s.items()}.get(peak_format(precision))

    def constants(self, precision: str) -> Efficiency | None:
        """Fitted constants at a precision; None if there are none."""
        return {str(name): fitted for name, fitted in self.efficiency.items()}.get(precision)


class LibraryNode(View, Node):
    """GPUs, and the library by which they exchange."""

    num_gpus: Annotated[Integer, knob(structural=True, ge=1, le=1024)]
    library: CollectiveLibrary | None = None


class Setting(Sourced):
    """Settings of a GPU, real or hypothetical, that modify its device file.

    num_cus: active CUs; None for all. clock: clock of the CUs and the last-level cache over their nominal clock. feed,
    latency: factors on the bytes from the last-level cache to a CU, and on the time of a chain of loads, with a cache
    switched off. flop_vs_bw: speedup of everything on the GPU, arithmetic and memory, with unchanged links between GPUs
    (arXiv:2302.02825).
    """

    name: str
    description: str = ""
    num_cus: Annotated[Integer, Field(ge=1, le=4096)] | None = None
    clock: Annotated[Number, Field(gt=0, le=4)] = 1.0
    feed: Annotated[Number, Field(gt=0, le=1)] = 1.0
    latency: Annotated[Number, Field(ge=1, le=100)] = 1.0
    flop_vs_bw: Annotated[Number, Field(gt=0, le=1e3)] = 1.0

    @property
    def plain(self) -> Setting:
        """Copy of the setting without any change to the device."""
        changed = {"num_cus": None, "clock": 1.0, "feed": 1.0, "latency": 1.0, "flop_vs_bw": 1.0}
        return self.model_copy(update=changed)


class Device(View, Hardware):
    """One GPU and its node, of single operators and whole iterations."""

    gpu: DeviceGpu
    node: LibraryNode | None = None

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
