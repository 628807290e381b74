"""Records of a study in its folder beside the table of its points: probes, files that describe it, and figures.

Probes are evaluated here. Figures are drawn by processes beside the study (`FigureWorkers`), so that nothing waits for
them but the end.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from dse.errors import redact
from dse.errors.terminal import bar
from dse.evaluation.evaluators import Services
from dse.evaluation.workers import Pool, num_cpus
from dse.plots import Draw, save, warm
from dse.results.run_folder import Outputs
from dse.space import get_path
from dse.study.plan import Plan
from dse.study.run import Findings, replay_points
from dse.study.run import run as search
from dse.study.settings import Figures

_MOST_NAMES = 4  # that a heading lists
_MOST_WORKERS = 4  # a study has a dozen figures, and each worker imports matplotlib
_NICENESS = 5  # so that drawing does not slow down the evaluation; above that of tracking


def evaluate_probes(planned: Plan, outputs: Outputs, services: Services) -> None:
    """Evaluate the probes of a plan; write a table of each."""
    for name, probe in planned.probes.items():
        search(probe, outputs.probe(name), services)
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
            "typed": {
                "overrides": [str(redact(text)) for text in planned.request.overrides],
                "config_dir": None if planned.request.folder is None else str(planned.request.folder),
            },
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
    of = f"{kind} ({_short_list(names)})" if names else ""
    return " on ".join(filter(None, [of, _short_list(machines)]))


def _values(planned: Plan, path: str) -> list[str]:
    """Values that a path has in the study: those that are searched, or those of all scenarios."""
    values = dict[str, None]()
    for space in planned.spaces.values():
        searched = next((knob.values for knob in space.knobs if knob.path == path), None)  # None: fixed in this study
        values |= dict.fromkeys(map(str, searched or [get_path(space.base, path)]))
    return [value for value in values if value != "None"]


def _short_list(names: Sequence[str]) -> str:
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


@dataclass(frozen=True)
class _Figure:
    """A figure to draw into a file for each format."""

    name: str
    make: Draw
    folder: Path
    formats: tuple[str, ...]
    width: str

    def draw(self) -> None:
        save(self.make, self.folder, self.name, formats=self.formats, width=self.width)


def _serve(figure: _Figure | None) -> None:
    """Draw a figure in a worker; None only imports what drawing needs, while the study goes on."""
    if figure is None:
        os.nice(_NICENESS)
        warm()
    else:
        figure.draw()


@dataclass
class FigureWorkers:
    """Workers that draw the figures that a study asks for: all, the first of a study (`key`), or none.

    Close it when done: what the workers did not finish is not drawn.
    """

    wanted: Figures
    _drawn: list[tuple[_Figure, Future[Any] | None]] = field(default_factory=list)
    _failures: list[Exception] = field(default_factory=list)

    def begin(self, figures: Iterable[tuple[str, Draw]], folder: Path, *, key: bool = False) -> None:
        """Begin to draw figures into a folder. key: the first of them answers the study's question.

        All are asked for, whether or not they are drawn: a study may write files between them.
        """
        for place, (name, make) in enumerate(figures):
            if self.wanted.name == "none" or (self.wanted.name == "key" and not (key and place == 0)):
                continue
            figure = _Figure(name, make, folder, self.wanted.format, self.wanted.width)
            self._drawn.append((figure, self._begin(figure)))

    def _begin(self, figure: _Figure) -> Future[Any] | None:
        """Give a figure to a worker; None where this machine has no room for one."""
        with suppress(OSError):
            return self._threads.submit(self._pool.call, figure)
        return None

    @cached_property
    def _pool(self) -> Pool:
        return Pool(_serve, None, size=min(_MOST_WORKERS, num_cpus()))

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(min(_MOST_WORKERS, num_cpus()))  # a thread waits for each worker

    def finish(self, study: str) -> int:
        """Wait until all are drawn, with a progress bar; their number. What a figure raises is kept (`check`)."""
        if self._drawn:
            with bar(f"{study}: figures", len(self._drawn), unit="figures") as advance:
                for figure, future in self._drawn:
                    if future is None or future.exception() is not None:  # also waits
                        self._draw_here(figure)  # it was not sent, its worker was lost, or it fails here, too
                    advance(1)
        return len(self._drawn)

    def _draw_here(self, figure: _Figure) -> None:
        try:
            figure.draw()
        except Exception as error:
            error.add_note(f"{figure.name} is not drawn; the results are complete in {figure.folder.parent}")
            self._failures.append(error)

    def check(self) -> None:
        """Raise what the first figure raised that could not be drawn: nothing else of a study is lost for it."""
        if self._failures:
            raise self._failures[0]

    def close(self) -> None:
        """End the workers. Does nothing the second time."""
        if self._drawn:
            self._threads.shutdown(wait=False, cancel_futures=True)
        if "_pool" in vars(self):  # of cached properties only those that were used
            self._pool.close()
