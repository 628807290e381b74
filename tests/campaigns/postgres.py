"""A real PostgreSQL server for tests: a cluster in a folder of its own, killed and restarted at will."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


def programs() -> Path | None:
    """The folder of the newest PostgreSQL installed: Debian's, or that of `pg_ctl` on the path."""
    debian = sorted(Path("/usr/lib/postgresql").glob("*/bin/pg_ctl"), key=lambda path: int(path.parts[-3]))
    program = shutil.which("pg_ctl")
    return debian[-1].parent if debian else Path(program).parent if program else None


@dataclass(frozen=True)
class Server:
    """A running server on a port. inside: words before commands that run on its host (`tests.campaigns.network`).

    options: more of its own, as words.
    """

    bin: Path
    folder: Path
    port: int
    host: str = "127.0.0.1"
    inside: Sequence[str] = ()
    options: Sequence[str] = ()

    @property
    def log(self) -> str:
        """All that it has said so far."""
        return (self.folder / "server.log").read_text(encoding="utf-8", errors="replace")

    def database(self, name: str) -> str:
        """The URL of a fresh database; any password will do."""
        self._run("createdb", "-h", self.host, "-p", str(self.port), "-U", "tester", name)
        return f"postgresql://tester:secret@{self.host}:{self.port}/{name}"

    def restart(self) -> None:
        """Kill it without a checkpoint, as a crash would, and start it again."""
        self._control("restart", "-m", "immediate")

    def start(self) -> None:
        """Make the cluster and start it."""
        self._run("initdb", "-D", str(self.folder), "-U", "tester", "-A", "trust", "--no-sync")
        with (self.folder / "pg_hba.conf").open("a") as rules:
            rules.write("host all all samenet trust\n")
        self._control("start")

    def stop(self) -> None:
        """End it at once."""
        self._control("stop", "-m", "immediate")

    def _control(self, action: str, *words: str) -> None:
        log = ("-l", str(self.folder / "server.log"))  # or it would hold the pipe on which its output is waited for
        options = () if action == "stop" else (*log, "-o", self._options)
        self._run("pg_ctl", "-D", str(self.folder), "-w", "-t", "180", action, *words, *options)

    def on_socket(self, url: str) -> str:
        """The URL of one of its databases by way of its Unix socket."""
        return f"postgresql://tester@/{url.rpartition('/')[2]}?host={self.folder}&port={self.port}"

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop all its processes where they are, for a while: connections stay, and nothing answers."""
        main = int((self.folder / "postmaster.pid").read_text().split()[0])
        os.kill(main, signal.SIGSTOP)  # first, so that it starts no other
        children = [int(pid) for pid in Path(f"/proc/{main}/task/{main}/children").read_text().split()]
        for pid in children:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in (*children, main):
                os.kill(pid, signal.SIGCONT)

    @property
    def _options(self) -> str:
        """How it is started: on its port and a socket in its folder."""
        place = f"-p {self.port} -c listen_addresses={self.host} -c unix_socket_directories={self.folder}"
        return " ".join([place, *self.options])

    def _run(self, program: str, *words: str) -> None:
        nobody = ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups"]
        done = subprocess.run(
            [*self.inside, *(nobody if self.inside else []), str(self.bin / program), *words],
            preexec_fn=None if self.inside else _not_root,
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
def running(
    folder: Path, host: str = "127.0.0.1", inside: Sequence[str] = (), options: Sequence[str] = ()
) -> Iterator[Server]:
    """A server while it lasts. folder: new, below one that anybody may enter. The others are as in `Server`."""
    bin_ = programs()
    assert bin_ is not None
    folder.mkdir()
    if os.getuid() == 0:
        nobody = pwd.getpwnam("nobody")
        os.chown(folder, nobody.pw_uid, nobody.pw_gid)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = Server(bin_, folder, port, host, inside, options)
    server.start()
    try:
        yield server
    finally:
        server.stop()
