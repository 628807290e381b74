"""A backend without a GPU: `Fixed` answers from a formula, and breaks on demand.

Nothing here is a mock: it keeps the contract of `dse.backend.Backend` and is found by name, as an entry point of an
installed distribution would be (`installed`), in this process and in its workers.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
import pytest
from pydantic import BaseModel, Field, model_validator

from dse import plugins
from dse.backend import STATUSES, Backend, Batch, Columns, Interval, Metric, Replay, Result, Results, Tree
from dse.config.compose import Request
from dse.errors import ConfigError, Problem, Problems, did_you_mean
from dse.evaluation.calls import BackendSpec
from dse.evaluation.evaluators import Evaluator, ExecutorSettings
from dse.search import Goal
from dse.space import Knob, Points, Space
from dse.store.contract import Session, StorelessSession
from dse.study.plan import Plan, plan
from dse.values import Frozen, condition, knob, put
from dse.values.units import Integer, Number


class Thing(Frozen):
    """What is explored. `bend` counts for a bent thing, `grip` for a firm bend; a plain thing has no `trim`."""

    name: Literal["plain", "fancy"]
    x: Annotated[Integer, Field(ge=-1000, le=1000)]
    y: Number
    mode: Literal["flat", "bent"]
    bend: Annotated[Literal["firm", "loose"] | None, knob(when={"mode": "bent"})]
    grip: Annotated[Integer | None, knob(when={"bend": "firm"})]
    trim: Integer | None = None

    @model_validator(mode="after")
    def _drop_idle(self) -> Self:
        """Idle knobs become None, and then what depends on them, so that equal things are equal."""
        tool = self
        for name in ("bend", "grip"):
            needs = condition(Thing, name)
            if any(getattr(tool, sibling) != value for sibling, value in needs.items()):
                tool = tool.model_copy(update={name: None})
        return tool


class Tool(Frozen):
    """A second section, without conditions."""

    size: Integer
    weight: Number


class Toy(Frozen):
    """One point of the toy's design space."""

    thing: Thing
    tool: Tool


METRICS: Mapping[str, Metric] = {
    "time_s": Metric("s", "smaller is better"),
    "gain": Metric("x", "larger is better", goal="maximize", low=-1e9, high=1e9),
}
RELATIONS: Mapping[str, Metric] = {"ratio": Metric("x", "time of the baseline / time", goal="maximize")}

PLAIN: dict[str, Any] = {"name": "plain", "x": 1, "y": 0.0, "mode": "flat", "bend": "loose", "grip": 0}
FANCY: dict[str, Any] = {**PLAIN, "name": "fancy", "mode": "bent", "trim": 0}
TOOL: dict[str, Any] = {"size": 1, "weight": 0.5}
BASE: dict[str, Any] = {"thing": PLAIN, "tool": TOOL}
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {"thing": {"plain": PLAIN, "fancy": FANCY}}


def formula(point: Toy) -> dict[str, Any]:
    """Metrics of a toy, different for almost all of them."""
    thing, extra = point.thing, {"flat": 0.0, "bent": 0.25}[point.thing.mode]
    time_s = 1.0 + (thing.x - 3) ** 2 + abs(thing.y) + extra + 0.125 * (thing.grip or 0) + 0.5 * (thing.trim or 0)
    return {"time_s": time_s + 0.0625 * point.tool.size, "gain": thing.x - thing.y + 2 * point.tool.weight}


def _broken(fault: str, metrics: dict[str, Any]) -> Result:
    """A result that is wrong in one way; the fault is also its name."""
    if fault == "raises":
        raise ZeroDivisionError("asked to fail")
    if fault in ("segv", "kill"):
        os.kill(os.getpid(), signal.SIGSEGV if fault == "segv" else signal.SIGKILL)
    if fault == "exit":
        os.write(2, b"gone")
        os._exit(3)
    if fault == "hang":
        time.sleep(1000)
    if fault == "slow":
        time.sleep(0.05)
    if fault == "hog":
        return Result("ok", {"gain": float(len(bytearray(1 << 40)))})
    if fault == "unsupported":
        return Result("unsupported", reason="asked to refuse", engine="toy")
    wrong: dict[str, Any] = {
        "nan": {"time_s": float("nan")},
        "inf": {"time_s": float("inf")},
        "-inf": {"gain": float("-inf")},
        "negative": {"time_s": -1e-300},
        "too large": {"gain": 2e9},
        "bool": {"time_s": True},
        "text": {"time_s": "1.0"},
        "none": {"time_s": None},
        "list": {"gain": [1.0]},
        "extra": {"speed": 1.0},
        "worker": {"gain": float(os.getpid())},
    }
    values = {**metrics, **wrong.get(fault, {})}
    return Result("ok", {name: value for name, value in values.items() if fault != f"no {name}"}, engine="toy")


