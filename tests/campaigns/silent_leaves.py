"""Typed numbers of hardware that change nothing and are neither refused nor reported, over machines and studies."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dse.backend import Batch
from dse.config.compose import Request, request
from dse.errors import ConfigError
from dse.space import get_path
from dse.study.influence import check_typed, number_leaves, with_value
from dse.study.plan import Plan, plan

CONF = Path(__file__).resolve().parents[2] / "conf"


def silent_leaves(draws: int = 200, seed: int = 0) -> list[str]:
    """`study, system: path` of drawn numbers that are typed a tenth higher, change nothing, and are not reported."""
    draw, silent = random.Random(seed), list[str]()
    settings = list(_settings())
    for _ in range(draws):
        study, system = draw.choice(settings)
        studied = _request(study, system)
        leaves = [] if studied is None else list(number_leaves(studied[0].tree["system"], "system"))
        if studied is not None and leaves:
            path, _ = draw.choice(leaves)
            silent += [f"{study}, {system}: {path}"] if _is_silent(*studied, path) else []
    return silent


def _settings() -> Iterator[tuple[str, str]]:
    """Yield (study, system): each study on its own machine, and on every other one."""
    systems = sorted(path.stem for path in (CONF / "system").glob("*.yaml"))
    for study in sorted(path.stem for path in (CONF / "study").glob("*.yaml")):
        yield from ((study, system) for system in ("", *systems))


@functools.cache
def _request(study: str, system: str) -> tuple[Request, Mapping[str, Any]] | None:
    """The study on a machine, with the metrics of its base designs; None where it is refused, or has no machine."""
    plan_request = request([f"study={study}", *([f"system={system}"] if system else [])])
    if not isinstance(plan_request.tree.get("system"), dict):
        return None
    try:
        return plan_request, _outcomes(plan(plan_request))
    except ConfigError:
        return None


def _is_silent(plan_request: Request, outcomes: Mapping[str, Any], path: str) -> bool:
    """Tell whether nothing is reported of a number that is typed a tenth higher and changes no base design."""
    higher = with_value(plan_request.tree, path, 1.1)
    changed = replace(
        plan_request, tree=higher, overrides=(*plan_request.overrides, f"{path}={get_path(higher, path)}")
    )
    try:
        planned = plan(changed)
        notes = check_typed(planned)
    except ConfigError:
        return False
    return not any(note.startswith(f"{path} ") for note in notes) and _outcomes(planned) == outcomes


def _outcomes(planned: Plan) -> Mapping[str, Any]:
    """Metrics of the base designs by scenario; the objectives among them decide what counts."""
    backend = planned.backend
    batches = {name: Batch(backend.design(space.base)) for name, space in planned.spaces.items()}
    results = backend.evaluate(list(batches.values()))
    return {
        name: {metric: column.tolist() for metric, column in part.metrics.items()}
        for name, part in zip(batches, results, strict=True)
    }


if __name__ == "__main__":
    paths = silent_leaves()
    print(f"silent_leaves {len(paths)}", *paths, sep="\n")
