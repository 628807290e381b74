"""Times of kernels on the GPU of another machine, by the first way that can be used:

    operator costs    GEMMs whose shape is recorded: ratio of their costs (`simulators.costs.gemm`);
                      kernels bound by memory: of passes over their tensors (`simulators.costs.streaming`)
    waves of CTAs     kernels of `ON_SMS` whose CTAs are known: ceil(c / S') S' / P' over ceil(c / S) S / P
    peak rates        P / P' for kernels of `ON_SMS`, W / W' for all others

P: FLOP/s of the data sheet at the precision that is recorded, if both have it, else at 16 bits; W: HBM bandwidth; S:
SMs, an SM runs one of the c CTAs at a time. Collectives, copies and launches stay as they are.

Without a shape nobody knows whether SMs or the HBM bound a kernel of `ON_SMS`: decode attention, and products of few
tokens, read far more than they compute. The interval has both, the mild case the shorter time; W / W' is expected of
kernels whose names tell of decode, and the ratio of SMs of all others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dse.errors import ConfigError, Problem
from dse_traces.laws.contention import CASES, ON_SMS
from dse_traces.laws.machine import ProfiledMachine, machine_named
from dse_traces.laws.task_graph import ContentionModel
from dse_traces.profile.shapes import OperatorShape, parse_shape
from simulators.costs.chip import Chip
from simulators.costs.gemm import GemmShape, gemm_cost, gemms_of
from simulators.costs.gemm.waves import count_waves
from simulators.costs.streaming import streaming_cost

Floats = NDArray[np.float64]
WAYS = ("operator costs", "waves of CTAs", "peak rates")
"""How the time of a kernel on another GPU is known."""
_PRODUCTS = ("GEMM", "grouped GEMM")
_OF_DECODE = r"(?i)split_?kv|paged|decod|gemv"
"""What names of kernels hold that read a cache, or weights, for a few tokens: flash-decoding, vLLM, BLAS."""
Cases = tuple[float, float, float]
_Key = tuple[str, str, float, bool]


@dataclass(frozen=True)
class Pace:
    """Factors on the times of kernels [3, N], in each case of the laws, and the share of the time of those that compute
    by each of `WAYS`.
    """

    factors: Floats
    shares: Mapping[str, float]


def pace_of(model: ContentionModel, gpu: str) -> Pace:
    """Times of the kernels of a profile on the GPU of a machine by name, over recorded ones; "": the recorded GPU.

    Raises ConfigError for a machine without peak rates.
    """
    kernels, computes = model.profile.kernels, model.profile.is_compute
    factors, ways = np.ones((len(CASES), len(kernels))), np.full(len(kernels), WAYS.index("peak rates"))
    if gpu:
        ratios = _Ratios(model.laws.hardware, machine_named(gpu))
        # thousands of kernels share a few dozen shapes, and costs are slow to evaluate
        known = dict[_Key, tuple[Cases, str]]()
        ctas = kernels["ctas"].to_numpy(float, na_value=-1.0).tolist()
        decodes = kernels["name"].str.contains(_OF_DECODE, regex=True).fillna(value=False).tolist()
        columns = kernels["kind"].tolist(), _texts(model), ctas, decodes
        for place, key in enumerate(zip(*columns, strict=True)):
            if computes[place]:
                if key not in known:
                    known[key] = ratios.ratio(*key)
                factors[:, place], way = known[key]
                ways[place] = WAYS.index(way)
    seconds = model.profile.seconds[computes]
    spent = np.bincount(ways[computes], seconds, len(WAYS)) / max(float(seconds.sum()), 1e-12)
    return Pace(factors, dict(zip(WAYS, spent.tolist(), strict=True)))


def _texts(model: ContentionModel) -> list[str]:
    kernels = model.profile.kernels
    return ["" for _ in range(len(kernels))] if "shape" not in kernels else kernels["shape"].fillna("").tolist()


class _Ratios:
    """Ratios of times on another machine to those on the recorded one."""

    def __init__(self, recorded: ProfiledMachine, other: ProfiledMachine) -> None:
        self._machines = recorded, other
        self._peaks = _peaks(recorded), _peaks(other)
        # time of a byte of the HBM there over here
        self._hbm = self._peaks[0][1] / self._peaks[1][1]

    def ratio(self, kind: str, text: str, ctas: float, decodes: bool) -> tuple[Cases, str]:
        """Time of a kernel on the other machine over that on the recorded one [3], and the way that was used."""
        shape = parse_shape(text) if text else None
        by_costs = None if shape is None else self._by_costs(kind, shape)
        if by_costs is not None:
            return (by_costs, by_costs, by_costs), "operator costs"
        if kind not in ON_SMS:
            return (self._hbm, self._hbm, self._hbm), "peak rates"
        # -1 marks unknown CTAs (see `pace_of`)
        way = "waves of CTAs" if ctas > 0 else "peak rates"
        by_sms = self._by_sms(ctas, "fp16" if shape is None else shape.precision)
        low, high = sorted((by_sms, self._hbm))
        return (low, self._hbm if decodes else by_sms, high), way

    def _by_sms(self, ctas: float, precision: str) -> float:
        """Ratio of a kernel that SMs bound. ctas: -1 where they are not known."""
        peaks = [float(machine.gpu.peak(precision) or 0.0) for machine in self._machines]
        # a GPU without the precision runs another kernel: both are then compared at 16 bits
        flops = peaks if all(peaks) else [half for half, _ in self._peaks]
        sms = [float(machine.gpu.num_cus) for machine in self._machines]
        # c CTAs take ceil(c / S) rounds, and an SM has P / S of the FLOP/s
        rounds = [float(count_waves(ctas, count, 0)) * count if ctas > 0 else 1.0 for count in sms]
        return float(rounds[1] / flops[1] / (rounds[0] / flops[0]))

    def _by_costs(self, kind: str, shape: OperatorShape) -> float | None:
        """Ratio by the costs of the operator; None where they are not known on both machines."""
        if kind in ON_SMS:
            # no cost model of attention or convolutions takes a recorded shape
            return self._of_product(shape) if kind in _PRODUCTS else None
        try:
            chips = [Chip.of(machine, shape.precision) for machine in self._machines]
        # a precision that one of the machines has no rates for
        except ValueError:
            return None
        times = [float(streaming_cost(chip, shape.traffic_bytes).seconds) for chip in chips]
        return times[1] / times[0]

    def _of_product(self, shape: OperatorShape) -> float | None:
        product = shape.product
        if product is None:
            return None
        # row-major C = A B is column-major C' = B' A', so n and m change places, as in tables of GPUs
        sizes = GemmShape(product.n, product.m, product.k, product.batch, transposed_a=True)
        try:
            gpus = [gemms_of(machine, shape.precision) for machine in self._machines]
        except ValueError:
            return None
        times = [float(gemm_cost(gpu, sizes).seconds) for gpu in gpus]
        return times[1] / times[0]


def _peaks(machine: ProfiledMachine) -> tuple[float, float]:
    """FLOP/s of the data sheet at 16 bits and HBM bandwidth. Raises ConfigError where they are not known."""
    # where no precision is recorded, one counts for all kernels, as only the ratio of the GPUs' rates does
    flops, hbm = machine.gpu.peak("fp16"), machine.gpu.hbm_bytes_per_s
    if flops is None or not hbm:
        way = "choose one with gpu.peak_flop_per_s.fp16 and gpu.hbm_bytes_per_s"
        raise ConfigError([Problem("system", "has no peak rates", machine.name, way)])
    return float(flops), float(hbm)
