"""Worker processes that may die: every call is supervised, and what a death costs is one call.

A worker is forked from a clean server process, leads a process group of its own, and ends with the process that
started it, however that ends. A call that crashes, exits or takes too long is `Lost`, with the reason; its worker is
replaced.

The first signal to this process lets work in flight be recorded (`stoppable`), the second ends it at once.
"""

from __future__ import annotations

import faulthandler
import math
import multiprocessing.util
import os
import queue
import re
import resource
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from dse.errors import Broken, disk_is_full
from dse.plugins import DoctorCheck, Level, safe_imports

_GRACE_S = 2.0  # from being asked to end to being made to
# read once, when the libraries are loaded
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
_CONTROL_GROUP = Path("/sys/fs/cgroup")
_LITTLE_MEMORY = 2 << 30
_SAID = 2000  # characters that are kept of what a lost call wrote

SIGNALS_OF_A_TERMINAL = (signal.SIGINT, signal.SIGHUP)
"""Ctrl-C, and the end of the terminal, such as a closed ssh session."""
SIGNALS = (*SIGNALS_OF_A_TERMINAL, signal.SIGTERM)

Call = Callable[[Any], Any]


class Lost(Exception):
    """A call whose process ended or had to be ended; the text says how, and what it wrote last.

    A backend raises it where a process of its own was lost through no fault of the design: that is tried again.
    """


class Pool:
    """`size` workers, started when they are needed. serve: what a worker does with an argument (a module's function).

    first: the argument that a new worker is given, without a time limit, before any other: it may have to import.
    memory_bytes: address space of each; None for no limit. Close it when done.
    """

    def __init__(self, serve: Call, first: Any, *, size: int, memory_bytes: float | None = None) -> None:
        self._serve, self._first, self._memory = serve, first, memory_bytes
        # workers that are running first: the others may never be needed
        self._idle: queue.Queue[_Worker | None] = queue.LifoQueue()
        for _ in range(size):
            self._idle.put(None)  # a worker that was not started
        _check_room()
        self._lock = threading.Lock()
        self._alive: set[_Worker] = set()
        self.closed = False

    def call(self, argument: Any, timeout_s: float | None = None) -> Any:
        """Run `serve(argument)` in a worker. Thread-safe.

        Raises Lost, OSError for a full disk, and RuntimeError for all else that it raises.
        """
        worker = self._idle.get()
        try:
            if self.closed:
                raise Lost("the workers were ended")
            if worker is None:
                with self._lock:  # starting one is not thread-safe
                    worker = _Worker(self._serve, self._memory)
                    self._alive.add(worker)
                worker.call(self._first, None)
            return worker.call(argument, timeout_s)
        except Lost:
            if worker is not None:
                self._alive.discard(worker)
            worker = None  # its place is free for a new one
            raise
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """End all workers; calls that are under way are lost."""
        self.closed = True
        while self._alive:
            self._alive.pop().end()


def num_cpus() -> int:
    """CPUs that this process may use, as far as its affinity and its control group let it."""
    allowed = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):  # without a limit the quota is `max`
        quota, period = (_CONTROL_GROUP / "cpu.max").read_text("utf-8").split()
        allowed = min(allowed, math.ceil(int(quota) / int(period)))
    return allowed


def check_machine(options: Mapping[str, str]) -> Iterator[DoctorCheck]:
    """Yield a line of `dse doctor`: cores and memory that this process may use, limits of a container included."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):
        memory = min(memory, int((_CONTROL_GROUP / "memory.max").read_text("utf-8")))
    level: Level = "ok" if memory >= _LITTLE_MEMORY else "warn"
    way = "" if level == "ok" else "set executor.jobs=1 and a smaller budget.trials"
    yield DoctorCheck(level, "machine", f"{num_cpus()} cores, {memory / 2**30:.1f} GiB of memory", way)


def _check_room() -> None:
    """Raise OSError where the name of a socket would be too long: 107 characters, of which 18 are added."""
    folder = multiprocessing.util.get_temp_dir()
    if len(folder) > 107 - 18:  # sun_path of a Unix socket, less its final NUL
        raise OSError(f"the folder for temporary files, {folder}, has too long a name for sockets: set TMPDIR=/tmp")


class _Worker:
    """One process, and the file that takes what it writes."""

    def __init__(self, serve: Call, memory_bytes: float | None) -> None:
        # a fork of this process would copy its threads' locks as they are
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([serve.__module__])  # once, instead of in each worker
        handle, self._name = tempfile.mkstemp(prefix="dse-worker-")
        self._said = os.fdopen(handle, "rb")
        self._pipe, theirs = context.Pipe()
        arguments = (theirs, serve, memory_bytes, self._name)
        self._process = context.Process(target=_work, args=arguments, daemon=True)  # ends with this process
        with _one_thread(), _without_script(), safe_imports(), signals_for_this_process(SIGNALS):
            self._process.start()
        theirs.close()  # or the pipe would stay open when the worker ends

    def call(self, argument: Any, timeout_s: float | None) -> Any:
        try:
            self._pipe.send(argument)
            # also wakes where the process ends without an answer
            if not wait([self._pipe, self._process.sentinel], timeout_s):
                raise Lost(self.end(f"TIMEOUT after {timeout_s:g} s"))
            fine, answer = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise Lost(self.end(None)) from error
        if fine:
            return answer
        raise answer

    def end(self, why: str | None = "") -> str:
        """End the process and its group; why it is ended, or (None) how it ended by itself, and what it said last."""
        if why is None:
            self._process.join(_GRACE_S)  # it is ending: wait for its exit code
        _end_group(self._process)
        self._pipe.close()
        output = "" if self._said.closed else _shorten(self._said.read().decode(errors="replace").strip())
        self._said.close()
        Path(self._name).unlink(missing_ok=True)  # if it did not come to that
        reason = _how_it_ended(self._process.exitcode) if why is None else why
        return f"{reason}: {output}" if output else reason


def _shorten(text: str) -> str:
    """The beginning and the end of a text, without what differs from process to process."""
    same = re.sub(r"\b0x[0-9a-f]{6,}", "0x...", text)  # addresses: equal failures must have equal reasons
    # the end says more: the error itself
    return same if len(same) <= _SAID else f"{same[: _SAID // 4]} ... {same[-_SAID * 3 // 4 :]}"


def _how_it_ended(code: int | None) -> str:
    if code is None or code >= 0:
        return f"EXIT {code}"
    name = signal.Signals(-code).name
    return f"CRASH {name}" + (" (killed, or out of memory)" if name == "SIGKILL" else "")


def _end_group(process: Any) -> None:
    """Ask a process group to end, then make it; collect its leader."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        process.join(_GRACE_S)
        if process.exitcode is not None:
            break
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # what outlived its leader


