"""Every number that may be an axis of a grid gives along it what each design gives alone, bounds among it."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import math
import pkgutil
from collections.abc import Iterator

import numpy as np
import pytest
from pydantic import BaseModel

import search_spaces
import simulators
from dse.backend import Batch
from dse.config.options import list_options
from dse.space import get_path
from dse.study.plan import Plan
from dse.study.plan_again import plan_words
from dse.values import Frozen, leaves

STUDIES = (
    "ficco_sweep", "nic_placement", "t3", "bert", "fused_ops", "goldyloc", "overlap_measured", "whole_models",
    "dlrm_scaleout", "jitq", "codesign", "comp_vs_comm", "conccl",
)  # fmt: skip
"""One of three in every run."""
PRESENT = [name for name in STUDIES if name in list_options("study")]


def some_designs(planned: Plan, most: int) -> Iterator[BaseModel]:
    """Designs of the first scenario of a study that break no rule, far apart."""
    (space, *_) = planned.spaces.values()
    blocks = itertools.islice(space.blocks(1), 400)
    points = [block.design for block in blocks if block.design is not None]
    legal = [point for point in points if not planned.backend.problems(point)]
    yield from (legal[place] for place in np.unique(np.linspace(0, len(legal) - 1, most).astype(int)))


def axes_of(planned: Plan, point: BaseModel) -> Iterator[tuple[str, np.ndarray]]:
    """Numbers of a design that may be axes, each with its value and a larger one."""
    for path, value, _ in leaves(point):
        if isinstance(value, bool) or not isinstance(value, int | float) or not value or not math.isfinite(value):
            continue
        if get_path(point, path) == value and planned.backend.is_axis(path, point):
            yield path, np.array([value, value + 1 if isinstance(value, int) else 1.02 * value])


def columns(planned: Plan, batch: Batch) -> dict[str, np.ndarray]:
    """Metrics and bounds of designs without a broken rule; the reasons of others."""
    (results,) = planned.backend.evaluate([batch])
    if not results.ok.all():
        return {"reason": np.array(results.texts)[results.reason]}
    metrics = {name: results.column(name) for name in results.metrics}
    return metrics | dict(planned.backend.bound(batch, metrics))


@pytest.mark.nightly
@pytest.mark.parametrize("study", PRESENT)
def test_a_number_gives_along_an_axis_what_each_design_gives_alone(study: str) -> None:
    planned, compared = plan_words([f"study={study}", "tracking=none", "store=none"]), 0
    for point in some_designs(planned, 2):
        for path, values in axes_of(planned, point):
            batch = Batch(Batch(point, {path: values}).at(0), {path: values})
            along = columns(planned, batch)
            for place, design in enumerate(batch.designs()):
                alone = columns(planned, Batch(design))
                if along.keys() == alone.keys() and "reason" not in along:
                    for name, column in alone.items():
                        assert along[name][place] == pytest.approx(column[0], rel=1e-9, abs=1e-15), (path, name)
                    compared += 1
    assert compared > 20


def test_the_marks_of_a_knob_stand_where_they_are_seen() -> None:
    """Outside of a union: `Annotated[Integer, knob(structural=True)] | None` would be no structural field."""
    for package in (simulators, search_spaces):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            with contextlib.suppress(ImportError):  # a script for an interpreter that has SimGrid
                importlib.import_module(module.name)
    kinds, seen = [Frozen], 0
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        for name, field in kind.model_fields.items():
            inner = [part for union in [field.annotation] for part in getattr(union, "__args__", ())]
            hidden = [part for part in inner if any(getattr(mark, "json_schema_extra", None) for mark in marks(part))]
            assert not hidden, f"{kind.__qualname__}.{name}"
            seen += 1
    assert seen > 300


def marks(part: object) -> tuple[object, ...]:
    """Metadata of an annotated type."""
    return getattr(part, "__metadata__", ())
