"""Choices of a runtime before two kernels start (arXiv:2412.14335): which is launched first, on how many CUs, by what.

Rules of thumb, and a policy of static sizes. The policy has measured other GEMMs beside collectives that have c CUs of
their own (`SlowdownTables`): rates alone and how much longer each takes, by what bounds the GEMM and by pattern. Of
a new pair it knows m, n, k and the payload, estimates the times alone T_g and T_c, and takes the c with the least

    T = s_c T_c + max(0, 1 - s_c T_c / (s_g T_g)) T_g

by the slow-downs s of its tables: the collective has its CUs until it ends, the GEMM then all. The collective is
launched first if it has fewer workgroups than the GEMM. With engines, these move payloads from which on they were
faster alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from simulators.costs.gemm import GemmShape, gemm_cost, gemms_of
from simulators.costs.transfer import library_cus
from simulators.hardware.machine import System
from simulators.hardware.parts import ELEMENT_BYTES

if TYPE_CHECKING:
    import pandas as pd

_WITHIN = 0.02  # of the best, from which a choice counts as right
_LIBRARY = 0  # `schedule.comm_cus`: as many CUs as the library takes
_BY_CUS = ("base", "schedule priority", "resource partitioning", "both")
_MEMORY, _COMPUTE = "bound by memory", "bound by arithmetic"


@dataclass(frozen=True)
class SlowdownTables:
    """What was measured of pairs. slower: (what bounds the GEMM, pattern) -> slow-downs [gemm, collective] by CUs of
    the collective, a table. rate: what bounds a GEMM, or a pattern -> FLOP/s or bytes/s alone. crossover: pattern ->
    payload [bytes] from which DMA engines are faster.
    """

    slower: Mapping[tuple[str, str], pd.DataFrame]
    rate: Mapping[str, float]
    crossover: Mapping[str, float]

    @classmethod
    def of(cls, pairs: pd.DataFrame, slowed: pd.DataFrame, crossover: Mapping[str, float]) -> SlowdownTables:
        """Geometric means over some pairs (`_pairs`) and their slow-downs (`_slowdowns`)."""
        rows = slowed[slowed["scenario"].isin(pairs.index)].join(pairs[["bound", "pattern"]], on="scenario")
        logs = rows.assign(gemm=np.log(rows["gemm"]), collective=np.log(rows["collective"]))
        means = logs.groupby(["bound", "pattern", "cus"])[["gemm", "collective"]].mean().apply(np.exp)
        keys = dict.fromkeys(zip(rows["bound"], rows["pattern"], strict=True))
        rates = {
            str(name): float(np.exp(np.log(part[amount] / part[seconds]).mean()))
            for kind, amount, seconds in (("bound", "amount", "gemm_s"), ("pattern", "payload", "comm_s"))
            for name, part in pairs.groupby(kind)
        }
        return cls({key: means.loc[key] for key in keys}, rates, crossover)

    def knows(self, pair: Mapping[Any, Any]) -> bool:
        """True if pairs of this kind were measured."""
        return (pair["bound"], pair["pattern"]) in self.slower

    def choice(self, pair: Mapping[Any, Any], *, engines: bool) -> tuple[str, int]:
        """Strategy and CUs of the collective for a pair; with DMA engines among the strategies or without."""
        if engines and pair["payload"] >= self.crossover[pair["pattern"]]:
            return ("DMA, CUs withheld" if pair["bound"] == _MEMORY else "DMA"), _LIBRARY
        slower = self.slower[pair["bound"], pair["pattern"]]
        gemm_s = pair["amount"] / self.rate[pair["bound"]]
        moving_s = pair["payload"] / self.rate[pair["pattern"]] * slower["collective"]
        cus = int((moving_s + np.maximum(0, 1 - moving_s / (gemm_s * slower["gemm"])) * gemm_s).idxmin())
        first = (cus or pair["grid_collective"]) < pair["grid_gemm"]
        if cus == _LIBRARY:
            return ("schedule priority" if first else "base"), cus
        return ("both" if first else "resource partitioning"), cus


def runtime_rules(
    system: System, ok: pd.DataFrame, table: pd.DataFrame, precision: str, crossover: Mapping[str, float]
) -> dict[str, Any]:
    """Rules that a runtime could follow, scored on the scenarios: accuracy, and regret as relative makespan over the
    best choice. Scenarios in which a choice of a rule has no result are left out.

    ok: rows of strategies; table: all rows. collective_first: share of scenarios whose collective has fewer workgroups
    than the GEMM. unseen GEMMs: by tables that were made without the pair's GEMM.
    """
    flat = ok.groupby(["scenario", "strategy"])["makespan_s"].min().unstack()
    pairs, rules = _pairs(system, ok, table, precision), dict[str, Any]()
    if {"base", "schedule priority"} <= set(flat):
        launched = flat[["base", "schedule priority"]].dropna()
        smaller = (pairs["grid_collective"] < pairs["grid_gemm"]).loc[launched.index]
        first = smaller.map({True: "schedule priority", False: "base"})
        rules["launch the smaller grid first"] = {
            **_score_picks(launched.to_dict("index"), first),
            "collective_first": float(smaller.mean()),
        }
    parted = ok[ok["strategy"] == "resource partitioning"]
    by_cus = parted.pivot_table(index="scenario", columns="schedule.comm_cus", values="makespan_s")
    by_cus, lookup = by_cus.dropna(), {}  # scenarios that lack a number of CUs cannot be compared
    if len(by_cus.columns) > 1 and len(by_cus):
        scenarios = ok.groupby("scenario").first().loc[by_cus.index]
        classes = scenarios["class"] + ", " + scenarios["pattern"]
        mean = by_cus.div(by_cus.min(axis=1), axis=0).groupby(classes).mean()
        lookup = mean.idxmin(axis=1).astype(int).to_dict()
        rules["reserve CUs by a table of class and collective"] = _score_picks(
            by_cus.to_dict("index"), classes.map(lookup)
        )
    if "DMA" in flat and len(flat.columns) > 1:
        engines = flat[flat["DMA"].notna()]
        rules["DMA engines for all"] = _score_picks(engines.to_dict("index"), dict.fromkeys(engines.index, "DMA"))
    record: dict[str, Any] = {"rules": rules, "reserved_cus": lookup}
    if len(by_cus.columns) > 1 and set(_BY_CUS) <= set(flat) and "gemm_s" in pairs:
        slowed = _slowdowns(table, pairs)
        rules |= _policies(ok, pairs, slowed, crossover)
        tables = SlowdownTables.of(pairs, slowed, crossover).slower
        record |= {
            "slowdowns": {", ".join(key): means.reset_index().to_dict("records") for key, means in tables.items()},
            "engines_from": dict(crossover),
        }
    return record


def _policies(
    ok: pd.DataFrame, pairs: pd.DataFrame, slowed: pd.DataFrame, crossover: Mapping[str, float]
) -> dict[str, Any]:
    """Scores of the policy of static sizes, by tables of all GEMMs and by those of all other GEMMs."""
    times = _times_by_choice(ok)
    shapes = pairs[["m", "n", "k"]].astype(str).agg(" ".join, axis=1)
    others = {shape: SlowdownTables.of(pairs[shapes != shape], slowed, crossover) for shape in shapes.unique()}
    of_pair = {"": dict.fromkeys(pairs.index, SlowdownTables.of(pairs, slowed, crossover))}
    of_pair[", unseen GEMMs"] = {name: others[shape] for name, shape in shapes.items()}
    scores = dict[str, Any]()
    for words, engines in (("tables of slow-down", False), ("tables of slow-down, engines for large payloads", True)):
        for seen, profiles in of_pair.items():
            picks = {
                name: profiles[name].choice(pair, engines=engines)
                for name, pair in pairs.to_dict("index").items()
                if profiles[name].knows(pair)
            }
            allowed = {
                name: {choice: time for choice, time in times[name].items() if engines or choice[0] in _BY_CUS}
                for name, pick in picks.items()
                if pick in times[name]
            }
            if allowed:  # a single GEMM has no others to be known by
                scores[words + seen] = {**_score_picks(allowed, picks), "pairs": len(allowed)}
    return scores


def _times_by_choice(ok: pd.DataFrame) -> dict[Any, dict[tuple[str, int], float]]:
    """Scenario -> (strategy, CUs of the collective) -> time [s], of engines the least."""
    by_scenario: dict[Any, dict[tuple[str, int], float]] = {}
    cus = ok["schedule.comm_cus"].fillna(_LIBRARY).astype(int).where(ok["strategy"].isin(_BY_CUS), _LIBRARY)
    for name, strategy, count, seconds in zip(ok["scenario"], ok["strategy"], cus, ok["makespan_s"], strict=True):
        times = by_scenario.setdefault(name, {})
        times[str(strategy), int(count)] = min(float(seconds), times.get((str(strategy), int(count)), np.inf))
    return by_scenario


def _slowdowns(table: pd.DataFrame, pairs: pd.DataFrame) -> pd.DataFrame:
    """Times of GEMM and collective over those alone, by scenario and CUs that are reserved for the collective."""
    rows = table[(table["status"] == "ok") & (table["schedule.name"] == "c3_rp") & table["scenario"].isin(pairs.index)]
    rows = rows.join(pairs[["gemm_s", "comm_s"]].add_suffix("_alone"), on="scenario")
    return rows[["scenario"]].assign(
        cus=rows["schedule.comm_cus"].astype(int),
        gemm=rows["gemm_s"] / rows["gemm_s_alone"],
        collective=rows["comm_s"] / rows["comm_s_alone"],
    )


def _pairs(system: System, ok: pd.DataFrame, table: pd.DataFrame, precision: str) -> pd.DataFrame:
    """Static sizes of each scenario, workgroups as launched, and times alone [s] where the serial baseline was run.

    amount: FLOP or bytes of the GEMM, of what bounds it. The GEMM has this GPU's columns, FLOP / (2 m k).
    """
    scenarios = ok.groupby("scenario").first()
    m, k = (scenarios[f"workload.operators.gemm.{name}"].to_numpy(float) for name in ("m", "k"))
    flop = scenarios["flop"].to_numpy(float)
    n = np.rint(flop / (2 * m * k))  # of what was simulated, so that shards are counted
    traffic = ELEMENT_BYTES[precision] * (m * k + k * n + m * n)
    gpu = system.gpu
    memory = traffic / gpu.hbm_bytes_per_s > flop / (gpu.num_cus * np.asarray(gpu.matrix_flop_per_s_per_cu))
    serial = table[(table["status"] == "ok") & (table["schedule.name"] == "serial")].groupby("scenario").first()
    pairs = scenarios[["pattern"]].assign(
        **{"m": m, "n": n, "k": k, "bound": np.where(memory, _MEMORY, _COMPUTE)},
        amount=np.where(memory, traffic, flop),
        payload=scenarios["moved_bytes"] * system.node.num_gpus / max(1, system.node.num_gpus - 1),
        grid_gemm=gemm_cost(gemms_of(system, precision), GemmShape(m, n, k)).kernel.workgroups,
        grid_collective=[int(library_cus(system, pattern)) for pattern in scenarios["pattern"]],
    )
    return pairs.join(serial[["gemm_s", "comm_s"]]) if len(serial) else pairs


def _score_picks(
    times: Mapping[Any, Mapping[Any, float]], picks: Mapping[Any, Any] | pd.Series[Any]
) -> dict[str, float]:
    """Accuracy (share of scenarios within 2 % of the best), mean and worst regret. times: scenario -> choice -> [s];
    those that are not numbers count as no result. picks: scenario -> choice.
    """
    best = {name: min(time for time in row.values() if time == time) for name, row in times.items()}
    regret = np.array([row[picks[name]] / best[name] - 1 for name, row in times.items()])
    return {
        "accuracy": float((regret <= _WITHIN).mean()),
        "mean_regret": float(regret.mean()),
        "worst_regret": float(regret.max()),
    }
