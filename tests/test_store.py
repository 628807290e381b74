"""The store: a result is recorded once, a damaged one never believed, and what a dead process had in hand goes on."""

from __future__ import annotations

import itertools
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Connection, Table, func, select

from dse.backend import STATUSES, Batch, Result, Results
from dse.cli import main
from dse.space import Points
from dse.store.contract import Context, Evaluated, key_bytes
from dse.store.database import StoreError
from dse.store.fronts import front
from dse.store.owner import Owner, me
from dse.store.result_rows import checksum, fits
from dse.store.result_store import Store, leases, owners, quarantine, results
from dse.store.session import Hold, StoreSession
from dse.values import Keys, content_keys
from tests import toy
from tests.campaigns.postgres import Server


@pytest.fixture(autouse=True)
def installed(tmp_path: Path) -> Iterator[None]:
    with toy.installed(tmp_path / "toybox"):
        yield
    while _sessions:
        with suppress(StoreError):
            _sessions.pop().leave()


CONTEXT = Context("toy", "1", "()", tuple(toy.METRICS))
XS = range(12)


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A fresh database of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'results.db'}"
    server: Server = request.getfixturevalue("postgres")
    return server.database(f"db{os.getpid()}_{next(_numbers)}")


_numbers = itertools.count()


_sessions: list[StoreSession] = []
_folder = tempfile.TemporaryDirectory()


def new_store() -> Store:
    """A store in a file of its own, for what Hypothesis repeats."""
    return Store(f"sqlite:///{_folder.name}/{next(_numbers)}.db")


def keys_of(xs: Sequence[int], context: Context = CONTEXT) -> Keys:
    return np.concatenate([content_keys(design, context=context.words) for design in toy.things(xs)])


def made(xs: Sequence[int], faults: Sequence[tuple[int, str]] = ()) -> Results:
    """What the toy gives for things of these x."""
    return Results.join(list(toy.evaluate(toy.spec(*faults), [Batch(design) for design in toy.things(xs)])))


def fresh(xs: Sequence[int], outcomes: Results | None = None, context: Context = CONTEXT) -> Evaluated:
    return Points({}, {"thing.x": np.array(xs)}, None, keys=keys_of(xs, context)), outcomes or made(xs)


def recorded(store: Store, what: Evaluated, study: int = 1) -> int:
    context = store.number(CONTEXT)
    inserts = store.inserts([what], context=context, study=study)
    return store.database.write(lambda connection: store.add(connection, inserts))


def stored_rows(store: Store, table: Table) -> list[Any]:
    return store.database.read(lambda connection: list(connection.execute(select(table))))


def rows(outcomes: Results) -> list[str]:
    return [repr(outcomes[place]) for place in range(outcomes.size)]


def session(store: Store, study: int = 1, **more: tuple[Context, ...]) -> StoreSession:
    _sessions.append(StoreSession(store, Hold(study, CONTEXT, **more)))
    return _sessions[-1]


# Rows


def test_what_was_recorded_is_found_to_the_bit_in_any_order_and_nothing_else_is(url: str) -> None:
    store, faults = Store(url), [(3, "raises"), (4, "nan"), (5, "unsupported")]
    assert recorded(store, fresh(XS, made(XS, faults))) == len(XS)
    xs = [7, 3, 100, 4, 3, 5, 0]
    lookup = Store(url).find(keys_of(xs), store.number(CONTEXT))
    assert lookup.known.tolist() == [x in XS for x in xs]
    expected = rows(made(xs, faults))
    assert [row for row, is_known in zip(rows(lookup.results), lookup.known, strict=True) if is_known] == [
        row for row, x in zip(expected, xs, strict=True) if x in XS
    ]


def test_a_result_is_recorded_once_and_the_first_one_stands(url: str) -> None:
    store = Store(url)
    recorded(store, fresh([1, 2]))
    other = replace(made([2, 3]), metrics={name: column * 2 for name, column in made([2, 3]).metrics.items()})
    assert recorded(store, fresh([2, 3], other)) == 1
    outcomes = store.find(keys_of([1, 2, 3]), store.number(CONTEXT)).results
    assert rows(outcomes) == [*rows(made([1, 2])), rows(other)[1]]


