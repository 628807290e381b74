"""Numbers of operators that all devices share, with their sources: `conf/data/operators.yaml`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Annotated

from pydantic import Field

from dse.config.options import conf_dir, load_yaml
from dse.errors import validate_as
from dse.values import Frozen
from dse.values.units import Number
from simulators.hardware.parts import SourcedValue

Positive = Annotated[Number, Field(gt=0)]


class SharedGemm(Frozen):
    """Numbers of GEMMs by older libraries (`simulators.costs.gemm.tiles`), and beside others (`...gemm.sharing`).

    reread: share of what super-tiles read again that misses the last-level cache. across_hbm: share of the extra cost
    of reading across a stride that is the HBM's. stride_base: doublings that a transposed A costs anyway.
    camping_free_log2: strides whose power of two is at most that use all channels. cached_output: share of C that takes
    room in the last-level cache on its way out.
    """

    reread: Positive
    across_hbm: Positive
    stride_base: Positive
    camping_free_log2: Positive
    cached_output: Positive


class SharedLibrary(Frozen):
    """Bounds of a split K by libraries of today (`simulators.costs.gemm.library`).

    least_depth: of a part. most_splits: parts. most_waves: times that all parts fill the CUs.
    """

    least_depth: Positive
    most_splits: Positive
    most_waves: Positive


class SharedConvolution(Frozen):
    """Numbers of convolutions (`simulators.costs.convolution`).

    narrow: width up to which narrow tiles are made for a product. launch_flop: what launching a kernel takes, as FLOP
    of peak. prologue: steps of k in which a tile fills and drains its pipeline. least_depth: of a part of a split k.
    repack: extra reading of input and output by the filter pass, for another layout. filter_flop: of the filter pass
    over its definition's (index arithmetic on both operands). pixels: its k loop takes whole steps of an image.
    overlap_feed: of a GEMM's operand reads, where windows of neighbours overlap. col2im: adding scattered values over
    streaming them. winograd_flop: by tile, of transforms inside the kernel and poor tiles. winograd_filter: of its
    filter pass, whose operands are both transformed for one use. fft_flop: of complex products of few rows. fft_rate:
    of the rate that inner loops reach, in transforms.
    """

    narrow: Positive
    launch_flop: Positive
    prologue: Positive
    least_depth: Positive
    repack: Positive
    filter_flop: Positive
    pixels: Positive
    overlap_feed: Positive
    col2im: Positive
    winograd_flop: Mapping[int, Positive]
    winograd_filter: Positive
    fft_flop: Positive
    fft_rate: Positive


class SharedRecurrent(Frozen):
    """Numbers of recurrent layers (`simulators.costs.recurrent`).

    gate_s: of a step, for each gate: launches of its kernels [s]. filter_s: of the filter pass: packing, and reductions
    of the biases [s]. usual_latency_s: latency of a device whose launches take as long as that [s]; those of others go
    with its latency_power. passes: element-wise over gates and state in each step: small kernels at poor bandwidth.
    unsplit_above, unsplit_up_to: batches that run on a kernel that does not split K.
    """

    gate_s: Positive
    filter_s: Positive
    usual_latency_s: Positive
    latency_power: Positive
    passes: Positive
    unsplit_above: Positive
    unsplit_up_to: Positive


class SharedCollective(Frozen):
    """The protocol with a flag in every word (`simulators.costs.collective`): latency and bytes over those of
    others."""

    flag_latency: Positive
    flag_bytes: Positive


class SharedConstants(SourcedValue):
    """Numbers that all devices share.

    hbm_share: of the HBM bandwidth, that kernels reach where it was not fitted. hbm_draw: times its even
    share of the bandwidth that a CU can draw. streamed_share: likewise, of streams.
    """

    name: str
    description: str
    hbm_share: Positive
    hbm_draw: Positive
    streamed_share: Positive
    gemm: SharedGemm
    library: SharedLibrary
    convolution: SharedConvolution
    recurrent: SharedRecurrent
    collective: SharedCollective


@cache
def shared_constants() -> SharedConstants:
    """The numbers of `conf/data/operators.yaml`. Raises ConfigError."""
    tree = load_yaml(conf_dir() / "data" / "operators.yaml")
    return validate_as(SharedConstants, tree, path="operators")
