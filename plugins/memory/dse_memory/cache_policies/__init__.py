"""GPU cache policies for machine learning (arXiv:1910.00134): seventeen applications under six policies.

A point is an application under a policy; speed-up and traffic are relative to the same application uncached. Static
policies cache the same kinds of requests in every kernel; the others, stacked on CacheRW, adapt to what they observe.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from dse.plots import Axis, Draw, FigureSheet, Frame, tables
from dse.plots.labels import with_unit
from dse.results.claims import ClaimResult
from dse.results.run_folder import FinishedRun
from studies.plain import Plain, capitalised, extremes, geometric_mean

if TYPE_CHECKING:
    import pandas as pd

_POLICY, _L2, _BANDWIDTH = "policy.name", "system.gpu.l2.bytes", "system.gpu.dram.bytes_per_s"
_STATIC = ("uncached", "cache_r", "cache_rw")
_ALL = (*_STATIC, "cache_rw_ab", "cache_rw_ab_cr", "combined")
_TITLES = ("Uncached", "CacheR", "CacheRW", "+ AB", "+ CR", "+ PCby")
_INSENSITIVE, _REUSE, _THROUGHPUT = "memory-insensitive", "reuse-sensitive", "throughput-sensitive"
_NOTICED = 1.05  # ratio of times from which on they differ
_BUSY = 0.6  # share of the peak bandwidth from which on an application is memory-bound
_CLOSE = 1.03  # ratio of times up to which they match
_PERCENT = 100.0
_PREDICTOR = (
    "the predictor's parameters are not published; ours were chosen on these applications (plugins/memory/README.md)"
)


class CachePolicies(Plain):
    """Claims, categories, and the table of applications by policies."""

    columns: tuple[str, ...] = ("policy.name",)

    def findings(self, table: pd.DataFrame) -> Mapping[str, ClaimResult]:
        """Findings of every claim."""
        metrics = metrics_by_policy(table)
        if metrics.empty:
            return {
                claim.id: ClaimResult(None, "needs all six policies on one memory system") for claim in self.claims()
            }
        return {**_winners(metrics), **_combined_gap(metrics), **_mechanisms(metrics)}

    def figures(self, table: pd.DataFrame, timelines: pd.DataFrame) -> Iterator[tuple[str, Draw]]:
        """Times, traffic and row hits of every application under every policy."""
        ok = _policy_points(table)
        if ok.empty:
            return
        if {_L2, _BANDWIDTH} <= set(ok):
            yield "best", partial(_best, ok)
            return
        named = {"policy": ok[_POLICY].astype(str), "application": ok["scenario"].astype(str)}
        rows = ok.assign(relative_time=1 / ok["speedup"], **named)
        rows = rows.sort_values("policy", key=lambda names: names.map(_place), kind="stable")
        titles = dict(zip(_ALL, _TITLES, strict=True))
        rows["policy"] = rows["policy"].map(lambda name: titles.get(name, name)).astype(object)
        for name, axis in _SHOWN.items():
            yield name, partial(_policies_figure, rows, axis)

    def extras(self, run: FinishedRun) -> Iterator[tuple[str, Any]]:
        """Category of each application, with the ratios that decide it."""
        metrics = metrics_by_policy(run.outputs.read_table("results"))
        if not metrics.empty:
            yield "categories", application_categories(metrics)


def _place(policy: str) -> int:
    """Rank of a policy in figures; policies that are not the paper's come last."""
    return _ALL.index(policy) if policy in _ALL else len(_ALL)


def _policy_points(table: pd.DataFrame) -> pd.DataFrame:
    """Points with a result; none if policies were not searched."""
    ok = table[table["status"] == "ok"]
    return ok if {_POLICY, "speedup", "traffic"} <= set(ok) else ok.iloc[:0]


def metrics_by_policy(table: pd.DataFrame) -> pd.DataFrame:
    """Metrics [application] by (metric, policy), of applications that ran under all six on one memory system."""
    ok = _policy_points(table)
    names = ["time_s", "dram_bytes", "bandwidth_share", "row_hit_rate", "stalls", "useless", "bypassed"]
    # several memory systems: their rows must not be averaged
    if ok.empty or ok.duplicated(["scenario", _POLICY]).any():
        return ok.iloc[:0]
    rows = ok.assign(policy=ok[_POLICY].astype(str), scenario=ok["scenario"].astype(str))
    metrics = rows.pivot_table(index="scenario", columns="policy", values=names, sort=False)
    # applications that lack a policy are left out
    return metrics.dropna() if set(_ALL) <= set(rows["policy"]) else ok.iloc[:0]


