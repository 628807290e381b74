"""Files around launches: manifests, configurations of other tools, and what a script leaves open."""

from __future__ import annotations

import json
import shlex
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dse.cli import main
from dse.errors import ConfigError
from dse_deploy.command import texts_of
from dse_deploy.kinds import kind_of
from dse_deploy.manifests import manifest_kind, script_of
from dse_deploy.reading import read
from dse_deploy.settings import tools
from dse_deploy.shell import read_script
from tests.support import drawn

DEGREES = st.fixed_dictionaries(
    {}, optional={"--tensor-parallel-size": st.sampled_from([1, 2, 8]), "--data-parallel-size": st.sampled_from([1, 4])}
)


def plan_of(tool: str, path: Path) -> dict[str, Any]:
    return read(texts_of(tools()[tool], path, 0), {}).plan


def nested(container: dict[str, Any], keys: list[str]) -> dict[str, Any]:
    """A container below some sections, the last of them a list."""
    tree: Any = [container]
    for key in reversed(keys):
        tree = {key: tree}
    return {"apiVersion": "x/v1", "kind": "Anything", "spec": tree}


@pytest.mark.slow
@drawn(60)
@given(DEGREES, st.booleans(), st.sampled_from(["args", "command", "both", "shell"]), st.booleans())
def test_a_container_says_what_its_command_line_says(
    tmp_path_factory: pytest.TempPathFactory, degrees: dict[str, int], experts: bool, form: str, as_json: bool
) -> None:
    folder = tmp_path_factory.mktemp("launch")
    words = ["vllm", "serve", "my/model", *(text for pair in degrees.items() for text in map(str, pair))]
    words += ["--enable-expert-parallel"] if experts else []
    containers: dict[str, dict[str, Any]] = {
        "args": {"args": words},
        "command": {"command": words},
        "both": {"command": words[:2], "args": words[2:]},
        "shell": {"command": ["/bin/sh", "-c"], "args": [f"set -e; exec {shlex.join(words)}"]},
    }
    tree = nested({"name": "server", "image": "x"} | containers[form], ["template", "spec", "containers"])
    manifest, script = folder / "deploy.yaml", folder / "launch.sh"
    manifest.write_text(json.dumps(tree) if as_json else yaml.safe_dump(tree))
    script.write_text(shlex.join(words))
    assert plan_of("vllm", manifest) == plan_of("vllm", script)


def test_the_environment_of_a_container_is_known_in_its_command_line() -> None:
    container = {"env": [{"name": "TP", "value": "8"}], "args": ["--tensor-parallel-size", "$(TP)", "--x", "$(OTHER)"]}
    assert read_script(script_of(yaml.safe_dump(nested(container, ["containers"])))).words[1::2] == ["8", "$(OTHER)"]


def test_checks_of_health_start_nothing() -> None:
    probe = {"livenessProbe": {"exec": {"command": ["curl", "--tensor-parallel-size", "4"]}}}
    assert not script_of(yaml.safe_dump(nested(probe, ["containers"]))).strip()


@pytest.mark.parametrize(
    ("text", "suffix", "kind"),
    [
        ("apiVersion: v1\nkind: Service\n---\napiVersion: v1\nkind: Job\n", ".yaml", "Kubernetes (Service, Job)"),
        ("services: {a: {image: x}}", ".yml", "docker compose"),
        ("services: {a: {port: 8}}", ".yml", "keys services"),
        ('{"train_batch_size": 8}', ".json", "DeepSpeed"),
        ("distributed_type: FSDP\nnum_processes: 8", ".yaml", "Accelerate"),
        ("[parallelism]\ntensor_parallel_degree = 2", ".toml", "torchtitan"),
        ("[project]\nname = 'x'", ".toml", "a file of TOML"),
        ("python -m verl actor.tp=4 +trainer.nnodes=2", ".sh", "actor.tp, trainer.nnodes"),
        ("a: [", ".yaml", ""),
        ("echo", ".sh", ""),
    ],
)
def test_a_file_of_which_nothing_is_read_is_named(text: str, suffix: str, kind: str) -> None:
    assert kind in kind_of(text, suffix)
    assert bool(kind) == bool(kind_of(text, suffix))


