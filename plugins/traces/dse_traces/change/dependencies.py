"""Changes of what waits for what in a profile: collectives that start early, are cut, merged, or waited for later.

A profile does not tell which data a kernel reads. A collective is taken to need the kernel that it was seen to wait
for, else the last kernel that computes, was launched before it, and had ended when it began: what a framework waits
for when it puts a collective onto a stream of its own. Which kernels could run before a collective is waited for is
not known at all: `wait_later` says what it would be worth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from dse_traces.laws.contention import ON_SMS
from dse_traces.laws.task_graph import EXPECTED, ContentionModel, Need, Structure
from dse_traces.profile.waits import CLOCKS_DIFFER_S
from simulators.costs.gemm.waves import count_waves

Ints = NDArray[np.intp]
Change = Callable[[ContentionModel, Structure, int], Structure]
"""Of the structure of a model, for a group of collectives."""
RECORDED, FIRST, LATER = "as recorded", "high priority", "waited for later"
PARTS = (2, 4, 8)
"""Into which collectives are cut."""
MERGED: Mapping[str, int] = {f"{count} merged": count for count in (2, 4)}
"""Orders that merge collectives, and how many become one."""
_NOTHING = 1e-9  # share of its time that a collective takes which is part of another one


def members(model: ContentionModel, group: int) -> list[int]:
    """Collectives of a group, in order."""
    return [int(kernel) for kernel in np.flatnonzero(model.group == group)]


def producer(model: ContentionModel, structure: Structure, collective: int) -> int:
    """The kernel whose result a collective is taken to need, or -1."""
    # what it was seen to wait for, unless that is another collective, which produces no data of its own
    for need in structure.needs.get(collective, ()):
        if need.at == 0 and model.group[need.other] < 0:
            return need.other
    profile = model.profile
    before = np.arange(collective)
    computed = before[
        profile.is_compute[before] & (profile.end_s[before] <= profile.start_s[collective] + CLOCKS_DIFFER_S)
    ]
    launch = profile.kernels["launch_s"].to_numpy(float)
    # `~(a > b)` keeps kernels without a recorded launch, which may have been launched before
    if np.isfinite(launch[collective]):
        computed = computed[~(launch[computed] > launch[collective])]
    return int(computed[-1]) if len(computed) else -1


def consumers(structure: Structure, collective: int) -> Iterator[tuple[int, Need]]:
    """Yield kernels that wait for the end of a collective, and what they wait for."""
    for kernel, needs in structure.needs.items():
        for need in needs:
            # a need below 1 is a wait for SMs, and not for the result
            if need.other == collective and need.reached == 1.0:
                yield kernel, need


def start_early(model: ContentionModel, structure: Structure, group: int) -> Structure:
    """Collectives of a group begin as soon as what they need is there: each on its own stream, launched ahead. One that
    waited for an unknown reason stays where it is.
    """
    previous, launches, needs = list(structure.previous), list(structure.launch_s), dict(structure.needs)
    for collective in members(model, group):
        before = producer(model, structure, collective)
        # an unknown wait may be for data, so that an earlier begin is not known to be legal
        if before < 0 or model.unknown_s[collective] > 0:
            continue
        # NaN: its launch is ahead of time, and holds up nothing
        launches[collective] = float("nan")
        # a kernel before it on its stream stays; another collective there does not
        if previous[collective] >= 0 and model.group[previous[collective]] >= 0:
            previous[collective] = -1
        needs[collective] = (Need(0.0, before, 1.0),)
    return replace(structure, previous=tuple(previous), launch_s=tuple(launches), needs=needs)


def prioritise(model: ContentionModel, structure: Structure, group: int) -> Structure:
    """Collectives of a group have the highest priority: one that waited for an unknown reason beside a kernel that
    computes waits for one wave of CTAs of that kernel at most, after which SMs become free.
    """
    profile, paused = model.profile, dict(structure.paused_s)
    ctas = profile.kernels["ctas"].to_numpy(float, na_value=float("nan"))
    for collective in members(model, group):
        if (waited := float(model.unknown_s[collective])) > 0:
            # when it would have begun, had nothing held it up
            ready = profile.start_s[collective] - waited
            ran = profile.is_compute & (profile.start_s <= ready) & (profile.end_s > ready)
            if ran.any():
                beside = int(np.flatnonzero(ran)[-1])
                # a kernel without recorded CTAs is taken as one wave: priority then gains nothing beyond its end
                waves = float(count_waves(ctas[beside], model.laws.sms, 0)) if np.isfinite(ctas[beside]) else 1.0
                paused[collective] = min(waited, float(profile.seconds[beside] / max(waves, 1.0)))
    return replace(structure, paused_s=paused)


def cut(model: ContentionModel, structure: Structure, group: int, *, parts: int) -> Structure:
    """Collectives of a group are cut into equal parts with the kernel before and the kernels that wait for them."""
    needs, launched = dict(structure.needs), dict(structure.parts)
    waiting = _waiting(structure)
    for collective in members(model, group):
        before = producer(model, structure, collective)
        # a kernel is cut once: one that another group has cut already keeps its parts
        if before >= 0 and model.kernel_class[before] >= 0 and not {before, collective} & launched.keys():
            needs[collective] = (*_others(needs, collective, before), *_steps(before, parts))
            launched[before] = parts, _cut_waves(model, before, parts)
        launched[collective] = parts, 1.0
        for kernel in waiting.get(collective, ()):
            if model.kernel_class[kernel] >= 0 and kernel not in launched:
                needs[kernel] = (*_others(needs, kernel, collective), *_steps(collective, parts))
                launched[kernel] = parts, _cut_waves(model, kernel, parts)
    return replace(structure, needs=needs, parts=launched)


def _steps(other: int, parts: int) -> tuple[Need, ...]:
    # part i begins when part i of the other one has ended: a pipeline of `parts` stages
    return tuple(Need(part / parts, other, (part + 1) / parts) for part in range(parts))


def _others(needs: dict[int, tuple[Need, ...]], kernel: int, other: int) -> tuple[Need, ...]:
    return tuple(need for need in needs.get(kernel, ()) if need.other != other)


def _waiting(structure: Structure) -> dict[int, list[int]]:
    """Collective -> kernels that wait for its end."""
    waiting: dict[int, list[int]] = {}
    for kernel, needs in structure.needs.items():
        for need in needs:
            if need.reached == 1.0 and need.at == 0.0:
                waiting.setdefault(need.other, []).append(kernel)
    return waiting


def _cut_waves(model: ContentionModel, kernel: int, parts: int) -> float:
    """Factor on the time of a kernel that runs in parts: waves that are not full."""
    profile, sms = model.profile, model.laws.sms
    ctas = float(profile.kernels["ctas"].to_numpy(float, na_value=np.nan)[kernel])
    if profile.kernels["kind"].iloc[kernel] not in ON_SMS or not ctas > 0:
        return 1.0
    # ceil(c / p / S) waves for each part, over ceil(c / S) waves of the whole
    return float(parts * count_waves(ctas / parts, sms, 0) / count_waves(ctas, sms, 0))


def merge(model: ContentionModel, structure: Structure, group: int, *, count: int) -> Structure:
    """Up to `count` collectives of a group that follow one another on their stream become the last one of them.

    They are merged where nothing waits for an earlier one before the last one begins; each saves a latency. Copies
    between GPUs are not merged: those that follow one another go to different GPUs.
    """
    if not model.group_sms[group]:
        return structure
    needs, launched = dict(structure.needs), dict(structure.parts)
    waiting, alone, latency = _waiting(structure), model.alone_s[EXPECTED], float(model.latency_s[group])
    for run in _runs(model, structure, group, count):
        last = run[-1]
        # a kernel that needs an earlier one would have to wait for the last one, which comes after it
        if any(kernel < last for collective in run[:-1] for kernel in waiting.get(collective, ())):
            continue
        seconds = alone[run].sum() - latency * (len(run) - 1)
        launched[last] = 1, float(max(seconds, alone[last]) / alone[last])
        for collective in run[:-1]:
            # an empty task keeps its place, so that kernels keep their numbers
            launched[collective] = 1, _NOTHING
            for kernel in waiting.get(collective, ()):
                needs[kernel] = (*_others(needs, kernel, collective), Need(0.0, last, 1.0))
    return replace(structure, needs=needs, parts=launched)


def _runs(model: ContentionModel, structure: Structure, group: int, count: int) -> Iterator[list[int]]:
    """Yield runs of 2 to `count` collectives of a group, each right after the one before on its stream."""
    run: list[int] = []
    for collective in members(model, group):
        if run and (structure.previous[collective] != run[-1] or len(run) == count):
            yield from [run] if len(run) > 1 else []
            run = []
        run.append(collective)
    yield from [run] if len(run) > 1 else []


def wait_later(model: ContentionModel, structure: Structure, group: int) -> Structure:
    """Kernels that wait for a collective of a group let those after them on their stream, that take as long, go first.

    Whether these are independent of the collective is not known.
    """
    needs, alone = dict(structure.needs), model.alone_s[EXPECTED]
    # the inverse of `previous`: at most one kernel follows another on its stream
    follows = {before: kernel for kernel, before in enumerate(structure.previous) if before >= 0}
    for collective in members(model, group):
        for kernel, need in list(consumers(structure, collective)):
            later, passed = kernel, 0.0
            while passed < alone[collective] and later in follows:
                passed += alone[later] if model.kernel_class[later] >= 0 else 0.0
                later = follows[later]
            # the last kernel of a stream has nothing to let go first
            if need.at == 0.0 and later != kernel:
                needs[kernel] = _others(needs, kernel, collective)
                needs[later] = (*needs.get(later, ()), need)
    return replace(structure, needs=needs)


def _unchanged(model: ContentionModel, structure: Structure, group: int) -> Structure:
    return structure


ORDERS: Mapping[str, Change] = {
    RECORDED: _unchanged,
    "earlier": start_early,
    FIRST: prioritise,
    **{f"in {parts} parts": partial(cut, parts=parts) for parts in PARTS},
    **{order: partial(merge, count=count) for order, count in MERGED.items()},
    LATER: wait_later,
}
"""What can be done with when collectives of a group run."""
