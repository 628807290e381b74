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

With step s of a CU's unit, all times in ns:

    computed(s)  begin(s) + step_ns
    begin(s + 1) max(computed(s), arrival of the last line of each block that the step reads)
    left(n)      max(left(n - 1), line n is there) + pace        of the link, line by line
    incoming(n)  left(n) + hop

State is records by name (`dse_near_memory.state`); the cache and the tracker, rings, servers and what acts next are of
`simulators.device`. What every event and every look-up goes through is inlined: a call copies all of `Work`, `State`
and `Rules`.
"""

from __future__ import annotations

from dse_near_memory import arbiter, banks, cache
from dse_near_memory import state as fields
from dse_near_memory.state import (
    AFTER_ALL,
    AFTER_CHUNK,
    COMM,
    COMM_READ,
    COUNTS_OF_TRACKER,
    INCOMING,
    LAST_READ,
    NEVER,
    NO_LINE,
    READ,
    READS,
    REDUCE_SCATTER,
    STORE,
    STORES,
    Rules,
    State,
    Work,
)
from simulators.compiled import flat_over, inline_always, inline_never
from simulators.device import PARTS, events, lru


@inline_always
def _tag_of_line(line: int) -> int:
    """Tag of a line that comes in; of such a tag, the line."""
    # below the tags that stand for no line
    return -2 - line


@inline_never
def _issue_reads(cu: int, work: Work, state: State, rules: Rules) -> None:
    """Ask the cache for what a CU reads for its next step, and wait for lines that others have asked for, too."""
    unit, step = state.cus[cu].unit, state.cus[cu].fetch
    # even if all is in the cache, a hit takes its time
    state.cus[cu].pending, state.cus[cu].ready = 0, state.clock.now + rules.cache_hit
    for need in range(work.need_first[unit], work.need_first[unit + 1]):
        # blocks of a panel are next to each other, one for each step of k
        block = work.need_panel[need] * rules.steps + step
        for line in range(work.read_first[block], work.read_first[block + 1]):
            # the cache notes the line at once: CUs that ask later wait for the same request
            if not cache.read(work.read_set[line], work.read_entry[line], work, state, rules):
                state.blocks[block].left += 1
                arbiter.push(READS, work.read_channel[line], work.read_place[line], block, state)
        if state.blocks[block].left > 0:
            waiter = cu * rules.needs + need - work.need_first[unit]
            # a linked list, whose places count from 1 so that 0 is its end
            state.next_waiting[waiter], state.blocks[block].waiting = state.blocks[block].waiting, waiter + 1
            state.cus[cu].pending += 1
        state.cus[cu].ready = max(state.cus[cu].ready, state.blocks[block].arrived)


@inline_never
def _schedule(cu: int, at: float, state: State) -> None:
    """Let a CU have its next event at a time."""
    state.cus[cu].next = at
    # of equal times the one that was scheduled first stays the next
    if at < state.gemm.next:
        state.gemm.next, state.gemm.next_cu = at, cu


@inline_always
def _receive(block: int, state: State, rules: Rules) -> None:
    """Receive a line of a block; with the last one, CUs that wait for it go on."""
    state.blocks[block].left -= 1
    # requests of a block return in any order
    state.blocks[block].arrived = max(state.blocks[block].arrived, state.clock.last)
    if state.blocks[block].left > 0:
        return
    waiter = state.blocks[block].waiting
    state.blocks[block].waiting = 0
    while waiter > 0:
        cu = (waiter - 1) // rules.needs
        state.cus[cu].pending -= 1
        state.cus[cu].ready = max(state.cus[cu].ready, state.blocks[block].arrived)
        if state.cus[cu].waits and state.cus[cu].pending == 0:
            # neither before its step is computed, nor before its reads are there
            _schedule(cu, max(state.cus[cu].computed, state.cus[cu].ready), state)
        waiter = state.next_waiting[waiter - 1]


@inline_always
def _put_on_link(pace: float, there: float, state: State) -> None:
    """Send a line that is there at a time over the link, which carries one line after the other."""
    transfer = state.transfer
    # the last line before it has to be off the link
    transfer.link_free = max(transfer.link_free, there) + pace
    state.sent_at[transfer.sent] = transfer.link_free
    transfer.sent += 1


@inline_never
def _issue_stores(first: int, last: int, work: Work, state: State, rules: Rules) -> None:
    """Store lines of a wave's output: in the cache, past it in the GPU's own memory, or over the link."""
    for place in range(first, last):
        line = work.store_line[place]
        # the neighbour's chunk never touches this GPU's memory
        if work.away[work.chunk[line]]:
            _put_on_link(state.transfer.pace, state.clock.now, state)
        elif rules.cached:
            cache.store(line, work, state, rules)
        else:
            arbiter.push(STORES, work.channel[line], work.place[line], line, state)


@inline_never
def _begin_step(cu: int, work: Work, state: State, rules: Rules) -> None:
    """Begin to multiply, and fetch for the next step."""
    step, end = state.cus[cu].step, state.clock.now + work.step_ns[state.cus[cu].unit]
    state.cus[cu].computed, state.cus[cu].waits = end, 0
    state.cus[cu].fetch = step + 1
    if step + 1 < rules.steps:
        _issue_reads(cu, work, state, rules)
    _schedule(cu, end, state)


@inline_never
def _end_tiles(cu: int, work: Work, state: State, rules: Rules) -> None:
    """Store a CU's tiles, and take the next ones; in lockstep, once all CUs have stored theirs."""
    unit = state.cus[cu].unit
    # the first stage ends with the first tiles of any CU: until then the GEMM is alone
    if state.arbiter.occupancy < 0:
        arbiter.end_first_stage(work, state, rules)
    _issue_stores(work.store_first[unit], work.store_first[unit + 1], work, state, rules)
    state.gemm.done += 1
    state.gemm.end = state.clock.now
    # what the cache holds is dirty for the neighbours until the kernel ends
    if state.gemm.done == rules.units:
        cache.flush(work, state)
        _begin_comm(work, state, rules)
    state.gemm.ended += 1
    if not rules.lockstep:
        _take_tiles(cu, work, state, rules)
    # the last CU of the round releases all of them
    elif state.gemm.ended == rules.cus:
        state.gemm.ended = 0
        for other in range(rules.cus):
            _take_tiles(other, work, state, rules)


