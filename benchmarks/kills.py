"""Is a result ever lost? `python -m benchmarks.kills [--kills 500] [--points 80000] [--record]`.

Studies are run through the command line, and their processes are killed with SIGKILL: workers and main processes at
random moments, main processes before and after every write they make, and one of two that work on one study. The same
command is typed again until it ends by itself. Then every promise is checked; the exit code is 1 if one is broken.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import func, select

from benchmarks import recorded
from benchmarks.pausing import formula
from benchmarks.recorded import ROOT
from dse.store.result_store import Store, leases, owners, results, studies

_COMMAND = ["study=kills", "--config-dir=conf", "tracking=none", "executor.jobs=2", "executor.max_retries=5"]
_WIDTH = 50  # values of y
_ORPHAN_S = 5.0  # after which no process of a dead main may be left
_PATIENCE_S = 120.0  # for a study to go on: more is a hang
_AT_ONCE = 4  # studies run beside one another

_STUDY = """\
# @package _global_
defaults:
  - override /system: null
  - override /workload: null
  - override /schedule: null
  - override /simulator: pausing

study:
  name: kills
  question: Is every point there once?
  module: plain
  objectives: [time_s] # one: no figure is drawn at the end, whose many writes are not what this is about
  baseline: {{point.x: 0}}

budget: {{trials: 1000000}}
point: {{x: 0, y: 0, salt: {salt}}}
space:
  point: {{x: "range(0,{columns})", y: "range(0,{rows})"}}
