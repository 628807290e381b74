"""Pieces of tensors on their way between the ranks of a group, while GEMMs run.

`Messages` sends by the group's backend: kernels of NCCL, or gloo on a CPU. `Copies` writes into the peers' memory by
the copy engines of a GPU, on a stream of its own, and signals each piece; it needs symmetric memory (NVLink or like).
Both count the bytes that this rank sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

Span = tuple[int, int]


class Transport(Protocol):
    """Pieces in flight, each known by the step that sent it and a peer."""

    sent_bytes: int

    def post(self, step: int, outgoing: Mapping[int, Tensor], incoming: Mapping[int, torch.Size]) -> None:
        """Start sending tensors to peers, and receiving tensors of these sizes from peers; ranks within the group."""

    def wait(self, step: int, peer: int) -> Tensor:
        """The tensor that a peer sent, once it is here; what runs next on the current stream may read it."""

    def finish(self) -> None:
        """Return once every tensor that was sent may be overwritten."""


class Messages:
    """Sends and receives in order of the steps."""

    def __init__(self, group: dist.ProcessGroup, like: Tensor) -> None:
        self.group, self._like, self.sent_bytes = group, like, 0
        self._posted: list[tuple[Any, tuple[int, Tensor]]] = []
        self._arriving: dict[tuple[int, int], tuple[Any, Tensor]] = {}

    def post(self, step: int, outgoing: Mapping[int, Tensor], incoming: Mapping[int, torch.Size]) -> None:
        """Start the sends and receives of a step."""
        sends = [(peer, tensor.contiguous()) for peer, tensor in outgoing.items() if tensor.numel()]
        arrivals = {peer: self._like.new_empty(size) for peer, size in incoming.items()}
        receives = [(peer, tensor) for peer, tensor in arrivals.items() if tensor.numel()]
        operations = [dist.P2POp(dist.isend, tensor, group=self.group, group_peer=peer) for peer, tensor in sends]
        operations += [dist.P2POp(dist.irecv, tensor, group=self.group, group_peer=peer) for peer, tensor in receives]
        works = dist.batch_isend_irecv(operations) if operations else []
        handles = works if len(works) == len(operations) else works * len(operations)  # NCCL answers once for all
        self._posted += zip(handles[: len(sends)], sends, strict=True)  # what is sent must live until it has arrived
        self.sent_bytes += sum(tensor.numel() * tensor.element_size() for _, tensor in sends)
        arrived = dict(zip([peer for peer, _ in receives], handles[len(sends) :], strict=True))
        for peer, tensor in arrivals.items():
            self._arriving[step, peer] = arrived.get(peer), tensor

    def wait(self, step: int, peer: int) -> Tensor:
        """Wait for one receive."""
        work, tensor = self._arriving.pop((step, peer))
        if work is not None:
            work.wait()
        return tensor

    def finish(self) -> None:
        """Wait for all sends."""
        for work, _ in self._posted:
            work.wait()
        self._posted.clear()


class Copies:
    """Copies into the peers' memory on a stream of its own, by copy engines.

    most: of elements that a rank receives in one call. Two inboxes take turns, so that a fast peer does not overwrite
    what a slow one still reads: by the time an inbox is used again, all ranks have passed a barrier.
    """

    _inboxes: ClassVar[dict[tuple[str, int, torch.dtype, int], Any]] = {}
    _turn: ClassVar[int] = 0

    def __init__(self, group: dist.ProcessGroup, like: Tensor, most: int) -> None:
        self.group, self._like, self.sent_bytes = group, like, 0
        turn = Copies._turn = 1 - Copies._turn
        key = (group.group_name, turn, like.dtype, most)
        if key not in self._inboxes:
            from torch.distributed import _symmetric_memory as symmetric

            inbox = symmetric.empty(most, dtype=like.dtype, device=like.device)
            self._inboxes[key] = inbox, symmetric.rendezvous(inbox, group=group)
        _, self._memory = self._inboxes[key]
        self._stream, self._offset = torch.cuda.Stream(like.device), 0
        self._arriving: dict[tuple[int, int], Tensor] = {}
        self._memory.barrier(channel=turn)  # all have read what this inbox held

    def post(self, step: int, outgoing: Mapping[int, Tensor], incoming: Mapping[int, torch.Size]) -> None:
        """Copy to each peer, and signal it; every rank puts the pieces of a step at the same place."""
        sizes = [tensor.numel() for tensor in outgoing.values()] + [size.numel() for size in incoming.values()]
        slot, rank = max(sizes, default=0), dist.get_rank(self.group)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for peer, tensor in outgoing.items():
                place = self._offset + (rank - peer) % self._memory.world_size * slot
                self._memory.get_buffer(peer, tensor.shape, tensor.dtype, place).copy_(tensor, non_blocking=True)
                self._memory.put_signal(peer, channel=step)
                tensor.record_stream(self._stream)
                self.sent_bytes += tensor.numel() * tensor.element_size()
        for peer, size in incoming.items():
            place = self._offset + (peer - rank) % self._memory.world_size * slot
            self._arriving[step, peer] = self._memory.get_buffer(rank, size, self._like.dtype, place)
        self._offset += self._memory.world_size * slot

    def wait(self, step: int, peer: int) -> Tensor:
        """Let the current stream wait for the peer's signal."""
        self._memory.wait_signal(peer, channel=step)
        return self._arriving.pop((step, peer))

    def finish(self) -> None:
        """Let the current stream wait for all copies."""
        torch.cuda.current_stream().wait_stream(self._stream)


def transports(steps: Iterable[str], group: dist.ProcessGroup, like: Tensor, most: int) -> dict[str, Transport]:
    """The transport of each kind of step, for tensors like one; copies need a GPU: messages do their work on a CPU."""
    kinds = sorted({step for step in steps if step in ("send", "copy")})
    return {
        kind: Copies(group, like, most) if kind == "copy" and like.is_cuda else Messages(group, like) for kind in kinds
    }


def bounds(length: int, span: Span, cuts: Sequence[int]) -> tuple[int, int]:
    """First and last index, exclusive, from a cut to another; of the equal parts the first take the remainder."""
    size, larger = divmod(length, cuts[-1])
    low, high = (cuts[place] * size + min(cuts[place], larger) for place in span)
    return low, high


def put_together(
    pieces: Mapping[Span, Tensor], span: Span, dim: int, edges: Callable[[Span], tuple[int, int]]
) -> Tensor:
    """The part of a shard between two cuts, along a dimension, from pieces that hold it.

    edges: first and last index of a span along the dimension.
    """
    if span in pieces:
        return pieces[span]
    low, high = edges(span)
    parts = []
    for piece in sorted(piece for piece in pieces if piece[0] < span[1] and piece[1] > span[0]):
        first, last = edges(piece)
        parts.append(pieces[piece].narrow(dim, max(low - first, 0), min(high, last) - max(low, first)))
    return torch.cat(parts, dim)


def gather_rows(shard: Tensor, rows: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """The shards of all ranks [sum(rows), columns] by the library's all-gather, which takes shards of one size only."""
    most = max(rows)
    padded = torch.nn.functional.pad(shard, (0, 0, 0, most - len(shard)))
    if shard.is_cuda and dist.get_backend(group) == "gloo":
        padded = padded.cpu()  # ranks that share a GPU
    shards = [torch.empty_like(padded) for _ in rows]
    dist.all_gather(shards, padded.contiguous(), group=group)
    return torch.cat([tensor[:count] for tensor, count in zip(shards, rows, strict=True)]).to(shard.device)
