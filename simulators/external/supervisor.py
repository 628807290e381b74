"""Runs one program and leaves nothing of it behind, however it ends: a script of its own, one for every run.

It stands between a worker and the program that it was asked to run, because a worker that is killed can clean up
nothing. Its standard input is a lifeline: when that closes, the worker wants no result any more or is dead, and the
program's process group is asked to end (SIGTERM) and, after a grace, made to. Whatever the program started becomes a
child of the supervisor once orphaned (`PR_SET_CHILD_SUBREAPER`), so it is found and killed as well. If the supervisor
itself is killed, the kernel kills the program (`PR_SET_PDEATHSIG`).

Linux only, and only modules that load fast: it is started once for every point.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
import sys
import time

GRACE_S = 1.5
"""Between asking a program to end and making it."""
_SWEEP_S = 1.0  # for the kernel to take away what was killed; a process that waits for a dead disk stays
_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36  # of prctl(2)
_LIMITED = (resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_FSIZE)
_IGNORED_BY_PYTHON = (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ)


def supervise(shared: list[int], limits: list[int], *, variables: list[str], stdin: str, command: list[str]) -> None:
    """Run a command; what becomes of it is written to a descriptor.

    shared: that descriptor, and the one whose lock says that the scratch folder is in use while the worker or this
    process lives; neither is for the program.
    One line each: `pid <its process id>`, then `error <reason>` if it could not be started, then `ended <code>`: its
    exit code, or minus the signal that ended it. limits: address space [bytes], CPU time [s], size of a file [bytes],
    -1 for none. variables: names of those that it gets of this environment, beside TMPDIR, its scratch folder. stdin:
    the file that it reads as standard input.
    """
    told, _ = shared
    for one in shared:
        os.set_inheritable(one, False)
    worker, folder = os.getppid(), os.getcwd()
    environment = {name: os.environ[name] for name in variables if name in os.environ} | {"TMPDIR": folder}
    _prctl(_SET_CHILD_SUBREAPER, 1)
    supervisor = os.getpid()
    child = os.fork()
    if child == 0:
        try:
            _confine(limits, stdin, supervisor)
            os.execve(command[0], command, environment)
        except BaseException as error:
            reason = error.strerror if isinstance(error, OSError) else type(error).__name__
            os.write(told, f"error {reason}\n".encode())
        finally:
            os._exit(127)
    os.write(told, f"pid {child}\n".encode())
    code = _ended(child)
    _sweep()
    if os.getppid() == worker:
        os.write(told, f"ended {code}\n".encode())
    else:
        _remove(folder)


def _confine(limits: list[int], stdin: str, supervisor: int) -> None:
    """Make this process what a program finds itself in: a session of its own, limited, with fresh signals."""
    os.setsid()
    _prctl(_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:
        os._exit(127)
    for one in _IGNORED_BY_PYTHON:
        signal.signal(one, signal.SIG_DFL)
    os.dup2(os.open(stdin, os.O_RDONLY), 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for kind, most in zip(_LIMITED, limits, strict=True):
        if most >= 0:
            _limit(kind, most)


def _limit(kind: int, most: int) -> None:
    """Bound a resource, as far as that is below what this process may have itself.

    A second of CPU time lies between SIGXCPU and SIGKILL.
    """
    hard = resource.getrlimit(kind)[1]
    ends = most + (kind == resource.RLIMIT_CPU)
    resource.setrlimit(kind, (most, ends) if hard == resource.RLIM_INFINITY else (min(most, hard), min(ends, hard)))


def _ended(child: int) -> int:
    """Wait until the child ends or the lifeline is cut; how it ended."""
    watched = os.pidfd_open(child)
    ready, _, _ = select.select([sys.stdin, watched], [], [])
    if watched not in ready:
        _signal(child, signal.SIGTERM)
        select.select([watched], [], [], GRACE_S)
    _signal(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _signal(child: int, number: int) -> None:
    """Signal a child that was not waited for yet, and its process group."""
    os.kill(child, number)
    try:
        os.killpg(child, number)
    except ProcessLookupError:
        pass  # it had no time to become one


def _sweep() -> None:
    """Kill what is left of the descendants, until none is."""
    until = time.monotonic() + _SWEEP_S
    while time.monotonic() < until:
        try:
            if os.waitpid(-1, os.WNOHANG)[0]:
                continue
        except ChildProcessError:
            return
        for child in _children():
            os.kill(child, signal.SIGKILL)
        time.sleep(0.002)


def _children() -> list[int]:
    """Process ids of the children of this process, those that were adopted included."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                parent = file.read().rpartition(")")[2].split()[1]
        except OSError:
            continue  # it is gone
        if int(parent) == os.getpid():
            found.append(int(name))
    return found


def _remove(folder: str) -> None:
    """Take away the scratch folder that the dead worker cannot."""
    import shutil

    shutil.rmtree(folder, ignore_errors=True)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    _shared, _limits, _variables, _stdin, *_command = sys.argv[1:]
    supervise(
        [int(one) for one in _shared.split(",")],
        [int(limit) for limit in _limits.split(",")],
        variables=_variables.split(","),
        stdin=_stdin,
        command=_command,
    )