def test_results_are_carried_to_other_keys_where_no_result_stands(url: str) -> None:
    store = Store(url)
    recorded(store, fresh([1, 2, 3]))
    names = key_bytes(keys_of([1, 2, 3, 4]))
    for _ in range(2):
        store.rebase({names[0]: names[3], names[1]: names[2]})
        lookup = store.find(keys_of([1, 2, 3, 4]), store.number(CONTEXT))
        assert lookup.known.tolist() == [False, False, True, True]
        assert rows(lookup.results)[2:] == [*rows(made([3])), *rows(made([1]))]
    assert store.check() == (2, 0)


def test_a_text_that_no_database_takes_is_recorded_with_a_mark_in_its_place(url: str) -> None:
    store = Store(url)
    recorded(store, fresh([1], Results.of([Result("failed", reason="a\0b\udc80c")])))
    lookup = store.find(keys_of([1]), store.number(CONTEXT))
    assert lookup.known.all()
    assert lookup.results[0].reason == "a\ufffdb?c"


def check_front(store: Store, outcomes: Results) -> None:
    """Record results, and check that the front of their study holds what none of them dominates."""
    recorded(store, fresh(range(len(outcomes.status)), outcomes))
    numbers = list(zip(outcomes.column("time_s").tolist(), outcomes.column("gain").tolist(), strict=True))
    best = [
        key.hex()
        for key, (time, gain) in zip(key_bytes(keys_of(range(len(numbers)))), numbers, strict=True)
        if not any(t <= time and g >= gain and (t, g) != (time, gain) for t, g in numbers)
    ]
    keys, values = front(store, 1, {"time_s": "minimize", "gain": "maximize"})
    assert sorted(keys) == sorted(best)
    assert len(values) == len(best)


@pytest.mark.slow
@given(st.lists(st.tuples(st.floats(0, 1e300), st.floats(-1e9, 1e9)), min_size=1, max_size=40))
def test_the_front_of_a_study_holds_what_nothing_recorded_dominates(numbers: list[tuple[float, float]]) -> None:
    outcomes = [Result("ok", {"time_s": time, "gain": gain}, engine="toy") for time, gain in numbers]
    check_front(new_store(), Results.of(outcomes))


def test_the_front_is_the_same_in_every_database(url: str) -> None:
    check_front(Store(url), made(range(-50, 50)))


# Damage


def _place_of_row(file: Path) -> tuple[int, int]:
    """Where the one row of a database is stored in its file."""
    with sqlite3.connect(file) as connection:
        point, checksum = connection.execute("SELECT point, checksum FROM results").fetchone()
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    data = file.read_bytes()
    end = data.index(checksum, data.index(point.encode())) + len(checksum)
    key = data.rindex(key_bytes(keys_of([1]))[0], 0, end)
    return key - 16, end  # with the lengths and kinds of its columns before it


