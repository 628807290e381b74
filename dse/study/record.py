"""Evaluating a planned study into a folder: tables of its points and probes, and the files that describe them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dse.results.run_folder import Outputs
from dse.space import get_path
from dse.study.plan import Plan
from dse.study.run import Findings, Support, replay_points
from dse.study.run import run as search

_MOST_NAMES = 4  # that a heading lists


def evaluate_probes(planned: Plan, outputs: Outputs, support: Support) -> None:
    """Evaluate the probes of a plan; write a table of each."""
    for name, probe in planned.probes.items():
        search(probe, outputs.probe(name), support)
        declared = planned.settings.study.probes.get(name)  # none for cases, which the study's module makes
        if declared is not None and declared.timelines:
            outputs.write_table(f"probe_{name}_timelines", replay_points(probe))


def write_files(planned: Plan, findings: Findings, *, outputs: Outputs) -> None:
    """Write what describes a finished search beside its tables."""
    settings = planned.settings
    outputs.write_table("timelines", findings.timelines)
    outputs.write_config(planned.request.tree)
    if settings.beside is not None:
        from dse.results import measured

        measured.copy(Path(settings.beside), outputs)
    outputs.write_json(
        "summary",
        {
            "study": settings.study.name,
            "question": _question(planned),
            "goals": dict(planned.goals),
            "shown": list(settings.study.summary),
            "gain": _gain(planned),
            "knobs": list(planned.knobs),
            "departures": planned.departures,
            "contest": settings.study.answer.model_dump(mode="json"),
            "declared": dict(planned.contest.declared),
            "units": {name: "" if metric.unit == "1" else metric.unit for name, metric in planned.metrics.items()},
            "meanings": {name: metric.meaning for name, metric in planned.metrics.items()},
            "limits": {name: dict(shares) for name, shares in findings.limits.items()},
            "num_outcomes": findings.num_outcomes,
            "searched": {name: vars(chosen) for name, chosen in findings.chosen.items()},
        },
    )


def write_provenance(planned: Plan, outputs: Outputs, record: Mapping[str, Any]) -> None:
    """Write the provenance of a finished study: its record, the constants it rests on, and the models of costs."""
    outputs.write_json("provenance", {**record, "facts": _facts(planned), "models": _models(planned)})


def _question(planned: Plan) -> str:
    """The study's question, with what was run and what was changed of its subject."""
    changed = f" (with {' '.join(planned.departures)})" if planned.departures else ""
    return f"{planned.settings.study.question} {_subject(planned)}{changed}".strip()


_VARIANT = " @ "  # `<name> @ <variant>` is one of several variants of a scenario


def _subject(planned: Plan) -> str:
    """Scenarios and systems that were run: `16 GEMMs (g1, g2, ..., g16) on mi300x_8`; "" where nothing has a name."""
    answer = planned.settings.study.answer
    names = list(dict.fromkeys(name.partition(_VARIANT)[0] for name in planned.spaces if name))
    kind = f"{len(names)} {answer.scenario}{'s' * (len(names) != 1)}"
    machines = _values(planned, answer.runs_on) if answer.runs_on else []
    of = f"{kind} ({_listed(names)})" if names else ""
    return " on ".join(filter(None, [of, _listed(machines)]))


def _values(planned: Plan, path: str) -> list[str]:
    """Values that a path has in the study: those that are searched, or those of all scenarios."""
    values = dict[str, None]()
    for space in planned.spaces.values():
        searched = next((knob.values for knob in space.knobs if knob.path == path), None)  # None: fixed in this study
        values |= dict.fromkeys(map(str, searched or [get_path(space.base, path)]))
    return [value for value in values if value != "None"]


def _listed(names: Sequence[str]) -> str:
    """Names in a row; of more than four the first two and the last."""
    return ", ".join(names if len(names) <= _MOST_NAMES else [*names[:2], "...", names[-1]])


def _gain(planned: Plan) -> str | None:
    """The relation to the baseline that is better when larger, such as the speed-up; None where there is none."""
    relations = planned.backend.relations.items() if planned.settings.study.baseline else ()
    return next((name for name, metric in relations if metric.goal == "maximize" and metric.unit == "x"), None)


def _models(planned: Plan) -> dict[str, str]:
    """Models by which operators are costed; those of all scenarios where they differ."""
    names = dict[str, dict[str, None]]()
    for space in planned.spaces.values():
        for operator, model in planned.backend.models(planned.backend.design(space.base)).items():
            names.setdefault(operator, {})[model] = None
    return {operator: " or ".join(models) for operator, models in names.items()}


def _facts(planned: Plan) -> list[dict[str, Any]]:
    """The constants the study rests on, with their sources; those set on the command line are the user's."""
    designs = (planned.backend.design(space.base) for space in planned.spaces.values())
    # equal facts of several scenarios once
    every = {str(fact): fact for design in designs for fact in planned.backend.facts(design)}
    typed = {text.partition("=")[0] for text in planned.request.overrides}
    names = ("path", "value", "provenance", "source")
    facts = [dict(zip(names, fact, strict=True)) for fact in every.values()]
    return [
        {**fact, "provenance": "user", "source": "command line"} if fact["path"] in typed else fact for fact in facts
    ]
