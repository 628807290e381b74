"""The `store` group of a configuration."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from dse.backend import Status
from dse.errors.texts import ambiguous
from dse.results import output_files
from dse.values import Frozen
from dse.values.units import WallSeconds, illegal


def _store_url(url: str) -> str:
    # no other database: SQLAlchemy would take some that nothing here is tested with
    if not re.fullmatch(r"auto|sqlite:///.+|postgresql(\+psycopg)?://.+", url):
        rule = "must be auto, null, sqlite:///<file> or postgresql://<user>@<host>/<database>"
        raise illegal(rule, f"sqlite:///{url}" if url.endswith(".db") else None)
    if rule := ambiguous(url):
        raise ValueError(rule)
    if re.search(r"[?&]plugin=", url):  # which would run its code
        raise ValueError("must not name a plug-in of SQLAlchemy")
    return url


class StoreAt(Frozen):
    """The `store` group. url: of the database; `auto` for results.db in the output folder, null for no store.

    retry: statuses of recorded results to evaluate again. patience_s: time to wait for a store that does not answer.
    """

    name: str
    description: str = ""
    url: Annotated[str, AfterValidator(_store_url)] | None = "auto"
    retry: tuple[Status, ...] = ()
    patience_s: WallSeconds = 60.0

    def database_url(self, folder: Path) -> str:
        """Return the URL of the database of an output folder. Raises ConfigError if it is not a plain file."""
        if self.url != "auto":
            assert self.url is not None
            return self.url
        file = folder / "results.db"
        for suffix in ("", "-wal", "-shm"):  # SQLite follows links of all three
            if output_files.exists(path := file.with_name(file.name + suffix)):
                with output_files.open_untrusted(path):
                    pass
        return f"sqlite:///{file}"
