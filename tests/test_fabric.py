"""Many nodes: what a byte loads on its way, conserved and monotone; even nodes are the node that stands for them."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import scaleout
from dse.backend import Batch
from dse.space import set_path
from simulators.costs.fabric import Algorithm, PhaseSegment, dimensions, num_gpus, pace, phases
from simulators.hardware.machine import System
from simulators.hardware.network import Pattern
from simulators.hardware.schedule_system import ScheduleSystem
from simulators.overlap.backend import OverlapBackend
from simulators.overlap.design import OverlapDesign
from tests.support import backend, drawn, number, results, shipped

PATTERNS: tuple[Pattern, ...] = ("all_to_all", "all_gather", "reduce_scatter", "all_reduce")
WAYS: tuple[Algorithm, ...] = ("direct", "hierarchical")
PLACEMENTS = ("gpu", "pcie_switch", "cpu")
NETWORKS = ("rail", "fat_tree", "torus")
FABRIC = "system.fabric"

every_pattern = pytest.mark.parametrize("pattern", PATTERNS)
every_way = pytest.mark.parametrize("way", WAYS)


def system(changes: dict[str, Any] | None = None) -> System:
    """The shipped system of 16 nodes of 4 GPUs with values set by dotted path below `system`."""
    tree = {"system": shipped("system")["mi210_16x4"]}
    for path, value in (changes or {}).items():
        set_path(tree, f"system.{path}", value)
    return ScheduleSystem.model_validate(tree["system"])


@st.composite
def fabrics(draw: st.DrawFn, /, **fixed: Any) -> dict[str, Any]:
    """Nodes, GPUs, NICs and networks that fit together."""
    drawn = {
        "node.num_gpus": draw(st.sampled_from([1, 2, 4, 8])),
        "node.topology": draw(st.sampled_from(["mesh", "switch", "ring"])),
        "fabric.num_nodes": draw(st.sampled_from([1, 2, 3, 4, 6, 16, 128])),
        "fabric.nic.num_nics": draw(st.sampled_from([1, 2, 4, 8])),
        "fabric.nic.placement": draw(st.sampled_from(PLACEMENTS)),
        "fabric.nic.bytes_per_s": draw(st.sampled_from([5e9, 25e9, 100e9])),
        "fabric.network.topology": draw(st.sampled_from(NETWORKS)),
        "fabric.network.oversubscription": draw(st.sampled_from([1.0, 2.0, 4.0])),
    }
    return drawn | fixed


def seconds(on: System, pattern: Pattern, way: Algorithm, payload: float = 1e9) -> float:
    """A collective of so many bytes a GPU alone: phases one after another, legs of a phase at once."""
    remote = payload * (num_gpus(on) - 1) / num_gpus(on)
    total = 0.0
    for legs in phases(on, pattern, way):
        wire = [remote * leg.share / float(pace(on, leg, cus=on.gpu.num_cus, pattern=pattern)) for leg in legs]
        total += max(wire) + max(number(leg.latency_s) for leg in legs)
    return total


def moved(on: System, pattern: Pattern, way: Algorithm, *, inside: bool) -> float:
    """Share of its tensor that a GPU sends inside its node, or over NICs."""
    legs = [leg for phase in phases(on, pattern, way) for leg in phase if leg.inside == inside]
    return sum(leg.share for leg in legs) * (num_gpus(on) - 1) / num_gpus(on)


# Conservation


@every_pattern
@drawn(60)
@given(data=st.data())
def test_bytes_over_nics_are_the_payload_times_the_share_that_is_elsewhere(
    pattern: Pattern, data: st.DataObject
) -> None:
    machine = system(data.draw(fabrics()))
    nodes, gpus = machine.fabric.num_nodes if machine.fabric else 1, machine.node.num_gpus
    passes = 2 if pattern == "all_reduce" else 1
    apart = (nodes - 1) / nodes
    assert moved(machine, pattern, "direct", inside=False) == pytest.approx(passes * apart, abs=1e-12)
    fewer = apart if pattern == "all_to_all" else apart / gpus
    assert moved(machine, pattern, "hierarchical", inside=False) == pytest.approx(passes * fewer, abs=1e-12)
    inside = moved(machine, pattern, "direct", inside=True)
    assert inside == pytest.approx(passes * (gpus - 1) / num_gpus(machine), abs=1e-12)
    staged = moved(machine, pattern, "hierarchical", inside=True)
    assert staged == pytest.approx(passes * (gpus - 1) / gpus, abs=1e-12)


@every_way
@every_pattern
@given(gpus=st.sampled_from([1, 2, 4, 8]), topology=st.sampled_from(["mesh", "switch", "ring"]))
def test_one_node_loads_no_nic(pattern: Pattern, way: Algorithm, gpus: int, topology: str) -> None:
    changes = {"fabric.num_nodes": 1, "node.num_gpus": gpus, "node.topology": topology}
    machine = system(changes)
    used = {name for legs in phases(machine, pattern, way) for leg in legs for name in leg.loads}
    assert not used & {"nic", "pcie", "pcie.nic", "host", "spine", "torus.0", "torus.1"}
    assert bool(used) == (gpus > 1)
    alone = machine.model_copy(update={"fabric": None})
    assert phases(alone, pattern, way) == phases(machine, pattern, way)


@every_pattern
@drawn(30)
@given(data=st.data())
def test_direct_and_hierarchical_are_the_same_in_one_node_and_where_nodes_have_one_gpu(
    pattern: Pattern, data: st.DataObject
) -> None:
    """Of nodes of one GPU but for the torus, where hierarchical reductions go from neighbour to neighbour."""
    inside = system(data.draw(fabrics(**{"fabric.num_nodes": 1})))
    assert seconds(inside, pattern, "direct") == pytest.approx(seconds(inside, pattern, "hierarchical"))
    single = system(data.draw(fabrics(**{"node.num_gpus": 1, "fabric.network.topology": "fat_tree"})))
    assert seconds(single, pattern, "direct") == pytest.approx(seconds(single, pattern, "hierarchical"))


# Monotone


@pytest.mark.one_in(3)
@pytest.mark.slow
@every_way
@every_pattern
@drawn(20)
@given(data=st.data())
def test_more_or_faster_nics_and_better_places_are_never_slower(
    pattern: Pattern, way: Algorithm, data: st.DataObject
) -> None:
    drawn = data.draw(fabrics())
    base = seconds(system(drawn), pattern, way)
    for path, values in (
        ("fabric.nic.num_nics", (1, 2, 4, 8, 16)),
        ("fabric.nic.bytes_per_s", (5e9, 25e9, 100e9, 400e9)),
        ("fabric.nic.pcie_bytes_per_s", (26e9, 52e9)),
        ("fabric.nic.placement", PLACEMENTS[::-1]),
        ("fabric.network.oversubscription", (8.0, 4.0, 2.0, 1.0)),
    ):
        if path == "fabric.nic.num_nics" and drawn["fabric.network.topology"] == "rail" and way == "direct":
            continue  # one rail has no spine to cross, several have
        times = [seconds(system({**drawn, path: value}), pattern, way) for value in values]
        assert all(later <= sooner * (1 + 1e-12) for sooner, later in itertools.pairwise(times)), path
    assert base > 0 or num_gpus(system(drawn)) == 1


@pytest.mark.parametrize("nics", [1, 2, 4, 8])
def test_rails_spare_the_spine_where_a_collective_is_hierarchical(nics: int) -> None:
    machine = system(
        {"fabric.network.topology": "rail", "fabric.nic.num_nics": nics, "fabric.nic.placement": "pcie_switch"}
    )
    spines = {way: _away(machine, way).loads.get("spine", 0.0) for way in WAYS}
    rails = min(nics, 4)  # of four GPUs; a NIC carries 4 / nics of them, and the spine is oversubscribed 2:1
    assert spines["hierarchical"] == 0
    assert number(spines["direct"]) == pytest.approx(2.0 * 4 / nics * (rails - 1) / rails)


def _away(machine: System, way: Algorithm) -> PhaseSegment:
    return next(leg for legs in phases(machine, "all_to_all", way) for leg in legs if not leg.inside)


# The torus


@pytest.mark.parametrize("nodes", [2, 6, 16, 64, 128])
def test_links_of_a_torus_carry_what_routes_of_an_all_to_all_put_on_them(nodes: int) -> None:
    """Every message walked hop by hop, dimension by dimension; the mean load of a port is the model's."""
    a, b = dimensions(nodes)
    crossed = np.zeros(2)
    for x, y in np.ndindex(a, b):
        crossed += [min(x, a - x), min(y, b - y)]
    machine = system({"fabric.num_nodes": nodes, "node.num_gpus": 1, "fabric.network.topology": "torus"})
    leg = _away(machine, "direct")
    ports = machine.fabric.nic.num_nics / 2 if machine.fabric else 0  # of each dimension
    for axis in range(2):
        expected = crossed[axis] / (nodes - 1) / ports  # a byte to all others, each a share of it
        assert number(leg.loads.get(f"torus.{axis}", 0.0)) == pytest.approx(expected)


