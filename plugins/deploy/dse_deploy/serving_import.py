"""Settings of serving software as a plan that `serve-plan plan=<file>` judges: `settings import serving=true`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml

from dse.errors import ConfigError, Problem, pairs
from dse.results import report
from dse_deploy import command
from dse_deploy.launches import LAUNCH
from dse_deploy.serving_plan import read_serving

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
    return _import_serving(words_of_step) if typed.get(SERVING) == "true" else command.settings_import(words_of_step)


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
