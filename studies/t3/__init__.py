"""T3 (arXiv:2401.16677): hardware that tracks a GEMM's output and triggers its reduction, on T3's simulated GPU.

Evaluates the part of an all-reduce that tracking hides, the effect of arbitration at the memory controller, and the
DRAM traffic that adding near memory saves. Sub-layers are simulated; gains of models are projections, shown apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dse.plots import Axis, Draw, FigureSheet, Frame, tables
from dse.plots.labels import with_unit
from dse.results.claims import ClaimResult
from dse.results.run_folder import FinishedRun
from search_spaces.triggered import TriggeredSchedule, traffic
from simulators.costs.gemm.stages import stage_gemm
from simulators.hardware.machine import System
from simulators.hardware.schedule_system import ScheduleSystem
from simulators.workloads.operators import ShapeList, Workload
from studies.common.facts import facts
from studies.plain import Plain, geometric_mean, largest_row

if TYPE_CHECKING:
    import pandas as pd

CONFIGURATIONS = {
    "t3_sequential": "sequential",
    "t3_sequential_nmc": "sequential + NMC",
    "t3_ideal": "ideal overlap",
    "t3_ideal_nmc": "ideal overlap + NMC",
    "t3": "T3",
    "t3_fair": "T3, fair shares",
    "t3_mca": "T3-MCA",
}
"""Schedule -> its name here. NMC: partial sums added near memory. MCA: the GEMM goes first at its controller."""
_MAIN = ("megagpt2", "tnlg")
_LINK, _SHARDS = "system.node.link_bytes_per_s", "workload.operators.gemm.shards"
_SAVED = "likely: token counts are recalled, and decide which operands the cache keeps"
_POINTS = (
    *("ideal_geomean", "ideal_max", "mca_geomean", "mca_max", "mca_gap_to_ideal", "order", "traffic_geomean"),
    *("traffic_max", "fc_gap", "op_gap", "serial_ag_bound", "nmc_adds", "nmc_shrinks_with_tp"),
)
"""Claims that need points of all configurations."""
_POLICIES = {"fcfs": "one queue", "fair": "fair", "compute_first": "first"}
_SHARES = {
    "comm_share_train": (_MAIN, "training", 1.0),
    "comm_share_prompt": (_MAIN, "prompt", 1.0),
    "comm_share_large_train": (("gpt3", "palm", "mtnlg"), "training", 1.0),
    "comm_share_large_prompt": (("gpt3", "palm", "mtnlg"), "prompt", 1.0),
    "comm_share_gemm2x": (("megagpt2", "tnlg", "gpt3", "palm", "mtnlg"), "prompt", 2.0),
}
"""Claim -> models, phase, how many times as fast GEMMs are."""
_PASSES = {"training": (("op", "fc2", "fc1", "ip"), 3.0), "prompt": (("op", "fc2"), 1.0)}
"""Phase -> sub-layers with an all-reduce, and passes over the four GEMMs (forward, input and weight gradients)."""
_BEST = "T3's rule for its threshold is not published: the best of {5, 10, 30, unlimited} of each case"
_UNLIMITED = 10**6
"""Threshold of waiting requests from which communication has all that the GEMM leaves of the HBM."""
_FREE_GAPS = (
    "a wave's own updates wait without a bound; where they leave before the next wave's reads, in the order of L2, "
    "T3-MCA is at 31 %, 2.5 points below the ideal (study=t3_requests)"
)
_BURSTS = "reads wait behind a stage's own updates alone; updates from other GPUs are paced by links and make no burst"
_BYPASS = "updates that bypass the cache shorten the GEMM's reads, too, and that counts here"
_COUNTED = "an identity of the accounting, counted on the graphs of all sub-layers"
_CACHE = "no number is fitted; the cache model was chosen among four having seen this (docs/explanation/schedules.md)"
_CONTEXT = "about another design, which is not modelled"
_UNKNOWN = (
    "both shares follow from hidden size over GPUs and the rate of links alone; the published largest is likely of the "
    "futuristic models on 64 GPUs, whose sizes are not published"
)
_READING = (
    "attention's 40 to 45 % of run time is read as 42.5 % of compute time, on which this rests (conf/data/t3.yaml)"
)
_ASSUMED = "likely: token counts are recalled, attention's share is assumed"


class T3(Plain):
    """Claims, traffic, projections and figures, from a table of configurations."""

    columns: tuple[str, ...] = (
        "schedule.name",
        "schedule.reduction",
        "schedule.near_memory",
        "schedule.arbitration",
        "schedule.occupancy_threshold",
        "schedule.guaranteed_share",
        "workload.operators.gemm.shards",
        "workload.operators.gemm.m",
        "workload.operators.gemm.n",
        "workload.operators.gemm.k",
        "system.node.link_bytes_per_s",
    )

    def findings(self, table: pd.DataFrame) -> Mapping[str, ClaimResult]:
        """Findings on the gains of configurations, on the ring as T3's default reading has it."""
        context = ClaimResult(None, _CONTEXT)
        findings = {f"t3.cais_over_{name}": context for name in ("t3_inf", "fused_inf", "t3_train", "fused_train")}
        findings |= {
            "t3.in_switch": context,
            "t3.ring_validation": ClaimResult(None, "its measurements are not public"),
        }
        speedups, saved, exposed = (_cases(table, column) for column in ("speedup", "hbm_bytes", "exposed_comm_s"))
        # each case needs each configuration
        if set(CONFIGURATIONS.values()) - set(speedups) or speedups.isna().any(axis=None):
            absent = ClaimResult(None, "needs points of all configurations, of both models with 8 and 16 GPUs")
            return findings | {f"t3.{name}": absent for name in _POINTS}
        judged = _judge_configurations(speedups, saved, exposed) | _judge_arbitration(table, speedups)
        return findings | {f"t3.{name}": finding for name, finding in judged.items()}

    def further(self, run: FinishedRun) -> Mapping[str, ClaimResult]:
        """Traffic by component, reads with and without bypass, resources, and shares of communication."""
        parts, tracker = self.traffic_rows(run), ScheduleSystem.of(run.config["system"]).gpu.tracker
        entries = tracker.num_entries if tracker else None
        size = tracker.num_entries * tracker.bytes_per_entry / 1e3 if tracker else None
        main_ratios = [ratio for name, ratio in self.read_ratios(run).items() if name.partition("-")[0] in _MAIN]
        findings = {
            "t3.rs_read_formula": _identity(_ratio_holds(parts, "RS reads", lambda n: (2 * n - 1) / (n - 2))),
            "t3.write_formula": _identity(_ratio_holds(parts, "writes", lambda n: 2 * n / (2 * n - 2))),
            "t3.ag_traffic_same": _identity(_same_gather(parts)),
            "t3.gemm_read_ratio": ClaimResult(geometric_mean(main_ratios) if main_ratios else None, _CACHE),
            "t3.tracker_entries": ClaimResult(None, f"an input of the model: {entries}", basis="input"),
            "t3.tracker_bytes": ClaimResult(None, f"an input of the model: {size} KB", basis="input"),
        }
        return findings | _comm_shares(run.outputs.read_table("results"))

    def traffic_rows(self, run: FinishedRun) -> list[dict[str, Any]]:
        """Rows of DRAM traffic [bytes] of a GPU by component, of each sub-layer, sequential and of T3."""
        return _traffic(ScheduleSystem.of(run.config["system"]), ShapeList.model_validate(run.config["workload"]))

    def read_ratios(self, run: FinishedRun) -> Mapping[str, float]:
        """Scenario -> HBM reads of the GEMM with outputs through the cache over those with outputs past it."""
        system, shapes = ScheduleSystem.of(run.config["system"]), ShapeList.model_validate(run.config["workload"])
        ratios = _reads(system, shapes, bypass=False) / _reads(system, shapes, bypass=True)
        return dict(zip(shapes.workloads(), ratios.tolist(), strict=True))

    def figures(self, table: pd.DataFrame, timelines: pd.DataFrame) -> Iterator[tuple[str, Draw]]:
        """Sub-layer speed-ups by configuration, for each reading of the links; tracking by policy."""
        ok = _name_points(table)
        if ok.empty:
            return
        ok = ok.sort_values("configuration", key=lambda column: column.map(_rank), kind="stable")
        for link in sorted(ok[_LINK].unique().tolist(), reverse=True):
            rows = ok[(ok[_LINK] == link) & ok["configuration"].isin(_SHOWN)]
            if len(rows):
                yield f"sublayers_{link / 1e9:g}GBps", partial(_sublayers, rows, link)
        swept = ok[(ok["schedule.reduction"] == "tracked") & (ok[_LINK] == ok[_LINK].max())]
        if len(swept.drop_duplicates(["schedule.arbitration", "schedule.occupancy_threshold"])) > 1:
            yield "arbitration", partial(_policies_figure, swept)

    def extras(self, run: FinishedRun) -> Iterator[tuple[str, Any]]:
        """DRAM traffic by component of every sub-layer on the study's own system, of the shipped configurations, and
        projections of whole models, each with its figure.
        """
        import pandas as pd

        shapes = ShapeList.model_validate(run.config["workload"])
        parts = pd.DataFrame(self.traffic_rows(run))
        yield "traffic", parts
        if len(parts):
            yield "traffic", partial(_traffic_figure, parts)
        projected = pd.DataFrame(_project_models(run.outputs.read_table("results")) if _is_all_reduce(shapes) else ())
        if len(projected):
            yield "projection", projected
            yield "projection", partial(_projection, projected)


