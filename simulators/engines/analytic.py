"""The closed form where it is exact: nothing can be over-subscribed, so every task runs at the rate it has alone."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np

from simulators.taskgraph.graph import TaskGraph
from simulators.taskgraph.maxplus import Alone, Form
from simulators.taskgraph.timeline import Refused, Timeline, Totals

_SLACK = 1e-9  # relative: a resource used to exactly its capacity is not over-subscribed
_FAINT = 1e-6  # of the capacity: who asks for less may get nothing of what is used to exactly its capacity


class AnalyticEngine:
    """Refuses what might share a resource beyond its capacity, wait for a slot, or has no small closed form."""

    version = "2"
    batch = 262144
    exact = True

    def run(self, graph: TaskGraph) -> Timeline:
        """Time every task alone on its longest path."""
        alone = Alone.of(graph)
        return replace(alone.timeline(), refused=_refused(graph, alone.form))

    def totals(self, graph: TaskGraph) -> Totals:
        """By closed forms, design by design."""
        alone = Alone.of(graph)
        return replace(alone.totals(), refused=_refused(graph, alone.form))


def _refused(graph: TaskGraph, form: Form) -> Refused | None:
    """Designs in which a resource might be over-subscribed, or all where there is no closed form."""
    if form.refusal:
        why = f"{form.refusal}: the closed form is not exact"
        return Refused(np.ones(graph.num_designs, np.int32), ("", why))
    rates, code, texts = [rate for _, rate in graph.alone()], np.zeros(graph.shape, np.int32), [""]
    if len(graph.slowed):
        law = np.zeros((1,) * len(graph.shape), np.bool_)
        for column in set(graph.at["factor"].tolist()):
            law = law | (graph.values[column] != 1.0)
        code = np.where(law, np.int32(1), code)
        texts.append("a contention law changes rates: the closed form is not exact")
    for resource, crowds in form.crowds.items():
        demand = {
            use: graph.values[graph.at["use"][use]] * rates[graph.use_task[use]]
            for crowd in crowds
            for one in crowd
            for use in one
        }
        capacity = graph.values[graph.at["capacity"][resource]]
        over = np.zeros((1,) * len(graph.shape), np.bool_)
        for crowd in crowds:
            most = [functools.reduce(np.maximum, [demand[use] for use in one]) for one in crowd]
            faint = functools.reduce(np.minimum, most) < _FAINT * capacity  # what is left may not do for it
            over = over | (sum(most) > capacity * np.where(faint & (len(most) > 1), 1 - _SLACK, 1 + _SLACK))
        if over.any():
            code = np.where((code == 0) & over, np.int32(len(texts)), code)
            texts.append(f"{graph.resources[resource]} may be over-subscribed: the closed form is not exact")
    return Refused(code.reshape(-1), tuple(texts)) if len(texts) > 1 else None


ENGINE = AnalyticEngine()