@pytest.mark.nightly
@pytest.mark.slow
def test_every_flipped_bit_of_a_row_is_caught_and_the_result_is_made_again(tmp_path: Path) -> None:
    database = tmp_path / "whole.db"
    store = Store(f"sqlite:///{database}")
    context = store.number(CONTEXT)
    recorded(store, fresh([1]))
    store.database.close()
    begin, end = _place_of_row(database)
    data, expected = bytearray(database.read_bytes()), rows(made([1]))
    for bit in range(8 * begin, 8 * end, 1 if os.environ.get("DSE_FAULTS") == "all" else 11):
        file = tmp_path / "flipped.db"
        for path in tmp_path.glob("flipped.db*"):
            path.unlink()
        data[bit // 8] ^= 1 << bit % 8
        file.write_bytes(data)
        data[bit // 8] ^= 1 << bit % 8
        flipped = Store(f"sqlite:///{file}")
        lookup = flipped.find(keys_of([1]), context)
        assert not lookup.known.any() or rows(lookup.results) == expected, f"bit {bit - 8 * begin} of the row"
        if not lookup.known.any():
            recorded(flipped, fresh([1]))
            again = flipped.find(keys_of([1]), context)
            assert again.known.all()
            assert rows(again.results) == expected
        flipped.database.close()


@pytest.mark.slow
@given(st.integers(0, 8), st.integers(0, 200), st.integers(0, 7))
def test_a_row_that_was_changed_anywhere_does_not_fit(column: int, place: int, bit: int) -> None:
    (row,) = _rows_in_memory()
    value = list(row)
    cell = value[column]
    if isinstance(cell, int):
        value[column] = cell ^ (1 << bit)
    else:
        data = bytearray(cell.encode() if isinstance(cell, str) else cell) or bytearray(b"\0")
        data[place % len(data)] ^= 1 << bit
        value[column] = data.decode("utf-8", "surrogateescape") if isinstance(cell, str) else bytes(data)
    assert fits(row)
    assert not fits(value)


@pytest.mark.parametrize("status", [-1, len(STATUSES), 300])
def test_a_row_of_an_unknown_status_does_not_fit_even_with_its_checksum(status: int) -> None:
    (row,) = _rows_in_memory()
    changed = [*row[:3], status, *row[4:-1]]
    assert not fits((*changed, checksum(changed)))


def _rows_in_memory() -> list[tuple[Any, ...]]:
    store = new_store()
    recorded(store, fresh([1]))
    return store.database.read(lambda connection: [tuple(row) for row in connection.execute(select(results))])


def test_a_damaged_row_goes_into_quarantine_and_two_that_were_swapped_do_too(url: str) -> None:
    store = Store(url)
    recorded(store, fresh([1, 2, 3]))
    first, two, _ = key_bytes(keys_of([1, 2, 3]))

    def swap(connection: Connection) -> None:
        metrics_of = {row.key: row.metrics for row in connection.execute(select(results))}
        for key, other in ((first, two), (two, first)):
            changed = results.update().where(results.c.key == key).values(metrics=metrics_of[other])
            connection.execute(changed)

    store.database.write(swap)
    assert store.find(keys_of([1, 2, 3]), store.number(CONTEXT)).known.tolist() == [False, False, True]
    damaged = store.database.read(lambda connection: connection.execute(select(quarantine.c.key)).scalars().all())
    assert sorted(damaged) == sorted([first, two])
    assert store.check() == (1, 0)


@pytest.mark.one_in(5, 1)
@pytest.mark.slow
@pytest.mark.parametrize("renames", range(5))
def test_a_repair_that_is_interrupted_loses_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renames: int
) -> None:
    """However many of its renames were done; half of the rows are in the log alone."""
    file, xs = tmp_path / "results.db", range(400)
    store = Store(f"sqlite:///{file}")
    recorded(store, fresh(xs[:200]))
    store.database.read(lambda connection: connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)").all())
    recorded(store, fresh(xs[200:]))
    left, rename = iter(range(renames)), Path.replace

    def replace_some(path: Path, target: Path) -> Path:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "replace", replace_some)
    with suppress(KeyboardInterrupt):
        store.database._mend(ValueError("damage"))
    monkeypatch.undo()
    again = Store(f"sqlite:///{file}")
    lookup = again.find(keys_of(xs), again.number(CONTEXT))
    assert lookup.known.all()
    assert rows(lookup.results) == rows(made(xs))
    assert not list(tmp_path.glob("*.mended"))


