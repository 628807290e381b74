"""The codesign backend: price of a machine, and how fast it is on weighted workloads, each with its best plan."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from dse.backend import STATUSES, Backend, Batch, Metric, Results, Tree
from dse.config.options import list_options
from dse.errors import ConfigError, Problem, Problems, did_you_mean
from dse.space.blocks import Rule, problems, reasons
from dse.values import Frozen, Memo, distinct, has_axis, put
from dse_codesign.machine import Base, Machine, assumptions
from dse_codesign.plans import METRICS, best_plans, planned_step
from dse_codesign.technology import Price, Technology, of_system, price, technology_of
from dse_codesign.technology.settings import Coefficient
from dse_codesign.workloads import Step, steps_of
from simulators.hardware.device import ScheduledDevice
from simulators.hardware.machine import SiteModel
from simulators.hardware.network import Topology
from simulators.steps.backend import StepBackend
from simulators.steps.design import ScheduledDesign

Floats = NDArray[np.float64]
_VERSION = "6"
# bases with their workloads; each remembers the machines that it has judged
_MOST_JUDGES = 64
_STRUCTURES = ("copy_engines", "tracked", "topology", "pim")
_OF_STEPS = (
    *("num_cus", "clock", "matrix_rate", "cache", "hbm_stacks", "links", "scale_up", "nic_gbit_per_s"),
    *("tracker_entries", "in_switch", *_STRUCTURES),
)
"""What steps see of a machine: its clock under its cap, stacks of the base's HBM, lanes of the base's rate, what of the
rate of its NICs reaches it; names by their places.
"""
_TOPOLOGIES = get_args(Topology)


class Codesign(Frozen):
    """A machine by what differs from a base, its technology, and the workloads that it is chosen for."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    system: ScheduledDevice
    technology: Technology
    machine: Machine
    workloads: Mapping[str, Step]


@dataclass(frozen=True)
class Judged:
    """Machines [B] with their prices, and what their best plans reach by workload.

    plans [B]: by workload; None where every plan of a workload breaks a rule. steps: columns [B] of
    `dse_codesign.plans.METRICS`, by workload. speeds: tokens/s over those of the base, by workload.
    memory_share: the largest of all workloads.
    """

    price: Price
    plans: Sequence[Mapping[str, Mapping[str, str] | None]]
    steps: Mapping[str, Mapping[str, Floats]]
    speeds: Mapping[str, Floats]
    memory_share: Floats
    weights: Mapping[str, float]

    @property
    def throughput(self) -> Floats:
        """Weighted geometric mean of the speeds [B]; NaN where a workload has no plan."""
        total = sum(self.weights.values())
        # a geometric mean of ratios does not depend on which machine is the base
        logs = sum(self.weights[name] / total * np.log(speed) for name, speed in self.speeds.items())
        return np.asarray(np.exp(logs))

    @property
    def worst(self) -> Floats:
        """Speed on the workload on which a machine is slowest against the base [B]."""
        return np.asarray(np.min(np.stack(list(self.speeds.values())), axis=0))


