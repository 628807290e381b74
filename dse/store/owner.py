"""Identity of the process that owns a lease, so that others can tell whether it has ended; and locks on files.

A pid alone does not identify a process: it is reused after a while, and means another process in every container, on
every machine and after a reboot. Only a process that has provably ended counts as gone; clocks play no part in it.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dse.errors import ConfigError
from dse.errors.parsing import parse_json


@dataclass(frozen=True)
class Owner:
    """A process. host: machine and its name; boot: id of its boot; space: pid namespace; started: in clock ticks."""

    host: str
    boot: str
    space: str
    pid: int
    started: int

    @property
    def is_known(self) -> bool:
        """True if this process can tell whether the owner has ended."""
        this = me()
        # without a boot id or a start, pids prove nothing
        same = bool(this.boot and self.boot and self.started) and self.host == this.host
        # pids mean something within a namespace only
        return same and (self.boot != this.boot or self.space == this.space)

    @property
    def gone(self) -> bool:
        """True if the owner has provably ended."""
        # a pid that was given to another process starts later
        return self.is_known and (self.boot != me().boot or _start_ticks(self.pid) != self.started)

    @property
    def text(self) -> str:
        """The owner as JSON."""
        return json.dumps(vars(self), sort_keys=True)

    @classmethod
    def of(cls, text: str) -> Owner | None:
        """Parse an owner; None if the text is not one."""
        try:
            tree = parse_json(text, "owner")
            return cls(**{name: kind(tree[name]) for name, kind in _KINDS.items()})
        except (ConfigError, ValueError, KeyError, TypeError, OverflowError):
            return None


# a file of another hand may hold anything
_KINDS = {"host": str, "boot": str, "space": str, "pid": int, "started": int}


def me() -> Owner:
    """This process."""
    return Owner(*_place(), os.getpid(), _start_ticks(os.getpid()) or 0)


@contextmanager
def lock_file(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a plain file, created if absent; the system drops the lock when the process dies.

    Raises OSError unless it is a plain file: opening a pipe would block, and a link may lead anywhere.
    """
    import fcntl  # Unix only, as MLflow's own lock is

    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "is no plain file", str(path))
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)  # which drops the lock; the file stays, or others might lock a deleted one


@functools.cache
def _place() -> tuple[str, str, str]:
    try:
        space = str(Path("/proc/self/ns/pid").readlink())
    except OSError:  # no Linux
        space = ""
    machine = _read(Path("/etc/machine-id")) or "unnamed"  # hosts in a cluster of containers may share a name
    return f"{socket.gethostname()}/{machine}", _read(Path("/proc/sys/kernel/random/boot_id")), space


def _start_ticks(pid: int) -> int | None:
    """Clock ticks from boot to the start of a process; None if there is none (a zombie has ended, too)."""
    fields = _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()  # the name before it may hold anything
    return None if len(fields) < 20 or fields[0] in "ZX" else int(fields[19])


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
