"""Sites: the collectives of tensor parallelism in a layer with the GEMMs around them, and what a schedule makes of one.

    site                      collective, with the GEMM                                   beside it
    attention_in, ffn_in      all-gather of the tokens before QKV, FC 1
    attention_out, ffn_out    sum of the parts of the output projection, of FC 2
    attention_in_backward     sum of the gradients of the input of QKV, after dX           dW of QKV
    ffn_in_backward           likewise of FC 1                                            dW of FC 1
    attention_out_backward    all-gather of the gradients before dX of the projection
    ffn_out_backward          likewise of FC 2

Gathers are sites where tokens are split (`parallel.sequence_parallel`), and backward ones of training. A schedule
lowers the GEMM and its collective to a task graph, which an engine runs (`system.costs.sites` says how). With M its
makespan, M_0 that of the same GEMM and collective one after the other, and T_0 the time of both in the iteration:

    T = T_0 M / M_0      of which T (GEMM runs) / M counts as compute, and what is left as exposed communication

so that launches, clocks and kernels of the iteration count the same for every schedule. Where tokens are not split, a
schedule sums an all-reduce in two steps, the reduce-scatter by the schedule and an all-gather after it, or by itself
(GEMM and all-reduce in one kernel). Schedules of a collective `beside` a GEMM take that of the weights' gradients.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from dse import plugins
from dse.backend import Interval, Tree
from dse.errors import ConfigError, Problem, Problems, did_you_mean, validate_as
from dse.errors.parsing import parse_yaml
from dse.space import get_path
from dse.space.blocks import Rule
from dse.values import LABELS, AtLeast, Memo, leaves
from simulators.costs.algorithms import Pattern
from simulators.costs.transfer import library_cus
from simulators.hardware.device import Device
from simulators.hardware.machine import System
from simulators.hardware.parts import ELEMENT_BYTES
from simulators.hardware.schedule_system import WholeNode, schedules_see
from simulators.steps.operators.work import AGAIN, Exchange, Op, OperatorCost, Platform, Product, collective
from simulators.steps.overlap.gradient_contention import ENGINE
from simulators.steps.overlap.implementations import FORMATS, Implementation, Mode, Place, implementation
from simulators.taskgraph.graph import TaskGraph
from simulators.taskgraph.symmetry import patterns
from simulators.workloads.model_zoo import option_tree
from simulators.workloads.operators import Collective, Gemm, Workload

Floats = NDArray[np.float64]
Order = Literal["before", "after"]
SERIAL = "serial"
"""Option of the group `schedule` that a site without another one has."""
_COLUMNS = 512  # of a tensor of which only the bytes are known


@dataclass(frozen=True)
class Site:
    """Names of the operators of a site. order: of the collective and the GEMM that it belongs to."""

    gemm: str
    collectives: tuple[str, ...]
    order: Order
    beside: str = ""


def _sums(of: str) -> tuple[str, ...]:
    return f"all-reduce {of}", f"reduce-scatter {of}"


SITES: Mapping[str, Site] = {
    "attention_in": Site("qkv", ("all-gather attention",), "before"),
    "attention_out": Site("projection", _sums("attention"), "after"),
    "ffn_in": Site("fc1", ("all-gather ffn",), "before"),
    "ffn_out": Site("fc2", _sums("ffn"), "after"),
    "ffn_out_backward": Site("fc2 dX", ("reduce-scatter ffn backward",), "before"),
    "ffn_in_backward": Site("fc1 dX", _sums("fc1 dX"), "after", beside="fc1 dW"),
    "attention_out_backward": Site("projection dX", ("reduce-scatter attention backward",), "before"),
    "attention_in_backward": Site("qkv dX", _sums("qkv dX"), "after", beside="qkv dW"),
}
"""Sites by name, in the order of an iteration."""


@dataclass(frozen=True)
class SitePlace:
    """A site in the operators of a block: places of its GEMM, its collective, and the GEMM beside it (None: none)."""

    name: str
    gemm: int
    collective: int
    beside: int | None = None

    def at(self, offset: int) -> SitePlace:
        """The same in a list of operators in which the block's begin at an offset."""
        beside = None if self.beside is None else self.beside + offset
        return SitePlace(self.name, self.gemm + offset, self.collective + offset, beside)


