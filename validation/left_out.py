"""Folders of measured tables that validity commands are given, and what these leave out of their figures, with why."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

FITTED = "constants were fitted on them"


def given_folder(text: str) -> Path:
    """The folder that --data names. Raises argparse.ArgumentTypeError where there is none."""
    if not (folder := Path(text)).is_dir():
        raise argparse.ArgumentTypeError(f"{text} is no folder: name that of the measured tables")
    return folder


def files_below(folder: Path, pattern: str) -> Iterator[Path]:
    """Yield the files in a folder and below it whose names match, in order."""
    yield from (file for file in sorted(folder.rglob(pattern)) if file.is_file())


def report_left_out(what: str, reason: str, *, rows: int | None = None) -> None:
    """Print that a figure, a table, or some rows of it are left out. rows: how many; None: all of it."""
    amount = "" if rows is None else f"{rows} row{'s'[: rows != 1]} of "
    print(f"left out: {amount}{what}: {reason}", file=sys.stderr)
