"""`machine collective pattern=<name>`: schedules of a collective on a machine, from the fastest, and the bound of all.

Written into the folder:

    schedule.yaml        the fastest schedule, step by step; schedule=<file> reads it back, as it does the moves
                         of an overlap schedule that is given step by step
    schedule.xml         the same as XML of MSCCL
    algorithms.parquet   a row for each algorithm and size, and for the bound
    figures/             bus bandwidth over sizes; the links of a GPU over time; `timeline.json` opens in Perfetto
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dse.backend import Interval
from dse.errors import ConfigError, Problem, Problems, pairs, validate_as
from dse.errors.parsing import parse_yaml
from dse.plots.labels import with_unit
from dse.results.run_folder import Outputs, writable
from dse.results.words import cell
from dse.values import Frozen
from dse.values.units import Bytes
from dse_collectives.explicit import Collective, CollectiveSchedule, check_schedule
from dse_collectives.msccl import xml_of
from dse_collectives.replay import replay_schedule, seconds
from dse_collectives.schedule_files import read_schedule, yaml_of
from dse_collectives.synthesis import SYNTHESISED, Synthesiser, TimedSchedule, bus_rate
from dse_collectives.topology import LinkTopology, topology_of
from simulators.hardware.machine import System, tree_of
from simulators.taskgraph.timeline import Timeline

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table

SIZES = tuple(2.0**power for power in range(10, 31, 2))
"""Bytes of the figure."""
_BOUND = "bound"
_LINKS_SHOWN = 24  # rows of the timeline's figure


class CollectiveRequest(Frozen):
    """Words of the command that have a unit or a choice."""

    pattern: Collective
    bytes: Bytes
    relay_bytes: Bytes | None = None


@dataclass(frozen=True)
class Compared:
    """Schedules of one collective and size, the fastest first. imported: whether one is from a file."""

    maker: Synthesiser
    num_bytes: float
    timed: Mapping[str, TimedSchedule]
    imported: bool

    @property
    def bound_s(self) -> float:
        """Time that no schedule is below."""
        return self.maker.bound(self.num_bytes).seconds

    @property
    def chosen(self) -> TimedSchedule:
        """The schedule that is written: the imported one, or the synthesised one."""
        return next(iter(self.timed.values()))


def collective(words: Sequence[str]) -> int:
    """`machine collective pattern=<name> [system=] [bytes=] [out=]`: compare schedules, write the synthesised one."""
    from dse.results import report

    machine_words = [word for word in words if word.startswith("system.")]
    options = pairs(
        [word for word in words if word not in machine_words],
        {"system": "mi300x_8", "bytes": "64MiB"},
        optional=["pattern", "schedule", "relay_bytes", "out"],
    )
    machine = machine_of(options["system"], machine_words)
    topology, imported = topology_of(machine), None
    if "schedule" in options:
        imported = read_schedule(Path(options["schedule"]), machine.node, options.get("pattern"))
    request = _request(options, imported)
    compared = compare(request, topology, imported)
    console = report.console()
    for line in answer(compared):
        console.print(line, soft_wrap=True, highlight=False)
    outputs = writable(options.get("out", f"outputs/collective/{request.pattern}_{topology.name}"))
    _write(compared, outputs)
    console.print(f"written to {outputs.folder}/: schedule.yaml, schedule.xml, algorithms.parquet, figures/*")
    return 0


def _request(options: Mapping[str, str], imported: CollectiveSchedule | None) -> CollectiveRequest:
    tree = {name: options[name] for name in ("pattern", "bytes", "relay_bytes") if name in options}
    check = Problems()
    if imported is not None and tree.setdefault("pattern", imported.collective) != imported.collective:
        check.add("pattern", f"is not that of the schedule, {imported.collective}", value=tree["pattern"])
    if "pattern" not in tree:
        check.add("pattern", "is missing", way_out="write pattern=all_gather, or schedule=<file>")
    check.done()
    request = validate_as(CollectiveRequest, tree, path="")
    # `bytes=0.5` passes as a number of bytes
    if request.bytes < 1:
        raise ConfigError([Problem("bytes", "is nothing to send", options["bytes"], "write bytes=1MiB")])
    return request


def machine_of(name: str, words: Sequence[str]) -> System:
    """A shipped machine, or that of a file, with values `system.<path>=<value>` put in. Raises ConfigError."""
    tree, check = tree_of(name), Problems()
    for word in words:
        path, equals, text = word.partition("=")
        *above, last = path.split(".")[1:]
        section: Any = tree
        for part in above:
            section = section.get(part) if isinstance(section, dict) else None
        if not equals or not isinstance(section, dict) or not section:
            check.add(path, f"is no value of {name}", way_out="write system.node.num_gpus=4")
        else:
            section[last] = parse_yaml(text, path)
    check.done()
    machine = check.model(System, tree, path="system")
    check.done()
    assert machine is not None
    return machine


def compare(request: CollectiveRequest, topology: LinkTopology, imported: CollectiveSchedule | None = None) -> Compared:
    """Time the synthesised schedule, those of libraries, and a given one. Raises ConfigError."""
    room = math.inf if request.relay_bytes is None else request.relay_bytes / request.bytes
    maker = Synthesiser(request.pattern, topology, relay_share=room)
    timed = {SYNTHESISED: maker.synthesise(request.bytes), **maker.timed_library(request.bytes)}
    if imported is not None:
        # proven when it was read, but not within this room
        check_schedule(imported, relay_share=room)
        timed = {
            "from the file": TimedSchedule(imported, float(seconds(imported, topology, request.bytes)[0])),
            **timed,
        }
    return Compared(maker, request.bytes, timed, imported is not None)


def answer(compared: Compared) -> Iterator[Table | str]:
    """Yield what a person wants to know: the schedules, the bound, and what each engine says of the first one."""
    topology, maker = compared.maker.topology, compared.maker
    bound = maker.bound(compared.num_bytes)
    size = with_unit(compared.num_bytes, "B")
    nodes = f" on {topology.num_nodes} nodes" if topology.num_nodes > 1 else ""
    gpus = f"{topology.num_gpus} GPUs{nodes}, {len(topology.links)} links"
    yield f"{maker.collective} of {size} on {topology.name}: {gpus}"
    yield _table(compared)
    yield (
        f"bound: {cell(bound.bandwidth_s, 's')} by the rates of links, {cell(bound.latency_s, 's')} by their latency; "
        f"{_gap(compared.chosen.seconds, compared.bound_s)} over the larger one"
    )
    yield from _replays(compared)


def _table(compared: Compared) -> Table:
    from rich.table import Table

    shown = Table(box=None, pad_edge=False)
    shown.add_column("schedule")
    for name in ("messages", "time", "bus bandwidth", "over the bound", "relayed by a GPU"):
        shown.add_column(name, justify="right")
    maker, size = compared.maker, compared.num_bytes
    for name, timed in compared.timed.items():
        rate = bus_rate(maker.collective, maker.topology.num_gpus, size, timed.seconds)
        relayed = size * max(map(timed.schedule.relayed_share, range(maker.topology.num_gpus)))
        numbers = f"{rate / 1e9:.1f} GB/s", _gap(timed.seconds, compared.bound_s), with_unit(relayed, "B")
        messages = sum(not message.is_local for message in timed.schedule.messages)
        label = timed.schedule.name if name == SYNTHESISED else name.replace("_", " ")
        shown.add_row(label, f"{messages:,}", cell(timed.seconds, "s"), *numbers)
    return shown


def _gap(time_s: float, bound_s: float) -> str:
    # rounding may put a time below its bound
    return f"{100 * max(time_s / bound_s - 1, 0.0):.2f} %"


def _replays(compared: Compared) -> Iterator[str]:
    """Yield what the engines say of the chosen schedule."""
    runs = []
    # engines that share nothing but the graph: their times should agree
    for engine in ("fluid", "event", "analytic"):
        timeline = replay_schedule(compared.chosen.schedule, compared.maker.topology, compared.num_bytes, engine)
        refused = timeline.reason(0)
        runs.append(f"{engine} {'refuses: ' + refused if refused else cell(float(timeline.makespan[0]), 's')}")
    yield f"replayed by engines: {'; '.join(runs)}"


def over_sizes(compared: Compared, sizes: Sequence[float] = SIZES) -> pd.DataFrame:
    """A row for each schedule and size, and for the bound: name, num_bytes, seconds, bus_bytes_per_s."""
    import pandas as pd

    maker = compared.maker
    schedules = dict(maker.library) | ({"from the file": compared.chosen.schedule} if compared.imported else {})
    times = {SYNTHESISED: [timed.seconds for timed in maker.synthesise_sizes(sizes)]}
    times |= {name: list(seconds(schedule, maker.topology, sizes)) for name, schedule in schedules.items()}
    times[_BOUND] = [maker.bound(size).seconds for size in sizes]
    rows = [
        (name, size, time_s, bus_rate(maker.collective, maker.topology.num_gpus, size, time_s))
        for name, of_sizes in times.items()
        for size, time_s in zip(sizes, of_sizes, strict=True)
    ]
    return pd.DataFrame(rows, columns=["name", "num_bytes", "seconds", "bus_bytes_per_s"])


def _write(compared: Compared, outputs: Outputs) -> None:
    from dse import plots
    from dse.plots import timelines
    from dse.results.report import trace
    from dse_collectives import sizes

    schedule, topology = compared.chosen.schedule, compared.maker.topology
    outputs.write_text("schedule.yaml", yaml_of(schedule))
    outputs.write_text("schedule.xml", xml_of(schedule))
    rows = over_sizes(compared)
    outputs.write_table("algorithms", rows)
    timeline = replay_schedule(schedule, topology, compared.num_bytes)
    spans = _intervals(schedule, timeline)
    outputs.write_text("figures/timeline.json", json.dumps(trace(spans, {})))
    what = f"{compared.maker.collective.replace('_', '-')} on {topology.num_gpus} GPUs of {topology.name}"
    gap = _gap(compared.chosen.seconds, compared.bound_s)
    size = with_unit(compared.num_bytes, "B")
    title = f"{what}, {size}: {cell(compared.chosen.seconds, 's')}, {gap} over the bound"
    plots.save(partial(timelines.timeline, _rows_of_links(spans), title), outputs.figures, "timeline")
    frame = plots.Frame(_claim(what, rows), "dashed: what no schedule passes; both axes logarithmic")
    axis = plots.Axis("bus_bytes_per_s", "bus bandwidth", "B/s")
    make = partial(sizes.over_sizes, rows, axis, bound=_BOUND, frame=frame)
    plots.save(make, outputs.figures, "bus_bandwidth")


def _claim(what: str, rows: pd.DataFrame) -> str:
    """The answer that the figure over sizes gives."""
    times = rows.pivot_table(index="num_bytes", columns="name", values="seconds")
    last = times.iloc[-1]
    # the best algorithm at each size, not one for all sizes
    best = times.drop(columns=[SYNTHESISED, _BOUND]).min(axis=1)
    gain = float((best / times[SYNTHESISED]).max())
    gap = _gap(float(last[SYNTHESISED]), float(last[_BOUND]))
    better = f"up to {gain:.2f}x faster than any algorithm of libraries" if gain > 1.005 else "as fast as the best one"
    size = with_unit(float(times.index[-1]), "B")
    return f"{what}: the synthesised schedule is {better}, and {gap} over the bound for {size}"


def _intervals(schedule: CollectiveSchedule, timeline: Timeline) -> list[Interval]:
    """Messages on their links, by whether they copy or add."""
    spans = []
    for span in timeline.intervals(0):
        # latencies occupy no link
        if span.kind.startswith("message"):
            adds = schedule.messages[int(span.kind.removeprefix("message "))].reduces
            spans.append(replace(span, kind="reduction" if adds else "copy"))
    return spans


def _rows_of_links(spans: Sequence[Interval]) -> pd.DataFrame:
    """Intervals of all links where they are few, else of those that leave the first GPU or reach it."""
    import pandas as pd

    lanes = sorted({span.lane for span in spans})
    # GPUs of a collective do the same: the first stands for all
    if len(lanes) > _LINKS_SHOWN:
        lanes = [lane for lane in lanes if lane.startswith("GPU 0 to ") or lane.endswith(" to 0")][:_LINKS_SHOWN]
    columns = ("lane", "kind", "start_s", "finish_s")
    return pd.DataFrame([{name: getattr(span, name) for name in columns} for span in spans if span.lane in set(lanes)])
