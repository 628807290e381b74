"""A database that falls silent, is slow, forgets connections or garbles answers: exit code 4, or the same results."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import Connection, func, select, text

from dse.cli import main
from dse.results.selection import SelectionRule
from dse.store.database import StoreError
from dse.store.result_store import Store, recorded_keys, studies
from dse.store.session import Hold, StoreSession
from dse.study.resume import begin
from dse.tracking.database import TrackingError, open_store
from dse.tracking.sync import sync
from tests import toy
from tests.campaigns.postgres import Server
from tests.folders import finished, odd_table
from tests.proxy import Proxy, before
from tests.support import SERIAL
from tests.test_resume import planned
from tests.test_store import CONTEXT, fresh, keys_of, made, rows, url  # noqa: F401  (a fixture)

ALL = os.environ.get("DSE_FAULTS") == "all"
_numbers = itertools.count()


@pytest.fixture(autouse=True)
def installed(tmp_path: Path) -> Iterator[None]:
    with toy.installed(tmp_path / "toybox"):
        yield


@pytest.fixture
def proxy(postgres: Server) -> Iterator[Proxy]:
    with before(postgres.port) as silent:
        yield silent


@pytest.fixture
def direct(postgres: Server) -> str:
    """The URL of a fresh database, with nothing in between."""
    return postgres.database(f"silence{os.getpid()}_{next(_numbers)}")


def in_time(work: Callable[[], object]) -> None:
    """Do what used to last for ever. Raises TimeoutError where it still does."""
    done: list[BaseException | None] = []

    def held() -> None:
        try:
            work()
            done.append(None)
        except BaseException as error:
            done.append(error)

    thread = threading.Thread(target=held, daemon=True)
    thread.start()
    thread.join(90.0)
    if not done:
        raise TimeoutError("it has not ended")
    if done[0] is not None:
        raise done[0]


def point(session: StoreSession, x: int) -> None:
    """All that a study asks of its store for one point."""
    session.find(keys_of([x]))
    session.lease([keys_of([x])])
    assert session.is_shared in (True, False)
    session.record(*fresh([x]), [keys_of([x])])
    session.flush()


def has_all(store: Store, count: int) -> bool:
    lookup = store.find(keys_of(range(count)), store.number(CONTEXT))
    return bool(lookup.known.all()) and rows(lookup.results) == rows(made(range(count)))


# Silence


@pytest.mark.more
def test_a_server_that_falls_silent_is_told_in_time_and_loses_nothing(proxy: Proxy, direct: str) -> None:
    store = Store(proxy.before(direct), patience_s=2.0)
    session = StoreSession(store, Hold(1, CONTEXT))
    point(session, 0)
    proxy.is_silent = True
    with pytest.raises(StoreError, match=r"does not answer .*nothing recorded is lost"):
        in_time(lambda: point(session, 1))
    proxy.is_silent = False
    proxy.forget()  # as what went missing was not sent again
    session.flush()
    point(session, 1)
    session.leave()
    assert has_all(Store(direct), 2)


@pytest.mark.one_in(2)
@pytest.mark.more
@pytest.mark.parametrize("by", ["port", "socket"])
def test_a_server_that_is_stopped_is_told_in_time_and_goes_on_once_it_is_woken(
    postgres: Server, direct: str, by: str
) -> None:
    store = Store(direct if by == "port" else postgres.on_socket(direct), patience_s=2.0)
    session = StoreSession(store, Hold(1, CONTEXT))
    point(session, 0)
    with postgres.stopped(), pytest.raises(StoreError, match="does not answer"):
        in_time(lambda: point(session, 1))
    point(session, 1)
    session.leave()
    assert has_all(Store(direct), 2)


@pytest.mark.more
@pytest.mark.slow
def test_a_connection_that_one_side_has_forgotten_is_replaced(proxy: Proxy, direct: str) -> None:
    store = Store(proxy.before(direct), patience_s=4.0)
    session = StoreSession(store, Hold(1, CONTEXT))
    for x in range(4):
        if x % 2:
            proxy.forget()
        in_time(lambda x=x: point(session, x))  # type: ignore[misc]
    session.leave()
    assert has_all(Store(direct), 4)


@pytest.mark.nightly
@pytest.mark.slow
def test_a_study_whose_server_is_stopped_ends_with_4_and_goes_on_once_it_is_woken(
    postgres: Server, direct: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = [*SERIAL, f"store.url={direct}", "store.patience_s=1 s"]
    codes: list[int] = []
    with postgres.stopped():
        in_time(lambda: codes.append(main(command)))
    assert [*codes, main(command), main([*SERIAL, "output_dir=whole"])] == [4, 0, 0]
    names = [Path(folder) / "ficco_sweep/latest/results.parquet" for folder in ("outputs", "whole")]
    assert names[0].read_bytes() == names[1].read_bytes()


@pytest.mark.nightly
def test_a_server_that_starts_while_a_study_does_is_waited_for(postgres: Server, direct: str) -> None:
    postgres.stop()
    later = threading.Timer(7.0, postgres._control, ["start"])  # longer than a wrong name is waited for
    later.start()
    try:
        assert Store(direct).check() == (0, 0)
    finally:
        later.join()


@pytest.mark.one_in(2)
@pytest.mark.more
@pytest.mark.parametrize("name", ["postgresql://nobody@{}/none", "postgresql://tester@{}/none"])
def test_a_wrong_name_is_told_before_a_restart_would_be_over(postgres: Server, name: str) -> None:
    began = time.monotonic()
    with pytest.raises(StoreError, match="does not exist"):
        Store(name.format(f"127.0.0.1:{postgres.port}"))
    assert time.monotonic() - began < 60.0


@pytest.mark.nightly
def test_a_view_whose_server_falls_silent_is_passed_over(
    proxy: Proxy, direct: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dse.store.postgres.ANSWER_S", 2.0)
    folder, store = finished(tmp_path, odd_table()), open_store(proxy.before(direct))
    proxy.is_silent = True
    with pytest.raises(TrackingError, match="MLflow could not"):
        in_time(lambda: sync(folder, store, SelectionRule("all")))
    assert store.engine is not None
    store.engine.dispose()
    assert sync(folder, open_store(direct), SelectionRule("all")).num_points == 6


# A slow network


@pytest.mark.more
@pytest.mark.slow
def test_a_point_takes_few_round_trips_so_that_a_slow_network_does(proxy: Proxy, direct: str) -> None:
    session = StoreSession(Store(proxy.before(direct)), Hold(1, CONTEXT))
    point(session, 100)
    proxy.delay_s = 0.1
    for x in range(4):
        earlier = proxy.round_trips
        point(session, x)
        assert proxy.round_trips - earlier <= 5
    proxy.delay_s = 0.0
    session.leave()


# Garbled answers


@pytest.mark.slow
@pytest.mark.one_in(5)
@pytest.mark.parametrize("place", range(0, 1200, 7 if ALL else 61))
def test_a_flipped_bit_in_an_answer_ends_in_the_same_results_or_in_one_sentence(
    proxy: Proxy, direct: str, place: int
) -> None:
    proxy.flip = place

    def work() -> None:
        try:
            store = Store(proxy.before(direct), patience_s=2.0)
            own_session = StoreSession(store, Hold(1, CONTEXT))
            for x in range(2):
                point(own_session, x)
            own_session.leave()
        except StoreError as error:
            assert str(error)

    in_time(work)
    proxy.flip = None
    store = Store(direct)
    session = StoreSession(store, Hold(2, CONTEXT))
    for x in range(2):
        point(session, x)
    session.leave()
    assert has_all(store, 2)
    assert store.check()[1] == 0


# Equal commands at once


@pytest.mark.slow
def test_equal_commands_that_start_together_are_one_study(url: str) -> None:  # noqa: F811
    plan, stores = planned(), [Store(url) for _ in range(4)]
    together = threading.Barrier(4)

    def start(store: Store) -> int:
        together.wait()
        begun = begin(store, plan, {})
        begun.session.leave()
        return begun.study

    with ThreadPoolExecutor(4) as pool:
        numbers = set(pool.map(start, stores))
    count = select(func.count()).select_from(studies)
    assert len(numbers) == 1
    assert stores[0].database.read(lambda connection: connection.execute(count).scalar_one()) == 1


# What acts behind our back

TRIGGER = {
    "sqlite": ["CREATE TRIGGER spy BEFORE INSERT ON results BEGIN SELECT RAISE(IGNORE); END"],
    "postgresql": [
        "CREATE FUNCTION nothing() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'",
        "CREATE TRIGGER spy BEFORE INSERT ON results FOR EACH ROW EXECUTE FUNCTION nothing()",
    ],
}
VIEW = ["ALTER TABLE results RENAME TO others", "CREATE VIEW results AS SELECT * FROM others"]


def do(store: Store, statements: list[str]) -> None:
    for statement in statements:
        store.database.write(partial(Connection.execute, statement=text(statement)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["trigger", "view"])
def test_a_store_with_triggers_or_views_is_refused_with_a_sentence(
    url: str,  # noqa: F811
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    store = Store(url)
    do(store, TRIGGER[store.database.dialect.name] if kind == "trigger" else VIEW)
    store.database.close()
    assert main([*SERIAL, f"store.url={url}"]) == 4
    assert f"holds what dse never makes and what may change results: {kind}" in capsys.readouterr().err
    with pytest.raises(StoreError, match=kind):
        list(recorded_keys(url))


@pytest.mark.slow
def test_what_is_not_there_after_it_was_written_is_an_error_and_is_kept(url: str) -> None:  # noqa: F811
    store = Store(url)
    session = StoreSession(store, Hold(1, CONTEXT))
    session.record(*fresh([0]), [])
    session.flush()
    do(store, TRIGGER[store.database.dialect.name])
    with pytest.raises(StoreError, match="2 of 2 results were handed over and are not there"):
        session.record(*fresh([1, 2]), [])
        session.flush()
    do(store, ["DROP TRIGGER spy" + (" ON results" if url.startswith("postgresql") else "")])
    session.flush()
    session.leave()
    assert has_all(store, 3)


@pytest.mark.slow
def test_a_study_that_is_not_noted_as_finished_is_an_error(url: str) -> None:  # noqa: F811
    store = Store(url)
    with pytest.raises(StoreError, match="0 rows were changed where 1 was to be"):
        store.change(studies.update().where(studies.c.id == 7).values(state="finished"))
