"""Reference pages of the documentation, made from the code: fields, options, commands, metrics, models, machines.

`pages()` maps the path of each page below `docs/` to its Markdown. Every field is a field of a pydantic model: its unit
is in its name, its range in its annotation, its meaning in the docstring of its model.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from dse import plugins
from dse.backend import Metric
from dse.config.compose import request
from dse.config.options import conf_dir, list_options
from dse.space import get_path
from dse.study.settings import Settings
from dse.values import LABELS
from dse.values.units import quantity_text
from simulators.hardware.machine import System, tree_of

ROOT = Path(__file__).parents[1]
EXAMPLE = "mi300x_8"
"""Machine whose values the page of hardware shows."""
_UNITS = {"_bytes_per_s": "B/s", "_flop_per_s": "FLOP/s", "_bytes": "B", "_flop": "FLOP", "_s": "s", "_w": "W"}
_UNITS |= {"_bytes_per_s_per_cu": "B/s per CU", "_flop_per_s_per_cu": "FLOP/s per CU"}
_BOUNDS = {"ge": "≥ {}", "gt": "> {}", "le": "≤ {}", "lt": "< {}"}
_DESIGNS = {
    "schedules": ("Schedules", "Fields of `schedule`, for each family of schedules.", "schedule"),
    "iterations": ("Iterations", "Fields of whole training and inference iterations (`simulator=step`).", ""),
    "caches": ("Caches and DRAM", "Fields of applications and cache policies (`simulator=memory`).", ""),
    "workloads": (
        "Workloads",
        "Fields of a `workload` file: GEMMs, DAGs of operators, or queues of GEMMs.",
        "workload",
    ),
    "program": ("Programs", "Fields of `simulator` of a program of your own (`defaults: [external]`).", "simulator"),
}

_MODELS = {
    "costs": ("Costs of operators, transfers and collectives", ("simulators.costs", "simulators.hardware")),
    "schedules": ("Schedules and their bounds", ("search_spaces",)),
    "engines": ("Task graphs and engines", ("simulators.taskgraph", "simulators.engines", "simulators.overlap")),
    "iterations": ("Whole iterations", ("simulators.steps",)),
    "memory": ("Caches and DRAM", ("dse_memory",)),
    "search": ("Search methods", ("dse.search",)),
}
"""Page of equations -> its title, and the packages whose modules it lists."""


def pages() -> dict[str, str]:
    """All pages: path below `docs/` -> Markdown."""
    return {path: make() for path, make in makers().items()}


def makers() -> dict[str, Callable[[], str]]:
    """Path of each page below `docs/` -> what writes it; without those of a plug-in that is not installed."""
    absent = () if plugins.places("dse_memory") else ("caches", "memory")
    return {
        "reference/fields/settings.md": settings,
        "reference/fields/hardware.md": hardware,
        **{f"reference/fields/{name}.md": functools.partial(design, name) for name in _DESIGNS if name not in absent},
        "reference/options.md": options,
        "reference/commands.md": commands,
        "reference/metrics.md": metrics,
        **{f"reference/models/{name}.md": functools.partial(models, name) for name in _MODELS if name not in absent},
        "reference/machines/index.md": machines,
        **{f"reference/machines/{name}.md": functools.partial(machine, name) for name in list_options("system")},
    }


def settings() -> str:
    """Page of everything that is not the design."""
    head = "# Settings\n\nFields that say how a study runs: what is searched, where results go, what is drawn. "
    head += "The default is that of `study=ficco_sweep`.\n"
    tree = request(["study=ficco_sweep"]).tree
    return "\n".join([head, *_sections(Settings, "", defaults=tree)])


def hardware() -> str:
    """Page of the fields of a machine, with the values of one."""
    head = (
        "# Hardware\n\nFields of a machine (`system.`): a GPU, its node and the fabric. A field without a value is a "
    )
    head += f"part that the machine lacks, or of which nothing is known. The last column shows `{EXAMPLE}`, with the "
    head += "provenance of the value; [the machines](../machines/index.md) show the source of every constant.\n"
    known = System.model_validate(tree_of(EXAMPLE)).facts()
    values = {path: f"{_value(value, path)} ({provenance})" for path, value, provenance, _ in known}
    return "\n".join([head, *_sections(System, "system", values=values)])


def models(name: str) -> str:
    """Page of the equations of some packages: the docstring of each module that has more than a sentence."""
    title, packages = _MODELS[name]
    parts = [f"# {title}\n\nEquations, their sources and what they leave out, from the docstrings of the modules.\n"]
    for package in packages:
        root = plugins.places(package.partition(".")[0])[0].parent
        for path in sorted(root.joinpath(*package.split(".")).rglob("*.py")):
            text = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
            if "\n\n" in text:
                module = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
                parts.append(f"## {module} {{ #{module} }}\n\n{text}\n")
    return "\n".join(parts)


def design(name: str) -> str:
    """Page of the fields of one kind of design."""
    title, text, path = _DESIGNS[name]
    parts = [f"# {title}\n\n{text}\n"]
    for kind in _kinds(name):
        parts += _sections(kind, path)
    return "\n".join(parts)


def _kinds(name: str) -> Sequence[type[BaseModel]]:
    """Models whose fields a page lists."""
    if name == "caches":
        from dse_memory.design import MemoryDesign

        return [MemoryDesign]
    from simulators.external.program import ExternalProgram
    from simulators.steps.design import StepDesign
    from simulators.workloads.operators import DagList, QueueList, ShapeList

    families = [kind for kind in plugins.available("schedule").values() if issubclass(kind, BaseModel)]
    kinds: Mapping[str, Sequence[type[BaseModel]]] = {
        "schedules": families,
        "iterations": [StepDesign],
        "workloads": [ShapeList, DagList, QueueList],
        "program": [ExternalProgram],
    }
    return kinds[name]


def _sections(
    kind: type[BaseModel],
    path: str,
    *,
    defaults: Mapping[str, Any] | None = None,
    values: Mapping[str, str] | None = None,
) -> Iterator[str]:
    """Yield the section of a model, and one for each model below it that has not been described."""
    seen, waiting = set[type[BaseModel]](), [(kind, path)]
    while waiting:
        model, place = waiting.pop(0)
        if model in seen or (issubclass(model, System) and path != "system"):
            continue  # which have a page of their own
        seen.add(model)
        yield from _section(model, place, defaults=defaults, values=values)
        for name in (name for name in model.model_fields if name not in LABELS):
            inner = _models(model.model_fields[name].annotation)
            waiting += [(kind, f"{place}.{name}".lstrip(".")) for kind in inner]


def _section(
    model: type[BaseModel], path: str, *, defaults: Mapping[str, Any] | None, values: Mapping[str, str] | None
) -> Iterator[str]:
    """Yield the lines of one model: its docstring, and a table of its fields."""
    fields = {name: info for name, info in model.model_fields.items() if name not in LABELS}
    if not fields:
        return
    texts, rest = dict[str, str](), ""
    for kind in reversed(model.__mro__):
        if issubclass(kind, BaseModel) and kind.__doc__ and kind.__module__.partition(".")[0] in plugins.roots():
            meanings, rest = _meanings(inspect.cleandoc(kind.__doc__), fields)
            texts |= meanings
    heading = f"`{path}`" if path else "Top level"
    yield f"## {heading} ({model.__name__})\n\n{_prose(rest)}\n"
    last = f" `{EXAMPLE}` |" if values is not None else ""
    yield f"| field | meaning | unit | values | default |{last}"
    yield f"|---|---|---|---|---|{'---|' if last else ''}"
    for name, info in fields.items():
        below = f"{path}.{name}".lstrip(".")
        cells = [f"`{name}`", texts.get(name, ""), _unit(name), _values(info), _default(info, below, defaults)]
        cells += [_shown(below, values)] if values is not None else []
        yield f"| {' | '.join(_cell(cell) for cell in cells)} |"
    yield ""


def _shown(path: str, values: Mapping[str, str]) -> str:
    """Value of a field on the machine that is shown; of a part or a mapping, how many values it has."""
    if path in values:
        return values[path]
    below = [name for name in values if name.startswith(f"{path}.")]
    return f"{len(below)} values" if below else ""


def _meanings(text: str, fields: Mapping[str, Any]) -> tuple[dict[str, str], str]:
    """Split a docstring into the meaning of each field that it describes as `name: text`, and what is left.

    >>> _meanings("A node. num_gpus: GPUs of it. link_s, port_s: latencies.", ["num_gpus", "link_s", "port_s"])
    ({'num_gpus': 'GPUs of it.', 'link_s': 'latencies.', 'port_s': 'latencies.'}, 'A node.')
    """
    text = re.sub(r"(?<!\n)\n(?!\n) *", " ", text)
    name = "|".join(sorted(map(re.escape, fields), key=len, reverse=True)) or "(?!)"
    names = rf"(?:(?:{name})(?:, (?:and )?| and )?)+"
    marks = list(re.finditer(rf"(?:(?<=[\s.;])|^)({names})((?: \([^()]*\))?): ", text))
    meanings = dict[str, str]()
    for mark, following in itertools.zip_longest(marks, marks[1:]):
        end = following.start() if following else len(text)
        told = text[mark.end() : end].partition("\n\n")[0].strip(" ;")
        for field in re.findall(rf"\b(?:{name})\b", mark[1]):
            meanings[field] = f"{mark[2].strip(' ()')}: {told}" if mark[2] else told
    rest = text[: marks[0].start()].strip() if marks else text
    for field, told in re.findall(rf"\b({name}) \(([^()]*)\)", rest):
        meanings.setdefault(field, told)
    return meanings, rest


def _unit(name: str) -> str:
    return next((unit for suffix, unit in _UNITS.items() if name.endswith(suffix) or name == suffix[1:]), "")


def _values(info: FieldInfo) -> str:
    """Legal values of a field, in words: its type, its choices and its range."""
    words = list(dict.fromkeys(_types(info.annotation)))
    items = [*info.metadata, *_metadata(info.annotation)]
    return ", ".join([" or ".join(words), *_bounds(items, ("ge", "gt"), max), *_bounds(items, ("le", "lt"), min)])


def _bounds(items: Sequence[object], names: Sequence[str], tightest: Callable[..., Any]) -> Iterator[str]:
    """Yield the tightest of the bounds of one side."""
    bounds = [(value, name) for item in items for name in names if (value := getattr(item, name, None)) is not None]
    if bounds:
        value, name = tightest(bounds)
        yield _BOUNDS[name].format(f"{value:,}" if isinstance(value, int) else f"{value:g}")


def _metadata(annotation: Any) -> Iterator[Any]:
    """Constraints anywhere in an annotation, but not those of the values of a mapping's models."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return
    if get_origin(annotation) is Annotated:
        for item in annotation.__metadata__:
            yield from item.metadata if isinstance(item, FieldInfo) else [item]
    for part in get_args(annotation):
        if not isinstance(part, (str, int, float, bool)):
            yield from _metadata(part)


