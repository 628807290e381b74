"""The settings of an external simulator: its command line, its metrics and its limits."""

from __future__ import annotations

import hashlib
import math
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from dse.backend import Metric
from dse.errors import Problems
from dse.files import irregular, open_plain_file
from dse.values import Frozen
from dse.values.units import Bytes, Integer, Number, WallSeconds
from simulators.external.process import Limits
from simulators.external.sections import improvement

PLACE = re.compile(r"\{([A-Za-z_][\w.]*)\}")
"""A placeholder in a command."""
_METRIC = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,59}")  # a column of tables and a name on the command line
_MOST_BYTES, _MOST_FILES = 1 << 36, 10_000  # of files that are part of every key
_RESERVED = ("scenario", "key", "status", "reason", "engine", "baseline", "on_front")  # columns of the table


def _words(value: Any) -> Any:
    if isinstance(value, str):
        raise ValueError("must be a list of words, as no shell is asked: [python3, '{here}/my_simulator.py']")
    # numbers in YAML are meant as words
    return [str(word) if isinstance(word, int) and not isinstance(word, bool) else word for word in value or ()]


def _without_nul(word: str) -> str:
    if "\0" in word:
        raise ValueError("must hold no NUL")
    return word


def _text(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


Word = Annotated[str, AfterValidator(_without_nul)]


class Measure(Frozen):
    """A metric of the program. low, high: its legal range, null for no bound."""

    unit: str
    meaning: str
    goal: Literal["minimize", "maximize"] = "minimize"
    low: Number | None = 0.0
    high: Number | None = None

    @model_validator(mode="after")
    def _check_range(self) -> Self:
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(f"low = {self.low:g} is above high = {self.high:g}")
        return self

    def metric(self) -> Metric:
        """Convert to the metric of a backend."""
        low, high = (-math.inf if self.low is None else self.low), (math.inf if self.high is None else self.high)
        return Metric(self.unit, self.meaning, self.goal, low, high)


def _check_names(metrics: Mapping[str, Measure]) -> Mapping[str, Measure]:
    for name in metrics:
        if not _METRIC.fullmatch(name):
            raise ValueError(f"{name!r} is no name: letters, digits and _, beginning with a letter, at most 60")
        if name in (*_RESERVED, *map(improvement, metrics)):  # ratios have columns, too
            raise ValueError(f"{name} is a column of the table already: choose another name")
    return metrics


class ExternalProgram(Frozen):
    """The `simulator` group of an external simulator.

    command: the program and its arguments. A program with a `/` is relative to the folder that dse was started in,
    others are looked up on PATH. `{input}` and `{output}` stand for the files of the design and of the metrics (without
    them: standard input and output), `{here}` for the folder that dse was started in, `{a.b}` for the design's value
    a.b. version: of the program, part of every key, as are the contents of the program, of `files` and of the files
    that `command` names, and the values of `env`. metrics: metrics of its answer. timeout_s: wall-clock time. cpu_s,
    memory_bytes: CPU time [s] and address space [B] of each process, file_bytes: size of a file [B]; null for no limit.
    output_bytes: size of its answer [B].
    error_chars: stored characters of standard error. env: names of variables passed on beside PATH, HOME and LANG.
    """

    command: Annotated[tuple[Word, ...], BeforeValidator(_words), Field(min_length=1, max_length=1000)]
    input: Literal["json", "csv"]
    version: Annotated[str, BeforeValidator(_text), Field(min_length=1, max_length=80)]
    files: tuple[Word, ...]
    metrics: Annotated[Mapping[str, Measure], Field(min_length=1, max_length=1000), AfterValidator(_check_names)]
    timeout_s: WallSeconds
    cpu_s: Annotated[Integer, Field(ge=1, le=10_000_000)] | None
    memory_bytes: Annotated[Bytes, Field(ge=1 << 24)] | None
    file_bytes: Annotated[Bytes, Field(ge=1 << 10)] | None
    output_bytes: Annotated[Bytes, Field(ge=1 << 10, le=1e9)]
    error_chars: Annotated[Integer, Field(ge=0, le=20_000)]
    env: tuple[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], ...]

    def limits(self) -> Limits:
        """Limits of each run."""
        sizes = {name: getattr(self, name) for name in ("memory_bytes", "file_bytes")}
        # an answer in a file leaves standard output free for logs
        return Limits(
            timeout_s=self.timeout_s,
            output_bytes=int(self.output_bytes),
            output_ends=not any("{output}" in word for word in self.command),
            cpu_s=self.cpu_s,
            **{name: None if limit is None else int(limit) for name, limit in sizes.items()},
        )


