"""Searching: every distinct point once, as many as were asked for, the same ones for the same seed."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import moocore
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from dse import plugins
from dse.backend import STATUSES
from dse.errors import ConfigError
from dse.results.pareto import Answer, Contest, Standings
from dse.search import Limit, Search, SearchQuestion, explore
from dse.space import Assignment, Knob, Points, Space, set_path
from dse.study import warm_start
from dse.study.plan import Plan
from dse.study.run import Findings
from dse.study.run import run as run_study
from dse.values import content_key, keys_to_hex
from tests import swept, toy

METHODS = tuple(name for name in plugins.available("method") if name not in ("gp", "coordinate"))
"""Methods that fill their budget: gp needs torch, coordinate ends by itself (tests/test_coordinate.py)."""
every_method = pytest.mark.parametrize("method", METHODS)


# The space


def some(values: Sequence[Any], most: int = 3) -> st.SearchStrategy[tuple[Any, ...]]:
    """Some of the values, each once, in any order."""
    return st.lists(st.sampled_from(values), min_size=1, max_size=most, unique=True).map(tuple)


@st.composite
def spaces(draw: st.DrawFn, illegal: bool = False) -> Space:
    """Spaces with options, conditions on searched and on fixed siblings, and knobs only one option has.

    illegal: some values are refused by the model.
    """
    pool = {
        "thing.name": some(["plain", "fancy"]),
        "thing.x": some([*range(-5, 6), *([5000, -5000] if illegal else [])], 5),
        "thing.y": some([-1.5, 0.0, 1.0, 2.5, *(["high"] if illegal else [])], 3),
        "thing.mode": some(["flat", "bent"]),
        "thing.bend": some(["firm", "loose"]),
        "thing.trim": some([0, 1, 2], 2),
        "tool.size": some([1, 2, 3]),
    }
    paths = draw(st.lists(st.sampled_from(sorted(pool)), min_size=1, unique=True))
    knobs = [Knob(path, draw(pool[path])) for path in paths]
    thing = {**draw(st.sampled_from([toy.PLAIN, toy.FANCY])), "mode": draw(st.sampled_from(["flat", "bent"]))}
    return toy.space(*knobs, base={**toy.BASE, "thing": thing})


def designs_by_brute_force(space: Space) -> set[str]:
    """Keys of the designs of all combinations of values, put in wherever the section has such a key."""
    keys = set()
    for values in itertools.product(*(knob.values for knob in space.knobs)):
        chosen = dict(zip((knob.path for knob in space.knobs), values, strict=True))
        name = chosen.pop("thing.name", None)
        sections = {**space.base, **({"thing": space.options["thing"][name]} if name else {})}
        tree = {section: dict(values) for section, values in sections.items()}
        for path, value in chosen.items():
            section, _, leaf = path.partition(".")
            if leaf in tree[section]:
                set_path(tree, path, value)
        keys.add(content_key(toy.Fixed().design(tree)))
    return keys


@pytest.mark.slow
@given(spaces())
@hypothesis_settings(max_examples=60)
def test_enumeration_yields_every_distinct_design_exactly_once(space: Space) -> None:
    keys = [content_key(toy.Fixed().design(space.tree(point))) for point in space.points()]
    assert len(keys) == len(set(keys))
    assert set(keys) == designs_by_brute_force(space)


def naive(space: Space) -> list[Assignment]:
    """Every point, knob by knob: what counts is asked of the space, all else is recursion."""

    def expand(point: Assignment, knobs: Sequence[Knob]) -> Iterator[Assignment]:
        if not knobs:
            yield point
        elif space.active({**point, knobs[0].path: knobs[0].values[0]}) == point:
            yield from expand(point, knobs[1:])
        else:
            for value in knobs[0].values:
                yield from expand({**point, knobs[0].path: value}, knobs[1:])

    return list(expand({}, sorted(space.knobs, key=lambda knob: ORDER.index(knob.path))))


ORDER = ("thing.name", "thing.mode", "thing.bend", "thing.grip", "thing.x", "thing.y", "thing.trim", "tool.size")


def unrolled(block: Points) -> list[Assignment]:
    """The points of a block, one by one."""
    columns = {path: block.values_at(path).tolist() for path in block.axes}
    return [{**block.assignment, **{path: columns[path][i] for path in columns}} for i in range(block.size)]


@pytest.mark.slow
@given(spaces(illegal=True), st.integers(1, 50))
@hypothesis_settings(max_examples=100)
def test_blocks_cover_every_point_once_and_hold_its_design_or_the_reason_why_there_is_none(
    space: Space, most: int
) -> None:
    blocks = list(space.blocks(most))
    assert max(block.size for block in blocks) <= most
    block_of = {name_of(point): block for block in blocks for point in unrolled(block)}
    expected = naive(space)
    assert sorted(block_of) == sorted(map(name_of, expected)) == sorted(map(name_of, space.points()))
    assert sum(block.size for block in blocks) == len(expected) == space.size()
    for block in blocks:
        designs = list(block.batch.designs()) if block.batch else [None] * block.size
        for point, design in zip(unrolled(block), designs, strict=True):
            try:
                assert design == toy.Fixed().design(space.tree(point))
            except ConfigError as error:
                assert design is None
                assert set(block.reason.split("; ")) & {str(problem) for problem in error.problems}


@pytest.mark.slow
@given(spaces(illegal=True))
def test_the_keys_of_a_block_are_those_of_its_designs_however_they_are_written(space: Space) -> None:
    blocks = list(space.blocks(10_000))
    for block in blocks:
        keys = [text.decode() for text in keys_to_hex(block.content_keys("toy", "1")).tolist()]
        if block.batch is not None:
            assert keys == [content_key(design, "toy", "1") for design in block.batch.designs()]
        for place, part in enumerate(block.split(1)):
            assert keys_to_hex(part.content_keys("toy", "1")).tolist() == [keys[place].encode()]
    everything = [text for block in blocks for text in keys_to_hex(block.content_keys()).tolist()]
    assert len(set(everything)) == len(everything)


def test_knobs_that_the_backend_takes_as_numbers_are_axes_in_knob_order() -> None:
    space = toy.space(
        Knob("tool.size", (1, 2)),
        Knob("thing.mode", ("flat", "bent")),
        Knob("thing.x", (3, 1)),
        Knob("thing.y", (0, 1)),
    )
    first, second = space.blocks(100)
    assert (first.assignment, second.assignment) == ({"thing.mode": "flat"}, {"thing.mode": "bent"})
    axes = {path: values.tolist() for path, values in first.axes.items()}
    assert axes == {"tool.size": [1, 2], "thing.x": [3, 1], "thing.y": [0.0, 1.0]}
    assert list(axes) == ["tool.size", "thing.x", "thing.y"]
    assert first.axes["thing.y"].dtype == float


@pytest.mark.slow
@given(spaces(), st.data())
def test_a_walk_asks_only_for_knobs_that_count_and_ends_at_a_point_of_the_space(
    space: Space, data: st.DataObject
) -> None:
    paths: list[str] = []

    def choose(knob: Knob) -> Any:
        paths.append(knob.path)
        return data.draw(st.sampled_from(knob.values))

    point = space.walk(choose)
    assert paths == list(point)
    assert point in list(space.points())


@pytest.mark.parametrize("order", list(itertools.permutations(["thing.mode", "thing.bend", "thing.grip"])))
def test_a_knob_that_depends_on_an_idle_knob_does_not_count(order: tuple[str, ...]) -> None:
    values: dict[str, tuple[Any, ...]] = {
        "thing.mode": ("flat", "bent"),
        "thing.bend": ("firm", "loose"),
        "thing.grip": (1, 2, 3),
    }
    space = toy.space(*(Knob(path, values[path]) for path in order))
    keys = [content_key(toy.Fixed().design(space.tree(point))) for point in space.points()]
    assert sorted(keys) == sorted(set(keys))
    assert len(keys) == 1 + 3 + 1  # flat; firm with three grips; loose


# Sampling


@dataclass
class Recorder:
    """Remembers which points were evaluated, in order. fails: points without a result."""

    space: Space
    fails: Callable[[Assignment], bool] = lambda point: False
    points: list[Assignment] = field(default_factory=list)

    def evaluate(self, points: Sequence[Assignment]) -> list[Mapping[str, float] | None]:
        self.points += points
        designs = [toy.Fixed().design(self.space.tree(point)) for point in points]
        return [
            None if self.fails(point) else toy.formula(design) for point, design in zip(points, designs, strict=True)
        ]

    def question(self, trials: int, *metrics: str, seed: int = 0, **more: Any) -> SearchQuestion:
        options = {"evaluate": self.evaluate, "identify": name_of, **more}
        return SearchQuestion(self.space, toy.goals(*metrics), seed, trials, **options)


def name_of(point: Assignment) -> str:
    """A point's identity."""
    return repr(sorted(point.items()))


