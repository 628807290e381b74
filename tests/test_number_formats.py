"""Block formats: how many bits they take, and which of them cannot be."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from simulators.hardware.pim import Format
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
