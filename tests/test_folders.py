"""Files of an output folder may be damaged or somebody else's: every command ends in a sentence that names the file."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from benchmarks.fuzz import prepare
from benchmarks.readers import READERS
from dse import plugins
from dse.cli import main
from dse.errors import ConfigError
from dse.results import output_files
from tests.folders import finished, odd_table
from tests.support import REPOSITORY

FAST = ["study=ficco_sweep", "schedule=serial", "workload.only=[g1,g4]", "tracking=none", "fidelity=none"]
OTHER = "2026-01-01_00-00-00"
NAMED = "study=ficco_sweep"
COMMANDS = {
    "report": ["results", "report", NAMED],
    "rules": ["results", "rules", NAMED],
    "compare": ["results", "compare", "ficco_sweep", f"ficco_sweep/{OTHER}"],
    "importance": ["results", "importance", NAMED],
    "robustness": ["results", "robustness", NAMED, "samples=2", "range=2", "vary=system.gpu.hbm_bytes_per_s=0.1"],
    "timeline": ["results", "timeline", NAMED, "key=0"],
    "profile export": ["profile", "export", NAMED, "key=0"],
    "sync": ["store", "sync", NAMED],
}
COMMANDS = {name: words for name, words in COMMANDS.items() if plugins.target("command", " ".join(words[:2]))}


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which a study was run once."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(FAST) == 0
    study = folder / "outputs" / "ficco_sweep"
    shutil.copytree((study / "latest").resolve(), study / OTHER)
    return folder


@pytest.fixture
def run(finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The newest run in a copy of that folder, which is the working folder."""
    shutil.copytree(finished_run, tmp_path / "here", symlinks=True)
    monkeypatch.chdir(tmp_path / "here")
    return (tmp_path / "here" / "outputs" / "ficco_sweep" / "latest").resolve()


# Damage: what is done to a file of a run


Damage = Callable[[Path], object]


def says(text: str | bytes) -> Damage:
    return lambda path: path.write_bytes(text if isinstance(text, bytes) else text.encode())


def in_place_of(make: Callable[[Path], object]) -> Damage:
    def damage(path: Path) -> None:
        path.unlink()
        make(path)

    return damage


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flipped(share: float) -> Damage:
    def damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[int(share * len(data))] ^= 0x41
        path.write_bytes(data)

    return damage


def changed(**values: Any) -> Damage:
    """JSON or YAML with other values at its top."""

    def damage(path: Path) -> None:
        tree = {**yaml.safe_load(path.read_text("utf-8")), **values}
        path.write_text(json.dumps(tree) if path.suffix == ".json" else yaml.safe_dump(tree), "utf-8")

    return damage


def table(change: Callable[[pd.DataFrame], pd.DataFrame]) -> Damage:
    return lambda path: change(pd.read_parquet(path)).to_parquet(path, index=False)


def repeated(column: pa.ChunkedArray, count: int) -> pa.Array:
    """The first value of a column, as often as said, in a few bytes."""
    if not column[0].is_valid:
        return pa.nulls(count, column.type)
    return pa.DictionaryArray.from_arrays(pa.repeat(0, count).cast("int32"), column.slice(0, 1).combine_chunks())


def bomb(path: Path) -> None:
    """Some kilobytes that stand for a million rows of 40 columns."""
    head = pq.read_table(path).slice(0, 1)
    arrays = [repeated(column, 1 << 20) for column in head]
    rows = pa.table(dict(zip(head.column_names, arrays, strict=True)))
    pq.write_table(rows, path, use_dictionary=True, store_schema=False)


def long_text(path: Path) -> None:
    """Three megabytes that stand for 150,000 texts of a megabyte each."""
    head = pq.read_table(path).slice(0, 1)
    place = head.column_names.index("reason")
    head = head.set_column(place, "reason", pa.array(["x" * (1 << 20)]))
    arrays = [repeated(column, 150_000) for column in head]
    pq.write_table(pa.table(dict(zip(head.column_names, arrays, strict=True))), path, store_schema=False)


