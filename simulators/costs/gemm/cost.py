"""A GEMM's shape and what it costs, whichever model computes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class GemmShape:
    """`batch` products C[m, n] = op(A)[m, k] B[k, n] at once, column-major; numbers or arrays that broadcast.

    transposed_a: A is read across its stride (`fitted` alone tells layouts apart). accumulate: C is added to, so read
    and written. weight_sets: operands A that the caller takes in turn; no end of them in a model's step.
    """

    m: ArrayLike
    n: ArrayLike
    k: ArrayLike
    batch: ArrayLike = 1.0
    transposed_a: ArrayLike = False
    accumulate: bool = False
    weight_sets: ArrayLike = np.inf

    @classmethod
    def row_major(cls, m: ArrayLike, n: ArrayLike, k: ArrayLike, *, accumulate: bool = False) -> GemmShape:
        """C[m, n] = A[m, k] B[k, n] as frameworks store tensors, with B transposed as weights are: m tokens, n outputs.

        In the column-major terms of BLAS these are n rows, m columns, and a transposed first operand.
        """
        return cls(n, m, k, transposed_a=True, accumulate=accumulate)  # the transpose of the product: C^T = B^T A^T

    @property
    def sizes(self) -> tuple[Floats, Floats, Floats, Floats]:
        """Sizes (m, n, k, batch) as arrays."""
        m, n, k, batch = (np.asarray(size, float) for size in (self.m, self.n, self.k, self.batch))
        return m, n, k, batch

    @property
    def flop(self) -> Floats:
        """FLOP: 2 m n k of each."""
        m, n, k, batch = self.sizes
        return np.asarray(2 * m * n * k * batch)

    def least_bytes(self, element_bytes: ArrayLike) -> Floats:
        """Least HBM traffic [bytes]: A and B read once, C written once."""
        m, n, k, batch = self.sizes
        return np.asarray(np.asarray(element_bytes) * batch * (m * k + n * k + m * n))


@dataclass(frozen=True)
class GemmKernel:
    """The kernel that a library picks, as it runs; arrays of one shape.

    hbm_bytes: traffic. workgroups: of its launch; one a tile, and not more than CUs where they persist. compute_s: time
    of all waves without the HBM [s]. rows, cols: of its tile.
    """

    hbm_bytes: Floats
    waves: Floats
    workgroups: Floats
    compute_s: Floats
    rows: Floats
    cols: Floats


@dataclass(frozen=True)
class GemmCost:
    """Isolated time [s] without launch, launch [s] and FLOP of GEMMs; arrays of one shape.

    describe: gives the kernel, which few ask for.
    """

    seconds: Floats
    launch_s: Floats
    flop: Floats
    describe: Callable[[], GemmKernel] = field(repr=False, compare=False)

    @classmethod
    def of(
        cls, shape: GemmShape, seconds: ArrayLike, *, launch_s: ArrayLike, describe: Callable[[], GemmKernel]
    ) -> GemmCost:
        """Build from a shape and times that broadcast."""
        # times of several kernels, FLOP of one shape: all in one
        columns = np.broadcast_arrays(seconds, launch_s, shape.flop)
        seconds, launch_s, flop = (np.asarray(column, float) for column in columns)
        return cls(seconds, launch_s, flop, describe)

    @cached_property
    def kernel(self) -> GemmKernel:
        """The kernel whose time this is."""
        return self.describe()
