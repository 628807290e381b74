"""Rules learned from a finished run: which option is best, told from what is known before anything runs.

Every context (a scenario on a system, that is one choice of hardware knobs) has a best option: the values of the chosen
knobs whose best setting of all other knobs has the best objective. A small decision tree learns to pick it from the
sizes of the workload and the numbers of the system that the table holds, and is judged on workloads and systems it has
not seen, by accuracy and by regret: how much worse than the best option the one it picks is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dse import report
from dse.finished import Finished
from dse.outputs import whole
from dse.problems import ConfigError, Problem, did_you_mean, pairs
from dse.tree import Feature, Leaf, Node, Option, Split, Tree, between

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table

Floats = NDArray[np.float64]
_ALL = "all contexts"
TIE = 1e-9
"""Options whose objectives differ by less than this share are equally good."""
_MOST_EXAMPLES = 2_000_000  # contexts times options that are learned from at once: some 400 MB
_MOST_PAIRED = 8  # inputs of which products and ratios are made; of more, only within one section


@dataclass(frozen=True)
class Cases:
    """Contexts [C] with their options [O]: what is learned from.

    values [C, O]: best objective of an option in a context, smaller being better, NaN where it has no legal point.
    inputs: path -> [C], known before anything runs. workloads, systems [C]: which of each a context belongs to.
    """

    choose: tuple[str, ...]
    options: tuple[Option, ...]
    values: Floats
    inputs: Mapping[str, NDArray[Any]]
    workloads: NDArray[np.intp]
    systems: NDArray[np.intp]

    @property
    def distinct(self) -> Cases:
        """The same without options that are never better or worse than one before them."""
        told: dict[bytes, int] = {}
        for place, column in enumerate(np.where(self.legal, np.round(self.regrets / TIE), -1.0).T):
            told.setdefault(column.tobytes(), place)
        kept = list(told.values())
        return replace(self, options=tuple(self.options[place] for place in kept), values=self.values[:, kept])

    @property
    def legal(self) -> NDArray[np.bool_]:
        """Which options have a point in which contexts, [C, O]."""
        return ~np.isnan(self.values)

    @property
    def regrets(self) -> Floats:
        """How much worse than the best each option is, [C, O]; one without a legal point is like the worst that has."""
        best = np.nanmin(self.values, axis=1, keepdims=True)
        filled = np.where(self.legal, self.values, np.nanmax(self.values, axis=1, keepdims=True))
        regrets = (filled / best if (best > 0).all() else best / filled) - 1  # negative where larger is better
        return np.asarray(np.where(regrets <= TIE, 0.0, regrets))

    @property
    def best(self) -> NDArray[np.bool_]:
        """Which options are best, ties among them, [C, O]."""
        return np.asarray((self.regrets == 0.0) & self.legal)

    def labels(self, rows: NDArray[np.intp]) -> NDArray[np.intp]:
        """The best option of some contexts [rows]; of equal ones that which is best most often among them."""
        often = self.best[rows].sum(axis=0)
        return np.asarray(np.where(self.best[rows], often, -1).argmax(axis=1))


# ---------------------------------------------------------------- from a table


@dataclass(frozen=True)
class Question:
    """What is asked of a run. choose: paths that are picked; system: searched hardware; inputs: what may be known."""

    objective: str
    goal: str
    choose: tuple[str, ...]
    system: tuple[str, ...]
    inputs: tuple[str, ...]

    @classmethod
    def of(cls, run: Finished, objective: str = "", choose: str = "") -> Question:
        """Of what was typed, or what the study says. Raises ConfigError."""
        goals = run.goals
        objective = objective or next(iter(goals))
        if objective not in goals:
            raise ConfigError(
                [Problem("objective", "is no objective of it", objective, did_you_mean(objective, goals))]
            )
        hardware = tuple(run.config["study"].get("hardware") or ())
        software = [path for path in run.knobs if path.partition(".")[0] not in hardware]
        chosen = [word for word in choose.split(",") if word] if choose else _choices(run, software)
        for path in chosen:
            if path not in run.knobs:
                raise ConfigError(
                    [Problem("choose", "is no knob that was searched", path, did_you_mean(path, run.knobs))]
                )
        if not chosen:
            raise ConfigError([Problem("choose", "the study searched no choice", way_out="name one: choose=<knob>")])
        system = tuple(path for path in run.knobs if path not in (*software, *chosen))
        inputs = tuple(path for path in run.recorded if path in system or path not in (*run.knobs, *chosen))
        return cls(objective, goals[objective], tuple(chosen), system, inputs)


def _choices(run: Finished, software: Sequence[str]) -> list[str]:
    """Knobs that hold text and that the study's summary shows: kinds of things, whose numbers are then settings."""
    import pyarrow.parquet as pq
    import pyarrow.types as kinds

    schema = pq.read_schema(run.outputs.results)
    texts = [path for path in software if not kinds.is_primitive(schema.field(path).type)]
    shown = [path for path in texts if path in run.summary["shown"]]
    return shown or texts or list(software)


