"""FiCCO (arXiv:2512.10236): finer-grain overlap of an all-gather with the GEMM that consumes it, by DMA engines.

Finds the schedule that wins for each GEMM, checks the paper's published aggregates, and draws the front, the speed-ups
and the winners' timelines.

The study also judges a rule that picks a kind of schedule from the static sizes of a GEMM and its all-gather, learnt
on drawn shapes. `rule.yaml` has the tree, with what it was learnt on: `python -m validation.ficco_rule --write` learns
it anew, without any of the paper's sixteen shapes. A node compares a product or ratio of sizes with a threshold, a leaf
names a kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from dse.config.options import load_yaml
from dse.plots import Axis, Draw, FigureSheet, Frame, tables
from dse.plots.canvas import MOST_PANELS
from dse.plots.labels import label
from dse.results.claims import ClaimResult
from dse.results.decisions import with_ranges
from dse.results.run_folder import FinishedRun
from dse.results.words import choice_in_words
from studies.plain import Plain, best_rows, capitalised, geometric_mean, most_frequent, reach

if TYPE_CHECKING:
    import pandas as pd

    from dse.analysis.contexts import Hand, Quantity


RULE = Path(__file__).with_name("rule.yaml")
TIE, NEAR = 1e-9, 0.02
"""Shares by which a makespan may be longer than the best one and still be the best, or near it."""
Node = Mapping[str, Any]
_KINDS = {
    f"{start}_{compute}_{shape}": f"{shape} {start[0]}{compute[0]}"
    for shape in ("1d", "2d")
    for start in ("uniform", "hetero")
    for compute in ("fused", "unfused")
}
_KIND = ("local_shard_first", "compute", "chunk_dim")
_SCENARIOS = "GEMMs"
_TAKEN = Axis("comm_cu_s", "CU time of communication", "CU s")
_MOVERS = Axis("schedule.comm_cus", "CUs of the kernels that move")
_SCHEDULE = tuple(f"schedule.{name}" for name in ("name", "comm_engine", "num_chunks", "comm_cus", "priority"))
_GEMM = "workload.operators.gemm"
_M, _N, _K, _SHARDS = (f"{_GEMM}.{name}" for name in ("m", "n", "k", "shards"))
_CUS, _LINK = "system.gpu.num_cus", "system.node.link_bytes_per_s"
_CAUSES = ("contention", "decomposition", "starvation", "launch", "dependency")
_OF_BASELINE = "of the baseline, whose collective CUs move"
_FAST_GEMM = (
    "GEMMs as fast as hipBLASLt's (678 TFLOP/s at 16384 cubed) and RCCL's 298 to 319 GB/s, both measured,"
    " give 1.92 to 1.98 at n = 16384; no ratio of the two rates from half to twice ours gives less than 1.79 over these"
    " shapes, so that 1.7 is of other shapes or of another ideal"
)
_MORE_SCHEDULES = "likely: the whole space holds more schedules than the paper's, and GEMMs are fast"


def _by_rule(inputs: Mapping[str, NDArray[Any]]) -> Mapping[str, Sequence[Any]]:
    """Choose the knobs of the kind that the learnt rule picks, of rows of inputs by path."""
    rows = zip(*(inputs[path].tolist() for path in (_M, _N, _K)), strict=True)
    picks = [pick(dict(zip("mnk", row, strict=True))).split("_") for row in rows]
    knobs = [_knobs(*words) for words in picks]
    return {f"schedule.{name}": [knob.get(name) for knob in knobs] for name in ("name", "comm_engine", *_KIND)}


def _knobs(*words: str) -> dict[str, Any]:
    """Knobs of a kind, such as `hetero_fused_2d`, by its words."""
    if len(words) < 3:  # no chunks
        return {"name": "_".join(words), "comm_engine": "dma"}
    chosen = (words[0] == "hetero", words[1], {"1d": "m", "2d": "k"}[words[2]])
    return {"name": "chunked", "comm_engine": "dma", **dict(zip(_KIND, chosen, strict=True))}


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
    quantities: ClassVar[Sequence[Quantity]] = (
        ((_M, _N), (_SHARDS, _CUS)),  # of C for each CU: proportional to the waves of the GEMM
        ((_N, _LINK), (_SHARDS, _CUS)),  # proportional to the time of the GEMM over that of the communication
        ((_M, _N, _K), (_SHARDS,)),  # FLOP of a GPU
        ((_M, _N, _K), (_SHARDS, _CUS)),  # proportional to the time of the GEMM
        ((_M, _K), (_LINK,)),  # proportional to the time of the communication
        ((_N,), (_SHARDS,)),  # columns of a GPU
        ((_K, _SHARDS), (_N,)),  # depth over columns, of B on a GPU
    )
    """Products of sizes and rates with a physical meaning, as a person would compare them (derived)."""
    hand_rules: ClassVar[Mapping[str, Hand]] = {"rule.yaml": _by_rule}

    def findings(self, table: pd.DataFrame) -> Mapping[str, ClaimResult]:
        """Findings of every claim that a table of points can test."""
        everywhere = _name_kinds(table[table["status"] == "ok"])
        # the paper's topology: others are probes of one claim
        ok = everywhere[everywhere["system.node.topology"] == "mesh"]
        chunked = ok[ok["schedule.name"].isin(_KINDS)]
        return {
            "ficco.ideal_max": ClaimResult(float(ok["baseline_ideal_speedup"].max()), _OF_BASELINE, _FAST_GEMM),
            "ficco.best_max": _best(chunked),
            "ficco.chunk_fraction": _chunk_fraction(chunked),
            "ficco.no_single_winner": _no_single_winner(ok),
            "ficco.dil_grows_with_split": _dil_grows(chunked),
            "ficco.dil_axis": _dil_axis(chunked),
            "ficco.cu_transfers_worse": _cu_worse(chunked),
            "ficco.switch_removes_link_starvation": _starvation(everywhere),
            "ficco.limiters": _limiters(chunked),
            "ficco.dma_launch_share": _launch_share(chunked),
            "ficco.heuristic_accuracy": judge_rule(ok, _GEMM),
        }

    def extras(self, run: FinishedRun) -> Iterator[tuple[str, Any]]:
        """`rule`: the learnt rule that the study judges, as lines of a tree."""
        yield "rule", {"source": learnt_rule()["source"], "tree": list(tree_lines(learnt_rule()["tree"]))}

    def figures(self, table: pd.DataFrame, timelines: pd.DataFrame) -> Iterator[tuple[str, Draw]]:
        """Yield (name, what draws): speed-ups, Pareto fronts, DIL and CIL, losses, CUs, timelines of winners.

        Panels are of the 16 scenarios that gain most and least. All but the timelines show the first topology by name
        (the mesh of the paper, where it was run), as each topology has a baseline of its own.
        """
        everywhere = _name_kinds(table[table["status"] == "ok"])
        topologies = sorted(everywhere["system.node.topology"].unique())  # whichever point was evaluated first
        ok = everywhere[everywhere["system.node.topology"] == topologies[0]]
        where = f"on a {topologies[0]}" if len(topologies) > 1 else ""
        yield "speedup", partial(_speedups, ok, where)
        few = ok[ok["scenario"].isin(_telling_scenarios(ok))]
        hardware = table["cost_proxy"].nunique() > 1  # a speed-up is over the same system: it says not which is best
        yield ("cost", partial(_costs, few)) if hardware else ("pareto", partial(_fronts, few))
        if ok["schedule.name"].isin(_KINDS).any():
            yield from _inefficiencies(few)
        shown = timelines[timelines["scenario"].isin(few["scenario"])] if len(timelines) else timelines
        for scenario, group in shown.groupby("scenario", sort=False) if len(shown) else ():
            won = everywhere[(everywhere["scenario"] == scenario) & (everywhere["key"] == group["key"].iloc[0])].iloc[0]
            title = f"{scenario}: {won['speedup']:.2f}x over serial with {choice_in_words(won, _SCHEDULE)}"
            yield f"timeline_{scenario}", partial(_timeline, group, title)


def _telling_scenarios(ok: pd.DataFrame) -> list[str]:
    """Scenarios that are drawn in panels: all of up to 16, else those that gain most and least."""
    gains = ok.groupby("scenario", sort=False)["speedup"].max()
    order = gains.sort_values(ascending=False, kind="stable").index
    half = MOST_PANELS // 2
    return list(gains.index) if len(gains) <= MOST_PANELS else [*order[:half], *order[-half:]]


def _speedups(ok: pd.DataFrame, where: str) -> FigureSheet:
    """Best speed-up of each schedule in each scenario."""
    overlapped = ok[ok["schedule.name"] != "serial"]
    won, best = best_rows(overlapped if len(overlapped) else ok, ["scenario"]), best_rows(ok, ["scenario"])
    (name, times), mean = most_frequent(won["schedule.name"]), geometric_mean(won["speedup"])
    title = f"{name} wins {times} of {len(won)} {_SCENARIOS}; {mean:.2f}x in the geometric mean"
    if serial := int((best["schedule.name"] == "serial").sum()) if len(overlapped) else 0:
        title += f"; with nothing overlapped {serial} of {len(best)} are faster"
    engines = overlapped.pivot_table(index="scenario", columns="schedule.comm_engine", values="speedup", aggfunc="max")
    if {"dma", "cu"} <= set(engines):
        ahead = int((engines["dma"] > engines["cu"]).sum())
        title = f"DMA beats CU copies in {ahead} of {len(engines)}; {title}"
    rows = ok.groupby(["scenario", "schedule.name"], sort=False)["speedup"].max().reset_index()
    rows = with_ranges(rows, ok, ["scenario", "schedule.name"])
    rows["ideal"] = rows["scenario"].map(ok.groupby("scenario")["ideal_speedup"].max())
    rows["bound"] = rows["scenario"].map((ok["speedup"] * (1 + ok["gap"])).groupby(ok["scenario"]).max())
    note = "best of each schedule; baseline: serial, moved by CUs" + f", {where}" * bool(where)
    if (rows["ideal"] <= rows["bound"]).any():  # others are not drawn
        note += "; ideal: the longer of both alone, by what moves fastest, up to the proven bound"
    note += "; lines: 90 % intervals of the fastest, cut at the proven bound" if "range_low" in rows else ""
    speedup = Axis("speedup", "speed-up over serial [x]", centre=1.0)
    return tables.dots(rows, speedup, row="scenario", by="schedule.name", frame=Frame(capitalised(title), note))


def _timeline(tasks: pd.DataFrame, title: str) -> FigureSheet:
    from dse.plots.timelines import timeline

    return timeline(tasks, title)


def _fronts(ok: pd.DataFrame) -> FigureSheet:
    from dse.plots import fronts  # which a run without figures does not need

    axes = Axis("speedup", "speed-up over serial [x]"), _TAKEN, Axis("peak_staging_bytes", "staging buffers")
    won = best_rows(ok, ["scenario"])
    free = int((won["comm_cu_s"] == 0).sum())
    title = f"The fastest point takes no CU time for communication in {free} of {len(won)} {_SCENARIOS}"
    return fronts.pareto(ok, axes, by="schedule.name", frame=Frame(title))


def _costs(ok: pd.DataFrame) -> FigureSheet:
    from dse.plots import fronts

    cost, makespan = Axis("cost_proxy", "hardware cost [of the reference]"), Axis("makespan_s", "makespan", "s")
    won = best_rows(ok, ["scenario"])
    title = f"The fastest systems cost {reach(won['cost_proxy'], 'x', digits=2)} of the reference system"
    return fronts.pareto(ok, (cost, makespan, _TAKEN), by="schedule.name", frame=Frame(title))


def _name_kinds(table: pd.DataFrame) -> pd.DataFrame:
    """Name each point of the whole space by its kind of schedule, such as `hetero_fused_1d`."""
    chunked = table["schedule.name"] == "chunked"
    if not chunked.any():
        return table
    start = table["schedule.local_shard_first"].map({True: "hetero", False: "uniform"}).astype(str)
    dimension = table["schedule.chunk_dim"].map({"m": "1d", "k": "2d"}).astype(str)
    named = start + "_" + table["schedule.compute"].astype(str) + "_" + dimension
    return table.assign(**{"schedule.name": table["schedule.name"].where(~chunked, named)})


def _inefficiencies(ok: pd.DataFrame) -> Iterator[tuple[str, Draw]]:
    """DIL over pieces, CIL by mover, losses of the best of each kind, speed-up over the CUs of kernels."""
    kinds = ok[ok["schedule.name"].isin(_KINDS)]
    dma, cu = (kinds[kinds["schedule.comm_engine"] == engine] for engine in ("dma", "cu"))
    if len(dma):
        yield "dil", partial(_dil, dma)
        yield "signatures", partial(_signatures, dma, best_rows(ok, ["scenario"]))
    yield "cil", partial(_cil, kinds)
    if cu[_MOVERS.column].nunique() > 1:
        yield "cu_sweep", partial(_cu_sweep, cu)


def _dil(dma: pd.DataFrame) -> FigureSheet:
    """Decomposition inefficiency of the GEMM over pieces."""
    pieces = "schedule.num_chunks"
    rows = dma.groupby(["schedule.name", "scenario", pieces], sort=False)["dil"].min().reset_index()
    rows = rows.assign(panel=rows["schedule.name"].map(label), **{pieces: rows[pieces].astype(int)})
    most = rows[rows[pieces] == rows[pieces].max()]
    title = f"Cut into {most[pieces].iloc[0]} pieces, GEMMs take {most['dil'].median():.2f}x their time in the median"
    title += f", {most['dil'].max():.2f}x at most"
    note = "decomposition inefficiency: time of the GEMM in pieces over its time as a whole"
    value = Axis("dil", "decomposition inefficiency [x]", centre=1.0)
    frame = Frame(title, note, "panel")
    return tables.heat(rows, value, x=Axis(pieces, "pieces"), y="scenario", frame=frame)


def _signatures(dma: pd.DataFrame, won: pd.DataFrame) -> FigureSheet:
    """Losses of the best of each kind, and of the winners [one of each scenario], of whatever kind they are."""
    import pandas as pd

    least = best_rows(dma, ["scenario", "schedule.name"])
    least = pd.concat([least, won[~won["key"].isin(least["key"])]])
    by_kernels = (least["schedule.comm_engine"] != "dma").map({True: " by CUs", False: ""})
    least = least.assign(
        **{f"{loss}_share": least[f"{loss}_s"] / least["ideal_s"] for loss in _CAUSES},
        bar=least["schedule.name"].map(label) + by_kernels,
        won=least["key"].isin(won["key"]),
    )
    won = least[least["won"]]
    largest = won[[f"{loss}_share" for loss in _CAUSES]].idxmax(axis=1).astype(str).str.removesuffix("_share")
    cause, times = most_frequent(largest)
    title = f"The best schedule loses most by {cause} in {times} of {len(won)} {_SCENARIOS}"
    parts = [Axis(f"{loss}_share", loss, "%") for loss in _CAUSES]
    frame = Frame(title, "best of each schedule, moved by DMA engines; triangle: the fastest of all", "scenario")
    return tables.stacks(least, parts, bar="bar", label="loss, of the ideal time", frame=frame)


def _cil(kinds: pd.DataFrame) -> FigureSheet:
    """Contention inefficiency of the GEMM by what moves."""
    rows = best_rows(kinds, ["scenario", "schedule.name", "schedule.comm_engine"])
    rows = rows.assign(kind=rows["schedule.name"].map(_KINDS), panel=rows["schedule.comm_engine"].map(label))
    medians = rows.groupby("panel")["cil"].median()
    title = "During communication a GEMM takes " + ", ".join(
        f"{value:.2f}x its time (moved by {name})" for name, value in medians.items()
    )
    note = "contention inefficiency; kinds: 1d or 2d; first letter: uniform or hetero; second: fused or unfused"
    value = Axis("cil", "contention inefficiency [x]", centre=1.0)
    return tables.heat(rows, value, x=Axis("kind", "kind of schedule"), y="scenario", frame=Frame(title, note, "panel"))


def _cu_sweep(cu: pd.DataFrame) -> FigureSheet:
    """Speed-up over the CUs of the kernels that move."""
    rows = cu.groupby(["scenario", "schedule.name", _MOVERS.column], sort=False)["speedup"].max().reset_index()
    best = rows.loc[rows.groupby("scenario", sort=False)["speedup"].idxmax()]
    number, times = most_frequent(best[_MOVERS.column])
    title = f"Moved by kernels, {number} CUs are the best number in {times} of {len(best)} {_SCENARIOS}"
    speedup = Axis("speedup", "speed-up over serial [x]", centre=1.0)
    return tables.curves(rows, _MOVERS, y=speedup, by="schedule.name", frame=Frame(title, panel="scenario"))


def _best(chunked: pd.DataFrame) -> ClaimResult:
    if chunked.empty:
        return ClaimResult(None, "no FiCCO schedule was evaluated")
    return ClaimResult(float(chunked["speedup"].max()), cause=_MORE_SCHEDULES)


def _chunk_fraction(chunked: pd.DataFrame) -> ClaimResult:
    """Fraction of the tensor per transfer: a shard of 1/n is split into as many pieces as there are GPUs, 1 / n^2."""
    named = chunked[chunked["schedule.num_chunks"] == chunked["system.node.num_gpus"]]
    if named.empty:
        return ClaimResult(None, "no schedule with as many pieces as GPUs was evaluated")
    row = named.iloc[0]
    fraction = 1 / (int(row["system.node.num_gpus"]) * int(row["schedule.num_chunks"]))
    return ClaimResult(fraction, "follows from the configuration: GPUs x pieces per shard")


def _no_single_winner(ok: pd.DataFrame) -> ClaimResult:
    kinds = ok.loc[ok["schedule.name"] != "serial", "schedule.name"]
    if ok["scenario"].nunique() < 2 or kinds.nunique() < 2:
        return ClaimResult(None, "needs several scenarios and a choice of schedules")
    best = ok.loc[ok.groupby("scenario")["makespan_s"].idxmin(), ["scenario", "schedule.name"]]
    counts = best["schedule.name"].value_counts()
    return ClaimResult(len(counts) > 1, "wins: " + ", ".join(f"{name} {count}" for name, count in counts.items()))


def _by_dma(chunked: pd.DataFrame) -> pd.DataFrame:
    return chunked[(chunked["schedule.comm_engine"] == "dma") & (chunked["schedule.num_chunks"] == 8)]


def _dil_grows(chunked: pd.DataFrame) -> ClaimResult:
    """Decomposition loss of 8 row chunks against 64 (8 pieces of 8 shards, one GEMM each)."""
    dma = _by_dma(chunked)
    loss = dma.groupby("schedule.name")["dil"].mean()
    if not {"uniform_fused_1d", "hetero_unfused_1d"} <= set(loss.index):
        return ClaimResult(None, "needs 8 chunks moved by DMA, fused and unfused")
    fused, unfused = float(loss["uniform_fused_1d"]), float(loss["hetero_unfused_1d"])
    return ClaimResult(unfused > fused, f"mean GEMM time against undivided: 8-way {fused:.3f}x, 57-way {unfused:.3f}x")


def _dil_axis(chunked: pd.DataFrame) -> ClaimResult:
    """Rank correlation of the loss with the split dimension, over scenarios, must be negative on both axes."""
    dma = _by_dma(chunked)
    rows = dma[dma["schedule.name"] == "hetero_unfused_1d"]
    slices = dma[dma["schedule.name"] == "uniform_fused_2d"]
    if min(rows["scenario"].nunique(), slices["scenario"].nunique()) < 4:  # a rank correlation of fewer says nothing
        return ClaimResult(None, "needs several scenarios, rows and K split into 8 chunks, moved by DMA")
    # of ranks, which is Spearman's; pandas would import scipy.stats for it
    by_m = float(rows["dil"].rank().corr(rows[f"{_GEMM}.m"].rank()))
    by_k = float(slices["dil"].rank().corr(slices[f"{_GEMM}.k"].rank()))
    return ClaimResult(by_m < 0 and by_k < 0, f"Spearman correlation of loss with M {by_m:.2f}, with K {by_k:.2f}")


def _cu_worse(chunked: pd.DataFrame) -> ClaimResult:
    if chunked["schedule.comm_engine"].nunique() < 2:
        return ClaimResult(None, "needs transfers by DMA engines and by kernels")
    best = chunked.groupby(["scenario", "schedule.comm_engine"])["speedup"].max().unstack()
    worse = (best["cu"] < best["dma"]).mean()
    ratio = float((best["dma"] / best["cu"]).mean())
    return ClaimResult(
        bool(worse == 1.0), f"on the mesh, DMA beats CUs in {worse:.0%} of scenarios, by {ratio:.2f}x on average"
    )


def _limiters(chunked: pd.DataFrame) -> ClaimResult:
    """Losses of the schedules by DMA, each over the ideal, on average over scenarios."""
    dma = _by_dma(chunked)
    if dma.empty:
        return ClaimResult(None, "needs 8 chunks moved by DMA")
    share = {name: float((dma[f"{name}_s"] / dma["ideal_s"]).mean()) for name in _CAUSES}
    text = ", ".join(f"{name} {value:.1%}" for name, value in sorted(share.items(), key=lambda item: -item[1]))
    # both must outweigh launches
    return ClaimResult(min(share["decomposition"], share["contention"]) > share["launch"], f"of the ideal time: {text}")


def _launch_share(chunked: pd.DataFrame) -> ClaimResult:
    dma = _by_dma(chunked)
    if dma.empty:
        return ClaimResult(None, "needs 8 chunks moved by DMA")
    worst = dma.sort_values("setup_fraction", kind="stable").iloc[-1]
    return ClaimResult(100 * float(worst["setup_fraction"]), f"largest share, at {worst['scenario']}")


def _starvation(ok: pd.DataFrame) -> ClaimResult:
    """Communication time of shard-level point-to-point against that of the serial all-gather, by topology."""
    topology = "system.node.topology"
    if not {"mesh", "switch"} <= set(ok[topology]):
        return ClaimResult(None, "needs both topologies: +space.system.node.topology='choice(mesh,switch)'")
    moved = ok[ok["schedule.comm_engine"] == "dma"].groupby([topology, "schedule.name"])["comm_s"].mean().unstack()
    if not {"shard_p2p", "serial"} <= set(moved):
        return ClaimResult(None, "needs serial and shard_p2p, moved by DMA")
    ratio = moved["shard_p2p"] / moved["serial"]
    mesh, switch = float(ratio["mesh"]), float(ratio["switch"])
    # many times as long on a mesh, about as long on a switch
    return ClaimResult(mesh > 2 and switch < 1.5, f"against all links at once: mesh {mesh:.2f}x, switch {switch:.2f}x")


@cache
def learnt_rule() -> Mapping[str, Any]:
    """Contents of `rule.yaml`."""
    rule: Mapping[str, Any] = load_yaml(RULE)
    return rule


def pick(sizes: Mapping[str, float], node: Node | None = None) -> str:
    """Kind of schedule for m, n and k of a GEMM whose A is gathered.

    >>> pick({"m": 8192, "n": 8192, "k": 262144}).endswith("2d")
    True
    """
    node = learnt_rule()["tree"] if node is None else node
    if "pick" in node:
        return str(node["pick"])
    value = prod(sizes[name] for name in node["of"]) / prod(sizes[name] for name in node.get("per", ()))
    return pick(sizes, node["then"] if value <= node["at_most"] else node["else"])


def tree_lines(node: Node, depth: int = 0) -> Iterator[str]:
    """Yield the lines of a tree as nested conditions."""
    pad = "    " * depth
    if "pick" in node:
        yield f"{pad}{node['pick']}"
        return
    below = [" * ".join(node[side]) for side in ("of", "per") if node.get(side)]
    yield f"{pad}if {' / '.join(below)} <= {node['at_most']:g}:"
    yield from tree_lines(node["then"], depth + 1)
    yield f"{pad}else:"
    yield from tree_lines(node["else"], depth + 1)


def judge_rule(ok: pd.DataFrame, size: str) -> ClaimResult:
    """Share of shapes of which the rule picks the fastest kind, each kind at its best settings, in percent.

    ok: points on one topology, `schedule.name` their kind. size: path of the sizes, without their last word.
    """
    sizes = {name: f"{size}.{name}" for name in ("m", "n", "k")}
    least = ok.groupby(["scenario", *sizes.values(), "schedule.name"], sort=False)["makespan_s"].min().unstack()
    several = any(ok[column].nunique() > 1 for column in map(str, ok) if column.startswith("system."))
    if len(least) < 2 or several or not set(learnt_rule()["kinds"]) <= set(least):
        return ClaimResult(None, "needs all kinds of schedules, several scenarios and one machine: study=ficco")
    picks = [pick(dict(zip(sizes, place[1:], strict=True))) for place in least.index]
    times = least.to_numpy()[np.arange(len(least)), [list(least).index(kind) for kind in picks]]
    longer = np.nan_to_num(times / least.min(axis=1).to_numpy() - 1, nan=np.inf)  # a kind that has no point
    right, near = (100 * float((longer <= most).mean()) for most in (TIE, NEAR))
    wrong = [place[0] for place, share in zip(least.index, longer, strict=True) if share > TIE]
    text = f"a tree learnt on {learnt_rule()['shapes']} drawn shapes, judged on {len(least)} others; within 2 % of the "
    text += f"best in {near:.0f} %, at most {100 * longer.max():.1f} % longer"
    cause = f"wrong for {', '.join(wrong)}: kinds of nearly the same time; the paper chooses among fewer"
    return ClaimResult(right, text, cause)


STUDY = Ficco()
