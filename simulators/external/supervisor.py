"""Process that starts programs and leaves none of their processes behind, however they end; one for every worker.

It stands between a worker and its programs, because a killed worker cannot clean up. For each run it forks, which takes
less than starting an interpreter does; the fork is the supervisor of that run. The supervisor's standard input is a
lifeline: when that closes, the worker no longer wants a result or is dead, and the program's process group is asked to
end (SIGTERM) and, after a grace period, killed. Orphans of the program become children of the supervisor
(`PR_SET_CHILD_SUBREAPER`), so that they are found and killed as well. If the supervisor itself is killed, the kernel
kills the program (`PR_SET_PDEATHSIG`).

Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import shutil
import signal
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path

GRACE_S = 1.5
"""Seconds between SIGTERM and SIGKILL."""
ENDS = 5
"""Descriptors that come with a program to start."""
_SWEEP_S = 1.0  # for the kernel to remove killed processes; one that waits for a dead disk stays
_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36  # of prctl(2)
_LIMITED = (resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_FSIZE)
_OF_A_STOP = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)  # which a job's processes all get; the worker decides
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
_LENGTH_BYTES = 8


@dataclass(frozen=True)
class Launch:
    """A program to start: the words of its command, its folder and environment, and its limits.

    stdin: file that it reads as standard input. limits: address space [bytes], CPU time [s], size of a file [bytes], -1
    for none.
    """

    command: list[str]
    folder: str
    environment: dict[str, str]
    stdin: str
    limits: list[int]


def send(channel: socket.socket, launch: Launch, descriptors: list[int]) -> None:
    """Have a program started by the process at the other end. Raises OSError if there is none.

    descriptors: to read the lifeline, to write output, errors and status, and one whose lock marks the folder as in use
    while the worker or the supervisor lives.
    """
    text = json.dumps(vars(launch)).encode()
    socket.send_fds(channel, [len(text).to_bytes(_LENGTH_BYTES, "big")], descriptors)
    channel.sendall(text)


def _receive(channel: socket.socket) -> tuple[Launch, list[int]] | None:
    """Next program to start and its descriptors; None if the worker has hung up."""
    length, descriptors, _, _ = socket.recv_fds(channel, _LENGTH_BYTES, ENDS, socket.MSG_CMSG_CLOEXEC)
    if not length:
        return None
    with channel.makefile("rb", buffering=0) as rest:
        left, text = int.from_bytes(length, "big"), b""
        while left and (data := rest.read(left)):
            text, left = text + data, left - len(data)
    return None if left else (Launch(**json.loads(text)), descriptors)


def serve(channel: socket.socket, worker: int) -> None:
    """Fork a supervisor for every program that a worker wants to be started, until that hangs up."""
    watched = os.pidfd_open(worker)
    if os.getppid() != worker:
        return  # it is dead, and another process has its number
    for number in _OF_A_STOP:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for supervisors
    while received := _receive(channel):
        launch, descriptors = received
        try:
            is_supervisor = os.fork() == 0
        except OSError as error:
            os.write(descriptors[3], f"error {error.strerror}\nended 127\n".encode())
        else:
            if is_supervisor:
                channel.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                supervise(launch, watched, descriptors)
                os._exit(0)
        for descriptor in descriptors:
            os.close(descriptor)


def supervise(launch: Launch, worker: int, descriptors: list[int]) -> None:
    """Run a program and write its status.

    The status has one line each: `supervisor <process id>`, `pid <process id>`, then `error <reason>` if the program
    could not be started, then `ended <code>`: its exit code, or minus the signal that ended it.

    worker: descriptor of its process. descriptors: as sent.
    """
    *standard, status, _ = descriptors
    for number, descriptor in enumerate(standard):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(launch.folder)
    _prctl(_SET_CHILD_SUBREAPER, 1)
    supervisor = os.getpid()
    os.write(status, f"supervisor {supervisor}\n".encode())
    child = os.fork()
    if child == 0:
        try:
            _confine(launch, supervisor)
            os.execve(launch.command[0], launch.command, launch.environment)
        except BaseException as error:
            reason = error.strerror if isinstance(error, OSError) else type(error).__name__
            os.write(status, f"error {reason}\n".encode())
        finally:
            os._exit(127)
    with contextlib.suppress(BrokenPipeError):
        os.write(status, f"pid {child}\n".encode())
    code = _wait_for(child)
    _sweep()
    if select.select([worker], [], [], 0)[0]:
        shutil.rmtree(launch.folder, ignore_errors=True)
        return
    try:
        os.write(status, f"ended {code}\n".encode())
    except BrokenPipeError:  # the worker is about to be dead
        shutil.rmtree(launch.folder, ignore_errors=True)


def _confine(launch: Launch, supervisor: int) -> None:
    """Prepare this process for the program: a session of its own, limits, and default signal handlers."""
    os.setsid()
    _prctl(_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:
        os._exit(127)
    for number in (*_OF_A_STOP, *_IGNORED_BY_PYTHON):
        signal.signal(number, signal.SIG_DFL)
    os.dup2(os.open(launch.stdin, os.O_RDONLY), 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for kind, most in zip(_LIMITED, launch.limits, strict=True):
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
    ready, _, _ = select.select([0, watched], [], [])
    if watched not in ready:
        _signal(child, signal.SIGTERM)
        select.select([watched], [], [], GRACE_S)
    _signal(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _signal(child: int, number: int) -> None:
    """Send a signal to a child that was not waited for yet, and to its process group."""
    os.kill(child, number)
    with contextlib.suppress(ProcessLookupError):  # the child has not become the leader of a group yet
        os.killpg(child, number)


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
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[1]
        except OSError:
            continue  # the process has ended
        if int(parent) == os.getpid():
            pids.append(int(path.parent.name))
    return pids


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    _channel, _worker = map(int, sys.argv[1:])
    serve(socket.socket(fileno=_channel), _worker)
