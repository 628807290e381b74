"""Demystifying BERT (arXiv:2104.08335): time shares of operators in pre-training, and what changes them.

Sequences have 128 tokens in phase 1 and 512 in phase 2. Of the GEMMs, linear are the projections of attention, fc the
feed-forward layers, attention the batched products. Embedding and output are the ends of the model; the GEMM of the
output counts as output.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dse.plots import Axis, Draw, FigureSheet, Frame, tables
from dse.results.claims import ClaimResult
from dse.results.run_folder import FinishedRun
from dse.space import Case
from dse_papers import throughput
from dse_papers.bases import legal_base
from simulators.steps.design import StepDesign
from simulators.steps.epochs.epoch import METRICS as EPOCH_METRICS
from simulators.steps.operators.work import Product
from simulators.steps.run.build import iteration
from simulators.steps.run.measures import METRICS
from studies.common.iterations import step_tree
from studies.plain import Plain, extremes, reach

if TYPE_CHECKING:
    import pandas as pd

_GEMMS = ("linear", "fc", "attention")
_MEMORY = ("softmax", "activation", "norm", "embedding", "optimizer")  # bound by memory: a few operations for each byte
_LABELS = {
    "linear": "linear GEMMs",
    "fc": "FC GEMMs",
    "attention": "attention GEMMs",
    "softmax": "softmax",
    "activation": "GeLU",
    "norm": "dropout, residual, LayerNorm",
    "embedding": "embedding",
    "output": "output",
    "optimizer": "optimizer",
    "communication": "communication",
}
_LENGTH, _BATCH, _PRECISION = "run.sequence_length", "run.batch", "run.precision"
_POINT = (_LENGTH, _BATCH, _PRECISION)
_CHANGES = {
    "hidden": "model.hidden",
    "sequence_length": _LENGTH,
    "batch": _BATCH,
    "tp": "parallel.tp",
    "dp": "parallel.dp",
    "micro_batches": "run.micro_batches",
}
"""Probe that changes one thing -> path of that thing."""
_CHANGED = {
    "hidden": "width",
    "sequence_length": "tokens",
    "batch": "batch",
    "tp": "TP",
    "dp": "DP",
    "micro_batches": "micro-batches",
}
"""The same in words."""
_NEAR = "optimizer.near_memory"
# the paper gives no number for prominent: ours, by choice
_PROMINENT = 0.2  # share of an iteration
_YEARS = {"155578a": "software of 2019", "a74236a": "software of 2020", "729963d": "software of 2021"}
"""Commits of the published tables."""
_LABELLED = ("Ph1-B32-FP32", "Ph1-B4-FP32", "Ph2-B4-FP32", "Ph1-B32-FP16", "Ph2-B4-FP16")
"""Configurations that the paper has labels for, by recollection."""
_NO_COUNT = (
    "recalled shares are of other software; what it fuses, and if its output is of masked tokens alone, is unknown"
)


class Bert(Plain):
    """Claims, breakdowns, the roofline, changes of shares, and measured throughput."""

    columns = (
        "parallel.dp",
        "parallel.tp",
        "run.batch",
        "run.mode",
        "run.precision",
        "run.sequence_length",
    )

    def cases(self, config: Mapping[str, Any]) -> Mapping[str, Mapping[str, Case]]:
        """Steps whose throughput on one GPU is published."""
        return {"throughput": throughput.cases("bert_throughput", step_tree(config), _published_run)}

    def findings(self, table: pd.DataFrame) -> Mapping[str, ClaimResult]:
        """Findings on shares in the table's configurations."""
        every = _configurations(table)
        if set(_LABELLED) - set(every.get("called", ())):
            return {claim.id: ClaimResult(None, f"needs {', '.join(_LABELLED)}") for claim in self.claims()}
        rows = every[every["called"].isin(_LABELLED)]
        return {**_largest_class(rows), **_shares(rows), **_precision(every), **_optimizer(every)}

    def further(self, run: FinishedRun) -> Mapping[str, ClaimResult]:
        """Findings on changes of one thing at a time."""
        design = _base(run)
        if design is None:
            names = ("softmax_sl2", "intensity_spread", "h_direction", "dp_tp_direction", "nmc_bound", "nmc_lamb")
            return {f"bert.{name}": ClaimResult(None, "needs a transformer that is trained") for name in names}
        return {**_growth(run, design), **_directions(run), **_near_memory(run)}

    def figures(self, table: pd.DataFrame, timelines: pd.DataFrame) -> Iterator[tuple[str, Draw]]:
        """Shares of the iteration, and times, by configuration."""
        rows = _configurations(table)
        if rows.empty:
            return
        yield "breakdown", partial(_breakdown, rows)
        yield "times", partial(_times_figure, rows)

    def extras(self, run: FinishedRun) -> Iterator[tuple[str, Any]]:
        """The roofline, shares as one thing changes, the bound of near-memory updates, and measured throughput."""
        design = _base(run)
        if design is None:
            return
        operators = _operators(design)
        yield "operators", operators
        yield "roofline", partial(_roofline, operators, design)
        changes = _changes(run)
        if len(changes):
            yield "changes", changes
            yield "what_changes", partial(_changes_figure, changes)
        yield "near_memory", _bounds(run)
        measured = throughput.table("bert_throughput", run.probe("throughput"), _sequences_per_s)
        yield "throughput", measured
        if len(measured):
            yield "throughput_measured", partial(throughput.figure, measured, "a sequence of BERT-Large")


