"""SeqPoint (arXiv:2007.10459): representative iterations of an epoch, against simpler choices, on GPUs run otherwise.

Representatives are chosen on the GPU as it is; their projections are judged on every GPU against the full epoch.
Errors of a network are geometric means over the GPUs. Profiling time saved is counted with representatives one
after another (`cut_sequential`), or all at once (`cut_parallel`), which seems to be the reading of the published cuts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dse.config.options import conf_dir
from dse.errors import ConfigError
from dse.plots import Axis, Draw, FigureSheet, Frame, predictions, tables
from dse.plots.canvas import mark_handle, plain_ticks, sheet
from dse.plots.labels import INK, looks, scale
from dse.results.claims import ClaimResult
from dse.results.run_folder import FinishedRun
from dse.results.words import cell
from dse.space import Case
from dse_calibration.backend import tables as measured_tables
from dse_calibration.predictions import predicted_by
from dse_papers import throughput
from dse_papers.seqpoint import noise, tails
from simulators.hardware.device import Device
from simulators.steps.design import OF_LENGTHS, StepDesign
from simulators.steps.epochs.seqpoint import Iterations, Sample, choose
from simulators.steps.plan.scenarios import scenarios
from simulators.workloads.model import Run
from simulators.workloads.model_zoo import model_tree, option_tree
from simulators.workloads.sequence_lengths import Lengths, iteration_lengths
from studies.common.facts import facts
from studies.plain import Plain, capitalised, geometric_mean, reach

if TYPE_CHECKING:
    import pandas as pd

_METHOD, _SYSTEM, _LENGTH = "iterations.name", "system.name", "run.sequence_length"
_RATIO = "target_per_source"
_AS_DESCRIBED = {"active_cus": None, "clock": 1.0, "disabled_cache": None, "flop_vs_bw": 1.0}
"""Settings of a GPU with all that its data sheet lists, at the nominal clock."""
_OWN, _PLAIN = "seqpoint", "vega_fe"
_CHOICES = {
    "seqpoint": "SeqPoint",
    "frequent": "most frequent",
    "median": "median length",
    "worst": "worst length",
    "prior": "fifty in a row",
}
"""Choice of iterations -> its name in figures."""
_SIMPLER = ("frequent", "median", "worst", "prior")
_NETWORKS = {"ds2": "ds2 librispeech_100", "gnmt": "gnmt iwslt15"}
"""Network -> its scenario in the order that is recalled of the paper."""
_WORSE = 5.0
"""Times the error that a simpler choice must have to count as clearly worse (by choice)."""
_BOUNDS = (0.1, 0.03, 0.01, 0.003, 0.001, 0.0003, 0.0001)
_NOISE = "against our own times, which have no noise: what is left is the choice of points alone"
_TAIL = "lengths are drawn from percentiles, and of IWSLT'15 the tail of long sentences is assumed (tails.parquet)"


class SeqPoint(Plain):
    """Claims, errors by choice and GPU, profiling time saved, and measured times of recurrent layers."""

    columns = (
        "iterations.name",
        "lengths.name",
        "system.name",
        "run.batch",
    )

    def cases(self, config: Mapping[str, Any]) -> Mapping[str, Mapping[str, Case]]:
        """Iterations of every length of an epoch on the GPU as described, and steps of published throughput."""
        singles = {name: _single_iterations(tree) for name, tree in _epoch_trees(config).items()}
        trained = throughput.cases("gnmt_throughput", _published_sections(), _published_run)
        return {"iterations": singles, "throughput": trained}

    def findings(self, table: pd.DataFrame) -> Mapping[str, ClaimResult]:
        """Findings on errors and profiling time saved."""
        ok = _points_with_result(table)
        findings: dict[str, ClaimResult] = {}
        for network, scenario in _NETWORKS.items():
            findings |= _network(ok[(ok["scenario"] == scenario)], network)
        return {**findings, **_cuts(ok), "seqpoint.baselines_worse": _worse(ok)}

    def further(self, run: FinishedRun) -> Mapping[str, ClaimResult]:
        """Findings that need the single iterations."""
        epochs = _epochs(run)
        if set(_NETWORKS.values()) - set(epochs):
            absent = ClaimResult(None, f"needs {' and '.join(_NETWORKS.values())}")
            return {"seqpoint.spread": absent, "seqpoint.k_grows_on_demand": absent}
        # in doublings (log2): the difference is the ratio of the longest to the shortest
        spread = {network: float(np.ptp(np.log2(epochs[scenario].seconds))) for network, scenario in _NETWORKS.items()}
        times = {network: 2**doublings for network, doublings in spread.items()}
        ratios = ", ".join(f"{network} {value:.1f}x" for network, value in times.items())
        grows = {scenario: [len(sample.places) for _, sample in _by_bound(epochs[scenario])] for scenario in epochs}
        bins = {scenario: [sample.bins for _, sample in _by_bound(epochs[scenario])] for scenario in epochs}
        # bins are what the method adds; points may stay as many, as a bin may be empty
        ascending = all(bool((np.diff(counts) >= 0).all()) for counts in bins.values())
        text = "; ".join(f"{name}: {', '.join(map(str, counts))} points" for name, counts in grows.items())
        bounds = ", ".join(f"{100 * bound:g}" for bound in _BOUNDS)
        return {
            "seqpoint.spread": ClaimResult(
                bool(times["ds2"] > 2 and times["gnmt"] > 10), f"longest over shortest: {ratios}"
            ),
            "seqpoint.k_grows_on_demand": ClaimResult(
                ascending, f"at errors of {bounds} %: {text}", basis="by construction"
            ),
        }

    def figures(self, table: pd.DataFrame, timelines: pd.DataFrame) -> Iterator[tuple[str, Draw]]:
        """Errors of every choice on every GPU, of times and of speed-ups."""
        ok = _points_with_result(table)
        if ok.empty:
            return
        rows = ok[ok[_METHOD] != "all"]
        if rows[_METHOD].nunique() > 1:
            time, speedup = "error of the epoch's time", "error of the speed-up against the GPU as it is"
            yield "errors", partial(_errors_figure, rows, Axis("projection_error", time, "%", centre=0.0))
            yield "speedup_errors", partial(_errors_figure, rows, Axis("speedup_error", speedup, "%", centre=0.0))

    def extras(self, run: FinishedRun) -> Iterator[tuple[str, Any]]:
        """Iteration times with their representatives, points against the allowed error, and measured times."""
        epochs = _epochs(run)
        if epochs:
            yield "points", {name: epoch.weighted_representatives() for name, epoch in epochs.items()}
            yield "representatives", partial(_representatives, epochs)
            yield "bounds", partial(_bounds, epochs)
            scattered = _scattered(epochs)
            yield "noise", scattered
            yield "noise", partial(_noise_figure, scattered)
            tailed = _tailed(epochs)
            if len(tailed):
                yield "tails", tailed
                yield "tails", partial(_tails_figure, tailed)
        measured = _recurrent_layers(run)
        if len(measured):
            yield "recurrent", measured
            device = run.config["system"]["name"]
            yield "recurrent_measured", partial(_recurrent_figure, measured, str(device))
        trained = throughput.table("gnmt_throughput", run.probe("throughput"), _tokens_per_s)
        yield "throughput", trained
        yield "throughput_measured", partial(throughput.figure, trained, "a token of GNMT")


def _points_with_result(table: pd.DataFrame) -> pd.DataFrame:
    """Points with a result; where only one choice, or one GPU, was asked for, that is what they have."""
    ok = table[table["status"] == "ok"]
    return ok if {_METHOD, _SYSTEM} <= set(ok) else ok.iloc[:0]


# Claims from the table


def _network(rows: pd.DataFrame, network: str) -> dict[str, ClaimResult]:
    """Errors of SeqPoint's projection of one network, and profiling time saved with all points at once."""
    names = (f"time_error_{network}", f"speedup_error_{network}", f"cut_{network}", f"parallel_reading_{network}")
    seqpoint = rows[rows[_METHOD] == _OWN] if len(rows) else rows
    # the speed-up against itself has no error
    others = seqpoint[seqpoint[_SYSTEM] != _PLAIN] if len(seqpoint) else seqpoint
    if others.empty or len(seqpoint) == len(others):
        return {f"seqpoint.{name}": ClaimResult(None, f"needs SeqPoint on {_PLAIN} and other GPUs") for name in names}
    plain = seqpoint[seqpoint[_SYSTEM] == _PLAIN].iloc[0]
    time, speed = (_percent(seqpoint["projection_error"]), _percent(others["speedup_error"]))
    points = f"{plain['profiled']:.0f} of {plain['iterations']:.0f} iterations, {len(seqpoint)} GPUs"
    errors = (seqpoint["projection_error"], others["speedup_error"])
    at_most = [f"{100 * float(error.max()):.3f} %" for error in errors]
    both = f"one after another {plain['cut_sequential']:.0f}x, as iterations {plain['iterations_cut']:.0f}x"
    reading = float(plain["iterations"] / plain["cut_parallel"])
    text = f"{plain['iterations']:.0f} iterations over {plain['cut_parallel']:.0f}x; the longest of all is "
    text += f"{plain['longest_over_mean']:.2f} times the mean"
    findings = (
        ClaimResult(time, f"at most {at_most[0]}; {points}; {_NOISE}"),
        ClaimResult(speed, f"at most {at_most[1]}; {points}; {_NOISE}"),
        ClaimResult(float(plain["cut_parallel"]), f"all points at once; {both}", _TAIL),
        ClaimResult(reading, text, _TAIL),
    )
    return {f"seqpoint.{name}": finding for name, finding in zip(names, findings, strict=True)}


