"""The claims of T3 (arXiv:2401.16677) on points of its configurations: gains, traffic and shares of communication."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dse.results.claims import ClaimResult
from studies.plain import geometric_mean
from studies.t3 import CONFIGURATIONS, MAIN, has_all_sublayers, layer_seconds, layer_shares, layer_times, name_points

if TYPE_CHECKING:
    import pandas as pd

_LINK = "system.node.link_bytes_per_s"
_SHARES = {
    "comm_share_train": (MAIN, "training", 1.0),
    "comm_share_prompt": (MAIN, "prompt", 1.0),
    "comm_share_large_train": (("gpt3", "palm", "mtnlg"), "training", 1.0),
    "comm_share_large_prompt": (("gpt3", "palm", "mtnlg"), "prompt", 1.0),
    # GEMMs twice as fast: communication keeps its time, and its share grows
    "comm_share_gemm2x": (("megagpt2", "tnlg", "gpt3", "palm", "mtnlg"), "prompt", 2.0),
}
"""Claim -> models, phase, how many times as fast GEMMs are."""
_POINTS = (
    *("ideal_geomean", "ideal_max", "mca_geomean", "mca_max", "mca_gap_to_ideal", "order", "traffic_geomean"),
    *("traffic_max", "fc_gap", "op_gap", "serial_ag_bound", "nmc_adds", "nmc_shrinks_with_tp"),
)
"""Claims that need points of all configurations."""
_COUNTED = "an identity of the accounting, counted on the graphs of all sub-layers"
_UNKNOWN = (
    "both shares follow from hidden size over GPUs and the rate of links alone; the published largest is likely of the "
    "futuristic models on 64 GPUs, whose sizes are not published"
)
_READING = (
    "attention's 40 to 45 % of run time is read as 42.5 % of compute time, on which this rests (conf/data/t3.yaml)"
)
_ASSUMED = "likely: token counts are recalled, attention's share is assumed"


def _fastest_cases(table: pd.DataFrame, column: str) -> pd.DataFrame:
    """Metric of the fastest point by scenario (of 16 cases) and configuration, at the faster reading of the links."""
    ok = name_points(table)
    ok = ok[ok["model"].isin(MAIN)]
    # of two published readings of the link rate the faster one; sorted, so that first() is the fastest point
    ok = ok[ok[_LINK] == ok[_LINK].max()].sort_values("makespan_s", kind="stable")
    cases: pd.DataFrame = ok.groupby(["scenario", "configuration"])[column].first().unstack()
    return cases


def judge_points(table: pd.DataFrame) -> dict[str, ClaimResult]:
    """Findings on the gains of configurations, on the ring as T3's default reading has it."""
    context = ClaimResult(None, "about another design, which is not modelled")
    findings = {f"t3.cais_over_{name}": context for name in ("t3_inf", "fused_inf", "t3_train", "fused_train")}
    findings |= {"t3.in_switch": context, "t3.ring_validation": ClaimResult(None, "its measurements are not public")}
    speedups, saved, exposed = (_fastest_cases(table, column) for column in ("speedup", "hbm_bytes", "exposed_comm_s"))
    # each case needs each configuration
    if set(CONFIGURATIONS.values()) - set(speedups) or speedups.isna().any(axis=None):
        absent = ClaimResult(None, "needs points of all configurations, of both models with 8 and 16 GPUs")
        return findings | {f"t3.{name}": absent for name in _POINTS}
    judged = _judge_configurations(speedups, saved, exposed)
    return findings | {f"t3.{name}": finding for name, finding in judged.items()}


def _judge_configurations(
    speedups: pd.DataFrame, traffic_: pd.DataFrame, exposed: pd.DataFrame
) -> dict[str, ClaimResult]:
    ideal, near, plain, mca = (speedups[CONFIGURATIONS[n]] for n in ("t3_ideal", "t3_ideal_nmc", "t3", "t3_mca"))
    # traffic that T3 saves of sequential execution [%]
    saved = 100 * (1 - traffic_["T3"] / traffic_["sequential"])
    gap, sub = 100 * (ideal / plain - 1), speedups.index.str.split("-").str[-1]
    # the ideal with near memory bounds T3-MCA, which is never slower than T3; both up to rounding
    ordered, late = bool((mca <= near * (1 + 1e-9)).all()), plain / mca - 1  # rounding
    helps = exposed["sequential"] / exposed["sequential + NMC"]
    degree = speedups.index.str.extract(r"tp(\d+)", expand=False).astype(int)
    shrinks = [bool((series.diff().dropna() < 0).all()) for series in _by_degree(helps, degree)]
    return {
        "ideal_geomean": ClaimResult(100 * (geometric_mean(ideal) - 1), f"{len(ideal)} cases"),
        "ideal_max": ClaimResult(float(100 * (ideal.max() - 1)), f"best: {ideal.idxmax()}"),
        "mca_geomean": ClaimResult(100 * (geometric_mean(mca) - 1)),
        "mca_max": ClaimResult(float(100 * (mca.max() - 1)), f"best: {mca.idxmax()}"),
        "mca_gap_to_ideal": ClaimResult(
            100 * (geometric_mean(ideal) - geometric_mean(mca)), "of the two geometric means"
        ),
        "order": ClaimResult(
            ordered and bool((late <= 1e-9).all()),
            f"T3 {geometric_mean(plain):.3f}, T3-MCA {geometric_mean(mca):.3f}, ideal + NMC {geometric_mean(near):.3f}",
        ),
        "traffic_geomean": ClaimResult(100 * (1 - geometric_mean(1 - saved / 100))),
        "traffic_max": ClaimResult(float(saved.max()), f"best: {saved.idxmax()}"),
        "fc_gap": ClaimResult(*_spread(gap[sub.isin(["fc1", "fc2"])])),
        "op_gap": ClaimResult(*_spread(gap[sub == "op"])),
        "serial_ag_bound": ClaimResult(float(speedups.max().max()), "the largest of all configurations"),
        "nmc_adds": ClaimResult(100 * float((near - ideal).max()), f"mean {100 * float((near - ideal).mean()):.1f}"),
        "nmc_shrinks_with_tp": ClaimResult(all(shrinks) if shrinks else None, "of the time that RS and AG take"),
    }


