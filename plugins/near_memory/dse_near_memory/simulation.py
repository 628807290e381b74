"""One sub-layer on one GPU of a ring, request by request: the GEMM, its reduce-scatter and its all-gather.

All GPUs of the ring are alike but for their place in it: GPU i makes chunk i first, so that each sends the chunk at one
place of its order while it receives that of the next place. One GPU stands for all, and what it sends comes in.

serial    the GEMM, its output through the cache, then both collectives by kernels, past it
ideal     the GEMM alone and the reduce-scatter alone, of which the longer counts, then the all-gather
tracked   the address map, the tracker and DMA commands of T3, then the all-gather by a kernel
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from dse.values import Memo
from dse_near_memory import engine
from dse_near_memory import state as fields
from dse_near_memory.address_map import LINE_BYTES, AddressMap
from dse_near_memory.controller import Controller
from dse_near_memory.requests import (
    Output,
    Reads,
    Shares,
    gemm_reads,
    output_lines,
    share_out,
)
from dse_near_memory.state import LONG_AGO, NEVER, Rules, State, Work
from dse_near_memory.tiles import Tiling, tile_gemm
from search_spaces.triggered import TriggeredSchedule
from simulators.costs.transfer import TransferMode, rate
from simulators.device.records import record, table
from simulators.hardware.machine import System
from simulators.hardware.network import Route
from simulators.workloads.operators import Workload

_NS = 1e9
_RS, _AG = fields.REDUCE_SCATTER, fields.ALL_GATHER
_POLICIES = {"fcfs": fields.FCFS, "fair": fields.FAIR, "compute_first": fields.COMPUTE_FIRST}
# more stores than any queue could hold
_UNBOUNDED = 10**9
_TIMES = ("trcd", "trp", "tras", "trrd", "twr", "to_write", "to_read", "trefi", "trfc")
PARTS = ("GEMM reads", "GEMM writes", "RS reads", "RS writes", "AG reads", "AG writes")
"""Traffic of a sub-layer by component, as `search_spaces.triggered.traffic` names them."""


@dataclass(frozen=True)
class Outcome:
    """Times and traffic of one sub-layer.

    seconds: all of it. gemm_s: until the last product. reduce_s, gather_s: of the collectives after it, or beside it.
    traffic: bytes at the HBM by component. row_hits, turns: for each request. spills: entries that the tracker evicted
    or took back. peak_entries: entries of the tracker in use. busy: share of the time that the buses move data.
    occupancy: requests that one of the GEMM finds in its queue in the first stage, on average. rule: the threshold that
    T3's arbitration takes then.
    """

    seconds: float
    gemm_s: float
    reduce_s: float
    gather_s: float
    traffic: dict[str, float]
    row_hits: float
    turns: float
    spills: int
    peak_entries: int
    busy: float
    occupancy: float
    rule: int


@dataclass(frozen=True)
class SubLayer:
    """A GEMM and the collective that reduces it, on a system with a controller, under a schedule."""

    system: System
    workload: Workload
    schedule: TriggeredSchedule
    controller: Controller

    def simulate(self) -> Outcome:
        """Simulate all of it. Raises ValueError where a chunk has no line at the sampled channels."""
        if self.schedule.reduction != "ideal":
            return self._outcome(self.run())
        # ideal: both run alone, each with the whole memory system
        gemm = self._run(self._map, [])
        moved = self._run(self._map, self._by_kernels(streamed=self._near), gemm=False)
        alone, both = self._outcome(gemm), self._outcome(moved)
        # stores that bypass the cache end after the GEMM; with a cache they are hidden in it
        end = gemm.state.gemm.end if gemm.rules.cached else gemm.state.gemm.stored
        seconds = max(float(end) / _NS, both.reduce_s) + both.gather_s
        traffic = {name: alone.traffic[name] + both.traffic[name] for name in PARTS}
        return replace(alone, seconds=seconds, reduce_s=both.reduce_s, gather_s=both.gather_s, traffic=traffic)

    def run(self) -> Run:
        """One run of the GEMM with its collectives, as a schedule that is not ideal has it."""
        if self.schedule.reduction == "tracked":
            return self._run(self._map, _tracked(self._gpus), tracked=True)
        return self._run(self._map, self._by_kernels(streamed=False))

    def _by_kernels(self, *, streamed: bool) -> list[Step]:
        return _by_kernels(self._gpus, self._near, streamed=streamed, sums_last=self.controller.sums_last)

    @property
    def _near(self) -> bool:
        return self.schedule.near_memory

    @property
    def _gpus(self) -> int:
        return int(self.workload.overlap().gemm.shards)

    @property
    def tiling(self) -> Tiling:
        """Tiles of the GEMM."""
        gemm = self.workload.overlap().gemm
        shape = (int(gemm.m), int(gemm.local_n), int(gemm.local_k))
        return tile_gemm(self.system.gpu, shape, precision=gemm.precision)

    @property
    def _sets(self) -> int:
        """Sets of a slice of the cache."""
        llc = self.system.gpu.llc
        if llc is None:
            raise ValueError("waves of requests need system.gpu.llc")
        slices, line_bytes = self.controller.dram.channels * self.controller.slices, self.controller.cache_line_bytes
        # sets of one slice of one channel
        return max(1, round(llc.bytes / (slices * line_bytes * llc.ways)))

    @property
    def _map(self) -> AddressMap:
        size = self.tiling.output_bytes
        return address_map(self.schedule, size, self._gpus)

    def _run(self, addresses: AddressMap, program: Sequence[Step], *, gemm: bool = True, tracked: bool = False) -> Run:
        """Run a GEMM, or none, with steps of communication."""
        tiling, controller, tracker, sets = self.tiling, self.controller, self.system.gpu.tracker, self._sets
        entries = int(tracker.num_entries) if tracker else 1
        lines = lambda: output_lines(tiling, addresses, controller, entries, sets)  # noqa: E731
        output = _OUTPUTS.get(lines, controller, key=(tiling, addresses, entries, sets))
        # a step without lines would have nothing to send, and the steps after it would wait for its end
        if np.any(np.diff(output.chunk_first) == 0):
            raise ValueError("a chunk has no line at the sampled channels: sample more of them")
        reads = _READS.get(lambda: gemm_reads(tiling, controller, sets), controller, key=(tiling, sets))
        shares = _SHARES.get(lambda: share_out(tiling), key=tiling)
        updates = self._near and self.schedule.reduction != "serial"
        rules = self._rules(tiling, entries, tracked=tracked, gemm=gemm, cached=not updates)
        # the most panels of any unit: the linked lists of waiting CUs need that many places
        rules = rules._replace(needs=int(np.diff(shares.need_first).max()))
        steps = self._with_paces(program, tracked=tracked)
        work = _work(reads, output, addresses, steps, shares=shares)
        limits = np.array(sorted(controller.thresholds), np.int64)
        work = work._replace(store_updates=int(updates), thresholds=limits)
        cache = (rules.channels * controller.slices * sets, rules.cache_ways, controller.cache_sectors)
        state = _state(work, rules, output, addresses, cache)
        end = engine.run(work, state, rules)
        return Run(work, state, rules, end, reads.every_line, addresses, gemm)

    def _rules(self, tiling: Tiling, entries: int, *, tracked: bool, gemm: bool, cached: bool) -> Rules:
        controller, dram, gpu = self.controller, self.controller.dram, self.system.gpu
        # a request of 64 bytes is two columns of HBM2
        burst, columns = controller.burst_s * _NS, LINE_BYTES / controller.column_bytes
        share = controller.sampled_channels / dram.channels
        update_columns = float(gpu.pim.update_columns) if gpu.pim is not None else 1.0
        # two columns of a request pass one bank group one after the other
        group = columns * controller.tccdl_s * _NS
        times = {name: getattr(dram, f"{name}_s") * _NS for name in _TIMES}
        policy, guaranteed = self.schedule.arbitration, self.schedule.guaranteed_share
        # without communication beside it, a GEMM's own updates hold nothing up
        overtaken = {None: _UNBOUNDED, "fcfs": 0}.get(policy, controller.store_buffer)
        return Rules(
            burst=burst,
            group=group,
            update_group=group * update_columns,
            **times,
            latency=(dram.tcl_s + dram.hop_s) * _NS,
            cache_hit=controller.cache_hit_s * _NS,
            hop=float(self.system.node.hop_latency_s or 0.0) * _NS,
            setup=float(gpu.dma.setup_s) * _NS if tracked else 0.0,
            channels=controller.sampled_channels,
            banks=dram.banks,
            groups=controller.bank_groups,
            queue=dram.queue,
            drain=dram.write_buffer,
            policy=_POLICIES[policy or "fcfs"],
            threshold=int(self.schedule.occupancy_threshold or 0) if controller.threshold == "given" else 0,
            # a share g for communication: one of its requests after (1 - g) / g of the GEMM's
            turn=1 if guaranteed is None else max(1, round((1 - float(guaranteed)) / float(guaranteed))),
            store_buffer=overtaken,
            window=max(1, round(controller.window_bytes / LINE_BYTES * share)),
            cached=int(cached),
            cache_ways=int(gpu.llc.ways) if gpu.llc else 1,
            needs=1,
            tracked=int(tracked),
            sets=entries,
            ways=controller.wavefronts,
            # the tracker counts lines of all channels: only one spill in so many falls on a sampled one
            spill_every=max(1, round(1 / share)),
            steps=tiling.steps,
            units=tiling.units if gemm else 0,
            cus=tiling.concurrent if gemm else 0,
            lockstep=int(controller.lockstep),
        )

    def _with_paces(self, program: Sequence[Step], *, tracked: bool) -> Sequence[Step]:
        """Steps with the time [ns] of a line at the sampled channels over the link: stores by the GEMM go at its rate,
        commands at that of a DMA engine, kernels at theirs; a kernel sums within the GPU.
        """
        gpu, link, kernel = self.system.gpu, float(self.system.node.link_bytes_per_s), self._kernel_rate()
        updates = self._near and self.schedule.reduction == "ideal"
        # tracked: by DMA, at most at the link's rate; ideal with updates: at the link's; else by kernels
        reduces = min(link, float(gpu.dma.bytes_per_s)) if tracked else link if updates else kernel
        sums, share = float(gpu.cu_copy.num_cus * gpu.cu_copy.bytes_per_s_per_cu), self.controller.sampled_channels
        rates = [
            link if step.from_gemm else sums if step.source == step.target
            else kernel if step.phase == _AG else reduces
            for step in program
        ]  # fmt: skip
        # sampled channels carry their share of the link only
        paces = LINE_BYTES / (np.array(rates, float) * share / self.controller.dram.channels) * _NS
        return [step._replace(pace=pace) for step, pace in zip(program, paces.tolist(), strict=True)]

    def _kernel_rate(self) -> float:
        """Rate [bytes/s] of a collective's kernel over the ring's link."""
        route, gpu = Route(1, {"link.cw": 1.0}, 1), self.system.gpu
        mode = TransferMode("cu", gpu.num_cus, self.workload.overlap().collective.pattern)
        return float(np.asarray(rate(self.system, route, [route], by=mode).bytes_per_s))

    def _outcome(self, run: Run) -> Outcome:
        state, total = run.state, max(1, int(run.served.sum()))
        gemm_s, ended_s, reduced_s = (float(end) / _NS for end in (state.gemm.end, *state.transfer[["end", "reduced"]]))
        seconds = max(run.end / _NS, ended_s, gemm_s)
        return Outcome(
            seconds=seconds,
            gemm_s=gemm_s,
            reduce_s=reduced_s,
            gather_s=max(0.0, ended_s - reduced_s),
            traffic=run.traffic,
            row_hits=int(state.counts.row_hits) / total,
            turns=int(state.counts.turns) / total,
            spills=int(state.tracker.spills),
            peak_entries=int(state.tracker.peak),
            # each request holds its channel's bus for one burst
            busy=total * run.rules.burst / run.rules.channels / _NS / seconds,
            occupancy=max(0.0, float(state.arbiter.occupancy)),
            rule=int(state.arbiter.rule),
        )


@dataclass(frozen=True)
class Run:
    """A run of the engine. every_line: lines of the inputs at all channels over those at sampled ones."""

    work: Work
    state: State
    rules: Rules
    end: float
    every_line: float
    addresses: AddressMap
    gemm: bool

    @property
    def served(self) -> Any:
        """Requests served by kind and phase, [KINDS, PHASES]."""
        return self.state.served

    @property
    def traffic(self) -> dict[str, float]:
        """Bytes at all channels by component: reads of the GEMM as the cache lets them pass, others as mapped."""
        parts = dict.fromkeys(PARTS, 0.0)
        lines = [part.lines for part in self.addresses.ranges]
        if self.gemm:
            # reads depend on the cache, so they are counted and scaled; the rest follows from the map
            parts["GEMM reads"] = float(self.served[fields.READ].sum() * self.every_line * LINE_BYTES)
            parts["GEMM writes"] = float(self.addresses.updates()[0] * LINE_BYTES)
        for step in self.work.program:
            name = "AG" if step.phase == _AG else "RS"
            sent, came, sums = lines[step.source], lines[step.target], int(step.sums)
            # a sum reads both operands, and writes the incoming line and the result
            parts[f"{name} reads"] += float((int(step.reads) * sent + 2 * sums * came) * LINE_BYTES)
            parts[f"{name} writes"] += float((1 + sums) * came * LINE_BYTES)
        return parts


def address_map(schedule: TriggeredSchedule, output_bytes: float, gpus: int) -> AddressMap:
    """The address map of a schedule: T3's on a ring if it is tracked, else all of it local."""
    if schedule.reduction == "tracked":
        return AddressMap.tracked_ring(output_bytes, gpus)
    updates = schedule.near_memory and schedule.reduction == "ideal"
    return AddressMap.by_kernels(output_bytes, gpus, updates=updates)


