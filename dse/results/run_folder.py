"""The folder of a study run, `outputs/<study>/<time>/`, its `latest` link, and reading it back.

A finished run (`FinishedRun`) is found by what a person calls it and read in part: what was searched, and rows by
column.
"""

from __future__ import annotations

import contextlib
import html
import io
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from dse.backend import STATUSES
from dse.config.options import list_options
from dse.errors import ConfigError, Problem, did_you_mean, nearest, redact
from dse.files import atomic_replacement, path_inside
from dse.results import output_files
from dse.space import Knob, get_path

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console
    from rich.table import Table


_MOST_GOALS = 16
_FILES = ("results.parquet", "summary.json", "config.yaml", "provenance.json")


class FileShape(BaseModel):
    """The part of a file that others rely on; it may hold more."""

    model_config = ConfigDict(extra="allow", strict=True, defer_build=True)


class _SearchSection(FileShape):
    method: str


class Summary(FileShape):
    """`summary.json`."""

    study: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,80}$")]
    goals: Annotated[dict[str, Literal["minimize", "maximize"]], Field(min_length=1, max_length=_MOST_GOALS)]
    knobs: list[str]
    question: str = ""
    answer: str = ""
    gain: str | None = None
    shown: list[str] = []
    departures: list[str] = []
    contest: dict[str, Any] = {}
    units: dict[str, str] = {}
    limits: dict[str, dict[str, FiniteFloat]] = {}
    searched: dict[str, _SearchSection] = {}


class _Git(FileShape):
    commit: str | None = None
    reason: str = ""
    dirty: bool | None = None


class _ChangedCode(FileShape):
    time: str
    changed: list[str]


class Provenance(FileShape):
    """`provenance.json`."""

    command: list[str] = []
    config_dir: str | None = None
    backend: str = ""
    seed: Annotated[int, Field(ge=0, lt=1 << 32)] = 0
    git: _Git = _Git()
    versions: dict[str, str] = {}
    python: str = ""
    machine: dict[str, str | int | None] = {}
    mixed: list[_ChangedCode] = []


class _RecordedStudy(FileShape):
    module: str = ""
    question: str = ""
    recorded: list[str] = []
    hardware: list[str] = []
    baseline: dict[str, str | bool | int | float | None] = {}


class RecordedConfig(FileShape):
    """`config.yaml`, as far as its sections are read one by one."""

    study: _RecordedStudy
    space: dict[str, Any] = {}


_SHAPES: Final[Mapping[str, type[BaseModel]]] = {"summary": Summary, "provenance": Provenance}


