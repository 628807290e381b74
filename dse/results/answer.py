"""What a person reads first: the winners, a sentence that concludes, the claims in a line; and the command `claims`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dse.errors import pairs
from dse.results import output_files
from dse.results.pareto import winners
from dse.results.report import claims_count, claims_table, console, error_text, summary
from dse.results.run_folder import Outputs

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table

_MOST_ROWS = 20
_MOST_MISSES = 3  # that are named in a line


def answer(outputs: Outputs, table: pd.DataFrame, *, verbose: bool = False) -> Iterator[Table | str]:
    """Yield the winners of the scenarios, at most 20 rows of them unless verbose, and one sentence of conclusion."""
    best = _by_order(outputs, winners(table, outputs.read_json("summary")["goals"]))
    few = best if verbose or len(best) <= _MOST_ROWS else best.head(_MOST_ROWS)
    yield summary(outputs, table[table["scenario"].isin(few["scenario"])])
    if len(few) < len(best):
        yield f"and {len(best) - len(few)} scenarios more: -v lists them"
    if text := conclude(outputs, best):
        yield text


def _by_order(outputs: Outputs, best: pd.DataFrame) -> pd.DataFrame:
    """Winners, those that gain most first."""
    name, goal = outputs.read_json("summary")["order"]
    return best.sort_values(name, ascending=goal == "minimize", kind="stable") if name in best else best


def conclude(outputs: Outputs, best: pd.DataFrame) -> str:
    """One sentence: how much the winners gain in the geometric mean and at most, and what wins most often.

    best: a row for each scenario, the one that gains most first. "" where nothing is relative to a baseline.
    """
    import numpy as np

    record = outputs.read_json("summary")
    name, _ = record["order"]
    if name not in best or record["units"].get(name) != "x" or not (best[name] > 0).all():
        return ""
    mean = float(np.exp(np.log(best[name].to_numpy(float)).mean()))
    gains = f"{name} {mean:.2f}x"
    if len(best) > 1:
        first = best.iloc[0]
        gains += f" in the geometric mean of {len(best)} scenarios, at most {first[name]:.2f}x ({first['scenario']})"
    choice = next((path for path in record["knobs"] if path.endswith(".name") and path in best), None)
    if choice is None or best[choice].dropna().empty:
        return f"in short: {gains}"
    counts = best[choice].value_counts()
    often = (
        f"; {counts.index[0]} wins in {counts.iloc[0]} of {len(best)}" if len(best) > 1 else f" by {counts.index[0]}"
    )
    return f"in short: {gains}{often}"


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
