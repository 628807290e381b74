"""Plan of a study: the validated configuration around the design."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dse import plugins
from dse.backend import Backend, Canonical, Metric, Tree
from dse.config.compose import Request
from dse.config.compose import request as composed
from dse.config.options import load_yaml, option_file
from dse.config.spelling import MOST_LISTED, nearest_key, sweep_of
from dse.errors import NO_KNOBS, ConfigError, Problem, Problems, assignment, did_you_mean, nearest
from dse.evaluation.calls import BackendSpec, validate
from dse.evaluation.evaluators import ExecutorSettings, evaluator_kind
from dse.results.pareto import Contest
from dse.search import Goal, SearchQuestion, method
from dse.space import Knob, Space, get_path
from dse.store.contract import Context
from dse.study.settings import MOST_TRIALS, SECTIONS, Budget, Settings, Study
from dse.values import LABELS, Memo

if TYPE_CHECKING:
    from dse.study.levels import Level


@dataclass(frozen=True)
class Plan:
    """Validated study: settings, backend, scenario -> space, goals by objective, and the request behind it.

    levels: of the ladder of models, from the coarsest to the finest, including the study's own; () for none.
    probes: name -> the plan of points beside the space, where they fit what was typed.
    """

    settings: Settings
    spec: BackendSpec
    spaces: Mapping[str, Space]
    goals: Mapping[str, Goal]
    request: Request
    levels: tuple[Level, ...] = ()
    probes: Mapping[str, Plan] = field(default_factory=dict)

    @property
    def backend(self) -> Backend:
        """The backend that evaluates designs."""
        return self.spec.make()

    @property
    def metrics(self) -> dict[str, Metric]:
        """Metrics of the backend, those relative to a baseline and what is proven included."""
        return dict(self.backend.described)

    @property
    def context(self) -> Context:
        """Context of evaluation: what results depend on besides the design."""
        return self.spec.context

    @property
    def num_points(self) -> int:
        """Number of points to be requested, probes included, without baselines outside the space."""
        trials = self.settings.budget.trials
        own_points = sum(trials if (size := space.size(trials)) is None else size for space in self.spaces.values())
        return own_points + sum(probe.num_points for probe in self.probes.values())

    @property
    def contest(self) -> Contest:
        """Rule of which rows may win, and of which of them where several are equally good."""
        declared = {path: str(get_path(self.request.tree, path)) for path in self.knobs}
        return Contest(self.settings.study.answer, self.knobs, declared)

    @property
    def knobs(self) -> tuple[str, ...]:
        """Searched paths."""
        return tuple(knob.path for knob in self.request.knobs)

    @property
    def may_repeat(self) -> bool:
        """True where a searched knob may change nothing in some designs, so that several points are one design."""
        space, backend = next(iter(self.spaces.values())), self.backend  # scenarios share knobs
        if not isinstance(backend, Canonical):
            return False
        return not set(backend.neutral(backend.design(space.base))).isdisjoint(self.knobs)

    @property
    def recorded_paths(self) -> tuple[str, ...]:
        """Paths that the table holds besides the searched ones: those listed, and those read by claims and figures."""
        sections = next(iter(self.spaces.values())).base  # scenarios have the same sections
        columns = getattr(plugins.load("study", self.settings.study.module), "columns", ())
        needed = [path for path in columns if path.partition(".")[0] in sections]
        # each once, in order
        return tuple(path for path in dict.fromkeys((*self.settings.study.recorded, *needed)) if path not in self.knobs)

    @property
    def departures(self) -> list[str]:
        """Overrides that change the subject of the study's claims: its hardware or its workload."""
        about, file = (*self.settings.study.hardware, "workload"), option_file("study", self.settings.study.name)
        defaults = load_yaml(file).get("defaults", []) if file else []
        chosen = [entry.items() for entry in defaults if isinstance(entry, Mapping)]
        options = {f"{str(group).rpartition('/')[2]}={option}" for pairs in chosen for group, option in pairs}
        keys = {text: text.lstrip("+~").partition("=")[0].removeprefix("space.") for text in self.request.overrides}
        return [text for text, key in keys.items() if key.partition(".")[0] in about and text not in options]


