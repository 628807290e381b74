"""Banks of a channel of DRAM: rows that are open, columns of bank groups, turns of the bus, and refreshes.

Of the requests in its queue a channel serves the one whose column comes first, with a turn of the bus where it writes
after a read or reads after a write; of these a row hit, and of these the oldest: first ready, first come first served
without a queue of its own for writes, as public configurations of GPGPU-Sim have it. A bank opens rows (tRCD, tRP,
tRAS, tWR, tRRD), a bank group takes columns tCCDL apart, updates longer.
"""

from __future__ import annotations

from dse_near_memory.state import (
    ACTIVATIONS,
    BUS,
    GATE,
    LAST_KIND,
    LAST_USE,
    LENGTH,
    NEVER,
    NOW,
    OPENED,
    REFRESH,
    REFRESHES,
    ROW,
    ROW_HITS,
    TURNS,
    Rules,
    State,
)
from simulators.compiled import inline_always


@inline_always
def column_at(channel: int, place: int, since: float, s: State, r: Rules) -> float:
    """Return the time from which a request's bank can give its column; negative if its row has to be opened."""
    bank, row = place % r.banks, place // r.banks
    if s.bank[channel, bank, ROW] == row:
        return max(s.bank[channel, bank, OPENED] + r.trcd, since)
    opened = max(since, s.bank[channel, bank, LAST_USE] + r.trp)
    opened = max(opened, s.bank[channel, bank, OPENED] + r.tras + r.trp)
    # negative even at time zero, so that the sign tells a row that has to be opened
    return -(max(opened, s.ct[channel, GATE]) + r.trcd) - 1e-9


@inline_always
def bus_at(channel: int, writes: int, s: State, r: Rules) -> float:
    """Return the time from which the bus takes a read (0) or a write (1)."""
    bus = max(s.t[NOW], s.ct[channel, BUS])
    if s.ci[channel, LAST_KIND] == writes:
        return bus
    return max(bus, s.ct[channel, BUS] + (r.to_write if writes else r.to_read))


@inline_always
def pick(channel: int, s: State, r: Rules) -> int:
    """Choose the request whose column comes first, with a turn of the bus; of these a row hit, and then the oldest."""
    best, best_key, best_born = -1, NEVER, 0
    to_read, to_write = bus_at(channel, 0, s, r), bus_at(channel, 1, s, r)
    for place in range(s.ci[channel, LENGTH]):
        bus = to_write if s.queue_kind[channel, place] & 1 else to_read
        column = column_at(channel, s.queue_place[channel, place], s.queue_from[channel, place], s, r)
        group = s.group[channel, s.queue_place[channel, place] % r.groups]
        begin = max(bus, abs(column), group)
        # a picosecond: of equal times a row hit goes first
        key = begin + (1e-3 if column < 0 else 0.0)
        born = s.queue_born[channel, place]
        if key < best_key or (key == best_key and born < best_born):
            best, best_key, best_born = place, key, born
    return best


@inline_always
def refresh(channel: int, s: State, r: Rules) -> None:
    """Refresh a channel that is due: it closes all rows. One that was due while the channel was idle began in time."""
    due = s.ct[channel, REFRESH]
    late = max(s.t[NOW], s.ct[channel, BUS]) - due
    if late >= 0:
        due += int(late / r.trefi) * r.trefi
        end = max(due, s.ct[channel, BUS]) + r.trfc
        s.ct[channel, REFRESH], s.ct[channel, BUS] = due + r.trefi, end
        s.counts[REFRESHES] += 1
        for bank in range(r.banks):
            s.bank[channel, bank, ROW] = -1
            # rows are closed when the refresh ends: no precharge follows
            s.bank[channel, bank, LAST_USE] = max(s.bank[channel, bank, LAST_USE], end - r.trp)


@inline_always
def use_bank(channel: int, pick: int, updates: int, s: State, r: Rules) -> float:
    """Open the row of a request if need be, and take its columns; return when they have passed the bus."""
    place, kind = s.queue_place[channel, pick], s.queue_kind[channel, pick]
    column = column_at(channel, place, s.queue_from[channel, pick], s, r)
    bank, group = place % r.banks, place % r.groups
    bus = bus_at(channel, kind & 1, s, r)
    if s.ci[channel, LAST_KIND] != kind & 1:
        s.counts[TURNS] += 1
        s.ci[channel, LAST_KIND] = kind & 1
    begin = max(bus, abs(column), s.group[channel, group])
    if column < 0:
        opened = abs(column) - r.trcd
        s.ct[channel, GATE] = max(s.ct[channel, GATE], opened) + r.trrd
        s.bank[channel, bank, ROW], s.bank[channel, bank, OPENED] = place // r.banks, opened
        s.counts[ACTIVATIONS] += 1
    else:
        s.counts[ROW_HITS] += 1
    # an update reads, adds and writes its columns within the bank group
    s.group[channel, group] = begin + (r.update_group if updates else r.group)
    s.bank[channel, bank, LAST_USE] = begin + r.burst + (r.twr if kind & 1 else 0.0)
    s.ct[channel, BUS] = begin + r.burst
    return begin + r.burst
