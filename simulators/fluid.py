"""The compiled engine: the event engine's semantics, hundreds of times faster.

What makes it fast (each exact): tasks with the same uses, weight, cap and priority are one *class*, a fluid variable
with a multiplicity and a virtual time; rates are solved only when a class count changed over an instant, only on
resources that are over-subscribed, and only in the part of the machine that the change can reach; classes progress
lazily, when they are touched; a batch of designs shares one structure and one set of work arrays.

One kernel function on purpose: helpers that take arrays put reference counting into numba's inner loops.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simulators.compiled import compiled
from simulators.graph import TaskGraph
from simulators.timeline import Timeline

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]

_STARVED = 1


class FluidEngine:
    """Exact for every task graph."""

    version = "1"
    batch = 8192

    def run(self, graph: TaskGraph) -> Timeline:
        """Simulate each design of the batch. Raises RuntimeError if tasks wait for ever."""
        issued, finished = np.empty_like(graph.work), np.empty_like(graph.work)
        classes = _classes(graph)
        if _run(*_structure(graph, classes), *_weights(graph, classes), issued, finished) == _STARVED:
            raise RuntimeError("tasks wait for ever: a higher priority never leaves them any of a resource")
        return Timeline(graph, issued, finished, ("",) * graph.num_designs)


@dataclass(frozen=True)
class _Classes:
    """of [T]: class of each task; first [C]: a task that stands for the class; uses: its rows of the incidence."""

    of: Indices
    first: Indices
    use_ptr: Indices
    uses: Indices


def _classes(graph: TaskGraph) -> _Classes:
    """Tasks that are alike in every design of the batch: same priority, resources, uses, cap and weight."""
    order = np.argsort(graph.use_task, kind="stable")
    ptr = np.searchsorted(graph.use_task[order], np.arange(graph.num_tasks + 1))
    one = slice(0, 1)  # alike in the first design, and nearly always in all
    of, first = _grouped(graph, order, ptr, one)
    rows = [order[ptr[task] : ptr[task + 1]] for task in first]
    twin = np.concatenate([*(rows[group] for group in of), np.empty(0, np.intp)])
    like = first[of]
    alike = np.array_equal(graph.cap, graph.cap[:, like]) and np.array_equal(graph.weight, graph.weight[:, like])
    if not (alike and np.array_equal(graph.use[:, order], graph.use[:, twin])):
        of, first = _grouped(graph, order, ptr, slice(None))
        rows = [order[ptr[task] : ptr[task + 1]] for task in first]
    uses = np.concatenate([*rows, np.empty(0, np.intp)]).astype(np.int64)
    return _Classes(of, first, _offsets([len(found) for found in rows]), uses)


def _grouped(graph: TaskGraph, order: Any, ptr: Any, designs: slice) -> tuple[Indices, Indices]:
    """(class of each task, first task of each class) by what tasks are in some designs of the batch."""
    columns = np.ascontiguousarray(np.stack([graph.cap[designs].T, graph.weight[designs].T], axis=1))
    use = np.ascontiguousarray(graph.use[designs].T)
    known: dict[tuple[Any, ...], int] = {}
    first: list[int] = []
    of = np.empty(graph.num_tasks, np.int64)
    for task in range(graph.num_tasks):
        rows = order[ptr[task] : ptr[task + 1]]
        like = (
            int(graph.priority[task]),
            graph.use_resource[rows].tobytes(),
            columns[task].tobytes(),
            use[rows].tobytes(),
        )
        of[task] = known.setdefault(like, len(known))
        if of[task] == len(first):
            first.append(task)
    return of, np.array(first, np.int64)


def _offsets(counts: Any) -> Indices:
    return np.concatenate([[0], np.cumsum(np.asarray(counts, np.int64))]).astype(np.int64)


def _structure(graph: TaskGraph, classes: _Classes) -> tuple[Indices, ...]:
    """Successors (CSR), predecessor counts, pools, classes: what all designs share."""
    task_of = np.repeat(np.arange(graph.num_tasks), np.diff(graph.pred_ptr))
    succ = task_of[np.argsort(graph.pred, kind="stable")].astype(np.int64)
    succ_ptr = _offsets(np.bincount(graph.pred, minlength=graph.num_tasks))
    pooled = np.bincount(graph.pool[graph.pool >= 0], minlength=len(graph.pools))
    members = np.bincount(classes.of, minlength=classes.first.size)
    use_class = np.repeat(np.arange(classes.first.size), np.diff(classes.use_ptr)).astype(np.int64)
    return (
        *(succ_ptr, succ, np.diff(graph.pred_ptr).astype(np.int64)),
        *(graph.pool.astype(np.int64), graph.slots.astype(np.int64), _offsets(pooled)),
        *(classes.of, _offsets(members), classes.use_ptr, graph.use_resource[classes.uses].astype(np.int64)),
        *(use_class, graph.priority[classes.first].astype(np.int64)),
    )


def _weights(graph: TaskGraph, classes: _Classes) -> tuple[Floats, ...]:
    """Work, delay [B, T]; cap, weight [B, C]; use [B, V]; capacity [B, R]."""
    use, weight = graph.use[:, classes.uses], graph.weight[:, classes.first]
    # A task never runs faster than alone, so its isolated rate may stand for its cap, and is finite.
    cap = graph.cap[:, classes.first]
    share = graph.capacity[:, graph.use_resource[classes.uses]] / use
    for group, (begin, end) in enumerate(itertools.pairwise(classes.use_ptr)):
        cap[:, group] = np.minimum(cap[:, group], share[:, begin:end].min(axis=1, initial=np.inf))
    cap[~np.isfinite(cap)] = 1.0  # only where no task of the class has work
    found = (graph.work, graph.delay, cap, weight, use, graph.capacity)
    return tuple(np.ascontiguousarray(value) for value in found)


@compiled
def _run(  # noqa: C901, PLR0912, PLR0913, PLR0915, PLR0917
    succ_ptr: Indices,
    succ: Indices,
    num_pred: Indices,
    pool_of: Indices,
    slots: Indices,
    pool_ptr: Indices,
    class_of: Indices,
    class_ptr: Indices,
    use_ptr: Indices,
    use_res: Indices,
    use_class: Indices,
    priority: Indices,
    all_work: Floats,
    all_delay: Floats,
    all_cap: Floats,
    all_weight: Floats,
    all_use: Floats,
    all_capacity: Floats,
    all_issued: Floats,
    all_finished: Floats,
) -> int:
    designs, tasks = all_work.shape
    classes, resources, pools, uses = priority.size, all_capacity.shape[1], slots.size, use_res.size
    inf = np.inf
    pending = np.empty(tasks, np.int64)
    # classes: count, change of count over the instant, rate, virtual time, when it was last brought up to date, end
    count, change = np.empty(classes, np.int64), np.empty(classes, np.int64)
    rate, virtual, updated = np.empty(classes), np.empty(classes), np.empty(classes)
    bound = np.empty(classes)  # what a class would get alone: its cap, or an equal share of its scarcest resource
    size = np.empty(classes, np.int64)  # heap of virtual finish times, one segment per class
    heap_key, heap_task = np.empty(tasks), np.empty(tasks, np.int64)
    leaves = 1  # tournament of when classes end next: the first one is at the root, its class at leaf + `leaves`
    while leaves < classes:
        leaves *= 2
    soonest, stack = np.empty(2 * leaves), np.empty(128, np.int64)
    touched, is_touched = np.empty(classes, np.int64), np.zeros(classes, np.bool_)
    # resources: users, load if all ran at their bounds, and the active uses of each as a linked list
    users, load = np.empty(resources, np.int64), np.empty(resources)
    over, dirty, is_dirty = np.empty(resources, np.bool_), np.empty(resources, np.int64), np.zeros(resources, np.bool_)
    head, after, before = np.empty(resources, np.int64), np.empty(uses, np.int64), np.empty(uses, np.int64)
    part, in_part = np.empty(resources, np.int64), np.zeros(resources, np.bool_)
    members, in_members = np.empty(classes, np.int64), np.zeros(classes, np.bool_)
    left, demand, fresh = np.empty(resources), np.empty(resources), np.empty(classes)
    rising = np.empty(classes, np.bool_)
    later_key, later_task = np.empty(tasks), np.empty(tasks, np.int64)  # heap of delays
    queue, first, last = np.empty(tasks, np.int64), np.empty(pools, np.int64), np.empty(pools, np.int64)
    since, free = np.empty(tasks, np.int64), np.empty(pools, np.int64)
    done, ready = np.empty(tasks, np.int64), np.empty(tasks, np.int64)

    for design in range(designs):
        work, delay, cap, weight = all_work[design], all_delay[design], all_cap[design], all_weight[design]
        use, capacity = all_use[design], all_capacity[design]
        issued, finished = all_issued[design], all_finished[design]
        pending[:] = num_pred
        count[:] = 0
        change[:] = 0
        size[:] = 0
        users[:] = 0
        load[:] = 0.0
        over[:] = False
        head[:] = -1
        free[:] = slots
        first[:] = pool_ptr[:-1]
        last[:] = pool_ptr[:-1]
        now, instant = 0.0, 0
        soonest[:] = inf
        num_later = num_touched = num_done = completed = 0
        num_ready = 0
        for task in range(tasks):
            if pending[task] == 0:
                ready[num_ready] = task
                num_ready += 1

        while True:
            # ---- rounds of one instant: completions and newly ready tasks, then grants
            while True:
                for i in range(num_done):
                    task = done[i]
                    finished[task] = now
                    if pool_of[task] >= 0:
                        free[pool_of[task]] += 1
                    for j in range(succ_ptr[task], succ_ptr[task + 1]):
                        follower = succ[j]
                        pending[follower] -= 1
                        if pending[follower] == 0:
                            ready[num_ready] = follower
                            num_ready += 1
                completed += num_done
                num_done = 0
                # pooled tasks queue in (instant became ready, index) order; the rest is issued at once
                keep = 0
                for i in range(num_ready):
                    task = ready[i]
                    pool = pool_of[task]
                    if pool < 0:
                        ready[keep] = task
                        keep += 1
                    else:
                        since[task] = instant
                        slot = last[pool]
                        while slot > first[pool] and since[queue[slot - 1]] == instant and queue[slot - 1] > task:
                            queue[slot] = queue[slot - 1]
                            slot -= 1
                        queue[slot] = task
                        last[pool] += 1
                num_ready = keep
                for pool in range(pools):
                    while free[pool] > 0 and first[pool] < last[pool]:
                        ready[num_ready] = queue[first[pool]]
                        num_ready += 1
                        first[pool] += 1
                        free[pool] -= 1
                for i in range(num_ready):
                    task = ready[i]
                    issued[task] = now
                    if delay[task] > 0.0:
                        key = now + delay[task]
                        slot = num_later
                        num_later += 1
                        while slot > 0 and later_key[(slot - 1) >> 1] > key:
                            later_key[slot] = later_key[(slot - 1) >> 1]
                            later_task[slot] = later_task[(slot - 1) >> 1]
                            slot = (slot - 1) >> 1
                        later_key[slot] = key
                        later_task[slot] = task
                    elif work[task] > 0.0:
                        group = class_of[task]
                        if size[group] == 0:
                            virtual[group] = 0.0
                        elif updated[group] < now:
                            virtual[group] += rate[group] * (now - updated[group])
                        updated[group] = now
                        key = virtual[group] + work[task]
                        base = class_ptr[group]
                        slot = size[group]
                        size[group] += 1
                        while slot > 0 and heap_key[base + ((slot - 1) >> 1)] > key:
                            heap_key[base + slot] = heap_key[base + ((slot - 1) >> 1)]
                            heap_task[base + slot] = heap_task[base + ((slot - 1) >> 1)]
                            slot = (slot - 1) >> 1
                        heap_key[base + slot] = key
                        heap_task[base + slot] = task
                        change[group] += 1
                        if not is_touched[group]:
                            is_touched[group] = True
                            touched[num_touched] = group
                            num_touched += 1
                    else:
                        done[num_done] = task
                        num_done += 1
                num_ready = 0
                if num_done == 0:
                    break

            # ---- counts, loads and lists of what changed
            num_dirty = 0
            for i in range(num_touched):
                group = touched[i]
                delta = change[group]
                if delta == 0:
                    continue
                old = count[group]
                new = old + delta
                count[group] = new
                change[group] = 0
                flow = old * bound[group] if old > 0 else 0.0
                best = cap[group]
                for v in range(use_ptr[group], use_ptr[group + 1]):
                    best = min(best, capacity[use_res[v]] / (max(new, 1) * use[v]))
                bound[group] = best
                flow = new * best - flow
                rate[group] = best
                for v in range(use_ptr[group], use_ptr[group + 1]):
                    res = use_res[v]
                    users[res] += delta
                    load[res] = load[res] + flow * use[v] if users[res] > 0 else 0.0
                    if old == 0:
                        after[v] = head[res]
                        before[v] = -1
                        if head[res] >= 0:
                            before[head[res]] = v
                        head[res] = v
                    elif new == 0:
                        if before[v] >= 0:
                            after[before[v]] = after[v]
                        else:
                            head[res] = after[v]
                        if after[v] >= 0:
                            before[after[v]] = before[v]
                    if not is_dirty[res]:
                        is_dirty[res] = True
                        dirty[num_dirty] = res
                        num_dirty += 1

            # ---- the part of the machine whose rates can change: over-subscribed before or now, and what they share
            num_part = num_members = 0
            for i in range(num_dirty):
                res = dirty[i]
                is_dirty[res] = False
                was = over[res]
                over[res] = load[res] > capacity[res] * (1.0 + 1e-11)
                if was or over[res]:
                    in_part[res] = True
                    part[num_part] = res
                    num_part += 1
            i = 0
            while i < num_part:
                v = head[part[i]]
                i += 1
                while v >= 0:
                    group = use_class[v]
                    if not in_members[group]:
                        in_members[group] = True
                        members[num_members] = group
                        num_members += 1
                        for u in range(use_ptr[group], use_ptr[group + 1]):
                            res = use_res[u]
                            if over[res] and not in_part[res]:
                                in_part[res] = True
                                part[num_part] = res
                                num_part += 1
                    v = after[v]

            # ---- weighted max-min fair rates there, priority after priority (progressive filling)
            if num_members > 0:
                for i in range(num_part):
                    left[part[i]] = capacity[part[i]]
                for i in range(num_members):
                    fresh[members[i]] = -1.0
                unsolved = num_members
                while unsolved > 0:
                    level = 9223372036854775807
                    for i in range(num_members):
                        group = members[i]
                        if fresh[group] < 0.0 and priority[group] < level:
                            level = priority[group]
                    num_rising = 0
                    for i in range(num_members):
                        group = members[i]
                        rising[group] = fresh[group] < 0.0 and priority[group] == level
                        if rising[group]:
                            fresh[group] = 0.0
                            num_rising += 1
                    unsolved -= num_rising
                    while num_rising > 0:
                        for i in range(num_part):
                            demand[part[i]] = 0.0
                        rise = inf
                        for i in range(num_members):
                            group = members[i]
                            if rising[group]:
                                rise = min(rise, (bound[group] - fresh[group]) / weight[group])
                                for v in range(use_ptr[group], use_ptr[group + 1]):
                                    res = use_res[v]
                                    if in_part[res] and over[res]:
                                        demand[res] += count[group] * weight[group] * use[v]
                        for i in range(num_part):
                            res = part[i]
                            if demand[res] > 0.0:
                                rise = min(rise, left[res] / demand[res])
                        limit = rise * (1.0 + 1e-12)
                        for i in range(num_part):  # exhausted ones are marked by a negative demand
                            res = part[i]
                            if demand[res] > 0.0:
                                tight = left[res] <= limit * demand[res]
                                left[res] = 0.0 if tight else left[res] - rise * demand[res]
                                demand[res] = -1.0 if tight else demand[res]
                        for i in range(num_members):
                            group = members[i]
                            if rising[group]:
                                room = bound[group] - fresh[group]
                                held = room <= limit * weight[group]
                                fresh[group] = bound[group] if held else fresh[group] + rise * weight[group]
                                for v in range(use_ptr[group], use_ptr[group + 1]):
                                    res = use_res[v]
                                    if in_part[res] and over[res] and demand[res] < 0.0:
                                        held = True
                                if held:
                                    rising[group] = False
                                    num_rising -= 1
                for i in range(num_members):
                    group = members[i]
                    in_members[group] = False
                    if fresh[group] != rate[group]:
                        if updated[group] < now:
                            virtual[group] += rate[group] * (now - updated[group])
                            updated[group] = now
                        rate[group] = fresh[group]
                        if not is_touched[group]:
                            is_touched[group] = True
                            touched[num_touched] = group
                            num_touched += 1
            for i in range(num_part):
                in_part[part[i]] = False
            for i in range(num_touched):
                group = touched[i]
                is_touched[group] = False
                node = leaves + group
                soonest[node] = inf
                if count[group] > 0 and rate[group] > 0.0:
                    soonest[node] = updated[group] + (heap_key[class_ptr[group]] - virtual[group]) / rate[group]
                while node > 1:
                    key = min(soonest[node], soonest[node ^ 1])
                    node >>= 1
                    if soonest[node] == key:
                        break
                    soonest[node] = key
            num_touched = 0

            # ---- the next instant, and everything that ends in it
            upcoming = min(soonest[1], later_key[0] if num_later > 0 else inf)
            if upcoming == inf:
                break
            now = upcoming
            instant += 1
            latest = now + 1e-12 * now
            height = 0
            if soonest[1] <= latest:
                stack[0] = 1
                height = 1
            while height > 0:
                height -= 1
                node = stack[height]
                if node < leaves:
                    for child in range(2 * node, 2 * node + 2):
                        if soonest[child] <= latest:
                            stack[height] = child
                            height += 1
                    continue
                group = node - leaves
                base = class_ptr[group]
                while size[group] > 0:
                    wait = heap_key[base] - virtual[group]
                    if updated[group] + wait / rate[group] > latest:
                        break
                    done[num_done] = heap_task[base]
                    num_done += 1
                    change[group] -= 1
                    size[group] -= 1
                    key, task = heap_key[base + size[group]], heap_task[base + size[group]]
                    slot = 0
                    while True:
                        child = 2 * slot + 1
                        if child >= size[group]:
                            break
                        if child + 1 < size[group] and heap_key[base + child + 1] < heap_key[base + child]:
                            child += 1
                        if heap_key[base + child] >= key:
                            break
                        heap_key[base + slot] = heap_key[base + child]
                        heap_task[base + slot] = heap_task[base + child]
                        slot = child
                    heap_key[base + slot] = key
                    heap_task[base + slot] = task
                virtual[group] += rate[group] * (now - updated[group])
                updated[group] = now
                if not is_touched[group]:
                    is_touched[group] = True
                    touched[num_touched] = group
                    num_touched += 1
            while num_later > 0 and later_key[0] <= latest:
                task = later_task[0]
                num_later -= 1
                key, moved = later_key[num_later], later_task[num_later]
                slot = 0
                while True:
                    child = 2 * slot + 1
                    if child >= num_later:
                        break
                    if child + 1 < num_later and later_key[child + 1] < later_key[child]:
                        child += 1
                    if later_key[child] >= key:
                        break
                    later_key[slot] = later_key[child]
                    later_task[slot] = later_task[child]
                    slot = child
                later_key[slot] = key
                later_task[slot] = moved
                if work[task] > 0.0:
                    group = class_of[task]
                    if size[group] == 0:
                        virtual[group] = 0.0
                    elif updated[group] < now:
                        virtual[group] += rate[group] * (now - updated[group])
                    updated[group] = now
                    key = virtual[group] + work[task]
                    base = class_ptr[group]
                    slot = size[group]
                    size[group] += 1
                    while slot > 0 and heap_key[base + ((slot - 1) >> 1)] > key:
                        heap_key[base + slot] = heap_key[base + ((slot - 1) >> 1)]
                        heap_task[base + slot] = heap_task[base + ((slot - 1) >> 1)]
                        slot = (slot - 1) >> 1
                    heap_key[base + slot] = key
                    heap_task[base + slot] = task
                    change[group] += 1
                    if not is_touched[group]:
                        is_touched[group] = True
                        touched[num_touched] = group
                        num_touched += 1
                else:
                    done[num_done] = task
                    num_done += 1
        if completed != tasks:
            return 1
    return 0


ENGINE = FluidEngine()
