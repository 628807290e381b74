"""Shapes of a recorded step of BERT beside the closed form's: every product is there, Q, K and V apart."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest

from dse.config.compose import request
from dse_torch.step_shapes import BATCH, LAYERS, LENGTH, Gemm, formula_gemms, record, recorded_gemms, shipped
from simulators.steps.backend import StepBackend
from simulators.steps.design import StepDesign


def closed_form(**model: int) -> StepDesign:
    words = [f"model.{name}={value}" for name, value in {**model, "layers": LAYERS}.items()]
    tree = request(["study=bert", *words, f"run.batch={BATCH}", f"run.sequence_length={LENGTH}"]).tree
    backend = StepBackend()
    (only,) = backend.scenarios(tree).values()
    return backend.design(only)


def apart(gemms: Counter[Gemm], hidden: int) -> Counter[Gemm]:
    """GEMMs with that of Q, K and V split in three of a third of its columns."""
    counts: Counter[Gemm] = Counter()
    for gemm, times in gemms.items():
        batch, *sizes = gemm
        fused = batch == 1 and 3 * hidden in sizes
        m, n, k = (hidden if fused and size == 3 * hidden else size for size in sizes)
        counts[batch, min(m, n), max(m, n), k] += times * (3 if fused else 1)
    return counts


def flop(gemms: Counter[Gemm]) -> int:
    return sum(2 * math.prod(gemm) * times for gemm, times in gemms.items())


def test_the_closed_form_has_every_product_of_the_recorded_step_with_q_k_and_v_in_one() -> None:
    recorded, formula = recorded_gemms(shipped()), formula_gemms(closed_form())
    assert apart(formula, 1024) == recorded != formula
    assert flop(recorded) == flop(formula)


@pytest.mark.slow
def test_a_step_of_other_sizes_is_recorded_as_the_closed_form_counts_it(torch: Any) -> None:
    sizes = {"hidden": 64, "ffn": 320, "heads": 4, "vocab": 500, "positions": 512}
    assert recorded_gemms(record(sizes)) == apart(formula_gemms(closed_form(**sizes)), sizes["hidden"])
