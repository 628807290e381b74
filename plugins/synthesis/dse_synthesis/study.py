"""Schedules that nobody wrote, beside every preset and what is proven: `schedule=synthesised` against all of `chunked`.

Of each workload on each topology: the best preset, the synthesised schedule, the bound, and the gap that is left. The
steps of what was found are written beside the table, as keys of `schedule`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from dse.config.options import load_yaml
from dse.errors import Problems
from dse.plots import Axis, Draw, FigureSheet, Frame, tables
from dse.plots.labels import label
from dse.results.answer import tables_of_winners
from dse.results.run_folder import FinishedRun, Outputs
from dse.results.words import AS_FAST, cell, gain_in_words
from dse_synthesis import CONF
from simulators.overlap.backend import OverlapBackend
from simulators.workloads.operators import workloads_of
from studies.plain import Plain, geometric_mean

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table

_FOUND = "synthesised"
_BEST = "best preset"
_TOPOLOGY = "system.node.topology"
_EFFORT = ("schedule.evaluations", "schedule.seed")
MUCH = 1.03
"""Times as fast: what counts as better."""


class Synthesis(Plain):
    """Table and figure of the study."""

    columns = ("schedule.name", *_EFFORT, _TOPOLOGY)

    def answer(self, outputs: Outputs, table: pd.DataFrame) -> Iterator[Table | str]:
        """Yield what was found beside the best preset, with what is proven."""
        both = beside(table[table["status"] == "ok"])
        if len(both):
            yield _both_table(both)
        else:
            yield from tables_of_winners(outputs, table)

    def extras(self, run: FinishedRun) -> Iterator[tuple[str, Any]]:
        """The best of both with the bound, and the steps of all that was found."""
        table = run.outputs.read_table("results")
        both = beside(table[table["status"] == "ok"])
        yield "synthesis", both
        yield "schedules", dict(_schedules(run, both))

    def figures(self, table: pd.DataFrame, timelines: pd.DataFrame) -> Iterator[tuple[str, Draw]]:
        """Speed-ups of the best preset and of what was found, with the bound that no schedule passes."""
        both = beside(table[table["status"] == "ok"])
        if len(both):
            yield "synthesised", partial(_speedups, both)


def beside(ok: pd.DataFrame) -> pd.DataFrame:
    """Of each scenario on each topology: times of the best preset and of what was found, their ratio, bound and gap."""
    import pandas as pd

    rows = []
    for (scenario, topology), points in ok.groupby(["scenario", _TOPOLOGY], sort=False, observed=True):
        synthesised = points[points["schedule.name"] == _FOUND]
        presets = points[points["schedule.name"] != _FOUND]
        if len(synthesised) and len(presets):
            best, found = (part.sort_values("makespan_s").iloc[0] for part in (presets, synthesised))
            rows.append(
                {
                    "scenario": scenario,
                    "topology": topology,
                    "preset": best["schedule.name"],
                    "preset_s": best["makespan_s"],
                    "synthesised_s": found["makespan_s"],
                    "bound_s": found["bound_s"],
                    "gain": best["makespan_s"] / found["makespan_s"],
                    "gap": found["gap"],
                    "preset_gap": best["gap"],
                    # time of the baseline, which both speed-ups are over
                    "serial_s": best["makespan_s"] * best["speedup"],
                    **{path: found[path] for path in _EFFORT},
                }
            )
    return pd.DataFrame(rows)


def _both_table(both: pd.DataFrame) -> Table:
    from rich.table import Table

    shown = Table(box=None, pad_edge=False)
    for name in ("scenario", "topology", "best preset"):
        shown.add_column(name)
    for name in ("its makespan", "synthesised", "against the best preset", "proven: no schedule gains more than"):
        shown.add_column(name, justify="right")
    for row in both.to_dict("records"):
        seconds = [cell(row[name], "s") for name in ("preset_s", "synthesised_s")]
        names = [row["scenario"], row["topology"], label(str(row["preset"]))]
        shown.add_row(*names, *seconds, gain_in_words(row["gain"]), cell(row["gap"], "fraction"))
    return shown


def _speedups(both: pd.DataFrame) -> FigureSheet:
    import pandas as pd

    parts = []
    for name, column in ((_BEST, "preset_s"), (_FOUND, "synthesised_s")):
        speedup = both["serial_s"] / both[column]
        parts.append(both.assign(schedule=name, speedup=speedup, bound=both["serial_s"] / both["bound_s"]))
    # a gain that rounds to as fast is none
    better = sum(gain > 1 and gain_in_words(gain) != AS_FAST for gain in both["gain"])
    title = f"Synthesised schedules are faster than every preset in {better} of {len(both)} cases"
    title += f", at most {gain_in_words(both['gain'].max())}" if better else ""
    note = f"{geometric_mean(both['gain']):.2f}x in the geometric mean; largest gap to the bound "
    note += f"{100 * both['gap'].max():.0f} %"
    frame = Frame(title, note, "topology")
    return tables.dots(
        pd.concat(parts),
        Axis("speedup", "speed-up over serial [x]", centre=1.0),
        row="scenario",
        by="schedule",
        frame=frame,
    )


def _schedules(run: FinishedRun, both: pd.DataFrame) -> Iterator[tuple[str, Any]]:
    """Yield the name of each case and the keys of `schedule` that say its steps."""
    backend, tree = OverlapBackend("fluid"), dict(run.config)
    workloads = workloads_of(Problems(), tree["workload"])
    option = load_yaml(CONF / "schedule" / f"{_FOUND}.yaml")
    for row in both.to_dict("records"):
        node = {**tree["system"]["node"], "topology": row["topology"]}
        effort = {path.partition(".")[2]: int(row[path]) for path in _EFFORT}
        parts: dict[str, Any] = {"system": {**tree["system"], "node": node}, "schedule": {**option, **effort}}
        design = backend.design({**parts, "workload": workloads[row["scenario"]]})
        # read from the cache that the run filled: nothing is searched again
        settled: Any = backend.settle(design).schedule
        yield f"{row['scenario']} on {row['topology']}", settled.explicit()


STUDY = Synthesis()