def _percent(errors: pd.Series[Any]) -> float:
    """Geometric mean [%] of errors; the arithmetic one where an error is 0."""
    positive = errors[errors > 0]
    # a geometric mean of 0 is 0, however large the others
    return 100 * (geometric_mean(errors) if len(positive) == len(errors) else float(errors.mean()))


def _cuts(ok: pd.DataFrame) -> dict[str, ClaimResult]:
    plain = ok[ok["scenario"].isin(_NETWORKS.values()) & (ok[_METHOD] == _OWN) & (ok[_SYSTEM] == _PLAIN)]
    if len(plain) < len(_NETWORKS):
        return {"seqpoint.cut_sequential": ClaimResult(None, f"needs SeqPoint of both networks on {_PLAIN}")}
    cuts = plain["cut_sequential"]
    text = ", ".join(f"{name} {cut:.0f}x" for name, cut in zip(plain["scenario"], cuts, strict=True))
    return {"seqpoint.cut_sequential": ClaimResult((float(cuts.min()), float(cuts.max())), text, _TAIL)}


def _worse(ok: pd.DataFrame) -> ClaimResult:
    """Judge whether each simpler choice errs several times as much, on epochs ordered by length or bucket."""
    rows = ok[ok["scenario"].isin(_NETWORKS.values())]
    errors = {key: _percent(group) for key, group in rows.groupby(["scenario", _METHOD])["projection_error"]}
    ratios: dict[str, float] = {}
    for scenario in _NETWORKS.values():
        for method in _SIMPLER:
            if (scenario, method) not in errors or (scenario, _OWN) not in errors:
                return ClaimResult(None, "needs all choices of both networks")
            ratios[f"{scenario.split()[0]} {method}"] = errors[scenario, method] / errors[scenario, _OWN]
    text = ", ".join(f"{name} {ratio:.0f}x" for name, ratio in ratios.items())
    rule = f"(a yes needs more than {_WORSE:g}x in all)"
    return ClaimResult(bool(min(ratios.values()) > _WORSE), f"times SeqPoint's error {rule}: {text}")


