"""The analytic engine: closed forms, exact where no resource can be over-subscribed and tasks run at rates alone."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from simulators.taskgraph.graph import TaskGraph
from simulators.taskgraph.maxplus import Form, IsolatedGraph
from simulators.taskgraph.timeline import Refusals, Timeline, Totals

_SLACK = 1e-9  # relative: a resource used to exactly its capacity is not over-subscribed
_FAINT = 1e-6  # of the capacity: a task that asks for less may get nothing of a resource used to exactly its capacity


_LAW = "a contention law changes rates: the closed form is not exact"


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
        """Totals by closed forms, design by design; NaN where all designs are refused before a form is sought."""
        if _has_law(graph).all():
            nothing = np.full(graph.num_designs, np.nan)
            by_kind = dict.fromkeys(graph.kinds, nothing)
            return Totals(nothing, nothing, nothing, by_kind, by_kind, _refuse_all(graph, _LAW))
        alone = IsolatedGraph.of(graph)
        return replace(alone.totals(), refused=_refusals(graph, alone.form))


def _refusals(graph: TaskGraph, form: Form) -> Refusals | None:
    """Refusals of designs in which a resource might be over-subscribed, or of all where there is no closed form."""
    if (lawful := _has_law(graph)).all():
        return _refuse_all(graph, _LAW)
    if form.refusal:  # a property of the structure: no design of the batch has one
        return _refuse_all(graph, f"{form.refusal}: the closed form is not exact")
    rates = [rate for _, rate in graph.alone()]
    code, texts = np.where(lawful, np.int32(1), np.zeros(graph.shape, np.int32)), ["", _LAW]
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
    return Refusals(code.reshape(-1), tuple(texts)) if code.any() else None


def _refuse_all(graph: TaskGraph, why: str) -> Refusals:
    return Refusals(np.ones(graph.num_designs, np.int32), ("", why))


def _has_law(graph: TaskGraph) -> NDArray[np.bool_]:
    """Mask, over the grid, of designs whose rates a law of contention may change: activity is not known here."""
    law = np.zeros((1,) * len(graph.shape), np.bool_)
    for column in set(graph.at["factor"].tolist()):
        law = law | (graph.values[column] != 1.0)  # factors of 1 are no law
    return law


ENGINE = AnalyticEngine()