@dataclass(frozen=True)
class Judge:
    """A base, and the workloads that machines are judged by.

    Steps that were computed are remembered: machines that steps cannot tell apart share them. computed: steps so far.
    """

    base: Base
    steps: Mapping[str, Step]
    # bytes of the numbers that steps see -> plans and metrics by workload
    _known: dict[bytes, tuple[Any, Any]] = field(default_factory=dict)
    _drawn: dict[tuple[bytes, int], dict[str, Floats]] = field(default_factory=dict)
    computed: Counter[str] = field(default_factory=Counter)

    def with_ideal(self) -> Judge:
        """The same by plans with ideal schedules, too."""
        steps = self.steps.items()
        ideal = {name: step.model_copy(update={"options": step.options.with_ideal()}) for name, step in steps}
        return Judge(self.base, ideal)

    @property
    def num_known(self) -> int:
        """Number of machines that steps can tell apart, so far."""
        return len(self._known)

    @cached_property
    def at_base(self) -> Mapping[str, float]:
        """Tokens/s of the base by workload."""
        _, metrics = self._look_up(self._numbers(Machine(), 1))
        return {name: float(metrics[name][0, _TOKENS]) for name in self.steps}

    @cached_property
    def base_cost(self) -> float:
        """Cost of the base [USD]."""
        return float(price(self.base.knobs, self.base.technology.nominal).total_usd)

    def judge(self, machine: Machine, size: int) -> Judged:
        """Judge machines whose numbers may be arrays [size]."""
        return self.judge_all([(machine, size)])[0]

    def judge_all(self, machines: Sequence[tuple[Machine, int]]) -> list[Judged]:
        """Judge machines whose numbers may be arrays, several structures together."""
        numbers = [self._numbers(machine, size) for machine, size in machines]
        # one look-up for all, so that machines of several batches share steps
        plans, metrics = self._look_up(np.concatenate(numbers, axis=1))
        ends = np.cumsum([columns.shape[1] for columns in numbers]).tolist()
        judged = []
        for (machine, size), end in zip(machines, ends, strict=True):
            part = {name: columns[end - size : end] for name, columns in metrics.items()}
            judged.append(self._judgement(machine, plans[end - size : end], part))
        return judged

    def drawn(self, machine: Machine, judged: Judged, samples: int) -> dict[str, Floats]:
        """Times [samples] of the steps of a machine with its best plans, by workload, with drawn errors of the models.

        Operators and schedules that two machines have in common have the same errors on both, which cancel in ratios.
        """
        name = self._numbers(machine, 1).tobytes(), samples
        if name not in self._drawn:
            system = self.base.system_of(machine)
            self._drawn[name] = {
                workload: _drawn_step(step.design, judged.plans[0][workload], system, samples)
                for workload, step in self.steps.items()
            }
        return self._drawn[name]

    def _judgement(self, machine: Machine, plans: Sequence[Any], metrics: Mapping[str, Floats]) -> Judged:
        # a cap of 0 stands for none
        knobs, cap = self.base.knobs_of(machine), np.asarray(machine.cap_w, float)
        priced = price(knobs, self.base.technology.nominal, cap_w=np.where(cap > 0, cap, np.inf) if cap.any() else None)
        speeds = {name: columns[:, _TOKENS] / self.at_base[name] for name, columns in metrics.items()}
        needed = np.max(np.stack([columns[:, _MEMORY] for columns in metrics.values()]), axis=0)
        weights = {name: step.weight for name, step in self.steps.items()}
        steps = {name: dict(zip(METRICS, columns.T, strict=True)) for name, columns in metrics.items()}
        return Judged(priced, plans, steps, speeds, needed / np.asarray(knobs.hbm_bytes, float), weights)

    def _numbers(self, machine: Machine, size: int) -> Floats:
        """Return the numbers that steps see of machines [numbers, size]."""
        base, knobs = self.base.knobs, self.base.knobs_of(machine)
        hbm = np.asarray(knobs.hbm_bytes_per_s) / np.asarray(base.hbm_bytes_per_s) * np.asarray(base.hbm_stacks)
        topology, tracked = self.base.topology_of(machine), np.asarray(machine.tracker_entries) > 0
        # a mesh has no switch that could add up
        switch = self.base.system.node.in_switch is not None and machine.in_switch and topology == "switch"
        engines = self.base.system.gpu.dma.num_engines if machine.copy_engines is None else machine.copy_engines
        columns = {
            "num_cus": knobs.num_cus,
            "clock": np.asarray(machine.clock) * self.base.clock_of(machine),
            "matrix_rate": machine.matrix_rate,
            # rounded, as products of equal numbers in another order would count as another machine
            "hbm_stacks": np.round(hbm, 12),
            # more lanes and quicker ones are the same to steps, but not to the price
            "links": np.asarray(machine.links) * machine.lane_rate,
            "nic_gbit_per_s": np.asarray(self.base.nic_bytes_per_s(machine)) * 8e-9,
            "cache": np.where(tracked, machine.cache, 1.0),  # T3's schedules alone see it, and units in memory
            "tracker_entries": machine.tracker_entries,
            "in_switch": switch,
            "copy_engines": engines,
            "tracked": tracked,
            "scale_up": self.base.scale_up_of(machine),
            "topology": _TOPOLOGIES.index(topology),
            # without a tracker nothing triggers units in memory
            "pim": np.where(tracked, _pims().index(machine.memory_units), 0),
        }
        return np.stack([np.broadcast_to(np.asarray(columns[name], float), size) for name in _OF_STEPS])

    def _look_up(self, numbers: Floats) -> tuple[list[Any], dict[str, Floats]]:
        """Plans of each machine by workload, and columns [B, metrics] by workload."""
        names = [column.tobytes() for column in np.ascontiguousarray(numbers.T)]
        # each distinct machine once
        fresh = list({name: place for place, name in enumerate(names) if name not in self._known}.values())
        # _STRUCTURES are the last of _OF_STEPS
        structures = [tuple(column) for column in numbers[-len(_STRUCTURES) :].T.tolist()]
        # numbers may be arrays; what decides of the structure of a task graph may not
        for structure in sorted({structures[place] for place in fresh}):
            alike = [place for place in fresh if structures[place] == structure]
            self._compute(numbers[:, alike], [names[place] for place in alike])
        rows = [self._known[name] for name in names]
        metrics = {name: np.array([row[1][name] for row in rows]) for name in self.steps}
        return [row[0] for row in rows], metrics

    def _compute(self, numbers: Floats, names: Sequence[bytes]) -> None:
        """Find the plans of machines that differ in numbers alone, and remember them."""
        columns = dict(zip(_OF_STEPS, numbers, strict=True))
        has_switch, structure = columns.pop("in_switch") > 0, {name: int(columns.pop(name)[0]) for name in _STRUCTURES}
        changes: dict[str, Any] = {
            **columns,
            "copy_engines": structure["copy_engines"],
            "topology": _TOPOLOGIES[structure["topology"]],
            "memory_units": _pims()[structure["pim"]],
            "nic_placement": "gpu",  # whose rate is that of its NICs
        }
        # the clock here is under the cap already: no cap is set
        machine = Machine().model_copy(update=changes)
        systems = _Systems(self.base, machine)
        plans_of = {
            name: best_plans(step.design, step.options, systems, has_switch) for name, step in self.steps.items()
        }
        self.computed.update({name: plans.computed for name, plans in plans_of.items()})
        for place, name in enumerate(names):
            plans = {step: part.plans[place] for step, part in plans_of.items()}
            rows = {step: [part.metrics[metric][place] for metric in METRICS] for step, part in plans_of.items()}
            self._known[name] = plans, rows


