"""Wrong answers counted: `python -m benchmarks.answers [--json] [--quick] [--data DIR]`.

    silent_leaves     drawn numbers of hardware of all machines and studies that are typed, change nothing, and are not
                      reported
    stale_reuse       edits of code, data and environment after which a study took results from before
    calibrated_off    calibrated numbers that a fit of today does not give; those whose table is absent are not counted
    answers_missing   studies whose first table lacks the quantity of their question
    valid_share_*     share of points with a result where three of four values have none, of 100, and of the second half
    judge_error       largest relative error of the judged times of plans given back through every exporter

All must be 0 but the shares, of which those of `tpe` and `auto` must not be below that of `random`, and must rise. Exit
code 1 where something is not so. --quick draws few. --data: folder of measured tables that are not shipped.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.refit import calibrated_off
from benchmarks.stale_reuse import stale_reuse
from benchmarks.valid_shares import valid_shares
from tests.campaigns.answer_check import answers_missing
from tests.campaigns.judged import judge_errors
from tests.campaigns.silent_leaves import silent_leaves

JUDGED_WITHIN = 1e-12


@dataclass(frozen=True)
class Size:
    """How much is drawn: numbers of hardware, edits, plans, and seeds of searches."""

    leaves: int
    edits: int
    plans: int
    seeds: int


WHOLE, QUICK = Size(200, 20, 50, 8), Size(10, 3, 5, 2)


def figures(size: Size, data: Path | None) -> dict[str, Any]:
    """Every figure, computed one after the other."""
    parts: Mapping[str, Callable[[], Any]] = {
        "silent_leaves": lambda: len(silent_leaves(size.leaves)),
        "stale_reuse": lambda: stale_reuse(size.edits),
        "calibrated_off": lambda: len(calibrated_off(data)),
        "answers_missing": lambda: len(answers_missing()),
        "judge_error": lambda: judge_errors(size.plans, 0).worst,
    }
    computed = dict[str, Any]()
    for name, part in parts.items():
        print(f"{name} ...", file=sys.stderr, flush=True)
        computed[name] = part()
        print(f"{name} = {computed[name]}", file=sys.stderr, flush=True)
    return computed | valid_shares(size.seeds)


def misses(computed: Mapping[str, Any]) -> list[str]:
    """Figures that are not as they must be."""
    counts = ("silent_leaves", "stale_reuse", "calibrated_off", "answers_missing")
    wrong = [f"{name} = {computed[name]}, not 0" for name in counts if computed[name]]
    if computed["judge_error"] > JUDGED_WITHIN:
        wrong.append(f"judge_error = {computed['judge_error']:.1e}, above {JUDGED_WITHIN:g}")
    least = computed["valid_share_random"]
    for name in ("valid_share_tpe", "valid_share_auto"):
        first, second = computed[f"{name}_first_half"], computed[f"{name}_second_half"]
        wrong += [f"{name} = {computed[name]:.3f}, below that of random ({least:.3f})"] * (computed[name] < least)
        wrong += [f"{name} falls from {first:.3f} to {second:.3f}"] * (second < first)
    return wrong


def main(words: Sequence[str] | None = None) -> int:
    """Print every figure; 1 where one is not as it must be."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.answers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--data", type=Path)
    typed = parser.parse_args(words)
    with contextlib.redirect_stdout(sys.stderr):  # studies print their answers
        computed = figures(QUICK if typed.quick else WHOLE, typed.data)
    wrong = misses(computed)
    if typed.json:
        print(json.dumps(computed | {"misses": wrong}))
    else:
        print(*(f"{name:28} {value}" for name, value in computed.items()), *wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
