"""Detailed simulation of cuDNN's kernels (arXiv:1811.08933): LeNet and convolutions by algorithm and direction.

What each SM and each channel of DRAM does over time, phases, partition camping, and times against DeepBench's of real
GPUs (`studies.convolutions`). These comparisons are this project's; the paper compares LeNet on a GPU of which there
are no measurements here.
"""

from __future__ import annotations

import copy
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dse.plots import Axis, tables
from dse.progress import bar
from dse.results.claims import Claim, Finding, read
from dse.results.finished_run import Finished
from dse.space import get_path, set_path
from simulators.memory.backend import MemoryBackend
from simulators.memory.convolutions import Layer
from simulators.memory.design import SECTIONS, Design
from simulators.memory.engine import READS, WRITES
from simulators.memory.measured import scenarios
from simulators.memory.measures import Simulated, measure, simulate
from simulators.memory.phases import Phase, lanes, phases
from simulators.memory.simulation import Cost
from simulators.workloads.model_zoo import option_tree
from studies.convolutions import against, errors
from studies.plain import Plain

if TYPE_CHECKING:
    import pandas as pd

    from dse.plots import Figure

_DIRECTION, _ALGORITHM, _HASH = "application.direction", "application.algorithm", "system.mapping.channel_hash"
_WHOLE = {"run.requests": 16_000_000, "run.most": 60_000_000}  # all that a kernel may take
_LENET = "lenet"
_CALLS = 3  # of which something can be said
_DIFFERS = 0.1  # of what the machine could do, from which on phases differ
_PERCENT = 100.0
_NO_REFERENCE = "no public measurement of LeNet on this GPU: there is no reference here"


