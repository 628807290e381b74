"""Groups of residuals that measured rows are fitted to: their quantiles, sizes, and what few rows borrow."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dse_calibration.residual_groups import (
    FEWEST,
    ResidualRow,
    common_shares,
    fit_groups,
    own_groups,
    quantiles,
    unseen_groups,
)
from simulators.hardware.residuals import ResidualGroup, Residuals

NARROW = ResidualGroup("gemm", "h100", rows=99, low=-0.1, median=0.0, high=0.2, common=0.25, basis="own", source="t")


def rows_of(
    count: int, *, gpu: str = "h100", spread: float = 0.1, key: str = "bf16", seed: int = 0
) -> list[ResidualRow]:
    """Rows of GEMMs whose small sizes are off ten times as much."""
    rng = np.random.default_rng(seed)
    sizes = 2.0 ** rng.integers(1, 20, count)
    off = rng.normal(0, spread, count) * np.where(sizes < 64, 10, 1)
    return [
        ResidualRow("gemm", gpu, key, f"{gpu} {place}", float(value), {"n": float(size)}, "table")
        for place, (value, size) in enumerate(zip(off, sizes, strict=True))
    ]


@given(st.integers(FEWEST, 60), st.integers(0, 1000))
def test_quantiles_hold_a_new_row_nine_times_in_ten(count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    drawn = rng.random((400, count + 1))
    spans = [quantiles(rows[:-1]) for rows in drawn]
    share = np.mean([low <= rows[-1] <= high for rows, (low, _, high) in zip(drawn, spans, strict=True)])
    assert share >= 0.85


def test_groups_are_of_sizes_where_errors_differ() -> None:
    rows = rows_of(800)
    residuals = Residuals(tuple(fit_groups(rows, common=common_shares(rows))))
    small, large = (residuals.of("gemm", "h100", "bf16", {"n": n}) for n in (4.0, 4096.0))
    assert small.high - small.low > 4 * (large.high - large.low)
    fresh = [(row, residuals.of("gemm", "h100", "bf16", row.sizes)) for row in rows_of(800, seed=1)]
    assert 0.87 < np.mean([group.low <= row.residual <= group.high for row, group in fresh]) < 0.95


def test_few_rows_borrow_and_two_give_no_distribution() -> None:
    plenty, few = rows_of(200), rows_of(5, key="fp8", seed=2)
    groups = fit_groups([*plenty, *few], common={"gemm": 0.3})
    (borrowed,) = [group for group in groups if group.key == "fp8" and group.gpu == "h100"]
    all_keys = next(group for group in groups if group.gpu == "h100" and not group.key)
    assert borrowed.basis.startswith("borrows") and borrowed.low <= all_keys.low and borrowed.high >= all_keys.high
    assert fit_groups(rows_of(2), common={"gemm": 0.3}) == []


def test_a_gpu_that_was_not_measured_is_wider_than_those_that_were() -> None:
    near, far = rows_of(100), [replace(row, gpu="b200", residual=row.residual + 0.5) for row in rows_of(100)]
    (unseen,) = unseen_groups([*near, *far])
    assert unseen.low < quantiles(np.array([row.residual for row in near]))[0]
    assert unseen.high > quantiles(np.array([row.residual for row in far]))[2]
    assert unseen_groups(near)[0].is_guess  # one GPU shows nothing of how GPUs differ


def test_rows_of_ones_own_make_intervals_narrower() -> None:
    wide = Residuals((replace(NARROW, low=-0.5, high=0.5),))
    groups = own_groups(rows_of(100, spread=0.01), wide)
    assert max(group.high - group.low for group in groups) < 0.5
    (few,) = own_groups(rows_of(4, spread=0.01), wide)
    assert (few.low, few.high) == (-0.5, 0.5) and few.basis == "borrows from gemm h100"
