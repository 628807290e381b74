"""Random task graphs and grids of them, and what is true of every run of one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from simulators.taskgraph.graph import GraphBuilder, TaskGraph
from simulators.taskgraph.timeline import Totals

Floats = NDArray[np.float64]
Number = Any  # a float, or an array over a grid

AMOUNTS = st.sampled_from([0.25, 0.5, 1.0, 2.0, 3.0]) | st.floats(0.1, 10)  # the first make ties
KINDS = ("gemm", "transfer", "launch")
WHAT = [("gemm", False), ("transfer", True), ("launch", False), ("gemm", True)]  # whether it stages and occupies


@dataclass(frozen=True)
class TaskPlan:
    """One task of a part. after: (task of the part, how many parts further on; None: in every part).

    uses: (resource of the part, parts further on) -> amount. consumer: the later task that frees what it staged.
    """

    after: tuple[tuple[int, int | None], ...] = ()
    uses: Mapping[tuple[int, int], Number] = field(default_factory=dict)
    pool: int = -1
    kind: str = "gemm"
    group: str = ""
    priority: int = 0
    consumer: int | None = None
    numbers: Mapping[str, Number] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """A part, and how many equal ones make up the graph.

    resources: (capacity, whether each part has one of its own). pools: (slots, likewise). laws: (slowed, by) -> factor.
    odd: what is different about one task of the first part only, so that it is not equal to the others.
    """

    tasks: tuple[TaskPlan, ...]
    resources: tuple[tuple[Number, bool], ...] = ()
    pools: tuple[tuple[int, bool], ...] = ()
    laws: Mapping[tuple[str, str], Number] = field(default_factory=dict)
    parts: int = 1
    odd: tuple[int, Mapping[str, Any]] = (-1, {})

    def at(self, place: tuple[int, ...], shape: tuple[int, ...]) -> Plan:
        """The plan of one design of a grid."""

        def picked(value: Number) -> float:
            if np.size(value) == 1:
                return float(np.asarray(value).item())
            return float(np.broadcast_to(value, shape)[place])

        tasks = tuple(
            replace(
                task,
                uses={key: picked(amount) for key, amount in task.uses.items()},
                numbers={name: picked(number) for name, number in task.numbers.items()},
            )
            for task in self.tasks
        )
        resources = tuple((picked(capacity), separate) for capacity, separate in self.resources)
        laws = {pair: picked(factor) for pair, factor in self.laws.items()}
        return replace(self, tasks=tasks, resources=resources, laws=laws)

    def build(self) -> TaskGraph:
        """Task t of part p is number t * parts + p."""
        build, parts = GraphBuilder(), range(self.parts)
        resources = [
            _each(parts, separate, build.resource, f"r{i}", top) for i, (top, separate) in enumerate(self.resources)
        ]
        pools = [_each(parts, separate, build.pool, f"p{i}", slots) for i, (slots, separate) in enumerate(self.pools)]
        for (group, other), factor in self.laws.items():
            build.slows(group, while_active=other, factor=factor)
        for index in range(len(self.tasks)):
            for part in parts:
                task = self._task(index, part)
                uses: dict[int, Number] = {}
                for (resource, further), amount in task.uses.items():
                    place = resources[resource][(part + further) % self.parts]
                    uses[place] = uses.get(place, 0.0) + amount
                build.task(
                    f"t{index}.{part}",
                    task.kind,
                    after=list(self._before(task, part)),
                    uses=uses,
                    pool=pools[task.pool][part] if task.pool >= 0 else -1,
                    group=task.group,
                    priority=task.priority,
                    **task.numbers,
                )
        self._free(build)
        return build.build()

    def _task(self, index: int, part: int) -> TaskPlan:
        task, (odd, how) = self.tasks[index], self.odd
        return replace(task, **how) if (index, part) == (odd, 0) else task

    def _before(self, task: TaskPlan, part: int) -> Sequence[int]:
        earlier: list[int] = []
        for before, further in task.after:
            where = range(self.parts) if further is None else [(part + further) % self.parts]
            earlier += [before * self.parts + place for place in where]
        return earlier

    def _free(self, build: GraphBuilder) -> None:
        for index in range(len(self.tasks)):
            for part in range(self.parts):
                consumer = self._task(index, part).consumer
                if consumer is not None:
                    build.frees(consumer * self.parts + part, [index * self.parts + part])


def _each(parts: range, separate: bool, declare: Any, name: str, value: Any) -> list[int]:
    """What each part uses: its own, or the one that all share."""
    if separate:
        return [declare(f"{name}.{part}", value) for part in parts]
    return [declare(name, value)] * len(parts)


@st.composite
def plans(draw: st.DrawFn, *, amounts: st.SearchStrategy[Number] = AMOUNTS, parts: int | None = None) -> Plan:
    """Up to 24 tasks in up to 4 equal parts: priorities, pools, delays, caps, weights, groups that slow each other,
    tasks without work, staged bytes with consumers, occupied CUs.

    Half of them are roomy: caps and wide resources and pools, so that mostly nothing waits or shares.
    """
    roomy = draw(st.booleans())
    parts = draw(st.sampled_from([1, 1, 1, 2, 3, 4])) if parts is None else parts
    scale = 1e4 if roomy else 1.0
    resources = tuple((scale * draw(amounts), draw(st.booleans())) for _ in range(draw(st.integers(0, 4))))
    slots = st.sampled_from([1, 30]) if roomy else st.integers(1, 3)
    pools = tuple((draw(slots), draw(st.booleans())) for _ in range(draw(st.sampled_from([0, 0, 1, 2]))))
    laws = draw(st.just({}) | _laws(amounts))
    tasks: list[TaskPlan] = []
    for index in range(draw(st.integers(1, 24 // parts))):
        places = st.tuples(st.integers(0, max(0, index - 1)), st.sampled_from([0, 0, 0, 1, None]))
        after = draw(st.lists(places, max_size=3, unique=True)) if index else []
        spots = st.tuples(st.integers(0, len(resources) - 1), st.sampled_from([0, 0, 1]))
        uses = draw(st.dictionaries(spots, amounts, max_size=3)) if resources else {}
        capped = roomy or not uses or draw(st.booleans())
        kind, holds = draw(st.sampled_from(WHAT))
        tasks.append(
            TaskPlan(
                after=tuple(after),
                uses=uses,
                pool=draw(st.integers(-1, len(pools) - 1)),
                kind=kind,
                group=draw(st.sampled_from(["", "a", "b", "c"])) if laws else "",
                priority=draw(st.integers(0, 2)),
                numbers={
                    "work": draw(st.just(0.0) | amounts),
                    "delay": draw(st.just(0.0) | amounts),
                    "cap": draw(amounts) if capped else math.inf,
                    "weight": draw(amounts),
                    "cus": draw(amounts) if holds else 0.0,
                    "staged_bytes": draw(amounts) if holds else 0.0,
                    "moved_bytes": float(holds),
                    "flop": float(index % 2),
                },
            )
        )
    return Plan(_with_consumers(tasks), resources, pools, laws, parts)


def _laws(amounts: st.SearchStrategy[Number]) -> st.SearchStrategy[dict[tuple[str, str], Number]]:
    pairs = st.sampled_from([("a", "b"), ("b", "a"), ("c", "a"), ("b", "c"), ("idle", "a"), ("a", "idle")])
    return st.dictionaries(pairs, amounts.map(lambda amount: amount / 10), min_size=1, max_size=4)


def graphs() -> st.SearchStrategy[TaskGraph]:
    """Single designs."""
    return plans().map(Plan.build)


@st.composite
def pipelines(draw: st.DrawFn, *, amounts: st.SearchStrategy[Number] = AMOUNTS) -> TaskGraph:
    """Copies that wait for copies, GEMMs in one stream that wait for anything, launches between whole rounds of copies.

    Every task has a cap; resources have room for some of the tasks, or for all.
    """
    parts = draw(st.sampled_from([1, 1, 2, 7]))
    scale = draw(st.sampled_from([3.0, 30.0, 1e4, 1e4]))
    resources = tuple((scale * draw(amounts), draw(st.booleans())) for _ in range(draw(st.integers(0, 3))))
    pools = draw(st.sampled_from([(), (), ((1, True),), ((30, False),)]))
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=10))
    tasks: list[TaskPlan] = []
    for index, kind in enumerate(kinds):
        copies, launches, gemms = (
            [place for place in range(index) if kinds[place] == wanted_kind]
            for wanted_kind in ("transfer", "launch", "gemm")
        )
        near = st.sampled_from([0, 0, 1] if kind == "transfer" else [0, None])
        may = copies if kind == "transfer" else range(index)
        after = set(draw(st.lists(st.tuples(st.sampled_from(may), near), max_size=3))) if may else set()
        if kind == "launch":
            after = {(before, None) for before in (*copies, *launches)}
        after |= {(before, None) for before in launches if kind == "transfer"}
        after |= {(before, 0) for before in gemms[-1:] if kind == "gemm"}
        spots = st.tuples(st.integers(0, len(resources) - 1), st.sampled_from([0, 0, 1]))
        numbers = {
            "work": draw(st.just(0.0) | amounts),
            "delay": draw(st.just(0.0) | amounts),
            "cap": draw(amounts),
            "cus": draw(st.just(0.0) | amounts),
            "staged_bytes": draw(amounts) if kind == "transfer" else 0.0,
        }
        uses = draw(st.dictionaries(spots, amounts, max_size=2)) if resources else {}
        pool = draw(st.integers(-1, len(pools) - 1)) if kind == "gemm" else -1
        tasks.append(TaskPlan(tuple(sorted(after, key=str)), uses, pool, kind, numbers=numbers))
    return Plan(_with_consumers(tasks), resources, pools, parts=parts).build()


def _with_consumers(tasks: Sequence[TaskPlan]) -> tuple[TaskPlan, ...]:
    """What a task staged is freed by the last task that waits for it in its own part."""
    changed = list(tasks)
    for index, task in enumerate(tasks):
        waiting = [place for place, other in enumerate(tasks) if {(index, 0), (index, None)} & set(other.after)]
        if waiting and np.any(task.numbers["staged_bytes"]):
            changed[index] = replace(task, consumer=waiting[-1])
    return tuple(changed)


@st.composite
def almost_equal_parts(draw: st.DrawFn) -> Plan:
    """Plans of few different numbers, in which one task of one part may differ from those of the others.

    In its group, what it waits for, what it uses, or who frees its bytes.
    """
    few = st.sampled_from([1.0, 1.0, 1.0, 2.0])
    plan = draw(plans(amounts=few, parts=draw(st.sampled_from([1, 2, 3]))))
    index = draw(st.integers(0, len(plan.tasks) - 1))
    task = plan.tasks[index]
    waiting = [place for place, other in enumerate(plan.tasks) if {(index, 0), (index, None)} & set(other.after)]
    freed = {"consumer": waiting[0]} if task.consumer is not None else {"priority": 1 - min(task.priority, 1)}
    apart = {"uses": dict(list(task.uses.items())[1:])} if math.isfinite(task.numbers["cap"]) else freed
    alone = {"after": task.after[1:]} if not any(index == other.consumer for other in plan.tasks) else freed
    return replace(plan, odd=(index, draw(st.sampled_from([{}, {"group": "a"}, alone, apart, freed]))))


@st.composite
def grids(draw: st.DrawFn) -> Plan:
    """Plans whose numbers vary along up to two axes; some are equal in some designs."""
    shape = draw(st.sampled_from([(3,), (7,), (2, 3), (3, 1), (4, 2)]))
    few = st.sampled_from([0.25, 0.5, 1.0, 2.0, 3.0])

    def table(lengths: tuple[int, ...]) -> st.SearchStrategy[Floats]:
        size = math.prod(lengths)
        return st.lists(few, min_size=size, max_size=size).map(lambda values: np.array(values).reshape(lengths))

    varied = st.tuples(*(st.sampled_from([1, length]) for length in shape)).flatmap(table)
    return draw(plans(amounts=AMOUNTS | varied))


def assert_equal_totals(totals: Totals, expected: Totals, *, where: Any = slice(None), rtol: float = 1e-9) -> None:
    """Each number of each design at some places, to a relative error."""
    assert set(totals.busy_s) == set(totals.spent_s) == set(expected.busy_s) == set(expected.spent_s)
    for name in ("makespan_s", "peak_staged_bytes", "cu_s"):
        column_found, other = getattr(totals, name), getattr(expected, name)
        np.testing.assert_allclose(column_found[where], other[where], rtol=rtol, atol=1e-12, err_msg=name)
    for name in ("busy_s", "spent_s"):
        for kind, column in getattr(totals, name).items():
            other = getattr(expected, name)[kind]
            np.testing.assert_allclose(column[where], other[where], rtol=rtol, atol=1e-9, err_msg=f"{name} of {kind}")
