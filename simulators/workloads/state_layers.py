"""Layers that keep a state in place of keys and values: state-space models, linear attention, gated short convolutions.

Mamba-2 (arXiv:2405.21060), gated delta networks (arXiv:2412.06464), Kimi delta attention (arXiv:2510.26692), lightning
attention (arXiv:2401.04658) and Mamba (arXiv:2312.00752) have the same parts, with other widths.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dse.values import Frozen, knob
from dse.values.units import Integer, Number

Count = Annotated[Integer, Field(ge=0, le=2**40)]
Width = Annotated[Integer, Field(ge=1, le=2**40)]


class StateLayers(Frozen):
    """Widths of a layer with a state. projected: columns computed from the activations. outputs: columns that the last
    product reads. channels, kernel: of the convolution over `kernel` tokens before. heads, key, value: the state of a
    sequence is heads x key x value numbers of `number_bytes`. chunk: tokens that the scan of a prompt takes at once.
    more: weights beside the two products and the convolution. groups: of heads that share keys and queries, as those of
    Mamba-2 do; None for other scans, whose backward kernels are not known, so that such layers are not trained.
    """

    projected: Width
    outputs: Width
    channels: Count
    kernel: Width
    heads: Count
    key: Width
    value: Width
    chunk: Width
    more: Count
    number_bytes: Annotated[Integer, Field(ge=1, le=8)] = 4
    groups: Width | None = None


class LayerKind(Frozen):
    """`count` layers of a model of several kinds, spread evenly over its depth.

    mixer: attention, a layer with a state, none, or a merge of activations with the embedding of the next token, with
    which layers that predict further tokens begin. feed: a feed-forward layer, experts, or none. vectors: weights of
    one GPU beside those of products (norms, biases). unnarrowed: what the names of products begin with that run at
    `run.precision` where others run at `run.products` (all of them: an empty string).
    """

    count: Annotated[Integer, Field(ge=1, le=2**20)]
    mixer: Annotated[Literal["attention", "state", "merge", "none"], knob(structural=True)]
    feed: Annotated[Literal["dense", "experts", "none"], knob(structural=True)]
    vectors: Annotated[Number, Field(ge=0, le=2**40)] = 0
    unnarrowed: Annotated[tuple[str, ...], knob(structural=True)] = ()
