"""Time below which no change of collectives in software gets a run.

The largest of three:

    kernels   all that is no collective on its streams; collectives take no time, slow nothing and share no links, and
              wait for nothing but what every order leaves them (`relaxed`)
    links     what all collectives take at the least, divided by how many run at once: each by the shortest setting that
              was tried, or by other software, less the latencies that merging saves
    waiting   what is no transfer, where it is known (`WhatIfs.kept_s`)
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dse_traces.change.dependencies import MERGED, PARTS
from dse_traces.change.settings import Setting
from dse_traces.change.what_if import NO_TIME, Tried, WhatIfs
from dse_traces.laws.task_graph import EXPECTED, ContentionModel, Need, Structure

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class _Unshared(ContentionModel):
    """A profile whose links carry all collectives at once."""

    @cached_property
    def at_once(self) -> int:
        """Number of collectives: an order of waiting for links could make a run with fewer of them longer."""
        return max(1, int((self.group >= 0).sum()))


def lower_bound(what_ifs: WhatIfs, tried: Tried) -> float:
    """Time [s] below which no change of collectives in software gets the run."""
    model, recorded = what_ifs.model, what_ifs.model.as_recorded()
    no_sms, no_rate = recorded.held_sms * 0, recorded.relative_rate * 0
    nothing = replace(recorded, stretch=recorded.stretch * NO_TIME, held_sms=no_sms, relative_rate=no_rate)
    unshared = _Unshared(**{column.name: getattr(model, column.name) for column in fields(ContentionModel)})
    free = float(unshared.makespans(relaxed(model), nothing)[0])
    links = float(_least_times(what_ifs, tried).sum()) / model.at_once
    return max(free, links, what_ifs.kept_s)


def relaxed(model: ContentionModel) -> Structure:
    """What every order of collectives in software leaves of what waits for what.

    A collective waits for the kernel that computes for which it was seen to wait, and for no launch, other collective
    or unknown reason. What computes and waits for a collective may run but for the last part of as many as it is cut
    into at the most.
    """
    recorded = model.structure
    previous, launches, needs = list(recorded.previous), list(recorded.launch_s), dict(recorded.needs)
    for kernel in range(len(model.profile)):
        moves = model.group[kernel] >= 0
        if moves:
            launches[kernel] = float("nan")
            # a collective that begins early leaves those before it on its stream, and no other kernel
            previous[kernel] = -1 if previous[kernel] >= 0 and model.group[previous[kernel]] >= 0 else previous[kernel]
        if kernel in needs:
            needs[kernel] = tuple(less for need in needs[kernel] for less in _relaxed(model, kernel, need))
    paused = dict.fromkeys(np.flatnonzero(model.group >= 0).tolist(), 0.0)
    return replace(recorded, previous=tuple(previous), launch_s=tuple(launches), needs=needs, paused_s=paused)


def _relaxed(model: ContentionModel, kernel: int, need: Need) -> tuple[Need, ...]:
    """What is left of a need of a kernel, whatever the order of collectives."""
    if model.group[need.other] < 0:
        return (need,)
    # others may cut or merge what a part of a collective was waited for
    if model.group[kernel] >= 0 or need.reached < 1.0:
        return ()
    return (replace(need, at=1 - 1 / max(PARTS)),) if model.kernel_class[kernel] >= 0 else (need,)


def _least_times(what_ifs: WhatIfs, tried: Tried) -> Floats:
    """Time that the collectives of each group take at the least, by what was tried in software [G]."""
    model = what_ifs.model
    shortest, merged = np.ones(len(model.names)), np.zeros(len(model.names), bool)
    for group, setting in zip(tried.groups, tried.settings, strict=True):
        if setting.in_software:
            shortest[group] = min(shortest[group], what_ifs.effects.of(group, setting)[0][EXPECTED])
            merged[group] |= setting.order in MERGED
    for group, terms in enumerate(what_ifs.effects.terms):
        for of in terms.software:
            by_software = what_ifs.effects.of(group, Setting(software=of.name))[0][EXPECTED]
            shortest[group] = min(shortest[group], by_software)
    collectives = model.group >= 0
    groups, alone = model.group[collectives], model.alone_s[EXPECTED, collectives]
    # of as many as are merged, all but one save a latency
    saved = np.where(merged, model.latency_s, 0.0)[groups] * (1 - 1 / max(MERGED.values()))
    return np.asarray(np.maximum(np.bincount(groups, alone - saved, len(model.names)), 0.0) * shortest)
