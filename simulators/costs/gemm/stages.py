"""A GEMM in stages: waves of workgroups that fetch inputs, multiply and write outputs, before a last-level cache.

Waves. A wave is W = c o workgroups (c CUs, o workgroups on each), one output tile each, dealt out in the order of the
output. After a share x of the T tiles the compute time is t(x) = ceil(min(ceil(x T / W) W, T) / c) t_tile: a tile is
complete when its wave is (dynamic assignment: x T / c t_tile). K that is sliced by tensor parallelism shortens t_tile
and leaves T, which is why output appears bit by bit (T3, arXiv:2401.16677).

Inputs. A wave covers a strip of rows of one operand and streams the other past it, which is read from the HBM again
on every pass unless a line is still in the cache, of L bytes in sets of a lines. Between two uses of a line the rest of
the streamed operand, a strip, and the outputs of a pass go through the cache, F bytes with the line itself. Where
addresses are hashed to sets and the least recently used line of a set goes, it survives if fewer than a of them met its
set:

    h = P(Poisson(a F / L) < a)          reads = A + B + (passes - 1) streamed (1 - h)

in the better of both orders of traversal (set conflicts after A. J. Smith, 1978; no number is fitted). Outputs that
bypass the cache (updates by PIM) leave their term out. In each stage a fraction `serial_fraction` of the reads comes
before the multiplication, the rest beside it.

Bursts. A wave multiplies in steps of `tile_depth` of k, whose inputs are fetched one step ahead (two buffers): a burst
of reads for each step, of which a share q goes to the HBM:

    q = reads / (resident + passes streamed)          lines that miss, of those that the waves ask for
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from simulators.costs.gemm.waves import GemmKernel, GemmShape, WaveGemms
from simulators.hardware.machine import Gpu
from simulators.hardware.parts import ELEMENT_BYTES

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class StagedGemm:
    """One GEMM on all CUs, arrays of the arguments' broadcast shape.

    compute_s: of all waves [s]. read_bytes, write_bytes: at the HBM. flop. elapsed: share of the output (0 to 1) ->
    share of `compute_s` after which it is complete. miss_share: of bursts of reads that go to the HBM. wave_bytes: of
    the output of a full wave.
    """

    compute_s: Floats
    read_bytes: Floats
    write_bytes: Floats
    flop: Floats
    elapsed: Callable[[float], Floats]
    miss_share: Floats
    wave_bytes: Floats

    def queue_share(self, queue_s: ArrayLike, steps: ArrayLike) -> Floats:
        """Share of a queue of requests, left by a wave, for which the reads of the next wave wait on average.

        queue_s: time [s] in which the memory serves it, first come, first served. steps: bursts of a wave. The first
        burst that misses waits for what is left of the queue, less the step for which its buffer lasts; with q the
        share that misses, r the time of a step over that of the queue and J = min(steps, floor(1 / r)):

            sum over j < J of q (1 - q)^j (1 - (j + 1) r)  =  1 - p - r ((1 - p) / q - J p),   p = (1 - q)^J
        """
        # a full wave is its share of the output
        step_s = self.compute_s * self.wave_bytes / self.write_bytes / np.asarray(steps, float)
        ratio = step_s / np.asarray(queue_s, float)
        bursts = np.minimum(np.asarray(steps, float), np.floor(1 / ratio))  # later steps find the queue gone
        hit = (1 - self.miss_share) ** bursts
        # rounding, or no queue
        return np.asarray(np.maximum(1 - hit - ratio * ((1 - hit) / self.miss_share - bursts * hit), 0.0))


def stage_gemm(gpu: Gpu, shape: tuple[ArrayLike, ArrayLike, ArrayLike], *, precision: str, bypass: bool) -> StagedGemm:
    """C[m, n] = A[m, k] B[k, n]. shape: (m, n, k). bypass: whether outputs pass by the cache.

    Raises ValueError for a GPU without `llc` or `gemm.workgroups_per_cu`.
    """
    if gpu.llc is None or gpu.gemm.workgroups_per_cu is None:
        raise ValueError("stages need gpu.llc and gpu.gemm.workgroups_per_cu")
    m, n, k = (np.asarray(value, float) for value in shape)
    cost, element_bytes = WaveGemms.of(gpu, precision).cost(GemmShape(m, n, k)), ELEMENT_BYTES[precision]
    kernel = cost.kernel
    wave = np.asarray(gpu.num_cus, float) * gpu.gemm.workgroups_per_cu
    outputs = element_bytes * m * n
    operands = (element_bytes * k * m, element_bytes * k * n)
    traversals = _strips(kernel, (m, n), wave)
    # outputs that pass by leave all of the cache to operands
    orders = [_reads(gpu, operands, traversal, 0.0 if bypass else outputs) for traversal in traversals]
    requested = [operands[order.resident] + order.passes * operands[1 - order.resident] for order in traversals]
    reads = np.asarray(np.minimum(*orders))
    missed = reads / np.where(orders[0] <= orders[1], *requested)  # of the order that reads less
    # a small product is less than a wave
    wave_bytes = np.minimum(element_bytes * wave * kernel.rows * kernel.cols, outputs)
    elapsed = _completion_shares(gpu, kernel, (m, n), wave)
    return StagedGemm(kernel.compute_s, reads, outputs, cost.flop, elapsed, np.minimum(missed, 1.0), wave_bytes)


def _completion_shares(
    gpu: Gpu, kernel: GemmKernel, sides: tuple[Floats, Floats], wave: Floats
) -> Callable[[float], Floats]:
    tiles = np.ceil(sides[0] / kernel.rows) * np.ceil(sides[1] / kernel.cols)
    if gpu.gemm.assignment == "dynamic":  # tiles end one by one
        return lambda share: np.full(tiles.shape, float(share))
    cus = np.asarray(gpu.num_cus, float)
    rounds = np.ceil(tiles / cus)

    def completion_share(share: float) -> Floats:
        waves = np.ceil(np.round(share * tiles / wave, 9))  # a share that ends with a wave is not the next one's
        return np.asarray(np.ceil(np.minimum(waves * wave, tiles) / cus) / rounds)

    return completion_share


@dataclass(frozen=True)
class _Traversal:
    """Loop order. resident: operand (0: A, 1: B) whose strips a wave holds; share of it; passes over the other one."""

    resident: int
    share: Floats
    passes: Floats


def _strips(kernel: GemmKernel, sides: tuple[Floats, Floats], wave: Floats) -> list[_Traversal]:
    """Both traversals: along rows with columns streamed, and the other way round."""
    tiles = np.ceil(sides[0] / kernel.rows), np.ceil(sides[1] / kernel.cols)
    traversals = []
    for resident, streamed in ((0, 1), (1, 0)):
        # no less than one tile, no more than all
        high = np.clip(wave / tiles[streamed], 1, tiles[resident])  # tiles that a wave covers of this side
        # a whole number of passes must not become one more by rounding
        traversals.append(_Traversal(resident, high / tiles[resident], np.ceil(np.round(tiles[resident] / high, 9))))
    return traversals


def _reads(gpu: Gpu, operands: tuple[Floats, Floats], traversal: _Traversal, outputs: ArrayLike) -> Floats:
    """Bytes read from the HBM in one order. outputs: bytes that pass through the cache."""
    from scipy.special import gammaincc

    llc, streamed = gpu.llc, operands[1 - traversal.resident]
    assert llc is not None
    through = streamed + traversal.share * operands[traversal.resident] + np.asarray(outputs) / traversal.passes
    # P(Poisson(x) < a) is the regularised upper incomplete gamma function Q(a, x)
    hit_rate = gammaincc(llc.ways, np.asarray(llc.ways) * through / llc.bytes)
    return np.asarray(sum(operands) + (traversal.passes - 1) * streamed * (1 - hit_rate))
