"""Power of boards against public tables: watts, the limit's clock, the clock of least energy, and times beside.

`python -m benchmarks.power --data DIR [--json]` reads the tables below `DIR/power`. Rows that
`gpu.power` was fitted on (`conf/data/power`) are counted, and left out. Without tables it tests the law alone:
`monotone_breaks` counts drawn designs that are faster, or draw more, under a lower limit; `seconds_over_plain` is the
time of evaluating designs with power over that without, where no limit binds, and `seconds_over_plain_limited` where
it does.
"""

from __future__ import annotations

import argparse
import json
import sys
import timeit
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

import dse
from dse.backend import Batch
from dse.config.compose import request
from dse.study.plan import plan
from dse.values import put
from dse_calibration.board_power import (
    PRECISION,
    BoardPower,
    Loop,
    activity,
    lowest_mhz,
    payload_bytes,
    read,
    read_throttle,
)
from dse_calibration.contention import WALLS
from dse_serving.served_power import read_served, unfitted
from simulators.costs.gemm import GemmCost, GemmShape, gemm_cost, gemms_of
from simulators.costs.governor import CLOCK
from simulators.costs.power import board_w, gemm_activity
from simulators.hardware.machine import tree_of
from simulators.hardware.parts import Power, Precision
from simulators.hardware.schedule_system import ScheduleSystem
from simulators.overlap.backend import OverlapBackend
from simulators.overlap.powered import PoweredBackend
from validation.overlaps import judged_clocks

Floats = NDArray[np.float64]
BY_CLOCK, THROTTLE, KNEE = "a100_gemm_allreduce_by_clock.csv", "a100_throttle.csv", "a100_voltage_knee.csv"
H200, SERVED = "h200_gemm_power.csv", "inferencex_dsv4_b200.csv"
_PRECISIONS: dict[str, Precision] = {"bfloat16": "bf16", "fp8_block": "fp8"}
_GEMMS_OF = "h200_8"
_SHORT_S, _NO_GAPS_S = 20e-6, 100e-6
_GPUS, _PAYLOAD_MIB = 4.0, 64.0  # of the all-reduces of these tables
BOARDS_OF = _SYSTEM = "a100_8"
_TIMED_CUS, _TIMED_CLOCK, _TIGHT_W = 24, 0.7, 200.0
_REFERENCE_MHZ = 1200  # the highest clock of which the tables have the times alone
_CAPS_W = (150.0, 200.0, 250.0, 300.0, 350.0, 400.0)
_WORKS = {"gemm_alone": ["m", "n", "k"], "comm_alone": ["ctas"], "serial": None, "concurrent": None}
"""Work of the columns of a table -> the columns by which it differs beside the clock; None: by all."""


def power_of(system: str) -> Power:
    """Power model of a shipped system."""
    return Power.model_validate(tree_of(system)["gpu"]["power"])


def unseen(table: pd.DataFrame) -> pd.DataFrame:
    """Rows whose watts are not among those that were fitted."""
    fitted = read().watts
    return table[~table["w"].round(2).isin(fitted.round(2))].reset_index(drop=True)


def by_clock(folder: Path) -> pd.DataFrame:
    """Watts of a board alone, one after the other, and at once: rows with work, clock, shape, channels, ms and w."""
    table = pd.read_csv(folder / BY_CLOCK, comment="#")
    parts = []
    for work, alike in _WORKS.items():
        rows = table if alike is None else table.drop_duplicates(["clock_asked_mhz", *alike])
        rows = rows[rows["concurrent_throttled"] == 0] if work == "concurrent" else rows
        both = work in ("serial", "concurrent")
        parts.append(
            pd.DataFrame(
                {
                    "work": work,
                    "clock_mhz": rows["clock_asked_mhz"],
                    **{side: rows[side] if both or work == "gemm_alone" else 0 for side in "mnk"},
                    "channels": rows["ctas"] * (work != "gemm_alone"),
                    "moving": np.minimum(rows["comm_alone_ms"] / rows[f"{work}_ms"], 1.0),
                    "ms": rows[f"{work}_ms"],
                    "w": rows[f"{work}_node_w"] / _GPUS,
                }
            )
        )
    return pd.concat(parts, ignore_index=True)


