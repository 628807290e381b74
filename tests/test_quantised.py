"""Low-precision copies of weights in an iteration: who makes them, what they cost and save; `study=jitq` end to end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from dse.values import content_keys
from simulators.hardware.pim import Format, Pim
from simulators.steps.operators.quantised_weights import copy_bytes, weights
from simulators.steps.run.build import iteration
from simulators.steps.run.task_graph import intervals
from tests.iterations import BACKEND, gridded, metrics, runs, single, step, tree
from tests.support import drawn, number, shipped

WAYS = ("stored", "gpu", "pim")
ways = st.sampled_from(WAYS)
STAGED = {"provenance": "derived", "source": "made up"}


def copies(way: str, *, format: str = "mx9", instructions: str = "plain", **changes: Any) -> dict[str, Any]:
    """What to set for copies that are made in a way, on the A100 with the strawman's memory."""
    part = shipped("pim")["hbm3_strawman"]
    values: dict[str, Any] = {
        "quantised": {**shipped("quantised")[way], **changes},
        "format": shipped("format")[format],
        "instructions": shipped("instructions")[instructions],
        "system.gpu.pim": part["gpu"]["pim"],
        "system.gpu.staged_bytes": 7e6,
    }
    sources = {**part["sources"], "gpu.staged_bytes": STAGED, "node.library.network_bytes_per_s": STAGED}
    return {**values, "system.sources": sources}


def one(drawn: dict[str, Any], way: str, **changes: Any) -> dict[str, float]:
    return metrics({**drawn, **copies(way, **changes)})


# What copies cost


@pytest.mark.slow
@drawn(50)
@given(runs(), ways, st.sampled_from(["training", "prefill"]), st.sampled_from([0.0, 0.3, 1.0]))
def test_an_iteration_is_its_parts_and_its_schedule_ends_with_it(
    drawn: dict[str, Any], way: str, mode: str, share_kept: float
) -> None:
    drawn |= {"run.mode": mode, "parallel.dp": 1, "parallel.zero": 0}
    plain, row = metrics(drawn), one(drawn, way, kept=share_kept)
    assert sum(value for name, value in row.items() if name.startswith("share_")) == pytest.approx(1.0)
    parts = [f"{name}_s" for name in ("forward", "backward", "optimizer", "serialized", "exposed_dp")]
    added = row["quantisation_waited_s"] + row["quantisation_slowed_s"]
    assert row["iteration_s"] == pytest.approx(sum(row[name] for name in parts) + added)
    assert row["iteration_s"] - plain["iteration_s"] == pytest.approx(added, abs=1e-12)
    unit = iteration(step({**drawn, **copies(way, kept=share_kept)}))
    assert max(task.finish_s for task in intervals(unit)) == pytest.approx(row["iteration_s"], rel=1e-9)


@pytest.mark.slow
@drawn(50)
@given(runs(), st.sampled_from(["mx9", "mx6", "mxfp8_e4m3"]))
def test_kernels_of_the_gpu_move_weights_and_copies_for_each_product_that_reads_them(
    drawn: dict[str, Any], format: str
) -> None:
    drawn |= {"run.precision": "mixed"}
    plain, row = metrics(drawn), one(drawn, "gpu", format=format)
    number_format = Format.model_validate(shipped("format")[format])
    unit = iteration(step(drawn))
    num_weights = sum(float(weights(block)) * float(unit.passes.counts[block.name]) for block in unit.passes.blocks)
    again = sum(
        float(weights(block)) * float(unit.passes.counts[block.name])
        for block in unit.passes.blocks
        if block.name.endswith("layer") and drawn["run.recompute"] == "all"
    )
    moved = drawn["run.micro_batches"] * (2 * num_weights + again) * (2 + number_format.bytes_per_element)
    assert row["hbm_bytes"] - plain["hbm_bytes"] == pytest.approx(moved, rel=1e-6)
    assert row["quantisation_s"] >= moved / (0.75 * 2.039e12) * (1 - 1e-9)


