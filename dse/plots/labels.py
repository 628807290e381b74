"""Labels, colours and markers of names, axes of numbers: alike in all figures and pages. Imports no drawing library.

Packages declare names in mappings `LOOKS` (`name: (label, colour, marker)`), as `search_spaces` does for schedules;
no two names of a package look the same. A name that nobody declared has a colour and a marker by its own letters; it
keeps them from run to run, and gives way to names that come before it in a figure. Names that are numbers (`8 GPUs`,
`16 GPUs`) get shades that become lighter as the numbers grow.

Axes are in words with SI units: prefixes from the range of the data, ticks as plain numbers.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dse import plugins

COLOURS: Mapping[str, str] = {
    "blue": "#0f7dc2",
    "amber": "#fab52d",
    "green": "#1d6b3c",
    "vermillion": "#cf5a00",
    "sky": "#7acffc",
    "wine": "#77225d",
    "lime": "#a9d18e",
    "navy": "#272a8e",
    "grey": "#8c8c8c",
    "violet": "#c430fc",
}
"""Told apart with protanopia, deuteranopia and tritanopia, too (tests/test_palette.py). Grey is for baselines."""
MARKERS = "osD^vPX<>hp*8"
INK = "#1a1a1a"
"""Colour of texts, ideals and reference lines."""
DIVERGING = ("#0b5a99", "#7db4dc", "#f4f4f4", "#eda268", "#a84300")
"""Colours of signed values, from the least to the largest; the middle is 0 (of ratios: 1)."""
_SHADES = ("#3b0f5c", "#3b528b", "#21918c", "#5ec962", "#c9d92f")
"""Ends and knots of the scale of ordered names, from dark to light (parts of viridis)."""
_NUMBERED = re.compile(r"(\D*?)(-?\d+(?:\.\d+)?)(\D*)")


@dataclass(frozen=True)
class SeriesStyle:
    """Look of a name in figures. label: words for it; colour: `#rrggbb`; marker: as matplotlib names it."""

    label: str
    colour: str
    marker: str


def declared() -> dict[str, SeriesStyle]:
    """Looks of all names that packages declare, by name."""
    entries = plugins.declarations("LOOKS").items()
    return {name: SeriesStyle(label, COLOURS[colour], marker) for name, (label, colour, marker) in entries}


def label(name: str) -> str:
    """Words for a name: `uniform fused 1d` for `uniform_fused_1d`."""
    look = declared().get(name)
    return look.label if look else name.replace("_", " ")


def looks(names: Iterable[str]) -> dict[str, SeriesStyle]:
    """Looks of the names of a figure, in their order; no two have both colour and marker in common."""
    wanted = list(dict.fromkeys(map(str, names)))
    declared_looks = declared()
    declared_looks |= {look.label: look for look in declared_looks.values()}
    if len(wanted) > 1 and not set(wanted) & set(declared_looks) and (ordered := _in_order(wanted)):
        shades = {
            name: SeriesStyle(name, shade(place / (len(ordered) - 1)), marker_of(place)) for place, name in ordered
        }
        return {name: shades[name] for name in wanted}
    chosen: dict[str, SeriesStyle] = {}
    for name in sorted(wanted, key=lambda name: name not in declared_looks):
        look = declared_looks.get(name) or _compound_look(name, declared_looks, list(chosen.values()))
        chosen[name] = _free_marker(look, list(chosen.values()))
    return {name: chosen[name] for name in wanted}


def _compound_look(name: str, declared_looks: Mapping[str, SeriesStyle], taken: Sequence[SeriesStyle]) -> SeriesStyle:
    """The look of a name that nobody declared: that of its first part (`serial, dma`) while its colour is free."""
    head = declared_looks.get(name.partition(", ")[0])
    text = ", ".join(label(part) for part in name.split(", "))
    if head is not None and head.colour not in {look.colour for look in taken}:
        return SeriesStyle(text, head.colour, head.marker)
    free = _free_look(name, taken)
    return SeriesStyle(text, free.colour, free.marker)


def _free_marker(look: SeriesStyle, taken: Sequence[SeriesStyle]) -> SeriesStyle:
    """The look, with another marker where its own is taken in its colour: packages do not know each other's names."""
    used = {other.marker for other in taken if other.colour == look.colour}
    marker = next((marker for marker in (look.marker, *MARKERS) if marker not in used), look.marker)
    return SeriesStyle(look.label, look.colour, marker)


def marker_of(place: int) -> str:
    """Marker of the name at a place of a figure without markers of its own."""
    return MARKERS[place % len(MARKERS)]


def _in_order(names: Sequence[str]) -> list[tuple[int, str]]:
    """Places and names by number, where all differ in a number alone; else nothing."""
    parts = [_NUMBERED.fullmatch(name) for name in names]
    if None in parts or len({(part[1], part[3]) for part in parts if part}) > 1:
        return []
    return list(enumerate(sorted(names, key=lambda name: float(_NUMBERED.fullmatch(name)[2]))))  # type: ignore[index]