def _types(annotation: Any) -> Iterator[str]:
    """Words for the types that an annotation allows."""
    origin = get_origin(annotation)
    if annotation is NoneType:
        return
    if origin is Annotated:
        yield from _types(get_args(annotation)[0])
    elif origin is Literal:
        yield ", ".join(f"`{value}`" for value in get_args(annotation))
    elif isinstance(origin, type) and issubclass(origin, Mapping):
        yield f"mapping of {' or '.join(_types(get_args(annotation)[1]))}"
    elif origin in (tuple, list, Sequence):
        inner = [part for part in get_args(annotation) if part is not Ellipsis]
        yield f"list of {' or '.join(dict.fromkeys(word for part in inner for word in _types(part)))}"
    elif get_args(annotation):
        for part in get_args(annotation):
            yield from _types(part)
    elif isinstance(annotation, type):
        yield _TYPES.get(annotation, annotation.__name__)


_TYPES = {int: "whole number", float: "number", str: "text", bool: "`true`, `false`"}


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)


def _default(info: FieldInfo, path: str, defaults: Mapping[str, Any] | None) -> str:
    """Default of a field: that of the composed configuration where there is one, else that of the model."""
    if defaults is not None:
        try:
            value = get_path(defaults, path)
        except (KeyError, TypeError):
            value = None
        if value is not None and not isinstance(value, Mapping):
            return f"`{_value(value, path)}`"
    if info.is_required():
        return "see below" if defaults is not None and any(_models(info.annotation)) else "required"
    default = info.get_default(call_default_factory=True)
    plain = default is None or isinstance(default, (str, bool, int, float, tuple))
    return "–" if default is None or default == () else f"`{_value(default, path)}`" if plain else "see below"


