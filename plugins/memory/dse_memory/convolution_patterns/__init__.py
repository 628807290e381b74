"""LeNet and convolutions by algorithm and direction, as patterns of addresses (claims of arXiv:1811.08933).

Activity of each SM and each DRAM channel over time, phases, partition camping, and times against DeepBench's on real
GPUs (`convolutions` in this package). These comparisons are this project's; the paper compares LeNet on a GPU for which
there are no measurements here.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dse.errors.terminal import bar
from dse.plots import Axis, Draw, FigureSheet, Frame, predictions, tables
from dse.results.answer import tables_of_winners
from dse.results.claims import ClaimResult
from dse.results.run_folder import FinishedRun, Outputs
from dse.space import get_path, set_path
from dse_memory.backend import MemoryBackend
from dse_memory.convolution_patterns.convolutions import against, errors
from dse_memory.convolutions import ConvolutionPass
from dse_memory.design import SECTIONS, MemoryDesign
from dse_memory.engine import READS, WRITES
from dse_memory.measured import scenarios
from dse_memory.measures import SimulatedApplication, measure, simulate
from dse_memory.phases import Phase, lanes, phases
from dse_memory.simulation import SimulatedCost
from simulators.workloads.model_zoo import option_tree
from studies.plain import Plain, reach

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table

_DIRECTION, _ALGORITHM, _HASH = "application.direction", "application.algorithm", "system.gpu.mapping.channel_hash"
_WHOLE = {"run.requests": 16_000_000, "run.most": 60_000_000}  # so many that kernels run to their end where possible
_LENET = "lenet"
_CALLS = 3  # fewest calls that a claim is judged on
_DIFFERS = 0.1  # difference of shares of the peak from which on phases differ
_PERCENT = 100.0
_NO_REFERENCE = "no public measurement of LeNet on this GPU: there is no reference here"


class ConvolutionPatterns(Plain):
    """Claims, errors against measured convolutions, camping, phases and heat maps."""

    columns = (
        "application.algorithm",
        "application.direction",
        "system.gpu.mapping.channel_hash",
    )
    allows = ("study.data_dir", "measured", "applications")

    def answer(self, outputs: Outputs, table: pd.DataFrame) -> Iterator[Table | str]:
        """Yield what each algorithm does to SMs and channels, and the errors of times that were measured."""
        yield from tables_of_winners(outputs, table)
        if (table["status"] != "ok").all():
            return
        run = FinishedRun(outputs.folder)
        errors_by_system = errors(beside) if len(beside := _against(run, _rows(run))) else {}
        for system, by in errors_by_system.items():
            for hashed, by_group in by.items():
                if error := by_group["all"]:
                    off = f"{_PERCENT * error['median']:.0f} % off in the median of {error['count']}"
                    yield f"times of {system} ({'no hash' if hashed == 'none' else hashed}): {off} that were measured"
        if not errors_by_system:
            yield "times: nothing that was measured is among these points"

    def further(self, run: FinishedRun) -> Mapping[str, ClaimResult]:
        """Findings of every claim."""
        rows = _rows(run)
        return {
            **_lenet(run),
            **_correlation(_against(run, rows)),
            **_phase_finding(_application_runs(run)),
            **_camping_findings(run, rows),
        }

    def figures(self, table: pd.DataFrame, timelines: pd.DataFrame) -> Iterator[tuple[str, Draw]]:
        """Largest camping of each algorithm, by direction and hash."""
        ok = table[table["status"] == "ok"]
        if {_DIRECTION, _ALGORITHM, _HASH} <= set(ok) and len(ok):
            yield "camping", partial(_camping_figure, ok)

    def extras(self, run: FinishedRun) -> Iterator[tuple[str, Any]]:
        """Predictions and errors, kernels, phases, and activity over time."""
        rows = _rows(run)
        beside = _against(run, rows)
        if len(beside):
            yield "predictions", beside
            yield "errors", errors(beside)
            yield "predicted_against_measured", partial(_scatter, beside[beside["hash"] == beside["hash"].iloc[0]])
        app_runs = _application_runs(run)
        if app_runs:
            yield "kernels", _kernels(app_runs)
            yield "phases", [_stretches(app_run) for app_run in app_runs]
        for scenario in dict.fromkeys(app_run.scenario for app_run in app_runs):
            yield from _activity([app_run for app_run in app_runs if app_run.scenario == scenario])
        yield from _camping_extras(run, rows)


def _rows(run: FinishedRun) -> pd.DataFrame:
    """Points with a result; direction, algorithm and hash are '' where an application has none."""
    table = run.outputs.read_table("results")
    ok = table[table["status"] == "ok"].copy()
    for name, path in (("direction", _DIRECTION), ("algorithm", _ALGORITHM), ("hash", _HASH)):
        ok[name] = ok[path].astype(object).where(ok[path].notna(), "")
    return ok


def _against(run: FinishedRun, rows: pd.DataFrame) -> pd.DataFrame:
    """Measured convolutions of the run's devices beside simulated ones."""
    return against(*_measured_sources(run), rows)


