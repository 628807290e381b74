"""`profile import` of one rank: what a run hid and waited for, as the profiler recorded it and as it is replayed.

Written into the folder:

    kernels.parquet   a row for each kernel: what was recorded, its class, when it ran in the replay, what it waited for
    profile.yaml      where it comes from, its constants, times and shares, what was dropped
    figures/timeline  streams over time, recorded and replayed; `timeline.json` opens in Perfetto
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dse.backend import Interval
from dse.results.run_folder import Outputs
from dse.results.words import cell
from dse_traces.commands.lines import communication_lines, share_of_run, unknown_lines
from dse_traces.profile.kernels import Profile
from dse_traces.profile.replay import Replayed
from dse_traces.profile.unnamed_kernels import unknown_summary
from dse_traces.profile.waits import CAUSES, OTHER_STREAM, SMS, UNKNOWN

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table

_INFERRED = (OTHER_STREAM, SMS, UNKNOWN)
_SHOWN = 8  # classes of kernels in the table
_BARS = 1000  # that fit beside one another into the picture


def answer(done: Replayed) -> Iterator[Table | str]:
    """Yield what a person wants to know of a profile, the most important first."""
    profile, recorded, replayed = done.profile, done.recorded, done.replayed
    device = f" of {profile.device}" if profile.device else ""
    size = f"{len(profile):,} kernels on {profile.streams.max() + 1} streams{device}"
    lost = f"; lost: {profile.lost}" if profile.lost else ""
    yield f"{profile.source}: {size}, {cell(recorded.span_s, 's')}{_iterations(profile)}{lost}"
    # whole graphs may communicate inside: "nothing communicates" would be wrong
    if recorded.collective_s or not profile.is_graph.any():
        yield from communication_lines(profile, recorded)
    yield from _graphs(profile)
    yield f"nothing runs for {cell(recorded.idle_s, 's')}, {share_of_run(recorded.idle_s, recorded.span_s)}"
    yield _classes(profile)
    yield from unknown_lines(profile)
    yield from _waited(done)
    hidden = f", {100 * replayed.hidden:.1f} % hidden" if recorded.collective_s else ""
    yield (
        f"replay: {cell(replayed.span_s, 's')}, {100 * done.span_error:+.2f} %{hidden}, from recorded times and order "
        "and inferred waits"
    )
    for reason, count in profile.dropped.items():
        yield f"dropped: {count:,} {reason}"


def _graphs(profile: Profile) -> Iterator[str]:
    """Lines on CUDA graphs that were recorded without their kernels."""
    if count := int(profile.is_graph.sum()):
        seconds = float(profile.seconds[profile.is_graph].sum())
        yield (
            f"{count:,} whole CUDA graphs run for {cell(seconds, 's')}: the GPU is busy with kernels that were not "
            "recorded, so what communicates there, and what hides it, is unknown (record them: "
            "nsys profile --cuda-graph-trace=node)"
        )


def _iterations(profile: Profile) -> str:
    """How many iterations were marked, and how long they take."""
    if not profile.iterations:
        return ""
    lengths = np.array([end - start for start, end in profile.iterations])
    spread = f" ({cell(lengths.min(), 's')} to {cell(lengths.max(), 's')})" if len(lengths) > 1 else ""
    # the median: the first iteration often compiles
    return f"; {len(lengths)} iterations of {cell(float(np.median(lengths)), 's')} in the median{spread}"


def _classes(profile: Profile) -> Table:
    """Kernels and time by class, most time first."""
    from rich.table import Table

    shown = Table(box=None, pad_edge=False)
    shown.add_column("class of kernels")
    for name in ("kernels", "time", "of all kernels"):
        shown.add_column(name, justify="right")
    groups = profile.kernels.groupby("kind")["seconds"].agg(["size", "sum"]).sort_values("sum", ascending=False)
    for kind, row in groups.head(_SHOWN).iterrows():
        share = 100 * row["sum"] / profile.seconds.sum()
        shown.add_row(str(kind), f"{int(row['size']):,}", cell(float(row["sum"]), "s"), f"{share:.1f} %")
    return shown


def _waited(done: Replayed) -> Iterator[str]:
    """Lines on what kernels waited for beside their stream and their launch."""
    counts = done.waits.counts()
    for cause in _INFERRED:
        count, late = counts[cause]
        if count:
            name = {OTHER_STREAM: "kernels of another stream", SMS: "SMs that others held", UNKNOWN: "unknown reasons"}
            yield f"{count:,} kernels waited {cell(late, 's')} for {name[cause]} (inferred)"


def kernels(done: Replayed) -> pd.DataFrame:
    """A row for each kernel: what was recorded, its class, its times in the replay, and what it waited for."""
    delays = done.waits
    return done.profile.kernels.assign(
        replayed_start_s=done.start_s,
        replayed_end_s=done.end_s,
        waited_for=[CAUSES[cause] for cause in delays.cause],
        waited_for_kernel=delays.blocker,
        late_s=delays.late_s,
        confidence=delays.confidence,
    )


def summary(done: Replayed) -> dict[str, Any]:
    """Content of `profile.yaml`."""
    profile, delays = done.profile, done.waits
    return {
        "unknown": unknown_summary(profile),
        "source": profile.source,
        "device": profile.device,
        "kernels": len(profile),
        "iterations_s": [float(end - start) for start, end in profile.iterations],
        "recorded": {**vars_of(done.recorded), "hidden": done.recorded.hidden},
        "replayed": {**vars_of(done.replayed), "hidden": done.replayed.hidden},
        "constants": {"gap_s": delays.gap_s, "launch_delay_s": delays.launch_delay_s, "between_s": delays.between_s},
        "waits": {cause: {"kernels": count, "late_s": late} for cause, (count, late) in delays.counts().items()},
        "dropped": dict(profile.dropped),
        "lost": profile.lost,
    }


def vars_of(value: Any) -> dict[str, float]:
    """Seconds of a record of times."""
    return {name: seconds for name, seconds in vars(value).items() if name.endswith("_s")}


def write(done: Replayed, outputs: Outputs) -> None:
    """Write the kernels, the summary and the picture of a replayed profile into a folder."""
    outputs.write_table("kernels", kernels(done))
    outputs.write_yaml("profile.yaml", summary(done))
    draw(done, outputs)


def draw(done: Replayed, outputs: Outputs) -> None:
    """Write the timeline, recorded and replayed, as pictures and as a trace for Perfetto."""
    import pandas as pd

    from dse import plots
    from dse.plots import timelines
    from dse.results.report import trace

    both = {"recorded": (done.profile.start_s, done.profile.end_s), "replayed": (done.start_s, done.end_s)}
    spans = [span for name, times in both.items() for span in _intervals(done.profile, name, *times)]
    outputs.write_text("figures/timeline.json", json.dumps(trace(spans, {})))
    title = f"{done.profile.source}: {100 * done.recorded.hidden:.0f} % of the time of collectives is hidden"
    if not done.recorded.collective_s:
        title = f"{done.profile.source}: {share_of_run(done.recorded.idle_s, done.recorded.span_s)} nothing runs"
    frames = [drawn(done.profile, *times).assign(panel=name) for name, times in both.items()]
    plots.save(partial(timelines.timeline, pd.concat(frames), title, panel="panel"), outputs.figures, "timeline")


def _intervals(profile: Profile, name: str, start_s: Any, end_s: Any) -> Iterator[Interval]:
    columns = (profile.kernels[column].tolist() for column in ("stream", "name", "kind"))
    for stream, kernel, kind, start, end in zip(*columns, start_s.tolist(), end_s.tolist(), strict=True):
        yield Interval(f"{name}, stream {stream}", kernel, kind, start, end)


def drawn(profile: Profile, start_s: Any, end_s: Any) -> pd.DataFrame:
    """Kernels as the picture shows them: those of a stream and a kind that nearly touch are one bar."""
    marks = {"collective": profile.is_collective, "compute": profile.is_compute}
    # the first that holds; what neither computes nor communicates is drawn as a copy
    kinds = np.select(list(marks.values()), list(marks), "copy")
    frame = profile.kernels.assign(lane="stream " + profile.kernels["stream"], kind=kinds, start_s=start_s)
    return merged(frame.assign(finish_s=end_s))


def merged(bars: pd.DataFrame) -> pd.DataFrame:
    """Bars of a picture (`lane`, `kind`, `start_s`, `finish_s`), as one where they nearly touch."""
    span_s = bars["finish_s"].max() - bars["start_s"].min()
    bars = bars.sort_values(["lane", "start_s"], kind="stable")
    # bars closer than a pixel look like one, and thousands of them are slow to draw
    apart = bars["start_s"] - bars["finish_s"].shift() > span_s / _BARS
    begins = apart | (bars["lane"] != bars["lane"].shift()) | (bars["kind"] != bars["kind"].shift())
    columns = {"lane": "first", "kind": "first", "start_s": "min", "finish_s": "max"}
    return bars.groupby(np.cumsum(begins.to_numpy(bool))).agg(columns)
