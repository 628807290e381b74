"""Parts of a GPU: kernels of its libraries, engines that copy, caches, DRAM, counters; and constants fitted to them.

Field names carry SI units. Numbers live in `conf/gpu/*.yaml`, each with its source (`SourcedValue`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional, Self, TypeVar

from pydantic import BaseModel, Field, model_validator

from dse.values import Frozen, Source, knob, leaves
from dse.values.units import Bytes, BytesPerSecond, Fraction, Hertz, Integer, Number, Seconds, Watts

Precision = Literal["fp32", "fp16_storage", "mixed", "fp16", "bf16", "fp8", "mxfp8", "nvfp4", "mxfp4"]
MeasuredFormat = Literal["fp32", "fp16_storage", "mixed", "fp16", "bf16", "fp8", "mxfp8", "nvfp4", "mxfp4", "fp8_block"]
"""Precisions, and 8 bits scaled by blocks of 128 numbers (arXiv:2412.19437), whose kernels tables tell apart."""
PeakFormat = Literal["fp32", "tf32", "fp16", "bf16", "fp8", "fp4"]
"""Formats of inputs of which data sheets give the peak rate."""
ELEMENT_BYTES: Mapping[str, float] = {
    **{"fp32": 4, "fp16_storage": 2, "mixed": 2, "fp16": 2, "bf16": 2, "fp8": 1},
    **{"mxfp8": 1 + 1 / 32, "mxfp4": 0.5 + 1 / 32, "nvfp4": 0.5 + 1 / 16},  # a byte of scale for 32 (OCP MX 1.0), 16
    "fp8_block": 1 + 4 / 128,  # of the inputs: a scale of 32 bits for 128
}

Bandwidth = Annotated[BytesPerSecond, Field(ge=1e6)]  # 64 would be a forgotten unit
Factor = Annotated[Number, Field(gt=0, le=1e3)]
Duration = Annotated[Seconds, Field(gt=0)]
ShortTime = Annotated[Seconds, Field(le=1e-3)]
LaunchTime = Annotated[Seconds, Field(le=0.1)]  # 3 would be a forgotten unit
Capacity = Annotated[Bytes, Field(ge=1e6)]  # 192 would be a forgotten unit
Count = Annotated[Integer, Field(ge=1, le=4096)]
Hash = Literal["none", "xor", "polynomial"]
Side = Annotated[Integer, Field(ge=8, le=1024)]
Assignment = Literal["static", "dynamic", "stream_k"]

SwitchableCache = Literal["l1", "l2"]
StreamKind = Literal["norm", "activation", "add", "rotary"]
"""Operators of a transformer's layer that memory bounds."""


_Value = TypeVar("_Value")
if TYPE_CHECKING:
    Part = Annotated[_Value, "of a machine"]
else:
    Part = Optional[_Value]  # noqa: UP045 (a generic alias)
"""What some machines lack: it is there where a backend that reads it says that it `needs` it, else it may be None."""
ABSENT: Any = None
LACKS = "`python -m dse machine list` shows which machines have it; or give it with its source"


class Grown(Frozen):
    """A part of a system with fields added later; a field of None is left out, so that old designs keep their keys."""

    def __iter__(self) -> Iterator[tuple[str, Any]]:  # type: ignore[override] # of a list, as it is asked often
        """Iterate over the fields that are not None."""
        return iter([(name, value) for name, value in super().__iter__() if value is not None])


class Tile(Frozen):
    """A GEMM macro-tile of the library: output rows x columns, and its rate relative to the best tile."""

    rows: Side
    cols: Side
    efficiency: Annotated[Number, Field(gt=0, le=1)]