def _metric(metrics: pd.DataFrame, name: str, policies: tuple[str, ...] = _ALL) -> pd.DataFrame:
    """One metric, a column for each policy."""
    import pandas as pd

    return pd.DataFrame(metrics[name])[list(policies)]


def application_categories(metrics: pd.DataFrame) -> pd.DataFrame:
    """Categories by static policies alone. Insensitive: all within 5 %, and not memory-bound. Reuse-sensitive: one
    that caches is faster by more. Throughput-sensitive: memory-bound, and caching gains nothing or costs time.
    """
    import pandas as pd

    static = _metric(metrics, "time_s", _STATIC)  # adaptive policies do not define what an application is like
    best, least = static.idxmin(axis=1), static.min(axis=1)
    spread, gain = static.max(axis=1) / least, static["uncached"] / least
    costs = static[["cache_r", "cache_rw"]].min(axis=1) / static["uncached"]
    busy = _metric(metrics, "bandwidth_share", _STATIC).min(axis=1)  # under every static policy
    category = pd.Series(_THROUGHPUT, static.index)
    category[(spread < _NOTICED) & (busy < _BUSY)] = _INSENSITIVE
    category[gain >= _NOTICED] = _REUSE  # last: reuse decides, also of an application that is memory-bound
    columns = {"category": category, "best_static": best, "uncached_over_best": gain, "cached_over_uncached": costs}
    combined = _metric(metrics, "time_s")["combined"] / least
    return pd.DataFrame({**columns, "bandwidth_share": busy, "combined_over_best": combined}).reset_index()


def _winners(metrics: pd.DataFrame) -> dict[str, ClaimResult]:
    """Findings on the best static policies, the categories and the number of applications."""
    rows = application_categories(metrics)
    static = _metric(metrics, "time_s", _STATIC)
    worst = static.div(static.min(axis=1), axis=0)
    slowdowns = "; ".join(
        f"{name} is up to {worst[name].max():.2f}x as long ({worst[name].idxmax()})" for name in _STATIC
    )
    counts = rows["best_static"].value_counts()
    wins = ", ".join(f"{name} {count}" for name, count in counts.items())
    members = "; ".join(
        f"{name}: {', '.join(group['scenario'])}" for name, group in rows.groupby("category", sort=False)
    )
    all_present = set(rows["category"]) == {_INSENSITIVE, _REUSE, _THROUGHPUT}
    laggards = {name: worst.index[worst[name] > _NOTICED].tolist() for name in ("cache_r", "cache_rw")}
    shortfalls = "; ".join(
        f"{name} is more than 5 % behind in {', '.join(behind) or 'none'}" for name, behind in laggards.items()
    )
    beaten, cause = bool((worst.max() > _NOTICED).all()), "one static policy is within 5 % of the best everywhere"
    # two winners may differ by nothing that counts
    rule = "judged more strictly than by two winners: a yes needs every static policy over 5 % behind somewhere"
    return {
        "cache_policies.no_single_static": ClaimResult(
            beaten, f"{rule}; {slowdowns}; wins: {wins}; {shortfalls}", cause
        ),
        "cache_policies.three_categories": ClaimResult(all_present, members, "a category has no member"),
        "cache_policies.app_count": ClaimResult(
            float(len(metrics)), "layers and kernels of DNNMark, rocBLAS and DeepBench"
        ),
    }


def _combined_gap(metrics: pd.DataFrame) -> dict[str, ClaimResult]:
    """Findings on the gap between the combined policy and the best static one."""
    times = _metric(metrics, "time_s")
    gap = times["combined"] / times[list(_STATIC)].min(axis=1)
    ahead = gap[gap < 1 / _NOTICED]
    behind = max(0.0, _PERCENT * (float(gap.max()) - 1))
    best = f"ahead by 5 % or more in {len(ahead)} (down to {gap.min():.2f}x the time: {gap.idxmin()})"
    text = f"at most {_PERCENT * (gap.max() - 1):.1f} % behind ({gap.idxmax()}), {best}; {_PREDICTOR}"
    return {
        "cache_policies.matches_best": ClaimResult(bool((gap <= _CLOSE).all()), text, "see the gap", "fitted"),
        "cache_policies.matches_best_band": ClaimResult(behind, text, "see the gap", "fitted"),
    }


