"""The step backend: one training or inference iteration of a whole model on a GPU and its group, as sums of operators.

A design is a device, a model, how it is run and spread, an optimizer, and how the framework computes what is no GEMM.
Equations are in `simulators.steps`. With `lengths`, an iteration is the mean one of an epoch over sequences of these
lengths, of which `iterations` says which stand for it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import BaseModel

from dse.backend import STATUSES, Backend, Batch, Columns, Metric, Replay, Results, Tree
from dse.errors import Problem, Problems, did_you_mean
from dse.space import get_path
from dse.space.blocks import Grid, Rule, problems, reasons, results_by_batch
from dse.values import LABELS, Frozen, Memo, has_axis, put
from simulators.costs.chip import Chip
from simulators.costs.governor import power_rules
from simulators.hardware.device import Device, PoweredDevice, PoweredScheduledDevice, ScheduledDevice
from simulators.hardware.machine import Gpu, reads
from simulators.hardware.pim import Format, InstructionSet
from simulators.steps.design import (
    OPTIONAL,
    ScheduledDesign,
    StepDesign,
    constants_of,
    own_sections,
    product_format,
    reads_constant,
    rules,
)
from simulators.steps.epochs.epoch import METRICS as EPOCH_METRICS
from simulators.steps.epochs.epoch import Epoch, alone
from simulators.steps.epochs.seqpoint import Iterations, choose
from simulators.steps.operators.quantised_weights import QuantisedWeights
from simulators.steps.overlap.sites import SITES, places, read_sites, site_condition, site_rules
from simulators.steps.plan.choices import condition_of
from simulators.steps.plan.layouts import Steps
from simulators.steps.plan.scenarios import (
    CHOSEN,
    GIVEN,
    LISTS,
    SOFTWARE,
    check_lists,
    scenarios,
    with_layouts,
    with_plan,
)
from simulators.steps.run.build import blocks_of, iteration, schedules_of
from simulators.steps.run.iteration import Iteration
from simulators.steps.run.measures import LAWS, METRICS, SHARES, measure, memory, utilisation
from simulators.steps.run.task_graph import intervals, run
from simulators.steps.spread.framework_rules import Stack, switch_rules
from simulators.taskgraph.timeline import Timeline
from simulators.workloads.model import Kernels, Model, Optimizer, Parallel, Run, Transformer
from simulators.workloads.sequence_lengths import Lengths, iteration_lengths

_VERSION = "26"  # part of every result's key: raised where results change


class _AnyModel(Frozen):
    """A model of whichever kind."""

    model: Model


_KINDS: Mapping[str, Any] = {
    "model": _AnyModel,
    "run": Run,
    "parallel": Parallel,
    "optimizer": Optimizer,
    "kernels": Kernels,
    "lengths": Lengths,
    "iterations": Iterations,
    "quantised": QuantisedWeights,
    "format": Format,
    "instructions": InstructionSet,
    "stack": Stack,
}
"""What sections other than `system` are validated as."""
_MOST_SECTIONS = 1024  # that are remembered
Floats = NDArray[np.float64]


def _rules(design: StepDesign) -> Iterator[Rule]:
    """Rules between sections, and those of the schedules of sites where no other is broken."""
    broken: NDArray[np.bool_] = np.zeros((), np.bool_)
    if isinstance(design.system, PoweredDevice | PoweredScheduledDevice):
        yield from power_rules(design.system.gpu.power, sorted({design.run.precision, product_format(design)}))
    for rule in rules(design):
        broken = broken | np.asarray(rule.broken, np.bool_)
        yield rule
    if not isinstance(design, ScheduledDesign) or not design.sites:
        return
    tp, gpus = int(design.parallel.tp), np.asarray(design.system.node.num_gpus)
    text = "is beyond a node, in which alone sites have schedules (system.node.num_gpus = {0})"
    way = "leave their schedules out: sites={{}}"
    yield Rule("parallel.tp", (tp > gpus) & ~broken, text, tp, (design.system.node.num_gpus,), way)
    broken = broken | (tp > gpus)
    for rule in _rules_of_sites(design, tp) if not broken.all() else ():
        yield replace(rule, broken=np.asarray(rule.broken, np.bool_) & ~broken)


def _rules_of_sites(design: ScheduledDesign, tp: int) -> Iterator[Rule]:
    """Rules of the schedules of sites in a node."""
    if tp < 2:
        name, schedule = next(iter(design.sites.items()))
        yield Rule(f"sites.{name}", True, "is the collective of one GPU: it needs parallel.tp > 1", str(schedule))
    elif (scheduled := schedules_of(design)) is not None:
        beside = [name for name in design.sites if SITES[name].beside]
        if beside and design.parallel.backward_sums != "waited":
            text = "overlaps sums with gradients of weights, which sites.{0} schedules"
            way = "set parallel.backward_sums=waited"
            yield Rule("parallel.backward_sums", True, text, design.parallel.backward_sums, (beside[0],), way)
        # of an epoch, the shortest sequence leaves a schedule the fewest rows
        operators = [block.ops for block in blocks_of(_of_length(design, np.min))]
        yield from site_rules(scheduled, operators)
        yield from switch_rules(design, {at.name for ops in operators for at in places(ops)})


def metrics_of(design: StepDesign) -> dict[str, Floats]:
    """Every metric of a design whose numbers may be arrays that broadcast; of an epoch, where it has lengths."""
    if design.lengths is not None:
        return _of_epoch(design)
    metrics = _of_iteration(design)
    return {**metrics, **alone(metrics)}


def _of_iteration(design: StepDesign) -> dict[str, Floats]:
    room = design.system.gpu.hbm_bytes
    metrics = measure(iteration(design), np.inf if room is None else room)  # capacity unknown: all fits
    metrics |= utilisation(metrics, gpus=design.parallel.gpus, **_rates(design))
    return {name: np.asarray(value, float) for name, value in metrics.items()}


def _rates(design: StepDesign) -> dict[str, ArrayLike]:
    """Rates of the GPU [FLOP/s] at the fastest precision of the step: of the data sheet, and that GEMMs sustain."""
    precisions = sorted({design.run.precision, design.run.products or design.run.precision})
    chips = [Chip.of(design.system, precision) for precision in precisions]
    rates = [np.asarray(chip.flop_per_s, float) for chip in chips]
    # some kernels are fitted above the peak, power may sustain less, and a framework's products more
    limits = [np.minimum(np.maximum(1.0, chip.compute), chip.sustained) for chip in chips]
    shares = [np.maximum(1.0, design.kernels.share_of(precision, design.system.gpu.name)) for precision in precisions]
    sustained = [math.prod(factors) for factors in zip(rates, limits, shares, strict=True)]
    return {"peak": functools.reduce(np.maximum, rates), "ceiling": functools.reduce(np.maximum, sustained)}


def _of_epoch(design: StepDesign) -> dict[str, Floats]:
    """Metrics of the mean iteration of an epoch. Its sample is chosen on the GPU with nothing changed."""
    assert design.lengths is not None
    epoch = Epoch.of(iteration_lengths(design.lengths, design.run.batch, design.run.seed))
    lengths = epoch.unique.astype(float)
    metrics = _of_iteration(put(design, _LENGTH, lengths))
    choice = design.iterations or Iterations(name="all", method="all")
    plain = design.system.gpu.as_described  # a sample is chosen once, on the GPU before anything is varied
    base = metrics
    if plain != design.system.gpu:
        base = _of_iteration(put(put(design, "system.gpu", plain), _LENGTH, lengths))
    times = np.broadcast_to(base["iteration_s"], lengths.shape)[epoch.place]  # a time for each iteration of the epoch
    sample = choose(choice, epoch.lengths, times)
    seconds = np.broadcast_to(metrics["iteration_s"], lengths.shape)
    return {**epoch.mean(metrics, METRICS, sample), **epoch.judge(seconds, sample)}


def typical(design: StepDesign) -> StepDesign:
    """The design at one sequence length: of an epoch, the mean one of its iterations."""
    return _of_length(design, np.mean)


def _of_length(design: StepDesign, choose: Callable[[NDArray[np.int64]], Any]) -> StepDesign:
    """The design at one sequence length, which of an epoch is chosen among those of its iterations."""
    if design.lengths is None:
        return design
    lengths = iteration_lengths(design.lengths, design.run.batch, design.run.seed)
    changed: StepDesign = put(design, _LENGTH, round(float(choose(lengths))))
    return changed


_LENGTH = "run.sequence_length"


class StepBackend(Backend):
    """Iterations, a grid of designs at once."""

    batch = 16_384
    version = _VERSION
    machines: ClassVar[tuple[type[Device], type[ScheduledDevice]]] = (Device, ScheduledDevice)
    """What a design's system is read as: without schedules of sites, and with."""
    metrics: Mapping[str, Metric] = {**METRICS, **EPOCH_METRICS}
    laws = LAWS
    relations: Mapping[str, Metric] = {
        "speedup": Metric("x", "iteration_s of the baseline / iteration_s, by the simulated iterations", "maximize"),
        "speedup_error": Metric("fraction", "of that, against the speed-up of whole epochs"),
        "throughput_lost": Metric("fraction", "1 - tokens_per_s / that of the baseline", low=float("-inf")),
        "capacity_saved": Metric("fraction", "1 - state_bytes / the baseline's", "maximize", low=float("-inf")),
    }

    def __init__(self) -> None:
        self._sections = Memo[Any](_MOST_SECTIONS)

    def sections(self, tree: Tree) -> None:
        """Check the sections: those of a design, and lists of what scenarios have (`steps.plan.scenarios`)."""
        check, sections = Problems(), (*ScheduledDesign.model_fields, *LISTS, CHOSEN, GIVEN, SOFTWARE)
        for name in set(tree) - set(sections):
            check.add(name, "is not a known section", way_out=did_you_mean(name, sections))
        for name in StepDesign.model_fields:
            if not isinstance(tree.get(name), Mapping) and (name not in OPTIONAL or tree.get(name) is not None):
                way = "layouts.auto=true chooses degrees" if name == "parallel" else f"choose one: {name}=<option>"
                check.add(name, "is no section of keys", value=tree.get(name), way_out=way)
        check_lists(check, tree)
        check.done()

    def scenarios(self, tree: Tree) -> Mapping[str, Tree]:
        """The configuration itself, or a scenario for each of `models`, `systems` and `modes`, and for each of the best
        layouts where these are chosen (`simulators.steps.plan.layouts`), or of what a given plan is judged by
        (`simulators.steps.plan.given_plan`).
        """
        return with_plan(with_layouts(scenarios(tree), tree.get("layouts"), self.steps), tree, self.steps)

    @property
    def steps(self) -> Steps:
        """Functions that compute steps of layouts."""
        return Steps(self.design, _legal, _step, _sites)

    def design(self, tree: Tree) -> StepDesign:
        """A validated design. Raises ConfigError with every problem."""
        check, sites = Problems(), tree.get("sites")
        kind = StepDesign if sites is None else ScheduledDesign  # without schedules, a machine needs fewer parts
        kinds = {**_KINDS, "system": self.machines[sites is not None]}
        sections = {
            name: self._section(kinds[name], section, tree[name]) if name in kinds else section
            for name, section in own_sections(tree).items()
        }
        names = {*sections, *(name for name, field in kind.model_fields.items() if field.is_required())} - {"sites"}
        # validated section by section: no need to do so again
        valid = all(isinstance(sections.get(name), BaseModel) for name in names)
        design = kind.model_construct(**sections) if valid else check.model(kind, sections, path="")
        schedules = {} if sites is None else read_sites(check, sites)
        check.done()
        assert design is not None
        return design if sites is None else design.model_copy(update={"sites": schedules})

    def _section(self, kind: Any, tree: Any, original: Any) -> Any:
        """A section that many designs share is validated once; the tree itself where it is invalid.

        original: the section in the configuration, which means the same to all of them.
        """

        def validate() -> Any:
            of_model = kind is _AnyModel
            section = Problems().model(kind, {"model": tree} if of_model else tree, path="")
            # the model of the whole design reports the problems
            return tree if section is None else section.model if of_model else section

        # `own_sections` may have cut it: then it is not the section of all designs
        return self._sections.get(validate, original, key=(kind, tree is original))

    def problems(self, design: BaseModel) -> Sequence[Problem]:
        """Rules between parts that this design breaks."""
        assert isinstance(design, StepDesign)
        return problems(list(_rules(design)))

    def condition(self, path: str, tree: Tree) -> Mapping[str, Any] | None:
        """Every value of a design may be searched."""
        section, _, name = path.partition(".")
        if path.rpartition(".")[2] in LABELS or section not in ScheduledDesign.model_fields:
            return None
        if section == "sites":
            return site_condition(path, tree)
        kind = self.machines[tree.get("sites") is not None]
        unread = section == "system" and not reads(kind, name, tree["system"])
        fields = _fields(tree, section) | {f"gpu.{field}" for field in Gpu.model_fields}
        if unread or (name not in fields and get_path(tree, path) is None):
            return None
        return condition_of(path, tree)

    def is_axis(self, path: str, design: BaseModel) -> bool:
        """Numbers that do not change which operators there are, where a design is of one length."""
        assert isinstance(design, StepDesign)
        # schedules are lowered for whole numbers of GPUs
        if path == "parallel.tp" and isinstance(design, ScheduledDesign):
            return False
        # an epoch has an axis of its own
        return design.lengths is None and has_axis(design, path)

    def as_run(self, design: StepDesign) -> StepDesign:
        """The design as it runs: at the clock that it holds, where that is not the one that is asked for."""
        return design

    def screen(self, batches: Sequence[Batch]) -> list[Results]:
        """Look at the rules of all designs of one structure at once."""
        return results_by_batch(batches, StepDesign, _screen_grid, _apart)

    def evaluate(self, batches: Sequence[Batch]) -> list[Results]:
        """All designs of one structure at once."""
        return results_by_batch(batches, StepDesign, _evaluate_grid, _apart)

    def relate(self, point: Columns, baseline: Columns) -> Columns:
        """Speed-up, by what is projected of both, and how far it is off."""
        projected, true = (baseline[name] / point[name] for name in ("projected_s", "epoch_s"))
        projected = projected * point["iterations"] / baseline["iterations"]
        true = true * point["iterations"] / baseline["iterations"]
        lost, saved = (1 - point[name] / baseline[name] for name in ("tokens_per_s", "state_bytes"))
        relations = {"speedup": projected, "speedup_error": np.abs(projected / true - 1)}
        return {**relations, "throughput_lost": lost, "capacity_saved": saved}

    def draw(
        self, designs: Sequence[BaseModel], *, samples: int, seed: int, exact: Sequence[str] = ()
    ) -> tuple[NDArray[np.float64], Mapping[str, str]]:
        """Times [designs, samples] of iterations with drawn errors, and what each kind of error rests on."""
        from simulators.steps.plan.drawn_errors import draw_steps  # which few commands need

        of_one_length = [typical(design) for design in designs if isinstance(design, StepDesign)]
        return draw_steps(of_one_length, iteration, samples=samples, seed=seed, exact=exact)

    def replay(self, design: BaseModel) -> Replay:
        """Every operator of an iteration, and the share of its time that each kind has."""
        assert isinstance(design, StepDesign)
        metrics = metrics_of(design)
        limits = {name: float(metrics[f"share_{name}"]) for name in SHARES}
        ordered = dict(sorted(limits.items(), key=lambda item: -item[1]))
        return Replay(tuple(intervals(iteration(typical(design)))), {k: v for k, v in ordered.items() if v > 0})

    def timeline(self, design: BaseModel) -> Timeline:
        """Every operator of an iteration (of an epoch: of one of the mean length), as an engine runs it.

        Schedules of sites are a task each, as long as they take.
        """
        assert isinstance(design, StepDesign)
        return run(iteration(typical(design)))

    def models(self, design: BaseModel) -> Mapping[str, str]:
        """Models of the costs of GEMMs and collectives, and which precision's constants a format has."""
        assert isinstance(design, StepDesign)
        switch = "in_switch, else " if design.parallel.collectives == "in_switch" else ""
        near = "".join(
            f", {name} with the constants of {known} at its own peak"
            for name, known in constants_of(design).items()
            if name != known
        )
        gemm = f"{design.system.costs.gemm}{near}"
        return {"gemm": gemm, "collective": f"{switch}{design.system.costs.collective}"}

    def facts(self, design: BaseModel) -> Sequence[tuple[str, Any, str, str]]:
        """Constants of the device that count in the run, of the kernels and of the optimizer, with sources."""
        assert isinstance(design, StepDesign)
        parts = {"kernels": design.kernels, "optimizer": design.optimizer}
        sourced = {**parts, "lengths": design.lengths, "quantised": design.quantised, "format": design.format}
        sourced["instructions"] = design.instructions
        below = [fact for name, part in sourced.items() if part is not None for fact in part.facts_below(name)]
        return [*(fact for fact in design.system.facts_below("system") if reads_constant(fact[0], design)), *below]