def _configurations(table: pd.DataFrame) -> pd.DataFrame:
    """Points with a result, `called` by recalled labels (Ph1-B32-FP32), in the order of phase, batch and precision."""
    ok = table[table["status"] == "ok"] if len(table) else table
    if not {*_POINT, "run.mode"} <= set(ok):
        return ok.iloc[:0]  # other configurations have no such labels
    ok = ok[ok["run.mode"] == "training"]
    # other lengths than those of the two phases keep their number
    phase = ok[_LENGTH].map({128: "Ph1", 512: "Ph2"}).fillna("SL" + ok[_LENGTH].astype(int).astype(str))
    precision = ok[_PRECISION].astype(str).map({"fp32": "FP32", "mixed": "FP16"}).fillna(ok[_PRECISION].astype(str))
    called = phase + "-B" + ok[_BATCH].astype(int).astype(str) + "-" + precision
    # sums of classes: the paper reports GEMMs against what memory limits
    gemm, memory = (sum(ok[f"share_{kind}"] for kind in kinds) for kinds in (_GEMMS, _MEMORY))
    rows = ok.assign(called=called, gemm=gemm, memory_bound=memory)
    return rows.sort_values(["scenario", _LENGTH, _BATCH, _PRECISION])


def _percentages(values: pd.Series[Any], names: pd.Series[Any]) -> str:
    return ", ".join(f"{name} {100 * value:.0f} %" for name, value in zip(names, values, strict=True))


# Claims from the table


def _largest_class(rows: pd.DataFrame) -> dict[str, ClaimResult]:
    """Findings on the largest class of operators, and on the next one."""
    columns = [f"share_{name}" for name in _LABELS if name not in _GEMMS]
    first = bool((rows["gemm"] > rows[columns].max(axis=1)).all())  # in each configuration, not on average
    memory_bound = rows["memory_bound"]
    findings = {
        "bert.gemm_first": ClaimResult(first, _percentages(rows["gemm"], rows["called"])),
        "bert.memory_bound_prominent": ClaimResult(
            bool((memory_bound > _PROMINENT).all()),
            f"element-wise operators, embedding and optimizer (a yes needs {100 * _PROMINENT:g} % in all): "
            f"{_percentages(memory_bound, rows['called'])}",
        ),
    }
    # by recollection the paper says it of small batches and of mixed precision
    few = rows[(rows[_BATCH] == 4) | (rows[_PRECISION] == "mixed")]
    next_ = few[columns].idxmax(axis=1).map({f"share_{name}": label for name, label in _LABELS.items()})
    text = ", ".join(f"{name} {what}" for name, what in zip(few["called"], next_, strict=True))
    cause = "a GeLU by its formula takes a dozen passes here; at many tokens these weigh more than the update"
    return {**findings, "bert.lamb_next": ClaimResult(bool((next_ == _LABELS["optimizer"]).all()), text, cause)}


