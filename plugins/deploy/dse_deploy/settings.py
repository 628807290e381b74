"""Files of settings of a tool: what they say of a plan, and what a plan is that they say.

A plan is a tree of overrides of a step, as `plan.yaml` of a run of `plan` has it: `sites`, `parallel`, `run`,
`optimizer`. A tool says some of it in words of its own (`conf/data/framework_settings.yaml`); what it has no word for
is told. Reading a file that was written gives the nearest plan that the tool can say, and writing that the same file.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic.fields import FieldInfo

from dse.config.options import load_yaml
from dse.errors import ConfigError, Problem, Problems
from dse.space import get_path
from dse.values import Frozen
from dse_deploy.facts import COVERED, FACTS, OF_CALLS, UNKNOWN, ModelFacts, put_ctas
from dse_deploy.step_calls import CTAS
from dse_deploy.user_buffers import LAYERS, METHODS, layers_of, sites_of, with_all_sums
from simulators.steps.overlap.sites import SERIAL, SITES, read_schedule
from simulators.steps.plan.choices import OFF
from studies.plan.plan_file import SECTION_MODELS, Plan, leaves_of, put_in
from studies.plan.stacks import ToolFacts, tool_facts

_TP = "parallel.tp"
BY_LAYER = "by layer"
"""Schedule of sites that overlap as each layer of user buffers does by itself."""


def _field_of(path: str) -> FieldInfo | None:
    section, _, name = path.partition(".")
    return SECTION_MODELS[section].model_fields.get(name) if section in SECTION_MODELS else None


def _is_boolean(path: str) -> bool:
    """Tell whether a knob of a plan is true or false."""
    field = _field_of(path)
    return field is not None and field.annotation is bool


def usual(path: str) -> Any:
    """The value of a knob where nothing is done: what a tool does that has no setting for it."""
    field = _field_of(path)
    return OFF.get(path, None if field is None or field.is_required() else field.default)


class Setting(Frozen):
    """A setting of a tool. name: with dots where a file has sections. path: of the knob that it says.

    values: value of the knob -> that of the setting; the same where empty. constant: value that the setting has where
    sites overlap. disables: it is on where none of its sites overlaps and others do. also: values of other knobs that
    go with it. sites, families, knob, schedule: see `conf/data/framework_settings.yaml`. synonyms: other values that
    are read, and the value of the knob. fact: what a launch says of which knobs follow (`derived`), in place of `path`.
    written_as: the fact that is written in place of the knob that is read (`facts`). read_only: never written.
    changes: a value that no knob has changes a step. several: its value is all words up to
    the next option. A setting with a constant and without path names a file of the tool. means: value of the knob ->
    other knobs that are read with it. beyond: value of the knob -> what it changes that no knob says. usual: values
    that leave all as it is. later: the file that it names counts over the launch. factors: knobs whose product is
    written, and of which `path` follows when it is read. reason: why no plan has the setting, which is told with it.
    left_open: values that a program fills in. writes: value of the knob at `path` -> that of the setting, of
    those that are written alone: a fact has one, or a knob follows from several settings. limits: knobs of CTAs of
    axes, all of which a setting of a process limits to its number, and which it says where a plan has one number.
    """

    name: str
    path: str = ""
    meaning: str
    provenance: Literal["vendor", "secondary", "memory"]
    source: str
    values: Mapping[str | int | bool, str | int | bool] = {}
    sites: tuple[str, ...] = tuple(SITES)
    families: tuple[str, ...] = ()
    knob: str = ""
    schedule: str = ""
    aliases: tuple[str, ...] = ()
    constant: str = ""
    disables: bool = False
    also: Mapping[str, str | int] = {}
    synonyms: Mapping[str, str | int | bool] = {}
    fact: str = ""
    written_as: str = ""
    read_only: bool = False
    changes: bool = False
    several: bool = False
    means: Mapping[str, Mapping[str, str]] = {}
    beyond: Mapping[str, str] = {}
    usual: tuple[str, ...] = ()
    later: bool = False
    factors: tuple[str, ...] = ()
    reason: str = ""
    left_open: tuple[str, ...] = ()
    writes: Mapping[str | int | bool, str | int | bool] = {}
    limits: tuple[str, ...] = ()

    def value_for(self, plan: Plan, model: ModelFacts = UNKNOWN) -> Any:
        """Value of the setting for a plan; None where the plan does not say it, or the setting has no value for it."""
        if fact := self.written_fact:
            return FACTS[fact](plan, model)
        return self._value_in_plan(plan)

    def _value_in_plan(self, plan: Plan) -> Any:
        """The value of a setting that says knobs of a plan as they are."""
        # a product is known only if all its factors are
        if self.factors:
            numbers = [get_path(plan, path) for path in self.factors]
            return prod(numbers) if all(isinstance(number, int) for number in numbers) else None
        if (self.fact and not self.writes) or self.read_only or not self.path:
            return None
        if self.path == "sites":
            return self._of_sites(plan)
        value = get_path(plan, self.path)
        unsaid = () if self.fact else (None,)  # a knob that a fact needs has to be there
        if any(get_path(plan, path) not in (*unsaid, needed) for path, needed in self.also.items()):
            return None
        values = self.writes if self.fact else {**self.values, **self.writes}
        if value is None or not values:
            return value
        # a value without an entry has no word: None, which is reported as unsaid
        return next((setting for knob, setting in values.items() if _same(knob, value)), None)

    @property
    def written_fact(self) -> str:
        """The fact of a plan that is written; "" where the setting says knobs of a plan as they are."""
        name = self.written_as or ("" if self.path or self.read_only else self.fact)
        return name if name in FACTS else ""

    def read_limits(self, value: Any, plan: dict[str, Any], model: ModelFacts) -> Iterator[str]:
        """Put a limit of a process into a plan as the CTAs of each axis; yield, in words, those that cannot have it."""
        is_number = isinstance(value, int) and not isinstance(value, bool) and value > 0
        for path in self.limits if is_number else ():
            # without a step an axis that nobody named may be of one GPU
            if path not in model.most_ctas and not _has(plan, path):
                yield f"{self.name} {value} (of {path}: name the step and its degrees, parallel.dp=<GPUs>)"
            elif reason := put_ctas(plan, path, value, model):
                yield f"{self.name} {value} (of {path}: {reason})"

    def _of_sites(self, plan: Plan) -> Any:
        if "sites" not in plan and not self.limits:
            return None
        overlapped = list(self._overlapped(plan))
        # written only if something else overlaps: without any overlap nothing needs to be switched off
        if self.disables:
            return True if not overlapped and any(text != SERIAL for text in plan["sites"].values()) else None
        if self.constant:
            return self.constant if overlapped else None
        if not self.knob:
            return bool(overlapped)
        # one number for all sites: the largest, so that no schedule gets fewer than it asks for
        numbers = [int(getattr(read_schedule(text, site), self.knob) or 0) for site, text in overlapped]
        return max([*numbers, self._limit(plan)]) or None

    def _limit(self, plan: Plan) -> int:
        """The number of CTAs that a plan has over each axis that it limits; 0 where they differ, or it has none."""
        numbers = {int(get_path(plan, path) or 0) for path in self.limits if get_path(plan, path) or _has(plan, path)}
        return numbers.pop() if len(numbers) == 1 else 0

    def _overlapped(self, plan: Plan) -> Iterator[tuple[str, str]]:
        """Yield the sites with schedules that the setting is of."""
        for site, text in plan.get("sites", {}).items():
            is_mine = site in self.sites and text != SERIAL
            if is_mine and (not self.families or read_schedule(text, site).family in self.families):
                yield site, text

    def paths(self, plan: Plan) -> list[str]:
        """Paths of a plan that the setting, which has a value for it, says something of."""
        if self.written_fact:
            # a fact covers several knobs; only knobs of this plan count
            return [path for path in COVERED.get(self.written_fact, ()) if get_path(plan, path) is not None]
        if self.path == "sites":
            limits = self.limits if self._limit(plan) else ()
            set_limits = [path for path in limits if get_path(plan, path)]
            return [*(f"sites.{site}" for site, _ in self._overlapped(plan)), *set_limits]
        return [self.path, *(path for path in self.also if get_path(plan, path) is not None)]

    @property
    def is_flag(self) -> bool:
        """True if a command line has the setting without a value."""
        of_sites = self.path == "sites" and not self.constant and not self.knob
        if self.fact:
            return True in self.values
        return of_sites or any(isinstance(value, bool) for value in self.values.values()) or _is_boolean(self.path)

    def read(self, value: Any, plan: dict[str, Any]) -> bool:
        """Put what a value of the setting means into a plan; whether it means anything. Sites that are there stay."""
        if self.constant or (self.is_flag and value not in (True, False, 0, 1)):
            return False
        if self.path == "sites":
            self._read_sites(value, plan)
            return True
        if self.is_usual(value):
            return True
        knobs = [knob for knob, setting in self.values.items() if _same(setting, value)]
        knobs += [knob for synonym, knob in self.synonyms.items() if _same(synonym, value)]
        if self.values and not knobs:
            return False
        put_in(plan, self.path, knobs[0] if knobs else value)
        for path, needed in {**self.also, **self.means.get(str(knobs[0] if knobs else value), {})}.items():
            put_in(plan, path, needed)
        return True

    def is_usual(self, value: Any) -> bool:
        """Tell whether a value leaves all as it is."""
        return any(_same(usual, value) for usual in self.usual)

    def beside(self, plan: Plan) -> str:
        """What the value that a plan has of the setting changes and no knob says; "" where nothing."""
        return self.beyond.get(str(get_path(plan, self.path)), "") if self.beyond else ""

    def _read_sites(self, value: Any, plan: dict[str, Any]) -> None:
        sites = plan.setdefault("sites", {})
        if self.disables:
            sites.update(dict.fromkeys(self.sites, SERIAL) if value else {})
        elif self.schedule == BY_LAYER:
            for site, text in (sites_of({}, tp_of(plan)) if value else {}).items():
                sites.setdefault(site, text)
        else:
            for site in self.sites if value else ():
                sites.setdefault(site, self.schedule.replace("{}", str(value)))


def _has(plan: Plan, path: str) -> bool:
    """Tell whether a plan has several GPUs along the axis of a knob of CTAs."""
    return any((get_path(plan, degree) or 1) > 1 for degree in AXES[path])


AXES: Mapping[str, tuple[str, ...]] = {
    "parallel.tp_ctas": ("parallel.tp",),
    "parallel.dp_ctas": ("parallel.dp", "parallel.cp", "parallel.ep"),
}
"""Knob of CTAs of an axis -> degrees of which one is larger than 1 where its collectives are among several GPUs."""


def _same(one: Any, other: Any) -> bool:
    return str(one).lower() == str(other).lower()


Format = (
    Literal["arguments", "yaml", "environment", "python", "user_buffers", "msccl", "toml", "deepspeed"]
    | Literal["nccl_tuner", "rccl_tuner", "megatron_communicators", "process_groups", "iris"]
)
"""Formats of files; the second row is of single collectives or communicators (`step_files`)."""


_BESIDE = tuple(f"sites.{name}" for name, site in SITES.items() if site.beside)
_CTAS = tuple(dict.fromkeys(CTAS.values()))
_SAID: Mapping[str, Sequence[str]] = {
    "user_buffers": tuple(f"sites.{name}" for name in SITES),
    **dict.fromkeys(("nccl_tuner", "rccl_tuner"), (*_BESIDE, "parallel.collectives", *_CTAS)),
    **dict.fromkeys(("megatron_communicators", "process_groups"), (*_BESIDE, *_CTAS)),
    "iris": _BESIDE,
}
"""Format -> knobs that files of it may say, where settings do not name them."""


class SettingsFile(Frozen):
    """A file of a tool. together: sums of user buffers overlap their own GEMM in all blocks or in none."""

    name: str
    format: Format
    settings: tuple[Setting, ...] = ()
    together: bool = False


class Tool(ToolFacts):
    """A framework or library whose files are known. version: that the settings are of.

    experts: whether it is for experts on several GPUs alone. follows: knobs that nothing has to set there -> what they
    follow from. unmodelled: names of settings that change a step and that no plan has. instead: path -> value that the
    tool has no word for -> values by path that come nearest, which are written. by_itself: software at sites that it
    runs where nothing is set. like: the tool of the core whose modes and defaults it has; "" for its own name.
    without_switch: constants of its code that say which sizes of all-reduces its own kernels take.
    """

    version: str
    files: tuple[SettingsFile, ...]
    experts: bool = False
    follows: Mapping[str, str] = {}
    unmodelled: tuple[str, ...] = ()
    instead: Mapping[str, Mapping[str | int | bool, Mapping[str, Any]]] = {}
    by_itself: tuple[str, ...] = ()
    like: str = ""
    without_switch: tuple[str, ...] = ()

    @property
    def is_of_calls(self) -> bool:
        """Tell whether a setting follows from the collectives of a step."""
        return any(setting.written_fact in OF_CALLS for file in self.files for setting in file.settings)

    def sayable(self, plan: Plan) -> dict[str, Any]:
        """A plan with what comes nearest in place of values that the tool has no word for."""
        changed = {name: dict(entries) for name, entries in plan.items()}
        for path, values in self.instead.items():
            for other, value in values.get(get_path(plan, path), {}).items():
                put_in(changed, other, value)
        return changed

    @property
    def said_paths(self) -> frozenset[str]:
        """Knobs that its files may say, sites one by one."""
        paths = set[str]()
        for file in self.files:
            paths.update(_SAID.get(file.format, ()))
            for setting in file.settings:
                sites = [f"sites.{site}" for site in setting.sites] if setting.path == "sites" else [setting.path]
                paths.update(sites, setting.also, setting.limits)
        return frozenset(paths)

    @property
    def limits(self) -> tuple[str, ...]:
        """Knobs of CTAs that one of its settings limits at once."""
        return tuple(path for file in self.files for setting in file.settings for path in setting.limits)

    def own_sites(self, plan: Plan) -> dict[str, str]:
        """Sites of a plan whose software the tool runs where nothing is set."""
        return {site: text for site, text in plan.get("sites", {}).items() if text in self.by_itself}


@cache
def tools() -> dict[str, Tool]:
    """All tools by name. Raises ConfigError."""
    check = Problems()
    tree = load_yaml(Path(__file__).with_name("conf") / "data" / "framework_settings.yaml")["tools"]
    known = {name: tool.model_dump() for name, tool in tool_facts().items()}
    of_core = {name: known[entry.get("like", name)] for name, entry in tree.items()}
    read = {name: check.model(Tool, of_core[name] | entry, path=f"tools.{name}") for name, entry in tree.items()}
    check.done()
    return {name: tool for name, tool in read.items() if tool is not None}


@dataclass(frozen=True)
class Row:
    """A setting as it is written: its value, the knobs that it says, what it means to the tool, and who says so."""

    name: str
    value: Any
    paths: Sequence[str]
    meaning: str
    source: str

    @property
    def note(self) -> str:
        """Meaning of the setting, with the source."""
        return f"{self.meaning} ({self.source})"


@dataclass(frozen=True)
class Written:
    """A file of a plan. unsaid: paths of the plan for which the file has no word."""

    text: str
    rows: Sequence[Row]
    unsaid: frozenset[str]


def write(file: SettingsFile, plan: Plan, head: str, model: ModelFacts = UNKNOWN) -> Written:
    """A file of settings for a plan of a model. head: lines of comment above. Raises ConfigError."""
    by_layer = file.format == "user_buffers"
    rows = list(_layer_rows(plan, together=file.together) if by_layer else _rows(file, plan, model))
    covered = {path for row in rows for path in row.paths}
    comment = "" if file.format == "deepspeed" else _comment(head)  # JSON has none
    text = comment + _TEXTS[file.format](rows)
    return Written(text, rows, frozenset(path for path, _ in leaves_of(plan)) - covered)


def _comment(head: str) -> str:
    return "".join(f"# {line}\n" for line in head.splitlines())


def _rows(file: SettingsFile, plan: Plan, model: ModelFacts) -> Iterator[Row]:
    for setting in file.settings:
        value = setting.value_for(plan, model)
        if value is not None:
            unverified = ", from memory, unverified" if setting.provenance == "memory" else ""
            yield Row(setting.name, value, setting.paths(plan), setting.meaning, f"{setting.source}{unverified}")


def _layer_rows(plan: Plan, *, together: bool) -> Iterator[Row]:
    sites, precision = plan.get("sites", {}), get_path(plan, "run.precision")
    if all(text == SERIAL for text in sites.values()):
        return
    tp = tp_of(plan)
    if get_path(plan, "parallel.sequence_parallel") is not True:
        rule = "is needed by user buffers, which gather and scatter tokens"
        value = get_path(plan, "parallel.sequence_parallel")
        raise ConfigError([Problem("parallel.sequence_parallel", rule, value, "write parallel.sequence_parallel=true")])
    layers = layers_of(sites, tp, fp8=str(precision).startswith("fp8"))
    for name, layer in (with_all_sums(layers) if together else layers).items():
        yield Row(
            name, layer, [f"sites.{LAYERS[name]}"], METHODS[layer.method], "transformer_engine/pytorch/module/base.py"
        )


def tp_of(plan: Plan) -> int:
    """GPUs that share a layer. Raises ConfigError where a plan does not say it, or has a layer on one GPU."""
    tp = get_path(plan, _TP)
    # True is an int in Python
    if not isinstance(tp, int) or isinstance(tp, bool) or tp < 2:
        rule = "is missing" if tp is None else "is no number of GPUs that can share a layer: two at least"
        raise ConfigError([Problem(_TP, rule, tp, "write parallel.tp=8")])
    return tp


# Texts


def _layers_text(rows: Sequence[Row]) -> str:
    notes = "".join(f"# {method}: {meaning}\n" for method, meaning in METHODS.items())
    if not rows:
        return "# no layer overlaps: leave initialize_ub out, which overlaps all of them by default\nnull\n"
    return notes + yaml.safe_dump({row.name: row.value.tree for row in rows}, sort_keys=False)


def _arguments_text(rows: Sequence[Row]) -> str:
    """One argument a line; an option that is off is a comment."""
    lines = []
    for row in rows:
        line = row.name if row.value is True else f"{row.name} {shlex.quote(str(row.value))}"
        # the comment is read back by `script_values`
        lines.append(f"# {row.note}\n" + (f"# {row.name} off" if row.value is False else line))
    return "".join(f"{line}\n" for line in lines)


def _yaml_text(rows: Sequence[Row]) -> str:
    tree: dict[str, Any] = {}
    for row in rows:
        put_in(tree, row.name, row.value)
    notes = "".join(f"# {row.name}: {row.note}\n" for row in rows)
    return notes + (yaml.safe_dump(tree, sort_keys=False) if tree else "{}\n")


def _json_text(rows: Sequence[Row]) -> str:
    tree: dict[str, Any] = {}
    for row in rows:
        put_in(tree, row.name, row.value)
    return json.dumps(tree, indent=2) + "\n"


def _environment_text(rows: Sequence[Row]) -> str:
    return "".join(f"# {row.note}\nexport {row.name}={shlex.quote(str(row.value))}\n" for row in rows)


def _python_text(rows: Sequence[Row]) -> str:
    return "".join(f"# {row.note}\n{row.name} = {row.value!r}\n" for row in rows)


_TEXTS: Mapping[str, Callable[[Sequence[Row]], str]] = {
    "user_buffers": _layers_text,
    "arguments": _arguments_text,
    "yaml": _yaml_text,
    "environment": _environment_text,
    "python": _python_text,
    "deepspeed": _json_text,
}
