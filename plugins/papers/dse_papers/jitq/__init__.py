"""JIT-Q (arXiv:2311.05034): low-precision copies of weights that are made in memory just before they are needed.

A point is an iteration of a model whose copies are stored, or made just in time by the GPU or by units at the banks of
its memory. Savings and losses are relative to the same iteration with stored copies. mu is the share of the time of
units in memory that the GPU loses to their bursts; it is simulated (`simulators/costs/pim_bursts.py`), not fitted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dse.backend import Interval
from dse.config.options import list_options
from dse.plots import Axis, Draw, FigureSheet, Frame, fronts, tables
from dse.plots.timelines import timeline
from dse.results.claims import ClaimResult
from dse.results.run_folder import FinishedRun
from dse.space import Case
from dse.values import put_all
from dse_papers.bases import legal_base
from dse_papers.jitq import numerics
from dse_papers.jitq.capacity import Base, Copies, grid
from simulators.hardware.machine import merged, tree_of
from simulators.hardware.pim import Format, Pim
from simulators.steps.design import StepDesign
from simulators.steps.run.build import iteration
from simulators.steps.run.task_graph import WAITING, intervals
from simulators.workloads.model_zoo import model_tree, option_tree
from studies.common.facts import facts
from studies.common.iterations import step_tree
from studies.plain import Plain, extremes, range_of, reach, winning_rows

if TYPE_CHECKING:
    import pandas as pd

_WAY, _SET, _TP, _MICRO = "quantised.name", "instructions.name", "parallel.tp", "run.micro_batches"
_AHEAD, _ROWS, _KEPT = "quantised.look_ahead", "quantised.burst_rows", "quantised.kept"
_STORED, _BESIDE = "quantised.stored", "quantised.beside"
_UNITS, _RATE = "system.gpu.pim.units_per_bank", "system.gpu.pim.command_rate"
_NEEDED = {_WAY, _SET, _TP, _MICRO, _AHEAD, _ROWS, _KEPT, _STORED, _BESIDE, _UNITS, _RATE}
_PERCENT = 100.0
_ACCOUNT = "which weights, gradients and states the paper counts, and which copies, is not public"
# memories with units whose gain is compared with the published range
_PARTS = ("hbm2_pim", "hbm3_strawman", "lpddr5x")
_LAYERS_SHOWN = 3
_WAYS = {"stored": "stored", "gpu": "made by the GPU", "pim": "made in memory"}
_COST_OF_COPIES = {"bytes_per_parameter": "byte", "share_quantisation": "fraction"}
_COPIES = {"used": "the two copies that training reads", "all": "four copies (MX9 and MX6, both ways)"}
_SLOWED = (
    "what covers a burst is assumed (half of the LDS, in which tiles hold the same bytes); the paper's way is not known"
)


class JitQ(Plain):
    """Claims, effects of knobs, accountings of memory, and turns of GPU and memory."""

    columns = (
        "instructions.name",
        "parallel.tp",
        "quantised.beside",
        "quantised.burst_rows",
        "quantised.kept",
        "quantised.look_ahead",
        "quantised.name",
        "quantised.stored",
        "run.micro_batches",
        "system.gpu.pim.command_rate",
        "system.gpu.pim.units_per_bank",
    )

    def cases(self, config: Mapping[str, Any]) -> Mapping[str, Mapping[str, Case]]:
        """Iterations with each memory that computes, their copies made in each way."""
        every = ((case, way) for case in facts("jitq")["systems"] for way in _WAYS)
        return {"systems": {_label(case, way): _case_of(config, case, way) for case, way in every}}

    def further(self, run: FinishedRun) -> Mapping[str, ClaimResult]:
        """Findings of every claim."""
        table = _searched_points(run.outputs.read_table("results"))
        rows = _as_configured(table, run)
        absent = ClaimResult(
            None, "needs copies that are stored, made by the GPU and made by units, on the configured hardware"
        )
        findings = {claim.id: absent for claim in self.claims()} | _of_parts()
        if set(rows.get(_WAY, ())) >= {"gpu", "pim"}:
            (published,) = (claim.value for claim in self.claims() if claim.id == "jitq.capacity_saved")
            assert not isinstance(published, tuple)
            around = {path: _as_configured(table, run, path) for path in (_ROWS, _BESIDE)}
            findings |= {**_lost(rows, around), **_capacity_saved(rows, published), **_fits(table)}
        return findings | _pace(run)

    def figures(self, table: pd.DataFrame, timelines: pd.DataFrame) -> Iterator[tuple[str, Draw]]:
        """Front of memory against time."""
        ok = _searched_points(table)
        if not ok.empty:
            yield "front", partial(_front, ok)

    def extras(self, run: FinishedRun) -> Iterator[tuple[str, Any]]:
        """Accountings of memory, shares that bursts cost, other memories, and turns of GPU and memory."""
        import pandas as pd

        accounts = pd.DataFrame(_accounts())
        yield "accountings", accounts
        yield "capacity", partial(_capacity_figure, accounts)
        table = _searched_points(run.outputs.read_table("results"))
        if len(table):
            yield "contention", _contention(_as_configured(table, run))
            yield from _losses(table, run)
        yield "systems", _systems(run)
        yield from _numbers()
        design = _designs(run).get(next(iter(_names(run)), ""))
        if design is not None:
            yield "turns", partial(_turns, design)


def _searched_points(table: pd.DataFrame) -> pd.DataFrame:
    """Points with a result; none unless all knobs that claims and figures read are columns."""
    ok = table[table["status"] == "ok"]
    return ok if set(ok) >= _NEEDED else ok.iloc[:0]


def _as_configured(table: pd.DataFrame, run: FinishedRun, *searched: str) -> pd.DataFrame:
    """Points with the configured hardware, bursts and look-ahead; knobs in `searched` are free."""
    if table.empty:
        return table
    config = run.config
    values = {path: config["quantised"].get(path.partition(".")[2]) for path in (_AHEAD, _ROWS, _BESIDE)}
    pim = config["system"]["gpu"].get("pim") or {}
    values |= {_UNITS: pim.get("units_per_bank"), _RATE: pim.get("command_rate")}
    values[_KEPT] = config["quantised"].get("kept")
    if None in values.values():  # the configuration has no units that make copies
        return table.iloc[:0]
    way = table[_WAY].astype(str)
    fits = way.notna()
    for path, value in values.items():
        if path not in searched:
            free = way == "stored" if path == _KEPT else way != "pim"  # rows to which the knob does not apply
            column = table[path].astype(str) if isinstance(value, str) else table[path].astype(float)
            fits &= free | (column == value)
    return table.loc[fits]


def _names(run: FinishedRun) -> list[str]:
    return [str(name) for name in run.config.get("models") or []]


def _designs(run: FinishedRun) -> dict[str, StepDesign]:
    """Designs of the configuration's models that break no rule, by model."""
    designs = {}
    for name in _names(run):
        design = legal_base(run, model=model_tree(name))
        if design is not None:
            designs[name] = design
    return designs