def _shares(rows: pd.DataFrame) -> dict[str, ClaimResult]:
    """Findings on recalled shares: FP32 as a range over configurations, mixed precision in phase 1 with batch 32."""
    findings = {}
    values = {"lin_fc": rows["share_linear"] + rows["share_fc"], "attn_gemm": rows["share_attention"]}
    for name, share in values.items():
        for precision, end in (("fp32", "fp32"), ("mixed", "mp")):
            at_precision = rows[_PRECISION] == precision
            # the other shares are recalled of one configuration
            at_32 = at_precision & (rows[_LENGTH] == 128) & (rows[_BATCH] == 32)
            text = _percentages(share[at_precision], rows["called"][at_precision])
            # the one share that is recalled as a range
            if name == "lin_fc" and precision == "fp32" and at_precision.any():
                ours: Any = (100 * float(share[at_precision].min()), 100 * float(share[at_precision].max()))
            else:
                ours = 100 * float(share[at_32].iloc[0]) if at_32.any() else None
            text = text if ours is not None else "needs 32 sequences of 128 tokens at this precision"
            findings[f"bert.{name}_{end}"] = ClaimResult(ours, text, _NO_COUNT)
    ends = rows["share_embedding"] + rows["share_output"]
    spread = (100 * float(ends.min()), 100 * float(ends.max()))
    findings["bert.embed_output"] = ClaimResult(spread, _percentages(ends, rows["called"]), _NO_COUNT)
    return findings


def _precision(rows: pd.DataFrame) -> dict[str, ClaimResult]:
    """Effect of mixed precision on shares, all else equal."""
    both = rows.assign(rest=rows["memory_bound"]).pivot_table(
        index=["scenario", _LENGTH, _BATCH], columns=_PRECISION, values=["rest", "share_optimizer"], observed=True
    )
    if not {("rest", "fp32"), ("rest", "mixed")} <= set(both):
        return {"bert.mp_raises_nongemm": ClaimResult(None, "needs both precisions")}
    # GEMMs gain most from FP16 by matrix units, so what is bound by memory takes a larger share
    more = [both[(name, "mixed")] > both[(name, "fp32")] for name in ("rest", "share_optimizer")]
    text = ", ".join(
        f"{100 * row[('rest', 'fp32')]:.0f} to {100 * row[('rest', 'mixed')]:.0f} %" for _, row in both.iterrows()
    )
    return {
        "bert.mp_raises_nongemm": ClaimResult(
            bool(all(higher.all() for higher in more)), f"element-wise operators, embedding and optimizer: {text}"
        )
    }


def _optimizer(rows: pd.DataFrame) -> dict[str, ClaimResult]:
    """Time of the update, which must not depend on the number of tokens."""
    spread = rows.groupby(["scenario", _PRECISION], observed=True)["optimizer_s"].agg(["min", "max"])
    text = ", ".join(f"{1e3 * seconds:.2f} ms" for seconds in spread["max"])
    if not ((rows[_LENGTH].nunique() > 1) or (rows[_BATCH].nunique() > 1)):
        return {"bert.lamb_constant": ClaimResult(None, "needs several batches or lengths")}
    text += "; the update depends on weights alone"
    # equal but for rounding: the update reads and writes weights, whose number is fixed
    constant = bool((spread["max"] <= spread["min"] * (1 + 1e-12)).all())
    return {"bert.lamb_constant": ClaimResult(constant, text, basis="by construction")}


# Claims that change one thing at a time


def _base(run: FinishedRun) -> StepDesign | None:
    """Design of the run's configuration (by default phase 1, batch 32, FP32); None unless it trains a transformer."""
    design = legal_base(run)
    trains = design is not None and design.run.mode == "training" and design.model.kind == "transformer"
    return design if trains else None


def _probe_rows(run: FinishedRun, name: str) -> pd.DataFrame:
    """Rows of a probe at the precision of the configuration, by the value that the probe changes."""
    rows = run.probe(name)
    if rows.empty:
        return rows
    path = _CHANGES.get(name, _NEAR)
    # a probe may hold several precisions; one row for each value of its knob remains
    same = rows[rows[_PRECISION].astype(str) == run.config["run"]["precision"]].drop_duplicates(path)
    by_value: pd.DataFrame = same.set_index(path).sort_index()
    return by_value


