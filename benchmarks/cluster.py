"""Losses and costs of a cluster: `python -m benchmarks.cluster [--json] [--only kills,cost]`.

    kills   a study on a scheduler and workers of Dask, with the store in PostgreSQL: workers, the client and the
            scheduler are killed with SIGKILL at random moments, the database is restarted without a checkpoint; the
            same command is typed again until it ends, and its table is held against that of an undisturbed local run
    links   the same, with client, scheduler, three workers and database each on a host of its own (network namespaces,
            as root): links are cut for shorter and for longer than time-outs, then all are slow and lose packets
    cost    a million closed-form points by two workers of Dask, over the same by two local processes
    many    runs of a program that sleeps for a second, on 64 workers of this machine
    crowd   a thousand sessions that record results in one store at the same time

PostgreSQL is started in a folder of its own (Debian's package).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq

from benchmarks.crowd import LOCK_WAIT, crowd
from benchmarks.kills import Case, Process, judge
from benchmarks.recorded import ROOT
from dse.errors.terminal import bar
from dse.store.result_store import Store
from tests.campaigns.network import Network, joined, usable
from tests.campaigns.postgres import Server, running

GROUPS = ("kills", "links", "cost", "many", "crowd")
_PATIENCE_S = 120.0
_BROKEN = [
    f"{group}{name}"
    for group in ("", "links_", "many_", "crowd_", "cost_", "cost_sqlite_")
    for name in ("missing", "wrong", "duplicates", "broken")
]
_HOSTS = ("client", "scheduler", "worker0", "worker1", "worker2", "database")
CUTS = tuple((host, seconds) for host in ("worker0", "client", "database", "scheduler") for seconds in (4.0, 45.0))
"""Links that are cut, and for how long [s]: shorter than all time-outs, and longer (Dask's is 30 s)."""
_GOING_ON = 30  # points after which work counts as going on
_SLOW_S = 45.0
_STORE_PATIENCE_S = 20.0
_DELAY_S, _LOSS = 0.1, 0.05  # one way; of packets
_SLOW = 10.0  # pace of the points whose workers lose their links
_LIMIT_S = 900.0
_ASLEEP = """\
began=$EPOCHREALTIME
read -r pid name state worker rest < /proc/$PPID/stat
sleep 1
echo "$worker $began $EPOCHREALTIME" >> "$KILLS_LOG"
echo "{\\"time_s\\": $(($1 + 60 * $2 + 1))}"
"""
_UNOBSERVED = {
    "DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED": "False",
    "DASK_DISTRIBUTED__WORKER__MEMORY__MONITOR_INTERVAL": "5s",
    "DASK_DISTRIBUTED__ADMIN__SYSTEM_MONITOR__INTERVAL": "5s",
    "DASK_DISTRIBUTED__ADMIN__TICK__INTERVAL": "1s",
}
_EXTERNAL = """\
defaults: [external, _self_]
name: pausing
command: [/bin/bash, "{here}/asleep.sh", "{point.x}", "{point.y}"]
metrics: {time_s: {unit: s, meaning: of its own}}
env: [KILLS_LOG]
"""
_COST = [
    "study=ficco_sweep", "workload.only=[g4]", "schedule=chunked", "simulator=analytic", "budget.trials=10000000",
    "tracking=none", "figures=none", "fidelity=none", "timeline=false",
]  # fmt: skip


class Fleet:
    """A scheduler and workers of Dask as processes of their own; on hosts of a network, if there is one."""

    def __init__(self, folder: Path, workers: int, env: dict[str, str], network: Network | None = None) -> None:
        self._folder, self._count, self._env, self._network = folder, workers, env, network
        self._file = folder / "scheduler.json"
        self._processes: list[subprocess.Popen[bytes]] = []
        self.start()

    @property
    def address(self) -> str:
        """Address of the scheduler."""
        return str(json.loads(self._file.read_text())["address"])

    def start(self) -> None:
        """Start the scheduler, then the workers."""
        self._file.unlink(missing_ok=True)
        self._spawn("scheduler", "scheduler", "--port", "0")
        _until(self._file.is_file)
        for number in range(self._count):
            self._spawn_worker(number)

    def _spawn_worker(self, number: int) -> None:
        self._spawn(f"worker{number}", "worker", "--nthreads", "1", "--local-directory", str(self._folder))

    def _spawn(self, host: str, *words: str) -> None:
        inside = self._network.inside(host) if self._network else []
        address = self._network.address(host) if self._network else "127.0.0.1"
        command = [*inside, sys.executable, "-m", "dask", *words, "--host", address, "--no-dashboard"]
        command += ["--scheduler-file", str(self._file)]
        with (self._folder / "fleet.log").open("ab") as log:
            self._processes.append(subprocess.Popen(command, env=self._env, cwd=self._folder, stdout=log, stderr=log))

    @property
    def workers(self) -> list[int]:
        """Pids of the processes that nannies started, which evaluate."""
        nannies = {process.pid for process in self._processes[1:]}
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                state, parent = (path / "stat").read_text().rpartition(")")[2].split()[:2]
                command = (path / "cmdline").read_bytes()
            except OSError:
                continue
            if int(parent) in nannies and state not in "ZX" and b"resource_tracker" not in command:
                found.append(int(path.name))
        return found

    def mend(self) -> None:
        """Start workers again that ended, as a job scheduler would: Dask's do if their link was cut for long."""
        for number, process in enumerate(self._processes[1:]):
            if process.poll() is not None:
                self._spawn_worker(number)
                self._processes[1 + number] = self._processes.pop()

    def restart(self) -> None:
        """Kill the scheduler and all workers, and start others."""
        self.stop()
        self.start()

    def stop(self) -> None:
        """End all of them."""
        for process in self._processes:
            process.kill()
            process.wait()
        for pid in self.workers:
            os.kill(pid, signal.SIGKILL)
        self._processes = []


def _until(done: Any, limit_s: float = _PATIENCE_S) -> None:
    end = time.monotonic() + limit_s
    while not done():
        if time.monotonic() > end:
            raise TimeoutError("the cluster does not go on")
        time.sleep(0.05)


class ClusterCase(Case):
    """A study of the kill run whose points are evaluated by a fleet, with its results in PostgreSQL."""

    def __init__(self, folder: Path, points: int, url: str, network: Network | None = None) -> None:
        super().__init__(folder, 0, points)
        self.url, self.network = url, network
        self.fleet: Fleet | None = None

    def client(self) -> Process:
        """Type the command."""
        assert self.fleet is not None
        words = ["study=kills", "--config-dir=conf", "tracking=none", f"store.url={self.url}", "executor.chunk_s=0.2"]
        dask = ["executor=dask", f"executor.address={self.fleet.address}"]
        if self.network:
            dask += ["executor.plain=true", f"store.patience_s={_STORE_PATIENCE_S}"]
        inside = self.network.inside("client") if self.network else []
        return Process([*inside, sys.executable, "-m", "dse", *words, *dask], self, 1.0)

    def equip(self, workers: int, pace: float, environment: Mapping[str, str] = {}) -> Fleet:
        """Start a fleet whose workers know the backend, and keep its log. environment: more variables."""
        path = os.pathsep.join([str(ROOT), str(self.folder / "site")])
        own = {"KILLS_LOG": str(self.log), "KILLS_PACE": str(pace), "PYTHONPATH": path}
        self.fleet = Fleet(self.folder, workers, {**os.environ, **environment, **own}, self.network)
        return self.fleet

    @contextmanager
    def shown(self, label: str, points: int) -> Iterator[None]:
        """Show how many points were evaluated, with rate and time left, while this lasts."""
        ended = threading.Event()

        def follow() -> None:
            told = 0
            while not ended.wait(1.0):
                count = len(_lines(self))
                advance(count - told)
                told = count

        with bar(label, points) as advance:
            thread = threading.Thread(target=follow)
            thread.start()
            try:
                yield
            finally:
                ended.set()
                thread.join()

    def wait(self, lines: int, process: Process) -> None:
        """Wait until so much was evaluated, or for the end of a client. Raises TimeoutError."""
        _until(lambda: len(_lines(self)) >= lines or process.code is not None, _LIMIT_S)


def kills(server: Server, folder: Path, *, count: int, points: int) -> dict[str, Any]:
    """Kill workers at work `count` times, clients and schedulers meanwhile, and restart the database."""
    case = ClusterCase(folder / "there", points, server.database("kills"))
    fleet = case.equip(3, 1.0)
    try:
        with case.shown("kills", points):
            tally = _struck(case, fleet, server, count, points)
    finally:
        fleet.stop()
    return tally | _judged(case, folder / "here", points)


def _struck(case: ClusterCase, fleet: Fleet, server: Server, count: int, points: int) -> dict[str, Any]:
    """Run the study to its end through all kills."""
    drawn = random.Random(0)
    tally = dict.fromkeys(["kills", *(f"{part}_restarts_survived" for part in ("client", "scheduler", "database"))], 0)
    process = case.client()
    while process.code != 0:
        if process.code is not None:
            process.ended("client")
            process = case.client()
        case.wait(len(_lines(case)) + drawn.randint(1, 1 + 4 * points // (3 * count + 1)), process)
        time.sleep(drawn.uniform(0.0, 0.2))
        if tally["kills"] < count and (pids := fleet.workers):
            os.kill(drawn.choice(pids), signal.SIGKILL)
            tally["kills"] += 1
        chance = drawn.random()
        if chance < 0.06:
            process.kill("client")
            if chance < 0.04:
                tally["client_restarts_survived"] += 1
            else:
                fleet.restart()
                tally["scheduler_restarts_survived"] += 1
            process = case.client()
        elif chance < 0.09:
            server.restart()
            tally["database_restarts_survived"] += 1
    process.ended("end")
    return tally


def links(
    folder: Path,
    *,
    points: int,
    cuts: Sequence[tuple[str, float]] = CUTS,
    slow_s: float = _SLOW_S,
    pace: float = _SLOW,
) -> dict[str, Any]:
    """Cut links of hosts for some seconds each, then slow all down for a while. Raises TimeoutError for a hang.

    pace: time of a point over that of the other groups.
    """
    with joined(_HOSTS) as network:
        place = network.address("database"), network.inside("database")
        with running(folder / "postgres", *place) as server:
            url = server.database("links")
            case = ClusterCase(folder / "there", points, url, network)
            fleet = case.equip(3, pace)
            try:
                with case.shown("links", points):
                    happened = _disturbed(case, network, cuts, slow_s)
            finally:
                fleet.stop()
            case.url = server.on_socket(url)
            return happened | {f"links_{name}": value for name, value in _judged(case, folder / "here", points).items()}


def _disturbed(case: ClusterCase, network: Network, cuts: Sequence[tuple[str, float]], slow_s: float) -> dict[str, Any]:
    """Run the study to its end through all disturbances.

    A disturbance is survived if work goes on afterwards. Raises TimeoutError for a hang.
    """
    study = _RepeatedClient(case)
    _until(lambda: len(_lines(case)) > _GOING_ON)
    survived, slowest_s = 0, 0.0
    for name, seconds in cuts:
        network.cut = frozenset([name])
        study.watch(seconds=seconds)
        network.cut, began, before = frozenset(), time.monotonic(), len(_lines(case))
        study.watch(points=before + _GOING_ON)
        survived += len(_lines(case)) >= before + _GOING_ON  # not if the study ended before
        slowest_s = max(slowest_s, time.monotonic() - began)
    network.delay_s, network.loss = _DELAY_S, _LOSS
    study.watch(seconds=slow_s)
    network.delay_s = network.loss = 0.0
    study.watch(points=sys.maxsize)
    study.process.ended("end")
    return {
        "partitions": len(cuts),
        "partitions_survived": survived,
        "slowest_recovery_s": round(slowest_s, 1),
        "links_clients": study.clients,
    }


class _RepeatedClient:
    """A client whose command is typed again whenever it ends before its study does. clients: how many it took."""

    def __init__(self, case: ClusterCase) -> None:
        self._case, self.process, self.clients = case, case.client(), 1

    def watch(self, *, seconds: float = 0.0, points: int = 0) -> None:
        """Wait for a time, until so many points were evaluated, or for the end. Raises TimeoutError for a hang."""
        assert self._case.fleet is not None
        began = time.monotonic()
        while self.process.code != 0 and (time.monotonic() < began + seconds or len(_lines(self._case)) < points):
            self._case.fleet.mend()
            if self.process.code:
                self.process.ended("client")
                self.process, self.clients = self._case.client(), self.clients + 1
            if time.monotonic() > began + _LIMIT_S:
                self.process.kill("hang")
                raise TimeoutError("the study does not go on")
            time.sleep(0.5)


def _judged(case: ClusterCase, calm_folder: Path, points: int) -> dict[str, Any]:
    """Counts of what was promised, against an undisturbed local run."""
    judge(case, Case(calm_folder, 0, points), store=Store(case.url))
    figures, total = case.tally.figures, case.tally.figures["points"]
    return {
        "points": total,
        "missing": figures["missing"],
        "wrong": figures["wrong"] + figures["different tables"],
        "duplicates": figures["twice in the store"],
        "repeated_pct": round(100 * figures["repeated"] / total, 2),
        "broken": [text for text in case.tally.broken if not text.startswith("exit code 4")],
    }


def cost(server: Server, folder: Path, *, points: int) -> dict[str, Any]:
    """Wall time of closed-form points by two workers of Dask over that of two local processes, one after the other.

    Both record in PostgreSQL, then both in SQLite, which workers of other hosts cannot use. Of the client, which holds
    the scheduler, the memory is compared with that of a study of a quarter of the points.
    """
    local, dask = ["executor.jobs=2"], ["executor=dask", "executor.jobs=2"]
    _, less_mb = _timed(folder, "less", points // 4, [*dask, f"store.url={server.database('less')}"])
    found: dict[str, Any] = {"client_mb_of_a_quarter": round(less_mb)}
    for name in ("", "_sqlite"):
        stores = [[] if name else [f"store.url={server.database(run)}"] for run in ("local", "dask")]
        local_s, _ = _timed(folder, f"local{name}", points, [*local, *stores[0]])
        dask_s, peak_mb = _timed(folder, f"dask{name}", points, [*dask, *stores[1]])
        tables = [next((folder / f"{run}{name}").glob("*/2*/results.parquet")) for run in ("local", "dask")]
        found |= {
            f"local{name}_s": round(local_s, 1),
            f"dask{name}_s": round(dask_s, 1),
            f"dask_overhead_1m{name}": round(dask_s / local_s, 3),
            f"client{name}_mb": round(peak_mb),
            f"cost{name}_wrong": int(tables[0].read_bytes() != tables[1].read_bytes()),
        }
    return found | {"cost_points": pq.read_metadata(tables[0]).num_rows}


def _timed(folder: Path, name: str, points: int, words: Sequence[str]) -> tuple[float, float]:
    """Wall time [s] of a study of so many closed-form points, and the most memory [MB] of its main process."""
    links = f"+space.system.node.link_bytes_per_s=range(30e9,130e9,{100e9 * 2500 / points:.6g})"
    memory = "+space.system.gpu.hbm_bytes_per_s=range(4e12,6.5e12,5e10)"
    space = ["space={}", "+space.system.gpu.num_cus=range(104,304,8)", memory, links]
    command = [sys.executable, "-m", "dse", *_COST, *space, *words, f"output_dir={name}"]
    began = time.monotonic()
    print(f"cost, {name}:", file=sys.stderr)
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL)  # it shows its own progress
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise RuntimeError(f"{' '.join(command)}: ended with {os.waitstatus_to_exitcode(status)}")
    return time.monotonic() - began, usage.ru_maxrss / 1e3


def many(server: Server, folder: Path, *, points: int, workers: int) -> dict[str, Any]:
    """Efficiency of workers whose points are runs of a program that sleeps for a second.

    It is the time that programs slept over that of all workers, while all of them are at work: they begin one after the
    other, so a study has more points. What Dask's workers observe of themselves is turned off: 64 share two cores here.
    """
    case = ClusterCase(folder / "many", points, server.database("many"))
    (case.folder / "asleep.sh").write_text(_ASLEEP, encoding="utf-8")
    (case.folder / "conf" / "simulator" / "pausing.yaml").write_text(_EXTERNAL, encoding="utf-8")
    fleet = case.equip(workers, 0.0, _UNOBSERVED)
    try:
        with case.shown("many", points):
            process, store = case.client(), Store(case.url)
            case.wait(points, process)
        process.ended("end")
        found = store.count(1)
        store.database.close()
    finally:
        fleet.stop()
    log = pd.DataFrame([line.split() for line in _lines(case)], columns=["worker", "began", "ended"])
    times = log.astype({"began": float, "ended": float}).sort_values("began")
    began = times.groupby("worker")["ended"].min().nsmallest(workers).max()  # so many have ended a point
    ended = times["began"].iloc[points * 9 // 10]
    slept = times[["began", "ended"]].clip(began, ended).diff(axis=1)["ended"].sum()
    return {
        "efficiency_64": round(float(slept / ((ended - began) * workers)), 3),
        "efficiency_s": round(float(ended - began), 1),
        "many_missing": points - found,
        "many_broken": case.tally.broken,
    }


def _lines(case: Case) -> list[str]:
    """What was evaluated so far, while all workers have work."""
    return case.log.read_text().splitlines() if case.log.exists() else []


@contextmanager
def shared_folder() -> Iterator[Path]:
    """A folder for a while that the server's own user may enter."""
    folder = Path(tempfile.mkdtemp(prefix="dse-cluster-"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _server(*options: str) -> Iterator[tuple[Server, Path]]:
    with shared_folder() as folder, running(folder / "postgres", options=options) as server:
        yield server, folder


def main(argv: Sequence[str] | None = None) -> int:
    """Run some groups and print the figures; 1 if a result was lost or is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON alone")
    parser.add_argument("--only", default=",".join(GROUPS), help="groups, with commas between them")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--points", type=int, default=20_000, help="of the study that is killed")
    parser.add_argument("--link-points", type=int, default=4000, help="of the study whose links are cut")
    parser.add_argument("--cost-points", type=int, default=1_000_000, help="of the study that is timed")
    parser.add_argument("--crowd-chunk", type=int, default=128, help="results that a session records at a time")
    given = parser.parse_args(argv)
    found: dict[str, Any] = {}
    for group in given.only.split(","):
        print(f"{group}:", file=sys.stderr)
        if group == "links":
            if not usable():
                found["links_left_out"] = "network namespaces take root and iproute2"
                continue
            with shared_folder() as folder:
                found |= links(folder, points=given.link_points)
            continue
        with _server("-c", "max_connections=2100", *LOCK_WAIT) as (server, folder):
            if group == "kills":
                found |= kills(server, folder, count=given.kills, points=given.points)
            elif group == "cost":
                found |= cost(server, folder, points=given.cost_points)
            elif group == "many":
                found |= many(server, folder, points=8000, workers=64)
            elif group == "crowd":
                found |= crowd(server, sessions=1000, chunks=5, chunk=given.crowd_chunk)
    print(json.dumps(found, indent=2) if given.json else "\n".join(f"{name}: {value}" for name, value in found.items()))
    cut_off = found.get("partitions_survived") != found.get("partitions")
    return 1 if cut_off or any(found.get(name) for name in _BROKEN) else 0


if __name__ == "__main__":
    sys.exit(main())
