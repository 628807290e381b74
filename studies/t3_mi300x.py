"""Worth of T3's tracking on MI300X: predictions about which nothing is published."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from dse.results.published import PublishedFigure
from dse.results.run_folder import FinishedRun
from studies.plain import Plain
from studies.t3 import STUDY as T3

if TYPE_CHECKING:
    import pandas as pd

    from dse.plots import Draw


class T3OnMI300X(Plain):
    """Figures and tables of `study=t3`, without its claims, which are about the GPU that T3 simulates."""

    columns = (
        "schedule.name",
        "schedule.reduction",
        "schedule.near_memory",
        "schedule.arbitration",
        "schedule.occupancy_threshold",
        "workload.operators.gemm.shards",
        "system.node.link_bytes_per_s",
    )

    def published_values(self) -> list[PublishedFigure]:
        """Published values are of the GPU that the paper simulates."""
        return [PublishedFigure("*", reason="the paper simulates another GPU")]

    def figures(self, table: pd.DataFrame, timelines: pd.DataFrame) -> Iterator[tuple[str, Draw]]:
        """Figures of `study=t3`."""
        return T3.figures(table, timelines)

    def extras(self, run: FinishedRun) -> Iterator[tuple[str, Any]]:
        """Tables and figures of `study=t3`."""
        return T3.extras(run)


STUDY = T3OnMI300X()
