"""The house rules that a tool does not check: plain values in conf/, sources, docstrings, short functions."""

from __future__ import annotations

import ast
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.house import lines_of_code
from dse import plugins
from dse.config.options import accidents, list_options, unreadable
from simulators.hardware.machine import System
from simulators.hardware.schedule_system import PoweredSystem, ScheduleSystem
from simulators.overlap.powered import PoweredBackend
from simulators.steps.overlap.sites import SITES
from tests import iterations
from tests.support import CONF, REPOSITORY, SOURCES, SYSTEMS, design, shipped, sources_of, syntax
from tests.support import backend as overlap

FILES = sorted(CONF.rglob("*.yaml"))
GROUPS = sorted(folder.name for folder in CONF.iterdir() if folder.is_dir())


def wrong(path: Path) -> list[str]:
    """What is refused of a file."""
    return [str(problem) for problem in unreadable(path) or accidents(path)]


def name_of(path: Path) -> str:
    """A file by its path in the repository."""
    return str(path.relative_to(REPOSITORY))


def keys(tree: Any) -> Iterator[str]:
    """All keys of a tree."""
    if isinstance(tree, dict):
        for name, value in tree.items():
            yield str(name)
            yield from keys(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from keys(value)


# Configuration


def test_there_is_configuration_to_look_at() -> None:
    assert {"study", "system", "workload", "schedule", "simulator", "search", "executor", "tracking"} <= set(GROUPS)
    assert len(FILES) > len(GROUPS)


@pytest.mark.slow
def test_configuration_files_hold_values_and_no_accidents() -> None:
    for path in FILES:
        problems = accidents(path) if path.name == "config.yaml" else wrong(path)  # the one place for Hydra's settings
        assert list(map(str, problems)) == []
        tree = yaml.load(path.read_bytes(), Loader=yaml.CSafeLoader)
        assert not [key for key in keys(tree) if key.startswith("_") and key.endswith("_")], path


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("a: 010\n", "base 8"),
        ("a: -010\n", "base 8"),
        ("a: 4:1\n", "base 60"),
        ("a: 1:30:00\n", "base 60"),
        ("a: 1_000\n", "underscore"),
        ("a: on\n", "true or false"),
        ("a: Off\n", "true or false"),
        ("a: NO\n", "true or false"),
        ("no: 1\n", "true or false"),
        ("a: &b 1\nc: *b\n", "alias"),
        ("_target_: os.system\n", "class to call"),
        ("a: {b: [{_target_: os.system}]}\n", "class to call"),
        ("a: [1\n", "is not YAML"),
        ("a: " + "[" * 60 + "]" * 60, "nested deeper"),
        ("a: " + "x" * (1 << 20), "larger than"),
    ],
    ids=lambda value: value[:20],
)
def test_an_accident_is_seen(text: str, part: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    problems = wrong(path)
    assert part in problems[0]
    assert all("mine.yaml" in message for message in problems)


@pytest.mark.parametrize(
    "text", ["a: '010'", "a: 0", "a: 0.5", "a: 10", "a: true", "n: 8192", "y: 0", "a: '4:1'", "a: 64 GB/s"]
)
def test_an_honest_value_is_no_accident(text: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text + "\n", encoding="utf-8")
    assert wrong(path) == []


def test_every_option_is_described_and_named_like_its_file() -> None:
    for group in GROUPS:
        descriptions = list_options(group)
        for option, tree in shipped(group).items():
            described = tree.get(group, tree) if group in ("fabric", "stack", "study") else tree
            assert described.get("name", option) == option
            assert ("name" in described) == (group not in ("pim", "candidates") and tree != {}), (
                "an option that adds to another has none"
            )
            assert len(descriptions[option]) > 10, f"{group}/{option}"


@pytest.mark.slow
def test_every_constant_of_a_system_has_a_source_and_every_source_a_constant() -> None:
    for tree in shipped("system").values():
        facts = {
            path.partition(".")[2]: (provenance, source)
            for path, _, provenance, source in System.model_validate(tree).facts_below("system")
        }
        assert all(provenance and len(source) >= 3 for provenance, source in facts.values())
        for path in sources_of(tree):
            assert any(fact == path or fact.startswith(f"{path}.") for fact in facts), f"{path} is of nothing"


def test_the_recorded_and_shown_paths_of_every_study_are_paths_of_its_designs() -> None:
    schedules = [design(name) for name in shipped("schedule")]
    of_overlaps = {path for schedule in schedules for path in paths_of(schedule.model_dump(), "")}
    systems = [ScheduleSystem.model_validate(tree) for name, tree in shipped("system").items() if name in SYSTEMS]
    of_overlaps |= {path for system in systems for path in paths_of(system.model_dump(), "system.")}
    metrics = overlap("analytic").described
    steps = iterations.BACKEND.described
    epoch = {"lengths": shipped("lengths")["iwslt15"], "iterations": shipped("iterations")["seqpoint"]}
    copies = {"quantised": shipped("quantised")["pim"], "format": shipped("format")["mx9"]}
    copies |= {"instructions": shipped("instructions")["plain"], "system": shipped("pim")["hbm3_strawman"]}
    of_steps = set(paths_of({**iterations.step().model_dump(), **epoch}, "")) | set(paths_of(copies, ""))
    of_steps |= {f"sites.{name}" for name in SITES}
    by_simulator = {"fluid": (of_overlaps, metrics), "analytic": (of_overlaps, metrics), "step": (of_steps, steps)}
    limits = set(paths_of(PoweredSystem.model_validate(shipped("system")["a100_8"]).model_dump(), "system."))
    by_simulator["powered"] = of_overlaps | limits, PoweredBackend("fluid").described
    studies = [(tree["study"], _simulator(tree)) for tree in shipped("study").values()]
    assert {simulator for _, simulator in studies} == {*by_simulator}
    for study, simulator in ((name_of_study, name) for name_of_study, name in studies if name in by_simulator):
        assert unknown_paths(study, *by_simulator[simulator]) == set()


def unknown_paths(study: Mapping[str, Any], paths: Collection[str], metrics: Collection[str]) -> set[str]:
    """What a study records, shows or improves that is neither a path of a design nor a metric."""
    recorded = {*study.get("recorded", ()), *study.get("baseline", ())} - {*paths}
    return recorded | {*study.get("summary", ())} - {*paths, *metrics} | {*study.get("objectives", ())} - {*metrics}


def _simulator(tree: dict[str, Any]) -> str:
    """The simulator that a study chooses."""
    chosen = (entry.get("override /simulator") for entry in tree.get("defaults", []) if isinstance(entry, dict))
    bases = (entry for entry in tree.get("defaults", []) if isinstance(entry, str) and entry != "_self_")
    based = next((shipped("study")[name] for name in bases), None)
    return next((name for name in chosen if name), "analytic" if based is None else _simulator(based))


def paths_of(tree: Any, prefix: str) -> Iterator[str]:
    """Dotted paths of a tree."""
    if isinstance(tree, dict):
        for name, value in tree.items():
            yield f"{prefix}{name}"
            yield from paths_of(value, f"{prefix}{name}.")


# Claims


@pytest.mark.slow
@pytest.mark.parametrize(
    ("study", "papers"),
    [
        ("ficco", ("ficco",)),
        ("t3_requests", ("t3",)),
        ("fused_ops", ("fused_ops",)),
        ("operators", ("hardware", "data")),
        ("comp_vs_comm", ("comp_vs_comm",)),
        ("bert", ("bert",)),
        ("seqpoint", ("seqpoint",)),
        ("goldyloc", ("goldyloc",)),
        ("jitq", ("jitq",)),
    ],
)
def test_the_retyped_claims_are_those_of_the_shared_list(
    study: str, papers: tuple[str, ...], shared: Callable[[str], Path]
) -> None:
    listed = yaml.safe_load(shared("papers/claims.yaml").read_text("utf-8"))
    if study not in list_options("study"):
        pytest.skip(f"study={study} is of a plug-in that is not installed")
    theirs = {row["id"]: _stated(row) for row in _claims(listed, papers)}
    assert theirs
    claims = plugins.load("study", study).claims()
    ours = {claim.id: claim.model_dump(mode="json") for claim in claims}
    assert set(ours) == set(theirs)
    for name, claim in ours.items():
        different = {
            field: (value, theirs[name].get(field))
            for field, value in claim.items()
            if value != theirs[name].get(field)
        }
        assert different == {}, name


def _claims(content: Any, papers: tuple[str, ...]) -> list[dict[str, Any]]:
    rows = content["claims"] if isinstance(content, dict) else content
    return [row for row in rows if row["paper"] in papers]


def _stated(row: dict[str, Any]) -> dict[str, Any]:
    """A claim; of a formula, which holds or does not, the statement says it."""
    if row["unit"] != "formula":
        return row
    return {**row, "value": True, "statement": f"{row['statement']}, {row['value']}"}


# Code


@pytest.mark.more
def test_what_is_public_says_what_it_is() -> None:
    for path, tree in syntax().items():
        assert ast.get_docstring(tree), path
        assert [name for name, node in public(tree) if not ast.get_docstring(node)] == [], path


Documented = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def public(tree: ast.Module | ast.ClassDef, prefix: str = "") -> Iterator[tuple[str, Documented]]:
    """Public classes, functions and methods of a module, by name."""
    for node in tree.body:
        if isinstance(node, Documented) and not node.name.startswith("_"):
            yield f"{prefix}{node.name}", node
            if isinstance(node, ast.ClassDef):
                yield from public(node, f"{prefix}{node.name}.")


_DSL = {"triton.jit", "torch.library.custom_op"}
_COMPILED = {"compile_lazily", "flat", "flat_over", "inline_always", "inline_never", *_DSL}


def _is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Compiled kernels are one function on purpose: helpers that take arrays would slow their inner loops."""
    return any(ast.unparse(mark).partition("(")[0] in _COMPILED for mark in node.decorator_list)


def functions() -> dict[str, int]:
    """Lines of code of every function, by file and name."""
    return {
        f"{name_of(path)}:{node.lineno} {node.name}": lines_of_code(node)
        for path, tree in syntax().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not _is_kernel(node)
    }


@pytest.mark.slow
def test_functions_are_short() -> None:
    lines = functions()
    assert {name: count for name, count in lines.items() if count > 60} == {}
    assert statistics.median(lines.values()) <= 8
    assert sum(count <= 30 for count in lines.values()) >= 0.9 * len(lines)


@pytest.mark.slow
def test_functions_take_at_most_five_arguments() -> None:
    long = {}
    for path, tree in syntax().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and not _is_kernel(node):
                args = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                if len([arg for arg in args if arg.arg not in ("self", "cls")]) > 5:
                    long[f"{name_of(path)}:{node.lineno} {node.name}"] = [arg.arg for arg in args]
    assert long == {}


def test_a_package_imports_nothing_under_the_name_of_a_module_in_it() -> None:
    replaced = []  # importing the module sets its name in the package, whatever had it
    for file in (file for folder in SOURCES for file in folder.rglob("__init__.py")):
        inner = {path.stem if path.is_file() else path.name for path in file.parent.iterdir()}
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and file.parent.name not in str(node.module).split("."):
                names = {alias.asname or alias.name for alias in node.names}
                replaced += [f"{file}: {name}" for name in names & inner]
    assert replaced == []
