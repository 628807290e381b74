"""ConCCL (arXiv:2412.14335): a GEMM and a collective at once, launched, partitioned, or moved by DMA engines.

Evaluates the share of the ideal gain that each strategy reaches, the payload from which DMA engines win, and rules
that a runtime could follow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dse.plots import Axis, Draw, FigureSheet, Frame, tables
from dse.plots.labels import label, with_unit
from dse.results.claims import ClaimResult
from dse.results.decisions import with_ranges
from dse.results.run_folder import FinishedRun
from simulators.costs.gemm.waves import GemmShape, WaveGemms
from simulators.costs.power import collective_w
from simulators.costs.transfer import TransferMode, alone, saturating_cus
from simulators.hardware.machine import System
from simulators.hardware.network import Pattern
from simulators.hardware.schedule_system import PoweredSystem, ScheduleSystem
from simulators.workloads.operators import ShapeList
from studies.conccl.runtime import runtime_rules
from studies.plain import Plain, best_rows, capitalised, geometric_mean, most_frequent, reach

if TYPE_CHECKING:
    import pandas as pd

STRATEGIES = {
    "base": "c3_base",
    "schedule priority": "c3_sp",
    "resource partitioning": "c3_rp",
    "both": "c3_sp_rp",
    "DMA": "conccl",
    "DMA, CUs withheld": "conccl_rp",
}
"""Strategy in the paper's words -> schedule."""
_BY_CUS = ("schedule priority", "resource partitioning", "both")
_BY_DMA = ("DMA", "DMA, CUs withheld")
_PARTITIONED = ("resource partitioning", "both")
_COMPARING = ("base", "base_speedup", "best_dual", "mean_ideal", "gc_equal_best")
"""Claims that need points of all strategies."""
_OF_BASELINE = "share_of_baseline_ideal"
_EQUAL = 1.15  # ratio of the two times beyond which a scenario is G-long or C-long (secondary: public notes on ConCCL)
_FULL = 0.85  # share of the bandwidth from which it counts as saturated (secondary: a public wiki that quotes ConCCL)
_PATTERNS: tuple[Pattern, ...] = ("all_gather", "all_to_all")  # the collectives that claims are about
_SMALL, _LARGE = 1024.0, 16 * 2.0**30  # ends of the sweep over sizes
_SIZES = tuple(2.0**power for power in range(10, 35))
_FITTED = "fitted, no prediction: dma_beside_gemm was taken from this value, on this mix"
_LATE = "kernels on CUs start late during a GEMM, as measured for an all-reduce, even if CUs are reserved for them"
_NO_SLOWER_LIBRARY = (
    "a library that has all CUs of an idle GPU loses link efficiency alone; which channels theirs had is unknown"
)
_MIX = "the mix of scenarios is ours, the paper's is unknown"
_SEEN = "no number is fitted to it, but the model's form was chosen having seen it (docs/explanation/contention.md)"


