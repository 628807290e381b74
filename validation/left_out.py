"""What a validity command leaves out of its figures, printed on stderr with the reason."""

from __future__ import annotations

import sys

FITTED = "constants were fitted on them"


def report_left_out(what: str, reason: str, *, rows: int | None = None) -> None:
    """Print that a figure, a table, or some rows of it are left out. rows: how many; None: all of it."""
    amount = "" if rows is None else f"{rows} row{'s'[: rows != 1]} of "
    print(f"left out: {amount}{what}: {reason}", file=sys.stderr)