def searched(
    method: str, trials: int, *, seed: int = 0, space: Space | None = None, **options: Any
) -> list[Assignment]:
    """The points a search evaluated, in order."""
    recorder = Recorder(space or SPACE)
    explore(recorder.question(trials, seed=seed), Search(name=method, batch=8, options=options))
    return recorder.points


SPACE = toy.space(
    Knob("thing.name", ("plain", "fancy")),
    Knob("thing.x", tuple(range(6))),
    Knob("thing.mode", ("flat", "bent")),
    Knob("thing.bend", ("firm", "loose")),
)
INFINITE = toy.space(
    Knob("thing.name", ("plain", "fancy")),
    Knob("thing.x", (3, 1, 2)),
    Knob("thing.y", low=1e-3, high=10.0, log=True),
    Knob("thing.mode", ("flat", "bent")),
    Knob("thing.bend", ("firm", "loose")),
)
SIZE = SPACE.size() or 0


@pytest.mark.more
def test_local_search_around_the_front_proposes_no_point_twice_and_finds_the_front_of_a_large_space() -> None:
    space = toy.space(Knob("thing.x", tuple(range(-200, 201))), Knob("thing.y", tuple(range(-50, 51))))
    recorder = Recorder(space)
    chosen = explore(recorder.question(1000, "time_s", "gain", seed=3), Search(name="archive"))
    assert (chosen.num_points, chosen.duplicates) == (1000, 0)
    goals = recorder.question(1, "time_s", "gain").values
    everything = [toy.formula(toy.Fixed().design(space.tree(point))) for point in space.points()]
    points_of_recorder = [toy.formula(toy.Fixed().design(space.tree(point))) for point in recorder.points]
    worst, best = goals(everything).max(axis=0), goals(everything).min(axis=0)
    share = [
        moocore.hypervolume((goals(points) - best) / (worst - best), ref=[1.1, 1.1])
        for points in (points_of_recorder, everything)
    ]
    assert share[0] > 0.99 * share[1]


