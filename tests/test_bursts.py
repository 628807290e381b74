"""Turns of a GPU and of units in its memory: closed forms, the event engine, pieces that are fetched and computed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulators.costs.pim_bursts import Layers, Memory, turns
from simulators.taskgraph.graph import GraphBuilder
from tests.support import ENGINES

RATE = 1e12
Op = tuple[float, float, float]  # seconds, share of the memory's rate, seconds of its copy


def layers(kinds: list[tuple[list[Op], int, int]], *, burst_s: float = 1e-5, staged: float = 0.0) -> Layers:
    """One design of kinds of layers: (operators, how many, which pass), each operator with so many bytes staged."""
    ops = np.array([op for ops_of_kind, _, _ in kinds for op in ops_of_kind]).T[:, None]
    seconds, share, copy_s = ops
    first = np.cumsum([0, *(len(ops_of_kind) for ops_of_kind, _, _ in kinds)])
    repeats = np.array([[count for _, count, _ in kinds]])
    passes = np.array([number for _, _, number in kinds])
    staged_bytes, bursts = np.full_like(seconds, staged), np.full_like(seconds, burst_s)
    beside = np.ones(len(seconds[0]), int)
    return Layers(first, passes, beside, repeats, seconds, share * seconds * RATE, staged_bytes, copy_s, bursts)


def run(model: Layers, **memory: float) -> dict[str, float]:
    outcome = turns(model, Memory(**{"rate": RATE, "blocked": 1.0, "window": 0.0, "ahead": 1, **memory}))
    return {name: float(value[0]) for name, value in vars(outcome).items()}


def alone(model: Layers) -> float:
    """The operators with nothing beside them."""
    layer_seconds = np.add.reduceat(model.seconds[0], model.first[:-1])
    return float(layer_seconds @ model.many[0])


shares, times = st.just(0.0) | st.floats(1e-3, 1.0), st.floats(1e-6, 1e-3)
ops = st.lists(st.tuples(times, shares, st.sampled_from([0.0, 1e-5, 3e-4])), min_size=1, max_size=4)
kinds = st.lists(st.tuples(ops, st.integers(1, 5), st.just(0)), min_size=1, max_size=3)


@pytest.mark.more
@given(kinds, st.integers(0, 3), st.floats(0, 1e9))
def test_without_copies_operators_take_what_they_take_alone(layer_kinds: Any, ahead: int, staged: float) -> None:
    model = layers(
        [([(s, b, 0.0) for s, b, _ in operators], count, number) for operators, count, number in layer_kinds],
        staged=staged,
    )
    outcome = run(model, ahead=ahead)
    assert outcome["seconds"] == pytest.approx(alone(model), rel=1e-9)
    assert outcome["waited"] == outcome["busy"] == 0


@pytest.mark.more
@pytest.mark.slow
@given(kinds, st.integers(0, 3), st.floats(0, 1e9), st.floats(0, 4), st.floats(0.1, 1.0))
def test_time_is_accounted_for_and_bounded(
    layer_kinds: Any, ahead: int, staged: float, window: float, blocked: float
) -> None:
    model = layers(layer_kinds, staged=staged)
    outcome = run(model, ahead=ahead, window=window, blocked=blocked)
    copies = float((np.add.reduceat(model.copy_s[0], model.first[:-1])) @ model.many[0])
    assert outcome["busy"] == pytest.approx(copies, rel=1e-6)
    assert outcome["seconds"] == pytest.approx(alone(model) + outcome["waited"] + outcome["slowed"], rel=1e-9)
    assert outcome["slowed"] >= 0
    assert alone(model) * (1 - 1e-9) <= outcome["seconds"] <= (alone(model) + copies) * (1 + 1e-6)


@given(st.floats(0.05, 0.9), st.floats(1e-5, 1e-4), st.floats(0, 2e-4))
def test_a_burst_costs_what_a_full_stage_does_not_cover(share: float, burst: float, covered: float) -> None:
    """A copy is made in two bursts while one operator of 1 ms runs: at its begin, with nothing staged, and later."""
    window = 1e-3 / burst / 4  # a quarter of the operator, in which its stage is filled as far as the memory allows
    spare = (1 / share - 1) * window * burst  # of what is computed on
    ops = [([(1e-3, share, 0.0)], 1, 0), ([(1e-9, 0.0, 2 * burst)], 1, 0)]
    model = layers(ops, burst_s=burst, staged=covered * share * RATE)
    lost = burst + max(0.0, burst - min(covered, spare))
    assert run(model, window=window)["slowed"] == pytest.approx(lost, rel=1e-6, abs=1e-12)


@settings(max_examples=25)
@given(kinds, st.integers(0, 2), st.sampled_from([1.0, 0.5]), st.sampled_from(["fluid", "event"]))
def test_engines_that_know_only_tasks_and_resources_agree(
    layer_kinds: Any, ahead: int, blocked: float, engine: str
) -> None:
    """Nothing staged, no windows: bursts are tasks that are served first, and layers wait for one another."""
    model = layers(layer_kinds, burst_s=1.0)
    graph = GraphBuilder()
    memory = graph.resource("memory", RATE)
    gpu, units, ends = -1, -1, list[int]()  # the last task of each, and of each layer
    sequence = [op for operators, count, _ in layer_kinds for _ in range(count) for op in [*operators, None]]
    copies: dict[int, int] = {}

    def after(*tasks: int) -> list[int]:
        return [task for task in tasks if task >= 0]

    def copied(until: int) -> None:
        """Copies of layers up to one, as far as the GPU has come."""
        nonlocal units
        layer = 0
        for place, op in enumerate(sequence):
            layer += op is None
            if op is not None and op[2] > 0 and place not in copies and layer <= until:
                gate = ends[layer - ahead - 1] if layer > ahead else -1
                how: dict[str, Any] = {"uses": {memory: blocked * RATE}, "work": op[2], "cap": 1.0, "priority": 0}
                units = copies[place] = graph.task(f"copy {place}", "copy", after=after(units, gate), **how)

    copied(ahead)
    for place, op in enumerate(sequence):
        if op is None:
            ends.append(gpu)
            copied(len(ends) + ahead)
            continue
        seconds, share, _ = op
        uses = {memory: share * RATE} if share else {}
        waits = after(gpu, copies.get(place, -1))
        gpu = graph.task(f"op {place}", "gemm", after=waits, uses=uses, work=seconds, cap=1.0, priority=1)
    expected = float(ENGINES[engine].totals(graph.build()).makespan_s[0])
    assert run(model, ahead=ahead, blocked=blocked)["seconds"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.2, 0.6, 0.95])
@pytest.mark.parametrize("staged_s", [1e-5, 5e-5, 2e-4])
def test_pieces_that_are_fetched_and_then_computed_take_as_long(share: float, staged_s: float) -> None:
    """An operator in pieces, fetched so many ahead, beside bursts: the finer, the nearer (first order)."""
    seconds, burst, bursts = 1e-3, 1e-4, 3
    staged = staged_s * share * RATE  # what is computed on in so long
    ops = [([(seconds, share, 0.0)], 1, 0), ([(1e-9, 0.0, burst * bursts)], 1, 0)]
    seconds_whole = run(layers(ops, burst_s=burst, staged=staged), window=1.0)["seconds"]
    off = [
        abs(_in_pieces(share, seconds, staged, (burst, bursts), pieces) / seconds_whole - 1) for pieces in (100, 1600)
    ]
    assert off[1] <= max(off[0] / 4, 1e-3)


def _in_pieces(share: float, seconds: float, staged: float, fetches: tuple[float, int], pieces: int) -> float:
    graph, (burst, bursts) = GraphBuilder(), fetches
    memory, amount = graph.resource("memory", RATE), share * RATE * seconds / pieces
    ahead = max(1, round(staged / amount))
    for index in range(bursts):
        how: dict[str, Any] = {"uses": {memory: RATE}, "work": burst, "cap": 1.0, "priority": 0}
        graph.task(f"burst {index}", "copy", delay=burst if index else 0.0, after=[index - 1] if index else [], **how)
    fetched, computed = list[int](), list[int]()
    for index in range(pieces):
        room = [computed[index - ahead]] if index >= ahead else []
        how = {"uses": {memory: 1.0}, "work": amount, "priority": 1}
        fetched.append(graph.task(f"fetch {index}", "copy", after=[*fetched[-1:], *room], **how))
        after = [*computed[-1:], fetched[-1]]
        computed.append(graph.task(f"compute {index}", "gemm", after=after, work=seconds / pieces, cap=1.0))
    return float(ENGINES["fluid"].totals(graph.build()).makespan_s[0])


@pytest.mark.parametrize("field", ["seconds", "bytes", "copy_s", "burst_s"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_design_whose_times_are_none_has_no_result_and_ends(field: str, value: float) -> None:
    """As of a grid in which some designs break a rule."""
    model = layers([([(1e-3, 0.5, 1e-4), (2e-4, 0.9, 0.0)], 3, 0)])
    two = model._replace(**{name: np.repeat(getattr(model, name), 2, axis=0) for name in Layers._fields[3:]})
    getattr(two, field)[1, 0] = value if field != "burst_s" else 0.0
    outcome = turns(two, Memory(RATE, 1.0, 1.0, 1))
    assert outcome.seconds[0] == run(model, window=1.0)["seconds"]
    assert np.isnan(outcome.seconds[1])
