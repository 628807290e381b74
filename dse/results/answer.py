"""What a person reads first: the winners, a sentence that concludes, the claims in a line; and the command `claims`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dse import plugins
from dse.errors import pairs
from dse.plots import title
from dse.plots.quantities import words
from dse.results import output_files
from dse.results.pareto import winners
from dse.results.report import claims_count, claims_table, console, error_text, limits_text, summary
from dse.results.run_folder import Outputs
from dse.results.words import AS_FAST, cell, choice_in_words, common_choices, gain_in_words

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table
    from rich.text import Text

_MOST_ROWS = 20
_MOST_METRICS = 4  # columns of a table in words
_FEWEST_IN_COMMON = 3  # winners, for what they have in common to be said once
_MOST_MISSES = 3  # that are named in a line


def write_answer(outputs: Outputs, module: str, table: pd.DataFrame) -> None:
    """Write the answer in one sentence to `summary.json`: the title of the figure that answers the study's question, or
    where the study has no figure of its own, what the winners tell.
    """
    record = outputs.read_json("summary")
    figures = plugins.load("study", module).figures(table, outputs.read_table("timelines"))
    key = next(iter(figures), None) if (table["status"] == "ok").any() else None
    sentence = conclude(record, ranked_winners(record, table)) if key is None else title(key[1])
    outputs.write_json("summary", {**record, "answer": sentence})


def answer(outputs: Outputs, table: pd.DataFrame, *, verbose: bool = False) -> Iterator[Table | Text | str]:
    """Yield the question, the winners of the scenarios, and the answer in one sentence."""
    from rich.text import Text

    record = outputs.read_json("summary")
    if record["question"]:
        yield Text(record["question"], style="bold")
    module = outputs.read_config()["study"].get("module")
    study = plugins.load("study", module) if module else None
    if study is not None and hasattr(study, "answer") and not verbose:
        yield from study.answer(outputs, table)
    else:
        yield from tables_of_winners(outputs, table, verbose=verbose)
    if record["answer"]:
        yield Text(f"in short: {record['answer']}", style="bold")


def tables_of_winners(outputs: Outputs, table: pd.DataFrame, *, verbose: bool = False) -> Iterator[Table | str]:
    """Yield the winners, those that gain most first: in words at most 20 rows of them; all columns where verbose."""
    record = outputs.read_json("summary")
    best = ranked_winners(record, table)
    if verbose:
        yield summary(outputs, table)
    elif len(best):
        yield winners_in_words(record, best.head(_MOST_ROWS))
        if len(best) > _MOST_ROWS:
            yield f"and {len(best) - _MOST_ROWS} scenarios more: -v lists them"


def winners_in_words(record: Mapping[str, Any], best: pd.DataFrame) -> Table:
    """A row for each winner: what was chosen in words, the metrics that the study shows, and what limits it.

    What all winners of three scenarios or more have in common is said once, below the table.
    """
    from rich.table import Table

    knobs = [path for path in dict.fromkeys((*record["shown"], *record["knobs"])) if path in best]
    knobs = [path for path in knobs if path not in record["units"]]
    common = common_choices(best, knobs) if len(best) >= _FEWEST_IN_COMMON else []
    relation = record["gain"]
    wanted = dict.fromkeys((*([relation] if relation else []), next(iter(record["goals"])), *record["shown"]))
    metrics = [name for name in wanted if name in record["units"] and name in best][:_MOST_METRICS]
    shared = choice_in_words(best.iloc[0], common) if common else ""
    shown = Table(box=None, pad_edge=False, caption=f"all: {shared}" if shared else None, caption_justify="left")
    shown.add_column("scenario", no_wrap=True)
    for name in metrics:
        shown.add_column(words(name), justify="right", no_wrap=True)
    varied = [path for path in knobs if path not in common]
    limited = any(record["limits"].values())
    for name in (["with"] if varied else []) + (["limited by"] if limited else []):
        shown.add_column(name)
    for _, row in best.iterrows():
        cells = [_metric(row[name], name, record["units"][name], relation=relation) for name in metrics]
        texts = [choice_in_words(row, varied)] if varied else []
        limits = [limits_text(record["limits"].get(row["scenario"], {}))] if limited else []
        shown.add_row(str(row["scenario"]), *cells, *texts, *limits)
    return shown


def _metric(value: Any, name: str, unit: str, *, relation: str | None) -> str:
    return gain_in_words(value) if name == relation and value == value else cell(value, unit)


def ranked_winners(record: Mapping[str, Any], table: pd.DataFrame) -> pd.DataFrame:
    """Winners of the scenarios, those that gain most first."""
    best, gain = winners(table, record["goals"]), record["gain"]
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
    if name not in best or not (best[name] > 0).all():
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
        return f"{common} wins everywhere" if common else ""
    counts = best[choice].value_counts()
    often = choice_in_words(best[best[choice] == counts.index[0]].iloc[0], [choice])
    return f"{often} wins in {counts.iloc[0]} of {len(best)} scenarios" + (
        f" (all winners: {common})" if common else ""
    )


def geometric_mean(values: Iterable[Any]) -> float:
    """Geometric mean of positive values."""
    import numpy as np

    return float(np.exp(np.log(np.asarray(list(values), float)).mean()))


def claims_line(rows: Sequence[Mapping[str, Any]], study: str) -> str:
    """One line on published claims: how many predictions are within, which are missed by how much, where they are."""
    if not rows:
        return "this study checks no published claims"
    count = claims_count(rows)
    if not count:
        return (
            str(claims_table([dict(row) for row in rows]))
            if len({row["reason"] for row in rows}) == 1
            else "no claim was tested"
        )
    missed = [row for row in rows if row["within"] is False and row["basis"] == "predicted"]
    names = [f"{row['id'].partition('.')[2]} {error_text(row)}".strip() for row in missed[:_MOST_MISSES]]
    more = f" and {len(missed) - _MOST_MISSES} more" if len(missed) > _MOST_MISSES else ""
    misses = f"; missed: {', '.join(names)}{more}" if missed else ""
    return f"claims: {count}{misses} (python -m dse claims study={study}, or -v, lists them)"


@output_files.working_on_folders
def show_claims(words: Sequence[str]) -> int:
    """`claims study=<name> [output_dir=<folder>]`: the published claims of the newest run, beside what came out."""
    options = pairs(words, {"study": "", "output_dir": "outputs"})
    rows = Outputs.latest(Path(options["output_dir"]), options["study"]).read_json("claims")
    terminal = console()
    terminal.print(claims_table(rows))
    if count := claims_count(rows):
        terminal.print(count)
    return 0