def _growth(run: FinishedRun, design: StepDesign) -> dict[str, ClaimResult]:
    """Growth of softmax with the length, and FLOP per byte of FC layers over that of attention."""
    metrics = _probe_rows(run, "sequence_length")
    seconds = metrics["share_softmax"] * metrics["iteration_s"] if len(metrics) else metrics
    growth = ClaimResult(None, "needs iterations of 512 and 1,024 tokens")
    if {512, 1024} <= set(metrics.index):
        exponent = float(np.log2(seconds[1024] / seconds[512]))  # doubling the length: the exponent of the growth
        # quadratic, but for launches
        growth = ClaimResult(bool(abs(exponent - 2) < 0.1), f"exponent {exponent:.3f} from 512 to 1,024 tokens")
    rows = [row for row in _operators(design) if row["phase"] == "forward"]
    least = min(row["intensity"] for row in rows if row["kind"] == "fc" and row["gemm"])
    most = max(row["intensity"] for row in rows if row["kind"] == "attention")
    ratio = f"{least:.0f} FLOP/B of FC against at most {most:.1f}, at {design.run.sequence_length} tokens"
    return {"bert.softmax_sl2": growth, "bert.intensity_spread": ClaimResult(float(least / most), ratio)}


def _gemm(metrics: pd.DataFrame) -> pd.Series[Any]:
    return metrics[[f"share_{kind}" for kind in _GEMMS]].sum(axis=1)


def _directions(run: FinishedRun) -> dict[str, ClaimResult]:
    """Direction in which shares move with width, tokens, dp and tp."""
    wide, long, dp, tp = (_probe_rows(run, name) for name in ("hidden", "batch", "dp", "tp"))
    h_direction = ClaimResult(None, "needs several widths and batches")
    # `batch` stands for tokens here: more of them grow all but the update
    if len(wide) > 1 and len(long) > 1:
        up = {"GEMMs": np.diff(_gemm(wide)), "LAMB": np.diff(wide["share_optimizer"])}
        fewer = bool((np.diff(long["share_optimizer"]) < 0).all())
        text = f"H {wide.index[0]:g} to {wide.index[-1]:g}: GEMMs {_ends(_gemm(wide))}, LAMB "
        text += f"{_ends(wide['share_optimizer'])}; B {long.index[0]:g} to {long.index[-1]:g}: LAMB "
        text += _ends(long["share_optimizer"])
        cause = (
            "the share of GEMMs falls where the update grows as fast as they do, and they run at a better rate when "
            "wide"
        )
        grows = all(bool((steps > 0).all()) for steps in up.values())
        h_direction = ClaimResult(grows and fewer, text, cause)
    dp_tp_direction = ClaimResult(None, "needs iterations on one GPU and on eight")
    if {1, 8} <= set(dp.index) and 8 in tp.index:
        dp_tp_direction = _parallel_direction(dp, tp)
    return {"bert.h_direction": h_direction, "bert.dp_tp_direction": dp_tp_direction}


def _parallel_direction(dp: pd.DataFrame, tp: pd.DataFrame) -> ClaimResult:
    """What eight GPUs change: replicas add reductions, slices of a layer add all-reduces and split the update."""
    (alone, apart), (split,) = dp.loc[[1, 8]].to_dict("records"), tp.loc[[8]].to_dict("records")
    ratio = float(alone["optimizer_s"] / split["optimizer_s"])
    # replicas alone reduce gradients (dp_s), slices alone exchange activations within layers (serialized_s)
    adds = bool(apart["dp_s"] > 0 and split["serialized_s"] > 0 and alone["dp_s"] == alone["serialized_s"] == 0)
    eight = f"dp 8: {1e3 * float(apart['dp_s']):.1f} ms of reductions; tp 8: LAMB {ratio:.2f} times as fast, "
    eight += f"{1e3 * float(split['serialized_s']):.1f} ms of all-reduces"
    slow = "launches of the update, one after another for each tensor, are not split"
    return ClaimResult(adds and ratio > 7, f"{eight}; a yes needs 7 times", slow)  # eight times, less what is not split


