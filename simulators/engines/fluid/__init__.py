"""The compiled engine: the event engine's semantics, a thousand times faster.

Exact simplifications make it fast: tasks with the same uses, weight, cap and priority are one *class*, a fluid variable
with a multiplicity and a virtual time; rates are solved only when a class count changed over an instant; totals are
counted as tasks come and go, so that no timeline is stored unless requested. There are two kernels: `few_classes` looks
rates up that it has met, and takes many designs in lockstep; `many_classes` solves only what a change can reach.

A kernel is a single function on purpose: helpers that take arrays put reference counting into numba's inner loops.
Indices are unsigned, because numba checks signed ones for wrapping around. A task's data fill one row, a cache line.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simulators.compiled import compile_ahead, is_compiled
from simulators.engines.fluid import few_classes
from simulators.taskgraph.graph import Floats, TaskGraph
from simulators.taskgraph.symmetry import Classes, classes_of, offsets
from simulators.taskgraph.timeline import Timeline, Totals

Indices = NDArray[np.uint32]
Flags = NDArray[np.bool_]

_PREDECESSORS, _SLOTS, _TASKS, _PRIORITY, _CAP = 2, 3, 5, 10, 11  # places in the structure
_MANY, _LONG, _TOO_LONG = 128, 16, 4096  # designs, and tasks of each from and to, that pay for lockstep
_TASKS_OF_A_COMPILATION = 1 << 28  # tasks that are run one by one in the time that lockstep compiles


class FluidEngine:
    """Compiled engine, exact for every task graph."""

    version = "3"
    batch = 16384
    exact = True

    def run(self, graph: TaskGraph) -> Timeline:
        """Simulate each design of the batch. Raises RuntimeError if tasks wait for ever."""
        issued, finished = (np.empty((graph.num_designs, graph.num_tasks)) for _ in range(2))
        KernelGraph.of(graph).run(graph.table(), issued, finished)
        return Timeline(graph, issued, finished)

    def totals(self, graph: TaskGraph) -> Totals:
        """Compute the totals of each design without its timeline. Raises RuntimeError if tasks wait for ever."""
        return KernelGraph.of(graph).totals(graph.columns().T)


class _Lockstep:
    """Decision for lockstep: its kernel compiles for ten seconds, once the other one has run for about as long."""

    tasks = 0

    @classmethod
    def pays(cls, tasks: int) -> bool:
        """True if designs of so many tasks are to be taken in lockstep."""
        if is_compiled(few_classes.run_together):
            return True  # compiled before, here or on disk: nothing to lose
        cls.tasks += tasks
        return cls.tasks > _TASKS_OF_A_COMPILATION


@dataclass(frozen=True)
class KernelGraph:
    """Structure of a graph in the kernel's form, to be run with any number of tables of columns."""

    kinds: tuple[str, ...]
    structure: tuple[Indices, ...]

    @classmethod
    def of(cls, graph: TaskGraph) -> KernelGraph:
        """Prepare any graph, independent of the numbers in its columns."""
        classes = classes_of(graph)
        kinds = tuple(dict.fromkeys(graph.kinds))  # in order of first use, which is that of the rows of totals
        parts = (*_flow(graph), _tasks(graph, classes, kinds), *_machine(graph, classes), *_law(graph, classes))
        return cls(kinds, tuple(_indices(part) for part in parts))

    def totals(self, table: Floats) -> Totals:
        """Compute the totals for columns [B, K]. Raises RuntimeError if tasks wait for ever."""
        tasks = self.structure[_PREDECESSORS].size
        scratch = np.empty((2, 1, tasks))  # one row that all designs overwrite, as no timeline is kept
        if len(table) < _MANY or not _Lockstep.pays(tasks * len(table)):
            rows = self.run(table, scratch[0], scratch[1])
        else:
            rows, left, _ = self.together(table)
            if left.any():
                # those that lockstep gave up, or did not take
                rows[:, left] = self.run(table[left], scratch[0], scratch[1])
        busy, spent = np.split(rows[3:], 2)
        return Totals(
            makespan_s=rows[0],
            peak_staged_bytes=rows[1],
            cu_s=rows[2],
            busy_s=dict(zip(self.kinds, busy, strict=True)),
            spent_s=dict(zip(self.kinds, spent, strict=True)),
        )

    def together(self, table: Floats) -> tuple[Floats, Flags, int]:
        """Rows as of `run`, of designs in lockstep, marks [B] of those left to be run one by one, and steps of groups.

        All are left where there are few designs, few or very many tasks, many classes or pools of slots, or where work
        or a delay is 0 in some designs only. Raises RuntimeError if tasks wait for ever.
        """
        rows, left = np.empty((3 + 2 * len(self.kinds), len(table))), np.ones(len(table), np.bool_)
        pays = len(table) >= _MANY and _LONG <= self.structure[_PREDECESSORS].size <= _TOO_LONG
        # lockstep knows no slots, and classes beyond its digits cannot be counted
        if not pays or self.structure[_SLOTS].size or self._classes > few_classes.MOST_CLASSES:
            return rows, left, 0
        columns = np.ascontiguousarray(table.T)
        order, alike = self._similar_first(columns)
        if not alike:  # a zero decides whether a task works at all, which must be one answer for all lanes
            return rows, left, 0
        found, crowded = np.empty_like(rows), np.zeros(len(table), np.bool_)
        columns = np.take(columns, order, axis=1)  # neighbours share a group for long, and part late
        steps = few_classes.run_together(*self.structure, columns.reshape(-1), found.reshape(-1), crowded)
        _check(starved=steps < 0)  # -1 where tasks wait for ever
        rows[:, order], left[order] = found, crowded
        return rows, left, steps

    @property
    def _classes(self) -> int:
        return int(self.structure[_PRIORITY].size)

    def _similar_first(self, columns: Floats) -> tuple[NDArray[np.intp], bool]:
        """Order [B] in which designs to which the same happens are near, and whether what is 0 is so in all of them.

        The share of the first class in the time that all tasks take at their caps decides what overtakes what.
        """
        shape = (self._classes, len(columns), len(columns))
        # tasks with the same class, work and delay take the same time: sum them once
        used, counts = np.unique(np.ravel_multi_index(self.structure[_TASKS][:, 1:4].T, shape), return_counts=True)
        of, work, delay = np.unravel_index(used, shape)
        taken = counts[:, None] * (columns[delay] + columns[work] / columns[self.structure[_CAP][of]])
        total, first = taken.sum(axis=0), taken[of == of[0]].sum(axis=0)
        # designs without any time for the first class keep 0
        share = np.divide(first, total, out=np.zeros_like(total), where=first > 0)
        positive = columns[np.unique([work, delay])] > 0
        return np.argsort(share, kind="stable"), bool((positive == positive[:, :1]).all())

    def run(self, table: Floats, issued: Floats, finished: Floats) -> Floats:
        """Return rows [B]: makespan, peak staged bytes, CU-seconds, then busy and spent seconds of each kind.

        issued, finished: outputs [B, T], or scratch of a single row [1, T]. Raises RuntimeError if tasks wait for ever.
        """
        table, totals = np.ascontiguousarray(table), np.empty((3 + 2 * len(self.kinds), len(table)))
        if self._classes > few_classes.MOST_CLASSES:
            self._run_many_classes(table, issued, finished, totals)
            return totals
        crowded = np.zeros(len(table), np.bool_)
        if not is_compiled(few_classes.run):
            from simulators.engines.fluid import many_classes

            # most studies need it soon, and both take as long: at the same time
            compile_ahead(many_classes.run, *self.structure, table, issued, finished, totals)
        _check(starved=few_classes.run(*self.structure, table, issued, finished, totals, crowded) > 0)
        if (left := np.flatnonzero(crowded)).size:  # too many tasks of a class at once, or too many different rates
            lines = left if len(issued) == len(table) else slice(None)  # without timelines there is the one scratch row
            parts = [np.ascontiguousarray(part) for part in (issued[lines], finished[lines], totals[:, left])]
            self._run_many_classes(table[left], *parts)
            issued[lines], finished[lines], totals[:, left] = parts
        return totals

    def _run_many_classes(self, table: Floats, *outputs: Floats) -> None:
        from simulators.engines.fluid import many_classes  # few graphs need it

        _check(starved=many_classes.run(*self.structure, table, *outputs) > 0)


