"""Whole steps and plans: how right and how fast. `python -m benchmarks.plan [--data DIR] [--json] [--quick]`.

Right: published training throughput (`conf/data`, whatever DIR is), and below DIR prefills with and without overlap,
steps of GPT and Llama, exchanges of experts, and two micro-batches in opposite phases, each on rows that nothing was
fitted on (`validation.steps_measured`, `validation.overlaps`, `benchmarks.expert_exchanges`, `validation.dualpipe`).
What is left out is printed on stderr: rows that constants were fitted on, and figures that no table gives. Fast: a step
of Llama-3.1-405B from its description to its metrics, steps a second of one core in a grid over numbers of sites, and
the seconds to the answer of `study=plan`. A plan against the optimum of a space that can be enumerated. `--quick`:
without plans, which are run from the command line.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import expert_exchanges
from benchmarks.first_minute import answer_and_prompt
from benchmarks.timing import best
from dse.backend import Batch
from dse.cli import main as dse_main
from dse.results.run_folder import Outputs
from dse_calibration.overlap_measured.prefills import BASELINE, OVERLAPPED
from simulators.steps.backend import StepBackend, metrics_of
from simulators.steps.overlap.sites import SITES
from simulators.workloads.model_zoo import model_tree, option_tree
from validation import dualpipe, steps_measured
from validation.left_out import FITTED, files_below, given_folder, report_left_out
from validation.overlaps import GAIN, judged_prefills

_DENSE = ("model=llama3_70b", "system=h100_8")
_MOE = ("model=deepseek_v3", "system=h100_96gb_8", "run.mode=training", "run.micro_batches=16", "parallel.tp=4")
_MOE_GROUPS = ("parallel.pp=8", "parallel.dp=8", "parallel.ep=32", "parallel.zero=1", "parallel.sequence_parallel=true")
_AUTO = ("run.mode=training", "layouts.auto=true", "system=h100_96gb_8")
_DENSE_AUTO = (*_AUTO, "model=llama3_70b", "run.batch=64", "layouts.gpus=32")
_MOE_AUTO = (*_AUTO, "model=deepseek_v3", "run.batch=4096", "layouts.gpus=256")
_FEW = "choice(serial,'uniform_fused_1d num_chunks=4','hetero_fused_1d num_chunks=2',shard_p2p,signalled)"
_AXES = {"sites.ffn_in.comm_cus": 24, "sites.ffn_out.comm_cus": 24, "sites.attention_in.comm_cus": 8}
_BY_CUS = "hetero_fused_1d comm_engine=cu comm_cus=8"


def accuracy(data: Path | None) -> dict[str, float]:
    """Errors of whole steps and of what they are made of: published steps, and what the tables below `data` give."""
    rows = list(steps_measured.by_table(steps_measured.published_steps()).values())
    figures = {"throughput_median": _mean(rows, "median"), "throughput_worst": max(row["worst"] for row in rows)}
    for name, read in _OF_TABLES.items() if data is not None else ():
        assert data is not None
        values = read(data)
        if not values:
            report_left_out(name, f"no table below {data} gives it")
        figures |= values
    return figures


def _mean(rows: Sequence[Mapping[str, float]], name: str) -> float:
    """Mean of a number of tables, by their rows."""
    return sum(row[name] * row["count"] for row in rows) / sum(row["count"] for row in rows)


def _of_steps(data: Path) -> dict[str, float]:
    """Median error of steps on the GPUs of one node."""
    measured = steps_measured.steps_of("megatron_deepspeed", data)
    if fitted := sum(step.fitted for step in measured):
        report_left_out("steps of Megatron-DeepSpeed", FITTED, rows=fitted)
    rows = list(steps_measured.by_table(measured).values())
    return {"steps_vtrain_median": _mean(rows, "median")} if rows else {}


def _of_overlaps(data: Path) -> dict[str, float]:
    """Median error of steps with and without async tensor parallelism, and of the gain in points."""
    pairs = steps_measured.overlapped_steps(data)
    if not pairs:
        return {}
    errors = [abs(step.error) for pair in pairs for step in (pair.serial, pair.overlapped)]
    gains = [abs(pair.gain_error) for pair in pairs]
    return {
        "steps_async_tp_median": float(np.median(errors)),
        "steps_async_tp_gain_points": 100 * float(np.median(gains)),
        "steps_async_tp_gain_points_worst": 100 * max(gains),
    }


def _of_prefills(data: Path) -> dict[str, float]:
    files = list(files_below(data, "prefill_llama_70b.csv"))
    rows = {row["kind"]: row["median"] for file in files[:1] for row in judged_prefills(file)}
    times = [rows[kind] for kind in (BASELINE, OVERLAPPED) if kind in rows]
    figures = {"prefill_median": max(times)} if times else {}
    return figures | ({"prefill_gain_points": 100 * rows[GAIN]} if GAIN in rows else {})


def _of_experts(data: Path) -> dict[str, float]:
    """Median of all measured rows, and the largest of the tables of one library on one device; published rows apart."""
    judged = expert_exchanges.judged_rows(data) if expert_exchanges.tables_below(data) else []
    rows, errors = expert_exchanges.medians_of(judged), expert_exchanges.errors_of_rows(judged)
    measured, published = (
        [row["median"] for name, row in rows.items() if name.startswith("published") == apart]
        for apart in (False, True)
    )
    figures = {"ep_median": float(np.median(np.abs(errors)))} if errors else {}
    figures |= {"ep_median_worst_table": max(measured)} if measured else {}
    return figures | ({"ep_published_median_worst": max(published)} if published else {})


def _of_pairs(data: Path) -> dict[str, float]:
    """Errors with sign of a forward and a backward chunk of two micro-batches side by side."""
    files = list(files_below(data, dualpipe.TABLE))
    return dualpipe.figures(files[0].parent) if files else {}


_OF_TABLES: Mapping[str, Callable[[Path], dict[str, float]]] = {
    "steps_vtrain_...": _of_steps,
    "steps_async_tp_...": _of_overlaps,
    "prefill_...": _of_prefills,
    "ep_...": _of_experts,
    "dualpipe_...": _of_pairs,
}
"""Figures -> what reads them from the tables below a folder."""


def speed() -> dict[str, float]:
    """Seconds of one large step, and steps a second of one core in a grid."""
    backend, tree = StepBackend(), _large()
    backend.design(tree)
    design = backend.design(_with_sites())
    axes = {path: np.linspace(4, top, 16).round() for path, top in _AXES.items()}
    batch = Batch(Batch(design, axes).at(0), axes)
    backend.evaluate([batch])
    return {
        "step_405b_s": best(lambda: metrics_of(StepBackend().design(tree)), 5),
        "steps_per_s": batch.size / best(lambda: backend.evaluate([batch])),
    }


def _large() -> dict[str, Any]:
    """A step of Llama-3.1-405B on 8,192 GPUs."""
    return _step("llama3.1_405b", run={"mode": "training", "micro_batches": 16}, parallel={"pp": 16, "dp": 64})


def _with_sites() -> dict[str, Any]:
    gathers = dict.fromkeys(("ffn_in", "ffn_out", "attention_in"), _BY_CUS)
    return {**_step("llama3_70b", run={"mode": "prefill"}, parallel={"sequence_parallel": True}), "sites": gathers}


def _step(model: str, *, run: Mapping[str, Any], parallel: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "system": dualpipe.with_network("h100_8"),
        "model": model_tree(model),
        "run": {"batch": 1, "sequence_length": 8192, "precision": "bf16", **run},
        "parallel": {"tp": 8, **parallel},
        "optimizer": option_tree("optimizer", "adam"),
        "kernels": option_tree("kernels", "flash"),
    }


def plans() -> Iterator[tuple[str, float]]:
    """Yield seconds to the answers of plans, with degrees given and chosen, and how near they are to the optimum."""
    of_degrees = {"plan_dense": _DENSE, "plan_moe": (*_MOE, *_MOE_GROUPS)}
    for name, words in {**of_degrees, "plan_dense_auto": _DENSE_AUTO, "plan_moe_auto": _MOE_AUTO}.items():
        with tempfile.TemporaryDirectory(prefix="dse-plan-") as folder:
            answer_s, prompt_s = answer_and_prompt(Path(folder), "plan", {}, *words)
        yield f"{name}_s", answer_s
        yield f"{name}_prompt_s", prompt_s
    yield "plan_share_of_optimum", share_of_optimum()
    yield "plan_auto_share_of_optimum", auto_share_of_optimum()


def share_of_optimum() -> float:
    """Least time of all points of a space over that of the plan's search in it."""
    sites = [name for name, site in SITES.items() if not name.endswith("_backward")]
    space = [f"space.sites.{name}={_FEW}" for name in sites]
    fixed = ["parallel.sequence_parallel=true", "parallel.split_ctas=0", "parallel.collectives=library"]
    with tempfile.TemporaryDirectory(prefix="dse-plan-") as folder:
        times = [
            _least(
                [*_DENSE, *fixed, *space, f"budget.trials={trials}", f"output_dir={folder}/{trials}"],
                Path(folder, f"{trials}"),
            )
            for trials in (700, 600)  # of 625 points: all, or those that the search asks for
        ]
    return times[0] / times[1]


