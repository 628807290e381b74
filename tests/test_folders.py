"""Files of an output folder may be damaged or somebody else's: every command ends in a sentence that names the file."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from folders import finished, odd_table

from dse import files
from dse.cli import main
from dse.outputs import Outputs
from dse.problems import ConfigError

FAST = ["study=ficco_sweep", "schedule=serial", "workload.only=[g1,g4]", "tracking=none", "fidelity=none"]
OTHER = "2026-01-01_00-00-00"
NAMED = "study=ficco_sweep"
COMMANDS = {
    "report": ["report", NAMED],
    "rules": ["rules", NAMED],
    "compare": ["compare", "ficco_sweep", f"ficco_sweep/{OTHER}"],
    "importance": ["importance", NAMED],
    "robustness": ["robustness", NAMED, "samples=2", "range=2", "vary=system.gpu.hbm_bytes_per_s=0.1"],
    "timeline": ["timeline", NAMED, "key=0"],
    "sync": ["sync", NAMED],
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which a study was run once."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(FAST) == 0
    study = folder / "outputs" / "ficco_sweep"
    shutil.copytree((study / "latest").resolve(), study / OTHER)
    return folder


@pytest.fixture
def run(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The newest run in a copy of that folder, which is the working folder."""
    shutil.copytree(made, tmp_path / "here", symlinks=True)
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


def bomb(path: Path) -> None:
    """Some kilobytes that stand for 12,000,000 rows of 40 columns."""
    held = pq.read_table(path).slice(0, 1)
    arrays = [pa.DictionaryArray.from_arrays(pa.repeat(0, 1 << 20).cast("int32"), one.combine_chunks()) for one in held]
    rows = pa.table(dict(zip(held.column_names, arrays, strict=True)))
    with pq.ParquetWriter(path, rows.schema, use_dictionary=True, store_schema=False) as writer:
        for _ in range(12):
            writer.write_table(rows)


def long_text(path: Path) -> None:
    """Three megabytes that stand for 150,000 texts of a megabyte each."""
    held = pq.read_table(path).slice(0, 1)
    place = held.column_names.index("reason")
    held = held.set_column(place, "reason", pa.array(["x" * (1 << 20)]))
    arrays = [pa.DictionaryArray.from_arrays(pa.repeat(0, 150_000).cast("int32"), one.combine_chunks()) for one in held]
    pq.write_table(pa.table(dict(zip(held.column_names, arrays, strict=True))), path, store_schema=False)


def compressed(path: Path) -> None:
    pq.write_table(pq.read_table(path), path, compression="zstd")


def lists(path: Path) -> None:
    held = pq.read_table(path)
    pq.write_table(held.append_column("more", pa.array([[1, 2]] * len(held))), path)


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
TREE = {**ANY, "a list": says("[1]"), "deep": says('{"a":' + "[" * 100_000), "long": says(b" " * (files.MOST_BYTES + 1))}
OF: dict[str, dict[str, Damage]] = {
    "summary.json": TREE
    | {
        "many values": says("[" + "1," * (files.MOST_VALUES + 1) + "1]"),
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
        told = capsys.readouterr().err
        assert code in codes, told
        assert "Traceback" not in told
        assert code == 0 or len(told.strip()) > 20
        return told

    return run


@pytest.mark.parametrize(("name", "kind", "command"), CASES, ids=lambda one: str(one).replace(" ", "-"))
def test_a_damaged_file_ends_every_command_in_a_sentence(
    name: str, kind: str, command: str, run: Path, ends: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the file, where the command cannot do without it; nothing is written outside, and nothing is run."""
    monkeypatch.setattr("dse.views.show", lambda *_: Counter())  # what is written of the other run takes long
    OF[name][kind](run / name)
    told = ends(*COMMANDS[command])
    if kind in ANY and kind != "gone" and name == "results.parquet":
        assert str(run / name) in told
    assert not Path("pwned").exists()
    assert {path.name for path in Path().iterdir()} == {"outputs"}
    assert "fault of dse" not in told
