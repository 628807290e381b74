"""The analytic engine: closed forms, exact where no resource can be over-subscribed and tasks run at rates alone."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np

from simulators.taskgraph.graph import TaskGraph
from simulators.taskgraph.maxplus import Form, IsolatedGraph
from simulators.taskgraph.timeline import Refusals, Timeline, Totals

_SLACK = 1e-9  # relative: a resource used to exactly its capacity is not over-subscribed
_FAINT = 1e-6  # of the capacity: a task that asks for less may get nothing of a resource used to exactly its capacity


class AnalyticEngine:
    """Runs graphs by closed forms.

    Refuses designs in which a resource might be over-subscribed or a task might wait for a slot, and graphs without a
    small closed form.
    """

    version = "2"
    batch = 524288  # a few arrays over the grid, so that large batches pay
    exact = True

    def run(self, graph: TaskGraph) -> Timeline:
        """Time every task alone on its longest path."""
        alone = IsolatedGraph.of(graph)
        return replace(alone.timeline(), refused=_refusals(graph, alone.form))

    def totals(self, graph: TaskGraph) -> Totals:
        """Totals by closed forms, design by design."""
        alone = IsolatedGraph.of(graph)
        return replace(alone.totals(), refused=_refusals(graph, alone.form))


def _refusals(graph: TaskGraph, form: Form) -> Refusals | None:
    """Refusals of designs in which a resource might be over-subscribed, or of all where there is no closed form."""
    if form.refusal:
        # a property of the structure: no design of the batch has one
        why = f"{form.refusal}: the closed form is not exact"
        return Refusals(np.ones(graph.num_designs, np.int32), ("", why))
    rates, code, texts = [rate for _, rate in graph.alone()], np.zeros(graph.shape, np.int32), [""]
    if len(graph.slowed):  # factors of 1 are no law; any other might act, as activity is not known here
        law = np.zeros((1,) * len(graph.shape), np.bool_)
        for column in set(graph.at["factor"].tolist()):
            law = law | (graph.values[column] != 1.0)
        code = np.where(law, np.int32(1), code)
        texts.append("a contention law changes rates: the closed form is not exact")
    for resource, crowds in form.crowds.items():
        demand = {
            use: graph.values[graph.at["use"][use]] * rates[graph.use_task[use]]
            for crowd in crowds
            for group in crowd
            for use in group
        }
        capacity = graph.values[graph.at["capacity"][resource]]
        over = np.zeros((1,) * len(graph.shape), np.bool_)
        for crowd in crowds:
            most = [functools.reduce(np.maximum, [demand[use] for use in group]) for group in crowd]
            # then a resource that is exactly full counts as over-subscribed
            faint = functools.reduce(np.minimum, most) < _FAINT * capacity  # the capacity left may be 0
            over = over | (sum(most) > capacity * np.where(faint & (len(most) > 1), 1 - _SLACK, 1 + _SLACK))
        if over.any():
            code = np.where((code == 0) & over, np.int32(len(texts)), code)  # the first reason stands
            texts.append(f"{graph.resources[resource]} may be over-subscribed: the closed form is not exact")
    return Refusals(code.reshape(-1), tuple(texts)) if len(texts) > 1 else None


ENGINE = AnalyticEngine()
