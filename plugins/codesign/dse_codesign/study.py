"""Co-design: which machine is best for each workload and for all, and what each of its features is worth.

Points are machines within the limits, each with its best plans (`dse_codesign`). The machine for a workload is
the fastest on it; the robust one has the least regret: over the workloads, the largest share by which it is slower than
the fastest machine. Existing machines stand beside them, with the speeds of their own constants.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dse.errors import ConfigError
from dse.errors.parsing import parse_json
from dse.plots.labels import words
from dse.results.run_folder import FinishedRun, Outputs
from dse.results.words import cell
from dse.space import get_path
from dse.study.settings import Decide
from dse.values.units import quantity_text
from dse_codesign import figures as codesign_figures
from dse_codesign import slopes as machine_slopes
from dse_codesign.backend import CodesignBackend, Judge
from dse_codesign.machine import Base, Machine, assumptions
from dse_codesign.technology import price
from dse_codesign.workloads import steps_of
from dse_codesign.worth import Limits, contributions, differences, front_odds, row_of, with_numbers, worths
from simulators.hardware.device import ScheduledDevice
from simulators.hardware.machine import merged, tree_of
from simulators.hardware.parts import PeakFormat
from studies.plain import Plain

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table

_SECTIONS = ("system", "technology", "machine", "workloads")
_FACTORS = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0)  # of memory and links on the map of break-evens
_ROOF: PeakFormat = "bf16"


@dataclass(frozen=True)
class Machines:
    """The machines of a run within its limits. table: of them, a row each."""

    config: Mapping[str, Any]
    table: pd.DataFrame

    @classmethod
    def of(cls, config: Mapping[str, Any], table: pd.DataFrame) -> Machines:
        """Build from a table of results."""
        ok = table[table["status"] == "ok"]
        # limits are of the configuration: a table may hold machines beyond them
        machines = cls(config, ok)
        for name, limit in machines.limits.items():
            ok = ok[ok[name] <= limit["high"]] if limit.get("high") is not None else ok
            ok = ok[ok[name] >= limit["low"]] if limit.get("low") is not None else ok
        return cls(config, ok.reset_index(drop=True))

    @property
    def limits(self) -> Limits:
        """Limits of the study by metric, those of the budget among them."""
        return self.config["study"].get("limits") or {}

    @cached_property
    def judge(self) -> Judge:
        """Judge of the machines."""
        return _judge_of(json.dumps({name: self.config[name] for name in _SECTIONS}, sort_keys=True))

    def machine(self, row: Mapping[str, Any]) -> Machine:
        """The machine of a row: a cell that is empty is the base's."""
        cells = {name: f"machine.{name}" for name in Machine.model_fields}  # metrics may have the names of knobs
        changes = {
            # NaN is the only value that differs from itself
            name: Machine.model_fields[name].default if row[path] is None or row[path] != row[path] else row[path]
            for name, path in cells.items()
            if path in row
        }
        return Machine.model_validate({**self.config["machine"], **changes})

    @cached_property
    def all(self) -> list[Machine]:
        """The machine of each row."""
        return [self.machine({str(k): v for k, v in row.items()}) for row in self.table.to_dict("records")]

    @cached_property
    def speeds(self) -> dict[str, NDArray[np.float64]]:
        """Speed of each machine over the base's, by workload."""
        # tables hold means over workloads, not speeds of each
        judged = self.judge.judge_all([(machine, 1) for machine in self.all])
        return {name: np.array([part.speeds[name][0] for part in judged]) for name in self.judge.steps}

    @cached_property
    def regret(self) -> NDArray[np.float64]:
        """The largest share by which a machine is slower than the fastest one, over the workloads."""
        return np.asarray(np.max(np.stack([1 - speed / speed.max() for speed in self.speeds.values()]), axis=0))

    @cached_property
    def chosen(self) -> dict[str, int]:
        """Places of the machine for each workload, the robust one, and the one with most throughput for a dollar."""
        best = {f"fastest {name}": int(np.argmax(speed)) for name, speed in self.speeds.items()}
        return {**best, "robust": int(np.argmin(self.regret)), "most for a dollar": int(self.table["value_x"].argmax())}

    @cached_property
    def slopes(self) -> list[machine_slopes.Slope]:
        """Slopes on the robust machine."""
        return machine_slopes.slopes(self.judge, self.all[self.chosen["robust"]], self.limits)

    @cached_property
    def front(self) -> NDArray[np.intp]:
        """Places of the machines on the front of throughput, power and cost."""
        import moocore

        # moocore minimises
        columns = self.table[["throughput_x", "power_w", "cost_usd"]].to_numpy(float) * [-1, 1, 1]
        return np.flatnonzero(moocore.is_nondominated(columns, keep_weakly=True))

    def existing_machines(self) -> pd.DataFrame:
        """Existing machines with their prices and speeds; NaN where a machine lacks constants for a workload.

        Those of whose network nothing is known have that of the base.
        """
        import pandas as pd

        rows = []
        for name in assumptions().existing:
            tree = self.config["system"] if name == self.config["system"]["name"] else self._with_network(tree_of(name))
            try:
                base = Base(ScheduledDevice.of(tree), self.judge.base.technology)
                judges = {key: Judge(base, self._steps(key, tree)) for key in self.judge.steps}
            # a machine of whose dies nothing is known has no price
            except (ConfigError, ValueError):
                continue
            speeds = {key: _speed(judge, key) / self.judge.at_base[key] for key, judge in judges.items()}
            priced = price(base.knobs, base.technology.nominal)
            # the mean of the workloads that its constants allow
            rated = [(self.judge.steps[key].weight, speed) for key, speed in speeds.items() if speed == speed]
            mean = float(np.exp(sum(w * np.log(s) for w, s in rated) / sum(w for w, _ in rated))) if rated else np.nan
            prices = {"power_w": float(priced.power_w), "cost_usd": float(np.squeeze(priced.total_usd))}
            rows.append({"machine": name, "throughput_x": mean, **prices, **speeds})
        return pd.DataFrame(rows)

    def _with_network(self, tree: Mapping[str, Any]) -> Mapping[str, Any]:
        path = "node.library.network_bytes_per_s"
        rate = get_path(self.config["system"], path)
        # a machine without its own rate between nodes gets the base's
        if rate is None or get_path(tree, "node.library") is None or get_path(tree, path) is not None:
            return tree
        network = {"node": {"library": {"network_bytes_per_s": rate}}}
        sources = {path: {"provenance": "assumed", "source": "that of the base"}}
        return merged(tree, network | {"sources": sources})

    def _steps(self, name: str, system: Mapping[str, Any]) -> Any:
        try:
            return steps_of({name: self.config["workloads"][name]}, system)
        except ConfigError:  # constants that this machine lacks
            return {}


