"""Search methods held against known fronts: how near they get with how many points, and what choosing them costs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dse.plots import Axis, comparisons
from studies.plain import Plain

if TYPE_CHECKING:
    import pandas as pd

    from dse.plots import Figure

_AT = re.compile(r"hypervolume_at_(\w+)_pct")


class SearchBenchmark(Plain):
    """Figures alone: there is nothing published to compare with."""

    columns = (
        "run.method",
        "run.seed",
    )

    def figures(self, table: pd.DataFrame, timelines: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
        """(name, figure): hypervolume and IGD+ over points and over time, and the points that 95 % take."""
        ok = table[table["status"] == "ok"]
        progress, how = _progress(ok), {"by": "run.method", "of": f"{ok['run.seed'].nunique()} seeds"}
        points = Axis("share", "points evaluated [% of the distinct outcomes]", 100.0)
        time = Axis("overhead_s", "time of the search method itself [s]")
        missed = Axis("missed", "hypervolume missed [% of the true front's]", 100.0)
        yield "hypervolume", comparisons.progress(progress, points, y=missed, **how)
        yield "hypervolume_time", comparisons.progress(progress, time, y=missed, **how)
        distance = Axis("igd_plus", "IGD+ [ranges of the true front]")
        yield "igd_plus", comparisons.progress(progress, points, y=distance, **how)
        unreached = ok.assign(unreached=ok["missed_hypervolume"] > 0.05)
        needed = Axis("points_to_95", "points to 95 % of the hypervolume")
        yield "points_to_95", comparisons.medians(unreached, needed, **how, least="unreached")


def _progress(ok: pd.DataFrame) -> pd.DataFrame:
    """Progress of searches: a row for each search and each share of the points at which it was recorded."""
    import pandas as pd

    parts = []
    for name in ok.columns:
        if at := _AT.fullmatch(name):
            columns = {metric: ok[f"{metric}_at_{at[1]}_pct"] for metric in ("hypervolume", "igd_plus", "overhead_s")}
            part = ok[["scenario", "run.method", "run.seed"]].assign(
                **columns, share=float(at[1].replace("p", ".")) / 100
            )
            parts.append(part.assign(missed=1.0 - part["hypervolume"]).dropna())
    return pd.concat(parts, ignore_index=True)


STUDY = SearchBenchmark()
