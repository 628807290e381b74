"""How a file is spoilt: cut, bits and values changed, bombs of nesting and length, something else in its place."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import yaml

VALUES: list[Any] = [
    *(
        None,
        True,
        0,
        -1,
        2**70,
        -(2**70),
        1e308,
        float("nan"),
        float("inf"),
        0.1,
        "",
        " ",
        "x" * 5000,
        "µ\u202e\U0001f600",
    ),
    *("4:1", "0x10", "010", "1_000", "on", "null", "12 GB/s", "-3 us", "${seed}", "${oc.env:HOME}", "${absent}", "???"),
    *(
        [],
        {},
        [[]],
        [1, "a", None],
        {"a": {"b": {"c": 1}}},
        {"_target_": "os.system"},
        "../../etc/passwd",
        "a\0b",
        "\ufeff",
    ),
]


_CELLS = (
    "-1",
    0,
    -(2**62),
    2**62,
    1e308,
    float("inf"),
    float("-inf"),
    "nan",
    "",
    "x" * 5000,
    "\x1b[31mred",
    "[/x]",
    "\u202e",
)


def spoil(draw: random.Random, path: Path) -> str:
    """Damage a file in one way; which."""
    ways: list[Callable[[random.Random, Path], object]] = [_cut, _flip, _flip, _swap, _replace, _garbage, _bomb]
    way = draw.choice([*ways, *[_edits(path)] * 8])
    return f"{way.__name__.removeprefix('_')} {way(draw, path) or ''}".strip()


def _edits(path: Path) -> Callable[[random.Random, Path], object]:
    """How values inside a file are changed, by its kind."""
    begin = path.read_bytes()[:16] if path.is_file() else b""
    if begin.startswith(b"SQLite format 3"):
        return _cells
    if begin.startswith(b"\x1f\x8b"):
        return _packed
    return _edit if path.suffix in (".yaml", ".json") else _words


def _cut(draw: random.Random, path: Path) -> None:
    path.write_bytes(path.read_bytes()[: draw.randint(0, path.stat().st_size)])


def _flip(draw: random.Random, path: Path) -> None:
    data = bytearray(path.read_bytes() or b"\0")
    for _ in range(draw.choice((1, 1, 3, 30))):
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def _swap(draw: random.Random, path: Path) -> str:
    """Another file of the folder in its place."""
    siblings = sorted(file for file in path.parent.iterdir() if file.is_file() and file != path)
    if siblings:
        shutil.copy(other := draw.choice(siblings), path)
        return other.name
    return ""


def _replace(draw: random.Random, path: Path) -> str:
    """Something in its place that is no plain file."""
    path.unlink()
    kind = draw.choice(("pipe", "folder", "/dev/zero", "/etc/hostname", "absent", "itself", "gone"))
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind != "gone":
        path.symlink_to(path.name if kind == "itself" else kind)
    return kind


def _garbage(draw: random.Random, path: Path) -> None:
    path.write_bytes(
        draw.choice((b"", b"\0" * 4096, draw.randbytes(4096), b"PAR1" + draw.randbytes(99) + b"PAR1", b"\xff\xfe"))
    )


def _bomb(draw: random.Random, path: Path) -> None:
    """A text that stands for far more than it is."""
    aliases = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n"
    aliases += "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10))
    texts = (aliases, "[" * 50_000, "a: " + "9" * 200_000, "a: 1" + ":59" * 200_000, '{"a":' * 30_000, "? [a]\n: b\n")
    path.write_text(draw.choice((*texts, "a: !!python/object/apply:os.getcwd []\n", "x: [" + "1," * 300_000 + "]\n")))


def _cells(draw: random.Random, path: Path) -> str:
    """Other values in a table of SQLite, or another kind of column."""
    try:
        with closing(sqlite3.connect(path)) as database, database:
            names = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            table = draw.choice(names)
            columns = [row[1] for row in database.execute(f'PRAGMA table_info("{table}")')]
            column, value = draw.choice(columns), draw.choice((*_CELLS, *_CELLS, None))
            condition = draw.choice(("", " WHERE rowid % 3 = 1", " WHERE rowid = 1"))
            database.execute(f'UPDATE OR IGNORE "{table}" SET "{column}" = ?{condition}', [value])
            if draw.random() < 0.2:
                database.execute(f'ALTER TABLE "{table}" DROP COLUMN "{draw.choice(columns)}"')
            return f"{table}.{column}"
    except (sqlite3.Error, IndexError):  # it was spoilt before, or holds nothing
        return "nothing"


def _packed(draw: random.Random, path: Path) -> str:
    """An edit of what gzip packs, or far more than it is."""
    if draw.random() < 0.2:
        path.write_bytes(gzip.compress(draw.choice((b"0", b"[", b" ", b'{"a":')) * (64 << 20), 1))
        return "bomb"
    inner = path.with_name("inner.json")
    try:
        inner.write_bytes(gzip.decompress(path.read_bytes()))
        what = _edit(draw, inner)
        path.write_bytes(gzip.compress(inner.read_bytes()))
    except (OSError, EOFError, ValueError):  # it was spoilt before
        return "nothing"
    finally:
        inner.unlink(missing_ok=True)
    return what


def _words(draw: random.Random, path: Path) -> str:
    """Other words, numbers and lines in a text."""
    text = path.read_bytes().decode("utf-8", "surrogateescape")
    spans = [match.span() for match in re.finditer(r"-?\d+(?:\.\d+)?|\w+|[^\w\s]", text)]
    for _ in range(draw.choice((1, 1, 3))):
        start, end = draw.choice(spans or [(0, 0)])
        new = draw.choice((*_CELLS, "", slip(draw, text[start:end]), text[start:end] * 1000, text[:start][-4000:] * 50))
        text = f"{text[:start]}{new}{text[end:]}"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    return text[start:end][:20]


def _edit(draw: random.Random, path: Path) -> str:
    """Other values or keys in a tree."""
    try:
        tree, dump = _tree_of(path.read_text("utf-8"))
    except (ValueError, yaml.YAMLError, RecursionError):  # it was spoilt before
        return "nothing"
    for _ in range(draw.choice((1, 1, 2))):
        owner, key = draw.choice(list(_places(tree)) or [({}, "")])
        what = draw.choice(("value", "value", "value", "key", "gone"))
        if what == "value":
            owner[key] = draw.choice(VALUES)
        elif isinstance(owner, dict):
            value = owner.pop(key, None)
            owner |= {slip(draw, str(key)): value} if what == "key" else {}
    path.write_text(str(dump(tree)), encoding="utf-8")
    return str(key)


def _tree_of(text: str) -> tuple[Any, Callable[[Any], Any]]:
    """The tree of a text, and how it is written: as JSON where it is JSON, else as YAML with its aliases."""
    try:
        return json.loads(text), json.dumps
    except ValueError:
        return yaml.safe_load(text), partial(yaml.safe_dump, sort_keys=False, allow_unicode=True)


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """(mapping or list, key) of every value of a tree; once for what aliases repeat, a bomb repeats it 9^10 times."""
    visited: set[int] = set()
    waiting = [tree]
    while waiting:
        owner = waiting.pop()
        if id(owner) in visited or not isinstance(owner, dict | list):
            continue
        visited.add(id(owner))
        for key, value in list(owner.items() if isinstance(owner, dict) else enumerate(owner)):
            yield owner, key
            waiting.append(value)


def slip(draw: random.Random, name: str) -> str:
    """A name with a slip in it."""
    place = draw.randrange(len(name) + 1)
    return draw.choice(
        (name[:place] + name[place + 1 :], name + "s", name.upper(), name[::-1], "_target_", "a.b", "µ", "0")
    )
