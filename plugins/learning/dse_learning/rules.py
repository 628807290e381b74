"""Rules learned from a finished run: they pick the best option from what is known before anything runs.

Every context (a scenario on a system, that is one choice of hardware knobs) has a best option: the values of the chosen
knobs whose best setting of all other knobs has the best objective. A small decision tree learns to pick it
(`dse_learning.tree_learning`) and is judged on workloads and systems it has not seen, by accuracy and by regret, the
share by which its pick is worse than the best option.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dse import plugins
from dse.analysis.contexts import (
    ALL_CONTEXTS,
    Cases,
    ContextQuestion,
    Option,
    Score,
    align_options,
    by_hand,
    cases,
    score_picks,
)
from dse.errors import ConfigError, Problem, pairs
from dse.errors.parsing import whole_number
from dse.errors.terminal import bar
from dse.results import output_files
from dse.results.run_folder import CommandAnswer, FinishedRun
from dse_learning.decision_tree import Leaf, Tree
from dse_learning.tree_learning import TreeLimits, learn

if TYPE_CHECKING:
    from rich.table import Table

_MOST_FOLDS = 32  # of a cross-validation; with more groups, a fold leaves out several


Learner = Callable[[NDArray[np.intp]], Callable[[NDArray[np.intp]], NDArray[np.intp]]]


def left_out(groups: NDArray[np.intp], learner: Learner, done: Callable[[int], Any] = int) -> NDArray[np.intp]:
    """Picks for each context [C] by a learner that saw all groups but the context's own. done: called per group."""
    picks = np.zeros(len(groups), np.intp)
    for group in np.unique(groups):
        held_out = np.flatnonzero(groups == group)
        picks[held_out] = learner(np.flatnonzero(groups != group))(held_out)
        done(1)
    return picks


def tree_learner(contexts: Cases, size: TreeLimits) -> Learner:
    """Learner of a tree from some contexts; arguments as for `learn`."""
    place = {option: index for index, option in enumerate(contexts.options)}

    def learner(rows: NDArray[np.intp]) -> Callable[[NDArray[np.intp]], NDArray[np.intp]]:
        tree = learn(contexts, size, rows)

        def picks(held_out: NDArray[np.intp]) -> NDArray[np.intp]:
            inputs = {path: column[held_out] for path, column in contexts.inputs.items()}
            return np.array([place[option] for option in tree.picks(inputs, len(held_out))], np.intp)

        return picks

    return learner


def majority_learner(contexts: Cases) -> Learner:
    """Learner of the option that is best most often in the contexts it sees; ties go to the least mean regret."""

    def learner(rows: NDArray[np.intp]) -> Callable[[NDArray[np.intp]], NDArray[np.intp]]:
        often, regret = contexts.best[rows].sum(axis=0), contexts.regrets[rows].mean(axis=0)
        winner = np.lexsort((regret, -often))[0]  # last key first: best most often, then least regret
        return lambda held_out: np.full(len(held_out), winner, np.intp)

    return learner


Folds = tuple[tuple[str, NDArray[np.intp]], ...]


