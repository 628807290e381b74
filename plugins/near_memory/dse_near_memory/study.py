"""T3's claims by requests (`study=t3_requests`), with times of the fluid model (`study=t3`) beside them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from dse.backend import Batch
from dse.results.claims import ClaimResult
from dse.results.run_folder import FinishedRun
from dse.space import set_path
from dse_near_memory.backend import RequestBackend
from dse_near_memory.claims import judge_comm_shares, judge_points, judge_traffic
from dse_near_memory.simulation import PARTS
from simulators.hardware.schedule_system import ScheduleSystem
from simulators.overlap.backend import OverlapBackend
from simulators.workloads.model_zoo import option_tree
from studies.plain import geometric_mean
from studies.t3 import MAIN, T3

if TYPE_CHECKING:
    import pandas as pd

    from dse.plots import Draw

_LINK, _SHARDS = "system.node.link_bytes_per_s", "workload.operators.gemm.shards"
_LIMIT, _QUEUE = "schedule.occupancy_threshold", "controller.dram.queue"
_ORDER = (
    "traced: an OP layer of sixteen stores so fast that its own updates fill the HBM; its GEMM ends long before its "
    "transfers do, and each update of it that goes first delays them"
)
_BURSTS = (
    "traced: CUs take their next tiles one by one, so that their bursts drift apart, and reads wait for few updates of "
    "others; where all wait for the last (controller.lockstep=true) it is 6.4 %. All requests of communication take "
    "the bus for 8.5 % of the ideal's time: more than queues must hold a GEMM up by 15 %"
)
_KEPT = (
    "traced: least recently used goes, so that nine of 16 layers keep what waves share either way, and two neither "
    "way; five, which keep it only where outputs pass by, read up to 3.1 times less"
)
_LINKS = (
    "traced: kernels reach 96 % of a link, and sum the last chunk once all of it is there. Where they sum it as it "
    "comes in (controller.sums_last=false) it is 3.1, but then near memory helps no less with more GPUs, and T3-MCA "
    "gains 41.6 % at most"
)
_CAUSES = {
    "order": _ORDER,
    **dict.fromkeys(("mca_geomean", "mca_max", "mca_gap_to_ideal", "fc_gap", "op_gap"), _BURSTS),
    **dict.fromkeys(("serial_ag_bound", "nmc_adds"), _LINKS),
    "traffic_max": _KEPT,
}
"""Claim -> cause of a miss."""


class T3Requests(T3):
    """Claims of T3 from a table of requests; parts of the traffic are counted, and the fluid model stands beside."""

    columns = (*T3.columns, _QUEUE)

    def findings(self, table: pd.DataFrame) -> Mapping[str, ClaimResult]:
        """Findings on the gains of configurations, T3-MCA by its rule."""
        findings = judge_points(by_rule(table))
        for name, cause in _CAUSES.items():
            findings[f"t3.{name}"] = replace(findings[f"t3.{name}"], cause=cause)
        compared = compare_thresholds(table)
        if len(compared) and findings["t3.mca_geomean"].ours is not None:
            findings["t3.mca_geomean"] = replace(findings["t3.mca_geomean"], remark=_regret_text(compared))
        return findings

    def further(self, run: FinishedRun) -> Mapping[str, ClaimResult]:
        """Traffic by component, reads with and without bypass, resources, and shares of communication."""
        tracker = ScheduleSystem.of(run.config["system"]).gpu.tracker
        entries = tracker.num_entries if tracker else None
        size = tracker.num_entries * tracker.bytes_per_entry / 1e3 if tracker else None
        # T3's claim is on the main models
        ratios = [ratio for name, ratio in self._read_ratios(run).items() if name.partition("-")[0] in MAIN]
        reads = geometric_mean(ratios) if ratios else None
        findings = {
            "t3.gemm_read_ratio": ClaimResult(reads, "no number is fitted", cause=_KEPT),
            "t3.tracker_entries": ClaimResult(None, f"an input of the model: {entries}", basis="input"),
            "t3.tracker_bytes": ClaimResult(None, f"an input of the model: {size} KB", basis="input"),
        }
        shares = judge_comm_shares(run.outputs.read_table("results"))
        return {**findings, **judge_traffic(self.traffic_rows(run)), **shares}

    def figures(self, table: pd.DataFrame, timelines: pd.DataFrame) -> Iterator[tuple[str, Draw]]:
        """Figures of `study=t3`: sub-layers with T3-MCA by its rule, policies with all thresholds."""
        # arbitration shows all thresholds, other figures the one that T3's rule takes
        for rows, swept in ((by_rule(table), False), (table, True)):
            yield from (pair for pair in super().figures(rows, timelines) if (pair[0] == "arbitration") == swept)

    def traffic_rows(self, run: FinishedRun) -> list[dict[str, Any]]:
        """Bytes by component as they were requested."""
        rows = []
        for row in _main_rows(run.outputs.read_table("results")).to_dict("records"):
            case, label = str(row["scenario"]), _LABELS[row["schedule.name"]]
            model, sub = case.partition("-")[0], case.split("-")[-1]
            parts = {part: row[f"{part.lower().replace(' ', '_')}_bytes"] for part in PARTS}
            of = f"{model}, {row[_SHARDS]} GPUs"
            names = {"scenario": case, "case": f"{sub}, {label}", "of": of, "configuration": label}
            rows.append({**names, "gpus": row[_SHARDS], **parts})
        return rows

    def _read_ratios(self, run: FinishedRun) -> Mapping[str, float]:
        """Reads of the GEMM, sequential over T3."""
        reads: dict[str, dict[str, float]] = {}
        for row in self.traffic_rows(run):
            reads.setdefault(row["scenario"], {})[row["configuration"]] = row["GEMM reads"]
        return {case: parts["sequential"] / parts["T3"] for case, parts in reads.items() if len(parts) == 2}

    def extras(self, run: FinishedRun) -> Iterator[tuple[str, Any]]:
        """Tables and figures of `study=t3`, T3-MCA's rule beside the best threshold, and the fluid model."""
        yield from super().extras(run)
        table = run.outputs.read_table("results")
        yield "thresholds", compare_thresholds(table)
        yield "beside_fluid", beside_fluid(run.config, table)


