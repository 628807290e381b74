"""A prompt in two halves of its tokens: one computes while the other's partial sums are added (TokenWeave, ISO).

In each layer the halves A and B take turns, attention of A, of B, feed-forward of A, of B; what a half computes waits
for its own sum, which runs beside the other half's kernels on `parallel.split_ctas` CTAs. Kernels beside it have these
CUs less, and suffer from what moves (`gpu.contention.gemm_beside_cus`), for as much of their time as sums take over
what is computed (derived).

    computing ends     t_c = max(t_c, ready of the half) + its time        sums likewise, on a stream of their own

With `parallel.collectives=in_switch` one kernel adds in the switch and computes the norm
(`simulators.steps.operators.fused_sums`; arXiv:2505.11329). With `library` a sum is the library's all-reduce, as on
nodes without such a switch (arXiv:2409.11155), and the norm is a kernel of its own. On c of the c_l CTAs that the
library takes, whose CTAs move r bytes/s each and send x bytes/s over the links alone, the sum takes, with u of
`simulators.costs.transfer.link_utilisation` and f the slowdown of a CTA beside GEMMs
(`gpu.contention.cu_copy_beside_gemm`),

    T_c = T u(c_l r / x) / u(c r / (f x))     and no less than T (derived)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from simulators.costs.sharing import Sharing
from simulators.costs.transfer import link_utilisation
from simulators.hardware.parts import CuCopy
from simulators.steps.operators.fused_sums import HALVES
from simulators.steps.operators.work import OperatorCost, quotient

Floats = NDArray[np.float64]
_WARM_UP = 4  # layers after which each takes as long as the one before


@dataclass(frozen=True)
class LibrarySums:
    """The library's all-reduces of halves of tokens on `ctas` CTAs. copy: its kernels on all CTAs that it takes.

    slowdown: of a CTA that copies beside GEMMs.
    """

    ctas: ArrayLike
    copy: CuCopy
    slowdown: ArrayLike = 1.0

    def cost(self, alone: OperatorCost) -> OperatorCost:
        """Cost of a sum beside the other half. alone: of the library's on all of its CTAs."""
        sent = np.maximum(quotient(alone.wire_bytes, alone.seconds), 1.0)  # a byte a second where nothing is sent
        of_cta = np.asarray(self.copy.bytes_per_s_per_cu) / sent
        free = link_utilisation(np.asarray(self.copy.num_cus) * of_cta)
        beside = link_utilisation(np.asarray(self.ctas) * of_cta / np.asarray(self.slowdown))
        seconds = alone.seconds * np.maximum(free / beside, 1.0)
        return replace(alone, seconds=seconds, comm_cu_s=np.asarray(self.ctas, float) * seconds)


def beside_sums(alone: Sequence[Any], granted: Sequence[Any], sums: Sequence[Any], *, sharing: Sharing) -> list[Floats]:
    """Times [s] of kernels of a layer beside the sums of the other half.

    granted: with the CUs that these leave.
    """
    computed, added = sum(alone, np.zeros(())), sum(sums, np.zeros(()))
    # sums may outlast what is computed
    share = np.minimum(1.0, np.divide(added, computed, out=np.ones_like(added + computed), where=computed > 0))
    slowed = [sharing.gemm(less, free) for free, less in zip(alone, granted, strict=True)]
    return [np.asarray(free + (late - free) * share) for free, late in zip(alone, slowed, strict=True)]


def hidden_s(turns: Sequence[tuple[str, bool, Any]], layers: ArrayLike) -> Floats:
    """Time [s] by which `layers` equal layers end before their operators one after another would.

    turns: (half, whether it is a sum, its time [s]) of the operators of a layer, in their order.
    """
    free: dict[bool, Any] = {False: np.zeros(()), True: np.zeros(())}
    ready: Mapping[str, Any] = dict.fromkeys(HALVES, np.zeros(()))
    ends = [np.zeros(())]
    for _ in range(_WARM_UP):
        for half, adds, seconds in turns:
            end = np.maximum(free[adds], ready[half]) + seconds
            free, ready = {**free, adds: end}, {**ready, half: end}  # a half's next operator waits for its last
        ends.append(np.maximum.reduce(np.broadcast_arrays(*ready.values())))
    count, serial = np.asarray(layers, float), sum((seconds for _, _, seconds in turns), np.zeros(()))
    ended = ends[-1] + (count - _WARM_UP) * (ends[-1] - ends[-2])  # from then on, layers take equally long
    return np.asarray(np.maximum(count * serial - ended, 0.0))
