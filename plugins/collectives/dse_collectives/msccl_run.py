"""MSCCL's XML read back: its steps are run on the units of all buffers, so that each says which chunk it moves.

Units are as large as all steps and blocks allow (`grain` units of the file), and those that steps move are counted
before any is made. An all-reduce in parts that are no multiple of its GPUs has smaller units, so that each GPU has a
block.
"""

from __future__ import annotations

import heapq
import math
import re
import xml.etree.ElementTree as ET
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from dse.errors import ConfigError, Problem, did_you_mean
from dse_collectives.explicit import Collective, CollectiveSchedule, DataChunk, Message
from dse_collectives.msccl_slots import Buffers, Cell, Flight, Key, Unit
from dse_collectives.topology import MOST_GPUS

_COLLECTIVES: Mapping[str, Collective] = {
    "allgather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "reducescatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "alltoall": "all_to_all",
}
# s send, r receive, c copy, rr receive and reduce, in the letters of MSCCL
_SENDS, _RECEIVES, _REDUCES = ("s", "rcs", "rrcs", "rrs"), ("r", "rcs", "rrc", "rrcs", "rrs"), ("rrc", "rrcs", "rrs")
_LOCAL = ("cpy", "re")
_READS, _WRITES = ("s", *_LOCAL, *_REDUCES), (*_RECEIVES, *_LOCAL)
_KINDS = {*_SENDS, *_RECEIVES, "cpy", "re", "nop"}
_BUFFERS = {"i": "i", "o": "o", "s": "s", "input": "i", "output": "o", "scratch": "s"}
MOST_UNITS = 1 << 18
"""Units of all GPUs, and units that all steps move."""
_ANY_ROOM = 999_999_999
_NUMBER = re.compile(r"-?[0-9]{1,9}")


@dataclass
class _Threads:
    """A threadblock: peers, steps, and how many are done."""

    gpu: int
    send: int
    receive: int
    channel: int
    steps: list[dict[str, Any]]
    done: int = 0


def schedule_of_xml(text: str, source: str = "algorithm.xml") -> CollectiveSchedule:
    """The schedule of an MSCCL algorithm, not proven. source: name of its file.

    Raises ConfigError, also where its steps wait in a circle.
    """
    try:
        return _Run(_Algorithm(_root(text))).schedule()
    except ConfigError as error:
        raise ConfigError([replace(problem, value=source) for problem in error.problems]) from None


def _root(text: str) -> ET.Element:
    # no entities: they could grow without bound when they are expanded
    if "<!" in text.replace("<!--", ""):
        _refuse("has declarations, which MSCCL's XML does not need", "leave out <!DOCTYPE ...> and <![CDATA[ ... ]]>")
    try:
        return ET.fromstring(text)
    except ET.ParseError as error:
        _refuse(f"is no XML: {error}", "write or download it again; msccl-tools prints whole files")


def _refuse(rule: str, way_out: str) -> NoReturn:
    raise ConfigError([Problem("schedule", rule, way_out=way_out)])


_MEND = "mend that step, or let msccl-tools check the program (Check()) before it prints it"
"""The way out for steps that move wrong data."""
_ROOM = "write more s_chunks for this GPU"


def _number(element: ET.Element, name: str, default: int | None = None) -> int:
    text = element.get(name, "" if default is None else str(default))
    if not _NUMBER.fullmatch(text):
        _refuse(f"has <{element.tag}> whose {name} is no number: {text!r}", f'write {name}="<whole number>"')
    return int(text)


def _by_id(elements: Sequence[ET.Element], owner: str) -> dict[int, ET.Element]:
    """Elements by their `id`. Raises ConfigError where two have the same."""
    by_id = {_number(element, "id"): element for element in elements}
    if len(by_id) < len(elements):
        _refuse(f"has two <{elements[0].tag}> with one id in {owner}", "number them from 0, each once")
    return by_id


