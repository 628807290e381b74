"""A study as asked: the validated configuration around the design."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from dse import plugins
from dse.backend import Backend, Canonical, Status, Tree
from dse.config.compose import Request
from dse.errors import ConfigError, Problems, did_you_mean
from dse.evaluation.backend_spec import BackendSpec, validate
from dse.evaluation.executor import Executor
from dse.fidelity import OWN, Fidelity, Level, handed, levels, told
from dse.results.finished_run import Finished
from dse.results.selection import Rule
from dse.search import Goal, Limit, Question, Search, method
from dse.space import Knob, Space, get_path
from dse.store.result_store import Context
from dse.units import Integer, Number, WallSeconds
from dse.values import Frozen

_SECTIONS = (
    "study",
    "simulator",
    "search",
    "executor",
    "tracking",
    "space",
    "seed",
    "output_dir",
    "timeline",
    "budget",
    "store",
    "resume",
    "fidelity",
)


class Study(Frozen):
    """The `study` group. module: the module of `studies` that knows the claims and figures.

    objectives: metrics, the first decides the winner; hardware_objectives join when a knob below one of the sections
    `hardware` is searched. limits: by metric; a point beyond one is infeasible. baseline: values that turn any point
    into the one it is compared with. recorded: paths of the design that the table holds beside the knobs. summary:
    columns of the table shown for each winner. uncertainty: constants of the design -> how far off they may be, as a
    share (`dse.robustness`). data_dir: folder of measured tables, for studies that read such; the backend finds it in
    the design as `data_dir`.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,80}$")]
    description: str = ""
    module: str
    objectives: Annotated[tuple[str, ...], Field(min_length=1)]
    hardware_objectives: tuple[str, ...] = ()
    hardware: tuple[str, ...] = ()
    limits: Mapping[str, Limit] = Field(default_factory=dict)
    baseline: Mapping[str, str | bool | int | float | None]
    recorded: tuple[str, ...] = ()
    summary: tuple[str, ...] = ()
    uncertainty: Mapping[str, Annotated[Number, Field(gt=0, lt=1)]] = Field(default_factory=dict)
    data_dir: str | None = None


class Budget(Frozen):
    """trials: distinct points per scenario."""

    trials: Annotated[Integer, Field(ge=1, le=10_000_000)]


def _tracking_uri(uri: str) -> str:
    if not re.match(r"(sqlite|postgresql|mysql|mssql|https?|file|databricks|uc)(\+\w+)?(:|$)", uri):
        raise ValueError("must be null or a tracking URI of MLflow, such as sqlite:///mlflow.db or http://<host>:5000")
    return uri


class Tracking(Frozen):
    """The `tracking` group. uri: where MLflow keeps runs; None for no tracking. optuna: URL, or path of a `.log`
    journal, where Optuna keeps trials. points, whole_up_to: which points are shown (`dse.results.selection.Rule`).
    """

    name: str
    description: str = ""
    uri: Annotated[str, AfterValidator(_tracking_uri)] | None
    optuna: Annotated[str, Field(min_length=1)] | None = None
    points: Literal["auto", "all", "none"] = "auto"
    whole_up_to: Annotated[Integer, Field(ge=0)] = 10_000

    @property
    def rule(self) -> Rule:
        """Which points are shown."""
        return Rule(self.points, self.whole_up_to)


def _store_url(url: str) -> str:
    if not re.fullmatch(r"auto|sqlite:///.+|postgresql(\+psycopg)?://.+", url):
        raise ValueError("must be auto, null, sqlite:///<file> or postgresql://<user>@<host>/<database>")
    return url


class StoreAt(Frozen):
    """The `store` group. url: of the database; `auto` for results.db in the output folder, null for none.

    retry: statuses of recorded results that are evaluated again. patience_s: for which one that does not answer is
    waited for.
    """

    name: str
    description: str = ""
    url: Annotated[str, AfterValidator(_store_url)] | None = "auto"
    retry: tuple[Status, ...] = ()
    patience_s: WallSeconds = 60.0


