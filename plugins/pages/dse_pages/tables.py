"""Tables of the terminal as plain rows, so that a page and the terminal say the same."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class TextTable:
    """A table to show. numeric: which columns stand at the right. rows: texts of the cells. note: below it."""

    title: str
    columns: tuple[str, ...]
    numeric: tuple[bool, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def sheet(table: Table) -> TextTable:
    """The texts of a table that was made for the terminal."""
    columns = tuple(str(column.header) for column in table.columns)
    numeric = tuple(column.justify == "right" for column in table.columns)
    cells = [[str(cell) for cell in column.cells] for column in table.columns]
    return TextTable(
        str(table.title or ""), columns, numeric, tuple(zip(*cells, strict=True)), str(table.caption or "")
    )


def in_order(parts: Iterable[Any]) -> list[TextTable | str]:
    """Return what a command prints, in its order: tables as plain rows, sentences as texts."""
    # a table of rich, recognised without the import of rich
    return [sheet(part) if hasattr(part, "columns") else str(part) for part in parts]


def split(parts: Iterable[Any]) -> tuple[list[TextTable], list[str]]:
    """Separate what a command prints: its tables, its sentences."""
    printed = list(parts)
    tables = [part for part in printed if hasattr(part, "columns")]
    return [sheet(table) for table in tables], [str(part) for part in printed if not hasattr(part, "columns")]