@inline_never
def _take_tiles(cu: int, work: Work, state: State, rules: Rules) -> None:
    """Let a CU begin the next tiles in the order of launch once what their first step reads is there."""
    if state.gemm.next_unit < rules.units:
        state.cus[cu].unit, state.cus[cu].step, state.cus[cu].fetch = state.gemm.next_unit, 0, 0
        state.gemm.next_unit += 1
        _issue_reads(cu, work, state, rules)
        _await_reads(cu, state)


@inline_never
def _await_reads(cu: int, state: State) -> None:
    """Let a CU go on at once if all that its next step reads is there, or when it is."""
    # `waits` first: a line that arrives later schedules the CU
    state.cus[cu].waits = 1
    if state.cus[cu].pending == 0:
        _schedule(cu, max(state.clock.now, state.cus[cu].ready), state)


@inline_always
def _gemm_event(work: Work, state: State, rules: Rules) -> None:
    """A CU has multiplied a step, or what its next one waits for is there."""
    cu = state.gemm.next_cu
    state.cus[cu].next = NEVER
    state.gemm.next_cu = events.earliest(state.cus.next, 0, rules.cus)
    state.gemm.next = state.cus[state.gemm.next_cu].next
    if state.cus[cu].waits:
        _begin_step(cu, work, state, rules)
        return
    state.cus[cu].step += 1
    if state.cus[cu].step == rules.steps:
        _end_tiles(cu, work, state, rules)
    else:
        _await_reads(cu, state)


@inline_never
def _begin_comm(work: Work, state: State, rules: Rules) -> None:
    """Begin the next step of communication if what it waits for is complete."""
    transfer = state.transfer
    if transfer.active or transfer.step >= len(work.program):
        return
    step = work.program[transfer.step]
    # else what is dirty is in the cache
    idle = state.gemm.done == rules.units and (rules.cached or state.gemm.stores_left == 0)
    # chunks that come from the GEMM's stores are sent while they are made
    if step.after == AFTER_CHUNK and not step.from_gemm and state.chunk_left[step.source] > 0:
        return
    if step.after == AFTER_ALL and not idle:
        return
    transfer.active = 1
    transfer.issued = transfer.credited = transfer.delivered = transfer.pushed = transfer.admitted = transfer.sent = 0
    transfer.lines = work.chunk_first[step.source + 1] - work.chunk_first[step.source]
    transfer.target_lines = work.chunk_first[step.target + 1] - work.chunk_first[step.target]
    # a sum stays within the GPU
    transfer.pace, transfer.hop = step.pace, 0.0 if step.source == step.target else rules.hop
    # lines from the GEMM need no command; a command takes its set-up time
    transfer.starts = NEVER if step.from_gemm else state.clock.now + rules.setup