class Settings(Frozen):
    """Everything of a configuration that is not the design. timeline: run the winners again, in full.

    resume: what to do about an earlier study that was asked otherwise: auto (refuse), fork or accept.
    """

    study: Study
    simulator: Mapping[str, Any]
    search: Search
    budget: Budget
    executor: Executor
    tracking: Tracking
    space: Mapping[str, Any]
    seed: Annotated[Integer, Field(ge=0, le=2**32 - 1)]
    output_dir: Annotated[str, Field(min_length=1)]
    timeline: bool = True
    store: StoreAt = StoreAt(name="sqlite")
    resume: Literal["auto", "fork", "accept"] = "auto"
    fidelity: Fidelity = Fidelity(name="none")


@dataclass(frozen=True)
class Plan:
    """A study that may run: settings, backend, scenario -> space, goals by objective, and the request behind it.

    levels: of the ladder of models, from the coarsest to the finest, the study's own among them; () for none.
    """

    settings: Settings
    spec: BackendSpec
    spaces: Mapping[str, Space]
    goals: Mapping[str, Goal]
    request: Request
    levels: tuple[Level, ...] = ()

    @property
    def backend(self) -> Backend:
        """The backend that evaluates designs."""
        return self.spec.make()

    @property
    def context(self) -> Context:
        """What evaluates designs, as far as results depend on it."""
        return self.spec.context

    @property
    def num_points(self) -> int:
        """Points that will be asked for, baselines outside the space not counted."""
        trials = self.settings.budget.trials
        return sum(trials if (size := space.size(trials)) is None else size for space in self.spaces.values())

    @property
    def knobs(self) -> tuple[str, ...]:
        """Searched paths."""
        return tuple(knob.path for knob in self.request.knobs)

    @property
    def may_repeat(self) -> bool:
        """Whether a searched knob may change nothing in some designs, so that several points are one."""
        space, backend = next(iter(self.spaces.values())), self.backend
        if not isinstance(backend, Canonical):
            return False
        return not set(backend.neutral(backend.design(space.base))).isdisjoint(self.knobs)

    @property
    def recorded(self) -> tuple[str, ...]:
        """Paths the table holds beside the searched ones: those listed, and what claims and figures read."""
        sections = next(iter(self.spaces.values())).base
        columns = getattr(plugins.load("studies", self.settings.study.module, "STUDY"), "columns", ())
        needed = [path for path in columns if path.partition(".")[0] in sections]
        return tuple(path for path in dict.fromkeys((*self.settings.study.recorded, *needed)) if path not in self.knobs)

    @property
    def departures(self) -> list[str]:
        """Overrides that change what the study's claims are about: its hardware or its workload."""
        about = (*self.settings.study.hardware, "workload")
        keys = {text: text.lstrip("+~").partition("=")[0].removeprefix("space.") for text in self.request.overrides}
        return [text for text, key in keys.items() if key.partition(".")[0] in about]


def plan(request: Request) -> Plan:
    """Validate a request. Raises ConfigError with every problem of command line, files and values."""
    check = Problems()
    check.found.extend(request.problems)
    if not request.tree:
        check.done()
    sections = {key: value for key, value in request.tree.items() if key in _SECTIONS}
    settings = check.model(Settings, sections, path="")
    try:
        spec = BackendSpec.of(request.tree.get("simulator"))
        found = _checked_space(check, request, spec.make())
    except ConfigError as error:
        check.found.extend(error.problems)
        check.done()
        raise
    study = settings.study if settings else Problems().model(Study, request.tree.get("study"), path="study")
    if study is not None:
        _check_study(check, study, found)
    spaces = _spaces(check, found, spec.make())
    if settings is not None and not check.found:
        _check_search(check, settings, spaces)
    ladder = _ladder(check, settings, request, spec=spec)
    for level in ladder:
        if settings is not None and not check.found:
            alike = level.spec.name == spec.name
            _check_level(check, level, spaces, alike=alike, goals=_goals(settings, found.knobs, spec.make()))
    check.done()
    assert settings is not None
    goals = _goals(settings, found.knobs, spec.make())
    return Plan(settings, spec, spaces, goals, replace(request, knobs=found.knobs), ladder)


