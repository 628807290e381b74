"""Edits of code, data and environment, after each of which a stored result must not be used again.

The repository is copied, a small study is run in the copy, and then once more after each edit: the number of a module
that the study ran, a data file that such a module names, the value of a variable that an external program is given.
"""

from __future__ import annotations

import ast
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_REPOSITORY = Path(__file__).resolve().parents[2]
_PARTS = ("dse", "simulators", "search_spaces", "studies", "conf")
_QUICK = ("tracking=none", "figures=none", "timeline=false", "fidelity=none")
_OVERLAP = ("study=ficco_sweep", "workload.shapes=gemm.csv", "space.schedule.num_chunks=choice(2)", *_QUICK)
_PROGRAM = """#!/bin/sh
echo "{\\"time_s\\": ${K:-1}}"
"""
_EXTERNAL = """# @package _global_
defaults:
  - override /system: null
  - override /workload: null
  - override /schedule: null
  - override /simulator: external
case: {x: 1}
space: {case: {x: "choice(1,2)"}}
simulator:
  command: [./sim.sh]
  env: [K]
  metrics: {time_s: {unit: s, goal: minimize, meaning: time}}
study: {name: mine, module: plain, objectives: [time_s], baseline: {}}
"""
_REUSED = re.compile(r"resuming: [1-9]|[1-9]\d* of the results were known")

Edit = Callable[[], None]


def stale_reuse(edits: int = 20, seed: int = 0) -> int:
    """Number of drawn edits, of `edits`, after which a study took results from before."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        _prepare(folder)
        environments = max(1, edits // 8)
        modules = _modules_of_a_run(folder)
        changes = [_code_edit(folder, modules, draw) for _ in range(edits - 2 * environments)]
        changes += [_data_edit(folder, draw) for _ in range(environments)]
        stale = sum(_is_reused(folder, _OVERLAP, change) for change in changes)
        return stale + sum(_is_reused_by_a_program(folder, str(value)) for value in range(2, 2 + environments))


def _prepare(folder: Path) -> None:
    for part in _PARTS:
        shutil.copytree(_REPOSITORY / part, folder / part, symlinks=True)
    (folder / "own" / "study").mkdir(parents=True)
    (folder / "own" / "study" / "mine.yaml").write_text(_EXTERNAL, encoding="utf-8")
    (folder / "gemm.csv").write_text("name,m,n,k\none,4096,4096,8192\n", encoding="utf-8")
    (folder / "sim.sh").write_text(_PROGRAM, encoding="utf-8")
    (folder / "sim.sh").chmod(0o755)
    _run(folder, _OVERLAP)
    _run(folder, _external_words(), K="1")


def _external_words() -> Sequence[str]:
    return ("study=mine", "--config-dir=own", *_QUICK)


def _run(folder: Path, words: Sequence[str], **variables: str) -> str:
    """Run a study in the copy; what it prints. Raises CalledProcessError where it fails."""
    environment = {**os.environ, "PYTHONPATH": str(folder), **variables}
    command = [sys.executable, "-m", "dse", *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def _modules_of_a_run(folder: Path) -> list[Path]:
    """Files of the simulators' modules that a process has loaded after the study."""
    program = (
        "import sys\nfrom dse.cli import main\nmain()\n"
        "print(*('LOADED ' + module.__file__ for name, module in list(sys.modules.items())"
        " if name.startswith(('simulators.', 'search_spaces.')) and module.__file__), sep='\\n')"
    )
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    words = [sys.executable, "-c", program, *_OVERLAP, "store=none"]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    files = [Path(line.removeprefix("LOADED ")) for line in done.stdout.splitlines() if line.startswith("LOADED ")]
    return sorted(path for path in files if _numbers(path) and "njit" not in path.read_text("utf-8"))


def _numbers(path: Path) -> list[ast.Constant]:
    """Floating-point numbers on one line each of a module, in order."""
    nodes = ast.walk(ast.parse(path.read_bytes()))
    return [node for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, float)]


@contextmanager
def _restored(path: Path) -> Iterator[None]:
    text, status = path.read_bytes(), path.stat()
    try:
        yield
    finally:
        path.write_bytes(text)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def _code_edit(folder: Path, modules: Sequence[Path], draw: random.Random) -> tuple[Path, Edit]:
    """Append a digit to a number of a module, so that the simulation may still be run."""
    path = draw.choice(modules)
    node = draw.choice(_numbers(path))

    def edit() -> None:
        lines = path.read_bytes().splitlines(keepends=True)
        line = lines[node.lineno - 1]
        lines[node.lineno - 1] = (
            line[: node.col_offset] + b"(1.0000001 * " + _word(line, node) + b")" + _after(line, node)
        )
        path.write_bytes(b"".join(lines))

    return path, edit


def _word(line: bytes, node: ast.Constant) -> bytes:
    return line[node.col_offset : node.end_col_offset]


def _after(line: bytes, node: ast.Constant) -> bytes:
    assert node.end_col_offset is not None
    return line[node.end_col_offset :]


def _data_edit(folder: Path, draw: random.Random) -> tuple[Path, Edit]:
    """Add a comment, which no reader minds, to a data file that the simulators name."""
    path = folder / "conf" / "data" / draw.choice(["operators.yaml"])

    def edit() -> None:
        path.write_text(path.read_text("utf-8") + f"# {draw.random()}\n", encoding="utf-8")

    return path, edit


def _is_reused(folder: Path, words: Sequence[str], change: tuple[Path, Edit]) -> bool:
    path, edit = change
    with _restored(path):
        edit()
        return bool(_REUSED.search(_run(folder, words)))


def _is_reused_by_a_program(folder: Path, value: str) -> bool:
    return bool(_REUSED.search(_run(folder, _external_words(), K=value)))


if __name__ == "__main__":
    print(f"stale_reuse {stale_reuse()}")
