"""A Python function as a simulator: arguments in, metrics out, called in worker processes.

The function is pickled into a file, by value where no module can be imported that has it (scripts, notebooks). What
its answers depend on is part of every key: its code, the values and functions that it refers to, and the files of the
modules that it names, unless they are libraries.
"""

from __future__ import annotations

import hashlib
import inspect
import pickle
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Annotated, Any

from joblib import wrap_non_picklable_objects
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


class FunctionSettings(Frozen):
    """The `simulator` group of a function. function: the file that it is pickled in. metrics: metrics that it returns.

    files: files whose contents its answers depend on, besides its own.
    """

    function: str
    metrics: Annotated[Mapping[str, Measure], Field(min_length=1)]
    files: tuple[str, ...] = ()


class FunctionBackend(SectionsBackend):
    """A function as a backend; parameters: those of `FunctionSettings`. Raises ConfigError."""

    is_isolated = True

    def __init__(self, **parameters: Any) -> None:
        self._settings = validate_as(FunctionSettings, parameters, path="simulator")
        self.metrics = {name: measure.metric() for name, measure in self._settings.metrics.items()}
        self.relations = dict(relations(self.metrics))

    @property
    def program(self) -> tuple[str, ...]:
        """The file of the function: somebody else's is not loaded unasked."""
        return (self._settings.function,)

    @cached_property
    def _function(self) -> Callable[..., Any]:
        try:
            with open_plain_file(Path(self._settings.function), "simulator.function", most=_MOST_BYTES) as file:
                function: Callable[..., Any] = pickle.load(file)
        except ConfigError:
            raise
        except Exception as error:  # modules that it needs may raise whatever they raise
            rule = f"cannot be loaded: {type(error).__name__}: {error}"
            way = "call dse.optimise again, in a folder from which its modules can be imported"
            raise ConfigError([Problem("simulator.function", rule, self._settings.function, way)]) from error
        return function

    @cached_property
    def version(self) -> str:  # type: ignore[override] # known once the function is loaded
        """Hash of all that answers depend on."""
        return content_hash(self._function, self._settings.files)

    def sections(self, tree: Tree) -> None:
        """Check that the arguments are a section, and the only one besides `scenarios`."""
        super().sections(tree)
        check = Problems()
        for name in set(tree) - {_ARGUMENTS, "scenarios"}:
            check.add(name, "is no section of a function", way_out=f"put values below {_ARGUMENTS}")
        check.done()

    def takes_long(self, design: BaseModel) -> bool:
        """True: each call is recorded by itself."""
        return True

    def evaluate(self, batches: Sequence[Batch]) -> list[Results]:
        """Call the function once per design."""
        return [Results.of([self._call(design) for design in batch.designs()]) for batch in batches]

    def _call(self, design: BaseModel) -> Result:
        returned = self._function(**getattr(design, _ARGUMENTS))
        content = returned if isinstance(returned, Mapping) else {next(iter(self.metrics)): returned}
        return judge_answer({str(name): _plain(value) for name, value in content.items()}, self.metrics)


def _plain(value: Any) -> Any:
    """A number of NumPy or an array library as one of Python."""
    item = getattr(value, "item", None)
    return item() if callable(item) else value


def content_hash(function: Callable[..., Any], files: Sequence[str] = ()) -> str:
    """Hash of what the answers of a function depend on. files: further ones. Raises ConfigError for absent ones."""
    total = hashlib.blake2b(digest_size=6)
    for part in _parts(function, []):
        total.update(part + b"\0")
    for name in files:
        with open_plain_file(Path(name), "simulator.files", most=_MOST_BYTES) as file:
            total.update(hashlib.file_digest(file, "blake2b").digest())
    return total.hexdigest()


def _parts(value: Any, known: list[Any]) -> Iterator[bytes]:
    """Yield texts that are equal for equal values. known: functions and classes that were met before."""
    if isinstance(value, FunctionType | type):
        if any(value is other for other in known):
            return
        known.append(value)
        yield f"{value.__module__}.{value.__qualname__}".encode()
        yield from _file(inspect.getmodule(value))
        if isinstance(value, FunctionType):
            yield from _function_parts(value, known)
        elif value.__module__ == "__main__":
            for name, member in sorted(vars(value).items()):
                yield name.encode()
                yield from _parts(member, known) if isinstance(member, FunctionType) else ()
    elif isinstance(value, ModuleType):
        yield value.__name__.encode()
        yield from _file(value)
    else:
        yield from _parts(type(value), known)
        yield pickle.dumps(wrap_non_picklable_objects(value, keep_wrapper=False))


def _function_parts(function: FunctionType, known: list[Any]) -> Iterator[bytes]:
    yield from _code_parts(function.__code__)
    for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield from _parts(value, known)
    for cell in function.__closure__ or ():
        yield from _parts(cell.cell_contents, known)
    for name in sorted(_names(function.__code__) & set(function.__globals__)):
        yield name.encode()
        yield from _parts(function.__globals__[name], known)


def _code_parts(code: CodeType) -> Iterator[bytes]:
    """Yield what a code object does, without where it stands in a file."""
    yield code.co_code
    yield repr((code.co_names, code.co_varnames)).encode()
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _code_parts(constant)
        else:  # sets have no order
            yield repr(sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant).encode()


def _names(code: CodeType) -> set[str]:
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _file(module: ModuleType | None) -> Iterator[bytes]:
    """Yield a hash of the file of a module, unless it is a script, a notebook or a library."""
    path = getattr(module, "__file__", None)
    if module is None or module.__name__ == "__main__" or path is None or not Path(path).is_file():
        return
    if not any(Path(path).is_relative_to(place) for place in sysconfig.get_paths().values()):
        yield hashlib.blake2b(Path(path).read_bytes()).digest()