def _mechanisms(metrics: pd.DataFrame) -> dict[str, ClaimResult]:
    """Effects of caching, allocation bypass, rinsing and the predictor on traffic, stalls, row hits and allocations."""
    reuse = application_categories(metrics).set_index("scenario")["category"] == _REUSE
    moved, stalls, hits, useless = (
        _metric(metrics, name) for name in ("dram_bytes", "stalls", "row_hit_rate", "useless")
    )
    fewer = moved["cache_r"] / moved["uncached"]
    least = moved["cache_rw"] / moved["cache_r"]
    # rounding of what is counted in lines
    cuts = bool((fewer[reuse] < 1).all() and (least[reuse] <= 1.001).all() and (least < 1).any())
    span = f"CacheR moves {fewer[reuse].min():.2f} to {fewer[reuse].max():.2f} of the traffic of reuse applications"
    more = f"{span}, CacheRW {least[reuse].min():.2f} to {least[reuse].max():.2f} of CacheR's"
    rinsed = _PERCENT * (hits["cache_rw_ab_cr"] - hits["cache_rw_ab"])
    saved = useless["combined"].sum() / max(useless["cache_rw_ab_cr"].sum(), 1.0)
    bypass = f"stalls {stalls['cache_rw'].sum():.3g} to {stalls['cache_rw_ab'].sum():.3g}"
    rinse = f"row hits by {rinsed.min():+.1f} to {rinsed.max():+.1f} points, mean {rinsed.mean():+.1f}"
    text = f"AB: {bypass}; CR: {rinse}; PCby: lines evicted unused {saved:.2f}x"
    # allocation bypass removes all such stalls, by its definition
    does = stalls["cache_rw_ab"].sum() == 0 and rinsed.mean() > 0 and saved < 1
    return {
        "cache_policies.cacher_cuts_traffic": ClaimResult(
            cuts, more, "lines that are stored take the place of lines that would be loaded again"
        ),
        "cache_policies.ab_cr_pcby": ClaimResult(bool(does), text, "see the numbers"),
    }


_SHOWN = {
    "time": Axis("relative_time", "time over uncached [x]", centre=1.0),
    "traffic": Axis("traffic", "DRAM traffic over uncached [x]", centre=1.0),
    "row_hits": Axis("row_hit_rate", "accesses of DRAM in an open row", "%"),
    "stalls": Axis("stall_share", "time blocked by sets full of lines under way", "%"),
}


def _policies_figure(rows: pd.DataFrame, value: Axis) -> FigureSheet:
    """A metric of every application under every policy."""
    means = rows.groupby("policy", sort=False)[value.column].agg(geometric_mean if value.centre else "mean")
    # of row hits more is better, of all else less
    best, worst = extremes(means if value.column != "row_hit_rate" else -means)
    texts = [f"{means[name]:.2f}x" if value.centre else f"{100 * means[name]:.0f} %" for name in (best, worst)]
    name = capitalised(value.label.removesuffix(" [x]"))
    title = f"{name}: {texts[0]} under {_full(best)}, {texts[1]} under {_full(worst)}"
    frame = Frame(title, f"in the cells: {value.label}{' [%]' if value.unit else ''}")
    return tables.heat(rows, value, x=Axis("policy", "policy"), y="application", frame=frame)


def _full(title: str) -> str:
    """Name of a policy with all that it adds to CacheRW."""
    added = [name for name in _TITLES[: _TITLES.index(title) + 1] if name.startswith("+")] if title in _TITLES else []
    return " ".join(["CacheRW", *added]) if added else title


def _best(ok: pd.DataFrame) -> FigureSheet:
    """Time of the best static policy over that of the combined one, by size of L2 and bandwidth of DRAM."""
    rows = ok.assign(policy=ok[_POLICY].astype(str), scenario=ok["scenario"].astype(str), size=ok[_L2].astype(float))
    rows["rate"] = [with_unit(rate, "B/s") for rate in rows[_BANDWIDTH].astype(float)]
    keys = ["scenario", "size", "rate"]
    times = rows.pivot_table(index=keys, columns="policy", values="time_s", sort=False)
    static = [name for name in _STATIC if name in times]
    gain = (times[static].min(axis=1) / times["combined"]).rename("gain").reset_index()
    close = int((gain["gain"] > 1 / _CLOSE).sum())
    title = f"The combined policy is within {100 * (_CLOSE - 1):.0f} % of the best static one "
    title += f"in {close} of {len(gain)} cases"
    value = Axis("gain", "time of the best static policy over that of the combined one [x]", centre=1.0)
    frame = Frame(title, f"in the cells: {value.label}; rows: bandwidth of DRAM", "scenario")
    return tables.heat(gain, value, x=Axis("size", "L2", "B"), y="rate", frame=frame)


STUDY = CachePolicies()