def compressed(path: Path) -> None:
    pq.write_table(pq.read_table(path), path, compression="zstd")


def lists(path: Path) -> None:
    rows = pq.read_table(path)
    pq.write_table(rows.append_column("more", pa.array([[1, 2]] * len(rows))), path)


ALIASES = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10)
)
ANY: dict[str, Damage] = {
    "empty": says(""),
    "cut": cut,
    "not text": says(b"\xff\xfe\0"),
    "a pipe": in_place_of(os.mkfifo),
    "a link": in_place_of(lambda path: path.symlink_to("/dev/zero")),
    "a folder": in_place_of(Path.mkdir),
    "gone": Path.unlink,
}
TREE = {**ANY, "a list": says("[1]"), "deep": says('{"a":' + "[" * 100_000)}
TREE |= {"long": says(b" " * (output_files.MOST_BYTES + 1))}
OF: dict[str, dict[str, Damage]] = {
    "summary.json": TREE
    | {
        "many values": says("[" + "1," * (output_files.MOST_VALUES + 1) + "1]"),
        "no number": changed(goals={"makespan_s": float("nan")}),
        "no goals": changed(goals={}),
        "a goal that is no column": changed(goals={"mkaespan_s": "minimize"}),
        "a goal that is text": changed(goals={"schedule.name": "minimize"}),
        "knobs of a kind": changed(knobs={"a": 1}),
        "a knob that is no column": changed(knobs=["absent"]),
        "units of a kind": changed(units=[1]),
        "limits of a kind": changed(limits={"g1": 3}),
        "a name that leads away": changed(study="../../evil"),
    },
    "config.yaml": TREE
    | {
        "a tag": says("study: !!python/object/apply:os.system ['touch pwned']\n"),
        "an alias bomb": says(ALIASES + "study: *a9\n"),
        "an endless number": says("study: " + "9" * 100_000 + "\n"),
        "an endless number in base 60": says("study: 1" + ":59" * 300_000 + "\n"),
        "a study of a kind": changed(study=3),
        "a module that is none": changed(study={"name": "x", "module": "os"}),
        "a baseline of a kind": changed(study={"name": "x", "module": "ficco", "baseline": [[1]]}),
        "a space of a kind": changed(space=[1]),
        "sections of a kind": changed(system=3, workload=[1], search=1, tracking=2),
    },
    "provenance.json": TREE
    | {
        "a command of a kind": changed(command=3, overrides=3),
        "git of a kind": changed(git=[1]),
        "versions of a kind": changed(versions=3),
        "a time that is none": changed(time="yesterday"),
        "a folder of a kind": changed(config_dir=[1]),
        "other words": changed(overrides=["study=absent", "x=y"]),
    },
    "results.parquet": ANY
    | {f"flipped at {share}": flipped(share) for share in (0.0, 0.01, 0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.97, 0.999)}
    | {
        "zstd": compressed,
        "a bomb": bomb,
        "long texts": long_text,
        "lists": lists,
        "no rows": table(lambda rows: rows.head(0)),
        "a column too few": table(lambda rows: rows.drop(columns="status")),
        "a status that is none": table(lambda rows: rows.assign(status="great")),
        "a result without a number": table(lambda rows: rows.assign(makespan_s=float("nan"))),
        "endless results": table(lambda rows: rows.assign(makespan_s=float("inf"))),
        "objectives of text": table(lambda rows: rows.assign(makespan_s="x")),
        "keys of numbers": table(lambda rows: rows.assign(key=1)),
        "no scenario": table(lambda rows: rows.assign(scenario=None)),
        "another scenario": table(lambda rows: rows.assign(scenario="../../evil")),
        "a front of numbers": table(lambda rows: rows.assign(on_front=1)),
        "times": table(lambda rows: rows.assign(key=pd.Timestamp("2026-01-01"))),
    },
    "timelines.parquet": ANY | {"other columns": says(b"PAR1")},
}
CASES = [
    (name, kind, command)
    for name, kinds in OF.items()
    for kind in kinds
    for command in (COMMANDS if name != "timelines.parquet" else ("report",))
]