def boards(rows: pd.DataFrame) -> BoardPower:
    """Rows as the fit takes them."""
    moves = rows["channels"].to_numpy() > 0
    received = np.where(moves, payload_bytes(np.array(_PAYLOAD_MIB), np.array(_GPUS)), 0.0)
    shapes = {side: rows[side].to_numpy(float) for side in "mnk"}
    channels = (rows["channels"] * rows["moving"]).to_numpy(float)
    done = activity(shapes, received, channels, 1e-3 * rows["ms"].to_numpy(float))
    return BoardPower(1e6 * rows["clock_mhz"].to_numpy(float), done, rows["w"].to_numpy(float))


def watts(folder: Path) -> Iterator[tuple[str, float]]:
    """Median error of watts by work, and over all rows that were not fitted."""
    rows = unseen(by_clock(folder))
    table = boards(rows)
    error = np.abs(table.predicted(power_of(_SYSTEM)) / table.watts - 1)
    yield "power_rows", float(len(rows))
    yield "power_median", float(np.median(error))
    yield "power_p90", float(np.quantile(error, 0.9))
    for work, part in pd.Series(error).groupby(rows["work"]):
        yield f"power_median_{work}", float(part.median())


def throttled(folder: Path) -> Iterator[tuple[str, float]]:
    """Whether the limit binds, and at which clock, of a GEMM beside an all-reduce; times follow from other clocks.

    The times at a clock are those at 1,200 MHz times 1,200 MHz over the clock, as if nothing were bound by links. Rows
    that the governor's constants were fitted on are left out.
    """
    known = pd.read_csv(folder / BY_CLOCK, comment="#")
    known = known[known["clock_asked_mhz"] == _REFERENCE_MHZ].set_index(["m", "n", "k", "ctas"])
    table, power = pd.read_csv(folder / THROTTLE, comment="#"), power_of(_SYSTEM)
    fitted = {(*loop.shapes.values(), loop.channels, asked) for loop, asked, *_ in read_throttle()}
    rows = zip(*(table[side] for side in "mnk"), table["ctas"], table["clock_asked_mhz"], strict=True)
    table = table[[row not in fitted for row in rows]]
    asked, measured = table["clock_asked_mhz"].to_numpy(float), table["clock_min_mhz"].to_numpy(float)
    lowest = np.array(
        [lowest_mhz(mhz, _loop(known, row), power) for mhz, row in zip(asked.tolist(), table.itertuples(), strict=True)]
    )
    bound, said = table["throttled"].to_numpy(bool), lowest < asked
    yield "throttle_rows", float(len(table))
    yield "throttle_recall", float((said & bound).sum() / bound.sum())
    yield "throttle_precision", float((said & bound).sum() / max(said.sum(), 1))
    yield "clock_mhz", float(np.median(np.abs(lowest - measured)[bound]))


def _loop(known: pd.DataFrame, row: Any) -> Loop:
    """A row with its times at the clock of reference."""
    place: Any = (row.m, row.n, row.k, row.ctas)
    at: Any = known.loc[place]
    seconds = [1e-3 * float(at[f"{work}_ms"]) for work in ("gemm_alone", "comm_alone", "concurrent")]
    return Loop.of(row, 1e6 * _REFERENCE_MHZ, seconds)


def gemm_watts(folder: Path) -> Iterator[tuple[str, float]]:
    """Median error of the watts of GEMMs alone on H200, by whether a call takes 20 us by our model, or less.

    Boards are at their limit, or draw what whole tiles multiply and HBM moves. Of shorter calls the table holds the
    power of the gaps between them, too.
    """
    errors = {"gemm": list[float](), "short_gemm": list[float]()}
    for row in _gemms(folder / H200):
        error = np.abs(row["predicted_w"] / row["w"] - 1)
        is_long = row["seconds"] >= _SHORT_S
        errors["gemm"] += error[is_long].tolist()
        errors["short_gemm"] += error[~is_long].tolist()
    for name, found in errors.items():
        yield f"{name}_power_rows", float(len(found))
        yield f"{name}_power_median", float(np.median(found))


def predicted_gemm_watts(file: Path) -> Iterator[tuple[str, float, float]]:
    """Yield the shape, and the measured and the predicted power [W], of GEMMs on H200 between which gaps count little.

    Those are calls of 100 us or more, as measured where the table has the time. Rates are the measured ones, too.
    """
    for rows in _gemms(file):
        seconds = (1e-3 * rows["ms"]).fillna(rows["seconds"])
        known = rows.assign(predicted_w=_watts(rows, seconds.to_numpy(float)))
        for row in known[seconds >= _NO_GAPS_S].to_dict("records"):
            shape = " ".join(str(row[name]) for name in ("dtype", *"mnk"))
            yield shape, float(row["w"]), float(row["predicted_w"])


