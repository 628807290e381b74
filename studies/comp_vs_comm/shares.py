"""Communication's share of a step as a table: widths of models by how much faster arithmetic gets than links."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dse.results.words import cell
from studies.comp_vs_comm.cases import BATCH, FASTER, LENGTH, TP, WIDTH

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table


def least_fitting(points: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Of each group the point at the least TP whose memory suffices, or at the largest there is."""
    import pandas as pd

    selected = []
    for _, rows in points.groupby(by, sort=False):
        fits = rows[rows["memory_share"] <= 1]
        # rows are sorted by TP: the first that fits, or the last of all
        selected.append((fits if len(fits) else rows).sort_values(TP).iloc[[0 if len(fits) else -1]])
    return pd.DataFrame(pd.concat(selected)) if selected else points


def share_table(points: pd.DataFrame) -> Table:
    """Rows: widths, with their TP. Columns: communication's share by how much faster arithmetic gets than links."""
    from rich.table import Table

    faster = sorted(points[FASTER].unique().tolist())
    heads = [f"communication's share at {value:g}x the FLOP/s over bandwidth" for value in faster]
    note = f"{points[LENGTH].iloc[0]:,} tokens a sequence, {points[BATCH].iloc[0]} a batch; TP: the least whose memory "
    shown = Table(box=None, pad_edge=False, caption=f"{note}suffices, else the largest", caption_justify="left")
    for name in ("hidden size", "TP", "memory", *heads):
        shown.add_column(name, justify="right")
    for width, rows in points.sort_values(WIDTH).groupby(WIDTH):
        first, shares = rows.iloc[0], rows.set_index(FASTER)["serialized_share"]
        cells = [cell(shares.get(value), "fraction") for value in faster]
        shown.add_row(f"{width:,.0f}", f"{first[TP]:.0f}", cell(first["memory_share"], "fraction"), *cells)
    return shown