def plan(request: Request) -> Plan:
    """Validate a request. Raises ConfigError with every problem of its words and files, else of its values."""
    request.check()
    check = Problems()
    sections = {key: value for key, value in request.tree.items() if key in SECTIONS}
    settings = _settings(check, sections)
    try:
        spec = BackendSpec.of(request.tree.get("simulator"))
        space = _composed_space(check, request, spec.make())
    except ConfigError as error:
        check.found.extend(error.problems)
        check.done()
        raise
    of_bases = Problems()
    scenarios = _spaces(of_bases, space, spec.make())
    space = replace(space, knobs=_counting_knobs(request, list(scenarios.values()) or [space]), known=Memo())
    spaces = {name: replace(space, base=scenario.base) for name, scenario in scenarios.items()}
    example = next(iter(spaces.values()), space)  # a base that is a design says of a value alone whether it is legal
    _check_knobs(check, list(spaces.values()) or [space])
    # its problems were noted with the settings
    study = settings.study if settings else Problems().model(Study, request.tree.get("study"), path="study")
    if study is not None:
        _check_study(check, study, example)
    check.found.extend(of_bases.found)
    if study is not None and not check.found:  # importing a module takes longer than all that refuses a value
        _check_module(check, study)
    _check_typed(check, request, spaces)
    if settings is not None and settings.beside is not None and spaces:
        _check_measured(check, settings.beside, spaces)
    if settings is not None and not check.found:  # a sampler may fail on what was noted already
        _check_search(check, settings, spaces)
    ladder: tuple[Level, ...] = ()
    if settings is not None and settings.fidelity.levels:
        ladder = _ladder(check, settings, request, spec=spec, spaces=spaces)
    check.done()
    assert settings is not None
    goals = _goals(settings, space.knobs, spec.make())
    planned = Plan(settings, spec, spaces, goals, replace(request, knobs=space.knobs), ladder)
    return replace(planned, probes={**dict(_plan_probes(check, planned)), **dict(_plan_cases(planned))})


def _settings(check: Problems, sections: Mapping[str, Any]) -> Settings | None:
    """The settings, those of the executor as its evaluator has them; None, with every problem, if they do not hold."""
    section = sections.get("executor")
    try:
        kind = evaluator_kind(str(section.get("evaluator", "local") if isinstance(section, Mapping) else "local"))
        executor = check.model(kind.settings, section, path="executor")
    except ConfigError as error:
        check.found.extend(error.problems)
        return None
    # stands in, so that the other sections are still checked
    settings = check.model(Settings, {**sections, "executor": executor or ExecutorSettings(name="refused")}, path="")
    if settings and kind.store_for and settings.store.url is None:
        check.add("store", f"keeps nothing, and {kind.store_for}", value="none", way_out="use store=sqlite")
    return settings if executor else None


def _plan_probes(check: Problems, planned: Plan) -> Iterator[tuple[str, Plan]]:
    """Yield the plans of a study's probes. Raises ConfigError where one does not fit what the study is by itself.

    Where something was typed, a probe that does not fit is left out: claims that need it are told as not tested.
    """
    for name, probe in planned.settings.study.probes.items():
        knobs = tuple(Knob(path, values) for path, values in probe.values().items())
        chosen = {
            scenario: replace(space, knobs=knobs, known=Memo())  # what the study's space knows is of other knobs
            for scenario, space in planned.spaces.items()
            if any(fnmatch.fnmatchcase(scenario, pattern) for pattern in probe.scenarios)
        }
        misfit = Problems()
        if chosen:
            _check_knobs(misfit, list(chosen.values()), f"study.probes.{name}.points")
        if chosen and not misfit.found:
            yield name, _plan_beside(planned, name, chosen)
        elif not planned.departures:  # what was typed may rule a probe out: not an error
            check.found.extend(misfit.found)
    check.done()


def _plan_cases(planned: Plan) -> Iterator[tuple[str, Plan]]:
    """Yield a plan for each probe whose points the module of the study makes (`cases`); each point is its own baseline.

    Cases that are no designs with what was typed are left out.
    """
    module = plugins.load("study", planned.settings.study.module)
    if not hasattr(module, "cases"):
        return
    space = next(iter(planned.spaces.values()))
    for name, cases in module.cases(planned.request.tree).items():
        spaces = {
            label: replace(space, base=case.tree, knobs=case.knobs, options={}, known=Memo())  # a case is complete
            for label, case in cases.items()
            if _is_design(space.backend, case.tree)
        }
        if spaces:
            yield name, _plan_beside(planned, name, spaces, baseline={})


def _is_design(backend: Backend, tree: Tree) -> bool:
    try:
        backend.design(tree)
    except ConfigError:
        return False
    return True


