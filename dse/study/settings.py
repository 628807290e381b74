"""Settings: everything of a configuration that is not the design."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field

from dse.errors.texts import ambiguous
from dse.evaluation.evaluators import ExecutorSettings
from dse.results.pareto import Answer
from dse.results.selection import SelectionRule
from dse.search import Limit, Search, constraints
from dse.store.contract import StoreAt
from dse.values import Frozen
from dse.values.units import Integer, Number, illegal

SECTIONS = (
    "study",
    "simulator",
    "search",
    "executor",
    "tracking",
    "space",
    "seed",
    "output_dir",
    "timeline",
    "figures",
    "verbose",
    "decide",
    "beside",
    "budget",
    "store",
    "resume",
    "fidelity",
)
"""Sections of a configuration that are settings; the others are the design."""


Scalar = str | bool | int | float | None


class Probe(Frozen):
    """Points beside the space of a study that its claims or figures need: a grid around the base design.

    points: dotted path -> value, or list of values. scenarios: glob patterns of the scenarios it is evaluated in.
    timelines: whether its points are replayed as winners are.
    """

    points: Annotated[Mapping[str, Scalar | tuple[Scalar, ...]], Field(min_length=1)]
    scenarios: tuple[str, ...] = ("*",)
    timelines: bool = False

    def values(self) -> dict[str, tuple[Scalar, ...]]:
        """Path -> its values; a single value is a list of one."""
        return {path: value if isinstance(value, tuple) else (value,) for path, value in self.points.items()}


class Study(Frozen):
    """The `study` group. question: what is asked, in one sentence. module: that of `studies` which knows the claims and
    figures. paper: whose values it checks, such as `arXiv:2512.10236`; `dse results reproduce` runs all studies of one.

    objectives: metrics, the first decides the winner; hardware_objectives join when a knob below one of the sections
    `hardware` is searched. Claims are not judged where one of these sections, or `workload`, was changed, except below
    what the module `allows`. limits: by metric; a point beyond one is infeasible. baseline: values that turn any point
    into the one it is compared with. recorded: paths of the design that the table holds beside the knobs. summary:
    columns of the table shown for each winner. uncertainty: constants of the design -> how far off they may be, as a
    share (`dse.analysis.robustness`). probes: points beside the space, by name (`Probe`). data_dir: folder of measured
    tables, for studies that read such; the backend finds it in the design as `data_dir`. answer: what answers the
    question, and which rows may win. terms: columns of its own tables -> what they mean. at_least: path of a number ->
    the least of which the question asks; a machine with less is asked about with so many.
    """

    missing_way_out: ClassVar[str] = "give it a value; module: plain suits a study without published values"

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,80}$")]  # name of folders and part of names of files
    question: str = ""
    paper: Annotated[str, Field(max_length=200)] = ""
    module: str
    objectives: Annotated[tuple[str, ...], Field(min_length=1)]
    hardware_objectives: tuple[str, ...] = ()
    hardware: tuple[str, ...] = ("system",)
    limits: Mapping[str, Limit] = Field(default_factory=dict)
    baseline: Mapping[str, Scalar]
    recorded: tuple[str, ...] = ()
    summary: tuple[str, ...] = ()
    uncertainty: Mapping[str, Annotated[Number, Field(gt=0, lt=1)]] = Field(default_factory=dict)
    # name of a table's file
    probes: Mapping[Annotated[str, Field(pattern=r"^[a-z0-9_]{1,40}$")], Probe] = Field(default_factory=dict)
    data_dir: str | None = None
    answer: Answer = Answer()
    terms: Mapping[str, str] = Field(default_factory=dict)
    at_least: Mapping[str, Number] = Field(default_factory=dict)


MOST_TRIALS = 10_000_000


class Budget(Frozen):
    """The `budget` group. trials: distinct points per scenario."""

    trials: Annotated[Integer, Field(ge=1, le=MOST_TRIALS)]


def _tracking_uri(uri: str) -> str:
    # schemes that MLflow knows
    if not re.match(r"(sqlite|postgresql|mysql|mssql|https?|file|databricks|uc)(\+\w+)?(:|$)", uri):
        rule = "must be null or a tracking URI of MLflow, such as sqlite:///mlflow.db or http://<host>:5000"
        # a host and a port without a scheme
        server = f"http://{uri}" if re.fullmatch(r"[\w.-]+:\d+(/.*)?", uri) else None
        raise illegal(rule, f"sqlite:///{uri}" if uri.endswith(".db") else server)
    return _plain_url(uri)


def _plain_url(url: str) -> str:
    if rule := ambiguous(url):
        raise ValueError(rule)
    if re.search(r"[?&]plugin=", url):  # which would run its code
        raise ValueError("must not name a plug-in of SQLAlchemy")
    return url


def _storage(place: str) -> str:
    if not re.match(r"(sqlite|postgresql|mysql)(\+\w+)?://", place) and not place.endswith(".log"):
        rule = "must be null, the URL of a storage of Optuna, or the path of a journal that ends in .log"
        raise illegal(rule, f"sqlite:///{place}" if place.endswith(".db") else None)
    return _plain_url(place)


class TrackingSettings(Frozen):
    """The `tracking` group. uri: where MLflow keeps runs; None for no tracking. optuna: URL, or path of a `.log`
    journal, where Optuna keeps trials. points, whole_up_to: of `dse.results.selection.SelectionRule`.
    """

    name: str
    description: str = ""
    uri: Annotated[str, AfterValidator(_tracking_uri)] | None
    optuna: Annotated[str, AfterValidator(_storage)] | None = None
    points: Literal["auto", "all", "none"] = "auto"
    whole_up_to: Annotated[Integer, Field(ge=0)] = 10_000

    @property
    def rule(self) -> SelectionRule:
        """Rule that selects the points to show."""
        return SelectionRule(self.points, self.whole_up_to)


class Figures(Frozen):
    """The `figures` group. name: all figures of a study, all with the sources of the published values that they show,
    its key figure only, or none. format: kinds of their files. width: that of a column or of the page of a paper.
    """

    name: Literal["all", "paper", "key", "none"]
    description: str = ""
    format: tuple[Literal["png", "svg", "pdf"], ...] = ("png", "svg")
    width: Literal["column", "page"] = "page"


class Decide(Frozen):
    """The section `decide`. least: probability of being the fastest from which a winner is decided. samples: draws of
    the errors of predictions; 0 for none, and no intervals. A plan keeps a choice whose interval reaches below 1 by at
    most `loses`, where its median gain is more than `gains`.
    """

    least: Annotated[Number, Field(gt=0, lt=1)] = 0.8
    loses: Annotated[Number, Field(ge=0, lt=1)] = 0.005
    gains: Annotated[Number, Field(ge=0, lt=1)] = 0.01
    samples: Annotated[Integer, Field(ge=0, le=100_000)] = 256


class Fidelity(Frozen):
    """The `fidelity` group. levels: options of the group `simulator` from the coarsest to the finest, the study's own
    level among them as `study`; none for no ladder.

    near: relative excess over the front, in the worst objective, up to which points are promoted. sample: points of a
    scenario that are drawn at random beside them. most: points of a scenario promoted to a level, the sample not
    counted; a quarter is kept for where levels disagree. rounds: how often these are sought. most_tasks: a level
    whose points have more tasks and contention laws in all is left out, with the reason; null for no bound.
    """

    name: str
    description: str = ""
    levels: tuple[str, ...] = ()
    near: Annotated[Number, Field(ge=0, le=10)] = 0.02
    sample: Annotated[Integer, Field(ge=0, le=100_000)] = 8
    most: Annotated[Integer, Field(ge=1, le=100_000)] = 16
    rounds: Annotated[Integer, Field(ge=0, le=100)] = 2
    most_tasks: Annotated[Integer, Field(ge=1)] | None = None


class Settings(Frozen):
    """Everything of a configuration that is not the design.

    timeline: whether to run the winners again, in full. verbose: every table in the terminal, not the answer and a line
    for each of the others (`-v`). resume: treatment of an earlier study whose question differs: auto (begin beside it)
    or accept (go on with it).
    beside: CSV of measured values that figures show, too (`dse.results.measured`).
    """

    study: Study
    simulator: Mapping[str, Any]
    search: Search
    budget: Budget
    executor: ExecutorSettings
    tracking: TrackingSettings
    space: Mapping[str, Any]
    seed: Annotated[Integer, Field(ge=0, le=2**32 - 1)]  # as far as seeds of all libraries go
    output_dir: Annotated[str, Field(min_length=1)]
    timeline: bool = True
    figures: Figures = Figures(name="all")
    verbose: bool = False
    beside: str | None = None
    store: StoreAt = StoreAt(name="sqlite")
    resume: Literal["auto", "accept"] = "auto"
    fidelity: Fidelity = Fidelity(name="none")
    decide: Decide = Decide()


def constraints_of(study: Mapping[str, Any], row: Mapping[str, Any], goals: Iterable[str]) -> dict[str, float]:
    """Constraints of a row of a finished run's table, as a search knows them.

    study: the section of the run's configuration. A row has a result where it is ok, or infeasible for a limit alone.
    """
    limits = {name: Limit.model_validate(limit) for name, limit in study.get("limits", {}).items()}
    outcome = {name: row.get(name, math.nan) for name in (*goals, *limits)}
    # without all metrics it is not known how far beyond
    if row["status"] not in ("ok", "infeasible") or not all(map(_is_finite, outcome.values())):
        return constraints(limits, None)
    beyond = constraints(limits, outcome)
    # infeasible within all limits: a rule of the backend
    return beyond if row["status"] == "ok" or max(beyond.values()) > 0 else constraints(limits, None)


def _is_finite(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value)
