"""Headers of the pages of a Parquet file, which say how much memory each takes once it is unpacked.

A reader makes room for a page by its header, whatever the footer says of its column. Headers are structs of Thrift's
compact protocol (parquet.thrift, PageHeader): field 2 is the unpacked size, field 3 the packed one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO, Any

_MOST_HEADER = 1 << 20  # bytes; statistics of long texts are in it
_MOST_PAGES = 1 << 20
_MOST_DEPTH = 16
_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(1, 13)
_WHOLE = (_I16, _I32, _I64)
_UNPACKED, _PACKED = 2, 3


def unpacked_bytes(file: IO[bytes], metadata: Any) -> int:
    """Bytes of all pages once they are unpacked. Raises ValueError for headers that cannot be read."""
    return sum(unpacked for start, end in _chunks(metadata) for unpacked in _pages(file, start, end))


def _chunks(metadata: Any) -> Iterator[tuple[int, int]]:
    """Yield where the pages of each column of each group of rows begin and end."""
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        for column in map(group.column, range(metadata.num_columns)):
            start = column.data_page_offset
            if column.has_dictionary_page and 0 < column.dictionary_page_offset < start:
                start = column.dictionary_page_offset
            yield start, start + column.total_compressed_size


def _pages(file: IO[bytes], start: int, end: int) -> Iterator[int]:
    """Yield the unpacked size of each page."""
    count = 0
    while start < end:
        file.seek(start)
        header = _Header(file.read(min(_MOST_HEADER, end - start)))
        sizes = header.whole_numbers()
        unpacked, packed, count = sizes.get(_UNPACKED, -1), sizes.get(_PACKED, -1), count + 1
        if min(unpacked, packed) < 0 or count > _MOST_PAGES:
            raise ValueError("a page has no size")
        yield unpacked
        start += header.at + packed


class _Header:
    """A struct of Thrift's compact protocol, read from the start of some bytes."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def whole_numbers(self, depth: int = 0) -> dict[int, int]:
        """The whole numbers of a struct by their fields; all else is passed over. Raises ValueError."""
        if depth > _MOST_DEPTH:
            raise ValueError("a page's header is nested too deep")
        field, numbers = 0, dict[int, int]()
        while kind := self._byte():
            field = field + (kind >> 4) if kind >> 4 else self._zigzag()
            if kind & 15 in _WHOLE:
                numbers[field] = self._zigzag()
            else:
                self._pass_over(kind & 15, depth + 1)
        return numbers

    def _byte(self) -> int:
        if self.at >= len(self.data):
            raise ValueError("a page's header was cut short")
        self.at += 1
        return self.data[self.at - 1]

    def _varint(self) -> int:
        value = shift = 0
        while shift < 70:
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7
        raise ValueError("a number of a page's header is too long")

    def _zigzag(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)

    def _pass_over(self, kind: int, depth: int) -> None:
        """Go past a value. Raises ValueError."""
        if kind in (_TRUE, _FALSE):
            return
        if kind == _STRUCT:
            self.whole_numbers(depth)
        elif kind in _WHOLE:
            self._varint()
        elif kind in (_BYTE, _DOUBLE, _BINARY):
            length = self._varint() if kind == _BINARY else 1 if kind == _BYTE else 8
            self.at += length
        elif kind in (_LIST, _SET):
            head = self._byte()
            for _ in range(head >> 4 if head >> 4 < 15 else self._varint()):
                self._element(head & 15, depth)
        else:
            raise ValueError(f"a page's header has a field of kind {kind}")

    def _element(self, kind: int, depth: int) -> None:
        """Go past an element of a list, of which a truth takes a byte."""
        if depth > _MOST_DEPTH:
            raise ValueError("a page's header is nested too deep")
        if kind in (_TRUE, _FALSE):
            self._byte()
        else:
            self._pass_over(kind, depth + 1)
