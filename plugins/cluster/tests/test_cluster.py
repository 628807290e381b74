"""Studies on a cluster of Dask: the same tables, nothing lost, and nobody let in."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import pytest

from benchmarks import cluster as proof
from dse.cli import main
from dse.errors import Broken
from dse.evaluation.calls import BackendSpec, parts_of
from dse.evaluation.evaluators import Services, evaluator_kind
from dse.results.provenance import code_version
from dse.space import Knob
from dse.store.owner import me
from dse.store.result_store import Store
from dse.store.session import Hold, StoreSession
from dse.study.plan import Plan
from dse.study.resume import begin
from dse.study.run import run
from dse_cluster import remote
from dse_cluster.connection import ClusterError
from dse_cluster.evaluator import Crew, Pace, take
from dse_cluster.settings import ClusterExecutor
from tests import toy
from tests.campaigns.network import usable
from tests.campaigns.postgres import Server
from tests.support import REPOSITORY, write_certificates
from tests.test_faults import fill
from tests.test_silence import in_time
from tests.test_store import CONTEXT, keys_of

if TYPE_CHECKING:
    from distributed import Client, Future, LocalCluster

KNOBS = (Knob("thing.mode", ("flat", "bent")), Knob("thing.bend", ("firm", "loose")), Knob("thing.x", tuple(range(40))))
QUIET = ["tracking=none", "figures=none", "fidelity=none"]
SMALL = ["study=ficco_sweep", "workload.only=[g4]", "schedule=chunked", *QUIET]


@pytest.fixture(scope="module", autouse=True)
def toybox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the toy is installed."""
    folder = tmp_path_factory.mktemp("toys") / "toybox"
    with toy.installed(folder):
        yield folder


@pytest.fixture(scope="module")
def cluster(toybox: Path, dask: Any) -> Iterator[LocalCluster]:
    """Two workers that know the toy."""
    path = os.pathsep.join([str(toybox), str(REPOSITORY / "tests")])
    with dask.LocalCluster(
        n_workers=2,
        threads_per_worker=1,
        host="127.0.0.1",
        dashboard_address="127.0.0.1:0",
        silence_logs=50,
        env={"PYTHONPATH": path},
    ) as local_cluster:
        yield local_cluster


@pytest.fixture
def client(cluster: LocalCluster, dask: Any) -> Iterator[Client]:
    with dask.Client(cluster, set_as_default=False) as connection:
        connection.wait_for_workers(2)
        yield connection


def planned(cluster: LocalCluster | None, search: str = "exhaustive", faults: Any = (), **more: Any) -> Plan:
    """A study of the toy, here or on a cluster."""
    knobs = KNOBS if search == "exhaustive" else (*KNOBS, Knob("thing.y", low=0.0, high=1.0))
    executor = {"name": "test", "jobs": 1, "broken_after": 0, **more}
    if cluster is not None:
        executor |= {"evaluator": "dask", "address": cluster.scheduler_address}
    tree = toy.settings(search, 10_000 if search == "exhaustive" else 30) | {"executor": executor}
    return toy.planned(knobs, tree, faults)


def table(plan: Plan, folder: Path) -> bytes:
    """The table of a study, with a store in its folder."""
    folder.mkdir(exist_ok=True)
    store = Store(f"sqlite:///{folder / 'results.db'}")
    begun = begin(store, replace(plan, request=replace(plan.request, overrides=())), {"command": []})
    try:
        with evaluator_kind(plan.settings.executor.evaluator).opened() as evaluator:
            run(plan, folder / "results.parquet", Services(begun.session, evaluator=evaluator))
    finally:
        begun.session.leave()
    begun.finish()
    return (folder / "results.parquet").read_bytes()


def count(database: Path, of: str = "results") -> int:
    """Rows of a table; 0 where there is none yet."""
    try:
        with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
            return int(connection.execute(f"SELECT count(*) FROM {of}").fetchone()[0])
    except sqlite3.OperationalError:
        return 0


# The same tables