def _plan_beside(planned: Plan, name: str, spaces: Mapping[str, Space], **changes: Any) -> Plan:
    """The plan of all points of other spaces than the study's. changes: of the study's settings."""
    study = planned.settings.study.model_copy(update={"name": f"{planned.settings.study.name}.{name}", **changes})
    # large enough to enumerate; a probe beyond the largest budget, as of a knob of a million values, is searched
    budget = Budget(trials=min(MOST_TRIALS, max(1, *(space.size() or 1 for space in spaces.values()))))
    # winners of a probe are of no interest
    settings = planned.settings.model_copy(update={"study": study, "budget": budget, "timeline": False})
    knobs = next(iter(spaces.values())).knobs
    return replace(planned, settings=settings, spaces=spaces, request=replace(planned.request, knobs=knobs))


def _ladder(
    check: Problems, settings: Settings, request: Request, *, spec: BackendSpec, spaces: Mapping[str, Space]
) -> tuple[Level, ...]:
    """Return the levels that the study is compared with; () with the problems noted."""
    from dse.study.levels import OWN, check_level, levels, same_designs  # a study without a ladder needs none

    if set(settings.fidelity.levels) - {*request.levels, OWN}:  # unknown names
        return ()  # reported when the request was composed
    try:
        name = str(settings.simulator.get("name") or spec.name)
        ladder = levels(settings.fidelity, request.levels, (name, spec))
    except ConfigError as error:
        check.found.extend(error.problems)
        return ()
    for level in ladder:
        if not check.found:
            goals = _goals(settings, next(iter(spaces.values())).knobs, spec.make())
            check_level(check, level, spaces, alike=same_designs(level.spec, spec), goals=goals)
    return ladder


def _composed_space(check: Problems, request: Request, backend: Backend) -> Space:
    """Return the space over the composed design, which scenarios complete. Raises ConfigError where there is none."""
    design = {key: value for key, value in request.tree.items() if key not in SECTIONS}
    data_dir = get_path(request.tree, "study.data_dir")
    design |= {} if data_dir is None else {"data_dir": data_dir}
    backend.sections(design)  # raises where one is missing
    if absence := backend.absence():
        check.add("simulator", absence, value=get_path(request.tree, "simulator.name"))
    options = {section: named for section, named in request.options.items() if section in design}
    return Space(design, request.knobs, options, backend)


def _spaces(check: Problems, space: Space, backend: Backend) -> dict[str, Space]:
    """Return the space of each scenario; {} with the problems of the base designs noted."""
    try:
        bases = backend.scenarios(space.base)
        validate(backend, bases)
    except ConfigError as error:
        check.found.extend(error.problems)
        return {}
    return {name: replace(space, base=base) for name, base in bases.items()}


def _check_typed(check: Problems, request: Request, spaces: Mapping[str, Space]) -> None:
    """Check that values typed for a section that scenarios leave as it is are read by the backend."""
    for text in request.overrides:
        path, equals, _ = text.lstrip("+").partition("=")
        section = path.partition(".")[0]
        # options of groups and labels are no values
        if not equals or path == section or path.rpartition(".")[2] in LABELS:
            continue
        # scenarios that replace the section do not read the composed one
        alike = [space for space in spaces.values() if space.base.get(section) == request.tree.get(section)]
        value = get_path(request.tree, path)
        # of a mapping its leaves count
        if len(alike) < max(1, len(spaces)) or section in alike[0].options or isinstance(value, Mapping | None):
            continue
        if all(space.backend.condition(path, space.base) is None for space in alike):
            siblings = [name for name in _siblings(alike[0].base, path) if _counts(alike[0], path, name)]
            rule = f"is not read by simulator={get_path(request.tree, 'simulator.name')}"
            check.add(path, rule, value=value, way_out=did_you_mean(path.rpartition(".")[2], siblings))


def _counts(space: Space, path: str, name: str) -> bool:
    """Return whether a sibling of a path is read."""
    return space.backend.condition(f"{path.rpartition('.')[0]}.{name}", space.base) is not None


def _counting_knobs(request: Request, spaces: Sequence[Space]) -> tuple[Knob, ...]:
    """Return the knobs without those that count in the study alone, and in no scenario for what was typed."""
    knobs = spaces[0].knobs
    typed = {text.lstrip("+").partition("=")[0].removeprefix("space.") for text in request.overrides}
    searched = [] if typed <= {"study"} else [knob for knob in knobs if not spaces[0].is_option(knob.path)]
    # a knob that was typed must fit: an error otherwise
    idle = [knob for knob in searched if knob.path not in typed and not _counts_in(spaces, knob.path)]
    if idle:
        study = composed([text for text in request.overrides if text.startswith("study=")], request.folder)
        space = _composed_space(Problems(), study, BackendSpec.of(study.tree.get("simulator")).make())
        alone = _spaces(Problems(), space, space.backend).values()
        idle = [knob for knob in idle if _counts_in(alone, knob.path)]
    return tuple(knob for knob in knobs if knob not in idle)