@pytest.mark.slow
@drawn(50)
@given(runs(), st.sampled_from(["plain", "fused"]))
def test_units_in_memory_lose_no_more_than_their_time_and_less_with_more_help(
    drawn: dict[str, Any], instructions: str
) -> None:
    row = one(drawn, "pim", instructions=instructions)
    lost = row["quantisation_waited_s"] + row["quantisation_slowed_s"]
    assert -1e-12 <= lost <= row["quantisation_s"] * (1 + 1e-6)
    ahead = one(drawn, "pim", instructions=instructions, look_ahead=1000, over="micro_batch")
    assert ahead["quantisation_waited_s"] <= row["quantisation_waited_s"] * (1 + 1e-9) + 1e-12
    none = one(drawn, "pim", instructions=instructions, look_ahead=0)
    assert none["quantisation_waited_s"] >= row["quantisation_waited_s"] * (1 - 1e-9) - 1e-12


@pytest.mark.nightly
@drawn(50)
@given(runs(), ways)
def test_a_grid_at_once_is_its_designs_one_by_one(drawn: dict[str, Any], way: str) -> None:
    drawn |= {"run.precision": "mixed"}
    design = step({**drawn, **copies(way)})
    axes: dict[str, list[Any]] = {"run.batch": [1, 3], "format.element.mantissa_bits": [2, 7]}
    if way == "pim":
        axes |= {"quantised.look_ahead": [0, 1], "system.gpu.pim.units_per_bank": [0.5, 1.0]}
        axes |= {"quantised.burst_rows": [1, 64], "quantised.blocked": [0.25, 1.0]}
    axes |= {"quantised.kept": [0.0, 0.5]}
    grid = gridded(design, axes)
    for place, row in enumerate(single(design, axes)):
        for name, value in row.items():
            assert grid[place].metrics[name] == pytest.approx(value, rel=1e-9, abs=1e-15)


PIM = Pim.model_validate(shipped("pim")["hbm3_strawman"]["gpu"]["pim"])
LAYER = {"model.vocab": 0, "model.layers": 3, "model.hidden": 1024, "model.heads": 16, "model.ffn": 4096}
WEIGHTS = (3 * 1024 * 1024, 1024 * 1024, 4096 * 1024, 4096 * 1024)  # of the products of a layer
FORWARD, BACKWARD = 13.5625, 5.375  # commands for a word: MX9 along words, MX6 across lanes


def passes(commands: float, written: float) -> list[float]:
    """Seconds of the copies of a layer."""
    words = [PIM.per_unit(2.0 * count) for count in WEIGHTS]
    switches = [np.ceil(max(1.0, unit_words / PIM.words_per_row)) * PIM.switch_s for unit_words in words]
    copy_times = [PIM.copy_s(unit_words, commands, written=written) for unit_words in words]
    return [float(copy_time + switch) for copy_time, switch in zip(copy_times, switches, strict=True)]


@pytest.mark.parametrize("blocked", [1.0, 0.25])
@pytest.mark.parametrize("again", ["none", "all"])
def test_units_are_busy_for_every_product_that_reads_a_copy_in_the_direction_it_sums(
    blocked: float, again: str
) -> None:
    drawn = {**LAYER, "run.micro_batches": 5, "run.recompute": again}
    row = one(drawn, "pim", backward=shipped("format")["mx6"], blocked=blocked)
    forward, backward = passes(FORWARD, 1.125 / 2), passes(BACKWARD, 0.75 / 2)
    product_s = sum(forward) * (2 if again == "all" else 1) + sum(backward)
    assert row["quantisation_s"] == pytest.approx(5 * 3 * product_s / blocked, rel=1e-9)


def test_with_nothing_staged_a_burst_stops_what_reads_the_memory() -> None:
    """All channels blocked, one layer ahead: an operator loses every burst while it runs, but those of no bytes."""
    base = {**LAYER, "run.batch": 8, "run.sequence_length": 512, **copies("pim")}
    none, staging = (metrics({**base, "system.gpu.staged_bytes": staged}) for staged in (0.0, 1e9))
    lost = none["quantisation_slowed_s"] + none["quantisation_waited_s"]
    assert lost == pytest.approx(none["quantisation_s"], rel=1e-6)
    assert staging["quantisation_slowed_s"] < none["quantisation_slowed_s"]


# What they save