def _fields(tree: Tree, section: str) -> set[str]:
    """Names of the values that a section may hold beside those it is given."""
    if section == "model":
        return set(Transformer.model_fields) if tree["model"].get("kind", "transformer") == "transformer" else set()
    if section in OPTIONAL and tree.get(section) is None:
        return set()
    kind: Any = _KINDS.get(section, StepDesign.model_fields[section].annotation)
    return set(kind.model_fields)


def _apart(design: StepDesign) -> Any:
    """What is the same in all designs of a grid beside their structure: an epoch is computed alone."""
    tp = design.parallel.tp if isinstance(design, ScheduledDesign) else 0
    # equal to nothing: never in one grid with others
    return type(design), tp, None if design.lengths is None else object()


def _screen_grid(grid: Grid[StepDesign]) -> Results:
    """Results of the designs that break a rule, with the rule; the others are ok, without metrics."""
    reason, texts = reasons(list(_rules(grid.design)), grid.shape)
    status = np.where(reason > 0, STATUSES.index("infeasible"), STATUSES.index("ok")).astype(np.uint8)
    return Results(status, {}, reason, np.zeros_like(reason), texts)


def _legal(design: StepDesign, shape: tuple[int, ...]) -> tuple[NDArray[np.bool_], Sequence[str]]:
    """Which designs of an array break no rule, and the rules that others break."""
    reason, texts = reasons(list(_rules(design)), shape)
    return reason == 0, [text for text in texts if text]


