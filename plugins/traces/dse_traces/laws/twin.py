"""A machine fitted to profiles of it: factors on shipped constants that the recorded times identify.

    GEMM rate, by precision       compute, feed and sustained of gpu.efficiency; where these are absent
                                  gpu.matrix_flop_per_s_per_cu             (`simulators.costs.gemm`)
    collectives, by pattern       bytes_per_s of node.library.protocols, across nodes of node.library.network
                                                                           (`simulators.costs.collective.library_cost`)
    streams                       gpu.stream_efficiency                    (`simulators.costs.streaming`)
    GEMMs beside collectives      gpu.contention.gemm_beside_cus           (`dse_traces.laws.contention`)
    host                          kernels.host_launch_s of a stack

Each is fitted by itself (`dse_traces.laws.twin_fit`), through the cost model that plans use, at the clock of GEMMs
under load. What is not identifiable stays as shipped, with the reason and the way to record it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dse.space import get_path
from dse.values import put_all
from dse_traces.laws.contention import Laws, assumed_laws
from dse_traces.laws.machine import ProfiledMachine
from dse_traces.laws.twin_fit import LogFit, TimedRows, fit_logarithm, slopes, twin_rules
from dse_traces.laws.twin_rows import (
    Messages,
    gemms_of_profiles,
    launches_of,
    messages_of_ranks,
    slowdowns_of,
    streams_of_profiles,
)
from dse_traces.profile.kernels import Profile
from dse_traces.profile.ranks import Ranks
from simulators.costs.algorithms import Pattern
from simulators.costs.chip import Chip
from simulators.costs.collective import library_cost, machine_ring
from simulators.costs.gemm import GemmShape, gemms_of
from simulators.costs.streaming import streaming_cost
from simulators.hardware.device import Device

Floats = NDArray[np.float64]
HOST = "kernels.host_launch_s"
"""Path of the host's time for a launch, a constant of a stack."""
BESIDE = "gpu.contention.gemm_beside_cus"
"""Path of the slowdown of GEMMs beside collectives."""
STREAMS = "gpu.stream_efficiency"
"""Path of the share of the HBM's rate that streams reach."""
_ELEMENT_BYTES = 2  # of collectives, as in steps
_MOST_FACTOR = 8.0  # by which a constant may differ from the shipped one
_AT_BOUND = 1e-3  # of a logarithm
_MOST_SLOWDOWN = 16.0  # bound of the field
_HOST_BOUNDS = (-5.0, 5.0)  # logarithms of a time over the median
_SHAPES = "record_shapes=True of torch.profiler names the sizes of operators"


@dataclass(frozen=True)
class FittedConstant:
    """A constant that was fitted: its path, the shipped value (None if there is none), the fitted one and the ends of
    its interval, the standard error of its logarithm, the kernels and rows it is fitted on, and all values to write.
    """

    name: str
    path: str
    shipped: float | None
    value: float
    low: float
    high: float
    error: float
    kernels: int
    rows: int
    values: Mapping[str, float]


@dataclass(frozen=True)
class KeptConstant:
    """A constant that keeps its shipped value, why, and what recording would make it identifiable."""

    name: str
    reason: str
    way_out: str


@dataclass(frozen=True)
class Twin:
    """A machine fitted to profiles. recognised: what the profiles hold, in words."""

    fitted: Sequence[FittedConstant]
    kept: Sequence[KeptConstant]
    recognised: Sequence[str]


_Fit = FittedConstant | KeptConstant


def fit_twin(
    tree: Mapping[str, Any], profiles: Sequence[Profile], ranks: Ranks | None, host_s: float | None = None
) -> Twin:
    """Fit the constants of a machine's tree to profiles of it. ranks: the profiles matched, of several ranks.

    host_s: shipped time of the host for a launch; None without a stack, or where it has none.
    """
    device, seen, laws = Device.of(tree), list[str](), _laws_of(tree)
    results = [
        *_gemms(device, profiles, seen),
        *_collectives(device, messages_of_ranks(profiles, ranks, _node_gpus(device), laws), seen),
        _streams(device, profiles),
        _beside(laws, profiles),
        _host(profiles, host_s),
    ]
    fitted = [of for of in results if isinstance(of, FittedConstant)]
    return Twin(fitted, [of for of in results if isinstance(of, KeptConstant)], seen)


