"""Profiles of strangers: damage costs what is damaged, packers are told by first bytes, and nothing hurts."""

from __future__ import annotations

import bz2
import copy
import gzip
import json
import lzma
import sqlite3
import time
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dse.errors import ConfigError
from dse_chakra.files import ExecutionTrace, TraceNode, write_chakra
from dse_chakra.packed import open_packed
from dse_traces.commands import one_rank, several_ranks
from dse_traces.profile.kernels import MOST_GPUS, Profile, profile_of
from dse_traces.profile.replay import replay
from dse_traces.readers.beginnings import Beginning
from dse_traces.readers.chrome import read_chrome
from dse_traces.readers.databases import Database
from dse_traces.readers.formats import FORMATS, read, read_ranks
from dse_traces.readers.json_records import JsonRecords
from tests.support import drawn

GEMM, SUM = "sm90_gemm_bf16", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"
KEYS = {"traceEvents": ("ph", "ts"), "distributedInfo": ()}


def kernel(number: int, **args: Any) -> dict[str, Any]:
    """A kernel of 10 µs, one every 20 µs: GEMMs and collectives in turns."""
    stream = 7 + 13 * (number % 2)
    about = {"device": 0, "stream": stream, "correlation": number, "grid": [4, 2, 1], **args}
    return {
        **{"ph": "X", "cat": "kernel", "name": (GEMM, SUM)[number % 2], "pid": 0, "tid": stream},
        **{"ts": 20 * number, "dur": 10, "args": about},
    }


def chrome(count: int = 12) -> dict[str, Any]:
    launches = [
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 9, "tid": 1, "ts": 20 * n - 5, "dur": 2}
        | {"args": {"correlation": n}}
        for n in range(count)
    ]
    group = {"Collective name": "allreduce", "In msg nelems": 64, "dtype": "Float", "Group size": 2, "Seq": 3}
    mark = {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#1", "pid": 9, "tid": 1, "ts": 0, "dur": 90}
    operator = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 9, "tid": 1, "ts": 0, "dur": 1}
    shapes = {"External id": 1, "Input Dims": [[4, 4], [4, 4]], "Input type": ["float", "float"]}
    return {
        "deviceProperties": [{"id": 0, "name": "NVIDIA H100"}],
        "distributedInfo": {"backend": "nccl", "pg_config": [{"ranks": [0, 1]}], "rank": 1},
        "traceEvents": [*launches, *[kernel(n, **group) for n in range(count)], mark, operator | {"args": shapes}],
    }


def rocprof(count: int = 6) -> dict[str, Any]:
    def dispatch(n: int) -> dict[str, Any]:
        about = {"agent_id": {"handle": 7}, "queue_id": {"handle": n % 2}, "kernel_id": n % 2}
        sizes = {"grid_size": {"x": 64, "y": 1, "z": 1}, "workgroup_size": {"x": 64, "y": 1, "z": 1}}
        times = {"start_timestamp": 1000 * n, "end_timestamp": 1000 * n + 700}
        return times | {"correlation_id": {"internal": n}, "dispatch_info": about | sizes, "stream_id": {"handle": 0}}

    copied = {"start_timestamp": 1, "end_timestamp": 5, "operation": 2}
    ends = {"src_agent_id": {"handle": 1}, "dst_agent_id": {"handle": 7}}
    calls = [{"start_timestamp": 1, "end_timestamp": 2, "correlation_id": {"internal": 1}}]
    records = {"kernel_dispatch": [dispatch(n) for n in range(count)], "memory_copy": [copied | ends], "hip_api": calls}
    agents = [{"id": {"handle": 7}, "type": 2, "product_name": "AMD Instinct MI300X"}]
    symbols = [{"kernel_id": n, "formatted_kernel_name": name} for n, name in enumerate((GEMM, SUM))]
    process = {"metadata": {"pid": 1}, "agents": agents, "kernel_symbols": symbols, "buffer_records": records}
    return {"rocprofiler-sdk-tool": [process]}