# Claims


def _of_parts() -> dict[str, ClaimResult]:
    """Findings on gains of units in memory over its interface, and the time of a published example."""
    pims = {name: _pim(name) for name in _PARTS}
    gains = {name: float(pim.gain) for name, pim in pims.items()}
    example = facts("jitq")["streamed"]
    streamed = pims[example["pim"]]
    amount = example["rows"] * example["columns"] * example["element_bytes"]
    # one command for each word: it is read, no more
    seconds = float(streamed.stream_s(streamed.per_unit(amount), 1.0))
    text = ", ".join(f"{name} {gain:.2f}x" for name, gain in gains.items())
    ends = (round(min(gains.values()), 2), round(max(gains.values()), 2))
    return {
        "jitq.pim_gain": ClaimResult(ends, f"{text}, rows being open: the parts' timing", basis="by construction"),
        "jitq.samsung_pim_gain": ClaimResult(
            round(gains["hbm2_pim"], 9), "from the timing of its simulator", basis="by construction"
        ),
        "jitq.genie_row_time": ClaimResult(1e6 * seconds, "rows are opened and read, no more", basis="by construction"),
    }


def _pim(name: str) -> Pim:
    return Pim.model_validate(option_tree("pim", name)["gpu"]["pim"])


def _lost(rows: pd.DataFrame, around: Mapping[str, pd.DataFrame]) -> dict[str, ClaimResult]:
    """Throughput lost on the configured hardware, by units in memory and by the GPU's own kernels, where memory fits.

    around: knob -> points with that knob free.
    """
    rows = rows[rows["memory_share"] <= 1]  # what does not fit loses nothing that counts
    pim, gpu = rows[rows[_WAY] == "pim"], rows[rows[_WAY] == "gpu"]
    if pim.empty or gpu.empty:
        return {}
    worst = _PERCENT * pim.groupby(pim[_SET].astype(str))["throughput_lost"].max()
    by_set = ", ".join(f"{name} instructions {value:.2f} %" for name, value in worst.items())
    other_values = "; ".join(f"by {path.partition('.')[2]} {_by(path, points)}" for path, points in around.items())
    text = f"largest where an iteration fits: {by_set}; {other_values} %"
    at_ = ["scenario", _TP, _MICRO, _STORED]
    # points that differ in the way alone
    both = pim.join(gpu.set_index(at_)["throughput_lost"].rename("by_gpu"), on=at_).dropna(subset=["by_gpu"])
    dearer = both["by_gpu"] > both["throughput_lost"]
    spans = {name: _span(both[name]) for name in ("by_gpu", "throughput_lost")}
    beside = f"in {int(dearer.sum())} of {len(both)} points: the GPU loses {spans['by_gpu']}"
    return {
        "jitq.throughput_loss": ClaimResult(float(worst.max()), text, _SLOWED),
        "jitq.gpu_quantise_costs_more": ClaimResult(
            bool(dearer.all()), f"{beside}, with units in memory {spans['throughput_lost']}", _SLOWED
        ),
    }


