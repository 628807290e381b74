"""Buffers of MSCCL as slots of chunks: which slot a GPU's cell is, as steps copy, receive and add.

A cell with a GPU's own contribution alone needs no slot: that is in its input, and a `raw` message sends it. Other
cells with equal content share a slot until one is written: a slot changes in place only where no other cell and no
message on its way needs what it has. Slot 0 begins as the own contribution, and grows only.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from dse_collectives.explicit import Collective

Unit = tuple[int, int, int]
"""Block, part (-1 but in an all-to-all), and place in it."""
Key = tuple[int, str, int]
"""GPU, buffer and offset, of what aliases the same memory alike."""
_OWN = -1
_REDUCING = ("all_reduce", "reduce_scatter")


@dataclass(frozen=True, slots=True)
class Cell:
    """The content of a unit of a buffer. slot: -1 for a GPU's own contribution. copied: to scratch, by a local copy."""

    unit: Unit
    contributions: frozenset[int]
    slot: int
    copied: bool = False


@dataclass
class Flight:
    """Units on their way from a GPU. number: joins steps, or is -1."""

    source: int
    cells: list[Cell]
    number: int

    def part(self, places: Iterable[int]) -> Flight:
        """The units in some places."""
        return Flight(self.source, [self.cells[place] for place in places], self.number)


@dataclass
class Moved:
    """A message in units, before chunks are known. number: joins steps, or is -1."""

    source: int
    target: int
    units: list[Unit]
    reduces: bool = False
    raw: bool = False
    source_slot: int = 0
    target_slot: int = 0
    number: int = -1

    def joins(self, other: Moved) -> bool:
        """Return whether another one is of the same message."""
        return self.number >= 0 and replace(self, units=[]) == replace(other, units=[])


