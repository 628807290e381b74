"""Price of a machine: area, power and cost by rules that know no chip, and files that say how sure they are."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import codesign
from dse.errors import ConfigError
from dse_codesign.technology import (
    MachineActivity,
    MachineKnobs,
    design_activity,
    known_gpus,
    load_technology,
    module_power,
    of_system,
    price,
    stack_machines,
    sustained_clock,
    technology_of,
)
from dse_codesign.technology.area import package_area
from dse_codesign.technology.cost import die_yield, dies_per_wafer
from dse_codesign.technology.power import board_power, relative_voltage
from dse_codesign.technology.settings import Coefficient, technology_tree
from simulators.costs.power import Activity, board_w, voltage
from simulators.hardware.machine import System, tree_of, tree_of_gpu

TECHNOLOGY = load_technology("silicon_2026")
NOMINAL = TECHNOLOGY.nominal
GPUS = {name: gpu.machine(TECHNOLOGY) for name, gpu in known_gpus().gpus.items()}
TREE = technology_tree("silicon_2026")
MACHINES = st.sampled_from(sorted(GPUS)).map(GPUS.__getitem__)
GROWS = (
    *("cus_on_die", "fp32_fma_per_cu", "fp64_fma_per_cu", "matrix_fma_per_cu", "register_bytes_per_cu"),
    *("l1_bytes_per_cu", "l2_bytes", "hbm_sites", "link_lanes", "copy_engines", "die_to_die_bytes_per_s"),
)


def without_intervals(tree: Mapping[str, Any], path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A copy of a tree, and the part of it at a dotted path."""
    part = copied = copy.deepcopy(dict(tree))
    for name in path.split("."):
        part = part[name]
    return copied, part


# Files


def test_every_shipped_number_has_an_interval_and_a_source() -> None:
    pairs = list(TECHNOLOGY.coefficients())
    assert len(pairs) > 100
    for path, coefficient in pairs:
        assert coefficient.low <= coefficient.value <= coefficient.high, path
        assert len(coefficient.source) >= 8, path
        if coefficient.provenance in ("memory", "assumed", "calibrated"):
            assert coefficient.low < coefficient.high, path


def test_at_most_four_numbers_are_calibrated() -> None:
    fitted = [path for path, coefficient in TECHNOLOGY.coefficients() if coefficient.provenance == "calibrated"]
    assert sorted(fitted) == sorted(name for names in codesign.CALIBRATED.values() for name in names)
    assert len(fitted) <= 4


@pytest.mark.parametrize("absent", ["source", "low", "high", "provenance", "value"])
@pytest.mark.parametrize("path", ["processes.n7.wafer_usd", "power.module_w", "memory.generations.hbm3.pj_per_bit"])
def test_a_number_without_source_or_interval_is_refused_by_its_path(path: str, absent: str) -> None:
    tree, part = without_intervals(TREE, path)
    del part[absent]
    with pytest.raises(ConfigError, match=rf"technology\.{path}\.{absent}: is missing"):
        technology_of(tree)


def test_a_bare_number_and_an_interval_upside_down_are_refused_together() -> None:
    tree, area = without_intervals(TREE, "area")
    area["uncore_share"] = 1.0
    area["cu_control_mtr"] |= {"low": 90, "high": 45}
    with pytest.raises(ConfigError) as refusal:
        technology_of(tree)
    assert "technology.area.uncore_share = 1.0: is a bare number: write {value, low" in str(refusal.value)
    assert "technology.area.cu_control_mtr" in str(refusal.value)
    assert "low <= value <= high" in str(refusal.value)


def test_an_unknown_number_and_an_unknown_technology_get_the_nearest_name() -> None:
    tree, cost = without_intervals(TREE, "cost")
    cost["wafer_mn"] = cost["wafer_mm"]
    with pytest.raises(ConfigError, match=r"technology\.cost\.wafer_mn.*did you mean `technology.cost.wafer_mm`"):
        technology_of(tree)
    with pytest.raises(ConfigError, match="did you mean `silicon_2026`"):
        load_technology("silicon_2062")


# Public GPUs


def test_rules_reach_the_published_areas_and_powers_of_eight_gpus() -> None:
    """Within 15 %, by rules without a constant of a chip (plugins/codesign/README.md)."""
    figures = codesign.technology()
    assert len(figures["gpus"]) == 8
    assert figures["area_error_worst"] <= 0.15
    assert figures["power_error_worst"] <= 0.15


