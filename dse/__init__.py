"""Design-space exploration: which way of overlapping computation and communication wins, and why.

>>> import dse
>>> dse.__version__
'0.1.0'
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

__version__ = "0.1.0"
__all__ = ["load"]


class _MovedModules(MetaPathFinder):
    """Say where a module went that stood elsewhere before: it is asked last, for modules that nobody has found."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Raise ModuleNotFoundError with the present name of a module of ours that was renamed; else None."""
        if fullname.startswith(("dse.", "simulators.")):
            lines = (Path(__file__).parent / "moved_modules.csv").read_text("utf-8").splitlines()
            present = dict(line.split(",") for line in lines if "," in line).get(fullname)
            if present is not None:
                raise ModuleNotFoundError(f"{fullname} is {present} now", name=fullname)
        return None


sys.meta_path.append(_MovedModules())


def load(study: str, output_dir: str | Path = "outputs") -> pd.DataFrame:
    """Results of the newest finished run of a study: one row per evaluated point.

    Columns: scenario, key, status, reason, engine, baseline, on_front, the searched knobs by dotted path, metrics and
    relations (units in their names). Raises dse.errors.ConfigError if the study has no finished run.
    """
    from dse.results.run_folder import Outputs

    return Outputs.latest(Path(output_dir), study).read_table("results")
