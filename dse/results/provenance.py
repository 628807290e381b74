"""Provenance of a result: command, code, versions, machine; and the fingerprint of a backend.

What is named a secret is not written down. A fingerprint is what the results of a backend rest on besides its name,
version and parameters: a hash of syntax trees and of data files. Comments, docstrings and layout are no part of a
syntax tree, so that an edit of them keeps every stored result.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import os
import platform
import re
import shlex
import sqlite3
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any

from dse import plugins
from dse.config.options import conf_dirs
from dse.errors import ConfigError, redact
from dse.errors.parsing import parse_json
from dse.files import atomic_replacement
from dse.plugins import PACKAGES, distributions, places, roots

_LIBRARIES = (
    "hydra-core",
    "joblib",
    "matplotlib",
    "mlflow",
    "moocore",
    "numba",
    "numpy",
    "optuna",
    "pandas",
    "psycopg",
    "pyarrow",
    "pydantic",
    "pyyaml",
    "rich",
    "scikit-learn",
    "scipy",
    "seaborn",
    "simpy",
    "sqlalchemy",
    "threadpoolctl",
)
_MACHINE = Path("/proc/cpuinfo")
_JUDGES = ("dse.backend",)
"""Modules of the framework that decide which results are valid; the others move values, and those are in the keys."""
_DATA_SUFFIXES = (".csv", ".gz", ".json", ".parquet", ".yaml")
_LOADERS = ("available", "load", "names", "target")  # functions of `dse.plugins`
_LAYOUT = "1"  # of the remembered summaries
_MOST_REMEMBERED = 10_000  # summaries; some 300 B each
_UNSEEN = ("ctx", "kind", "type_comment")  # fields of syntax trees that say nothing new, or differ by Python's version


def record(overrides: Sequence[str], folder: Path | None, *, backend: str, seed: int) -> dict[str, Any]:
    """Provenance of one study run, ready for JSON. folder: of the user's own configuration."""
    flags = [] if folder is None else [f"--config-dir={folder}"]
    typed = [str(redact(text)) for text in overrides]  # commands may hold passwords
    return {
        "command": ["python", "-m", "dse", *flags, *typed],
        "overrides": typed,
        "config_dir": None if folder is None else str(folder),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "backend": backend,
        "seed": seed,
        "git": _git(Path(__file__).resolve().parents[2]),
        "versions": versions(),
        "code": code_hashes(),
        "python": platform.python_version(),
        "machine": _machine(),
        "executable": Path(sys.executable).name,
    }


@functools.cache
def code_hashes() -> Mapping[str, str]:
    """Package -> hash of its Python files; equal where the same code runs, wherever it lies."""
    return {package: _hash(package) for package in roots()}


def _hash(package: str) -> str:
    total = hashlib.sha256()
    for folder in places(package)[:1]:
        for path in sorted(folder.rglob("*.py")):
            total.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes() + b"\0")
    return total.hexdigest()[:12]


def code_version(record: Mapping[str, Any] | None = None) -> Mapping[str, str]:
    """Versions of all that makes results: Python, libraries, and each package of ours.

    record: of a run; None: of this process.
    """
    if record is None:
        record = {"python": platform.python_version(), "versions": versions(), "code": code_hashes()}
    packages = {f"the code of {name}": text for name, text in record.get("code", {}).items()}
    return {"Python": str(record.get("python", "")), **record.get("versions", {}), **packages}


def differences(here: Mapping[str, str], there: Mapping[str, str]) -> str:
    """Differences between two versions of the code, in words; empty if there are none."""
    names = [name for name in dict.fromkeys([*here, *there]) if here.get(name) != there.get(name)]
    return ", ".join(f"{name} is {here.get(name, 'absent')}, not {there.get(name, 'absent')}" for name in names)


