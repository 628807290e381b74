"""Software of collectives: one cost by every door, times that never fall, and refusals that name what exists."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.libraries import doors, monotone_checks, questions
from dse.cli import main
from dse.config.options import list_options
from dse.errors import ConfigError
from dse.values import put
from simulators.costs.algorithms import Pattern
from simulators.costs.collective import collective_cost, collective_seconds, machine_ring
from simulators.costs.collective_paths import PATHS, describe_held
from simulators.costs.collective_software import (
    Call,
    CollectiveSoftware,
    Question,
    all_software,
    existing_software,
    refusal,
    software_of,
)
from simulators.costs.collective_table import compare_software
from simulators.costs.transfer import TransferMode, alone, library_cus
from simulators.hardware.machine import System, tree_of
from simulators.hardware.network import links
from simulators.steps.operators.work import Exchange, collective

LIBRARIES = ("nccl", "rccl")  # measured laws
SIZES = 2.0 ** np.arange(8, 32)
GPUS = list_options("gpu")


@functools.cache
def named(name: str) -> System:
    return System.model_validate(tree_of(name))


@functools.cache
def all_questions() -> list[tuple[System, Pattern, str]]:
    """Machines, patterns and names of software that runs there."""
    return list(questions())


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_a_collective_costs_the_same_by_every_door(data: st.DataObject) -> None:
    system, pattern, name = data.draw(st.sampled_from(all_questions()))
    answers = doors(system, pattern, name)
    for door, seconds in answers.items():
        np.testing.assert_allclose(
            seconds, answers["costs"], rtol=1e-12, err_msg=f"{system.name} {pattern} {name}: {door}"
        )


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_more_bytes_more_gpus_and_slower_links_never_take_less_time(data: st.DataObject) -> None:
    models = [question for question in all_questions() if question[2] not in LIBRARIES]
    system, pattern, name = data.draw(st.sampled_from(models))
    checks = monotone_checks(system, pattern, name)
    assert all(checks.values()), (system.name, pattern, name, checks)


@pytest.mark.parametrize("name", list_options("collective"))
def test_software_names_gpus_sources_and_paths_that_there_are(name: str) -> None:
    software = software_of(name)
    assert software is not None and software.name == name
    assert set(software.gpus) <= set(GPUS)
    assert set(software.paths) <= set(PATHS)
    assert all(key in {*software.gpus, "any"} for key in software.latency_s or {})
    assert all(software_of(alias.partition(":")[0]) is software for alias in software.names)


def test_every_machine_of_several_gpus_at_known_links_has_a_library() -> None:
    for name in ("h100_8", "b200_8", "a100_8", "mi300x_8", "mi355x_8", "l40s_8", "v100_8", "m40", "p100"):
        there = existing_software(named(name), Question.of("all_reduce", 2.0**20, named(name).node.num_gpus))
        assert {"nccl", "rccl"} & set(there), name


def test_the_library_is_the_law_of_steps_and_schedules() -> None:
    for name, library in (("h100_8", "nccl"), ("mi300x_8", "rccl"), ("l40s_8", "nccl")):
        machine = named(name)
        software = software_of(library)
        assert software is not None
        for pattern in software.patterns:
            seconds = collective_seconds(machine, pattern, SIZES, 8, library)
            step = collective(Exchange(pattern, SIZES, "tp"), machine_ring(machine, 8))
            np.testing.assert_allclose(seconds, step.seconds, rtol=1e-12, err_msg=f"{name} {pattern}")
    for name, library in (("h100_8", "nccl"), ("mi300x_8", "rccl")):
        machine = named(name)
        by = TransferMode("cu", library_cus(machine, "all_gather"), "all_gather")
        seconds = collective_seconds(machine, "all_gather", SIZES, 8, library)
        np.testing.assert_allclose(seconds, alone(machine, SIZES, by=by), rtol=1e-12, err_msg=name)


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_arrays_cost_what_their_elements_do(data: st.DataObject) -> None:
    system, pattern, name = data.draw(st.sampled_from(all_questions()))
    call, gpus = Call(name, within_sizes=False), system.node.num_gpus
    every = collective_seconds(system, pattern, SIZES, gpus, call)
    for size, seconds in zip(SIZES[::6], every[::6], strict=True):
        assert collective_seconds(system, pattern, size, gpus, call) == pytest.approx(seconds, rel=1e-12)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_software_sends_faster_than_its_links(data: st.DataObject) -> None:
    kernels = [question for question in all_questions() if question[2] not in LIBRARIES]
    system, pattern, name = data.draw(st.sampled_from(kernels))
    for factor in (1.0, 0.25):
        machine = put(system, "node.link_bytes_per_s", factor * system.node.link_bytes_per_s)
        ring = machine_ring(machine, system.node.num_gpus)
        cost = collective_cost(pattern, Call(name, within_sizes=False), SIZES, ring)
        every = sum(float(np.asarray(rate)) for rate in links(machine.node).values())
        assert np.all(cost.wire_bytes <= every * cost.seconds * (1 + 1e-9)), (system.name, pattern, name, factor)


def test_calls_of_another_runtime_follow_the_links_and_the_clock() -> None:
    machine = named("h100_8")
    slower = put(machine, "node.link_bytes_per_s", machine.node.link_bytes_per_s / 4)
    for pattern in ("all_reduce", "all_gather", "all_to_all", "send_recv"):
        gpus, size = (2, 2.0**26) if pattern == "send_recv" else (8, 2.0**30)
        usual, few_links, low_clock = (
            float(collective_seconds(of, pattern, size, gpus, "xla_nccl"))
            for of in (machine, slower, put(machine, "gpu.clock", 0.5))
        )
        assert few_links > 1.2 * usual and usual < low_clock < 2.1 * usual, pattern
    assert float(collective_seconds(slower, "all_reduce", 2.0**30, 8, "xla_nccl")) > 16.7e-3  # what the links need


def test_ctas_bound_the_protocol_for_short_messages_too() -> None:
    software, machine = software_of("nccl_symmetric"), named("b200_8")
    assert software is not None
    rate = software.paths["peers"].bytes_per_s_per_cta
    assert rate is not None
    sent_by: dict[Pattern, float] = {"reduce_scatter": 0.5, "all_reduce": 1.0}
    for pattern, sent in sent_by.items():
        seconds = collective_seconds(machine, pattern, SIZES, 2, Call("nccl_symmetric", num_ctas=1))
        assert np.all(seconds >= sent * SIZES / rate), pattern


@pytest.mark.parametrize("name", ["nccl_symmetric", "symm_mem_two_shot", "custom_two_shot", "xla_nccl", "nccl"])
def test_ctas_move_less_at_a_lower_clock(name: str) -> None:
    gpus = 2 if name == "nccl_symmetric" else 8
    call = Call(name, num_ctas=16 if name == "nccl_symmetric" else None, within_sizes=False)
    usual, low = (
        float(collective_seconds(of, "all_reduce", 2.0**26, gpus, call))
        for of in (named("b200_8"), put(named("b200_8"), "gpu.clock", 0.5))
    )
    assert low > 1.05 * usual


def test_copy_engines_serve_a_link_each_on_a_mesh_and_all_share_a_switch() -> None:
    switch, mesh = named("h100_8"), put(named("h100_8"), "node.topology", "mesh")
    call, payload = Call("nccl_copy_engine"), 2.0**30
    assert describe_held(call, switch, 2, "all_gather").startswith("no CTA, 7 copy engines; ")
    assert describe_held(call, mesh, 2, "all_gather").startswith("no CTA, 1 copy engine; ")
    for machine, engines in ((switch, 7), (mesh, 1)):
        seconds = float(collective_seconds(machine, "all_gather", payload, 2, call))
        assert payload / 2 / (engines * 53.8e9) < seconds < 1.05 * payload / 2 / (engines * 53.8e9)


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_a_gpu_adds_all_that_it_reads_in_one_stage(gpus: int) -> None:
    ring, payload = machine_ring(named("h100_8"), gpus), 2.0**16
    staged, direct = (
        collective_cost("all_reduce", by, payload, ring, element_bytes=2) for by in ("custom_one_shot", "direct")
    )
    assert float(staged.flop) == (gpus - 1) * payload / 2 == gpus * float(direct.flop)
    plain = collective_cost("all_reduce", "one_shot", payload, ring, element_bytes=2)
    assert plain.flop == staged.flop and plain.hbm_bytes == staged.hbm_bytes == (2 * gpus - 1) * payload


def test_each_number_of_gpus_takes_its_own_path() -> None:
    machine, counts = named("b200_8"), np.array([1, 2, 8])
    together = collective_cost("all_reduce", "nccl_symmetric", 2.0**26, machine_ring(machine, counts))
    for place, count in enumerate(counts):
        single = collective_cost("all_reduce", "nccl_symmetric", 2.0**26, machine_ring(machine, int(count)))
        for column in ("steps", "wire_bytes", "flop", "hbm_bytes", "seconds"):
            assert getattr(together, column)[place] == getattr(single, column), (count, column)


def test_one_gpu_has_no_collective() -> None:
    assert float(collective_seconds(named("h100_8"), "all_reduce", 2.0**20, 1, "multimem")) == 0
    assert float(collective_seconds(named("h100_8"), "all_gather", 2.0**20, 1, "nccl_copy_engine")) == 0


@pytest.mark.parametrize(
    "system, pattern, gpus, size, name, text",
    [
        ("h100_8", "all_reduce", 8, 2.0**20, "nccl_copy_engine", "does not run all_reduce; it runs all_gather"),
        ("h100_8", "all_reduce", 8, 2.0**20, "custom_one_shot", "takes less than 256 KiB among 8 GPUs"),
        ("h100_8", "all_reduce", 8, 2.0**18, "custom_one_shot", "takes less than 256 KiB among 8 GPUs"),
        ("h100_8", "all_reduce", 4, 2.0**23, "custom_two_shot", "takes less than 8 MiB among 4 GPUs"),
        ("mi300x_8", "all_reduce", 8, 2.0**23, "quick_reduce:fp16", "takes no less than 16 MiB among 8 GPUs"),
        ("mi300x_8", "all_reduce", 2, 2.0**19, "quick_reduce:int4", "takes no less than 1 MiB among 2 GPUs"),
        ("mi300x_8", "all_reduce", 4, 2.0**33, "quick_reduce", "takes no more than 2 GiB among 4 GPUs"),
        ("h100_8", "all_reduce", 8, 2.0**10, "custom_two_shot", "takes no less than 256 KiB among 8 GPUs"),
        ("h100_8", "all_reduce", 3, 2.0**10, "custom_one_shot", "does not run among 3 GPUs; it runs among 2, 4, 6, 8"),
        ("h100_8", "all_reduce", 8, 2.0**20, "quick_reduce:int4", "does not run on h100; it runs on mi300x"),
        ("a100_8", "all_reduce", 8, 2.0**20, "multimem", "does not run on a100"),
        ("mi300x_8", "all_reduce", 8, 2.0**20, "nccl", "does not run on mi300x"),
        ("h100_8_ndr", "all_reduce", 16, 2.0**20, "multimem", "does not leave a node"),
        ("h100_8", "all_reduce", 16, 2.0**20, "nccl", "needs a network between nodes"),
        ("h200_8", "all_reduce", 8, 2.0**20, "xla_nccl", "does not run on h200"),
    ],
)
def test_what_does_not_exist_is_refused_with_what_does(
    system: str, pattern: Pattern, gpus: int, size: float, name: str, text: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        collective_seconds(named(system), pattern, size, gpus, name)
    assert text in str(refused.value)
    way = "no software is known here" if "network" in text else "here there is "
    assert way in str(refused.value)
    assert "network" in text or "nccl" in str(refused.value) or "rccl" in str(refused.value)


def test_a_machine_whose_switch_does_not_add_is_refused_by_what_it_lacks() -> None:
    machine = put(named("h100_8"), "node.in_switch", None)
    reason = refusal(Call("multimem"), machine, Question.of("all_reduce", 2.0**20, 8))
    assert reason == "needs a switch that computes all_reduce (node.in_switch)"
    # NCCL's symmetric kernels load from peers there
    with_switch, without = (
        float(collective_seconds(of, "all_reduce", 2.0**28, 8, "nccl_symmetric")) for of in (named("h100_8"), machine)
    )
    assert without > with_switch


def test_constants_are_fitted_on_at_most_six_rows_of_a_table_and_copies_are_equal() -> None:
    for software in all_software():
        rows = Counter(str(row.get("source", row["table"])) for row in software.fitted_on)
        assert all(count <= 6 for count in rows.values()), (software.name, rows)
    calls, engines, two_shot = map(software_of, ("xla_nccl", "nccl_copy_engine", "custom_two_shot"))
    assert calls is not None and engines is not None and two_shot is not None
    assert "calls.b200.sums" in {row["fits"] for row in calls.fitted_on}
    assert engines.latency_s == two_shot.latency_s


def test_a_broadcast_was_measured_on_no_node_and_is_run_by_no_software() -> None:
    for name, library in (("h100_8", "nccl"), ("mi300x_8", "rccl")):
        assert refusal(Call(library), named(name), Question.of("broadcast", 2.0**18, 8))


def test_a_machine_of_one_gpu_has_no_collectives() -> None:
    with pytest.raises(ConfigError, match="one GPU has no collectives"):
        collective_seconds(named("vega_fe"), "all_reduce", 2.0**20, 2, "rccl")


@pytest.mark.parametrize("name, text", [("ncll", "nccl"), ("quick_reduce:int5", "fp16, fp8, int6, int4")])
def test_a_name_that_is_none_is_refused(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        _ = Call(name).software


def test_fewer_ctas_are_no_faster_and_a_protocol_for_short_messages_is_no_slower() -> None:
    machine, sizes = named("b200_8"), 2.0 ** np.arange(10, 28)
    fewest, most = (
        collective_seconds(machine, "reduce_scatter", sizes, 2, Call("nccl_symmetric", num_ctas=ctas))
        for ctas in (8, 64)
    )
    assert np.all(fewest >= most) and fewest[-1] > most[-1]
    software = software_of("nccl_symmetric")
    assert software is not None
    without = Call("nccl_symmetric", changed=software.model_copy(update={"short": None}))
    with_short = collective_seconds(machine, "all_reduce", sizes, 8, "nccl_symmetric")
    plain = collective_seconds(machine, "all_reduce", sizes, 8, without)
    assert np.all(with_short <= plain) and with_short[0] < plain[0] and with_short[-1] == plain[-1]


def test_messages_both_ways_are_no_faster_and_more_channels_share_large_ones() -> None:
    one_way, both_ways = (
        collective_seconds(named("h100_8"), "send_recv", SIZES, 2, Call("xla_nccl", both_ways=ways))
        for ways in (False, True)
    )
    assert np.all(both_ways >= one_way) and both_ways[18] > one_way[18]


def test_a_call_tells_what_it_holds() -> None:
    machine = named("h100_8")
    assert describe_held(Call("nccl_copy_engine"), machine, 4, "all_gather").startswith("no CTA, 7 copy engines; ")
    assert describe_held(Call("custom_two_shot"), machine, 8, "all_reduce").startswith("36 CTAs; ")
    assert describe_held(Call("nccl_symmetric"), machine, 8, "all_reduce").startswith("2 CTAs; ")
    assert describe_held(Call("nccl_symmetric"), machine, 2, "all_reduce").startswith("64 CTAs; ")


def test_the_command_marks_the_fastest_and_tells_why_others_do_not_run() -> None:
    text = compare_software(["pattern=all_reduce", "bytes=64KiB,64MiB"]).text
    assert "* the fastest of a size" in text and text.count(" *") >= 2
    assert "custom_one_shot: takes less than 256 KiB among 8 GPUs" in text
    assert "rccl: does not run on h100" in text
    wide = compare_software(["pattern=all_reduce", "bytes=64MiB", "sizes=any"]).text
    assert "custom_one_shot: takes" not in wide


def test_the_command_tells_what_was_not_measured_and_proposes_software_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "not measured on this node" in compare_software(["pattern=send_recv", "bytes=64KiB"]).text
    assert "not measured on this node" not in compare_software(["pattern=all_reduce", "bytes=64KiB"]).text
    assert main(["machine", "libraries", "show=ring"]) == 2
    shown = capsys.readouterr()
    assert "`ring`" not in shown.out + shown.err


def test_the_command_shows_each_constant_with_its_source() -> None:
    text = compare_software(["show=nccl_symmetric"]).text
    assert "9.23 GB/s" in text and "5.32 µs" in text and "fitted on 3 measured rows" in text and "refuses " in text


@pytest.mark.parametrize(
    "words, text",
    [
        (["show=ncll"], "show = 'ncll': is no software of collectives"),
        (["show=ring"], "show = 'ring': is no software of collectives"),
        (["show=nccl", "show=rccl"], "show = 'rccl': is given twice"),
        (["pattern=all_reduce", "bytes=64KiB,1MiB,64KiB"], "bytes = '64 KiB': is named twice"),
        (["pattern=all_reduce", "bytes=0B"], "bytes.0 = '0B': must be greater than or equal to 1"),
        (["show=nccl", "gpus=8"], "is not understood here"),
        (["pattern=all_reduce", "gpus=9"], "is no group of a node of h100_8, which has 8"),
        (["pattern=all_sum"], "pattern"),
        (["pattern=all_reduce", "bytes=1 GHz"], "bytes"),
        (["pattern=all_reduce", "system=m40", "gpus=two"], "gpus"),
        ([], "pattern"),
    ],
)
def test_the_command_refuses_what_it_does_not_understand(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["machine", "libraries", *words]) == 2
    shown = capsys.readouterr()
    assert text in shown.out + shown.err


def test_software_with_other_constants_is_costed_without_a_file() -> None:
    software = software_of("symm_mem_two_shot")
    assert software is not None
    mine = software.model_copy(update={"name": "mine", "latency_s": {"any": 1e-6}})
    call = replace(Call("symm_mem_two_shot"), changed=CollectiveSoftware.model_validate(mine.model_dump()))
    faster, shipped = (collective_seconds(named("h100_8"), "all_reduce", SIZES, 8, by) for by in (call, call.name))
    assert np.all(faster < shipped)
    assert len(list(all_software())) == len(list_options("collective"))
