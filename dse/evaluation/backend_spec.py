"""A backend by name and parameters, and the designs that it refuses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dse import plugins
from dse.backend import Backend, complete
from dse.errors import ConfigError, Problem, Problems
from dse.store.contract import Context


@dataclass(frozen=True)
class BackendSpec:
    """A backend by name and parameters: what a worker process needs to make its own."""

    name: str
    parameters: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, simulator: object) -> BackendSpec:
        """From the `simulator` group: `backend` names it, the rest (but labels) are its parameters."""
        if not isinstance(simulator, Mapping):
            raise ConfigError([Problem("simulator", "is no section of keys", simulator, "choose one: simulator=event")])
        # labels change no result
        parameters = {key: value for key, value in simulator.items() if key not in ("name", "description", "backend")}
        # the order in a file means nothing
        return cls(str(simulator.get("backend")), tuple(sorted(parameters.items())))

    def make(self) -> Backend:
        """The backend, one per process. Raises ConfigError for unknown names or parameters."""
        return _make(self)

    @property
    def context(self) -> Context:
        """The part of this that results depend on: name, version with its code, parameters and metrics."""
        backend = self.make()
        return Context(self.name, self.version, repr(self.parameters), tuple(backend.metrics))

    @property
    def version(self) -> str:
        """Version of the backend, and the fingerprint of the code and the data that it runs on."""
        from dse.results.fingerprint import fingerprint  # commands that evaluate nothing need none

        module = plugins.target("backend", self.name).partition(":")[0]
        return f"{self.make().version}+code.{fingerprint(module)}"

    def __hash__(self) -> int:
        return hash(str(self))  # parameters may be lists


@plugins.cached_until_refresh
def _make(spec: BackendSpec) -> Backend:
    kind = complete(plugins.load("backend", spec.name))
    try:
        backend = kind(**dict(spec.parameters))
    except TypeError as error:  # a missing or an unknown keyword
        rule = f"does not fit backend {spec.name}: {error}"
        raise ConfigError([Problem("simulator", rule, dict(spec.parameters))]) from error
    return backend


def validate(backend: Backend, trees: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse base designs that are invalid or infeasible, all problems at once."""
    check = Problems()
    for tree in trees.values():
        try:
            check.found.extend(backend.problems(backend.design(tree)))
        except ConfigError as error:
            check.found.extend(error.problems)
    check.done()
