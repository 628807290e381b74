"""Schedules of collectives as explicit lists of messages, and their proof: each byte arrives, once, and nothing waits
in a circle.

A tensor of V bytes has a block of V / n for each of n GPUs; a block has `units` equal units, of which chunks are made:

    all_gather       block g starts at GPU g, and all want the tensor
    reduce_scatter   all have contributions to the tensor; GPU g wants the sum of block g
    all_reduce       the same; all want all sums
    all_to_all       GPU s has a tensor; its block d is wanted by GPU d

A GPU has a slot for each chunk: what it has of it, as the set of GPUs whose contributions are in it. A copy fills or
replaces a slot, a reduction adds to it; a `raw` message sends the GPU's own contribution, from its input. Slots from 1
are for partial sums beside it; a message from a GPU to itself copies or adds one of its slots to another, in no time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeGuard, get_args

from dse.errors import ConfigError, Problem

Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)
_SHOWN = 5  # problems of a schedule that are printed
Slots = dict[tuple[int, int, int], frozenset[int]]
"""(GPU, chunk, number of the slot) -> GPUs whose contributions are in it."""


def is_collective(name: str) -> TypeGuard[Collective]:
    """Return whether a name is that of a collective."""
    return name in COLLECTIVES


@dataclass(frozen=True)
class DataChunk:
    """Units [start, start + count) of a block. An all-to-all's block is that of GPU `block`, for GPU `part`.

    part: -1 in other collectives.
    """

    block: int
    start: int
    count: int
    part: int = -1

    def __str__(self) -> str:
        block = f"{self.block}" if self.part < 0 else f"{self.block}-{self.part}"
        return f"block {block} [{self.start}, {self.start + self.count})"


@dataclass(frozen=True)
class Message:
    """One send: chunks from a GPU to another one, at once. reduces: the receiver adds them to what it has.

    raw: the sender's own contribution, whatever it has added since. source_slot, target_slot: which of its slots of the
    chunks a GPU sends, and fills or adds to.
    """

    source: int
    target: int
    chunks: tuple[int, ...]
    reduces: bool = False
    raw: bool = False
    source_slot: int = 0
    target_slot: int = 0

    @property
    def is_local(self) -> bool:
        """Return whether it stays on a GPU, and takes no link."""
        return self.source == self.target

    def __str__(self) -> str:
        ends = end_text(self.source, self.source_slot), end_text(self.target, self.target_slot)
        return f"{'adds' if self.reduces else 'sends'} {ends[0]} -> {ends[1]}"


def end_text(gpu: int, slot: int) -> str:
    """A GPU, and its slot where that is not the first: `3`, `3:1`."""
    return f"{gpu}:{slot}" if slot else f"{gpu}"


@dataclass(frozen=True)
class CollectiveSchedule:
    """Messages in an order in which they can be sent; those of a link leave it in this order."""

    name: str
    collective: Collective
    num_gpus: int
    units: int
    chunks: tuple[DataChunk, ...]
    messages: tuple[Message, ...]

    def origins(self, chunk: DataChunk) -> frozenset[int]:
        """GPUs that have something of a chunk at the start."""
        if self.collective in ("all_gather", "all_to_all"):
            return frozenset([chunk.block])
        return frozenset(range(self.num_gpus))

    def targets(self, chunk: DataChunk) -> frozenset[int]:
        """GPUs that want it at the end, with all contributions."""
        if self.collective == "all_to_all":
            return frozenset([chunk.part])
        return frozenset([chunk.block] if self.collective == "reduce_scatter" else range(self.num_gpus))

    def share(self, chunk: DataChunk) -> float:
        """Bytes of a chunk over those of the tensor."""
        # an all-to-all's tensor is a GPU's own: its block for itself counts, though it stays
        return chunk.count / (self.units * self.num_gpus)

    def start(self) -> Slots:
        """Contributions in each (GPU, chunk) at the start."""
        return {
            (gpu, place, 0): frozenset([gpu])
            for place, chunk in enumerate(self.chunks)
            for gpu in sorted(self.origins(chunk))
        }

    def relayed_share(self, gpu: int) -> float:
        """Bytes, over the tensor's, that a GPU receives of chunks which it neither has at first nor wants."""
        received = (message for message in self.messages if message.target == gpu and not message.is_local)
        chunks = {chunk for message in received for chunk in message.chunks}
        relayed = (self.chunks[place] for place in sorted(chunks))
        return sum(
            self.share(chunk) for chunk in relayed if gpu not in self.origins(chunk) and gpu not in self.targets(chunk)
        )