def _drawn_step(design: ScheduledDesign, plan: Any, system: ScheduledDevice, samples: int) -> Floats:
    """Times [samples] of a step under a plan; NaN where every plan breaks a rule."""
    if plan is None:
        return np.full(samples, np.nan)
    # the same seed for all machines: errors that they share cancel in ratios
    times, _ = StepBackend().draw([planned_step(design, plan, system)], samples=samples, seed=0)
    return np.asarray(times[0])


@cache
def _pims() -> tuple[str, ...]:
    """Units in memory that a machine may have, by name; the base's first."""
    # sorted is stable: "none" has place 0, which numbers of machines without a tracker hold
    return tuple(sorted(list_options("pim"), key=lambda name: name != "none"))


_TOKENS, _MEMORY = METRICS.index("tokens_per_s"), METRICS.index("memory_bytes")


class _Systems:
    """Machines at some places of arrays; those of the last places are kept."""

    def __init__(self, base: Base, machine: Machine) -> None:
        self._base, self._machine = base, machine
        self._known: dict[bytes, ScheduledDevice] = {}

    def __call__(self, places: NDArray[np.intp]) -> ScheduledDevice:
        # options at sites are tried on the same places again and again
        name = places.tobytes()
        if name not in self._known:
            arrays = {path: value[places] for path, value in self._machine if isinstance(value, np.ndarray)}
            self._known[name] = self._base.system_of(self._machine.model_copy(update=arrays))
        return self._known[name]


