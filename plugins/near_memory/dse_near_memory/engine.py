"""Requests of a GEMM and of the communication that it triggers, at channels and banks of an HBM, in the order of time.

GEMM      a CU multiplies its tiles in steps, and takes the next ones in the order of launch when they are done; reads
          of a step are issued when the step before it begins (two buffers), and a step begins once they are there.
          Reads go through the last-level cache (`dse_near_memory.cache`), stores too unless they are updates.
          A CU's output leaves when its last step ends
DMA       a command reads a chunk line by line with a window of lines in flight; each line goes over the link, and,
          by symmetry, a line of the next chunk comes in from the neighbour
tracker   counts updates of a region (of a wavefront's tile in a chunk) as they enter the queue of a channel. A
          region that is complete frees its entry; a chunk whose regions are complete starts its command. A set that
          is full evicts the entry used longest ago, whose counts go to memory until its next update
channel   a queue, filled from the streams of the GEMM and of communication by a policy (`dse_near_memory.arbiter`); its
          banks are those of `dse_near_memory.banks`

What every event and every look-up goes through is inlined: a call copies all of `Work`, `State` and `Rules`.
"""

from __future__ import annotations

from dse_near_memory import arbiter, banks, cache, state
from dse_near_memory.state import (
    ACTIVE,
    ADMITTED,
    AFTER,
    AFTER_ALL,
    AFTER_CHUNK,
    ARRIVED,
    BORN,
    BUS,
    COMM,
    COMM_END,
    COMM_READ,
    CREDITED,
    CU_AT,
    CU_COMPUTED,
    CU_FETCH,
    CU_PENDING,
    CU_READY,
    CU_STEP,
    CU_UNIT,
    CU_WAITS,
    DELIVERED,
    DONE,
    ENDED,
    FOUND,
    FROM_GEMM,
    GEMM_AT,
    GEMM_END,
    HOP,
    INCOMING,
    ISSUED,
    LAST,
    LENGTH,
    LINK_FREE,
    LIVE,
    NEVER,
    NEXT,
    NEXT_CU,
    NEXT_UNIT,
    NOW,
    NUM_LINES,
    NUM_SENT,
    OCCUPANCY,
    PACE,
    PEAK,
    PHASE,
    PUSHED,
    READ,
    READS,
    RS_END,
    SEEN,
    SERVED,
    SOURCE,
    SPILLS,
    STAMP,
    STARTS,
    STORE,
    STORED,
    STORES_LEFT,
    SUMS,
    TARGET,
    TARGET_LINES,
    UPDATES,
    WRITES,
    Rules,
    State,
    Work,
)
from simulators.compiled import flat_over, inline_always, inline_never


@inline_never
def _issue_reads(cu: int, w: Work, s: State, r: Rules) -> None:
    """Ask the cache for what a CU reads for its next step, and wait for lines that others have asked for, too."""
    unit, step = s.cu[cu, CU_UNIT], s.cu[cu, CU_FETCH]
    s.cu[cu, CU_PENDING], s.cut[cu, CU_READY] = 0, s.t[NOW] + r.cache_hit
    for need in range(w.need_first[unit], w.need_first[unit + 1]):
        block = w.need_panel[need] * r.steps + step
        for place in range(w.read_first[block], w.read_first[block + 1]):
            if not cache.read(w.read_set[place], w.read_entry[place], w, s, r):
                s.block_left[block] += 1
                arbiter.push(0, w.read_channel[place], w.read_place[place], block, s)
        if s.block_left[block] > 0:
            waiter = cu * r.needs + need - w.need_first[unit]
            # a linked list, whose places count from 1 so that 0 is its end
            s.next_waiting[waiter], s.waiting[block] = s.waiting[block], waiter + 1
            s.cu[cu, CU_PENDING] += 1
        s.cut[cu, CU_READY] = max(s.cut[cu, CU_READY], s.block_at[block])


