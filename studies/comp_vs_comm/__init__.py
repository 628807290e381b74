"""Tale of Two Cs (arXiv:2302.02825): communication against compute as models and hardware grow, and their projection.

Serialized communication is that of tp, which compute waits for; overlapped is that of dp, during the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dse.plots import Draw
from dse.results.answer import tables_of_winners
from dse.results.claims import ClaimResult
from dse.results.run_folder import FinishedRun, Outputs
from dse.space import Case
from dse.values import put_all
from simulators.steps.design import StepDesign
from simulators.steps.judge.projection import COMMUNICATION, Profile, Size, by_kind, project_layer
from simulators.steps.run.build import iteration
from simulators.workloads.model_zoo import model_tree
from simulators.workloads.public_models import public
from studies.common.facts import facts
from studies.common.iterations import base, step_tree
from studies.comp_vs_comm.cases import (
    AXES,
    BATCH,
    FASTER,
    LENGTH,
    NETWORK,
    TP,
    WIDTH,
    model_cases,
    network_cases,
    profiled_case,
    sequence_length,
)
from studies.comp_vs_comm.figures import errors_figure, generations_figure, models_figure, overlapped, serialized
from studies.comp_vs_comm.shares import least_fitting, share_table
from studies.plain import Plain

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table

_MODE = "run.mode"
_EXACT = 1e-9  # rounding
_MOST_TP = 256  # the largest degree of the space, by assumption
_EXPOSED = 5.0  # per cent of an iteration
_BATCHES = (4, 8, 32)  # of the profiled baseline, beside its own
_ASSUMED = "TP 256 at most, rings of any size at the bandwidth of a node (by assumption)"
_ATTENTION = "its batched ones alone"  # part of GEMM, reported beside it
_GROUPS = {
    "GEMM": ("linear", "fc", "attention"),
    _ATTENTION: ("attention",),
    "element-wise": ("norm", "softmax", "activation"),
    "all-reduce": (COMMUNICATION,),
}


class CompVsComm(Plain):
    """Claims, shares, the TP that memory forces, and errors of projections."""

    columns = (
        "model.hidden",
        "model.layers",
        "parallel.dp",
        "parallel.tp",
        "run.batch",
        "run.mode",
        "run.sequence_length",
        "system.gpu.flop_vs_bw",
    )

    def cases(self, config: Mapping[str, Any]) -> Mapping[str, Mapping[str, Case]]:
        """The profiled iteration, public models at every TP, and the space over two rates between servers."""
        tree = step_tree(config)
        return {"profiled": profiled_case(tree), "models": model_cases(tree), "network": network_cases(config, tree)}

    def findings(self, table: pd.DataFrame) -> Mapping[str, ClaimResult]:
        """Findings on shares and trends, from the table."""
        ok = _training_points(table)
        if ok.empty:
            return {}
        names = {1: "band_1x", 2: "band_2x", 4: "comm_share_future"}
        findings = {f"comp_vs_comm.{name}": _band(ok, faster) for faster, name in names.items()}
        findings["comp_vs_comm.band_4x"] = ClaimResult(None, "the same number as comm_share_future, and judged once")
        findings["comp_vs_comm.trend_tp_h"] = _trend(ok)
        return findings | _dp_overlap(ok) | _case(ok)

    def answer(self, outputs: Outputs, table: pd.DataFrame) -> Iterator[Table | str]:
        """Yield the share by width and FLOP/s over bandwidth, at the least TP whose memory suffices."""
        points = _at_middle(_training_points(table))
        if points.empty:
            yield from tables_of_winners(outputs, table)
            return
        yield share_table(points)

    def further(self, run: FinishedRun) -> Mapping[str, ClaimResult]:
        """Findings on exact counts, the projection, and slower links between servers."""
        design = _base(run)
        if design is None:
            absent = ClaimResult(None, "needs a transformer of any width: model=transformer")
            names = ("edge", "slack", "projection_error", "profiling_ratio", "internode_exposes_dp")
            return {f"comp_vs_comm.{name}": absent for name in names}
        table = _training_points(run.outputs.read_table("results"))
        network = _internode(table, run.probe("network"), design)
        return {**_counts(table, design), **_projection(table, design, run.probe("profiled")), **network}

    def figures(self, table: pd.DataFrame, timelines: pd.DataFrame) -> Iterator[tuple[str, Draw]]:
        """Shares over TP by width, and the reduction of gradients against the backward pass over tokens."""
        ok = _training_points(table)
        if ok.empty:
            return
        ok = ok.assign(
            hidden=ok[WIDTH].map(_thousands), panel=ok[FASTER].map("{:g}x".format) + " the FLOP/s over bandwidth"
        ).sort_values([FASTER, WIDTH])
        points = ok[(ok[BATCH] == ok[BATCH].min()) & (ok[LENGTH] == _middle(ok[LENGTH]))]
        if points[TP].nunique() > 1:
            yield "serialized", partial(serialized, points)
        rows = ok[ok[TP] == ok[TP].min()].assign(tokens=ok[LENGTH] * ok[BATCH])
        if rows["tokens"].nunique() > 1:
            yield "overlapped", partial(overlapped, rows)

    def extras(self, run: FinishedRun) -> Iterator[tuple[str, Any]]:
        """Public models at the TP that memory forces, errors of projections, generations of hardware."""
        design = _base(run)
        if design is None:
            return
        models = _models(run.probe("models"))
        yield "models", models
        yield "models_share", partial(models_figure, models, design)
        errors = _errors(_training_points(run.outputs.read_table("results")), design)
        if len(errors):
            yield "projection", errors
            yield "projection_error", partial(errors_figure, errors)
        yield "generations", generations_figure


def _training_points(table: pd.DataFrame) -> pd.DataFrame:
    """Training points with a result and all axes of the study; none where the model has no width."""
    ok = table[table["status"] == "ok"]
    # presets have their own width: no axis of the study
    fine = {*AXES, _MODE} <= set(ok) and not ok[WIDTH].isna().any()
    return ok[ok[_MODE] == "training"] if fine else ok.iloc[:0]


def _at_middle(ok: pd.DataFrame) -> pd.DataFrame:
    """Points of the smallest batch and the middle length, of each width at the least TP whose memory suffices."""
    if ok.empty:
        return ok
    rows = ok[(ok[BATCH] == ok[BATCH].min()) & (ok[LENGTH] == _middle(ok[LENGTH]))]
    return least_fitting(rows, [WIDTH, FASTER])


def _thousands(width: float) -> str:
    return f"H {width / 1024:g}K"


def _middle(values: pd.Series[Any]) -> Any:
    every = sorted(values.unique())
    return every[(len(every) - 1) // 2]  # the lower one of two in the middle


# Claims from the table


def _future(ok: pd.DataFrame, faster: float) -> pd.DataFrame:
    """Points of future models, each at the least TP whose memory suffices, or the largest there is."""
    future = facts("comp_vs_comm")["future"]
    points = ok[ok[WIDTH].isin(future["hidden"]) & ok[LENGTH].isin(future["sequence_length"])]
    points = points[(points[BATCH] == future["batch"]) & (points[FASTER] == faster)]
    return least_fitting(points, [WIDTH, LENGTH])  # memory decides TP, as nobody splits more than needed


def _band(ok: pd.DataFrame, faster: float) -> ClaimResult:
    rows = _future(ok, faster)
    if rows.empty or rows[TP].max() < _MOST_TP:  # without the largest degree, the widest models look as if they fitted
        return ClaimResult(None, f"needs future widths at flop-vs-bw {faster}x up to TP {_MOST_TP}")
    shares = 100 * rows["serialized_share"]
    fits = (rows["memory_share"] <= 1).groupby(rows[WIDTH]).all()
    text = ", ".join(
        f"{_thousands(width)}{'' if fits[width] else ' (too few)'} {group.min():.0f} to {group.max():.0f} %"
        for width, group in shares.groupby(rows[WIDTH])
    )
    cause = "GEMMs of MI210 were not measured, and the paper's TP for each width is unknown; " + _ASSUMED
    text = f"at the TP that memory forces, {_MOST_TP} at most: {text}; with kernels=fused some eight points more"
    return ClaimResult((float(shares.min()), float(shares.max())), text, cause)


def _trend(ok: pd.DataFrame) -> ClaimResult:
    """Trend of the share: it must rise with TP and fall with H, all else equal."""
    # rows in which all but TP is equal
    shares = ok.pivot_table(index=[LENGTH, BATCH, FASTER, WIDTH], columns=TP, values="serialized_share")
    by_tp = np.diff(shares.sort_index(axis=1).to_numpy(float), axis=1)
    turned = ok.pivot_table(index=[LENGTH, BATCH, FASTER, TP], columns=WIDTH, values="serialized_share")
    by_width = np.diff(turned.sort_index(axis=1).to_numpy(float), axis=1)
    up, down = by_tp[~np.isnan(by_tp)], by_width[~np.isnan(by_width)]  # combinations that were not evaluated
    if not len(up) or not len(down):
        return ClaimResult(None, "needs points of several TP and widths")
    wrong = int((up <= 0).sum()), int((down >= 0).sum())
    text = f"rises in all but {wrong[0]} of {len(up)} steps of TP, falls in all but {wrong[1]} of {len(down)} of H"
    cause = "where GEMMs are so small that waves and launches, not FLOP, decide"
    return ClaimResult(wrong == (0, 0), text, cause)


def _dp_overlap(ok: pd.DataFrame) -> dict[str, ClaimResult]:
    """The reduction of gradients against the backward pass that should hide it."""
    tokens, share = ok[LENGTH] * ok[BATCH], 100 * ok["dp_over_backward"]
    # few tokens: the shortest backward pass to hide behind
    least = {faster: float(group.max()) for faster, group in share[tokens == tokens.min()].groupby(ok[FASTER])}
    now = share[ok[FASTER] == 1]
    text = ", ".join(f"{faster:g}x {most:.0f} %" for faster, most in least.items())
    later = [most for faster, most in least.items() if faster >= 2]
    absent = ClaimResult(None, "needs points at flop-vs-bw 1x and beyond")
    if now.empty or not later:
        return dict.fromkeys(("comp_vs_comm.overlap_exceeds", "comp_vs_comm.overlap_range_1x"), absent)
    # at every later generation
    exceeds = ClaimResult(bool(min(later) > 100), f"at most, at SL x B = {tokens.min():g}: {text}")
    cause = "the paper's lengths, batches and links of dp are unknown; ours are as fast as tp's"
    spread = ClaimResult((float(now.min()), float(now.max())), f"over {len(now)} points", cause)
    return {"comp_vs_comm.overlap_exceeds": exceeds, "comp_vs_comm.overlap_range_1x": spread}


def _case(ok: pd.DataFrame) -> dict[str, ClaimResult]:
    case = facts("comp_vs_comm")["case"]
    named = {WIDTH: "hidden", LENGTH: "sequence_length", BATCH: "batch", TP: "tp", FASTER: "flop_vs_bw"}
    rows = ok[np.logical_and.reduce([ok[path] == case[name] for path, name in named.items()])]
    if rows.empty:
        return dict.fromkeys(
            ("comp_vs_comm.case_serial", "comp_vs_comm.case_overlap"), ClaimResult(None, "needs the case")
        )
    row = rows.iloc[0]
    serial, exposed = (float(100 * row[name]) for name in ("serialized_share", "exposed_dp_s"))
    cause = "only what is left of the last layer is exposed where dp has links as fast as tp; the paper's are unknown"
    return {
        "comp_vs_comm.case_serial": ClaimResult(serial),
        "comp_vs_comm.case_overlap": ClaimResult(exposed / float(row["iteration_s"]), "of the iteration", cause),
    }


# Claims that need the operators


def _base(run: FinishedRun) -> StepDesign | None:
    """Design of the run's configuration; None unless it trains a transformer of any width."""
    design = base(run)
    wide = design is not None and getattr(design.model, "heads", 1) is None  # None: heads follow from the width
    return design if design is not None and wide and design.run.mode == "training" else None


