"""Which process holds something, and whether it is gone for good: pid, start time, boot and namespace.

A pid alone is reused, and means another process in another container or after a reboot. Clocks take no part in it.
"""

from __future__ import annotations

import functools
import os
import socket
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Owner:
    """A process. host: of its pid, namespace included; boot: of that host; started: clock ticks after the boot."""

    host: str
    boot: str
    pid: int
    started: int

    @property
    def here(self) -> bool:
        """Whether its pid means something in this process."""
        return self.host == me().host

    @property
    def gone(self) -> bool:
        """Whether it has provably ended. Of other hosts nothing can be proved."""
        return self.here and (self.boot != me().boot or _started(self.pid) != self.started)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host.partition('/')[0]}"


@functools.cache
def _place() -> tuple[str, str]:
    namespace = Path("/proc/self/ns/pid")
    inside = str(namespace.readlink()) if namespace.exists() else ""
    return f"{socket.gethostname()}/{inside}", _read(Path("/proc/sys/kernel/random/boot_id"))


def me() -> Owner:
    """This process."""
    return Owner(*_place(), os.getpid(), _started(os.getpid()) or 0)


def _started(pid: int) -> int | None:
    """When a process was started; None where there is none (a zombie has ended, too)."""
    text = _read(Path(f"/proc/{pid}/stat"))
    if not text:
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may hold anything
    return None if fields[0] in "ZX" else int(fields[19])


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