def _ends(values: pd.Series[Any]) -> str:
    return f"{100 * float(values.iloc[0]):.0f} to {100 * float(values.iloc[-1]):.0f} %"


def _near_memory(run: FinishedRun) -> dict[str, ClaimResult]:
    """Update by units at the banks: its own speed-up, and the iteration's against its bound."""
    rows = _probe_rows(run, "near_memory")
    if len(rows) < 2:
        return dict.fromkeys(("bert.nmc_bound", "bert.nmc_lamb"), ClaimResult(None, "needs an update with and without"))
    # rows are sorted by the bandwidth of the units: without them first, the fastest last
    before, after = rows.iloc[0], rows.iloc[-1]
    update_speedup = float(before["optimizer_s"] / after["optimizer_s"])
    speedup = float(before["iteration_s"] / after["iteration_s"])
    bound = 1 / (1 - float(before["memory_bound_share"]))  # Amdahl: what is bound by memory takes no time at best
    text = (
        f"{speedup:.3f}x, bounded by {bound:.2f}x: {100 * float(before['memory_bound_share']):.0f} % are memory-bound"
    )
    text += "; only the update gains"
    return {
        "bert.nmc_bound": ClaimResult(bool(speedup <= bound), text, basis="by construction"),
        "bert.nmc_lamb": ClaimResult(
            update_speedup, f"{rows.index[-1]:g} times the bandwidth, less launches", basis="by construction"
        ),
    }


# Operators, changes, bounds, measured throughput


def _operators(design: StepDesign) -> list[dict[str, Any]]:
    """Work, time, intensity, rate and number of runs of every operator that computes."""
    rows = []
    for part in iteration(design).passes.parts:
        flop, moved, seconds = (float(getattr(part.spent, name)) for name in ("flop", "bytes", "seconds"))
        # neither collectives (`over` a group of GPUs) nor operators that move nothing have a place in a roofline
        if part.over is None and seconds > 0 and moved > 0:
            row: dict[str, Any] = {"block": part.block.name, "operator": part.op.name, "kind": part.op.kind}
            row |= {"phase": part.op.phase, "gemm": isinstance(part.op.work, Product)}
            # operators without arithmetic have a place on the logarithmic axis
            row["intensity"] = max(flop / moved, 1e-3)
            times = float(part.times)
            rows.append({**row, "rate": flop / seconds, "seconds": seconds, "times": times, "total_s": times * seconds})
    return rows


def _parts_of(rows: pd.DataFrame) -> list[Axis]:
    """Parts of an iteration that are there, as shares."""
    return [Axis(f"share_{name}", label, "%") for name, label in _LABELS.items() if rows[f"share_{name}"].any()]


def _breakdown(rows: pd.DataFrame) -> FigureSheet:
    """Shares of an iteration by configuration."""
    gemms = 100 * sum(rows[f"share_{kind}"] for kind in _GEMMS)
    title = (
        f"GEMMs take {reach(gemms, ' %')} of an iteration, the optimizer {reach(100 * rows['share_optimizer'], ' %')}"
    )
    frame = Frame(title, panel="scenario" if rows["scenario"].nunique() > 1 else None)
    return tables.stacks(rows, _parts_of(rows), bar="called", label="share of an iteration", frame=frame)


def _times_figure(rows: pd.DataFrame) -> FigureSheet:
    """Time of an iteration by part and configuration."""
    times = rows.assign(**{f"time_{name}": rows[f"share_{name}"] * rows["iteration_s"] for name in _LABELS})
    parts = [Axis(part.column.replace("share", "time"), part.label, "s") for part in _parts_of(rows)]
    halves = rows.pivot_table(index=["scenario", _LENGTH, _BATCH], columns=_PRECISION, values="iteration_s", sort=False)
    title = "Time of an iteration, by what takes it"
    if {"fp32", "mixed"} <= set(halves):
        gains = (halves["fp32"] / halves["mixed"]).dropna()
        title = f"Mixed precision makes iterations {reach(gains, 'x', digits=1)} as fast"
    frame = Frame(title, panel="scenario" if rows["scenario"].nunique() > 1 else None)
    return tables.stacks(times, parts, bar="called", label="time of an iteration", frame=frame)


