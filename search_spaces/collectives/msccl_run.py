"""MSCCL's XML read back: its steps are run on the units of all buffers, so that each says which chunk it moves."""

from __future__ import annotations

import heapq
import xml.etree.ElementTree as ET
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from dse.errors import ConfigError, Problem
from search_spaces.collectives.explicit import Collective, CollectiveSchedule, DataChunk, Message
from search_spaces.collectives.topology import MOST_GPUS

_COLLECTIVES: Mapping[str, Collective] = {
    "allgather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "reducescatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "alltoall": "all_to_all",
}
_SENDS, _RECEIVES, _REDUCES = ("s", "rcs", "rrcs", "rrs"), ("r", "rcs", "rrc", "rrcs", "rrs"), ("rrc", "rrcs", "rrs")
_KINDS = {*_SENDS, *_RECEIVES, "cpy", "re", "nop"}
_MOST_UNITS = 1 << 20  # of all GPUs
Unit = tuple[int, int, int]
"""Block, part (-1 but in an all-to-all), and place in it."""


@dataclass(frozen=True)
class _Cell:
    """The content of a unit of a buffer. copied: by a local copy."""

    unit: Unit
    contributions: frozenset[int]
    copied: bool = False


@dataclass
class _Flight:
    """Units on their way. message: number that joins steps, or -1."""

    cells: list[_Cell]
    raw: bool
    message: int


@dataclass
class _Threads:
    """A threadblock: peers, steps, and how many are done."""

    gpu: int
    send: int
    receive: int
    channel: int
    steps: list[Mapping[str, Any]]
    done: int = 0


@dataclass
class _Moved:
    """A message in units, before chunks are known."""

    source: int
    target: int
    units: list[Unit]
    reduces: bool
    raw: bool
    number: int


def schedule_of_xml(text: str) -> CollectiveSchedule:
    """The schedule of an MSCCL algorithm, not proven. Raises ConfigError, also where its steps wait in a circle."""
    if "<!" in text.replace("<!--", ""):
        _refuse("has declarations, which MSCCL's XML does not need")
    try:
        root = ET.fromstring(text)
    except ET.ParseError as error:
        _refuse(f"is no XML: {error}")
    return _Run(root).schedule()


def _refuse(rule: str) -> NoReturn:
    raise ConfigError([Problem("schedule", rule)])


def _number(element: ET.Element, name: str, default: int | None = None) -> int:
    text = element.get(name, "" if default is None else str(default))
    if not text.lstrip("-").isascii() or not text.lstrip("-").isdigit() or len(text) > 9:
        _refuse(f"has <{element.tag}> whose {name} is no number: {text!r}")
    return int(text)


@dataclass
class _Buffers:
    """Units of all buffers, by (GPU, buffer, offset), with what aliases them in place."""

    collective: Collective
    num_gpus: int
    units: int
    in_place: bool
    cells: dict[tuple[int, str, int], _Cell] = field(default_factory=dict)

    def __post_init__(self) -> None:
        everything = range(self.num_gpus * self.units)
        for gpu in range(self.num_gpus):
            own_contribution = frozenset([gpu])
            for at in range(self.units) if self.collective == "all_gather" else everything:
                block, place = divmod(at, self.units)
                unit = (gpu, block, place) if self.collective == "all_to_all" else (block, -1, place)
                unit = (gpu, -1, place) if self.collective == "all_gather" else unit
                self.cells[self._key(gpu, "i", at)] = _Cell(unit, own_contribution)

    def _key(self, gpu: int, buffer: str, at: int) -> tuple[int, str, int]:
        """Key of a unit of a buffer: in place, an all-gather's input and a reduce-scatter's output are parts."""
        if not self.in_place or buffer == "s":
            return gpu, buffer, at
        if self.collective == "all_gather":
            return gpu, "o", at + (gpu * self.units if buffer == "i" else 0)
        return gpu, "i", at + (gpu * self.units if buffer == "o" and self.collective == "reduce_scatter" else 0)

    def cell(self, gpu: int, buffer: str, at: int) -> _Cell | None:
        """The content of a unit of a buffer; None: nothing has filled it."""
        return self.cells.get(self._key(gpu, buffer, at))

    def read(self, gpu: int, step: Mapping[str, Any], end: str = "src") -> list[_Cell]:
        """Units of a step's source (or target). Raises ConfigError for units that nothing has filled."""
        buffer, at = step[f"{end}buf"], step[f"{end}off"]
        cells = [self.cell(gpu, buffer, at + place) for place in range(step["cnt"])]
        if None in cells:
            _refuse(f"GPU {gpu} sends {buffer}[{at + cells.index(None)}], which nothing has filled")
        return [cell for cell in cells if cell is not None]

    def write(self, gpu: int, step: Mapping[str, Any], cells: Sequence[_Cell]) -> None:
        """Fill a step's target."""
        for place, cell in enumerate(cells):
            self.cells[self._key(gpu, step["dstbuf"], step["dstoff"] + place)] = cell


