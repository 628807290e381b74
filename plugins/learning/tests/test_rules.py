"""Learned rules, on tables where it is known which option is best, and for whom."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dse.analysis.contexts import Cases, ContextQuestion, Option, cases
from dse.cli import main
from dse.results.run_folder import FinishedRun, Outputs
from dse_learning.decision_tree import Feature, Leaf, Node, Split, Tree
from dse_learning.rules import folds, left_out, score_fixed_options, score_tree
from dse_learning.tree_learning import TreeLimits, features, learn
from tests.swept import Row, grid, written

SIZES: dict[str, Row] = {
    f"w{m}x{k}": {"load.m": m, "load.k": k} for m in (10, 20, 40, 80, 160) for k in (15, 30, 60, 120)
}
KNOBS = {"plan.name": ["fast", "wide", "never"], "plan.pieces": [1, 2], "system.cores": [4, 8]}


def ratio_decides(point: Row) -> Row:
    """`fast` is best where k is less than m, `wide` elsewhere; the right number of pieces halves the time."""
    good = {"fast": point["load.k"] < point["load.m"], "wide": point["load.k"] >= point["load.m"], "never": False}
    slow = 1.0 if good[point["plan.name"]] else 1.5 + 0.5 * (point["plan.name"] == "never")
    return {"time_s": slow * point["plan.pieces"] * point["load.m"] / point["system.cores"], "held_bytes": 1.0}


RECORDED = ["load.m", "load.k"]


def run(root: Path, formula: Any = ratio_decides, *, scenarios: Any = SIZES, knobs: Any = KNOBS, **about: Any) -> Path:
    """The folder of a run over all options, workloads and systems."""
    about = {"recorded": RECORDED, "hardware": ["system"], **about}
    return written(root, grid(scenarios, knobs, formula), list(knobs), **about)


def learned(root: Path, formula: Any = ratio_decides, choose: str = "", **about: Any) -> Cases:
    """What there is to learn from it."""
    finished_run = FinishedRun(run(root, formula, **about))
    return cases(finished_run, ContextQuestion.of(finished_run, choose=choose))


# What is learned from


def test_a_context_is_a_workload_on_a_system_and_an_option_is_as_good_as_its_best_setting(tmp_path: Path) -> None:
    contexts = learned(tmp_path)
    assert contexts.choose == ("plan.name",)
    assert contexts.options == (("fast",), ("wide",), ("never",))
    assert contexts.values.shape == (len(SIZES) * 2, 3)
    assert (len(np.unique(contexts.workloads)), len(np.unique(contexts.systems))) == (len(SIZES), 2)
    assert contexts.regrets.min() == 0
    assert set(np.round(contexts.regrets, 9).ravel()) == {0.0, 0.5, 1.0}
    assert contexts.best.sum(axis=1).tolist() == [1] * len(contexts.values)
    assert list(contexts.inputs) == ["load.m", "load.k", "system.cores"]


def test_what_is_picked_or_tuned_is_never_looked_at(tmp_path: Path) -> None:
    contexts = learned(tmp_path, choose="plan.name", recorded=[*RECORDED, "plan.pieces", "plan.name"])
    assert {path for feature in features(contexts.inputs) for path in feature.inputs} == {*RECORDED, "system.cores"}


def test_ties_within_a_billionth_are_ties_and_go_to_what_is_best_most_often(tmp_path: Path) -> None:
    def tied(point: Row) -> Row:
        better = point["load.m"] > 100 and point["plan.name"] == "wide"
        slow = {"fast": 1.0, "wide": 0.5 if better else 1 + 1e-11, "never": 2.0}[point["plan.name"]]
        return {"time_s": slow, "held_bytes": 1.0}

    contexts = learned(tmp_path, tied)
    assert learn(contexts, TreeLimits(1)).root == Leaf(("wide",), len(contexts.values), 0.0, 0.0)
    assert contexts.best[:, 0].sum() == 32


# Learning and judging


def test_a_ratio_of_sizes_is_found_and_holds_for_workloads_never_seen(tmp_path: Path) -> None:
    contexts = learned(tmp_path)
    tree = learn(contexts, TreeLimits(3))
    assert isinstance(tree.root, Split)
    assert tree.root.feature == Feature(("load.k",), ("load.m",))
    scores, notes = score_tree(contexts, tree, TreeLimits(3))
    unseen = [fold_score for fold_score in scores if fold_score.name == "tree" and fold_score.seen.startswith("leave")]
    assert [fold_score.seen for fold_score in unseen] == ["leave one workload out", "leave one system out"]
    assert [(fold_score.accuracy, fold_score.most) for fold_score in unseen] == [(1.0, 0.0)] * 2
    assert notes == []
    always = {option_score.name: option_score for option_score in score_fixed_options(contexts)}
    assert set(always) == {"always fast", "always wide", "always never"}
    assert min(option_score.mean for option_score in always.values()) > 0.1


def lost(tree: Tree, contexts: Cases) -> float:
    """What a tree's picks lose over all contexts."""
    place = {option: index for index, option in enumerate(contexts.options)}
    picks = [place[option] for option in tree.picks(contexts.inputs, len(contexts.values))]
    return float(contexts.regrets[np.arange(len(picks)), picks].sum())


