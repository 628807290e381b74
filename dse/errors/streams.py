"""Standard output and standard error while a command runs: what is printed passes `printable`, whoever prints it.

A reader that goes away (`| head -1`) ends the command quietly, as SIGPIPE ends other programs; a terminal that goes
away (a closed ssh session) swallows what is printed.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

from dse.errors.texts import printable

CLOSED_PIPE = 128 + 13
"""Exit code where nobody reads the output any more: that of a program that SIGPIPE ended."""


class ClosedPipe(SystemExit):
    """Nobody reads the output any more; silent in a thread, as any SystemExit is."""

    def __init__(self) -> None:
        super().__init__(CLOSED_PIPE)


class Stream:
    """A stream whose reader may go away. Whatever else is asked of it, the stream itself answers."""

    def __init__(self, raw: TextIO) -> None:
        self.raw, self._is_lost = raw, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)

    def write(self, text: str) -> int:
        """See io.TextIOBase.write. Raises ClosedPipe."""
        with self._survived():
            self.raw.write(text)
        return len(text)

    def flush(self) -> None:
        """See io.TextIOBase.flush. Raises ClosedPipe."""
        with self._survived():
            self.raw.flush()

    @contextmanager
    def _survived(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            self._turn_away()
            raise ClosedPipe from None
        except OSError as error:
            if error.errno not in (errno.EIO, errno.EPIPE):
                raise
            self._turn_away()

    def _turn_away(self) -> None:
        """Let what is left in the buffer go nowhere, or the interpreter would fail on it at its end."""
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.raw.fileno())
            os.close(nowhere)


class PrintableStream(Stream):
    """A stream to which everything is written as `printable` makes it.

    rich_proxied_file: for consoles of rich, whose own escapes must pass; `dse.errors.terminal` cleans what they show.
    """

    def __init__(self, raw: TextIO) -> None:
        super().__init__(raw)
        self.rich_proxied_file = Stream(raw)

    def write(self, text: str) -> int:
        """Write a text as it may be printed. Raises ClosedPipe."""
        super().write(printable(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write several texts as they may be printed. Raises ClosedPipe."""
        for line in lines:
            self.write(line)


@contextmanager
def printable_streams() -> Iterator[None]:
    """While it lasts, what is printed is printable, tracebacks included."""
    before = sys.stdout, sys.stderr
    if any(isinstance(stream, PrintableStream) for stream in before):
        yield
        return
    sys.stdout, sys.stderr = (cast("TextIO", PrintableStream(stream) if stream else stream) for stream in before)
    try:
        yield
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        sys.stdout, sys.stderr = before