class ConCCL(Plain):
    """Claims, figures and rules, from a table of strategies."""

    columns = (
        "schedule.name",
        "schedule.comm_engine",
        "schedule.comm_cus",
        "schedule.withheld_cus",
        "workload.operators.gemm.m",
        "workload.operators.gemm.n",
        "workload.operators.gemm.k",
        "workload.operators.gather.rows",
        "workload.operators.gather.pattern",
    )
    allows = ("space.system.gpu.contention",)

    def findings(self, table: pd.DataFrame) -> Mapping[str, ClaimResult]:
        """Findings on the gains of strategies, of the ideal that the paper measures against: the baseline's."""
        reached, speedups = _best_by_scenario(table, _OF_BASELINE), _best_by_scenario(table, "speedup")
        if missing := [schedule for name, schedule in STRATEGIES.items() if name not in reached]:
            absent = ClaimResult(None, f"needs points of all strategies, and has none of {', '.join(missing)}")
            return {f"conccl.{name}": absent for name in _COMPARING}
        ideal = table[table["status"] == "ok"].groupby("scenario")["baseline_ideal_speedup"].first()
        classes = ideal.groupby(_classes(table)).mean()
        dual = float(_best(reached, _BY_CUS).mean())
        return {
            "conccl.base": ClaimResult(100 * float(reached["base"].mean()), f"{_MIX}; {_SEEN}"),
            "conccl.base_speedup": ClaimResult(float(speedups["base"].mean()), f"{_MIX}; {_SEEN}"),
            "conccl.best_dual": ClaimResult(100 * dual, f"{_MIX}; {_SEEN}", _LATE),
            "conccl.mean_ideal": ClaimResult(float(ideal.mean()), _MIX),
            "conccl.gc_equal_best": ClaimResult(
                bool(classes.idxmax() == "GC-equal"),
                ", ".join(f"{name} {value:.2f}x" for name, value in classes.items()),
            ),
        }

    def further(self, run: FinishedRun) -> Mapping[str, ClaimResult]:
        """Findings on DMA engines beside GEMMs, and on collectives alone, on the run's system."""
        system = ScheduleSystem.of(run.config["system"])
        table, precision = run.outputs.read_table("results"), ShapeList.model_validate(run.config["workload"]).precision
        power = {"conccl.dma_power": _power(PoweredSystem.of(run.config["system"]))}
        return {**by_engines(table, system, precision), **_collectives_alone(system), **power}

    def figures(self, table: pd.DataFrame, timelines: pd.DataFrame) -> Iterator[tuple[str, Draw]]:
        """Share of the ideal by strategy and class, speed-up by scenario, losses of time, sweep over reserved CUs.

        Figures without rows are left out.
        """
        ok = _strategy_rows(table)
        if ok.empty:
            return
        best = best_rows(ok, ["scenario", "strategy"])
        best = best.sort_values(["strategy", "class"], key=lambda column: column.map(_rank), kind="stable")
        yield "fraction_of_ideal", partial(_fractions, best)
        yield "strategies", partial(_speedups, best)
        yield "losses", partial(_losses, best)
        swept = ok[(ok["strategy"].isin(_PARTITIONED)) & (ok["schedule.comm_cus"] > 0)]
        if len(swept):
            yield "cu_sweep", partial(_cu_sweep, swept)

    def extras(self, run: FinishedRun) -> Iterator[tuple[str, Any]]:
        """Message-size sweep of collectives alone, and the runtime's rules with their accuracy and regret."""
        import pandas as pd

        system, rows = ScheduleSystem.of(run.config["system"]), []
        for pattern in _PATTERNS:
            for payload in _SIZES:
                for mover, seconds in _alone(system, pattern, payload).items():
                    # bytes that a GPU receives: all shards but its own
                    rate = payload * (system.node.num_gpus - 1) / system.node.num_gpus / seconds
                    rows.append({"pattern": pattern, "payload_bytes": payload, "mover": mover, "bytes_per_s": rate})
        swept = pd.DataFrame(rows)
        yield "message_sizes", swept
        yield "message_sizes", partial(_message_sizes, swept)
        table = run.outputs.read_table("results")
        ok = _strategy_rows(table)
        if len(ok):
            precision = ShapeList.model_validate(run.config["workload"]).precision
            engines_from = {str(name): _crossover(system, name) for name in _PATTERNS}
            yield "runtime_rules", runtime_rules(system, ok, table, precision, engines_from)


