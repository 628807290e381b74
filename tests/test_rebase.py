"""Results under former names of knobs: told when a store is opened, and carried over by `dse store rebase`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import Connection, select

from dse.cli import main
from dse.errors.parsing import parse_json
from dse.store.contract import key_bytes
from dse.store.database import StoreError, number_file
from dse.store.result_rows import checksum, fits, with_key
from dse.store.result_store import FORMER_SCHEMA, Store, about, recorded_keys, results, studies
from dse.study import rebase
from dse.study.plan_again import Present, plan_stored
from dse.values import content_keys
from simulators.overlap.backend import OverlapBackend
from tests.support import design

URL = "sqlite:///outputs/results.db"
FORMER_LESS_PRESENT = {
    "serial": "6ce5fdccb5fe4e3e65a8b021acb0c939",
    "uniform_fused_2d": "35490ad6acce0783b854406c28a8dbe5",
    "hetero_unfused_1d": "02b279fcf4eab3bb1a5ff5c082ba346a",
    "c3_sp": "af609fe65d5d5a16974729f03ce9ef85",
    "t3_mca": "a3206d113c8bdd76fe154894e4e0f7ad",
    "go_kernels": "6c1a56f9b8790fef840ceb164dfe5a79",
    "fused_kernels": "c1fdf3607e3b85846e3169428fc612b8",
}
"""Content keys of shipped schedules as the last code with former names made them, less the present ones."""
SMALL = [
    *("study=ficco_sweep", "workload.only=[g4]", "tracking=none", "figures=none", "timeline=false", "executor.jobs=1"),
    "space.schedule.name=choice(serial,hetero_fused_1d,uniform_fused_2d)",
    *("space.schedule.num_chunks=choice(1,4)", "space.schedule.comm_cus=choice(16)"),
]
LADDER = [*SMALL, "fidelity.levels=[uncontended,study]", "fidelity.sample=2", "fidelity.rounds=0"]
SEARCH = [*SMALL, "fidelity=none", "+space.system.gpu.dma.setup_s=interval(1e-6,1e-5)", "search=random"]
STUDIES = LADDER, [*SEARCH, "budget.trials=12"]


@pytest.mark.parametrize("schedule", FORMER_LESS_PRESENT)
def test_former_keys_are_those_that_the_former_code_made(schedule: str) -> None:
    assert key_bytes(rebase.former_shift(design(schedule)))[0].hex() == FORMER_LESS_PRESENT[schedule]


def recorded(store: Store) -> list[tuple[Any, ...]]:
    return [tuple(row) for page in store.pages() for row in page]


def take_back(store: Store) -> None:
    """Give every result of a store the key that it had under former names, as an older dse recorded it."""
    rows = store.database.read(lambda connection: connection.execute(select(studies)).all())
    plans = {row.id: plan_stored(row, Present()) for row in rows}
    former: dict[bytes, bytes] = {}
    for row in (row for page in store.pages() for row in page):
        made_in = store.context(row.context)
        assert made_in is not None
        present = next(
            candidate
            for candidate in rebase._designs(plans[row.study], parse_json(row.point, "point"))
            if key_bytes(content_keys(candidate, context=made_in.words))[0] == row.key
        )
        now = np.frombuffer(row.key, ">u8").astype(np.uint64)
        former[row.key] = key_bytes(now + rebase.former_shift(present))[0]
    assert all(key != now for now, key in former.items())
    store.rebase(former)
    store.database.write(lambda connection: connection.execute(about.update().values(schema=FORMER_SCHEMA)))


def set_command(store: Store, command: str) -> str:
    """Give the second study of a store another command; return the one it had."""
    is_second = studies.c.id == 2
    before = store.database.read(lambda connection: connection.execute(select(studies).where(is_second)).one().command)
    change = studies.update().where(is_second).values(command=command)
    store.database.write(lambda connection: connection.execute(change))
    return str(before)


@pytest.mark.more
def test_an_older_store_is_refused_carried_over_once_and_then_evaluates_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an enumerated study with a ladder and of a searched one; first while the latter cannot be planned."""
    monkeypatch.chdir(tmp_path)
    assert [main(words) for words in STUDIES] == [0, 0]
    store = Store(URL)
    present = recorded(store)
    assert len({row[1] for row in present}) == 2  # contexts: the ladder has a level of its own
    take_back(store)
    former = recorded(store)

    hint = f"carry them over, once: python -m dse store rebase store={URL}"
    with pytest.raises(StoreError, match=hint):
        Store(URL)
    with pytest.raises(StoreError, match=hint):
        list(recorded_keys(URL))
    assert main(LADDER) == 4
    assert recorded(store) == former

    command = set_command(store, '["study=ficco_sweep", "schedule.mover=dma"]')
    capsys.readouterr()
    assert main(["store", "rebase"]) == 3
    message = " ".join(capsys.readouterr().err.split())
    assert "study 2 (ficco_sweep) cannot be planned any more: schedule.mover: is not a known key" in message
    assert f"study 2: {sum(row[2] == 2 for row in present)} results could not be made again" in message
    assert recorded(Store(URL)) == sorted(
        [*(row for row in present if row[2] == 1), *(row for row in former if row[2] == 2)]
    )

    set_command(store, command)
    for count in (sum(row[2] == 2 for row in present), 0):
        assert main(["store", "rebase"]) == 0
        assert f"{count} results were carried over" in " ".join(capsys.readouterr().out.split())
        assert recorded(Store(URL)) == present

    def evaluate(*_: object) -> None:
        raise AssertionError("a recorded point was evaluated again")

    monkeypatch.setattr(OverlapBackend, "evaluate", evaluate)
    assert [main(words) for words in STUDIES] == [0, 0]
    assert recorded(Store(URL)) == present


def test_a_store_without_any_number_counts_as_older_if_it_holds_results(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path / 'results.db'}")
    lose = about.delete()

    def forget(connection: Connection) -> None:
        connection.execute(lose)
        number_file(connection, 0)

    store.database.write(forget)
    Store(store.url)
    row = dict(zip(results.c.keys(), (bytes(16), 1, 1, 0, "", "", "{}", b"", bytes(8)), strict=True))
    store.database.write(lambda connection: (connection.execute(lose), connection.execute(results.insert(), row)))
    Store(store.url)  # the number in the head of the file stands
    store.database.write(forget)
    with pytest.raises(StoreError, match="former names"):
        Store(store.url)
    Store(store.url, schemas=(FORMER_SCHEMA,))


def test_a_row_under_another_key_fits_its_checksum() -> None:
    row = (bytes(16), 1, 1, 0, "engine", "", "{}", b"")
    moved = with_key((*row, checksum(row)), b"k" * 16)
    assert fits(moved)
    assert moved[1:-1] == row[1:]
