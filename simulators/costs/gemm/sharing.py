"""GEMM kernels that share one GPU: workgroups, occupancy, a last-level cache that is divided, and kernels tuned for it.

A kernel has a tile of tm x tn; with c CUs, F their matrix rate, e the tile's efficiency, b bytes of an element, and a
share of L bytes of the last-level cache:

    n     = ceil(m / tm) ceil(n / tn)                                workgroups
    o     = min(registers / (4 tm tn), LDS / (2 b (tm + tn) depth))  of them on a CU at once, 1 at least
    q(o)  = o / (o + half)                                           share of the rate that o of them reach
    u     = 2 tm tn k / (F e q(o))                                   CU-seconds of a workgroup among others
    alone = ceil(n / c) 2 tm tn k / (F e q(min(o, ceil(n / c))))     the busiest CU (wave quantisation)
    LLC   = n k (tm + tn) b                                          bytes into CUs
    HBM   = (A + B + C + (p - 1) min(A, B) (1 - h)) b                p = ceil(n d / (c o)) waves, d kernels at once
    h     = min(1, L / (d (min(A, B) + s C)))                        of what a wave reads again, s = 1/4

Alone a kernel takes max(alone, LLC / rate, HBM / rate) + launch. Kernels that run at once share CUs, LLC and HBM rates;
each has an equal share of the LLC's bytes and of the workgroups that are there at once, so it comes in more waves; and
workgroups of one fill what another one's last wave leaves. A library picks the kernel that is fastest alone on the
whole GPU. One that is globally optimised (GOLDYLOC, arXiv:2409.02227) is picked at each degree of concurrency from
those that are fastest alone on all, a half and a quarter of the CUs and the LLC. Derived (the model of
`simulators.costs.gemm.waves` with occupancy and shares); no number is fitted. s is `cached_output` of
conf/data/operators.yaml.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from simulators.costs.gemm.waves import WaveGemms
from simulators.hardware.machine import Gpu
from simulators.hardware.parts import GemmLibrary
from simulators.hardware.shared import shared_constants

Floats = NDArray[np.float64]

Choice = Literal["isolated", "shared", "best"]
SHARES = (1.0, 0.5, 0.25)
"""Of the GPU, under which candidates are tuned."""
_ACCUMULATOR_BYTES = 4.0  # fp32, in registers
_BUFFERS = 2.0  # of operands in the LDS: one is filled while the other one is read


@dataclass(frozen=True)
class SharedGemms:
    """Kernels of GEMMs, arrays [...] or, before one is chosen, [..., T] over the tiles of a library.

    workgroups. each_s: CU-seconds of a workgroup among others. alone_s: of all on the busiest CU. llc_bytes, hbm_bytes.
    rows, cols: of the tile. occupancy: workgroups on a CU. tiled: whether the last axis is one of tiles.
    """

    workgroups: Floats
    each_s: Floats
    alone_s: Floats
    llc_bytes: Floats
    hbm_bytes: Floats
    rows: Floats
    cols: Floats
    occupancy: Floats
    tiled: bool = True

    def seconds(self, gpu: Gpu) -> Floats:
        """Time alone [s], without launch."""
        assert gpu.llc is not None and gpu.llc.bytes_per_s is not None
        llc, hbm = self.llc_bytes / self._of(gpu.llc.bytes_per_s), self.hbm_bytes / self._of(gpu.hbm_bytes_per_s)
        # a roofline: the scarcest of CUs, LLC and HBM
        return np.asarray(np.maximum(np.maximum(self.alone_s, llc), hbm))

    def together(self, gpu: Gpu, degree: ArrayLike) -> Floats:
        """Time [s] of `degree` of them at once, each with its share of the cache already."""
        assert gpu.llc is not None and gpu.llc.bytes_per_s is not None
        # workgroups of one kernel fill what others leave: CU-seconds, no waves
        compute = self.workgroups * self.each_s / self._of(gpu.num_cus)
        llc, hbm = self.llc_bytes / self._of(gpu.llc.bytes_per_s), self.hbm_bytes / self._of(gpu.hbm_bytes_per_s)
        busiest = np.maximum(np.maximum(compute, llc), hbm)
        return np.asarray(np.maximum(self.seconds(gpu), self._of(degree) * busiest))  # no faster than one of them alone

    def _of(self, value: ArrayLike) -> Floats:
        """Shape a number of the GPU or of the design to broadcast with the tiles, if there are several."""
        return _column(value) if self.tiled else np.asarray(value, float)

    def at(self, places: NDArray[np.intp]) -> SharedGemms:
        """Select a tile for each GEMM by its index [...], which broadcasts with the GEMMs."""
        shape = np.broadcast_shapes(places.shape, *(value.shape[:-1] for value in self._numbers.values()))
        where = np.broadcast_to(places, shape)[..., None]
        picked = {
            name: np.take_along_axis(np.broadcast_to(value, (*shape, value.shape[-1])), where, axis=-1)[..., 0]
            for name, value in self._numbers.items()
        }
        return SharedGemms(**picked, tiled=False)

    @property
    def _numbers(self) -> dict[str, Floats]:
        return {name: value for name, value in vars(self).items() if name != "tiled"}


def kernels(
    gpu: Gpu,
    shape: tuple[ArrayLike, ArrayLike, ArrayLike],
    *,
    precision: str,
    share: ArrayLike = 1.0,
    degree: ArrayLike = 1,
) -> SharedGemms:
    """All kernels [..., T] of a GEMM of (m, n, k) on a share of the CUs and of the LLC, as one of `degree` at once.

    Raises ValueError for a GPU without what occupancy and sharing need (`lacks`).
    """
    if missing := lacks(gpu):
        raise ValueError(f"kernels that share a GPU need {', '.join(missing)}")
    m, n, k, part, concurrency = (np.asarray(value, float)[..., None] for value in (*shape, share, degree))
    library, llc, waves = gpu.gemm, gpu.llc, WaveGemms.of(gpu, precision)
    assert llc is not None
    element_bytes = waves.element_bytes
    rows, cols, efficiency = np.array([(tile.rows, tile.cols, tile.efficiency) for tile in library.tiles]).T
    cus = np.maximum(1.0, np.floor(_column(gpu.num_cus) * part))  # whole CUs
    occupancy = _occupancy(library, rows, cols, element_bytes)
    workgroups = np.ceil(m / rows) * np.ceil(n / cols)
    busiest = np.ceil(workgroups / cus)
    plain = 2 * rows * cols * k / (_column(waves.flop_per_s_per_cu) * efficiency)
    cache_bytes = _column(llc.bytes) * part / concurrency  # an equal share each
    operands = element_bytes * np.stack(np.broadcast_arrays(m * k, k * n, m * n))
    # kernels that run at once divide the workgroups that are resident
    waves = np.ceil(workgroups * concurrency / (cus * occupancy))
    workgroups, workgroup_s, alone, through, traffic = np.broadcast_arrays(
        workgroups,
        plain / _rate_share(library, occupancy),
        busiest * plain / _rate_share(library, np.minimum(occupancy, busiest)),
        workgroups * k * (rows + cols) * element_bytes,
        hbm_traffic(operands, cache_bytes, waves),
    )
    return SharedGemms(workgroups, workgroup_s, alone, through, traffic, rows, cols, occupancy)


def hbm_traffic(operands: Floats, cache_bytes: ArrayLike, waves: ArrayLike) -> Floats:
    """HBM traffic [bytes] of GEMMs: `HBM` of the module's docstring. operands [3, ...]: bytes of A, B and C.

    cache_bytes: of the last-level cache that a GEMM has; waves: of the workgroups that run at once.
    """
    small = np.minimum(operands[0], operands[1])
    hit_rate = np.minimum(
        1.0, np.asarray(cache_bytes, float) / (small + shared_constants().gemm.cached_output * operands[2])
    )
    return np.asarray(operands.sum(axis=0) + (np.asarray(waves, float) - 1) * small * (1 - hit_rate))


def chosen(
    gpu: Gpu,
    shape: tuple[ArrayLike, ArrayLike, ArrayLike],
    *,
    precision: str,
    degree: ArrayLike = 1,
    choice: Choice = "isolated",
) -> SharedGemms:
    """Choose the kernel [...] of each GEMM that runs beside degree - 1 others.

    choice: isolated, the library's; shared, the globally optimised one; best, the one of all that would be fastest
    beside others like itself.
    """
    every = kernels(gpu, shape, precision=precision, degree=degree)
    if choice == "best":
        return every.at(np.argmin(every.together(gpu, degree), axis=-1))
    if choice == "isolated":  # tuned for the whole GPU, whatever runs at the same time
        return every.at(_fastest(gpu, shape, precision=precision, share=1.0))
    candidates = [_fastest(gpu, shape, precision=precision, share=share) for share in SHARES]  # one for each share
    places = np.stack(candidates, axis=-1)
    seconds = every.together(gpu, degree)
    shape_of_gemms = np.broadcast_shapes(seconds.shape[:-1], places.shape[:-1])
    places = np.broadcast_to(places, (*shape_of_gemms, places.shape[-1]))
    candidate_s = np.take_along_axis(np.broadcast_to(seconds, (*shape_of_gemms, seconds.shape[-1])), places, axis=-1)
    return every.at(np.take_along_axis(places, np.argmin(candidate_s, axis=-1)[..., None], axis=-1)[..., 0])


def _fastest(
    gpu: Gpu, shape: tuple[ArrayLike, ArrayLike, ArrayLike], *, precision: str, share: float
) -> NDArray[np.intp]:
    """Place of the kernel that is fastest alone on a share of the GPU."""
    seconds = kernels(gpu, shape, precision=precision, share=share).seconds(gpu)
    return np.asarray(np.argmin(seconds, axis=-1))


def lacks(gpu: Gpu) -> list[str]:
    """List the keys that occupancy and sharing need and a GPU does not give."""
    library = gpu.gemm
    needed = {
        "gpu.llc.bytes_per_s": None if gpu.llc is None else gpu.llc.bytes_per_s,
        "gpu.gemm.register_bytes": library.register_bytes,
        "gpu.gemm.lds_bytes": library.lds_bytes,
        "gpu.gemm.tile_depth": library.tile_depth,
        "gpu.gemm.half_occupancy": library.half_occupancy,
    }
    return [path for path, value in needed.items() if value is None]


def _occupancy(library: GemmLibrary, rows: Floats, cols: Floats, element_bytes: float) -> Floats:
    assert library.register_bytes is not None
    assert library.lds_bytes is not None
    assert library.tile_depth is not None
    registers = _column(library.register_bytes) / (_ACCUMULATOR_BYTES * rows * cols)
    lds = _column(library.lds_bytes) / (_BUFFERS * element_bytes * (rows + cols) * _column(library.tile_depth))
    return np.asarray(np.maximum(1.0, np.floor(np.minimum(registers, lds))))


def _rate_share(library: GemmLibrary, occupancy: Floats) -> Floats:
    """Share of the rate q(o)."""
    assert library.half_occupancy is not None
    return np.asarray(occupancy / (occupancy + _column(library.half_occupancy)))


def _column(value: ArrayLike) -> Floats:
    return np.asarray(value, dtype=float)[..., None]
