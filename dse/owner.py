"""Whose work something is, written down so that another process can tell whether its owner is dead.

A process id alone says little: it is used again after a while, and means another process in every container and on
every machine. Only what is provably dead is called dead.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_MACHINE = Path("/etc/machine-id")


def me() -> str:
    """This process as JSON: host, machine, boot, process namespace, process id and its start in clock ticks."""
    return json.dumps({**_here(), "pid": os.getpid(), "started": _started(os.getpid())}, sort_keys=True)


def is_dead(owner: str) -> bool:
    """Whether the process that `me` described is provably gone: its machine was booted anew, or its id is free or
    in use by a later process. False where that cannot be known: another host or container, no `/proc`, no owner."""
    try:
        told = json.loads(owner)
        there = {name: told[name] for name in _here()}
        pid, started = int(told["pid"]), told["started"]
    except (ValueError, KeyError, TypeError):
        return False
    here = _here()
    if not all(here.values()) or (there["host"], there["machine"]) != (here["host"], here["machine"]):
        return False
    if there["boot"] != here["boot"]:
        return bool(there["boot"])
    return there["processes"] == here["processes"] and started is not None and _started(pid) != started


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file, made if need be; the system drops it when the process dies."""
    import fcntl  # Unix only, as MLflow's own lock is

    with path.open("a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _here() -> dict[str, str]:
    try:
        processes = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        processes = ""
    return {
        "host": socket.gethostname(),
        "machine": _text(_MACHINE) or "unnamed",
        "boot": _text(_BOOT),
        "processes": processes,
    }


def _started(pid: int) -> int | None:
    """Clock ticks from boot to the start of a process; None if there is none (a zombie has ended, too)."""
    state = _text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return None if len(state) < 20 or state[0] == "Z" else int(state[19])


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