@inline_never
def _end_comm(work: Work, state: State) -> None:
    """End a step of communication."""
    transfer = state.transfer
    if work.program[transfer.step].phase == REDUCE_SCATTER:
        transfer.reduced = state.clock.now
    transfer.end = state.clock.now
    transfer.active = 0
    transfer.step += 1
    transfer.starts = NEVER


@inline_never
def _fetch(work: Work, state: State, rules: Rules) -> None:
    """Issue reads of a command as far as its window goes."""
    transfer = state.transfer
    step = work.program[transfer.step]
    # a line makes room when it has left over the link
    while transfer.issued < transfer.lines and transfer.issued - transfer.credited < rules.window:
        line = work.chunk_first[step.source] + transfer.issued
        transfer.issued += 1
        for copy in range(step.reads):  # of a second operand from another row of the bank
            place = work.place[line] + copy * rules.banks
            # the line leaves with the last of its reads
            tag = LAST_READ if copy + 1 == step.reads else NO_LINE
            arbiter.push(COMM, work.channel[line], place, tag, state)
        # the chunk came out of the GEMM's stores, or left while it was made
        if step.reads == 0:
            state.clock.last = state.clock.now
            _put_on_link(transfer.pace, state.clock.last, state)


@inline_never
def _deliver(work: Work, state: State, rules: Rules) -> None:
    """Receive a line of the neighbour's; as many in all as its target has."""
    transfer = state.transfer
    transfer.delivered += 1
    step = work.program[transfer.step]
    # chunks may differ in size at the sampled channels, so lines come in proportion
    due = transfer.delivered * transfer.target_lines // transfer.lines
    while transfer.pushed < due:
        line = work.chunk_first[step.target] + transfer.pushed
        channel, place, tag = work.channel[line], work.place[line], _tag_of_line(line)
        transfer.pushed += 1
        arbiter.push(COMM, channel, place, tag, state)
        if step.sums:  # both operands, of which one is in another row of the bank, and the sum
            arbiter.push(COMM, channel, place, NO_LINE, state)
            arbiter.push(COMM, channel, place + rules.banks, NO_LINE, state)
            arbiter.push(COMM, channel, place, tag, state)


@inline_never
def _spill(channel: int, place: int, state: State, rules: Rules) -> None:
    """Move counts of an entry to or from memory: a request of all channels, of which a part is sampled."""
    state.tracker.spills += 1
    # the tracker counts lines of all channels, but only the sampled ones are simulated
    if state.tracker.spills % rules.spill_every == 0:
        arbiter.push(COMM, channel, place, COUNTS_OF_TRACKER, state)


@inline_never
def _track(line: int, work: Work, state: State, rules: Rules) -> None:
    """Count an update of a line's region, in the entry that it has or gets."""
    region, tracker = work.region[line], state.tracker
    first = work.region_set[region] * rules.ways
    # ever larger: the order in which entries were used
    tracker.stamp += 1
    way = lru.find_way(state.entry, first, rules.ways, region)
    if way < 0:
        way = lru.oldest_way(state.used, first, rules.ways)
        if state.entry[first + way] >= 0:  # counts of a region that is not complete
            state.spilled[state.entry[first + way]] = 1
            _spill(work.channel[line], work.place[line], state, rules)
        else:
            tracker.live += 1
            tracker.peak = max(tracker.peak, tracker.live)
        # its counts come back from memory, which is one more request
        if state.spilled[region]:
            state.spilled[region] = 0
            _spill(work.channel[line], work.place[line], state, rules)
        state.entry[first + way] = region
    state.used[first + way] = tracker.stamp
    state.region_left[region] -= 1
    if state.region_left[region] == 0:
        state.entry[first + way] = -1
        state.used[first + way] = 0
        tracker.live -= 1
        # a chunk is complete when its last region is
        state.chunk_left[work.chunk[line]] -= 1


@inline_always
def _enqueue(channel: int, stream: int, work: Work, state: State) -> int:
    """Move the first request of a stream to the end of a channel's queue; return its place there."""
    came = state.waiting[stream, channel, arbiter.first_place(stream, channel, state)]
    slot = state.channels[channel].length
    request = state.queue[channel, slot]
    request.place, request.tag, request.born = came.place, came.tag, state.channels[channel].born
    request.kind, request.phase, request.updates = stream, 0, work.store_updates if stream == STORES else 0
    # reads and writes of communication share a stream: the tag separates them
    if stream == COMM:
        request.kind = COMM_READ if came.tag >= 0 else INCOMING
        # the step may have ended when it is served
        step = work.program[state.transfer.step]
        request.phase, request.updates = step.phase, step.updates if came.tag < COUNTS_OF_TRACKER else 0
    request.since = state.clock.now
    state.streams[stream, channel].head += 1
    state.channels[channel].born += 1
    state.channels[channel].length = slot + 1
    state.channels[channel].writes += request.kind & 1
    state.channels[channel].since_comm = 0 if stream == COMM else state.channels[channel].since_comm + 1
    # `found` places were taken when this request came: the mean is what T3's rule uses
    state.arbiter.found += slot
    state.arbiter.arrived += 1
    return slot


