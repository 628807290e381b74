"""The result of `dse.run`: the tables, the answer and the figures of a finished study, read when they are asked for."""

from __future__ import annotations

import html
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dse import plugins
from dse.config.overrides import override
from dse.errors import ConfigError, Problem, did_you_mean
from dse.errors.terminal import quiet
from dse.results import report
from dse.results.answer import ranked_winners, winners_in_words
from dse.results.decisions import Decision, metrics_of_winners
from dse.results.pareto import Contest
from dse.results.run_folder import CommandAnswer, Outputs

if TYPE_CHECKING:
    import pandas as pd

    from dse.plots import Draw


@dataclass(frozen=True)
class StudyResult:
    """Result of a finished study.

    Attributes
    ----------
    folder
        The folder of the run, `outputs/<study>/<time>`, with all files.
    """

    folder: Path

    @property
    def study(self) -> str:
        """Name of the study."""
        return str(self._summary["study"])

    @property
    def question(self) -> str:
        """The question that the study asks, in one sentence."""
        return str(self._summary.get("question", ""))

    @property
    def answer(self) -> str:
        """The answer of this run, in one sentence."""
        return str(self._summary.get("answer", ""))

    @cached_property
    def table(self) -> pd.DataFrame:
        """All evaluated points, one row each.

        Columns: scenario, key, status, reason, engine, baseline, on_front, the searched knobs by dotted path, and
        metrics and relations with units in their names.
        """
        return self._outputs.read_table("results")

    @property
    def front(self) -> pd.DataFrame:
        """Rows of the table on the Pareto front of their scenario, in the order of the first objective."""
        first, goal = next(iter(self._summary["goals"].items()))
        rows = self.table[self.table["on_front"]]
        order = rows.sort_values(first, ascending=goal == "minimize", kind="stable")
        return order.sort_values("scenario", kind="stable", key=self._place).reset_index(drop=True)

    @property
    def winners(self) -> pd.DataFrame:
        """The best row of each scenario by the first objective; no bound or baseline that the study compares with.

        `speedup_low`, `speedup_high`: 90 % interval of the gain; `fastest`: probability that no other point is faster.
        """
        best = Contest.of(self._summary).winners(self.table, self._summary["goals"])
        metrics = metrics_of_winners(self._summary)
        names = dict.fromkeys(name for values in metrics.values() for name in values)
        for name in names:
            best[name] = [metrics.get(str(key), {}).get(name) for key in best["key"]]
        return best

    @property
    def decisions(self) -> dict[str, Decision]:
        """Key of a winner -> whether it stands out of what predictions are off by; empty without drawn errors."""
        entries = self._summary.get("decisions") or {}
        return {str(entry.get("preferred") or key): Decision.read(entry) for key, entry in entries.items()}

    @property
    def claims(self) -> pd.DataFrame:
        """Published values beside ours, one row each; empty where the study checks none.

        Columns: id, statement, published, ours, unit, error, within (None: not tested), basis, reason, source, ....
        """
        import pandas as pd

        return pd.DataFrame(self._outputs.read_json("claims"))

    @property
    def figures(self) -> tuple[str, ...]:
        """Names of the figures that `plot` draws."""
        return tuple(self._draws)

    def plot(self, name: str = "front", *, width: str = "page") -> Any:
        """Draw a figure of this run.

        Parameters
        ----------
        name
            `front`, the points of every scenario with their Pareto front; or one of `figures`.
        width
            `page` or `column` of a paper.

        Returns
        -------
        matplotlib.figure.Figure
            The figure; pyplot does not know of it. A notebook shows it where it is the last value of a cell.

        Raises
        ------
        ConfigError
            If no figure has this name.
        """
        from dse.plots.canvas import draw

        if name not in self._draws:
            way = did_you_mean(name, self._draws) if self._draws else "the study has one objective and draws none"
            raise ConfigError([Problem("plot", "is no figure of this study", name, way)])
        figure = draw(self._draws[name], width).figure
        figure._repr_png_ = partial(_png, figure)  # what a notebook asks for
        return figure

    @cached_property
    def optuna(self) -> Any:
        """The run as a study of Optuna, with all points as trials; by scenario where it has several."""
        studies = plugins.load("view", "optuna")(self._outputs)
        return next(iter(studies.values())) if len(studies) == 1 else studies

    def robustness(self, **options: Any) -> CommandAnswer:
        """Tell whether the answer holds with other constants, as `results robustness` does."""
        return self._ask("results robustness", options)

    def rules(self, **options: Any) -> CommandAnswer:
        """Learn which option is best when, as `results rules` does."""
        return self._ask("results rules", options)

    def importance(self, **options: Any) -> CommandAnswer:
        """Rank the knobs by how much they matter, as `results importance` does."""
        return self._ask("results importance", options)

    def timeline(self, key: str, **options: Any) -> CommandAnswer:
        """Run one point again, as `results timeline` does: its timeline as picture and trace.

        key: the first letters of its key in the table.
        """
        return self._ask("results timeline", {"key": key, **options})

    def compare(self, other: StudyResult | str | Path) -> CommandAnswer:
        """Put this run and another one side by side, as `results compare` does."""
        root = self.folder.parents[1]
        return _command("results compare", [str(self.folder), _word(other), f"output_dir={root}"])

    def export(self, to: str, *, out: str | Path | None = None, **values: Any) -> CommandAnswer:
        """Write the plan of this run as settings of a tool, as `settings export` does.

        to: `vllm`, `megatron`, .... out: a folder. values: of the plan, such as `parallel__tp=4`.
        """
        place = self.folder / "export" / to if out is None else Path(out)
        words = [f"plan={self.folder / 'plan.yaml'}", f"to={to}", f"out={place}"]
        return _command("settings export", [*words, *(override(name, value) for name, value in values.items())])

    def _ask(self, command: str, options: Mapping[str, Any]) -> CommandAnswer:
        """Ask a command about this run."""
        words = [f"{name}={_word(value)}" for name, value in options.items()]
        return _command(command, [f"study={self.folder}", *words])

    @cached_property
    def _draws(self) -> dict[str, Draw]:
        """Functions that draw each figure, by name."""
        front = [("front", draw) for _, draw in report.front_figure(self._outputs, self.table)]
        return {**dict(front), **dict(report.figures(self._outputs, self._module, self.table))}

    @property
    def _module(self) -> str:
        return str(self._outputs.read_config()["study"]["module"])

    @property
    def _outputs(self) -> Outputs:
        return Outputs(self.folder)

    @cached_property
    def _summary(self) -> dict[str, Any]:
        summary: dict[str, Any] = self._outputs.read_json("summary")
        return summary

    def _place(self, names: pd.Series[Any]) -> pd.Series[Any]:
        """Place of each scenario in the order of the table."""
        order = {name: place for place, name in enumerate(self.table["scenario"].unique())}
        return names.map(order)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.study}: {len(self.table)} points, {self.folder}>"

    def _repr_html_(self) -> str:
        """The question, the answer and the winners in words, as a notebook shows them."""
        shown = winners_in_words(self._summary, ranked_winners(self._summary, self.table, apart=True))
        texts = [f"<p><b>{html.escape(text)}</b></p>" for text in (self.question, self.answer) if text]
        rows = zip(*(column.cells for column in shown.columns), strict=True)
        lines = [
            _row((str(column.header) for column in shown.columns), "th"),
            *(_row(map(str, row), "td") for row in rows),
        ]
        note = f"<p>{html.escape(str(shown.caption))}</p>" if shown.caption else ""
        return "\n".join([*texts, f"<table>{''.join(lines)}</table>{note}<p>{html.escape(str(self.folder))}</p>"])


def _command(name: str, words: Sequence[str]) -> CommandAnswer:
    """Run a command. Raises ConfigError, also where no installed plug-in offers it."""
    with quiet():
        answer: CommandAnswer = plugins.load("command", name)(words)
    return answer


def _word(value: Any) -> str:
    """A value as commands on finished runs read it."""
    if isinstance(value, StudyResult):
        return str(value.folder)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return ",".join(f"{name}={_word(inner)}" for name, inner in value.items())
    return ",".join(map(_word, value)) if isinstance(value, list | tuple) else str(value)


def _png(figure: Any) -> bytes:
    """A figure as a notebook shows it."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=110)  # readable on a screen
    return file.getvalue()


def _row(cells: Iterable[str], tag: str) -> str:
    return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"
