"""Memory traces of one's own, as `Simulation.replay` takes them.

A table (.parquet, .csv, .csv.gz) has a row for each request of a CU, in the order in which the CU makes them:

    address   byte address; text may be hexadecimal with 0x
    cu        which CU asks; 0 where the column is not there
    store     0 or 1, true or false; 0
    bytes     touched from the address on; the line that holds the address
    pc        the instruction, any integer; 0. Of at most 256 loads and stores where a policy predicts by it
    time_ns   before which it is not made; 0

A kernel of Accel-Sim (.traceg, plain, .xz or .gz), or a `kernelslist.g`, is the other format: thread blocks are dealt
to CUs in turn (`dse_memory_traces.accelsim`).

A recording is read once, chunk by chunk, into a file that has no name, and laid out by CU in another that is mapped
into memory: what is held does not grow with the trace, and one replay makes all of it, so that chunks change nothing.
"""

from __future__ import annotations

import csv
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from dse.errors import ConfigError, Problem, Problems, did_you_mean
from dse.files import check_columns, open_plain_file
from dse_memory.engine import PCS
from dse_memory.policy import Policy
from dse_memory.simulation import SimulatedCost, Simulation
from dse_memory_traces import accelsim
from simulators.hardware.memory_system import MemorySystem

Ints = NDArray[np.int64]
Cells = tuple[NDArray[Any], NDArray[np.bool_]]
"""Of a column: values [N], and which are missing [N]."""

COLUMNS = ("address", "cu", "store", "bytes", "pc", "time_ns")
ADDRESS, CU, STORE, BYTES, PC, TIME = range(6)
"""Columns of `RequestRecording.rows`."""
_CHUNK = 1 << 16  # rows read, sorted or written at once: a few MB
# beyond any address, access and time that could be meant, so that sums fit 64 bits
_MOST_ADDRESS, _MOST_BYTES, _MOST_NS = accelsim.MOST_ADDRESS, 1 << 20, 10**15
# moved by whole GiB: sets, banks and channels of an address stay as they are
_KEPT_BITS = 30  # of addresses that are moved down
_WORDS = {"false": 0, "true": 1}  # booleans as CSV writers put them


@dataclass(frozen=True)
class RequestRecording:
    """rows [R, 6]: a request each, in the order of the file; pc is the number of its instruction.

    parts: names and ends of what is replayed at once. base: what was taken from addresses. stores [I]: of each
    instruction, whether it stores. skipped: accesses that are no requests to global memory, by opcode.
    """

    rows: Ints
    parts: tuple[tuple[str, int], ...]
    base: int
    stores: NDArray[np.bool_]
    skipped: Mapping[str, int]


def read(
    path: Path, system: MemorySystem, policy: Policy, *, at_once: int = 0, folder: Path | None = None
) -> RequestRecording:
    """Read a trace for a system. at_once: rows of a replay (0: all). folder: where the nameless file is put.

    Raises ConfigError with what is wrong, of data at most 20 problems.
    """
    kind = _kind(path)
    check = Problems()
    with tempfile.TemporaryFile(dir=folder) as file:
        spool = _Spool(file)  # to a file: traces need not fit into memory
        if kind == "accelsim":
            _spool_kernels(spool, path, system, check)
        else:
            _spool_table(spool, path, system.gpu.num_cus, check)
        check.done()  # all problems of the data at once
        return spool.finish(path.name, system, policy, at_once)


def replay_recording(
    recording: RequestRecording, machine: Simulation, folder: Path | None = None
) -> list[SimulatedCost]:
    """Replay a recording on a machine, part by part; L1s are empty, and no line of L2 is dirty, where a part begins.

    Raises OverflowError where a part takes longer than the engine's clock can tell.
    """
    # before the first part, so that counters go on from part to part
    machine.introduce(enumerate(recording.stores.tolist()))
    first, began, costs = 0, machine.now, []
    for name, end in recording.parts:
        part = recording.rows[first:end]
        with tempfile.TemporaryFile(dir=folder) as file:
            room = (
                np.memmap(file, np.int64, "w+", shape=(len(part), 5)).view(np.ndarray)
                if len(part)
                else np.zeros((0, 5), np.int64)
            )
            # times of a recording go on over parts, while the machine's clock says what has passed
            begins = _laid_out(part, room, machine.system.gpu.num_cus, machine.now - began)
            costs.append(machine.replay(name, room, begins))
            del room  # the mapping must go before its file is closed
        first = end
    return costs


