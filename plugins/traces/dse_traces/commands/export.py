"""`profile export`: a point of a study, or a profile, as execution traces that other simulators run.

Written into the folder: `<name>.<rank>.et` for each rank. A design that is simulated by one GPU, which stands for all,
gives every rank the same trace; ranks of a design that is simulated with all GPUs have their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dse.errors import ConfigError, Problem, pairs
from dse.errors.parsing import whole_number
from dse.results.output_files import working_on_folders
from dse.results.run_folder import Outputs, writable
from dse.study.plan_again import Present
from dse.study.replay import stored_point
from dse_chakra.files import ExecutionTrace, write_chakra
from dse_traces.commands.lines import unknown_lines, unused_patterns
from dse_traces.profile.kernel_classes import OPTION, read_patterns
from dse_traces.profile.kernels import classify
from dse_traces.profile.replay import replay
from dse_traces.readers.chakra_graphs import collective_of, trace_of_profile, trace_of_run
from dse_traces.readers.formats import read

# a file is written for each: more would fill a disk by a typing error
_MOST_RANKS = 1 << 16


@working_on_folders
def chakra_export(words: Sequence[str]) -> int:
    """`profile export study=<name> key=<its first letters>`, or `profile export profile=<file>`: write traces."""
    from dse.results import report

    kind = "profile" if any(word.startswith("profile=") for word in words) else "study"
    needed = {"profile": {"profile": ""}, "study": {"study": "", "key": "", "output_dir": "outputs"}}[kind]
    optional = ["out", "ranks", *(["config_dir", "command"] if kind == "study" else [OPTION])]
    options = pairs(words, needed, optional=optional)
    name, traces, lines = _of_profile(options) if kind == "profile" else (*_of_point(options), [])
    folder = writable(options.get("out", f"outputs/chakra_export/{name}")).folder
    for rank, trace in enumerate(traces):
        write_chakra(folder / f"{name}.{rank}.et", trace)
    console = report.console()
    for line in (*lines, *answer(traces)):
        console.print(line, soft_wrap=True)
    console.print(f"written to {folder}/: {name}.<rank>.et, rank 0 to {len(traces) - 1}", soft_wrap=True)
    return 0


def answer(traces: Sequence[ExecutionTrace]) -> Iterator[str]:
    """Yield what is written of the first rank: nodes by type, collectives, and what is not written."""
    first = traces[0]
    types = [node.collective or node.type for node in first.nodes]
    counts = ", ".join(f"{types.count(name):,} {name}" for name in dict.fromkeys(types))
    ends = [node.start_s + node.seconds for node in first.nodes]
    yield f"{len(first.nodes):,} nodes a rank ({counts}), {1e6 * max(ends):,.2f} µs"
    for reason, count in first.dropped.items():
        yield f"not written: {count:,} {reason}"


def _of_profile(options: dict[str, str]) -> tuple[str, list[ExecutionTrace], list[str]]:
    path, patterns = Path(options["profile"]), read_patterns(options.get(OPTION, ""))
    profile = classify(read(path), patterns)
    # one rank was recorded: all others are taken to be like it
    traces = [trace_of_profile(replay(profile))] * _ranks(options, 1)
    lines = [*unknown_lines(profile), *unused_patterns([profile], patterns)]
    return path.name.partition(".")[0], traces, lines


def _of_point(options: dict[str, str]) -> tuple[str, list[ExecutionTrace]]:
    outputs = Outputs.latest(Path(options["output_dir"]), options["study"])
    planned, row, design = stored_point(outputs, options["key"], Present.of(options))
    name = f"{options['study']}_{str(row['key'])[:8]}"
    return name, traces_of_design(planned.backend, design, options)


def traces_of_design(backend: Any, design: Any, options: dict[str, str]) -> list[ExecutionTrace]:
    """The execution traces of a design, one for each rank. Raises ConfigError where it lowers to no task graph."""
    timeline = backend.timeline(design)
    if timeline is None:
        raise ConfigError([Problem("simulator", "lowers designs to no task graph, so there is none to write")])
    node = getattr(getattr(design, "system", None), "node", None)
    size = int(getattr(node, "num_gpus", 1))
    how: dict[str, Any] = {"collective": _collective(design), "group_size": size}
    gpus = np.unique(timeline.graph.gpu).tolist()
    if len(gpus) > 1:
        return [trace_of_run(timeline, gpu=gpu, **how) for gpu in gpus]
    return [replace(trace_of_run(timeline, gpu=gpus[0], **how))] * _ranks(options, size)


def _collective(design: Any) -> str:
    """The collective of a design's workload, or that of its gradients; "" where it has none, or several."""
    operators = getattr(getattr(design, "workload", None), "operators", {})
    patterns = {op.pattern for op in operators.values() if hasattr(op, "pattern")}
    # a training step: gradients are its collective, scattered from ZeRO 2 on
    if (parallel := getattr(design, "parallel", None)) is not None:
        patterns = {"reduce_scatter" if getattr(parallel, "zero", 0) > 1 else "all_reduce"}
    # with several patterns the name of a task must decide alone
    return collective_of(patterns.pop()) if len(patterns) == 1 else ""


def _ranks(options: dict[str, str], default: int) -> int:
    """Number of ranks that are written. Raises ConfigError."""
    text = options.get("ranks", str(default))
    number = whole_number(text)
    if number is None or not 1 <= number <= _MOST_RANKS:
        raise ConfigError([Problem("ranks", f"is no whole number from 1 to {_MOST_RANKS}", text)])
    return number