def drawn(seed: int, contexts: int, options: int = 3) -> Cases:
    """Contexts with two numbers and options of any worth."""
    random = np.random.default_rng(seed)
    inputs = {name: random.integers(1, 6, contexts).astype(float) for name in ("load.m", "other.k")}
    names = tuple((f"o{place}",) for place in range(options))
    groups = np.arange(contexts)
    return Cases(("way",), names, random.uniform(1, 1.2, (contexts, options)), inputs, groups, groups)


@given(st.integers(0, 10_000), st.integers(2, 9))
def test_one_split_is_the_best_there_is(seed: int, contexts: int) -> None:
    table = drawn(seed, contexts)
    losses = table.regrets
    every = [losses.sum(axis=0).min()]
    for feature_ in features(table.inputs):
        column = feature_.of(table.inputs)
        for low in np.unique(column)[:-1]:
            every.append(losses[column <= low].sum(axis=0).min() + losses[column > low].sum(axis=0).min())
    assert lost(learn(table, TreeLimits(1)), table) == pytest.approx(min(every), abs=1e-8)


@pytest.mark.slow
@given(st.integers(0, 10_000), st.integers(2, 6))
def test_a_tree_has_no_more_leaves_than_asked_for_and_never_loses_more_than_one_pick(seed: int, leaves: int) -> None:
    table = drawn(seed, 40)
    few, large = (learn(table, TreeLimits(6, number)) for number in (leaves, 4 * leaves))
    assert sum(isinstance(node, Leaf) for node in few.nodes) <= leaves
    assert lost(few, table) <= table.regrets.sum(axis=0).min() + 1e-8
    assert lost(large, table) <= table.regrets.sum(axis=0).min() + 1e-8


def test_a_fold_never_learns_from_what_it_is_judged_on(tmp_path: Path) -> None:
    contexts = learned(tmp_path)
    questions = []

    def spy(rows: Any) -> Any:
        def picks(left: Any) -> Any:
            questions.append((set(contexts.workloads[rows]), set(contexts.workloads[left])))
            return np.zeros(len(left), int)

        return picks

    left_out(contexts.workloads, spy)
    assert len(questions) == len(SIZES)
    assert all(not (seen & judged_on) and len(judged_on) == 1 for seen, judged_on in questions)


def test_one_system_cannot_be_left_out_and_that_is_said(tmp_path: Path) -> None:
    contexts = learned(tmp_path, knobs={**KNOBS, "system.cores": [4]})
    possible, notes = folds(contexts)
    assert [name for name, _ in possible] == ["leave one workload out"]
    assert "leave one system out is not available" in notes[0]


