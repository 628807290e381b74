"""One run of a program: bounded in time, memory and output, in a folder of its own; none of its processes outlives it.

The program is started by a process of `simulators.external.supervisor`, which ends it when this process hangs up or
dies.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import IO

from simulators.external.supervisor import GRACE_S, Launch, send

_HANGS_UP_S = GRACE_S + 1.5  # the grace period of a program, and the time to clean up after it
_ERROR_BYTES = 1 << 16  # last bytes of standard error that are stored
_READ_BYTES = 1 << 16  # as much as a pipe holds by default
_PIPE_READS = (1 << 20) // _READ_BYTES  # for all that a pipe can hold
_ROOM_BYTES = 1 << 16  # with less, a disk counts as full
_PREFIX = "dse-external-"  # of scratch folders
_SUPERVISOR = Path(__file__).with_name("supervisor.py")


@dataclass(frozen=True)
class Limits:
    """Limits of a program. None: the limit of the process that starts it.

    timeout_s: wall-clock time. cpu_s: CPU time of each process. memory_bytes: address space of each process.
    file_bytes: size of a file. output_bytes: stored bytes of standard output; with `output_ends`, one more byte ends
    the run.
    """

    timeout_s: float
    output_bytes: int
    output_ends: bool = True
    cpu_s: int | None = None
    memory_bytes: int | None = None
    file_bytes: int | None = None

    @property
    def of_kernel(self) -> list[int]:
        """Limits enforced by the kernel, as the supervisor takes them."""
        return [-1 if limit is None else limit for limit in (self.memory_bytes, self.cpu_s, self.file_bytes)]


@dataclass(frozen=True)
class ProcessEnd:
    """End of a run.

    code: exit code, or minus the signal that ended the program; None if unknown. cut: the limit for which this process
    ended it ("time", "output"), or "". error: reason why it could not be started, or "". stdout: first bytes; stderr:
    last bytes, of error_size.
    """

    code: int | None
    cut: str
    error: str
    stdout: bytes
    stderr: bytes
    error_size: int


@dataclass
class _Stream:
    """Bytes of a stream: the first `most` of them, or the last."""

    most: int
    last: bool = False
    data: bytearray = field(default_factory=bytearray)
    size: int = 0

    def take(self, data: bytes) -> None:
        self.size += len(data)
        self.data += data if self.last else data[: self.most - len(self.data)]
        if self.last and len(self.data) > 2 * self.most:  # cut now and then, so that each byte is moved about once
            del self.data[: -self.most]

    @property
    def is_over(self) -> bool:
        return self.size > self.most

    @property
    def content(self) -> bytes:
        return bytes(self.data[-self.most :] if self.last else self.data)


@dataclass(frozen=True)
class Scratch:
    """A folder for one run. lock: descriptor whose lock is held while a process lives that will remove the folder."""

    folder: Path
    lock: int


@contextlib.contextmanager
def scratch() -> Iterator[Scratch]:
    """Provide an empty scratch folder, removed in the end. The first call also removes folders of killed runs."""
    root = tempfile.gettempdir()
    _sweep(root)  # once a process
    while (place := _lock_folder(tempfile.mkdtemp(prefix=_PREFIX, dir=root))) is None:
        pass  # another process swept it between its creation and the lock
    try:
        yield place
    finally:
        shutil.rmtree(place.folder, ignore_errors=True)
        os.close(place.lock)


def _lock_folder(folder: str, *, surely: bool = False) -> Scratch | None:
    """Lock a folder; None if another process holds the lock, or if the folder is gone.

    surely: raise OSError if the file system has no locks, so that nothing is ever swept there.
    """
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, handle)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a lock that is held is somebody's folder
        except BlockingIOError:
            return None
        except OSError:
            if surely:
                raise
        if not Path(folder).exists():  # removed between opening and locking
            return None
        undo.pop_all()
    return Scratch(Path(folder), handle)


@cache
def _sweep(root: str) -> None:
    """Remove the scratch folders of runs whose worker and supervisor were both killed, so that they are not locked."""
    for folder in Path(root).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            # never folders of other users
            if folder.lstat().st_uid == os.getuid() and (left := _lock_folder(str(folder), surely=True)) is not None:
                shutil.rmtree(left.folder, ignore_errors=True)
                os.close(left.lock)


def check_room(folder: Path) -> None:
    """Raise OSError where a disk is full, so that a run on it says nothing about the program."""
    disk = os.statvfs(folder)
    if disk.f_bavail * disk.f_frsize < _ROOM_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), tempfile.gettempdir())


class _ForkServer:
    """The process of `simulators.external.supervisor` for this one; it is started again if it was killed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._start()
        atexit.register(self.stop)

    def _start(self) -> None:
        self._channel, theirs = socket.socketpair()
        with theirs:
            # isolated and without site packages: it starts in milliseconds
            words = [sys.executable, "-I", "-S", str(_SUPERVISOR), str(theirs.fileno()), str(os.getpid())]
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # signals of the terminal are the worker's to handle
                pass_fds=[theirs.fileno()],
            )

    def send(self, launch: Launch, descriptors: list[int]) -> None:
        """Have a program started. Raises OSError if no process can be started."""
        with self._lock:  # threads of a worker share the channel
            try:
                send(self._channel, launch, descriptors)
            except OSError:  # it was killed: start another, once
                self.stop()
                self._start()
                send(self._channel, launch, descriptors)

    def stop(self) -> None:
        """End the process; supervisors that it started go on."""
        self._channel.close()
        self._process.kill()
        self._process.wait()


