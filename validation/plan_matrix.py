"""Answers for models on machines: `python -m validation.plan_matrix [--sample N] [--write] [--json]`.

Ten models on eight machines, with 8, 64 and 1,024 GPUs, trained, prefilled and decoded, in bf16 and with fp8 products:
1,440 questions. Each asks `LayoutQuestion` for the best layout with serial sites, in the software that a plan takes by
itself; the answer is a layout and its time, or one sentence why there is none. --sample: so many of them, evenly spaced
in an order that shuffles all. --minutes: no further ones after so many. --write: the table
`docs/reference/plan_matrix.csv`.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from random import Random
from typing import Any

from dse.errors import ConfigError
from simulators.hardware.machine import tree_of
from simulators.steps.backend import StepBackend
from simulators.steps.plan.layouts import LayoutQuestion, LayoutSection, best_layout
from simulators.workloads.model_zoo import model_tree, option_tree
from studies.plan.stacks import stack_words

MODELS = (
    *("llama3_8b", "llama3_70b", "llama3.1_405b", "qwen3_32b", "mixtral_8x7b"),
    *("qwen3_30b_a3b", "qwen3_235b_a22b", "gpt_oss_120b", "deepseek_v3", "kimi_k2"),
)
MACHINES = (
    *("h100_8_ndr", "h200_8_ndr", "b200_8_ndr", "b300_8_xdr"),
    *("gb200_72", "gb300_72", "mi300x_8_roce", "mi355x_8_roce"),
)
GPUS = (8, 64, 1024)
MODES = ("training", "prefill", "decode")
PRODUCTS = ("bf16", "fp8")
LIMIT_S = 60.0
"""CPU time that a question may take."""
_LENGTH, _DECODED = 4096, 32  # tokens of a sequence, and sequences of a GPU that are decoded together
_PAGE = Path(__file__).parents[1] / "docs" / "reference" / "plan_matrix.csv"


@dataclass(frozen=True)
class Answer:
    """A question, its answer, and the CPU time that it took [s]. seconds: of a step; None where there is no layout.

    text: the layout, the sentence why there is none, or the error that nobody meant to raise (failed).
    """

    model: str
    machine: str
    gpus: int
    mode: str
    products: str
    seconds: float | None
    text: str
    took_s: float
    failed: bool = False

    @property
    def counts(self) -> bool:
        """Tell whether it is an answer or a sentence, in time."""
        one_sentence = bool(self.text) and "\n" not in self.text
        return one_sentence and not self.failed and self.took_s <= LIMIT_S


def questions(sample: int | None = None) -> list[tuple[str, str, int, str, str]]:
    """Model, machine, GPUs, mode and products of all questions, or of a sample of them."""
    every = list(itertools.product(MODELS, MACHINES, GPUS, MODES, PRODUCTS))
    if sample is None:
        return every
    Random(0).shuffle(every)
    return every[:sample]


def answers(sample: int | None = None, *, minutes: float = math.inf) -> Iterator[Answer]:
    """Yield the answer to each question that is asked within some minutes."""
    end = time.perf_counter() + 60 * minutes
    for asked in questions(sample):
        if time.perf_counter() > end:
            return
        begin = time.process_time()  # other work on the machine does not count
        try:
            seconds, text = _ask(*asked)
            failed = False
        except ConfigError as refused:
            seconds, text, failed = None, str(refused.problems[0]), False
        except Exception as error:
            seconds, text, failed = None, repr(error), True
        yield Answer(*asked, seconds, text, time.process_time() - begin, failed)


def _ask(model: str, machine: str, gpus: int, mode: str, products: str) -> tuple[float, str]:
    """Time [s] of a step in the best layout, and its name. Raises ConfigError where none fits."""
    (word,) = stack_words([f"system={machine}", f"run.mode={mode}"])
    run: dict[str, Any] = {"mode": mode, "precision": "bf16", "sequence_length": _LENGTH, "micro_batches": 1}
    run |= {"batch": gpus * (_DECODED if mode == "decode" else 1), "recompute": "none"}
    run |= {} if products == "bf16" else {"products": products}
    run |= {"weights": products} if products != "bf16" and mode != "training" else {}
    tree = {
        "system": tree_of(machine),
        "model": model_tree(model),
        "optimizer": option_tree("optimizer", "adam"),
        "kernels": option_tree("kernels", option_tree("stack", word.partition("=")[2])["stack"]["kernels"]),
        "run": run,
        "parallel": {"tp": 1, "pp": 1, "dp": 1},
    }
    asked = LayoutSection.model_validate({"auto": True, "gpus": gpus, "most": 1})
    layout, seconds = best_layout(LayoutQuestion.of(tree, asked, StepBackend().steps))
    return seconds, layout.name


def matrix_figures(sample: int) -> dict[str, Any]:
    """Figures of the benchmark: matrix_answers [%], and what took longest [s]."""
    found = list(answers(sample))
    share = 100 * sum(answer.counts for answer in found) / len(found)
    return {"matrix_answers": share, "matrix_longest_s": max(answer.took_s for answer in found)}


def main(words: Sequence[str] | None = None) -> int:
    """Ask, and print or write; 1 where a question has no answer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample", type=int, help="questions of the sample; all without it")
    parser.add_argument("--minutes", type=float, default=math.inf, help="ask no further questions after so many")
    parser.add_argument("--write", action="store_true", help="write the table of the documentation")
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    asked = parser.parse_args(words)
    found = list(answers(asked.sample, minutes=asked.minutes))
    if asked.write:
        names = [field.name for field in fields(Answer) if field.name not in ("took_s", "failed")]
        with _PAGE.open("w", encoding="utf-8", newline="") as file:
            rows = ([_cell(getattr(answer, name)) for name in names] for answer in sorted(found, key=_order))
            csv.writer(file, lineterminator="\n").writerows([names, *rows])
    if asked.json:
        print(json.dumps([asdict(answer) for answer in found], indent=2))
    for answer in found if not asked.json else ():
        print(f"{' '.join(map(str, _order(answer)))}: {_cell(answer.seconds)} {answer.text} ({answer.took_s:.1f} s)")
    return 0 if all(answer.counts for answer in found) else 1


def _order(answer: Answer) -> tuple[str, str, int, str, str]:
    return answer.model, answer.machine, answer.gpus, answer.mode, answer.products


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
