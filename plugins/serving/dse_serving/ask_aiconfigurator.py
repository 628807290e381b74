"""Predictions of aiconfigurator's Python API for rows on standard input, run by an interpreter that has the package.

Input: a JSON list of keywords of `cli_estimate`. The last line of the output: a JSON list of [time to the first token,
time of a later one] in ms, or of a reason. Nothing of this repository is imported.
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any


def main() -> None:
    """Answer all rows."""
    from aiconfigurator.cli.api import cli_estimate  # type: ignore[import-not-found,unused-ignore]

    answers: list[Any] = []
    for keywords in json.load(sys.stdin):
        try:
            with contextlib.redirect_stdout(sys.stderr):
                estimate = cli_estimate(**keywords)
            answers.append([float(estimate.ttft), float(estimate.tpot)])
        except Exception as error:  # whatever it raises is why it has no prediction
            answers.append(f"{type(error).__name__}: {error}"[:200])
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