Tables = dict[str, tuple[list[str], list[list[Any]]]]


def nsight(count: int = 8) -> Tables:
    process, fields = 41 << 24, ["start", "end", "deviceId", "streamId", "correlationId", "globalPid"]
    rows = [[1000 * n, 1000 * n + 700, 0, 7 + n % 2, n, process, 4, 2, 1, n % 2] for n in range(count)]
    return {
        "StringIds": (["id", "value"], [[0, GEMM], [1, SUM], [2, "step 1"]]),
        "CUPTI_ACTIVITY_KIND_KERNEL": ([*fields, "gridX", "gridY", "gridZ", "demangledName"], rows),
        "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": ([*fields, "graphId"], [[9000, 9900, 0, 7, 99, process, 4]]),
        "CUPTI_ACTIVITY_KIND_MEMCPY": ([*fields, "copyKind"], [[9900, 9950, 0, 7, 98, process, 1]]),
        "CUPTI_ACTIVITY_KIND_RUNTIME": (["start", "globalTid", "correlationId"], [[900, process + 1, 1]]),
        "TARGET_INFO_GPU": (["id", "name"], [[0, "NVIDIA H100"]]),
        "NVTX_EVENTS": (["start", "end", "text", "textId", "globalTid"], [[0, 900, None, 2, process]]),
    }


def rocpd(count: int = 8) -> Tables:
    sides = [f"{name}_{side}" for name in ("grid_size", "workgroup_size") for side in "xyz"]
    fields = ["start", "end", "pid", "agent_id", "kernel_id", "queue_id", "stream_id", "event_id", *sides]
    rows = [[1000 * n, 1000 * n + 700, 1, 2, n % 2, n % 2, 0, n, 64, 1, 1, 64, 1, 1] for n in range(count)]
    copies = ["start", "end", "pid", "name_id", "dst_agent_id", "src_agent_id", "stream_id"]
    return {
        "rocpd_string_u": (["id", "string"], [[1, "MEMORY_COPY_DEVICE_TO_HOST"], [2, "step 1"]]),
        "rocpd_info_agent_u": (["id", "product_name"], [[2, "MI300X"]]),
        "rocpd_info_kernel_symbol_u": (["id", "display_name"], [[0, GEMM], [1, SUM]]),
        "rocpd_kernel_dispatch_u": (fields, rows),
        "rocpd_memory_copy_u": (copies, [[1, 5, 1, 1, 0, 2, 0]]),
        "rocpd_event_u": (["id", "stack_id", "correlation_id"], [[1, 5, 5]]),
        "rocpd_region_u": (["start", "end", "name_id", "event_id"], [[0, 9, 2, 1]]),
    }


def write_json(path: Path, tree: Any) -> Path:
    path.write_text(json.dumps(tree))
    return path


def write_tables(path: Path, tables: Tables) -> Path:
    path.unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as connection:
        for name, (columns, rows) in tables.items():
            connection.execute(f'CREATE TABLE "{name}" ({", ".join(map(json.dumps, columns))})')
            connection.executemany(f'INSERT INTO "{name}" VALUES ({", ".join("?" * len(columns))})', rows)
        connection.commit()
    return path


STATS = "Start (ns),Duration (ns),CorrId,GrdX,GrdY,GrdZ,Device,Strm,Name"
JSONS: dict[str, Callable[[], Any]] = {"chrome.json": chrome, "rocprof.json": rocprof}
DATABASES: dict[str, Callable[[], Tables]] = {"nsight.sqlite": nsight, "rocpd.db": rocpd}
NASTY_IN_JSON: list[Any] = [
    *("", "x", "9" * 30, "\ud800", "\x1b[31m\x07", "nan", [], {}, [[]], None, True, -1, 0, 1 << 62, 10**400, -(10**30)),
    *(float("nan"), float("inf"), -float("inf"), 1e308, -1e308, 5e-324, 1e18, {"handle": "x"}, [1, 2, "x"]),
]
NASTY_IN_CELLS: list[Any] = [
    *(None, "", "x", "\x1b[31m", "9" * 30, b"\xff\xfe", -1, 0, (1 << 63) - 1, -(1 << 63), 1 << 62),
    *(float("inf"), -float("inf"), 1e308, 5e-324, 0.5),
]


