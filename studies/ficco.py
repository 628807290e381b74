"""FiCCO (arXiv:2512.10236): finer-grain overlap of an all-gather with the GEMM that consumes it, by DMA engines.

Asks which schedule wins for each GEMM, checks the paper's published aggregates, and draws the front, the speed-ups
and the winners' timelines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from dse import plots
from dse.claims import Claim, Finding, read
from dse.plots import Axis
from dse.report import said
from studies.plain import Plain

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

_OVERLAPPED = ("uniform_fused_1d", "hetero_fused_1d", "hetero_unfused_1d", "uniform_fused_2d")
_SCHEDULE = tuple(f"schedule.{name}" for name in ("name", "mover", "granularity", "comm_cus", "priority"))
_GEMM = "workload.operators.gemm"
_FAST_GEMM = "likely: GEMMs run at the highest sustained rate measured, so communication weighs more than theirs"
_NO_INTERFERENCE = (
    "likely: HBM and CUs are shared, but memory-system interference beyond that is not modelled; and fast GEMMs"
)


class Ficco(Plain):
    """Claims and figures of the FiCCO studies, from a table of results. allows: changes that leave claims testable."""

    allows = ("space.system.node.topology",)

    def claims(self) -> list[Claim]:
        """What the paper published, as retyped beside this module."""
        return read(Path(__file__).with_suffix(".yaml"))

    def findings(self, table: pd.DataFrame) -> Mapping[str, Finding]:
        """Ours for every claim that a table of points can test."""
        everywhere = table[table["status"] == "ok"]
        ok = everywhere[everywhere["system.node.topology"] == "mesh"]
        chunked = ok[ok["schedule.name"].isin(_OVERLAPPED)]
        return {
            "ficco.ideal_max": Finding(float(ok["ideal_speedup"].max()), cause=_FAST_GEMM),
            "ficco.best_max": _best(chunked),
            "ficco.chunk_fraction": _chunk_fraction(chunked),
            "ficco.no_single_winner": _no_single_winner(ok),
            "ficco.dil_grows_with_split": _dil_grows(chunked),
            "ficco.dil_axis": _dil_axis(chunked),
            "ficco.cu_transfers_worse": _cu_worse(chunked),
            "ficco.heuristic_accuracy": Finding(None, "needs rules judged on unseen shapes, not part of this study"),
            "ficco.switch_removes_link_starvation": _starvation(everywhere),
            "ficco.limiters": Finding(None, "needs the loss of each point split by cause, not part of this study"),
            "ficco.dma_launch_share": _launch_share(chunked),
        }

    def figures(self, table: pd.DataFrame, timelines: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
        """(name, figure): Pareto fronts, speed-up bars, and the winner's timeline of every scenario."""
        ok = table[table["status"] == "ok"]
        by = "schedule.name"
        hardware = table["cost_proxy"].nunique() > 1
        speedup = Axis("speedup", "speed-up over serial [x]" + ", best of all systems searched" * hardware)
        taken = Axis("comm_cu_s", "CU-seconds taken by communication [CU s]")
        if hardware:  # a speed-up is over the same system: it says nothing of which system is best
            cost = Axis("cost_proxy", "hardware cost proxy [relative to the reference system]")
            makespan = Axis("makespan_s", "makespan [ms]", 1e3)
            yield "cost", plots.pareto(table, cost, y=makespan, size=taken, by=by)
        else:
            held = Axis("peak_staging_bytes", "peak staging bytes")
            yield "pareto", plots.pareto(table, speedup, y=taken, size=held, by=by)
        yield "speedup", plots.bars(table, speedup, by=by, ideal="ideal_speedup", baseline="serial, moved by CUs")
        for scenario, group in () if timelines.empty else timelines.groupby("scenario", sort=False):
            won = ok[(ok["scenario"] == scenario) & (ok["key"] == group["key"].iloc[0])].iloc[0]
            title = f"{scenario}: {said(won, _SCHEDULE)} on one GPU, {won['speedup']:.2f}x over serial"
            yield f"timeline_{scenario}", plots.timeline(group, title)


def _best(chunked: pd.DataFrame) -> Finding:
    if chunked.empty:
        return Finding(None, "no FiCCO schedule was evaluated")
    return Finding(float(chunked["speedup"].max()), cause=_NO_INTERFERENCE)


