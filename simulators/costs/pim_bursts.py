"""A GPU and the units at its memory's banks, event by event, as they alternate on the memory's channels.

The GPU runs operators one after another. Some read a copy that the units make, for a layer ahead of the one that runs
(JIT-Q, arXiv:2311.05034). The units work in bursts, during which a share of the channels does not serve the GPU; after
a burst the GPU has a window. Data fetched ahead of its use keeps a kernel going through a burst (derived):

    computed x and fetched y of an operator of T seconds and b bytes:  x <= y <= min(1, x + staged / b)
    dy/dt <= supply / b      supply: the memory's rate, in a burst the share (1 - blocked) of it
    dx/dt = 1 / T while x < y, else min(1 / T, dy/dt)

which is linear between events: a burst or a window ends, an operator ends, the staging buffer runs empty or full. So an
isolated operator takes T, if T >= b / rate. Units start on a copy once the GPU is within `ahead` layers of it, and skip
windows while the GPU waits for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from simulators.compiled import compile_lazily

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Layers(NamedTuple):
    """Operators of kinds of layers, in the order of a pass; numbers are arrays over B designs.

    first [S + 1]: index of the first operator of each kind of layer. passes [S]: pass that it belongs to. beside [P]:
    whether the units may begin a burst while an operator runs (while the GPU waits they always may). many [B, S]:
    number of layers of that kind, one after another. seconds, bytes [B, P]: of an isolated operator. staged [B, P]:
    those of its bytes that may be on the chip before they are used. copy_s, burst_s [B, P]: time of the units for the
    copy that it reads, and the longest burst.
    """

    first: Ints
    passes: Ints
    beside: Ints
    many: Ints
    seconds: Floats
    bytes: Floats
    staged: Floats
    copy_s: Floats
    burst_s: Floats


@dataclass(frozen=True)
class Memory:
    """rate [bytes/s], blocked (share of the channels in a burst), window (per second of a burst), ahead (layers):
    numbers or arrays over B designs.
    """

    rate: ArrayLike
    blocked: ArrayLike
    window: ArrayLike
    ahead: ArrayLike

    def table(self, designs: int) -> Floats:
        """Columns of the fields [B, 4]."""
        numbers = (self.rate, self.blocked, self.window, self.ahead)
        return np.stack([np.broadcast_to(np.asarray(number, float), designs) for number in numbers], axis=1)


@dataclass(frozen=True)
class Turns:
    """Times [s] of B designs: makespan, GPU waiting for copies, GPU slowed by bursts, units busy.

    NaN for a design that breaks a rule.
    """

    seconds: Floats
    waited: Floats
    slowed: Floats
    busy: Floats


@dataclass(frozen=True)
class Events:
    """Times [s] of one design, for each operator that ran, in order: when it was reached, began and ended, and when its
    copy was begun and done (NaN for an operator without a copy).
    """

    reached: Floats
    began: Floats
    ended: Floats
    copied: Floats
    done: Floats


def turns(layers: Layers, memory: Memory) -> Turns:
    """Run B designs, those with the same numbers once."""
    columns = (*layers[3:], memory.table(len(layers.many)))
    rows = np.column_stack(columns)
    # rows as bytes: equal bits are equal designs
    _, first, which = np.unique(rows.view(f"V{rows.strides[0]}"), return_index=True, return_inverse=True)
    times = np.empty((len(first), 4))
    _run(*layers[:3], *(column[first] for column in columns), times, np.empty((0, 5)))  # no log
    return Turns(*times[which.reshape(-1)].T)


def events(layers: Layers, memory: Memory) -> Events:
    """Run one design and log its events."""
    # an operator without a copy has no such times
    log = np.full((int((np.diff(layers.first) * layers.many[0]).sum()), 5), np.nan)
    _run(*layers, memory.table(1), np.empty((1, 4)), log)
    return Events(*log.T)


@compile_lazily
def _run(  # noqa: C901, PLR0912, PLR0913, PLR0915, PLR0917
    first: Ints,
    passes: Ints,
    beside: Ints,
    counts: Ints,
    seconds: Floats,
    moved: Floats,
    staged: Floats,
    copy_s: Floats,
    burst_s: Floats,
    table: Floats,
    times: Floats,
    log: Floats,
) -> None:
    """Fill times [B, 4] with the fields of `Turns`; of one design, log [operators that ran, 5] with those of `Events`.

    The GPU is at operator `g` of the sequence, the units are at the copy for `c`.
    """
    kinds, longest = len(passes), 0
    for design in range(len(counts)):
        total = 0
        for kind in range(kinds):
            total += counts[design, kind] * (first[kind + 1] - first[kind])
        longest = max(longest, total)
    # scratch for the longest sequence of all designs
    place, layer, of_pass = np.empty(longest, np.int64), np.empty(longest, np.int64), np.empty(longest, np.int64)
    for design in range(len(counts)):
        rate, blocked, window, ahead = table[design, 0], table[design, 1], table[design, 2], table[design, 3]
        total = depth = 0  # number of a layer in its pass
        for kind in range(kinds):
            for _ in range(counts[design, kind]):
                for op in range(first[kind], first[kind + 1]):
                    place[total], layer[total], of_pass[total] = op, depth, passes[kind]
                    total += 1
                depth += 1
        sound = np.isfinite(rate) and np.isfinite(window)
        for op in range(first[kinds]):  # operators of all kinds of layers
            sound = sound and np.isfinite(seconds[design, op]) and np.isfinite(copy_s[design, op])
            sound = sound and np.isfinite(moved[design, op]) and burst_s[design, op] > 0.0
        if not sound:  # of a design that breaks a rule
            total = 0
        now = waited = busy = alone = x = y = 0.0
        phase, begun, until = 0, 0.0, 0.0  # of the units: idle, in a burst, in the window after one
        g = 0
        c = 0
        while c < total and copy_s[design, place[c]] <= 0.0:  # operators that read no copy are passed over by the units
            c += 1
        left = copy_s[design, place[c]] if c < total else 0.0  # of the copy that the units are at
        if len(log) > 0 and total > 0:
            log[0, 0] = 0.0
        while g < total:
            waits = c <= g  # the copy for g is not there
            if phase == 2 and (waits or until <= now):  # a GPU that waits needs no window
                phase = 0
            # copies are made for the pass that runs, no further ahead than buffers reach
            may = c < total and of_pass[c] == of_pass[g] and layer[c] <= layer[g] + ahead
            if phase == 0 and may and (waits or beside[place[g]] > 0):
                if len(log) > 0 and left == copy_s[design, place[c]]:  # its first burst
                    log[c, 3] = now
                phase, begun = 1, now
                until = now + min(left, burst_s[design, place[c]])
            span = until - now if phase > 0 else np.inf
            event = 0
            work = seconds[design, place[g]]
            # so that an isolated operator takes its time, whatever its bytes
            size = min(moved[design, place[g]], work * rate)
            speed = fetch = 0.0
            if not waits and work <= 0.0:  # an empty operator ends at once
                span, event = 0.0, 1
            elif not waits:
                speed = 1.0 / work
                if size > 0.0 and y < 1.0:
                    # ahead of the computation by so much of the operator
                    fetch, room = rate / size, staged[design, place[g]] / size
                    if phase == 1:  # channels of the burst do not serve the GPU
                        fetch *= 1.0 - blocked
                    if y <= x:  # nothing is staged: it computes as fast as it fetches
                        speed = min(speed, fetch)
                    if y >= x + room:  # the buffer is full: it fetches as fast as it computes
                        fetch = min(fetch, speed)
                    if fetch > 0.0 and (1.0 - y) / fetch < span:
                        span, event = (1.0 - y) / fetch, 4
                    if fetch > speed and (x + room - y) / (fetch - speed) < span:
                        span, event = (x + room - y) / (fetch - speed), 3
                    if fetch < speed and (y - x) / (speed - fetch) < span:
                        span, event = (y - x) / (speed - fetch), 2
                if speed > 0.0 and (1.0 - x) / speed <= span:  # an operator that ends with another event ends first
                    span, event = (1.0 - x) / speed, 1
            if len(log) > 0 and not waits and np.isnan(log[g, 1]):
                log[g, 1] = now
            now += span
            x, y = x + span * speed, y + span * fetch
            waited += span if waits else 0.0
            busy += span if phase == 1 else 0.0
            if event == 2:  # exactly, so that rounding does not leave a sliver to fetch
                y = x
            elif event == 3:
                y = min(1.0, x + staged[design, place[g]] / size)
            elif event == 4:
                y = 1.0
            if phase == 1 and now >= until:
                left -= min(left, burst_s[design, place[c]])  # whole bursts, or the rest
                phase, until = 2, now + window * (now - begun)  # the GPU's window is in proportion to the burst
                if left <= 1e-9 * copy_s[design, place[c]]:  # rounding of many bursts
                    if len(log) > 0:
                        log[c, 4] = now
                    c += 1
                    while c < total and copy_s[design, place[c]] <= 0.0:
                        c += 1
                    left = copy_s[design, place[c]] if c < total else 0.0
            if event == 1:
                alone += work
                g += 1
                x = y = 0.0  # the next operator has nothing staged
                if len(log) > 0:
                    log[g - 1, 2] = now
                    if g < total:
                        log[g, 0] = now
        slowed = max(0.0, now - waited - alone)  # a rounding of these sums is no gain
        times[design, 0], times[design, 1], times[design, 2], times[design, 3] = now, waited, slowed, busy
        if not sound:
            times[design] = np.nan
