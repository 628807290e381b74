"""Emitted operators: equal to serial execution, of the bytes of the task graph, without deadlocks; what is refused."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import emit as proof
from benchmarks import emitted_fused as fused
from benchmarks import emitted_layer as layer
from dse.errors import ConfigError
from dse_emit.command import emit
from dse_emit.table import Step, Table, table_of
from dse_emit.writing import Sizes, package
from simulators.steps.overlap.sites import read_schedule
from tests.support import REPOSITORY, drawn

MOST_LINES = 200
CHUNKED = "chunked num_chunks=2 comm_engine=dma chunk_dim=m compute=fused local_shard_first=true"


@pytest.fixture
def triton(torch: Any) -> Any:
    """Triton, by which fused operators are written."""
    return pytest.importorskip("triton", reason="triton is not installed: pip install triton")


def cases(count: int, seed: int, ranks: int = 8) -> None:
    """Run drawn cases of up to so many ranks, and hold them to what is promised of all."""
    drawn = [case for case in proof.draw(count, seed) if case.ranks <= ranks]
    for case, outcomes in zip(drawn, proof.run(drawn, seconds=300), strict=True):
        assert all(outcome.equal for outcome in outcomes), case
        assert proof.bytes_are_equal(case, outcomes), case


@pytest.mark.slow
def test_drawn_schedules_equal_serial_execution(torch: Any) -> None:
    cases(60, seed=5, ranks=2)


@pytest.mark.more
def test_drawn_schedules_of_up_to_eight_ranks_equal_serial_execution(torch: Any) -> None:
    cases(12, seed=6)


@pytest.mark.nightly
def test_many_drawn_schedules_equal_serial_execution(torch: Any) -> None:
    cases(2000, seed=1)


@pytest.mark.parametrize(
    ("count", "ranks"),
    [pytest.param(10, (2,), marks=pytest.mark.more), pytest.param(300, (2, 4, 8), marks=pytest.mark.nightly)],
)
def test_drawn_fused_operators_have_the_results_and_gradients_of_pytorch(
    count: int, ranks: tuple[int, ...], triton: Any
) -> None:
    assert proof.fused_equal(fused.draw(count, 4, ranks)) == count


@pytest.mark.more
def test_a_layer_of_emitted_operators_trains_as_the_serial_one(torch: Any) -> None:
    assert proof.loss_error() < 1e-12


@pytest.mark.slow
def test_no_drawn_order_of_ranks_hangs() -> None:
    assert proof.deadlocks([case.table for case in proof.draw(100, seed=7)], 300, seed=2) == 0


def test_ranks_that_wait_for_one_another_are_found() -> None:
    steps = tuple(Step(what, {(0, 1): (1,)}) for what in ("add", "gemm", "send"))
    table = Table("made up", "reduce_scatter", gathers=False, ranks=2, by_rows=True, cuts=(0, 1), steps=steps)
    assert proof.deadlocks([table], 3, seed=0) == 3


@pytest.mark.parametrize("engine", ["dma", "cu"])
def test_what_copy_engines_moved_is_added_one_piece_behind(engine: str) -> None:
    schedule = read_schedule(f"{CHUNKED} num_chunks=4".replace("=dma", f"={engine}"))
    steps = table_of(schedule, "reduce_scatter", 2).steps
    order: list[tuple[Any, ...]] = [(step.what, *step.parts) for step in steps]
    places = [order.index(("add", (at, at + 1))) for at in range(4)]
    assert places == sorted(places)
    move = "copy" if engine == "dma" else "send"
    assert (order.index(("add", (0, 1))) < order.index((move, (2, 3)))) == (engine == "dma")


@pytest.mark.parametrize("pattern", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all"])
def test_emitted_files_are_short_and_import_nothing_of_ours(pattern: str, tmp_path: Path) -> None:
    answer = emit([f"schedule={CHUNKED}", f"pattern={pattern}", "gpus=4", f"out={tmp_path / 'mine'}", "m=64"])
    files = sorted((tmp_path / "mine").glob("*.py"))
    assert len(files) == 6
    for file in files:
        text = file.read_text()
        imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
        names = {
            name for node in imports for name in (getattr(node, "module", ""), *(alias.name for alias in node.names))
        }
        assert not any(str(name).startswith(("dse", "simulators")) for name in names)
        assert len(text.splitlines()) <= MOST_LINES
    assert "torchrun --nproc-per-node=4" in answer.text
    ruff = [sys.executable, "-m", "ruff", "check", "-q", "--config", str(REPOSITORY / "pyproject.toml"), str(tmp_path)]
    assert subprocess.run(ruff, capture_output=True, text=True, check=False).stdout == ""


@pytest.mark.slow
@drawn(100)
@given(title=st.text(max_size=60), origin=st.text(max_size=60))
def test_texts_in_emitted_files_are_comments_of_one_line(title: str, origin: str) -> None:
    table = table_of(read_schedule(CHUNKED), "all_gather", 2)
    plain, marked = (
        package(replace(table, title=words), table, Sizes(), where) for words, where in (("x", "y"), (title, origin))
    )
    for name, text in marked.items():
        if name.endswith(".py"):
            assert ast.dump(ast.parse(text)) == ast.dump(ast.parse(plain[name]))
        assert text.count("\n") == plain[name].count("\n")


@given(text=st.text(), knob=st.sampled_from(["name", "family", "description"]))
def test_a_text_sets_no_name_of_a_schedule(text: str, knob: str) -> None:
    with pytest.raises(ConfigError):
        read_schedule(f"chunked {knob}={json.dumps(text)}")
    try:
        schedule = read_schedule(f"chunked {text}")
    except ConfigError:
        return
    assert re.fullmatch(r'[\w.,:"=+%/\[\]{} -]*', schedule.name, re.ASCII)


def test_the_printed_command_is_words_of_a_shell(elsewhere: Path) -> None:
    folder = "a $(touch made); b"
    answer = emit([f"schedule={CHUNKED}", "gpus=2", f"out={folder}"])
    words = shlex.split(answer.text.rpartition("check it: ")[2])
    assert words == ["torchrun", "--nproc-per-node=2", "-m", f"{folder}.gather_gemm"]


def test_nothing_is_written_through_a_link(elsewhere: Path) -> None:
    Path("inside").mkdir()
    Path("mine").symlink_to("inside")
    with pytest.raises(ConfigError, match="is a link"):
        emit([f"schedule={CHUNKED}", "gpus=2", "out=mine"])
    Path("plan.yaml").write_text("sites: {ffn_in: hetero_fused_1d}\nparallel: {sequence_parallel: true}\n")
    Path("package").mkdir()
    Path("package/ffn_in").symlink_to("../inside")
    with pytest.raises(ConfigError, match="is a link"):
        emit(["plan=plan.yaml", "gpus=2", "out=package"])
    assert list(Path("inside").iterdir()) == []


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["schedule=t3", "gpus=4", "pattern=reduce_scatter"], "a tracker in the memory controller"),
        (["schedule=in_switch", "gpus=8", "pattern=all_reduce"], "adds in the switch"),
        (["schedule=shard_p2p", "gpus=1"], "no peers"),
        (["schedule=shard_p2p", "gpus=1.5"], "whole number above 0"),
        (["schedule=shard_p2p"], "whole number above 0"),
        (["schedule=shard_p2p", "gpus=4", "pattern=broadcast"], "no collective that is emitted"),
        (["schedule=chunke", "gpus=4"], "did you mean `chunked`"),
        (["schedule=shard_p2p", "plan=x", "gpus=4"], "one source"),
        (["study=ficco_sweep"], "finished|no run"),
        (["plan=absent.yaml", "gpus=4"], "absent"),
        (["study=ficco_sweep", "key=a", "gpus=4"], "gpus=4: is not understood here"),
        (["plan=absent.yaml", "gpus=4", "pattern=all_gather"], "pattern=all_gather: is not understood here"),
    ],
)
def test_what_cannot_be_emitted_is_refused(words: list[str], match: str, elsewhere: Path) -> None:
    with pytest.raises(ConfigError, match=match):
        emit(words)


def test_the_sites_of_a_plan_are_written_one_by_one(tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text("sites: {ffn_in: hetero_fused_1d, ffn_out: in_switch}\nparallel: {sequence_parallel: true}\n")
    answer = emit([f"plan={plan}", "gpus=4", f"out={tmp_path / 'mine'}"])
    assert sorted(path.name for path in (tmp_path / "mine").iterdir()) == ["ffn_in"]
    assert "ffn_out: not written" in answer.text


COMPILED = """
import dse_fused.kernels as kernels
import triton.language as tl
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

