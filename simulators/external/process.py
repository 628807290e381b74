"""Runs a program once: bounded in time, memory and output, in a folder of its own, and nothing of it outlives the run.

The program is not started from here but by `simulators.external.supervisor`, which ends it when this side hangs up or
dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import IO

from simulators.external.supervisor import GRACE_S

_HANGS_UP_S = GRACE_S + 1.5  # the grace of a program, and the time to sweep up after it
_ERROR_BYTES = 1 << 16  # of standard error, its last ones are kept
_READ_BYTES = 1 << 16
_PIPE_READS = (1 << 20) // _READ_BYTES  # as much as a pipe can hold
_PREFIX = "dse-external-"  # of scratch folders
_SUPERVISOR = Path(__file__).with_name("supervisor.py")


@dataclass(frozen=True)
class Limits:
    """What a program may use. None is no limit, but that of the process that starts it.

    timeout_s: wall-clock time. cpu_s: CPU time of each process. memory_bytes: address space of each process.
    file_bytes: size of a file. output_bytes: of standard output that are kept; with `output_ends`, one more ends the
    run.
    """

    timeout_s: float
    output_bytes: int
    output_ends: bool = True
    cpu_s: int | None = None
    memory_bytes: int | None = None
    file_bytes: int | None = None

    @property
    def text(self) -> str:
        """Those that the kernel keeps, for the supervisor."""
        limits = (self.memory_bytes, self.cpu_s, self.file_bytes)
        return ",".join(str(-1 if limit is None else limit) for limit in limits)


@dataclass(frozen=True)
class Ended:
    """How a run ended.

    code: exit code, or minus the signal that ended it; None where that is not known. cut: why it was ended from here
    ("time", "output"), or "". error: why it could not be started, or "". stdout: from the start, stderr: the end, of
    error_size bytes.
    """

    code: int | None
    cut: str
    error: str
    stdout: bytes
    stderr: bytes
    error_size: int


@dataclass
class _Kept:
    """Bytes of a stream: the first `most` of them, or the last."""

    most: int
    last: bool = False
    data: bytearray = field(default_factory=bytearray)
    size: int = 0

    def take(self, data: bytes) -> None:
        self.size += len(data)
        self.data += data if self.last else data[: self.most - len(self.data)]
        if self.last and len(self.data) > 2 * self.most:
            del self.data[: -self.most]

    @property
    def is_over(self) -> bool:
        return self.size > self.most

    @property
    def kept(self) -> bytes:
        return bytes(self.data[-self.most :] if self.last else self.data)


@dataclass(frozen=True)
class Scratch:
    """A folder for one run. lock: descriptor whose lock is held for as long as somebody lives who will remove it."""

    folder: Path
    lock: int


@contextlib.contextmanager
def scratch() -> Iterator[Scratch]:
    """An empty scratch folder, removed in the end; those that nobody lived to remove are so as well, once."""
    root = tempfile.gettempdir()
    _sweep(root)
    while (made := _locked(tempfile.mkdtemp(prefix=_PREFIX, dir=root))) is None:
        pass  # it was swept away between being made and being locked
    try:
        yield made
    finally:
        shutil.rmtree(made.folder, ignore_errors=True)
        os.close(made.lock)


def _locked(folder: str, *, surely: bool = False) -> Scratch | None:
    """A folder with its lock held; None if another has it, or if the folder is gone.

    surely: raises OSError where the file system has no locks; there nothing is ever swept.
    """
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, handle)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        except OSError:
            if surely:
                raise
        if not Path(folder).exists():
            return None
        undo.pop_all()
    return Scratch(Path(folder), handle)


@cache
def _sweep(root: str) -> None:
    """Remove the scratch folders of runs whose worker and supervisor were both killed: nobody holds their locks."""
    for folder in Path(root).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.lstat().st_uid == os.getuid() and (left := _locked(str(folder), surely=True)) is not None:
                shutil.rmtree(left.folder, ignore_errors=True)
                os.close(left.lock)


def run(command: Sequence[str], limits: Limits, *, place: Scratch, stdin: Path, variables: Iterable[str]) -> Ended:
    """Run a command (the path of a program and its arguments) in a folder, with some variables of the environment.

    Raises OSError if nothing can be started.
    """
    streams = {"out": _Kept(limits.output_bytes), "err": _Kept(_ERROR_BYTES, last=True), "told": _Kept(1 << 12)}
    with _started([limits.text, ",".join(variables), str(stdin), *command], place) as (supervisor, told):
        cut = _read(supervisor, told, streams=streams, limits=limits)
    said = dict(line.split(" ", 1) for line in streams["told"].kept.decode().splitlines())
    if "ended" not in said:
        _kill_group(said.get("pid"))
    code = int(said["ended"]) if "ended" in said else None
    out, err = streams["out"], streams["err"]
    return Ended(code, cut, said.get("error", ""), stdout=out.kept, stderr=err.kept, error_size=err.size)


@contextlib.contextmanager
def _started(words: Sequence[str], place: Scratch) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
    """A supervisor, and the end of the pipe through which it tells; hung up on and waited for in the end."""
    reads, writes = os.pipe()
    with os.fdopen(reads, "rb", buffering=0) as told:
        try:
            supervisor = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_SUPERVISOR), f"{writes},{place.lock}", *words],
                cwd=place.folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
                pass_fds=[writes, place.lock],
            )
        finally:
            os.close(writes)
        with supervisor:
            try:
                yield supervisor, told
            finally:
                _hang_up(supervisor)


def _hang_up(supervisor: subprocess.Popen[bytes]) -> None:
    """Cut the lifeline and wait; a supervisor that cannot end its program is ended, too."""
    assert supervisor.stdin is not None
    supervisor.stdin.close()
    try:
        supervisor.wait(_HANGS_UP_S)
    except subprocess.TimeoutExpired:
        supervisor.kill()


def _read(supervisor: subprocess.Popen[bytes], told: IO[bytes], *, streams: Mapping[str, _Kept], limits: Limits) -> str:
    """Read all streams until the supervisor is gone, hanging up where a limit is passed; which one, or ""."""
    assert supervisor.stdin is not None
    cut, until = "", time.monotonic() + limits.timeout_s
    with selectors.DefaultSelector() as selector:
        for name, stream in (("out", supervisor.stdout), ("err", supervisor.stderr), ("told", told)):
            selector.register(stream, selectors.EVENT_READ, name)  # type: ignore[arg-type]
        while told in (stream.fileobj for stream in selector.get_map().values()):
            left = until - time.monotonic()
            passed = "output" if limits.output_ends and streams["out"].is_over else "time" if left <= 0 else ""
            if passed and not cut:
                supervisor.stdin.close()
                cut, left = passed, _HANGS_UP_S
                until = time.monotonic() + left
            elif left <= 0:
                supervisor.kill()
                break
            _take(selector, streams, left)
        for _ in range(_PIPE_READS):  # what is left in the pipes; who still writes to them then, is not waited for
            _take(selector, streams, 0)
    return cut


def _take(selector: selectors.BaseSelector, streams: Mapping[str, _Kept], wait_s: float) -> None:
    """Read what there is within some seconds, a little of each stream."""
    for key, _ in selector.select(wait_s) if selector.get_map() else ():
        data = os.read(key.fd, _READ_BYTES)
        streams[key.data].take(data)
        if not data:
            selector.unregister(key.fileobj)


def _kill_group(pid: str | None) -> None:
    """Of a program whose supervisor did not come to tell its end, for one was killed or the other cannot be."""
    if pid is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(int(pid), signal.SIGKILL)
