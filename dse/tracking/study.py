"""A finished run of a study in MLflow's words: what its folder says of it as a whole."""

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
from typing import Annotated, Any, Final

from pydantic import AfterValidator

from dse.results import output_files, provenance
from dse.results.pareto import winners
from dse.results.report import knobs_text
from dse.results.run_folder import Made, Outputs, Shape, Summary, results
from dse.tracking.points import MAX_NAME, MAX_TAG, mlflow_name, text, truncate

_FILES: Final = ("results.parquet", "summary.json", "provenance.json", "config.yaml", "claims.json")
_NOT_ASKED: Final = ("tracking", "executor", "output_dir")  # parts of a configuration that change no result
_STEPS: Final = 100  # of a curve
_MOST_CURVES: Final = 64  # scenarios; a chart of more shows nothing


class _Shown(Summary):
    """What is shown of a `summary.json`."""

    units: dict[str, str]


class _Described(Made):
    """What is shown of a `provenance.json`."""

    time: Annotated[str, AfterValidator(lambda text: datetime.fromisoformat(text) and text)]
    command: list[str]
    backend: str
    seed: int
    python: str


class _Named(Shape):
    name: str


class _Budget(Shape):
    trials: int


class _Asked(Shape):
    """What is shown of a `config.yaml`."""

    study: Shape
    search: _Named
    simulator: _Named
    budget: _Budget
    tracking: dict[str, Any]


_SHAPES: Final[Mapping[str, type[Shape]]] = {"summary.json": _Shown, "provenance.json": _Described}


@dataclass(frozen=True)
class Curve:
    """A metric of the study run at some steps; a step is a number of evaluated points."""

    name: str
    steps: list[int]
    values: list[float]


