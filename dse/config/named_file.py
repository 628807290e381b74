"""A file that a design names: it counts by what it holds, and its path is a note.

Results are kept by the values of designs. A path would be the same value after its file was edited, and another one
where the file was only moved.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from pydantic import model_validator

from dse.errors import ConfigError, Problem
from dse.files import open_plain_file
from dse.values import Frozen

_PART_BYTES = 1 << 20
_MOST_BYTES = 1 << 31


class NamedFile(Frozen):
    """A file of a design, which a configuration gives by its path. content: hash of what it holds; note: the path."""

    content: str
    note: str

    @model_validator(mode="before")
    @classmethod
    def _of_path(cls, value: Any) -> Any:
        """Read what a path names. Raises ValueError for no plain file."""
        if not isinstance(value, str):
            return value
        try:
            return {"content": content_of(Path(value)), "note": value}
        except ConfigError as error:
            (problem,) = error.problems
            raise ValueError(f"{problem.rule} ({problem.way_out})") from None

    def path(self, where: str) -> Path:
        """The path of the file, which holds what it held. where: dotted path that names it. Raises ConfigError."""
        path = Path(self.note)
        if content_of(path, where) != self.content:
            rule = "was changed after it was first read"
            raise ConfigError([Problem(where, rule, self.note, "start again: what it holds now is another design")])
        return path

    def __str__(self) -> str:
        """The path, as tables show it."""
        return self.note


def content_of(path: Path, where: str = "", *, most: int = _MOST_BYTES) -> str:
    """Hash of what a plain file holds. where: dotted path that names it. Raises ConfigError."""
    digest = hashlib.sha256()
    with open_plain_file(path, where, most=most) as file:
        while part := file.read(_PART_BYTES):
            digest.update(part)
    return digest.hexdigest()[:32]