"""


@dataclass(frozen=True)
class Quotas:
    """Kills of one study by kind; writes are struck at first, first + step, first + 2 step, ...

    last: of the writes of its end so many are struck, None for all in such steps.
    """

    worker: int
    main: int
    joined: int
    write: int
    first: int
    step: int
    last: int | None = None


@dataclass
class Tally:
    """What happened: kills by kind, and what was promised otherwise, in words."""

    kills: Counter[str] = field(default_factory=Counter)
    figures: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)
    slowest_orphan_s: float = 0.0


class Case:
    """One study in a folder of its own, and its processes. number: makes its points and its luck its own."""

    def __init__(self, folder: Path, number: int, points: int) -> None:
        self.folder, self.number, self.columns = folder, number, points // _WIDTH
        self.tally, self.random = Tally(), random.Random(number)
        self.log = folder / "evaluated.log"
        _laid_out(folder, _STUDY.format(salt=number, columns=self.columns, rows=_WIDTH))

    def start(self, strike: int = 0, pace: float = 1.0) -> Process:
        """Type the command. strike: of benchmarks.struck; 0 for none."""
        words = ["-m", "benchmarks.struck", str(strike)] if strike else ["-m", "dse"]
        return Process([sys.executable, *words, *_COMMAND], self, pace)

    @property
    def logged(self) -> int:
        """Evaluations so far."""
        return self.log.stat().st_size if self.log.exists() else 0

    @property
    def table(self) -> Path:
        """The newest table."""
        return self.folder / "outputs" / "kills" / "latest" / "results.parquet"


class Process:
    """A main process and all that it started, known by a mark in their environment."""

    def __init__(self, command: Sequence[str], case: Case, pace: float) -> None:
        self.case, self._mark = case, uuid.uuid4().hex
        own = {"KILLS_LOG": str(case.log), "KILLS_PACE": str(pace), "KILLS_MARK": self._mark}
        path = os.pathsep.join([str(ROOT), str(case.folder / "site")])
        self._said = (case.folder / "said.txt").open("ab")
        self._process = subprocess.Popen(
            command,
            cwd=case.folder,
            env={**os.environ, **own, "PYTHONPATH": path},
            stdout=self._said,
            stderr=self._said,
        )

    @property
    def code(self) -> int | None:
        """Exit code; None while it runs."""
        return self._process.poll()

    @property
    def family(self) -> dict[int, int]:
        """Its living processes: pid -> parent."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                marked = f"KILLS_MARK={self._mark}".encode() in (path / "environ").read_bytes()
                state, parent = (path / "stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:
                continue
            if marked and state not in "ZX":
                found[int(path.name)] = int(parent)
        return found

    @property
    def workers(self) -> list[int]:
        """Children of the process that forks them."""
        family = self.family
        return [pid for pid, parent in family.items() if parent in family and parent != self._process.pid]

    def kill(self, kind: str) -> None:
        """Kill the main process, if it still runs, and see its others go."""
        if self.code is None:
            self._process.kill()
        self.ended(kind)

    def ended(self, kind: str) -> None:
        """Wait for the end, count it if it was a kill, and see the other processes go."""
        try:
            code = self._process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.case.tally.broken.append(f"a hang: the study did not end in {_PATIENCE_S:g} s")
            self._process.kill()
            code = self._process.wait()
        self._said.close()
        if code == -signal.SIGKILL:
            self.case.tally.kills[kind] += 1
        elif code:
            said = (self.case.folder / "said.txt").read_text(encoding="utf-8", errors="replace")
            self.case.tally.broken.append(f"exit code {code}: {said[-500:]}")
        began = time.monotonic()
        if not _until(lambda: not self.family, _ORPHAN_S):
            self.case.tally.broken.append(f"{len(self.family)} processes outlived their main one")
            self.case.tally.figures["orphans"] += len(self.family)
        self.case.tally.slowest_orphan_s = max(self.case.tally.slowest_orphan_s, time.monotonic() - began)


def _until(done: Callable[[], Any], limit_s: float) -> bool:
    end = time.monotonic() + limit_s
    while not done():
        if time.monotonic() > end:
            return False
        time.sleep(0.03)  # a look at all processes costs a millisecond or more
    return True


def _laid_out(folder: Path, study: str) -> None:
    """The study's configuration, and the backend as an installed distribution."""
    info = folder / "site" / "pausing-0.dist-info"
    files = {
        folder / "conf" / "study" / "kills.yaml": study,
        folder / "conf" / "simulator" / "pausing.yaml": "name: pausing\nbackend: pausing\n",
        info / "METADATA": "Metadata-Version: 2.1\nName: pausing\nVersion: 0\n",
        info / "entry_points.txt": "[dse.simulators]\npausing = benchmarks.pausing\n",
    }
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def torment(case: Case, quotas: Quotas) -> None:
    """Run a study to its end through all the kills of its quotas, and then kill it at the writes of its end."""
    strikes = [quotas.first + quotas.step * place for place in range(quotas.write)]
    for strike in strikes:
        case.start(strike).ended("write")
    kinds = ["main"] * quotas.main + ["joined"] * quotas.joined + ["worker"] * ((quotas.worker + 4) // 5)
    case.random.shuffle(kinds)
    left = quotas.worker
    for kind in kinds:
        if kind == "worker":
            _kill_workers(case, min(5, left))
            left -= 5
        else:
            (_kill_main if kind == "main" else _kill_joined)(case)
    _finished_by_two(case)
    for strike in itertools.islice(itertools.count(quotas.first, quotas.step), quotas.last):
        process = case.start(strike)
        process.ended("last writes")
        if process.code != -signal.SIGKILL:
            return
    case.start().ended("finishing")


def _kill_main(case: Case) -> None:
    """At a random moment: while it starts, or once it evaluates."""
    before, process = case.logged, case.start()
    if case.random.random() < 0.6:
        _until(lambda: case.logged > before or process.code is not None, _PATIENCE_S)
    time.sleep(case.random.uniform(0.0, 2.0))
    process.kill("main")


def _kill_workers(case: Case, count: int) -> None:
    """Some workers at random moments, and then their main process."""
    process = case.start()
    for _ in range(count):
        time.sleep(case.random.uniform(0.1, 0.6))
        _until(lambda: process.workers or process.code is not None, _PATIENCE_S)
        if found := process.workers:
            os.kill(case.random.choice(found), signal.SIGKILL)
            case.tally.kills["worker"] += 1
    time.sleep(case.random.uniform(0.0, 1.0))
    process.kill("main")


def _kill_joined(case: Case) -> None:
    """One of two that work on a study, then the other."""
    one, other = case.start(), case.start()
    _until(lambda: (one.workers and other.workers) or one.code is not None or other.code is not None, 10.0)
    time.sleep(case.random.uniform(0.0, 1.0))
    one.kill("one of two")
    time.sleep(case.random.uniform(0.5, 2.0))
    other.kill("main")


def _finished_by_two(case: Case) -> None:
    """One of two is killed, the other has to finish."""
    one, other = case.start(), case.start()
    time.sleep(case.random.uniform(2.0, 4.0))
    one.kill("one of two")
    other.ended("finishing")


def judge(case: Case, calm: Case, store: Store | None = None) -> None:
    """Check what was promised against an undisturbed run of the same study in another folder.

    store: of the case; None for the one in its folder.
    """
    calm.start(pace=0.0).ended("undisturbed")
    tally = case.tally
    tally.broken += calm.tally.broken
    wanted = {(x, y): formula(x, y, case.number) for x in range(case.columns) for y in range(_WIDTH)}
    store = store or Store(f"sqlite:///{case.folder / 'outputs' / 'results.db'}")
    (rows, left) = store.database.read(
        lambda connection: (connection.execute(select(results)).all(), _left(connection))
    )
    whole, damaged = store.check()
    store.database.close()
    found = {(point["point.x"], point["point.y"]): row for row in rows for point in [json.loads(row.point)]}
    lines = case.log.read_text(encoding="utf-8").splitlines() if case.log.exists() else []
    tally.figures.update(left)
    tally.figures["points"] += len(wanted)
    tally.figures["missing"] += len(wanted.keys() - found.keys())
    tally.figures["wrong"] += damaged + sum(_is_wrong(row, wanted.get(point)) for point, row in found.items())
    tally.figures["twice in the store"] += whole - len(found)
    tally.figures["repeated"] += len(lines) - len(set(lines))
    same = case.table.is_file() and case.table.read_bytes() == calm.table.read_bytes()
    tally.figures["different tables"] += not same


def _is_wrong(row: Any, wanted: dict[str, float] | None) -> bool:
    import numpy as np

    numbers = np.array(list(wanted.values()) if wanted else [], "<f8")
    return bool(row.metrics != numbers.tobytes() or bool(wanted) != (row.engine == "formula"))


def _left(connection: Any) -> dict[str, int]:
    """What a study that is done leaves behind."""
    counts = {"leases left": select(func.count()).select_from(leases)}
    counts["owners left"] = select(func.count()).select_from(owners)
    counts["running left"] = select(func.count()).where(studies.c.state == "running")
    counts["studies too many"] = select(func.count() - 1).select_from(studies)
    return {name: int(connection.execute(query).scalar_one()) for name, query in counts.items()}


def ordeal(quotas: Quotas, folder: Path, *, number: int, points: int) -> Tally:
    """One study from beginning to end, judged."""
    case = Case(folder / f"{number}", number, points)
    torment(case, quotas)
    judge(case, Case(folder / f"{number}-calm", number, points))
    return case.tally


def total(tallies: Sequence[Tally]) -> dict[str, Any]:
    """The figures of all studies."""
    kills, figures = sum((one.kills for one in tallies), Counter()), Counter({"orphans": 0})
    for one in tallies:
        figures.update(one.figures)
    return {
        "kills": kills.total(),
        "kills_by_kind": dict(sorted(kills.items())),
        "studies": len(tallies),
        **{name.replace(" ", "_"): count for name, count in figures.items()},
        "repeated_fraction": figures["repeated"] / figures["points"],
        "identical": not figures["different tables"],
        "slowest_orphan_s": round(max(one.slowest_orphan_s for one in tallies), 2),
        "broken": [text for one in tallies for text in one.broken],
    }


PROMISED_NONE = (
    "missing",
    "wrong",
    "twice_in_the_store",
    "different_tables",
    "leases_left",
    "owners_left",
    "running_left",
    "studies_too_many",
    "orphans",
)


def broken(found: dict[str, Any]) -> list[str]:
    """Promises that were not kept, in words, but for the share of repeats."""
    return [*found["broken"], *(f"{name}: {found[name]}" for name in PROMISED_NONE if found.get(name))]


def run(kills: int, points: int) -> dict[str, Any]:
    """At least so many kills over at least so many points, in studies of 8,000."""
    number = max(1, -(-points // 8000))
    each = -(-kills // number)
    per_study = -(-points // number // _WIDTH) * _WIDTH
    worker, main, joined = (round(share * each) for share in (0.4, 0.12, 0.08))
    quotas = [Quotas(worker, main, joined, -(-each // 4), 1 + place, number) for place in range(number)]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(_AT_ONCE) as pool:
        begun = [
            pool.submit(ordeal, quotas[place], Path(folder), number=place, points=per_study) for place in range(number)
        ]
        return total([one.result() for one in begun])


def main() -> int:
    """Run, print the figures, and record them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--points", type=int, default=80_000)
    parser.add_argument("--record", action="store_true", help="write benchmarks/records/kills.json")
    given = parser.parse_args()
    of = recorded.trees() if given.record else {}
    began = time.monotonic()
    found = run(given.kills, given.points)
    faults = broken(found) + [f"repeated: {found['repeated_fraction']:.2%}"] * (found["repeated_fraction"] > 0.01)
    found |= {"broken": faults, "minutes": round((time.monotonic() - began) / 60, 1)}
    print("\n".join(["| figure | value |", "|---|--:|", *(f"| {name} | {value} |" for name, value in found.items())]))
    if given.record:
        command = f"python -m benchmarks.kills --kills {given.kills} --points {given.points} --record"
        recorded.write("kills", found, command=command, of=of)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