_SHOWN = [CONFIGURATIONS[name] for name in ("t3_ideal", "t3_ideal_nmc", "t3", "t3_mca")]
_SPEEDUP = Axis("speedup", "sub-layer speed-up over sequential [x]", centre=1.0)


def _sublayers(rows: pd.DataFrame, link: float) -> FigureSheet:
    """Speed-up of each sub-layer by configuration, a panel for each model."""
    best = rows.groupby(["scenario", "of", "sub", "configuration"], sort=False)["speedup"].max().reset_index()
    judged, mean = _of_claims(best)
    means = judged.groupby("configuration", sort=False)["speedup"].agg(geometric_mean)
    last = CONFIGURATIONS["t3_mca"] if CONFIGURATIONS["t3_mca"] in means else means.index[-1]
    title = f"{last} makes sub-layers {means[last]:.2f}x as fast"
    if (top := CONFIGURATIONS["t3_ideal_nmc"]) in means and top != last:
        title += f", {top} {means[top]:.2f}x"
    title += f", in the {mean}"
    note = f"links of {with_unit(link, 'B/s')}; ideal overlap has no near-memory reduction (NMC), which T3 has"
    frame = Frame(title, note, "of")
    return tables.dots(best, _SPEEDUP, row="sub", by="configuration", frame=frame)


