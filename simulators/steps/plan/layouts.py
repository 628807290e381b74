"""Layouts: degrees of parallelism, split states, micro-batches and recomputation that spread a step over given GPUs.

The work of a step is kept: dp x micro_batches x batch sequences, and tp x cp x pp x dp GPUs. All layouts that divide
(tensor parallelism inside a node) are computed at once in closed form, with serial sites. They are ranked by

    T + min over schedules of pipelines (S - S_0) + (P - T_s)

S being the time of the micro-batches and the bubble under a schedule (S_0: under that of T), P the time of the step
with one schedule at every site and T_s with none; P is computed for the fastest few alone. A layout whose step does not
fit the memory of a GPU is none. The term is that of arXiv:2311.05610.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from dse.backend import Tree
from dse.errors import ConfigError, Problem, Problems
from dse.space import get_path
from dse.values import Frozen, put
from dse.values.units import Integer, Number
from simulators.steps.design import StepDesign
from simulators.steps.overlap.sites import SITES, site_condition
from simulators.steps.run.iteration import Iteration
from simulators.workloads.model import Transformer

Floats = NDArray[np.float64]
# schedules are lowered and run, which takes far longer than the closed form
_PROBED = 24  # layouts that are computed with schedules at their sites
_ALIKE = 2  # of these, with equal tp, pp and ep
_LARGER = (2, 4, 8, 16, 32, 64)  # times as many GPUs, which are tried where nothing fits
_MOST_CP = 8  # GPUs that split a sequence
_NUMBERS = ("tp", "pp", "dp", "batch", "micro_batches")  # that may be arrays
_SCHEDULES: tuple[Mapping[str, Any], ...] = (
    *({"pipeline": "interleaved", "virtual_stages": stages} for stages in (2, 4)),
    {"pipeline": "zb_h1"},
)
"""Schedules of pipelines that layouts are ranked by, beside their own."""
_STATE, _GRADIENTS = 1, 2  # of an optimizer, and of weights, that `zero` splits
# what takes the least memory: tried where nothing fits
_LEAN: Mapping[str, Sequence[Any]] = {"zero": (3,), "recompute": ("all",)}


class LayoutSection(Frozen):
    """The section `layouts`. auto: whether layouts are chosen. gpus: all of them; None for those of the system.
    sequences: of a step on all of them; None for dp x micro_batches x batch of the configuration.

    most: layouts whose schedules are searched. room: share of a GPU's memory that a layout may take where none takes
    less than all of it. probe: schedule with which they are ranked. fixed: values of `Layout`
    that are not chosen.
    """

    auto: bool = False
    gpus: Annotated[Integer, Field(ge=1, le=2**20)] | None = None
    sequences: Annotated[Integer, Field(ge=1, le=2**31)] | None = None
    most: Annotated[Integer, Field(ge=1, le=1000)] = 2
    room: Annotated[Number, Field(ge=1, le=2)] = 1.0
    probe: str = "serial"
    fixed: Mapping[str, int | str] = Field(default_factory=dict)


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism [GPUs], split states, sequences of a micro-batch, micro-batches, and recomputation."""

    tp: int
    pp: int
    dp: int
    cp: int
    ep: int
    zero: int
    batch: int
    micro_batches: int
    recompute: str

    @property
    def name(self) -> str:
        """Say what it is; degrees of one are left out."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        degrees = {name: values[name] for name in ("tp", "pp", "dp", "cp", "ep") if values[name] > 1} or {"tp": 1}
        states = {"zero": self.zero} if self.zero else {}
        shares = {"batch": self.batch, "micro_batches": self.micro_batches}
        again = {"recompute": self.recompute} if self.recompute != "none" else {}
        return " ".join(f"{name}={value}" for name, value in {**degrees, **states, **shares, **again}.items())

    @property
    def gpus(self) -> int:
        """All GPUs."""
        return self.tp * self.pp * self.dp * self.cp

    @property
    def sequences(self) -> int:
        """Sequences of a step."""
        return self.dp * self.micro_batches * self.batch

    @property
    def paths(self) -> dict[str, Any]:
        """Dotted path in a design -> value."""
        return {path_of(field.name): getattr(self, field.name) for field in fields(self)}

    def tree(self, tree: Tree) -> dict[str, Any]:
        """A design tree with this layout."""
        sections = {section: dict(tree[section]) for section in ("parallel", "run")}
        for path, value in self.paths.items():
            section, _, name = path.partition(".")
            sections[section][name] = value
        if sections["run"].get("mode") == "training":
            sections["parallel"]["sequence_parallel"] = self.tp > 1  # what is trained with tp splits tokens too
        return {**tree, **sections}


def path_of(name: str) -> str:
    """Dotted path of a value of a layout."""
    return f"{'run' if name in ('batch', 'micro_batches', 'recompute') else 'parallel'}.{name}"


PATHS = tuple(path_of(field.name) for field in fields(Layout))
"""Paths of the values of a layout in a design."""


@dataclass(frozen=True)
class Steps:
    """How steps are computed. make: a design of a tree. legal: which designs of an array of a shape break no rule, and
    the rules that the others break. step: the iteration, and its memory as a share of a GPU's. sites: names of those
    that a design has.
    """

    make: Callable[[Tree], StepDesign]
    legal: Callable[[StepDesign, tuple[int, ...]], tuple[NDArray[np.bool_], Sequence[str]]]
    step: Callable[[StepDesign], tuple[Iteration, Floats]]
    sites: Callable[[StepDesign], frozenset[str]]


@dataclass(frozen=True)
class Candidates:
    """Layouts, the best with serial sites first. seconds: with the best schedule of a pipeline. memory_share: of a GPU.

    reasons: why others are none.
    """

    layouts: Sequence[Layout]
    seconds: Floats
    memory_share: Floats
    reasons: Sequence[str] = ()

    @property
    def fitting(self) -> Candidates:
        """Layouts that fit."""
        return self.within(1.0)

    def within(self, room: float) -> Candidates:
        """Layouts that take no more than a share of the memory."""
        places = np.flatnonzero(self.memory_share <= room).tolist()
        return Candidates(
            [self.layouts[at] for at in places], self.seconds[places], self.memory_share[places], self.reasons
        )


@dataclass(frozen=True)
class LayoutQuestion:
    """The question which layout a step should have. tree: of a design. gpus, sequences: of a step."""

    tree: Tree
    asked: LayoutSection
    gpus: int
    sequences: int
    steps: Steps

    @classmethod
    def of(cls, tree: Tree, asked: LayoutSection, steps: Steps) -> LayoutQuestion:
        """Build from the configuration.

        Raises ConfigError where the number of GPUs is not known, or the model is no transformer.
        """
        # layouts are ranked with serial sites
        serial = {name: section for name, section in tree.items() if name != "sites"}
        design, check = steps.make(serial), Problems()
        node, nodes = design.system.node, get_path(tree, "system.fabric.num_nodes") or 1
        if asked.gpus is None and node is None:
            way = "give their number: layouts.gpus=8"
            check.add("layouts.gpus", "is not known: the system describes no node", way_out=way)
        if not isinstance(design.model, Transformer):
            rule = "chooses degrees of transformers alone"
            check.add("parallel", rule, value="auto", way_out="leave it out, or take a transformer")
        check.done()
        gpus = asked.gpus or (0 if node is None else node.num_gpus * int(nodes))  # all nodes of the system
        run = design.run
        # kept by every layout
        typed = int(np.asarray(design.parallel.dp) * np.asarray(run.micro_batches) * np.asarray(run.batch))
        return cls(serial, asked, gpus, asked.sequences or typed, steps)

    def chosen(self) -> list[Layout]:
        """The layouts whose schedules are worth a search, and the best one with serial sites. Raises ConfigError.

        Of layouts with equal tp, pp and ep, whose schedules hardly differ, the best is taken alone.
        """
        serial = self.candidates()
        fitting = serial.fitting if serial.fitting.layouts else serial.within(self.asked.room)
        if not fitting.layouts:
            raise ConfigError([self.why_none(serial)])
        ranked = np.argsort(fitting.seconds, kind="stable").tolist()
        probed = self._probed(fitting, _first_of_each(fitting.layouts, ranked, _ALIKE)[:_PROBED])
        order = [place for _, place in sorted(probed)]  # by time, then by serial rank
        best = _first_of_each(fitting.layouts, order, 1)[: self.asked.most]
        # the best with serial sites is always one of them
        return [fitting.layouts[place] for place in dict.fromkeys([*best, 0])]

    def candidates(self, **only: Sequence[Any]) -> Candidates:
        """All layouts that break no rule, the best with serial sites and its own pipeline first."""
        candidates, reasons = list[tuple[float, float, float, Layout]](), dict[str, None]()
        values, bound = self._values(only), StateBound.of(self)
        for cp, ep in itertools.product(values["cp"], values["ep"]):
            numbers = self._numbers(cp=cp, ep=ep)
            roomy = np.zeros(len(numbers), bool)  # layouts that fit with the optimizer's state split alone
            for zero in values["zero"]:
                shares = bound.shares(numbers, cp=cp, ep=ep, zero=zero)
                left = (shares <= 1) & ~(roomy & (zero == _GRADIENTS))
                for recompute in values["recompute"]:
                    choice = {"cp": cp, "ep": ep, "zero": zero, "recompute": recompute}
                    rows = list(self._layouts(choice, numbers, np.flatnonzero(left), reasons))
                    candidates += [row for _, row in rows]
                    # what fits is not slowed by computing more of it again
                    left[[at for at, (*_, share, _) in rows if share <= 1]] = False
                    if zero == _STATE and recompute == "none":
                        roomy = ~left
        for cp, ep in (
            itertools.product(values["cp"], values["ep"]) if not candidates else ()
        ):  # for what a refusal says
            choice = {"cp": cp, "ep": ep, **{name: values[name][-1] for name in _LEAN}}
            numbers = self._numbers(cp=cp, ep=ep)
            candidates += [row for _, row in self._layouts(choice, numbers, np.arange(len(numbers)), reasons)]
        candidates.sort(key=lambda row: float(row[0]))  # by time with its own pipeline
        return Candidates(
            [layout for *_, layout in candidates],
            np.array([rank for _, rank, *_ in candidates]),
            np.array([share for *_, share, _ in candidates]),
            list(reasons),
        )

    def _layouts(
        self, choice: Mapping[str, Any], numbers: NDArray[np.int64], places: NDArray[np.intp], reasons: dict[str, None]
    ) -> Iterator[tuple[int, tuple[float, float, float, Layout]]]:
        """Yield of some rows of numbers the places, and times, memory and layout of those that break no rule.

        reasons: of those that do, which are added to it.
        """
        if not len(places):
            return
        design = self._design(choice, numbers[places])
        legal, why = self.steps.legal(design, (len(places),))
        reasons.update(dict.fromkeys(why))
        for at, seconds, best, share in self._computed(design, legal):
            sizes = dict(zip(_NUMBERS, numbers[places[at]].tolist(), strict=True))
            yield int(places[at]), (seconds, best, share, Layout(**sizes, **choice))

    def _values(self, only: Mapping[str, Sequence[Any]]) -> dict[str, Sequence[Any]]:
        """Values that change which operators there are, by name."""
        mode = get_path(self.tree, "run.mode")
        training = mode == "training"
        experts = get_path(self.tree, "model.moe.experts")
        values: dict[str, Sequence[Any]] = {
            # one token has nothing to split
            "cp": [size for size in _divisors(self.gpus) if size <= (1 if mode == "decode" else _MOST_CP)],
            # no experts to spread
            "ep": [size for size in _divisors(self.gpus) if experts and int(experts) % size == 0] or [1],
            "zero": (0, 1, 2, 3) if training else (0,),
            "recompute": ("none", "half", "all") if training else ("none",),
        }
        # what inference does not have is not varied
        values |= {name: several for name, several in only.items() if training or name in ("cp", "ep")}
        # what the user has typed stands
        values |= {name: [value] for name, value in self.asked.fixed.items() if name in values}
        return values

    def _numbers(self, *, cp: int, ep: int) -> NDArray[np.int64]:
        """Rows of (tp, pp, dp, batch, micro_batches) that give all GPUs and all sequences something to do."""
        node = self.steps.make(self.tree).system.node
        inside = 1 if node is None else node.num_gpus
        fixed, rows = self.asked.fixed, []
        for tp, pp in itertools.product(_divisors(self.gpus), repeat=2):
            dp, left = divmod(self.gpus, tp * pp * cp)
            # tensor parallelism inside a node only
            if left or tp > inside or self.sequences % max(dp, 1) or (tp * cp * dp) % ep:
                continue
            of_replica = self.sequences // dp
            rows += [(tp, pp, dp, batch, of_replica // batch) for batch in _divisors(of_replica)]
        wanted = [fixed.get(name) for name in _NUMBERS]
        # values that were typed
        matching = [row for row in rows if all(want in (None, own) for want, own in zip(wanted, row, strict=True))]
        return np.array(matching, np.int64).reshape(-1, len(_NUMBERS))

    def _computed(self, design: StepDesign, legal: NDArray[np.bool_]) -> Iterator[tuple[int, float, float, float]]:
        """Yield of legal designs their places, times with their own and with the best pipeline [s], and shares of the
        memory.
        """
        if not legal.any():
            return
        with np.errstate(all="ignore"):  # of those that break a rule
            step, share = self.steps.step(design)
            gained = np.zeros(len(legal))
            # inference has no schedules of pipelines to choose from
            for knobs in _SCHEDULES if step.passes.is_training else ():
                other = design
                for name, value in knobs.items():
                    other = put(other, f"parallel.{name}", value)
                less = step.turns.seconds(other.parallel) - step.turns.seconds(step.passes.parallel)
                # a schedule may break rules that the layout does not
                gained = np.where(self.steps.legal(other, legal.shape)[0], np.minimum(gained, less), gained)
        seconds, shares = (np.broadcast_to(values, legal.shape) for values in (step.seconds, share))
        for at in np.flatnonzero(legal).tolist():
            yield at, float(seconds[at]), float(seconds[at] + gained[at]), float(shares[at])

    def _design(self, choice: Mapping[str, Any], numbers: NDArray[np.int64]) -> StepDesign:
        # placeholders: columns of numbers follow
        tree = Layout(tp=1, pp=1, dp=1, batch=1, micro_batches=1, **choice).tree(self.tree)
        if get_path(tree, "run.mode") == "training":
            tree["parallel"]["sequence_parallel"] = True  # for all, so that layouts with tp = 1 share the grid
        design = self.steps.make(tree)
        for name, column in zip(_NUMBERS, numbers.T, strict=True):
            design = put(design, path_of(name), column)
        return design

    def _probed(self, serial: Candidates, places: Sequence[int]) -> Iterator[tuple[float, int]]:
        """Yield the ranks of some layouts with a schedule at every site, and their places."""
        for place in places:
            yield float(serial.seconds[place]) + self._gain_of_probe(serial.layouts[place].tree(self.tree)), place

    def _gain_of_probe(self, tree: Tree) -> float:
        """Time that a schedule at every site adds to a step, with tokens split or not; 0 where it adds some [s]."""
        alone = float(self.steps.step(self.steps.make(tree))[0].seconds)
        # sites of gathers exist only where tokens are split
        split = {**tree, "parallel": {**tree["parallel"], "sequence_parallel": True}}
        return min(0.0, *(_probed_s(self, variant) - alone for variant in (tree, split)))

    def why_none(self, serial: Candidates) -> Problem:
        """The problem that no layout fits, or that none divides."""
        if not serial.layouts:
            rule = f"finds no layout of {self.gpus} GPUs for {self.sequences} sequences a step"
            # what the machine lacks hinders every layout, and says its own way out
            machine = next((reason for reason in serial.reasons if reason.startswith("system.")), "")
            why = machine or next(filter(None, serial.reasons), "")
            way = "" if machine else "take another layouts.gpus, or more sequences: layouts.sequences=<of all GPUs>"
            return Problem("parallel", f"{rule}: {why}" if why else rule, "auto", way)
        least = int(np.argmin(serial.memory_share))  # the layout that comes nearest
        rule = f"finds no layout of {self.gpus} GPUs that fits: the smallest, {serial.layouts[least].name}, "
        rule += f"needs {serial.memory_share[least]:.2f} times the memory of a GPU"
        larger = serial
        needed = float(serial.memory_share[least]) / 2  # fewer split no state finely enough
        for times in (times for times in _LARGER if times > needed):  # so that the way out names how many GPUs would do
            more = replace(self, gpus=times * self.gpus)
            larger = more.candidates(**_LEAN)
            if larger.fitting.layouts:
                way = f"layouts.gpus={more.gpus} fits: {larger.fitting.layouts[0].name}"
                return Problem("parallel", rule, "auto", way)
        hinders = "" if larger.layouts else f"; {next(iter(larger.reasons), '')}"
        return Problem("parallel", rule, "auto", f"take more GPUs, or a smaller model{hinders}")


@dataclass(frozen=True)
class StateBound:
    """Least memory of layouts by their weights, gradients and optimizer's state, of the mean stage.

    params, of_experts: weights of the model, and those of routed experts among them. sizes: bytes of a weight, its
    gradient and its state; 0 of inference, whose layouts are few. room: bytes of a GPU.
    """

    params: float
    of_experts: float
    sizes: tuple[float, float, float]
    room: float

    @classmethod
    def of(cls, question: LayoutQuestion) -> StateBound:
        """Build from the model of a question, on one GPU."""
        tree = Layout(1, 1, 1, 1, 1, 0, 1, 1, "none").tree(question.tree)
        design = question.steps.make(tree)
        run, optimizer, room = design.run, design.optimizer, design.system.gpu.hbm_bytes
        by_weight = optimizer.bytes_of(run) if not optimizer.unknown(run) else None
        if run.mode != "training" or by_weight is None or room is None or run.adapters is not None:
            return cls(0.0, 0.0, (0.0, 0.0, 0.0), np.inf)
        gradient = 0 if optimizer.in_backward else run.gradient_bytes(design.parallel)
        blocks = question.steps.step(design)[0].passes.blocks
        params, of_experts = (
            float(sum(np.asarray(block.count) * np.asarray(getattr(block, name), float) for block in blocks))
            for name in ("params", "expert_params")
        )
        return cls(params, of_experts, (run.element_bytes, gradient, float(by_weight[1])), float(room))

    def shares(self, numbers: NDArray[np.int64], *, cp: int, ep: int, zero: int) -> Floats:
        """Share of a GPU's memory that rows of (tp, pp, dp, ...) take at least."""
        tp, pp, dp = numbers[:, :3].T.astype(float)
        over = ep if ep > 1 else tp  # GPUs that the experts of a layer are split over
        total = np.zeros(len(numbers))
        for place, size in enumerate(self.sizes):
            # stage 1 splits the state, 2 gradients as well, 3 weights, too
            replicas, same = (cp * dp, cp * dp * tp / over) if zero >= len(self.sizes) - place else (1.0, 1.0)
            total += size * ((self.params - self.of_experts) / (tp * replicas) + self.of_experts / (over * same))
        return np.asarray(total / pp / self.room)