def _counts_in(spaces: Iterable[Space], path: str) -> bool:
    return any(space.first_counting(path) is not None for space in spaces)


def _check_measured(check: Problems, path: str, scenarios: Iterable[str]) -> None:
    """Note the faults of the user's measurements before anything is evaluated."""
    from dse.results import measured

    try:
        measured.read(Path(path), scenarios)
    except ConfigError as error:
        check.found.extend(error.problems)


def _check_module(check: Problems, study: Study) -> None:
    """Check that the module of a study exists and its claims can be read."""
    try:
        plugins.load("study", study.module).claims()
    except ConfigError as error:
        check.found.extend(error.problems)


def _check_study(check: Problems, study: Study, space: Space) -> None:
    """Check that the metrics and the baseline exist."""
    metrics = space.backend.metrics
    for key in ("objectives", "hardware_objectives", "limits"):
        for name in getattr(study, key):
            if name not in metrics:
                check.add(f"study.{key}", "is no metric", value=name, way_out=did_you_mean(name, metrics))
    _check_baseline(check, study, space)


def _check_baseline(check: Problems, study: Study, space: Space) -> None:
    """Check that the values of the baseline are legal."""
    # options first: they decide which other paths there are
    options = {path: value for path, value in study.baseline.items() if path.endswith(".name")}
    for path, value in options.items():
        named = space.options.get(path.partition(".")[0], {})
        if value not in named:
            way = did_you_mean(str(value), named)
            check.add("study.baseline", f"names no option of {path.partition('.')[0]}", value=value, way_out=way)
            return  # other paths could only be judged with it
    for path, value in study.baseline.items():
        if path not in options and space.backend.condition(path, space.tree(options)) is None:
            siblings = _siblings(space.tree(options), path)
            way = did_you_mean(path.rpartition(".")[2], siblings)
            check.add("study.baseline", f"{path} is no knob of any design here", way_out=way)
        elif path not in options:
            _check_value(check, space, {**options, path: value}, "study.baseline")


def _check_search(check: Problems, settings: Settings, spaces: Mapping[str, Space]) -> None:
    """Check that a space too large to enumerate within the budget has a sampler with legal options."""
    trials = settings.budget.trials
    large = [name for name, space in spaces.items() if space.size(trials) is None]
    if large and settings.search.name == "exhaustive":
        size = spaces[large[0]].size()
        extent = f"{size} points, more than budget.trials = {trials}" if size else "an interval, endlessly many points"
        rule = f"cannot enumerate {large[0]}: it has {extent}"
        check.add("search", rule, value="exhaustive", way_out="raise budget.trials or use search=auto")
    elif large:
        _check_warm_start(check, settings)
        space = spaces[large[0]]
        goals = _goals(settings, space.knobs, space.backend)
        try:  # makes the sampler without evaluating anything, to check its options
            method(SearchQuestion(space, goals, settings.seed, trials, lambda points: [], repr), settings.search)
        except ConfigError as error:
            check.found.extend(error.problems)


def _check_warm_start(check: Problems, settings: Settings) -> None:
    """Check that the runs that a search begins with exist."""
    from dse.results.run_folder import FinishedRun  # most searches begin with none

    for run in settings.search.warm_start:
        try:
            FinishedRun.find(Path(settings.output_dir), run, "search.warm_start")
        except ConfigError as error:
            check.found.extend(error.problems)


def _goals(settings: Settings, knobs: tuple[Knob, ...], backend: Backend) -> dict[str, Goal]:
    # with fixed hardware, objectives such as its price are the same for all points
    hardware = any(knob.path.partition(".")[0] in settings.study.hardware for knob in knobs)
    names = (*settings.study.objectives, *(settings.study.hardware_objectives if hardware else ()))
    return {name: backend.metrics[name].goal for name in names}


def _check_knobs(check: Problems, spaces: Sequence[Space], section: str = "space") -> None:
    """Check that every value of every knob is legal where it counts, and that every knob counts in some scenario.

    spaces: of the scenarios. section: path of the knobs in the configuration.
    """
    space = spaces[0]
    for knob in space.knobs:
        if space.is_option(knob.path):
            continue
        # a knob may count in some scenario, under some option only
        counting = ((space_of_knob, space_of_knob.first_counting(knob.path)) for space_of_knob in spaces)
        scenario, chosen = next(
            ((space_of_knob, found) for space_of_knob, found in counting if found is not None), (space, None)
        )
        if chosen is None:
            rule, way = _no_knob(space, knob.path)
            # the way out is a path below the section
            check.add(f"{section}.{knob.path}", rule, way_out=way.replace("mean `", f"mean `{section}."))
            continue
        check.found.extend(_illegal_values(scenario, knob, chosen, section))