class Step(NamedTuple):
    """A step of communication: the fields of `state.STEP`."""

    source: int
    target: int
    reads: int
    after: int
    phase: int = _RS
    updates: int = 0
    from_gemm: int = 0
    sums: int = 0
    pace: float = 0.0


def _tracked(gpus: int) -> list[Step]:
    """Steps of T3: the first chunk comes from the neighbour's GEMM, others by DMA commands; then the all-gather."""
    # the neighbour's first chunk arrives as this GPU's leaves: source 0 becomes target 1
    first = Step(0, 1, reads=0, after=fields.AFTER_STEP, updates=1, from_gemm=1)
    # each command waits for its chunk, and adds it to the neighbour's next one
    sent = [Step(chunk, chunk + 1, reads=1, after=fields.AFTER_CHUNK, updates=1) for chunk in range(1, gpus - 1)]
    return [first, *sent, *_gather_steps(gpus)]


def _by_kernels(gpus: int, near_memory: bool, *, streamed: bool, sums_last: bool) -> list[Step]:
    """Steps of a ring by kernels: each adds what has come in to its own; near memory that is an update.

    streamed: the first chunk is there already, as it left while it was made. sums_last: the last chunk is summed once
    all of it is there, not as it comes in.
    """
    steps = []
    for hop in range(1, gpus):
        # from the second hop on a kernel reads two operands, unless memory adds
        reads = 0 if hop == 1 and streamed else 1 if near_memory or hop == 1 else 2
        after = fields.AFTER_ALL if hop == 1 else fields.AFTER_STEP
        # the last chunk is not sent on, so a kernel may add it as it arrives
        sums = int(hop == gpus - 1 and not near_memory and not sums_last)
        steps.append(Step(hop - 1, hop, reads=reads, after=after, updates=int(near_memory), sums=sums))
    # source and target are equal: a sum within the GPU, without the link
    final = [Step(gpus - 1, gpus - 1, reads=2, after=fields.AFTER_STEP)] if sums_last and not near_memory else []
    return [*steps, *final, *_gather_steps(gpus)]


