"""Algorithms of collectives that libraries have, as explicit schedules.

`ring`: both ways around, half of each block each way. `direct`: each block straight to all who want it, or along the
quickest links. `tree`: binomial trees from the block's GPU; of an all-reduce, two mirrored binomial trees of half of
the tensor; of an all-to-all, Bruck's exchange of blocks by binary digits of the distance. `doubling`: recursive
doubling of an all-gather, halving of a reduce-scatter, both of an all-reduce; for powers of two. `hierarchical`:
between GPUs of the same place of all nodes and inside nodes, one after the other. `one_shot`: an all-reduce of one
step, in which each GPU sends its whole tensor to all. Where a GPU has no link to another one, messages are relayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise

import numpy as np

from dse_collectives.explicit import (
    Collective,
    CollectiveSchedule,
    Message,
    reduce_and_gather,
    reverse_gather,
    whole_blocks,
)
from dse_collectives.topology import LinkTopology

Paths = Mapping[tuple[int, int], tuple[int, ...]]


def library_schedules(collective: Collective, topology: LinkTopology) -> dict[str, CollectiveSchedule]:
    """Name -> schedule of every algorithm that there is for a collective on a topology."""
    n, complete = topology.num_gpus, len(topology.by_ends) == topology.num_gpus * (topology.num_gpus - 1)
    if collective == "all_to_all":
        return _exchanges(topology)
    gathers = {"ring": _ring(topology), "direct": _straight("direct", topology, shortest_paths(topology))}
    if complete:
        gathers["tree"] = _binomial(n)
    # recursive doubling pairs GPUs by the bits of their numbers
    if complete and n & (n - 1) == 0:
        gathers["doubling"] = _recursive_doubling(n)
    if topology.num_nodes > 1 and topology.gpus_per_node > 1:
        gathers["hierarchical"] = _hierarchical(topology)
    if collective == "all_gather":
        return gathers
    # a reduce-scatter is an all-gather backwards in time: no algorithm is written twice
    scatters = {name: reverse_gather(gather, name) for name, gather in gathers.items()}
    if collective == "reduce_scatter":
        return scatters
    # the tree of an all-reduce is no reduce-scatter and all-gather: it has one of its own
    reduces = {name: reduce_and_gather(scatters[name], gathers[name], name) for name in gathers if name != "tree"}
    if complete:
        reduces |= {"tree": _double_tree(n), "one_shot": _one_shot(n)}
    return reduces


def quickest_paths(topology: LinkTopology, cost: Callable[[int], float] | None = None) -> Paths:
    """GPUs on the cheapest path between each two, both ends included. cost: of a link by its place; None: latency."""
    n = topology.num_gpus
    best, following = np.full((n, n), np.inf), np.zeros((n, n), int)
    np.fill_diagonal(best, 0.0)
    for place, link in enumerate(topology.links):
        best[link.source, link.target] = link.latency_s if cost is None else cost(place)
        following[link.source, link.target] = link.target
    # Floyd-Warshall, all pairs at once for each vertex in the middle
    for middle in range(n):
        through = best[:, middle, None] + best[None, middle, :]
        # paths as short but for rounding stay: the first one found, on every machine
        shorter = through < best * (1 - 1e-12)
        best = np.where(shorter, through, best)
        following = np.where(shorter, following[:, middle, None], following)
    return {(a, b): _path(following, a, b) for a in range(n) for b in range(n) if a != b and np.isfinite(best[a, b])}


def shortest_paths(topology: LinkTopology) -> Paths:
    """Paths of the fewest links between each two GPUs."""
    return quickest_paths(topology, lambda _: 1.0)


def quickest_schedule(collective: Collective, topology: LinkTopology) -> CollectiveSchedule:
    """Everything along the paths of least latency."""
    paths, name = quickest_paths(topology), "quickest paths"
    if collective == "all_to_all":
        return _along(name, topology.num_gpus, paths)
    gather = _straight(name, topology, paths)
    if collective == "all_gather":
        return gather
    scatter = reverse_gather(gather, name)
    return scatter if collective == "reduce_scatter" else reduce_and_gather(scatter, gather, name)


def inside_paths(topology: LinkTopology) -> Paths:
    """Quickest paths between GPUs of the same node over links inside it."""
    g, links = topology.gpus_per_node, topology.links
    # an infinite cost closes links between nodes
    outside = {place for place, link in enumerate(links) if link.source // g != link.target // g}
    paths = quickest_paths(topology, lambda place: np.inf if place in outside else links[place].latency_s)
    return {ends: path for ends, path in paths.items() if ends[0] // g == ends[1] // g}


def _path(following: np.ndarray, start: int, end: int) -> tuple[int, ...]:
    path = [start]
    while path[-1] != end:
        path.append(int(following[path[-1], end]))
    return tuple(path)


def _gather(name: str, num_gpus: int, messages: Sequence[Message], parts: int = 1) -> CollectiveSchedule:
    chunks = whole_blocks("all_gather", num_gpus, parts)
    return CollectiveSchedule(name, "all_gather", num_gpus, parts, chunks, tuple(messages))


def _ring(topology: LinkTopology) -> CollectiveSchedule:
    """All-gather around the ring of GPUs in their order, half of each block either way."""
    n = topology.num_gpus
    messages = [
        Message(gpu, (gpu + way) % n, (2 * ((gpu - way * step) % n) + half,))
        for step in range(n - 1)
        for half, way in enumerate((1, -1))
        for gpu in range(n)
    ]
    return _gather("ring", n, messages, 2)


def _straight(name: str, topology: LinkTopology, paths: Paths) -> CollectiveSchedule:
    """All-gather along paths from each GPU; the last hops of those that start at a GPU are a tree."""
    n = topology.num_gpus
    hops = [(_depth(paths, ends), paths[ends][-2], *ends) for ends in paths]
    ordered = sorted(hops, key=lambda hop: (hop[0], (hop[3] - hop[1]) % n, hop))
    return _gather(name, n, [Message(before, end, (start,)) for _, before, start, end in ordered])


def _depth(paths: Paths, ends: tuple[int, int]) -> int:
    """Hops before the last one, where each GPU has the block from the one before it on its own path."""
    start, before = ends[0], paths[ends][-2]
    return 0 if before == start else 1 + _depth(paths, (start, before))


def _binomial(n: int) -> CollectiveSchedule:
    """All-gather by a binomial tree from each GPU."""
    messages = [
        Message((root + sender) % n, (root + sender + reach) % n, (root,))
        for reach in _powers(n)
        for sender in range(reach)
        if sender + reach < n
        for root in range(n)
    ]
    return _gather("tree", n, messages)


def _powers(n: int) -> Iterator[int]:
    """Yield the powers of two below n."""
    power = 1
    while power < n:
        yield power
        power *= 2


def _recursive_doubling(n: int) -> CollectiveSchedule:
    """All-gather by recursive doubling: in each step, all that a GPU has goes to the GPU across."""
    messages = [
        # after steps 1, 2, ..., reach / 2 a GPU has the blocks of its group of `reach` GPUs
        Message(gpu, gpu ^ reach, tuple(range(gpu - gpu % reach, gpu - gpu % reach + reach)))
        for reach in _powers(n)
        for gpu in range(n)
    ]
    return _gather("doubling", n, messages)


def _hierarchical(topology: LinkTopology) -> CollectiveSchedule:
    """All-gather between GPUs of the same place, then inside nodes, along the quickest links there."""
    n, g = topology.num_gpus, topology.gpus_per_node
    # `shift` times g further on is the GPU of the same place in another node
    between = [
        Message(gpu, (gpu + shift * g) % n, (gpu,)) for shift in range(1, topology.num_nodes) for gpu in range(n)
    ]
    paths = inside_paths(topology)
    inside = [Message(paths[ends][-2], ends[1], (ends[0],)) for ends in sorted(paths, key=partial(_depth, paths))]
    spread = [
        # the same tree for the block that came from each node
        Message(message.source, message.target, ((message.chunks[0] + shift * g) % n,))
        for shift in range(topology.num_nodes)
        for message in inside
    ]
    return _gather("hierarchical", n, [*between, *spread])


def _double_tree(n: int) -> CollectiveSchedule:
    """All-reduce of two halves, up and down binomial trees that mirror each other; blocks follow one another."""
    # edges of a binomial tree from GPU 0, parents before children
    down = [(a, a + reach) for reach in _powers(n) for a in range(reach) if a + reach < n]
    sends: list[tuple[int, Message]] = []
    for chunk in range(2 * n):
        # mirrored for odd chunks: inner GPUs of one tree are leaves of the other
        hops = [(n - 1 - a, n - 1 - b) for a, b in down] if chunk % 2 else down
        # negative places: sums go up before copies go down, leaves first
        sends += [(-place, Message(b, a, (chunk,), reduces=True)) for place, (a, b) in enumerate(hops, 1)]
        sends += [(place, Message(a, b, (chunk,))) for place, (a, b) in enumerate(hops, 1)]
    messages = [message for _, message in sorted(sends, key=lambda send: send[0])]
    return CollectiveSchedule("tree", "all_reduce", n, 2, whole_blocks("all_reduce", n, 2), tuple(messages))


def _one_shot(n: int) -> CollectiveSchedule:
    chunks = whole_blocks("all_reduce", n)
    # raw messages: each GPU sends its own contribution, not the sums that it has by then
    everything = tuple(range(n))
    messages = tuple(
        Message(gpu, (gpu + shift) % n, everything, reduces=True, raw=True) for shift in range(1, n) for gpu in range(n)
    )
    return CollectiveSchedule("one_shot", "all_reduce", n, 1, chunks, messages)


def _exchanges(topology: LinkTopology) -> dict[str, CollectiveSchedule]:
    """All-to-alls: direct, around a ring, by Bruck's digits, and by nodes."""
    n, g = topology.num_gpus, topology.gpus_per_node
    complete = len(topology.by_ends) == n * (n - 1)
    ways = {"direct": shortest_paths(topology), "ring": _around(n)}
    exchanges = {name: _along(name, n, paths) for name, paths in ways.items()}
    if complete:
        exchanges["tree"] = _bruck(n)
    if topology.num_nodes > 1 and g > 1:
        exchanges["hierarchical"] = _by_nodes(topology)
    return exchanges


