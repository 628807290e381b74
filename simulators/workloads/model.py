"""What a model is and how it is run: layers, widths, batch, lengths, precision, parallelism, optimizer.

Numbers that are no structure may be arrays over a grid of designs once a design is validated. Field names are the
field's own: `hidden` is the width of the activations, tp, pp and dp are degrees of tensor, pipeline and data
parallelism.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import ArrayLike
from pydantic import Field

from dse.units import Integer, Number
from dse.values import Frozen, knob
from simulators.hardware.device import Precision
from simulators.hardware.sourced import Sourced

Size = Annotated[Integer, Field(ge=1, le=2**31)]
Degree = Annotated[Integer, Field(ge=1, le=2**20)]
Share = Annotated[Number, Field(ge=0, le=1)]


class Transformer(Frozen):
    """A transformer of equal layers, decoder or encoder; with `decoder_layers` an encoder and a decoder beside it.

    heads: None for hidden / head_dim; head_dim: None for hidden / heads; kv_heads: None for heads. ffn: width of the
    feed-forward layers, None for 4 hidden; gated: two GEMMs go in (gate and up). vocab: 0 for layers alone. predicted:
    share of the tokens whose output is computed (masked ones, of BERT). positions: learnt positions (0: none). tied:
    whether input and output embeddings are one tensor.
    """

    kind: Literal["transformer"] = "transformer"
    name: str
    description: str = ""
    layers: Size
    decoder_layers: Annotated[Integer, knob(structural=True, ge=0, le=2**20)] = 0
    hidden: Size
    heads: Size | None = None
    kv_heads: Size | None = None
    head_dim: Size | None = None
    ffn: Size | None = None
    gated: Annotated[bool, knob(structural=True)] = False
    vocab: Annotated[Integer, knob(structural=True, ge=0, le=2**31)] = 0
    positions: Annotated[Integer, Field(ge=0, le=2**31)] = 0
    predicted: Annotated[Share, Field(gt=0)] = 1.0
    tied: Annotated[bool, knob(structural=True)] = True
    note: Any = None

    @property
    def num_heads(self) -> ArrayLike:
        """Heads of queries; of 64 where nothing is said."""
        if self.heads is not None:
            return self.heads
        width = 64 if self.head_dim is None else self.head_dim
        return np.asarray(np.maximum(1, np.asarray(self.hidden) // width))

    @property
    def num_kv_heads(self) -> ArrayLike:
        """Heads of keys and values."""
        return self.num_heads if self.kv_heads is None else self.kv_heads

    @property
    def width_of_head(self) -> ArrayLike:
        """Width of one head."""
        return np.asarray(self.hidden) / np.asarray(self.num_heads) if self.head_dim is None else self.head_dim

    @property
    def width_of_ffn(self) -> ArrayLike:
        """Width inside a feed-forward layer."""
        return 4 * np.asarray(self.hidden) if self.ffn is None else self.ffn


class Speech(Frozen):
    """A speech recogniser such as Deep Speech 2: convolutions over a spectrogram, recurrent layers, symbols by CTC.

    bins: of the spectrogram's frequency; a frame each `frame_s`. filters: of each convolution. cell, hidden, layers: of
    the recurrent layers; bidirectional: each reads both ways, and their outputs are added up. symbols: of the output.
    """

    class Filters(Frozen):
        """`channels` filters of (frequency x time), with padding and stride."""

        channels: Size
        size: tuple[Size, Size]
        pad: tuple[Annotated[Integer, Field(ge=0)], Annotated[Integer, Field(ge=0)]]
        stride: tuple[Size, Size]

    kind: Literal["speech"] = "speech"
    name: str
    description: str = ""
    bins: Size
    frame_s: Annotated[Number, Field(gt=0)]
    filters: tuple[Filters, ...]
    cell: Literal["lstm", "gru", "vanilla"]
    layers: Size
    hidden: Size
    bidirectional: Annotated[bool, knob(structural=True)] = True
    symbols: Size
    note: Any = None


class Translation(Frozen):
    """A recurrent translator such as GNMT: encoder and decoder of LSTM layers, attention between them.

    The first encoder layer reads both ways. target_per_source: tokens of the translation for each token of the source.
    """

    kind: Literal["translation"] = "translation"
    name: str
    description: str = ""
    encoder_layers: Size
    decoder_layers: Size
    hidden: Size
    vocab: Size
    target_per_source: Annotated[Number, Field(gt=0)] = 1.0
    note: Any = None


Model = Annotated[Transformer | Speech | Translation, Field(discriminator="kind")]


class Run(Frozen):
    """One iteration: `micro_batches` of `batch` sequences of `sequence_length` on each replica of the model.

    mode: training; prefill, the forward pass of a prompt; decode, that of one token after sequence_length others.
    sequence_length: tokens, or frames of speech; of an epoch's iterations those of its lengths, drawn by `seed`.
    recompute: what the backward pass computes again, in place of keeping it: nothing, the core of attention (scores,
    softmax, dropout), or everything but the input of a layer.
    """

    mode: Annotated[Literal["training", "prefill", "decode"], knob(structural=True)] = "training"
    batch: Size
    sequence_length: Size
    micro_batches: Size = 1
    precision: Annotated[Precision, knob(structural=True)] = "mixed"
    recompute: Annotated[Literal["none", "attention", "all"], knob(structural=True)] = "none"
    seed: Annotated[Integer, Field(ge=0, le=2**32 - 1)] = 0

    @property
    def element_bytes(self) -> int:
        """Bytes of an activation."""
        return 4 if self.precision == "fp32" else 2


class Parallel(Frozen):
    """How a model is spread: degrees, of GPUs. tp innermost: its group fills a server before others do.

    sequence_parallel: what tp does not split is split by tokens, and each all-reduce becomes a reduce-scatter and an
    all-gather (arXiv:2205.05198). zero: 1 where the state of the optimizer is split over dp (arXiv:1910.02054).
    """

    tp: Degree = 1
    pp: Degree = 1
    dp: Degree = 1
    sequence_parallel: Annotated[bool, knob(structural=True)] = False
    zero: Annotated[Literal[0, 1], knob(structural=True)] = 0


ByPrecision = Mapping[Precision, Annotated[Number, Field(ge=0, le=1e3)]]


class Optimizer(Sourced):
    """What an update takes for each weight. traffic_bytes: HBM traffic; state_bytes: kept beside weight and gradient.

    kernels_per_tensor: launched for each tensor of weights. near_memory: how many times the bandwidth of the HBM units
    at its banks have that run the update; 1 where the GPU does.
    """

    name: str
    description: str = ""
    traffic_bytes: ByPrecision
    state_bytes: ByPrecision
    flop: Annotated[Number, Field(ge=0, le=1e3)]
    kernels_per_tensor: Annotated[Number, Field(ge=0, le=1e3)]
    near_memory: Annotated[Number, Field(ge=1, le=1e3)] = 1.0


class Passes(Frozen):
    """Tensors that element-wise kernels read and write, of one pass forward and one backward, and how many kernels."""

    forward: Annotated[Number, Field(ge=0, le=100)]
    backward: Annotated[Number, Field(ge=0, le=100)]
    forward_kernels: Annotated[Number, Field(ge=0, le=100)]
    backward_kernels: Annotated[Number, Field(ge=0, le=100)]


class Batched(Frozen):
    """Share of the roofline that batched GEMMs reach: that of `small` ones, whose longest side is at most `small_side`,
    rising with the logarithm of that side to that of `large` ones.
    """

    small: Annotated[Share, Field(gt=0)]
    small_side: Size
    large: Annotated[Share, Field(gt=0)]
    large_side: Size

    def share(self, side: ArrayLike) -> Any:
        """Share of the roofline by the longest side of the products."""
        low, high = np.log2(self.small_side), np.log2(np.maximum(self.large_side, self.small_side + 1))
        place = np.clip((np.log2(np.asarray(side, float)) - low) / (high - low), 0.0, 1.0)
        return self.small + place * (np.asarray(self.large) - self.small)


class Kernels(Sourced):
    """How a framework computes what is no GEMM.

    flash_share_of_peak: what attention in one kernel reaches, whose scores are never written; None for three kernels.
    """

    name: str
    description: str = ""
    softmax: Passes
    activation: Passes
    norm: Passes
    flash_share_of_peak: Annotated[Share | None, knob(structural=True)] = None
    batched: Batched
