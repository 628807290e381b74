"""Quantities with units: plain SI floats inside the project, texts such as `64 GB/s` or `1.9 us` at its edge.

The name of a field ends in its unit (`_s`, `_bytes`, `_bytes_per_s`, `_flop_per_s`). In YAML and on the command line a
text with a unit is read with pint, and a wrong dimension is refused; a bare number is in the unit of the field's name.
What a person reads is written with pint, too, in the unit that fits.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

_TEXT = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([A-Za-zµμ]+(?:\s*/\s*[A-Za-zµμ]+)?)\s*")


# Only what this field needs, and with information as a dimension: in pint's own list a byte is a pure number, and
# 64 GHz would pass for a bandwidth.
_UNITS = """
nano- = 1e-9 = n-; micro- = 1e-6 = µ- = μ- = u-; milli- = 1e-3 = m-; kilo- = 1e3 = k-; mega- = 1e6 = M-;
giga- = 1e9 = G-; tera- = 1e12 = T-; peta- = 1e15 = P-; exa- = 1e18 = E-; kibi- = 1024 = Ki-; mebi- = 1048576 = Mi-;
gibi- = 1073741824 = Gi-; tebi- = 1099511627776 = Ti-; second = [time] = s; minute = 60 * second = min;
hertz = 1 / second = Hz; bit = [information]; byte = 8 * bit = B; flop = [operation] = FLOP
"""


@functools.cache
def _units() -> Any:
    import pint

    registry: Any = pint.UnitRegistry(None, cache_folder=None)
    for line in _UNITS.split(";"):
        registry.define(line.strip())
    return registry


@functools.lru_cache(maxsize=4096)
def _parse(text: str, unit: str) -> float:
    match = _TEXT.fullmatch(text)
    if match is None:
        raise ValueError(f"cannot be read as a quantity in {unit}; write a number and a unit, such as `1.5 {unit}`")
    number, symbol = match.groups()
    registry = _units()
    try:
        factor = registry.Quantity(1.0, registry.parse_units(symbol.replace(" ", ""))).to(unit).magnitude
        return float(Decimal(number) * Decimal(repr(factor)))  # the float nearest to what is written
    except Exception as error:
        reason = "is an unknown unit" if "not defined" in str(error) else "has the wrong dimension"
        raise ValueError(f"`{symbol}` {reason}; this quantity is in {unit}") from error


def amount(text: str) -> tuple[float, str] | None:
    """The number that a text such as `1.5 TB/s` stands for, in the unit given; None of a text that is no quantity."""
    for unit in ("byte", "second", "byte/second", "flop/second", "flop"):
        with contextlib.suppress(ValueError):
            return _parse(text, unit), unit
    return None


def _number(value: Any) -> Any:
    if isinstance(value, (bool, str)):
        raise ValueError("must be a number without quotes or unit" if isinstance(value, str) else "must be a number")
    return value


def _whole(value: Any) -> Any:
    if isinstance(value, (bool, str)):
        raise ValueError("must be a whole number (a leading zero, `on` or `4:1` is not one)")
    if isinstance(value, float) and not value.is_integer():
        raise ValueError("must be a whole number")
    return int(value) if isinstance(value, float) else value


def _quantity(unit: str) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        return _parse(value, unit) if isinstance(value, str) else _number(value)

    return BeforeValidator(read)  # type: ignore[return-value]


Integer = Annotated[int, BeforeValidator(_whole)]
Number = Annotated[float, BeforeValidator(_number)]
Seconds = Annotated[float, _quantity("second"), Field(ge=0, le=1e4)]
WallSeconds = Annotated[float, _quantity("second"), Field(gt=0, le=1e7)]
"""Time that a person or a machine waits, not time that is modelled."""
Bytes = Annotated[float, _quantity("byte"), Field(ge=0, le=1e18)]
BytesPerSecond = Annotated[float, _quantity("byte/second"), Field(gt=0, le=1e16)]
FlopPerSecond = Annotated[float, _quantity("flop/second"), Field(gt=0, le=1e20)]
Fraction = Annotated[float, BeforeValidator(_number), Field(ge=0, le=1)]


_SUFFIXES = {
    "_bytes_per_s": "byte/second",
    "_flop_per_s": "flop/second",
    "_bytes": "byte",
    "_flop": "flop",
    "_s": "second",
}
_LONGER = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"))


def quantity_text(value: float, path: str) -> str:
    """Write a value of the field at a dotted path in the unit that its name says.

    >>> quantity_text(46.6e9, "gpu.dma.bytes_per_s"), quantity_text(6e-6, "setup_s"), quantity_text(304, "num_cus")
    ('46.6 GB/s', '6 µs', '304')
    >>> quantity_text(10.36e9, "system.gpu.cu_copy.bytes_per_s_per_cu")
    '10.4 GB/s per cu'
    """
    name, _, per = re.fullmatch(r"(.*?)(_per_(?!s(?:_|$))(\w+))?", path.rpartition(".")[2]).groups()  # type: ignore[union-attr]
    unit = next((unit for suffix, unit in _SUFFIXES.items() if f"_{name}".endswith(suffix)), "")
    text = with_prefix(value, unit) if unit else f"{value:.3g}" if abs(value) < 100 else f"{value:.6g}"
    return text + (f" per {per}" if per else "")


def with_prefix(value: float, unit: str) -> str:
    """Write a value in a unit of this module with three digits and the prefix that fits.

    >>> with_prefix(1.2e6, "byte"), with_prefix(0.0, "second"), with_prefix(999.9999, "byte")
    ('1.2 MB', '0 s', '1 kB')
    """
    rounded = float(f"{value:.3g}") if math.isfinite(value) else value
    return f"{_units().Quantity(rounded, unit).to_compact():.3g~P}"


def duration_text(seconds: float) -> str:
    """Write a duration as a person reads it.

    >>> duration_text(0.0004), duration_text(40.2), duration_text(5400), duration_text(3.1e6)
    ('400 µs', '40 s', '1.5 h', '36 d')
    """
    for size, name in _LONGER:
        if seconds >= 1.5 * size:
            return f"{seconds / size:.{0 if seconds >= 9.95 * size else 1}f} {name}"
    return f"{seconds:.0f} s" if seconds >= 9.95 else with_prefix(float(f"{seconds:.2g}"), "second")
