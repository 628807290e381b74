"""Models and their runs: layers, widths, batch, lengths, precision, parallelism, optimizer.

Numbers that do not define the structure may be arrays over a grid of designs once a design is validated. Names follow
the literature: `hidden` is the width of the activations; tp, pp, dp, ep and cp are the degrees of tensor, pipeline,
data, expert and context parallelism.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import ArrayLike
from pydantic import Field, ValidationInfo, field_validator

from dse.values import Frozen, knob
from dse.values.units import Integer, Number, Seconds
from simulators.hardware.parts import Precision, SourcedValue
from simulators.workloads.compressed import CompressedAttention
from simulators.workloads.experts import ExpertKernels, LatentAttention, MixtureOfExperts
from simulators.workloads.sequence_lengths import PassTokens
from simulators.workloads.spreading import LibraryCtas, PipelineSchedule, RingSums, ShardedData
from simulators.workloads.state_layers import LayerKind, StateLayers
from simulators.workloads.stored import FormatUse, Stored, TileCasts, WeightFormat, format_names, weight_format

Size = Annotated[Integer, Field(ge=1, le=2**31)]
Degree = Annotated[Integer, Field(ge=1, le=2**20)]
Share = Annotated[Number, Field(ge=0, le=1)]
Weights = Annotated[Number, Field(ge=0, le=2**40)]
_LATER = (
    *("moe", "latent", "window", "pattern", "state", "out_gate", "sinks", "vectors", "decoder_vectors", "ends"),
    *("stored", "kv_format", "compressed", "streams"),
)


class Transformer(Frozen):
    """A transformer of equal layers, decoder or encoder; with `decoder_layers` an encoder and a decoder beside it.

    heads: None for hidden / head_dim; head_dim: None for hidden / heads; kv_heads: None for heads. ffn: width of the
    feed-forward layers, None for 4 hidden; gated: two GEMMs (gate and up) in place of one. vocab: 0 for layers without
    embeddings. predicted: outputs computed for a token in training: a share with masked tokens (BERT), several with
    layers that predict further tokens. positions: number of learnt positions (0: none). tied: input and output
    embeddings share one tensor. causal: a token attends to those before it alone, which attention in one kernel does
    not compute for the others. rotary: positions turn queries and keys. moe: experts in place of feed-forward layers.
    latent: attention from latents; kv_heads and head_dim mean nothing then. window: tokens that attention of a share
    `windowed` of the layers goes back to, None for all of them; attention in one kernel computes no others. unread:
    keys of the file that it was read from (`file: key`) which may change the answer and are not modelled.

    pattern: kinds of layers, where they are not equal: as many as `layers` in all. state: widths of those that keep a
    state. out_gate: queries come with a gate of attention's output. sinks: heads have a learnt score beside those of
    keys, which attention reads, and whose gradient is a sum over all tokens. vectors: weights of a layer beside its
    products (norms, biases), decoder_vectors: of one of a decoder; ends: of embedding (positions, norms) and output;
    None for those of Llama, or of GPT-2 where not gated. stored, kv_format: formats of weights by part, and of keys and
    values, as the file of the model says; of inference. compressed: attention over compressed tokens, of inference
    alone. streams: of residuals (hyper-connections; None: one). A design without these says nothing of them, so that
    old designs keep their keys.
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
    predicted: Annotated[Number, Field(gt=0, le=16)] = 1.0
    tied: Annotated[bool, knob(structural=True)] = True
    causal: Annotated[bool, knob(structural=True)] = False
    rotary: Annotated[bool, knob(structural=True)] = False
    moe: MixtureOfExperts | None = None
    latent: LatentAttention | None = None
    window: Size | None = None
    windowed: Share = 1.0
    pattern: Annotated[tuple[LayerKind, ...] | None, knob(structural=True)] = None
    state: StateLayers | None = None
    out_gate: Annotated[bool | None, knob(structural=True)] = None
    sinks: Annotated[bool | None, knob(structural=True)] = None
    vectors: Weights | None = None
    decoder_vectors: Weights | None = None
    ends: tuple[Number, Number] | None = None
    stored: Annotated[Stored | None, knob(structural=True)] = None
    kv_format: WeightFormat | None = None
    compressed: CompressedAttention | None = None
    streams: Size | None = None
    note: Any = None
    unread: tuple[str, ...] = ()

    def __iter__(self) -> Generator[tuple[str, Any], None, None]:
        """Iterate over the fields; those that came later only where they are given."""
        absent = {name for name in _LATER if getattr(self, name) is None}
        absent |= {"windowed"} & {f"{name}ed" for name in absent}
        yield from ((name, value) for name, value in super().__iter__() if name not in absent)

    @property
    def num_heads(self) -> ArrayLike:
        """Heads of queries; of width 64 if neither heads nor head_dim is given."""
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

    bins: frequency bins of the spectrogram; a frame lasts `frame_s`. filters: filters of each convolution. cell,
    hidden, layers: recurrent layers; bidirectional: each layer reads both ways and sums the outputs. symbols: output
    alphabet.
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


