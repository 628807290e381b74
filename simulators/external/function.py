"""A Python function as a simulator: arguments in, metrics out, called in worker processes.

The configuration names the function by the folder, the module and its name, never by stored code. The files of its
module, and of the modules of the same folder that it imports, are part of every key.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import operator
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field

from dse.backend import Batch, Result, Results, Tree
from dse.errors import ConfigError, Problem, Problems, validate_as
from dse.files import open_plain_file
from dse.values import Frozen
from simulators.external.outcome import judge_answer
from simulators.external.program import Measure
from simulators.external.sections import SectionsBackend, relations

_MOST_BYTES = 1 << 32
_ARGUMENTS = "arguments"  # section of the design
_REFERENCE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


class FunctionSettings(Frozen):
    """The `simulator` group of a function.

    function: `module:name`. folder: from which the module is imported. metrics: those that it returns. files: files
    whose contents its answers depend on, besides its own modules.
    """

    function: Annotated[str, Field(pattern=f"^{_REFERENCE.pattern}$")]
    folder: str
    metrics: Annotated[Mapping[str, Measure], Field(min_length=1)]
    files: tuple[str, ...] = ()


class FunctionBackend(SectionsBackend):
    """A function as a backend; parameters: those of `FunctionSettings`. Raises ConfigError."""

    is_isolated = True

    def __init__(self, **parameters: Any) -> None:
        self._settings = validate_as(FunctionSettings, parameters, path="simulator")
        self._module, _, self._name = self._settings.function.partition(":")
        self.metrics = {name: measure.metric() for name, measure in self._settings.metrics.items()}
        self.relations = dict(relations(self.metrics))

    @cached_property
    def version(self) -> str:  # type: ignore[override] # files are read when it is asked for
        """Hash of all that answers depend on. Raises ConfigError for a file that is absent."""
        total = hashlib.blake2b(self._settings.function.encode(), digest_size=6)
        for content in _module_texts(Path(self._settings.folder), self._module):
            total.update(hashlib.blake2b(content).digest())
        for name in self._settings.files:
            with open_plain_file(Path(name), "simulator.files", most=_MOST_BYTES) as file:
                total.update(hashlib.file_digest(file, "blake2b").digest())
        return total.hexdigest()

    @cached_property
    def _function(self) -> Callable[..., Any]:
        if self._settings.folder not in sys.path:
            sys.path.insert(0, self._settings.folder)
        try:
            function: Callable[..., Any] = operator.attrgetter(self._name)(importlib.import_module(self._module))
        except ConfigError:
            raise
        except Exception as error:  # modules raise whatever they raise
            rule = f"cannot be imported: {type(error).__name__}: {error}"
            raise ConfigError([Problem("simulator.function", rule, self._settings.function)]) from error
        return function

    def sections(self, tree: Tree) -> None:
        """Check that the arguments are a section, and the only one besides `scenarios`."""
        super().sections(tree)
        check = Problems()
        for name in set(tree) - {_ARGUMENTS, "scenarios"}:
            check.add(name, "is no section of a function", way_out=f"put values below {_ARGUMENTS}")
        check.done()

    def takes_long(self, design: BaseModel) -> bool:
        """Return True: each call is recorded by itself."""
        return True

    def evaluate(self, batches: Sequence[Batch]) -> list[Results]:
        """Call the function once per design."""
        return [Results.of([self._call(design) for design in batch.designs()]) for batch in batches]

    def _call(self, design: BaseModel) -> Result:
        returned = self._function(**getattr(design, _ARGUMENTS))
        content = returned if isinstance(returned, Mapping) else {next(iter(self.metrics)): returned}
        return judge_answer({str(name): _plain(value) for name, value in content.items()}, self.metrics)


def _plain(value: Any) -> Any:
    """Convert a number of NumPy or of an array library to one of Python."""
    item = getattr(value, "item", None)
    return item() if callable(item) else value


def _module_texts(folder: Path, module: str) -> Iterator[bytes]:
    """Yield the files of a module and of those below the same folder that it imports, anywhere in its text, in order.

    Raises ConfigError where the module has no file.
    """
    pending, texts = [module], dict[Path, bytes]()
    while pending:
        name = pending.pop()
        pending += [name.rpartition(".")[0]] if "." in name else []  # packages are imported before their modules
        path = _file_of(folder, name)
        if path is None or path in texts:
            continue
        with open_plain_file(path, "simulator.function", most=_MOST_BYTES) as file:
            texts[path] = file.read()
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        pending += _imports(texts[path], package)
    if not texts:
        way = "call dse.optimise again"
        raise ConfigError([Problem("simulator.function", f"names a module that is not below {folder}", module, way)])
    yield from (texts[path] for path in sorted(texts))


def _file_of(folder: Path, module: str) -> Path | None:
    place = folder.joinpath(*module.split("."))
    return next((path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file()), None)


def _imports(text: bytes, package: str) -> Iterator[str]:
    """Yield the names that may be modules in the import statements of a text. Nothing for one that is no Python."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return  # importing it raises the same, with its line
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level <= package.count(".") + bool(package):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            yield from (base, *(f"{base}.{alias.name}" for alias in node.names if alias.name != "*"))