def cases(run: Finished, question: Question) -> Cases:
    """The contexts and options of a run's table. Raises ConfigError where there is nothing to learn from."""
    import pandas as pd

    context = ["scenario", *question.system]
    sign = 1.0 if question.goal == "minimize" else -1.0
    columns = dict.fromkeys([*context, *question.choose, *question.inputs, "status", question.objective])
    best, known = [], []
    for part in run.parts(list(columns)):
        ok = part[(part["status"] == "ok") & part["explored"]]
        values = ok.assign(value=sign * ok[question.objective])
        best.append(
            values.groupby([*context, *question.choose], dropna=False, sort=False, observed=True)["value"].min()
        )
        known.append(ok[[*dict.fromkeys([*context, *question.inputs])]].drop_duplicates())
    if not sum(map(len, best)):
        raise ConfigError([Problem("study", "has no row with a result in its space", run.name, "look at `reason`")])
    names = [*context, *question.choose]
    values = pd.concat(best).groupby(names, dropna=False, sort=False, observed=True).min().reset_index()
    inputs = pd.concat(known).drop_duplicates()
    return _Gatherer(run, question, values, inputs).cases()


@dataclass(frozen=True)
class _Gatherer:
    """Long tables turned into arrays. best: context, option, value. known: context and inputs, distinct rows."""

    run: Finished
    question: Question
    best: pd.DataFrame
    known: pd.DataFrame

    def cases(self) -> Cases:
        context = ["scenario", *self.question.system]
        contexts = self.best.groupby(context, dropna=False, sort=False, observed=True).ngroup().to_numpy()
        options: dict[Option, int] = {}
        rows = self.best[list(self.question.choose)].astype(object)
        rows = rows.where(rows.notna(), None)
        places = [options.setdefault(tuple(map(_plain, row)), len(options)) for row in rows.itertuples(index=False)]
        values = np.full((contexts.max() + 1, len(options)), np.nan)
        values[contexts, places] = self.best["value"]
        first = np.unique(contexts, return_index=True)[1]
        return self._checked(
            self._described(self.best.iloc[first][context].reset_index(drop=True), tuple(options), values)
        )

    def _described(self, contexts: pd.DataFrame, options: tuple[Option, ...], values: Floats) -> Cases:
        """With the inputs that have one value in each context and several altogether."""
        context = list(contexts)
        counts = self.known.groupby(context, dropna=False, sort=False, observed=True).nunique(dropna=False)
        single = [path for path in self.question.inputs if path in context or (counts[path] == 1).all()]
        held = contexts.merge(
            self.known[[*dict.fromkeys([*context, *single])]].drop_duplicates(), how="left", on=context
        )
        varied = [path for path in single if held[path].notna().all() and held[path].nunique() > 1]
        inputs = {path: _array(held[path]) for path in varied}
        sizes = [path for path in varied if path not in self.question.system]
        workloads = _numbered(held, sizes or ["scenario"])
        return Cases(self.question.choose, options, values, inputs, workloads, _numbered(held, self.question.system))

    def _checked(self, found: Cases) -> Cases:
        """Without contexts that have one option. Raises ConfigError where nothing can be learned."""
        enough = np.flatnonzero(found.legal.sum(axis=1) > 1)
        examples = f"{len(enough):,} contexts times {len(found.options):,} options"
        recorded = "record the sizes of the workload: study.recorded=[<path>,...]"
        for wrong, rule, way in (
            (len(enough) < 2, "has fewer than two contexts with two options", "choose others, or enumerate the space"),
            (not found.inputs, "has no recorded number or hardware knob that tells contexts apart", recorded),
            (len(enough) * len(found.options) > _MOST_EXAMPLES, f"has too many: {examples}", "choose fewer knobs"),
            (_has_both_signs(found.values), f"has {self.question.objective} not above 0", "take another objective="),
        ):
            if wrong:
                raise ConfigError([Problem("study", rule, self.run.name, way)])
        inputs = {path: column[enough] for path, column in found.inputs.items()}
        groups = found.workloads[enough], found.systems[enough]
        return Cases(found.choose, found.options, found.values[enough], inputs, *groups)


