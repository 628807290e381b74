"""What a plan, and the nearest that a tool can say, take: the step of the plan's run timed with each.

The step is that of the run beside the plan's file, or the one that was typed (model=..., system=..., run.mode=...).
What a tool does by itself counts below what its files say. A setting of a choice
(`simulators.steps.plan.given_plan.CHOICES`) is left out where the step is faster without it.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from dse.config.compose import request
from dse.config.options import own_folder, without_own_folder
from dse.errors import ConfigError, Problem
from dse.results.run_folder import Outputs
from dse.results.words import cell
from dse.space import get_path
from dse_deploy.command import nearest, write_all
from dse_deploy.facts import ModelFacts
from dse_deploy.settings import Written, tools
from dse_deploy.step_calls import CTAS, calls_of
from dse_deploy.step_files import STEP_FORMATS
from simulators.steps.backend import StepBackend
from simulators.steps.plan.choices import OFF
from simulators.steps.plan.given_plan import GivenPlan, ToolDefaults, given_tree, is_legal, serial_tree, with_values
from simulators.steps.plan.scenarios import scenarios
from simulators.steps.run.build import iteration
from simulators.steps.run.iteration import Iteration
from simulators.steps.run.measures import memory
from studies.plan.judged import composed_design
from studies.plan.plan_file import Plan, flattened, leaves_of, over_step, put_in, read_plan
from studies.plan.stacks import stack_words

_OF_A_STEP = ("model", "system", "kernels", "simulator")  # groups of which one that is typed says which step is meant
DEGREES = tuple(f"parallel.{name}" for name in ("tp", "pp", "dp", "cp", "ep", "zero"))
"""Degrees of parallelism, and the split of states."""
ASSUMED: Mapping[str, Any] = {
    **{"parallel.etp": 1, "parallel.ends": "beside", "parallel.context": "ring", "parallel.shard_gpus": None},
    **dict.fromkeys(("run.precision", "run.sequence_length", "run.batch"), None),  # which a step always has
    **{"run.micro_batches": None, "run.recompute": "none"},
    **dict.fromkeys(("run.products", "run.scales", "run.weights", "run.kv_cache", "run.recompute_layers"), None),
    **dict.fromkeys(("run.offloaded_layers", "run.gradients", "run.optimizer_states", "run.activations"), None),
    **dict.fromkeys(("run.adapters", "run.chunk", "run.drafts"), None),
    **dict.fromkeys(CTAS.values(), 0),
}
"""Knobs of a step that its plan rests on, and their values where a framework needs no setting."""
_NO_LESS = 1 - 1e-9  # what is faster by less is as fast
BESIDE_A_PLAN = ("run.mode", "run.batch", "run.sequence_length")
"""Knobs that say which step a plan is of, and are no choice of it."""


@dataclass(frozen=True)
class PlannedStep:
    """The step that a plan is of. tree: its design without the plan. typed: paths of values that somebody typed."""

    tree: Mapping[str, Any]
    backend: StepBackend
    typed: frozenset[str]

    @classmethod
    def of(cls, plan: Path, words: Sequence[str]) -> PlannedStep | None:
        """Build from the run of a plan's file, or else the step in it, and words typed; None where none names a step.

        Raises ConfigError.
        """
        run, read = plan.resolve().parent, read_plan(plan) if plan.is_file() else None
        step, tool = ((), "") if read is None else (read.step, read.tool)
        provenance = Outputs(run).read_json("provenance") if (run / "provenance.json").is_file() else None
        if provenance is not None:
            # a judged plan was given to that run: the step itself has none
            recorded = [word for word in provenance.get("overrides", ()) if not word.startswith("+given.")]
            recorded = over_step(recorded, step, {})  # whose paths are the same in every working folder
        elif step or any(word.partition("=")[0] in _OF_A_STEP for word in words):
            recorded = ["study=plan", *step]
        else:
            return None
        # what is typed counts over what was recorded
        texts = over_step(recorded, words, {})
        folder, texts = own_folder(texts), without_own_folder(texts)
        texts += stack_words(texts, tool)
        # systems and models of the user's own are found where the run found them
        if folder is None and provenance is not None and provenance.get("config_dir"):
            folder = Path(provenance["config_dir"])
        composed = request(texts, folder)
        if composed.problems:
            raise ConfigError(composed.problems)
        typed = frozenset(text.lstrip("+").partition("=")[0] for text in texts)
        backend, design = StepBackend(), composed_design(composed.tree)
        backend.sections(design)
        # one scenario: a plan is of one step
        (tree, *_) = scenarios(design).values()
        # choices of a plan may be those of another framework than the run's
        return cls({**tree, "stack": None}, backend, typed)

    @property
    def mode(self) -> str:
        """Mode of the run."""
        return str(get_path(self.tree, "run.mode"))

    def with_context(self, plan: Plan) -> dict[str, Any]:
        """A plan with what its step has beside it: degrees of parallelism, formats, and choices that were typed."""
        complete = {name: dict(entries) for name, entries in plan.items()}
        # knobs that settings rest on are written even if the plan has not chosen them
        for path in (*DEGREES, *ASSUMED, *(path for path in OFF if path in self.typed)):
            value = get_path(self.tree, path)
            usual = ASSUMED.get(path, OFF.get(path, 0 if path.endswith("zero") else 1))
            # what a framework does by itself needs no setting
            if get_path(complete, path) is None and value is not None and value != usual:
                put_in(complete, path, value)
        return complete

    def plan_tree(self, plan: Plan, tool: str = "") -> dict[str, Any]:
        """Tree of the step with a plan, and with what the tool whose it is does by itself. Raises ConfigError where
        that breaks a rule.
        """
        # choices of the run must not stay where the plan has none
        bare = with_values(self.tree, OFF)
        section = GivenPlan(plan=dict(leaves_of(plan)), tool=tool, tools=_defaults(tool) if tool else {})
        tree = given_tree(bare, section, self.backend.steps)
        if problems := self.backend.problems(self.backend.design(tree)):
            raise ConfigError(problems)
        return tree

    def by(self, tool: str, plan: Plan, planned: Mapping[str, Any]) -> dict[str, Any]:
        """Tree of a planned step with what a tool's files say in place of the choices of the plan."""
        # mode, batch and length identify the step, and stay
        choices = {path: value for path, value in leaves_of(plan) if path not in BESIDE_A_PLAN}
        # a library leaves what it has no word for, and what was typed, to the framework that calls it
        sayable = tools()[tool].said_paths
        library = set() if tools()[tool].framework else {*self.typed, *({*OFF, *CTAS.values()} - sayable)}
        defaults = _defaults(tool, library)
        # a plan without choices would be no plan: a degree that it has anyway stands in
        section = GivenPlan(
            tool=tool, plan=choices or {"parallel.tp": get_path(planned, "parallel.tp")}, tools=defaults
        )
        return given_tree(planned, section, self.backend.steps)

    def serial(self, planned: Mapping[str, Any]) -> Iteration | None:
        """The planned step with nothing overlapped; None where rules forbid it."""
        tree = self.serial_tree(planned)
        return None if tree is None else self.step(tree)

    def serial_tree(self, planned: Mapping[str, Any]) -> dict[str, Any] | None:
        """Tree of the planned step with nothing overlapped; None where rules forbid it."""
        return serial_tree(planned, self.backend.steps, self.typed)

    def facts(self, tree: Mapping[str, Any]) -> ModelFacts:
        """Facts of the model, the GPU and the collectives of a tree of the step. Raises ConfigError."""
        machine = self.backend.design(tree).system
        calls = calls_of(self.step(tree), machine)
        gpu, ctas = machine.gpu, {path: self._most_ctas(tree, path) for path in dict.fromkeys(CTAS.values())}
        facts = replace(ModelFacts.of(tree), calls=calls, precision=str(get_path(tree, "run.precision")))
        return replace(facts, gpu=str(gpu.name), num_cus=int(gpu.num_cus), most_ctas=ctas)

    def _most_ctas(self, tree: Mapping[str, Any], path: str) -> int:
        """The most CTAs that a knob of an axis may have; 0 where the step may have none."""
        copy = self.backend.design(tree).system.gpu.cu_copy
        legal = copy is not None and is_legal(with_values(tree, {path: 1}), self.backend.steps)
        return int(np.max(copy.num_cus)) if copy is not None and legal else 0

    def step(self, tree: Mapping[str, Any]) -> Iteration:
        """The iteration of a tree. Raises ConfigError where it breaks a rule."""
        design = self.backend.design(tree)
        if problems := self.backend.problems(design):
            raise ConfigError(problems)
        return iteration(design)

    def memory(self, tree: Mapping[str, Any]) -> tuple[float, float]:
        """Memory that the step of a tree takes of a GPU, and that a GPU has [bytes]; infinite where it is not known."""
        room = self.backend.design(tree).system.gpu.hbm_bytes
        most = float("inf") if room is None else float(room)
        return float(np.max(memory(self.step(tree), most)["memory_bytes"])), most


