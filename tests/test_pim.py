"""Passes of processing in memory over weights: published figures, commands by format and direction, monotony."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from dse.space import set_path
from dse.values import put
from simulators.hardware.pim import Direction, Format, InstructionSet, Pim, commands_per_word
from simulators.hardware.schedule_system import ScheduleSystem
from tests.support import backend, design_tree, results, shipped

PARTS = {name: Pim.model_validate(tree["gpu"]["pim"]) for name, tree in shipped("pim").items() if "gpu" in tree}
SETS = {name: InstructionSet.model_validate(tree) for name, tree in shipped("instructions").items()}
FORMATS = {name: Format.model_validate(tree) for name, tree in shipped("format").items()}
BF16 = 2.0
LAYER = 12 * 12288**2 / 8  # parameters of a transformer layer of H = 12288 on one of 8 GPUs
parts, formats, sets = (st.sampled_from(sorted(options)) for options in (PARTS, FORMATS, SETS))


def commands(
    instructions: str, format: str = "mx9", direction: Direction = "lanes", part: str = "hbm3_strawman"
) -> float:
    return float(commands_per_word(SETS[instructions], PARTS[part], FORMATS[format], direction, BF16))


@pytest.mark.parametrize("instructions", SETS.values(), ids=lambda instructions: instructions.name)
def test_every_constant_has_a_source_and_every_source_a_constant(instructions: InstructionSet) -> None:
    facts = [path.partition(".")[2] for path, *_ in instructions.facts_below(instructions.name)]
    assert all(any(fact == path or fact.startswith(f"{path}.") for fact in facts) for path in instructions.sources)


@pytest.mark.parametrize("name", PARTS)
def test_a_memory_that_computes_may_be_that_of_any_system_and_says_where_its_numbers_are_from(name: str) -> None:
    part, system = shipped("pim")[name], shipped("system")["mi300x_8"]
    merged = {**system, **{key: {**system[key], **part[key]} for key in ("gpu", "sources")}}
    facts = {path: source for path, _, _, source in ScheduleSystem.model_validate(merged).facts() if ".pim." in path}
    assert {f"system.{path}" for path in part["sources"]} == set(facts)
    assert len(facts) == len(part["gpu"]["pim"])


# Published figures


def streamed(part: Pim, amount: float, count: float) -> float:
    return float(part.stream_s(part.per_unit(amount), count))


def copied(part: Pim, parameters: Any, count: Any) -> Any:
    return part.copy_s(part.per_unit(np.asarray(parameters) * BF16), count, written=0.0)


def test_rows_stream_as_in_the_published_example() -> None:
    """6144 x 2048 INT8 on 128 banks: 48 rows of 64 words, 14.98 us of 19.04 us."""
    part = PARTS["lpddr5x"]
    assert part.units == 128
    seconds = streamed(part, 6144 * 2048, 1.0)
    assert seconds == pytest.approx(48 * (64 * 4.266667e-9 + 39e-9), rel=1e-9)
    assert 1e6 * seconds == pytest.approx(14.98, abs=0.005)


def test_a_layer_takes_about_what_a_prototype_found() -> None:
    """0.30 ms beside 5.1 ms of the forward GEMMs; serialised, a loss of 1.8, 3.9 and 8.6 % (48 ns a row there)."""
    turned = {"read_to_write_s": 0.0, "write_to_read_s": 0.0}  # which it leaves out
    part = PARTS["hbm3_strawman"].model_copy(update=turned)
    gemm_s = 2 * 2048 * LAYER / (0.5 * 362e12)
    assert gemm_s == pytest.approx(5.1e-3, rel=0.01)
    assert copied(part, LAYER, 6) == pytest.approx(0.30e-3, rel=0.05)
    passes = copied(put(part, "trcd_s", 33e-9), LAYER, np.array([2.6, 6, 14]))
    assert 100 * 2 * passes / (3 * gemm_s) == pytest.approx([1.8, 3.9, 8.6], abs=0.06)
    assert 100 * copied(part, LAYER, 2.6) * 2 / (3 * gemm_s) <= 1.8


# What must hold


@given(parts, st.floats(1, 1e9), st.floats(1, 100), st.sampled_from(["stacks", "command_rate", "registers_per_unit"]))
def test_more_hardware_is_never_slower_and_more_work_never_faster(
    name: str, parameters: float, count: float, knob: str
) -> None:
    part = PARTS[name]
    plain = copied(part, parameters, count) * (1 + 1e-12)
    assert copied(put(part, knob, 2 * getattr(part, knob)), parameters, count) <= plain
    assert copied(put(part, "units_per_bank", part.units_per_bank / 4), parameters, count) >= plain / 4
    assert copied(part, 2 * parameters, count) >= plain / (1 + 1e-12)
    assert copied(part, parameters, 2 * count) * (1 + 1e-12) >= plain
    assert plain >= parameters * BF16 / part.word_bytes / part.units * count * part.command_s
    words = part.per_unit(parameters * BF16)
    assert part.stream_s(words, count) <= plain


# What is refused


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"units_per_bank": 1 / 3}, "leaves units of unlike banks"),
        ({"units_per_bank": 0.4}, "leaves units of unlike banks"),
        ({"tccdl_s": 4}, "less than or equal"),
        ({"banks": 4}, "banks"),
    ],
)
def test_a_part_that_cannot_be_is_refused(change: dict[str, Any], part: str) -> None:
    with pytest.raises(ValidationError, match=part):
        Pim.model_validate({**shipped("pim")["hbm2_pim"]["gpu"]["pim"], **change})


# Schedules that have some use for it


def memory(tree: dict[str, Any], name: str = "hbm3_strawman") -> dict[str, Any]:
    """The tree of a design on a system whose memory computes."""
    part = shipped("pim")[name]
    return {**tree, "system": {**tree["system"], **{key: {**tree["system"][key], **part[key]} for key in part}}}


def ran(tree: dict[str, Any]) -> dict[str, float]:
    simulator = backend("fluid")
    design = simulator.design(tree)
    assert simulator.problems(design) == []
    (result,) = results(simulator, [design])
    assert result.status == "ok", result.reason
    return dict(result.metrics)


REDUCED: dict[str, Any] = {"pattern": "reduce_scatter", "shape": (8192, 8192, 4096)}


@pytest.mark.parametrize("schedule", ["serial", "uniform_fused_1d", "hetero_unfused_1d", "shard_p2p"])
def test_dma_engines_reduce_without_a_kernel_where_memory_adds(schedule: str) -> None:
    """No kernel reads what they brought and what is there, nothing is staged, and no less is moved."""
    plain = memory(design_tree(schedule, {"schedule.comm_engine": "dma"}, **REDUCED))
    near = {**plain, "schedule": {**plain["schedule"], "near_memory": True}}
    before, after = ran(plain), ran(near)
    assert after["makespan_s"] < before["makespan_s"]
    assert after["peak_staging_bytes"] == 0 < before["peak_staging_bytes"]
    assert after["moved_bytes"] == before["moved_bytes"]
    saved = 3 - (PARTS["hbm3_strawman"].update(1.0) - 1)  # a kernel reads two and writes one
    assert before["hbm_bytes"] - after["hbm_bytes"] == pytest.approx(saved * after["moved_bytes"], rel=1e-9)


def test_a_reduction_beside_a_gemm_may_be_by_dma_engines_only_where_memory_adds() -> None:
    tree = memory(design_tree("conccl", pattern="all_reduce"))
    simulator = backend("fluid")
    (problem,) = simulator.problems(simulator.design(tree))
    assert "cannot add, as all_reduce must" in str(problem)
    assert "schedule.near_memory=true" in str(problem)
    near = {**tree, "schedule": {**tree["schedule"], "near_memory": True}}
    by_kernel = ran(memory(design_tree("c3_sp", pattern="all_reduce")))
    assert ran(near)["comm_cu_s"] == 0 < by_kernel["comm_cu_s"]


@pytest.mark.parametrize("schedule", ["serial", "uniform_fused_1d", "bulk_sync"])
def test_adding_near_memory_means_nothing_where_nothing_is_added(schedule: str) -> None:
    tree = memory(design_tree(schedule))
    near = {**tree, "schedule": {**tree["schedule"], "near_memory": True}}
    assert ran(near) == ran(tree)


def test_units_in_memory_that_are_not_there_are_asked_for() -> None:
    simulator = backend("fluid")
    for schedule, changes in (("serial", {"near_memory": True}), ("bulk_sync", {"elementwise": "pim"})):
        tree = design_tree(schedule, pattern="reduce_scatter")
        if schedule == "bulk_sync":
            tree["workload"] = {"name": "x", "operators": {"op": {"kind": "elementwise", "rows": 8192, "cols": 8192}}}
        problems = simulator.problems(simulator.design({**tree, "schedule": {**tree["schedule"], **changes}}))
        assert [problem.path for problem in problems] == ["system.gpu.pim"]
        assert "pim=hbm3_strawman" in problems[0].way_out


SIZES = {"rows": 8192, "cols": 8192, "precision": "fp16"}


def elementwise(where: str, *, beside: bool = False, **system: Any) -> dict[str, float]:
    """An update of a tensor of 128 MiB by one other, alone or beside a GEMM."""
    tree = memory(design_tree("bulk_sync"), "hbm2_pim")
    operators: dict[str, Any] = {"update": {"kind": "elementwise", **SIZES}}
    if beside:
        operators["gemm"] = {"kind": "gemm", "m": 8192, "n": 8192, "k": 8192, "precision": "fp16"}
    tree["workload"] = {"name": "x", "operators": operators}
    tree["schedule"]["elementwise"] = where
    for path, value in system.items():
        set_path(tree, f"system.gpu.pim.{path}", value)
    return ran(tree)


def test_an_elementwise_operator_reads_and_writes_every_tensor_once_or_takes_what_units_in_memory_do() -> None:
    amount, gpu = 2 * 8192 * 8192, shipped("system")["mi210_4"]
    on_gpu, near = elementwise("gpu"), elementwise("pim")
    assert on_gpu["hbm_bytes"] == 3 * amount
    assert on_gpu["flop"] == near["flop"] == 8192 * 8192
    part = PARTS["hbm2_pim"]
    seconds = part.map_s(part.per_unit(amount), reads=2, writes=1, operations=1)
    launch = ScheduleSystem.model_validate(gpu).gpu.kernel_launch_s
    assert near["makespan_s"] == pytest.approx(launch + seconds, rel=1e-9)
    assert near["comm_cu_s"] == near["exposed_comm_s"] == 0  # as of any operator
    assert elementwise("pim", units_per_bank=0.25)["makespan_s"] > near["makespan_s"]


def test_units_in_memory_work_beside_a_gemm_and_take_turns_with_it() -> None:
    alone, near = elementwise("gpu", beside=True), elementwise("pim", beside=True)
    longest = max(elementwise("pim")["makespan_s"], near["gemm_s"])
    assert near["makespan_s"] < alone["makespan_s"]
    assert near["makespan_s"] >= longest * (1 - 1e-9)