_FORMATS: Mapping[str, FormatUse] = {
    "weights": "weights",
    "kv_cache": "cache",
    "gradients": "gradients",
    "optimizer_states": "states",
    "activations": "activations",
}
"""Key of a run that names a format -> what it is of."""
_OF_LAYERS = ("recompute_layers", "offloaded_layers", "adapters")
_LATER_RUN = ("scales", *PassTokens.model_fields)


class Run(PassTokens):
    """One iteration: `micro_batches` of `batch` sequences of `sequence_length` on each replica of the model.

    mode: training; prefill, the forward pass of a prompt; decode, the forward pass of one token after sequence_length
    tokens. sequence_length: tokens, or frames of speech; for the iterations of an epoch drawn from its lengths by
    `seed`. recompute: activations that the backward pass recomputes instead of storing them: none, the core of
    attention (scores, softmax, dropout), up_projections (norms, activations, and up-projections of latent attention
    with what follows up to its core: arXiv:2412.19437, section 3.2.3), half (all but attention in one kernel, partial
    sums and every other product of a layer, as torchtitan selects them), or all but the input of a layer;
    recompute_layers: of so many layers of a stage, None for all of them. offloaded_layers: of so many layers of a stage
    activations wait in the host's memory for the backward pass (`simulators.steps.run.offload`), None for none.
    adapters: rank of those beside attention's projections, which alone are trained (LoRA); None trains all. products:
    precision that linear layers multiply at; None for that of all else. weights, kv_cache: formats that weights, and
    keys and values, are stored in (`conf/data/weight_formats.yaml`), of inference; None for what the model's file says,
    else for 16 bits (32 at fp32). Products are no faster for it. gradients, optimizer_states: formats of what is
    trained: of gradients as they are stored and reduced, and of the moments of the optimizer, whose weights stay as
    they are; None for those of `parallel.gradient_bytes`, and for 32 bits. activations: that in which training keeps
    inputs of linear layers; None for that of activations. scales: of products of 8 bits, for a tensor, a row or a block
    of numbers; None for those of the software.
    """

    mode: Annotated[Literal["training", "prefill", "decode"], knob(structural=True)] = "training"
    batch: Size
    sequence_length: Size
    micro_batches: Size = 1
    precision: Annotated[Precision, knob(structural=True)] = "mixed"
    recompute: Annotated[Literal["none", "attention", "up_projections", "half", "all"], knob(structural=True)] = "none"
    recompute_layers: Annotated[Integer | None, knob(structural=True, ge=0, le=2**20)] = None
    offloaded_layers: Annotated[Integer | None, knob(structural=True, ge=1, le=2**20)] = None
    adapters: Annotated[Integer | None, knob(structural=True, ge=1, le=2**16)] = None
    products: Annotated[Precision | None, knob(structural=True)] = None
    weights: Annotated[str | None, knob(structural=True)] = None
    kv_cache: Annotated[str | None, knob(structural=True)] = None
    gradients: Annotated[str | None, knob(structural=True)] = None
    optimizer_states: Annotated[str | None, knob(structural=True)] = None
    activations: Annotated[str | None, knob(structural=True)] = None
    scales: Annotated[Literal["tensor", "row", "block"] | None, knob(structural=True)] = None
    seed: Annotated[Integer, Field(ge=0, le=2**32 - 1)] = 0

    def __iter__(self) -> Generator[tuple[str, Any], None, None]:
        """Iterate over the fields; formats only where they are given: old designs keep their keys."""
        for name, value in super().__iter__():
            if value is not None or name not in (*_OF_LAYERS, *_FORMATS, *_LATER_RUN):
                yield name, value

    @field_validator(*_FORMATS)
    @classmethod
    def _is_a_format(cls, name: str | None, info: ValidationInfo) -> str | None:
        names = format_names(_FORMATS[str(info.field_name)])
        if name is not None and name not in names:
            raise ValueError(f"{name} is no format that is known; take one of {', '.join(names)}")
        return name

    @property
    def pass_tokens(self) -> Any:
        """Tokens of a sequence in one pass."""
        if self.mode == "decode":
            return np.full(np.shape(self.sequence_length), float(self.checked))
        return np.asarray(self.sequence_length if self.chunk is None else self.chunk, float)

    @property
    def passes(self) -> Any:
        """Passes of a step: of all micro-batches, and of chunks of a prompt."""
        chunks = 1.0 if self.chunk is None else np.asarray(self.sequence_length, float) / np.asarray(self.chunk, float)
        return np.asarray(self.micro_batches, float) * chunks

    @property
    def element_bytes(self) -> int:
        """Bytes of an activation."""
        return 4 if self.precision == "fp32" else 2  # all other precisions keep activations in 16 bits

    def gradient_bytes(self, parallel: ShardedData) -> float:
        """Bytes of a gradient as it is stored and reduced."""
        known = parallel.gradient_bytes or self.element_bytes
        return known if self.gradients is None else float(weight_format(self.gradients).bytes_of(1))


