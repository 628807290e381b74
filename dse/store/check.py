"""The command `store check`: are the recorded results as they were written?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dse.errors import ConfigError, Problem, Problems, pairs
from dse.results import output_files
from dse.store.contract import StoreAt
from dse.store.result_store import Store


@output_files.working_on_folders
def check(words: Sequence[str]) -> int:
    """`store check [output_dir=outputs] [url=<of a store>]`: verify every recorded result; 3 if some were damaged."""
    arguments = pairs(words, {"output_dir": "outputs", "url": "auto"})
    problems = Problems()
    store_at = problems.model(StoreAt, {"name": "check", "url": arguments["url"]}, path="")
    problems.done()
    assert store_at is not None
    folder = Path(arguments["output_dir"])
    if arguments["url"] == "auto" and not output_files.exists(folder / "results.db"):
        raise ConfigError([Problem("output_dir", "holds no results.db", arguments["output_dir"], "run a study first")])
    store = Store(store_at.database_url(folder))
    fine, damaged = store.check()
    note = f"; {damaged} were damaged and put into quarantine: type the study's command to compute them again"
    print(f"{store.database}: {fine} results are as they were recorded{note if damaged else ''}")
    return 3 if damaged or store.database.mended else 0
