"""Widths of the tables that a terminal shows."""

from __future__ import annotations

import re
import textwrap
from typing import Any

_GAP = 2  # blanks between two columns; one where room is short
_UNIT = re.compile(r"(?<=\d) (?=%|[mµn]?s\b|[KMGT]?i?B\b)")  # a number and its unit are one word
_JOINT = "\0"


def fit_columns(table: Any, width: int) -> None:
    """Narrow the columns of a table without a box so that it fits into a width [characters] and no word is broken.

    The widest columns give way first, each down to its longest word. A table that cannot fit is left as it is.
    """
    texts = [[str(column.header), *map(str, column.cells)] for column in table.columns]
    widths = [max(map(len, column)) for column in texts]
    least = [
        size if column.no_wrap else _longest_word(cells)
        for column, cells, size in zip(table.columns, texts, widths, strict=True)
    ]
    gaps = len(widths) - 1
    if sum(widths) + _GAP * gaps <= width or sum(least) + gaps > width:
        return
    table.collapse_padding = sum(least) + _GAP * gaps > width
    room = width - gaps * (1 if table.collapse_padding else _GAP)
    while sum(widths) > room:
        # rich itself would level all columns, and break words of the widest
        widest = max((place for place in range(len(widths)) if widths[place] > least[place]), key=widths.__getitem__)
        widths[widest] -= 1
    for column, (_, *cells), size in zip(table.columns, texts, widths, strict=True):
        column.width = size
        column._cells = [_wrapped(text, size) for text in cells]


def _longest_word(texts: list[str]) -> int:
    """Characters of the longest word of some texts."""
    return max((len(word) for text in texts for word in _UNIT.sub(_JOINT, text).split()), default=1)


def _wrapped(text: str, width: int) -> str:
    """A text in lines of a width, which end neither inside of a word nor between a number and its unit."""
    return "\n".join(textwrap.wrap(_UNIT.sub(_JOINT, text), width, break_on_hyphens=False)).replace(_JOINT, " ")
