"""The answer that a person reads first: winners, a conclusion, claims in a line; and the command `results claims`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dse import plugins
from dse.errors import pairs
from dse.errors.parsing import natural_key
from dse.plots import title
from dse.plots.labels import label, words
from dse.results import COLUMNS, output_files
from dse.results.decisions import AS_GOOD, NO_GAIN, Decision, helpful_measurement, read_decision
from dse.results.pareto import Contest
from dse.results.report import claims_count, claims_table, console, error_text, limits_text, study_figures, summary
from dse.results.run_folder import Outputs
from dse.results.words import AS_FAST, cell, choice_in_words, common_choices, gain_in_words
from dse.space import get_path
from dse.values.units import quantity_text

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table
    from rich.text import Text

MOST_ROWS = 20
"""Rows of the first table in the terminal."""
_MOST_METRICS = 4  # columns of a table in words
# two are soon compared by eye
_EXPLAINED = ("speed-up", "fraction of ideal", "gap", "fastest")  # columns whose meaning is printed
_FEWEST_IN_COMMON = 3  # winners, for what they have in common to be said once
_LARGE = 1e6  # from which on numbers have a unit with a prefix
_MOST_MISSES = 3  # that are named in a line


def write_answer(outputs: Outputs, module: str, table: pd.DataFrame) -> None:
    """Write the answer in one sentence to `summary.json`: the study's own headline, which may be that nothing fits.

    Without one it is the title of the figure that answers the question, or where there is no figure, what the winners
    have in common.
    """
    record = outputs.read_json("summary")
    figures = study_figures(outputs, module, table)
    # without results, figures have nothing to say
    key = next(iter(figures), None) if (table["status"] == "ok").any() else None
    headline = getattr(plugins.load("study", module), "headline", None)
    if headline is not None:
        sentence = headline(outputs, table)
    else:
        sentence = conclude(record, ranked_winners(record, table)) if key is None else title(key[1])
    outputs.write_json("summary", {**record, "answer": sentence})


def answer(outputs: Outputs, table: pd.DataFrame, *, verbose: bool = False) -> Iterator[Table | Text | str]:
    """Yield the question, the winners of the scenarios, and the answer in one sentence, unless that came first."""
    from rich.text import Text

    record = outputs.read_json("summary")
    if record["question"]:
        yield Text(record["question"], style="bold")
    parts = list(answer_tables(outputs, table, verbose=verbose))
    for part in parts:
        yield part
        headings = {str(column.header) for column in getattr(part, "columns", ())}
        headings -= set() if "fastest" in headings else {"speed-up"}  # without draws of errors it has no interval
        meanings = [f"{name}: {COLUMNS[name]}" for name in _EXPLAINED if name in headings]
        yield from ["; ".join(meanings)] if meanings else []
    if record["answer"] and not any(record["answer"].startswith(str(part)) for part in parts[:1]):
        yield Text(f"in short: {record['answer']}", style="bold")


def answer_tables(
    outputs: Outputs, table: pd.DataFrame, *, verbose: bool = False, most: int = MOST_ROWS
) -> Iterator[Table | str]:
    """Yield what answers the question: the study's own tables, or the winners in words; all columns where verbose."""
    module = outputs.read_config()["study"].get("module")
    study = plugins.load("study", module) if module else None
    if study is not None and hasattr(study, "answer") and not verbose:
        yield from study.answer(outputs, table)
    else:
        yield from tables_of_winners(outputs, table, verbose=verbose, most=most)
        if study is not None and hasattr(study, "details"):
            yield from study.details(outputs, table)


def tables_of_winners(
    outputs: Outputs, table: pd.DataFrame, *, verbose: bool = False, most: int = MOST_ROWS
) -> Iterator[Table | str]:
    """Yield the winners, those that gain most first: in words at most 20 rows of them; all columns where verbose."""
    record = outputs.read_json("summary")
    best = ranked_winners(record, table, apart=True)
    if verbose:
        yield summary(outputs, table)
    elif len(best):
        measure = helpful_measurement(record, outputs.read_config().get("system"))
        lines = best.groupby(_apart(record, best), sort=False, dropna=False).ngroup().to_numpy()
        yield winners_in_words(record, best[lines < most], of=best)
        yield from filter(None, [_ties_in_words(record, table, len(best))])
        if (left := int(lines.max()) + 1 - most) > 0:
            what = "scenarios" if len(_apart(record, best)) == 1 else "rows"
            yield f"and {left} {what} more: -v lists them"
        yield from filter(None, [measure, _baseline_in_words(record, outputs.read_config()["study"])])