@pytest.mark.slow
@pytest.mark.one_in(2)
@pytest.mark.parametrize("search", ["exhaustive", "nsga2"])
def test_a_cluster_gives_the_table_of_one_process_to_the_byte(
    cluster: LocalCluster, search: str, tmp_path: Path
) -> None:
    faults = ((3, "raises"), (5, "unsupported"), (7, "nan"))
    here = table(planned(None, search, faults), tmp_path / "here")
    assert table(planned(cluster, search, faults), tmp_path / "there") == here
    assert table(planned(cluster, search, faults), tmp_path / "there") == here  # once more, from the store
    assert count(tmp_path / "there" / "results.db") == count(tmp_path / "here" / "results.db")


@pytest.mark.nightly
def test_workers_that_are_killed_lose_nothing(client: Client, cluster: LocalCluster, tmp_path: Path) -> None:
    faults = tuple((x, "slow") for x in range(36))
    here = table(planned(None, faults=faults), tmp_path / "here")
    ended, killed, drawn = threading.Event(), list[int](), random.Random(0)

    def kill() -> None:
        older = set[int]()  # a nanny gives up a worker that ends while it starts
        while not ended.wait(2.0) and len(killed) < 3:  # Dask gives up a task whose workers died four times
            pids = set(client.run(os.getpid, on_error="ignore").values())
            if ready := sorted(pids & older):
                killed.append(drawn.choice(ready))
                os.kill(killed[-1], signal.SIGKILL)
            older = pids
            if len(pids) < 2:
                cluster.scale(2)  # those that were given up

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        there = table(planned(cluster, faults=faults, chunk_s=0.1), tmp_path / "there")
    finally:
        ended.set()
        thread.join()
    assert there == here
    assert killed
    assert count(tmp_path / "there" / "results.db") == count(tmp_path / "here" / "results.db")


@pytest.mark.nightly
def test_a_design_that_ends_its_process_is_a_failure_and_ends_no_worker(
    client: Client, cluster: LocalCluster, tmp_path: Path
) -> None:
    before, faults = client.run(os.getpid), ((3, "segv"),)
    table(planned(cluster, faults=faults), tmp_path / "there")
    table(planned(None, faults=faults, timeout_s=60), tmp_path / "here")
    there, here = (pd.read_parquet(tmp_path / name / "results.parquet") for name in ("there", "here"))
    pd.testing.assert_frame_equal(there.drop(columns="reason"), here.drop(columns="reason"))
    failed = there[there["status"] == "failed"]
    assert len(failed)
    assert failed["reason"].str.startswith("CRASH SIGSEGV").all()  # what it wrote last differs from run to run
    assert client.run(os.getpid) == before


@pytest.mark.slow
def test_a_backend_that_always_fails_ends_the_study(cluster: LocalCluster, tmp_path: Path) -> None:
    faults = tuple((x, "raises") for x in range(40))
    with pytest.raises(Broken, match="looks broken: 5 points in a row failed alike"):
        table(planned(cluster, faults=faults, broken_after=5), tmp_path / "there")


# Workers that may not


