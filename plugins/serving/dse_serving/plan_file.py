"""Plan of a deployment in a file: sections that `settings export` writes for serving software, and that come back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dse.config.options import list_options
from dse.errors import ConfigError, Problem, Problems
from dse.errors.parsing import parse_yaml
from dse.files import read_text
from dse_serving.deployment import Scheduler
from dse_serving.design import Server, Serving, deployment_of
from dse_serving.overlaps import context_octave
from simulators.workloads.model_zoo import option_tree

_DEGREES = ("tp", "pp", "dp", "ep")
_FORMATS = ("precision", "products", "weights", "kv_cache")
_SCHEDULER = ("policy", "tokens", "sequences", "chunked", "block", "memory", "context", "overlapped")
_SECTIONS: Mapping[str, tuple[str, ...]] = {"parallel": _DEGREES, "run": _FORMATS}
_MOST_BYTES = 1 << 20


def plan_tree(design: Serving) -> dict[str, Any]:
    """The plan of a deployment: degrees, formats, its engines, and of its scheduler the limits and what the software
    does not have as it comes.
    """
    engines = design.engines
    formats = {name: getattr(design.run, name) for name in _FORMATS}
    tree: dict[str, dict[str, Any]] = {
        "parallel": {name: int(getattr(design.parallel, name)) for name in _DEGREES},
        "run": {name: str(value) for name, value in formats.items() if value is not None},
        "server": {"name": design.server.name, "scheduler": _scheduler_tree(design.server)},
        "engines": {"replicas": design.replicas, "apart": engines.apart, "overlap": usual_overlap(design)},
    }
    if engines.apart:
        tree["engines"] |= {
            "prefill_replicas": int(engines.prefill_replicas),
            "prefill_tp": int(engines.prefill_tp or design.parallel.tp),
        }
    if engines.expert_gpus:
        tree["engines"]["expert_gpus"] = int(engines.expert_gpus)
    return tree


def _scheduler_tree(server: Server) -> dict[str, Any]:
    """Limits of a scheduler, and its options that are not those of the software as it comes."""
    usual = option_tree("server", server.name)["scheduler"] if server.name in list_options("server") else {}
    shipped = Scheduler.model_validate(usual)
    names = (name for name in usual if getattr(server.scheduler, name) != getattr(shipped, name))
    return {name: getattr(server.scheduler, name) for name in dict.fromkeys((*_SCHEDULER, *names))}


def usual_overlap(design: Serving) -> str:
    """The overlap of steps without prompts that have a full share of a closed loop, or half of what an engine may have:
    software sets one for all steps.
    """
    if design.engines.overlap != "best":
        return str(design.engines.overlap)
    choice, spec = deployment_of(design).pools[-1].times.overlap, design.traffic
    if choice is None:
        return "waited"
    # limits and knots count sequences of a rank
    sequences, ranks = int(design.server.scheduler.sequences), max(1, design.replicas) * int(design.parallel.dp)
    under_way = int(spec.concurrency) / ranks if spec.arrivals == "closed" else sequences / 2
    row = int(np.argmin(np.abs(choice.sequences - min(under_way, sequences))))
    return choice.names[int(choice.plain[row, context_octave(choice, spec.draw())])]


def words_of_plan(path: Path) -> list[str]:
    """Overrides of the study of serving that a plan says. Raises ConfigError for a file that is none."""
    way = "name the plan.yaml of a run of `serve-plan`, or of `settings import serving=true`"
    tree = parse_yaml(read_text(path, "plan", most=_MOST_BYTES, way_out=way), "plan")
    if not isinstance(tree, Mapping) or "server" not in tree:
        raise ConfigError([Problem("plan", "is no plan of serving", str(path), way)])
    check, words = Problems(), list[str]()
    for section, entries in tree.items():
        # notes of `settings import`
        if section in ("tool", "unread"):
            continue
        if section not in (*_SECTIONS, "server", "engines") or not isinstance(entries, Mapping):
            check.add(f"plan.{section}", "is no section of a plan of serving", way_out=way)
            continue
        words += [
            f"{section}.{name}={_text(value)}" for name, value in entries.items() if name not in ("name", "scheduler")
        ]
    server = tree["server"] if isinstance(tree["server"], Mapping) else {}
    scheduler = server.get("scheduler") or {}
    if not isinstance(scheduler, Mapping):
        check.add("plan.server.scheduler", "is no mapping of its settings", value=scheduler, way_out=way)
        scheduler = {}
    words += [f"server={server['name']}"] if "name" in server else []
    words += [f"server.scheduler.{name}={_text(value)}" for name, value in scheduler.items()]
    check.done()
    return words


def _text(value: Any) -> str:
    """A value as it is typed."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