def _chunk_fraction(chunked: pd.DataFrame) -> Finding:
    """A shard is 1/n of the tensor and is split into as many pieces as there are GPUs: 1 / n^2 per transfer."""
    named = chunked[chunked["schedule.granularity"] == chunked["system.node.num_gpus"]]
    if named.empty:
        return Finding(None, "no schedule with as many pieces as GPUs was evaluated")
    row = named.iloc[0]
    fraction = 1 / (int(row["system.node.num_gpus"]) * int(row["schedule.granularity"]))
    return Finding(fraction, "follows from the configuration: GPUs x pieces per shard")


def _no_single_winner(ok: pd.DataFrame) -> Finding:
    if ok["scenario"].nunique() < 2:
        return Finding(None, "needs several scenarios and a choice of schedules")
    best = ok.loc[ok.groupby("scenario")["makespan_s"].idxmin(), ["scenario", "schedule.name"]]
    counts = best["schedule.name"].value_counts()
    return Finding(len(counts) > 1, "wins: " + ", ".join(f"{name} {count}" for name, count in counts.items()))


def _by_dma(chunked: pd.DataFrame) -> pd.DataFrame:
    return chunked[(chunked["schedule.mover"] == "dma") & (chunked["schedule.granularity"] == 8)]


def _dil_grows(chunked: pd.DataFrame) -> Finding:
    """Decomposition loss of 8 row chunks against 64 (8 pieces of 8 shards, one GEMM each)."""
    dma = _by_dma(chunked)
    loss = dma.groupby("schedule.name")["decomposition"].mean()
    if not {"uniform_fused_1d", "hetero_unfused_1d"} <= set(loss.index):
        return Finding(None, "needs granularity 8 moved by DMA, fused and unfused")
    eight, many = float(loss["uniform_fused_1d"]), float(loss["hetero_unfused_1d"])
    return Finding(many > eight, f"mean GEMM time against undivided: 8-way {eight:.3f}x, 57-way {many:.3f}x")


def _dil_axis(chunked: pd.DataFrame) -> Finding:
    """Rank correlation of the loss with the split dimension, over scenarios, must be negative on both axes."""
    dma = _by_dma(chunked)
    if dma["scenario"].nunique() < 4:
        return Finding(None, "needs several scenarios, granularity 8 moved by DMA")
    rows = dma[dma["schedule.name"] == "hetero_unfused_1d"]
    slices = dma[dma["schedule.name"] == "uniform_fused_2d"]
    by_m = float(rows["decomposition"].corr(rows[f"{_GEMM}.m"], method="spearman"))
    by_k = float(slices["decomposition"].corr(slices[f"{_GEMM}.k"], method="spearman"))
    return Finding(by_m < 0 and by_k < 0, f"Spearman correlation of loss with M {by_m:.2f}, with K {by_k:.2f}")


def _cu_worse(chunked: pd.DataFrame) -> Finding:
    if chunked["schedule.mover"].nunique() < 2:
        return Finding(None, "needs both movers")
    best = chunked.groupby(["scenario", "schedule.mover"])["speedup"].max().unstack()
    worse = (best["cu"] < best["dma"]).mean()
    ratio = float((best["dma"] / best["cu"]).mean())
    return Finding(bool(worse == 1.0), f"DMA beats CUs in {worse:.0%} of scenarios, by {ratio:.2f}x on average")


def _launch_share(chunked: pd.DataFrame) -> Finding:
    dma = _by_dma(chunked)
    if dma.empty:
        return Finding(None, "needs granularity 8 moved by DMA")
    worst = dma.sort_values("setup_fraction", kind="stable").iloc[-1]
    return Finding(100 * float(worst["setup_fraction"]), f"largest share, at {worst['scenario']}")


def _starvation(ok: pd.DataFrame) -> Finding:
    """Communication time of shard-level point-to-point against that of the serial all-gather, by topology."""
    topology = "system.node.topology"
    if not {"mesh", "switch"} <= set(ok[topology]):
        return Finding(None, "needs both topologies: +space.system.node.topology='choice(mesh,switch)'")
    moved = ok[ok["schedule.mover"] == "dma"].groupby([topology, "schedule.name"])["comm_s"].mean().unstack()
    ratio = moved["shard_p2p"] / moved["serial"]
    mesh, switch = float(ratio["mesh"]), float(ratio["switch"])
    return Finding(mesh > 2 and switch < 1.5, f"against all links at once: mesh {mesh:.2f}x, switch {switch:.2f}x")


STUDY = Ficco()
