"""What docs/how-to/gpu.md says of measured GPUs, table and figure: `python -m validation.gpu_page [--write]`."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.recorded import ROOT
from dse import plots
from dse_torch.verdict import Sections, judge_tables, slowdowns

PAGE = ROOT / "docs" / "how-to" / "gpu.md"
PICTURES = ROOT / "docs" / "images"
BEGIN, END = "<!-- measured: python -m validation.gpu_page --write -->", "<!-- end of measured -->"


def lines(judged: Mapping[str, Sections]) -> Iterator[str]:
    """Lines of the table: measured / predicted, or the error of what is predicted."""
    columns = [dict(_cells({re.split("[:,]", name)[0]: rows for name, rows in gpu.items()})) for gpu in judged.values()]
    yield f"| | {' | '.join(name.partition('_')[0].upper() for name in judged)} |"
    yield f"|---|{'--:|' * len(judged)}"
    for what in columns[0]:
        yield f"| {what} | {' | '.join(column[what] for column in columns)} |"


def _cells(sections: Sections) -> Iterator[tuple[str, str]]:
    """Yield what a row of the table is of, and the cell of one GPU."""
    doors: list[dict[str, Any]] = [
        {"precision": "bf16", "by": door, "tokens": "any"} for door in ("overlap plan", "step plan", "full clock")
    ]
    errors = [_row(sections["GEMMs alone"], door)["median"] for door in doors]
    yield (
        "GEMMs in bf16, median error: overlap plan, step plan, full clock",
        ", ".join(f"{100 * e:.0f} %" for e in errors),
    )
    beside = sections["GEMMs and other work at once"]
    for name, text in {"copy_by_sms": "during copies by 4, 16, 32 SMs", "hold_sms": "with 4, 16, 32 SMs held"}.items():
        yield f"slowdown of a GEMM {text}", _pairs(beside, [{"beside": name, "sms": sms} for sms in (4, 16, 32)])
    targets = sections["GEMMs on the SMs that are left"]
    cells = [[_row(targets, {"held": sms, "left": left * sms})["slowdown"] for sms in (1, 4, 16)] for left in (0, 1)]
    yield (
        "the same by 1, 4, 16, all / the rest for cuBLAS",
        " / ".join(", ".join(f"{x:.2f}" for x in row) for row in cells),
    )
    yield "slowdown of a GEMM during copies by copy engines", _pairs(beside, [{"beside": "engine_to_gpu"}])
    cut = sections["Chunks one after the other over the whole GEMM"]
    yield "four chunks over one GEMM, along m, n, k", _pairs(cut, [{"axis": axis, "chunks": 4} for axis in "mnk"])
    gains, constants = sections["Gain of both at once over one after the other"], sections["Constants"]
    movers: list[dict[str, Any]] = [
        {"what": "pipeline, copy_by_sms", "priority or SMs": 16},
        {"what": "pipeline, engine_to_gpu"},
    ]
    yield (
        "gain of pipelines, copies by 16 SMs, by engines",
        ", ".join(f"{_row(gains, by)['gain']:.2f}" for by in movers),
    )
    known = {str(row["constant"]).partition(":")[0]: (row["median"], row["value"]) for row in constants}
    for name, (factor, unit) in {"hbm_bytes_per_s": (1e-12, " TB/s"), "kernel_launch_s": (1e6, " µs")}.items():
        yield f"`{name}`", " / ".join(f"{factor * value:.3g}" for value in known[name]) + unit
    load, shares = _row(sections["Under load"], {"work": "gemm 8192"}), known["loaded.gemm_clock"]
    clock = " / ".join(f"{value:.2f}" for value in shares) + f", {load['sm_clock_mhz']:.0f} MHz"
    yield "`loaded.gemm_clock`, SM clock under load", clock


def _row(rows: Sequence[Mapping[str, Any]], cells: Mapping[str, Any]) -> Mapping[str, Any]:
    (row,) = (row for row in rows if all(row.get(name) == value for name, value in cells.items()))
    return row


def _pairs(rows: Sequence[Mapping[str, Any]], cells: Sequence[Mapping[str, Any]]) -> str:
    """Values that were measured / predicted."""
    chosen = [_row(rows, each) for each in cells]
    return " / ".join(", ".join(f"{row[side]:.2f}" for row in chosen) for side in ("measured", "predicted"))


def with_table(page: str, table: Sequence[str]) -> str:
    """A page with the table as it is today. Raises ValueError where the page has no place for it."""
    before, first, after = page.partition(BEGIN)
    _, last, behind = after.partition(END)
    if not first or not last:
        raise ValueError(f"no lines {BEGIN} and {END}")
    return "\n".join([f"{before}{BEGIN}", "", *table, "", f"{END}{behind}"])


def main(words: Sequence[str] | None = None) -> int:
    """Print the table, or write it into the page, with the figure."""
    parser = argparse.ArgumentParser(prog="python -m validation.gpu_page", description=str(__doc__).splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the page and its figure")
    parser.add_argument("--figures", type=Path, default=PICTURES, help="folder of the figure")
    options = parser.parse_args(words)
    judged = judge_tables()
    if not options.write:
        print("\n".join(lines(judged)))
        return 0
    PAGE.write_text(with_table(PAGE.read_text("utf-8"), list(lines(judged))), encoding="utf-8")
    plots.save(partial(slowdowns, judged), options.figures, "gpu_slowdown", formats=["png"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
