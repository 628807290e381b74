"""Design-space exploration: which way of overlapping computation and communication wins, and why.

>>> import dse
>>> dse.__version__
'0.1.0'
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

__version__ = "0.1.0"
__all__ = ["load"]


def load(study: str, output_dir: str | Path = "outputs") -> pd.DataFrame:
    """Results of the newest finished run of a study: one row per evaluated point.

    Columns: scenario, key, status, reason, engine, baseline, on_front, the searched knobs by dotted path, metrics and
    relations (units in their names). Raises dse.errors.ConfigError if the study has no finished run.
    """
    from dse.results.run_folder import Outputs

    return Outputs.latest(Path(output_dir), study).read_table("results")