@dataclass(frozen=True)
class Outputs:
    """One run's folder. `results` has a row per evaluated point, `timelines` a row per task of each winner."""

    folder: Path

    @classmethod
    def create(cls, root: Path, study: str) -> Outputs:
        """A new folder; a second run within the same second gets a suffix. Raises OSError."""
        stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
        for number in range(1000):
            folder = root / study / (f"{stamp}_{number}" if number else stamp)
            try:
                folder.mkdir(parents=True)
            except FileExistsError:
                continue
            return cls(folder)
        raise FileExistsError(folder)

    @classmethod
    def latest(cls, root: Path, study: str) -> Outputs:
        """The newest finished run of a study. Raises ConfigError naming the studies that have one."""
        folder = path_inside(root, study) / "latest"
        if not output_files.exists(folder / "results.parquet"):
            finished = [path.parent.parent.name for path in root.glob("*/latest/results.parquet")]
            shipped = list_options("study")
            near = "" if study in shipped else nearest(study, shipped)
            first = f"did you mean `{near}`?" if near else f"run `python -m dse study={study}` first"
            way = did_you_mean(study, finished) if finished else first
            raise ConfigError([Problem("study", f"has no finished run below {root}/", study, way)])
        if folder.resolve().parent != folder.parent.resolve():  # `latest` is a link, which another user may have placed
            raise output_files.file_error(
                folder, "leads out of its folder", way_out="remove the link, or name the run's folder"
            )
        return cls(folder.resolve())

    def discard(self) -> None:
        """Take the folder of a study that did not come to its end away again."""
        for table in self.folder.glob("*.parquet"):
            table.unlink(missing_ok=True)  # tables only: whatever else lies there is not ours
        with contextlib.suppress(OSError):  # something else lies in it
            self.folder.rmdir()

    def finish(self) -> None:
        """Point the `latest` link here, in one step."""
        link = self.folder.parent / "latest"
        fresh = self.folder.parent / f".latest.{os.getpid()}"  # two runs may finish at once
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(self.folder.name)
        fresh.replace(link)  # atomic: there is a `latest` at every moment

    @property
    def results(self) -> Path:
        """`results.parquet`."""
        return self.folder / "results.parquet"

    def probe(self, name: str) -> Path:
        """`probe_<name>.parquet`: the table of a probe, with the columns of `results.parquet`."""
        return path_inside(self.folder, f"probe_{name}.parquet")

    def write_table(self, name: str, table: pd.DataFrame) -> None:
        """`<name>.parquet`; the same table gives the same bytes."""
        with atomic_replacement(path_inside(self.folder, f"{name}.parquet")) as fresh:
            table.to_parquet(fresh, index=False)

    def write_csv(self, name: str, table: pd.DataFrame) -> None:
        """A table as a file of comma-separated values, for other commands and tools."""
        with atomic_replacement(path_inside(self.folder, name)) as fresh:
            table.to_csv(fresh, index=False)

    def read_table(self, name: str) -> pd.DataFrame:
        """`<name>.parquet` as a DataFrame. Raises ConfigError where it is damaged, or too long to be read whole."""
        path = path_inside(self.folder, f"{name}.parquet")
        with output_files.table(path) as table:
            frame: pd.DataFrame = output_files.frame(path, table.whole())
        return frame

    def has(self, name: str) -> bool:
        """True if `<name>.json` was written."""
        return output_files.exists(self.folder / f"{name}.json")

    def write_json(self, name: str, value: Any) -> None:
        """`<name>.json`."""
        # JSON has no NaN, and other readers refuse it
        text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
        with atomic_replacement(path_inside(self.folder, f"{name}.json")) as fresh:
            fresh.write_text(text + "\n", encoding="utf-8")

    def read_json(self, name: str) -> Any:
        """`<name>.json`, whose shape is known where others rely on it. Raises ConfigError where it is damaged."""
        path = path_inside(self.folder, f"{name}.json")
        tree = output_files.read_json(path)
        return output_files.read_as(_SHAPES[name], path, tree) if name in _SHAPES else tree

    def write_text(self, name: str, text: str) -> Path:
        """Write a file of text in the folder, or in `figures/`; its path."""
        inner, _, last = name.rpartition("/")
        path = path_inside(self.figures if inner == "figures" else self.folder, last)
        with atomic_replacement(path) as fresh:
            fresh.write_text(text, encoding="utf-8")
        return path

    def write_config(self, tree: Mapping[str, Any]) -> None:
        """`config.yaml`, the composed configuration without its secrets."""
        self.write_yaml("config.yaml", redact(tree))

    def write_yaml(self, name: str, tree: Mapping[str, Any]) -> None:
        """Write a YAML file in the folder."""
        # in the order of the configuration
        self.write_text(name, yaml.safe_dump(dict(tree), sort_keys=False, allow_unicode=True))

    def read_config(self) -> dict[str, Any]:
        """The composed configuration. Raises ConfigError where it is damaged."""
        path = self.folder / "config.yaml"
        tree = output_files.read_yaml(path)
        output_files.read_as(RecordedConfig, path, tree)
        return dict(tree)

    @property
    def figures(self) -> Path:
        """`figures/`, made when first asked for. Raises ConfigError where it is a link."""
        return output_files.plain_folder(self.folder / "figures")


_TEXTS: Final = ("scenario", "key", "status", "reason", "engine", "baseline")
_ALWAYS: Final = ("scenario", "key", "status", "on_front")  # held by every row


@contextlib.contextmanager
def results(path: Path, goals: Iterable[str]) -> Iterator[output_files.ParquetTable]:
    """A table of results, open, with the columns that each has and those of the objectives.

    Raises ConfigError for one that is damaged; of its rows when they are read.
    """
    with output_files.table(path) as table:
        expected = {**dict.fromkeys(_TEXTS, "text"), "on_front": "truth", **dict.fromkeys(goals, "number")}
        for name, kind in expected.items():
            if name not in table.names:
                raise output_files.file_error(path, f"has no column {name}")
            if kind not in table.kinds[name]:
                raise output_files.file_error(path, f"has a column {name} that holds no {kind}")
        table.check = lambda part: _check_rows(path, part, tuple(goals))
        yield table


