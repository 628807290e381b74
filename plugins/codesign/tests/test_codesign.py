"""Co-design: a machine changes alike in speed and price, its plans are the best there are, and its features add up."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any, get_args

import numpy as np
import pandas as pd
import pytest

from dse.backend import Batch, check_results
from dse.cli import main
from dse.config.compose import request
from dse.config.options import load_yaml
from dse.errors import ConfigError
from dse.results.run_folder import FinishedRun
from dse.space import get_path
from dse.values import leaves
from dse_codesign import DATA
from dse_codesign import slopes as machine_slopes
from dse_codesign import worth as machine_worth
from dse_codesign.backend import Codesign, CodesignBackend, Judge, metrics_of
from dse_codesign.command import refuse_unmet, space_prices
from dse_codesign.machine import Base, Machine
from dse_codesign.study import Machines
from dse_codesign.technology import of_system
from dse_codesign.workloads import steps_of
from simulators.hardware.machine import SiteModel
from validation import codesign_search

QUIET = ["tracking=none", "fidelity=none", "figures=none"]


@cache
def tree() -> Mapping[str, Any]:
    """Sections of the shipped study, with two of its workloads."""
    sections = request(["study=codesign", "~workloads.training"]).tree
    return {name: sections[name] for name in Codesign.model_fields}


@cache
def judge() -> Judge:
    design = CodesignBackend().design(tree())
    return Judge(Base(design.system, design.technology), design.workloads)


def machine(**changes: Any) -> Machine:
    return Machine().model_copy(update=changes)


def metrics(**changes: Any) -> dict[str, float]:
    """Every metric of one machine."""
    changed = machine(**changes)
    return {name: float(column[0]) for name, column in metrics_of(judge(), changed, judge().judge(changed, 1)).items()}


# Machines


def test_a_machine_that_differs_in_nothing_is_the_base() -> None:
    ratios = metrics()
    for name in ("throughput_x", "worst_x", "value_x"):
        assert ratios[name] == pytest.approx(1, rel=1e-12)
    base = judge().base
    assert base.knobs_of(Machine()) == base.knobs
    base_machine = of_system(base.system, base.technology)
    assert {name: getattr(base.knobs, name) for name in ("num_cus", "hbm_bytes", "link_lanes")} == {
        name: getattr(base_machine, name) for name in ("num_cus", "hbm_bytes", "link_lanes")
    }


@pytest.mark.parametrize(
    ("change", "of_system", "of_price"),
    [
        ({"num_cus": 66}, {"gpu.num_cus": 0.5}, {"num_cus": 0.5, "cus_on_die": 0.5, "l2_bytes": 0.5}),
        ({"clock": 1.2}, {"gpu.clock": 1.2, "gpu.matrix_flop_per_s_per_cu": 1.2}, {"clock_hz": 1.2}),
        ({"matrix_rate": 2.0}, {"gpu.matrix_flop_per_s_per_cu": 2.0}, {"matrix_fma_per_cu": 2.0}),
        ({"hbm_stacks": 10}, {"gpu.hbm_bytes_per_s": 2.0, "gpu.hbm_bytes": 2.0}, {"hbm_bytes_per_s": 2.0}),
        ({"links": 0.5}, {"node.link_bytes_per_s": 0.5, "gpu.dma.bytes_per_s": 0.5}, {"link_lanes": 0.5}),
        ({"lane_rate": 2.0}, {"node.link_bytes_per_s": 2.0}, {"lane_gbit_per_s": 2.0}),
        ({"nic_gbit_per_s": 200.0}, {"node.library.network_bytes_per_s": 0.5}, {"nic_gbit_per_s": 0.5}),
        ({"cache": 2.0}, {"gpu.llc.bytes": 2.0}, {"l2_bytes": 2.0}),
        ({"scale_up": 15}, {"node.num_gpus": 15 / 8, "node.link_bytes_per_s": 0.5}, {"link_lanes": 1.0}),
    ],
)
def test_a_change_is_the_same_in_steps_and_in_prices(
    change: dict[str, Any], of_system: dict[str, float], of_price: dict[str, float]
) -> None:
    base = judge().base
    system, knobs = base.system_of(machine(**change)), base.knobs_of(machine(**change))
    for path, factor in of_system.items():
        before, after = (get_path(numbers.model_dump(), path) for numbers in (base.system, system))
        assert after == pytest.approx(factor * before), path
    for name, factor in of_price.items():
        assert getattr(knobs, name) == pytest.approx(factor * getattr(base.knobs, name)), name


def test_what_reaches_a_gpu_of_its_nics_follows_from_where_they_are() -> None:
    base = judge().base
    rates = {
        place: [
            float(base.nic_bytes_per_s(machine(nic_placement=place, nic_gbit_per_s=rate))) for rate in (100.0, 800.0)
        ]
        for place in ("gpu", "pcie_switch", "cpu")
    }
    assert rates["gpu"] == [12.5e9, 100e9]
    assert rates["pcie_switch"] == [12.5e9, pytest.approx(5.6e10)]  # of a PCIe link
    assert rates["cpu"] == [12.5e9, pytest.approx(6.14e11 / 32)]  # four times through the memory of eight GPUs
    prices = {place: metrics(nic_placement=place)["cost_usd"] for place in rates}
    assert prices["cpu"] < prices["gpu"] < prices["pcie_switch"]


@pytest.mark.slow
def test_a_mesh_has_no_switch_and_scale_up_has_cables() -> None:
    base = judge().base
    mesh, large = (base.knobs_of(machine(**change)) for change in ({"topology": "mesh"}, {"scale_up": 32}))
    assert (mesh.switched, mesh.switch_adds) == (0, 0)
    assert (np.asarray(large.link_cables).item(), base.knobs.link_cables) == (1, 0)
    assert metrics(topology="mesh")["cost_usd"] < metrics()["cost_usd"] < metrics(scale_up=32)["cost_usd"]
    assert judge().judge(machine(topology="mesh"), 1).plans[0]["decode"]["collectives"] == "library"  # type: ignore[index]
    assert metrics(in_switch=False)["cost_usd"] < metrics()["cost_usd"]


@pytest.mark.slow
def test_trackers_and_units_in_memory_are_in_plans_and_have_a_price() -> None:
    bare = {"in_switch": False}  # a kernel that sums in the switch is faster
    tracked = metrics(**bare, tracker_entries=512)
    with_units = metrics(**bare, tracker_entries=512, memory_units="hbm3_strawman")
    assert metrics(**bare)["throughput_x"] < tracked["throughput_x"] <= with_units["throughput_x"]
    assert metrics(**bare)["cost_usd"] < tracked["cost_usd"] < with_units["cost_usd"]
    plan = judge().judge(machine(**bare, tracker_entries=512), 1).plans[0]["prefill"]
    assert "t3_mca near_memory=false" in plan.values()  # type: ignore[union-attr]
    few = machine(tracker_entries=64)  # than workgroups are in flight
    assert judge().judge(few, 1).throughput[0] == pytest.approx(1, rel=1e-12)


def test_vector_rates_do_not_follow_the_width_of_matrix_units() -> None:
    base = judge().base
    before, after = (system.gpu.peak_flop_per_s for system in (base.system, base.system_of(machine(matrix_rate=2.0))))
    assert after["fp32"] == before["fp32"]
    assert after["bf16"] == 2 * before["bf16"]


@pytest.mark.slow
@pytest.mark.parametrize("knob", ["num_cus", "clock", "hbm_stacks", "links", "matrix_rate"])
def test_more_of_anything_is_not_slower_and_not_cheaper(knob: str) -> None:
    filled = machine_worth.with_numbers(judge(), Machine())
    before, after = metrics(), metrics(**{knob: 1.25 * getattr(filled, knob)})
    assert after["throughput_x"] > before["throughput_x"]
    assert after["cost_usd"] > before["cost_usd"]
    assert after["power_w"] > before["power_w"]


def test_a_cap_lowers_the_clock_and_with_it_the_speed() -> None:
    free, capped = metrics(), metrics(cap_w=400.0)
    assert capped["clock"] < 1
    assert capped["power_w"] == pytest.approx(400, rel=1e-3)
    assert capped["throughput_x"] < free["throughput_x"]
    assert metrics(cap_w=5000.0)["throughput_x"] == free["throughput_x"]


# Plans


@pytest.mark.more
@pytest.mark.slow
def test_arrays_give_what_single_machines_give() -> None:
    drawn = np.random.default_rng(0)
    numbers = {"num_cus": drawn.integers(60, 180, 12), "links": drawn.uniform(0.5, 2, 12), "cap_w": np.full(12, 500.0)}
    columns = metrics_of(judge(), machine(**numbers), judge().judge(machine(**numbers), 12))
    design = CodesignBackend().design(tree())
    fresh = Judge(Base(design.system, design.technology), design.workloads)
    for place in range(0, 12, 4):
        single = machine(**{name: values[place].item() for name, values in numbers.items()})
        alone = metrics_of(fresh, single, fresh.judge(single, 1))
        for name, column in columns.items():
            assert column[place] == pytest.approx(alone[name][0], rel=1e-9), name


@pytest.mark.slow
def test_machines_that_steps_cannot_tell_apart_are_computed_once() -> None:
    design = CodesignBackend().design(tree())
    fresh = Judge(Base(design.system, design.technology), design.workloads)
    fresh.judge(machine(num_cus=np.array([100, 100, 110])), 3)
    computed = sum(fresh.computed.values())
    fresh.judge(machine(num_cus=np.array([110, 100]), dies=2, hbm_stack_bytes=24e9), 2)
    assert sum(fresh.computed.values()) == computed


@pytest.mark.nightly
def test_sites_decided_one_by_one_reach_the_best_of_all_plans() -> None:
    assert codesign_search.inner(count=12)["inner_share_of_optimum"] >= 0.995


def test_a_switch_that_adds_up_is_used_where_there_is_one() -> None:
    having, lacking = judge().judge_all([(machine(in_switch=has), 1) for has in (True, False)])
    assert having.plans[0]["decode"]["collectives"] == "in_switch"  # type: ignore[index]
    assert lacking.plans[0]["decode"]["collectives"] == "library"  # type: ignore[index]
    assert having.speeds["decode"][0] > lacking.speeds["decode"][0]


# The backend


def test_batches_are_checked_against_rules_and_give_every_metric() -> None:
    backend = CodesignBackend()
    design = backend.design({**tree(), "machine": {**tree()["machine"], "num_cus": 132}})
    batch = Batch(design, {"machine.num_cus": np.array([66, 132, 400]), "machine.clock": np.array([0.8, 1.0])})
    assert all(backend.is_axis(path, design) for path in batch.axes)
    (screened,), (results,) = backend.screen([batch]), backend.evaluate([batch])
    assert list(screened.ok) == list(results.ok) == [True] * 4 + [False] * 2
    assert "use more, or fewer CUs" in results[5].reason
    assert set(check_results(results, backend.metrics).metrics) == set(backend.metrics)


@pytest.mark.parametrize(
    ("section", "value", "parts"),
    [
        ("machine", {"hbm": "hbm9"}, ["machine.hbm = 'hbm9'", "is no generation of the technology"]),
        ("machine", {"clock": 99}, ["machine.clock"]),
        (
            "machine",
            {"memory_units": "hbm3_strawmen"},
            ["machine.memory_units = 'hbm3_strawmen'", "did you mean `hbm3_strawman`"],
        ),
        ("workloads", {}, ["workloads: has none"]),
        ("workloads", {"mine": {"model": "nobody", "run": {}, "parallel": {}}}, ["workloads.mine", "nobody"]),
        (
            "workloads",
            {
                "mine": {
                    "model": "llama3_8b",
                    "run": {},
                    "parallel": {},
                    "options": {"sites": {"ffn_ot": ["shard_p2p"]}},
                }
            },
            ["workloads.mine.options.sites.ffn_ot: is no site", "`ffn_out`"],
        ),
    ],
)
def test_wrong_sections_are_refused_by_path(section: str, value: Any, parts: list[str]) -> None:
    wrong = {**tree(), section: {**tree()["machine"], **value} if section == "machine" else value}
    with pytest.raises(ConfigError) as refusal:
        CodesignBackend().design(wrong)
    assert all(part in str(refusal.value) for part in parts), refusal.value


def test_a_mesh_of_more_gpus_than_a_group_is_refused_by_a_rule() -> None:
    backend = CodesignBackend()
    wide = backend.design({**tree(), "machine": {**tree()["machine"], "topology": "mesh", "scale_up": 16}})
    (problem, *_) = backend.problems(wide)
    assert problem.path == "machine.topology"
    assert "workloads.decode has tp = 8" in problem.rule
    assert not backend.problems(backend.design({**tree(), "machine": {**tree()["machine"], "topology": "mesh"}}))


@pytest.mark.slow
def test_finer_models_of_sites_are_no_faster() -> None:
    speeds = []
    for sites in get_args(SiteModel):
        backend = CodesignBackend(sites)
        speeds.append(backend.judge_of(backend.design(tree())).at_base["prefill"])
    uncontended, fluid, _ = speeds
    assert uncontended >= fluid
    with pytest.raises(ConfigError, match=r"simulator\.sites = 'exact': is no model of sites"):
        CodesignBackend("exact")  # type: ignore[arg-type]


def test_a_workload_that_breaks_a_rule_is_told_with_its_name() -> None:
    entry = {**tree()["workloads"]["decode"], "parallel": {"tp": 7}}
    with pytest.raises(ConfigError, match=r"workloads\.decode\.parallel\.tp.*does not divide"):
        steps_of({"decode": entry}, tree()["system"])


# Budgets


@pytest.mark.nightly
def test_a_budget_that_no_machine_meets_says_what_binds_and_by_how_much() -> None:
    plan_request = request(["study=codesign"])
    refuse_unmet(plan_request, {"area_mm2": 900.0, "cost": 12_000.0})
    with pytest.raises(ConfigError, match=r"budget\.area_mm2 = 100.*the least is \d+, \d+ % more"):
        refuse_unmet(plan_request, {"area_mm2": 100.0})
    plan_request = request(["study=codesign", "space={machine: {num_cus: 'choice(140,150)', dies: 'choice(1,2)'}}"])
    prices = space_prices(plan_request)
    assert prices is not None
    assert prices["area_mm2"].argmin() != prices["cost"].argmin()  # two dies are larger, and cheaper
    least = {name: 1.0001 * float(prices[name].min()) for name in ("area_mm2", "cost")}
    with pytest.raises(ConfigError, match="is met by no machine within the other limits"):
        refuse_unmet(plan_request, least)


@pytest.mark.more
def test_the_command_refuses_words_and_unmet_budgets(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["codesign", "budget.power_w=much"]) == 2
    assert "budget.power_w" in capsys.readouterr().err
    for words in (["budget.cost=0"], ["budget.cost="], ['budget.cost="8']):
        assert main(["codesign", *words]) == 2
        assert "budget.cost" in capsys.readouterr().err
    assert main(["codesign", "budget.power_w=10"]) == 2
    assert "is met by no machine of the space" in capsys.readouterr().err


# Answers


def test_contributions_multiply_to_the_whole_and_dollars_add_up() -> None:
    other = machine(num_cus=100, links=2.0, hbm_stacks=8)
    shares = machine_worth.contributions(judge(), Machine(), other)
    assert set(shares) == {"num_cus", "links", "hbm_stacks"}
    before, after = metrics(), metrics(num_cus=100, links=2.0, hbm_stacks=8)
    assert math.prod(speed for speed, _ in shares.values()) == pytest.approx(after["throughput_x"], rel=1e-9)
    assert sum(usd for _, usd in shares.values()) == pytest.approx(after["cost_usd"] - before["cost_usd"], rel=1e-9)


@pytest.mark.slow
def test_contributions_of_many_knobs_are_of_drawn_orders_and_as_exact() -> None:
    changes: dict[str, Any] = {
        "num_cus": 100,
        "links": 2.0,
        "hbm_stacks": 8,
        "clock": 0.9,
        "matrix_rate": 2.0,
        "dies": 2,
    }
    changes |= {"copy_engines": 4, "in_switch": False}
    shares = machine_worth.contributions(judge(), Machine(), machine(**changes))
    assert set(shares) == set(changes)
    before, after = metrics(), metrics(**changes)
    assert math.prod(speed for speed, _ in shares.values()) == pytest.approx(after["throughput_x"], rel=1e-9)
    assert sum(usd for _, usd in shares.values()) == pytest.approx(after["cost_usd"] - before["cost_usd"], rel=1e-9)


def test_a_row_with_an_empty_cell_is_of_the_base_whatever_was_typed() -> None:
    config = {"machine": {**tree()["machine"], "scale_up": 16}}
    machines = Machines(config, pd.DataFrame())
    assert machines.machine({"machine.scale_up": None, "machine.num_cus": 100, "throughput_x": 1.0}).scale_up is None
    assert machines.machine({"machine.scale_up": float("nan")}).scale_up is None
    assert machines.machine({"machine.num_cus": 100}).scale_up == 16
    changed = {"clock": 0.8, "cap_w": 500.0, "links": 2.0}
    row = {f"machine.{name}": value for name, value in changed.items()} | metrics(**changed)
    assert machines.machine(row) == machine(scale_up=16, **changed)  # `clock` is a metric, too


@pytest.mark.more
@pytest.mark.slow
def test_a_feature_pays_where_it_raises_throughput_for_a_dollar() -> None:
    values = {worth.name: worth for worth in machine_worth.worths(judge(), Machine())}
    before, links = metrics(), metrics(links=1.1)
    more_links = values["10 % more links"]
    assert (more_links.usd < more_links.usd_worth) == (links["value_x"] > before["value_x"])
    assert more_links.pays == (more_links.usd < more_links.usd_worth and not more_links.beyond)
    assert values["10 % more links"].usd == pytest.approx(links["cost_usd"] - before["cost_usd"], rel=1e-6)
    assert 0 < values["sums in the switch"].usd < values["sums in the switch"].usd_worth
    assert values["NICs at the GPU"].usd < 0
    for worth in values.values():
        assert 0 <= worth.odds <= 1 and worth.low <= worth.gain <= worth.high
        shown = machine_worth.row_of(worth)
        assert shown["usd_worth_low"] <= shown["usd_worth"] <= shown["usd_worth_high"]
    # decode and prefill of one node never use NICs; all that is off on both machines cancels
    assert (values["NICs at the GPU"].low, values["NICs at the GPU"].high) == (1, 1)
    switch = values["sums in the switch"]
    assert switch.high > switch.low * 1.02  # another way of adding up, with an error of its own


@pytest.mark.slow
def test_drawn_steps_of_machines_are_those_that_are_judged() -> None:
    changed = machine_worth.with_numbers(judge(), machine(links=1.1))
    judged = judge().judge(changed, 1)
    spread = {}
    for name, times in judge().drawn(changed, judged, 64).items():
        nominal = float(judged.steps[name]["iteration_s"][0])
        assert np.quantile(times, 0.02) < nominal < np.quantile(times, 0.98)
        before = judge().drawn(Machine(), judge().judge(Machine(), 1), 64)[name]
        spread[name] = np.log(times).std(), np.log(times / before).std()
    assert all(ratio < 0.25 * alone for alone, ratio in spread.values())
    none = replace(judged, plans=[dict.fromkeys(judge().steps)])
    assert np.isnan(judge().drawn(changed, none, 8)["decode"]).all()


@pytest.mark.more
def test_nothing_beyond_the_budget_pays_and_slopes_agree_with_worths() -> None:
    start = machine_worth.with_numbers(judge(), machine(num_cus=120, clock=0.9, links=2.0))
    now = _metrics_of(start)
    free = {worth.name: worth for worth in machine_worth.worths(judge(), start)}
    limits = {name: {"high": now[name] * (1 + 1e-12)} for name in machine_slopes.PRICES}
    bound = {worth.name: worth for worth in machine_worth.worths(judge(), start, limits)}
    assert any(worth.pays for worth in free.values())
    for name, worth in bound.items():
        grows = worth.area_mm2 > 0.01 or worth.power_w > 0.01 or worth.usd > 0.01
        assert worth.beyond or not (grows and name.startswith("10 % more")), name
        assert not (worth.pays and worth.beyond)
        assert machine_worth.row_of(worth)["within_budget"] == (not worth.beyond)
    bound_slopes = {slope.number: slope for slope in machine_slopes.slopes(judge(), start, limits)}
    for number, slope in bound_slopes.items():
        if slope.pays == "more":
            assert all(slope.above[name] <= 1e-9 for name in machine_slopes.PRICES), number
    cus = {slope.number: slope for slope in machine_slopes.slopes(judge(), start)}["num_cus"]
    assert (cus.pays == "more") == free["10 % more CUs"].pays


@pytest.mark.more
def test_slopes_are_those_of_machines_beside_it_and_add_up() -> None:
    start = machine_worth.with_numbers(judge(), machine(num_cus=120, clock=0.9, links=2.0))
    by_number = {slope.number: slope for slope in machine_slopes.slopes(judge(), start)}
    assert "cap_w" not in by_number
    for name, slope in by_number.items():
        if name == "num_cus":
            continue
        value = float(np.squeeze(getattr(start, name)))
        low, high = (_metrics_of(start, **{name: value * factor}) for factor in (0.999, 1.001))
        for metric in machine_slopes.METRICS:
            expected = math.log(high[metric] / low[metric]) / math.log(1.001 / 0.999)
            assert slope.mean(metric) == pytest.approx(expected, abs=1e-3), (name, metric)
        for side in (slope.below, slope.above):
            assert side["throughput_x"] == pytest.approx((side["decode"] + side["prefill"]) / 2, abs=1e-9)
            assert side["value_x"] == pytest.approx(side["throughput_x"] - side["cost_usd"], abs=1e-9)
    fewer = _metrics_of(start, num_cus=108)
    expected = math.log(fewer["cost_usd"] / _metrics_of(start)["cost_usd"]) / math.log(108 / 120)
    assert by_number["num_cus"].below["cost_usd"] == pytest.approx(expected, rel=1e-9)
    assert by_number["nic_gbit_per_s"].pays == "less"  # no workload of these leaves a node
    for name in (name for name, slope in by_number.items() if slope.pays and name != "num_cus"):
        value = float(np.squeeze(getattr(start, name))) * (1.001 if by_number[name].pays == "more" else 0.999)
        assert _metrics_of(start, **{name: value})["value_x"] > _metrics_of(start)["value_x"], name


def _metrics_of(start: Machine, **changes: Any) -> dict[str, float]:
    return metrics(**{**dict(start), **changes})


@pytest.mark.slow
def test_a_cap_is_a_kink_where_it_begins_to_bind_and_a_die_may_be_too_large() -> None:
    capped = machine(cap_w=metrics()["power_w"])
    by_number = {slope.number: slope for slope in machine_slopes.slopes(judge(), capped)}
    assert by_number["cap_w"].above["throughput_x"] == pytest.approx(0, abs=1e-9)
    assert by_number["cap_w"].below["throughput_x"] > 0.1
    assert by_number["cap_w"].has_kink("throughput_x")
    assert by_number["clock"].above["power_w"] == pytest.approx(0, abs=1e-9)
    assert by_number["clock"].below["power_w"] > 0.9
    assert math.isnan(by_number["num_cus"].above["throughput_x"])  # the base has the largest die
    assert by_number["num_cus"].mean("throughput_x") == by_number["num_cus"].below["throughput_x"]


@pytest.mark.slow
@pytest.mark.parametrize("price", ["cost_usd", "power_w", "area_mm2"])
def test_a_trade_gains_speed_at_the_same_price(price: str) -> None:
    start = machine_worth.with_numbers(judge(), machine(num_cus=120, links=2.0))
    trade = machine_slopes.best_trade(machine_slopes.slopes(judge(), start), price)
    assert trade is not None
    assert max(trade.more, trade.less) == 1
    changes = {trade.raised: 1 + 1e-4 * trade.more, trade.lowered: 1 - 1e-4 * trade.less}
    if "num_cus" in changes:  # which are whole: no small change of them is a machine
        assert trade.gain > 0
        return
    before = _metrics_of(start)
    after = _metrics_of(start, **{name: float(getattr(start, name)) * factor for name, factor in changes.items()})
    assert after[price] == pytest.approx(before[price], rel=1e-6)
    assert 1e4 * math.log(after["throughput_x"] / before["throughput_x"]) == pytest.approx(trade.gain, rel=1e-2)


def test_odds_of_a_machine_that_is_worse_in_everything_are_none() -> None:
    machines = [Machine(), machine(num_cus=160), machine(links=2.0)]
    odds = machine_worth.front_odds(judge(), machines, [1.0, 1.2, 0.9])
    assert odds[2] == 0
    assert odds[0] == odds[1] == 1


@pytest.mark.nightly
def test_the_study_names_machines_for_each_workload_and_a_robust_one(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    space = "space={machine: {num_cus: 'choice(88,120)', links: 'choice(0.5,1,2)', hbm_stacks: 'choice(4,5,6)'}}"
    words = ["codesign", "budget.power_w=700", space, "~workloads.training", "budget.trials=40", *QUIET]
    assert main(words) == 0
    output = capsys.readouterr().out
    for part in (
        "fastest decode",
        "robust",
        "10 % more links",
        "Shapley",
        "1 % more, in %",
        "existing machine",
        "to buy for prefill",
    ):
        assert part in output
    folder = next((tmp_path / "outputs" / "codesign").glob("2*"))
    machines = Machines.of(FinishedRun(folder).config, pd.read_parquet(folder / "results.parquet"))
    assert (machines.regret >= 0).all()
    assert machines.regret[machines.chosen["robust"]] == machines.regret.min()
    assert {"worth.parquet", "slopes.parquet", "contributions.parquet", "existing_machines.parquet"} <= {
        path.name for path in folder.iterdir()
    }


def test_the_recorded_and_shown_paths_of_the_study_are_paths_of_its_designs() -> None:
    study = load_yaml(DATA.parent / "study" / "codesign.yaml")["study"]
    paths = {"system.name", *(path for path, _, _ in leaves(Machine(), "machine"))}
    assert {*study.get("recorded", ()), *study["baseline"]} <= paths
    assert {*study["summary"], *study["objectives"]} <= {*paths, *CodesignBackend.metrics}
