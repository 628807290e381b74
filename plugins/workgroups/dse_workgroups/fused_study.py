"""Fused operators (arXiv:2305.06942) by their workgroups: the paper's claims under inputs that nobody published.

Three inputs are open: whether tensors are packed and unpacked around a library's all-to-all, whether its launches run
ahead, and whose experts were measured. `DECLARED` holds two configurations of them, side by side; claims are those of
the first. `configurations` counts the claims within for all eight. Claims and findings are those of `study=fused_ops`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from dse.config.options import load_yaml
from dse.errors import Problems
from dse.plots import Axis, Draw, FigureSheet, Frame, tables
from dse.results.claims import Claim, ClaimResult, judge
from dse.results.run_folder import FinishedRun, Outputs
from dse.space import Case
from dse_workgroups import CONF
from simulators.hardware.machine import tree_of
from simulators.workloads.operators import workloads_of
from studies.fused_ops import STUDY as FUSED_OPS
from studies.plain import Plain, speedups_of_winners

if TYPE_CHECKING:
    import pandas as pd

_SETUP = "system.gpu.cu_copy.setup_s"
# floors of a library's collective [s] if its launch runs ahead, and if it does not
_AHEAD_S, _EAGER_S = 4.3e-6, 8.6e-6
_NODE, _NODES, _TORUS = "mi210_4", "mi210_2x1", "dlrm_torus"
_SAME = 1e-9  # relative, of times
_KINDS = ("emb", "gemv", "moe", "dlrm")
_NEEDS = "needs all operators on all systems, in all configurations"
_UNSEEN = 1e-3  # relative, of times that no measurement tells apart


@dataclass(frozen=True)
class OpenInputs:
    """Inputs that nobody published. copies: tensors are packed and unpacked. setup_s: floor of a library's collective.

    recent: experts of models of 2024, as in workload=fused_ops; else of models before May 2023.
    """

    name: str
    copies: bool
    setup_s: float
    recent: bool

    def rows(self, table: pd.DataFrame, older: pd.DataFrame) -> pd.DataFrame:
        """Points of this configuration; older: those of the older experts and of DLRM with fewer tables."""
        import pandas as pd

        if not self.recent:
            experts = older[older["scenario"].str.startswith("moe")]
            table = pd.concat([table[~table["scenario"].str.startswith("moe")], experts], ignore_index=True)
        # settings come back from a table as floats
        same = (table["schedule.copies"] == self.copies) & (abs(table[_SETUP] / self.setup_s - 1) < _SAME)
        return table[same]


DECLARED = (
    OpenInputs("of its time: in place, launched when needed, experts before May 2023", False, _EAGER_S, False),
    OpenInputs("packed and unpacked, launched ahead, experts of 2024", True, _AHEAD_S, True),
)
"""Two configurations of what nobody published, side by side."""


class FusedWorkgroups(Plain):
    """Claims in the declared configurations, and what a miss would need."""

    columns = (*FUSED_OPS.columns, _SETUP)

    def claims(self) -> list[Claim]:
        """Claims of `study=fused_ops`."""
        return FUSED_OPS.claims()

    def cases(self, config: Mapping[str, Any]) -> Mapping[str, Mapping[str, Case]]:
        """Older experts, and DLRM with fewer tables, by both kernels in all configurations."""
        workloads = workloads_of(Problems(), load_yaml(CONF / "workload" / "fused_unpublished.yaml"))
        values = {
            "schedule.kernel": ("bulk", "fused"),
            "schedule.copies": (True, False),
            _SETUP: (_AHEAD_S, _EAGER_S),
            "schedule.pairs": ("producer", "all"),
        }
        systems = {place: tree_of(place) for place in (_NODE, _TORUS)}
        trees = {
            name: {"system": systems[_place(name)], "schedule": config["schedule"], "workload": workload}
            for name, workload in workloads.items()
        }
        return {"older": {name: Case(tree, values) for name, tree in trees.items()}}

    def further(self, run: FinishedRun) -> Mapping[str, ClaimResult]:
        """Findings of the first declared configuration; remarks have the second one's."""
        # findings of a part of the operators would look like misses
        if not _is_whole(run):
            return {claim.id: ClaimResult(None, _NEEDS) for claim in self.claims()}
        first, second = (self.findings_of(run, inputs) for inputs in DECLARED)
        return {name: _beside(finding, second[name]) for name, finding in first.items()}

    def findings_of(self, run: FinishedRun, inputs: OpenInputs) -> dict[str, ClaimResult]:
        """Findings of every claim with some open inputs."""
        rows = inputs.rows(run.outputs.read_table("results"), _older(run))
        return {**FUSED_OPS.findings(rows), **_remote_first(rows), **_peak_demand(rows), **_limits(run, rows)}

    def extras(self, run: FinishedRun) -> Iterator[tuple[str, Any]]:
        """Claims within by configuration; what zero copy saves; DLRM by its number of tables."""
        if not _is_whole(run):
            return
        yield "configurations", [self._count(run, inputs) for inputs in every_configuration()]
        yield "stored_or_copied", _stored_or_copied(run)
        yield "fewer_tables", _fewer_tables(run)

    def _count(self, run: FinishedRun, inputs: OpenInputs) -> dict[str, Any]:
        rows = judge(self.claims(), self.findings_of(run, inputs))
        # inputs and identities are within by construction, and no test of the model
        tested = [row for row in rows if row["within"] is not None and row["basis"] == "predicted"]
        missed = [row["id"].partition(".")[2] for row in tested if not row["within"]]
        words = {"copies": inputs.copies, "setup_s": inputs.setup_s, "recent_experts": inputs.recent}
        return {**words, "within": len(tested) - len(missed), "tested": len(tested), "missed": missed}

    def headline(self, outputs: Outputs, table: pd.DataFrame) -> str:
        """Gains of the winners; the first figure is of the declared kernels, some of which do not win."""
        return speedups_of_winners(table, "The fastest kernels are")

    def figures(self, table: pd.DataFrame, timelines: pd.DataFrame) -> Iterator[tuple[str, Draw]]:
        """Time that fusing removes of each operator, in both configurations."""
        ok = table[(table["status"] == "ok") & (table["schedule.kernel"] == "fused")]
        if len(ok) and ok["schedule.copies"].nunique() > 1:
            yield "reductions", partial(_reductions, ok)


