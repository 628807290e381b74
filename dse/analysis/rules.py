"""Rules learned from a finished run: which option is best, told from what is known before anything runs.

Every context (a scenario on a system, that is one choice of hardware knobs) has a best option: the values of the chosen
knobs whose best setting of all other knobs has the best objective. A small decision tree learns to pick it
(`dse.analysis.tree_learning`) and is judged on workloads and systems it has not seen, by accuracy and by regret: how
much worse than the best option the one it picks is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dse import plugins
from dse.analysis.contexts import Cases, Floats, Question, cases, plain
from dse.analysis.decision_tree import Leaf, Option, Tree
from dse.analysis.tree_learning import Size, learn
from dse.errors import ConfigError, Problem, pairs
from dse.files import atomic_replacement
from dse.progress import bar
from dse.results import report
from dse.results.finished_run import Finished

if TYPE_CHECKING:
    from rich.table import Table

_ALL = "all contexts"
_NEAR = 0.02  # regret that is called near the best
_MOST_FOLDS = 32  # parts that groups are left out in; of more, several at once


@dataclass(frozen=True, eq=False)
class Score:
    """How a way of picking fares over contexts. regrets [contexts]; illegal: contexts where the pick has no point."""

    name: str
    seen: str
    accuracy: float
    regrets: Floats
    illegal: int

    @property
    def mean(self) -> float:
        """Mean regret, a share of the best objective."""
        return float(self.regrets.mean())

    @property
    def most(self) -> float:
        """Largest regret."""
        return float(self.regrets.max())

    @property
    def near(self) -> float:
        """Share of the contexts in which the pick is within 2 % of the best."""
        return float((self.regrets <= _NEAR).mean())

    @property
    def text(self) -> str:
        """For a person."""
        about = f"{self.name}, {self.seen}" if self.seen != _ALL else self.name
        regret = f"regret {100 * self.mean:.2f} % mean, {100 * self.most:.2f} % most"
        shares = f"accuracy {100 * self.accuracy:.0f} %, within 2 % of the best {100 * self.near:.0f} %"
        return f"{about}: {shares}, {regret}"

    def row(self) -> dict[str, Any]:
        """As written."""
        told = {"rule": self.name, "judged_on": self.seen, "accuracy": self.accuracy, "within_2_percent": self.near}
        return told | {"mean_regret": self.mean, "max_regret": self.most, "contexts_without_it": self.illegal}


def score(found: Cases, picks: NDArray[np.intp], name: str, seen: str) -> Score:
    """How picks [C], as places of options, fare."""
    every = np.arange(len(picks))
    accuracy = float(found.best[every, picks].mean())
    return Score(name, seen, accuracy, found.regrets[every, picks], int((~found.legal[every, picks]).sum()))


Learner = Callable[[NDArray[np.intp]], Callable[[NDArray[np.intp]], NDArray[np.intp]]]


def left_out(groups: NDArray[np.intp], learner: Learner, done: Callable[[int], Any] = int) -> NDArray[np.intp]:
    """What is picked for each context [C] by what was learned from all groups but its own. done: told of each group."""
    picks = np.zeros(len(groups), np.intp)
    for group in np.unique(groups):
        own = np.flatnonzero(groups == group)
        picks[own] = learner(np.flatnonzero(groups != group))(own)
        done(1)
    return picks


def tree_learner(found: Cases, size: Size) -> Learner:
    """Learns a tree from some contexts; arguments as for `learn`."""
    place = {option: index for index, option in enumerate(found.options)}

    def learner(rows: NDArray[np.intp]) -> Callable[[NDArray[np.intp]], NDArray[np.intp]]:
        tree = learn(found, size, rows)

        def picks(own: NDArray[np.intp]) -> NDArray[np.intp]:
            inputs = {path: column[own] for path, column in found.inputs.items()}
            return np.array([place[option] for option in tree.picks(inputs, len(own))], np.intp)

        return picks

    return learner


def majority_learner(found: Cases) -> Learner:
    """Picks, whatever the context, the option that is best most often in those it saw; of equal ones the least bad."""

    def learner(rows: NDArray[np.intp]) -> Callable[[NDArray[np.intp]], NDArray[np.intp]]:
        often, regret = found.best[rows].sum(axis=0), found.regrets[rows].mean(axis=0)
        winner = np.lexsort((regret, -often))[0]
        return lambda own: np.full(len(own), winner, np.intp)

    return learner


Folds = tuple[tuple[str, NDArray[np.intp]], ...]


def folds(found: Cases) -> tuple[Folds, list[str]]:
    """(how it is judged, the group [C] of each context) for workloads and systems, and why one is not available.

    Of very many workloads or systems several make a group.
    """
    told, possible = [], []
    for noun, groups in (("workload", found.workloads), ("system", found.systems)):
        names, places = np.unique(groups, return_inverse=True)
        each = -(-len(names) // _MOST_FOLDS)
        if len(names) > 1:
            possible.append((f"leave {f'{each} {noun}s' if each > 1 else f'one {noun}'} out", places // each))
        else:
            way = (
                "search hardware, too: +space.<path>='range(a,b,step)'" if noun == "system" else "run several scenarios"
            )
            told.append(f"leave one {noun} out is not available: the table has one {noun} ({way})")
    return tuple(possible), told


def score_tree(found: Cases, tree: Tree, size: Size) -> tuple[list[Score], list[str]]:
    """Scores of the tree where it learned, of trees and majorities where they did not; and notes."""
    place = {option: index for index, option in enumerate(found.options)}
    own = np.array([place[option] for option in tree.picks(found.inputs, len(found.values))], np.intp)
    scores = [score(found, own, "tree", "what it learned from")]
    possible, told = folds(found)
    learners = {"tree": tree_learner(found, size), "majority": majority_learner(found)}
    total = len(learners) * sum(len(np.unique(groups)) for _, groups in possible)
    with bar("rules: judged on what was left out", total, "fits") as advance:
        for seen, groups in possible:
            for name, learner in learners.items():
                scores.append(score(found, left_out(groups, learner, advance), name, seen))
    return scores, told


def score_fixed_options(found: Cases) -> list[Score]:
    """Scores of every option taken always, the best first."""
    picks = [np.full(len(found.values), index, np.intp) for index in range(len(found.options))]
    always = [score(found, own, _always(option), _ALL) for option, own in zip(found.options, picks, strict=True)]
    return sorted(always, key=lambda one: (one.mean, one.most))


def _aligned(found: Cases, options: Sequence[Option]) -> Cases:
    """The same with these options first; one that has no point there is legal nowhere."""
    order = list(dict.fromkeys([*options, *found.options]))
    values = np.full((len(found.values), len(order)), np.nan)
    values[:, [order.index(option) for option in found.options]] = found.values
    return replace(found, options=tuple(order), values=values)


Hand = Callable[[Mapping[str, NDArray[Any]]], Mapping[str, Sequence[Any]]]
"""A rule that a person wrote: inputs by path [C] -> the value of each path that it chooses [C]."""


def by_hand(found: Cases, hands: Mapping[str, Hand], seen: str) -> Iterator[Score]:
    """How rules of a person fare, where they choose what is asked for among what was run, from known inputs."""
    for name, hand in hands.items():
        try:
            chosen = hand(found.inputs)
            picks = list(zip(*(chosen[path] for path in found.choose), strict=True))
        except KeyError:
            continue
        told = _aligned(found, list(dict.fromkeys(tuple(map(plain, pick)) for pick in picks)))
        place = {option: index for index, option in enumerate(told.options)}
        found_picks = np.array([place[tuple(map(plain, pick))] for pick in picks])
        if told.legal[np.arange(len(picks)), found_picks].any():  # else its options are none of this run's
            yield score(told, found_picks, name, seen)


def unseen(found: Cases, learned: Cases, tree: Tree, seen: str) -> list[Score]:
    """Scores on contexts of another run: the tree, the majority of what it was learned from, every option always."""
    told = _aligned(found, [*learned.options, *{leaf.option for leaf in tree.nodes if isinstance(leaf, Leaf)}])
    place, every = {option: index for index, option in enumerate(told.options)}, len(told.values)
    own = np.array([place[option] for option in tree.picks(told.inputs, every)], np.intp)
    common = majority_learner(learned)(np.arange(len(learned.values)))(np.arange(1))[0]
    majority = np.full(every, place[learned.options[common]], np.intp)
    fixed = [score(told, np.full(every, index, np.intp), _always(one), seen) for one, index in place.items()]
    best = min(fixed, key=lambda one: (one.mean, one.most))
    return [score(told, own, "tree", seen), score(told, majority, "majority", seen), best]


def _always(option: Option) -> str:
    return "always " + ", ".join("–" if one is None else str(one) for one in option)


# ---------------------------------------------------------------- the command

_ALWAYS_SHOWN = 8  # options of which the printed table and the figure show how they fare; rules.json has all
_OPTIONAL = ("objective", "choose", "judge", "leaves")
_LIMITS = {"depth": (1, 10), "leaves": (2, 1000)}


def command(words: Sequence[str]) -> int:
    """`rules study=<name> [judge=<name>,...] [depth=3] [leaves=<number>] [objective=<metric>] [choose=<knob>,...]`.

    judge: runs that it has not seen to judge it on, too. Raises ConfigError.
    """
    given = pairs(words, {"study": "", "depth": "3", "output_dir": "outputs"}, optional=_OPTIONAL)
    size = Size(_number(given, "depth"), _number(given, "leaves") if "leaves" in given else None)
    root = Path(given["output_dir"])
    run = Finished.find(root, given["study"])
    question = Question.of(run, given.get("objective", ""), given.get("choose", ""))
    every = cases(run, question)
    found = every.distinct
    tree = learn(found, size)
    others = [_other(root, said, run, question) for said in filter(None, given.get("judge", "").split(","))]
    elsewhere = [score for other in others for score in _elsewhere(*other, found, tree)]
    scores, notes = score_tree(found, tree, size)
    scores += elsewhere
    notes += [
        f"judged on {other.name}: {len(new.values)} contexts that nothing was learned from" for other, new in others
    ]
    scores += [*_of_persons(run, cases(run, question, to_learn=False)), *score_fixed_options(found)]
    alike = len(every.options) - len(found.options)
    notes = [*_notes(run, question, found), *_verdict(scores), *notes]
    notes += [f"{alike} more options are never better or worse than one of these, and were left out"] if alike else []
    _write(run, question, tree, scores=scores, notes=notes)
    console = report.console()
    many = sum(isinstance(node, Leaf) for node in tree.nodes)
    console.print(f"Best {question.objective} of {run.name}, by rules of {many} leaves:\n")
    console.print(tree.text() + "\n", soft_wrap=True, highlight=False)
    console.print(_table(question, scores))
    for note in notes:
        console.print(note, soft_wrap=True)
    console.print(
        f"written to {run.folder}/ (rules.txt, rules.py, rules.json, figures/rules.png and .svg)", soft_wrap=True
    )
    return 0


def _other(root: Path, said: str, run: Finished, question: Question) -> tuple[Finished, Cases]:
    """A run to judge rules on that were learned from another, with its contexts. Raises ConfigError."""
    other = Finished.find(root, said, "judge")
    if other.folder.resolve() == run.folder.resolve():
        raise ConfigError([Problem("judge", "is the run that the rules are learned from", said, "name another")])
    asked = replace(Question.of(other, question.objective, ",".join(question.choose)), choose=question.choose)
    return other, cases(other, asked, to_learn=False)


def _elsewhere(other: Finished, new: Cases, found: Cases, tree: Tree) -> list[Score]:
    """How the tree, rules by hand and fixed options fare on another run. Raises ConfigError."""
    if absent := [path for path in tree.names if path not in new.inputs]:
        rule = f"does not record {', '.join(absent)}, which the rules look at"
        raise ConfigError([Problem("judge", rule, other.name, "add it to study.recorded and run it again")])
    return [*unseen(new, found, tree, f"unseen: {other.name}"), *_of_persons(other, new)]


def _number(given: Mapping[str, str], name: str) -> int:
    """A number of splits or leaves. Raises ConfigError."""
    least, most = _LIMITS[name]
    if not given[name].isdigit() or not least <= int(given[name]) <= most:
        noun = "splits" if name == "depth" else name
        raise ConfigError([Problem(name, f"must be a number of {noun} from {least} to {most}", given[name])])
    return int(given[name])


def _of_persons(run: Finished, found: Cases) -> list[Score]:
    """How the rules that the run's study has by hand fare on it."""
    study = plugins.load("study", run.config["study"]["module"])
    return list(by_hand(found, getattr(study, "hand_rules", {}), f"all of {run.name}"))


