"""Settings of frameworks: files that parse, say of a plan what the tool can say, and are read back as a plan."""

from __future__ import annotations

import ast
import cProfile
import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, reject
from hypothesis import strategies as st

from dse.cli import main
from dse.config.options import option_file
from dse.errors import ConfigError
from dse.space import get_path
from dse_deploy import user_buffers
from dse_deploy.command import nearest, write_all
from dse_deploy.derived import stage_sizes
from dse_deploy.export import ToolFiles, answer
from dse_deploy.facts import pipeline_layout
from dse_deploy.planned_step import PlannedStep, ToolPlan
from dse_deploy.reading import read
from dse_deploy.settings import tools
from dse_deploy.shell import read_script
from dse_deploy.step_files import STEP_FORMATS
from dse_deploy.user_buffers import UserBuffer, layers_of, read_layers, sites_of
from simulators.steps.design import ScheduledDesign
from simulators.steps.overlap.sites import SITES, read_schedule
from simulators.workloads.model import Optimizer, Parallel
from studies.plan import given_section
from studies.plan.plan_file import check_plan, leaves_of, read_plan, step_of_run, step_words
from tests.campaigns.judged import judge_errors
from tests.support import drawn

OF_PLANS = [name for name, tool in tools().items() if tool.files[0].format not in ("msccl", *STEP_FORMATS)]
OPTIONS = (
    *(
        "serial",
        "shard_p2p",
        "signalled",
        "signalled comm_engine=cu sender=tiles",
        "hetero_fused_1d num_chunks=2",
        "uniform_fused_1d num_chunks=16",
    ),
    *("uniform_fused_1d num_chunks=4 comm_engine=cu comm_cus=24", "shard_p2p comm_engine=cu comm_cus=8"),
)
BESIDE = ("c3_sp", "c3_sp comm_cus=12", "c3_sp_rp comm_cus=20", "conccl")
PLANS = st.fixed_dictionaries(
    {
        "sites": st.fixed_dictionaries(
            {},
            optional={name: st.sampled_from(OPTIONS + (BESIDE if site.beside else ())) for name, site in SITES.items()},
        ),
        "parallel": st.fixed_dictionaries(
            {"tp": st.sampled_from([2, 4, 8]), "sequence_parallel": st.just(True)},
            optional={
                "collectives": st.sampled_from(["library", "in_switch"]),
                "reductions": st.sampled_from(["beside", "after"]),
                "exchanges": st.sampled_from(["waited", "two_micro_batches"]),
                "reshard": st.booleans(),
                "prefetch": st.booleans(),
                "zero": st.sampled_from([0, 1, 3]),
            },
        ),
    },
    optional={"optimizer": st.fixed_dictionaries({"in_backward": st.booleans()})},
)


def written(name: str, plan: Mapping[str, Any]) -> dict[str, str]:
    return {file: part.text for file, part in write_all(tools()[name], plan, "plan.yaml").items()}


# Files


@pytest.mark.slow
@drawn(60)
@given(plan=PLANS)
@pytest.mark.parametrize("name", OF_PLANS)
def test_a_plan_that_a_tool_can_say_is_the_same_after_writing_and_reading(name: str, plan: dict[str, Any]) -> None:
    tool = tools()[name]
    once = nearest(tool, plan, write_all(tool, plan, "plan.yaml"))
    again = nearest(tool, once, write_all(tool, once, "plan.yaml"))
    assert dict(leaves_of(again)) == dict(leaves_of(once))
    for site, text in once.get("sites", {}).items():
        assert site in SITES
        read_schedule(text)


@drawn(30)
@given(plan=PLANS)
@pytest.mark.parametrize("name", OF_PLANS)
def test_files_are_what_their_formats_are(name: str, plan: dict[str, Any]) -> None:
    texts = written(name, plan)
    for file in tools()[name].files:
        text = texts[file.name]
        if file.format in ("yaml", "user_buffers"):
            assert isinstance(yaml.safe_load(text), dict | None)
        elif file.format == "deepspeed":
            assert isinstance(json.loads(text), dict)
        elif file.format == "python":
            compile(ast.parse(text), file.name, "exec")
        elif file.format == "environment":
            words = shlex.split(text, comments=True)
            assert set(words[::2]) <= {"export"}
            assert all(re.fullmatch(r"[A-Z_]+=\S+", word) for word in words[1::2])
        else:
            lines = [line for line in text.splitlines() if not line.startswith("#")]
            assert all(re.fullmatch(r"--[a-z0-9-]+( [\w.]+| '[\w .*|]+')?", line) for line in lines)


@drawn(30)
@given(source=st.text(max_size=60))
@pytest.mark.parametrize("name", OF_PLANS)
def test_the_name_of_a_plan_is_a_comment_of_its_files(name: str, source: str) -> None:
    plan = {"sites": {"ffn_in": "torch_async_tp"}, "parallel": {"tp": 8, "sequence_parallel": True}}
    for file, part in write_all(tools()[name], plan, source).items():
        plain = written(name, plan)[file]
        lines, plain_lines = ([row for row in text.splitlines() if row[:1] != "#"] for text in (part.text, plain))
        assert lines == plain_lines


@pytest.mark.parametrize("name", OF_PLANS)
def test_what_a_tool_has_no_word_for_is_told(name: str) -> None:
    plan = {"sites": {"ffn_out": "t3_mca"}, "parallel": {"tp": 8, "sequence_parallel": True, "messages": "behind"}}
    parts = write_all(tools()[name], plan, "plan.yaml").values()
    unsaid = frozenset.intersection(*(part.unsaid for part in parts))
    assert "parallel.messages" in unsaid
    assert "sites.ffn_out" in unsaid  # it takes hardware that does not exist


def test_settings_are_of_knobs_of_a_step_and_name_their_sources() -> None:
    paths = {f"parallel.{name}" for name in Parallel.model_fields} | {
        f"optimizer.{name}" for name in Optimizer.model_fields
    }
    paths |= {f"run.{name}" for name in ScheduledDesign.model_fields["run"].annotation.model_fields}  # type: ignore[union-attr]
    for tool in tools().values():
        for file in tool.files:
            for setting in file.settings:
                is_of_a_step = setting.path in paths | {"sites", "system.node.experts.num_sms"}
                assert setting.fact or setting.constant or is_of_a_step or setting.reason, setting.path
                assert set(setting.sites) <= set(SITES)
                assert setting.source


# User buffers


def test_schedules_are_methods_of_layers() -> None:
    sites = {
        "attention_in": "shard_p2p",
        "ffn_in": "hetero_fused_1d num_chunks=4",
        "attention_out": "uniform_fused_1d num_chunks=4 comm_engine=cu comm_cus=24",
        "ffn_out": "signalled",
        "ffn_in_backward": "c3_sp_rp comm_cus=6",
        "attention_in_backward": "c3_sp comm_cus=12",
        "ffn_out_backward": "serial",
    }
    layers = {name: layer.tree for name, layer in layers_of(sites, 8, fp8=False).items()}
    assert layers == {
        "qkv_fprop": {"method": "ring_exchange", "aggregate": 0, "use_ce": 1},
        "fc1_fprop": {"method": "ring_exchange", "aggregate": 1, "use_ce": 1},
        "proj_fprop": {"method": "pipeline", "num_sm": 24, "cga_size": 2, "num_splits": 4, "set_sm_margin": 1},
        "fc2_fprop": {"method": "ring_exchange", "use_ce": 1},
        "fc1_wgrad": {"method": "bulk", "num_sm": 6, "cga_size": 2, "set_sm_margin": 1},
        "qkv_wgrad": {"method": "bulk", "num_sm": 12, "cga_size": 2, "set_sm_margin": 0},
    }


