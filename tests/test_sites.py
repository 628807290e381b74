"""Sites of a step: what schedules make of collectives and the GEMMs around them, and what may be chosen."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dse.backend import Batch
from dse.errors import ConfigError
from simulators.hardware.machine import tree_of
from simulators.steps.backend import metrics_of
from simulators.steps.overlap.sites import SITES, SiteSchedules, TensorGroup, read_schedule
from simulators.steps.run.build import iteration
from simulators.steps.run.task_graph import intervals
from simulators.workloads.model_zoo import model_tree
from tests.iterations import BACKEND, gridded
from tests.support import drawn, shipped

GATHERS = [name for name, site in SITES.items() if site.order == "before"]
FOR_ALL = ("uniform_fused_1d num_chunks=4", "hetero_fused_1d num_chunks=2", "shard_p2p", "signalled")
schedules = st.sampled_from(FOR_ALL)
chosen = st.dictionaries(st.sampled_from(sorted(SITES)), schedules, min_size=1)


def tree(sites: Any, *, system: str = "h100_8", layers: int = 4, **overrides: Any) -> dict[str, Any]:
    """A step of a Llama of four layers on eight GPUs. own: values of `run` and `parallel`."""
    run = {"mode": "training", "batch": 1, "sequence_length": 2048, "precision": "bf16"}
    parallel = {"tp": 8, "pp": 1, "dp": 1, "sequence_parallel": True}
    for name, value in overrides.items():
        (run if name in ("mode", "batch", "sequence_length") else parallel)[name] = value
    return {
        "system": tree_of(system),
        "model": {**model_tree("llama3_8b"), "layers": layers},
        "run": run,
        "parallel": parallel,
        "optimizer": shipped("optimizer")["adam"],
        "kernels": shipped("kernels")["flash"],
        "sites": sites,
    }


def step(sites: Any, **overrides: Any) -> Any:
    return BACKEND.design(tree(sites, **overrides))


def seconds(sites: Any, **overrides: Any) -> float:
    design = step(sites, **overrides)
    assert BACKEND.problems(design) == []
    return float(metrics_of(design)["iteration_s"])


def reasons(sites: Any, **overrides: Any) -> str:
    return "; ".join(map(str, BACKEND.problems(step(sites, **overrides))))


# What a schedule makes of a step


@pytest.mark.slow
@drawn(30)
@given(chosen, st.booleans())
def test_a_step_adds_up_ends_as_its_closed_form_does_and_works_as_without_schedules(
    sites: dict[str, str], recompute: bool
) -> None:
    again = {"recompute": "all" if recompute else "none"}
    serial, design = (
        point.model_copy(update={"run": point.run.model_copy(update=again)}) for point in (step({}), step(sites))
    )
    built = iteration(design)
    assert max(task.finish_s for task in intervals(built)) == pytest.approx(float(built.seconds), rel=1e-9)
    metrics = {name: float(value) for name, value in metrics_of(design).items()}
    parts = ("forward_s", "backward_s", "optimizer_s", "serialized_s", "exposed_dp_s", "bubble_s", "host_s")
    assert sum(metrics[name] for name in parts) == pytest.approx(metrics["iteration_s"], rel=1e-9)
    alone = metrics_of(serial)
    for name in ("flop", "hbm_bytes", "memory_bytes", "num_kernels"):
        assert float(alone[name]) == metrics[name]


@pytest.mark.slow
def test_sites_are_independent_of_one_another() -> None:
    """Where no gradients are reduced: what two sites gain together is the sum of what each gains alone."""
    serial = seconds({})
    gains = {name: serial - seconds({name: "hetero_fused_1d num_chunks=2"}) for name in ("ffn_in", "attention_out")}
    both = serial - seconds(dict.fromkeys(gains, "hetero_fused_1d num_chunks=2"))
    assert both == pytest.approx(sum(gains.values()), rel=0.02)  # the clock under load knows of both


def test_serial_sites_are_the_step_without_sites() -> None:
    plain = {name: value for name, value in tree({}).items() if name != "sites"}
    assert seconds(dict.fromkeys(SITES, "serial")) == seconds({})
    assert seconds({}) == float(metrics_of(BACKEND.design(plain))["iteration_s"])


@pytest.mark.slow
@given(st.sampled_from(GATHERS), st.sampled_from(["uniform_fused_1d", "hetero_fused_1d"]))
def test_a_gather_that_moves_in_no_time_costs_no_more_than_its_launches(name: str, schedule: str) -> None:
    """With links and HBM of any speed what is left is the GEMM in chunks: the critical path of the site."""
    fast = {"link_bytes_per_s": 1e15, "library": None}
    root = tree({name: schedule})
    node = {**root["system"]["node"], **fast}
    root["system"] = {**root["system"], "node": node, "costs": {"gemm": "fitted", "collective": "links"}}
    node["library"] = {"bytes_per_s": 1e15, "latency_s": 1e-12}
    node.pop("in_switch", None)
    built = iteration(BACKEND.design(root))
    exposed = sum(float(part.seconds) for part in built.passes.parts if part.op.name in SITES[name].collectives)
    assert exposed < 0.02 * float(built.seconds)


def test_a_grid_over_numbers_of_sites_is_one_design_after_the_other() -> None:
    design = step(dict.fromkeys(("ffn_in", "ffn_out"), "hetero_fused_1d comm_engine=cu comm_cus=8"))
    axes = {"sites.ffn_in.comm_cus": [4, 8, 16], "sites.ffn_out.comm_cus": [8, 24]}
    together = gridded(design, axes)
    arrays = {path: np.asarray(values) for path, values in axes.items()}
    alone = [BACKEND.evaluate([Batch(point)])[0] for point in Batch(Batch(design, arrays).at(0), arrays).designs()]
    assert together.metrics["iteration_s"] == pytest.approx(
        [result.metrics["iteration_s"][0] for result in alone], rel=1e-12
    )
    assert len(set(together.metrics["iteration_s"])) == 6


def test_what_a_schedule_makes_of_a_site_is_remembered_by_content() -> None:
    machine = step({"ffn_in": "shard_p2p"}).system
    group = TensorGroup.of(machine, tp=8, precision="bf16")
    assert TensorGroup.of(machine, tp=8, precision="bf16") is group
    assert TensorGroup.of(machine, tp=4, precision="bf16") is not group
    metrics_of(step({"ffn_in": "shard_p2p"}).model_copy(update={"system": machine}))
    count = len(group.effects)
    metrics_of(step({"ffn_in": "shard_p2p"}).model_copy(update={"system": machine}))
    assert len(group.effects) == count > 0


# What may be chosen


@pytest.mark.parametrize(
    ("sites", "overrides", "message"),
    [
        ({"ffn_in": "shard_p2p"}, {"sequence_parallel": False}, "sites.ffn_in = 'shard_p2p': is no site of this step"),
        ({"ffn_in": "shard_p2p"}, {"tp": 1, "sequence_parallel": False}, "needs parallel.tp > 1"),
        ({"ffn_out_backward": "shard_p2p"}, {"mode": "prefill"}, "is no site of this step"),
        ({"ffn_out": "t3_mca"}, {}, "system.gpu.tracker: is needed by this schedule"),
        ({"ffn_in": "conccl"}, {}, "none is concurrent with ffn_in"),
        ({"ffn_in_backward": "conccl"}, {}, "sites.ffn_in_backward.comm_engine = 'dma': cannot add"),
        ({"ffn_in": "hetero_fused_1d comm_engine=cu comm_cus=99"}, {}, "sites.ffn_in.comm_cus = 99"),
    ],
)
def test_a_schedule_that_a_site_cannot_have_is_infeasible(sites: Any, overrides: dict[str, Any], message: str) -> None:
    assert message in reasons(sites, **overrides)


@pytest.mark.parametrize(
    ("sites", "message"),
    [
        ({"fnn_in": "shard_p2p"}, "sites.fnn_in: is no site (did you mean `ffn_in`?)"),
        ({"ffn_in": "shard_p3p"}, "sites.ffn_in = 'shard_p3p': is neither a shipped option nor a YAML file"),
        ({"ffn_in": "shard_p2p fast"}, "is no value of a knob of shard_p2p"),
        ({"ffn_in": "shard_p2p num_chunks=4"}, "sites.ffn_in.num_chunks"),
        ({"ffn_in": {"family": "nothing"}}, "sites.ffn_in"),
        ("serial", "is no section of sites"),
    ],
)
def test_what_is_no_schedule_of_a_site_is_refused_with_its_path(sites: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        step(sites)
    assert message in str(caught.value)


def test_a_machine_that_lacks_what_schedules_read_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        step({"ffn_in": "shard_p2p"}, system="mi100_8")
    assert "system.node.topology" in str(caught.value)


def test_a_schedule_is_called_as_it_was_typed_and_is_its_values() -> None:
    first, other = read_schedule("hetero_fused_1d num_chunks=4"), read_schedule("hetero_fused_1d  num_chunks=4")
    assert str(first) == "hetero_fused_1d num_chunks=4"
    assert first.model_copy(update={"name": ""}) == other.model_copy(update={"name": ""})


def test_every_site_has_a_schedule_that_it_can_have() -> None:
    built = iteration(step(dict.fromkeys(SITES, "hetero_fused_1d num_chunks=2")))
    assert isinstance(built.passes.scheduled, SiteSchedules)
    names = {place.name for block in built.passes.blocks for place in _places(block)}
    assert names == set(SITES)


def _places(block: Any) -> Any:
    from simulators.steps.overlap.sites import places

    return places(block.ops)
