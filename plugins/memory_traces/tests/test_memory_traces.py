"""Memory traces of one's own: tables and Accel-Sim's format, what is wrong with them, and what a replay finds."""

from __future__ import annotations

import gzip
import itertools
import json
import lzma
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from dse.cli import main
from dse.errors import ConfigError
from dse.results.run_folder import Outputs
from dse.space import set_path
from dse_memory.design import MemoryDesign
from dse_memory.program import Region, Touch, Writer
from dse_memory.simulation import Simulation
from dse_memory_traces import accelsim
from dse_memory_traces.recorded import ADDRESS, CU, STORE, RequestRecording, reach, read
from dse_memory_traces.statistics import RecordingReplay, banks, channels, design_of, run, sets, statistics_record
from tests.support import shipped

LINE = 64


def design(policy: str = "cache_rw", **changes: Any) -> MemoryDesign:
    """A small machine of two CUs."""
    trees = {"system": shipped("system")["gem5_gcn3"], "policy": shipped("policy")[policy]}
    sampled = {"policy.predictor.sampled_sets": 4} if policy == "combined" else {}
    for path, value in {"system.gpu.num_cus": 2, "system.gpu.l2.bytes": 1 << 18, **sampled, **changes}.items():
        set_path(trees, path, value)
    return design_of(trees["system"], trees["policy"])


def recording(path: Path, point: MemoryDesign, **options: Any) -> RequestRecording:
    return read(path, point.system, point.policy, **options)


def replay(path: Path, point: MemoryDesign, **options: Any) -> RecordingReplay:
    return run(recording(path, point, **options), point)


def seen(done: RecordingReplay) -> tuple[Any, ...]:
    """All that a replay counted and when it ended."""
    kinds = ("by_set", "by_channel", "bins_dram")
    return (done.totals, done.machine.now, *(done.machine.part(kind).tolist() for kind in kinds))


def table(folder: str | Path, rows: Sequence[dict[str, Any]]) -> Path:
    path = Path(folder) / "one.csv"
    pd.DataFrame(rows).to_csv(path, index=False)
    return path


ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "address": st.integers(0, 1 << 22),
            "cu": st.integers(0, 1),
            "store": st.booleans(),
            "bytes": st.integers(1, 300),
            "pc": st.integers(-5, 5),
        }
    ),
    min_size=1,
    max_size=60,
)


# Tables


@pytest.mark.slow
@settings(max_examples=25)
@given(rows=ROWS, policy=st.sampled_from(["combined", "cache_r", "uncached"]))
def test_a_csv_and_a_parquet_of_the_same_rows_give_the_same_statistics(rows: list[dict[str, Any]], policy: str) -> None:
    point = design(policy)
    with tempfile.TemporaryDirectory() as folder:
        csv, other, text = (Path(folder) / name for name in ("one.csv", "other.parquet", "text.csv.gz"))
        pd.DataFrame(rows).to_csv(csv, index=False)
        pd.DataFrame(rows).to_parquet(other, index=False)
        pd.DataFrame([{**row, "address": hex(row["address"])} for row in rows]).to_csv(text, index=False)
        statistics = [seen(replay(path, point)) for path in (csv, other, text)]
    assert statistics[0] == statistics[1] == statistics[2]


