"""Points and metrics in words: `hetero fused 1d by DMA, 8 chunks`, `16.540 ms`, `1.62x faster`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dse import plugins
from dse.plots.palette import label
from dse.plots.quantities import words
from dse.values.units import quantity_text, with_prefix

if TYPE_CHECKING:
    import pandas as pd


def choice_in_words(row: pd.Series[Any], paths: Iterable[str]) -> str:
    """What was chosen in a row at some paths, as a person says it; knobs that have no value there are left out.

    A package says how its knobs read in its mapping `PHRASES`: path -> text with `{}`, or value -> text.
    """
    phrases = plugins.declarations("PHRASES")
    texts = [knob_in_words(path, row[path], phrases) for path in _names_first(paths) if path in row.dropna()]
    means = [text for text in texts if text.startswith("by ")]  # `by DMA` follows what it is a means of
    first, *others = [text for text in texts if text and text not in means] or [""]
    return ", ".join([" ".join(filter(None, [first, *means])), *others])


def knob_in_words(path: str, value: Any, phrases: Mapping[str, Any]) -> str:
    """A value of a knob in words: by its phrase, else by its name; "" for a value that goes without saying."""
    phrase = phrases.get(path)
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
    return f"{words(path)} {text}"


def _count(number: Any, things: str) -> str:
    """A number of things: `1 chunk`, `8 chunks`."""
    return f"{number} {things.removesuffix('s') if str(number) == '1' else things}"


def _names_first(paths: Iterable[str]) -> list[str]:
    # names of options before their numbers
    return sorted(dict.fromkeys(paths), key=lambda path: not path.endswith(".name"))


def common_choices(rows: pd.DataFrame, paths: Sequence[str]) -> list[str]:
    """Paths at which all rows have one value."""
    return [path for path in paths if path in rows and rows[path].nunique(dropna=False) == 1]


def cell(value: Any, unit: str) -> str:
    """A value as a person reads it, by its unit: `1.234 ms`, `1.51x`, `97 %`."""
    import pandas as pd

    if value is None or pd.isna(value):
        return "–"
    if unit in _TEXTS:
        return _TEXTS[unit](float(value))
    return f"{value:.6g} {unit}".rstrip() if isinstance(value, float) else str(value)


def _seconds(value: float) -> str:
    if value >= 1:
        return f"{value:.3f} s"
    return f"{value * 1e3:.3f} ms" if value >= 1e-3 else f"{value * 1e6:.2f} µs"


def _bytes(value: float) -> str:
    return with_prefix(value, "byte")


def _percent(value: float) -> str:
    """A percentage in whole numbers, or with two digits where it is below one; `0 %` only of nothing."""
    return f"{value:.2g} %" if 0 < abs(value) < 1 else f"{value:.0f} %"


_TEXTS: Mapping[str, Callable[[float], str]] = {
    "s": _seconds,
    "x": "{:.2f}x".format,
    "fraction": lambda value: _percent(100 * value),
    "B": _bytes,
    "byte": _bytes,
    "relative": "{:.3g}".format,
}
"""Unit of a metric -> how its values read."""

AS_FAST = "as fast"
"""Gain of what takes as long as its baseline."""


def gain_in_words(ratio: float) -> str:
    """A speed-up in words: `1.62x faster`, `as fast`, `1.10x slower`."""
    if round(ratio, 2) == 1:  # as it is shown
        return AS_FAST
    return f"{ratio:.2f}x faster" if ratio > 1 else f"{1 / ratio:.2f}x slower"
