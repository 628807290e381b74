"""Settings of serving software as a plan that `serve-plan plan=<file>` judges: `settings import serving=true`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml

from dse.errors import ConfigError, Problem, pairs
from dse.results import report
from dse_deploy import command
from dse_deploy.facts import UNKNOWN, ModelFacts
from dse_deploy.launches import LAUNCH
from dse_deploy.planned_step import PlannedStep
from dse_deploy.serving_plan import read_serving
from dse_deploy.settings import tools
from dse_deploy.step_files import STEP_FORMATS

SERVING = "serving"
"""Option: the settings are of engines that serve, not of a step."""


def settings_import(words: Sequence[str]) -> int:
    """`settings import settings=<file> from=<tool> [serving=true] [...]`: read settings of a step, or of engines.

    Raises ConfigError.
    """
    typed = dict(word.partition("=")[::2] for word in words)
    if typed.get(SERVING, "false") not in ("true", "false"):
        raise ConfigError([Problem(SERVING, "is not true or false", typed[SERVING], "leave it out for a step")])
    words_of_step = [word for word in words if word.partition("=")[0] != SERVING]
    if typed.get(SERVING) == "true":
        return _import_serving(words_of_step)
    return command.settings_import(words_of_step, _step_facts(typed.get("from", ""), words_of_step))


def _step_facts(name: str, words: Sequence[str]) -> ModelFacts:
    """Facts of the step that is named beside settings of single collectives; nothing is known without a model."""
    of_step = name in tools() and any(file.format in STEP_FORMATS for file in tools()[name].files)
    named = [word for word in words if command.is_of_plan(word) or word.partition("=")[0] in command.OF_STEP]
    if not of_step or not all(any(word.startswith(f"{part}=") for word in named) for part in command.OF_STEP):
        return UNKNOWN
    step = PlannedStep.of(Path(), named)
    return UNKNOWN if step is None else step.facts(step.tree)


def _import_serving(words: Sequence[str]) -> int:
    """Read settings of engines, write the plan, and print it with what is not in it. Raises ConfigError."""
    chosen, overrides = command.option_words(words)
    options = pairs(chosen, {"settings": "", "from": "", "out": "plan.yaml"}, optional=[LAUNCH, *command.OF_STEP])
    name, path, out = options["from"], Path(options["settings"]), Path(options["out"])
    read = read_serving(name, path, overrides, command.launch_number(options.get(LAUNCH, "")))
    if not read.plan["server"]["scheduler"] and "parallel" not in read.plan:
        raise ConfigError([Problem("settings", f"has no settings of engines of {name}", str(path), "name its launch")])
    text = yaml.safe_dump({"tool": name, **read.plan}, sort_keys=False)
    command.keep(out, text)
    console = report.console()
    for unmodelled in dict.fromkeys(read.unmodelled):
        console.print(f"changes a step, and is not modelled: {unmodelled}", soft_wrap=True, highlight=False)
    console.print(text.rstrip(), soft_wrap=True, highlight=False)
    for unread in dict.fromkeys(read.unread):
        console.print(f"means nothing to a plan: {unread}", soft_wrap=True, highlight=False)
    for line in command.judge_lines("serve-plan", out, options):
        console.print(line, soft_wrap=True, highlight=False)
    return 0
