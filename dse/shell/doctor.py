"""The command `doctor`: does this installation work, and if not, what helps? Nothing is evaluated, nothing is fetched.

Packages add checks of their own: their `CHECKS` maps a name to `module:function`, of the options of the command, which
yields findings.
"""

from __future__ import annotations

import importlib
import importlib.util
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path

from dse import __version__, plugins
from dse.config.options import accidents, conf_dir, looked_at
from dse.errors import ConfigError, Problem, pairs
from dse.plugins import DoctorCheck, Level

_DEFAULTS = {"output_dir": "outputs", "uri": "sqlite:///mlflow.db", "port": "5000", "url": "auto"}
_LITTLE_BYTES = 2 << 30
_OPTIONAL = {
    "torch": ("search=gp", "pip install 'overlap-dse[gp]'"),
    "psycopg": ("results in PostgreSQL", "pip install 'overlap-dse[postgresql]'"),
    "sklearn": ("study=goldyloc", "pip install 'overlap-dse[learning]'"),
}
Options = Mapping[str, str]


def doctor(words: Sequence[str]) -> int:
    """`doctor [-v] [output_dir=outputs] [uri=...] [port=5000] [url=auto] [config_dir=...]`; 0, or 4 if one fails."""
    is_verbose = bool({"-v", "--verbose"} & set(words))
    options = pairs([word for word in words if word not in ("-v", "--verbose")], _DEFAULTS, optional=("config_dir",))
    findings = list(_findings(options))
    for finding in findings:
        if finding.level != "ok" or is_verbose or not finding.is_detail:
            print(f"{finding.level:<4} {finding}")
    counts = {level: sum(finding.level == level for finding in findings) for level in ("fail", "warn")}
    print(f"{len(findings)} checks, {counts['fail']} failed, {counts['warn']} with a warning")
    return 4 if counts["fail"] else 0


def _findings(options: Options) -> Iterator[DoctorCheck]:
    for check in (_python, _packages, _optional, _disk, _terminal, _git, _configuration, _plugins):
        yield from _guarded(check.__name__.strip("_"), check, options)
    for name, target in plugins.declarations("CHECKS").items():
        yield from _guarded(name, partial(_call, target), options)


def _call(target: str, options: Options) -> Iterator[DoctorCheck]:
    module, _, function = target.partition(":")
    yield from getattr(importlib.import_module(module), function)(options)


def _guarded(name: str, check: Callable[[Options], Iterator[DoctorCheck]], options: Options) -> Iterator[DoctorCheck]:
    """The findings of a check; one that fails is a finding, too."""
    try:
        yield from check(options)
    except Exception as error:
        yield DoctorCheck("fail", name, f"{type(error).__name__}: {error}", "make setup")


def _python(options: Options) -> Iterator[DoctorCheck]:
    version = platform.python_version()
    good = (3, 11) <= sys.version_info[:2] < (3, 14)
    yield DoctorCheck(
        "ok" if good else "fail", "Python", f"{version} at {sys.executable}", "" if good else "use 3.11 to 3.13"
    )


def _packages(options: Options) -> Iterator[DoctorCheck]:
    """Installed versions against the ranges that the project declares."""
    try:
        texts = metadata.requires("overlap-dse") or []
    except metadata.PackageNotFoundError:
        yield DoctorCheck("warn", "packages", "dse is not installed, and runs from its folder", "make setup")
        return
    from packaging.requirements import Requirement

    wrong = list[DoctorCheck]()
    needed = [need for need in map(Requirement, texts) if need.marker is None or need.marker.evaluate({"extra": ""})]
    for need in needed:
        try:
            version = metadata.version(need.name)
        except metadata.PackageNotFoundError:
            wrong.append(DoctorCheck("fail", need.name, f"is not installed, {need.specifier} is needed", "make setup"))
            continue
        if need.specifier.contains(version, prereleases=True):
            yield DoctorCheck("ok", need.name, version, is_detail=True)
        else:
            wrong.append(
                DoctorCheck("fail", need.name, f"{version} is installed, {need.specifier} is needed", "make setup")
            )
    yield from wrong
    if not wrong:
        yield DoctorCheck("ok", "packages", f"dse {__version__}, {len(needed)} dependencies within their ranges")