@pytest.mark.more
@pytest.mark.one_in(6)
@pytest.mark.parametrize("damage", ["empty", "half", "zeros", "garbage", "no file at all", "another page"])
def test_a_damaged_file_is_put_aside_and_what_can_be_read_of_it_is_kept(tmp_path: Path, damage: str) -> None:
    file = tmp_path / "results.db"
    store = Store(f"sqlite:///{file}")
    xs = range(-900, 900)
    recorded(store, fresh(xs))
    store.database.read(lambda connection: connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)").all())
    store.database.close()
    data = file.read_bytes()
    middle = len(data) // 2 // 4096 * 4096
    changed = {
        "empty": b"",
        "half": data[: len(data) // 2 + 17],
        "zeros": bytes(len(data)),
        "garbage": b"this is no database at all" * 100,
        "another page": data[:middle] + b"\xff" * 4096 + data[middle + 4096 :],
    }
    if damage == "no file at all":
        file.unlink()
    else:
        file.write_bytes(changed[damage])
    mended = Store(f"sqlite:///{file}")
    context = mended.number(CONTEXT)
    before = mended.find(keys_of(xs), context)
    assert rows(before.results.take(np.flatnonzero(before.known))) == [
        row for row, is_known in zip(rows(made(xs)), before.known, strict=True) if is_known
    ]
    if damage == "another page":
        assert before.known.mean() > 0.9
        assert list(tmp_path.glob("results.db.damaged-*"))
    recorded(mended, fresh(xs))
    assert rows(mended.find(keys_of(xs), context).results) == rows(made(xs))


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0x00, 0xA5])
def test_a_store_whose_page_with_its_version_is_damaged_is_not_taken_for_a_former_one(
    tmp_path: Path, noise: int
) -> None:
    url = f"sqlite:///{tmp_path / 'results.db'}"
    store = Store(url)
    recorded(store, fresh(range(50)))
    store.database.close()
    with closing(sqlite3.connect(tmp_path / "results.db")) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        ((page, size),) = connection.execute(
            "SELECT rootpage, page_size FROM sqlite_master, pragma_page_size WHERE name = 'about'"
        )
    with (tmp_path / "results.db").open("r+b") as file:
        file.seek((page - 1) * size)
        file.write(bytes([noise]) * size)
    store = Store(url)
    assert store.database.mended
    assert rows(store.find(keys_of(range(50)), store.number(CONTEXT)).results) == rows(made(range(50)))
    store.database.close()
    assert main(["store", "check", f"output_dir={tmp_path}"]) == 0


def test_a_file_that_is_taken_away_in_use_is_noticed_before_anything_is_lost_in_it(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path / 'results.db'}")
    recorded(store, fresh([1]))
    (tmp_path / "results.db").rename(tmp_path / "elsewhere.db")
    with pytest.raises(StoreError, match=r"results\.db was moved, deleted or replaced"):
        recorded(store, fresh([2]))


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("sqlite:////proc/nowhere/results.db", "choose another output_dir or store.url"),
        ("postgresql://nobody:secret@127.0.0.1:1/none", "does not answer"),
        ("nosuch://x", "names no database"),
    ],
)
def test_a_database_that_cannot_be_used_is_told_in_one_sentence_without_its_password(url: str, message: str) -> None:
    with pytest.raises(StoreError, match=message) as caught:
        Store(url, patience_s=0.5)
    assert "secret" not in str(caught.value)


@pytest.mark.more
@pytest.mark.one_in(2)
def test_processes_that_make_a_database_at_once_all_get_it(url: str) -> None:
    code = f"from dse.store.result_store import Store; print(Store({url!r}).check())"
    done = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(4)]
    assert [process.communicate()[0].strip() for process in done] == ["(0, 0)"] * 4


def test_a_store_of_another_version_is_refused_and_left_as_it_is(url: str) -> None:
    store = Store(url)
    store.database.write(lambda connection: connection.exec_driver_sql("UPDATE about SET schema = 99"))
    with pytest.raises(StoreError, match=r"another version of dse \(99, not 2\)"):
        Store(url)


def test_a_store_from_before_tables_had_a_number_is_refused(url: str) -> None:
    store = Store(url)
    for change in ("DROP TABLE about", "ALTER TABLE studies DROP COLUMN before"):
        store.database.write(partial(Connection.exec_driver_sql, statement=change))
    for _ in range(2):
        with pytest.raises(StoreError, match=r"another version of dse \(0, not 2\)"):
            Store(url)


# Sessions


def test_a_session_that_nobody_preceded_looks_nothing_up_and_one_that_somebody_did_finds_it(url: str) -> None:
    store = Store(url)
    first = session(store)
    assert first.find(keys_of(XS)) is None
    assert [rows(outcomes) for outcomes in (*first.record(*fresh(XS), [keys_of(XS)]), *first.flush())] == [
        rows(made(XS))
    ]
    first.leave()
    second = session(store, study=2)
    lookup = second.find(keys_of([1, 2, 99]))
    assert lookup is not None
    second.recall(lookup.study[lookup.known])
    assert lookup.known.tolist() == [True, True, False]
    assert second.recalled == {1: 2}


