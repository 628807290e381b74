"""Workers that help with a study of a shared store, and a study whose disk is full."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

import pytest

from dse.cli import main
from dse.results.provenance import code_version, differences
from tests.support import REPOSITORY
from tests.test_faults import fill

QUIET = ["tracking=none", "figures=none", "fidelity=none"]
SMALL = ["study=ficco_sweep", "workload.only=[g4]", "schedule=chunked", *QUIET]


def count(database: Path, of: str = "results") -> int:
    """Rows of a table; 0 where there is none yet."""
    try:
        with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
            return int(connection.execute(f"SELECT count(*) FROM {of}").fetchone()[0])
    except sqlite3.OperationalError:
        return 0


@pytest.fixture
def allreduce(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Words of a study of a program in the current folder, which is new."""
    shutil.copytree(REPOSITORY / "docs" / "examples" / "allreduce", tmp_path / "mine")
    monkeypatch.chdir(tmp_path / "mine")
    return ["study=allreduce", "--config-dir=conf", *QUIET]


def test_versions_of_code_differ_by_what_is_named() -> None:
    here = code_version()
    assert differences(here, here) == ""
    assert differences({**here, "numpy": "1.0"}, here) == f"numpy is 1.0, not {here['numpy']}"
    assert {"Python", "dse", "numba", "the code of simulators"} <= set(here)


@pytest.mark.slow
def test_a_worker_does_what_is_left_of_a_study_but_of_other_code_and_its_status_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(SMALL) == 0
    database = tmp_path / "outputs" / "results.db"
    all_of_it = count(database)
    with sqlite3.connect(database) as connection:
        connection.execute("DELETE FROM results WHERE key > x'60'")
        connection.execute("UPDATE studies SET state = 'running'")
    assert count(database) < all_of_it
    assert main(["store", "status"]) == 0
    output = capsys.readouterr().out
    assert "1 ficco_sweep" in output
    assert "interrupted" in output
    assert "no process is at work" in output
    words = ["store", "worker", f"store=sqlite:///{database}", "wait=1 ms"]
    assert main([*words, "study=t3"]) == 0
    assert count(database) < all_of_it
    assert main(words) == 0
    assert count(database) == all_of_it
    before = capsys.readouterr()
    assert "passed by" not in before.err
    assert main(SMALL) == 0
    assert "0 left" in capsys.readouterr().err
    with sqlite3.connect(database) as connection:  # begun by other code
        connection.execute("""UPDATE studies SET state = 'running',
            provenance = replace(provenance, '"numba": "', '"numba": "0.')""")
    assert main(words) == 0
    assert "study 1 (ficco_sweep) is passed by: here numba is" in capsys.readouterr().err


def test_a_worker_makes_no_database_of_a_wrong_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "worker", f"store=sqlite:///{tmp_path / 'wrong.db'}", "wait=0.1 s"]) == 2
    assert "is a file that is not there (start the study first" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["store", "worker"], "store: is missing"),
        (["store", "worker", "store=here"], "must be auto, null, sqlite:///<file>"),
        (["store", "worker", "store=sqlite:///a.db", "jobs=0"], "must be at least 1"),
        (["store", "status", "every=now"], "every_s"),
        (["store", "status"], "holds no results.db"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_command_is_refused(
    words: list[str], part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert part in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.slow
def test_a_local_study_whose_disk_is_full_ends_with_the_way_out_and_goes_on_after_it(
    small: Path, allreduce: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*allreduce, "output_dir=calm"]) == 0
    monkeypatch.setattr("tempfile.tempdir", str(small))
    ballast = fill(small, spare=30_000)
    assert main([*allreduce, "output_dir=here"]) == 4
    message = capsys.readouterr().err
    assert f"'{small}'; make room there, or set TMPDIR" in message
    ballast.unlink()
    assert main([*allreduce, "output_dir=here"]) == 0
    first, other = (next(Path(name).glob("*/2*/results.parquet")) for name in ("calm", "here"))
    assert first.read_bytes() == other.read_bytes()
