"""Schedules of pipelines and states split over data parallelism: closed forms against explicit simulations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dse.plugins import load
from simulators.steps.spread.pipelines import StageTurns, in_flight
from simulators.taskgraph.graph import GraphBuilder, TaskGraph
from simulators.workloads.spreading import PipelineSchedule
from tests.iterations import NETWORK, made, metrics, runs
from tests.support import shipped

SECONDS = st.floats(1e-2, 1.0)
STAGES, ROUNDS = st.integers(1, 5), st.integers(1, 4)
Work = tuple[str, int, int]
"""(F, B or W, micro-batch, virtual stage of the GPU)."""
Passes = Mapping[str, float]


def bubble(p: int, m: int, passes: Passes, message: float = 0.0, **knobs: Any) -> float:
    """Bubble of equal stages by the closed form."""
    work_s = sum(passes.values())
    turns = StageTurns(work_s, (p - 1) * work_s, (p - 1) * passes.get("W", 0.0), message, p, m)
    return float(turns.bubble_s(PipelineSchedule(**knobs)))


def before(work: Work, stage: int, p: int, v: int) -> tuple[Work, int] | None:
    """What a piece of work needs of another stage, or of its own one; None for the first forward pass."""
    kind, batch, part = work
    if kind == "W":
        return ("B", batch, part), stage
    step = -1 if kind == "F" else 1
    place = part * p + stage + step
    if place < 0:
        return None
    return (("F", batch, part), stage) if place == p * v else ((kind, batch, place // p), place % p)


class Stages:
    """Stages that work in given orders, as a task graph. A message between two is sent by a wire, or by the stage."""

    def __init__(self, orders: Sequence[Sequence[Work]], passes: Passes, *, v: int, message: float, blocking: bool):
        self.orders, self.passes, self.v, self.message, self.blocking = orders, passes, v, message, blocking
        self.builder, self.index = GraphBuilder(), dict[tuple[Work, int], int]()
        self.last = [-1] * len(orders)

    def build(self) -> TaskGraph:
        """Add what can be added until all is there."""
        left = [list(order) for order in self.orders]
        while any(left):
            count = len(self.index)
            for stage, order in enumerate(left):
                while order and self._ready(order[0], stage):
                    self._add(order.pop(0), stage)
            assert len(self.index) > count, "the orders wait for one another"
        return self.builder.build()

    def _need(self, work: Work, stage: int) -> tuple[Work, int] | None:
        return before(work, stage, len(self.orders), self.v)

    def _ready(self, work: Work, stage: int) -> bool:
        need = self._need(work, stage)
        return need is None or need in self.index

    def _add(self, work: Work, stage: int) -> None:
        need, sends = self._need(work, stage), bool(self.message) and self.blocking
        after = [task for task in (self.last[stage], -1 if need is None else self.index[need]) if task >= 0]
        if self.message and not sends and need is not None and need[1] != stage:
            after[-1] = self._task(f"message to {stage} for {work}", [after[-1]], self.message)
        self.last[stage] = self._task(f"{work} {stage}", after, self.passes[work[0]] / self.v)
        if sends and ((work[0] == "F" and stage < len(self.orders) - 1) or (work[0] == "B" and stage > 0)):
            self.last[stage] = self._task(f"message from {stage} of {work}", [self.last[stage]], self.message)
        self.index[work, stage] = self.last[stage]

    def _task(self, name: str, after: Sequence[int], seconds: float) -> int:
        return self.builder.task(name, "gemm", after=after, work=seconds, cap=1.0)


def simulate(
    orders: Sequence[Sequence[Work]], passes: Passes, *, v: int = 1, message: float = 0.0, blocking: bool = False
) -> np.ndarray:
    """Times [p, 2] when stages begin and end, by the event engine."""
    stages = Stages(orders, passes, v=v, message=message, blocking=blocking)
    timeline = load("engine", "event").run(stages.build())
    times = [[stages.index[order[0], stage], stages.index[order[-1], stage]] for stage, order in enumerate(orders)]
    first, final = np.array(times).T
    return np.stack([timeline.issued[0][first], timeline.finished[0][final]], axis=1)


def one_forward_one_backward(p: int, m: int) -> list[list[Work]]:
    """arXiv:2104.04473, figure 4, top."""
    orders = []
    for stage in range(p):
        warm_up = min(p - 1 - stage, m)
        pairs = [work for k in range(m - warm_up) for work in (("F", warm_up + k, 0), ("B", k, 0))]
        orders.append([*(("F", k, 0) for k in range(warm_up)), *pairs, *(("B", k, 0) for k in range(m - warm_up, m))])
    return orders


def all_forward_first(p: int, m: int) -> list[list[Work]]:
    """GPipe."""
    return [[*(("F", k, 0) for k in range(m)), *(("B", k, 0) for k in range(m))] for _ in range(p)]


def interleaved(p: int, m: int, v: int) -> list[list[Work]]:
    """arXiv:2104.04473, figure 4, bottom; m a multiple of p."""

    def chunk(kind: str, k: int) -> Work:
        group, place = divmod(k, p * v)
        part = place // p
        return kind, group * p + place % p, part if kind == "F" else v - 1 - part

    orders, total = [], m * v
    for stage in range(p):
        warm_up = min(2 * (p - 1 - stage) + (v - 1) * p, total)
        pairs = [work for k in range(total - warm_up) for work in (chunk("F", warm_up + k), chunk("B", k))]
        ends = (chunk("B", k) for k in range(total - warm_up, total))
        orders.append([*(chunk("F", k) for k in range(warm_up)), *pairs, *ends])
    return orders


def zero_bubble(p: int, m: int, passes: Passes, *, memory: int) -> list[list[Work]]:
    """Orders of stages that take what is there: a backward pass, else a forward one, else gradients of weights.

    memory: times the forward passes ahead of backward ones that 1F1B has on a stage at most, less memory - 1.
    """
    counts = {kind: [0] * p for kind in "FBW"}
    ends: dict[tuple[str, int, int], float] = {}
    free, orders, clock = [0.0] * p, [list[Work]() for _ in range(p)], 0.0

    def done(kind: str, batch: int, stage: int) -> bool:
        return ends.get((kind, batch, stage), np.inf) <= clock + 1e-12

    def chosen(stage: int) -> str | None:
        f, b, w = (counts[kind][stage] for kind in "FBW")
        ready = done("B", b, stage + 1) if stage < p - 1 else done("F", b, stage)
        if b < f and ready:
            return "B"
        if f < m and f - b < memory * (p - stage) - (memory - 1) and (stage == 0 or done("F", f, stage - 1)):
            return "F"
        return "W" if w < b else None

    while min(counts["W"]) < m:
        for stage in range(p):
            while free[stage] <= clock + 1e-12 and (kind := chosen(stage)):
                batch = counts[kind][stage]
                counts[kind][stage] += 1
                ends[kind, batch, stage] = free[stage] = clock + passes[kind]
                orders[stage].append((kind, batch, 0))
        clock = min(end for end in ends.values() if end > clock + 1e-12)
    return orders


# Pipelines


@given(STAGES, st.integers(1, 12), SECONDS, SECONDS, st.sampled_from(["1f1b", "gpipe"]))
def test_an_explicit_pipeline_ends_when_the_closed_form_says(
    p: int, m: int, forward: float, backward: float, schedule: str
) -> None:
    orders = one_forward_one_backward(p, m) if schedule == "1f1b" else all_forward_first(p, m)
    passes = {"F": forward, "B": backward}
    end = simulate(orders, passes)[:, 1].max()
    assert end == pytest.approx(m * (forward + backward) + bubble(p, m, passes, pipeline=schedule), rel=1e-9)


@given(STAGES, ROUNDS, st.integers(1, 4), SECONDS, SECONDS)
def test_an_explicit_interleaved_pipeline_ends_when_the_closed_form_says(
    p: int, rounds: int, v: int, forward: float, backward: float
) -> None:
    m, passes = p * rounds, {"F": forward, "B": backward}
    end = simulate(interleaved(p, m, v), passes, v=v)[:, 1].max()
    closed = bubble(p, m, passes, pipeline="interleaved", virtual_stages=v)
    assert end == pytest.approx(m * (forward + backward) + closed, rel=1e-9)


@given(STAGES, st.integers(1, 12), SECONDS, SECONDS, st.floats(0, 0.1))
def test_a_stage_that_sends_itself_takes_at_most_what_the_closed_form_says(
    p: int, m: int, f: float, b: float, message: float
) -> None:
    """A stage sends before it goes on, activations forward and gradients back; the ends have one neighbour alone."""
    passes = {"F": f, "B": b}
    orders = one_forward_one_backward(p, m)
    end = simulate(orders, passes, message=message, blocking=True)[:, 1].max()
    closed = m * (f + b + 2 * message * (p > 1)) + bubble(p, m, passes, message)
    assert end <= closed * (1 + 1e-9)
    assert end >= closed - 2 * message * m * (1 + 1e-9) - 1e-9


@given(STAGES, st.integers(0, 8), SECONDS, st.floats(0, 1), st.sampled_from([1, 2]))
def test_explicit_zero_bubble_pipelines_wait_as_long_as_published(
    p: int, more: int, weights: float, ahead: float, memory: int
) -> None:
    """Table 1 of arXiv:2401.10241, of a stage from its first work to its last one; for F = W and B up to 1.5 F."""
    m, name = 2 * p + more, {1: "zb_h1", 2: "zb_h2"}[memory]
    passes = {"F": weights, "B": weights * (1 + ahead / 2), "W": weights}
    times = simulate(zero_bubble(p, m, passes, memory=memory), passes)
    longest = (times[:, 1] - times[:, 0]).max()
    assert longest == pytest.approx(m * sum(passes.values()) + bubble(p, m, passes, pipeline=name), rel=1e-9)


@given(STAGES, st.integers(1, 40), st.integers(2, 4))
def test_micro_batches_in_flight_are_those_of_explicit_orders(p: int, m: int, v: int) -> None:
    def peak(order: Sequence[Work]) -> int:
        return int(np.max(np.cumsum([{"F": 1, "B": -1}[kind] for kind, _, _ in order])))

    orders = one_forward_one_backward(p, m)
    assert in_flight(PipelineSchedule(), p, m) == pytest.approx((peak(orders[0]), peak(orders[-1])))
    rounds = max(2, m // p)
    knobs = PipelineSchedule(pipeline="interleaved", virtual_stages=v)
    most = [peak(order) / v for order in interleaved(p, p * rounds, v)]
    assume(p > 1)
    assert in_flight(knobs, p, p * rounds) == pytest.approx((most[0], most[-1]))


# Whole iterations


@pytest.mark.more
@settings(max_examples=10)
@given(runs(), st.sampled_from([2, 4]), st.integers(1, 8))
def test_zero_bubble_and_virtual_stages_shorten_an_iteration(drawn: dict[str, Any], pp: int, rounds: int) -> None:
    drawn |= {"parallel.pp": pp, "run.micro_batches": pp * rounds}
    names = ("zb_h2", "zb_h1", "1f1b", "gpipe")
    times = [metrics({**drawn, "parallel.pipeline": name})["iteration_s"] for name in names]
    assert times == sorted(times)
    turned = {name: metrics({**drawn, "parallel.pipeline": name}) for name in ("zbv", "v_half", "v_min")}
    plain = metrics({**drawn, "parallel.pipeline": "1f1b"})
    bubbles = [step["bubble_s"] for step in (plain, *turned.values())]
    assert bubbles[1] <= bubbles[0]
    assert bubbles[2] <= bubbles[3] <= bubbles[0]
    activations = [step["activation_bytes"] for step in turned.values()]
    assert activations == sorted(activations, reverse=True)
    split = {**drawn, "parallel.pipeline": "interleaved"}
    assert metrics(split)["iteration_s"] == times[2]
    if pp == 2:
        halves = metrics({**split, "parallel.virtual_stages": 2})
        assert halves["bubble_s"] <= metrics(split)["bubble_s"]
        assert halves["activation_bytes"] >= metrics(split)["activation_bytes"]


@pytest.mark.slow
@given(runs(), st.integers(1, 4))
def test_zero_3_moves_one_and_a_half_times_what_an_all_reduce_moves(drawn: dict[str, Any], m: int) -> None:
    """arXiv:1910.02054, section 7, of one micro-batch; gradients of every further one are reduced again."""
    fast = {"system.node.library.latency_s": 1e-30, "run.micro_batches": m, "parallel.dp": 8}
    plain, split = (float(made({**drawn, **fast, "parallel.zero": zero}).gradients.dp_s) for zero in (0, 3))
    assert split == pytest.approx(1.5 * m * plain, rel=1e-6)
    dp_s = float(made({**drawn, **fast, "parallel.zero": 3, "parallel.reshard": False}).gradients.dp_s)
    assert dp_s == pytest.approx(m * plain, rel=1e-6)


@pytest.mark.slow
@given(runs(), st.integers(0, 3), st.booleans(), st.sampled_from(["beside", "after"]))
def test_exposed_time_is_never_negative_and_state_shrinks(
    drawn: dict[str, Any], zero: int, prefetch: bool, reductions: str
) -> None:
    drawn |= {"parallel.prefetch": prefetch, "parallel.reductions": reductions}
    row = metrics({**drawn, "parallel.zero": zero})
    assert row["exposed_dp_s"] >= 0
    states = [metrics({**drawn, "parallel.zero": level})["state_bytes"] for level in (0, 1, 2)]
    assert states == sorted(states, reverse=True)


@pytest.mark.slow
@given(runs())
def test_an_update_in_the_backward_pass_keeps_gradients_of_one_layer(drawn: dict[str, Any]) -> None:
    drawn |= {"run.micro_batches": 1, "model.vocab": 0, "parallel.dp": 1, "model.decoder_layers": 0}
    after, inside = (metrics({**drawn, "optimizer.in_backward": early}) for early in (False, True))
    gradients = (4 if drawn["run.precision"] == "fp32" else 2) * float(made(drawn).passes.of_blocks("params"))
    saved = after["state_bytes"] - inside["state_bytes"]
    assert saved == pytest.approx(gradients * (1 - 1 / drawn["model.layers"]), rel=1e-9)
    assert inside["iteration_s"] == after["iteration_s"]


@pytest.mark.slow
@given(runs(), st.floats(0, 1e-3), st.floats(0, 1e-2), st.sampled_from([1, 2]))
def test_hosts_only_ever_delay(drawn: dict[str, Any], launch: float, batch: float, pp: int) -> None:
    drawn |= {"parallel.pp": pp}
    source = {"provenance": "derived", "source": "made up"}
    slow = {**drawn, "kernels.host_launch_s": launch, "kernels.host_batch_s": batch}
    slow["kernels.sources"] = {
        **shipped("kernels")["fused"]["sources"],
        "host_launch_s": source,
        "host_batch_s": source,
    }
    ahead, behind = metrics(drawn), metrics(slow)
    assert behind["iteration_s"] >= ahead["iteration_s"] * (1 - 1e-12)
    assert behind["host_s"] >= drawn["run.micro_batches"] * batch * (1 - 1e-12)


def test_stages_that_layers_do_not_fill_evenly_are_as_slow_as_the_fullest() -> None:
    """24 layers on 5 stages: the busiest has 5 of them, as on 4.8 stages, and its own memory."""
    uneven, even = (
        metrics({**NETWORK, "parallel.pp": pp, "model.layers": n, "model.vocab": 0}) for pp, n in ((5, 24), (5, 25))
    )
    assert uneven["forward_s"] == pytest.approx(even["forward_s"])
    assert uneven["state_bytes"] == even["state_bytes"]
    assert uneven["bubble_s"] < even["bubble_s"]