def by_engines(table: pd.DataFrame, system: System, precision: str) -> dict[str, ClaimResult]:
    """Findings on DMA engines: the better of both variants for each pair, as a runtime picks it that tries them.

    The remark has the average where CUs are withheld from GEMMs that memory bounds, and from no others.
    """
    reached, speedups = _best_by_scenario(table, _OF_BASELINE), _best_by_scenario(table, "speedup")
    if not STRATEGIES.keys() <= reached.keys():
        absent = ClaimResult(None, "needs points of all strategies")
        return {f"conccl.{name}": absent for name in ("best_dma", "max_speedup", "strategy_order")}
    by_strategy = (reached["base"], _best(reached, _BY_CUS), reached["DMA"], _best(reached, _BY_DMA))
    means = [float(rows.mean()) for rows in by_strategy]
    bound = _memory_bound(table, system, precision)
    by_bound = reached["DMA, CUs withheld"].where(bound, reached["DMA"]).mean()
    kinds = (
        f"{100 * by_bound:.1f} % where CUs are withheld in the {bound.sum()} of {len(bound)} pairs that memory bounds"
    )
    text = " < ".join(f"{100 * mean:.1f} %" for mean in means)
    return {
        "conccl.best_dma": ClaimResult(
            100 * means[-1],
            f"{_FITTED}; the better of both for each pair; {kinds}",
            basis="fitted",
        ),
        "conccl.max_speedup": ClaimResult(float(_best(speedups, _BY_DMA).max()), _FITTED, basis="fitted"),
        "conccl.strategy_order": ClaimResult(
            means == sorted(means) and len(set(means)) == len(means),  # ties are no order
            f"{text}, in the order of the claim",
        ),
    }


def _memory_bound(table: pd.DataFrame, system: System, precision: str) -> pd.Series[bool]:
    """Tell of each scenario whether its GEMM moves bytes for longer than it computes, on all CUs."""
    import pandas as pd

    first = table[table["status"] == "ok"].groupby("scenario").first()
    m, n, k = (first[f"workload.operators.gemm.{side}"].to_numpy(float) for side in "mnk")
    gemms = WaveGemms.of(system.gpu, precision)
    kernel = gemms.cost(GemmShape(m, n, k)).kernel
    bound = kernel.hbm_bytes / np.asarray(gemms.hbm_bytes_per_s) > kernel.compute_s
    return pd.Series(bound, index=first.index)


def _collectives_alone(system: System) -> dict[str, ClaimResult]:
    """Findings on collectives with nothing beside them."""
    per_cu = f"RCCL's measured rate of a CU ({system.gpu.cu_copy.bytes_per_s_per_cu / 1e9:g} GB/s)"
    two_tables = f"two sources contradict one another: {per_cu} fills links later than this rate implies"
    small = {name: _ratio(system, name, _SMALL) for name in _PATTERNS}
    large = max(1 / _ratio(system, name, _LARGE) for name in _PATTERNS)  # the larger of both
    saturates = {name: saturating_cus(system, name, share=_FULL) for name in _PATTERNS}
    launched = f"launches of copies one after another, by measured phases, against the floor of RCCL; {_SEEN}"
    crossover = _crossover(system, "all_gather")
    trend = small["all_gather"] > 1 > _ratio(system, "all_gather", _LARGE)  # slower when small, faster when large
    return {
        "conccl.ag_saturation_cus": ClaimResult(saturates["all_gather"], cause=two_tables),
        "conccl.a2a_saturation_cus": ClaimResult(saturates["all_to_all"], cause=two_tables),
        "conccl.dma_size_trend": ClaimResult(trend, f"all-gathers cross at {crossover / 2**20:.0f} MiB"),
        "conccl.dma_small_ag": ClaimResult(small["all_gather"], launched),
        "conccl.dma_small_a2a": ClaimResult(small["all_to_all"], launched),
        "conccl.dma_large": ClaimResult(
            100 * (large - 1), f"at {_LARGE / 2**30:.0f} GiB, both as fast as links go", _NO_SLOWER_LIBRARY
        ),
    }


_ORDER = (*STRATEGIES, "G-long", "GC-equal", "C-long", *_PATTERNS)


def _rank(name: str) -> int:
    return _ORDER.index(name) if name in _ORDER else len(_ORDER)


_MIXES = {"G-long": "GEMM takes longer", "C-long": "collective takes longer", "GC-equal": "about equal"}
_FRACTION = Axis(_OF_BASELINE, "share of the baseline's ideal gain", "%", centre=0.0)


