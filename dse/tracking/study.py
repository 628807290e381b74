"""A finished study run as a run of MLflow: its params, tags, curves and note, read from its folder."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from pydantic import AfterValidator, Field

from dse.results import output_files, provenance
from dse.results.decisions import metrics_of_winners
from dse.results.pareto import Contest
from dse.results.run_folder import FileShape, Outputs, Provenance, Summary, results
from dse.results.words import cell, choice_in_words
from dse.tracking.points import MAX_NAME, MAX_TAG, mlflow_name, text, truncate

if TYPE_CHECKING:
    import pandas as pd

_FILES: Final = ("results.parquet", "summary.json", "provenance.json", "config.yaml", "claims.json")
_NOT_ASKED: Final = ("tracking", "executor", "figures", "output_dir", "beside")  # no result depends on them
_STEPS: Final = 100  # of a curve
_MOST_CURVES: Final = 64  # scenarios; a chart of more is unreadable


class _SummaryFields(Summary):
    """Fields of a `summary.json` that are shown."""

    units: dict[str, str]


class _ProvenanceFields(Provenance):
    """Fields of a `provenance.json` that are shown."""

    time: Annotated[str, AfterValidator(lambda text: datetime.fromisoformat(text) and text)]
    command: list[str]
    backend: str
    seed: int
    python: str
    models: dict[str, str] = Field(default_factory=dict)


class _StudyName(FileShape):
    name: str


class _Budget(FileShape):
    trials: int


class _ConfigFields(FileShape):
    """Fields of a `config.yaml` that are shown."""

    study: FileShape
    search: _StudyName
    simulator: _StudyName
    budget: _Budget
    tracking: dict[str, Any]


_SHAPES: Final[Mapping[str, type[FileShape]]] = {"summary.json": _SummaryFields, "provenance.json": _ProvenanceFields}


@dataclass(frozen=True)
class Curve:
    """A metric of the study run at some steps; a step is a number of evaluated points."""

    name: str
    steps: list[int]
    values: list[float]


@dataclass(frozen=True)
class StudyFolder:
    """The folder of a finished study run, read on demand."""

    folder: Path

    @classmethod
    def all(cls, root: Path, study: str = "*") -> list[StudyFolder]:
        """List the finished runs of a study, or of all, below an output folder, the oldest first."""
        # `latest` is a link to one of them
        folders = {path.parent.resolve() for path in root.glob(f"{study}/*/results.parquet")}
        runs = [cls(folder) for folder in sorted(folders)]
        return [run for run in runs if all(output_files.exists(run.folder / name) for name in _FILES)]

    def check(self) -> None:
        """Validate its files. Raises ConfigError for an invalid one."""
        for name, tree in (("summary.json", self.summary), ("provenance.json", self.provenance)):
            output_files.read_as(_SHAPES[name], self.folder / name, tree)
        output_files.read_as(_ConfigFields, self.folder / "config.yaml", self.config)
        with results(self.results, self.summary["goals"]):
            pass

    @property
    def results(self) -> Path:
        """The table of points."""
        return self.folder / "results.parquet"

    @property
    def name(self) -> str:
        """`<study>/<time>`."""
        return f"{self.study}/{self.folder.name}"

    @property
    def study(self) -> str:
        """The study's name."""
        return str(self.summary["study"])

    @cached_property
    def identity(self) -> str:
        """Hash of name and provenance, which identifies this run wherever its folder lies."""
        content = output_files.text(self.folder / "provenance.json").encode()
        return hashlib.sha256(self.folder.name.encode() + b"\n" + content).hexdigest()[:32]  # 128 bits

    @cached_property
    def summary(self) -> dict[str, Any]:
        """`summary.json`."""
        tree: dict[str, Any] = Outputs(self.folder).read_json("summary")
        return tree

    @cached_property
    def provenance(self) -> dict[str, Any]:
        """`provenance.json`."""
        tree: dict[str, Any] = Outputs(self.folder).read_json("provenance")
        return tree

    @cached_property
    def config(self) -> dict[str, Any]:
        """`config.yaml`."""
        return Outputs(self.folder).read_config()

    @property
    def num_rows(self) -> int:
        """Points in the table."""
        with output_files.table(self.results) as table:
            return table.num_rows

    @property
    def times_ms(self) -> tuple[int, int]:
        """Start (from the folder's name) and end (from the provenance) of the run, in ms since the epoch."""
        end = datetime.fromisoformat(self.provenance["time"])
        start = end
        with suppress(ValueError):
            # a clock that was set back must not make a run end before it starts
            start = min(end, datetime.strptime(self.folder.name[:19], "%Y-%m-%d_%H-%M-%S").astimezone())
        return int(start.timestamp() * 1000), int(end.timestamp() * 1000)

    def params(self) -> dict[str, str]:
        """Settings of the study, for comparison with others: MLflow shows differing params as columns."""
        config = self.config
        params = {
            "search": config["search"]["name"],
            "simulator": config["simulator"]["name"],
            "budget.trials": config["budget"]["trials"],
            "seed": self.provenance["seed"],
            "python": self.provenance["python"],
            **{f"version.{name}": version for name, version in self.provenance["versions"].items()},
            **{f"model.{name}": model for name, model in self.provenance.get("models", {}).items()},
        }
        return {name: text(value) for name, value in params.items()}

    def tags(self) -> dict[str, str]:
        """Identity and provenance of the study."""
        git = self.provenance["git"]
        config = {name: part for name, part in self.config.items() if name not in _NOT_ASKED}
        hashed = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()
        tags = {
            "dse.run": self.identity,
            "dse.study": self.study,
            "dse.backend": self.provenance["backend"],
            "dse.config_hash": hashed[:12],
            "dse.git": git["commit"] or git["reason"],
            "dse.dirty": {True: "true", False: "false"}.get(git.get("dirty"), ""),
            "dse.seed": str(self.provenance["seed"]),
            "dse.command": provenance.command_line(self.provenance),
            "dse.made": provenance.describe(self.provenance),
            "dse.machine": ", ".join(f"{name} {value}" for name, value in self.provenance["machine"].items()),
            "mlflow.source.name": "dse",
            "mlflow.source.type": "LOCAL",
            "mlflow.source.git.commit": git["commit"] or "",
            "mlflow.note.content": self.note(),
        }
        return {name: truncate(value, MAX_TAG) for name, value in tags.items() if value}

    @cached_property
    def knobs(self) -> dict[str, bool]:
        """Searched dotted paths whose values differ, and whether every point has a value of each."""
        paths = self.summary["knobs"]
        with results(self.results, self.summary["goals"]) as table:
            # knobs only: a long table has few of them
            columns = table.whole([path for path in paths if path in table.schema.names])
        values = {path: columns.column(path) for path in paths if path in columns.column_names}
        return {path: not column.null_count for path, column in values.items() if len(column.unique()) > 1}

    def run_name(self) -> str:
        """The study run's name in MLflow."""
        return truncate(f"{self.study} {self.folder.name}", MAX_NAME)

    def note(self) -> str:
        """The winners as Markdown: the description of the study run."""
        goals = self.summary["goals"]
        first = next(iter(goals))
        title, answer = (_plain(self.summary.get(name, "")) for name in ("question", "answer"))
        head = [f"**{title}**", "", *([answer, ""] if answer else [])]
        lines = [*head, f"| scenario | winner | {_plain(first)} |", "|---|---|---|"]
        for _, row in self.contest.winners(self._leaders(), goals).iterrows():
            cells = _plain(row["scenario"]), _plain(choice_in_words(row, self.summary["knobs"]))
            lines.append(f"| {' | '.join(cells)} | {cell(row[first], self.summary['units'][first])} |")
        return "\n".join(lines)

    @cached_property
    def contest(self) -> Contest:
        """Rule of which of its rows may win."""
        return Contest.of(self.summary)

    def _leaders(self) -> pd.DataFrame:
        """Rows among which all winners are: the best rows of each part of the table, however long that is."""
        import pandas as pd

        with results(self.results, self.summary["goals"]) as table:
            parts = [output_files.frame(self.results, part) for part in table.groups()]
            # gives the columns where the table has no rows
            empty = output_files.frame(self.results, table.schema.empty_table())
        leaders: pd.DataFrame = pd.concat(
            [empty, *(self.contest.leaders(part, self.summary["goals"]) for part in parts)]
        )
        return leaders

    def curves(self) -> Iterator[Curve]:
        """Yield total counts, then the running number of failures and each scenario's best first objective.

        A step is the number of points evaluated so far, of all scenarios or of that one.
        """
        import numpy as np

        goal, kind = next(iter(self.summary["goals"].items()))
        with results(self.results, self.summary["goals"]) as file:
            wanted = dict.fromkeys(["scenario", "status", "on_front", goal, *self.contest.columns])
            table = file.whole([name for name in wanted if name in file.names])
        status = table.column("status").to_numpy()
        may_win = (status == "ok") & self.contest.may_win(table)
        yield from self._counts(status, int(np.sum(table.column("on_front").to_numpy())))
        failed = np.cumsum((status == "failed") | (status == "invalid"))
        steps = _steps(len(failed))
        yield Curve("failed_points", steps, [float(failed[step - 1]) for step in steps])
        values, scenario = table.column(goal).to_numpy(), table.column("scenario").to_numpy()
        better = np.minimum if kind == "minimize" else np.maximum
        names = list(dict.fromkeys(scenario.tolist()))
        for name in names if len(names) <= _MOST_CURVES else ():
            # rows that may not win never improve the best
            best = better.accumulate(np.where(may_win, values, math.inf * _SIGN[kind])[scenario == name])
            steps = [step for step in _steps(len(best)) if math.isfinite(best[step - 1])]
            yield Curve(mlflow_name(f"best_{goal}/{name}"), steps, [float(best[step - 1]) for step in steps])

    def _counts(self, status: Any, front_size: int) -> Iterator[Curve]:
        import numpy as np

        names, counts = np.unique(status.astype(str), return_counts=True)
        numbers: Mapping[str, int] = {"num_points": len(status), "front_size": front_size}
        for name, count in {
            **numbers,
            **{f"num_{status_name}": count for status_name, count in zip(names, counts, strict=True)},
        }.items():
            yield Curve(name, [0], [float(count)])  # a single value, not a curve
        winners = metrics_of_winners(self.summary)
        for values in winners.values() if len(winners) == 1 else ():  # of several, their points have them
            for metric, value in values.items():
                yield Curve(metric, [0], [value])


_SIGN: Final = {"minimize": 1.0, "maximize": -1.0}


def _plain(content: object) -> str:
    """Escape a text for Markdown: no HTML, no link, no image, no table column."""
    line = " ".join(str(content).split())
    return line.replace("&", "&amp;").replace("<", "&lt;").replace("](", "]\\(").replace("|", "\\|")


def _steps(count: int) -> list[int]:
    """Return some numbers from 1 to `count`, evenly spaced in their logarithm."""
    import numpy as np

    # most of the progress of a search is early
    return np.unique(np.geomspace(1, count, _STEPS).round().astype(int)).tolist() if count else []
