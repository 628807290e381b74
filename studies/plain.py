"""A study of one's own: it checks no published claims, and leaves it to dse to draw its Pareto fronts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from dse.results.claims import Claim, Finding
from dse.results.finished_run import Finished

if TYPE_CHECKING:
    import pandas as pd

    from dse.plots import Figure


class Plain:
    """A study without claims or figures of its own: `study.module: plain`.

    allows: changes that leave its claims testable. columns: paths of a design that claims and figures read; they are
    recorded whether or not `study.recorded` lists them.
    """

    allows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()

    def claims(self) -> list[Claim]:
        """None."""
        return []

    def findings(self, table: pd.DataFrame) -> Mapping[str, Finding]:
        """None."""
        return {}

    def further(self, run: Finished) -> Mapping[str, Finding]:
        """Ours for claims that need more than the table: the run in its folder."""
        return {}

    def extras(self, run: Finished) -> Iterator[tuple[str, Any]]:
        """(name, what is written beside the table): a JSON value, a DataFrame or a figure."""
        return iter(())

    def figures(self, table: pd.DataFrame, timelines: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
        """None."""
        return iter(())


STUDY = Plain()
