"""The answer of a command: what the command line prints, and Python returns."""

from __future__ import annotations

import html
import io
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dse.results import report
from dse.results.run_folder import Outputs

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


@dataclass(frozen=True)
class CommandAnswer:
    """Answer of a command.

    Attributes
    ----------
    folder
        The folder that its files are in.
    parts
        Texts and tables in the order in which the command line prints them.
    record
        Name of the JSON file in the folder that holds all numbers, without its ending; "" for none.
    code
        The exit code: 0, or 3 where points failed.
    """

    folder: Path
    parts: tuple[Table | str, ...] = ()
    record: str = ""
    code: int = 0

    @cached_property
    def data(self) -> Any:
        """All numbers, as the JSON file of the answer holds them; None where it has none."""
        return Outputs(self.folder).read_json(self.record) if self.record else None

    @property
    def text(self) -> str:
        """What the command line prints."""
        from rich.console import Console

        file = io.StringIO()
        # a notebook would show each line by itself
        self._print(Console(file=file, width=160, force_jupyter=False, force_terminal=False))
        return file.getvalue()

    def show(self) -> int:
        """Print the answer; its exit code."""
        self._print(report.console())
        return self.code

    def _print(self, console: Console) -> None:
        for part in self.parts:
            console.print(part, soft_wrap=isinstance(part, str), highlight=False)

    def __repr__(self) -> str:
        return self.text or f"<{type(self).__name__} {self.folder}>"

    def _repr_html_(self) -> str:
        """The text, as a notebook shows it."""
        return f"<pre>{html.escape(self.text)}</pre>"