class _Algorithm:
    """Threadblocks of a file, with sizes in units. grain: units of the file in a unit."""

    def __init__(self, root: ET.Element) -> None:
        name = root.get("coll", "")
        if root.tag != "algo" or name not in _COLLECTIVES:
            rule = f"is no <algo> of {', '.join(_COLLECTIVES)}, the collectives that are run here (coll={name!r})"
            way = did_you_mean(name, _COLLECTIVES) if root.tag == "algo" else "name a file that begins with <algo"
            _refuse(rule, way)
        self.name, self.collective = root.get("name", "imported")[:200], _COLLECTIVES[name]
        self.num_gpus, parts = _number(root, "ngpus"), _number(root, "nchunksperloop")
        if not 2 <= self.num_gpus <= MOST_GPUS or parts < 1:
            _refuse(f"needs 2 to {MOST_GPUS} GPUs, and nchunksperloop from 1", "write both into <algo ...>")
        self.scale = math.lcm(parts, self.num_gpus) // parts  # units of a chunk of the file
        if self.scale > 1 and self.collective != "all_reduce":
            _refuse(
                f"needs a multiple of its {self.num_gpus} GPUs as nchunksperloop, as its blocks are equal",
                f'write nchunksperloop="{self.num_gpus}", and smaller chunks',
            )
        self.units = parts * self.scale // self.num_gpus
        self.is_in_place = root.get("inplace") == "1" and self.collective != "all_to_all"
        self.scratch = dict[int, int]()
        self.blocks = list(self._threads(root))
        self._coarsen()
        # refused before units are made
        self._count("has", self.num_gpus**2 * self.units)
        self._count("moves", sum(step["cnt"] for block in self.blocks for step in block.steps))

    def _coarsen(self) -> None:
        """Make units as large as all offsets, counts and blocks allow."""
        steps = [step for block in self.blocks for step in block.steps]
        sizes = {self.units, *(step["cnt"] for step in steps)}
        sizes |= {step["srcoff"] for step in steps if step["type"] in _READS}
        sizes |= {step["dstoff"] for step in steps if step["type"] in _WRITES}
        self.grain = math.gcd(*sizes)
        self.units //= self.grain
        self.scratch = {gpu: room // self.grain for gpu, room in self.scratch.items()}
        for step in steps:
            step.update({name: step[name] // self.grain for name in ("srcoff", "dstoff", "cnt")})

    def _count(self, verb: str, units: int) -> None:
        """Refuse to make more units than are run here. Raises ConfigError."""
        if units > MOST_UNITS:
            way = "use fewer, larger chunks (nchunksperloop, cnt), or YAML of messages"
            _refuse(f"{verb} {units:,} units in all, and {MOST_UNITS:,} are the most that are run here", way)

    def _threads(self, root: ET.Element) -> Iterator[_Threads]:
        """Yield all threadblocks; `depid` becomes a place among them."""
        gpus = _by_id(root.findall("gpu"), "the file")
        if set(gpus) != set(range(self.num_gpus)):
            _refuse(f"has no <gpu> for each of {self.num_gpus} GPUs", f"write <gpu> with id 0 to {self.num_gpus - 1}")
        first = 0
        for number, gpu in sorted(gpus.items()):
            self.scratch[number] = self.scale * _number(gpu, "s_chunks", _ANY_ROOM)
            threads = _by_id(gpu.findall("tb"), f"GPU {number}")
            # ids are of one GPU; here threadblocks of all GPUs are numbered through
            places = {name: first + place for place, name in enumerate(threads)}
            for block in threads.values():
                send, receive, channel = (_number(block, end, -1) for end in ("send", "recv", "chan"))
                steps = [self._step(step, places) for step in block.findall("step")]
                yield _Threads(number, send, receive, channel, steps)
            first += len(threads)

    def _step(self, step: ET.Element, places: Mapping[int, int]) -> dict[str, Any]:
        if (kind := step.get("type", "")) not in _KINDS:
            _refuse(f"has a step of type {kind!r}; there are {', '.join(sorted(_KINDS))}", did_you_mean(kind, _KINDS))
        numbers = {name: _number(step, name) for name in ("srcoff", "dstoff", "cnt", "depid", "deps")}
        if numbers["depid"] >= 0:
            if numbers["depid"] not in places:
                rule = f"has a step that waits for threadblock {numbers['depid']}, which its GPU has not"
                _refuse(rule, f"write depid as one of {', '.join(map(str, list(places)[:8]))}, or -1")
            numbers["depid"] = places[numbers["depid"]]
        if kind == "nop":
            # a nop only waits
            numbers |= {"srcoff": 0, "dstoff": 0, "cnt": 0}
        elif numbers["cnt"] < 1:
            _refuse(f"has a step of {numbers['cnt']} units", 'write cnt="1" or more, or type="nop"')
        numbers |= {name: self.scale * numbers[name] for name in ("srcoff", "dstoff", "cnt")}
        buffers = {name: _BUFFERS.get(text := step.get(name, ""), text) for name in ("srcbuf", "dstbuf")}
        return {"type": kind, "msg": _number(step, "msg", -1), **numbers, **buffers}


class _Run:
    """Runs steps as soon as their threadblock, what they wait for and what they receive allow it."""

    def __init__(self, algorithm: _Algorithm) -> None:
        self._algorithm = algorithm
        self.buffers = Buffers(algorithm.collective, algorithm.num_gpus, algorithm.units, algorithm.is_in_place)
        self.flights: dict[tuple[int, int, int], deque[Flight]] = defaultdict(deque)

    def schedule(self) -> CollectiveSchedule:
        """Run all steps. Raises ConfigError where they wait in a circle, or for units that nothing fills."""
        waiting: dict[Any, list[int]] = defaultdict(list)
        # a heap by rank, so that steps of one message follow one another and join again
        ready = [(self._rank(place), place) for place in range(len(self._algorithm.blocks))]
        heapq.heapify(ready)
        while ready:
            _, place = heapq.heappop(ready)
            block = self._algorithm.blocks[place]
            if block.done == len(block.steps):
                continue
            if (reason := self._obstacle(block)) is not None:
                # woken when the threadblock or link that it waits for has news
                waiting[reason].append(place)
                continue
            news = self._run(place)
            for again in [place, *(other for new in news for other in waiting.pop(new, ()))]:
                heapq.heappush(ready, (self._rank(again), again))
        if stuck := [block for block in self._algorithm.blocks if block.done < len(block.steps)]:
            where = ", ".join(f"GPU {block.gpu} step {block.done} (send {block.send}, recv {block.receive})"
                              for block in stuck[:3])  # fmt: skip
            _refuse(
                f"deadlocks: {where} wait for ever",
                "let a step before them send what they wait for, or mend depid and deps",
            )
        self._check_outputs()
        return self._in_chunks()

    def _check_outputs(self) -> None:
        """Note what is wanted of outputs.

        Raises ConfigError where one has not the unit that belongs there, with all contributions.
        """
        exchanged, scattered = (
            self._algorithm.collective == "all_to_all",
            self._algorithm.collective == "reduce_scatter",
        )
        adds = scattered or self._algorithm.collective == "all_reduce"
        for gpu in range(self._algorithm.num_gpus):
            outputs = list[Cell]()
            for at in range(self._algorithm.units * (1 if scattered else self._algorithm.num_gpus)):
                block, place = divmod(at, self._algorithm.units)
                # what belongs at this place of the output
                unit = (block, gpu, place) if exchanged else (gpu if scattered else block, -1, place)
                cell, chunk = self.buffers.cell(self.buffers.key(gpu, "o", at)), self._chunk(unit)
                output = f"o[{at * self._algorithm.grain}] of GPU {gpu}"
                if cell is None or cell.unit != unit:
                    _refuse(f"{chunk} is lost: it is not in {output}, where it belongs", _MEND)
                if lacking := set(range(self._algorithm.num_gpus)) - cell.contributions if adds else ():
                    _refuse(f"{chunk} is lost: {output} lacks the contribution of GPU {min(lacking)}", _MEND)
                outputs.append(cell)
            self.buffers.finish(gpu, outputs)

    def _rank(self, place: int) -> tuple[int, int]:
        """Order in which steps that could run do: by message, sending first."""
        block = self._algorithm.blocks[place]
        if block.done == len(block.steps):
            return 0, 0
        step = block.steps[block.done]
        # -1 in files of others, whose steps keep the order of their threadblocks
        upcoming = next((later["msg"] for later in block.steps[block.done :] if later["msg"] >= 0), -1)
        return upcoming, step["type"] in _RECEIVES

    def _obstacle(self, block: _Threads) -> Any:
        """The threadblock or link that the next step of a threadblock waits for, or None."""
        step = block.steps[block.done]
        # a step waits until the named step of the other threadblock is done
        if step["depid"] >= 0 and self._algorithm.blocks[step["depid"]].done <= step["deps"]:
            return step["depid"]
        link = block.receive, block.gpu, block.channel
        return link if step["type"] in _RECEIVES and not self.flights[link] else None

    def _run(self, place: int) -> list[Any]:
        """Run the next step of a threadblock; what others may have waited for."""
        block = self._algorithm.blocks[place]
        step, gpu = block.steps[block.done], block.gpu
        news: list[Any] = [place]
        if step["type"] in _LOCAL:
            self._local(gpu, step)
        sent = self._arrive(block, step) if step["type"] in _RECEIVES else []
        if step["type"] in _SENDS:
            if step["type"] == "s":
                sent = self._read(gpu, self._keys(gpu, step, "src"))
                # what is on its way must not change until it has arrived
                self.buffers.take(gpu, sent)
            link = gpu, block.send, block.channel
            self.flights[link].append(Flight(gpu, sent, step["msg"]))
            news.append(link)
        elif sent:
            self.buffers.release(gpu, sent)
        block.done += 1
        return news

    def _keys(self, gpu: int, step: Mapping[str, Any], end: str) -> list[Key]:
        """Cells of an end of a step. Raises ConfigError for those outside of their buffer."""
        buffer, at, count = step[f"{end}buf"], step[f"{end}off"], step["cnt"]
        if buffer not in ("i", "o", "s") or at < 0:
            place = f"{buffer}[{at * self._algorithm.grain}]"
            _refuse(f"GPU {gpu} has a step of {step['type']} at {place}, which is in no buffer", _MEND)
        if end == "dst" and buffer == "s" and at + count > self._algorithm.scratch[gpu]:
            room, last = self._algorithm.scratch[gpu] * self._algorithm.grain, (at + count) * self._algorithm.grain - 1
            _refuse(f"GPU {gpu} has a step of {step['type']} to s[{last}], and s_chunks of it are {room}", _ROOM)
        return [self.buffers.key(gpu, buffer, at + place) for place in range(count)]

    def _read(self, gpu: int, keys: Sequence[Key]) -> list[Cell]:
        """Content of cells. Raises ConfigError for units that nothing has filled."""
        cells = [self.buffers.cell(key) for key in keys]
        if None in cells:
            _, buffer, at = keys[cells.index(None)]
            _refuse(f"GPU {gpu} sends {buffer}[{at * self._algorithm.grain}], which nothing has filled", _MEND)
        return [cell for cell in cells if cell is not None]

    def _local(self, gpu: int, step: Mapping[str, Any]) -> None:
        targets = self._keys(gpu, step, "dst")
        cells = self._read(gpu, self._keys(gpu, step, "src"))
        if step["type"] == "cpy":
            self.buffers.copy(gpu, cells, targets)
            return
        self._check_sums(gpu, cells, targets)
        for part in _without_doubles(cells):
            ends = [targets[place] for place in part]
            self.buffers.add(gpu, [cells[place] for place in part], (ends, ends))

    def _arrive(self, block: _Threads, step: Mapping[str, Any]) -> list[Cell]:
        """Receive units; they, or the sums with them, as a step that sends them on has them, which keeps them."""
        gpu, flights = block.gpu, self.flights[block.receive, block.gpu, block.channel]
        flight = flights.popleft()
        cells, counts = flight.cells, [self._algorithm.grain * count for count in (step["cnt"], len(flight.cells))]
        if counts[0] != counts[1]:
            _refuse(
                f"GPU {gpu} receives {counts[0]} units from GPU {block.receive}, which sends {counts[1]}",
                "give both steps one cnt",
            )
        targets = self._keys(gpu, step, "dst")
        if step["type"] == "rrs":  # its sum is kept nowhere
            # a cell of its own for the sum that is passed on at once
            targets = [(gpu, f"of step {step['srcbuf']}", at) for _, _, at in self._keys(gpu, step, "src")]
        bases = self._keys(gpu, step, "src") if step["type"] in _REDUCES else []
        if bases:
            self._check_sums(gpu, cells, bases)
        for part in _without_doubles(cells):
            to = [targets[place] for place in part]
            if bases:
                self.buffers.receive_sum(gpu, flight.part(part), ([bases[place] for place in part], to))
            else:
                self.buffers.receive(gpu, flight.part(part), to)
        self.buffers.release(block.receive, cells)
        arrived = self._read(gpu, targets)
        self.buffers.take(gpu, arrived)
        return arrived

    def _check_sums(self, gpu: int, cells: Sequence[Cell], bases: Sequence[Key]) -> None:
        """Raise ConfigError where units are not added to those of the same place, or a contribution is doubled."""
        for cell, to in zip(cells, self._read(gpu, bases), strict=True):
            if cell.unit != to.unit:
                _refuse(f"GPU {gpu} adds {self._chunk(cell.unit)} to {self._chunk(to.unit)}", _MEND)
            if doubled := cell.contributions & to.contributions:
                rule = f"{self._chunk(cell.unit)} is doubled: GPU {gpu} has the contribution of GPU {min(doubled)}"
                _refuse(rule, _MEND)

    def _chunk(self, unit: Unit) -> DataChunk:
        return DataChunk(unit[0], unit[2] * self._algorithm.grain, self._algorithm.grain, unit[1])

    def _in_chunks(self) -> CollectiveSchedule:
        """Cut blocks wherever a message begins or ends in them, and name the chunks of messages."""
        cuts: dict[tuple[int, int], set[int]] = defaultdict(set)
        moved_units = self.buffers.moved
        for block, part in {unit[:2] for moved in moved_units for unit in moved.units}:
            cuts[block, part] |= {0, self._algorithm.units}
        for moved in moved_units:
            for unit, following in zip(moved.units, [*moved.units[1:], None], strict=True):
                # a run of neighbours ends here: the block is cut behind it
                if following != (*unit[:2], unit[2] + 1):
                    cuts[unit[:2]].add(unit[2] + 1)
                    if following is not None:
                        cuts[following[:2]].add(following[2])
            cuts[moved.units[0][:2]].add(moved.units[0][2])
        chunks = [
            DataChunk(block, start * self._algorithm.grain, (end - start) * self._algorithm.grain, part)
            for (block, part), places in sorted(cuts.items())
            for start, end in zip(sorted(places), sorted(places)[1:], strict=False)
        ]
        place = {
            (chunk.block, chunk.part, chunk.start // self._algorithm.grain): number
            for number, chunk in enumerate(chunks)
        }
        messages = tuple(
            Message(moved.source, moved.target, tuple(place[unit] for unit in moved.units if unit in place),
                    moved.reduces, moved.raw, moved.source_slot, moved.target_slot)
            for moved in moved_units
        )  # fmt: skip
        # back to the units of the file
        units = self._algorithm.units * self._algorithm.grain
        return CollectiveSchedule(
            self._algorithm.name, self._algorithm.collective, self._algorithm.num_gpus, units, tuple(chunks), messages
        )


def _without_doubles(cells: Sequence[Cell]) -> list[list[int]]:
    """Places of cells, in parts that have no unit twice."""
    parts, times = list[list[int]](), defaultdict[Unit, int](int)
    for place, cell in enumerate(cells):
        part = times[cell.unit]
        times[cell.unit] += 1
        if part == len(parts):
            parts.append([])
        parts[part].append(place)
    return parts
