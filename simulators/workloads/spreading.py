"""Knobs of how a model is spread over GPUs in time: schedules of pipelines, and states that data parallelism splits.

`simulators.workloads.model.Parallel` has all of them beside the degrees of parallelism.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dse.values import Frozen, knob
from dse.values.units import Integer, Number

Schedule = Literal["gpipe", "1f1b", "interleaved", "zb_h1", "zb_h2", "zbv", "v_half", "v_min", "dualpipe"]
"""Schedules of a pipeline: GPipe (arXiv:1811.06965); one forward, one backward in turn, and that of several virtual
stages on a GPU (arXiv:2104.04473); zero bubble with the memory of 1F1B (H1), or twice as much (H2; arXiv:2401.10241);
through all GPUs and back, with the memory of 1F1B, a half, or a third (V schedules, arXiv:2405.15362);
from both ends at once, with two stages on each GPU (DualPipe, arXiv:2412.19437).
"""
Exchanges = Literal["waited", "shared_expert", "two_micro_batches", "one_kernel"]
"""What dispatch and combine of experts run beside (`simulators.steps.overlap.expert_exchanges`): nothing, the shared
expert, the other of two micro-batches, or, in one kernel with them, the products of other tiles of the experts.
"""


class PipelineSchedule(Frozen):
    """Schedule of a pipeline (`simulators.steps.spread.pipelines`).

    virtual_stages: parts of the model on each GPU, of `interleaved`. messages: between stages, which the next operator
    waits for, or beside compute. scatter_gather: each GPU of tp sends its share of a message over its own NIC, and the
    receivers gather the shares inside their node (arXiv:2104.04473, section 4.1). ends: embedding and output lie
    `beside` the layers of the first and the last stage; or count as layers themselves, so that these have one less
    (`account_for_embedding_in_pipeline_split`, `account_for_loss_in_pipeline_split` of Megatron-LM); or stages are
    balanced, with whole layers placed so that the longest one is the shortest possible
    (`pipeline_model_parallel_layout`; `simulators.steps.run.stages`). backward_sums:
    of tp in the backward pass, which all waits for, or which run beside gradients of weights
    (`simulators.steps.run.passes`). exchanges: of experts, which all waits for, or which run beside the shared
    expert or the other of two micro-batches; a design that waits for them says nothing of it, so that old designs keep
    their keys.
    """

    pipeline: Annotated[Schedule, knob(structural=True)] = "1f1b"
    virtual_stages: Annotated[Integer, Field(ge=1, le=1024)] = 1
    messages: Annotated[Literal["waited", "beside"], knob(structural=True)] = "waited"
    scatter_gather: Annotated[bool, knob(structural=True)] = False
    ends: Annotated[Literal["beside", "layers", "balanced"], knob(structural=True)] = "beside"
    backward_sums: Annotated[Literal["waited", "beside_weights"], knob(structural=True)] = "waited"
    exchanges: Annotated[Exchanges, knob(structural=True)] = "waited"

    @property
    def held_stages(self) -> int:
        """Stages whose weights a GPU holds beside virtual ones: two where micro-batches come from both ends."""
        return 2 if self.pipeline == "dualpipe" else 1


class RingSums(Frozen):
    """Bytes that a framework moves to add what one part of a ring gives to those before it (`Kernels.ring`).

    outputs, keys: forward, for each number of attention's outputs, and of keys and values; output_gradients,
    key_gradients: in the backward pass. kernels, gradient_kernels: launched for each part. repeated: whether keys and
    values are copied for each head of queries before they go round.
    """

    outputs: Annotated[Number, Field(ge=0, le=1e3)]
    keys: Annotated[Number, Field(ge=0, le=1e3)]
    output_gradients: Annotated[Number, Field(ge=0, le=1e3)]
    key_gradients: Annotated[Number, Field(ge=0, le=1e3)]
    kernels: Annotated[Number, Field(ge=0, le=1e3)]
    gradient_kernels: Annotated[Number, Field(ge=0, le=1e3)]
    repeated: Annotated[bool, knob(structural=True)] = False


class ShardedData(Frozen):
    """States that the GPUs of dp split (ZeRO, arXiv:1910.02054; `steps.spread.sharded_states`), and their exchange.

    zero: 0: nothing; 1: the state of the optimizer; 2: gradients as well, reduced after each micro-batch; 3: weights as
    well (FSDP, arXiv:2304.11277), gathered layer by layer for the forward pass and, where `reshard` drops them after
    it, again for the backward pass. prefetch: weights of the next layer are gathered beside the present one. reductions
    of gradients: `beside` the last backward pass, or after it. gradient_bytes: of an element that is reduced; None for
    that of an activation (4: fp32 main gradients). shard_gpus: neighbours among which states are split, which other
    such groups repeat (hybrid sharding, arXiv:2304.11277, section 3.2.2); None for all of dp (with cp).
    """

    zero: Annotated[Literal[0, 1, 2, 3], knob(structural=True)] = 0
    reshard: Annotated[bool, knob(structural=True)] = True
    prefetch: Annotated[bool, knob(structural=True)] = True
    reductions: Annotated[Literal["beside", "after"], knob(structural=True)] = "beside"
    gradient_bytes: Annotated[Literal[2, 4] | None, knob(structural=True)] = None
    shard_gpus: Annotated[Integer | None, knob(structural=True, ge=1, le=2**20)] = None


class LibraryCtas(Frozen):
    """CTAs of the library's kernels over tp, and of those over dp that reduce gradients and gather split weights.

    0: as many as the library takes.
    """

    tp_ctas: Annotated[Integer, knob(structural=True, ge=0, le=256)] = 0
    dp_ctas: Annotated[Integer, knob(structural=True, ge=0, le=256)] = 0