@inline_never
def _schedule(cu: int, at: float, s: State) -> None:
    """Let a CU have its next event at a time."""
    s.cut[cu, CU_AT] = at
    if at < s.t[GEMM_AT]:
        s.t[GEMM_AT], s.i[NEXT_CU] = at, cu


@inline_always
def _receive(block: int, s: State, r: Rules) -> None:
    """Receive a line of a block; with the last one, CUs that wait for it go on."""
    s.block_left[block] -= 1
    s.block_at[block] = max(s.block_at[block], s.t[LAST])
    if s.block_left[block] > 0:
        return
    waiter, s.waiting[block] = s.waiting[block], 0
    while waiter > 0:
        cu = (waiter - 1) // r.needs
        s.cu[cu, CU_PENDING] -= 1
        s.cut[cu, CU_READY] = max(s.cut[cu, CU_READY], s.block_at[block])
        if s.cu[cu, CU_WAITS] and s.cu[cu, CU_PENDING] == 0:
            _schedule(cu, max(s.cut[cu, CU_COMPUTED], s.cut[cu, CU_READY]), s)
        waiter = s.next_waiting[waiter - 1]


@inline_never
def _issue_stores(first: int, last: int, w: Work, s: State, r: Rules) -> None:
    """Store lines of a wave's output: in the cache, past it in the GPU's own memory, or over the link."""
    for place in range(first, last):
        line = w.store_line[place]
        if w.away[w.chunk[line]]:
            s.t[LINK_FREE] = max(s.t[LINK_FREE], s.t[NOW]) + s.t[PACE]
            s.sent_at[s.i[NUM_SENT]] = s.t[LINK_FREE]
            s.i[NUM_SENT] += 1
        elif r.cached:
            cache.store(line, w, s, r)
        else:
            arbiter.push(1, w.channel[line], w.place[line], line, s)


@inline_never
def _begin_step(cu: int, w: Work, s: State, r: Rules) -> None:
    """Begin to multiply, and fetch for the next step."""
    step, end = s.cu[cu, CU_STEP], s.t[NOW] + w.step_ns[s.cu[cu, CU_UNIT]]
    s.cut[cu, CU_COMPUTED], s.cu[cu, CU_WAITS] = end, 0
    s.cu[cu, CU_FETCH] = step + 1
    if step + 1 < r.steps:
        _issue_reads(cu, w, s, r)
    _schedule(cu, end, s)


@inline_never
def _end_tiles(cu: int, w: Work, s: State, r: Rules) -> None:
    """Store a CU's tiles, and take the next ones; in lockstep, once all CUs have stored theirs."""
    unit = s.cu[cu, CU_UNIT]
    # the first stage ends with the first tiles of any CU: until then the GEMM is alone
    if s.t[OCCUPANCY] < 0:
        arbiter.end_first_stage(w, s, r)
    _issue_stores(w.store_first[unit], w.store_first[unit + 1], w, s, r)
    s.i[DONE] += 1
    s.t[GEMM_END] = s.t[NOW]
    # what the cache holds is dirty for the neighbours until the kernel ends
    if s.i[DONE] == r.units:
        cache.flush(w, s, r)
        _begin_comm(w, s, r)
    s.i[ENDED] += 1
    if not r.lockstep:
        _take_tiles(cu, w, s, r)
    elif s.i[ENDED] == r.cus:
        s.i[ENDED] = 0
        for other in range(r.cus):
            _take_tiles(other, w, s, r)


@inline_never
def _take_tiles(cu: int, w: Work, s: State, r: Rules) -> None:
    """Let a CU begin the next tiles in the order of launch once what their first step reads is there."""
    if s.i[NEXT_UNIT] < r.units:
        s.cu[cu, CU_UNIT], s.cu[cu, CU_STEP], s.cu[cu, CU_FETCH] = s.i[NEXT_UNIT], 0, 0
        s.i[NEXT_UNIT] += 1
        _issue_reads(cu, w, s, r)
        _await_reads(cu, s)