def _by(path: str, rows: pd.DataFrame) -> str:
    """Largest loss for each value of a knob."""
    fitting = rows[(rows[_WAY] == "pim") & (rows["memory_share"] <= 1)]
    worst = _PERCENT * fitting.groupby(path, observed=True)["throughput_lost"].max()
    return ", ".join(f"{value}: {lost:.1f}" for value, lost in worst.items())


def _span(values: pd.Series[Any]) -> str:
    return f"{_PERCENT * values.min():.2f} to {_PERCENT * values.max():.2f} %"


def _capacity_saved(rows: pd.DataFrame, published: float) -> dict[str, ClaimResult]:
    """Memory saved by the accounting of the configured optimizer and copies, beside all other accountings."""
    pim = rows[rows[_WAY] == "pim"]
    saved = _PERCENT * pim.groupby(pim[_STORED].astype(str))["capacity_saved"].max()
    every = [(f"{row['base']}, {row['copies']}", _PERCENT * float(row["saved"])) for row in _accounts()]
    near = "; ".join(name for name, value in every if round(value) == published)  # as the published value is rounded
    least, most = min(value for _, value in every), max(value for _, value in every)
    text = ", ".join(f"{value:.1f} % of {_COPIES[str(name)]}" for name, value in saved.items())
    grid_ = f"{len(every)} accountings give {least:.0f} to {most:.0f} %, {published:g} %: {near}"
    return {"jitq.capacity_saved": ClaimResult(float(saved.max()), f"{text}; {grid_}", _ACCOUNT)}


def _fits(table: pd.DataFrame) -> dict[str, ClaimResult]:
    """Lowest degree of TP at which an iteration fits, against the one with stored copies."""
    texts, lower = list[str](), False
    for stored, fitting in table[table["memory_share"] <= 1].groupby(table[_STORED].astype(str)):
        lowest = fitting.groupby(["scenario", fitting[_WAY].astype(str)], observed=True)[_TP].min()
        ways = lowest.unstack().fillna(np.inf)  # fits at no degree that was searched
        if not {"stored", "pim"} <= set(ways):
            return {}
        lower_tp = ways[ways["pim"] < ways["stored"]]
        lower = lower or len(lower_tp) > 0
        degrees = [f"{name} at TP {row['pim']:.0f}, not {_degree(row['stored'])}" for name, row in lower_tp.iterrows()]
        # memory for 1 with copies takes 1 - saved without
        more = _PERCENT * (1 / (1 - fitting["capacity_saved"].max()) - 1)
        texts.append(
            f"beside {_COPIES[str(stored)]}: {', '.join(degrees) or 'none at a lower TP'}, {more:.0f} % more weights"
        )
    cause = "degrees of the space are too few for what is saved to matter"
    return {"jitq.bigger_or_lower_tp": ClaimResult(lower, "; ".join(texts), cause)}


