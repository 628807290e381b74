"""Block formats: bit by bit against ml_dtypes, against a slow implementation of other papers' formulas, properties."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from conftest import shipped
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from pydantic import ValidationError

from simulators.hardware.number_formats import Element, Encoded, Format, dequantise, quantise

FORMATS = {name: Format.model_validate(tree) for name, tree in shipped("format").items()}
SHARED = {"mx9": 7, "mx6": 4, "mx4": 2}  # bits of a magnitude
OCP = {
    "mxfp8_e4m3": ml_dtypes.float8_e4m3fn,
    "mxfp8_e5m2": ml_dtypes.float8_e5m2,
    "mxfp6_e3m2": ml_dtypes.float6_e3m2fn,
    "mxfp6_e2m3": ml_dtypes.float6_e2m3fn,
    "mxfp4_e2m1": ml_dtypes.float4_e2m1fn,
    "mxint8": np.int8,
}
FLOATS = [name for name in OCP if name != "mxint8"]
Values = list[float]


def there_and_back(values: Any, name: str, axis: int = -1) -> NDArray[np.float64]:
    return dequantise(quantise(values, FORMATS[name], axis))


def samples(rows: int = 400, columns: int = 64) -> NDArray[np.float32]:
    """Blocks of one scale and of many, values half-way between numbers, zeros."""
    random = np.random.default_rng(7)
    one = random.standard_normal((rows, columns))
    kinds = [
        one * np.exp2(random.integers(-30, 30, (rows, 1))),
        one * np.exp2(random.uniform(-12, 12, (rows, columns))),
        np.round(one * 64) / 64,
        random.choice([0, 1, -1, 1.5, 1.25, -0.75, 2, 1.9999], (rows, columns)),
        random.integers(-4096, 4096, (rows, columns)) / np.exp2(random.integers(4, 12, (rows, 1))),
    ]
    return np.concatenate(kinds).astype(np.float32)


numbers = st.floats(-(2.0**100), 2.0**100, width=32).filter(lambda value: value == 0 or abs(value) > 2.0**-100)
blocks = st.lists(numbers, min_size=1, max_size=70)
names = st.sampled_from(sorted(FORMATS))


# What is stored


def test_formats_take_as_many_bits_as_they_are_called() -> None:
    assert {name: FORMATS[name].bits_per_element for name in SHARED} == {"mx9": 9, "mx6": 6, "mx4": 4}
    assert all(FORMATS[name].bits_per_element == bits + 2 for name, bits in SHARED.items())
    assert {name: FORMATS[name].bytes_per_element for name in SHARED} == {"mx9": 1.125, "mx6": 0.75, "mx4": 0.5}
    found = [FORMATS[name].bits_per_element for name in OCP]
    assert found == [8.25, 8.25, 6.25, 6.25, 4.25, 8.25]


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_every_constant_has_a_source_and_every_source_a_constant(name: str) -> None:
    facts = [path.partition(".")[2] for path, *_ in FORMATS[name].facts_below(name)]
    assert all(any(fact == path or fact.startswith(f"{path}.") for fact in facts) for path in FORMATS[name].sources)


def test_shapes_are_as_the_docstring_says() -> None:
    encoded = quantise(np.ones((3, 40, 5)), FORMATS["mx9"], axis=1)
    assert encoded.scales.shape == (3, 5, 3)
    assert encoded.sub_scales.shape == (3, 5, 3, 8)
    assert encoded.elements.shape == (3, 5, 3, 16)
    assert dequantise(encoded).shape == (3, 40, 5)


def test_copies_along_rows_and_columns_differ() -> None:
    weights = samples()[:64]
    down, along = there_and_back(weights, "mx9", 0), there_and_back(weights, "mx9", 1)
    assert not np.array_equal(down, along)
    assert np.array_equal(down, there_and_back(weights.T, "mx9", 1).T)


def test_an_axis_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match=r"axis = 2: values of shape \(2, 3\) have no such axis"):
        quantise(np.ones((2, 3)), FORMATS["mx9"], axis=2)


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


# Elements, against ml_dtypes


@pytest.mark.parametrize("name", FLOATS)
def test_every_code_of_an_element_is_the_number_that_ml_dtypes_has(name: str) -> None:
    element = FORMATS[name].element
    theirs = np.arange(1 << element.bits, dtype=np.uint8).view(OCP[name]).astype(np.float64)
    assert np.array_equal(element.numbers(), theirs, equal_nan=True)
    assert element.numbers()[element.largest_code] == float(ml_dtypes.finfo(OCP[name]).max)  # type: ignore[no-untyped-call]


def test_codes_of_integers_are_twos_complement() -> None:
    element = FORMATS["mxint8"].element
    assert np.array_equal(element.numbers() * 64, np.arange(256, dtype=np.uint8).view(np.int8))


def test_every_scale_is_the_number_that_ml_dtypes_has() -> None:
    stored = np.arange(256, dtype=np.uint8)
    theirs = stored.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    ones = np.full((256, 1, 32), 64, np.uint8)
    found = dequantise(Encoded(FORMATS["mxint8"], -1, (256, 32), stored[:, None], np.zeros_like(ones), ones))
    assert np.array_equal(found[:, 0], theirs, equal_nan=True)


@pytest.mark.parametrize("name", OCP)
def test_stored_bits_are_those_of_ml_dtypes_given_the_scale(name: str) -> None:
    values = samples().reshape(-1, 32)
    encoded = quantise(values, FORMATS[name])
    largest = np.abs(values).max(-1).astype(np.float64)
    emax = FORMATS[name].element.largest_exponent
    scale = np.exp2(np.clip(np.floor(np.log2(np.where(largest > 0, largest, 2.0**-200))) - emax, -127, 127))
    assert np.array_equal(encoded.scales[:, 0], scale.astype(ml_dtypes.float8_e8m0fnu).view(np.uint8))
    limit = FORMATS[name].element.numbers()[FORMATS[name].element.largest_code]
    scaled = np.clip(values / scale[:, None], -limit, limit)
    theirs = np.rint(scaled * 64).astype(np.int8) if name == "mxint8" else scaled.astype(OCP[name])
    assert np.array_equal(encoded.elements[:, 0], theirs.view(np.uint8))
    back = theirs.astype(np.float64) / (64 if name == "mxint8" else 1) * scale[:, None]
    assert np.array_equal(dequantise(encoded), back)


# Whole blocks, against the formulas of others

ROW = [
    *(5.25, -3.4375, 0.15625, 0.0, 1.0, -7.96875, 0.046875, 2.625, -0.625, 3.5, 0.4375, -1.25, 6.5, -0.0078125),
    *(0.09375, -2.875, 0.75, -0.34375, 4.75, 0.28125, -5.75, 1.875, 0.0234375, -0.5625, 7.0, -4.25, 0.21875, 2.25),
    *(-0.125, 1.4375, -6.75, 0.375),
]
# `_quantize_mx` of microsoft/microxcaling, commit 7bc4195 (MIT), scale_bits 8, round "even": times 128
MICROXCALING = {
    "mxfp8_e4m3": "640 -448 20 0 128 -896 6 320 -80 448 56 -160 832 -1 12 -384 "
    "96 -44 640 36 -768 240 3 -72 896 -512 28 288 -16 192 -896 48",
    "mxfp8_e5m2": "640 -448 20 0 128 -896 6 320 -80 448 56 -160 768 -1 12 -384 "
    "96 -48 640 32 -768 256 3 -64 896 -512 28 256 -16 192 -896 48",
    "mxfp6_e3m2": "640 -448 20 0 128 -896 6 320 -80 448 56 -160 768 0 12 -384 "
    "96 -48 640 32 -768 256 4 -64 896 -512 28 256 -16 192 -896 48",
    "mxfp6_e2m3": "640 -448 16 0 128 -960 0 320 -80 448 64 -160 832 0 16 -384 "
    "96 -48 640 32 -768 240 0 -64 896 -512 32 288 -16 192 -896 48",
    "mxfp4_e2m1": "768 -384 0 0 128 -768 0 384 -64 512 64 -128 768 0 0 -384 "
    "128 -64 512 64 -768 256 0 -64 768 -512 0 256 0 192 -768 64",
    "mxint8": "672 -440 16 0 128 -1016 8 336 -80 448 56 -160 832 0 16 -368 "
    "96 -48 608 32 -736 240 0 -72 896 -544 32 288 -16 184 -864 48",
}
# `real_quantize_mx6_mx9` of AMD Quark 0.13 (MIT) of ROW / 4: exponent, shifts as bits, codes, of each block
QUARK = {
    "mx9": "0 186 84 -55 5 0 16 -127 2 84 -20 112 14 -40 104 0 3 -92 "
    "0 105 24 -11 76 4 -92 30 1 -18 112 -68 7 72 -4 46 -108 6",
    "mx6": "0 186 10 -7 1 0 2 -15 0 10 -2 14 2 -5 13 0 0 -12 0 105 3 -1 10 1 -12 4 0 -2 14 -8 1 9 0 6 -14 1",
    "mx4": "0 186 3 -2 0 0 0 -3 0 3 -1 3 0 -1 3 0 0 -3 0 105 1 0 2 0 -3 1 0 -1 3 -2 0 2 0 1 -3 0",
}


@pytest.mark.parametrize("name", OCP)
def test_values_are_those_that_microxcaling_gives(name: str) -> None:
    assert (there_and_back(ROW, name) * 128).tolist() == list(map(float, MICROXCALING[name].split()))


@pytest.mark.parametrize("name", SHARED)
def test_what_is_stored_is_what_quark_gives(name: str) -> None:
    encoded = quantise(np.array(ROW) / 4, FORMATS[name])
    bits = (encoded.sub_scales.astype(int) << np.arange(8)).sum(-1)
    sign = np.where(encoded.elements >> SHARED[name], -1, 1)
    codes = sign * (encoded.elements & FORMATS[name].element.largest_code)
    found = np.concatenate([encoded.scales[:, None].astype(int) - 127, bits[:, None], codes], axis=-1)
    assert found.ravel().tolist() == list(map(int, QUARK[name].split()))


def even(value: float) -> int:
    """The nearest whole number, ties to even."""
    down = math.floor(value)
    if value - down == 0.5:
        return down + down % 2
    return down if value - down < 0.5 else down + 1


def log2(value: float) -> int:
    return math.frexp(value)[1] - 1


OCP_PARAMETERS = {  # exponent bits, mantissa bits with sign and hidden bit, emax, largest number
    "mxfp8_e4m3": (4, 5, 8, 448.0),
    "mxfp8_e5m2": (5, 4, 15, 57344.0),
    "mxfp6_e3m2": (3, 4, 4, 28.0),
    "mxfp6_e2m3": (2, 5, 2, 7.5),
    "mxfp4_e2m1": (2, 3, 2, 6.0),
    "mxint8": (0, 8, 0, 127 / 64),
}


def ocp(block: Sequence[float], name: str) -> Values:
    """One block, value after value, by the formulas of microxcaling (`_quantize_mx`, `_quantize_elemwise_core`)."""
    exponent_bits, mantissa_bits, emax, largest = OCP_PARAMETERS[name]
    most = max(map(abs, block))
    scale = math.ldexp(1.0, max((log2(most) if most else -126) - emax, -127))
    found = []
    for value in block:
        scaled = abs(value) / scale
        private = max(log2(scaled) if scaled else 0, 2 - 2 ** (exponent_bits - 1)) if exponent_bits else 0
        step = math.ldexp(1.0, private - (mantissa_bits - 2))
        found.append(math.copysign(min(even(scaled / step) * step, largest) * scale, value))
    return found


def shared(block: Sequence[float], bits: int) -> Values:
    """One block of 16, by the formulas of Quark (`_compute_mx_exponents`, `_mx6_mx9_codes`)."""
    most = max(map(abs, block))
    found = []
    for first in range(0, len(block), 2):
        pair = block[first : first + 2]
        below = all(value == 0 or log2(abs(value)) < log2(most) for value in pair)
        step = math.ldexp(1.0, (log2(most) if most else 0) - below - bits + 1)
        found += [math.copysign(min(even(abs(value) / step), 2**bits - 1) * step, value) for value in pair]
    return found


@given(blocks, names)
def test_blocks_are_those_of_a_slow_implementation(values: Values, name: str) -> None:
    size = FORMATS[name].block
    filled = values + [0.0] * (-len(values) % size)
    slow: Values = []
    for first in range(0, len(filled), size):
        block = filled[first : first + size]
        slow += shared(block, SHARED[name]) if name in SHARED else ocp(block, name)
    assert np.array_equal(there_and_back(values, name), slow[: len(values)])


# Properties


@given(blocks, names)
def test_what_was_quantised_stays_as_it_is(values: Values, name: str) -> None:
    once = there_and_back(values, name)
    assert np.array_equal(there_and_back(once, name), once)


@given(blocks, names)
def test_numbers_of_a_sub_block_keep_their_order(values: Values, name: str) -> None:
    size = FORMATS[name].sub_block if FORMATS[name].sub_bits else FORMATS[name].block
    found = there_and_back(values, name)
    for first in range(0, len(values), size):
        order = np.argsort(values[first : first + size], kind="stable")
        assert (np.diff(found[first : first + size][order]) >= 0).all()


def test_numbers_of_one_block_need_not_keep_their_order() -> None:
    """A pair that is shifted has half the step of another."""
    values = [1.0, 0.26, 0.3, 0.3]
    found = there_and_back(values, "mx4")
    assert found.tolist() == [1.0, 0.5, 0.25, 0.25]


@given(blocks, names, st.integers(-20, 20))
def test_a_power_of_two_goes_through(values: Values, name: str, power: int) -> None:
    plain = there_and_back(values, name)
    assert np.array_equal(there_and_back(np.ldexp(values, power), name), np.ldexp(plain, power))


@given(blocks, names)
def test_the_error_is_at_most_half_a_step(values: Values, name: str) -> None:
    """Of numbers up to the largest; those above it, and below twice the largest exponent's power, are cut to it."""
    form = FORMATS[name]
    encoded = quantise(values, form)
    shift = np.repeat(encoded.sub_scales.astype(int), form.sub_block, -1)
    unit = np.exp2(encoded.scales.astype(float)[..., None] - 127 - shift).reshape(-1)[: len(values)]
    scaled = np.abs(values) / unit
    largest = form.element.numbers()[form.element.largest_code]
    assert (scaled < 2.0 ** (form.element.largest_exponent + 1)).all()
    with np.errstate(divide="ignore"):
        exponent = np.maximum(np.floor(np.log2(scaled)), form.element.smallest_exponent)
    step = np.exp2((exponent if form.element.exponent_bits else 0) - form.element.fraction_bits)
    error = np.abs(dequantise(encoded) - values) / unit
    assert np.where(scaled <= largest, error <= step / 2, np.isclose(error, scaled - largest, rtol=0, atol=0)).all()