def _gemms(file: Path) -> Iterator[pd.DataFrame]:
    """Yield rows of one format each, with seconds and watts by the model."""
    for _, rows in pd.read_csv(file, comment="#").groupby("dtype"):
        _, cost = _gemm_cost(rows)
        seconds = np.asarray(cost.seconds, float)
        yield rows.assign(seconds=seconds, predicted_w=_watts(rows, seconds))


def _gemm_cost(rows: pd.DataFrame) -> tuple[GemmShape, GemmCost]:
    shape = GemmShape.row_major(*(rows[side].to_numpy(float) for side in "mnk"))
    return shape, gemm_cost(gemms_of(ScheduleSystem.of(tree_of(_GEMMS_OF)), _precision(rows)), shape)


def _precision(rows: pd.DataFrame) -> Precision:
    return _PRECISIONS[str(rows["dtype"].iloc[0])]


def _watts(rows: pd.DataFrame, seconds: Floats) -> Floats:
    """Power [W] of GEMMs of one format that take so long, up to the limit."""
    shape, cost = _gemm_cost(rows)
    power, done = power_of(_GEMMS_OF), gemm_activity(shape, replace(cost, seconds=seconds), _precision(rows))
    return np.minimum(board_w(power, 1.0, done, _precision(rows)), power.cap_w)


def served_joules(folder: Path) -> Iterator[tuple[str, float]]:
    """Median error of the joules of a generated token with its share of the prompt, at the rate that was served and at
    the rate that is predicted; of rows whose watts were not fitted.
    """
    rows, given, guessed = list(unfitted(read_served(folder / SERVED))), list[float](), list[float]()
    for row in rows:
        given.append(abs(row.drawn(row.power).token_j / row.token_j - 1))
        guessed.append(abs(row.predicted(row.power).token_j / row.token_j - 1))
    yield "joule_per_token_rows", float(len(rows))
    yield "joule_per_token_median", float(np.median(given))
    yield "joule_per_token_max", float(max(given))
    yield "joule_per_token_predicted_median", float(np.median(guessed))
    yield "joule_per_token_predicted_max", float(max(guessed))


def predicted(file: Path) -> Iterator[tuple[str, float]]:
    """Error of the walls of a GEMM and an all-reduce where not even their times alone are given, nor the clock."""
    table, fitted = pd.read_csv(file, comment="#"), pd.read_csv(WALLS, comment="#")
    places = ["clock_asked_mhz", "ctas", "m", "n", "k"]
    shipped = {
        (_REFERENCE_MHZ, int(row["channels"]), *(int(row[side]) for side in "mnk")) for _, row in fitted.iterrows()
    }
    is_seen = [tuple(row) in shipped for row in table[places].itertuples(index=False)]
    table = table[~np.array(is_seen) & (table["concurrent_throttled"] == 0)]
    backend, errors = PoweredBackend("fluid"), list[float]()
    for shape, rows in table.groupby(["m", "n", "k"]):
        clocks, ctas = np.unique(rows["clock_asked_mhz"]), np.unique(rows["ctas"])
        axes = {CLOCK: 1e6 * clocks / power_of(_SYSTEM).clock_hz, "schedule.comm_cus": ctas.astype(float)}
        (results,) = backend.evaluate([Batch(_pair(shape), axes)])
        walls = results.column("makespan_s").reshape(len(clocks), len(ctas))
        at = np.searchsorted(clocks, rows["clock_asked_mhz"]), np.searchsorted(ctas, rows["ctas"])
        errors += (1e3 * walls[at] / rows["concurrent_ms"] - 1).tolist()
    yield "predicted_rows", float(len(errors))
    yield "predicted_median", float(np.median(np.abs(errors)))
    yield "predicted_p90", float(np.quantile(np.abs(errors), 0.9))


def _pair(shape: Any) -> Any:
    """A GEMM (m, n, k) beside an all-reduce of the tables, which was launched first."""
    m, n, k = shape
    payload = float(payload_bytes(np.array(_PAYLOAD_MIB), np.array(_GPUS)))
    pair = f"{{name: pair, m: {m}, n: {n}, k: {k}, payload_bytes: {payload:.0f}, pattern: all_reduce}}"
    words = [f"system={_SYSTEM}", f"system.node.num_gpus={_GPUS:.0f}", "schedule=c3_sp", "~space.schedule.name"]
    return _design("study=power", *words, "~workload.only", f"workload.shapes=[{pair}]")