class Parallel(PipelineSchedule, ShardedData, LibraryCtas):
    """Degrees of parallelism [GPUs]. tp is innermost: its group fills a server first; then cp, dp and pp.

    ep: experts of a layer are split over ep of the tp x cp x dp GPUs that hold a stage (as Megatron-LM with expert
    tensor parallelism of one, DeepSpeed and DeepSeek-V3), neighbours first, so that their gradients are reduced over
    tp x cp x dp / ep; with ep of one they are split by tp as other layers. cp: each sequence is split over cp GPUs,
    keys and values go round a ring (arXiv:2310.01889), or an all-to-all gives each of them the whole sequence of its
    share of the heads (`context`; arXiv:2309.14509), and gradients are reduced over cp x dp. etp: each expert is split
    over etp of the GPUs (expert tensor parallelism), which gather its tokens and add its outputs; ep x etp of them then
    hold all experts of a layer.

    sequence_parallel: the activations that tp does not split are split by tokens, and each all-reduce becomes a
    reduce-scatter and an all-gather (arXiv:2205.05198). collectives: of tp and dp inside a node, by the library, or in
    the switch as far as it computes. Pipelines, split states and CTAs of collectives: `simulators.workloads.spreading`.
    split_ctas: CTAs of the kernel that adds partial sums of one half of a prompt's tokens while the other half
    computes: in the switch, with the norm that follows, or by the library, as `collectives` says
    (`simulators.steps.overlap.token_splits`); 0: prompts are not split.
    """

    tp: Degree = 1
    pp: Degree = 1
    dp: Degree = 1
    ep: Annotated[Integer, knob(structural=True, ge=1, le=2**20)] = 1
    cp: Annotated[Integer, knob(structural=True, ge=1, le=2**20)] = 1
    context: Annotated[Literal["ring", "all_to_all"], knob(structural=True)] = "ring"
    etp: Annotated[Integer, knob(structural=True, ge=1, le=2**20)] = 1
    sequence_parallel: Annotated[bool, knob(structural=True)] = False
    collectives: Annotated[Literal["library", "in_switch"], knob(structural=True)] = "library"
    split_ctas: Annotated[Integer, knob(structural=True, ge=0, le=64)] = 0

    def __iter__(self) -> Generator[tuple[str, Any], None, None]:
        """Iterate over the fields; those of `_UNSAID` only where they say something: old designs keep keys."""
        for name, value in super().__iter__():
            if (name, value) not in _UNSAID:
                yield name, value

    @property
    def stage_gpus(self) -> Any:
        """GPUs that hold one stage of the pipeline: tp x cp x dp."""
        return np.asarray(self.tp) * np.asarray(self.cp) * np.asarray(self.dp)

    @property
    def gpus(self) -> Any:
        """All GPUs."""
        return self.stage_gpus * np.asarray(self.pp)

    @property
    def replicas(self) -> Any:
        """GPUs over which gradients are reduced, other than those of experts: cp x dp."""
        return np.asarray(self.cp) * np.asarray(self.dp)

    @property
    def expert_replicas(self) -> Any:
        """GPUs that hold the same experts."""
        # with ep, experts are spread over all GPUs of a stage
        return self.replicas if self.ep == 1 else self.stage_gpus / (self.ep * self.etp)

    @property
    def state_gpus(self) -> Any:
        """GPUs among which split states are split."""
        return self.replicas if self.shard_gpus is None else np.asarray(self.shard_gpus)

    @property
    def expert_state_gpus(self) -> Any:
        """The same of the states of experts."""
        return self.expert_replicas if self.shard_gpus is None else np.asarray(self.shard_gpus)