def places(ops: Sequence[Op]) -> Iterator[SitePlace]:
    """Yield every place of every site in the operators of a block, those of what is computed again as well."""
    index = {op.name: place for place, op in enumerate(ops)}
    for place, op in enumerate(ops):
        plain, again = op.name.removesuffix(AGAIN), AGAIN if op.name.endswith(AGAIN) else ""
        for name, site in SITES.items():
            if plain in site.collectives and isinstance(op.work, Exchange) and f"{site.gemm}{again}" in index:
                # none where the model has no such GEMM
                yield SitePlace(name, index[f"{site.gemm}{again}"], place, index.get(site.beside))


@dataclass(frozen=True)
class TensorGroup:
    """GPUs of a tp group as schedules see them. format: of the inputs of GEMMs. simulated: as the model of sites has
    them, one for all or each by itself. engine: that runs schedules. effects: those known, by schedule and sizes;
    serial_s: likewise [s] of serial sites, by cost models and sizes; graphs: those whose work is drawn.
    """

    system: System
    format: str
    simulated: System
    engine: str = ENGINE
    effects: dict[Any, Effect] = field(default_factory=dict)
    serial_s: dict[Any, Floats] = field(default_factory=dict)
    graphs: dict[Any, TaskGraph] = field(default_factory=dict)

    @classmethod
    def of(cls, machine: Device, *, tp: int, precision: str) -> TensorGroup:
        """Build from a machine that has all parts that schedules need; the same group for the same machine."""
        # effects of schedules are remembered in the group
        return _groups.get(lambda: cls._build(machine, tp, precision), machine, key=(tp, precision))

    @classmethod
    def _build(cls, machine: Device, tp: int, precision: str) -> TensorGroup:
        constants, format_ = machine.gpu.constants(precision), FORMATS.get(precision, precision)
        efficiency = {} if constants is None else {format_: constants}
        system, costs = schedules_see(machine, tp, efficiency), machine.costs
        # every GPU by itself, with unequal shares
        simulated = WholeNode.of(system, _imbalance()) if costs.sites == "node" else system
        engine = "uncontended" if costs.sites == "uncontended" else ENGINE
        return cls(system, format_, simulated, engine)

    def know(self, larger: TensorGroup, places: NDArray[np.intp]) -> None:
        """Take over what is known of machines at whose places in arrays these are."""
        self.effects.update({name: effect.take(places) for name, effect in larger.effects.items()})
        self.serial_s.update({name: _entries(seconds, places) for name, seconds in larger.serial_s.items()})

    def effect(self, schedule: Any, workload: Workload) -> Effect:
        """Effect of a schedule on a GEMM and its collective; remembered for single numbers."""
        effect: Effect = self._remembered(schedule, workload, self.effects, self._effect)
        return effect

    def drawn_effect(self, schedule: Any, workload: Workload, drawn: Mapping[str, Floats]) -> Effect:
        """The effect with drawn factors [S] on the work of tasks, by their kind."""
        graphs = (self._remembered(way, workload, self.graphs, self._graph) for way in (schedule, _serial_of(schedule)))
        (makespan, computing, cus), (serial, *_) = (_run(graph.draw(drawn), self.engine) for graph in graphs)
        return self._effect_of_run(makespan, computing, held=cus, serial=serial)

    def _effect(self, schedule: Any, workload: Workload) -> Effect:
        makespan, computing, cus = _run(self._graph(schedule, workload), self.engine)
        serial = self._remembered(
            _serial_of(schedule), workload, self.serial_s, lambda *way: _run(self._graph(*way), self.engine)[0]
        )
        return self._effect_of_run(makespan, computing, held=cus, serial=serial)

    def _graph(self, schedule: Any, workload: Workload) -> Any:
        return schedule.lower(self.simulated, workload)

    def _effect_of_run(self, makespan: Floats, computing: Floats, *, held: Floats, serial: Floats) -> Effect:
        gpus = 1 if self.simulated is self.system else self.system.node.num_gpus  # CU-seconds of all simulated GPUs
        return Effect(makespan / serial, computing / makespan, held / makespan / gpus)

    @staticmethod
    def _remembered(chosen: BaseModel, workload: Workload, memory: dict[Any, Any], compute: Any) -> Any:
        """Compute from a model and a workload, once for single numbers."""
        numbers = [value for part in (chosen, workload) for _, value, _ in leaves(part)]
        # arrays would need comparing, and seldom come twice
        if any(isinstance(value, np.ndarray) for value in numbers):
            return compute(chosen, workload)
        name = type(chosen), *numbers
        if name not in memory:
            memory[name] = compute(chosen, workload)
        return memory[name]