def folds(contexts: Cases) -> tuple[Folds, list[str]]:
    """Folds by workload and by system as (label, group [C] of each context), and notes on those not available.

    With very many workloads or systems, several make one group.
    """
    notes, possible = [], []
    for noun, groups in (("workload", contexts.workloads), ("system", contexts.systems)):
        names, places = np.unique(groups, return_inverse=True)
        per_fold = -(-len(names) // _MOST_FOLDS)  # rounded up
        if len(names) > 1:
            part = f"{per_fold} {noun}s" if per_fold > 1 else f"one {noun}"
            possible.append((f"leave {part} out", places // per_fold))  # neighbouring groups are left out together
        else:
            way = (
                "search hardware, too: +space.<path>='range(a,b,step)'" if noun == "system" else "run several scenarios"
            )
            notes.append(f"leave one {noun} out is not available: the table has one {noun} ({way})")
    return tuple(possible), notes


def score_tree(contexts: Cases, tree: Tree, size: TreeLimits) -> tuple[list[Score], list[str]]:
    """Score the tree on the contexts it learned from, and trees and majorities on unseen ones; and notes."""
    place = {option: index for index, option in enumerate(contexts.options)}
    picks = np.array([place[option] for option in tree.picks(contexts.inputs, len(contexts.values))], np.intp)
    scores = [score_picks(contexts, picks, "tree", "what it learned from")]
    possible, notes = folds(contexts)
    learners = {"tree": tree_learner(contexts, size), "majority": majority_learner(contexts)}
    total = len(learners) * sum(len(np.unique(groups)) for _, groups in possible)
    with bar("rules: judged on what was left out", total, "fits") as advance:
        for seen, groups in possible:
            for name, learner in learners.items():
                scores.append(score_picks(contexts, left_out(groups, learner, advance), name, seen))
    return scores, notes


def score_fixed_options(contexts: Cases) -> list[Score]:
    """Score every option as the only pick, the best first."""
    picks = [np.full(len(contexts.values), index, np.intp) for index in range(len(contexts.options))]
    scores = [
        score_picks(contexts, pick, _always(option), ALL_CONTEXTS)
        for option, pick in zip(contexts.options, picks, strict=True)
    ]
    return sorted(scores, key=lambda fixed: (fixed.mean, fixed.most))


def unseen(contexts: Cases, learned: Cases, tree: Tree, seen: str) -> list[Score]:
    """Scores on contexts of another run: the tree, the majority of its training contexts, the best fixed option."""
    picked = {leaf.option for leaf in tree.nodes if isinstance(leaf, Leaf)}
    aligned = align_options(contexts, [*learned.options, *picked])
    place, every = {option: index for index, option in enumerate(aligned.options)}, len(aligned.values)
    picks = np.array([place[option] for option in tree.picks(aligned.inputs, every)], np.intp)
    # the same option for every context: asked for one
    common = majority_learner(learned)(np.arange(len(learned.values)))(np.arange(1))[0]
    majority = np.full(every, place[learned.options[common]], np.intp)
    fixed = [
        score_picks(aligned, np.full(every, index, np.intp), _always(option), seen) for option, index in place.items()
    ]
    best = min(fixed, key=lambda fixed_score: (fixed_score.mean, fixed_score.most))
    # known in hindsight only
    return [score_picks(aligned, picks, "tree", seen), score_picks(aligned, majority, "majority", seen), best]


def _always(option: Option) -> str:
    return "always " + ", ".join("–" if value is None else str(value) for value in option)


# ---------------------------------------------------------------- the command

_ALWAYS_SHOWN = 8  # fixed options in the printed table and the figure; rules.json has all
_OPTIONAL = ("objective", "choose", "judge", "leaves")
_LIMITS = {"depth": (1, 10), "leaves": (2, 1000)}


@output_files.working_on_folders
def command(words: Sequence[str]) -> CommandAnswer:
    """`results rules study=<name> [judge=<name>,...] [depth=3] [leaves=<number>] [objective=<metric>] [choose=...]`.

    judge: further runs to judge the tree on, unseen by it. Raises ConfigError.
    """
    arguments = pairs(words, {"study": "", "depth": "3", "output_dir": "outputs"}, optional=_OPTIONAL)
    size = TreeLimits(_number(arguments, "depth"), _number(arguments, "leaves") if "leaves" in arguments else None)
    root = Path(arguments["output_dir"])
    run = FinishedRun.find(root, arguments["study"])
    question = ContextQuestion.of(run, arguments.get("objective", ""), arguments.get("choose", ""))
    every = cases(run, question)
    contexts = every.distinct
    tree = learn(contexts, size)
    judges = [_other(root, name, run, question) for name in filter(None, arguments.get("judge", "").split(","))]
    elsewhere = [score for other in judges for score in _elsewhere(*other, contexts, tree)]
    scores, notes = score_tree(contexts, tree, size)
    scores += elsewhere
    notes += [
        f"judged on {other.name}: {len(new.values)} contexts that nothing was learned from" for other, new in judges
    ]
    # rules by hand may look at inputs that are the same everywhere
    scores += [*_score_hand_rules(run, cases(run, question, to_learn=False)), *score_fixed_options(contexts)]
    alike = len(every.options) - len(contexts.options)
    notes = [*_notes(run, question, contexts), *_verdict(scores), *notes]
    notes += [f"{alike} more options are never better or worse than one of these, and were left out"] if alike else []
    _write(run, question, tree, scores=scores, notes=notes)
    num_leaves = sum(isinstance(node, Leaf) for node in tree.nodes)
    head = f"Best {question.objective} of {run.name}, by rules of {num_leaves} leaves:\n"
    written = f"written to {run.folder}/ (rules.txt, rules.py, rules.json, figures/rules.png and .svg)"
    parts: tuple[Table | str, ...] = (head, tree.text() + "\n", _table(question, scores), *notes, written)
    return CommandAnswer(run.folder, parts, "rules")


def _other(root: Path, name: str, run: FinishedRun, question: ContextQuestion) -> tuple[FinishedRun, Cases]:
    """Find a further run to judge the rules on, with its contexts. Raises ConfigError."""
    other = FinishedRun.find(root, name, "judge")
    if other.folder.resolve() == run.folder.resolve():
        raise ConfigError([Problem("judge", "is the run that the rules are learned from", name, "name another")])
    # the same options in the same order
    other_question = replace(
        ContextQuestion.of(other, question.objective, ",".join(question.choose)), choose=question.choose
    )
    return other, cases(other, other_question, to_learn=False)


def _elsewhere(other: FinishedRun, new: Cases, learned: Cases, tree: Tree) -> list[Score]:
    """Score the tree, hand-written rules and fixed options on another run. Raises ConfigError."""
    if absent := [path for path in tree.names if path not in new.inputs]:
        rule = f"does not record {', '.join(absent)}, which the rules look at"
        raise ConfigError([Problem("judge", rule, other.name, "add it to study.recorded and run it again")])
    return [*unseen(new, learned, tree, f"unseen: {other.name}"), *_score_hand_rules(other, new)]


def _number(arguments: Mapping[str, str], name: str) -> int:
    """Parse a number of splits or leaves. Raises ConfigError."""
    least, most = _LIMITS[name]
    number = whole_number(arguments[name])
    if number is None or not least <= number <= most:
        noun = "splits" if name == "depth" else name
        raise ConfigError([Problem(name, f"must be a number of {noun} from {least} to {most}", arguments[name])])
    return number


def _score_hand_rules(run: FinishedRun, contexts: Cases) -> list[Score]:
    """Score the hand-written rules of the run's study on the run."""
    study = plugins.load("study", run.config["study"]["module"])
    return list(by_hand(contexts, getattr(study, "hand_rules", {}), f"all of {run.name}"))


def _notes(run: FinishedRun, question: ContextQuestion, contexts: Cases) -> list[str]:
    """Describe the contexts and the assumptions behind the numbers."""
    groups = [len(np.unique(numbers)) for numbers in (contexts.workloads, contexts.systems)]
    counts = [len(contexts.values), *groups, len(contexts.options)]
    notes = ["{} contexts ({} workloads, {} systems), {} options over {}".format(*counts, ", ".join(question.choose))]
    notes.append("regret: objective of the pick at its best setting / that of the best option - 1")
    notes.append(f"looked at: {', '.join(contexts.inputs)}, and products and ratios of them")
    if missing := int((~contexts.legal).sum()):
        pairs_of = f"{missing} pairs of context and option"
        notes.append(f"{pairs_of} have no point with a result: counted as the worst that has")
    if run.methods != ("exhaustive",):
        notes.append(f"the space was sampled ({', '.join(run.methods)}): best means best of what was evaluated")
    decisions = (run.outputs.read_json("summary").get("decisions") or {}).values()
    if unsure := sum(not entry.get("decided", True) for entry in decisions):
        rule = "do not stand out of what predictions are off by: a pick that differs there may be as good"
        notes.append(f"{unsure} of {len(decisions)} best options {rule}")
    return notes


def _verdict(scores: Sequence[Score]) -> list[str]:
    """Compare the tree on unseen contexts with the best fixed option, known in hindsight."""
    # sorted: the first is the best
    fixed = next(score for score in scores if score.name.startswith("always ") and score.seen == ALL_CONTEXTS)
    unseen = [score for score in scores if score.name == "tree" and score.seen.startswith("leave")]
    return [
        f"{score.seen}: the tree loses {100 * score.mean:.2f} % on average, "
        f"the best fixed option {100 * fixed.mean:.2f} %"
        + (": the tree does not pay" if score.mean >= fixed.mean else "")
        for score in unseen
    ]


def _table(question: ContextQuestion, scores: Sequence[Score]) -> Table:
    from rich.table import Table

    shown = Table(title=f"How the rules fare: regret in {question.objective}")
    for name in ("rule", "judged on", "accuracy", "within 2 %", "mean regret", "largest regret", "without it"):
        shown.add_column(name, justify="left" if name in ("rule", "judged on") else "right")
    for score in _scores_shown(scores):
        regrets = [f"{100 * value:.2f} %" for value in (score.mean, score.most)]
        shares = [f"{100 * value:.0f} %" for value in (score.accuracy, score.near)]
        shown.add_row(score.name, score.seen, *shares, *regrets, str(score.illegal or "–"))
    left = len(scores) - len(_scores_shown(scores))
    if left:
        shown.add_row(f"({left} more options are worse, see rules.json)", *[""] * 6)
    return shown


def _scores_shown(scores: Sequence[Score]) -> list[Score]:
    learned = [score for score in scores if not score.name.startswith("always ")]
    return [*learned, *[score for score in scores if score not in learned][:_ALWAYS_SHOWN]]


def _write(
    run: FinishedRun, question: ContextQuestion, tree: Tree, *, scores: Sequence[Score], notes: Sequence[str]
) -> None:
    from dse import plots
    from dse.plots import comparisons

    head = f"Best {question.objective} of {run.name}: picks {', '.join(question.choose)}"
    fared = [score.text for score in _scores_shown(scores)]
    header = "\n".join([head, *notes])
    texts = {
        "rules.txt": "\n".join([tree.text(), "", header, "", *fared, ""]),
        "rules.py": tree.python("\n".join([head + ".", "", *fared[:3], ""])),
    }
    for name, text in texts.items():
        run.outputs.write_text(name, text)
    rows = [score.row() for score in scores]
    summary = {"study": run.name, "objective": question.objective, "goal": question.goal}
    run.outputs.write_json("rules", {**summary, "tree": tree.json(), "scores": rows, "notes": list(notes)})
    shown = [score.row() for score in _scores_shown(scores)]
    make = partial(comparisons.regrets, shown, f"{run.name}: {question.objective}")
    plots.save(make, run.outputs.figures, "rules")