def test_a_gpu_left_out_of_the_fit_is_predicted_more_badly_and_told() -> None:
    figures = codesign.technology()
    assert figures["area_error_worst"] < figures["area_error_worst_left_out"] <= 0.25
    assert figures["power_error_worst"] < figures["power_error_worst_left_out"] <= 0.3


def test_gpus_that_nothing_was_fitted_to_are_predicted_within_a_fifth() -> None:
    figures = codesign.technology()
    assert len(figures["held_out"]) == 3
    assert figures["area_error_worst_held_out"] <= 0.2
    assert figures["power_error_worst_held_out"] <= 0.15


def test_shipped_coefficients_are_those_of_the_fit() -> None:
    for path, value in codesign.fitted_coefficients().items():
        assert NOMINAL[path] == pytest.approx(value, rel=2e-3), path


def test_making_a_module_costs_about_what_analysts_say() -> None:
    for name, gpu in known_gpus().gpus.items():
        if gpu.published.cost_usd is not None:
            assert float(price(GPUS[name], NOMINAL).module_usd) == pytest.approx(gpu.published.cost_usd, rel=0.3), name


# Properties


@settings(max_examples=60)
@given(machine=MACHINES, knob=st.sampled_from(GROWS), factor=st.floats(1.05, 3))
def test_area_grows_with_every_knob(machine: MachineKnobs, knob: str, factor: float) -> None:
    value = np.asarray(getattr(machine, knob), float)
    more = machine.with_knobs({knob: np.where(value > 0, factor * value, 10.0)})
    before, after = price(machine, NOMINAL), price(more, NOMINAL)
    assert after.area_mm2 >= before.area_mm2
    if knob != "copy_engines" or not np.any(machine.num_base_dies):  # an engine fits beneath the dies that are carried
        assert after.area_mm2 > before.area_mm2


@settings(max_examples=30)
@given(machine=MACHINES)
def test_blocks_make_up_the_dies(machine: MachineKnobs) -> None:
    area = price(machine, NOMINAL).area
    assert float(sum(area.blocks.values(), np.zeros(()))) == pytest.approx(float(area.total_mm2), rel=1e-12)


def test_tracker_and_units_in_memory_take_area() -> None:
    machine = GPUS["v100"]
    tracked = machine.with_knobs({"tracker_bytes": 19 * 1024.0, "pim_units": 512})
    before, after = price(machine, NOMINAL).area, price(tracked, NOMINAL).area
    assert 0 < float(after.total_mm2 - before.total_mm2) < 1.0
    assert float(after.pim_mm2) > 100


@settings(max_examples=60)
@given(area=st.floats(1, 3000), defects=st.floats(0, 1), clustering=st.floats(0.5, 20), spares=st.integers(0, 30))
def test_yield_is_a_share_that_spares_raise(area: float, defects: float, clustering: float, spares: int) -> None:
    plain = float(die_yield(area, defects, clustering))
    repaired = float(die_yield(area, defects, clustering, repairable_mm2=area / 2, spares=spares))
    assert plain == pytest.approx((1 + area * defects / 100 / clustering) ** -clustering, rel=1e-9)
    assert 0 < plain <= repaired * (1 + 1e-9)
    assert repaired <= 1


def test_yield_with_spares_equals_a_sum_over_defects() -> None:
    """Gamma-mixed Poisson defects: none outside CUs, at most the spares inside."""
    alpha, inside, outside, spares = 3.0, 0.6, 0.4, 2
    rate = np.random.default_rng(0).gamma(alpha, 1 / alpha, 400_000)
    terms = [np.exp(-rate * (inside + outside)) * (rate * inside) ** j / [1, 1, 2][j] for j in range(spares + 1)]
    closed = die_yield(100.0, inside + outside, alpha, repairable_mm2=60.0, spares=spares)
    assert float(closed) == pytest.approx(float(np.mean(sum(terms))), rel=5e-3)


def test_cost_of_a_good_die_is_convex_in_its_area() -> None:
    area = np.linspace(20, 850, 200)
    cost = 1 / dies_per_wafer(area, NOMINAL) / die_yield(area, 0.1, 10.0)
    assert np.all(np.diff(cost) > 0)
    assert np.all(np.diff(cost, 2) > 0)