def _measured_sources(run: FinishedRun) -> tuple[Sequence[str], str | None]:
    """Memory systems whose measured convolutions are scenarios, and the folder of tables."""
    return run.config.get("measured") or [], get_path(run.config, "study.data_dir")


# Claims and pictures


def _correlation(beside: pd.DataFrame) -> dict[str, ClaimResult]:
    """Correlation of per-kernel times: not testable; its text has the errors against the reference that there is."""
    text = "needs the paper's kernels on its GPU, for which there are no times"
    if len(beside):
        by_system = {
            f"{system}{'' if hashed == 'none' else f' ({hashed})'}": by_group["all"]
            for system, by in errors(beside).items()
            for hashed, by_group in by.items()
            if by_group["all"]
        }
        numbers = ", ".join(f"{name} {_error_text(error)}" for name, error in by_system.items())
        reference = "median error and correlation of logarithms against measured convolutions, not the paper's"
        text = f"{text}; {reference}: {numbers}"
    return {"gpgpusim.kernel_corr": ClaimResult(None, text)}


def _error_text(error: Mapping[str, float]) -> str:
    """Median error as text, with the correlation if there are more than two times."""
    median = f"{_PERCENT * error['median']:.0f} %"
    # two points always correlate
    return f"{median} and {error['log_correlation']:.2f}" if error["count"] > 2 else median


# Applications that are simulated once more, for figures


@dataclass(frozen=True)
class _ApplicationRun:
    """Simulated run of an application by one algorithm: metrics, activity and phases."""

    scenario: str
    algorithm: str
    design: MemoryDesign
    simulated: SimulatedApplication
    metrics: Mapping[str, float]
    phases: tuple[Phase, ...]

    @property
    def file_label(self) -> dict[str, Any]:
        """Labels of the run in files."""
        return {"scenario": self.scenario, "algorithm": self.algorithm}

    @property
    def lanes(self) -> tuple[Any, Any, Any]:
        """Shares by SM and channel, see `dse_memory.phases`."""
        return lanes(self.simulated.machine.activity(), self.design.system)


@lru_cache(maxsize=1)
def _trees(run: FinishedRun) -> Mapping[str, Mapping[str, Any]]:
    """Sections of every scenario."""
    sections = {name: run.config[name] for name in (*SECTIONS, "applications", "measured") if name in run.config}
    return MemoryBackend().scenarios({**sections, "data_dir": get_path(run.config, "study.data_dir")})


def _design(run: FinishedRun, scenario: str, changes: Mapping[str, Any]) -> MemoryDesign | None:
    """Design of a scenario with the knobs of a point; None where it breaks a rule."""
    backend, tree = MemoryBackend(), copy.deepcopy(dict(_trees(run)[scenario]))
    for path, value in changes.items():
        section, _, field = path.partition(".")
        if field == "name":
            tree[section] = option_tree(section, str(value))
        elif get_path(tree, path) is not None:
            set_path(tree, path, value.item() if isinstance(value, np.generic) else value)
    design = backend.design(tree)
    return None if backend.problems(design) else design


def _simulate_application(run: FinishedRun, scenario: str, changes: Mapping[str, Any]) -> _ApplicationRun | None:
    design = _design(run, scenario, changes)
    if design is None:
        return None
    simulated, algorithm = simulate(design), getattr(design.application, "algorithm", None) or ""
    run_phases = tuple(phases(simulated.machine.activity(), design.system))
    return _ApplicationRun(scenario, algorithm, design, simulated, measure(design, simulated), run_phases)