def _gather_steps(gpus: int) -> list[Step]:
    """Steps of a ring all-gather by a kernel."""
    # the reduce-scatter leaves this GPU with the last chunk, which it sends first
    order = [(gpus - 1 + hop) % gpus for hop in range(gpus)]
    afters = [fields.AFTER_ALL, *[fields.AFTER_STEP] * gpus]
    return [Step(order[hop], order[hop + 1], reads=1, after=afters[hop], phase=_AG) for hop in range(gpus - 1)]


_READS, _OUTPUTS, _SHARES = Memo[Reads](32), Memo[Output](32), Memo[Shares](32)
"""Lists of requests by GEMM and controller: designs that differ in other numbers share them."""


def _work(reads: Reads, output: Output, addresses: AddressMap, steps: Sequence[Step], *, shares: Shares) -> Work:
    """Requests and steps of a run, with plain stores."""
    program = table(len(steps), fields.STEP)
    for row, step in zip(program, steps, strict=True):
        for name, value in step._asdict().items():
            row[name] = value
    return Work(
        read_first=reads.first,
        read_channel=reads.channel,
        read_place=reads.place,
        read_set=reads.where,
        read_entry=reads.entry,
        need_first=shares.need_first,
        need_panel=shares.need_panel,
        store_first=output.stores_first,
        store_line=output.stores,
        channel=output.channel,
        place=output.place,
        chunk=output.chunk,
        region=output.region,
        store_set=output.where,
        store_entry=output.entry,
        chunk_first=output.chunk_first,
        away=np.array([part.place == "remote" for part in addresses.ranges], np.int64),
        region_set=output.region_set,
        program=program,
        thresholds=np.zeros(0, np.int64),
        step_ns=shares.step_ns,
        store_updates=0,
    )