def places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value of a tree."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from places(value, (*path, key))


def replaced(tree: Any, path: tuple[Any, ...], value: Any) -> None:
    """Put a value in place of another one, if that is still there."""
    for key in path[:-1]:
        try:
            tree = tree[key]
        except (KeyError, IndexError, TypeError):
            return
    if isinstance(tree, (dict, list)):
        try:
            tree[path[-1]] = value
        except (KeyError, IndexError, TypeError):
            return


def use(path: Path, folder: Path) -> None:
    """Read a file as profile import does, and print and write what it says; it may be refused."""
    try:
        profiles = read_ranks(path)
    except ConfigError as error:
        assert str(error).isprintable() or "\n" in str(error)
        return
    if len(profiles) == 1:
        done = replay(profiles[0])
        lines = list(one_rank.answer(done))
        one_rank.kernels(done).to_parquet(folder / "kernels.parquet")
        assert np.isfinite(done.end_s).all()
    else:
        ranks, replays = several_ranks.import_ranks(profiles)
        lines = list(several_ranks.answer(ranks, replays))
        ranks.shared.to_parquet(folder / "shared.parquet")
    for line in lines:
        assert not isinstance(line, str) or line.isprintable()
    for profile in profiles:
        assert all(text.isprintable() for text in profile.kernels["name"])
        assert profile.device.isprintable()


