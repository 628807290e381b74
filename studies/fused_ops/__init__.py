"""Fused computation-collective operators (arXiv:2305.06942): embedding, GEMV, GEMM in one kernel with their collective.

All results are reductions of time, 1 - T_fused / T_bulk in per cent, never speed-ups. The paper's two versions are two
configurations and never one series: in v1 only producers are fused (`schedule.pairs=producer`), in v2 all pairs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dse.config.options import conf_dir, load_yaml
from dse.plots import Axis, Draw, FigureSheet, Frame, tables
from dse.plots.labels import label
from dse.results.claims import ClaimResult
from dse.results.run_folder import FinishedRun, Outputs
from studies.plain import Plain, largest_row, speedups_of_winners

if TYPE_CHECKING:
    import pandas as pd

_NODE, _NODES, _DLRM = "mi210_4", "mi210_2x1", "dlrm_torus"
_PLACES = {_NODE: "4 GPUs, one node", _NODES: "2 nodes", _DLRM: "128 nodes, torus"}
_OPERATORS = {"emb": "embedding + all-to-all", "gemv": "GEMV + all-reduce", "moe": "GEMM + all-to-all", "dlrm": "DLRM"}
_KNOBS = ("num_chunks", "issue_order", "zero_copy", "occupancy_loss")
_CAUSES = {
    "emb": "the paper's sweep is unknown; ours has pooling 10, 30 and 70 in equal parts, and where both sides of the "
    "overlap take equally long, or tensors are small, more is removed",
    "gemv": "GEMVs of models that need four GPUs take 26 us and more, and the launch and the library's floor "
    "that fusing removes are short; the paper's sizes are unknown",
    "moe": "narrow experts send more for each FLOP, and packing and unpacking weigh most there; the paper's shapes are "
    "unknown",
}
_WIRES = {
    "bound_in_node": ("system.node.link_bytes_per_s", 80e9),
    "bound_between_nodes": ("system.fabric.nic.bytes_per_s", 20e9),
}
"""Probe -> path of the wire that it varies, and its declared rate [bytes/s]."""
_SAME = "an embedding alone is the same in both versions here"
_WINDOWS = 40  # short against a kernel, long against a transfer


class FusedOps(Plain):
    """Claims of both versions, sweeps, demand on links."""

    columns = (
        "system.name",
        "schedule.name",
        "schedule.kernel",
        "schedule.pairs",
        "schedule.num_chunks",
        "schedule.issue_order",
        "schedule.zero_copy",
        "schedule.occupancy_loss",
        "schedule.copies",
    )

    def findings(self, table: pd.DataFrame) -> Mapping[str, ClaimResult]:
        """Findings on reductions, in the configuration declared in `conf/schedule/fused_kernels.yaml`."""
        rows = _reductions(table)
        v2 = _declared_rows(rows[rows["schedule.pairs"] == "all"])
        return self._reductions_of(rows) | _yes_or_no(v2) | _remote_first(rows)

    def _reductions_of(self, rows: pd.DataFrame) -> dict[str, ClaimResult]:
        """Findings on means and maxima of reductions, by claim."""
        v1, v2 = (_declared_rows(rows[rows["schedule.pairs"] == pairs]) for pairs in ("producer", "all"))
        findings: dict[str, ClaimResult] = {}
        for name, (rows_of_version, operator, where, note) in {
            "emb_inter": (v2, "emb", _NODES, "the same in v1 and v2"),
            "emb_intra_v1": (v1, "emb", _NODE, f"v1; {_SAME}"),
            "emb_intra_v2": (v2, "emb", _NODE, f"v2; {_SAME}"),
            "gemv_ar": (v2, "gemv", _NODE, "v2; GEMV sizes of the paper are unknown"),
            "gemm_a2a": (v2, "moe", _NODE, "v2; expert shapes of the paper are unknown"),
        }.items():
            values = _of(rows_of_version, operator, where)
            # names end in a version where the paper has two values
            head, _, version = name.rpartition("_v") if "_v" in name else (name, "", "")
            end = f"_v{version}" if version else ""
            for kind in ("mean", "max"):
                findings[f"fused_ops.{head}_{kind}{end}"] = _reduction_finding(values, kind, note, _CAUSES[operator])
        findings |= {
            f"fused_ops.dlrm128_{name}": _dlrm(_of(rows_of_version, "dlrm", _DLRM), name)
            for name, rows_of_version in (("v1", v1), ("v2", v2))
        }
        claimed = {claim.id for claim in self.claims()}
        return {name: finding for name, finding in findings.items() if name in claimed}

    def further(self, run: FinishedRun) -> Mapping[str, ClaimResult]:
        """Findings that need designs beyond the table: bounds, eliminated overheads, demand on links."""
        best, most = _bound(run)
        name, share = _eliminated_share(run)
        demand = {scenario: _peaks(bulk, fused) for scenario, bulk, fused in _demands(run)}
        lower = [key for key, (bulk, fused) in demand.items() if fused < 0.999 * bulk]  # by more than rounding
        text = (
            f"demand over windows of 1/{_WINDOWS} of the baseline's time falls in {len(lower)} of {len(demand)} cases"
        )
        higher = [key for key, (bulk, fused) in demand.items() if fused > bulk * (1 + 1e-6)]
        falls = 2 * len(lower) > len(demand) and not higher  # in more than half
        loss = 100 * float(_fused_kernels()["occupancy_loss"])
        missed = (
            "our largest reduction is below 58 %, and so needs less; tensors of the paper's largest case are unknown"
        )
        beside = self._without_copies(run)
        return beside | {
            "fused_ops.overlap_bound": ClaimResult(most, f"no copies, launches or latencies; closest in {best}"),
            "fused_ops.eliminated_work": ClaimResult(
                share, f"copies, launches and latencies of {name}, the one that gains most", missed
            ),
            "fused_ops.peak_link_demand": ClaimResult(
                falls,
                f"{text} and rises in {len(higher)}",
                "where a wire is busy all the time of both, demand is its rate; a yes needs a fall in most",
            ),
            "fused_ops.occupancy_cost": ClaimResult(
                None, f"schedule.occupancy_loss, an input of the model: {loss} %", basis="input"
            ),
        }

    def _without_copies(self, run: FinishedRun) -> dict[str, ClaimResult]:
        """Findings on reductions, with what comes out where tensors are not packed and unpacked, which is a choice."""
        findings = self._reductions_of(_reductions(run.outputs.read_table("results")))
        probe = run.probe("uncopied")
        uncopied = self._reductions_of(_reductions(probe)) if len(probe) else {}
        for name, finding in uncopied.items():
            if finding.ours is not None and findings[name].ours is not None:
                text = f"{findings[name].remark}; without packing and unpacking {finding.ours:.1f} %"
                findings[name] = replace(findings[name], remark=text)
        return findings

    def headline(self, outputs: Outputs, table: pd.DataFrame) -> str:
        """Gains of the winners; the first figure is of the declared kernels, some of which do not win."""
        return speedups_of_winners(table, "The fastest kernels are")

    def figures(self, table: pd.DataFrame, timelines: pd.DataFrame) -> Iterator[tuple[str, Draw]]:
        """Reductions over the ratio of compute to communication; over chunks, order and occupancy."""
        rows = _reductions(table)
        if rows.empty:
            return
        both = rows[rows["schedule.pairs"] == "all"]
        declared = _declared_rows(both, nearest=True)
        if len(declared):
            yield "reductions", partial(_reduction_dots, declared)
            yield "reduction", partial(_reduction_curves, declared)
        for name, figure in (("num_chunks", _chunks_figure), ("occupancy", _occupancy_figure)):
            but = (name, "issue_order") if name == "num_chunks" else ("occupancy_loss",)
            swept = _declared_rows(both, but=but, nearest=True)
            if swept[f"schedule.{but[0]}"].nunique() > 1:
                yield name, partial(figure, swept)

    def extras(self, run: FinishedRun) -> Iterator[tuple[str, Any]]:
        """Demand on a NIC over time, and mean reductions: those of GEMV and GEMM have no published values."""
        import pandas as pd

        rows = _reductions(run.outputs.read_table("results"))
        declared = _declared_rows(rows, nearest=True) if len(rows) else rows
        if len(declared):
            groups = declared.groupby(["operator", "place", "schedule.pairs"], sort=False)["reduction"]
            mean = groups.agg(["mean", "max", "min"]).round(3).reset_index()
            yield "reductions", mean.rename(columns={"schedule.pairs": "pairs"}).to_dict("records")
        parts = [
            windows.assign(panel=scenario, kernel=kernel)
            for scenario, *demands in (_demands(run) if len(run.probe("embeddings")) else ())
            for kernel, windows in zip(("bulk", "fused"), demands, strict=True)
            if scenario.endswith("b2048")
        ]
        if parts:
            yield "link_demand", partial(_demand_figure, pd.concat(parts, ignore_index=True))


_LESS = Axis("reduction", "time removed [%]", centre=0.0)


def _reduction_dots(declared: pd.DataFrame) -> FigureSheet:
    """Reduction of each case."""
    gains = declared.groupby("operator", sort=False)["reduction"].mean()
    text = ", ".join(f"{gain:.0f} % ({name})" for name, gain in gains.items())
    title = f"Fused with their collective, kernels save {text}"
    frame = Frame(title, "means over the cases of an operator and places")
    return tables.dots(declared, _LESS, row="scenario", by="place", frame=frame)


def _reduction_curves(declared: pd.DataFrame) -> FigureSheet:
    """Reduction over the ratio of compute to communication."""
    alike = declared["scenario"].str.replace(r"^(emb|moe)(.*)-[bt]\d+$", r"\1\2", regex=True)  # but for batch
    mean = declared.groupby(["place", "operator", alike], sort=False)[["ratio", "reduction"]].mean().reset_index()
    best = largest_row(mean, "reduction")
    title = f"Fusing saves most, {best['reduction']:.0f} %, where compute takes {best['ratio']:.1f}x "
    title += "as long as communication"
    ratio = Axis("ratio", "compute / communication time of the baseline")
    return tables.curves(mean, ratio, y=_LESS, by="operator", frame=Frame(title, panel="place"))


def _chunks_figure(swept: pd.DataFrame) -> FigureSheet:
    """Reduction over chunks, by the order in which they are issued."""
    rows = swept.assign(panel=swept["operator"] + ", " + swept["place"], order=swept["schedule.issue_order"].map(label))
    chunks = Axis("schedule.num_chunks", "chunks")
    mean = rows.groupby(["panel", "order", chunks.column], sort=False)["reduction"].mean().reset_index()
    overall = mean.groupby(chunks.column)["reduction"].mean()
    title = f"{overall.idxmax():.0f} chunks save most: {overall.max():.0f} % in the mean of the panels"
    return tables.curves(mean, chunks, y=_LESS, by="order", frame=Frame(title, panel="panel"))


def _occupancy_figure(swept: pd.DataFrame) -> FigureSheet:
    """Reduction over the occupancy that a fused kernel loses."""
    loss = Axis("schedule.occupancy_loss", "occupancy lost", "%")
    mean = swept.groupby(["place", "operator", loss.column], sort=False)["reduction"].mean().reset_index()
    ends = mean.groupby(loss.column)["reduction"].mean()
    lost = ends.iloc[0] - ends.iloc[-1]
    title = (
        f"Losing {100 * float(ends.index[-1]):g} % of its occupancy costs a fused kernel {lost:.1f} points of its gain"
    )
    return tables.curves(mean, loss, y=_LESS, by="operator", frame=Frame(title, panel="place"))


def _demand_figure(demand: pd.DataFrame) -> FigureSheet:
    """Demand on a NIC over time."""
    peaks = demand.groupby(["panel", "kernel"], sort=False)["bytes_per_s"].max().unstack()
    lower = int((peaks["fused"] < 0.999 * peaks["bulk"]).sum())
    title = f"Fused kernels lower the peak demand on the NIC in {lower} of {len(peaks)} cases"
    time, rate = Axis("time_s", "time", "s"), Axis("bytes_per_s", "demand on the NIC", "B/s")
    return tables.curves(demand, time, y=rate, by="kernel", frame=Frame(title, panel="panel"))


def _reductions(table: pd.DataFrame) -> pd.DataFrame:
    """Fused points, with `reduction` [%], `operator` (other workloads than the study's keep their names), `place`, and
    `ratio` of compute to communication in bulk.
    """
    if "system.name" not in table:
        table = table.assign(**{"system.name": "the system"})
    ok = table[table["status"] == "ok"]
    bulk = ok[ok["schedule.kernel"] == "bulk"].groupby(["scenario", "system.name"])[["gemm_s", "comm_s"]].first()
    ratio = (bulk["gemm_s"] / bulk["comm_s"]).rename("ratio")
    fused = ok[ok["schedule.kernel"] == "fused"].join(ratio, on=["scenario", "system.name"])
    return fused.assign(
        reduction=100 * (1 - 1 / fused["speedup"]),
        operator=fused["scenario"].str.split("-").str[0].map(_OPERATORS).fillna(fused["scenario"]),
        place=fused["system.name"].map(_PLACES).fillna(fused["system.name"]),
    )


def _declared_rows(rows: pd.DataFrame, but: tuple[str, ...] = (), *, nearest: bool = False) -> pd.DataFrame:
    """Rows of the declared configuration, with the knobs of `but` left open. nearest: where a declared value was not
    searched, take the nearest number, or the first name.
    """
    declared = _fused_kernels()
    for name in _KNOBS:
        if name not in but and len(rows):
            column, wanted = rows[f"schedule.{name}"], declared[name]
            if nearest and not (column == wanted).any():
                number = isinstance(wanted, (int, float)) and not isinstance(wanted, bool)
                # the nearest that was searched
                wanted = column[(column.astype(float) - wanted).abs().idxmin()] if number else column.iloc[0]
            rows = rows[column == wanted]
    return rows


def _of(rows: pd.DataFrame, operator: str, where: str) -> pd.Series[Any]:
    """Reductions [%] by scenario."""
    selected = rows[(rows["operator"] == _OPERATORS[operator]) & (rows["place"] == _PLACES[where])]
    return selected.groupby("scenario")["reduction"].first()


def _reduction_finding(values: pd.Series[Any], kind: str, note: str, cause: str) -> ClaimResult:
    if values.empty:
        return ClaimResult(None, "needs points of the declared configuration on this system")
    reach = f"{note}; from {values.min():.1f} % ({values.idxmin()}) to {values.max():.1f} % ({values.idxmax()})"
    return ClaimResult(float(values.mean() if kind == "mean" else values.max()), reach, cause)


def _dlrm(values: pd.Series[Any], version: str) -> ClaimResult:
    """Finding on a training iteration on 128 nodes."""
    if values.empty:
        return ClaimResult(None, "needs points of DLRM on 128 nodes")
    which = "producers only" if version == "v1" else "producers and consumers"
    by_tables = ", ".join(f"{name} {value:.1f} %" for name, value in values.items())
    text = f"{version}: {which} fused, by declaration; {by_tables}"
    cause = "batch, tables, MLP split and what was fused are unknown; our all-to-alls seem to weigh more than theirs"
    return ClaimResult(float(values.mean()), text, cause)


def _yes_or_no(rows: pd.DataFrame) -> dict[str, ClaimResult]:
    """Findings: all operators win, and embeddings gain more between nodes."""
    cases = (("emb", _NODE), ("emb", _NODES), ("gemv", _NODE), ("moe", _NODE))
    means = {f"{_OPERATORS[name]}, {_PLACES[where]}": _of(rows, name, where).mean() for name, where in cases}
    if any(np.isnan(mean) for mean in means.values()):
        absent = ClaimResult(None, "needs points of all operators in the declared configuration")
        return {"fused_ops.all_win": absent, "fused_ops.inter_gt_intra": absent}
    text, losing = (
        ", ".join(f"{name} {mean:.1f} %" for name, mean in means.items()),
        rows[rows["reduction"] < 0]["scenario"],
    )
    exceptions = f"; single shapes lose, {', '.join(sorted(set(losing)))}" if len(losing) else ""
    inside, between, *_ = means.values()
    return {
        "fused_ops.all_win": ClaimResult(bool(min(means.values()) > 0), text + exceptions),
        "fused_ops.inter_gt_intra": ClaimResult(bool(between > inside), f"{between:.1f} % against {inside:.1f} %"),
    }


def _remote_first(rows: pd.DataFrame) -> dict[str, ClaimResult]:
    """Gain by remote_first, over points that differ in the order alone: single operators, and DLRM iterations."""
    alike = [
        "scenario",
        "system.name",
        "schedule.pairs",
        *(f"schedule.{name}" for name in _KNOBS if name != "issue_order"),
    ]
    pairs = rows.pivot_table(index=alike, columns="schedule.issue_order", values="makespan_s") if len(rows) else rows
    if not {"remote_first", "local_first"} <= set(pairs):
        return {"fused_ops.remote_first": ClaimResult(None, "needs points of both orders")}
    gain = 100 * (1 - pairs["remote_first"] / pairs["local_first"])
    is_iteration = gain.index.get_level_values("scenario").str.startswith("dlrm")
    single, iterations = gain[~is_iteration], gain[is_iteration]
    text = f"{len(single)} pairs of single operators, faster by up to {single.max():.1f} %; skew is not simulated"
    text += f"; a DLRM iteration from {iterations.min():.2f} % to {iterations.max():.1f} %" if len(iterations) else ""
    return {
        # rounding
        "fused_ops.remote_first": ClaimResult(bool(gain.min() >= -1e-7), text, f"slower by up to {-gain.min():.2f} %")
    }


@cache
def _fused_kernels() -> dict[str, Any]:
    tree: dict[str, Any] = load_yaml(conf_dir() / "schedule" / "fused_kernels.yaml")
    return tree


def _bound(run: FinishedRun) -> tuple[str, float]:
    """Return (case, largest reduction [%]) by overlap alone, over operators and rates of wires from 1/8 to 8 times."""
    import pandas as pd

    parts = []
    for name, (path, declared) in _WIRES.items():
        points = run.probe(name)
        seconds = points.pivot_table(
            index=["scenario", "system.name", path], columns="schedule.kernel", values="makespan_s", sort=False
        )
        cases = seconds.reset_index().assign(reduction=(100 * (1 - seconds["fused"] / seconds["bulk"])).to_numpy())
        parts.append(cases.assign(rate=cases[path] / declared))
    cases = pd.concat(parts, ignore_index=True)
    (best,) = cases.nlargest(1, "reduction").to_dict("records")
    return f"{best['scenario']}, {_PLACES[best['system.name']]}, {best['rate']:g} x the rate", best["reduction"]


def _eliminated_share(run: FinishedRun) -> tuple[str, float]:
    """Return (scenario of the largest gain, share [%] of its baseline that is neither compute nor transfer)."""
    seconds = run.probe("embeddings").pivot(index="scenario", columns="schedule.kernel", values="makespan_s")
    best = str((1 - seconds["fused"] / seconds["bulk"]).idxmax())
    bare = run.probe("bare").set_index("scenario")["makespan_s"]
    return best, 100 * float((1 - bare / seconds["bulk"])[best])


def _demands(run: FinishedRun) -> Iterator[tuple[str, pd.DataFrame, pd.DataFrame]]:
    """Yield of each embedding its demand [bytes/s], bulk and fused, over windows of the baseline's time."""
    import pandas as pd

    points, tasks = run.probe("embeddings"), run.probe_timelines("embeddings")
    for scenario, rows in points.groupby("scenario", sort=False):
        designs = {str(row["schedule.kernel"]): row for row in rows.to_dict("records")}
        # windows of the baseline's time, so that both kernels have equal ones
        window = designs["bulk"]["makespan_s"] / _WINDOWS
        begins, demands = np.arange(_WINDOWS) * window, []
        for kernel in ("bulk", "fused"):
            transfers = tasks[(tasks["key"] == designs[kernel]["key"]) & (tasks["kind"] == "transfer")]
            moved = np.zeros(_WINDOWS)
            for task in transfers[transfers["scenario"] == scenario].to_dict("records"):
                start, finish = task["start_s"] + task["delay_s"], task["finish_s"]  # set-up sends nothing
                shared = np.minimum(finish, begins + window) - np.maximum(start, begins)
                # windows that the task does not touch
                moved += task["moved_bytes"] * np.maximum(shared, 0.0) / (finish - start)
            demands.append(pd.DataFrame({"time_s": begins, "bytes_per_s": moved / window}))
        yield str(scenario), demands[0], demands[1]


def _peaks(bulk: pd.DataFrame, fused: pd.DataFrame) -> tuple[float, float]:
    return float(bulk["bytes_per_s"].max()), float(fused["bytes_per_s"].max())


STUDY = FusedOps()
