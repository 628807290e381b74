"""DLRM training on many nodes (arXiv:2305.06942): iteration time by number of nodes, NIC placement and schedule.

No claims are checked here: `study=fused_ops` judges those about 128 nodes. They are written beside the predictions.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dse.plots import Axis, Draw, FigureSheet, Frame, fronts, tables
from dse.plots.labels import label
from dse.results.published import PublishedFigure, read
from dse.results.run_folder import FinishedRun
from dse.results.words import choice_in_words
from studies.fused_ops import STUDY as FUSED_OPS
from studies.plain import Plain, largest_row, most_frequent, winning_rows

if TYPE_CHECKING:
    import pandas as pd

_NODES, _PLACEMENT = "system.fabric.num_nodes", "system.fabric.nic.placement"
_NICS, _NETWORK = "system.fabric.nic.num_nics", "system.fabric.network.topology"
_SERIES = {"producer": "fused, producers (v1)", "all": "fused, producers and consumers (v2)"}
_TIME = Axis("makespan_s", "time of an iteration", "s")
_PUBLISHED_AT = ("fused_ops.dlrm128_v1", "fused_ops.dlrm128_v2")


class ScaleOut(Plain):
    """Figures of sweeps over nodes or NICs."""

    columns = (
        "schedule.name",
        "schedule.pairs",
        "system.fabric.num_nodes",
        "system.fabric.network.topology",
        "system.fabric.nic.num_nics",
        "system.fabric.nic.placement",
    )

    def published_values(self) -> list[PublishedFigure]:
        """Published values by figure; their claims are those of `study=fused_ops`."""
        return read(Path(__file__).with_name("published.yaml"), FUSED_OPS.claims())

    def figures(self, table: pd.DataFrame, timelines: pd.DataFrame) -> Iterator[tuple[str, Draw]]:
        """Time and reduction over nodes; time over NICs, and against hardware cost; each if it was swept."""
        rows = _rows(table)
        if _NODES in rows and rows[_NODES].nunique() > 1:
            by_place = rows.assign(panel=rows["scenario"] + _nic_label(rows))
            fused = by_place[by_place["series"] != "bulk"]
            if len(fused):
                yield "reduction", partial(_reduction, fused)
            yield "iteration", partial(_iteration, by_place)
        if _NICS in rows and rows[_NICS].nunique() > 1:
            yield "placement", partial(_placement, rows)
        if "cost_proxy" in rows and rows["cost_proxy"].nunique() > 1:
            yield "cost", partial(_front, table)

    def extras(self, run: FinishedRun) -> Iterator[tuple[str, Any]]:
        """Predictions at 128 nodes beside the published value of each version."""
        rows = _rows(run.outputs.read_table("results"))
        if _NODES not in rows or not (rows[_NODES] == 128).any() or _PLACEMENT not in rows:
            return
        points = rows[(rows[_NODES] == 128) & (rows[_PLACEMENT] == run.config["system"]["fabric"]["nic"]["placement"])]
        claims = {claim.id: claim for claim in FUSED_OPS.claims()}
        comparison = {}
        for name, pairs in zip(_PUBLISHED_AT, _SERIES.values(), strict=True):
            values = points[points["series"] == pairs].set_index("scenario")["reduction"]
            if len(values):
                source = {"published": claims[name].value, "provenance": claims[name].provenance}
                comparison[name] = {**source, "ours": float(values.mean()), "by_tables": values.round(2).to_dict()}
        yield "published_points", comparison


def _rows(table: pd.DataFrame) -> pd.DataFrame:
    """Points with a result, with `series` and `reduction` [%]."""
    ok = table[table["status"] == "ok"]
    series = ok["schedule.pairs"].map(_SERIES).fillna("bulk")  # schedules that are not fused
    return ok.assign(series=series, reduction=100 * (1 - 1 / ok["speedup"]))


def _nic_label(rows: pd.DataFrame) -> Any:
    return ", NICs at " + rows[_PLACEMENT].map(label) if _PLACEMENT in rows else ""


def _reduction(fused: pd.DataFrame) -> FigureSheet:
    """Time that fused kernels remove, over nodes."""
    most = largest_row(fused, "reduction")
    title = f"Fused kernels remove up to {most['reduction']:.0f} % of an iteration, at {most[_NODES]:.0f} nodes"
    less = Axis("reduction", "time removed [%]", centre=0.0)
    return tables.curves(fused, Axis(_NODES, "nodes"), y=less, by="series", frame=Frame(title, panel="panel"))


def _iteration(rows: pd.DataFrame) -> FigureSheet:
    """Time of an iteration over nodes."""
    bulk = rows[rows["series"] == "bulk"].groupby(_NODES)["makespan_s"].mean()
    first, last = bulk.index.min(), bulk.index.max()
    title = f"From {first} to {last:,} nodes an iteration takes {bulk[last] / bulk[first]:.1f}x as long "
    title += "(bulk, mean of the panels)"
    frame = Frame(title, panel="panel")
    return tables.curves(rows, Axis(_NODES, "nodes"), y=_TIME, by="series", frame=frame)


def _placement(rows: pd.DataFrame) -> FigureSheet:
    """Time over NICs by their place and network: of the scenarios that gain most and least, by each schedule."""
    import pandas as pd

    where = [rows[name] for name in (_PLACEMENT, _NETWORK) if name in rows]
    place = sum((", " + part.map(label) for part in where[1:]), where[0].map(label)) if where else "NICs"
    groups = rows.assign(place=place).groupby(["scenario", "schedule.name", "place", _NICS], sort=False)
    best = groups["makespan_s"].min().reset_index()
    of_nodes = best.groupby(["scenario", "place", _NICS], sort=False)["makespan_s"].min()  # with its fastest schedule
    spread = of_nodes.groupby("scenario", sort=False).agg(lambda seconds: seconds.max() / seconds.min())
    telling = list(dict.fromkeys((spread.idxmax(), spread.idxmin())))  # both may be the same scenario
    few = best[best["scenario"].isin(telling)]
    few = few.assign(
        panel=few["scenario"] + ", " + few["schedule.name"].map(label), nics=few[_NICS].map("NICs: {:.0f}".format)
    )
    won = winning_rows(rows)
    texts = pd.Series([choice_in_words(row, [_NICS, _PLACEMENT, _NETWORK]) for _, row in won.iterrows()])
    choice, times = str(texts.value_counts().index[0]), int(texts.value_counts().iloc[0])
    title = f"Fastest in {times} of {len(won)} models: {choice}"
    note = f"the slowest place, network and number take up to {spread.max():.1f}x as long as the fastest"
    note += f"; of {len(spread)} models the two that depend on it most and least" if len(spread) > 2 else ""
    return tables.dots(
        few.astype({"makespan_s": float}), _TIME, row="place", by="nics", frame=Frame(title, note, "panel")
    )


def _front(table: pd.DataFrame) -> FigureSheet:
    """Iteration time against hardware cost, coloured by schedule and placement of NICs."""
    ok = table[table["status"] == "ok"]
    what = ok["schedule.name"].map(label)
    mixed = ok.assign(what=what + ", NICs at " + ok[_PLACEMENT].map(label) if _PLACEMENT in ok else what)
    front = ok[ok["on_front"]]
    name, times = most_frequent(mixed.loc[front.index, "what"]) if len(front) else ("nothing", 0)
    title = f"{times} of {len(front)} points on the Pareto fronts are {name}"
    cost = Axis("cost_proxy", "hardware cost [of the reference]")
    return fronts.pareto(mixed, (_TIME, cost), by="what", frame=Frame(title))


STUDY = ScaleOut()