def _step(design: StepDesign) -> tuple[Iteration, Floats]:
    """The iteration of a design, and the share of a GPU's memory that it takes."""
    step, room = iteration(design), design.system.gpu.hbm_bytes
    return step, np.asarray(memory(step, np.inf if room is None else room)["memory_share"], float)


def _sites(design: StepDesign) -> frozenset[str]:
    """Names of the sites that an iteration has."""
    return frozenset(at.name for block in blocks_of(design) for at in places(block.ops))


def _evaluate_grid(grid: Grid[StepDesign]) -> Results:
    """Results of a grid; of one without axes, designs that break a rule are not computed."""
    screened = _screen_grid(grid)
    ok = screened.ok
    if not ok.any():
        return screened
    some = len(grid.shape) == 1 and not ok.all()  # a product of axes is computed whole
    computed = grid.take(ok) if some else grid
    with np.errstate(all="ignore"):  # of those that break a rule
        metrics = metrics_of(computed.design)
    columns = {name: np.full(grid.size, np.nan) for name in metrics}
    for name, value in metrics.items():
        values = np.broadcast_to(value, computed.shape).reshape(-1)
        columns[name][ok] = values if some else values[ok]  # the others stay NaN
    texts = (*screened.texts, "operators")
    engine = np.where(ok, len(texts) - 1, 0).astype(np.int32)
    return replace(screened, metrics=columns, engine=engine, texts=texts)
