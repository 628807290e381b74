"""Rows of CSV files of profiles, plain or gzip, read line by line, so that memory does not grow with the file."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path

from dse.errors import ConfigError, Problem
from dse.files import MOST_LINE
from dse_chakra.packed import DAMAGED, loss, open_packed

Row = Mapping[str, str]
_HEAD = 64  # lines among which the one of the columns is
_NAMES = re.compile(
    r"""^"?(start_us|(total )?(start|duration|time) ?\(|time ?\(?%|kind"?,|.*(kernel_?name|_timestamp)\b)""", re.I
)
"""A line that names columns of profiles."""


@contextmanager
def csv_rows(path: Path, dropped: Counter[str]) -> Iterator[tuple[list[str], Iterator[Row]]]:
    """Columns of a CSV, and its rows by column. What cannot be read is counted in `dropped`. Raises ConfigError.

    Lines that begin with # are comments. What a program wrote before the line of its columns, as `nsys stats` does, is
    passed over. Columns may be separated by tabs or semicolons, as well.
    """
    with open_packed(path) as (unpacked, _):
        # spreadsheets put a byte-order mark in front
        text = io.TextIOWrapper(unpacked, encoding="utf-8-sig", errors="replace", newline="")
        lines = _lines(text, dropped)
        head = list(islice(lines, _HEAD))
        # no line looks like one: the first one is taken
        begin = next((place for place, line in enumerate(head) if _NAMES.search(line)), 0)
        head = head[begin:]
        # the mark that the line of columns has most often
        mark = max(",\t;", key=head[0].count) if head else ","
        # lines that were read ahead come first again
        reader = csv.reader(chain(head, lines), delimiter=mark)
        try:
            columns = [name.strip() for name in next(reader, [])]
        except csv.Error as error:
            raise ConfigError([Problem("profile", f"is no CSV of kernels: {error}", str(path))]) from None
        if not columns:
            why = "; ".join(dropped) or "it is empty"
            raise ConfigError([Problem("profile", f"is no CSV of kernels: {why}", str(path))])
        yield columns, _rows(reader, columns, dropped)


def _rows(reader: Iterator[list[str]], columns: list[str], dropped: Counter[str]) -> Iterator[Row]:
    while True:
        try:
            values = next(reader)
        except StopIteration:
            return
        except csv.Error:
            dropped["rows that are no CSV"] += 1
            continue
        # a file that was cut off ends in half a row
        if len(values) < len(columns):
            # an empty line is no row
            dropped["rows that end before their last column"] += bool(values)
            continue
        yield dict(zip(columns, values, strict=False))


def _lines(text: io.TextIOWrapper, dropped: Counter[str]) -> Iterator[str]:
    """Yield lines that are no comments, as far as the file can be read; those that are too long are dropped."""
    begun = False
    try:
        while line := text.readline(MOST_LINE):
            # readline(MOST_LINE) returns a piece of a line that is too long
            whole_line = line.endswith("\n") or len(line) < MOST_LINE
            if begun or not whole_line:
                # counted at its first piece
                dropped[f"lines of more than {MOST_LINE} characters"] += not begun
                begun = not whole_line
            elif not line.startswith("#"):
                yield line
    except DAMAGED as error:
        dropped[loss(error)] += 1