@inline_never
def _await_reads(cu: int, s: State) -> None:
    """Let a CU go on at once if all that its next step reads is there, or when it is."""
    s.cu[cu, CU_WAITS] = 1
    if s.cu[cu, CU_PENDING] == 0:
        _schedule(cu, max(s.t[NOW], s.cut[cu, CU_READY]), s)


@inline_always
def _gemm_event(w: Work, s: State, r: Rules) -> None:
    """A CU has multiplied a step, or what its next one waits for is there."""
    cu = s.i[NEXT_CU]
    s.cut[cu, CU_AT] = s.t[GEMM_AT] = NEVER
    for other in range(r.cus):
        if s.cut[other, CU_AT] < s.t[GEMM_AT]:
            s.t[GEMM_AT], s.i[NEXT_CU] = s.cut[other, CU_AT], other
    if s.cu[cu, CU_WAITS]:
        _begin_step(cu, w, s, r)
        return
    s.cu[cu, CU_STEP] += 1
    if s.cu[cu, CU_STEP] == r.steps:
        _end_tiles(cu, w, s, r)
    else:
        _await_reads(cu, s)


@inline_never
def _begin_comm(w: Work, s: State, r: Rules) -> None:
    """Begin the next step of communication if what it waits for is complete."""
    step = s.i[COMM]
    if s.i[ACTIVE] or step >= len(w.program):
        return
    after, source = w.program[step, AFTER], w.program[step, SOURCE]
    idle = s.i[DONE] == r.units and (r.cached or s.i[STORES_LEFT] == 0)  # else what is dirty is in the cache
    if after == AFTER_CHUNK and not w.program[step, FROM_GEMM] and s.chunk_left[source] > 0:
        return
    if after == AFTER_ALL and not idle:
        return
    s.i[ACTIVE] = 1
    for field in range(ISSUED, NUM_SENT + 1):
        s.i[field] = 0
    target = w.program[step, TARGET]
    s.i[NUM_LINES] = w.chunk_first[source + 1] - w.chunk_first[source]
    s.i[TARGET_LINES] = w.chunk_first[target + 1] - w.chunk_first[target]
    s.t[PACE], s.t[HOP] = w.pace[step], 0.0 if source == target else r.hop  # a sum stays within the GPU
    s.t[STARTS] = NEVER if w.program[step, FROM_GEMM] else s.t[NOW] + r.setup


@inline_never
def _end_comm(w: Work, s: State) -> None:
    """End a step of communication."""
    if w.program[s.i[COMM], PHASE] == 1:
        s.t[RS_END] = s.t[NOW]
    s.t[COMM_END] = s.t[NOW]
    s.i[ACTIVE] = 0
    s.i[COMM] += 1
    s.t[STARTS] = NEVER


@inline_never
def _fetch(w: Work, s: State, r: Rules) -> None:
    """Issue reads of a command as far as its window goes."""
    step = s.i[COMM]
    first, reads = w.chunk_first[w.program[step, SOURCE]], w.program[step, READS]
    while s.i[ISSUED] < s.i[NUM_LINES] and s.i[ISSUED] - s.i[CREDITED] < r.window:
        line = first + s.i[ISSUED]
        s.i[ISSUED] += 1
        for copy in range(reads):  # of a second operand from another row of the bank
            place = w.place[line] + copy * r.banks
            arbiter.push(2, w.channel[line], place, 1 if copy + 1 == reads else 0, s)
        # the chunk came out of the GEMM's stores, or left while it was made
        if reads == 0:
            s.t[LAST] = s.t[NOW]
            _send(s)


@inline_never
def _send(s: State) -> None:
    """Send a line that is there at `LAST` over the link."""
    # the link carries one line after the other
    s.t[LINK_FREE] = max(s.t[LINK_FREE], s.t[LAST]) + s.t[PACE]
    s.sent_at[s.i[NUM_SENT]] = s.t[LINK_FREE]
    s.i[NUM_SENT] += 1


