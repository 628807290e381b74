"""What it means that ours lies within a published claim."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dse.results.claims import Claim, ClaimResult, judge, within

NUMBERS = st.floats(-1e6, 1e6)


def claim(**fields: Any) -> Claim:
    plain = {"id": "x", "statement": "x", "metric": "x", "unit": "x", "provenance": "abstract", "source": "a paper"}
    return Claim.model_validate({**plain, **fields})


def band(low: float, high: float, value: Any = None) -> Claim:
    return claim(kind="band", value=(low, high) if value is None else value, tolerance=(low, high))


@given(st.tuples(NUMBERS, NUMBERS), st.lists(NUMBERS, min_size=1, max_size=4))
def test_a_range_is_within_a_band_if_each_of_its_ends_is(ends: tuple[float, float], ours: list[float]) -> None:
    low, high = sorted(ends)
    inside = all(low <= end <= high for end in ours)
    assert within(band(low, high), ClaimResult(tuple(ours))) == inside
    assert within(band(low, high, value=low), ClaimResult(tuple(ours))) == inside
    assert within(band(low, high), ClaimResult(ours[0])) == (low <= ours[0] <= high)


@given(NUMBERS, st.floats(0, 1e3))
def test_a_band_is_of_values_and_not_of_differences(middle: float, width: float) -> None:
    """Of any other kind with several values, the tolerance is for the difference of each."""
    assert within(band(middle - width, middle + width), ClaimResult((middle, middle)))
    listed = claim(kind="exact", value=(middle, 2 * middle), tolerance=(-width, width))
    assert within(listed, ClaimResult((middle, 2 * middle)))
    assert not within(listed, ClaimResult((middle + 2 * width + 1, 2 * middle)))


@pytest.mark.parametrize(("ours", "verdict"), [((0.47, 0.75), True), ((0.2, 0.75), False), ((0.47, 0.9), False)])
def test_a_range_that_leaves_its_band_at_either_end_is_a_miss(ours: tuple[float, float], verdict: bool) -> None:
    (row,) = judge([band(0.4, 0.8)], {"x": ClaimResult(ours, "ours", "of another device")})
    assert row["within"] is verdict
    assert row["published"] == [0.4, 0.8]
    assert row["ours"] == ours
    assert row["reason"] == ("ours" if verdict else "ours; of another device")


def test_what_has_no_finding_is_neither_within_nor_a_miss() -> None:
    (row,) = judge([band(0.4, 0.8)], {})
    assert row["within"] is None
    assert row["reason"] == "this study does not test it"
