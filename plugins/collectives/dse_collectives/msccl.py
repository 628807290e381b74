"""Schedules of collectives as XML of MSCCL: for each GPU, threadblocks with a peer, and their steps.

Written: a threadblock for each peer that a GPU sends to, one for each that it receives from (channel 0), and one for
local copies. Buffers: an all-gather is in place in the output, reductions in the input; an all-to-all goes from input
to output, and relays in scratch. A message of chunks that are not neighbours is several steps, which the attribute
`msg` (of no meaning to MSCCL) joins again. Steps of other threadblocks that a step waits for: the last by `depid` and
`deps`, others by `nop` steps before it.

Read: `s`, `r`, `rcs`, `rrc`, `rrcs`, `rrs`, `cpy`, `re` and `nop` of any channels; each is run on the units of the
buffers, so that a step says which chunk it moves. Partial sums that a GPU keeps beside its own are slots of scratch.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from dse_collectives.explicit import CollectiveSchedule, waits
from dse_collectives.msccl_run import schedule_of_xml

__all__ = ["schedule_of_xml", "xml_of"]

_NAMES: Mapping[str, str] = {
    "all_gather": "allgather",
    "reduce_scatter": "reduce_scatter",
    "all_reduce": "allreduce",
    "all_to_all": "alltoall",
}
_RAW = -1
"""Slot of a copy of a GPU's own contribution."""
Place = tuple[str, int]
"""Buffer and offset."""
Key = tuple[str, int]
"""Threadblock of a GPU: what it does (s, r, or c for copies), and the peer."""
Done = tuple[Key, int]
"""Threadblock and one of its steps."""


@dataclass
class _Block:
    """A threadblock: its peers, and the attributes of its steps."""

    send: int = -1
    receive: int = -1
    steps: list[dict[str, str]] = field(default_factory=list)


@dataclass
class _GpuThreads:
    """Threadblocks of a GPU by what they do; scratch: (chunk, slot or raw copy) -> offset."""

    blocks: dict[Key, _Block] = field(default_factory=dict)
    scratch: dict[tuple[int, int], int] = field(default_factory=dict)
    scratch_units: int = 0

    def block(self, does: str, peer: int) -> _Block:
        """The threadblock that sends to, or receives from, a peer; -1: local copies."""
        send, receive = (peer if does == way else -1 for way in ("s", "r"))
        return self.blocks.setdefault((does, peer), _Block(send, receive))


def xml_of(schedule: CollectiveSchedule) -> str:
    """A schedule as XML that MSCCL's runtime and its like read."""
    return _Writer(schedule).text()