def _baseline_in_words(record: Mapping[str, Any], study: Mapping[str, Any]) -> str:
    """What gains are over, in a study without texts of its own; "" in others, and where nothing is relative."""
    import pandas as pd

    values = study.get("baseline") or {}
    if study.get("module") != "plain" or not record["gain"] or not values:
        return ""
    return f"baseline: {choice_in_words(pd.Series(values, dtype=object), values)}"


def _ties_in_words(record: Mapping[str, Any], table: pd.DataFrame, count: int) -> str:
    """How many winners are as good with another value of a knob; "" where none is."""
    ties = Contest.of(record).ties(table, record["goals"])
    texts = ", ".join(f"{words(path)} makes no difference in {number} of {count}" for path, number in ties.items())
    return f"{texts}; the default is shown" if texts else ""


def _apart(record: Mapping[str, Any], best: pd.DataFrame) -> list[str]:
    """Columns that tell rows of the shown table apart: the scenario, and what the study names."""
    return ["scenario", *(path for path in Contest.of(record).answer.by if path in best)]


def winners_in_words(record: Mapping[str, Any], best: pd.DataFrame, of: pd.DataFrame | None = None) -> Table:
    """A row for each winner: what was chosen in words, the metrics that the study shows, and what limits it.

    What all winners of three scenarios or more (of: all, where `best` is some) have in common is said once, below the
    table. Where the study has a path whose values are columns, a row has the first quantity at each of them.
    """
    every = best if of is None else of
    if Contest.of(record).answer.across in best:
        return _winners_across(record, best)
    apart = _apart(record, best)
    knobs = [path for path in dict.fromkeys((*record["shown"], *record["knobs"])) if path in best]
    over = Contest.of(record).answer.over
    # metrics among the shown columns are no choices
    knobs = [path for path in knobs if path not in record["units"] and path not in (*apart, *over)]
    common = common_choices(every, knobs) if len(every) >= _FEWEST_IN_COMMON else []
    metrics = _shown_metrics(record, best)
    shared = choice_in_words(best.iloc[0], common) if common else ""
    varied = [path for path in knobs if path not in common]
    choices = [read_decision(record, row["key"]) for _, row in best.iterrows()]
    # limits are of the winner of a scenario, not of each row
    limited = any(record["limits"].values()) and len(apart) == 1 and not over
    notes = [f"all: {shared}"] if shared else []
    notes += [f"each at its worst by {', '.join(map(words, over))}"] if over else []
    notes += _advice_lines(every["scenario"], [read_decision(record, key) for key in every["key"]])
    surely = any(choices)
    names = [
        *apart,
        *metrics,
        *(["fastest"] if surely else []),
        *(["with"] if varied else []),
        *(["limited by"] if limited else []),
    ]
    shown = _empty_table(names, metrics, caption="; ".join(notes) or None)
    for (_, row), choice in zip(best.iterrows(), choices, strict=True):
        keys = [str(row["scenario"]), *(_value_text(row[path], path) for path in apart[1:])]
        cells = [_metric(row, name, record, decision=choice) for name in metrics]
        cells += [fastest_in_words(choice)] if surely else []
        texts = [choice_in_words(row, varied)] if varied else []
        limits = [limits_text(record["limits"].get(row["scenario"], {}))] if limited else []
        shown.add_row(*keys, *cells, *texts, *limits)
    return shown