def _fractions(best: pd.DataFrame) -> FigureSheet:
    """Mean share of the ideal gain by class, pattern and strategy."""
    mean = best.groupby(["pattern", "class", "schedule.name"], sort=False)[_OF_BASELINE].mean().reset_index()
    words = {"panel": mean["pattern"].map(_words), "strategy": mean["schedule.name"].map(label)}
    mean = mean.assign(**words, mix=mean["class"].map(lambda name: _MIXES.get(str(name), str(name))))
    reached = best.groupby("schedule.name", sort=False)[_OF_BASELINE].mean().sort_values()
    first, last = reached.index[-1], reached.index[0]
    title = f"{capitalised(label(first))} reaches {100 * reached[first]:.0f} % of the ideal gain, "
    title += f"{label(last)} {100 * reached[last]:.0f} %"
    return tables.dots(mean, _FRACTION, row="strategy", by="mix", frame=Frame(title, panel="panel"))


def _speedups(best: pd.DataFrame) -> FigureSheet:
    """Speed-up of each strategy in each scenario, a panel for each pattern."""
    rows = with_ranges(best, best, ["scenario", "schedule.name"])
    rows = rows.assign(
        case=rows["scenario"].str.rpartition("-")[0], panel=rows["pattern"].map(_words), ideal=rows["ideal_speedup"]
    )
    won = best_rows(rows, ["scenario"])
    (name, times), mean = most_frequent(won["schedule.name"]), geometric_mean(won["speedup"])
    title = f"{capitalised(name)} is fastest in {times} of {len(won)} scenarios; "
    title += f"the fastest gain {mean:.2f}x in the geometric mean"
    speedup = Axis("speedup", "speed-up over serial [x]", centre=1.0)
    frame = Frame(title, "ideal: the longer of GEMM and collective alone, by what moves fastest", "panel")
    return tables.dots(rows, speedup, row="case", by="schedule.name", frame=frame)


def _losses(best: pd.DataFrame) -> FigureSheet:
    """Where the time goes, by class and strategy."""
    sums = best.groupby(["class", "schedule.name"], sort=False)[[*_LOSSES, "ideal_s"]].sum().reset_index()
    sums = sums.assign(**{name: sums[name] / sums["ideal_s"] for name in _LOSSES}, bar=sums["schedule.name"].map(label))
    cause, times = most_frequent(sums[list(_LOSSES)].idxmax(axis=1).astype(str).str.removesuffix("_s"))
    title = f"{capitalised(cause)} is the largest loss in {times} of {len(sums)} pairs of class and strategy"
    parts = [Axis(name, name.removesuffix("_s"), "%") for name in _LOSSES]
    frame = Frame(title, panel="class")
    return tables.stacks(sums, parts, bar="bar", label="loss, of the ideal time", frame=frame)


def _cu_sweep(swept: pd.DataFrame) -> FigureSheet:
    """Share of the ideal gain over the CUs of the collective."""
    cus = Axis("schedule.comm_cus", "CUs of the collective")
    alike = ["schedule.name", "pattern", "class", cus.column]
    rows = swept.groupby(alike, sort=False)[_OF_BASELINE].mean().reset_index()
    rows = rows.assign(panel=rows["schedule.name"].map(label) + ": " + rows["pattern"].map(_words))
    best = rows.loc[rows.groupby(["panel", "class"], sort=False)[_OF_BASELINE].idxmax()]
    title = f"Mixes gain most with {reach(best[cus.column])} CUs for the collective"
    return tables.curves(rows, cus, y=_FRACTION, by="class", frame=Frame(title, panel="panel"))


def _message_sizes(swept: pd.DataFrame) -> FigureSheet:
    """Rate of collectives alone over the payload, by what moves them."""
    size, rate = Axis("payload_bytes", "payload", "B"), Axis("bytes_per_s", "received", "B/s")
    rates = swept.pivot_table(index=["pattern", "payload_bytes"], columns="mover", values="bytes_per_s", sort=False)
    texts = []
    for pattern, rows in rates.groupby("pattern", sort=False):
        ahead = rows[rows.idxmax(axis=1) == "DMA engines"].index.get_level_values("payload_bytes")
        texts.append(
            f"{_words(str(pattern))}s from {with_unit(ahead.min(), 'B')}"
            if len(ahead)
            else f"no {_words(str(pattern))}"
        )
    title = f"DMA engines move {' and '.join(texts)} faster than CUs do"
    named = swept.assign(panel=swept["pattern"].map(_words), mover=swept["mover"].replace("CU kernels", "CUs"))
    return tables.curves(named, size, y=rate, by="mover", frame=Frame(title, panel="panel"))