class GemmLibrary(Grown):
    """Costs of a GEMM kernel beside its FLOP (equations in `simulators/costs/gemm/waves.py`).

    assignment: the hardware assigns workgroups in waves (`static`), resident workgroups take tiles as they become free
    (`dynamic`: persistent, work-stealing), or each is dealt an equal part of all tiles' K (`stream_k`).
    persistent: whether workgroups of tiles in waves stay until the GEMM ends, so that no other kernel gets their CUs.
    workgroups_per_cu: resident workgroups of a CU, where stages are simulated (`simulators/costs/gemm/stages.py`).
    Where kernels share a GPU (`simulators/costs/gemm/sharing.py`), this number follows from the register_bytes and
    lds_bytes of a CU and the needs of a tile. tile_depth: of k, in the LDS at once. half_occupancy: workgroups on a
    CU that reach half of its rate.
    """

    assignment: Annotated[Assignment, knob(structural=True)] = "static"
    persistent: Annotated[bool | None, knob(structural=True)] = None
    workgroups_per_cu: Annotated[Integer, Field(ge=1, le=64)] | None = None
    register_bytes: Annotated[Bytes, Field(ge=1024)] | None = None
    lds_bytes: Annotated[Bytes, Field(ge=1024)] | None = None
    tile_depth: Annotated[Integer, Field(ge=1, le=1024)] | None = None
    half_occupancy: Annotated[Number, Field(gt=0, le=64)] | None = None
    tiles: tuple[Tile, ...] = Field(min_length=1)
    prologue_s: Seconds
    cache_miss: Fraction
    serial_fraction: Fraction

    @property
    def retires(self) -> bool:
        """Tell whether workgroups retire before the GEMM ends, so that other kernels get their CUs."""
        return self.assignment == "static" and not self.persistent


class CuCopy(Grown):
    """Data movement by kernels that run on CUs.

    num_cus: CUs that a collective takes at most and by default, one for each channel (twice as many for an all-to-all
    if `all_to_all_factor` is 1/2). store_bytes_per_s_per_cu: rate at which the workgroups of a GEMM on a CU store at
    peers; None where it is not known, so that the links alone limit them. store_efficiency: share of the links that
    stores reach; None for that of kernels.
    """

    num_cus: Annotated[Integer, Field(ge=1, le=4096)]
    bytes_per_s_per_cu: Bandwidth
    all_to_all_factor: Annotated[Number, Field(gt=0, le=1)]
    link_efficiency: Annotated[Number, Field(gt=0, le=1)]
    setup_s: Seconds
    store_bytes_per_s_per_cu: Bandwidth | None = None
    store_efficiency: Annotated[Number, Field(gt=0, le=1)] | None = None


class CopyTimes(Frozen):
    """Fixed times of the phases of one copy by a DMA engine; copy_s is the latency of the copy itself."""

    control_s: Seconds
    schedule_s: Seconds
    copy_s: Seconds
    sync_s: Seconds


class Dma(Frozen):
    """Data movement by copy engines; each (source, destination) copy runs on one engine.

    setup_s: set-up time in schedules. phases: times of the phases of a single copy, if measured.
    """

    num_engines: Annotated[Integer, knob(structural=True, ge=1, le=256)]
    bytes_per_s: Bandwidth
    setup_s: Seconds
    phases: CopyTimes | None = None


Slowdown = Annotated[Number, Field(ge=1, le=16)]


class Contention(Frozen):
    """Slowdowns of operators that run side by side, beyond their sharing of CUs, HBM bandwidth and links.

    gemm_beside_cus: of a GEMM while kernels move data. late_start: time by which kernels that move data start late
    beside a GEMM, over the time of the GEMM alone; late_start_first: where they were launched before it (null: the
    same). fork_s: time by which such kernels start late on a stream of their own, whatever the GEMM's length, and a
    GEMM launched after them as long again. wave_slack: work by which a GEMM's waves must be deeper than its workgroups,
    as a share, where CUs are freed while it runs. Either is 0 where it is not known (null). cu_copy_beside_gemm: of a
    CU's byte of a transfer, while a GEMM runs. dma_beside_gemm: of both a transfer by DMA engines and the GEMM beside
    it. These are the only calibrated constants of contention (docs/explanation/contention.md).
    """

    gemm_beside_cus: Slowdown
    late_start: Annotated[Number, Field(ge=0, le=4)]
    late_start_first: Annotated[Number, Field(ge=0, le=4)] | None = None
    fork_s: Seconds | None = None
    wave_slack: Annotated[Number, Field(ge=0, le=1)] | None = None
    cu_copy_beside_gemm: Slowdown
    dma_beside_gemm: Slowdown


