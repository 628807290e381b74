"""Machine code: nothing counts references inside its loops, and it is made once."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import REPOSITORY

COUNTING = re.compile(r"\bcall\b[^\n]*@NRT_(?:incref|decref)\b")
RUN = """
import os
import sys
from pathlib import Path
from benchmarks.graphs import pipeline
from tests.support import ENGINES, FREE, design, lower
from simulators.compiled import dispatcher_of
from simulators.engines.fluid import few_classes, many_classes
from simulators.taskgraph import maxplus
from simulators.taskgraph.symmetry import reduce_graph

os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])  # a process with a single core compiles all itself
own = {**FREE, "system.gpu.cu_copy.setup_s": 1e-6, "schedule.comm_engine": "cu"}
graph = reduce_graph(lower(design("uniform_fused_1d", own))).graph
print(ENGINES["fluid"].totals(graph).makespan_s, ENGINES["fluid"].totals(pipeline(1)).makespan_s)
print("then the others", file=sys.stderr)
ENGINES["analytic"].totals(graph)
for kernel in (few_classes.run, many_classes.run, maxplus._longest, maxplus._stage):
    made = dispatcher_of(kernel)
    print(sum(made.stats.cache_misses.values()), sum(made.stats.cache_hits.values()))
    if sys.argv[1:]:
        (signature,) = made.signatures
        name = made.py_func.__module__.rpartition(".")[2] + "." + made.__name__
        Path(sys.argv[1], name).write_text(made.inspect_llvm(signature), "utf-8")
"""


def process(cache: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A new interpreter that runs a graph, with machine code kept in this folder."""
    path = f"{REPOSITORY}{os.pathsep}{REPOSITORY / 'tests'}"
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(cache), "PYTHONPATH": path}
    line = [sys.executable, "-c", RUN, *words]
    return subprocess.run(line, env=environment, capture_output=True, text=True, check=True, timeout=300)


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, subprocess.CompletedProcess[str]]:
    """(cache, LLVM of each kernel, what was said) of the first process that had an empty cache."""
    cache, llvm = tmp_path_factory.mktemp("cache"), tmp_path_factory.mktemp("llvm")
    return cache, llvm, process(cache, str(llvm))


Fresh = tuple[Path, Path, subprocess.CompletedProcess[str]]


def kept(cache: Path) -> dict[str, tuple[int, int]]:
    """Size and time of each file of machine code."""
    return {
        str(file.relative_to(cache)): (file.stat().st_size, file.stat().st_mtime_ns)
        for file in cache.rglob("*")
        if file.is_file()
    }


@pytest.mark.nightly
def test_a_kernel_is_compiled_once_and_says_so_once(fresh: Fresh) -> None:
    """The second process takes the machine code of the first one, says nothing, and computes the same bits."""
    cache, _, first = fresh
    before = kept(cache)
    assert {Path(name).suffix for name in before} == {".nbi", ".nbc"}
    assert sum(Path(name).suffix == ".nbi" for name in before) == 4
    text, _, later_text = first.stderr.partition("then the others\n")
    names = ("few_classes", "many_classes")
    assert text == "".join(f"compiling simulators.engines.fluid.{name}, once, in about ten seconds\n" for name in names)
    assert "simulators.engines.fluid" not in later_text
    second = process(cache)
    assert second.stderr == "then the others\n"
    assert kept(cache) == before
    (seconds, *counts), (again, *then) = (done.stdout.split("\n") for done in (first, second))
    assert seconds == again
    assert counts == [*["1 0"] * 4, ""]
    assert then == [*["0 1"] * 4, ""]


AHEAD = """
import numpy as np
from tests.ahead import double
from simulators.compiled import compile_ahead, dispatcher_of

for _ in range(2):
    compile_ahead(double, np.ones(2))
print(double(np.ones(2)).tolist(), len(dispatcher_of(double).stats.cache_hits))
"""