def _ladder(check: Problems, settings: Settings | None, request: Request, *, spec: BackendSpec) -> tuple[Level, ...]:
    """The levels that the study is compared with; () with the problems noted."""
    if settings is None or set(settings.fidelity.levels) - {*request.levels, OWN}:
        return ()  # which was told when the request was composed
    try:
        own = str(settings.simulator.get("name") or spec.name)
        return levels(settings.fidelity, request.levels, (own, spec))
    except ConfigError as error:
        check.found.extend(error.problems)
        return ()


def _check_level(
    check: Problems, level: Level, spaces: Mapping[str, Space], *, alike: bool, goals: Mapping[str, Goal]
) -> None:
    """A level must give the objectives, with the study's goals, and take the base designs.

    alike: whether its backend is of the kind of the study's; one of another kind is handed plain values.
    """
    backend, own = level.spec.make(), next(iter(spaces.values())).backend
    for name, goal in goals.items():
        if name not in backend.metrics or backend.metrics[name].goal != goal:
            rule = f"does not {goal} the study's objective {name}"
            check.add(f"fidelity.levels ({level.name})", rule, way_out=f"its metrics: {', '.join(backend.metrics)}")
    try:
        bases = {name: space.base if alike else handed(own, space.base) for name, space in spaces.items()}
        backend.sections(next(iter(bases.values())))
        validate(backend, bases)
    except ConfigError as error:
        check.found.extend(told(level.name, error.problems))


def _checked_space(check: Problems, request: Request, backend: Backend) -> Space:
    """The space over the composed design, its knobs checked. Raises ConfigError where there is no design."""
    design = {key: value for key, value in request.tree.items() if key not in _SECTIONS}
    data_dir = get_path(request.tree, "study.data_dir")
    design |= {} if data_dir is None else {"data_dir": data_dir}
    backend.sections(design)
    options = {section: named for section, named in request.options.items() if section in design}
    space = Space(design, _fitting(request, design, backend), options, backend)
    _check_knobs(check, space)
    return space


def _spaces(check: Problems, found: Space, backend: Backend) -> dict[str, Space]:
    """The space of each scenario; {} with the problems of the base designs noted."""
    try:
        bases = backend.scenarios(found.base)
        validate(backend, bases)
    except ConfigError as error:
        check.found.extend(error.problems)
        return {}
    return {name: replace(found, base=base) for name, base in bases.items()}


def _fitting(request: Request, design: Tree, backend: Backend) -> tuple[Knob, ...]:
    """Without the knobs of the study's own space that mean nothing once the option of their group was typed."""
    typed = {text.lstrip("+").partition("=")[0].removeprefix("space.") for text in request.overrides}
    return tuple(
        knob
        for knob in request.knobs
        if knob.path in typed
        or knob.path.partition(".")[0] not in request.fixed
        or backend.condition(knob.path, design) is not None
    )


def _check_study(check: Problems, study: Study, space: Space) -> None:
    """The module, the metrics and the baseline must exist."""
    try:
        plugins.load("studies", study.module, "STUDY")
    except ConfigError as error:
        check.found.extend(error.problems)
    metrics = space.backend.metrics
    for key in ("objectives", "hardware_objectives", "limits"):
        for name in getattr(study, key):
            if name not in metrics:
                check.add(f"study.{key}", "is no metric", value=name, way_out=did_you_mean(name, metrics))
    _check_baseline(check, study, space)