def test_one_kernel_for_all_shards_is_of_fp8_and_of_a_gather_with_its_sum() -> None:
    alone, both = {"ffn_out": "signalled"}, {"ffn_out": "signalled", "ffn_in": "signalled"}
    assert layers_of(alone, 8, fp8=True)["fc2_fprop"].atomic_gemm is None
    assert {layer.atomic_gemm for layer in layers_of(both, 8, fp8=True).values()} == {1}
    assert {layer.atomic_gemm for layer in layers_of(both, 8, fp8=False).values()} == {None}


def test_sums_that_overlap_their_own_gemm_turn_bulk_off_in_their_block_alone() -> None:
    sites = {"ffn_in_backward": "c3_sp comm_cus=6", "attention_in_backward": "shard_p2p"}
    layers = layers_of(sites, 8, fp8=False)
    assert {name: layer.method for name, layer in layers.items()} == {"fc1_wgrad": "bulk", "qkv_dgrad": "ring_exchange"}
    back = sites_of({"qkv_dgrad": UserBuffer(method="ring_exchange")}, 8)
    assert back["ffn_in_backward"] == "c3_sp comm_cus=16"  # to initialize_ub a layer that is left out is in bulk
    with pytest.raises(ConfigError, match="qkv_wgrad: is in bulk, which sums that overlap their own GEMM"):
        read_layers({"qkv_dgrad": {"method": "ring_exchange"}, "qkv_wgrad": {"method": "bulk"}})
    assert read_layers({"qkv_dgrad": {"method": "ring_exchange"}, "fc1_wgrad": {"method": "bulk"}})
    assert read_layers({"proj_wgrad": {"method": "external"}, "qkv_fprop": {"comm_priority": 3}})


@pytest.mark.parametrize("other", ["serial", "c3_sp comm_cus=6", "uniform_fused_1d num_chunks=2"])
def test_one_flag_for_the_sums_of_all_blocks_writes_each_of_their_layers_out(other: str) -> None:
    sites = {"attention_in_backward": "shard_p2p", "ffn_in_backward": other}
    texts = written("megatron", {"sites": sites, "parallel": {"tp": 8, "sequence_parallel": True}})
    layers = yaml.safe_load(texts["tp_comm_overlap.yaml"])
    assert "\n--tp-comm-overlap-rs-dgrad\n" in texts["megatron_args.txt"]
    assert set(layers) == {"qkv_dgrad", "fc1_dgrad"}
    assert {layer["method"] for layer in layers.values()} <= {"ring_exchange", "pipeline"}
    alone = {"sites": {"ffn_in_backward": "c3_sp comm_cus=6"}, "parallel": {"tp": 8, "sequence_parallel": True}}
    assert "\n--tp-comm-overlap-rs-dgrad\n" not in written("megatron", alone)["megatron_args.txt"]


def test_tiles_that_send_by_themselves_take_no_sms() -> None:
    layers = layers_of({"ffn_out": "signalled comm_engine=cu sender=tiles"}, 8, fp8=False)
    assert layers["fc2_fprop"].tree == {"method": "ring_exchange", "use_ce": 0}


def test_layers_that_are_not_named_have_the_defaults_of_the_tool() -> None:
    sites = sites_of({"qkv_fprop": UserBuffer(method="ring_exchange", aggregate=1)}, 8)
    assert set(sites) == set(SITES)
    assert sites["attention_in"] == "hetero_fused_1d num_chunks=4"
    assert sites["ffn_in"] == "transformer_engine"
    assert sites["ffn_out"] == "uniform_fused_1d num_chunks=4 comm_engine=cu comm_cus=16"
    assert sites["ffn_in_backward"] == "c3_sp comm_cus=16"
    assert sites_of({}, 8)["attention_in"] == "transformer_engine"
    (file,) = tools()["transformer_engine"].files
    assert read([(file, "{}")], {"parallel": {"tp": 8}}).plan["sites"] == sites_of({}, 8)
    assert "sites" not in read([(file, "null  # not initialised")], {"parallel": {"tp": 8}}).plan


@pytest.mark.parametrize(
    ("tree", "parts"),
    [
        ({"qkv_forward": {}}, ["qkv_forward: is no layer of user buffers"]),
        ({"qkv_fprop": {"method": "pipeline"}}, ["qkv_fprop.method = 'pipeline': is no method of this layer"]),
        ({"fc1_wgrad": {"num_sm": 64}}, ["fc1_wgrad.num_sm"]),
        ({"fc1_wgrad": {"num_sms": 6}}, ["fc1_wgrad.num_sms", "did you mean `fc1_wgrad.num_sm`"]),
        ([1], ["settings = [1]: is no mapping of layers"]),
        ({"qkv_fprop": [1, 2]}, ["qkv_fprop = [1, 2]: is no mapping of settings"]),
    ],
)
def test_wrong_settings_of_layers_are_refused_by_path(tree: Any, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as refusal:
        read_layers(tree)
    assert all(part in str(refusal.value) for part in parts), refusal.value


def test_more_sms_than_there_are_communicators_for_are_not_asked_for() -> None:
    (layer,) = layers_of({"ffn_in_backward": "c3_sp comm_cus=64"}, 8, fp8=False).values()
    assert layer.num_sm == user_buffers.MOST_SMS


# Commands


def test_a_plan_is_exported_and_settings_are_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = {"sites": {"ffn_out": "uniform_fused_1d num_chunks=8"}, "parallel": {"collectives": "in_switch"}}
    Path("plan.yaml").write_text(yaml.safe_dump(plan))
    assert main(["settings", "export", "plan=plan.yaml", "to=megatron", "parallel.tp=4"]) == 2
    assert "parallel.sequence_parallel: is needed by user buffers" in capsys.readouterr().err
    words = ["plan=plan.yaml", "parallel.tp=4", "parallel.sequence_parallel=true"]
    assert main(["settings", "export", "to=megatron", *words]) == 0
    output = capsys.readouterr().out
    assert "Megatron-LM needs no setting for parallel.collectives = in_switch" in output  # NCCL does so by itself
    assert "nearest: sites.ffn_out = transformer_engine, not uniform_fused_1d num_chunks=8" in output
    arguments = Path("outputs/export/megatron/megatron_args.txt").read_text().splitlines()
    assert {"--tensor-model-parallel-size 4", "--tp-comm-overlap", "--disable-tp-comm-overlap-ag"} <= set(arguments)
    assert main(["settings", "import", "settings=outputs/export/megatron", "from=megatron", "out=back.yaml"]) == 0
    back = yaml.safe_load(Path("back.yaml").read_text())
    assert back["parallel"] == {"tp": 4, "sequence_parallel": True}
    assert back["sites"]["ffn_out"] == "transformer_engine"
    assert back["sites"]["ffn_in"] == "serial"
    assert main(["settings", "export", "plan=plan.yaml", "to=nccl"]) == 0
    assert "export NCCL_NVLS_ENABLE=1" in Path("outputs/export/nccl/nccl.env").read_text()


def test_the_launch_line_of_a_user_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--tensor-model-parallel-size=8", "\\\r\n", "--sequence-parallel", "--lr 1e-4", "--data-path @x 'a: ['"]
    Path("run.txt").write_text(" ".join([*words, "--overlap-grad-reduce go.py"]), newline="")
    assert main(["settings", "import", "settings=run.txt", "from=megatron"]) == 0
    output = capsys.readouterr().out
    assert "means nothing to a plan: --lr" in output
    assert "means nothing to a plan: --data-path" in output
    read_back = yaml.safe_load(Path("plan.yaml").read_text())
    knobs = {"tp": 8, "sequence_parallel": True, "reductions": "beside"}
    assert read_back == {"tool": "megatron", "parallel": knobs}


@pytest.mark.slow
def test_settings_without_which_the_step_is_faster_are_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    sites = dict.fromkeys(
        ("attention_in", "attention_out", "ffn_in", "ffn_out"), "signalled comm_engine=cu sender=tiles"
    )
    knobs = {"sequence_parallel": True, "collectives": "in_switch", "tp": 8}
    Path("plan.yaml").write_text(yaml.safe_dump({"sites": sites, "parallel": knobs}))
    step = ["model=llama3_8b", "system=h100_8", "run.mode=decode", "run.batch=64", "run.sequence_length=4096"]
    assert main(["settings", "export", "plan=plan.yaml", "to=vllm", *step]) == 0
    answer = capsys.readouterr().out
    assert yaml.safe_load(Path("outputs/export/vllm/vllm.yaml").read_text()) == {
        "dtype": "bfloat16",
        "tensor-parallel-size": 8,
    }
    assert re.search(r"a step of llama3_8b: planned [\d.]+ ms, by vLLM [\d.]+ ms, serial [\d.]+ ms", answer)
    assert "not written, as the step is slower with it: compilation-config.pass_config.enable_sp, comp" in answer
    assert "nearest: sites.ffn_in = serial, not signalled comm_engine=cu sender=tiles" in answer
    assert all(re.search(rf"^{site} +signalled .* [mµ]s +serial", answer, re.MULTILINE) for site in sites)
    longer = ["model=llama3_70b", "run.mode=prefill", "run.sequence_length=8192", "run.batch=8"]
    assert main(["settings", "export", "plan=plan.yaml", "to=vllm", *longer]) == 0
    assert "fuse_gemm_comms: true" in Path("outputs/export/vllm/vllm.yaml").read_text()
    assert "not written" not in capsys.readouterr().out


@pytest.mark.more
@drawn(8)
@given(
    plan=PLANS,
    name=st.sampled_from([name for name in OF_PLANS if name not in ("vllm", "sglang", "tensorrt_llm", "deepep")]),
)
def test_what_is_written_is_never_slower_than_what_the_tool_does_by_itself(plan: dict[str, Any], name: str) -> None:
    plan = {"sites": plan["sites"], "parallel": {**plan["parallel"], "tp": 8, "zero": 0, "exchanges": "waited"}}
    words = ["model=llama3_8b", "run.mode=training", "run.sequence_length=2048"]
    step = PlannedStep.of(Path("plan.yaml"), words)
    assert step is not None
    try:
        exporting = ToolPlan(name, step, step.plan_tree(plan))
    except ConfigError:  # no step: copy engines do not add, say
        reject()
    reduced, left_out = exporting.without_losses(plan)
    seconds = float(step.step(exporting.tree(reduced)).seconds)
    for other in ({"parallel": {"tp": 8}}, plan):
        assert seconds <= float(step.step(exporting.tree(other)).seconds) * (1 + 1e-9)
    assert all(entry.without_s < entry.with_s for entry in left_out)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["transformer_engine", "nccl", "rccl"])