_UNSAID: Sequence[tuple[str, Any]] = (
    *(("ep", 1), ("cp", 1), ("etp", 1), ("context", "ring"), ("ends", "beside")),
    *(("exchanges", "waited"), ("shard_gpus", None), ("tp_ctas", 0), ("dp_ctas", 0)),
)
ByPrecision = Mapping[Precision, Annotated[Number, Field(ge=0, le=1e3)]]
_TRAINED_AS: Mapping[str, str] = {"bf16": "mixed", "fp16": "mixed"}
"""Precision -> that whose update it has: weights of 16 bits are kept in 32 bits as well."""
_MOMENT_BYTES = 4  # of a moment of an optimizer unless it has another format


class Optimizer(SourcedValue):
    """Costs of an update for each weight. traffic_bytes: HBM traffic; state_bytes: stored beside weight and gradient.

    moments: numbers of the state that have a format of their own (`run.optimizer_states`), each read and written once;
    gradient_passes, gradient_bytes: how often gradients are moved in the format in which they are reduced, and its
    bytes, as traffic_bytes counts them. None where that is not known: no other format may be chosen.
    kernels_per_tensor: launched for each tensor of weights. in_backward: weights of a layer are updated as soon as
    their gradients are there, which are then dropped. near_memory: bandwidth of the units at the banks that run
    the update, relative to the HBM; 1 if the GPU runs it.
    """

    name: str
    description: str = ""
    traffic_bytes: ByPrecision
    state_bytes: ByPrecision
    flop: Annotated[Number, Field(ge=0, le=1e3)]
    kernels_per_tensor: Annotated[Number, Field(ge=0, le=1e3)]
    in_backward: Annotated[bool, knob(structural=True)] = False
    near_memory: Annotated[Number, Field(ge=1, le=1e3)] = 1.0
    moments: Annotated[Integer, Field(ge=0, le=16)] | None = None
    gradient_passes: ByPrecision | None = None
    gradient_bytes: ByPrecision | None = None

    def bytes_of(self, run: Run) -> tuple[Any, Any] | None:
        """(traffic_bytes, state_bytes) in the formats of a run; None where one of them is not given."""
        traffic, state = (self._at(numbers, run.precision) for numbers in (self.traffic_bytes, self.state_bytes))
        if traffic is None or state is None:
            return None
        if run.optimizer_states is not None:
            narrower = np.asarray(self.moments, float) * (
                weight_format(run.optimizer_states).bytes_of(1) - _MOMENT_BYTES
            )
            traffic, state = traffic + 2 * narrower, state + narrower
        if run.gradients is not None:
            passes, size = (self._at(numbers, run.precision) for numbers in (self.gradient_passes, self.gradient_bytes))
            traffic = traffic + passes * (weight_format(run.gradients).bytes_of(1) - size)
        return traffic, state

    def unknown(self, run: Run) -> str:
        """Name of the field that formats of a run need and that is not given; "" for none."""
        needed = {"moments": run.optimizer_states, "gradient_passes": run.gradients, "gradient_bytes": run.gradients}
        return next((name for name, asked in needed.items() if asked and getattr(self, name) is None), "")

    @staticmethod
    def _at(numbers: ByPrecision | None, precision: str) -> Any:
        """The number of a precision, or of that whose update it has; None where neither is given."""
        given = {str(name): value for name, value in (numbers or {}).items()}
        return given.get(precision, given.get(_TRAINED_AS.get(precision, precision)))


class Passes(Frozen):
    """Tensors that element-wise kernels read and write in a forward and a backward pass, and numbers of kernels."""

    forward: Annotated[Number, Field(ge=0, le=100)]
    backward: Annotated[Number, Field(ge=0, le=100)]
    forward_kernels: Annotated[Number, Field(ge=0, le=100)]
    backward_kernels: Annotated[Number, Field(ge=0, le=100)]


class BatchedGemmRates(Frozen):
    """Share of the roofline that batched GEMMs reach.

    It rises from `small`, for a longest side up to `small_side`, with the logarithm of that side to `large`.
    """

    small: Annotated[Share, Field(gt=0)]
    small_side: Size
    large: Annotated[Share, Field(gt=0)]
    large_side: Size

    def share(self, side: ArrayLike) -> Any:
        """Share of the roofline by the longest side of the products."""
        low, high = np.log2(self.small_side), np.log2(np.maximum(self.large_side, self.small_side + 1))
        # beyond either side, the share of that side
        place = np.clip((np.log2(np.asarray(side, float)) - low) / (high - low), 0.0, 1.0)
        return self.small + place * (np.asarray(self.large) - self.small)