def describe(record: Mapping[str, Any]) -> str:
    """One line for a person: the code, and what differs in the runs whose results were taken."""
    git, machine = record["git"], record["machine"]
    code = f"git {_commit(git)}" if git["commit"] else f"commit unknown ({git['reason']})"
    where = f"Python {record['python']} on {machine.get('cpu') or machine.get('system')}"
    other_runs = [f"of {run['time']}: {', '.join(run['changed'])}" for run in record.get("mixed", [])]
    return f"made with {code}, {where}" + (f"; some results are {'; '.join(other_runs)}" if other_runs else "")


def command_line(record: Mapping[str, Any]) -> str:
    """The command, as a shell takes it."""
    return shlex.join(record["command"])


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """In what two runs differ that may matter: code, Python, libraries, machine."""
    before, now = _facts(old), _facts(new)
    names = dict.fromkeys([*before, *now])
    return [
        f"{name} {before.get(name, 'absent')} -> {now.get(name, 'absent')}"
        for name in names
        if before.get(name) != now.get(name)
    ]


def _facts(record: Mapping[str, Any]) -> dict[str, str]:
    git, machine = record.get("git", {}), record.get("machine", {})
    facts = {"git": _commit(git), "Python": str(record.get("python", ""))}
    facts |= {name: str(value) for name, value in record.get("versions", {}).items()}
    return facts | {name: str(machine[name]) for name in ("cpu", "system") if name in machine}


def _commit(git: Mapping[str, Any]) -> str:
    if not git.get("commit"):
        return "none"
    dirty = f" + uncommitted changes {git.get('diff', '')}".rstrip() if git.get("dirty") else ""
    return f"{git['commit'][:12]}{dirty}"


def versions() -> dict[str, str]:
    """Versions of dse, the libraries it depends on, SQLite, and the distributions that offer plug-ins."""
    names = dict.fromkeys([*_LIBRARIES, *sorted(distributions())])
    return {
        "dse": _version("overlap-dse"),
        **{name: _version(name) for name in names},
        "SQLite": sqlite3.sqlite_version,
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"


def _machine() -> dict[str, Any]:
    cpus = re.findall(r"^model name\s*:\s*(.+)$", _MACHINE.read_text() if _MACHINE.is_file() else "", re.MULTILINE)
    # a scheduler may allow fewer
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "system": platform.platform(),
        "processor": platform.machine(),
        "cpu": cpus[0].strip() if cpus else platform.processor(),
        "cores": os.cpu_count(),
        "usable_cores": usable,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }


def _git(root: Path) -> dict[str, Any]:
    """Commit and uncommitted changes of the code, new files among them, or why they are not known."""
    # other folders hold no code that results rest on
    places = [f":/{folder}" for folder in (*PACKAGES, "conf", "plugins")]
    try:
        _ask(
            root, "ls-files", "--error-unmatch", "dse/results/provenance.py"
        )  # dse may be installed inside another checkout
        changed = _ask(root, "status", "--porcelain", "--", *places)
        state = {"commit": _ask(root, "rev-parse", "HEAD"), "dirty": bool(changed)}
        if changed:
            diff = changed + _ask(root, "diff", "HEAD", "--", *places)
            # tells two states with changes apart, without keeping the code
            state["diff"] = hashlib.sha256(diff.encode("utf-8", "surrogateescape")).hexdigest()[:12]
        return state
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "reason": "the code does not run from a git checkout"}


def _ask(folder: Path, *words: str) -> str:
    command = ["git", "-C", str(folder), *words]
    done = subprocess.run(command, capture_output=True, check=True, timeout=20)  # a network file system may hang
    return done.stdout.decode("utf-8", "surrogateescape").strip()


@dataclass(frozen=True)
class ModuleSummary:
    """A module as far as fingerprints need it.

    syntax: hash of its syntax tree. imports: dotted names, relative ones with leading dots. kinds: of the plug-ins that
    it loads by name. files: names of data files in its texts.
    """

    syntax: str
    imports: tuple[str, ...]
    kinds: tuple[str, ...]
    files: tuple[str, ...]


