"""Learning of FiCCO's rule on drawn shapes: `python -m validation.ficco_rule [--write]`.

Every kind of schedule is evaluated on the all-gathers among the drawn shapes of `workload=learning`, none of which is
one of the paper's sixteen, on MI300X. A tree learns from them which kind is fastest (`dse_learning.tree_learning`). It
has as few leaves as come within one standard error of the best accuracy on shapes that were left out (Breiman's rule),
so that the sixteen have no part in its size either; `study=ficco` judges it on them. --write: into
`studies/ficco/rule.yaml`.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from dse.analysis.contexts import Cases, ContextQuestion, cases, score_picks
from dse.cli import main as dse_main
from dse.results.run_folder import FinishedRun
from dse_learning.rules import left_out, tree_learner
from dse_learning.tree_learning import TreeLimits, learn
from simulators.workloads.model_zoo import option_tree
from simulators.workloads.operators import ShapeList
from studies.ficco import RULE, tree_lines

CHOOSE = ("schedule.name", "schedule.chunk_dim", "schedule.local_shard_first", "schedule.compute")
_DEPTH, _MOST_LEAVES, _FOLDS = 4, 10, 16
_FIXED = ("~space.system", "tracking=none", "store=none", "figures=none", "timeline=false", "fidelity=none")
_HEAD = """# Kind of FiCCO's schedules that is fastest for A[m, k] B[k, n] on 8 x MI300X, A gathered, n split. Learnt:
# `python -m validation.ficco_rule --write` makes this file anew. left_out_accuracy: by leaves, of shapes not seen.
"""


def drawn_shapes() -> list[str]:
    """Names of the drawn all-gathers, without the sixteen shapes of the paper."""
    sixteen = {(shape.m, shape.n, shape.k) for shape in _shapes("ficco")}
    gathers = [shape for shape in _shapes("learning") if shape.pattern in (None, "all_gather")]
    return [shape.name for shape in gathers if (shape.m, shape.n, shape.k) not in sixteen]


def _shapes(workload: str) -> Sequence[Any]:
    return ShapeList.model_validate(option_tree("workload", workload)).listed


def evaluate(names: Sequence[str], folder: Path) -> Cases:
    """Evaluate every kind of schedule on shapes, and gather the contexts. Raises RuntimeError where the study fails."""
    only = f"workload.only=[{','.join(names)}]"
    with contextlib.redirect_stdout(sys.stderr):
        code = dse_main(["study=ficco_rules", *_FIXED, only, "budget.trials=1000", f"output_dir={folder}"])
    if code:
        raise RuntimeError("study=ficco_rules failed")
    run = FinishedRun.find(folder, "ficco_rules")
    return cases(run, ContextQuestion.of(run, "makespan_s", ",".join(CHOOSE))).distinct


def accuracies(contexts: Cases) -> dict[int, float]:
    """Number of leaves -> accuracy on shapes that are left out, in 16 folds of neighbouring names."""
    folds = np.arange(len(contexts.values)) * _FOLDS // len(contexts.values)
    picks = {
        count: left_out(folds, tree_learner(contexts, TreeLimits(_DEPTH, count)), lambda _: None)
        for count in range(2, _MOST_LEAVES + 1)
    }
    return {count: score_picks(contexts, chosen, "tree", "").accuracy for count, chosen in picks.items()}


def fewest_leaves(by_count: Mapping[int, float], shapes: int) -> int:
    """Fewest leaves within one standard error of the best accuracy.

    >>> fewest_leaves({2: 0.5, 3: 0.69, 4: 0.7}, 100)
    3
    """
    best = max(by_count.values())
    error = float(np.sqrt(best * (1 - best) / shapes))
    return min(count for count, accuracy in by_count.items() if accuracy >= best - error)


def rule_of(contexts: Cases) -> dict[str, Any]:
    """The tree of the best size as `rule.yaml` has it."""
    by_count = accuracies(contexts)
    count = fewest_leaves(by_count, len(contexts.values))
    tree = learn(contexts, TreeLimits(_DEPTH, count))
    return {
        "provenance": "derived",
        "source": "learnt by validation.ficco_rule on drawn shapes, from our own times of schedules",
        "shapes": len(contexts.values),
        "left_out_accuracy": {leaves: round(accuracy, 3) for leaves, accuracy in by_count.items()},
        "kinds": sorted(map(kind, contexts.options)),
        "tree": _node(tree.json()["root"]),
    }


def kind(option: Sequence[Any]) -> str:
    """Name of the kind of schedule of an option over `CHOOSE`.

    >>> kind(("chunked", "k", True, "fused")), kind(("serial", None, None, None))
    ('hetero_fused_2d', 'serial')
    """
    name, dimension, first, compute = option
    start, shape = "hetero" if first else "uniform", {"m": "1d", "k": "2d"}.get(dimension)
    return f"{start}_{compute}_{shape}" if name == "chunked" else str(name)


def _node(node: Mapping[str, Any]) -> dict[str, Any]:
    if "option" in node:
        return {"pick": kind(node["option"])}
    sides = {"of": node["feature"]["paths"], "per": node["feature"]["per"]}
    words = {side: [path.rpartition(".")[2] for path in paths] for side, paths in sides.items() if paths}
    return {**words, "at_most": node["at_most"], "then": _node(node["then"]), "else": _node(node["else"])}


def lines(rule: Mapping[str, Any]) -> Iterator[str]:
    """Yield the rule as a person reads it."""
    yield from tree_lines(rule["tree"])
    by_count = ", ".join(f"{count}: {100 * share:.0f} %" for count, share in rule["left_out_accuracy"].items())
    yield f"learnt on {rule['shapes']} shapes; accuracy on shapes left out, by leaves: {by_count}"


def main(words: Sequence[str] | None = None) -> int:
    """Learn and print the rule."""
    parser = argparse.ArgumentParser(prog="python -m validation.ficco_rule", description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"write {RULE.name}")
    asked = parser.parse_args(words)
    with tempfile.TemporaryDirectory(prefix="dse-ficco-") as folder:
        rule = rule_of(evaluate(drawn_shapes(), Path(folder)))
    print("\n".join(lines(rule)))
    if asked.write:
        RULE.write_text(
            _HEAD + yaml.safe_dump(rule, sort_keys=False, width=118, default_flow_style=None), encoding="utf-8"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
