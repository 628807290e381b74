"""How many points of a search have a result: `python -m benchmarks.valid_shares [--json]`.

Of a choice, three values of four never give a result: their metrics are no numbers, infinite or negative, or the points
are infeasible. A search that learns from this evaluates a valid point more often than even draws do, and the more often
the longer it runs.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np

from dse.backend import Backend, Batch, Metric, Result, Results, Tree, check_results
from dse.errors import validate_as
from dse.search import Outcome, Search, SearchQuestion, explore
from dse.space import Assignment, Knob, Space
from dse.values import Frozen

METHODS = ("tpe", "auto", "random")
_FAULTS: Mapping[str, Callable[[float], Result]] = {
    "nan": lambda time_s: Result("ok", {"time_s": math.nan, "gain": 1.0}),
    "infinite": lambda time_s: Result("ok", {"time_s": math.inf, "gain": 1.0}),
    "negative": lambda time_s: Result("ok", {"time_s": -time_s, "gain": 1.0}),
    "too large": lambda time_s: Result("infeasible", reason="too large"),
    "too small": lambda time_s: Result("infeasible", reason="too small"),
    "too slow": lambda time_s: Result("infeasible", reason="too slow"),
}
KINDS = {"values": ("nan", "infinite", "negative"), "infeasible": ("too large", "too small", "too slow")}
"""Kind of fault -> the values of the choice that have it."""


class _ToyDesign(Frozen):
    size: float
    mode: Literal["plain", "nan", "infinite", "negative", "too large", "too small", "too slow"]


class _Design(Frozen):
    thing: _ToyDesign


class Partial(Backend):
    """A backend that has results for one mode of things alone."""

    version = "1"
    metrics: Mapping[str, Metric] = {"time_s": Metric("s", "time"), "gain": Metric("1/s", "rate", "maximize")}

    def design(self, tree: Tree) -> _Design:
        """Validate a thing."""
        return validate_as(_Design, tree, path="")

    def evaluate(self, batches: Sequence[Batch]) -> list[Results]:
        """Evaluate designs one by one."""
        return [Results.of([self._result(design.thing) for design in batch.designs()]) for batch in batches]  # type: ignore[attr-defined]

    def _result(self, thing: _ToyDesign) -> Result:
        time_s = 1.0 + thing.size
        fault = _FAULTS.get(thing.mode)
        return fault(time_s) if fault else Result("ok", {"time_s": time_s, "gain": 1.0 / time_s})


def validity(method: str, faults: Sequence[str], *, seed: int, trials: int = 100) -> list[bool]:
    """Search; tell of each point, in the order of evaluation, whether it has a result."""
    backend, valid = Partial(), list[bool]()
    knobs = (Knob("thing.size", low=0.1, high=10.0), Knob("thing.mode", ("plain", *faults)))
    space = Space({"thing": {"size": 1.0, "mode": "plain"}}, knobs, {}, backend)

    def evaluate(points: Sequence[Assignment]) -> list[Outcome]:
        batches = [Batch(backend.design(space.tree(point))) for point in points]
        results = [check_results(part, backend.metrics) for part in backend.evaluate(batches)]
        valid.extend(bool(part.ok[0]) for part in results)
        return [part[0].metrics or None for part in results]

    goals = {name: metric.goal for name, metric in backend.metrics.items()}
    explore(SearchQuestion(space, goals, seed, trials, evaluate, repr), Search(name=method))
    return valid


def valid_shares(seeds: int = 8, trials: int = 100) -> dict[str, float]:
    """Share of points with a result, by method, over both kinds of faults and all seeds; of all, and of each half."""
    shares = {}
    for method in METHODS:
        searches = [
            validity(method, faults, seed=seed, trials=trials) for faults in KINDS.values() for seed in range(seeds)
        ]
        first, second = np.split(np.array(searches), [trials // 2], axis=1)
        shares[f"valid_share_{method}"] = float(np.mean(searches))
        shares[f"valid_share_{method}_first_half"] = float(first.mean())
        shares[f"valid_share_{method}_second_half"] = float(second.mean())
    return shares


def main(words: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object with the shares")
    options = parser.parse_args(words)
    shares = valid_shares()
    rows = [f"| {name} | {100 * value:.1f} % |" for name, value in shares.items()]
    print(json.dumps(shares, indent=2) if options.json else "\n".join(["| share | value |", "|---|--:|", *rows]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