def _check(*, starved: bool) -> None:
    if starved:
        raise RuntimeError("tasks wait for ever: a higher priority never leaves them any of a resource")


def _indices(values: Any) -> Indices:
    """Convert to unsigned indices; -1 becomes the largest number, which stands for none."""
    return np.ascontiguousarray(np.asarray(values, np.int64).astype(np.uint32))


def _flow(graph: TaskGraph) -> tuple[NDArray[Any], ...]:
    """Successors (CSR), predecessor counts, slots, and the begin of each pool's queue."""
    followers = np.repeat(np.arange(graph.num_tasks), np.diff(graph.pred_ptr))[np.argsort(graph.pred, kind="stable")]
    pooled = np.bincount(graph.pool[graph.pool >= 0], minlength=len(graph.pools))
    ptr = offsets(np.bincount(graph.pred, minlength=graph.num_tasks))
    return ptr, followers, np.diff(graph.pred_ptr), graph.slots, offsets(pooled)


def _tasks(graph: TaskGraph, classes: Classes, kinds: tuple[str, ...]) -> NDArray[Any]:
    """Table [T, 9]: pool, class, work, delay, kind, CUs, staged bytes, consumer, members.

    Work, delay, CUs and staged bytes are indices of columns; CUs and staged bytes that are always 0 are -1.
    """
    at, kind = graph.at, np.array([kinds.index(kind) for kind in graph.kinds])
    # a constant 0 over the whole grid, not a column with zeros in some designs
    nothing = np.array([value.size == 1 and value.item() == 0.0 for value in graph.values])
    cus, staged = (np.where(nothing[at[name]], -1, at[name]) for name in ("cus", "staged_bytes"))
    rows = (graph.pool, classes.of, at["work"], at["delay"], kind, cus, staged, graph.consumer)
    return np.stack([*rows, graph.members], axis=1)


def _machine(graph: TaskGraph, classes: Classes) -> tuple[NDArray[Any], ...]:
    """Offsets of members, uses (CSR), priority of classes; columns of cap, weight, use, capacity of each resource."""
    first, uses = classes.first, classes.uses
    return (
        *(offsets(np.bincount(classes.of, minlength=first.size)), classes.ptr, graph.use_resource[uses]),
        classes.use_class,
        # ranks: kernels compare priorities only, and keep the largest number for none
        np.unique(graph.priority[first], return_inverse=True)[1],
        *(graph.at["cap"][first], graph.at["weight"][first], graph.at["use"][uses], graph.at["capacity"]),
    )


def _law(graph: TaskGraph, classes: Classes) -> tuple[NDArray[Any], ...]:
    """Group of each class; of each law, by slowed group: it with the group that slows it, and the factor's column."""
    order = np.argsort(graph.slowed[:, 0], kind="stable")  # stable: factors of a group multiply in the order given
    return graph.group[classes.first], graph.slowed[order], graph.at["factor"][order]


ENGINE = FluidEngine()