def _check_rows(path: Path, part: Any, goals: Sequence[str]) -> None:
    """Rows must say which point they are and how it ended; one with a result has a number for every objective."""
    import pyarrow.compute as pc

    for name in set(_ALWAYS) & set(part.column_names):
        if part.column(name).null_count:
            raise output_files.file_error(path, f"has rows without {name}")
    if "status" in part.column_names:
        unknown = set(pc.unique(part.column("status")).to_pylist()) - {*STATUSES}
        if unknown:
            raise output_files.file_error(path, "holds a status that is none", min(unknown))
        ok = part.filter(pc.equal(part.column("status"), "ok"))
        for name in (name for name in goals if name in part.column_names):
            # a missing value is not finite
            if ok.num_rows and not pc.all(pc.fill_null(pc.is_finite(ok.column(name).cast("double")), False)).as_py():
                raise output_files.file_error(path, f"has rows with a result and without a finite {name}")


def writable(out: str) -> Outputs:
    """A folder to write into. Raises ConfigError where it is a link, or cannot be made."""
    outputs = Outputs(Path(out))
    if outputs.folder.is_symlink():
        rule = "is a link, and nothing is written through one"
        raise ConfigError([Problem("out", rule, out, "name a folder, or remove the link")])
    try:
        outputs.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError([Problem("out", f"cannot be made ({error.strerror})", out)]) from None
    return outputs


def console() -> Console:
    """The console of a command: as wide as the terminal, or 160 columns into a file or a pipe."""
    from dse.errors.terminal import Terminal

    return Terminal(width=None if sys.stdout.isatty() else 160)


@dataclass(frozen=True)
class CommandAnswer:
    """Answer of a command.

    Attributes
    ----------
    folder
        The folder that its files are in.
    parts
        Texts and tables in the order in which the command line prints them.
    record
        Name of the JSON file in the folder that holds all numbers, without its ending; "" for none.
    code
        The exit code: 0, or 3 where points failed.
    """

    folder: Path
    parts: tuple[Table | str, ...] = ()
    record: str = ""
    code: int = 0

    @cached_property
    def data(self) -> Any:
        """All numbers, as the JSON file of the answer holds them; None where it has none."""
        return Outputs(self.folder).read_json(self.record) if self.record else None

    @property
    def text(self) -> str:
        """Text that the command line prints."""
        from rich.console import Console

        file = io.StringIO()
        # a notebook would show each line by itself
        self._print(Console(file=file, width=160, force_jupyter=False, force_terminal=False))
        return file.getvalue()

    def show(self) -> int:
        """Print the answer; its exit code."""
        self._print(console())
        return self.code

    def _print(self, console: Console) -> None:
        for part in self.parts:
            console.print(part, soft_wrap=isinstance(part, str), highlight=False)

    def __repr__(self) -> str:
        return self.text or f"<{type(self).__name__} {self.folder}>"

    def _repr_html_(self) -> str:
        """The text, as a notebook shows it."""
        return f"<pre>{html.escape(self.text)}</pre>"


