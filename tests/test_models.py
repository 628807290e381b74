"""Models by name on the command line, and what is said of files that no installed plug-in reads."""

from __future__ import annotations

from importlib.metadata import EntryPoints
from pathlib import Path

import pytest

from dse import plugins
from dse.config.compose import request
from dse.config.options import list_options
from dse.errors import ConfigError
from simulators.workloads.model_zoo import model_tree
from simulators.workloads.public_models import aliases, public


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama3_70b", "deepseek_v3", "gpt_oss_20b", "bert_base"])
def test_a_public_model_is_chosen_by_name_whole(name: str) -> None:
    """Layers and widths that a study gives its own model, or searches, do not hold for it."""
    plan_request = request(["study=comp_vs_comm", f"model={name}"])
    assert not plan_request.problems
    assert plan_request.tree["model"] == model_tree(name)
    assert not [knob.path for knob in plan_request.knobs if knob.path.startswith("model.")]
    assert [knob.path for knob in request(["study=comp_vs_comm"]).knobs if knob.path.startswith("model.")]


def test_values_of_a_public_model_may_be_set_and_searched() -> None:
    plan_request = request(
        ["study=comp_vs_comm", "model=llama3_70b", "model.layers=2", "+space.model.hidden=choice(1024,8192)"]
    )
    assert not plan_request.problems
    assert plan_request.tree["model"]["layers"] == 2
    assert [knob.path for knob in plan_request.knobs if knob.path.startswith("model.")] == ["model.hidden"]


def test_public_models_are_searched_by_name_beside_those_with_a_file() -> None:
    plan_request = request(["study=comp_vs_comm", "+space.model.name=choice(llama3_8b,bert_large)"])
    assert not plan_request.problems
    assert plan_request.options["model"]["llama3_8b"] == model_tree("llama3_8b")
    assert plan_request.options["model"]["bert_large"]["layers"] == 118  # as the study says of its own options


@pytest.mark.parametrize(
    ("typed", "path"),
    [
        (["study=comp_vs_comm", "model=lama3_70b"], "model"),
        (["study=comp_vs_comm", "model=nowhere.json"], "model"),
        (["study=comp_vs_comm", "+space.model.name=choice(lama3_70b)"], "space.model.name"),
        (["study=ficco", "model=llama3_70b"], "model"),
    ],
)
def test_a_model_that_cannot_be_chosen_is_told_with_a_way_out(typed: list[str], path: str) -> None:
    problems = request(typed).problems
    assert [problem.path for problem in problems] == [path]
    assert problems[0].way_out


def test_every_public_model_is_an_option_under_all_of_its_names() -> None:
    options = list_options("model")
    assert {*public(), *aliases()} <= set(options)
    assert all(options.values())
    for name in options:
        model_tree(name)


def test_a_file_of_a_hub_is_refused_where_no_plug_in_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    monkeypatch.setattr(plugins, "entry_points", lambda: EntryPoints(()))  # as where no other distribution is installed
    plugins.refresh()
    try:
        with pytest.raises(ConfigError, match=r"reader is not installed.*pip install overlap-dse-hub"):
            model_tree(str(tmp_path))
    finally:
        monkeypatch.undo()
        plugins.refresh()
