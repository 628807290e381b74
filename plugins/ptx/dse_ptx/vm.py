"""What the parts of the compiled interpreter share: fields of its rows, the state of a launch, numbers and memory.

`interpreter` executes rows; instructions of Hopper are in `mbarriers`, `bulk` and `warpgroups`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulators.compiled import inline_never

Words = NDArray[np.uint64]
Ints = NDArray[np.int64]

LANES, ALL = 32, 0xFFFFFFFF
GLOBAL_BASE, SHARED_WINDOW, LOCAL_WINDOW = 1 << 32, 1 << 24, 1 << 25
"""Where global memory begins, and where shared and local memory are seen by generic addresses."""
PARAM_WINDOW, CLUSTER_WINDOW, RANK_BITS = 1 << 27, 1 << 28, 24
"""Where parameters are seen by generic addresses, and shared memory of a cluster's blocks, 2^24 bytes for each: by
generic addresses and by those of `.shared::cluster`. Lower addresses of that space are the block's own."""
MOST_RANKS = 16
"""Blocks of a cluster: 8, or 16 where a kernel asks for a size that is not portable."""
TILE = 16 * 256
"""Elements of the largest matrix of `mma`."""

# Fields of an instruction. X, Y, Z: bits from which an operand's sign is extended, 0 for none. FIRST: of its operands,
# those written before those read.
# fmt: off
# Columns of the code, then its kinds, operations, formats and so on: constants in compiled functions.
(KIND, OP, BITS, X, Y, Z, FORMAT, SOURCE, MODE, FLAGS, GUARD, NEGATED, FIRST, WRITES, READS, TARGET, MEETS, OFFSET,
 BYTES, COUNT, SPACE) = range(21)
FIELDS = 21
(INTEGER, FLOAT, CONVERT, LOAD, STORE, ATOMIC, COPY, SPECIAL, SHUFFLE, VOTE, MMA, MATRIX, UNPACK, BRANCH, BARRIER, EXIT,
 NOTHING, TRAP, MBARRIER, MBARRIER_WAIT, BULK, WGMMA, CLUSTER_SYNC, MAP_RANK) = range(24)
(MOV, ADD, SUB, MUL, MAD, MUL_HI, MAD_HI, DIV, REM, MIN, MAX, ABS, NEG, AND, OR, XOR, NOT, CNOT, SHL, SHR, SETP, SELP,
 SLCT, BFE, BFI, BREV, POPC, CLZ, BFIND, LOP3, PRMT, SHF_L, SHF_R, SAD, DP4A, PACK) = range(36)
(FADD, FSUB, FMUL, FFMA, FDIV, FMIN, FMAX, FABS, FNEG, FRCP, FSQRT, FRSQRT, FEX2, FLG2, FSIN, FCOS, FTANH, FCOPYSIGN,
 FSETP, FTESTP) = range(20)
F16, BF16, F32, F64, TF32, INT = range(6)
EQ, NE, LT, LE, GT, GE, EQU, NEU, LTU, LEU, GTU, GEU, NUM, NAN = range(14)
RN, RZ, RM, RP, RNA = range(5)
GENERIC, GLOBAL, SHARED, LOCAL, PARAM, CLUSTER = range(6)
(A_ADD, A_MIN, A_MAX, A_AND, A_OR, A_XOR, A_EXCH, A_CAS, A_INC, A_DEC) = range(10)
UP, DOWN, BFLY, IDX = range(4)
V_ALL, V_ANY, V_UNI, V_BALLOT, V_ACTIVE, V_MATCH, V_REDUX, V_ELECT = range(8)
FTZ, SAT, RELU, PROPAGATE, PACKED, NOT_Z, AND_Z, OR_Z, XOR_Z, INTEGRAL = (1 << bit for bit in range(10))
M_INIT, M_INVAL, M_ARRIVE, M_DROP, M_EXPECT, M_COMPLETE, M_ARRIVE_EXPECT, M_PENDING = range(8)
B_LOAD, B_STORE, B_SHARED = range(3)
C_ARRIVE, C_WAIT = range(2)
R_MAP, R_RANK = range(2)
NEGATE_A, NEGATE_B, TURN_A, TURN_B = (1 << bit for bit in range(4))
(DONE, OUT_OF_BOUNDS, MISALIGNED, DEADLOCK, ENDLESS, FULL, DIVERGENT, TRAPPED, DEEP, WATCHED, NO_MBARRIER, BAD_COUNT,
 TOO_MANY, DEADLOCK_MBARRIER, DEADLOCK_CLUSTER, UNMATCHED, BAD_RANK, GONE_BLOCK, BAD_DESCRIPTOR, BASE_OFFSET, NO_GROUP,
 BAD_SIZE, MISALIGNED_BULK, NO_MAP, OTHER_BLOCK, NOT_ALIGNED) = range(26)
