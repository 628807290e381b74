"""Commands of `python -m dse`, each in a process of its own that is forked from one that has imported everything.

Each must end within a time limit; its memory, its exit code and what it printed are taken down.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

Case = TypeVar("Case")

DOCUMENTED = (0, 2, 3, 4, 130, 143)
"""Exit codes that a command may end with."""
HANG_S = 30.0
"""After which a command is stopped."""
_ADDRESSES = 16 << 30  # bytes of address space of a command, so that a bomb does not take the machine with it
_PRINTED = ("stdout.txt", "stderr.txt")


@dataclass(frozen=True)
class CommandEnd(Generic[Case]):
    """How a command ended. code: exit code, negative for a signal, None where it was stopped."""

    case: Case
    folder: Path
    code: int | None
    memory_mb: float
    seconds: float
    output: str
    errors: str

    @property
    def traceback(self) -> bool:
        """Whether it ended in a traceback, by a signal, or with an exit code that means nothing."""
        return self.code is not None and (self.code not in DOCUMENTED or "Traceback (most recent" in self.errors)

    @property
    def hang(self) -> bool:
        """Whether it had to be stopped."""
        return self.code is None


@dataclass
class Commands(Generic[Case]):
    """Commands that run now: file descriptor of the process -> (case, folder, process, when it began)."""

    limit_s: float = HANG_S
    running: dict[int, tuple[Case, Path, int, float]] = field(default_factory=dict)

    def start(self, case: Case, words: Sequence[str], folder: Path, before: Callable[[], object] = bool) -> None:
        """Fork a command that runs in a folder, where `stdout.txt` and `stderr.txt` hold what it prints. before: what
        its process does first.
        """
        from dse.cli import main

        def work() -> int:
            before()
            return main(words)

        sys.stdout.flush()
        if (child := os.fork()) == 0:
            sys.argv = ["dse", *words]
            code = 1
            try:
                code = inside(folder, work)
            finally:  # whatever happens, this process must not go on as its parent
                os._exit(code)
        self.running[os.pidfd_open(child)] = (case, folder, child, time.monotonic())

    def ended(self) -> Iterator[CommandEnd[Case]]:
        """The commands that ended since, after waiting for one; those that take too long are stopped."""
        poll = select.poll()
        for descriptor in self.running:
            poll.register(descriptor, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(500)}
        for descriptor, (case, folder, child, began) in list(self.running.items()):
            taken = time.monotonic() - began
            late = descriptor not in ready and taken > self.limit_s
            if late:
                with suppress(ProcessLookupError):
                    os.killpg(child, signal.SIGKILL)
            if late or descriptor in ready:
                del self.running[descriptor]
                os.close(descriptor)
                yield _ended(case, folder, child, taken, late=late)


def _ended(case: Case, folder: Path, child: int, seconds: float, *, late: bool) -> CommandEnd[Case]:
    _, status, used = os.wait4(child, 0)
    with suppress(ProcessLookupError):  # of what it started nothing may go on
        os.killpg(child, signal.SIGKILL)
    paths = [folder / name for name in _PRINTED]
    output, errors = (path.read_text("utf-8", "replace") if path.exists() else "" for path in paths)
    code = None if late else os.waitstatus_to_exitcode(status)
    return CommandEnd(case, folder, code, used.ru_maxrss / 1024, seconds, output, errors)


def inside(folder: Path, work: Callable[[], int]) -> int:
    """The exit code of work in a folder, as a process of its own would end; what it prints is in files there."""
    os.chdir(folder)
    os.setsid()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESSES, _ADDRESSES))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in enumerate(_PRINTED, start=1):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600), number)
    try:
        code = work()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    with suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    return code


def import_all() -> None:
    """Import what commands import, which starts no thread."""
    os.environ |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}  # before numpy reads it
    import dse.run_study  # noqa: F401
    from dse import plugins

    for kind in plugins.KINDS:
        plugins.available(kind)


def show_progress(done: int, total: int, began: float) -> None:
    """Print how many cases are done, the rate and the time left, to standard error."""
    taken = time.monotonic() - began
    rate = done / taken if taken else 0.0
    left = f"{(total - done) / rate:,.0f} s left" if rate else ""
    end = "\r" if sys.stderr.isatty() and done < total else "\n"
    if end == "\r" or done % 25 == 0 or done == total:
        print(f"{done}/{total} cases, {rate:.1f} cases/s, {left}   ", file=sys.stderr, end=end, flush=True)