class _Writer:
    """Threadblocks and steps of all GPUs, message by message."""

    def __init__(self, schedule: CollectiveSchedule) -> None:
        self.schedule, n = schedule, schedule.num_gpus
        self.gpus = [_GpuThreads() for _ in range(n)]
        self.ends: dict[tuple[int, bool], Done] = {}  # (message, it is sent) -> block, last step
        self.copies: dict[tuple[int, int], Done] = {}
        self.waited: set[tuple[int, Key, int]] = set()
        # local copies come first: messages may send what they fill
        self._copy()
        written: dict[tuple[int, int, int], int] = {}
        for place, before in enumerate(waits(schedule)):
            message = schedule.messages[place]
            filled = [(message.target, chunk, message.target_slot) for chunk in message.chunks]
            # MSCCL runs threadblocks at once: writers of one slot must follow one another too
            earlier = sorted({*before, *(written[slot] for slot in filled if slot in written)})
            if message.is_local:
                self._keep(place, earlier)
            else:
                self._send(place, before)
                self._receive(place, earlier)
            written |= dict.fromkeys(filled, place)

    def _place(self, gpu: int, chunk: int, slot: int = 0) -> Place:
        """Buffer and offset of a GPU's slot of a chunk."""
        data, units = self.schedule.chunks[chunk], self.schedule.units
        # partial sums, and blocks that are only passed on, lie in scratch
        if slot or (self.schedule.collective == "all_to_all" and gpu not in (data.block, data.part)):
            scratch, key = self.gpus[gpu], (chunk, slot)
            if key not in scratch.scratch:
                scratch.scratch[key] = scratch.scratch_units
                scratch.scratch_units += data.count
            return "s", scratch.scratch[key]
        if self.schedule.collective == "all_to_all":
            return (
                ("i", data.part * units + data.start) if gpu == data.block else ("o", data.block * units + data.start)
            )
        return "o" if self.schedule.collective == "all_gather" else "i", data.block * units + data.start

    def _copy(self) -> None:
        """Local copies: of what is sent raw, and of an all-to-all's own block."""
        schedule = self.schedule
        for message in schedule.messages if any(message.raw for message in schedule.messages) else ():
            for chunk in message.chunks if message.raw else ():
                if (message.source, chunk) not in self.copies:
                    ends = self._place(message.source, chunk), self._place(message.source, chunk, _RAW)
                    step = {"type": "cpy", **_buffers(*ends, schedule.chunks[chunk].count)}
                    self.copies[message.source, chunk] = self._append(message.source, ("c", -1), step, None)
        for gpu in range(schedule.num_gpus) if schedule.collective == "all_to_all" else ():
            at = gpu * schedule.units
            step = {"type": "cpy", **_buffers(("i", at), ("o", at), schedule.units)}
            self._append(gpu, ("c", -1), step, None)

    def _send(self, place: int, before: Sequence[int]) -> None:
        message, gpu = self.schedule.messages[place], self.schedule.messages[place].source
        block = ("s", message.target)
        # a GPU can wait for its own threadblocks alone: for what it has received
        needed = [self.ends[earlier, False] for earlier in before if self.schedule.messages[earlier].target == gpu]
        if message.raw:
            needed = [self.copies[gpu, chunk] for chunk in message.chunks]
        waited = self._wait(gpu, block, needed)
        for source, target, count in self._runs(place):
            step = {"type": "s", **_buffers(source, target, count), "msg": str(place)}
            # the first of several steps waits; the others follow it in their threadblock
            self.ends[place, True], waited = self._append(gpu, block, step, waited), None

    def _keep(self, place: int, before: Sequence[int]) -> None:
        """Copy or add what stays on a GPU from one of its slots to another."""
        message, messages = self.schedule.messages[place], self.schedule.messages
        gpu, block = message.source, ("c", -1)
        needed = [self.ends[earlier, True] for earlier in before if messages[earlier].source == gpu]
        needed += [self.ends[earlier, False] for earlier in before if messages[earlier].target == gpu]
        waited, kind = self._wait(gpu, block, needed), "re" if message.reduces else "cpy"
        for source, target, count in self._runs(place):
            done = self._append(gpu, block, {"type": kind, **_buffers(source, target, count)}, waited)
            self.ends[place, True], self.ends[place, False], waited = done, done, None

    def _receive(self, place: int, before: Sequence[int]) -> None:
        message, gpu = self.schedule.messages[place], self.schedule.messages[place].target
        block, messages = ("r", message.source), self.schedule.messages
        needed = [self.ends[earlier, True] for earlier in before if messages[earlier].source == gpu]
        needed += [self.ends[earlier, False] for earlier in before if messages[earlier].target == gpu]
        if message.reduces:
            needed += [self.copies[gpu, chunk] for chunk in message.chunks if (gpu, chunk) in self.copies]
        waited, kind = self._wait(gpu, block, needed), "rrc" if message.reduces else "r"
        for source, target, count in self._runs(place):
            # rrc adds what arrives to its source buffer, here the same as its target
            ends = (target if message.reduces else source), target
            step = {"type": kind, **_buffers(*ends, count), "msg": str(place)}
            self.ends[place, False], waited = self._append(gpu, block, step, waited), None

    def _runs(self, place: int) -> Iterator[tuple[Place, Place, int]]:
        """Yield (source, target, count) of a message's chunks, neighbours at both ends joined."""
        message, runs = self.schedule.messages[place], list[tuple[Place, Place, int]]()
        for chunk in message.chunks:
            source = self._place(message.source, chunk, _RAW if message.raw else message.source_slot)
            target = self._place(message.target, chunk, message.target_slot)
            count = self.schedule.chunks[chunk].count
            if runs:
                (before, at), (there, to), length = runs[-1]
                # one step moves neighbours at both ends
                if (before, at + length) == source and (there, to + length) == target:
                    runs[-1] = (before, at), (there, to), length + count
                    continue
            runs.append((source, target, count))
        yield from runs

    def _wait(self, gpu: int, block: Key, needed: Sequence[Done]) -> Done | None:
        """Make the next step of a threadblock wait for others; the one that it has to name itself."""
        last: dict[Key, int] = {}
        for other, step in needed:
            # steps of one threadblock run in their order anyway
            if other != block:
                # a later step of a threadblock implies the earlier ones
                last[other] = max(step, last.get(other, -1))
        *before, final = last.items() or [None]
        self.waited.update((gpu, *waited) for waited in last.items())
        for waited in before:
            self._append(gpu, block, {"type": "nop", **_buffers(("i", -1), ("o", -1), 0)}, waited)
        return final

    def _append(self, gpu: int, block: Key, step: dict[str, str], waited: Done | None) -> Done:
        """Add a step to a threadblock; which one it is."""
        steps = self.gpus[gpu].block(*block).steps
        places = {key: place for place, key in enumerate(self.gpus[gpu].blocks)}
        depends = (places[waited[0]], waited[1]) if waited else (-1, -1)
        steps.append({"s": str(len(steps)), **step, "depid": str(depends[0]), "deps": str(depends[1])})
        return block, len(steps) - 1

    def text(self) -> str:
        """The XML."""
        schedule, n = self.schedule, self.schedule.num_gpus
        tensor_units, collective = n * schedule.units, schedule.collective
        root = ET.Element("algo", name=schedule.name, proto="Simple", nchannels="1", nchunksperloop=str(tensor_units))
        root.attrib |= {"ngpus": str(n), "coll": _NAMES[collective], "outofplace": str(int(collective == "all_to_all"))}
        root.attrib |= {"inplace": str(int(collective != "all_to_all")), "minBytes": "0", "maxBytes": "0"}
        sizes = {
            "i_chunks": schedule.units if collective == "all_gather" else tensor_units,
            "o_chunks": schedule.units if collective == "reduce_scatter" else tensor_units,
        }
        for number, gpu in enumerate(self.gpus):
            counts = {**sizes, "s_chunks": gpu.scratch_units}
            element = ET.SubElement(root, "gpu", {"id": str(number), **{name: str(counts[name]) for name in counts}})
            for place, (key, block) in enumerate(gpu.blocks.items()):
                peers = {"send": str(block.send), "recv": str(block.receive), "chan": "0"}
                threads = ET.SubElement(element, "tb", {"id": str(place), **peers})
                for at, step in enumerate(block.steps):
                    ET.SubElement(threads, "step", step, hasdep=str(int((number, key, at) in self.waited)))
        ET.indent(root, " ")
        return ET.tostring(root, encoding="unicode") + "\n"


def _buffers(source: Place, target: Place, count: int) -> dict[str, str]:
    return {
        "srcbuf": source[0],
        "srcoff": str(source[1]),
        "dstbuf": target[0],
        "dstoff": str(target[1]),
        "cnt": str(count),
    }