def _serial_of(schedule: Any) -> Any:
    """The serial schedule by the same host."""
    host = {name: getattr(schedule, name, None) for name in ("host_s", "collective_calls")}
    return read_schedule(SERIAL).model_copy(update={name: value for name, value in host.items() if value is not None})


_groups = Memo[TensorGroup](64)  # machines whose groups are kept


@dataclass(frozen=True)
class SiteSchedules:
    """Schedules of sites by name, on a group of GPUs."""

    schedules: Mapping[str, Any]
    group: TensorGroup
    mode: Mode = "training"

    def costs(
        self, ops: Sequence[Op], costs: Sequence[OperatorCost], platform: Platform, at: SitePlace
    ) -> dict[int, OperatorCost]:
        """Costs of the operators of a place that its schedule changes, by their places in `ops`."""
        # schedules of a site use kernels of the library, not the switch
        schedule, group = self.schedules.get(at.name), replace(platform.groups["tp"], in_switch=None)
        exchange = ops[at.collective].work
        if schedule is None or not isinstance(exchange, Exchange):
            return {}  # serial: as it is
        # the gradients of weights run with the collective
        gemm = at.beside if _runs_beside(schedule) and at.beside is not None else at.gemm
        # schedules sum by reduce-scatter; an all-gather completes it
        in_two_steps = _in_two_steps(schedule, exchange)
        pattern: Pattern = "reduce_scatter" if in_two_steps else exchange.pattern
        moved = collective(Exchange(pattern, exchange.payload_bytes), group)
        workload = self.workload(schedule, at.name, ops[gemm], exchange)
        after = collective(Exchange("all_gather", exchange.payload_bytes), group).seconds if in_two_steps else 0.0
        effect = self.group.effect(schedule, workload)
        if platform.errors is not None:
            plain = collective(Exchange(pattern, exchange.payload_bytes), replace(group, errors=None)).seconds
            drawn = {"gemm": np.asarray(costs[gemm].drawn), "transfer": moved.seconds / plain}
            faster = platform.errors.of_overlap(schedule, workload, effect.length)
            effect = self.group.drawn_effect(schedule, workload, drawn)
            effect = replace(effect, length=effect.length / faster)
        total = (costs[gemm].seconds + moved.seconds) * effect.length
        if platform.errors is not None:  # no error makes it shorter than the longer of both alone
            total = np.maximum(total, np.maximum(costs[gemm].seconds, moved.seconds))
        computed = total * effect.computing
        cu_s = np.asarray(total * effect.comm_cus + after * library_cus(self.group.system, "all_gather"))
        return {
            gemm: replace(costs[gemm], seconds=computed),
            at.collective: replace(costs[at.collective], seconds=np.asarray(total - computed + after), comm_cu_s=cu_s),
        }

    def seconds(self, ops: Sequence[Op], costs: Sequence[OperatorCost], platform: Platform, at: SitePlace) -> Floats:
        """Time of the operators of a place with its schedule [s]. costs: of all operators, without schedules."""
        changed = self.costs(ops, costs, platform, at)
        there = (at.gemm, at.collective, at.beside)
        spent = (changed.get(place, costs[place]).seconds for place in there if place is not None)
        return np.asarray(sum(spent, np.zeros(())))

    def intervals(
        self, ops: Sequence[Op], costs: Sequence[OperatorCost], at: SitePlace
    ) -> tuple[int, list[Interval]] | None:
        """The GEMM that a schedule runs with the collective, and its tasks, from the start of the GEMM's time on.

        costs: with the schedule's. Numbers are single ones. None for a serial site.
        """
        schedule, exchange = self.schedules.get(at.name), ops[at.collective].work
        if schedule is None or not isinstance(exchange, Exchange):
            return None
        gemm = at.beside if _runs_beside(schedule) and at.beside is not None else at.gemm
        graph = schedule.lower(self.group.system, self.workload(schedule, at.name, ops[gemm], exchange))
        run = plugins.load("engine", ENGINE).run(graph)
        total = float(costs[gemm].seconds + costs[at.collective].seconds)
        after = 0.0
        if _in_two_steps(schedule, exchange):
            after = total - float(costs[gemm].seconds / self._share_of_compute(graph))
        length = (total - after) / float(run.makespan[0])
        begun = -float(costs[at.collective].seconds) if at.collective < gemm else 0.0  # a gather comes before its GEMM
        tasks = [_scaled(task, length, begun) for task in run.intervals(0)]
        if after > 0:
            tasks.append(
                Interval("tensor-parallel links", "all-gather", "transfer", begun + total - after, begun + total)
            )
        return gemm, tasks

    @staticmethod
    def _share_of_compute(graph: TaskGraph) -> float:
        makespan, computing, _ = _run(graph, ENGINE)
        return float(computing / makespan)

    def workload(self, schedule: Any, name: str, gemm: Op, exchange: Exchange) -> Workload:
        """The GEMM and the collective of a site, as schedules see them: sizes are those of all GPUs."""
        order = "beside" if _runs_beside(schedule) else SITES[name].order
        work, tp = gemm.work, self.group.system.node.num_gpus
        assert isinstance(work, Product)
        n, k = np.asarray(work.m), np.asarray(work.k)  # row-major: rows of C are tokens
        split: dict[str, Any] = {"shards": 1, "split": "n", "n": n, "k": k}
        if order != "beside":
            split = {"shards": tp, "split": "n" if order == "before" else "k"}
            # sizes of all GPUs: outputs or inner dimension are split
            split |= {"n": n * tp, "k": k} if order == "before" else {"n": n, "k": k * tp}
        pattern = "reduce_scatter" if _in_two_steps(schedule, exchange) else exchange.pattern
        cols = k if order == "before" else n
        rows = np.asarray(work.n)
        if order == "beside":  # the tensor has as many bytes as that of the collective
            rows, cols = _rectangle(exchange, ELEMENT_BYTES[self.group.format])
        moved = {"kind": "collective", "pattern": pattern, "rows": rows, "cols": cols, "precision": self.group.format}
        product = {"kind": "gemm", "m": np.asarray(work.n), "precision": self.group.format, **split}
        gemm_after, gather_after = (("gather",) if order == "before" else ()), (("gemm",) if order == "after" else ())
        operators: Any = {
            "gemm": Gemm.model_construct(**_plain(product), after=gemm_after),
            "gather": Collective.model_construct(**_plain(moved), after=gather_after),
        }
        return Workload.model_construct(name=name, operators=operators)

    def rules(self, ops: Sequence[Op], at: SitePlace) -> Iterator[Rule]:
        """Rules that the schedule of a place breaks, by the paths of the site's knobs."""
        schedule, exchange = self.schedules.get(at.name), ops[at.collective].work
        if schedule is None or not isinstance(exchange, Exchange):
            return
        if _runs_beside(schedule) and at.beside is None:
            rule = f"overlaps a collective with an unrelated GEMM, and none is concurrent with {at.name}"
            yield Rule(f"sites.{at.name}", True, rule, schedule.name, way_out="take another schedule")
            return
        gemm = ops[at.beside if _runs_beside(schedule) and at.beside is not None else at.gemm]
        software = implementation(schedule.name.partition(" ")[0])
        where = self.group.system.gpu.name, self.group.format, self.mode
        if software is not None and (refusal := software.refusal(*where)):
            yield Rule(f"sites.{at.name}", True, refusal, schedule.name, way_out="take another implementation")
        workload = self.workload(schedule, at.name, gemm, exchange)
        if software is not None:
            columns, size = workload.overlap().collective.cols, np.asarray(exchange.payload_bytes)
            shared = size / self.group.system.node.num_gpus
            yield software.size_rule(f"sites.{at.name}", where[0], columns=columns, bytes_per_gpu=shared)
        for rule in schedule.rules(self.group.system, workload):
            # reported by the path that was typed
            yield replace(rule, path=re.sub(r"^(schedule|workload.operators.gather)\b", f"sites.{at.name}", rule.path))