@dataclass
class Buffers:
    """Cells of all buffers, what the slots of units hold, and the messages that fill them."""

    collective: Collective
    num_gpus: int
    units: int
    in_place: bool
    moved: list[Moved] = field(default_factory=list)
    _cells: dict[Key, Cell] = field(default_factory=dict)
    _slots: dict[tuple[int, Unit], list[frozenset[int]]] = field(default_factory=dict)
    _uses: Counter[tuple[int, Unit, int]] = field(default_factory=Counter)
    _of_gpus: list[frozenset[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._of_gpus = [frozenset([gpu]) for gpu in range(self.num_gpus)]

    def key(self, gpu: int, buffer: str, at: int) -> Key:
        """Key of a cell: in place, an all-gather's input and a reduce-scatter's output are parts."""
        if not self.in_place or buffer == "s":
            return gpu, buffer, at
        if self.collective == "all_gather":
            # the input of an all-gather is the GPU's own block of the output
            return gpu, "o", at + (gpu * self.units if buffer == "i" else 0)
        return gpu, "i", at + (gpu * self.units if buffer == "o" and self.collective == "reduce_scatter" else 0)

    def cell(self, key: Key) -> Cell | None:
        """The content of a cell; None: nothing has filled it."""
        # inputs are made when they are looked at: few of them are written
        return self._cells.get(key) or self._at_start(*key)

    def _at_start(self, gpu: int, buffer: str, at: int) -> Cell | None:
        gathers = self.collective == "all_gather"
        if buffer != ("o" if gathers and self.in_place else "i"):
            return None
        place = at - gpu * self.units if gathers and self.in_place else at
        if not 0 <= place < self.units * (1 if gathers else self.num_gpus):
            return None
        block, inside = divmod(place, self.units)
        unit = (gpu, -1, place) if gathers else (block, -1, inside)
        unit = (gpu, block, inside) if self.collective == "all_to_all" else unit
        return Cell(unit, self._of_gpus[gpu], _OWN if self.collective in _REDUCING else 0)

    def _contents(self, gpu: int, unit: Unit) -> list[frozenset[int]]:
        """Contributions in each slot of a unit."""
        if (gpu, unit) not in self._slots:
            begins = self.collective in _REDUCING or unit[0] == gpu
            self._slots[gpu, unit] = [self._of_gpus[gpu] if begins else frozenset()]
        return self._slots[gpu, unit]

    def take(self, gpu: int, cells: Iterable[Cell]) -> None:
        """Keep the slots of cells as they are, as a message with them is on its way."""
        self._uses.update((gpu, cell.unit, cell.slot) for cell in cells)

    def release(self, gpu: int, cells: Iterable[Cell]) -> None:
        """Let the slots of cells change again."""
        self._uses.subtract((gpu, cell.unit, cell.slot) for cell in cells)

    def _write(self, key: Key, cell: Cell) -> None:
        if (before := self.cell(key)) is not None:
            # a cell that was never written had not been counted
            self._uses[key[0], before.unit, before.slot] -= key in self._cells
        self._uses[key[0], cell.unit, cell.slot] += 1
        self._cells[key] = cell

    def copy(self, gpu: int, sources: Sequence[Cell], targets: Sequence[Key]) -> None:
        """Copy cells on a GPU, which share their slots from now on."""
        for cell, key in zip(sources, targets, strict=True):
            self._write(key, replace(cell, copied=key[1] == "s"))

    def receive(self, gpu: int, flight: Flight, targets: Sequence[Key]) -> None:
        """Fill cells with units of another GPU."""
        # one message fills one slot: units whose slots differ get a new one
        slots = {self._free_slot(gpu, cell, key) for cell, key in zip(flight.cells, targets, strict=True)}
        slot = slots.pop() if len(slots) == 1 else None
        slot = self._fresh_slot(gpu, flight.cells) if slot is None else slot
        self._put_all(gpu, self._send(gpu, flight, slot), targets)

    def receive_sum(self, gpu: int, flight: Flight, to: tuple[Sequence[Key], Sequence[Key]]) -> None:
        """Add units of another GPU to cells. to: cells that are added to, and those that get the sums."""
        bases = [self._filled(key) for key in to[0]]
        slots = {self._sum_slot(gpu, base, *ends) for base, *ends in zip(bases, *to, strict=True)}
        # the sum is made in place, by the message itself
        if len(slots) == 1 and (slot := slots.pop()) is not None:
            cells = self._send(gpu, flight, slot, reduces=True)
            self._put_all(gpu, [_sum(cell, base, slot) for cell, base in zip(cells, bases, strict=True)], to[1])
            return
        cells = self._send(gpu, flight, self._fresh_slot(gpu, flight.cells))
        for cell in cells:
            self._put(gpu, cell)
        self.add(gpu, cells, to)

    def add(self, gpu: int, cells: Sequence[Cell], to: tuple[Sequence[Key], Sequence[Key]]) -> None:
        """Add cells of a GPU to cells of it. to: cells that are added to, and those that get the sums."""
        bases = [self._filled(key) for key in to[0]]
        slots = [self._sum_slot(gpu, base, *ends) for base, *ends in zip(bases, *to, strict=True)]
        if None in slots:  # what is added to stays as it is: the sum begins as a copy of it
            fresh = self._fresh_slot(gpu, cells)
            copied = [base for base, slot in zip(bases, slots, strict=True) if slot is None]
            self._gather(gpu, copied, fresh)
            slots = [fresh if slot is None else slot for slot in slots]
        groups = defaultdict[tuple[tuple[bool, int], int], list[Unit]](list)
        for cell, slot in zip(cells, slots, strict=True):
            assert slot is not None
            groups[self._end(gpu, cell), slot].append(cell.unit)
        for ((raw, slot), target), units in groups.items():
            self._note(Moved(gpu, gpu, units, True, raw, slot, target))
        sums = [_sum(cell, base, slot or 0) for cell, base, slot in zip(cells, bases, slots, strict=True)]
        self._put_all(gpu, sums, to[1])

    def finish(self, gpu: int, cells: Iterable[Cell]) -> None:
        """Copy what a GPU wants to the first slots of its units, where that is in others."""
        groups = defaultdict[int, list[Unit]](list)
        for cell in cells:
            # a proper subset: the first slot lacks contributions
            if self._contents(gpu, cell.unit)[0] < cell.contributions:
                groups[cell.slot].append(cell.unit)
        for slot, units in groups.items():
            self._note(Moved(gpu, gpu, units, source_slot=slot))

    def _put_all(self, gpu: int, cells: Sequence[Cell], targets: Sequence[Key]) -> None:
        for cell, key in zip(cells, targets, strict=True):
            self._put(gpu, cell)
            self._write(key, cell)

    def _filled(self, key: Key) -> Cell:
        cell = self.cell(key)
        assert cell is not None  # as the run has read it
        return cell

    def _free_slot(self, gpu: int, cell: Cell, key: Key) -> int | None:
        """The slot that a received unit may fill, in which nothing is lost; None: a new one."""
        first, before = self._contents(gpu, cell.unit)[0], self.cell(key)
        is_own = self.collective in _REDUCING and first == self._of_gpus[gpu]
        other = before is None or (before.unit, before.slot) != (cell.unit, 0)
        if first < cell.contributions and (is_own or self._uses[gpu, cell.unit, 0] <= 1 - other):
            return 0
        if before is not None and before.unit == cell.unit and before.slot > 0:
            return before.slot if self._uses[gpu, cell.unit, before.slot] == 1 else None
        return None

    def _sum_slot(self, gpu: int, base: Cell, at: Key, to: Key) -> int | None:
        """The slot of a cell that is added to, where it may change in place; None where it has to stay."""
        if base.slot == _OWN:
            # slot 0 is the own contribution until something is added
            return 0 if self._contents(gpu, base.unit)[0] == base.contributions else None
        return base.slot if at == to and self._uses[gpu, base.unit, base.slot] == 1 else None

    def _fresh_slot(self, gpu: int, cells: Iterable[Cell]) -> int:
        # a number that none of the units uses yet
        return max(len(self._contents(gpu, cell.unit)) for cell in cells)

    def _put(self, gpu: int, cell: Cell) -> None:
        slots = self._contents(gpu, cell.unit)
        slots += [frozenset()] * (cell.slot + 1 - len(slots))
        slots[cell.slot] = cell.contributions

    def _end(self, gpu: int, cell: Cell) -> tuple[bool, int]:
        """Return whether a cell is sent raw, and the slot that it is."""
        if cell.slot == _OWN:
            return cell.copied or self._contents(gpu, cell.unit)[0] != cell.contributions, 0
        return False, cell.slot

    def _send(self, gpu: int, flight: Flight, slot: int, *, reduces: bool = False) -> list[Cell]:
        """Note a message to a slot, and before it what brings units from several slots of the sender into one.

        Its cells, as the slot has them.
        """
        source, cells = flight.source, flight.cells
        ends = {self._end(source, cell) for cell in cells}
        if all(cell.slot == _OWN for cell in cells):
            # raw if one of them has to be
            ends = {max(ends)}
        if len(ends) == 1:
            raw, of = ends.pop()
        else:
            raw, of = False, self._fresh_slot(source, cells)
            self._gather(source, cells, of)
        self._note(Moved(source, gpu, [cell.unit for cell in cells], reduces, raw, of, slot, flight.number))
        return [Cell(cell.unit, cell.contributions, slot) for cell in cells]

    def _gather(self, gpu: int, cells: Sequence[Cell], slot: int) -> None:
        """Copy cells into a new slot of their units."""
        groups = defaultdict[tuple[bool, int], list[Cell]](list)
        for cell in cells:
            groups[self._end(gpu, cell)].append(cell)
        for (raw, of), group in groups.items():
            self._note(Moved(gpu, gpu, [cell.unit for cell in group], False, raw, of, slot))
        for cell in cells:
            self._put(gpu, replace(cell, slot=slot))

    def _note(self, moved: Moved) -> None:
        """Note a message; steps with its number are one."""
        if self.moved and self.moved[-1].joins(moved):
            self.moved[-1].units += moved.units
        else:
            self.moved.append(moved)


def _sum(cell: Cell, base: Cell, slot: int) -> Cell:
    return Cell(cell.unit, cell.contributions | base.contributions, slot)
