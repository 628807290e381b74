"""Small traces of warps by hand, for checks of the timing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dse_ptx.warp_trace import Code, Unit, WarpTrace

Place = Callable[[int, int], NDArray[np.uint64]]
Row = tuple[str, Unit, tuple[int, ...], tuple[int, ...], Place | None, int]
"""Opcode, pipeline, registers written and read, addresses of lanes by block and warp, and bytes of a lane."""
LANES = np.arange(32, dtype=np.uint64)


@dataclass(frozen=True)
class Script:
    """Instructions of one warp. flop: operations of a lane by the first word of an opcode."""

    rows: Sequence[Row]
    flop: Mapping[str, float] = field(default_factory=lambda: {"fma": 2.0})

    def trace(self, blocks: int, warps: int, *, registers: int = 32, shared: int = 0) -> WarpTrace:
        """Every block and warp executes the script."""
        count, total = len(self.rows), blocks * warps
        places = [(place, size) for *_, place, size in self.rows if place is not None]
        has = np.array([row[4] is not None for row in self.rows])
        # number of each instruction's access within a warp, -1 without one
        stream = np.where(has, np.cumsum(has) - 1, -1)
        access = np.concatenate([np.where(has, stream + warp * len(places), -1) for warp in range(total)])
        addresses = [place(warp // warps, warp % warps) for warp in range(total) for place, _ in places]
        code = Code(
            tuple(row[0] for row in self.rows), np.array([row[1] for row in self.rows], np.int8),
            _pad([row[2] for row in self.rows]), _pad([row[3] for row in self.rows]),
            np.array([self.flop.get(row[0].partition(".")[0], 0.0) for row in self.rows]),
        )  # fmt: skip
        return WarpTrace(
            code, np.repeat(np.arange(blocks, dtype=np.int32), warps), np.arange(total + 1, dtype=np.int64) * count,
            np.tile(np.arange(count, dtype=np.int32), total), np.full(count * total, 0xFFFFFFFF, np.uint32),
            access.astype(np.int64), np.array(addresses, np.uint64).reshape(-1, 32),
            np.tile(np.array([size for _, size in places], np.int16), total), blocks, 32 * warps, registers, shared,
        )  # fmt: skip


def _pad(rows: Sequence[Sequence[int]]) -> NDArray[np.int32]:
    widest = max(map(len, rows))
    return np.array([[*row, *[-1] * (widest - len(row))] for row in rows], np.int32).reshape(len(rows), widest)


def chain(length: int, *, independent: int = 1) -> Script:
    """Fused multiply-adds; each waits for the one so many before it."""
    return Script([("fma.rn.f32", Unit.FP32, (n % independent,), (n % independent,), None, 0) for n in range(length)])


def stream(loads: int, *, bytes_per_lane: int = 4, stride: int = 1, store: bool = False) -> Script:
    """Loads of neighbouring words, each warp's after those of the warp before it, used by a multiply-add."""
    rows = list[Row]()
    for turn in range(loads):

        def place(block: int, warp: int, turn: int = turn) -> NDArray[np.uint64]:
            first = ((block * 64 + warp) * loads + turn) * 32 * bytes_per_lane * stride
            return LANES * np.uint64(bytes_per_lane * stride) + np.uint64(first)

        unit = Unit.GLOBAL_STORE if store else Unit.GLOBAL_LOAD
        rows.append(("ld.global", unit, () if store else (turn + 1,), (0,), place, bytes_per_lane))
    rows += [("fma.rn.f32", Unit.FP32, (0,), (turn + 1,), None, 0) for turn in range(loads) if not store]
    return Script(rows or [("exit", Unit.EXIT, (), (), None, 0)])


def shared_loads(loads: int, strides: Sequence[int]) -> Script:
    """Loads of shared memory at a stride of words between lanes, from each stride in turn."""
    rows = list[Row]()
    for turn in range(loads):

        def place(block: int, warp: int, stride: int = strides[turn % len(strides)]) -> NDArray[np.uint64]:
            return LANES * np.uint64(4 * stride)

        rows.append(("ld.shared.f32", Unit.SHARED_LOAD, (turn,), (), place, 4))
    return Script(rows)
