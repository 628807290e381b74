"""FiCCO (arXiv:2512.10236): finer-grain overlap of an all-gather with the GEMM that consumes it, by DMA engines.

Finds the schedule that wins for each GEMM, checks the paper's published aggregates, and draws the front, the speed-ups
and the winners' timelines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from dse import plots
from dse.analysis.contexts import Question, cases
from dse.analysis.decision_tree import Feature
from dse.analysis.rules import Hand, by_hand
from dse.errors import ConfigError
from dse.plots import Axis, tables
from dse.results.claims import Claim, Finding, read
from dse.results.finished_run import Finished
from dse.results.words import choice_in_words
from studies.plain import Plain

if TYPE_CHECKING:
    import pandas as pd

    from dse.plots import Figure

_OVERLAPPED = ("uniform_fused_1d", "hetero_fused_1d", "hetero_unfused_1d", "uniform_fused_2d")
_KINDS = {
    f"{start}_{compute}_{shape}": f"{shape} {start[0]}{compute[0]}"
    for shape in ("1d", "2d")
    for start in ("uniform", "hetero")
    for compute in ("fused", "unfused")
}
_CHOSEN = ("schedule.name", "schedule.chunk_dim", "schedule.local_shard_first", "schedule.compute")
_MOST_SHOWN = 16  # scenarios that are drawn
_SCHEDULE = tuple(f"schedule.{name}" for name in ("name", "comm_engine", "num_chunks", "comm_cus", "priority"))
_GEMM = "workload.operators.gemm"
_M, _N, _K, _SHARDS = (f"{_GEMM}.{name}" for name in ("m", "n", "k", "shards"))
_CUS, _LINK = "system.gpu.num_cus", "system.node.link_bytes_per_s"
_CAUSES = ("contention", "decomposition", "starvation", "launch", "dependency")
_FAST_GEMM = "likely: GEMMs run at the highest sustained rate measured, so communication weighs more than in the paper"
_MORE_SCHEDULES = "likely: the whole space holds more schedules than the paper's, and GEMMs are fast"


def _by_hand(inputs: Mapping[str, NDArray[Any]]) -> Mapping[str, Sequence[Any]]:
    """Choose 2D where A is deeper than high, else 1D; local shard first; one GEMM a step (derived from the paper)."""
    deep = inputs[_M] < inputs[_K]
    knobs = {"name": "chunked", "local_shard_first": True, "compute": "fused", "num_chunks": 8, "comm_engine": "dma"}
    fixed = {f"schedule.{name}": [value] * len(deep) for name, value in knobs.items()}
    return {**fixed, "schedule.chunk_dim": np.where(deep, "k", "m").tolist()}


class Ficco(Plain):
    """Claims and figures of the FiCCO studies, from a table of results. allows: changes that leave claims testable."""

    columns = (
        "schedule.name",
        "schedule.comm_engine",
        "schedule.num_chunks",
        "schedule.comm_cus",
        "schedule.chunk_dim",
        "schedule.local_shard_first",
        "schedule.compute",
        "system.node.num_gpus",
        "system.node.topology",
        "workload.operators.gemm.m",
        "workload.operators.gemm.n",
        "workload.operators.gemm.k",
    )
    allows = ("space.system.node.topology",)
    quantities: ClassVar[Sequence[Feature]] = (
        Feature((_M, _N), (_SHARDS, _CUS)),  # of C for each CU: proportional to the waves of the GEMM
        Feature((_N, _LINK), (_SHARDS, _CUS)),  # proportional to the time of the GEMM over that of the communication
        Feature((_M, _N, _K), (_SHARDS,)),  # FLOP of a GPU
        Feature((_M, _N, _K), (_SHARDS, _CUS)),  # proportional to the time of the GEMM
        Feature((_M, _K), (_LINK,)),  # proportional to the time of the communication
        Feature((_N,), (_SHARDS,)),  # columns of a GPU
        Feature((_K, _SHARDS), (_N,)),  # depth over columns, of B on a GPU
    )
    """Products of sizes and rates with a physical meaning, as a person would compare them (derived)."""
    hand_rules: ClassVar[Mapping[str, Hand]] = {"by hand: 2d where m < k": _by_hand}

    def claims(self) -> list[Claim]:
        """Published claims of the paper, retyped beside this module."""
        return read(Path(__file__).with_suffix(".yaml"))

    def findings(self, table: pd.DataFrame) -> Mapping[str, Finding]:
        """Findings of every claim that a table of points can test."""
        everywhere = _name_kinds(table[table["status"] == "ok"])
        ok = everywhere[everywhere["system.node.topology"] == "mesh"]
        chunked = ok[ok["schedule.name"].isin(_KINDS)]
        return {
            "ficco.ideal_max": Finding(float(ok["ideal_speedup"].max()), cause=_FAST_GEMM),
            "ficco.best_max": _best(chunked),
            "ficco.chunk_fraction": _chunk_fraction(chunked),
            "ficco.no_single_winner": _no_single_winner(ok),
            "ficco.dil_grows_with_split": _dil_grows(chunked),
            "ficco.dil_axis": _dil_axis(chunked),
            "ficco.cu_transfers_worse": _cu_worse(chunked),
            "ficco.switch_removes_link_starvation": _starvation(everywhere),
            "ficco.limiters": _limiters(chunked),
            "ficco.dma_launch_share": _launch_share(chunked),
        }

    def further(self, run: Finished) -> Mapping[str, Finding]:
        """Accuracy of the rule by hand: share of picks of the best kind of schedule, each kind with its best knobs."""
        choose = ",".join(path for path in _CHOSEN if path in run.knobs)
        absent = Finding(None, "needs all kinds of schedules, searched in several scenarios: study=ficco")
        try:
            contexts = cases(run, Question.of(run, "makespan_s", choose), to_learn=False)
        except ConfigError:
            return {"ficco.heuristic_accuracy": absent}
        scores = list(by_hand(contexts, self.hand_rules, run.name))
        if not scores or sum(option[0] == "chunked" for option in contexts.options) < len(_KINDS):
            return {"ficco.heuristic_accuracy": absent}
        (score,) = scores
        near = f"within 2 % of the best it is {100 * score.near:.0f} %"
        cause = f"the rule by hand is ours, the paper's is not published; {near}"
        text = f"{score.name}, in {len(score.regrets)} contexts, each kind with its best chunks, engine and CUs"
        return {"ficco.heuristic_accuracy": Finding(100 * score.accuracy, text, cause)}

    def figures(self, table: pd.DataFrame, timelines: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
        """Yield (name, figure): Pareto fronts, speed-ups, DIL and CIL, losses, CUs, timelines of winners; 16 scenarios.

        All but the timelines show the first topology alone, as each topology has a baseline of its own.
        """
        everywhere = _name_kinds(table[table["scenario"].isin(table["scenario"].unique()[:_MOST_SHOWN])])
        topologies = everywhere["system.node.topology"].unique()
        table = everywhere[everywhere["system.node.topology"] == topologies[0]]
        ok = table[table["status"] == "ok"]
        by = "schedule.name"
        hardware = table["cost_proxy"].nunique() > 1
        where = f", {topologies[0]}" * (len(topologies) > 1) + ", best of all systems searched" * hardware
        speedup = Axis("speedup", f"speed-up over serial [x]{where}")
        taken = Axis("comm_cu_s", "CU-seconds taken by communication [CU s]")
        if hardware:  # a speed-up is over the same system: it says nothing of which system is best
            cost = Axis("cost_proxy", "hardware cost proxy [relative to the reference system]")
            makespan = Axis("makespan_s", "makespan [ms]", 1e3)
            yield "cost", plots.pareto(table, cost, y=makespan, size=taken, by=by)
        else:
            staging = Axis("peak_staging_bytes", "peak staging bytes")
            yield "pareto", plots.pareto(table, speedup, y=taken, size=staging, by=by)
        yield "speedup", plots.bars(table, speedup, by=by, ideal="ideal_speedup", baseline="serial, moved by CUs")
        if ok["schedule.name"].isin(_KINDS).any():
            yield from _inefficiencies(ok)
        ok = everywhere[everywhere["status"] == "ok"]
        shown = timelines[timelines["scenario"].isin(ok["scenario"])] if len(timelines) else timelines
        for scenario, group in shown.groupby("scenario", sort=False) if len(shown) else ():
            won = ok[(ok["scenario"] == scenario) & (ok["key"] == group["key"].iloc[0])].iloc[0]
            title = f"{scenario}: {choice_in_words(won, _SCHEDULE)} on one GPU, {won['speedup']:.2f}x over serial"
            yield f"timeline_{scenario}", plots.timeline(group, title)


def _name_kinds(table: pd.DataFrame) -> pd.DataFrame:
    """Name each point of the whole space by its kind of schedule, such as `hetero_fused_1d`."""
    chunked = table["schedule.name"] == "chunked"
    if not chunked.any():
        return table
    start = table["schedule.local_shard_first"].map({True: "hetero", False: "uniform"}).astype(str)
    dimension = table["schedule.chunk_dim"].map({"m": "1d", "k": "2d"}).astype(str)
    named = start + "_" + table["schedule.compute"].astype(str) + "_" + dimension
    return table.assign(**{"schedule.name": table["schedule.name"].where(~chunked, named)})


def _inefficiencies(ok: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
    """DIL over pieces, CIL by mover, losses of the best of each kind, speed-up over the CUs of kernels."""
    kinds = ok[ok["schedule.name"].isin(_KINDS)]
    dma = kinds[kinds["schedule.comm_engine"] == "dma"]
    name = "schedule.name"
    if len(dma):
        yield from _by_engines(dma)
    best = kinds.loc[kinds.groupby(["scenario", name, "schedule.comm_engine"], sort=False)["makespan_s"].idxmin()]
    cil = best.assign(kind=best[name].map(_KINDS))
    yield (
        "cil",
        tables.heat(cil, Axis("cil", "CIL of the GEMM [x]"), x="kind", y="scenario", panel="schedule.comm_engine"),
    )
    cus = Axis("schedule.comm_cus", "CUs of the kernels that move")
    swept = kinds[kinds["schedule.comm_engine"] == "cu"]
    if swept[cus.column].nunique() > 1:
        over = swept.groupby(["scenario", name, cus.column], sort=False)["speedup"].max().reset_index()
        speedup = Axis("speedup", "speed-up over serial [x]")
        yield "cu_sweep", tables.curves(over, cus, y=speedup, by=name, panel="scenario")


def _by_engines(dma: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
    """DIL over pieces and losses of the best of each kind, moved by DMA engines."""
    name, pieces = "schedule.name", "schedule.num_chunks"
    dil = dma.groupby([name, "scenario", pieces], sort=False)["dil"].min().reset_index()
    dil[pieces] = dil[pieces].astype(int)
    yield "dil", tables.heat(dil, Axis("dil", "DIL of the GEMM [x]"), x=pieces, y="scenario", panel=name)
    least = dma.loc[dma.groupby(["scenario", name], sort=False)["makespan_s"].idxmin()]
    least = least.assign(**{f"{loss}_s": least[f"{loss}_s"] / least["ideal_s"] for loss in _CAUSES})
    parts = [Axis(f"{loss}_s", loss, 100.0) for loss in _CAUSES]
    label = "loss of the best of each schedule, moved by DMA engines [% of the ideal time]"
    yield "signatures", tables.stacks(least, parts, panel="scenario", bar=name, label=label)


def _best(chunked: pd.DataFrame) -> Finding:
    if chunked.empty:
        return Finding(None, "no FiCCO schedule was evaluated")
    return Finding(float(chunked["speedup"].max()), cause=_MORE_SCHEDULES)


def _chunk_fraction(chunked: pd.DataFrame) -> Finding:
    """Fraction of the tensor per transfer: a shard of 1/n is split into as many pieces as there are GPUs, 1 / n^2."""
    named = chunked[chunked["schedule.num_chunks"] == chunked["system.node.num_gpus"]]
    if named.empty:
        return Finding(None, "no schedule with as many pieces as GPUs was evaluated")
    row = named.iloc[0]
    fraction = 1 / (int(row["system.node.num_gpus"]) * int(row["schedule.num_chunks"]))
    return Finding(fraction, "follows from the configuration: GPUs x pieces per shard")


def _no_single_winner(ok: pd.DataFrame) -> Finding:
    if ok["scenario"].nunique() < 2:
        return Finding(None, "needs several scenarios and a choice of schedules")
    best = ok.loc[ok.groupby("scenario")["makespan_s"].idxmin(), ["scenario", "schedule.name"]]
    counts = best["schedule.name"].value_counts()
    return Finding(len(counts) > 1, "wins: " + ", ".join(f"{name} {count}" for name, count in counts.items()))


def _by_dma(chunked: pd.DataFrame) -> pd.DataFrame:
    return chunked[(chunked["schedule.comm_engine"] == "dma") & (chunked["schedule.num_chunks"] == 8)]


def _dil_grows(chunked: pd.DataFrame) -> Finding:
    """Decomposition loss of 8 row chunks against 64 (8 pieces of 8 shards, one GEMM each)."""
    dma = _by_dma(chunked)
    loss = dma.groupby("schedule.name")["dil"].mean()
    if not {"uniform_fused_1d", "hetero_unfused_1d"} <= set(loss.index):
        return Finding(None, "needs 8 chunks moved by DMA, fused and unfused")
    fused, unfused = float(loss["uniform_fused_1d"]), float(loss["hetero_unfused_1d"])
    return Finding(unfused > fused, f"mean GEMM time against undivided: 8-way {fused:.3f}x, 57-way {unfused:.3f}x")


def _dil_axis(chunked: pd.DataFrame) -> Finding:
    """Rank correlation of the loss with the split dimension, over scenarios, must be negative on both axes."""
    dma = _by_dma(chunked)
    rows = dma[dma["schedule.name"] == "hetero_unfused_1d"]
    slices = dma[dma["schedule.name"] == "uniform_fused_2d"]
    if min(rows["scenario"].nunique(), slices["scenario"].nunique()) < 4:
        return Finding(None, "needs several scenarios, rows and K split into 8 chunks, moved by DMA")
    by_m = float(rows["dil"].corr(rows[f"{_GEMM}.m"], method="spearman"))
    by_k = float(slices["dil"].corr(slices[f"{_GEMM}.k"], method="spearman"))
    return Finding(by_m < 0 and by_k < 0, f"Spearman correlation of loss with M {by_m:.2f}, with K {by_k:.2f}")


def _cu_worse(chunked: pd.DataFrame) -> Finding:
    if chunked["schedule.comm_engine"].nunique() < 2:
        return Finding(None, "needs transfers by DMA engines and by kernels")
    best = chunked.groupby(["scenario", "schedule.comm_engine"])["speedup"].max().unstack()
    worse = (best["cu"] < best["dma"]).mean()
    ratio = float((best["dma"] / best["cu"]).mean())
    return Finding(
        bool(worse == 1.0), f"on the mesh, DMA beats CUs in {worse:.0%} of scenarios, by {ratio:.2f}x on average"
    )


def _limiters(chunked: pd.DataFrame) -> Finding:
    """Losses of the schedules by DMA, each over the ideal, on average over scenarios."""
    dma = _by_dma(chunked)
    if dma.empty:
        return Finding(None, "needs 8 chunks moved by DMA")
    share = {name: float((dma[f"{name}_s"] / dma["ideal_s"]).mean()) for name in _CAUSES}
    text = ", ".join(f"{name} {value:.1%}" for name, value in sorted(share.items(), key=lambda item: -item[1]))
    return Finding(min(share["decomposition"], share["contention"]) > share["launch"], f"of the ideal time: {text}")


def _launch_share(chunked: pd.DataFrame) -> Finding:
    dma = _by_dma(chunked)
    if dma.empty:
        return Finding(None, "needs 8 chunks moved by DMA")
    worst = dma.sort_values("setup_fraction", kind="stable").iloc[-1]
    return Finding(100 * float(worst["setup_fraction"]), f"largest share, at {worst['scenario']}")


def _starvation(ok: pd.DataFrame) -> Finding:
    """Communication time of shard-level point-to-point against that of the serial all-gather, by topology."""
    topology = "system.node.topology"
    if not {"mesh", "switch"} <= set(ok[topology]):
        return Finding(None, "needs both topologies: +space.system.node.topology='choice(mesh,switch)'")
    moved = ok[ok["schedule.comm_engine"] == "dma"].groupby([topology, "schedule.name"])["comm_s"].mean().unstack()
    if not {"shard_p2p", "serial"} <= set(moved):
        return Finding(None, "needs serial and shard_p2p, moved by DMA")
    ratio = moved["shard_p2p"] / moved["serial"]
    mesh, switch = float(ratio["mesh"]), float(ratio["switch"])
    return Finding(mesh > 2 and switch < 1.5, f"against all links at once: mesh {mesh:.2f}x, switch {switch:.2f}x")


STUDY = Ficco()
