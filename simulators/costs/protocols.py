"""Collectives by a library with three protocols, as NCCL and RCCL have them, and by a switch that adds and copies.

A collective of S bytes among n GPUs on N nodes takes s dependent steps, in which a GPU sends w bytes:

    collective       S                               s                  w
    all_reduce       the tensor every GPU holds      2(N + n/N - 2)     2(n-1)/n S
    all_gather       the tensor every GPU ends with  N + n/N - 2        (n-1)/n S
    reduce_scatter   the tensor every GPU begins with   as all_gather
    all_to_all       what a GPU sends to all, itself included   as all_gather
    send_recv        the message                     1                  S

    B      = bytes_per_s scaling^d      d = log2(n / 2) inside a node, log2(n / N) across nodes;
                                        inside a node each doubling to n by (n-1) / (n-2) at most, as w grows
    LL     = launch + s ll_step    + w / (ll_share B) + ll_fill min(1, S / (4096 n))
    LL128  = launch + s ll128_step + w / (ll128_share B)
    Simple = launch + simple + max(s step + w / (copy_speed B) + s fill min(1, w / fill_bytes), w / B)
    T      = max(host, min(LL, LL128, Simple))

LL sends a flag with every four bytes and needs no fence, LL128 one with every 120; Simple waits for fences and fills a
pipeline of chunks that grow with the message until the library's buffers are full (NCCL, `src/graph/tuning.cc`, which
has a base latency for each protocol and one for each of its steps; the form of the filling is derived). LL gives a
message to one channel of 512 threads with a word of 8 bytes for each rank, before it takes more channels
(`src/enqueue.cc`), so that it waits for that many threads from 4096 n bytes on. Where CTAs copy faster than the links
carry (`copy_speed`), the waits of some channels are hidden behind the bytes of others (derived).

The library takes no minimum of true times but of its own estimates, with r = n / s (`tuned`, of rings over NVLink):

    6.6 us + 0.6 us s + S / (r ll),    14 us + 1.9 us s + S / (r ll128),    8.4 us + 3.4 us s + S / (r simple)

so that times step where it changes over (2.27 to 2.30, `ncclTopoTuneModel`, `ncclTopoGetAlgoTime`). All-gathers and
reduce-scatters are rings; an all-reduce is chosen among rings, trees and the switch, which are not told apart here.

Across nodes chains run inside the nodes and between them, by as many NICs as a node has GPUs in the group, so that
their rates add up (derived). Where a host calls one collective after another, the GPU whose host is ahead waits in the
kernel for the others, which takes no less than the time between two calls (`host`, derived; a GPU whose own host is
last sees the rest alone). Eleven or twelve constants for each collective, fitted on at most 24 rows (`dse machine
calibrate`).

By a switch (NVLink SHARP, multimem) a GPU orders the reduction of its share of a tensor, which the switch reads from
all GPUs, and writes the sum once, which the switch copies to all of them:

    T = latency + w / min(B, c r)       w = (1 + 1/n) S for an all-reduce, else S      c: CTAs, r: rate of a CTA

The links carry all of S: out of a GPU for a reduction, into it for a copy; an all-reduce does both at once, and its sum
goes out once more (derived). Three constants for each collective, fitted on at most 12 rows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from simulators.hardware.network import CollectiveKind, Protocols, SwitchRate, TunedRates

Floats = NDArray[np.float64]

_TUNED_S, _TUNED_STEP_S = (6.6e-6, 14e-6, 8.4e-6), (0.6e-6, 1.9e-6, 3.4e-6)  # of LL, LL128, Simple (NCCL, tuning.cc)
_FULL_CHANNEL = 512 * 8  # bytes of each rank with which every thread of a channel has a word of LL


def protocol_seconds(
    constants: Protocols, kind: CollectiveKind, num_gpus: ArrayLike, payload: ArrayLike, *, num_nodes: ArrayLike = 1
) -> Floats:
    """Time [s] of a collective of `payload` bytes among 2 or more GPUs; 0 for one GPU. Arrays broadcast."""
    n, size, nodes = (np.asarray(number, float) for number in (num_gpus, payload, num_nodes))
    passes, together = 2.0 if kind == "all_reduce" else 1.0, n / nodes  # scattered, then gathered
    steps, wire = passes * (nodes + together - 2), passes * (n - 1) / n * size
    if kind == "send_recv":
        steps, wire = np.ones(()), size
    # rates grow or fall with each doubling of the GPUs beyond two, or of those in a node
    doublings = np.log2(np.where(nodes > 1, np.maximum(together, 1), np.maximum(n, 2) / 2))
    rate = constants.bytes_per_s * np.where(
        nodes > 1, constants.scaling**doublings, _growth(constants.scaling, doublings)
    )
    setup_s, host_s = (0.0 if part is None else part for part in (constants.simple_s, constants.host_s))
    low_latency = steps * constants.ll_step_s + wire / (constants.ll_share * rate)
    if constants.ll_fill_s is not None:
        low_latency = low_latency + constants.ll_fill_s * np.minimum(1.0, size / (_FULL_CHANNEL * n))
    flag_of_128 = steps * constants.ll128_step_s + wire / (constants.ll128_share * rate)
    carried = wire / rate
    waits = steps * constants.step_s
    if constants.fill_s is not None:  # chunks grow until the buffers are full
        waits = waits + steps * constants.fill_s * np.minimum(1.0, wire / constants.fill_bytes)
    simple = setup_s + waits + carried
    if constants.copy_speed is not None:
        simple = setup_s + np.maximum(waits + carried / constants.copy_speed, carried)
    if constants.tuned is None:
        seconds = constants.launch_s + np.minimum(np.minimum(low_latency, flag_of_128), simple)
    else:
        first, second, third = _estimates(constants.tuned, steps, n, size)
        larger = np.where(second <= third, flag_of_128, simple)
        seconds = constants.launch_s + np.where(first <= np.minimum(second, third), low_latency, larger)
    # the GPU whose host is ahead waits for the others
    return np.asarray(np.where(n > 1, np.maximum(seconds, host_s), 0.0), float)


def _estimates(tuned: TunedRates, steps: Floats, n: Floats, size: Floats) -> list[Floats]:
    """Times [s] by LL, LL128 and Simple that the library expects of a ring."""
    rates = (tuned.ll_bytes_per_s, tuned.ll128_bytes_per_s, tuned.bytes_per_s)
    share = size * (np.maximum(steps, 1.0) / n)
    tuned_s = zip(_TUNED_S, _TUNED_STEP_S, rates, strict=True)
    return [base + step * steps + share / np.asarray(rate) for base, step, rate in tuned_s]


def _growth(scaling: ArrayLike, doublings: Floats) -> Floats:
    """Factor on the rate inside a node after doublings of two GPUs, by which more GPUs never take less time."""
    factor = np.ones(doublings.shape)
    for step in range(1, 1 + int(np.ceil(doublings.max(initial=0.0)))):
        gpus = 2.0 ** (step + 1)
        # bytes that each GPU sends grow by as much
        growth = np.minimum(scaling, (gpus - 1) / (gpus - 2))
        factor = factor * growth ** np.clip(doublings - (step - 1), 0.0, 1.0)
    return np.asarray(factor)


def in_switch_seconds(
    constants: SwitchRate, kind: str, num_gpus: ArrayLike, payload: ArrayLike, *, num_ctas: ArrayLike = np.inf
) -> Floats:
    """Time [s] of a collective of `payload` bytes that the switch computes; 0 for one GPU. Arrays broadcast.

    num_ctas: that order it; as many as it takes unless said otherwise.
    """
    n, size = np.asarray(num_gpus, float), np.asarray(payload, float)
    wire = size * (1 + 1 / n) if kind == "all_reduce" else size  # the reduced share goes out once more
    rate = np.minimum(constants.bytes_per_s, np.asarray(num_ctas) * constants.bytes_per_s_per_cta)
    return np.asarray(np.where(n > 1, constants.latency_s + wire / rate, 0.0), float)
