"""Small memory systems and traces for the request-by-request engine, and an oracle of each of its parts.

The oracles share no code with the engine: lists and dictionaries, one request after another.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dse_memory import engine
from dse_memory.policy import Policy
from dse_memory.simulation import SimulatedCost, Simulation
from simulators.hardware.memory_system import MemorySystem
from simulators.hardware.parts import Dram
from tests.support import merged, shipped

POLICIES = {name: Policy.model_validate(tree) for name, tree in shipped("policy").items()}
LINE = 64
APART_NS = 4000  # longer than anything that a single request waits for
NEVER = {"trefi_s": 1e-3}

COUNTS = {name: getattr(engine, name) for name in (
    "REQUESTS", "L1_HITS", "L1_MERGED", "L1_STALLS", "L1_BYPASSED", "L2_HITS", "L2_MERGED", "L2_MISSES", "L2_STALLS",
    "L2_BYPASSED", "PREDICTED", "USELESS", "EVICTED", "RINSED", "READS", "WRITES", "ROW_HITS", "ACTIVATIONS", "TURNS",
)}  # fmt: skip


class Request(NamedTuple):
    """A request of a CU: a whole line by its number. at: ns before which it is not made."""

    line: int
    store: bool = False
    pc: int = 0
    at: int = 0


def system(*, first: tuple[int, int] = (4, 2), second: tuple[int, int] = (64, 4), **sections: Any) -> MemorySystem:
    """The shipped system with one CU and one channel of 32 GB/s, and values of its sections put over it.

    first, second: sets and ways of an L1, and of a slice of L2.
    """
    tree = shipped("system")["gem5_gcn3"]
    gpu = tree["gpu"]
    merged(gpu, {"num_cus": 1, "in_flight": 1, "dram": {"channels": 1}, "mapping": {"bank_xor": False}})
    merged(gpu, {**sections.pop("gpu", {}), **sections})
    channels = gpu["dram"]["channels"]
    if "bytes_per_s" not in sections.get("dram", {}):
        gpu["dram"]["bytes_per_s"] = 32e9 * channels
    gpu["l1"] |= {"bytes": first[0] * first[1] * LINE, "ways": first[1]}
    gpu["l2"] |= {"bytes": second[0] * second[1] * LINE * channels, "ways": second[1]}
    return MemorySystem.model_validate(tree)


def immediate(**sections: Any) -> dict[str, Any]:
    """Sections of a system in which nothing but DRAM takes time, and no refresh comes."""
    free = {
        "gpu": {"cycle_s": 1e-15, "in_flight": 4096},
        "l1": {"hit_s": 0.0},
        "l2": {"hop_s": 0.0, "hit_s": 0.0, "lookup_s": 0.0, "fill_s": 0.0},
        "dram": {"hop_s": 0.0, **NEVER},
    }
    return {**merged(free, sections)}


def machine(of: MemorySystem, policy: str | Policy = "cache_r", **how: Any) -> Simulation:
    """One that has run nothing."""
    return Simulation(of, POLICIES[policy] if isinstance(policy, str) else policy, **{"held": 1, **how})


def replay(on: Simulation, *traces: Iterable[Request]) -> SimulatedCost:
    """Make the requests of each CU; those of whom there is no trace make none."""
    lists = [list(trace) for trace in traces]
    rows = [(access.line * LINE, LINE, access.pc, int(access.store), access.at) for trace in lists for access in trace]
    sizes = [len(trace) for trace in lists] + [0] * (on.system.gpu.num_cus - len(lists))
    begins = np.cumsum([0, *sizes]).astype(np.int64)
    return on.replay("trace", np.array(rows, np.int64).reshape(-1, 5), begins)


def serial(requests: Iterable[tuple[int, bool] | int]) -> list[Request]:
    """Requests so far apart that nothing is under way when one is made."""
    pairs = [(request, False) if isinstance(request, int) else request for request in requests]
    return [Request(line, store, at=place * APART_NS) for place, (line, store) in enumerate(pairs)]


def loads(lines: Iterable[int]) -> list[Request]:
    """As fast as they can be made."""
    return [Request(int(line)) for line in lines]


def counts(cost: SimulatedCost) -> dict[str, int]:
    """Totals by name."""
    return {name: int(cost.totals[place]) for name, place in COUNTS.items()}


def by_channel(on: Simulation) -> NDArray[np.int64]:
    """Reads, writes, row hits and activations of each channel."""
    return on.part("by_channel").reshape(-1, 4).astype(np.int64)


# Where lines are


def divided(number: int, by: int) -> int:
    """The remainder of polynomials over GF(2)."""
    while number.bit_length() >= by.bit_length():
        number ^= by << (number.bit_length() - by.bit_length())
    return number


# Of degree 1 to 7, the least that no polynomial of a lower degree divides.
IRREDUCIBLE = [0b11, 0b111, 0b1011, 0b10011, 0b100101, 0b1000011, 0b10000011]


def placed(line: int, of: MemorySystem) -> tuple[int, int]:
    """The channel of a line, and its number there."""
    channels, lines, hashed = of.gpu.dram.channels, of.gpu.mapping.interleave_bytes // LINE, of.gpu.mapping.channel_hash
    chunk, within = divmod(line, lines)
    high, channel = divmod(chunk, channels)
    bits, turn, bits_left = max(1, (channels - 1).bit_length()), 0, high
    if hashed == "polynomial":
        turn = divided(high << bits, IRREDUCIBLE[bits - 1])
    while hashed == "xor" and bits_left:
        turn, bits_left = turn ^ (bits_left % 2**bits), bits_left // 2**bits
    turned = channel ^ turn if channels == 2**bits else (channel + turn) % channels
    return turned, high * lines + within


def set_of(local: int, sets: int, index: str) -> int:
    """The set of a slice of L2."""
    return (local ^ local // sets ^ local // sets**2 if index == "xor" else local) % sets


# What LRU caches do when nothing is under way


@dataclass
class Lru:
    """Sets of lines, those used last at the end."""

    ways: int
    sets: dict[object, list[int]] = field(default_factory=dict)

    def used(self, where: object, line: int) -> bool:
        """Whether a line was there; if so, it is used now."""
        lines = self.sets.setdefault(where, [])
        if line not in lines:
            return False
        lines.remove(line)
        lines.append(line)
        return True

    def kept(self, where: object, line: int) -> int | None:
        """Keep a line that was not there; what had to leave."""
        lines = self.sets.setdefault(where, [])
        lines.append(line)
        return lines.pop(0) if len(lines) > self.ways else None


def lru_counts(requests: Sequence[Request], of: MemorySystem, *, keeps_stores: bool) -> dict[str, int]:
    """What one CU and L2 do with requests that come one by one, until the last dirty line is written back."""
    first, second, dirty, used = Lru(of.gpu.l1.ways), Lru(of.gpu.l2.ways), set[int](), set[int]()
    lru = dict.fromkeys(("L1_HITS", "L2_HITS", "L2_MISSES", "READS", "WRITES", "EVICTED", "USELESS"), 0)
    for line, store, *_ in requests:
        if not store and first.used(line % int(of.l1_sets), line):
            lru["L1_HITS"] += 1
            continue
        if not store:
            first.kept(line % int(of.l1_sets), line)
        channel, local = placed(line, of)
        where = channel, set_of(local, int(of.l2_sets), of.gpu.l2.set_index)
        hit = second.used(where, line)
        lru["L2_HITS"] += hit
        if hit:
            used.add(line)
        if store and not keeps_stores:
            lru["WRITES"] += 1
            continue
        if not hit:
            gone = second.kept(where, line)
            if gone is not None:
                lru["USELESS"] += gone not in used
                lru["EVICTED"] += gone in dirty
                lru["WRITES"] += gone in dirty
                dirty.discard(gone)
                used.discard(gone)
            lru["L2_MISSES"] += not store
            lru["READS"] += not store
        if store:
            dirty.add(line)
    lru["WRITES"] += len(dirty)
    return lru


# What a controller does


class Reads(NamedTuple):
    """How long a channel took [ns], and how many of its reads found their row open."""

    ns: float
    hits: int


@dataclass
class Bank:
    """What a bank holds open, and from when [ns] it takes a column command, a precharge and an activation."""

    row: int | None = None
    column: float = 0.0
    precharge: float = 0.0
    activate: float = 0.0
    fresh: bool = False


@dataclass
class Controller:
    """A channel that serves reads command by command: FR-FCFS.

    Of the oldest `queue` that are not served, at any time: a column command of the oldest whose row is open, if its
    bank and the bus allow it; else, for the oldest request that it is due for, an activation, or a precharge of a bank
    whose open row none of them needs. Commands of several banks may come at once. A request leaves when its data come.
    """

    dram: Dram
    banks: list[Bank]
    queue: list[tuple[int, int]] = field(default_factory=list)
    leaving: list[float] = field(default_factory=list)
    now: float = 0.0
    bus: float = 0.0
    activated: float = -1e9
    hits: int = 0

    def column(self) -> float:
        """Read a line, or say from when one can be."""
        soonest, cl, burst = math.inf, 1e9 * self.dram.tcl_s, 1e9 * LINE * self.dram.channels / self.dram.bytes_per_s
        for place, (which, row) in enumerate(self.queue):
            bank = self.banks[which]
            if bank.row != row:
                continue
            ready = max(bank.column, self.bus - cl)
            soonest = min(soonest, ready)
            if ready <= self.now:
                self.bus = self.now + cl + burst
                self.hits += not bank.fresh
                bank.fresh, bank.precharge = False, max(bank.precharge, self.now + burst)
                self.leaving.append(self.now + cl)
                del self.queue[place]
                break
        return soonest

    def turn(self) -> float:
        """Open or close a row, or say from when one can be."""
        soonest, wanted, seen = math.inf, set(self.queue), set[int]()
        for which, row in self.queue:
            bank = self.banks[which]
            if which in seen or (which, bank.row) in wanted:
                continue
            seen.add(which)
            ready = (
                bank.precharge if bank.row is not None else max(bank.activate, self.activated + self.dram.trrd_s * 1e9)
            )
            soonest = min(soonest, ready)
            if ready > self.now:
                continue
            if bank.row is not None:
                bank.row, bank.activate = None, self.now + 1e9 * self.dram.trp_s
            else:
                bank.row, bank.fresh, self.activated = row, True, self.now
                bank.column, bank.precharge = self.now + 1e9 * self.dram.trcd_s, self.now + 1e9 * self.dram.tras_s
            break
        return soonest

    def read(self, lines: Sequence[int]) -> None:
        """Read lines, all of which are there from the beginning."""
        columns = self.dram.row_bytes // LINE
        waiting = [(line // columns % self.dram.banks, line // columns // self.dram.banks) for line in reversed(lines)]
        while self.queue or waiting:
            self.leaving = [time for time in self.leaving if time > self.now]
            while waiting and len(self.queue) + len(self.leaving) < self.dram.queue:
                self.queue.append(waiting.pop())
            column = self.column()
            if column <= self.now:
                continue
            turn = self.turn()
            if turn > self.now:
                self.now = min([column, turn, *self.leaving])


def controlled(lines: Sequence[int], of: MemorySystem) -> Reads:
    """What a controller of one channel does with lines."""
    controller = Controller(of.gpu.dram, [Bank() for _ in range(of.gpu.dram.banks)])
    controller.read(lines)
    return Reads(controller.bus, controller.hits)