def _policies_figure(swept: pd.DataFrame) -> FigureSheet:
    """Speed-up of tracking by the policy of the memory controller."""
    policies = list(zip(swept["schedule.arbitration"], swept["schedule.occupancy_threshold"], strict=True))
    first = [0.0 if name != "compute_first" else float(limit) for name, limit in policies]
    swept = swept.assign(policy=[_policy(*policy) for policy in policies], first=first)
    swept = swept.sort_values("first", kind="stable")
    best = swept.groupby(["scenario", "of", "sub", "policy"], sort=False)["speedup"].max().reset_index()
    best = best.astype({"policy": object})  # columns in order of appearance, not alphabetic
    judged, mean = _of_claims(best)
    means = judged.groupby("policy", sort=False)["speedup"].agg(geometric_mean).sort_values()
    title = f"The best policy is {means.index[-1]} ({means.iloc[-1]:.3f}x in the {mean}), "
    title += f"the worst {means.index[0]} ({means.iloc[0]:.3f}x)"
    x = Axis("policy", "policy of the memory controller; first n: the GEMM, while fewer than n requests wait")
    return tables.heat(best, _SPEEDUP, x=x, y="sub", frame=Frame(title, panel="of"))


def _traffic_figure(parts: pd.DataFrame) -> FigureSheet:
    """DRAM traffic by component, a panel for each model."""
    kinds = [str(name) for name in parts if str(name).split(" ")[0] in ("GEMM", "RS", "AG")]
    judged, mean = _of_claims(parts.assign(total=parts[kinds].sum(axis=1)))
    total = judged.pivot_table(index="scenario", columns="configuration", values="total", sort=False)
    title = "DRAM traffic of a GPU by component"
    if {"sequential", "T3"} <= set(total):
        saved = 100 * (1 - 1 / geometric_mean((total["sequential"] / total["T3"]).dropna()))
        title = f"T3 saves {saved:.0f} % of the DRAM traffic in the {mean}"
    stacked = [Axis(name, name, "B") for name in kinds]
    return tables.stacks(parts, stacked, bar="case", label="DRAM traffic of a GPU", frame=Frame(title, panel="of"))


