"""The command line of dse, which kills itself at a write: `python -m benchmarks.struck K study=<name> ...`.

Everything that changes the database or the output folder counts twice, just before and just after it; at the K-th
count the process sends itself SIGKILL.
"""

from __future__ import annotations

import builtins
import functools
import io
import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from dse.cli import main

_count = itertools.count(1)
_strike = 0


def _step() -> None:
    if next(_count) == _strike:
        os.kill(os.getpid(), signal.SIGKILL)


def _counted(owner: Any, name: str, *, writes: Callable[..., bool] = lambda *args, **more: True) -> None:
    """Count the calls of a function that write."""
    plain = getattr(owner, name)

    @functools.wraps(plain)
    def counted(*args: Any, **more: Any) -> Any:
        if not writes(*args, **more):
            return plain(*args, **more)
        _step()
        result = plain(*args, **more)
        _step()
        return result

    setattr(owner, name, counted)


_own = threading.local()  # changed: whether this thread's transaction has written


def _changes(dialect: Any, cursor: Any, statement: str, *args: Any) -> bool:
    writes = not statement.lstrip().upper().startswith(("SELECT", "PRAGMA", "BEGIN"))
    _own.changed = writes or getattr(_own, "changed", False)
    return writes


def _has_changed(*args: Any) -> bool:
    changed, _own.changed = getattr(_own, "changed", False), False
    return changed


def _for_writing(file: Any, mode: str = "r", *args: Any, **more: Any) -> bool:
    return bool(set(mode) & set("wax+"))


def _instrument() -> None:
    import pyarrow as pa  # not above, as worker processes import this module
    import pyarrow.parquet as pq
    from sqlalchemy.engine.default import DefaultDialect

    for name in ("do_execute", "do_executemany", "do_execute_no_params"):
        _counted(DefaultDialect, name, writes=_changes)
    _counted(DefaultDialect, "do_commit", writes=_has_changed)
    for name in ("replace", "rename", "unlink", "symlink", "mkdir", "rmdir"):
        _counted(os, name)
    for owner in (builtins, io):
        _counted(owner, "open", writes=_for_writing)
    for owner, name in ((pa.ipc, "new_stream"), (pq.ParquetWriter, "write_batch"), (pq.ParquetWriter, "close")):
        _counted(owner, name)


if __name__ == "__main__":
    _strike = int(sys.argv[1])
    _instrument()
    sys.exit(main(sys.argv[2:]))