def _spread(gap: pd.Series[Any]) -> tuple[float, str]:
    return float(gap.mean()), f"mean of {len(gap)} layers, {gap.min():.1f} to {gap.max():.1f} %"


def _by_degree(helps: pd.Series[Any], degree: Any) -> list[pd.Series[Any]]:
    """Gain of each sub-layer from NMC, by rising number of GPUs."""
    named = helps.index.str.replace(r"tp\d+-", "", regex=True)
    frame = helps.to_frame("helps").assign(degree=np.asarray(degree), name=named).sort_values("degree")
    return [group["helps"] for _, group in frame.groupby("name") if len(group) > 1]


def judge_traffic(parts: list[dict[str, Any]]) -> dict[str, ClaimResult]:
    """Findings on the formulas of traffic. parts: rows of DRAM traffic [bytes] by sub-layer and configuration."""
    holds = {
        # sequential over T3: 2 N - 1 chunks are read by kernels, N - 2 by DMA commands
        "rs_read_formula": _ratio_holds(parts, "RS reads", lambda n: (2 * n - 1) / (n - 2)),
        "write_formula": _ratio_holds(parts, "writes", lambda n: 2 * n / (2 * n - 2)),
        "ag_traffic_same": _has_same_gather(parts),
    }
    return {f"t3.{name}": ClaimResult(result, _COUNTED, basis="by construction") for name, result in holds.items()}


def _ratio_holds(parts: list[dict[str, Any]], what: str, formula: Any) -> bool | None:
    """Tell whether sequential / T3 is the value of a formula of N in every case, on a ring."""
    # T3's GEMM writes are updates, so writes of both have to be added
    names = ("GEMM writes", "RS writes") if what == "writes" else (what,)
    totals = {(row["scenario"], row["configuration"]): sum(row[name] for name in names) for row in parts}
    holds = [
        np.isclose(
            totals[row["scenario"], "sequential"] / totals[row["scenario"], "T3"], formula(row["gpus"]), rtol=1e-9
        )
        for row in parts
        if row["configuration"] == "T3" and (row["scenario"], "sequential") in totals
    ]
    return bool(all(holds)) if holds else None


def _has_same_gather(parts: list[dict[str, Any]]) -> bool | None:
    """Tell whether both configurations read and write N - 1 chunks in the all-gather."""
    chunks = {
        row["scenario"]: row["GEMM writes"] / row["gpus"] for row in parts if row["configuration"] == "sequential"
    }
    holds = [
        # counted in chunks, as both move the same N - 1 of N
        np.isclose(row[name], (row["gpus"] - 1) * chunks[row["scenario"]], rtol=1e-9)
        for row in parts
        for name in ("AG reads", "AG writes")
        if row["scenario"] in chunks
    ]
    return bool(all(holds)) if holds else None


def judge_comm_shares(table: pd.DataFrame) -> dict[str, ClaimResult]:
    """Findings on the largest shares of communication in a layer: of run time, and of sliced sub-layers beside it.

    Those of models beyond the listed ones are not tested.
    """
    findings, times = {}, layer_times(table)
    for claim, (models, phase, faster) in _SHARES.items():
        shares: dict[str, tuple[float, float]] = {}
        for of, rows in times[times["model"].isin(models)].groupby("of"):
            if has_all_sublayers(rows):
                shares[str(of)] = layer_shares(layer_seconds(rows, phase, faster))
        if not shares:
            findings[f"t3.{claim}"] = ClaimResult(None, "needs all four sub-layers of a model")
            continue
        most = max(shares, key=lambda name: shares[name][0])
        of_time, of_sliced = (100 * share for share in shares[most])
        text = f"{most}: {of_time:.1f} % of run time, {of_sliced:.1f} % of sliced sub-layers"
        listed = set(models) == set(MAIN)
        untested = ClaimResult(None, f"{text}, the largest of the listed models; {_UNKNOWN}")
        findings[f"t3.{claim}"] = ClaimResult(of_time, f"{text}; {_READING}", _ASSUMED) if listed else untested
    return findings