def _words(pattern: str) -> str:
    return pattern.replace("_", "-")


_LOSSES = ("contention_s", "starvation_s", "launch_s", "dependency_s")


def _strategy_rows(table: pd.DataFrame) -> pd.DataFrame:
    """Rows of strategies as the paper defines them, with `strategy`, `pattern` and `class`.

    Without a partition a collective has the CUs of its library; in a partition it has those of the sweep.
    """
    names = {schedule: name for name, schedule in STRATEGIES.items()}
    ok = table[(table["status"] == "ok") & table["schedule.name"].isin(names)]
    ok = ok.assign(
        strategy=ok["schedule.name"].map(names),
        pattern=ok["workload.operators.gather.pattern"],
        **{"class": ok["scenario"].map(_classes(table))},
    )
    swept, cus = ok["strategy"].isin(_PARTITIONED), ok["schedule.comm_cus"].fillna(0) > 0
    return ok[(swept == cus) | ok["strategy"].isin(_BY_DMA)]  # engines need no CUs


def _classes(table: pd.DataFrame) -> pd.Series[Any]:
    """Class of each scenario, by the times of its baseline."""
    serial = table[(table["status"] == "ok") & (table["schedule.name"] == "serial")].groupby("scenario").first()
    ratios = serial["gemm_s"] / serial["comm_s"]
    # the same ratio, the other way round
    return ratios.map(lambda ratio: "G-long" if ratio > _EQUAL else "C-long" if ratio < 1 / _EQUAL else "GC-equal")


def _best_by_scenario(table: pd.DataFrame, column: str) -> dict[str, pd.Series[Any]]:
    """Largest value of each strategy by scenario."""
    return {
        str(name): group.groupby("scenario")[column].max() for name, group in _strategy_rows(table).groupby("strategy")
    }


def _best(by_strategy: Mapping[str, pd.Series[Any]], names: tuple[str, ...]) -> pd.Series[Any]:
    import pandas as pd

    return pd.concat([by_strategy[name] for name in names], axis=1).max(axis=1)


def _alone(system: System, pattern: Pattern, size: float) -> dict[str, float]:
    """Time [s] of a collective alone by RCCL-like kernels and by DMA engines."""
    cus = system.gpu.num_cus
    return {
        "CU kernels": float(alone(system, size, by=TransferMode("cu", cus, pattern))),
        "DMA engines": float(alone(system, size, by=TransferMode("dma", 0, pattern))),
    }


def _ratio(system: System, pattern: Pattern, size: float) -> float:
    """Time by DMA engines over time by CU kernels."""
    seconds = _alone(system, pattern, size)
    return seconds["DMA engines"] / seconds["CU kernels"]


def _crossover(system: System, pattern: Pattern) -> float:
    """Payload [bytes] from which DMA engines are faster; infinite where they never are."""
    sizes = np.geomspace(_SIZES[0], _SIZES[-1], 2000)  # steps of 0.8 %
    faster = np.array([_ratio(system, pattern, float(size)) < 1 for size in sizes])
    return float(sizes[np.argmax(faster)]) if faster.any() else float("inf")  # the first True


def _power(system: System) -> ClaimResult:
    if system.gpu.power is None:
        return ClaimResult(None, "the system has no gpu.power")
    kernels, engines = (
        collective_w(system, TransferMode(mover, system.gpu.cu_copy.num_cus, "all_gather")) for mover in ("cu", "dma")
    )
    text = f"{kernels:.0f} W against {engines:.0f} W by an activity model whose constants are from memory: an estimate"
    return ClaimResult(100 * (1 - engines / kernels), text)


STUDY = ConCCL()
