"""Statistics of a memory trace of one's own in a memory system, set by set and channel by channel.

    python -m dse profile memory data=<file> [system=gem5_gcn3] [policy=combined] [out=<folder>] [rows=<n>]

Formats are those of `dse_memory_traces.recorded`. rows: of one replay, for traces that take longer than the engine's
clock can tell; L1s are empty, and L2 has written back, where the next begins. Written into the folder:

    statistics.json   totals, rates and times, every constant with its source, what was made with what
    sets.parquet      slice, set, lookups, misses, stalls: of every set of L2 (a policy without loads looks none up)
    channels.parquet  channel, reads, writes, row_hits, activations
    banks.parquet     channel, bank, accesses, row_hits
    activity.parquet  second, channel, lines: lines that a channel moved in the bin of time from that second
    figures/activity  GB/s of every channel over time
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dse.errors import ConfigError, Problem, Problems, pairs
from dse.errors.parsing import parse_yaml, whole_number
from dse.results import provenance
from dse.results.run_folder import Outputs, writable
from dse.results.words import cell
from dse.space import set_path
from dse_memory import engine
from dse_memory.backend import MemoryBackend
from dse_memory.design import MemoryDesign
from dse_memory.measures import METRICS, SimulatedApplication, measure
from dse_memory.simulation import Simulation
from dse_memory_traces.recorded import RequestRecording, read, replay_recording
from simulators.hardware.machine import tree_of
from simulators.workloads.model_zoo import option_tree

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table

    from dse.plots import FigureSheet

_SECTIONS = ("system", "policy")
_SHOWN = 5  # rows of a table on the screen
_DRAWN = 16  # bins of the figure
_MOST_KERNELS = 1000  # that are listed
# fmt: off
TOTALS = (
    "requests", "l1_hits", "l1_merged", "l1_stalls", "l1_bypassed", "l2_hits", "l2_merged", "l2_misses", "l2_stalls",
    "l2_bypassed", "predicted", "useless", "evicted", "rinsed", "reads", "writes", "row_hits", "activations", "turns",
)
# fmt: on
"""Counts of the engine that are told, by its names."""
_UNSAID = ("compute_share", "kernels", "launch_share", "simulated")  # of metrics: say nothing of a trace


@dataclass(frozen=True)
class RecordingReplay:
    """A recording, the design that names its machine, and what came of it."""

    recording: RequestRecording
    design: MemoryDesign
    found: SimulatedApplication

    @property
    def machine(self) -> Simulation:
        """As the replay left it."""
        return self.found.machine

    @property
    def totals(self) -> dict[str, int]:
        """Counts of the engine over all parts."""
        total = self.found.total("totals")
        return {name: int(total[getattr(engine, name.upper())]) for name in TOTALS}

    @property
    def statistics(self) -> dict[str, float]:
        """Metrics of the memory backend that say something of a trace."""
        metrics = measure(self.design, self.found)
        return {name: float(value) for name, value in metrics.items() if name not in _UNSAID}


def trace(words: Sequence[str]) -> int:
    """`profile memory data=<file> [...]`: replay a memory trace, and write what sets and channels saw."""
    from dse.results import report

    options, trees = _parse_words(words)
    design = design_of(trees["system"], trees["policy"])
    at_once = _count(options.get("rows", "0"))
    data = Path(options["data"])
    outputs = writable(options.get("out", f"outputs/trace/{data.name.partition('.')[0]}"))
    recording = read(data, design.system, design.policy, at_once=at_once, folder=outputs.folder)
    done = run(recording, design, outputs.folder)
    record = provenance.record(["profile", "memory", *words], None, backend=f"memory {MemoryBackend.version}", seed=0)
    outputs.write_json("statistics", {"data": data.name, **statistics_record(done), "made": record})
    _write(done, outputs)
    console = report.console()
    for table in (_table(done.statistics, data.name), _channels_shown(done), _sets_shown(done)):
        console.print(table)
    written = "statistics.json, sets.parquet, channels.parquet, banks.parquet, activity.parquet, figures/activity.png"
    console.print(f"written to {outputs.folder}/: {written}", soft_wrap=True)
    return 0


def run(recording: RequestRecording, design: MemoryDesign, folder: Path | None = None) -> RecordingReplay:
    """Replay a recording on a fresh machine. Raises ConfigError where it takes longer than the clock can tell."""
    machine = Simulation(design.system, design.policy, held=1, per_set=True)
    try:
        costs = replay_recording(recording, machine, folder)
    except OverflowError as error:
        way = "rows=<n> replays so many at once"
        raise ConfigError([Problem("data", str(error).partition(";")[0], way_out=way)]) from None
    return RecordingReplay(recording, design, SimulatedApplication(machine, tuple((cost, 1) for cost in costs)))


def design_of(system: Mapping[str, Any], policy: Mapping[str, Any]) -> MemoryDesign:
    """A memory system and a policy, with an application that is not run. Raises ConfigError with every problem."""
    rates = system.get("gpu", {}).get("flop_per_s") or {"fp32": 0}
    nothing = {"kind": "elementwise", "reads": ["x"], "writes": ["x"]}
    application = {"name": "trace", "precision": next(iter(rates)), "tensors": {"x": [1]}}
    tree = {"system": system, "policy": policy, "run": {"requests": 1000, "repeats": 1}}
    tree["application"] = {**application, "groups": [{"kernels": [nothing]}]}
    backend = MemoryBackend()
    design = backend.design(tree)
    broken = backend.problems(design)
    if broken:
        raise ConfigError(broken)
    return design


def statistics_record(done: RecordingReplay) -> dict[str, Any]:
    """Record of `statistics.json` beside the provenance."""
    recording, system, costs = done.recording, done.design.system, done.found.costs
    facts = {
        path: {"value": value, "provenance": kind, "source": source}
        for path, value, kind, source in system.facts_below("system")
    }
    return {
        "system": system.name,
        "policy": done.design.policy.model_dump(mode="json"),
        "rows": len(recording.rows),
        "instructions": len(recording.stores),
        "address_base": recording.base,
        "not_counted": dict(recording.skipped),
        "statistics": done.statistics,
        "totals": done.totals,
        "num_replays": len(costs),
        "replays": [{"name": cost.name, "time_s": cost.seconds} for cost, _ in costs[:_MOST_KERNELS]],
        "constants": facts,
    }


def sets(machine: Simulation) -> pd.DataFrame:
    """A row for every set of L2: slice, set, lookups, misses, stalls."""
    import pandas as pd

    slices = machine.system.gpu.dram.channels
    counts = machine.part("by_set").reshape(-1, 3)
    num_sets = len(counts) // slices
    places = {"slice": np.repeat(np.arange(slices), num_sets), "set": np.tile(np.arange(num_sets), slices)}
    return pd.DataFrame(places | dict(zip(("lookups", "misses", "stalls"), counts.T, strict=True)))


def channels(machine: Simulation) -> pd.DataFrame:
    """A row for every channel: reads, writes, row_hits, activations."""
    import pandas as pd

    counts = machine.part("by_channel").reshape(-1, 4)
    names = ("reads", "writes", "row_hits", "activations")
    return pd.DataFrame({"channel": np.arange(len(counts))} | dict(zip(names, counts.T, strict=True)))


def banks(machine: Simulation) -> pd.DataFrame:
    """A row for every bank of DRAM: channel, bank, accesses, row_hits."""
    import pandas as pd

    counts, num_banks = machine.part("by_bank").reshape(-1, 2), machine.system.gpu.dram.banks
    places = {"channel": np.arange(len(counts)) // num_banks, "bank": np.arange(len(counts)) % num_banks}
    return pd.DataFrame({**places, "accesses": counts[:, 0], "row_hits": counts[:, 0] - counts[:, 1]})


def activity(machine: Simulation) -> pd.DataFrame:
    """A row for every bin of time and channel: second (of the bin's begin), channel, lines that it moved."""
    import pandas as pd

    measured = machine.activity()
    bins, num_channels = measured.channels.shape
    seconds = np.repeat(np.arange(bins) * measured.seconds, num_channels)
    return pd.DataFrame(
        {"second": seconds, "channel": np.tile(np.arange(num_channels), bins), "lines": measured.channels.reshape(-1)}
    )


def _parse_words(words: Sequence[str]) -> tuple[dict[str, str], dict[str, dict[str, Any]]]:
    """(options of a command line, trees of the system and the policy)."""
    overrides = [
        word
        for word in words
        if word.partition("=")[0].partition(".")[0] in _SECTIONS and "." in word.partition("=")[0]
    ]
    options_typed = [word for word in words if word not in overrides]
    options = pairs(options_typed, {"data": "", "system": "gem5_gcn3", "policy": "combined"}, optional=["out", "rows"])
    trees = {"system": tree_of(options["system"]), "policy": option_tree("policy", options["policy"])}
    check = Problems()
    for word in overrides:
        path, _, value = word.partition("=")
        try:
            set_path(trees, path, parse_yaml(value, path))
        except KeyError:
            check.add(path, "is no path of a value", value=value, way_out="write system.gpu.l2.bytes=8388608")
    check.done()
    return options, trees


def _count(text: str) -> int:
    if (number := whole_number(text)) is None:
        raise ConfigError([Problem("rows", "must be a whole number", text, "rows=16000000")])
    return number


def _write(done: RecordingReplay, outputs: Outputs) -> None:
    """Tables, the configuration and the figure."""
    from dse import plots

    machine = done.machine
    for name, table in {"sets": sets, "channels": channels, "banks": banks, "activity": activity}.items():
        outputs.write_table(name, table(machine))
    outputs.write_config(
        {"system": machine.system.model_dump(mode="json"), "policy": machine.policy.model_dump(mode="json")}
    )
    plots.save(partial(_activity_figure, machine), outputs.figures, "activity")


def _activity_figure(machine: Simulation) -> FigureSheet:
    """Rate of each channel over time, as a share of the largest; bins of time are put together until they are few."""
    from dse.plots import Frame, tables
    from dse.values.units import with_prefix

    table, width = activity(machine), machine.activity().seconds
    times = -(-len(table) // machine.system.gpu.dram.channels // _DRAWN) or 1
    table["bin"] = (table["second"] / (times * width) + 1e-9).astype(int)
    lines = table.pivot_table(index="bin", columns="channel", values="lines", aggfunc="sum", fill_value=0)
    rates = lines.to_numpy(float) * machine.system.gpu.line_bytes / (times * width)
    most, camping = float(rates.max()) or 1.0, float(rates.sum(axis=0).max() / (rates.sum(axis=0).mean() or 1.0))
    unit = "byte/second"
    title = f"The busiest channel of DRAM moves {camping:.2f}x the mean; the largest rate is {with_prefix(most, unit)}"
    name = f"{machine.system.name}, {machine.policy.name}"
    frame = Frame(title, "shade: rate of a channel, of the largest")
    return tables.raster({name: rates / most}, {name: times * width}, lane="channel of DRAM", frame=frame, marks={})


def _table(values: Mapping[str, float], name: str) -> Table:
    from rich.table import Table

    table = Table("statistic", "value", title=name)
    for statistic, value in values.items():
        table.add_row(statistic, cell(value, METRICS[statistic].unit))
    return table


def _channels_shown(done: RecordingReplay) -> Table:
    """The channels that moved most."""
    table = channels(done.machine)
    order = (table["reads"] + table["writes"]).sort_values(ascending=False, kind="stable").index
    return _first(table.loc[order], f"busiest of {len(table)} channels")


def _sets_shown(done: RecordingReplay) -> Table:
    """The sets that missed most."""
    table = sets(done.machine)
    return _first(
        table.sort_values(["misses", "lookups"], ascending=False, kind="stable"),
        f"most misses of {len(table)} sets of L2",
    )


def _first(rows: pd.DataFrame, title: str) -> Table:
    from rich.table import Table

    table = Table(*rows.columns, title=title)
    for row in rows.head(_SHOWN).itertuples(index=False):
        table.add_row(*map(str, row))
    return table
