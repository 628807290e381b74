"""One stored point in full: `results timeline study=<name> key=<its first letters>`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dse.backend import Replay
from dse.errors import ConfigError, Problem, pairs
from dse.results import output_files, report
from dse.results.output_files import frame, plain
from dse.results.run_folder import CommandAnswer, FinishedRun, Outputs, results
from dse.study.plan import Plan
from dse.study.plan_again import Present, plan_again
from dse.values import content_key as identity


def replay_point(outputs: Outputs, start: str, present: Present) -> list[Path]:
    """Run one point of a stored table again; write its timeline as picture and as trace (`chrome://tracing`, Perfetto).

    start: the first letters of its key. Raises ConfigError where no point or several have such a key, or where code or
    configuration have changed since.
    """
    row, planned, replay = run_again(outputs, start, present)
    return report.write_timeline(outputs, row, replay, knobs=planned.knobs)


def run_again(outputs: Outputs, start: str, present: Present) -> tuple[Any, Plan, Replay]:
    """The row of a stored point, its study, and its replay. Raises ConfigError as `replay_point` does."""
    planned, row, design = stored_point(outputs, start, present)
    replay = planned.backend.replay(design)
    if not replay.intervals:  # closed forms and programs outside
        raise ConfigError([Problem("simulator", "has metrics only, no timeline", planned.spec.name)])
    return row, planned, replay


def stored_point(outputs: Outputs, start: str, present: Present) -> tuple[Plan, Any, Any]:
    """The plan of a finished run, the row of its table whose key begins with `start`, and the design of that row.

    Raises ConfigError as `replay_point` does.
    """
    row = _row(outputs, start)
    planned = plan_again(FinishedRun(outputs.folder), present)
    return planned, row, _design(planned, row)


def _row(outputs: Outputs, start: str) -> Any:
    """Return the row whose key begins with `start`; of the other rows only keys are read."""
    import numpy as np

    with results(outputs.results, ()) as file:  # all columns
        for group in range(file.num_groups):
            keys = file.group(group, ["key"]).column("key").to_pylist()
            matches = [place for place, name in enumerate(keys) if name.startswith(start)]
            if len({keys[place] for place in matches}) > 1:  # one key may have several rows, as scenarios share designs
                raise ConfigError([Problem("key", "begins several keys", start, "write more of its letters")])
            if matches:
                return frame(file.path, file.group(group).take(np.array(matches[:1]))).iloc[0]
    way = "copy the start of a `key` of results.parquet"
    raise ConfigError([Problem("key", f"is no point of {outputs.folder.name}", start, way)])


def _design(planned: Plan, row: Any) -> Any:
    """Return the design of a row, which must have the row's key."""
    space = planned.spaces.get(str(row["scenario"]))
    chosen = {path: plain(row[path]) for path in planned.knobs if path in row.dropna()}
    blocks = [] if space is None else list(space.resolve(chosen))
    for block in blocks:
        # present code may make another design of the same values
        if block.design is not None and identity(block.design, *planned.context.words) == row["key"]:
            return block.design
    rule = "was made by other code or another configuration, and cannot be run again as it was"
    raise ConfigError([Problem("key", rule, row["key"], "run the study again, or give its config_dir=")])


@output_files.working_on_folders
def timeline(words: Sequence[str]) -> CommandAnswer:
    """`results timeline study=<name> key=<its first letters> [config_dir=] [command=] [output_dir=]`: one point."""
    options = pairs(words, {"study": "", "key": "", "output_dir": "outputs"}, optional=("config_dir", "command"))
    run = FinishedRun.find(Path(options["output_dir"]), options["study"])
    files = replay_point(run.outputs, options["key"], Present.of(options))
    return CommandAnswer(run.folder, tuple(map(str, files)), f"figures/{files[0].stem}")