@dataclass(frozen=True)
class StudyFolder:
    """The folder of a finished study run, read when asked."""

    folder: Path

    @classmethod
    def all(cls, root: Path, study: str = "*") -> list[StudyFolder]:
        """Every finished run of a study, or of all, below an output folder; the oldest first."""
        folders = {path.parent.resolve() for path in root.glob(f"{study}/*/results.parquet")}
        found = [cls(folder) for folder in sorted(folders)]
        return [one for one in found if all(output_files.exists(one.folder / name) for name in _FILES)]

    def check(self) -> None:
        """Look at its files. Raises ConfigError for one that does not hold what it should."""
        for name, tree in (("summary.json", self.summary), ("provenance.json", self.provenance)):
            output_files.read_as(_SHAPES[name], self.folder / name, tree)
        output_files.read_as(_Asked, self.folder / "config.yaml", self.config)
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
        """What tells this run from every other, wherever its folder lies: a hash of its name and provenance."""
        told = output_files.text(self.folder / "provenance.json").encode()
        return hashlib.sha256(self.folder.name.encode() + b"\n" + told).hexdigest()[:32]

    @cached_property
    def summary(self) -> dict[str, Any]:
        """`summary.json`."""
        found: dict[str, Any] = Outputs(self.folder).read_json("summary")
        return found

    @cached_property
    def provenance(self) -> dict[str, Any]:
        """`provenance.json`."""
        found: dict[str, Any] = Outputs(self.folder).read_json("provenance")
        return found

    @cached_property
    def config(self) -> dict[str, Any]:
        """`config.yaml`."""
        return Outputs(self.folder).read_config()

    @property
    def num_rows(self) -> int:
        """Points in the table."""
        with output_files.table(self.results) as held:
            return held.num_rows

    @property
    def times_ms(self) -> tuple[int, int]:
        """When the run began (its folder's name) and ended (its provenance), in MLflow's clock."""
        end = datetime.fromisoformat(self.provenance["time"])
        start = end
        with suppress(ValueError):
            start = min(end, datetime.strptime(self.folder.name[:19], "%Y-%m-%d_%H-%M-%S").astimezone())
        return int(start.timestamp() * 1000), int(end.timestamp() * 1000)

    def params(self) -> dict[str, str]:
        """How the study was made, to be compared with others: what differs shows as columns."""
        asked = self.config
        found = {
            "search": asked["search"]["name"],
            "simulator": asked["simulator"]["name"],
            "budget.trials": asked["budget"]["trials"],
            "seed": self.provenance["seed"],
            "python": self.provenance["python"],
            **{f"version.{name}": version for name, version in self.provenance["versions"].items()},
        }
        return {name: text(value) for name, value in found.items()}

    def tags(self) -> dict[str, str]:
        """Identity and provenance of the study."""
        git = self.provenance["git"]
        asked = {name: part for name, part in self.config.items() if name not in _NOT_ASKED}
        hashed = hashlib.sha256(json.dumps(asked, sort_keys=True, default=str).encode()).hexdigest()
        found = {
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
        return {name: truncate(value, MAX_TAG) for name, value in found.items() if value}

    def run_name(self) -> str:
        """The study run's name in MLflow."""
        return truncate(f"{self.study} {self.folder.name}", MAX_NAME)

    def note(self) -> str:
        """The winners as Markdown: the description of the study run."""
        import pyarrow as pa

        goals = self.summary["goals"]
        first = next(iter(goals))
        with results(self.results, goals) as held:  # winners are on the fronts
            parts = [part.filter(part.column("on_front")) for part in held.groups()]
            fronts = output_files.frame(self.results, pa.concat_tables([held.schema.empty_table(), *parts]))
        title = _plain(self.config["study"].get("description", ""))
        lines = [f"**{title}**", "", f"| scenario | winner | {_plain(first)} |", "|---|---|---|"]
        for _, row in winners(fronts, goals).iterrows():
            cells = _plain(row["scenario"]), _plain(knobs_text(row, self.summary["knobs"]))
            lines.append(f"| {' | '.join(cells)} | {row[first]:.6g} |")
        return "\n".join(lines)

    def curves(self) -> Iterator[Curve]:
        """How the study went: counts of the whole, then failures and each scenario's best first objective so far.

        A step is the number of points evaluated so far, of all scenarios or of that one.
        """
        import numpy as np

        goal, kind = next(iter(self.summary["goals"].items()))
        with results(self.results, self.summary["goals"]) as held:
            table = held.whole(["scenario", "status", "on_front", goal])
        status = table.column("status").to_numpy()
        yield from self._counts(status, int(np.sum(table.column("on_front").to_numpy())))
        failed = np.cumsum((status == "failed") | (status == "invalid"))
        steps = _steps(len(failed))
        yield Curve("failed_points", steps, [float(failed[step - 1]) for step in steps])
        values, scenario = table.column(goal).to_numpy(), table.column("scenario").to_numpy()
        better = np.minimum if kind == "minimize" else np.maximum
        names = list(dict.fromkeys(scenario.tolist()))
        for name in names if len(names) <= _MOST_CURVES else ():
            own = better.accumulate(np.where(status == "ok", values, math.inf * _SIGN[kind])[scenario == name])
            steps = [step for step in _steps(len(own)) if math.isfinite(own[step - 1])]
            yield Curve(mlflow_name(f"best_{goal}/{name}"), steps, [float(own[step - 1]) for step in steps])

    def _counts(self, status: Any, front_size: int) -> Iterator[Curve]:
        import numpy as np

        names, counts = np.unique(status.astype(str), return_counts=True)
        numbers: Mapping[str, int] = {"num_points": len(status), "front_size": front_size}
        for name, count in {
            **numbers,
            **{f"num_{one}": count for one, count in zip(names, counts, strict=True)},
        }.items():
            yield Curve(name, [0], [float(count)])


_SIGN: Final = {"minimize": 1.0, "maximize": -1.0}


def _plain(told: object) -> str:
    """A text that Markdown shows as it is: no markup of HTML, no link, no picture, no column of its own."""
    line = " ".join(str(told).split())
    return line.replace("&", "&amp;").replace("<", "&lt;").replace("](", "]\\(").replace("|", "\\|")


def _steps(count: int) -> list[int]:
    """Numbers from 1 to `count`, few and evenly spaced in their logarithm."""
    import numpy as np

    return np.unique(np.geomspace(1, count, _STEPS).round().astype(int)).tolist() if count else []