def _check_baseline(check: Problems, study: Study, space: Space) -> None:
    """The values of the baseline must be legal."""
    options = {path: value for path, value in study.baseline.items() if path.endswith(".name")}
    for path, value in options.items():
        named = space.options.get(path.partition(".")[0], {})
        if value not in named:
            check.add("study.baseline", f"{path} names no option", value=value, way_out=did_you_mean(str(value), named))
            return
    for path, value in study.baseline.items():
        if path not in options and space.backend.condition(path, space.tree(options)) is None:
            known = _siblings(space.tree(options), path)
            way = did_you_mean(path.rpartition(".")[2], known)
            check.add("study.baseline", f"{path} is no knob of any design here", way_out=way)
        elif path not in options:
            _check_value(check, space, {**options, path: value}, "study.baseline")


def _check_search(check: Problems, settings: Settings, spaces: Mapping[str, Space]) -> None:
    """A space that cannot be enumerated within the budget needs a sampler with legal options."""
    trials = settings.budget.trials
    large = [name for name, space in spaces.items() if space.size(trials) is None]
    if large and settings.search.name == "exhaustive":
        size = spaces[large[0]].size()
        many = f"{size} points, more than budget.trials = {trials}" if size else "an interval, endlessly many points"
        rule = f"cannot enumerate {large[0]}: it has {many}"
        check.add("search", rule, value="exhaustive", way_out="raise budget.trials or use search=auto")
    elif large:
        _check_warm_start(check, settings)
        space = spaces[large[0]]
        goals = _goals(settings, space.knobs, space.backend)
        try:
            method(Question(space, goals, settings.seed, trials, lambda points: [], repr), settings.search)
        except ConfigError as error:
            check.found.extend(error.problems)


def _check_warm_start(check: Problems, settings: Settings) -> None:
    """The runs that a search begins with must be there."""
    for said in settings.search.warm_start:
        try:
            Finished.find(Path(settings.output_dir), said, "search.warm_start")
        except ConfigError as error:
            check.found.extend(error.problems)


def _goals(settings: Settings, knobs: tuple[Knob, ...], backend: Backend) -> dict[str, Goal]:
    hardware = any(knob.path.partition(".")[0] in settings.study.hardware for knob in knobs)
    names = (*settings.study.objectives, *(settings.study.hardware_objectives if hardware else ()))
    return {name: backend.metrics[name].goal for name in names}


def _check_knobs(check: Problems, space: Space) -> None:
    """Every value of every knob must be legal where it counts, and every knob must count somewhere."""
    chosen = [{f"{section}.name": name} for section, named in space.options.items() for name in named]
    options: list[dict[str, Any]] = [{}, *chosen]
    for knob in space.knobs:
        if space.is_option(knob.path):
            continue
        fitting = [(option, needed) for option in options if (needed := _needed(space, knob, option)) is not None]
        if not fitting:
            known = did_you_mean(knob.path.rpartition(".")[2], _siblings(space.tree(options[0]), knob.path))
            check.add(f"space.{knob.path}", "is no knob of any design here", way_out=known)
            continue
        option, needed = fitting[0]
        for value in knob.values or (knob.low, knob.high):
            _check_value(check, space, {**option, **needed, knob.path: value}, f"space.{knob.path}")


def _needed(space: Space, knob: Knob, option: Mapping[str, Any]) -> Mapping[str, Any] | None:
    return space.backend.condition(knob.path, space.tree(option))


def _siblings(tree: Tree, path: str) -> list[str]:
    node: Any = tree
    for name in path.split(".")[:-1]:
        node = node.get(name, {}) if isinstance(node, Mapping) else {}
    return list(node) if isinstance(node, Mapping) else []


def _check_value(check: Problems, space: Space, assignment: dict[str, Any], shown: str) -> None:
    """Note what is wrong with the last value of an assignment, as a problem of `shown`."""
    path = list(assignment)[-1]
    try:
        space.backend.design(space.tree(assignment))
    except ConfigError as error:
        for problem in error.problems:
            if problem.path.startswith(path):
                rule = f"{problem.path} {problem.rule}" if shown != f"space.{problem.path}" else problem.rule
                check.add(shown, rule, value=problem.value, way_out=problem.way_out)
    except KeyError:
        check.add(shown, f"{path} lies below a value that holds no keys")