def every_configuration() -> Iterator[OpenInputs]:
    """All eight combinations of the open inputs."""
    for copies, setup_s, recent in itertools.product((False, True), (_EAGER_S, _AHEAD_S), (False, True)):
        yield OpenInputs("", copies, setup_s, recent)


def fused_within(run: FinishedRun) -> Mapping[str, Any]:
    """Claims within and tested in the first declared configuration, and within in the second, of a finished run."""
    first, second = (STUDY._count(run, inputs) for inputs in DECLARED)
    return {"fused_within": first["within"], "fused_tested": first["tested"], "fused_within_packed": second["within"]}


def _is_whole(run: FinishedRun) -> bool:
    """Tell whether a run has all operators in all configurations."""
    table = run.outputs.read_table("results")
    if not {"system.name", "schedule.copies", _SETUP} <= set(table) or len(run.probe("older")) == 0:
        return False
    ok = table[table["status"] == "ok"]
    every = {kind for kind in _KINDS if not ok["scenario"].str.startswith(kind).any()}
    alike = ok.groupby(["system.name", "schedule.copies", _SETUP]).ngroups
    # three systems, with copies or not, launched ahead or not
    return not every and alike == 3 * 2 * 2 and min(len(run.probe(name)) for name in ("bound", "bare", "copied")) > 0


def _place(name: str) -> str:
    return _TORUS if name.startswith("dlrm") else _NODE


def _older(run: FinishedRun) -> pd.DataFrame:
    """Rows of the cases, with their speed-ups over the same case in bulk."""
    rows = run.probe("older")
    # probes have no column of the system: its name follows from the operator
    rows = rows.assign(**{"system.name": rows["scenario"].map(_place)})
    alike = ["scenario", "schedule.copies", _SETUP]
    bulk = rows[rows["schedule.kernel"] == "bulk"].groupby(alike)["makespan_s"].first().rename("bulk_s")
    joined = rows.join(bulk, on=alike)
    return joined.assign(speedup=joined["bulk_s"] / joined["makespan_s"])


def _beside(finding: ClaimResult, other: ClaimResult) -> ClaimResult:
    """A finding with that of the other configuration in its remark."""
    if other.ours is None or isinstance(other.ours, tuple):
        return finding
    value = ("yes" if other.ours else "no") if isinstance(other.ours, bool) else f"{other.ours:.1f}"
    return replace(finding, remark=f"{DECLARED[0].name}; {finding.remark}; {DECLARED[1].name}: {value}")


def _remote_first(rows: pd.DataFrame) -> dict[str, ClaimResult]:
    """Finding on the order: never slower, but for what no measurement would show."""
    alike = ["scenario", "system.name", "schedule.pairs"]
    fused = rows[(rows["status"] == "ok") & (rows["schedule.kernel"] == "fused")]
    pairs = fused.pivot_table(index=alike, columns="schedule.issue_order", values="makespan_s", observed=True)
    if not {"remote_first", "local_first"} <= set(pairs):
        return {"fused_ops.remote_first": ClaimResult(None, "needs points of both orders")}
    ratio = (pairs["remote_first"] / pairs["local_first"]).dropna()
    text = f"of {len(ratio)} pairs remote first takes {ratio.min():.3f} to {ratio.max():.5f} of the time of local first"
    text += f"; a difference of {100 * _UNSEEN:g} % counts as none"
    # at most as slow as what no measurement could show
    return {"fused_ops.remote_first": ClaimResult(bool(ratio.max() <= 1 + _UNSEEN), text)}


