"""Configurations of DeepSpeed read as plans of a step, and plans written as these."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dse.cli import main
from dse.errors import ConfigError
from dse_deploy.command import nearest, write_all
from dse_deploy.deepspeed import batches
from dse_deploy.reading import ReadSettings, read
from dse_deploy.settings import tools
from tests.support import drawn

ZERO_3: dict[str, Any] = {  # as documentation of Hugging Face's trainer has it
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}
ZERO_2: dict[str, Any] = {  # as documentation of DeepSpeed has its parts
    "train_batch_size": 256,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 8,
    "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16},
    "zero_optimization": {
        "stage": 2,
        "allgather_partitions": True,
        "allgather_bucket_size": 5e8,
        "overlap_comm": True,
        "reduce_scatter": True,
        "reduce_bucket_size": 5e8,
        "contiguous_gradients": True,
    },
}


def settings(tree: dict[str, Any], plan: dict[str, Any] | None = None) -> ReadSettings:
    """What a configuration says beside a plan."""
    (file,) = tools()["deepspeed"].files
    return read([(file, json.dumps(tree))], plan or {})


def with_zero(**values: Any) -> dict[str, Any]:
    """A configuration with values of ZeRO."""
    return {"train_micro_batch_size_per_gpu": 2, "zero_optimization": values}


def test_a_configuration_of_zero_2_is_its_plan() -> None:
    answer = settings(ZERO_2)
    assert answer.plan["parallel"] == {"zero": 2, "dp": 8}
    assert answer.plan["run"] == {"batch": 4, "micro_batches": 8, "precision": "fp16"}
    assert not answer.unmodelled
    assert any(text.startswith("zero_optimization.reduce_bucket_size 500000000.0 (") for text in answer.unread)


def test_what_a_trainer_fills_in_is_asked_for() -> None:
    with pytest.raises(ConfigError) as error:
        settings(ZERO_3)
    assert {problem.way_out for problem in error.value.problems} == {
        "write run.batch=<value>",
        "write run.micro_batches=<value>",
        "write run.precision=<value>",
    }
    typed = {"run": {"batch": 2, "micro_batches": 4, "precision": "bf16"}}
    answer = settings(ZERO_3, typed)
    assert answer.plan == {**typed, "parallel": {"zero": 3, "prefetch": True}}
    (offloaded,) = answer.unmodelled
    assert offloaded.startswith("zero_optimization.offload_optimizer.device cpu (")


@pytest.mark.parametrize(
    ("values", "parallel"),
    [
        ({"stage": 0}, {"zero": 0, "reductions": "after"}),
        ({"stage": 0, "overlap_comm": True}, {"zero": 0, "reductions": "after"}),
        ({"stage": 1}, {"zero": 1, "reductions": "after"}),
        ({"stage": 1, "overlap_comm": True}, {"zero": 1, "reductions": "beside"}),
        ({"stage": 2, "overlap_comm": True}, {"zero": 2}),
        ({"stage": 3}, {"zero": 3, "prefetch": True}),
        ({"stage": 3, "stage3_prefetch_bucket_size": 0}, {"zero": 3, "prefetch": False}),
        ({"stage": 3, "overlap_comm": False}, {"zero": 3, "prefetch": False}),
        ({"stage": 3, "mics_shard_size": 8}, {"zero": 3, "shard_gpus": 8, "prefetch": True}),
        ({"stage": 3, "mics_shard_size": -1}, {"zero": 3, "prefetch": True}),
    ],
)
def test_a_stage_has_its_overlap(values: dict[str, Any], parallel: dict[str, Any]) -> None:
    assert settings(with_zero(**values)).plan["parallel"] == parallel


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"stage": 2}, "overlap_comm"),
        ({"stage": 3, "overlap_comm": False}, "overlap_comm"),
        ({"stage": 3, "zero_quantized_weights": True}, "zero_quantized_weights"),
        ({"stage": 3, "zero_quantized_gradients": True}, "zero_quantized_gradients"),
        ({"stage": 3, "zero_hpz_partition_size": 8}, "zero_hpz_partition_size"),
        ({"stage": 3, "offload_param": {"device": "nvme"}}, "offload_param.device"),
        ({"stage": 1, "overlap_comm": True, "reduce_scatter": False}, "reduce_scatter"),
    ],
)
def test_what_changes_a_step_and_no_plan_has_is_told_with_the_reason(values: dict[str, Any], name: str) -> None:
    (text,) = settings(with_zero(**values)).unmodelled
    assert text.startswith(f"zero_optimization.{name} ")
    assert text.endswith(")")


def test_what_is_off_is_not_told() -> None:
    zero = {
        "stage": 3,
        "offload_param": {"device": "none"},
        "zero_hpz_partition_size": 1,
        "zero_quantized_weights": False,
    }
    answer = settings({**with_zero(**zero), "amp": {"enabled": False}, "activation_checkpointing": {}})
    assert not answer.unmodelled
    assert not answer.unread


def test_degrees_and_formats_are_read() -> None:
    tree = {
        "train_batch_size": 16,
        "sequence_parallel_size": 4,
        "tensor_parallel": {"autotp_size": 2},
        "pipeline": {"stages": 2, "partition": "best"},
        "bf16": {"enabled": False},
        "fp16": {"enabled": False},
        "communication_data_type": "fp32",
    }
    answer = settings(tree, {"parallel": {"dp": 8}})
    degrees = {"dp": 8, "cp": 4, "context": "all_to_all", "tp": 2, "pp": 2, "gradient_bytes": 4}
    assert answer.plan["parallel"] == {**degrees, "zero": 0, "reductions": "after"}
    assert answer.plan["run"] == {"batch": 2, "micro_batches": 1, "precision": "fp32"}
    assert answer.unread == ["pipeline.partition"]


@pytest.mark.parametrize(
    ("tree", "part"),
    [
        (with_zero(stage=4), "is no stage of ZeRO"),
        (with_zero(stage="auto"), "is no stage of ZeRO"),
        ({**with_zero(stage=2), "pipeline": {"stages": 4}}, "DeepSpeed refuses with a pipeline"),
        ({**ZERO_2, "train_batch_size": 250}, "is not run.batch = 4 x run.micro_batches = 8, or a multiple"),
        ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2}, "write parallel.dp=<value>"),
        ({"train_batch_size": "many", "train_micro_batch_size_per_gpu": 2}, "is no whole number from 1"),
    ],
)
def test_what_deepspeed_refuses_is_refused(tree: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        settings(tree)


@pytest.mark.parametrize(
    "text", ["", "[1]", "{", '{"zero_optimization": {"stage": 1}, "zero_optimization": {}}', '{"a": 1}']
)
def test_a_file_that_is_no_configuration_is_refused(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ds_config.json").write_text(text)
    assert main(["settings", "import", "settings=ds_config.json", "from=deepspeed"]) == 2
    assert "refused" in capsys.readouterr().err


@drawn(100)
@given(
    numbers=st.fixed_dictionaries({name: st.integers(1, 64) for name in ("batch", "micro_batches", "dp")}),
    left_out=st.sampled_from(["batch", "micro_batches", "dp"]),
)
def test_the_factor_that_is_left_out_is_the_one_that_fits(numbers: dict[str, int], left_out: str) -> None:
    paths = {"batch": "run", "micro_batches": "run", "dp": "parallel"}
    plan: dict[str, Any] = {}
    total = 1
    for name, number in numbers.items():
        total *= number
        if name != left_out:
            plan.setdefault(paths[name], {})[name] = number
    assert batches({"step_batch": ("train_batch_size", total)}, plan) == ""
    assert plan[paths[left_out]][left_out] == numbers[left_out]


@drawn(100)
@given(
    parallel=st.fixed_dictionaries(
        {"zero": st.sampled_from([0, 1, 2, 3]), "dp": st.integers(1, 64)},
        optional={"tp": st.sampled_from([1, 2, 8])},
    ),
    run=st.fixed_dictionaries(
        {
            "batch": st.integers(1, 16),
            "micro_batches": st.integers(1, 32),
            "precision": st.sampled_from(["bf16", "fp16"]),
        }
    ),
    prefetch=st.booleans(),
    beside=st.booleans(),
    ulysses=st.sampled_from([0, 2, 4]),
)
def test_a_plan_that_deepspeed_can_say_is_written_and_read_back(
    parallel: dict[str, Any], run: dict[str, Any], prefetch: bool, beside: bool, ulysses: int
) -> None:
    plan = {"parallel": dict(parallel), "run": run}
    if parallel["zero"] < 2:
        plan["parallel"]["reductions"] = "beside" if beside and parallel["zero"] else "after"
    if parallel["zero"] == 3:
        plan["parallel"]["prefetch"] = prefetch
    if ulysses:
        plan["parallel"] |= {"cp": ulysses, "context": "all_to_all"}
    tool = tools()["deepspeed"]
    written = write_all(tool, plan, "plan.yaml")
    assert isinstance(json.loads(written["ds_config.json"].text), dict)
    assert nearest(tool, plan, written) == plan


@pytest.mark.more
def test_an_imported_configuration_is_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ds_config.json").write_text(json.dumps(ZERO_2))
    assert main(["settings", "import", "settings=ds_config.json", "from=deepspeed", "out=theirs.yaml"]) == 0
    assert yaml.safe_load(Path("theirs.yaml").read_text())["tool"] == "deepspeed"
    words = ["model=llama3_8b", "system=h200_8", "run.mode=training", "parallel.tp=1", "run.sequence_length=512"]
    capsys.readouterr()
    assert main(["plan", "plan=theirs.yaml", *words, "run.recompute=all"]) == 0
    assert "DeepSpeed" in capsys.readouterr().out
