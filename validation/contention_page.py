"""Numbers of docs/explanation/contention.md, written from the model as it is: `python -m validation.contention_page`.

A block of the page stands between `<!-- <name>: python -m validation.contention_page --write -->` and
`<!-- end of <name> -->`. Coefficients are those of `conf`, errors are computed, and what follows from them for papers
is read from the claims that are kept (`python -m benchmarks.claims --record`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks import claims
from benchmarks.recorded import ROOT
from dse.config.options import conf_dir
from dse_calibration.contention import TIMES, Overlaps, errors, median_errors
from dse_calibration.overlap_measured.gemm_collective import MeasuredOverlap, predict_overlaps
from simulators.hardware.machine import tree_of
from simulators.hardware.schedule_system import ScheduleSystem
from validation.calibrated_numbers import Number, calibrated_numbers

PAGE = ROOT / "docs" / "explanation" / "contention.md"
MACHINE = "mi300x_8"
_LAWS = {
    "gemm_beside_cus": "`gemm_beside_cus` f | while kernels move data a GEMM takes `f T(CUs left)` if its tiles are"
    " dynamic, `max(T(CUs left), f T(all CUs))` if they are static: the added waves hide what is lost within them",
    "late_start": "`late_start` w | kernels hold their CUs, and move nothing for `w` times the time of the GEMM alone,"
    " or until it ends; whatever they move",
    "cu_copy_beside_gemm": "`cu_copy_beside_gemm` s | a CU moves `r / s` while a GEMM runs, so links that many CUs fill"
    " hardly suffer",
    "dma_beside_gemm": "`dma_beside_gemm` d | a transfer by DMA engines and a concurrent GEMM take d times as long,"
    " both; d - 1 less by the share of CUs that are withheld",
}
_FITTED_ON = {
    "gemm_beside_cus": "GEMM times of the six fitted rows of the work-stealing GEMM",
    "late_start": "times of the all-reduce, all twelve fitted rows",
    "cu_copy_beside_gemm": "the same",
    "dma_beside_gemm": "ConCCL's {target:g} % of the ideal gain, on the mix of `workload=conccl`",
}
_FOLLOWS = {
    "conccl.base": "ConCCL: plain concurrency, of the ideal gain",
    "conccl.best_dual": "ConCCL: best strategy by CUs, of the ideal gain",
    "conccl.best_dma": "ConCCL: best strategy by DMA engines, of the ideal gain",
    "conccl.max_speedup": "ConCCL: largest speed-up by DMA engines",
    "ficco.ideal_max": "FiCCO: largest ideal speed-up",
    "ficco.best_max": "FiCCO: largest speed-up",
}
_SWEPT = (8192, 512)  # size of the GEMM and MiB of the all-reduce that are measured beside all numbers of channels


def coefficients() -> Iterator[str]:
    """Lines of the table of coefficients."""
    numbers = {number.path: number for number in calibrated_numbers() if number.option == "gpu/mi300x"}
    yield "| coefficient | law | value | calibrated on |"
    yield "|---|---|--:|---|"
    for name, law in _LAWS.items():
        number: Number = numbers[f"contention.{name}"]
        fitted_on = _FITTED_ON[name].format(target=number.calibration.target)
        yield f"| {law} | {number.value:g} | {fitted_on} |"


def measured_errors() -> Iterator[str]:
    """Lines of medians over the rows not fitted, and of the tables of all rows."""
    system, rows = ScheduleSystem.of(tree_of(MACHINE)), Overlaps.read()
    medians, unseen = median_errors(system, rows), int((~rows.fitted).sum())
    texts = ", ".join(f"{100 * medians[time]:.1f} % {_NAMES[time]}" for time in TIMES)
    yield f"Medians over the {unseen} rows not fitted to: {texts}. Errors in %, hipBLASLt / work stealing:"
    error = errors(system, rows)
    swept = (rows.size == _SWEPT[0]) & (np.rint(rows.payload_bytes / 2**20) == _SWEPT[1])
    for title, chosen in (
        (f"{_SWEPT[0]}³, {_SWEPT[1]} MiB: channels", swept),
        ("GEMM, payload in MiB, channels", ~swept),
    ):
        yield ""
        yield from _error_table(rows.where(chosen), {time: error[time][chosen] for time in TIMES}, title)


_NAMES = {"gemm": "GEMM", "comm": "collective", "wall": "wall"}


def _error_table(rows: Overlaps, error: Mapping[str, Any], title: str) -> Iterator[str]:
    """A table with a column for each case and a row for each time."""
    every = list(zip(rows.size, np.rint(rows.payload_bytes / 2**20).astype(int), rows.channels, strict=True))
    cases = dict.fromkeys(every)
    sweep = "channels" in title and title.startswith(str(_SWEPT[0]))
    places = {case: [place for place, other in enumerate(every) if other == case] for case in cases}
    heads = [
        (f"{case[2]}" if sweep else f"{case[0]}, {case[1]}, {case[2]}") + " (fit)" * bool(rows.fitted[places[case][0]])
        for case in cases
    ]
    yield f"| {title} | {' | '.join(heads)} |"
    yield f"|---|{'--:|' * len(heads)}"
    for time in TIMES:
        cells = [" / ".join(f"{_signless(100 * error[time][at]):.1f}" for at in places[case]) for case in cases]
        yield f"| {_NAMES[time]} | {' | '.join(cells)} |"


def _signless(value: float) -> float:
    """A number that rounds to zero, without its sign."""
    return round(float(value), 1) + 0.0


def follows() -> Iterator[str]:
    """Lines of the table of what papers publish, beside ours."""
    kept = {row["id"]: row for rows in claims.records().values() for row in rows}
    yield "| what | published | ours | |"
    yield "|---|--:|--:|---|"
    for name, text in _FOLLOWS.items():
        row = kept[name]
        verdict = "fitted" if row["basis"] == "fitted" else "within" if row["within"] else "missed"
        yield f"| {text} | {row['published']:g} {row['unit']} | {row['ours']:.3g} {row['unit']} | {verdict} |"


_OVERLAPS = ("gemm_collective", "gemm_allreduce")
"""Tables of overlaps of a GEMM and its collective, of other projects."""


def overlaps() -> Iterator[str]:
    """A sentence on the measured overlaps of a GEMM and its collective, and errors by GPU."""
    tables = [predict_overlaps(conf_dir() / "data" / "overlap" / f"{name}.csv") for name in _OVERLAPS]
    rows, not_predicted = [row for rows, _ in tables for row in rows], sum(sum(each.values()) for _, each in tables)
    unseen = [row for row in rows if not row.fitted]
    sign = np.mean([row.right_sign for row in unseen])
    yield (
        f"{len(rows)} of {len(rows) + not_predicted} rows are predicted; {len(rows) - len(unseen)} of these"
        f" fitted a constant and are not judged. In the other {len(unseen)} the sign of the"
        f" gain is right in {100 * sign:.0f} %, and the speed-up is off by {_percent(_median(unseen))} in the median"
        f" (ideal overlap: {_percent(_median(unseen, _ideal))}, no overlap: {_percent(_median(unseen, _none))})."
    )
    yield ""
    gpus = list(dict.fromkeys(row.row["gpu"] for row in unseen))
    parts = {gpu: [row for row in unseen if row.row["gpu"] == gpu] for gpu in gpus}
    yield f"| | {' | '.join(gpus)} |"
    yield f"|---|{'--:|' * len(gpus)}"
    yield f"| rows judged | {' | '.join(str(len(parts[gpu])) for gpu in gpus)} |"
    yield f"| median error of the speed-up | {' | '.join(_percent(_median(parts[gpu])) for gpu in gpus)} |"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _ideal(row: MeasuredOverlap) -> float:
    return sum(row.parts) / max(row.parts)


def _none(row: MeasuredOverlap) -> float:
    """The speed-up of a row that overlaps nothing."""
    return 1.0


def _median(
    rows: Sequence[MeasuredOverlap], speedup: Callable[[MeasuredOverlap], float] = lambda row: row.speedup
) -> float:
    """Median error of a speed-up, by default the predicted one."""
    return float(np.median([abs(speedup(row) / row.measured[2] - 1) for row in rows]))


BLOCKS: Mapping[str, Callable[[], Iterator[str]]] = {
    "coefficients": coefficients,
    "errors": measured_errors,
    "follows": follows,
    "overlaps": overlaps,
}
"""Name of a block -> its lines."""


def with_block(page: str, name: str) -> str:
    """A page with a block as it is today. Raises ValueError where the page has no place for it."""
    begin, end = f"<!-- {name}: python -m validation.contention_page --write -->", f"<!-- end of {name} -->"
    before, first, after = page.partition(begin)
    _, last, behind = after.partition(end)
    if not first or not last:
        raise ValueError(f"no lines {begin} and {end}")
    return "\n".join([f"{before}{begin}", "", *BLOCKS[name](), "", f"{end}{behind}"])


def main(words: Sequence[str] | None = None) -> int:
    """Print the blocks, or write them into the page."""
    parser = argparse.ArgumentParser(
        prog="python -m validation.contention_page", description=str(__doc__).splitlines()[0]
    )
    parser.add_argument("--write", action="store_true", help="write the page")
    asked = parser.parse_args(words)
    page = PAGE.read_text("utf-8")
    for name in BLOCKS:
        if asked.write:
            page = with_block(page, name)
        else:
            print("\n".join([*BLOCKS[name](), ""]))
    if asked.write:
        PAGE.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
