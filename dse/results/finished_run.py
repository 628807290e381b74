"""A finished run, found by what a person calls it and read in part: what was searched, and rows by column."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dse.errors import ConfigError, Problem
from dse.results import output_files
from dse.results.run_folder import Outputs, results
from dse.space import Knob, get_path

if TYPE_CHECKING:
    import pandas as pd

_FILES = ("results.parquet", "summary.json", "config.yaml", "provenance.json")


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
