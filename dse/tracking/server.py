"""The command `ui`: MLflow's own server and UI on this machine, which leave no process behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
import webbrowser
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Final

from dse.errors import ConfigError, Problem, hidden, pairs
from dse.errors.parsing import whole_number
from dse.results import output_files
from dse.tracking.database import (
    DEFAULT_URI,
    ENVIRONMENT,
    TrackingError,
    artifact_root,
    is_sql,
    open_store,
    resolve,
    sqlite_file,
)

_NOTICES: Final = ("[MLflow] Security middleware enabled with default settings", "Registry store URI not provided")
_PATIENCE_S: Final = 60.0  # for the server to answer
# Quiet, and no waiting for a browser tab that keeps its connection open (seconds).
_UVICORN: Final = "--timeout-graceful-shutdown 3 --log-level warning --no-access-log"


@output_files.working_on_folders
def ui(words: Sequence[str]) -> int:
    """`ui [uri=<tracking uri>] [port=5000] [open=auto|true|false]`: serve the MLflow UI on 127.0.0.1, with one worker.

    Once it answers, the addresses of each study's best points are printed, and the newest is opened in a browser where
    there is one and a person at a terminal.
    """
    arguments = pairs(words, {"uri": DEFAULT_URI, "port": "5000", "open": "auto"})
    if arguments["open"] not in ("auto", "true", "false"):
        raise ConfigError([Problem("open", "must be auto, true or false", arguments["open"])])
    port = whole_number(arguments["port"])
    if port is None or not 0 < port < 65536:
        raise ConfigError([Problem("port", "must be a number from 1 to 65535", arguments["port"])])
    wanted = arguments["open"] == "true" or (arguments["open"] == "auto" and sys.stdout.isatty())
    lines = partial(_links, arguments["uri"], open_first=wanted)
    return serve(arguments["uri"], port=port, lines=lines)


def _links(uri: str, address: str, *, open_first: bool) -> Iterator[str]:
    """Yield a line for each study with its saved view; open the newest in a browser, if wanted."""
    from dse.tracking.shared_views import links  # imports what takes longer than to start the server

    try:
        pages = list(links(open_store(uri).client, address))
    except TrackingError:  # the server says what is wrong
        return
    if pages and open_first:
        webbrowser.open(pages[0][1])
    for study, link in pages:
        yield f"{study}: {link}"


def serve(uri: str, *, port: int = 5000, lines: Callable[[str], Iterable[str]] = lambda address: ()) -> int:
    """Serve the MLflow UI on 127.0.0.1 until Ctrl-C, and return the exit code.

    One worker and no job runner: 2 processes and about 0.5 GB instead of 15 and 2.8 GB. lines: what to print once the
    server at an address answers.

    Returns:
        0 after Ctrl-C (or SIGTERM, SIGHUP), 2 if there is nothing to serve or the port cannot be
        used, otherwise the exit code of a server that ended by itself.
    """
    where = resolve(uri)
    if where.startswith(("http:", "https:")):
        print(f"{hidden(where)} is a server already: open it in the browser.")
        return 0
    obstacle = _obstacle(where, port)
    if obstacle:
        print(obstacle, file=sys.stderr)
        return 2
    address = f"http://127.0.0.1:{port}"
    print(f"MLflow is starting on port {port}. Ctrl-C stops it.", flush=True)
    threading.Thread(target=_tell_when_ready, args=(address, lines), daemon=True).start()
    return _run_server(where, port)


def _tell_when_ready(address: str, lines: Callable[[str], Iterable[str]]) -> None:
    """Wait until the server answers, then print that it does, and further lines."""
    began, further = time.monotonic(), list(lines(address)) or [address]
    while time.monotonic() - began < _PATIENCE_S:
        with suppress(OSError), urllib.request.urlopen(f"{address}/health", timeout=1):
            print(f"ready after {time.monotonic() - began:.1f} s", *further, sep="\n", flush=True)
            return
        time.sleep(0.1)


def _obstacle(uri: str, port: int) -> str | None:
    """Describe why the UI cannot be served; None if it can."""
    file = sqlite_file(uri)
    if file is not None and not file.is_file():
        # a server would make an empty database there
        return f"There is no tracking database at {file}: run a study with tracking first."
    if file is not None and not _may_be_sqlite(file):
        repair = f"python -m dse store sync repair=true uri=sqlite:///{file}"
        return f"{file} is no database, or damaged: `{repair}` builds it again."
    if not is_sql(uri):
        return f"The MLflow UI needs a database (sqlite:/// or postgresql://), not {hidden(uri)}."
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError) as error:
            return f"Port {port} of 127.0.0.1 cannot be used ({error}): choose another port."
    return None


def _may_be_sqlite(file: Path) -> bool:
    """Return whether a file is empty or begins as a database of SQLite does."""
    with file.open("rb") as opened:
        return opened.read(16) in (b"", b"SQLite format 3\0")


def _run_server(uri: str, port: int) -> int:
    """Run MLflow's server until it ends or this process is told to stop; leave none behind.

    The server gets its own process group, so that only this process stops it: from a terminal its
    two processes would each get Ctrl-C, and then once more from each other.
    """
    command = [
        *(sys.executable, "-P", "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)),
        *("--workers", "1", "--uvicorn-opts", _UVICORN),
    ]
    # By environment, not by argument: a PostgreSQL URI may hold a password, and anyone can list
    # arguments.
    environment = (
        ENVIRONMENT
        | os.environ  # the user's own settings come before ours, those below after
        | {
            "MLFLOW_BACKEND_STORE_URI": uri,
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
            "MLFLOW_REGISTRY_STORE_URI": uri,
            "PYTHONWARNINGS": "ignore",
        }
    )
    command += ["--artifacts-destination", artifact_root(uri)]
    with _interruptible() as ignore:
        server = subprocess.Popen(
            command,
            env=environment,
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        threading.Thread(target=_pass_on, args=(server,), daemon=True).start()
        try:
            code = server.wait()
            print(f"The MLflow server ended by itself (exit code {code}).", file=sys.stderr)
            return code or 1  # it was to run until Ctrl-C, so that any end is a failure
        except KeyboardInterrupt:
            return 0
        finally:
            ignore()  # a second Ctrl-C must not leave a server behind
            _stop_group(server)


def _pass_on(server: subprocess.Popen[str]) -> None:
    """Print what the server says, but its notices of defaults."""
    assert server.stdout is not None
    for line in server.stdout:
        if not line.startswith(_NOTICES):
            print(line, end="", file=sys.stderr, flush=True)


@contextmanager
def _interruptible() -> Iterator[Any]:
    """Let SIGTERM and SIGHUP interrupt like Ctrl-C; yield a function that makes the process ignore all three."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    def ignore() -> None:
        for number in before:
            signal.signal(number, signal.SIG_IGN)

    main = threading.current_thread() is threading.main_thread()  # only it may set handlers
    before = {number: signal.signal(number, interrupt) for number in numbers if main}
    try:
        yield ignore
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop_group(server: subprocess.Popen[str]) -> None:
    """End the server and its child processes: terminate, wait up to 10 s, then kill."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(server.pid, number)  # the group: uvicorn's worker, too
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            server.poll()  # reaps the leader, which otherwise stays in the group for ever
            try:
                os.killpg(server.pid, 0)
            except ProcessLookupError:
                return
            time.sleep(0.05)
