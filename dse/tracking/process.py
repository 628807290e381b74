"""Background process that writes a finished study into MLflow; it imports MLflow during the study, to save seconds.

`python -m dse.tracking.process` is that process. It has its own session, so that Ctrl-C reaches the study only, and it
ends with the study's process, however that ends.
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

from dse.errors import ConfigError
from dse.errors.parsing import parse_json
from dse.errors.terminal import bar
from dse.study.settings import TrackingSettings
from dse.tracking.study import StudyFolder
from dse.tracking.views import News, Seen, show, total, warm, way_out

_NICENESS = 10  # so that importing MLflow does not slow down the evaluation


class BackgroundTracking:
    """Handle of the process that writes views; without a view there is no process, and it does nothing."""

    def __init__(self, child: subprocess.Popen[str] | None, wanted: TrackingSettings) -> None:
        self._child, self._wanted = child, wanted
        self._folder: Path | None = None

    def begin(self, folder: Path) -> None:
        """Start to write the points of a study run, whose table, summary, configuration and provenance are complete."""
        if self._child is not None:
            self._folder = folder
            _send(self._child, json.dumps(str(folder)))

    def finish(self) -> None:
        """Write the rest once the folder is complete, show the progress, and print the process's messages."""
        if self._child is None or self._folder is None:
            return
        _send(self._child, json.dumps("whole"))
        for sentence, failed in _collect_sentences(self._child, self._folder, self._wanted):
            print(sentence, file=sys.stderr if failed else sys.stdout)


@contextmanager
def background_tracking(wanted: TrackingSettings) -> Iterator[BackgroundTracking]:
    """Run a process that is ready to write a study into its views."""
    if wanted.uri is None and wanted.optuna is None:
        yield BackgroundTracking(None, wanted)
        return
    # the child imports this very code, wherever it was started
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    child = subprocess.Popen(
        # no module of the working folder takes the place of a library
        [sys.executable, "-P", "-W", "ignore", "-m", "dse.tracking.process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )
    with child:
        try:
            _send(child, wanted.model_dump_json())
            yield BackgroundTracking(child, wanted)
        finally:
            _end(child)


def _end(child: subprocess.Popen[str]) -> None:
    """Stop the process, which has ten seconds to mark a half-written study run."""
    child.terminate()
    with suppress(OSError):
        # its reader ends at the end of its input
        child.stdin.close()  # type: ignore[union-attr]
    try:
        child.wait(10)
    except subprocess.TimeoutExpired:
        child.kill()


def _collect_sentences(child: subprocess.Popen[str], folder: Path, wanted: TrackingSettings) -> list[tuple[str, bool]]:
    """Collect the process's sentences until it ends, each with a flag that is true for a failure."""
    sentences: list[tuple[str, bool]] = []
    messages = _messages(child)
    count = next(messages, {}).get("total", 0)
    with bar(f"{folder.parent.name}: tracking", count) as advance:
        for message in messages:
            if "seen" in message:
                advance(message["seen"])
            elif "told" in message:
                sentences.append((message["told"], message["failed"]))
    if child.wait() != 0:
        lost = f"tracking was passed over: the process that writes it ended with exit code {child.returncode}"
        sentences.append((f"{lost}; {way_out(folder, wanted)}", True))
    return sentences


def _send(child: subprocess.Popen[str], line: str) -> None:
    with suppress(BrokenPipeError):  # it has ended, which `_collect_sentences` reports
        print(line, file=child.stdin, flush=True)


def _messages(child: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    for line in child.stdout or ():
        with suppress(ConfigError):  # a line that was cut off by its end
            yield parse_json(line, "message")


def _child() -> int:
    """Run the background process: settings, then a folder come in as lines of JSON; progress and sentences go out."""
    gc.set_threshold(50_000, 20, 20)  # importing MLflow makes millions of objects, and hardly any garbage
    out = os.fdopen(os.dup(1), "w")  # messages keep this channel to themselves
    os.dup2(2, 1)  # because prints of libraries are not messages
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    signal.signal(signal.SIGTERM, _terminate)
    threading.Thread(target=_listen, args=(lines,), daemon=True).start()
    wanted = TrackingSettings.model_validate_json(lines.get())
    os.nice(_NICENESS)  # before importing, which takes most of its time
    warm(wanted)
    folder = Path(parse_json(lines.get(), "folder"))

    def say(**message: Any) -> None:
        print(json.dumps(message), file=out, flush=True)

    say(total=total(StudyFolder(folder), wanted))
    with _rarely(lambda count: say(seen=count)) as seen:
        news = News(seen, lambda sentence, failed: say(told=sentence, failed=failed), whole=lines.get)
        show(StudyFolder(folder), wanted, news)
    atexit.register(gc.freeze)  # no garbage collection at exit, as the study waits for it
    return 0


def _terminate(number: int, _frame: object) -> None:
    """Exit silently on the first signal, and ignore further ones."""
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


def _listen(lines: queue.SimpleQueue[str]) -> None:
    """Queue lines from stdin; at its end the study's process has died or is finished, so this one ends, too."""
    for line in sys.stdin:
        lines.put(line)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(10)  # time to mark the study run KILLED
    os._exit(1)


@contextmanager
def _rarely(seen: Seen) -> Iterator[Seen]:
    """Accumulate counts, and pass them on at most ten times a second."""
    pending, last = 0, time.monotonic()

    def count(more: int) -> None:
        nonlocal pending, last
        pending += more
        if time.monotonic() - last > 0.1:
            seen(pending)
            pending, last = 0, time.monotonic()

    yield count
    seen(pending)  # what is left at the end


if __name__ == "__main__":
    sys.exit(_child())
