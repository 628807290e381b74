"""Iterations of recurrent models: work by closed forms, and SeqPoint on what they take."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from simulators.costs.gemm.fitted import FittedGemms
from simulators.hardware.device import Device
from simulators.hardware.machine import tree_of
from simulators.steps.epochs.seqpoint import Iterations, choose, cut_parallel, cut_sequential, project_epoch
from simulators.steps.operators.recurrent import speech_blocks, translation_blocks
from simulators.steps.operators.work import ModelBlock, Op, OperatorCost, Platform, operator_costs
from simulators.workloads.model import Run, Speech, Translation
from simulators.workloads.sequence_lengths import Lengths, iteration_lengths
from tests.support import shipped

Floats = NDArray[np.float64]
Model = Speech | Translation

VEGA = FittedGemms.of(Device.of(tree_of("vega_fe")), "fp32")
GPUS = ("vega_fe", "vega_fe_852mhz", "vega_fe_16_cus", "vega_fe_no_l1", "vega_fe_no_l2")
DS2 = Speech.model_validate(shipped("model")["ds2"])
GNMT = Translation.model_validate(shipped("model")["gnmt"])


def run(length: Any, **changes: Any) -> Run:
    """An iteration of 64 sequences; length: a number, or an array."""
    base = Run.model_validate({"batch": 64, "sequence_length": 1, "precision": "fp32", **changes})
    return base.model_copy(update={"sequence_length": length})


def blocks_of(model: Model, length: Any, **changes: Any) -> tuple[ModelBlock, ...]:
    settings = run(length, **changes)
    return speech_blocks(model, settings) if isinstance(model, Speech) else translation_blocks(model, settings)


def taken(blocks: Sequence[ModelBlock], chip: FittedGemms = VEGA) -> list[tuple[ModelBlock, Op, OperatorCost]]:
    """Each operator with what it takes once."""
    pairs = [(block, op) for block in blocks for op in block.ops]
    costs = operator_costs([op for _, op in pairs], Platform(chip, chip))
    return [(block, op, cost) for (block, op), cost in zip(pairs, costs, strict=True)]


def total(what: str, blocks: Sequence[ModelBlock], chip: FittedGemms = VEGA, **only: str) -> Floats:
    """Sum of flop, bytes or seconds of the operators of some `kind` or `phase`."""
    values = [
        getattr(cost, what) * np.asarray(op.count) * np.asarray(block.count)
        for block, op, cost in taken(blocks, chip)
        if all(getattr(op, name) == value for name, value in only.items())
    ]
    return np.asarray(sum(values, np.zeros(())))


# Work


@pytest.mark.parametrize(("cell", "gates"), [("lstm", 4), ("gru", 3), ("vanilla", 1)])
@pytest.mark.parametrize("directions", [1, 2])
def test_a_recurrent_layer_does_the_work_of_its_input_and_its_state_three_times(
    cell: str, gates: int, directions: int
) -> None:
    model = DS2.model_copy(update={"cell": cell, "bidirectional": directions == 2})
    (layer,) = (block for block in blocks_of(model, 300) if block.name == "recurrent layers")
    assert layer.count == 4
    n, t, h = 64, 150, 800
    assert total("flop", [layer], kind="linear") / 4 == 3 * directions * 2 * gates * h * h * n * t
    assert total("flop", [layer], kind="recurrent") / 4 == 3 * directions * 2 * gates * h * h * n * t
    assert total("flop", [layer], kind="recurrent", phase="forward") / 4 == directions * 2 * gates * h * h * n * t
    assert layer.params == directions * gates * h * (h + h + 2) + 2 * h
    assert layer.kept == 4 * n * t * h * (2 + directions * (gates + 1))  # the norm's input, the product's, gates, state


def test_a_speech_recogniser_is_convolutions_recurrent_layers_and_an_output() -> None:
    first, second, layer, later, output = blocks_of(DS2, 301)
    n, t = 64, 151
    assert total("flop", [first], kind="convolution") == 2 * 2 * n * 81 * t * 32 * 41 * 11  # no gradient of the input
    assert total("flop", [second], kind="convolution") == 3 * 2 * n * 41 * t * 32 * 32 * 21 * 11
    assert total("flop", [layer], kind="linear") == 3 * 2 * (2 * 3 * 800 * (32 * 41) * n * t)
    assert total("flop", [output], kind="output") == 3 * 2 * 29 * 800 * n * t
    filters = 32 * (41 * 11 + 32 * 21 * 11) + 2 * 3 * 32
    recurrent = 2 * 3 * 800 * (32 * 41 + 800 + 2) + 4 * (2 * 3 * 800 * (2 * 800 + 2) + 2 * 800)
    params = sum(np.asarray(block.params) * block.count for block in (first, second, layer, later, output))
    assert params == filters + recurrent + 800 * 29 + 2 * 800


def test_a_translator_is_two_stacks_of_lstm_layers_with_attention_between() -> None:
    blocks = blocks_of(GNMT, 25)
    n, s, t, h, v = 64, 25, 31, 1024, 32317
    cell = 2 * 4 * h * h * n
    assert total("flop", blocks, kind="recurrent") == 3 * cell * (5 * s + 4 * t)
    assert total("flop", blocks, kind="linear") == 3 * cell * ((2 + 2 + 1 + 1) * s + (1 + 2 + 2 + 2) * t)
    assert total("flop", blocks, kind="output") == 3 * 2 * v * h * n * t
    products = 2 * h * h * n * (s + t) + 2 * n * s * h * t
    assert total("flop", blocks, kind="attention") == 3 * products
    lstm = 4 * h * (2 * h + 2)
    wide = 4 * h * (3 * h + 2)
    params = sum(float(np.asarray(block.params) * np.asarray(block.count)) for block in blocks)
    assert params == v * h + 2 * lstm + wide + 2 * lstm + lstm + 3 * wide + (2 * h * h + 2 * h + 1) + v * (h + 1)


@pytest.mark.parametrize("model", [DS2, GNMT], ids=lambda model: model.name)
def test_without_training_there_is_only_the_forward_pass(model: Model) -> None:
    training, prefill = blocks_of(model, 100), blocks_of(model, 100, mode="prefill")
    assert {op.phase for block in prefill for op in block.ops} == {"forward"}
    names = [[op.name for op in block.of("forward")] for block in training]
    assert [[op.name for op in block.ops] for block in prefill] == names
    assert total("seconds", prefill) == pytest.approx(total("seconds", training, phase="forward"))
    assert [block.params for block in prefill] == [block.params for block in training]
    assert not any(block.kept for block in prefill)


@pytest.mark.parametrize("model", [DS2, GNMT], ids=lambda model: model.name)
def test_more_of_anything_takes_longer_and_16_bits_move_half(model: Model) -> None:
    base_s = total("seconds", blocks_of(model, 100))
    assert total("seconds", blocks_of(model, 200)) > base_s
    assert total("seconds", blocks_of(model, 100, batch=128)) > base_s
    streams = [total("bytes", blocks_of(model, 100, precision=name), kind="norm") for name in ("fp32", "mixed")]
    assert streams[0] == 2 * streams[1]


@pytest.mark.parametrize("name", GPUS)
def test_every_number_of_a_gpu_run_otherwise_has_a_source_and_none_makes_it_faster(name: str) -> None:
    device = Device.of(tree_of(name))
    changed = {path for path, *_ in device.facts_below("") if re.search("clock|active_cus|without_cache", path)}
    assert bool(changed) == (name != "vega_fe")
    blocks = blocks_of(DS2, 800)
    slow, fast = total("seconds", blocks, FittedGemms.of(device, "fp32")), total("seconds", blocks)
    assert slow == fast if name == "vega_fe" else slow > 1.02 * fast
    assert device.gpu.as_described == Device.of(tree_of("vega_fe")).gpu


# SeqPoint: the iterations of an epoch on five configurations


def on_all_gpus(model: Model, sizes: NDArray[np.int64]) -> Floats:
    """Seconds [configurations, N] of an epoch's iterations."""
    unique, places = np.unique(sizes, return_inverse=True)
    chips = [FittedGemms.of(Device.of(tree_of(name)), "fp32") for name in GPUS]
    blocks = blocks_of(model, unique)
    return np.stack([total("seconds", blocks, chip)[places] for chip in chips])


