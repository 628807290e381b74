"""Points and metrics in words: `hetero fused 1d by DMA, 8 chunks`, `16.540 ms`, `1.62x faster`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dse import plugins
from dse.plots.labels import label, number, words
from dse.values.units import quantity_text, with_prefix

if TYPE_CHECKING:
    import pandas as pd


def choice_in_words(row: pd.Series[Any], paths: Iterable[str]) -> str:
    """What was chosen in a row at some paths, as a person says it; knobs that have no value there are left out.

    A package says how its knobs read in its mapping `PHRASES`: path -> text with `{}`, or value -> text; `path=value`
    -> text of that value alone.
    """
    phrases = plugins.declarations("PHRASES")
    texts = [knob_in_words(path, row[path], phrases) for path in _names_first(paths) if path in row.dropna()]
    means = [text for text in texts if text.startswith("by ")]  # `by DMA` follows what it is a means of
    first, *others = [text for text in texts if text and text not in means] or [""]
    return ", ".join([" ".join(filter(None, [first, *means])), *others])


def knob_in_words(path: str, value: Any, phrases: Mapping[str, Any]) -> str:
    """A value of a knob in words: by its phrase, else by its name; "" for a value that goes without saying."""
    phrase = phrases.get(f"{path}={value}", phrases.get(path))
    if isinstance(phrase, str):
        # `{} chunks`: the number decides between singular and plural
        return _count(value, phrase.partition("{} ")[2]) if phrase.startswith("{} ") else phrase.format(value)
    if phrase is not None and str(value) in phrase:
        return str(phrase[str(value)])
    if path == "schedule.name":
        return label(str(value))
    if isinstance(value, bool | np.bool_):
        return f"{'' if value else 'no '}{words(path)}"
    if path.rpartition(".")[2].startswith("num_"):
        return _count(value, words(path))
    text = quantity_text(value, path) if isinstance(value, float) else label(str(value))
    if isinstance(value, int | np.integer):
        text = number(float(value))
    name, per, unit = text.partition(" per ")
    return f"{words(path)} {name if words(path).endswith(per + unit) else text}"


def _count(number: Any, things: str) -> str:
    """A number of things: `1 chunk`, `8 chunks`."""
    return f"{number} {things.removesuffix('s') if str(number) == '1' else things}"


def _names_first(paths: Iterable[str]) -> list[str]:
    # names of options before their numbers
    return sorted(dict.fromkeys(paths), key=lambda path: not path.endswith(".name"))


def common_choices(rows: pd.DataFrame, paths: Sequence[str]) -> list[str]:
    """Paths at which all rows have one value."""
    return [path for path in paths if path in rows and rows[path].nunique(dropna=False) == 1]


def cell(value: Any, unit: str = "") -> str:
    """A value as a person writes it, by its unit.

    >>> cell(1.234e-3, "s"), cell(3.09604e8, "byte"), cell(0.0497196, "CU s"), cell(1.514, "x"), cell(0.97, "fraction")
    ('1.234 ms', '310 MB', '49.7 CU ms', '1.51x', '97 %')
    >>> cell(123456.7, "1/s"), cell(857.66, "mm2"), cell(2.0), cell(3.1e15, "flop"), cell(None, "s")
    ('123,500/s', '857.7 mm²', '2', '3.1 PFLOP', '–')
    """
    if str(value) in _MISSING:
        return "–"
    if isinstance(value, bool | np.bool_):
        return "yes" if value else "no"
    if not isinstance(value, int | float | np.number):
        return str(value)
    if unit in _TEXTS:
        return _TEXTS[unit](float(value))
    things, _, last = unit.rpartition(" ")
    if last in _PREFIXED:
        amount, _, symbol = _with_prefix(float(value), _PREFIXED[last]).partition(" ")
        return " ".join(filter(None, [amount, things, symbol]))
    return number(float(value)) + _UNITS.get(unit, f" {unit}")


def _with_prefix(value: float, unit: str) -> str:
    """A value with a prefix, but not half a byte with `m`, nor an hour with `k`."""
    if (abs(value) < 1) == (unit == "second"):
        return with_prefix(value, unit)
    return f"{number(value)} {with_prefix(1.0, unit).partition(' ')[2]}"


def _seconds(value: float) -> str:
    size = abs(value)
    if size >= 1:
        return f"{value:,.3f} s"
    if size < 1e-6:
        return with_prefix(value, "second")
    return f"{value * 1e3:.3f} ms" if size >= 1e-3 else f"{value * 1e6:.2f} µs"


def _percent(value: float) -> str:
    """A percentage in whole numbers, or with two digits where it is below one; `0 %` only of nothing."""
    return f"{number(float(f'{value:.2g}')) if abs(value) < 1 else f'{value:,.0f}'} %"


def _ratio(value: float) -> str:
    return f"{value:.2f}x" if abs(value) < 100 else f"{value:,.0f}x"


_TEXTS: Mapping[str, Callable[[float], str]] = {
    "s": _seconds,
    "x": _ratio,
    "fraction": lambda value: _percent(100 * value),
    "%": _percent,
    "relative": lambda value: number(float(f"{value:.3g}")),
}
"""Unit of a metric -> how its values read."""
_MISSING = ("None", "nan", "<NA>", "NaT")
_PREFIXED = {
    **{"s": "second", "B": "byte", "byte": "byte", "flop": "flop", "FLOP": "flop"},
    **{
        f"{name}/s": f"{unit}/second"
        for name, unit in (("B", "byte"), ("byte", "byte"), ("flop", "flop"), ("FLOP", "flop"))
    },
}
"""Last word of a unit that takes a prefix -> its name in `dse.values.units`."""
_UNITS = {"": "", "1": "", "bool": "", "1/s": "/s", "mm2": " mm²"}
"""Unit -> how it reads after a number, where it does not stand there as it is."""

AS_FAST = "as fast"
"""Gain of what takes as long as its baseline."""


def gain_in_words(ratio: float) -> str:
    """A speed-up in words: `1.62x faster`, `as fast`, `1.10x slower`."""
    if round(ratio, 2) == 1:  # as it is shown
        return AS_FAST
    return f"{ratio:.2f}x faster" if ratio > 1 else f"{1 / ratio:.2f}x slower"