def _degree(value: float) -> str:
    return f"{value:.0f}" if np.isfinite(value) else "at any of the space"


def _pace(run: FinishedRun) -> dict[str, ClaimResult]:
    """Judge whether the GPU waits for copies of the first layer of a pass alone."""
    designs = {name: design for name, design in _designs(run).items() if _by_pim(design)}
    if not designs:
        return {"jitq.keeps_pace": ClaimResult(None, "needs units in memory that make copies")}
    behind, shares = list[str](), list[str]()
    for name, design in designs.items():
        step = iteration(design)
        waits = _late(intervals(step))
        behind += [f"{name} before {waits[0]}"] if waits else []
        shares.append(
            # over a micro-batch without the time that copies add to it
            f"{name} {_PERCENT * float(step.passes.copies.busy_s / (step.slot_s - step.passes.copies.slot_s)):.1f} %"
        )
    text = f"units are busy for a share of a micro-batch: {', '.join(shares)}; copies of a pass begin with it"
    text = f"{text}; the GPU waits: {', '.join(behind)}" if behind else text
    return {
        "jitq.keeps_pace": ClaimResult(not behind, text, "units are slower than the products that read their copies")
    }


def _late(intervals: list[Interval]) -> list[str]:
    """Operators that wait for their copies, beyond the first layer of a pass."""
    in_memory = (interval for interval in intervals if interval.lane == "memory")
    copies = sorted(in_memory, key=lambda interval: interval.start_s)
    # the earliest copy of each direction stays: it is set last
    first = {_is_backward(interval.name): _layer(interval.name) for interval in reversed(copies)}
    waits = [interval.name.removesuffix(WAITING) for interval in intervals if interval.name.endswith(WAITING)]
    return [name for name in waits if _layer(name) != first[_is_backward(name)]]


def _layer(name: str) -> str:
    return name.partition(":")[0]


def _is_backward(name: str) -> bool:
    return " dX" in name or " again" in name  # names of operators in backward passes, and of those that are run again


def _by_pim(design: StepDesign) -> bool:
    return design.quantised is not None and design.quantised.made_by == "pim"


# Tables and pictures


def _accounts() -> list[dict[str, Any]]:
    """Shares of the memory for weights that copies take, by what else is stored and by which copies there are."""
    accountings = facts("jitq")
    formats = {name: Format.model_validate(option_tree("format", name)) for name in ("mx9", "mx6")}

    def copies(tree: Mapping[str, Any]) -> dict[str, Any]:
        return {way: {**copy, "format": formats[copy["format"]]} for way, copy in tree.items()}

    bases = {name: Base.model_validate(tree) for name, tree in accountings["bases"].items()}
    sets = {name: Copies.model_validate(copies(tree)) for name, tree in accountings["copies"].items()}
    return [{**row, "base": f"{row['base']}: {row['base_bytes']:g} B"} for row in grid(bases, sets)]


def _front(ok: pd.DataFrame) -> FigureSheet:
    """Time for copies against bytes for a weight."""
    way = ok[_WAY].astype(str)
    by = way.map(_WAYS).fillna(way) + ok[_SET].astype(str).radd(", ").add(" instructions").where(way == "pim", "")
    texts = []
    for name, shown in winning_rows(ok).astype({_WAY: str}).groupby(_WAY, sort=False):
        memory, time = (range_of(shown[column], unit) for column, unit in _COST_OF_COPIES.items())
        texts.append(f"{memory} and {time} of the time ({_WAYS.get(str(name), str(name))})")
    title = f"A weight and its copies take {', '.join(texts)}"
    axes = Axis("bytes_per_parameter", "memory for a weight [B]"), Axis("share_quantisation", "time for copies", "%")
    return fronts.pareto(
        ok.assign(copies=by), axes, by="copies", frame=Frame(title, "the title: what takes least time, of each way")
    )