@contextmanager
def signals_for_this_process(numbers: Collection[int]) -> Iterator[None]:
    """While processes or threads of a library start: these signals, which reach a whole group, are for this one alone.

    A signal that is blocked stays so in all that is started meanwhile. It waits for this thread until that is over.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        resource_tracker.ensure_running()  # the first process that is started would start it, which unblocks signals
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _one_thread() -> Iterator[None]:
    """While the server process starts: its workers, one per core, use one thread each unless told otherwise."""
    mine = [name for name in _THREADS if name not in os.environ]
    os.environ.update(dict.fromkeys(mine, "1"))
    try:
        yield
    finally:
        for name in mine:
            os.environ.pop(name, None)


@contextmanager
def _without_script() -> Iterator[None]:
    """While a process starts: it does not run the script again whose `dse.run` it works for, as it needs none of it."""
    with _STARTING:
        script = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = script


_STARTING = threading.Lock()


def _work(pipe: Connection, serve: Call, memory_bytes: float | None, output: str) -> None:
    """Serve calls in a worker process until it is told to end or its parent is gone."""
    os.setpgid(0, 0)  # so that what it starts can be ended with it
    # what reaches all processes of a terminal or a job is for the client, which ends its workers in order
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    handle = os.open(output, os.O_WRONLY | os.O_APPEND)
    Path(output).unlink()  # nobody else has to clean it up
    os.dup2(handle, 1)  # also what libraries write below Python
    os.dup2(handle, 2)
    faulthandler.enable(all_threads=False)  # where a crash happened, on standard error
    if memory_bytes is not None:
        # address space: resident memory cannot be limited
        resource.setrlimit(resource.RLIMIT_AS, (int(memory_bytes), int(memory_bytes)))
    threading.Thread(target=_follow, daemon=True).start()
    with suppress(EOFError, OSError):  # the parent has closed the pipe
        while True:
            argument = pipe.recv()
            os.ftruncate(handle, 0)  # what earlier calls wrote says nothing of this one
            pipe.send(_answer(serve, argument))


def _answer(serve: Call, argument: Any) -> tuple[bool, Any]:
    try:
        return True, serve(argument)
    except Broken as error:
        return False, error
    except Exception as error:
        if disk_is_full(error):
            return False, error
        return False, RuntimeError(f"{type(error).__name__}: {error}")  # any other might not survive the way back


def _follow() -> None:
    """End this process group when the parent ends."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os.killpg(0, signal.SIGKILL)


class SignalInterrupt(KeyboardInterrupt):
    """Told to stop by a signal; what was in flight is recorded."""

    def __init__(self, number: int = signal.SIGINT, text: str = "interrupted") -> None:
        super().__init__(text)
        self.number = number


class Stop:
    """A request to stop by the user (or a scheduler), and its signal."""

    def __init__(self) -> None:
        self.number = 0

    def __call__(self) -> bool:
        """True if the study is to stop."""
        return self.number != 0

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.number:  # the second one
            raise KeyboardInterrupt
        self.number = number
        print("stopping: what is in flight is recorded first (once more: stop now)", file=sys.stderr)


@contextmanager
def stoppable() -> Iterator[Stop]:
    """While it lasts, SIGINT, SIGHUP and SIGTERM ask for an end; in other threads than the main one nothing changes.

    SIGHUP stays ignored where it is, as `nohup` has it.
    """
    stop = Stop()
    main = threading.current_thread() is threading.main_thread()  # Python lets only the main thread set handlers
    ignored = [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else []
    before = {number: signal.signal(number, stop._handle) for number in SIGNALS if main and number not in ignored}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