@inline_always
def _admit(channel: int, work: Work, state: State, rules: Rules) -> None:
    """Fill the queue of a channel; updates are tracked as they enter it."""
    while state.channels[channel].length < rules.queue:
        stream = arbiter.choose_stream(channel, state, rules)
        if stream < 0:
            return
        slot = _enqueue(channel, stream, work, state)
        kind, tag = state.queue[channel, slot].kind, state.queue[channel, slot].tag
        if kind == STORE:
            state.gemm.stores_left -= 1
            if rules.tracked:
                # counted on entering the queue, as the address is known then
                _track(tag, work, state, rules)
                _begin_comm(work, state, rules)
        elif kind == INCOMING and tag < COUNTS_OF_TRACKER:
            step = work.program[state.transfer.step]
            if rules.tracked and step.phase == REDUCE_SCATTER:
                _track(_tag_of_line(tag), work, state, rules)
            state.transfer.admitted += 1
            # a line that is summed comes twice: as it is, and as the sum
            if state.transfer.admitted == state.transfer.target_lines * (1 + step.sums):
                _end_comm(work, state)
                _begin_comm(work, state, rules)
        if state.gemm.stores_left == 0:
            if kind == STORE:
                state.gemm.stored = max(state.gemm.stored, state.clock.now)
            _begin_comm(work, state, rules)


@inline_always
def _serve(channel: int, work: Work, state: State, rules: Rules) -> None:
    """Let a channel take requests into its queue and serve one."""
    _admit(channel, work, state, rules)
    if state.channels[channel].length == 0:
        state.channels[channel].next = NEVER
        return
    banks.refresh(channel, state, rules)
    slot = banks.pick(channel, state, rules)
    request = state.queue[channel, slot]
    # read before the slot is filled again
    kind, tag, phase = request.kind, request.tag, request.phase
    end = banks.use_bank(channel, slot, state, rules)
    last = state.channels[channel].length - 1
    # the last request fills the gap: order in the queue is by `born`
    state.queue[channel, slot] = state.queue[channel, last]
    state.channels[channel].length = last
    state.channels[channel].writes -= kind & 1
    # the next request may be chosen as soon as the bus is free
    state.channels[channel].next = state.channels[channel].bus
    # counts of the tracker are no data
    state.served[kind, phase] += 1 if tag != COUNTS_OF_TRACKER else 0
    # the data is there after the latency of the path back
    state.clock.last = end + rules.latency
    if kind == READ:
        _receive(tag, state, rules)
    elif kind == COMM_READ and tag == LAST_READ:
        _put_on_link(state.transfer.pace, state.clock.last, state)


@inline_always
def _left_at(line: int, state: State) -> float:
    """Time at which a line of the step has left over the link, by its number; `NEVER` if it is not sent yet."""
    transfer = state.transfer
    return state.sent_at[line] if transfer.active and line < transfer.sent else NEVER


@flat_over(arbiter, banks, cache, fields, *PARTS)
def run(work: Work, state: State, rules: Rules) -> float:
    """Serve all requests of a run; return when the last has been served [ns]."""
    for cu in range(rules.cus):
        _take_tiles(cu, work, state, rules)
    _begin_comm(work, state, rules)
    transfer, end = state.transfer, 0.0
    while True:
        channel = events.earliest(state.channels.next, 0, rules.channels)
        at = state.channels[channel].next
        credit, delivery = _left_at(transfer.credited, state), _left_at(transfer.delivered, state) + transfer.hop
        # five kinds of events; ties go to the GEMM first, so that runs are deterministic
        now = min(at, state.gemm.next, credit, delivery, transfer.starts)
        if now == NEVER:
            return end
        # time never goes back
        state.clock.now = max(now, state.clock.now)
        if now == state.gemm.next:
            _gemm_event(work, state, rules)
        elif now == delivery:
            _deliver(work, state, rules)
        elif now == credit:
            transfer.credited += 1
            # a line that has left makes room in the window
            if not work.program[transfer.step].from_gemm:
                _fetch(work, state, rules)
        elif now == transfer.starts:
            transfer.starts = NEVER
            _fetch(work, state, rules)
        else:
            _serve(channel, work, state, rules)
            end = max(end, state.channels[channel].bus)
