"""Nothing that a user typed, or a file says, is ignored in silence."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dse.cli import main
from dse.config.compose import request
from dse.errors import ConfigError
from dse.study.influence import check_typed, with_value
from dse.study.plan import Plan, plan
from tests.campaigns.silent_leaves import silent_leaves
from tests.support import drawn

PREFILL = ["study=plan", "model=llama3_70b", "parallel.tp=8", "run.mode=prefill", "run.batch=4"]
DECODE = ["study=plan", "model=llama3_70b", "system=h100_8", "parallel.tp=8", "run.mode=decode", "run.batch=64"]
SERIAL = ["~space.sites"]  # kernels that no library has are costed by waves, which read other rates


def _planned(*words: str, folder: Path | None = None) -> Plan:
    return plan(request(list(words), folder))


@pytest.mark.more
@pytest.mark.slow
def test_a_rate_that_only_another_cost_model_reads_is_refused_with_the_one_that_counts() -> None:
    with pytest.raises(ConfigError) as error:
        check_typed(_planned(*PREFILL, *SERIAL, "system.gpu.matrix_flop_per_s_per_cu='10 TFLOP/s'"))
    text = "\n".join(map(str, error.value.problems))
    assert "is not read by simulator=step (gemm by fitted" in text
    assert "peak_flop_per_s" in text


@pytest.mark.slow
def test_a_dry_run_refuses_what_the_run_would(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*PREFILL, *SERIAL, "system.gpu.matrix_flop_per_s_per_cu='10 TFLOP/s'", "budget.trials=4"]
    assert main(["--dry-run", *words]) == 2
    assert "is not read by simulator=step" in capsys.readouterr().err


@pytest.mark.more
@pytest.mark.slow
def test_a_number_that_only_some_schedules_read_is_reported() -> None:
    (note,) = check_typed(_planned(*PREFILL, "candidates=all", "system.gpu.kernel_launch_s='2.1 us'"))
    assert note.startswith("system.gpu.kernel_launch_s = 2.1 us: has no effect on the base design")


@pytest.mark.more
@pytest.mark.slow
def test_a_rate_that_another_one_replaces_is_refused_with_that_one() -> None:
    assert check_typed(_planned(*DECODE, "system.gpu.hbm_bytes_per_s='5 TB/s'")) == []
    with pytest.raises(ConfigError, match=r"is not read by simulator=step .*set `system.gpu.hbm_bytes_per_s`"):
        check_typed(_planned(*DECODE, "system.gpu.peak_hbm_bytes_per_s='5 TB/s'"))


@pytest.mark.slow
def test_a_count_that_hardly_changes_the_objective_is_reported_with_its_effect() -> None:
    assert check_typed(_planned(*PREFILL, "system.gpu.num_cus=200")) == []
    (note,) = check_typed(_planned(*PREFILL, "model.vocab=32001"))
    assert "changes iteration_s by 0.0" in note


@pytest.mark.slow
@pytest.mark.parametrize("word", ["system.node.link_bytes_per_s='90 GB/s'", "system.node.num_gpus=4"])
def test_numbers_that_count_are_taken_without_a_word(word: str) -> None:
    assert check_typed(_planned("study=ficco_sweep", word)) == []


def test_a_value_of_a_file_of_the_user_that_the_space_searches_is_reported(tmp_path: Path) -> None:
    (tmp_path / "schedule").mkdir()
    tree = {"defaults": ["hetero_fused_1d", "_self_"], "name": "mine", "num_chunks": 3}
    (tmp_path / "schedule" / "mine.yaml").write_text(yaml.safe_dump(tree))
    words = ("study=ficco_sweep", "workload.only=[g1]", "schedule=mine")
    assert any("fix it with schedule.num_chunks=3" in note for note in check_typed(_planned(*words, folder=tmp_path)))
    assert not check_typed(_planned(*words, "schedule.num_chunks=3", folder=tmp_path))


@pytest.mark.slow
def test_a_file_of_the_user_that_changes_nothing_is_reported(tmp_path: Path) -> None:
    (tmp_path / "system").mkdir()
    tree: dict[str, object] = {"defaults": ["h100_8", "_self_"], "name": "my_gpu"}
    tree["gpu"] = {"matrix_flop_per_s_per_cu": "9 TFLOP/s", "peak_hbm_bytes_per_s": "4 TB/s"}
    (tmp_path / "system" / "my_gpu.yaml").write_text(yaml.safe_dump(tree))
    (note,) = check_typed(_planned(*PREFILL, *SERIAL, "system=my_gpu", folder=tmp_path))
    assert "my_gpu.yaml" in note
    assert "matrix_flop_per_s_per_cu = 9 TFLOP/s" in note
    assert "peak_hbm_bytes_per_s = 4 TB/s" in note  # the sustained rate counts


def test_a_value_that_is_fixed_and_swept_on_one_line_is_refused() -> None:
    plan_request = request(["study=ficco_sweep", "schedule.num_chunks=4", "space.schedule.num_chunks=choice(2,8)"])
    (problem,) = plan_request.problems
    assert "is swept here, and fixed by `schedule.num_chunks=4`" in str(problem)
    assert request(["study=ficco_sweep", "schedule=serial", "space.schedule.name=choice(serial,shard_p2p)"]).problems
    assert not request(["study=ficco_sweep", "schedule.num_chunks=4"]).problems  # one of the study's own sweeps


def test_a_typed_number_has_the_command_line_as_its_source() -> None:
    plan_request = request(["study=ficco_sweep", "system.gpu.hbm_bytes_per_s='5 TB/s'", "system=h100_8"])
    assert plan_request.tree["system"]["sources"]["gpu.hbm_bytes_per_s"]["source"] == "typed on the command line"
    planned = plan(plan_request)
    design = planned.backend.design(next(iter(planned.spaces.values())).base)
    facts = {path: (value, provenance) for path, value, provenance, _ in planned.backend.facts(design)}
    assert facts["system.gpu.hbm_bytes_per_s"] == (5e12, "user")


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["study=plan", "system.node.library.network_byte_per_s=1"], "did you mean `system.node"),
        (["study=ficco_sweep", "space.schedule.num_chunks=range(1,200000000)"], "take a larger step"),
    ],
)
def test_a_way_out_is_one(words: list[str], hint: str) -> None:
    (problem,) = request(words).problems
    assert hint in str(problem)
    assert "study.uncertainty" not in str(problem)


@pytest.mark.slow
def test_a_number_without_which_a_study_is_refused_is_taken() -> None:
    words = ["study=plan", "model=llama3_8b", "system=h100_8", "parallel.tp=8", "parallel.dp=8"]
    notes = check_typed(plan(request([*words, "system.node.library.network_bytes_per_s='50 GB/s'"])))
    assert "the study is refused without it" in notes[-1]  # replicas of a prefill exchange nothing


@pytest.mark.slow
def test_the_way_out_of_a_missing_network_is_taken() -> None:
    words = ["study=plan", "model=llama3_8b", "system=b200_8", "parallel.dp=8", "run.mode=training"]
    words += ["stack=megatron_2026"]
    with pytest.raises(ConfigError) as error:
        plan(request(words))
    (problem,) = error.value.problems
    typed = problem.way_out.partition("`")[2].partition("`")[0]
    assert check_typed(plan(request([*words, typed]))) == []


@given(st.sampled_from([2, 132, 1.5, "5 TB/s", "64 GB/s", 1]), st.sampled_from([1.1, 1 / 1.1, 8.0, 1 / 8]))
def test_a_multiple_of_a_number_is_another_number_of_its_kind(value: object, factor: float) -> None:
    tree = {"part": {"number": value}}
    changed = with_value(tree, "part.number", factor)["part"]["number"]
    assert type(changed) is type(value)
    assert changed != value or (value == 1 and factor < 1)
    assert tree == {"part": {"number": value}}


@pytest.mark.more
def test_no_number_of_hardware_is_silent() -> None:
    """More are drawn by `python -m benchmarks.answers`."""
    assert silent_leaves(drawn(6).max_examples, seed=3) == []


@pytest.mark.slow
def test_a_number_that_chooses_scenarios_is_in_no_design_and_is_taken(tmp_path: Path) -> None:
    words = ["model=llama3_8b", "layouts.auto=true", "layouts.gpus=2", "layouts.most=1", "store=none", "search=random"]
    planned = plan(request(["study=plan", *words, "budget.trials=2", f"output_dir={tmp_path}"]))
    assert list(check_typed(planned)) == []