def _speed(judge: Judge, name: str) -> float:
    return judge.at_base[name] if judge.steps else float("nan")


@lru_cache(maxsize=4)
def _judge_of(sections: str) -> Judge:
    """Judge of a configuration, as JSON; what it has computed is kept for the figures."""
    design = CodesignBackend().design(parse_json(sections, "design"))
    return Judge(Base(design.system, design.technology), design.workloads)


class CodesignStudy(Plain):
    """Machines for each workload and for all, worth of features, existing machines, and figures."""

    def answer(self, outputs: Outputs, table: pd.DataFrame) -> Iterator[Table | str]:
        """Yield the machines that are best at something, and what features of the robust one are worth."""
        machines = Machines.of(outputs.read_config(), table)
        if machines.table.empty:
            yield from _what_binds(outputs, table)
            return
        on_front = f"{len(machines.front)} on the front of speed, power and cost"
        yield f"{len(machines.table):,} machines are within the limits, {on_front}"
        yield _chosen_table(machines)
        yield from _worth_table(machines)
        yield from _slopes_table(machines)
        yield _ideal_text(machines)
        yield from _existing_table(machines)

    def extras(self, run: FinishedRun) -> Iterator[tuple[str, Any]]:
        """Tables of worth, contributions, odds and existing machines, and the figures that need them."""
        machines = Machines.of(run.config, run.outputs.read_table("results"))
        if machines.table.empty:
            return
        rows = worth_rows(machines)
        yield "worth", rows
        yield "slopes", (slopes := slope_rows(machines))
        yield "contributions", contribution_rows(machines)
        yield "existing_machines", (existing := machines.existing_machines())
        yield "front", partial(codesign_figures.front, points_of(machines), existing)
        yield "tornado", partial(codesign_figures.worth, rows)
        yield "elasticities", partial(codesign_figures.elasticities, slopes)
        yield "break_even", partial(codesign_figures.break_even, break_even_rows(machines))
        yield "roofline", partial(codesign_figures.roofline, *roofline_rows(machines))