def _value(value: Any, path: str) -> str:
    """A value as a person reads it, in the unit of its field."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)) and math.isfinite(value):
        return quantity_text(value, path)
    if isinstance(value, (tuple, list)) and len(value) > 4:
        return f"{len(value)} entries"
    return ", ".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)


def _cell(text: str) -> str:
    """Text that stays in its cell of a table, and in which nothing is markup that was not meant."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def options() -> str:
    """Page of the groups of the configuration with their options."""
    parts = [
        "# Options of groups\n\n`<group>=<option>` on the command line; `python -m dse options` names the lists.\n"
    ]
    for group, title in plugins.declarations("GROUPS").items():
        parts += [f"## {title} (`{group}=`) {{ #{group} }}\n", "| option | |", "|---|---|"]
        parts += [f"| `{name}` | {_cell(text)} |" for name, text in list_options(group).items()]
        parts.append("")
    return "\n".join(parts)


def commands() -> str:
    """Page of the commands of the command line."""
    parts = ["# Commands\n\n`python -m dse run <study> ...` runs a study, as `study=<study>` does.\n"]
    for name, command in sorted(plugins.declarations("COMMANDS").items()):
        module, _, function = command.target.partition(":")
        told = inspect.getdoc(getattr(importlib.import_module(module), function)) or ""
        behind = re.sub(r"(?:Raises|Returns) [^.]*\.", "", told.partition("\n\n")[2]).strip()
        parts += [
            f"## {name}\n",
            f"```\npython -m dse {command.usage}\n```\n",
            f"{_prose(_sentence(command.description))}\n",
        ]
        parts += [f"{_prose(behind)}\n"] if behind else []
    return "\n".join(parts)


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith(('.', '?')) else '.'}"


