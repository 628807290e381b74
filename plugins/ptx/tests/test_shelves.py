"""Plug-ins whose models are under study stand apart wherever plug-ins are shown."""

from __future__ import annotations

from dse import plugins
from dse.shell.help import help_text, list_text


def test_plug_ins_whose_models_are_under_study_are_shown_apart() -> None:
    assert plugins.is_research("dse_ptx.command:run") and not plugins.is_research("dse_traces.commands.advise:advise")
    verbs, research = help_text([], None).partition("\n\nStudies")[0].split("Research (models under study)")
    assert "ptx" in research and "ptx" not in verbs
    studies = list_text("studies", ["--all"], None)
    marked = {line.split()[0] for line in studies.splitlines() if line.endswith("(research)")}
    assert {"cache_policies", "gpgpusim", "t3_requests"} <= marked and not {"ficco_sweep", "t3", "serving"} & marked
