"""Layouts of stages, sequences, experts and states: what each moves, and what it leaves on a GPU."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulators.steps.backend import StepBackend
from simulators.steps.run.stages import balanced_stages
from simulators.workloads.model_zoo import model_tree
from tests.iterations import block, made, metrics, step
from tests.support import shipped

ROOMY = {"run.mode": "training", "run.precision": "bf16", "run.sequence_length": 4096, "run.batch": 1}
PARTS: dict[str, Any] = {"system": "h100_8_ndr", "kernels": "flash"}
LLAMA, QWEN = model_tree("llama3_8b"), model_tree("qwen3_30b_a3b")


def of(values: dict[str, Any], model: Any = LLAMA) -> dict[str, float]:
    return metrics({**ROOMY, **values}, model=model, **PARTS)


def broken(values: dict[str, Any], model: Any = LLAMA) -> set[str]:
    design = step({**ROOMY, **values}, model=model, **PARTS)
    return {problem.path for problem in StepBackend().problems(design)}


# Ends of a pipeline


@pytest.mark.slow
@given(pp=st.sampled_from([2, 3, 4, 8]), layers=st.integers(8, 40))
def test_ends_that_count_as_layers_leave_no_stage_with_more(pp: int, layers: int) -> None:
    """The busiest stage has ceil((layers + 2) / pp) layers and ends; of one stage it is all the same."""
    values = {**ROOMY, "parallel.pp": pp, "model.layers": layers, "run.micro_batches": 4, "parallel.ends": "layers"}
    built = made(values, model=LLAMA, **PARTS)
    counts = {name: float(count) for name, count in built.passes.counts.items()}
    assert sum(counts.values()) == pytest.approx(min(-(-(layers + 2) // pp), layers + 1))
    assert counts["embedding"] + counts["output"] <= 1
    beside = {**values, "parallel.ends": "beside"}
    assert float(built.slot_s) <= float(made(beside, model=LLAMA, **PARTS).slot_s) * (1 + 1e-9)
    counted, uncounted = (made({**tree, "parallel.pp": 1}, model=LLAMA, **PARTS) for tree in (values, beside))
    assert float(counted.seconds) == float(uncounted.seconds)


def test_126_layers_divide_into_64_virtual_stages_with_both_ends() -> None:
    values: dict[str, Any] = {"parallel.pp": 8, "parallel.tp": 8, "run.micro_batches": 16, "model.layers": 126}
    values |= {"parallel.pipeline": "interleaved", "parallel.virtual_stages": 8, "parallel.sequence_parallel": True}
    counted, beside = (of({**values, "parallel.ends": ends}) for ends in ("layers", "beside"))
    assert counted["iteration_s"] < beside["iteration_s"] and counted["memory_bytes"] < beside["memory_bytes"]
    assert broken({"parallel.ends": "layers", "parallel.pp": 2, "model.vocab": 0}) == {"parallel.ends"}


def longest(sizes: tuple[int, ...], ends: tuple[float, float]) -> float:
    """Time of the longest stage, over that of a layer."""
    return max((sizes[0] + ends[0], *sizes[1:-1], sizes[-1] + ends[1]))


@given(
    layers=st.integers(1, 9),
    pp=st.integers(2, 4),
    ends=st.tuples(st.sampled_from([0.0, 0.05, 0.5, 1.0]), st.sampled_from([0.0, 0.3, 1.0, 2.3, 12.0])),
)
def test_balanced_stages_are_the_best_of_all(layers: int, pp: int, ends: tuple[float, float]) -> None:
    """No other placing of whole layers has a shorter longest stage, and layers are neither lost nor invented."""
    every = (sizes for sizes in itertools.product(range(layers + 1), repeat=pp) if sum(sizes) == layers)
    best = min(longest(sizes, ends) for sizes in every)
    placed = balanced_stages(layers, *ends, pp)
    has = ends[0] * placed.first_is_longest + ends[1] * placed.last_is_longest
    assert float(placed.longest + has) == pytest.approx(best)
    assert not (placed.first_is_longest and placed.last_is_longest)
    assert placed.first + ends[0] <= best + 1e-9 and placed.last + ends[1] <= best + 1e-9
    assert 0 <= layers - float(placed.first + placed.last) <= (pp - 2) * (best + 1e-9)


def test_layers_of_several_designs_are_balanced_at_once() -> None:
    pp, output = np.array([2, 4, 16]), np.array([1.0, 1.6, 2.3])
    together = balanced_stages(61, 0.05, output, pp)
    for at in range(3):
        alone = balanced_stages(61, 0.05, output[at], pp[at])
        assert (together.longest[at], together.first[at], together.last[at]) == (alone.longest, alone.first, alone.last)


def test_a_published_layout_is_balanced() -> None:
    """Kimi K2 on 4 stages: 16 layers of three, 13 and the loss of the last (Megatron-Bridge, kimi_k2.py)."""
    placed = balanced_stages(61, 0.05, 2.3, 4)
    assert (float(placed.longest), float(placed.first), float(placed.last)) == (16, 16, 13)


def test_balanced_stages_take_no_longer_than_others_and_keep_a_single_one() -> None:
    values: dict[str, Any] = {"parallel.pp": 4, "run.micro_batches": 8, "model.layers": 30}
    times = {ends: of({**values, "parallel.ends": ends})["iteration_s"] for ends in ("balanced", "layers", "beside")}
    assert times["balanced"] == min(times.values())
    alone = [of({**values, "parallel.pp": 1, "parallel.ends": ends})["iteration_s"] for ends in ("balanced", "beside")]
    assert alone[0] == alone[1]
    assert broken({"parallel.ends": "balanced", "parallel.pp": 2, "model.vocab": 0}) == {"parallel.ends"}


# Sequences


@given(cp=st.sampled_from([2, 4, 8]), length=st.sampled_from([4096, 16_384]))
def test_heads_move_twice_each_way_and_compute_what_a_ring_does(cp: int, length: int) -> None:
    values = {**ROOMY, "parallel.cp": cp, "run.sequence_length": length}
    built = made({**values, "parallel.context": "all_to_all"}, model=LLAMA, **PARTS)
    moved = [part for part in built.passes.parts if part.over == "cp"]
    tokens, widths = length / cp, {"heads": (32 + 2 * max(8, cp)) * 128, "outputs": 32 * 128}
    assert [part.op.name for part in moved] == ["heads", "outputs", "outputs backward", "heads backward"]
    for part in moved:
        assert part.op.work.payload_bytes == 2 * tokens * widths[part.op.name.partition(" ")[0]]  # type: ignore[union-attr]
    ring, exchanged = (of({**values, "parallel.context": how}) for how in ("ring", "all_to_all"))
    assert exchanged["flop"] == pytest.approx(ring["flop"])
    assert exchanged["memory_bytes"] == ring["memory_bytes"]


def test_a_framework_adds_parts_of_a_ring_with_kernels_of_its_own_and_may_copy_keys_first() -> None:
    cp, length, heads, kv_heads, head = 4, 65_536, 32, 8, 128
    ring = {"outputs": 30, "keys": 4, "output_gradients": 12, "key_gradients": 20, "kernels": 5, "gradient_kernels": 6}
    values = {**ROOMY, "parallel.cp": cp, "run.sequence_length": length}
    sources = {**shipped("kernels")["flash"]["sources"], "ring": {"provenance": "derived", "source": "made up"}}
    moved: dict[bool, dict[str, Any]] = {}
    for repeated in (False, True):
        how = {**values, "kernels.ring": {**ring, "repeated": repeated}, "kernels.sources": sources}
        moved[repeated] = {part.op.name: part for part in made(how, model=LLAMA, **PARTS).passes.parts}
    tokens = length / cp
    for repeated, parts in moved.items():
        keys = 2 * head * (heads if repeated else kv_heads)
        assert float(parts["sum of parts"].spent.bytes) == tokens * (30 * heads * head + 4 * keys)
        assert float(parts["sum of parts backward"].spent.bytes) == tokens * (12 * heads * head + 20 * keys)
        assert parts["ring"].op.work.payload_bytes == 2 * tokens * keys


@pytest.mark.parametrize("length", [4096, 65_536])
def test_a_ring_adds_up_the_outputs_of_its_parts_and_their_gradients(length: int) -> None:
    """A sum in fp32 is read and written with each part but the first: 10 bytes a number of 16 bits."""
    cp = 4
    values = {**ROOMY, "parallel.cp": cp, "run.sequence_length": length}
    parts = {part.op.name: part for part in made(values, model=LLAMA, **PARTS).passes.parts}
    forward, back = parts["sum of parts"], parts["sum of parts backward"]
    tokens = length / cp
    assert float(forward.spent.bytes) == 10 * tokens * 32 * 128
    assert float(back.spent.bytes) == 10 * tokens * (32 + 2 * 8) * 128
    assert float(forward.times) == float(back.times) == (cp - 1) * 32
    alone = made(ROOMY, model=LLAMA, **PARTS).passes.parts
    assert not any(part.op.name.startswith("sum of parts") for part in alone)
    ring, exchanged = (of({**values, "parallel.context": how}) for how in ("ring", "all_to_all"))
    assert ring["iteration_s"] > exchanged["iteration_s"]  # inside a node, where heads move fast


def test_heads_that_do_not_divide_and_latents_are_refused() -> None:
    by_heads = {"parallel.context": "all_to_all", "parallel.cp": 8}
    assert broken(by_heads) == set()
    assert broken({**by_heads, "parallel.tp": 8, "parallel.sequence_parallel": True}) == {"parallel.context"}
    latent = {**by_heads, "run.sequence_length": 4096}
    assert "parallel.context" in broken(latent, model_tree("deepseek_v3"))


# Experts


@given(etp=st.sampled_from([2, 4]), ep=st.sampled_from([2, 4]))
def test_experts_that_are_split_hold_and_compute_as_much_as_those_that_are_spread(etp: int, ep: int) -> None:
    values = {**ROOMY, "parallel.dp": 8}
    split, spread = (
        made({**values, "parallel.ep": groups, "parallel.etp": parts}, model=QWEN, **PARTS)
        for groups, parts in ((ep, etp), (ep * etp, 1))
    )
    for name in ("params", "expert_params"):
        assert getattr(block(split), name) == pytest.approx(getattr(block(spread), name))
    flop = [
        sum(float(part.spent.flop) for part in built.passes.parts if "expert fc" in part.op.name)
        for built in (split, spread)
    ]
    assert flop[0] == pytest.approx(flop[1], rel=0.01)  # tokens fall less evenly on more groups
    rows = [part.op for part in split.passes.parts if part.over == "etp"]
    assert [op.work.pattern for op in rows] == ["all_gather", "reduce_scatter"] * 2  # type: ignore[union-attr]
    assert split.passes.parallel.expert_replicas == spread.passes.parallel.expert_replicas


def test_experts_are_split_where_there_are_any_and_they_are_spread() -> None:
    assert broken({"parallel.etp": 2}) == {"parallel.etp"}
    assert broken({"parallel.etp": 2, "parallel.dp": 8}, QWEN) == {"parallel.etp"}
    assert broken({"parallel.etp": 4, "parallel.ep": 4, "parallel.dp": 8}, QWEN) == {"parallel.etp"}
    assert broken({"parallel.etp": 2, "parallel.ep": 4, "parallel.dp": 8}, QWEN) == set()


# States


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_states_are_split_over_fewer_gpus_and_their_sums_among_more(zero: int) -> None:
    """All of dp as one group is the same; a node is fuller, and its gathers do not leave it."""
    values = {"parallel.dp": 64, "parallel.zero": zero}
    unsplit, largest, node = (of({**values, "parallel.shard_gpus": size}) for size in (None, 64, 8))
    assert largest["iteration_s"] == pytest.approx(unsplit["iteration_s"])
    assert largest["state_bytes"] == unsplit["state_bytes"]
    assert node["state_bytes"] > unsplit["state_bytes"]
    alone = of({"parallel.dp": 8, "parallel.zero": zero})
    assert node["state_bytes"] == alone["state_bytes"] and node["optimizer_s"] == alone["optimizer_s"]
    assert node["dp_s"] > alone["dp_s"]  # what other groups add
    slow = {"system.node.library.network_bytes_per_s": 1e9, "system.node.library.network_nics": "one"}
    if zero == 3:  # gathers and sums within a node do not wait for a slow network
        assert of({**values, **slow, "parallel.shard_gpus": 8})["dp_s"] < of({**values, **slow})["dp_s"]


def test_groups_of_states_divide_what_is_split() -> None:
    assert broken({"parallel.dp": 8, "parallel.shard_gpus": 4}) == {"parallel.shard_gpus"}
    assert broken({"parallel.dp": 8, "parallel.zero": 3, "parallel.shard_gpus": 3}) == {"parallel.shard_gpus"}
    spread = {"parallel.dp": 8, "parallel.ep": 8, "parallel.zero": 1, "parallel.shard_gpus": 4}
    assert broken(spread, QWEN) == {"parallel.shard_gpus"}


def test_layouts_that_say_nothing_of_these_keep_their_keys() -> None:
    parallel = dict(step({**ROOMY, "parallel.dp": 8}, model=LLAMA, **PARTS).parallel)
    assert not {"etp", "ends", "context", "shard_gpus"} & set(parallel)