@plugins.cached_until_refresh
def fingerprint(module: str) -> str:
    """Fingerprint (12 hexadecimal digits) of a module, of what it imports, and of the data files that these name.

    Followed are imports of our packages but `dse`, of the module's own package, and of modules that lie beside that;
    all plug-ins of a kind count where a module loads such by name.
    """
    total = hashlib.blake2b(digest_size=6)  # 48 bits: versions of one backend, not all files of the world
    for name, text in sorted(_parts(module).items()):
        total.update(f"{name}\0{text}\0".encode())
    return total.hexdigest()


def _parts(start: str) -> dict[str, str]:
    """Dotted name of each module, and name of each data file -> hash of what it holds."""
    summaries, parts = _remembered_summaries(), dict[str, str]()
    num_before, tops, waiting = len(summaries), _tops(start), {start, *_JUDGES}
    while waiting:
        name = waiting.pop()
        path = _path_of(name)
        if path is None or name in parts:
            continue
        module = _summary(path.read_bytes(), summaries)
        parts[name] = module.syntax
        parts |= _data_hashes(path, module.files)
        if name not in _JUDGES:  # what they import moves values
            targets = _import_targets(name, path, module)
            imported = [other for other in targets if _is_followed(other.partition(".")[0], tops)]
            waiting |= {place for other in imported for place in _with_parents(other)} - set(parts)
    if len(summaries) > num_before:
        _remember(summaries)
    return parts


def _tops(start: str) -> frozenset[str]:
    """Top-level names whose modules are followed."""
    return frozenset({start.partition(".")[0], *plugins.roots()} - {"dse"})  # the framework, but for its judges


@functools.cache
def _is_followed(top: str, tops: frozenset[str]) -> bool:
    """Return whether a top-level package is followed, or lies beside one that is no installed library."""
    if top in tops or top == "dse":
        return top in tops
    place, beside = _place(top), {_place(followed) for followed in tops}
    # installed libraries have versions of their own, in the provenance
    return place is not None and place.name not in ("site-packages", "dist-packages") and place in beside


@functools.cache
def _place(top: str) -> Path | None:
    """Folder that a top-level module or package lies in; None if it has none."""
    with suppress(ImportError, ValueError):
        spec = find_spec(top)
        origin = spec.origin if spec else None
        if spec is not None and origin not in (None, "built-in", "frozen"):
            path = Path(str(origin))
            # a package's file is one folder deeper
            return path.parents[1] if spec.submodule_search_locations else path.parent
    return None


def _path_of(name: str) -> Path | None:
    """File of a module or package; None where there is none."""
    top, *below = name.split(".")
    place = _place(top)
    if place is None:
        return None
    path = place.joinpath(top, *below)
    candidates = (path / "__init__.py", path.with_name(f"{path.name}.py"))
    return next(filter(Path.is_file, candidates), None)


def _import_targets(name: str, path: Path, module: ModuleSummary) -> set[str]:
    """The dotted names that a module may import, those of plug-ins included; not all are modules."""
    targets = set[str]()
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for text in module.imports:
        dots = len(text) - len(text.lstrip("."))
        parent = package.rsplit(".", dots - 1)[0] if dots else ""  # one dot is the package itself
        targets.add(f"{parent}.{text[dots:]}" if dots else text)
    for kind in module.kinds:
        targets.update([plugins.target(kind, plugin).partition(":")[0] for plugin in plugins.names(kind)])
    return targets


@functools.cache
def _with_parents(dotted: str) -> tuple[str, ...]:
    return tuple(accumulate(dotted.split("."), "{}.{}".format))  # a.b.c imports a and a.b, too


def _data_hashes(path: Path, names: Iterable[str]) -> dict[str, str]:
    """Name -> hash of the data files that a module names: shipped ones, all of one name, or that lies beside it."""
    files = {name: files for name in names if (files := _data_files(path, name))}
    texts = {name: b"".join(file.read_bytes() for file in same_name) for name, same_name in files.items()}
    return {f"data {name}": hashlib.blake2b(text, digest_size=8).hexdigest() for name, text in texts.items()}


def _data_files(path: Path, name: str) -> Sequence[Path]:
    beside = path.with_name(Path(name).name)
    return [beside] if beside.is_file() else _shipped_data().get(beside.name, [])


