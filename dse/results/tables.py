"""Widths of the tables that a terminal shows."""

from __future__ import annotations

import copy
import re
import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

_GAP = 2  # blanks between two columns; one where room is short
_UNIT = re.compile(r"(?<=\d) (?=%|[mµn]?s\b|[KMGT]?i?B\b)")  # a number and its unit are one word
_JOINT = "\0"


def fit_columns(table: Table, width: int) -> Table:
    """A table without a box whose columns are narrow enough for a width [characters], with no word broken.

    The widest columns give way first, each down to its longest word. A table that cannot fit is returned as it is.
    """
    texts = [[str(column.header), *map(str, column.cells)] for column in table.columns]
    widths = [max(map(len, column)) for column in texts]
    least = [
        size if column.no_wrap else _longest_word(cells)
        for column, cells, size in zip(table.columns, texts, widths, strict=True)
    ]
    gaps = len(widths) - 1
    if sum(widths) + _GAP * gaps <= width or sum(least) + gaps > width:
        return table
    is_tight = sum(least) + _GAP * gaps > width
    room = width - gaps * (1 if is_tight else _GAP)
    while sum(widths) > room:
        # rich itself would level all columns, and break words of the widest
        widest = max((place for place in range(len(widths)) if widths[place] > least[place]), key=widths.__getitem__)
        widths[widest] -= 1
    fitted = copy.copy(table)
    fitted.collapse_padding, fitted.rows = is_tight, []
    fitted.columns = [column.copy() for column in table.columns]  # without their cells
    for column, size in zip(fitted.columns, widths, strict=True):
        column.width = size
    lines = [map(_wrapped, cells, [size] * len(cells)) for (_, *cells), size in zip(texts, widths, strict=True)]
    for row, cells in zip(table.rows, zip(*lines, strict=True), strict=True):
        fitted.add_row(*cells, style=row.style, end_section=row.end_section)
    return fitted


def _longest_word(texts: list[str]) -> int:
    """Characters of the longest word of some texts."""
    return max((len(word) for text in texts for word in _UNIT.sub(_JOINT, text).split()), default=1)


def _wrapped(text: str, width: int) -> str:
    """A text in lines of a width, which end neither inside of a word nor between a number and its unit."""
    return "\n".join(textwrap.wrap(_UNIT.sub(_JOINT, text), width, break_on_hyphens=False)).replace(_JOINT, " ")