@pytest.mark.slow
@drawn(50)
@given(runs(), ways, st.sampled_from([1, 2, 4]), st.sampled_from([0.0, 0.5, 1.0]))
def test_stages_of_a_pipeline_hold_the_copies_of_their_own_blocks(
    drawn: dict[str, Any], way: str, pp: int, share_kept: float
) -> None:
    drawn |= {"model.decoder_layers": 0, "parallel.pp": pp, "parallel.zero": 0}
    plain, row = metrics(drawn), one(drawn, way, kept=share_kept)
    unit = iteration(step({**drawn, **copies(way, kept=share_kept)}))
    share = 1.0 if way == "stored" else share_kept
    for block in unit.passes.blocks:
        layers_of_stage = max(1.0, number(block.count) / pp)
        stored = float(weights(block)) * 2 * 1.125 * np.rint(share * layers_of_stage) / layers_of_stage
        assert float(copy_bytes(unit.passes, block)) == pytest.approx(stored, rel=1e-12)
    assert row["state_bytes"] >= plain["state_bytes"]
    if way == "stored" and pp == 1:
        assert row["copy_bytes"] == pytest.approx(
            sum(float(copy_bytes(unit.passes, block)) * number(block.count) for block in unit.passes.blocks)
        )


@pytest.mark.parametrize("way", ["gpu", "pim"])
def test_layers_whose_copies_are_stored_take_memory_and_no_time(way: str) -> None:
    layers = {"model.vocab": 0, "model.layers": 24, "run.micro_batches": 256}
    stored = one(layers, "stored")
    rows = [one(layers, way, kept=share_kept) for share_kept in (0.0, 0.5, 1.0)]
    state, lost = ([row[name] for row in rows] for name in ("bytes_per_parameter", "share_quantisation"))
    assert state == sorted(state)
    assert lost == sorted(lost, reverse=True)
    assert state[2] == pytest.approx(stored["bytes_per_parameter"], rel=1e-12)
    assert rows[2]["iteration_s"] == pytest.approx(stored["iteration_s"], rel=1e-12)
    flying = rows[0]["copy_bytes"] / (rows[0]["state_bytes"] / state[0])
    assert state[1] - flying == pytest.approx((state[0] - flying + state[2]) / 2, rel=1e-6)


def test_a_design_does_not_depend_on_what_nobody_uses() -> None:
    """Units in memory, and their commands, mean nothing where the GPU makes copies."""
    plain = copies("gpu")
    more = {**plain, "instructions": shipped("instructions")["fused"], "system.gpu.pim": None}
    assert (_key(step(plain)) == _key(step(more))).all()
    assert (_key(step({"quantised": shipped("quantised")["none"], "format": plain["format"]})) == _key(step())).all()
    for path, needed in (
        ("quantised.look_ahead", True),
        ("system.gpu.pim.command_rate", True),
        ("format.block", False),
    ):
        condition = BACKEND.condition(path, tree(copies("pim")))
        assert condition == ({"quantised.made_by": "pim"} if needed else {})


def _key(design: BaseModel) -> Any:
    return content_keys(design)


# What is refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": None}, "format: is missing: copies have a format (choose one: format=mx9)"),
        ({"instructions": None}, "instructions: is needed by quantised=pim (choose one: instructions=plain)"),
        ({"system.gpu.pim": None}, "system.gpu.pim: is needed by quantised=pim (choose one: pim=hbm3_strawman)"),
        ({"system.gpu.staged_bytes": None}, "system.gpu.staged_bytes: is needed by quantised=pim"),
        ({"model": shipped("model")["gnmt"]}, "quantised.made_by = 'pim': of a model that is no transformer"),
    ],
)
def test_a_design_that_lacks_something_is_told_what(changes: dict[str, Any], message: str) -> None:
    problems = BACKEND.problems(step({**copies("pim"), **changes}))
    assert [text for text in map(str, problems) if text.startswith(message)], [str(problem) for problem in problems]


def test_degrees_that_leave_a_server_without_a_network_are_infeasible_and_the_others_are_not() -> None:
    values = {name: value for name, value in copies("pim").items() if name != "system.sources"}
    sources = {**shipped("pim")["hbm3_strawman"]["sources"], "gpu.staged_bytes": STAGED}
    grid = gridded(step({**values, "system.sources": sources}), {"parallel.tp": [1, 8, 16]})
    assert [grid[place].status for place in range(3)] == ["ok", "ok", "infeasible"]