def test_a_method_that_lacks_its_library_says_what_to_install() -> None:
    if importlib.util.find_spec("torch") is None:
        with pytest.raises(ConfigError, match=r"needs torch.*overlap-dse\[gp\]"):
            searched("gp", 5)
    else:
        assert len(searched("gp", 5)) == 5


@pytest.mark.slow
@every_method
@pytest.mark.one_in(3)
@pytest.mark.parametrize("trials", [1, 2, 17, SIZE - 1])
def test_a_search_evaluates_exactly_as_many_distinct_points_as_it_may(method: str, trials: int) -> None:
    points = searched(method, trials)
    assert len(points) == trials
    assert len({name_of(point) for point in points}) == trials
    everything = [name_of(point) for point in SPACE.points()]
    assert all(name_of(point) in everything for point in points)


@every_method
def test_an_infinite_space_is_searched_within_its_bounds(method: str) -> None:
    points = searched(method, 25, space=INFINITE)
    assert len({name_of(point) for point in points}) == 25
    assert all(1e-3 <= point["thing.y"] <= 10.0 for point in points)
    assert all(("thing.bend" in point) == (point["thing.mode"] == "bent") for point in points)
    assert len({point["thing.y"] for point in points}) > 12


@pytest.mark.slow
@every_method
@pytest.mark.one_in(2)
@pytest.mark.parametrize("space", [SPACE, INFINITE], ids=["finite", "infinite"])
def test_one_seed_gives_one_sequence_and_another_seed_another(method: str, space: Space) -> None:
    first, again, other = (searched(method, 24, seed=seed, space=space) for seed in (1, 1, 2))
    assert first == again
    assert first != other


