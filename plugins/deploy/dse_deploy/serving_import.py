"""Settings of serving software as a plan that `serve-plan plan=<file>` judges: `settings import serving=true`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from dse.errors import ConfigError, Problem
from dse.results import report
from dse_deploy.command import keep, launch_number
from dse_deploy.launches import LAUNCH
from dse_deploy.serving_plan import read_serving


def import_serving(options: Mapping[str, str], words: Sequence[str]) -> int:
    """Read settings, write the plan, and print it with what is not in it. Raises ConfigError."""
    name, path, out = options["from"], Path(options["settings"]), Path(options["out"])
    read = read_serving(name, path, words, launch_number(options.get(LAUNCH, "")))
    if not read.plan["server"]["scheduler"] and "parallel" not in read.plan:
        raise ConfigError([Problem("settings", f"says nothing of engines of {name}", str(path), "name its launch")])
    text = yaml.safe_dump({"tool": name, **read.plan}, sort_keys=False)
    keep(out, text)
    console = report.console()
    for unmodelled in dict.fromkeys(read.unmodelled):
        console.print(f"changes a step, and is not modelled: {unmodelled}", soft_wrap=True, highlight=False)
    console.print(text.rstrip(), soft_wrap=True, highlight=False)
    for unread in dict.fromkeys(read.unread):
        console.print(f"means nothing to a plan: {unread}", soft_wrap=True, highlight=False)
    judge = f"python -m dse serve-plan plan={out} model=<name> system=<name>"
    console.print(f"written to {out}; judge it: {judge}", soft_wrap=True, highlight=False)
    return 0