@inline_never
def _deliver(w: Work, s: State, r: Rules) -> None:
    """Receive a line of the neighbour's; as many in all as its target has."""
    s.i[DELIVERED] += 1
    # chunks may differ in size at the sampled channels, so lines come in proportion
    due = s.i[DELIVERED] * s.i[TARGET_LINES] // s.i[NUM_LINES]
    first, sums = w.chunk_first[w.program[s.i[COMM], TARGET]], w.program[s.i[COMM], SUMS]
    while s.i[PUSHED] < due:
        line = first + s.i[PUSHED]
        s.i[PUSHED] += 1
        arbiter.push(2, w.channel[line], w.place[line], -2 - line, s)
        if sums:  # both operands, of which one is in another row of the bank, and the sum
            arbiter.push(2, w.channel[line], w.place[line], 0, s)
            arbiter.push(2, w.channel[line], w.place[line] + r.banks, 0, s)
            arbiter.push(2, w.channel[line], w.place[line], -2 - line, s)


@inline_never
def _spill(channel: int, place: int, s: State, r: Rules) -> None:
    """Move counts of an entry to or from memory: a request of all channels, of which a part is sampled."""
    s.i[SPILLS] += 1
    # the tracker counts lines of all channels, but only the sampled ones are simulated
    if s.i[SPILLS] % r.spill_every == 0:
        arbiter.push(2, channel, place, -1, s)


@inline_never
def _track(line: int, w: Work, s: State, r: Rules) -> None:
    """Count an update of a line's region, in the entry that it has or gets."""
    region, where = w.region[line], w.region_set[w.region[line]]
    s.i[STAMP] += 1
    way, oldest = -1, 0
    for place in range(r.ways):
        if s.entry[where, place] == region:
            way = place
        if s.used[where, place] < s.used[where, oldest]:
            oldest = place
    if way < 0:
        way = oldest
        if s.entry[where, way] >= 0:  # counts of a region that is not complete
            s.spilled[s.entry[where, way]] = 1
            _spill(w.channel[line], w.place[line], s, r)
        else:
            s.i[LIVE] += 1
            s.i[PEAK] = max(s.i[PEAK], s.i[LIVE])
        if s.spilled[region]:
            s.spilled[region] = 0
            _spill(w.channel[line], w.place[line], s, r)
        s.entry[where, way] = region
    s.used[where, way] = s.i[STAMP]
    s.region_left[region] -= 1
    if s.region_left[region] == 0:
        s.entry[where, way] = -1
        s.used[where, way] = 0
        s.i[LIVE] -= 1
        s.chunk_left[w.chunk[line]] -= 1


@inline_always
def _describe(kind: int, tag: int, w: Work, s: State) -> int:
    """Kind of a request, 4 times its phase, and 16 if it is an update: the step may have ended when it is served."""
    if kind < COMM_READ:
        return kind + 16 * (w.store_updates if kind == STORE else 0)
    step = s.i[COMM]
    return kind + 4 * w.program[step, PHASE] + 16 * (w.program[step, UPDATES] if kind == INCOMING and tag < -1 else 0)


@inline_always
def _admit(channel: int, w: Work, s: State, r: Rules) -> None:
    """Fill the queue of a channel; updates are tracked as they enter it."""
    while s.ci[channel, LENGTH] < r.queue:
        stream = arbiter.choose_stream(channel, s, r)
        if stream < 0:
            return
        at, end = arbiter.first_of(stream, channel, s), s.ci[channel, LENGTH]
        tag = s.tag[stream, channel, at]
        s.head[stream, channel] += 1
        kind = stream if stream < 2 else COMM_READ if tag >= 0 else INCOMING
        s.queue_place[channel, end] = s.fifo[stream, channel, at]
        s.queue_kind[channel, end] = _describe(kind, tag, w, s)
        s.queue_tag[channel, end], s.queue_born[channel, end] = tag, s.ci[channel, BORN]
        s.queue_from[channel, end] = s.t[NOW]
        s.t[FOUND] += s.ci[channel, LENGTH]
        s.i[ARRIVED] += 1
        s.ci[channel, BORN] += 1
        s.ci[channel, LENGTH] = end + 1
        s.ci[channel, WRITES] += kind & 1
        s.ci[channel, SEEN] = 0 if stream == 2 else s.ci[channel, SEEN] + 1
        if kind == STORE:
            s.i[STORES_LEFT] -= 1
            if r.tracked:
                _track(tag, w, s, r)
                _begin_comm(w, s, r)
        elif kind == INCOMING and tag < -1:
            if r.tracked and w.program[s.i[COMM], PHASE] == 1:
                _track(-2 - tag, w, s, r)
            s.i[ADMITTED] += 1
            if s.i[ADMITTED] == s.i[TARGET_LINES] * (1 + w.program[s.i[COMM], SUMS]):
                _end_comm(w, s)
                _begin_comm(w, s, r)
        if s.i[STORES_LEFT] == 0:
            s.t[STORED] = max(s.t[STORED], s.t[NOW]) if kind == STORE else s.t[STORED]
            _begin_comm(w, s, r)


