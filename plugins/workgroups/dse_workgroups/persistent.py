"""Persistent kernels that communicate, workgroup by workgroup, on the GPUs of a node or of several nodes (compiled).

W physical workgroups of a GPU, as many as its CUs hold, loop over logical ones: physical workgroup w runs the logical
ones w, w + W, w + 2 W, ... of an order (arXiv:2305.06942). A logical workgroup takes work from a rate that all running
ones share equally, then

    stores   its bytes into a peer's memory, behind those before it on the wire, and runs on; where more than `depth`
             seconds of stores are outstanding it waits until they are not;
    puts     nothing but the bit of its slice; the workgroup that sets the last bit posts the slice, for `post` seconds
             of its own, and the wire reads it from memory;
    or waits for slices that arrive, and goes on a poll after the last of them.

Rates of a kernel bound by memory follow Little's law, that of all running workgroups together being
top u(a f / top) / u(W_0 f / top) with u(x) = x / sqrt(1 + x^2) (`simulators.costs.transfer`): a of them run, W_0 of a
kernel that does not communicate, and f is what a workgroup has in flight over the latency; less the share of the HBM's
time that wires take at both ends. Kernels bound by arithmetic run one tile a CU, whatever the others do.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dse.values import Memo
from simulators.compiled import flat, inline_never

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
NONE = -1
_IDLE, _RUNS, _HELD, _WAITS = 0, 1, 2, 3  # a physical workgroup's state
_INF = math.inf


class LogicalWorkgroups(NamedTuple):
    """Logical workgroups [I] of all GPUs in issue order, those of GPU g from first[g] to first[g + 1].

    work: bytes of HBM, or seconds of a CU. sent: bytes on a wire. completes: slice, or NONE. waits: group of slices, or
    NONE.
    """

    first: Ints
    work: Floats
    sent: Floats
    completes: Ints
    waits: Ints


class Slices(NamedTuple):
    """Slices [S] that are sent. left: workgroups that complete each. sent: bytes of a put; 0 where workgroups store.

    wire; group: of slices that are waited for together.
    """

    left: Ints
    sent: Floats
    wire: Ints
    group: Ints


class Wires(NamedTuple):
    """Wires [L] in one direction. rate [bytes/s]; latency, message: [s] until the first byte, and of a put or flag.

    depth: [s] of stores that may be outstanding. copy: [s] a byte of the workgroup that puts, before it posts.
    hbm_in, hbm_out: GPU whose memory is written and read, or NONE.
    """

    source: Ints
    target: Ints
    rate: Floats
    latency: Floats
    message: Floats
    depth: Floats
    copy: Floats
    hbm_in: Ints
    hbm_out: Ints


class Gpus(NamedTuple):
    """GPUs [G]: start [s], physical workgroups; memory-bound: top, flight (a workgroup's) and hbm [bytes/s], full: W_0.

    top = 0: bound by arithmetic. least: share of the HBM's time that is left to a kernel beside its wires.
    """

    start: Floats
    workgroups: Ints
    top: Floats
    flight: Floats
    hbm: Floats
    full: Floats
    least: Floats


class _State(NamedTuple):
    """What changes: of workgroups [G, W] state, finish (virtual), resume [s], item; of GPUs clock, served, rate, ended;
    of slices left, arrival; of groups left, arrival; of wires free; log [n, 4] (wire, start, end, bytes), its length.
    """

    state: Any
    finish: Any
    resume: Any
    item: Any
    clock: Any
    served: Any
    rate: Any
    ended: Any
    left: Any
    slice_s: Any
    group_left: Any
    group_s: Any
    free: Any
    log: Any
    logged: Any


class _World(NamedTuple):
    """A plan and its state."""

    items: LogicalWorkgroups
    slices: Slices
    wires: Wires
    gpus: Gpus
    state: _State
    post_s: float
    poll_s: float


@dataclass(frozen=True)
class KernelPlan:
    """A persistent kernel on all GPUs that are simulated. post_s, poll_s: of a put, and of a flag that is polled."""

    items: LogicalWorkgroups
    slices: Slices
    wires: Wires
    gpus: Gpus
    post_s: float
    poll_s: float

    def starting(self, start: Floats) -> KernelPlan:
        """The same kernel with other starts [G] in seconds."""
        return replace(self, gpus=self.gpus._replace(start=np.asarray(start, float)))


@dataclass(frozen=True)
class KernelRun:
    """When workgroups of each GPU ended [G], slices arrived [S] and the kernel was over [G] (all of its data there), in
    seconds; transfers [n, 4]: wire, start, end, bytes.
    """

    computed_s: Floats
    arrived_s: Floats
    over_s: Floats
    transfers: Floats


_KNOWN = Memo[KernelRun](32)


def run(plan: KernelPlan) -> KernelRun:
    """Run a kernel; equal ones once. Raises ValueError where workgroups wait for what never arrives."""
    parts = (plan.items, plan.slices, plan.wires, plan.gpus)
    digest = hashlib.blake2b(repr((plan.post_s, plan.poll_s)).encode())
    for column in (column for part in parts for column in part):
        # dtype and shape as well: equal bytes of other arrays must not be taken for equal
        digest.update(f"{column.dtype} {column.shape}".encode())
        digest.update(np.ascontiguousarray(column).tobytes())
    return _KNOWN.get(lambda: _run(plan), key=digest.digest())


def _run(plan: KernelPlan) -> KernelRun:
    items, slices, wires, gpus = plan.items, plan.slices, plan.wires, plan.gpus
    size, most = len(gpus.start), int(gpus.workgroups.max())
    groups = int(slices.group.max()) + 1 if len(slices.group) else 0
    # slices that have to arrive until a group is complete
    counts = np.bincount(slices.group, minlength=groups) if groups else np.zeros(1, np.int64)
    state = _State(
        np.zeros((size, most), np.int64),
        np.full((size, most), _INF),
        np.full((size, most), _INF),
        np.zeros((size, most), np.int64),
        np.array(gpus.start, float),
        np.zeros(size),
        np.ones(size),
        np.array(gpus.start, float),
        np.array(slices.left, np.int64),
        np.zeros(len(slices.left)),
        counts.astype(np.int64),
        np.zeros(max(groups, 1)),
        np.zeros(len(wires.rate)),
        # at most a transfer for each workgroup that stores, and one for each slice's data or flag
        np.zeros((int((items.completes != NONE).sum()) + len(slices.left) + 1, 4)),
        np.zeros(1, np.int64),
    )
    _loop(_World(items, slices, wires, gpus, state, plan.post_s, plan.poll_s))
    if (state.state == _WAITS).any():
        raise ValueError("workgroups wait for slices that nobody sends")
    over = np.array(state.ended)
    for place, arrived in enumerate(state.slice_s):
        target = wires.target[slices.wire[place]]
        # a kernel is over on a GPU when its last slice has come and was seen by a poll
        over[target] = max(over[target], arrived + plan.poll_s)
    return KernelRun(state.ended, state.slice_s, over, state.log[: state.logged[0]])


@inline_never
def _share(served: float, needed: float) -> float:
    ratio = served / needed
    # u(x) of the module: linear for few requests in flight, 1 at saturation
    return ratio / math.sqrt(1.0 + ratio * ratio)


@inline_never
def _set_rate(g: int, world: Any) -> None:
    """Rate of each running workgroup of a GPU."""
    gpus, wires, state = world.gpus, world.wires, world.state
    running = 0
    for w in range(gpus.workgroups[g]):
        running += state.state[g, w] == _RUNS
    # a kernel bound by arithmetic: work is in seconds of a CU, and goes on at rate 1
    if gpus.top[g] == 0.0 or running == 0:
        state.rate[g] = 1.0
        return
    top, flight = gpus.top[g], gpus.flight[g]
    # over that of a full GPU, whose rate was measured and is `top`
    total = top * _share(running * flight, top) / _share(gpus.full[g] * flight, top)
    taken = 0.0
    for wire in range(len(wires.rate)):
        # a wire that is busy reads and writes memory at both of its ends
        if state.free[wire] > state.clock[g]:
            taken += wires.rate[wire] / gpus.hbm[g] * ((wires.hbm_in[wire] == g) + (wires.hbm_out[wire] == g))
    # all running workgroups share the rate equally
    state.rate[g] = total * max(gpus.least[g], 1.0 - taken) / running


@inline_never
def _send(wire: int, now: float, seconds: float, sent: float, state: Any) -> float:
    """Put bytes on a wire for some seconds, behind what is there; when they are off it."""
    # first come, first served
    start = max(now, state.free[wire])
    state.free[wire] = start + seconds
    row = state.logged[0]
    state.log[row, 0], state.log[row, 1], state.log[row, 2], state.log[row, 3] = wire, start, start + seconds, sent
    state.logged[0] = row + 1
    return float(state.free[wire])


@inline_never
def _arrive(place: int, at: float, world: Any) -> None:
    """A slice is complete at its target: let go who waited for the last of its group."""
    state, gpus = world.state, world.gpus
    state.slice_s[place] = at
    group = world.slices.group[place]
    state.group_s[group] = max(state.group_s[group], at)
    state.group_left[group] -= 1
    if state.group_left[group] > 0:
        return
    for g in range(len(gpus.workgroups)):
        for w in range(gpus.workgroups[g]):
            # waiters look at flags: a poll passes until they see the last one
            if state.state[g, w] == _WAITS and world.items.waits[state.item[g, w]] == group:
                state.state[g, w] = _HELD
                state.resume[g, w] = state.group_s[group] + world.poll_s


@inline_never
def _begin(g: int, w: int, now: float, world: Any) -> None:
    """Begin the item of a workgroup, or wait for its input; without one, end."""
    state, items = world.state, world.items
    item = state.item[g, w]
    # issue order of this GPU is used up
    if item >= items.first[g + 1]:
        state.state[g, w] = _IDLE
        state.ended[g] = max(state.ended[g], now)
        return
    group = items.waits[item]
    if group != NONE and state.group_left[group] > 0:
        state.state[g, w] = _WAITS
        return
    # arrived in the future: events of other GPUs are handled in their own order
    if group != NONE and state.group_s[group] + world.poll_s > now:
        state.state[g, w] = _HELD
        state.resume[g, w] = state.group_s[group] + world.poll_s
        return
    state.state[g, w] = _RUNS
    # virtual time: served bytes (or seconds) of any workgroup of this GPU since the start
    state.finish[g, w] = state.served[g] + items.work[item]


@inline_never
def _store(item: int, now: float, world: Any) -> float:
    """Store what a workgroup made into a peer's memory; when it may go on."""
    slices, wires, state = world.slices, world.wires, world.state
    place = world.items.completes[item]
    wire, sent = slices.wire[place], world.items.sent[item]
    end = _send(wire, now, sent / wires.rate[wire], sent, state)
    if state.left[place] == 0:  # its flag follows on the same wire
        at = _send(wire, now, wires.message[wire], 0.0, state) + wires.latency[wire]
        _arrive(place, at, world)
    # stores are posted: the workgroup goes on while fewer than `depth` seconds are outstanding
    return float(max(now, end - wires.depth[wire]))


@inline_never
def _put(place: int, now: float, world: Any) -> float:
    """Put a slice, by the workgroup that completed it; when that may go on."""
    slices, wires, state = world.slices, world.wires, world.state
    wire, sent = slices.wire[place], slices.sent[place]
    # the workgroup copies and posts itself, and is held for that time
    until = now + sent * wires.copy[wire] + world.post_s
    seconds = 2 * wires.message[wire] + sent / wires.rate[wire]  # of the data, and of its flag
    end = _send(wire, until, seconds, sent, state)
    _arrive(place, end + wires.latency[wire], world)
    return float(until)


@inline_never
def _finish(g: int, w: int, world: Any) -> None:
    """Store or put what a workgroup made, and go to its next item, at once or later."""
    state = world.state
    now, item = state.clock[g], state.item[g, w]
    place, until = world.items.completes[item], now
    if place != NONE:
        state.left[place] -= 1
        if world.slices.sent[place] == 0.0:
            until = _store(item, now, world)
        elif state.left[place] == 0:
            until = _put(place, now, world)
    # the stride of the loop: w, w + W, w + 2 W, ...
    state.item[g, w] += world.gpus.workgroups[g]
    if until > now:
        state.state[g, w] = _HELD
        state.resume[g, w] = until
    else:
        _begin(g, w, now, world)


@inline_never
def _next(g: int, world: Any) -> float:
    """When the next workgroup of a GPU finishes or goes on, or a wire leaves its memory alone."""
    gpus, wires, state = world.gpus, world.wires, world.state
    soonest = _INF
    for w in range(gpus.workgroups[g]):
        if state.state[g, w] == _RUNS:
            # from virtual to real time, at the present rate
            soonest = min(soonest, state.clock[g] + (state.finish[g, w] - state.served[g]) / state.rate[g])
        elif state.state[g, w] == _HELD:
            soonest = min(soonest, state.resume[g, w])
    # rates change when a wire becomes idle, so that is an event, too
    if soonest < _INF and gpus.top[g] > 0.0:
        for wire in range(len(wires.rate)):
            if state.free[wire] > state.clock[g] and (wires.hbm_in[wire] == g or wires.hbm_out[wire] == g):
                soonest = min(soonest, state.free[wire])
    return soonest


@inline_never
def _go_on(g: int, at: float, world: Any) -> None:
    """Bring a GPU to an instant, and its workgroups beyond what ends there."""
    state = world.state
    state.served[g] += state.rate[g] * max(0.0, at - state.clock[g])
    state.clock[g] = max(at, state.clock[g])
    # workgroups that end together but for rounding end in one event
    slack = 1e-12 * state.served[g]
    for w in range(world.gpus.workgroups[g]):
        if state.state[g, w] == _RUNS and state.finish[g, w] <= state.served[g] + slack:
            _finish(g, w, world)
        elif state.state[g, w] == _HELD and state.resume[g, w] <= at:
            _begin(g, w, at, world)
    _set_rate(g, world)


@inline_never
def _first(world: Any) -> None:
    """Give each physical workgroup its first item."""
    state = world.state
    for g in range(len(world.gpus.workgroups)):
        for w in range(world.gpus.workgroups[g]):
            state.item[g, w] = world.items.first[g] + w
            _begin(g, w, state.clock[g], world)
        _set_rate(g, world)


@flat
def _loop(world: Any) -> None:
    """Run until no workgroup goes on."""
    _first(world)
    while True:
        at, g = _INF, NONE
        # the GPU with the soonest event goes first, so that arrivals are known to those after it
        for place in range(len(world.gpus.workgroups)):
            soonest = _next(place, world)
            if soonest < at:
                at, g = soonest, place
        if g == NONE:
            return
        _go_on(g, at, world)
