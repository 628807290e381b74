"""Checks of `dse doctor`: the database of results."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

from dse.plugins import DoctorCheck


def check_results(options: Mapping[str, str]) -> Iterator[DoctorCheck]:
    """Look at the database of results: is it one, who may write at the same time, can it be reached?"""
    if options["url"].startswith("postgresql"):
        yield from _check_server(options["url"])
        return
    file = Path(options["output_dir"]) / "results.db"
    if not file.exists():
        yield DoctorCheck("ok", "results", f"no {file} yet: the first study makes it")
        return
    try:
        with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True, timeout=2)) as connection:
            mode = connection.execute("PRAGMA journal_mode").fetchone()[0]
            count = connection.execute("SELECT count(*) FROM results").fetchone()[0]
    except sqlite3.DatabaseError as error:
        way = f"`python -m dse store check output_dir={options['output_dir']}` saves what can be saved"
        yield DoctorCheck("fail", "results", f"{file} cannot be read: {error}", way)
        return
    is_wal = mode == "wal"
    way = "" if is_wal else "its folder allows no write-ahead log: use a local disk"
    yield DoctorCheck("ok" if is_wal else "warn", "results", f"{file}: {count:,} results, journal mode {mode}", way)


def _check_server(url: str) -> Iterator[DoctorCheck]:
    from dse.store.database import StoreError
    from dse.store.result_store import Store

    try:
        database = Store(url, patience_s=2.0).database
    except (StoreError, OSError) as error:
        yield DoctorCheck("fail", "results", str(error), "look at store.url and at the server")
    else:
        yield DoctorCheck("ok", "results", f"{database} answers")
