"""Memory of parameters in training that low-precision copies would take, if they were stored.

Weights are stored in one precision, and copies in others are made when a layer needs them. This saves c / (base + c)
of the memory for parameters, with c the bytes of the copies and base those of all else, both per parameter. Copies of
the layers in flight are stored for a while and take n c / L of it back, n layers of L (derived).

The direction of a copy decides its use: a product over the rows of a weight needs blocks along its columns, the
product of the backward pass needs the other (`simulators/hardware/pim.py`). The copies that a training run
would store, and its other stored values, are fields; `grid` combines them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, model_validator

from dse.values import Frozen, knob
from dse.values.units import Integer, Number
from simulators.hardware.pim import Format

Stored = Literal["fp32", "bf16", "fp16"]
_BITS = {"fp32": 32, "bf16": 16, "fp16": 16}  # master copies are never narrower than 16 bits


class Base(Frozen):
    """Stored values of a parameter besides its copies, each with its precision; None for a value that is not stored."""

    weights: Annotated[Stored, knob(structural=True)]
    gradients: Annotated[Stored | None, knob(structural=True)] = None
    momentum: Annotated[Stored | None, knob(structural=True)] = None
    variance: Annotated[Stored | None, knob(structural=True)] = None

    @property
    def bytes_per_parameter(self) -> float:
        """Bytes of all stored values."""
        return sum(_BITS[kind] for _, kind in self if kind is not None) / 8


class WeightCopies(Frozen):
    """Copies in one format, with blocks along the rows of a weight, along its columns, or one of each."""

    format: Format
    rows: Annotated[bool, knob(structural=True)] = True
    columns: Annotated[bool, knob(structural=True)] = True

    @model_validator(mode="after")
    def _is_a_copy(self) -> WeightCopies:
        if not (self.rows or self.columns):
            raise ValueError("rows and columns are both false, so there is no copy; set one, or leave the copy out")
        return self

    @property
    def bytes_per_parameter(self) -> float:
        """Bytes of one or two copies."""
        return self.format.bytes_per_element * (self.rows + self.columns)  # one or two copies of all elements


class Copies(Frozen):
    """Copies that are not stored. backward: None where the backward pass reuses the copies of the forward pass."""

    forward: WeightCopies
    backward: WeightCopies | None = None

    @property
    def bytes_per_parameter(self) -> float:
        """Bytes of all copies."""
        return sum(copy.bytes_per_parameter for copy in (self.forward, self.backward) if copy is not None)


class Buffer(Frozen):
    """Copies stored at once: of `layers_in_flight` layers (current and next: 2) of `num_layers`."""

    num_layers: Annotated[Integer, Field(ge=1, le=10**6)]
    layers_in_flight: Annotated[Number, Field(ge=0, le=10**6)]

    @model_validator(mode="after")
    def _fits(self) -> Buffer:
        if self.layers_in_flight > self.num_layers:
            raise ValueError(f"layers_in_flight = {self.layers_in_flight:g} is above num_layers = {self.num_layers}")
        return self


@dataclass(frozen=True)
class CapacitySaving:
    """Bytes of a parameter, and the share of them that is saved; numbers or arrays of one shape.

    base_bytes: always stored. copy_bytes: not stored. buffer_bytes: of the copies that are stored at once.
    """

    base_bytes: Any
    copy_bytes: Any
    buffer_bytes: Any

    @property
    def stored_bytes(self) -> Any:
        """Bytes with copies stored."""
        return np.add(self.base_bytes, self.copy_bytes)

    @property
    def needed_bytes(self) -> Any:
        """Bytes with copies made when they are needed."""
        return np.add(self.base_bytes, self.buffer_bytes)

    @property
    def saved_share(self) -> Any:
        """Share of `stored_bytes` that is not needed, 0 to 1."""
        return 1 - self.needed_bytes / self.stored_bytes


def capacity_saving(base: Base, copies: Copies, buffer: Buffer | None = None) -> CapacitySaving:
    """Compute the saving in bytes of a parameter; without a buffer copies take no bytes (the limit of many layers).

    Numbers of the buffer and of formats may be arrays that broadcast.
    """
    copy = copies.bytes_per_parameter
    # as if of infinitely many layers
    share: Any = np.divide(buffer.layers_in_flight, buffer.num_layers) if buffer is not None else 0.0
    return CapacitySaving(base.bytes_per_parameter, copy, copy * share)


def grid(
    bases: Mapping[str, Base], copies: Mapping[str, Copies], buffer: Buffer | None = None
) -> list[dict[str, str | float]]:
    """One row for each base with each set of copies: their names, bytes per parameter, share saved."""
    return [
        {"base": base, "copies": name, **_columns(capacity_saving(of_base, of_copies, buffer))}
        for base, of_base in bases.items()
        for name, of_copies in copies.items()
    ]


def _columns(saving: CapacitySaving) -> dict[str, float]:
    columns = {"base_bytes": saving.base_bytes, "copy_bytes": saving.copy_bytes, "buffer_bytes": saving.buffer_bytes}
    return {name: float(value) for name, value in {**columns, "saved": saving.saved_share}.items()}
