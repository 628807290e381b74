"""A study of one's own: it checks no published claims, and leaves it to dse to draw its Pareto fronts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from dse.claims import Claim, Finding

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


class Plain:
    """What a study must have, and nothing in it: `study.module: plain`."""

    allows = ()

    def claims(self) -> list[Claim]:
        """None."""
        return []

    def findings(self, table: pd.DataFrame) -> Mapping[str, Finding]:
        """None."""
        return {}

    def figures(self, table: pd.DataFrame, timelines: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
        """None."""
        return iter(())


STUDY = Plain()