def _design(*words: str) -> Any:
    """The base design of a study's first space."""
    planned = plan(request([*words, "tracking=none", "store=none"], None))
    return planned.backend.design(next(iter(planned.spaces.values())).base)


def slowness() -> Iterator[tuple[str, float]]:
    """Time of evaluating a grid of designs with power over that without, where no limit binds and where one does."""
    design = _design("study=power", "~space.schedule.name")
    cus = np.arange(1.0, 1 + _TIMED_CUS)
    for name, cap_w in (("", power_of(_SYSTEM).board_w), ("_limited", _TIGHT_W)):
        axes = {"schedule.comm_cus": cus, "system.gpu.clock": np.array([_TIMED_CLOCK])}
        batch = Batch(put(design, "system.gpu.power.cap_w", cap_w), axes)
        seconds = [
            min(timeit.repeat(partial(of.evaluate, [batch]), number=1, repeat=9))
            for of in (PoweredBackend("fluid"), OverlapBackend("fluid"))
        ]
        yield f"seconds_over_plain{name}", seconds[0] / seconds[1]


def least_energy(folder: Path) -> Iterator[tuple[str, float]]:
    """Distance [MHz] between the clocks at which a GEMM takes the least energy, measured and by the law."""
    table, power = pd.read_csv(folder / KNEE, comment="#"), power_of(_SYSTEM)
    table = table[table["clock_held"] == 1]
    away = list[float]()
    for _, rows in table.groupby(["m", "n", "k"]):
        shapes = {side: rows[side].to_numpy(float) for side in "mnk"}
        seconds = 1e-3 * rows["ms"].to_numpy(float)
        clocks = rows["clock_asked_mhz"].to_numpy(float)
        done = activity(shapes, np.zeros(len(rows)), np.zeros(len(rows)), seconds)
        joules = seconds * board_w(power, 1e6 * clocks / power.clock_hz, done, PRECISION)
        away.append(abs(clocks[np.argmin(joules)] - clocks[np.argmin(seconds * rows["poll_w"].to_numpy(float))]))
    yield "least_energy_mhz", float(max(away))


def breaks() -> Iterator[tuple[str, float]]:
    """Count designs that a lower limit makes faster or more powerful, on the systems of `study=power`."""
    count = wrong = 0
    for system in (_SYSTEM, "h100_8"):
        limits = [float(cap) for cap in np.array(_CAPS_W) * power_of(system).board_w / _CAPS_W[-1]]
        words: dict[str, Any] = {"system": system, "space__system__gpu__power__cap_w": limits, "decide__samples": 0}
        words |= {"tracking": "none", "store": "none", "figures": "none", "output_dir": "outputs/benchmarks"}
        run = dse.run("power", **words)
        ok = run.table[run.table["status"] == "ok"].sort_values("system.gpu.power.cap_w")
        for _, rows in ok.groupby(["scenario", "schedule.name"], observed=True):
            count += len(rows)
            wrong += int((np.diff(rows["makespan_s"]) > 1e-12 * rows["makespan_s"].max()).sum())
            wrong += int((rows["mean_w"] > rows["system.gpu.power.cap_w"] * (1 + 1e-9)).sum())
    yield "monotone_designs", float(count)
    yield "monotone_breaks", float(wrong)


def figures(folder: Path | None) -> dict[str, float]:
    """All figures of the tables that are there, and of the law."""
    found = {**dict(breaks()), **dict(slowness())}
    if folder is None:
        return found
    by_table = {BY_CLOCK: watts, THROTTLE: throttled, KNEE: least_energy, H200: gemm_watts, SERVED: served_joules}
    for name, figure in by_table.items():
        if (folder / name).is_file():
            found |= dict(figure(folder))
    if (folder / BY_CLOCK).is_file():
        (row,) = judged_clocks(folder / BY_CLOCK)
        found |= {"concurrent_median": row["median"], "concurrent_p90": row["p90"]}
        found |= dict(predicted(folder / BY_CLOCK))
    return found


def main() -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.power", description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder of measured tables, with a folder `power`")
    parser.add_argument("--json", action="store_true", help="print JSON")
    words = parser.parse_args()
    found = figures(None if words.data is None else words.data / "power")
    print(
        json.dumps(found, indent=1)
        if words.json
        else "\n".join(f"{key:28} {value:.4g}" for key, value in found.items())
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