def _counts(table: pd.DataFrame, design: StepDesign) -> dict[str, ClaimResult]:
    """Edge and slack of every point against their formulas."""
    b, h = design.run.element_bytes, table[WIDTH]
    # FLOP of compute over bytes of tp, as it is recalled of the paper
    edge = 3 * (24 * h + 4 * table[LENGTH]) / (4 * b * table[TP])
    slack = 2 * table[LENGTH] * table[BATCH] / b
    findings = {}
    for name, formula, label in (
        ("edge", edge, "3 (24 H + 4 SL) / (4 b TP) of the counter, of the order (H + SL) / TP"),
        ("slack", slack, "2 SL B / b of the counter"),
    ):
        off = float((table[name] / formula - 1).abs().max()) if len(table) else np.nan
        text = f"{label}; off by {off:.1e} at most in {len(table)} points"
        plain = getattr(design.model, "ffn", 1) is None and not getattr(design.model, "gated", True)
        plain = plain and design.kernels.flash_share_of_peak is None  # flash attention recomputes scores
        holds = bool(off < _EXACT) if len(table) and plain else None
        findings[f"comp_vs_comm.{name}"] = ClaimResult(holds, text, basis="by construction")
    return findings


def _profile(design: StepDesign, baseline: Mapping[str, Any]) -> Profile:
    """Profile of one layer on one GPU, and of its collectives on a small ring."""
    size = Size(baseline["hidden"], baseline["sequence_length"], baseline["batch"], 1)
    # profiled on hardware of today
    sizes = {WIDTH: size.hidden, LENGTH: size.sequence_length, BATCH: size.batch, FASTER: 1.0, "parallel.dp": 1}
    alone, ring = (by_kind(iteration(put_all(design, {**sizes, TP: tp}))) for tp in (1, baseline["ring"]))
    return Profile(size, {**alone, COMMUNICATION: ring[COMMUNICATION]}, baseline["ring"])