def _laid_out(rows: Ints, room: Ints, cus: int, elapsed: float) -> Ints:
    """Write rows [R, 6] by CU, as the engine takes them, into room [R, 5]; return where CUs begin [CUs + 1]."""
    chunks = range(0, len(rows), _CHUNK)
    # chunk by chunk: the rows are mapped, not read
    counts = sum(
        (np.bincount(rows[begin : begin + _CHUNK, CU], minlength=cus) for begin in chunks), np.zeros(cus, np.int64)
    )
    begins = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    after = begins[:-1].copy()
    for begin in chunks:
        chunk = rows[begin : begin + _CHUNK]
        chunk = chunk[np.argsort(chunk[:, CU], kind="stable")]  # requests of a CU keep their order
        counts_of_cus = np.bincount(chunk[:, CU], minlength=cus)
        rank = np.arange(len(chunk)) - np.repeat(np.cumsum(counts_of_cus) - counts_of_cus, counts_of_cus)
        place = after[chunk[:, CU]] + rank
        room[place] = chunk[:, (ADDRESS, BYTES, PC, STORE, TIME)]
        room[place, 4] = np.maximum(chunk[:, TIME] - int(elapsed), 0)  # late already: at once
        after += counts_of_cus
    return begins


@dataclass
class _Spool:
    """Rows that are read, in a file without a name."""

    file: IO[bytes]
    ends: list[tuple[str, int]] = field(default_factory=list)
    count: int = 0
    least: Ints = field(default_factory=lambda: np.full(6, _MOST_ADDRESS, np.int64))  # so that any row is less
    most: Ints = field(default_factory=lambda: np.zeros(6, np.int64))
    numbers: dict[tuple[str, int, int], int] = field(default_factory=dict)
    crowded: bool = False
    skipped: Counter[str] = field(default_factory=Counter)

    def add(self, rows: Ints, kernel: str = "") -> None:
        """Take rows [N, 6]; instructions of a kernel are its own."""
        if not len(rows):
            return
        pcs, which = np.unique(rows[:, PC], return_inverse=True)  # few instructions in many rows: numbered once each
        keys = np.unique(2 * which + rows[:, STORE])  # a load and a store of one pc are two instructions
        table = np.zeros(2 * len(pcs), np.int64)
        for key in keys.tolist():
            table[key] = self._number((kernel, int(pcs[key // 2]), key % 2))
        rows[:, PC] = table[2 * which + rows[:, STORE]]
        self.least, self.most = np.minimum(self.least, rows.min(0)), np.maximum(self.most, rows.max(0))
        rows.tofile(self.file)
        self.count += len(rows)

    def _number(self, key: tuple[str, int, int]) -> int:
        if key not in self.numbers and len(self.numbers) >= PCS:  # a problem only where a predictor asks for counters
            self.crowded = True
            return 0
        return self.numbers.setdefault(key, len(self.numbers))

    def finish(self, name: str, system: MemorySystem, policy: Policy, at_once: int) -> RequestRecording:
        """The recording. Raises ConfigError where addresses or instructions are too many."""
        check = Problems()
        if not self.count:
            check.add(name, "holds no requests")
        if self.crowded and policy.predictor is not None:
            way = "number them modulo 256, or take a policy without a predictor, such as policy=cache_rw_ab_cr"
            check.add(
                name,
                f"has more than {PCS} loads and stores; policy.predictor distinguishes no more",
                way_out=way,
            )
        span = reach(system)
        # addresses that fit stay as they are
        base = 0 if self.most[ADDRESS] + _MOST_BYTES < span else int(self.least[ADDRESS]) >> _KEPT_BITS << _KEPT_BITS
        if self.count and self.most[ADDRESS] + _MOST_BYTES - base >= span:
            text = f"addresses from {self.least[ADDRESS]:#x} to {self.most[ADDRESS]:#x} span more than {span >> 30} GiB"
            check.add(name, text, way_out="that is what 32 bits of a tag hold; move regions closer to one another")
        check.done()
        self.file.flush()
        # in place: addresses and times are shifted without reading all
        rows = np.memmap(self.file, np.int64, "r+", shape=(self.count, 6))
        for begin in range(0, self.count, _CHUNK):
            rows[begin : begin + _CHUNK, ADDRESS] -= base
            rows[begin : begin + _CHUNK, TIME] -= self.least[TIME]
        stores = np.array([store for _, _, store in self.numbers], bool)
        return RequestRecording(
            rows.view(np.ndarray), tuple(_split_parts(self.ends, at_once)), base, stores, dict(self.skipped)
        )


def reach(system: MemorySystem) -> int:
    """Bytes of addresses that tags of 31 bits tell apart in L1, L2 and rows of DRAM."""
    dram = system.gpu.dram
    rows = dram.row_bytes // system.gpu.line_bytes * dram.banks * dram.channels
    sets = min(int(system.l1_sets), int(system.l2_sets) * dram.channels, rows)
    return system.gpu.line_bytes * sets << 31


def _split_parts(ends: Sequence[tuple[str, int]], at_once: int) -> Iterator[tuple[str, int]]:
    """Parts of at most so many rows."""
    first = 0
    for name, end in ends:
        inner = range(first + at_once, end, at_once) if at_once else ()  # whole kernels, unless parts are asked for
        yield from ((name, inner_end) for inner_end in inner)
        yield name, end
        first = end


def _kind(path: Path) -> str:
    name = path.name
    if name.startswith("kernelslist") or name.removesuffix(".xz").removesuffix(".gz").endswith(".traceg"):
        return "accelsim"
    for kind, ends in {"parquet": (".parquet",), "csv": (".csv", ".csv.gz", ".csv.xz")}.items():
        if name.endswith(ends):
            return kind
    way = "name a .parquet, .csv, .traceg (or .gz, .xz of these texts), or a kernelslist.g"
    raise ConfigError([Problem("data", "is of no format that is known by its name", str(path), way)])


def _spool_kernels(spool: _Spool, path: Path, system: MemorySystem, check: Problems) -> None:
    """Thread blocks of Accel-Sim, the n-th on CU n modulo CUs."""
    for file in accelsim.files(path):
        kernel = accelsim.TracedKernel(file, system.gpu.line_bytes, check)
        for number, block in enumerate(kernel.blocks()):
            rows = np.zeros((len(block), 6), np.int64)
            rows[:, (ADDRESS, PC, STORE)] = block  # the columns that a trace has
            # blocks go to CUs in turn, as they would be dispatched
            rows[:, BYTES], rows[:, CU] = system.gpu.line_bytes, number % system.gpu.num_cus
            spool.add(rows, kernel.name)
        spool.ends.append((kernel.name, spool.count))
        spool.skipped += kernel.skipped


def _spool_table(spool: _Spool, path: Path, cus: int, check: Problems) -> None:
    for lines, columns in (_parquet if _kind(path) == "parquet" else _csv)(path, check):
        spool.add(_rows(lines, columns, cus, check))
    spool.ends.append((path.name.partition(".")[0], spool.count))


def _rows(lines: Sequence[str], columns: Mapping[str, Cells], cus: int, check: Problems) -> Ints:
    """Rows [N, 6] of a chunk; cells that are wrong are noted and 0."""
    rows = np.zeros((len(lines), len(COLUMNS)), np.int64)
    rows[:, BYTES] = 1  # the line that holds the address
    for name, (values, missing) in columns.items():
        numbers, right = _times(values) if name == "time_ns" else _integers(values, _WORDS if name == "store" else {})
        low, high = _range(name, cus)
        right &= (numbers >= low) & (numbers <= high) & ~missing
        # a legal number in place of a wrong one, so that checks of other columns go on
        rows[:, COLUMNS.index(name)] = np.where(right, numbers, low)
        for place in np.flatnonzero(~right)[: accelsim.MOST_TOLD]:  # a few examples say as much as all
            rule, value = ("is missing", None) if missing[place] else (_rule(name, cus), _plain(values[place]))
            _note(check, f"{lines[place]}, {name}", rule, value=value, way_out=_way_out(name, value))
    return rows


def _note(check: Problems, where: str, rule: str, *, value: object = None, way_out: str = "") -> None:
    """Note a problem; raise all once they are many."""
    check.add(where, rule, value=value, way_out=way_out)
    if len(check.found) >= accelsim.MOST_TOLD:
        check.done()


def _range(name: str, cus: int) -> tuple[int, int]:
    return {
        "address": (0, _MOST_ADDRESS), "cu": (0, cus - 1), "store": (0, 1), "bytes": (1, _MOST_BYTES),
        "pc": (-_MOST_ADDRESS, _MOST_ADDRESS), "time_ns": (0, _MOST_NS),
    }[name]  # fmt: skip


def _rule(name: str, cus: int) -> str:
    return {
        "address": "must be an integer from 0 to 2^62", "store": "must be 0 or 1, false or true",
        "cu": f"must be an integer below system.gpu.num_cus = {cus}", "pc": "must be an integer",
        "bytes": f"must be an integer from 1 to {_MOST_BYTES}", "time_ns": "must be a number from 0 to 1e15",
    }[name]  # fmt: skip


def _way_out(name: str, value: object) -> str:
    if name == "cu":
        return "take a system that has it, system.gpu.num_cus=<n>, or number CUs modulo these"
    looks_hexadecimal = isinstance(value, str) and value and not set(value.lower()) - set("0123456789abcdef")
    return "write hexadecimal numbers with 0x" if name in ("address", "pc") and looks_hexadecimal else ""


def _plain(value: Any) -> object:
    return value.item() if isinstance(value, np.generic) else value


def _integers(values: NDArray[Any], words: Mapping[str, int]) -> tuple[Ints, NDArray[np.bool_]]:
    """(whole numbers [N], marks [N] of the values that are such)."""
    # by type of NumPy: booleans, integers, unsigned, floats; else texts
    kind = values.dtype.kind
    if kind in "bi":
        return values.astype(np.int64), np.ones(len(values), bool)
    if kind in "uf":
        # beyond, floats skip integers
        right = values <= 2**62 if kind == "u" else (np.abs(values) <= 2**53) & (np.floor(values) == values)
        return np.where(right, values, 0).astype(np.int64), right
    with suppress(ValueError, OverflowError):  # fast for columns of decimal texts
        return values.astype(np.int64), np.ones(len(values), bool)
    # one by one: hexadecimal, words, or wrong
    integers = [_integer(str(value).strip().lower(), words) for value in values.tolist()]
    return np.array([integer or 0 for integer in integers], np.int64), np.array(
        [integer is not None for integer in integers]
    )


def _integer(text: str, words: Mapping[str, int]) -> int | None:
    with suppress(ValueError):
        number = int(text, 16 if text.startswith("0x") else 10)  # 0x or decimal; a leading zero is no octal
        return number if abs(number) <= 2**62 else None
    return words.get(text)


def _times(values: NDArray[Any]) -> tuple[Ints, NDArray[np.bool_]]:
    """(whole ns [N], rounded down; marks [N] of the values that are such times)."""
    try:
        times = values.astype(np.float64)
    except ValueError:
        times = np.array([_number(str(value)) for value in values.tolist()])
    right = (times >= 0) & (times <= _MOST_NS)
    return np.where(right, times, 0).astype(np.int64), right


def _number(text: str) -> float:
    with suppress(ValueError):
        return float(text)
    return float("nan")  # fails each range, and is reported


def _check_names(names: Sequence[str], where: str) -> None:
    """Refuse columns that are unknown, absent or named twice. Raises ConfigError."""
    check = Problems()
    for name in dict.fromkeys(names):
        if name not in COLUMNS:
            check.add(where, "is no column of a trace", value=name, way_out=did_you_mean(name, COLUMNS))
    check_columns(check, names, ("address",), where)
    check.done()


Chunk = tuple[Sequence[str], Mapping[str, Cells]]


def _csv(path: Path, check: Problems) -> Iterator[Chunk]:
    """Chunks of a CSV; blank lines are passed over. Raises ConfigError."""
    with accelsim.open_text(path) as text:
        reader = csv.reader(text, strict=True)
        try:
            names = [name.strip() for name in next(reader, [])]
            _check_names(names, f"{path.name}, line 1")
            # blank lines, also at the end
            lines = ((reader.line_num, cells) for cells in reader if any(map(str.strip, cells)))
            while chunk := list(islice(lines, _CHUNK)):
                for line, cells in chunk:
                    if len(cells) != len(names):
                        _note(check, f"{path.name}, line {line}", f"has {len(cells)} cells, not {len(names)}")
                # rows of another length are reported, and left out
                complete = [(line, cells) for line, cells in chunk if len(cells) == len(names)]
                columns = [np.array(column) for column in zip(*(cells for _, cells in complete), strict=True)]
                # an empty cell is a missing value
                cells_by_name = {name: (column, column == "") for name, column in zip(names, columns, strict=False)}
                yield [f"{path.name}, line {line}" for line, _ in complete], cells_by_name
        except csv.Error as error:
            raise ConfigError([Problem(f"{path.name}, line {reader.line_num}", f"is no CSV: {error}")]) from None


class _RowNames(Sequence[str]):
    """`<file>, row <n>` for rows from `first`, made when asked for."""

    def __init__(self, name: str, first: int, count: int) -> None:
        self._name, self._first, self._count = name, first, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, place: Any) -> Any:
        # names of millions of rows are not made: only those with problems are asked for
        return f"{self._name}, row {self._first + place}"


def _parquet(path: Path, check: Problems) -> Iterator[Chunk]:
    """Record batches of a Parquet file. Raises ConfigError."""
    import pyarrow.parquet as pq

    try:
        with open_plain_file(path, "data", most=accelsim.MOST_BYTES) as binary, pq.ParquetFile(binary) as file:
            _check_names(file.schema_arrow.names, path.name)
            first = 1
            for batch in file.iter_batches(batch_size=_CHUNK):  # a table may be larger than memory
                cells_by_name = {
                    name: _cells(batch.column(name), f"{path.name}, {name}") for name in batch.schema.names
                }
                yield _RowNames(path.name, first, batch.num_rows), cells_by_name
                first += batch.num_rows
    except ConfigError:
        raise
    except Exception as error:  # its parts raise types without a common base
        first_line = (str(error).splitlines() or ["damaged"])[0]
        raise ConfigError([Problem(path.name, f"is no Parquet that can be read: {first_line}")]) from None


def _cells(column: Any, where: str) -> Cells:
    """Values of a column of Arrow. Raises ConfigError for what are neither numbers, booleans nor texts."""
    import pyarrow as pa
    import pyarrow.types as kinds

    if kinds.is_dictionary(column.type):  # texts as categories
        column = column.dictionary_decode()
    missing: NDArray[np.bool_] = column.is_null().to_numpy(zero_copy_only=False)
    if kinds.is_null(column.type):  # no value at all in this chunk
        return np.zeros(len(column), np.int64), missing
    accepted = (kinds.is_integer, kinds.is_floating, kinds.is_boolean, kinds.is_string, kinds.is_large_string)
    if not any(is_kind(column.type) for is_kind in accepted):
        raise ConfigError([Problem(where, f"holds {column.type}", way_out="write integers")])
    # missing cells are marked; any value of the type will do
    fill = pa.scalar("" if kinds.is_string(column.type) or kinds.is_large_string(column.type) else 0).cast(column.type)
    return column.fill_null(fill).to_numpy(zero_copy_only=False), missing
