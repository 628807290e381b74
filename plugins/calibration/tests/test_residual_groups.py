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
    components,
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
    narrow = quantiles(np.array([row.residual for row in near]))
    assert unseen.high - unseen.low > 1.2 * (narrow[2] - narrow[0])
    shares = [np.mean([unseen.low <= row.residual <= unseen.high for row in rows]) for rows in (near, far)]
    assert min(shares) > 0.9  # each by what the other gave, and what is between them
    assert unseen_groups(near)[0].is_guess  # one GPU shows nothing of how GPUs differ


def test_predictions_with_the_constants_of_others_show_how_wide_an_unmeasured_gpu_is() -> None:
    plenty = [*rows_of(100), *(replace(row, gpu="b200") for row in rows_of(100))]
    (narrow,) = unseen_groups(plenty)
    off = {"h100": 0.4, "b200": -0.4}
    carried = [replace(row, residual=row.residual + off[row.gpu], carried="gpu") for row in plenty]
    (wide,) = unseen_groups([*plenty, *carried])
    assert wide.low < narrow.low - 0.1 and wide.high > narrow.high + 0.1
    # what is carried says nothing of a GPU that has rows
    measured = [group for group in fit_groups([*plenty, *carried], common={"gemm": 0.3}) if group.gpu == "h100"]
    assert max(group.high for group in measured) < 0.4 + max(row.residual for row in plenty)
    assert measured == [group for group in fit_groups(plenty, common={"gemm": 0.3}) if group.gpu == "h100"]


def served(model: str, off: float, seed: int) -> list[ResidualRow]:
    """Times of tokens of a model, off by as much on the whole."""
    noise = np.random.default_rng(seed).normal(0, 0.02, 30)
    traits = {"software": "vllm", "gpu": "h100", "model": model, "release": "1"}
    return [
        ResidualRow("tpot", "h100", "together", f"{model} {place}", float(off + value), {}, "table", traits=traits)
        for place, value in enumerate(noise)
    ]


def test_a_name_that_no_row_has_is_as_far_off_as_the_others_are_from_one_another() -> None:
    offs = (-0.3, -0.1, 0.0, 0.1, 0.3)
    rows = [row for place, off in enumerate(offs) for row in served(f"m{place}", off, place)]
    parts = {part.trait: part for part in components(rows)}
    assert set(parts) == {"model"}  # one software, one GPU and one release show nothing of others
    residuals = Residuals(tuple(fit_groups(rows, common={"tpot": 0.5})), between=tuple(parts.values()))
    near, unknown = (
        residuals.of("tpot", "h100", "together", {}, {"model": name, "software": "vllm"}) for name in ("m0", "other")
    )
    assert unknown.unmeasured == ("model",) and near.unmeasured == ()
    assert unknown.low < near.low - 0.05 and unknown.high > near.high + 0.05
    assert unknown.common > near.common  # all operators of a design share what its model is off by
    inside = [unknown.low <= off <= unknown.high for off in np.random.default_rng(1).normal(0, 0.2, 400)]
    assert 0.85 <= np.mean(inside) <= 1


def test_a_key_of_one_name_has_the_component_of_all_keys() -> None:
    def steps(key: str, model: str, off: float) -> list[ResidualRow]:
        return [replace(row, kind="step", key=key) for row in served(model, off, 0)]

    rows = [
        *steps("dense", "a", -0.3),
        *steps("dense", "b", 0.0),
        *steps("dense", "c", 0.3),
        *steps("prefill", "a", 0.0),
    ]
    by_key = {part.key: part for part in components(rows) if part.trait == "model"}
    assert by_key["prefill"].names == {"a"} and by_key["dense"].names == {"a", "b", "c"}
    assert by_key["prefill"].low > 0.1 and by_key["prefill"].high > 0.1


@given(st.integers(2, 9), st.floats(0.05, 1.0))
def test_names_that_differ_more_have_a_larger_component(count: int, spread: float) -> None:
    def component(width: float) -> float:
        places = np.linspace(-width, width, count)
        rows = [row for place, off in enumerate(places) for row in served(f"m{place}", float(off), place)]
        return sum(part.low + part.high for part in components(rows))

    assert component(2 * spread) > component(spread)


def test_rows_of_ones_own_make_intervals_narrower() -> None:
    wide = Residuals((replace(NARROW, low=-0.5, high=0.5),))
    groups = own_groups(rows_of(100, spread=0.01), wide)
    assert max(group.high - group.low for group in groups) < 0.5
    (few,) = own_groups(rows_of(4, spread=0.01), wide)
    assert (few.low, few.high) == (-0.5, 0.5) and few.basis == "borrows from gemm h100"
