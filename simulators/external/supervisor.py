"""Script that runs one program and leaves none of its processes behind, however it ends; started for every run.

The script stands between a worker and its program, because a killed worker cannot clean up. Its standard input is a
lifeline: when that closes, the worker no longer wants a result or is dead, and the program's process group is asked to
end (SIGTERM) and, after a grace period, killed. Orphans of the program become children of the supervisor
(`PR_SET_CHILD_SUBREAPER`), so that they are found and killed as well. If the supervisor itself is killed, the kernel
kills the program (`PR_SET_PDEATHSIG`).

Linux only, and only modules that load fast, because the script is started once for every point.
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
"""Seconds between SIGTERM and SIGKILL."""
_SWEEP_S = 1.0  # for the kernel to remove killed processes; one that waits for a dead disk stays
_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36  # of prctl(2)
_LIMITED = (resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_FSIZE)
_IGNORED_BY_PYTHON = (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ)


def supervise(shared: list[int], limits: list[int], *, variables: list[str], stdin: str, command: list[str]) -> None:
    """Run a command and write its status to a descriptor.

    The status has one line each: `pid <process id>`, then `error <reason>` if the program could not be started, then
    `ended <code>`: its exit code, or minus the signal that ended it.

    shared: the descriptor of the status, and one whose lock marks the scratch folder as in use while the worker or this
    process lives; the program inherits neither. limits: address space [bytes], CPU time [s], size of a file [bytes], -1
    for none. variables: names of the environment's variables that are passed on, beside TMPDIR, the scratch folder.
    stdin: file that the program reads as standard input.
    """
    status_fd, _ = shared
    for descriptor in shared:
        os.set_inheritable(descriptor, False)
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
            os.write(status_fd, f"error {reason}\n".encode())
        finally:
            os._exit(127)
    os.write(status_fd, f"pid {child}\n".encode())
    code = _wait_for(child)
    _sweep()
    if os.getppid() == worker:
        os.write(status_fd, f"ended {code}\n".encode())
    else:
        _remove(folder)


def _confine(limits: list[int], stdin: str, supervisor: int) -> None:
    """Prepare this process for the program: a session of its own, limits, and default signal handlers."""
    os.setsid()
    _prctl(_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:
        os._exit(127)
    for number in _IGNORED_BY_PYTHON:
        signal.signal(number, signal.SIG_DFL)
    os.dup2(os.open(stdin, os.O_RDONLY), 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for kind, most in zip(_LIMITED, limits, strict=True):
        if most >= 0:
            _limit(kind, most)


def _limit(kind: int, most: int) -> None:
    """Limit a resource, at most to the limit of this process itself.

    A second of CPU time lies between SIGXCPU and SIGKILL.
    """
    hard = resource.getrlimit(kind)[1]
    ends = most + (kind == resource.RLIMIT_CPU)
    resource.setrlimit(kind, (most, ends) if hard == resource.RLIM_INFINITY else (min(most, hard), min(ends, hard)))


def _wait_for(child: int) -> int:
    """Wait until the child ends or the lifeline is cut, and return its exit code, or minus the signal."""
    watched = os.pidfd_open(child)
    ready, _, _ = select.select([sys.stdin, watched], [], [])
    if watched not in ready:
        _signal(child, signal.SIGTERM)
        select.select([watched], [], [], GRACE_S)
    _signal(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _signal(child: int, number: int) -> None:
    """Send a signal to a child that was not waited for yet, and to its process group."""
    os.kill(child, number)
    try:
        os.killpg(child, number)
    except ProcessLookupError:
        pass  # the child has not become the leader of a group yet


def _sweep() -> None:
    """Kill the remaining descendants until none is left."""
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
    """Process ids of the children of this process, including adopted ones."""
    pids = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                parent = file.read().rpartition(")")[2].split()[1]
        except OSError:
            continue  # the process has ended
        if int(parent) == os.getpid():
            pids.append(int(name))
    return pids


def _remove(folder: str) -> None:
    """Remove the scratch folder in place of a dead worker."""
    import shutil

    shutil.rmtree(folder, ignore_errors=True)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    _shared, _limits, _variables, _stdin, *_command = sys.argv[1:]
    supervise(
        [int(descriptor) for descriptor in _shared.split(",")],
        [int(limit) for limit in _limits.split(",")],
        variables=_variables.split(","),
        stdin=_stdin,
        command=_command,
    )