def _has_both_signs(values: Floats) -> bool:
    """Whether shares of a value mean nothing: some are zero, or on either side of it."""
    return bool(np.nanmin(values) <= 0 <= np.nanmax(values))


def _numbered(rows: pd.DataFrame, paths: Sequence[str]) -> NDArray[np.intp]:
    """Which of the combinations of some columns each row [N] has; all the same without columns."""
    if not paths:
        return np.zeros(len(rows), np.intp)
    return rows.groupby(list(paths), dropna=False, sort=False, observed=True).ngroup().to_numpy().astype(np.intp)


def _array(column: pd.Series[Any]) -> NDArray[Any]:
    from pandas.api.types import is_numeric_dtype

    return column.to_numpy(dtype=float) if is_numeric_dtype(column) else column.to_numpy(dtype=object)


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


# ---------------------------------------------------------------- learning


def features(inputs: Mapping[str, NDArray[Any]]) -> list[Feature]:
    """What a tree may look at, the simplest first: inputs, then products and ratios of pairs, then of whole sections.

    Ratios are of positive inputs only. A text is asked for each of its values.
    """
    numbers = [path for path, column in inputs.items() if column.dtype != object]
    found = [Feature("value", (path,)) for path in numbers]
    for path, column in inputs.items():
        if column.dtype == object:
            values = sorted(set(map(str, column)))
            found += [Feature("is", (path,), value) for value in values[: 1 if len(values) == 2 else None]]
    positive = [path for path in numbers if (inputs[path] > 0).all()]
    for one, other in itertools.combinations(positive, 2):
        if len(positive) <= _MOST_PAIRED or _section(one) == _section(other):
            found += [Feature("ratio", (other, one)), Feature("product", (one, other))]
    for section in dict.fromkeys(map(_section, positive)):
        together = tuple(path for path in positive if _section(path) == section)
        found += [Feature("product", together)] if len(together) > 2 else []
    return found


def _section(path: str) -> str:
    return path.rpartition(".")[0]


def learn(found: Cases, depth: int, rows: NDArray[np.intp] | None = None, *, by_cost: bool = True) -> Tree:
    """A tree of at most `depth` splits one below another, from some contexts (all).

    scikit-learn's decision tree finds the splits. by_cost: every context is there once for each option, weighted by
    what that option spares against the worst one (data-space expansion of Abe, Zadrozny and Langford, KDD 2004), else
    once with its best option. A leaf takes the option that has the least mean regret among its contexts.
    """
    from sklearn.tree import DecisionTreeClassifier

    rows = np.arange(len(found.values)) if rows is None else rows
    asked = features(found.inputs)
    matrix = np.stack([feature.of(found.inputs) for feature in asked], axis=1)[rows]
    examples, labels, weights = np.arange(len(rows)), found.labels(rows), np.ones(len(rows))
    if by_cost:
        spared = found.regrets[rows].max(axis=1, keepdims=True) - found.regrets[rows]
        counted = np.nonzero(spared)
        if len(counted[0]):
            (examples, labels), weights = counted, spared[counted]
    model = DecisionTreeClassifier(max_depth=depth, random_state=0)
    model.fit(matrix[examples], labels, sample_weight=weights / weights.mean())
    return Tree(found.choose, _Grower(found, asked, rows, matrix, model.tree_).node(0, np.arange(len(rows))))


@dataclass(frozen=True)
class _Grower:
    """A tree of ours from the splits that scikit-learn found: the same partition, told as simply as it can be."""

    cases: Cases
    features: Sequence[Feature]
    rows: NDArray[np.intp]
    matrix: Floats
    grown: Any

    def node(self, place: int, held: NDArray[np.intp]) -> Node:
        """The node at a place of scikit-learn's tree, which some of the rows reach."""
        low, high = int(self.grown.children_left[place]), int(self.grown.children_right[place])
        if low == high:
            return self._leaf(held)
        column = self.matrix[held, self.grown.feature[place]]
        below = column.astype(np.float32) <= self.grown.threshold[place]
        if below.all() or not below.any():
            return self.node(low if below.all() else high, held)
        first, second = self.node(low, held[below]), self.node(high, held[~below])
        if isinstance(first, Leaf) and isinstance(second, Leaf) and first.option == second.option:
            return self._leaf(held)
        return self._split(held, below, (first, second))

    def _split(self, held: NDArray[np.intp], below: NDArray[np.bool_], children: tuple[Node, Node]) -> Split:
        """By the simplest feature that parts the rows in the same way."""
        for feature, column in zip(self.features, self.matrix[held].T, strict=True):
            for part, (first, second) in ((below, children), (~below, children[::-1])):
                low, high = float(column[part].max()), float(column[~part].min())
                if low < high:
                    return Split(feature, between(low, high), first, second)
        raise AssertionError("the feature that scikit-learn split by parts them")

    def _leaf(self, held: NDArray[np.intp]) -> Leaf:
        """The option with the least mean regret; of equal ones the one that is legal and best most often."""
        rows = self.rows[held]
        regrets, legal, best = self.cases.regrets[rows], self.cases.legal[rows], self.cases.best[rows]
        order = np.lexsort((-best.sum(axis=0), -legal.sum(axis=0), np.round(regrets.mean(axis=0), 12)))
        own = regrets[:, order[0]]
        return Leaf(self.cases.options[order[0]], len(rows), float(own.mean()), float(own.max()))