# Iterations one by one


def _epoch_trees(config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Sections of the scenarios that are epochs, as configured; none where the configuration describes no steps."""
    sections = {name: config[name] for name in (*StepDesign.model_fields, "models") if name in config}
    try:
        return {name: tree for name, tree in scenarios(sections).items() if tree.get("lengths")}
    except (ConfigError, KeyError):  # a configuration of another study
        return {}


def _data(tree: Mapping[str, Any]) -> tuple[Lengths, int, int]:
    """Data set of a scenario, sequences of a batch, and the seed."""
    run = Run.model_validate(tree["run"])
    return Lengths.model_validate(tree["lengths"]), int(run.batch), int(run.seed)


def _single_iterations(tree: Mapping[str, Any]) -> Case:
    """An iteration of each length of an epoch, also with other tails, on the GPU as its data sheet describes it."""
    gpu = {**tree["system"]["gpu"], **_AS_DESCRIBED}
    sections = {name: section for name, section in tree.items() if name not in OF_LENGTHS}
    data = _data(tree)
    unique = np.unique(np.concatenate([iteration_lengths(*data), *tails.drawn(*data).values()])).tolist()
    return Case({**sections, "system": {**tree["system"], "gpu": gpu}}, {_LENGTH: unique})


class _Epoch:
    """Iterations of a scenario on the plain GPU: lengths and seconds [N], and how SeqPoint was asked."""

    def __init__(self, tree: Mapping[str, Any], singles: pd.DataFrame) -> None:
        self.lengths, self.tailed = iteration_lengths(*_data(tree)), tails.drawn(*_data(tree))
        # equal lengths take equal times: each is simulated once
        unique, place = np.unique(self.lengths, return_inverse=True)
        self.by_length = singles.set_index(_LENGTH)["iteration_s"]
        self.seconds = self.by_length.loc[unique.tolist()].to_numpy(float)[place]
        chosen = Iterations.model_validate(tree["iterations"]) if tree.get("iterations") else None
        # the run asked for another choice: SeqPoint as by default
        self.asked = chosen if chosen and chosen.method == _OWN else Iterations(name=_OWN, method=_OWN)

    @property
    def sample(self) -> Sample:
        """Sample of iterations that represents the epoch."""
        return choose(self.asked, self.lengths, self.seconds)

    def weighted_representatives(self) -> list[dict[str, float]]:
        """Representatives with their weights."""
        sample = self.sample
        return [
            {
                "sequence_length": int(self.lengths[place]),
                "weight": float(weight),
                "seconds": float(self.seconds[place]),
            }
            for place, weight in zip(sample.places, sample.weights, strict=True)
        ]


@lru_cache(maxsize=1)
def _epochs(run: FinishedRun) -> dict[str, _Epoch]:
    """Epochs of the run by scenario; none where it has single iterations."""
    singles = run.probe("iterations")
    by_scenario = dict(list(singles.groupby("scenario", observed=True))) if len(singles) else {}
    return {
        name: _Epoch(tree, by_scenario[name]) for name, tree in _epoch_trees(run.config).items() if name in by_scenario
    }


def _by_bound(epoch: _Epoch) -> list[tuple[float, Sample]]:
    """Samples by allowed error, from the largest."""
    choice = epoch.asked
    return [
        (bound, choose(choice.model_copy(update={"error": bound}), epoch.lengths, epoch.seconds)) for bound in _BOUNDS
    ]


def _errors_figure(rows: pd.DataFrame, error: Axis) -> FigureSheet:
    """Errors of every choice of iterations on every GPU, as dots from 0."""
    most = 100 * rows[error.column].abs().groupby(rows[_METHOD].map(_CHOICES).fillna(rows[_METHOD])).max()
    texts = ", ".join(f"{cell(value, '%')} by {name}" for name, value in most.sort_values().items())
    title = f"{capitalised(error.label)}: at most {texts}"
    names = {"gpu": rows[_SYSTEM].astype(str).str.replace("_", " "), "panel": rows["scenario"].str.replace("_", " ")}
    few = rows.assign(**names, choice=rows[_METHOD].map(_CHOICES).fillna(rows[_METHOD]))
    return tables.dots(few, error, row="gpu", by="choice", frame=Frame(title, panel="panel"))


def _representatives(epochs: Mapping[str, _Epoch]) -> FigureSheet:
    """Time of an iteration over its sequence length, with its representatives."""
    import pandas as pd

    parts, counts = [], []
    for name, epoch in epochs.items():
        unique, first = np.unique(epoch.lengths, return_index=True)
        weights = {row["sequence_length"]: row["weight"] for row in epoch.weighted_representatives()}
        rows = pd.DataFrame({"length": unique, "seconds": epoch.seconds[first], "panel": name.replace("_", " ")})
        parts.append(rows.assign(weight=rows["length"].map(weights)))
        counts.append(len(weights))
    title = (
        f"{reach(counts)} iterations stand for an epoch of {reach([len(epoch.lengths) for epoch in epochs.values()])}"
    )
    y, weight = Axis("seconds", "time of an iteration", "s"), Axis("weight", "area: iterations that it stands for")
    x, frame = Axis("length", "sequence length"), Frame(title, panel="panel")
    return _marked_lines(pd.concat(parts), x, y=y, weight=weight, frame=frame)


def _marked_lines(rows: pd.DataFrame, x: Axis, *, y: Axis, weight: Axis, frame: Frame) -> FigureSheet:
    """Plot a line over x in each panel, with a mark of area `weight` at the rows that have one."""
    groups, note = frame.panels(rows, y.column)
    drawn = sheet(len(groups), Frame(frame.title, note), height=1.7, columns=2)
    units = scale(x, rows[x.column]), scale(y, rows[y.column])
    chosen = looks(["all", weight.label])
    for place, (panel, (name, group)) in enumerate(zip(drawn.panels, groups.items(), strict=True)):
        line = group.sort_values(x.column)
        places = line[x.column] * units[0].factor, line[y.column] * units[1].factor
        panel.plot(*places, color="#8c8c8c", lw=1.2)
        areas = 10 + 90 * line[weight.column] / float(line[weight.column].max())
        look = chosen[weight.label]
        panel.scatter(*places, s=areas, color=look.colour, alpha=0.7, edgecolors=INK, lw=0.4, zorder=3)
        plain_ticks(panel.xaxis, units[0])
        plain_ticks(panel.yaxis, units[1])
        drawn.name(place, name)
    drawn.xlabel, drawn.ylabel = units[0].title, units[1].title
    drawn.legend([mark_handle(weight.label, marker="o", color=chosen[weight.label].colour, mec=INK, mew=0.4)])
    return drawn


def _bounds(epochs: Mapping[str, _Epoch]) -> FigureSheet:
    """Number of points against the allowed error."""
    import pandas as pd

    rows = pd.DataFrame(
        [
            {"scenario": name, "bound": bound, "points": len(sample.places)}
            for name, epoch in epochs.items()
            for bound, sample in _by_bound(epoch)
        ]
    )
    ends = {bound: rows.loc[rows["bound"] == bound, "points"] for bound in (rows["bound"].max(), rows["bound"].min())}
    title = "; ".join(f"{100 * bound:g} % of error needs {reach(points)} iterations" for bound, points in ends.items())
    x, y = Axis("bound", "error that is allowed", "%"), Axis("points", "iterations that stand for the epoch")
    return tables.curves(rows, x, y=y, by="scenario", frame=Frame(title, "on the GPU as it is"))


def _scattered(epochs: Mapping[str, _Epoch]) -> pd.DataFrame:
    """Errors of projections where times scatter, by epoch."""
    import pandas as pd

    return pd.DataFrame(
        {"scenario": name, **row}
        for name, epoch in epochs.items()
        for row in noise.errors(epoch.asked, epoch.lengths, epoch.seconds)
    )


def _noise_figure(scattered: pd.DataFrame) -> FigureSheet:
    """Error of a projection over the spread of times, for the lengths as logged and drawn anew."""
    most = 100 * scattered.groupby("spread")["error_p90"].max()
    spreads = [scattered["spread"].min(), scattered["spread"].max()]
    ends = ", ".join(f"{most[spread]:.1f} % where they scatter by {100 * spread:.2g} %" for spread in spreads)
    rows = scattered.assign(panel=scattered["scenario"].str.replace("_", " ")).sort_values("spread")
    x, y = (
        Axis("spread", "spread of an iteration's time", "%"),
        Axis("error_p90", "error, nine draws in ten below", "%"),
    )
    frame = Frame(f"The time of an epoch is projected within {ends}", "chosen in one epoch, judged by another", "panel")
    return tables.curves(rows, x, y=y, by="lengths", frame=frame)


def _tailed(epochs: Mapping[str, _Epoch]) -> pd.DataFrame:
    """Representatives by the tail of the lengths, of epochs that have one."""
    import pandas as pd

    return pd.DataFrame(
        {"scenario": name, **row}
        for name, epoch in epochs.items()
        for row in tails.effects(epoch.asked, epoch.tailed, epoch.by_length)
    )


def _tails_figure(tailed: pd.DataFrame) -> FigureSheet:
    """Profiling time saved over how far the longest sentences reach."""
    ends = tailed.loc[[tailed["longest"].idxmin(), tailed["longest"].idxmax()]]
    texts = [f"{row['cut_parallel']:.0f} times where they reach {row['longest']:.0f}" for _, row in ends.iterrows()]
    x, y = (
        Axis("longest", "longest sequence of the epoch"),
        Axis("cut_parallel", "profiling time saved [x]"),
    )
    frame = Frame(f"Profiling is cut {', '.join(texts)} tokens", "all at once; how far sentences reach is assumed")
    return tables.curves(
        tailed.assign(scenario=tailed["scenario"].str.replace("_", " ")), x, y=y, by="scenario", frame=frame
    )


def _recurrent_figure(measured: pd.DataFrame, device: str) -> FigureSheet:
    """Predicted against measured times of recurrent layers."""
    rows = measured.assign(kind="recurrent layers")
    error = predictions.median_error(rows)
    off = "all fitted on" if error is None else f"predicted to {100 * error:.0f} % in the median"
    return predictions.scatter(rows, by="pass", frame=Frame(f"Recurrent layers on {device}: {off}"))


def _recurrent_layers(run: FinishedRun) -> pd.DataFrame:
    """Measured and predicted recurrent layers of the run's device, on which iteration times rest."""
    import pandas as pd

    device, parts = Device.of(run.config["system"]), []
    for rows in measured_tables(str(conf_dir() / "data")):
        prediction = predicted_by("fitted", device, rows) if rows.kind == "recurrent" else None
        if prediction is not None and rows.device == device.gpu.measured_as:
            for index, name in enumerate(rows.passes):
                times = {"measured_s": rows.seconds[:, index], "predicted_s": prediction.seconds[:, index]}
                parts.append(pd.DataFrame({**times, "pass": name, "layer": rows.names, "fitted": prediction.fitted}))
    return pd.concat(parts, ignore_index=True).dropna(subset=["measured_s"]) if parts else pd.DataFrame()


def _published_sections() -> dict[str, Any]:
    """Model, optimizer and kernels of the published throughput of GNMT."""
    published = facts("seqpoint")["throughput"]
    names = {"optimizer": published["optimizer"], "kernels": published["kernels"]}
    sections: dict[str, Any] = {group: option_tree(group, name) for group, name in names.items()}
    return {**sections, "model": {**model_tree(published["model"]), _RATIO: published[_RATIO]}}


def _published_run(row: Mapping[str, str]) -> dict[str, int]:
    """Section `run` of a published row: one length, on which the throughput hardly depends."""
    return {"batch": int(row["batch"]), "sequence_length": facts("seqpoint")["throughput"]["sequence_length"]}


def _tokens_per_s(row: Mapping[str, str], seconds: float) -> tuple[str, float, float]:
    """Length of sentences, and tokens a second: measured, and predicted from the time of a step."""
    published = facts("seqpoint")["throughput"]
    length = published["sequence_length"]
    tokens = int(row["batch"]) * length * (1 + published[_RATIO])  # source and target sentences
    return f"{length} tokens a sentence", float(row["tokens_per_s"]), tokens / seconds


STUDY = SeqPoint()