def _state(work: Work, rules: Rules, output: Output, addresses: AddressMap, cache: tuple[int, int, int]) -> State:
    """State before the first event: queues empty, rows closed, counters at the updates that they wait for.

    cache: sets, ways and sectors of a line.
    """
    sets, ways, sectors = cache
    incoming = np.array([part.incoming for part in addresses.ranges])
    # one by this GPU unless the chunk is the neighbour's, and one that comes in
    expected = 1 - work.away + incoming  # updates of a line by its chunk
    left = np.bincount(output.region, weights=expected[output.chunk], minlength=len(output.region_set))
    stores = int((1 - work.away[output.chunk]).sum()) if rules.cus else 0
    # lines of the longest chunk
    longest = max(int(np.diff(output.chunk_first).max()), 1)
    return State(
        **idle(rules, work, stores=stores, slots=_capacity(work, rules, output)),
        cache_line=np.full(sets * ways, -1, np.int32),
        cache_used=np.zeros(sets * ways, np.int64),
        cache_there=np.zeros((sets * ways, sectors), np.int64),
        region_left=left.astype(np.int64),
        chunk_left=output.chunk_regions.copy(),
        entry=np.full(rules.sets * rules.ways, -1, np.int64),
        used=np.zeros(rules.sets * rules.ways, np.int64),
        spilled=np.zeros(len(output.region_set), np.int64),
        sent_at=np.empty(longest),
    )


