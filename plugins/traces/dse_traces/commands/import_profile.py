"""`profile import`: profiles of one rank or of several, read, replayed and written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from dse.errors import pairs
from dse.results.run_folder import Outputs, writable
from dse_calibration.calibrate import interval_lines
from dse_calibration.machine_file import write_machine
from dse_traces.commands import one_rank, several_ranks
from dse_traces.commands.lines import unused_patterns
from dse_traces.laws.own_residuals import NO_GEMMS, residuals, with_residuals
from dse_traces.profile.kernel_classes import OPTION, read_patterns
from dse_traces.profile.kernels import Profile, classify
from dse_traces.profile.replay import replay
from dse_traces.readers.formats import files_of
from simulators.hardware.machine import tree_of

if TYPE_CHECKING:
    from rich.table import Table

_Job = tuple[Iterable["Table | str"], Callable[[Outputs], None], str]
"""What to print, how to write it, and names of the files."""


def trace_import(words: Sequence[str]) -> int:
    """`profile import <profile> [kernels=<file>] [system=<machine>] [out=<folder>]`: read, replay and write a profile,
    and print what it says; with a machine also its file, with intervals of its own.

    Several files (a folder, a pattern, a list), or GPUs of one file, are ranks of one run.
    """
    from dse.results import report

    typed = [word if "=" in word or place else f"profile={word}" for place, word in enumerate(words)]
    options = pairs(typed, {"profile": ""}, optional=["out", "system", OPTION])
    # read first: an unknown machine is refused before minutes of reading profiles
    tree = tree_of(options["system"]) if "system" in options else None
    patterns = read_patterns(options.get(OPTION, ""))
    paths = files_of(options["profile"])
    name = paths[0].name.partition(".")[0] if paths else ""
    profiles, unread = several_ranks.read_files(paths)
    profiles = [classify(profile, patterns) for profile in profiles]
    lines, write, files = _one(profiles[0]) if len(profiles) == 1 else _several(profiles, unread)
    outputs = writable(options.get("out", f"outputs/trace_import/{name}"))
    console = report.console()
    for line in lines:
        console.print(line, soft_wrap=True)
    for line in unused_patterns(profiles, patterns):
        console.print(line, soft_wrap=True)
    write(outputs)
    if tree is not None:
        groups = residuals(profiles, tree)
        write_machine(with_residuals(tree, groups), outputs)
        for line in interval_lines(groups) if groups else (NO_GEMMS,):
            console.print(line, soft_wrap=True)
        files = f"{tree['name']}.yaml, {files}"
    console.print(f"written to {outputs.folder}/: {files}, figures/timeline.*", soft_wrap=True)
    return 0


def _one(profile: Profile) -> _Job:
    done = replay(profile)
    return one_rank.answer(done), partial(one_rank.write, done), "kernels.parquet, profile.yaml"


def _several(profiles: Sequence[Profile], unread: Sequence[str]) -> _Job:
    ranks, done = several_ranks.import_ranks(profiles, unread)
    lines = several_ranks.answer(ranks, done)
    return lines, partial(several_ranks.write, ranks, done), "kernels.parquet, collectives.parquet, ranks.yaml"
