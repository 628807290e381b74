"""Schedules of a pipeline of p stages and m micro-batches, as closed forms over designs.

Of one micro-batch on the busiest stage: F its forward pass, B its backward pass, of which W makes gradients of weights,
c a message to a neighbour that is waited for, v virtual stages on a GPU. O: the same passes on all other stages.

    schedule      turn of a micro-batch    bubble                      micro-batches in flight, first stage (last)
    gpipe         F + B + 2 c              O + 2 (p-1) c               m (m)
    1f1b          F + B + 2 c              O + 2 (p-1) c               p (1)
    interleaved   F + B + 2 v c            O / v + 2 (p-1) c           p + (p-1) / v ((1 + p (v-1)) / v)
    zb_h1         F + B + 2 c              O - 2 O_W + 2 (p-1) c       p (p)
    zb_h2         F + B + 2 c              O - 3 O_W + 2 (p-1) c       2 p - 1 (2 p - 1)
    zbv           F + B + 4 c              O - 3 O_W + 2 (p-1) c       p (p)
    v_half        F + B + 4 c              O / 2 + 2 (p-1) c           p / 2 (p / 2)
    v_min         3 max(F, B - W, W) + 4 c 2 O / 3 + 2 (p-1) c         p / 3 (p / 3)
    dualpipe      F + B + 2 c              (p/2 - 1) (P + B - 3 W + 2 c)   p + 1 (p + 1)

    T = m turn + bubble, less F + B - P for each pair

gpipe, 1f1b and interleaved: arXiv:2104.04473, section 2.2; memory of interleaved: arXiv:2205.05198, section 5. O is
(p - 1) (F + B) where stages are equal; else a micro-batch has to pass the others at their own pace (derived). Zero
bubble (arXiv:2401.10241, Table 1, where B is the backward pass without W): (p-1) (F + B - W) and (p-1) (F + B - 2 W),
of a stage from its first work to its last (stages do not wait for one another between iterations); nothing below 0, as
W fills what other stages leave; with W no more than B, as no order fills more (derived). Messages beside compute
lengthen the bubble alone, up to where they fill the turn.

V schedules (arXiv:2405.15362; bubbles and memory where F = B - W = W, from memory of the table of
sail-sg/zero-bubble-pipeline-parallelism) give a GPU the first and the last of 2 p parts and so on inwards; v_min keeps
so few micro-batches in flight that its three passes take turns in slots of the longest (derived).

P: a forward pass and a backward pass of two micro-batches, side by side (`parallel.exchanges`), else F + B. Schedules
that alternate have m - 1 pairs on the busiest stage. DualPipe (arXiv:2412.19437, table 2, whose B is the whole backward
pass): micro-batches come from both ends, a GPU has a stage of either direction and twice the weights, and m - p - 1
pairs, those of the GPUs in the middle in the order of deepseek-ai/DualPipe 3da1bbe (counted there; the outer ones have
fewer, and wait less).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from simulators.workloads.spreading import PipelineSchedule, Schedule

Floats = NDArray[np.float64]

_WEIGHTS: Mapping[Schedule, int] = {"zb_h1": 2, "zb_h2": 3, "zbv": 3}
"""How many times the time of weight gradients is less in the bubble than the passes of other stages."""
_SHORTER: Mapping[Schedule, float] = {"v_half": 1 / 2, "v_min": 2 / 3}
"""Bubbles over that of 1F1B."""
_HELD: Mapping[Schedule, float] = {"zb_h1": 1, "zbv": 1, "v_half": 1 / 2, "v_min": 1 / 3}
"""Micro-batches in flight over the number of stages."""
_IN_V = ("zbv", "v_half", "v_min")


@dataclass(frozen=True)
class StageTurns:
    """Times [s] of one micro-batch: of its passes on the busiest stage, and on all others; arrays over designs.

    other_weights_s: of gradients of weights on the others, no more than their passes of inputs. message_s: of a message
    to a neighbour. stages, micro_batches: their numbers. directions: forward alone, or backward as well. chunks: (P, B,
    W) of the busiest stage, for DualPipe and the V schedule of least memory.
    """

    busy_s: ArrayLike
    others_s: ArrayLike
    other_weights_s: ArrayLike
    message_s: ArrayLike
    stages: ArrayLike
    micro_batches: ArrayLike
    directions: int = 2
    chunks: tuple[ArrayLike, ArrayLike, ArrayLike] = (0.0, 0.0, 0.0)

    def turn_s(self, knobs: PipelineSchedule) -> Floats:
        """Time of a micro-batch's turn."""
        sent, busy = self.messages_s(knobs), np.asarray(self.busy_s, float)
        if knobs.pipeline == "v_min":
            busy = busy + self._idle_slots_s
        if knobs.messages == "beside":  # messages lengthen a turn only where they outlast its compute
            return np.asarray(np.maximum(busy, sent), float)
        return np.asarray(busy + sent)

    @property
    def _idle_slots_s(self) -> Floats:
        """Time of one micro-batch in which its shorter passes leave their slots idle."""
        pair, backward, weights = (np.asarray(time, float) for time in self.chunks)
        forward = pair - backward
        return np.asarray(3 * np.maximum(np.maximum(forward, backward - weights), weights) - pair)

    def messages_s(self, knobs: PipelineSchedule) -> Floats:
        """Time of the messages of one micro-batch, to one neighbour in each direction."""
        return np.asarray(self.directions * virtual(knobs) * np.asarray(self.message_s, float))

    def bubble_s(self, knobs: PipelineSchedule) -> Floats:
        """Time that a stage waits for others."""
        if knobs.pipeline == "dualpipe":
            return self._from_both_ends_s
        # the ramp has virtual stages, each that much shorter
        shorter = 1 / virtual(knobs) if knobs.pipeline == "interleaved" else _SHORTER.get(knobs.pipeline, 1.0)
        passes = np.asarray(self.others_s, float) * shorter
        filled = _WEIGHTS.get(knobs.pipeline, 0) * np.asarray(self.other_weights_s, float)
        ramp = self.directions * (np.asarray(self.stages, float) - 1) * np.asarray(self.message_s, float)
        return np.asarray(np.maximum(passes - filled, 0.0) + ramp)  # gradients of weights fill no more than there is

    @property
    def _from_both_ends_s(self) -> Floats:
        pair, backward, weights = (np.asarray(time, float) for time in self.chunks)
        waited = np.maximum(pair + backward - 3 * weights, 0.0) + self.directions * np.asarray(self.message_s)
        # stages from both ends meet in the middle
        return np.asarray(np.maximum(np.asarray(self.stages, float) / 2 - 1, 0.0) * waited)

    def seconds(self, knobs: PipelineSchedule) -> Floats:
        """All micro-batches."""
        return np.asarray(np.asarray(self.micro_batches, float) * self.turn_s(knobs) + self.bubble_s(knobs))