def _no_knob(space: Space, path: str) -> tuple[str, str]:
    """Return the rule that a path breaks which is no knob, and the way out."""
    if path.partition(".")[0] in NO_KNOBS:
        return "is no knob of any design here", "it configures how a study runs: leave it out"
    if path in space.base and get_path(space.base, f"{path}.name") is not None:  # a section whose option was meant
        return "is no knob of any design here", f"did you mean `{path}.name`?"
    trees = map(space.tree, space.each_option)
    siblings = {name: None for tree in trees for name in _siblings(tree, path) if _counts(space, path, name)}
    name = path.rpartition(".")[2]
    way = did_you_mean(name, siblings)
    if near := nearest(name, siblings):
        way = way.replace(f"mean `{near}", f"mean `{path.removesuffix(name)}{near}")
    elsewhere = nearest_key(space.base, path.removeprefix("space."))
    # a list of names, and no guess
    return "is no knob of any design here", elsewhere if way.startswith(("known", "nothing")) else way


def _illegal_values(space: Space, knob: Knob, chosen: Mapping[str, Any], section: str) -> list[Problem]:
    """Return the problems of the values of a knob, with the knob of the legal ones as the way out."""
    path, problems = f"{section}.{knob.path}", dict[Any, list[Problem]]()
    checked = _values_to_check(knob)
    for value in checked:
        check = Problems()
        _check_value(check, space, {**chosen, knob.path: value}, path)
        if check.found:
            problems[value] = check.found
    legal = [value for value in checked if value not in problems]
    if legal and problems and len(checked) < len(knob.values):  # between two that are legal, all are
        ends, first, last = (legal[0], legal[-1]), min(problems), max(problems)
        legal = [value for value in knob.values if ends[0] <= value <= ends[1] and not first <= value <= last] or legal
    way = f"write `{assignment(path, sweep_of(legal))}`" if legal else ""
    listed = [problem for group in problems.values() for problem in group]
    if len(problems) > MOST_LISTED:  # one for each rule, with the first value and the last
        by_rule: dict[tuple[str, str], list[Problem]] = {}
        for problem in listed:
            by_rule.setdefault((problem.path, problem.rule), []).append(problem)
        listed = [replace(group[0], value=_span(group)) for group in by_rule.values()]
    # ways out are written for overrides of the space
    return [replace(problem, way_out=way) if section == "space" and way else problem for problem in listed]


def _span(problems: Sequence[Problem]) -> object:
    return f"{problems[0].value} to {problems[-1].value}" if len(problems) > 1 else problems[0].value


_MOST_CHECKED = 1000  # values of a knob


def _values_to_check(knob: Knob) -> Sequence[Any]:
    """The values of a knob that are validated before anything runs: all; of very many that ascend, some and both ends.

    What is legal at both ends is so between them, but for rules that are checked of each point as well.
    """
    count = len(knob.values)
    if count <= _MOST_CHECKED or not knob.is_ordered:
        return knob.values or (knob.low, knob.high)
    # both ends included
    return [knob.values[place * (count - 1) // (_MOST_CHECKED - 1)] for place in range(_MOST_CHECKED)]


def _siblings(tree: Tree, path: str) -> list[str]:
    node: Any = tree
    for name in path.split(".")[:-1]:
        node = node.get(name, {}) if isinstance(node, Mapping) else {}
    return list(node) if isinstance(node, Mapping) else []


def _check_value(check: Problems, space: Space, assignment: dict[str, Any], shown: str) -> None:
    """Note the problems of the last value of an assignment, as problems of `shown`."""
    path = list(assignment)[-1]
    try:
        space.backend.design(space.tree(assignment))
    except ConfigError as error:
        for problem in error.problems:
            if problem.path.startswith(path):  # other problems are of the base, not of this value
                rule = problem.rule if shown.endswith(f".{problem.path}") else f"{problem.path} {problem.rule}"
                way = problem.way_out.replace(f"write `{problem.path}=", f"write `{shown}=")
                # a baseline is a mapping: no single override mends it
                check.add(shown, rule, value=problem.value, way_out="" if shown == "study.baseline" else way)
    except KeyError:
        check.add(shown, f"{path} lies below a value that holds no keys")
