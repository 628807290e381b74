"""Mixtures of experts and latent attention: widths, and how the tokens spread over experts and GPUs.

E experts stand on G GPUs (or nodes) in equal parts; a router sends each token to k of them. With all choices equally
likely (hypergeometric), a token goes to

    G (1 - C(E - E/G, k) / C(E, k))     different GPUs on average

A router may first pick L of M groups of experts (DeepSeek-V3: 4 of 8 nodes), and k of their E' = E L / M experts. A
GPU that holds experts of h groups, of which j are picked (hypergeometric), is missed with the chance
C(E' - j E / (G h), k) / C(E', k).
Popular experts get more than others. With c the coefficient of variation of the tokens of an expert, those of a GPU
with E/G experts drawn at random vary by (variance of a mean, sampling without replacement)

    c_G^2 = c^2 (1 - 1/G) / (E/G) E / (E - 1)

and the busiest of G GPUs has, relative to the mean, 1 + c_G z((G - 3/8) / (G + 1/4)), with z the quantile of the normal
distribution: the expected largest of G normal numbers by Blom (Statistical Estimates and Transformed Beta-Variables,
1958); not more than all of the tokens. c = 0 is a router that balances perfectly; popularities of a Dirichlet
distribution of concentration a have c^2 = (E - 1) / (a E + 1) (derived).
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from math import comb
from statistics import NormalDist
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field

from dse.values import Frozen, knob
from dse.values.units import Integer, Number
from simulators.hardware.parts import Grown

Floats = NDArray[np.float64]
Width = Annotated[Integer, Field(ge=1, le=2**31)]
_BLOM = 3 / 8


class MixtureOfExperts(Grown):
    """Feed-forward layers of which a router picks `experts_per_token` for each token.

    expert_ffn: width inside an expert. groups, groups_per_token: groups of experts, of which a token goes to some alone
    (None: to all). shared_experts: experts that every token goes to; shared_ffn: width inside one
    of them, None for expert_ffn. dense_layers: first layers of the model that have one feed-forward layer instead, of
    width model.ffn. imbalance: coefficient of variation of the tokens that
    experts get by the router's preferences; 0: all are as likely, and few tokens still fall unevenly.
    expert_hidden: width of what experts read and write, computed from the activations and back (None: these). biased:
    whether a bias is added to what an expert writes; clamped: whether activations are cut to a range (gpt-oss; None:
    not).
    """

    experts: Width
    experts_per_token: Width
    expert_ffn: Width
    groups: Annotated[Integer, knob(structural=True, ge=1, le=2**10)] = 1
    groups_per_token: Annotated[Integer | None, knob(structural=True, ge=1, le=2**10)] = None
    shared_experts: Annotated[Integer, knob(structural=True, ge=0, le=2**20)] = 0
    shared_ffn: Width | None = None
    dense_layers: Annotated[Integer, Field(ge=0, le=2**20)] = 0
    imbalance: Annotated[Number, Field(ge=0, le=1e3)] = 0.0
    expert_hidden: Width | None = None
    biased: Annotated[bool | None, knob(structural=True)] = None
    clamped: Annotated[bool | None, knob(structural=True)] = None

    @property
    def picked_groups(self) -> tuple[int, int]:
        """Groups of experts, and those that a token goes to."""
        return self.groups, self.groups if self.groups_per_token is None else self.groups_per_token

    @property
    def width_of_shared(self) -> Floats:
        """Width inside all shared experts together."""
        width = self.expert_ffn if self.shared_ffn is None else self.shared_ffn
        return np.asarray(np.asarray(self.shared_experts, float) * np.asarray(width, float))

    def busiest_load(self, gpus: ArrayLike, tokens: ArrayLike = np.inf) -> Floats:
        """Tokens that the busiest of `gpus` GPUs gets over the mean of all of them; 1 on one GPU.

        tokens: of all GPUs together. Experts that are equally likely still get unequal numbers of few tokens: of n
        tokens with k of E experts each, an expert's count varies by (E - k) / (k n) of its squared mean (derived: the
        hypergeometric variance of n independent draws), to which that of the router's preferences is added.
        """
        count, every, picked = (np.asarray(number, float) for number in (gpus, self.experts, self.experts_per_token))
        local = every / count
        drawn = np.maximum(every - picked, 0.0) / (picked * np.asarray(tokens, float))
        spread = np.sqrt(
            (np.asarray(self.imbalance, float) ** 2 + drawn)
            * ((1 - 1 / count) / local * every / np.maximum(every - 1, 1.0))
        )
        most = np.minimum(picked, local) * count / picked  # every token sends it all that it can
        return np.asarray(np.minimum(1 + spread * largest_normal(count), np.maximum(most, 1.0)))

    def active_experts(self, tokens: ArrayLike, gpus: ArrayLike = 1) -> Floats:
        """Share of its experts that at least one of `tokens` tokens goes to, on the GPU of `gpus` where it is largest.

        All experts are equally likely; numbers of active ones on GPUs are as independent draws, expert by expert.
        """
        every, count = np.asarray(self.experts, float), np.asarray(gpus, float)
        chance = np.minimum(1.0, np.asarray(self.experts_per_token, float) / every)
        mean = 1 - (1 - chance) ** np.asarray(tokens, float)
        spread = np.sqrt(mean * (1 - mean) * (1 - 1 / count) / (every / count))
        return np.asarray(np.minimum(mean + spread * largest_normal(count), 1.0))


ExpertExchange = Literal["library", "all_to_all", "hybrid"]


class RowPasses(Frozen):
    """Passes over rows of experts, in tensors of 16 bits, of kernels beside their products, and their launches."""

    forward: Annotated[Number, Field(ge=0, le=100)]
    backward: Annotated[Number, Field(ge=0, le=100)]
    forward_kernels: Annotated[Number, Field(ge=0, le=100)]
    backward_kernels: Annotated[Number, Field(ge=0, le=100)]


class ExpertKernels(Frozen):
    """Kernels of a framework around the grouped GEMMs of experts, and launches for them.

    exchange: of tokens, by the machine's library of expert parallelism, by an all-to-all that sends a token to each of
    its experts, or once to each node and GPU (HybridEP). orders: passes over the rows of experts beside their products
    (order, padding, casts, probabilities), on their way there and back; around an all-to-all on both sides of it.
    router: kernels over scores that pick experts; losses: over these, of an auxiliary loss in training. moved,
    products: launches of an exchange, and of each expert in a grouped product (0: one for all experts); casts: of the
    cast of an expert's input over those of its product. cast_first:
    whether tokens are cast before their dispatch, and not again for the first product of their experts. waits: whether
    the host waits for the counts of tokens before it launches experts (dropless), so that it is not ahead of its GPU.
    graphed: parts of a layer that are replayed as a graph, and take no launches: attention with the router, layers of
    attention alone or with a state, and the router alone. biases: how the biases of experts are added, by exchange,
    which says in which format probabilities come, with launches for each expert; clamps: passes over what the first
    products write, to cut it to a range before the activation. None where one kernel has them: such a design says
    nothing of them, so that old designs keep their keys.
    """

    exchange: Annotated[ExpertExchange, knob(structural=True)] = "library"
    orders: Annotated[Number, Field(ge=0, le=100)] = 2.0
    router: Annotated[Number, Field(ge=0, le=1e3)] = 0.0
    losses: Annotated[Number, Field(ge=0, le=1e3)] = 0.0
    moved: Annotated[Number, Field(ge=0, le=1e3)] = 0.0
    products: Annotated[Number, Field(ge=0, le=1e3)] = 0.0
    casts: Annotated[Number, Field(ge=0, le=1e3)] = 1.0
    cast_first: Annotated[bool, knob(structural=True)] = True
    waits: Annotated[bool, knob(structural=True)] = False
    graphed: Annotated[tuple[Literal["attention", "router", "state"], ...], knob(structural=True)] = ()
    biases: Annotated[Mapping[ExpertExchange, RowPasses] | None, knob(structural=True)] = None
    clamps: Annotated[RowPasses | None, knob(structural=True)] = None

    def __iter__(self) -> Generator[tuple[str, Any], None, None]:
        """Iterate over the fields that are not None."""
        yield from ((name, value) for name, value in super().__iter__() if value is not None)


class Indexer(Frozen):
    """An indexer, which picks the `tokens` that a query reads of all before it (DeepSeek-V3.2's sparse attention).

    heads, width: of its own queries; its one key of a token is as wide, and cached. share: of the layers that have one;
    others read what the layer before picked.
    """

    heads: Width
    width: Width
    tokens: Width
    share: Annotated[Number, Field(ge=0, le=1)] = 1.0


class LatentAttention(Grown):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434; V3, arXiv:2412.19437, section 2.1.1).

    Keys and values of all heads are computed from `kv_rank` numbers of each token, and the keys' positions from another
    `rope_dim` that heads share: only these are cached. q_rank: width of the queries' latent, None for queries that are
    computed from the activations. nope_dim, value_dim: widths of a head's key without position and of its value. index:
    what picks the tokens that are read; None: all are.
    """

    q_rank: Width | None = None
    kv_rank: Width
    rope_dim: Width
    nope_dim: Width
    value_dim: Width
    index: Indexer | None = None

    @property
    def key(self) -> Floats:
        """Width of a head's key with its position."""
        return np.asarray(np.asarray(self.nope_dim, float) + np.asarray(self.rope_dim, float))

    @property
    def cached(self) -> Floats:
        """Numbers that are cached of a token."""
        return np.asarray(np.asarray(self.kv_rank, float) + np.asarray(self.rope_dim, float))


def largest_normal(count: ArrayLike) -> Floats:
    """Expected largest of `count` standard normal numbers, by Blom's equation; 0 of one."""
    quantile = np.vectorize(NormalDist().inv_cdf, otypes=[float])
    number = np.asarray(count, float)
    return np.asarray(np.maximum(0.0, quantile((number - _BLOM) / (number + 1 - 2 * _BLOM))))


def distinct_places(
    places: ArrayLike, experts: ArrayLike, per_token: ArrayLike, *, groups: tuple[int, int] = (1, 1)
) -> Floats:
    """Expected number of different GPUs, or nodes, that hold the experts of a token (the equations above).

    groups: of experts, and how many of them a token goes to.
    """
    count, every, picked = np.broadcast_arrays(*(np.asarray(n, float) for n in (places, experts, per_token)))
    total, chosen = groups
    spanned = np.maximum(1, np.rint(total / count)).astype(int)  # groups of which a place holds experts
    missed = np.zeros(count.shape)
    for several in np.unique(spanned):
        of_group = every / count / several
        for taken in range(min(int(several), chosen) + 1):
            ways = comb(int(several), taken) * comb(total - int(several), chosen - taken) / comb(total, chosen)
            chance = ways * _none_picked(taken * of_group, every * chosen / total, picked)
            missed = missed + np.where(spanned == several, chance, 0.0)
    return np.asarray(count * (1 - missed))


def _none_picked(local: Floats, every: Floats, picked: Floats) -> Floats:
    """C(E - e, k) / C(E, k), factor by factor."""
    chance = np.ones(every.shape)
    for drawn in range(int(np.max(picked, initial=0))):
        factor = np.maximum(every - local - drawn, 0.0) / np.maximum(every - drawn, 1.0)
        chance = np.where(drawn < picked, chance * factor, chance)
    return chance
