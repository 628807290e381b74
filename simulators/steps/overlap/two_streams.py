"""Compute beside exchanges of experts: two streams of a GPU, slot by slot, as a recurrence and as a task graph.

In slot k compute has U_k, which waits for no exchange (shared experts, gradients of weights), and X_k, which needs the
exchange of the slot before; its exchange E_k carries what was computed in the slot before (DualPipe, arXiv:2412.19437,
figure 4; two batches in turns, as SGLang and vLLM run them). While both streams run, compute progresses at the share
s_k of its own rate, and the exchange at r_k. With t when compute of the slot before ended, and R what was left then of
its exchange:

    d = min(U / s, R / r')    b = t + d + (R - r' d)              the exchange of the slot before ends: E_k begins
    C = U - s d + X    d' = min(C / s, E / r)    t' = b + d' + (C - s d')    R' = E - r d'

(derived; r' of the slot before). A layer has a slot in which nothing but X is computed, so that R' does not depend on
the layers before: all from the second on take the same time, and three give the time of any number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from simulators.taskgraph.graph import GraphBuilder, TaskGraph

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Slot:
    """Times alone [s] of what two streams do side by side. name: of its tasks.

    unbound: compute that waits for no exchange. bound: compute that needs the exchange of the slot before. exchange: of
    what the slot before computed. compute_rate, exchange_rate: shares in (0, 1] of their own rates beside one another.
    """

    name: str = ""
    unbound: ArrayLike = 0.0
    bound: ArrayLike = 0.0
    exchange: ArrayLike = 0.0
    compute_rate: ArrayLike = 1.0
    exchange_rate: ArrayLike = 1.0

    @property
    def computed_s(self) -> Floats:
        """All its compute, alone."""
        return np.asarray(np.asarray(self.unbound, float) + np.asarray(self.bound, float))

    @property
    def waited_s(self) -> Floats:
        """Its time if nothing ran side by side."""
        return np.asarray(self.computed_s + np.asarray(self.exchange, float))


@dataclass(frozen=True)
class _Clock:
    """When compute ended [s], what is left of the exchange then [s], and the rate of that beside compute."""

    ended: Floats
    left: Floats
    rate: ArrayLike = 1.0

    def after(self, slot: Slot) -> _Clock:
        """The clock when compute of a slot has ended."""
        unbound, share = np.asarray(slot.unbound, float), np.asarray(slot.compute_rate, float)
        both = np.minimum(unbound / share, self.left / np.asarray(self.rate))
        begun = self.ended + both + (self.left - self.rate * both)
        compute, exchange = unbound - share * both + slot.bound, np.asarray(slot.exchange, float)
        beside = np.minimum(compute / share, exchange / np.asarray(slot.exchange_rate))
        ended = begun + beside + (compute - share * beside)
        return _Clock(np.asarray(ended), np.asarray(exchange - slot.exchange_rate * beside), slot.exchange_rate)

    def through(self, slots: Sequence[Slot]) -> _Clock:
        """The clock after several slots."""
        clock = self
        for slot in slots:
            clock = clock.after(slot)
        return clock


@dataclass(frozen=True)
class TwoStreams:
    """Slots of a number of equal layers: those of the first layer, of every further one, and after the last one."""

    first: tuple[Slot, ...]
    further: tuple[Slot, ...]
    after: tuple[Slot, ...] = field(default=())

    def slots(self, layers: int) -> Iterator[tuple[int, Slot]]:
        """Yield (layer, slot) in order; nothing without layers."""
        for layer in range(layers):
            yield from ((layer, slot) for slot in (self.further if layer else self.first))
        yield from ((layers - 1, slot) for slot in self.after if layers)

    def seconds(self, layers: ArrayLike) -> Floats:
        """Time [s] of so many layers."""
        clock, ends = _Clock(np.zeros(()), np.zeros(())).through(self.first), []
        for _ in range(3):
            last = clock.through(self.after)
            ends.append(last.ended + last.left)
            clock = clock.through(self.further)
        count, (one, two, three) = np.asarray(layers, float), ends
        several = two + (count - 2) * (three - two)
        return np.asarray(np.where(count > 1, several, count * one))

    def sum(self, amount: str, layers: ArrayLike) -> Floats:
        """Sum of a number of the slots over so many layers."""
        first, further, after = (
            sum((np.asarray(getattr(slot, amount)) for slot in slots), np.zeros(()))
            for slots in (self.first, self.further, self.after)
        )
        count = np.asarray(layers, float)
        return np.asarray(np.where(count > 0, first + (count - 1) * further + after, 0.0))

    def saved_s(self, layers: ArrayLike) -> Floats:
        """Time [s] by which both streams end before they would one after the other."""
        return np.asarray(self.sum("waited_s", layers) - self.seconds(layers))


class StreamTask(NamedTuple):
    """A task of one stream: its work alone [s], the names of those it waits for, and its group of contention laws."""

    name: str
    kind: str
    seconds: ArrayLike
    after: tuple[str, ...]
    group: str


def tasks(streams: TwoStreams, layers: int, block: str = "layer") -> Iterator[StreamTask]:
    """Yield the tasks of so many layers of a block in their order; none that takes no time."""
    computed, exchanged = tuple[str, ...](), tuple[str, ...]()
    for layer, slot in streams.slots(layers):
        name, begun = f"{block} {layer}: {slot.name}", _distinct_names(computed, exchanged)
        for part, seconds in ((f"{name}, unbound", slot.unbound), (name, slot.bound)):
            computed = computed if part != name else _distinct_names(computed, exchanged)
            if np.any(np.asarray(seconds) > 0):
                yield StreamTask(part, "gemm", seconds, computed, f"{slot.name}, compute")
                computed = (part,)
        exchanged = begun
        if np.any(np.asarray(slot.exchange) > 0):
            moved = f"{name}, exchange"
            yield StreamTask(moved, "transfer", slot.exchange, begun, f"{slot.name}, exchange")
            exchanged = (moved,)


def _distinct_names(*names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for each in names for name in each))


def laws(streams: TwoStreams) -> Iterator[tuple[tuple[str, str], Floats]]:
    """Yield ((slowed group, group whose activity slows it), factor) for the task graph."""
    slots = {slot.name: slot for slot in (*streams.first, *streams.further, *streams.after)}.values()
    for slot in slots:
        for other in slots:
            pair = f"{slot.name}, compute", f"{other.name}, exchange"
            yield pair, np.asarray(slot.compute_rate, float)
            yield pair[::-1], np.asarray(other.exchange_rate, float)


def lower(streams: TwoStreams, layers: int) -> TaskGraph:
    """The task graph of so many layers; numbers may be arrays over designs."""
    graph, places = GraphBuilder(), dict[str, int]()
    for task in tasks(streams, layers):
        after = [places[name] for name in task.after]
        places[task.name] = graph.task(task.name, task.kind, after=after, group=task.group, cap=1.0, work=task.seconds)
    for (slowed, active), factor in laws(streams):
        graph.slows(slowed, while_active=active, factor=factor)
    return graph.build()