@pytest.mark.slow
@settings(max_examples=60)
@given(machine=MACHINES, share=st.floats(0.05, 1.5), matrix=st.floats(0, 1), hbm=st.floats(0, 1))
def test_power_is_under_the_cap_once_the_clock_has_fallen(
    machine: MachineKnobs, share: float, matrix: float, hbm: float
) -> None:
    activity = MachineActivity(matrix=matrix, vector=0.1, hbm=hbm, link=0.2)
    full = float(module_power(machine, NOMINAL, activity).total_w)
    cap = share * full
    clock = float(sustained_clock(machine, NOMINAL, activity, cap_w=cap))
    if share >= 1:
        assert clock == 1
    elif clock > 0:
        drawn = float(module_power(machine, NOMINAL, activity, clock=clock).total_w)
        assert drawn <= cap * (1 + 1e-9)
        assert drawn == pytest.approx(cap, rel=1e-6) or clock < 1
    else:
        assert float(module_power(machine, NOMINAL, activity, clock=0.0).total_w) >= cap


def test_power_grows_with_the_clock_faster_than_the_clock() -> None:
    machine, clock = GPUS["mi300x"], np.linspace(0.7, 1.3, 20)
    power = module_power(machine, NOMINAL, design_activity(machine), clock=clock).parts["matrix"]
    assert np.all(np.diff(power / clock) > 0)


@given(machine=MACHINES, clock=st.floats(0.3, 1.0), matrix=st.floats(0, 1), vector=st.floats(0, 1))
def test_a_module_draws_what_the_law_of_boards_says_with_the_constants_of_its_technology(
    machine: MachineKnobs, clock: float, matrix: float, vector: float
) -> None:
    """Of modules without caches in base dies, whose links between dies and units in memory rest."""
    machine = replace(machine, llc_bytes=np.asarray(0.0))
    activity = MachineActivity(matrix=matrix, vector=vector, hbm=0.5, link=0.25, matrix_format="bf16")
    board = board_power(machine, NOMINAL, activity, area=package_area(machine, NOMINAL))
    sizes = (machine.matrix_fma_per_cu, machine.num_cus, machine.clock_hz)
    units, cus, hertz = (np.asarray(size, float) for size in sizes)
    flop, hbm = 2 * units * cus * hertz * matrix * clock, 0.5 * np.asarray(machine.hbm_bytes_per_s)
    doing = Activity(flop, hbm, 0.5 * np.asarray(machine.link_bytes_per_s), vector * cus, hbm)
    doing = replace(doing, busy=max(matrix, vector, 0.5))
    module = module_power(machine, NOMINAL, activity, clock=clock)
    assert float(board_w(board, clock, doing, "bf16")) == pytest.approx(float(module.total_w), rel=1e-9)
    # voltage by the rules of the technology
    rise = relative_voltage(hertz * clock, NOMINAL) / relative_voltage(0.0, NOMINAL)
    assert float(voltage(board, clock)) == pytest.approx(float(rise))


def test_a_cap_lowers_the_clock_of_what_multiplies_more_than_of_what_copies() -> None:
    machine = GPUS["mi300x"]
    multiplies = MachineActivity(matrix=1.0, hbm=0.5, link=0.5)
    copies = MachineActivity(hbm=0.5, link=1.0)
    busy, free = (float(sustained_clock(machine, NOMINAL, kernel, cap_w=600.0)) for kernel in (multiplies, copies))
    assert busy < free == 1


def test_low_precision_costs_less_energy_for_each_flop() -> None:
    machine = GPUS["h100"]
    power = {
        name: float(module_power(machine, NOMINAL, MachineActivity(matrix=1.0, matrix_format=name)).total_w)
        for name in ("fp64", "fp32", "tf32", "fp16", "fp8", "fp4")
    }
    assert list(power.values()) == sorted(power.values(), reverse=True)


# Arrays


def test_arrays_of_machines_are_priced_as_one_by_one() -> None:
    machines = stack_machines(list(GPUS.values()))
    together = price(machines, NOMINAL, cap_w=500.0)
    for index, machine in enumerate(GPUS.values()):
        for alone in (price(machine, NOMINAL, cap_w=500.0), price(machines.at(index), NOMINAL, cap_w=500.0)):
            assert float(alone.area_mm2) == pytest.approx(float(together.area_mm2[index]), rel=1e-12)
            assert float(alone.power_w) == pytest.approx(float(together.power_w[index]), rel=1e-9)
            assert float(alone.total_usd) == pytest.approx(float(together.total_usd[index]), rel=1e-9)


