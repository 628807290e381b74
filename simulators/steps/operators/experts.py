"""Layers with experts in an iteration: router, dispatch, GEMMs of experts, combine, and shared experts.

T tokens of the GPU's replica, k experts of E for each, F_e the width inside an expert, t = tp, g = ep GPUs that share
the experts of a layer (`simulators.workloads.model.Parallel`). With g = 1 experts are split by tp as other layers are:
each GPU has all tokens and F_e / t of each expert, whose partial sums are added over tp. With g > 1 a GPU has E / g
whole experts, routes T' = T / t of the tokens, and sends each to the GPUs of its experts; the busiest one gets L times
the mean (`simulators.workloads.experts.MixtureOfExperts.busiest_load`), and all wait for it: tokens fall unevenly even
where a router prefers no expert. As grouped GEMMs (m, n, k), column-major, with N tokens in all for the experts of a
GPU, of which `a` get some, as many as on the GPU that reads most of its experts:

    N = k T' L (g > 1), k T (g = 1)     mean of a = E / g (1 - (1 - k / E)^(g T'))        router (E, T', H)
    expert fc1 (2 F_e, N / a, H) x a    expert fc2 (H, N / a, F_e) x a           gated: twice F_e

`permute` and `unpermute` put tokens in the order of experts and back. Shared experts are a feed-forward layer of their
own, split by tp (Megatron-LM), whose sum the routed outputs are added to. Kept for the backward pass: b N (H + 3 F_e)
and b N H of outputs, which the gradients of the router's weights need. Dispatch and combine cost what
`simulators.costs.expert_exchange` says, or an all-to-all where a node's library has none for them; in the backward pass
each is the other. At fp8 tokens and their gradients go to experts in fp8 and come back in 16 bits (arXiv:2412.19437,
section 3.3). All waits for them, or they run beside other work (`parallel.exchanges`,
`simulators.steps.overlap.expert_exchanges`).

With expert tensor parallelism e = etp GPUs share each expert: they gather their rows, so that N = k T' L e and F_e is
F_e / e, and add their parts after the products.

What a framework adds (`kernels.experts`): passes over the N rows beside the products, each way; kernels that pick
experts; launches for each expert by a host that waits for the counts of tokens (`simulators.steps.run.iteration`); and
how tokens travel: as above, as k copies of each token in an all-to-all, or once to each node by the NIC beside once to
each GPU over its links; and passes that add biases after the second products, or cut outputs of the
first ones to a range.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from simulators.costs.algorithms import Pattern
from simulators.costs.collective import Group, collective_cost
from simulators.costs.expert_exchange import Direction, RoutedTokens, exchange_seconds
from simulators.steps.operators.sizes import Sizes, gather_tokens, product, reduce_partial_sums, stream
from simulators.steps.operators.work import Exchange, Op, Phase, Product, Stream
from simulators.workloads.experts import ExpertExchange, ExpertKernels, MixtureOfExperts, distinct_places
from simulators.workloads.stored import Part

Floats = NDArray[np.float64]
_FP32 = 4  # bytes of a score


@dataclass(frozen=True)
class TokenExchange(Exchange):
    """Dispatch or combine of `tokens` tokens of a GPU. payload_bytes: what it sends, its own share included.

    width: numbers of a token. fp8: whether a dispatch is in fp8. load: of the busiest GPU over the mean. how: by the
    library of expert parallelism, if there is one, or otherwise (`simulators.workloads.model.ExpertKernels`).
    """

    direction: Direction = "dispatch"
    tokens: ArrayLike = 0.0
    width: ArrayLike = 0.0
    element: float = 2.0
    fp8: bool = False
    experts: ArrayLike = 1
    per_token: ArrayLike = 1
    groups: tuple[int, int] = (1, 1)
    load: ArrayLike = 1.0
    how: ExpertExchange = "library"

    @property
    def backward(self) -> TokenExchange:
        """The exchange of the gradients, the other way round; what goes to experts is in fp8 then, too."""
        other: Direction = "combine" if self.direction == "dispatch" else "dispatch"
        return replace(self, direction=other)

    def library_seconds(self, group: Group) -> Floats | None:
        """Time [s] of the busiest GPU by the library of expert parallelism; None without one, NaN without a kernel."""
        if group.experts is None or self.how == "all_to_all":
            return None
        small = self.fp8 and self.direction == "dispatch"  # a combine comes back in 16 bits
        token_bytes = np.asarray(self.width, float) * (group.experts.fp8_bytes if small else self.element)
        tokens = np.asarray(self.tokens, float) * np.asarray(self.load)  # all wait for the busiest GPU
        places = (group.num_gpus, group.num_nodes, group.link_share)
        routed = RoutedTokens(tokens, token_bytes, self.experts, self.per_token, *places, self.groups)
        if self.how == "hybrid":
            return _by_levels(routed, group)
        return exchange_seconds(group.experts, self.direction, routed)


def _by_levels(routed: RoutedTokens, group: Group) -> Floats:
    """Time [s] of tokens that go once to each node by the NIC, beside once to each GPU over its links (HybridEP).

    Assumed: links as fast as in an all-to-all of the library of collectives; no kernel of HybridEP was measured.
    """
    sent = np.asarray(routed.tokens, float) * np.asarray(routed.token_bytes)
    node = replace(group, num_nodes=1.0, network=None, network_bytes_per_s=None)
    links = collective_cost("all_to_all", "direct", sent * routed.copies, node).seconds
    if group.network_bytes_per_s is None:
        return links
    return np.asarray(np.maximum(links, sent * routed.remote_nodes / np.asarray(group.network_bytes_per_s)))


@dataclass(frozen=True)
class _TokenRouting:
    """Numbers of the docstring: tokens that a GPU routes (T'), rows for its experts (N), active experts (a).

    preferred: load of the busiest GPU by the router's preferences alone, which exchanges have beside their measured
    times: these are of tokens drawn at random, and hold how unevenly such tokens fall.
    """

    tokens: Floats
    rows: Floats
    active: Floats
    local: Floats
    width: Floats
    preferred: Floats


def _moe(sizes: Sizes) -> MixtureOfExperts:
    assert sizes.model.moe is not None
    return sizes.model.moe


def _kernels(sizes: Sizes) -> ExpertKernels:
    return sizes.kernels.experts or ExpertKernels()


def _routing(sizes: Sizes) -> _TokenRouting:
    moe, ep = _moe(sizes), sizes.parallel.ep
    split = sizes.tp if ep > 1 else np.ones(())  # with ep, each GPU of tp routes its share of the tokens
    tokens, experts = sizes.tokens / split, np.asarray(moe.experts, float)
    etp = sizes.parallel.etp
    load = moe.busiest_load(ep, tokens * ep * etp)
    rows = np.asarray(moe.experts_per_token, float) * tokens * load * etp
    # whole experts with ep, or slices over etp; slices of each without
    width = np.asarray(moe.expert_ffn, float) / (etp if ep > 1 else sizes.tp)
    local = experts / ep
    active = np.minimum(local * moe.active_experts(tokens * ep * etp, ep), rows)  # no more experts than rows
    return _TokenRouting(tokens, rows, active, local, width, moe.busiest_load(ep))


def _expert_hidden(sizes: Sizes) -> Floats:
    """Width of what experts read and write."""
    width = _moe(sizes).expert_hidden
    return sizes.hidden if width is None else np.asarray(width, float)


def expert_feed_forward(sizes: Sizes) -> Iterator[Op]:
    """Operators of a feed-forward layer of experts with the norm before them, forward."""
    routing, split = _routing(sizes), sizes.parallel.ep > 1
    yield stream(sizes, "norm ffn", "norm", sizes.kernels.norm)
    if not split:
        yield from gather_tokens(sizes, "ffn")
    experts = np.asarray(_moe(sizes).experts, float)
    # frameworks do not narrow the router's product
    yield Op("router", "fc", "forward", product(experts, routing.tokens, sizes.hidden), unnarrowed=True)
    kernels = np.asarray(_kernels(sizes).router, float)
    if sizes.run.mode == "training":
        kernels = kernels + np.asarray(_kernels(sizes).losses, float)
    if np.any(kernels > 0):
        scores = kernels * 2 * _FP32 * routing.tokens * experts  # read and written by each
        yield Op("routing", "activation", "forward", Stream(scores, kernels=kernels, like="add", like_bytes=scores))
    narrow = _expert_hidden(sizes)
    if _moe(sizes).expert_hidden is not None:  # experts that work on narrower activations
        yield Op("expert down", "fc", "forward", product(narrow, routing.tokens, sizes.hidden))
    if split:
        yield _exchange(sizes, routing, "dispatch")
        yield from _shared_rows(sizes, routing, "all_gather")
    yield from _experts(sizes, routing)
    if split:
        yield from _shared_rows(sizes, routing, "reduce_scatter")
        yield _exchange(sizes, routing, "combine")
    if _moe(sizes).expert_hidden is not None:
        yield Op("expert up", "fc", "forward", product(sizes.hidden, routing.tokens, narrow))
    if split and not sizes.parallel.sequence_parallel:  # else the next layer's gather does it
        yield Op("all-gather experts", "fc", "forward", Exchange("all_gather", sizes.activations))
    yield from _shared(sizes)
    if not split:
        yield from reduce_partial_sums(sizes, "ffn")


def _shared_rows(sizes: Sizes, routing: _TokenRouting, pattern: Pattern) -> Iterator[Op]:
    """The rows of GPUs that share each expert, gathered before its products, or their parts added after them."""
    if sizes.parallel.etp > 1:
        payload = sizes.element * routing.rows * _expert_hidden(sizes)
        yield Op(f"{pattern.replace('_', '-')} expert rows", "fc", "forward", Exchange(pattern, payload, "etp"))


def _experts(sizes: Sizes, routing: _TokenRouting) -> Iterator[Op]:
    """Grouped GEMMs of the experts of a GPU, between two changes of the tokens' order."""
    hidden = _expert_hidden(sizes)
    kernels = _kernels(sizes)
    orders = np.asarray(kernels.orders) * (2 if kernels.exchange == "all_to_all" else 1)  # on either side of it
    moved = orders * sizes.element * routing.rows * hidden  # read in one order, written in the other
    rows_each = routing.rows / routing.active
    wide = routing.width * (2 if sizes.model.gated else 1)  # gate and up projection in one product
    parts: dict[str, Any] = {"batch": routing.active, "transposed": True, "grouped": True}
    launches = np.asarray(kernels.products) * routing.local
    ordered = sizes.parallel.exchanges != "one_kernel"  # which sends rows to where their expert reads them
    if ordered:
        yield Op("permute", "activation", "forward", Stream(moved, like="add", like_bytes=moved))
    yield Op("expert fc1", "fc", "forward", Product(wide, rows_each, hidden, **parts), launches=launches)
    yield from _row_passes(sizes, routing, EXPERT_CLAMP)
    gated = sizes.gate * routing.width * routing.rows
    yield stream(sizes, "expert activation", "activation", sizes.kernels.activation, gated)
    yield Op("expert fc2", "fc", "forward", Product(hidden, rows_each, routing.width, **parts), launches=launches)
    yield from _row_passes(sizes, routing, EXPERT_BIAS)
    if ordered:
        yield Op("unpermute", "activation", "forward", Stream(moved, like="add", like_bytes=moved))


EXPERT_BIAS, EXPERT_CLAMP = "expert bias", "expert clamp activation"
"""Names of what adds the biases of experts, and of what cuts activations to a range."""


def _row_passes(sizes: Sizes, routing: _TokenRouting, name: str, phase: Phase = "forward") -> Iterator[Op]:
    """What adds the biases of the second products, or cuts outputs of the first ones; nothing where a model has none.

    A framework multiplies each row's probability by the bias of its expert and adds that, expert by expert, then joins
    the parts (TEGroupedMLP._apply_bias of Megatron-Core); it cuts both halves of a gated product, and joins them
    (weighted_bias_quick_geglu_impl).
    """
    kernels, moe = _kernels(sizes), _moe(sizes)
    if name == EXPERT_BIAS:
        asked, passes = moe.biased, (kernels.biases or {}).get(kernels.exchange)
        width, count = _expert_hidden(sizes), routing.local
    else:
        asked, passes = moe.clamped, kernels.clamps
        width, count = routing.width * (2 if sizes.model.gated else 1), np.ones(())
    if not asked or passes is None:
        return
    times, launched = (passes.forward, passes.forward_kernels)
    if phase == "backward":
        times, launched = (passes.backward, passes.backward_kernels)
    moved = np.asarray(times, float) * sizes.element * routing.rows * width
    yield Op(name, "activation", phase, Stream(moved, kernels=np.asarray(launched, float) * count))


def gradients_of_rows(sizes: Sizes, name: str) -> Stream:
    """Gradients of what adds biases of experts (rows, biases, probabilities), or of what cuts activations."""
    (op,) = _row_passes(sizes, _routing(sizes), name, "backward")
    assert isinstance(op.work, Stream)
    return op.work


def _shared(sizes: Sizes) -> Iterator[Op]:
    """Shared experts as a feed-forward layer; with whole experts on each GPU its collectives are its own."""
    moe, apart = _moe(sizes), sizes.parallel.ep > 1
    if not np.any(np.asarray(moe.shared_experts) > 0):  # no shared experts in any design
        return
    width = moe.width_of_shared / sizes.tp
    if apart:
        yield from gather_tokens(sizes, "ffn shared")
    wide = width * (2 if sizes.model.gated else 1)
    name = "shared fc1" if apart else "shared expert fc1"  # experts split by tp read the same tokens: one sum for both
    yield Op(name, "fc", "forward", product(wide, sizes.tokens, sizes.hidden))
    yield stream(sizes, "shared activation", "activation", sizes.kernels.activation, sizes.gate * width * sizes.tokens)
    yield Op("shared fc2", "fc", "forward", product(sizes.hidden, sizes.tokens, width))
    if apart:
        yield from reduce_partial_sums(sizes, "ffn shared")


def _exchange(sizes: Sizes, routing: _TokenRouting, direction: Direction) -> Op:
    """Tokens to the GPUs of their experts, or back."""
    moe = _moe(sizes)
    groups = moe.picked_groups
    kernels = _kernels(sizes)
    places = distinct_places(sizes.parallel.ep, moe.experts, moe.experts_per_token, groups=groups)
    if kernels.exchange == "all_to_all":  # a copy for each expert, also of those on one GPU
        places = np.asarray(moe.experts_per_token, float)
    payload = sizes.element * routing.tokens * _expert_hidden(sizes) * places * routing.preferred
    work = TokenExchange(
        "all_to_all",  # where a node's library has no kernels for experts
        payload,
        "ep",
        direction=direction,
        tokens=routing.tokens,
        width=_expert_hidden(sizes),
        element=sizes.element,
        fp8=sizes.run.precision == "fp8",
        experts=moe.experts,
        per_token=moe.experts_per_token,
        groups=groups,
        load=routing.preferred,
        how=kernels.exchange,
    )
    return Op(direction, "fc", "forward", work, launches=kernels.moved)


def expert_params(sizes: Sizes) -> Any:
    """Weights of the routed experts of a layer on one GPU."""
    routing = _routing(sizes)
    return routing.local * routing.width * (3 if sizes.model.gated else 2) * _expert_hidden(sizes)


def parts_of_experts(sizes: Sizes) -> dict[Part, Any]:
    """Weights of one GPU of a layer by part: experts with what they read from, router, shared experts."""
    moe, matrices = _moe(sizes), 3 if sizes.model.gated else 2
    parts: dict[Part, Any] = {
        "experts": expert_params(sizes) + _between(sizes),
        "router": np.asarray(moe.experts, float) * sizes.hidden,
    }
    if np.any(np.asarray(moe.shared_experts) > 0):
        parts["shared"] = matrices * moe.width_of_shared / sizes.tp * sizes.hidden
    return parts


def _between(sizes: Sizes) -> Any:
    """Weights between the activations and what experts read and write; none where these are the same."""
    width = _moe(sizes).expert_hidden
    return 0.0 if width is None else 2 * np.asarray(width, float) * sizes.hidden


def weights_of_experts(sizes: Sizes) -> tuple[Any, int]:
    """(weights of one GPU, tensors) of router, experts and shared experts; experts of a GPU are stacked in tensors."""
    moe, matrices = _moe(sizes), 3 if sizes.model.gated else 2
    router = np.asarray(moe.experts, float) * sizes.hidden
    shared = matrices * moe.width_of_shared / sizes.tp * sizes.hidden
    # stacked experts and shared experts; and the router
    return expert_params(sizes) + router + shared + _between(sizes), 2 * matrices + 1


def kept_bytes_of_experts(sizes: Sizes, *, activations: bool = True) -> Any:
    """Bytes that experts and shared experts of a layer keep for the backward pass. activations: with their outputs.

    Outputs of the second products are not kept: probabilities are multiplied before them
    (weighted_bias_swiglu_impl of Megatron-Core).
    """
    # one tensor less: computed again
    routing, matrices = _routing(sizes), (3 if sizes.model.gated else 2) - (not activations)
    routed = routing.rows * (_expert_hidden(sizes) + matrices * routing.width)
    shared = sizes.tokens * matrices * _moe(sizes).width_of_shared / sizes.tp
    return sizes.element * (routed + shared)


def inputs_of_experts(sizes: Sizes, *, activations: bool = True) -> Any:
    """Numbers that products of experts and shared experts of a layer read and that are kept, beside the activations of
    the layer itself. activations: with those of the second products, which are computed again otherwise.
    """
    routing = _routing(sizes)
    shared = sizes.tokens * _moe(sizes).width_of_shared / sizes.tp
    seconds = routing.rows * routing.width + shared if activations else 0.0
    return routing.rows * _expert_hidden(sizes) + seconds
