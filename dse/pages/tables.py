"""Tables of the terminal as plain rows, so that a page and the terminal say the same."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Sheet:
    """A table to show. numeric: which columns stand at the right. rows: texts of the cells."""

    title: str
    columns: tuple[str, ...]
    numeric: tuple[bool, ...]
    rows: tuple[tuple[str, ...], ...]


def sheet(table: Table) -> Sheet:
    """The texts of a table that was made for the terminal."""
    columns = tuple(str(column.header) for column in table.columns)
    numeric = tuple(column.justify == "right" for column in table.columns)
    cells = [[str(cell) for cell in column.cells] for column in table.columns]
    return Sheet(str(table.title or table.caption or ""), columns, numeric, tuple(zip(*cells, strict=True)))


def split(parts: Iterable[Table | str]) -> tuple[list[Sheet], list[str]]:
    """Separate what a command prints: its tables, its sentences."""
    printed = list(parts)
    sentences = [part for part in printed if isinstance(part, str)]
    return [sheet(part) for part in printed if not isinstance(part, str)], sentences
