"""Times of kernels on the GPU of another machine, by the first way that can be used:

    operator costs    GEMMs whose shape is recorded: ratio of their costs (`simulators.costs.gemm`);
                      kernels bound by memory: of passes over their tensors (`simulators.costs.streaming`)
    waves of CTAs     kernels of `ON_SMS` whose CTAs are known: ceil(c / S') S' / P' over ceil(c / S) S / P
    peak rates        P / P' for kernels of `ON_SMS`, W / W' for all others

P: FLOP/s of the data sheet at 16 bits, W: HBM bandwidth, S: SMs, an SM runs one of the c CTAs at a time. Collectives,
copies and launches stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dse.errors import ConfigError, Problem
from dse_traces.laws.contention import ON_SMS
from dse_traces.laws.machine import ProfiledMachine, machine_named
from dse_traces.laws.task_graph import Contended
from dse_traces.profile.shapes import OperatorShape, parse_shape
from simulators.costs.chip import Chip
from simulators.costs.gemm import GemmShape, gemm_cost, gemms_of
from simulators.costs.streaming import streaming_cost

Floats = NDArray[np.float64]
WAYS = ("operator costs", "waves of CTAs", "peak rates")
"""How the time of a kernel on another GPU is known."""
_PRODUCTS = ("GEMM", "grouped GEMM")


@dataclass(frozen=True)
class Pace:
    """Factors on the times of kernels [N], and the share of the time of those that compute by each of `WAYS`."""

    factors: Floats
    shares: Mapping[str, float]


def pace_of(model: Contended, gpu: str) -> Pace:
    """Times of the kernels of a profile on the GPU of a machine by name, over recorded ones; "": the recorded GPU.

    Raises ConfigError for a machine without peak rates.
    """
    kernels, computes = model.profile.kernels, model.profile.is_compute
    factors, ways = np.ones(len(kernels)), np.full(len(kernels), WAYS.index("peak rates"))
    if gpu:
        ratios = _Ratios(model.laws.hardware, machine_named(gpu))
        known = dict[tuple[str, str, float], tuple[float, str]]()
        columns = kernels["kind"].tolist(), _texts(model), kernels["ctas"].to_numpy(float, na_value=-1.0).tolist()
        for place, key in enumerate(zip(*columns, strict=True)):
            if computes[place]:
                if key not in known:
                    known[key] = ratios.ratio(*key)
                factors[place], way = known[key]
                ways[place] = WAYS.index(way)
    seconds = model.profile.seconds[computes]
    spent = np.bincount(ways[computes], seconds, len(WAYS)) / max(float(seconds.sum()), 1e-12)
    return Pace(factors, dict(zip(WAYS, spent.tolist(), strict=True)))


def _texts(model: Contended) -> list[str]:
    kernels = model.profile.kernels
    return ["" for _ in range(len(kernels))] if "shape" not in kernels else kernels["shape"].fillna("").tolist()


class _Ratios:
    """Ratios of times on another machine to those on the recorded one."""

    def __init__(self, recorded: ProfiledMachine, other: ProfiledMachine) -> None:
        self._machines = recorded, other
        self._peaks = _peaks(recorded), _peaks(other)

    def ratio(self, kind: str, text: str, ctas: float) -> tuple[float, str]:
        """Time of a kernel on the other machine over that on the recorded one, and the way that was used."""
        shape = parse_shape(text) if text else None
        by_costs = None if shape is None else self._by_costs(kind, shape)
        if by_costs is not None:
            return by_costs, "operator costs"
        (flops, hbm), (other_flops, other_hbm) = self._peaks
        if kind not in ON_SMS:
            return hbm / other_hbm, "peak rates"
        if ctas <= 0:
            return flops / other_flops, "peak rates"
        times = [
            float(np.ceil(ctas / machine.gpu.num_cus)) * machine.gpu.num_cus / peaks[0]
            for machine, peaks in zip(self._machines, self._peaks, strict=True)
        ]
        return times[1] / times[0], "waves of CTAs"

    def _by_costs(self, kind: str, shape: OperatorShape) -> float | None:
        """Ratio by the costs of the operator; None where they are not known on both machines."""
        if kind in ON_SMS:
            return self._of_product(shape) if kind in _PRODUCTS else None
        try:
            chips = [Chip.of(machine, shape.precision) for machine in self._machines]
        except ValueError:
            return None
        times = [float(streaming_cost(chip, shape.traffic_bytes).seconds) for chip in chips]
        return times[1] / times[0]

    def _of_product(self, shape: OperatorShape) -> float | None:
        product = shape.product
        if product is None:
            return None
        sizes = GemmShape(product.n, product.m, product.k, product.batch, transposed_a=True)
        try:
            gpus = [gemms_of(machine, shape.precision) for machine in self._machines]
        except ValueError:
            return None
        times = [float(gemm_cost(gpu, sizes).seconds) for gpu in gpus]
        return times[1] / times[0]


def _peaks(machine: ProfiledMachine) -> tuple[float, float]:
    """FLOP/s of the data sheet at 16 bits and HBM bandwidth. Raises ConfigError where they are not known."""
    flops, hbm = machine.gpu.peak("fp16"), machine.gpu.hbm_bytes_per_s
    if flops is None or not hbm:
        way = "choose one with gpu.peak_flop_per_s.fp16 and gpu.hbm_bytes_per_s"
        raise ConfigError([Problem("system", "has no peak rates", machine.name, way)])
    return float(flops), float(hbm)