@pytest.mark.more
@pytest.mark.one_in(2, 1)
@pytest.mark.slow
@pytest.mark.parametrize("name", JSONS)
@drawn(120)
@given(data=st.data())
def test_any_value_of_a_json_is_read_dropped_or_refused(
    name: str, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder, tree = tmp_path_factory.mktemp("swapped"), JSONS[name]()
    paths = list(places(tree))
    for path in data.draw(st.lists(st.sampled_from(paths), min_size=1, max_size=4)):
        replaced(tree, path, copy.deepcopy(data.draw(st.sampled_from(NASTY_IN_JSON))))
    use(write_json(folder / name, tree), folder)


@pytest.mark.more
@pytest.mark.parametrize("name", DATABASES)
@drawn(120)
@given(data=st.data())
def test_any_cell_of_a_database_is_read_dropped_or_refused(
    name: str, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder, tables = tmp_path_factory.mktemp("swapped"), DATABASES[name]()
    for table in data.draw(st.lists(st.sampled_from(sorted(tables)), min_size=1, max_size=4)):
        row = data.draw(st.sampled_from(tables[table][1]))
        row[data.draw(st.integers(0, len(row) - 1))] = data.draw(st.sampled_from(NASTY_IN_CELLS))
    use(write_tables(folder / name, tables), folder)


@pytest.mark.more
@drawn(80)
@given(data=st.data())
def test_any_cell_of_a_table_is_read_dropped_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("swapped")
    rows = [
        [str(1000 * n), "700", str(n), "4", "2", "1", "H100 (0)", str(7 + n % 2), (GEMM, SUM)[n % 2]] for n in range(6)
    ]
    for row in data.draw(st.lists(st.sampled_from(rows), min_size=1, max_size=4)):
        cell = data.draw(st.sampled_from([str(value) for value in NASTY_IN_JSON if value != "\ud800"] + ['"', "\x00"]))
        row[data.draw(st.integers(0, len(row) - 1))] = cell
    path = folder / "stats.csv"
    path.write_text("\n".join([STATS, *(",".join(row) for row in rows)]))
    use(path, folder)


BAD = [
    r'{"ph":"X","cat":"python_function","name":"C:\Users\me","ts":1,"dur":1}',
    '{"ph":"X","cat":"python_function","name":"f("a")","ts":1,"dur":1,"args":{"b":{}}}',
    '{"ph":"X","cat":"cpu_op","name":"x","ts":1,"args":{"warps per SM": -nan}}',
    '{"ph":"X","cat":"cpu_op","name":"unclosed,"ts":1}',
    '{"ph":"X","cat":"cpu_op","args":{"a":1}',
    '{"ph":"X","n":' + "1" * 5000 + "}",
    '{"ph":"X","n":' + "[" * 100_000 + "]" * 100_000 + "}",
    "]",
    "}",
]


@drawn(80)
@given(bad=st.sampled_from(BAD), at=st.integers(0, 40), chunk=st.sampled_from([101, 4096, 1 << 18]))
def test_one_bad_event_costs_itself(bad: str, at: int, chunk: int) -> None:
    events = [json.dumps(kernel(number)) for number in range(40)]
    text = (
        '{"distributedInfo": {"a": [1], "rank": 3}, "traceEvents": ['
        + ",\n".join([*events[:at], bad, *events[at:]])
        + "]}"
    )
    records = JsonRecords((text[place : place + chunk] for place in range(0, len(text), chunk)), KEYS)
    values = [value for key, value in records if key == "traceEvents"]
    assert [value["ts"] for value in values] == [20 * number for number in range(40)]
    assert records.damaged <= 1
    assert 0 <= records.lost <= len(bad) + 2


@given(data=st.data())
@drawn(80)
def test_of_any_damage_at_most_the_events_that_it_hits_are_lost(data: st.DataObject) -> None:
    events = [json.dumps(kernel(number)) for number in range(30)]
    text = '{"traceEvents": [' + ",".join(events) + "]}"
    begin = data.draw(st.integers(len(text) // 4, len(text) // 2))
    noise = data.draw(st.text(alphabet='{}[]",:\\ 1x\x00', min_size=1, max_size=80))
    records = JsonRecords(iter([text[:begin] + noise + text[begin + len(noise) :]]), KEYS)
    read_back = sum(isinstance(value, dict) and value.get("name") in (GEMM, SUM) for _, value in records)
    hit = 2 + len(noise) // min(map(len, events))
    assert read_back >= len(events) - hit


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        '{"traceEvents": [' + '{"ph":"' * 300_000,
        '{"traceEvents": [' + '{"ph":[' * 300_000,
        '{"traceEvents": [' + ('{"ph":[' + "1," * 300) * 4_000,
        '{"deviceProperties":[' + '"name":"' * 200_000 + '], "traceEvents": []}',
        '{"deviceProperties":[' + '"deviceProperties":[' * 60_000,
        "[" * 2_000_000,
        '{"traceEvents": [{"ph": "X", "n": "' + "x" * 60_000_000 + '"}]}',
    ],
    ids=["texts", "lists", "nested", "devices", "keys", "brackets", "long"],
)
def test_work_and_memory_for_a_hostile_json_are_bounded(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(text)
    begin = time.process_time()
    with pytest.raises(ConfigError):
        read_chrome(path)
    assert time.process_time() - begin < 30


def test_memory_for_a_long_event_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    with path.open("w") as file:
        file.write('{"traceEvents": [{"ph": "X", "n": "')
        for _ in range(150):
            file.write("x" * (1 << 20))
        file.write('"}, ' + ",".join(json.dumps(kernel(number)) for number in range(4)) + "]}")
    tracemalloc.start()
    try:
        profile = read(path)
        assert tracemalloc.get_traced_memory()[1] < 140e6
    finally:
        tracemalloc.stop()
    assert len(profile) == 4
    assert profile.lost.startswith("100.0 % of the file, 1 damaged event")


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "bzip2": lambda data: bz2.compress(data[:99]) + bz2.compress(data[99:]),
    "xz": lambda data: lzma.compress(data[:99]) + lzma.compress(data[99:]),
    "zstd": lambda data: pa.compress(data, codec="zstd", asbytes=True),
}


@pytest.mark.parametrize("packer", [*PACKERS, "zip", "gzip in zip"])
def test_a_packer_is_told_by_first_bytes(tmp_path: Path, packer: str) -> None:
    data, path = json.dumps(chrome()).encode(), tmp_path / "run.trace"
    if "zip" in packer.split():
        inner = gzip.compress(data) if " in " in packer else data
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("a/run.json", inner)
            archive.writestr("__MACOSX/a/._run.json", b"x")
    else:
        path.write_bytes(PACKERS[packer](data))
    assert len(read(path)) == 12
    path.write_bytes(path.read_bytes()[:-30])  # and a damaged one is read in part, or refused
    use(path, tmp_path)


@pytest.mark.one_in(4, 1)
@pytest.mark.slow
@pytest.mark.parametrize("packer", PACKERS)
def test_what_unpacks_to_too_much_is_read_up_to_there(tmp_path: Path, packer: str) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(PACKERS[packer](b" " * 90_000_000))
    begin = time.process_time()
    with open_packed(path) as (file, _), pytest.raises(EOFError, match=packer):
        while file.read1(1 << 20):
            pass
    assert time.process_time() - begin < 20


def packed_database(folder: Path) -> Path:
    path = write_tables(folder / "run.sqlite", nsight())
    path.write_bytes(gzip.compress(path.read_bytes()))
    return path


def two_in_a_zip(folder: Path) -> Path:
    with zipfile.ZipFile(folder / "run.zip", "w") as archive:
        archive.writestr("rank0.json", "{}")
        archive.writestr("rank1.json", "{}")
    return folder / "run.zip"


def file_of(name: str, data: bytes) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (folder / name).write_bytes(data)
        return folder / name

    return make


def without_times(folder: Path) -> Path:
    """What ASTRA-sim takes: a collective of some bytes, and no duration."""
    node = TraceNode(0, "ALL_REDUCE", "COMM_COLL_NODE", 0.0, collective="ALL_REDUCE", payload_bytes=1 << 20)
    write_chakra(folder / "all_reduce.et", ExecutionTrace((node,)))
    return folder / "all_reduce.et"


@pytest.mark.parametrize(
    ("name", "text", "format_name"),
    [
        ("a.db", "SQLite format 3\0", "Nsight Systems"),
        ("a.rpd", "damaged", "Nsight Systems"),
        ("a.txt", '{"rocprofiler-sdk-tool": []}', "JSON of rocprofv3"),
        ("a.csv", "Kernel_Name,Start_Timestamp,End_Timestamp", "table of rocprof"),
        ("a.txt", "Start (ns),Duration (ns),Name", "table of nsys stats"),
        ("a.CSV", "what,ever", "table of kernels"),
        ("a.et", "{}", "Chakra"),
        ("a", "[1, 2]", "Chrome trace"),
        ("a", "hello, world", "Chrome trace"),
    ],
)
def test_a_file_is_read_by_the_first_format_that_fits(name: str, text: str, format_name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    begin = Beginning(tmp_path / name)
    assert next(candidate.name for candidate in FORMATS if candidate.fits(begin)) == format_name


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (packed_database, "packed by gzip.*gunzip -k"),
        (two_in_a_zip, "zip of 2 files: 'rank0.json', 'rank1.json'"),
        (file_of("a.7z", b"7z\xbc\xaf\x27\x1c" + b"\0" * 40), "7-Zip"),
        (file_of("a.tar", b"\0" * 257 + b"ustar" + b"\0" * 300), "is a tar"),
        (file_of("run.nsys-rep", b"\1\2"), "nsys export --type sqlite"),
        (file_of("run.pftrace", b"\1\2"), "rocprofv3 --output-format json"),
        (file_of("sum.csv", b"Time (%),Total Time (ns),Instances,Name\n1,2,3,x\n"), "cuda_gpu_trace"),
        (file_of("stats.csv", b"Name,Calls,TotalDurationNs,AverageNs,Percentage\nx,1,2,3,4\n"), "is a summary"),
        (without_times, "takes any time"),
    ],
)
def test_what_cannot_be_read_is_refused_with_a_way_out(tmp_path: Path, make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(make(tmp_path))


def test_a_damaged_page_of_a_database_costs_its_rows(tmp_path: Path) -> None:
    path = write_tables(tmp_path / "run.sqlite", nsight(20_000))
    data = bytearray(path.read_bytes())
    for page in (0.3, 0.6):
        begin = 4096 * int(len(data) / 4096 * page)
        data[begin : begin + 4096] = b"\xff" * 4096
    path.write_bytes(data)
    profile = read(path)
    assert 19_000 < len(profile) < 20_002
    assert "rows in damaged parts" in profile.lost
    lost = sum(count for reason, count in profile.dropped.items() if "damaged" in reason)
    assert len(profile) + lost == pytest.approx(20_002, abs=300)


@pytest.mark.slow
def test_computed_columns_of_no_table_are_read(tmp_path: Path) -> None:
    path = write_tables(tmp_path / "run.sqlite", {name: rows for name, rows in nsight().items() if name != "StringIds"})
    with closing(sqlite3.connect(path)) as connection:
        computed = "value TEXT GENERATED ALWAYS AS (hex(zeroblob(490000))) VIRTUAL"
        connection.execute(f"CREATE TABLE StringIds (id INTEGER PRIMARY KEY, k, {computed})")
        connection.executemany("INSERT INTO StringIds (id, k) VALUES (?, 0)", [(n,) for n in range(1000)])
        connection.commit()
        database = Database(connection, path)
        assert database.columns("StringIds") == {"id", "k"}
        assert next(iter(database.select("StringIds", ["id", "value"]))) == {"id": 0, "value": None}
    assert len(read(path)) == 10


@pytest.mark.more
def test_gpus_of_a_file_past_the_most_are_counted(tmp_path: Path) -> None:
    tables = nsight(3000)
    for number, row in enumerate(tables["CUPTI_ACTIVITY_KIND_KERNEL"][1]):
        row[5] = number << 24
    begin = time.process_time()
    profiles = read_ranks(write_tables(tmp_path / "run.sqlite", tables))
    assert time.process_time() - begin < 20
    assert len(profiles) == MOST_GPUS
    assert any("GPUs past the first" in reason for reason in profiles[0].dropped)


@given(
    starts=st.lists(st.floats(0, 3000), min_size=2, max_size=20),
    epoch=st.sampled_from([0.0, 1.7e9]),
    away=st.sampled_from([-1.6e9, 2e9, 9e12]),
)
def test_kernels_hours_away_from_most_are_dropped_and_counted(starts: list[float], epoch: float, away: float) -> None:
    def row(start: float) -> dict[str, Any]:
        return {"name": GEMM, "stream": "7", "start_s": start, "seconds": 0.5}

    profile: Profile = profile_of([*(row(epoch + start) for start in starts), row(epoch + away)], "x")
    assert len(profile) == len(starts)
    assert sum(profile.dropped.values()) == 1
    assert profile.span_s == pytest.approx(max(starts) - min(starts) + 0.5, abs=1e-5)


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        ("a.json", '[{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "Ascend Hardware"}}]', "Ascend"),
        ("a.csv", "Op Name,OP Type,Task Type,Task Duration(us)\nMatMul,MatMul,AI_CORE,10\n", "Ascend"),
        ("a.json", '[{"name": "Send", "cat": "P2P_API", "ph": "b", "ts": 1.0}]', "NCCL's profiler plug-in"),
        ("a.json", '{"name": "x", "gpus": [{"id": 0, "threadblocks": []}]}', "MSCCL"),
        ("a.json", '{"traceEvents": [{"ph": "M", "name": "process_name", "args": {"name": "/device:TPU:0"}}]}', "TPU"),
        (
            "a.json",
            '{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": 2}]}',
            "no kernel",
        ),
    ],
)
def test_a_record_of_another_machine_is_named_with_advice_of_its_own(
    tmp_path: Path, name: str, text: str, kind: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=kind) as refused:
        read(tmp_path / name)
    assert ("ProfilerActivity" in str(refused.value)) == (kind == "no kernel")