class Fixed(Backend):
    """faults: (x, what goes wrong with every thing of that x). batch: designs per call. loses: results go missing.

    evaluated: what it was asked about so far, in this process.
    """

    metrics = METRICS
    relations = RELATIONS
    version = "1"

    def __init__(self, faults: Sequence[tuple[int, str]] = (), batch: int = 4, loses: bool = False) -> None:
        self.faults, self.batch, self.loses = dict(faults), batch, loses
        self.evaluated: list[BaseModel] = []

    def sections(self, tree: Tree) -> None:
        """A thing and a tool, and nothing else."""
        check = Problems()
        for name in set(tree) - set(Toy.model_fields):
            check.add(name, "is not a known section", way_out=did_you_mean(name, Toy.model_fields))
        for name in set(Toy.model_fields) - set(tree):
            check.add(name, "is missing")
        check.done()

    def scenarios(self, tree: Tree) -> Mapping[str, Tree]:
        """Two scenarios: tools of two weights."""
        return {name: {**tree, "tool": {**tree["tool"], "weight": w}} for name, w in (("light", 0.5), ("heavy", 4.0))}

    def design(self, tree: Tree) -> Toy:
        """The validated toy of one tree."""
        check = Problems()
        thing = check.model(Thing, tree.get("thing"), path="thing")
        tool = check.model(Tool, tree.get("tool"), path="tool")
        check.done()
        assert thing is not None
        assert tool is not None
        return Toy.model_construct(thing=thing, tool=tool)

    def problems(self, design: BaseModel) -> Sequence[Problem]:
        """A thing must be smaller than 900: beyond, it is infeasible."""
        assert isinstance(design, Toy)
        return [Problem("thing.x", "does not fit the tool", design.thing.x)] if design.thing.x >= 900 else []

    def condition(self, path: str, tree: Tree) -> Mapping[str, Any] | None:
        """What a knob depends on; None where the section has no such key."""
        section, _, name = path.partition(".")
        if name not in tree.get(section, {}):
            return None
        kind: type[BaseModel] = Thing if section == "thing" else Tool
        return {f"{section}.{key}": value for key, value in condition(kind, name).items()}

    def is_axis(self, path: str, design: BaseModel) -> bool:
        """What no other knob depends on and is a number for every toy."""
        return path in ("thing.x", "thing.y", "tool.size", "tool.weight")

    def screen(self, batches: Sequence[Batch]) -> list[Results]:
        """Which things are too large."""
        return [Results.of([self._known(point) or Result("ok") for point in batch.designs()]) for batch in batches]

    def evaluate(self, batches: Sequence[Batch]) -> list[Results]:
        """The formula, or what `faults` asks for."""
        outcomes = [Results.of([self._one(point) for point in batch.designs()]) for batch in batches]
        return outcomes[:-1] if self.loses else outcomes

    def _one(self, point: BaseModel) -> Result:
        assert isinstance(point, Toy)
        self.evaluated.append(point)
        if reason := self._known(point):
            return reason
        metrics, fault = formula(point), self.faults.get(point.thing.x)
        return _broken(fault, metrics) if fault else Result("ok", metrics, engine="toy")

    def _known(self, point: BaseModel) -> Result | None:
        """What is known of a thing that is not simulated."""
        reasons = self.problems(point)
        return Result("infeasible", reason="; ".join(map(str, reasons))) if reasons else None

    def relate(self, point: Columns, baseline: Columns) -> Columns:
        """Time of the baseline over time."""
        return {"ratio": baseline["time_s"] / point["time_s"]}

    def replay(self, design: BaseModel) -> Replay:
        """One interval as long as the point's time."""
        assert isinstance(design, Toy)
        return Replay((Interval("lane", "all", "task", 0.0, formula(design)["time_s"]),), {"task": 1.0})

    def facts(self, design: BaseModel) -> Sequence[tuple[str, Any, str, str]]:
        """One constant."""
        assert isinstance(design, Toy)
        return [("tool.size", design.tool.size, "derived", "this test")]


class Vectors(Fixed):
    """The same answers for whole grids at once, for what takes many of them."""

    def __init__(self, faults: Sequence[tuple[int, str]] = (), batch: int = 1 << 14) -> None:
        super().__init__(faults, batch)

    def screen(self, batches: Sequence[Batch]) -> list[Results]:
        """Which things are too large, over arrays."""
        return [_sized(batch) for batch in batches]

    def evaluate(self, batches: Sequence[Batch]) -> list[Results]:
        """The formula over arrays."""
        return [self._grid(batch) for batch in batches]

    def _grid(self, batch: Batch) -> Results:
        point, sizes = batch.design, _sized(batch)
        assert isinstance(point, Toy)
        columns = {path: batch.column(path) for path in batch.axes}
        if set(self.faults) & set(columns.get("thing.x", np.array([point.thing.x])).tolist()):
            raise ZeroDivisionError("asked to fail")
        for path, column in columns.items():
            point = put(point, path, column)
        metrics = {name: np.broadcast_to(value, (batch.size,)) for name, value in formula(point).items()}
        return replace(
            sizes,
            metrics={name: np.where(sizes.ok, value, np.nan) for name, value in metrics.items()},
            engine=np.where(sizes.ok, 1, 0).astype(np.int32),
        )


