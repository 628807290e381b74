"""Serving against measured points, and the speed of its engines: `python -m benchmarks.serving [--json] [--data DIR]`.

DIR has the tables of `dse_serving.measured`; without it the speeds alone are measured. `--fit` fits the constants of
`conf/server` and `conf/data/serving_kernels.yaml` of the plug-in to the rows that its rule names, and prints them.
`--witness` adds errors of aiconfigurator on the same rows (`dse_serving.witness`). An interrupt ends the predictions:
figures are then of the rows before it, and `stopped` is true.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dse.errors import ConfigError, Problem
from dse_serving.backend import ServingBackend
from dse_serving.deployment import Deployment
from dse_serving.design import deployment_of
from dse_serving.fitting import fit, fit_sets
from dse_serving.measured import (
    Point,
    Predictor,
    Row,
    design_tree,
    fitted_names,
    fitted_rows,
    frontier_error,
    rank_correlation,
    read_rows,
    rows_of_sets,
    settings,
    summary,
)
from dse_serving.reference import Cluster
from dse_serving.run import run
from dse_serving.traffic import TokenLengths, Traffic, TrafficSpec
from dse_serving.witness import ask

_BY = {"scheduler": "backend", "gpu": "system", "model": "model_path"}
_REQUESTS, _CONCURRENCY = 10_000, 64


def accuracy(folder: Path, *, witness: bool = False) -> dict[str, Any]:
    """Errors on the rows that nothing was fitted to, together and by software, GPU and model. witness: those of
    aiconfigurator as well.
    """
    rows, predictor = read_rows(folder), Predictor()
    fitted = {row.name for row in rows} & fitted_names()
    together = predictor.points([row for row in rows if not row.apart])
    apart = [row for row in rows if row.apart]
    known = predictor.points([row for row in apart if row.run is not None])
    free = [point for point in together if point.row.name not in fitted]
    if not free:
        rule = "gives no row that is predicted and that no constant was fitted on"
        raise ConfigError([Problem("--data", rule, str(folder), "name the folder of the measured tables")])
    total = summary(free)
    figures: dict[str, Any] = {name: total[name] for name in ("tpot_median", "tpot_p90", "ttft_median")}
    figures |= {"spearman_median": rank_correlation(together), "frontier_error": frontier_error(together)}
    figures |= {"disagg_tpot_median": summary(known).get("tpot_median"), "rows": total["rows"], "fitted": len(fitted)}
    figures |= {f"by_{name}": _by(free, column) for name, column in _BY.items()}
    if witness:
        figures["witness"] = ask([point.row for point in free]).beside(free)
    several, none = sum(len(row.runs) > 1 for row in apart), sum(not row.runs for row in apart)
    reason = f"of {len(apart)} rows, {several} may be of several runs of their benchmark, and {none} of no listed one: "
    reason += "their engines are not known, and they are not counted"
    return figures | {
        "disagg": {**summary(known), "reason": reason},
        "refused": predictor.refused,
        "stopped": predictor.stopped,
    }


def _by(points: Sequence[Point], column: str) -> dict[str, dict[str, float]]:
    names = sorted({point.row.cells[column] for point in points})
    return {name: summary([point for point in points if point.row.cells[column] == name]) for name in names}


def _deployment() -> tuple[Deployment, Traffic]:
    """A deployment of a public model, and requests of some hundred tokens."""
    cells = dict.fromkeys(("mode", "precision", "moe_ep_size", "attention_dp_size"), "")
    cells |= {"id": "speed", "backend": "vllm", "model_path": "meta-llama/Llama-3.1-8B-Instruct", "system": "h100_sxm"}
    cells |= {"isl": "1024", "osl": "256", "batch_size": str(_CONCURRENCY), "tp_size": "1", "silicon_data_source": ""}
    design = ServingBackend().design(design_tree(Row(cells, 0.0, 0.0)))
    lengths = {"input": TokenLengths(kind="uniform", tokens=1024), "output": TokenLengths(kind="uniform", tokens=256)}
    traffic = TrafficSpec(requests=_REQUESTS, concurrency=_CONCURRENCY, **lengths)
    return deployment_of(design), traffic.draw()


def speeds() -> dict[str, float]:
    """CPU times of the compiled loop against SimPy's, configurations a minute, and memory of a million requests."""
    deployment, traffic = _deployment()
    run(deployment, traffic)  # compiled, or read from the disk
    seconds = min(_seconds(lambda: run(deployment, traffic)) for _ in range(5))
    few = _part(traffic, 1000)
    compiled = min(_seconds(lambda: run(deployment, few)) for _ in range(5))
    reference = _seconds(Cluster(deployment, few).run)
    million = _part(traffic, 1_000_000)
    state = deployment.state(million)
    return {
        "speed_over_simpy": reference / compiled,
        "configs_per_min": 2 * 60 / seconds,  # on two cores, each with its own configurations
        "seconds_10000_requests": seconds,
        "bytes_1000000_requests": float(sum(array.nbytes for array in state)),
    }


def _part(traffic: Traffic, count: int) -> Traffic:
    """So many requests, the first ones or all of them several times."""
    chosen = np.arange(count) % traffic.size
    inputs, outputs, prefixes = traffic.inputs[chosen], traffic.outputs[chosen], traffic.prefixes[chosen]
    return Traffic(traffic.arrivals[chosen], inputs, outputs, prefixes, traffic.concurrency)


def _seconds(work: Any) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


def main(words: Sequence[str] | None = None) -> int:
    """Measure, or fit, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--data", type=Path, help="folder of measured tables")
    parser.add_argument("--fit", action="store_true", help="fit constants to the rows that the rule names")
    parser.add_argument("--witness", action="store_true", help="ask aiconfigurator about the same rows; needs --data")
    options = parser.parse_args(words)
    if options.witness and options.data is None:
        parser.error("--witness needs --data")
    if options.fit and options.data is None:
        parser.error("--fit needs --data")
    try:
        if options.fit:
            base = fit(fitted_rows(read_rows(options.data, settings()["fitted"]["file"])))
            print(json.dumps({**base, "sets": fit_sets(rows_of_sets(read_rows(options.data)))}, indent=2))
            return 0
        figures = {**({} if options.data is None else accuracy(options.data, witness=options.witness)), **speeds()}
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(figures, indent=2))
    else:
        print("\n".join(f"{name}: {value}" for name, value in figures.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