class Power(Grown):
    """Power of a board by what it does (equation in `simulators.costs.power`).

    clock_hz: of the CUs where `gpu.clock` is 1, that of the GPU's rates. board_w: the board's limit. cap_w: the limit
    that is set, at most the board's. idle_w: when nothing runs. tree_w: of the clock tree, and of CUs that wait, while
    something does. cu_w: of a CU that moves data. flop_j, hbm_j_per_byte, link_j_per_byte: energy of an operation by
    the format of its inputs, and of a byte over the HBM and the links; stream_j_per_byte: of a byte that kernels stream
    from the HBM, in the CUs and caches. tree_w, cu_w, flop_j and stream_j_per_byte are those at the lowest voltage,
    which holds up to the share `knee` of clock_hz; voltage: that at clock_hz over the lowest. window_s: time constant
    of the power that the governor sees (null: long). dip: share by which its clock swings below the one that it holds
    on average at the limit (null: not known). boost_hz: highest clock, at which a board runs that its limit does not
    hold (null: clock_hz). leak_w: of leakage at the lowest voltage, where idle_w is without it (null: idle_w has it).
    """

    clock_hz: Hertz
    board_w: Watts
    cap_w: Watts
    idle_w: Watts
    tree_w: Annotated[Number, Field(ge=0, le=1e5)] = 0.0
    cu_w: Annotated[Number, Field(ge=0, le=1e3)] = 0.0
    flop_j: Mapping[PeakFormat, Annotated[Number, Field(ge=0, le=1e-9)]] = Field(default_factory=dict)
    hbm_j_per_byte: Annotated[Number, Field(ge=0, le=1e-6)]
    link_j_per_byte: Annotated[Number, Field(ge=0, le=1e-6)]
    stream_j_per_byte: Annotated[Number, Field(ge=0, le=1e-6)] = 0.0
    knee: Annotated[Number, Field(gt=0, le=1)] = 1.0
    voltage: Annotated[Number, Field(ge=1, le=2)] = 1.0
    window_s: Seconds | None = None
    dip: Annotated[Fraction, Field(lt=1)] | None = None
    boost_hz: Hertz | None = None
    leak_w: Watts | None = None


class Cache(Grown):
    """A set-associative cache of `ways` lines a set with LRU replacement. bytes_per_s: total rate into the CUs."""

    bytes: Annotated[Bytes, Field(ge=1024)]
    ways: Annotated[Integer, Field(ge=1, le=1024)]
    bytes_per_s: Bandwidth | None = None


class ShaderEngines(Frozen):
    """Parts of a GPU over which workgroups are dispatched evenly: shader engines (AMD) or GPCs (NVIDIA) of its dies."""

    num_dies: Annotated[Integer, knob(structural=True, ge=1, le=64)]
    engines_per_die: Annotated[Integer, knob(structural=True, ge=1, le=64)]


class Tracker(Frozen):
    """Counters at the memory controller (T3, arXiv:2401.16677), one entry for each workgroup in flight.

    A counter triggers a DMA command once all updates of its workgroup's tile have arrived.
    """

    num_entries: Annotated[Integer, Field(ge=1, le=2**20)]
    bytes_per_entry: Annotated[Integer, Field(ge=1, le=2**16)]


class Persistent(Frozen):
    """Constants of persistent kernels that communicate by themselves, and of gathers.

    post_s: time of a put by one thread, from the end of a slice to the network. poll_s: time from a flag's arrival
    until the waiting thread continues. gather_efficiency: share of the HBM rate that random rows reach.
    in_flight_bytes_per_cu: outstanding requests at the occupancy of a kernel that does not communicate.
    memory_latency_s: latency of a request.
    """

    post_s: Seconds
    poll_s: Seconds
    gather_efficiency: Annotated[Fraction, Field(gt=0)]
    in_flight_bytes_per_cu: Annotated[Bytes, Field(gt=0)]
    memory_latency_s: Annotated[Seconds, Field(gt=0)]


class LoadedClock(Frozen):
    """Clock of the CUs where kernels follow one another for seconds (equation in `simulators.costs.power`).

    gemm_clock: while GEMMs alone do, over that of GEMMs measured one by one. idle_share, exchange_share: of the power
    that the board may draw, drawn when nothing runs, and when only collectives do.
    """

    gemm_clock: Annotated[Number, Field(gt=0, le=1)]
    idle_share: Annotated[Fraction, Field(lt=1)]
    exchange_share: Annotated[Fraction, Field(lt=1)]