def _sized(batch: Batch) -> Results:
    """Which things of a grid are too large; nothing is simulated."""
    point = batch.design
    assert isinstance(point, Toy)
    x = batch.column("thing.x") if "thing.x" in batch.axes else np.full(batch.size, point.thing.x)
    numbers, code = np.unique(np.where(x >= 900, x, 0), return_inverse=True)
    rules = {number: str(Problem("thing.x", "does not fit the tool", number)) for number in numbers.tolist()}
    texts = ("", "toy", *rules.values())
    reason = np.where(x >= 900, 2 + code.reshape(-1), 0).astype(np.int32)
    status = np.where(x >= 900, STATUSES.index("infeasible"), STATUSES.index("ok")).astype(np.uint8)
    return Results(status, {}, reason, np.zeros_like(reason), texts)


def BACKEND(fast: bool = False, **parameters: Any) -> Fixed:
    """The toy, one design after the other or (`fast`) on arrays."""
    return Vectors(**parameters) if fast else Fixed(**parameters)


def space(*knobs: Knob, base: Tree = BASE) -> Space:
    """A space over the toy; both options of `thing` are known where its name is searched."""
    named = any(axis.path == "thing.name" for axis in knobs)
    return Space(base, knobs, OPTIONS if named else {}, Fixed())


def settings(search: str, trials: int, *, seed: int = 0, jobs: int = 1) -> dict[str, Any]:
    """Everything of a configuration that is not the design."""
    return {
        "study": {"name": "toy", "module": "ficco", "objectives": ["time_s", "gain"], "baseline": {"thing.x": 0}},
        "simulator": {"name": "toy", "backend": "toy"},
        "search": {"name": search},
        "budget": {"trials": trials},
        "executor": {"name": "local", "jobs": jobs, "broken_after": 0},
        "tracking": {"name": "none", "uri": None},
        "space": {},
        "seed": seed,
        "output_dir": "outputs",
    }


def planned(knobs: Sequence[Knob], tree: Mapping[str, Any], faults: Sequence[tuple[int, str]] = ()) -> Plan:
    """A study of the toy, ready to run; needs `installed`. tree: of `settings`."""
    simulator = {**tree["simulator"], "faults": tuple(faults)}
    named = any(axis.path == "thing.name" for axis in knobs)
    return plan(
        Request(
            {**BASE, **tree, "simulator": simulator}, OPTIONS if named else {}, tuple(knobs), overrides=(), problems=()
        )
    )


def spec(*faults: tuple[int, str], **parameters: Any) -> BackendSpec:
    """The toy by name, as a worker process is told of it; needs `installed`."""
    return BackendSpec("toy", tuple(sorted({"faults": faults, **parameters}.items())))


def point(batch: Batch) -> Points:
    """A batch as it comes from a search space."""
    return Points({}, batch.axes, batch.design).identified("test", ("toy", "1", ""))


def evaluate(
    spec: BackendSpec,
    batches: Iterable[Batch],
    *,
    seen: Callable[[int], None] = lambda count: None,
    session: Session | None = None,
    **executor: Any,
) -> Iterator[Results]:
    """Results of batches as a study gets them. executor: of its keys; however often the backend fails, it goes on."""
    limits = ExecutorSettings.model_validate({"name": "test", "jobs": 1, "broken_after": 0, **executor})
    evaluator = Evaluator(spec, limits, session or StorelessSession(), seen)
    return evaluator.results(point(batch) for batch in batches)


def grid(values: Sequence[int]) -> Batch:
    """One batch of things of these x."""
    return Batch(things(values[:1])[0], {"thing.x": np.array(values)})


def things(values: Sequence[int]) -> list[Toy]:
    """Designs that differ in x."""
    return [Fixed().design({**BASE, "thing": {**PLAIN, "x": value}}) for value in values]


def goals(*names: str) -> dict[str, Goal]:
    """Goals by metric."""
    return {name: METRICS[name].goal for name in names or METRICS}


def distribution(folder: Path, name: str, **groups: str) -> None:
    """Lay an installed distribution into a folder. groups: package="entry = module" of its entry points."""
    info = folder / f"{name}-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n", encoding="utf-8")
    lines = [f"[dse.{group}]\n{entry}\n" for group, entry in groups.items()]
    (info / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")


@contextmanager
def on_path(site: Path) -> Iterator[None]:
    """While it lasts, the distributions of a folder are installed in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        plugins.refresh()
        try:
            yield
        finally:
            for name in [path.stem for path in site.glob("*.py")]:
                sys.modules.pop(name, None)
            patch.undo()
            plugins.refresh()


@contextmanager
def installed(folder: Path) -> Iterator[None]:
    """While it lasts, `toy` is a backend like any other: an entry point of a distribution on the path."""
    distribution(folder, "toybox", simulators="toy = tests.toy")
    with on_path(folder):
        yield


def refused(error: ConfigError) -> str:
    """What a person would read."""
    return "\n".join(map(str, error.problems))