@inline_always
def _serve(channel: int, w: Work, s: State, r: Rules) -> None:
    """Let a channel take requests into its queue and serve one."""
    _admit(channel, w, s, r)
    if s.ci[channel, LENGTH] == 0:
        s.ct[channel, NEXT] = NEVER
        return
    banks.refresh(channel, s, r)
    pick = banks.pick(channel, s, r)
    described, tag = s.queue_kind[channel, pick], s.queue_tag[channel, pick]
    kind, phase, updates = described & 3, described >> 2 & 3, described >> 4
    end = banks.use_bank(channel, pick, updates, s, r)
    last = s.ci[channel, LENGTH] - 1
    # the last request fills the gap: order in the queue is by `queue_born`
    for column in (s.queue_place, s.queue_kind, s.queue_tag, s.queue_born):
        column[channel, pick] = column[channel, last]
    s.queue_from[channel, pick] = s.queue_from[channel, last]
    s.ci[channel, LENGTH] = last
    s.ci[channel, WRITES] -= kind & 1
    # the next request may be chosen as soon as the bus is free
    s.ct[channel, NEXT] = s.ct[channel, BUS]
    # tag -1: counts of the tracker, which are no data
    s.counts[SERVED + 3 * kind + phase] += 1 if tag != -1 else 0
    s.t[LAST] = end + r.latency
    if kind == READ:
        _receive(tag, s, r)
    elif kind == COMM_READ and tag == 1:
        _send(s)


@flat_over(arbiter, banks, cache, state)
def run(w: Work, s: State, r: Rules) -> float:
    """Serve all requests of a run; return when the last has been served [ns]."""
    for cu in range(r.cus):
        _take_tiles(cu, w, s, r)
    _begin_comm(w, s, r)
    end = 0.0
    while True:
        channel, at = 0, s.ct[0, NEXT]
        for place in range(1, r.channels):
            if s.ct[place, NEXT] < at:
                channel, at = place, s.ct[place, NEXT]
        credit = delivery = NEVER
        if s.i[ACTIVE]:
            if s.i[CREDITED] < s.i[NUM_SENT]:
                credit = s.sent_at[s.i[CREDITED]]
            if s.i[DELIVERED] < s.i[NUM_SENT]:
                delivery = s.sent_at[s.i[DELIVERED]] + s.t[HOP]
        # five kinds of events; ties go to the GEMM first, so that runs are deterministic
        now = min(at, s.t[GEMM_AT], credit, delivery, s.t[STARTS])
        if now == NEVER:
            return end
        s.t[NOW] = max(now, s.t[NOW])
        if now == s.t[GEMM_AT]:
            _gemm_event(w, s, r)
        elif now == delivery:
            _deliver(w, s, r)
        elif now == credit:
            s.i[CREDITED] += 1
            # a line that has left makes room in the window
            if not w.program[s.i[COMM], FROM_GEMM]:
                _fetch(w, s, r)
        elif now == s.t[STARTS]:
            s.t[STARTS] = NEVER
            _fetch(w, s, r)
        else:
            _serve(channel, w, s, r)
            end = max(end, s.ct[channel, BUS])
