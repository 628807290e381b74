"""One operator, one machine, one cost; and hardware whose numbers all count, in the right direction."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from benchmarks.physics import Draws, Machine, breaks, kinds, sibling_breaks, siblings, times, unequal
from dse.backend import Batch
from dse.config.options import list_options
from dse.values import has_axis, leaves, put
from simulators.costs.collective import collective_cost, machine_ring
from simulators.costs.gemm import GemmShape, gemms_of, waves_as_fast
from simulators.costs.transfer import protocol_seconds
from simulators.hardware.device import Device
from simulators.hardware.machine import System, tree_of
from simulators.hardware.network import CollectiveLibrary, links
from simulators.hardware.schedule_system import ScheduleSystem
from simulators.workloads.model_zoo import model_tree
from tests.iterations import BACKEND
from tests.support import shipped

SERVED = ["a100_8", "b200_8", "h100_8", "h200_8", "h20_8", "h800_8", "l20_8", "l40s_8", "mi300x_8", "mi355x_8"]
SMALL = ["dlrm_torus", "mi100", "mi210_2x1", "mi210_4", "t3_ring", "v100_8"]


@cache
def named(name: str) -> Machine:
    return Machine.named(name)


@pytest.mark.parametrize("name", [*SERVED, *SMALL])
def test_every_backend_gives_an_operator_the_same_cost(name: str) -> None:
    prices = dict(kinds(named(name), Draws.of(100)))
    assert Counter({kind: unequal(of) for kind, of in prices.items()}).total() == 0
    assert any(len(of) > 1 for of in prices.values()) or name == "t3_ring"  # whose steps nobody asks for


def test_two_costs_are_seen_to_differ() -> None:
    seconds = np.array([1.0, 2.0, 3.0])
    assert unequal({"one": seconds, "other": seconds * [1, 1 + 1e-9, 1]}) == 1


@pytest.mark.parametrize("name", [*SERVED, *SMALL])
def test_more_hardware_is_never_slower(name: str) -> None:
    assert not breaks(named(name), Draws.of(200, seed=3))


SIBLINGS = [(better.name, other.name) for better, other in siblings([*SERVED, "b300_8", "mi325x_8"])]


@pytest.mark.slow
@pytest.mark.parametrize(("better", "other"), SIBLINGS)
def test_a_sibling_of_which_no_number_is_worse_is_not_slower(better: str, other: str) -> None:
    assert not sibling_breaks(named(better), named(other), Draws.of(300, seed=2))


@pytest.mark.more
@pytest.mark.slow
@pytest.mark.one_in(6)
@pytest.mark.parametrize("mode", ["training", "prefill", "decode"])
@pytest.mark.parametrize(("better", "other"), SIBLINGS)
def test_a_sibling_is_not_slower_in_a_step(better: str, other: str, mode: str) -> None:
    """By more than 2 %; where collectives of a node were measured, on one GPU alone."""
    random, count = np.random.default_rng(1), 30
    measured = any(named(name).iterations.node.library.fitted_on for name in (better, other))
    axes = {"run.batch": (0, 7), "run.sequence_length": (7, 14), "parallel.tp": (0, 1 if measured else 4)}
    batch_axes = {path: 2 ** random.integers(*powers, count) for path, powers in axes.items()}
    tree = {"model": model_tree("llama3_8b"), "parallel": {"tp": 1, "pp": 1, "dp": 1}}
    tree |= {"run": {"mode": mode, "batch": 1, "sequence_length": 128, "precision": "bf16"}}
    tree |= {"kernels": shipped("kernels")["fused"], "optimizer": shipped("optimizer")["adam"]}
    trees = ({**tree, "system": shipped("system")[name]} for name in (better, other))
    here, there = BACKEND.evaluate([Batch(BACKEND.design(tree), batch_axes) for tree in trees])
    ok = here.ok & there.ok
    assert ok.sum() > count / 2
    assert (here.metrics["iteration_s"][ok] <= 1.02 * there.metrics["iteration_s"][ok]).all()


def test_products_of_two_formats_that_are_equally_fast_take_equally_long_where_one_was_measured() -> None:
    for name in list_options("system"):
        machine = named(name)
        gpu = machine.iterations.gpu if machine.iterations is not None else None
        if gpu is None or "streaming" not in str(gpu.efficiency.get("fp16")) or "bf16" not in gpu.efficiency:
            continue
        calibrated = [gpu.source(f"efficiency.{precision}").provenance for precision in ("fp16", "bf16")]
        if calibrated == ["assumed", "calibrated"]:
            seconds = times(machine, Draws.of(50))
            np.testing.assert_allclose(seconds["GEMM fp16"], seconds["GEMM bf16"], rtol=1e-9, err_msg=name)


@pytest.mark.parametrize(("what", "kind"), [("CUs", "GEMM bf16"), ("clock", "GEMM bf16"), ("rate", "GEMM bf16")])
@pytest.mark.parametrize("name", ["h100_8", "mi300x_8", "l40s_8"])
def test_arithmetic_is_alive(name: str, what: str, kind: str) -> None:
    machine, draws = named(name), Draws(*(np.array([8192.0]) for _ in range(4)))
    before, after = (times(of, draws)[kind] for of in (machine, machine.with_more(what, 2.0)))
    assert after < 0.7 * before


@pytest.mark.parametrize("name", ["h100_8", "l40s_8", "b200_8", "mi300x_8"])
def test_links_and_memory_are_alive(name: str) -> None:
    machine, draws = named(name), Draws(*(np.array([value]) for value in (1.0, 8192.0, 8192.0, 2.0**30)))
    for what, kind in (("links", "all_reduce 8"), ("HBM", "stream bf16"), ("HBM", "GEMM bf16")):
        before, after = (times(of, draws)[kind] for of in (machine, machine.with_more(what, 2.0)))
        assert after < 0.8 * before, (what, kind)


def test_every_shipped_machine_names_its_models() -> None:
    for name in list_options("system"):
        costs = tree_of(name).get("costs")
        assert costs is not None and costs["gemm"] and costs["collective"], name


def test_models_count_where_their_constants_are_the_gpus_own() -> None:
    machine = System.model_validate(shipped("system")["mi300x_8"])
    assert [machine.gemm_model(precision) for precision in ("bf16", "fp8")] == ["waves", "fitted"]
    fitted = machine.model_copy(update={"costs": machine.costs.model_copy(update={"gemm": "fitted"})})
    assert [fitted.gemm_model(precision) for precision in ("bf16", "fp16")] == [
        "fitted",
        "waves",
    ]  # it has none of fp16


def test_tiles_of_a_kernel_of_its_own_are_as_fast_as_the_librarys() -> None:
    machine = ScheduleSystem.of(shipped("system")["h100_8"])
    large, half = GemmShape.row_major(8192, 8192, 8192), GemmShape.row_major(4096, 8192, 8192)
    library, waves = gemms_of(machine, "bf16"), waves_as_fast(machine, "bf16")
    assert waves.cost(large).seconds == pytest.approx(library.cost(large).seconds, rel=1e-12)
    assert waves.cost(half).seconds < waves.cost(large).seconds
    assert waves.launch_s == library.launch_s


@pytest.mark.parametrize("name", ["a100_8", "b200_8", "h100_8", "h20_8", "l40s_8"])
def test_an_all_reduce_is_no_faster_than_its_links_and_never_with_more_gpus(name: str) -> None:
    device, payload = Device.of(shipped("system")[name]), 2.0 ** np.arange(10, 34)
    node = device.node
    for fewer in (2, 4):
        fewer_s, more_s = (
            protocol_seconds(node.protocols()["all_reduce"], "all_reduce", gpus, payload) for gpus in (fewer, 2 * fewer)
        )
        assert np.all(more_s >= fewer_s * (1 - 1e-12))
    if (switch := node.switch()) is not None:
        ring = replace(machine_ring(device, 8), in_switch=switch)
        cost = collective_cost("all_reduce", "in_switch", payload, ring)
        assert np.all(cost.wire_bytes / cost.seconds <= sum(float(np.asarray(rate)) for rate in links(node).values()))


def test_a_node_has_a_nic_a_gpu_unless_it_says_otherwise() -> None:
    assert CollectiveLibrary(bytes_per_s=1e9, latency_s=1e-6).network_nics == "one_a_gpu"
    tree = shipped("system")["h100_8"]
    device = put(Device.of(tree), "node.library.network_bytes_per_s", 25e9)
    ring = machine_ring(device, 16)
    assert ring.bytes_per_s == pytest.approx(8 * 25e9)


@pytest.mark.parametrize("name", ["h100_8", "mi355x_8", "b200_8"])
def test_k_is_split_where_that_is_fastest(name: str) -> None:
    """No other number of parts would be faster, so a faster HBM never makes a GEMM slower."""
    machine, draws = Device.of(shipped("system")[name]), Draws.of(2000, seed=5)
    shape, gemms = GemmShape.row_major(draws.m, draws.n, draws.k), gemms_of(Device.of(shipped("system")[name]), "bf16")
    faster = gemms_of(put(machine, "gpu.hbm_bytes_per_s", 1.2 * machine.gpu.hbm_bytes_per_s), "bf16")
    assert np.all(faster.cost(shape).seconds <= gemms.cost(shape).seconds * (1 + 1e-9))


def test_a_number_of_a_machine_is_an_axis_where_its_leaf_is_no_part_of_the_structure() -> None:
    for name in ("mi300x_8", "h100_8_ndr", "gb200_72"):
        machine = System.model_validate(tree_of(name))
        for path, _, structural in leaves(machine):
            assert has_axis(machine, path) == (not structural), path
            assert not has_axis(machine, f"{path}.more"), path
        assert not any(has_axis(machine, path) for path in ("name", "gpu", "gpu.nothing", "gpu.sources", "node.note"))
