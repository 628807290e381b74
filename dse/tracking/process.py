"""The background process that writes a finished study into MLflow: it imports MLflow, which takes seconds, meanwhile.

`python -m dse.tracking.process` is that process. It has a session of its own, so Ctrl-C is for the study to hear, and
it ends when the study's process does, however that ends.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dse.progress import bar
from dse.study.settings import Tracking
from dse.tracking.study import StudyFolder
from dse.tracking.views import News, Seen, show, total, warm, way_out

_NICENESS = 10  # importing MLflow takes no time from the study while there is something to evaluate


class BackgroundTracking:
    """The process that writes views, or nothing where no view is wanted."""

    def __init__(self, child: subprocess.Popen[str] | None, wanted: Tracking) -> None:
        self._child, self._wanted = child, wanted
        self._folder: Path | None = None

    def begin(self, folder: Path) -> None:
        """Have the points of a study run written: its table, summary, configuration and provenance are there."""
        if self._child is not None:
            self._folder = folder
            _send(self._child, json.dumps(str(folder)))

    def finish(self) -> None:
        """Have the rest written, now that the folder is whole; show the progress, and print what is said."""
        if self._child is None or self._folder is None:
            return
        _send(self._child, json.dumps("whole"))
        for sentence, failed in _told(self._child, self._folder, self._wanted):
            print(sentence, file=sys.stderr if failed else sys.stdout)


@contextmanager
def background_tracking(wanted: Tracking) -> Iterator[BackgroundTracking]:
    """While it lasts, a process stands ready to show a study."""
    if wanted.uri is None and wanted.optuna is None:
        yield BackgroundTracking(None, wanted)
        return
    found = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    child = subprocess.Popen(
        [sys.executable, "-P", "-W", "ignore", "-m", "dse.tracking.process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, found))},
    )
    with child:
        try:
            _send(child, wanted.model_dump_json())
            yield BackgroundTracking(child, wanted)
        finally:
            _end(child)


def _end(child: subprocess.Popen[str]) -> None:
    """Stop what still runs: it marks what it leaves half written, within ten seconds."""
    child.terminate()
    with suppress(OSError):
        child.stdin.close()  # type: ignore[union-attr]
    try:
        child.wait(10)
    except subprocess.TimeoutExpired:
        child.kill()


def _told(child: subprocess.Popen[str], folder: Path, wanted: Tracking) -> list[tuple[str, bool]]:
    """What the process says until it ends, and whether that is about a failure."""
    told: list[tuple[str, bool]] = []
    messages = _messages(child)
    count = next(messages, {}).get("total", 0)
    with bar(f"{folder.parent.name}: tracking", count) as advance:
        for message in messages:
            if "seen" in message:
                advance(message["seen"])
            elif "told" in message:
                told.append((message["told"], message["failed"]))
    if child.wait() != 0:
        lost = f"tracking was passed over: the process that writes it ended with exit code {child.returncode}"
        told.append((f"{lost}; {way_out(folder, wanted)}", True))
    return told


def _send(child: subprocess.Popen[str], line: str) -> None:
    with suppress(BrokenPipeError):  # it has ended; that is told where its words are waited for
        print(line, file=child.stdin, flush=True)


def _messages(child: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    for line in child.stdout or ():
        with suppress(json.JSONDecodeError):
            yield json.loads(line)


def _child() -> int:
    """The process beside a study: settings, then a folder come in as lines of JSON; progress and sentences go out."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no message
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    signal.signal(signal.SIGTERM, _told_to_end)
    threading.Thread(target=_listen, args=(lines,), daemon=True).start()
    wanted = Tracking.model_validate_json(lines.get())
    os.nice(_NICENESS)
    warm(wanted)
    folder = Path(json.loads(lines.get()))

    def say(**message: Any) -> None:
        print(json.dumps(message), file=out, flush=True)

    say(total=total(StudyFolder(folder), wanted))
    with _rarely(lambda count: say(seen=count)) as seen:
        news = News(seen, lambda told, failed: say(told=told, failed=failed), whole=lines.get)
        show(StudyFolder(folder), wanted, news)
    atexit.register(gc.freeze)  # the study waits for the end: no second of looking for garbage
    return 0


def _told_to_end(number: int, _frame: object) -> None:
    """End once, and in silence, however often it is told."""
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


def _listen(lines: queue.SimpleQueue[str]) -> None:
    """Pass lines on; when the other end closes, its process is dead or done with this one, which then ends, too."""
    for line in sys.stdin:
        lines.put(line)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(10)  # for a study run to be marked KILLED
    os._exit(1)


@contextmanager
def _rarely(seen: Seen) -> Iterator[Seen]:
    """Pass counts on ten times a second at most."""
    held, last = 0, time.monotonic()

    def count(more: int) -> None:
        nonlocal held, last
        held += more
        if time.monotonic() - last > 0.1:
            seen(held)
            held, last = 0, time.monotonic()

    yield count
    seen(held)


if __name__ == "__main__":
    sys.exit(_child())