_LATER_KERNELS = ("tile_casts", "experts", "flash_backward_share", "host_sequence_s", "ring", "gpu_product_share")


class Kernels(SourcedValue):
    """Kernels of a framework for operators other than GEMMs.

    flash_share_of_peak: share of the peak rate reached by attention in one kernel, which never writes the scores; None
    for three kernels; flash_backward_share: that of its backward pass, None for the same. keys_read: keys and values of
    a decode step are read once by all heads that share them, or by each of these, but for the first from the last-level
    cache. product_share: rate of products over that of the machine's GEMMs by precision, in steps of this software;
    gpu_product_share: of GPUs measured apart, by name. What follows is None where there is none of it. loss: passes
    over logits, where they are not those of softmax. transposes: passes over tensors of tokens x width that attention
    copies into another order. gradient_passes: over gradients, to add those of a micro- batch to those before.
    token_copies: over the whole tensor, to put its tokens in
    order after each all-gather and before each reduce-scatter of sequence parallelism. casts: of inputs of a linear
    layer, and of the gradient of its output, into the format of `run.products`. tile_casts: the same by tiles; a design
    without them says nothing of it, so that old designs keep their keys. shard_copies: over weights that dp splits,
    after they are gathered (forward), and over their gradients, before they are reduced (backward). host_s: time of an
    iteration in which the GPU waits for the host. host_launch_s: time that the host spends on one kernel of a pass
    (`simulators.steps.run.host_launches`). host_batch_s: on a micro-batch before its passes, while the GPU waits.
    host_sequence_s: on each sequence between two steps of inference (scheduler, sampler), graphs or not. graphs: modes
    of a step whose kernels are replayed as one graph, so that the host is not waited for; a design without them says
    nothing of it. experts: of layers with experts; None for one pass in order, and no more launches than operators.
    ring: sums of parts of attention; None for one kernel, which keys of fewer heads go to.
    """

    name: str
    description: str = ""
    softmax: Passes
    activation: Passes
    norm: Passes
    flash_share_of_peak: Annotated[Share | None, knob(structural=True)] = None
    flash_backward_share: Annotated[Share | None, knob(structural=True)] = None
    keys_read: Annotated[Literal["once", "per_head"], knob(structural=True)] = "once"
    product_share: Mapping[Precision, Annotated[Number, Field(gt=0, le=4)]] = {}
    gpu_product_share: Mapping[str, Mapping[Precision, Annotated[Number, Field(gt=0, le=4)]]] | None = None
    batched: BatchedGemmRates
    loss: Passes | None = None
    transposes: Annotated[Passes | None, knob(structural=True)] = None
    gradient_passes: Annotated[Number | None, knob(structural=True, ge=0, le=100)] = None
    token_copies: Annotated[Number | None, knob(structural=True, ge=0, le=100)] = None
    casts: Annotated[Passes | None, knob(structural=True)] = None
    tile_casts: Annotated[TileCasts | None, knob(structural=True)] = None
    shard_copies: Passes | None = None
    host_s: Seconds | None = None
    host_launch_s: Seconds | None = None
    host_batch_s: Seconds | None = None
    host_sequence_s: Seconds | None = None
    graphs: Annotated[tuple[Literal["training", "prefill", "decode"], ...], knob(structural=True)] = ()
    experts: ExpertKernels | None = None
    ring: RingSums | None = None

    def share_of(self, precision: str, gpu: str) -> ArrayLike:
        """Rate of products at a precision over that of a GPU's GEMMs; blocks have that of their elements."""
        shares = {**self.product_share, **(self.gpu_product_share or {}).get(gpu, {})}
        return {str(name): share for name, share in shares.items()}.get(precision.removesuffix("_block"), 1.0)

    def __iter__(self) -> Generator[tuple[str, Any], None, None]:
        """Iterate over the fields; those that came later only where they are given: old designs keep their keys."""
        absent: dict[str, Any] = dict.fromkeys(_LATER_KERNELS) | {
            "graphs": (),
            "product_share": {},
            "keys_read": "once",
        }
        yield from ((name, value) for name, value in super().__iter__() if name not in absent or value != absent[name])
