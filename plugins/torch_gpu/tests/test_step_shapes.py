"""Shapes of a recorded step of BERT beside the closed form's: every product is there, Q, K and V apart."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest

from dse_torch.step_shapes import (
    BATCH,
    LENGTH,
    Gemm,
    closed_form,
    formula_gemms,
    main,
    passes,
    record,
    recorded_gemms,
    shipped,
)
from simulators.workloads.model_zoo import model_tree


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


def test_each_class_of_passes_is_recorded_and_has_the_formulas_kernels_but_for_what_is_fused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """PyTorch has one kernel for an activation and two for a loss, and copies layouts, which the formula has not."""
    rows = shipped()
    by_class = passes(rows, closed_form(), model_tree("bert_large"))
    unbatched = [row for row in rows if row["phase"] != "optimizer" and row["batch"] == "0"]
    unwritten = sum(int(row["times"]) for row in unbatched if row["operator"] in ("empty_like", "ones_like"))
    assert sum(line[0] for line in by_class.values()) == sum(int(row["times"]) for row in unbatched) - unwritten - 1
    for kind in ("softmax", "norm", "embedding"):
        assert by_class[kind][0] == by_class[kind][2]
    for kind in ("softmax", "activation", "loss", "norm"):
        assert by_class[kind][3] > by_class[kind][1] > 0 and by_class[kind][2] >= by_class[kind][0]
    assert by_class["activation"][:2] == [4, 4 * 4 * 4096 * BATCH * LENGTH] and by_class["layouts"][2:] == [0, 0]
    assert main(["compare"]) == 0 and "activation" in capsys.readouterr().out
    assert main(["other"]) == 2


@pytest.mark.slow
def test_a_step_of_other_sizes_is_recorded_as_the_closed_form_counts_it(torch: Any) -> None:
    sizes = {"hidden": 64, "ffn": 320, "heads": 4, "vocab": 500, "positions": 512}
    assert recorded_gemms(record(sizes)) == apart(formula_gemms(closed_form(**sizes)), sizes["hidden"])
