"""The command `emit`: a schedule as a package of plain PyTorch."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dse.errors import ConfigError, Problem, Problems, pairs
from dse.files import atomic_replacement
from dse.results.run_folder import CommandAnswer, Outputs, writable
from dse.study.plan_again import Present
from dse.study.replay import stored_point
from dse_emit.table import REVERSED, table_of
from dse_emit.writing import Sizes, operator_file, package
from simulators.steps.overlap.sites import SITES, read_schedule
from studies.plan.plan_file import check_plan, read_plan

_SIZES = ("gpus", "m", "n", "k")
_SOURCES = {"study": ("key", "output_dir", "config_dir"), "plan": _SIZES, "schedule": ("pattern", "order", *_SIZES)}
"""Source of a schedule -> what else is read with it."""
# nine digits at most: larger numbers would only fail later, in a GEMM that fits no memory
_WHOLE = re.compile(r"[1-9]\d{0,8}")


@dataclass(frozen=True)
class Emission:
    """A schedule to be written. after: the collective follows the GEMM.

    name: of its folder below the one that is named; "" for that folder.
    """

    schedule: Any
    pattern: str
    ranks: int
    origin: str
    sizes: Sizes
    after: bool
    name: str = ""


def emit(words: Sequence[str]) -> CommandAnswer:
    """`emit study=<name> key=<letters> | plan=<file> gpus=8 | schedule=<text> gpus=8 [out=<folder>]`; see its help.

    Raises ConfigError for a schedule that plain PyTorch cannot run, with what it lacks.
    """
    sources = [name for name in _SOURCES if any(word.startswith(f"{name}=") for word in words)]
    if len(sources) != 1:
        way = "write study=<name> key=<letters>, plan=<file> gpus=8 or schedule=<option> gpus=8"
        raise ConfigError([Problem("emit", "takes one source of a schedule", " ".join(sources) or None, way)])
    # a point has its ranks, pattern and sizes itself: what would be ignored is refused
    options = pairs(words, {sources[0]: ""}, optional=[*_SOURCES[sources[0]], "out"])
    requests = list({"study": _of_point, "plan": _of_plan, "schedule": _of_text}[sources[0]](options))
    folder = writable(options.get("out", "my_overlap")).folder
    lines, refused = list[str](), Problems()
    for request in requests:
        try:
            lines.append(_write(request, folder / request.name))
        except ConfigError as error:
            if len(requests) == 1:
                raise
            refused.found += error.problems  # other sites may do
            lines += [f"{request.name}: not written: {problem}" for problem in error.problems]
    # nothing was written: an error of the command, not a remark
    if len(refused.found) == len(requests):
        refused.done()
    return CommandAnswer(folder, tuple(lines))


def _write(request: Emission, folder: Path) -> str:
    """Write a package; the line on it."""
    table = table_of(request.schedule, request.pattern, request.ranks, after=request.after)
    # gradients go the other way: a layer needs both operators
    reverse = table_of(request.schedule, REVERSED[table.pattern], request.ranks, after=table.gathers)
    texts = package(table, reverse, request.sizes, request.origin)
    writable(str(folder))
    for name, text in texts.items():
        with atomic_replacement(folder / name) as scratch:
            scratch.write_text(text, encoding="utf-8")
    module = f"{folder.name}.{operator_file(table).removesuffix('.py')}"
    run = shlex.join(["torchrun", f"--nproc-per-node={table.ranks}", "-m", module])
    return f"{table.title} ({table.pattern}, {len(table.steps)} steps) written to {folder}/; check it: {run}"


def _of_point(options: dict[str, str]) -> Iterator[Emission]:
    """Yield the schedule of a stored point."""
    outputs = Outputs.latest(Path(options.get("output_dir", "outputs")), options["study"])
    if not options.get("key"):
        raise ConfigError([Problem("key", "is needed with study=", None, "copy the start of a `key` of the results")])
    _, _, design = stored_point(outputs, options["key"], Present.of(options))
    if not hasattr(design, "schedule") or not hasattr(design, "workload"):
        raise ConfigError([Problem("study", "has no overlap schedules", options["study"], "use ficco_sweep, or plan=")])
    overlap = design.workload.overlap()
    gemm, nodes = overlap.gemm, design.system.fabric
    # a collective of several nodes has a rank for each GPU of all of them
    ranks = design.system.node.num_gpus * (1 if nodes is None else nodes.num_nodes)
    sizes = Sizes(int(gemm.m), int(gemm.local_n), int(gemm.local_k))
    origin = f"study {options['study']}, point {options['key']}"
    after = overlap.order == "after"
    yield Emission(design.schedule, overlap.collective.pattern, ranks, origin, sizes, after)


def _of_plan(options: dict[str, str]) -> Iterator[Emission]:
    """Yield the schedule of each site of a plan."""
    plan = read_plan(Path(options["plan"])).plan
    check_plan(plan)
    # serial sites have nothing to overlap
    sites = {name: text for name, text in plan.get("sites", {}).items() if name in SITES and text != "serial"}
    if not sites:
        way = "plan with sites, such as parallel.sequence_parallel=true"
        raise ConfigError([Problem("plan.sites", "has no schedule of a GEMM and its collective", None, way)])
    tokens_split = plan.get("parallel", {}).get("sequence_parallel", True)
    for name, text in sites.items():
        # with tokens split among ranks (sequence parallelism) each rank keeps the sum of its own tokens
        sums = "reduce_scatter" if tokens_split else "all_reduce"
        pattern = "all_gather" if SITES[name].order == "before" else sums
        schedule = read_schedule(str(text), name)
        gpus, after = _number(options, "gpus"), SITES[name].order == "after"
        yield Emission(schedule, pattern, gpus, f"site {name} of a plan", _sizes(options), after, name)


def _of_text(options: dict[str, str]) -> Iterator[Emission]:
    """Yield the schedule that a text names."""
    try:
        schedule = read_schedule(options["schedule"])
    except ConfigError as error:
        problems = [
            Problem(f"schedule {problem.path}".strip(), problem.rule, problem.value, problem.way_out)
            for problem in error.problems
        ]
        raise ConfigError(problems) from None
    pattern = options.get("pattern", "all_gather")
    order = options.get("order", "before")
    if order not in ("before", "after") or ("order" in options and pattern != "all_to_all"):
        rule = "is for an all-to-all: before or after the GEMM"
        raise ConfigError([Problem("order", rule, order, "write pattern=all_to_all order=after, or leave it out")])
    yield Emission(schedule, pattern, _number(options, "gpus"), "the command line", _sizes(options), order == "after")


def _sizes(options: dict[str, str]) -> Sizes:
    return Sizes(**{name: _number(options, name) for name in ("m", "n", "k") if name in options})


def _number(options: dict[str, str], name: str) -> int:
    """A whole number that was typed. Raises ConfigError."""
    text = options.get(name)
    if text is None or not _WHOLE.fullmatch(text):
        raise ConfigError([Problem(name, "must be a whole number above 0", text, f"write {name}=8")])
    return int(text)
