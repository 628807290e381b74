"""Published and predicted throughput of training on one GPU: seconds for a sequence or a token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from dse.config.options import list_options
from dse.plots import Frame, Sheet, predictions
from simulators.hardware.machine import tree_of_gpu
from simulators.steps.backend import StepBackend
from simulators.steps.design import Design
from studies.common.facts import read_rows

if TYPE_CHECKING:
    import pandas as pd

_PRECISIONS = ("fp32", "mixed")


def rows_of(name: str) -> Iterator[Mapping[str, str]]:
    """Yield rows of `conf/data/<name>.csv` of one GPU, at a modelled precision, with padded sequences."""
    for row in read_rows(name):
        if row["gpus"] == "1" and row["precision"] in _PRECISIONS and row.get("padded", "true") == "true":
            yield row


def design_of(row: Mapping[str, str], sections: Mapping[str, Any], run: Mapping[str, Any]) -> Design:
    """Design of a row: its device and precision, the other sections as given."""
    device = tree_of_gpu(_gpu(row["device"]))
    sections_of_row = {"system": device, "parallel": {}, "run": {**run, "precision": row["precision"]}}
    return StepBackend().design({**sections, **sections_of_row})


def _gpu(name: str) -> str:
    """Name of a published device's GPU: its own, or that of its family."""
    return name if name in list_options("gpu") else name.partition("_")[0]


def table(name: str, ours: Callable[[Mapping[str, str]], tuple[str, float, float]]) -> pd.DataFrame:
    """Table of measured and predicted rates, a row for each published row.

    ours: row -> (kind, measured rate, predicted rate) [1/s].
    """
    import pandas as pd

    rows = []
    for row in rows_of(name):
        kind, measured, ours_per_s = ours(row)
        labels = {"device": f"{row['device']} {row['precision']}", "kind": kind, "batch": int(row["batch"])}
        rows.append({**labels, "measured_per_s": measured, "ours_per_s": ours_per_s, "source": row["source"]})
    return pd.DataFrame(rows)


def figure(rows: pd.DataFrame, what: str) -> Sheet:
    """Seconds of one sequence or token, measured and predicted, a panel for each kind."""
    times = rows.assign(measured_s=1 / rows["measured_per_s"], predicted_s=1 / rows["ours_per_s"], fitted=False)
    error = 100 * (predictions.median_error(times) or 0.0)
    title = f"The time of {what} is predicted to {error:.0f} % in the median of {len(times)} published times"
    return predictions.scatter(times, by="device", frame=Frame(title, "published throughput of training on one GPU"))
