"""The task graph: what a schedule lowers to and an engine runs.

T tasks, R resources, P slot pools, U uses (task, resource), B designs. The structure (names, dependencies,
incidence, pools, priorities) is shared by the batch; everything else is an array whose first axis is B.

Semantics (fluid model): a task is issued once its predecessors are done and its pool has a free slot. It then
waits `delay` and progresses its `work` at a rate r [work/s]. Rates are the weighted max-min fair share: for each
resource, sum over active tasks of use * r <= capacity; r <= cap; a lower `priority` number is served first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]


@dataclass(frozen=True)
class TaskGraph:
    """Structure [T], [U] and weights [B, T], [B, U], [B, R]; predecessors of task t: `pred[pred_ptr[t]:pred_ptr[t+1]]`.

    consumer: the task after which a task's staged bytes are free again, or -1.
    cus: CUs a task occupies; staged_bytes: buffer space it fills; moved_bytes, flop: what it accomplishes.
    """

    tasks: tuple[str, ...]
    kinds: tuple[str, ...]
    lanes: tuple[str, ...]
    limiters: tuple[str, ...]
    resources: tuple[str, ...]
    pools: tuple[str, ...]
    pred_ptr: Ints
    pred: Ints
    use_task: Ints
    use_resource: Ints
    pool: Ints
    slots: Ints
    priority: Ints
    consumer: Ints
    work: Floats
    delay: Floats
    cap: Floats
    weight: Floats
    use: Floats
    capacity: Floats
    cus: Floats
    staged_bytes: Floats
    moved_bytes: Floats
    flop: Floats

    @property
    def num_designs(self) -> int:
        """B."""
        return int(self.work.shape[0])

    @property
    def num_tasks(self) -> int:
        """T."""
        return len(self.tasks)

    def predecessors(self, task: int) -> Ints:
        """Indices of the tasks that `task` waits for."""
        return self.pred[self.pred_ptr[task] : self.pred_ptr[task + 1]]

    def of_kind(self, kind: str) -> NDArray[np.intp]:
        """Indices of the tasks of one kind."""
        return np.flatnonzero([found == kind for found in self.kinds])

    def isolated_rate(self) -> Floats:
        """Rate [B, T] of each task running alone: its cap, or what its scarcest resource gives it."""
        rate = self.cap.copy()
        with np.errstate(divide="ignore"):
            share = self.capacity[:, self.use_resource] / self.use
        order = np.argsort(self.use_task, kind="stable")
        first = np.searchsorted(self.use_task[order], np.arange(self.num_tasks + 1))
        for nth in range(int(np.diff(first).max(initial=0))):  # the nth use of every task that has so many
            tasks = np.flatnonzero(np.diff(first) > nth)
            rate[:, tasks] = np.minimum(rate[:, tasks], share[:, order[first[tasks] + nth]])
        return rate


@dataclass
class _Task:
    name: str
    kind: str
    lane: str
    limiter: str
    after: tuple[int, ...]
    pool: int
    priority: int
    weights: Mapping[str, ArrayLike]
    uses: Mapping[int, ArrayLike]
    consumer: int = -1


_WEIGHTS = {"work": 0.0, "delay": 0.0, "cap": np.inf, "weight": 1.0}
_ACCOUNTS = {"cus": 0.0, "staged_bytes": 0.0, "moved_bytes": 0.0, "flop": 0.0}


@dataclass
class GraphBuilder:
    """Collects tasks in topological order; numbers may be scalars or arrays [B]."""

    _tasks: list[_Task] = field(default_factory=list)
    _resources: dict[str, ArrayLike] = field(default_factory=dict)
    _pools: dict[str, int] = field(default_factory=dict)

    def resource(self, name: str, capacity: ArrayLike) -> int:
        """Declare a shared resource [units/s]; its index. Raises ValueError for a name that is taken."""
        if name in self._resources:
            raise ValueError(f"resource {name!r} is declared twice")
        self._resources[name] = capacity
        return len(self._resources) - 1

    def pool(self, name: str, slots: int) -> int:
        """Declare a pool of exclusive slots; its index. Raises ValueError for a name that is taken or no slot."""
        if name in self._pools or slots < 1:
            raise ValueError(f"pool {name!r} {'is declared twice' if name in self._pools else 'needs a slot'}")
        self._pools[name] = slots
        return len(self._pools) - 1

    def task(
        self,
        name: str,
        kind: str,
        *,
        after: Sequence[int] = (),
        uses: Mapping[int, ArrayLike] | None = None,
        **given: Any,
    ) -> int:
        """Add a task; its index.

        uses: resource index -> units per unit of work. given: `lane`, `limiter`, `pool`, `priority`, and the
        weights work, delay [s], cap [work/s], weight, cus, staged_bytes, moved_bytes, flop.
        Raises ValueError for a predecessor that does not come before it, or an undeclared pool or resource.
        """
        index = len(self._tasks)
        if any(not 0 <= found < index for found in after):
            raise ValueError(f"task {name!r}: predecessors {list(after)} must be tasks added before it ({index})")
        places = {key: given.pop(key, default) for key, default in _PLACE.items()}
        if not -1 <= places["pool"] < len(self._pools):
            raise ValueError(f"task {name!r}: pool {places['pool']} is not declared")
        if strange := [found for found in uses or {} if not 0 <= found < len(self._resources)]:
            raise ValueError(f"task {name!r}: resource {strange[0]} is not declared")
        unknown = set(given) - set(_WEIGHTS) - set(_ACCOUNTS)
        if unknown:
            raise TypeError(f"task {name!r}: unknown arguments {sorted(unknown)}")
        weights = {**_WEIGHTS, **_ACCOUNTS, **given}
        self._tasks.append(
            _Task(
                name,
                kind,
                after=tuple(dict.fromkeys(after)),
                weights=weights,
                uses=dict(uses or {}),
                **places,
            )
        )
        return index

    def frees(self, consumer: int, tasks: Sequence[int]) -> None:
        """When `consumer` ends, the bytes staged by `tasks` are free again."""
        for task in tasks:
            self._tasks[task].consumer = consumer

    def build(self) -> TaskGraph:
        """The graph. Raises ValueError naming the task for negative or NaN weights, or work that nothing limits."""
        uses = [(t, r, amount) for t, task in enumerate(self._tasks) for r, amount in task.uses.items()]
        shape = np.broadcast_shapes(*(np.shape(value) for value in self._numbers(uses)))
        weights: dict[str, Any] = self._weights(uses, shape[0] if shape else 1)
        graph = TaskGraph(**self._structure(uses), **weights)
        _check(graph)
        return graph

    def _numbers(self, uses: list[tuple[int, int, ArrayLike]]) -> list[ArrayLike]:
        own = [value for task in self._tasks for value in task.weights.values()]
        return [*own, *(amount for _, _, amount in uses), *self._resources.values()]

    def _structure(self, uses: list[tuple[int, int, ArrayLike]]) -> dict[str, Any]:
        tasks = self._tasks
        counts = [0, *(len(task.after) for task in tasks)]
        return {
            "tasks": tuple(task.name for task in tasks),
            "kinds": tuple(task.kind for task in tasks),
            "lanes": tuple(task.lane or task.kind for task in tasks),
            "limiters": tuple(task.limiter or task.kind for task in tasks),
            "resources": tuple(self._resources),
            "pools": tuple(self._pools),
            "pred_ptr": np.cumsum(counts, dtype=np.int32),
            "pred": _ints([before for task in tasks for before in task.after]),
            "use_task": _ints([task for task, _, _ in uses]),
            "use_resource": _ints([resource for _, resource, _ in uses]),
            "pool": _ints([task.pool for task in tasks]),
            "slots": _ints(list(self._pools.values())),
            "priority": _ints([task.priority for task in tasks]),
            "consumer": _ints([task.consumer for task in tasks]),
        }

    def _weights(self, uses: list[tuple[int, int, ArrayLike]], designs: int) -> dict[str, Floats]:
        names = (*_WEIGHTS, *_ACCOUNTS)
        found = {name: _columns([task.weights[name] for task in self._tasks], designs) for name in names}
        found["use"] = _columns([amount for _, _, amount in uses], designs)
        found["capacity"] = _columns(list(self._resources.values()), designs)
        return found


_PLACE: dict[str, Any] = {"lane": "", "limiter": "", "pool": -1, "priority": 0}


def _ints(values: Sequence[int]) -> Ints:
    return np.asarray(values, dtype=np.int32).reshape(-1)


def _columns(values: Sequence[ArrayLike], designs: int) -> Floats:
    """[designs, len(values)] of scalars and [designs] arrays."""
    table = np.empty((designs, len(values)))
    for column, value in enumerate(values):
        table[:, column] = value
    return table


def _check(graph: TaskGraph) -> None:
    for name in ("work", "delay", "cap", "weight"):
        value = getattr(graph, name)
        legal = value > 0 if name in ("cap", "weight") else value >= 0
        _refuse(
            graph.tasks,
            ~legal,
            f"{name} must be {'> 0' if name in ('cap', 'weight') else '>= 0'} and not NaN",
        )
    _refuse(graph.tasks, ~np.isfinite(graph.work + graph.delay), "work and delay must be finite")
    _refuse(graph.tasks, ~np.isfinite(graph.weight), "weight must be finite")
    _refuse(graph.resources, ~(graph.capacity > 0), "the capacity of a resource must be > 0")
    legal = (graph.use > 0) & np.isfinite(graph.use)
    _refuse([graph.tasks[t] for t in graph.use_task], ~legal, "a use must be > 0 and finite")
    if (unbounded := (graph.work > 0) & ~np.isfinite(graph.cap)).any():
        endless = unbounded & ~np.isfinite(graph.isolated_rate())
        _refuse(graph.tasks, endless, "has work but neither a cap nor a finite resource that limits it")


def _refuse(names: Sequence[str], faulty: NDArray[np.bool_], rule: str) -> None:
    if faulty.any():
        columns = np.flatnonzero(faulty.any(axis=0))
        raise ValueError(f"{', '.join(names[c] for c in columns[:5])}: {rule}")
