"""Design-space exploration: which way of overlapping computation and communication wins, and why.

>>> import dse
>>> dse.__version__
'0.1.0'
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

    from dse.results.study_result import StudyResult

__version__ = "0.1.0"
__all__ = ["load", "result", "run"]


def run(
    study: str,
    *,
    overrides: Sequence[str] = (),
    config_dir: str | Path | None = None,
    verbose: bool = False,
    **values: Any,
) -> StudyResult:
    """Run a study, or take it up where it was interrupted, as `python -m dse study=<name>` does.

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
        A warning, not raised: more points failed than `executor.max_failed_fraction` allows.
    """
    from dse.config.compose import request as compose
    from dse.config.overrides import override
    from dse.run_study import run as evaluate

    values = {"figures": "none", "verbose": verbose, **values}
    words = [f"study={study}", *overrides, *(override(name, value) for name, value in values.items())]
    request = compose(words, None if config_dir is None else Path(config_dir))
    with contextlib.ExitStack() as quiet:
        if not verbose:
            quiet.enter_context(contextlib.redirect_stdout(io.StringIO()))
            quiet.enter_context(contextlib.redirect_stderr(io.StringIO()))
        folder, code = evaluate(request)
    finished = result(folder)
    if code:
        warnings.warn(f"points failed: see `status` and `reason` of the table, {finished!r}", stacklevel=2)
    return finished


def result(run: str | Path, output_dir: str | Path = "outputs") -> StudyResult:
    """Result of a finished run, by `<study>` (its newest), `<study>/<time>` or its folder; nothing is evaluated.

    Raises dse.errors.ConfigError where there is none.
    """
    from dse.results.finished_run import FinishedRun
    from dse.results.study_result import StudyResult

    return StudyResult(FinishedRun.find(Path(output_dir), str(run)).folder)


def load(study: str, output_dir: str | Path = "outputs") -> pd.DataFrame:
    """Results of the newest finished run of a study: one row per evaluated point.

    Columns: scenario, key, status, reason, engine, baseline, on_front, the searched knobs by dotted path, metrics and
    relations (units in their names). Raises dse.errors.ConfigError if the study has no finished run.
    """
    from dse.results.run_folder import Outputs

    return Outputs.latest(Path(output_dir), study).read_table("results")
