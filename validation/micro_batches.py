"""Two micro-batches as `advise` predicts them, against prefills that were measured both ways (microsoft/tokenweave).

A row of `tokenweave/prefill_*.csv` has the time of a prefill with its all-reduces, without them, and with two halves of
the tokens, of which one computes while the other communicates. The first two make a profile of the
model's GEMMs and all-reduces. The third is predicted by the what-if; nothing is fitted to it. The measured halves also
fuse norms into the all-reduces and choose where they cut the tokens, which the what-if does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from dse_traces.change.what_if import Plan, WhatIfs
from dse_traces.laws.contention import assumed_laws
from dse_traces.laws.task_graph import contention_model
from dse_traces.profile.kernels import Profile, profile_of
from simulators.workloads.model_zoo import model_tree
from validation.left_out import files_below

MACHINE = "h100_8"
_MODEL = "llama3_70b"
_TILE = (128, 256)  # rows and columns of the result that a CTA computes (assumed)
_CTAS, _BYTES = 16, 2
_MS = 1e-3


@dataclass(frozen=True)
class HalvedPrefill:
    """A prefill in two halves: tokens, times [s] as recorded and measured in halves, predicted [3] from low to high."""

    tokens: int
    plain_s: float
    measured_s: float
    predicted_s: tuple[float, float, float]

    @property
    def error(self) -> float:
        """Predicted time over the measured one, less one."""
        return self.predicted_s[1] / self.measured_s - 1

    @property
    def gain_error(self) -> float:
        """Predicted share of the time that is saved less the measured one."""
        return (self.measured_s - self.predicted_s[1]) / self.plain_s

    @property
    def is_inside(self) -> bool:
        """Whether the measured time is in the interval."""
        return self.predicted_s[0] <= self.measured_s <= self.predicted_s[2]


def products(tp: int) -> list[tuple[int, int]]:
    """Outputs and inputs (n, k) of the GEMMs of a layer on one of `tp` GPUs: attention in and out, feed-forward in and
    out; an all-reduce follows the second and the fourth.
    """
    model = model_tree(_MODEL)
    hidden, ffn, width = model["hidden"], model["ffn"], model["head_dim"]
    heads = (model["heads"] + 2 * model["kv_heads"]) * width
    return [(heads // tp, hidden), (hidden, model["heads"] * width // tp), (2 * ffn // tp, hidden), (hidden, ffn // tp)]


def made_prefill(plain_s: float, computed_s: float, tokens: int, tp: int) -> Profile:
    """A profile of one stream: the GEMMs of each layer, which share the time without all-reduces by their FLOP, and an
    all-reduce after every second one.
    """
    layers, gemms = model_tree(_MODEL)["layers"], products(tp)
    flop, reduce_s = sum(n * k for n, k in gemms), (plain_s - computed_s) / layers / 2
    rows, start = list[dict[str, Any]](), 0.0
    for place in range(layers * len(gemms)):
        n, k = gemms[place % len(gemms)]
        ctas, seconds = int(np.ceil(tokens / _TILE[0]) * np.ceil(n / _TILE[1])), computed_s / layers * n * k / flop
        rows.append({"name": "layer_gemm", "stream": "7", "start_s": start, "seconds": seconds, "ctas": ctas})
        start += seconds
        if place % 2:
            payload = float(tokens * model_tree(_MODEL)["hidden"] * _BYTES)
            summed = {"name": "multimem_all_reduce", "ctas": _CTAS, "payload_bytes": payload, "group_size": tp}
            rows.append({**summed, "stream": "7", "start_s": start, "seconds": reduce_s})
            start += reduce_s
    return profile_of(rows, "made")


def halved_prefills(data: Path) -> Iterator[HalvedPrefill]:
    """Yield the prefills of the tables below a folder that have all three times, and communicate."""
    for file in files_below(data, "prefill_*.csv"):
        for row in pd.read_csv(file, comment="#").to_dict("records"):
            plain, computed, halves = (float(row[name]) for name in ("baseline_multimem", "no_ar", "overlap_fused"))
            if not (np.isfinite([plain, computed, halves]).all() and plain > computed > 0):
                continue
            tokens, tp = int(row["prompt_len"]), int(row["tp"])
            profile = made_prefill(plain * _MS, computed * _MS, tokens, tp)
            runs = WhatIfs(contention_model(profile, assumed_laws(MACHINE)))
            low, middle, high = runs.seconds([Plan(micro_batches=2)])[0].tolist()
            yield HalvedPrefill(tokens, plain * _MS, halves * _MS, (min(low, high), middle, max(low, high)))


def micro_batch_figures(data: Path) -> dict[str, float]:
    """Median errors of times and of gains [percentage points], and the share of times that are in the interval; {}
    without a prefill.
    """
    rows = list(halved_prefills(data))
    return (
        {}
        if not rows
        else {
            "micro_batches_time": float(np.median([abs(row.error) for row in rows])),
            "micro_batches_gain_points": float(np.median([100 * abs(row.gain_error) for row in rows])),
            "micro_batches_in_interval": float(np.mean([row.is_inside for row in rows])),
        }
    )


def lines(data: Path) -> Iterator[str]:
    """Yield a line for each prefill."""
    for row in halved_prefills(data):
        low, middle, high = (1e3 * seconds for seconds in row.predicted_s)
        times = f"{1e3 * row.plain_s:8.1f} ms, in halves {1e3 * row.measured_s:8.1f} measured"
        yield f"prefill of {row.tokens:6,} tokens {times}, {middle:8.1f} ({low:.1f} to {high:.1f}) predicted"