def virtual(knobs: PipelineSchedule) -> Any:
    """Virtual stages of a GPU: one unless the schedule is interleaved, or goes to the last stage and back."""
    if knobs.pipeline in _IN_V:
        return np.asarray(2.0)
    return np.asarray(knobs.virtual_stages, float) if knobs.pipeline == "interleaved" else np.ones(())


def in_flight(knobs: PipelineSchedule, stages: ArrayLike, micro_batches: ArrayLike) -> tuple[Floats, Floats]:
    """Micro-batches whose activations the first and the last stage keep at most."""
    p, m, v = np.asarray(stages, float), np.asarray(micro_batches, float), virtual(knobs)
    first, last = p, np.ones(())
    if knobs.pipeline == "gpipe":
        first = last = m
    elif knobs.pipeline == "interleaved":
        several = v > 1  # one virtual stage is 1F1B
        first, last = np.where(several, p + (p - 1) / v, p), np.where(several, (1 + p * (v - 1)) / v, 1.0)
    elif knobs.pipeline == "dualpipe":
        first = last = p + 1
    elif knobs.pipeline != "1f1b":
        stages_of = _HELD.get(knobs.pipeline)
        first = last = 2 * p - 1 if stages_of is None else np.ceil(stages_of * p)
    return np.minimum(m, first), np.minimum(m, last)  # no more than there are


def overlaps(knobs: PipelineSchedule, stages: ArrayLike, micro_batches: ArrayLike, *, training: bool) -> Floats:
    """How often exchanges of experts run beside other work, for each micro-batch: in each, in a pair of two, or in a
    pair of a forward and a backward pass.
    """
    if knobs.exchanges != "two_micro_batches":  # each micro-batch overlaps exchanges with its own shared expert
        return np.ones(())
    if not training:
        return np.asarray(0.5)  # two micro-batches make a pair
    # the first has no partner; of DualPipe, as many as stages more
    m, alone = np.asarray(micro_batches, float), 1.0 + np.asarray(stages, float) * (knobs.pipeline == "dualpipe")
    return np.asarray(np.maximum(m - alone, 0.0) / m)
