"""All studies of a paper, or all there are: the command `results reproduce`.

Every study is a process of its own, as if a person typed it; one that fails does not stop the others. A study whose
newest run was made by the same command, code and libraries is not run again, and an interrupted one goes on from its
store, so the same command goes on where it was stopped.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from dse.config.options import conf_dirs, list_options, load_yaml
from dse.errors import ConfigError, Problem, did_you_mean, pairs
from dse.files import path_inside
from dse.results import output_files, provenance
from dse.results.run_folder import Outputs
from dse_pages import reproduction

_ALL = "all"
_TAIL = 4_000  # bytes of what a study says on its error stream that are kept
# escape sequences and returns of progress bars, which mean nothing in a page
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\r\b]")
# exit codes of `dse`: 2, 3 and 4 are fixed by the command line, others are unexpected
_REASONS = {2: "its configuration was refused", 3: "too many of its points failed", 4: "the environment failed"}


class StopSignal(KeyboardInterrupt):
    """The command was told to stop; number: by which signal."""

    def __init__(self, number: int) -> None:
        super().__init__("interrupted; type the same command to go on")
        self.number = number


@dataclass(frozen=True)
class ReproducedStudy:
    """A study to run. paper: whose values it checks, "" for none."""

    name: str
    paper: str


@dataclass(frozen=True)
class StudyEnd:
    """End of a study. code: exit code; seconds: it took; reason: why it failed, or ""; kept: was not run again."""

    study: ReproducedStudy
    code: int = 0
    seconds: float | None = None
    reason: str = ""
    kept: bool = False


def studies(folder: Path | None = None) -> list[ReproducedStudy]:
    """All studies, shipped and in a folder of the user's own, those of a paper together."""
    # a user's folder comes last and overrides a shipped study of the same name
    folders = [*conf_dirs(), *([folder] if folder else [])]
    names = list_options("study", [folder] if folder else [])
    every = [ReproducedStudy(name, _paper(name, folders)) for name in names]
    # studies without a paper come last
    return sorted(every, key=lambda study: (not study.paper, study.paper, study.name))


def _paper(name: str, folders: Sequence[Path]) -> str:
    """The paper that a study names, or the one of the study that it is derived from."""
    # the last folder wins, as when a study is run
    path = next((path for folder in reversed(folders) if (path := folder / "study" / f"{name}.yaml").is_file()), None)
    tree = load_yaml(path) if path else None
    if not isinstance(tree, dict):
        return ""
    study = tree.get("study", {})
    if isinstance(study, dict) and study.get("paper"):
        return str(study["paper"])
    # entries that are mappings choose options of groups: no studies to derive from
    parents = [parent for parent in tree.get("defaults") or () if isinstance(parent, str) and parent != name]
    return next(filter(None, (_paper(parent, folders) for parent in parents)), "")


def choose(word: str, every: Sequence[ReproducedStudy]) -> list[ReproducedStudy]:
    """The studies that a word means: `all`, a paper, or a study and the others of its paper. Raises ConfigError."""
    if word == _ALL:
        return list(every)
    low = word.lower().removeprefix("arxiv:")
    named = next((study for study in every if study.name == word), None)
    if named is not None and not named.paper:
        return [named]
    paper = named.paper if named is not None else None
    # a paper is found with and without its prefix arXiv:
    chosen = [study for study in every if study.paper and (study.paper == paper or _bare(study.paper) == low)]
    if not chosen:
        way = did_you_mean(word, {_ALL, *(study.name for study in every), *(study.paper for study in every)} - {""})
        raise ConfigError([Problem("reproduce", "knows no paper or study of this name", word, way)])
    return chosen


def _bare(paper: str) -> str:
    return paper.lower().removeprefix("arxiv:")


@output_files.working_on_folders
def command(words: Sequence[str]) -> int:
    """`results reproduce [<paper>] [output=<folder>] [config_dir=<folder>]`: run the studies of a paper, write a page.

    Returns 0, 3 where a study failed, 4 where the environment did. Raises ConfigError, Stopped.
    """
    names = [word for word in words if "=" not in word]
    defaults = {"output": "outputs", "again": "false"}
    options = pairs([word for word in words if "=" in word], defaults, optional=("config_dir",))
    if len(names) > 1:
        raise ConfigError([Problem("reproduce", "takes one paper or study", " ".join(names), "leave it away for all")])
    folder = Path(options["config_dir"]) if "config_dir" in options else None
    name = names[0] if names else _ALL
    chosen = choose(name, studies(folder))
    place = _folder(Path(options["output"]))
    work = Work(Path(options["output"]), place, folder, again=options["again"] == "true")
    ended: list[StudyEnd] = []
    try:
        with _stopping():
            for study in chosen:
                print(_progress(study, ended, left=chosen[len(ended) :], times=work.times()), flush=True)
                ended.append(work.run(study))
                print(f"  {_told(ended[-1], work.output)}", flush=True)
    # an interrupted reproduction still has a page of what is done
    finally:
        if ended:
            slug = re.sub(r"[^\w.-]+", "_", name)
            path = reproduction.write(place / f"{slug}.html", name, [_row(end, work.output) for end in ended])
            print(f"page: {path}" + (f" ({len(ended)} of {len(chosen)} studies)" if len(ended) < len(chosen) else ""))
    codes = {end.code for end in ended}
    # a broken environment outranks a failed study: it would fail the others as well
    return 4 if 4 in codes else 3 if codes - {0} else 0


def _folder(output: Path) -> Path:
    output.mkdir(parents=True, exist_ok=True)
    return output_files.plain_folder(output / "reproduce")