def _laws_of(tree: Mapping[str, Any]) -> Laws | None:
    """Laws of contention of a machine; None where it lacks their constants."""
    machine = ProfiledMachine.of(tree)
    gpu = machine.gpu
    lacks = gpu.contention is None or gpu.cu_copy is None or machine.node is None or not gpu.hbm_bytes_per_s
    return None if lacks else assumed_laws(machine)


def _node_gpus(device: Device) -> int:
    return 1 if device.node is None else int(device.node.num_gpus)


def scaled(device: Device, paths: Sequence[str], logarithm: float) -> Device:
    """A machine with the constants at some paths scaled by a factor, of which the logarithm is given."""
    factor = float(np.exp(logarithm))
    return put_all(device, {path: factor * get_path(device, path) for path in paths})


def gemm_paths(device: Device, precision: str) -> list[str]:
    """Paths of the constants that a factor on the rate of GEMMs of a precision scales."""
    if device.gemm_model(precision) == "waves":
        return ["gpu.matrix_flop_per_s_per_cu"]
    above = f"gpu.efficiency.{device.gpu.stands_for(precision)}"
    paths = [f"{above}.{name}" for name in ("compute", "feed", "sustained")]
    return [path for path in paths if get_path(device, path) is not None]


def gemm_seconds(device: Device, precision: str, shape: GemmShape) -> Floats:
    """Time [s] of GEMMs under load on a machine."""
    return np.asarray(gemms_of(device, precision).cost(shape).seconds, float)


def _gemms(device: Device, profiles: Sequence[Profile], seen: list[str]) -> Iterator[_Fit]:
    """Fit the rate of GEMMs of each precision."""
    gemms = gemms_of_profiles(profiles)
    sizes = sum(len(rows.seconds) for _, rows in gemms.values())
    seen.append(f"{sum(int(rows.counts.sum()) for _, rows in gemms.values()):,} GEMMs of {sizes:,} shapes, alone")
    if not gemms:
        yield KeptConstant("GEMM rate", "no GEMM with a recorded shape ran alone", _SHAPES)
    fitted = dict[str, str]()
    # the precision with most kernels first: others may have the same constants
    for precision, (shape, rows) in sorted(gemms.items(), key=lambda of: -int(of[1][1].counts.sum())):
        name = f"GEMM rate, {precision}"
        try:
            gemm_seconds(device, precision, shape)
        except ValueError as error:
            yield KeptConstant(name, str(error), "name a system with constants of this precision")
            continue
        paths = gemm_paths(device, precision)
        if (sharer := fitted.setdefault(paths[0], precision)) != precision:
            reason = f"the machine has the constants of {sharer} for it, which are fitted"
            yield KeptConstant(name, reason, "name a system with constants of both")
            continue
        yield _factor(
            device,
            (name, paths, f"{twin_rules().fewest_kernels} large GEMMs or more"),
            rows,
            lambda at, kind=precision, of=shape: gemm_seconds(at, kind, of),  # type: ignore[misc]
        )


def collective_path(device: Device, pattern: Pattern, across: bool) -> str | None:
    """Path of the rate of a library's collective inside a node, or across nodes; None where none was fitted."""
    library, name = None if device.node is None else device.node.library, "network" if across else "protocols"
    constants = {} if library is None else {str(kind): of for kind, of in (getattr(library, name) or {}).items()}
    return f"node.library.{name}.{pattern}.bytes_per_s" if pattern in constants else None


def collective_seconds(device: Device, pattern: Pattern, payload_bytes: Floats, gpus: Floats) -> Floats:
    """Time [s] of collectives by the library of a machine."""
    ring = machine_ring(device, gpus)
    return library_cost(pattern, payload_bytes, ring, element_bytes=_ELEMENT_BYTES).seconds