def _what_binds(outputs: Outputs, table: pd.DataFrame) -> Iterator[str]:
    """For each limit, the least (most) that any machine reaches, and by how much that is beyond it."""
    limits = (outputs.read_config()["study"].get("limits") or {}).items()
    units = outputs.read_json("summary")["units"]
    ok = table[table["status"] == "ok"]
    if ok.empty:
        yield "no machine breaks no rule: see the reasons in the table"
        return
    for name, limit in limits:
        for side, best in (("high", ok[name].min()), ("low", ok[name].max())):
            bound = limit.get(side)
            if bound is not None and (best > bound if side == "high" else best < bound):
                sign, least = ("<=", "least") if side == "high" else (">=", "most")
                beyond = f"the {least} is {cell(best, units[name])}, {100 * abs(best / bound - 1):.0f} % beyond"
                yield f"no machine meets {words(name)} {sign} {cell(bound, units[name])}: {beyond}"


def worth_rows(machines: Machines) -> pd.DataFrame:
    """A row for each feature of the robust machine."""
    import pandas as pd

    robust = machines.all[machines.chosen["robust"]]
    return pd.DataFrame([row_of(part) for part in worths(machines.judge, robust, machines.limits)])


def slope_rows(machines: Machines) -> pd.DataFrame:
    """A row for each number of the robust machine: what 1 % more of it does."""
    import pandas as pd

    return pd.DataFrame([machine_slopes.row_of(slope) for slope in machines.slopes])


def contribution_rows(machines: Machines) -> pd.DataFrame:
    """Contribution of each knob between the base and the robust machine."""
    import pandas as pd

    shares = contributions(machines.judge, Machine(), machines.all[machines.chosen["robust"]])
    return pd.DataFrame([{"knob": name, "speed": factor, "usd": usd} for name, (factor, usd) in shares.items()])


def points_of(machines: Machines) -> pd.DataFrame:
    """The machines, with the odds of those on the front."""
    rows = machines.table[["throughput_x", "power_w", "cost_usd", "status"]].copy()
    rows["odds"], rows["on_front"], rows["kind"] = np.nan, False, "searched"
    rows.loc[machines.front, "on_front"] = True
    speeds = [float(machines.table["throughput_x"].iloc[place]) for place in machines.front]
    on_front = [machines.all[place] for place in machines.front]
    rows.loc[machines.front, "odds"] = front_odds(machines.judge, on_front, speeds)
    return rows


def break_even_rows(machines: Machines) -> pd.DataFrame:
    """Throughput for a dollar of machines with other memory and links than the robust one, over that of it."""
    import pandas as pd

    start = with_numbers(machines.judge, machines.all[machines.chosen["robust"]])
    pairs = [(memory, links) for links in reversed(_FACTORS) for memory in _FACTORS]
    changed = [
        start.model_copy(update={"hbm_stacks": start.hbm_stacks * memory, "links": start.links * links})  # type: ignore[operator]
        for memory, links in pairs
    ]
    judged = machines.judge.judge_all([(machine, 1) for machine in (start, *changed)])
    # place 0 is the robust machine itself
    values = [float(np.squeeze(part.throughput / part.price.total_usd)) for part in judged]
    return pd.DataFrame(
        [
            {"memory": memory, "links": f"links {links:g}x", "value": value / values[0]}
            for (memory, links), value in zip(pairs, values[1:], strict=True)
        ]
    )


