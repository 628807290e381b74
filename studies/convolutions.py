"""Simulated convolutions beside measured ones: a layer takes what the fastest algorithm takes, as libraries choose it.

Libraries have all six in some form: gradients of cuDNN that form no columns in memory, but add parts of products up by
atomic operations (ALGO_0 of its reference), are taken as `gemm`, which writes these parts and adds them up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from simulators.calibration.predictions import Errors
from simulators.memory.measured import PASSES, Measured, load_measured_systems

if TYPE_CHECKING:
    import pandas as pd

_FAMILIES = ("winograd", "fft")
"""Of algorithms, by parts of their names; everything else multiplies as the convolution is defined."""


def against(systems: Sequence[str], folder: str | None, rows: pd.DataFrame) -> pd.DataFrame:
    """A row for each measured time and hash, of memory systems and the tables of a folder (None: the shipped ones).

    rows: points with `scenario`, `direction`, `algorithm`, `hash` and `time_s`. Columns: system, hash, layer,
    direction, measured_s, predicted_s, algorithm, said (in the table), fitted (whether constants were, on the layer).
    """
    import pandas as pd

    found = [pd.DataFrame()]
    ours = rows[["scenario", "direction", "algorithm", "hash", "time_s"]].astype({"scenario": str})
    for one in load_measured_systems(systems, folder):
        pairs = _times(one).merge(ours, on=["scenario", "direction"])
        fastest = pairs.groupby(["row", "direction", "hash"], sort=False)["time_s"].idxmin()
        found.append(pairs.loc[fastest].rename(columns={"time_s": "predicted_s"}))
    return pd.concat(found, ignore_index=True)


def _times(one: Measured) -> pd.DataFrame:
    """Measured times, a row each."""
    import pandas as pd

    rows, parts = one.rows, []
    for direction, column in PASSES.items():
        columns = {
            "system": one.system,
            "scenario": [one.scenario(row) for row in range(rows.size)],
            "layer": rows.names,
            "direction": direction,
            "measured_s": rows.seconds[:, rows.passes.index(column)],
            "said": rows.algorithms if direction == "forward" else "",
            "fitted": [name in one.fitted for name in rows.names],
        }
        parts.append(pd.DataFrame(columns).rename_axis("row").reset_index())
    return pd.concat(parts, ignore_index=True).dropna(subset="measured_s")


def errors(beside: pd.DataFrame) -> dict[str, Any]:
    """`errors.json`, of rows as `against` gives them: by system and hash; all, by direction and by algorithm.

    Of layers that were not fitted on, but where it says so.
    """
    found: dict[str, Any] = {}
    for (system, hashed), every in beside.groupby(["system", "hash"], sort=False):
        own = every[~every["fitted"]]
        said = own[own["said"] != ""]
        alike = [_family(ours) == _family(theirs) for ours, theirs in zip(said["algorithm"], said["said"], strict=True)]
        found.setdefault(str(system), {})[str(hashed)] = {
            "all": _error(own),
            "with_layers_fitted_on": _error(every),
            "by_direction": {str(name): _error(part) for name, part in own.groupby("direction", sort=False)},
            "by_algorithm": {str(name): _error(part) for name, part in own.groupby("algorithm", sort=False)},
            "forward_algorithm_as_measured": float(np.mean(alike)) if alike else None,
        }
    return found


def _error(rows: pd.DataFrame) -> dict[str, float] | None:
    """Absolute relative errors and correlations; bias: the median of predicted over measured."""
    ours, theirs = rows["predicted_s"].to_numpy(float), rows["measured_s"].to_numpy(float)
    found = Errors.of(ours, theirs)
    return None if found is None else {**asdict(found), "bias": float(np.median(ours / theirs))}


def _family(algorithm: str) -> str:
    return next((name for name in _FAMILIES if name in algorithm.lower()), "direct")
