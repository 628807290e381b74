"""Instructions that fixed workloads take, which noise cannot blur: `python -m benchmarks.instructions [--record]`.

Each workload runs in processes of its own under Valgrind (cachegrind without caches), once and twice: the difference is
one repetition, without imports, set-up and compilation. Kernels are compiled for a generic CPU, so that counts are
those of the code and not of the machine; they differ between versions of Python and of libraries, which the record
names.

`calls of <workload>` counts calls of functions in one repetition instead, which takes a second and no Valgrind: it says
what Python does around the kernels, and the tests hold it to the last record.

`operations of <kernel>` counts the operations of the interpreter that a kernel takes when it is run without being
compiled, on a small graph: what an addition to its loops costs, in a second and without Valgrind. Tests hold it, too.

Without `--record` counts are compared with the last record: a rise of more than 5 % is told, and the exit code is 1.
`--record` adds the counts of this commit to the history, `--why` says what a rise is for, `--history` shows it. All
workloads take more than ten minutes; names choose some of them.
"""

from __future__ import annotations

import argparse
import atexit
import cProfile
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from types import FrameType
from typing import Any
from unittest import mock

from benchmarks.recorded import ROOT, path
from dse.errors.terminal import bar

MOST_RISE = 0.05
_NAME = "instructions"
_CALLS_OF = "calls of "
_OPERATIONS_OF = "operations of "
_REFERENCES = re.compile(r"I\s+refs:\s+([\d,]+)")
_GENERIC = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "", "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
_TIMEOUT_S = 1200.0
_LIBRARIES = ("numpy", "numba", "pydantic")


def _fluid(chunks: int, gpus: int = 1) -> Callable[[], object]:
    """Totals of 8 x chunks x gpus tasks by the compiled engine."""
    from benchmarks.graphs import pipeline
    from simulators.engines.fluid import ENGINE

    graph = pipeline(chunks, gpus=gpus)
    return lambda: ENGINE.totals(graph)


def _lowering() -> Callable[[], object]:
    """A schedule of 512 tasks, from a design to the reduced graph."""
    from benchmarks.engine import space_of
    from simulators.overlap.design import OverlapDesign
    from simulators.taskgraph.symmetry import reduce_graph

    design = next(iter(space_of("fluid", num_chunks=64, designs=1, rows=16384).blocks(1))).design
    assert isinstance(design, OverlapDesign)
    return lambda: reduce_graph(design.schedule.lower(design.system, design.workload))


def _end_to_end(engine: str, chunks: int) -> Callable[[], object]:
    """256 designs, from the search space to columns of metrics."""
    from benchmarks.engine import space_of
    from dse.evaluation.calls import BackendSpec, call

    space = space_of(engine, num_chunks=chunks, designs=256, rows=16384)
    spec = BackendSpec("overlap", (("engine", engine), ("fallback", None)))

    def evaluate() -> None:
        for block in space.blocks(spec.make().batch):
            if block.batch is not None:
                call(spec, [block.batch])

    return evaluate


def _enumeration() -> Callable[[], object]:
    """A space of 4,096 designs, into batches and their keys."""
    from benchmarks.engine import space_of

    space = space_of("fluid", num_chunks=8, designs=4096, rows=16384)
    return lambda: [block.content_keys("1") for block in space.blocks(512)]


def _store() -> Callable[[], object]:
    """4,096 results recorded in SQLite."""
    import numpy as np

    from benchmarks.crowd import METRICS, batch
    from dse.store.contract import Context
    from dse.store.result_store import Store
    from dse.store.session import Hold, StoreSession

    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    store = Store(f"sqlite:///{folder}/results.db")
    session = StoreSession(store, Hold(1, Context("bench", "1", "()", METRICS)))
    random = np.random.default_rng(0)

    def record() -> None:
        points, results = batch(random, 4096)
        session.lease([points.keys])
        session.record(points, results, [points.keys])
        session.flush()

    return record


WORKLOADS: Mapping[str, Callable[[], Callable[[], object]]] = {
    "fluid_64": lambda: _fluid(8),
    "fluid_512": lambda: _fluid(64),
    "fluid_4096": lambda: _fluid(64, gpus=8),
    "fluid_100k": lambda: _fluid(12500),
    "lowering_512": _lowering,
    "closed_form_256": lambda: _end_to_end("analytic", 8),
    "end_to_end_256": lambda: _end_to_end("fluid", 8),
    "enumeration_4096": _enumeration,
    "store_4096": _store,
}
"""Name -> what prepares a workload and returns what repeats it."""
CALLS = ("lowering_512", "closed_form_256", "end_to_end_256", "enumeration_4096", "store_4096")
"""Workloads whose calls of functions are counted too, as `calls of <name>`."""
IMPORTS = ("dse", "dse.cli", "simulators.overlap.backend")
"""Modules whose import is counted, as `import <name>`."""