# ---------------------------------------------------------------- judging


@dataclass(frozen=True)
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
    def said(self) -> str:
        """For a person."""
        about = f"{self.name}, {self.seen}" if self.seen != _ALL else self.name
        regret = f"regret {100 * self.mean:.2f} % mean, {100 * self.most:.2f} % most"
        return f"{about}: accuracy {100 * self.accuracy:.0f} %, {regret}"

    def row(self) -> dict[str, Any]:
        """As written."""
        told = {"rule": self.name, "judged_on": self.seen, "accuracy": self.accuracy}
        return told | {"mean_regret": self.mean, "max_regret": self.most, "contexts_without_it": self.illegal}


def score(found: Cases, picks: NDArray[np.intp], name: str, seen: str) -> Score:
    """How picks [C], as places of options, fare."""
    every = np.arange(len(picks))
    accuracy = float(found.best[every, picks].mean())
    return Score(name, seen, accuracy, found.regrets[every, picks], int((~found.legal[every, picks]).sum()))


Learner = Callable[[NDArray[np.intp]], Callable[[NDArray[np.intp]], NDArray[np.intp]]]


def left_out(groups: NDArray[np.intp], learner: Learner) -> NDArray[np.intp]:
    """What is picked for each context [C] by what was learned from all groups but its own."""
    picks = np.zeros(len(groups), np.intp)
    for group in np.unique(groups):
        own = np.flatnonzero(groups == group)
        picks[own] = learner(np.flatnonzero(groups != group))(own)
    return picks


def tree_learner(found: Cases, depth: int, *, by_cost: bool = True) -> Learner:
    """Learns a tree from some contexts; arguments as for `learn`."""
    place = {option: index for index, option in enumerate(found.options)}

    def learner(rows: NDArray[np.intp]) -> Callable[[NDArray[np.intp]], NDArray[np.intp]]:
        tree = learn(found, depth, rows, by_cost=by_cost)

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
    """(how it is judged, the group [C] of each context) for workloads and systems, and why one is not available."""
    told, possible = [], []
    for noun, groups in (("workload", found.workloads), ("system", found.systems)):
        if len(np.unique(groups)) > 1:
            possible.append((f"leave one {noun} out", groups))
        else:
            way = (
                "search hardware, too: +space.<path>='range(a,b,step)'" if noun == "system" else "run several scenarios"
            )
            told.append(f"leave one {noun} out is not available: the table has one {noun} ({way})")
    return tuple(possible), told


def judged(found: Cases, tree: Tree, depth: int) -> tuple[list[Score], list[str]]:
    """Scores of the tree, of trees, majorities on the same folds, and of every option taken always; and notes."""
    place = {option: index for index, option in enumerate(found.options)}
    count = len(found.values)
    own = np.array([place[option] for option in tree.picks(found.inputs, count)], np.intp)
    scores = [score(found, own, "tree", "what it learned from")]
    possible, told = folds(found)
    for seen, groups in possible:
        for name, learner in (
            ("tree", tree_learner(found, depth)),
            ("tree that ignores costs", tree_learner(found, depth, by_cost=False)),
            ("majority", majority_learner(found)),
        ):
            scores.append(score(found, left_out(groups, learner), name, seen))
    every = [np.full(count, index, np.intp) for index in range(len(found.options))]
    always = [
        score(found, picks, "always " + ", ".join("–" if one is None else str(one) for one in option), _ALL)
        for option, picks in zip(found.options, every, strict=True)
    ]
    return [*scores, *sorted(always, key=lambda one: (one.mean, one.most))], told