class CodesignBackend(Backend):
    """Machines, a grid of them at once. sites: model of the schedules of their plans; None: `system.costs.sites`."""

    batch = 16_384
    metrics: Mapping[str, Metric] = {
        "throughput_x": Metric("x", "tokens/s over the base's: geometric mean of the workloads by weight", "maximize"),
        "worst_x": Metric("x", "the same of the workload on which the machine is slowest", "maximize"),
        "value_x": Metric("x", "throughput_x over cost_usd, against the base's", "maximize"),
        "area_mm2": Metric("mm2", "all compute and base dies of a package"),
        "die_mm2": Metric("mm2", "one compute die"),
        "power_w": Metric("W", "a module with matrix units, HBM and links at their peaks, under its cap"),
        "clock": Metric("fraction", "clock that the cap allows over the nominal one", "maximize", high=1.0),
        "module_usd": Metric("USD", "making a module"),
        "cost_usd": Metric("USD", "a GPU with its share of node and network, and energy over its life"),
        "memory_share": Metric("fraction", "of the memory of a GPU, the largest of all workloads"),
        "hbm_bytes": Metric("B", "memory of a GPU", "maximize"),
    }

    def __init__(self, sites: SiteModel | None = None) -> None:
        if sites not in (None, *get_args(SiteModel)):
            rule = "is no model of sites"
            raise ConfigError([Problem("simulator.sites", rule, sites, f"one of {', '.join(get_args(SiteModel))}")])
        self._sites, self.version = sites, _VERSION
        self._judges = Memo[Judge](_MOST_JUDGES)
        self._parts: dict[tuple[str, str], Any] = {}

    def sections(self, tree: Tree) -> None:
        """Check that a configuration has the four sections and no others."""
        check = Problems()
        for name in set(tree) - set(Codesign.model_fields):
            check.add(name, "is not a known section", way_out=did_you_mean(name, Codesign.model_fields))
        for name in Codesign.model_fields:
            if not isinstance(tree.get(name), Mapping):
                check.add(name, "is no section of keys", value=tree.get(name))
        check.done()

    def design(self, tree: Tree) -> Codesign:
        """A validated machine. Raises ConfigError with every problem."""
        check = Problems()
        system = self._part("system", tree, self._system)
        technology = self._part("technology", tree, technology_of)
        workloads = self._part("workloads", tree, lambda part: steps_of(part, tree["system"]))
        machine = check.model(Machine, tree["machine"], path="machine")
        generations = list(technology.memory.generations)
        if machine is not None and machine.hbm is not None and machine.hbm not in generations:
            way = f"one of {', '.join(generations)}"
            check.add("machine.hbm", "is no generation of the technology", value=machine.hbm, way_out=way)
        if machine is not None and machine.memory_units not in _pims():
            way = did_you_mean(str(machine.memory_units), list_options("pim"))
            check.add("machine.memory_units", "is no option of the group pim", value=machine.memory_units, way_out=way)
        try:
            # raises for a GPU of whose dies nothing is known
            of_system(system, technology)
        except ValueError as error:
            check.add("system.gpu.name", str(error).partition(": ")[2], value=system.gpu.name, way_out="take another")
        check.done()
        assert machine is not None
        return Codesign.model_construct(system=system, technology=technology, machine=machine, workloads=workloads)

    def _system(self, tree: Tree) -> ScheduledDevice:
        system = ScheduledDevice.of(tree)
        return system if self._sites is None else put(system, "costs.sites", self._sites)

    def _part(self, name: str, tree: Tree, read: Any) -> Any:
        """A part that many machines share is read once."""
        # steps of workloads depend on the system; a technology does not
        text = json.dumps([tree[name], tree["system"] if name == "workloads" else None], sort_keys=True, default=str)
        if (name, text) not in self._parts:
            self._parts[name, text] = read(tree[name])
        return self._parts[name, text]

    def is_axis(self, path: str, design: BaseModel) -> bool:
        """Numbers of the machine that are not structural."""
        return path.startswith("machine.") and has_axis(design, path)

    def problems(self, design: BaseModel) -> Sequence[Problem]:
        """Rules that a machine breaks."""
        assert isinstance(design, Codesign)
        return problems(list(_rules(design, self.judge_of(design).base)))

    def screen(self, batches: Sequence[Batch]) -> list[Results]:
        """Check the rules of a whole grid at once."""
        return [self._screen(_array_design(batch), batch.size) for batch in batches]

    def evaluate(self, batches: Sequence[Batch]) -> list[Results]:
        """Judge all machines of a grid at once."""
        designs = [(_array_design(batch), batch.size) for batch in batches]
        screened = [self._screen(design, size) for design, size in designs]
        judges, judge_of = distinct(self.judge_of(design) for design, _ in designs)
        results: dict[int, Results] = {}
        for number, judge in enumerate(judges):
            mine = [place for place, judging in enumerate(judge_of) if judging == number]
            judged = judge.judge_all([(designs[place][0].machine, designs[place][1]) for place in mine])
            for place, part in zip(mine, judged, strict=True):
                columns = metrics_of(judge, designs[place][0].machine, part)
                results[place] = _results(screened[place], columns)
        return [results[place] for place in range(len(designs))]

    def judge_of(self, design: Codesign) -> Judge:
        """The judge of a design's base and workloads."""
        parts = design.system, design.technology, design.workloads
        return self._judges.get(lambda: Judge(Base(design.system, design.technology), design.workloads), *parts)

    def _screen(self, design: Codesign, size: int) -> Results:
        reason, texts = reasons(list(_rules(design, self.judge_of(design).base)), (size,))
        status = np.where(reason > 0, STATUSES.index("infeasible"), STATUSES.index("ok")).astype(np.uint8)
        return Results(status, {}, reason, np.zeros_like(reason), texts)

    def facts(self, design: BaseModel) -> Sequence[tuple[str, Any, str, str]]:
        """Constants of the base and of the technology, with sources."""
        assert isinstance(design, Codesign)
        priced = [
            (f"technology.{path}", part.value, part.provenance, part.source)
            for path, part in design.technology.coefficients()
        ]
        taken = [
            (f"codesign.{name}", part.value, part.provenance, part.source)
            for name, part in assumptions()
            if isinstance(part, Coefficient)
        ]
        return [*design.system.facts_below("system"), *priced, *taken]


