"""Algorithms of collectives: dependent steps, and bytes that a GPU sends for each byte of the payload (S), of n GPUs.

    pattern          payload S                       ring                  direct                tree
    all_reduce       the tensor every GPU holds      2(n-1), 2(n-1)/n S    2, 2(n-1)/n S         2 lg n, 2(n-1)/n S
    all_gather       the tensor every GPU ends with  n-1, (n-1)/n S        1, (n-1)/n S          lg n, (n-1)/n S
    reduce_scatter   the tensor every GPU starts with           as all_gather
    all_to_all       what a GPU sends to all, itself included   n-1, (n-1)/2 S    1, (n-1)/n S   lg n, lg n / 2 S
    broadcast        the tensor of the root          n-1, S                2, 2(n-1)/n S         lg n, S
    send_recv        the message of one of two       1, S                  1, S                  1, S

`one_shot` is direct, but for an all-reduce in which each GPU reads all of the others' tensors: 1, (n-1) S. There it
adds (n-1) S; elsewhere a GPU of an all-reduce or a reduce-scatter adds (n-1)/n S, its share of what the others hold.

lg n = ceil(log2 n). Standard; a lower bound for pipelined rings and trees, whose first chunk has to arrive (Thakur,
Rabenseifner, Gropp, IJHPCA 2005; tree: two complementary pipelined trees, Sanders, Speck, Traeff 2009; all-to-all on a
tree: Bruck). A new algorithm is a function here and its entry in `ALGORITHMS`: every cost of a collective can then be
asked for it, and with `by_library` steps take it where it is the fastest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Pattern = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv"]
Traffic = tuple[Floats, Floats]
"""Steps, and bytes sent for each byte of the payload."""
REDUCES: tuple[Pattern, ...] = ("all_reduce", "reduce_scatter")
"""Patterns that add."""


@dataclass(frozen=True)
class Algorithm:
    """An algorithm. traffic: of a pattern among n GPUs. by_library: whether libraries choose it by size.

    added: payloads that a GPU of an all-reduce adds; None: its share of those of the others.
    """

    traffic: Callable[[Pattern, Floats], Traffic]
    by_library: bool = False
    added: Callable[[Floats], Floats] | None = None


def _ring(pattern: Pattern, n: Floats) -> Traffic:
    """Each GPU sends to the next one."""
    if pattern == "all_reduce":
        return 2 * (n - 1), 2 * _once(n)
    if pattern == "broadcast":
        return n - 1, _several(n)
    # a message of an all-to-all travels half of the ring on average
    return n - 1, (n - 1) / 2 if pattern == "all_to_all" else _once(n)


def _direct(pattern: Pattern, n: Floats) -> Traffic:
    """Each GPU sends to all others at once."""
    if pattern in ("all_reduce", "broadcast"):  # a scatter, then an all-gather
        return 2 * _several(n), 2 * _once(n)
    return _several(n), _once(n)


def _one_shot(pattern: Pattern, n: Floats) -> Traffic:
    """Each GPU reads the tensors of all others, and adds them."""
    return (_several(n), n - 1) if pattern == "all_reduce" else _direct(pattern, n)


def _tree(pattern: Pattern, n: Floats) -> Traffic:
    """GPUs send along a binary tree."""
    rounds = np.ceil(np.log2(n))
    if pattern == "all_reduce":
        return 2 * rounds, 2 * _once(n)
    if pattern == "broadcast":
        return rounds, _several(n)
    return rounds, rounds / 2 if pattern == "all_to_all" else _once(n)


def _several(n: Floats) -> Floats:
    """1 where there are several GPUs: a single one sends nothing."""
    return np.asarray(n > 1, float)


def _once(n: Floats) -> Floats:
    """The share of a tensor that a GPU does not hold."""
    return (n - 1) / n


ALGORITHMS: Mapping[str, Algorithm] = {
    "ring": Algorithm(_ring, by_library=True),
    "direct": Algorithm(_direct),
    "tree": Algorithm(_tree, by_library=True),
    "one_shot": Algorithm(_one_shot, added=lambda n: n - 1),
}


def traffic(pattern: Pattern, algorithm: str, n: Floats) -> Traffic:
    """Steps, and bytes sent for each byte of the payload, among n GPUs. Raises ValueError for an unknown algorithm."""
    if algorithm not in ALGORITHMS:
        raise ValueError(f"{algorithm} is no algorithm of collectives: {', '.join(ALGORITHMS)}")
    if pattern == "send_recv":  # one message, whatever the algorithm
        return _several(n), _several(n)
    return ALGORITHMS[algorithm].traffic(pattern, n)


def additions(pattern: Pattern, algorithm: str, n: Floats) -> Floats:
    """Bytes that a GPU adds for each byte of the payload, among n GPUs; 0 of a pattern that adds nothing."""
    if pattern not in REDUCES:
        return np.zeros(np.shape(n))
    added = ALGORITHMS[algorithm].added if pattern == "all_reduce" else None
    return np.asarray(_once(n) if added is None else added(n), float)