@given(nodes=st.integers(2, 400))
def test_links_of_a_torus_carry_what_rings_of_a_reduction_put_on_them(nodes: int) -> None:
    """Half of the data around the rings of one dimension and then of the other, half the other way round."""
    a, b = dimensions(nodes)
    around = (a - 1) / a / 2 + (a - 1) / (a * b) / 2, (b - 1) / b / 2 + (b - 1) / (a * b) / 2  # of a tensor of 1
    machine = system({"fabric.num_nodes": nodes, "node.num_gpus": 1, "fabric.network.topology": "torus"})
    (leg,) = (leg for legs in phases(machine, "reduce_scatter", "hierarchical") for leg in legs)
    ports = machine.fabric.nic.num_nics / 2 if machine.fabric else 0
    for axis in range(2):
        expected = around[axis] / ((nodes - 1) / nodes) / ports
        assert number(leg.loads.get(f"torus.{axis}", 0.0)) == pytest.approx(expected)


# Rules


def design(changes: dict[str, Any], schedule: str = "fused_kernels", only: str = "emb-p30-b512") -> OverlapDesign:
    tree = {"system": shipped("system")["mi210_16x4"], "schedule": shipped("schedule")[schedule]}
    tree["workload"] = {**shipped("workload")["fused_ops"], "only": [only]}
    for path, value in changes.items():
        set_path(tree, path, value)
    (root,) = backend("fluid").scenarios(tree).values()
    return backend("fluid").design(root)


