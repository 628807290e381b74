"""Persistent kernels: bounds, orders, stores against puts, skew, and agreement with the core's slices."""

from __future__ import annotations

import ast
import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dse.backend import Batch
from dse.errors import ConfigError
from dse_workgroups.fused_backend import FusedBackend
from dse_workgroups.fused_iteration import iterate, peak_demand
from dse_workgroups.fused_kernels import FusedKernel, facts, line_share
from dse_workgroups.persistent import NONE, Gpus, KernelPlan, LogicalWorkgroups, run
from search_spaces.fused_knobs import FusedKnobs
from simulators.costs.fabric import num_gpus
from simulators.costs.memory_bound import kernel_cost
from simulators.overlap.design import OverlapDesign
from tests.support import REPOSITORY, drawn, shipped

BACKEND = FusedBackend()


def design(system: str = "mi210_4", operator: str = "emb-p10-b512", **knobs: Any) -> OverlapDesign:
    """A shipped operator on a shipped system."""
    tree = {"system": shipped("system")[system], "workload": shipped("workload")["fused_ops"]}
    tree["schedule"] = {**shipped("schedule")["fused_kernels"], **knobs}
    return BACKEND.design(BACKEND.scenarios(tree)[operator])


def plan(wanted: OverlapDesign) -> KernelPlan:
    """The kernel of an operator and its collective."""
    op, move = wanted.workload.operators.values()
    op, move = (op, move) if move.kind == "collective" else (move, op)
    return FusedKernel(wanted.system, op, move, wanted.schedule).plan()  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("operator", ["emb-p10-b512", "emb-p70-b2048", "gemv-70b_out", "moe-dbrx-t4096"])
def test_the_baseline_takes_what_tasks_take_but_for_the_last_wave(operator: str) -> None:
    from simulators.overlap.backend import OverlapBackend

    bulk = design(operator=operator, kernel="bulk")
    (tasks,) = OverlapBackend("fluid").evaluate([Batch(bulk)])
    assert iterate(bulk).makespan_s == pytest.approx(float(tasks.column("makespan_s")[0]), rel=0.07)


@pytest.mark.slow
@drawn(20)
@given(
    st.sampled_from(["emb-p10-b512", "gemv-70b_out", "moe-qwen-t4096"]),
    st.sampled_from(["mi210_4", "mi210_2x1"]),
    st.sampled_from([1, 8, 32]),
    st.booleans(),
)
def test_a_kernel_is_not_shorter_than_its_work_nor_than_its_wires(
    op: str, system: str, chunks: int, zero: bool
) -> None:
    kernel = plan(design(system, op, num_chunks=chunks, zero_copy=zero))
    done = run(kernel)
    assert (done.over_s >= done.computed_s - 1e-12).all()
    for g, top in enumerate(kernel.gpus.top):
        work = kernel.items.work[kernel.items.first[g] : kernel.items.first[g + 1]].sum()
        least = work / top if top > 0 else work / kernel.gpus.workgroups[g]
        assert done.computed_s[g] >= kernel.gpus.start[g] + (1 - 1e-9) * least
    for wire in range(len(kernel.wires.rate)):
        rows = done.transfers[done.transfers[:, 0] == wire]
        assert (rows[1:, 1] >= rows[:-1, 2] - 1e-12).all()  # one after another
        assert (rows[:, 3] <= kernel.wires.rate[wire] * (rows[:, 2] - rows[:, 1]) * (1 + 1e-9) + 1e-9).all()
    sent = float(kernel.items.sent.sum() + kernel.slices.sent.sum()) - _put_twice(kernel)
    assert done.transfers[:, 3].sum() == pytest.approx(sent)


@drawn(40)
@given(
    st.sampled_from(["mi210_4", "mi210_2x1", "dlrm_torus"]),
    st.integers(1, 40),
    st.integers(1, 12),
    st.sampled_from([1, 3, 32]),
)
def test_every_tile_is_made_once_and_sent_but_by_its_owner(system: str, down: int, along: int, chunks: int) -> None:
    """Also where tiles do not divide evenly among GPUs; of few tiles each GPU still has one."""
    wanted = design(system, "moe-dbrx-t4096", num_chunks=chunks)
    gemm, move = wanted.workload.operators.values()
    gemm, gpus = gemm.model_copy(update={"m": 128 * down, "n": 64 * along}), num_gpus(wanted.system)
    kernel = FusedKernel(wanted.system, gemm, move, wanted.schedule)  # type: ignore[arg-type]
    items, count, out = kernel.plan().items, kernel._size[0], kernel._size[2]
    tiles = np.diff(items.first)
    assert (tiles == count).all() if count >= gpus else (tiles >= count).all()
    if len(tiles) == gpus <= count:
        assert items.sent.sum() == pytest.approx((len(tiles) - 1) * count * out)


@pytest.mark.slow
@drawn(15)
@given(st.sampled_from(["emb-p30-b512", "gemv-70b_out"]), st.integers(1, 200), st.floats(0.1, 10))
def test_few_cus_cannot_ask_for_more_than_their_requests_in_flight(operator: str, cus: int, hbm: float) -> None:
    """Little's law bounds workgroups and the core's formula alike; more CUs or a faster HBM are no slower."""
    wanted = design(operator=operator)
    op: Any = next(iter(wanted.workload.operators.values()))
    gpu: Any = wanted.system.gpu
    before = float("inf")
    for more in (1, 2):
        fewer = {"num_cus": cus * more, "hbm_bytes_per_s": hbm * more * gpu.hbm_bytes_per_s}
        system = wanted.system.model_copy(update={"gpu": gpu.model_copy(update=fewer)})
        flight = cus * more * gpu.persistent.in_flight_bytes_per_cu / gpu.persistent.memory_latency_s
        alone = run(FusedKernel(system, op, None, wanted.schedule).plan())  # type: ignore[arg-type]
        seconds = float(kernel_cost(system, op).seconds)
        assert min(seconds, float(alone.computed_s[0])) * flight >= op.bytes * (1 - 1e-9)
        assert seconds <= before
        before = seconds


