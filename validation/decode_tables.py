"""Published offline throughput of TensorRT-LLM as steps of decoding: `tensorrt_llm_a100` of `steps_measured.yaml`.

Requests are batched in flight: for each token that comes out a decode step of the whole batch, at the mean length of
the cache, and for each batch of requests the prefill of its prompts, so many tokens at a time. Nothing was fitted on
these rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dse.files import cell_number
from simulators.hardware.machine import tree_of
from simulators.workloads.model_zoo import model_tree, option_tree
from validation.amd_tables import TimedRow, median_error, rows_of
from validation.left_out import report_left_out
from validation.measured_step import Step, settings

TABLE = "tensorrt_llm_a100"


def decodes(data: Path) -> list[TimedRow]:
    """Time of a token of all sequences of a batch, with its share of prefills; none where there is no table."""
    chosen, timed = settings()[TABLE], list[TimedRow]()
    for row in rows_of(data / chosen["file"]):
        if row["gpu"] not in chosen["systems"]:
            report_left_out(f"decoding on {row['gpu']}", "none of the systems that steps_measured.yaml maps", rows=1)
            continue
        timed.append(_row(chosen, row))
    return timed


def _row(chosen: Mapping[str, Any], row: Mapping[str, str]) -> TimedRow:
    batch, tp, prompt, tokens = (
        round(cell_number(row, name)) for name in ("batch", "tp", "input_tokens", "output_tokens")
    )
    together = max(1, chosen["prefill_tokens"] // prompt)
    design: dict[str, Any] = {
        "system": tree_of(chosen["systems"][row["gpu"]]),
        "model": model_tree(row["model"]),
        "optimizer": option_tree("optimizer", "adam"),
        "kernels": option_tree("kernels", chosen["kernels"]),
        "parallel": {"tp": tp},
    }
    sizes = {"prefill": (together, prompt), "decode": (batch, prompt + tokens // 2)}
    runs = {mode: {**chosen["run"], "mode": mode, "batch": b, "sequence_length": s} for mode, (b, s) in sizes.items()}
    seconds = {mode: Step(TABLE, mode, {**design, "run": run}, 1.0, {}).predicted_s for mode, run in runs.items()}
    predicted = seconds["decode"] + seconds["prefill"] * batch / together / tokens
    measured = batch / (tp * cell_number(row, "tokens_per_s_per_gpu"))
    return TimedRow(f"{row['model']}, {batch} x {prompt} + {tokens}", measured, predicted, fitted=False)


def decode_figures(data: Path) -> dict[str, Any]:
    """Figures of the benchmark: decode_median [%]."""
    return {"decode_median": median_error(decodes(data))}
