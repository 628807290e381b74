"""A plan of `serve-plan` as settings of vLLM, SGLang or TensorRT-LLM, and such settings as a plan.

Beside sections of a step, `parallel` and `run`, it has `server.scheduler`, the limits of the scheduler, and `engines`:
how many, whether those of prompts are apart, and what overlaps. Engines apart have a file each, in the folders
`prefill` and `decode`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

from dse.config.options import load_yaml, option_file
from dse.errors import ConfigError, Problem, Problems
from dse.errors.parsing import parse_yaml
from dse.files import read_text
from dse.space import get_path
from dse.values import Frozen
from dse_deploy.arguments import plain, scalar
from dse_deploy.command import texts_of, with_words
from dse_deploy.facts import ModelFacts
from dse_deploy.reading import read, settings_of
from dse_deploy.settings import Setting, SettingsFile, Tool, Written, tools, usual, write
from studies.plan.plan_file import Plan, put_in

_SECTIONS = ("parallel", "run", "server", "engines")
_APART = ("prefill", "decode")
_MOST_BYTES = 1 << 20
_OVERLAPS = {
    "two_micro_batches": ("parallel.exchanges", "two_micro_batches"),
    "shared_expert": ("parallel.exchanges", "shared_expert"),
    "in_switch": ("parallel.collectives", "in_switch"),
}
"""Overlap of `engines` -> knob of a step that says the same, and its value."""
_OF_CHECKPOINT = ("run.weights", "run.products", "run.precision")
_OPTION = re.compile(r"(?P<dashes>--)?(?P<name>[\w.-]+)(?:(?P<mark>: |=)(?P<value>.+))?")
"""An option as `conf/server` writes it: `--flag`, `name: value` of a file, `NAME=1` of the environment."""


class EnginesApart(Frozen):
    """Settings of engines that compute prompts, and of those that generate, where they are apart."""

    prefill: Mapping[str, str]
    decode: Mapping[str, str]
    provenance: Literal["vendor", "secondary", "memory"]
    source: str

    def text(self, role: str) -> str:
        """Lines of YAML of a role."""
        tree: dict[str, Any] = {}
        for name, value in getattr(self, role).items():
            put_in(tree, name, value)
        unverified = ", from memory, unverified" if self.provenance == "memory" else ""
        return f"# engines of a {role} apart ({self.source}{unverified})\n{yaml.safe_dump(tree)}"


class ServingFacts(Frozen):
    """Settings of a serving software beside those of a step. launch: command of an engine with the name of its file."""

    launch: str
    settings: tuple[Setting, ...]
    apart: EnginesApart


def _gpus(plan: Plan) -> int:
    """GPUs of an engine: those of all replicas of attention that share its experts."""
    return math.prod(int(plan["parallel"].get(name) or 1) for name in ("tp", "pp", "dp"))


def _model(plan: Plan) -> ModelFacts:
    """What settings need of the model of an engine: replicas of attention are of mixtures alone."""
    return ModelFacts(experts=any(int(plan["parallel"].get(name) or 1) > 1 for name in ("ep", "dp")))


@cache
def serving_facts() -> dict[str, ServingFacts]:
    """Serving software by name. Raises ConfigError."""
    check = Problems()
    tree = load_yaml(Path(__file__).with_name("conf") / "data" / "serving_settings.yaml")["tools"]
    facts = {name: check.model(ServingFacts, entry, path=f"tools.{name}") for name, entry in tree.items()}
    check.done()
    return {name: entry for name, entry in facts.items() if entry is not None}


def serving_tool(word: str, name: str) -> Tool:
    """A tool with the settings of its scheduler. Raises ConfigError for one that serves nothing."""
    if name not in serving_facts():
        rule, way = "is no serving software", f"take one of {', '.join(serving_facts())}"
        raise ConfigError([Problem(word, rule, name, way)])
    (file,) = tools()[name].files
    settings, overlaps = (*file.settings, *serving_facts()[name].settings), overlap_settings(name)
    # one setting says an overlap: that of `serve-plan`; others that say the same are read
    pairs = {(setting.path, value) for setting in overlaps for value in setting.values}
    known = {plain(setting.name) for setting in settings}
    settings = tuple(
        setting.model_copy(update={"read_only": True})
        # read_only: else one overlap would be written twice, by two names
        if any((setting.path, value) in pairs for value in setting.values)
        and plain(setting.name) not in {plain(other.name) for other in overlaps}
        else setting
        for setting in settings
    )
    added = (setting for setting in overlaps if plain(setting.name) not in known)
    extended = file.model_copy(update={"settings": (*settings, *added)})
    return tools()[name].model_copy(update={"files": (extended,)})


def overlap_settings(name: str) -> list[Setting]:
    """Settings of overlaps of a serving software, as its option of `server` has them; variables are read alone."""
    file, settings = option_file("server", name), list[Setting]()
    tree = {} if file is None else load_yaml(file)
    for overlap, text in tree.get("overlaps", {}).items():
        option = _OPTION.fullmatch(text)
        if option is None or overlap not in _OVERLAPS:
            continue
        path, value = _OVERLAPS[overlap]
        values = {value: True if option["value"] is None else scalar(option["value"])}
        facts = {"meaning": f"overlap of a step: {overlap}", **tree["sources"]["overlaps"]}
        # NAME=1: a variable goes in front of the launch, and not into the file
        is_variable = option["mark"] == "="
        settings.append(Setting(name=option["name"], path=path, values=values, read_only=is_variable, **facts))
    return settings


def serving_tree(path: Path) -> dict[str, Any] | None:
    """The tree of a file that is a plan of serving; None for another one. Raises ConfigError."""
    tree = parse_yaml(read_text(path, "plan", most=_MOST_BYTES), "plan") if path.is_file() else None
    if not isinstance(tree, Mapping) or not ("server" in tree or "engines" in tree):
        return None
    check = Problems()
    for name, entries in tree.items():
        if name not in (*_SECTIONS, "tool", "unread"):
            check.add(f"plan.{name}", "is no section of a plan of serving", way_out="take plan.yaml of serve-plan")
        elif name in _SECTIONS and not isinstance(entries, Mapping):
            check.add(f"plan.{name}", "is no section of keys", value=entries)
    check.done()
    return {name: dict(tree.get(name) or {}) for name in _SECTIONS}


@dataclass(frozen=True)
class ServingFiles:
    """A plan of serving in files of a tool. plans: as the tool counts degrees, by the paths of files in a folder."""

    name: str
    tree: Mapping[str, Any]
    plans: Mapping[str, Plan]
    written: Mapping[str, Written]

    @classmethod
    def of(cls, name: str, tree: Mapping[str, Any], words: Sequence[str], source: str) -> ServingFiles:
        """Write a plan with words over it. Raises ConfigError for a tool that serves nothing, and for other words."""
        tool, facts, tree = serving_tool("to", name), serving_facts()[name], with_words(tree, words)
        head = f"{tool.title}: settings for {source}, by python -m dse settings export; names as of {tool.version}"
        roles, (file,) = _APART if tree["engines"].get("apart") else ("",), tool.files
        plans, written = dict[str, Plan](), dict[str, Written]()
        for role in roles:
            path = f"{role}/{file.name}" if role else file.name
            plans[path] = _of_engine(tree, role, _of_all_ranks(name))
            part = write(file, plans[path], head, _model(plans[path]))
            written[path] = Written(part.text + (facts.apart.text(role) if role else ""), part.rows, part.unsaid)
        return cls(name, tree, plans, written)

    def lines(self) -> Iterator[str]:
        """Yield the engines to start, and what has no setting."""
        facts, engines, variables = serving_facts()[self.name], self.tree["engines"], self._variables()
        front = "".join(f"{name}={value} " for name, value in variables.values())
        for path, plan in self.plans.items():
            count = engines.get("prefill_replicas" if path.startswith("prefill/") else "replicas")
            engine_text = f"{count or 'as many as the GPUs allow'}, of {_gpus(plan)} GPUs each"
            yield f"engines: {engine_text}: {front}{facts.launch.format(file=path)}"
        software = self.tree["server"].get("name") or self.name
        if software != self.name:
            yield f"the plan is of {software}; to predict this software, add server={self.name} to its command"
        unsaid = frozenset.intersection(*(part.unsaid for part in self.written.values()))
        title, by_itself = tools()[self.name].name, _usual_scheduler(self.name)
        for path in sorted(unsaid - {"parallel.ep", *variables}):
            value = get_path(next(iter(self.plans.values())), path)
            if str(value).lower() == str(usual(path)).lower():
                continue  # what engines do by themselves
            # formats of weights come with the checkpoint
            if path in _OF_CHECKPOINT:
                yield f"{title} needs no setting for {path} = {value} with a checkpoint in {value}"
            elif value == by_itself.get(path):
                yield f"{title} needs no setting for {path} = {value}: it is modelled so (conf/server)"
            else:
                yield f"{title} has no setting for {path} = {value}"
        overlap = engines.get("overlap", "waited")
        if overlap not in ("waited", *_OVERLAPS):
            yield f"{title} has no setting for engines.overlap = {overlap}"

    def _variables(self) -> dict[str, tuple[str, Any]]:
        """Knobs of the plan that a variable of the environment says, with its name and value."""
        plan = next(iter(self.plans.values()))
        settings = [setting for setting in overlap_settings(self.name) if setting.read_only]
        chosen = ((setting, setting.values.get(get_path(plan, setting.path))) for setting in settings)
        return {setting.path: (setting.name, value) for setting, value in chosen if value is not None}


def _usual_scheduler(name: str) -> dict[str, Any]:
    """Knobs of the scheduler of a serving software as it comes, by path."""
    file = option_file("server", name)
    entries = {} if file is None else load_yaml(file)["scheduler"]
    return {f"server.scheduler.{key}": value for key, value in entries.items()}


def _of_all_ranks(name: str) -> tuple[str, ...]:
    """Knobs of the scheduler, by path, that a software counts over all ranks of attention, and a plan by rank."""
    file = option_file("server", name)
    return () if file is None else tuple(load_yaml(file).get("of_all_ranks", ()))


def _of_engine(tree: Mapping[str, Any], role: str, of_all_ranks: Sequence[str]) -> dict[str, Any]:
    """The plan of the engines of a role: degrees, formats, overlap and scheduler, as the software counts them."""
    engines, plan = tree["engines"], {name: dict(tree[name]) for name in ("parallel", "run")}
    if role == "prefill" and engines.get("prefill_tp"):
        # engines of prompts may have another tp; experts then spread over its GPUs
        parallel, tp = plan["parallel"], int(engines["prefill_tp"])
        spread = {"ep": tp * int(parallel.get("dp") or 1)} if int(parallel.get("ep") or 1) > 1 else {}
        plan["parallel"] = {**parallel, "tp": tp, **spread}
    if engines.get("overlap") in _OVERLAPS:
        put_in(plan, *_OVERLAPS[engines["overlap"]])
    plan["server"] = {"scheduler": dict(tree["server"].get("scheduler") or {})}
    ranks = int(plan["parallel"].get("dp") or 1)
    for path in of_all_ranks:
        if (of_rank := get_path(plan, path)) is not None:
            put_in(plan, path, int(of_rank) * ranks)
    return plan


@dataclass(frozen=True)
class ServingSettings:
    """A plan of serving that settings say. unmodelled: settings that change it all the same; unread: others."""

    plan: Mapping[str, Any]
    unread: Sequence[str]
    unmodelled: Sequence[str]


def read_serving(name: str, path: Path, words: Sequence[str], launch: int) -> ServingSettings:
    """The plan of serving of a file, of a launch script, or of a folder that `export` wrote. Raises ConfigError."""
    tool, facts = serving_tool("from", name), serving_facts()[name]
    # export writes engines that are apart into a folder for each role
    apart = path.is_dir() and all((path / role).is_dir() for role in _APART)
    places = [path / role for role in _APART] if apart else [path]
    texts = [texts_of(tool, place, launch) for place in places]
    parts = [read(text, with_words({}, words), launch=launch) for text in texts]
    # engines that generate decide the common plan: they come last
    sections = {section: dict(entries) for section, entries in parts[-1].plan.items()}
    engines: dict[str, Any] = {"apart": apart}
    if apart:
        # the one degree that may differ between roles
        engines["prefill_tp"] = get_path(parts[0].plan, "parallel.tp")
    knobs = sorted({knob for knob, _ in _OVERLAPS.values()})
    # knobs of a step become an overlap of `engines`
    values = {knob: sections.get("parallel", {}).pop(knob.partition(".")[2], None) for knob in knobs}
    engines["overlap"] = next((name for name, (knob, value) in _OVERLAPS.items() if values[knob] == value), "waited")
    ranks = int(sections.get("parallel", {}).get("dp") or 1) if _splits_attention(texts[-1], launch) else 1
    typed = {word.partition("=")[0] for word in words}  # as a plan counts
    for knob in _of_all_ranks(name):
        if knob not in typed and (of_all := get_path(sections, knob)) is not None:
            put_in(sections, knob, max(1, int(of_all) // ranks))
    server = {"name": name, "scheduler": sections.pop("server", {}).get("scheduler", {})}
    # engines run batches of many sizes: schedules of one size mean nothing there
    sites = [f"sites.{site} (of a step of one size)" for site in sections.pop("sites", {})]
    roles = {plain for role in _APART for plain in (key.partition(".")[0] for key in getattr(facts.apart, role))}
    # settings that `EnginesApart` writes are known, though no knob has them
    unread = [text for part in parts for text in part.unread if not apart or _section(text) not in roles]
    changing = {setting.lstrip("-").replace("_", "-") for setting in tool.unmodelled}
    unmodelled = [text for text in unread if _section(text).lstrip("-").replace("_", "-") in changing]
    meaningless = [text for text in unread if text not in unmodelled]
    unmodelled += [*sites, *(text for part in parts for text in part.unmodelled)]
    return ServingSettings({**sections, "server": server, "engines": engines}, meaningless, unmodelled)


def _splits_attention(texts: Sequence[tuple[SettingsFile, str]], launch: int) -> bool:
    """Whether ranks of attention share an engine; ranks that are engines by themselves have limits of their own."""
    settings = (entry for file, text in texts for entry in settings_of(file, text, launch))
    return any(
        setting is not None and (setting.fact or "").startswith("attention_dp") and str(value).lower() != "false"
        for _, value, setting in settings
    )


def _section(setting: str) -> str:
    """Name of a setting, or of the section that it is in."""
    return setting.split(" ")[0].split(".")[0]
