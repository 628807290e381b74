"""What moves a published claim that is missed: one input of its study is changed, and the study is judged again.

`benchmarks/causes.yaml` declares the experiments: a study, the inputs to set (paths of the configuration, or of a file
of `conf/data` below `data.<file>`), the claims that they explain, and why the input is in doubt. None of these values
is taken over into the model: an experiment says how far the input would have to be off, not that it is.

`python -m benchmarks.claims --causes [<study> ...]` runs them and keeps what came out in
`benchmarks/records/causes.json`.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.recorded import ROOT
from dse.analysis.verdicts import changed, judge_again
from dse.config.compose import request
from dse.config.options import load_yaml
from dse.errors import ConfigError, Problem
from dse.errors.terminal import quiet
from dse.space import get_path, set_path
from dse.study.plan import Plan, plan
from dse.values import Frozen
from studies.common.facts import facts

EXPERIMENTS = ROOT / "benchmarks" / "causes.yaml"
RECORD = ROOT / "benchmarks" / "records" / "causes.json"
Rows = Sequence[Mapping[str, Any]]
_QUIETLY = ("tracking=none", "figures=none", "store=none")


class Experiment(Frozen):
    """One change of a study. inputs: path -> value; claims: ids; why: what is not known of the input."""

    study: str
    inputs: dict[str, Any]
    claims: tuple[str, ...]
    why: str


def experiments() -> list[Experiment]:
    """All that are declared."""
    return [Experiment.model_validate(row) for row in load_yaml(EXPERIMENTS)]


def tried(experiment: Experiment, nominal: Mapping[str, Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield a row for each claim of an experiment: the inputs from and to, and ours before and after.

    nominal: the kept rows of the study by claim. Raises ConfigError where the study refuses the inputs.
    """
    of_data = {path.removeprefix("data."): value for path, value in experiment.inputs.items() if _is_data(path)}
    before = _planned(experiment.study, ())
    searched = set(next(iter(before.spaces.values())).options)  # groups: a word would replace the search for an option
    in_options = {path: value for path, value in experiment.inputs.items() if path.partition(".")[0] in searched}
    typed = [f"{path}={_word(value)}" for path, value in experiment.inputs.items() if path not in in_options]
    planned = _planned(experiment.study, [word for word in typed if not _is_data(word)])
    for path, value in in_options.items():
        planned = changed(planned, path, partial(_with_value, path, value), value)
        if _before(before, path) in (None, {}):
            raise ConfigError([Problem(path, "is in no option of the study", value)])
    told = {path: _before(before, path) for path in experiment.inputs}
    with quiet(), _facts_with(of_data):
        rows = {row["id"]: row for row in judge_again(planned)}
    for claim in experiment.claims:
        row, kept = rows[claim], nominal[claim]
        yield {
            "claim": claim,
            "study": experiment.study,
            "from": told,
            "to": experiment.inputs,
            "published": kept["published"],
            "unit": kept["unit"],
            "before": kept["ours"],
            "after": row["ours"],
            "within": row["within"],
            "why": experiment.why,
        }


def _with_value(path: str, value: Any, section: Any) -> Any:
    """A copy of a section with the value at a path that it has; the section itself where it has none."""
    name = path.partition(".")[0]
    tree = {name: copy.deepcopy(section)}
    if get_path(tree, path) is None:
        return section
    set_path(tree, path, value)
    return tree[name]


def _is_data(path: str) -> bool:
    return path.startswith("data.")


def _word(value: Any) -> str:
    return json.dumps(value) if isinstance(value, (list, dict, bool)) or value is None else str(value)


def _planned(study: str, words: Sequence[str]) -> Plan:
    """The plan of a study with inputs set, judged as if these were the study's own."""
    planned = plan(request([f"study={study}", *_QUIETLY, *words], None))
    return replace(planned, request=replace(planned.request, overrides=()))


def _before(planned: Plan, path: str) -> Any:
    if _is_data(path):
        name, _, key = path.removeprefix("data.").partition(".")
        return get_path(dict(facts(name)), key)
    tree = planned.request.tree
    name = path.lstrip("+").removeprefix("space.")
    knob = next((knob for knob in planned.request.knobs if knob.path == name), None)
    if knob is not None and path.lstrip("+").startswith("space."):
        return str(get_path(tree, path.lstrip("+")))
    value = get_path(tree, name)
    if value is None:  # of the options that are searched
        trees = next(iter(planned.spaces.values())).options.get(name.partition(".")[0], {})
        found = {option: get_path({name.partition(".")[0]: tree}, name) for option, tree in trees.items()}
        value = {option: each for option, each in found.items() if each is not None}
        return value
    return value.get("name") if isinstance(value, Mapping) else value


@contextmanager
def _facts_with(values: Mapping[str, Any]) -> Iterator[None]:
    """While it lasts, facts of `conf/data` have other values (`<file>.<key>`)."""
    kept: dict[tuple[str, str], Any] = {}
    try:
        for path, value in values.items():
            name, _, key = path.partition(".")
            tree: Any = facts(name)
            kept[name, key] = get_path(tree, key)
            if kept[name, key] is None:
                raise ConfigError([Problem(f"data.{path}", "is no fact that there is")])
            set_path(tree, key, value)
        yield
    finally:
        for (name, key), old in kept.items():
            if old is not None:
                set_path(facts(name), key, old)  # type: ignore[arg-type]


def records() -> list[dict[str, Any]]:
    """Rows that are kept."""
    rows: list[dict[str, Any]] = json.loads(RECORD.read_text("utf-8")) if RECORD.exists() else []
    return rows


def record(studies: Sequence[str], claims: Mapping[str, Rows]) -> None:
    """Run the experiments of some studies and keep their rows beside those of others. claims: study -> kept rows."""
    rows = [row for row in records() if row["study"] not in studies]
    for experiment in experiments():
        if experiment.study not in studies:
            continue
        found = list(tried(experiment, {row["id"]: row for row in claims[experiment.study]}))
        for row in found:
            print(f"{row['claim']}: {row['before']} -> {row['after']} with {row['to']}", file=sys.stderr, flush=True)
        rows = sorted([*rows, *found], key=lambda row: row["claim"])
        # after each experiment: the next one may take minutes, and be stopped
        RECORD.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
