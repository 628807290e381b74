"""aiconfigurator (NVIDIA, Apache-2.0) as a witness: its predictions beside ours on the same measured rows.

It runs in a process of its own, by the interpreter that the variable AICONFIGURATOR names, or by this one, and is asked
by its Python API alone (`cli_estimate`: one engine that does both, in steady state at a batch size).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dse.errors import ConfigError
from dse.errors.parsing import parse_json
from dse_serving.measured import Point, Row, summary

VARIABLE = "AICONFIGURATOR"
_SCRIPT = Path(__file__).with_name("ask_aiconfigurator.py")
_SIZES = ("tp_size", "pp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size")
_MODES = ("gemm_quant_mode", "moe_quant_mode")
_MOST_S = 1800  # for all rows


@dataclass(frozen=True)
class Testimony:
    """Rows with predictions of the witness, and why it has none for others: by reason, or for all."""

    points: tuple[Point, ...] = ()
    refused: Mapping[str, int] | None = None
    skipped: str | None = None

    def beside(self, ours: Sequence[Point]) -> dict[str, Any]:
        """Errors of both on the rows that both predict."""
        if self.skipped is not None:
            return {"skipped": self.skipped}
        # rows that one of both refuses would favour the other
        names = {point.row.name for point in self.points}
        same = [point for point in ours if point.row.name in names]
        known = {point.row.name for point in same}
        theirs = [point for point in self.points if point.row.name in known]
        return {"aiconfigurator": summary(theirs), "ours": summary(same), "refused": dict(self.refused or {})}


def question(row: Row) -> dict[str, Any]:
    """Keywords of `cli_estimate` for a row."""
    cells, (inputs, outputs) = row.cells, row.lengths
    # 0 and empty: left to its default
    sizes = {name: round(float(cells[name])) for name in _SIZES if float(cells.get(name) or 0) > 0}
    modes = {name: cells[name] for name in _MODES if cells.get(name)}
    named = {"model_path": cells["model_path"], "system_name": cells["system"], "backend_name": cells["backend"]}
    return {**named, "isl": inputs, "osl": outputs, "batch_size": row.concurrency, **sizes, **modes}


def ask(rows: Sequence[Row]) -> Testimony:
    """Predictions of rows whose engines do both; skipped, with the reason, where the package does not answer."""
    rows = [row for row in rows if not row.apart]
    python = os.environ.get(VARIABLE) or sys.executable
    questions = json.dumps([question(row) for row in rows])
    try:
        done = subprocess.run(
            [python, _SCRIPT], input=questions, capture_output=True, text=True, timeout=_MOST_S, check=False
        )
        answers = parse_json(done.stdout.splitlines()[-1], str(_SCRIPT)) if done.returncode == 0 else None
    except (OSError, subprocess.TimeoutExpired, ConfigError, IndexError) as error:
        return Testimony(skipped=f"{python} does not answer: {error}")
    if answers is None:
        reason = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit code {done.returncode}"
        way = f"pip install aiconfigurator, or name an interpreter that has it by {VARIABLE}=<python>"
        return Testimony(skipped=f"{reason} ({way})")
    pairs = list(zip(rows, answers, strict=True))
    # it answers in ms
    points = [Point(row, answer[0] / 1e3, answer[1] / 1e3) for row, answer in pairs if isinstance(answer, list)]
    return Testimony(tuple(points), Counter(answer for answer in answers if isinstance(answer, str)))
