"""Products C = A B of matrices by warpgroups, fed by bulk copies through a ring of stages (PTX ISA, section 9.7.15).

The first warpgroup of a block produces: one thread waits until a stage is free, and copies boxes of A and B to it. The
others consume: each multiplies 64 rows, a product of 64 x N x 16 after another, and frees the stage before the one that
it multiplies. In a cluster each block copies a share of what several of them need, to all of those.

    shared memory    stages of A [rows x 64] and B [columns x 64], by boxes; then mbarriers: full, empty of each stage
    full             one arrival, which expects the bytes of the stage
    empty            one arrival of each consuming warp of each block to which this block copies
"""

from __future__ import annotations

from dataclasses import dataclass

DEPTH, STEP, GROUP = 16, 64, 128
"""Elements of k of a product and of a stage, and threads of a warpgroup."""
_HALF = 2
"""Bytes of an element of A and B."""


@dataclass(frozen=True)
class ProductKernel:
    """A kernel of C [m, n] = A [m, k] B: the tile of a block, and how it comes about.

    kind: f16 or bf16, of A and B; result: the same, or f32, of C, which is by rows. consumers: warpgroups of 64 rows
    each. columns: of the tile. swizzle: bytes of a row of a box (128, 64, 32; 0: none). cluster: blocks along m and n
    that share boxes. turned: B is [k, n] by rows, else [n, k]. from_registers: A comes from registers. after: what
    follows the product (`relu` or `gelu` of the sum with a bias for each column). parts: of k, added up within clusters
    of so many blocks. persistent: each block computes tile after tile.
    """

    kind: str = "f16"
    consumers: int = 2
    columns: int = 128
    stages: int = 4
    swizzle: int = 128
    cluster: tuple[int, int] = (1, 1)
    turned: bool = False
    from_registers: bool = False
    after: str = ""
    parts: int = 1
    persistent: bool = False
    result: str = ""

    @property
    def rows(self) -> int:
        """Rows of the tile."""
        return 64 * self.consumers

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return GROUP * (1 + self.consumers)

    @property
    def pitch(self) -> int:
        """Bytes of a row of a box."""
        return self.swizzle or 16

    @property
    def a_bytes(self) -> int:
        """Bytes of A in a stage."""
        return self.rows * STEP * _HALF

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage."""
        return self.a_bytes + self.columns * STEP * _HALF

    @property
    def barriers_at(self) -> int:
        """Address of the first mbarrier, after the stages and what takes their place at the end."""
        return max(self.stages * self.stage_bytes, self.rows * self.columns * 4 if self.parts > 1 else 0)

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory of a block."""
        return self.barriers_at + 16 * self.stages

    @property
    def blocks_of_cluster(self) -> tuple[int, ...]:
        """Blocks of a cluster, or none."""
        shape = (*self.cluster, self.parts)
        return shape if max(shape) > 1 else ()

    @property
    def a_box(self) -> tuple[int, int]:
        """Rows and columns of a box of A: a share of the rows for each block along n."""
        return self.rows // self.cluster[1], self.pitch // _HALF

    @property
    def b_box(self) -> tuple[int, int]:
        """Rows and columns of a box of B: a share for each block along m."""
        return (STEP, 64) if self.turned else (self.columns // self.cluster[0], self.pitch // _HALF)
