"""Texts and arrays of strangers: a changed operand or a damaged file is refused in a sentence, nothing is followed."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dse.cli import main
from dse.errors import ConfigError
from dse_ptx import commands
from dse_ptx.execution import Module, PtxDevice
from dse_ptx.hopper import HOPPER
from dse_ptx.instructions import MAKERS, NOTHING
from dse_ptx.kernels import kernel_text
from dse_ptx.operands import FORMS
from tests.support import damage, drawn

TEXT = kernel_text("triton_dropout")
LINES = [number for number, line in enumerate(TEXT.splitlines()) if line.startswith("\t") and line.endswith(";")]
OTHERS = ("%r1", "%p1", "0", "[%rd1]", "{%r1,%r2}", "_", "nosuch", "0f3F800000", "9" * 30)
CHANGES = ("drop", "add", "swap", "bare")
SAXPY = Path(__file__).parent / "field" / "hostile-npz" / "saxpy.ptx"


def test_every_instruction_has_its_numbers_of_operands() -> None:
    assert set(FORMS) == {*MAKERS, *HOPPER, *NOTHING}


@drawn(200)
@given(line=st.sampled_from(LINES), change=st.sampled_from(CHANGES), other=st.sampled_from(OTHERS), place=st.integers())
def test_a_changed_instruction_is_executed_or_refused(line: int, change: str, other: str, place: int) -> None:
    lines = TEXT.splitlines()
    words = lines[line].rstrip(";").split(", ")
    place %= len(words)
    if change == "drop":
        words.pop(place)
    elif change == "add":
        words.append(other)
    elif change == "swap":
        words[place] = other
    else:
        words[:] = [words[0].split()[0].partition(".")[0], *words[1:]] if words[0].split() else [other]
    lines[line] = ", ".join(words) + ";"
    try:
        module = Module("\n".join(lines), PtxDevice())
        module.kernel(module.program.kernels[0])
    except ConfigError:
        return


def run(arrays: Path, *more: str) -> int:
    """Exit code of a kernel on the arrays of a file."""
    words = [f"file={SAXPY}", "grid=4", "block=256", "arguments=2.0,x,x,0", f"data={arrays}", *more]
    return main(["ptx", "run", *words])


@drawn(60)
@given(data=st.data())
def test_damaged_arrays_are_refused(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("arrays") / "x.npz"
    np.savez_compressed(path, x=np.arange(100, dtype=np.float32))
    damage(path, data, most=3)
    try:
        read = commands._arrays(str(path))
    except ConfigError:
        return
    assert all(isinstance(values, np.ndarray) for values in read.values())


@pytest.mark.parametrize("shape", [(2**30,), (2**60, 2**20)])
def test_declared_sizes_are_added_up_before_anything_is_unpacked(
    shape: tuple[int, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"shape": shape, "fortran_order": False, "descr": "<f4"})
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr("x.npy", header.getvalue())
    assert run(tmp_path / "x.npz") == 2
    assert "holds arrays of" in capsys.readouterr().err


@pytest.mark.slow
def test_a_link_is_replaced_and_never_written_through(tmp_path: Path) -> None:
    arrays, victim, out = (tmp_path / name for name in ("x.npz", "victim", "out.npz"))
    np.savez(arrays, x=np.arange(4, dtype=np.float32))
    victim.write_text("keep")
    out.symlink_to(victim)
    assert run(arrays, f"out={out}") == 0
    assert victim.read_text() == "keep"
    assert not out.is_symlink()
    assert np.load(out)["x"].tolist() == [0, 1, 2, 3]
