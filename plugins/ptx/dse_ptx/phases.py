"""What a launch does over time, as AerialVision (ISPASS 2010) shows it: instructions, warps, stalls, caches and DRAM.

Bins of time are those of the simulation, and phases the stretches in which instructions issued, requests at L2 and the
bandwidth of DRAM stay alike (`dse_memory.phases`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dse.backend import Interval
from dse_memory.measures import partition_camping
from dse_memory.phases import cuts
from dse_ptx.timing import SLOT_NAMES, LaunchTime
from dse_ptx.warp_trace import Unit

if TYPE_CHECKING:
    import pandas as pd

    from dse.plots import Draw

Floats = NDArray[np.float64]
_DRAWN = 64  # bins of a figure


@dataclass(frozen=True)
class LaunchPhase:
    """A stretch of a launch. ipc: of an SM. dram: share of the bandwidth. cause: what most slots without an
    instruction went to.
    """

    begin_s: float
    end_s: float
    ipc: float
    dram: float
    cause: str


def dram_shares(done: LaunchTime) -> Floats:
    """Share of each channel's bandwidth [bins, channels], in the bins of the SMs."""
    gpu = done.machine.memory.gpu
    # lines that a channel can move in a bin
    most = done.bin_s * gpu.dram.bytes_per_s / (gpu.dram.channels * gpu.line_bytes)
    # bins of SMs and of DRAM have different widths: lines are summed up, and the sums read at the edges of SM bins
    starts = np.arange(len(done.issued) + 1) * done.bin_s
    total = np.concatenate([np.zeros((1, done.dram.shape[1])), np.cumsum(done.dram, axis=0)])
    times = np.arange(len(total)) * done.dram_bin_s
    until = np.stack([np.interp(starts, times, lane) for lane in total.T], axis=1)
    return np.asarray(np.minimum(np.diff(until, axis=0) / most, 1.0))


def slice_shares(done: LaunchTime) -> Floats:
    """Share of the time of each slice of L2 that requests take [bins, channels]."""
    # a request takes a slice for the time of a look-up
    busy_s = done.slices[:, :, 0] * float(done.machine.memory.gpu.l2.lookup_s)
    return np.asarray(np.minimum(busy_s / done.bin_s, 1.0))


def ipc(done: LaunchTime) -> Floats:
    """Warp instructions of each SM in a cycle [bins, SMs]."""
    return np.asarray(done.issued / _cycles(done)[:, None])


def camping_factor(done: LaunchTime) -> float:
    """Lines of the busiest channel of DRAM over the mean channel's, in the mean of stretches of time."""
    return partition_camping(done.dram)


def phases_of(done: LaunchTime) -> list[LaunchPhase]:
    """Phases of a launch, in the order of time."""
    dram, rate = dram_shares(done).mean(axis=1), ipc(done).mean(axis=1)
    peak = done.machine.sm.schedulers * done.machine.sm.issue_width
    ends = cuts(np.stack([rate / peak, dram, slice_shares(done).mean(axis=1)], axis=1))
    return [_phase(done, (rate, dram), first, end) for first, end in zip([0, *ends[:-1]], ends, strict=True)]


def _phase(done: LaunchTime, series: tuple[Floats, Floats], first: int, end: int) -> LaunchPhase:
    cycles, (rate, dram) = _cycles(done)[first:end], series
    lost = done.slots[first:end].sum(axis=0)
    instructions, bandwidth = (float(np.average(values[first:end], weights=cycles)) for values in (rate, dram))
    # place 0 of the slots is `issued`, which is no loss
    cause = SLOT_NAMES[1 + int(np.argmax(lost[1:]))]
    return LaunchPhase(first * done.bin_s, end * done.bin_s, instructions, bandwidth, cause)


def _cycles(done: LaunchTime) -> Floats:
    """Cycles of each bin; the last is not full."""
    width = done.bin_s / done.machine.cycle_s
    cycles = np.full(len(done.issued), width)
    # at least one cycle, since rates divide by it
    cycles[-1] = max(done.cycles - width * (len(cycles) - 1), 1.0)
    return cycles


