"""Colours and markers of names: the same in every figure and page of every study. Imports no drawing library.

Packages declare names in mappings `LOOKS` (`name: (label, colour, marker)`), as `search_spaces` does for schedules;
no two names of a package look the same. A name that nobody declared has a colour and a marker by its own letters; it
keeps them from run to run, and gives way to names that come before it in a figure. Names that are numbers (`8 GPUs`,
`16 GPUs`) get shades that become lighter as the numbers grow.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

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
    """How a name is drawn. label: words for it; colour: `#rrggbb`; marker: as matplotlib names it."""

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
    known = declared()
    known |= {look.label: look for look in known.values()}
    if len(wanted) > 1 and not set(wanted) & set(known) and (ordered := _in_order(wanted)):
        shades = {
            name: SeriesStyle(name, shade(place / (len(ordered) - 1)), marker_of(place)) for place, name in ordered
        }
        return {name: shades[name] for name in wanted}
    chosen: dict[str, SeriesStyle] = {}
    for name in sorted(wanted, key=lambda name: name not in known):
        look = known.get(name) or _compound_look(name, known, list(chosen.values()))
        chosen[name] = _free_marker(look, list(chosen.values()))
    return {name: chosen[name] for name in wanted}


def _compound_look(name: str, known: Mapping[str, SeriesStyle], taken: Sequence[SeriesStyle]) -> SeriesStyle:
    """The look of a name that nobody declared: that of its first part (`serial, dma`) while its colour is free."""
    head = known.get(name.partition(", ")[0])
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
