"""Block formats: how many bits they take, and which of them cannot be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from simulators.hardware.number_formats import Format
from studies.jitq import numerics
from tests.support import shipped

FORMATS = {name: Format.model_validate(tree) for name, tree in shipped("format").items()}
SHARED = {"mx9": 7, "mx6": 4, "mx4": 2}  # bits of a magnitude
OCP = ("mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4_e2m1", "mxint8")


def test_formats_take_as_many_bits_as_they_are_called() -> None:
    assert {name: FORMATS[name].bits_per_element for name in SHARED} == {"mx9": 9, "mx6": 6, "mx4": 4}
    assert all(FORMATS[name].bits_per_element == bits + 2 for name, bits in SHARED.items())
    assert {name: FORMATS[name].bytes_per_element for name in SHARED} == {"mx9": 1.125, "mx6": 0.75, "mx4": 0.5}
    bits = [FORMATS[name].bits_per_element for name in OCP]
    assert bits == [8.25, 8.25, 6.25, 6.25, 4.25, 8.25]


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_every_constant_has_a_source_and_every_source_a_constant(name: str) -> None:
    facts = [path.partition(".")[2] for path, *_ in FORMATS[name].facts_below(name)]
    assert all(any(fact == path or fact.startswith(f"{path}.") for fact in facts) for path in FORMATS[name].sources)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"block": 15}, "block = 15 is no multiple of sub_block = 2"),
        ({"element": {"exponent_bits": 5, "mantissa_bits": 3}}, "has 9 bits"),
        ({"element": {"exponent_bits": 0, "mantissa_bits": 3, "top": "nan"}}, "has no NaN"),
        ({"element": {"exponent_bits": 4, "mantissa_bits": 3, "negative": "complement"}}, "is for integers"),
    ],
)
def test_a_format_that_cannot_be_is_refused(change: dict[str, Any], part: str) -> None:
    with pytest.raises(ValidationError, match=part):
        Format.model_validate({**shipped("format")["mx9"], **change})


# Numbers that are really quantised

VALUES = st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=70).map(np.array)


@given(VALUES, st.sampled_from(sorted(FORMATS)))
def test_quantised_values_are_near_and_stay_as_they_are(values: Any, name: str) -> None:
    format = FORMATS[name]
    once = numerics.quantise(values, format, 0)
    np.testing.assert_array_equal(numerics.quantise(once, format, 0), once)
    np.testing.assert_array_equal(
        numerics.quantise(-values, FORMATS["mx9"], 0), -numerics.quantise(values, FORMATS["mx9"], 0)
    )
    largest = np.array([np.abs(values[at - at % format.block :][: format.block]).max() for at in range(len(values))])
    element = format.element
    # half a step of the block's largest value, or what lies beyond the largest number
    reach = 2.0**-element.mantissa_bits * (2 if element.exponent_bits == 0 else 1)
    assert (np.abs(once - values) <= reach * largest + 1e-30).all()


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("mx9", [1.0, 1.0 + 2**-6, 0.25, 1 / 512], [1.0, 1.0 + 2**-6, 0.25, 0.0]),  # 1/512 is below half of 2^-7
        ("mx4", [1.0, 0.7, 0.3, 0.1], [1.0, 0.5, 0.25, 0.0]),  # the second pair is shifted by one bit
        ("mxint8", [1.0, -2 + 2**-9, 0.0, 2**-6], [1.0, -2.0, 0.0, 2**-6]),
        ("mxfp8_e4m3", [448.0, 500.0, 1.0, 2**-10], [448.0, 448.0, 1.0, 0.0]),
        ("mxfp4_e2m1", [6.0, 5.1, 2.4, 0.2], [6.0, 6.0, 2.0, 0.0]),
        ("mxfp4_e2m1", [6.0, 2.5, 0.25, 0.75], [6.0, 2.0, 0.0, 1.0]),  # ties to even
    ],
)
def test_a_block_is_rounded_as_its_specification_says(name: str, values: list[float], expected: list[float]) -> None:
    np.testing.assert_allclose(numerics.quantise(np.array(values), FORMATS[name], 0), expected)


def test_blocks_lie_along_the_axis_that_is_named() -> None:
    values = np.ones((32, 32))
    values[0, :] = 1e4
    rows, cols = (numerics.quantise(values, FORMATS["mxfp4_e2m1"], axis) for axis in (0, 1))
    assert (rows[1:] == 0).all() and (cols[1:] == 1).all()
    with pytest.raises(ValueError, match="finite"):
        numerics.quantise(np.array([np.inf]), FORMATS["mx9"], 0)


@pytest.mark.slow
def test_more_bits_err_less_and_copies_of_mx9_train_like_none() -> None:
    errors = pd.DataFrame(numerics.errors({name: FORMATS[name] for name in SHARED})).set_index(["weights", "format"])
    for kind in ("normal", "heavy tails"):
        for column in ("weights_db", "forward_db", "backward_db"):
            mx9, mx6, mx4 = errors.loc[kind][column].astype(float)
            # a bit of mantissa is 6 dB
            assert mx9 - mx6 == pytest.approx(18.1, abs=2)
            assert mx6 - mx4 == pytest.approx(12.0, abs=2)
    copies = {name: (FORMATS[name], FORMATS[name]) for name in ("mx9", "mx4")}
    loss = {row["copies"]: row["loss"] for row in numerics.losses({"none": (None, None), **copies})}
    assert abs(loss["mx9"] / loss["none"] - 1) < 0.1 < loss["mx4"] / loss["none"] - 1