@settings(max_examples=25)
@given(rows=ROWS, policy=st.sampled_from(["combined", "cache_r", "cache_rw_ab"]))
def test_sets_and_channels_add_up_to_the_totals(rows: list[dict[str, Any]], policy: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        done = replay(table(folder, rows), design(policy))
    total, of_sets, of_channels = done.totals, sets(done.machine), channels(done.machine)
    num_lines = sum((row["address"] + row["bytes"] - 1) // LINE - row["address"] // LINE + 1 for row in rows)
    assert total["requests"] == num_lines
    assert of_sets["lookups"].sum() == num_lines - total["l1_hits"] - total["l1_merged"]
    there = of_sets["lookups"].sum() - of_sets["misses"].sum()
    assert total["l2_hits"] <= there <= total["l2_hits"] + total["l2_merged"]
    assert of_channels["reads"].sum() == total["reads"] == total["l2_misses"]
    assert of_channels["writes"].sum() == total["writes"]
    of_banks = banks(done.machine).groupby("channel")[["accesses", "row_hits"]].sum()
    assert of_banks["accesses"].tolist() == (of_channels["reads"] + of_channels["writes"]).tolist()
    assert of_banks["row_hits"].tolist() == of_channels["row_hits"].tolist()
    assert (of_channels["row_hits"] + of_channels["activations"]).sum() == total["reads"] + total["writes"]


def test_high_addresses_are_moved_down_by_whole_gib_and_too_wide_ones_refused(tmp_path: Path) -> None:
    point, high = design(), 0x7F12_3456_7840
    low = high % (1 << 30)
    done = replay(table(tmp_path, [{"address": high}, {"address": high + 4096}]), point)
    assert done.recording.base == high - low
    same = replay(table(tmp_path, [{"address": low}, {"address": low + 4096}]), point)
    assert same.recording.base == 0
    assert seen(done) == seen(same)
    assert reach(point.system) == 2**41
    with pytest.raises(ConfigError, match="span more than 2048 GiB"):
        recording(table(tmp_path, [{"address": 0}, {"address": 2**41}]), point)


# What is wrong


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("adress\n1\n", ["bad.csv, line 1 = 'adress'", "did you mean `address`?", "has no column address"]),
        ("address,address\n1,1\n", ["names a column twice"]),
        ("address;cu\n1;1\n", ["separate columns by commas"]),
        ("address\n", ["holds no requests"]),
        ("", ["has no column address"]),
        ("address,cu\n1,0\n7f00,0\n", ["line 3, address = '7f00'", "write hexadecimal numbers with 0x"]),
        ("address,cu\n1,2\n-1,0\n", ["line 2, cu = '2'", "system.gpu.num_cus = 2", "line 3, address = '-1'"]),
        ("address,cu\n1,0\n1\n,1\n", ["line 3: has 1 cells, not 2", "line 4, address: is missing"]),
        ("address,store\n1,2\n2,yes\n", ["line 2, store = '2'", "line 3, store = 'yes'", "0 or 1"]),
        ("address,bytes,time_ns\n1,0,0\n1,1,-1\n1,1,nan\n", ["line 2, bytes", "line 3, time_ns", "line 4, time_ns"]),
        ('address\n"1\n', ["is no CSV"]),
    ],
)
def test_what_is_wrong_with_a_table_is_told_by_line_and_column(text: str, parts: list[str], tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        recording(path, design())
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("columns", "part"),
    [
        ({"address": [1.0, 2.5]}, "bad.parquet, row 2, address = 2.5"),
        ({"address": pd.array([1, None], "Int64")}, "row 2, address: is missing"),
        ({"address": ["0x10", "x"]}, "row 2, address = 'x'"),
        ({"address": np.array([1, 2**63], np.uint64)}, "row 2, address = 9223372036854775808"),
        ({"address": pd.to_datetime(["2020-01-01", "2020-01-02"])}, "bad.parquet, address: holds timestamp"),
        ({"address": [1, 2], "warp": [0, 0]}, "bad.parquet = 'warp': is no column"),
    ],
)
def test_what_is_wrong_with_a_parquet_is_told_by_row_and_column(
    columns: dict[str, Any], part: str, tmp_path: Path
) -> None:
    path = tmp_path / "bad.parquet"
    pd.DataFrame(columns).to_parquet(path)
    with pytest.raises(ConfigError) as error:
        recording(path, design())
    assert part in str(error.value)


@pytest.mark.nightly
def test_every_bit_of_a_parquet_is_read_or_refused(tmp_path: Path) -> None:
    path, machine = tmp_path / "bits.parquet", design()
    pd.DataFrame({"address": [0, 64, 128], "store": [True, False, True]}).to_parquet(path)
    data, refused = bytearray(path.read_bytes()), 0
    for place, bit in itertools.product(range(len(data)), range(8)):
        data[place] ^= 1 << bit
        path.write_bytes(data)
        try:
            recording(path, machine)
        except ConfigError:
            refused += 1
        data[place] ^= 1 << bit
    assert refused > 100


# Accel-Sim

