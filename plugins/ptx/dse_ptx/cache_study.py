"""Cache policies by kernels that are executed (claims of arXiv:1910.00134), beside the patterns that stand for them.

Claims are judged on addresses of our kernels in PTX (`dse_ptx.applications`); what patterns make of the same claims,
categories and times stands beside them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dse.plots import Axis, Draw, FigureSheet, Frame, tables
from dse.results.answer import tables_of_winners
from dse.results.claims import Claim, ClaimResult, judge
from dse.results.published import PublishedFigure
from dse.results.run_folder import FinishedRun, Outputs
from dse_memory.cache_policies import CachePolicies, application_categories, metrics_by_policy

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table

_ADDRESSES, _POLICY = "kernels.addresses", "policy.name"
_SOURCES = ("patterns", "ptx")
_CLOSE = 1.1  # ratio up to which two speed-ups are alike


class CachePoliciesPtx(CachePolicies):
    """Claims, categories and figures by kernels in PTX, and how patterns differ."""

    columns = (_POLICY, _ADDRESSES)

    def claims(self) -> list[Claim]:
        """Published claims: those of `study=cache_policies`."""
        return CachePolicies().claims()

    def published_values(self) -> list[PublishedFigure]:
        """Published values by figure: those of `study=cache_policies`."""
        return CachePolicies().published_values()

    def findings(self, table: pd.DataFrame) -> Mapping[str, ClaimResult]:
        """Findings of every claim, by kernels in PTX."""
        return super().findings(_by(table, "ptx"))

    def figures(self, table: pd.DataFrame, timelines: pd.DataFrame) -> Iterator[tuple[str, Draw]]:
        """Those of the patterns' study by kernels in PTX, and speed-ups by both."""
        yield from super().figures(_by(table, "ptx"), timelines)
        both = _beside(table)
        if len(both):
            yield "sources", partial(_figure, both)

    def extras(self, run: FinishedRun) -> Iterator[tuple[str, Any]]:
        """Categories, speed-ups and verdicts by kernels in PTX and by patterns."""
        table = run.outputs.read_table("results")
        both = _beside(table)
        if len(both):
            yield "sources", both
            yield "verdicts", self.verdicts(table)
            yield "categories", _categories(table)

    def verdicts(self, table: pd.DataFrame) -> list[Mapping[str, Any]]:
        """A row for each claim: ours and whether it is within, by patterns and by kernels in PTX, with the reasons."""
        rows: dict[str, Sequence[Mapping[str, Any]]] = {}
        for source in _SOURCES:
            findings = CachePolicies.findings(CachePolicies(), _by(table, source))
            rows[source] = judge(self.claims(), findings)
        pairs = zip(rows["patterns"], rows["ptx"], strict=True)
        return [
            {"claim": patterns["id"], **_verdict("patterns", patterns), **_verdict("ptx", ptx)}
            for patterns, ptx in pairs
        ]

    def answer(self, outputs: Outputs, table: pd.DataFrame) -> Iterator[Table | str]:
        """Yield the winners, and what changes where kernels are executed."""
        yield from tables_of_winners(outputs, _by(table, "ptx"))
        both = _beside(table)
        if both.empty:
            return
        ratio = both["speedup_ptx"] / both["speedup_patterns"]
        # the bound holds in both directions
        alike = int(((ratio < _CLOSE) & (ratio > 1 / _CLOSE)).sum())
        yield (
            f"speed-ups by kernels in PTX and by patterns: {alike} of {len(both)} within {100 * (_CLOSE - 1):.0f} %, "
            f"from {ratio.min():.2f} to {ratio.max():.2f}x"
        )
        categories = _categories(table)
        moved = categories[categories["category_patterns"] != categories["category_ptx"]]
        words = "; ".join(
            f"{row.scenario} {row.category_patterns} by patterns, {row.category_ptx} in PTX"
            for row in moved.itertuples()
        )
        yield f"categories: {len(categories) - len(moved)} of {len(categories)} alike{f'; {words}' if words else ''}"
        verdicts = self.verdicts(table)
        changed = [row for row in verdicts if row["within_patterns"] != row["within_ptx"]]
        words = "; ".join(f"{row['claim'].partition('.')[2]}: {_change(row)}" for row in changed)
        yield f"claims: {len(verdicts) - len(changed)} of {len(verdicts)} alike{f'; {words}' if words else ''}"


def _by(table: pd.DataFrame, source: str) -> pd.DataFrame:
    """Points whose addresses are of a source."""
    return table[table[_ADDRESSES].astype(str) == source] if _ADDRESSES in table else table


def _verdict(source: str, row: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{name}_{source}": row[name] for name in ("ours", "within", "reason")}


def _change(row: Mapping[str, Any]) -> str:
    words = {True: "within", False: "missed", None: "not tested"}
    return f"{words[row['within_patterns']]} by patterns, {words[row['within_ptx']]} in PTX"


def _beside(table: pd.DataFrame) -> pd.DataFrame:
    """A row for each application and policy that ran by both: speed-ups, traffic and row hits of each."""
    ok = table[table["status"] == "ok"]
    # without points of both sources there is nothing to compare
    if not {_ADDRESSES, _POLICY} <= set(ok) or set(ok[_ADDRESSES].astype(str)) < set(_SOURCES):
        return ok.iloc[:0]
    names = ["time_s", "speedup", "traffic", "row_hit_rate", "l2_hit_rate", "requests"]
    parts = [
        _by(ok, source)[["scenario", _POLICY, *names]].astype({"scenario": str, _POLICY: str}) for source in _SOURCES
    ]
    return parts[0].merge(parts[1], on=["scenario", _POLICY], suffixes=("_patterns", "_ptx"))


def _categories(table: pd.DataFrame) -> pd.DataFrame:
    """Category and best static policy of each application by both sources."""
    columns = ["scenario", "category", "best_static", "uncached_over_best", "bandwidth_share"]
    parts = [application_categories(metrics_by_policy(_by(table, source)))[columns] for source in _SOURCES]
    return parts[0].merge(parts[1], on="scenario", suffixes=("_patterns", "_ptx"))


def _figure(both: pd.DataFrame) -> FigureSheet:
    """Speed-up by kernels in PTX over that by patterns, of every application and policy."""
    # without caches both sources have the same speed-up of 1, the reference
    rows = both[both[_POLICY] != "uncached"].assign(ratio=both["speedup_ptx"] / both["speedup_patterns"])
    rows["policy"] = rows[_POLICY].str.replace("_", " ")
    # median of the ratio's distance from 1 in logarithms, so that 2x and 0.5x are as far
    off = float(np.exp(np.abs(np.log(rows["ratio"])).median()))
    title = f"Speed-ups by kernels in PTX and by patterns are {100 * (off - 1):.0f} % apart in the median"
    value = Axis("ratio", "speed-up in PTX over that of patterns [x]", centre=1.0)
    return tables.heat(
        rows, value, x=Axis("policy", "policy"), y="scenario", frame=Frame(title, f"in the cells: {value.label}")
    )


STUDY = CachePoliciesPtx()
