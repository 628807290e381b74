"""Tables of overlaps that `study=overlap_measured` shows, and of all layouts that `study=operators` reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dse.config.options import conf_dir
from dse_calibration.overlap_measured.expert_layers import ExpertLayer
from dse_calibration.overlap_measured.gemm_collective import predict_overlaps
from dse_calibration.overlap_measured.overlap_tables import overlap_extras
from dse_calibration.overlap_measured.paired_tables import NEEDED, predict_pairs
from validation.overlaps import judged_overlaps

SHIPPED = conf_dir() / "data" / "overlap"
HEAD = (
    "source,gpu,gpus,nodes,link,op,m,n,k,dtype,method,schedule,gemm_ms,comm_ms,baseline_ms,overlapped_ms,speedup,note\n"
)


def rows_of(folder: Path, *cells: str) -> Path:
    """A table of overlaps with these rows, from the column `gpu` to `speedup`."""
    file = folder / "overlaps.csv"
    file.write_text(HEAD + "".join(f"mine,{row},\n" for row in cells))
    return file


def test_rows_that_cannot_be_predicted_are_counted_by_the_reason(tmp_path: Path) -> None:
    good = "H100,8,1,NVLink,ag_gemm,4096,57344,8192,bf16,flux,fused tiles,,,0.867,0.673,1.288"
    bad_rows = {
        "nobody": good.replace("flux,fused tiles", "nobody,somehow"),
        "GPU Z9": good.replace("H100", "Z9"),
        "format": good.replace("bf16", "int3"),
        "several nodes": good.replace(",8,1,", ",16,2,"),
        "sizes": good.replace(",57344,", ",,"),
        "no single GEMM": good.replace("ag_gemm", "MLP ag_rs"),
        "no number of experts": good.replace("ag_gemm,", "moe_ag_scatter_gemm,").replace(",flux,", ",flux (Comet),"),
        "no overlapped time": good.removesuffix("1.288"),
        "16 GPUs": good.replace(",8,1,", ",16,1,"),
    }
    predicted, skipped = predict_overlaps(rows_of(tmp_path, good, *bad_rows.values()))
    assert len(predicted) == 1
    assert list(skipped.values()) == [1] * len(bad_rows)
    for words, reason in zip(bad_rows, skipped, strict=True):
        assert words in reason


def test_sizes_are_read_as_those_whose_baseline_is_nearer(tmp_path: Path) -> None:
    row = "H100,8,1,NVLink,ag_gemm,4096,{},8192,bf16,flux,fused tiles,,,0.92,,1.1"
    (sharded, of_one), _ = predict_overlaps(rows_of(tmp_path, row.format(8 * 6656), row.format(6656)))
    assert sharded.predicted == of_one.predicted


def test_rows_of_one_operation_are_judged_against_its_serial_one(tmp_path: Path) -> None:
    """A table by implementation tells what one of speed-ups does; rows without a serial one are counted."""
    shape, triton = "H100,8,all-gather + GEMM,4096,6656,8192,bf16", "Triton, copies beside GEMM"
    rows = [
        f'mine,{shape},"serial, NCCL",912.384',
        f'mine,{shape},"{triton}",810.368',
        f"mine,{shape},somehow else,700",
        f'other,{shape},"{triton}",810.368',
    ]
    file = tmp_path / "pairs.csv"
    file.write_text("\n".join([",".join(NEEDED), *rows]))
    (pair,), skipped = predict_pairs(file)
    assert skipped == {"no serial time": 1, "method somehow else: no implementation describes it": 1}
    row = "H100,8,1,NVLink,ag_gemm,4096,6656,8192,bf16,triton,fused tiles,,,0.912384,0.810368,1.126"
    ((of_speedups,), _) = predict_overlaps(rows_of(tmp_path, row))
    assert pair.predicted == of_speedups.predicted
    assert pair.measured[:2] == pytest.approx((912.384e-6, 810.368e-6))
    assert pair.fitted  # constants of this software were fitted on this shape
    assert not list(judged_overlaps(file))


@pytest.mark.nightly
def test_shipped_overlaps_are_shown_beside_naive_predictions() -> None:
    shown = dict(overlap_extras(SHIPPED))
    tables = {"gemm_collective", "prefills", "sums_by_ctas"}
    assert set(shown) == tables | {"gemm_collective_speedups", "prefill_gains", "sums_in_the_switch"}
    rows = shown["gemm_collective"]
    unseen = rows[~rows["fitted"]]
    ours, ideal, serial = (
        (unseen[name] / unseen["measured"] - 1).abs().median() for name in ("speedup", "ideal", "serial")
    )
    assert ours < 0.5 * min(ideal, serial)
    sums = shown["sums_by_ctas"]
    assert (sums["predicted_s"] / sums["measured"] - 1).abs().median() < 0.05


MOE = (
    "mine,H100,8,1,NVLink,{op},8192,8192,8192,bf16,flux (Comet),fused tiles,,,{serial},{fused},2.0,"
    "TPxEP {split}; 32 experts; top-4"
)


@pytest.mark.parametrize("op", ["moe_ag_scatter_gemm", "moe_gemm_gather_rs"])
@pytest.mark.parametrize("split", ["8x1", "4x2"])
def test_a_layer_of_experts_ends_before_its_parts_in_turn_and_not_before_the_longest(
    op: str, split: str, tmp_path: Path
) -> None:
    file = tmp_path / "overlaps.csv"
    file.write_text(HEAD + MOE.format(op=op, split=split, serial=2.0, fused=1.0) + "\n")
    (row,), skipped = predict_overlaps(file)
    assert not skipped and row.software == "comet" and not row.fitted
    serial, fused = row.predicted
    assert serial > sum(row.parts)
    gemm_s, _ = row.parts
    assert 0.8 * gemm_s < fused < serial
    flop = 2 * 8192 * 4 * 8192 * 8192 / 8
    assert fused > flop / 989.4e12


def test_experts_spread_over_groups_are_as_many_products_on_fewer_rows_each() -> None:
    cells = {"op": "moe_ag_scatter_gemm", "m": "8192", "n": "8192", "k": "4096", "dtype": "bf16"}
    split, spread = (
        ExpertLayer.of({**cells, "note": f"TPxEP {degrees}; 64 experts; top-2"}, 8) for degrees in ("8x1", "2x4")
    )
    assert split is not None and spread is not None
    assert (split.rows, split.local_experts) == (2 * 8192, 64)
    assert (spread.rows, spread.local_experts) == (2 * 8192 / 4, 16)
    assert spread.rows * spread.n / spread.tensor == split.rows * split.n / split.tensor
    assert ExpertLayer.of({**cells, "note": "of experts"}, 8) is None


def test_public_rows_of_layers_of_experts_are_near_those_of_one_kernel() -> None:
    rows, _ = predict_overlaps(SHIPPED / "gemm_collective.csv")
    experts = [row for row in rows if row.row["op"].startswith("moe_")]
    unseen = [row for row in experts if not row.fitted]
    assert (len(experts), len(unseen)) == (8, 5)
    assert all(row.right_sign for row in experts)
    assert np.median([abs(row.error) for row in unseen]) < 0.1
