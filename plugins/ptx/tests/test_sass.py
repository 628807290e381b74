"""SASS traces of Accel-Sim: instructions, registers and addresses as they were written, and what is wrong with them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dse.cli import main
from dse.errors import ConfigError
from dse_ptx.coalescing import SHARED, coalesce
from dse_ptx.sass import _addresses, read_sass, unit_of
from dse_ptx.sms import sm_array
from dse_ptx.timing import time_launch
from dse_ptx.trace_list import read_list
from dse_ptx.warp_trace import Unit

_HEADER = """-kernel name = scale
-grid dim = (4,1,1)
-block dim = (64,1,1)
-shmem = 0
-nregs = 16
-accelsim tracer version = 4
"""
_WARP = """0000 ffffffff 1 R1 MOV 0 0
0010 ffffffff 1 R4 LDG.E.64 2 R2 R255 8 1 {:#x} 8
0020 ffffffff 1 R6 FFMA 3 R4 R5 R4 0
0030 0000ffff 0 STG.E 2 R2 R6 4 2 {:#x} 4 4 4 4 4 4 4 4 4 4 4 4 4 4 4
0040 ffffffff 0 EXIT 0 0
"""


def _text(blocks: int = 4, body: str = _WARP) -> str:
    parts = [_HEADER]
    for block in range(blocks):
        parts.append(f"#BEGIN_TB\nthread block = {block},0,0\n")
        for warp in range(2):
            first = 0x7F0000000000 + 4096 * (2 * block + warp)
            parts.append(f"warp = {warp}\ninsts = 5\n" + body.format(first, first + 2048))
        parts.append("#END_TB\n")
    return "".join(parts)


def test_instructions_of_a_trace_are_those_that_were_written(tmp_path: Path) -> None:
    path = tmp_path / "kernel-1.traceg.gz"
    path.write_bytes(gzip.compress(_text().encode()))
    trace = read_sass(path)
    assert trace.code.opcodes == ("MOV", "LDG.E.64", "FFMA", "STG.E", "EXIT")
    assert trace.code.units.tolist() == [Unit.INTEGER, Unit.GLOBAL_LOAD, Unit.FP32, Unit.GLOBAL_STORE, Unit.EXIT]
    assert trace.code.writes[1].tolist() == [4, 5]  # 64 bits are two registers
    assert trace.code.reads[1].tolist() == [2, -1, -1]  # R255 is zero
    assert trace.blocks.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert (trace.num_blocks, trace.threads_per_block, trace.registers_per_thread) == (4, 64, 16)
    assert trace.addresses[1, :16].tolist() == [0x7F0000000800 + 4 * lane for lane in range(16)]
    assert not trace.addresses[1, 16:].any()
    assert len(read_sass(path, most_blocks=2).blocks) == 4


@given(st.lists(st.integers(0, 2**40), min_size=32, max_size=32), st.integers(1, 2**32 - 1))
def test_each_mode_of_addresses_is_read_alike(places: list[int], mask: int) -> None:
    lanes = [lane for lane in range(32) if mask >> lane & 1]
    listed = [places[lane] for lane in lanes]
    differences = [hex(listed[0]), *map(str, np.diff(listed))]
    row = _addresses(0, [hex(place) for place in listed], mask)
    assert np.array_equal(row, _addresses(2, differences, mask))
    assert [int(row[lane]) for lane in range(32)] == [places[lane] if lane in lanes else 0 for lane in range(32)]


@pytest.mark.parametrize(
    ("opcode", "unit"),
    {"HMMA.16816.F32": Unit.TENSOR, "MUFU.RCP": Unit.SPECIAL, "DEPBAR.LE": Unit.INTEGER, "DFMA": Unit.FP64,
     "BAR.SYNC": Unit.BARRIER, "BRA": Unit.BRANCH, "IMAD.WIDE": Unit.INTEGER, "LDS.128": Unit.SHARED_LOAD,
     "RED.E.ADD": Unit.GLOBAL_ATOMIC, "F2I": Unit.SPECIAL, "FSETP.GT": Unit.FP32, "HADD2": Unit.FP16}.items(),
)  # fmt: skip
def test_opcodes_have_their_pipelines(opcode: str, unit: Unit) -> None:
    assert unit_of(opcode) == unit


def test_matrices_of_a_trace_are_loaded_and_multiplied_in_their_shapes(tmp_path: Path) -> None:
    path, places = tmp_path / "kernel-1.traceg", " ".join(hex(16 * lane) for lane in range(32))
    body = f"0010 ffffffff 1 R4 LDSM.16.M88.4 1 R2 16 0 {places}\n"
    body += "0020 ffffffff 1 R8 HGMMA.64x8x16.F32 2 R4 R8 0\n0030 ffffffff 1 R12 IMMA.16832.S8.S8 2 R4 R8 0\n"
    path.write_text(_text(1, body), "utf-8")
    trace = read_sass(path)
    assert trace.code.units.tolist() == [Unit.SHARED_LOAD, Unit.TENSOR, Unit.TENSOR]
    assert trace.code.writes[0].tolist() == [4, 5, 6, 7]
    assert trace.code.operations.tolist() == [0, 2 * 64 * 8 * 16 / 128, 2 * 16 * 8 * 32 / 32]
    kinds, active = np.full(2, SHARED, np.int8), np.full(2, 0xFFFFFFFF, np.uint32)
    # rows of 16 bytes, one after another: all banks four times
    assert coalesce(trace.addresses, active, trace.bytes_per_lane, kinds).passes.tolist() == [4, 4]


@pytest.mark.parametrize(
    ("line", "rule"),
    [("0010 ffffffff 1 R4 LDG.E 1", "cut short"), ("0010 ffffffff 1 R4 LDG.E 1 R2 4 7 0x0 4", "address mode 7"),
     ("zz", "cut short"), ("0010 f 1 R4 LDG.E 1 R2 4 0 0x0 0x4", "2 addresses for 4")],
)  # fmt: skip
def test_wrong_lines_are_named(tmp_path: Path, line: str, rule: str) -> None:
    path = tmp_path / "kernel-1.traceg"
    path.write_text(_text(1, line + "\n"), "utf-8")
    with pytest.raises(ConfigError, match=f"line 11.*{rule}"):
        read_sass(path)


@pytest.mark.more
def test_a_trace_is_timed(tmp_path: Path) -> None:
    path = tmp_path / "kernel-1.traceg"
    path.write_text(_text(), "utf-8")
    done = time_launch(read_sass(path), sm_array("v100"))
    assert done.instructions == 8 * 5
    assert done.flop == 8 * 32 * 2
    assert done.cycles > sm_array("v100").memory.gpu.dram.hop_s / sm_array("v100").cycle_s


@pytest.mark.more
def test_an_application_lasts_as_long_as_its_kernels_and_tells_what_is_not_timed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for kernel, blocks in ((1, 4), (2, 40)):
        text = _text(blocks).replace("(4,1,1)", f"({blocks},1,1)")
        (tmp_path / f"kernel-{kernel}.traceg").write_text(text, "utf-8")
    copies = "MemcpyHtoD,0x7f0000000000,2048\n"
    (tmp_path / "kernelslist.g").write_text(f"{copies}kernel-1.traceg\n{copies}kernel-2.traceg\nncclSend\n", "utf-8")
    for name in ("kernelslist.g", "kernel-1.traceg", "kernel-2.traceg"):
        assert main(["ptx", "time", f"file={tmp_path / name}", "system=v100", f"out={tmp_path / name}.out"]) == 0
    assert "not timed: 2 MemcpyHtoD of 4096 bytes; 1 ncclSend" in capsys.readouterr().out
    times = [json.loads(path.read_text("utf-8"))["seconds"] for path in sorted(tmp_path.glob("*/time.json"))]
    assert max(times) == pytest.approx(sum(times) / 2)
    rows = pd.read_parquet(next(tmp_path.glob("*/launches.parquet")))
    assert rows["instructions"].tolist() == [8 * 5, 80 * 5]


@pytest.mark.parametrize(
    ("lines", "rule"),
    [("MemcpyHtoD,0x0", "line 1.*is no copy"), ("#\nkernel-9.traceg", "line 2.*not there"), ("", "lists no kernels"),
     ("kernel-1.trace", "by time")],
)  # fmt: skip
def test_wrong_lists_are_refused(tmp_path: Path, lines: str, rule: str) -> None:
    (tmp_path / "kernel-1.trace").touch()
    (tmp_path / "kernelslist.g").write_text(lines, "utf-8")
    with pytest.raises(ConfigError, match=rule):
        read_list(tmp_path / "kernelslist.g")