@pytest.mark.parametrize(
    ("changes", "schedule", "path"),
    [
        ({f"{FABRIC}.nic.placement": "gpu", f"{FABRIC}.nic.num_nics": 3}, "fused_kernels", f"{FABRIC}.nic.num_nics"),
        ({f"{FABRIC}.imbalance": 0.2}, "bulk_sync", f"{FABRIC}.imbalance"),
        ({f"{FABRIC}.num_nodes": 4096}, "bulk_sync", "workload.operators.a2a.rows"),
        ({"schedule.num_chunks": 600, f"{FABRIC}.num_nodes": 2}, "fused_kernels", "schedule.num_chunks"),
    ],
)
def test_what_a_fabric_cannot_be_is_told_with_a_way_out(changes: dict[str, Any], schedule: str, path: str) -> None:
    problems = list(backend("fluid").problems(design(changes, schedule)))
    assert path in [problem.path for problem in problems]
    assert all(problem.way_out for problem in problems)


@pytest.mark.parametrize(
    ("name", "path"), [("mi210_2x1", "system.node.num_gpus"), ("mi210_16x4", f"{FABRIC}.num_nodes")]
)
def test_schedules_of_one_node_refuse_what_is_none(name: str, path: str) -> None:
    tree = {"system": shipped("system")[name], "schedule": shipped("schedule")["serial"]}
    tree["workload"] = {**shipped("workload")["ficco"], "only": ["g4"]}
    (root,) = backend("fluid").scenarios(tree).values()
    problems = backend("fluid").problems(backend("fluid").design(root))
    assert path in [problem.path for problem in problems]


def test_written_out_workloads_are_no_overlap_to_other_schedules() -> None:
    tree = {"system": shipped("system")["mi300x_8"], "schedule": shipped("schedule")["serial"]}
    tree["workload"] = {**shipped("workload")["fused_ops"], "only": ["emb-p30-b512"]}
    (root,) = backend("fluid").scenarios(tree).values()
    (problem,) = backend("fluid").problems(backend("fluid").design(root))
    assert problem.path == "workload.operators"


def test_fused_kernels_need_a_system_that_says_what_they_take() -> None:
    tree = {"system": shipped("system")["mi300x_8"], "schedule": shipped("schedule")["fused_kernels"]}
    tree["workload"] = {**shipped("workload")["fused_ops"], "only": ["emb-p30-b512"]}
    (root,) = backend("fluid").scenarios(tree).values()
    (problem,) = backend("fluid").problems(backend("fluid").design(root))
    assert (problem.path, bool(problem.way_out)) == ("system", True)


# Whole fabrics


def metrics(point: OverlapDesign, engine: str = "fluid") -> dict[str, float]:
    (result,) = results(backend(engine), [point])
    assert result.status == "ok", result.reason
    return dict(result.metrics)


