"""What T3's tracking would be worth on MI300X: predictions that nobody has published anything about."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from dse.claims import Claim, Finding
from dse.finished import Finished
from studies.t3 import T3

if TYPE_CHECKING:
    import pandas as pd


class T3OnMI300X(T3):
    """The figures and tables of `study=t3`, and no claims: those are about the GPU that T3 simulates."""

    def claims(self) -> list[Claim]:
        """None."""
        return []

    def findings(self, table: pd.DataFrame) -> Mapping[str, Finding]:
        """None."""
        return {}

    def further(self, run: Finished) -> Mapping[str, Finding]:
        """None."""
        return {}


STUDY = T3OnMI300X()
