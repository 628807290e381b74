"""The study of a Python function, written as a user would write it: a study and a simulator in a folder."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

import yaml

from dse.errors import ConfigError, Problem, Problems
from dse.errors.parsing import parse_yaml
from dse.files import atomic_replacement
from dse.values.units import unit_of, with_prefix

_GROUPS = ("system", "workload", "schedule")  # of the shipped configuration, which a function has none of
_GOALS = ("minimize", "maximize")
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True)
class FunctionStudy:
    """A function and what is asked of it; see `dse.optimise`."""

    function: Callable[..., Any]
    space: Mapping[str, Any]
    objectives: Mapping[str, str | None]
    files: Sequence[str | Path] = ()
    name: str = ""

    @property
    def study(self) -> str:
        """Name of the study. Raises ConfigError for a function without a name, such as a lambda."""
        name = self.name or getattr(self.function, "__name__", "")
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,80}", name):
            raise ConfigError([Problem("name", "is no name of a study", name or None, "give one: name='mine'")])
        return name

    def write(self, root: Path) -> Path:
        """Write the configuration below a folder; the folder of the configuration. Raises ConfigError."""
        self._check()
        folder = root / self.study
        texts = {"study": f"# @package _global_\n{_text(self._study_tree())}"}
        texts["simulator"] = _text(self._simulator_tree())
        for group, text in texts.items():
            path = folder / group / f"{self.study}.yaml"
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_replacement(path) as scratch:
                scratch.write_text(text, encoding="utf-8")
        return folder

    def _check(self) -> None:
        check = Problems()
        if not self._knobs:
            check.add("space", "has no argument to search", way_out="give one several values: {'x': (0.0, 1.0)}")
        if not self._goals:
            check.add("objectives", "has no goal", way_out="name what the function returns: {'loss': 'minimize'}")
        for name, goal in self.objectives.items():
            if goal not in (*_GOALS, None):
                check.add(f"objectives.{name}", "is no goal", value=goal, way_out=f"write {' or '.join(_GOALS)}")
        for name in self._unfilled:
            check.add(f"space.{name}", "is missing: the function takes it", way_out=f"give it: {{'{name}': 1}}")
        check.done()

    @property
    def _unfilled(self) -> list[str]:
        """Arguments without a default that `space` does not give; none where the function does not tell its own."""
        try:
            parameters = inspect.signature(self.function).parameters.values()
        except (TypeError, ValueError):  # of a built-in one
            return []
        needed = [entry.name for entry in parameters if entry.default is entry.empty and entry.kind in _BY_NAME]
        return [name for name in needed if name not in self.space]

    @property
    def _goals(self) -> dict[str, str]:
        return {name: goal for name, goal in self.objectives.items() if goal is not None}

    @property
    def _knobs(self) -> dict[str, tuple[Any, Any]]:
        """First value and all values of the searched arguments. Raises ConfigError."""
        searched = {name: values for name, values in self.space.items() if not _is_fixed(values)}
        return {name: _values(f"space.{name}", values) for name, values in searched.items()}

    def _study_tree(self) -> dict[str, Any]:
        choices = self._knobs
        goals = " and ".join(f"{goal} {name}" for name, goal in self._goals.items())
        shown = [*(f"arguments.{name}" for name in choices), *self.objectives]
        study = {
            "name": self.study,
            "question": f"Which arguments of {self.study} {goals}?",
            "module": "plain",
            "objectives": list(self._goals),
            "baseline": {},
            "summary": shown,
        }
        return {
            "defaults": [{f"override /{group}": None} for group in _GROUPS] + [{"override /simulator": self.study}],
            "study": study,
            "arguments": {
                name: choices[name][0] if name in choices else _plain(value) for name, value in self.space.items()
            },
            "space": {"arguments": {name: values for name, (_, values) in choices.items()}},
        }

    def _simulator_tree(self) -> dict[str, Any]:
        measures = {
            name: {
                "unit": with_prefix(1.0, unit_of(name)).partition(" ")[2] if unit_of(name) else "",
                "meaning": name,
                "goal": goal or _GOALS[0],
                "low": None,
                "high": None,
            }
            for name, goal in self.objectives.items()
        }
        folder, reference = _reference(self.function)
        settings = {"function": reference, "folder": str(folder), "files": [str(file) for file in self.files]}
        text = f"the Python function {reference}"
        return {"name": self.study, "description": text, "backend": "function", **settings, "metrics": measures}


def _reference(function: Callable[..., Any]) -> tuple[Path, str]:
    """The folder that a function's module is imported from, and `module:qualified.name`.

    A function is never stored itself: what is read back is code in a file that its owner can see. Raises ConfigError
    for a function that no file has, and where its module is still being imported.
    """
    name, module = getattr(function, "__qualname__", ""), inspect.getmodule(function)
    file = Path(getattr(module, "__file__", None) or "")
    if not name or "<" in name or file.suffix != ".py" or not file.is_file():
        way = "write it at the top level of a file (%%writefile in a notebook), and import it from there"
        raise ConfigError([Problem("function", "is not in a file that workers could import", name or None, way)])
    if getattr(getattr(module, "__spec__", None), "_initializing", False):
        way = 'call it under `if __name__ == "__main__":`'
        raise ConfigError([Problem("function", "is in a module that calls dse.optimise when imported", name, way)])
    if getattr(module, "__name__", "") == "__main__" and getattr(module, "__spec__", None) is None:
        return file.parent.resolve(), f"{file.stem}:{name}"  # a script
    path = module.__spec__.name if module and module.__spec__ else file.stem
    levels = path.count(".") + (file.name == "__init__.py")
    return file.resolve().parents[levels], f"{path}:{name}"


def _is_fixed(value: Any) -> bool:
    """Return whether an argument has a single value."""
    return isinstance(value, Real) or (isinstance(value, str) and "(" not in value)


def _values(path: str, values: Any) -> tuple[Any, Any]:
    """The first value of a knob, and all of them as configuration writes them. Raises ConfigError.

    A tuple of two numbers is an interval, a list or a range its values, a text a sweep of the command line.
    """
    if isinstance(values, range):
        values = list(values)
    if isinstance(values, tuple) and len(values) == 2:
        low, high = map(_plain, values)
        return low, f"interval({low!r},{high!r})"
    if isinstance(values, list) and values:
        plain = [_plain(value) for value in values]
        return plain[0], plain
    if isinstance(values, str) and (match := re.search(r"\((-?[\w.+-]+)", values)):
        return parse_yaml(match[1].removeprefix("interval("), path), values
    rule = "must be a value, a list of values, a range, (low, high) or a sweep of the command line"
    raise ConfigError([Problem(path, rule, values, "write [1, 2, 4], range(8), (0.0, 1.0) or 'range(0,1,0.1)'")])


def _plain(value: Any) -> Any:
    item = getattr(value, "item", None)  # of a number of NumPy
    return item() if callable(item) else value


def _text(tree: Mapping[str, Any]) -> str:
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