def _free_look(name: str, taken: Sequence[SeriesStyle]) -> SeriesStyle:
    """The look that a name's letters choose, or the next whose colour (if all are taken: colour and marker) is free."""
    colours, start = list(COLOURS.values()), zlib.crc32(name.encode())
    order = [colours[(start + step) % len(colours)] for step in range(len(colours))]
    markers = [marker_of(start // len(colours) + step) for step in range(len(MARKERS))]
    pairs = [(colour, marker) for marker in markers for colour in order]
    used = {(look.colour, look.marker) for look in taken}
    fresh = [pair for pair in pairs if pair not in used] or pairs
    unused = {look.colour for look in taken}
    colour, marker = next((pair for pair in fresh if pair[0] not in unused), fresh[0])
    return SeriesStyle(name, colour, marker)


def shade(share: float) -> str:
    """Colour at a share in [0, 1] of the scale of ordered names, dark first."""
    return blend(_SHADES, share)


def diverging(share: float) -> str:
    """Colour of a signed value: -1 the least, 0 the middle, 1 the largest."""
    return blend(DIVERGING, (share + 1) / 2)


def blend(knots: Sequence[str], share: float) -> str:
    """Colour at a share in [0, 1] of the way along colours at equal distances.

    >>> blend(("#000000", "#ffffff"), 0.5)
    '#808080'
    """
    place = min(max(share, 0.0), 1.0) * (len(knots) - 1)
    left = min(int(place), len(knots) - 2)
    pair = [[int(knots[left + side][start : start + 2], 16) for start in (1, 3, 5)] for side in (0, 1)]
    mixed = [low + (high - low) * (place - left) for low, high in zip(*pair, strict=True)]
    return "#" + "".join(f"{int(channel + 0.5):02x}" for channel in mixed)


_DECIMAL = tuple((10.0**power, prefix) for power, prefix in zip(range(-12, 19, 3), "pnµm kMGTPE", strict=True))
_BINARY = tuple((1024.0**power, prefix) for power, prefix in enumerate(("", "Ki", "Mi", "Gi", "Ti", "Pi")))
_PREFIXED = ("s", "B", "B/s", "FLOP", "FLOP/s", "Hz", "W", "J")
_WIDE = 1e4  # ratio of the ends of a logarithmic axis from which on each tick has a unit of its own
_LONG = 10_000  # numbers from which on thousands are set apart; years are not
_NAMED = {"fraction": "%", "share": "%", "x": "", "byte": "B", "flop": "FLOP"}
"""Units as backends name them -> units of an axis."""
_EXACT = 1e7  # whole numbers below it are written with all digits
_STEPS = (1.0, 2.0, 5.0)
_FINE_STEPS = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)
_ENOUGH = 3  # powers of ten that need no ticks between them
_ENDINGS = ("_bytes_per_s", "_flop_per_s", "_gbit_per_s", "_bytes", "_flop", "_J", "_s", "_w", "_x", "_usd", "_mm2")
_SPELT: Mapping[str, str] = {
    **{"comm": "communication", "num": "", "dp": "data parallel", "per s": "per second", "vs": "over"},
    **{"bw": "bandwidth", "ctas": "CTAs", "cu": "CU", "cus": "CUs", "gpus": "GPUs", "gemms": "GEMMs", "nics": "NICs"},
    **{
        name: name.upper()
        for name in ["cil", "dil", "dram", "fc", "ffn", "gemm", "gpu", "hbm", "l1", "l2", "llc", "nic", "pim", "tp"]
    },
}
"""Short words of names -> words on an axis."""


_SHORT = re.compile(rf"\b({'|'.join(sorted(_SPELT, key=len, reverse=True))})\b")


@dataclass(frozen=True)
class Axis:
    """A column of the table, its label in words, and its unit.

    unit: of the column's values: `s`, `B`, `B/s`, `FLOP/s` and the like get the prefix that fits the data; `%` is for
    shares, which are shown times 100. centre: the value that divides gains from losses, 0 of signed values and 1 of
    ratios: colours are centred there.
    """

    column: str
    label: str
    unit: str = ""
    centre: float | None = None

    @classmethod
    def of(cls, column: str, unit: str) -> Axis:
        """Axis of a metric: words for its name; the unit as backends name it."""
        ratio = words(column) + " [x]" if unit == "x" else words(column)
        return cls(column, ratio, _NAMED.get(unit, unit), 1.0 if unit == "x" else None)


@dataclass(frozen=True)
class Scale:
    """Conversion of values to numbers on an axis. factor: number = value x factor; text: the unit with its prefix.

    unit: the unit without prefix where every tick has a prefix of its own, as the axis spans too much for one.
    """

    factor: float
    text: str
    label: str
    unit: str = ""

    @property
    def title(self) -> str:
        """Label with unit, such as `time [ms]`."""
        return f"{self.label} [{self.text}]" if self.text and not self.unit else self.label

    def tick(self, place: float) -> str:
        """Text of a tick at a place on the axis."""
        return with_unit(place / self.factor, self.unit) if self.unit else number(place)


def words(path: str) -> str:
    """Words for a column: what packages declare in `WORDS`, else its name without section and unit.

    >>> words("system.gpu.num_things"), words("exposed_comm_s"), words("tokens_per_s"), words("idle_w")
    ('things', 'exposed communication', 'tokens per second', 'idle')
    """
    if path.endswith("_improvement"):
        return f"improvement of {words(path.removesuffix('_improvement'))}"
    section, _, name = path.rpartition(".")
    declared = plugins.declarations("WORDS")
    if path in declared or name in declared:
        return str(declared.get(path) or declared[name])
    name = name if name != "name" or not section else section.rpartition(".")[2]
    ending = next((ending for ending in _ENDINGS if f"_{name}".endswith(ending)), "")
    bare = f"_{name}".removesuffix("" if name.endswith("_per_s") and ending == "_s" else ending).removeprefix("_")
    if not bare and len(name) > 1:  # a single letter is a variable, even `x` and `s`
        return words(section) if section else name
    return _SHORT.sub(lambda match: _SPELT[match[0]], (bare or name).replace("_", " ")).strip()


def scale(axis: Axis, values: Any, *, logarithmic: bool = False) -> Scale:
    """Scale of an axis for its values: the prefix with which the largest is at least 1.

    A logarithmic axis of more than four decades has no single prefix: each of its ticks has one.

    >>> scale(Axis("time_s", "time", "s"), [2e-4, 3e-3]).title
    'time [ms]'
    >>> scale(Axis("b", "payload", "B"), [3 * 2.0**30]).title, scale(Axis("x", "share", "%"), [0.5]).title
    ('payload [GiB]', 'share [%]')
    """
    if axis.unit == "%":
        return Scale(100.0, "%", axis.label)
    if axis.unit not in _PREFIXED:
        return Scale(1.0, axis.unit, axis.label)
    finite = np.asarray(values, float)
    finite = np.abs(finite[np.isfinite(finite)])
    largest = float(finite.max()) if finite.size else 0.0
    if logarithmic and (positive := finite[finite > 0]).size and largest > _WIDE * float(positive.min()):
        return Scale(1.0, axis.unit, axis.label, axis.unit)
    size, prefix = _prefix(largest, axis.unit)
    return Scale(1.0 / size, prefix + axis.unit, axis.label)


def _prefix(value: float, unit: str) -> tuple[float, str]:
    """Size and name of the prefix with which a value is at least 1 (or nearest to it)."""
    prefixes = _BINARY if unit == "B" else _DECIMAL
    if not value:
        return 1.0, ""
    fitting = [entry for entry in prefixes if entry[0] <= value * (1 + 1e-9)]
    size, prefix = fitting[-1] if fitting else prefixes[0]
    return size, prefix.strip()


def number(value: float) -> str:
    """A plain number of at most four digits (a whole one of seven), without an exponent where it can be.

    >>> number(0.5), number(65536.0), number(1.234567), number(0.0), number(2.5e-05)
    ('0.5', '65,536', '1.235', '0', '0.000025')
    """
    if not math.isfinite(value):
        return str(value)
    rounded = value if value == int(value) and abs(value) < _EXACT else float(f"{value:.4g}")
    if rounded == int(rounded):
        return f"{int(rounded):,}" if abs(rounded) >= _LONG else str(int(rounded))
    digits = max(0, 3 - math.floor(math.log10(abs(rounded))))
    return f"{rounded:.{digits}f}".rstrip("0").rstrip(".") if digits <= 12 else f"{rounded:g}"


def with_unit(value: float, unit: str) -> str:
    """A value with the unit that fits it.

    >>> with_unit(2.0**21, "B"), with_unit(1e-5, "s")
    ('2 MiB', '10 µs')
    """
    if unit not in _PREFIXED:
        return number(value)
    size, prefix = _prefix(abs(value), unit)
    return f"{number(value / size)} {prefix}{unit}"


def log_ticks(low: float, high: float, *, binary: bool, most: int = 6) -> NDArray[np.float64]:
    """Round numbers between two positive ends: powers of 2, or 1, 2 and 5 times powers of 10, at most `most`.

    >>> log_ticks(1.0, 30.0, binary=False).tolist(), log_ticks(4.0, 64.0, binary=True, most=3).tolist()
    ([1.0, 2.0, 5.0, 10.0, 20.0], [4.0, 16.0, 64.0])
    """
    if binary:
        powers = [2.0**power for power in range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)]
        return np.array(powers[:: -(-len(powers) // most) or 1])
    decades, ticks = _inside(low, high, (1.0,)), _inside(low, high, _STEPS)
    if len(decades) >= _ENOUGH or (len(ticks) > most and len(decades) > 1):
        ticks = decades
    elif len(ticks) < _ENOUGH:
        ticks = _inside(low, high, _FINE_STEPS)
    return np.array(ticks[:: -(-len(ticks) // most) or 1])


def _inside(low: float, high: float, steps: Sequence[float]) -> list[float]:
    """Products of steps and powers of ten between two ends."""
    span = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    products = [float(f"{step}e{power}") for power in span for step in steps]
    return [product for product in products if low <= product * 1.0001 and product <= high * 1.0001]
