"""Graceful shutdown: the first signal lets work in flight be recorded, the second ends the process at once."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS_OF_A_TERMINAL = (signal.SIGINT, signal.SIGHUP)
"""Ctrl-C, and the end of the terminal, such as a closed ssh session."""
SIGNALS = (*SIGNALS_OF_A_TERMINAL, signal.SIGTERM)


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