def _against(
    table: pd.DataFrame, design: StepDesign, baseline: Mapping[str, Any], *, signed: bool = False
) -> dict[str, float]:
    """Mean amount of the error [%] of the projected time of each group of operators over the points of a table.

    signed: mean error instead, above 0 where projections are too long.
    """
    sizes = {path: table[path].to_numpy(float) for path in AXES}
    ours = by_kind(iteration(put_all(design, {**sizes, "parallel.dp": 1})))
    size = Size(*(sizes[path] for path in AXES[:4]))
    theirs = project_layer(_profile(design, baseline), size, sizes[FASTER])
    errors = {
        name: sum(theirs[kind] for kind in kinds) / sum(ours[kind] for kind in kinds) - 1
        for name, kinds in _GROUPS.items()
    }
    return {name: 100 * float(np.mean(error if signed else np.abs(error))) for name, error in errors.items()}


def _projection(table: pd.DataFrame, design: StepDesign, profiled: pd.DataFrame) -> dict[str, ClaimResult]:
    """Errors of the projection from the baseline, and the profiling time it saves."""
    if table.empty or profiled.empty:
        absent = ClaimResult(None, "needs points of the study's own space")
        return {"comp_vs_comm.projection_error": absent, "comp_vs_comm.profiling_ratio": absent}
    baseline = facts("comp_vs_comm")["baseline"]
    errors = _against(table, design, baseline)
    means = _against(table, design, baseline, signed=True)
    by_group = ", ".join(f"{name} {error:.1f} % ({means[name]:+.1f} %)" for name, error in errors.items())
    size = f"H {baseline['hidden']}, SL {baseline['sequence_length']}, B {baseline['batch']}"
    text = "against this project's own simulator, which also makes the profile, not against measurements; "
    text += f"mean amount of errors (and mean) from {size}: {by_group}"
    by_batch = {batch: _worst(_against(table, design, {**baseline, "batch": batch})) for batch in _BATCHES}
    by_batch |= {baseline["batch"]: _worst(errors)}
    text += f"; the verdict rests on the batch that is profiled: {_by_batch(by_batch)}"
    text += "; which the paper profiles is unknown, ours is by choice"
    cause = "small operators of the baseline do not fill the GPU, and wait for launches and latencies"
    worst = ClaimResult(_worst(errors), text, cause)
    return {
        "comp_vs_comm.projection_error": worst,
        "comp_vs_comm.profiling_ratio": _profiling_ratio(table, design, float(profiled["iteration_s"].iloc[0])),
    }