def _notes(run: Finished, question: Question, found: Cases) -> list[str]:
    """What must be known to read the numbers."""
    counts = [len(found.values), len(np.unique(found.workloads)), len(np.unique(found.systems)), len(found.options)]
    told = ["{} contexts ({} workloads, {} systems), {} options over {}".format(*counts, ", ".join(question.choose))]
    told.append("regret: objective of the pick at its best setting / that of the best option - 1")
    told.append(f"looked at: {', '.join(found.inputs)}, and products and ratios of them")
    if missing := int((~found.legal).sum()):
        told.append(f"{missing} pairs of context and option have no point with a result: counted as the worst that has")
    if run.methods != ("exhaustive",):
        told.append(f"the space was sampled ({', '.join(run.methods)}): best means best of what was evaluated")
    return told


def _verdict(scores: Sequence[Score]) -> list[str]:
    """Whether the tree is worth having: on what it has not seen, against the best fixed option, known in hindsight."""
    fixed = next(one for one in scores if one.name.startswith("always ") and one.seen == _ALL)
    unseen = [one for one in scores if one.name == "tree" and one.seen.startswith("leave")]
    return [
        f"{one.seen}: the tree loses {100 * one.mean:.2f} % on average, the best fixed option {100 * fixed.mean:.2f} %"
        + (": the tree does not pay" if one.mean >= fixed.mean else "")
        for one in unseen
    ]


