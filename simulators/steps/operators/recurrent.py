"""Operators of a training iteration of recurrent models: a speech recogniser and a translator.

Sizes are those of a batch that is padded to its longest sequence. Of a recurrent layer of g gates, hidden size h and
input size f, over n sequences of t steps, in one direction:

    input      2 g h f n t FLOP: one GEMM over all steps, as nothing waits for the state there
    state      2 g h^2 n t FLOP: step after step (`simulators.costs.recurrent`)
    backward   the same again for what flows on, and again for gradients of weights

Directions run one after the other. Counts of tensors that element-wise kernels read and write are those of kernels that
frameworks launch one by one (unfused); their FLOP are not counted. Kept for the backward pass are the inputs of
products, of convolutions and of batch norms, the gates and states of all steps, and the symbols; masks are left out.
Layers as in deepspeech.pytorch (Deep Speech 2, arXiv:1512.02595) and in the MLPerf reference of GNMT (arXiv:1609.08144,
attention `gnmt_v2`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from simulators.costs.recurrent import GATES
from simulators.steps.operators.work import Filter, Kind, ModelBlock, Op, Product, Recurrence, Stream
from simulators.workloads.model import Passes, Run, Speech, Translation

Floats = NDArray[np.float64]

Part = tuple[tuple[Op, ...], tuple[Op, ...]]
"""What a part of a layer does in the forward pass, and in the backward pass."""
Weights = tuple[ArrayLike, ArrayLike]
"""How many weights, in how many tensors."""


def _passes(forward: float, backward: float, kernels: tuple[float, float] = (1, 1)) -> Passes:
    return Passes(forward=forward, backward=backward, forward_kernels=kernels[0], backward_kernels=kernels[1])


_BATCH_NORM = _passes(3, 5, (2, 2))  # statistics read all of it before anything can be normalised
_CLIP = _passes(2, 3)
_DROPOUT = _passes(2, 2)  # its mask, of bytes or bits, is left out
_ADD = _passes(3, 3)  # what went two ways has the sum of two gradients
_SUM = _passes(3, 0, (1, 0))  # of both directions: its gradient is that of either
_JOIN = _passes(4, 4)  # two tensors side by side
_CTC = _passes(6, 2, (4, 1))  # softmax; likelihoods from both ends, and their gradient, which is scaled in the end
_CROSS_ENTROPY = _passes(4, 4, (2, 2))  # log-softmax, then the loss
_LOOK_UP = _passes(2, 3)  # rows that gradients are added to are read, too
_SCORES = _passes(5, 11, (3, 6))  # v . tanh(key + query + bias), a kernel each; sum and tanh again in the backward pass
_SOFTMAX = _passes(2, 3)


def speech_blocks(model: Speech, run: Run) -> tuple[ModelBlock, ...]:
    """A speech recogniser's convolutions, recurrent layers and output.

    Sizes as run.sequence_length (frames) and run.batch: numbers or arrays that broadcast with one another. Batch norm
    comes after each convolution and before each recurrent layer but the first. Only the forward pass where run.mode is
    not training.
    """
    convolutions, inputs, steps = _convolutions(model, run)
    hidden = np.asarray(model.hidden, float)
    # two directions double the work of a layer
    first = _Layer(GATES[model.cell], inputs, hidden, (run.batch, steps), 1 + model.bidirectional)
    later, columns = replace(first, inputs=hidden), np.asarray(run.batch) * steps
    states = run.element_bytes * columns * hidden
    norm, normed = _stream("batch norm", "norm", states, _BATCH_NORM), (2 * hidden, 2)
    summed = [_stream("sum of directions", "activation", states, _SUM)] if model.bidirectional else []
    output = _product("output", "output", (model.symbols, hidden, columns))
    symbols = run.element_bytes * columns * np.asarray(model.symbols)
    loss = _stream("CTC", "output", symbols, _CTC)
    blocks = (
        *convolutions,
        _block("recurrent layer 1", [*first.parts, *summed], first.weights, run.element_bytes * first.stored_elements),
        _block(
            "recurrent layers",
            [norm, *later.parts, *summed],
            _sum(later.weights, normed),
            run.element_bytes * later.stored_elements + states,
            count=np.asarray(model.layers) - 1,  # the first layer has inputs of another width
        ),
        _block("output", [norm, output, loss], _sum((hidden * model.symbols, 1), normed), 2 * (states + symbols)),
    )
    return _of_mode(blocks, run)


def translation_blocks(model: Translation, run: Run) -> tuple[ModelBlock, ...]:
    """A recurrent translator's embeddings, encoder, decoder with attention, and output over the vocabulary.

    run.sequence_length: tokens of the source; sizes as of `speech_blocks`. The first encoder layer reads both ways, the
    second both of its outputs. The first decoder layer asks the attention, and every later one reads the answer beside
    its input, so that each can take its whole input at once (teacher forcing). Outputs of layers from the third on are
    added to their inputs. Only the forward pass where run.mode is not training.
    """
    sizes = _Sentences.of(model, run)
    hidden, vocab = sizes.hidden, np.asarray(model.vocab, float)
    words = sizes.bytes(sizes.source + sizes.target)  # both languages
    columns = sizes.batch * sizes.target
    output = _product("output", "output", (vocab, hidden, columns))
    scores = sizes.element_bytes * columns * vocab
    loss = _stream("cross-entropy", "output", scores, _CROSS_ENTROPY)
    blocks = (
        _block("embedding", [_look_up(words)], (vocab * hidden, 1)),
        *_encoder(sizes, model.encoder_layers),
        *_decoder(sizes, model.decoder_layers),
        # with its bias
        _block("output", [output, loss], (vocab * (hidden + 1), 2), 2 * scores + sizes.bytes(sizes.target)),
    )
    return _of_mode(blocks, run)


@dataclass(frozen=True)
class _Layer:
    """A recurrent layer. columns: sequences, and steps of each."""

    gates: int
    inputs: Floats
    hidden: Floats
    columns: tuple[ArrayLike, ArrayLike]
    directions: int = 1

    @property
    def parts(self) -> list[Part]:
        """The product of its input, and the steps."""
        batch, steps = self.columns
        size = (self.gates * self.hidden, self.inputs, np.asarray(batch) * steps)
        passes = [Recurrence(self.gates, self.hidden, batch, steps, place) for place in range(3)]
        state = (
            (Op("steps", "recurrent", "forward", passes[0], self.directions),),
            (
                Op("steps, data", "recurrent", "backward", passes[1], self.directions),
                Op("steps, weights", "recurrent", "backward", passes[2], self.directions, weight=True),
            ),
        )
        return [_product("input", "linear", size, transposed=False, count=self.directions), state]

    @property
    def weights(self) -> Weights:
        """Matrices of input and state, and a bias of each."""
        outputs = self.gates * self.hidden
        # two matrices, two biases
        return self.directions * outputs * (self.inputs + self.hidden + 2), 4 * self.directions

    @property
    def stored_elements(self) -> Floats:
        """Elements that the backward pass reads: the input, and gates and state of every step."""
        batch, steps = self.columns
        width = self.inputs + self.directions * (self.gates + 1) * self.hidden
        return np.asarray(np.asarray(batch, float) * np.asarray(steps, float) * width)


@dataclass(frozen=True)
class _Sentences:
    """A batch of pairs of sentences: tokens of the source and of the target, and the width of a token."""

    hidden: Floats
    batch: Floats
    source: Floats
    target: Floats
    element_bytes: int

    @classmethod
    def of(cls, model: Translation, run: Run) -> _Sentences:
        """Sizes of an iteration; whole tokens, one at least."""
        hidden, batch, source = (np.asarray(number, float) for number in (model.hidden, run.batch, run.sequence_length))
        # as many tokens as translations have on average
        target = np.maximum(1.0, np.round(source * np.asarray(model.target_per_source)))
        return cls(hidden, batch, source, target, run.element_bytes)

    def layer(self, steps: Floats, inputs: int = 1) -> _Layer:
        """An LSTM layer that reads `inputs` times the width of a token."""
        return _Layer(GATES["lstm"], inputs * self.hidden, self.hidden, (self.batch, steps))

    def bytes(self, steps: Floats) -> Floats:
        """Bytes of the states of all steps."""
        return np.asarray(self.element_bytes * self.batch * steps * self.hidden)

    def stream(self, name: str, kind: Kind, steps: Floats, passes: Passes) -> Part:
        """Passes over the states of all steps."""
        return _stream(name, kind, self.bytes(steps), passes)


def _convolutions(model: Speech, run: Run) -> tuple[list[ModelBlock], Floats, Floats]:
    """A block for each convolution; the width of what they give for each step, and the number of its steps."""
    blocks, channels = [], np.asarray(1.0)
    height, width = np.asarray(model.bins, float), np.asarray(run.sequence_length, float)
    output = run.element_bytes * np.asarray(run.batch) * height * width
    for place, filter_ in enumerate(model.filters):
        names = ("n", "c", "h", "w", "k", "r", "s", "pad_h", "pad_w", "stride_v", "stride_h")
        sizes = (run.batch, channels, height, width, filter_.channels, *filter_.size, *filter_.pad, *filter_.stride)
        size = np.asarray(filter_.size[0]) * filter_.size[1] * channels * filter_.channels
        height, width = (
            np.maximum(
                1.0,
                # the last window that fits
                (side + 2 * np.asarray(filter_.pad[axis]) - filter_.size[axis]) // np.asarray(filter_.stride[axis]) + 1,
            )
            for axis, side in enumerate((height, width))
        )
        channels = np.asarray(filter_.channels, float)
        read = output  # the output of the convolution before
        output = run.element_bytes * np.asarray(run.batch) * channels * height * width
        parts = [
            _filters(dict(zip(names, sizes, strict=True)), first=place == 0),
            _stream("batch norm", "norm", output, _BATCH_NORM),
            _stream("clip", "activation", output, _CLIP),
        ]
        # bias, and the norm's scale and shift
        blocks.append(_block(f"convolution {place + 1}", parts, (size + 3 * channels, 4), read + output))
    return blocks, channels * height, width


def _filters(shape: Mapping[str, ArrayLike], *, first: bool) -> Part:
    """A convolution; nobody asks for the gradient of the spectrogram that the first one reads."""
    data = Op("filters, data", "convolution", "backward", Filter(shape, 1))
    weights = Op("filters, weights", "convolution", "backward", Filter(shape, 2), weight=True)
    return (Op("filters", "convolution", "forward", Filter(shape, 0)),), ((weights,) if first else (data, weights))


def _encoder(sizes: _Sentences, layers: ArrayLike) -> list[ModelBlock]:
    source, b = sizes.source, sizes.element_bytes
    # both directions of the first
    first, second, later = replace(sizes.layer(source), directions=2), sizes.layer(source, 2), sizes.layer(source)
    drop = sizes.stream("dropout", "norm", source, _DROPOUT)
    drop_both = sizes.stream("dropout", "norm", 2 * source, _DROPOUT)
    add = sizes.stream("residual", "norm", source, _ADD)
    return [
        _block("encoder layer 1", [drop, *first.parts], first.weights, b * first.stored_elements),
        _block(
            "encoder layer 2", [drop_both, *second.parts], second.weights, b * second.stored_elements, _seconds(layers)
        ),
        _block("encoder layers", [drop, *later.parts, add], later.weights, b * later.stored_elements, _others(layers)),
    ]


def _decoder(sizes: _Sentences, layers: ArrayLike) -> list[ModelBlock]:
    target, b = sizes.target, sizes.element_bytes
    first, later = sizes.layer(target), sizes.layer(target, 2)
    drop = sizes.stream("dropout", "norm", target, _DROPOUT)
    join = sizes.stream("context and input", "activation", target, _JOIN)
    entry = [join, sizes.stream("dropout", "norm", 2 * target, _DROPOUT), *later.parts]
    add = sizes.stream("residual", "norm", target, _ADD)
    return [
        _block("decoder layer 1", [drop, *first.parts], first.weights, b * first.stored_elements),
        _attention(sizes),  # asked by the first decoder layer
        _block("decoder layer 2", entry, later.weights, b * later.stored_elements, _seconds(layers)),
        _block("decoder layers", [*entry, add], later.weights, b * later.stored_elements, _others(layers)),
    ]


def _attention(sizes: _Sentences) -> ModelBlock:
    """Normalised attention of Bahdanau (arXiv:1409.0473), asked by every step of the decoder on its own.

    What tanh gives has n t_source t_target h elements over all steps, 13 GB for 64 sentences of 200 tokens at fp32: it
    is assumed not to be kept, but computed again in the backward pass.
    """
    hidden, batch, source, target = sizes.hidden, sizes.batch, sizes.source, sizes.target
    keys = sizes.bytes(source)
    scores = sizes.element_bytes * batch * source * target
    parts = [
        _product("keys", "attention", (hidden, hidden, batch * source)),
        _queries(sizes),
        _stream("scores", "attention", keys, _SCORES, count=target),  # once for each step of the decoder
        _stream("softmax", "attention", sizes.element_bytes * batch * source, _SOFTMAX, count=target),
        _context(sizes),
    ]
    return _block(
        "attention", parts, (2 * hidden * hidden + 2 * hidden + 1, 5), 2 * scores + 2 * keys + 2 * sizes.bytes(target)
    )


def _queries(sizes: _Sentences) -> Part:
    """The product of the query, step by step; the gradient of its weights over all steps at once."""
    step = Product(sizes.hidden, sizes.batch, sizes.hidden)
    every = Product(sizes.hidden, sizes.hidden, sizes.batch * sizes.target)  # gradients of weights wait for no step
    return (
        (Op("query", "attention", "forward", replace(step, transposed=True), sizes.target),),
        (
            Op("query, data", "attention", "backward", step, sizes.target),
            Op("query, weights", "attention", "backward", every, weight=True),
        ),
    )


def _context(sizes: _Sentences) -> Part:
    """The sum of what the encoder gave, by the scores; gradients of both."""
    product = Product(sizes.hidden, 1, sizes.source, sizes.batch)
    scores = Product(sizes.source, 1, sizes.hidden, sizes.batch, transposed=True)
    values = Product(sizes.hidden, sizes.source, 1, sizes.batch)
    return (
        (Op("context", "attention", "forward", product, sizes.target),),
        (
            Op("context, scores", "attention", "backward", scores, sizes.target),
            Op("context, values", "attention", "backward", values, sizes.target),
        ),
    )


def _look_up(moved: ArrayLike) -> Part:
    """Rows of an embedding; nothing waits for their gradients."""
    (forward,), (backward,) = _stream("embedding", "embedding", moved, _LOOK_UP)
    return (forward,), (replace(backward, weight=True),)  # nothing waits for it but the update


def _product(
    name: str,
    kind: Kind,
    size: tuple[ArrayLike, ArrayLike, ArrayLike],
    *,
    transposed: bool = True,
    count: ArrayLike = 1.0,
) -> Part:
    """A product with weights. size: outputs, inputs, columns. transposed: how the weights lie for the forward pass."""
    outputs, inputs, columns = size
    return (
        (Op(name, kind, "forward", Product(outputs, columns, inputs, transposed=transposed), count),),
        (
            Op(f"{name}, data", kind, "backward", Product(inputs, columns, outputs), count),
            Op(f"{name}, weights", kind, "backward", Product(inputs, outputs, columns), count, weight=True),
        ),
    )


def _stream(name: str, kind: Kind, tensor_bytes: ArrayLike, passes: Passes, count: ArrayLike = 1.0) -> Part:
    """Element-wise kernels on tensors of `tensor_bytes`."""
    moved = np.asarray(tensor_bytes, float)
    forward = Stream(passes.forward * moved, kernels=passes.forward_kernels)
    backward = Stream(passes.backward * moved, kernels=passes.backward_kernels)
    back = Op(f"{name}, data", kind, "backward", backward, count)
    # some need no backward kernel: a sum's gradient is its own
    return (Op(name, kind, "forward", forward, count),), ((back,) if passes.backward else ())


def _block(
    name: str, parts: Sequence[Part], weights: Weights, kept_bytes: ArrayLike = 0.0, count: ArrayLike = 1.0
) -> ModelBlock:
    """Parts in the order of the forward pass, then of the backward pass."""
    forward = [op for part in parts for op in part[0]]
    backward = [op for part in reversed(parts) for op in part[1]]
    return ModelBlock(name, (*forward, *backward), count, *weights, kept_bytes)


def _of_mode(blocks: Sequence[ModelBlock], run: Run) -> tuple[ModelBlock, ...]:
    """Parts of each block that the run's mode needs."""
    if run.mode == "training":
        return tuple(blocks)
    return tuple(replace(block, ops=block.of("forward"), kept=0.0) for block in blocks)


def _sum(first: Weights, second: Weights) -> Weights:
    return np.asarray(first[0]) + np.asarray(second[0]), np.asarray(first[1]) + np.asarray(second[1])


def _seconds(layers: ArrayLike) -> ArrayLike:
    """1 where there is a second layer."""
    return np.asarray(np.clip(np.asarray(layers) - 1, 0, 1))


def _others(layers: ArrayLike) -> ArrayLike:
    """Layers from the third on."""
    return np.asarray(np.maximum(np.asarray(layers) - 2, 0))