def _scaled(task: Interval, length: float, begun: float) -> Interval:
    """A task of a timeline that is stretched, and begins at another time [s]."""
    start_s, finish_s = (begun + length * at for at in (task.start_s, task.finish_s))
    return replace(task, start_s=start_s, finish_s=finish_s, delay_s=length * task.delay_s)


@dataclass(frozen=True)
class Effect:
    """What a schedule makes of a site: its length over that of serial, the share of it in which the GEMM runs, and the
    CUs that communication holds in the mean.
    """

    length: Floats
    computing: Floats
    comm_cus: Floats

    def take(self, places: NDArray[np.intp]) -> Effect:
        """Take the effect on machines at some places."""
        return Effect(*(_entries(column, places) for column in (self.length, self.computing, self.comm_cus)))


def _entries(column: Floats, places: NDArray[np.intp]) -> Floats:
    """Entries of a column at some places; a single number is that of all."""
    return column[places] if np.size(column) > 1 else column


def _runs_beside(schedule: Any) -> bool:
    return bool(getattr(schedule, "orders", ()) == ("beside",))


def _in_two_steps(schedule: Any, exchange: Exchange) -> bool:
    """True if a schedule sums an all-reduce by a reduce-scatter, which an all-gather completes."""
    single = _runs_beside(schedule) or "all_reduce" in getattr(schedule, "sums", ())
    return exchange.pattern == "all_reduce" and not single


