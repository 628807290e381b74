"""Flags before a folder of the user, and the words of a command line that are overrides."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dse.errors import ConfigError, Problem

OWN_FLAGS = ("--config-dir", "-cd")
"""Flags before a folder of the user's own configuration."""
DRY_RUN = "--dry-run"
"""Flag to count the points of a study, and evaluate none."""
VERBOSE = ("-v", "--verbose")
"""Flags for `verbose=true`."""
SEVERAL = ("-m", "--multirun")
"""Flags to run a study for each combination of several values."""


def own_folder(words: Sequence[str]) -> Path | None:
    """The folder that a command line names. Raises ConfigError where the flag names none."""
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in OWN_FLAGS:
            folder = value or (words[index + 1] if index + 1 < len(words) and not equals else "")
            if not folder:
                raise ConfigError([Problem(name, "names no folder", way_out=f"write {name}=<folder>")])
            return Path(folder)
    return None


def overrides(words: Sequence[str]) -> list[str]:
    """The words of a command line that are no flags."""
    typed, skip = [], False
    for word in words:
        if skip:
            skip = False
        elif word in OWN_FLAGS:
            skip = True  # the word after is its value
        elif word in VERBOSE:
            typed.append("verbose=true")
        elif not word.startswith("-"):
            typed.append(word)
    return typed