@contextmanager
def _stopping() -> Iterator[None]:
    """Be told of SIGTERM as of Ctrl-C, by `StopSignal`."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise StopSignal(number)

    earlier = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


@dataclass(frozen=True)
class Work:
    """Where studies are run and what is noted of it. again: run also what is up to date."""

    output: Path
    place: Path
    config_dir: Path | None
    again: bool = False

    def times(self) -> dict[str, float]:
        """Seconds that studies took, by name, as noted before."""
        with suppress(ConfigError, OSError):
            noted = output_files.read_json(self.place / "times.json")
            return {str(name): float(seconds) for name, seconds in noted.items() if isinstance(seconds, int | float)}
        return {}

    def words(self, study: ReproducedStudy) -> list[str]:
        """Words of a study's command, flags aside."""
        return [f"study={study.name}", f"output_dir={self.output}", "tracking=none"]

    def run(self, study: ReproducedStudy) -> StudyEnd:
        """Run a study, unless its newest run is up to date. Raises Stopped."""
        if not self.again and self._is_up_to_date(study):
            return StudyEnd(study, seconds=self.times().get(study.name), kept=True)
        began = time.monotonic()
        flags = [f"--config-dir={self.config_dir}"] if self.config_dir else []
        with path_inside(self.place, f"{study.name}.log").open("wb") as log:
            # -P: a file dse.py of the current folder is not imported instead
            code, tail = _call([sys.executable, "-P", "-m", "dse", *flags, *self.words(study)], log)
        seconds = time.monotonic() - began
        if code:
            return StudyEnd(study, code, seconds, f"{_REASONS.get(code, f'exit code {code}')}: {tail}")
        Outputs(self.place).write_json("times", {**self.times(), study.name: round(seconds, 2)})
        return StudyEnd(study, seconds=seconds)

    def _is_up_to_date(self, study: ReproducedStudy) -> bool:
        """True if the newest run of a study succeeded, and was made by the same command, code and libraries."""
        if study.name not in self.times():  # noted of success alone
            return False
        try:
            record = Outputs.latest(self.output, study.name).read_json("provenance")
        except (ConfigError, OSError):
            return False
        # backend and seed are blanks: `changes` compares code, libraries and machine alone
        now = provenance.record(self.words(study), self.config_dir, backend="", seed=0)
        return record["command"] == now["command"] and not provenance.changes(record, now)


def _call(command_line: Sequence[str], log: Any) -> tuple[int, str]:
    """Run a command, its output into a log, its error stream (progress) to ours; exit code and end of that stream.

    Raises Stopped once the command has ended, too.
    """
    # the stream is a pipe for the study, which would drop its colours though ours is a terminal
    colours = {"FORCE_COLOR": "1"} if sys.stderr.isatty() else {}
    with subprocess.Popen(command_line, stdout=log, stderr=subprocess.PIPE, env={**os.environ, **colours}) as process:
        assert process.stderr is not None
        tail = b""
        try:
            # by chunks, not lines: a progress bar rewrites its line and ends none
            while chunk := os.read(process.stderr.fileno(), 4096):
                sys.stderr.buffer.write(chunk)
                sys.stderr.flush()
                tail = (tail + chunk)[-_TAIL:]
        except StopSignal as stopped:  # it records what is in flight before it ends
            if stopped.number != signal.SIGINT:  # which a terminal sends to all
                process.send_signal(stopped.number)
            process.wait()
            raise
        code = process.wait()
    # Ctrl-C reaches all processes of a terminal, and the study may end before the signal arrives here
    if code in (128 + signal.SIGINT, -signal.SIGINT):
        raise StopSignal(signal.SIGINT)
    return code, _COLOURS.sub("", tail.decode("utf-8", "replace")).strip()


# ---------------------------------------------------------------- progress


def _progress(
    study: ReproducedStudy, ended: Sequence[StudyEnd], *, left: Sequence[ReproducedStudy], times: Mapping[str, float]
) -> str:
    """A line before a study: its number, its paper, and how long the rest may take."""
    number, total = len(ended) + 1, len(ended) + len(left)
    paper = f" ({study.paper})" if study.paper else ""
    return f"{number} of {total}: {study.name}{paper}; {_time_left(left, ended, times)}"


def _time_left(left: Sequence[ReproducedStudy], ended: Sequence[StudyEnd], times: Mapping[str, float]) -> str:
    """About how long the studies that are left take: as noted before, else as long as those of now in the mean."""
    durations = [end.seconds for end in ended if end.seconds is not None and not end.kept]
    mean = sum(durations) / len(durations) if durations else None
    expected = [times.get(study.name, mean) for study in left]
    if None in expected:
        return "time left: not known yet"
    return f"about {reproduction.duration(sum(filter(None, expected)))} left"


def _told(end: StudyEnd, output: Path) -> str:
    """A line after a study: how it ended."""
    if end.code:
        return f"FAILED: {end.reason.splitlines()[-1]}; the others go on"
    count = reproduction.count_line(_row(end, output).claims)
    outcome = "as it was, up to date" if end.kept else f"done in {reproduction.duration(end.seconds or 0)}"
    return f"{outcome}: {count}"


def _row(end: StudyEnd, output: Path) -> reproduction.StudyRow:
    """Row of a study on the page."""
    folder, claims = None, []
    if not end.code:
        outputs = Outputs.latest(output, end.study.name)
        folder, claims = outputs.folder, outputs.read_json("claims")
    state = f"failed: {end.reason}" if end.code else "taken from a run that is up to date" if end.kept else "run"
    return reproduction.StudyRow(end.study.name, end.study.paper, folder, claims, state, end.seconds)
