"""Device as a kernel sees it: data sheet and efficiency constants, for the CUs that are granted."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from simulators.hardware.machine import Gpu, System
from simulators.hardware.parts import ELEMENT_BYTES, Assignment, Efficiency, ShaderEngines
from simulators.hardware.shared import shared_constants

Floats = NDArray[np.float64]

_MATRIX_STEP = 8  # channels that matrix units take at once


@dataclass(frozen=True)
class Chip:
    """Numbers of one device, or arrays over designs that broadcast with one another and with shapes.

    num_cus: of the device; cus: granted to the kernel. flop_per_s: peak of all CUs; vector_flop_per_s: that without
    matrix units, where the peak is theirs (None: it is not). streams: share of the HBM bandwidth that streams reach.
    assignment, engines: dispatch of workgroups, where it is known. The rest as in `Efficiency`.
    """

    num_cus: ArrayLike
    cus: ArrayLike
    flop_per_s: ArrayLike
    hbm_bytes_per_s: ArrayLike
    element_bytes: ArrayLike
    launch_s: ArrayLike
    compute: ArrayLike
    feed: ArrayLike
    transposed: ArrayLike
    narrow: ArrayLike
    latency_s: ArrayLike
    vector_flop_per_s: ArrayLike | None = None
    tiles: tuple[tuple[int, int], ...] | None = None
    prologue: ArrayLike = 0.0
    hbm_share: ArrayLike = field(default_factory=lambda: shared_constants().hbm_share)
    streams: ArrayLike = field(default_factory=lambda: shared_constants().streamed_share)
    split_s: ArrayLike = 0.0
    split_traffic: ArrayLike = 0.0
    sustained: ArrayLike = np.inf
    sustained_clock: ArrayLike | None = None
    cache_bytes: ArrayLike | None = None
    cache_speed: ArrayLike = 1.0
    weights_cache_bytes: ArrayLike | None = None
    camping: ArrayLike = 0.0
    assignment: Assignment = "static"
    engines: ShaderEngines | None = None
    fused_setup_s: ArrayLike | None = None

    @classmethod
    def of(
        cls, device: System, precision: str, *, efficiency: Efficiency | None = None, cus: ArrayLike | None = None
    ) -> Self:
        """A device at a precision as it runs, all its active CUs granted unless said otherwise.

        efficiency: in place of the device's own. Raises ValueError where there are no constants or no peak rate.
        """
        constants = efficiency or device.gpu.constants(precision)
        peak = device.gpu.peak(precision)
        # whichever is missing, the message names the way to all of them
        if constants is None or peak is None or device.gpu.hbm_rate is None:
            raise ValueError(
                f"{device.name} has no constants for {precision}: `python -m dse machine calibrate` fits them"
            )
        fitted = {
            name: value  # a number, or an array over a grid
            for name in Efficiency.model_fields
            if name not in ("streaming", "cast_traffic") and (value := getattr(constants, name)) is not None
        }
        # sustained rates are what kernels reach
        fitted.setdefault("hbm_share", shared_constants().hbm_share if device.gpu.hbm_bytes_per_s is None else 1.0)
        chip = cls(
            num_cus=device.gpu.num_cus,
            # a partition or a disabled CU leaves fewer than the data sheet has
            cus=device.gpu.working_cus if cus is None else cus,
            flop_per_s=peak,
            hbm_bytes_per_s=device.gpu.hbm_rate,
            element_bytes=ELEMENT_BYTES[precision],
            # what libraries did where nothing is known
            assignment="static" if device.gpu.gemm is None else device.gpu.gemm.assignment,
            engines=device.gpu.shader_engines,
            streams=device.gpu.stream_share,
            # only where the peak is that of matrix units
            vector_flop_per_s=device.gpu.peak("fp32") if precision in ("mixed", "fp16", "bf16") else None,
            **fitted,
        )
        return chip._running_as(device.gpu)

    def _running_as(self, gpu: Gpu) -> Self:
        """Return a copy at the clock of a GPU, without the cache that is disabled, faster altogether.

        Arithmetic, the last-level cache (`feed` is per FLOP of peak) and latencies follow the clock. A rate
        that was sustained at the board's limit falls with the clock only below the clock that the limit allowed.
        """
        # fitted with the cache, and corrected where a machine runs without it
        without = None if gpu.disabled_cache is None else dict(gpu.without_cache or {}).get(gpu.disabled_cache)
        feed, latency = (1.0, 1.0) if without is None else (without.feed, without.latency)
        vector, limited = self.vector_flop_per_s, self.sustained_clock
        clock = np.asarray(1.0 if gpu.clock is None else gpu.clock)
        return replace(
            self,
            sustained=self.sustained
            if limited is None
            else np.asarray(self.sustained) * np.minimum(1.0, clock / np.asarray(limited)) / clock,
            # the clock of the CUs; launches and HBM follow `overall_speed`
            flop_per_s=np.asarray(self.flop_per_s) * gpu.cu_speed,
            vector_flop_per_s=None if vector is None else np.asarray(vector) * gpu.cu_speed,
            hbm_bytes_per_s=np.asarray(self.hbm_bytes_per_s) * gpu.overall_speed,
            launch_s=np.asarray(self.launch_s) / gpu.overall_speed,
            feed=np.asarray(self.feed) * feed,
            latency_s=np.asarray(self.latency_s) * latency / gpu.cu_speed,
        )

    def at_clock(self, clock: ArrayLike) -> Self:
        """Return a copy at another clock: arithmetic and the last-level cache follow it, the HBM does not."""
        rate = np.asarray(self.flop_per_s) * np.asarray(clock)
        # loads wait for caches, which run at that clock
        return replace(self, flop_per_s=rate, latency_s=np.asarray(self.latency_s) / np.asarray(clock))

    def work_of(self, *channels: ArrayLike) -> ArrayLike:
        """Slowdown of arithmetic against the peak, for numbers of channels that matrix units may not support."""
        if self.vector_flop_per_s is None:
            return 1.0
        # a remainder keeps the library from matrix units
        fit = np.logical_and.reduce([np.asarray(size) % _MATRIX_STEP == 0 for size in channels])
        return np.where(fit, 1.0, self.without_matrix_units)

    @property
    def without_matrix_units(self) -> ArrayLike:
        """Slowdown of arithmetic without matrix units."""
        return 1.0 if self.vector_flop_per_s is None else np.asarray(self.flop_per_s) / self.vector_flop_per_s

    @property
    def rate(self) -> Floats:
        """Peak rate of one CU [FLOP/s]."""
        return np.asarray(np.asarray(self.flop_per_s, float) / np.asarray(self.num_cus))

    @property
    def reached_flop_per_s(self) -> Floats:
        """Rate that inner loops reach on all granted CUs [FLOP/s]."""
        return np.asarray(self.rate * np.asarray(self.cus) * np.asarray(self.compute), float)

    @property
    def bandwidth(self) -> Floats:
        """HBM bandwidth that the library's kernels reach on the granted CUs [bytes/s]."""
        # below the data sheet, as measured on the library's kernels
        return np.asarray(self.hbm_share, float) * self.drawable_bytes_per_s

    @property
    def drawable_bytes_per_s(self) -> Floats:
        """HBM bandwidth, as far as the granted CUs can draw it [bytes/s]."""
        # few CUs cannot have enough requests in flight for all of the HBM
        share = np.minimum(1.0, shared_constants().hbm_draw * np.asarray(self.cus) / np.asarray(self.num_cus))
        return np.asarray(np.asarray(self.hbm_bytes_per_s) * share, float)


@dataclass(frozen=True)
class Cost:
    """Work [FLOP], least traffic with HBM [bytes] and time alone [s] of operators; arrays of one shape."""

    flop: Floats
    bytes: Floats
    seconds: Floats

    @classmethod
    def of(cls, flop: ArrayLike, traffic: ArrayLike, seconds: ArrayLike) -> Cost:
        """Build from three arrays that broadcast."""
        return cls(*(np.asarray(column, float) for column in np.broadcast_arrays(flop, traffic, seconds)))


def camped_doublings(chip: Chip, k: ArrayLike) -> Floats:
    """Doublings by which the power of two in a stride of k elements is above those that use all channels evenly."""
    stride = (np.asarray(chip.element_bytes) * np.asarray(k)).astype(np.int64)
    # the lowest bit that is set: the largest power of two that divides
    power = np.log2((stride & -stride).astype(float))
    # strides up to there meet all channels
    return np.asarray(np.maximum(0.0, power - shared_constants().gemm.camping_free_log2))