def roofline_rows(machines: Machines) -> tuple[pd.DataFrame, tuple[float, float]]:
    """Intensity and rate of each workload's step on the base and on the robust machine, and the roof of that one."""
    import pandas as pd

    robust = machines.all[machines.chosen["robust"]]
    judged = machines.judge.judge_all([(Machine(), 1), (robust, 1)])
    rows = []
    for label, part in zip(("base", "robust"), judged, strict=True):
        for name, step in part.steps.items():
            flop, traffic, seconds = (float(step[metric][0]) for metric in ("flop", "hbm_bytes", "iteration_s"))
            rows.append({"step": f"{name}, {label}", "intensity": flop / traffic, "rate": flop / seconds, "size": 1.0})
    gpu = machines.judge.base.system_of(robust).gpu
    # peaks hold for the nominal clock, and grow with the number of CUs
    peak = float(np.squeeze(gpu.peak(_ROOF) * np.asarray(gpu.clock)))
    return pd.DataFrame(rows), (peak, float(np.squeeze(gpu.hbm_bytes_per_s)))


def _chosen_table(machines: Machines) -> Table:
    from rich.table import Table

    shown = Table(box=None, pad_edge=False)
    names = list(machines.speeds)
    shown.add_column("machine")
    shown.add_column("by what differs from the base", max_width=60)
    for name in (*names, "regret", "die", "power", "cost"):
        shown.add_column(name, justify="right")
    for label, place in machines.chosen.items():
        row, machine = machines.table.iloc[place], machines.all[place]
        differs = " ".join(
            f"{name}={getattr(machine, name)}" for name in differences(machines.judge, Machine(), machine)
        )
        speeds = [f"{machines.speeds[name][place]:.2f}x" for name in names]
        prices = [f"{row['die_mm2']:.0f} mm2", f"{row['power_w']:.0f} W", f"${row['cost_usd']:,.0f}"]
        shown.add_row(label, differs or "the base", *speeds, cell(machines.regret[place], "fraction"), *prices)
    return shown


def _ideal_text(machines: Machines) -> str:
    """Gain of ideal schedules, which software need not run, on the robust machine beyond its plans."""
    machine = machines.all[machines.chosen["robust"]]
    judged, ideal = (judge.judge(machine, 1) for judge in (machines.judge, machines.judge.with_ideal()))
    tokens = "tokens_per_s"
    gains = {name: float(columns[tokens][0] / judged.steps[name][tokens][0]) for name, columns in ideal.steps.items()}
    text = ", ".join(f"{name} {gain:.2f}x" for name, gain in gains.items())
    return f"the same with ideal schedules, limited by the hardware alone: {text} as fast"


_LEAST = Decide().least  # of the odds, from which it is decided whether a feature pays


def _worth_table(machines: Machines) -> Iterator[Table | str]:
    from rich.table import Table

    rows = worth_rows(machines)
    shown = Table(box=None, pad_edge=False)
    for name in ("on the robust machine", "speed", "takes", "worth", "area", "power", "within the budget", "pays"):
        shown.add_column(name, justify="left" if name == "on the robust machine" else "right")
    for row in rows.to_dict("records"):
        low, high = (100 * (row[f"gain_{end}"] - 1) for end in ("low", "high"))
        gain = f"{100 * (row['gain'] - 1):+.1f} % ({low:.1f}–{high:.1f})"
        dollars = [_usd(row[name]) for name in ("usd", "usd_worth")]
        prices = [*dollars, f"{row['area_mm2']:.1f} mm2", f"{row['power_w']:.1f} W"]
        within = "yes" if row["within_budget"] else f"no: {row['beyond']}"
        shown.add_row(row["feature"], gain, *prices, within, _pays(row))
    yield shown
    yield (
        "worth: price at which throughput per dollar breaks even; pays: it costs less, within the budget; in brackets:"
        " 90 % intervals of the speed, and in how many draws of technologies and errors of the speed it costs less"
    )
    shares = contribution_rows(machines)
    parts = [f"{row['knob']} {row['speed']:.3f}x ({row['usd']:+,.0f} USD)" for row in shares.to_dict("records")]
    if parts:
        yield f"from the base to the robust machine (Shapley values): {', '.join(parts)}"


