"""`profile advise <profile>`: which changes of collectives would make a run shorter, with intervals and bounds.

Written into the folder:

    advice.yaml         laws, groups of collectives with the best change of each, the best changes together, bounds
    what_ifs.parquet    a row for each what-if: group, setting, time and gain in each case of the laws
    figures/gains       best changes, ranked, with their intervals
    figures/timeline    streams over time, before and after; `timeline.json` opens in Perfetto, with the critical paths
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dse.backend import Interval
from dse.errors import pairs
from dse.results.run_folder import Outputs, writable
from dse.results.words import cell
from dse_traces.change.advice import Advice, GroupAdvice, advise
from dse_traces.change.settings import Setting
from dse_traces.change.software import SoftwareVerdict
from dse_traces.change.what_if import WORTH
from dse_traces.commands.lines import share_of_run, time_words, unknown_lines, unused_patterns
from dse_traces.commands.one_rank import drawn
from dse_traces.laws.contention import CASES, Estimate
from dse_traces.laws.machine import machine_of
from dse_traces.laws.task_graph import Ran
from dse_traces.profile.kernel_classes import OPTION, Patterns, read_patterns
from dse_traces.profile.kernels import Profile, classify
from dse_traces.profile.unnamed_kernels import unknown_summary
from dse_traces.readers.formats import files_of, most_kernels, read_ranks
from simulators.costs.other_software import ratio_gpus

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table

    from dse_traces.profile.ranks import Ranks

_SHOWN = 20  # groups in the table
_VERDICTS = 6  # groups whose verdicts on other software are shown
_GPUS = 4  # other ones that are named
_NEXT_TO_NOTHING_S = 5e-8  # of a gain: less than the tenth of a microsecond that is printed
_HOST_BOUND = 0.9  # share of the run that remains if no kernel takes any time


def advise_profile(words: Sequence[str]) -> int:
    """`profile advise <profile> [system=<machine>] [kernels=<file>] [out=<folder>]`: run the what-ifs of a profile, of
    several ranks that of the one for which the others wait, and print and write advice.
    """
    from dse.results import report

    # the first word may be the profile itself, without its name
    typed = [word if "=" in word or place else f"profile={word}" for place, word in enumerate(words)]
    options = pairs(typed, {"profile": ""}, optional=["system", "out", OPTION])
    patterns = read_patterns(options.get(OPTION, ""))
    paths = files_of(options["profile"])
    profile, ranks = _profile_to_advise_on(paths, patterns)
    advice = advise(profile, machine_of(profile, options.get("system", "")))
    path = Path(options["profile"]) if Path(options["profile"]).exists() else paths[0]
    outputs = writable(options.get("out", f"outputs/advise/{path.name.partition('.')[0]}"))
    console = report.console()
    for line in (*(late_lines(ranks) if ranks else ()), *answer(advice)):
        console.print(line, soft_wrap=True, highlight=False)
    for line in unused_patterns([profile], patterns):
        console.print(line, soft_wrap=True, highlight=False)
    _write(advice, outputs, ranks)
    console.print(f"written to {outputs.folder}/: advice.yaml, what_ifs.parquet, figures/*", soft_wrap=True)
    return 0


def _profile_to_advise_on(paths: Sequence[Path], patterns: Patterns) -> tuple[Profile, Ranks | None]:
    """The profile that is advised on: of several ranks the one that the others wait for, with all of them.

    None of these where they have no collective in common. Raises ConfigError.
    """
    # imported here: most profiles are of one rank, and need none of it
    from dse_traces.commands.several_ranks import read_files
    from dse_traces.profile.ranks import match

    if len(paths) == 1:
        profiles, unread = list(read_ranks(paths[0])), list[str]()
    else:
        profiles, unread = read_files(paths)
    profiles = [classify(profile, patterns) for profile in profiles]
    ranks = replace(match(profiles), unread=unread) if profiles[1:] else None
    if ranks is None or ranks.shared.empty:
        # nothing is shared: the ranks cannot be compared, so the largest profile is advised on
        return most_kernels(profiles), None
    return ranks.profiles[ranks.slowest], ranks


def late_lines(ranks: Ranks) -> Iterator[str]:
    """Yield how long ranks wait for one another, and for which, before anything else is advised."""
    table, by_rank, late = ranks.by_label(), ranks.by_rank(), ranks.slowest
    transfer, longest = float(table["transfer_s"].sum()), float(by_rank["waited_s"].max())
    count = f"{len(ranks.profiles)} ranks, {ranks.shared['collective'].nunique():,} collectives"
    if ranks.assumed:
        yield ranks.assumed
    if longest > WORTH * max(profile.span_s for profile in ranks.profiles.values()):
        last, moves = f"rank {late} comes last {int(by_rank['last'].loc[late]):,} times", cell(transfer, "s")
        waits = f"rank {int(str(by_rank['waited_s'].idxmax()))} waits for late ranks for {cell(longest, 's')}"
        yield f"{count}: {last}, and {waits}, which no change of a collective gains; transfer takes {moves}"
        yield f"make rank {late} as fast as the others first"
    else:
        yield f"{count}: no rank waits long for another one; transfer takes {cell(transfer, 's')}"
    yield f"what follows is of rank {late}, which waits least"
    yield from (f"dropped: a file that cannot be read: {problem}" for problem in ranks.unread)


def answer(advice: Advice) -> Iterator[Table | str]:
    """Yield what a person wants to know, the most important first."""
    model, recorded = advice.what_ifs.model, advice.recorded_s
    exposed = sum(group.exposed_s for group in advice.groups)
    size = f"{len(model.profile):,} kernels, {cell(recorded, 's')} in the replay"
    lost = f"; lost: {model.profile.lost}" if model.profile.lost else ""
    share = share_of_run(exposed, recorded)
    yield f"{model.profile.source}: {size}; {cell(exposed, 's')} of collectives exposed ({share}){lost}"
    yield from _together(advice)
    yield _table(advice)
    yield from unknown_lines(model.profile)
    yield from _kernels(advice)
    yield from _software(advice)
    yield from _hardware(advice)
    if advice.host_s > _HOST_BOUND * recorded:
        yield (
            f"the host bounds this run: if no kernel took any time, it would still take {cell(advice.host_s, 's')}; "
            "fewer or faster launches (CUDA graphs, fusion) come first"
        )
    if kinds := [f"{kind} ({time_words(gain, _NEXT_TO_NOTHING_S)} at best)" for kind, gain in advice.not_worth()]:
        yield f"not worth while for any collective alone, below 0.1 % of the run: {', '.join(kinds)}"
    yield from _laws(advice)
    yield f"{advice.count:,} what-ifs; all ranks are taken to change alike"


def _together(advice: Advice) -> Iterator[str]:
    recorded, together = advice.recorded_s, advice.together_s
    yield f"no change of collectives in software gets it below {cell(advice.bound_s, 's')}"
    if not advice.plan.settings:
        yield "best together: nothing, no change in software gains 0.1 %"
        return
    # the longest run is the smallest gain, so the ends change places
    gain = _interval(Estimate(recorded - together.high, recorded - together.value, recorded - together.low))
    share = share_of_run(recorded - together.value, recorded)
    yield f"best together: {cell(together.value, 's')}, a gain of {gain}, {share}"
    for group, setting in advice.plan.settings:
        yield f"  {advice.groups[group].name}: {setting}"


def _table(advice: Advice) -> Table:
    from rich.table import Table

    shown = Table(box=None, pad_edge=False)
    for name, justify in (("collective", "left"), ("runs", "right"), ("exposed", "right"), ("best change", "left")):
        shown.add_column(name, justify=justify)  # type: ignore[arg-type]
    shown.add_column("gain", justify="right")
    shown.add_column("why it is exposed")
    for group in sorted(advice.groups, key=lambda of: -of.exposed_s)[:_SHOWN]:
        change = "none" if group.change == Setting() else str(group.change)
        gain = "" if group.change == Setting() else _interval(group.gain)
        shown.add_row(group.name, f"{group.count:,}", cell(group.exposed_s, "s"), change, gain, group.cause)
    return shown


def _kernels(advice: Advice) -> Iterator[str]:
    """Lines on what-ifs of all kernels, whose assumptions `fusion` and `micro_batches` say."""
    for what_if in advice.kernels:
        yield f"{what_if.name} (assumed shares): {_interval(what_if.gain)}"
    if not advice.what_ifs.halves.divided:
        yield "two micro-batches overlap nothing: no collective is waited for within a pass"


def _software(advice: Advice) -> Iterator[Table | str]:
    """Yield verdicts on other software of collectives, of the groups that are exposed most."""
    from rich.table import Table

    exposed = {group.name: group.exposed_s for group in advice.groups}
    shown = sorted({verdict.group for verdict in advice.software}, key=lambda name: -exposed[name])[:_VERDICTS]
    if not shown:
        yield "other software of collectives: none of conf/collective could take the place of what ran these"
        return
    table = Table(box=None, pad_edge=False)
    for name in ("collective", "by other software", "SMs", "pays", "gain"):
        table.add_column(name, justify="right" if name in ("SMs", "gain") else "left")
    for group in shown:
        for place, verdict in enumerate(of for of in advice.software if of.group == group):
            first = group if place == 0 else ""
            num_sms = f"{verdict.software.num_ctas:g}"
            table.add_row(first, verdict.software.name, num_sms, verdict.verdict, _interval(verdict.gain))
    yield table
    yield f"  90 %, by measured times on {' and '.join(ratio_gpus())}: python -m dse machine libraries"


def _hardware(advice: Advice) -> Iterator[str]:
    """Lines on what other links and GPUs, and independent kernels, would gain."""
    for text, name in (
        ("a link twice as fast", "faster_link"),
        ("independent kernels put before its wait", "waited_later"),
    ):
        best = max(advice.groups, key=lambda group: getattr(group, name).value)
        if (gain := getattr(best, name)).value > 0:
            hint = ", if there are any (a profile does not show them)" if name == "waited_later" else ""
            yield f"{text} gains most for {best.name}: {_interval(gain)}{hint}"
    runs = [f"{name} {_interval(run)}" for name, run in advice.gpus[:_GPUS]]
    if advice.gpus:
        # the ways differ little between GPUs: those on the best one are shown
        shares = advice.what_ifs.pace(advice.gpus[0][0]).shares
        ways = ", ".join(f"{way} for {100 * share:.0f} %" for way, share in shares.items() if share > 0)
        yield f"other GPUs, collectives and the host as recorded: {', '.join(runs)}"
        yield f"  times of kernels there by {ways} of the time of those that compute"


def _laws(advice: Advice) -> Iterator[str]:
    """Lines on slow-downs beside collectives: learnt and assumed."""
    laws = advice.what_ifs.model.laws
    kinds = set(advice.what_ifs.model.profile.kernels["kind"])
    learnt = [
        f"{kind} {law.factor.value:.2f} ({law.factor.low:.2f} to {law.factor.high:.2f}, {law.observed} kernels)"
        for kind, law in laws.penalties.items()
        if law.observed
    ]
    if learnt:
        yield f"slow-down during collectives, learnt: {', '.join(learnt)}"
    assumed = sorted(kind for kind, law in laws.penalties.items() if not law.observed and kind in kinds)
    if assumed:
        yield f"slow-down assumed, by the constants of {laws.machine}: {', '.join(assumed)}"


def _interval(gain: Estimate) -> str:
    value, low, high = (time_words(seconds, _NEXT_TO_NOTHING_S) for seconds in (gain.value, gain.low, gain.high))
    return f"{value} ({low} to {high})"


def summary(advice: Advice) -> dict[str, Any]:
    """Content of `advice.yaml`."""
    laws = advice.what_ifs.model.laws
    penalties = {kind: {**vars(law.factor), "observed": law.observed} for kind, law in laws.penalties.items()}
    return {
        "source": advice.what_ifs.model.profile.source,
        "machine": laws.machine,
        "recorded_s": advice.recorded_s,
        "together_s": vars(advice.together_s),
        "bound_s": advice.bound_s,
        "kernels_s": {what_if.name: vars(what_if.gain) for what_if in advice.kernels},
        "host_s": advice.host_s,
        "software": [_verdict_summary(verdict) for verdict in advice.software],
        "what_ifs": advice.count,
        "unknown": unknown_summary(advice.what_ifs.model.profile),
        "plan": {advice.groups[group].name: _settings(setting) for group, setting in advice.plan.settings},
        "collectives": [_summary(group) for group in advice.groups],
        "other_gpus_s": {name: run.value for name, run in advice.gpus},
        "other_gpus_interval_s": {name: [run.low, run.high] for name, run in advice.gpus},
        "other_gpus_by": {name: dict(advice.what_ifs.pace(name).shares) for name, _ in advice.gpus},
        "not_worth_s": dict(advice.not_worth()),
        "slowdowns": penalties,
    }


def _verdict_summary(verdict: SoftwareVerdict) -> dict[str, Any]:
    of = verdict.software
    times = {"ratio": of.ratio, "num_ctas": of.num_ctas, "gain_s": vars(verdict.gain)}
    return {"name": verdict.group, "software": of.name, "pays": verdict.verdict, **times}


def _summary(group: GroupAdvice) -> dict[str, Any]:
    gains = {name: vars(getattr(group, name)) for name in ("gain", "faster_link", "waited_later")}
    plain = {name: getattr(group, name) for name in ("name", "count", "seconds", "exposed_s", "cause")}
    return {**plain, "change": _settings(group.change), **{f"{name}_s": gain for name, gain in gains.items()}}


def _settings(setting: Setting) -> dict[str, Any]:
    return {name: value for name, value in vars(setting).items() if value != getattr(Setting(), name)}


def what_ifs(advice: Advice) -> pd.DataFrame:
    """A row for each what-if of one group, or of all kernels: its setting, the run [s] and its gain [s] in each case of
    the laws. fused, micro_batches: of all kernels.
    """
    import pandas as pd

    tried, model = advice.tried, advice.what_ifs.model
    plans = [what_if.plan for what_if in advice.kernels]
    # settings of all groups are alike in these plans: group 0 stands for all
    of_all = [dict(plan.settings).get(0, Setting()) for plan in plans]
    settings, seconds = [*tried.settings, *of_all], np.vstack([tried.seconds, *(one.seconds for one in advice.kernels)])
    columns: dict[str, Any] = {"collective": [model.names[group] for group in tried.groups] + ["all"] * len(plans)}
    for name in ("order", "sms", "mover", "link"):
        columns[name] = [getattr(setting, name) for setting in settings]
    columns["fused"] = [False] * len(tried.groups) + [plan.fused for plan in plans]
    columns["micro_batches"] = [1] * len(tried.groups) + [plan.micro_batches for plan in plans]
    for place, case in enumerate(CASES):
        columns[f"seconds_{case}"] = seconds[:, place]
        columns[f"gain_{case}_s"] = advice.what_ifs.recorded_s[place] - seconds[:, place]
    # None is "as recorded"; as a float column it becomes NaN
    return pd.DataFrame(columns).astype({"sms": "float64"})


def _write(advice: Advice, outputs: Outputs, ranks: Ranks | None = None) -> None:
    import pandas as pd

    from dse import plots
    from dse.plots import comparisons, timelines
    from dse.results.report import trace

    outputs.write_table("what_ifs", what_ifs(advice))
    waiting = {} if ranks is None else {"slowest": ranks.slowest, "waited_s": ranks.by_rank()["waited_s"].to_dict()}
    outputs.write_yaml("advice.yaml", {**summary(advice), **waiting})
    runs = {"before": advice.before, "after": advice.after}
    spans = [span for name, ran in runs.items() for span in _spans(name, ran)]
    outputs.write_text("figures/timeline.json", json.dumps(trace(spans, {})))
    profile = advice.what_ifs.model.profile
    frames = [drawn(profile, ran.start_s[0], ran.end_s[0]).assign(panel=name) for name, ran in runs.items()]
    gain = share_of_run(advice.recorded_s - advice.together_s.value, advice.recorded_s)
    title = f"{profile.source}: changes of collectives gain {gain}"
    plots.save(partial(timelines.timeline, pd.concat(frames), title, panel="panel"), outputs.figures, "timeline")
    if rows := list(_best_changes(advice)):
        note = "dot: as expected; line: in the cases of the laws"
        best = f"{profile.source}: what changes of one collective alone gain"
        plots.save(partial(comparisons.gains, rows, best, note=note), outputs.figures, "gains")


def _spans(name: str, ran: Ran) -> Iterator[Interval]:
    """Yield tasks of a run that are no launches, then its critical path on a lane of its own."""
    timeline, graph = ran.timeline, ran.timeline.graph
    issued, finished = timeline.issued[0], timeline.finished[0]
    # tasks without a length would be invisible marks in the picture
    path = [task for task in timeline.critical_path(0) if finished[task] > issued[task]]
    lanes = [
        *((task, graph.lanes[task]) for task in range(graph.num_tasks)),
        *((task, "critical path") for task in path),
    ]
    for task, lane in lanes:
        if graph.kinds[task] != "launch" or lane == "critical path":
            times = float(issued[task]), float(finished[task])
            yield Interval(f"{name}, {lane}", graph.tasks[task], graph.kinds[task], *times)


def _best_changes(advice: Advice) -> Iterator[dict[str, Any]]:
    """Yield the best changes of groups of each sort that gain something, most first."""
    kinds = {"gain": "in software", "faster_link": "a link twice as fast", "waited_later": "independent kernels first"}
    rows: list[dict[str, Any]] = [
        {"name": what_if.name, "kind": "all kernels", **_dots(what_if.gain)}
        for what_if in advice.kernels
        if what_if.gain.value > 1e-4 * advice.recorded_s
    ]
    rows += [
        {"name": f"{group.name}: {_change_name(group, name)}", "kind": kind, **_dots(getattr(group, name))}
        for group in advice.groups
        for name, kind in kinds.items()
        if getattr(group, name).value > 1e-4 * advice.recorded_s
    ]
    yield from sorted(rows, key=lambda row: -row["gain"])[:_SHOWN]


def _change_name(group: GroupAdvice, name: str) -> str:
    return {"gain": str(group.change), "faster_link": "link x 2", "waited_later": "waited for later"}[name]


def _dots(gain: Estimate) -> dict[str, float]:
    return {"low": gain.low, "gain": gain.value, "high": gain.high}
