"""Quantities with units: plain SI floats inside the project, texts such as `64 GB/s` or `1.9 us` at its edge.

The name of a field ends in its unit (`_s`, `_bytes`, `_bytes_per_s`, `_flop_per_s`). In YAML and on the command line a
text with a unit is read, and a wrong dimension refused; a bare number is in the unit of the field's name. What a person
reads is written with the prefix that fits.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from itertools import product
from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

_TEXT = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([A-Za-zµμ]+(?:\s*/\s*[A-Za-zµμ]+)?)\s*")


_PREFIXES: Mapping[str, int | str] = {
    "": 1, "n nano": "1e-9", "µ μ u micro": "1e-6", "m milli": "1e-3",
    "k kilo": "1e3", "M mega": "1e6", "G giga": "1e9", "T tera": "1e12", "P peta": "1e15", "E exa": "1e18",
    "Ki kibi": 2**10, "Mi mebi": 2**20, "Gi gibi": 2**30, "Ti tebi": 2**40,
}  # fmt: skip
# Size, and powers of time, information, operations and power: were a byte a pure number, 64 GHz would be a bandwidth.
_BASES = {
    "s second": (1, (1, 0, 0, 0)),
    "min minute": (60, (1, 0, 0, 0)),
    "Hz hertz": (1, (-1, 0, 0, 0)),
    "bit": (1, (0, 1, 0, 0)),
    "B byte": (8, (0, 1, 0, 0)),
    "FLOP flop": (1, (0, 0, 1, 0)),
    "W watt": (1, (0, 0, 0, 1)),
}


@functools.cache
def _units() -> Mapping[str, tuple[Decimal, tuple[int, ...]]]:
    """Name of every unit with a prefix, also in the plural -> its size and its powers."""
    return {
        f"{prefix}{name}{plural}": (Decimal(scale) * size, powers)
        for prefixes, scale in _PREFIXES.items()
        for names, (size, powers) in _BASES.items()
        for prefix, name, plural in product(prefixes.split() or [""], names.split(), ("", "s"))
        if len(name) > 1 or not plural  # symbols have no plural: Bs is no unit
    }


def _unit(symbol: str) -> tuple[Decimal, tuple[int, ...]]:
    """Size and powers of a unit, or of a quotient of two. Raises KeyError for one that is unknown."""
    name, _, per = symbol.replace(" ", "").partition("/")
    size, powers = _units()[name]
    below, powers_below = _units()[per] if per else (Decimal(1), (0, 0, 0, 0))
    return size / below, tuple(map(int.__sub__, powers, powers_below))


@functools.lru_cache(maxsize=4096)
def _parse(text: str, unit: str) -> float:
    match = _TEXT.fullmatch(text)
    if match is None:
        rule = f"cannot be read as a quantity in {unit}; write a number and a unit, such as {_example(unit)}"
        raise illegal(rule)
    number, symbol = match.groups()
    try:
        exact = Decimal(number) * _factor(symbol, unit)
        if bool(exact) != bool(float(exact)) or math.isinf(float(exact)):
            raise ArithmeticError
        return float(exact)  # the float nearest to what is written
    except ArithmeticError:
        raise illegal("is beyond the numbers that a computer has") from None
    except ValueError as error:
        rule = f"`{symbol}` {error}; this quantity is in {unit}, {_example(unit)} for example"
        raise illegal(rule) from None


def _factor(symbol: str, unit: str) -> Decimal:
    """Size of the unit of a symbol, in another unit. Raises ValueError where it is none, or of another dimension."""
    try:
        (size, powers), (size_of_one, wanted) = _unit(symbol), _unit(unit)
    except KeyError:
        raise ValueError("is an unknown unit") from None
    if powers != wanted:
        raise ValueError("has the wrong dimension")
    return size / size_of_one


def illegal(rule: str, legal: object = None) -> PydanticCustomError:
    """An error of validation. legal: the value that was most likely meant, which the way out names."""
    context = {"rule": rule} | ({} if legal is None else {"legal": legal})
    return PydanticCustomError("illegal", "{rule}", context)


def _example(unit: str) -> str:
    rates = {"byte/second": "GB/s", "flop/second": "TFLOP/s"}
    base = {"byte": "GB", "second": "us", "flop": "GFLOP", "watt": "kW", "hertz": "GHz", **rates}
    return f"'1.5 {base[unit]}'"


def amount(text: str) -> tuple[float, str] | None:
    """The number that a text such as `1.5 TB/s` stands for, in the unit given; None of a text that is no quantity."""
    # dimensions that fields have
    for unit in ("byte", "second", "byte/second", "flop/second", "flop", "watt", "hertz"):
        with contextlib.suppress(ValueError):
            return _parse(text, unit), unit
    return None


def _number(value: Any) -> Any:
    if isinstance(value, str):
        raise illegal("must be a number without quotes or unit")
    if isinstance(value, bool):
        raise illegal("must be a number")
    return value


# YAML 1.1 reads these as octal, base 60 or truth values
_READ_OTHERWISE = re.compile(r"0\d+|\d+(:\d+)+|on|off|yes|no", re.IGNORECASE)


def _whole(value: Any) -> Any:
    if isinstance(value, (bool, str)):
        hint = " (YAML reads this otherwise)" if isinstance(value, str) and _READ_OTHERWISE.fullmatch(value) else ""
        raise illegal(f"must be a whole number{hint}")
    if isinstance(value, float) and not value.is_integer():
        raise illegal("must be a whole number", round(value) if math.isfinite(value) else None)
    return int(value) if isinstance(value, float) else value


def _quantity(unit: str) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        return _parse(value, unit) if isinstance(value, str) else _number(value)

    return BeforeValidator(read)  # type: ignore[return-value]


Integer = Annotated[int, BeforeValidator(_whole)]
Number = Annotated[float, BeforeValidator(_number)]
# no modelled time is longer: a number in another unit
Seconds = Annotated[float, _quantity("second"), Field(ge=0, le=1e4)]
WallSeconds = Annotated[float, _quantity("second"), Field(gt=0, le=1e7)]
"""Time that a person or a machine waits, not time that is modelled."""
Bytes = Annotated[float, _quantity("byte"), Field(ge=0, le=1e18)]
BytesPerSecond = Annotated[float, _quantity("byte/second"), Field(gt=0, le=1e16)]
Hertz = Annotated[float, _quantity("hertz"), Field(ge=1e6, le=1e11)]
Watts = Annotated[float, _quantity("watt"), Field(gt=0, le=1e5)]
FlopPerSecond = Annotated[float, _quantity("flop/second"), Field(gt=0, le=1e20)]
Fraction = Annotated[float, BeforeValidator(_number), Field(ge=0, le=1)]


_SUFFIXES = {  # the longer first: _bytes_per_s ends in _s, too
    "_bytes_per_s": "byte/second",
    "_flop_per_s": "flop/second",
    "_gbit_per_s": "gigabit/second",
    "_bytes": "byte",
    "_flop": "flop",
    "_hz": "hertz",
    "_w": "watt",
    "_s": "second",
}
_LONGER = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"))


def unit_of(name: str) -> str:
    """The unit in which the name of a field ends; "" where it has none.

    >>> unit_of("link_bytes_per_s"), unit_of("num_cus")
    ('byte/second', '')
    """
    return next((unit for suffix, unit in _SUFFIXES.items() if f"_{name}".endswith(suffix)), "")


def quantity_text(value: float, path: str) -> str:
    """Write a value of the field at a dotted path in the unit that its name says, or that of the table it is in.

    >>> quantity_text(46.6e9, "gpu.dma.bytes_per_s"), quantity_text(6e-6, "setup_s"), quantity_text(304, "num_cus")
    ('46.6 GB/s', '6 µs', '304')
    >>> quantity_text(10.36e9, "system.gpu.cu_copy.bytes_per_s_per_cu"), quantity_text(400, "machine.nic_gbit_per_s")
    ('10.4 GB/s per cu', '400 Gbit/s')
    >>> quantity_text(989.4e12, "system.gpu.peak_flop_per_s.bf16")
    '989 TFLOP/s'
    """
    *_, table, last = ["", *path.split(".")]
    # `per` something else than a second
    name, _, per = re.fullmatch(r"(.*?)(_per_(?!s(?:_|$))(\w+))?", last).groups()  # type: ignore[union-attr]
    unit = unit_of(name) or unit_of(table)
    text = with_prefix(value, unit) if unit else f"{value:.3g}" if abs(value) < 100 else f"{value:.6g}"
    return text + (f" per {per}" if per else "")


def with_prefix(value: float, unit: str) -> str:
    """Write a value in a unit of this module with three digits and the prefix that fits.

    A whole number of KiB, MiB or GiB is written as that.

    >>> [with_prefix(value, "byte") for value in (1.2e6, 999.9999, 2**22)], with_prefix(0.0, "second")
    (['1.2 MB', '1 kB', '4 MiB'], '0 s')
    """
    if unit == "byte" and (binary := _whole_binary(value)):
        return binary
    first, _, per = unit.partition("/")
    giga = first.startswith("giga")
    symbol = _SYMBOLS[first.removeprefix("giga")] + (f"/{_SYMBOLS[per]}" if per else "")
    if not value or not math.isfinite(value):
        return f"{value:.3g} {'G' * giga}{symbol}"
    rounded = Decimal(f"{value:.3g}") * (10**9 if giga else 1)  # before the prefix is chosen: 999.9999 is 1 k
    power = min(max(rounded.adjusted() // 3, _LEAST), len(_WRITTEN) + _LEAST - 1)
    return f"{float(rounded / Decimal(1000) ** power):.3g} {_WRITTEN[power - _LEAST]}{symbol}"


def _whole_binary(value: float) -> str:
    """A size of up to three digits in KiB, MiB or GiB; "" for a size that is none."""
    sizes = ((value / 1024**power, f"{prefix}iB") for power, prefix in ((3, "G"), (2, "M"), (1, "K")))
    return next((f"{count:.0f} {unit}" for count, unit in sizes if 1 <= count < 1000 and count == int(count)), "")


_SYMBOLS = {"second": "s", "bit": "bit", "byte": "B", "flop": "FLOP", "watt": "W", "hertz": "Hz"}
_WRITTEN, _LEAST = ("n", "µ", "m", "", "k", "M", "G", "T", "P", "E"), -3  # powers of 1000 from the third below 1


def duration_text(seconds: float) -> str:
    """Write a duration as a person reads it.

    >>> duration_text(0.0004), duration_text(40.2), duration_text(5400), duration_text(3.1e6)
    ('400 µs', '40 s', '1.5 h', '36 d')
    """
    for size, name in _LONGER:
        if seconds >= 1.5 * size:  # below, the next smaller unit reads better
            # one digit as long as the number is below 10
            return f"{seconds / size:.{0 if seconds >= 9.95 * size else 1}f} {name}"
    return f"{seconds:.0f} s" if seconds >= 9.95 else with_prefix(float(f"{seconds:.2g}"), "second")


def typed_integer(word: str) -> int | str:
    """The integer that a word of a command line is; any other word as it is, for a model to refuse.

    >>> typed_integer("-1"), typed_integer("[")
    (-1, '[')
    """
    return int(word) if re.fullmatch(r"-?[0-9]{1,18}", word) else word  # what fits 64 bits
