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
from dse.values import Frozen
from dse.values.units import Integer, Number

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
