"""Questions as tools: their schemas, what is refused, and answers that are those of the command line."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dse.cli import main
from dse.errors import ConfigError
from dse_mcp.questions import TOOLS, Advice, Plan, Profile
from dse_mcp.runs import followed

PROFILE = Path(__file__).parents[2] / "traces" / "dse_traces" / "conf" / "data" / "profiles" / "mi300x_resnet.csv.gz"
WHY = "mcp is not installed: pip install 'overlap-dse-assistants[mcp]'"
QUICK: Mapping[str, Mapping[str, Any]] = {
    "options": {"kind": "systems"},
    "machine": {"system": "h100_8"},
    "collective_libraries": {"pattern": "all_gather", "system": "b200_8"},
}
TEN: Mapping[str, Mapping[str, Any]] = {
    "plan": {"model": "llama3_8b", "mode": "decode", "batch": 8, "settings": {"run.sequence_length": 1024}},
    "serve_plan": {"model": "llama3_8b", "tpot_s": 0.05},
    "overlap_of_gemms": {"gemms": [{"name": "mine", "m": 4096, "n": 8192, "k": 8192}]},
    "collective_beside_gemm": {"settings": {"workload.only": "[70b_qkv-equal-ag]"}},
    "power_limits": {"settings": {"workload.only": "[70b_qkv-equal-ag]"}},
    "profile": {"file": "run.csv.gz"},
    "profile_advice": {"file": "run.csv.gz", "system": "mi300x_8"},
    "profile_difference": {"file_before": "run.csv.gz", "file_after": "again.csv.gz"},
    "claims": {"study": "conccl"},
    "options": {"kind": "models"},
}
"""Ten of the questions of docs/start/questions.md, in this order: claims are of the run before."""


def call(root: Path, tool: str, question: Mapping[str, Any], *, progress: Any = None) -> dict[str, Any]:
    """Ask a server of this process, by the client of the official package."""
    mcp = pytest.importorskip("mcp", reason=WHY)
    from dse_mcp.server import server_of

    async def answered() -> dict[str, Any]:
        async with mcp.Client(server_of(root)) as client:
            result = await client.call_tool(tool, dict(question), progress_callback=progress)
            assert not result.is_error, result.content
            answer: dict[str, Any] = result.structured_content
            return answer

    return asyncio.run(answered())


def by_hand(root: Path, command: str) -> list[str]:
    """Lines of the same command on a command line, without times of runs."""
    words = [sys.executable, *command.split(" ")[1:]] if "'" not in command else ["sh", "-c", command]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(words, cwd=root, env=environment, capture_output=True, text=True, check=False)
    return plain(done.stdout)


def plain(text: str) -> list[str]:
    """Lines without those that differ from run to run."""
    lines = (line.rstrip() for line in text.splitlines() if line.strip())
    return [line for line in lines if "outputs/" not in line and "mlflow" not in line.lower() and "resum" not in line]


def test_each_question_is_a_tool_with_a_schema_of_its_own(tmp_path: Path) -> None:
    mcp = pytest.importorskip("mcp", reason=WHY)
    from dse_mcp.server import server_of

    async def listed() -> Any:
        async with mcp.Client(server_of(tmp_path)) as client:
            return await client.list_tools()

    tools = {tool.name: tool for tool in asyncio.run(listed()).tools}
    assert tools.keys() == TOOLS.keys()
    for name, question in TOOLS.items():
        schema = tools[name].input_schema
        assert set(schema["properties"]) == set(question.model_fields)
        assert set(schema.get("required", ())) == {key for key, of in question.model_fields.items() if of.is_required()}
        assert "python -m dse" in tools[name].description


@pytest.mark.parametrize("tool", sorted(QUICK))
def test_an_answer_is_that_of_the_command_line(tool: str, tmp_path: Path) -> None:
    answer = call(tmp_path, tool, QUICK[tool])
    assert answer["exit_code"] == 0
    assert answer["refused"] is None
    assert plain(answer["text"]) == by_hand(tmp_path, answer["command"]) != []
    assert answer["answer"] == [line.rstrip() for line in answer["text"].splitlines() if line.strip()][:12]


@pytest.mark.nightly
def test_ten_questions_are_answered_as_on_the_command_line(tmp_path: Path) -> None:
    for name in ("run.csv.gz", "again.csv.gz"):
        shutil.copy(PROFILE, tmp_path / name)
    seen = list[float]()

    async def progress(done: float, total: float | None, text: str | None) -> None:
        seen.append(done)

    for tool, question in TEN.items():
        answer = call(tmp_path, tool, question, progress=progress)
        assert answer["refused"] is None, answer
        assert plain(answer["text"]) == by_hand(tmp_path, answer["command"]) != [], tool
        if tool in ("plan", "overlap_of_gemms"):
            assert (tmp_path / answer["page"]).is_file()
    assert seen


@pytest.mark.parametrize(
    "settings",
    [
        {"output_dir": "/tmp/elsewhere"},
        {"hydra.run.dir": "here"},
        {"store.path": "there"},
        {"tracking.uri": "sqlite"},
        {"simulator.command": "sh"},
        {"space.simulator.engine": "choice(fluid,node)"},
        {"executor.jobs": 8},
        {"study.module": "os"},
        {"run.batch=1 output_dir": 2},
        {"--config-dir": "conf"},
        {"run.batch": "$(touch hacked)"},
        {"run.batch": "../../secret"},
        {"run.batch": "4\noutput_dir=x"},
        {"model.path": "/etc/hosts"},
        {"run.batch": "a;b"},
        {"run.batch": "`id`"},
    ],
)
def test_settings_that_do_more_than_set_a_value_are_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"settings\."):
        Plan(model="llama3_8b", settings=settings).words(tmp_path)


@pytest.mark.parametrize("model", ["../conf/model", "/etc/passwd", "-h", "a b", "model=other", "", "x" * 101])
def test_names_are_no_paths_and_no_flags(model: str) -> None:
    with pytest.raises(ValueError, match="model"):
        Plan(model=model)


def test_files_are_those_of_the_folder_alone(tmp_path: Path) -> None:
    inside, outside = tmp_path / "root", tmp_path / "secret.json"
    inside.mkdir()
    outside.write_text("{}")
    (inside / "run.json").write_text("{}")
    (inside / "link.json").symlink_to(outside)
    assert Advice(file="run.json").words(inside) == ["profile", "advise", "profile=run.json"]
    for name in ("../secret.json", str(outside), "link.json"):
        with pytest.raises(ConfigError, match="outside the folder"):
            Profile(file=name).words(inside)
    for name in ("none.json", ".", "a\0b"):
        with pytest.raises(ConfigError, match="no file"):
            Profile(file=name).words(inside)


def test_a_refusal_has_the_path_the_rule_and_the_way_out(tmp_path: Path) -> None:
    before = call(tmp_path, "plan", {"model": "llama3_8b", "settings": {"store.path": "x"}})
    assert (before["exit_code"], before["text"]) == (2, "")
    assert "settings.store.path" in before["refused"]
    of_command = call(tmp_path, "machine", {"system": "h100_9"})
    assert of_command["exit_code"] == 2
    assert "did you mean" in of_command["refused"]


def test_a_request_without_the_token_is_turned_away() -> None:
    pytest.importorskip("mcp", reason=WHY)
    from dse_mcp.server import guarded

    reached = list[str]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        reached.append(scope["path"])

    async def request(token: bytes | None) -> list[dict[str, Any]]:
        sent = list[dict[str, Any]]()

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        headers = [] if token is None else [(b"Authorization", token)]
        await guarded(app, "a" * 24)({"type": "http", "path": "/mcp", "headers": headers}, None, send)
        return sent

    for token in (None, b"Bearer " + b"b" * 24, b"a" * 24):
        (start, _) = asyncio.run(request(token))
        assert start["status"] == 401
    assert not reached
    assert asyncio.run(request(b"Bearer " + b"a" * 24)) == []
    assert reached == ["/mcp"]


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (["transport=ftp"], "neither stdio nor http"),
        (["transport=http"], "is needed for http"),
        (["port=80"], "is no port"),
        (["root=nowhere"], "is no folder"),
        (["host=0.0.0.0"], "host"),
    ],
)
def test_the_command_refuses_what_it_cannot_serve(
    words: list[str], rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DSE_MCP_TOKEN", raising=False)
    assert main(["mcp", *words]) == 2
    assert rule in capsys.readouterr().err


@pytest.mark.more
def test_a_question_that_is_cancelled_ends_its_command(tmp_path: Path) -> None:
    from dse_mcp.runs import ask

    async def report(done: float, total: float | None, text: str) -> None:
        pass

    async def cancelled() -> None:
        words = Plan(model="llama3_70b", gpus=64, mode="training", settings={"fabric": "ndr400"}).words(tmp_path)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ask(words, tmp_path, report), 1.5)

    asyncio.run(cancelled())
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert "layouts.gpus=64" not in running


def test_lines_and_characters_that_arrive_in_pieces_are_read_whole() -> None:
    seen = list[tuple[float, float | None, str]]()

    async def report(done: float, total: float | None, text: str) -> None:
        seen.append((done, total, text))

    async def read() -> str:
        reader = asyncio.StreamReader()
        text = "plan ━━━━ 12/40 3 points/s\rplan ━━━━ 40/40\nrefused: ü is no number"
        answer = asyncio.create_task(followed(reader, report))
        for byte in text.encode():
            reader.feed_data(bytes([byte]))
            await asyncio.sleep(0)
        reader.feed_eof()
        return await answer

    assert asyncio.run(read()) == "refused: ü is no number"
    assert seen == [(12.0, 40.0, "plan"), (40.0, 40.0, "plan")]
