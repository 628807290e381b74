"""Tables as other programs write them: the rows that they hold, and what they lack."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dse.errors import ConfigError
from dse_calibration.calibrate import read_table
from dse_calibration.foreign import precision_of
from dse_calibration.measurements import MeasuredRows

_PART = "    time   algbw   busbw #wrong"
HEADER = f"#       size         count      type   redop    root {2 * _PART}"
UNITS = "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)"


def rows_of(folder: Path, text: str, name: str = "table.csv") -> list[MeasuredRows]:
    """Rows of a table of this text."""
    (folder / name).write_text(text)
    return read_table(folder / name)


def log(test: str, hosts: Sequence[str], sizes: Sequence[tuple[int, float, float]], wrong: str = "0") -> str:
    """A log of nccl-tests: (size, time out of place, time in place) [us]."""
    lines = [f"# Collective test starting: {test}", "# nThread 1 nGpus 1 minBytes 8 maxBytes 64", "# Using devices"]
    lines += [
        f"#  Rank {rank:2} Group  0 Pid {rank} on {host} device  {rank % 8} [0x07] NVIDIA H100 80GB HBM3"
        for rank, host in enumerate(hosts)
    ]
    lines += [HEADER, UNITS]
    lines += [f"{size} {size // 4} float sum -1 {out} 1.0 1.0 0 {into} 1.0 1.0 {wrong}" for size, out, into in sizes]
    return "\n".join(lines) + "\n# Avg bus bandwidth    : 1.0\n"


SIZES = st.lists(st.tuples(st.integers(4, 2**34), st.floats(1, 1e6), st.floats(1, 1e6)), min_size=1, max_size=9)


@given(SIZES, st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "alltoall"]), st.integers(1, 3))
def test_a_log_of_nccl_tests_holds_each_size_out_of_place_and_in_place(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[tuple[int, float, float]], test: str, nodes: int
) -> None:
    hosts = [f"node-{rank // 8}" for rank in range(8 * nodes)]
    (rows,) = rows_of(tmp_path_factory.mktemp("log"), log(f"{test}_perf", hosts, sizes), "out.log")
    assert rows.kind == test.replace("alltoall", "all_to_all") + ("_across_nodes" if nodes > 1 else "")
    assert set(rows.shape["gpus"]) == {8.0 * nodes}
    assert rows.shape["bytes"].tolist() == [size for size, *_ in sizes for _ in range(2)]
    assert rows.seconds[:, 0] == pytest.approx([1e-6 * time for _, *times in sizes for time in times])
    assert rows.device == "NVIDIA H100 80GB HBM3"


def test_wrong_results_are_counted_and_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (rows,) = rows_of(tmp_path, log("all_reduce_perf", ["a"] * 4, [(64, 1.0, 2.0)], "3"), "x.log")
    assert rows.seconds.tolist() == [[1e-6]]
    assert "1 rows with wrong results are skipped" in capsys.readouterr().err
    assert rows_of(tmp_path, log("all_gather_perf", ["a"] * 4, [(64, 1.0, 2.0)], "N/A"), "y.log")[0].size == 2


@given(st.integers(1, 5000), st.sampled_from([1, 2, 4, 8]), st.booleans())
def test_a_profile_of_vidur_holds_the_products_of_its_model(
    tmp_path_factory: pytest.TempPathFactory, tokens: int, tp: int, gated: bool
) -> None:
    ops = ["attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj", "input_layernorm", "emb"]
    columns = [f"time_stats.{op}.{what}" for op in ops for what in ("min", "median")]
    columns += ["n_head", "n_kv_head", "n_embd", "n_expanded_embd", "use_gated_mlp", "num_tokens"]
    values = [*(0.25, 0.5) * len(ops), 32, 8, 4096, 11008, gated, tokens]
    text = ",".join([*columns, "num_tensor_parallel_workers"]) + "\n" + ",".join(map(str, [*values, tp])) + "\n"
    gemms, norms = rows_of(tmp_path_factory.mktemp("vidur"), text)
    shapes = list(zip(*(gemms.shape[name].tolist() for name in "mnk"), strict=True))
    wide, narrow = 6144 / tp, 11008 / tp
    assert shapes == [
        (wide, tokens, 4096),
        (4096, tokens, 4096 / tp),
        ((1 + gated) * narrow, tokens, 4096),
        (4096, tokens, narrow),
    ]
    assert (gemms.precision, norms.kind) == ("fp16", "norm")
    assert np.all(gemms.seconds == 0.5e-3)


def test_collectives_of_vidur_are_of_its_workers_and_nodes(tmp_path: Path) -> None:
    text = (
        "time_stats.all_reduce.median,rank,num_workers,size,collective,devices_per_node\n0.05,0,16,2048,all_reduce,8\n"
    )
    (rows,) = rows_of(tmp_path, text)
    assert (rows.kind, rows.library) == ("all_reduce_across_nodes", "vidur")
    assert [rows.shape[name][0] for name in ("gpus", "nodes", "bytes")] == [16, 2, 2048]


@pytest.mark.parametrize(
    ("name", "meant"),
    [("torch.bfloat16", "bf16"), ("f16_r", "fp16"), ("f8_fnuz_r", "fp8"), ("float8_e4m3fn", "fp8"),
     ("torch.float8_e4m3fnuz", "fp8"), ("h", "fp16"), ("f32_r", "fp32"), ("i8_r", "i8_r"), ("fp8_block", "fp8_block"),
     ("fp8_static", "fp8")],
)  # fmt: skip
def test_names_of_precisions_are_those_of_their_formats(name: str, meant: str) -> None:
    assert precision_of(name) == meant


def test_parquet_is_read_as_the_same_table_in_csv(tmp_path: Path) -> None:
    frame = pd.DataFrame(
        {
            "device": "X",
            "op_name": "gemm",
            "gemm_dtype": "bfloat16",
            "m": [1, 2],
            "n": 64,
            "k": 32,
            "latency": [0.5, 0.25],
        }
    )
    frame.to_csv(tmp_path / "a.csv", index=False)
    frame.to_parquet(tmp_path / "a.parquet")
    frame.rename(columns={"latency": "latency_us"}).assign(latency_us=frame.latency * 1e3).to_csv(
        tmp_path / "b.csv", index=False
    )
    first, *copies = (read_table(tmp_path / name)[0] for name in ("a.csv", "a.parquet", "b.csv"))
    assert first.seconds[:, 0].tolist() == [0.5e-3, 0.25e-3]
    for other in copies:
        assert other.names == first.names
        assert other.seconds == pytest.approx(first.seconds)


BENCH = "transA,transB,batch_count,m,n,k,a_type,us\n"


def test_blocks_of_a_bench_are_gemms_and_batches_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["T,N,1,8,16,32,bf16_r,10", "    N,C,1,8,16,64,bf16_r,20", "N,N,4,1,1,1,bf16_r,1"]
    text = "version\n" + "".join(f"[{place}]:{BENCH}  {line}\n" for place, line in enumerate(lines))
    (rows,) = rows_of(tmp_path, text, "bench.log")
    assert [rows.shape[name].tolist() for name in ("m", "n", "k", "ta", "tb")] == [
        [8, 8],
        [16, 16],
        [32, 64],
        [1, 0],
        [0, 1],
    ]
    assert rows.seconds[:, 0] == pytest.approx([10e-6, 20e-6])
    assert "1 rows of batches are skipped" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (log("all_reduce_perf", [], [(64, 1.0, 1.0)]), "is of 1 GPUs"),
        (log("all_reduce_perf", ["a"] * 2, [(64, 1.0, 1.0)]).replace("(us)", "(x)"), "has no unit of time above it"),
        (log("it", ["a"] * 2, [(64, 1.0, 1.0)]), "of a test that the log does not name"),
        (log("sendrecv_perf", ["a"] * 2, [(64, 1.0, 1.0)]), "is none whose constants are fitted"),
        (log("all_reduce_perf", ["a"] * 2, []), "holds no rows under a header"),
        ("transA,transB,M,N,K,us\nN,N,1,1,1,1\n", "has no precision"),
        (BENCH.replace(",us", ",Gflops") + "N,N,1,1,1,1,f16_r,5\n", "has no time in us, only transA"),
        ("M,N,K,us\n1,1,1,1\n", "has no column dtype, which a table of aiter needs; its columns: M, N, K, us"),
        ("time_stats.add.median,num_tokens\n1,1\n", "has no column n_embd, n_head"),
        ("time_stats.add.median,num_tokens,n_embd,n_head,n_kv_head,n_expanded_embd,num_tensor_parallel_workers\n1,1,1,x,1,1,1\n",
         "n_head = 'x': is no number"),
    ],
)  # fmt: skip
def test_tables_that_lack_something_are_refused_with_what_is_there_and_what_is_needed(
    tmp_path: Path, text: str, part: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        rows_of(tmp_path, text, "x")
    assert part in str(refused.value)