class StreamingRates(Frozen):
    """Fitted constants of an operator that memory bounds: its least time, and the share of the HBM bandwidth that it
    reaches.
    """

    launch_s: Duration
    hbm_share: Factor


class Efficiency(Grown):
    """Fitted constants of a device at one precision, absent from data sheets (`simulators.costs.gemm.fitted`).

    launch_s: fixed time of a call. compute: share of the peak rate that inner loops reach (above 1 if the clock is
    above the data sheet's). feed: bytes from the last-level cache to a CU per 16 FLOP of peak. transposed: extra cost
    of reading a transposed A. narrow: slowdown of the library's kernels for at most 16 columns. latency_s: latency per
    element of K of a chain of dependent loads. fused_setup_s: set-up of a pass of a recurrent layer for each of its
    gates and for its state, of libraries that run its steps in one kernel (None: they launch each step).

    Of libraries of today (`simulators.costs.gemm.library`): tiles: (rows, columns) of a tile of the output, of each
    kernel (None: the library is older). prologue: elements of K that take as long as a workgroup needs to begin and to
    end. hbm_share: share of the GPU's HBM bandwidth that is reached. split_s: time to add the parts of a split K.
    split_traffic: traffic of a part over the bytes of its sums. sustained: share of the peak rate that power and clock
    allow for long. sustained_clock: the clock, over that of the data sheet, that the board's limit allowed then; a
    lower one slows what is sustained from there on (None: it follows the clock). camping: slowdown of the
    multiplication for each doubling of the power of two in the stride of K. cache_bytes, cache_speed: activations that
    the last-level cache holds from kernel to kernel, and their rate over that of the HBM (None: of no account).
    weights_cache_bytes: all that it holds, weights among it, where a loop reads the same again. cast_traffic: bytes of
    HBM traffic that the cast of an element of the inputs is worth, of tables that time layers with their casts (in a
    step these are operators). streaming: by operator that memory bounds.
    """

    launch_s: Duration
    compute: Factor
    feed: Factor
    transposed: Factor
    narrow: Factor
    latency_s: Duration
    fused_setup_s: Annotated[Seconds, Field(gt=0, le=1)] | None = None
    tiles: Annotated[tuple[tuple[Side, Side], ...], Field(min_length=1)] | None = None
    prologue: Annotated[Number, Field(ge=0, le=1e5)] | None = None
    hbm_share: Annotated[Number, Field(gt=0, le=1.2)] | None = None
    split_s: Annotated[Seconds, Field(ge=0)] | None = None
    split_traffic: Annotated[Number, Field(gt=0, le=100)] | None = None
    sustained: Factor | None = None
    sustained_clock: Annotated[Number, Field(gt=0, le=1)] | None = None
    camping: Annotated[Number, Field(ge=0, le=1)] | None = None
    cache_bytes: Annotated[Bytes, Field(ge=1e6)] | None = None
    cache_speed: Annotated[Number, Field(ge=1, le=20)] | None = None
    weights_cache_bytes: Annotated[Bytes, Field(ge=1e6)] | None = None
    cast_traffic: Factor | None = None
    streaming: Mapping[StreamKind, StreamingRates] | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        """A library of today has all of its constants."""
        names = ("prologue", "hbm_share", "split_s", "split_traffic", "sustained", "camping")
        absent = [name for name in names if self.tiles is not None and getattr(self, name) is None]
        if absent:
            raise ValueError(f"has tiles and no {', '.join(absent)}")
        return self


class WithoutCache(Frozen):
    """Factors on the bytes from the last-level cache to a CU (`feed`), and on the latency of a chain of loads, with a
    cache switched off.
    """

    feed: Annotated[Number, Field(gt=0, le=1)]
    latency: Annotated[Number, Field(ge=1, le=100)]


class L1(Frozen):
    """The cache of a CU. hit_s: latency of a hit."""

    bytes: Annotated[Bytes, Field(ge=64)]
    ways: Annotated[Integer, Field(ge=1, le=32)]
    hit_s: ShortTime