@lru_cache(maxsize=1)
def _application_runs(run: FinishedRun) -> tuple[_ApplicationRun, ...]:
    """Simulate scenarios that are not measured layers, by each algorithm searched, as completely as possible."""
    rows, layers = _rows(run), scenarios(*_measured_sources(run))
    points = rows[~rows["scenario"].isin(list(layers))]
    pairs = dict.fromkeys(zip(points["scenario"].astype(str), points["algorithm"], strict=True))
    app_runs = list[_ApplicationRun]()
    with bar("simulating whole applications for figures", len(pairs), "runs") as advance:
        for scenario, algorithm in pairs:
            app_run = _simulate_application(run, scenario, {**_WHOLE, _ALGORITHM: algorithm})
            app_runs += [app_run] if app_run is not None else []
            advance(1)
    return tuple(app_runs)


def _stretches(app_run: _ApplicationRun) -> dict[str, Any]:
    """Phases of a run, the share simulated, and its time with launches."""
    metrics = {name: app_run.metrics[name] for name in ("simulated", "time_s")}
    return {**app_run.file_label, **metrics, "phases": [asdict(phase) for phase in app_run.phases]}


def _kernels(app_runs: tuple[_ApplicationRun, ...]) -> pd.DataFrame:
    """Table `kernels`: each kernel of each run, with its time without the launch, and that of the launch."""
    import pandas as pd

    rows = []
    for app_run in app_runs:
        system = app_run.design.system
        for place, (cost, times) in enumerate(app_run.simulated.costs):
            moved = _dram_bytes(app_run, cost)
            times_s = {"seconds": cost.seconds, "launch_s": system.gpu.launch_s, "launches": times}
            shares = {
                "compute_share": min(1.0, cost.busy_s / (system.gpu.num_cus * cost.seconds)),
                "bandwidth_share": moved / (cost.seconds * system.gpu.dram.bytes_per_s),
                "simulated": cost.share,
            }
            rows.append(
                {**app_run.file_label, "place": place, "kernel": cost.name, **times_s, "dram_bytes": moved, **shares}
            )
    return pd.DataFrame(rows)


def _camping_figure(ok: pd.DataFrame) -> FigureSheet:
    """Largest camping of each algorithm, by direction and hash."""
    named = {name: ok[path].astype(str) for name, path in (("hash", _HASH), ("algorithm", _ALGORITHM))}
    direction = ok[_DIRECTION].astype(object)
    rows = ok.assign(**named, direction=direction.where(direction.notna(), "all layers"))  # a network has no single one
    most = rows.groupby(["direction", "algorithm", "hash"], sort=False)["camping"].max().reset_index()
    most = most.astype({"hash": object})
    by_hash = most.groupby("hash", sort=False)["camping"].max()
    title = "The busiest channel has up to " + ", ".join(
        f"{value:.1f}x the mean (hash: {str(name).replace('_', ' ')})" for name, value in by_hash.items()
    )
    axis = Axis("camping", "the busiest channel over the mean [x]", centre=1.0)
    frame = Frame(title, f"in the cells: {axis.label}, the most of all layers", "direction")
    return tables.heat(most, axis, x=Axis("hash", "hash of channels"), y="algorithm", frame=frame)


def _scatter(beside: pd.DataFrame) -> FigureSheet:
    """Predicted against measured times of convolutions."""
    rows = beside.assign(kind=beside["system"])
    error = predictions.median_error(rows)
    off = "all fitted on" if error is None else f"{100 * error:.0f} % off in the median"
    title = f"Simulated convolutions are {off}, on layers that constants were not fitted on"
    return predictions.scatter(rows, by="algorithm", frame=Frame(title, "colour: fastest algorithm (simulated)"))


def _activity(app_runs: list[_ApplicationRun]) -> Iterator[tuple[str, Draw]]:
    """Heat maps of SMs and channels for one application, with a panel for each algorithm."""
    first = app_runs[0]
    note = "shade: share of what it could do; dotted: phases"
    if first.scenario == _LENET:
        names = "SMs: lines asked for", "SMs: computing", "channels of DRAM"
        panels = dict(zip(names, first.lanes, strict=True))
        title = (
            f"{first.scenario}: channels of DRAM work {_busy([first], 2)}, SMs compute {_busy([first], 1)} of the time"
        )
        by = dict.fromkeys(panels, first)
        yield _LENET, partial(_raster, panels, by, lane="SM, or channel of DRAM", frame=Frame(title, note))
        return
    by = {app_run.algorithm: app_run for app_run in app_runs}
    for place, end, lane, what in (
        (1, "sms", "SM", "SMs compute"),
        (2, "channels", "channel of DRAM", "channels are busy"),
    ):
        panels = {name: app_run.lanes[place] for name, app_run in by.items()}
        frame = Frame(f"{first.scenario}: {what} {_busy(app_runs, place)} of the time, by algorithm", note)
        yield f"{first.scenario}_{end}", partial(_raster, panels, by, lane=lane, frame=frame)