@dataclass(frozen=True)
class ProgramCommand:
    """An existing program, its arguments, and the files that its answers depend on."""

    words: tuple[str, ...]
    files: tuple[Path, ...]
    here: Path

    @classmethod
    def find(cls, program: ExternalProgram, here: Path) -> ProgramCommand:
        """Find the program of some settings, relative to a folder or on PATH. Raises ConfigError."""
        check = Problems()
        first, *arguments = (word.replace("{here}", str(here)) for word in program.command)
        words = (_executable(check, first, here), *arguments)
        for word in arguments:
            # looks like a file, and would not be found in the scratch folder
            if not Path(word).is_absolute() and Path(word).suffix and (here / word).is_file():
                rule = "is a file of this folder, but the program runs in a scratch folder of its own"
                check.add("simulator.command", rule, value=word, way_out=f"write {{here}}/{word}")
        named = [Path(word) for word in words if Path(word).is_absolute()]  # programs and scripts count in the key
        listed = [here / word.replace("{here}", str(here)) for word in program.files]
        for index, path in enumerate(listed):
            if not path.exists():
                check.add(f"simulator.files.{index}", "is not there", value=str(path))
            # no further than needed to know
            elif path.is_dir() and sum(1 for _ in islice(path.rglob("*"), _MOST_FILES + 1)) > _MOST_FILES:
                rule = f"holds more than {_MOST_FILES} files"
                check.add(f"simulator.files.{index}", rule, value=str(path), way_out="name the files that count")
            elif not path.is_dir() and (rule := irregular(path, _MOST_BYTES)):
                check.add(f"simulator.files.{index}", rule, value=str(path), way_out="name plain files and folders")
        check.done()
        # an order that does not depend on the disk
        inside = (file for path in listed for file in (sorted(path.rglob("*")) if path.is_dir() else [path]))
        # written by running, not part of the program
        files = (
            path for path in dict.fromkeys([*named, *inside]) if path.is_file() and "__pycache__" not in path.parts
        )
        return cls(words, tuple(files), here)

    @property
    def name(self) -> str:
        """Names of the program and of the first file among its arguments, such as a script for an interpreter."""
        after = [Path(word).name for word in self.words[1:] if Path(word) in self.files]
        return " ".join([Path(self.words[0]).name, *after[:1]])

    @property
    def places(self) -> list[str]:
        """Names of the placeholders, which stand in braces."""
        return [name for word in self.words for name in PLACE.findall(word)]

    def content(self) -> str:
        """Content hash of the program and the files, independent of where PATH and the folder are; "" if none are."""
        total = hashlib.blake2b(digest_size=6)
        for path in self.files:
            with open_plain_file(path, "simulator.files", most=_MOST_BYTES) as file:
                digest = hashlib.file_digest(file, "blake2b").hexdigest()  # in pieces: files may be large
            # the same program in another folder has the same key
            label = path.relative_to(self.here) if path.is_relative_to(self.here) else path.name
            total.update(f"{label}\0{digest}\0".encode())
        return total.hexdigest() if self.files else ""


def hash_of_environment(names: Sequence[str]) -> str:
    """Hash of the values of environment variables, none of which it tells; "" for no names."""
    values = {name: os.environ.get(name) for name in sorted(set(names))}
    # values of variables need not be valid text
    return hashlib.blake2b(repr(values).encode("utf-8", "surrogatepass"), digest_size=6).hexdigest() if values else ""


def _executable(check: Problems, program: str, here: Path) -> str:
    """Return the path of a program, and note problems with it."""
    if PLACE.search(program):  # the program is looked up once, before any design
        check.add("simulator.command", "the program itself may hold no value but {here}", value=program)
    elif "/" in program:
        program = str(here / program)
        if not Path(program).is_file():
            check.add("simulator.command", "program not found", value=program)
        elif not os.access(program, os.X_OK):
            check.add("simulator.command", "is not executable", value=program, way_out=f"chmod +x {program}")
    else:
        path = shutil.which(program)
        if path is None:
            way = f"write ./{program} if it is in this folder" if (here / program).is_file() else ""
            check.add("simulator.command", "program not found on PATH", value=program, way_out=way)
        program = str(here / (path or program))
    return program