@every_method
@pytest.mark.one_in(3)
@pytest.mark.parametrize("fails", [lambda point: point["thing.x"] % 2 == 1, lambda point: True], ids=["half", "all"])
@pytest.mark.parametrize("space", [SPACE, INFINITE], ids=["finite", "infinite"])
def test_points_without_a_result_do_not_stop_a_search(
    method: str, fails: Callable[[Assignment], bool], space: Space
) -> None:
    recorder = Recorder(space, fails)
    explore(recorder.question(20), Search(name=method, batch=8))
    assert len({name_of(point) for point in recorder.points}) == len(recorder.points) == 20


@pytest.mark.slow
@every_method
@pytest.mark.one_in(3)
def test_points_that_break_a_rule_are_never_evaluated_and_every_other_one_is(method: str) -> None:
    recorder = Recorder(toy.space(Knob("thing.x", tuple(range(60))), Knob("thing.y", (0.0, 1.0))))
    question = recorder.question(
        1000, "time_s", "gain", legal=lambda points: [point["thing.x"] % 3 == 0 for point in points]
    )
    chosen = explore(question, Search(name=method, batch=8))
    assert chosen.num_points == len({name_of(point) for point in recorder.points}) == len(recorder.points) == 40
    assert {point["thing.x"] % 3 for point in recorder.points} == {0}


@pytest.mark.slow
@pytest.mark.one_in(3)
@pytest.mark.parametrize("method", [name for name in METHODS if name not in ("random", "qmc")])
def test_a_search_learns_from_outcomes_where_the_limits_are_kept(method: str) -> None:
    space = toy.space(Knob("thing.x", tuple(range(-200, 201))), Knob("thing.y", tuple(range(-50, 51))))

    def kept(name: str, limits: Mapping[str, Limit]) -> int:
        recorder = Recorder(space)
        question = recorder.question(300, "time_s", "gain", seed=2, limits=limits)
        explore(question, Search(name=name, batch=8))
        later = [toy.formula(toy.Fixed().design(space.tree(point))) for point in recorder.points[150:]]
        return sum(outcome["gain"] >= LEAST_GAIN for outcome in later)

    limits = {"gain": Limit(low=LEAST_GAIN)}
    assert kept(method, limits) > 1.5 * kept("random", {})


LEAST_GAIN = 100.0


@given(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6), st.floats(-2e6, 2e6))
def test_a_value_is_beyond_a_limit_just_if_it_is_outside_its_bounds(first: float, other: float, value: float) -> None:
    low, high = sorted((first, other))
    beyond = Limit(low=low, high=high).beyond(np.array([value]))
    assert list(beyond) == ["low", "high"]
    assert (beyond["low"][0] > 0) == (value < low)
    assert (beyond["high"][0] > 0) == (value > high)


