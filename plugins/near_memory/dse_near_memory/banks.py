"""Banks of a channel of DRAM: rows that are open, columns of bank groups, turns of the bus, and refreshes.

Of the requests in its queue a channel serves the one whose column comes first, with a turn of the bus where it writes
after a read or reads after a write; of these a row hit, and of these the oldest: first ready, first come first served
without a queue of its own for writes, as public configurations of GPGPU-Sim have it. A bank opens rows (tRCD, tRP,
tRAS, tWR, tRRD), a bank group takes columns tCCDL apart, updates longer (times of a bank: `simulators.device.dram`).
"""

from __future__ import annotations

from dse_near_memory.state import NEVER, Rules, State
from simulators.compiled import inline_always
from simulators.device import dram, servers

_PICOSECOND = 1e-3  # of the ns in which times are


@inline_always
def column_of(channel: int, place: int, since: float, state: State, rules: Rules) -> float:
    """Return the time from which a request's bank can give its column; negative if its row has to be opened."""
    # the lowest bits of a place are the bank, the rest is the row
    bank = state.banks[channel, place % rules.banks]
    if bank.row == place // rules.banks:
        return dram.column_at(bank.opened, rules.trcd, since)
    # tRC: a row stays open for tRAS, and closing it takes tRP
    cycled = bank.opened + rules.tras + rules.trp
    # after the precharge that follows the last access, and tRRD after the channel's last activation
    opened = dram.activation_at(since, bank.last_use + rules.trp, cycled, state.gates[channel])
    # negative even at time zero, so that the sign tells a row that has to be opened
    return -(opened + rules.trcd) - 1e-9


@inline_always
def bus_at(channel: int, writes: int, state: State, rules: Rules) -> float:
    """Return the time from which the bus takes a read (0) or a write (1)."""
    free = state.channels[channel].bus
    bus = max(state.clock.now, free)
    if state.channels[channel].last_kind == writes:
        return bus
    # the turn counts from the end of the last burst, and not from now
    return max(bus, free + (rules.to_write if writes else rules.to_read))


@inline_always
def pick(channel: int, state: State, rules: Rules) -> int:
    """Choose the request whose column comes first, with a turn of the bus; of these a row hit, and then the oldest."""
    best, best_key, best_born = -1, NEVER, 0
    to_read, to_write = bus_at(channel, 0, state, rules), bus_at(channel, 1, state, rules)
    for slot in range(state.channels[channel].length):
        request = state.queue[channel, slot]
        bus = to_write if request.kind & 1 else to_read
        column = column_of(channel, request.place, request.since, state, rules)
        begin = max(bus, abs(column), state.groups[channel, request.place % rules.groups])
        # of equal times a row hit goes first
        # a picosecond is below any time of DRAM, and above the rounding of nanoseconds
        key = begin + (_PICOSECOND if column < 0 else 0.0)
        if key < best_key or (key == best_key and request.born < best_born):
            best, best_key, best_born = slot, key, request.born
    return best


@inline_always
def refresh(channel: int, state: State, rules: Rules) -> None:
    """Refresh a channel that is due: it closes all rows. One that was due while the channel was idle began in time."""
    due, free = state.channels[channel].refresh, state.channels[channel].bus
    late = max(state.clock.now, free) - due
    if late >= 0:
        # refreshes that fell into an idle time cost nothing: only the last one may still be running
        due += dram.refreshes_before(late, rules.trefi) * rules.trefi
        end = max(due, free) + rules.trfc
        state.channels[channel].refresh, state.channels[channel].bus = due + rules.trefi, end
        state.counts.refreshes += 1
        for place in range(rules.banks):
            bank = state.banks[channel, place]
            bank.row = -1
            # rows are closed when the refresh ends: no precharge follows
            bank.last_use = max(bank.last_use, end - rules.trp)


@inline_always
def use_bank(channel: int, slot: int, state: State, rules: Rules) -> float:
    """Open the row of a request if need be, and take its columns; return when they have passed the bus."""
    request = state.queue[channel, slot]
    place, writes = request.place, request.kind & 1
    column = column_of(channel, place, request.since, state, rules)
    bank, group = state.banks[channel, place % rules.banks], place % rules.groups
    bus = bus_at(channel, writes, state, rules)
    if state.channels[channel].last_kind != writes:
        state.counts.turns += 1
        state.channels[channel].last_kind = writes
    begin = max(bus, abs(column), state.groups[channel, group])
    if column < 0:
        opened = abs(column) - rules.trcd
        # the gate lets rows of one channel open tRRD apart
        servers.serve(state.gates, channel, opened, rules.trrd)
        bank.row, bank.opened = place // rules.banks, opened
        state.counts.activations += 1
    else:
        state.counts.row_hits += 1
    # an update reads, adds and writes its columns within the bank group
    state.groups[channel, group] = begin + (rules.update_group if request.updates else rules.group)
    # a write has to recover (tWR) before its row may close
    bank.last_use = begin + rules.burst + (rules.twr if writes else 0.0)
    state.channels[channel].bus = begin + rules.burst
    return begin + rules.burst
