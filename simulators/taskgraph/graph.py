"""The task graph: a schedule is lowered to it, and an engine runs it.

T tasks, R resources, P slot pools, U uses (task, resource), K columns of numbers, B designs. The structure (names,
dependencies, incidence, pools, priorities) is shared by a batch of designs. Every number is in one of K columns, which
tasks that are alike share. A column is an array that broadcasts over the grid of designs: it has length 1 along the
axis of a knob that it does not depend on.

Semantics (fluid model): a task is issued once its predecessors are done and its pool has a free slot. It then
waits `delay` and progresses its `work` at a rate r [work/s]. Rates are the weighted max-min fair share: for each
resource, sum over active tasks of use * r <= capacity; r <= cap; a lower `priority` number is served first. While
a task of one group is active, the caps of another group's tasks may be scaled by a factor (a contention law).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]


@dataclass(frozen=True)
class TaskGraph:
    """Structure, columns of numbers, and the column of each number; `graph["work"]` is the work of every task [B, T].

    pred_ptr, pred: the predecessors of task t are `pred[pred_ptr[t]:pred_ptr[t+1]]`. consumer: the task after which
    a task's staged bytes are free again, or -1. members [T]: number of identical tasks that a task stands for (see
    `simulators/taskgraph/symmetry.py`); its uses and accounts are their sums. group [T]: index into `groups`, or -1.
    slowed [S, 2]: (group whose caps are scaled, group whose activity scales them). gpu [T]: the simulated GPU that a
    task is accounted on. values: K columns, each broadcasting to `shape`, the grid of designs (C order). at: name ->
    column of each item: work, delay [s], cap [work/s], weight, cus (occupied), staged_bytes, moved_bytes, flop
    (accomplished), and the times that `simulators/taskgraph/timeline.py` replays, alone_s, wide_s and ideal_s, of tasks
    [T]; use [U]; capacity [R]; factor [S].
    """

    tasks: tuple[str, ...]
    kinds: tuple[str, ...]
    lanes: tuple[str, ...]
    limiters: tuple[str, ...]
    resources: tuple[str, ...]
    pools: tuple[str, ...]
    groups: tuple[str, ...]
    pred_ptr: Ints
    pred: Ints
    use_task: Ints
    use_resource: Ints
    pool: Ints
    slots: Ints
    priority: Ints  # lower numbers are served first
    consumer: Ints
    members: Ints
    group: Ints
    slowed: Ints
    gpu: Ints
    shape: tuple[int, ...]
    values: tuple[Floats, ...]
    at: Mapping[str, Ints]

    @property
    def num_designs(self) -> int:
        """B."""
        return math.prod(self.shape)

    @property
    def num_tasks(self) -> int:
        """T."""
        return len(self.tasks)

    def __getitem__(self, name: str) -> Floats:
        """Values of one quantity of every item, by its name in `at`: [B, T], [B, U], [B, R] or [B, S]."""
        return self.dense([self.values[column] for column in self.at[name]])

    def table(self) -> Floats:
        """All columns [B, K]."""
        return self.dense(self.values)

    def columns(self) -> Floats:
        """All columns [K, B], each in one piece of memory."""
        return self.rows(self.values)

    def rows(self, columns: Sequence[Floats]) -> Floats:
        """Broadcast columns, over the grid or of [B], to rows [len(columns), B]."""
        rows = np.empty((len(columns), *self.shape))
        for row, column in zip(rows, columns, strict=True):
            row[...] = self.on_grid(column)
        return rows.reshape(len(columns), self.num_designs)

    def dense(self, columns: Sequence[Floats]) -> Floats:
        """Broadcast columns to a table [B, len(columns)]."""
        table = np.empty((*self.shape, len(columns)))
        for index, column in enumerate(columns):  # column by column: rows would need all of them on the grid at once
            table[..., index] = column
        return table.reshape(self.num_designs, len(columns))

    def predecessors(self, task: int) -> Ints:
        """Indices of the tasks that `task` waits for."""
        return self.pred[self.pred_ptr[task] : self.pred_ptr[task + 1]]

    def of_kind(self, kind: str) -> NDArray[np.intp]:
        """Indices of the tasks of one kind."""
        return np.flatnonzero([task_kind == kind for task_kind in self.kinds])

    def isolated_rate(self) -> Floats:
        """Rate [B, T] of each task running alone: its cap, or the rate that its scarcest resource allows."""
        return self.dense([rate for _, rate in self.alone()])

    def alone(self) -> list[tuple[int, Floats]]:
        """Pair (number, rate alone over the grid) for each task; tasks of equal number have the same rate."""
        uses: list[list[tuple[int, int]]] = [[] for _ in range(self.num_tasks)]
        capacity, use = self.at["capacity"].tolist(), self.at["use"].tolist()
        # columns instead of values: tasks that share them share their rate in all designs
        for task, resource, column in zip(self.use_task.tolist(), self.use_resource.tolist(), use, strict=True):
            uses[task].append((capacity[resource], column))
        rates: dict[tuple[Any, ...], tuple[int, Floats]] = {}
        result = []
        for cap, pairs in zip(self.at["cap"].tolist(), uses, strict=True):
            like = (cap, *pairs)  # the order of uses matters to no rate, but tasks that are alike have it in common
            if like not in rates:
                shares = [self.values[top] / self.values[column] for top, column in pairs]
                rate = self.values[cap]
                for share in shares:
                    rate = np.minimum(rate, share)
                rates[like] = len(rates), rate
            result.append(rates[like])
        return result

    def total(self, name: str, tasks: NDArray[np.intp] | None = None) -> Floats:
        """Sum [B] of one quantity over all tasks or the given ones; a delay counts for each member."""
        return self.flat(self.grid_total(name, tasks))

    def grid_total(self, name: str, tasks: NDArray[np.intp] | None = None) -> Floats:
        """The sum of `total` as an array that broadcasts over the grid."""
        places = np.arange(self.num_tasks) if tasks is None else tasks
        counts: Counter[int] = Counter()
        for task, column in zip(places.tolist(), self.at[name][places].tolist(), strict=True):
            counts[column] += int(self.members[task]) if name == "delay" else 1
        # each column once, however many tasks share it
        return np.asarray(sum(count * self.values[column] for column, count in counts.items()), float)

    def flat(self, column: ArrayLike) -> Floats:
        """Broadcast an array over the grid, or of [B], to [B]; a single value stays one value in memory."""
        value = np.asarray(column, dtype=float)
        if value.size == 1:  # a view without memory of its own
            return np.broadcast_to(value.reshape(1), (self.num_designs,))
        return np.broadcast_to(self.on_grid(value), self.shape).reshape(-1)

    def on_grid(self, column: Floats) -> Floats:
        """An array of [B] in the shape of the grid; any other as it is."""
        # [B] of a grid with one axis is its own shape
        return column.reshape(self.shape) if column.shape == (self.num_designs,) else column

    def part(self, tasks: NDArray[np.intp]) -> TaskGraph:
        """Subgraph of some tasks with their uses and the consumers of their staged bytes, without dependencies."""
        place = _index_among(self, tasks)
        uses = np.flatnonzero(place[self.use_task] >= 0)  # uses of tasks that are left out go, resources stay
        texts = {name: getattr(self, name) for name in ("tasks", "kinds", "lanes", "limiters")}
        structure: dict[str, Any] = {name: tuple(all_[task] for task in tasks) for name, all_ in texts.items()}
        structure |= {name: getattr(self, name)[tasks] for name in ("pool", "priority", "members", "group", "gpu")}
        structure |= {"use_task": _ints(place[self.use_task[uses]]), "use_resource": self.use_resource[uses]}
        structure |= {"pred_ptr": np.zeros(len(tasks) + 1, np.int32), "pred": self.pred[:0]}  # no dependencies
        structure["consumer"] = _ints(place[self.consumer[tasks]])
        at = {name: self.at[name][tasks] for name in _NUMBERS}
        return replace(self, **structure, at={**self.at, **at, "use": self.at["use"][uses]})

    def take(self, designs: NDArray[np.intp]) -> TaskGraph:
        """Restrict the graph to some of the designs, by their places in the grid [N]."""
        places = np.unravel_index(designs, self.shape)
        values = tuple(_values_at(column, places) for column in self.values)
        return replace(self, shape=(len(designs),), values=values)

    def draw(self, factors: Mapping[str, Floats]) -> TaskGraph:
        """The graph of one design with factors [S] on the work of all tasks of a kind, as a grid of S designs.

        Set-ups and launches (`delay`) stay as they are. Raises ValueError for a graph of several designs.
        """
        if self.num_designs != 1:
            raise ValueError(f"draws are of one design, and the graph has {self.num_designs}")
        values = [value.reshape(1) for value in self.values]
        at, columns = dict(self.at), dict[tuple[int, str], int]()
        for name in ("work", "alone_s", "wide_s", "ideal_s"):
            places = at[name].copy()
            for task, kind in enumerate(self.kinds):
                key = int(places[task]), kind
                if kind not in factors or values[key[0]][0] == 0:
                    continue
                if key not in columns:  # tasks that share a column share the drawn one, too
                    columns[key] = len(values)
                    values.append(values[key[0]] * np.asarray(factors[kind], float))
                places[task] = columns[key]
            at[name] = places
        size = max((len(value) for value in values), default=1)
        return replace(self, shape=(size,), values=tuple(values), at=at)


def _index_among(graph: TaskGraph, tasks: NDArray[np.intp]) -> NDArray[np.intp]:
    """Index of each task of a graph in `tasks`, or -1."""
    # so that -1 stays -1
    places = np.full(graph.num_tasks + 1, -1)  # the last entry serves index -1
    places[tasks] = np.arange(len(tasks))
    return places


def _values_at(column: Floats, places: tuple[NDArray[np.intp], ...]) -> Floats:
    """Values [N] of a column at places of the grid; a column of a single value keeps its length of 1."""
    if column.size == 1:
        return column.reshape(1)
    # an axis of length 1 has only place 0, which serves every design
    where = tuple(np.minimum(place, length - 1) for place, length in zip(places, column.shape, strict=True))
    return np.asarray(column[where])


@dataclass
class _Task:
    name: str
    kind: str
    lane: str
    limiter: str
    group: str
    after: tuple[int, ...]
    pool: int
    priority: int
    columns: Mapping[str, int]
    uses: Mapping[int, int]
    gpu: int = 0
    consumer: int = -1


# no cap: resources alone limit the rate
_NUMBERS = {"work": 0.0, "delay": 0.0, "cap": math.inf, "weight": 1.0} | dict.fromkeys(
    ("cus", "staged_bytes", "moved_bytes", "flop", "alone_s", "wide_s", "ideal_s"), 0.0
)
_PLACE: dict[str, Any] = {"lane": "", "limiter": "", "group": "", "pool": -1, "priority": 0, "gpu": 0}


@dataclass
class _Columns:
    """Columns of numbers by content: equal arrays share a column."""

    values: list[Floats] = field(default_factory=list)
    _known: dict[Any, int] = field(default_factory=dict)
    _seen: dict[int, tuple[int, ArrayLike]] = field(default_factory=dict)  # by identity: arrays indexed before

    def index(self, value: ArrayLike) -> int:
        """The column of a scalar or of an array over the grid."""
        if isinstance(value, (int, float)):
            column = self._known.get(value)  # a number is its own key: no array is made to look it up
            return self._new(value, value) if column is None else column
        identity = id(value)  # of an array, which takes long to compare
        if (seen := self._seen.get(identity)) is not None:
            return seen[0]
        array = np.asarray(value, dtype=float)
        # content: equal arrays built apart share a column
        key = array.item() if array.size == 1 else (array.shape, array.tobytes())
        column = self._known[key] if key in self._known else self._new(key, array)
        self._seen[identity] = column, value  # the reference keeps the array alive, so that no other gets its id
        return column

    def _new(self, key: Any, value: ArrayLike) -> int:
        self._known[key] = len(self.values)
        self.values.append(np.asarray(value, dtype=float))
        return self._known[key]

    def align(self) -> tuple[tuple[int, ...], tuple[Floats, ...]]:
        """Shape of the grid, and the columns with as many axes. Raises ValueError if they do not broadcast."""
        shape = np.broadcast_shapes((1,), *[value.shape for value in self.values])
        # axes are aligned at the last one, as NumPy does
        return shape, tuple([value.reshape((1,) * (len(shape) - value.ndim) + value.shape) for value in self.values])


@dataclass
class GraphBuilder:
    """Collects tasks in topological order; numbers may be scalars, or arrays that broadcast over the grid."""

    _tasks: list[_Task] = field(default_factory=list)
    _resources: dict[str, int] = field(default_factory=dict)
    _pools: dict[str, int] = field(default_factory=dict)
    _slowed: dict[tuple[str, str], int] = field(default_factory=dict)
    _columns: _Columns = field(default_factory=_Columns)
    _defaults: dict[str, int] = field(default_factory=dict)  # columns of the numbers that a task leaves open

    def resource(self, name: str, capacity: ArrayLike) -> int:
        """Declare a shared resource [units/s] and return its index. Raises ValueError for a name that is taken."""
        if name in self._resources:
            raise ValueError(f"resource {name!r} is declared twice")
        # the column, by name; the index of a resource is its order of declaration
        self._resources[name] = self._columns.index(capacity)
        return len(self._resources) - 1

    def pool(self, name: str, slots: int) -> int:
        """Declare a pool of exclusive slots and return its index.

        Raises ValueError for a name that is taken or a pool without a slot.
        """
        if name in self._pools or slots < 1:
            raise ValueError(f"pool {name!r} {'is declared twice' if name in self._pools else 'needs a slot'}")
        self._pools[name] = slots
        return len(self._pools) - 1

    def slows(self, group: str, *, while_active: str, factor: ArrayLike) -> None:
        """Add a contention law: the caps of `group`'s tasks are scaled by `factor` while the other group is active.

        A group is active while one of its tasks is; factors of several active groups multiply. Raises ValueError for a
        group that would slow itself, or a pair that has a factor.
        """
        pair = (group, while_active)
        if group == while_active or pair in self._slowed:  # a group slows itself by sharing resources, not by a law
            raise ValueError(f"group {group!r} {'cannot slow itself' if group == while_active else 'has that factor'}")
        self._slowed[pair] = self._columns.index(factor)

    def task(
        self,
        name: str,
        kind: str,
        *,
        after: Sequence[int] = (),
        uses: Mapping[int, ArrayLike] | None = None,
        **options: Any,
    ) -> int:
        """Add a task and return its index.

        uses: resource index -> units per unit of work. options: `lane`, `limiter`, `group`, `pool`, `priority`, `gpu`,
        and the numbers work, delay [s], cap [work/s], weight, cus, staged_bytes, moved_bytes, flop, alone_s, wide_s,
        ideal_s.
        Raises ValueError for a predecessor that does not come before it (so there is no cycle), or an undeclared
        pool or resource.
        """
        index = len(self._tasks)
        # tasks come in topological order, so that engines never sort them
        if after and not 0 <= min(after) <= max(after) < index:
            raise ValueError(f"task {name!r}: predecessors {list(after)} must be tasks added before it ({index})")
        # taken out of the options, so that numbers are left
        places = {key: options.pop(key, default) for key, default in _PLACE.items()}
        if not options.keys() <= _NUMBERS.keys():
            raise TypeError(f"task {name!r}: unknown arguments {sorted(set(options) - set(_NUMBERS))}")
        if not -1 <= places["pool"] < len(self._pools):
            raise ValueError(f"task {name!r}: pool {places['pool']} is not declared")
        if undeclared := [resource for resource in uses or {} if not 0 <= resource < len(self._resources)]:
            raise ValueError(f"task {name!r}: resource {undeclared[0]} is not declared")
        index_of = self._columns.index
        if not self._defaults:  # once: most tasks leave most numbers open
            self._defaults = {key: index_of(default) for key, default in _NUMBERS.items()}
        columns = {**self._defaults, **{key: index_of(number) for key, number in options.items()}}
        used = {resource: index_of(amount) for resource, amount in (uses or {}).items()}
        # each predecessor once: pending counts are numbers of predecessors
        self._tasks.append(_Task(name, kind, after=tuple(dict.fromkeys(after)), columns=columns, uses=used, **places))
        return index

    def frees(self, consumer: int, tasks: Sequence[int]) -> None:
        """Free the bytes staged by `tasks` when `consumer` ends.

        Raises ValueError unless the consumer waits for the tasks.
        """
        for task in tasks:
            if not self._waits(consumer, task):  # else bytes would be freed before they are staged
                names = self._tasks[consumer].name, self._tasks[task].name
                raise ValueError("task {!r} frees what {!r} stages, and must wait for it".format(*names))
            self._tasks[task].consumer = consumer

    def _waits(self, task: int, other: int) -> bool:
        """Return whether a task is issued after another one has finished."""
        left, seen = [task], {task}  # depth first, over earlier tasks only
        while left:
            before = self._tasks[left.pop()].after
            if other in before:
                return True
            # predecessors come before their task: what is before `other` cannot wait for it
            left += [earlier for earlier in before if earlier > other and earlier not in seen]
            seen |= set(before)
        return False

    def build(self) -> TaskGraph:
        """Build the graph.

        Raises ValueError naming the task for negative or NaN weights, or work that nothing limits.
        """
        shape, values = self._columns.align()
        graph = TaskGraph(**self._structure(), shape=shape, values=values, at=self._at())
        _check(graph)
        return graph

    def _at(self) -> dict[str, Ints]:
        columns = {name: _ints([task.columns[name] for task in self._tasks]) for name in _NUMBERS}
        columns["use"] = _ints([column for task in self._tasks for column in task.uses.values()])
        columns["capacity"] = _ints(list(self._resources.values()))
        columns["factor"] = _ints(list(self._slowed.values()))
        return columns

    def _structure(self) -> dict[str, Any]:
        tasks = self._tasks
        uses = [(index, resource) for index, task in enumerate(tasks) for resource in task.uses]
        # groups that no law names have no index
        names = dict.fromkeys(name for pair in self._slowed for name in pair)
        groups = {name: place for place, name in enumerate(names)}
        return {
            "tasks": tuple([task.name for task in tasks]),
            "kinds": tuple([task.kind for task in tasks]),
            "lanes": tuple([task.lane or task.kind for task in tasks]),  # a timeline's row: its kind unless named
            "limiters": tuple([task.limiter or task.kind for task in tasks]),
            "resources": tuple(self._resources),
            "pools": tuple(self._pools),
            "groups": tuple(groups),
            "pred_ptr": np.cumsum([0, *[len(task.after) for task in tasks]], dtype=np.int32),
            "pred": _ints([before for task in tasks for before in task.after]),
            "use_task": _ints([task for task, _ in uses]),
            "use_resource": _ints([resource for _, resource in uses]),
            "pool": _ints([task.pool for task in tasks]),
            "slots": _ints(list(self._pools.values())),
            "priority": _ints([task.priority for task in tasks]),
            "consumer": _ints([task.consumer for task in tasks]),
            "members": np.ones(len(tasks), np.int32),  # `symmetry` folds tasks later
            "group": _ints([groups.get(task.group, -1) for task in tasks]),
            "gpu": _ints([task.gpu for task in tasks]),
            "slowed": _ints([groups[name] for pair in self._slowed for name in pair]).reshape(-1, 2),
        }


def _ints(values: Sequence[int] | NDArray[np.integer[Any]]) -> Ints:
    return np.asarray(values, dtype=np.int32).reshape(-1)


def _check(graph: TaskGraph) -> None:
    """Raise ValueError naming the tasks or resources whose numbers are invalid."""
    used = [graph.tasks[task] for task in graph.use_task]  # one name for each use, for the message
    for name in ("work", "delay", "cus", "staged_bytes", "moved_bytes", "flop", "alone_s", "wide_s", "ideal_s"):
        rule = f"{name} must be >= 0, finite and not NaN"
        _refuse(graph, name, graph.tasks, lambda v: (v >= 0) & np.isfinite(v), rule)
    _refuse(graph, "cap", graph.tasks, lambda v: v > 0, "cap must be > 0 and not NaN")
    _refuse(graph, "weight", graph.tasks, lambda v: (v > 0) & np.isfinite(v), "weight must be > 0, finite and not NaN")
    _refuse(graph, "capacity", graph.resources, lambda v: v > 0, "the capacity of a resource must be > 0")
    _refuse(graph, "use", used, lambda v: (v > 0) & np.isfinite(v), "a use must be > 0 and finite")
    pairs = [f"{graph.groups[group]} beside {graph.groups[other]}" for group, other in graph.slowed]
    # a law slows; a speed-up would break bounds by isolated rates
    _refuse(graph, "factor", pairs, lambda v: (v > 0) & (v <= 1), "a contention factor must be in (0, 1]")
    endless = [
        name
        for name, column, (_, rate) in zip(graph.tasks, graph.at["work"], graph.alone(), strict=True)
        # the first test is on a few arrays; grids are compared only where it fails
        if not np.isfinite(rate).all() and ((graph.values[column] > 0) & ~np.isfinite(rate)).any()
    ]
    if endless:  # five names are enough to find the cause
        rule = "has work but neither a cap nor a finite resource that limits it"
        raise ValueError(f"{', '.join(endless[:5])}: {rule}")


def _refuse(
    graph: TaskGraph, name: str, items: Sequence[str], legal: Callable[[Floats], NDArray[np.bool_]], rule: str
) -> None:
    faulty = {column for column in set(graph.at[name].tolist()) if not legal(graph.values[column]).all()}
    if faulty:
        named = dict.fromkeys(item for item, column in zip(items, graph.at[name], strict=True) if column in faulty)
        raise ValueError(f"{', '.join(list(named)[:5])}: {rule}")
