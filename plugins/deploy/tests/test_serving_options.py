"""Options of how engines read requests and let prompts wait: written for their software, and read back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from dse.cli import main

OPTIONS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "sglang": ({"read_steps": 30}, ["scheduler-recv-interval: 30"]),
    "tensorrt_llm": (
        {"wait_steps": 20, "wait_share": 0.9, "gathered": 60},
        ["batch_wait_timeout_iters: 20", "batch_wait_max_tokens_ratio: 0.9", "timeout_iters: 60"],
    ),
    "vllm": ({"prompt_graphs": 2048}, ["max-cudagraph-capture-size: 2048"]),
}


@pytest.mark.parametrize("tool", OPTIONS)
def test_options_are_written_and_read_back(tool: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options, lines = OPTIONS[tool]
    scheduler: dict[str, Any] = {"tokens": 4096, "sequences": 64, **options}
    plan: dict[str, Any] = {
        "parallel": {"tp": 1},
        "run": {"precision": "bf16"},
        "server": {"name": tool, "scheduler": scheduler},
    }
    plan["engines"] = {"replicas": 1, "apart": False, "overlap": "waited"}
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan))
    out = tmp_path / "out"
    assert main(["settings", "export", f"plan={tmp_path}/plan.yaml", f"to={tool}", f"out={out}"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "server.scheduler.tokens" in printed and "has no setting for server.scheduler" not in printed
    (file,) = out.iterdir()
    written = file.read_text()
    assert all(line in written for line in lines)
    back = tmp_path / "back.yaml"
    words = ["settings", "import", f"settings={file}", f"from={tool}", "serving=true", f"out={back}"]
    assert main(words) == 0
    assert options.items() <= yaml.safe_load(back.read_text())["server"]["scheduler"].items()