def _around(n: int) -> Paths:
    """Paths the shorter way round a ring of GPUs."""
    ends = [(s, d) for s in range(n) for d in range(n) if s != d]
    # forwards up to half of the way round, else backwards
    steps = {(s, d): range((d - s) % n + 1) if 2 * ((d - s) % n) <= n else range(0, -((s - d) % n) - 1, -1)
             for s, d in ends}  # fmt: skip
    return {ends: tuple((ends[0] + step) % n for step in steps[ends]) for ends in steps}


def _along(name: str, n: int, paths: Paths) -> CollectiveSchedule:
    """All-to-all with each block along its path, one message a hop."""
    chunks = whole_blocks("all_to_all", n)
    places = {(chunk.block, chunk.part): place for place, chunk in enumerate(chunks)}
    hops = [
        (depth, (ends[1] - ends[0]) % n, Message(a, b, (places[ends],)))
        for ends, path in paths.items()
        for depth, (a, b) in enumerate(pairwise(path))
    ]
    # around a ring the blocks with the longest way leave first
    ordered = sorted(hops, key=lambda hop: (hop[0], -hop[1] if name == "ring" else hop[1], hop[2].source))
    return CollectiveSchedule(name, "all_to_all", n, 1, chunks, tuple(message for *_, message in ordered))