class Gpgpusim(Plain):
    """Claims, errors against measured convolutions, camping, phases and heat maps."""

    columns = (
        "application.algorithm",
        "application.direction",
        "system.mapping.channel_hash",
    )
    allows = ("study.data_dir", "measured", "applications")

    def claims(self) -> list[Claim]:
        """What both abstracts say, and recollection, as retyped beside this module."""
        return read(Path(__file__).with_suffix(".yaml"))

    def further(self, run: Finished) -> Mapping[str, Finding]:
        """Ours for every claim."""
        rows = _rows(run)
        return {**_lenet(run), **_correlation(_against(run, rows)), **_phased(_shown(run)), **_camping(run, rows)}

    def figures(self, table: pd.DataFrame, timelines: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
        """The most that each algorithm camps, by direction and hash."""
        ok = table[table["status"] == "ok"]
        if not {_DIRECTION, _ALGORITHM, _HASH} <= set(ok):
            return
        named = {name: ok[path].astype(str) for name, path in (("hash", _HASH), ("algorithm", _ALGORITHM))}
        ok = ok.assign(**named, direction=ok[_DIRECTION].astype(object))
        most = ok.groupby(["direction", "algorithm", "hash"], sort=False)["camping"].max().reset_index()
        if len(most):
            axis = Axis("camping", "the busiest channel over the mean, the most of all layers")
            most = most.astype({"hash": object})
            yield "camping", tables.heat(most, axis, x="hash", y="algorithm", panel="direction")

    def extras(self, run: Finished) -> Iterator[tuple[str, Any]]:
        """Predictions and errors, kernels, phases, and who did what when."""
        from dse.plots import predictions

        rows = _rows(run)
        beside = _against(run, rows)
        if len(beside):
            yield "predictions", beside
            yield "errors", errors(beside)
            own = beside[beside["hash"] == beside["hash"].iloc[0]].assign(kind=lambda held: held["system"])
            title = "fastest algorithm (simulated); on layers that constants were not fitted on"
            yield "predicted_against_measured", predictions.scatter(own, by="algorithm", title=title)
        shown = _shown(run)
        if shown:
            yield "kernels", _kernels(shown)
            yield "phases", [_stretches(one) for one in shown]
        for scenario in dict.fromkeys(one.scenario for one in shown):
            yield from _activity([one for one in shown if one.scenario == scenario])
        yield from _camped(run, rows)


def _rows(run: Finished) -> pd.DataFrame:
    """Points with a result; directions and algorithms of what has none are ''."""
    table = run.outputs.read_table("results")
    ok = table[table["status"] == "ok"].copy()
    for name, path in (("direction", _DIRECTION), ("algorithm", _ALGORITHM), ("hash", _HASH)):
        ok[name] = ok[path].astype(object).where(ok[path].notna(), "")
    return ok


def _against(run: Finished, rows: pd.DataFrame) -> pd.DataFrame:
    """Measured convolutions of the run's devices beside its own."""
    return against(*_measured(run), rows)


def _measured(run: Finished) -> tuple[Sequence[str], str | None]:
    """Memory systems of which measured convolutions are scenarios, and the folder of tables."""
    return run.config.get("measured") or [], get_path(run.config, "study.data_dir")


# Claims and pictures


def _correlation(beside: pd.DataFrame) -> dict[str, Finding]:
    """How per-kernel times correlate, told of the reference that there is."""
    told = "needs the paper's kernels on its GPU, of which there are no times"
    if len(beside):
        each = {
            f"{system}{'' if hashed == 'none' else f' ({hashed})'}": one["all"]
            for system, by in errors(beside).items()
            for hashed, one in by.items()
            if one["all"]
        }
        numbers = ", ".join(f"{name} {_told(one)}" for name, one in each.items())
        reference = "median error and correlation of logarithms against measured convolutions, not the paper's"
        told = f"{told}; {reference}: {numbers}"
    return {"gpgpusim.kernel_corr": Finding(None, told)}


def _told(one: Mapping[str, float]) -> str:
    """Errors in words; of three times and more, with their correlation."""
    median = f"{_PERCENT * one['median']:.0f} %"
    return f"{median} and {one['log_correlation']:.2f}" if one["count"] > 2 else median


# What is simulated once more, to be looked at


@dataclass(frozen=True)
class _Shown:
    """One run of an application: by which algorithm, its metrics, and when who did what."""

    scenario: str
    algorithm: str
    design: Design
    simulated: Simulated
    metrics: Mapping[str, float]
    phases: tuple[Phase, ...]

    @property
    def file_label(self) -> dict[str, Any]:
        """What it is called in files."""
        return {"scenario": self.scenario, "algorithm": self.algorithm}

    @property
    def lanes(self) -> tuple[Any, Any, Any]:
        """Shares by SM and channel, as of `simulators.memory.phases`."""
        return lanes(self.simulated.machine.activity(), self.design.system)


@lru_cache(maxsize=1)
def _trees(run: Finished) -> Mapping[str, Mapping[str, Any]]:
    """The sections of every scenario."""
    known = {name: run.config[name] for name in (*SECTIONS, "applications", "measured") if name in run.config}
    return MemoryBackend().scenarios({**known, "data_dir": get_path(run.config, "study.data_dir")})


def _design(run: Finished, scenario: str, changes: Mapping[str, Any]) -> Design | None:
    """The design of a scenario with knobs as they were in a point; None where it breaks a rule."""
    backend, found = MemoryBackend(), copy.deepcopy(dict(_trees(run)[scenario]))
    for path, value in changes.items():
        section, _, field = path.partition(".")
        if field == "name":
            found[section] = option_tree(section, str(value))
        elif get_path(found, path) is not None:
            set_path(found, path, value.item() if isinstance(value, np.generic) else value)
    design = backend.design(found)
    return None if backend.problems(design) else design


def _simulated(run: Finished, scenario: str, changes: Mapping[str, Any]) -> _Shown | None:
    design = _design(run, scenario, changes)
    if design is None:
        return None
    found, algorithm = simulate(design), getattr(design.application, "algorithm", None) or ""
    own = tuple(phases(found.machine.activity(), design.system))
    return _Shown(scenario, algorithm, design, found, measure(design, found), own)


@lru_cache(maxsize=1)
def _shown(run: Finished) -> tuple[_Shown, ...]:
    """What is no measured layer, as its file says, by each algorithm that was searched; simulated as far as may be."""
    rows, layers = _rows(run), scenarios(*_measured(run))
    points = rows[~rows["scenario"].isin(list(layers))]
    pairs = dict.fromkeys(zip(points["scenario"].astype(str), points["algorithm"], strict=True))
    found = list[_Shown]()
    with bar("simulating applications whole, for figures", len(pairs), "runs") as advance:
        for scenario, algorithm in pairs:
            one = _simulated(run, scenario, {**_WHOLE, _ALGORITHM: algorithm})
            found += [one] if one is not None else []
            advance(1)
    return tuple(found)


def _stretches(one: _Shown) -> dict[str, Any]:
    """Phases of a run, what of it was simulated, and its time with launches."""
    told = {name: one.metrics[name] for name in ("simulated", "time_s")}
    return {**one.file_label, **told, "phases": [asdict(phase) for phase in one.phases]}


def _kernels(shown: tuple[_Shown, ...]) -> pd.DataFrame:
    """`kernels`: each kernel of each run, with its time without the launch, and the launch's."""
    import pandas as pd

    rows = []
    for one in shown:
        system = one.design.system
        for place, (cost, times) in enumerate(one.simulated.costs):
            moved = _moved(one, cost)
            times_s = {"seconds": cost.seconds, "launch_s": system.gpu.launch_s, "launches": times}
            shares = {
                "compute_share": min(1.0, cost.busy_s / (system.gpu.num_cus * cost.seconds)),
                "bandwidth_share": moved / (cost.seconds * system.dram.bytes_per_s),
                "simulated": cost.share,
            }
            rows.append(
                {**one.file_label, "place": place, "kernel": cost.name, **times_s, "dram_bytes": moved, **shares}
            )
    return pd.DataFrame(rows)


def _activity(shown: list[_Shown]) -> Iterator[tuple[str, Figure]]:
    """Heat maps of one application: its SMs and channels; of several algorithms a figure each."""
    first = shown[0]
    label = "share of what it could do; dotted: phases"
    if first.scenario == _LENET:
        shown = [first]
        names = "SMs: lines asked for", "SMs: computing", "channels of DRAM"
        named = dict(zip(names, first.lanes, strict=True))
        yield _LENET, _raster(named, dict.fromkeys(named, first), lane="SM, or channel of DRAM", label=label)
        return
    by = {one.algorithm: one for one in shown}
    sms, channels = ({name: one.lanes[place] for name, one in by.items()} for place in (1, 2))
    yield f"{first.scenario}_sms", _raster(sms, by, lane="SM", label=f"computing, {label}")
    yield f"{first.scenario}_channels", _raster(channels, by, lane="channel of DRAM", label=f"bandwidth, {label}")


def _raster(panels: Mapping[str, Any], by: Mapping[str, _Shown], *, lane: str, label: str) -> Figure:
    seconds = {name: by[name].simulated.machine.activity().seconds for name in panels}
    marks = {name: [phase.end_s for phase in by[name].phases[:-1]] for name in panels}
    return tables.raster(panels, seconds, lane=lane, label=label, marks=marks)


def _lenet(run: Finished) -> dict[str, Finding]:
    """Launches' share of LeNet's time, and what cannot be said of its time."""
    absent = {name: Finding(None, _NO_REFERENCE) for name in ("gpgpusim.lenet_v1", "gpgpusim.lenet_ispass")}
    one = next((one for one in _shown(run) if one.scenario == _LENET), None)
    if one is None:
        return {**absent, "gpgpusim.floors": Finding(None, f"needs applications=[{_LENET}]")}
    share, time_s, gpu = one.metrics["launch_share"], one.metrics["time_s"], one.design.system.gpu
    whole = sum(_roof(one, cost) * times for cost, times in one.simulated.costs)
    launched = f"{one.metrics['kernels']:.0f} launches of {gpu.launch_s * 1e6:.1f} us, by {one.algorithm}"
    told = f"{launched}; with all that is above the roofline {_PERCENT * (1 - whole / time_s):.0f} %"
    return {**absent, "gpgpusim.floors": Finding(_PERCENT * share, told, "kernels are longer than their launches")}


def _roof(one: _Shown, cost: Cost) -> float:
    """Time of a kernel [s] were arithmetic or DRAM the only limit."""
    system = one.design.system
    return max(cost.busy_s / system.gpu.num_cus, _moved(one, cost) / system.dram.bytes_per_s)


def _moved(one: _Shown, cost: Cost) -> float:
    """Bytes that DRAM reads and writes for a kernel."""
    return float(cost.totals[READS] + cost.totals[WRITES]) * one.design.system.line_bytes


def _phased(shown: tuple[_Shown, ...]) -> dict[str, Finding]:
    """Whether convolutions have two phases that differ both in what SMs do and in what DRAM does."""
    calls = [one for one in shown if isinstance(one.design.application, Layer)]
    if len(calls) < _CALLS:
        return {"gpgpusim.phases": Finding(None, f"needs {_CALLS} convolutions, such as conv_3x3 by all algorithms")}
    several = [one for one in calls if _differ(one.phases)]
    each = ", ".join(f"{one.scenario} by {one.algorithm} {len(one.phases)}" for one in calls)
    points = f"{_PERCENT * _DIFFERS:.0f} points"
    told = f"{len(several)} of {len(calls)} calls have two that differ by {points} in SMs and in DRAM; phases: {each}"
    most = 2 * len(several) > len(calls)
    return {"gpgpusim.phases": Finding(most, told, "most calls are alike from beginning to end")}


def _differ(found: tuple[Phase, ...]) -> bool:
    pairs = ((one, other) for one in found for other in found)
    return any(
        max(abs(one.requests - other.requests), abs(one.computing - other.computing)) > _DIFFERS
        and abs(one.bandwidth - other.bandwidth) > _DIFFERS
        for one, other in pairs
    )


# Camping


def _hashed(run: Finished, rows: pd.DataFrame) -> pd.DataFrame:
    """`camping`: a row for each point with a hash, its camping and time beside those without (`plain`, `plain_s`)."""
    keys = ["scenario", "direction", "algorithm", *_others(run)]
    ours = rows[[*keys, "hash", "camping", "time_s"]].astype({"scenario": str})
    plain = ours[ours["hash"] == "none"].drop(columns="hash").rename(columns={"camping": "plain", "time_s": "plain_s"})
    return ours[ours["hash"] != "none"].merge(plain, on=keys).reset_index(drop=True)


def _others(run: Finished) -> list[str]:
    """What was searched beside direction, algorithm and hash."""
    return [path for path in run.knobs if path not in (_DIRECTION, _ALGORITHM, _HASH)]


def _camping(run: Finished, rows: pd.DataFrame) -> dict[str, Finding]:
    """The most that a convolution camps without a hash, and how much those that do camp with one."""
    names = ("gpgpusim.camping", "gpgpusim.camping_no_hash", "gpgpusim.camping_hash")
    held = _hashed(run, rows)
    if held.empty or not run.config.get("measured"):
        absent = f"needs {_HASH} searched (none, and a hash) and measured convolutions, such as measured=[mem_p100]"
        return dict.fromkeys(names, Finding(None, absent))
    least, even = _bound(names[1], 0), _bound(names[2], 1)
    worst, camps = held.sort_values("plain").iloc[-1], held[held["plain"] > least]
    told = f"{_place(worst)}; {len(camps)} of {len(held)} camp by more than {least:g}"
    cause = "no stride of these layers meets few channels"
    found = {
        names[0]: Finding(not camps.empty, told, cause),
        names[1]: Finding(float(worst["plain"]), told, cause),
    }
    if camps.empty:
        return {**found, names[2]: Finding(None, "nothing camps without a hash")}
    gain, left = camps["plain_s"] / camps["time_s"], camps.sort_values("camping").iloc[-1]
    within, hashes = int((camps["camping"] <= even).sum()), ", ".join(sorted(set(held["hash"])))
    told = (
        f"{_place(left)}; by {hashes} {within} of the {len(camps)} that camp without are at most {even:g}; they run "
        f"{gain.min():.2f} to {gain.max():.2f}x as fast; of all {len(held)}, up to {held['camping'].max():.2f}"
    )
    cause = "the hash does not spread the strides of this call"
    return {**found, names[2]: Finding(float(left["camping"]), told, cause)}


def _bound(claim: str, end: int) -> float:
    """An end of a claim's tolerance: from where on a call camps, and up to where channels are used evenly."""
    tolerance = next(one.tolerance for one in STUDY.claims() if one.id == claim)
    assert tolerance is not None
    return float(tolerance[end])


def _place(point: pd.Series[Any]) -> str:
    return " ".join(filter(None, [f"{point['scenario']},", point["direction"], f"by {point['algorithm']}"]))


def _camped(run: Finished, rows: pd.DataFrame) -> Iterator[tuple[str, Any]]:
    """Camping of every point by hash, and the channels of the one that camps most."""
    held = _hashed(run, rows)
    if held.empty:
        return
    yield "camping", held
    worst = held.sort_values("plain").iloc[-1]
    others = {path: worst[path] for path in _others(run)}
    knobs = {_DIRECTION: worst["direction"], _ALGORITHM: worst["algorithm"], **others}
    by = dict[str, _Shown]()
    for hashed in ("none", *dict.fromkeys(held["hash"])):
        one = _simulated(run, str(worst["scenario"]), {**knobs, _HASH: hashed})
        if one is not None:
            factor = f"channel_hash {hashed}: {one.metrics['camping']:.2f}x"
            by["\n".join([*textwrap.wrap(_place(worst), 44), factor])] = one
    panels, label = {name: one.lanes[2] for name, one in by.items()}, "share of its bandwidth; dotted: phases"
    yield "camping_channels", _raster(panels, by, lane="channel of DRAM", label=label)


STUDY = Gpgpusim()
