"""The study of a Python function, written as a user would write it: a study and a simulator in a folder."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

import yaml

from dse.errors import ConfigError, Problem, Problems
from dse.files import atomic_replacement
from dse.values.units import unit_of

_GROUPS = ("system", "workload", "schedule")  # of the shipped configuration, which a function has none of
_GOALS = ("minimize", "maximize")


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
        """Write the configuration and the pickled function below a folder; the folder of the configuration.

        Raises ConfigError.
        """
        self._check()
        folder = root / self.study
        pickled = folder / f"{self.study}.pickle"
        texts = {"study": f"# @package _global_\n{_text(self._study_tree())}"}
        texts["simulator"] = _text(self._simulator_tree(pickled))
        for group, text in texts.items():
            _write(folder / group / f"{self.study}.yaml", text.encode())
        _write(pickled, self._pickled())
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
        check.done()

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

    def _simulator_tree(self, pickled: Path) -> dict[str, Any]:
        measures = {
            name: {"unit": unit_of(name), "meaning": name, "goal": goal or _GOALS[0], "low": None, "high": None}
            for name, goal in self.objectives.items()
        }
        text = f"the Python function {getattr(self.function, '__qualname__', self.study)}"
        settings = {"function": str(pickled), "files": [str(file) for file in self.files], "metrics": measures}
        return {"name": self.study, "description": text, "backend": "function", **settings}

    def _pickled(self) -> bytes:
        from joblib import wrap_non_picklable_objects

        try:
            return pickle.dumps(wrap_non_picklable_objects(self.function, keep_wrapper=False))
        except Exception as error:  # objects that it refers to may raise whatever they raise
            rule = f"cannot be sent to worker processes: {type(error).__name__}: {error}"
            way = "make files and connections inside the function"
            raise ConfigError([Problem("function", rule, self.study, way)]) from error


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
        return yaml.safe_load(match[1].removeprefix("interval(")), values
    rule = "must be a value, a list of values, a range, (low, high) or a sweep of the command line"
    raise ConfigError([Problem(path, rule, values, "write [1, 2, 4], range(8), (0.0, 1.0) or 'range(0,1,0.1)'")])


def _plain(value: Any) -> Any:
    item = getattr(value, "item", None)  # of a number of NumPy
    return item() if callable(item) else value


def _text(tree: Mapping[str, Any]) -> str:
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)


def _write(path: Path, content: bytes) -> None:
    """Replace a file, whose folder is made where it is absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_replacement(path) as scratch:
        scratch.write_bytes(content)
