"""Coordinate search: it finds the optimum of a sum in two sweeps, respects conditions, and ends by itself."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dse.config.compose import request
from dse.errors import ConfigError
from dse.search import Chosen, Search, SearchQuestion, explore
from dse.space import Assignment, Knob, Space
from dse.study.influence import check_typed
from dse.study.plan import plan
from tests.toy import Fixed

COORDINATE = Search(name="coordinate", batch=512, rounds=1)


class Conditional(Fixed):
    """A toy whose knobs called `b...` count only where `a` is 1."""

    def condition(self, path: str, tree: Mapping[str, Any]) -> Mapping[str, Any] | None:
        return {"point.a": 1} if path.startswith("point.b") else {}


class Known(Fixed):
    """A toy that knows which knobs it has."""

    def condition(self, path: str, tree: Mapping[str, Any]) -> Mapping[str, Any] | None:
        return {} if path in ("point.a", "point.b") else None


class Free(Fixed):
    """A toy whose knobs always count."""

    def condition(self, path: str, tree: Mapping[str, Any]) -> Mapping[str, Any] | None:
        return {}


def search(
    knobs: Sequence[Knob],
    cost: Callable[[Assignment], float | None],
    backend: Fixed | None = None,
    options: Mapping[str, Any] | None = None,
) -> tuple[Chosen, dict[str, float]]:
    """The search, and the cost of every point that it had evaluated. options: of the method."""
    space = Space({"point": {knob.path.partition(".")[2]: 0 for knob in knobs}}, tuple(knobs), {}, backend or Free())
    met: dict[str, float] = {}

    def evaluate(points: Sequence[Assignment]) -> list[dict[str, float]]:
        for point in points:
            met[repr(sorted(point.items()))] = float(cost(point) or 0.0)
        return [{"cost": float(cost(point) or 0.0)} for point in points]

    question = SearchQuestion(
        space,
        {"cost": "minimize"},
        seed=0,
        trials=100_000,
        evaluate=evaluate,
        identify=lambda point: repr(sorted(point.items())),
        legal=lambda points: [cost(point) is not None for point in points],
    )
    return explore(question, COORDINATE.model_copy(update={"options": dict(options or {})})), met


def knob(name: str, count: int) -> Knob:
    return Knob(f"point.{name}", tuple(range(count)))


@given(st.lists(st.lists(st.integers(0, 1000), min_size=2, max_size=6), min_size=1, max_size=5))
def test_the_optimum_of_a_sum_is_found_and_few_points_are_evaluated(costs: list[list[int]]) -> None:
    knobs = [knob(f"k{place}", len(values)) for place, values in enumerate(costs)]
    _, met = search(
        knobs, lambda point: float(sum(values[point[k.path]] for k, values in zip(knobs, costs, strict=True)))
    )
    assert min(met.values()) == sum(map(min, costs))
    assert len(met) <= 2 + 3 * sum(len(values) - 1 for values in costs)


@given(st.randoms(use_true_random=False))
def test_what_is_found_is_improved_by_no_change_of_one_knob(random: Random) -> None:
    knobs = [knob(name, 3) for name in ("x", "y", "z")]
    table: dict[str, float] = {}

    def cost(point: Assignment) -> float:
        name = repr(sorted(point.items()))
        table.setdefault(name, random.random())
        return table[name]

    _, met = search(knobs, cost)
    best = min(met, key=lambda name: met[name])
    point = dict(ast.literal_eval(best))
    neighbours = [{**point, k.path: value} for k in knobs for value in k.values]
    assert all(cost(other) >= met[best] for other in neighbours)


def test_knobs_that_decide_which_others_count_are_tried_with_these() -> None:
    """Alone `a` = 1 costs more; with the best `b` it costs least."""
    knobs = [knob("a", 2), knob("b1", 4), knob("b2", 4), knob("c", 3)]

    def cost(point: Assignment) -> float:
        gain = point.get("point.b1", 0) + point.get("point.b2", 0)
        return float(10 + 4 * point["point.a"] - gain - point["point.c"])

    _, met = search(knobs, cost, Conditional())
    assert min(met.values()) == 10 + 4 - 6 - 2
    assert all(("point.b1" in name) == ("('point.a', 1)" in name) for name in met)


def test_an_interval_is_refused_with_a_way_out() -> None:
    with pytest.raises(ConfigError) as caught:
        search([Knob("point.x", low=0.0, high=1.0)], lambda point: 0.0)
    assert "space.point.x: is an interval, which has no values to try (list values" in str(caught.value)


@given(st.integers(0, 3), st.integers(0, 3))
def test_knobs_that_rules_tie_to_each_other_are_changed_at_once(tied: int, free: int) -> None:
    """`a`, `b` and `c` have one value or the point breaks a rule; no change of one of them is possible."""
    knobs = [knob(name, 4) for name in ("a", "b", "c", "d")]

    def cost(point: Assignment) -> float | None:
        values = {point[f"point.{name}"] for name in ("a", "b", "c")}
        return None if len(values) > 1 else float(abs(values.pop() - tied) + abs(point["point.d"] - free) + 1)

    together = {"together": (("point.a", "point.b", "point.c"), ("point.d", "point.is_not_searched"))}
    _, met = search(knobs, cost, options=together)
    assert min(met.values()) == 1
    assert len(met) <= 4 * 4
    _, met = search(knobs, cost)
    assert min(met.values()) == 1 + tied


def test_a_misspelt_path_beside_a_searched_one_is_refused() -> None:
    knobs = [knob("a", 2), knob("b", 2)]
    with pytest.raises(ConfigError, match=r"names point\.bb, which is no knob here"):
        search(knobs, lambda point: 1.0, Known(), {"together": (("point.a", "point.bb"),)})
    _, met = search(knobs, lambda point: 1.0, Known(), {"together": (("other.a", "other.b"),)})
    assert met


@pytest.mark.parametrize(
    ("entries", "unknown"),
    [
        ("[[schedule.nonsense,schedule.other]]", ["schedule.nonsense", "schedule.other"]),
        ("[[sites.ffn_in,sites.ffn_out],[schedule.num_chunks,schedule.comm_cus]]", ["sites.ffn_in", "sites.ffn_out"]),
        ("[[schedule.num_chunks,schedule.comm_cus]]", []),  # of some schedules alone
        (None, []),  # the shipped list has sites, which are of another backend
    ],
)
def test_a_typed_entry_of_paths_that_are_no_knobs_is_refused(entries: str | None, unknown: list[str]) -> None:
    typed = [] if entries is None else [f"search.options.together={entries}"]
    planned = plan(request(["study=ficco_sweep", "search=coordinate", "fidelity=none", "workload.only=[g4]", *typed]))
    if not unknown:
        assert not [note for note in check_typed(planned) if "together" in note]
        return
    with pytest.raises(ConfigError) as caught:
        check_typed(planned)
    assert [problem.path for problem in caught.value.problems] == ["search.options.together"] * len(unknown)
    assert all(name in problem.rule for name, problem in zip(unknown, caught.value.problems, strict=True))
