"""Damage to a store and to what surrounds it: `python -m tests.campaigns.damaged [--places 60] [--seed 0] [--json]`.

A study of some hundred points is finished. Then, in a copy for each damage, bytes of one page of its database are
flipped, zeroed or replaced, the database or its log is cut, the log is removed or overwritten, files may not grow, or
another user types the commands where he may only read. `store status`, `store check`, `results report` and the study's
own command are typed: each must end in time with a documented exit code and without a traceback, and once the study
ends with 0 its table must be the first one to the byte. The exit code is 1 where one is not so. The other user is left
out where none can be taken (root alone may) or Python itself lies where he may not read.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import resource
import shutil
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.campaigns.forked import CommandEnd, Commands, import_all, inside, show_progress

_STUDY = (
    *("study=ficco_sweep", "schedule=[serial,shard_p2p]", "workload.only=[g1,g4]", "tracking=none", "fidelity=none"),
    *("timeline=false", "figures=none", "executor.jobs=1", "+space.system.gpu.num_cus=range(240,304,2)"),
)
_COMMANDS = (("store", "status"), ("store", "check"), ("results", "report", "study=ficco_sweep"), _STUDY)
_PAGE = 4096
_LIMIT_S = 120.0
_NOBODY = 65534


@dataclass(frozen=True)
class Damage:
    """What is done to a copy, its label; before: what a process does before its command; mends: whether the study's own
    command must end with 0, at the second time at the latest.
    """

    label: str
    before: Callable[[], None] = lambda: None
    mends: bool = True


def flipped(draw: random.Random, database: Path) -> Damage:
    """Bytes of one page, at random places."""
    page = draw.randrange(database.stat().st_size // _PAGE)
    count = draw.choice((1, 1, 8, 200))
    with database.open("r+b") as file:
        for _ in range(count):
            place = page * _PAGE + draw.randrange(_PAGE)
            file.seek(place)
            (byte,) = file.read(1)
            file.seek(place)
            file.write(bytes([byte ^ draw.randrange(1, 256)]))
    return Damage(f"{count} bytes of page {page} flipped")


def replaced(draw: random.Random, database: Path) -> Damage:
    """One page by zeros, by noise, or by another page."""
    pages = database.stat().st_size // _PAGE
    page, other = draw.randrange(pages), draw.randrange(pages)
    data = database.read_bytes()
    what, content = draw.choice(
        (
            ("zeros", bytes(_PAGE)),
            ("noise", draw.randbytes(_PAGE)),
            (f"page {other}", data[other * _PAGE : (other + 1) * _PAGE]),
        )
    )
    with database.open("r+b") as file:
        file.seek(page * _PAGE)
        file.write(content)
    return Damage(f"page {page} replaced by {what}")


def cut(draw: random.Random, database: Path) -> Damage:
    """The end of the database or of its log."""
    file = draw.choice([path for path in (database, _log(database)) if path.exists()])
    size = draw.randrange(file.stat().st_size + 1)
    os.truncate(file, size)
    return Damage(f"{file.name} cut to {size} bytes")


def without_log(draw: random.Random, database: Path) -> Damage:
    """No log, noise in its place, or that of an older moment."""
    log, kind = _log(database), draw.choice(("removed", "noise", "cut in two", "bytes flipped"))
    data = bytearray(log.read_bytes()) if log.exists() else bytearray(_PAGE)
    if kind == "removed":
        log.unlink(missing_ok=True)
    elif kind == "noise":
        log.write_bytes(draw.randbytes(len(data)))
    elif kind == "cut in two":
        log.write_bytes(data[: len(data) // 2])
    else:
        for _ in range(20):
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        log.write_bytes(data)
    return Damage(f"log: {kind}")


def small_files(draw: random.Random, database: Path) -> Damage:
    """A limit for the size of files, as of a quota: what is written fails at some moment."""
    database.unlink()
    for path in database.parent.glob("results.db-*"):
        path.unlink()
    most = draw.choice((1000, 20_000, 60_000))
    limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (most, most))
    return Damage(f"files of at most {most} bytes", limit, mends=False)


def read_only(draw: random.Random, database: Path) -> Damage:
    """Folders of root's in which another user may only read; what the commands print goes to another folder."""
    for folder, _, _ in os.walk(database.parent):
        Path(folder).chmod(0o555)

    return Damage("read-only for another user", _become_nobody, mends=False)