@pytest.mark.slow
@pytest.mark.parametrize("only", ["emb-p30-b512", "gemv-70b_out", "moe-qwen-t4096", "dlrm-t100"])
@pytest.mark.parametrize("schedule", ["bulk_sync", "fused_kernels"])
@pytest.mark.parametrize("topology", NETWORKS)
def test_even_nodes_are_the_node_that_stands_for_them(schedule: str, only: str, topology: str) -> None:
    """Every metric but what is staged, which is told of the busiest node only."""
    changes = {f"{FABRIC}.num_nodes": 4, f"{FABRIC}.network.topology": topology}
    single = metrics(design(changes, schedule, only))
    all_nodes = metrics(design({**changes, f"{FABRIC}.simulated": "all"}, schedule, only))
    assert all_nodes == pytest.approx(single, rel=1e-9, abs=1e-15)


@settings(max_examples=10)
@given(
    imbalance=st.floats(0.01, 0.9),
    nodes=st.sampled_from([2, 3, 8]),
    schedule=st.sampled_from(["bulk_sync", "fused_kernels"]),
)
def test_uneven_nodes_are_never_faster(imbalance: float, nodes: int, schedule: str) -> None:
    changes = {f"{FABRIC}.num_nodes": nodes, f"{FABRIC}.simulated": "all"}
    even, uneven = (metrics(design({**changes, f"{FABRIC}.imbalance": extra}, schedule)) for extra in (0.0, imbalance))
    assert uneven["makespan_s"] >= even["makespan_s"] * (1 - 1e-9)
    assert uneven["moved_bytes"] == pytest.approx((1 + imbalance) * even["moved_bytes"])


AXES = {
    "system.fabric.nic.bytes_per_s": [5e9, 20e9, 100e9],
    "system.fabric.nic.message_s": [0.0, 1e-6],
    "system.fabric.nic.host_bytes_per_s": [1e10, 2e11],
    "system.fabric.network.hop_s": [0.0, 1e-6],
    "system.fabric.network.oversubscription": [1.0, 3.0],
    "system.gpu.persistent.post_s": [0.0, 1e-5],
    "system.gpu.persistent.in_flight_bytes_per_cu": [1e3, 1e5],
    "workload.operators.emb.pooling": [3, 70],
    "workload.operators.a2a.rows": [512, 700, 1024],
    "schedule.occupancy_loss": [0.0, 0.3],
}


@pytest.mark.slow
@pytest.mark.parametrize("simulated", ["one", "all"])
@pytest.mark.parametrize("schedule", ["bulk_sync", "fused_kernels"])
@drawn(15)
@given(data=st.data())
def test_a_grid_of_fabrics_equals_its_designs_alone_to_the_bit(
    schedule: str, simulated: str, data: st.DataObject
) -> None:
    topology, where = data.draw(st.sampled_from(NETWORKS)), data.draw(st.sampled_from(PLACEMENTS))
    changes = {f"{FABRIC}.network.topology": topology, f"{FABRIC}.nic.placement": where, f"{FABRIC}.num_nodes": 4}
    point = design({**changes, f"{FABRIC}.simulated": simulated, "schedule.num_chunks": 4}, schedule)
    axis_values = {**AXES, **({f"{FABRIC}.imbalance": [0.0, 0.4]} if simulated == "all" else {})}
    legal = sorted(path for path in axis_values if backend("fluid").is_axis(path, point))
    chosen = data.draw(st.lists(st.sampled_from(legal), min_size=1, max_size=3, unique=True))
    axes = {path: np.array(axis_values[path]) for path in chosen}
    batch = Batch(Batch(point, axes).at(0), axes)
    (together,) = backend("fluid").evaluate([batch])
    alone = results(backend("fluid"), list(batch.designs()))
    assert [together[place] for place in range(batch.size)] == alone


@pytest.mark.parametrize("schedule", ["bulk_sync", "fused_kernels"])
def test_a_whole_node_of_one_gpu_is_that_gpu_and_one_of_several_is_not_supported(schedule: str) -> None:
    whole_node = OverlapBackend("fluid", gpus="all")
    single = design({"system.node.num_gpus": 1, f"{FABRIC}.nic.num_nics": 1}, schedule)
    (result,) = results(whole_node, [single])
    assert dict(result.metrics) == pytest.approx(metrics(single), rel=1e-12)
    assert results(whole_node, [design({}, schedule)])[0].status == "unsupported"


@pytest.mark.nightly
def test_many_nodes_simulate_in_a_second_and_cost_grows_no_faster_than_flows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With room for a busy machine: 128 nodes one by one, 1,024 by the one that stands for all."""
    assert scaleout.main(["--json", "--quick"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["symmetric_1024_nodes_s"] < 5
    assert report["iteration_128_nodes_s"] < 5
    assert report["growth_exponent"] < 1.5  # 2 would be quadratic