def _roofline(rows: Sequence[Mapping[str, Any]], design: StepDesign) -> FigureSheet:
    """GEMMs of an iteration under the roofline of the GPU."""
    import pandas as pd

    table = pd.DataFrame([row for row in rows if row["gemm"]])
    table = table.assign(kind=table["kind"].map(_LABELS).fillna(table["kind"]))
    peak = design.system.gpu.peak(design.run.precision)
    assert peak is not None
    bandwidth = design.system.gpu.peak_hbm_bytes_per_s  # the roofline is drawn of peak rates, not of sustained ones
    bound = table["intensity"] < peak / bandwidth  # the ridge of the roofline
    share = 100 * table.loc[bound, "total_s"].sum() / table["total_s"].sum()
    title = f"Memory limits {int(bound.sum())} of {len(table)} GEMMs of an iteration, {share:.0f} % of their time"
    note = (
        f"{design.system.name}, {design.run.batch} sequences of {design.run.sequence_length}, {design.run.precision}; "
    )
    frame = Frame(title, f"{note}area: time in an iteration")
    return tables.roofline(table, (peak, bandwidth), by="kind", size=Axis("total_s", "time", "s"), frame=frame)


def _changes(run: FinishedRun) -> pd.DataFrame:
    """Shares of an iteration as one thing changes: width, length, batch, tp, dp, micro-batches."""
    import pandas as pd

    parts = []
    for name, path in _CHANGES.items():
        rows = run.probe(name)
        if len(rows):
            metrics = rows[[column for column in run.columns if column in {**METRICS, **EPOCH_METRICS}]]
            changed = metrics.assign(
                changed=name, value=rows[path].astype(float), precision=rows[_PRECISION].astype(str)
            )
            parts.append(changed.sort_values(["precision", "value"]))
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def _changes_figure(changes: pd.DataFrame) -> FigureSheet:
    """Shares of an iteration as one thing changes."""
    rows = changes[changes["precision"] == "mixed"]  # one precision, as both would fill the figure twice
    bar = rows["changed"].map(_CHANGED) + " " + rows["value"].map("{:,g}".format)
    rows = rows.assign(bar=bar, gemm=sum(rows[f"share_{kind}"] for kind in _GEMMS))
    shares = 100 * rows.groupby("changed", sort=False)["gemm"].agg(lambda share: share.max() - share.min())
    title = f"The share of GEMMs depends most on {_CHANGED[extremes(shares)[1]]}: it moves by {shares.max():.0f} points"
    return tables.stacks(
        rows, _parts_of(rows), bar="bar", label="share of an iteration", frame=Frame(title, "mixed precision")
    )


def _bounds(run: FinishedRun) -> list[dict[str, Any]]:
    """Speed-up of an iteration by a near-memory update, and Amdahl's bounds, of every configuration."""
    bounds = []
    # of each configuration the plain update and the one with the fastest units
    for name, rows in _configurations(run.probe("near_memory_by_configuration")).groupby("called", sort=False):
        plain, near = (rows.sort_values(_NEAR).iloc[place] for place in (0, -1))
        bounds.append(
            {
                "configuration": name,
                "speedup": float(plain["iteration_s"] / near["iteration_s"]),
                "bound_of_optimizer": 1 / (1 - float(plain["share_optimizer"])),
                "bound_of_memory_bound": 1 / (1 - float(plain["memory_bound_share"])),
            }
        )
    return bounds


def _published_run(row: Mapping[str, str]) -> dict[str, int]:
    """Section `run` of a published row of BERT-Large."""
    sizes = {"batch": int(row["batch"]), "sequence_length": int(row["sequence_length"])}
    return {**sizes, "micro_batches": int(row["accumulation"] or 1)}  # an empty cell: no accumulation


def _sequences_per_s(row: Mapping[str, str], seconds: float) -> tuple[str, float, float]:
    """Software of a published row, and its throughput: measured, and predicted from the time of a step."""
    run = _published_run(row)
    kind = _YEARS.get(row["source"].rpartition(" ")[2], row["source"])  # a source ends in the commit of its table
    # a step holds all micro-batches of the accumulation
    return kind, float(row["sequences_per_s"]), run["micro_batches"] * run["batch"] / seconds


STUDY = Bert()