def _busy(app_runs: list[_ApplicationRun], place: int) -> str:
    """Mean share of lanes, from the least to the largest."""
    return reach([_PERCENT * float(np.mean(app_run.lanes[place])) for app_run in app_runs], " %")


def _raster(panels: Mapping[str, Any], by: Mapping[str, _ApplicationRun], *, lane: str, frame: Frame) -> FigureSheet:
    seconds = {name: by[name].simulated.machine.activity().seconds for name in panels}
    marks = {name: [phase.end_s for phase in by[name].phases[:-1]] for name in panels}
    return tables.raster(panels, seconds, lane=lane, frame=frame, marks=marks)


def _lenet(run: FinishedRun) -> dict[str, ClaimResult]:
    """Share of launches in LeNet's time; its time itself has no reference."""
    absent = {name: ClaimResult(None, _NO_REFERENCE) for name in ("gpgpusim.lenet_v1", "gpgpusim.lenet_ispass")}
    app_run = next((app_run for app_run in _application_runs(run) if app_run.scenario == _LENET), None)
    if app_run is None:
        return {**absent, "gpgpusim.floors": ClaimResult(None, f"needs applications=[{_LENET}]")}
    share, time_s, gpu = app_run.metrics["launch_share"], app_run.metrics["time_s"], app_run.design.system.gpu
    roofline_s = sum(_roof(app_run, cost) * times for cost, times in app_run.simulated.costs)
    launched = f"{app_run.metrics['kernels']:.0f} launches of {gpu.launch_s * 1e6:.1f} us, by {app_run.algorithm}"
    text = f"{launched}; with all that is above the roofline {_PERCENT * (1 - roofline_s / time_s):.0f} %"
    text += "; arithmetic is at its peak rate: kernels in PTX (study=gpgpusim) last longer"
    return {**absent, "gpgpusim.floors": ClaimResult(_PERCENT * share, text, "kernels are longer than their launches")}


def _roof(app_run: _ApplicationRun, cost: SimulatedCost) -> float:
    """Roofline time of a kernel [s]: arithmetic or DRAM traffic alone."""
    system = app_run.design.system
    return max(cost.busy_s / system.gpu.num_cus, _dram_bytes(app_run, cost) / system.gpu.dram.bytes_per_s)


def _dram_bytes(app_run: _ApplicationRun, cost: SimulatedCost) -> float:
    """Bytes that DRAM reads and writes for a kernel."""
    return float(cost.totals[READS] + cost.totals[WRITES]) * app_run.design.system.gpu.line_bytes


def _phase_finding(app_runs: tuple[_ApplicationRun, ...]) -> dict[str, ClaimResult]:
    """Phases of convolutions: most must have two that differ both in SM and in DRAM activity."""
    calls = [app_run for app_run in app_runs if isinstance(app_run.design.application, ConvolutionPass)]
    if len(calls) < _CALLS:
        return {
            "gpgpusim.phases": ClaimResult(None, f"needs {_CALLS} convolutions, such as conv_3x3 by all algorithms")
        }
    several = [app_run for app_run in calls if _differ(app_run.phases)]
    counts = ", ".join(f"{app_run.scenario} by {app_run.algorithm} {len(app_run.phases)}" for app_run in calls)
    points = f"{_PERCENT * _DIFFERS:.0f} points"
    text = f"{len(several)} of {len(calls)} calls have two that differ by {points} in SMs and in DRAM; phases: {counts}"
    most = 2 * len(several) > len(calls)
    return {"gpgpusim.phases": ClaimResult(most, text, "most calls are alike from beginning to end")}


def _differ(run_phases: tuple[Phase, ...]) -> bool:
    pairs = ((phase, other) for phase in run_phases for other in run_phases)
    return any(
        max(abs(phase.requests - other.requests), abs(phase.computing - other.computing)) > _DIFFERS
        and abs(phase.bandwidth - other.bandwidth) > _DIFFERS
        for phase, other in pairs
    )


# Camping