def idle(rules: Rules, work: Work, *, stores: int, slots: int) -> dict[str, Any]:
    """Parts of `State` that depend on sizes alone. stores: of the GEMM's own memory. slots: of a stream's ring."""
    channels = rules.channels
    return {
        "clock": record(fields.CLOCK),
        "gemm": record(fields.GEMM, stores_left=stores, next=NEVER),
        "transfer": record(fields.TRANSFER, starts=NEVER),
        "tracker": record(fields.TRACKER),
        # not measured yet: the first stage has not ended
        "arbiter": record(fields.ARBITER, occupancy=-1.0),
        "counts": record(fields.COUNTS),
        "served": np.zeros((fields.KINDS, fields.PHASES), np.int64),
        "cus": table(rules.cus, fields.CU, next=NEVER),
        "blocks": table(len(work.read_first) - 1, fields.BLOCK),
        "next_waiting": np.zeros(rules.cus * rules.needs, np.int64),
        "waiting": np.empty((3, channels, slots), fields.WAITING).view(np.recarray),
        "streams": table((3, channels), fields.STREAM),
        "channels": table(channels, fields.CHANNEL, next=NEVER, refresh=rules.trefi),
        # no row is open, and no time constraint is left
        "banks": table((channels, rules.banks), fields.BANK, row=-1, last_use=LONG_AGO, opened=LONG_AGO),
        "groups": np.zeros((channels, rules.groups)),
        "gates": np.zeros(channels),
        "queue": table((channels, rules.queue), fields.REQUEST),
    }


def _capacity(work: Work, rules: Rules, output: Output) -> int:
    """Largest number of requests of one stream that wait at one channel, as a power of two.

    Of reads, CUs have those of one step under way.
    """
    lines = np.zeros((len(work.chunk_first) - 1, rules.channels), np.int64)
    np.add.at(lines, (output.chunk, output.channel), 1)
    moved = np.zeros(rules.channels, np.int64)
    for step in work.program:
        moved += step.reads * lines[step.source]
        # a line that is summed is written twice and read twice
        moved += (1 + 3 * step.sums) * lines[step.target]
    spilled = 4 * len(output.line) // rules.spill_every + 1 if rules.tracked else 0  # two for each of two updates
    reads = rules.cus * rules.needs * int(np.diff(work.read_first).max())
    # rings take places by a mask
    return 1 << int(max(moved.max() + spilled, lines.sum(axis=0).max(), reads)).bit_length()