def metrics_of(judge: Judge, machine: Machine, judged: Judged) -> dict[str, Floats]:
    """Every metric of machines that were judged."""
    cost = judged.price.total_usd
    columns = {
        "throughput_x": judged.throughput,
        "worst_x": judged.worst,
        # 1 for the base: its throughput is 1 by definition
        "value_x": judged.throughput * judge.base_cost / cost,
        "area_mm2": judged.price.area_mm2,
        "die_mm2": judged.price.dies[0].area_mm2,
        "power_w": judged.price.power_w,
        "clock": judged.price.clock,
        "module_usd": judged.price.module_usd,
        "cost_usd": cost,
        "memory_share": judged.memory_share,
        "hbm_bytes": judge.base.knobs_of(machine).hbm_bytes,
    }
    # some metrics are of the whole batch, and have no axis of machines
    shape = judged.memory_share.shape
    return {name: np.broadcast_to(np.asarray(value, float), shape).copy() for name, value in columns.items()}


def _results(screened: Results, columns: Mapping[str, Floats]) -> Results:
    """Results of machines that break no rule and have a plan for every workload."""
    # NaN: a workload has no plan
    ok = screened.ok & np.isfinite(columns["throughput_x"])
    texts = (*screened.texts, "every plan of a workload breaks a rule", "plans")
    status = np.where(ok, STATUSES.index("ok"), STATUSES.index("infeasible")).astype(np.uint8)
    # places of the two texts appended above
    reason = np.where(screened.ok & ~ok, len(texts) - 2, screened.reason).astype(np.int32)
    engine = np.where(ok, len(texts) - 1, 0).astype(np.int32)
    metrics = {name: np.where(ok, column, np.nan) for name, column in columns.items()}
    return Results(status, metrics, reason, engine, texts)


def _array_design(batch: Batch) -> Codesign:
    """The design of a batch with its axes as arrays [size]."""
    design = batch.arrays
    assert isinstance(design, Codesign)
    return design


def largest_die_mm2(base: Base) -> float:
    """Area of the largest compute die [mm2]: the field of a scanner, or the base's if that is larger by the rules."""
    nominal = base.technology.nominal
    return max(float(nominal["area.reticle_mm2"]), float(price(base.knobs, nominal).dies[0].area_mm2))


def _rules(design: Codesign, base: Base) -> Iterator[Rule]:
    """Rules: dies are no larger than the field of a scanner, or than the base's, and a cap leaves a clock."""
    machine, nominal = design.machine, design.technology.nominal
    knobs = base.knobs_of(machine)
    priced = price(knobs, nominal)
    largest = largest_die_mm2(base)
    die = np.asarray(priced.dies[0].area_mm2)
    rule = "makes a die of {0:.0f} mm2, and {1:.0f} mm2 are the largest"
    way = "use more, or fewer CUs or smaller caches"
    yield Rule("machine.dies", die > largest, rule, knobs.num_dies, (die, largest), way)
    # collectives of a mesh run among all its GPUs, over links to each
    gpus = np.asarray(base.scale_up_of(machine))
    groups = [(name, np.asarray(step.design.parallel.tp)) for name, step in design.workloads.items()]
    for name, tp in groups if base.topology_of(machine) == "mesh" else ():
        rule = f"of {{0}} GPUs divides the links of each among the others, and workloads.{name} has tp = {{1}}"
        yield Rule("machine.topology", gpus != tp, rule, "mesh", (gpus, tp), "use a switch, or scale_up = tp")
    clock = base.clock_of(machine)
    yield Rule(
        "machine.cap_w", clock < _LEAST_CLOCK, "leaves {0:.2f} of the clock", machine.cap_w, (clock,), "raise it"
    )


_LEAST_CLOCK = 0.2  # share of the nominal one
