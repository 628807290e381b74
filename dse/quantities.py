"""Numbers as a person reads them: units by the suffix of a field's name, time and bytes in the unit that fits."""

from __future__ import annotations

import math
import re

_UNITS = {"_bytes_per_s": "B/s", "_flop_per_s": "FLOP/s", "_bytes": "B", "_flop": "FLOP", "_s": "s"}
_PREFIXES = {-9: "n", -6: "µ", -3: "m", 0: "", 3: "k", 6: "M", 9: "G", 12: "T", 15: "P", 18: "E"}
_LONGER = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"))


def quantity(value: float, path: str) -> str:
    """A value of the field at a dotted path, in the unit that its name says.

    >>> quantity(46.6e9, "system.gpu.dma.bytes_per_s"), quantity(6e-6, "setup_s"), quantity(304, "num_cus")
    ('46.6 GB/s', '6 µs', '304')
    >>> quantity(10.36e9, "system.gpu.cu_copy.bytes_per_s_per_cu")
    '10.4 GB/s per CU'
    """
    name, _, per = re.fullmatch(r"(.*?)(_per_(cu|engine|link))?", path.rpartition(".")[2]).groups()  # type: ignore[union-attr]
    unit = next((unit for suffix, unit in _UNITS.items() if f"_{name}".endswith(suffix)), "")
    text = with_prefix(value, unit) if unit else f"{value:.3g}" if abs(value) < 100 else f"{value:.6g}"
    return text + (f" per {per.upper() if per == 'cu' else per}" if per else "")


def with_prefix(value: float, unit: str) -> str:
    """A value in a unit, with three digits and the prefix that fits.

    >>> scaled(1.2e6, "B"), scaled(0.0, "s"), scaled(999.9999, "B")
    ('1.2 MB', '0 s', '1 kB')
    """
    if not value or not math.isfinite(value):
        return f"{value:g} {unit}"
    rounded = float(f"{value:.3g}")
    power = min(max(3 * math.floor(math.log10(abs(rounded)) / 3 + 1e-12), min(_PREFIXES)), max(_PREFIXES))
    return f"{rounded / 10.0**power:.3g} {_PREFIXES[power]}{unit}"


def duration(seconds: float) -> str:
    """A duration as a person reads it.

    >>> duration(0.0004), duration(40.2), duration(5400), duration(3.1e6)
    ('400 µs', '40 s', '1.5 h', '36 d')
    """
    for size, name in _LONGER:
        if seconds >= 1.5 * size:
            return f"{seconds / size:.{0 if seconds >= 9.95 * size else 1}f} {name}"
    return f"{seconds:.0f} s" if seconds >= 9.95 else with_prefix(float(f"{seconds:.2g}"), "s")
