"""The house: how many rooms and arrows there are, and what its language is."""

from __future__ import annotations

import ast
import json

import pytest

from benchmarks import house

TREES = {name: tree for package in (*house.PACKAGES, *house.PLUGINS) for name, tree in house.modules(package).items()}
KERNELS = {  # compiled by numba, which keeps machine code by file and calls nothing in another one
    "simulators.costs.pim_bursts._run",
    "simulators.engines.fluid.few_classes._solve",
    "simulators.engines.fluid.few_classes._solve_together",
    "simulators.engines.fluid.few_classes.run",
    "simulators.engines.fluid.few_classes.run_together",
    "simulators.engines.fluid.many_classes.run",
    "simulators.memory.engine._second",
    "simulators.memory.engine.run",
}


def test_few_modules_stand_at_the_root_of_a_package() -> None:
    assert len(house.root_modules("dse")) <= 11
    assert house.root_modules("simulators") == ["compiled", "rules"]


@pytest.mark.parametrize(("package", "most"), [("dse", 107), ("simulators", 27)])
def test_few_arrows_go_from_room_to_room(package: str, most: int) -> None:
    assert len(house.arrows(package)) <= most


def test_no_modules_import_one_another_in_a_circle() -> None:
    graph = house.imports(TREES)
    assert house.cycles(graph) == 0
    assert house.cycles({**graph, "dse.errors": {"dse.cli"}}) == 1  # which would be seen
    by_name = {"one": ast.parse("import importlib\nimportlib.import_module('two')"), "two": ast.parse("import one")}
    assert house.cycles(house.imports(by_name)) == 1


def test_a_backend_must_have_four_members() -> None:
    assert house.backend_members() == 4


def test_a_class_name_means_one_thing_in_a_backend() -> None:
    assert set(house.class_homonyms()) >= {"overlap", "step", "memory", "measured", "external"}
    assert not any(house.class_homonyms().values())


@pytest.mark.slow
def test_the_house_does_not_grow() -> None:
    counts = {
        "GPU classes": (len(house.gpu_classes()), 9),
        "doors of a GEMM": (len(house.gemm_doors()), 1),
        "caches by id": (house.id_caches(), 2),
        "long classes": (len(house.long_classes()), 6),
        "homonyms": (len(house.public_homonyms()), 56),
        "classes named by participles": (len(house.participle_classes()), 88),
        "dependencies": (len(house.dependencies()), 24),
        "environment [MB]": (house.environment_mb(), 1000),
        "words of documentation": (house.docs_words(), 30_000),
    }
    assert {name: count for name, (count, most) in counts.items() if count > most} == {}


def test_long_files_hold_compiled_kernels() -> None:
    assert house.long_files() == [
        "simulators/engines/fluid/few_classes.py",
        "simulators/engines/fluid/many_classes.py",
        "simulators/memory/engine.py",
    ]


def test_long_functions_are_compiled_kernels() -> None:
    assert set(house.long_functions()) == KERNELS


@pytest.mark.slow
def test_a_command_imports_what_it_needs() -> None:
    assert house.modules_imported_by_compare() <= 37


@pytest.mark.parametrize(
    ("figure", "most"),
    [("participle_names_pct", 2.9), ("pronoun_bindings_pct", 0.5), ("docstrings_without_subject_pct", 2.95)],
)
def test_the_language_does_not_get_worse(figure: str, most: float) -> None:
    assert house.language(TREES)[figure] <= most


@pytest.mark.parametrize("name", ["told", "_checked", "gathering", "found"])
def test_a_bare_participle_is_told_from_other_names(name: str) -> None:
    assert house.is_participle(name)
    assert not house.is_participle(f"{name}_rows")


@pytest.mark.parametrize("name", ["seed", "embedding", "run", "load", "read_table"])
def test_nouns_and_verbs_are_no_participles(name: str) -> None:
    assert not house.is_participle(name)


def test_the_picture_of_the_architecture_shows_the_code_as_it_is() -> None:
    stale = "stale: python -m benchmarks.house --draw docs/images/architecture.png"
    assert json.loads(house.drawn(house.PICTURE)) == json.loads(house.drawing()), stale