def test_a_library_leaves_what_was_typed_to_the_framework(name: str) -> None:
    typed = {"parallel.sequence_parallel": True, "parallel.reductions": "after", "optimizer.in_backward": True}
    words = ["model=llama3_8b", "system=h100_8", "run.mode=training", "parallel.tp=4", "parallel.dp=2"]
    step = PlannedStep.of(Path("plan.yaml"), [*words, *(f"{path}={value}".lower() for path, value in typed.items())])
    assert step is not None
    tree = ToolPlan(name, step, step.tree).tree({"parallel": {"collectives": "in_switch"}})
    assert {path: get_path(tree, path) for path in typed} == typed


def test_the_step_of_a_plan_is_the_same_in_every_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.json").touch()
    (tmp_path / "h100_8").mkdir()  # where the user stands: no file that is meant
    monkeypatch.chdir(tmp_path)
    words = step_of_run({"overrides": ["study=plan", "model=mine.json", "system=h100_8"], "config_dir": "."})
    assert words == [f"--config-dir={tmp_path}", f"model={tmp_path}/mine.json", "system=h100_8"] == step_words(words)


def test_defaults_of_a_tool_need_no_setting() -> None:
    knobs = {"reductions": "beside", "split_ctas": 0, "dp": 4, "messages": "beside"}
    plan = {"parallel": {"tp": 8, **knobs}, "run": {"mode": "training"}}
    (*lines,) = map(str, answer(ToolFiles("torch", plan, plan, write_all(tools()["torch"], plan, "plan.yaml"))))
    assert any(line.endswith("has no setting for parallel.messages = beside") for line in lines)
    (by_itself,) = (line for line in lines if " needs no setting for " in line)
    assert "parallel.reductions = beside" in by_itself
    assert "parallel.split_ctas = 0" in by_itself
    assert "parallel.dp = 4 (follows from the number of GPUs that are launched)" in by_itself
    assert not any(line.startswith(("not ", "nearest")) and "run.mode" in line for line in lines)


def test_software_that_a_tool_runs_by_itself_needs_no_user_buffers() -> None:
    sums = dict.fromkeys(("attention_in_backward", "ffn_in_backward"), "megatron_async_sums")
    rings = dict.fromkeys(("attention_out", "ffn_out"), "transformer_engine")
    sites = {**sums, **rings}
    plan = {"parallel": {"tp": 8, "sequence_parallel": True}, "run": {"mode": "training"}, "sites": sites}
    parts = write_all(tools()["megatron"], plan, "plan.yaml")
    assert "--disable-tp-comm-bulk-wgrad\n" in parts["megatron_args.txt"].text
    assert "wgrad:" not in parts["tp_comm_overlap.yaml"].text
    assert nearest(tools()["megatron"], plan, parts)["sites"].items() >= sites.items()
    (*lines,) = map(str, answer(ToolFiles("megatron", plan, plan, parts)))
    (by_itself,) = (line for line in lines if " needs no setting for " in line)
    assert all(f"sites.{site} = megatron_async_sums" in by_itself for site in sums)
    assert not any("sites." in line for line in lines if line.startswith(("nearest", "Megatron-LM has no")))


