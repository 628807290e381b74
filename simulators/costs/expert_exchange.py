"""Dispatch and combine of expert parallelism: each token to the GPUs of its experts, and their outputs back.

T tokens of a GPU, w bytes each, go to r different GPUs, and to m different nodes other than their own, on average
(`simulators.workloads.experts.distinct_places`). On S SMs (workgroups) that move b bytes/s each:

    SMs      t_s = T (token + r copy + (passes + r + m) w / b) / S    the token's own buffers, and each copy
    links    t_l = T w r (n - 1) / n / B                              in a node of n GPUs, B the rate of a GPU's links
                                                                      (on a mesh, of those to the n - 1 others)
    NIC      t_l = T w m / (B min(1, i / min(N - 1, 7)))              across N nodes, B the rate of a GPU's NIC

    time     launch + (N - 2) node + sm_launch / S + (t_s^3 + t_l^3)^(1/3)

DeepEP and MORI send a token once to each node by the NIC, and from there to the GPUs by the links (README of deepseek-
ai/DeepEP). The cubic sum stands for min(SMs, links), rounded as of GEMMs (`simulators.costs.gemm.library`; derived).
Where more than i other nodes send to a NIC its rate falls with their number, up to the eight nodes that were measured
(derived: on eight nodes of H100 it halves, whatever the SMs and the tokens). The library has kernels that wait for
notifications of counts: their time is in `launch`. Constants of each kernel and direction are fitted on some rows and
judged on the others (`validation.expert_rows`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from simulators.hardware.network import ExpertLibrary, TokenKernel, TokenKernels
from simulators.workloads.experts import distinct_places

Floats = NDArray[np.float64]
Direction = Literal["dispatch", "combine"]
_MOST_PEERS = 7  # other nodes, of those that were measured


@dataclass(frozen=True)
class RoutedTokens:
    """Tokens of one GPU and where they go; numbers or arrays that broadcast.

    token_bytes: of one token on its way. gpus, nodes: that the experts are spread over. link_share: share of a GPU's
    links that lead to these GPUs. groups: of experts, and those that a token goes to.
    """

    tokens: ArrayLike
    token_bytes: ArrayLike
    experts: ArrayLike
    per_token: ArrayLike
    gpus: ArrayLike
    nodes: ArrayLike = 1
    link_share: ArrayLike = 1.0
    groups: tuple[int, int] = (1, 1)

    @property
    def copies(self) -> Floats:
        """Different GPUs that a token goes to."""
        return distinct_places(self.gpus, self.experts, self.per_token, groups=self.groups)

    @property
    def remote_nodes(self) -> Floats:
        """Different nodes that a token goes to, other than its own."""
        nodes = np.asarray(self.nodes, float)
        places = distinct_places(nodes, self.experts, self.per_token, groups=self.groups)
        return np.asarray(places * (nodes - 1) / nodes)

    @property
    def sent_bytes(self) -> Floats:
        """Bytes that leave the GPU: over links in a node, by the NIC across nodes."""
        gpus = np.asarray(self.gpus, float)
        inside = self.copies * (gpus - 1) / gpus
        per_token = np.where(np.asarray(self.nodes) > 1, self.remote_nodes, inside)
        return np.asarray(np.asarray(self.tokens) * np.asarray(self.token_bytes) * per_token)


def kernel_seconds(kernel: TokenKernel, routed: RoutedTokens, *, num_sms: ArrayLike) -> Floats:
    """Time [s] of one kernel; 0 on one GPU."""
    tokens, sms = np.asarray(routed.tokens, float), np.asarray(num_sms, float)
    copies = routed.copies
    moved = (kernel.passes + copies + routed.remote_nodes) * np.asarray(routed.token_bytes)
    by_sms = tokens * (kernel.token_s + copies * kernel.copy_s + moved / kernel.bytes_per_s_per_sm) / sms
    share = np.where(np.asarray(routed.nodes) > 1, 1.0, routed.link_share)
    peers, incast = np.asarray(routed.nodes, float) - 1, np.inf if kernel.incast_nodes is None else kernel.incast_nodes
    falling = np.minimum(1.0, incast / np.clip(peers, 1.0, _MOST_PEERS))
    by_links = routed.sent_bytes / (kernel.bytes_per_s * share * falling)
    begin = kernel.launch_s + (kernel.node_s or 0.0) * np.maximum(peers - 1, 0.0)
    seconds = begin + kernel.sm_launch_s / sms + np.cbrt(by_sms**3 + by_links**3)
    return np.asarray(np.where(np.asarray(routed.gpus) > 1, seconds, 0.0), float)


def exchange_seconds(library: ExpertLibrary, direction: Direction, routed: RoutedTokens) -> Floats:
    """Time [s] of a dispatch or combine by the fastest kernel that a library has for it; NaN where it has none."""
    kernels = {str(kind): kernel for kind, kernel in library.kernels.items()}
    leaves = np.asarray(routed.nodes) > 1
    inside = _fastest(kernels, ("node",), direction, routed, library)
    across = _fastest(kernels, ("network", "network_low_latency"), direction, routed, library)
    return np.where(leaves, across, inside)


def _fastest(
    kernels: Mapping[str, TokenKernels],
    kinds: tuple[str, ...],
    direction: Direction,
    routed: RoutedTokens,
    library: ExpertLibrary,
) -> Floats:
    times = [
        kernel_seconds(getattr(kernels[kind], direction), routed, num_sms=library.num_sms)
        for kind in kinds
        if kind in kernels
    ]
    return np.minimum.reduce(times) if times else np.full((), np.nan)