TOP, ENDED, WAITS, EXPECTED, GONE, CAME, OWES, SAMPLE, SEEN, MAY_FAIL = range(10)
WARP_FIELDS = 10
AT_CLUSTER, AT_MBARRIER = 16, 17
COPIES, COPY_WORDS, OPERANDS = 1024, 16, 10
NAMED_BARRIERS = 16
# fmt: on


_SCALARS = (
    # of the launch; `watch_skip`: visits of the watched place that do not stop it
    "num_threads num_warps num_constants num_registers param_at param_size shared_at shared_size local_at local_size "
    "limit depth watch_pc watch_block watch_thread watch_skip num_clusters local_trace block_warps cluster_size "
    # of a cluster's first block, and from one to the next; num_warps: of a cluster
    "shared_first shared_stride local_first local_stride "
    # where execution is; `has_moved`: a warp of the cluster ran since all were asked. block, rank, dispatched: of the
    # warp that runs: in the grid, in its cluster, and in the order of clusters
    "cluster block rank dispatched is_started warp pc fault_thread fault_address fault_arrivals fault_bytes status "
    "executed rows accesses in_sample has_moved last_allocation "
    # phases of mbarriers that ended, and how often in a row waits had to answer although theirs had not
    "progress idle_turns "
    # whether copies come as late as they may, and those that have not come
    "is_late waiting"
)
_WORDS = ("x", "y", "z", "out", "at")


def _state() -> np.dtype[np.void]:
    """Type of the numbers of a launch, of where execution is, and of operands and results of 32 lanes.

    x, y, z: operands, as sx, sy, sz with their signs, fx to fz in single and dx to dz in double precision; out: the
    result (fo, do); at: the second result, or the addresses of an access.
    """
    fields: list[tuple[str, Any, int]] = []
    end = 0
    # every scalar and array of the record has a fixed place, so that compiled code reads them by constant offsets
    for name in _SCALARS.split():
        fields.append((name, np.int64, end))
        end += 8
    for name in ("ntid", "nctaid", "cluster_dim"):
        fields.append((name, (np.int64, 3), end))
        end += 24
    # warps that have not ended, of each block of the cluster
    fields.append(("live", (np.int64, MOST_RANKS), end))
    end += 8 * MOST_RANKS
    # arrays of lanes begin at a multiple of 64 bytes, a cache line
    end = -(-end // 64) * 64
    for name in _WORDS:
        fields.append((name, (np.uint64, LANES), end))
        if name in "xyz":
            # sx shares the bytes of x: an operand is read as one or the other
            fields.append(("s" + name, (np.int64, LANES), end))
        end += 8 * LANES
    for letter, kind in (("f", np.float32), ("d", np.float64)):
        for name in "xyzo":
            fields.append((letter + name, (kind, LANES), end))
            end += np.dtype(kind).itemsize * LANES
    names, formats, offsets = zip(*fields, strict=True)
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": end})


STATE = _state()


class EncodedProgram(NamedTuple):
    """code (instructions, FIELDS), operands; file: constants, then registers of each warp, 32 lanes each."""

    code: Ints
    operands: Ints
    file: Words


class Memory(NamedTuple):
    """Bytes of all state spaces by the size of an access, and (first, end) addresses of allocations, ascending."""

    m8: NDArray[np.uint8]
    m16: NDArray[np.uint16]
    m32: NDArray[np.uint32]
    m64: Words
    allocations: Ints


class Queue(NamedTuple):
    """Warps of a cluster: stack (warps, depth, 3), warps (warps, WARP_FIELDS), arrivals at each block's barriers.

    issued, lanes: warp and thread instructions by instruction, of all blocks. copies (COPIES, COPY_WORDS): bulk copies
    that have not come: instruction, block of the cluster, thread, operands.
    """

    stack: Ints
    warps: Ints
    arrivals: Ints
    issued: Ints
    lanes: Ints
    copies: Ints


class Trace(NamedTuple):
    """Blocks that are recorded, ascending in the order of clusters; a row for each of their warp instructions, and for
    each access."""

    sample: Ints
    pcs: NDArray[np.int32]
    active: NDArray[np.uint32]
    access: Ints
    owner: NDArray[np.int32]
    addresses: Words
    sizes: NDArray[np.int16]


@inline_never
def single(bits: Any) -> Any:
    """A number in single precision by its bits."""
    # a scalar of NumPy's type, whose view is a reinterpretation of its bits for numba
    word = np.uint32(bits)
    return word.view(np.float32)


@inline_never
def single_bits(number: Any) -> Any:
    """Bits of a number in single precision."""
    value = np.float32(number)
    return value.view(np.uint32)


@inline_never
def double(bits: Any) -> Any:
    """A number in double precision by its bits."""
    word = np.uint64(bits)
    return word.view(np.float64)


@inline_never
def double_bits(number: Any) -> Any:
    """Bits of a number in double precision."""
    value = np.float64(number)
    return value.view(np.uint64)


@inline_never
def mask_of(bits: int) -> Any:
    """The lowest bits of a word."""
    # a shift right by 64 - bits: `1 << bits` of 64 bits would overflow
    return np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - bits)