def test_micro_batches_of_megatron_are_written_as_the_sequences_of_a_step() -> None:
    plan = {"parallel": {"tp": 2, "dp": 4}, "run": {"batch": 3, "micro_batches": 5}}
    parts = write_all(tools()["megatron"], plan, "plan.yaml")
    assert "\n--global-batch-size 60\n" in parts["megatron_args.txt"].text
    assert nearest(tools()["megatron"], plan, parts)["run"] == plan["run"]
    assert not any("micro_batches" in str(line) for line in answer(ToolFiles("megatron", plan, plan, parts)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["to=vllm", "run.mode=training"], "to = 'vllm': is for prefill and decode alone, and the plan is of training"),
        (["to=sglang", "sites.ffn_in_backward=shard_p2p"], "take one of to=megatron, to=torch"),
        (["to=sglang", "model=llama3_8b", "run.mode=training"], "to = 'sglang': is for prefill and decode alone"),
        (["to=deepep", "model=llama3_8b"], "sets exchanges of experts, and llama3_8b has none"),
        (["to=deepep"], "the plan splits no experts: parallel.ep = 1 (write parallel.ep=8, or take one of to="),
        (["to=nccl", "system.gpu.num_cus=10"], "is no choice of a plan"),
        (["to=nccl", "modle=llama3_8b"], "modle: is no value of a plan (name the step, too: model=<name>"),
        (["to=nccl", "model=llama3_9b"], "llama3_9b"),
        (["to=nccl", "model=llama3_8b", "run.sequence_lenth=2"], "run.sequence_lenth"),
    ],
)
def test_tools_that_are_not_for_a_plan_are_refused_with_those_that_are(
    words: list[str], part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("plan.yaml").write_text("parallel: {tp: 8}\n")
    assert main(["settings", "export", "plan=plan.yaml", *words]) == 2
    assert part in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["plan=nowhere.yaml", "to=nccl"], "plan"),
        (["plan=plan.yaml", "to=ncl"], "to = 'ncl': is no tool (did you mean `nccl`?)"),
        (["plan=plan.yaml", "to=transformer_engine"], "parallel.tp: is missing (write parallel.tp=8)"),
        (["plan=plan.yaml", "to=megatron", "parallel.tp=1"], "parallel.tp = 1: is no number of GPUs that can share"),
        (["plan=plan.yaml", "to=vllm", "parallel.tp=many"], "parallel.tp = 'many'"),
        (["plan=plan.yaml", "to=vllm", "sites.ffn_ot=shard_p2p"], "sites.ffn_ot: is no site (did you mean"),
        (["plan=plan.yaml", "to=vllm", 'parallel.tp="8'], "parallel.tp = '\"8': is no value of a plan"),
        (["plan=list.yaml", "to=nccl"], "plan = 'list.yaml': holds no plan"),
        (["plan=site.yaml", "to=nccl"], "sites.ffn: is no site"),
        (["plan=schedule.yaml", "to=nccl"], "sites.ffn_out = 'sharded': is neither a shipped option"),
        (["plan=plan.yaml"], "to: is missing"),
    ],
)
def test_wrong_words_are_refused(
    words: list[str], part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("plan.yaml").write_text("sites: {ffn_out: shard_p2p}\n")
    Path("list.yaml").write_text("[1]\n")
    Path("site.yaml").write_text("sites: {ffn: shard_p2p}\n")
    Path("schedule.yaml").write_text("sites: {ffn_out: sharded}\n")
    assert main(["settings", "export", *words]) == 2
    assert part in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text", "part"),
    [
        ("torch", "MICRO_PIPELINE_TP = (", "is no Python"),
        ("vllm", "- 1\n", "is no mapping of YAML"),
        ("megatron", "--tensor-model-parallel-size", "parallel.tp = True"),
        ("megatron", "--data 'x", "is no command line"),
        ("vllm", "a: [", "is not YAML"),
        ("deepep", "num_sms: 23", "is no even number of SMs"),
        ("nccl", " ", "is empty"),
    ],
)
def test_settings_that_are_none_are_refused(name: str, text: str, part: str) -> None:
    (*_, file) = tools()[name].files
    with pytest.raises(ConfigError, match=part):
        read([(file, text)], {})


def test_other_spellings_are_read_and_values_that_mean_nothing_are_named() -> None:
    (vllm,), (sglang,), (nccl,) = (tools()[name].files for name in ("vllm", "sglang", "nccl"))
    text = "tensor_parallel_size: '4'\ncompilation_config: '{pass_config: {enable_sp: true}}'\n"
    assert read([(vllm, text)], {}).plan == {"parallel": {"tp": 4, "sequence_parallel": True}}
    assert read([(sglang, "tp: 8\n")], {}).plan == {"parallel": {"tp": 8}}
    imported = read([(nccl, "export NCCL_NVLS_ENABLE=2; export NCCL_DEBUG=INFO")], {})
    assert (imported.plan, imported.unread) == ({}, ["NCCL_NVLS_ENABLE 2", "NCCL_DEBUG"])


@pytest.mark.parametrize(
    ("name", "splits"), [("megatron", {0: 0, 1: 1, 2: 2, 3: 3}), ("torch", {0: 0, 1: 1, 2: 3, 3: 3})]
)
def test_states_that_replicas_split_come_back_from_what_is_written(name: str, splits: dict[int, int]) -> None:
    for zero, read_back in splits.items():
        plan = {"parallel": {"tp": 1, "zero": zero, "prefetch": zero == 3}}
        parts = write_all(tools()[name], plan, "plan.yaml")
        back = nearest(tools()[name], plan, parts)["parallel"]
        assert back["zero"] == read_back
        assert back.get("prefetch", False) == (zero == 3)
        assert back.get("reshard", True) == (zero == read_back)  # ZeRO 2 of fully_shard keeps what it gathered
        lines = [str(line) for line in answer(ToolFiles(name, plan, plan, parts))]
        assert any(line.startswith("nearest: parallel.zero = 3, not 2") for line in lines) == (zero != read_back)


def test_what_a_tool_does_by_itself_is_told_where_it_has_no_setting() -> None:
    plan = {"parallel": {"tp": 1, "zero": 3, "prefetch": False, "collectives": "library"}}
    for reduced in (plan, {"parallel": {"tp": 1, "zero": 3}}):  # which says as much of what is done by itself
        parts = write_all(tools()["torch"], reduced, "plan.yaml")
        lines = "\n".join(map(str, answer(ToolFiles("torch", plan, reduced, parts))))
        assert ("parallel.prefetch = False (by itself: True)" if reduced is plan else "= True, not False") in lines
    assert "FORWARD_PREFETCH" not in written("torch", plan)["dse_torch_settings.py"]


