"""Checks of `dse doctor`: MLflow's database, and the port of its UI."""

from __future__ import annotations

import importlib.util
import re
import socket
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

from dse.errors.parsing import whole_number
from dse.plugins import DoctorCheck
from dse.tracking.database import resolve, sqlite_file


def check_database(options: Mapping[str, str]) -> Iterator[DoctorCheck]:
    """Look at MLflow's SQLite file: is it one, and of the version that is installed?"""
    file = sqlite_file(resolve(options["uri"]))
    if file is None or not file.exists():
        yield DoctorCheck("ok", "MLflow", f"no {file or options['uri']} to look at: the first study makes it")
        return
    repair = f"python -m dse store sync repair=true uri=sqlite:///{file}"
    try:
        # looking makes no file
        with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True, timeout=2)) as connection:
            (version,) = connection.execute("SELECT version_num FROM alembic_version").fetchone()
    except sqlite3.OperationalError as error:
        yield DoctorCheck("fail", "MLflow", f"{file} cannot be read: {error}", f"end what uses it, or {repair}")
    except (sqlite3.DatabaseError, TypeError) as error:  # no row: the table is empty
        yield DoctorCheck("fail", "MLflow", f"{file} is damaged: {error}", repair)
    else:
        yield from _compare(file, version)


def _compare(file: Path, version: str) -> Iterator[DoctorCheck]:
    known, newest = _revisions()
    if version == newest:
        yield DoctorCheck("ok", "MLflow", f"{file} is of the version that is installed")
    elif version in known:
        way = f"keep a copy, then mlflow db upgrade sqlite:///{file}"
        yield DoctorCheck("warn", "MLflow", f"{file} is of an older MLflow", way)
    else:
        way = "install that version again, or name another file: tracking.uri=sqlite:///<file>"
        yield DoctorCheck("fail", "MLflow", f"{file} is of a newer MLflow than is installed", way)


def _revisions() -> tuple[set[str], str]:
    """Versions of its database that the installed MLflow knows, and the newest; nothing of it is imported."""
    spec = importlib.util.find_spec("mlflow")  # importing MLflow takes seconds
    package = Path(spec.origin).parent if spec and spec.origin else Path()
    texts = [path.read_text("utf-8") for path in package.glob("store/db_migrations/versions/*.py")]
    names = {match[1] for text in texts if (match := re.search(r"^revision = ['\"](\w+)", text, re.MULTILINE))}
    # each names the one before it: the newest is named by none
    before = {match[1] for text in texts if (match := re.search(r"^down_revision = ['\"](\w+)", text, re.MULTILINE))}
    return names, next(iter(names - before), "")


_PORTS = 1 << 16


def check_port(options: Mapping[str, str]) -> Iterator[DoctorCheck]:
    """Look whether the port of the UI is free."""
    port = whole_number(options["port"])
    if port is None or port >= _PORTS:
        text = f"port {options['port'][:20]} is no number below {_PORTS}"
        yield DoctorCheck("warn", "ui", text, "python -m dse ui port=5000")
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that was just closed counts as free
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            # the next one, unless it would need rights
            way = f"python -m dse ui port={port + 1 if 1024 <= port < _PORTS - 1 else 5001}"
            yield DoctorCheck("warn", "ui", f"port {port} cannot be used: {error}", way)
        else:
            yield DoctorCheck("ok", "ui", f"port {port} is free")