@inline_never
def popcount(value: Any) -> Any:
    """Bits that are set in a word."""
    v = np.uint64(value)
    # sums of neighbouring bits, then pairs, then nibbles; the product adds all bytes in the highest
    v = v - ((v >> np.uint64(1)) & np.uint64(0x5555555555555555))
    v = (v & np.uint64(0x3333333333333333)) + ((v >> np.uint64(2)) & np.uint64(0x3333333333333333))
    v = (v + (v >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return (v * np.uint64(0x0101010101010101)) >> np.uint64(56)


@inline_never
def from_half(h: Any) -> Any:
    """A number of 16 bits (binary16) in single precision."""
    sign, exponent, fraction = (h & 0x8000) << 16, (h >> 10) & 31, h & 0x3FF
    if exponent == 0:
        # subnormal: units of 2^-24
        value = np.float32(fraction) * np.float32(2.0**-24)
        return -value if sign else value
    # 112 = 127 - 15 rebases the exponent; 31 means infinity or no number in both
    bits = sign | (((exponent + 112) if exponent < 31 else 255) << 23) | (fraction << 13)
    return single(bits)


@inline_never
def locate(s: Any, m: Memory, space: int, address: int, size: int, thread: int) -> int:
    """Place of an access in memory; -1 where it is out of bounds, -2 where it is not aligned, -3 of a block that has
    ended."""
    # sizes are powers of two
    return -2 if address & (size - 1) else span(s, m, space, address, size, thread)


@inline_never
def span(s: Any, m: Memory, space: int, address: int, size: int, thread: int) -> int:
    """Place of bytes in memory, wherever they begin; see `locate`."""
    # below 2^32 a generic address lies in the window of shared, local, or parameter memory, or of a cluster
    if space == GENERIC:
        space = GLOBAL
        if address < GLOBAL_BASE:
            if address >= CLUSTER_WINDOW:
                space = CLUSTER
            elif address >= PARAM_WINDOW:
                space = PARAM
                address -= PARAM_WINDOW
            else:
                space = LOCAL if address >= LOCAL_WINDOW else SHARED
                address -= LOCAL_WINDOW if address >= LOCAL_WINDOW else SHARED_WINDOW
    if space == GLOBAL:
        # most accesses go to the allocation of the one before, and need no search
        last = s.last_allocation
        # an access must lie within one allocation: gaps between them catch what runs beyond
        if address < m.allocations[last, 0] or address + size > m.allocations[last, 1]:
            last = allocation(m.allocations, address)
            if last < 0 or address + size > m.allocations[last, 1]:
                return -1
            s.last_allocation = last
        return address - GLOBAL_BASE
    if space == SHARED:
        return s.shared_at + address if address >= 0 and address + size <= s.shared_size else -1
    if space == CLUSTER:
        rank, offset = rank_of(s, address), address & ((1 << RANK_BITS) - 1)
        if address < 0 or rank >= s.cluster_size or offset + size > s.shared_size:
            return -1
        return s.shared_first + rank * s.shared_stride + offset if s.live[rank] else -3
    if space == LOCAL:
        is_inside = address >= 0 and address + size <= s.local_size
        # local memory of a thread lies in one piece here, unlike in a trace (`trace_address`)
        return s.local_at + thread * s.local_size + address if is_inside else -1
    return s.param_at + address if address >= 0 and address + size <= s.param_size else -1


@inline_never
def rank_of(s: Any, address: int) -> int:
    """Block of a cluster whose shared memory an address of `.shared::cluster` names."""
    return (address - CLUSTER_WINDOW) >> RANK_BITS if address >= CLUSTER_WINDOW else s.rank


@inline_never
def in_cluster(s: Any, space: int, address: int) -> Any:
    """Address of shared memory with the rank of its block, from one of a space."""
    if space == GENERIC and SHARED_WINDOW <= address < LOCAL_WINDOW:
        address -= SHARED_WINDOW
    if address >= CLUSTER_WINDOW:
        return address
    return CLUSTER_WINDOW + (np.int64(s.rank) << RANK_BITS) + address


@inline_never
def allocation(allocations: Ints, address: int) -> int:
    """The last allocation that begins at or before an address, or -1."""
    # bisection: allocations ascend
    low, high = 0, len(allocations)
    while low < high:
        middle = (low + high) // 2
        if allocations[middle, 0] <= address:
            low = middle + 1
        else:
            high = middle
    return low - 1


@inline_never
def get(m: Memory, at: int, size: int) -> Any:
    """Bytes of memory as a word."""
    if size == 4:
        return np.uint64(m.m32[at >> 2])
    if size == 8:
        return m.m64[at >> 3]
    return np.uint64(m.m16[at >> 1]) if size == 2 else np.uint64(m.m8[at])


@inline_never
def put(m: Memory, at: int, size: int, value: Any) -> None:
    """Store a word's lowest bytes."""
    if size == 4:
        m.m32[at >> 2] = np.uint32(value)
    elif size == 8:
        m.m64[at >> 3] = value
    elif size == 2:
        m.m16[at >> 1] = np.uint16(value)
    else:
        m.m8[at] = np.uint8(value)


@inline_never
def fault(s: Any, place: int, address: int, thread: int) -> bool:
    """Note an access that failed."""
    s.status = OUT_OF_BOUNDS if place == -1 else MISALIGNED if place == -2 else GONE_BLOCK
    s.fault_thread, s.fault_address = thread, address
    return False


@inline_never
def refuse(s: Any, status: int, address: int, thread: int) -> bool:
    """Note what an instruction breaks."""
    s.status, s.fault_thread, s.fault_address = status, thread, address
    return False


@inline_never
def base(s: Any, p: EncodedProgram, place: int, shift: int) -> int:
    """Find where an operand's lanes begin in the file; shift: registers of the warps before."""
    index = p.operands[place]
    # constants, the first registers of the file, are shared: only others are shifted to the warp's own
    return LANES * (index + shift if index >= s.num_constants else index)


@inline_never
def trace_address(s: Any, space: int, address: int, thread: int) -> int:
    """Address for a trace: local memory lies interleaved by thread in global memory, four bytes each."""
    if space == CLUSTER or (space == GENERIC and CLUSTER_WINDOW <= address < GLOBAL_BASE):
        return address & ((1 << RANK_BITS) - 1)
    if space == GENERIC and SHARED_WINDOW <= address < PARAM_WINDOW:
        space = LOCAL if address >= LOCAL_WINDOW else SHARED
        address -= LOCAL_WINDOW if address >= LOCAL_WINDOW else SHARED_WINDOW
    if space == LOCAL:
        # words of the threads of a block lie next to one another, so that a warp that accesses one place coalesces
        block = s.block * s.local_size
        return s.local_trace + (block + (address & ~3)) * s.num_threads + 4 * thread + (address & 3)
    return address


@inline_never
def element(word: Any, kind: int, place: int, bits: int, is_signed: int) -> float:
    """One of the numbers that a register of a matrix holds. kind: F16, BF16, TF32, F64, or INT of so many bits."""
    if kind == F64:
        return double(word)
    if kind == F16:
        return np.float64(from_half(np.int64((word >> np.uint64(16 * place)) & np.uint64(0xFFFF))))
    if kind == BF16:
        return np.float64(single(((word >> np.uint64(16 * place)) & np.uint64(0xFFFF)) << np.uint64(16)))
    if kind == TF32:
        return np.float64(single(word & np.uint64(0xFFFFE000)))
    part = np.int64((word >> np.uint64(bits * place)) & mask_of(bits))
    return np.float64(part - (1 << bits) if is_signed and part >> (bits - 1) else part)


@inline_never
def lowest(active: int) -> int:
    """The lowest lane that is active."""
    lane = 0
    while not (active >> lane) & 1:
        lane += 1
    return lane