KERNELS = ("many_classes", "few_classes", "lockstep")
"""Kernels of the compiled engine, whose operations are counted as `operations of <name>`."""


def kernel_of(name: str) -> tuple[Callable[..., int], list[Any]]:
    """A compiled kernel and its arguments, the rows of its totals the last but any marks: a pipeline of 8 steps.

    Seven links of their own and HBM are many classes; links that do the same are one in the others.
    """
    import numpy as np

    from benchmarks.graphs import pipeline
    from simulators.engines.fluid import KernelGraph, few_classes, many_classes
    from simulators.taskgraph.symmetry import reduce_graph

    designs = 64 if name == "lockstep" else 1
    graph = pipeline(8) if name == "many_classes" else reduce_graph(pipeline(8, designs=designs, kind="regular")).graph
    prepared, table = KernelGraph.of(graph), graph.table()
    rows, left = np.empty((3 + 2 * len(prepared.kinds), designs)), np.zeros(designs, np.bool_)
    if name == "lockstep":
        numbers = (np.ascontiguousarray(table.T).reshape(-1), rows.reshape(-1), left)
        return few_classes.run_together, [*prepared.structure, *numbers]
    issued, finished = np.empty((2, 1, graph.num_tasks))
    arguments: list[Any] = [*prepared.structure, table, issued, finished, rows]
    return (many_classes.run, arguments) if name == "many_classes" else (few_classes.run, [*arguments, left])


def names() -> list[str]:
    """All workloads."""
    counted = [*(f"{_CALLS_OF}{name}" for name in CALLS), *(f"{_OPERATIONS_OF}{name}" for name in KERNELS)]
    return [*(f"import {name}" for name in IMPORTS), *WORKLOADS, *counted]


def instructions(name: str) -> int:
    """Instructions of one repetition, or its calls. Raises RuntimeError where Valgrind fails or is missing."""
    if name.startswith(_CALLS_OF):
        return calls(name.removeprefix(_CALLS_OF))
    if name.startswith(_OPERATIONS_OF):
        return operations(name.removeprefix(_OPERATIONS_OF))
    if name.startswith("import "):
        return _counted([sys.executable, "-c", name]) - _counted([sys.executable, "-c", "pass"])
    repeat = [sys.executable, "-m", "benchmarks.instructions", "--run", name]
    subprocess.run([*repeat, "1"], cwd=ROOT, env=os.environ | _GENERIC, check=True)  # compiles, if it has to
    return _counted([*repeat, "2"]) - _counted([*repeat, "1"])


def calls(workload: str) -> int:
    """Calls of functions, of Python's and of compiled ones, in one repetition of a workload after another one."""
    repetition, profile = WORKLOADS[workload](), cProfile.Profile()
    repetition()
    profile.runcall(repetition)
    return sum(entry.callcount for entry in profile.getstats())


def operations(name: str) -> int:
    """Operations of the interpreter that a kernel takes in Python, with all that it calls in its own module."""
    import numpy as np

    from simulators.compiled import dispatcher_of

    compiled, arguments = kernel_of(name)
    kernel = dispatcher_of(compiled).py_func
    plain = {part: value.py_func for part, value in kernel.__globals__.items() if hasattr(value, "py_func")}
    count = 0

    def in_kernel(frame: FrameType, event: str, _: object) -> Callable[..., Any]:
        nonlocal count
        count += event == "opcode"
        return in_kernel

    def on_call(frame: FrameType, *_: object) -> Callable[..., Any] | None:
        frame.f_trace_opcodes = frame.f_globals is kernel.__globals__
        return in_kernel if frame.f_trace_opcodes else None

    before = sys.gettrace()
    with mock.patch.dict(kernel.__globals__, plain), np.errstate(all="ignore"):
        sys.settrace(on_call)
        try:
            kernel(*arguments)
        finally:
            sys.settrace(before)
    return count