def table_of_runs(runs: Sequence[tuple[Mapping[str, str], Outputs]]) -> Iterator[Table | str]:
    """Yield a row for each winner of several runs, and which run has the best of each scenario.

    runs: the values that differ, by path, and the folder.
    """
    best = [_winners_of_run(values, outputs) for values, outputs in runs]
    rows = [row for run in best for row in run]
    headings = dict.fromkeys(name for row in rows for name in row.cells if name != "with")
    headings |= {"with": None} if any(row.cells["with"] for row in rows) else {}
    shown = _empty_table(list(headings), [name for row in rows for name in row.numbers], caption=None)
    for row in rows:
        shown.add_row(*(row.cells.get(name, "–") for name in headings))
    yield shown
    yield from _best_runs(rows)


@dataclass(frozen=True)
class _RunWinner:
    """The winner of a scenario in one of several runs. value: of the first objective, so that less is better."""

    run: str
    scenario: str
    cells: Mapping[str, str]
    numbers: Sequence[str]
    value: float


def _winners_of_run(values: Mapping[str, str], outputs: Outputs) -> Iterator[_RunWinner]:
    record = outputs.read_json("summary")
    best = ranked_winners(record, outputs.read_table("results"))
    first, goal = next(iter(record["goals"].items()))
    metrics, config = _shown_metrics(record, best), outputs.read_config()
    knobs = [path for path in record["knobs"] if path in best]
    for _, row in best.iterrows():
        cells = {**values, "scenario": str(row["scenario"])}
        choice = read_decision(record, row["key"])
        cells |= {name: _metric(row, name, record, decision=choice) for name in metrics}
        # values that every run begins with go without saying
        chosen = [path for path in knobs if path.endswith(".name") or str(row[path]) != str(get_path(config, path))]
        cells["with"] = choice_in_words(row, chosen)
        sign = 1.0 if goal == "minimize" else -1.0
        run = " ".join(f"{path}={value}" for path, value in values.items())
        yield _RunWinner(run, str(row["scenario"]), cells, metrics, sign * float(row[first]))


def _best_runs(rows: Sequence[_RunWinner]) -> Iterator[str]:
    """Yield which run is best in how many of the scenarios that several have."""
    scenarios: dict[str, list[_RunWinner]] = {}
    for row in rows:
        scenarios.setdefault(row.scenario, []).append(row)
    wins = Counter(min(same, key=lambda row: row.value).run for same in scenarios.values() if len(same) > 1)
    if len(scenarios) == 1 and wins:
        yield f"best: {next(iter(wins))}"
    elif wins:
        yield "best: " + ", ".join(f"{run} in {count} scenarios" for run, count in wins.most_common())


def _shown_metrics(record: Mapping[str, Any], best: pd.DataFrame) -> list[str]:
    """Metrics of the first table: those that the study says, else the gain, the first objective and others."""
    relation = record["gain"]
    # each once, in order of importance
    wanted = dict.fromkeys((*([relation] if relation else []), next(iter(record["goals"])), *record["shown"]))
    usual = [name for name in wanted if name in record["units"] and name in best][:_MOST_METRICS]
    return [name for name in Contest.of(record).answer.shows if name in best] or usual


def _winners_across(record: Mapping[str, Any], best: pd.DataFrame) -> Table:
    """A row for each scenario, with the first quantity of its winner at every value of one path."""
    across, apart, (name, *_) = Contest.of(record).answer.across, _apart(record, best), _shown_metrics(record, best)
    values = sorted(best[across].dropna().unique().tolist())
    columns = [f"{words(name)}, {_value_text(value, across)}" for value in values]
    shown = _empty_table([*apart, *columns], columns, caption=None)
    for keys, rows in best.groupby(apart, sort=False, dropna=False):
        texts = [str(keys[0]), *(_value_text(key, path) for key, path in zip(keys[1:], apart[1:], strict=True))]
        unit = record["units"][name]
        at = {row[across]: cell(row[name], unit) for _, row in rows.iterrows()}
        shown.add_row(*texts, *(at.get(value, "–") for value in values))  # no winner at this value
    return shown


def _empty_table(names: Sequence[str], numbers: Sequence[str], *, caption: str | None) -> Table:
    """A table without rows; its columns in words, those of numbers to the right."""
    from rich.table import Table

    shown = Table(box=None, pad_edge=False, caption=caption, caption_justify="left")
    for name in names:
        heading = name if " " in name else words(name)
        shown.add_column(
            heading, justify="right" if name in numbers else "left", no_wrap=name not in {"with", "limited by"}
        )
    return shown


