"""Workgroups of GEMM kernels in the slots of one GPU's CUs, dispatched one by one (compiled).

Kernels that were launched are served in turn: each gives its next workgroup to the CU with the fewest of them that has
room for its registers and LDS, 1 / occupancy of a CU each. A CU with o workgroups does q(o) = o / (o + half) of its
rate, shared equally (`simulators.costs.gemm.sharing`). Where kernels together want more of the LLC's or of the HBM's
rate than there is, max-min fairness divides it, and a kernel goes on by the smaller share of what it wants. What a
workgroup moves over the HBM depends on how many kernels share the LLC when it begins.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulators.compiled import flat, inline_never

Floats = NDArray[np.float64]
MOST_AT_ONCE = 64
"""Kernels that may be launched and not done."""
# slots that the arrays have for each CU
_PER_CU = 32
_NONE = -1
_INF = math.inf


class Kernels(NamedTuple):
    """Kernels [J], as they were chosen: workgroups, seconds of a CU of each, share of a CU, bytes of the LLC, and of
    the HBM [J, A + 1] by the number of kernels that run.
    """

    workgroups: Any
    work: Any
    share: Any
    llc: Any
    hbm: Any

    @classmethod
    def of(cls, jobs: int, most: int) -> Kernels:
        """Room for so many kernels, of which `most` run at once."""
        workgroups, work, share, llc = np.zeros((4, jobs))
        return cls(workgroups, work, share, llc, np.zeros((jobs, most + 1)))


class SlotState(NamedTuple):
    """What runs. pending, left: workgroups [J] to dispatch, and that are not done. begin, done [s] of kernels [J]; live
    [64]: kernels that were launched. kernel, remaining, hbm [C, 32]: of slots; used, count [C]; clock [1]; turn,
    launched [1]; want [J, 2], kept_share [J]: rates wanted of LLC and HBM, and the share of speed that each keeps.
    """

    pending: Any
    left: Any
    begin: Any
    done: Any
    live: Any
    kernel: Any
    remaining: Any
    hbm: Any
    used: Any
    count: Any
    clock: Any
    turn: Any
    launched: Any
    want: Any
    kept_share: Any

    @classmethod
    def idle(cls, jobs: int, cus: int) -> SlotState:
        """A GPU that runs nothing yet."""
        return cls(
            np.zeros(jobs), np.zeros(jobs), np.full(jobs, _INF), np.full(jobs, _INF), np.full(MOST_AT_ONCE, _NONE),
            np.full((cus, _PER_CU), _NONE), np.zeros((cus, _PER_CU)), np.zeros((cus, _PER_CU)), np.zeros(cus),
            np.zeros(cus, np.int64), np.zeros(1), np.zeros(1, np.int64), np.zeros(1, np.int64),
            np.zeros((jobs, 2)), np.ones(jobs),
        )  # fmt: skip

    def copy(self) -> SlotState:
        """The same, to go on from in another way."""
        return SlotState(*(column.copy() for column in self))

    def launch(self, kernels: Kernels, job: int, begin: float) -> None:
        """Launch a kernel, whose workgroups come from `begin` on. Raises ValueError where too many are launched."""
        if self.launched[0] == MOST_AT_ONCE:
            raise ValueError(f"more than {MOST_AT_ONCE} kernels are launched at once")
        self.pending[job] = self.left[job] = kernels.workgroups[job]
        self.begin[job] = begin
        self.live[self.launched[0]] = job
        self.launched[0] += 1


class Rates(NamedTuple):
    """Rates of a GPU: workgroups on a CU at which it does half of its rate; bytes/s of LLC and HBM."""

    half: float
    llc: float
    hbm: float


@inline_never
def _dispatch(kernels: Any, state: Any) -> None:
    """Give workgroups to CUs that have room, kernel by kernel in turn."""
    # a round in which no kernel places a workgroup ends the dispatch
    live, failed = state.launched[0], 0
    running = 0
    for place in range(live):
        # a kernel that is launched but has not begun takes no share of the cache
        running += state.begin[state.live[place]] <= state.clock[0]
    while live > 0 and failed < live:
        state.turn[0] = (state.turn[0] + 1) % live
        job = state.live[state.turn[0]]
        best = _NONE
        if state.begin[job] <= state.clock[0] and state.pending[job] > 0:
            for cu in range(len(state.used)):
                # rounding: as many shares of 1 / o have to fit as o
                fits = state.used[cu] + kernels.share[job] <= 1.0 + 1e-9 and state.count[cu] < _PER_CU
                # ties go to the first CU, so that runs are deterministic
                if fits and (best == _NONE or state.count[cu] < state.count[best]):
                    best = cu
        if best == _NONE:
            failed += 1
            continue
        failed = 0
        # slots are freed in any order: the first free one is taken
        slot = 0
        while state.kernel[best, slot] != _NONE:
            slot += 1
        state.kernel[best, slot] = job
        state.remaining[best, slot] = kernels.work[job]
        # more kernels at once leave less of the cache to each, so that each workgroup moves more
        state.hbm[best, slot] = kernels.hbm[job, min(running, kernels.hbm.shape[1] - 1)]
        state.used[best] += kernels.share[job]
        state.count[best] += 1
        state.pending[job] -= 1


@inline_never
def _fair_level(state: Any, column: int, rate: float) -> float:
    """Level up to which max-min fairness serves what kernels want of a rate; inf where all are served."""
    left, least, total = rate, 0.0, 0.0
    for place in range(state.launched[0]):
        total += state.want[state.live[place], column]
    # water filling: the smallest demands are served in full, one size after the other
    while total > rate:
        waiting, smallest = 0, _INF
        for place in range(state.launched[0]):
            wanted = state.want[state.live[place], column]
            # demands up to `least` are served already
            if wanted > least:
                waiting += 1
                smallest = min(smallest, wanted)
        # the rest does not suffice for the next size: it is divided equally
        if smallest * waiting >= left:
            return float(left / waiting)
        for place in range(state.launched[0]):
            if state.want[state.live[place], column] == smallest:
                left -= smallest
        least = smallest
    return _INF


@inline_never
def _share_memory(kernels: Any, rates: Any, state: Any) -> None:
    """Share of its speed that each kernel keeps, as LLC and HBM allow."""
    for place in range(state.launched[0]):
        job = state.live[place]
        state.want[job, 0] = state.want[job, 1] = 0.0
    for cu in range(len(state.used)):
        for slot in range(_PER_CU if state.count[cu] > 0 else 0):
            job = state.kernel[cu, slot]
            if job != _NONE:
                # q(o) / o of a CU's rate for each of its o workgroups, as shares of one workgroup
                pace = 1.0 / (state.count[cu] + rates.half) / kernels.work[job]
                state.want[job, 0] += pace * kernels.llc[job]
                state.want[job, 1] += pace * state.hbm[cu, slot]
    llc, hbm = _fair_level(state, 0, rates.llc), _fair_level(state, 1, rates.hbm)
    for place in range(state.launched[0]):
        job = state.live[place]
        kept_share = 1.0
        if state.want[job, 0] > llc:
            kept_share = llc / state.want[job, 0]
        if state.want[job, 1] > hbm:
            # the scarcer of both holds the kernel up
            kept_share = min(kept_share, hbm / state.want[job, 1])
        state.kept_share[job] = kept_share


@inline_never
def _speed(cu: int, slot: int, rates: Any, state: Any) -> float:
    """Seconds of a CU that a workgroup does in a second."""
    return float(state.kept_share[state.kernel[cu, slot]] / (state.count[cu] + rates.half))


@inline_never
def _soonest(rates: Any, state: Any, until: float) -> float:
    """When a workgroup ends or a kernel's first may begin, or `until`."""
    at = until
    for place in range(state.launched[0]):
        begin = state.begin[state.live[place]]
        if begin > state.clock[0]:
            at = min(at, begin)
    for cu in range(len(state.used)):
        if state.count[cu] > 0:
            for slot in range(_PER_CU):
                if state.kernel[cu, slot] != _NONE:
                    at = min(at, state.clock[0] + state.remaining[cu, slot] / _speed(cu, slot, rates, state))
    return at