def _collectives(device: Device, messages: Mapping[Pattern, Messages], seen: list[str]) -> Iterator[_Fit]:
    """Fit the rate of each pattern of collectives, inside nodes and across them."""
    for pattern, of in messages.items():
        payload, count = of.payload_bytes, int(of.rows.counts.sum())
        groups = ", ".join(f"{size:g}" for size in np.unique(of.gpus))
        sizes = f"{payload.min() / 1e6:.3g} to {payload.max() / 1e6:.3g} MB"
        how = "beside kernels, less what contention.cu_copy_beside_gemm explains" if of.slowed else "alone"
        seen.append(f"{count:,} {pattern}s {how}, {sizes}, among {groups} GPUs")
    if not messages:
        way = "record a step of several GPUs by torch.profiler, whose collectives name payloads"
        yield KeptConstant("rate of collectives", "no collective with a payload is recorded, or ran alone", way)
    for pattern, of in messages.items():
        for across in (False, True):
            here = of.where((of.gpus > _node_gpus(device)) == across)
            if len(here.gpus):
                yield _collective(device, pattern, here, across=across)
        if pattern in _switched(device):
            reason = "names of kernels do not tell whether the switch added, so they count as the library's"
            yield KeptConstant(f"{pattern} in the switch", reason, "record one step with NCCL_NVLS_ENABLE=0")


def _collective(device: Device, pattern: Pattern, messages: Messages, *, across: bool) -> _Fit:
    """Fit the rate of one pattern of collectives, all inside nodes or all across them."""
    name = f"rate of {pattern}" + (" across nodes" if across else "")
    if (path := collective_path(device, pattern, across)) is None:
        way = "name a system with such constants" + (" and a fabric" if across else "")
        return KeptConstant(name, "the machine has no fitted constants of it", way)
    needed_s = collective_seconds(device, pattern, messages.payload_bytes, messages.gpus)
    most = twin_rules().most_over_links
    # one rank alone: far longer than the links need is taken for waiting, as in advice
    moves = messages.where(messages.shared | (messages.rows.low_s <= most * needed_s))
    if not len(moves.gpus):
        reason = f"all last over {most:g} times as long as the links need, which may be waiting for late ranks"
        return KeptConstant(name, reason, "record several ranks, and name all of their files")

    def predict(at: Device) -> Floats:
        return collective_seconds(at, pattern, moves.payload_bytes, moves.gpus)

    return _factor(device, (name, [path], "larger payloads, whose time their bytes bound"), moves.rows, predict)


def _switched(device: Device) -> tuple[str, ...]:
    """Collectives that the switch of a node computes."""
    switch = None if device.node is None else device.node.in_switch
    return () if switch is None else tuple(map(str, switch.collectives))


def stream_seconds(device: Device, precision: str, traffic: Floats) -> Floats:
    """Time [s] of kernels that stream, without launch."""
    chip = Chip.of(device, precision)
    return np.asarray(streaming_cost(chip, traffic).seconds - np.asarray(chip.launch_s), float)


def _streams(device: Device, profiles: Sequence[Profile]) -> _Fit:
    """Fit the rate of streams, of all precisions together."""
    name, streams = "rate of streams", streams_of_profiles(profiles)
    usable = {
        kind: of for kind, of in streams.items() if device.gpu.constants(kind) is not None and device.gpu.peak(kind)
    }
    if not usable:
        return KeptConstant(name, "no large element-wise kernel with a recorded shape ran alone", _SHAPES)
    if device.gpu.stream_efficiency is None:
        return KeptConstant(name, f"the machine has no {STREAMS}", "name a system that has it")
    parts = list(usable.values())
    columns = ("seconds", "counts", "low_s", "high_s")
    rows = TimedRows(*(np.concatenate([getattr(rows, name) for _, rows in parts]) for name in columns))

    def predict(at: Device) -> Floats:
        return np.concatenate([stream_seconds(at, kind, traffic) for kind, (traffic, _) in usable.items()])

    return _factor(device, (name, [STREAMS], "larger tensors"), rows, predict)