# Telling


values_ = st.floats(0.001, 1e9)
PATHS = ("load.m", "load.k", "other.k", "system.class")


def feature() -> st.SearchStrategy[Feature]:
    """Any feature over three numbers and a text."""
    two = st.permutations(PATHS[:3]).map(lambda paths: tuple(paths[:2]))
    return st.one_of(
        st.sampled_from(PATHS[:3]).map(lambda path: Feature((path,))),
        two.map(lambda paths: Feature(paths[:1], paths[1:])),
        two.map(Feature),
        two.map(lambda paths: Feature((PATHS[0],), paths)),
        two.map(lambda paths: Feature(paths, paths[::-1])),
        st.sampled_from(["ring", 'it\'s "odd"', "mesh"]).map(lambda text: Feature((PATHS[3],), text=text)),
    )


def split(feature_: Feature, threshold: float, below: Node, above: Node) -> Node:
    """A split; a text has no threshold but a half."""
    return Split(feature_, threshold if feature_.text is None else 0.5, below, above)


option = st.tuples(st.sampled_from(["a", "b\\n", "c"]), st.none() | st.integers(1, 9))
leaf: st.SearchStrategy[Node] = option.map(lambda value: Leaf(value, 1, 0.01, 0.02))
nodes = st.recursive(leaf, lambda below: st.builds(split, feature(), values_, below, below), max_leaves=8)
trees = nodes.map(lambda node: Tree(("plan.name", "plan.pieces"), node))
inputs = st.fixed_dictionaries(dict.fromkeys(PATHS[:3], values_) | {PATHS[3]: st.sampled_from(["ring", "mesh", "x"])})


def by_python(tree: Tree, given_: Mapping[str, Any]) -> Option:
    """What the generated function says."""
    space: dict[str, Any] = {"__builtins__": {"float": float}}
    exec(tree.python('About "quotes""" and \\ signs'), space)
    answer = space["choose"](**{name: given_[path] for path, name in tree.names.items()})
    return tuple(answer[path] for path in tree.choose)


def by_text(tree: Tree, given_: Mapping[str, Any]) -> str:
    """The line that a person who reads the text from above ends at."""
    lines = tree.text().split("\n")
    names = {line.split(" = ")[0]: given_[line.split(" = ")[1]] for line in lines[: len(tree.names)]}
    return read(lines[len(tree.names) + bool(tree.names) :], 0, names)


def read(lines: Sequence[str], depth: int, names: Mapping[str, Any]) -> str:
    """The line reached among some, nested `depth` deep."""
    pad = "    " * depth
    if not lines[0].startswith(f"{pad}if "):
        return lines[0].strip().split("  [")[0]
    other = next(place for place, line in enumerate(lines) if line == f"{pad}else:")
    holds = eval(lines[0].strip()[3:-1], {}, dict(names))
    return read(lines[1:other] if holds else lines[other + 1 :], depth + 1, names)


@given(trees, inputs)
def test_text_python_and_json_give_the_same_answer(tree: Tree, point: dict[str, Any]) -> None:
    picked = tree.pick(point)
    assert by_python(tree, point) == picked
    assert Tree.of_json(json.loads(json.dumps(tree.json()))) == tree
    if "\n" not in str(picked[0]):
        texts = [f"{path} = {value}" for path, value in zip(tree.choose, picked, strict=True) if value is not None]
        assert by_text(tree, point) == ", ".join(texts)
    columns = {path: np.array([value], object if isinstance(value, str) else float) for path, value in point.items()}
    assert tree.picks(columns, 1) == [picked]


# The command


