"""`ptx time`: a kernel in PTX executed on arrays, and timed on the SMs of a GPU.

    python -m dse ptx time file=<ptx> grid=<x,y,z> block=<x,y,z> arguments=<a,b,...> [system=gtx_1080_ti] [blocks=<n>]
                           [out=<folder>] ...
    python -m dse ptx time file=kernel-1.traceg [system=v100] [blocks=<n>] [out=<folder>]
    python -m dse ptx time file=kernelslist.g ...

The others time a SASS trace of Accel-Sim, and those of an application one after another, each with empty caches; what
the host does between them is told, not timed. Of a launch of many blocks about `blocks` are timed, whole waves at least
(0: all). Written into the folder:

    time.json         seconds, instructions, rates and shares, every constant with its source
    launches.parquet  of an application: a row for each kernel
    intervals.parquet a row for each bin of time: instructions, stalls, warps, L2, DRAM
    figures/          machine and causes over time, of the longest kernel; `trace.json` opens in Perfetto
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dse.errors import pairs
from dse.results.run_folder import CommandAnswer, Outputs, writable
from dse_ptx.commands import TypedLaunch, number, numbers
from dse_ptx.phases import camping_factor, figures, perfetto, phases_of, table
from dse_ptx.sass import read_sass
from dse_ptx.sms import SmArray, sm_array
from dse_ptx.timing import LaunchTime, resident_blocks, simulated_blocks, time_launch
from dse_ptx.trace_list import TraceList, is_list, read_list

_WAVES = 3  # that are timed unless the user asks for others
_SHOWN = 8  # longest kernels of an application


def time(words: Sequence[str]) -> CommandAnswer:
    """`ptx time`: run a kernel, and predict how long it takes on a GPU."""
    path = Path(dict(word.partition("=")[::2] for word in words).get("file", ""))
    if is_list(path) or ".traceg" in path.name:
        typed = pairs(words, {"file": ""}, optional=("system", "blocks", "out"))
        # 0 asks for all blocks
        machine, most = _machine(typed), number(typed.get("blocks", "0"), "blocks") or None
        if is_list(path):
            return _application(read_list(path), machine, most, typed)
        name, done = path.name.partition(".")[0], time_launch(read_sass(path), machine, most_blocks=most)
    else:
        launch = TypedLaunch.of(words, ("system", "blocks"))
        typed, name, machine = dict(launch.typed), launch.kernel, _machine(launch.typed)
        run = launch.start(None, tuple(range(_blocks(launch, machine))))
        assert run.trace is not None
        done = time_launch(run.trace, machine)
    outputs = writable(typed.get("out") or f"outputs/ptx_time/{name}_{machine.name}")
    _write(done, name, outputs)
    return CommandAnswer(outputs.folder, tuple(_lines(done, name, outputs)), "time")


def _application(listed: TraceList, machine: SmArray, most: int | None, typed: Mapping[str, str]) -> CommandAnswer:
    """Time the kernels of a list one after another."""
    import pandas as pd

    outputs = writable(typed.get("out") or f"outputs/ptx_time/application_{machine.name}")
    names = [path.name.partition(".")[0] for path in listed.kernels]
    launches = [
        (name, time_launch(read_sass(path), machine, most_blocks=most))
        for name, path in zip(names, listed.kernels, strict=True)
    ]
    intervals = [table(done).assign(launch=at, kernel=name) for at, (name, done) in enumerate(launches)]
    sums = {key: sum(getattr(done, key) for _, done in launches) for key in ("seconds", "launch_s")}
    facts = [list(fact) for fact in machine.facts_below("system")]
    outputs.write_json("time", {**sums, "not_timed": list(listed.host_work), "facts": facts})
    outputs.write_table("launches", pd.DataFrame([{"kernel": name, **scalars(done)} for name, done in launches]))
    outputs.write_table("intervals", pd.concat(intervals, ignore_index=True))
    _draw(launches, outputs)
    words = f"us one after another; their launches take {sums['launch_s'] * 1e6:.3g} us"
    lines = [f"{len(launches)} kernels on {machine.name}: {sums['seconds'] * 1e6:.4g} {words}", *_longest(launches)]
    if listed.host_work:
        lines.append(f"  not timed: {'; '.join(listed.host_work)}")
    files = "time.json, launches.parquet, intervals.parquet, figures/*"
    return CommandAnswer(outputs.folder, (*lines, f"written to {outputs.folder}/: {files}"), "time")


def _longest(launches: Sequence[tuple[str, LaunchTime]]) -> list[str]:
    """Lines of the kernels that last longest, and of the error of those that are sampled."""
    ordered = sorted(launches, key=lambda launch: -launch[1].seconds)
    lines = [f"  {name}: {done.seconds * 1e6:.4g} us, {_first_loss(done)}" for name, done in ordered[:_SHOWN]]
    shorter = [time.seconds for _, time in ordered[_SHOWN:]]
    if shorter:
        lines.append(f"  {len(shorter)} others: {sum(shorter) * 1e6:.4g} us")
    sampled = [done.sampling_error for _, done in launches if done.simulated < 1]
    if sampled:
        lines.append(
            f"  {len(sampled)} are simulated in part; the halves of a wave differ by {max(sampled):.1%} at most"
        )
    return lines


def _first_loss(done: LaunchTime) -> str:
    """What takes most issue slots, and its share: a cause of loss, or instructions that are issued."""
    share, name = max((share, name) for name, share in done.slot_shares.items())
    return f"{share:.0%} {name}"


def _machine(typed: Mapping[str, str]) -> SmArray:
    return sm_array(typed.get("system", "gtx_1080_ti"))


def _blocks(launch: TypedLaunch, machine: SmArray) -> int:
    """Blocks that are traced."""
    grid, block = (numbers(launch.typed[name], name) for name in ("grid", "block"))
    kernel, total = launch.module.kernel(launch.kernel), math.prod(grid)
    shared = kernel.shared_bytes + number(launch.typed.get("shared", "0"), "shared")
    # how many blocks are executed and recorded is known before the run
    cluster = numbers(launch.typed["cluster"], "cluster") if "cluster" in launch.typed else kernel.function.cluster
    # whole clusters of blocks
    sms = machine.num_sms // max(math.prod(cluster), 1) * math.prod(cluster)
    wave = max(sms, 1) * resident_blocks(machine, math.prod(block), kernel.registers_per_thread, shared)
    most = number(launch.typed.get("blocks", str(_WAVES * wave)), "blocks")
    return simulated_blocks(total, most or total, wave)


def scalars(done: LaunchTime) -> dict[str, Any]:
    """Numbers of a launch."""
    return {
        "seconds": done.seconds, "launch_s": done.launch_s, "cycles": done.cycles, "instructions": done.instructions,
        "ipc": done.ipc, "blocks_of_sm": done.resident, "simulated": done.simulated,
        "sampling_error": done.sampling_error, "flop": done.flop, "dram_bytes": done.dram_bytes,
        "l1_hit_rate": done.l1_hit_rate, "l2_hit_rate": done.l2_hit_rate, "camping": camping_factor(done),
    }  # fmt: skip


def record(done: LaunchTime) -> Mapping[str, Any]:
    """Numbers of a launch, its phases, and the machine's constants with their sources."""
    facts = [list(fact) for fact in done.machine.facts_below("system")]
    phases = [vars(phase) for phase in phases_of(done)]
    return {**scalars(done), "slots": done.slot_shares, "phases": phases, "facts": facts}