def test_drawn_technologies_price_machines_as_one_by_one_and_lie_in_their_intervals() -> None:
    machines = stack_machines([GPUS["h100"], GPUS["mi300x"], GPUS["p100"]])
    drawn = TECHNOLOGY.sample(16, seed=3)
    prices = price(machines, drawn, cap_w=400.0)
    assert prices.total_usd.shape == prices.area_mm2.shape == prices.clock.shape == (16, 3)
    for path, coefficient in TECHNOLOGY.coefficients():
        assert np.all((drawn[path] >= coefficient.low) & (drawn[path] <= coefficient.high)), path
    single = drawn.with_values({path: values[5, 0] for path, values in drawn.values.items()})
    np.testing.assert_allclose(price(machines, single, cap_w=400.0).total_usd, prices.total_usd[5], rtol=1e-9)
    again = TECHNOLOGY.sample(16, seed=3)
    np.testing.assert_array_equal(again["area.uncore_share"], drawn["area.uncore_share"])


@given(quantile=st.floats(1e-6, 1 - 1e-6))
def test_a_drawn_coefficient_lies_in_its_interval(quantile: float) -> None:
    coefficient = Coefficient(value=2.0, low=1.0, high=5.0, provenance="assumed", source="a test")
    assert 1.0 <= float(coefficient.draw(np.array(quantile))) <= 5.0


def test_ten_thousand_machines_are_priced_at_once() -> None:
    cus = np.linspace(100, 400, 10_000)
    machines = GPUS["mi300x"].with_knobs({"num_cus": cus, "cus_on_die": cus * 320 / 304})
    assert price(machines, NOMINAL, cap_w=750.0).total_usd.shape == (10_000,)


# Systems


def system(name: str, **gpu: Any) -> System:
    """A shipped system with other numbers of its GPU."""
    described = System.model_validate(tree_of(name))
    return described.model_copy(update={"gpu": described.gpu.model_copy(update=gpu)})


@pytest.mark.slow
@pytest.mark.parametrize(("name", "gpu"), [("mi300x_8", "mi300x"), ("h100_8", "h100"), ("v100_8", "v100")])
def test_a_shipped_system_has_the_dies_of_its_gpu(name: str, gpu: str) -> None:
    machine = of_system(system(name), TECHNOLOGY)
    alone = price(GPUS[gpu], NOMINAL)
    assert float(price(machine, NOMINAL).area_mm2) == pytest.approx(float(alone.area_mm2), rel=1e-3)
    assert "num_cus" not in machine.assumed


def test_a_grid_of_a_system_is_priced_as_arrays() -> None:
    grid = of_system(system("mi300x_8", num_cus=np.array([152, 304, 608])), TECHNOLOGY)
    prices = price(grid, NOMINAL)
    assert prices.area_mm2.shape == (3,)
    assert np.all(np.diff(prices.area_mm2) > 0)
    assert np.all(np.diff(prices.total_usd) > 0)


def test_more_memory_bandwidth_takes_more_stacks() -> None:
    base = system("mi300x_8")
    more = system("mi300x_8", hbm_bytes_per_s=1.5 * base.gpu.hbm_bytes_per_s)
    machines = [of_system(described, TECHNOLOGY) for described in (base, more)]
    assert float(machines[1].hbm_stacks) > float(machines[0].hbm_stacks) == 8  # type: ignore[arg-type]
    assert float(machines[1].hbm_bytes_per_s) == pytest.approx(1.5 * 5.3e12)  # type: ignore[arg-type]


def test_dies_of_another_gpu_are_told_as_assumed() -> None:
    assert "matrix_fma_per_cu" in of_system(system("t3_ring"), TECHNOLOGY).assumed
    assert "matrix_fma_per_cu" not in of_system(system("h100_8"), TECHNOLOGY).assumed
    with pytest.raises(ValueError, match="nothing is known of its dies"):
        of_system(system("gtx_1080_ti"), TECHNOLOGY)


@pytest.mark.parametrize("name", sorted(known_gpus().alike))
def test_a_gpu_like_another_has_its_own_counts(name: str) -> None:
    machine = of_system(System.model_validate(tree_of_gpu(name)), TECHNOLOGY)
    assert np.asarray(machine.cus_on_die) >= np.asarray(machine.num_cus)
    assert 300 < float(price(machine, NOMINAL).area_mm2) < 2000


def test_a_network_costs_nics_ports_and_cables() -> None:
    alone, cluster = (
        price(of_system(system("mi300x_8"), TECHNOLOGY), NOMINAL),
        of_system(system("mi210_16x4"), TECHNOLOGY),
    )
    assert float(alone.cost_usd["nics"]) == 0
    assert all(float(price(cluster, NOMINAL).cost_usd[part]) > 0 for part in ("nics", "switches", "cables"))


def test_the_benchmark_prints_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert codesign.main(["technology", "--json"]) == 0
    assert '"power_error_worst"' in capsys.readouterr().out
