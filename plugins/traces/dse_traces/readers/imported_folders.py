"""Folders that `profile import` wrote: `kernels.parquet`, with `profile.yaml` or `ranks.yaml` beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from dse.errors import ConfigError, Problem
from dse.errors.parsing import parse_yaml
from dse.files import read_bytes, read_text
from dse.results.run_folder import Outputs
from dse_traces.profile.kernels import COLUMNS, Profile, profile_of

TABLE = "kernels"
_WAY_OUT = "name a folder that profile import wrote, or the file of a profile"


def is_imported(path: Path) -> bool:
    """Tell whether a folder holds what `profile import` writes."""
    return (path / f"{TABLE}.parquet").is_file()


def read_imported(folder: Path) -> Sequence[Profile]:
    """The profile of each rank that was imported into a folder. Raises ConfigError."""
    # checks size and kind of the file before a parser sees it
    read_bytes(folder / f"{TABLE}.parquet", "profile", way_out=_WAY_OUT)
    table = Outputs(folder).read_table(TABLE)
    if missing := [name for name in ("name", "stream", "start_s", "seconds") if name not in table]:
        rule = f"lacks the column{'s' if len(missing) > 1 else ''} {', '.join(missing)}"
        raise ConfigError([Problem("profile", rule, str(folder / f"{TABLE}.parquet"), _WAY_OUT)])
    ranks = {None: table} if "rank" not in table else {int(str(rank)): part for rank, part in table.groupby("rank")}
    return [_profile(part, folder, rank) for rank, part in ranks.items()]


def _profile(table: pd.DataFrame, folder: Path, rank: int | None) -> Profile:
    record = _record(folder, rank)
    marked = [(float(start), float(end)) for start, end in record.get("iterations_s", ())]
    source = str(record.get("source") or folder.name)
    # the same checks as for any file: a folder may have been edited
    made = profile_of(_rows(table), source, device=str(record.get("device") or ""), iterations=marked)
    return replace(made, rank=rank)


def _record(folder: Path, rank: int | None) -> Mapping[str, Any]:
    """What the import wrote of a profile; empty where it wrote nothing."""
    path = folder / ("profile.yaml" if rank is None else "ranks.yaml")
    if not path.is_file():
        return {}
    tree = parse_yaml(read_text(path, "profile", way_out=_WAY_OUT), str(path))
    part = tree if rank is None else (tree.get("ranks") or {}).get(rank) if isinstance(tree, Mapping) else None
    return part if isinstance(part, Mapping) else {}


def _rows(table: pd.DataFrame) -> Iterator[dict[str, Any]]:
    names = [name for name in COLUMNS if name in table]
    # None for all kinds of missing values, as rows expect it
    columns = {name: table[name].astype(object).where(table[name].notna(), None).tolist() for name in names}
    for values in zip(*columns.values(), strict=True):
        yield dict(zip(columns, values, strict=True))
