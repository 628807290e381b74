"""T3 (arXiv:2401.16677): hardware that tracks a GEMM's output and triggers its reduction, on T3's simulated GPU.

Evaluates the part of an all-reduce that tracking hides, the effect of arbitration at the memory controller, and the
DRAM traffic that adding near memory saves. Sub-layers are simulated; gains of models are projections, shown apart. What
the paper published is judged request by request (`study=t3_requests` of the plug-in near_memory).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from dse.plots import Axis, Draw, FigureSheet, Frame, tables
from dse.plots.labels import with_unit
from dse.results.run_folder import FinishedRun
from search_spaces.triggered import TriggeredSchedule, traffic
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
MAIN = ("megagpt2", "tnlg")
_LINK, _SHARDS = "system.node.link_bytes_per_s", "workload.operators.gemm.shards"
_POLICIES = {"fcfs": "one queue", "fair": "fair", "compute_first": "first"}
_PASSES = {"training": (("op", "fc2", "fc1", "ip"), 3.0), "prompt": (("op", "fc2"), 1.0)}
"""Phase -> sub-layers with an all-reduce, and passes over the four GEMMs (forward, input and weight gradients)."""
_UNLIMITED = 10**6
"""Threshold of waiting requests from which communication has all that the GEMM leaves of the HBM."""


class T3(Plain):
    """Traffic, projections and figures, from a table of configurations."""

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

    def traffic_rows(self, run: FinishedRun) -> list[dict[str, Any]]:
        """Rows of DRAM traffic [bytes] of a GPU by component, of each sub-layer, sequential and of T3."""
        return _traffic(ScheduleSystem.of(run.config["system"]), ShapeList.model_validate(run.config["workload"]))

    def figures(self, table: pd.DataFrame, timelines: pd.DataFrame) -> Iterator[tuple[str, Draw]]:
        """Sub-layer speed-ups by configuration, for each reading of the links; tracking by policy."""
        ok = name_points(table)
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
    published = rows[rows["of"].str.partition(",")[0].isin(MAIN)]
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


def name_points(table: pd.DataFrame) -> pd.DataFrame:
    """Rows with results, with `configuration`, `model`, `sub` and `of` (the model and its GPUs)."""
    ok = table[(table["status"] == "ok") & table["schedule.name"].isin(CONFIGURATIONS)]
    ok = ok.assign(configuration=ok["schedule.name"].map(CONFIGURATIONS))
    parts = ok["scenario"].str.split("-")
    of = parts.str[0] + ", " + ok[_SHARDS].astype(str) + " GPUs"
    return ok.assign(model=parts.str[0], sub=parts.str[-1], of=of)


def _limit_text(limit: float) -> str:
    return f"{limit:.0f}" if limit < _UNLIMITED else "unlimited"


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


def layer_times(table: pd.DataFrame) -> pd.DataFrame:
    """Times [s] by model with its GPUs (`of`), sub-layer and configuration: makespan, GEMM, exposed communication."""
    ok = name_points(table)
    ok = ok[ok[_LINK] == ok[_LINK].max()].sort_values("makespan_s", kind="stable")
    best = ok.groupby(["model", "of", "sub", "configuration"]).first().reset_index()
    times: pd.DataFrame = best[["model", "of", "sub", "configuration", "makespan_s", "gemm_s", "exposed_comm_s"]]
    return times


def _attention_share() -> float:
    return float(facts("t3")["attention_share"]["value"])


def layer_seconds(rows: pd.DataFrame, phase: str, faster: float) -> dict[str, float]:
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


def has_all_sublayers(rows: pd.DataFrame) -> bool:
    """Tell whether the sequential points of one model are of all four sub-layers of a layer."""
    return set(rows.loc[rows["configuration"] == "sequential", "sub"]) >= {"op", "fc2", "fc1", "ip"}


def _project_models(table: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """Projections of models by Amdahl's law: one share of sub-layers by phase."""
    for of, rows in layer_times(table).groupby("of"):
        if not has_all_sublayers(rows):
            continue
        for phase in _PASSES:
            layer = layer_seconds(rows, phase, 1.0)
            share, _ = layer_shares(layer)
            total = layer.pop("compute_s") + layer.pop("communication_s")
            layer.pop("sliced_s")
            for name, saved in layer.items():
                if name != "sequential":
                    labels = {"of": of, "phase": phase, "configuration": name, "communication_share": share}
                    # Amdahl: the rest of the model is not changed
                    yield {**labels, "model_speedup": total / (total - saved)}


def layer_shares(layer: Mapping[str, float]) -> tuple[float, float]:
    """Share of communication in a layer's run time, and in its sub-layers that are sliced and reduced."""
    moved = layer["communication_s"]
    return moved / (moved + layer["compute_s"]), moved / (moved + layer["sliced_s"])


STUDY = T3()
