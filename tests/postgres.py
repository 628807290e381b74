"""A real PostgreSQL server for tests: a cluster in a folder of its own, killed and restarted at will."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


def programs() -> Path | None:
    """The folder of the newest PostgreSQL installed: Debian's, or that of `pg_ctl` on the path."""
    debian = sorted(Path("/usr/lib/postgresql").glob("*/bin/pg_ctl"), key=lambda path: int(path.parts[-3]))
    found = shutil.which("pg_ctl")
    return debian[-1].parent if debian else Path(found).parent if found else None


@dataclass(frozen=True)
class Server:
    """A running server on a port of 127.0.0.1."""

    bin: Path
    folder: Path
    port: int

    def database(self, name: str) -> str:
        """The URL of a fresh database."""
        self._run("createdb", "-h", "127.0.0.1", "-p", str(self.port), "-U", "tester", name)
        return f"postgresql://tester@127.0.0.1:{self.port}/{name}"

    def restart(self) -> None:
        """Kill it without a checkpoint, as a crash would, and start it again."""
        self._run("pg_ctl", "-D", str(self.folder), "-m", "immediate", "-w", "restart", "-o", self.options)

    @property
    def options(self) -> str:
        """How it is started: on its port alone, without a socket."""
        return f"-p {self.port} -c listen_addresses=127.0.0.1 -c unix_socket_directories='' -c logging_collector=on"

    def _run(self, program: str, *words: str) -> None:
        done = subprocess.run(
            [str(self.bin / program), *words],
            preexec_fn=_not_root,
            capture_output=True,
            text=True,
            cwd=self.folder,
            check=False,
        )
        assert done.returncode == 0, done.stderr


def _not_root() -> None:
    """PostgreSQL refuses to run as root."""
    if os.getuid() == 0:
        nobody = pwd.getpwnam("nobody")
        os.setgid(nobody.pw_gid)
        os.setuid(nobody.pw_uid)


@contextmanager
def running(folder: Path) -> Iterator[Server]:
    """A server while it lasts. folder: new, below one that anybody may enter."""
    bin_ = programs()
    assert bin_ is not None
    folder.mkdir()
    if os.getuid() == 0:
        nobody = pwd.getpwnam("nobody")
        os.chown(folder, nobody.pw_uid, nobody.pw_gid)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = Server(bin_, folder, port)
    server._run("initdb", "-D", str(folder), "-U", "tester", "-A", "trust", "--no-sync")
    server._run("pg_ctl", "-D", str(folder), "-w", "start", "-o", server.options, "-l", str(folder / "server.log"))
    try:
        yield server
    finally:
        server._run("pg_ctl", "-D", str(folder), "-m", "immediate", "stop")