def _defaults(tool: str, typed: Collection[str] = ()) -> dict[str, ToolDefaults]:
    # what the tool does by itself counts under what was typed
    defaults = {**OFF, **dict.fromkeys(CTAS.values(), 0), **tools()[tool].values}
    values = {path: value for path, value in defaults.items() if path not in typed}
    return {tool: ToolDefaults(modes=tools()[tool].modes, values=values)}


@dataclass(frozen=True)
class LeftOut:
    """Settings that are not written, and the time of a step with and without them [s]."""

    names: Sequence[str]
    with_s: float
    without_s: float


@dataclass(frozen=True)
class ToolPlan:
    """A plan as a tool can say it. tool: its name. step: that the plan is of."""

    tool: str
    step: PlannedStep
    planned: Mapping[str, Any]

    def without_losses(self, plan: Plan) -> tuple[dict[str, Any], list[LeftOut]]:
        """The plan without choices whose settings make the step slower, and these settings."""
        reduced, left_out = {name: dict(entries) for name, entries in plan.items()}, list[LeftOut]()
        seconds = self._seconds(reduced)
        # greedy: one group at a time, as settings interact; each round ends with a shorter plan
        while (better := self._faster_without(reduced, seconds)) is not None:
            faster_s, paths = better
            left_out.append(LeftOut(self._names(reduced, paths), seconds, faster_s))
            reduced, seconds = _without(reduced, paths), faster_s
        return reduced, left_out

    def _faster_without(self, plan: Plan, seconds: float) -> tuple[float, frozenset[str]] | None:
        """The least time of the step without some choices, and their paths; None where it is no less."""
        groups = dict.fromkeys(self._groups(plan))
        # of equal times the smallest group, then the first: as little as possible is left out
        times = [(self._seconds(_without(plan, paths)), len(paths), place) for place, paths in enumerate(groups)]
        best = min(times, default=(seconds, 0, 0))
        return (best[0], list(groups)[best[2]]) if best[0] < seconds * _NO_LESS else None

    def _groups(self, plan: Plan) -> Iterator[frozenset[str]]:
        """Yield the choices of each setting, those of all sites, and all choices: each may be left out together."""
        rows = [row for part in self._files(plan).values() for row in part.rows]
        chosen = [frozenset(path for path in row.paths if path in OFF) for row in rows]
        # leaving all choices out may gain what no single one does
        every = frozenset(itertools.chain.from_iterable(chosen))
        sites = frozenset(path for path in every if path.startswith("sites."))
        yield from (paths for paths in (*chosen, sites, every) if paths)

    def _seconds(self, plan: Plan) -> float:
        """Time of the step as the tool would run its files [s]; infinite where there are none, where rules forbid
        it, or where it does not fit the memory and the planned step does.
        """
        try:
            tree = self.tree(plan)
            return float(self.step.step(tree).seconds) if self._fits(tree) else float("inf")
        except ConfigError:
            return float("inf")

    def check_memory(self, plan: Plan) -> None:
        """Refuse what a tool would run where a GPU does not hold it. Raises ConfigError."""
        tree = self.tree(plan)
        if not self._fits(tree):
            taken, room = (cell(size, "byte") for size in self.step.memory(tree))
            rule = f"cannot run the plan: what {tools()[self.tool].name} has does not fit the memory: {taken} of {room}"
            way = "split or recompute more: parallel.zero=3, run.recompute=all, or plan again with what this tool has"
            raise ConfigError([Problem("to", rule, self.tool, way)])

    def _fits(self, tree: Mapping[str, Any]) -> bool:
        taken, room = self.step.memory(tree)
        # if even the plan does not fit, the tool is not to blame
        return taken <= room or not self._planned_fits

    @cached_property
    def facts(self) -> ModelFacts:
        """Facts of the planned step; of its collectives for a tool alone whose files are of them."""
        tool = tools()[self.tool]
        of_step = bool(tool.limits) or tool.is_of_calls or any(file.format in STEP_FORMATS for file in tool.files)
        return self.step.facts(self.planned) if of_step else ModelFacts.of(self.step.tree)

    @cached_property
    def _planned_fits(self) -> bool:
        taken, room = self.step.memory(self.planned)
        return taken <= room

    def tree(self, plan: Plan) -> dict[str, Any]:
        """Tree of the step as the tool would run the files for a plan."""
        by_tool = nearest(tools()[self.tool], plan, self._files(plan), self.facts)
        return self.step.by(self.tool, by_tool, self.planned)

    def _files(self, plan: Plan) -> dict[str, Written]:
        return write_all(tools()[self.tool], plan, "plan", self.facts)

    def _names(self, plan: Plan, paths: frozenset[str]) -> list[str]:
        rows = (row for part in self._files(plan).values() for row in part.rows)
        return [row.name for row in rows if paths.intersection(row.paths)]