@pytest.fixture
def ends(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command; what it says on its error stream, of which an exit code that is not 0 is told in sentences."""

    def run(*words: str, codes: tuple[int, ...] = (0, 2, 3, 4)) -> str:
        code = main(words)
        message = capsys.readouterr().err
        assert code in codes, message
        assert "Traceback" not in message
        assert code == 0 or len(message.strip()) > 20
        return message

    return run


@pytest.mark.more
@pytest.mark.one_in(37)
@pytest.mark.parametrize(("name", "kind", "command"), CASES, ids=lambda word: str(word).replace(" ", "-"))
def test_a_damaged_file_ends_every_command_in_a_sentence(
    name: str, kind: str, command: str, run: Path, ends: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the file, where the command cannot do without it; nothing is written outside, and nothing is run."""
    monkeypatch.setattr(
        "dse.tracking.views.show", lambda *_: Counter()
    )  # what is not damaged takes MLflow long to write
    if command == "sync":
        shutil.rmtree(run.parent / OTHER)
    OF[name][kind](run / name)
    message = ends(*COMMANDS[command])
    if kind in ANY and kind != "gone" and name == "results.parquet":
        assert str(run / name) in message
    assert not Path("pwned").exists()
    assert {path.name for path in Path().iterdir() if not path.name.startswith("mlflow.db")} == {"outputs"}


@pytest.mark.more
@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", ["a bomb", "long texts"])
def test_a_short_table_that_stands_for_a_long_one_takes_no_memory(kind: str, run: Path) -> None:
    OF["results.parquet"][kind](run / "results.parquet")
    assert (run / "results.parquet").stat().st_size < 5_000_000
    commands = [COMMANDS[name] for name in ("robustness", "compare", "report")]
    code = (
        "import re, dse.run_study, pandas; from dse.cli import main\n"
        "peak = lambda: int(re.search(r'VmHWM:\\s*(\\d+)', open('/proc/self/status').read())[1]) >> 10\n"
        f"codes = [main(words) for words in {commands}]\n"
        "print(*codes, peak(), peak() < 1200)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    *codes, _, bounded = done.stdout.splitlines()[-1].split()
    assert set(codes) <= {"0", "2"}, done.stderr  # 0: of a command that does not look at that column
    assert (codes[-1], bounded) == ("2", "True"), done.stdout


# What is written stays inside


@pytest.mark.slow
@pytest.mark.parametrize("command", ["report", "timeline"])
def test_nothing_is_written_through_a_link_of_a_folder(command: str, run: Path, ends: Callable[..., str]) -> None:
    outside = run.parents[3] / "outside"
    outside.mkdir()
    shutil.rmtree(run / "figures")
    (run / "figures").symlink_to(outside)
    key = pd.read_parquet(run / "results.parquet")["key"].iloc[0]
    message = ends(*COMMANDS[command][:3], *([f"key={key}"] if command == "timeline" else []), codes=(2,))
    assert str(run / "figures") in message
    assert list(outside.iterdir()) == []


@pytest.mark.more
def test_a_link_that_waits_for_what_is_written_is_not_followed(run: Path, ends: Callable[..., str]) -> None:
    outside = run.parents[3] / "outside.json"
    for name in ("robustness.json", f".robustness.json.{os.getpid()}", f".robustness.csv.{os.getpid()}"):
        (run / name).symlink_to(outside)
    ends(*COMMANDS["robustness"], codes=(0,))
    assert not outside.exists()
    assert (run / "robustness.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["latest", "compare"])
def test_a_link_that_leads_out_of_the_output_folder_is_refused(kind: str, run: Path, ends: Callable[..., str]) -> None:
    outside = run.parents[3] / "outside" / "run"
    shutil.copytree(run, outside)
    if kind == "latest":
        (run.parent / "latest").unlink()
        (run.parent / "latest").symlink_to(outside)
        assert "leads out" in ends(*COMMANDS["report"], codes=(2,))
    else:
        Path("outputs/compare").symlink_to(outside)
        assert "outputs/compare" in ends(*COMMANDS["compare"], codes=(2,))
    assert {path.name for path in outside.iterdir()} == {path.name for path in run.iterdir()}


# The store of results


def statement(text: str) -> Damage:
    def damage(path: Path) -> None:
        with closing(sqlite3.connect(path)) as database:
            database.executescript(text)

    return damage


DATABASE: dict[str, Damage] = {
    **ANY,
    "a view": statement("DROP TABLE leases; CREATE VIEW leases AS SELECT 1 AS name, 2 AS owner, 3 AS size"),
    "a trigger": statement("CREATE TRIGGER t AFTER INSERT ON about BEGIN DELETE FROM results; END"),
    "a text as its key": statement("INSERT INTO quarantine (key, held) VALUES ('x', 'y')"),
    "a lock that is a pipe": lambda path: in_place_of(os.mkfifo)(path.with_name("results.db.lock")),
    "a log that is a link": lambda path: path.with_name("results.db-wal").symlink_to("/dev/zero"),
}


@pytest.mark.slow
@pytest.mark.one_in(9)
@pytest.mark.parametrize("words", [["store", "check"], FAST], ids=["check", "study"])
@pytest.mark.parametrize("kind", DATABASE)
def test_a_damaged_store_ends_in_a_sentence(kind: str, words: list[str], run: Path, ends: Callable[..., str]) -> None:
    DATABASE[kind](Path("outputs/results.db"))
    message = ends(*words, *(["timeline=false"] if words == FAST else []))
    if kind in ("a pipe", "a link", "a folder", "a view", "a trigger", "a lock that is a pipe", "a log that is a link"):
        assert "results.db" in message


RECORDS = [
    (column, text)
    for text in ("{", "3", '["a", 3]', "[" * 100_000, '{"a": {"b": 1}}')
    for column in ("asked", "command", "provenance", "accepted")
]


@pytest.mark.more
@pytest.mark.one_in(27)
@pytest.mark.parametrize(("column", "text"), RECORDS, ids=lambda text: text[:9])
def test_a_study_whose_record_is_damaged_is_passed_over(
    column: str, text: str, run: Path, ends: Callable[..., str]
) -> None:
    """And told, where it is; its results are found all the same."""
    with closing(sqlite3.connect("outputs/results.db")) as database:
        database.execute(f"UPDATE studies SET {column} = ?", (text,))
        database.commit()
    message = ends(*FAST, "timeline=false", codes=(0,))
    assert "is passed over, as its record is damaged" in message or (column, text[:2]) in (
        ("provenance", '{"'),
        ("asked", '{"'),
    )


# What a folder names


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Where study runs were to be shown; nothing is."""
    places: list[Any] = []

    def show(study: Any, wanted: Any, news: Any) -> Counter[str]:
        places.append((wanted.uri, wanted.optuna))
        return Counter(written=1)

    monkeypatch.setattr("dse.tracking.views.show", show)
    monkeypatch.setattr("dse.tracking.views.open_store", places.append)
    monkeypatch.setattr("dse.tracking.views.reap", lambda store: 0)
    return places


FOREIGN = [
    {"uri": "http://127.0.0.1:9"},
    {"uri": "postgresql://me:***@host/db"},
    {"uri": "sqlite:////tmp/elsewhere.db"},
    {"uri": "sqlite:///../elsewhere.db"},
    {"uri": "sqlite:///linked/own.db"},
    {"uri": "sqlite:///file:/tmp/elsewhere.db?uri=true"},
    {"uri": "sqlite:///a%2f..%2f..%2felsewhere.db"},
    {"uri": "file:///tmp/elsewhere"},
    {"uri": 3},
    {"optuna": "/tmp/elsewhere.log"},
    {"optuna": "../elsewhere.log"},
    {"optuna": "postgresql+psycopg://host/db"},
]


@pytest.mark.slow
@pytest.mark.one_in(7)
@pytest.mark.parametrize("tracking", FOREIGN, ids=str)
def test_a_place_that_only_a_folder_names_is_not_written_to(
    tracking: Mapping[str, Any],
    tmp_path: Path,
    shown: list[Any],
    ends: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The way out is to type it."""
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "linked").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path / "here")
    folder = finished(Path("outputs"), odd_table(), tracking=tracking)
    message = ends("store", "sync", codes=(2,))
    ((name, place),) = tracking.items()
    assert str(folder / "config.yaml") in message
    assert f"tracking.{name}" in message
    assert f"{name}=" in message
    assert shown == []
    if isinstance(place, str) and "***" not in place:
        ends("store", "sync", f"{name}={place}", codes=(0,))
        assert place in shown[-1]


@pytest.mark.parametrize(
    "tracking", [{"uri": "sqlite:///own.db"}, {"uri": "sqlite:///deep/own.db"}, {"optuna": "t.log"}]
)
def test_a_file_below_the_working_folder_is_followed(
    tracking: Mapping[str, Any],
    tmp_path: Path,
    shown: list[Any],
    ends: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    finished(Path("outputs"), odd_table(), tracking=tracking)
    ends("store", "sync", codes=(0,))
    assert shown[-1] == (tracking.get("uri"), tracking.get("optuna"))


@pytest.mark.nightly
def test_a_server_that_the_present_configuration_names_too_is_followed(
    tmp_path: Path, shown: list[Any], ends: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf" / "tracking").mkdir(parents=True)
    tree = {"name": "ours", "uri": "http://me:secret@host:5000", "optuna": None, "points": "auto", "whole_up_to": 9}
    (tmp_path / "conf" / "tracking" / "ours.yaml").write_text(yaml.safe_dump(tree), "utf-8")
    recorded = {"name": "ours", "uri": "http://me:***@host:5000"}
    finished(Path("outputs"), odd_table(), tracking=recorded, study="ficco_sweep")
    assert "secret" not in ends("store", "sync", codes=(2,))
    ends("store", "sync", "config_dir=conf", codes=(0,))
    assert shown[-1] == (tree["uri"], None)


@pytest.mark.nightly
def test_a_slice_of_the_fuzzed_cases_ends_well(tmp_path: Path) -> None:
    """Command lines, configurations and output folders of one seed."""
    words = [
        sys.executable,
        "-m",
        "benchmarks.fuzz",
        "--json",
        "--cases",
        "10",
        "--seed",
        "0",
        "--keep",
        str(tmp_path / "kept"),
    ]
    done = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, timeout=600, check=False)
    report = json.loads(done.stdout)
    assert (report["cases"], report["tracebacks"], report["hangs"]) == (10, 0, 0), done.stderr
    assert report["max_memory_mb"] < 2000


@pytest.mark.nightly
@pytest.mark.slow
def test_files_that_fuzzing_spoils_are_read_while_they_are_whole(tmp_path: Path) -> None:
    """A file that is refused as it is would hide what a damaged one does."""
    folder = tmp_path / "whole"
    prepare(folder)
    shutil.move(folder / "outputs", folder / "readers" / "outputs")
    for name, reader in READERS.items():
        command = [sys.executable, "-m", "dse", *reader.command]
        done = subprocess.run(command, cwd=folder / "readers", capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == reader.code, (name, done.stderr)


@pytest.mark.slow
def test_no_bit_of_a_tables_metadata_ends_the_process(tmp_path: Path) -> None:
    """pyarrow ends the process for some of them where it is asked for a column's metadata before it was opened."""
    path = tmp_path / "table.parquet"
    pq.write_table(pa.table({"x": [1.0, None]}), path, store_schema=False)
    data = bytearray(path.read_bytes())
    footer = range(len(data) - 8 - int.from_bytes(data[-8:-4], "little"), len(data))
    if (child := os.fork()) == 0:
        for place, bit in itertools.product(footer, range(8)):
            data[place] ^= 1 << bit
            path.write_bytes(data)
            with suppress(ConfigError), output_files.table(path) as table:
                table.whole()
            data[place] ^= 1 << bit
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