def _table(question: Question, scores: Sequence[Score]) -> Table:
    from rich.table import Table

    shown = Table(title=f"How the rules fare: regret in {question.objective}")
    for name in ("rule", "judged on", "accuracy", "within 2 %", "mean regret", "largest regret", "without it"):
        shown.add_column(name, justify="left" if name in ("rule", "judged on") else "right")
    for one in _shown(scores):
        regrets = [f"{100 * value:.2f} %" for value in (one.mean, one.most)]
        shares = [f"{100 * value:.0f} %" for value in (one.accuracy, one.near)]
        shown.add_row(one.name, one.seen, *shares, *regrets, str(one.illegal or "–"))
    left = len(scores) - len(_shown(scores))
    if left:
        shown.add_row(f"({left} more options are worse, see rules.json)", *[""] * 6)
    return shown


def _shown(scores: Sequence[Score]) -> list[Score]:
    learned = [one for one in scores if not one.name.startswith("always ")]
    return [*learned, *[one for one in scores if one not in learned][:_ALWAYS_SHOWN]]


def _write(run: Finished, question: Question, tree: Tree, *, scores: Sequence[Score], notes: Sequence[str]) -> None:
    from dse import plots

    head = f"Best {question.objective} of {run.name}: picks {', '.join(question.choose)}"
    fared = [one.text for one in _shown(scores)]
    told = "\n".join([head, *notes])
    texts = {
        "rules.txt": "\n".join([tree.text(), "", told, "", *fared, ""]),
        "rules.py": tree.python("\n".join([head + ".", "", *fared[:3], ""])),
    }
    for name, text in texts.items():
        with atomic_replacement(run.folder / name) as fresh:
            fresh.write_text(text, encoding="utf-8")
    rows = [one.row() for one in scores]
    asked = {"study": run.name, "objective": question.objective, "goal": question.goal}
    run.outputs.write_json("rules", {**asked, "tree": tree.json(), "scores": rows, "notes": list(notes)})
    figure = plots.regrets(
        [one.row() for one in _shown(scores)], f"{run.name}: regret of rules for {question.objective}"
    )
    plots.save(figure, run.outputs.figures, "rules")