# What is no number, and the ends of the range


@pytest.mark.parametrize("name", sorted(FORMATS))
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_block_with_what_is_no_number_is_none(name: str, bad: float) -> None:
    values = np.ones(2 * FORMATS[name].block)
    values[3] = bad
    encoded = quantise(values, FORMATS[name])
    assert encoded.scales.tolist() == [255, 127 - FORMATS[name].element.largest_exponent]
    back = dequantise(encoded)
    assert np.isnan(back[: FORMATS[name].block]).all()
    assert (back[FORMATS[name].block :] == 1).all()


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_zeros_stay_zeros_and_have_a_sign_where_the_format_has_one(name: str) -> None:
    back = there_and_back([0.0, -0.0, *[0.0] * 31], name)
    assert (back == 0).all()
    assert np.signbit(back[:2]).tolist() == [False, FORMATS[name].element.negative == "sign"]


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_the_range_ends_where_the_scale_does(name: str) -> None:
    form = FORMATS[name]
    edge = 2.0 ** (127 + form.element.largest_exponent)
    assert there_and_back([edge], name).tolist() == [edge]
    assert np.isnan(there_and_back([2 * edge], name)).all()
    shift = (1 << form.sub_bits) - 1
    smallest = math.ldexp(form.element.numbers()[1], -127 - shift)
    assert there_and_back([smallest, smallest / 4], name).tolist() == [smallest, 0]


def test_ties_go_to_the_even_code() -> None:
    halves = [1.0, 0.0, 0.5, 1.5, 2.5, 3.5]
    element = Element(exponent_bits=0, mantissa_bits=7)
    codes = element.encode(np.array(halves) / 64)
    assert codes.tolist() == [1, 0, 0, 2, 2, 4]