@pytest.mark.slow
def test_a_worker_with_other_code_is_sent_away_by_name(
    client: Client, cluster: LocalCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused, other = list(client.scheduler_info()["workers"])
    client.run(_pretend, workers=[refused])
    try:
        assert table(planned(cluster), tmp_path / "there") == table(planned(None), tmp_path / "here")
        assert f"worker {refused} is refused: it runs other code: numpy is 1.0, not" in capsys.readouterr().err
        client.run(_pretend, workers=[other])
        with pytest.raises(ClusterError, match=r"no worker may evaluate: .* runs other code"):
            table(planned(cluster), tmp_path / "nobody")
    finally:
        client.run(_be_oneself)


def _pretend() -> None:
    remote.code_version = lambda record=None: {**code_version(record), "numpy": "1.0"}  # type: ignore[attr-defined]


def _be_oneself() -> None:
    remote.code_version = code_version  # type: ignore[attr-defined]


@pytest.mark.usefixtures("dask")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "code", "parts"),
    [
        (["executor.address=tcp://127.0.0.1:1"], 4, ["no scheduler answers at tcp://127.0.0.1:1", "cluster=local"]),
        (["executor.address=tcp://10.0.0.1:8786"], 2, ["to other machines in the clear", "certificates"]),
        (["executor.address=tls://10.0.0.1:8786"], 2, ["needs certificates for tls://"]),
        (["executor.address=tcp://127.0.0.1:1", "executor.tls=x"], 2, ["has certificates, and tcp:// does without"]),
        (["executor.address=here"], 2, ["executor.address", "that of a Dask scheduler"]),
        (["executor.cluster=slurm"], 2, ["to other machines in the clear"]),
        (["executor.cluster=slurm", "executor.plain=true"], 2, ["store.url", "a file of this machine", "postgresql"]),
        (["store=none"], 2, ["keeps nothing, and a cluster needs a store"]),
        (["executor.settings={no_such_word: 1}"], 4, ["the cluster (local) was not started"]),
        (["executor.tls=nowhere"], 2, ["executor.tls", "lacks ca.pem", "put ca.pem, cert.pem and key.pem"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else str(value),
)
def test_what_cannot_work_is_told_with_the_way_out(
    words: list[str],
    code: int,
    parts: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*SMALL, "executor=dask", *words]) == code
    output = capsys.readouterr().err
    assert all(part in output for part in parts), output


@pytest.mark.usefixtures("dask")
@pytest.mark.more
def test_certificates_let_a_study_in_and_nobody_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_certificates(Path("mine"))
    words = [*SMALL, "executor=dask", "executor.jobs=1", "executor.tls=mine"]
    assert main(words) == 0
    assert "Dask: tls://127.0.0.1:" in capsys.readouterr().err
    table_of_tls = next(Path("outputs/ficco_sweep").glob("2*/results.parquet")).read_bytes()
    assert main([*SMALL, "output_dir=here"]) == 0
    assert next(Path("here/ficco_sweep").glob("2*/results.parquet")).read_bytes() == table_of_tls


# Programs, disks, and workers that come and go


@pytest.fixture
def allreduce(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Words of a study of a program in the current folder, which is new."""
    shutil.copytree(REPOSITORY / "docs" / "examples" / "allreduce", tmp_path / "mine")
    monkeypatch.chdir(tmp_path / "mine")
    return ["study=allreduce", "--config-dir=conf", *QUIET]


@pytest.mark.nightly
def test_a_program_of_the_user_runs_on_workers_that_were_started_elsewhere(
    cluster: LocalCluster, allreduce: list[str]
) -> None:
    assert main([*allreduce, "output_dir=here"]) == 0
    there = ["executor=dask", f"executor.address={cluster.scheduler_address}", "output_dir=there"]
    assert main([*allreduce, *there]) == 0
    first, other = (next(Path(name).glob("*/2*/results.parquet")) for name in ("here", "there"))
    assert first.read_bytes() == other.read_bytes()


@pytest.mark.slow
def test_a_worker_without_the_program_or_with_another_is_refused_by_name(tmp_path: Path) -> None:
    spec = planned(None).spec
    hold = Hold(1, spec.context)
    order = remote.Order(
        code_version(), me().host, str(tmp_path), spec, spec.version, ClusterExecutor(name="x"), "", 1.0, hold
    )
    here = Path.cwd()
    try:
        assert order.take_up() == ""
        assert Path.cwd() == tmp_path
        assert f"another version of the simulator ({spec.version}, not 2)" in replace(order, version="2").take_up()
        missing = BackendSpec("external", (("command", ["./gone"]),))
        assert "cannot run the simulator: simulator" in replace(order, spec=missing).take_up()
        assert "another host than the store" in replace(order, url="sqlite:///a.db", host="other").take_up()
    finally:
        os.chdir(here)


@pytest.mark.nightly
def test_a_worker_whose_disk_is_full_is_sent_away_and_the_study_goes_on(
    small: Path, allreduce: list[str], dask: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(small, spare=3_000_000)
    Path("large.sh").write_text('head -c 6000000 /dev/zero > scratch && exec python3 "$1"')
    simulator = Path("conf/simulator/allreduce.yaml")
    text = simulator.read_text()
    simulator.write_text(text.replace('[python3, "', '[/bin/sh, "{here}/large.sh", "'))
    with (
        dask.LocalCluster(
            n_workers=2, threads_per_worker=1, host="127.0.0.1", dashboard_address="127.0.0.1:0"
        ) as local_cluster,
        dask.Client(local_cluster, set_as_default=False) as client,
    ):
        client.wait_for_workers(2)
        full = next(iter(client.scheduler_info()["workers"]))
        client.run(_write_to, str(small), workers=[full])
        words = ["executor=dask", f"executor.address={local_cluster.scheduler_address}", "output_dir=there"]
        assert main([*allreduce, *words]) == 0
    assert f"worker {full} is refused: it has a full disk" in capsys.readouterr().err
    assert main([*allreduce, "output_dir=here"]) == 0
    first, other = (next(Path(name).glob("*/2*/results.parquet")) for name in ("here", "there"))
    assert first.read_bytes() == other.read_bytes()


def _write_to(folder: str) -> None:
    os.environ["TMPDIR"] = folder


@pytest.mark.nightly
def test_chunks_that_were_meant_for_a_worker_that_is_gone_go_to_another(
    client: Client, cluster: LocalCluster, tmp_path: Path
) -> None:
    faults = tuple((x, "slow") for x in range(40))
    refused, other = list(client.scheduler_info()["workers"])
    client.run(_pretend, workers=[refused])  # so that all chunks are meant for the other
    study = threading.Thread(
        target=table, args=(planned(cluster, faults=faults, chunk_s=0.1), tmp_path / "there"), daemon=True
    )
    study.start()
    database, until = tmp_path / "there" / "results.db", time.monotonic() + 60.0
    while count(database) < 20:
        assert time.monotonic() < until
        time.sleep(0.1)
    pid = client.run(os.getpid, workers=[other])[other]
    os.kill(pid, signal.SIGKILL)  # its nanny starts one with another address
    study.join(120.0)
    assert not study.is_alive()
    client.wait_for_workers(2)
    client.run(_be_oneself)
    here = table(planned(None, faults=faults), tmp_path / "here")
    assert (tmp_path / "there" / "results.parquet").read_bytes() == here


def test_a_study_waits_for_a_lost_worker_though_all_others_were_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Scheduler:
        cluster = None

        def nthreads(self) -> dict[str, int]:
            return workers

    workers, now = {"refused": 1, "able": 1}, [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    crew = Crew(Scheduler(), 2)
    crew.refuse("refused", "runs other code")
    assert crew.count() == 1
    del workers["able"]  # its nanny starts another one, which takes a while
    now[0] += 10.0
    assert crew.count() == 0
    now[0] += 50.0
    assert crew.count() == 0
    workers["able again"] = 1
    now[0] += 5.0
    assert crew.count() == 1
    del workers["able again"]
    now[0] += 5.0
    assert crew.count() == 0
    now[0] += 70.0
    with pytest.raises(ClusterError, match="no worker may evaluate: refused runs other code"):
        crew.count()


@pytest.mark.usefixtures("dask")
@pytest.mark.nightly
def test_a_cluster_grows_while_there_is_work(toybox: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = os.pathsep.join([str(toybox), str(REPOSITORY / "tests")])
    monkeypatch.setenv("PYTHONPATH", path)
    faults = tuple((x, "slow") for x in range(40))
    plan = toy.planned(
        KNOBS,
        toy.settings("exhaustive", 10_000)
        | {"executor": {"name": "test", "evaluator": "dask", "jobs": 1, "most_jobs": 2, "broken_after": 0}},
        faults,
    )
    study, most = threading.Thread(target=table, args=(plan, tmp_path / "there"), daemon=True), 0
    study.start()
    while study.is_alive():
        most = max(most, count(tmp_path / "there" / "results.db", "owners"))
        study.join(0.2)
    assert most == 3  # the client and two workers
    assert (tmp_path / "there" / "results.parquet").read_bytes() == table(planned(None, faults=faults), tmp_path / "x")


@pytest.mark.slow
def test_an_answer_that_was_lost_with_its_worker_is_made_again(
    cluster: LocalCluster, dask: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost, result = [TimeoutError()], dask.Future.result

    def once_lost(future: Future, timeout: float) -> Any:
        if lost:
            raise lost.pop()
        return result(future, timeout)

    monkeypatch.setattr(dask.Future, "result", once_lost)
    assert table(planned(cluster), tmp_path / "there") == table(planned(None), tmp_path / "here")
    assert not lost


@pytest.mark.usefixtures("dask")
@pytest.mark.nightly
def test_links_that_are_cut_and_slow_ones_lose_nothing(postgres: Server) -> None:
    """The short form of `make cluster`: each part on a host of its own."""
    if not usable():
        pytest.skip("network namespaces take root and iproute2")
    with proof.shared_folder() as folder:
        figures = proof.links(folder, points=350, cuts=(("worker0", 4.0), ("client", 4.0)), slow_s=4.0, pace=2.0)
    assert figures["partitions_survived"] == 2
    assert [figures[f"links_{name}"] for name in ("points", "missing", "wrong", "duplicates")] == [350, 0, 0, 0]
    assert figures["links_repeated_pct"] <= 5  # few points
    assert figures["links_broken"] == []


# Chunks


def test_chunks_grow_to_the_time_that_they_are_to_take_and_slow_designs_go_one_by_one() -> None:
    fast, sizes = Pace(0.5), list[int]()
    for _ in range(8):
        sizes.append(fast.size)
        fast.learn(fast.size, fast.size * 1e-5)
    assert sizes[:4] == [1, 8, 64, 512]
    assert sizes[-1] == pytest.approx(50_000, rel=0.01)
    crowded = Pace(0.5)
    for _ in range(8):  # points of 10 ms, whose recording takes 5 s as a thousand others record, too
        crowded.learn(crowded.size, crowded.size * 0.01 + 5.0, 5.0)
    assert crowded.size == pytest.approx(500, rel=0.05)
    slow = Pace(0.5)
    slow.learn(1, None)  # that of a start says nothing
    assert slow.design_s is None
    slow.learn(1, 60.0)
    assert slow.size == 1


@pytest.mark.nightly
def test_a_grid_that_is_cut_for_a_chunk_stays_in_few_grids() -> None:
    (batch,) = [toy.grid(range(4096))]
    point = toy.point(batch)
    (part,) = parts_of(point, 1 << 20)
    (piece,) = part.pieces()
    queued, sizes = deque([piece]), list[int]()
    while queued:
        sizes.append(sum(piece.size for piece in take(queued, 1 + len(sizes) ** 2, lambda piece: False)))
        assert len(queued) <= 12
    assert sum(sizes) == 4096
    assert len(sizes) < 40
    queued = deque([piece])
    assert [piece.size for piece in take(queued, 100, lambda piece: True)] == [1]


# A database that falls silent


@pytest.mark.nightly
@pytest.mark.slow
def test_leases_of_a_worker_that_lost_its_database_are_free_once_it_answers(postgres: Server) -> None:
    direct = postgres.database(f"leases{os.getpid()}")
    session, other = (StoreSession(Store(direct, patience_s=1.0), Hold(1, CONTEXT)) for _ in range(2))
    assert session.lease([keys_of([0])]) == [True]
    with postgres.stopped():
        in_time(lambda: remote._end(session))  # as a worker that goes on with other work does
    until = time.monotonic() + 20.0
    while other.lease([keys_of([0])]) == [False] and time.monotonic() < until:
        time.sleep(0.2)
    assert other.lease([keys_of([0])]) == [True]
    other.leave()