def _factor(
    device: Device, what: tuple[str, Sequence[str], str], rows: TimedRows, predict: Callable[[Device], Floats]
) -> _Fit:
    """Fit a factor on the constants at some paths. what: its name, the paths, and what would identify it."""
    (name, paths, way), rules = what, twin_rules()
    tells = -slopes(lambda at: predict(scaled(device, paths, at)), 0.0) >= rules.least_sensitivity
    few = f"{int(rows.counts[tells].sum())} kernels tell of it, of {rules.fewest_kernels} at least"
    if rows.counts[tells].sum() < rules.fewest_kernels:
        return KeptConstant(name, few + " (the others are bound by latency or memory)", f"record {way}")
    shipped = float(get_path(device, paths[0]))
    # a share of a rate is at most 1
    most = min(_MOST_FACTOR, 1 / shipped if paths[0] == STREAMS else _MOST_FACTOR)
    bounds = (-float(np.log(_MOST_FACTOR)), float(np.log(most)))
    fit = fit_logarithm(
        rows.where(tells), lambda at: predict(scaled(device, paths, at))[tells], bounds, rules.prior_spread
    )
    if not bounds[0] + _AT_BOUND < fit.value < bounds[1] - _AT_BOUND:
        reason = f"the times are those of a constant of {np.exp(fit.value):.3g} times the shipped one or beyond"
        return KeptConstant(name, reason, "name a nearer system, or record the step without other work on the machine")
    factor = float(np.exp(fit.value))
    values = {path: factor * float(get_path(device, path)) for path in paths}
    return _fitted((name, paths[0]), fit, shipped, values)


def _fitted(what: tuple[str, str], fit: LogFit, shipped: float, values: Mapping[str, float] | None = None) -> _Fit:
    """A fitted constant from the fit of its logarithm over `shipped`."""
    value, low, high = (shipped * float(np.exp(log)) for log in (fit.value, fit.low, fit.high))
    name, path = what
    return FittedConstant(
        name, path, shipped, value, low, high, fit.error, fit.kernels, fit.rows, values or {path: value}
    )


def _beside(laws: Laws | None, profiles: Sequence[Profile]) -> _Fit:
    """Fit the slowdown of GEMMs beside collectives."""
    name, rules = "slowdown of GEMMs beside collectives", twin_rules()
    if laws is None:
        return KeptConstant(name, "the machine has no constants of contention", "name a system that has them")
    slowed = slowdowns_of(profiles, laws)
    if slowed.counts.sum() < rules.fewest_kernels:
        reason = f"{slowed.counts.sum()} GEMMs were recorded alone and beside collectives that leave them enough SMs"
        way = "record a profile in which the same GEMMs run alone and overlapped, with grids (torch.profiler, nsys)"
        return KeptConstant(name, reason, way)
    shipped = float(laws.hardware.gpu.contention.gemm_beside_cus)
    bounds = (-float(np.log(shipped)) - 1e-9, float(np.log(_MOST_SLOWDOWN / shipped)))
    ones = np.ones(len(slowed.seconds))
    fit = fit_logarithm(slowed, lambda at: shipped * np.exp(at) * ones, bounds, rules.prior_spread)
    return _fitted((name, BESIDE), fit, shipped)


def _host(profiles: Sequence[Profile], host_s: float | None) -> _Fit:
    """Fit the host's time for a launch, of the rank that waits most often for it."""
    name = "host time of a launch"
    seen = [rows for profile in profiles if (rows := launches_of(profile)) is not None]
    if not seen:
        fewest = twin_rules().fewest_launches
        reason = f"the GPU waits for the host for fewer than {fewest} launches, or launches are not recorded"
        return KeptConstant(name, reason, "record launches (ProfilerActivity.CPU); a GPU that never waits needs none")
    rows = max(seen, key=lambda of: int(of.counts.sum()))
    ones = np.ones(len(rows.seconds))
    start = float(np.median(rows.seconds))
    # nothing shipped: the median is where the fit begins, and no prior
    fit = fit_logarithm(rows, lambda at: start * np.exp(at) * ones, _HOST_BOUNDS, None)
    value, low, high = (start * float(np.exp(log)) for log in (fit.value, fit.low, fit.high))
    return FittedConstant(name, HOST, host_s, value, low, high, fit.error, fit.kernels, fit.rows, {HOST: value})
