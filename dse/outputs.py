"""The folder of a study run, `outputs/<study>/<time>/`, its `latest` link, and reading it back."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from dse.problems import ConfigError, Problem, did_you_mean

if TYPE_CHECKING:
    import pandas as pd


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A file to write in place of `path`, which it becomes when it is whole: until then the old one stays."""
    for left in path.parent.glob(f".{path.name}.*"):
        if not Path("/proc", left.name.rpartition(".")[2]).exists():  # its writer was killed
            left.unlink(missing_ok=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield fresh
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


@dataclass(frozen=True)
class Outputs:
    """One run's folder. `results` has a row per evaluated point, `timelines` a row per task of each winner."""

    folder: Path

    @classmethod
    def create(cls, root: Path, study: str) -> Outputs:
        """A new folder; a second run within the same second gets a suffix. Raises OSError."""
        stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
        for suffix in ["", *(f"_{number}" for number in range(1, 1000))]:
            folder = root / study / f"{stamp}{suffix}"
            try:
                folder.mkdir(parents=True)
            except FileExistsError:
                continue
            return cls(folder)
        raise FileExistsError(folder)

    @classmethod
    def latest(cls, root: Path, study: str) -> Outputs:
        """The newest finished run of a study. Raises ConfigError naming the studies that have one."""
        folder = root / study / "latest"
        if not (folder / "results.parquet").is_file():
            finished = [path.parent.parent.name for path in root.glob("*/latest/results.parquet")]
            way = did_you_mean(study, finished) if finished else f"run python -m dse study={study} first"
            raise ConfigError([Problem("study", f"has no finished run below {root}/", study, way)])
        return cls(folder.resolve())

    def discard(self) -> None:
        """Take the folder of a study that did not come to its end away again."""
        self.results.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    def finish(self) -> None:
        """Point the `latest` link here, in one step."""
        link = self.folder.parent / "latest"
        fresh = self.folder.parent / f".latest.{os.getpid()}"
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(self.folder.name)
        fresh.replace(link)

    @property
    def results(self) -> Path:
        """`results.parquet`."""
        return self.folder / "results.parquet"

    def write_table(self, name: str, table: pd.DataFrame) -> None:
        """`<name>.parquet`; the same table gives the same bytes."""
        with whole(self.folder / f"{name}.parquet") as fresh:
            table.to_parquet(fresh, index=False)

    def read_table(self, name: str) -> pd.DataFrame:
        """`<name>.parquet` as a DataFrame."""
        import pandas as pd

        return pd.read_parquet(self.folder / f"{name}.parquet")

    def has(self, name: str) -> bool:
        """Whether `<name>.json` was written."""
        return (self.folder / f"{name}.json").is_file()

    def write_json(self, name: str, value: Any) -> None:
        """`<name>.json`."""
        text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
        with whole(self.folder / f"{name}.json") as fresh:
            fresh.write_text(text + "\n", encoding="utf-8")

    def read_json(self, name: str) -> Any:
        """`<name>.json`."""
        return json.loads((self.folder / f"{name}.json").read_text(encoding="utf-8"))

    def write_config(self, tree: Mapping[str, Any]) -> None:
        """`config.yaml`, the composed configuration."""
        text = yaml.safe_dump(dict(tree), sort_keys=False, allow_unicode=True)
        with whole(self.folder / "config.yaml") as fresh:
            fresh.write_text(text, encoding="utf-8")

    def read_config(self) -> dict[str, Any]:
        """The composed configuration."""
        found: dict[str, Any] = yaml.safe_load((self.folder / "config.yaml").read_text(encoding="utf-8"))
        return found

    @property
    def figures(self) -> Path:
        """`figures/`, made when first asked for."""
        folder = self.folder / "figures"
        folder.mkdir(exist_ok=True)
        return folder
