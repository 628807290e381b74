"""Tables of overlaps that `study=overlap_measured` shows, and of all layouts that `study=operators` reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from dse.config.options import conf_dir
from dse_calibration.overlap_measured.gemm_collective import predict_overlaps
from dse_calibration.overlap_measured.overlap_tables import overlap_extras

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
        "no single GEMM": good.replace("ag_gemm", "moe_ag_scatter_gemm"),
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