def _value_text(value: Any, path: str) -> str:
    """A value of a path as a person reads it: `150 GB/s`, `1,024`, `mixed`."""
    if isinstance(value, float) and (abs(value) >= _LARGE or not value.is_integer()):
        return quantity_text(value, path)
    if isinstance(value, int | float | np.number) and not isinstance(value, bool):
        return f"{value:,.0f}"
    return label(str(value))


def _metric(row: Any, name: str, record: Mapping[str, Any], *, decision: Decision | None = None) -> str:
    value = row[name]
    if name != record["gain"] or value != value:  # NaN: not relative to a baseline
        return cell(value, record["units"][name])
    return gain_in_words(value) if decision is None else decision.gain(float(value))


def fastest_in_words(decision: Decision | None) -> str:
    """Probability that a winner is the fastest, in words: `93 %`; draws of errors never make it certain."""
    if decision is None:
        return "–"
    return "over 99 %" if decision.fastest > _SURE else f"{100 * decision.fastest:.0f} %"


_SURE = 0.99  # beyond it, errors that were not drawn matter more


def _advice_lines(scenarios: Iterable[Any], choices: Sequence[Decision | None]) -> Iterator[str]:
    """Yield what follows for the scenarios whose winners do not stand out of what predictions are off by.

    Of a single scenario its own advice, else one sentence for each kind of advice, with the scenarios in order of name.
    """
    alike: dict[str, list[str]] = {}
    for scenario, choice in zip(scenarios, choices, strict=True):
        if choice is None or not choice.advice:
            continue
        if len(choices) == 1 or choice.is_slower:
            alike.setdefault(choice.advice, []).append(str(scenario))
        elif choice.spans_one or not choice.rival:
            alike.setdefault(NO_GAIN, []).append(str(scenario))
        else:  # faster than the baseline, whichever of them is the fastest
            alike.setdefault(AS_GOOD, []).append(f"{scenario}: {choice.rival}")
    for advice, names in alike.items():
        yield advice if len(choices) == 1 else _advice_for(advice, names, len(choices))


def _advice_for(advice: str, names: Sequence[str], count: int) -> str:
    """Advice for some of several scenarios: names where they are few, else how many they are."""
    few = len(names) <= _FEW_NAMES
    ordered = sorted(names, key=natural_key)
    which = ", ".join(ordered) if few else f"{len(names)} of {count}"
    if advice == NO_GAIN:
        return f"nothing is surely faster than the baseline for {which}"
    if advice == AS_GOOD:
        return f"another option may be as fast for {'; '.join(ordered) if few else which}"
    return f"{advice}, for {which}"


_FEW_NAMES = 4  # scenarios that are named


def ranked_winners(record: Mapping[str, Any], table: pd.DataFrame, *, apart: bool = False) -> pd.DataFrame:
    """Winners of the scenarios, those that gain most first.

    apart: one for each combination of values by which the study tells answers apart, if it has such, in their order.
    """
    contest, gain = Contest.of(record), record["gain"]
    best = contest.winners(table, record["goals"], apart=apart)
    if apart and (contest.answer.by or contest.answer.across):
        return best
    name, goal = (gain, "maximize") if gain in best and len(best) > 1 else next(iter(record["goals"].items()))
    return best.sort_values(name, ascending=goal == "minimize", kind="stable")


def conclude(record: Mapping[str, Any], best: pd.DataFrame) -> str:
    """One sentence: what wins most often, how much the winners gain in the geometric mean, and at most.

    record: `summary.json`. best: a row for each scenario, the one that gains most first. Where nothing is relative to a
    baseline: the best value of the first objective, and how it was reached. "" where no scenario has a winner.
    """
    name = record["gain"]
    if best.empty:
        return ""
    knobs = [path for path in record["knobs"] if path in best]
    if name not in best or not (best[name] > 0).all():  # a geometric mean needs positive gains
        return _best_value(record, best, knobs)
    how = _what_wins(best, knobs)
    if len(best) == 1:
        gain = gain_in_words(best.iloc[0][name])
        return f"{how} is {gain} {'as' if gain == AS_FAST else 'than'} the baseline" if how else ""
    mean, first = geometric_mean(best[name]), best.iloc[0]
    gains = f"the geometric mean of {words(name)} is {mean:.2f}x over the baseline"
    most = f"the largest {first[name]:.2f}x ({first['scenario']})"
    return f"{how}; {gains}, {most}" if how else f"{gains}, {most}"