def _lines(done: LaunchTime, kernel: str, outputs: Outputs) -> list[str]:
    lost = sorted(
        ((share, name) for name, share in done.slot_shares.items() if name != "issued" and share), reverse=True
    )
    lines = [
        f"{kernel} on {done.machine.name}: {done.seconds * 1e6:.4g} us; its launch takes {done.launch_s * 1e6:.3g} us",
        f"  {done.ipc:.2f} warp instructions of an SM in a cycle; {done.resident} blocks on an SM at once",
        "  slots: "
        + ", ".join(f"{name} {share:.1%}" for share, name in [(done.slot_shares["issued"], "issued"), *lost]),
        f"  L1 hits {done.l1_hit_rate:.1%}, L2 {done.l2_hit_rate:.1%}; DRAM moves {done.dram_bytes:.4g} bytes",
    ]
    if done.simulated < 1:
        lines.append(
            f"  {done.simulated:.1%} of blocks are simulated; the halves of a wave differ by {done.sampling_error:.1%}"
        )
    return [*lines, f"written to {outputs.folder}/: time.json, intervals.parquet, figures/*"]


def _write(done: LaunchTime, kernel: str, outputs: Outputs) -> None:
    outputs.write_json("time", record(done))
    outputs.write_table("intervals", table(done))
    _draw([(kernel, done)], outputs)


def _draw(launches: Sequence[tuple[str, LaunchTime]], outputs: Outputs) -> None:
    """Write the trace of all launches, and figures of the longest."""
    from dse import plots

    outputs.write_text("figures/trace.json", json.dumps(perfetto(launches)))
    # figures of every kernel would be too many
    kernel, longest = max(launches, key=lambda launch: launch[1].seconds)
    for name, make in figures(longest, kernel):
        plots.save(make, outputs.figures, name)
