"""The one console: tables and progress pass `printable`, and markup in a text is text."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import IO, Any, NoReturn

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from dse.errors.texts import ClosedPipe, printable


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