def _bruck(n: int) -> CollectiveSchedule:
    """All-to-all in which a block travels by the binary digits of its distance; the blocks of a step go at once."""
    return _by_steps("tree", n, [partial(_digit, n, reach) for reach in _powers(n)])


def _digit(n: int, reach: int, here: int, target: int) -> int:
    """The GPU that a block goes to in the step of a digit."""
    # a set bit of the remaining distance: the block goes so far in this step
    return (here + reach) % n if (target - here) % n & reach else here


def _by_nodes(topology: LinkTopology) -> CollectiveSchedule:
    """All-to-all to the GPU of the target's place in the node, then between nodes; with direct links inside nodes."""
    g = topology.gpus_per_node
    inside = inside_paths(topology)
    # as many steps inside a node as its longest path has links
    hops = max(len(path) for path in inside.values()) - 1

    def toward(here: int, target: int) -> int:
        place = here - here % g + target % g
        return here if place == here else inside[here, place][1]

    def across(here: int, target: int) -> int:
        return here if here % g != target % g else target

    return _by_steps("hierarchical", topology.num_gpus, [*[toward] * hops, across])


def _by_steps(name: str, n: int, steps: Sequence[Callable[[int, int], int]]) -> CollectiveSchedule:
    """All-to-all of steps that say where a block at a GPU goes; blocks with equal ends in a step are one message."""
    chunks = whole_blocks("all_to_all", n)
    here = [chunk.block for chunk in chunks]
    messages = []
    for step in steps:
        moved: dict[tuple[int, int], list[int]] = {}
        for place, chunk in enumerate(chunks):
            there = step(here[place], chunk.part)
            if there != here[place]:
                moved.setdefault((here[place], there), []).append(place)
                here[place] = there
        messages += [Message(a, b, tuple(places)) for (a, b), places in moved.items()]
    return CollectiveSchedule(name, "all_to_all", n, 1, chunks, tuple(messages))