def _peak_demand(rows: pd.DataFrame) -> dict[str, ClaimResult]:
    """Finding on the largest demand on a wire, over single operators."""
    single = rows[(rows["status"] == "ok") & ~rows["scenario"].str.startswith("dlrm")]
    first = single["schedule.issue_order"].isna() | (single["schedule.issue_order"] == "remote_first")
    peaks = single[first].pivot_table(
        index=["scenario", "system.name"], columns="schedule.kernel", values="peak_bytes_per_s", observed=True
    )
    if not {"bulk", "fused"} <= set(peaks):
        return {"fused_ops.peak_link_demand": ClaimResult(None, "needs points of both kernels")}
    ratio = (peaks["fused"] / peaks["bulk"]).dropna()
    # a fall has to be visible, a rise is counted at rounding
    falls, rises = int((ratio < 1 - 1e-3).sum()), int((ratio > 1 + 1e-6).sum())
    text = (
        f"demand over an eighth of a wire's busy time falls in {falls} of {len(ratio)} operators, to {ratio.min():.2f}"
    )
    return {
        "fused_ops.peak_link_demand": ClaimResult(
            bool(2 * falls > len(ratio) and not rises), f"{text} of the baseline's at least, and rises in {rises}"
        )
    }


def _limits(run: FinishedRun, rows: pd.DataFrame) -> dict[str, ClaimResult]:
    """Findings on what overlap alone removes, what is eliminated, and the occupancy that is put in."""
    # without copies, launches and latencies: what is left to remove is overlap
    seconds = run.probe("bound").pivot_table(
        index=["scenario", "system.fabric.nic.bytes_per_s"], columns="schedule.kernel", values="makespan_s"
    )
    alone = 100 * (1 - seconds["fused"] / seconds["bulk"])
    closest = alone.groupby("scenario").max().idxmax()
    ok = rows[(rows["system.name"] == _NODES) & rows["scenario"].str.startswith("emb") & (rows["status"] == "ok")]
    fused = ok[ok["schedule.kernel"] == "fused"]
    best = str(fused.groupby("scenario")["speedup"].max().idxmax())
    bulk = ok[ok["schedule.kernel"] == "bulk"].groupby("scenario")["makespan_s"].first().to_dict()
    bare = run.probe("bare").set_index("scenario")["makespan_s"].to_dict()
    missed = "the largest reduction is below 58 % here, and needs less"
    return {
        "fused_ops.overlap_bound": ClaimResult(
            float(alone.max()), f"no copies, launches or latencies between nodes; closest in {closest}"
        ),
        "fused_ops.eliminated_work": ClaimResult(
            100 * float(1 - bare[best] / bulk[best]), f"copies, launches and latencies of {best}", missed
        ),
        "fused_ops.occupancy_cost": ClaimResult(None, "schedule.occupancy_loss is put in", basis="input"),
    }


def _stored_or_copied(run: FinishedRun) -> dict[str, Any]:
    """Scenario -> makespan [s] with stores into peers, and with puts of what was stored before."""
    seconds = run.probe("copied").pivot_table(index="scenario", columns="schedule.zero_copy", values="makespan_s")
    names = [str(name) for name in seconds.index]
    both = zip(seconds[True].tolist(), seconds[False].tolist(), strict=True)
    return {name: {"stored_s": stored, "copied_s": copied} for name, (stored, copied) in zip(names, both, strict=True)}


def _fewer_tables(run: FinishedRun) -> list[dict[str, Any]]:
    """Time removed [%] of a DLRM iteration by its number of tables, in the first configuration."""
    import pandas as pd

    rows = pd.concat([run.outputs.read_table("results"), _older(run)], ignore_index=True)
    rows = replace(DECLARED[0], recent=True).rows(rows, rows)
    # fewer tables exist for DLRM alone, so experts do not matter here
    rows = rows[(rows["system.name"] == _TORUS) & rows["scenario"].str.startswith("dlrm") & (rows["status"] == "ok")]
    fused = rows[(rows["schedule.kernel"] == "fused") & (rows["schedule.issue_order"] == "remote_first")]
    reductions = fused.assign(
        tables=fused["scenario"].str.removeprefix("dlrm-t").astype(int), less=100 * (1 - 1 / fused["speedup"])
    )
    table = reductions.pivot_table(index="tables", columns="schedule.pairs", values="less", observed=True).reset_index()
    return [{str(name): float(value) for name, value in row.items()} for row in table.to_dict("records")]


def _reductions(ok: pd.DataFrame) -> FigureSheet:
    """Time removed of each operator by remote-first kernels of all pairs."""
    first = ok[(ok["schedule.issue_order"] == "remote_first") & (ok["schedule.pairs"] == "all")]
    tensors = first["schedule.copies"].map({True: "packed and unpacked", False: "in place"})
    rows = first.assign(reduction=100 * (1 - 1 / first["speedup"].astype(float)), tensors=tensors)
    # the best of all knobs that are left
    best = rows.groupby(["scenario", "system.name", "tensors"], observed=True)["reduction"].max().reset_index()
    gains = best.groupby("tensors")["reduction"].mean()
    title = "Fused kernels save " + ", ".join(f"{gain:.0f} % ({name})" for name, gain in gains.items())
    less = Axis("reduction", "time removed [%]", centre=0.0)
    return tables.dots(best, less, row="scenario", by="tensors", frame=Frame(title, panel="system.name"))


STUDY = FusedWorkgroups()
