"""DLRM training on many nodes (arXiv:2305.06942): iteration time by number of nodes, NIC placement and schedule.

No claims are checked here: `study=fused_ops` judges those about 128 nodes. They are written beside the predictions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from dse.plots import Axis, tables
from dse.results.finished_run import Finished
from studies.fused_ops import STUDY as FUSED_OPS
from studies.plain import Plain

if TYPE_CHECKING:
    import pandas as pd

    from dse.plots import Figure

_NODES, _PLACEMENT = "system.fabric.num_nodes", "system.fabric.nic.placement"
_NICS, _NETWORK = "system.fabric.nic.num_nics", "system.fabric.network.topology"
_SERIES = {"producer": "fused, producers (v1)", "all": "fused, producers and consumers (v2)"}
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

    def figures(self, table: pd.DataFrame, timelines: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
        """Time and reduction over nodes; time over NICs, and against hardware cost; each if it was swept."""
        rows = _rows(table)
        time, less = Axis("makespan_s", "iteration [ms]", 1e3), Axis("reduction", "time removed [%]")
        if _NODES in rows and rows[_NODES].nunique() > 1:
            nodes = Axis(_NODES, "nodes")
            by_place = rows.assign(panel=rows["scenario"] + _nic_label(rows))
            yield "iteration", tables.curves(by_place, nodes, y=time, by="series", panel="panel")
            fused = by_place[by_place["series"] != "bulk"]
            if len(fused):
                yield "reduction", tables.curves(fused, nodes, y=less, by="series", panel="panel")
        if _NICS in rows and rows[_NICS].nunique() > 1:
            where = [rows[name] for name in (_PLACEMENT, _NETWORK) if name in rows]
            place = where[0] + ", " + where[1] if len(where) == 2 else where[0] if where else "NICs"
            best = rows.assign(place=place, panel=rows["scenario"] + ", " + rows["schedule.name"])
            best = best.groupby(["panel", "place", _NICS], sort=False)["makespan_s"].min().reset_index()
            yield (
                "placement",
                tables.heat(best, Axis("makespan_s", "iteration [ms]", 1e3), x=_NICS, y="place", panel="panel"),
            )
        if "cost_proxy" in rows and rows["cost_proxy"].nunique() > 1:
            yield "cost", _front(table)

    def extras(self, run: Finished) -> Iterator[tuple[str, Any]]:
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
    series = ok["schedule.pairs"].map(_SERIES).fillna("bulk")
    return ok.assign(series=series, reduction=100 * (1 - 1 / ok["speedup"]))


def _nic_label(rows: pd.DataFrame) -> Any:
    return ", NIC: " + rows[_PLACEMENT] if _PLACEMENT in rows else ""


def _front(table: pd.DataFrame) -> Figure:
    """Iteration time against hardware cost, coloured by schedule and placement of NICs."""
    from dse.plots import pareto

    ok = table[table["status"] == "ok"]
    short = {"bulk_sync": "bulk", "fused_kernels": "fused", "pcie_switch": "switch"}
    what = ok["schedule.name"].replace(short)
    mixed = ok.assign(what=what + "/" + ok[_PLACEMENT].replace(short) if _PLACEMENT in ok else what)
    cost, time = Axis("cost_proxy", "hardware cost [relative]"), Axis("makespan_s", "iteration [ms]", 1e3)
    return pareto(mixed, time, y=cost, size=None, by="what")


STUDY = ScaleOut()