@pytest.mark.more
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a single core compiles nothing ahead")
def test_another_process_compiles_a_kernel_ahead(tmp_path: Path) -> None:
    kernel = "@compile_lazily\ndef double(values):\n    return 2.0 * values\n"
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "ahead.py").write_text(f"from simulators.compiled import compile_lazily\n\n{kernel}", "utf-8")
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": f"{tmp_path}:{REPOSITORY}"}
    line = [sys.executable, "-c", AHEAD]
    done = subprocess.run(line, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr.count("compiling")) == ("[2.0, 2.0] 1\n", 1), done.stderr
    (index,) = tmp_path.rglob("ahead.double-*.nbi")
    version = pickle.dumps(pickle.loads(index.read_bytes()))
    index.write_bytes(version + b"cmoved.module\nkernel\n.")  # as of a kernel whose parts have moved
    again = subprocess.run(line, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert again.stdout.startswith("[2.0, 2.0]"), again.stderr


# Reference counting


Blocks = dict[str, tuple[str, set[str]]]


def blocks(llvm: str, name: str) -> Blocks:
    """Basic blocks of the compiled function: text, and the blocks that may come next."""
    bodies = re.findall(rf"(?ms)^define [^\n]*@_ZN[^\n]*{name}[^\n]*\{{\n(.*?)^\}}", llvm)
    (body,) = [body_text for body_text in bodies if "NRT_MemInfo_alloc" in body_text or len(bodies) == 1]
    lines_of, label = dict[str, list[str]](), "entry"
    for line in body.splitlines():
        if named := re.match(r'^("[^"]+"|[-\w$.]+):', line):
            label = named[1]
        lines_of.setdefault(label, []).append(line)
    texts = {name: "\n".join(lines) for name, lines in lines_of.items()}
    return {name: (text, set(re.findall(r'label %("[^"]+"|[-\w$.]+)', text))) for name, text in texts.items()}


def reached(graph: Blocks, start: str) -> set[str]:
    """Blocks that may come after one."""
    seen, left = set[str](), set(graph[start][1])
    while left:
        label = left.pop()
        seen.add(label)
        left |= graph[label][1] - seen
    return seen


def nested(graph: Blocks, depth: int) -> list[str]:
    """Texts of the blocks inside loops of this depth or deeper; 1: inside any loop.

    Blocks that reach each other make up a loop, and what is a loop without the block at which it is entered is nested.
    """
    left = graph
    for _ in range(depth - 1):
        after = {label: reached(left, label) for label in left}
        looped = {
            label: {target for target in after[label] if label in after[target]}
            for label in left
            if label in after[label]
        }
        entered = {label for label in looped if any(label in graph[block][1] for block in graph.keys() - looped[label])}
        inner = looped.keys() - entered
        left = {label: (graph[label][0], graph[label][1] & inner & looped[label]) for label in graph if label in inner}
    return [text for label, (text, _) in left.items() if label in reached(left, label)]


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "depth"),
    [("few_classes.run", 2), ("many_classes.run", 2), ("maxplus._longest", 1), ("maxplus._stage", 1)],
)
def test_no_reference_is_counted_in_a_loop_of_a_kernel(kernel: str, depth: int, fresh: Fresh) -> None:
    """Arguments and local arrays are counted at entry and exit, or design by design, and never event by event.

    Atomic counting in the inner loops once took most of the time.
    """
    _, llvm, _ = fresh
    graph = blocks((llvm / kernel).read_text("utf-8"), kernel.rpartition(".")[2])
    loops = nested(graph, depth)
    assert len(loops) > 10
    assert any(COUNTING.search(text) for text, _ in graph.values())
    assert [text for text in loops if COUNTING.search(text)] == []


def test_the_criterion_notices_references_that_are_counted_in_a_loop() -> None:
    from numba import njit

    def leaky(rows: Any, buffer: Any) -> Any:
        for _ in range(rows.size):
            for index in range(rows.size):
                fresh = np.empty(index + 1)
                if rows[index] > 0.0:
                    buffer = fresh
        return buffer

    compiled = njit(leaky)
    compiled(np.ones(3), np.ones(1))
    graph = blocks(compiled.inspect_llvm(compiled.signatures[0]), "leaky")
    counting = [any(COUNTING.search(text) for text in nested(graph, depth)) for depth in (1, 2, 3)]
    assert counting == [True, True, False]
