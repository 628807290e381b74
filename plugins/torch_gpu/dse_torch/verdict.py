"""Predicted against measured, of GPUs that were measured (`dse judge`).

The tables are those of `dse_judge`; predictions are those of the system that `device.yaml` names, by the
functions that plans use, with the constants as they are. Nothing is fitted.

    overlap plan     a GEMM as `search_spaces.chunk_costs` costs it: `costs.gemm`, at the clock under load if fitted
    step plan        a GEMM as `simulators.steps` costs it: fitted constants at the clock under load
    full clock       the same of a single GEMM, as `study=operators` judges it: these samples last a millisecond
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from dse import plots
from dse.plots import tables
from dse_calibration.slowdowns import fit_slowdowns
from dse_torch.tables import FOLDER, MeasuredGpu, measured_gpus, sizes_of
from simulators.costs.gemm import GemmShape, gemm_cost
from simulators.costs.gemm.fitted import FittedGemms

PRECISIONS = ("bf16", "fp16", "fp8")
# of a GEMM: with few, reading the weights bounds it; with many, FLOP do
TOKENS = {"up to 256": (0, 256), "257 to 2048": (256, 2048), "more": (2048, np.inf)}
WARM_S = 2.0  # of load, after which clock and power no longer change
TOLERANCE = 0.05  # of a constant from the median of what was measured
Row = dict[str, Any]
Sections = Mapping[str, Sequence[Mapping[str, Any]]]
"""Rows by title of their section."""
_LINES = {"copy_by_sms": "copies by SMs", "hold_sms": "SMs merely held", "engine_to_gpu": "copy engines"}


def _spread(name: str, values: Any) -> Row:
    """Median, least and largest of values as columns."""
    return {name: float(np.median(values)), f"{name}_low": float(np.min(values)), f"{name}_high": float(np.max(values))}


def gemm_seconds(gpu: MeasuredGpu, rows: pd.DataFrame, precision: str) -> Iterator[tuple[str, Any]]:
    """Yield each door and the seconds that it predicts, or the reason why it predicts none."""
    loaded = gpu.hardware.gpu.loaded
    for door, clock in {
        "overlap plan": 1.0,
        # long GEMMs lower the clock, as steps of seconds have them
        "step plan": loaded.gemm_clock if loaded else 1.0,
        "full clock": 1.0,
    }.items():
        try:
            if door == "overlap plan":
                cost = gpu.plan(precision).cost(sizes_of(rows), 0)
            else:
                chip = FittedGemms.of(gpu.hardware, precision).at_clock(clock)
                cost = gemm_cost(chip, GemmShape.row_major(*sizes_of(rows)))
            # measured times are of kernels that follow one another, launches included
            yield door, cost.seconds + cost.launch_s
        except ValueError as error:
            yield door, str(error)


def gemms(gpu: MeasuredGpu) -> Iterator[Row]:
    """GEMMs alone: errors of predicted over measured times. inside: share that the 90 % intervals hold."""
    for precision in PRECISIONS:
        rows = gpu.whole(precision)
        for door, seconds in gemm_seconds(gpu, rows, precision):
            if isinstance(seconds, str):
                yield {"precision": precision, "by": door, "rows": len(rows), "reason": seconds}
                continue
            error = seconds / rows["seconds"].to_numpy() - 1
            inside = gpu.inside(rows, precision, seconds)
            for tokens, (low, high) in {"any": (0, np.inf), **TOKENS}.items():
                chosen = ((rows["m"] > low) & (rows["m"] <= high)).to_numpy()
                part = error[chosen]
                sizes = {"median": np.median(abs(part)), "p90": np.quantile(abs(part), 0.9), "signed": np.median(part)}
                coverage = {"inside": float(inside[chosen].mean())} if door == "full clock" else {}
                yield {"precision": precision, "by": door, "tokens": tokens, "rows": len(part), **sizes, **coverage}


def beside(gpu: MeasuredGpu) -> Iterator[Row]:
    """Slowdown of GEMMs beside copies, sums and SMs that are merely taken, by SMs, and beside copy engines."""
    for (other, _), rows in gpu.beside.groupby(["other", "sms"], sort=False):
        sms, engine = rows["sms"].to_numpy(float), str(other).startswith("engine")
        if other not in ("copy_by_sms", "add_by_sms", "hold_sms") and not engine:
            continue
        plan = gpu.plan(mover="dma" if engine else "cu")
        # as overlap plans slow a GEMM
        law = plan.beside(sizes_of(rows), sms, masked=False, accumulate=False).law
        # held SMs take compute alone, copies HBM as well; factors are speeds
        predicted = gpu.lost(rows) if other == "hold_sms" else np.broadcast_to(1 / law.factors[0], len(rows))
        spreads = _spread("measured", rows["slowdown"]) | _spread("predicted", predicted)
        yield {"beside": other, "sms": int(sms[0]), **spreads, "other": float(rows["other_slowdown"].median())}


def targets(gpu: MeasuredGpu) -> Iterator[Row]:
    """Slowdown of GEMMs beside held SMs, by how many SMs cuBLAS is told to leave; all over the GEMM on all SMs.

    fits: share of GEMMs that the held SMs do not delay at all: each block, or cluster of blocks, has its SMs at once.
    """
    rows, cases = gpu.table("targets"), ["m", "n", "k", "sms"]
    # the GEMM alone, for which cuBLAS counts on all SMs
    whole = rows.query("left == 0").set_index(cases)["gemm_alone_s"].rename("whole_s")
    rows = rows.join(whole, on=cases)
    rows = rows.assign(
        slowdown=rows["gemm_beside_s"] / rows["whole_s"], own=rows["gemm_beside_s"] / rows["gemm_alone_s"]
    )
    for (sms, left), part in rows.groupby(["sms", "left"]):
        fits = float((part["own"] < 1 + TOLERANCE).mean())
        yield {"held": sms, "left": left, **_spread("slowdown", part["slowdown"]), "fits": fits}


def chunks(gpu: MeasuredGpu) -> Iterator[Row]:
    """Chunks of a GEMM one after the other, over the GEMM as a whole."""
    parts, plan = gpu.table("gemms").query("way == 'chunks' and streams == 1"), gpu.plan()
    joined = parts.merge(gpu.whole()[["m", "n", "k", "seconds"]], on=["m", "n", "k"], suffixes=("", "_whole"))
    for (axis, count), rows in joined.groupby(["axis", "chunks"], sort=False):
        number = float(rows["chunks"].iloc[0])
        sizes = dict(zip("mnk", sizes_of(rows), strict=True))
        cut = {name: size / (number if name == axis else 1.0) for name, size in sizes.items()}
        size, undivided = (cut["m"], cut["n"], cut["k"]), plan.cost(sizes_of(rows), 0)
        # chunks along k add to the output, which they read as well
        first, later = plan.cost(size, 0), plan.cost(size, 0, accumulate=axis == "k")
        seconds = first.seconds + (number - 1) * later.seconds + number * first.launch_s
        ratio = seconds / (undivided.seconds + undivided.launch_s)
        times = _spread("measured", rows["seconds"] / rows["seconds_whole"]) | _spread("predicted", ratio)
        yield {"axis": axis, "chunks": count, **times}


def orders(gpu: MeasuredGpu) -> Iterator[Row]:
    """What is gained over one after the other: of a GEMM and a copy by their order, and of pipelines by what copies."""
    starts, pipelines = gpu.table("starts"), gpu.table("pipelines")
    starts = starts.assign(gain=(starts["gemm_alone_s"] + starts["other_alone_s"]) / starts["both_s"])
    for (order, priority), rows in starts.groupby(["order", "priority"]):
        yield {"what": order, "priority or SMs": priority, **_spread("gain", rows["gain"])}
    pipelines = pipelines.assign(gain=pipelines["serial_s"] / pipelines["pipeline_s"])
    for (mover, sms), rows in pipelines.groupby(["mover", "sms"], sort=False):
        yield {"what": f"pipeline, {mover}", "priority or SMs": sms, **_spread("gain", rows["gain"])}


def memory(gpu: MeasuredGpu) -> Iterator[Row]:
    """Rates of copies in HBM, read and written bytes together, by SMs and for the largest of all SMs."""
    rows = gpu.table("kernels").query("bytes_read > 0 and bytes_written > 0")
    rate = (rows["bytes_read"] + rows["bytes_written"]) / rows["seconds"]
    rows = rows.assign(bytes_per_s=rate, of_hbm_bytes_per_s=rate / float(gpu.hardware.gpu.hbm_bytes_per_s or np.nan))
    mib = 1 << 20
    # copies by some SMs have 128 MiB, kernels over all SMs their largest size
    rows = rows[rows["bytes_written"].eq(128 * mib) | (rows["bytes_written"].eq(256 * mib) & rows["sms"].eq(0))]
    for row in rows[["kernel", "sms", "bytes_written", "bytes_per_s", "of_hbm_bytes_per_s"]].to_dict("records"):
        yield {str(name): value for name, value in row.items()}


def launches(gpu: MeasuredGpu) -> Iterator[Row]:
    """Gaps between kernels, the kernel included, over `kernel_launch_s`; host times stand alone."""
    rows = gpu.table("launches")[["what", "of", "graph", "seconds"]]
    share = (rows["seconds"] / float(gpu.hardware.gpu.kernel_launch_s or np.nan)).where(rows["what"] != "host time")
    for row in rows.assign(of_kernel_launch_s=share).to_dict("records"):
        yield {str(name): value for name, value in row.items() if not pd.isna(value)}


def load(gpu: MeasuredGpu) -> Iterator[Row]:
    """Clock, power and rate after seconds of one kind of work; the rate of GEMMs over the peak, and over that alone."""
    peaks: Mapping[Any, float] = gpu.hardware.gpu.peak_flop_per_s or {}
    for work, rows in gpu.table("clocks").groupby("work", sort=False):
        warm = rows[rows["at_s"] > WARM_S].median(numeric_only=True)
        row: Row = {"work": work, "sm_clock_mhz": warm["sm_clock_mhz"], "power_w": warm["power_w"]}
        if str(work).startswith("gemm"):
            size, precision = float(str(work).split()[1]), "fp8" if "fp8" in str(work) else "bf16"
            # square GEMMs, by their name
            rate = 2 * size**3 / warm["call_s"]
            alone_s = gpu.whole(precision).query(f"m == {size} and n == {size} and k == {size}")["seconds"]
            row |= {"flop_per_s": rate, "of_peak": rate / peaks[precision]}
            row |= {"of_rate_alone": float(alone_s.iloc[0] / warm["call_s"])} if len(alone_s) else {}
        yield row


def constants(gpu: MeasuredGpu) -> Iterator[Row]:
    """Constants of the GPU beside what the tables say of them; contradicted: far from the median of that."""
    for name, value, values in _compared(gpu):
        low, middle, high = (float(np.quantile(values, share)) for share in (0.1, 0.5, 0.9))
        verdict = "contradicted" if abs(value / middle - 1) > TOLERANCE else "stands"
        yield {"constant": name, "value": value, "p10": low, "median": middle, "p90": high, "verdict": verdict}


def measured_constants(gpu: MeasuredGpu) -> Iterator[tuple[str, float]]:
    """Yield paths of constants of a system, and what the tables measured of them."""
    for name, value in fit_slowdowns(gpu.folder / "beside.csv").items():
        yield f"gpu.contention.{name}", value
    for name, _, values in _compared(gpu):
        path = name.partition(":")[0]
        if path in ("hbm_bytes_per_s", "kernel_launch_s"):
            yield f"gpu.{path}", float(f"{np.median(values):.4g}")


def _compared(gpu: MeasuredGpu) -> Iterator[tuple[str, float, Any]]:
    """Yield what a constant is compared with, its value, and the values that were measured."""
    system, rows, cases = gpu.hardware.gpu, gpu.beside, ["m", "n", "k", "sms"]
    copies, holds = rows.query("other == 'copy_by_sms'"), rows.query("other == 'hold_sms'")
    # the same SMs copying and held: their ratio is what the copy's traffic adds
    both = copies.merge(holds, on=cases, suffixes=("", "_held")).query("sms <= 16")
    few = holds.query("sms <= 16")
    yield "costs.gemm: time on the SMs left, measured over predicted", 1.0, few["slowdown"] / gpu.lost(few)
    law, late = system.contention, gpu.table("starts").query("order == 'gemm first'")
    if law is not None:
        interference = both["slowdown"] / both["slowdown_held"]
        yield "contention.gemm_beside_cus: during copies over on the SMs left", float(law.gemm_beside_cus), interference
        engines = rows[rows["other"].str.startswith("engine")]["slowdown"]
        yield "contention.dma_beside_gemm: during copies by engines", float(law.dma_beside_gemm), engines
        slow = copies.query("sms >= 4")["other_slowdown"]
        yield "contention.cu_copy_beside_gemm: copies by 4 to 64 SMs", float(law.cu_copy_beside_gemm), slow
        delay = (late["other_end_s"] - late["other_alone_s"]) / late["gemm_alone_s"]
        yield "contention.late_start: delay of copies that come later", float(law.late_start), delay
    rates = [row["bytes_per_s"] for row in memory(gpu) if row["sms"] == 0]
    yield "hbm_bytes_per_s: copies of 256 MiB", float(system.hbm_bytes_per_s or 0), rates
    # without graphs, as schedules launch; GEMMs take longer than a launch
    gaps = gpu.table("launches").query("what == 'kernel after kernel' and of != 'gemm' and graph == 0")
    yield "kernel_launch_s: kernel after kernel", float(system.kernel_launch_s or 0), gaps["seconds"]
    if system.loaded is not None:
        shares = [row["of_rate_alone"] for row in load(gpu) if "of_rate_alone" in row]
        yield "loaded.gemm_clock: rate under load over alone", float(system.loaded.gemm_clock), shares
    wide = gpu.whole().query("m >= 4096 and n >= 4096 and k >= 4096")
    # large GEMMs reach the sustained rate; small ones have partial waves
    rate = 2 * wide["m"] * wide["n"] * wide["k"] / wide["seconds"] / float(system.num_cus)
    yield "matrix_flop_per_s_per_cu: GEMMs from 4096 on", float(system.matrix_flop_per_s_per_cu or 0), rate


SECTIONS = {
    "GEMMs alone: error of the time": gemms,
    "GEMMs and other work at once: slowdown": beside,
    "GEMMs on the SMs that are left, by what cuBLAS counts on": targets,
    "Chunks one after the other over the whole GEMM": chunks,
    "Gain of both at once over one after the other": orders,
    "HBM, read and written together": memory,
    "Launches": launches,
    "Under load": load,
    "Constants, each against what was measured of it": constants,
}


def judge_tables(folder: Path = FOLDER) -> dict[str, dict[str, list[Row]]]:
    """Rows of each section, by name of the tables of a GPU. Raises ValueError where there are none."""
    return {
        gpu.folder.name: {name: list(rows(gpu)) for name, rows in SECTIONS.items()} for gpu in measured_gpus(folder)
    }


def slowdowns(judged: Mapping[str, Sections]) -> plots.FigureSheet:
    """Draw the slowdown of GEMMs over the SMs that other work takes, a panel for each GPU."""
    rows = pd.concat([_lines_of(gpu, sections) for gpu, sections in judged.items()], ignore_index=True)
    low, high = (rows[(rows["line"] == _LINES["copy_by_sms"]) & (rows["sms"] == sms)]["y"].min() for sms in (4, 24))
    title = f"A median GEMM takes {low:.2f} times as long during a copy by 4 SMs, and {high:.2f} times by 24"
    note = "medians over 15 GEMMs in bf16; bands: from the least to the largest"
    axes = plots.Axis("sms", "SMs that other work takes"), plots.Axis("y", "slowdown of the GEMM [x]", centre=1.0)
    return tables.curves(rows, axes[0], y=axes[1], by="line", frame=plots.Frame(title, note, "gpu"))


def _lines_of(gpu: str, sections: Sections) -> pd.DataFrame:
    """Lines of a panel: what was measured with its range, engines as a constant, what is predicted of copies."""
    every = pd.DataFrame(next(rows for name, rows in sections.items() if name.startswith("GEMMs and other")))
    copies = every[every["beside"] == "copy_by_sms"]
    # copy engines take no SMs: one value, drawn over all
    engines = every[every["beside"] == "engine_to_gpu"].iloc[[0] * len(copies)].assign(sms=copies["sms"].to_numpy())
    measured = pd.concat([copies, every[every["beside"] == "hold_sms"], engines])
    names = {"measured": "y", "measured_low": "range_low", "measured_high": "range_high"}
    lines_measured = measured.assign(line=measured["beside"].map(_LINES)).rename(columns=names)
    predicted = copies.assign(line="copies by SMs, predicted", y=copies["predicted"])
    drawn = ["sms", "line", *names.values()]
    return pd.concat([lines_measured[drawn], predicted[["sms", "line", "y"]]]).assign(gpu=gpu.partition("_")[0].upper())