def _capacity_figure(accounts: pd.DataFrame) -> FigureSheet:
    """Memory saved, by what else is stored and by which copies there are."""
    saving = reach(100 * accounts["saved"], " %")
    title = f"Copies made just in time save {saving} of the memory for weights, by what is counted"
    saved = Axis("saved", "saved of the memory for weights", "%")
    frame = Frame(title, "in the cells: share of the memory for weights that is saved [%]")
    return tables.heat(accounts, saved, x=Axis("copies", "copies that need not be stored"), y="base", frame=frame)


def _losses(table: pd.DataFrame, run: FinishedRun) -> Iterator[tuple[str, Draw]]:
    """Throughput lost where an iteration fits into memory: by bursts, instructions and operators beside; by units.

    Each model has its lowest TP that fits and the most micro-batches, all else as configured; of further knobs that
    were searched, the least loss counts.
    """
    bursts, units = _lowest_fitting(table, run, _ROWS, _BESIDE), _lowest_fitting(table, run, _UNITS, _RATE, _ROWS)
    if len(bursts):
        yield "bursts", partial(_bursts_figure, bursts)
    if len(units):
        yield "units", partial(_units_figure, units)


def _bursts_figure(bursts: pd.DataFrame) -> FigureSheet:
    """Throughput lost over the rows of a burst."""
    where = bursts[_BESIDE].astype(str).map({"products": "during products", "all": "at any time"})
    named = bursts.assign(instructions=bursts[_SET].astype(str) + ", " + where)
    by = [named["panel"], named["instructions"], named[_ROWS].astype(int)]
    rows = named.groupby(by, sort=False)["throughput_lost"].min().reset_index().sort_values("instructions")
    best = rows.groupby(_ROWS)["throughput_lost"].mean()
    length = extremes(best)[0]
    title = f"Bursts of {length} row{'s' * (length != '1')} cost least throughput, {100 * best.min():.1f} % in the mean"
    lost = Axis("throughput_lost", "throughput lost", "%", centre=0.0)
    return tables.curves(
        rows, Axis(_ROWS, "rows in a burst"), y=lost, by="instructions", frame=Frame(title, panel="panel")
    )


def _units_figure(units: pd.DataFrame) -> FigureSheet:
    """Throughput lost by units of a bank and their rate of commands."""
    named = units.assign(commands=units[_RATE].map("{:g} commands a tCCDL".format))
    named["panel"] = named["panel"] + ", " + named[_SET].astype(str)
    rows = named.groupby(["panel", "commands", _UNITS], sort=False)["throughput_lost"].min().reset_index()
    means = 100 * rows.groupby(_UNITS)["throughput_lost"].mean()
    title = f"With {means.index[0]:g} to {means.index[-1]:g} units for a bank, "
    title += f"{means.iloc[0]:.1f} to {means.iloc[-1]:.1f} % of the throughput is lost in the mean"
    least = Axis("throughput_lost", "throughput lost", "%")
    frame = Frame(title, "in the cells: throughput lost with the best bursts [%]", "panel")
    return tables.heat(rows, least, x=Axis(_UNITS, "units for a bank"), y="commands", frame=frame)


def _lowest_fitting(table: pd.DataFrame, run: FinishedRun, *searched: str) -> pd.DataFrame:
    """Points of units in memory as configured, knobs in `searched` free, each model at its lowest TP that fits."""
    rows = _as_configured(table, run, *searched)
    fitting = rows[(rows[_WAY].astype(str) == "pim") & (rows["memory_share"] <= 1)]
    fitting = fitting[(fitting[_STORED].astype(str) == "used") & (fitting[_MICRO] == fitting[_MICRO].max())]
    lowest = fitting.groupby("scenario", sort=False)[_TP].transform("min")
    few: pd.DataFrame = fitting[fitting[_TP] == lowest]
    return few.assign(panel=few["scenario"].astype(str) + ", TP " + few[_TP].astype(int).astype(str))


def _contention(rows: pd.DataFrame) -> pd.DataFrame:
    """Shares of the time of units in memory: mu, which the GPU loses to bursts, and the share that it waits."""
    pim = rows[rows[_WAY] == "pim"]
    columns = pim[["scenario", _SET, _TP, _MICRO, _STORED, "memory_share", "throughput_lost"]].copy()
    for name in ("slowed", "waited"):
        # over the time of units in memory, as mu is defined
        columns[f"{name}_share"] = pim[f"quantisation_{name}_s"] / pim["quantisation_s"]
    return columns.rename(columns={"slowed_share": "mu"})


