"""The deployment that is recommended of those that were served: which limits it holds, and what is too close to call.

What is recommended holds every limit with its whole interval; where none does, one is that may hold them. In a closed
loop it has the most tokens/s a GPU. Open traffic brings as many tokens to each deployment that keeps up, so that it has
the fewest GPUs, and of equal numbers the shortest time of a later token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from dse.values.units import with_prefix
from dse_serving.results import CLOSE, MEETS, MISSES, verdict_of

if TYPE_CHECKING:
    import pandas as pd

RATE = "tokens_per_s_per_gpu"
LOW, HIGH = "rate_low_per_gpu", "rate_high_per_gpu"
TIMES = {"ttft_s": "time to the first token", "tpot_s": "time of a later token"}
Row = dict[str, Any]


def plain(value: Any) -> Any:
    """A cell as a configuration has it; None where it is empty."""
    import pandas as pd

    return None if pd.isna(value) else value.item() if isinstance(value, np.generic) else value


def with_splits(table: pd.DataFrame) -> pd.DataFrame:
    """Points that were served, with how each splits its GPUs in words, and how it stands against the limits of users
    (`verdict`: MEETS, CLOSE, MISSES).
    """
    points = table.dropna(subset=[RATE]).reset_index(drop=True) if RATE in table else table.iloc[:0]
    if not len(points):
        return points
    # older tables have no intervals
    verdicts = points["meets"] if "meets" in points else np.where(points["status"] == "ok", MEETS, MISSES)
    splits = [split_of(row) for row in points.to_dict("records")]
    return points.assign(status="ok", verdict=verdicts, split=splits)


def split_of(row: Mapping[Any, Any]) -> str:
    """`4 x TP 2`, or `1 x TP 4 for prompts, 2 x TP 2`; DP, PP and GPUs of experts alone where there are some."""
    degrees = {name: int(plain(row.get(f"parallel.{name}")) or 1) for name in ("tp", "dp", "pp")}
    experts, tp, gpus = int(plain(row.get("engines.expert_gpus")) or 0), degrees.pop("tp"), int(row["gpus"])
    others = int(np.prod(list(degrees.values())))
    more = "".join(f" {name.upper()} {degree}" for name, degree in degrees.items() if degree > 1)
    name = f"TP {tp}{more}" + (f" and {experts} for experts" if experts else "")
    if not plain(row.get("engines.apart")):
        return f"{gpus // (tp * others + experts)} x {name}"
    prefill_tp, count = int(plain(row.get("engines.prefill_tp")) or tp), int(row["engines.prefill_replicas"])
    # GPUs that generate
    left = gpus - count * prefill_tp * others
    return f"{count} x TP {prefill_tp}{more} for prompts, {left // (tp * others + experts)} x {name}"


def interval_columns(name: str) -> tuple[str, str]:
    """Columns of the ends of the interval of a time.

    >>> interval_columns("ttft_s")
    ('ttft_low_s', 'ttft_high_s')
    """
    time = name.removesuffix("_s")
    return f"{time}_low_s", f"{time}_high_s"


def judged(points: pd.DataFrame, limits: Mapping[str, float]) -> pd.DataFrame:
    """Points with their verdicts under upper limits by metric as well: of a time, by its interval."""
    verdicts = points["verdict"].to_numpy(float)
    for name, limit in limits.items():
        ends = interval_columns(name) if name in TIMES else (name, name)
        low, high = (points[end if end in points else name] for end in ends)
        of_limit = [verdict_of(*pair, limit) for pair in zip(low, high, strict=True)]
        # the worst verdict of all limits
        verdicts = np.minimum(verdicts, of_limit)
    return points.assign(verdict=verdicts)


def within(points: pd.DataFrame) -> pd.DataFrame:
    """Points that hold all limits; where none does, those that may."""
    return next((group for verdict in (MEETS, CLOSE) if len(group := points[points["verdict"] == verdict])), points[:0])


def best_of(points: pd.DataFrame) -> Row:
    """The recommended one of some points, whose limits are equally sure."""
    lead = points.iloc[points[RATE].argmax()]
    # in a closed loop the rate decides; open traffic brings the same rate to all that keep up
    if is_closed(lead):
        return {str(name): value for name, value in lead.items()}
    # of those within the interval the fewest GPUs, then the quickest
    alike = points[points[HIGH] >= lead[LOW]].sort_values(["gpus", "tpot_s"], kind="stable")
    return {str(name): value for name, value in alike.iloc[0].items()}


def is_closed(row: Any) -> bool:
    """Tell whether the traffic of a point is a closed loop."""
    return bool(plain(row.get("traffic.arrivals")) in ("closed", None))


def best_of_splits(points: pd.DataFrame) -> list[Row]:
    """The best point of each split, the recommended split first, others by their rates."""
    best = best_of(points)
    rows = [best_of(group) for _, group in points.groupby("split", sort=True)]
    return sorted(rows, key=lambda row: (row["split"] != best["split"], -row[RATE], row["tpot_s"]))


def named(row: Mapping[Any, Any]) -> str:
    """A deployment, with the requests under way of a closed loop."""
    loop = f" with {under_way(row):.0f} requests under way" if is_closed(row) else ""
    return f"{row['split']}{loop}"


def under_way(row: Mapping[Any, Any]) -> float:
    """Requests under way: those of a closed loop, else the mean over time."""
    return float(row["traffic.concurrency"] if is_closed(row) else row["in_system"])


def close_rivals(points: pd.DataFrame, best: Mapping[Any, Any]) -> Iterator[tuple[Row, str]]:
    """Yield points that may be better than the best one, and why that is not decided: an interval reaches a limit, or
    rates (of open traffic with as many GPUs, times of later tokens) have intervals that overlap.
    """
    for row in points.to_dict("records"):
        rival = {str(name): value for name, value in row.items()}
        if rival["key"] == best["key"] or rival["verdict"] == MISSES:
            continue
        alike = rival[HIGH] >= best[LOW]
        # open traffic: of equal numbers of GPUs the shorter time wins, and fewer GPUs always
        if not is_closed(best) and rival["gpus"] == best["gpus"]:
            alike = rival["tpot_low_s"] <= best["tpot_high_s"]
        elif not is_closed(best):
            alike = rival["gpus"] < best["gpus"]
        if alike and rival["verdict"] == CLOSE and best["verdict"] == MEETS:
            yield rival, "may hold the limits"
        elif alike:
            yield rival, "is as good within the intervals"


def sentence(best: Mapping[Any, Any]) -> str:
    """A deployment in a sentence."""
    # answers of one token have no later token, and no rate of a user
    measured = {name: words for name, words in TIMES.items() if best[name]}
    times = ", ".join(f"{words} {with_prefix(float(best[name]), 'second')}" for name, words in measured.items())
    of_user = f", {best['tokens_per_s_per_user']:.1f} tokens/s a user" if best["tokens_per_s_per_user"] else ""
    rate = f"{best[RATE]:,.0f} tokens/s a GPU{of_user}"
    price = f", {best['tokens_per_usd']:,.0f} tokens a dollar" if best["tokens_per_usd"] else ""
    fewest = ", the fewest that keep up within the limits" if best["verdict"] == MEETS else ""
    gpus = "" if is_closed(best) else f" on {best['gpus']:.0f} GPU{'s' if best['gpus'] > 1 else ''}{fewest}"
    return f"{best['split']}{gpus}, {under_way(best):.0f} requests under way: {rate}{price}; {times}"
