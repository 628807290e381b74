"""A backend whose winners flip where a formula says: three ways to move something over a link, as vectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, Field

from dse.backend import STATUSES, Batch, Columns, Metric, Replay, Results, Tree
from dse.errors import Problem, Problems
from dse.values import Frozen, put
from dse.values.units import BytesPerSecond, Integer, Seconds


class Way(Frozen):
    """How it is moved, and in how many chunks."""

    kind: Literal["dma", "cu", "detour"]
    chunks: Integer


class Link(Frozen):
    """What it is moved by. lanes: whole; more of them make everything faster but the detour."""

    bytes_per_s: BytesPerSecond
    setup_s: Seconds
    cu_bytes_per_s: BytesPerSecond
    share: Annotated[float, Field(ge=0, le=1)]
    lanes: Integer
    medium: Literal["copper", "light"] = "copper"


class Load(Frozen):
    """What is moved."""

    moved_bytes: float


class Race(Frozen):
    """One point."""

    way: Way
    link: Link
    load: Load


def times(kind: str, chunks: Any, link: Mapping[str, Any], moved_bytes: float) -> Any:
    """Seconds; two chunks are best, and nothing else but `kind` decides which constants count."""
    spoilt = 1 + 0.1 * (chunks - 2) ** 2
    if kind == "dma":
        return spoilt * (link["setup_s"] + moved_bytes / (link["bytes_per_s"] * link["lanes"]))
    if kind == "cu":
        return spoilt * moved_bytes / (link["cu_bytes_per_s"] * link["lanes"])
    return spoilt * link["bytes_per_s"] * 1e-9


class Formula:
    """The closed form."""

    version = "1"
    batch = 1000
    metrics: Mapping[str, Metric] = {"time_s": Metric("s", "how long"), "held_bytes": Metric("B", "what is held")}
    relations: Mapping[str, Metric] = {}

    def sections(self, tree: Tree) -> None:
        """Whatever there is."""

    def scenarios(self, tree: Tree) -> Mapping[str, Tree]:
        """Two loads."""
        return {name: {**tree, "load": {"moved_bytes": size}} for name, size in (("small", 2e9), ("large", 8e9))}

    def design(self, tree: Tree) -> Race:
        """The validated point."""
        check = Problems()
        kinds: dict[str, type[BaseModel]] = {"way": Way, "link": Link, "load": Load}
        parts: dict[str, Any] = {name: check.model(kind, tree.get(name), path=name) for name, kind in kinds.items()}
        check.done()
        return Race.model_construct(**parts)

    def problems(self, design: BaseModel) -> Sequence[Problem]:
        """None."""
        return []

    def condition(self, path: str, tree: Tree) -> Mapping[str, Any] | None:
        """All count."""
        return {} if path.partition(".")[2] in tree.get(path.partition(".")[0], {}) else None

    def is_axis(self, path: str, design: BaseModel) -> bool:
        """Numbers."""
        return path not in ("way.kind", "link.medium")

    def screen(self, batches: Sequence[Batch]) -> list[Results]:
        """All are legal."""
        return [self._results(batch.size, {}) for batch in batches]

    def evaluate(self, batches: Sequence[Batch]) -> list[Results]:
        """The formula over arrays."""
        return [self._grid(batch) for batch in batches]

    def _grid(self, batch: Batch) -> Results:
        point: Any = batch.design
        for path in batch.axes:
            point = put(point, path, batch.column(path))
        seconds = times(point.way.kind, point.way.chunks, dict(point.link), point.load.moved_bytes)
        chunk_bytes = point.load.moved_bytes / point.way.chunks
        columns = {"time_s": seconds, "held_bytes": chunk_bytes}
        return self._results(
            batch.size, {name: np.broadcast_to(column, (batch.size,)) for name, column in columns.items()}
        )

    def _results(self, size: int, metrics: dict[str, Any]) -> Results:
        none = np.zeros(size, np.int32)
        return Results(np.full(size, STATUSES.index("ok"), np.uint8), metrics, none, none)

    def relate(self, point: Columns, baseline: Columns) -> Columns:
        """Nothing."""
        return {}

    def replay(self, design: BaseModel) -> Replay:
        """Nothing."""
        return Replay((), {})

    def facts(self, design: BaseModel) -> Sequence[tuple[str, Any, str, str]]:
        """None."""
        return []


BACKEND = Formula