def _rectangle(exchange: Exchange, element_bytes: float) -> tuple[Any, Any]:
    """Rows and columns of a tensor with the bytes of a collective."""
    elements = np.asarray(exchange.payload_bytes, float) / element_bytes
    return np.maximum(1, np.rint(elements / _COLUMNS)).astype(int), _COLUMNS  # a row at least


def _plain(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays without axes as numbers; sizes are whole."""
    columns = {
        name: np.rint(value).astype(int) if isinstance(value, np.ndarray) else value for name, value in numbers.items()
    }
    return {
        name: value.item() if isinstance(value, np.ndarray) and not value.ndim else value
        for name, value in columns.items()
    }


@cache
def _imbalance() -> float:
    """Largest share of the rows over the mean, less one: that of `simulator=node`, an assumption."""
    return float(option_tree("simulator", "node")["imbalance"])


def _run(graph: TaskGraph, engine_name: str) -> tuple[Floats, Floats, Floats]:
    """Makespan, time in which a GEMM runs [s], and CU-seconds of communication, over the grid of a graph."""
    engine, columns = plugins.load("engine", engine_name), np.empty((3, graph.num_designs))
    for chosen, alike in patterns(graph):
        totals = engine.totals(alike).flat(alike)
        columns[:, slice(None) if chosen is None else chosen] = (
            totals.makespan_s,
            totals.busy_s["gemm"],
            totals.cu_s,
        )
    shape = () if graph.shape == (1,) else graph.shape  # a single design: numbers without axes
    ended, computed, cus = (column.reshape(shape) for column in columns)
    return ended, computed, cus


def site_rules(scheduled: SiteSchedules, blocks: Sequence[Sequence[Op]]) -> Iterator[Rule]:
    """Rules that schedules of sites break. blocks: the operators of each block."""
    met = set[str]()
    for ops in blocks:
        for at in places(ops):
            if at.name not in met:  # equal layers have equal rules
                yield from scheduled.rules(ops, at)
            met.add(at.name)
    for name in scheduled.schedules:
        if name not in met:
            there = ", ".join(site for site in SITES if site in met) or "none"
            way = f"leave it out; sites of this step: {there}"
            yield Rule(f"sites.{name}", True, "is no site of this step", scheduled.schedules[name].name, way_out=way)


def read_sites(check: Problems, tree: Any) -> dict[str, Any]:
    """Schedules by site from the section `sites`, serial ones left out; problems are noted.

    A schedule is a mapping of its knobs, or a text, which is then its name: an option of the group `schedule`, or
    software that has one for the site (`implementation`), and perhaps values of knobs (`shard_p2p comm_engine=dma`).
    """
    schedules: dict[str, Any] = {}
    if not isinstance(tree, Mapping):
        check.add(
            "sites", "is no section of sites", value=tree, way_out="sites.ffn_out='uniform_fused_1d num_chunks=4'"
        )
        return schedules
    for name, chosen in sorted(tree.items()):
        if name not in SITES:
            check.add(f"sites.{name}", "is no site", way_out=did_you_mean(str(name), SITES))
        elif chosen is not None and (schedule := _schedule(check, name, chosen)) is not None:
            schedules |= {} if schedule.family == SERIAL else {name: schedule}  # what is not scheduled is serial
    return schedules


def _schedule(check: Problems, site: str, chosen: Any) -> Any:
    """The schedule of one site; None with the problems noted."""
    try:
        return read_schedule(chosen, site) if isinstance(chosen, str) else _validated(chosen)
    except ConfigError as error:
        paths = (f"sites.{site}.{problem.path}".removesuffix(".") for problem in error.problems)
        # reported by the path of the site
        check.found.extend(replace(problem, path=path) for problem, path in zip(error.problems, paths, strict=True))
        return None


def _validated(tree: Any) -> Any:
    kind = plugins.load("schedule", str(tree.get("family")) if isinstance(tree, Mapping) else "")
    return validate_as(kind, tree, path="")


def place_of(software: Implementation, site: str) -> Place:
    """The place of the collective of a site that an implementation has a schedule of."""
    order: Place = SITES[site].order if site in SITES else next(iter(software.schedules), "before")
    return "beside" if order not in software.schedules and "beside" in software.schedules else order


def read_schedule(text: str, site: str = "") -> Any:
    """The schedule that a short text names, at a site where it names an implementation. Raises ConfigError."""
    return _read_schedule((text, site))


@plugins.cached_until_refresh
def _read_schedule(named: tuple[str, str]) -> Any:
    (option, *words), site = named[0].split() or [""], named[1]
    software = implementation(option)
    try:
        tree = option_tree("schedule", option) if software is None else software.tree(place_of(software, site))
        tree["name"] = " ".join([option, *words])
    except ConfigError as error:
        # the caller knows where it was typed
        raise ConfigError([replace(problem, path="") for problem in error.problems]) from None
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or name == "family" or name in LABELS:  # which the option says
            way = "leave it out" if equals else f"write {word}=<value>"
            raise ConfigError([Problem(name, f"is no value of a knob of {option}", word, way)])
        tree[name] = parse_yaml(value, name)
    return _validated(tree)


def site_condition(path: str, tree: Tree) -> Mapping[str, Any] | None:
    """Condition of a knob below `sites`: of a site, of which there are some only where tp splits layers, and then where
    tokens are split, or in training, and none where prompts are halved; or of a knob of the schedule of a site.
    """
    _, name, *below = path.split(".")
    sites = tree.get("sites")
    if name not in SITES or not isinstance(sites, Mapping):
        return None
    chosen = sites.get(name)
    if below:
        return {} if isinstance(chosen, Mapping) and below[0] in chosen else None  # of the knobs that the schedule has
    needed: dict[str, Any] = {"parallel.tp": AtLeast(2)}
    needed |= {"run.mode": "training"} if name.endswith("_backward") else {}
    # gathers exist where tokens are split
    needed |= {"parallel.sequence_parallel": True} if SITES[name].order == "before" else {}
    halved = get_path(tree, "parallel.split_ctas") is not None and get_path(tree, "run.mode") == "prefill"
    return needed | ({"parallel.split_ctas": 0} if halved else {})