def _best_value(record: Mapping[str, Any], best: pd.DataFrame, knobs: Sequence[str]) -> str:
    """The best first objective of all scenarios, in which scenario, and how."""
    name, goal = next(iter(record["goals"].items()))
    row = best.sort_values(name, ascending=goal == "minimize", kind="stable").iloc[0]
    choice = choice_in_words(row, knobs)
    place = f" in {row['scenario']}" if len(best) > 1 else ""
    least = "least" if goal == "minimize" else "largest"
    return f"the {least} {words(name)}{place} is {cell(row[name], record['units'][name])}" + (
        f", with {choice}" if choice else ""
    )


def _what_wins(best: pd.DataFrame, knobs: Sequence[str]) -> str:
    """What the winners have in common, or what wins most often, by the first knob that names something."""
    if len(best) == 1:
        return choice_in_words(best.iloc[0], knobs)
    common = choice_in_words(best.iloc[0], common_choices(best, knobs))
    choice = next((path for path in knobs if path.endswith(".name") and best[path].nunique() > 1), None)
    if choice is None:
        return _what_wins_where(best, knobs, common)
    counts = best[choice].value_counts()
    often = choice_in_words(best[best[choice] == counts.index[0]].iloc[0], [choice])
    return f"{often} wins in {counts.iloc[0]} of {len(best)} scenarios" + (
        f" (all winners: {common})" if common else ""
    )


def _what_wins_where(best: pd.DataFrame, knobs: Sequence[str], common: str) -> str:
    """Which value of the first knob of texts wins in which scenarios; what is common to all where none differs."""
    varied = (path for path in knobs if best[path].nunique() > 1 and isinstance(best[path].iloc[0], str))
    choice = next(varied, None)
    if choice is None:
        return f"{common} wins everywhere" if common else ""
    texts = []
    for _, rows in best.groupby(choice, sort=False):
        names = f" ({', '.join(map(str, rows['scenario']))})" if len(rows) <= _FEWEST_IN_COMMON else ""
        texts.append(f"{choice_in_words(rows.iloc[0], [choice])} wins in {len(rows)} of {len(best)} scenarios{names}")
    return ", ".join(texts) + (f"; all winners: {common}" if common else "")


def geometric_mean(values: Iterable[Any]) -> float:
    """Geometric mean of positive values."""
    return float(np.exp(np.log(np.asarray(list(values), float)).mean()))


def claims_line(rows: Sequence[Mapping[str, Any]], study: str) -> str:
    """One line on published claims: how many predictions are within, which are missed by how much, where they are; ""
    where there are none.
    """
    if not rows:
        return ""
    count = claims_count(rows)
    if not count:
        alike = len({row["reason"] for row in rows}) == 1
        return str(claims_table([dict(row) for row in rows])) if alike else "no claim was tested"
    missed = [row for row in rows if row["within"] is False and row["basis"] == "predicted"]  # other bases cannot miss
    names = [f"{row['id'].partition('.')[2]} {error_text(row)}".strip() for row in missed[:_MOST_MISSES]]
    more = f" and {len(missed) - _MOST_MISSES} more" if len(missed) > _MOST_MISSES else ""
    misses = f"; missed: {', '.join(names)}{more}" if missed else ""
    return f"claims: {count}{misses} (python -m dse results claims study={study}, or -v, lists them)"


@output_files.working_on_folders
def show_claims(words: Sequence[str]) -> int:
    """`results claims study=<name> [output_dir=<folder>]`: the published claims of the newest run, with our values."""
    options = pairs(words, {"study": "", "output_dir": "outputs"})
    rows = Outputs.latest(Path(options["output_dir"]), options["study"]).read_json("claims")
    terminal = console()
    terminal.print(claims_table(rows))
    if count := claims_count(rows):
        terminal.print(count)
    return 0