@pytest.mark.slow
def test_the_command_writes_rules_that_agree_and_tells_how_they_fare(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run(tmp_path)
    assert main(["results", "rules", "study=toy", f"output_dir={tmp_path}"]) == 0
    output = capsys.readouterr().out
    assert "k / m <= 0.8" in output or "k / m <= 1" in output or "k / m <= 0.9" in output
    for part in ("leave one workload out", "leave one system out", "majority", "always never"):
        assert part in output
    stored = json.loads((folder / "rules.json").read_text("utf-8"))
    tree = Tree.of_json(stored["tree"])
    assert tree.text() in (folder / "rules.txt").read_text("utf-8")
    assert (folder / "figures" / "rules.png").stat().st_size > 1000
    assert "</svg>" in (folder / "figures" / "rules.svg").read_text("utf-8")
    assert "import" not in (folder / "rules.py").read_text("utf-8")
    ask = "from rules import choose; print([choose(m=m, k=k)['plan.name'] for m in (10, 160) for k in (15, 120)])"
    done = subprocess.run([sys.executable, "-c", ask], cwd=folder, capture_output=True, text=True, check=True)
    expected = [tree.pick({"load.m": m, "load.k": k})[0] for m in (10, 160) for k in (15, 120)]
    assert done.stdout.strip() == str(expected) == "['wide', 'wide', 'fast', 'fast']"


@pytest.mark.slow
def test_what_weakens_rules_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """That the space was sampled, and that best options are within the noise of predictions."""
    folder = run(tmp_path, method="tpe")
    summary = Outputs(folder).read_json("summary")
    decisions = {str(number): {"decided": number > 0} for number in range(3)}
    Outputs(folder).write_json("summary", {**summary, "decisions": decisions})
    assert main(["results", "rules", "study=toy", f"output_dir={tmp_path}", "depth=1"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "the space was sampled (tpe)" in output and "1 of 3 best options do not stand out" in output


@pytest.mark.parametrize(
    ("words", "about", "part"),
    [
        (["depth=0"], {}, "from 1 to 10"),
        (["objective=tmie_s"], {}, "did you mean `time_s`"),
        (["choose=plan.nmae"], {}, "did you mean `plan.name`"),
        ([], {"recorded": [], "knobs": {**KNOBS, "system.cores": [4]}}, "study.recorded"),
        (["choose=plan.pieces"], {"knobs": {**KNOBS, "plan.pieces": [1]}}, "fewer than two contexts with two options"),
        (["objective=held_bytes"], {"formula": lambda _: {"time_s": 1.0, "held_bytes": 0.0}}, "held_bytes not above 0"),
        ([], {"formula": lambda _: None}, "no row with a result"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_learned_is_refused_with_the_way_out(
    words: list[str], about: dict[str, Any], part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run(tmp_path, about.pop("formula", ratio_decides), **about)
    assert main(["results", "rules", "study=toy", f"output_dir={tmp_path}", *words]) == 2
    assert part in capsys.readouterr().err
    assert not (folder / "rules.json").exists()


def test_rules_are_not_judged_on_the_run_that_they_are_learned_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path)
    assert main(["results", "rules", "study=toy", "judge=toy", f"output_dir={tmp_path}"]) == 2
    assert "is the run that the rules are learned from" in capsys.readouterr().err


@pytest.mark.slow
def test_rules_are_judged_on_another_run_beside_what_is_always_picked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = run(tmp_path / "new", scenarios={"x": {"load.m": 30, "load.k": 70}, "y": {"load.m": 70, "load.k": 30}})
    run(tmp_path)
    assert main(["results", "rules", "study=toy", f"judge={other}", f"output_dir={tmp_path}"]) == 0
    capsys.readouterr()
    stored = json.loads(next(tmp_path.glob("toy/2*/rules.json")).read_text("utf-8"))
    new = {row["rule"]: row for row in stored["scores"] if row["judged_on"].startswith("unseen: ")}
    assert set(new) == {"tree", "majority", "always fast"}
    assert (new["tree"]["accuracy"], new["tree"]["max_regret"]) == (1.0, 0.0)
    assert new["always fast"]["accuracy"] == 0.5
