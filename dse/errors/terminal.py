"""The one console, and bars of progress on it: texts pass `printable`, and markup in a text is text."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import IO, Any, Final, NoReturn, Protocol

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from dse.errors.texts import ClosedPipe, printable

_QUIET: Final = ContextVar("quiet", default=False)


class Terminal(Console):
    """A console of rich that shows every text as it may be printed, without reading markup in it."""

    def __init__(self, **settings: Any) -> None:
        # texts of users may hold brackets
        super().__init__(**{"markup": False, "force_jupyter": False, "emoji": False, **settings})

    @property
    def file(self) -> IO[str]:
        """The stream behind all that stand before it: escapes of this console's own are to reach it."""
        stream = self._file or (sys.stderr if self.stderr else sys.stdout)
        while (inner := getattr(stream, "rich_proxied_file", None)) is not None:
            stream = inner
        return stream

    @file.setter
    def file(self, new_file: IO[str]) -> None:
        """Set the stream to print to."""
        self._file = new_file

    def render_str(self, text: str, **settings: Any) -> Text:
        """A text of rich, of what may be printed of a text."""
        return super().render_str(printable(text), **settings)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Segments of what is shown, of texts that may be printed."""
        # a text that was cleaned loses its spans, which would no longer fit
        if isinstance(renderable, Text) and (plain := printable(renderable.plain)) != renderable.plain:
            renderable = Text(plain, style=renderable.style, justify=renderable.justify, overflow=renderable.overflow)
        return super().render(renderable, options)

    def on_broken_pipe(self) -> NoReturn:
        """End the command quietly."""
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())  # what is left in the buffer goes nowhere
        raise ClosedPipe


class Advance(Protocol):
    """Tells the bar that `count` more are done; `label` changes what it says.

    fewer: by how much there is less to do than was thought. exactly: how many were done in the end, all of them.
    """

    def __call__(self, count: int, label: str | None = None, *, fewer: int = 0, exactly: int | None = None) -> None: ...


@contextmanager
def quiet() -> Iterator[None]:
    """Show no bars meanwhile: those of a part would overwrite that of the work it belongs to."""
    token = _QUIET.set(True)
    try:
        yield
    finally:
        _QUIET.reset(token)


@contextmanager
def bar(label: str, total: int | None, unit: str = "points") -> Iterator[Advance]:
    """Show progress with rate and time left over `total` points, or other units (None: not known beforehand)."""
    if _QUIET.get():
        yield lambda count, label=None, *, fewer=0, exactly=None: None
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    speed = TextColumn("{task.fields[rate]}")
    left = TextColumn("left")
    columns = (
        TextColumn("{task.description}", markup=False),  # labels hold names that users chose
        BarColumn(),
        MofNCompleteColumn(),
        speed,
        TimeElapsedColumn(),
    )
    with Progress(*columns, TimeRemainingColumn(), left, console=Terminal(stderr=True)) as progress:
        task = progress.add_task(label, total=total, rate="")

        def advance(count: int, label: str | None = None, *, fewer: int = 0, exactly: int | None = None) -> None:
            progress.update(task, advance=count, description=label)
            shown = progress.tasks[0]
            if fewer and shown.total is not None:
                progress.update(task, total=shown.total - fewer)
            if exactly is not None:
                progress.update(task, total=exactly, completed=exactly)
            if shown.total is not None and shown.completed > shown.total:  # baselines outside the space
                progress.update(task, total=shown.completed)
            rate = shown.completed / shown.elapsed if shown.elapsed else 0.0
            progress.update(task, rate=f"{rate:,.{0 if rate >= 10 else 1}f} {unit}/s")

        yield advance
