"""Fingerprints: results of other code, data or environment are never reused; edits that change nothing keep them."""

from __future__ import annotations

import ast
import importlib
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dse import plugins
from dse.evaluation.calls import BackendSpec
from dse.results import provenance
from dse.results.provenance import fingerprint, summarise
from simulators.external.backend import ExternalBackend
from tests.support import REPOSITORY

MODULES = sorted((REPOSITORY / "simulators").rglob("*.py")) + sorted((REPOSITORY / "search_spaces").rglob("*.py"))
FILES = {
    "engine/__init__.py": '"""An engine."""\n',
    "engine/core.py": "from engine.law import rate\nimport helper\n\ndef cost(x: float):\n    return rate * x\n",
    "engine/law.py": "from pathlib import Path\nrate = 2.0\nTABLE = Path(__file__).with_name('table.csv')\n",
    "engine/table.csv": "a,b\n1,2\n",
    "engine/unused.py": "number = 1\n",
    "helper.py": "offset = 1.0\n",
    "stranger.py": "number = 1\n",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package of a user beside a module of hers, and a cache of their own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    place = tmp_path / "src"
    for name, text in FILES.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    monkeypatch.syspath_prepend(str(place))
    yield place
    importlib.invalidate_caches()
    provenance._place.cache_clear()
    plugins.refresh()
    for name in {path.partition("/")[0].removesuffix(".py") for path in FILES}:
        sys.modules.pop(name, None)


def _now() -> str:
    plugins.refresh()
    provenance._place.cache_clear()
    return fingerprint("engine.core")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "text", "counts"),
    [
        ("engine/core.py", FILES["engine/core.py"].replace("rate * x", "rate * x * 2"), True),
        ("engine/law.py", FILES["engine/law.py"].replace("2.0", "2.5"), True),
        ("engine/__init__.py", '"""An engine."""\nx = 1\n', True),
        ("engine/table.csv", "a,b\n1,3\n", True),
        ("helper.py", "offset = 1.5\n", True),
        ("engine/core.py", "# why\n" + FILES["engine/core.py"].replace("(x: float)", "(\n    x: float,\n)"), False),
        ("engine/__init__.py", '"""An engine that is described better."""\n', False),
        ("engine/unused.py", "number = 2\n", False),
        ("stranger.py", "number = 2\n", False),
    ],
)
def test_code_and_data_that_a_backend_rests_on_count_and_nothing_else_does(
    folder: Path, name: str, text: str, counts: bool
) -> None:
    before = _now()
    (folder / name).write_text(text)
    assert (_now() != before) == counts
    (folder / name).write_text(FILES[name])
    assert _now() == before


@pytest.mark.slow
def test_a_damaged_cache_changes_no_fingerprint(folder: Path, tmp_path: Path) -> None:
    before, cache = _now(), tmp_path / "cache" / "dse" / "syntax_1.json"
    for text in ("", "[]", '{"a": 1}', '{"a": ["x", ["y"], [1], []]}', cache.read_text()[:-9]):
        cache.write_text(text)
        assert _now() == before


@pytest.mark.slow
@pytest.mark.parametrize("path", random.Random(1).sample(MODULES, 12), ids=lambda path: str(path.name))
def test_a_number_of_a_module_counts_and_its_comments_and_docstrings_do_not(path: Path) -> None:
    source = path.read_bytes()
    syntax = summarise(source).syntax
    assert summarise(b"# a comment\n" + source).syntax == syntax
    tree = ast.parse(source)
    numbers = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and type(node.value) in (int, float)]
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.Module) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
    if not any(isinstance(node, ast.Pass) for node in ast.walk(tree)):
        assert summarise(ast.unparse(tree).encode()).syntax == syntax
    for node in numbers[:5]:
        node.value = float(node.value) + 1.0  # type: ignore[arg-type]
        assert summarise(ast.unparse(tree).encode()).syntax != syntax


def test_the_fingerprint_of_a_backend_covers_every_module_of_a_simulation() -> None:
    """Schedules and engines, which are loaded by name, among them."""
    parts = provenance._parts(plugins.target("backend", "overlap").partition(":")[0])
    for name in ("search_spaces.serial", "simulators.engines.fluid", "simulators.costs.gemm.waves"):
        assert any(part == name or part.startswith(f"{name}.") for part in parts)
    assert not any(name.startswith(("dse.study", "dse.plots", "studies")) for name in parts)


def test_the_context_of_results_names_the_code() -> None:
    spec = BackendSpec.of({"backend": "overlap", "engine": "fluid"})
    assert spec.context.version == f"{spec.make().version}+code.{fingerprint('simulators.overlap.backend')}"


def test_another_value_of_a_variable_that_a_program_is_given_makes_other_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "sim.sh"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    (tmp_path / "bin" / "mysim").write_text("#!/bin/sh\n")
    (tmp_path / "bin" / "mysim").chmod(0o755)

    def version(command: str = "./sim.sh") -> str:
        more: dict[str, Any] = {"error_chars": 100, "output_bytes": 4096, "timeout_s": 1, "version": "1", "files": ()}
        limits = dict.fromkeys(("cpu_s", "memory_bytes", "file_bytes"))
        metrics = {"time_s": {"unit": "s", "goal": "minimize", "meaning": "time"}}
        return ExternalBackend(command=[command], env=("K",), input="json", metrics=metrics, **more, **limits).version

    seen = [version()]
    for value in ("secret 1", "secret 2", ""):
        monkeypatch.setenv("K", value)
        seen.append(version())
    assert len(set(seen)) == 4
    assert not any("secret" in text for text in seen)
    first_build = version("mysim")
    (tmp_path / "bin" / "mysim").write_text("#!/bin/sh\nexit 1\n")
    assert version("mysim") != first_build