def check_schedule(schedule: CollectiveSchedule, *, relay_share: float = float("inf")) -> CollectiveSchedule:
    """The schedule, proven. relay_share: room of a GPU for what it relays, over the tensor's bytes.

    Raises ConfigError, with the chunk, where a byte is lost, doubled, sent before it is there, or has no room.
    """
    problems = [Problem("schedule", text) for text in _faults(schedule, relay_share)]
    if len(problems) > _SHOWN:
        problems[_SHOWN:] = [Problem("schedule", f"has {len(problems) - _SHOWN} more faults")]
    if problems:
        raise ConfigError(problems)
    return schedule


def _faults(schedule: CollectiveSchedule, relay_share: float) -> Iterator[str]:
    """Sentences on what is wrong with a schedule."""
    # numbers that are out of range would break the checks below
    if uncovered := list(_faults_of_chunks(schedule)):
        yield from uncovered
        return
    slots = schedule.start()
    for place, message in enumerate(schedule.messages):
        # messages in their order: what a message sends must have arrived before it
        for text in _deliver(schedule, message, slots):
            yield f"message {place} ({message}): {text}"
    yield from _faults_at_end(schedule, slots)
    for gpu in range(schedule.num_gpus):
        if (relayed := schedule.relayed_share(gpu)) > relay_share * (1 + 1e-12):
            yield f"GPU {gpu} relays {relayed:.4g} of the tensor's bytes, and has room for {relay_share:.4g}"


def _faults_of_chunks(schedule: CollectiveSchedule) -> Iterator[str]:
    """Yield units of blocks that are in no chunk or in two, and numbers that are out of range."""
    gpus, n = range(schedule.num_gpus), schedule.num_gpus
    parts = gpus if schedule.collective == "all_to_all" else [-1]
    blocks: dict[tuple[int, int], list[DataChunk]] = {(block, part): [] for block in gpus for part in parts}
    for chunk in schedule.chunks:
        if (chunk.block, chunk.part) not in blocks or not 0 <= chunk.start < chunk.start + chunk.count:
            yield f"chunk {chunk} is none of {n} GPUs"
        else:
            blocks[chunk.block, chunk.part].append(chunk)
    for chunks in blocks.values() if schedule.chunks else []:
        yield from _gaps(schedule, chunks)
    for place, message in enumerate(schedule.messages):
        # a GPU may copy between its slots, but not a slot onto itself
        stays = message.is_local and message.source_slot == message.target_slot and not message.raw
        if stays or not {message.source, message.target} <= set(gpus) or not message.chunks:
            yield f"message {place} ({message}) needs two of {n} GPUs, or of the slots of one, and a chunk"
        if any(not 0 <= chunk < len(schedule.chunks) for chunk in message.chunks):
            yield f"message {place} ({message}) sends a chunk that is not in the list"
    # an all-to-all's block of a GPU for itself needs no chunk
    for block, part in (key for key, chunks in blocks.items() if not chunks and key[0] != key[1]):
        yield f"{DataChunk(block, 0, schedule.units, part)} is lost: no chunk has it"


def _gaps(schedule: CollectiveSchedule, chunks: Sequence[DataChunk]) -> Iterator[str]:
    end, ordered = 0, sorted(chunks, key=lambda chunk: chunk.start)
    for chunk in ordered:
        if chunk.start < end:
            yield f"{replace(chunk, count=end - chunk.start)} is doubled: two chunks have it"
        elif chunk.start > end:
            yield f"{replace(chunk, start=end, count=chunk.start - end)} is lost: no chunk has it"
        end = max(end, chunk.start + chunk.count)
    if ordered and end != schedule.units:
        at, past = min(end, schedule.units), end > schedule.units
        size = abs(end - schedule.units)
        yield f"{replace(ordered[-1], start=at, count=size)} is {'past the end' if past else 'lost: no chunk has it'}"


