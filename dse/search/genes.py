"""Encoding of points as rows of numbers: one gene per knob, active or not.

The gene of a finite knob is the place of its value, that of an interval is the position in it (0...1, on a logarithmic
scale where the knob is logarithmic); the gene of an inactive knob is -1. Equal rows are the same point.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dse.space import Assignment, Knob, Space

Rows = NDArray[np.float64]
"""Genes [B, K] of B points over K knobs, in the order of the space's knobs."""


class Genes:
    """Conversion between points of a space and rows of genes.

    sizes [K]: number of values of a knob, 0 for an interval. ordered [K]: whether neighbouring genes mean similar
    values.
    """

    def __init__(self, space: Space) -> None:
        self._space, self.knobs = space, space.order
        self.sizes = np.array([len(knob.values) for knob in self.knobs])
        self.ordered = np.array([not knob.values or knob.is_ordered for knob in self.knobs])  # intervals are ordered
        deciding = {knob.path for knob in space.deciding_knobs}
        # places of the knobs on whose values it depends which others count
        self._deciding = np.flatnonzero([knob.path in deciding for knob in self.knobs])
        self._places: dict[int, dict[tuple[type, Any], int]] = {}  # by column, once they are asked for
        # genes of the deciding knobs -> mask of the knobs that count [K]
        self._counting: dict[tuple[float, ...], NDArray[np.bool_]] = {}

    def draw(self, count: int, random: np.random.Generator) -> Rows:
        """Draw points, uniform and independent in every knob."""
        return self.settle(np.full((count, len(self.knobs)), -1.0), random)  # nothing is given: all genes are drawn

    def values(self, chosen: NDArray[np.intp], random: np.random.Generator) -> NDArray[np.float64]:
        """Draw a uniform value for each gene, given by its place among the knobs."""
        drawn, sizes = random.random(chosen.shape), self.sizes[chosen]
        return np.where(sizes > 0, np.floor(drawn * sizes), drawn)  # below `sizes`, as drawn numbers are below 1

    def settle(self, rows: Rows, random: np.random.Generator) -> Rows:
        """Make rows valid points: genes of inactive knobs become -1, missing genes of active knobs are drawn."""
        columns = np.broadcast_to(np.arange(len(self.knobs)), rows.shape)
        rows = np.where(rows < 0, self.values(columns, random), rows)
        # few combinations occur: each is resolved once
        kinds, where = np.unique(rows[:, self._deciding], axis=0, return_inverse=True)
        counting = np.array([self._counts(tuple(kind.tolist())) for kind in kinds]).reshape(len(kinds), len(self.knobs))
        return np.where(counting[where.reshape(-1)], rows, -1.0)

    def _counts(self, deciding: tuple[float, ...]) -> NDArray[np.bool_]:
        if deciding not in self._counting:
            knobs = [self.knobs[place] for place in self._deciding]
            point = {knob.path: _value(knob, gene) for knob, gene in zip(knobs, deciding, strict=True)}
            counting = self._space.active_paths(point)
            self._counting[deciding] = np.array([knob.path in counting for knob in self.knobs])
        return self._counting[deciding]

    def points(self, rows: Rows) -> list[Assignment]:
        """Decode rows to points."""
        return [
            {knob.path: _value(knob, gene) for knob, gene in zip(self.knobs, row, strict=True) if gene >= 0.0}
            for row in rows.tolist()
        ]

    def rows(self, points: Sequence[Mapping[str, Any]]) -> Rows:
        """Encode points, whose values must be values of the knobs, as written or as designs hold them."""
        rows = np.full((len(points), len(self.knobs)), -1.0)
        for row, point in enumerate(points):
            for column, knob in enumerate(self.knobs):
                if knob.path in point:
                    rows[row, column] = self._gene(column, knob, point[knob.path])
        return rows

    def _gene(self, column: int, knob: Knob, value: Any) -> float:
        if knob.values:
            if column not in self._places:
                self._places[column] = _places(knob)
            return float(self._places[column][_name(value)])
        # position in the interval, of logarithms where the knob is logarithmic
        low, high, at = (map(math.log, (knob.low, knob.high, value))) if knob.log else (knob.low, knob.high, value)
        return (at - low) / (high - low)


def _places(knob: Knob) -> dict[tuple[type, Any], int]:
    """Places of the values of a knob, as they are written and as numbers."""
    # `4 MiB` as typed is 4194304 in a design
    kinds = (knob.values,) if knob.numbers in (None, knob.values) else (knob.numbers or (), knob.values)
    return {_name(value): place for values in kinds for place, value in enumerate(values)}


def _name(value: Any) -> tuple[type, Any]:
    """Key of a value that distinguishes 1 from True."""
    return bool if isinstance(value, bool) else object, value  # 1 == True, and both have one hash


def _value(knob: Knob, gene: float) -> Any:
    if knob.values:
        return knob.values[int(gene)]
    if knob.log:
        return min(knob.high, knob.low * (knob.high / knob.low) ** gene)  # rounding may lead beyond the end
    return min(knob.high, knob.low + gene * (knob.high - knob.low))