_LABELS = {"t3_sequential": "sequential", "t3": "T3"}


def _main_rows(table: pd.DataFrame) -> pd.DataFrame:
    """The sequential and the T3 point of each sub-layer, at the faster reading of the links."""
    ok = table[(table["status"] == "ok") & table["schedule.name"].isin(list(_LABELS))]
    ok = ok[ok[_LINK] == ok[_LINK].max()].sort_values("makespan_s", kind="stable")
    first: pd.DataFrame = ok.drop_duplicates(["scenario", "schedule.name"])
    return first


def by_rule(table: pd.DataFrame) -> pd.DataFrame:
    """Points of a table without those of T3-MCA whose threshold is not what its rule takes."""
    without_mca = table["schedule.name"] != "t3_mca"
    points: pd.DataFrame = table[without_mca | _is_ruled(table)]
    return points


def _is_ruled(table: pd.DataFrame) -> pd.Series[bool]:
    """Tell whether a point's threshold is the rule's; as many as a queue holds are no limit."""
    # thresholds beyond the queue act alike
    matches: pd.Series[bool] = table[_LIMIT].clip(upper=table[_QUEUE]) == table["rule_threshold"]
    return matches


def compare_thresholds(table: pd.DataFrame) -> pd.DataFrame:
    """Threshold and speed-up of T3-MCA by its rule, and the best ones; a row for each sub-layer at the faster links.

    queue_found: what the rule goes by. regret: time by the rule over the best, less 1.
    """
    # sorted by time, so that the first of each scenario is the best threshold
    points = table[(table["status"] == "ok") & (table["schedule.name"] == "t3_mca")]
    points = points[points[_LINK] == points[_LINK].max()].sort_values("makespan_s", kind="stable")
    best = points.drop_duplicates("scenario")[["scenario", "speedup", _LIMIT]]
    ruled = points[_is_ruled(points)][["scenario", "speedup", "queue_found", "rule_threshold"]]
    both = ruled.merge(best, on="scenario", suffixes=("", "_best")).rename(columns={_LIMIT: "best_threshold"})
    compared: pd.DataFrame = both.assign(regret=both["speedup_best"] / both["speedup"] - 1)
    return compared


def _regret_text(compared: pd.DataFrame) -> str:
    """What the rule takes, and what it loses to the best threshold."""
    limits = ", ".join(f"{limit:.0f}" for limit in sorted(compared["rule_threshold"].unique()))
    main = compared[compared["scenario"].str.partition("-")[0].isin(("megagpt2", "tnlg"))]
    best = 100 * (geometric_mean(main["speedup_best"]) - 1)
    regret = f"regret {100 * main['regret'].mean():.1f} %, at most {100 * main['regret'].max():.1f} %"
    return f"by T3's rule (threshold {limits}); the best of each case {best:.1f} %, {regret}"


def beside_fluid(config: Mapping[str, Any], table: pd.DataFrame) -> pd.DataFrame:
    """Makespans [s] of requests and of the fluid model, a row for each point, and the gap between them."""
    import pandas as pd

    requests, fluid = RequestBackend(), OverlapBackend("fluid")
    ok = table[table["status"] == "ok"]
    trees = requests.scenarios({name: config[name] for name in ("system", "workload", "schedule", "controller")})
    batches = []
    for row in ok.to_dict("records"):
        # the fluid model has no controller
        tree: Any = {name: part for name, part in trees[row["scenario"]].items() if name != "controller"}
        tree["schedule"] = dict(option_tree("schedule", row["schedule.name"]))
        # NaN: the schedule takes no threshold
        if np.isfinite(row[_LIMIT] or np.nan):
            tree["schedule"]["occupancy_threshold"] = int(row[_LIMIT])
        # a copy: trees of a scenario share their parts
        tree["system"] = copy.deepcopy(tree["system"])
        set_path(tree, _LINK, row[_LINK])
        batches.append(Batch(fluid.design(tree)))
    seconds = [results[0].metrics["makespan_s"] for results in fluid.evaluate(batches)]
    columns = ok[["scenario", "schedule.name", _LIMIT, _LINK]].reset_index(drop=True)
    columns["requests_s"], columns["fluid_s"] = ok["makespan_s"].to_numpy(), seconds
    columns["gap"] = columns["requests_s"] / columns["fluid_s"] - 1
    return pd.DataFrame(columns)


STUDY = T3Requests()