class _Run:
    """Runs steps as soon as their threadblock, what they wait for and what they receive allow it."""

    def __init__(self, root: ET.Element) -> None:
        name = root.get("coll", "")
        if root.tag != "algo" or name not in _COLLECTIVES:
            _refuse(f"is no <algo> of {', '.join(_COLLECTIVES)}")
        self.name, self.collective = root.get("name", "imported")[:200], _COLLECTIVES[name]
        self.num_gpus, tensor_units = _number(root, "ngpus"), _number(root, "nchunksperloop")
        if not 2 <= self.num_gpus <= MOST_GPUS or tensor_units < 1 or tensor_units % self.num_gpus:
            _refuse(f"needs 2 to {MOST_GPUS} GPUs, and a multiple of them as nchunksperloop")
        if self.num_gpus * tensor_units > _MOST_UNITS:
            _refuse(f"has more than {_MOST_UNITS} units in all, too many to be run; YAML has no such limit")
        self.units = tensor_units // self.num_gpus
        in_place = root.get("inplace") == "1" and self.collective != "all_to_all"
        self.buffers = _Buffers(self.collective, self.num_gpus, self.units, in_place)
        self.blocks = list(self._threads(root))
        self.flights: dict[tuple[int, int, int], deque[_Flight]] = defaultdict(deque)
        self.slots: dict[tuple[int, Unit], frozenset[int]] = {
            (gpu, cell.unit): cell.contributions for (gpu, _, _), cell in self.buffers.cells.items()
        }
        self.moved: list[_Moved] = []

    def _threads(self, root: ET.Element) -> Iterator[_Threads]:
        """Yield all threadblocks; `depid` becomes a place among them."""
        gpus = {_number(gpu, "id"): gpu for gpu in root.findall("gpu")}
        if set(gpus) != set(range(self.num_gpus)):
            _refuse(f"has no <gpu> for each of {self.num_gpus} GPUs")
        first = 0
        for number, gpu in sorted(gpus.items()):
            threads = gpu.findall("tb")
            places = {_number(block, "id"): first + place for place, block in enumerate(threads)}
            for block in threads:
                send, receive, channel = (_number(block, end, -1) for end in ("send", "recv", "chan"))
                steps = [self._step(step, places) for step in block.findall("step")]
                yield _Threads(number, send, receive, channel, steps)
            first += len(threads)

    def _step(self, step: ET.Element, places: Mapping[int, int]) -> Mapping[str, Any]:
        if (kind := step.get("type", "")) not in _KINDS:
            _refuse(f"has a step of type {kind!r}; there are {', '.join(sorted(_KINDS))}")
        numbers = {name: _number(step, name) for name in ("srcoff", "dstoff", "cnt", "depid", "deps")}
        if numbers["depid"] >= 0:
            if numbers["depid"] not in places:
                _refuse(f"has a step that waits for threadblock {numbers['depid']}, which its GPU has not")
            numbers["depid"] = places[numbers["depid"]]
        if kind != "nop" and not 1 <= numbers["cnt"] <= _MOST_UNITS:
            _refuse(f"has a step of {numbers['cnt']} units")
        buffers = {name: {"input": "i", "output": "o", "scratch": "s"}.get(text := step.get(name, ""), text)
                   for name in ("srcbuf", "dstbuf")}  # fmt: skip
        return {"type": kind, "msg": _number(step, "msg", -1), **numbers, **buffers}

    def schedule(self) -> CollectiveSchedule:
        """Run all steps. Raises ConfigError where they wait in a circle, or for units that nothing fills."""
        waiting: dict[Any, list[int]] = defaultdict(list)
        ready = [(self._rank(place), place) for place in range(len(self.blocks))]
        heapq.heapify(ready)
        while ready:
            _, place = heapq.heappop(ready)
            block = self.blocks[place]
            if block.done == len(block.steps):
                continue
            if (reason := self._obstacle(block)) is not None:
                waiting[reason].append(place)
                continue
            news = self._run(place)
            for again in [place, *(other for new in news for other in waiting.pop(new, ()))]:
                heapq.heappush(ready, (self._rank(again), again))
        if stuck := [block for block in self.blocks if block.done < len(block.steps)]:
            where = ", ".join(f"GPU {block.gpu} step {block.done} (send {block.send}, recv {block.receive})"
                              for block in stuck[:3])  # fmt: skip
            _refuse(f"deadlocks: {where} wait for ever")
        self._check_outputs()
        return self._in_chunks()

    def _check_outputs(self) -> None:
        """Raise ConfigError where an output has not the unit that belongs there."""
        exchanged, scattered = self.collective == "all_to_all", self.collective == "reduce_scatter"
        for gpu in range(self.num_gpus):
            for at in range(self.units * (1 if scattered else self.num_gpus)):
                block, place = divmod(at, self.units)
                unit = (block, gpu, place) if exchanged else (gpu if scattered else block, -1, place)
                cell = self.buffers.cell(gpu, "o", at)
                if cell is None or cell.unit != unit:
                    chunk = DataChunk(unit[0], unit[2], 1, unit[1])
                    _refuse(f"{chunk} is lost: it is not in o[{at}] of GPU {gpu}, where it belongs")

    def _rank(self, place: int) -> tuple[int, int]:
        """Order in which steps that could run do: by message, sending first."""
        block = self.blocks[place]
        if block.done == len(block.steps):
            return 0, 0
        step = block.steps[block.done]
        upcoming = next((later["msg"] for later in block.steps[block.done :] if later["msg"] >= 0), -1)
        return upcoming, step["type"] in _RECEIVES

    def _obstacle(self, block: _Threads) -> Any:
        """The threadblock or link that the next step of a threadblock waits for, or None."""
        step = block.steps[block.done]
        if step["depid"] >= 0 and self.blocks[step["depid"]].done <= step["deps"]:
            return step["depid"]
        link = block.receive, block.gpu, block.channel
        return link if step["type"] in _RECEIVES and not self.flights[link] else None

    def _run(self, place: int) -> list[Any]:
        """Run the next step of a threadblock; what others may have waited for."""
        block = self.blocks[place]
        step, gpu = block.steps[block.done], block.gpu
        news: list[Any] = [place]
        if step["type"] in ("cpy", "re"):
            self._local(gpu, step)
        if step["type"] in _RECEIVES:
            self._arrive(block, step)
        if step["type"] in _SENDS:
            cells = self.buffers.read(gpu, step, "src" if step["type"] == "s" else "dst")
            raw = all(cell.copied and cell.contributions == {gpu} for cell in cells) and self.collective != "all_to_all"
            raw = raw or any(self.slots[gpu, cell.unit] != cell.contributions == {gpu} for cell in cells)
            link = gpu, block.send, block.channel
            self.flights[link].append(_Flight(cells, raw, step["msg"]))
            news.append(link)
        block.done += 1
        return news

    def _local(self, gpu: int, step: Mapping[str, Any]) -> None:
        cells = self.buffers.read(gpu, step)
        if step["type"] == "re":
            present = self.buffers.read(gpu, step, "dst")
            cells = [_add_cells(gpu, cell, to) for cell, to in zip(cells, present, strict=True)]
            self.slots |= {(gpu, cell.unit): cell.contributions for cell in cells}
        self.buffers.write(gpu, step, [_Cell(cell.unit, cell.contributions, step["dstbuf"] == "s") for cell in cells])

    def _arrive(self, block: _Threads, step: Mapping[str, Any]) -> None:
        gpu = block.gpu
        flight = self.flights[block.receive, gpu, block.channel].popleft()
        cells, reduces = flight.cells, step["type"] in _REDUCES
        if len(cells) != step["cnt"]:
            _refuse(f"GPU {gpu} receives {step['cnt']} units from GPU {block.receive}, which sends {len(cells)}")
        self._note(_Moved(block.receive, gpu, [cell.unit for cell in cells], reduces, flight.raw, flight.message))
        if reduces:
            present = self.buffers.read(gpu, step)
            cells = [_add_cells(gpu, cell, to) for cell, to in zip(cells, present, strict=True)]
        self.buffers.write(gpu, step, [_Cell(cell.unit, cell.contributions) for cell in cells])
        self.slots |= {(gpu, cell.unit): cell.contributions for cell in cells}

    def _note(self, moved: _Moved) -> None:
        """Note a message; steps with its number are one."""
        ends = moved.source, moved.target, moved.number
        if self.moved and moved.number >= 0:
            last = self.moved[-1]
            if (last.source, last.target, last.number) == ends:
                last.units += moved.units
                return
        self.moved.append(moved)

    def _in_chunks(self) -> CollectiveSchedule:
        """Cut blocks wherever a message begins or ends in them, and name the chunks of messages."""
        cuts: dict[tuple[int, int], set[int]] = defaultdict(set)
        for block, part in {unit[:2] for moved in self.moved for unit in moved.units}:
            cuts[block, part] |= {0, self.units}
        for moved in self.moved:
            for unit, following in zip(moved.units, [*moved.units[1:], None], strict=True):
                if following != (*unit[:2], unit[2] + 1):
                    cuts[unit[:2]].add(unit[2] + 1)
                    if following is not None:
                        cuts[following[:2]].add(following[2])
            cuts[moved.units[0][:2]].add(moved.units[0][2])
        chunks = [
            DataChunk(block, start, end - start, part)
            for (block, part), places in sorted(cuts.items())
            for start, end in zip(sorted(places), sorted(places)[1:], strict=False)
        ]
        place = {(chunk.block, chunk.part, chunk.start): number for number, chunk in enumerate(chunks)}
        messages = tuple(
            Message(moved.source, moved.target, tuple(place[unit] for unit in moved.units if unit in place),
                    moved.reduces, moved.raw)
            for moved in self.moved
        )  # fmt: skip
        return CollectiveSchedule(self.name, self.collective, self.num_gpus, self.units, tuple(chunks), messages)


def _add_cells(gpu: int, cell: _Cell, to: _Cell) -> _Cell:
    """The sum of two units. Raises ConfigError where they are not of the same place, or a contribution is doubled."""
    chunk = DataChunk(cell.unit[0], cell.unit[2], 1, cell.unit[1])
    if cell.unit != to.unit:
        _refuse(f"GPU {gpu} adds {chunk} to {DataChunk(to.unit[0], to.unit[2], 1, to.unit[1])}")
    if doubled := cell.contributions & to.contributions:
        _refuse(f"{chunk} is doubled: GPU {gpu} has the contribution of GPU {min(doubled)}")
    return _Cell(cell.unit, cell.contributions | to.contributions)