def _probed_s(question: LayoutQuestion, tree: Tree) -> float:
    """Time of a step with the schedule at every site that it has; infinite where that breaks a rule [s]."""
    needed = {name: site_condition(f"sites.{name}", {**tree, "sites": {}}) or {} for name in SITES}
    there = [name for name in SITES if all(get_path(tree, path) == value for path, value in needed[name].items())]
    scheduled = question.steps.make({**tree, "sites": dict.fromkeys(there, question.asked.probe)})
    if not there or not question.steps.legal(scheduled, ())[0].all():
        return np.inf
    return float(question.steps.step(scheduled)[0].seconds)


def best_layout(question: LayoutQuestion) -> tuple[Layout, float]:
    """The best layout with serial sites, and the time of its step [s]. Raises ConfigError where none fits."""
    serial = question.candidates()
    fitting = serial.fitting
    if not fitting.layouts:
        raise ConfigError([question.why_none(serial)])
    least = int(np.argmin(fitting.seconds))
    return fitting.layouts[least], float(fitting.seconds[least])


def usual(spreading: LayoutQuestion) -> Layout | None:
    """The layout that Takeaways 1 and 2 of arXiv:2104.04473 give: tensor parallelism as wide as a node, as few stages
    as fit, data parallelism for the rest, one sequence in a micro-batch; experts spread over a node. None where none
    fits, or nothing is trained.
    """
    if get_path(spreading.tree, "run.mode") != "training":  # the rule is of training
        return None
    ep = (_usual_ep(spreading),)
    layouts = spreading.candidates(cp=(1,), ep=ep, zero=(0, 1), recompute=("none", "all")).fitting.layouts
    # widest tp, fewest stages, smallest micro-batches, then nothing recomputed
    order = sorted(layouts, key=lambda layout: (-layout.tp, layout.pp, layout.batch, layout.recompute != "none"))
    return order[0] if order else None


def _usual_ep(spreading: LayoutQuestion) -> int:
    """GPUs of a node that experts can be spread over; one for a model without any."""
    experts, node = get_path(spreading.tree, "model.moe.experts"), spreading.steps.make(spreading.tree).system.node
    together = 1 if node is None or not experts else min(node.num_gpus, spreading.gpus)
    return max(size for size in _divisors(spreading.gpus) if size <= together and int(experts or 1) % size == 0)


def _first_of_each(layouts: Sequence[Layout], places: Sequence[int], most: int) -> list[int]:
    """Places of the first few of layouts with equal tp, pp and ep."""
    met, first = Counter[tuple[int, ...]](), []
    for place in places:
        layout = layouts[place]
        degrees = layout.tp, layout.pp, layout.ep
        met[degrees] += 1
        first += [place] if met[degrees] <= most else []
    return first


def _divisors(number: int) -> list[int]:
    """Divisors in ascending order."""
    return [size for size in range(1, number + 1) if number % size == 0]
