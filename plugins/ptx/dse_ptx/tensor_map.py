"""Tensors as bulk copies see them: what `cuTensorMapEncodeTiled` takes on a host, with its rules (CUDA driver API).

A map names a tensor of up to five dimensions, the innermost first, whose elements lie side by side along it, and the
box that one copy moves. NVIDIA does not publish the 128 bytes of a map; ours hold the same facts for our interpreter:

    words of 64 bits    0 mark, 1 address, 2 dimensions | element bytes << 8 | units of a swizzled row << 16,
                        3-7 sizes, 8-11 strides [bytes] from the second dimension on, 12-13 box, 16 bits each
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dse.errors import Problems
from dse_ptx.arguments import Pointer
from dse_ptx.bulk import AXES, MAGIC, UNIT

MOST_BOX = 256
"""Elements of a box along a dimension."""
SWIZZLES = (0, 32, 64, 128)
"""Bytes of a row whose units of 16 bytes are exchanged; 0: none."""
_SIZES = (1, 2, 4, 8)


@dataclass(frozen=True)
class TensorMap:
    """A tensor in global memory. sizes, box: elements, the innermost dimension first; strides: bytes from one element
    to the next of the other dimensions (without: no gaps). Raises ConfigError where a rule is broken.
    """

    pointer: Pointer
    element_bytes: int
    sizes: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 0
    strides: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check, axes = Problems(), len(self.sizes)
        if not 1 <= axes <= AXES or len(self.box) != axes or len(self.all_strides) != axes - 1:
            check.add("tensor map", f"has one to {AXES} dimensions, as many of its box, and a stride for each but one")
            check.done()
        if self.element_bytes not in _SIZES:
            check.add("tensor map", f"has elements of {_SIZES} bytes", value=self.element_bytes)
        if self.pointer.address % UNIT:
            check.add("tensor map", f"begins at a multiple of {UNIT} bytes", value=hex(self.pointer.address))
        if any(not 1 <= size <= 1 << 32 for size in self.sizes):
            check.add("tensor map", "has 1 to 2^32 elements along a dimension", value=self.sizes)
        if any(not 1 <= length <= MOST_BOX for length in self.box):
            check.add("tensor map", f"has a box of 1 to {MOST_BOX} elements along a dimension", value=self.box)
        if any(stride % UNIT or not 0 < stride < 1 << 40 for stride in self.all_strides):
            check.add("tensor map", f"has strides of a multiple of {UNIT} bytes, below 2^40", value=self.all_strides)
        inner = self.box[0] * self.element_bytes
        if inner % UNIT:
            check.add("tensor map", f"has a box whose rows are multiples of {UNIT} bytes", value=inner)
        if self.swizzle not in SWIZZLES:
            check.add("tensor map", f"has a swizzle of {SWIZZLES} bytes", value=self.swizzle)
        elif self.swizzle and inner > self.swizzle:
            rule = f"has a box whose rows are at most the {self.swizzle} bytes of its swizzle"
            check.add("tensor map", rule, value=inner)
        check.done()

    @property
    def all_strides(self) -> tuple[int, ...]:
        """Strides, those of a tensor without gaps where none are given [bytes]."""
        of_dense = (math.prod(self.sizes[: axis + 1]) * self.element_bytes for axis in range(len(self.sizes) - 1))
        return self.strides or tuple(of_dense)

    @property
    def box_bytes(self) -> int:
        """Bytes that a copy of the box counts at its mbarrier."""
        return math.prod(self.box) * self.element_bytes

    def encode(self) -> NDArray[np.uint8]:
        """The 128 bytes of the map, as a kernel takes them."""
        words = np.zeros(16, np.uint64)
        units = max(self.swizzle // UNIT, 1)
        words[:3] = MAGIC, self.pointer.address, len(self.sizes) | self.element_bytes << 8 | units << 16
        words[3 : 3 + len(self.sizes)] = self.sizes
        words[8 : 8 + len(self.all_strides)] = self.all_strides
        for axis, length in enumerate(self.box):
            words[12 + axis // 4] |= np.uint64(length << 16 * (axis % 4))
        return words.view(np.uint8)


def matrix_map(pointer: Pointer, values: NDArray[np.generic], box: Sequence[int], swizzle: int = 0) -> TensorMap:
    """Map of a matrix [rows, columns] by rows; box: rows and columns that a copy moves."""
    rows, columns = values.shape
    return TensorMap(pointer, values.itemsize, (columns, rows), (box[1], box[0]), swizzle)
