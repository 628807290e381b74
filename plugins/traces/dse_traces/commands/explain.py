"""`profile explain <A> <B>`: where the difference between two points, two profiles, or one of each comes from.

Both are cut along their critical paths into causes that add up to their times (`dse_traces.profile.explanation`).
Written into the folder:

    explain.yaml        both runs by cause and by kind, and the differences
    stretches.parquet   a row for each stretch of the critical paths, with a column for each cause
    figures/explain     the paths one above the other, and the way from the first to the second cause by cause
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dse.errors import ConfigError, Problem
from dse.results.run_folder import FinishedRun, Outputs, writable
from dse.results.words import AS_FAST, cell, choice_in_words, gain_in_words
from dse_traces.commands.lines import time_words, unknown_lines, unused_patterns
from dse_traces.profile.critical_path import critical_path
from dse_traces.profile.explanation import POINT, PROFILE, Difference, Explained, Limit, Pair, compare
from dse_traces.profile.kernel_classes import OPTION, read_patterns
from dse_traces.profile.path_causes import CAUSES, COMPUTE, path_stretches
from simulators.taskgraph.bounds import bound, linear_bound
from simulators.taskgraph.symmetry import reduce_graph

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table

    from dse_traces.profile.kernels import Profile
    from simulators.taskgraph.graph import TaskGraph

_OPTIONS = ("out", "output_dir", "system", OPTION)
_SHOWN = 12  # rows of a table
_LONGEST_NAME = 80  # letters, of what was chosen
_ALL_SCHEDULES, _ALL_ORDERS = "schedule with these means", "order of these tasks"
_BINDS, _SMALL = 4, 0.005  # what binds that is named, and the share below which it is not
_ROUNDING = 1e-9  # of a run, below which a sum of seconds is none


def explain(words: Sequence[str]) -> int:
    """`profile explain <A> <B> [out=<folder>] [output_dir=] [system=] [kernels=]`: print and draw what differs."""
    from dse.results import report
    from dse_traces.profile.kernels import classify

    options = {name: value for name, _, value in (word.partition("=") for word in words) if value}
    names = [word for word in words if "=" not in word]
    if len(names) != 2 or set(options) - set(_OPTIONS):
        way = "python -m dse profile explain before.json.gz after.json.gz, or <study>:<key> <study>:<key>"
        raise ConfigError([Problem("explain", "takes two profiles or two points", " ".join(words), way)])
    patterns = read_patterns(options.get(OPTION, ""))
    read_profiles = {name: profile_of(name) for name in names}
    profiles = {name: None if read is None else classify(read, patterns) for name, read in read_profiles.items()}
    difference = compare(*(explained(name, options, profiles) for name in names))
    outputs = writable(options.get("out", "outputs/explain"))
    console = report.console()
    unused = unused_patterns([profile for profile in profiles.values() if profile is not None], patterns)
    for line in (*answer(difference), *unused):
        console.print(line, soft_wrap=isinstance(line, str), highlight=False)
    write(difference, outputs)
    files = "explain.yaml, stretches.parquet, figures/explain.*"
    console.print(f"written to {outputs.folder}/: {files}", soft_wrap=True)
    return 0


def explained(name: str, options: Mapping[str, str], profiles: Mapping[str, Profile | None] | None = None) -> Explained:
    """A profile by its path, or a point by `<study>:<key>` or `<study>/<time>:<key>`. Raises ConfigError.

    profiles: those that are read already, by path; each may tell how long kernels of the others take alone.
    """
    profiles = {name: profile_of(name)} if profiles is None else profiles
    if (profile := profiles[name]) is not None:
        beside = [other for of, other in profiles.items() if of != name and other is not None]
        return of_profile(name, profile, beside, system=options.get("system", ""))
    # from the right: names of runs may hold a colon
    run, _, key = name.rpartition(":")
    return of_point(FinishedRun.find(Path(options.get("output_dir", "outputs")), run, path="explain").outputs, key)


def profile_of(name: str) -> Profile | None:
    """A recorded profile by its path, of several files that of the first rank; None for a point of a study."""
    from dse_traces.commands.several_ranks import read_files
    from dse_traces.profile.ranks import match
    from dse_traces.readers.formats import files_of, read

    # a file whose name holds a colon is a file first
    if not Path(name).exists() and ":" in name:
        return None
    paths = files_of(name)
    return read(paths[0]) if len(paths) == 1 else next(iter(match(read_files(paths)[0]).profiles.values()))


def of_profile(name: str, profile: Profile, beside: Sequence[Profile] = (), *, system: str = "") -> Explained:
    """The critical path of a recorded profile. beside: others that may tell how long its kernels take alone."""
    from dse_traces.readers.formats import files_of

    count = len(files_of(name))
    delays, alone_s, notes = _laws(profile, beside, system)
    ranks = f" of {count} ranks" if count > 1 else ""
    assumed = [profile.assumed] if profile.assumed else []
    notes += [f"{profile.source}: {line}" for line in (*assumed, *unknown_lines(profile))]
    return Explained(f"{profile.source}{ranks}", PROFILE, tuple(critical_path(profile, delays, alone_s)), notes=notes)


def _laws(profile: Profile, beside: Sequence[Profile], system: str) -> tuple[Any, Any, list[str]]:
    """What the kernels of a profile waited for, their times alone [N] or None, and what these rest on.

    A kernel that was recorded alone, too, takes alone what was recorded; the laws count for the others.
    """
    from dse_traces.laws.contention import assumed_laws, learn_laws, recorded_alone
    from dse_traces.laws.machine import machine_of
    from dse_traces.laws.task_graph import EXPECTED, contention_model
    from dse_traces.profile.waits import waits

    # without collectives nothing contends, and times alone are the recorded ones
    if not profile.is_collective.any():
        return waits(profile), None, []
    recorded_s = recorded_alone(profile, beside)
    share = float(profile.seconds[np.isfinite(recorded_s)].sum() / profile.seconds.sum())
    by = (
        f"{profile.source}: contention as recorded for {100 * share:.0f} % of the time of kernels, which also ran alone"
    )
    try:
        machine = machine_of(profile, system)
    # the GPU is not known: only kernels that were recorded alone show contention
    except ConfigError:
        unknown = "of the others it is part of work, as the GPU is not known; name one: system=<machine>"
        return waits(profile), np.where(np.isfinite(recorded_s), recorded_s, profile.seconds), [f"{by}; {unknown}"]
    laws = learn_laws(profile, assumed_laws(machine), beside)
    learnt = ", ".join(kind for kind, law in laws.penalties.items() if law.observed) or "no class of kernels"
    model = contention_model(profile, laws)
    note = f"{by}; of the others by laws learnt for {learnt}, else assumed of {machine}"
    return model.waits, np.where(np.isfinite(recorded_s), recorded_s, model.alone_s[EXPECTED]), [note]


def of_point(outputs: Outputs, key: str) -> Explained:
    """The critical path of a stored point, which is run again. Raises ConfigError for one without a task graph."""
    from dse.study.plan_again import Present
    from dse.study.replay import stored_point

    planned, row, design = stored_point(outputs, key, Present())
    study, short = outputs.folder.parent.name, str(row["key"])[:8]
    if row["status"] != "ok":
        rule, way = f"is {row['status']}: {row['reason']}", f"choose a row of {outputs.results} that is ok"
        raise ConfigError([Problem("explain", rule, f"{study}:{short}", way)])
    timeline = planned.backend.timeline(design)
    if timeline is None:
        rule = f"has no critical path: its simulator ({planned.spec.name}) runs no task graph"
        way = f"python -m dse results timeline study={study} key={short}"
        raise ConfigError([Problem("explain", rule, f"{study}:{short}", way)])
    # knobs that do not apply are null
    choices = {knob: row[knob] for knob in planned.knobs if knob in row.dropna()}
    words = ", ".join(filter(None, [str(row["scenario"]), choice_in_words(row, choices)]))
    words = words if len(words) <= _LONGEST_NAME else str(row["scenario"])
    name, makespan = f"{study}:{short}", float(timeline.makespan[0])
    notes = [
        f"{name}: one run of {cell(makespan, 's')} is explained; {goal} = {cell(row[goal], 's')} is a mean of several"
        for goal in ("makespan_s", "iteration_s")
        # goals that are means over several runs do not equal the run that is drawn
        if goal in row and abs(row[goal] / makespan - 1) > _ROUNDING
    ]
    limits = tuple(limits_of(timeline.graph, planned.backend.binding(design)))
    return Explained(f"{name} ({words})", POINT, tuple(path_stretches(timeline, 0)), choices, notes, limits)


def limits_of(graph: TaskGraph, binding: tuple[float, str] | None) -> Iterator[Limit]:
    """Yield what is proven of all schedules with the same means, if anything is, and of all orders of these tasks."""
    if binding is not None:
        yield Limit(_ALL_SCHEDULES, binding[0], {binding[1]: 1.0})
    # alike tasks are merged first, as the linear program is slow on large graphs
    small = reduce_graph(graph).graph
    plain, linear = bound(small), linear_bound(small)
    # both are lower bounds: the larger one is closer to the truth
    if linear.seconds > plain.seconds[0]:
        yield Limit(_ALL_ORDERS, linear.seconds, linear.binds)
    else:
        yield Limit(_ALL_ORDERS, float(plain.seconds[0]), {plain.names[plain.binds[0]]: 1.0})


def answer(difference: Difference) -> Iterator[Table | str]:
    """Yield how the second run differs from the first, the most important first."""
    first, second = difference.runs
    yield f"A  {first.name}: {cell(first.seconds, 's')}"
    yield f"B  {second.name}: {cell(second.seconds, 's')}, {_gain(difference)}"
    for knob in dict.fromkeys([*first.choices, *second.choices]):
        values = [run.choices.get(knob, "–") for run in difference.runs]
        # as text: values that were read back may differ in their types
        if str(values[0]) != str(values[1]):
            yield f"{knob}: {values[0]} -> {values[1]}"
    yield _causes(difference)
    hidden = "communication" if difference.bound == COMPUTE else "computation"
    yield f"{difference.bound} bounds both runs; dependency is work of {hidden} that it does not hide"
    yield _kinds(difference)
    yield _paths(difference)
    for name, run in zip("AB", difference.runs, strict=True):
        yield from (_limit(name, run.seconds, limit) for limit in run.limits)
    yield from dict.fromkeys(note for run in difference.runs for note in run.notes)


def _limit(name: str, seconds: float, limit: Limit) -> str:
    """What a bound leaves to gain, and what it comes from."""
    shorter = max(0.0, 1 - limit.seconds / seconds)
    binds = [(what, share) for what, share in limit.binds.items() if share > _SMALL][:_BINDS]
    shares = [what if share > 1 - _SMALL else f"{what} {100 * share:.0f} %" for what, share in binds]
    text = f"{name}  any {limit.of} takes at least {cell(limit.seconds, 's')}, {100 * shorter:.1f} % less"
    return f"{text}, by {', '.join(shares)}" if shares else text


def _gain(difference: Difference) -> str:
    gain = gain_in_words(difference.first.seconds / difference.second.seconds)
    return f"{gain} as A" if gain == AS_FAST else f"{gain} than A"


def _causes(difference: Difference) -> Table:
    """Time on the critical paths by cause, and the sums."""
    scale = difference.first.seconds
    shown = _columns("cause", ("A", "B", "B - A", "of A"))
    totals = difference.first.seconds, difference.second.seconds
    for cause, (a, b) in {**difference.by_cause(), "all": totals}.items():
        shown.add_row(
            cause, *(_time(part, scale) for part in (a, b)), _with_sign(b - a, scale), _signed_share(b - a, scale)
        )
    return shown


def _kinds(difference: Difference) -> Table:
    """Differences by kind and cause, and their sums."""
    scale, cells = difference.first.seconds, difference.by_kind()
    causes = [
        cause for cause in CAUSES if any(name[1] == cause and _counts(pair, scale) for name, pair in cells.items())
    ]
    shown = _columns("B - A, of", (*causes, "all"))
    sums = {kind: sum(b - a for (of, _), (a, b) in cells.items() if of == kind) for kind, _ in cells}
    for kind in sorted(sums, key=lambda kind: -abs(sums[kind]))[:_SHOWN]:
        parts = [cells.get((kind, cause), (0.0, 0.0)) for cause in causes]
        shown.add_row(kind, *(_with_sign(b - a, scale) for a, b in parts), _with_sign(sums[kind], scale))
    return shown


def _paths(difference: Difference) -> Table:
    """The critical paths side by side: stretches that are alike together, what differs most first."""
    scale, counts = difference.first.seconds, difference.counts()
    shown = _columns("critical path", ("A", "B", "B - A"))
    rows = [(alike, times) for alike, times in difference.aligned().items() if _counts(times, scale)]
    # a line for a single further row would be as long as the row
    count = _SHOWN if len(rows) > _SHOWN + 1 else len(rows)
    for alike, (a, b) in rows[:count]:
        times = [f"{int(runs)} x  {_time(part, scale)}" for runs, part in zip(counts[alike], (a, b), strict=True)]
        shown.add_row(_title(*alike), *(text if runs else "–" for text, runs in zip(times, counts[alike], strict=True)),
                      _with_sign(b - a, scale))  # fmt: skip
    if smaller := [times for _, times in rows[count:]]:
        a, b = (sum(times[place] for times in smaller) for place in (0, 1))
        shown.add_row(f"{len(smaller)} others", _time(a, scale), _time(b, scale), _with_sign(b - a, scale))
    return shown


def _title(name: str, kind: str) -> str:
    return name if name.startswith(kind) else f"{kind}: {name}"


def _columns(name: str, numbers: Sequence[str]) -> Table:
    from rich.table import Table

    shown = Table(box=None, pad_edge=False)
    shown.add_column(name)
    for number in numbers:
        shown.add_column(number, justify="right")
    return shown


def _counts(pair: Pair, scale: float) -> bool:
    return max(map(abs, pair)) > _ROUNDING * scale


def _time(seconds: float, scale: float) -> str:
    return time_words(seconds, _ROUNDING * scale)


def _with_sign(seconds: float, scale: float) -> str:
    text = _time(seconds, scale)
    return text if text == "0" or seconds < 0 else f"+{text}"


def _signed_share(seconds: float, scale: float) -> str:
    return f"{100 * seconds / scale:+.1f} %"


def write(difference: Difference, outputs: Outputs) -> None:
    """Write both runs by cause and by kind, the stretches of their paths, and the picture."""
    from dse import plots
    from dse.plots import paths

    table = stretches(difference)
    outputs.write_yaml("explain.yaml", summary(difference))
    outputs.write_table("stretches", table)
    title = f"B is {_gain(difference)}{_reasons(difference)}"
    note = "; ".join(f"{name}: {run.name}" for name, run in zip("AB", difference.runs, strict=True))
    draw = partial(paths.critical_paths, table, difference.by_cause(), title, note=note)
    plots.save(draw, outputs.figures, "explain")


def _reasons(difference: Difference) -> str:
    """The causes that differ most, as the end of a title."""
    scale = difference.first.seconds
    changes = {cause: b - a for cause, (a, b) in difference.by_cause().items()}
    largest = [cause for cause in sorted(changes, key=lambda cause: -abs(changes[cause])) if _large(changes, cause)]
    texts = [f"{_with_sign(changes[cause], scale)} of {cause}" for cause in largest[:2]]
    return f": {', '.join(texts)}" if texts else ""


def _large(changes: Mapping[str, float], cause: str) -> bool:
    return abs(changes[cause]) > 0.1 * max(map(abs, changes.values()))


def summary(difference: Difference) -> dict[str, Any]:
    """Content of `explain.yaml`; seconds."""
    causes, kinds = difference.by_cause(), difference.by_kind()
    runs = {
        name: _run(run, place, difference) for place, (name, run) in enumerate(zip("AB", difference.runs, strict=True))
    }
    changes = {cause: b - a for cause, (a, b) in causes.items()}
    by_kind: dict[str, dict[str, float]] = {}
    for (kind, cause), (a, b) in kinds.items():
        by_kind.setdefault(kind, {})[cause] = b - a
    length = difference.second.seconds - difference.first.seconds
    difference_s = {"seconds": length, "causes": changes, "by_kind": by_kind}
    return {"bound": difference.bound, **runs, "difference": difference_s}


def _run(run: Explained, place: int, difference: Difference) -> dict[str, Any]:
    by_kind: dict[str, dict[str, float]] = {}
    for (kind, cause), times in difference.by_kind().items():
        by_kind.setdefault(kind, {})[cause] = times[place]
    causes = {cause: times[place] for cause, times in difference.by_cause().items()}
    plain = {"name": run.name, "form": run.form, "seconds": run.seconds, "causes": causes, "by_kind": by_kind}
    limits = [{"of": limit.of, "seconds": limit.seconds, "binds": dict(limit.binds)} for limit in run.limits]
    plain |= {"limits": limits} if limits else {}
    return {**plain, "choices": {knob: str(value) for knob, value in run.choices.items()}, "notes": list(run.notes)}


def stretches(difference: Difference) -> pd.DataFrame:
    """A row for each stretch of both paths, in order: run, name, kind, lane, side, times and causes [s]."""
    import pandas as pd

    rows = []
    for name, run in zip("AB", difference.runs, strict=True):
        for stretch in run.path:
            plain = {at: getattr(stretch, at) for at in ("name", "kind", "lane", "side", "start_s", "finish_s")}
            rows.append({"run": name, **plain, **{cause: stretch.causes.get(cause, 0.0) for cause in CAUSES}})
    return pd.DataFrame(rows)
