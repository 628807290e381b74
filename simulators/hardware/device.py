"""GPU model of single operators: datasheet numbers, efficiency constants, and the server around the GPU.

A device file (`conf/system/<name>.yaml`) holds the numbers of the data sheet; `python -m dse calibrate` writes one that
also holds the fitted constants. Field names carry SI units.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from dse.config.options import conf_dir
from dse.config.yaml_checks import load_yaml, unreadable
from dse.errors import ConfigError, Problem, Problems, did_you_mean
from dse.units import Bytes, BytesPerSecond, FlopPerSecond, Integer, Number, Seconds
from dse.values import Frozen
from simulators.hardware.pim import Pim
from simulators.hardware.sourced import Sourced
from simulators.hardware.system import Grown

Precision = Literal["fp32", "fp16_storage", "mixed", "fp16", "bf16", "fp8"]
ELEMENT_BYTES: Mapping[str, int] = {"fp32": 4, "fp16_storage": 2, "mixed": 2, "fp16": 2, "bf16": 2, "fp8": 1}
_ARITHMETIC: Mapping[str, Precision] = {"fp16_storage": "fp32", "fp16": "mixed", "bf16": "mixed"}
"""Precision -> that whose peak rate counts: 16-bit data may be computed in 32 bits, and matrix units take both."""

Bandwidth = Annotated[BytesPerSecond, Field(ge=1e6)]  # 64 would be a forgotten unit
Factor = Annotated[Number, Field(gt=0, le=1e3)]
Duration = Annotated[Seconds, Field(gt=0)]


StreamKind = Literal["norm", "activation", "add", "rotary"]
"""Operators of a transformer's layer that memory bounds."""


class Streaming(Frozen):
    """Fitted constants of an operator that memory bounds: its least time, and the share of the HBM bandwidth that it
    reaches.
    """

    launch_s: Duration
    hbm_share: Factor


class Efficiency(Grown):
    """Fitted constants of a device at one precision, absent from data sheets (equations in `simulators.costs.gemm`).

    launch_s: fixed time of a call. compute: share of the peak rate that inner loops reach (above 1 if the clock is
    above the data sheet's). feed: bytes from the last-level cache to a CU per 16 FLOP of peak. transposed: extra cost
    of reading a transposed A. narrow: slowdown of the library's kernels for at most 16 columns. latency_s: latency per
    element of K of a chain of dependent loads.

    Of libraries with tiles of 256 (`largest_tile`; 128 otherwise), which split K finely: prologue: elements of K that
    take as long as a workgroup needs to begin and to end. hbm_share: share of the HBM bandwidth of the data sheet that
    is reached. reread: share of the operands that each super-tile of a wave reads again. split_s: time to add the parts
    of a split K. sustained: share of the peak rate that power and clock allow for long. narrow: slowdown of a product
    with a vector against its traffic. streaming: by operator that memory bounds.
    """

    launch_s: Duration
    compute: Factor
    feed: Factor
    transposed: Factor
    narrow: Factor
    latency_s: Duration
    largest_tile: Literal[128, 256] | None = None
    prologue: Annotated[Number, Field(ge=0, le=1e5)] | None = None
    hbm_share: Annotated[Number, Field(gt=0, le=1.2)] | None = None
    reread: Annotated[Number, Field(gt=0, le=10)] | None = None
    split_s: Annotated[Seconds, Field(ge=0)] | None = None
    sustained: Factor | None = None
    streaming: Mapping[StreamKind, Streaming] | None = None


class DeviceGpu(Grown):
    """Numbers of the data sheet. flop_per_s: peak by precision; fp16_storage computes in fp32.

    staged_bytes: inputs not yet multiplied that tiles of products hold on the chip; None if no model needs it. pim:
    None if the memory computes nothing.
    """

    num_cus: Annotated[Integer, Field(ge=1, le=4096)]
    hbm_bytes_per_s: Bandwidth
    hbm_bytes: Bytes | None = None
    staged_bytes: Bytes | None = None
    pim: Pim | None = None
    flop_per_s: Mapping[Precision, Annotated[FlopPerSecond, Field(ge=1e9)]] = Field(min_length=1)

    def peak(self, precision: str) -> float | None:
        """Peak rate [FLOP/s] at a precision; None if the file does not give it."""
        name = _ARITHMETIC.get(precision, precision)
        return {str(key): rate for key, rate in self.flop_per_s.items()}.get(name)


class Server(Frozen):
    """Interconnect of the GPUs of a server, as an all-reduce uses it.

    bytes_per_s: rate of a GPU in a ring of two in a server of num_gpus; each further GPU lengthens the time of a byte
    by the share `sharing`, because paths through switches and sockets are shared. latency_s: latency of a step.
    network_bytes_per_s: rate of a GPU once a ring leaves the server; None if it was not measured.
    """

    num_gpus: Annotated[Integer, Field(ge=2, le=1024)] = 8
    bytes_per_s: Bandwidth
    latency_s: Duration
    sharing: Annotated[Number, Field(ge=0, le=1)] = 0.0
    network_bytes_per_s: Bandwidth | None = None


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


class Device(Sourced):
    """One GPU and its server. measured_as: name of the device in measured tables (filled in by `calibrate`).

    efficiency: by precision. fitted_on: kind -> names of the rows that the constants were fitted on, by precision.
    note: quality of the fit. sources: dotted path -> source of the numbers at and below it.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,80}$")]
    description: str = ""
    measured_as: str = ""
    gpu: DeviceGpu
    server: Server | None = None
    efficiency: Mapping[Precision, Efficiency] = Field(default_factory=dict)
    fitted_on: Mapping[str, Mapping[str, tuple[str, ...]]] = Field(default_factory=dict)
    note: Any = None

    @field_validator("efficiency")
    @classmethod
    def _has_the_peaks(cls, efficiency: Mapping[str, Efficiency], info: ValidationInfo) -> Mapping[str, Efficiency]:
        gpu = info.data.get("gpu")
        absent = [name for name in efficiency if gpu is not None and gpu.peak(name) is None]
        if absent:
            raise ValueError(f"has constants for {', '.join(absent)}, whose peak rate gpu.flop_per_s does not give")
        return efficiency

    def facts(self) -> Iterator[tuple[str, Any, str, str]]:
        """Yield (dotted path, value, provenance, source) of every constant."""
        return self.facts_below(self.name)


def tree_of(name: str) -> dict[str, Any]:
    """Content of a device file, by the name of a shipped device or by path. Raises ConfigError."""
    shipped = conf_dir() / "system" / f"{name}.yaml"
    path = shipped if "/" not in name and shipped.is_file() else Path(name)
    if not path.is_file():
        options = [file.stem for file in (conf_dir() / "system").glob("*.yaml")]
        rule = "is neither a shipped system nor a YAML file"
        raise ConfigError([Problem("system", rule, name, did_you_mean(name, options))])
    problems = unreadable(path)
    if problems:
        raise ConfigError(problems)
    tree = load_yaml(path)
    if not isinstance(tree, dict):
        raise ConfigError([Problem("system", "holds no keys", name)])
    return tree


def device_of(tree: object, path: str = "system") -> Device:
    """Validate the tree of a device file. Raises ConfigError with every problem."""
    check = Problems()
    if isinstance(tree, Mapping) and "node" in tree and "server" not in tree:
        way = "devices of single operators say gpu.flop_per_s by precision: docs/operators.md"
        check.add(path, "is a system for schedules", value=tree.get("name"), way_out=way)
        check.done()
    device = check.model(Device, tree, path=path)
    check.done()
    assert device is not None
    return device