@pytest.mark.parametrize(("limit", "message"), [({}, "bounds nothing"), ({"low": 2.0, "high": 1.0}, "is empty")])
def test_a_limit_that_says_nothing_or_allows_nothing_is_refused(limit: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Limit.model_validate(limit)


@every_method
def test_a_search_begins_with_the_points_it_is_given_each_once(method: str) -> None:
    recorder = Recorder(SPACE)
    starts = list(SPACE.points())[5:50:9]
    chosen = explore(recorder.question(20, seed=1), Search(name=method, batch=3), first=[*starts, starts[0]])
    assert recorder.points[: len(starts)] == starts
    assert chosen.num_points == len({name_of(point) for point in recorder.points}) == 20


@every_method
@pytest.mark.parametrize("trials", [4, 8, 15])
def test_two_ways_to_write_one_design_are_evaluated_once(method: str, trials: int) -> None:
    recorder = Recorder(toy.space(Knob("thing.x", tuple(range(20)))))

    def identify(point: Assignment) -> str:
        return str(point["thing.x"] // 2)  # ten designs, each written in two ways

    chosen = explore(recorder.question(trials, identify=identify), Search(name=method, batch=4))
    names = [identify(point) for point in recorder.points]
    assert len(names) == len(set(names)) == chosen.num_points == min(trials, 10)


@every_method
def test_an_unknown_option_of_a_sampler_is_refused_by_name(method: str) -> None:
    with pytest.raises(ConfigError) as caught:
        searched(method, 5, nonsense=3)
    assert "search.options" in toy.refused(caught.value)
    assert "nonsense" in toy.refused(caught.value)


@pytest.mark.parametrize(("name", "meant"), [("ranom", "random"), ("exhaustve", "exhaustive")])
def test_an_unknown_method_is_refused_with_the_nearest_one(name: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean `{meant}`"):
        searched(name, 5)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["tpe", "nsga2"])
def test_a_guided_search_finds_better_points_than_chance(method: str) -> None:
    space = toy.space(Knob("thing.x", tuple(range(-200, 201))), Knob("thing.y", low=-100.0, high=100.0))

    def best(name: str) -> float:
        recorder = Recorder(space)
        explore(recorder.question(160, "time_s", seed=5), Search(name=name, batch=8))
        return min(float(toy.formula(toy.Fixed().design(space.tree(point)))["time_s"]) for point in recorder.points)

    assert best(method) < best("random")


class Twice:
    """A method that proposes every point twice, and notes what it is told of them."""

    def __init__(self, question: SearchQuestion, options: Mapping[str, Any]) -> None:
        self.points, self.outcomes = question.space.points(), list[tuple[Assignment, Any]]()
        TWICE.append(self)

    def ask(self, count: int) -> list[Assignment]:
        return [dict(point) for point in itertools.islice(self.points, count) for _ in range(2)]

    def tell(self, points: Sequence[Assignment], outcomes: Sequence[Any]) -> None:
        self.outcomes += zip(points, outcomes, strict=True)


TWICE: list[Twice] = []


# Fronts and winners

ANY_ROW = Contest(Answer(baseline_may_win=True))

ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "scenario": st.sampled_from(["left", "right"]),
            "status": st.sampled_from(["ok", "ok", "ok", "failed", "infeasible", "invalid", "unsupported"]),
            "a": st.integers(0, 4).map(float),
            "b": st.integers(0, 4).map(float),
            "c": st.integers(0, 2).map(float),
        }
    ),
    min_size=1,
    max_size=25,
)
GOALS = st.dictionaries(st.sampled_from(["a", "b", "c"]), st.sampled_from(["minimize", "maximize"]), min_size=1)