def _without(plan: Plan, paths: frozenset[str]) -> dict[str, Any]:
    """A plan without some of its leaves, nor sections that held no other."""
    less = dict[str, Any]()
    for section, entries in plan.items():
        for path, value in flattened(section, entries):
            if path not in paths:
                put_in(less, path, value)
    # an empty section would still count as a choice
    if "sites" in less and not any(path.startswith("sites.") for path, _ in leaves_of(less)):
        del less["sites"]
    return less


def check_target(name: str, plan: Plan, step: PlannedStep | None) -> None:
    """Refuse a tool that is not for the mode of a plan, or for its model. Raises ConfigError with those that are."""
    tool, mode = tools()[name], _mode(plan, step)
    fitting = (other for other, entry in tools().items() if entry.framework and (mode is None or mode in entry.modes))
    fitting_words = ", ".join(f"to={other}" for other in fitting)
    if mode is not None and mode not in tool.modes:
        rule = f"is for {' and '.join(tool.modes)} alone, and the plan is of {mode}"
        raise ConfigError([Problem("to", rule, name, f"take one of {fitting_words}")])
    if tool.experts and step is not None and not get_path(step.tree, "model.moe.experts"):
        rule = f"sets exchanges of experts, and {get_path(step.tree, 'model.name')} has none"
        raise ConfigError([Problem("to", rule, name, f"take one of {fitting_words}")])
    spread = get_path(plan, "parallel.ep") or (1 if step is None else get_path(step.tree, "parallel.ep"))
    if tool.experts and int(spread) < 2:
        rule = "sets exchanges of experts between GPUs, and the plan splits no experts: parallel.ep = 1"
        raise ConfigError([Problem("to", rule, name, f"write parallel.ep=8, or take one of {fitting_words}")])


def _mode(plan: Plan, step: PlannedStep | None) -> str | None:
    """Mode of the run of a plan; that of training where its choices are of training; None where nothing says it."""
    if step is not None:
        return step.mode
    mode = get_path(plan, "run.mode")
    # knobs that only a backward pass or an optimizer has
    of_training = ("parallel.reductions", "optimizer.in_backward", "run.recompute", "parallel.zero")
    leaves = dict(leaves_of(plan))
    is_training = any(path.endswith("_backward") for path in leaves if path.startswith("sites.")) or any(
        str(leaves.get(path, usual)) != str(usual)
        for path, usual in zip(of_training, ("after", False, "none", 0), strict=True)
    )
    return str(mode) if mode is not None else "training" if is_training else None