def _by_batch(worst: Mapping[int, float]) -> str:
    """Describe from which batches the projection is within its tolerance, and from which it is not."""
    limit = next(
        claim.tolerance[1] for claim in STUDY.claims() if claim.id.endswith("projection_error") and claim.tolerance
    )
    sides = {
        "within": [batch for batch in sorted(worst) if worst[batch] <= limit],
        "a miss": [batch for batch in sorted(worst) if worst[batch] > limit],
    }
    texts = {side: ", ".join(f"B {batch} ({worst[batch]:.0f} %)" for batch in sides[side]) for side in sides}
    return "; ".join(f"{side} from {text}" for side, text in texts.items() if text)


def _worst(errors: Mapping[str, float]) -> float:
    return max(error for name, error in errors.items() if name != _ATTENTION)


def _profiling_ratio(table: pd.DataFrame, design: StepDesign, profiled: float) -> ClaimResult:
    """Time of an iteration of all points, as deep as public models of their width, over the time profiled [s]."""
    now = table[table[FASTER] == 1].drop_duplicates([WIDTH, LENGTH, BATCH, TP])
    # the study's models have one depth for all widths
    deep = np.array([_depth(width) for width in now[WIDTH]]) / float(np.asarray(_layers(design)))
    total_s = float((now["iteration_s"] * deep).sum())
    first = now.drop_duplicates(WIDTH)
    region = float((first["backward_s"] + first["dp_s"]).sum() / float(np.asarray(_layers(design))))
    text = f"{len(now)} configurations, {total_s:.3g} s for an iteration of each; a baseline of {profiled:.3g} s; "
    text += f"a layer's backward pass with its reduction, for each of {len(first)} widths, {region:.3g} s"
    cause = "how many configurations the paper counts, how deep and at which TP, is unknown"
    return ClaimResult(total_s / (profiled + region), text, cause)