@cache
def _fork_server(pid: int) -> _ForkServer:
    """Return the server of this process, whose number is `pid`: a process that was forked has none yet."""
    return _ForkServer()


@dataclass(frozen=True)
class _Ends:
    """Ends of the pipes of a supervisor: one to write, whose closing ends it, and those to read."""

    lifeline: IO[bytes]
    out: IO[bytes]
    err: IO[bytes]
    status: IO[bytes]


def run(command: Sequence[str], limits: Limits, *, place: Scratch, stdin: Path, variables: Iterable[str]) -> ProcessEnd:
    """Run a command (the path of a program and its arguments) in a folder, with some variables of the environment.

    Raises OSError if no process can be started.
    """
    streams = {"out": _Stream(limits.output_bytes), "err": _Stream(_ERROR_BYTES, last=True), "status": _Stream(1 << 12)}
    # temporary files go with the folder
    environment = {name: os.environ[name] for name in variables if name in os.environ} | {"TMPDIR": str(place.folder)}
    launch = Launch(list(command), str(place.folder), environment, str(stdin), limits.of_kernel)
    with _start_supervisor(launch, place) as ends:
        try:
            cut = _read(ends, streams, limits)
        finally:  # also where the worker is interrupted
            _hang_up(ends, streams["status"])
    status = _status(streams["status"])
    if "ended" not in status:
        _kill_group(status.get("pid"))  # the supervisor was killed before it could clean up
    code = int(status["ended"]) if "ended" in status else None
    out, err = streams["out"], streams["err"]
    return ProcessEnd(code, cut, status.get("error", ""), stdout=out.content, stderr=err.content, error_size=err.size)


def _status(stream: _Stream) -> dict[str, str]:
    return dict(line.split(" ", 1) for line in stream.content.decode().splitlines())


def _pipe() -> Iterator[tuple[int, str]]:
    """Ends of a new pipe, with their modes."""
    return zip(os.pipe(), ("rb", "wb"), strict=True)


@contextlib.contextmanager
def _start_supervisor(launch: Launch, place: Scratch) -> Iterator[_Ends]:
    """Start a supervisor and provide our ends of its pipes."""
    with contextlib.ExitStack() as ours:
        with contextlib.ExitStack() as theirs:
            # of the lifeline the supervisor has the end to read, of the others that to write
            pairs = [(theirs, ours), *[(ours, theirs)] * 3]
            files = [
                [stack.enter_context(os.fdopen(*end, 0)) for stack, end in zip(pair, _pipe(), strict=True)]
                for pair in pairs
            ]
            (lifeline_read, lifeline), (out, out_write), (err, err_write), (status, status_write) = files
            given = [file.fileno() for file in (lifeline_read, out_write, err_write, status_write)]
            _fork_server(os.getpid()).send(launch, [*given, place.lock])
        yield _Ends(lifeline, out, err, status)


def _hang_up(ends: _Ends, status: _Stream) -> None:
    """Close the lifeline and wait for the supervisor; kill one that cannot end its program."""
    ends.lifeline.close()  # the end of the lifeline makes the supervisor end the program
    until = time.monotonic() + _HANGS_UP_S
    with selectors.DefaultSelector() as selector:
        selector.register(ends.status, selectors.EVENT_READ, status)
        while selector.get_map() and time.monotonic() < until:
            _take(selector, until - time.monotonic())
        if selector.get_map():
            _kill(status)


def _read(ends: _Ends, streams: Mapping[str, _Stream], limits: Limits) -> str:
    """Read all streams until the supervisor ends, and hang up at a limit; return the name of that limit, or ""."""
    cut, until = "", time.monotonic() + limits.timeout_s
    with selectors.DefaultSelector() as selector:
        for name, stream in streams.items():
            selector.register(getattr(ends, name), selectors.EVENT_READ, stream)
        while ends.status in (stream.fileobj for stream in selector.get_map().values()):
            left = until - time.monotonic()
            passed = "output" if limits.output_ends and streams["out"].is_over else "time" if left <= 0 else ""
            if passed and not cut:  # the first limit that is passed is the reason
                ends.lifeline.close()
                cut, left = passed, _HANGS_UP_S
                until = time.monotonic() + left
            elif left <= 0:  # the supervisor does not end: kill it
                _kill(streams["status"])
                break
            _take(selector, left)
        for _ in range(_PIPE_READS):  # the remainder of the pipes, without waiting for processes that still write
            _take(selector, 0)
    return cut


def _take(selector: selectors.BaseSelector, wait_s: float) -> None:
    """Read available data of each stream once, after waiting up to `wait_s`."""
    for key, _ in selector.select(wait_s) if selector.get_map() else ():  # all streams are at their ends
        data = os.read(key.fd, _READ_BYTES)
        key.data.take(data)
        if not data:  # the other end is closed
            selector.unregister(key.fileobj)


def _kill(status: _Stream) -> None:
    """Kill the supervisor, which has not ended; the process that was to fork it, if it has not told its number."""
    pid = _status(status).get("supervisor")
    if pid is None:  # it was killed before it wrote its number
        _fork_server(os.getpid()).stop()
    else:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def _kill_group(pid: str | None) -> None:
    """Kill the process group of a program whose supervisor did not report its end."""
    if pid is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(int(pid), signal.SIGKILL)