def _deliver(schedule: CollectiveSchedule, message: Message, slots: Slots) -> Iterator[str]:
    """Fill the slots that a message fills; yield what is wrong with it."""
    for place in message.chunks:
        chunk = schedule.chunks[place]
        sent = frozenset([message.source]) if message.raw else slots.get((message.source, place, message.source_slot))
        # raw: a GPU's own input, which only those that contribute have
        if message.raw and message.source not in schedule.origins(chunk):
            sent = None
        if sent is None:
            yield f"{chunk} is sent before it is there"
            continue
        filled = message.target, place, message.target_slot
        present = slots.get(filled, frozenset())
        # a contribution that is added twice makes a wrong sum
        if message.reduces and present & sent:
            yield f"{chunk} is doubled: GPU {message.target} has the contribution of GPU {min(present & sent)}"
        elif message.target_slot:  # a partial sum that is no longer needed may be replaced
            pass
        elif not message.reduces and sent <= present:
            yield f"{chunk} is doubled: GPU {message.target} has it"
        elif not message.reduces and not present <= sent:
            yield f"{chunk} is lost: the copy replaces the contribution of GPU {min(present - sent)}"
        slots[filled] = present | sent if message.reduces else sent


def _faults_at_end(schedule: CollectiveSchedule, slots: Slots) -> Iterator[str]:
    """Yield chunks that do not arrive everywhere with all contributions."""
    for place, chunk in enumerate(schedule.chunks):
        everything = schedule.origins(chunk)
        for gpu in sorted(schedule.targets(chunk)):
            if lacking := everything - slots.get((gpu, place, 0), frozenset()):
                contribution = "" if len(everything) == 1 else f" with the contribution of GPU {min(lacking)}"
                yield f"{chunk} is lost: it never reaches GPU {gpu}{contribution}"


def waits(schedule: CollectiveSchedule) -> list[tuple[int, ...]]:
    """Messages that each message waits for: those that filled what it sends, and those that read what it replaces."""
    writers: dict[tuple[int, int, int], list[int]] = {}
    readers: dict[tuple[int, int, int], list[int]] = {}
    result = []
    for place, message in enumerate(schedule.messages):
        before: set[int] = set()
        for chunk in message.chunks:
            sent, filled = (message.source, chunk, message.source_slot), (message.target, chunk, message.target_slot)
            if not message.raw:
                before.update(writers.get(sent, ()))
                readers.setdefault(sent, []).append(place)
            # what is replaced or added to must have left before
            before.update(readers.get(filled, ()))
            # a copy replaces what was there: later readers wait for it alone
            if not message.reduces:
                before.update(writers.get(filled, ()))
                writers[filled] = []
            # reductions into one slot may come in any order: each waits for readers alone
            writers.setdefault(filled, []).append(place)
        # a local move may read what it fills itself
        before.discard(place)
        result.append(tuple(sorted(before)))
    return result


def reverse_gather(schedule: CollectiveSchedule, name: str) -> CollectiveSchedule:
    """The reduce-scatter that an all-gather is backwards in time: each copy becomes a reduction the other way."""
    messages = tuple(
        Message(message.target, message.source, message.chunks, reduces=True) for message in reversed(schedule.messages)
    )
    return replace(schedule, name=name, collective="reduce_scatter", messages=messages)


def reduce_and_gather(scatter: CollectiveSchedule, gather: CollectiveSchedule, name: str) -> CollectiveSchedule:
    """The all-reduce of a reduce-scatter and an all-gather of the same chunks."""
    return replace(scatter, name=name, collective="all_reduce", messages=scatter.messages + gather.messages)


def whole_blocks(collective: Collective, num_gpus: int, parts: int = 1) -> tuple[DataChunk, ...]:
    """Chunks of blocks in `parts` equal pieces of one unit; those of a block, or of its part, are neighbours."""
    ends: Mapping[bool, list[tuple[int, int]]] = {
        True: [(s, d) for s in range(num_gpus) for d in range(num_gpus) if s != d],
        False: [(block, -1) for block in range(num_gpus)],
    }
    pairs = ends[collective == "all_to_all"]
    return tuple(DataChunk(block, piece, 1, part) for block, part in pairs for piece in range(parts))
