"""Counts of instructions: what is compared, recorded and told, with a stand-in for Valgrind."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest

from benchmarks import instructions
from simulators.compiled import dispatcher_of

VALGRIND = """#!/bin/sh
case "$*" in
    *"--run fluid_64 2") count=3,000,500 ;;
    *"--run fluid_64 1") count=2,000,500 ;;
    *"-c import dse") count=150,000,000 ;;
    *"-c pass") count=50,000,000 ;;
    *) echo "no such program" >&2; exit 1 ;;
esac
echo "==1== I   refs:      $count" >&2
"""


@pytest.fixture
def counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for Valgrind, and a history of its own; the file of that."""
    program, history = tmp_path / "bin" / "valgrind", tmp_path / "records" / "instructions.json"
    program.parent.mkdir()
    program.write_text(VALGRIND)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.setattr(instructions, "path", lambda name: history)
    monkeypatch.setitem(instructions.WORKLOADS, "fluid_64", lambda: lambda: None)
    return history


def test_a_rise_is_told_unless_somebody_says_why(counted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["import dse", "--record"]
    assert instructions.main(words) == 0
    history = json.loads(counted.read_text())["history"]
    assert history[0]["counts"] == {"import dse": 100_000_000}
    history[0]["counts"] = {"import dse": 90_000_000, "store_4096": 7}
    counted.write_text(json.dumps({"history": history}))
    capsys.readouterr()
    assert instructions.main(["import dse"]) == 1
    output = capsys.readouterr()
    assert "+11.1 %" in output.out
    assert f"import dse takes 11.1 % more than {history[0]['commit'][:12]} did" in output.err
    assert instructions.main([*words, "--why", "imports are checked"]) == 0
    newest = instructions.read()[-1]
    assert newest["why"] == "imports are checked"
    assert newest["counts"] == {"import dse": 100_000_000, "store_4096": 7}
    assert instructions.rises({"a": 104, "b": 106, "c": 9}, {"counts": {"a": 100, "b": 100}}) == {
        "b": pytest.approx(0.06)
    }


def test_without_valgrind_and_for_unknown_workloads_the_way_out_is_told(
    counted: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, part in (
        (["fluid"], "fluid: no such workload; there are import dse"),
        (["import dse"], "valgrind is not on"),
    ):
        monkeypatch.setenv("PATH", str(counted.parent))
        with pytest.raises(SystemExit) as end:
            instructions.main(words)
        assert end.value.code == 2
        assert part in capsys.readouterr().err


@pytest.mark.parametrize("name", ["fluid_64", "lowering_512", "end_to_end_256", "store_4096", "enumeration_4096"])
def test_every_workload_can_be_repeated(name: str) -> None:
    repetition = instructions.WORKLOADS[name]()
    repetition()
    repetition()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [*(f"calls of {name}" for name in instructions.CALLS), *(f"operations of {name}" for name in instructions.KERNELS)],
)
def test_no_workload_takes_more_than_the_record_says(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is added on purpose is recorded: `python -m benchmarks.instructions "calls of ..." --record --why "..."`."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    last = instructions.read()[-1]
    if other := [library for library, version in instructions.about().items() if last[library] != version]:
        pytest.skip(f"the record is of another version of {', '.join(other)}")
    count = instructions.instructions(name)
    assert count <= (1 + instructions.MOST_RISE) * last["counts"][name]


@pytest.mark.nightly
@pytest.mark.parametrize("name", instructions.KERNELS)
def test_a_kernel_in_python_comes_to_what_it_is_compiled_to(name: str) -> None:
    """So that its operations are those of the same work, and the same each time."""
    assert instructions.operations(name) == instructions.operations(name) > 1000
    (compiled, expected), (_, arguments) = (instructions.kernel_of(name) for _ in range(2))
    with np.errstate(all="ignore"):
        dispatcher_of(compiled).py_func(*arguments)
    compiled(*expected)
    rows = -1 if name == "many_classes" else -2
    np.testing.assert_array_equal(arguments[rows], expected[rows])
    assert name == "many_classes" or not expected[-1].any()  # no design was left to another kernel
