"""One quantity has one value, whichever part of the framework is asked for it."""

from __future__ import annotations

import pytest

from benchmarks.doors import disagreements, main
from dse.config.options import list_options


@pytest.mark.parametrize("name", ["h100_8", "mi355x_8"])
def test_every_door_gives_the_same_answer(name: str) -> None:
    assert {quantity: questions for quantity, questions in disagreements([name]).items() if questions} == {}


@pytest.mark.more
def test_every_door_of_every_machine_gives_the_same_answer() -> None:
    apart = disagreements(list(list_options("system")))
    assert {quantity: questions for quantity, questions in apart.items() if questions} == {}


def test_a_door_that_answers_otherwise_is_seen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.doors.lost_share", lambda *_: 1.5)
    assert main(["--systems", "h100_8"]) == 1
    assert "profiles 1.500" in capsys.readouterr().out
