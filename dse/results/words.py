"""Points and metrics in words: `hetero fused 1d by DMA, 8 chunks`, `16.540 ms`, `1.62x faster`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dse import plugins

if TYPE_CHECKING:
    import pandas as pd

_SUFFIXES = ("_bytes_per_s", "_flop_per_s", "_bytes", "_s", "_J", "_b")


def choice_in_words(row: pd.Series[Any], paths: Iterable[str]) -> str:
    """What was chosen in a row at some paths, as a person says it; knobs that have no value there are left out.

    A package says how its knobs read in its mapping `PHRASES`: path -> text with `{}`, or value -> text.
    """
    words = plugins.declarations("PHRASES")
    texts = [knob_in_words(path, row[path], words) for path in _names_first(paths) if path in row.dropna()]
    sentence = ""
    for text in filter(None, texts):
        sentence += text if not sentence else f" {text}" if text.startswith("by ") else f", {text}"
    return sentence


def knob_in_words(path: str, value: Any, words: Mapping[str, Any]) -> str:
    """A value of a knob in words: as its package says, else by its name; "" for a value that goes without saying."""
    says = words.get(path)
    if isinstance(says, str):
        return says.format(value)
    if says is not None and str(value) in says:
        return str(says[str(value)])
    section, _, name = path.rpartition(".")
    if name == "name":
        plain = str(value).replace("_", " ")
        return plain if section == "schedule" else f"{section.rpartition('.')[2]} {plain}"
    if isinstance(value, bool):
        return f"{'' if value else 'no '}{name.replace('_', ' ')}"
    if name.startswith("num_"):
        return f"{value} {name.removeprefix('num_').replace('_', ' ')}"
    return f"{name.replace('_', ' ')} {str(value).replace('_', ' ')}"


def _names_first(paths: Iterable[str]) -> list[str]:
    return sorted(dict.fromkeys(paths), key=lambda path: not path.endswith(".name"))


def common_choices(rows: pd.DataFrame, paths: Sequence[str]) -> list[str]:
    """Paths at which all rows have one value."""
    return [path for path in paths if path in rows and rows[path].nunique(dropna=False) == 1]


def metric_title(name: str) -> str:
    """A metric without its unit: `makespan`, `peak staging`, `speed-up`."""
    if name == "speedup":
        return "speed-up"
    bare = next((name.removesuffix(suffix) for suffix in _SUFFIXES if name.endswith(suffix)), name)
    return bare.replace("_", " ")


def cell(value: Any, unit: str) -> str:
    """A value as a person reads it, by its unit: `1.234 ms`, `1.51x`, `97 %`."""
    import pandas as pd

    if value is None or pd.isna(value):
        return "–"
    if unit == "s":
        return f"{value * 1e3:.3f} ms" if value >= 1e-3 else f"{value * 1e6:.2f} µs"
    if unit in ("x", "fraction"):
        return f"{value:.2f}x" if unit == "x" else f"{100 * value:.0f} %"
    if unit == "B":
        return f"{value:,.0f} B"
    return f"{value:.6g} {unit}".rstrip() if isinstance(value, float) else str(value)


def gain_in_words(ratio: float) -> str:
    """A speed-up in words: `1.62x faster`, `as fast`, `1.10x slower`."""
    if round(ratio, 2) == 1:
        return "as fast"
    return f"{ratio:.2f}x faster" if ratio > 1 else f"{1 / ratio:.2f}x slower"