HEADER = """\
-kernel name = _Z3addPf
-kernel id = 1
-grid dim = (3,1,1)
-block dim = (64,1,1)
-shmem base_addr = 0x00007f0000000000
-local mem base_addr = 0x00007f0002000000
-accelsim tracer version = {version}
-enable lineinfo = {lineinfo}

#traces format = threadblock_x threadblock_y threadblock_z warpid_tb PC mask dest_num [reg_dests] opcode src_num ...
"""
BLOCKS = """
#BEGIN_TB

thread block = 0,0,0

warp = 0
insts = 6
{lead}0000 ffffffff 1 R1 IMAD.MOV.U32 2 R255 R255 0
{lead}0010 ffffffff 1 R4 LDG.E 1 R2 4 1 0x1000 4 0
{lead}0020 00000005 1 R4 LDG.E.64 1 R2 8 0 0x2000 0x2fc8
{lead}0030 ffffffff 1 R6 LDS 1 R2 4 1 0x10 4
{lead}0040 0000000f 0 STG.E 2 R2 R4 4 2 0x4000 4 -4 64 0
{lead}0050 00000000 0 STG.E 2 R2 R4 4 2 0x0

warp = 1
insts = 3
{lead}0000 ffffffff 1 R1 IMAD.MOV.U32 2 R255 R255 0
{lead}0010 00f00000 1 R4 LDG.E.128 1 R2 16 1 0x8038 -64
{lead}0060 00000001 0 RED.E.ADD 2 R2 R4 4 0 0x9000

#END_TB

#BEGIN_TB
thread block = 1,0,0
warp = 0
insts = 2
{lead}0070 00000001 1 R4 LD.E 1 R2 4 0 0x00007f0000000100
{lead}0080 00000001 1 R4 LD.E 1 R2 4 0 0xa000
#END_TB

#BEGIN_TB
thread block = 2,0,0
warp = 0
insts = 1
{lead}0010 00000001 1 R4 LDG.E.U8 1 R2 1 0 0x103f
#END_TB
"""
EXPECTED = [
    *[(0, 0x1000, 0), (0, 0x1040, 0)],  # base and stride: 32 lanes of 4 bytes
    *[(0, 0x8000, 0), (0, 0x8040, 0), (0, 0x7FC0, 0), (0, 0x7F80, 0), (0, 0x7F40, 0)],  # of warp 1, over ends of lines
    *[(0, 0x2000, 0), (0, 0x2FC0, 0)],  # a list for lanes 0 and 2
    *[(0, 0x9000, 0), (0, 0x9000, 1)],  # what is atomic reads and writes
    *[(0, 0x4000, 1), (0, 0x4040, 1)],  # base and differences
    (1, 0xA000, 0),  # not the generic load of shared memory
    (0, 0x1000, 0),  # the third block, on CU 0 again
]


def kernel(
    folder: Path, name: str = "kernel-1.traceg", version: int = 3, lineinfo: int = 0, body: str = BLOCKS
) -> Path:
    lead = ("0 0 0 1 " if version < 3 else "") + ("17 " if lineinfo else "")
    path = folder / name
    text = HEADER.format(version=version, lineinfo=lineinfo) + body.format(lead=lead)
    packed: dict[str, Any] = {".gz": gzip.compress, ".xz": lzma.compress}
    path.write_bytes(packed.get(path.suffix, bytes)(text.encode()))
    return path


@pytest.mark.parametrize(
    ("name", "version", "lineinfo"),
    [
        ("kernel-1.traceg", 3, 0),
        ("kernel-1.traceg.xz", 5, 1),
        ("kernel-1.traceg.gz", 2, 0),
        ("kernel-1.traceg", 1, 1),
    ],
)
def test_a_kernel_of_accel_sim_asks_for_these_lines(name: str, version: int, lineinfo: int, tmp_path: Path) -> None:
    recorded_kernel = recording(kernel(tmp_path, name, version, lineinfo), design())
    assert [tuple(row) for row in recorded_kernel.rows[:, (CU, ADDRESS, STORE)].tolist()] == EXPECTED
    assert recorded_kernel.parts == (("_Z3addPf", len(EXPECTED)),)
    assert recorded_kernel.skipped == {"LDS": 1, "LD (shared or local)": 1}
    assert len(recorded_kernel.stores) == 6  # 0010 of both warps is one, 0060 two
    assert recorded_kernel.stores.sum() == 2