def chosen_by(method: str, sizes: NDArray[np.int64], seconds: Floats) -> tuple[float, float, Any]:
    """Errors of time and of speed-up, each a geometric mean over configurations, and the sample."""
    sample = choose(Iterations.model_validate(shipped("iterations")[method]), sizes, seconds[0])
    true, projected = seconds.sum(-1), project_epoch(sample, seconds)
    speedup = (projected[0] / projected[1:]) / (true[0] / true[1:])
    errors = (np.abs(projected / true - 1), np.abs(speedup - 1))
    time, faster = (float(np.exp(np.log(np.maximum(error, 1e-12)).mean())) for error in errors)
    return time, faster, sample


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("model", "data", "time_error", "speedup_error", "cuts"),
    [
        (DS2, "librispeech_100", 0.0011, 0.0013, (170, 690)),
        (DS2, "librispeech_100_shuffled", 0.0011, 0.0013, (170, 690)),
        (GNMT, "iwslt15", 0.0053, 0.015, (107, 428)),
        (GNMT, "iwslt15_buckets_10", 0.0053, 0.015, (107, 428)),
    ],
    ids=["ds2", "ds2 shuffled", "gnmt", "gnmt buckets"],
)
def test_a_few_iterations_project_an_epoch_on_other_configurations(
    model: Model, data: str, time_error: float, speedup_error: float, cuts: tuple[float, float], seed: int
) -> None:
    sizes = iteration_lengths(Lengths.model_validate(shipped("lengths")[data]), 64, seed)
    seconds = on_all_gpus(model, sizes)
    time, speedup, sample = chosen_by("seqpoint", sizes, seconds)
    assert len(sample.places) <= 25
    assert time < time_error
    assert speedup < speedup_error
    assert cuts[0] < cut_parallel(sample, seconds[0]) < cuts[1]
    assert 20 < cut_sequential(sample, seconds[0]) < 150


@pytest.mark.parametrize(("model", "data"), [(DS2, "librispeech_100"), (GNMT, "iwslt15")])
def test_single_iterations_project_ordered_epochs_far_worse(model: Model, data: str) -> None:
    sizes = iteration_lengths(Lengths.model_validate(shipped("lengths")[data]), 64, 0)
    seconds = on_all_gpus(model, sizes)
    best = chosen_by("seqpoint", sizes, seconds)[0]
    errors_of = {name: chosen_by(name, sizes, seconds)[0] for name in ("frequent", "median", "worst", "prior")}
    assert min(errors_of.values()) > 10 * best
    assert max(errors_of.values()) == errors_of["worst"]