def auto_share_of_optimum() -> float:
    """Least time of a step in any layout over that of the plan, which searches the schedules of a few of them."""
    words = [*_AUTO, "model=llama3_8b", "run.batch=16", "parallel.split_ctas=0", "parallel.collectives=library"]
    space = [f"space.sites.{name}={_FEW}" for name in SITES]
    with tempfile.TemporaryDirectory(prefix="dse-plan-") as folder:
        times = [
            _least([*words, *space, *most, f"output_dir={folder}/{place}"], Path(folder, f"{place}"))
            for place, most in enumerate((["layouts.most=1000"], []))
        ]
    return times[0] / times[1]


def _least(words: Sequence[str], folder: Path) -> float:
    quiet = ("tracking=none", "figures=none", "store=none", "timeline=false")
    with contextlib.redirect_stdout(sys.stderr):
        code = dse_main(["study=plan", *quiet, *words])
    if code:
        raise RuntimeError("study=plan was refused, or points failed")
    table = Outputs.latest(folder, "plan").read_table("results")
    return float(table.loc[table["status"] == "ok", "iteration_s"].min())


def main(words: Sequence[str] | None = None) -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=given_folder, help="folder of measured tables")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="without plans from the command line")
    asked = parser.parse_args(words)
    began = time.monotonic()
    figures = accuracy(asked.data) | speed()
    figures |= {} if asked.quick else dict(plans())
    if asked.json:
        print(json.dumps(figures, indent=2))
        return 0
    for name, value in figures.items():
        print(f"{name:<36}{value:.4g}")
    print(f"({time.monotonic() - began:.0f} s)", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