def test_a_point_is_leased_to_one_process_and_to_the_next_once_that_is_gone(url: str) -> None:
    store = Store(url)
    first, parts = session(store), [keys_of([1]), keys_of([2, 3])]
    assert first.lease(parts) == [True, True]
    second = session(store)
    assert not second.alone
    assert second.lease([*parts, keys_of([4])]) == [False, False, True]
    _becomes(store, replace(me(), pid=2**22 - 1))
    third = session(store)
    assert third.lost == 3
    assert third.lease(parts) == [True, True]


def _becomes(store: Store, owner: Owner) -> None:
    """The oldest owner is another process."""

    def work(connection: object) -> None:
        first = connection.execute(select(owners.c.id).order_by(owners.c.id)).scalars().first()  # type: ignore[attr-defined]
        connection.execute(owners.update().where(owners.c.id == first).values(**vars(owner)))  # type: ignore[attr-defined]

    store.database.write(work)


@pytest.mark.parametrize(
    ("change", "gone"),
    [({"started": 1}, True), ({"boot": "an earlier one"}, True), ({"host": "another/pid:[1]"}, False), ({}, False)],
    ids=["a pid that was reused", "before a reboot", "another host or container", "alive"],
)
def test_an_owner_is_gone_only_where_that_is_certain(change: dict[str, object], gone: bool) -> None:
    store = new_store()
    first = session(store)
    first.lease([keys_of([1])])
    _becomes(store, replace(me(), **change))  # type: ignore[arg-type]
    assert session(store).lease([keys_of([1])]) == [gone]


def test_an_owner_elsewhere_is_gone_when_it_has_been_silent_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    store = new_store()
    session(store).lease([keys_of([1])])
    _becomes(store, replace(me(), host="another/pid:[1]"))
    second = session(store)
    assert second.lease([keys_of([1])]) == [False]
    monkeypatch.setattr("dse.store.session._SILENCE_S", 0.0)
    assert second.lease([keys_of([1])]) == [True]