@pytest.mark.parametrize("tool", ["megatron", "vllm", "sglang", "torch", "nccl"])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("x.yaml", "apiVersion: v1\nkind: Service\n"),
        ("x.json", '{"zero_optimization": {"stage": 2}}'),
        ("x.toml", "[project]\nname = 'x'\n"),
        ("x.toml", "["),
        ("x.sh", "torchrun --nnodes 2 --nproc-per-node 8 main.py actor.tp=4\n"),
    ],
)
def test_nothing_is_no_plan(tmp_path: Path, tool: str, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    assert (
        main(["settings", "import", f"settings={tmp_path / name}", f"from={tool}", f"out={tmp_path / 'p.yaml'}"]) == 2
    )
    assert not (tmp_path / "p.yaml").exists()


def test_manifests_keep_the_lines_of_their_containers() -> None:
    text = "---\nkind: A\napiVersion: v1\na:\n- args: [one]\n---\nkind: B\napiVersion: v1\nb:\n- args: [two]\n"
    lines = {command.words[0]: command.line for command in read_script(script_of(text)).commands}
    assert lines == {"one": 5, "two": 10}
    assert manifest_kind(text) == "a manifest of Kubernetes (A, B)"


def test_a_manifest_with_aliases_is_refused() -> None:
    with pytest.raises(ConfigError, match="alias"):
        script_of("a: &x {args: [y]}\nb: *x\n")


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("case 70b in 8b) TP=2;; 70b|80b) TP=8;; *) TP=1;; esac", "8"),
        ("M=9b\ncase $M in\n  8b)\n  TP=2\n  ;;\n  *b)\n  TP=3 ;;\nesac", "3"),
        ("case $1 in a) TP=2;; *) TP=2;; esac", "2"),
        ("case $1 in a) TP=2;; b) TP=2;; esac", "${TP}"),
        ("case $1 in a) TP=2;; *) TP=4;; esac", "${TP}"),
        ('[ -z "$TP" ] && TP=8', "8"),
        ('[ "$A" = 1 ] && TP=8', "${TP}"),
        ('[ "$A" = 1 ] && TP=8 || TP=4', "${TP}"),
        ('if [ -z "${TP:-}" ]; then TP=8; fi', "8"),
        ("if a; then TP=4; else TP=4; fi", "4"),
        ("if a; then if b; then TP=4; else TP=4; fi; else TP=4; fi", "4"),
        ("if a; then TP=4; elif b; then TP=4; fi", "${TP}"),
        ("for i in 1 2; do TP=8; done", "8"),
        ("TP=2\ncase a in a) TP=4;; esac", "4"),
    ],
)
def test_a_value_that_a_run_decides_is_open_and_no_other_one(script: str, words: str) -> None:
    assert read_script(f"{script}\nx $TP").words[-1] == words


@pytest.mark.parametrize(
    ("first", "adds", "all_of_it"),
    [
        ("A=(--a 1)", "A+=(--b)", '"${A[@]}"'),
        ("A=(--a 1)", "A=(${A[@]} --b)", "${A[@]}"),
        ('A="--a 1"', 'A="$A --b"', "$A"),
    ],
)
def test_options_that_a_run_adds_are_told_beside_those_of_any_case(first: str, adds: str, all_of_it: str) -> None:
    script = read_script(f"{first}\n[ -n $X ] && {adds}\nx {all_of_it} --c")
    assert script.words == ["x", "--a", "1", "--", "${A}", "--c"]
    assert script.two_ways == {"A"}


WORDS = ("case", "x", "in", "a)", ";;", "esac", "if", "then", "else", "fi", "A=1", "&&", "[", "]", "\n", "(")


@drawn(200)
@given(st.lists(st.sampled_from(WORDS), max_size=14))
def test_no_order_of_words_ends_the_reader(words: list[str]) -> None:
    with suppress(ConfigError):
        read_script(" ".join(words))


def titan(**parallelism: Any) -> str:
    rows = "".join(f"{name} = {json.dumps(value)}\n" for name, value in parallelism.items())
    other = "[activation_checkpoint]\nmode = 'selective'\nselective_ac_option = 'op'\n"
    return f"[parallelism]\n{rows}[training]\nlocal_batch_size = 4\n{other}"


OF_2024 = """
[training]
batch_size = 32
seq_len = 8192
data_parallel_shard_degree = 8
tensor_parallel_degree = 8
[experimental]
pipeline_parallel_degree = 8
pipeline_parallel_schedule = "interleaved_1f1b"
[float8]
enable_float8_linear = true
[activation_checkpoint]
mode = "full"
"""


@pytest.mark.parametrize(
    ("added", "stages", "run"),
    [
        ("", 2, {"batch": 4, "micro_batches": 8}),  # as many as ranks of the pipeline
        ("pipeline_parallel_microbatches = 16", 2, {"batch": 2, "micro_batches": 16}),
        (f"pipeline_parallel_split_points = {json.dumps(['layers.1'] * 31)}", 4, {"batch": 4, "micro_batches": 8}),
    ],
)
def test_files_of_torchtitan_of_2024_have_their_own_names(
    tmp_path: Path, added: str, stages: int, run: dict[str, int]
) -> None:
    (tmp_path / "a.toml").write_text(OF_2024.replace("[float8]", f"{added}\n[float8]"))
    plan = plan_of("torch", tmp_path / "a.toml")
    assert plan["parallel"] == {
        **{"tp": 8, "pp": 8, "dp": 8, "zero": 3, "reshard": False, "sequence_parallel": True},
        **{"pipeline": "interleaved", "virtual_stages": stages},
    }
    assert plan["run"] == {**run, "sequence_length": 8192, "products": "fp8", "recompute": "all"}


def test_micro_batches_that_do_not_divide_the_batch_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(OF_2024.replace("batch_size = 32", "batch_size = 12"))
    with pytest.raises(ConfigError, match="does not divide training"):
        plan_of("torch", tmp_path / "a.toml")


def test_torchtitan_replicas_are_those_of_both_degrees(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(titan(data_parallel_replicate_degree=2, data_parallel_shard_degree=1))
    assert plan_of("torch", tmp_path / "a.toml") == {
        "run": {"batch": 4, "micro_batches": 1},
        "parallel": {"dp": 2, "zero": 0},
    }
    (tmp_path / "b.toml").write_text(titan(tensor_parallel_degree=2))
    settings = read(texts_of(tools()["torch"], tmp_path / "b.toml", 0), {})
    assert settings.plan["parallel"] == {"tp": 2, "sequence_parallel": True, "zero": 3, "reshard": True}
    assert settings.unmodelled == ["ACTIVATION_CHECKPOINT selective by op"]
