"""Ledger of a study: writes every row once, in the order of arrival, and keeps what concerns all rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from dse.errors.terminal import bar
from dse.results.pareto import Contest, SeenHashes, Standings
from dse.study.plan import Plan
from dse.study.table import ROWS_PER_GROUP, ScenarioRows, Sheet, TableLayout
from dse.values import grid_content_keys, keys_to_hex


class Ledger:
    """Table of a study while it is being written; as a context, one that is discarded where something is raised.

    distinct: number of distinct points explored in each scenario. winners: scenario -> key and design of its best row.
    statuses, engines: number of rows with each.
    """

    def __init__(self, plan: Plan, path: Path) -> None:
        self._layout = TableLayout.of(plan)
        self.sheet = Sheet(path, self._layout)
        contest = Contest(plan.settings.study.answer, tuple(plan.knobs))  # decides between rows with equal objectives
        self._standings = Standings(plan.goals, len(plan.spaces), tuple(plan.backend.metrics), rows=contest)
        # names of rows: written, written as a baseline only, and of these explored later
        self._written, self._unexplored, self._claimed = SeenHashes(), SeenHashes(), SeenHashes()
        # one for each scenario: equal designs of different scenarios are different rows
        self._salts = np.concatenate([grid_content_keys([f"scenario = {name}"], {}) for name in plan.spaces])
        self._held: list[ScenarioRows] = []  # a row group takes many small parts
        self._num_held = 0
        self.distinct = np.zeros(len(plan.spaces), int)
        self.winners: dict[str, tuple[str, BaseModel]] = {}
        self.statuses: Counter[str] = Counter()
        self.engines: Counter[str] = Counter()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.sheet.discard()  # half a table looks like a whole one

    def take(self, part: ScenarioRows) -> None:
        """Take in rows, in the order of the table."""
        self._held.append(part)
        self._num_held += part.points.block.size
        if self._num_held >= ROWS_PER_GROUP:
            self.flush()

    def flush(self) -> None:
        """Write the rows that are held back."""
        parts, self._held, self._num_held = self._held, [], 0
        if not parts:
            return
        sizes = [part.points.block.size for part in parts]
        scenarios = np.repeat([part.scenario for part in parts], sizes)
        explored = np.repeat([part.explored for part in parts], sizes)
        names = np.concatenate([part.points.keys for part in parts]) + self._salts[scenarios]
        fresh = self._written.add(names)  # each row once: a baseline is often a point as well
        self._unexplored.add(names[fresh & ~explored])
        again = np.flatnonzero(explored & ~fresh)  # points whose row was written before, as a baseline
        again = again[self._unexplored.has(names[again])]
        again = again[self._claimed.add(names[again])]  # counted once, however often they come
        newly_explored = scenarios[np.concatenate([np.flatnonzero(explored & fresh), again])]
        self.distinct += np.bincount(newly_explored, minlength=len(self.distinct))
        self._write(parts, np.flatnonzero(fresh), sizes)

    def _write(self, parts: Sequence[ScenarioRows], chosen: NDArray[np.intp], sizes: Sequence[int]) -> None:
        """Write the chosen rows of some parts."""
        batch = self._layout.batch(parts)
        batch = batch if len(chosen) == batch.num_rows else batch.take(chosen)
        self.sheet.append(batch)
        ends = np.cumsum(sizes)
        for scenario, row in self._standings.take(batch):
            part = int(np.searchsorted(ends, chosen[row], side="right"))  # the part in which the row lies
            place = int(chosen[row] - (ends[part] - sizes[part]))
            point = parts[part].points
            assert point.block.batch is not None
            design = point.block.batch.at(place)
            self.winners[self._layout.scenarios[scenario]] = (keys_to_hex(point.keys)[place].decode(), design)
        for counts, name in ((self.statuses, "status"), (self.engines, "engine")):
            column = batch.column(name)
            occurrences = np.bincount(column.indices.to_numpy(), minlength=len(column.dictionary))
            counts.update(
                {text: int(n) for text, n in zip(column.dictionary.to_pylist(), occurrences, strict=True) if n}
            )

    @property
    def num_outcomes(self) -> int:
        """Number of distinct outcomes: rows of a scenario with equal metrics count once."""
        return self._standings.num_outcomes

    def finish(self, label: str) -> int:
        """Fill in which outcomes are on a front; return their number."""
        size = 0

        def marks(batch: Any) -> NDArray[np.bool_]:
            nonlocal size
            on_front = self._standings.marks(batch)
            size += int(on_front.sum())
            return on_front

        long = self.sheet.num_rows > ROWS_PER_GROUP  # a short table is written before a bar could be read
        with bar(f"{label}: writing", self.sheet.num_rows) if long else nullcontext(_silent) as advance:
            self.sheet.finish(marks, advance)
        return size


def _silent(count: int) -> None:
    """Show no progress."""