def _become_nobody() -> None:
    os.setgroups([])
    os.setgid(_NOBODY)
    os.setuid(_NOBODY)


def _nobody_may_read() -> bool:
    """Whether there is another user to become, who may read Python."""
    if os.getuid() != 0:
        return False
    if (child := os.fork()) == 0:
        _become_nobody()
        os._exit(not all(os.access(path, os.R_OK) for path in (os.__file__, sys.executable, __file__)))
    return os.waitpid(child, 0)[1] == 0


def _log(database: Path) -> Path:
    return database.with_name(f"{database.name}-wal")


KINDS: tuple[Callable[[random.Random, Path], Damage], ...] = (
    *[flipped] * 5,
    *[replaced] * 3,
    *[cut] * 2,
    *[without_log] * 2,
    small_files,
    *([read_only] if _nobody_may_read() else []),
)


def make(folder: Path) -> None:
    """A finished study whose last results are in the log of its database, as a killed process leaves them."""
    if (child := os.fork()) == 0:
        os._exit(inside(folder, _made))
    if os.waitpid(child, 0)[1] != 0:
        raise RuntimeError((folder / "stderr.txt").read_text("utf-8", "replace"))


def _made() -> int:
    from dse.cli import main

    code = main([*_STUDY, "workload.only=[g1]"])
    reading = sqlite3.connect("outputs/results.db")  # who looks keeps the log from being written into the database
    reading.execute("BEGIN")
    reading.execute("SELECT COUNT(*) FROM results").fetchone()
    return code or main(_STUDY)


def typed(commands: Commands[str], damage: Damage, words: Sequence[str], folder: Path) -> CommandEnd[str]:
    """How a command ends."""
    commands.start(damage.label, words, folder, damage.before)
    while True:
        for end in commands.ended():
            return end


def judge(template: Path, folder: Path, draw: random.Random) -> Iterator[str]:
    """What is wrong after one damage, a sentence each; the damage first."""
    shutil.copytree(template, folder, symlinks=True)
    folder.chmod(0o777)
    damage = draw.choice(KINDS)(draw, folder / "outputs" / "results.db")
    yield damage.label
    commands = Commands[str](_LIMIT_S)
    for words in _COMMANDS:
        end = typed(commands, damage, words, folder)
        line = " ".join(words[:2])
        if end.traceback or end.hang:
            last = (end.errors.strip().splitlines() or [""])[-1][:200]
            yield f"{line}: {'hangs' if end.hang else f'exit code {end.code}'}: {last}"
    if damage.mends and end.code == 4:
        end = typed(commands, damage, _STUDY, folder)
    if damage.mends and end.code != 0:
        yield f"the study ends with {end.code}: {end.errors.strip()[-300:]}"
    elif end.code == 0 and _table(folder) != _table(template):
        yield "the study's table is another one"


def _table(folder: Path) -> bytes:
    return (folder / "outputs" / "ficco_sweep" / "latest" / "results.parquet").read_bytes()


def main() -> int:
    """Damage copies and print what came of them; 1 where one ended badly."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object with the figures")
    parser.add_argument("--places", type=int, default=60, help="damages that are drawn")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    kinds, bad, began = Counter[str](), list[str](), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="dse-damaged-") as name:
        Path(name).chmod(0o755)
        template = Path(name, "template")
        template.mkdir()
        make(template)
        import_all()
        for number in range(arguments.places):
            folder = Path(name, f"{number}")
            label, *wrong = judge(template, folder, random.Random(f"{arguments.seed}:{number}"))
            kinds[" ".join(re.findall(r"[a-z-]{2,}", label))] += 1
            bad += [f"{number} ({label}): {text}" for text in wrong]
            shutil.rmtree(folder, ignore_errors=True)
            show_progress(number + 1, arguments.places, began)
    figures = {"damages": arguments.places, "bad": len(bad), "kinds": dict(kinds)}
    print(json.dumps(figures, indent=2) if arguments.json else f"{arguments.places} damages, {len(bad)} bad")
    print("\n".join(bad), file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