def _camping_by_hash(run: FinishedRun, rows: pd.DataFrame) -> pd.DataFrame:
    """Table `camping`: camping and time of each point with a hash, and those without (`plain`, `plain_s`)."""
    keys = ["scenario", "direction", "algorithm", *_other_knobs(run)]
    ours = rows[[*keys, "hash", "camping", "time_s"]].astype({"scenario": str})
    plain = ours[ours["hash"] == "none"].drop(columns="hash").rename(columns={"camping": "plain", "time_s": "plain_s"})
    return ours[ours["hash"] != "none"].merge(plain, on=keys).reset_index(drop=True)


def _other_knobs(run: FinishedRun) -> list[str]:
    """Knobs searched beside direction, algorithm and hash."""
    return [path for path in run.knobs if path not in (_DIRECTION, _ALGORITHM, _HASH)]


def _camping_findings(run: FinishedRun, rows: pd.DataFrame) -> dict[str, ClaimResult]:
    """Largest camping of convolutions without a hash, and camping of the same ones with a hash."""
    names = ("gpgpusim.camping", "gpgpusim.camping_no_hash", "gpgpusim.camping_hash")
    points = _camping_by_hash(run, rows)
    if points.empty or not run.config.get("measured"):
        absent = f"needs {_HASH} searched (none, and a hash) and measured convolutions, such as measured=[p100]"
        return dict.fromkeys(names, ClaimResult(None, absent))
    least, even = _bound(names[1], 0), _bound(names[2], 1)
    worst, camps = points.sort_values("plain").iloc[-1], points[points["plain"] > least]
    text = f"{_place(worst)}; {len(camps)} of {len(points)} camp by more than {least:g}"
    cause = "no stride of these layers meets few channels"
    findings = {
        names[0]: ClaimResult(not camps.empty, text, cause),
        names[1]: ClaimResult(float(worst["plain"]), text, cause),
    }
    if camps.empty:
        return {**findings, names[2]: ClaimResult(None, "nothing camps without a hash")}
    gain, left = camps["plain_s"] / camps["time_s"], camps.sort_values("camping").iloc[-1]
    within, hashes = int((camps["camping"] <= even).sum()), ", ".join(sorted(set(points["hash"])))
    text = (
        f"{_place(left)}; by {hashes} {within} of the {len(camps)} that camp without are at most {even:g}; they run "
        f"{gain.min():.2f} to {gain.max():.2f}x as fast; of all {len(points)}, up to {points['camping'].max():.2f}"
    )
    cause = "the hash does not spread the strides of this call"
    return {**findings, names[2]: ClaimResult(float(left["camping"]), text, cause)}


def _bound(claim_id: str, end: int) -> float:
    """End of a claim's tolerance: the least that counts as camping, or the most that counts as even use of channels."""
    tolerance = next(claim.tolerance for claim in STUDY.claims() if claim.id == claim_id)
    assert tolerance is not None
    return float(tolerance[end])


def _place(point: pd.Series[Any]) -> str:
    return " ".join(filter(None, [f"{point['scenario']},", point["direction"], f"by {point['algorithm']}"]))


def _camping_extras(run: FinishedRun, rows: pd.DataFrame) -> Iterator[tuple[str, Any]]:
    """Camping of every point by hash, and the channels of the one that camps most."""
    points = _camping_by_hash(run, rows)
    if points.empty:
        return
    yield "camping", points
    worst = points.sort_values("plain").iloc[-1]
    other_knobs = {path: worst[path] for path in _other_knobs(run)}
    knobs = {_DIRECTION: worst["direction"], _ALGORITHM: worst["algorithm"], **other_knobs}
    by = dict[str, _ApplicationRun]()
    for hashed in ("none", *dict.fromkeys(points["hash"])):
        app_run = _simulate_application(run, str(worst["scenario"]), {**knobs, _HASH: hashed})
        if app_run is not None:
            by[f"hash of channels: {hashed.replace('_', ' ')}"] = app_run
    panels = {name: app_run.lanes[2] for name, app_run in by.items()}
    factors = [f"{app_run.metrics['camping']:.2f}x" for app_run in by.values()]
    title = f"Where channels camp most, the busiest has {' or '.join(factors)} the mean, by hash"
    frame = Frame(title, f"{_place(worst)}; shade: share of its bandwidth; dotted: phases")
    yield "camping_channels", partial(_raster, panels, by, lane="channel of DRAM", frame=frame)


STUDY = ConvolutionPatterns()
