"""A machine that runs kernels one after another, and what they cost.

Of a kernel of many workgroups the first are run, as many as make `requests` requests; the rest take what a workgroup of
the second half of these took (a prediction of the steady state, told as the share that was simulated).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dse_memory import engine
from dse_memory.engine import Machine, MemoryState
from dse_memory.policy import Policy
from dse_memory.program import Program
from simulators.device import lru
from simulators.hardware.memory_system import Folds, MemorySystem, whole_power

Floats = NDArray[np.float64]
_NS = 1e9  # the engine counts in ns
_BIN_NS = 100.0  # to begin with; the engine doubles it as often as a run needs
_LONGEST_NS = 0.13e9  # what 32 bits of 1/16 ns hold
_ROWS = 1 << 14  # entries of the index of dirty rows
# between kernels; beyond the second, orders of use with 5 bits of ways overflow 32 bits
_RENUMBER, _MOST_STAMPS = 1 << 22, 1 << 26
_FILLS = 16  # times L2 is filled before a kernel is taken to go on alike
_LEAST_TURNS = 4  # of a loop that is cut, so that its start does not weigh too much


@dataclass(frozen=True)
class SimulatedCost:
    """Cost of a kernel. totals [TOTALS]: by `dse_memory.engine`; stalled [3]: at L1, at L2, in flight [s].

    seconds: of the whole kernel, without its launch. busy_s: of arithmetic, of all CUs together. share: simulated.
    """

    name: str
    seconds: float
    busy_s: float
    share: float
    totals: Floats
    stalled: Floats

    def times(self, turns: float) -> SimulatedCost:
        """Cost of `turns` times the work, as a smaller simulated share."""
        scaled = {name: getattr(self, name) * turns for name in ("seconds", "busy_s", "totals", "stalled")}
        # a whole kernel keeps its exact numbers
        return replace(self, share=self.share / turns, **scaled) if turns > 1 else self


@dataclass(frozen=True)
class Activity:
    """Activity over time, in bins of `seconds`: lines that channels moved [bins, channels], lines that CUs asked
    for [bins, CUs], and the share of a bin that CUs computed [bins, CUs].
    """

    seconds: float
    channels: NDArray[np.int64]
    requests: NDArray[np.int64]
    computing: Floats


@dataclass(frozen=True)
class ListedKernel:
    """A kernel whose first workgroups go through lists: rows [R, 5] as `engine.run` takes them, begins [listed + 1].

    workgroups: of the whole kernel. held: of a CU, at most.
    """

    name: str
    rows: NDArray[np.int64]
    begins: NDArray[np.int64]
    workgroups: int
    held: int


class Simulation:
    """The state of caches and DRAM, from one kernel to the next. held: workgroups of a CU at most."""

    def __init__(self, system: MemorySystem, policy: Policy, *, held: int, per_set: bool = False) -> None:
        numbers, sizes = _numbers(system, policy), _sizes(system, held)
        places: dict[str, int] = {}
        room = {}
        for kind, parts in sizes.items():
            end = 0
            for name, size in parts.items():
                places[name], end = end, end + -(-size // 16) * 16  # whole cache lines, so that parts do not share one
            room[kind] = end
        self.memory = MemoryState(
            lines=np.zeros(room["lines"], np.int32),
            counts=np.zeros(room["counts"], np.int64),
            times=np.zeros(room["times"]),
            machine=Machine(**numbers, **places, held=held, per_set=int(per_set)),
        )
        self.system, self._sizes = system, {name: size for parts in sizes.values() for name, size in parts.items()}
        self.policy, self._known, self.now = policy, set[int](), 0.0
        self._reset(system, policy)

    def part(self, name: str) -> NDArray[Any]:
        """One part of the state, by its name in `Machine`; a view."""
        array: NDArray[Any] = next(getattr(self.memory, kind) for kind, parts in _NAMES.items() if name in parts)
        first = getattr(self.memory.machine, name)
        return array[first : first + self._sizes[name]]

    def _reset(self, system: MemorySystem, policy: Policy) -> None:
        for name in ("one_tag", "two_tag", "late", "bank_row", "row_key"):
            self.part(name)[:] = -1
        for name, ways in (("one_used", self.memory.machine.l1_ways), ("two_used", self.memory.machine.l2_ways)):
            part = self.part(name)
            part[:] = np.arange(len(part)) % ways  # distinct ways in the low bits from the start
        for name in ("bank_act", "bank_last", "bin_from"):
            self.part(name)[:] = -1e300 if name == "bin_from" else -1e9  # long before the run: banks are idle
        self.part("key")[:] = np.inf  # two more entries than CUs, which the horizon reads
        self.part("refresh")[:] = self.memory.machine.trefi
        self.part("width")[:] = _BIN_NS
        self.part("fold")[:] = Folds.of(system.gpu.mapping.channel_hash, system.gpu.dram.channels).table

    def launch(
        self, program: Program, flop_per_s: float, requests: float = math.inf, longest: float = math.inf
    ) -> SimulatedCost:
        """Run a kernel after the last one, its first workgroups alone where all would make more than so many requests,
        and of their outermost loop the first turns alone where these would make more than `longest`.

        Raises OverflowError where these take longer than the engine's clock can tell.
        """
        gpu = self.system.gpu
        workgroups = max(1, min(program.held, gpu.waves // program.waves, self._sizes["ready"] // gpu.num_cus))
        # lines of L2
        least = _FILLS * self._sizes["two_tag"]  # or filling L2 would count as what goes on
        # and every place of every CU is filled four times
        enough = max(4.0 * workgroups * gpu.num_cus, max(requests, least) / lines(program, self.system.gpu.line_bytes))
        most = math.ceil(min(program.workgroups, enough))
        # the second half shows how the rest will go on
        marks = [most] if most == program.workgroups else [most // 2, most]
        program, turns = _shorten_loops(
            program, max(longest, least) / (most * lines(program, self.system.gpu.line_bytes))
        )
        touching = program.code[np.isin(program.code[:, engine.OP], (engine.LOAD, engine.STORE))]
        self.introduce((int(row[engine.PC]), bool(row[engine.OP] == engine.STORE)) for row in touching)
        work = program.flop * (gpu.num_cus / flop_per_s * _NS)  # a CU has its share of the machine's rate
        return self._run(program, work, _NOTHING, np.array(marks, np.int64), workgroups).times(turns)

    def introduce(self, instructions: Iterable[tuple[int, bool]]) -> None:
        """Give the predictor's counters of those that are new their first values: pc, and whether it stores."""
        predictor = self.policy.predictor
        if predictor is not None:  # counters that have learnt keep what they have
            new = {pc: store for pc, store in instructions if pc not in self._known}
            self._known.update(new)
            self.part("weight")[list(new)] = [predictor.stores if store else predictor.loads for store in new.values()]

    def replay(self, name: str, listed: NDArray[np.int64], begins: NDArray[np.int64]) -> SimulatedCost:
        """Make the requests listed [R, 5] of each CU, begins [CUs + 1], in order (as `engine.run` takes them)."""
        cus = self.system.gpu.num_cus
        # one workgroup for each CU, which is the owner of its list
        return self._run(_listing(name, cus, 1), np.zeros(3), (listed, begins), np.array([cus]), 1)

    def execute(self, kernel: ListedKernel, work: float) -> SimulatedCost:
        """Run a kernel after the last one, each workgroup by its list; those that have none go on as the second half
        of the others. work: time of a unit of arithmetic [s].

        Raises OverflowError where these take longer than the engine's clock can tell.
        """
        most = len(kernel.begins) - 1
        places = max(1, min(kernel.held, self._sizes["ready"] // self.system.gpu.num_cus))
        marks = np.array([most] if most == kernel.workgroups else [most // 2, most])
        program = _listing(kernel.name, kernel.workgroups, kernel.held)
        return self._run(program, np.full(3, work * _NS), (kernel.rows, kernel.begins), marks, places)

    def _run(
        self, program: Program, work: Floats, listed: _Listed, marks: NDArray[np.int64], workgroups: int
    ) -> SimulatedCost:
        self._renumber()
        seen = np.zeros((len(marks), engine.TOTALS + 1))
        total, stalled, busy = (self.part(name) for name in ("total", "spent", "busy"))
        before = total.astype(float), stalled.copy(), busy.sum()
        # no list: a length of 0
        begins = listed[1] if listed[1].size else np.zeros(2, np.int64)
        arguments = (program.code, work, np.array(program.extent), listed[0], begins, marks, seen, self.now)
        machine = self.memory.machine._replace(held=workgroups)
        end = engine.run(*arguments, self.memory._replace(machine=machine))
        if end - self.now > _LONGEST_NS:  # ticks have overflowed by then, so that the result is wrong
            seconds = (end - self.now) / _NS
            raise OverflowError(f"{program.name} runs for {seconds:g} s at once; simulate fewer requests")
        if self.part("total")[engine.STAMP] >= _MOST_STAMPS:
            raise OverflowError(f"{program.name} makes too many requests at once: lower run.requests, or held")
        elapsed, totals, share = end - self.now, total - before[0], marks[-1] / program.workgroups
        if len(marks) > 1:  # extrapolated at the rate of the second half
            slope = seen[1] - seen[0]
            # requests that were not simulated, in slopes of the second half
            missing = totals[engine.REQUESTS] * (1 / share - 1) / max(slope[engine.REQUESTS], 1.0)
            elapsed, totals = elapsed + missing * slope[engine.TOTALS], totals + missing * slope[: engine.TOTALS]
        self.now = end
        # the engine's sums go on from kernel to kernel
        waited, computed = (stalled - before[1]) / share / _NS, (busy.sum() - before[2]) / share / _NS
        return SimulatedCost(program.name, elapsed / _NS, computed, share, totals, waited)

    def activity(self) -> Activity:
        """Activity of channels and CUs over time, up to now."""
        width, cus = float(self.part("width")[0]), self.system.gpu.num_cus
        bins = max(1, math.ceil(self.now / width))  # bins beyond the present are empty
        channels, requests, busy = (self.part(name) for name in ("bins_dram", "bins_cu", "busy"))
        of_cus = (engine.BINS, cus)
        return Activity(
            width / _NS,
            channels.reshape(engine.BINS, -1)[:bins],
            requests.reshape(of_cus)[:bins],
            busy.reshape(of_cus)[:bins] / width,
        )

    def _renumber(self) -> None:
        """Order lines by their last use from 0 again, before the count runs out."""
        if self.part("total")[engine.STAMP] < _RENUMBER:
            return
        for name, ways in (("one_used", self.memory.machine.l1_ways), ("two_used", self.memory.machine.l2_ways)):
            part = self.part(name)
            # twice sorted: ranks within each set, which keep the order of use
            order = np.argsort(part.reshape(-1, ways), axis=1, kind="stable")
            ranks = np.argsort(order, axis=1, kind="stable")
            part[:] = ((ranks << lru.WAY_BITS) + np.arange(ways)).reshape(-1)
        self.part("total")[engine.STAMP] = max(
            self.memory.machine.l1_ways, self.memory.machine.l2_ways
        )  # after every rank


_Listed = tuple[NDArray[np.int64], NDArray[np.int64]]
_NOTHING = np.zeros((0, 5), np.int64), np.zeros(0, np.int64)


def _listing(name: str, workgroups: int, held: int) -> Program:
    """The program of workgroups that each go through a list."""
    code = np.zeros((3, engine.FIELDS), np.int64)
    # no tensor bounds a listed address
    code[0, engine.OP], code[0, engine.ROWS], code[0, engine.HIGH] = engine.LISTED, 1, np.iinfo(np.int64).max
    # without a count: as often as the list of the workgroup is long
    code[1, engine.OP], code[1, engine.LEVEL] = engine.LOOP, 3
    code[2, engine.OP] = engine.END
    return Program(name, code, np.zeros(3), (1, 1, 1, workgroups), 1, held)


def _shorten_loops(program: Program, share: float) -> tuple[Program, float]:
    """The program with about a share of the turns of its first nest of loops, the outer cut first, and how many times
    these turns it has.
    """
    loops = [place for place, row in enumerate(program.code) if row[engine.OP] == engine.LOOP]
    # the first loop at level 0 closes the first nest
    last = next((place for place in loops if not program.code[place, engine.LEVEL]), -1)
    code, cut = program.code.copy(), 1.0
    # loops are listed where they close, inner ones first
    for place in reversed(loops[: loops.index(last) + 1] if share < 1 and loops else []):
        turns = int(code[place, engine.TIMES])
        code[place, engine.TIMES] = fewer = min(turns, max(_LEAST_TURNS, math.ceil(turns * share * cut)))
        cut *= turns / fewer  # what outer loops have lost already, inner ones need not lose
    return replace(program, code=code), cut


def lines(program: Program, line_bytes: int) -> float:
    """Lines that a workgroup asks for, where every run of bytes begins with a line."""
    num_lines = 0.0
    for place, row in enumerate(program.code):
        if row[engine.OP] in (engine.LOAD, engine.STORE):
            # loops that close after the operation and begin before it
            loops = [
                loop for loop in program.code[place:] if loop[engine.OP] == engine.LOOP and loop[engine.TARGET] <= place
            ]
            times = math.prod(int(loop[engine.TIMES]) for loop in loops)
            num_lines += times * int(row[engine.ROWS]) * -(-int(row[engine.BYTES]) // line_bytes)
    return max(num_lines, 1.0)


def _numbers(system: MemorySystem, policy: Policy) -> dict[str, Any]:
    """Fields of `Machine` that are not places."""
    return {name: _NS * value for name, value in _times(system).items()} | _shapes(system) | _choices(policy)


def _times(system: MemorySystem) -> dict[str, float]:
    gpu, l1, l2, dram = system.gpu, system.gpu.l1, system.gpu.l2, system.gpu.dram
    times = {
        name: getattr(dram, f"{name}_s") for name in ("trcd", "trp", "tras", "tcl", "trrd", "twr", "trefi", "trfc")
    }
    times |= {"trc": dram.tras_s + dram.trp_s, "to_write": dram.to_write_s, "to_read": dram.to_read_s}
    times |= {"cycle": gpu.cycle_s, "l1_hit": l1.hit_s, "hop": l2.hop_s, "l2_hit": l2.hit_s, "far": dram.hop_s}
    # of one channel: a line at its share of the bandwidth
    burst = system.gpu.line_bytes * dram.channels / dram.bytes_per_s
    return times | {"lookup": l2.lookup_s, "fill": l2.fill_s, "burst": burst}


def _shapes(system: MemorySystem) -> dict[str, int]:
    gpu, dram, mapping, line = system.gpu, system.gpu.dram, system.gpu.mapping, system.gpu.line_bytes
    caches = {
        "l1_ways": system.gpu.l1.ways,
        "l1_shift": _log2(system.l1_sets),
        "l2_xor": system.gpu.l2.set_index == "xor",
    }
    caches |= {"l2_ways": system.gpu.l2.ways, "l2_shift": _log2(system.l2_sets), "rows": _ROWS}
    power, channels = whole_power(dram.channels), dram.channels
    shifts = {"chunk_shift": _log2(mapping.interleave_bytes / line), "row_shift": _log2(dram.row_bytes / line)}
    shifts |= {"bank_shift": _log2(dram.banks), "channel_shift": _log2(channels) if power else -1}
    counts = {"cus": gpu.num_cus, "in_flight": gpu.in_flight, "channels": channels, "queue": dram.queue}
    counts |= {"line_shift": _log2(line), "buffer": dram.write_buffer, "bank_xor": mapping.bank_xor}
    shapes = {**caches, **shifts, **counts, "hashed": mapping.channel_hash != "none"}
    return {name: int(value) for name, value in shapes.items()}


def _choices(policy: Policy) -> dict[str, int]:
    predictor = policy.predictor
    switches = {
        "reads": policy.loads,
        "writes": policy.stores,
        "bypass": policy.allocation_bypass,
        "rinse": policy.rinse,
    }
    learnt = (
        {"sampled": predictor.sampled_sets, "reward": predictor.reward, "most": predictor.most} if predictor else {}
    )
    # no predictor: every set would be sampled, and nothing is learnt
    choices = {"sampled": 1, "reward": 0, "most": 0, **switches, **learnt, "predict": predictor is not None}
    return {name: int(value) for name, value in choices.items()}


def _log2(number: float) -> int:
    return int(number).bit_length() - 1


_NAMES: dict[str, tuple[str, ...]] = {
    "lines": (
        "one_tag", "one_used", "one_pend", "two_tag", "two_used", "two_pend", "two_mark", "late", "bank_row", "ring",
    ),
    "counts": (
        "row_key", "row_dirty", "weight", "bank_newest", "entered", "stored", "stored_count", "fold", "total",
        "by_channel", "by_set", "by_bank", "bin_of", "bins_dram", "bins_cu", "place", "row_at", "line_at", "counter",
        "grid", "order", "head",
    ),
    "times": (
        "bank_act", "bank_last", "bus", "gate", "entry", "accepts", "written", "refresh", "port", "spent", "bin_from",
        "width", "start", "busy", "ready", "done", "fence", "issue", "alu", "key",
    ),
}  # fmt: skip


def _sizes(system: MemorySystem, workgroups: int) -> dict[str, dict[str, int]]:
    """Entries of each part of the state, by the array it is in."""
    gpu, dram = system.gpu, system.gpu.dram
    cus, channels, places = gpu.num_cus, dram.channels, gpu.num_cus * workgroups
    first, second = cus * int(system.l1_sets) * system.gpu.l1.ways, channels * int(system.l2_sets) * system.gpu.l2.ways
    banks = channels * dram.banks
    several = {
        "one_tag": first, "one_used": first, "one_pend": first, "two_tag": second, "two_used": second,
        "two_pend": second, "two_mark": second, "late": 2 * engine.PENDING, "bank_row": banks * engine.HELD_ROWS,
        "bank_act": banks * engine.HELD_ROWS, "bank_last": banks, "bank_newest": banks, "ring": cus * gpu.in_flight,
        "row_key": _ROWS, "row_dirty": _ROWS, "weight": engine.PCS, "stored": channels * dram.write_buffer,
        "entry": channels * dram.queue, "fold": 1024, "total": engine.TOTALS, "spent": engine.STALLED,
        "by_channel": 4 * channels, "by_set": 3 * channels * int(system.l2_sets), "by_bank": 2 * banks,
        "bins_dram": engine.BINS * channels,
        "bins_cu": engine.BINS * cus, "busy": engine.BINS * cus, "counter": 4 * places, "grid": 4 * places,
        "width": 1, "start": 1,
    }  # fmt: skip
    of_places = dict.fromkeys(("place", "row_at", "line_at", "ready", "done", "fence"), places)
    of_places |= dict.fromkeys(("order", "head", "issue", "alu"), cus) | {"key": cus + 2}
    # a number for each channel, unless said otherwise
    sizes = {**dict.fromkeys((name for names in _NAMES.values() for name in names), channels), **of_places, **several}
    return {kind: {name: sizes[name] for name in names} for kind, names in _NAMES.items()}
