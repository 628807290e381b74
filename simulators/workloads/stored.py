"""Formats of stored weights and caches, apart from the precision of products (`conf/data/weight_formats.yaml`).

A weight takes (bits + scale_bits / block) / 8 bytes. The weights of a model have a format by part, and within a part
perhaps several: shares of its weights. What has none is as wide as the precision of the run says.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

import numpy as np
from pydantic import Field

from dse.config.options import conf_dir, load_yaml
from dse.values import Frozen, knob
from dse.values.units import Integer, Number
from simulators.hardware.parts import Precision

Part = Literal["attention", "state", "dense", "experts", "shared", "router", "output", "embedding"]
PARTS: tuple[Part, ...] = get_args(Part)
FormatUse = Literal["weights", "cache", "gradients", "states", "activations"]
OF_LAYERS: tuple[Part, ...] = ("attention", "state", "dense", "experts", "shared")
"""Parts whose matrices a format is of, unless it is of the whole model."""


class WeightFormat(Frozen):
    """A format. bits: of a value. scale_bits: beside each `block` values; row: those of one output (None: of a tensor).

    all_weights: whether all weights have it, or the matrices of layers alone.
    """

    name: str
    bits: Annotated[Number, Field(gt=0, le=64)]
    scale_bits: Annotated[Number, Field(ge=0, le=64)] = 0.0
    block: Annotated[Integer, Field(ge=1, le=2**31)] | Literal["row"] | None = None
    all_weights: bool = False

    def bytes_of(self, row: Any) -> Any:
        """Bytes of a value with its share of the scales; row: values of one output."""
        if self.block is None:
            return np.asarray(self.bits) / 8
        block = np.asarray(row if self.block == "row" else self.block, float)
        return (np.asarray(self.bits) + np.asarray(self.scale_bits) / block) / 8


class StoredShare(Frozen):
    """A share of the weights of a part, and its format."""

    format: WeightFormat
    share: Annotated[Number, Field(gt=0, le=1)] = 1.0


Stored = Mapping[Part, tuple[StoredShare, ...]]


@functools.cache
def _formats() -> Mapping[str, Mapping[str, Any]]:
    formats: Mapping[str, Mapping[str, Any]] = load_yaml(conf_dir() / "data" / "weight_formats.yaml")["formats"]
    return formats


def format_names(use: FormatUse = "weights") -> tuple[str, ...]:
    """Names of the formats that weights, keys and values, gradients, or moments of an optimizer may have."""
    return tuple(name for name, row in _formats().items() if row.get(use, use == "weights"))


def weight_format(name: str) -> WeightFormat:
    """A format by name."""
    fields = {key: value for key, value in _formats()[name].items() if key in WeightFormat.model_fields}
    return WeightFormat(name=name, **fields)


def stored_as(name: str) -> Stored:
    """Formats of the parts of a model whose weights are stored in one format."""
    format = weight_format(name)
    return dict.fromkeys(PARTS if format.all_weights else OF_LAYERS, (StoredShare(format=format),))


def bytes_of_part(stored: Stored, part: Part, element: float, row: Any) -> Any:
    """Bytes of a weight of a part on average; element: of those without a format; row: values of one output."""
    shares = stored.get(part, ())
    bytes_in_formats: Any = sum(np.asarray(entry.share) * entry.format.bytes_of(row) for entry in shares)
    return bytes_in_formats + (1 - sum(float(np.asarray(entry.share)) for entry in shares)) * element


class TileCasts(Frozen):
    """Passes over tensors of 16 bits by casts to fp8 with a scale for each tile (arXiv:2412.19437, section 3.3).

    inputs: of a linear layer, cast once. gradients: of its output, cast by rows and by columns. transposes: of an input
    from tiles of rows to tiles of columns, for the gradients of weights. largest: by format, to find the largest number
    of a tensor before, where it has a scale. together: formats that one kernel casts the inputs of all experts to.
    Weights are cast once an update, not counted.
    """

    inputs: Annotated[Number, Field(ge=0, le=100)]
    gradients: Annotated[Number, Field(ge=0, le=100)]
    transposes: Annotated[Number, Field(ge=0, le=100)]
    largest: Mapping[Precision, Annotated[Number, Field(ge=0, le=100)]] = {}
    together: Annotated[tuple[Precision, ...], knob(structural=True)] = ()

    def before(self, precision: str | None) -> Any:
        """Passes before a cast to a format."""
        return {str(name): passes for name, passes in self.largest.items()}.get(precision or "", 0.0)
