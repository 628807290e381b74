"""Simulators of others beside ours, on collectives that NCCL ran: errors side by side.

Ours is judged on rows that its constants were not fitted on; the others were fitted to nothing here. Points/s are
printed by `python -m benchmarks.peers`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from dse.plots import Draw, FigureSheet, Frame
from dse.plots import predictions as charts
from studies.plain import Plain

if TYPE_CHECKING:
    import pandas as pd

_MODEL = "predict.model"
_NAMES = {"fitted": "ours", "nearest": "nearest row", "astra_sim": "ASTRA-sim", "simgrid": "SimGrid"}


class Peers(Plain):
    """A figure of the errors of every simulator that is there."""

    columns = ("table.device", "table.kind")

    def figures(self, table: pd.DataFrame, timelines: pd.DataFrame) -> Iterator[tuple[str, Draw]]:
        """Errors of each simulator on each collective."""
        ok = table[table["status"] == "ok"]
        if len(ok):
            yield "errors_by_simulator", partial(_errors_by_simulator, ok)


def _errors_by_simulator(ok: pd.DataFrame) -> FigureSheet:
    rows = ok.assign(device=ok["table.kind"].str.replace("_", "-"), kind=ok["table.device"])
    rows = rows.assign(model=ok[_MODEL].map(_NAMES))
    rows = rows.assign(median=ok["median_error"], p90=ok["p90_error"], signed=ok["signed_error"])
    medians = 100 * rows.groupby("model", sort=False)["median"].median()
    title = "Collectives are off by " + ", ".join(f"{off:.0f} % ({name})" for name, off in medians.items())
    there = [name for name in _NAMES.values() if name in set(rows["model"])]
    return charts.errors(rows, there, frame=Frame(title, "medians over the four collectives"))


STUDY = Peers()
