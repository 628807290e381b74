"""State by named fields: layouts of 8-byte numbers, and arrays of them that compiled kernels read by name.

A kernel reads `channels[c].length` and writes `clock.now`. A record is one pointer to numba, so that a state of many
numbers is passed to a part as cheaply as one array.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Layout = np.dtype[Any]


def layout(*, int64: str = "", float64: str = "") -> Layout:
    """Layout of a record with these fields, of 8 bytes each; names are separated by blanks.

    >>> layout(int64="length", float64="next bus").names
    ('length', 'next', 'bus')
    """
    return np.dtype([(name, kind) for kind, names in (("<i8", int64), ("<f8", float64)) for name in names.split()])


def table(shape: int | tuple[int, ...], of: Layout, **values: float) -> Any:
    """Array of records of a shape, zero but for the fields that `values` names."""
    rows = np.zeros(shape, of).view(np.recarray)
    for name, value in values.items():
        rows[name] = value
    return rows


def record(of: Layout, **values: float) -> Any:
    """One record, zero but for the fields that `values` names; kernels write its fields in place."""
    return table(1, of, **values)[0]