def _optional(options: Options) -> Iterator[DoctorCheck]:
    for name, (purpose, way) in _OPTIONAL.items():
        if importlib.util.find_spec(name) is None:
            yield DoctorCheck("ok", name, f"is not installed; only {purpose} needs it", way)
        else:
            yield DoctorCheck("ok", name, f"is installed, for {purpose}", is_detail=True)


def _disk(options: Options) -> Iterator[DoctorCheck]:
    folder = Path(options["output_dir"]).absolute()
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        yield DoctorCheck(
            "fail", "output_dir", f"{folder} cannot be written: {reason}", "name another: output_dir=<folder>"
        )
        return
    free = shutil.disk_usage(existing).free
    level: Level = "ok" if free >= _LITTLE_BYTES else "warn"
    way = "" if level == "ok" else "a million points take a gigabyte"
    yield DoctorCheck(level, "output_dir", f"{folder} can be written, {free / 2**30:.1f} GiB free", way)


def _terminal(options: Options) -> Iterator[DoctorCheck]:
    encoding = (sys.stdout.encoding or "").lower()
    good = encoding.replace("-", "") == "utf8"
    way = "" if good else "export LC_ALL=C.UTF-8 PYTHONUTF8=1, or µ and × are shown as ?"
    yield DoctorCheck("ok" if good else "warn", "terminal", f"writes {encoding or 'nothing known'}", way)


def _git(options: Options) -> Iterator[DoctorCheck]:
    there = shutil.which("git") is not None
    way = "" if there else "apt-get install git, or results do not record their commit"
    yield DoctorCheck(
        "ok" if there else "warn", "git", "is there" if there else "is not installed", way, is_detail=there
    )


def _configuration(options: Options) -> Iterator[DoctorCheck]:
    """The shipped configuration, and the user's own folder where it is named."""
    if not (conf_dir() / "config.yaml").is_file():
        yield DoctorCheck("fail", "configuration", f"{conf_dir()}/config.yaml is missing", "clone or install again")
        return
    yield DoctorCheck("ok", "configuration", f"{len(list(conf_dir().glob('*/*.yaml')))} options in {conf_dir()}")
    if "config_dir" not in options:
        return
    folder = Path(options["config_dir"])
    if not folder.is_dir():
        yield DoctorCheck(
            "fail", "config_dir", f"{folder} is no folder", "name the folder that holds system/, study/, ..."
        )
        return
    files = list(looked_at(folder))
    groups = plugins.declarations("GROUPS")
    strays = [path for path, _ in files if path.parent.name not in groups and path.parent != folder]
    problems = [problem for path, found in files for problem in found or accidents(path)]
    yield from (DoctorCheck("fail", problem.path, problem.rule, problem.way_out) for problem in problems)
    yield from (
        DoctorCheck("warn", str(path), "lies in no group's folder", "see python -m dse options") for path in strays
    )
    if not problems:
        yield DoctorCheck("ok", "config_dir", f"{len(files)} files in {folder} can be read")


def _plugins(options: Options) -> Iterator[DoctorCheck]:
    """Plug-ins of other distributions: do they load?"""
    kinds = dict[str, list[str]]()  # an engine and a backend join by the same group of entry points
    for kind, about in plugins.KINDS.items():
        kinds.setdefault(about.group, []).append(kind)
    foreign = [(name, same) for same in kinds.values() for name in plugins.foreign(same[0])]
    for name, same in foreign:
        problems = [problem for kind in same for problem in _refusal(kind, name)]
        if len(problems) == len(same):
            problem = problems[0]
            yield DoctorCheck("fail", f"{same[0]} {name}", f"{problem.path} {problem.rule}", problem.way_out)
    for package, reason in plugins.broken_packages().items():
        yield DoctorCheck(
            "fail", f"package {package}", f"cannot be imported: {reason}", "mend it, or remove its distribution"
        )
    yield DoctorCheck("ok", "plug-ins", f"{len(foreign)} of other distributions", is_detail=not foreign)


def _refusal(kind: str, name: str) -> list[Problem]:
    """Why a plug-in of a kind cannot be loaded: one problem, or none."""
    try:
        plugins.load(kind, name)
    except ConfigError as error:
        return [error.problems[0]]
    return []
