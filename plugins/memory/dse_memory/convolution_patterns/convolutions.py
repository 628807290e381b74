"""Simulated convolutions against measured ones: a layer takes the time of its fastest algorithm, as in libraries.

Libraries have all six algorithms in some form. Gradients of cuDNN that form no columns in memory, but add partial
products by atomic operations (ALGO_0 of its reference), count as `gemm`, which writes partial products and adds them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from dse_calibration.predictions import Errors
from dse_memory.measured import PASSES, MeasuredConvolutions, load_measured_systems

if TYPE_CHECKING:
    import pandas as pd

_FAMILIES = ("winograd", "fft")
"""Families of algorithms, by parts of their names; all other algorithms are direct."""


def against(systems: Sequence[str], folder: str | None, rows: pd.DataFrame) -> pd.DataFrame:
    """Compare measured times with simulated ones: a row for each measured time and hash.

    systems: memory systems. folder: that of their tables (None: the shipped ones). rows: points with `scenario`,
    `direction`, `algorithm`, `hash` and `time_s`. Columns: system, hash, layer, direction, measured_s, predicted_s,
    algorithm, said (in the table), fitted (whether constants were, on the layer).
    """
    import pandas as pd

    parts = [pd.DataFrame()]  # so that there is something to join without measured systems
    simulated = rows[["scenario", "direction", "algorithm", "hash", "time_s"]].astype({"scenario": str})
    for measured in load_measured_systems(systems, folder):
        pairs = _times(measured).merge(simulated, on=["scenario", "direction"])
        # the fastest algorithm stands for the library
        fastest = pairs.groupby(["row", "direction", "hash"], sort=False)["time_s"].idxmin()
        parts.append(pairs.loc[fastest].rename(columns={"time_s": "predicted_s"}))
    return pd.concat(parts, ignore_index=True)


def _times(measured: MeasuredConvolutions) -> pd.DataFrame:
    """Table of a system's measured times, a row each."""
    import pandas as pd

    rows, parts = measured.rows, []
    for direction, column in PASSES.items():
        columns = {
            "system": measured.system,
            "scenario": [measured.scenario(row) for row in range(rows.size)],
            "layer": rows.names,
            "direction": direction,
            "measured_s": rows.seconds[:, rows.passes.index(column)],
            "said": rows.algorithms if direction == "forward" else "",
            "fitted": [name in measured.fitted for name in rows.names],
        }
        parts.append(pd.DataFrame(columns).rename_axis("row").reset_index())
    return pd.concat(parts, ignore_index=True).dropna(subset="measured_s")  # passes that were not measured


def errors(beside: pd.DataFrame) -> dict[str, Any]:
    """Content of `errors.json`: errors of the rows of `against` by system and hash, direction and algorithm.

    Layers that constants were fitted on count under `with_layers_fitted_on` alone.
    """
    summary: dict[str, Any] = {}
    for (system, hashed), group in beside.groupby(["system", "hash"], sort=False):
        unfitted = group[~group["fitted"]]
        labelled = unfitted[unfitted["said"] != ""]  # tables that name the library's choice
        matches = [
            _family(ours) == _family(theirs)
            for ours, theirs in zip(labelled["algorithm"], labelled["said"], strict=True)
        ]
        summary.setdefault(str(system), {})[str(hashed)] = {
            "all": _error(unfitted),
            "with_layers_fitted_on": _error(group),
            "by_direction": {str(name): _error(part) for name, part in unfitted.groupby("direction", sort=False)},
            "by_algorithm": {str(name): _error(part) for name, part in unfitted.groupby("algorithm", sort=False)},
            "forward_algorithm_as_measured": float(np.mean(matches)) if matches else None,
        }
    return summary


def _error(rows: pd.DataFrame) -> dict[str, float] | None:
    """Absolute relative errors and correlations; bias: the median of predicted over measured."""
    predicted, measured = rows["predicted_s"].to_numpy(float), rows["measured_s"].to_numpy(float)
    statistics = Errors.of(predicted, measured)
    return None if statistics is None else {**asdict(statistics), "bias": float(np.median(predicted / measured))}


def _family(algorithm: str) -> str:
    return next((name for name in _FAMILIES if name in algorithm.lower()), "direct")
