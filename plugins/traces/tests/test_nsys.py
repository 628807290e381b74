"""Profiles of Nsight Systems: exports of several versions and processes, damaged ones, and files that are none."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dse.errors import ConfigError
from dse_traces.profile.replay import replay
from dse_traces.readers.formats import read, read_ranks
from dse_traces.readers.nsys import read_nsys
from tests.support import damage, drawn

US = 1e-6
PROCESS = 41 << 24
COLUMNS = "start, end, deviceId, contextId, streamId, correlationId, globalPid, gridX, gridY, gridZ"
KERNEL, RUNTIME = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME"


def export(folder: Path, tables: Mapping[str, tuple[str, Sequence[Sequence[Any]]]], name: str = "run.sqlite") -> Path:
    """A database of tables: their columns, and rows."""
    with closing(sqlite3.connect(folder / name)) as connection:
        for table, (columns, rows) in tables.items():
            connection.execute(f"CREATE TABLE {table} ({columns})")
            marks = ", ".join("?" * len(columns.split(",")))
            connection.executemany(f"INSERT INTO {table} VALUES ({marks})", rows)
        connection.commit()
    return folder / name


def kernels(count: int, *, device: int = 0, process: int = PROCESS) -> list[tuple[Any, ...]]:
    """GEMMs and collectives in turns on two streams, 10 µs each, one every 20 µs."""
    return [
        (20_000 * n, 20_000 * n + 10_000, device, 1, 7 + 6 * (n % 2), n, process, 4, 2, 1, n % 2 + 1)
        for n in range(count)
    ]


def launches(count: int, process: int = PROCESS) -> list[tuple[Any, ...]]:
    return [(20_000 * n - 5000, 20_000 * n - 3000, process + 99, n, 3) for n in range(count)]


TEXTS = ("id INTEGER PRIMARY KEY, value TEXT", [(1, "sm90_gemm"), (2, "ncclDevKernel_AllReduce"), (3, "cudaLaunch")])


def usual(count: int = 10) -> dict[str, tuple[str, Sequence[Sequence[Any]]]]:
    """Tables as a recent version writes them."""
    return {
        "StringIds": TEXTS,
        KERNEL: (f"{COLUMNS}, demangledName", kernels(count)),
        "CUPTI_ACTIVITY_KIND_MEMCPY": (
            "start, end, deviceId, streamId, correlationId, globalPid, bytes, copyKind",
            [(500_000, 504_000, 0, 7, 900, PROCESS, 4096, 1)],
        ),
        "CUPTI_ACTIVITY_KIND_MEMSET": (
            "start, end, deviceId, streamId, correlationId, globalPid, value, bytes",
            [(510_000, 511_000, 0, 7, 901, PROCESS, 0, 64)],
        ),
        RUNTIME: ("start, end, globalTid, correlationId, nameId", launches(count)),
        "TARGET_INFO_GPU": ("id, name", [(0, "NVIDIA H100 80GB HBM3"), (1, "NVIDIA A100")]),
        "NVTX_EVENTS": (
            "start, end, eventType, text, textId, globalTid",
            [
                (0, 100_000, 59, "ProfilerStep#3", None, PROCESS + 1),
                (100_000, 150_000, 59, "step 4", None, PROCESS + 1),
                (5, 6, 59, "forward", None, PROCESS + 1),
                (7, None, 34, "step 4", None, PROCESS + 1),
            ],
        ),
    }


def test_kernels_copies_launches_iterations_and_the_gpu_are_read(tmp_path: Path) -> None:
    profile = read(export(tmp_path, usual()))
    assert (len(profile), profile.device) == (12, "NVIDIA H100 80GB HBM3")
    assert profile.kernels["kind"].value_counts().to_dict() == {"GEMM": 5, "collective": 5, "copy": 1, "fill": 1}
    assert profile.kernels["stream"].iloc[:2].tolist() == ["7", "13"]
    np.testing.assert_allclose(profile.seconds[:10], 10 * US)
    np.testing.assert_allclose(profile.start_s[:10] - profile.kernels["launch_s"][:10], 5 * US)
    assert set(profile.kernels["ctas"].dropna()) == {8}
    np.testing.assert_allclose(profile.iterations, [(0, 100 * US), (100 * US, 150 * US)])
    assert profile.kernels["name"].iloc[10:].tolist() == ["Memcpy HtoD", "Memset"]
    assert not profile.dropped
    assert np.isfinite(replay(profile).end_s).all()


def test_the_file_stays_as_it_was(tmp_path: Path) -> None:
    path = export(tmp_path, usual())
    path.chmod(0o400)
    before = path.read_bytes()
    read(path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["run.sqlite"]


def test_columns_and_tables_that_a_version_lacks_are_unknown(tmp_path: Path) -> None:
    rows = [(0, 10_000, 1), (20_000, 30_000, 2)]
    profile = read(export(tmp_path, {KERNEL: ("start, end, streamId", rows)}))
    assert len(profile) == 2
    assert profile.kernels[["launch_s", "ctas"]].isna().all(axis=None)
    assert profile.kernels["name"].tolist() == ["kernel without a name"] * 2
    older: dict[str, Any] = {"StringIds": TEXTS, KERNEL: ("start, end, streamId, shortName", [(0, 10_000, 1, 2)])}
    assert read(export(tmp_path, older, "old.sqlite")).kernels["kind"].tolist() == ["collective"]


def test_texts_of_marks_may_be_in_the_table_of_texts(tmp_path: Path) -> None:
    tables = usual() | {"NVTX_EVENTS": ("start, end, textId", [(0, 90_000, 4)])}
    tables["StringIds"] = (TEXTS[0], [*TEXTS[1], (4, "iteration 1")])
    assert len(read(export(tmp_path, tables)).iterations) == 1


def test_each_gpu_of_each_process_is_a_rank(tmp_path: Path) -> None:
    other = 42 << 24
    rows = [*kernels(10), *kernels(6, process=other), *kernels(4, device=1, process=other)]
    both = [*launches(10), *[(row[0] - 2000, *row[1:]) for row in launches(6, other)]]
    tables = usual() | {KERNEL: (f"{COLUMNS}, demangledName", rows)}
    tables[RUNTIME] = (tables[RUNTIME][0], both)
    path = export(tmp_path, tables)
    first, second, third = read_ranks(path)
    assert (len(first), len(second), len(third)) == (12, 6, 4)
    assert (second.device, third.device) == ("NVIDIA H100 80GB HBM3", "NVIDIA A100")
    np.testing.assert_allclose(second.start_s - second.kernels["launch_s"], 7 * US)  # by its own process
    assert (len(first.iterations), len(second.iterations)) == (2, 0)
    assert read(path).dropped == {"kernels of other GPUs": 10}


def test_rows_that_make_no_sense_are_dropped_and_counted(tmp_path: Path) -> None:
    odd: list[tuple[Any, ...]] = [
        ("x", 10, 0, 1, 7, 999, PROCESS, 1, 1, 1, 1),
        (10, b"\xff", 0, 1, 7, 999, PROCESS, 1, 1, 1, 1),
        (900, 100, 0, 1, 7, 999, PROCESS, 1, 1, 1, 1),
        (900, 1000, 0, 1, None, 999, PROCESS, 1, 1, 1, 1),
        (900, 1000, 0, 1, 7, 999, PROCESS, "a", 1, 1, 1),
    ]
    tables = usual() | {KERNEL: (f"{COLUMNS}, demangledName", [*kernels(10), *odd])}
    profile = read(export(tmp_path, tables))
    assert len(profile) == 12
    assert sum(profile.dropped.values()) == 5


def test_a_damaged_database_is_used_as_far_as_it_goes(tmp_path: Path) -> None:
    path = export(tmp_path, {"StringIds": TEXTS, KERNEL: (f"{COLUMNS}, demangledName", kernels(20_000))})
    data = bytearray(path.read_bytes())
    page = 4096 * (len(data) // 4096 * 2 // 3)
    data[page : page + 4096 * 20] = b"\xff" * 4096 * 20
    path.write_bytes(data)
    profile = read(path)
    assert 0 < len(profile) < 20_000
    assert any("damaged" in reason for reason in profile.dropped)


def no_database(folder: Path) -> Path:
    path = folder / "run.sqlite"
    path.write_bytes(b"no database at all " * 99)
    return path


def other_tables(folder: Path) -> Path:
    return export(folder, {"results": ("a, b", [(1, 2)])})


def no_kernels(folder: Path) -> Path:
    return export(folder, {KERNEL: (COLUMNS, [])})


def endless_view(folder: Path) -> Path:
    path = export(folder, {"StringIds": TEXTS})
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i AS start, i AS end FROM n"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"CREATE VIEW {KERNEL} AS {endless}")
        connection.commit()
    return path


def damaged_schema(folder: Path) -> Path:
    path = export(folder, usual())
    path.write_bytes(path.read_bytes().replace(b"CREATE TABLE StringIds", b"CREATE \xa5\xa5\xa5\xa5\xa5 StringIds"))
    return path


def a_folder(folder: Path) -> Path:
    (folder / "run.sqlite").mkdir()
    return folder / "run.sqlite"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (no_database, "no SQLite database"),
        (other_tables, "no export of nsys"),
        (endless_view, "no export of nsys"),
        (no_kernels, "no kernel of a GPU"),
        (damaged_schema, "no SQLite database"),
        (a_folder, "is no plain file"),
    ],
)
def test_what_is_no_export_is_refused(tmp_path: Path, make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_nsys(make(tmp_path))


def test_columns_that_compute_are_not_read(tmp_path: Path) -> None:
    """A computed column may be endless work; one by the name of a column that is read counts as absent."""
    path = tmp_path / "run.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"CREATE TABLE {KERNEL} (start, end, streamId, gridX AS (zeroblob(1000000000)))")
        connection.executemany(f"INSERT INTO {KERNEL} VALUES (?, ?, ?)", numbers(3))
        connection.commit()
    assert read(path).kernels["ctas"].isna().all()


def numbers(count: int) -> Iterable[tuple[int, int, int]]:
    return ((1000 * n, 1000 * n + 500, 7) for n in range(count))


@pytest.mark.slow
@drawn(120)
@given(data=st.data())
def test_any_damage_is_read_in_part_or_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    path = export(folder, usual(40))
    damage(path, data, most=99)
    try:
        assert np.isfinite(replay(read(path)).end_s).all()
    except ConfigError:
        return
