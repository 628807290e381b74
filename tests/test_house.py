"""Rules of form: no circles, short functions and classes, names that say what they hold. Totals are printed by
`python -m benchmarks.house`, and no test holds them.
"""

from __future__ import annotations

import ast
import functools
import json
from collections.abc import Iterator, Mapping

import pytest

from benchmarks import hero, house
from dse.plugins import KINDS

KERNELS = {  # compiled by numba, which keeps machine code by file and calls nothing in another one
    "dse_ptx.interpreter._arithmetic",
    "dse_ptx.interpreter._run_warp",
    "simulators.costs.pim_bursts._run",
    "simulators.engines.fluid.few_classes._solve",
    "simulators.engines.fluid.few_classes._solve_together",
    "simulators.engines.fluid.few_classes.run",
    "simulators.engines.fluid.few_classes.run_together",
    "simulators.engines.fluid.many_classes.run",
    "simulators.taskgraph.maxplus._stage",
    "simulators.taskgraph.timeline._replay",
    "dse_memory.engine.serve_line",
    "dse_memory.engine.run",
}


@functools.cache
def all_trees() -> dict[str, ast.Module]:
    """Dotted name -> syntax of every module."""
    return {
        name: tree for package in (*house.PACKAGES, *house.PLUGINS) for name, tree in house.modules(package).items()
    }


@pytest.mark.more
def test_no_modules_import_one_another_in_a_circle() -> None:
    graph = house.imports(all_trees())
    assert house.cycles(graph) == 0
    assert house.cycles({**graph, "dse.errors": {"dse.cli"}}) == 1  # which would be seen
    by_name = {"one": ast.parse("import importlib\nimportlib.import_module('two')"), "two": ast.parse("import one")}
    assert house.cycles(house.imports(by_name)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("package", list(house.STREETS.values()))
def test_no_rooms_of_a_street_import_one_another_in_a_circle(package: str) -> None:
    rooms = house.street(package)
    assert len(rooms) == len(house.top_rooms(package)) > 5
    assert house.cycles(rooms) == 0


FLOORS = ("dse", "simulators", "search_spaces", "studies")
"""Packages, each of which may import those before it."""


def loads(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Kinds and names of plug-ins that a module loads by a name in its text, be it that of a constant."""
    texts = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "load":
            words = [
                str(word.value if isinstance(word, ast.Constant) else texts.get(getattr(word, "id", ""), ""))
                for word in node.args
            ]
            if len(words) == 2 and all(words):
                yield words[0], words[1]


def upward_loads(trees: Mapping[str, ast.Module]) -> list[str]:
    """Modules that load a plug-in of a package above theirs by name, which is an import that no contract sees."""
    lines = []
    for module, tree in trees.items():
        floor = FLOORS.index(module.partition(".")[0])
        for kind, name in loads(tree):
            package = KINDS[kind].package.partition(".")[0] if kind in KINDS else ""
            lines += [f"{module} loads {kind} {name}"] if package and FLOORS.index(package) > floor else []
    return lines


@pytest.mark.slow
def test_no_package_loads_a_plug_in_of_a_package_above_it_by_name() -> None:
    trees = {name: tree for name, tree in all_trees().items() if name.partition(".")[0] in FLOORS}
    assert upward_loads(trees) == []
    text = 'SERIAL = "serial"\nplugins.load("schedule", SERIAL)'
    assert upward_loads({"simulators.x": ast.parse(text)}) == ["simulators.x loads schedule serial"]


@pytest.mark.slow
def test_a_backend_must_have_four_members() -> None:
    assert house.backend_members() == 4


@pytest.mark.more
def test_a_class_name_means_one_thing_in_a_backend() -> None:
    assert set(house.class_homonyms()) >= {"overlap", "step", "measured", "external"}
    assert not any(house.class_homonyms().values())


@pytest.mark.more
def test_classes_are_short_and_of_one_meaning() -> None:
    counts = {
        "long classes": house.long_classes(),
        "homonyms": house.public_homonyms(),
        "doors of a GEMM beside gemm_cost": house.gemm_doors()[1:],
    }
    assert {name: places for name, places in counts.items() if places} == {}


@pytest.mark.slow
def test_text_is_read_as_a_whole_number_by_one_door() -> None:
    methods = {
        "isdigit",
        "isdecimal",
        "isnumeric",
    }  # true of signs that int() does not read, and of thousands of digits
    places = [
        f"{module}:{node.lineno}"
        for module, tree in all_trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in methods
    ]
    assert places == []


def test_long_files_hold_compiled_kernels() -> None:
    assert house.long_files() == [
        "simulators/engines/fluid/few_classes.py",
        "simulators/engines/fluid/many_classes.py",
        "plugins/memory/dse_memory/engine.py",
        "plugins/ptx/dse_ptx/interpreter.py",
    ]


@pytest.mark.more
def test_long_functions_are_compiled_kernels() -> None:
    assert set(house.long_functions()) == KERNELS


@pytest.mark.slow
def test_the_language_does_not_get_worse() -> None:
    most = {"participle_names_pct": 2.9, "pronoun_bindings_pct": 0.5, "docstrings_without_subject_pct": 2.95}
    language = house.language(all_trees())
    assert {name: language[name] for name in most if language[name] > most[name]} == {}
    assert house.language(house.tests())["pronoun_bindings_pct"] == 0


def test_a_bare_participle_is_told_from_other_names() -> None:
    bare, nouns = ["told", "_checked", "gathering", "found"], ["seed", "embedding", "run", "load", "read_table"]
    assert all(house.is_participle(name) for name in bare)
    assert not any(house.is_participle(name) for name in [*nouns, *(f"{name}_rows" for name in bare)])


@pytest.mark.slow
def test_the_picture_of_the_architecture_shows_the_code_as_it_is() -> None:
    stale = "stale: python -m benchmarks.house --draw docs/images/architecture.png"
    assert json.loads(house.drawn(house.PICTURE)) == json.loads(house.drawing()), stale


@pytest.mark.slow
def test_the_first_picture_of_the_readme_shows_what_the_models_say() -> None:
    before, after = json.loads(house.drawn(hero.PICTURE))
    shown = hero.times(hero.timeline(**hero.BASELINE)), hero.times(hero.timeline())
    assert (before, after) == shown, "stale: python -m benchmarks.hero"
    assert before["exposed_ms"] > 10 * after["exposed_ms"]
