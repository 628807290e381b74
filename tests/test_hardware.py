"""Machines: parts and their composition, views of backends, what is refused, and every machine under every study."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from dse.cli import main
from dse.config.compose import request
from dse.config.options import list_options
from dse.errors import ConfigError, Problems
from dse.space.blocks import problems
from dse.study.plan import plan
from simulators.hardware import machine
from simulators.hardware.device import Device
from simulators.hardware.machine import CostModels, Gpu, System, View, reads, tree_of
from simulators.hardware.machine_commands import VIEWS, served_by
from simulators.hardware.memory_system import MemorySystem
from simulators.hardware.network import Node, link_rules
from simulators.hardware.schedule_system import ScheduleSystem
from simulators.steps.operators.work import Exchange, collective
from simulators.steps.spread.groups import groups
from simulators.workloads.model import Parallel
from tests.support import merged, shipped

TODAY = (
    "mi300x_8", "mi308x_8", "mi355x_8", "mi210_4", "a100_8", "h100_8", "h800_8",
    "h20_8", "h200_8", "b200_8", "b300_8", "l20_8", "v100_8", "h100_pcie_8", "a800_8", "rtx_4090_8",
)  # fmt: skip
NAMES = tuple(list_options("system"))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_machine_is_one_description_that_serves_some_backend(name: str) -> None:
    System.model_validate(tree_of(name))
    served = served_by(name)
    assert any(not missing for missing in served.missing.values())
    assert sum(served.provenance.values()) == len(served.constants) > 10


@pytest.mark.parametrize("name", TODAY)
def test_machines_of_today_serve_schedules_and_iterations(name: str) -> None:
    served = served_by(name)
    assert served.missing["schedules"] == served.missing["iterations"] == ()
    assert served.precisions
    assert served.constants["node.num_gpus"][0] == int(name.rpartition("_")[2])


@pytest.mark.parametrize(
    ("base", "fabric", "name"),
    [("h100_8", "ndr400", "h100_8_ndr"), ("mi355x_8", "roce400", "mi355x_8_roce"), ("h100_8_ndr", "none", "h100_8")],
)
def test_a_machine_has_its_network_by_one_word(base: str, fabric: str, name: str) -> None:
    trees = (request([f"system={base}", f"fabric={fabric}"]).tree["system"], tree_of(name))
    typed, named = ({key: of for key, of in tree.items() if key not in ("name", "description")} for tree in trees)
    assert typed == named
    assert served_by(name).missing["schedules"] == ()


def test_a_pair_is_joined_by_its_bridge_and_reaches_other_pairs_across_pcie_alone() -> None:
    device = Device.of(tree_of("h100_nvl_8"))
    payload, rates = 2.0**28, dict[int, float]()
    for tp in (2, 4):
        moved = collective(Exchange("all_reduce", payload), groups(device, Parallel(tp=tp))["tp"])
        rates[tp] = float(2 * (tp - 1) / tp * payload / moved.seconds)
    assert device.node is not None
    assert device.node.library is not None
    bridge, network = device.node.library.bytes_per_s, device.node.library.network_bytes_per_s
    assert network is not None
    assert 2.5 * network * 2 < rates[2] < bridge  # SMs that copy do not fill all of it
    assert 1.9 * network < rates[4] <= 2 * network  # two ports of a pair


def test_a_gpu_of_fewer_units_multiplies_less_and_reads_as_fast() -> None:
    mi300x, mi308x = (System.model_validate(tree_of(f"{name}_8")).gpu for name in ("mi300x", "mi308x"))
    small, large = mi308x.peak("bf16"), mi300x.peak("bf16")
    assert small is not None
    assert large is not None
    assert mi308x.num_cus / mi300x.num_cus > small / large  # and at a lower clock
    assert (mi308x.hbm_bytes, mi308x.hbm_bytes_per_s) == (mi300x.hbm_bytes, mi300x.hbm_bytes_per_s)
    source = mi308x.source("peak_flop_per_s.bf16")
    assert source is not None
    assert source.provenance == "secondary"


def test_what_is_measured_of_another_gpu_is_called_assumed() -> None:
    mi300x, h200 = (served_by(name).constants for name in ("mi300x_8", "h200_8"))
    assert mi300x["gpu.contention.gemm_beside_cus"][1] == "calibrated"
    assert h200["gpu.contention.gemm_beside_cus"][1] == "assumed"
    assert h200["gpu.contention.late_start"][1] == "calibrated"  # on its own tables
    assert h200["gpu.efficiency.bf16.compute"][1] == "assumed"
    assert served_by("h100_8").constants["gpu.efficiency.bf16.compute"][1] == "calibrated"


def test_a_format_that_nobody_measured_has_the_constants_of_the_nearest_one_at_its_own_peak() -> None:
    b200, h100, a100, h800 = (
        System.model_validate(tree_of(f"{name}_8")).gpu for name in ("b200", "h100", "a100", "h800")
    )
    assert [b200.stands_for(name) for name in ("fp8", "mxfp8", "nvfp4", "mxfp4")] == ["bf16"] * 4
    assert [gpu.stands_for("mxfp8") for gpu in (h100, a100)] == [None, None]  # no units that scale blocks
    assert (h800.stands_for("fp8"), a100.stands_for("fp8")) == ("fp8", None)
    assert (b200.peak("nvfp4"), b200.peak("mxfp8")) == (b200.peak("fp4"), b200.peak("fp8"))


@pytest.mark.parametrize("view", VIEWS.values())
def test_a_view_reads_values_of_the_one_schema_and_needs_some_of_them(view: type[View]) -> None:
    kinds: dict[str, type[BaseModel]] = {"": System, "gpu": Gpu, "node": Node, "costs": CostModels}
    paths = {*view.needs, *view.presumes, *view.reads}
    for path in paths:
        above, _, name = path.rpartition(".")
        assert name in kinds[above].model_fields
    assert set(view.most) <= paths


@pytest.mark.parametrize("view", VIEWS.values())
def test_everything_that_a_machine_lacks_is_told_at_once_by_its_path(view: type[View]) -> None:
    tree = {"name": "bare", "gpu": {"num_cus": 8}, "node": {"num_gpus": 2}}
    check = Problems()
    assert check.model(view, tree, path="system") is None
    by_path = {problem.path.removeprefix("system."): problem for problem in check.found}
    needs = set(view.needs) - set(tree)
    assert needs <= set(by_path)
    assert all(by_path[path].rule == "is missing" and "dse machine list" in by_path[path].way_out for path in needs)


def test_a_number_that_a_backend_takes_no_larger_is_refused_by_its_path() -> None:
    tree = machine.merged(shipped("system")["mi300x_8"], {"node": {"num_gpus": 145}})
    with pytest.raises(ConfigError, match=r"system\.node\.num_gpus = 145: must be less than or equal to 144"):
        ScheduleSystem.of(tree)


def test_what_a_backend_does_not_read_is_no_part_of_its_designs() -> None:
    tree = shipped("system")["mi300x_8"]
    other = merged(shipped("system")["mi300x_8"], {"gpu": {"peak_hbm_bytes_per_s": "9 TB/s"}})
    assert ScheduleSystem.of(tree) == ScheduleSystem.of(other)
    assert Device.of(tree) != Device.of(other)
    assert reads(ScheduleSystem, "gpu.hbm_bytes_per_s")
    assert not reads(ScheduleSystem, "gpu.peak_hbm_bytes_per_s", tree)
    assert reads(Device, "gpu.peak_hbm_bytes_per_s", tree)
    assert not reads(Device, "gpu.dma.num_engines", shipped("system")["h100_8"])
    assert reads(MemorySystem, "gpu.l2.bytes")
    assert not reads(MemorySystem, "node.num_gpus")
    assert reads(ScheduleSystem, "node.num_gpus")
    assert not reads(ScheduleSystem, "node.experts")  # though it needs a node
    assert not reads(ScheduleSystem, "costs.sites")


def test_a_view_reads_what_the_chosen_cost_models_need_and_no_more() -> None:
    tree = shipped("system")["h100_8"]
    change = {"gpu": {"efficiency": {"bf16": {"compute": 0.5}}, "gemm": {"prologue_s": "1 us"}}}
    waves, fitted = (machine.merged(tree, {"costs": {"gemm": model}}) for model in ("waves", "fitted"))
    assert ScheduleSystem.of(waves).gpu.efficiency is None
    assert ScheduleSystem.of(fitted) != ScheduleSystem.of(machine.merged(fitted, change))
    assert Device.of(fitted).gpu.gemm is None
    assert Device.of(waves) != Device.of(machine.merged(waves, change))
    assert reads(ScheduleSystem, "gpu.efficiency.bf16.compute", fitted)
    assert reads(Device, "gpu.dma.num_engines", machine.merged(tree, {"costs": {"collective": "links"}}))


@pytest.mark.slow
def test_parts_are_chosen_apart_and_the_name_says_so() -> None:
    words = ["study=ficco_sweep", "gpu=mi210", "node=mi210_mesh_4", "system.costs.collective=links"]
    tree = request(words).tree["system"]
    assert tree["name"] == "mi300x_8 gpu=mi210 node=mi210_mesh_4"
    assert ScheduleSystem.of({**tree, "fabric": {}}).gpu == ScheduleSystem.of(tree_of("mi210_4")).gpu
    assert ScheduleSystem.of(tree).node == ScheduleSystem.of(tree_of("mi210_4")).node


def test_an_own_file_may_be_composed_of_shipped_parts(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    source = {"provenance": "derived", "source": "made up for a test"}
    fields = {"name": "mine", "node": {"link_bytes_per_s": "90 GB/s"}, "sources": {"node.link_bytes_per_s": source}}
    path.write_text(yaml.safe_dump({"defaults": [{"/gpu": "h100"}, {"/node": "h100_switch_8"}, "_self_"], **fields}))
    machine = System.model_validate(tree_of(str(path)))
    assert machine.node is not None
    assert machine.node.link_bytes_per_s == 90e9
    assert machine.gpu == System.model_validate(tree_of("h100_8")).gpu
    path.write_text(yaml.safe_dump({"defaults": [{"/gpu": "h1000"}], **fields}))
    with pytest.raises(ConfigError, match=r"names no option of gpu.*did you mean `h100`"):
        tree_of(str(path))


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"gpu": {"num_cuz": 3}}, "system.gpu.num_cuz: is not a known key"),
    ({"gpu": {"peak_flop_per_s": {"fp12": 1e12}}}, "system.gpu.peak_flop_per_s.fp12"),
    ({"gpu": {"efficiency": {"fp8": {}}}}, "system.gpu.efficiency.fp8"),
    ({"node": {"num_gpus": 0}}, "system.node.num_gpus = 0"),
    ({"name": "../mine"}, "system.name"),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_a_machine_that_cannot_be_is_told_by_path(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Device.of(merged(shipped("system")["mi250"], {"node": {"num_gpus": 8}, **change}))
    assert message in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["study=ficco_sweep", "system=p100"], "system.gpu.gemm: is missing (`python -m dse machine list`"),
        (["study=comp_vs_comm", "system=t3_ring"], "system.gpu.peak_flop_per_s: is missing"),
        (["study=ficco_sweep", "system.gpu.peak_hbm_bytes_per_s=1e12"], "is not read by simulator=analytic"),
        (["study=comp_vs_comm", "system.gpu.dma.num_engines=3"], "is not read by simulator=step"),
        (
            ["study=ficco_sweep", "+space.system.gpu.peak_hbm_bytes_per_s=choice(1e12,2e12)"],
            "did you mean `space.system.gpu.hbm_bytes",
        ),
    ],
)
def test_a_part_that_is_missing_or_not_read_is_named(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(request(words))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("system", "change", "message"),
    [
        ("mi300x_8", {"num_gpus": 9}, "system.node.num_gpus = 9: takes 8 links of a GPU, which has 7"),
        ("mi210_4", {"num_gpus": 5}, "system.node.num_gpus = 5: takes 4 links of a GPU, which has 3"),
        ("h100_nvl_8", {"num_gpus": 8}, "system.node.num_gpus = 8: takes 7 links of a GPU, which has 1"),
        ("l20_8", {"topology": "ring"}, "system.node.topology = 'ring': takes 2 links of a GPU, which has 0"),
    ],
)
def test_a_node_takes_no_more_links_than_a_gpu_has(system: str, change: dict[str, Any], message: str) -> None:
    machine = ScheduleSystem.of(tree_of(system))
    assert machine.gpu.num_links is not None
    assert not list(link_rules(machine.node, machine.gpu.num_links))
    node = machine.node.model_copy(update=change)
    (problem,) = problems(list(link_rules(node, machine.gpu.num_links)))
    assert message in str(problem)
    assert problem.way_out
    assert not list(link_rules(node, None))
    assert not list(link_rules(node.model_copy(update={"topology": "pcie"}), machine.gpu.num_links))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["study=ficco_sweep", "system.node.num_gpus=9"], "(use at most 8, or system.node.topology=switch)"),
        (
            ["study=conccl", "schedule=c3_rp", "schedule.comm_cus=57"],
            "schedule.comm_cus = 57: is more than the workgroups of the collective's kernel (56, by "
            "system.gpu.cu_copy.num_cus): some would idle (use at most 56)",
        ),
        (
            ["study=comp_vs_comm", "system=a100_8", "run.precision=fp8"],
            "system.gpu.efficiency: has no constants for fp8 (run.",
        ),
        (["study=ficco_sweep", "system=v100_8"], "system.gpu.peak_flop_per_s.bf16: is missing: a GEMM of the workload"),
        (
            ["study=comp_vs_comm", "system=a100_8", "system.gpu.active_cus=109"],
            "system.gpu.active_cus = 109: is more than the GPU has (system.gpu.num_cus = 108) (use fewer)",
        ),
        (
            ["study=comp_vs_comm", "system=a100_8", "system.gpu.disabled_cache=l2"],
            "system.gpu.disabled_cache = 'l2': is not described: system.gpu.without_cache.l2 is missing",
        ),
        (
            ["study=comp_vs_comm", "system=a100_8", "parallel.tp=8", "parallel.collectives=in_switch"],
            "parallel.collectives = 'in_switch': needs a switch that adds (system.node.in_switch)",
        ),
    ],
)
def test_what_a_machine_cannot_do_is_refused_with_path_rule_and_way_out(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(request([*words, "tracking=none", "store=none"]))
    assert message in str(caught.value)


@pytest.mark.slow
@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", NAMES)
def test_the_page_of_every_machine_can_be_printed(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["machine", "show", name]) == 0
    assert "gpu.num_cus" in capsys.readouterr().out


@pytest.mark.slow
def test_the_command_lists_machines_and_the_constants_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["machine", "list"]) == 0
    listed = capsys.readouterr().out
    assert [name for name in NAMES if name not in listed] == []
    assert main(["machine", "show", "p100"]) == 0
    shown = capsys.readouterr().out
    assert "gpu.efficiency.fp32.compute" in shown
    assert "schedules: no (missing: gpu.matrix_flop_per_s_per_cu" in " ".join(shown.split())
    assert "iterations: fp32 fp16_storage" in shown
    assert "10.6 TFLOP/s" in shown
    assert main(["machine", "show", "p1000"]) == 2
    assert "did you mean `p100`" in capsys.readouterr().err


MATRIX = list(itertools.product(list_options("study"), NAMES))


@pytest.mark.slow
@pytest.mark.one_in(131)
@pytest.mark.parametrize(("study", "system"), MATRIX)
def test_every_machine_under_every_study_is_planned_or_refused_by_its_parts(study: str, system: str) -> None:
    try:
        planned = plan(request([f"study={study}", f"system={system}", "tracking=none", "store=none"]))
    except ConfigError as error:
        assert all(problem.path and problem.rule for problem in error.problems)
        parts = ("system", "workload", "schedule", "study", "run", "parallel", "applications", "engines")
        assert any(problem.path.startswith(parts) for problem in error.problems)
    else:
        assert planned.spaces


@pytest.mark.parametrize("defaults", ["null", "5", "[5]", "[null]", "[[a]]", "{a: b}"])
def test_defaults_that_are_no_list_of_names_are_refused(defaults: str, tmp_path: Path) -> None:
    file = tmp_path / "machine.yaml"
    file.write_text(f"name: mine\ndefaults: {defaults}\ngpu: {{num_cus: 4}}\n")
    with pytest.raises(ConfigError, match="defaults"):
        tree_of(str(file))


@pytest.mark.parametrize("defaults", ["null", "5", "{a: b}", "[5]", "[[a]]"])
def test_hydras_door_refuses_them_as_well(defaults: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "system").mkdir()
    text = f"# @package system\nname: mine\ndescription: mine\ndefaults: {defaults}\n"
    (tmp_path / "system" / "mine.yaml").write_text(text)
    assert main(["run", "ficco_sweep", "system=mine", "--config-dir", str(tmp_path), "--dry-run"]) == 2
    assert "mine.yaml: defaults" in capsys.readouterr().err
