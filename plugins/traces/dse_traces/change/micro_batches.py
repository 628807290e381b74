"""A profile with its batch in two halves, of which one computes while the other communicates.

Kernels are cut into segments at the collectives that later kernels wait for. Both halves run the segments of the first,
one after the other:

    compute        A1 B1 A2 B2 ...             of a segment k of the halves A and B
    communicate       a1 b1 a2 ...             a_k needs A_k, and A_(k+1) needs a_k

so a_k runs beside B_k and b_k beside A_(k+1), as in ISO, TokenWeave and DualPipe. Half of the batch takes a half of the
time and more, by a factor with an interval (assumed; low end, expected, high end):

    kernels of `ON_SMS`   waves of c / 2 CTAs on S SMs, twice, over those of c: [1, (1 + w) / 2, w];
                          where no CTAs are known, [1, 1.1, 1.25]
    all kernels           at least T + t0 over T, t0 in [0, 1, 2] us: what a kernel takes that does nothing
    collectives           T + a over T, a: latency of the machine's collectives times [1/2, 1, 2]

Optimizers, and collectives that nothing but optimizers waits for, run once, after both halves. Launches are taken to
come as early as recorded for both halves, as those of CUDA graphs do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dse_traces.laws.assumed_changes import assumed_changes
from dse_traces.laws.contention import ON_SMS
from dse_traces.laws.task_graph import EXPECTED, ContentionModel, Host, Need, Structure
from simulators.costs.gemm.waves import count_waves

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]
Marks = NDArray[np.bool_]

_ONCE = "optimizer"
_BOTH = (0, 1)


@dataclass(frozen=True)
class Halved(ContentionModel):
    """A profile in two halves. recorded: as it was. half [N]: of each kernel, 0 or 1; those that run once have 1."""

    recorded: ContentionModel
    half: Ints
    built: Structure

    @cached_property
    def structure(self) -> Structure:
        """Dependencies between kernels."""
        return self.built

    @cached_property
    def at_once(self) -> int:
        """Largest number of collectives that ran at once."""
        return self.recorded.at_once

    @cached_property
    def unknown_s(self) -> Floats:
        """How long each kernel waits for an unknown reason [N]: the first half does."""
        # a kernel without a first half runs once, and keeps its wait
        once = ~np.isin(self.origin, self.origin[self.half == 0])
        return np.where((self.half == 0) | once, self.recorded.unknown_s[self.origin], 0.0)

    @cached_property
    def host(self) -> Host:
        """Launches as recorded: it waited for the second half of the kernel that it waited for."""
        host, last = self.recorded.host, np.zeros(len(self.recorded.profile), np.intp)
        # the second half stands for the kernel, as it ends last
        last[self.origin[self.half == 1]] = np.flatnonzero(self.half == 1)
        waited = np.where(host.waited >= 0, last[host.waited], -1)
        return Host(last[host.kernels], host.ready_s, waited, host.place[self.origin])

    @property
    def divided(self) -> int:
        """Number of collectives that run in halves."""
        return int(((self.half == 0) & (self.group >= 0)).sum())


def halved(model: ContentionModel) -> Halved:
    """A profile with its batch in two halves."""
    once = _once(model)
    segment = _segments(model, once)
    # what runs once is kept as half 1 alone
    pairs = [(kernel, half) for kernel in range(len(segment)) for half in _BOTH if half or not once[kernel]]
    # segment by segment, in each the first half before the second
    pairs.sort(key=lambda pair: (segment[pair[0]], pair[1], pair[0]))
    origin, half = (np.array(column, np.intp) for column in zip(*pairs, strict=True))
    # half of the work each, times what halving loses
    share = np.where(once, 1.0, penalties(model) / 2)[:, origin]
    profile = replace(model.profile, kernels=model.profile.kernels.iloc[origin].reset_index(drop=True))
    by_kernel = {name: getattr(model, name)[origin] for name in ("group", "sms", "kernel_class")}
    of_model = {name: getattr(model, name) for name in ("waits", "laws", "names", "classes")}
    return Halved(
        profile=profile,
        **of_model,
        **by_kernel,
        alone_s=model.alone_s[:, origin] * share,
        origin=origin,
        recorded=model,
        half=half,
        built=_structure(model, origin, half),
    )


def penalties(model: ContentionModel) -> Floats:
    """Factor on the time of each kernel that runs in two halves, in each case of the laws [3, N]."""
    profile, sms, seconds = model.profile, model.laws.sms, np.maximum(model.alone_s[EXPECTED], 1e-9)
    assumed = assumed_changes()
    # at most twice as long: shorter kernels are taken to be nothing but their start
    fixed = 1 + np.minimum(assumed.cases("fixed_s")[:, None] / seconds, 1.0)
    of_groups = np.append(model.latency_s, 0.0)[model.group]  # what is no collective has the group -1
    latency = 1 + np.minimum(of_groups * assumed.cases("latency")[:, None] / seconds, 1.0)
    ctas = profile.kernels["ctas"].to_numpy(float, na_value=np.nan)
    with np.errstate(invalid="ignore"):
        # two launches of half of the CTAs may end in one partly filled wave more
        waves = 2 * count_waves(np.ceil(ctas / 2), sms, 0) / count_waves(ctas, sms, 0)
    # mild: halves fill waves as well as the whole does; severe: each half ends in a wave of its own
    by_waves = np.array([np.ones_like(waves), (1 + waves) / 2, waves])
    on_sms = np.where(np.isfinite(waves), by_waves, assumed.cases("halves_unknown")[:, None])
    heavy = profile.kernels["kind"].isin(ON_SMS).to_numpy(bool)
    # two launches cost at least the start of a kernel, whatever waves gain
    computed = np.where(heavy, np.maximum(on_sms, fixed), fixed)
    return np.asarray(np.where(profile.is_collective, latency, computed))


def _predecessors(model: ContentionModel, kernel: int) -> Iterator[tuple[int, float, float]]:
    """Yield what a kernel waits for, on its stream as well: (other kernel, at, reached)."""
    before = model.structure.previous[kernel]
    if before >= 0:
        yield before, 0.0, 1.0
    # order on the stream counts as a need: a segment must not begin before what it follows
    yield from ((need.other, need.at, need.reached) for need in model.structure.needs.get(kernel, ()))


def _once(model: ContentionModel) -> Marks:
    """Kernels whose work is no more with a larger batch [N]: optimizers, and collectives for these."""
    moves = model.profile.is_collective
    once = (model.profile.kernels["kind"] == _ONCE).to_numpy(bool)
    waiting: dict[int, list[int]] = {}
    for kernel in range(len(once)):
        for other, _, _ in _predecessors(model, kernel):
            if moves[other] and not moves[kernel]:
                waiting.setdefault(other, []).append(kernel)
    for collective in np.flatnonzero(moves).tolist():
        # nothing waits for it: all() of none holds, so it runs once
        once[collective] = all(once[kernel] for kernel in waiting.get(collective, ()))
    return once


def _segments(model: ContentionModel, once: Marks) -> list[int]:
    """Segment of each kernel [N]: how many collectives, or kernels that run once, come before it one after another."""
    moves, segments = model.profile.is_collective, list[int]()
    for kernel in range(len(once)):
        least = 0
        for other, _, _ in _predecessors(model, kernel):
            # a segment ends where computation takes over from a collective, and after what runs once
            ends = (moves[other] != moves[kernel] and moves[other]) or (once[other] and not moves[other])
            # collectives that follow each other on a stream stay in one segment
            if not (moves[other] and moves[kernel]):
                least = max(least, segments[other] + int(ends))
        segments.append(least)
    return segments


def _structure(model: ContentionModel, origin: Ints, half: Ints) -> Structure:
    """What waits for what in halves: streams in the new order, and of each half what it waited for."""
    moves, streams = model.profile.is_collective, model.profile.streams
    places = {pair: place for place, pair in enumerate(zip(origin.tolist(), half.tolist(), strict=True))}
    twice = set(origin[half == 0].tolist())
    previous, last = list[int](), dict[tuple[int, bool], int]()
    needs: dict[int, tuple[Need, ...]] = {}
    for place, (kernel, part) in enumerate(zip(origin.tolist(), half.tolist(), strict=True)):
        # collectives of a stream get a lane of their own: halves overlap only if they do not queue behind kernels
        lane = int(streams[kernel]), bool(moves[kernel])
        previous.append(last.get(lane, -1))
        last[lane] = place
        # a dict keeps the order and drops duplicates: stream and needs may name the same kernel
        wanted = dict.fromkeys(
            Need(at, places[other, which], reached)
            for other, at, reached in _predecessors(model, kernel)
            # needs within a lane follow from its order
            if moves[other] != moves[kernel] or streams[other] != streams[kernel]
            for which in _halves_of(other, kernel, part, twice)
        )
        needs |= {place: tuple(wanted)} if wanted else {}
    return Structure(tuple(previous), tuple(np.asarray(model.structure.launch_s)[origin].tolist()), needs)


def _halves_of(other: int, kernel: int, part: int, twice: set[int]) -> tuple[int, ...]:
    """The halves of another kernel that a half of a kernel waits for. twice: kernels that run in halves."""
    # what runs once is kept as the second half: it follows both
    if other not in twice:
        return (1,)
    return (part,) if kernel in twice else _BOTH
