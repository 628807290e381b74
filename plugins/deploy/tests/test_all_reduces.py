"""All-reduces of a step by kernels of serving software: what is written where there is a switch, and what is told."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from dse.cli import main
from dse_deploy.all_reduces import quick_reduce, sum_lines, sums_of_tp, symmetric_sums, without_custom_sums
from dse_deploy.planned_step import PlannedStep
from dse_deploy.step_calls import Call
from simulators.costs.collective import collective_seconds
from simulators.costs.other_software import ratio_error
from simulators.hardware.machine import System, tree_of


def calls(system: str, *beside: str, batch: int = 64, mode: str = "decode", tp: int = 8) -> tuple[Call, ...]:
    """Collectives of a step of Llama 3 70B."""
    words = ["model=llama3_70b", f"system={system}", f"run.mode={mode}", f"run.batch={batch}", f"parallel.tp={tp}"]
    words += beside
    step = PlannedStep.of(Path(), words)
    assert step is not None
    return step.facts(step.tree).calls


def exported(folder: Path, tool: str, *words: str) -> str:
    """Text of the file of a tool for a plan of tp among 8."""
    (folder / "plan.yaml").write_text("parallel: {tp: 8}\n")
    out = folder / tool
    step = ["model=llama3_70b", "run.mode=decode", "parallel.tp=8", *words]
    assert main(["settings", "export", f"plan={folder}/plan.yaml", f"to={tool}", f"out={out}", *step]) == 0
    (file,) = out.iterdir()
    return file.read_text()


@pytest.mark.parametrize(
    ("system", "fastest"),
    # on H200 no ratio of times was measured
    [("h100_8", True), ("b200_8", True), ("h200_8", None), ("a100_8", None), ("mi300x_8", None)],
)
def test_symmetric_memory_is_chosen_where_it_is_the_fastest(system: str, fastest: bool | None) -> None:
    of_step = calls(system)
    assert symmetric_sums(of_step, "bf16") is fastest
    sizes = {call.payload_bytes for call in sums_of_tp(of_step)}
    assert sizes == {64 * 8192 * 2}
    if fastest:
        machine = System.model_validate(tree_of(system))
        times = [float(collective_seconds(machine, "all_reduce", 2.0**20, 8, by)) for by in ("nccl_symmetric", "nccl")]
        assert times[0] < times[1]


def test_symmetric_memory_is_not_chosen_among_fewer_gpus_than_vllm_gives_it() -> None:
    assert symmetric_sums(calls("h100_8", batch=256, tp=4), "bf16") is True
    among_two = calls("h100_8", batch=256, tp=2)
    assert next(sum_lines(among_two, "bf16", ["SIZES"])).count("nccl_symmetric") == 1
    assert symmetric_sums(among_two, "bf16") is None


def test_custom_kernels_are_turned_off_only_where_they_surely_lose_at_all_sizes_that_they_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert without_custom_sums(calls("h100_8", batch=200), "bf16") is None  # 3.3 MB: 0.66 of NCCL's time
    switched = calls("h100_8", "parallel.collectives=in_switch", batch=200)
    assert without_custom_sums(switched, "bf16") is None  # in the switch 0.57: perhaps
    monkeypatch.setattr("simulators.costs.other_software.ratio_error", lambda: 0.01)
    assert without_custom_sums(switched, "bf16") is True
    monkeypatch.setattr("dse_deploy.all_reduces.ratio_gpus", lambda: ("b200",))
    assert without_custom_sums(switched, "bf16") is None
    monkeypatch.undo()
    for batch in (4, 4096):  # faster by custom kernels; not taken by them
        short = calls("h100_8", "parallel.collectives=in_switch", batch=batch)
        assert without_custom_sums(short, "bf16") is None


def test_quick_reduce_is_chosen_in_formats_that_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    long = calls("mi300x_8", batch=2048)  # 32 MiB
    assert quick_reduce(long, "fp16") is None  # no ratio of times was measured on MI300X
    monkeypatch.setattr("dse_deploy.all_reduces.ratio_gpus", lambda: ("mi300x",))
    assert quick_reduce(long, "fp16") is None  # 0.8 of RCCL's time: perhaps
    monkeypatch.setattr("simulators.costs.other_software.ratio_error", lambda: 0.05)
    chosen = quick_reduce(long, "fp16")
    assert chosen is not None and chosen[0] == "FP" and chosen[1] >= 32
    assert quick_reduce(long, "bf16") is None
    assert quick_reduce(calls("h100_8", batch=2048), "fp16") is None


def test_sizes_without_a_switch_are_told() -> None:
    (line,) = sum_lines(calls("h100_8"), "bf16", ["MAX_SIZES"])
    assert line.startswith("all-reduces of 1 MiB take") and "by nccl_symmetric" in line and "MAX_SIZES" in line
    match = re.search(r"take ([\d.]+) µs by \w+ \(([\d.]+) µs to ([\d.]+) µs in 90 %, by measured times on h100", line)
    assert match is not None, line
    middle, least, most = (float(text) for text in match.groups())
    assert (least, most) == pytest.approx((middle / np.exp(ratio_error()), middle * np.exp(ratio_error())), rel=0.01)
    assert not list(sum_lines(calls("h100_8"), "bf16", []))
    assert not list(sum_lines(calls("h100_8", tp=1), "bf16", ["MAX_SIZES"]))


@pytest.mark.slow
def test_switches_are_written_and_told_when_they_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("system=h100_8", "run.batch=64")
    assert "VLLM_USE_NCCL_SYMM_MEM=1" in exported(tmp_path, "vllm_env", *words)
    assert "disable-custom-all-reduce" not in exported(tmp_path, "sglang", *words)
    assert "no switch has the sizes of CustomAllreduce max_size" in " ".join(capsys.readouterr().out.split())
    assert "SYMM_MEM" not in exported(tmp_path, "vllm_env", "system=a100_8", "run.batch=64").replace("# ", "")
    exported(tmp_path, "vllm_env", *words)
    read = [f"settings={tmp_path}/vllm_env/vllm.env", "from=vllm_env", f"out={tmp_path}/back.yaml", "parallel.tp=8"]
    assert main(["settings", "import", *read]) == 0
    assert "no plan chooses NCCL's symmetric memory" in " ".join(capsys.readouterr().out.split())