def _counted(words: Sequence[str]) -> int:
    valgrind = shutil.which("valgrind")
    if valgrind is None:
        raise RuntimeError("valgrind is not on the path: install it, or leave instructions uncounted")
    command = [valgrind, "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null", *words]
    run = subprocess.run(
        command, cwd=ROOT, env=os.environ | _GENERIC, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
    references = _REFERENCES.search(run.stderr)
    if run.returncode or references is None:
        raise RuntimeError(f"{' '.join(words)}: {run.stderr.strip()[-300:]}")
    return int(references[1].replace(",", ""))


def read() -> list[dict[str, Any]]:
    """The history, the newest last; [] where nothing was recorded."""
    if not path(_NAME).exists():
        return []
    history: list[dict[str, Any]] = json.loads(path(_NAME).read_text("utf-8"))["history"]
    return history


def about() -> dict[str, str]:
    """What counts depend on beside the code."""
    return {"python": platform.python_version(), **{name: version(name) for name in _LIBRARIES}}


def rises(counts: Mapping[str, int], last: Mapping[str, Any]) -> dict[str, float]:
    """Workloads that take more than they may over a record, with the rise as a fraction."""
    ratios = {name: count / last["counts"][name] - 1 for name, count in counts.items() if name in last["counts"]}
    return {name: rise for name, rise in ratios.items() if rise > MOST_RISE}


def past(history: Sequence[Mapping[str, Any]], chosen: Sequence[str]) -> str:
    """Lines of the history: each record, then the counts of each workload from record to record, oldest first."""
    lines = [f"{entry['commit'][:12]} {entry['date']} Python {entry['python']}: {entry['why']}" for entry in history]
    for name in chosen:
        counts = [entry["counts"].get(name) for entry in history]
        if any(counts):
            cells = ("-" if count is None else f"{count:,}" for count in counts)
            lines.append(f"{name:30}" + "".join(f"{cell:>16}" for cell in cells))
    return "\n".join(lines or ["nothing was recorded"])


def record(counts: Mapping[str, int], why: str) -> None:
    """Add counts to the history; those that were not counted stay as the last record has them."""
    history = read()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    entry: dict[str, Any] = {"commit": commit.stdout.strip(), "date": f"{datetime.now(UTC):%Y-%m-%d}", **about()}
    entry |= {"why": why, "counts": {**(history[-1]["counts"] if history else {}), **counts}}
    path(_NAME).parent.mkdir(exist_ok=True)
    path(_NAME).write_text(json.dumps({"history": [*history, entry]}, indent=1) + "\n", encoding="utf-8")


def main(words: Sequence[str] | None = None) -> int:
    """Count, compare or record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.instructions", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="workload", help=f"of {', '.join(names())}; all by default")
    parser.add_argument("--record", action="store_true", help="add the counts to the history")
    parser.add_argument("--why", default="", help="what a rise is for")
    parser.add_argument("--history", action="store_true", help="show what was recorded, and count nothing")
    parser.add_argument("--run", nargs=2, metavar=("WORKLOAD", "TIMES"), help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.run:
        repetition = WORKLOADS[options.run[0]]()
        for _ in range(1 + int(options.run[1])):
            repetition()
        return 0
    if unknown := set(options.names) - set(names()):
        parser.error(f"{', '.join(sorted(unknown))}: no such workload; there are {', '.join(names())}")
    chosen, counts = options.names or names(), dict[str, int]()
    if options.history:
        print(past(read(), chosen))
        return 0
    with bar("instructions", len(chosen), "workloads") as advance:
        for name in chosen:
            try:
                counts[name] = instructions(name)
            except (RuntimeError, subprocess.SubprocessError) as error:
                parser.error(str(error))
            advance(1)
    return _finish(counts, record_it=options.record, why=options.why)


def _finish(counts: Mapping[str, int], *, record_it: bool, why: str) -> int:
    """Print counts beside the last record; 1 where some rose and nobody says why."""
    history = read()
    last = history[-1] if history else {"counts": {}}
    alike = all(last.get(name) == value for name, value in about().items())
    for name, count in counts.items():
        before = last["counts"].get(name)
        print(f"{name:38}{count:>18,}" + (f"{100 * (count / before - 1):>+9.1f} %" if before else ""))
    risen = rises(counts, last) if alike else {}
    if history and not alike:
        print("the record is of other versions of Python or libraries: rises are not judged", file=sys.stderr)
    for name, rise in risen.items():
        print(f"{name} takes {100 * rise:.1f} % more than {last['commit'][:12]} did", file=sys.stderr)
    if record_it:
        record(counts, why)
    return 1 if risen and not why else 0


if __name__ == "__main__":
    sys.exit(main())