@pytest.mark.more
def test_what_is_written_fits_the_memory_or_is_refused_and_is_told_where_it_is_slower_than_serial(
    elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = {"parallel": {"tp": 1, "dp": 8, "zero": 1}, "run": {"batch": 1, "micro_batches": 1}}
    (elsewhere / "plan.yaml").write_text(yaml.safe_dump({**plan, "optimizer": {"in_backward": True}}))
    words = ["export", "plan=plan.yaml", "model=llama3_8b", "system=h100_8", "run.mode=training"]
    assert main(["settings", *words, "run.sequence_length=8192", "to=megatron"]) == 2  # it keeps all gradients
    refusal = capsys.readouterr().err
    assert re.search(r"what Megatron-LM has does not fit the memory: \d\d(\.\d)? GB of 80 GB", refusal)
    assert main(["settings", *words, "run.sequence_length=8192", "to=megatron", "parallel.zero=3"]) == 0  # its way out
    assert main(["settings", *words, "run.sequence_length=8192", "to=torch"]) == 0
    assert main(["settings", *words, "run.sequence_length=4096", "to=megatron"]) == 0
    assert main(["settings", *words, "run.sequence_length=16384", "to=megatron"]) == 0  # nor does what was planned
    (elsewhere / "plan.yaml").write_text(yaml.safe_dump({**plan, "parallel": {"tp": 1, "dp": 8, "zero": 3}}))
    capsys.readouterr()
    assert main(["settings", *words, "run.sequence_length=4096", "to=megatron"]) == 0
    line = "what is written is slower than serial, by parallel.collectives = in_switch (by itself)"
    assert line in capsys.readouterr().out


@pytest.mark.more
def test_a_plan_elsewhere_is_of_the_step_that_it_names(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = {"sites": {"ffn_out": "transformer_engine"}, "parallel": {"sequence_parallel": True}}
    words = ["model=llama3_8b", "system=h100_8", "run.mode=training", "parallel.tp=8", "stack=megatron_2024"]
    texts = []
    for step, typed in ((words, []), ([], words), ([*words[:-1], "stack=deepseek"], words[-1:])):
        Path("plan.yaml").write_text(yaml.safe_dump({**plan, "step": step} if step else plan))
        assert main(["settings", "export", "plan=plan.yaml", "to=megatron", *typed]) == 0
        texts.append(capsys.readouterr().out)
    assert len(set(texts)) == 1 and "a step of llama3_8b: planned " in texts[0]
    for mode, kernels in (("training", "megatron_2026"), ("prefill", "vllm")):  # the software of its mode
        planned = PlannedStep.of(Path("plan.yaml"), [f"run.mode={mode}"])
        assert planned is not None and get_path(planned.tree, "kernels.name").startswith(kernels)
    Path("plan.yaml").write_text(yaml.safe_dump({**plan, "step": ["output_dir=elsewhere"]}))
    assert main(["settings", "export", "plan=plan.yaml", "to=megatron", "parallel.tp=8"]) == 2


def test_recomputing_everything_takes_a_method_too() -> None:
    text = written("megatron", {"run": {"recompute": "all"}})["megatron_args.txt"]
    words = ("--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1")
    assert all(f"\n{line}\n" in text for line in words)
    assert "--recompute-method" not in written("megatron", {"run": {"recompute": "attention"}})["megatron_args.txt"]


def test_user_buffers_without_their_file_are_those_by_default() -> None:
    (_, arguments) = tools()["megatron"].files
    imported = read([(arguments, "--tp-comm-overlap --tp-comm-overlap-cfg mine.yaml")], {"parallel": {"tp": 8}})
    assert imported.plan["sites"] == sites_of({}, 8)
    assert imported.unread == ["--tp-comm-overlap-cfg mine.yaml (import the folder that holds both files)"]


def test_python_settings_are_read_and_never_run() -> None:
    (file,) = tools()["torch"].files
    imported = read([(file, "import nowhere\nRESHARD_AFTER_FORWARD: bool = False\nX = nowhere.f()\n")], {})
    assert (imported.plan, imported.unread) == ({"parallel": {"reshard": False}}, ["X"])


@pytest.mark.slow
def test_a_schedule_of_a_collective_becomes_an_algorithm_of_msccl_and_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["machine", "collective", "pattern=all_gather", "system=mi210_4", "bytes=1MiB", "out=made"]) == 0
    assert main(["settings", "export", "plan=made/schedule.yaml", "to=msccl"]) == 0
    assert (
        main(["settings", "import", "settings=outputs/export/msccl/algorithm.xml", "from=msccl", "out=back.yaml"]) == 0
    )
    first, back = (yaml.safe_load(Path(name).read_text()) for name in ("made/schedule.yaml", "back.yaml"))
    assert sorted(first["messages"]) == sorted(back["messages"])


def test_settings_that_change_a_step_and_have_no_place_in_a_plan_are_told_before_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("serve.yaml").write_text("tensor-parallel-size: 8\nenable-eplb: true\nserved-model-name: mine\n")
    assert main(["settings", "import", "settings=serve.yaml", "from=vllm", "out=theirs.yaml"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "changes a step, and is not modelled: enable-eplb"
    assert "means nothing to a plan: served-model-name" in lines
    assert read_plan(Path("theirs.yaml")).unread == ("serve.yaml: enable-eplb",)
    section = given_section(Path("theirs.yaml"), {})
    assert section["unread"] == ["serve.yaml: enable-eplb"]
    for tool in tools().values():  # none of these is one that is read
        names = {name for file in tool.files for setting in file.settings for name in (setting.name, *setting.aliases)}
        assert not names & set(tool.unmodelled)


# Launch lines


def import_of(tool: str, text: str, *words: str, name: str = "launch.sh") -> dict[str, Any]:
    """The plan that `settings import` makes of a launch script."""
    Path(name).write_text(text)
    assert main(["settings", "import", f"settings={name}", f"from={tool}", "out=theirs.yaml", *words]) == 0
    plan: dict[str, Any] = yaml.safe_load(Path("theirs.yaml").read_text())
    return plan


WORDS = st.lists(st.text("abXY019-_.,:/=@%", min_size=1, max_size=8), max_size=6)


@given(WORDS)
def test_words_are_the_same_however_a_script_writes_them(words: list[str]) -> None:
    plain = read_script("run " + " ".join(words)).words
    array = "ARGS=(\n" + "".join(f"  {word}  # a note's\n" for word in words) + ')\nrun "${ARGS[@]}"'
    text = f'ARGS="{" ".join(words)}"\nrun $ARGS'
    lines = "run \\\n" + "".join(f"  {word} \\\n" for word in words)
    script = "".join(f"W{place}='{word}'\n" for place, word in enumerate(words))
    script += "run " + " ".join(f'"${{W{place}}}"' for place in range(len(words)))
    default = "run " + " ".join(f"${{UNSET_{place}:-{word}}}" for place, word in enumerate(words))
    for other in (array, text, lines, script, default):
        assert read_script(other).words == plain == ["run", *words]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("A=8\nB=$((A * 4 / 2))\nrun $B ${B}x", ["run", "16", "16x"]),
        ("run ${TP:-${PP:-4}} $1 $(hostname)", ["run", "4", "$1", "$(hostname)"]),
        ("if [ -n x ]; then\nTP=4\nfi\nrun $TP", ["run", "4"]),
        ("TP=8\nif grep x f; then TP=4; fi\nrun $TP", ["grep", "x", "f", "run", "${TP}"]),
        ("D=fp8\nif [ $D == bf16 ]; then A=1; elif test $D = fp8; then A=2; else A=3; fi\nrun $A", ["run", "2"]),
        ("A=(a)\nN=${N:-1}\nif [[ $N -gt 0 ]]; then A=(${A[@]} --b); else A=(c); fi\nrun ${A[@]}", ["run", "a", "--b"]),
        ("TP=8\n[[ $1 == a ]] && TP=4\nrun $TP", ["run", "${TP}"]),
        ("TP=8\nQ=1\n[[ $Q != 1 ]] && TP=4 || TP=2\nrun $TP", ["run", "2"]),
        ("TP=8\nif [[ a == a && b == c ]]; then TP=4; fi\nrun $TP", ["run", "${TP}"]),
        ("cat > c.yml <<'EOF'\na: it's\nEOF\nrun x", ["run", "x"]),
        ("srun bash <<EOF\nrun --tp 4\nEOF\n", ["srun", "bash", "EOF", "run", "--tp", "4", "EOF"]),
        ("A=(--x 1)\nA+=(--y 2)\nrun ${A[@]}", ["run", "--x", "1", "--y", "2"]),
        ('run \'{"a": "$b"}\' "q$UNSET"', ["run", '{"a": "$b"}', "q$UNSET"]),
        ("run --a \\\n  # --b 1 \\\n  --c", ["run", "--a", "--c"]),
    ],
)
def test_what_a_script_says_by_itself_stands_for_words_and_the_rest_keeps_its_name(text: str, words: list[str]) -> None:
    assert read_script(text).words == words


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("A=x\n" + "".join("A=$A$A\n" for _ in range(40)), "stands for more than"),
        ("run " + "${A:-" * 50 + "}" * 50, "values by default"),
        ("run ${A", "closes"),
        ("run 'a", "no closing quotation"),
    ],
)
def test_scripts_that_end_nowhere_or_grow_without_end_are_refused(text: str, part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        read_script(text)


@pytest.mark.parametrize(
    ("tool", "text", "knobs"),
    [
        ("vllm", "vllm serve m -tp 4 -dp 2 -pp 2 --enable-expert-parallel", {"tp": 4, "dp": 2, "pp": 2, "ep": 8}),
        ("vllm", "python3 -m vllm.entrypoints.openai.api_server --tensor_parallel_size=8", {"tp": 8}),
        ("vllm", "docker run -e NCCL_NVLS_ENABLE=0 image -tp 2", {"tp": 2, "collectives": "library"}),
        ("vllm", "vllm serve m -tp 2 --no-enable-expert-parallel", {"tp": 2}),
        ("sglang", "python -m sglang.launch_server --tp 8 --dp 2", {"tp": 8, "dp": 2}),
        ("tensorrt_llm", "trtllm-serve m --tp_size 8 --ep_size 8 --pp_size 2", {"tp": 8, "ep": 8, "pp": 2}),
        ("tensorrt_llm", "x --tensor_parallel_size 4 --moe_expert_parallel_size=4", {"tp": 4, "ep": 4}),
        ("sglang", "x --tp 8 --dp 4 --enable-dp-attention --ep-size 8", {"tp": 2, "dp": 4, "ep": 8}),
        ("sglang", "x --tp 8 --dp 8 --enable-dp-attention --moe-a2a-backend deepep", {"tp": 1, "dp": 8, "ep": 8}),
        ("megatron", "N=2; torchrun --nproc_per_node=8 --nnodes=$N x.py --context-parallel-size 2", {"cp": 2, "dp": 8}),
    ],
)
def test_degrees_of_a_launch_are_those_that_it_sets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: str, text: str, knobs: dict[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert import_of(tool, text)["parallel"] == knobs


@pytest.mark.parametrize(
    ("tool", "text", "part"),
    [
        ("sglang", "x --tp 8 --dp 8 --enable-dp-attention", "parallel.ep: is missing"),
        (
            "tensorrt_llm",
            "cat > c.yml <<E\nenable_attention_dp: true\nE\nx --tp_size 8 --config c.yml",
            "parallel.ep: is",
        ),
        ("vllm", "vllm serve m --config /nowhere/c.yaml", "settings.--config = '/nowhere/c.yaml': is not in the"),
        ("vllm", "vllm serve m -tp $TP", "settings.-tp = '$TP': names what the file does not set (write parallel.tp="),
        ("megatron", "torchrun --nproc-per-node 8 x.py --tensor-model-parallel-size 3", "parallel.dp: would be 8 / 3"),
        (
            "megatron",
            "torchrun --nproc-per-node=$N x.py",
            "names what the file does not set (write parallel.dp=<value>)",
        ),
        ("megatron", "srun --nodes=your_nodes --ntasks-per-node 8 x", "is no whole number from 1 (write parallel.dp="),
        ("megatron", "x --num-layers-per-virtual-pipeline-stage 2", "needs the number of layers"),
        ("megatron", "x --tp-comm-overlap --tp-comm-overlap-cfg /a/b.yaml", "is not in the folder of the launch file"),
        (
            "megatron",
            "x --num-layers ${L} --num-layers-per-virtual-pipeline-stage 2",
            "names what the file does not set",
        ),
    ],
)
def test_sizes_that_a_launch_leaves_open_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tool: str, text: str, part: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("launch.sh").write_text(text)
    assert main(["settings", "import", "settings=launch.sh", f"from={tool}"]) == 2
    assert part in capsys.readouterr().err
    assert not Path("plan.yaml").exists()


def test_what_follows_from_several_settings_of_a_launch_is_in_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ub.yaml").write_text("proj_fprop: {method: pipeline, num_sm: 24, num_splits: 2}\n")
    text = "torchrun --nproc_per_node 8 --nnodes 16 x --num-layers 96 --num-layers-per-virtual-pipeline-stage 2 --bf16"
    text += (
        " --tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 --micro-batch-size 2 --global-batch-size 64"
    )
    text += " --fp8-format e4m3 --recompute-activations --overlap-param-gather --expert-model-parallel-size 4"
    text += " --tp-comm-overlap --tp-comm-overlap-cfg $DIR/ub.yaml"
    plan = import_of("megatron", text)
    assert plan["parallel"] | {"virtual_stages": 12, "dp": 4, "pipeline": "interleaved"} == plan["parallel"]
    run = {"batch": 2, "micro_batches": 8, "precision": "bf16", "products": "fp8", "recompute": "attention"}
    assert plan["run"] == run
    assert plan["sites"]["attention_out"].startswith("uniform_fused_1d num_chunks=2")
    changes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("changes a step")]
    assert len(changes) == 1  # gathers of weights that are not split
    assert any("--overlap-param-gather" in line for line in changes)
    assert plan["parallel"]["etp"] == 8  # experts are cut by tp, too, by default


def parallel_of(text: str, *words: str) -> Any:
    return import_of("megatron", text, *words)["parallel"]


def test_what_a_launch_leaves_open_is_typed_and_what_it_does_not_need_may_stay_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    gpt = "torchrun --nproc_per_node 8 --nnodes 1 x --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16"
    assert parallel_of(gpt, "parallel.dp=2") == {"dp": 2, "tp": 8, "pp": 16}
    assert parallel_of("x --num-layers $L --tensor-model-parallel-size 2") == {"tp": 2}
    plan = import_of("megatron", "x --micro-batch-size 1 --global-batch-size $GBS", "run.micro_batches=4")
    assert plan["run"] == {"micro_batches": 4, "batch": 1}


def test_states_that_replicas_split_follow_from_the_implementation_whatever_its_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ddp = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
    assert parallel_of(f"x --use-megatron-fsdp {ddp}") == {"zero": 3, "reductions": "beside", "prefetch": True}
    assert parallel_of(f"x {ddp} --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads")["zero"] == 2
    assert parallel_of(f"x {ddp} --data-parallel-sharding-strategy optim_grads_params")["zero"] == 1  # of no FSDP
    assert parallel_of("x --use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward") == {"zero": 3, "reshard": False}


def test_virtual_stages_count_the_embedding_and_the_loss_where_they_are_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = "x --num-layers 126 --pipeline-model-parallel-size 16 --num-layers-per-virtual-pipeline-stage 4"
    text += " --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
    knobs = {"pp": 16, "pipeline": "interleaved", "virtual_stages": 2, "ends": "layers", "messages": "beside"}
    assert parallel_of(text) == knobs
    assert parallel_of("x --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 1") == {"pp": 4}


@pytest.mark.parametrize(
    ("modules", "recompute", "tells"),
    [
        ("", "attention", False),
        ("--recompute-modules core_attn", "attention", False),
        ("--recompute-modules mla_up_proj layernorm moe_act", "up_projections", False),
        ("--recompute-modules core_attn mlp", "attention", True),
        ("--recompute-modules mlp moe", None, True),
    ],
)
def test_selective_recomputation_is_of_the_modules_that_are_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    modules: str,
    recompute: str | None,
    tells: bool,
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = import_of("megatron", f"x --recompute-granularity selective {modules} --seq-length 4096")
    assert plan.get("run", {}).get("recompute") == recompute
    assert ("not modelled: --recompute-modules" in capsys.readouterr().out) == tells


def test_scripts_inside_of_words_and_behind_conditions_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    nested = 'A=(--tensor-model-parallel-size 4)\nCMD="cd x; python y.py ${A[@]}"\nsrun -N2 bash -x -c "${CMD}" 2>&1'
    assert parallel_of(nested) == {"tp": 4}
    two = "A=(--sequence-parallel)\nif grep x f; then A=(${A[@]} --use-distributed-optimizer); fi\nx ${A[@]}"
    import_of("megatron", two)
    assert "not modelled: ${A}, which a condition of the script sets in two ways" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("tool", "text", "run", "tells"),
    [
        ("vllm", "-q fp8 --kv-cache-dtype fp8_e4m3", {"weights": "fp8", "products": "fp8", "kv_cache": "fp8"}, ""),
        ("vllm", "-q fp8_per_block --kv-cache-dtype bfloat16", {"weights": "fp8_block", "kv_cache": "bf16"}, ""),
        ("vllm", "--quantization awq_marlin --kv-cache-dtype auto", {"weights": "int4"}, ""),
        ("vllm", "--quantization modelopt_fp4", {"weights": "nvfp4"}, "modelopt_fp4 (products at FP4"),
        ("vllm", "--quantization gptq", {}, "--quantization gptq"),
        ("vllm", "--kv-cache-dtype fp8_ds_mla", {}, "--kv-cache-dtype fp8_ds_mla"),
        ("sglang", "--quantization w8a8_fp8 --kv-cache-dtype fp8_e5m2", {"weights": "fp8_row", "kv_cache": "fp8"}, ""),
        ("sglang", "--quantization w4afp8 --kv-cache-dtype fp4_e2m1", {}, "--kv-cache-dtype fp4_e2m1"),
    ],
)
def test_formats_of_a_launch_are_those_of_the_run_and_others_are_told(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tool: str,
    text: str,
    run: dict[str, str],
    tells: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = import_of(tool, f"serve {text} --port 80")
    assert {**plan.get("run", {}), **run} == plan.get("run", {})
    assert set(plan.get("run", {})) <= {*run, "products"}
    printed = capsys.readouterr().out
    assert ("not modelled: " in printed) == bool(tells)
    assert tells in printed


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_a_format_of_the_cache_is_written_as_the_tool_calls_it(name: str) -> None:
    written_as = {"vllm": "fp8", "sglang": "fp8_e4m3"}[name]
    (text,) = written(name, {"run": {"kv_cache": "fp8"}}).values()
    assert f"kv-cache-dtype: {written_as}\n" in text


def test_formats_that_settings_name_are_known() -> None:
    for tool in tools().values():
        for setting in (setting for file in tool.files for setting in file.settings):
            knobs = [{setting.path: knob} for knob in (*setting.values, *setting.synonyms.values())]
            for tree in [*knobs, *setting.means.values()] if setting.path in ("run.weights", "run.kv_cache") else []:
                ((path, value),) = tree.items()
                check_plan({"run": {path.removeprefix("run."): value}})


def test_a_file_of_settings_counts_beside_the_command_line_as_the_tool_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text("tensor-parallel-size: 2\ndata-parallel-size: 4\nenable-expert-parallel: true\n")
    assert import_of("vllm", "vllm serve m --config ./c.yaml -tp 4")["parallel"] == {"tp": 4, "dp": 4, "ep": 16}
    Path("c.yaml").write_text("tensor_parallel_size: 2\n")
    assert import_of("tensorrt_llm", "trtllm-serve m --tp_size 4 --config c.yaml")["parallel"] == {"tp": 2}


@pytest.mark.parametrize(
    ("tool", "text", "tells"),
    [
        ("vllm", "-dp 8", "data-parallel-size 8 without enable-expert-parallel"),
        ("vllm", "-dp 8 -ep", ""),
        ("vllm", "-tp 8", ""),
        ("sglang", "--tp 8 --ep 4", "parallel.ep = 4: each expert is cut over 2 GPUs as well"),
        ("sglang", "--tp 8 --ep 8", ""),
        ("tensorrt_llm", "--tp_size 8 --ep_size 2", "parallel.ep = 2: each expert is cut over 4 GPUs as well"),
    ],
)
def test_experts_that_a_tool_cuts_otherwise_than_a_plan_are_told(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tool: str,
    text: str,
    tells: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    import_of(tool, f"serve {text}")
    printed = capsys.readouterr().out
    assert ("not modelled: " in printed) == bool(tells)
    assert tells in printed


# Scripts with several launches

TWO = """export VLLM_USE_V1=1
TP=4; echo first --tensor-parallel-size 2
NCCL_NVLS_ENABLE=0 vllm serve m --port 8000 \\
  -tp $TP > a.log 2>&1 &
cat > other.yaml <<EOF
a: 1
EOF
TP=8
vllm serve m --port 8001 -tp $TP --kv-cache-dtype fp8 &
"""
HOSTS = "srun --nodes=1 --ntasks-per-node=1 hostname --ip-address\n"
RUNS = "srun bash -c 'torchrun --nproc-per-node 8 a.py --micro-batch-size 1'\ntorchrun --nproc-per-node 4 b.py\n"
BRANCHES = "if [ $1 = a ]; then\n  vllm serve m -tp 4\nelse\n  vllm serve m {}\nfi\n"
SERVERS = "serve() { python -m sglang.launch_server $@; }\nserve --tp 8 --port 1\nserve --tp 4\nserve --tp 8\n"


@pytest.mark.parametrize(
    ("tool", "text", "parts"),
    [
        ("vllm", TWO, ["line 3 (vllm serve m)", "tensor-parallel-size 4", "line 9", "tensor-parallel-size 8"]),
        ("vllm", TWO, ["NCCL_NVLS_ENABLE 0", "no NCCL_NVLS_ENABLE", "write launch=1 or launch=2", "no kv-cache-dtype"]),
        ("megatron", HOSTS + RUNS, ["line 2 (torchrun) has --nproc-per-node 8", "line 3 (torchrun)", "launch=2"]),
        ("vllm", BRANCHES.format("-tp 8"), ["line 2 ", "line 4 ", "tensor-parallel-size 8"]),
        ("sglang", SERVERS, ["holds 3 launches", "line 2 ", "line 3 ", "launch=1 to launch=3"]),
        ("vllm", "x -tp 1\n" * 1001, ["holds more than 1000 launches"]),
    ],
)
def test_launches_of_a_script_that_set_different_things_are_refused_by_their_lines(
    tool: str,
    text: str,
    parts: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("launch.sh").write_text(text)
    assert main(["settings", "import", "settings=launch.sh", f"from={tool}"]) == 2
    refusal = capsys.readouterr().err
    assert all(part in refusal for part in parts), refusal
    assert not Path("plan.yaml").exists()


def test_one_of_several_launches_is_read_with_its_own_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert import_of("vllm", TWO, "launch=1")["parallel"] == {"tp": 4, "collectives": "library"}
    second = import_of("vllm", TWO, "launch=2")
    assert (second["parallel"], second["run"]["kv_cache"]) == ({"tp": 8}, "fp8")
    assert import_of("sglang", SERVERS, "launch=2")["parallel"] == {"tp": 4}
    allocated = "salloc -N 4 --ntasks-per-node 8\n" + HOSTS + "x.sh --tensor-model-parallel-size 8\nx.sh --bf16\n"
    assert import_of("megatron", allocated, "launch=1")["parallel"] == {"tp": 8, "dp": 4}
    assert import_of("megatron", allocated, "launch=2")["parallel"] == {"dp": 32}


@pytest.mark.parametrize(
    "text",
    [
        BRANCHES.format("--port 3 --tensor-parallel-size=4"),
        "for p in 1 2; do vllm serve m --port $p -tp 4; done\nvllm serve m -tp 4\n",
        "if [ x = y ]; then vllm serve m -tp 8; fi\nvllm serve m -tp 4\n",
        "docker run -e VLLM_USE_V1=1 -it image\nvllm serve m -tp 4\necho vllm serve m -tp 8\n",
        "vllm serve m -tp 8 -tp 4\n",
        "--tensor-parallel-size 4\n--port 80\n",
    ],
)
def test_launches_that_set_the_same_are_one(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert import_of("vllm", text)["parallel"] == {"tp": 4}


@pytest.mark.parametrize(
    ("word", "name", "part"),
    [
        ("launch=3", "launch.sh", "launch = 3: is the number of no launch: the script has 2 (write launch=1 or"),
        ("launch=0", "launch.sh", "launch = '0': is no whole number from 1"),
        ("launch=1", "serve.yaml", "launch = 1: is of launch scripts, and this is none (leave it out)"),
    ],
)
def test_a_number_of_no_launch_is_refused(
    word: str,
    name: str,
    part: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("launch.sh").write_text(TWO)
    Path("serve.yaml").write_text("tensor-parallel-size: 8\n")
    assert main(["settings", "import", f"settings={name}", "from=vllm", word]) == 2
    assert part in capsys.readouterr().err


@pytest.mark.more
def test_plans_given_back_through_every_exporter_are_judged_as_their_sites_are() -> None:
    errors = judge_errors(3, seed=1)
    assert errors.worst <= 1e-12
    assert errors.judged + errors.refused == 3 * len(tools())
    # the steps are on NVIDIA's GPUs
    assert all(errors.by_tool.get(name, 0) > 0 for name in tools() if name not in ("msccl", "rccl_tuner", "iris"))


_SERVED: dict[str, Any] = {
    "parallel": {"tp": 1, "pp": 1, "dp": 4, "ep": 4},
    "run": {"kv_cache": "fp8"},
    "server": {"scheduler": {"tokens": 4096, "sequences": 128, "memory": 0.85, "block": 32, "context": 8192}},
    "engines": {"apart": False, "overlap": "waited"},
}


@pytest.mark.parametrize("tool", ["vllm", "sglang", "tensorrt_llm"])
@pytest.mark.parametrize("apart", [False, True])
def test_a_plan_of_serving_comes_back_from_its_settings(tool: str, apart: bool, elsewhere: Path) -> None:
    changes = {"apart": True, "prefill_tp": 2 if tool != "tensorrt_llm" else 1} if apart else {}
    engines = {**_SERVED["engines"], **changes}
    plan = {**_SERVED, "engines": {**engines, "replicas": 2, **({"prefill_replicas": 3} if apart else {})}}
    (elsewhere / "plan.yaml").write_text(yaml.safe_dump(plan))
    assert main(["settings", "export", "plan=plan.yaml", f"to={tool}", "out=theirs"]) == 0
    files = [path for path in elsewhere.glob("theirs/**/*") if path.suffix in (".yaml", ".yml")]
    tokens = 4 * 4096 if tool == "sglang" else 4096  # SGLang counts those of all ranks of attention
    assert files
    assert all(re.search(rf"tokens: {tokens}\b|prefill-size: {tokens}\b", path.read_text()) for path in files)
    words = ["settings", "import", "settings=theirs", f"from={tool}", "serving=true", "out=back.yaml"]
    assert main(words) == 0
    back = yaml.safe_load((elsewhere / "back.yaml").read_text())
    assert back == {**_SERVED, "tool": tool, "server": {"name": tool, **_SERVED["server"]}, "engines": engines}


@pytest.mark.parametrize(("flags", "tokens"), [("--dp 2", 4096), ("--dp 2 --enable-dp-attention --ep 8", 2048)])
def test_sglang_divides_its_budget_among_ranks_of_attention_alone(flags: str, tokens: int, elsewhere: Path) -> None:
    launch = f"python -m sglang.launch_server --tp 8 {flags} --chunked-prefill-size 4096"
    (elsewhere / "launch.sh").write_text(launch)
    assert main(["settings", "import", "settings=launch.sh", "from=sglang", "serving=true", "out=back.yaml"]) == 0
    back = yaml.safe_load((elsewhere / "back.yaml").read_text())
    assert back["server"]["scheduler"]["tokens"] == tokens


@pytest.mark.parametrize("name", ["vllm", "sglang", "tensorrt_llm"])
def test_overlaps_of_serving_are_set_as_the_answer_of_its_plan_names_them(
    name: str, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = option_file("server", name)
    assert file is not None
    for overlap, option in yaml.safe_load(file.read_text())["overlaps"].items():
        engines = {**_SERVED["engines"], "overlap": overlap}
        plan = {**_SERVED, "run": {"kv_cache": "fp8", "weights": "fp8"}, "engines": engines}
        (elsewhere / "plan.yaml").write_text(yaml.safe_dump(plan))
        assert main(["settings", "export", "plan=plan.yaml", f"to={name}", "out=theirs"]) == 0
        (text,) = (path.read_text() for path in (elsewhere / "theirs").glob("*.yaml"))
        printed = capsys.readouterr().out
        is_variable = "=" in option
        line = f"{option[2:]}: true" if option.startswith("--") else option
        assert (f": {option} " in printed) if is_variable else (f"\n{line}\n" in f"\n{text}")
        assert not re.search(r"no setting for (parallel.(collectives|exchanges)|engines)", printed)
        by_itself = "needs no setting for run.weights = fp8 with a checkpoint in fp8" in printed
        assert by_itself == (name == "tensorrt_llm") == ("quantization: fp8" not in text)
        assert "nvls" not in text
        read = ["settings", "import", "settings=theirs", f"from={name}", "serving=true", "out=back.yaml"]
        assert main(read) == 0
        back = yaml.safe_load((elsewhere / "back.yaml").read_text())["engines"]["overlap"]
        assert back == ("waited" if is_variable else overlap)


def test_a_plan_of_serving_is_refused_where_it_says_nothing(
    elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (elsewhere / "plan.yaml").write_text(yaml.safe_dump({**_SERVED, "optimiser": {}}))
    (elsewhere / "empty.sh").write_text("echo nothing\n")
    assert main(["settings", "export", "plan=plan.yaml", "to=vllm"]) == 2
    assert "plan.optimiser" in capsys.readouterr().err
    (elsewhere / "plan.yaml").write_text(yaml.safe_dump(_SERVED))
    assert main(["settings", "export", "plan=plan.yaml", "to=megatron"]) == 2
    assert "is no serving software" in capsys.readouterr().err
    assert main(["settings", "import", "settings=empty.sh", "from=vllm", "serving=true"]) == 2
    assert main(["settings", "import", "settings=empty.sh", "from=vllm", "serving=maybe"]) == 2


@given(layers=st.integers(1, 130), stages=st.integers(1, 64), ends=st.sampled_from([0, 2]))
def test_layers_of_stages_by_name_are_all_layers_and_come_back(layers: int, stages: int, ends: int) -> None:
    if layers + ends < 2 * stages or (stages == 1 and ends):
        reject()
    text = pipeline_layout(layers, stages, ends=ends)
    assert text.startswith("E") and text.endswith("L") and text.count("|") == stages - 1
    sizes = stage_sizes(text)
    assert sizes is not None and sum(sizes) == layers and len(sizes) == stages


def test_a_published_layout_is_read() -> None:
    assert stage_sizes("Et*4|(t*4|)*14tmL") == [*[4] * 15, 1]  # DeepSeek-V3 of Megatron-Bridge, 61 layers on 16 stages


@pytest.mark.slow
@pytest.mark.parametrize("name", ["megatron", "vllm", "sglang", "tensorrt_llm", "torch"])
def test_what_a_plan_rests_on_is_written_or_told(
    name: str, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    training = name in ("megatron", "torch")
    parallel = {"tp": 1, "pp": 1, "dp": 8, "ep": 8, **({"zero": 1 if name == "megatron" else 3} if training else {})}
    run = {"products": "fp8", "precision": "bf16", **({} if training else {"weights": "fp8", "kv_cache": "fp8"})}
    (elsewhere / "plan.yaml").write_text(yaml.safe_dump({"parallel": parallel, "run": run}))
    step = ["model=qwen3_30b_a3b", "system=h100_8", f"run.mode={'training' if training else 'decode'}"]
    assert main(["settings", "export", "plan=plan.yaml", f"to={name}", "out=theirs", *step]) == 0
    text = "".join(path.read_text() for path in (elsewhere / "theirs").iterdir())
    printed = " ".join(capsys.readouterr().out.split())
    words = {
        "megatron": [
            "--expert-model-parallel-size 8",
            "--expert-tensor-parallel-size 1",
            "--fp8-format hybrid",
            "--bf16",
        ],
        "vllm": ["enable-expert-parallel: true", "quantization: fp8", "kv-cache-dtype: fp8", "data-parallel-size: 8"],
        "sglang": ["enable-dp-attention: true", "tp-size: 8", "dp-size: 8", "ep-size: 8", "quantization: fp8"],
        "tensorrt_llm": ["enable_attention_dp: true", "tensor_parallel_size: 8", "moe_expert_parallel_size: 8"],
        "torch": ["EXPERT_PARALLEL_DEGREE = 8", "QUANTIZED_LINEAR = 'float8'", "DATA_PARALLEL = 'fully_shard'"],
    }[name]
    assert [word for word in words if word not in text] == []
    for path, value in leaves_of({"parallel": parallel, "run": run}):
        assert path in printed or path == "parallel.pp", (path, value)


@pytest.mark.parametrize("text", ["1," * 20_000, "# a comment\n" * 12_000])
def test_a_script_of_one_long_word_or_of_comments_takes_steps_in_proportion_to_its_length(text: str) -> None:
    counts = list[int]()
    for size in (len(text) // 2, len(text)):
        profile = cProfile.Profile()
        script = profile.runcall(read_script, text[:size] + "\ntorchrun train.py\n")
        counts.append(sum(entry.callcount for entry in profile.getstats()))
        assert script.words[-2:] == ["torchrun", "train.py"]
    assert counts[1] < 2.2 * counts[0]  # twice as long; quadratic in the length, it would be four times
