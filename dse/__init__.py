"""Design-space exploration: which way of overlapping computation and communication wins, and why.

>>> import dse
>>> dse.__version__
'0.4.0'
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

    from dse.results.study_result import StudyResult

__version__ = "0.4.0"
VIEWS = {"optuna": "dse.tracking.optuna_storage:optuna_studies"}
"""Views of a finished run, by name (`dse.plugins`)."""
__all__ = ["codesign", "load", "optimise", "plan", "result", "run"]


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__", "errors"])


def run(
    study: str,
    *,
    overrides: Sequence[str] = (),
    config_dir: str | Path | None = None,
    verbose: bool = False,
    **values: Any,
) -> StudyResult:
    """Run a study, or take it up where it was interrupted, as `python -m dse run <study>` does.

    Parameters
    ----------
    study
        Name of a study; `python -m dse studies` lists them.
    overrides
        Words of the command line, such as `"+space.system.gpu.num_cus=range(64,304,16)"`.
    config_dir
        A folder of your own configurations, as `--config-dir` takes it.
    verbose
        Print what the command prints, instead of nothing.
    **values
        Values and options by name, with `__` for each dot of a path: `system="h100_8"`, `budget__trials=200`,
        `system__gpu__num_cus=228`, `workload__shapes=table`. Numbers, texts with units, lists, mappings and
        DataFrames are understood. Figures are not drawn (`figures="none"`) unless you ask for them.

    Returns
    -------
    StudyResult
        The tables, the answer, the claims and the figures of the run.

    Raises
    ------
    dse.errors.ConfigError
        If the configuration is refused; nothing was evaluated. It names every problem.
    dse.errors.Broken
        If the simulator fails every time.
    OSError
        If the disk or the database fails; what was recorded is kept.
    UserWarning
        A warning, not raised: more points failed than `executor.max_failed_fraction` allows, or no point has a result.
    """
    from dse import plugins
    from dse.config.overrides import override

    values = {"figures": "none", "verbose": verbose, **values}
    words = [*overrides, *(override(name, value) for name, value in values.items())]
    words += [] if config_dir is None else [f"--config-dir={config_dir}"]
    with contextlib.ExitStack() as quiet:
        if not verbose:
            quiet.enter_context(contextlib.redirect_stdout(io.StringIO()))
            quiet.enter_context(contextlib.redirect_stderr(io.StringIO()))
        if command := plugins.command_of_study(study):
            answer = plugins.load("command", command)(words)
            folder, code = answer.folder, answer.code
        else:
            folder, code = _evaluate([f"study={study}", *words])
    finished = result(folder)
    if code:
        without = not (finished.table["status"] == "ok").any()
        reason = finished.answer if without and finished.answer else "points failed"
        warnings.warn(f"{reason}: see `status` and `reason` of the table, {finished!r}", stacklevel=2)
    return finished


def _evaluate(words: Sequence[str]) -> tuple[Path, int]:
    """Run the study of a command line; its folder and exit code."""
    from dse.config.compose import request
    from dse.config.options import overrides, own_folder
    from dse.run_study import run as evaluate
    from dse.study.plan import plan as planned

    return evaluate(planned(request(overrides(words), own_folder(words))))


def plan(**values: Any) -> StudyResult:
    """Plan how a model's step is parallelised and overlapped, as `python -m dse plan` does.

    values: as those of `run`, such as `model="llama3_70b"`, `system="h100_8"`, `parallel="auto"`. Raises as `run` does.
    """
    return run("plan", **values)


def codesign(**values: Any) -> StudyResult:
    """Find the best machine for weighted workloads within a budget, as `python -m dse codesign` does.

    values: as those of `run`, such as `budget__area_mm2=900`. Raises as `run` does, and ConfigError where no installed
    plug-in offers the command.
    """
    from dse import plugins

    plugins.load("command", "codesign")
    return run("codesign", **values)


def optimise(
    function: Callable[..., Any],
    space: Mapping[str, Any],
    *,
    objectives: Mapping[str, str | None],
    files: Sequence[str | Path] = (),
    name: str = "",
    **values: Any,
) -> StudyResult:
    """Search the arguments of a Python function, in worker processes; known points are not evaluated again.

    Parameters
    ----------
    function
        Function at the top level of a file, which workers import, so a script calls this under `if __name__ ==
        "__main__":`. It takes arguments by name and returns a number, or metrics by name; `{"status": "infeasible",
        "reason": "..."}` for arguments without a result. A call that raises is a failed point.
    space
        Argument -> its values: a list, a `range`, an interval `(low, high)`, or a sweep as the command line writes it,
        such as `"tag(log,interval(1e-5,1e-1))"`. A single number or text is an argument that is not searched.
    objectives
        Metric -> `"minimize"`, `"maximize"`, or None for one that is recorded only. The first decides the winner. A
        name such as `time_s` gives the unit.
    files
        Files that the function reads; when one changes, points are evaluated again, as when the code does.
    name
        Name of the study; the function's, unless given.
    **values
        As those of `run`, such as `search="tpe"`, `budget__trials=200`, `executor__timeout_s=60`.

    Returns
    -------
    StudyResult
        The result; its `optuna` is the study of Optuna. Searched arguments are columns `arguments.<name>`.

    Raises
    ------
    dse.errors.ConfigError
        If the function is in no file, or anything else is refused.
    """
    from dse.config.function_study import FunctionStudy

    study = FunctionStudy(function, space, objectives, files, name)
    folder = study.write(Path(values.get("output_dir", "outputs")) / "functions")
    return run(study.study, config_dir=folder, **values)


def result(run: str | Path, output_dir: str | Path = "outputs") -> StudyResult:
    """Result of a finished run, by `<study>` (its newest), `<study>/<time>` or its folder; nothing is evaluated.

    Raises dse.errors.ConfigError where there is none.
    """
    from dse.results.run_folder import FinishedRun
    from dse.results.study_result import StudyResult

    return StudyResult(FinishedRun.find(Path(output_dir), str(run)).folder)


def load(study: str, output_dir: str | Path = "outputs") -> pd.DataFrame:
    """Results of the newest finished run of a study: one row per evaluated point.

    Columns: scenario, key, status, reason, engine, baseline, on_front, the searched knobs by dotted path, metrics and
    relations (units in their names). Raises dse.errors.ConfigError if the study has no finished run.
    """
    from dse.results.run_folder import Outputs

    return Outputs.latest(Path(output_dir), study).read_table("results")
