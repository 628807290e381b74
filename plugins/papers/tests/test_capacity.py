"""Memory that copies would take: the published table, the buffer, arrays, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from dse_papers.jitq.capacity import Base, Buffer, Copies, WeightCopies, grid
from simulators.hardware.pim import Format
from tests.support import shipped

FORMATS = {name: Format.model_validate(tree) for name, tree in shipped("format").items()}


def copy(name: str, *, rows: bool = True, columns: bool = True) -> WeightCopies:
    return WeightCopies(format=FORMATS[name], rows=rows, columns=columns)


BASES = {
    "fp32 W": Base(weights="fp32"),
    "bf16 W, G": Base(weights="bf16", gradients="bf16"),
    "bf16 W, G, m": Base(weights="bf16", gradients="bf16", momentum="bf16"),
    "bf16 W, G, m, v": Base(weights="bf16", gradients="bf16", momentum="bf16", variance="bf16"),
    "fp32 W, m, v": Base(weights="fp32", momentum="fp32", variance="fp32"),
    "fp32 W, m, v, bf16 G": Base(weights="fp32", gradients="bf16", momentum="fp32", variance="fp32"),
    "fp32 W, G, m, v": Base(weights="fp32", gradients="fp32", momentum="fp32", variance="fp32"),
}
COPIES = {
    "MX9": Copies(forward=copy("mx9")),
    "MX6": Copies(forward=copy("mx6")),
    "MX9 and MX6": Copies(forward=copy("mx9"), backward=copy("mx6")),
    "MX9 forward, MX6 backward": Copies(forward=copy("mx9", columns=False), backward=copy("mx6", rows=False)),
}
TABLE = {  # saved [%] (derived), by bytes per parameter of the base and of the copies
    4: (36.0, 27.3, 48.4, 31.9),
    6: (27.3, 20.0, 38.5, 23.8),
    8: (22.0, 15.8, 31.9, 19.0),
    12: (15.8, 11.1, 23.8, 13.5),
    14: (13.8, 9.7, 21.1, 11.8),
    16: (12.3, 8.6, 19.0, 10.5),
}


def test_the_grid_is_the_table() -> None:
    rows = grid(BASES, COPIES)
    assert len(rows) == len(BASES) * len(COPIES)
    assert [base.bytes_per_parameter for base in BASES.values()] == [4, 4, 6, 8, 12, 14, 16]
    assert [copies.bytes_per_parameter for copies in COPIES.values()] == [2.25, 1.5, 3.75, 1.875]
    for row in rows:
        expected = TABLE[int(row["base_bytes"])][list(COPIES).index(str(row["copies"]))]
        assert 100 * float(row["saved"]) == pytest.approx(expected, abs=0.051)


def test_two_accountings_save_what_was_published() -> None:
    """24 %: which one was meant is not known."""
    near = [(row["base"], row["copies"]) for row in grid(BASES, COPIES) if round(100 * float(row["saved"])) == 24]
    assert near == [("bf16 W, G, m", "MX9 forward, MX6 backward"), ("fp32 W, m, v", "MX9 and MX6")]


@pytest.mark.parametrize(
    ("kind", "tree", "part"),
    [
        (WeightCopies, {"format": shipped("format")["mx9"], "rows": False, "columns": False}, "there is no copy"),
        (Buffer, {"num_layers": 1, "layers_in_flight": 2}, "layers_in_flight = 2 is above num_layers = 1"),
        (Base, {"weights": "fp64"}, "fp32"),
    ],
)
def test_what_cannot_be_is_refused(kind: Any, tree: dict[str, Any], part: str) -> None:
    with pytest.raises(ValidationError, match=part):
        kind.model_validate(tree)