class L2(Frozen):
    """The shared cache, in slices of equal size at the channels.

    hop_s: time from a CU to a slice. hit_s: from there until the line leaves. lookup_s, fill_s: time that a request, or
    an arriving line, occupies a slice. set_index: `xor` permutes the sets by the address bits above them.
    """

    bytes: Annotated[Bytes, Field(ge=4096)]
    ways: Annotated[Integer, Field(ge=1, le=32)]
    hop_s: ShortTime
    hit_s: ShortTime
    lookup_s: ShortTime
    fill_s: ShortTime
    set_index: Literal["linear", "xor"] = "linear"


class Dram(Frozen):
    """Channels of DRAM, their banks and their controllers.

    hop_s: time from L2 to a controller. queue: requests that a controller schedules among. write_buffer: lines that it
    writes in one burst. to_write_s, to_read_s: bus turnaround times.
    """

    channels: Annotated[Integer, Field(ge=1, le=128)]
    banks: Annotated[Integer, Field(ge=1, le=64)]
    row_bytes: Annotated[Integer, Field(ge=256, le=4096)]
    bytes_per_s: Annotated[BytesPerSecond, Field(ge=1e9)]
    hop_s: ShortTime
    queue: Annotated[Integer, Field(ge=1, le=1024)]
    write_buffer: Annotated[Integer, Field(ge=1, le=1024)]
    trcd_s: ShortTime
    trp_s: ShortTime
    tras_s: ShortTime
    tcl_s: ShortTime
    trrd_s: ShortTime
    twr_s: ShortTime
    to_write_s: ShortTime
    to_read_s: ShortTime
    trefi_s: Annotated[ShortTime, Field(gt=0)]
    trfc_s: ShortTime


class AddressMapping(Frozen):
    """Mapping from addresses to channels and banks: see the module docstring."""

    interleave_bytes: Annotated[Integer, Field(ge=64, le=65536)]
    channel_hash: Hash
    bank_xor: bool


# ---------------------------------------------------------------- sources

WHAT_IF = frozenset({"active_cus", "clock", "flop_vs_bw"})
"""Names of what a design is asked to be: no constants of a machine, so they need no source, and may have one."""


class WithSources(Frozen):
    """A part with `sources`: dotted path -> source of the constants at and below it; the whole may name others."""

    sources: Mapping[str, Source] = Field(default_factory=dict)

    def source(self, path: str) -> Source | None:
        """Source of the constant at `path`: the entry of the path or of the nearest enclosing path.

        A part with sources of its own answers for paths without an entry.
        """
        name, _, subpath = path.partition(".")
        part = getattr(self, name, None)
        while path:
            if path in self.sources:
                return self.sources[path]
            path = path.rpartition(".")[0]
        return part.source(subpath) if isinstance(part, WithSources) else None

    def facts_below(self, name: str) -> list[tuple[str, Any, str, str]]:
        """(`<name>.<dotted path>`, value, provenance, source) of every constant."""
        facts = list[tuple[str, Any, str, str]]()
        for path, value, _ in leaves(self):
            source = self.source(path)
            if source and is_fact(value):
                facts.append((f"{name}.{path}", _plain(value), source.provenance, source.source))
        return facts


class SourcedValue(WithSources):
    """A value in which every constant has a source, its own or that of a part."""

    @model_validator(mode="after")
    def _every_number_has_a_source(self) -> SourcedValue:
        bare = [path for path, value, _ in leaves(self) if _is_constant(path, value) and not self.source(path)]
        if bare:
            raise ValueError(f"no entry in `sources` for {', '.join(bare)}; every constant names its source")
        return self


def _is_constant(path: str, value: object) -> bool:
    return is_fact(value) and path.rpartition(".")[2] not in WHAT_IF


def is_fact(value: object) -> bool:
    """Return whether a leaf is a constant: a number, or a list of numbers or of values that hold numbers."""
    numbers = isinstance(value, tuple) and not all(isinstance(item, str) for item in value)
    return numbers or (isinstance(value, (int, float)) and not isinstance(value, bool))


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [item.model_dump() if isinstance(item, BaseModel) else item for item in value]
    return value