def _prose(text: str) -> str:
    """Lines of a docstring as Markdown, in which `<name>` is no tag."""
    return re.sub(r"<(?=\w)", "&lt;", text)


def metrics() -> str:
    """Page of the metrics and relations of the backends."""
    head = "# Metrics\n\nColumns of `results.parquet`, by backend. A value outside its range makes a point `invalid`. "
    parts = [f"{head}Relations compare a point with its baseline.\n"]
    for name, kind in sorted(plugins.available("backend").items()):
        table = getattr(kind, "metrics", None)
        if isinstance(table, Mapping):
            version = f", version {kind.version}" if isinstance(getattr(kind, "version", None), str) else ""
            parts += [f"## {name}{version}\n", *_metric_table({**table, **getattr(kind, "relations", {})}), ""]
    return "\n".join(parts)


def _metric_table(table: Mapping[str, Metric]) -> Iterator[str]:
    yield "| metric | meaning | unit | goal | range |"
    yield "|---|---|---|---|---|"
    for name, metric in table.items():
        low = "–∞" if metric.low == -math.inf else f"{metric.low:g}"
        high = "∞" if metric.high == math.inf else f"{metric.high:g}"
        cells = (f"`{name}`", metric.meaning, metric.unit, metric.goal, f"{low} to {high}")
        yield f"| {' | '.join(_cell(cell) for cell in cells)} |"


def machines() -> str:
    """Page that lists the machines."""
    head = "# Machines\n\nEvery shipped machine. Its page lists each constant with its value, provenance and source; "
    parts = [f"{head}`python -m dse machine list` says which backends it serves.\n", "| system | |", "|---|---|"]
    parts += [f"| [`{name}`]({name}.md) | {_cell(text)} |" for name, text in list_options("system").items()]
    return "\n".join([*parts, ""])


def machine(name: str) -> str:
    """Page of one machine: every constant with its value, provenance and source."""
    shipped = System.model_validate(tree_of(name))
    head = f"# `{name}`\n\n{_sentence(shipped.description)} Choose it with `system={name}`; it is composed in "
    parts = [f"{head}`{conf_dir().name}/system/{name}.yaml`.\n", "| constant | value | provenance | source |"]
    parts += ["|---|---|---|---|"]
    for path, value, provenance, source in shipped.facts():
        cells = (f"`{path}`", _value(value, path), provenance, source)
        parts.append(f"| {' | '.join(_cell(cell) for cell in cells)} |")
    return "\n".join([*parts, ""])