def _pays(row: Mapping[Any, Any]) -> str:
    """Whether a feature pays, and in how many draws it costs less; beyond a limit, whether it would."""
    odds = float(row["odds"])
    verdict = "yes" if odds >= _LEAST else "no" if 1 - odds >= _LEAST else "too close to call"
    return f"{verdict} ({100 * odds:.0f} %)" if row["within_budget"] else f"over budget (else {verdict})"


def _slopes_table(machines: Machines) -> Iterator[Table | str]:
    from rich.table import Table

    columns = {**{name: name for name in machines.speeds}, **dict(zip(machine_slopes.METRICS, _SLOPES, strict=True))}
    shown = Table(box=None, pad_edge=False)
    for name in ("1 % more, in %", "now", *columns.values(), "pays"):
        shown.add_column(name, justify="left" if name == "1 % more, in %" else "right")
    for slope in machines.slopes:
        cells = [_slope_text(slope, name) for name in columns]
        shown.add_row(slope.number, quantity_text(slope.value, slope.number), *cells, slope.pays or "–")
    yield shown
    if any(slope.has_kink(name) for slope in machines.slopes for name in columns):
        why = "plans change there, a cap begins to bind, or CUs, which are whole, make another wave or need a spare one"
        yield f"*: mean of both sides, which differ: {why}"
    for metric in machine_slopes.PRICES:
        if trade := machine_slopes.best_trade(machines.slopes, metric):
            moved = f"{trade.more:+.2g} % {words(trade.raised)} for {-trade.less:+.2g} % {words(trade.lowered)}"
            yield f"trade at equal {_EQUAL.get(metric, metric)}: {moved}: {trade.gain:+.2g} % speed"


def _slope_text(slope: machine_slopes.Slope, name: str) -> str:
    """The mean of both sides [%], with a star at a kink; a dash where a metric jumps on both."""
    mean = slope.mean(name)
    return "–" if mean != mean else f"{mean + 0.0:+.2f}{'*' if slope.has_kink(name) else ''}"


_EQUAL = {"cost_usd": "cost", "power_w": "power", "area_mm2": "area"}
"""Metric -> what is equal in a trade."""
_SLOPES = ("speed", "for a dollar", "cost", "power", "area")


def _usd(amount: float) -> str:
    return f"{'-' if amount <= -0.5 else ''}${abs(amount):,.0f}"


def _existing_table(machines: Machines) -> Iterator[Table | str]:
    from rich.table import Table

    rows = machines.existing_machines()
    names = list(machines.speeds)
    shown = Table(box=None, pad_edge=False)
    for name in ("existing machine", *names, "for a dollar", "power", "cost"):
        shown.add_column(name, justify="left" if name == "existing machine" else "right")
    for row in rows.to_dict("records"):
        value = row["throughput_x"] * machines.judge.base_cost / row["cost_usd"]
        speeds = ["–" if row[name] != row[name] else f"{row[name]:.2f}x" for name in names]
        shown.add_row(row["machine"], *speeds, f"{value:.2f}x", f"{row['power_w']:.0f} W", f"${row['cost_usd']:,.0f}")
    yield shown
    for name in names:
        rated = rows[rows[name].notna()]
        best = rated.iloc[(rated[name] / rated["cost_usd"]).argmax()]
        yield f"to buy for {name}: {best['machine']} does most for a dollar of these"
    yield _dominance(machines, rows)


def _dominance(machines: Machines, rows: pd.DataFrame) -> str:
    """Say if an existing machine that is known on all workloads dominates the front."""
    names, best = list(machines.speeds), machines.table.iloc[machines.front]
    for row in rows.dropna(subset=names).to_dict("records"):
        cheaper = best[best["cost_usd"] <= row["cost_usd"]]
        # against the fastest machine of the front that costs no more
        over = row["throughput_x"] / cheaper["throughput_x"].max() - 1 if len(cheaper) else 0.0
        if over > 0:
            return f"{row['machine']} is {100 * over:.0f} % faster than all machines of the front that cost no more"
    return "no existing machine is faster than all machines of the front that cost no more"


STUDY = CodesignStudy()