@dataclass(frozen=True)
class FinishedRun:
    """The folder of a finished run, read when asked. Nothing in it is evaluated again."""

    folder: Path

    @classmethod
    def find(cls, root: Path, run: str, path: str = "study") -> FinishedRun:
        """The run that is meant by its folder, by `<study>` (its newest) or by `<study>/<time>` below `root`.

        path: what the run is to the command, for messages. Raises ConfigError where there is none, or it is unfinished.
        """
        # a folder first, then one below `root`
        places = [place for place in (Path(run), root / run) if output_files.exists(place / _FILES[0])]
        if places:
            return cls(places[0].resolve())._check(path)
        if "/" in run:
            rule = f"is the folder of no finished run, nor one below {root}/"
            way = "give a folder that holds results.parquet, <study> or <study>/<time>; an unfinished run goes on when "
            raise ConfigError([Problem(path, rule, run, f"{way}its command is typed again")])
        return cls(Outputs.latest(root, run).folder)._check(path)

    def _check(self, path: str) -> FinishedRun:
        missing = [name for name in _FILES if not output_files.exists(self.folder / name)]
        if missing:
            rule = f"is not finished: it has no {', '.join(missing)}"
            raise ConfigError([Problem(path, rule, str(self.folder), "type the study's command again: it goes on")])
        self.summary, self.config, self.provenance, self.columns  # noqa: B018 (each is read, and refused where it is damaged)
        return self

    @property
    def outputs(self) -> Outputs:
        """The folder, to write into."""
        return Outputs(self.folder)

    @property
    def name(self) -> str:
        """`<study>/<time>`."""
        return f"{self.folder.parent.name}/{self.folder.name}"

    def probe(self, name: str) -> pd.DataFrame:
        """Rows of a probe that have a result; none where the probe did not fit what was typed."""
        table = self._probe_table(f"probe_{name}")
        return table[table["status"] == "ok"].reset_index(drop=True) if len(table) else table

    def probe_timelines(self, name: str) -> pd.DataFrame:
        """Tasks of the replayed points of a probe, by scenario and key; none where the probe did not fit."""
        return self._probe_table(f"probe_{name}_timelines")

    def _probe_table(self, name: str) -> pd.DataFrame:
        import pandas as pd

        there = output_files.exists(self.folder / f"{name}.parquet")
        return self.outputs.read_table(name) if there else pd.DataFrame()

    @cached_property
    def summary(self) -> dict[str, Any]:
        """`summary.json`."""
        summary: dict[str, Any] = self.outputs.read_json("summary")
        return summary

    @cached_property
    def provenance(self) -> dict[str, Any]:
        """`provenance.json`."""
        provenance: dict[str, Any] = self.outputs.read_json("provenance")
        return provenance

    @cached_property
    def config(self) -> dict[str, Any]:
        """`config.yaml`."""
        return self.outputs.read_config()

    @property
    def goals(self) -> dict[str, str]:
        """Objective -> minimize or maximize."""
        return dict(self.summary["goals"])

    @cached_property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns of the table."""
        with results(self.outputs.results, self.goals) as table:
            return table.names

    @property
    def knobs(self) -> tuple[str, ...]:
        """Searched paths, as columns of the table."""
        return tuple(path for path in self.summary["knobs"] if path in self.columns)

    @property
    def recorded_paths(self) -> tuple[str, ...]:
        """Paths of the design that are columns of the table, searched or not."""
        named = (*self.config["study"].get("recorded", ()), *self.knobs)
        return tuple(path for path in dict.fromkeys(named) if path in self.columns)

    @property
    def methods(self) -> tuple[str, ...]:
        """Methods by which its points were chosen: `exhaustive`, or names of searches."""
        return tuple(dict.fromkeys(chosen["method"] for chosen in self.summary.get("searched", {}).values()))

    def parts(self, columns: Sequence[str]) -> Iterator[pd.DataFrame]:
        """Rows [<= 65,536 each] of the table in its order, with some of its columns and `explored`.

        explored: False for a baseline outside the space, which is evaluated to be compared with and was not searched.
        """
        allowed = self._baseline_knobs
        wanted = dict.fromkeys([*columns, "key", "baseline", *allowed])
        with results(self.outputs.results, self.goals) as table:
            for part in table.groups(list(wanted)):
                rows = output_files.frame(table.path, part)
                yield rows[list(columns)].assign(explored=_is_explored(rows, allowed))

    @cached_property
    def _baseline_knobs(self) -> dict[str, Knob]:
        """Knobs at the paths that a baseline changes: the searched knob, or one of only the design's value."""
        from dse.config.compose import searched_knobs

        config_dir = self.provenance.get("config_dir")
        folder = Path(config_dir) if config_dir and Path(config_dir).is_dir() else None
        knobs = searched_knobs(self.config, folder)
        paths = [path for path in self.config["study"].get("baseline") or {} if path in self.columns]
        fixed = {path: Knob(path, (get_path(self.config, path),)) for path in paths}
        return {path: knobs[path] if path in knobs and path in self.knobs else fixed[path] for path in paths}


def _is_explored(rows: pd.DataFrame, allowed: Mapping[str, Knob]) -> Any:
    """Marks of the rows that lie in the space; only baselines can lie outside."""
    # a row that is its own baseline may be one outside the space
    inside = rows["key"].to_numpy() != rows["baseline"].to_numpy()
    fits = inside | True  # all True, as an array of this length
    for path, knob in allowed.items():
        column = rows[path]
        if knob.values:
            # a knob that does not count in the row
            fits = fits & (column.astype(str).isin([str(value) for value in knob.values]) | column.isna()).to_numpy()
        else:
            fits = fits & ((column >= knob.low) & (column <= knob.high)).fillna(True).to_numpy(bool)
    return inside | fits


def read(run: FinishedRun, columns: Sequence[str]) -> pd.DataFrame:
    """All rows of the table, with some of its columns and `explored`."""
    import pandas as pd

    return pd.concat(list(run.parts(columns)), ignore_index=True)