def test_a_result_that_another_process_recorded_first_is_the_one_that_counts(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Store(url)
    first, other = session(store), session(store)
    first.record(*fresh([1, 2]), [])
    first.flush()
    changed = replace(made([1, 2]), metrics={**made([1, 2]).metrics, "time_s": made([1, 2]).column("time_s") * 1.5})
    batches = [*other.record(*fresh([1, 2], changed), []), *other.flush()]
    assert [rows(outcomes) for outcomes in batches] == [rows(made([1, 2]))]
    assert "toy is not deterministic: a metric differs by 50 %" in capsys.readouterr().err
    assert [*other.record(*fresh([1, 2]), []), *other.flush()]
    assert "deterministic" not in capsys.readouterr().err


def test_results_of_an_accepted_version_count_and_of_another_they_do_not(url: str) -> None:
    store, old = Store(url), replace(CONTEXT, version="0")
    number = store.number(old)
    what = fresh(XS, context=old)
    inserts = store.inserts([what], context=number, study=1)
    store.database.write(lambda connection: store.add(connection, inserts))
    plain, accepting = session(store), session(store, accepted=(old,))
    recorded(store, fresh([99]))
    assert not plain.store.find(keys_of(XS), store.number(CONTEXT)).known.any()
    lookup = accepting.find(keys_of([*XS, 50]))
    assert lookup is not None
    assert lookup.known.tolist() == [True] * len(XS) + [False]
    assert rows(lookup.results)[:-1] == rows(made(XS))


def test_a_study_is_evaluated_once_however_it_is_cut_and_told_in_order(url: str) -> None:
    """First some designs of a grid, then all of it: what was done is not done again, whatever its place."""
    store = Store(url)
    grid = Batch(toy.things([0])[0], {"thing.x": np.arange(30), "thing.y": np.array([0.0, 1.0])})
    part = [Batch(design) for place, design in enumerate(grid.designs()) if place % 7 in (2, 3)]
    for number, batches in enumerate(([*part], [grid], [grid])):
        backend = toy.spec(batch=8, faults=((number, "none such"),)).make()  # one of its own, to count its calls
        current = session(store)
        done = list(toy.evaluate(toy.spec(batch=8, faults=((number, "none such"),)), batches, session=current))
        current.leave()
        counts = [len(part), grid.size - len(part), 0]
        assert len(backend.evaluated) == counts[number]  # type: ignore[attr-defined]
    alone = list(toy.evaluate(toy.spec(), [grid]))
    assert rows(done[0]) == rows(alone[0])


def test_of_a_grid_a_process_has_a_moments_work_in_hand_and_leaves_the_rest_to_others(url: str) -> None:
    store, counts = Store(url), []
    grid = Batch(toy.things([0])[0], {"thing.x": np.arange(40)})
    query = select(func.coalesce(func.sum(leases.c.size), 0))

    def seen(count: int) -> None:
        counts.append(store.database.read(lambda connection: connection.execute(query).scalar_one()))

    (outcomes,) = toy.evaluate(toy.spec(batch=1), [grid], session=session(store), seen=seen)
    assert max(counts) <= 2
    assert rows(outcomes) == rows(made(range(40)))


@pytest.mark.slow
def test_what_another_process_records_while_a_grid_is_evaluated_is_not_evaluated_again(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dse.store.session._LOOK_S", 0.0)
    store, sessions = Store(url), list[StoreSession]()
    grid = Batch(toy.things([0])[0], {"thing.x": np.arange(40)})
    spec = toy.spec((7, "none such"), batch=1)
    backend = spec.make()
    backend.evaluated.clear()  # type: ignore[attr-defined]

    def seen(count: int) -> None:
        if not sessions:
            sessions.append(session(store))
            later = toy.point(Batch(toy.things([10])[0], {"thing.x": np.arange(10, 40)}))
            sessions[0].record(later, made(range(10, 40)), [])
            sessions[0].flush()

    (outcomes,) = toy.evaluate(spec, [grid], session=session(store), seen=seen)
    assert len(backend.evaluated) == 10  # type: ignore[attr-defined]
    assert rows(outcomes) == rows(made(range(40)))


def test_results_wait_for_more_of_them_for_a_shorter_time_where_nothing_waits_for_their_recording() -> None:
    current = session(new_store())
    current._took_s, current._recorded = (1.0, 1.0), time.monotonic() - 10.0
    assert current.record(*fresh([1]), []) == []
    assert len(current.record(*fresh([2]), [], idle=True)) == 2


# A server


@pytest.mark.nightly
@pytest.mark.slow
def test_a_server_that_is_killed_and_restarted_under_load_loses_nothing(postgres: Server) -> None:
    url = postgres.database(f"kill{os.getpid()}")
    store = Store(url)
    current = session(store)
    batches: list[Results] = []
    for number, start in enumerate(range(0, 900, 30)):
        if number % 10 == 5:
            postgres.restart()
        batches += current.record(*fresh(range(start, start + 30)), [keys_of(range(start, start + 30))])
    batches += current.flush()
    current.leave()
    assert [row for outcomes in batches for row in rows(outcomes)] == rows(made(range(900)))
    assert rows(Store(url).find(keys_of(range(900)), store.number(CONTEXT)).results) == rows(made(range(900)))
    assert store.count(1) == 900
    assert store.check() == (900, 0)


def test_nothing_is_left_of_leases_and_owners_once_all_have_left(url: str) -> None:
    store = Store(url)
    current = session(store)
    current.lease([keys_of(XS)])
    current.leave()
    for table in (leases, owners):
        assert stored_rows(store, table) == []


@pytest.mark.slow
def test_a_store_that_had_to_be_mended_does_not_pass_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("outputs").mkdir()
    Path("outputs/results.db").write_text("no database" * 100, encoding="utf-8")
    assert [main(["store", "check"]), main(["store", "check"]), main(["store", "check", "url=nonsense"])] == [3, 0, 2]
