"""What plans do to a run: its time and gain in each case of the laws, and what its collectives hide and hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dse_traces.change.what_if import Plan, WhatIfs
from dse_traces.laws.task_graph import ContentionModel, Ran
from simulators.taskgraph.timeline import busy, row_sum

Floats = NDArray[np.float64]
_MOST_CELLS = 1 << 22  # plans times kernels whose timelines are in memory at once


@dataclass(frozen=True)
class Outcomes:
    """Of P plans: seconds [P, 3] in each case of the laws, and as expected [P]: time in which collectives run, that in
    which nothing is computed beside them, and SMs held times time [s].
    """

    seconds: Floats
    collective_s: Floats
    exposed_s: Floats
    held_s: Floats

    @property
    def hidden(self) -> Floats:
        """Share of the time of collectives beside which something is computed [P]; 1 where they take none."""
        shares = 1 - self.exposed_s / np.maximum(self.collective_s, 1e-15)
        return np.where(self.collective_s > 0, np.clip(shares, 0.0, 1.0), 1.0)


def outcomes(what_ifs: WhatIfs, plans: Sequence[Plan]) -> Outcomes:
    """Run plans, those with the same structure at once."""
    seconds, shares = what_ifs.seconds(plans), np.empty((3, len(plans)))
    for structure, places in what_ifs.by_structure(plans):
        model = what_ifs.model_of(plans[places[0]])
        most = max(1, _MOST_CELLS // len(model.profile))
        for begin in range(0, len(places), most):
            part = places[begin : begin + most]
            scenarios = what_ifs.expected_scenarios([plans[place] for place in part])
            shares[:, part] = _shares(model, model.run(structure, scenarios), scenarios.held_sms)
    return Outcomes(seconds, *shares)


def _shares(model: ContentionModel, ran: Ran, held_sms: Floats) -> Floats:
    """Time of collectives, exposed, and SMs held times time, of B runs [3, B]. held_sms: by group [B, G]."""
    moves, computes = model.profile.is_collective, model.profile.is_compute
    collective, compute, either = (
        busy(ran.start_s[:, marks], ran.end_s[:, marks]) for marks in (moves, computes, moves | computes)
    )
    times = (ran.end_s - ran.start_s)[:, moves] * held_sms[:, model.group[moves]]
    return np.array([collective, np.maximum(either - compute, 0.0), row_sum(times)])
