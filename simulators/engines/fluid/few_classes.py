# mypy: disable-error-code="assignment"
# Unsigned numbers of numba and counters of loops take the same names.
"""Kernels of the compiled engine for at most six classes of tasks, whose rates are solved once and remembered.

Rates depend on nothing but how many tasks of each class are active. These counts are the digits of one number of 64
bits; the rates that belong to it are solved when it is met for the first time in a design, over all classes, and looked
up later: a pipeline of any number of steps meets a handful. A design with more than 32 tasks of a class at once, or
that meets new counts again and again, is left to `many_classes`; all else is done as there.

`run` simulates one design after the other, `run_together` many in lockstep, with the same bits: designs to which the
same happens in the same order share each decision, and their numbers stand side by side in the lanes of the machine.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from simulators.compiled import compile_lazily, inline_never
from simulators.taskgraph.graph import Floats

Indices = NDArray[np.uint32]
Flags = NDArray[np.bool_]

MOST_CLASSES = 6
_MOST_ACTIVE = np.uint32(32)  # tasks of one class at once
_WIDTH = 256  # designs that may be a group: their numbers stay in the cache
_FEW = np.uint64(5)  # designs that take as long one by one, from the start


@inline_never
def _solve(  # noqa: C901, PLR0912, PLR0913, PLR0915, PLR0917
    size: Indices,
    cap: Floats,
    weight: Floats,
    use: Floats,
    capacity: Floats,
    factor: Floats,
    use_ptr: Indices,
    use_res: Indices,
    use_class: Indices,
    priority: Indices,
    group_of: Indices,
    slowed: Indices,
    active: Flags,
    load: Floats,
    left: Floats,
    demand: Floats,
    over: Flags,
    bound: Floats,
    rising: Flags,
    fresh: Floats,
) -> None:
    """Weighted max-min fair rates `fresh` [C] of classes with `size` active tasks each, priority after priority."""
    none, unit, zero, inf = np.uint32(0xFFFFFFFF), np.uint32(1), np.uint32(0), np.inf
    classes, resources, uses, laws = size.size, capacity.size, use_res.size, factor.size
    for group in range(2 * laws):
        active[group] = False
    for g in range(classes):
        if laws > 0 and size[g] > zero and group_of[g] != none:
            active[group_of[g]] = True
    for res in range(resources):
        load[res] = 0.0
        left[res] = capacity[res]
    unsolved = 0
    for g in range(classes):
        fresh[g] = 0.0
        rising[g] = False
        bound[g] = -1.0  # not active
        if size[g] > zero:
            best = cap[g]
            if laws > 0 and group_of[g] != none:
                for s in range(laws):
                    if slowed[s, 0] == group_of[g] and active[slowed[s, 1]]:
                        best *= factor[s]
            for v in range(use_ptr[g], use_ptr[g + unit]):
                best = min(best, capacity[use_res[v]] / (size[g] * use[v]))
            bound[g] = best
            fresh[g] = best
            for v in range(use_ptr[g], use_ptr[g + unit]):
                load[use_res[v]] += size[g] * best * use[v]
    contended = False
    for res in range(resources):
        over[res] = load[res] > capacity[res] * (1.0 + 1e-11)
        if not over[res] and load[res] > capacity[res] * (1.0 - 1e-11):
            # just saturated: a class with a small demand may get far less than its bound
            for v in range(uses):
                g = use_class[v]
                faint = size[g] * bound[g] * use[v] < 1e-2 * capacity[res]
                over[res] = over[res] or (use_res[v] == res and size[g] > zero and faint)
        contended = contended or over[res]
    if contended:
        for v in range(uses):
            g = use_class[v]
            if over[use_res[v]] and size[g] > zero and fresh[g] >= 0.0:
                fresh[g] = -1.0
                unsolved += 1
    while unsolved > 0:
        served = none
        for g in range(classes):
            if fresh[g] < 0.0 and priority[g] < served:
                served = priority[g]
        num_rising = 0
        for g in range(classes):
            rising[g] = fresh[g] < 0.0 and priority[g] == served
            num_rising += rising[g]
        unsolved -= num_rising
        while num_rising > 0:
            water = inf  # level: the rate over the weight
            for res in range(resources):
                demand[res] = 0.0
            for g in range(classes):
                if rising[g]:
                    water = min(water, bound[g] / weight[g])
                    for v in range(use_ptr[g], use_ptr[g + unit]):
                        demand[use_res[v]] += size[g] * weight[g] * use[v]
            for res in range(resources):
                if over[res] and demand[res] > 0.0:
                    water = min(water, left[res] / demand[res])
            limit = water * (1.0 + 1e-12)
            for res in range(resources):  # a negative demand marks an exhausted resource
                if over[res] and demand[res] > 0.0 and left[res] <= limit * demand[res]:
                    demand[res] = -1.0
            for g in range(classes):
                if rising[g]:
                    full = bound[g] <= limit * weight[g]
                    fresh[g] = bound[g] if full else water * weight[g]
                    for v in range(use_ptr[g], use_ptr[g + unit]):
                        full = full or demand[use_res[v]] < 0.0
                    if full:
                        rising[g] = False
                        num_rising -= 1
                        for v in range(use_ptr[g], use_ptr[g + unit]):
                            res = use_res[v]
                            left[res] = max(0.0, left[res] - size[g] * fresh[g] * use[v])
            for res in range(resources):
                if demand[res] < 0.0:
                    left[res] = 0.0


@compile_lazily
def run(  # noqa: C901, PLR0912, PLR0913, PLR0915, PLR0917
    succ_ptr: Indices,
    succ: Indices,
    num_pred: Indices,
    slots: Indices,
    pool_ptr: Indices,
    info: Indices,
    class_ptr: Indices,
    use_ptr: Indices,
    use_res: Indices,
    use_class: Indices,
    priority: Indices,
    cap_at: Indices,
    weight_at: Indices,
    use_at: Indices,
    capacity_at: Indices,
    group_of: Indices,
    slowed: Indices,
    factor_at: Indices,
    values: Floats,
    all_issued: Floats,
    all_finished: Floats,
    totals: Floats,
    crowded: Flags,
) -> int:
    """Issue and finish times of each design, and its totals; returns 1 where tasks wait for ever.

    all_issued, all_finished: [B, T], or one row as scratch. totals: rows [3 + 2 kinds, B]. crowded [B]: set where a
    design is left to `many_classes`.
    """
    none = np.uint32(0xFFFFFFFF)
    unit = np.uint32(1)
    zero = np.uint32(0)
    tasks, classes, resources = num_pred.size, np.uint32(priority.size), capacity_at.size
    pools, uses, laws = slots.size, use_res.size, factor_at.size
    kinds = (totals.shape[0] - 3) // 2
    inf = np.inf
    pending = np.empty(tasks, np.uint32)
    cap, weight, use, capacity = np.empty(classes), np.empty(classes), np.empty(uses), np.empty(resources)
    # classes: rate, 1 / rate, virtual time, time of its last update, number of active tasks
    rate, pace, virtual, updated = np.empty(classes), np.empty(classes), np.empty(classes), np.empty(classes)
    size = np.empty(classes, np.uint32)
    heap_key, heap_task = np.empty(tasks), np.empty(tasks, np.uint32)  # virtual finish times, a segment per class
    end, is_touched = np.empty(classes), np.empty(classes, np.bool_)  # next end of a class
    # rates that were solved: by a hash of the counts, with the counts and the design that they are of
    entries = np.uint64(128)
    known, known_in = np.zeros(entries, np.uint64), np.full(entries, -1, np.int64)
    solved_rate, solved_pace = np.empty((entries, classes)), np.empty((entries, classes))
    digit = np.empty(classes, np.uint64)
    for g in range(classes):
        digit[g] = np.uint64(1) << np.uint64(8 * g)
    bound, fresh, rising = np.empty(classes), np.empty(classes), np.empty(classes, np.bool_)
    load, left, demand = np.empty(resources), np.empty(resources), np.empty(resources)
    factor, over = np.empty(laws), np.empty(resources, np.bool_)
    active = np.zeros(2 * laws, np.bool_)  # groups with an active class; a law names two groups
    later_key, later_task = np.empty(tasks), np.empty(tasks, np.uint32)  # heap of delays
    queue, first, last = np.empty(tasks, np.uint32), np.empty(pools, np.uint32), np.empty(pools, np.uint32)
    since, free = np.empty(tasks, np.int64), np.empty(pools, np.int64)
    done, ready = np.empty(tasks, np.uint32), np.empty(tasks + 1, np.uint32)
    running, begun = np.zeros(kinds, np.int64), np.empty(kinds)
    busy, spent = np.empty(kinds), np.empty(kinds)
    freed_bytes = np.empty(tasks)  # staged bytes that the end of a task frees

    for design in range(values.shape[0]):
        row = values[design]
        line = min(design, all_issued.shape[0] - 1)  # without a timeline, all designs share one row
        issued, finished = all_issued[line], all_finished[line]
        for resource in range(resources):
            capacity[resource] = row[capacity_at[resource]]
        for v in range(uses):
            use[v] = row[use_at[v]]
        for law in range(laws):
            factor[law] = row[factor_at[law]]
        for g in range(classes):
            size[g] = 0
            weight[g] = row[weight_at[g]]
            cap[g] = row[cap_at[g]]
            rate[g] = 0.0
        end[:] = inf
        is_touched[:] = False
        counts = solved = np.uint64(0)
        solves = 0
        for pool in range(pools):
            free[pool] = slots[pool]
            first[pool] = pool_ptr[pool]
            last[pool] = pool_ptr[pool]
        for kind in range(kinds):
            busy[kind] = 0.0
            spent[kind] = 0.0
        most = zero
        now, instant = 0.0, 0
        level = peak = cu_s = 0.0
        num_later = num_done = completed = num_ready = 0
        for t in range(tasks):
            pending[t] = num_pred[t]
            freed_bytes[t] = 0.0
            if num_pred[t] == zero:
                ready[num_ready] = t
                num_ready += 1

        while True:
            # ---- rounds of one instant: completions and newly ready tasks, then grants
            while True:
                for i in range(num_done):
                    task = done[i]
                    finished[task] = now
                    span = now - issued[task]
                    kind = info[task, 4]
                    running[kind] -= 1
                    if running[kind] == 0:
                        busy[kind] += now - begun[kind]
                    spent[kind] += info[task, 8] * span
                    if info[task, 5] != none:
                        cu_s += row[info[task, 5]] * span
                    level -= freed_bytes[task]
                    pool = info[task, 0]
                    if pool != none:
                        free[pool] += 1
                    for j in range(succ_ptr[task], succ_ptr[task + unit]):
                        follower = succ[j]
                        pending[follower] -= unit
                        ready[num_ready] = follower
                        num_ready += pending[follower] == zero
                completed += num_done
                num_done = 0
                # pooled tasks queue in (instant became ready, index) order; other tasks are issued at once
                if pools > 0:
                    keep = 0
                    for i in range(num_ready):
                        task = ready[i]
                        pool = info[task, 0]
                        if pool == none:
                            ready[keep] = task
                            keep += 1
                        else:
                            since[task] = instant
                            spot = last[pool]
                            while spot > first[pool]:
                                ahead = queue[spot - unit]
                                if since[ahead] != instant or ahead < task:
                                    break
                                queue[spot] = ahead
                                spot -= unit
                            queue[spot] = task
                            last[pool] += unit
                    num_ready = keep
                    for pool in range(pools):
                        while free[pool] > 0 and first[pool] < last[pool]:
                            ready[num_ready] = queue[first[pool]]
                            num_ready += 1
                            first[pool] += unit
                            free[pool] -= 1
                for i in range(num_ready):
                    task = ready[i]
                    issued[task] = now
                    kind = info[task, 4]
                    if running[kind] == 0:
                        begun[kind] = now
                    running[kind] += 1
                    if info[task, 6] != none:
                        level += row[info[task, 6]]
                        if info[task, 7] != none:
                            freed_bytes[info[task, 7]] += row[info[task, 6]]
                    delay, work = row[info[task, 3]], row[info[task, 2]]
                    if delay > 0.0:
                        key = now + delay
                        at = num_later
                        num_later += 1
                        while at > 0 and later_key[(at - 1) >> 1] > key:
                            later_key[at] = later_key[(at - 1) >> 1]
                            later_task[at] = later_task[(at - 1) >> 1]
                            at = (at - 1) >> 1
                        later_key[at] = key
                        later_task[at] = task
                    elif work > 0.0:
                        g = info[task, 1]
                        base = class_ptr[g]
                        if size[g] == zero:
                            virtual[g] = 0.0
                            heap_key[base] = work
                            heap_task[base] = task
                        else:
                            virtual[g] += rate[g] * (now - updated[g])
                            key = virtual[g] + work
                            slot = size[g]
                            while slot > zero:
                                up = (slot - unit) >> unit
                                if heap_key[base + up] <= key:
                                    break
                                heap_key[base + slot] = heap_key[base + up]
                                heap_task[base + slot] = heap_task[base + up]
                                slot = up
                            heap_key[base + slot] = key
                            heap_task[base + slot] = task
                        size[g] += unit
                        most = max(most, size[g])
                        counts += digit[g]
                        updated[g] = now
                        is_touched[g] = True
                    else:
                        done[num_done] = task
                        num_done += 1
                num_ready = 0
                if num_done == 0:
                    break
            peak = max(peak, level)

            # ---- the rates of these counts: known, or weighted max-min fair, priority after priority
            if most > _MOST_ACTIVE:
                break
            if counts != solved:
                solved = counts
                entry = (counts * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(57)
                if known[entry] != counts or known_in[entry] != design:
                    solves += 1
                    if solves > 64 and 4 * solves > instant:
                        most = _MOST_ACTIVE + unit
                        break
                    known[entry], known_in[entry] = counts, design
                    _solve(
                        size, cap, weight, use, capacity, factor, use_ptr, use_res, use_class, priority, group_of,
                        slowed, active, load, left, demand, over, bound, rising, fresh,
                    )  # fmt: skip
                    for g in range(classes):
                        solved_rate[entry, g] = fresh[g]
                        solved_pace[entry, g] = 1.0 / fresh[g] if fresh[g] > 0.0 else inf
                for g in range(classes):
                    if size[g] > zero and solved_rate[entry, g] != rate[g]:
                        virtual[g] += rate[g] * (now - updated[g])
                        updated[g] = now
                        rate[g] = solved_rate[entry, g]
                        pace[g] = solved_pace[entry, g]
                        is_touched[g] = True
            upcoming = inf
            for g in range(classes):
                if is_touched[g]:
                    is_touched[g] = False
                    end[g] = inf
                    if size[g] > zero and rate[g] > 0.0:
                        end[g] = updated[g] + (heap_key[class_ptr[g]] - virtual[g]) * pace[g]
                upcoming = min(upcoming, end[g])

            # ---- the next instant, and everything that ends in it
            if num_later > 0:
                upcoming = min(upcoming, later_key[0])
            if upcoming == inf:
                break
            now = upcoming
            instant += 1
            latest = now + 1e-12 * now
            for g in range(classes):
                if end[g] > latest:
                    continue
                base = class_ptr[g]
                while size[g] > zero:
                    if updated[g] + (heap_key[base] - virtual[g]) * pace[g] > latest:
                        break
                    done[num_done] = heap_task[base]
                    num_done += 1
                    counts -= digit[g]
                    size[g] -= unit
                    if size[g] > zero:
                        key, task = heap_key[base + size[g]], heap_task[base + size[g]]
                        slot = zero
                        while True:
                            child = slot + slot + unit
                            if child >= size[g]:
                                break
                            if child + unit < size[g] and heap_key[base + child + unit] < heap_key[base + child]:
                                child += unit
                            if heap_key[base + child] >= key:
                                break
                            heap_key[base + slot] = heap_key[base + child]
                            heap_task[base + slot] = heap_task[base + child]
                            slot = child
                        heap_key[base + slot] = key
                        heap_task[base + slot] = task
                virtual[g] += rate[g] * (now - updated[g])
                updated[g] = now
                is_touched[g] = True
            while num_later > 0 and later_key[0] <= latest:
                task = later_task[0]
                num_later -= 1
                key, moved = later_key[num_later], later_task[num_later]
                at = 0
                while True:
                    below = 2 * at + 1
                    if below >= num_later:
                        break
                    if below + 1 < num_later and later_key[below + 1] < later_key[below]:
                        below += 1
                    if later_key[below] >= key:
                        break
                    later_key[at] = later_key[below]
                    later_task[at] = later_task[below]
                    at = below
                later_key[at] = key
                later_task[at] = moved
                work = row[info[task, 2]]
                if work > 0.0:
                    g = info[task, 1]
                    base = class_ptr[g]
                    if size[g] == zero:
                        virtual[g] = 0.0
                        heap_key[base] = work
                        heap_task[base] = task
                    else:
                        virtual[g] += rate[g] * (now - updated[g])
                        key = virtual[g] + work
                        slot = size[g]
                        while slot > zero:
                            up = (slot - unit) >> unit
                            if heap_key[base + up] <= key:
                                break
                            heap_key[base + slot] = heap_key[base + up]
                            heap_task[base + slot] = heap_task[base + up]
                            slot = up
                        heap_key[base + slot] = key
                        heap_task[base + slot] = task
                    size[g] += unit
                    most = max(most, size[g])
                    counts += digit[g]
                    updated[g] = now
                    is_touched[g] = True
                else:
                    done[num_done] = task
                    num_done += 1
            for i in range(1, num_done):  # in order of their indices
                task, at = done[i], i
                while at > 0 and done[at - 1] > task:
                    done[at] = done[at - 1]
                    at -= 1
                done[at] = task
        if most > _MOST_ACTIVE:
            crowded[design] = True
            running[:] = 0
            continue
        if completed != tasks:
            return 1
        totals[0, design], totals[1, design], totals[2, design] = now, peak, cu_s
        for kind in range(kinds):
            totals[3 + kind, design], totals[3 + kinds + kind, design] = busy[kind], spent[kind]
    return 0


@compile_lazily
def run_together(  # noqa: C901, PLR0912, PLR0913, PLR0915, PLR0917
    succ_ptr: Indices,
    succ: Indices,
    num_pred: Indices,
    slots: Indices,
    pool_ptr: Indices,
    info: Indices,
    class_ptr: Indices,
    use_ptr: Indices,
    use_res: Indices,
    use_class: Indices,
    priority: Indices,
    cap_at: Indices,
    weight_at: Indices,
    use_at: Indices,
    capacity_at: Indices,
    group_of: Indices,
    slowed: Indices,
    factor_at: Indices,
    columns: Floats,
    totals: Floats,
    crowded: Flags,
) -> int:
    """The designs of a group take the same steps at once, each step a loop over all of them in vector lanes.

    columns: the table, flat, column after column; work and delays are 0 in all designs or in none. totals: flat. Where
    other tasks end in some designs than in the first of the group, these wait until the others are done. What is few
    alone, or keeps too many tasks at once, is marked as `crowded`. Returns the number of groups that ran to their ends,
    or -1 where tasks wait for ever. Indices are unsigned and arrays flat, for the lanes.
    """
    none, unit, one, zero, inf = np.uint32(0xFFFFFFFF), np.uint32(1), np.uint64(1), np.uint64(0), np.inf
    tasks, classes, resources = np.uint64(num_pred.size), np.uint64(priority.size), np.uint64(capacity_at.size)
    uses, laws, designs = np.uint64(use_res.size), np.uint64(factor_at.size), np.uint64(crowded.size)
    kinds = (np.uint64(totals.size) // designs - np.uint64(3)) // np.uint64(2)
    width, places, most_counts, most_waiting = np.uint64(_WIDTH), np.uint64(48), np.uint64(32), np.uint64(256)
    # rows of a number of each design of a group: now, level, peak, CU-seconds, of each kind, class and place
    level_row, peak_row, cu_row, busy_row = width, np.uint64(2) * width, np.uint64(3) * width, np.uint64(4) * width
    spent_row = busy_row + kinds * width
    begun_row = spent_row + kinds * width
    virtual_row = begun_row + kinds * width
    updated_row = virtual_row + classes * width
    rate_row = updated_row + classes * width
    pace_row = rate_row + classes * width
    key_row = pace_row + classes * width
    issued_row = key_row + places * width
    numbers = np.zeros(issued_row + places * width)
    name, code, order = np.empty(width, np.uint64), np.empty(width, np.uint64), np.empty(width, np.uint64)
    ends, amount, spare = np.empty(places * width), np.empty(width), np.empty(width)
    spare_name, spare_code = np.empty(width, np.uint64), np.empty(width, np.uint64)
    solved_rate = np.empty(most_counts * classes * width)
    known = np.empty(most_counts, np.uint64)
    # what the designs of a group share, and of the groups that wait
    pending, staged = np.empty(tasks, np.uint32), np.empty(tasks, np.uint32)
    size, running = np.zeros(classes, np.uint32), np.zeros(kinds, np.int64)
    run_task, run_place, is_later = np.empty(places, np.uint32), np.empty(places, np.uint64), np.empty(places, np.bool_)
    free = np.empty(places, np.uint64)
    kept_pending, kept_staged = np.empty((most_waiting, tasks), np.uint32), np.empty((most_waiting, tasks), np.uint32)
    kept_size, kept_running = np.empty((most_waiting, classes), np.uint32), np.empty((most_waiting, kinds), np.int64)
    kept_task, kept_place = np.empty((most_waiting, places), np.uint32), np.empty((most_waiting, places), np.uint64)
    kept_later, kept_free = np.empty((most_waiting, places), np.bool_), np.empty((most_waiting, places), np.uint64)
    kept = np.empty((most_waiting, 8), np.uint64)
    done, done_place = np.empty(tasks, np.uint32), np.empty(tasks, np.uint64)
    ready, is_shifted = np.empty(tasks + one, np.uint32), np.empty(classes, np.bool_)
    digit = np.empty(classes, np.uint64)
    for g in range(classes):
        digit[g] = one << (np.uint64(8) * g)
    # stages of each consumer: the tasks whose bytes it frees, in the order in which they are issued
    stage_ptr, stager = np.zeros(tasks + one, np.uint32), np.empty(tasks, np.uint32)
    for t in range(tasks):
        if info[t, 6] != none and info[t, 7] != none:
            stage_ptr[np.uint64(info[t, 7]) + one] += unit
    for t in range(tasks):
        stage_ptr[t + one] += stage_ptr[t]
    kept_stager = np.empty((most_waiting, tasks), np.uint32)
    cap, weight, use, capacity = np.empty(classes), np.empty(classes), np.empty(uses), np.empty(resources)
    bound, fresh, rising = np.empty(classes), np.empty(classes), np.empty(classes, np.bool_)
    load, left, demand = np.empty(resources), np.empty(resources), np.empty(resources)
    factor, over = np.empty(laws), np.empty(resources, np.bool_)
    active = np.zeros(np.uint64(2) * laws, np.bool_)

    num_groups = 0
    block = zero
    while block < designs:
        low, high = zero, min(width, designs - block)
        for i in range(high):
            name[i] = block + i
        for i in range(virtual_row + np.uint64(4) * classes * width):
            numbers[i] = 0.0
        for t in range(tasks):
            pending[t] = num_pred[t]
            staged[t] = 0
        size[:] = 0
        running[:] = 0
        is_shifted[:] = False
        for place in range(places):
            free[place] = place
        num_free, num_running, num_counts, num_waiting = places, zero, zero, 0
        counts = solved = known_mask = completed = zero
        num_done = num_ready = zero
        for t in range(tasks):
            if num_pred[t] == np.uint32(0):
                ready[num_ready] = t
                num_ready += one
        resumed = False
        while True:
            is_over = False
            if not resumed:
                # ---- rounds of one instant: completions and newly ready tasks
                while True:
                    for k in range(num_done):
                        task, place = np.uint64(done[k]), done_place[k]
                        kind, members = np.uint64(info[task, 4]), np.float64(info[task, 8])
                        running[kind] -= 1
                        if place < places:
                            at, busy, begun = (
                                issued_row + place * width,
                                busy_row + kind * width,
                                begun_row + kind * width,
                            )
                            spent = spent_row + kind * width
                            if running[kind] == 0:
                                for i in range(low, high):
                                    numbers[busy + i] += numbers[i] - numbers[begun + i]
                            for i in range(low, high):
                                numbers[spent + i] += members * (numbers[i] - numbers[at + i])
                            if info[task, 5] != none:
                                column = np.uint64(info[task, 5])
                                for i in range(low, high):
                                    amount[i] = columns[column * designs + name[i]]
                                for i in range(low, high):
                                    numbers[cu_row + i] += amount[i] * (numbers[i] - numbers[at + i])
                            free[num_free] = place
                            num_free += one
                        if staged[task] > np.uint32(0):
                            for i in range(low, high):
                                amount[i] = 0.0
                            for j in range(staged[task]):
                                column = np.uint64(info[stager[stage_ptr[task] + np.uint32(j)], 6])
                                for i in range(low, high):
                                    amount[i] += columns[column * designs + name[i]]
                            for i in range(low, high):
                                numbers[level_row + i] -= amount[i]
                        for j in range(succ_ptr[task], succ_ptr[task + one]):
                            follower = succ[j]
                            pending[follower] -= unit
                            ready[num_ready] = follower
                            num_ready += np.uint64(pending[follower] == np.uint32(0))
                    completed += num_done
                    num_done = zero
                    for k in range(num_ready):
                        task = np.uint64(ready[k])
                        kind = np.uint64(info[task, 4])
                        begun = begun_row + kind * width
                        if running[kind] == 0:
                            for i in range(low, high):
                                numbers[begun + i] = numbers[i]
                        running[kind] += 1
                        if info[task, 6] != none:
                            column = np.uint64(info[task, 6])
                            for i in range(low, high):
                                numbers[level_row + i] += columns[column * designs + name[i]]
                            consumer = info[task, 7]
                            if consumer != none:
                                stager[stage_ptr[consumer] + staged[consumer]] = task
                                staged[consumer] += unit
                        delay_at, work_at = np.uint64(info[task, 3]) * designs, np.uint64(info[task, 2]) * designs
                        is_waiting, works = columns[delay_at + name[low]] > 0.0, columns[work_at + name[low]] > 0.0
                        if not is_waiting and not works:
                            done[num_done] = task
                            done_place[num_done] = places
                            num_done += one
                            continue
                        if num_free == zero:
                            is_over = True  # too many tasks at once
                            break
                        num_free -= one
                        place, g = free[num_free], np.uint64(info[task, 1])
                        key, at = key_row + place * width, issued_row + place * width
                        run_task[num_running], run_place[num_running] = task, place
                        is_later[num_running] = is_waiting
                        num_running += one
                        for i in range(low, high):
                            numbers[at + i] = numbers[i]
                        if is_waiting:
                            for i in range(low, high):
                                amount[i] = columns[delay_at + name[i]]
                            for i in range(low, high):
                                numbers[key + i] = numbers[i] + amount[i]
                            continue
                        virtual, updated, rate = virtual_row + g * width, updated_row + g * width, rate_row + g * width
                        for i in range(low, high):
                            amount[i] = columns[work_at + name[i]]
                        if size[g] == np.uint32(0):
                            for i in range(low, high):
                                numbers[virtual + i] = 0.0
                                numbers[key + i] = amount[i]
                                numbers[updated + i] = numbers[i]
                        else:
                            for i in range(low, high):
                                passed = numbers[i] - numbers[updated + i]
                                numbers[virtual + i] += numbers[rate + i] * passed
                                numbers[key + i] = numbers[virtual + i] + amount[i]
                                numbers[updated + i] = numbers[i]
                        size[g] += unit
                        counts += digit[g]
                        is_over = is_over or size[g] > _MOST_ACTIVE
                    num_ready = zero
                    if num_done == zero or is_over:
                        break
                for i in range(low, high):
                    most, now = numbers[peak_row + i], numbers[level_row + i]
                    numbers[peak_row + i] = now if now > most else most

                # ---- the rates of these counts
                if counts != solved and not is_over:
                    solved = counts
                    entry = zero
                    while entry < num_counts and known[entry] != counts:
                        entry += one
                    if entry == num_counts:
                        is_over = num_counts == most_counts
                        if not is_over:
                            known[entry] = counts
                            num_counts += one
                    mark = one << entry
                    if not is_over and known_mask & mark == zero:
                        known_mask |= mark
                        for i in range(low, high):
                            design = name[i]
                            for res in range(resources):
                                capacity[res] = columns[np.uint64(capacity_at[res]) * designs + design]
                            for v in range(uses):
                                use[v] = columns[np.uint64(use_at[v]) * designs + design]
                            for law in range(laws):
                                factor[law] = columns[np.uint64(factor_at[law]) * designs + design]
                            for g in range(classes):
                                weight[g] = columns[np.uint64(weight_at[g]) * designs + design]
                                cap[g] = columns[np.uint64(cap_at[g]) * designs + design]
                            _solve(
                                size, cap, weight, use, capacity, factor, use_ptr, use_res, use_class, priority,
                                group_of, slowed, active, load, left, demand, over, bound, rising, fresh,
                            )  # fmt: skip
                            for g in range(classes):
                                solved_rate[(entry * classes + g) * width + design - block] = fresh[g]
                    if not is_over:
                        for g in range(classes):
                            if size[g] > np.uint32(0):
                                virtual, updated = virtual_row + g * width, updated_row + g * width
                                rate, pace = rate_row + g * width, pace_row + g * width
                                at = (entry * classes + g) * width - block
                                for i in range(low, high):
                                    amount[i] = solved_rate[at + name[i]]
                                for i in range(low, high):
                                    changes = amount[i] != numbers[rate + i]
                                    passed = numbers[i] - numbers[updated + i]
                                    gone = numbers[virtual + i] + numbers[rate + i] * passed
                                    numbers[virtual + i] = gone if changes else numbers[virtual + i]
                                    numbers[updated + i] = numbers[i] if changes else numbers[updated + i]
                                for i in range(low, high):
                                    numbers[rate + i] = amount[i]
                                    numbers[pace + i] = 1.0 / amount[i] if amount[i] > 0.0 else inf

                # ---- the next instant, and what ends in it
                if num_running == zero or is_over:
                    if not is_over and completed != tasks:
                        return -1
                    for i in range(low, high):
                        crowded[name[i]] = is_over
                    if not is_over:
                        num_groups += 1
                        for i in range(low, high):
                            totals[name[i]] = numbers[i]
                            totals[designs + name[i]] = numbers[peak_row + i]
                            totals[np.uint64(2) * designs + name[i]] = numbers[cu_row + i]
                        for kind in range(kinds):
                            busy, spent = busy_row + kind * width, spent_row + kind * width
                            of_busy = (np.uint64(3) + kind) * designs
                            of_spent = of_busy + kinds * designs
                            for i in range(low, high):
                                totals[of_busy + name[i]] = numbers[busy + i]
                                totals[of_spent + name[i]] = numbers[spent + i]
                    low = high
                else:
                    for i in range(low, high):
                        spare[i] = inf
                        code[i] = zero
                    for k in range(num_running):
                        at, key = k * width, key_row + run_place[k] * width
                        if is_later[k]:
                            for i in range(low, high):
                                ends[at + i] = numbers[key + i]
                        else:
                            g = np.uint64(info[run_task[k], 1])
                            virtual, updated = virtual_row + g * width, updated_row + g * width
                            rate, pace = rate_row + g * width, pace_row + g * width
                            for i in range(low, high):
                                ended = (
                                    numbers[updated + i] + (numbers[key + i] - numbers[virtual + i]) * numbers[pace + i]
                                )
                                ends[at + i] = ended if numbers[rate + i] > 0.0 else inf
                        for i in range(low, high):
                            ended, first = ends[at + i], spare[i]
                            spare[i] = ended if ended < first else first
                    latest = 0.0
                    for i in range(low, high):
                        latest = max(latest, spare[i])
                        numbers[i] = spare[i]
                        spare[i] += 1e-12 * spare[i]
                    if latest == inf:
                        return -1
                    for k in range(num_running):
                        at, mark = k * width, one << k
                        for i in range(low, high):
                            code[i] |= mark if ends[at + i] <= spare[i] else zero
            resumed = False

            # ---- where not all designs do alike, the group parts
            if low < high:
                num_like = zero
                for i in range(low, high):
                    num_like += np.uint64(code[i] == code[low])
                if num_like < high - low:
                    front, back = low, low + num_like
                    for i in range(low, high):
                        if code[i] == code[low]:
                            order[front] = i
                            front += one
                        else:
                            order[back] = i
                            back += one
                    for i in range(low, high):
                        spare_name[i], spare_code[i] = name[order[i]], code[order[i]]
                    for i in range(low, high):
                        name[i], code[i] = spare_name[i], spare_code[i]
                    for line in range(np.uint64(4) + np.uint64(3) * kinds + np.uint64(4) * classes):
                        at = line * width
                        for i in range(low, high):
                            spare[i] = numbers[at + order[i]]
                        for i in range(low, high):
                            numbers[at + i] = spare[i]
                    for k in range(num_running):
                        for first in (key_row, issued_row):
                            at = first + run_place[k] * width
                            for i in range(low, high):
                                spare[i] = numbers[at + order[i]]
                            for i in range(low, high):
                                numbers[at + i] = spare[i]
                    middle = low + num_like
                    if np.uint64(num_waiting) == most_waiting or (high - middle) * tasks < _FEW * (tasks - completed):
                        for i in range(middle, high):
                            crowded[name[i]] = True
                    else:
                        for t in range(tasks):
                            kept_pending[num_waiting, t] = pending[t]
                            kept_staged[num_waiting, t] = staged[t]
                            kept_stager[num_waiting, t] = stager[t]
                        for g in range(classes):
                            kept_size[num_waiting, g] = size[g]
                        for kind in range(kinds):
                            kept_running[num_waiting, kind] = running[kind]
                        for k in range(num_running):
                            kept_task[num_waiting, k], kept_place[num_waiting, k] = run_task[k], run_place[k]
                            kept_later[num_waiting, k] = is_later[k]
                        for k in range(places):
                            kept_free[num_waiting, k] = free[k]
                        shared = kept[num_waiting]
                        shared[0], shared[1], shared[2], shared[3] = middle, high, num_free, num_running
                        shared[4], shared[5], shared[6], shared[7] = counts, solved, known_mask, completed
                        num_waiting += 1
                    high = middle
                if (high - low) * tasks < _FEW * (tasks - completed):
                    for i in range(low, high):
                        crowded[name[i]] = True
                    low = high
            if low == high:
                if num_waiting == 0:
                    break
                num_waiting -= 1
                for t in range(tasks):
                    pending[t] = kept_pending[num_waiting, t]
                    staged[t] = kept_staged[num_waiting, t]
                    stager[t] = kept_stager[num_waiting, t]
                for g in range(classes):
                    size[g] = kept_size[num_waiting, g]
                for kind in range(kinds):
                    running[kind] = kept_running[num_waiting, kind]
                shared = kept[num_waiting]
                low, high, num_free, num_running = shared[0], shared[1], shared[2], shared[3]
                counts, solved, known_mask, completed = shared[4], shared[5], shared[6], shared[7]
                for k in range(num_running):
                    run_task[k], run_place[k] = kept_task[num_waiting, k], kept_place[num_waiting, k]
                    is_later[k] = kept_later[num_waiting, k]
                for k in range(places):
                    free[k] = kept_free[num_waiting, k]
                num_done = num_ready = zero
                resumed = True
                continue

            # ---- what ends: work is done, or a delay is over and work begins
            ended_code, still = code[low], zero
            num_begun = zero
            for k in range(num_running):
                if (ended_code >> k) & one == zero:
                    run_task[still], run_place[still], is_later[still] = run_task[k], run_place[k], is_later[k]
                    still += one
                elif is_later[k]:
                    ready[num_begun], order[num_begun] = run_task[k], run_place[k]
                    num_begun += one
                else:
                    done[num_done], done_place[num_done] = run_task[k], run_place[k]
                    num_done += one
                    g = np.uint64(info[run_task[k], 1])
                    counts -= digit[g]
                    size[g] -= unit
                    is_shifted[g] = True
            num_running = still
            for g in range(classes):
                if is_shifted[g]:
                    is_shifted[g] = False
                    virtual, updated, rate = virtual_row + g * width, updated_row + g * width, rate_row + g * width
                    for i in range(low, high):
                        numbers[virtual + i] += numbers[rate + i] * (numbers[i] - numbers[updated + i])
                        numbers[updated + i] = numbers[i]
            for k in range(num_begun):
                task, place = np.uint64(ready[k]), order[k]
                work_at, g = np.uint64(info[task, 2]) * designs, np.uint64(info[task, 1])
                if not columns[work_at + name[low]] > 0.0:
                    done[num_done], done_place[num_done] = task, place
                    num_done += one
                    continue
                run_task[num_running], run_place[num_running], is_later[num_running] = task, place, False
                num_running += one
                key = key_row + place * width
                virtual, updated, rate = virtual_row + g * width, updated_row + g * width, rate_row + g * width
                for i in range(low, high):
                    amount[i] = columns[work_at + name[i]]
                if size[g] == np.uint32(0):
                    for i in range(low, high):
                        numbers[virtual + i] = 0.0
                        numbers[key + i] = amount[i]
                        numbers[updated + i] = numbers[i]
                else:
                    for i in range(low, high):
                        numbers[virtual + i] += numbers[rate + i] * (numbers[i] - numbers[updated + i])
                        numbers[key + i] = numbers[virtual + i] + amount[i]
                        numbers[updated + i] = numbers[i]
                size[g] += unit
                counts += digit[g]
            for k in range(one, num_done):  # in order of their indices
                task, place, at = done[k], done_place[k], k
                while at > zero and done[at - one] > task:
                    done[at], done_place[at] = done[at - one], done_place[at - one]
                    at -= one
                done[at], done_place[at] = task, place
        block += width
    return num_groups
