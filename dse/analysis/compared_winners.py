"""Winners of two runs side by side: what each scenario takes, by how much that changed, and what wins."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dse.plots.labels import words
from dse.results.pareto import Contest
from dse.results.run_folder import FinishedRun, read
from dse.results.words import cell, choice_in_words, common_choices

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table

_SAME = 5e-4  # change from which on a percentage with a digit after the point shows it


@dataclass(frozen=True)
class ComparedWinner:
    """A scenario that has a winner in two runs. values: of the first objective; choices: what was chosen, in words."""

    scenario: str
    values: tuple[float, float]
    choices: tuple[str, str]

    @property
    def change(self) -> float:
        """Share by which the value of the second run is larger."""
        return self.values[1] / self.values[0] - 1 if self.values[0] else float("nan")


def compared_winners(first: FinishedRun, second: FinishedRun) -> list[ComparedWinner]:
    """Winners of the scenarios that both runs have, in the order of the first; none where their objectives differ."""
    if first.goals != second.goals:
        return []
    objective = next(iter(first.goals))
    both = [_winners(run) for run in (first, second)]
    every = [row for rows in both for row in rows.values()]
    knobs = list(dict.fromkeys([*first.knobs, *second.knobs]))
    varied = _varied(every, knobs)
    return [
        ComparedWinner(
            name,
            (float(row[objective]), float(both[1][name][objective])),
            (_choice(row, varied), _choice(both[1][name], varied)),
        )
        for name, row in both[0].items()
        if name in both[1]
    ]


def _winners(run: FinishedRun) -> dict[str, pd.Series[Any]]:
    contest = Contest.of(run.summary)
    columns = dict.fromkeys(["scenario", "status", *contest.columns, *run.goals, *run.knobs])
    table = read(run, [name for name in columns if name in run.columns])
    if not (table["status"] == "ok").any():
        return {}
    won = contest.winners(table, run.goals)
    return {str(row["scenario"]): row for _, row in won.iterrows()}


def _varied(rows: Sequence[pd.Series[Any]], knobs: Sequence[str]) -> list[str]:
    """Knobs in which winners of either run differ; all where none do."""
    import pandas as pd

    table = pd.DataFrame(list(rows)).astype(object)
    present = [path for path in knobs if path in table]
    common = common_choices(table, present)
    return [path for path in present if path not in common] or present


def _choice(row: pd.Series[Any], knobs: Sequence[str]) -> str:
    return choice_in_words(row, [path for path in knobs if path in row]) or "–"


def change_in_words(change: float) -> str:
    """A change as a percentage with its sign.

    >>> change_in_words(0.0321), change_in_words(-0.5), change_in_words(0.0)
    ('+3.2 %', '-50.0 %', 'none')
    """
    if change != change:
        return "–"
    return "none" if abs(change) < _SAME else f"{100 * change:+.1f} %"


def winners_table(
    winners: Sequence[ComparedWinner], names: tuple[str, str], objective: tuple[str, str]
) -> Iterator[Table]:
    """Yield a row for each scenario. names: of the runs; objective: the metric that decides, and its unit."""
    from rich.table import Table

    if not winners:
        return
    metric, unit = objective
    caption = f"A = {names[0]}; B = {names[1]}; A, B: {words(metric)} of the winner"
    shown = Table(box=None, pad_edge=False, caption=caption, caption_justify="left")
    for name in ("scenario", "A", "B", "change", "winner A", "winner B"):
        shown.add_column(name, justify="right" if name in ("A", "B", "change") else "left")
    for winner in winners:
        cells = [cell(value, unit) for value in winner.values]
        shown.add_row(winner.scenario, *cells, change_in_words(winner.change), *winner.choices)
    yield shown


def as_json(winners: Sequence[ComparedWinner]) -> list[Mapping[str, Any]]:
    """Record of the winners, for compare.json."""
    return [
        {"scenario": winner.scenario, "values": list(winner.values), "winners": list(winner.choices)}
        for winner in winners
    ]
