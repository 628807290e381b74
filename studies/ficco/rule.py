"""A rule that picks a kind of schedule from the static sizes of a GEMM and its all-gather, learnt on drawn shapes.

`rule.yaml` has the tree, with what it was learnt on: `python -m validation.ficco_rule --write` learns it anew, without
any of the paper's sixteen shapes. A node compares a product or ratio of sizes with a threshold, a leaf names a kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dse.config.yaml_checks import load_yaml
from dse.results.claims import ClaimResult

if TYPE_CHECKING:
    import pandas as pd

RULE = Path(__file__).with_name("rule.yaml")
TIE, NEAR = 1e-9, 0.02
"""Shares by which a makespan may be longer than the best one and still be the best, or near it."""
Node = Mapping[str, Any]


@cache
def learnt_rule() -> Mapping[str, Any]:
    """Contents of `rule.yaml`."""
    rule: Mapping[str, Any] = load_yaml(RULE)
    return rule


def pick(sizes: Mapping[str, float], node: Node | None = None) -> str:
    """Kind of schedule for m, n and k of a GEMM whose A is gathered.

    >>> pick({"m": 8192, "n": 8192, "k": 262144}).endswith("2d")
    True
    """
    node = learnt_rule()["tree"] if node is None else node
    if "pick" in node:
        return str(node["pick"])
    value = prod(sizes[name] for name in node["of"]) / prod(sizes[name] for name in node.get("per", ()))
    return pick(sizes, node["then"] if value <= node["at_most"] else node["else"])


def tree_lines(node: Node, depth: int = 0) -> Iterator[str]:
    """Yield the lines of a tree as nested conditions."""
    pad = "    " * depth
    if "pick" in node:
        yield f"{pad}{node['pick']}"
        return
    below = [" * ".join(node[side]) for side in ("of", "per") if node.get(side)]
    yield f"{pad}if {' / '.join(below)} <= {node['at_most']:g}:"
    yield from tree_lines(node["then"], depth + 1)
    yield f"{pad}else:"
    yield from tree_lines(node["else"], depth + 1)


def judge_rule(ok: pd.DataFrame, size: str) -> ClaimResult:
    """Share of shapes of which the rule picks the fastest kind, each kind at its best settings, in percent.

    ok: points on one topology, `schedule.name` their kind. size: path of the sizes, without their last word.
    """
    sizes = {name: f"{size}.{name}" for name in ("m", "n", "k")}
    least = ok.groupby(["scenario", *sizes.values(), "schedule.name"], sort=False)["makespan_s"].min().unstack()
    several = any(ok[column].nunique() > 1 for column in map(str, ok) if column.startswith("system."))
    if len(least) < 2 or several or not set(learnt_rule()["kinds"]) <= set(least):
        return ClaimResult(None, "needs all kinds of schedules, several scenarios and one machine: study=ficco")
    picks = [pick(dict(zip(sizes, place[1:], strict=True))) for place in least.index]
    times = least.to_numpy()[np.arange(len(least)), [list(least).index(kind) for kind in picks]]
    longer = np.nan_to_num(times / least.min(axis=1).to_numpy() - 1, nan=np.inf)  # a kind that has no point
    right, near = (100 * float((longer <= most).mean()) for most in (TIE, NEAR))
    wrong = [place[0] for place, share in zip(least.index, longer, strict=True) if share > TIE]
    text = f"a tree learnt on {learnt_rule()['shapes']} drawn shapes, judged on {len(least)} others; within 2 % of the "
    text += f"best in {near:.0f} %, at most {100 * longer.max():.1f} % longer"
    cause = f"wrong for {', '.join(wrong)}: kinds of nearly the same time; the paper chooses among fewer"
    return ClaimResult(right, text, cause)