numbers = {"tables": "*fp32", "a": "*fp32", "b": "*fp32", "w": "*fp32", "x": "*fp32", "inbox": "*fp32", "out": "*fp32"}
numbers |= {"flags": "*i32"} | dict.fromkeys(["indices", "addresses", "flag_addresses", "masks"], "*i64")
constants = {"remote_first": True, "dtype": tl.float32, "factor": tl.float32, "dim_block": 32, "phase": 0}
constants |= {"rows_block": 16, "block": 16}
for name in ["embedding_put", "gemm_put", "gemv_put", "await_all", "sum_ready", "sum_ready_put"]:
    kernel = getattr(kernels, name)
    fixed = {word: constants[word] for word in kernel.arg_names if word in constants}
    types = {word: "constexpr" if word in fixed else numbers.get(word, "i32") for word in kernel.arg_names}
    code = triton.compile(ASTSource(kernel, types, fixed), target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    assert ("acquire" in code) == (name not in ["embedding_put", "gemm_put", "gemv_put"]) or "atom" in code
    print(name)
"""


@pytest.mark.more
def test_fused_kernels_compile_for_a_gpu(triton: Any) -> None:
    result = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True, check=False)
    assert len(result.stdout.split()) == 6, result.stderr


@pytest.mark.parametrize(("changes", "match"), [({"num_chunks": 63}, "1 to 62"), ({"workgroups": 0}, "at least 1")])
def test_slices_that_no_kernel_could_have_are_refused(changes: dict[str, Any], match: str, torch: Any) -> None:
    import dse_fused

    with pytest.raises(ValueError, match=match):
        dse_fused.Slices(**changes)


@pytest.mark.more
def test_the_check_of_fused_operators_runs_and_ends_well(triton: Any) -> None:
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "dse_fused.check"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('"equal": true') == 4


@pytest.mark.parametrize("check", ["dse_fused/operators.py", "dse_emit/package/check.py"])
def test_a_destroyed_group_leaves_no_threads_behind(check: str, tmp_path: Path, torch: Any) -> None:
    lines = (REPOSITORY / "plugins/emit" / check).read_text().splitlines()
    imports = [line for line in lines if line.startswith("import torch")]
    group = f"dist.init_process_group('gloo', init_method='file://{tmp_path / 'store'}', rank=0, world_size=1)"
    words = [*imports, group, "import torch._dynamo", "dist.destroy_process_group()", "import os"]
    words += ["print([open(f'/proc/self/task/{id}/comm').read() for id in os.listdir('/proc/self/task')])"]
    done = subprocess.run([sys.executable, "-c", "\n".join(words)], capture_output=True, text=True, check=True)
    assert "gloo" not in done.stdout


@pytest.mark.more
def test_layers_with_all_to_alls_have_the_gradients_of_serial_execution(torch: Any) -> None:
    errors = proof.on_ranks(layer.expert_errors, 3, 100, layer._RANKS)
    assert max(map(max, errors.values())) < 1e-12
