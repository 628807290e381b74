"""The profile backend: a recorded run with a plan of changes, run again on its task graph with its laws.

A design is a machine, a recorded run, and a plan (`dse_traces.design`). Designs of one run on one machine are
run together, those with the same structure at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from dse import plugins
from dse.backend import Backend, Batch, Columns, Interval, Law, Metric, Replay, Result, Results, Tree
from dse.errors import ConfigError, Problem, Problems, did_you_mean, validate_as
from dse.space import get_path
from dse.values import LABELS, condition, content_key, distinct
from dse_traces.change.other_gpu import pace_of
from dse_traces.change.plan_results import Outcomes, outcomes
from dse_traces.change.what_if import WhatIfs
from dse_traces.design import (
    GroupPlan,
    PlanKnobs,
    ProfileDesign,
    Recorded,
    content_of_profile,
    group_name,
    located,
)
from dse_traces.laws.assumed_changes import assumed_changes
from dse_traces.laws.contention import assumed_laws, learn_laws
from dse_traces.laws.machine import ProfiledMachine, machine_named
from dse_traces.laws.task_graph import EXPECTED, ContentionModel, contention_model
from dse_traces.profile.kernel_classes import read_patterns
from dse_traces.profile.kernels import Profile, classify
from dse_traces.profile.replay import ENGINE
from dse_traces.profile.unnamed_kernels import nothing_to_move, unknown_kernels
from dse_traces.readers.formats import files_of, read_ranks
from simulators.hardware.machine import reads
from simulators.taskgraph.timeline import Timeline

Floats = NDArray[np.float64]
# raised when the same design gives other results, so that stored ones are computed again
_VERSION = "8"
_OF_WORKLOAD = ("path", "kernels")
_SECTIONS = ("system", "workload", "plan")
_MOST_MODELS = 8  # runs on machines that are remembered
_INFINITE = float("inf")
# read only to price operators on another GPU (`plan.gpu`); without one they change no result
_OF_COSTS = (
    "system.gpu.efficiency",
    "system.gpu.gemm",
    "system.gpu.shader_engines",
    "system.gpu.peak",
    "system.gpu.matrix",
)


# parsed once for all designs; the hash is a part of the key, so that a file that was replaced is read again
@plugins.cached_until_refresh
def _profiles(recorded: tuple[str, str]) -> Sequence[Profile]:
    """The profiles of a file, by its path and the hash of what it holds."""
    return read_ranks(located(recorded[0]))


class ProfileBackend(Backend):
    """Plans for a recorded run, many at once."""

    batch = 256
    version = _VERSION
    metrics: Mapping[str, Metric] = {
        "makespan_s": Metric("s", "from the first begin to the last end of a kernel"),
        # a change may lose time, so gains have no lower bound
        "gain_s": Metric("s", "of the recorded run, as expected", "maximize", low=-_INFINITE),
        "gain_low_s": Metric("s", "the least gain in the cases of the laws", "maximize", low=-_INFINITE),
        "gain_high_s": Metric("s", "the largest gain in the cases of the laws", "maximize", low=-_INFINITE),
        "exposed_s": Metric("s", "time of collectives during which nothing is computed"),
        "hidden": Metric("fraction", "share of the time of collectives that is not exposed", "maximize", high=1.0),
        "comm_sm_s": Metric("s", "time of collectives, each times the SMs that it holds"),
        "comm_sms": Metric("", "SMs that collectives hold, in the mean over the run"),
    }
    relations: Mapping[str, Metric] = {
        "speedup": Metric("x", "makespan_s of the baseline / makespan_s", "maximize"),
    }
    # hold by construction: the ends of the interval are extremes over the cases, and the expected case is one
    laws = (
        Law("gain_low_s <= gain_s", lambda row: row["gain_low_s"], lambda row: row["gain_s"]),
        Law("gain_s <= gain_high_s", lambda row: row["gain_s"], lambda row: row["gain_high_s"]),
        Law("exposed_s <= makespan_s", lambda row: row["exposed_s"], lambda row: row["makespan_s"]),
    )

    def __init__(self) -> None:
        self._models: dict[str, WhatIfs] = {}

    def sections(self, tree: Tree) -> None:
        """Check the sections: `system`, `workload` with its `path`, and `plan`."""
        check = Problems()
        for name in set(tree) - set(_SECTIONS):
            check.add(name, "is not a known section", way_out=did_you_mean(name, _SECTIONS))
        for name in _SECTIONS:
            if not isinstance(tree.get(name), Mapping):
                check.add(name, "is no section of keys", value=tree.get(name), way_out="start from study=trace")
        check.done()

    def scenarios(self, tree: Tree) -> Mapping[str, Tree]:
        """A scenario for each profile that `workload.path` names, with a plan for each of its groups of collectives."""
        check, given = Problems(), tree["workload"]
        for name in set(given) - set(_OF_WORKLOAD):
            check.add(f"workload.{name}", "is not a known key", way_out=did_you_mean(name, _OF_WORKLOAD))
        if not isinstance(given.get("path"), str) or not given["path"]:
            check.add("workload.path", "names no profile", value=given.get("path"), way_out=_WAY_OUT)
        check.model(ProfiledMachine, tree["system"], path="system")
        check.done()
        # patterns count before scenarios are made: they decide which kernels are collectives, and so the groups
        patterns = read_patterns(str(given.get("kernels") or ""), "workload.kernels")
        trees: dict[str, Tree] = {}
        for path in _paths(given["path"]):
            # the hash identifies the run: a file that was moved keeps its results
            content = content_of_profile(path)
            profiles = [classify(profile, patterns) for profile in _profiles((str(path), content))]
            for rank, profile in enumerate(profiles):
                name = path.name.partition(".")[0] + (f" rank {rank}" if len(profiles) > 1 else "")
                workload = {"content": content, "note": str(path), "rank": rank, "kernels": dict(patterns)}
                trees[name] = {
                    "system": tree["system"],
                    "workload": workload,
                    "plan": _with_groups(tree, profile, name),
                }
        return trees

    def design(self, tree: Tree) -> ProfileDesign:
        """Validate a design. Raises ConfigError with every problem."""
        check = Problems()
        plan = check.model(PlanKnobs, tree["plan"], path="plan")
        parts = {"system": ProfiledMachine, "workload": Recorded}
        models: dict[str, Any] = {name: check.model(kind, tree[name], path=name) for name, kind in parts.items()}
        # constants of the other GPU become a part of the design, and so of its key
        other = None if plan is None or plan.gpu is None else _other(check, plan.gpu)
        check.done()
        assert plan is not None
        return ProfileDesign.model_construct(**models, plan=plan, other=other)

    def problems(self, design: BaseModel) -> Sequence[Problem]:
        """Plans whose collectives cannot be moved so, or whose other GPU has no peak rates."""
        assert isinstance(design, ProfileDesign)
        return list(_rules(design, self._what_ifs(design)))

    def condition(self, path: str, tree: Tree) -> Mapping[str, Any] | None:
        """Knobs of the plan, of the groups that the profile has, and numbers of the machine that are read."""
        section, _, name = path.partition(".")
        # labels never change a result
        if path.rpartition(".")[2] in LABELS or section not in ("system", "plan"):
            return None
        if section == "system":
            # a number that no law reads would make a sweep of equal runs
            unread = not reads(ProfiledMachine, name, tree["system"])
            return None if unread or get_path(tree, path) is None else {}
        # a group that the profile lacks has no entry in the plan of its scenario
        if name.startswith("groups."):
            group, _, field = name.removeprefix("groups.").partition(".")
            known = get_path(tree, f"plan.groups.{group}") is not None and field in GroupPlan.model_fields
            return {} if known else None
        if name not in PlanKnobs.model_fields or name == "groups":
            return None
        return {f"plan.{key}": value for key, value in condition(PlanKnobs, name).items()}

    def evaluate(self, batches: Sequence[Batch]) -> list[Results]:
        """Run the plans of all designs, those of one run on one machine together."""
        designs = [design for batch in batches for design in batch.designs()]
        results: list[Result | None] = [self.refusal(design) for design in designs]
        legal = [place for place, refusal in enumerate(results) if refusal is None]
        # designs of one run on one machine share one model, with its laws and its cache of times on other GPUs
        models, model_of = distinct(self._what_ifs(designs[place]) for place in legal)
        for number, what_ifs in enumerate(models):
            places = [place for place, model in zip(legal, model_of, strict=True) if model == number]
            plans = [_plan(designs[place], what_ifs) for place in places]
            for place, result in zip(places, _results(what_ifs, outcomes(what_ifs, plans)), strict=True):
                results[place] = result
        # refused designs have their result already, so every place is filled
        joined = Results.of([result for result in results if result is not None])
        ends = np.cumsum([batch.size for batch in batches]).tolist()
        # the slice covers the case without batches: no end, so no begin
        starts = [0, *ends[:-1]][: len(ends)]
        return [joined.take(slice(begin, end)) for begin, end in zip(starts, ends, strict=True)]

    def relate(self, point: Columns, baseline: Columns) -> Columns:
        """Compute the speed-up."""
        return {"speedup": baseline["makespan_s"] / point["makespan_s"]}

    def replay(self, design: BaseModel) -> Replay:
        """The run by a plan: kernels on their streams, and what its critical path consists of."""
        timeline = self.timeline(design)
        return Replay(tuple(_intervals(timeline)), _limits(timeline))

    def timeline(self, design: BaseModel) -> Timeline:
        """The run by a plan, as tasks."""
        assert isinstance(design, ProfileDesign)
        what_ifs = self._what_ifs(design)
        return what_ifs.run(_plan(design, what_ifs)).timeline

    def facts(self, design: BaseModel) -> Sequence[tuple[str, Any, str, str]]:
        """Constants of the machine with their sources, those of costs of operators where another GPU computes; assumed
        effects of changes; and what share of the time of kernels is of unknown kind.
        """
        assert isinstance(design, ProfileDesign)
        unread = () if design.plan.gpu else _OF_COSTS
        unknown = unknown_kernels(self._what_ifs(design).model.profile)
        named = f"by the names of kernels, taken as computation: {unknown.largest}; {unknown.way_out()}"
        share = [("workload.unknown_share", unknown.share, "measured", named)] if unknown.counts else []
        changes = assumed_changes().facts_below("changes")
        return [*share, *changes, *(fact for fact in design.system.facts() if not fact[0].startswith(unread))]

    def _what_ifs(self, design: BaseModel) -> WhatIfs:
        """The run of a design on its machine, remembered."""
        assert isinstance(design, ProfileDesign)
        # a model depends on the run and the machine alone: all plans share it
        plain = design.model_copy(update={"plan": PlanKnobs(), "other": None})
        key = str(content_key(plain))
        if key not in self._models:
            if len(self._models) >= _MOST_MODELS:
                self._models.clear()
            self._models[key] = WhatIfs(_model(design))
        return self._models[key]


_WAY_OUT = "workload.path=run.json.gz, or a folder that profile import wrote"


def _paths(text: str) -> list[Any]:
    """Files and folders of profiles, of ranks of one run as well. Raises ConfigError."""
    # a name that holds a comma or a bracket may be a file; only what is none is taken as a list or a pattern
    try:
        return [located(text)]
    except ConfigError:
        return files_of(text) if any(mark in text for mark in "*?[,") else [located(text)]


def _with_groups(tree: Tree, profile: Profile, name: str) -> Tree:
    """The plan of a configuration, with a part for each group of collectives. Raises ConfigError."""
    if not profile.is_collective.any():
        rule, option = "has no collective to plan for", "workload.kernels"
        raise ConfigError([nothing_to_move(rule, profile, path="workload.path", value=name, option=option)])
    model = contention_model(profile, learn_laws(profile, assumed_laws(_machine(tree))))
    # configurations of several profiles share one plan: entries of nulls are of groups that this one may lack
    given = {group: plan for group, plan in (tree["plan"].get("groups") or {}).items() if _says(plan)}
    groups = [group_name(place) for place in range(len(model.names))]
    check = Problems()
    for group in set(given) - set(groups):
        check.add(f"plan.groups.{group}", "is no group of collectives", way_out=f"{name} has c1 to c{len(groups)}")
    check.done()
    # all fields of all groups, so that each can be swept as a knob
    nothing = dict.fromkeys(GroupPlan.model_fields)
    return {**tree["plan"], "groups": {group: {**nothing, **(given.get(group) or {})} for group in groups}}


def _says(plan: Any) -> bool:
    """Whether the plan of a group says anything: one of nulls may be of a group that a profile lacks."""
    return not isinstance(plan, Mapping) or any(value is not None for value in plan.values())


def _machine(tree: Tree) -> ProfiledMachine:
    return validate_as(ProfiledMachine, tree["system"], path="system")


def _other(check: Problems, name: str) -> ProfiledMachine | None:
    try:
        return machine_named(name)
    except ConfigError as error:
        for problem in error.problems:
            check.add("plan.gpu", problem.rule, value=name, way_out=problem.way_out)
        return None


def _model(design: ProfileDesign) -> ContentionModel:
    recorded = _profiles((design.workload.note, design.workload.content))[design.workload.rank]
    profile = classify(recorded, design.workload.kernels)
    return contention_model(profile, learn_laws(profile, assumed_laws(design.system)))


def _plan(design: BaseModel, what_ifs: WhatIfs) -> Any:
    assert isinstance(design, ProfileDesign)
    return design.plan.plan(len(what_ifs.model.names))


def _rules(design: ProfileDesign, what_ifs: WhatIfs) -> Iterator[Problem]:
    """Yield rules that a plan breaks."""
    # effects of settings are ratios of costs by this library, so without it no other rule can be checked
    if design.system.node is None or design.system.node.library is None:
        way = "take a machine whose library of collectives is known: python -m dse machine list"
        yield Problem("system.node.library", "is missing: collectives of a profile need its rates", way_out=way)
        return
    if design.system.node.num_gpus < 2:
        rule = "has no collectives, and the profile has"
        yield Problem("system.node.num_gpus", rule, design.system.node.num_gpus, "give it 2 or more")
        return
    yield from _mover_rules(design, what_ifs)
    yield from _sms_rules(design, what_ifs)
    if design.plan.gpu is not None:
        try:
            pace_of(what_ifs.model, design.plan.gpu)
        except ConfigError as error:
            yield from (Problem("plan.gpu", problem.rule, design.plan.gpu) for problem in error.problems)
    if design.plan.micro_batches > 1 and not what_ifs.halves.divided:
        yield Problem("plan.micro_batches", "overlaps nothing: no collective is waited for within a pass", 2)


def _mover_rules(design: ProfileDesign, what_ifs: WhatIfs) -> Iterator[Problem]:
    """Yield movers that cannot move what they are to move: of one group, and of all groups that name none."""
    plan, inherits = design.plan, list[bool]()
    for group in range(len(what_ifs.model.names)):
        name, mover = group_name(group), plan.setting(group).mover
        able = mover in what_ifs.effects.movers(group)
        if (named := plan.groups.get(name, GroupPlan()).mover) is None:
            inherits.append(able)
        elif not able:
            rule = f"cannot move these collectives: they add, or {design.system.name} has no such {mover}"
            yield Problem(f"plan.groups.{name}.mover", rule, named, f"plan.groups.{name}.mover=sms")
    # a mover for all groups is legal if one of them can use it: the others run as recorded
    if inherits and not any(inherits):
        mover = PlanKnobs(mover=plan.mover).setting(0).mover
        rule = f"can move no collective of the profile: it adds, or {design.system.name} has no such {mover}"
        yield Problem("plan.mover", rule, plan.mover, "plan.mover=sms")


def _sms_rules(design: ProfileDesign, what_ifs: WhatIfs) -> Iterator[Problem]:
    """Yield numbers of SMs that leave none for compute, each where it is given."""
    plan, most, wrong = design.plan, what_ifs.model.laws.sms, dict[str, Any]()
    for group in range(len(what_ifs.model.names)):
        if (sms := plan.setting(group).sms) is not None and sms >= most:
            named = plan.groups.get(group_name(group), GroupPlan()).sms
            path = "plan.sms" if named is None else f"plan.groups.{group_name(group)}.sms"
            wrong[path] = plan.sms if named is None else named
    yield from (Problem(path, "leaves no SM for compute", sms, f"the GPU has {most}") for path, sms in wrong.items())


def _results(what_ifs: WhatIfs, done: Outcomes) -> Iterator[Result]:
    """Yield the metrics of each plan."""
    gains = what_ifs.recorded_s - done.seconds
    makespan = done.seconds[:, EXPECTED]
    columns: dict[str, Floats] = {
        "makespan_s": makespan,
        "gain_s": gains[:, EXPECTED],
        # the mild case need not gain least, so the ends are taken over all cases
        "gain_low_s": gains.min(axis=1),
        "gain_high_s": gains.max(axis=1),
        "exposed_s": done.exposed_s,
        "hidden": done.hidden,
        "comm_sm_s": done.held_s,
        "comm_sms": done.held_s / makespan,
    }
    for place in range(len(makespan)):
        yield Result("ok", {name: float(column[place]) for name, column in columns.items()}, engine=ENGINE)


def _intervals(timeline: Timeline) -> Iterator[Interval]:
    """Yield the parts of kernels; launches are left out."""
    graph = timeline.graph
    for task in range(graph.num_tasks):
        if graph.kinds[task] != "launch":
            times = float(timeline.issued[0, task]), float(timeline.finished[0, task])
            yield Interval(graph.lanes[task], graph.tasks[task], graph.kinds[task], *times)


def _limits(timeline: Timeline) -> Mapping[str, float]:
    """Shares of the makespan on the critical path: kernels by class, contention, gaps, launches."""
    graph, spent = timeline.graph, dict[str, float]()
    alone, delay = graph["work"][0] / graph.isolated_rate()[0], graph["delay"][0]
    for task in timeline.critical_path(0):
        span = float(timeline.finished[0, task] - timeline.issued[0, task])
        kind = "host" if graph.kinds[task] == "launch" else graph.kinds[task]
        # a task's span is split in this order: its work alone, then its delay; the remainder is contention
        least = min(span, float(alone[task]))
        waited = min(span - least, float(delay[task]))
        parts = {kind: least, "host" if kind == "host" else "gaps": waited, "contention": span - least - waited}
        for name, seconds in parts.items():
            spent[name] = spent.get(name, 0.0) + max(seconds, 0.0)
    makespan = float(timeline.makespan[0])
    ordered = sorted(spent.items(), key=lambda item: -item[1])
    return {name: seconds / makespan for name, seconds in ordered if seconds > 1e-3 * makespan}
