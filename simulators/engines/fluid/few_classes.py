# mypy: disable-error-code="assignment"
# Unsigned numbers of numba and counters of loops take the same names.
"""Kernels of the compiled engine for at most six classes of tasks, whose rates are solved once and remembered.

Rates depend on nothing but how many tasks of each class are active. These counts are the digits of one number of 64
bits; the rates that belong to it are solved when it is met for the first time in a design, over all classes, and looked
up later: a pipeline of any number of steps meets a handful. A design with more than 32 tasks of a class at once, or
that meets new counts again and again, is left to `many_classes`; all else is done as there.

`run` simulates one design after the other, `run_together` many in lockstep, with the same bits: designs in which the
same tasks have ended share each decision, and their numbers stand side by side in the lanes of the machine.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from simulators.compiled import compile_lazily, inline_never
from simulators.taskgraph.graph import Floats

Indices = NDArray[np.uint32]
Words = NDArray[np.uint64]
Flags = NDArray[np.bool_]

MOST_CLASSES = 6  # 8 bits of a 64-bit word for each, so up to 8 would fit
# far below 255, the most that a digit of 8 bits counts: an instant may exceed it before it is checked
_MOST_ACTIVE = np.uint32(32)  # tasks of one class at once
WIDTH = 128  # designs that are taken together: their numbers stay in the nearest cache
_FEW = np.uint64(10)  # designs that take as long one by one as a group of them


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
    # index -1 as an unsigned number: no group, no priority left
    none, unit, zero, inf = np.uint32(0xFFFFFFFF), np.uint32(1), np.uint32(0), np.inf
    classes, resources, uses, laws = size.size, capacity.size, use_res.size, factor.size
    # group numbers: each law names two groups, so there are at most twice as many as laws
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
        # below any rate, so that a class without tasks is never taken for one at its bound
        bound[g] = -1.0  # not active
        if size[g] > zero:
            best = cap[g]  # of one task, as if its class had the machine for itself
            if laws > 0 and group_of[g] != none:
                for s in range(laws):  # factors of several active groups multiply
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
        # rounding: a resource used to exactly its capacity is not short
        over[res] = load[res] > capacity[res] * (1.0 + 1e-11)
        if not over[res] and load[res] > capacity[res] * (1.0 - 1e-11):
            # just saturated: a class with a small demand may get far less than its bound
            for v in range(uses):
                g = use_class[v]
                faint = size[g] * bound[g] * use[v] < 1e-2 * capacity[res]
                over[res] = over[res] or (use_res[v] == res and size[g] > zero and faint)
        contended = contended or over[res]
    if contended:
        # only classes on a short resource need filling; all others keep their bounds
        for v in range(uses):
            g = use_class[v]
            if over[use_res[v]] and size[g] > zero and fresh[g] >= 0.0:  # once, however many short resources it uses
                fresh[g] = -1.0
                unsolved += 1
    while unsolved > 0:
        served = none  # the largest number: any priority is before it
        for g in range(classes):
            if fresh[g] < 0.0 and priority[g] < served:
                served = priority[g]
        num_rising = 0
        for g in range(classes):
            rising[g] = fresh[g] < 0.0 and priority[g] == served
            num_rising += rising[g]
        unsolved -= num_rising
        # progressive filling: all rates rise with their weights until a cap or a resource stops some
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
                    water = min(water, left[res] / demand[res])  # the level at which this resource is exhausted
            limit = water * (1.0 + 1e-12)  # what stops within rounding of this level stops at it, not in a further pass
            for res in range(resources):  # a negative demand marks an exhausted resource
                if over[res] and demand[res] > 0.0 and left[res] <= limit * demand[res]:
                    demand[res] = -1.0
            for g in range(classes):
                if rising[g]:
                    # a class at its bound gets it to the last bit, not the level times its weight
                    full = bound[g] <= limit * weight[g]
                    fresh[g] = bound[g] if full else water * weight[g]
                    for v in range(use_ptr[g], use_ptr[g + unit]):
                        full = full or demand[use_res[v]] < 0.0
                    if full:
                        rising[g] = False
                        num_rising -= 1
                        for v in range(use_ptr[g], use_ptr[g + unit]):
                            res = use_res[v]
                            # rounding must not leave a negative capacity
                            left[res] = max(0.0, left[res] - size[g] * fresh[g] * use[v])
            for res in range(resources):
                if demand[res] < 0.0:
                    left[res] = 0.0  # exactly, so that later priorities get nothing of it


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
    pending = np.empty(tasks, np.uint32)  # predecessors that have not ended
    cap, weight, use, capacity = np.empty(classes), np.empty(classes), np.empty(uses), np.empty(resources)
    # classes: rate, 1 / rate, virtual time, time of its last update, number of active tasks
    rate, pace, virtual, updated = np.empty(classes), np.empty(classes), np.empty(classes), np.empty(classes)
    size = np.empty(classes, np.uint32)
    heap_key, heap_task = np.empty(tasks), np.empty(tasks, np.uint32)  # virtual finish times, a segment per class
    end, is_touched = np.empty(classes), np.empty(classes, np.bool_)  # next end of a class
    # rates that were solved: by a hash of the counts, with the counts and the design that they are of
    entries = np.uint64(128)  # 2 ** 7: the top 7 bits of a hash
    known, known_in = np.zeros(entries, np.uint64), np.full(entries, -1, np.int64)
    solved_rate, solved_pace = np.empty((entries, classes)), np.empty((entries, classes))
    digit = np.empty(classes, np.uint64)
    for g in range(classes):
        digit[g] = np.uint64(1) << np.uint64(8 * g)  # the count of class g is byte g of `counts`
    bound, fresh, rising = np.empty(classes), np.empty(classes), np.empty(classes, np.bool_)
    load, left, demand = np.empty(resources), np.empty(resources), np.empty(resources)
    # scratch of `_solve`, allocated once for all designs
    factor, over = np.empty(laws), np.empty(resources, np.bool_)
    active = np.zeros(2 * laws, np.bool_)  # groups with an active class; a law names two groups
    later_key, later_task = np.empty(tasks), np.empty(tasks, np.uint32)  # heap of delays
    queue, first, last = np.empty(tasks, np.uint32), np.empty(pools, np.uint32), np.empty(pools, np.uint32)
    since, free = np.empty(tasks, np.int64), np.empty(pools, np.int64)
    # one entry to spare: an append writes before it knows whether it counts
    done, ready = np.empty(tasks, np.uint32), np.empty(tasks + 1, np.uint32)
    # tasks of each kind in flight, and since when there are any
    running, begun = np.zeros(kinds, np.int64), np.empty(kinds)
    busy, spent = np.empty(kinds), np.empty(kinds)  # union of the intervals of a kind, and their sum
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
            rate[g] = 0.0  # of an idle class
        end[:] = inf
        is_touched[:] = False
        counts = solved = np.uint64(0)  # counts that the present rates are of
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
        level = peak = cu_s = 0.0  # staged bytes now and at most, and the integral of occupied CUs over time
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
                # `info`: pool, class, work, delay, kind, CUs, staged bytes, consumer, members
                for i in range(num_done):
                    task = done[i]
                    finished[task] = now
                    span = now - issued[task]
                    kind = info[task, 4]
                    running[kind] -= 1
                    if running[kind] == 0:  # the last of its kind: an interval of the union closes
                        busy[kind] += now - begun[kind]
                    spent[kind] += info[task, 8] * span  # a task stands for that many identical ones
                    if info[task, 5] != none:  # tasks that never occupy a CU have no column
                        cu_s += row[info[task, 5]] * span
                    level -= freed_bytes[task]
                    pool = info[task, 0]
                    if pool != none:
                        free[pool] += 1
                    for j in range(succ_ptr[task], succ_ptr[task + unit]):
                        follower = succ[j]
                        pending[follower] -= unit
                        ready[num_ready] = follower
                        # without a branch: written always, counted once no predecessor is left
                        num_ready += pending[follower] == zero
                completed += num_done
                num_done = 0
                # pooled tasks queue in (instant became ready, index) order; other tasks are issued at once
                # a graph without pools needs no queues
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
                                # earlier instants stay ahead; in one instant, lower indices do
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
                        if info[task, 7] != none:  # without a consumer, staged bytes are never freed
                            freed_bytes[info[task, 7]] += row[info[task, 6]]
                    delay, work = row[info[task, 3]], row[info[task, 2]]
                    if delay > 0.0:
                        key = now + delay
                        at = num_later  # sift up
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
                        # virtual time begins anew for an idle class, so that it stays small and keeps its digits
                        if size[g] == zero:
                            virtual[g] = 0.0
                            heap_key[base] = work
                            heap_task[base] = task
                        else:
                            # lazily: a class progresses only when it is touched
                            virtual[g] += rate[g] * (now - updated[g])
                            # in virtual time, keys of running tasks do not change when rates do
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
                    else:  # neither delay nor work: it ends in this instant, which takes another round
                        done[num_done] = task
                        num_done += 1
                num_ready = 0
                if num_done == 0:
                    break
            peak = max(peak, level)

            # ---- the rates of these counts: known, or weighted max-min fair, priority after priority
            # digits of the counts may have overflowed: all that follows would be wrong
            if most > _MOST_ACTIVE:
                break
            if counts != solved:
                solved = counts
                # multiplicative hashing (Knuth, TAOCP 3, 6.4): 2 ** 64 over the golden ratio; 57 = 64 - 7 bits
                entry = (counts * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(57)
                # the same counts of another design have other rates
                if known[entry] != counts or known_in[entry] != design:
                    solves += 1
                    # new counts in more than every fourth instant: memory does not pay
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
                        # a quotient once, a product at each end
                        solved_pace[entry, g] = 1.0 / fresh[g] if fresh[g] > 0.0 else inf
                for g in range(classes):
                    # equal rates need no update, whose rounding would change bits
                    if size[g] > zero and solved_rate[entry, g] != rate[g]:
                        virtual[g] += rate[g] * (now - updated[g])
                        updated[g] = now
                        rate[g] = solved_rate[entry, g]
                        pace[g] = solved_pace[entry, g]
                        is_touched[g] = True
            upcoming = inf
            for g in range(classes):
                if is_touched[g]:
                    # ends of other classes stand: neither their rates nor their first tasks have changed
                    is_touched[g] = False
                    end[g] = inf
                    if size[g] > zero and rate[g] > 0.0:
                        end[g] = updated[g] + (heap_key[class_ptr[g]] - virtual[g]) * pace[g]
                upcoming = min(upcoming, end[g])

            # ---- the next instant, and everything that ends in it
            if num_later > 0:
                upcoming = min(upcoming, later_key[0])
            if upcoming == inf:  # all have ended, or those that are left wait for ever; the status below says which
                break
            now = upcoming
            instant += 1  # counted, because two instants may share one value of the clock
            latest = now + 1e-12 * now  # one canonical instant, as in the event engine
            for g in range(classes):
                if end[g] > latest:
                    continue
                base = class_ptr[g]
                while size[g] > zero:
                    # the next in the heap may end in this instant, too
                    if updated[g] + (heap_key[base] - virtual[g]) * pace[g] > latest:
                        break
                    done[num_done] = heap_task[base]
                    num_done += 1
                    counts -= digit[g]
                    size[g] -= unit
                    if size[g] > zero:  # the last of the heap sifts down from its root
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
                virtual[g] += rate[g] * (now - updated[g])  # at the old rate, which held until now
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
                if work > 0.0:  # the delay is over, and work begins
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
            # insertion sort: a few, often in order; completions then do not depend on classes or heaps
            for i in range(1, num_done):  # in order of their indices
                task, at = done[i], i
                while at > 0 and done[at - 1] > task:
                    done[at] = done[at - 1]
                    at -= 1
                done[at] = task
        if most > _MOST_ACTIVE:
            crowded[design] = True
            running[:] = 0  # abandoned in the middle; a design that ends leaves zeros
            continue
        if completed != tasks:  # a higher priority takes all of a resource for ever
            return 1
        totals[0, design], totals[1, design], totals[2, design] = now, peak, cu_s
        for kind in range(kinds):
            totals[3 + kind, design], totals[3 + kinds + kind, design] = busy[kind], spent[kind]
    return 0


@inline_never
def _solve_together(  # noqa: C901, PLR0912, PLR0913, PLR0917
    numbers: Floats,
    width: np.uint64,
    column_row: np.uint64,
    rate_row: np.uint64,
    pace_row: np.uint64,
    start: np.uint64,
    stop: np.uint64,
    short: Words,
    loads: Floats,
    size: Indices,
    cap_at: Indices,
    weight_at: Indices,
    use_at: Indices,
    capacity_at: Indices,
    factor_at: Indices,
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
    """Rates of the classes in lanes from `start` to `stop`, and what is 1 over them: the numbers of `_solve`.

    Where no resource is short, each class gets its bound, in vector lanes; the other lanes are solved one by one.
    """
    # words of 64 bits throughout: numba turns mixed signs into floats
    none, one, zero, inf = np.uint32(0xFFFFFFFF), np.uint64(1), np.uint64(0), np.inf
    classes, resources = np.uint64(priority.size), np.uint64(capacity.size)
    uses, laws = np.uint64(use_res.size), np.uint64(factor.size)
    for law in range(np.uint64(2) * laws):
        active[law] = False
    for g in range(classes):
        if laws > zero and size[g] > np.uint32(0) and group_of[g] != none:
            active[group_of[g]] = True
    for i in range(resources * width):
        loads[i] = 0.0
    for g in range(classes):
        rate, of_cap = rate_row + g * width, column_row + np.uint64(cap_at[g]) * width
        if size[g] == np.uint32(0):
            for i in range(start, stop):
                numbers[rate + i] = 0.0
            continue
        for i in range(start, stop):
            numbers[rate + i] = numbers[of_cap + i]
        for law in range(laws):
            if slowed[law, 0] == group_of[g] and active[slowed[law, 1]]:
                of_factor = column_row + np.uint64(factor_at[law]) * width
                for i in range(start, stop):
                    numbers[rate + i] *= numbers[of_factor + i]
        count = np.float64(size[g])  # as a float, or lanes would convert it one by one
        for v in range(use_ptr[g], use_ptr[g + one]):
            of_use = column_row + np.uint64(use_at[v]) * width
            of_capacity = column_row + np.uint64(capacity_at[use_res[v]]) * width
            for i in range(start, stop):
                limit, least = numbers[of_capacity + i] / (count * numbers[of_use + i]), numbers[rate + i]
                # as `min` of `_solve`, but a select, which vectorises
                numbers[rate + i] = limit if limit < least else least
        for v in range(use_ptr[g], use_ptr[g + one]):
            of_use, of_load = column_row + np.uint64(use_at[v]) * width, np.uint64(use_res[v]) * width
            for i in range(start, stop):
                loads[of_load + i] += count * numbers[rate + i] * numbers[of_use + i]
    for i in range(start, stop):
        short[i] = zero
    for res in range(resources):
        of_load, of_capacity = res * width, column_row + np.uint64(capacity_at[res]) * width
        for i in range(start, stop):
            # a lane near or above a capacity; `_solve` decides whether it is short indeed
            short[i] |= np.uint64(loads[of_load + i] > numbers[of_capacity + i] * (1.0 - 1e-11))
    for i in range(start, stop):
        if short[i] == zero:  # most lanes: bounds are the rates
            continue
        for res in range(resources):
            capacity[res] = numbers[column_row + np.uint64(capacity_at[res]) * width + i]
        for v in range(uses):
            use[v] = numbers[column_row + np.uint64(use_at[v]) * width + i]
        for law in range(laws):
            factor[law] = numbers[column_row + np.uint64(factor_at[law]) * width + i]
        for g in range(classes):
            weight[g] = numbers[column_row + np.uint64(weight_at[g]) * width + i]
            cap[g] = numbers[column_row + np.uint64(cap_at[g]) * width + i]
        _solve(
            size, cap, weight, use, capacity, factor, use_ptr, use_res, use_class, priority, group_of, slowed, active,
            load, left, demand, over, bound, rising, fresh,
        )  # fmt: skip
        for g in range(classes):
            numbers[rate_row + g * width + i] = fresh[g]
    for g in range(classes):
        rate, pace = rate_row + g * width, pace_row + g * width
        for i in range(start, stop):
            # for all lanes, zero rates included: a select follows, and branches would stop vectorisation
            inverse = 1.0 / numbers[rate + i]
            numbers[pace + i] = inverse if numbers[rate + i] > 0.0 else inf


@inline_never
def _reorder(  # noqa: PLR0913, PLR0917
    numbers: Floats,
    of_design: Words,
    moved: Words,
    order: Words,
    width: np.uint64,
    start: np.uint64,
    stop: np.uint64,
    spare: Floats,
    spare_index: Words,
) -> None:
    """Take the lanes from `start` to `stop` in another order, in the rows that are `moved`."""
    for line in range(np.uint64(moved.size)):
        row = moved[line]
        for i in range(start, stop):
            spare[i] = numbers[row + order[i]]
        for i in range(start, stop):
            numbers[row + i] = spare[i]
    for line in range(np.uint64(3)):  # the three rows of words: design, code of the next ends, solved counts
        row = line * width
        for i in range(start, stop):
            spare_index[i] = of_design[row + order[i]]
        for i in range(start, stop):
            of_design[row + i] = spare_index[i]


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
    other tasks end in some designs than in the first of the group, these become a group of their own. The group that
    is least far takes the next step, so that groups meet again where the same tasks have ended, and become one. What
    goes alone for long, or keeps too many tasks at once, is marked as `crowded`. Returns the number of steps of groups,
    or -1 where tasks wait for ever. Indices are unsigned and arrays flat, for the lanes.
    """
    none, unit, one, zero, inf = np.uint32(0xFFFFFFFF), np.uint32(1), np.uint64(1), np.uint64(0), np.inf
    tasks, classes, resources = np.uint64(num_pred.size), np.uint64(priority.size), np.uint64(capacity_at.size)
    uses, laws, designs = np.uint64(use_res.size), np.uint64(factor_at.size), np.uint64(crowded.size)
    kinds = (np.uint64(totals.size) // designs - np.uint64(3)) // np.uint64(2)
    # one bit of a word for each running task and for each vector of counts: both must be at most 64
    most, places, most_counts = min(np.uint64(WIDTH), designs), np.uint64(48), np.uint64(32)
    width = most + np.uint64(8)
    num_columns, solved_rows = np.uint64(columns.size) // designs, most_counts * classes
    # rows of a number of each lane: now, level, peak, CU-seconds, of each kind, class, place, column and rate that was
    # solved; a row is no power of two, or the cache would hold few of them
    level_row, peak_row, cu_row, busy_row = width, np.uint64(2) * width, np.uint64(3) * width, np.uint64(4) * width
    spent_row = busy_row + kinds * width
    begun_row = spent_row + kinds * width
    virtual_row = begun_row + kinds * width
    updated_row = virtual_row + classes * width
    column_row = updated_row + classes * width
    rate_row = column_row + num_columns * width
    pace_row = rate_row + solved_rows * width
    key_row = pace_row + solved_rows * width
    issued_row = key_row + places * width
    # one array of rows, so that each lane loop runs over one piece of memory
    numbers = np.empty(issued_row + places * width)
    rows = column_row // width
    moved = np.empty(numbers.size // width, np.uint64)  # rows in use whose numbers differ from lane to lane
    # rows of the design in each lane, of what ends there next, and of the counts of which its rates are solved
    code, solved_in, of_design = width, np.uint64(2) * width, np.empty(np.uint64(3) * width, np.uint64)
    order, ends, spare = np.empty(width, np.uint64), np.empty(places * width), np.empty(width)
    spare_index = np.empty(width, np.uint64)
    known, short, loads = np.zeros(most_counts, np.uint64), np.empty(width, np.uint64), np.empty(resources * width)
    # what the designs of a group share; running tasks in order of their indices
    pending, staged = np.empty((most, tasks), np.uint32), np.empty((most, tasks), np.uint32)
    stager = np.empty((most, tasks), np.uint32)  # tasks whose bytes a consumer frees, in the order of their issue
    size, running = np.empty((most, classes), np.uint32), np.empty((most, kinds), np.int64)
    run_task, run_place = np.empty((most, places), np.uint32), np.empty((most, places), np.uint64)
    is_later, free = np.empty((most, places), np.bool_), np.empty((most, places), np.uint64)
    first, last = np.empty(most, np.uint64), np.empty(most, np.uint64)
    num_running, num_frees = np.empty(most, np.uint64), np.empty(most, np.uint64)
    counts, completed, progress = np.empty(most, np.uint64), np.empty(most, np.uint64), np.empty(most, np.uint64)
    mark, alone, entry_of = np.empty(most, np.uint64), np.empty(most, np.uint64), np.empty(most, np.uint64)
    live, unused, is_solved = np.empty(most, np.uint64), np.empty(most, np.uint64), np.empty(most, np.uint64)
    done, done_place = np.empty(tasks, np.uint32), np.empty(tasks, np.uint64)
    ready, is_now = np.empty(tasks + one, np.uint32), np.zeros(classes, np.bool_)
    digit = np.empty(classes, np.uint64)
    for g in range(classes):
        digit[g] = one << (np.uint64(8) * g)  # as in `run`
    stage_ptr = np.zeros(tasks + one, np.uint32)
    token = np.empty(np.uint64(2) * tasks, np.uint64)  # what a task that works, or ended, adds to the mark of a group
    for t in range(np.uint64(2) * tasks):
        # splitmix64 (Steele et al., OOPSLA 2014), so that marks of different groups hardly ever agree
        bits = (t + one) * np.uint64(0x9E3779B97F4A7C15)
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        # Zobrist hashing: the mark of a group is the exclusive or of tokens, in whatever order tasks end
        token[t] = bits ^ (bits >> np.uint64(31))
    for t in range(tasks):
        if info[t, 6] != none and info[t, 7] != none:
            stage_ptr[np.uint64(info[t, 7]) + one] += unit
    freeing, num_freeing = np.empty(tasks, np.uint64), zero  # consumers that free bytes of several tasks
    for t in range(tasks):
        freeing[num_freeing] = t
        num_freeing += np.uint64(stage_ptr[t + one] > unit)
    # counts to offsets (CSR)
    for t in range(tasks):
        stage_ptr[t + one] += stage_ptr[t]
    cap, weight, use, capacity = np.empty(classes), np.empty(classes), np.empty(uses), np.empty(resources)
    bound, fresh, rising = np.empty(classes), np.empty(classes), np.empty(classes, np.bool_)
    load, left, demand = np.empty(resources), np.empty(resources), np.empty(resources)
    factor, over = np.empty(laws), np.empty(resources, np.bool_)
    active = np.zeros(np.uint64(2) * laws, np.bool_)

    num_steps = 0
    block = zero
    while block < designs:
        num_lanes = min(most, designs - block)
        for i in range(num_lanes):
            of_design[i] = block + i
            of_design[code + i] = zero
            of_design[solved_in + i] = one  # bit 0: the rates of no active tasks, which are filled in below
        num_moved = rows
        for line in range(rows):
            moved[line] = line * width
        for i in range(rows * width):
            numbers[i] = 0.0
        for g in range(classes):  # of no active tasks
            for i in range(num_lanes):
                numbers[rate_row + g * width + i] = 0.0
                numbers[pace_row + g * width + i] = inf
        for column in range(num_columns):
            row, differing = column_row + column * width, zero
            for i in range(num_lanes):
                numbers[row + i] = columns[column * designs + block + i]
            for i in range(num_lanes):
                differing += np.uint64(numbers[row + i] != numbers[row])
            moved[num_moved] = row  # a column that is equal in all lanes need not move with them
            num_moved += np.uint64(differing > zero)
        at, num_counts, most_places = zero, one, zero  # entry 0 is for no active tasks
        for t in range(tasks):
            pending[at, t] = num_pred[t]
            staged[at, t] = 0
        size[at, :] = 0
        running[at, :] = 0
        for k in range(places):
            free[at, k] = places - k - one  # a stack, the lowest place on top, so that few rows come into use
        first[at], last[at], num_running[at], num_frees[at] = zero, num_lanes, zero, places
        counts[at] = completed[at] = progress[at] = mark[at] = alone[at] = entry_of[at] = zero
        live[0], num_live, is_solved[at] = at, one, one
        for k in range(most):
            unused[k] = most - k - one
        num_unused = most - one
        num_ready = num_done = num_alike = zero
        begun_at = num_steps
        for t in range(tasks):
            if num_pred[t] == np.uint32(0):
                ready[num_ready] = t
                num_ready += one
        while num_live > zero:
            # ---- the group that is least far
            chosen = zero
            for k in range(one, num_live):
                # the least far first: others wait for it, so that groups can meet and merge
                if progress[live[k]] < progress[live[chosen]]:
                    chosen = k
            at = live[chosen]
            low, high = first[at], last[at]
            num_steps += 1
            num_alike += high - low  # lanes that took this step together, to judge whether lockstep pays

            # ---- where not all designs do alike, the group parts
            differing = zero
            for i in range(low, high):
                # another set of running tasks ends next
                differing += np.uint64(of_design[code + i] != of_design[code + low])
            if differing > zero:
                num_like = high - low - differing
                start, stop = low, high
                while of_design[code + start] == of_design[code + low]:
                    start += one
                while of_design[code + stop - one] != of_design[code + low]:
                    stop -= one
                if start < stop:  # designs that do alike are not side by side
                    front, back = start, low + num_like
                    for i in range(start, stop):
                        if of_design[code + i] == of_design[code + low]:
                            order[front] = i
                            front += one
                        else:
                            order[back] = i
                            back += one
                    # like ones first, each side in its old order
                    _reorder(numbers, of_design, moved[:num_moved], order, width, start, stop, spare, spare_index)
                high = low + num_like
                num_unused -= one
                new = unused[num_unused]
                live[num_live] = new
                num_live += one
                for t in range(tasks):
                    pending[new, t] = pending[at, t]
                    staged[new, t] = staged[at, t]
                for t in range(stage_ptr[tasks]):
                    stager[new, t] = stager[at, t]
                for g in range(classes):
                    size[new, g] = size[at, g]
                for kind in range(kinds):
                    running[new, kind] = running[at, kind]
                for k in range(num_running[at]):
                    run_task[new, k], run_place[new, k] = run_task[at, k], run_place[at, k]
                    is_later[new, k] = is_later[at, k]
                for k in range(places):
                    free[new, k] = free[at, k]
                first[new], last[new], num_running[new] = high, last[at], num_running[at]
                counts[new], completed[new], progress[new] = counts[at], completed[at], progress[at]
                mark[new], num_frees[new], entry_of[new] = mark[at], num_frees[at], entry_of[at]
                # both start to count anew how long they are alone
                is_solved[new], alone[new], alone[at] = is_solved[at], zero, zero
                last[at] = high

            # ---- what ends: work is done, or a delay is over and work begins
            ended_code, still, num_begun = of_design[code + low], zero, zero
            num_active, num_free, solved = num_running[at], num_frees[at], counts[at]
            now_counts, num_ended, state = counts[at], completed[at], mark[at]
            for k in range(num_active):
                task, place = np.uint64(run_task[at, k]), run_place[at, k]
                ends_now, g = (ended_code >> k) & one == one, np.uint64(info[task, 1])  # bit k: the running task k ends
                if ends_now and not is_later[at, k]:
                    now_counts -= digit[g]
                    size[at, g] -= unit
                    is_now[g] = True
                if ends_now and not (  # a delay that is over ends its task only if there is no work
                    is_later[at, k] and numbers[column_row + np.uint64(info[task, 2]) * width + low] > 0.0
                ):
                    done[num_done], done_place[num_done] = task, place
                    num_done += one
                    continue
                if ends_now:
                    order[num_begun] = still  # `order` is free here, and serves as scratch
                    num_begun += one
                    # a task that works, not one that waits: groups that differ in this do not merge
                    state ^= token[tasks + task]
                run_task[at, still], run_place[at, still] = task, place
                is_later[at, still] = is_later[at, k] and not ends_now
                still += one
            num_active = still
            of_rate = rate_row + entry_of[at] * classes * width
            # classes that lose a task progress to now at the rates of until now
            for g in range(classes):
                if is_now[g]:
                    virtual, updated, rate = virtual_row + g * width, updated_row + g * width, of_rate + g * width
                    for i in range(low, high):
                        numbers[virtual + i] += numbers[rate + i] * (numbers[i] - numbers[updated + i])
                        numbers[updated + i] = numbers[i]
            for k in range(num_begun):
                task, place = np.uint64(run_task[at, order[k]]), run_place[at, order[k]]
                work, g = column_row + np.uint64(info[task, 2]) * width, np.uint64(info[task, 1])
                key, virtual, updated = key_row + place * width, virtual_row + g * width, updated_row + g * width
                if size[at, g] == np.uint32(0):
                    for i in range(low, high):
                        numbers[virtual + i] = 0.0
                        numbers[key + i] = numbers[work + i]
                        numbers[updated + i] = numbers[i]
                elif is_now[g]:
                    for i in range(low, high):
                        numbers[key + i] = numbers[virtual + i] + numbers[work + i]
                else:
                    rate = of_rate + g * width
                    for i in range(low, high):
                        numbers[virtual + i] += numbers[rate + i] * (numbers[i] - numbers[updated + i])
                        numbers[key + i] = numbers[virtual + i] + numbers[work + i]
                        numbers[updated + i] = numbers[i]
                is_now[g] = True
                size[at, g] += unit
                now_counts += digit[g]
            progress[at] += num_begun

            # ---- rounds of one instant: completions and newly ready tasks
            is_over = rises = False
            while True:
                for k in range(num_done):
                    task, place = np.uint64(done[k]), done_place[k]
                    kind, members = np.uint64(info[task, 4]), np.float64(info[task, 8])
                    state ^= token[task]
                    running[at, kind] -= 1
                    if place < places:  # tasks without delay and work took no place, and last no time
                        issued, busy = issued_row + place * width, busy_row + kind * width
                        begun, spent = begun_row + kind * width, spent_row + kind * width
                        if running[at, kind] == 0:
                            for i in range(low, high):
                                numbers[busy + i] += numbers[i] - numbers[begun + i]
                        for i in range(low, high):
                            numbers[spent + i] += members * (numbers[i] - numbers[issued + i])
                        if info[task, 5] != none:
                            cus = column_row + np.uint64(info[task, 5]) * width
                            for i in range(low, high):
                                numbers[cu_row + i] += numbers[cus + i] * (numbers[i] - numbers[issued + i])
                        free[at, num_free] = place
                        num_free += one
                    if staged[at, task] > np.uint32(0):
                        # summed in the order of issue, then subtracted at once: the order of `run`, and so its bits
                        for i in range(low, high):
                            spare[i] = 0.0
                        for j in range(staged[at, task]):
                            stage = column_row + np.uint64(info[stager[at, stage_ptr[task] + np.uint32(j)], 6]) * width
                            for i in range(low, high):
                                spare[i] += numbers[stage + i]
                        for i in range(low, high):
                            numbers[level_row + i] -= spare[i]
                        staged[at, task] = 0
                    for j in range(succ_ptr[task], succ_ptr[task + one]):
                        follower = succ[j]
                        pending[at, follower] -= unit
                        ready[num_ready] = follower
                        num_ready += np.uint64(pending[at, follower] == np.uint32(0))
                num_ended += num_done
                num_done = zero
                for k in range(num_ready):
                    task = np.uint64(ready[k])
                    kind = np.uint64(info[task, 4])
                    begun = begun_row + kind * width
                    if running[at, kind] == 0:
                        for i in range(low, high):
                            numbers[begun + i] = numbers[i]
                    running[at, kind] += 1
                    if info[task, 6] != none:
                        stage, rises = column_row + np.uint64(info[task, 6]) * width, True
                        for i in range(low, high):
                            numbers[level_row + i] += numbers[stage + i]
                        consumer = info[task, 7]
                        if consumer != none:
                            stager[at, stage_ptr[consumer] + staged[at, consumer]] = task
                            staged[at, consumer] += unit
                    work = column_row + np.uint64(info[task, 2]) * width
                    delay = column_row + np.uint64(info[task, 3]) * width
                    is_waiting, works = numbers[delay + low] > 0.0, numbers[work + low] > 0.0
                    if not is_waiting and not works:
                        done[num_done], done_place[num_done] = task, places
                        num_done += one
                        continue
                    if num_free == zero:  # `places` tasks run
                        is_over = True  # too many tasks at once
                        break
                    num_free -= one
                    place, g = free[at, num_free], np.uint64(info[task, 1])
                    if place == most_places:  # its first use: from now on its rows move with the lanes
                        moved[num_moved], moved[num_moved + one] = key_row + place * width, issued_row + place * width
                        num_moved += np.uint64(2)
                        most_places += one
                    issued = issued_row + place * width
                    # by index, so that ties end in the order of `run`
                    spot = num_active
                    while spot > zero and run_task[at, spot - one] > task:
                        run_task[at, spot], run_place[at, spot] = run_task[at, spot - one], run_place[at, spot - one]
                        is_later[at, spot] = is_later[at, spot - one]
                        spot -= one
                    run_task[at, spot], run_place[at, spot], is_later[at, spot] = task, place, is_waiting
                    num_active += one
                    for i in range(low, high):
                        numbers[issued + i] = numbers[i]
                    if is_waiting:
                        key = key_row + place * width
                        for i in range(low, high):
                            numbers[key + i] = numbers[i] + numbers[delay + i]
                        continue
                    key, virtual, updated = key_row + place * width, virtual_row + g * width, updated_row + g * width
                    if size[at, g] == np.uint32(0):  # an idle class: as in `run`
                        for i in range(low, high):
                            numbers[virtual + i] = 0.0
                            numbers[key + i] = numbers[work + i]
                            numbers[updated + i] = numbers[i]
                    elif is_now[g]:  # its virtual time is at now already
                        for i in range(low, high):
                            numbers[key + i] = numbers[virtual + i] + numbers[work + i]
                    else:
                        rate = of_rate + g * width
                        for i in range(low, high):
                            numbers[virtual + i] += numbers[rate + i] * (numbers[i] - numbers[updated + i])
                            numbers[key + i] = numbers[virtual + i] + numbers[work + i]
                            numbers[updated + i] = numbers[i]
                    is_now[g] = True
                    size[at, g] += unit
                    now_counts += digit[g]
                    is_over = is_over or size[at, g] > _MOST_ACTIVE  # digits must not overflow
                num_ready = zero
                if num_done == zero or is_over:
                    break
            num_ready = num_done = zero
            if rises:
                for i in range(low, high):  # once an instant, after its rounds: bytes freed in it do not count
                    peak, level = numbers[peak_row + i], numbers[level_row + i]
                    numbers[peak_row + i] = level if level > peak else peak

            # ---- the rates of these counts
            if now_counts != solved and not is_over:
                entry = zero
                while entry < num_counts and known[entry] != now_counts:
                    entry += one
                if entry == num_counts:
                    is_over = num_counts == most_counts  # no entry is left: designs with that many rates are not alike
                    if not is_over:
                        known[entry] = now_counts
                        num_counts += one
                        for g in range(classes):
                            if size[at, g] > np.uint32(0):
                                line = (entry * classes + g) * width
                                moved[num_moved], moved[num_moved + one] = rate_row + line, pace_row + line
                                num_moved += np.uint64(2)
                if not is_over:
                    here, of_new = one << entry, rate_row + entry * classes * width
                    if is_solved[at] & here == zero:  # not solved in all lanes of this group
                        is_solved[at] |= here
                        start, stop = low, high
                        # after a merge, lanes at either side may be solved; only those between are solved again
                        while start < stop and of_design[solved_in + start] & here > zero:
                            start += one
                        while start < stop and of_design[solved_in + stop - one] & here > zero:
                            stop -= one
                        for i in range(start, stop):
                            of_design[solved_in + i] |= here
                        _solve_together(
                            numbers, width, column_row, of_new, pace_row + entry * classes * width, start, stop, short,
                            loads, size[at], cap_at, weight_at, use_at, capacity_at, factor_at, cap, weight, use,
                            capacity, factor, use_ptr, use_res, use_class, priority, group_of, slowed, active, load,
                            left, demand, over, bound, rising, fresh,
                        )  # fmt: skip
                    for g in range(classes):
                        if size[at, g] > np.uint32(0) and not is_now[g]:
                            virtual, updated = virtual_row + g * width, updated_row + g * width
                            rate, new_rate = of_rate + g * width, of_new + g * width
                            for i in range(low, high):
                                changes = numbers[new_rate + i] != numbers[rate + i]
                                passed = numbers[i] - numbers[updated + i]
                                gone = numbers[virtual + i] + numbers[rate + i] * passed
                                # lanes whose rate stays are not updated, as in `run`: equal bits
                                numbers[virtual + i] = gone if changes else numbers[virtual + i]
                                numbers[updated + i] = numbers[i] if changes else numbers[updated + i]
                    entry_of[at] = entry
            for g in range(classes):
                is_now[g] = False

            # ---- the next instant, and what ends in it
            if num_active == zero and not is_over:  # nothing runs: the group is at its end
                if num_ended != tasks:
                    return -1
                for i in range(low, high):
                    totals[of_design[i]] = numbers[i]
                    totals[designs + of_design[i]] = numbers[peak_row + i]
                    totals[np.uint64(2) * designs + of_design[i]] = numbers[cu_row + i]
                for kind in range(kinds):
                    busy, spent = busy_row + kind * width, spent_row + kind * width
                    of_busy = (np.uint64(3) + kind) * designs
                    of_spent = of_busy + kinds * designs
                    for i in range(low, high):
                        totals[of_busy + of_design[i]] = numbers[busy + i]
                        totals[of_spent + of_design[i]] = numbers[spent + i]
            elif not is_over:
                for i in range(low, high):
                    spare[i] = inf
                of_rate, of_pace = entry_of[at] * classes * width + rate_row, entry_of[at] * classes * width + pace_row
                for k in range(num_active):
                    line, key = k * width, key_row + run_place[at, k] * width
                    if is_later[at, k]:
                        for i in range(low, high):
                            # the key of a delay is a time, not a virtual time
                            ended, soonest = numbers[key + i], spare[i]
                            ends[line + i] = ended
                            spare[i] = ended if ended < soonest else soonest
                    else:
                        g = np.uint64(info[run_task[at, k], 1])
                        virtual, updated = virtual_row + g * width, updated_row + g * width
                        rate, pace = of_rate + g * width, of_pace + g * width
                        for i in range(low, high):
                            ended, soonest = (
                                (numbers[updated + i] + (numbers[key + i] - numbers[virtual + i]) * numbers[pace + i]),
                                spare[i],
                            )
                            # the pace of a rate of 0 is infinite; infinity times 0 would be no number
                            ended = ended if numbers[rate + i] > 0.0 else inf
                            ends[line + i] = ended
                            spare[i] = ended if ended < soonest else soonest
                waiting = zero
                for i in range(low, high):
                    waiting += np.uint64(spare[i] == inf)
                    numbers[i] = spare[i]  # row 0 is the clock of each lane
                    spare[i] += 1e-12 * spare[i]
                if waiting > zero:  # in some lane, nothing ends any more
                    return -1
                for i in range(low, high):
                    of_design[code + i] = one  # one running task ends in any case
                if num_active > one:
                    for i in range(low, high):
                        of_design[code + i] = zero
                    for k in range(num_active):
                        line, here = k * width, one << k
                        for i in range(low, high):
                            # bit k in each lane where task k ends in this instant
                            of_design[code + i] |= here if ends[line + i] <= spare[i] else zero
            progress[at] += num_ended - completed[at]
            counts[at], completed[at], mark[at] = now_counts, num_ended, state
            num_running[at], num_frees[at] = num_active, num_free
            alone[at] += one

            # ---- a group that is alone for as long as its designs would take one by one is left to `run`
            lanes = high - low
            if not is_over and num_active > zero:
                # its designs one by one, from their start, take less than the steps that are left
                is_over = alone[at] * _FEW >= lanes * tasks and lanes * tasks < _FEW * (tasks - num_ended)
            if is_over or num_active == zero:
                for i in range(low, high):
                    crowded[of_design[i]] = is_over
                num_live -= one
                live[chosen] = live[num_live]
                unused[num_unused] = at
                num_unused += one
                continue

            # ---- a group that is at the same point becomes one with it
            for k in range(num_live):
                other = live[k]
                # cheap tests first; equal marks may collide, so all is compared below
                if other == at or mark[other] != state or progress[other] != progress[at]:
                    continue
                is_same = num_running[other] == num_active
                for t in range(tasks):
                    is_same &= pending[other, t] == pending[at, t]  # the same tasks have ended
                    is_same &= staged[other, t] == staged[at, t]
                for j in range(num_active):
                    # and the same run, in the same phase
                    is_same &= run_task[other, j] == run_task[at, j] and is_later[other, j] == is_later[at, j]
                for c in range(num_freeing):
                    t = freeing[c]
                    for j in range(stage_ptr[t], stage_ptr[t] + staged[at, t]):
                        # bytes are freed in the order of issue: another order, other bits
                        is_same &= stager[other, j] == stager[at, j]
                if not is_same:
                    continue
                # the numbers of running tasks of the other one move to the places that they have in this one
                start, stop = first[other], last[other]
                for row in (key_row, issued_row):
                    for j in range(num_active):
                        for i in range(start, stop):
                            ends[j * width + i] = numbers[row + run_place[other, j] * width + i]
                    for j in range(num_active):
                        for i in range(start, stop):
                            numbers[row + run_place[at, j] * width + i] = ends[j * width + i]
                # the later one of both moves to the end of the earlier one, and what is between them up
                before = last[at] if first[at] < start else stop
                after, stop = (start, stop) if first[at] < start else (first[at], last[at])
                between, lanes = after - before, stop - after
                if between > zero:
                    for i in range(lanes):
                        order[before + i] = after + i
                    for i in range(between):
                        order[before + lanes + i] = before + i
                    _reorder(numbers, of_design, moved[:num_moved], order, width, before, stop, spare, spare_index)
                    for j in range(num_live):
                        group = live[j]
                        if first[group] >= before and last[group] <= after:
                            first[group] += lanes
                            last[group] += lanes
                first[at] = min(first[at], first[other])
                last[at] = before + lanes
                is_solved[at] &= is_solved[other]  # only rates that all lanes of both have
                alone[at] = zero
                num_live -= one
                live[k] = live[num_live]
                unused[num_unused] = other
                num_unused += one
                break
        block += most
        # fewer than ten lanes to a step in this block: single runs are as fast
        if num_alike < _FEW * np.uint64(num_steps - begun_at):  # so will it be with the others
            for i in range(block, designs):
                crowded[i] = True
            block = designs
    return num_steps
