"""Figures of long runs: those of other code are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import recorded


def test_a_record_is_read_back_on_the_code_it_was_made_on_and_refused_on_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recorded, "ROOT", tmp_path)
    monkeypatch.setattr(recorded, "path", lambda name: tmp_path / f"{name}.json")
    monkeypatch.setattr(recorded, "trees", lambda: {"dse": "1"})
    assert recorded.read("speed", "make speed") == {}  # there is none yet
    recorded.write("speed", {"fast": 2.5}, command="make speed", of={"dse": "1"})
    capsys.readouterr()
    assert recorded.read("speed", "make speed")["fast"] == 2.5
    assert capsys.readouterr().err == ""
    recorded.write("speed", {"fast": 2.5}, command="make speed", of={"dse": "2"})
    assert recorded.read("speed", "make speed") == {}
    assert "speed.json is of other code in dse, simulators, search_spaces, conf" in capsys.readouterr().err