def _numbers() -> Iterator[tuple[str, Any]]:
    """Errors of weights and products in each format, the loss of a small network by its copies, and a picture."""
    import pandas as pd

    formats = {name: Format.model_validate(option_tree("format", name)) for name in list_options("format")}
    errors = pd.DataFrame(numerics.errors(formats))
    yield "numbers", errors
    mx9, mx6, mx4 = formats["mx9"], formats["mx6"], formats["mx4"]
    copies = {"none": (None, None), "mx9": (mx9, mx9), "mx9, backward mx6": (mx9, mx6), "mx6": (mx6, mx6)}
    yield "losses", pd.DataFrame(numerics.losses({**copies, "mx4": (mx4, mx4)}))
    yield "numbers", partial(_numbers_figure, errors)


def _numbers_figure(errors: pd.DataFrame) -> FigureSheet:
    """Error of a product by the format of its weights."""
    mean = errors.groupby("format")["forward_db"].mean()
    title = f"Products of weights in MX9 are {mean['mx9']:.0f} dB above their errors, in MX6 {mean['mx6']:.0f} dB"
    rows = errors.assign(format=errors["format"] + errors["bytes_per_element"].map(" ({:.3g} B)".format))
    value = Axis("forward_db", "product over its error", "dB")
    frame = Frame(title, "weights drawn from two distributions; exact inputs; blocks along the sum")
    return tables.dots(rows.sort_values("bytes_per_element"), value, row="format", by="weights", frame=frame)


def _systems(run: FinishedRun) -> pd.DataFrame:
    """Iterations with each memory that computes, on a device that may have it: copies stored, by GPU, by units."""
    import pandas as pd

    probe, rows = run.probe("systems"), []
    points = {str(row["scenario"]): row for row in probe.to_dict("records")}
    for case in facts("jitq")["systems"]:
        by_way = {way: points[_label(case, way)] for way in _WAYS if _label(case, way) in points}
        # all three ways, or there is nothing to compare
        for way, metrics in by_way.items() if len(by_way) == len(_WAYS) else ():
            # relative to stored copies: a positive share is lost, or saved
            lost, saved = (1 - metrics[name] / by_way["stored"][name] for name in ("tokens_per_s", "state_bytes"))
            values = {"iteration_s": metrics["iteration_s"], "throughput_lost": lost, "capacity_saved": saved}
            rows.append({**case, "copies": way, **values})
    return pd.DataFrame(rows)


def _label(case: Mapping[str, Any], way: str) -> str:
    return f"{case['model']} on {case['system']} with {case['pim']}, {way}"


def _case_of(config: Mapping[str, Any], case: Mapping[str, Any], way: str) -> Case:
    """The configured iteration in one server of another system, its copies made another way."""
    quantised = {**option_tree("quantised", way), "backward": (config.get("quantised") or {}).get("backward")}
    system = merged(tree_of(case["system"]), option_tree("pim", case["pim"]))
    parallel = {**config["parallel"], "tp": case["tp"], "pp": 1, "dp": 1}  # one server: no pipeline and no replicas
    sections = {"model": model_tree(case["model"]), "system": system, "quantised": quantised, "parallel": parallel}
    return Case(step_tree(config, **sections))


def _turns(design: StepDesign) -> FigureSheet:
    """Timeline of the first layers of an iteration: operators of the GPU, and copies in its memory meanwhile."""
    import pandas as pd

    every = intervals(iteration(put_all(design, {_MICRO: 1})))  # a micro-batch shows all that repeats
    after = [interval.start_s for interval in every if _layer(interval.name) == f"layer {_LAYERS_SHOWN}"]
    until = min(after, default=every[-1].finish_s)  # models with fewer layers: to the end
    begun = [interval for interval in every if interval.start_s < until]
    shown = [{**vars(interval), "finish_s": min(interval.finish_s, until)} for interval in begun]
    title = f"{design.model.name}: GPU and memory take turns in the first {_LAYERS_SHOWN} layers, forward"
    return timeline(pd.DataFrame(shown), title)


STUDY = JitQ()