@inline_never
def _progress(at: float, kernels: Any, rates: Any, state: Any) -> bool:
    """Go on until an instant; whether a kernel is done by then."""
    passed, ended = at - state.clock[0], False
    for cu in range(len(state.used)):
        if state.count[cu] == 0:
            continue
        gone, freed = 0, 0.0
        for slot in range(_PER_CU):
            job = state.kernel[cu, slot]
            if job == _NONE:
                continue
            state.remaining[cu, slot] -= passed * _speed(cu, slot, rates, state)
            # what rounding leaves of a workgroup is no work
            if state.remaining[cu, slot] <= 1e-9 * kernels.work[job]:
                state.kernel[cu, slot] = _NONE
                gone += 1
                freed += kernels.share[job]
                state.left[job] -= 1
                if state.left[job] == 0:
                    state.done[job] = at
                    ended = True
        state.count[cu] -= gone
        # an empty CU is reset, so that rounding does not add up
        state.used[cu] = 0.0 if state.count[cu] == 0 else state.used[cu] - freed
    state.clock[0] = at
    return ended


@inline_never
def _retire(state: Any) -> None:
    """Forget kernels that are done."""
    keep = 0
    for place in range(state.launched[0]):
        job = state.live[place]
        if state.left[job] > 0:
            state.live[keep] = job
            keep += 1
    state.launched[0] = keep
    # places have moved, so the turn begins anew
    state.turn[0] = 0


@flat
def advance(kernels: Any, rates: Any, state: Any, until: float) -> bool:
    """Go on until a kernel is done, or an instant [s]; whether one is done."""
    while state.clock[0] < until or state.launched[0] > 0:
        _dispatch(kernels, state)
        _share_memory(kernels, rates, state)
        at = _soonest(rates, state, until)
        # nothing runs, and nothing will begin
        if at == _INF:
            return False
        if _progress(at, kernels, rates, state):
            _retire(state)
            return True
        if at >= until:
            return False
    return False
