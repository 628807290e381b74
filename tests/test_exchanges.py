"""Exchanges of experts beside other work: the recurrence against the engine, steps, DualPipe, measured kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dse.errors import ConfigError, validate_as
from dse.plugins import load
from simulators.costs.tile_pipeline import tile_parts, tile_pipeline_s
from simulators.steps.overlap.implementations import Implementation, kernel_of_experts, kernels_of_experts
from simulators.steps.overlap.sites import read_schedule
from simulators.steps.overlap.two_streams import Slot, TwoStreams
from simulators.steps.overlap.two_streams import lower as lower_streams
from simulators.steps.run.task_graph import intervals, lower
from simulators.steps.spread.pipelines import StageTurns, in_flight, overlaps
from simulators.workloads.spreading import PipelineSchedule
from tests.iterations import BACKEND, NETWORK, gridded, made, metrics, step
from tests.test_experts import EXPERTS, LATENT, small
from tests.test_plan import plan_of, planned
from validation.dualpipe import TABLE, figures

SECONDS = st.one_of(st.just(0.0), st.floats(1e-3, 3.0))
RATES = st.floats(0.5, 1.0)
BESIDE = ("shared_expert", "two_micro_batches")
SPREAD = {**NETWORK, "parallel.dp": 8, "parallel.ep": 8, "run.micro_batches": 4}
MODEL = small({**EXPERTS, "shared_experts": 1})


@st.composite
def streams(draw: st.DrawFn) -> TwoStreams:
    """A pair of streams of four slots a layer, of which the last one has nothing that waits for no exchange."""
    slots = [
        Slot(name, draw(SECONDS) if name != "d" else 0.0, draw(SECONDS), draw(SECONDS), draw(RATES), draw(RATES))
        for name in "abcd"
    ]
    first = replace(slots[0], name="first", unbound=0.0)
    return TwoStreams((first, *slots[1:]), tuple(slots), (Slot("last", unbound=slots[0].unbound),))


def makespan(graph: Any) -> float:
    """Makespan by the fluid engine."""
    return float(load("engine", "fluid").totals(graph).makespan_s[0])


# Two streams


@given(streams(), st.integers(1, 6))
def test_the_recurrence_ends_when_the_engine_does(both: TwoStreams, layers: int) -> None:
    assert float(both.seconds(layers)) == pytest.approx(makespan(lower_streams(both, layers)), rel=1e-9, abs=1e-12)


@given(streams(), st.integers(1, 6))
def test_side_by_side_is_no_slower_than_waiting_and_no_faster_than_the_longer_stream(
    both: TwoStreams, layers: int
) -> None:
    """Both streams together progress by one second a second or more, as each keeps half of its rate."""
    seconds, computed, moved = float(both.seconds(layers)), both.sum("computed_s", layers), both.sum("exchange", layers)
    assert seconds <= float(computed + moved) * (1 + 1e-9)
    assert seconds >= max(float(computed), float(moved)) * (1 - 1e-9)
    assert float(both.saved_s(layers)) == pytest.approx(float(computed + moved) - seconds, abs=1e-9)


@given(streams(), st.integers(1, 6))
def test_without_exchanges_compute_takes_its_own_time(both: TwoStreams, layers: int) -> None:
    alone = TwoStreams(
        *(tuple(replace(slot, exchange=0.0) for slot in slots) for slots in (both.first, both.further, both.after))
    )
    assert float(alone.seconds(layers)) == pytest.approx(float(both.sum("computed_s", layers)), rel=1e-9, abs=1e-12)
    assert float(alone.saved_s(layers)) == pytest.approx(0.0, abs=1e-9)


@given(streams(), st.integers(1, 6), st.floats(0, 1))
def test_a_longer_exchange_never_ends_earlier(both: TwoStreams, layers: int, more: float) -> None:
    slow = replace(
        both, further=tuple(replace(slot, exchange=float(np.asarray(slot.exchange)) + more) for slot in both.further)
    )
    assert float(slow.seconds(layers)) >= float(both.seconds(layers)) - 1e-9


# Steps


def exchanged(how: str, mode: str = "training", *, system: str = "h100_8", **knobs: Any) -> dict[str, Any]:
    """Values of a step of a small model with experts on eight GPUs."""
    values = {f"parallel.{name}": value for name, value in knobs.items()}
    return {**SPREAD, "run.mode": mode, "parallel.exchanges": how, **values}


OPTIONS: dict[str, Any] = {"model": MODEL, "system": "h100_8", "kernels": "flash"}
BF16 = {"run.precision": "bf16", "run.batch": 8, "run.sequence_length": 1024}


@pytest.mark.parametrize("how", BESIDE)
@pytest.mark.parametrize("mode", ["training", "prefill", "decode"])
def test_the_task_graph_of_a_step_takes_as_long_as_the_closed_form(how: str, mode: str) -> None:
    iteration = made({**exchanged(how, mode), **BF16}, **OPTIONS)
    assert float(iteration.passes.pair_saved_s) > 0
    assert makespan(lower(iteration)) == pytest.approx(float(iteration.seconds), rel=1e-9)
    lanes = {task.lane for task in intervals(iteration)}
    assert {"compute", "expert-parallel links"} <= lanes


@pytest.mark.parametrize("how", BESIDE)
@pytest.mark.parametrize("mode", ["training", "prefill", "decode"])
def test_exchanges_beside_other_work_save_no_more_than_they_take(how: str, mode: str) -> None:
    iteration = made({**exchanged(how, mode), **BF16}, **OPTIONS)
    moved = float(iteration.passes.sum(part for part in iteration.passes.parts if part.over == "ep"))
    passes = 1 if how == "shared_expert" else 2 if mode != "training" else 1
    assert 0 < float(iteration.passes.pair_saved_s) <= passes * moved


def test_a_grid_of_steps_is_that_of_each_step() -> None:
    design = step({**exchanged("two_micro_batches"), **BF16}, **OPTIONS)
    grid = gridded(design, {"run.batch": [1, 4, 16], "run.micro_batches": [2, 4, 8]})
    for place, (batch, m) in enumerate(zip((1, 4, 16), (2, 4, 8), strict=True)):
        alone = metrics(
            {**exchanged("two_micro_batches"), **BF16, "run.batch": batch, "run.micro_batches": m}, **OPTIONS
        )
        assert grid[4 * place].metrics["iteration_s"] == pytest.approx(alone["iteration_s"], rel=1e-12)


# One kernel for a layer of experts


@given(st.tuples(SECONDS, SECONDS, SECONDS), st.integers(1, 500))
def test_a_kernel_of_tiles_is_no_faster_than_its_links_or_its_products(
    stages: tuple[float, float, float], tiles: int
) -> None:
    arrive, compute, leave = stages
    seconds = float(tile_pipeline_s(arrive, compute, leave, tiles=tiles))
    assert max(compute, arrive + leave) <= seconds * (1 + 1e-9)
    assert seconds <= (arrive + compute + leave) * (1 + 1e-9)
    if tiles == 1:
        assert seconds == pytest.approx(arrive + compute + leave)
    assert float(tile_pipeline_s(arrive, compute, leave, tiles=2 * tiles)) <= seconds * (1 + 1e-9)
    shares = np.array([part[1:] for part in tile_parts(tiles)], float).sum(axis=0)
    assert shares == pytest.approx(1)


@given(SECONDS, SECONDS, st.integers(2, 12))
def test_tiles_that_arrive_alone_are_a_flow_shop_of_two_machines(arrive: float, compute: float, tiles: int) -> None:
    there, ended = 0.0, 0.0
    for _ in range(tiles):
        there += arrive / tiles
        ended = max(ended, there) + compute / tiles
    for stages in ((arrive, compute, 0.0), (0.0, compute, arrive)):  # and the same backwards
        assert float(tile_pipeline_s(*stages, tiles=tiles)) == pytest.approx(ended, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_experts_in_one_kernel_end_before_they_would_in_turn_and_not_before_the_longer_part(mode: str) -> None:
    waited, fused = (made({**exchanged(how, mode), **BF16}, **OPTIONS) for how in ("waited", "one_kernel"))
    parts = fused.passes.parts
    moved = float(fused.passes.sum(part for part in parts if part.over == "ep"))
    computed = float(fused.passes.sum(part for part in parts if part.op.name.startswith("expert ")))
    assert 0 < float(fused.passes.pair_saved_s) <= min(moved, computed) * (1 + 1e-9)
    assert float(fused.seconds) < float(waited.seconds)
    assert makespan(lower(fused)) == pytest.approx(float(fused.seconds), rel=1e-9)
    assert not {"permute", "unpermute"} & {part.op.name for part in parts}
    assert {"compute", "expert-parallel links"} <= {task.lane for task in intervals(fused)}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"system": "mi300x_8"}, "comet does not run on mi300x"),
        ({"mode": "training"}, "comet does not run in training"),
        ({"ep": 1}, "hides dispatch and combine of experts, and there are none"),
    ],
)
def test_one_kernel_is_refused_where_no_software_has_it(changes: dict[str, Any], text: str) -> None:
    knobs = {"mode": "prefill", **changes}
    system = knobs.get("system", "h100_8")
    values = {**exchanged("one_kernel", **knobs), **BF16}
    problems = BACKEND.problems(step(values, **{**OPTIONS, "system": system}))
    assert any(text in str(problem) for problem in problems)


def test_every_kernel_of_experts_says_where_it_runs() -> None:
    assert {software.name for software in kernels_of_experts()} == {"comet", "deepgemm_mega_moe", "flash_dmoe"}
    chosen = [
        kernel_of_experts("b200", "fp8_block", "decode"),
        kernel_of_experts("h100", "bf16", "prefill"),
        kernel_of_experts("h100", "bf16", "decode"),
    ]
    assert [software and software.name for software in chosen] == ["deepgemm_mega_moe", "comet", "flash_dmoe"]
    assert kernel_of_experts("mi300x", "bf16", "prefill") is None
    with pytest.raises(ConfigError, match="beside experts"):
        read_schedule("comet", "ffn_in")
    with pytest.raises(ConfigError, match="overlaps nothing"):
        validate_as(Implementation, {"name": "none", "description": "nothing"}, path="")


# What DeepSeek-V3 computes and keeps

LATENTS: dict[str, Any] = {**OPTIONS, "model": {**MODEL, "latent": LATENT}}


def test_up_projections_that_are_computed_again_are_not_kept() -> None:
    values = {**exchanged("two_micro_batches"), **BF16}
    nothing, again, every = (
        metrics({**values, "run.recompute": what}, **LATENTS) for what in ("none", "up_projections", "all")
    )
    assert every["activation_bytes"] < again["activation_bytes"] < nothing["activation_bytes"]
    assert nothing["backward_s"] < again["backward_s"] < every["backward_s"]
    iteration = made({**values, "run.recompute": "up_projections"}, **LATENTS)
    names = {
        part.op.name for part in iteration.passes.parts if part.op.phase == "recompute" and part.block.name == "layer"
    }
    assert {"norm again", "q up again", "kv up again", "rotary again", "expert activation again"} <= names
    assert not names & {"dispatch again", "flash again", "projection again", "expert fc1 again", "latent down again"}
    assert makespan(lower(iteration)) == pytest.approx(float(iteration.seconds), rel=1e-9)


# DualPipe

Chunk = tuple[str, int, int]
"""(F, B, I or W, direction, micro-batch): I is a backward pass of inputs alone."""


def both_ends(p: int, m: int, rank: int) -> list[list[Chunk]]:
    """Chunks of a rank in their order, pairs in one list (dualpipe.py of deepseek-ai/DualPipe 3da1bbe, step)."""
    half = min(rank, p - 1 - rank)
    outer, middle = p // 2 - half - 1, half == p // 2 - 1
    main = [["F0", "B1"], ["F1", "B0"]] * (m // 2 - p + half + 1)
    main = [["F0"], ["B1"], *main[1:]] if middle else main
    ends = [[f"{'I' if late else 'B'}{1 - place % 2}"] for place, late in enumerate(_late_backward(half))]
    work = [*[["F0"]] * (2 * outer), *[["F0"], ["F1"]] * (half + 1), *[["I1"], ["W"], ["F1"]] * outer, *main]
    work += [*[["B1"], ["F1", "B0"]] * outer, *ends, *[["W"], ["I0"]] * outer, *[["W"]] * (half + 1)]
    return _numbered(work, swapped=rank >= p // 2)


def _late_backward(half: int) -> list[bool]:
    """Which backward passes at the end leave gradients of weights for later."""
    turn = (half + 1) // 2
    return [
        place > turn or (place == turn and (phase == 0 or half % 2 == 1))
        for place in range(half + 1)
        for phase in (1, 0)
    ]


def _numbered(work: list[list[str]], *, swapped: bool) -> list[list[Chunk]]:
    """Chunks with their directions and micro-batches."""
    counts, left, chunks = dict[tuple[bool, int], int](), list[Chunk](), list[list[Chunk]]()
    for names in work:
        chunks.append([])
        for name in names:
            if name == "W":
                chunks[-1].append(("W", *left.pop(0)[1:]))
                continue
            place = name[0] == "F", int(name[1]) ^ swapped
            chunks[-1].append((name[0], place[1], counts.get(place, 0)))
            counts[place] = counts.get(place, 0) + 1
            left += chunks[-1][-1:] if name[0] == "I" else []
    return chunks


def simulated(p: int, m: int, times: dict[str, float], pair: float) -> float:
    """End of the last chunk of all ranks, each as early as its order and its neighbours allow."""
    orders, ends = [both_ends(p, m, rank) for rank in range(p)], dict[tuple[str, int, int, int], float]()
    clocks = [0.0] * p

    def needs(chunk: Chunk, rank: int) -> list[tuple[str, int, int, int]]:
        kind, direction, batch = chunk
        up, down = (rank + 1, rank - 1) if direction == 0 else (rank - 1, rank + 1)
        if kind == "W" or (kind == "F" and not 0 <= down < p):
            return []
        if kind == "F":
            return [("F", direction, batch, down)]
        return [("B", direction, batch, up) if 0 <= up < p else ("F", direction, batch, rank)]

    while any(orders):
        for rank, order in enumerate(orders):
            while order and all(need in ends for chunk in order[0] for need in needs(chunk, rank)):
                chunks: Sequence[Chunk] = order.pop(0)
                begun = max([clocks[rank], *(ends[need] for chunk in chunks for need in needs(chunk, rank))])
                clocks[rank] = begun + (pair if len(chunks) == 2 else times[chunks[0][0]])
                ends |= {("B" if kind == "I" else kind, at, batch, rank): clocks[rank] for kind, at, batch in chunks}
    return max(clocks)


@given(st.integers(1, 4), st.integers(0, 4), st.floats(0.1, 1), st.floats(0, 1), st.floats(0.5, 1))
def test_an_explicit_dualpipe_ends_when_the_closed_form_says(
    half: int, more: int, forward: float, inputs: float, share: float
) -> None:
    """Table 2 of arXiv:2412.19437: exact where F, W and the rest of B take as long, else an upper bound."""
    p, m, backward = 2 * half, 4 * half + 2 * more, forward * (2 + inputs)
    pair = max(share * (forward + backward), backward)
    times = {"F": forward, "B": backward, "I": backward - forward, "W": forward}
    knobs = PipelineSchedule(pipeline="dualpipe", exchanges="two_micro_batches")
    saved = float(overlaps(knobs, p, m, training=True)) * (forward + backward - pair)
    turns = StageTurns(forward + backward - saved, 0.0, 0.0, 0.0, p, m, chunks=(pair, backward, forward))
    end, closed = simulated(p, m, times, pair), float(turns.seconds(knobs))
    assert end <= closed * (1 + 1e-9)
    assert end >= (closed - (p // 2 - 1) * inputs * forward) * (1 - 1e-9)


def test_dualpipe_holds_two_stages_and_shortens_the_bubble() -> None:
    values = {**exchanged("two_micro_batches", pp=4), **BF16, "run.micro_batches": 16, "model.layers": 16}
    plain, ends = (metrics({**values, "parallel.pipeline": name}, **OPTIONS) for name in ("1f1b", "dualpipe"))
    assert ends["bubble_s"] < plain["bubble_s"]
    assert ends["state_bytes"] == pytest.approx(2 * plain["state_bytes"], rel=1e-9)
    assert ends["optimizer_s"] > 1.8 * plain["optimizer_s"]
    assert [float(stages) for stages in in_flight(PipelineSchedule(pipeline="dualpipe"), 4, 16)] == [5, 5]
    iteration = made({**values, "parallel.pipeline": "dualpipe"}, **OPTIONS)
    assert makespan(lower(iteration)) == pytest.approx(float(iteration.seconds), rel=1e-9)


# Rules


@pytest.mark.parametrize(
    ("changed", "path", "rule"),
    [
        ({"parallel.ep": 1}, "parallel.exchanges", "there are none (parallel.ep = 1)"),
        ({"model.moe.shared_experts": 0, "parallel.exchanges": "shared_expert"}, "parallel.exchanges", "has none"),
        ({"parallel.zero": 3}, "parallel.exchanges", "that are split is not modelled"),
        ({"run.micro_batches": 1}, "run.micro_batches", "without another one"),
        ({"run.micro_batches": 3, "run.mode": "prefill"}, "run.micro_batches", "without another one"),
        ({"parallel.pipeline": "gpipe"}, "parallel.pipeline", "runs all forward passes first"),
        ({"parallel.pipeline": "dualpipe", "parallel.pp": 1}, "parallel.pp", "is odd"),
        ({"parallel.pipeline": "dualpipe", "parallel.pp": 4}, "run.micro_batches", "the 8 that DualPipe needs"),
        ({"parallel.pipeline": "dualpipe", "run.micro_batches": 5, "parallel.pp": 2}, "run.micro_batches", "is odd"),
        ({"parallel.pipeline": "dualpipe", "parallel.pp": 2, "parallel.zero": 2}, "parallel.zero", "two copies"),
        ({"parallel.pipeline": "dualpipe", "parallel.pp": 2, "run.mode": "prefill"}, "parallel.pipeline", "training"),
    ],
)
def test_what_cannot_run_side_by_side_is_told_with_a_way_out(changed: dict[str, Any], path: str, rule: str) -> None:
    problems = BACKEND.problems(step({**exchanged("two_micro_batches"), **BF16, **changed}, **OPTIONS))
    assert any(problem.path == path and rule in problem.rule and problem.way_out for problem in problems), problems


# Plans


@pytest.mark.nightly
def test_a_plan_tries_all_that_exchanges_may_run_beside_and_says_what_does_so_today(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["run.mode=training", "run.micro_batches=4", "parallel.tp=1", "parallel.dp=8", "parallel.ep=8"]
    plan = plan_of(planned(tmp_path, "model=deepseek_v2_lite", "system=h100_8", *words))
    assert set(plan.table["parallel.exchanges"]) == {"waited", *BESIDE}
    assert plan.before["parallel.exchanges"] == "waited"
    best = plan.best["parallel.exchanges"]
    assert best != "waited"
    assert plan.tree()["parallel"]["exchanges"] == best
    output = capsys.readouterr().out
    assert f"exchanges={best}" in output
    way = {"shared_expert": "--moe-shared-expert-overlap", "two_micro_batches": "--overlap-moe-expert-parallel-comm"}
    assert way[best] in output
    assert "--enable-dbo" not in output


# Measured kernels


def test_measured_kernels_are_predicted(shared: Callable[[str], Path]) -> None:
    errors = figures(shared(f"data/deepseek_dualpipe/{TABLE}").parent)
    assert abs(errors["dualpipe_pair"]) < 0.105
    assert abs(errors["dualpipe_hidden_points"]) < 5
    assert abs(errors["dualpipe_slowdown"]) < 0.05