def _of_claims(rows: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """Rows of the models whose means the paper publishes, or all without any, and what their mean is of."""
    published = rows[rows["of"].str.partition(",")[0].isin(_MAIN)]
    rows = published if len(published) else rows
    models = " and ".join(rows["of"].str.partition(",")[0].unique())
    return rows, f"geometric mean of {rows['scenario'].nunique()} cases of {models}"


def _projection(projected: pd.DataFrame) -> FigureSheet:
    """Speed-up of whole models by Amdahl's law, a panel for each phase."""
    rows = projected.sort_values("configuration", key=lambda column: column.map(_rank), kind="stable")
    rows = rows[rows["configuration"].isin(_SHOWN)]
    best = largest_row(rows, "model_speedup")
    title = (
        f"Whole models gain up to {best['model_speedup']:.2f}x ({best['of']}, {best['phase']}, {best['configuration']})"
    )
    gain = Axis("model_speedup", "speed-up of a model, projected [x]", centre=1.0)
    return tables.dots(rows, gain, row="of", by="configuration", frame=Frame(title, panel="phase"))


def _policy(arbitration: str, threshold: Any) -> str:
    """Label of a policy; with the threshold where the GEMM goes first."""
    return _POLICIES[arbitration] + (f", {_limit_text(threshold)}" if arbitration == "compute_first" else "")


def _is_all_reduce(shapes: ShapeList) -> bool:
    """Tell whether whole all-reduces follow, as they do in a layer."""
    return shapes.pattern == "all_reduce" and all(shape.pattern in (None, "all_reduce") for shape in shapes.listed)


def _rank(name: str) -> int:
    return list(CONFIGURATIONS.values()).index(name)


def _name_points(table: pd.DataFrame) -> pd.DataFrame:
    """Rows with results, with `configuration`, `model`, `sub` and `of` (the model and its GPUs)."""
    ok = table[(table["status"] == "ok") & table["schedule.name"].isin(CONFIGURATIONS)]
    ok = ok.assign(configuration=ok["schedule.name"].map(CONFIGURATIONS))
    parts = ok["scenario"].str.split("-")
    of = parts.str[0] + ", " + ok[_SHARDS].astype(str) + " GPUs"
    return ok.assign(model=parts.str[0], sub=parts.str[-1], of=of)


def _cases(table: pd.DataFrame, column: str) -> pd.DataFrame:
    """Metric of the fastest point by scenario (of 16 cases) and configuration, at the faster reading of the links."""
    ok = _name_points(table)
    ok = ok[ok["model"].isin(_MAIN)]
    ok = ok[ok[_LINK] == ok[_LINK].max()].sort_values("makespan_s", kind="stable")
    cases: pd.DataFrame = ok.groupby(["scenario", "configuration"])[column].first().unstack()
    return cases


def _judge_configurations(
    speedups: pd.DataFrame, traffic_: pd.DataFrame, exposed: pd.DataFrame
) -> dict[str, ClaimResult]:
    ideal, near, plain, mca = (speedups[CONFIGURATIONS[n]] for n in ("t3_ideal", "t3_ideal_nmc", "t3", "t3_mca"))
    saved = 100 * (1 - traffic_["T3"] / traffic_["sequential"])
    gap, sub = 100 * (ideal / plain - 1), speedups.index.str.split("-").str[-1]
    ordered, late = bool((mca <= near * (1 + 1e-9)).all()), plain / mca - 1  # rounding
    helps = exposed["sequential"] / exposed["sequential + NMC"]
    degree = speedups.index.str.extract(r"tp(\d+)", expand=False).astype(int)
    shrinks = [bool((series.diff().dropna() < 0).all()) for series in _by_degree(helps, degree)]
    return {
        "ideal_geomean": ClaimResult(100 * (geometric_mean(ideal) - 1), f"{len(ideal)} cases"),
        "ideal_max": ClaimResult(float(100 * (ideal.max() - 1)), f"best: {ideal.idxmax()}"),
        "mca_max": ClaimResult(float(100 * (mca.max() - 1)), f"best: {mca.idxmax()}", _FREE_GAPS),
        "mca_gap_to_ideal": ClaimResult(
            100 * (geometric_mean(ideal) - geometric_mean(mca)), "of the two geometric means", _FREE_GAPS
        ),
        "order": ClaimResult(
            ordered and bool((late <= 1e-9).all()),
            f"T3 {geometric_mean(plain):.3f}, T3-MCA {geometric_mean(mca):.3f}, ideal + NMC {geometric_mean(near):.3f}",
            f"T3 is up to {100 * late.max():.1f} % ahead of T3-MCA ({late.idxmax()}), behind in "
            f"{(late < 0).sum()} cases; {_FREE_GAPS}",
        ),
        "traffic_geomean": ClaimResult(100 * (1 - geometric_mean(1 - saved / 100))),
        "traffic_max": ClaimResult(float(saved.max()), f"best: {saved.idxmax()}", _SAVED),
        "fc_gap": ClaimResult(*_spread(gap[sub.isin(["fc1", "fc2"])]), cause=_BURSTS),
        "op_gap": ClaimResult(*_spread(gap[sub == "op"]), cause=_BURSTS),
        "serial_ag_bound": ClaimResult(float(speedups.max().max()), "the largest of all configurations", _BYPASS),
        "nmc_adds": ClaimResult(
            100 * float((near - ideal).max()), f"mean {100 * float((near - ideal).mean()):.1f}", _BYPASS
        ),
        "nmc_shrinks_with_tp": ClaimResult(all(shrinks) if shrinks else None, "of the time that RS and AG take"),
    }


def _judge_arbitration(table: pd.DataFrame, speedups: pd.DataFrame) -> dict[str, ClaimResult]:
    """Finding on T3's arbitration, with what each threshold and other policies of the controller give."""
    mca, fair, plain = (speedups[CONFIGURATIONS[name]] for name in ("t3_mca", "t3_fair", "t3"))
    column = "schedule.occupancy_threshold"
    points = table[table["schedule.name"] == "t3_mca"]
    by_limit = {limit: _cases(points[points[column] == limit], "speedup") for limit in sorted(points[column].unique())}
    gains = {_limit_text(limit): 100 * (geometric_mean(cases.to_numpy()) - 1) for limit, cases in by_limit.items()}
    text = ", ".join(f"{limit} {gain:.1f} %" for limit, gain in gains.items())
    gain = 100 * (geometric_mean(mca) - 1)
    either, shared = (100 * (geometric_mean(gains) - 1) for gains in (np.maximum(mca, plain), fair))
    others = (
        f"alone: {text}; with plain T3 if that is faster {either:.1f} %; fair shares, no arbitration, {shared:.1f} %"
    )
    return {"mca_geomean": ClaimResult(gain, f"{_BEST}; {others}", _FREE_GAPS)}


def _limit_text(limit: float) -> str:
    return f"{limit:.0f}" if limit < _UNLIMITED else "unlimited"


def _spread(gap: pd.Series[Any]) -> tuple[float, str]:
    return float(gap.mean()), f"mean of {len(gap)} layers, {gap.min():.1f} to {gap.max():.1f} %"


def _by_degree(helps: pd.Series[Any], degree: Any) -> list[pd.Series[Any]]:
    """Gain of each sub-layer from NMC, by rising number of GPUs."""
    named = helps.index.str.replace(r"tp\d+-", "", regex=True)
    frame = helps.to_frame("helps").assign(degree=np.asarray(degree), name=named).sort_values("degree")
    return [group["helps"] for _, group in frame.groupby("name") if len(group) > 1]


def _graph_traffic(system: System, workload: Workload, reduction: str, near_memory: bool) -> dict[str, float]:
    arbitration = "fcfs" if reduction == "tracked" else None
    chosen = {"reduction": reduction, "arbitration": arbitration, "near_memory": near_memory}
    knobs = TriggeredSchedule.model_validate({"name": "traffic", "family": "triggered", **chosen})
    if any(rule.broken for rule in knobs.rules(system, workload)):
        return {}
    return traffic(knobs.lower(system, workload))


def _traffic(system: System, shapes: ShapeList) -> list[dict[str, Any]]:
    """Rows of DRAM traffic [bytes] of a GPU by component, sequential and of T3, of every sub-layer that can be run."""
    rows = []
    for name, tree in shapes.workloads().items():
        workload = _fill_shards(tree, system)
        for label, reduction, near in (("sequential", "serial", False), ("T3", "tracked", True)):
            parts = _graph_traffic(system, workload, reduction, near)
            if parts:
                shards = workload.overlap().gemm.shards
                case = f"{name.split('-')[-1]}, {label}"
                of = f"{name.split('-')[0]}, {shards} GPUs"
                rows.append({"scenario": name, "case": case, "of": of, "configuration": label, "gpus": shards, **parts})
    return rows


def _fill_shards(tree: Mapping[str, Any], system: System) -> Workload:
    gemm = tree["operators"]["gemm"]
    shards = gemm["shards"] or system.node.num_gpus  # null: all GPUs of the node
    operators = {**tree["operators"], "gemm": {**gemm, "shards": shards}}
    return Workload.model_validate({**tree, "operators": operators})


def _identity(holds: bool | None) -> ClaimResult:
    return ClaimResult(holds, _COUNTED, basis="by construction")


def _ratio_holds(parts: list[dict[str, Any]], what: str, formula: Any) -> bool | None:
    """Tell whether sequential / T3 is the value of a formula of N in every case, on a ring."""
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


def _same_gather(parts: list[dict[str, Any]]) -> bool | None:
    """Tell whether both configurations read and write N - 1 chunks in the all-gather."""
    chunks = {
        row["scenario"]: row["GEMM writes"] / row["gpus"] for row in parts if row["configuration"] == "sequential"
    }
    holds = [
        np.isclose(row[name], (row["gpus"] - 1) * chunks[row["scenario"]], rtol=1e-9)
        for row in parts
        for name in ("AG reads", "AG writes")
        if row["scenario"] in chunks
    ]
    return bool(all(holds)) if holds else None


def _reads(system: System, shapes: ShapeList, *, bypass: bool) -> Any:
    """HBM reads [bytes] of each sub-layer's GEMM."""
    reads = []
    for tree in shapes.workloads().values():
        gemm = _fill_shards(tree, system).overlap().gemm
        size = (gemm.m, gemm.local_n, gemm.local_k)
        reads.append(float(stage_gemm(system.gpu, size, precision=gemm.precision, bypass=bypass).read_bytes))
    return np.array(reads)


def _layer_times(table: pd.DataFrame) -> pd.DataFrame:
    """Times [s] by model with its GPUs (`of`), sub-layer and configuration: makespan, GEMM, exposed communication."""
    ok = _name_points(table)
    ok = ok[ok[_LINK] == ok[_LINK].max()].sort_values("makespan_s", kind="stable")
    best = ok.groupby(["model", "of", "sub", "configuration"]).first().reset_index()
    times: pd.DataFrame = best[["model", "of", "sub", "configuration", "makespan_s", "gemm_s", "exposed_comm_s"]]
    return times


def _attention_share() -> float:
    return float(facts("t3")["attention_share"]["value"])


def _layer(rows: pd.DataFrame, phase: str, faster: float) -> dict[str, float]:
    """Times of a layer of one model: compute, communication, GEMMs before it [s]; and saved by each configuration [s].

    compute = passes x the four GEMMs / (1 - attention's share); GEMMs without an all-reduce take the time of those of
    equal FLOP with one. faster: speed-up of GEMMs. Configurations that lack a sub-layer are left out.
    """
    reduced, passes = _PASSES[phase]
    sequential = rows[rows["configuration"] == "sequential"].set_index("sub")
    gemms = float(sequential["gemm_s"].sum()) * passes
    attention = gemms * _attention_share() / (1 - _attention_share())  # a share of all compute, attention included
    moved = float(sequential.loc[list(reduced), "exposed_comm_s"].sum())
    sliced = float(sequential.loc[list(reduced), "gemm_s"].sum()) / faster
    times = {"compute_s": gemms / faster + attention, "communication_s": moved, "sliced_s": sliced}
    for name, other in rows.groupby("configuration"):
        if not set(reduced) <= set(other["sub"]):
            continue
        after = other.set_index("sub").loc[list(reduced), "makespan_s"]
        times[str(name)] = float((sequential.loc[list(reduced), "makespan_s"] - after).sum())
    return times


def _whole(rows: pd.DataFrame) -> bool:
    return set(rows.loc[rows["configuration"] == "sequential", "sub"]) >= {"op", "fc2", "fc1", "ip"}


def _project_models(table: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """Projections of models by Amdahl's law: one share of sub-layers by phase."""
    for of, rows in _layer_times(table).groupby("of"):
        if not _whole(rows):
            continue
        for phase in _PASSES:
            layer = _layer(rows, phase, 1.0)
            share, _ = _layer_shares(layer)
            total = layer.pop("compute_s") + layer.pop("communication_s")
            layer.pop("sliced_s")
            for name, saved in layer.items():
                if name != "sequential":
                    labels = {"of": of, "phase": phase, "configuration": name, "communication_share": share}
                    # Amdahl: the rest of the model is not changed
                    yield {**labels, "model_speedup": total / (total - saved)}


def _comm_shares(table: pd.DataFrame) -> dict[str, ClaimResult]:
    """Findings on the largest shares of communication in a layer: of run time, and of sliced sub-layers beside it.

    Those of models beyond the listed ones are not tested.
    """
    findings, times = {}, _layer_times(table)
    for claim, (models, phase, faster) in _SHARES.items():
        shares: dict[str, tuple[float, float]] = {}
        for of, rows in times[times["model"].isin(models)].groupby("of"):
            if _whole(rows):
                shares[str(of)] = _layer_shares(_layer(rows, phase, faster))
        if not shares:
            findings[f"t3.{claim}"] = ClaimResult(None, "needs all four sub-layers of a model")
            continue
        most = max(shares, key=lambda name: shares[name][0])
        of_time, of_sliced = (100 * share for share in shares[most])
        text = f"{most}: {of_time:.1f} % of run time, {of_sliced:.1f} % of sliced sub-layers"
        listed = set(models) == set(_MAIN)
        untested = ClaimResult(None, f"{text}, the largest of the listed models; {_UNKNOWN}")
        findings[f"t3.{claim}"] = ClaimResult(of_time, f"{text}; {_READING}", _ASSUMED) if listed else untested
    return findings


def _layer_shares(layer: Mapping[str, float]) -> tuple[float, float]:
    """Share of communication in a layer's run time, and in its sub-layers that are sliced and reduced."""
    moved = layer["communication_s"]
    return moved / (moved + layer["compute_s"]), moved / (moved + layer["sliced_s"])


STUDY = T3()