def _layers(design: StepDesign) -> Any:
    return getattr(design.model, "layers", 1)


def _depth(width: float) -> int:
    """Number of layers of the public model nearest in width."""
    trees = [model_tree(name) for name in facts("comp_vs_comm")["models"]]
    return int(min(trees, key=lambda tree: abs(np.log(tree["hidden"] / width)))["layers"])


def _internode(table: pd.DataFrame, network: pd.DataFrame, design: StepDesign) -> dict[str, ClaimResult]:
    """Reductions of dp that slower links between servers expose, and links inside hide."""
    now = table[table[FASTER] == table[FASTER].min()]
    if network.empty or now.empty:
        return {"comp_vs_comm.internode_exposes_dp": ClaimResult(None, "needs points, and a network between servers")}
    slower, exposed = float(facts("comp_vs_comm")["network_slower"]), list[float]()
    for _, points in sorted(network.groupby(NETWORK), reverse=True):  # the faster rate first
        metrics = now[[*AXES[:4]]].merge(points, on=list(AXES[:4]))  # the same points, on the other network
        exposed.append(100 * float(np.mean(metrics["exposed_dp_s"] / metrics["iteration_s"])))
    text = (
        f"exposed of an iteration, mean of {len(now)} points: {exposed[0]:.1f} % over links as inside, {exposed[1]:.1f}"
    )
    text += f" % over 1/{slower:g} (a yes needs {_EXPOSED:g} %, from less)"
    # links as fast as inside must hide them
    return {"comp_vs_comm.internode_exposes_dp": ClaimResult(bool(exposed[1] >= _EXPOSED > exposed[0]), text)}


# Public models, errors, generations


def _models(points: pd.DataFrame) -> list[dict[str, Any]]:
    """Shares of public models on the configured GPU, at the least TP that divides their heads and fits into memory."""
    rows = []
    for name in sorted(facts("comp_vs_comm")["models"], key=lambda model: public().get(model, {}).get("year", 9999)):
        of_model = points[points["scenario"] == name].sort_values([TP, FASTER])
        if of_model.empty:
            continue
        fits = of_model[of_model["memory_share"] <= 1]
        tp = int(fits[TP].iloc[0] if len(fits) else of_model[TP].iloc[-1])  # none fits: the largest degree there is
        year, width = public().get(name, {}).get("year"), model_tree(name)["hidden"]
        labels = {"model": name, "year": year, "hidden": width, "sequence_length": sequence_length(name)}
        labels |= {"tp": tp, "fits": bool(len(fits))}
        shares = of_model.loc[of_model[TP] == tp, [FASTER, "serialized_share"]].itertuples(index=False)
        rows += [{**labels, "flop_vs_bw": float(times), "serialized_share": float(share)} for times, share in shares]
    return rows


def _errors(table: pd.DataFrame, design: StepDesign) -> pd.DataFrame:
    """Mean errors [%] of projections from several baselines, by group of operators."""
    import pandas as pd

    rows = []
    if len(table):
        for width in sorted(table[WIDTH].unique()):
            baseline = {**facts("comp_vs_comm")["baseline"], "hidden": float(width)}
            errors = _against(table, design, baseline)
            rows += [{"hidden": float(width), "operators": name, "error": error} for name, error in errors.items()]
    return pd.DataFrame(rows)


STUDY = CompVsComm()