# ---------------------------------------------------------------- the command

_ALWAYS_SHOWN = 8  # options of which the printed table and the figure show how they fare; rules.json has all


def command(words: Sequence[str]) -> int:
    """`rules study=<name> [depth=3] [objective=<metric>] [choose=<knob>,...] [output_dir=...]`. Raises ConfigError."""
    given = pairs(words, {"study": "", "depth": "3", "output_dir": "outputs"}, optional=("objective", "choose"))
    if not given["depth"].isdigit() or not 1 <= int(given["depth"]) <= 10:
        raise ConfigError([Problem("depth", "must be a number of splits from 1 to 10", given["depth"])])
    run, depth = Finished.find(Path(given["output_dir"]), given["study"]), int(given["depth"])
    question = Question.of(run, given.get("objective", ""), given.get("choose", ""))
    every = cases(run, question)
    found = every.distinct
    tree = learn(found, depth)
    scores, notes = judged(found, tree, depth)
    alike = len(every.options) - len(found.options)
    notes = [*_notes(run, question, found), *_verdict(scores), *notes]
    notes += [f"{alike} more options are never better or worse than one of these, and were left out"] if alike else []
    _write(run, question, tree, scores=scores, notes=notes)
    console = report.console()
    console.print(f"Best {question.objective} of {run.name}, by rules of depth {depth}:\n")
    console.print(tree.text() + "\n", soft_wrap=True, highlight=False)
    console.print(_table(question, scores))
    for note in notes:
        console.print(note, soft_wrap=True)
    console.print(
        f"written to {run.folder}/ (rules.txt, rules.py, rules.json, figures/rules.png and .svg)", soft_wrap=True
    )
    return 0


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
    told.append(
        "the tree is learned by cost: examples are weighted by the regret they spare, leaves take the least mean regret"
    )
    return told


def _verdict(scores: Sequence[Score]) -> list[str]:
    """Whether the tree is worth having: on what it has not seen, against the best fixed option, known in hindsight."""
    fixed = next(one for one in scores if one.name.startswith("always "))
    unseen = [one for one in scores if one.name == "tree" and one.seen.startswith("leave")]
    return [
        f"{one.seen}: the tree loses {100 * one.mean:.2f} % on average, the best fixed option {100 * fixed.mean:.2f} %"
        + (": the tree does not pay" if one.mean >= fixed.mean else "")
        for one in unseen
    ]


def _table(question: Question, scores: Sequence[Score]) -> Table:
    from rich.table import Table

    shown = Table(title=f"How the rules fare: regret in {question.objective}")
    for name in ("rule", "judged on", "accuracy", "mean regret", "largest regret", "contexts without it"):
        shown.add_column(name, justify="left" if name in ("rule", "judged on") else "right")
    for one in _shown(scores):
        regrets = [f"{100 * value:.2f} %" for value in (one.mean, one.most)]
        shown.add_row(one.name, one.seen, f"{100 * one.accuracy:.0f} %", *regrets, str(one.illegal or "–"))
    left = len(scores) - len(_shown(scores))
    if left:
        shown.add_row(f"({left} more options are worse, see rules.json)", *[""] * 5)
    return shown


def _shown(scores: Sequence[Score]) -> list[Score]:
    learned = [one for one in scores if not one.name.startswith("always ")]
    return [*learned, *[one for one in scores if one not in learned][:_ALWAYS_SHOWN]]


def _write(run: Finished, question: Question, tree: Tree, *, scores: Sequence[Score], notes: Sequence[str]) -> None:
    from dse import plots

    head = f"Best {question.objective} of {run.name}: picks {', '.join(question.choose)}"
    fared = [one.said for one in _shown(scores)]
    told = "\n".join([head, *notes])
    texts = {
        "rules.txt": "\n".join([tree.text(), "", told, "", *fared, ""]),
        "rules.py": tree.python("\n".join([head + ".", "", *fared[:3], ""])),
    }
    for name, text in texts.items():
        with whole(run.folder / name) as fresh:
            fresh.write_text(text, encoding="utf-8")
    rows = [one.row() for one in scores]
    asked = {"study": run.name, "objective": question.objective, "goal": question.goal}
    run.outputs.write_json("rules", {**asked, "tree": tree.json(), "scores": rows, "notes": list(notes)})
    figure = plots.regrets(
        [one.row() for one in _shown(scores)], f"{run.name}: regret of rules for {question.objective}"
    )
    plots.save(figure, run.outputs.figures, "rules")


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {"rules": command}
