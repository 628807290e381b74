"""Kernel of the compiled engine for any number of classes of tasks.

Rates are solved only when a class count changed over an instant, only on resources that are over-subscribed, and only
in the part of the machine that the change can reach; classes progress lazily, when they are touched.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from simulators.compiled import compile_lazily
from simulators.taskgraph.graph import Floats

Indices = NDArray[np.uint32]
_FEW = 1 << 11  # classes of which all are asked anew when a law begins or ends to act; of more, those that it names


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
) -> int:
    """Issue and finish times of each design, and its totals; returns 1 where tasks wait for ever.

    all_issued, all_finished: [B, T], or one row as scratch. totals: rows [3 + 2 kinds, B].
    """
    none = np.uint32(0xFFFFFFFF)  # index -1 as an unsigned number: no pool, no column, no group
    unit = np.uint32(1)
    zero = np.uint32(0)
    tasks, classes, resources = num_pred.size, priority.size, capacity_at.size
    pools, uses, laws = slots.size, use_res.size, factor_at.size
    kinds = (totals.shape[0] - 3) // 2
    inf = np.inf
    pending = np.empty(tasks, np.uint32)  # predecessors that have not ended
    cap, weight, use = np.empty(classes), np.empty(classes), np.empty(uses)
    capacity = np.empty(resources)
    # classes: count, change of count over the instant, rate, 1 / rate, virtual time, time of its last update
    count, change = np.empty(classes, np.int64), np.empty(classes, np.int64)
    rate, pace, virtual, updated = np.empty(classes), np.empty(classes), np.empty(classes), np.empty(classes)
    bound = np.empty(classes)  # rate of a task alone with its class: its cap, or a share of its scarcest resource
    flow = np.empty(classes)  # count * bound
    size = np.empty(classes, np.uint32)  # heap of virtual finish times, one segment per class
    heap_key, heap_task = np.empty(tasks), np.empty(tasks, np.uint32)
    leaves = 1  # tournament of the next ends of classes: the earliest is at the root, class g at leaf `leaves + g`,
    # each with the task that ends
    while leaves < classes:
        leaves *= 2
    soonest, champion, stack = np.empty(2 * leaves), np.empty(2 * leaves, np.uint32), np.empty(128, np.uint32)
    # one entry to spare: an append writes before it knows whether it counts
    touched, is_touched = np.empty(classes + 1, np.uint32), np.zeros(classes, np.bool_)
    shifted, is_shifted = np.empty(classes, np.uint32), np.zeros(classes, np.bool_)
    active = np.zeros(2 * laws, np.int64)  # active classes of each group; a law names two groups
    # laws come by the group that they slow; here also by the one that slows it, and classes by their group
    by_cause, by_group = np.empty(laws, np.uint32), np.empty(classes, np.uint32)
    law_ptr, cause_ptr, member_ptr = (
        np.zeros(2 * laws + 2, np.int64),
        np.zeros(2 * laws + 2, np.int64),
        np.zeros(2 * laws + 2, np.int64),
    )
    for s in range(laws):  # counted two places ahead, so that placing moves each offset to where the next group begins
        law_ptr[slowed[s, 0] + unit] += 1
        cause_ptr[slowed[s, 1] + unit + unit] += 1
    for g in range(classes):
        if group_of[g] != none:
            member_ptr[group_of[g] + unit + unit] += 1
    for place in range(2 * laws + 1):
        law_ptr[place + 1] += law_ptr[place]
        cause_ptr[place + 1] += cause_ptr[place]
        member_ptr[place + 1] += member_ptr[place]
    for s in range(laws):
        by_cause[cause_ptr[slowed[s, 1] + unit]] = s
        cause_ptr[slowed[s, 1] + unit] += 1
    for g in range(classes):
        if group_of[g] != none:
            by_group[member_ptr[group_of[g] + unit]] = g
            member_ptr[group_of[g] + unit] += 1
    flipped = np.empty(classes, np.uint32)  # groups that became active or idle: one for each class at most
    # resources: users, load if all ran at their bounds, and the active uses of each as a linked list
    users, load = np.empty(resources, np.int64), np.empty(resources)
    over, dirty, is_dirty = np.empty(resources, np.bool_), np.empty(resources, np.uint32), np.zeros(resources, np.bool_)
    head, after, before = np.empty(resources, np.uint32), np.empty(uses, np.uint32), np.empty(uses, np.uint32)
    part, in_part = np.empty(resources, np.uint32), np.zeros(resources, np.bool_)
    parties, in_parties = np.empty(classes, np.uint32), np.zeros(classes, np.bool_)
    left, demand, fresh = np.empty(resources), np.empty(resources), np.empty(classes)
    # classes whose rates still rise in progressive filling
    rising = np.empty(classes, np.bool_)
    later_key, later_task = np.empty(tasks), np.empty(tasks, np.uint32)  # heap of delays
    queue, first, last = np.empty(tasks, np.uint32), np.empty(pools, np.uint32), np.empty(pools, np.uint32)
    # instant in which a task became ready, and free slots of each pool
    since, free = np.empty(tasks, np.int64), np.empty(pools, np.int64)
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
            users[resource] = 0
            load[resource] = 0.0
            over[resource] = False
            head[resource] = none
        for v in range(uses):
            use[v] = row[use_at[v]]
        for g in range(classes):
            count[g] = 0
            change[g] = 0
            size[g] = 0
            weight[g] = row[weight_at[g]]
            cap[g] = row[cap_at[g]]
            bound[g] = 0.0
            flow[g] = 0.0
            rate[g] = 0.0
        active[:] = 0
        for pool in range(pools):
            free[pool] = slots[pool]
            first[pool] = pool_ptr[pool]
            last[pool] = pool_ptr[pool]
        for kind in range(kinds):
            busy[kind] = 0.0
            spent[kind] = 0.0
        soonest[:] = inf  # leaves beyond the last class stay at infinity, and never win
        now, instant = 0.0, 0
        level = peak = cu_s = 0.0  # staged bytes now and at most, and the integral of occupied CUs over time
        num_later = num_touched = num_done = completed = num_ready = 0
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
                    if info[task, 5] != none:
                        cu_s += row[info[task, 5]] * span
                    level -= freed_bytes[task]
                    pool = info[task, 0]
                    if pool != none:
                        free[pool] += 1
                    for j in range(succ_ptr[task], succ_ptr[task + unit]):
                        follower = succ[j]
                        pending[follower] -= unit
                        # without a branch: written always, counted once no predecessor is left
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
                        if pool == none or pending[task] > zero:  # it needs no slot, or has one
                            ready[keep] = task
                            keep += 1
                        else:
                            since[task] = instant
                            spot = last[pool]
                            # insertion from the end: earlier instants stay ahead, in one instant lower indices do
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
                    delay, work = 0.0, row[info[task, 2]]
                    if pending[task] == zero:  # else it was issued before its delay
                        issued[task], delay = now, row[info[task, 3]]
                        kind = info[task, 4]
                        if running[kind] == 0:
                            begun[kind] = now
                        running[kind] += 1
                        if info[task, 6] != none:
                            level += row[info[task, 6]]
                            if info[task, 7] != none:  # without a consumer, staged bytes are never freed
                                freed_bytes[info[task, 7]] += row[info[task, 6]]
                    if delay > 0.0:
                        key = now + delay
                        at = num_later
                        num_later += 1
                        while at > 0 and later_key[(at - 1) >> 1] > key:  # sift up
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
                        updated[g] = now
                        change[g] += 1
                        touched[num_touched] = g
                        num_touched += not is_touched[g]
                        is_touched[g] = True
                    else:  # neither delay nor work: it ends in this instant, which takes another round
                        done[num_done] = task
                        num_done += 1
                num_ready = 0
                if num_done == 0:
                    break
            peak = max(peak, level)

            # ---- classes whose count changed, and those that a contention law therefore slows or speeds up
            num_shifted = num_flipped = 0
            for i in range(num_touched):
                g = touched[i]
                delta = change[g]
                if delta == 0:  # as many came as went: rates stay
                    continue
                change[g] = 0
                old = count[g]
                count[g] = old + delta
                is_shifted[g] = True
                shifted[num_shifted] = g
                num_shifted += 1
                # the class itself became active or idle, which may switch its group
                if group_of[g] != none and (old == 0 or count[g] == 0):
                    group = group_of[g]
                    before_it = active[group]
                    active[group] += 1 if old == 0 else -1
                    # the group became active or idle: caps of other groups change
                    if before_it == 0 or active[group] == 0:
                        flipped[num_flipped] = group
                        num_flipped += 1
                for v in range(use_ptr[g], use_ptr[g + unit]):
                    res = use_res[v]
                    users[res] += delta
                    if old == 0:  # the class became active: its uses enter the lists
                        after[v] = head[res]
                        before[v] = none
                        if head[res] != none:
                            before[head[res]] = np.uint32(v)
                        head[res] = np.uint32(v)
                    elif count[g] == 0:  # it became idle: they leave them
                        if before[v] != none:
                            after[before[v]] = after[v]
                        else:
                            head[res] = after[v]
                        if after[v] != none:
                            before[after[v]] = before[v]
            if num_flipped > 0 and classes <= _FEW:
                # which classes the law names is not asked: flips are rare, and an equal bound changes nothing below
                for other in range(classes):
                    if count[other] > 0 and group_of[other] != none and not is_shifted[other]:
                        is_shifted[other] = True
                        shifted[num_shifted] = other
                        num_shifted += 1
                num_flipped = 0
            for i in range(num_flipped):
                for law in range(cause_ptr[flipped[i]], cause_ptr[flipped[i] + unit]):
                    group = slowed[by_cause[law], 0]
                    for member in range(member_ptr[group], member_ptr[group + unit]):
                        other = by_group[member]
                        if count[other] > 0 and not is_shifted[other]:
                            is_shifted[other] = True
                            shifted[num_shifted] = other
                            num_shifted += 1

            # ---- their bounds, and the load of the resources they use
            num_dirty = 0
            for i in range(num_shifted):
                g = shifted[i]
                is_shifted[g] = False
                best = cap[g]
                if group_of[g] != none:  # then there are laws
                    for s in range(law_ptr[group_of[g]], law_ptr[group_of[g] + unit]):
                        if active[slowed[s, 1]] > 0:
                            best *= row[factor_at[s]]
                members = max(count[g], 1)  # an idle class keeps a finite bound, and adds no load
                for v in range(use_ptr[g], use_ptr[g + unit]):
                    best = min(best, capacity[use_res[v]] / (members * use[v]))
                # the last test: filling had held it below its bound, and may do so no longer
                if best != bound[g] or count[g] == 0 or flow[g] != count[g] * best or rate[g] != best:
                    if updated[g] < now and count[g] > 0:  # progress at the old rate, before it is replaced
                        virtual[g] += rate[g] * (now - updated[g])
                        updated[g] = now
                    bound[g] = best
                    rate[g] = best  # until filling says otherwise, for classes on a short resource alone
                    pace[g] = 1.0 / best
                    more = count[g] * best - flow[g]
                    flow[g] = count[g] * best
                    for v in range(use_ptr[g], use_ptr[g + unit]):
                        res = use_res[v]
                        # exactly 0 without users, so that rounding of added differences does not pile up
                        load[res] = load[res] + more * use[v] if users[res] > 0 else 0.0
                        if not is_dirty[res]:
                            is_dirty[res] = True
                            dirty[num_dirty] = res
                            num_dirty += 1
                    touched[num_touched] = g
                    num_touched += not is_touched[g]
                    is_touched[g] = True

            # ---- the part of the machine whose rates can change: resources over-subscribed before or now
            num_part = num_parties = 0
            for i in range(num_dirty):
                res = dirty[i]
                is_dirty[res] = False
                was = over[res]
                # rounding: a resource used to exactly its capacity is not short
                over[res] = load[res] > capacity[res] * (1.0 + 1e-11)
                if not over[res] and load[res] > capacity[res] * (1.0 - 1e-11):
                    # just saturated: a class with a small demand may get far less than its bound, so solve for it
                    use_of = head[res]
                    while use_of != none:
                        if flow[use_class[use_of]] * use[use_of] < 1e-2 * capacity[res]:
                            over[res] = True
                            break
                        use_of = after[use_of]
                if was or over[res]:  # what was short and is no longer releases its users
                    in_part[res] = True
                    part[num_part] = res
                    num_part += 1
            # breadth first: users of those resources, and the short resources that these also use
            i = 0
            while i < num_part:
                use_of = head[part[i]]
                i += 1
                while use_of != none:  # an unsaturated resource couples nothing, and is not followed
                    g = use_class[use_of]
                    if not in_parties[g]:
                        in_parties[g] = True
                        parties[num_parties] = g
                        num_parties += 1
                        for u in range(use_ptr[g], use_ptr[g + unit]):
                            res = use_res[u]
                            if over[res] and not in_part[res]:
                                in_part[res] = True
                                part[num_part] = res
                                num_part += 1
                    use_of = after[use_of]

            # ---- weighted max-min fair rates there, priority after priority (progressive filling)
            if num_parties > 0:
                for i in range(num_part):
                    left[part[i]] = capacity[part[i]]
                for i in range(num_parties):
                    fresh[parties[i]] = -1.0  # below any rate: not yet solved
                unsolved = num_parties
                while unsolved > 0:
                    served = none  # the largest number: any priority is before it
                    for i in range(num_parties):
                        g = parties[i]
                        if fresh[g] < 0.0 and priority[g] < served:
                            served = priority[g]
                    num_rising = 0
                    for i in range(num_parties):
                        g = parties[i]
                        rising[g] = fresh[g] < 0.0 and priority[g] == served
                        if rising[g]:
                            fresh[g] = 0.0
                            num_rising += 1
                    unsolved -= num_rising
                    while num_rising > 0:
                        for i in range(num_part):
                            demand[part[i]] = 0.0
                        rise = inf
                        for i in range(num_parties):
                            g = parties[i]
                            if rising[g]:
                                # what is left until it meets its bound
                                rise = min(rise, (bound[g] - fresh[g]) / weight[g])
                                for v in range(use_ptr[g], use_ptr[g + unit]):
                                    res = use_res[v]
                                    if in_part[res] and over[res]:
                                        demand[res] += count[g] * weight[g] * use[v]
                        for i in range(num_part):
                            res = part[i]
                            if demand[res] > 0.0:
                                rise = min(rise, left[res] / demand[res])
                        # what stops within rounding of this rise stops with it, not in a further pass
                        limit = rise * (1.0 + 1e-12)
                        for i in range(num_part):  # a negative demand marks an exhausted resource
                            res = part[i]
                            if demand[res] > 0.0:
                                tight = left[res] <= limit * demand[res]
                                left[res] = 0.0 if tight else left[res] - rise * demand[res]
                                demand[res] = -1.0 if tight else demand[res]
                        for i in range(num_parties):
                            g = parties[i]
                            if rising[g]:
                                room = bound[g] - fresh[g]
                                full = room <= limit * weight[g]  # at its bound it gets that to the last bit
                                fresh[g] = bound[g] if full else fresh[g] + rise * weight[g]
                                for v in range(use_ptr[g], use_ptr[g + unit]):
                                    res = use_res[v]
                                    if in_part[res] and over[res] and demand[res] < 0.0:
                                        # rising any further would take more than a resource has
                                        full = True
                                if full:
                                    rising[g] = False
                                    num_rising -= 1
                for i in range(num_parties):
                    g = parties[i]
                    in_parties[g] = False
                    if fresh[g] != rate[g]:  # equal rates need no update, whose rounding would change bits
                        if updated[g] < now:
                            virtual[g] += rate[g] * (now - updated[g])
                            updated[g] = now
                        rate[g] = fresh[g]
                        pace[g] = 1.0 / fresh[g] if fresh[g] > 0.0 else inf  # a quotient once, a product at each end
                        touched[num_touched] = g
                        num_touched += not is_touched[g]
                        is_touched[g] = True
            for i in range(num_part):
                in_part[part[i]] = False
            for i in range(num_touched):
                g = touched[i]
                # only classes whose rate or first task changed play again
                is_touched[g] = False
                end = inf
                base = class_ptr[g]
                if count[g] > 0 and rate[g] > 0.0:
                    end = updated[g] + (heap_key[base] - virtual[g]) * pace[g]
                node, best = leaves + np.int64(g), end
                soonest[node], champion[node] = end, heap_task[base]
                while node > 1:  # without branches, which would be unpredictable
                    other = soonest[node ^ 1]
                    # the sibling where it is earlier; ties stay with this class
                    winner = champion[node ^ np.int64(other < best)]
                    best = min(best, other)
                    node >>= 1
                    soonest[node] = best
                    champion[node] = winner
            num_touched = 0

            # ---- the next instant, and everything that ends in it
            upcoming = soonest[1]  # the root
            if num_later > 0:
                upcoming = min(upcoming, later_key[0])
            if upcoming == inf:  # all have ended, or those that are left wait for ever; the status below says which
                break
            now = upcoming
            instant += 1  # counted, because two instants may share one value of the clock
            latest = now + 1e-12 * now  # one canonical instant, as in the event engine
            height, top = 0, np.int64(1)
            while soonest[top] <= latest:  # down from the root, into each part that holds an end of this instant
                task = champion[top]
                g = info[task, 1]
                node = leaves + np.int64(g)
                while node > top:  # rare: other parts of the tournament that end in this instant
                    if soonest[node ^ 1] <= latest:
                        stack[height] = np.uint32(node ^ 1)
                        height += 1
                    node >>= 1
                base = class_ptr[g]
                while True:  # further tasks of the class may end in the instant, too
                    done[num_done] = task
                    num_done += 1
                    change[g] -= 1
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
                    if size[g] == zero or updated[g] + (heap_key[base] - virtual[g]) * pace[g] > latest:
                        break
                    task = heap_task[base]
                if size[g] > zero:  # what is left has progressed at the rate that held until now
                    virtual[g] += rate[g] * (now - updated[g])
                    updated[g] = now
                touched[num_touched] = g
                num_touched += not is_touched[g]
                is_touched[g] = True
                if height == 0:
                    break
                height -= 1
                top = np.int64(stack[height])
            while num_later > 0 and later_key[0] <= latest:  # delays that are over
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
                if row[info[task, 2]] > 0.0:
                    pending[task] = none  # its work begins in the next round
                    ready[num_ready] = task
                    num_ready += 1
                else:
                    done[num_done] = task
                    num_done += 1
        if completed != tasks:  # a higher priority takes all of a resource for ever
            return 1
        totals[0, design], totals[1, design], totals[2, design] = now, peak, cu_s
        for kind in range(kinds):
            totals[3 + kind, design], totals[3 + kinds + kind, design] = busy[kind], spent[kind]
    return 0