def table(done: LaunchTime) -> pd.DataFrame:
    """A row for each bin: seconds, ipc, shares of slots and of warps' time, L2, DRAM, and the mix of instructions."""
    import pandas as pd

    columns: dict[str, Any] = {"second": np.arange(len(done.issued)) * done.bin_s, "ipc": ipc(done).mean(axis=1)}
    for kind, counts, names in (("slots", done.slots, SLOT_NAMES), ("warps", done.states, SLOT_NAMES)):
        total = np.maximum(counts.sum(axis=1), 1)
        columns |= {f"{kind}: {name}": counts[:, place] / total for place, name in enumerate(names)}
    requests = done.slices[:, :, 0].sum(axis=1)
    columns["l2_hit_rate"] = done.slices[:, :, 1].sum(axis=1) / np.maximum(requests, 1)
    columns |= {f"l2 {place}": lane for place, lane in enumerate(slice_shares(done).T)}
    columns |= {f"dram {place}": lane for place, lane in enumerate(dram_shares(done).T)}
    columns |= {f"issued: {unit.name.lower()}": done.units[:, unit] for unit in Unit}
    return pd.DataFrame(columns)


def figures(done: LaunchTime, name: str) -> Iterator[tuple[str, Draw]]:
    """Rasters of SMs, slices and channels over time, and of what slots and warps spend it on."""
    from dse.plots import Frame

    most = float(done.machine.sm.schedulers)
    # at most one instruction of a slot, also where two of one warp may issue
    machine = {"SMs: instructions of a slot": np.minimum(ipc(done) / most, 1.0), "slices of L2": slice_shares(done)}
    machine["channels of DRAM"] = dram_shares(done)
    note = "shade: share of what it could do; dotted: phases"
    title = (
        f"{name}: {done.ipc:.2f} instructions a cycle; the busiest channel moves {camping_factor(done):.2f}x the mean"
    )
    yield "machine", _raster(machine, done, "SM, slice, or channel", Frame(title, note))
    # place 0 is `issued`, which is no loss
    lost = {place: share for place, share in enumerate(done.slot_shares.values()) if place}
    worst, issued = max(lost, key=lost.__getitem__), done.slot_shares["issued"]
    title = f"{name}: {100 * issued:.0f} % of slots issue, {100 * lost[worst]:.0f} % are lost to {SLOT_NAMES[worst]}"
    units = [unit for unit in Unit if done.units[:, unit].any()]
    causes = {"slots of schedulers": _shares(done.slots), "warps": _shares(done.states)}
    names: dict[str, Sequence[str]] = dict.fromkeys(causes, SLOT_NAMES)
    causes["instructions"] = _shares(done.units)[:, units]
    names["instructions"] = tuple(unit.name.lower().replace("_", " ") for unit in units)
    note = "shade: share of all of them in that time; dotted: phases"
    yield "causes", _raster(causes, done, names, Frame(title, note))


def _shares(counts: NDArray[np.int64]) -> Floats:
    return np.asarray(counts / np.maximum(counts.sum(axis=1, keepdims=True), 1))


def _raster(panels: dict[str, Floats], done: LaunchTime, lane: str | Mapping[str, Sequence[str]], frame: Any) -> Draw:
    """A figure of panels whose bins are put together until they are few."""
    from dse.plots import tables

    # bins of the simulation that one drawn bin averages
    times = -(-len(done.issued) // _DRAWN)
    few = {name: np.add.reduceat(values, np.arange(0, len(values), times)) / times for name, values in panels.items()}
    ends = tuple(phase.end_s for phase in phases_of(done)[:-1])
    return partial(
        tables.raster,
        few,
        dict.fromkeys(few, times * done.bin_s),
        lane=lane,
        frame=frame,
        marks=dict.fromkeys(few, ends),
    )


def perfetto(launches: Sequence[tuple[str, LaunchTime]]) -> dict[str, Any]:
    """Launches one after another as a trace for Perfetto: their phases as spans, and counters of every bin."""
    from dse.results.report import trace

    spans, counters, begin_s = list[Interval](), list[dict[str, Any]](), 0.0
    for name, done in launches:
        start_s = begin_s + done.launch_s
        # the launch comes before the bins of the simulation begin
        spans.append(Interval(name, "launch", "wait", begin_s, start_s))
        spans += [
            Interval(
                name, f"{phase.cause}, ipc {phase.ipc:.2f}", "gemm", start_s + phase.begin_s, start_s + phase.end_s
            )
            for phase in phases_of(done)
        ]
        counters += _counters(done, start_s)
        begin_s += done.seconds
    whole = trace(spans, launches[0][1].slot_shares if len(launches) == 1 else {})
    whole["traceEvents"] += counters
    return whole


def _counters(done: LaunchTime, start_s: float) -> list[dict[str, Any]]:
    rows = table(done)
    columns = [column for column in rows.columns if column.startswith(("ipc", "slots", "dram", "l2 "))]
    return [
        {"name": name, "ph": "C", "pid": 1, "ts": (start_s + row["second"]) * 1e6, "args": {"value": float(row[name])}}
        for row in rows.to_dict("records")
        for name in columns
    ]