def table_of(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Rows as a study's table: no metrics where there is no result."""
    table = pd.DataFrame(rows)
    table.loc[table["status"] != "ok", ["a", "b", "c"]] = float("nan")
    return table


def batch_of(table: pd.DataFrame) -> pa.RecordBatch:
    """The same as a batch of the table that is being written."""
    coded: dict[str, list[str]] = {"scenario": ["left", "right"], "status": list(STATUSES)}
    columns = {
        name: pa.DictionaryArray.from_arrays(pa.array([names.index(text) for text in table[name]], pa.int32()), names)
        for name, names in coded.items()
    }
    return pa.RecordBatch.from_pydict({**columns, **{name: table[name].to_numpy() for name in "abc"}})


def signed(row: Mapping[str, Any], goals: Mapping[str, str]) -> tuple[float, ...]:
    """Metrics such that smaller is better."""
    return tuple(row[name] if goal == "minimize" else -row[name] for name, goal in goals.items())


@pytest.mark.slow
@given(ROWS, GOALS, st.integers(1, 30))
def test_the_front_is_each_outcome_that_no_other_of_the_scenario_dominates_however_the_rows_come(
    rows: list[dict[str, Any]], goals: dict[str, str], chunk: int
) -> None:
    def dominated(row: Mapping[str, Any]) -> bool:
        rivals = [rival for rival in rows if rival["status"] == "ok" and rival["scenario"] == row["scenario"]]
        mine = signed(row, goals)
        figures = [signed(rival, goals) for rival in rivals]
        return any(all(a <= b for a, b in zip(theirs, mine, strict=True)) and theirs != mine for theirs in figures)

    leads = [row["status"] == "ok" and not dominated(row) for row in rows]
    outcomes = [(row["scenario"], row["a"], row["b"], row["c"]) for row in rows]
    expected = [
        lead and outcome not in itertools.compress(outcomes[:place], leads)
        for place, (lead, outcome) in enumerate(zip(leads, outcomes, strict=True))
    ]
    standings, batch = Standings(goals, 2, ("a", "b", "c")), batch_of(table_of(rows))
    for first in range(0, len(rows), chunk):
        standings.take(batch.slice(first, chunk))
    assert standings.marks(batch).tolist() == expected


# Whole studies of the toy

KNOBS = (
    Knob("thing.name", ("plain", "fancy")),
    Knob("thing.x", tuple(range(12))),
    Knob("thing.mode", ("flat", "bent")),
)


def studied(plan: Plan, folder: Path) -> tuple[pd.DataFrame, Findings]:
    """Run a study; its table and what else was found."""
    findings = run_study(plan, folder / "results.parquet")
    return pd.read_parquet(folder / "results.parquet"), findings


@pytest.fixture
def installed(tmp_path: Path) -> Iterator[None]:
    with toy.installed(tmp_path):
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("installed")
@every_method
@pytest.mark.one_in(3)
def test_bad_points_are_rows_with_a_reason_and_the_study_goes_on(method: str, tmp_path: Path) -> None:
    knobs = (Knob("thing.x", (*range(40), 950)), Knob("thing.mode", ("flat", "bent")))
    faults = [(4, "raises"), (5, "nan"), (6, "no gain"), (7, "unsupported")]
    plan = toy.planned(knobs, toy.settings(method, 80), faults)
    table = studied(plan, tmp_path)[0]
    statuses = {4: "failed", 5: "invalid", 6: "invalid", 7: "unsupported"}
    assert sorted(set(table["thing.x"])) == list(range(40))  # 950 breaks a rule: it is never evaluated
    expected = table["thing.x"].map(statuses).fillna("ok")
    assert table["status"].tolist() == expected.tolist()
    bad = table[table["status"] != "ok"]
    assert set(bad["status"]) == set(statuses.values())
    assert (bad["reason"] != "").all()
    assert not bad["on_front"].any()
    assert bad[["time_s", "gain", "ratio"]].isna().all(axis=None)
    assert table.loc[table["status"] == "ok", ["time_s", "gain", "ratio"]].notna().all(axis=None)


@pytest.mark.usefixtures("installed")
@every_method
@pytest.mark.one_in(4)
def test_the_budget_holds_for_every_scenario_and_baselines_come_on_top(method: str, tmp_path: Path) -> None:
    table, findings = studied(toy.planned(KNOBS, toy.settings(method, 20)), tmp_path)
    assert {name: chosen.num_points for name, chosen in findings.chosen.items()} == {"light": 20, "heavy": 20}
    for _, rows in table.groupby("scenario"):
        assert rows["key"].is_unique
        assert len(rows[rows["thing.x"] != 0]) <= 20 <= len(rows)
        assert set(rows["baseline"]) <= set(rows.loc[rows["thing.x"] == 0, "key"])


@pytest.mark.usefixtures("installed")
@every_method
@pytest.mark.one_in(4)
def test_a_sampled_study_evaluates_no_design_twice_and_every_row_once(method: str, tmp_path: Path) -> None:
    plan = toy.planned(KNOBS, toy.settings(method, 25))
    assert isinstance(plan.backend, toy.Fixed)
    before = len(plan.backend.evaluated)
    table, _ = studied(plan, tmp_path)
    keys = [content_key(design, *plan.context.words) for design in plan.backend.evaluated[before:]]
    assert len(keys) == len(set(keys))
    assert sorted(keys) == sorted(table["key"])


@pytest.mark.usefixtures("installed")
def test_the_table_depends_on_the_seed_alone(tmp_path: Path) -> None:
    first, again, other = (
        studied(toy.planned(KNOBS, toy.settings("nsga2", 20, seed=seed)), tmp_path)[0] for seed in (7, 7, 8)
    )
    pd.testing.assert_frame_equal(first, again)
    assert set(first["key"]) != set(other["key"])


@pytest.mark.slow
@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("trials", [30, 1000], ids=["searched", "enumerated"])
def test_rows_beyond_a_limit_are_infeasible_in_this_table_and_never_lead(trials: int, tmp_path: Path) -> None:
    tree = toy.settings("auto", trials)
    tree["study"]["limits"] = {"time_s": {"high": 20.0}, "gain": {"low": 2.0}}
    table = studied(toy.planned(KNOBS, tree), tmp_path)[0]
    beyond = (table["time_s"] > 20.0) | (table["gain"] < 2.0)
    assert 0 < beyond.sum() < len(table)
    assert table["status"].tolist() == np.where(beyond, "infeasible", "ok").tolist()
    assert set(table.loc[table["gain"] < 2.0, "reason"]) == {"gain is below study.limits.gain.low = 2"}
    assert not (table["on_front"] & beyond).any()
    assert (ANY_ROW.winners(table, toy.goals("time_s", "gain"))["time_s"] <= 20.0).all()
    assert table[["time_s", "gain", "ratio"]].notna().all(axis=None)


@pytest.mark.usefixtures("installed")
def test_a_limit_on_what_is_no_metric_is_refused_with_the_nearest_one(tmp_path: Path) -> None:
    tree = toy.settings("auto", 30)
    tree["study"]["limits"] = {"time": {"high": 1.0}}
    with pytest.raises(ConfigError, match="did you mean `time_s`"):
        toy.planned(KNOBS, tree)


@pytest.mark.usefixtures("installed")
def test_a_warm_start_evaluates_the_fronts_of_earlier_runs_first(tmp_path: Path) -> None:
    rows = pd.DataFrame(
        [
            {"scenario": "light", "thing.name": "plain", "thing.x": 7, "thing.mode": "bent", "on_front": True},
            {"scenario": "light", "thing.name": "plain", "thing.x": 8, "thing.mode": "bent", "on_front": False},
            {"scenario": "light", "thing.name": "fancy", "thing.x": 99, "thing.mode": "bent", "on_front": True},
            {"scenario": "other", "thing.name": "fancy", "thing.x": 2, "thing.mode": "flat", "on_front": True},
        ]
    ).assign(key="0", baseline="1", status="ok", reason="", engine="test")
    run = swept.written(tmp_path / "earlier", rows, [knob.path for knob in KNOBS], config={"thing": toy.PLAIN})
    tree = toy.settings("random", 10)
    tree["search"]["warm_start"] = [str(run)]
    plan = toy.planned(KNOBS, tree)
    light, heavy = (warm_start.points(plan, name) for name in plan.spaces)
    assert light == [{"thing.name": "plain", "thing.x": 7, "thing.mode": "bent"}]  # x = 99 is outside the space
    assert heavy == [light[0], {"thing.name": "fancy", "thing.x": 2, "thing.mode": "flat"}]  # of all scenarios
    table = studied(plan, tmp_path)[0]
    explored = table[(table["scenario"] == "heavy") & (table["thing.x"] != 0)]
    assert explored["thing.x"].tolist()[:2] == [7, 2]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("source", "message"),
    [("toy", "must name one run"), ("toy/2020-01-01_00-00-00", "is the folder of no finished run")],
)
def test_a_warm_start_from_what_is_no_finished_run_is_refused(source: str, message: str) -> None:
    tree = toy.settings("random", 10)
    tree["search"]["warm_start"] = [source]
    with pytest.raises(ConfigError, match=message):
        toy.planned(KNOBS, tree)
