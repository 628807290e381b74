"""`dse doctor`: what it finds in sound and in broken surroundings, all of them real."""

from __future__ import annotations

import os
import shutil
import socket
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from dse.cli import main
from dse.evaluation import workers
from dse.tracking.doctor import check_database
from tests.support import CONF, REPOSITORY
from tests.toy import distribution

pytestmark = pytest.mark.usefixtures("elsewhere")


def told(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict[str, str]:
    """Run the command; subject -> its line, without the subject."""
    assert main(["doctor", *words]) == code
    lines = capsys.readouterr().out.splitlines()
    pairs = [line.partition(": ") for line in lines[:-1]]
    return {subject[5:]: f"{subject[:4].strip()} {text}" for subject, _, text in pairs}


def database(version: str, path: Path = Path("mlflow.db")) -> None:
    """A database of MLflow of a version."""
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE alembic_version (version_num TEXT)")
        connection.execute("INSERT INTO alembic_version VALUES (?)", (version,))


def test_a_sound_installation_has_no_failure_and_leaves_nothing_behind(capsys: pytest.CaptureFixture[str]) -> None:
    lines = told(capsys, "-v")
    assert {
        "Python",
        "packages",
        "numpy",
        "machine",
        "output_dir",
        "terminal",
        "numba",
        "results",
        "MLflow",
        "ui",
    } <= set(lines)
    assert not any(line.startswith("fail") for line in lines.values())
    assert list(Path().iterdir()) == []


def test_details_are_shown_on_demand(capsys: pytest.CaptureFixture[str]) -> None:
    assert "numpy" not in told(capsys)


@pytest.mark.parametrize("version", ["ok", "older", "newer"])
def test_a_database_of_another_mlflow_is_told(version: str, capsys: pytest.CaptureFixture[str]) -> None:
    from dse.tracking.doctor import _revisions

    revisions, newest = _revisions()
    assert newest in revisions
    database({"ok": newest, "older": min(revisions - {newest}), "newer": "f" * 12}[version])
    line = told(capsys, code=4 if version == "newer" else 0)["MLflow"]
    assert line.startswith({"ok": "ok", "older": "warn", "newer": "fail"}[version])
    assert version == "ok" or version in line


@pytest.mark.more
def test_a_database_that_mlflow_made_is_of_the_installed_version() -> None:
    from dse.tracking.database import open_store

    open_store("sqlite:///mlflow.db")
    assert [finding.level for finding in check_database({"uri": "sqlite:///mlflow.db"})] == ["ok"]


def test_damaged_databases_are_told_with_what_mends_them(capsys: pytest.CaptureFixture[str]) -> None:
    Path("outputs").mkdir()
    for name in ("mlflow.db", "outputs/results.db"):
        Path(name).write_bytes(b"no database" * 1000)
    lines = told(capsys, code=4)
    assert "sync repair=true" in lines["MLflow"]
    assert "python -m dse store check" in lines["results"]


def test_a_folder_that_cannot_be_written_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    Path("file").touch()
    assert told(capsys, "output_dir=file", code=4)["output_dir"].startswith("fail")


def test_a_port_that_is_taken_is_told_with_another(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert told(capsys, f"port={port}")["ui"].startswith(f"warn port {port} cannot be used")


def test_a_folder_of_ones_own_is_looked_at_file_by_file(capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in {"system/mine.yaml": "a: [1\n", "sytem/other.yaml": "a: 1\n", "node/good.yaml": "a: 1\n"}.items():
        Path("conf", name).parent.mkdir(parents=True, exist_ok=True)
        Path("conf", name).write_text(text)
    lines = told(capsys, "config_dir=conf", code=4)
    assert lines["conf/system/mine.yaml:1"].startswith("fail")
    assert lines["conf/sytem/other.yaml"].startswith("warn lies in no group's folder")
    assert "conf/node/good.yaml" not in lines


def test_an_option_that_it_does_not_know_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "prot=80"]) == 2
    assert "did you mean `port=80`?" in capsys.readouterr().err


def run(*words: str, path: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in a fresh interpreter, with a folder before all others on the path of modules."""
    command = [sys.executable, "-m", "dse", "doctor", *words]
    variables = {**os.environ, **environment, "PYTHONPATH": os.pathsep.join(filter(None, (path, str(REPOSITORY))))}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=variables)


@pytest.mark.more
def test_versions_plug_ins_and_terminals_that_do_not_fit_are_told(tmp_path: Path) -> None:
    """Metadata stand before those of the installed package, as after an installation that went wrong."""
    folder = tmp_path / "optuna-4.9.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: optuna\nVersion: 4.9\n")
    words = {"commands": "strange = absent_module:command", "simulators": "fine = fine_engine"}
    distribution(tmp_path, "stranger", **words, packages="broken = broken_package")
    (tmp_path / "fine_engine.py").write_text("ENGINE = 1\n")
    (tmp_path / "broken_package").mkdir()
    (tmp_path / "broken_package" / "__init__.py").write_text("1 / 0\n")
    done = run(path=str(tmp_path), PYTHONIOENCODING="ascii")
    assert done.returncode == 4, done.stdout + done.stderr
    assert "fail optuna: 4.9 is installed, <6,>=5 is needed (make setup)" in done.stdout
    assert "fail command strange: absent_module cannot be imported" in done.stdout
    assert "it is registered by stranger" in done.stdout
    assert "fail package broken_package: cannot be imported: ZeroDivisionError" in done.stdout
    assert "fail backend fine" not in done.stdout  # an engine is no backend, though both join by one group
    assert "warn terminal: writes ascii" in done.stdout


@pytest.mark.nightly
def test_a_copy_without_its_configuration_is_told(tmp_path: Path) -> None:
    for package in ("dse", "simulators", "search_spaces", "studies"):
        shutil.copytree(CONF.parent / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "dse", "doctor"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path)
    assert done.returncode == 4, done.stdout + done.stderr
    assert "config.yaml is missing" in done.stdout


@pytest.mark.parametrize(("quota", "cpus"), [("max 100000", 64), ("150000 100000", 2), ("50000 100000", 1), (None, 64)])
def test_cpus_are_those_that_affinity_and_control_group_allow(
    quota: str | None, cpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)))
    monkeypatch.setattr(workers, "_CONTROL_GROUP", tmp_path)
    if quota is not None:
        (tmp_path / "cpu.max").write_text(quota)
    (tmp_path / "memory.max").write_text(str(1 << 30))
    assert workers.num_cpus() == cpus
    (line,) = workers.check_machine({})
    assert str(line) == f"machine: {cpus} cores, 1.0 GiB of memory (set executor.jobs=1 and a smaller budget.trials)"
    assert line.level == "warn"
