"""Published and predicted throughput of training on one GPU: seconds for a sequence or a token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from dse.config.options import list_options
from dse.plots import FigureSheet, Frame, predictions
from dse.space import Case
from simulators.hardware.machine import tree_of_gpu
from studies.common.facts import read_rows

if TYPE_CHECKING:
    import pandas as pd

Cases = dict[str, Case]
# tables also have tf32 (FP32 tensors on matrix units), which steps do not model
_PRECISIONS = ("fp32", "mixed")


def rows_of(name: str) -> Iterator[Mapping[str, str]]:
    """Yield rows of `conf/data/<name>.csv` of one GPU, at a modelled precision, with padded sequences."""
    for row in read_rows(name):
        # of sequences without padding the number of tokens is unknown
        if row["gpus"] == "1" and row["precision"] in _PRECISIONS and row.get("padded", "true") == "true":
            yield row


def cases(name: str, sections: Mapping[str, Any], run_of: Callable[[Mapping[str, str]], Mapping[str, Any]]) -> Cases:
    """A step for each row of `conf/data/<name>.csv`, by its place: its device and precision, other sections as given.

    run_of: row -> section `run`, but for the precision.
    """
    return {
        # one GPU, whatever the study's own machine is
        str(place): Case({**sections, "system": tree_of_gpu(_gpu(row["device"])), "parallel": {}, "run": run})
        for place, row in enumerate(rows_of(name))
        for run in [{**run_of(row), "precision": row["precision"]}]
    }


def _gpu(name: str) -> str:
    """Name of a published device's GPU: its own, or that of its family."""
    return name if name in list_options("gpu") else name.partition("_")[0]  # `v100_dgx` is a V100


def table(
    name: str, probe: pd.DataFrame, rates: Callable[[Mapping[str, str], float], tuple[str, float, float]]
) -> pd.DataFrame:
    """Table of measured and predicted rates, a row for each published row that `probe` has the step of.

    rates: row and time of its step [s] -> (kind, measured rate, predicted rate) [1/s].
    """
    import pandas as pd

    # a probe is empty where every step was refused
    seconds = dict(zip(probe["scenario"].astype(str), probe["iteration_s"], strict=True)) if len(probe) else {}
    rows = []
    for place, row in enumerate(rows_of(name)):
        if str(place) not in seconds:  # a step that the model refuses, such as one that does not fit
            continue
        kind, measured, ours_per_s = rates(row, float(seconds[str(place)]))
        labels = {"device": f"{row['device']} {row['precision']}", "kind": kind, "batch": int(row["batch"])}
        rows.append({**labels, "measured_per_s": measured, "ours_per_s": ours_per_s, "source": row["source"]})
    return pd.DataFrame(rows)


def figure(rows: pd.DataFrame, what: str) -> FigureSheet:
    """Seconds of one sequence or token, measured and predicted, a panel for each kind."""
    # times per item, as errors of times are what is judged
    times = rows.assign(measured_s=1 / rows["measured_per_s"], predicted_s=1 / rows["ours_per_s"], fitted=False)
    error = 100 * (predictions.median_error(times) or 0.0)
    title = f"The time of {what} is predicted to {error:.0f} % in the median of {len(times)} published times"
    return predictions.scatter(times, by="device", frame=Frame(title, "published throughput of training on one GPU"))