def test_kernels_of_a_list_are_replayed_one_after_another(tmp_path: Path) -> None:
    kernel(tmp_path, "kernel-1.traceg.xz")
    kernel(tmp_path, "kernel-2.traceg")
    listed = tmp_path / "kernelslist.g"
    listed.write_text("MemcpyHtoD,0x0000000000001000,400\nkernel-1.traceg.xz\nMemcpyHtoD,0x0,4\nkernel-2.traceg\n")
    done = replay(listed, design())
    assert [cost.totals[0] for cost, _ in done.found.costs] == [len(EXPECTED)] * 2
    assert done.found.costs[1][0].totals[7] == 0  # L2 holds what the first kernel has read


@pytest.mark.parametrize(
    ("old", "new", "parts"),
    [
        ("4 1 0x1000 4 0", "4 3 0x1000 4 0", ["kernel-1.traceg, line 19: is no instruction: address mode 3"]),
        ("8 0 0x2000 0x2fc8", "8 0 0x2000", ["line 20", "1 addresses for 2 active lanes"]),
        ("8 0 0x2000 0x2fc8", "8 1 0x2000 4", ["line 20", "neighbouring active lanes"]),
        ("2 0x4000 4 -4 64 0", "2 0x4000 4", ["line 22", "2 addresses for 4 active lanes"]),
        ("0x103f", "0x10zf", ["line 45", "invalid literal"]),
        ("0x103f", "0xffffffffffffffff", ["line 45", "from 0 to 2^62"]),
        ("LDG.E.U8 1 R2 1 0 0x103f", "LDG.E.U8", ["line 45", "is cut short"]),
        ("insts = 1\n", "insts = 9\n", ["line 46", "after 1 instructions; insts = 9"]),
        ("0x103f\n#END_TB", "0x103f", ["ends inside a thread block"]),
        ("warp = 1", "warp = x", ["line 25: is no number of warp"]),
        ("#BEGIN_TB\n\nthread block = 0,0,0\n", "", ["outside of a thread block", "post-traces-processing"]),
    ],
)
def test_what_is_wrong_with_a_kernel_is_told_by_line(old: str, new: str, parts: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        recording(kernel(tmp_path, body=BLOCKS.replace(old, new)), design())
    for part in parts:
        assert part in str(error.value)


def test_a_list_of_absent_or_ungrouped_kernels_and_a_damaged_one_are_refused(tmp_path: Path) -> None:
    listed = tmp_path / "kernelslist"
    (tmp_path / "kernel-2.trace").write_text("")
    listed.write_text("kernel-1.traceg\nkernel-2.trace\n")
    with pytest.raises(ConfigError, match=r"(?s)line 1 = 'kernel-1.traceg': names a kernel that is not there.*line 2"):
        accelsim.files(listed)
    listed.write_text("MemcpyHtoD,0x0,4\n")
    with pytest.raises(ConfigError, match="lists no kernels"):
        accelsim.files(listed)
    path = kernel(tmp_path, "kernel-1.traceg.xz")
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ConfigError, match="is damaged"):
        recording(path, design())


# Replay


@pytest.mark.parametrize("policy", ["cache_rw", "uncached", "cache_rw_ab_cr"])
def test_a_replay_takes_what_the_same_accesses_of_a_program_take(policy: str, tmp_path: Path) -> None:
    """One workgroup that loads and then stores, line by line, without waiting."""
    point, region = design(policy), Region(0, (1 << 16,), 4)
    writer = Writer(0).load(Touch(region, 8192, rows=3, step=32768)).store(Touch(region, 4096, offset=16384))
    machine = Simulation(point.system, point.policy, held=1, per_set=True)
    cost = machine.launch(writer.program("same", (1,)), 1e12, 1e9)
    places = [32768 * row + line for row in range(3) for line in range(0, 8192, LINE)]
    rows = [{"address": place, "store": 0, "pc": 0} for place in places]
    rows += [{"address": 16384 + line, "store": 1, "pc": 1} for line in range(0, 4096, LINE)]
    done = replay(table(tmp_path, rows), point)
    assert done.found.costs[0][0].seconds == cost.seconds
    assert np.array_equal(done.found.costs[0][0].totals, cost.totals)
    for part in ("by_set", "by_channel", "bins_dram"):
        assert np.array_equal(done.machine.part(part), machine.part(part))