def _shipped_data() -> Mapping[str, Sequence[Path]]:
    files = defaultdict[str, list[Path]](list)
    for folder in conf_dirs():
        for file in sorted((folder / "data").rglob("*")):
            if file.is_file():
                files[file.name].append(file)
    return files


def _summary(source: bytes, summaries: dict[str, Any]) -> ModuleSummary:
    """Summary of a module's source; `summaries` are those of sources seen before, by hash."""
    digest = hashlib.blake2b(source, digest_size=16).hexdigest()
    if not _is_summary(summaries.get(digest)):
        summaries[digest] = astuple(summarise(source))
    syntax, *lists = summaries[digest]
    return ModuleSummary(syntax, *map(tuple, lists))


def summarise(source: bytes) -> ModuleSummary:
    """Parse a module; one that is no Python counts byte by byte."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return ModuleSummary(hashlib.blake2b(source, digest_size=8).hexdigest(), (), (), ())
    nodes = list(ast.walk(tree))
    words = list[str]()
    _flatten(tree, words)
    # texts of Python may hold lone surrogates
    syntax = hashlib.blake2b("\0".join(words).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    # longer texts are no names of files
    files = sorted(text for text in texts if text.endswith(_DATA_SUFFIXES) and len(text) < 256)
    return ModuleSummary(
        syntax, tuple(sorted(set(_import_names(nodes)))), tuple(sorted(set(_kinds(nodes)))), tuple(files)
    )


def _import_names(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield base
            # a name that is imported may be a module or not
            yield from (f"{base}.{alias.name}" if node.module else f"{base}{alias.name}" for alias in node.names)


def _kinds(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the kinds of plug-ins that calls such as `plugins.load("schedule", name)` name."""
    for node in nodes:
        if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if function in _LOADERS and node.args[0].value in plugins.KINDS:
                yield str(node.args[0].value)


def _flatten(node: ast.AST, words: list[str]) -> None:
    """Append the words of a syntax tree; docstrings, empty fields and positions are left out."""
    words.append(type(node).__name__)
    for name in node._fields:
        value = getattr(node, name, None)
        # fields that newer versions add are empty where they are not used
        if value is None or value == [] or name in _UNSEEN:
            continue
        if name == "body" and isinstance(value, list):
            value = value[1:] if _is_docstring(node, value[0]) else value
        words.append(name)
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, ast.AST):
                _flatten(item, words)
            else:
                words.append(repr(item))
        words.append("]")  # ends a list, so that trees with the same words in other places differ


def _is_docstring(owner: ast.AST, first: ast.AST) -> bool:
    """Return whether the first statement of a body documents its owner, or another text that nobody reads."""
    documented = isinstance(owner, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    return documented and isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)


def _cache_file() -> Path:
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder) / "dse" / f"syntax_{_LAYOUT}.json"


def _remembered_summaries() -> dict[str, Any]:
    """Summaries by the hash of the source, each to be looked at before it is used; {} where there are none."""
    with suppress(OSError, ValueError, ConfigError):
        read = parse_json(_cache_file().read_text("utf-8"), "cache")
        return read if isinstance(read, dict) else {}
    return {}


def _is_summary(value: Any) -> bool:
    """Return whether a value is a summary, as of this process (a tuple) or as it was remembered (a list)."""
    if not (isinstance(value, list | tuple) and len(value) == len(ModuleSummary.__dataclass_fields__)):
        return False
    syntax, *lists = value
    names = [name for names in lists if isinstance(names, list | tuple) for name in names]
    return {type(syntax), *map(type, names)} == {str} and set(map(type, lists)) <= {list, tuple}


def _remember(summaries: Mapping[str, Any]) -> None:
    """Keep summaries for the next process; a folder that cannot be written keeps none."""
    newest = dict(list(summaries.items())[-_MOST_REMEMBERED:])
    with suppress(OSError):
        _cache_file().parent.mkdir(parents=True, exist_ok=True)
        with atomic_replacement(_cache_file()) as partial:
            partial.write_text(json.dumps(newest), encoding="utf-8")