def _put_twice(kernel: KernelPlan) -> float:
    """Bytes that items name whose slices are put, and that the slices count."""
    ends = kernel.items.completes
    puts = (ends != NONE) & (kernel.slices.sent[ends] > 0)
    return float(kernel.items.sent[puts].sum())


@pytest.mark.slow
@pytest.mark.parametrize("system", ["mi210_4", "mi210_2x1"])
def test_the_order_with_remote_slices_first_comes_out_as_the_shortest(system: str) -> None:
    """No order is declared: the blocks of a kernel, in all orders, and the best has local results last."""
    kernel = plan(design(system, "emb-p30-b512", num_chunks=1))
    first, ends = kernel.items.first, kernel.items.completes
    blocks = [
        [ends[first[g] : first[g + 1]] == place for place in sorted(set(ends[first[g] : first[g + 1]]))]
        for g in range(len(first) - 1)
    ]
    seconds = {}
    for order in itertools.permutations(range(len(blocks[0]))):
        places = np.concatenate(
            [first[g] + np.concatenate([np.flatnonzero(rows[b]) for b in order]) for g, rows in enumerate(blocks)]
        )
        columns = [column[places] for column in kernel.items[1:]]
        seconds[order] = run(replace(kernel, items=LogicalWorkgroups(first, *columns))).over_s.max()
    # block 0 is the local one: `completes` is NONE there
    last = min(value for order, value in seconds.items() if order[-1] == 0)
    assert last == pytest.approx(min(seconds.values()), rel=1e-9)
    assert max(seconds.values()) > 1.02 * last


@pytest.mark.slow
def test_stores_into_peers_save_the_copies_of_puts_and_rows_fill_their_lines() -> None:
    assert line_share(256) == 1.0 and line_share(184) == pytest.approx(184 / 192) and line_share(8) == 8 / 64
    stored, copied = (iterate(design(zero_copy=zero)).makespan_s for zero in (True, False))
    assert copied > 1.05 * stored
    kernel = plan(design())
    local = kernel.items.work[kernel.items.completes == NONE]
    remote = kernel.items.work[kernel.items.completes != NONE]
    assert local.min() - remote.max() == pytest.approx(float(facts().logical_bytes))  # the intermediate store


@pytest.mark.slow
def test_skew_delays_by_no_more_than_itself_and_a_late_gpu_by_all_of_it() -> None:
    even, skewed = iterate(design(system="mi210_2x1")), iterate(design(system="mi210_2x1"), skew_s=20e-6)
    assert even.makespan_s < skewed.makespan_s <= even.makespan_s + 20e-6 + 1e-9
    kernel = plan(design(system="mi210_2x1"))
    late = run(kernel.starting(kernel.gpus.start + np.array([0.0, 20e-6])))
    assert late.computed_s[1] - late.computed_s[0] == pytest.approx(20e-6, rel=0.2)


def test_parameters_have_the_words_of_the_emitted_kernels() -> None:
    source = (REPOSITORY / "plugins" / "emit" / "dse_fused" / "operators.py").read_text("utf-8")
    (emitted,) = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == "Slices")
    words = [
        node.target.id for node in emitted.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    ]
    assert words == ["num_chunks", "remote_first", "workgroups"]
    assert "num_chunks" in FusedKnobs.model_fields and "workgroups" in Gpus._fields
    assert "remote_first" in str(FusedKnobs.model_fields["issue_order"].annotation)


def test_waiting_for_what_nobody_sends_is_an_error() -> None:
    kernel = plan(design("mi210_2x1", "gemv-70b_out", num_chunks=1))
    nobody = kernel.items._replace(completes=np.full_like(kernel.items.completes, NONE))
    with pytest.raises(ValueError, match="nobody sends"):
        run(replace(kernel, items=nobody))


def test_peak_demand_is_the_rate_of_a_wire_that_is_always_busy_and_less_for_one_that_pauses() -> None:
    busy = np.array([[0.0, i, i + 1.0, 10.0] for i in range(16)])
    paused = np.array([[0.0, 2 * i, 2 * i + 1.0, 10.0] for i in range(16)])
    assert peak_demand(busy) == pytest.approx(10.0)
    assert peak_demand(paused) == pytest.approx(7.5, rel=0.35)
    assert peak_demand(paused) < 9.9


def test_what_has_no_workgroups_is_refused() -> None:
    with pytest.raises(ConfigError, match="skew_s"):
        FusedBackend(skew_s=-1.0)
    assert "stands for all" in str(FusedBackend(skew_s=1e-6).problems(design("dlrm_torus"))[-1])
    assert "reduce around a network" in str(BACKEND.problems(design("dlrm_torus", "gemv-70b_out"))[-1])
    tree = {
        "system": shipped("system")["mi300x_8"],
        "workload": shipped("workload")["ficco"],
        "schedule": shipped("schedule")["serial"],
    }
    (serial, *_) = (BACKEND.design(scenario) for scenario in BACKEND.scenarios(tree).values())
    assert "no workgroups" in str(BACKEND.problems(serial)[0])