# The command


@pytest.mark.nightly
def test_the_command_writes_statistics_tables_and_a_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"address": hex(256 * place), "cu": place % 64, "store": place % 4 == 3} for place in range(2000)]
    pd.DataFrame(rows).to_csv("my.csv", index=False)
    assert main(["profile", "memory", "data=my.csv", "system.gpu.l2.bytes=8388608"]) == 0
    outputs = Outputs(Path("outputs/trace/my"))
    report = outputs.read_json("statistics")
    assert report["totals"]["requests"] == report["statistics"]["requests"] == report["rows"] == 2000
    assert report["system"] == "gem5_gcn3"
    assert report["constants"]["system.gpu.l2.bytes"]["value"] == 8388608
    assert report["made"]["command"][3:] == ["profile", "memory", "data=my.csv", "system.gpu.l2.bytes=8388608"]
    assert len(outputs.read_table("sets")) == 8192
    assert outputs.read_table("channels")[["reads", "writes"]].sum().to_list() == [1500, 500]
    assert outputs.read_table("activity")["lines"].sum() == 2000
    assert (outputs.figures / "activity.png").is_file()
    assert yaml.safe_load((outputs.folder / "config.yaml").read_text())["system"]["gpu"]["l2"]["bytes"] == 8388608
    output = capsys.readouterr().out
    assert "row_hit_rate" in output
    assert "busiest of 16 channels" in output
    num_cus: dict[str, Any] = {"system.gpu.num_cus": 64}
    assert json.dumps(statistics_record(replay(Path("my.csv"), design(**num_cus))), allow_nan=False)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ([], ["data", "is missing"]),
        (["data=none.csv"], ["is no file"]),
        (["data=my.csv", "sytem=x"], ["did you mean `system=x`?"]),
        (["data=my.csv", "system=mi100"], ["system.gpu.dram: is missing"]),
        (
            ["data=my.csv", "system.gpu.l2.byte=1"],
            ["system.gpu.l2.byte: is not a known key", "did you mean `system.gpu.l2.bytes`?"],
        ),
        (["data=my.csv", "system.nothing.byte=1"], ["system.nothing.byte = '1': is no path of a value"]),
        (["data=my.csv", "system.gpu.l2.bytes=5000"], ["no whole power of two"]),
        (["data=my.csv", "rows=x"], ["rows = 'x'"]),
        (["data=my.csv", "out=my.csv"], ["cannot be made"]),
        (["data=my.csv"], ["my.csv, line 2, address = 'x'"]),
    ],
    ids=" ".join,
)
def test_the_command_refuses_with_the_way_out(
    words: list[str],
    parts: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.csv").write_text("address\nx\n")
    assert main(["profile", "memory", *words]) == 2
    message = capsys.readouterr().err
    for part in parts:
        assert part in message


@pytest.mark.parametrize("name", ["odd.traceg.gz", "odd.parquet", "odd.csv"])
def test_a_file_that_nobody_writes_to_is_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / name)
    assert main(["profile", "memory", f"data={tmp_path / name}"]) == 2
    assert "FIFO" in capsys.readouterr().err


def test_a_packed_line_that_never_ends_is_not_unpacked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with gzip.open(tmp_path / "a.csv.gz", "wb") as file:
        for _ in range(64):
            file.write(b"0" * (1 << 20))
    assert main(["profile", "memory", f"data={tmp_path / 'a.csv.gz'}"]) == 2
    assert "line 1: is longer than" in capsys.readouterr().err


def test_a_table_of_other_columns_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other.csv").write_text("nm,m,n,k\nx,4096,8192,4096\n")
    assert main(["profile", "memory", f"data={tmp_path / 'other.csv'}"]) == 2
    message = capsys.readouterr().err
    assert "other.csv, line 1" in message
    assert "has no column address" in message
